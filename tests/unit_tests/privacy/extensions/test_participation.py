"""Individual filters: what a unit moves over a whole run of adaptive queries, what that costs, and who keeps count."""

from __future__ import annotations

import copy
import itertools
import math
import os
import pickle
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from langchain_dpicl import Budget, PrivateExamples, verify_report
from langchain_dpicl.exceptions import ConfigurationError, LedgerError, PrivateAccessError
from langchain_dpicl.privacy import accounting
from langchain_dpicl.privacy.accounting.events import ComposedEvent, NoEvent, RepeatedEvent
from langchain_dpicl.privacy.extensions.gradient_sums import ClippedGradientSum
from langchain_dpicl.privacy.extensions.individual_filter import MemoryBalances, ParticipationPlan, participation_plan
from langchain_dpicl.privacy.extensions.joint_exponential import KeywordSum
from langchain_dpicl.privacy.extensions.normalized_sums import UnitVectorSum, VoteVectorSum
from langchain_dpicl.privacy.ledger.tickets import event_of_tickets
from langchain_dpicl.privacy.mechanisms.bounded import ProbabilitySum, VoteSum
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM
from langchain_dpicl.privacy.mechanisms.release_plan import GaussianMechanism, GumbelMechanism
from langchain_dpicl.retrieval import plan_retrieval

ALARM = 1e-6
WIDTH = 3


def plan_of(participations: int = 3, *, slots: int | None = None, noise: float = 2.0, **options: Any) -> Any:
    return ParticipationPlan(
        options.get("aggregation", VoteSum()), GaussianMechanism(noise), participations, slots, "add_remove"
    )


# -- the price -------------------------------------------------------------------------------------------------------


@given(st.floats(1e-3, 1e6), st.integers(1, 2**31))
def test_the_event_is_never_cheaper_than_all_participations_and_hardly_dearer(noise: float, most: int) -> None:
    found = plan_of(most, noise=noise).event.noise_multiplier
    assert Fraction(found) ** 2 * most <= Fraction(noise) ** 2
    assert Fraction(math.nextafter(found, math.inf)) ** 2 * most > Fraction(noise) ** 2


@pytest.mark.parametrize(("most", "noise"), [(1, 4.0), (10, 20.0), (250, 60.0)])
def test_the_price_is_that_of_as_many_gaussians_and_another_library_agrees(most: int, noise: float) -> None:
    """Second sources: the closed form of Balle and Wang, and dp-accounting's composition of single Gaussians."""
    delta = 1e-6
    price = accounting.epsilon_upper_bound(plan_of(most, noise=noise).event, delta=delta, adjacency="add_remove")
    assert price == pytest.approx(accounting.gdp_epsilon(math.sqrt(most) / noise, delta), rel=1e-6)
    one = privacy_loss_distribution.from_gaussian_mechanism(noise, value_discretization_interval=1e-4)
    assert price == pytest.approx(one.self_compose(most).get_epsilon_for_delta(delta), rel=2e-2)


def test_queries_are_free_and_the_filter_is_the_whole_price() -> None:
    plan = plan_of(5)
    event = event_of_tickets(plan.tickets(1_000))
    assert event == ComposedEvent((plan.event, RepeatedEvent(NoEvent(), 1_000)))
    price = accounting.epsilon_upper_bound(event, delta=1e-6, adjacency="add_remove")
    assert price == accounting.epsilon_upper_bound(plan.event, delta=1e-6, adjacency="add_remove")
    assert plan.implementation_delta(1_000, width=4) == 1_000 * GaussianMechanism(2.0).implementation_delta(4)


# -- what one unit moves ---------------------------------------------------------------------------------------------

Strategy = Callable[[list[tuple[float, ...]]], Sequence[str]]
"""What was released so far -> the topics that the next query asks for; an adversary chooses it."""


def shifts(
    units: dict[str, tuple[str, int]],
    target: str,
    *,
    plan: ParticipationPlan,
    outputs: list[tuple[float, ...]],
    strategy: Strategy,
    select: Callable[[list[str], list[str]], list[str]],
) -> list[float]:
    """Runs both neighbours on the same outputs, and returns the squared change of the sum at every query."""
    worlds = [dict(units), {name: unit for name, unit in units.items() if name != target}]
    balances = [MemoryBalances(plan.participations) for _ in worlds]
    moved = []
    for place in range(len(outputs)):
        topics = strategy(outputs[:place])
        sums = []
        for world, balance in zip(worlds, balances, strict=True):
            near = [name for name, (topic, _) in world.items() if topic in topics]
            chosen = select(near, list(world))
            let_in = [name for name, left in zip(chosen, balance.debit(chosen, 0), strict=True) if left]
            rows = np.eye(WIDTH)[[world[name][1] for name in let_in]].reshape(len(let_in), WIDTH)
            sums.append(plan.bound(rows, width=WIDTH).value)
        moved.append(float(((sums[0] - sums[1]) ** 2).sum()))
    return moved


