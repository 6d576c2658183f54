"""Measures what a ledger costs here: what the disk takes to keep a promise, and pairs of reserve and commit."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.budget.use import Waits
from langchain_dpicl.exceptions import CapabilityError, DPICLError
from langchain_dpicl.privacy._validate import fail
from langchain_dpicl.privacy.accounting.events import PureEvent
from langchain_dpicl.privacy.ledger.purse import MOST_HELD
from langchain_dpicl.privacy.ledger.shares import Share
from langchain_dpicl.privacy.ledger.tickets import Ticket
from langchain_dpicl.stores.sqlite_ledger import SQLiteStore

PROCESSES = (1, 8, 64)
TICKETS = 10_000_000
_COLUMNS = ("processes", "pairs/s", "p50 ms", "p99 ms", "max ms", "cpu ms", "least", "most", "refused")
HEADING = "{:>9}{:>10}{:>9}{:>10}{:>10}{:>8}{:>8}{:>8}{:>9}".format(*_COLUMNS)


@dataclass(frozen=True, slots=True)
class Rate:
    """What processes got from one ledger at once.

    Attributes:
      processes: how many there were.
      pairs: of reserve and commit per second, of all processes together.
      p50: median wait for a pair, in milliseconds.
      p99: 99th percentile of it.
      longest: wait for a pair.
      cpu: milliseconds of a processor that a pair took in its process, without those of a database server.
      least: pairs of the process that got fewest.
      most: pairs of the process that got most.
      refused: pairs that failed.
      fault: what the first of them raised, or why a process ended; "" if none.
    """

    processes: int
    pairs: float
    p50: float
    p99: float
    longest: float
    cpu: float
    least: int
    most: int
    refused: int
    fault: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON form; what was not measured is null."""
        values = asdict(self).items()
        return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in values}

    def line(self) -> str:
        """Returns the rate as a row below `HEADING`."""
        waits = f"{self.p50:>9.2f}{self.p99:>10.2f}{self.longest:>10.2f}{self.cpu:>8.2f}"
        return f"{self.processes:>9}{self.pairs:>10,.0f}{waits}{self.least:>8}{self.most:>8}{self.refused:>9}"


def declared(budget: Budget) -> Share:
    """Returns the share that all processes take tickets of."""
    ticket = Ticket("query", PureEvent(1e-9), max_count=TICKETS, refundable=True)
    return budget.declare("bench", tickets=[ticket], epsilon=1.0)


def spend(share: Share, *, until: float) -> dict[str, Any]:
    """Reserves, burns and commits one ticket at a time until `time.monotonic()` says so; returns waits and refusals."""
    waits, refused, fault, processor = Waits(), 0, "", time.process_time()
    while time.monotonic() < until:
        start = time.perf_counter()
        try:
            reservation = share.reserve("query")
            reservation.burn()
            reservation.commit()
        except DPICLError as error:
            fault = fault or f"{type(error).__name__}: {error}"
            refused += 1
            continue
        waits.add(time.perf_counter() - start)
    cpu = time.process_time() - processor
    return {"waits": waits.to_dict(), "cpu": cpu, "refused": refused, "fault": fault}


def measure(opened: Callable[[], Budget], processes: int, *, seconds: float) -> Rate:
    """Lets forked processes open the ledger, wait for each other, and spend at once."""
    if not hasattr(os, "fork"):
        raise CapabilityError(f"bench: expected a system that can fork, found {sys.platform}. Measure on another one.")
    ready, start = os.pipe(), os.pipe()
    children: dict[int, int] = {}
    try:
        for _ in range(processes):
            pid, out = _started(opened, ready, start, seconds)
            children[pid] = out
        os.close(ready[1])
        ready = ready[0], -1
        # A process that fails to open the ledger closes its end without a word.
        for _ in children:
            os.read(ready[0], 1)
        os.close(start[1])  # its end starts all of them
        start = start[0], -1
        found = [json.loads(_all_of(out) or _DIED) for out in children.values()]
    except BaseException:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        raise
    finally:
        for pid, out in children.items():
            os.waitpid(pid, 0)
            os.close(out)
        for end in (*ready, *start):
            if end >= 0:
                os.close(end)
    return _rate(found, seconds)


_DIED = json.dumps({"waits": Waits().to_dict(), "cpu": 0.0, "refused": 1, "fault": "the process was killed"})


