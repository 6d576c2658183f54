"""Counts of outcomes: what a unit moves, what the noise is, and what all of it costs."""

from __future__ import annotations

import math
import traceback
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from langchain_dpicl import PrivateExamples
from langchain_dpicl.evaluation.plan import plan_evaluation
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy import accounting
from langchain_dpicl.privacy.accounting.events import PureEvent, SubsampledEvent
from langchain_dpicl.privacy.extensions import outcome_counts
from langchain_dpicl.privacy.extensions.outcome_counts import OutcomePlan, OutcomeTable
from langchain_dpicl.privacy.extensions.value_counts import DiscreteLaplaceMechanism
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM
from langchain_dpicl.privacy.mechanisms.release_plan import PoissonSlots, PoissonUnits

ALARM = 1e-6
TABLE = OutcomeTable((3, 2))
rows = st.lists(st.lists(st.floats(), min_size=2, max_size=2), max_size=5)


def moved(one: Any, other: Any) -> int:
    return sum(abs(a - b) for left, right in zip(one, other, strict=True) for a, b in zip(left, right, strict=True))


def plan(
    noise: float = 1.0, rate: float = 1.0, table: OutcomeTable = TABLE, adjacency: Any = "add_remove"
) -> OutcomePlan:
    return OutcomePlan(PoissonUnits(rate), table, DiscreteLaplaceMechanism(noise), adjacency)


class TestTheTable:
    @settings(max_examples=80, deadline=None)
    @given(rows, st.lists(st.floats(), min_size=2, max_size=2), st.lists(st.floats(), min_size=2, max_size=2))
    def test_moves_the_counts_by_no_more_than_its_sensitivity(self, others, mine, another):
        without, with_me = (TABLE.counts(np.array(each).reshape(-1, 2)) for each in (others, [*others, mine]))
        replaced = TABLE.counts(np.array([*others, another]))
        assert moved(without, with_me) <= TABLE.l1_sensitivity("add_remove")
        assert moved(with_me, replaced) <= TABLE.l1_sensitivity("replace_one")

    def test_reaches_its_sensitivity(self):
        one, other = TABLE.counts(np.array([[0.0, 0.0]])), TABLE.counts(np.array([[1.0, 1.0]]))
        assert moved(one, TABLE.counts(np.zeros((0, 2)))) == TABLE.l1_sensitivity("add_remove") == 2
        assert moved(one, other) == TABLE.l1_sensitivity("replace_one") == 4

    @pytest.mark.parametrize("place", [math.nan, math.inf, -1.0, 0.5, 3.0, 1e300])
    def test_does_not_count_what_is_no_place(self, place):
        assert TABLE.counts(np.array([[place, 1.0]])) == ((0, 0, 0), (0, 1))

    @pytest.mark.parametrize("form", [(2, 4), (2, 1), (4,), (2, 1, 2), (0,)], ids=str)
    def test_refuses_rows_of_which_a_unit_has_several(self, form):
        with pytest.raises(ConfigurationError, match="one of each table"):
            TABLE.counts(np.zeros(form))

    @pytest.mark.parametrize("widths", [(), [2], (0,), (16_385,)], ids=str)
    def test_refuses_what_is_no_table(self, widths):
        with pytest.raises(ConfigurationError):
            OutcomeTable(widths)


class TestTheRelease:
    def test_draws_the_noise_of_its_scale(self):
        release = plan(noise=1.5, table=OutcomeTable((200,)))
        drawn = [
            count
            for _ in range(20)
            for (table,) in [release.release(np.zeros((0, 1)), rng=SYSTEM_RANDOM)]
            for count in table
        ]
        law = stats.dlaplace(1 / 1.5)
        seen = [sum(low <= count <= high for count in drawn) for low, high in ((-99, -1), (0, 0), (1, 99))]
        chances = [law.cdf(-1), law.pmf(0), law.cdf(-1)]
        assert stats.chisquare(seen, np.array(chances) / sum(chances) * sum(seen)).pvalue > ALARM

    @pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
    @pytest.mark.parametrize("rate", [1.0, 0.25])
    def test_costs_what_the_closed_form_says(self, adjacency, rate):
        release = plan(noise=1.25, rate=rate, adjacency=adjacency)
        closed = math.log1p(rate * math.expm1(1 / 1.25))
        price = accounting.epsilon_upper_bound(release.event, delta=1e-9, adjacency=adjacency)
        assert closed * 0.999 <= price <= closed * 1.001
        assert release.event == (SubsampledEvent(PureEvent(0.8), rate) if rate < 1 else PureEvent(0.8))
        assert float(release.scale) >= 1.25 * TABLE.l1_sensitivity(adjacency)

    def test_a_second_accountant_says_the_same(self):
        found = accounting.epsilon_bound(plan(noise=2.0, rate=0.5).event, delta=1e-6, adjacency="add_remove")
        assert found.opinions

    def test_refuses_parts_that_no_proof_covers(self):
        with pytest.raises(ConfigurationError, match="PoissonUnits"):
            OutcomePlan(PoissonSlots(0.1, 2, 2), TABLE, DiscreteLaplaceMechanism(1.0), "add_remove")  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match="threshold"):
            OutcomePlan(PoissonUnits(1.0), TABLE, DiscreteLaplaceMechanism(1.0, 5), "add_remove")

    def test_shows_all_that_it_is_made_of(self):
        made = plan(noise=1.5, rate=0.5)
        shown = made.to_dict()
        assert (shown["sampler"]["sampling_rate"], shown["mechanism"]["noise_multiplier"]) == (0.5, 1.5)
        assert (OutcomeTable(tuple(shown["table"]["widths"])), shown["adjacency"]) == (made.table, made.adjacency)

    def test_is_rebuilt_from_what_an_evaluation_shows(self):
        shown = plan_evaluation(500, widths=[3, 2], epsilon=0.5, delta=1e-5, sample=100)
        again = type(shown).rebuild(shown.to_dict())
        assert (again, again.tickets()) == (shown, shown.tickets())


def test_a_stop_while_halves_are_split_shows_no_record(monkeypatch):
    private = PrivateExamples(["zx-secret"] * 4, public_size=10)
    halves = outcome_counts.split_in_parts(private)

    def stop(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(outcome_counts, "part_of", stop)
    with pytest.raises(KeyboardInterrupt) as caught:
        halves._pool("choose", ledger_id=None)
    frames = [frame for frame, _ in traceback.walk_tb(caught.value.__traceback__)]
    ours = [frame.f_locals for frame in frames if frame.f_globals["__name__"].startswith("langchain_dpicl")]
    assert ours
    assert "zx-secret" not in repr(ours)
