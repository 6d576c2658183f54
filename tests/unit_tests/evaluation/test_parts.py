"""Halves of the data by a public hash: what they cost, who is in them, and that a unit moves no other."""

from __future__ import annotations

import pkgutil

import numpy as np
import pytest
from scipy import stats

from langchain_dpicl import Budget, PrivateExamples, verify_report
from langchain_dpicl.evaluation import (
    Exact,
    Pure,
    Score,
    dp_achoose,
    dp_aevaluate,
    dp_choose,
    dp_evaluate,
    plan_evaluation,
)
from langchain_dpicl.exceptions import (
    ConfigurationError,
    LedgerError,
    PrivacyBudgetExceededError,
    RunInterruptedError,
)
from langchain_dpicl.privacy.extensions.outcome_counts import part_of, split_in_parts
from langchain_dpicl.release.curator import pool_without_privacy
from tests.unit_tests.evaluation.test_evaluating import TEMPLATE, reader

MODEL, OTHER, EXACT = reader(), reader(x="y"), Exact()
CHAINS = {"right": TEMPLATE | MODEL, "wrong": TEMPLATE | OTHER}


def tickets(size=400, **declared):
    records = [{"text": f"it was declined {number}", "queue": "card", "user": str(number)} for number in range(size)]
    given = {"label_key": "queue", "labels": ("card", "transfer"), "public_size": size, **declared}
    return PrivateExamples(records, **given)


def members(private, part):
    pool = pool_without_privacy(split_in_parts(private), part)
    return {record["text"] for position in range(pool.num_units) for record in pool.records(position)}


@pytest.mark.parametrize("declared", [{}, {"unit_key": "user"}], ids=["records", "users"])
def test_every_unit_is_in_one_half_and_moves_no_other(declared):
    whole, few = tickets(**declared), tickets(399, public_size=400, **declared)
    halves = [members(whole, part) for part in ("choose", "test")]
    assert not halves[0] & halves[1]
    assert len(halves[0] | halves[1]) == 400
    assert abs(len(halves[0]) - 200) < stats.norm.isf(1e-9) * 10
    last = "it was declined 399"
    assert [members(few, part) for part in ("choose", "test")] == [half - {last} for half in halves]


def test_the_half_of_a_user_is_that_of_the_name_whatever_the_records_are():
    other = PrivateExamples(
        [{"text": f"{number}", "user": str(number)} for number in range(400)], public_size=400, unit_key="user"
    )
    assert {text.rpartition(" ")[2] for text in members(tickets(unit_key="user"), "test")} == members(other, "test")
    assert part_of("7") == part_of("7")


@pytest.mark.traced
def test_a_removed_user_counts_in_neither_half():
    private = tickets(unit_key="user")
    before = members(private, "test")
    private.remove(min(before).rpartition(" ")[2])
    assert members(private, "test") == before - {min(before)}


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0])
def test_choosing_and_measuring_cost_the_larger_of_the_two(epsilon):
    spent, private = Budget(epsilon=20.0, delta=1e-5), tickets()
    best = dp_choose(CHAINS, private, evaluator=EXACT, budget=spent, epsilon=epsilon, part="choose")
    found = dp_evaluate(best.chain, private, evaluators=EXACT, budget=spent, part="test")
    assert 20.0 - spent.remaining_epsilon == pytest.approx(epsilon, rel=1e-6)
    assert found.plan.epsilon <= epsilon
    assert found.plan.public_size == 200
    assert dp_evaluate(best.chain, private, evaluators=EXACT, budget=spent, part="test").tables == found.tables
    assert 20.0 - spent.remaining_epsilon == pytest.approx(epsilon, rel=1e-6)
    for report in (best.report, found.report, spent.report()):
        assert verify_report(report).ok, verify_report(report).problems


async def test_both_can_be_awaited():
    spent, private = Budget(epsilon=20.0, delta=1e-5), tickets()
    best = await dp_achoose(CHAINS, private, evaluator=EXACT, budget=spent, epsilon=2.0, part="choose")
    found = await dp_aevaluate(best.chain, private, evaluators=EXACT, budget=spent, epsilon=2.0, part="test")
    assert best.name == "right"
    assert found.accuracy.low > 0.8
    assert abs(sum(found.confusion.values()) - 200) < 80
    assert 20.0 - spent.remaining_epsilon == pytest.approx(2.0, rel=1e-6)


OTHERS = {
    "another chain": {"chain": TEMPLATE | reader(declined="z")},
    "another evaluator": {"evaluators": Score(Pure(lambda inputs, outputs, reference: 1))},
    "another epsilon": {"epsilon": 0.5},
    "another sample": {"sample": 50},
    "the same half": {"part": "choose"},
    "all of the data": {"part": None},
    "a baseline": {"baseline": TEMPLATE | OTHER},
}