def _rate(found: list[dict[str, Any]], seconds: float) -> Rate:
    counts = [Waits.merged([each["waits"]]).count for each in found]
    whole = Waits.merged(each["waits"] for each in found)
    p50, p99, longest = (1e3 * whole.quantile(part) for part in (0.5, 0.99, 1.0))
    refused = sum(each["refused"] for each in found)
    fault = next((each["fault"] for each in found if each["fault"]), "")
    pairs = sum(counts)
    return Rate(
        processes=len(found),
        pairs=pairs / seconds,
        p50=p50,
        p99=p99,
        longest=longest,
        cpu=1e3 * sum(each["cpu"] for each in found) / pairs if pairs else math.nan,
        least=min(counts),
        most=max(counts),
        refused=refused,
        fault=fault,
    )


def _all_of(end: int) -> bytes:
    return b"".join(iter(lambda: os.read(end, 65536), b""))


def _started(
    opened: Callable[[], Budget], ready: tuple[int, int], start: tuple[int, int], seconds: float
) -> tuple[int, int]:
    """Forks a process that spends; returns its number and the end of the pipe that its result comes through."""
    there, out = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        os.close(out)
        return pid, there
    try:
        os.close(start[1])
        os.close(ready[0])
        try:
            budget = opened()
            share = declared(budget)
            os.write(ready[1], b".")
            os.close(ready[1])
            os.read(start[0], 1)
            found = spend(share, until=time.monotonic() + seconds)
            budget.settle()
        except Exception as error:  # noqa: BLE001  shown by the parent
            found = json.loads(_DIED) | {"fault": f"{type(error).__name__}: {error}"}
        with os.fdopen(out, "w") as file:
            json.dump(found, file)
    finally:
        os._exit(0)


def sync_ms(folder: Path, *, times: int = 100) -> tuple[float, float]:
    """Returns median and 99th percentile of writing 4 KiB and waiting until the disk has them, in milliseconds."""
    waits = Waits()
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        for _ in range(times):
            start = time.perf_counter()
            file.write(b"\0" * 4096)
            getattr(os, "fdatasync", os.fsync)(file.fileno())
            waits.add(time.perf_counter() - start)
    return 1e3 * waits.quantile(0.5), 1e3 * waits.quantile(0.99)


def new_ledger(path: Path) -> None:
    """Makes the ledger that is measured: it binds no data."""
    with SQLiteStore.new(path) as store:
        Budget(epsilon=1.0, delta=1e-6, store=store)


def bench(place: Path, *, processes: Iterable[int], seconds: float, say: Callable[[str], object]) -> dict[str, Any]:
    """Measures SQLite ledgers in a folder of their own beside `place`, and removes them; says each row as it comes."""
    beside, counts = place if place.is_dir() else place.parent, list(processes)
    if not beside.is_dir():
        raise fail("PATH", "a folder, or a file in one", beside)
    if not counts or min(counts) < 1:
        raise fail("--processes", "numbers of at least 1", counts)
    if not 0.0 < seconds < math.inf:
        raise fail("--seconds", "a time above 0", seconds)
    with tempfile.TemporaryDirectory(prefix=".dpicl-bench-", dir=beside) as name:
        folder = Path(name)
        say(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; temporary ledgers in {beside}")
        disk = sync_ms(folder)
        say(f"4 KiB on the disk: p50 {disk[0]:.2f}, p99 {disk[1]:.2f} ms: {1e3 / disk[0]:,.0f} a second")
        say(f"held {HEADING}")
        rows = [
            {"most_held": most_held, **_rated(folder, count, most_held=most_held, seconds=seconds, say=say).to_dict()}
            for most_held in (1, MOST_HELD)
            for count in counts
        ]
    return {"sync_ms": {"p50": disk[0], "p99": disk[1]}, "rows": rows}


def _rated(folder: Path, count: int, *, most_held: int, seconds: float, say: Callable[[str], object]) -> Rate:
    path = folder / f"{most_held}-{count}.db"
    new_ledger(path)
    rate = measure(lambda: Budget.open(SQLiteStore(path), most_held=most_held), count, seconds=seconds)
    say(f"{most_held:>4} {rate.line()}")
    if rate.fault:
        say(f"  {rate.fault}")
    return rate
