"""A server on this machine for observers that send what they record: it keeps every body, decoded."""

from __future__ import annotations

import gzip
import json
import threading
import zlib
from collections.abc import Mapping
from http.server import ThreadingHTTPServer
from typing import Any

from tests.canary import _Sink


class _Collector(_Sink):
    """Takes any request; a body may be chunked, and compressed."""

    answer: bytes

    def do_POST(self) -> None:  # noqa: N802  the server's name
        self.bodies.append(f"{self.path} {_decoded(self._body()).decode('utf-8', 'replace')}")
        self._answer(self.answer)

    do_GET = do_PUT = do_PATCH = do_DELETE = do_POST  # noqa: N815

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("transfer-encoding", ""):
            return self.rfile.read(int(self.headers.get("content-length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)


def _decoded(body: bytes) -> bytes:
    """Recognises the encoding by its first bytes, as some SDKs name none."""
    if body[:2] == b"\x1f\x8b":
        return gzip.decompress(body)
    if body[:1] == b"\x78" and int.from_bytes(body[:2]) % 31 == 0:
        return zlib.decompress(body)
    if body[:4] == b"\x28\xb5\x2f\xfd":
        import zstandard

        return zstandard.ZstdDecompressor().decompressobj().decompress(body)
    return body


def collector(answer: Mapping[str, Any] | None = None) -> tuple[str, list[str]]:
    """Returns the address of a new collector and the bodies that arrive there."""
    bodies: list[str] = []
    fixed = {"bodies": bodies, "answer": json.dumps(answer or {}).encode()}
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Collector", (_Collector,), fixed))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}", bodies
