"""Trials in a small process of their own: of one that has imported everything a fork costs ten times as much.

Both ends are here: `Afresh` asks, by lines of JSON, and this module as a program answers.
"""

from __future__ import annotations

import functools
import itertools
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any, Self

import pytest

from tests.faults.catalogue import FAULTS
from tests.faults.counts import Count
from tests.ledgers import use_simple_prices

ROOT = Path(__file__).resolve().parents[2]


class Afresh:
    """A process that runs trials, one fault at a time, with prices that a person can add up."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.faults.afresh"]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._process.communicate()

    def count(self, words: str, folder: Path, *, trials: int, conninfo: str = "", schema: str = "") -> Count:
        """Returns the counts of the fault of that name; on a server, if `conninfo` and a schema's beginning are given."""
        asked = {"words": words, "folder": str(folder), "trials": trials, "conninfo": conninfo, "schema": schema}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        told = self._process.stdout.readline()
        if not told:
            raise RuntimeError(f"{words}: the process of the trials ended with {self._process.wait()}")
        found = json.loads(told)
        return Count(found["trials"], found["violations"], Counter(found["seen"]))


def answer(words: str, folder: str, trials: int, conninfo: str, schema: str) -> dict[str, Any]:
    """Runs one fault; returns what was counted."""
    fault = next(fault for fault in FAULTS if fault.words == words)
    found = Count()
    if conninfo:
        from tests.faults.postgres_place import PostgresPlace

        names = (f"{schema}_{number}" for number in itertools.count(1))
        place = functools.partial(PostgresPlace, SimpleNamespace(conninfo=lambda: conninfo))
        with found.watched("between trials"):
            fault.run(lambda: place(next(names)), found, trials=trials, **fault.options)
    else:
        found = fault.count(Path(folder), trials=trials, tick=lambda: None)
    return {"trials": found.trials, "violations": found.violations, "seen": found.seen}


def main() -> None:
    use_simple_prices(pytest.MonkeyPatch())
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
