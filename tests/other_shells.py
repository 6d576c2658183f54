"""Runs `dpicl` in processes of their own, forked from one that has imported the command: that is most of a short run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


class OtherShells:
    """The process that is forked for each command; it has run none itself."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.other_shells"]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, *typed: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Runs a command to its end; returns its exit code and all that it printed."""
        pipes = self._process.stdin, self._process.stdout
        assert None not in pipes
        pipes[0].write(json.dumps([typed, str(folder or Path.cwd())]) + "\n")
        pipes[0].flush()
        code, out, errors = json.loads(pipes[1].readline())
        return subprocess.CompletedProcess(typed, code, out, errors)

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture(scope="session")
def other_shells() -> Iterator[OtherShells]:
    """Where a test runs `dpicl` as others would."""
    found = OtherShells()
    yield found
    found.close()


def _forked(typed: list[str], folder: str) -> tuple[int, str, str]:
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        child = os.fork()
        if child == 0:
            for file, number in ((out, 1), (errors, 2)):
                os.dup2(file.fileno(), number)
            os.chdir(folder)
            _run(typed)
        _, status = os.waitpid(child, 0)
        out.seek(0)
        errors.seek(0)
        return os.waitstatus_to_exitcode(status), out.read(), errors.read()


def _run(typed: list[str]) -> None:
    """Is the whole process, from here to its end."""
    from langchain_dpicl.cli.main import main

    code: Any = 1
    try:
        sys.argv[1:] = typed
        code = main()
    except SystemExit as end:
        code = end.code
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1 if code else 0)


def serve() -> None:
    """Answers each line of JSON, a command and its folder, by a line: exit code, what was printed, and the errors."""
    import langchain_dpicl.cli.main
    import langchain_dpicl.voting  # noqa: F401  with all that both import

    for line in sys.stdin:
        typed, folder = json.loads(line)
        print(json.dumps(_forked(typed, folder)), flush=True)


if __name__ == "__main__":
    serve()