@pytest.mark.parametrize("what", OTHERS)
def test_another_evaluation_pays(what):
    spent, private = Budget(epsilon=20.0, delta=1e-5), tickets()
    best = dp_choose(CHAINS, private, evaluator=EXACT, budget=spent, epsilon=1.0, part="choose")
    asked = {"chain": best.chain, "evaluators": EXACT, "part": "test", **OTHERS[what]}
    dp_evaluate(private=private, budget=spent, **asked)
    assert 20.0 - spent.remaining_epsilon > 1.05
    dp_evaluate(best.chain, private, evaluators=EXACT, budget=spent, part="test")
    assert 20.0 - spent.remaining_epsilon < 1.6


def test_what_was_set_aside_pays_for_one_candidate_only():
    spent, private = Budget(epsilon=20.0, delta=1e-5), tickets()
    dp_choose(CHAINS, private, evaluator=EXACT, budget=spent, epsilon=1.0, part="choose")
    for chain in CHAINS.values():
        dp_evaluate(chain, private, evaluators=EXACT, budget=spent, part="test", epsilon=1.0)
    assert 20.0 - spent.remaining_epsilon == pytest.approx(2.0, rel=1e-6)


NAMED = ({}, {"component": "pick test"}, {"component": "pick test", "epsilon": 1.0})


@pytest.mark.parametrize("first", NAMED, ids=str)
@pytest.mark.parametrize("second", NAMED, ids=str)
def test_with_its_name_and_without_it_what_was_set_aside_is_one_evaluation(first, second):
    spent, private = Budget(epsilon=20.0, delta=1e-5), tickets()
    best = dp_choose(CHAINS, private, evaluator=EXACT, budget=spent, epsilon=1.0, part="choose", component="pick")
    found = [
        dp_evaluate(best.chain, private, evaluators=EXACT, budget=spent, part="test", **named)
        for named in (first, second)
    ]
    assert found[0].tables == found[1].tables
    assert 20.0 - spent.remaining_epsilon == pytest.approx(1.0, rel=1e-6)


def test_an_evaluation_of_another_name_pays_its_own_epsilon():
    spent, private = Budget(epsilon=20.0, delta=1e-5), tickets()
    best = dp_choose(CHAINS, private, evaluator=EXACT, budget=spent, epsilon=1.0, part="choose")
    dp_evaluate(best.chain, private, evaluators=EXACT, budget=spent, part="test", component="mine")
    assert 20.0 - spent.remaining_epsilon == pytest.approx(1.1, rel=1e-3)


def lost(*given, **named):
    raise LedgerError("the disk is full")


def test_a_choice_made_again_under_its_name_sets_nothing_more_aside(monkeypatch):
    """The second one finds its ticket gone; of the candidates one still has what was set aside, and the other pays."""
    spent, private = Budget(epsilon=20.0, delta=1e-5), tickets()
    call = {"evaluator": EXACT, "budget": spent, "epsilon": 1.0, "part": "choose", "component": "pick"}
    with monkeypatch.context() as patch:
        patch.setattr("langchain_dpicl.evaluation.chains.Question.ask", lost)
        with pytest.raises(RunInterruptedError):
            dp_choose(CHAINS, private, **call)
    with pytest.raises(PrivacyBudgetExceededError):
        dp_choose(CHAINS, private, **call)
    assert len(vars(spent)["_kept_tests"]) == 1
    for chain, cost in zip(CHAINS.values(), (1.0, 2.0), strict=True):
        dp_evaluate(chain, private, evaluators=EXACT, budget=spent, part="test", epsilon=1.0)
        assert 20.0 - spent.remaining_epsilon == pytest.approx(cost, rel=1e-6)


@pytest.mark.parametrize("how", ["a call of this process", "another process"])
def test_where_what_was_set_aside_is_gone_an_evaluation_pays_its_own_epsilon(how, monkeypatch):
    spent, private = Budget(epsilon=20.0, delta=1e-5), tickets()
    best = dp_choose(CHAINS, private, evaluator=EXACT, budget=spent, epsilon=1.0, part="choose")
    call = {"private": private, "evaluators": EXACT, "budget": spent, "part": "test"}
    if how == "another process":
        (aside,) = vars(spent)["_kept_tests"]
        aside.share.reserve(aside.plan.tickets()[0].template, label="test").burn()
    else:
        with monkeypatch.context() as patch:
            patch.setattr("langchain_dpicl.evaluation.chains.Question.ask", lost)
            with pytest.raises(RunInterruptedError):
                dp_evaluate(best.chain, **call)
    found = dp_evaluate(best.chain, **call)
    assert 20.0 - spent.remaining_epsilon == pytest.approx(1.1, rel=1e-3)
    with pytest.raises(PrivacyBudgetExceededError):  # under its name it asks for the ticket that is gone
        dp_evaluate(best.chain, component="choice test", epsilon=1.0, **call)
    assert dp_evaluate(best.chain, **call).tables == found.tables
    assert 20.0 - spent.remaining_epsilon == pytest.approx(1.1, rel=1e-3)


def before(patch, place, act):
    """Runs `act` once, before the next call of a function."""
    owner, _, name = place.rpartition(".")
    real, left = pkgutil.resolve_name(owner), [act]
    inner = getattr(real, name)

    def wrapped(*given, **named):
        if left:
            left.pop()()
        return inner(*given, **named)

    patch.setattr(real, name, wrapped)


