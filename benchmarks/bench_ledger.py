"""What a ledger costs: pairs of reserve and commit, by store and by processes at once, and opening a long one.

SQLite writes to a file in --folder, PostgreSQL to a server of its own there (fsync on, unix socket), or to --postgres.
Every process opens the ledger for itself, waits for the others, and takes tickets until the time is over. All of it is
measured on the machine's own disk and on one whose flush takes 4 ms (in memory, Linux with a C compiler), beside plain
fsync of 4 KiB just before, as the disk decides. At the end each goal of `GOALS` gets a verdict.

    make bench-ledger
    make bench-ledger ARGS="--seconds 20 --postgres postgresql://user@host/database"
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import secrets
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from langchain_dpicl import Budget
from langchain_dpicl.cli.ledger import HEADING, PROCESSES, Rate, declared, measure, new_ledger, sync_ms
from langchain_dpicl.privacy.extensions.durable_writer import MOST_HELD
from langchain_dpicl.privacy.ledger.store import LedgerStore
from langchain_dpicl.stores import SQLiteStore

SLOW_MS = 4.0
OWN, SLOW = "own", "4 ms"
MEMORY = Path("/dev/shm")  # noqa: S108  folders of random names in it, as `tempfile` makes them
"""Where the slow disk's files are: the delay is then all that a flush takes."""
OPENED_LINES = 1_000_000
CALL_MS = 200.0
"""What a model call takes at least; ten run at once for one answer."""


@dataclass(frozen=True)
class Row:
    """One line of the table: a rate, and how often the same disk can be flushed in a second, measured just before."""

    disk: str
    store: str
    leases: bool
    rate: Rate
    fsync: float
    fsync_p99: float

    def line(self) -> str:
        """Returns the row as a line below `TITLE`."""
        leases = "yes" if self.leases else "no"
        return f"{self.disk:<6}{self.store:<11}{leases:<7}{self.rate.line()}{self.fsync:>9,.0f}"


TITLE = f"{'disk':<6}{'store':<11}{'leases':<7}{HEADING}{'fsync/s':>9}"


@dataclass(frozen=True)
class Opening:
    """What opening a long ledger takes.

    Attributes:
      lines: of the ledger.
      has_snapshot: whether a snapshot line stands near its end.
      seconds: until `Budget.open` returned.
      cpu: processor seconds of it.
      mb: most memory above that of the process before.
      plain: processor seconds that reading the same rows takes without the ledger's rules.
      file_mb: size of the ledger's file.
    """

    lines: int
    has_snapshot: bool
    seconds: float
    cpu: float
    mb: float
    plain: float
    file_mb: float

    def line(self) -> str:
        """Returns the opening in words."""
        how = "from a snapshot" if self.has_snapshot else "from line 1"
        return (
            f"{self.lines:,} lines {how}: {self.seconds:.3f} s ({self.cpu:.3f} s of a processor), {self.mb:.1f} MB "
            f"above base; the rows alone: {self.plain:.3f} s of a processor"
        )


@dataclass(frozen=True)
class Goal:
    """What a row has to reach: `least` pairs per second, or `most` milliseconds for 99 of 100 pairs."""

    store: str
    processes: int
    leases: bool
    least: float = 0.0
    most: float = math.inf

    @property
    def words(self) -> str:
        """What is asked, for the table."""
        who = f"{self.store}, {self.processes} process{'' if self.processes == 1 else 'es'}"
        return f"{who}{', leases' if self.leases else ''}: {'pairs/s' if self.least else 'p99 ms'}"

    def verdict(self, row: Row) -> str:
        """Returns the line of the goal for a row of its kind."""
        if self.least:
            return verdict(f"{row.disk} disk, {self.words}", row.rate.pairs, row.fsync, least=self.least)
        return verdict(f"{row.disk} disk, {self.words}", row.rate.p99, row.fsync_p99, most=self.most)


