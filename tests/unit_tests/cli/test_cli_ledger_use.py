"""`dpicl ledger dangling`, `metrics` and `bench`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.budget.handler import PrivacyBudgetCallbackHandler
from langchain_dpicl.cli import ledger
from langchain_dpicl.exceptions import ConfigurationError, LedgerError
from langchain_dpicl.privacy.accounting.events import PureEvent
from langchain_dpicl.privacy.ledger.shares import Share
from langchain_dpicl.privacy.ledger.tickets import Ticket
from langchain_dpicl.stores import SQLiteStore
from tests.ledger_files import Shell, spend


@pytest.fixture
def dpicl(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A ledger with two open reservations, the first of them of 2020."""
    with SQLiteStore.new(tmp_path / "b.db") as store, pytest.MonkeyPatch.context() as patched:
        budget = Budget(epsilon=4.0, delta=1e-6, store=store)
        patched.setattr("langchain_dpicl.privacy.ledger.store._now", lambda: "2020-01-01T00:00:00+00:00")
        patched.setattr("langchain_dpicl.stores.rows._now", lambda: "2020-01-01T00:00:00+00:00", raising=False)
        spend(budget)
        patched.undo()
        pool = budget.gdp_pool("young", epsilon=0.25)
        pool.reserve(mu=pool.mu)
        budget.close()
    return tmp_path / "b.db"


# --- dangling ---------------------------------------------------------------------------------------------------------


def test_dangling_lists_open_reservations_with_the_process_that_holds_them(dpicl: Shell, file: Path) -> None:
    assert dpicl("dangling", file) == 0
    assert "open reservations: 2\n" in dpicl.out
    assert re.search(r"line 3, 2020-\S+: 'few-shot', token x 1, process [0-9a-f]{16}\n", dpicl.out)
    assert "'young', gdp x 1" in dpicl.out
    assert "count as spent" in dpicl.out


def test_dangling_shows_those_that_are_older(dpicl: Shell, file: Path) -> None:
    assert dpicl("dangling", file, "--older", "1h", "--json") == 0
    assert [each["component"] for each in json.loads(dpicl.out)["dangling"]] == ["few-shot"]
    assert dpicl("dangling", file, "--older", "99999d") == 0
    assert dpicl.out == "open reservations: 0\n"
    assert dpicl("dangling", file, "--older", "0s", "--json") == 0
    assert len(json.loads(dpicl.out)["dangling"]) == 2


def test_dangling_goes_page_by_page(dpicl: Shell, file: Path) -> None:
    assert dpicl("dangling", file, "--limit", 1) == 0
    assert "open reservations: 1 on this page\n" in dpicl.out
    after = re.search(r"the next page: --after (\d+)\n", dpicl.out)
    assert after is not None
    assert dpicl("dangling", file, "--limit", 5, "--after", after[1]) == 0
    assert "few-shot" not in dpicl.out
    assert "young" in dpicl.out
    assert "next page" not in dpicl.out


@pytest.mark.parametrize("age", ["1", "h", "1w", "-1h", "1e3h", "999999999d", ""])
def test_dangling_refuses_an_age_that_is_none(age: str, dpicl: Shell, file: Path) -> None:
    assert dpicl("dangling", file, f"--older={age}") == 2
    assert "--older: expected a time such as 90s, 30m, 1h or 2d" in dpicl.err


def test_dangling_refuses_pages_that_are_none(dpicl: Shell, file: Path) -> None:
    for option, value in (("--limit", 0), ("--after", -1)):
        assert dpicl("dangling", file, f"{option}={value}") == 2
        assert f"{option.strip('-')}: expected" in dpicl.err


