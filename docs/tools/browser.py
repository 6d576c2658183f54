"""Headless Chromium for the checks of the site, over a pipe: no driver, no port, no package.

Chromium reads commands of its DevTools protocol from descriptor 3 and writes answers and events to descriptor 4, each
ended by a zero byte.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import functools
import http.server
import json
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
# Above all descriptors that Python opens by itself before the browser is started.
FREE_DESCRIPTOR = 20


def chromium() -> str | None:
    """The program: what the environment names as CHROMIUM, or the first that is installed."""
    return os.environ.get("CHROMIUM") or next((found for name in NAMES if (found := shutil.which(name))), None)


class _Silent(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Writes nothing."""


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serves a folder on this machine, and gives its address."""
    handler = functools.partial(_Silent, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


class Browser:
    """One page of a headless Chromium with an empty profile."""

    def __init__(self, program: str, *, patience: float = 60.0) -> None:
        """Starts it; `patience` is the most seconds that one command or page may take."""
        self._patience, self._number, self._session = patience, 0, None
        self._profile = tempfile.TemporaryDirectory(prefix="site-check-", ignore_cleanup_errors=True)
        theirs_in, ours_out = self._pipe()
        ours_in, theirs_out = self._pipe()
        self._process = os.posix_spawn(
            program,
            [program, *FLAGS, f"--user-data-dir={self._profile.name}", "about:blank"],
            {**os.environ, "XDG_CONFIG_HOME": self._profile.name, "XDG_CACHE_HOME": self._profile.name},
            file_actions=[
                (os.POSIX_SPAWN_DUP2, theirs_in, 3),
                (os.POSIX_SPAWN_DUP2, theirs_out, 4),
                (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
            ],
            setpgroup=0,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._out, self._in = ours_out, os.fdopen(ours_in, "rb", buffering=0)
        self._rest = b""
        self._events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")

    @staticmethod
    def _pipe() -> tuple[int, int]:
        ends = os.pipe()
        moved = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, FREE_DESCRIPTOR) for end in ends)
        for end in ends:
            os.close(end)
        return moved[0], moved[1]

    def __enter__(self) -> Self:
        """Gives itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Ends Chromium and all processes that it started, and removes its profile."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
        os.close(self._out)
        self._in.close()
        self._profile.cleanup()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Sends one command and waits for its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        data = memoryview(json.dumps(message).encode() + b"\0")
        while data:
            data = data[os.write(self._out, data) :]
        until = time.monotonic() + self._patience
        while True:
            found = self._message(method, until)
            if found.get("id") == self._number:
                break
            self._events.append(found)
        if "error" in found:
            raise RuntimeError(f"{method}: {found['error']['message']}")
        return found["result"]

    def _message(self, waiting_for: str, until: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            if time.monotonic() > until:
                raise TimeoutError(f"Chromium did not answer {waiting_for} within {self._patience:g} seconds")
            part = self._in.read(1 << 20)
            if not part:
                raise RuntimeError(f"Chromium ended before it answered {waiting_for}")
            self._rest += part
        first, _, self._rest = self._rest.partition(b"\0")
        return json.loads(first)

    def open(self, address: str, *, scripts: bool = True) -> None:
        """Opens a page, with its scripts or without, and waits until it is loaded and drawn."""
        self._events.clear()
        self.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        if failed := self.call("Page.navigate", url=address).get("errorText"):
            raise RuntimeError(f"{address}: {failed}")
        until = time.monotonic() + self._patience
        while not any(event.get("method") == "Page.loadEventFired" for event in self._events):
            self._events.append(self._message(address, until))
        if scripts:  # else what waits for drawing would not run
            self.drawn()

    def drawn(self) -> None:
        """Waits until what changed is drawn."""
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 50))))")

    def run(self, script: str) -> Any:
        """Evaluates JavaScript on the page, and gives what it, or its promise, comes to."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"]["exception"]["description"])
        return found["result"].get("value")

    def block(self, *addresses: str) -> None:
        """Asks nothing of these addresses from here on; `*` stands for anything."""
        self.call("Network.enable")
        self.call("Network.setBlockedURLs", urls=list(addresses))

    def screen(self, width: int, height: int, *, phone: bool = False, dark: bool = False) -> None:
        """Sets what the pages are shown on."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, file: Path, *, height: int | None = None) -> None:
        """Writes what is on the screen, or the page's upper part of so many pixels."""
        whole: dict[str, Any] = {}
        if height:
            width, page = self.run("[innerWidth, document.documentElement.scrollHeight]")
            clip = {"x": 0, "y": 0, "width": width, "height": min(height, page), "scale": 1}
            whole = {"clip": clip, "captureBeyondViewport": True}
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png", **whole)["data"]))