GOALS = (
    Goal("SQLite", 1, leases=False, least=200),
    Goal("SQLite", 8, leases=False, least=800),
    Goal("SQLite", 64, leases=False, least=400),
    Goal("SQLite", 64, leases=False, most=1000),
    Goal("SQLite", 8, leases=True, least=10_000),
    Goal("SQLite", 64, leases=True, least=400),
    Goal("SQLite", 64, leases=True, most=1000),
    Goal("PostgreSQL", 1, leases=False, least=100),
    Goal("PostgreSQL", 8, leases=False, least=350),
    Goal("PostgreSQL", 64, leases=False, least=600),
    Goal("PostgreSQL", 64, leases=False, most=1000),
    Goal("PostgreSQL", 64, leases=True, least=600),
    Goal("PostgreSQL", 64, leases=True, most=1000),
)
OPENING_GOALS = {False: (10.0, 30.0), True: (0.1, 20.0)}
"""Seconds of a processor and megabytes, without and with a snapshot line."""

VERDICTS = f"{'goal':<50}{'at':>9}{'ours':>11}{'anchor':>10}{'ratio':>8}"


def verdict(what: str, ours: float, anchor: float, *, least: float | None = None, most: float = math.inf) -> str:
    """Returns a line of goal, ours, anchor, their ratio, and whether the goal is met.

    The anchor is what the same disk does without a ledger: flushes per second, the 99th percentile of one, reading the
    rows of the file, and the size of the file.
    """
    is_met = ours >= least if least is not None else ours <= most
    sign, limit = (">=", least) if least is not None else ("<=", most)
    at = f"{sign} {limit:g}"
    return f"{what:<50}{at:>9}{ours:>11,.5g}{anchor:>10,.5g}{ours / anchor:>8.2f}  {'PASS' if is_met else 'MISSED'}"


def not_run(what: str, why: str) -> str:
    """Returns the line of a goal that was not measured."""
    return f"{what:<50}not run: {why}"


def verdicts(rows: Sequence[Row], openings: Sequence[Opening], disks: dict[str, str]) -> Iterator[str]:
    """Yields the table of goals; `disks` says why a disk has no rows, "" for one that has."""
    yield VERDICTS
    for disk, reason in disks.items():
        for goal in GOALS:
            found = [row for row in rows if (row.disk, row.store, row.leases) == (disk, goal.store, goal.leases)]
            found = [row for row in found if row.rate.processes == goal.processes]
            yield goal.verdict(found[0]) if found else not_run(f"{disk} disk, {goal.words}", reason or "no such row")
    for has_snapshot, (seconds, mb) in OPENING_GOALS.items():
        what = f"opening {'from a snapshot' if has_snapshot else 'from line 1'}"
        opened = [each for each in openings if each.has_snapshot == has_snapshot]
        if not opened:
            why = "this version writes no snapshots" if openings else "--lines 0"
            yield not_run(f"{what}: processor s", why)
            yield not_run(f"{what}: MB above base", why)
        for each in opened:
            yield verdict(f"{what}, {each.lines:,} lines: processor s", each.cpu, each.plain, most=seconds)
            yield verdict(f"{what}, {each.lines:,} lines: MB above base", each.mb, each.file_mb, most=mb)


# --- pairs --------------------------------------------------------------------------------------------------------


def opener(store: Callable[[], LedgerStore], *, leases: bool) -> Callable[[], Budget]:
    """Returns what opens the budget in a process."""
    return lambda: Budget.open(store(), most_held=MOST_HELD if leases else 1)


def on_disk(folder: Path, processes: int, *, seconds: float, leases: bool = False) -> Rate:
    """Measures a SQLite file."""
    path = folder / f"{secrets.token_hex(4)}.db"
    new_ledger(path)
    return measure(opener(lambda: SQLiteStore(path), leases=leases), processes, seconds=seconds)


def on_server(conninfo: str, processes: int, *, seconds: float, leases: bool = False) -> Rate:
    """Measures a ledger in PostgreSQL, under a name of its own."""
    from langchain_dpicl.stores import PostgresStore

    name = f"bench-{secrets.token_hex(4)}"
    with PostgresStore.new(conninfo, name=name) as store:
        Budget(epsilon=1.0, delta=1e-6, store=store)
    return measure(opener(lambda: PostgresStore(conninfo, name=name), leases=leases), processes, seconds=seconds)


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


