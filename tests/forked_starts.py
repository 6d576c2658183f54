"""Starts processes of private models by forking one that has imported what all of them import.

Those imports are nearly all of what a start takes. A forked process runs the same program, with its own environment and
pipes; what depends on how the interpreter itself is started needs the real start.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

_SIZE = 1 << 20
_NURSERY = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from tests.forked_starts import serve; serve(0)"


class Nursery:
    """The process that is forked, which ends with its last reference."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._control, there = socket.socketpair()
        with there:
            command = [sys.executable, "-c", _NURSERY, json.dumps(sys.path)]
            self._process = subprocess.Popen(command, stdin=there, stdout=subprocess.DEVNULL)

    def forked(self, program: str, environment: Mapping[str, str], descriptors: Sequence[int]) -> int:
        """Returns the number of a process that runs a program, with descriptors as its input and output."""
        with self._turn:
            socket.send_fds(self._control, [json.dumps([program, dict(environment)]).encode()], descriptors)
            return int(self._control.recv(64))

    def close(self) -> None:
        self._control.close()
        self._process.wait(60)


class Forked:
    """What `connection` asks of a `Popen`."""

    def __init__(
        self, nursery: Nursery, command: Sequence[str], *, stdin: int, stdout: int, env: Any, **_: Any
    ) -> None:
        self.pid = nursery.forked(command[-1], env, [stdin, stdout])

    def poll(self) -> int | None:
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return 0
        return None

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float = 600.0) -> int:
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("a forked process", timeout)
            time.sleep(0.002)
        return 0


def serve(control: int) -> None:
    """Forks for each message, until the other side is closed."""
    from langchain_dpicl.backends.private_process import child  # noqa: F401  what is imported here, no fork imports
    from tests import process_models  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that nobody has to wait for those that ended
    wire = socket.socket(fileno=control)
    while True:
        message, descriptors, _, _ = socket.recv_fds(wire, _SIZE, 2)
        if not message:
            return
        pid = os.fork()
        if pid == 0:
            _run(wire, descriptors, *json.loads(message))
        for descriptor in descriptors:
            os.close(descriptor)
        wire.send(str(pid).encode())


def _run(wire: socket.socket, descriptors: Sequence[int], program: str, environment: Mapping[str, str]) -> NoReturn:
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        wire.detach()
        for place, descriptor in enumerate(descriptors):  # the first takes the place of the wire
            os.dup2(descriptor, place)
            os.close(descriptor)
        os.environ.clear()
        os.environ.update(environment)
        exec(program, {"__name__": "__main__"})  # noqa: S102  what `python -c` would run
        code = 0
    finally:
        os._exit(code)


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()


@pytest.fixture
def quick_starts(nursery: Nursery, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets private processes start by a fork."""

    def started(command: Sequence[str], **options: Any) -> Forked:
        return Forked(nursery, command, **options)

    names = {name: getattr(subprocess, name) for name in ("DEVNULL", "TimeoutExpired")}
    place = "langchain_dpicl.backends.private_process.connection.subprocess"
    monkeypatch.setattr(place, SimpleNamespace(Popen=started, **names))
