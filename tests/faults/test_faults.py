"""A few trials of every fault; `make faults` runs them all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from langchain_dpicl.privacy.ledger.store import InMemoryStore
from tests.faults import leases, power, storms
from tests.faults.afresh import Afresh
from tests.faults.catalogue import FAULTS, Fault
from tests.faults.counts import Count, Violation, require
from tests.faults.recorded_disk import CAN_RECORD
from tests.ledgers import budget, tickets


@pytest.fixture(scope="module")
def afresh() -> Iterator[Afresh]:
    """The process that the trials run in."""
    with Afresh() as found:
        yield found


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.few], ids=lambda fault: fault.words)
def test_a_fault_costs_no_line_and_gives_nothing_back(fault: Fault, afresh: Afresh, tmp_path: Path) -> None:
    found = afresh.count(fault.words, tmp_path, trials=fault.few)
    assert found.violations == []
    assert found.trials >= fault.few
    assert found.seen or "copies" in fault.words


@pytest.fixture(scope="module")
def whole_afresh() -> Iterator[Afresh]:
    """Another one, for what imports all of the package: forks of the first would be slow after that."""
    with Afresh() as found:
        yield found


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_components_that_are_killed_make_no_more_private_calls_than_the_ledger_has_tickets(
    whole_afresh: Afresh, tmp_path: Path
) -> None:
    found = whole_afresh.count("L2 kill -9 of whole components, SQLite", tmp_path, trials=10)
    assert found.violations == []
    assert sum(found.seen.values()) >= 5


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.loopback
def test_agents_that_are_killed_with_their_server_get_no_answer_without_a_ticket(
    whole_afresh: Afresh, tmp_path: Path
) -> None:
    pytest.importorskip("mcp")
    found = whole_afresh.count("L2 kill -9 of agents and their server, SQLite", tmp_path, trials=8)
    assert found.violations == []
    assert found.seen["private calls of agents"] >= 4
    assert found.seen["answers"] >= 1


def test_a_private_call_without_a_ticket_is_found(tmp_path: Path) -> None:
    ledger = storms.KilledLedger(tmp_path / "b.db", "voting")
    ledger.check()
    ledger.noted.write_bytes(b".")
    with pytest.raises(Violation, match="1 private calls, 0 tickets"):
        ledger.check()


def test_a_ticket_that_burnt_twice_or_that_no_line_reserved_is_found() -> None:
    store = InMemoryStore()
    share = budget(store=store).declare("c", tickets=tickets(1e-3, 10), epsilon=0.1)
    places = [leases.used(share, 3), leases.used(share)]
    burnt = [place for some in places for place in some]
    leases.check_places(store, burnt)
    with pytest.raises(Violation, match="burnt twice"):
        leases.check_places(store, [*burnt, burnt[-1]])
    with pytest.raises(Violation, match="no line reserved"):
        leases.check_places(store, [*burnt, (burnt[-1][0], 1)])


def test_whatever_goes_wrong_in_a_trial_is_counted() -> None:
    ticks: list[int] = []
    count = Count(tick=lambda: ticks.append(1))
    with count.trial("good"):
        require(True, "never")
    with count.trial("bad"):
        require(False, "too much was granted")
    with count.trial("worse"):
        _ = count.violations[7]
    assert (count.trials, len(ticks)) == (3, 3)
    assert count.violations[0] == "bad: too much was granted"
    assert count.violations[1].startswith("worse: IndexError at test_faults.py:")


@pytest.mark.skipif(not CAN_RECORD, reason="SQLite's file system layer cannot be watched here")
@pytest.mark.usefixtures("simple_prices")
@pytest.mark.parametrize("lies", ["log", "folder"])
def test_a_ledger_that_does_not_wait_for_the_disk_is_found(lies: str, tmp_path: Path) -> None:
    """Sixty moments miss a folder that lies once in some thirty times: six hundred are tried, run by run."""
    count = Count()
    for seed in range(3, 33):
        (folder := tmp_path / str(seed)).mkdir()
        power.lose_power(folder, count, trials=power.PER_RUN, lies=lies, seed=seed)
        if any("were granted and are gone" in words for words in count.violations):
            return
    raise AssertionError("a ledger that does not wait for the disk is not found")
