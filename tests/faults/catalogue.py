"""Every fault with its number in the catalogue of threats, and how many trials a test and a full run make."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults import (
    agents,
    contention,
    copies,
    disks,
    forks,
    kills,
    leases,
    logs,
    openings,
    power,
    rot,
    stops,
    storms,
    waits,
    windows,
)
from tests.faults.counts import Count
from tests.faults.places import sqlite_places


@dataclass(frozen=True)
class Fault:
    """A fault of one kind of place.

    Attributes:
      words: what happens.
      run: runs the trials, given what `scene` yields.
      scene: opens what the fault happens to, in a folder.
      few: trials of a test.
      many: trials of a full run.
      options: more arguments.
      full: arguments of a full run that differ.
    """

    words: str
    run: Callable[..., None]
    scene: Callable[[Path], AbstractContextManager[Any]]
    few: int
    many: int
    options: dict[str, Any] = field(default_factory=dict)
    full: dict[str, Any] = field(default_factory=dict)

    def count(self, folder: Path, *, trials: int, is_full: bool = False, tick: Callable[[], object]) -> Count:
        """Runs it in a folder of its own."""
        found = Count(tick=tick)
        with self.scene(folder) as scene, found.watched("between trials"):
            self.run(scene, found, trials=trials, **self.options, **(self.full if is_full else {}))
        return found


@contextmanager
def _files(folder: Path) -> Iterator[Any]:
    yield sqlite_places(folder)


@contextmanager
def _folder(folder: Path) -> Iterator[Path]:
    yield folder


@contextmanager
def _server(folder: Path) -> Iterator[Any]:
    from tests.faults.postgres_place import postgres_places  # its packages are an extra

    with postgres_places(folder) as places:
        yield places


def shared(scene: Callable[[Path], AbstractContextManager[Any]], place: str) -> list[Fault]:
    """Returns the faults that any durable store meets; `scene` yields the `Places` of one."""
    return [
        Fault(f"L1 64 threads, {place}", contention.contend, scene, 1, 10, {"mode": "threads"}),
        Fault(f"L1 64 tasks, {place}", contention.contend, scene, 1, 10, {"mode": "asyncio"}),
        Fault(f"L1 64 processes, {place}", contention.contend, scene, 1, 10, {"mode": "processes"}),
        Fault(f"L1 64 new workers, {place}", contention.contend, scene, 0, 10, {"mode": "processes from nothing"}),
        Fault(f"L1 64 of all kinds, {place}", contention.contend, scene, 1, 10, {"mode": "mixed"}),
        Fault(f"L1 leases, 6 processes, {place}", leases.share_out, scene, 1, 50),
        Fault(f"L2 kill -9, {place}", kills.kill, scene, 10, 300),
        Fault(f"L2 leases, kill -9, {place}", leases.kill, scene, 6, 300),
        Fault(f"L2 a stream, kill -9, {place}", windows.kill, scene, 8, 400),
        Fault(f"L8 lock held 10 s, {place}", waits.stuck, scene, 1, 20, {"held": 10.0, "timeout": 0.3}),
        Fault(f"L8 lock held 60 s, {place}", waits.stuck, scene, 0, 1, {"held": 60.0, "timeout": 5.0}),
        Fault(f"L9 clock jumps, {place}", waits.jump, scene, 2, 100),
        Fault(f"L10 stop at a line, {place}", stops.interrupt, scene, 25, 5_000),
        Fault(f"L10 cancelled tasks, {place}", stops.cancel, scene, 8, 300),
        Fault(f"L13 forks and copies, {place}", forks.fork, scene, 1, 30),
    ]


SQLITE = [
    *shared(_files, "SQLite"),
    Fault("L3 torn log, SQLite", logs.tear, _folder, 20, 400),
    Fault("L3 power lost, SQLite", power.lose_power, _folder, 60, 4_000),
    Fault("L3 power lost, a disk that fails, SQLite", power.lose_power, _folder, 40, 2_000, {"failing": True}),
    Fault("L4 full disk and quota, SQLite", disks.fill, _folder, 1, 10),
    Fault("L4 read-only, SQLite", disks.read_only, _folder, 1, 10),
    Fault("L5 flipped bits, SQLite", rot.flip, _folder, 40, 2_000),
    Fault("L5 edited columns, SQLite", rot.edit, _folder, 1, 1),
    Fault("L6 set back and forked, SQLite", copies.restore, _folder, 1, 20),
    Fault("L7 L14 no ledger, not this one, SQLite", openings.open_all, _folder, 1, 1),
    # Last, and in a test in a process of its own: it imports all of the package, which makes forks slow.
    Fault("L2 kill -9 of whole components, SQLite", storms.storm, _folder, 0, 1_000),
    Fault("L2 kill -9 of agents and their server, SQLite", agents.storm, _folder, 0, 300),
]


def _on_server(name: str) -> Callable[..., None]:
    """Returns a fault that only a server meets, imported when it runs: its packages are an extra."""

    def run(places: Any, count: Count, **options: Any) -> None:
        getattr(importlib.import_module("tests.faults.servers"), name)(places, count, **options)

    return run


POSTGRES = [
    *(dataclasses.replace(fault, few=0) for fault in shared(_server, "PostgreSQL")),
    Fault("L2 lost answers, PostgreSQL", _on_server("lose"), _server, 0, 200),
    Fault("L2 ended sessions, PostgreSQL", _on_server("end_sessions"), _server, 0, 300),
    Fault("L2 crashed server, PostgreSQL", _on_server("crash"), _server, 0, 30),
    Fault("L2 leases, ended sessions, PostgreSQL", _on_server("end_sessions"), _server, 0, 300, {"leases": True}),
    Fault("L2 leases, crashed server, PostgreSQL", _on_server("crash"), _server, 0, 30, {"leases": True}),
]
"""Tests of their own run a few trials of these: see tests/integration_tests."""

FAULTS = [*SQLITE, *POSTGRES]
