from __future__ import annotations

import asyncio
import copy
import os
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.exceptions import (
    ConfigurationError,
    LedgerError,
    PrivacyBudgetExceededError,
    PrivacyBudgetMismatchError,
    PrivateAccessError,
    SealedShareError,
)
from langchain_dpicl.privacy import accounting
from langchain_dpicl.privacy._validate import exact, round_down, round_up
from langchain_dpicl.privacy.accounting.events import (
    BoundedRangeEvent,
    ComposedEvent,
    GaussianEvent,
    NoEvent,
    NonPrivateEvent,
    ParallelEvent,
    PureEvent,
    RepeatedEvent,
    SubsampledEvent,
)
from langchain_dpicl.privacy.ledger.budget import DeclaredShares
from langchain_dpicl.privacy.ledger.shares import Reservation
from langchain_dpicl.privacy.ledger.store import InMemoryStore
from langchain_dpicl.privacy.ledger.tickets import Component, ShareTerms, Ticket, event_of_tickets
from tests.ledgers import LABELS, budget, private, records, share_of, tickets

# --- exact amounts ----------------------------------------------------------------------------------------------------


@given(st.floats(1e-12, 1e6), st.lists(st.floats(1e-9, 1e3), min_size=1, max_size=5))
def test_rounding_takes_the_side_it_names(value: float, others: list[float]) -> None:
    total = sum((exact(other) for other in others), exact(value))
    assert exact(round_down(total)) <= total <= exact(round_up(total))
    assert round_up(total) - round_down(total) <= 4 * np.spacing(float(total))


def test_ten_tenths_are_one() -> None:
    assert sum((exact(0.1) for _ in range(10)), Fraction(0)) == 1


