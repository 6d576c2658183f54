"""The process that keeps the workers of `dpicl serve` running: one that ends is replaced, and none outlives it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.served import ROOT

KEEP = "import sys; from tests.idle_worker import keep; sys.exit(keep())"


@contextlib.contextmanager
def keeping(*options: str) -> Iterator[subprocess.Popen[str]]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    heard = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = [sys.executable, "-c", KEEP, *options]
    with subprocess.Popen(command, env=env, start_new_session=True, **heard) as process:  # type: ignore[call-overload]
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def numbers(process: subprocess.Popen[str], count: int) -> tuple[list[int], list[str]]:
    """Returns the processes of so many workers that have begun, and what was said meanwhile."""
    assert process.stdout is not None
    found, said = list[int](), list[str]()
    while len(found) < count:
        line = process.stdout.readline().strip()
        assert line, said
        if line.isdigit():
            found.append(int(line))
        else:
            said.append(line)
    return found, said


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
def test_a_killed_worker_is_replaced_and_all_end_with_the_process_that_keeps_them(how: int) -> None:
    with keeping() as process:
        before, said = numbers(process, 2)
        assert said == ["serving nothing"]
        if how == signal.SIGTERM:
            os.kill(before[0], signal.SIGKILL)
            _, said = numbers(process, 1)
            assert said == ["a worker has ended (-9), another one is started"]
        # A terminal that closes, or in which Ctrl-C is pressed, sends its signal to the workers too.
        (os.killpg if how in {signal.SIGINT, signal.SIGHUP} else os.kill)(process.pid, how)
        rest, _ = process.communicate(timeout=300)  # until no worker holds the output any more
        assert rest == ""
        assert process.returncode == (-how if how == signal.SIGKILL else 0)


def test_what_cannot_be_built_is_explained_once() -> None:
    with keeping("fault") as process:
        said, _ = process.communicate(timeout=300)
        assert (said, process.returncode) == ("dpicl: settings: expected others.\nno worker serves\n", 2)


def test_a_first_worker_that_is_killed_is_not_silent() -> None:
    with keeping("killed") as process:
        said, _ = process.communicate(timeout=300)
        assert (said, process.returncode) == ("the first worker has ended (-9) before it served\n", 1)


def test_workers_that_cannot_be_built_are_started_more_and_more_seldom_and_end_the_service_with_the_last_one() -> None:
    start = time.monotonic()
    with keeping("later") as process:
        (first,), begun = numbers(process, 1)
        assert process.stdout is not None
        said = [process.stdout.readline() for _ in range(5 - len(begun))]  # it says first that it serves, or its number
        os.kill(first, signal.SIGKILL)
        rest, _ = process.communicate(timeout=300)
        fault, ended = "dpicl: settings: expected others.\n", "a worker has ended (2), another one is started"
        # A start that took a busy machine a minute is no quick end, after which there is a pause.
        pauses = [" in 1 s"] if time.monotonic() < start + 60 else [" in 1 s", ""]
        assert said[-4:] in [[fault, f"{ended}\n", fault, f"{ended}{pause}\n"] for pause in pauses]
        assert fault in rest
        assert rest.endswith("\nno worker serves\n")
        assert process.returncode == 2