def test_show_lists_every_open_reservation_however_many_pages_they_fill(
    dpicl: Shell, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Budget.dangling
    monkeypatch.setattr(Budget, "dangling", lambda budget, **page: whole(budget, limit=1, **page))
    assert dpicl("show", file, "--json") == 0
    assert [each["component"] for each in json.loads(dpicl.out)["dangling"]] == ["few-shot", "young"]


def test_what_is_left_of_a_pool_is_never_printed_above_it() -> None:
    pool = (budget := Budget(epsilon=4.0, delta=1e-6)).gdp_pool("young", epsilon=0.3)
    pool.reserve(mu=pool.mu / 4)
    printed = re.search(r"of young: (\S+) of its pool", "".join(ledger.remaining_text(budget)))
    assert printed
    assert float(printed[1]) <= budget.use().pools["young"]


# --- metrics ----------------------------------------------------------------------------------------------------------


def test_metrics_print_what_prometheus_reads(dpicl: Shell, file: Path) -> None:
    before = file.read_bytes()
    assert dpicl("metrics", file) == 0
    with SQLiteStore(file) as store:
        where = f'ledger="budget",ledger_id="{Budget.open(store).ledger_id}"'
    assert f"dpicl_epsilon_spent{{{where}}} 1.75" in dpicl.out
    assert f'dpicl_tickets_held{{{where},component="few-shot"}} 1' in dpicl.out
    assert "refused" not in dpicl.out  # a process that has just begun
    assert file.read_bytes() == before


def test_metrics_are_json_too(dpicl: Shell, file: Path) -> None:
    assert dpicl("metrics", file, "--json") == 0
    data = json.loads(dpicl.out)
    assert (data["ledger"], data["epsilon"], data["epsilon_spent"]) == ("budget", 4.0, 1.75)
    assert data["tickets"]["few-shot"]["held"] == 1
    assert data["pools"]["young"] == 0.0
    assert "wait_ms_p50" not in data


def test_metrics_read_an_exported_ledger(dpicl: Shell, file: Path, tmp_path: Path) -> None:
    assert dpicl("export", file, "--out", tmp_path / "ledger.jsonl") == 0
    assert dpicl("metrics", tmp_path / "ledger.jsonl", "--json") == 0
    assert json.loads(dpicl.out)["epsilon_spent"] == 1.75


# --- bench ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beside", ["folder", "file"])
def test_bench_measures_beside_a_place_and_leaves_nothing(beside: str, dpicl: Shell, file: Path) -> None:
    before, names = file.read_bytes(), sorted(path.name for path in file.parent.iterdir())
    place = file if beside == "file" else file.parent
    assert dpicl("bench", place, "--seconds", 0.1, "--processes", 1, 2) == 0
    lines = dpicl.out.splitlines()
    assert lines[-5] == f"held {ledger.HEADING}"
    assert [line.split()[:2] for line in lines[-4:]] == [["1", "1"], ["1", "2"], ["64", "1"], ["64", "2"]]
    assert re.search(r"4 KiB on the disk: p50 \S+, p99 \S+ ms: [\d,]+ a second\n", dpicl.out)
    assert sorted(path.name for path in file.parent.iterdir()) == names
    assert file.read_bytes() == before


def test_bench_says_each_row_as_it_comes(tmp_path: Path) -> None:
    seen: list[str] = []

    def say(text: str) -> None:
        seen.append(text)
        assert list(tmp_path.glob(".dpicl-bench-*"))  # while it runs

    ledger.bench(tmp_path, processes=[1], seconds=0.1, say=say)
    assert len(seen) == 5
    assert list(tmp_path.iterdir()) == []


def test_bench_prints_json_alone(dpicl: Shell, tmp_path: Path) -> None:
    assert dpicl("bench", tmp_path, "--seconds", 0.1, "--processes", 1, "--json") == 0
    data = json.loads(dpicl.out)
    assert data["sync_ms"]["p50"] > 0.0
    assert [(row["most_held"], row["processes"]) for row in data["rows"]] == [(1, 1), (64, 1)]
    assert all(row["pairs"] > 0.0 for row in data["rows"])  # which is larger depends on what else the machine does


def test_bench_ends_with_one_where_a_process_was_refused(
    dpicl: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    declared = ledger.declared

    def used_up(budget: Budget) -> Share:
        share = declared(budget)
        share.reserve("query", count=ledger.TICKETS).burn(count=ledger.TICKETS)
        return share

    with monkeypatch.context() as patch:
        patch.setattr(ledger, "TICKETS", 3)
        patch.setattr(ledger, "declared", used_up)
        assert dpicl("bench", tmp_path, "--seconds", 0.2, "--processes", 1) == 1
    assert "PrivacyBudgetExceededError: " in dpicl.out
    monkeypatch.setattr(ledger, "new_ledger", lambda _: None)
    assert dpicl("bench", tmp_path, "--seconds", 0.2, "--processes", 1, "--json") == 1
    for row in json.loads(dpicl.out)["rows"]:
        assert (row["pairs"], row["p99"]) == (0.0, None)
        assert "expected a ledger" in row["fault"]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--processes", "0"], "--processes"),
        (["--processes", "many"], "--processes"),
        (["--seconds", "0"], "--seconds"),
        (["--seconds", "nan"], "--seconds"),
    ],
)
def test_bench_refuses_what_cannot_be_measured(options: list[str], word: str, dpicl: Shell, tmp_path: Path) -> None:
    assert dpicl("bench", tmp_path, *options) == 2
    assert f"{word}: expected" in dpicl.err
    assert list(tmp_path.iterdir()) == []


