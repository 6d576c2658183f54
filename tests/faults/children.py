"""Actions in processes of their own, forked from this one, which start together and may be killed."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import traceback
from collections.abc import Callable, Sequence
from typing import Any

Start = Callable[[], None]
Action = Callable[[Start], Any]


class Child:
    """A forked process that runs an action; what the action returns, or tells meanwhile, comes as lines of JSON."""

    def __init__(self, action: Action, gate: tuple[int, int] | None = None) -> None:
        self._read, write = os.pipe()
        self._told = b""
        self.pid = os.fork()
        if self.pid:
            os.close(write)
            return
        status = 1
        try:
            os.close(self._read)
            tell = Teller(write)
            tell({"end": action(_start_of(gate, tell))})
            status = 0
        except BaseException:
            Teller(write)({"error": " | ".join(traceback.format_exc().splitlines()[-5:])})
        finally:
            os._exit(status)

    def lines(self) -> list[Any]:
        """Returns all that the child reported, once it has ended."""
        with os.fdopen(self._read, "rb") as pipe:
            told = (self._told + pipe.read()).splitlines(keepends=True)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        return [json.loads(line) for line in told if line.endswith(b"\n")]

    def result(self) -> Any:
        """Returns what the action returned; raises what it raised."""
        end = self.lines()[-1]
        if "end" not in end:
            raise RuntimeError(end["error"])
        return end["end"]

    def wait_for_a_word(self, longest: float = 60.0) -> None:
        """Waits until it tells something, or ends."""
        select.select([self._read], [], [], longest)

    def wait_for_words(self, number: int) -> None:
        """Waits until so many lines came from it, or it ends: how fast it is does not matter."""
        while self._told.count(b"\n") < number and (more := os.read(self._read, 65_536)):
            self._told += more

    def kill(self) -> None:
        """Ends it at once, wherever it is."""
        os.kill(self.pid, signal.SIGKILL)


class Teller:
    """Writes lines that the parent reads, each in one piece."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __call__(self, value: Any) -> None:
        os.write(self._number, json.dumps(value).encode() + b"\n")


def _start_of(gate: tuple[int, int] | None, tell: Teller) -> Any:
    """Returns what an action calls when it is ready (it waits for the others), or tells its parent with."""
    if gate is None:
        return tell
    read, write = gate

    def start() -> None:
        os.close(write)
        os.read(read, 1)  # the end of the pipe, once everybody is ready, or gone

    return start


def together(actions: Sequence[Action]) -> list[Any]:
    """Runs each action in a process of its own; they go on together from where each calls `start()`."""
    gate = os.pipe()
    children = [Child(action, gate) for action in actions]
    os.close(gate[0])
    os.close(gate[1])
    return [child.result() for child in children]