def rows(options: argparse.Namespace, folder: Path, disk: str) -> Iterator[Row]:
    """Yields the rows of one disk as they are measured."""

    def row(store: str, leases: bool, rated: Callable[[], Rate]) -> Row:
        flush, slow_flush = sync_ms(folder)
        return Row(disk, store, leases, rated(), 1e3 / flush, slow_flush)

    for leases in (False, True):
        for count in options.processes:
            how: dict[str, Any] = {"seconds": options.seconds, "leases": leases}
            yield row("SQLite", leases, lambda count=count, how=how: on_disk(folder, count, **how))  # type: ignore[misc]
    with server(options.postgres) as conninfo:
        if conninfo is None:
            print("PostgreSQL: not run (no server is installed)")
            return
        for leases in (False, True):
            for count in options.processes:
                how = {"seconds": options.seconds, "leases": leases}
                yield row("PostgreSQL", leases, lambda count=count, how=how: on_server(conninfo, count, **how))  # type: ignore[misc]


# --- a slow disk --------------------------------------------------------------------------------------------------


def slow_disk(folder: Path) -> dict[str, str] | str:
    """Returns the environment of processes whose flushes take `SLOW_MS`, or why there is none."""
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
    if not sys.platform.startswith("linux") or not MEMORY.is_dir():
        return f"expected Linux with {MEMORY}, found {sys.platform}"
    if compiler is None:
        return "no C compiler is installed"
    library, state = folder / "slow_disk.so", folder / "state"
    source = Path(__file__).with_name("slow_disk.c")
    built = subprocess.run(  # noqa: S603  the compiler of this machine
        [compiler, "-O2", "-shared", "-fPIC", "-o", library, source, "-ldl"],
        capture_output=True,
        text=True,
        check=False,
    )
    if built.returncode:
        return f"{compiler} cannot build {source.name}: {built.stderr.strip()[:200]}"
    state.write_bytes(bytes(8))
    # A server that runs as another user preloads it too.
    folder.chmod(0o755)
    state.chmod(0o666)
    disk = {"LD_PRELOAD": str(library), "SLOW_DISK_FILE": str(state), "SLOW_DISK_US": f"{SLOW_MS * 1e3:.0f}"}
    return {**os.environ, "TMPDIR": str(MEMORY), **disk}


def rows_on_slow_disk(arguments: Sequence[str]) -> list[Row] | str:
    """Measures the rows in a process with the slow disk, which prints them; returns them, or why there are none."""
    with tempfile.TemporaryDirectory() as name:
        environment = slow_disk(Path(name))
        if isinstance(environment, str):
            return environment
        out = Path(name) / "rows.json"
        own = ["--lines", "0", "--only", SLOW, "--folder", str(MEMORY), "--json", str(out)]
        command = [sys.executable, __file__, *arguments, *own]
        subprocess.run(command, env=environment, check=False)  # noqa: S603  this file, by this Python
        if not out.exists():
            return "the process with the slow disk failed"
        data = json.loads(out.read_text())
    if data["sync_ms"][0] < 0.9 * SLOW_MS:
        return f"a flush took {data['sync_ms'][0]:.2f} ms although the library was preloaded"
    return [Row(**{**row, "rate": Rate(**row["rate"])}) for row in data["rows"]]


# --- opening ------------------------------------------------------------------------------------------------------