def by_threshold(near: list[str], world: list[str]) -> list[str]:
    del world
    return near


@settings(max_examples=60)
@given(st.data())
def test_over_any_adaptive_run_a_unit_moves_no_more_than_its_participations(data: st.DataObject) -> None:
    """Given the same transcript, the squared changes add up to at most what the event charges, and to that exactly."""
    most = data.draw(st.integers(1, 4))
    plan = plan_of(most)
    topics = ("a", "b", "c")
    named = [f"unit {place}" for place in range(data.draw(st.integers(1, 6)))]
    units = {name: (data.draw(st.sampled_from(topics)), data.draw(st.integers(0, WIDTH - 1))) for name in named}
    outputs = [(data.draw(st.floats(-3, 3)),) for _ in range(data.draw(st.integers(0, 14)))]

    def strategy(seen: list[tuple[float, ...]]) -> Sequence[str]:
        total = sum(value for (value,) in seen)
        return topics if total > 2 else [topics[len(seen) % 3]] if total < 0 else topics[:2]

    moved = shifts(units, named[0], plan=plan, outputs=outputs, strategy=strategy, select=by_threshold)
    met = sum(units[named[0]][0] in strategy(outputs[:place]) for place in range(len(outputs)))
    assert moved.count(1.0) == min(met, most)
    assert sum(moved) == min(met, most)


def test_with_top_k_one_unit_moves_every_query_long_after_it_was_exhausted() -> None:
    """The counterexample of the proof page: ten units on one topic, of which the first that may is asked."""
    most, count = 3, 10
    plan = plan_of(most)
    units = {f"unit {place}": ("a", place % 2) for place in range(count)}
    order = list(units)

    def top_one(spent: Counter[str]) -> Callable[[list[str], list[str]], list[str]]:
        def select(near: list[str], world: list[str]) -> list[str]:
            first = [name for name in near if spent[f"{len(world)} {name}"] < most][:1]
            spent.update(f"{len(world)} {name}" for name in first)
            return first

        return select

    same: dict[str, Any] = {"plan": plan, "outputs": [(0.0,)] * (most * count), "strategy": lambda _: "a"}
    moved = shifts(units, order[0], select=top_one(Counter()), **same)
    assert sum(moved) == 2.0 * most * (count - 1) + most  # the charge is `most`
    moved = shifts(units, order[0], select=by_threshold, **same)
    assert sum(moved) == most


def test_the_privacy_loss_of_a_run_is_that_of_its_event() -> None:
    """A unit that takes part as the noise tells it to: the loss is normal with the event's mu, to the last moment.

    Second source: the closed form. Kolmogorov-Smirnov on 20,000 runs, at a false alarm rate of 1e-6.
    """
    rng = np.random.default_rng()
    most, noise, steps, runs = 4, 2.0, 12, 20_000
    mu = 1.0 / plan_of(most, noise=noise).event.noise_multiplier
    taken, loss = np.zeros(runs), np.zeros(runs)
    last = np.zeros(runs)
    for step in range(steps):
        # The next query meets the unit where the last release was high; at the end it always does.
        meets = (last >= 0) | (step >= steps - most)
        active = meets & (taken < most)
        drawn = rng.normal(size=runs)
        loss += np.where(active, drawn / noise - 0.5 / noise**2, 0.0)  # log-likelihood ratio without the unit
        taken += active
        last = drawn
    assert (taken == most).all()
    assert stats.kstest(loss, stats.norm(-(mu**2) / 2, mu).cdf).pvalue > ALARM


# -- rows ------------------------------------------------------------------------------------------------------------


def test_rows_move_the_sum_by_their_sensitivity() -> None:
    for aggregation in (VoteSum(), ProbabilitySum(), VoteVectorSum(), UnitVectorSum()):
        alone = plan_of(aggregation=aggregation)
        assert alone.row_shape == "units"
        assert alone.sensitivity.l2 == 1.0
        assert alone.noise_stddev == 2.0
        shared = plan_of(aggregation=aggregation, slots=4)
        swapped = 2.0 if isinstance(aggregation, UnitVectorSum) else math.sqrt(2.0)
        assert shared.row_shape == "slots"
        assert shared.sensitivity.l2 == swapped
        assert shared.noise_stddev == 2.0 * swapped


