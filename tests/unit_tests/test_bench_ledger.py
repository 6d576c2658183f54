"""The ledger benchmark's own arithmetic, what it prints, and that what it measures is the ledger."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import bench_ledger
from bench_ledger import OWN, SLOW, Goal, Opening, Row

from langchain_dpicl import Budget
from langchain_dpicl.cli import ledger
from langchain_dpicl.cli.ledger import Rate
from langchain_dpicl.stores import SQLiteStore


def rate(processes: int = 1, *, pairs: float = 250.0, p99: float = 40.0, refused: int = 0) -> Rate:
    return Rate(processes, pairs, p50=4.0, p99=p99, longest=50.0, cpu=0.5, least=10, most=20, refused=refused)


def row(store: str = "SQLite", *, disk: str = OWN, leases: bool = False, **of_rate: float) -> Row:
    return Row(disk, store, leases, rate(**of_rate), fsync=200.0, fsync_p99=8.0)  # type: ignore[arg-type]


# --- rows -------------------------------------------------------------------------------------------------------------


def test_a_row_shows_where_how_fast_how_fair_and_how_fast_the_disk_is() -> None:
    said = row(processes=8).line().split()
    assert said == ["own", "SQLite", "no", "8", "250", "4.00", "40.00", "50.00", "0.50", "10", "20", "0", "200"]
    assert len(row(processes=8).line()) == len(bench_ledger.TITLE)


@pytest.mark.parametrize("processes", [1, 3])
def test_what_is_counted_stands_in_the_ledger(processes: int, tmp_path: Path) -> None:
    path = tmp_path / "b.db"
    ledger.new_ledger(path)
    found = ledger.measure(lambda: Budget.open(SQLiteStore(path)), processes, seconds=0.2)
    with SQLiteStore(path) as store:
        budget = Budget.open(store)
        budget.verify()
        reserved = ledger.TICKETS - ledger.declared(budget).remaining("query")
    assert (found.processes, found.refused, found.fault) == (processes, 0, "")
    assert round(found.pairs * 0.2) == reserved > 0
    assert found.least * processes <= reserved <= found.most * processes
    assert 0.0 < found.p50 <= found.p99 <= found.longest
    assert found.cpu > 0.0


def test_a_process_that_gets_no_time_before_the_end_measures_one_pair(tmp_path: Path) -> None:
    path = tmp_path / "b.db"
    ledger.new_ledger(path)
    found = ledger.measure(lambda: Budget.open(SQLiteStore(path)), 1, seconds=1e-9)
    assert (found.least, found.most, found.refused) == (1, 1, 0)


def test_a_process_that_cannot_open_the_ledger_is_counted_and_its_reason_shown(tmp_path: Path) -> None:
    found = ledger.measure(lambda: Budget.open(SQLiteStore(tmp_path / "none.db")), 2, seconds=0.1)
    assert (found.pairs, found.refused) == (0.0, 2)
    assert math.isnan(found.p99)
    assert found.fault.startswith("LedgerUnavailableError: ")


def test_the_disk_is_asked_what_a_flush_takes_and_nothing_is_left(tmp_path: Path) -> None:
    p50, p99 = ledger.sync_ms(tmp_path, times=3)
    assert 0.0 < p50 <= p99
    assert list(tmp_path.iterdir()) == []


# --- verdicts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pairs", "verdict"), [(199.9, "MISSED"), (200.0, "PASS"), (1234.5, "PASS"), (math.nan, "MISSED")]
)
def test_a_rate_is_compared_with_its_goal_and_with_plain_flushes(pairs: float, verdict: str) -> None:
    said = Goal("SQLite", 1, leases=False, least=200).verdict(row(pairs=pairs))
    assert said.startswith("own disk, SQLite, 1 process: pairs/s ")
    assert said.split()[-1] == verdict
    assert said.split()[-2] == ("nan" if math.isnan(pairs) else f"{pairs / 200:.2f}")
    assert said.split()[-6:-4] == [">=", "200"]


@pytest.mark.parametrize(("p99", "verdict"), [(1000.0, "PASS"), (1000.1, "MISSED"), (math.nan, "MISSED")])
def test_a_wait_is_compared_with_its_goal(p99: float, verdict: str) -> None:
    said = Goal("SQLite", 64, leases=False, most=1000).verdict(row(processes=64, p99=p99))
    assert "64 processes: p99 ms" in said
    assert said.split()[-1] == verdict


def test_every_goal_gets_a_line_and_what_was_not_measured_says_why() -> None:
    opened = Opening(1000, has_snapshot=False, seconds=2.0, cpu=1.9, mb=31.0, plain=0.5, file_mb=10.0)
    rows = [row(processes=1), row("PostgreSQL", processes=64, pairs=601.0)]
    said = list(bench_ledger.verdicts(rows, [opened], {OWN: "", SLOW: "no C compiler is installed"}))
    assert len(said) == 1 + 2 * len(bench_ledger.GOALS) + 4
    found = [line.split()[-1] for line in said if line.endswith(("PASS", "MISSED"))]
    assert found == ["PASS", "PASS", "PASS", "PASS", "MISSED"]  # rate, rate, wait; seconds, megabytes
    slow = [line for line in said if line.startswith("4 ms disk")]
    assert len(slow) == len(bench_ledger.GOALS)
    assert all(line.endswith("not run: no C compiler is installed") for line in slow)
    assert next(line for line in said if line.startswith("opening from a snapshot: processor s ")).endswith(
        "no snapshots"
    )


def test_goals_of_leases_are_not_given_to_rows_without_them() -> None:
    rows = [row(processes=8, pairs=50_000.0)]
    said = list(bench_ledger.verdicts(rows, [], {OWN: ""}))
    leases = [line for line in said if "leases" in line]
    assert len(leases) == 5
    assert all("not run" in line for line in leases)


# --- the whole program ------------------------------------------------------------------------------------------------


@pytest.mark.benches
def test_the_program_prints_rows_openings_and_verdicts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_ledger, "server", lambda _: __import__("contextlib").nullcontext(None))
    monkeypatch.setattr(bench_ledger, "rows_on_slow_disk", lambda _: "no C compiler is installed")
    out = tmp_path / "out" / "bench.json"
    options = ["--seconds", "0.1", "--processes", "1", "--lines", "50", "--folder", str(tmp_path), "--json", str(out)]
    assert bench_ledger.main(options) == 0
    said = capfd.readouterr().out
    for words in (
        bench_ledger.TITLE,
        "own   SQLite     no             1",
        "PostgreSQL: not run (no server is installed)",
        "a disk of 4 ms: not run (no C compiler is installed)",
        "51 lines from line 1: ",
        "4 ms disk, SQLite, 1 process: pairs/s             not run: no C compiler",
    ):
        assert words in said
    data = json.loads(out.read_text())
    assert data["rows"][0]["store"] == "SQLite"
    assert data["openings"][0]["lines"] == 51
    assert data["verdicts"][0] == bench_ledger.VERDICTS
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


@pytest.mark.benches
def test_a_long_ledger_verifies_and_is_opened_in_a_process_of_its_own(tmp_path: Path) -> None:
    (opened, *_) = bench_ledger.openings(tmp_path, 301)
    with SQLiteStore(tmp_path / "long.db") as store:
        Budget.open(store).verify()
    assert opened.lines == 301
    assert opened.seconds > 0.0
    assert 0.0 <= opened.mb < 100.0


def test_a_flush_of_the_slow_disk_takes_its_time_in_every_process_and_is_shared(tmp_path: Path) -> None:
    environment = bench_ledger.slow_disk(tmp_path)
    if isinstance(environment, str):
        pytest.skip(environment)
    environment["SLOW_DISK_US"] = "1000000"  # a second; one after the other, 64 flushes take a minute
    program = """if True:
        import os, sys, tempfile, threading, time
        with tempfile.TemporaryFile() as file:
            start = time.monotonic()
            threads = [threading.Thread(target=call, args=[file.fileno()]) for call in [os.fsync, os.fdatasync] * 32]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            print(time.monotonic() - start)
    """
    run = bench_ledger.subprocess.run
    done = run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert 1.0 <= float(done.stdout) < 60.0
    alone = [sys.executable, "-c", program]  # on a busy machine one may take long by itself, and hardly each of ten
    assert any(float(run(alone, capture_output=True, text=True, check=True).stdout) < 1.0 for _ in range(10))
