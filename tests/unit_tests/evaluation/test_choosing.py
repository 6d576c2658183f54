"""`dp_choose`: the best of several chains, what it costs and what it prints."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from scipy import stats

from langchain_dpicl import Budget, verify_report
from langchain_dpicl.backends.private_calls.call import OpaqueValue
from langchain_dpicl.evaluation import Choice, Exact, Pure, Score, dp_achoose, dp_choose
from langchain_dpicl.evaluation.evaluate import silent_question
from langchain_dpicl.evaluation.plan import plan_choice
from langchain_dpicl.exceptions import CapabilityError, ConfigurationError, NoisyPlanWarning, PrivacyBudgetError
from tests.unit_tests.evaluation.test_evaluating import (
    BROKEN,
    CARD,
    SENT,
    TEMPLATE,
    assert_verified_unless_edited,
    examples,
    reader,
)


def candidates():
    return {"none": TEMPLATE | reader(x="y"), "both": TEMPLATE | reader(), "cards": TEMPLATE | reader(declined="card")}


def test_the_best_is_chosen_and_the_report_verifies():
    spent = Budget(epsilon=2.0, delta=1e-5)
    best = dp_choose(candidates(), examples(broken=20), evaluator=Exact(), budget=spent, epsilon=1.0)
    assert best.name == "both"
    assert re.search(r"; a mean mark 0\.00\d+ above all others wins with 90 % if [\d,]+ units are read; ", str(best))
    assert_verified_unless_edited(best, lambda released: released.update(chosen="none"))
    assert verify_report(spent.report()).ok


def test_asked_again_it_returns_the_kept_choice():
    spent, private, chains = Budget(epsilon=2.0, delta=1e-5), examples(), candidates()
    names = {dp_choose(chains, private, evaluator=Exact(), budget=spent, epsilon=0.5).name for _ in range(3)}
    assert names == {"both"}
    assert spent.remaining_epsilon == pytest.approx(1.5, abs=0.01)


async def test_it_can_be_awaited():
    spent = Budget(epsilon=2.0, delta=1e-5)
    best = await dp_achoose(candidates(), examples(), evaluator=Exact(), budget=spent, sample=400)
    assert best.name == "both"


@pytest.mark.parametrize("more", [[CARD], [SENT] * 3, [BROKEN], []], ids=str)
def test_a_unit_more_adds_one_row_of_bits_and_moves_no_other(more):
    question = silent_question(examples(), candidates(), Exact(), inputs=None, timeout=None, is_choice=True)
    others = [[CARD], [SENT], [BROKEN]]
    without, with_it = (
        question.ask([OpaqueValue(tuple(unit)) for unit in units]).run().take() for units in (others, [*others, more])
    )
    assert without.tolist() == [[0, 1, 1], [0, 1, 0], [0, 0, 0]]
    assert with_it[:-1].tolist() == without.tolist()
    assert set(with_it[-1]) <= {0.0, 1.0}


def test_the_lead_that_is_printed_wins_with_ninety_percent():
    plan = plan_choice(2_000, candidates=20, epsilon=1.0, delta=1e-6, sample=1_000)
    lead = plan.lead
    assert 0 < lead < 0.02
    totals = np.r_[lead * 1_000, np.zeros(19)]
    scale = plan.noise_multiplier * plan.release.sensitivity.require("range")
    won = (totals + scale * np.random.default_rng().gumbel(size=(20_000, 20))).argmax(1) == 0
    assert abs(won.sum() - 18_000) < stats.norm.isf(1e-9) * math.sqrt(20_000 * 0.09)


def test_a_lead_is_rounded_up():
    plan = plan_choice(10**6, candidates=2, epsilon=8.0, delta=1e-8)
    printed = str(Choice("a", None, plan.lead, plan, {}))
    assert 0 < plan.lead <= float(printed.partition("mean mark ")[2].partition(" ")[0]) < 1.01 * plan.lead


def test_a_choice_that_noise_decides_warns_before_it_spends_and_names_no_lead():
    spent, asked = Budget(epsilon=0.0015, delta=1e-4), {"evaluator": Exact(), "epsilon": 0.001}
    with pytest.warns(NoisyPlanWarning, match=r"no lead wins with 90 % if 40 units are read\. Raise epsilon"):
        best = dp_choose(candidates(), examples(), budget=spent, sample=40, **asked)
    assert best.plan.lead > 1
    assert "; no lead wins with 90 %; " in str(best)
    with pytest.warns(NoisyPlanWarning), pytest.raises(PrivacyBudgetError):
        dp_choose(candidates(), examples(), budget=spent, sample=39, **asked)


def length(inputs, outputs, reference):
    return {"Card.": 5, "card": 2, "**transfer**": 3}.get(outputs, 1)


MARKS = Score(Pure(length), marks=(1, 2, 3, 5))


def test_the_best_by_marks_is_chosen():
    spent, chains = Budget(epsilon=4.0, delta=1e-5), candidates()
    assert dp_choose(chains, examples(), evaluator=MARKS, budget=spent, epsilon=2.0).name == "both"


@pytest.mark.parametrize(("mark", "runs"), [(1.0, 100), (1.5, 1_000), (3.5, 1_000), (5.0, 100)])
def test_a_mark_counts_as_its_share_of_the_range_on_average(mark, runs):
    marks = (1.0, 1.5, 3.5, 5.0)
    evaluator = Score(Pure(lambda inputs, outputs, reference: mark), marks=marks)
    question = silent_question(examples(), candidates(), evaluator, inputs=None, timeout=None, is_choice=True)
    rows = question.ask([OpaqueValue((CARD,))] * runs).run().take()
    assert set(np.unique(rows)) <= {0.0, 1.0}
    share = (mark - 1.0) / 4.0
    assert abs(rows[:, 0].sum() - runs * share) <= stats.norm.isf(1e-9) * math.sqrt(runs * share * (1 - share))
    assert (rows[:, 0] == rows[:, 1]).all(), "one coin for all candidates, so that equal marks differ in nothing"


def test_the_lead_of_marks_holds_for_their_rounding_too():
    """The worst case: every record has the same two marks, half a range apart by chance alone."""
    plan = plan_choice(1_000, candidates=2, epsilon=1.0, delta=1e-6, is_rounded=True)
    lead = plan.lead
    assert plan_choice(1_000, candidates=2, epsilon=1.0, delta=1e-6).lead < lead < 0.06
    rng, scale = np.random.default_rng(), plan.noise_multiplier * plan.release.sensitivity.require("range")
    # Half of the records are for the one, half for the other, each by a half: the largest variance of the rounding.
    ahead = (rng.random((5_000, 1_000)) < 0.5).astype(int) * np.where(np.arange(1_000) < 500 + 1_000 * lead, 1, -1)
    won = ahead.sum(1) + scale * (rng.gumbel(size=5_000) - rng.gumbel(size=5_000)) > 0
    assert won.mean() > 0.9


def test_what_cannot_be_chosen_among_is_refused_and_nothing_is_charged():
    spent = Budget(epsilon=2.0, delta=1e-5)
    for chains, evaluator, error in (
        ({"one": TEMPLATE | reader()}, Exact(), ConfigurationError),
        (candidates(), len, ConfigurationError),
        ({**candidates(), "own": TEMPLATE | reader() | str.upper}, Exact(), CapabilityError),
    ):
        with pytest.raises(error):
            dp_choose(chains, examples(), evaluator=evaluator, budget=spent)
    assert spent.remaining_epsilon == 2.0