@given(st.integers(0, 9), st.integers(1, 9))
def test_seats_are_as_many_as_there_are_and_hold_each_unit_once(count: int, slots: int) -> None:
    names = [f"unit {place}" for place in range(count)]
    seated = plan_of(slots=slots).seats(names, rng=SYSTEM_RANDOM)
    assert len(seated) == min(count, slots) == len(set(seated))
    assert set(seated) <= set(names)
    assert sorted(plan_of().seats(names, rng=SYSTEM_RANDOM)) == sorted(names)


def test_seats_have_the_law_of_the_first_in_a_random_order() -> None:
    """Hence one unit that comes displaces one at most, on coins that are its own. Chi-square, false alarm 1e-6."""
    plan, runs = plan_of(slots=2), 6_000
    drawn = Counter(tuple(plan.seats("abcd", rng=SYSTEM_RANDOM)) for _ in range(runs))
    orders = [drawn[pair] for pair in itertools.permutations("abcd", 2)]
    assert sum(orders) == runs
    assert stats.chisquare(orders).pvalue > ALARM


def test_a_release_is_noise_on_the_sum_of_those_who_have_a_row() -> None:
    """The mean of 400 releases, by its normal law at a false alarm rate of 1e-6; no row at all is released, too."""
    plan = plan_of(noise=1.0)
    for rows, expected in ((np.eye(WIDTH)[[0, 0, 2]], [2.0, 0.0, 1.0]), (np.zeros((0, WIDTH)), [0.0] * WIDTH)):
        found = [plan.release(rows, width=WIDTH, rng=SYSTEM_RANDOM).values for _ in range(400)]
        far = np.abs(np.mean(found, axis=0) - expected) * math.sqrt(400)
        assert (far < stats.norm.isf(ALARM / (2 * WIDTH))).all()


# -- balances --------------------------------------------------------------------------------------------------------


def test_nobody_is_let_in_more_often_than_declared_and_all_are_debited_together() -> None:
    balances = MemoryBalances(2)
    assert [balances.debit(["a", "b"], 0), balances.debit(["b"], 0)] == [[True, True], [True]]
    assert balances.debit(["c", "b", "a"], 0) == [True, False, True]
    assert balances.debit(["a", "b"], 0) == [False, False]
    assert balances.debit([], 0) == []


def test_threads_together_let_a_unit_in_as_often_as_declared() -> None:
    balances, threads, tries = MemoryBalances(500), 8, 200
    together, let_in = threading.Barrier(threads), Counter[str]()
    lock = threading.Lock()

    def run() -> None:
        together.wait()
        mine = Counter[str]()
        for _ in range(tries):
            mine.update(name for name, left in zip("ab", balances.debit(["a", "b"], 0), strict=True) if left)
        with lock:
            let_in.update(mine)

    working = [threading.Thread(target=run) for _ in range(threads)]
    for each in working:
        each.start()
    for each in working:
        each.join()
    assert let_in == {"a": 500, "b": 500}


def test_balances_show_nothing_and_no_copy_lets_anybody_in_again(monkeypatch: pytest.MonkeyPatch) -> None:
    balances = MemoryBalances(1)
    balances.debit(["a"], 0)
    assert repr(balances) == str(balances) == f"{balances}" == "MemoryBalances(<private>)"
    assert copy.copy(balances) is copy.deepcopy(balances) is balances
    assert not balances.durable
    with pytest.raises(PrivateAccessError):
        pickle.dumps(balances)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    with pytest.raises(LedgerError, match="fork") as refused:
        balances.debit(["zx-canary"], 0)
    assert "zx-canary" not in str(refused.getrepr(showlocals=True).reprtraceback.reprentries[-1])


# -- what is refused, and what is shown ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"adjacency": "replace_one"}, "two filters move at once"),
        ({"mechanism": GumbelMechanism(1.0)}, "only Gaussian noise"),
        ({"aggregation": KeywordSum()}, "aggregation: expected one of"),
        ({"aggregation": ClippedGradientSum(1.0)}, "aggregation: expected one of"),
        ({"participations": 0}, "participations"),
        ({"participations": 2.0}, "participations"),
        ({"num_slots": 0}, "num_slots"),
        ({"adjacency": "both"}, "adjacency"),
    ],
)
def test_what_no_proof_covers_is_refused(changed: dict[str, Any], says: str) -> None:
    whole = {"aggregation": VoteSum(), "mechanism": GaussianMechanism(1.0), "participations": 1, "num_slots": None}
    with pytest.raises(ConfigurationError, match=says):
        ParticipationPlan(**{**whole, **changed})


