"""The failures of an event are charged in every one of its worlds, whichever function computes the price."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.cli.main import main
from langchain_dpicl.exceptions import AccountantsDisagreeError, PrivacyBudgetExceededError, UnknownEventError
from langchain_dpicl.privacy.accounting import delta_upper_bound, epsilon_bound, epsilon_upper_bound
from langchain_dpicl.privacy.accounting import epsilon as accounting
from langchain_dpicl.privacy.accounting.epsilon import Terms, UnitTerms, normal_form, unit_terms
from langchain_dpicl.privacy.accounting.events import (
    ComposedEvent,
    Event,
    FailureEvent,
    GaussianEvent,
    NoEvent,
    ParallelEvent,
    PureEvent,
    RepeatedEvent,
    SubsampledEvent,
    ZCdpEvent,
)
from langchain_dpicl.privacy.extensions.random_allocation import AllocatedEvent
from langchain_dpicl.privacy.ledger.tickets import Ticket
from langchain_dpicl.privacy.private_examples import PrivateExamples
from langchain_dpicl.privacy.second_opinions import second_reading
from langchain_dpicl.reports.ledger_audit import check_ledger
from langchain_dpicl.reports.report import verify_report
from langchain_dpicl.stores import SQLiteStore
from tests import audit_plants as plant

DELTA = 1e-6
ADJACENCIES = ("add_remove", "replace_one")
FAILURES = (0.0, 1e-12, 5e-7, 9.9e-7, 1e-6, 1e-3, 0.5)
GAUSSIAN, PURE, ZCDP = GaussianEvent(10.0), PureEvent(0.1), ZCdpEvent(0.004)
BRANCHES: dict[str, tuple[Event, ...]] = {
    "one world": (GAUSSIAN, GaussianEvent(20.0)),
    "two that cost nearly the same": (GAUSSIAN, PURE),
    "three": (GAUSSIAN, PURE, ZCDP),
    "the cheap one fails": (GAUSSIAN, ComposedEvent((PureEvent(0.01), FailureEvent(3e-7)))),
    "the dear one fails": (ComposedEvent((GAUSSIAN, FailureEvent(3e-7))), PURE),
    "one does nothing but fail": (GAUSSIAN, PURE, FailureEvent(9e-7)),
    "one is sampled": (RepeatedEvent(PURE, 3), RepeatedEvent(SubsampledEvent(ZCDP, 0.3), 2)),
    "one is dealt": (RepeatedEvent(PURE, 3), AllocatedEvent(GaussianEvent(4.0), 3, 0.5)),
}


def split(*branches: Event) -> ParallelEvent:
    return ParallelEvent("data", tuple(zip("abc", branches, strict=False)))


def beside(event: Event, failure: float) -> Event:
    return ComposedEvent((event, FailureEvent(failure))) if failure else event


def price(event: Event, adjacency: str, delta: float = DELTA) -> float:
    return epsilon_upper_bound(event, delta=delta, adjacency=adjacency)


def costliest(branches: tuple[Event, ...], failure: float, adjacency: str) -> float:
    """What every place of a unit costs by itself, without a split: the largest."""
    if adjacency == "add_remove":
        places = [(branch,) for branch in branches]
    else:
        places = [(one, other) for i, one in enumerate(branches) for other in branches[:i]]
    return max(price(beside(ComposedEvent(place), failure), adjacency) for place in places)


@pytest.mark.parametrize("adjacency", ADJACENCIES)
@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("name", BRANCHES)
def test_a_failure_is_charged_in_every_world(name: str, failure: float, adjacency: str) -> None:
    branches = BRANCHES[name]
    event = beside(split(*branches), failure)
    cost = price(event, adjacency)
    assert cost == pytest.approx(costliest(branches, failure, adjacency), rel=1e-6)
    assert (cost == math.inf) or delta_upper_bound(event, epsilon=cost, adjacency=adjacency) <= DELTA * (1 + 1e-5)
    assert cost == math.inf or failure < DELTA
    bound = epsilon_bound(event, delta=DELTA, adjacency=adjacency)
    assert bound.epsilon == cost
    assert bool(bound.opinions) == (cost < math.inf)


def test_the_table_has_events_of_several_worlds() -> None:
    counts = {name: [len(unit_terms(split(*parts), a)) for a in ADJACENCIES] for name, parts in BRANCHES.items()}
    assert counts.pop("one world") == [1, 1]
    assert counts["three"] == counts["one does nothing but fail"] == [3, 3]
    assert all(number > 1 for number, _ in counts.values())


def test_a_mechanism_that_tells_everything_half_of_the_time_has_no_price() -> None:
    for delta in (1e-6, 0.1, 0.4999):
        assert price(beside(split(GAUSSIAN, PURE), 0.5), "add_remove", delta) == math.inf
    assert price(beside(split(GAUSSIAN, PURE), 0.5), "add_remove", 0.6) < 0.1


def test_what_is_priced_has_no_failure_to_forget() -> None:
    assert {field.name for field in dataclasses.fields(Terms)}.isdisjoint({"failure", "failures"})
    with pytest.raises(UnknownEventError, match="failures outside"):
        normal_form(FailureEvent(1e-9))
    (world,) = unit_terms(beside(GAUSSIAN, 1e-7), "add_remove")
    assert (world.terms, world.failure) == (normal_form(GAUSSIAN), 1e-7)


def test_what_failures_leave_is_rounded_down() -> None:
    ten = RepeatedEvent(FailureEvent(1e-7), 10)
    (world,) = unit_terms(ten, "add_remove")
    assert world.failure == 1e-6
    assert world.delta_left(1e-6) == 0.0
    assert world.delta_left(1e-7) == 0.0
    assert world.delta_left(3e-6) == 2e-6
    assert price(ten, "add_remove", 1e-6) == math.inf
    assert price(ten, "add_remove", 1.0000000001e-6) == 0.0


@pytest.mark.parametrize("sample", [lambda e: SubsampledEvent(e, 0.5), lambda e: AllocatedEvent(e, 2, 0.5)])
@pytest.mark.parametrize("adjacency", ADJACENCIES)
def test_a_failure_on_a_sample_is_refused_beside_any_other_label(sample, adjacency: str) -> None:
    for other in (FailureEvent(0.1), NoEvent(), ComposedEvent((GAUSSIAN, FailureEvent(0.1)))):
        for branches in ((other, sample(FailureEvent(0.1))), (other, other, sample(FailureEvent(0.01)))):
            with pytest.raises(UnknownEventError, match="outside of secret samples"):
                price(split(*branches), adjacency, 0.9)


# --- second opinions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adjacency", ADJACENCIES)
@pytest.mark.parametrize("name", BRANCHES)
def test_a_second_reading_finds_the_terms_and_failures_of_every_world(name: str, adjacency: str) -> None:
    other = ParallelEvent("other", (("x", PureEvent(0.2)), ("y", beside(GaussianEvent(3.0), 1e-7))))
    twice = RepeatedEvent(ComposedEvent((split(*BRANCHES[name]), FailureEvent(2e-7), other)), 3)
    for event in (split(*BRANCHES[name]), twice, ComposedEvent((twice, split(NoEvent(), GAUSSIAN)))):
        for world in unit_terms(event, adjacency):
            assert second_reading(event, world.labels, in_parallel=False) == world


def test_a_second_reading_follows_samples_and_deals() -> None:
    labels = (("data", ("b",)),)
    inside = SubsampledEvent(split(GAUSSIAN, PURE), 0.5)
    dealt = AllocatedEvent(split(GAUSSIAN, PURE), 4, 0.5)
    always = SubsampledEvent(AllocatedEvent(FailureEvent(1e-7), 1, 1.0), 1.0)
    event = ComposedEvent((inside, dealt, always))
    apart = ComposedEvent((SubsampledEvent(PURE, 0.5), AllocatedEvent(PURE, 4, 0.5)))
    together = RepeatedEvent(SubsampledEvent(PURE, 0.5), 2)
    assert second_reading(event, labels, in_parallel=False) == UnitTerms(normal_form(apart), 1e-7, labels)
    assert second_reading(event, labels, in_parallel=True) == UnitTerms(normal_form(together), 1e-7, labels)


@pytest.mark.parametrize("adjacency", ADJACENCIES)
@pytest.mark.parametrize("failure", [5e-7, 1e-3])
def test_a_price_that_forgot_a_failure_is_refused_by_a_second_reading(
    failure: float, adjacency: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant.failures_forgotten(monkeypatch)
    event = beside(split(GAUSSIAN, PURE, ZCDP), failure)
    assert price(event, adjacency) == price(split(GAUSSIAN, PURE, ZCDP), adjacency)  # the bug is there
    with pytest.raises(AccountantsDisagreeError, match="second reading"):
        epsilon_bound(event, delta=DELTA, adjacency=adjacency)


def test_a_price_that_forgot_a_release_is_refused_by_a_second_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    right = accounting.unit_terms

    def forgetful(event: Event, adjacency: str) -> tuple[UnitTerms, ...]:
        return tuple(
            dataclasses.replace(w, terms=dataclasses.replace(w.terms, pure=())) for w in right(event, adjacency)
        )

    monkeypatch.setattr(accounting, "unit_terms", forgetful)
    event = ComposedEvent((GaussianEvent(7.0), PureEvent(0.77)))
    with pytest.raises(AccountantsDisagreeError, match="second reading"):
        epsilon_bound(event, delta=DELTA, adjacency="add_remove")


# --- shares that were sealed at such a price ------------------------------------------------------------------------


def declared(budget: Budget) -> None:
    """A joint plan of a discovery and of labels that cost differently, and a share that has nothing to do with it."""
    budget.bind(
        PrivateExamples(
            [], public_size={"a": 40, "b": 4000}, label_key="label", labels=("a", "b"), dataset_id="letters"
        )
    )
    tickets = [Ticket("token", GAUSSIAN, "a", 4), Ticket("token", PURE, "b", 4)]
    with budget.plan(delta=2e-7):
        finder = budget.declare(
            "found values", tickets=[Ticket("found", beside(PureEvent(0.5), 5e-7), None, 1)], epsilon=1.0, delta=9e-7
        )
        budget.declare("texts", tickets=tickets, partition="letters", epsilon=1.5, delta=9e-7)
    budget.declare("votes", tickets=[Ticket("query", PURE, None, 2)], epsilon=0.5).reserve("query")
    finder.reserve("found")


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    """A ledger of a version that forgot failures."""
    path = tmp_path / "budget.db"
    with pytest.MonkeyPatch.context() as patch, SQLiteStore.new(path) as store:
        plant.failures_forgotten(patch)
        patch.setattr(accounting, "second_opinions", lambda *_, **__: ((), ()))
        declared(Budget(epsilon=8.0, delta=1e-6, store=store))
    return path


def test_a_plan_whose_failures_reach_its_delta_is_refused() -> None:
    with pytest.raises(PrivacyBudgetExceededError, match="requested inf"):
        declared(Budget(epsilon=8.0, delta=1e-6))


def test_a_share_that_was_sealed_without_its_failure_is_named(sealed: Path) -> None:
    with SQLiteStore(sealed) as store:
        found, report = check_ledger(store), Budget.open(store).report()
    for problems in (found.problems, verify_report(report).problems):
        named = [problem for problem in problems if "too low by today's accounting" in problem]
        assert len(named) == 1, problems
        assert named[0].startswith("found values, texts: ")
        assert "sealed" in named[0]
        assert not any("votes" in problem for problem in problems)
    assert found.epsilon == verify_report(report).epsilon == math.inf
    assert not verify_report(report).ok


def test_dpicl_ledger_verify_names_it_and_ends_with_one(sealed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ledger", "verify", str(sealed)]) == 1
    told = capsys.readouterr()
    assert "not verified: found values, texts: " in told.err
    assert "too low by today's accounting" in told.err
    assert "NOT verified" in told.out
