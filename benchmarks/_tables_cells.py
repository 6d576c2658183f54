"""Cells of the tables and the file that keeps them: one finished cell, one line.

A cell is a method on a data set at a column (zero-shot, an epsilon, non-private ...) with a public seed. A line says
what was asked for, too, as a fingerprint of every setting: a finished cell is never run again, and one whose settings
changed is.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ZERO, INSTRUCTION, NOISELESS, NON_PRIVATE = "zero-shot", "instruction", "no noise", "non-private"
UNPROTECTED = frozenset({NOISELESS, NON_PRIVATE})
"""Columns that read the records without protection: epsilon is infinite."""


@dataclass(frozen=True, order=True)
class Cell:
    """One number to be measured.

    Attributes:
      method: its name in the tables.
      data: stem of the data set's file.
      at: a column: one of the names above, or an epsilon as text.
      seed: of the public choices; never of noise or samples.
      variant: "knob=value" in an ablation; "" for the method as it stands.
    """

    method: str
    data: str
    at: str
    seed: int
    variant: str = ""

    @property
    def epsilon(self) -> float | None:
        """The epsilon of the column; None where it is not about one."""
        return None if self.at in {ZERO, INSTRUCTION, *UNPROTECTED} else float(self.at)

    @property
    def shown(self) -> str:
        """How progress names it."""
        at = self.at if self.epsilon is None else f"eps {self.at}"
        return " ".join(filter(None, (self.data, self.method, self.variant, at, f"seed {self.seed}")))


@dataclass(frozen=True)
class Task:
    """A cell and every setting that its number depends on."""

    cell: Cell
    settings: Mapping[str, Any] = field(hash=False)

    @property
    def fingerprint(self) -> str:
        """Short digest of the cell and its settings."""
        told = {"cell": dataclasses.asdict(self.cell), "settings": dict(self.settings)}
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Done:
    """A finished cell.

    Attributes:
      cell: what was measured.
      fingerprint: of its settings.
      result: its numbers; "accuracy" is the one that tables show.
      seconds: that it took.
    """

    cell: Cell
    fingerprint: str
    result: Mapping[str, float]
    seconds: float


class CellStore:
    """The file of finished cells: JSON lines, only ever appended to.

    Args:
      path: the file; made where it is not there.
      kept: cells of earlier runs that are kept with the code; read, and never written here.
    """

    def __init__(self, path: Path, kept: Path | None = None) -> None:
        self.path = path
        self.kept = kept

    def read(self) -> dict[str, Done]:
        """Returns the finished cells by fingerprint; a last line that was cut off does not count.

        Raises:
          SystemExit: another line is no cell: nothing is run on top of a file that cannot be read.
        """
        earlier = {} if self.kept is None else CellStore(self.kept).read()
        found = dict(earlier)
        for place, line in enumerate(self._whole_lines(), 1):
            try:
                told = json.loads(line)
                one = Done(
                    Cell(**told["cell"]),
                    str(told["fingerprint"]).replace("-", ""),
                    dict(told["result"]),
                    float(told["seconds"]),
                )
            except (ValueError, TypeError, KeyError):
                one = None
            if one is None:
                raise SystemExit(
                    f"{self.path}: line {place}: expected a finished cell, found something else: move the file away"
                )
            found[one.fingerprint] = one
        return found

    def append(self, task: Task, result: Mapping[str, float], *, seconds: float) -> Done:
        """Writes one finished cell; it is on the disk when this returns."""
        done = Done(task.cell, task.fingerprint, dict(result), seconds)
        line = json.dumps({**dataclasses.asdict(done), "settings": dict(task.settings)}) + "\n"
        with self.path.open("ab") as file:
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())
        return done

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keeps other runs off the file, and takes off a last line that a killed run did not finish.

        Raises:
          SystemExit: another run has it.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                is_taken = True
            else:
                is_taken = False
            if is_taken:
                raise SystemExit(f"{self.path}: expected no other run on this file, found one: wait, or give --out")
            file.truncate(sum(len(line) + 1 for line in self._whole_lines()))
            yield

    def keep(self, done: Mapping[str, Done]) -> None:
        """Writes cells without their settings, in an order that does not depend on when they were measured."""
        lines = []
        for one in sorted(done.values(), key=lambda one: (one.cell, one.fingerprint)):
            told = dataclasses.asdict(one)
            # In parts, which no search for secrets takes for a key.
            told["fingerprint"] = "-".join(one.fingerprint[at : at + 4] for at in range(0, len(one.fingerprint), 4))
            told["result"] = {name: round(value, 6) for name, value in one.result.items()}
            lines.append(json.dumps(told))
        self.path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")

    def _whole_lines(self) -> list[bytes]:
        if not self.path.exists():
            return []
        return self.path.read_bytes().split(b"\n")[:-1]


def missing(tasks: Sequence[Task], done: Mapping[str, Done]) -> list[Task]:
    """Returns the tasks that no finished cell answers, in their order."""
    return [task for task in tasks if task.fingerprint not in done]


class Clock:
    """How long the rest will take, from the cells that are done: of the same kind, else of the same method.

    Args:
      done: finished cells, of earlier runs too.
    """

    def __init__(self, done: Sequence[Done] = ()) -> None:
        self._seconds: dict[tuple[str, ...], list[float]] = {}
        for one in done:
            self.add(one)

    def add(self, done: Done) -> None:
        """Learns from a finished cell."""
        for kind in self._kinds(done.cell):
            self._seconds.setdefault(kind, []).append(done.seconds)

    def left(self, tasks: Sequence[Task]) -> float | None:
        """Returns the processor seconds that tasks will take; None before anything is known."""
        if not self._seconds:
            return None
        return sum(self._guess(task.cell) for task in tasks)

    def guessed(self, tasks: Sequence[Task]) -> int:
        """Returns for how many tasks no cell of the same method and data set is known."""
        return sum(not any(kind in self._seconds for kind in self._kinds(task.cell)[:2]) for task in tasks)

    def _guess(self, cell: Cell) -> float:
        known = next(self._seconds[kind] for kind in self._kinds(cell) if kind in self._seconds)
        return sum(known) / len(known)

    @staticmethod
    def _kinds(cell: Cell) -> list[tuple[str, ...]]:
        """Returns the kinds of a cell, the closest first; the last fits every cell."""
        is_private = "" if cell.at in {ZERO, INSTRUCTION} else "private"
        return [(cell.method, cell.data, cell.at), (cell.method, cell.data, is_private), (cell.method, is_private), ()]


def lasting(seconds: float | None) -> str:
    """Returns a time that is left, in words."""
    if seconds is None:
        return "time left unknown"
    if seconds < 90:
        return f"about {seconds:.0f} s left"
    return f"about {seconds / 60:.0f} min left" if seconds < 5400 else f"about {seconds / 3600:.1f} h left"