@pytest.mark.parametrize("slots", [None, 7])
def test_a_plan_is_read_back_from_what_it_shows_and_from_nothing_else(slots: int | None) -> None:
    plan = plan_of(9, slots=slots, aggregation=ProbabilitySum()).with_noise(3.5)
    assert participation_plan(plan.to_dict()) == plan
    for changed in ({"participations": 8.0}, {"sensitivity": {"l2": 0.5, "range": 1.0, "linf": 1.0}}, {"more": 1}):
        with pytest.raises(ConfigurationError):
            participation_plan({**plan.to_dict(), **changed})
    with pytest.raises(LookupError):
        participation_plan({})


# -- reports ---------------------------------------------------------------------------------------------------------


def reported(**changed: Any) -> list[str]:
    """Returns what a verifier says of the report of a filter, some numbers of which were changed."""
    private = PrivateExamples(["a note"], dataset_id="notes", public_size=50)
    budget = Budget(epsilon=9.0, delta=1e-5)
    partition = changed.pop("partition", "notes")
    if partition:
        budget.bind(private)
    terms = {"epsilon": None, "delta": 5e-6, "participations": 4, "width": WIDTH, "num_slots": 3, "max_queries": 7}
    plan = plan_retrieval(50, **terms, noise_multiplier=6.0, aggregation=plan_of(4).aggregation, partition="notes")
    budget.declare(
        "notes",
        tickets=changed.pop("tickets", plan.tickets()),
        partition=partition,
        epsilon=plan.epsilon,
        delta=plan.delta,
        implementation_delta=plan.implementation_delta,
        public={**plan.to_dict(), **changed},
    )
    return list(verify_report(budget.report()).problems)


def test_a_report_shows_the_filter_that_is_charged() -> None:
    assert reported() == []


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"participation": plan_of(5, noise=6.0, slots=3).to_dict()}, "other tickets"),
        ({"max_queries": 8}, "other tickets"),
        ({"participation": {}}, "cannot be read"),
        ({"noise_stddev": 1.0}, "noise_stddev"),
        ({"public_size": 51}, "public_size"),
        ({"adjacency": "replace_one"}, "adjacency"),
        ({"implementation_delta": 0.5}, "implementation_delta"),
        ({"epsilon": 0.1}, "cost up to"),
        ({"tickets": plan_of(4, noise=6.0, slots=3).tickets(7)[:1]}, "other tickets"),
    ],
)
def test_a_report_that_shows_another_filter_is_refused(changed: dict[str, Any], says: str) -> None:
    assert any(says in problem for problem in reported(**changed))


def test_a_report_of_a_filter_without_a_data_set_is_refused() -> None:
    problems = reported(partition=None)
    assert any("expected the dataset_id of a data set of the report" in problem for problem in problems)


# -- what balances are kept by, and what the ledger counts -----------------------------------------------------------


def test_a_unit_is_known_by_its_name_and_without_one_by_its_place() -> None:
    records = [{"text": "a", "who": 7, "kind": "x"}, {"text": "b", "who": "anna", "kind": "y"}]
    private = PrivateExamples(records, unit_key="who", label_key="kind", labels=("x", "y"), public_size=2)
    pool = private._pool(None, ledger_id=None)
    assert [pool.name(place) for place in range(pool.num_units)] == ["7", "anna"]
    with pytest.raises(PrivateAccessError):  # balances are those of all units together
        private._pool("y", ledger_id=None).name(0)
    private.remove("anna")
    assert [private._pool(None, ledger_id=None).name(place) for place in range(2)] == ["7", ""]
    with pytest.raises(PrivateAccessError):
        pool.name(2)
    again = PrivateExamples(["a", "b"], public_size=2)._pool(None, ledger_id=None)
    assert [again.name(place) for place in range(2)] == ["0", "1"]


def test_units_declared_again_keep_their_names() -> None:
    records = [{"text": "a", "who": "anna", "kind": "x"}, {"text": "b", "who": "bo", "kind": "y"}]
    private = PrivateExamples(records, unit_key="who", fields=("kind",), public_size=2)
    split = private.redeclared(dataset_id="split", public_size=2, label_key="kind", labels=("x", "y"))
    assert [split._pool(None, ledger_id=None).name(place) for place in range(2)] == ["anna", "bo"]


def test_the_ledger_counts_what_was_committed() -> None:
    budget = Budget(epsilon=9.0, delta=1e-5)
    share = budget.declare("notes", tickets=plan_of(4, noise=6.0).tickets(7), epsilon=4.0)
    assert share.committed("query") == 0  # nothing is sealed
    first, second = share.reserve("query", count=2), share.reserve("query")
    first.burn()
    first.commit()
    second.burn()
    assert share.committed("query") == 1  # one was given out and not used, one is burnt and not committed
    first.give_back()
    second.commit()
    assert share.committed("query") == 2
    assert share.committed("individual-filter") == 0
    with pytest.raises(ConfigurationError):
        share.committed("nothing")