# --- tickets and their event ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    [
        {"template": ""},
        {"max_count": 0},
        {"max_count": -1},
        {"max_count": True},
        {"max_count": 1.5},
        {"refundable": 1},
        {"label": ""},
        {"event": "gaussian"},
        {"event": NonPrivateEvent()},
        {"event": RepeatedEvent(ComposedEvent((PureEvent(1.0), NonPrivateEvent())), 2)},
        {"event": SubsampledEvent(NonPrivateEvent(), 0.1)},
        {"event": ParallelEvent("d", (("a", PureEvent(1.0)),))},
    ],
    ids=str,
)
def test_a_ticket_with_a_public_fault_is_refused(fault: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        Ticket(**{"template": "t", "event": PureEvent(1.0), **fault})


def test_a_ticket_of_a_newer_unicode_is_read() -> None:
    """A name that another Python calls printable, or none, would make the ledger unreadable for those that share it."""
    for new in ("\U0001fae8", "\U0001343c", "\uffff"):  # of Unicode 15, of Unicode 15 and never printable, of none
        assert Ticket("t", PureEvent(1.0), f"queue {new}").label == f"queue {new}"
    for unprintable in ("queue\n", "queue \u202e", "queue \ud800"):
        with pytest.raises(ConfigurationError, match="label"):
            Ticket("t", PureEvent(1.0), unprintable)


def test_the_event_of_tickets_counts_every_ticket() -> None:
    pure, gauss = PureEvent(0.1), GaussianEvent(2.0)
    assert event_of_tickets([Ticket("t", pure, max_count=1)]) == pure
    assert event_of_tickets([Ticket("t", pure, max_count=5)]) == RepeatedEvent(pure, 5)
    mixed = [
        Ticket("u", gauss),
        Ticket("t", pure, "a", 5),
        Ticket("s", gauss, "a"),
        Ticket("t", pure, "b", 2),
    ]
    parallel = ParallelEvent(
        "d", (("a", ComposedEvent((RepeatedEvent(pure, 5), gauss))), ("b", RepeatedEvent(pure, 2)))
    )
    assert event_of_tickets(mixed, partition="d") == ComposedEvent((gauss, parallel))
    assert event_of_tickets(mixed[1:], partition="d") == parallel


@pytest.mark.parametrize("bad", [(), ["t"], [*tickets(), *tickets()]])
def test_tickets_must_be_there_and_distinct(bad: Any) -> None:
    with pytest.raises(ConfigurationError):
        event_of_tickets(bad)


def test_labels_need_a_partition() -> None:
    with pytest.raises(ConfigurationError, match="partition"):
        event_of_tickets(tickets(label="a"))


def test_terms_survive_their_json_form() -> None:
    component = Component(
        name="c",
        kind="tickets",
        tickets=tickets(label="a", refundable=True),
        partition="d",
        epsilon=1,
        delta=1e-7,
        implementation_delta=1e-12,
        public={"x": [1, None]},
    )
    terms = ShareTerms((component,), 1.0, 1e-7, False, component.event, {"engine": "e"})
    assert ShareTerms.from_dict(terms.to_dict()) == terms
    assert component.changed_terms(component) == []


@pytest.mark.parametrize("public", [{"x": float("nan")}, {"x": {1, 2}}, "x", {"x": "\ud800"}])
def test_what_reports_show_must_be_json(public: Any, simple_prices: Any) -> None:
    with pytest.raises(ConfigurationError, match="public"):
        budget().declare("c", tickets=tickets(), epsilon=1.0, public=public)


# --- shares -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault", [{"epsilon": 0}, {"epsilon": float("nan")}, {"delta": 1.0}, {"adjacency": "zero"}, {"name": ""}]
)
def test_a_budget_with_a_public_fault_is_refused(fault: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        Budget(**{"epsilon": 1.0, "delta": 1e-6, **fault})


def test_a_share_is_priced_from_its_tickets_at_its_part_of_delta(simple_prices: list[Any]) -> None:
    share = budget().declare("c", tickets=tickets(0.1, 10), epsilon=1.0, implementation_delta=1e-10)
    (event, delta, adjacency) = simple_prices[-1]
    assert event == RepeatedEvent(PureEvent(0.1), 10) == share.event
    assert delta <= 2.5e-7 - 1e-10
    assert delta == pytest.approx(2.5e-7 - 1e-10, rel=1e-12)
    assert adjacency == "add_remove"
    assert (share.epsilon, share.delta, share.component) == (1.0, 2.5e-7, "c")


def test_tickets_that_cost_more_than_the_share_are_refused(simple_prices: Any) -> None:
    ledger = budget()
    with pytest.raises(PrivacyBudgetExceededError) as caught:
        ledger.declare("c", tickets=tickets(0.1, 11), epsilon=1.0)
    assert (caught.value.requested, caught.value.remaining) == (pytest.approx(1.1), 1.0)
    assert "1.1" in str(caught.value)
    assert ledger.remaining_epsilon == 4.0


def test_shares_add_up_to_the_limit_and_no_further(simple_prices: Any) -> None:
    ledger = budget(epsilon=1.0)
    for number in range(10):
        ledger.declare(f"c{number}", tickets=tickets(0.01, 10), epsilon=0.1)
    assert ledger.remaining_epsilon == 0.0
    with pytest.raises(PrivacyBudgetExceededError) as caught:
        ledger.declare("more", tickets=tickets(1e-9, 1), epsilon=1e-8)
    assert (caught.value.requested, caught.value.remaining) == (1e-8, 0.0)


@pytest.mark.parametrize("epsilon", [3.0, 4.0], ids=["some is left", "none is left"])
def test_a_refusal_names_the_shares_of_this_process_that_reserved_nothing(simple_prices: Any, epsilon: float) -> None:
    """As where an unnamed component is built again: the first one's share is nobody's, and still takes room."""
    ledger = budget(epsilon=6.0)
    ledger.declare("asked", tickets=tickets(), epsilon=2.0).reserve("t")
    ledger.declare("voting", tickets=tickets(), epsilon=epsilon)
    with pytest.raises(PrivacyBudgetExceededError, match=r"no ticket reserved: \['voting'\]; component='voting' with"):
        ledger.declare("voting-2", tickets=tickets(), epsilon=epsilon)
    ledger.declare("voting", tickets=tickets(), epsilon=epsilon).reserve("t")
    with pytest.raises(PrivacyBudgetExceededError) as caught:
        ledger.declare("voting-2", tickets=tickets(), epsilon=epsilon)
    assert "no ticket reserved" not in str(caught.value)


def test_a_share_that_no_longer_fits_behind_those_of_others_takes_no_room(simple_prices: Any) -> None:
    ledger = budget(epsilon=4.0)
    late = ledger.declare("late", tickets=tickets(), epsilon=2.0)
    ledger.declare("small", tickets=tickets(), epsilon=1.0)
    Budget.open(ledger._store).declare("other", tickets=tickets(), epsilon=2.5).reserve("t")
    assert [share.terms.epsilon for share in ledger.report().shares] == [2.5, 1.0]
    assert ledger.remaining_epsilon == 0.5
    ledger.declare("new", tickets=tickets(0.01), epsilon=0.5).reserve("t")
    with pytest.raises(PrivacyBudgetExceededError):
        late.reserve("t")


def test_a_joint_share_of_which_another_process_sealed_a_component_takes_no_room(simple_prices: Any) -> None:
    ledger = budget(epsilon=4.0)
    with ledger.plan(epsilon=2.0, delta=5e-7):
        ledger.declare("one", tickets=tickets(), epsilon=1.0)
        ledger.declare("two", tickets=tickets(), epsilon=1.0)
    Budget.open(ledger._store).declare("one", tickets=tickets(), epsilon=1.0).reserve("t")
    assert [len(share.terms.components) for share in ledger.report().shares] == [1]
    assert ledger.remaining_epsilon == 3.0


def test_a_share_too_large_is_refused_before_it_is_priced(simple_prices: list[Any]) -> None:
    with pytest.raises(PrivacyBudgetExceededError) as caught:
        budget().declare("c", tickets=tickets(), epsilon=4.5, delta=1e-7)
    assert (caught.value.requested, caught.value.remaining) == (4.5, 4.0)
    assert simple_prices == []


def test_deltas_add_up_too(simple_prices: Any) -> None:
    ledger = budget()
    ledger.declare("c", tickets=tickets(), epsilon=1.0, delta=9e-7)
    with pytest.raises(PrivacyBudgetExceededError, match="delta"):
        ledger.declare("d", tickets=tickets(), epsilon=1.0)
    assert ledger.remaining_delta == pytest.approx(1e-7)
    ledger.declare("d", tickets=tickets(), epsilon=1.0, delta=1e-7)


def test_float_sums_fit_and_get_what_remains(simple_prices: Any) -> None:
    ledger = budget(epsilon=1.0)
    ledger.declare("c", tickets=tickets(0.01, 1), epsilon=0.7)
    share = ledger.declare("d", tickets=tickets(0.01, 1), epsilon=1.0 - 0.7)
    assert 1.0 - 0.7 > 0.3
    assert share.epsilon == 0.3
    assert ledger.remaining_epsilon == 0.0


@settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(epsilons=st.lists(st.floats(0.01, 3.0), min_size=1, max_size=8), limit=st.floats(0.5, 8.0))
def test_no_sequence_of_shares_exceeds_either_limit(simple_prices: Any, epsilons: list[float], limit: float) -> None:
    ledger = budget(epsilon=limit, delta=1e-5)
    charged, refusals = [], []
    for number, epsilon in enumerate(epsilons):
        try:
            share = ledger.declare(f"c{number}", tickets=tickets(1e-3, 1), epsilon=epsilon)
            share.reserve("t")
        except PrivacyBudgetExceededError as error:
            refusals.append((error.requested, error.remaining, ledger.remaining_epsilon))
        else:
            charged.append((share.epsilon or 0.0, share.delta or 0.0))
    assert sum((exact(epsilon) for epsilon, _ in charged), Fraction(0)) <= exact(limit)
    assert sum((exact(delta) for _, delta in charged), Fraction(0)) <= exact(1e-5)
    assert all(requested > remaining == left for requested, remaining, left in refusals)
    ledger.verify()


def test_a_share_without_an_epsilon_is_charged_what_it_costs(simple_prices: list[Any]) -> None:
    ledger = budget()
    given_delta = ledger.declare("c", tickets=tickets(0.1, 5), delta=1e-7)
    assert (given_delta.epsilon, given_delta.delta) == (0.5, 1e-7)
    neither = ledger.declare("d", tickets=tickets(0.1, 10))
    assert neither.epsilon == 1.0
    assert neither.delta == pytest.approx(9e-7 / 4)
    with pytest.raises(PrivacyBudgetExceededError):
        ledger.declare("e", tickets=tickets(0.1, 100))


def test_a_share_that_costs_nothing_still_leaves_delta_for_others(simple_prices: Any) -> None:
    ledger = budget()
    share = ledger.declare("free", tickets=(Ticket("t", NoEvent()),))
    share.reserve("t").burn()
    assert share.epsilon == 0.0
    assert ledger.remaining_delta == pytest.approx(1e-6 * (1 - 1e-3))


def test_no_delta_left_is_a_refusal(simple_prices: Any) -> None:
    ledger = budget()
    ledger.declare("c", tickets=tickets(), epsilon=1.0, delta=1e-6)
    with pytest.raises(PrivacyBudgetExceededError, match="delta"):
        ledger.declare("d", tickets=tickets())


@pytest.mark.parametrize("gap", [-1e-9, float("nan"), 2e-7, 1.0])
def test_an_implementation_delta_must_leave_something(gap: float, simple_prices: Any) -> None:
    with pytest.raises(ConfigurationError):
        budget().declare("c", tickets=tickets(), epsilon=1.0, delta=2e-7, implementation_delta=gap)


def test_default_deltas_of_shares_that_fit_also_fit(simple_prices: Any) -> None:
    ledger = budget(epsilon=4.0, delta=1e-6)
    for name in "abc":
        ledger.declare(name, tickets=tickets(0.01, 1), epsilon=4 / 3)
    assert 0.0 <= ledger.remaining_delta < 1e-15
    assert sum(map(exact, (ledger.default_delta(4 / 3),) * 3)) <= exact(1e-6)


def test_an_unsealed_share_can_be_declared_anew_and_the_old_handle_is_dead(simple_prices: Any) -> None:
    ledger = budget()
    old = ledger.declare("c", tickets=tickets(), epsilon=3.0)
    new = ledger.declare("c", tickets=tickets(), epsilon=2.0)
    assert ledger.remaining_epsilon == 2.0
    with pytest.raises(SealedShareError, match="declared anew"):
        old.reserve("t")
    new.reserve("t")
    assert ledger.remaining_epsilon == 2.0


def test_the_same_terms_are_the_same_share_without_pricing_again(simple_prices: list[Any]) -> None:
    ledger = budget()
    first = ledger.declare("c", tickets=tickets(), epsilon=1.0, public={"shown": 1})
    asked = len(simple_prices)
    second = ledger.declare("c", tickets=tickets(), epsilon=1.0, public={"shown": 2})
    assert len(simple_prices) == asked
    first.reserve("t", count=4)
    third = ledger.declare("c", tickets=tickets(), epsilon=1.0)
    assert len(simple_prices) == asked
    assert first.remaining("t") == second.remaining("t") == third.remaining("t") == 6
    with pytest.raises(PrivacyBudgetExceededError):
        third.reserve("t", count=7)


def test_a_share_that_is_declared_anew_takes_no_room_from_those_that_stay() -> None:
    store = InMemoryStore()
    ledger = budget(epsilon=4.0, store=store)
    ledger.declare("a", tickets=[Ticket("t", PureEvent(0.1))], epsilon=2.0, delta=1e-9)
    ledger.declare("b", tickets=[Ticket("t", PureEvent(0.1))], epsilon=1.0, delta=1e-9)
    Budget.open(store).declare("o", tickets=[Ticket("t", PureEvent(0.1))], epsilon=1.5, delta=1e-9).reserve("t")
    with pytest.raises(PrivacyBudgetExceededError):  # b may take 1.0 of the 2.5 that are left
        ledger.declare("a", tickets=[Ticket("t", PureEvent(0.2))], epsilon=1.9, delta=1e-9)


def test_threads_that_declare_the_same_terms_at_once_get_the_same_share(
    simple_prices: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, both_price = budget(), threading.Barrier(2)

    def priced(self: DeclaredShares, *arguments: Any, priced: Any = DeclaredShares.priced, **options: Any) -> Any:
        both_price.wait(10)
        return priced(self, *arguments, **options)

    monkeypatch.setattr(DeclaredShares, "priced", priced)
    with ThreadPoolExecutor(2) as pool:
        shares = list(pool.map(lambda _: share_of(ledger), range(2)))
    for share in shares:
        share.reserve("t", count=5)
    assert [share.remaining("t") for share in shares] == [0, 0]
    assert ledger.remaining_epsilon == 3.0


@pytest.mark.parametrize(
    "change",
    [
        {"tickets": tickets(0.1, 11), "epsilon": 2.0},
        {"tickets": tickets(0.2, 10), "epsilon": 2.0},
        {"tickets": tickets(refundable=True)},
        {"epsilon": 1.5},
        {"delta": 1e-8},
        {"implementation_delta": 1e-12},
        {"partition": "other"},
    ],
    ids="-".join,
)
def test_a_sealed_share_keeps_its_terms(change: dict[str, Any], simple_prices: Any) -> None:
    ledger = budget()
    terms: dict[str, Any] = {"tickets": tickets(), "epsilon": 1.0}
    share = ledger.declare("c", **terms)
    share.reserve("t")
    before = ledger.remaining_epsilon
    with pytest.raises(SealedShareError, match="another component name"):
        ledger.declare("c", **{**terms, **change})
    assert ledger.remaining_epsilon == before


PLAN: dict[str, Any] = {"method": "m", "epsilon": 1.0, "clip": 5.0, "texts": {"method": "t", "epsilon": 0.5, "rows": 4}}


@pytest.mark.parametrize(
    "change", [{"clip": 10.0}, {"deny": ["a"]}, {"texts": None}, {"texts": {**PLAN["texts"], "rows": 5}}], ids=str
)
def test_another_plan_is_refused_before_a_ticket_of_the_sealed_share_is_charged(
    change: dict[str, Any], simple_prices: Any
) -> None:
    ledger = budget()
    terms: dict[str, Any] = {"tickets": tickets(), "epsilon": 1.0}
    other = Budget.open(ledger._store)
    late = other.declare("c", **terms, plan={**PLAN, **change}, public={**PLAN, **change})
    share = ledger.declare("c", **terms, plan=PLAN, public=PLAN)
    share.reserve("t")
    for ask in (lambda: late.reserve("t"), lambda: other.declare("c", **terms, plan={**PLAN, **change})):
        with pytest.raises(SealedShareError, match=rf"found others in \['{next(iter(change))}'\]"):
            ask()
    assert share.remaining("t") == 9


def test_a_plan_may_be_priced_anew_and_what_is_shown_beside_it_may_differ(simple_prices: Any) -> None:
    ledger = budget()
    terms: dict[str, Any] = {"tickets": tickets(), "epsilon": 1.0}
    shown = {**PLAN, "texts": {**PLAN["texts"], "model": "small"}, "prompt": "a"}
    ledger.declare("c", **terms, plan=PLAN, public=shown).reserve("t")
    priced = {**PLAN, "epsilon": 0.75, "texts": {**PLAN["texts"], "epsilon": 0.25}}
    again = Budget.open(ledger._store).declare("c", **terms, plan=priced, public={**priced, "prompt": "b"})
    again.reserve("t")
    assert ledger.declare("c", **terms).remaining("t") == 8


def test_another_plan_before_the_first_reservation_declares_the_share_anew(simple_prices: Any) -> None:
    ledger = budget()
    terms: dict[str, Any] = {"tickets": tickets(), "epsilon": 1.0}
    old = ledger.declare("c", **terms, plan=PLAN, public=PLAN)
    plan = {**PLAN, "clip": 10.0}
    ledger.declare("c", **terms, plan=plan, public=plan).reserve("t")
    with pytest.raises(SealedShareError, match="declared anew"):
        old.reserve("t")
    assert ledger.report().shares[0].terms.components[0].public["clip"] == 10.0


def test_fresh_names_are_never_handed_out_twice(simple_prices: Any) -> None:
    ledger = budget()
    assert ledger.fresh_name("few-shot") == "few-shot"
    assert ledger.fresh_name("few-shot") == "few-shot-2"
    ledger.declare("voting", tickets=tickets(), epsilon=1.0)
    assert ledger.fresh_name("voting") == "voting-2"
    with ledger.plan(delta=1e-7):
        ledger.declare("joint", tickets=tickets(), epsilon=1.0)
        assert ledger.fresh_name("joint") == "joint-2"
    other = Budget.open(ledger._store)
    ledger.declare("sealed", tickets=tickets(), epsilon=1.0).reserve("t")
    assert other.fresh_name("sealed") == "sealed-2"


def test_labels_run_in_parallel_only_where_bound_examples_declare_them(simple_prices: list[Any]) -> None:
    ledger = budget()
    both = (*tickets(label="a"), *tickets(label="b"))
    with pytest.raises(ConfigurationError, match="bind"):
        ledger.declare("c", tickets=both, partition="d", epsilon=1.0)
    ledger.bind(private())
    with pytest.raises(ConfigurationError, match="labels"):
        ledger.declare("c", tickets=tickets(label="other"), partition="d", epsilon=1.0)
    share = ledger.declare("c", tickets=both, partition="d", epsilon=1.0)
    assert isinstance(simple_prices[-1][0], ParallelEvent)
    assert share.reserve("t", label="a", count=10).label == "a"
    assert share.remaining("t", label="b") == 10


# --- reserve, burn, commit, give back ---------------------------------------------------------------------------------


def test_the_first_reservation_seals_the_share_in_the_ledger(simple_prices: Any) -> None:
    store = InMemoryStore()
    ledger = budget(store=store)
    share = share_of(ledger)
    assert records(store) == []
    assert share.sealed is False
    reservation = share.reserve("t", count=3)
    assert share.sealed is True
    assert [kind for kind, _ in records(store)] == ["seal", "reserve"]
    assert records(store)[1][1]["count"] == 3
    reservation.burn()
    assert len(records(store)) == 2, "every reserved ticket is spent already, so a burn needs no line"
    reservation.commit()
    assert reservation.give_back() == 0
    assert [kind for kind, _ in records(store)][2:] == ["commit"]


def test_more_than_the_tickets_there_are_is_refused_with_both_numbers(simple_prices: Any) -> None:
    store = InMemoryStore()
    ledger = budget(store=store)
    share = share_of(ledger)
    with pytest.raises(PrivacyBudgetExceededError) as caught:
        share.reserve("t", count=11)
    assert (caught.value.requested, caught.value.remaining) == (11, 10)
    assert records(store) == [], "a refusal seals nothing"
    share.reserve("t", count=8)
    with pytest.raises(PrivacyBudgetExceededError, match="'t'") as caught:
        share.reserve("t", count=3)
    assert (caught.value.requested, caught.value.remaining) == (3, 2)


@pytest.mark.parametrize("count", [0, -1, True, 1.0, float("nan"), "1", None])
def test_counts_are_whole_and_positive(count: Any, simple_prices: Any) -> None:
    share = share_of(budget())
    reservation = share.reserve("t", count=2)
    for attempt in (lambda: share.reserve("t", count=count), lambda: reservation.burn(count)):
        with pytest.raises(ConfigurationError):
            attempt()
    with pytest.raises(ConfigurationError):
        reservation.commit(count)
    assert share.remaining("t") == 8


def test_unknown_tickets_are_refused(simple_prices: Any) -> None:
    share = share_of(budget())
    for template, label in (("u", None), ("t", "a")):
        with pytest.raises(ConfigurationError):
            share.reserve(template, label=label)
        with pytest.raises(ConfigurationError):
            share.remaining(template, label=label)


def test_a_reservation_says_what_it_pays_for(simple_prices: Any) -> None:
    ledger = budget()
    ledger.bind(private())
    share = ledger.declare("c", tickets=tickets(label="a", refundable=True), partition="d", epsilon=1.0)
    got = share.reserve("t", label="a", count=2)
    assert (got.ledger_id, got.component, got.partition) == (ledger.ledger_id, "c", "d")
    assert (got.template, got.label, got.count, got.event, got.refundable) == ("t", "a", 2, PureEvent(0.1), True)
    assert (got.unburnt, got.uncommitted) == (2, 0)


def test_a_ticket_burns_once_and_commits_once(simple_prices: Any) -> None:
    reservation = share_of(budget()).reserve("t", count=2)
    with pytest.raises(LedgerError):
        reservation.commit()
    reservation.burn(2)
    with pytest.raises(PrivacyBudgetExceededError) as caught:
        reservation.burn()
    assert (caught.value.requested, caught.value.remaining) == (1, 0)
    reservation.commit(2)
    with pytest.raises(LedgerError):
        reservation.commit()
    assert (reservation.unburnt, reservation.uncommitted) == (0, 0)


def test_only_unburnt_refundable_tickets_return_and_only_once(simple_prices: Any) -> None:
    share = share_of(budget(), refundable=True)
    reservation = share.reserve("t", count=6)
    reservation.burn(2)
    assert reservation.give_back() == 4
    assert reservation.give_back() == 0
    assert share.remaining("t") == 8
    with pytest.raises(PrivacyBudgetExceededError):
        reservation.burn()
    reservation.commit(2)
    assert share.remaining("t") == 8


def test_tickets_that_are_not_refundable_stay_spent(simple_prices: Any) -> None:
    share = share_of(budget())
    reservation = share.reserve("t", count=6)
    assert reservation.give_back() == 0
    assert share.remaining("t") == 4
    with pytest.raises(PrivacyBudgetExceededError):
        reservation.burn()


def test_tickets_return_to_their_own_template_and_label(simple_prices: Any) -> None:
    ledger = budget()
    ledger.bind(private())
    both = [Ticket(t, PureEvent(0.1), label, 4, refundable=True) for t in "tu" for label in LABELS]
    share = ledger.declare("c", tickets=both, partition="d", epsilon=2.0)
    held = {(t, label): share.reserve(t, label=label, count=4) for t in "tu" for label in LABELS}
    held["t", "a"].give_back()
    assert {slot: share.remaining(slot[0], label=slot[1]) for slot in held} == {
        ("t", "a"): 4,
        ("t", "b"): 0,
        ("u", "a"): 0,
        ("u", "b"): 0,
    }


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, asyncio.CancelledError, GeneratorExit])
def test_a_crash_after_reserving_keeps_the_charge(error: type[BaseException], simple_prices: Any) -> None:
    store = InMemoryStore()
    share = share_of(budget(store=store), refundable=True)
    with pytest.raises(error):
        _crash(share.reserve("t", count=3), error)
    again = Budget.open(store)
    again.verify()
    assert again.declare("c", tickets=tickets(refundable=True), epsilon=1.0).remaining("t") == 7


