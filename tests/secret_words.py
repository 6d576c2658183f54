"""Finds what may not stand in a file that everybody reads: keys, canaries, addresses.

`found_in(text)` looks at the text itself, at what base64 and percent signs in it decode to, at packed bytes among that,
and at lists of byte values.
"""

from __future__ import annotations

import base64
import binascii
import gzip
import re
import zlib
from collections.abc import Iterator
from urllib.parse import unquote

from tests.canary import RECORD, VOTE

ALLOWED_HOSTS = frozenset({"provider.invalid"})
PATTERNS = {
    "OpenAI or Anthropic key": r"\bsk-[\w-]{6,}",
    "bearer token": r"\bbearer\b",
    "key header": r"\b(x-)?api[-_ ]?key\b|\bauthorization\b|\bcookie\b",
    "Hugging Face token": r"\bhf_\w{6,}",
    "AWS key": r"\b(AKIA|ASIA)[A-Z0-9]{8,}",
    "GitHub token": r"\b(gh[pousr]_|github_pat_)\w{8,}",
    "LangSmith key": r"\blsv2_\w{6,}",
    "signed token": r"\beyJ[\w-]{10,}",
    "private key": r"BEGIN [A-Z ]*PRIVATE KEY",
    "organisation or project": r"\b(org|proj)[-_][A-Za-z0-9]{8,}|(openai|anthropic)-(organization|project)",
    "request id": r"\breq_\w{6,}|\bx-request-id\b|\bcf-ray\b",
    "client": r"\buser-agent\b|\bx-stainless\b",
    "canary": f"{re.escape(RECORD)}|{re.escape(VOTE)}",
    "path of a machine": r"(?<![\w.])/(tmp|home|root|Users|work|var|opt)/",
    "address": r"\b\d{1,3}(\.\d{1,3}){3}\b|\blocalhost\b|\[::1\]",
}
_HOST = re.compile(r"\w+://([^/\s\"'<>`]+)")
_BASE64 = re.compile(r"[A-Za-z0-9+/_-]{12,}={0,2}")
_BYTES = re.compile(r"\[\s*(\d{1,3}(?:,\s*\d{1,3}){3,})\s*\]")
_SPELLED = {name: re.compile(pattern, re.IGNORECASE) for name, pattern in PATTERNS.items()}
_DEPTH = 3


def found_in(text: str) -> set[str]:
    """Returns the names of what is found, here or in what the text decodes to."""
    found: set[str] = set()
    for shown in _layers(text, _DEPTH):
        found |= {name for name, pattern in _SPELLED.items() if pattern.search(shown)}
        hosts = {host.rpartition("@")[2] for host in _HOST.findall(shown)}
        found |= {f"host {host}" for host in hosts if host not in ALLOWED_HOSTS}
    return found


def _layers(text: str, depth: int) -> Iterator[str]:
    yield text
    if depth == 0:
        return
    for inner in _decoded(text):
        yield from _layers(inner, depth - 1)


def _decoded(text: str) -> Iterator[str]:
    if (plain := unquote(text)) != text:
        yield plain
    for run in _BASE64.findall(text):
        body = run.rstrip("=").translate(str.maketrans("-_", "+/"))
        try:
            raw = base64.b64decode(body + "=" * (-len(body) % 4))
        except binascii.Error:
            continue
        yield from (unpacked.decode("utf-8", "ignore") for unpacked in _unpacked(raw))
    for values in _BYTES.findall(text):
        numbers = [int(value) for value in values.split(",")]
        if max(numbers) < 256:
            yield bytes(numbers).decode("utf-8", "ignore")


def _unpacked(raw: bytes) -> Iterator[bytes]:
    yield raw
    for unpack in (gzip.decompress, zlib.decompress):
        try:
            yield unpack(raw)
        except (OSError, EOFError, zlib.error):
            continue