def test_bench_takes_no_address_and_quotes_none(dpicl: Shell) -> None:
    assert dpicl("bench", "postgresql://user:hunter2@127.0.0.1:1/db") == 2
    assert "found an address" in dpicl.err
    assert "hunter2" not in dpicl.out + dpicl.err


def test_bench_refuses_a_folder_that_is_not_there(dpicl: Shell, tmp_path: Path) -> None:
    assert dpicl("bench", tmp_path / "no" / "b.db") == 2
    assert str(tmp_path / "no") in dpicl.err


def test_bench_refuses_a_system_that_cannot_fork(dpicl: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.fork")
    code: Any = dpicl("bench", tmp_path, "--seconds", 0.1)
    assert code != 0
    assert "a system that can fork" in dpicl.err


# --- check ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def nearly(tmp_path: Path) -> Path:
    """A ledger of which an eighth is promised, to a share of which eight tickets of ten are charged."""
    with SQLiteStore.new(tmp_path / "c.db") as store:
        budget = Budget(epsilon=4.0, delta=1e-6, store=store, most_held=1)
        ticket = Ticket("query", PureEvent(0.001), max_count=10, refundable=True)
        budget.declare("votes", tickets=[ticket], epsilon=0.5).reserve("query", count=8)
        budget.close()
    return tmp_path / "c.db"


@pytest.mark.parametrize(("warn", "code"), [("0.8", 1), ("0.81", 0), ("0.125", 1), ("1", 0)])
def test_check_ends_with_one_where_a_share_is_charged_that_far(
    dpicl: Shell, nearly: Path, warn: str, code: int
) -> None:
    assert dpicl("check", nearly, "--warn", warn) == code
    assert " 80.0%  share 'votes'" in dpicl.out
    assert ("'votes': 80.0% charged" in dpicl.err) == (code == 1)


def test_check_looks_at_the_ledger_and_at_one_share_alone(dpicl: Shell, nearly: Path) -> None:
    assert dpicl("check", nearly, "--json") == 1
    found = json.loads(dpicl.out)
    assert (found["ok"], found["warn"]) == (False, 0.8)
    assert [(each["component"], each["reached"]) for each in found["parts"]] == [(None, False), ("votes", True)]
    assert dpicl("check", nearly, "--component", "votes", "--warn", "0.9") == 0
    assert dpicl("check", nearly, "--component", "vote") == 2
    assert "'votes'" in dpicl.err


@pytest.mark.parametrize("part", ["0", "1.1", "-1", "nan", "much"])
def test_check_refuses_what_is_no_part(dpicl: Shell, nearly: Path, part: str) -> None:
    assert dpicl("check", nearly, "--warn", part) == 2
    assert f"found '{part}'" in dpicl.err


def test_a_ledger_is_opened_where_the_environment_says(
    tmp_path: Path, nearly: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DPICL_LEDGER", str(nearly))
    opened = PrivacyBudgetCallbackHandler.open()
    assert opened.use().tickets["votes"].left == 2
    opened.budget.close()
    monkeypatch.setenv("DPICL_LEDGER", str(tmp_path / "missing.db"))
    with pytest.raises(LedgerError):
        PrivacyBudgetCallbackHandler.open()
    for nothing in ("", None):
        monkeypatch.delenv("DPICL_LEDGER", raising=False)
        if nothing is not None:
            monkeypatch.setenv("DPICL_LEDGER", nothing)
        with pytest.raises(ConfigurationError, match="set DPICL_LEDGER"):
            PrivacyBudgetCallbackHandler.open()