def long_ledger(path: Path, lines: int) -> None:
    """Writes a ledger of so many lines: pairs of reserve and commit, of one ticket each."""
    new_ledger(path)
    with SQLiteStore(path) as store:
        with contextlib.closing(Budget.open(store)) as budget:
            reservation = declared(budget).reserve("query")
            reservation.burn()
            reservation.commit()
        del budget
    with SQLiteStore(path) as store:
        body = {"component": "bench", "template": "query", "label": None, "count": 1, "amount": 1.0}
        last = len(list(store.records()))
        while last < lines:
            with store.transaction() as view:
                for _ in range(min(5_000, (lines - last + 1) // 2)):
                    entry = view.append("reserve", body | {"nonce": secrets.token_hex(8)}).seq
                    last = view.append("commit", {"reservation": entry, "count": 1}).seq
            print(f"\r{last:,} of {lines:,} lines written", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)


def memory_kb(field: str) -> int:
    """Returns a number of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def open_here(path: Path) -> dict[str, float]:
    """Opens a ledger in this process, which has not read it before; returns seconds and memory."""
    Path("/proc/self/clear_refs").write_text("5")  # the most memory so far is that of now
    before, start, processor = memory_kb("VmRSS"), time.perf_counter(), time.process_time()
    with SQLiteStore(path) as store:
        Budget.open(store)
        took = {"seconds": time.perf_counter() - start, "cpu": time.process_time() - processor}
    return took | {"mb": (memory_kb("VmHWM") - before) / 1024}


@contextlib.contextmanager
def read_only(path: Path) -> Iterator[sqlite3.Connection]:
    """Yields a connection that sees the rows of a ledger's file as they are."""
    with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as connection:
        yield connection


def opening(path: Path, *, has_snapshot: bool) -> Opening:
    """Opens a ledger in a process of its own."""
    with read_only(path) as connection:
        start = time.process_time()
        lines = sum(1 for _ in connection.execute("SELECT * FROM lines ORDER BY ledger, seq"))
        plain = time.process_time() - start
    command = [sys.executable, __file__, "--open", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603  this file, by this Python
    size = path.stat().st_size / 2**20
    return Opening(lines=lines, has_snapshot=has_snapshot, plain=plain, file_mb=size, **json.loads(done.stdout))


def openings(folder: Path, lines: int) -> Iterator[Opening]:
    """Opens a long ledger, and once more after a reservation if that wrote a snapshot line."""
    path = folder / "long.db"
    long_ledger(path, lines)
    yield opening(path, has_snapshot=False)
    with SQLiteStore(path) as store, contextlib.closing(Budget.open(store)) as budget:
        declared(budget).reserve("query")
    with read_only(path) as connection:
        has_snapshot = bool(connection.execute("SELECT 1 FROM lines WHERE kind = 'snapshot' LIMIT 1").fetchall())
    if has_snapshot:
        yield opening(path, has_snapshot=True)


# --- the program --------------------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="how long each row is measured")
    parser.add_argument("--processes", type=int, nargs="+", default=list(PROCESSES))
    parser.add_argument("--postgres", default="", help="a database to use; nothing: a server of its own")
    parser.add_argument("--folder", type=Path, help="where SQLite writes; nothing: the folder for temporary files")
    parser.add_argument("--lines", type=int, default=OPENED_LINES, help="of the ledger that is opened; 0: none")
    parser.add_argument("--only", choices=(OWN, SLOW), help="the rows of one disk; the slow one is the caller's task")
    parser.add_argument("--open", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, default=Path("out/bench_ledger.json"))
    options = parser.parse_args(arguments)
    if options.open is not None:
        print(json.dumps(open_here(options.open)))
        return 0
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        busy, disk = os.getloadavg()[0], sync_ms(folder)
        if options.only != SLOW:
            print(f"{os.cpu_count()} cores, load {busy:.1f} before")
            print(f"4 KiB on the disk: p50 {disk[0]:.2f}, p99 {disk[1]:.2f} ms")
            print(TITLE)
        found: list[Row] = []
        for row in rows(options, folder, options.only or OWN):
            found.append(row)
            print(row.line(), flush=True)
            if row.rate.fault:
                print(f"  {row.rate.fault}", flush=True)
        data: dict[str, Any] = {"load": busy, "sync_ms": disk}
        opened: list[Opening] = []
        if options.only is None:
            slow = rows_on_slow_disk(sys.argv[1:] if arguments is None else arguments)
            if isinstance(slow, str):
                print(f"a disk of {SLOW_MS:g} ms: not run ({slow})")
            else:
                found += slow
            for each in openings(folder, options.lines) if options.lines else ():
                opened.append(each)
                print(each.line(), flush=True)
            slowest = min((row.rate.pairs for row in found), default=0.0)
            print(f"callers of {CALL_MS:.0f} ms that the slowest row serves at once: {slowest * CALL_MS / 1e3:,.0f}")
            print(f"load {os.getloadavg()[0]:.1f} after")
            lines = list(verdicts(found, opened, {OWN: "", SLOW: slow if isinstance(slow, str) else ""}))
            print("\n".join(lines))
            data["verdicts"] = lines
    data |= {"rows": [asdict(row) for row in found], "openings": [asdict(each) for each in opened]}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(data, indent=1))
    return int(any(row.rate.refused for row in found))


if __name__ == "__main__":
    sys.exit(main())