@pytest.mark.parametrize(("place", "epsilon", "cost"), [
    ("chains.Question.probe", None, 0.0), ("chains.Question.probe", 1.0, 1.0),
    ("evaluate.plan_evaluation", None, 0.1), ("evaluate.plan_evaluation", 1.0, 1.0),
])  # fmt: skip
def test_of_two_candidates_at_once_one_has_what_was_set_aside_and_the_other_pays_its_own(
    place, epsilon, cost, monkeypatch
):
    """The first takes it while the second plans, or calls its model with public words; it keeps its result."""
    spent, private, found = Budget(epsilon=20.0, delta=1e-5), tickets(), []
    dp_choose(CHAINS, private, evaluator=EXACT, budget=spent, epsilon=1.0, part="choose")
    call = {"private": private, "evaluators": EXACT, "budget": spent, "part": "test"}

    def first():
        found.append(dp_evaluate(CHAINS["right"], **call))

    before(monkeypatch, f"langchain_dpicl.evaluation.{place}", first)
    if cost:
        dp_evaluate(CHAINS["wrong"], epsilon=epsilon, **call)
    else:
        with pytest.raises(ConfigurationError, match="Call again"):
            dp_evaluate(CHAINS["wrong"], **call)
    assert 20.0 - spent.remaining_epsilon == pytest.approx(1.0 + cost, rel=1e-3)
    if not cost:
        dp_evaluate(CHAINS["wrong"], **call)
    first()
    assert found[0].tables == found[1].tables
    assert 20.0 - spent.remaining_epsilon == pytest.approx(1.0 + (cost or 0.1), rel=1e-3)


@pytest.mark.parametrize("epsilon", [0, 0.0, True, -1.0])
def test_an_epsilon_that_is_none_does_not_take_what_was_set_aside(epsilon):
    spent, private = Budget(epsilon=20.0, delta=1e-5), tickets()
    dp_choose(CHAINS, private, evaluator=EXACT, budget=spent, epsilon=1.0, part="choose")
    with pytest.raises(ConfigurationError, match="epsilon"):
        dp_evaluate(CHAINS["right"], private, evaluators=EXACT, budget=spent, part="test", epsilon=epsilon)


@pytest.mark.traced
def test_only_the_half_that_is_asked_for_is_read():
    seen = []
    step = Score(Pure(lambda inputs, outputs, reference: seen.append(inputs["text"]) or 1), name="seen")
    private = tickets()
    dp_evaluate(
        TEMPLATE | MODEL, private, evaluators=step, budget=Budget(epsilon=20.0, delta=1e-5), epsilon=1.0, part="test"
    )
    assert set(seen) == members(tickets(), "test")


@pytest.mark.parametrize("declared", [{}, {"unit_key": "user"}], ids=["records", "users"])
def test_under_replace_one_choosing_and_measuring_cost_the_sum(declared):
    spent, private = Budget(epsilon=20.0, delta=1e-5, adjacency="replace_one"), tickets(**declared)
    best = dp_choose(CHAINS, private, evaluator=EXACT, budget=spent, epsilon=2.0, part="choose")
    assert 20.0 - spent.remaining_epsilon == pytest.approx(2.0, rel=1e-6)
    found = dp_evaluate(best.chain, private, evaluators=EXACT, budget=spent, epsilon=2.0, part="test")
    assert 20.0 - spent.remaining_epsilon == pytest.approx(4.0, rel=1e-6)
    assert found.accuracy.low > 0.8
    for report in (best.report, found.report, spent.report()):
        assert verify_report(report).ok, verify_report(report).problems


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_what_a_unit_that_moves_to_the_other_half_changes_is_covered_by_the_price(adjacency):
    """The accountant's price of both halves in one share: the larger, or the sum where a unit may move."""
    ledger = Budget(epsilon=20.0, delta=1e-5, adjacency=adjacency)
    private = split_in_parts(tickets())
    ledger.bind(private)
    each = {"widths": [2], "epsilon": 1.0, "delta": 1e-6, "adjacency": adjacency, "partition": private.dataset_id}
    both = [ticket for part in ("choose", "test") for ticket in plan_evaluation(200, part=part, **each).tickets()]
    share = ledger.declare("both", tickets=both, partition=private.dataset_id, delta=1e-6)
    assert share.epsilon == pytest.approx(1.0 if adjacency == "add_remove" else 2.0, rel=1e-3)


@pytest.mark.traced
def test_an_unknown_part_and_a_half_of_one_unit_are_refused():
    spent = Budget(epsilon=20.0, delta=1e-5)
    for part, private, words in (("train", tickets(), "part"), ("test", tickets(1, public_size=1), "2 units")):
        with pytest.raises(ConfigurationError, match=words):
            dp_evaluate(TEMPLATE | MODEL, private, evaluators=EXACT, budget=spent, part=part)
    assert spent.remaining_epsilon == 20.0


def test_planted_bug_halves_by_position_move_with_a_unit_more():
    """The bug that a hash of the place would be: a record in front moves all others."""
    names = np.array([part_of(str(place)) for place in range(400)])
    assert (names[:-1] != names[1:]).sum() > 100