def _crash(reservation: Any, error: type[BaseException]) -> None:
    reservation.burn()
    raise error


@pytest.mark.parametrize("steps", [64, 200])
def test_threads_get_exactly_the_tickets_there_are(steps: int, simple_prices: Any) -> None:
    share = share_of(budget())
    start = threading.Barrier(64)

    def contend(number: int) -> int:
        if number < 64:
            start.wait()
        try:
            reservation = share.reserve("t")
        except PrivacyBudgetExceededError:
            return 0
        reservation.burn()
        return 1

    with ThreadPoolExecutor(64) as pool:
        assert sum(pool.map(contend, range(steps))) == 10


def test_threads_burn_and_return_a_reservation_exactly_once(
    simple_prices: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every look at the count gives way to other threads, so a check without the lock would be overtaken."""

    def slow(self: Reservation) -> int:
        time.sleep(1e-4)
        return int(vars(self)["count_left"])

    def store(self: Reservation, value: int) -> None:
        vars(self)["count_left"] = value

    monkeypatch.setattr(Reservation, "_unburnt", property(slow, store), raising=False)
    for _ in range(5):
        share = share_of(budget(), refundable=True)
        reservation = share.reserve("t", count=10)
        start = threading.Barrier(16)

        def use(number: int, reservation: Reservation = reservation, start: Any = start) -> tuple[int, int]:
            start.wait()
            if number == 7:
                return 0, reservation.give_back()
            try:
                reservation.burn()
            except PrivacyBudgetExceededError:
                return 0, 0
            return 1, 0

        with ThreadPoolExecutor(16) as pool:
            outcomes = list(pool.map(use, range(16)))
        burnt, returned = (sum(column) for column in zip(*outcomes, strict=True))
        assert burnt + returned == 10
        assert share.remaining("t") == returned


@pytest.mark.parametrize("has_an_ancestors_number", [False, True])
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_reservation_cannot_burn(
    simple_prices: Any, monkeypatch: pytest.MonkeyPatch, has_an_ancestors_number: bool
) -> None:
    if has_an_ancestors_number:
        monkeypatch.setattr(os, "getpid", lambda: 1)
    reservation = share_of(budget()).reserve("t")
    child = os.fork()
    if child == 0:
        try:
            reservation.burn()
        except LedgerError:
            os._exit(3)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_in_a_hook_of_a_reservation_cannot_burn(simple_prices: Any) -> None:
    ledger, parent = budget(), os.getpid()
    children: list[int] = []
    ledger.on_spent(0.01, lambda use: children.append(os.fork()))
    code = 1
    try:
        share_of(ledger).reserve("t").burn()  # in both processes
    except LedgerError:
        code = 3
    finally:
        if os.getpid() != parent:
            os._exit(code)
    assert code == 1
    assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 3


def test_nothing_that_spends_can_be_copied_or_pickled(simple_prices: Any) -> None:
    ledger = budget()
    share = share_of(ledger)
    for holder in (ledger, share, share.reserve("t"), ledger.gdp_pool("g", epsilon=0.5)):
        assert copy.copy(holder) is holder
        assert copy.deepcopy([holder])[0] is holder
        with pytest.raises(PrivateAccessError):
            pickle.dumps(holder)
    assert "dies with this process" in repr(ledger)
    assert repr(share) == "Share('c')"
    assert repr(share.reserve("t")) == "Reservation('c', 't', label=None, count=1)"


# --- binding ----------------------------------------------------------------------------------------------------------


def test_binding_is_durable_and_happens_once(simple_prices: Any) -> None:
    store = InMemoryStore()
    ledger, held = budget(store=store), private()
    ledger.bind(held)
    ledger.bind(held)
    assert records(store) == [("bind", held.declaration)]
    assert held._pool("a", ledger_id=ledger.ledger_id).num_units == 1
    with pytest.raises(PrivacyBudgetMismatchError):
        budget().bind(held)


def test_two_data_sets_need_two_names(simple_prices: Any) -> None:
    ledger = budget()
    ledger.bind(private())
    with pytest.raises(PrivacyBudgetMismatchError, match="dataset_id"):
        ledger.bind(private())
    ledger.bind(private("e"))
    assert [d["dataset_id"] for d in ledger.report().datasets] == ["d", "e"]


@pytest.mark.parametrize(
    "change", [{"labels": ("b", "a")}, {"public_size": 999}, {"unit_key": "text"}, {"records_per_unit": 2}], ids=str
)
def test_another_process_must_declare_the_data_set_alike(
    change: dict[str, Any], simple_prices: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = InMemoryStore()
    budget(store=store).bind(private())
    monkeypatch.setattr("langchain_dpicl.privacy.ledger.budget._IDENTITIES", {})  # what another process knows
    Budget.open(store).bind(private())
    monkeypatch.setattr("langchain_dpicl.privacy.ledger.budget._IDENTITIES", {})
    with pytest.raises(PrivacyBudgetMismatchError, match="declaration"):
        Budget.open(store).bind(private(**change))
    assert [kind for kind, _ in records(store)] == ["bind"]


def test_one_process_gives_a_name_to_one_data_set_whatever_the_budget_object(simple_prices: Any) -> None:
    store = InMemoryStore()
    budget(store=store).bind(private())
    with pytest.raises(PrivacyBudgetMismatchError, match="dataset_id"):
        Budget.open(store).bind(private())


def test_a_delta_too_large_for_the_data_is_refused_when_binding(simple_prices: Any) -> None:
    store = InMemoryStore()
    ledger = budget(delta=1.01e-4, store=store)
    held = private()
    with pytest.raises(ConfigurationError, match="public_size"):
        ledger.bind(held)
    assert records(store) == []
    budget(delta=1e-4).bind(held)


def test_a_failed_binding_leaves_the_name_free(simple_prices: Any) -> None:
    ledger, exposed = budget(), private()
    exposed._pool(None, ledger_id=None)
    with pytest.raises(PrivateAccessError):
        ledger.bind(exposed)
    ledger.bind(private())


# --- the real thing ---------------------------------------------------------------------------------------------------


def test_real_prices_under_both_adjacencies() -> None:
    step = SubsampledEvent(BoundedRangeEvent(0.5), 0.01)
    for adjacency in ("add_remove", "replace_one"):
        ledger = budget(adjacency=adjacency)
        ledger.bind(private())
        items = [Ticket("t", step, label, 50, refundable=True) for label in LABELS]
        share = ledger.declare("c", tickets=items, partition="d", epsilon=1.0)
        expected = accounting.epsilon_upper_bound(
            event_of_tickets(items, partition="d"), delta=2.5e-7, adjacency=adjacency
        )
        stated = ledger.report().to_dict()["shares"][0]["pricing"]
        assert stated["epsilon"] == expected <= 1.0
        assert stated["engine"]
        assert share.epsilon == 1.0
    with pytest.raises(PrivacyBudgetExceededError):
        budget().declare("c", tickets=[Ticket("t", step, None, 50_000)], epsilon=1.0)
