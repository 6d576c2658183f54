"""What a ledger costs per answer: pairs of reserve and commit, by store and by processes at once.

SQLite writes to a file in --folder, PostgreSQL to a server of its own there (fsync on, unix socket), or to --postgres.
Every process opens the ledger for itself, waits for the others, and takes tickets until the time is over. What one call
waits is measured call by call; how long the disk takes to keep a promise is measured beside it, as that decides.

    make bench-ledger
    make bench-ledger ARGS="--seconds 20 --postgres postgresql://user@host/database"
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from langchain_dpicl import Budget
from langchain_dpicl.privacy.accounting.events import PureEvent
from langchain_dpicl.privacy.ledger.shares import Share
from langchain_dpicl.privacy.ledger.store import InMemoryStore, LedgerStore
from langchain_dpicl.privacy.ledger.tickets import Ticket
from langchain_dpicl.stores import SQLiteStore

PROCESSES = (1, 8, 64)
TICKETS = 10_000_000
CALL_MS = 200.0
"""What a model call takes at least; ten run at once for one answer."""

Opened = Callable[[], LedgerStore]


@dataclass(frozen=True)
class Row:
    """One line of the table: pairs per second of all processes together; milliseconds that one call waits."""

    store: str
    processes: int
    pairs: float
    p50: float
    p99: float
    longest: float
    refused: int


def declared(budget: Budget) -> Share:
    """Returns the share that all take tickets of."""
    return budget.declare("bench", tickets=[Ticket("query", PureEvent(1e-9), max_count=TICKETS)], epsilon=1.0)


def spend(share: Share, *, until: float) -> tuple[list[float], int]:
    """Reserves and commits until the clock says so; returns what each call took, and how many were refused."""
    times: list[float] = []
    refused = 0
    while time.monotonic() < until:
        start = time.perf_counter()
        try:
            reservation = share.reserve("query")
            reserved = time.perf_counter()
            reservation.burn()
            reservation.commit()
        except Exception as error:  # noqa: BLE001  counted; a table is worth more than a trace
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            refused += 1
            continue
        times += [reserved - start, time.perf_counter() - reserved]
    return times, refused


def measured(name: str, opened: Opened, processes: int, *, seconds: float) -> Row:
    """Lets processes spend at once and puts together what they saw."""
    ready, start = os.pipe(), os.pipe()
    children = [_started(opened, ready[1], start, seconds) for _ in range(processes)]
    os.close(start[0])
    for _ in children:
        os.read(ready[0], 1)
    os.close(start[1])  # its end is what all wait for
    times: list[float] = []
    refused = 0
    for pid, out in children:
        with os.fdopen(out) as file:
            found = json.loads(file.read() or '{"times": [], "refused": 1}')
        os.waitpid(pid, 0)
        times += found["times"]
        refused += found["refused"]
    os.close(ready[0])
    os.close(ready[1])
    return _row(name, processes, times, refused, seconds)


def _row(name: str, processes: int, times: Sequence[float], refused: int, seconds: float) -> Row:
    p50, p99, longest = (1e3 * float(np.quantile(times or [np.nan], q)) for q in (0.5, 0.99, 1.0))
    return Row(name, processes, len(times) / 2 / seconds, p50, p99, longest, refused)


def _started(opened: Opened, ready: int, start: tuple[int, int], seconds: float) -> tuple[int, int]:
    """Forks a process that spends; returns its number and where it says what it saw."""
    there, out = os.pipe()
    pid = os.fork()
    if pid:
        os.close(out)
        return pid, there
    status = 1
    try:
        os.close(start[1])
        share = declared(Budget.open(opened()))
        os.write(ready, b".")
        os.read(start[0], 1)
        times, refused = spend(share, until=time.monotonic() + seconds)
        with os.fdopen(out, "w") as file:
            json.dump({"times": times, "refused": refused}, file)
        status = 0
    finally:
        os._exit(status)


def in_memory(*, seconds: float) -> Row:
    """Measures a ledger that dies with its process."""
    share = declared(Budget(epsilon=1.0, delta=1e-6, store=InMemoryStore()))
    times, refused = spend(share, until=time.monotonic() + seconds)
    return _row("in memory", 1, times, refused, seconds)


def on_disk(folder: Path, processes: int, *, seconds: float) -> Row:
    """Measures a SQLite file."""
    path = folder / f"budget{processes}.db"
    with SQLiteStore.new(path) as store:
        Budget(epsilon=1.0, delta=1e-6, store=store)
    return measured("SQLite", lambda: SQLiteStore(path), processes, seconds=seconds)


def on_server(conninfo: str, processes: int, *, seconds: float) -> Row:
    """Measures a ledger in PostgreSQL, under a name of its own."""
    from langchain_dpicl.stores import PostgresStore

    name = f"bench {processes} {time.time():.0f}"
    with PostgresStore.new(conninfo, name=name) as store:
        Budget(epsilon=1.0, delta=1e-6, store=store)
    return measured("PostgreSQL", lambda: PostgresStore(conninfo, name=name), processes, seconds=seconds)


def sync_ms(folder: Path, *, times: int = 200) -> tuple[float, float]:
    """Returns median and 99th percentile of writing 4 KiB and waiting until the disk has them, in milliseconds."""
    found = []
    with (folder / "sync").open("wb", buffering=0) as file:
        for _ in range(times):
            start = time.perf_counter()
            file.write(b"\0" * 4096)
            os.fdatasync(file.fileno())
            found.append(1e3 * (time.perf_counter() - start))
    return float(np.quantile(found, 0.5)), float(np.quantile(found, 0.99))


@contextlib.contextmanager
def server(conninfo: str) -> Iterator[str | None]:
    """Yields where to connect: what was given, or a server that runs for the block; None where there is none."""
    if conninfo:
        yield conninfo
        return
    try:
        from tests.postgres import PostgresServer, programs
    except ModuleNotFoundError:
        found = None
    else:
        found = programs()
    if found is None:
        yield None
        return
    running = PostgresServer(found, shared_buffers="128MB", log_min_messages="fatal")
    try:
        running.start()
        yield running.conninfo()
    finally:
        running.remove()


def rows(options: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """Yields the rows of the table as they are measured."""
    yield in_memory(seconds=options.seconds)
    for processes in options.processes:
        yield on_disk(folder, processes, seconds=options.seconds)
    with server(options.postgres) as conninfo:
        if conninfo is None:
            print("PostgreSQL: no server is installed; skipped")
            return
        for processes in options.processes:
            yield on_server(conninfo, processes, seconds=options.seconds)


def line(row: Row) -> str:
    """Returns a row of the table."""
    waits = "".join(f"{value:>10.2f}" for value in (row.p50, row.p99, row.longest))
    return f"{row.store:<12}{row.processes:>10}{row.pairs:>10,.0f}{waits}{row.refused:>9}"


def main(arguments: list[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="how long each row is measured")
    parser.add_argument("--processes", type=int, nargs="+", default=list(PROCESSES))
    parser.add_argument("--postgres", default="", help="a database to use; nothing: a server of its own")
    parser.add_argument("--folder", type=Path, help="where SQLite writes; nothing: the folder for temporary files")
    parser.add_argument("--json", type=Path, default=Path("out/bench_ledger.json"))
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        busy = os.getloadavg()[0]
        disk = sync_ms(Path(folder))
        print(f"{os.cpu_count()} cores, load {busy:.1f} before")
        print(f"4 KiB on the disk: p50 {disk[0]:.2f}, p99 {disk[1]:.2f} ms")
        print(f"{'store':<12}{'processes':>10}{'pairs/s':>10}{'p50 ms':>10}{'p99 ms':>10}{'max ms':>10}{'refused':>9}")
        found: list[Row] = []
        for row in rows(options, Path(folder)):
            found.append(row)
            print(line(row), flush=True)
    slowest = min((row.pairs for row in found if row.store != "in memory"), default=0.0)
    print(f"callers of {CALL_MS:.0f} ms that the slowest row serves at once: {slowest * CALL_MS / 1e3:,.0f}")
    print(f"load {os.getloadavg()[0]:.1f} after")
    data: dict[str, Any] = {"load": busy, "sync_ms": disk, "rows": [asdict(row) for row in found]}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(data, indent=1))
    return int(any(row.refused for row in found))


if __name__ == "__main__":
    sys.exit(main())
