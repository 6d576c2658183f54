"""Plans of answers to queries: calibrated on what is charged, against published numbers and against simulation."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from scipy import stats

from langchain_dpicl.backends.base import RowHint
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.planning.expected_utility import RowDesign, noise_scale, shot_law, vote_chances
from langchain_dpicl.planning.row_law import RowFacts, RowGuess, mean_facts
from langchain_dpicl.privacy import accounting
from langchain_dpicl.privacy.accounting.events import (
    BoundedRangeEvent,
    GaussianEvent,
    PureEvent,
    RepeatedEvent,
    SubsampledEvent,
)
from langchain_dpicl.privacy.extensions.fixed_size_slots import BalancedSlots
from langchain_dpicl.privacy.extensions.joint_exponential import JointExponentialMechanism, KeywordSum
from langchain_dpicl.privacy.extensions.normalized_sums import UnitVectorSum
from langchain_dpicl.privacy.extensions.registry import MECHANISMS
from langchain_dpicl.privacy.mechanisms.bounded import ProbabilitySum, VoteSum
from langchain_dpicl.privacy.mechanisms.release_plan import (
    GaussianMechanism,
    GumbelMechanism,
    PoissonSlots,
    PoissonUnits,
    ReleasePlan,
)
from langchain_dpicl.runs.query_plan import (
    QueryPlan,
    compare_queries,
    declared_design,
    mechanism_for,
    plan_queries,
)

FORTY = RowDesign.choose(rows="units", num_slots=40)
TEN_OF_FOUR = RowDesign.choose(rows="slots", num_slots=10, shots_per_slot=4)
# Panda et al. (2023): 10,000 queries at rate .005. Gaussian noise over sensitivity 1, from the upper end of
# prv-accountant 0.2.0 (Poisson sampling, adding or removing a record), whose own error is .01 to .03 in epsilon.
PANDA = {
    1e-4: {1: 1.762, 3: 0.895, 8: 0.626},
    1 / 8000: {1: 1.735, 3: 0.888, 8: 0.622},
    1e-5: {1: 2.028, 3: 0.966, 8: 0.656},
    1e-6: {1: 2.274, 3: 1.032, 8: 0.683},
}


def priced(noise_multiplier: float, **given: Any) -> QueryPlan:
    """A plan of given noise: 40 unit rows of 8,000 declared units, Gaussian noise, 10,000 queries, four labels."""
    defaults = {"delta": 1e-5, "max_queries": 10_000, "width": 4, "mechanism": "gaussian", "design": FORTY}
    public_size = given.pop("public_size", 8000)
    return plan_queries(public_size, epsilon=None, noise_multiplier=noise_multiplier, **{**defaults, **given})


def rows_of(right: float, labels: int = 4, *, correlation: float = 0.0, rival: float = 0.5) -> RowFacts:
    """Rows that err on their own, as far as nothing else is said."""
    return RowFacts(right, correlation, 1.0 if labels == 2 else rival, labels)


class TestAgainstPublishedNumbers:
    @pytest.mark.parametrize(("delta", "epsilon"), [(delta, epsilon) for delta in PANDA for epsilon in PANDA[delta]])
    def test_the_reference_noise_costs_the_reference_epsilon(self, delta: float, epsilon: float) -> None:
        """Their upper end contains ours, by at most its declared error of .03 (.05 at epsilon 8)."""
        plan = priced(PANDA[delta][epsilon], delta=delta)
        assert epsilon - (0.05 if epsilon == 8 else 0.03) < plan.epsilon <= epsilon

    @pytest.mark.parametrize("epsilon", [1, 3, 8])
    def test_the_calibrated_noise_is_at_most_the_reference_and_within_two_percent(self, epsilon: int) -> None:
        plan = plan_queries(
            8000, epsilon=epsilon, delta=1e-5, max_queries=10_000, width=4, mechanism="gaussian", design=FORTY
        )
        assert 0.98 * PANDA[1e-5][epsilon] < plan.noise_multiplier <= PANDA[1e-5][epsilon]
        assert 0.999 * epsilon < plan.epsilon <= epsilon

    @pytest.mark.parametrize(
        "design",
        [
            FORTY,
            dataclasses.replace(TEN_OF_FOUR, overfill=1.0),
            dataclasses.replace(TEN_OF_FOUR, sampling="fixed", overfill=1.0),
        ],
        ids=["unit rows", "Poisson slots", "fixed sample"],
    )
    def test_replaced_records_cost_what_is_proved_for_them(self, design: RowDesign) -> None:
        """The same noise over the sensitivity of a replaced vote, sqrt(2): 1.1646, 3.8834, 10.128, not 1, 3, 8."""
        for noise, bound in zip(PANDA[1e-5].values(), (1.1646, 3.8834, 10.1283), strict=True):
            plan = priced(noise, design=design, adjacency="replace_one")
            assert plan.epsilon == pytest.approx(bound, rel=1e-3)
            assert noise_scale(plan.release) == pytest.approx(noise * np.sqrt(2))

    def test_noise_that_forgets_the_sensitivity_of_a_replaced_vote_costs_two_to_four_times_the_epsilon(self) -> None:
        for noise, bound in zip(PANDA[1e-5].values(), (1.93, 8.98, 33.6), strict=True):
            fuller = dataclasses.replace(TEN_OF_FOUR, overfill=1.5)
            plan = priced(noise / np.sqrt(2), design=fuller, adjacency="replace_one", public_size=12_000)
            assert plan.epsilon == pytest.approx(bound, rel=5e-3)

    @pytest.mark.parametrize(("design", "agreement", "right"), [((10, 4), 0.8, 0.896), ((40, 1), 0.7, 0.987)])
    def test_more_rows_of_fewer_shots_release_more_right_labels(
        self, design: tuple[int, int], agreement: float, right: float
    ) -> None:
        """Two labels, rows that vote by themselves, Gaussian noise of twice the sensitivity sqrt(2) of a vote."""
        slots, shots = design
        shape = RowDesign.choose(rows="slots", num_slots=slots, shots_per_slot=shots, sampling="fixed")
        plan = priced(2.0, design=shape, adjacency="replace_one", width=2)
        assert plan.expected(rows_of(agreement, 2))["right_label_prob"] == pytest.approx(right, abs=0.003)


class TestWhatIsCharged:
    @pytest.mark.parametrize(
        ("mechanism", "event"),
        [("gumbel", BoundedRangeEvent(0.5)), ("gaussian", GaussianEvent(2.0)), ("permute_and_flip", PureEvent(0.5))],
    )
    def test_one_ticket_per_query_on_a_fresh_sample(self, mechanism: str, event: Any) -> None:
        plan = priced(2.0, mechanism=mechanism, max_queries=30, design=TEN_OF_FOUR)
        (ticket,) = plan.tickets()
        assert (ticket.template, ticket.max_count, ticket.label, ticket.refundable) == ("query", 30, None, True)
        assert ticket.event == SubsampledEvent(event, 40 / 8000) == plan.release.block_event(1)
        assert plan.event() == RepeatedEvent(ticket.event, 30)
        whole = RepeatedEvent(SubsampledEvent(event, 40 / 8000), 30)
        bound = accounting.epsilon_upper_bound(whole, delta=1e-5, adjacency="add_remove")
        assert plan.epsilon == pytest.approx(bound, rel=1e-6)

    def test_a_ledger_charges_the_planned_epsilon(self) -> None:
        plan = plan_queries(2000, epsilon=1.0, delta=1e-6, max_queries=30, width=3)
        budget = Budget(epsilon=1.0, delta=1e-6)
        share = budget.declare(
            "answers", tickets=plan.tickets(), delta=1e-6, implementation_delta=plan.implementation_delta
        )
        assert share.epsilon == pytest.approx(plan.epsilon, rel=1e-6)
        assert 0.998 < plan.epsilon <= 1.0

    def test_each_further_query_costs(self) -> None:
        prices = [priced(2.0, max_queries=count).epsilon for count in (1, 2, 1000, 10_000)]
        assert prices == sorted(set(prices))

    def test_the_gap_of_drawn_noise_is_declared_for_every_query_and_candidate(self) -> None:
        """Ten times the queries, ten times the gap; a constant candidate takes a draw like any other."""
        one = GumbelMechanism(2.0)
        plan = priced(2.0, mechanism=one, max_queries=300, width=5, constants=(8.0,))
        sampling = plan.implementation_delta / 300 - one.implementation_delta(5)
        assert plan.implementation_delta == pytest.approx(300 * one.implementation_delta(5), rel=1e-6)
        assert 0 <= sampling < 1e-6 * one.implementation_delta(5)
        assert priced(2.0, mechanism=one, max_queries=3000, width=5, constants=(8.0,)).implementation_delta == (
            pytest.approx(10 * plan.implementation_delta)
        )
        assert plan.implementation_delta > priced(2.0, mechanism=one, max_queries=300, width=4).implementation_delta

    def test_the_gap_comes_out_of_delta_before_noise_is_chosen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ReleasePlan, "implementation_delta", lambda *_, **__: 9e-6)
        plan = plan_queries(2000, epsilon=1.0, delta=1e-5, max_queries=30, width=3)
        at_the_rest = accounting.epsilon_upper_bound(plan.event(), delta=1e-6, adjacency="add_remove")
        assert plan.epsilon == at_the_rest
        assert 0.998 < at_the_rest <= 1.0

    def test_constants_cost_nothing_and_stay_in_the_plan(self) -> None:
        plain, abstaining = priced(2.0), priced(2.0, width=5, constants=(16.0,))
        assert abstaining.epsilon == plain.epsilon
        assert abstaining.release.constants == (16.0,)
        assert abstaining.width == 5


class TestRows:
    @pytest.mark.parametrize(
        ("design", "sampler", "rows"),
        [
            (FORTY, PoissonUnits(0.005), 40.0),
            (TEN_OF_FOUR, PoissonSlots(0.005, num_slots=10, shots_per_slot=4), 10.0),
            (
                dataclasses.replace(TEN_OF_FOUR, overfill=2.0),
                PoissonSlots(0.01, num_slots=10, shots_per_slot=4),
                10.0,
            ),
            (
                RowDesign.choose(num_slots=10, shots_per_slot=4, sampling="fixed"),
                BalancedSlots(num_slots=10, shots_per_slot=4, public_size=8000),
                10.0,
            ),
        ],
        ids=["unit rows", "slots", "fuller slots", "fixed sample"],
    )
    def test_the_design_gives_the_sampler_and_the_public_number_of_rows(
        self, design: RowDesign, sampler: Any, rows: float
    ) -> None:
        plan = priced(2.0, design=design, adjacency="replace_one")
        assert plan.release.sampler == sampler
        assert plan.expected_rows == pytest.approx(rows)

    def test_without_a_design_there_are_twenty_rows_of_four_or_as_many_as_the_units_fill(self) -> None:
        shape = priced(2.0, design=None).design
        assert (shape.rows, shape.num_slots, shape.shots_per_slot, shape.overfill) == ("slots", 20, 4, 1.0)
        for units, slots, shots in ((79, 20, 3), (30, 20, 1), (7, 7, 1), (1, 1, 1)):
            few = priced(2.0, design=None, public_size=units).design
            assert (few.num_slots, few.shots_per_slot) == (slots, shots)

    def test_an_engine_may_declare_another_shape(self) -> None:
        shape = declared_design(RowHint(slots=10, shots=8), 8000)
        assert (shape.num_slots, shape.shots_per_slot) == (10, 8)

    def test_noise_is_gaussian_in_slots_and_gumbel_on_unit_rows(self) -> None:
        for design in (FORTY, TEN_OF_FOUR):
            plan = priced(2.0, mechanism=None, design=design)
            assert plan.release.mechanism.name == mechanism_for(design)
        assert (mechanism_for(FORTY), mechanism_for(TEN_OF_FOUR)) == ("gumbel", "gaussian")

    def test_calls_and_tokens_are_counted_from_public_caps(self) -> None:
        """40 rows of one record and one public row per query; slots are paid for whether filled or not."""
        cost = priced(2.0, max_queries=100).cost(record_tokens=50, query_tokens=20, answer_tokens=3)
        assert (cost.private_calls, cost.public_calls) == (4000, 100)
        assert cost.tokens_in == 4000 * 70 + 100 * 20
        assert cost.tokens_out == 4100 * 3
        assert cost.money(price_in=2.0, price_out=10.0) == pytest.approx((282_000 * 2 + 12_300 * 10) / 1e6)
        plan = priced(2.0, max_queries=100, design=TEN_OF_FOUR)
        cost = plan.cost(calls_per_row=3, public_rows=2)
        assert (cost.private_calls, cost.public_calls) == (3000, 600)
        shots = plan.expected(rows_of(0.5))["expected_shots"]
        assert cost.tokens_in == round(3000 * (shots * 60 + 60) + 600 * 60)


class TestOtherReleases:
    def test_a_mechanism_keeps_its_other_parameters_and_gets_new_noise(self) -> None:
        joint = JointExponentialMechanism(1.0, num_choices=5)
        plan = plan_queries(
            2000, epsilon=1.0, delta=1e-5, max_queries=30, width=200, mechanism=joint, aggregation=KeywordSum()
        )
        assert plan.release.mechanism.num_choices == 5
        assert plan.noise_multiplier not in {0.0, 1.0}
        assert 0.998 < plan.epsilon <= 1.0
        with pytest.raises(ConfigurationError, match="num_choices"):
            plan_queries(
                2000, epsilon=1.0, delta=1e-5, max_queries=30, width=4, mechanism=joint, aggregation=KeywordSum()
            )

    def test_sums_of_other_rows_are_planned_alike_but_have_no_right_label(self) -> None:
        plan = priced(2.0, aggregation=UnitVectorSum(), width=384, mechanism=GaussianMechanism(9.0))
        assert plan.noise_multiplier == 2.0
        assert plan.epsilon == priced(2.0).epsilon
        with pytest.raises(ConfigurationError, match="aggregation: expected votes or probabilities"):
            plan.expected()

    @pytest.mark.parametrize("aggregation", [None, ProbabilitySum(), KeywordSum()])
    def test_what_is_reported_is_json(self, aggregation: Any) -> None:
        mechanism = JointExponentialMechanism(2.0, num_choices=3) if isinstance(aggregation, KeywordSum) else "gumbel"
        plan = priced(2.0, aggregation=aggregation, mechanism=mechanism)
        shown = json.loads(json.dumps(plan.to_dict()))
        assert shown["epsilon"] == plan.epsilon
        assert shown["sampling_rate"] == 0.005
        assert (shown["max_queries"], shown["candidates"], shown["public_size"]) == (10_000, 4, 8000)
        assert shown["aggregation"] == (aggregation or VoteSum()).name
        assert shown["noise_scale"] == (None if isinstance(aggregation, KeywordSum) else 2.0)


class TestPublicFaults:
    @pytest.mark.parametrize(
        ("given", "said"),
        [
            ({"max_queries": 0}, "max_queries: expected an integer >= 1"),
            ({"max_queries": 2.0}, "max_queries"),
            ({"public_size": 39}, "public_size: expected at least 40 units, one for each row"),
            ({"public_size": 0}, "public_size"),
            ({"delta": 0.0}, "delta"),
            ({"delta": 1e-30}, "delta: expected more than the noise's declared gap"),
            ({"adjacency": "any"}, "adjacency"),
            ({"design": RowDesign("units", 10, 4, "poisson", 1.0)}, "rows: expected 'slots' with several shots"),
            ({"design": RowDesign("slots", 10, 4, "shuffle", 1.0)}, "sampling"),
            ({"design": dataclasses.replace(TEN_OF_FOUR, sampling="fixed")}, "sampling: expected 'poisson'"),
            ({"width": 1, "constants": (3.0,)}, "width: expected an integer >= 2"),
            ({"constants": (float("nan"),)}, "constants"),
            ({"mechanism": "laplace"}, "mechanism"),
            ({"mechanism": "gaussian", "aggregation": KeywordSum()}, "mechanism"),
            ({"partition": ""}, "partition"),
            ({"noise_multiplier": -1.0}, "noise_multiplier"),
            ({"epsilon": None}, "epsilon: expected a share of the budget"),
            ({"epsilon": -1.0}, "epsilon"),
        ],
    )
    def test_are_refused_before_anything_is_computed(
        self, given: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: Any, **__: Any) -> None:
            raise AssertionError("something was computed")

        monkeypatch.setattr(accounting, "calibrate", fail)
        monkeypatch.setattr(accounting, "epsilon_upper_bound", fail)
        defaults = {"public_size": 8000, "epsilon": 1.0, "delta": 1e-5, "max_queries": 10, "width": 4, "design": FORTY}
        arguments = {**defaults, **given}
        with pytest.raises(ConfigurationError, match=said):
            plan_queries(arguments.pop("public_size"), **arguments)

    def test_a_guess_that_is_no_share_is_refused(self) -> None:
        for given in ({"skill": 1.2}, {"growth": -0.1}, {"correlation": 2.0}):
            with pytest.raises(ConfigurationError, match=next(iter(given))):
                RowGuess(**given)


def simulated(plan: QueryPlan, facts: RowFacts, draws: int = 40_000) -> np.ndarray:
    """Shares of draws in which the right label, another one, or a constant wins: questions, units, votes, noise.

    Written from the definition of the law alone: Beta(right s, (1 - right) s) with s = (1 - rho) / rho, and a symmetric
    Dirichlet of total weight t over the wrong labels, in which two votes agree with chance (t / (L - 1) + 1) / (t + 1).
    """
    generator = np.random.default_rng(7)
    sampler, size = plan.release.sampler, plan.public_size
    drawn = generator.binomial(size, sampler.sampling_rate, size=draws)
    if isinstance(sampler, PoissonUnits):
        rows = drawn
    else:
        rows = (generator.multinomial(drawn, np.full(sampler.num_slots, 1 / sampler.num_slots)) > 0).sum(axis=1)
    labels, right = facts.labels, np.full(draws, facts.right)
    if facts.correlation:
        strength = (1 - facts.correlation) / facts.correlation
        right = generator.beta(facts.right * strength, (1 - facts.right) * strength, size=draws)
    spread = np.ones((draws, 1))
    if labels > 2:
        total = (1 - facts.rival) / (facts.rival - 1 / (labels - 1))
        spread = generator.dirichlet(np.full(labels - 1, total / (labels - 1)), size=draws)
    chances = np.hstack([right[:, None], (1 - right)[:, None] * spread])
    sums = generator.multinomial(rows, chances / chances.sum(axis=1, keepdims=True)).astype(float)
    sums = np.hstack([sums, np.tile(plan.release.constants, (draws, 1))])
    law = {"gumbel": stats.gumbel_r, "gaussian": stats.norm, "permute_and_flip": stats.expon}
    norm = getattr(plan.release.sensitivity, plan.release.mechanism.norm)
    noise = law[plan.release.mechanism.name].rvs(size=sums.shape, random_state=generator)
    winner = (sums + plan.noise_multiplier * norm * noise).argmax(axis=1)
    won, abstained = (winner == 0).mean(), (winner >= labels).mean()
    return np.array([won, 1 - won - abstained, abstained])


def chances_of(signal: dict[str, Any]) -> list[float]:
    return [signal["right_label_prob"], signal["wrong_label_prob"], signal["abstain_prob"]]


class TestSignal:
    @pytest.mark.parametrize("mechanism", MECHANISMS)
    @pytest.mark.parametrize("design", [FORTY, RowDesign.choose(rows="slots", num_slots=20, shots_per_slot=2)])
    @pytest.mark.parametrize("facts", [rows_of(0.6, 2), rows_of(0.6, 5), rows_of(0.6, 5, correlation=0.55, rival=0.8)])
    def test_chances_match_a_simulation(self, mechanism: str, design: RowDesign, facts: RowFacts) -> None:
        """Within 6 standard errors of the simulation (false alarms below 1e-8) and a point of the planner's own."""
        width = facts.labels + 1
        plan = priced(3.0, mechanism=mechanism, design=design, width=width, constants=(12.0,), max_queries=10)
        signal = plan.expected(facts)
        assert sum(chances_of(signal)) == pytest.approx(1.0)
        assert chances_of(signal) == pytest.approx(simulated(plan, facts), abs=0.01 + 6 * np.sqrt(0.25 / 40_000))

    def test_rows_that_are_alike_are_not_taken_as_independent(self) -> None:
        """The fault of the planner before: forty rows, 60 % of them right, are 99.8 % right only if they err alone."""
        alone, alike = (priced(1.0).expected(rows_of(0.6, correlation=rho, rival=0.7)) for rho in (0.0, 0.55))
        assert alone["right_label_prob"] > 0.95
        assert alike["right_label_prob"] < 0.66
        assert alike["right_label_prob"] <= alike["ceiling_prob"] < 0.66

    def test_without_a_constant_nobody_abstains_and_a_high_one_always_wins(self) -> None:
        facts = rows_of(0.6)
        assert priced(1.0).expected(facts)["abstain_prob"] == 0.0
        assert priced(1.0, width=5, constants=(200.0,)).expected(facts)["abstain_prob"] > 0.999
        assert priced(1.0, width=5, constants=(-200.0,)).expected(facts)["abstain_prob"] < 1e-6

    def test_a_noisy_vector_abstains_by_its_threshold_as_an_index_does_by_its_constant(self) -> None:
        facts = rows_of(0.5, correlation=0.4)
        vector = priced(0.5).expected(facts, abstain_below=0.9)
        index = priced(0.5, mechanism="gumbel", width=5, constants=(36.0,)).expected(facts, abstain_below=0.9)
        assert vector["abstain_prob"] == pytest.approx(index["abstain_prob"], abs=0.03)
        assert vector["abstain_prob"] > 0.5
        assert priced(0.5).expected(facts)["abstain_prob"] == 0.0

    def test_constants_abstain_together(self) -> None:
        plan = priced(4.0, width=6, constants=(24.0, 20.0))
        chances = vote_chances(plan.release, 8000, facts=rows_of(0.6))
        assert plan.expected(rows_of(0.6))["abstain_prob"] == chances.abstain > 0.1
        assert chances.right + chances.wrong + chances.abstain == pytest.approx(1.0)
        one = priced(4.0, width=5, constants=(24.0,)).expected(rows_of(0.6))
        assert one["abstain_prob"] < chances.abstain

    def test_unanimous_rows_are_right_and_rows_that_disagree_are_not(self) -> None:
        plan = priced(0.01, design=RowDesign.choose(num_slots=10, sampling="fixed"), adjacency="replace_one")
        assert plan.expected(rows_of(1.0))["right_label_prob"] == pytest.approx(1.0)
        assert plan.expected(rows_of(0.0))["right_label_prob"] == pytest.approx(0.0, abs=1e-9)

    def test_more_noise_and_more_rows_do_what_they_do(self) -> None:
        facts = rows_of(0.6, correlation=0.3)
        rights = [priced(noise).expected(facts)["right_label_prob"] for noise in (0.5, 2.0, 8.0, 30.0)]
        assert rights == sorted(rights, reverse=True)
        assert rights[0] - rights[-1] > 0.2
        signal = priced(2.0).expected(facts)
        assert signal["right_label_prob"] < signal["without_noise_prob"] <= signal["ceiling_prob"] + 0.01

    def test_a_guess_is_a_range_and_says_that_it_is_one(self) -> None:
        signal = priced(1.0).expected()
        assert signal["rests_on"] == "a guess"
        assert signal["right_label_low"] + 0.1 < signal["right_label_prob"] < signal["right_label_high"] - 0.1
        given = priced(1.0).expected(rows_of(0.6))
        assert given["right_label_low"] == pytest.approx(given["right_label_high"], abs=0.01)

    @pytest.mark.parametrize(
        ("labels", "shots", "right"), [(4, 1, 0.5125), (4, 4, 0.5875), (2, 2, 0.7), (14, 1, 0.3964)]
    )
    def test_the_guess_has_the_labels_in_it(self, labels: int, shots: int, right: float) -> None:
        """right(k) = 1/L + (1 - 1/L) min(.95, .35 + .05 log2 k)."""
        found = RowGuess().facts(labels=labels, shots=shots)
        assert found.right == pytest.approx(right, abs=1e-4)
        assert found.correlation == (0.75 if labels == 2 else 0.55)

    def test_a_slot_is_worth_the_mean_over_the_records_that_it_may_hold(self) -> None:
        plan = priced(2.0, design=TEN_OF_FOUR)
        law = shot_law(plan.release, 8000)
        assert sum(chance for _, chance in law) == pytest.approx(1.0 - 0.0183, abs=2e-4)  # no empty slots among them
        facts = mean_facts(RowGuess(), labels=4, law=law, calibrated=False)
        ends = [RowGuess().facts(labels=4, shots=shots).right for shots in (1, 4)]
        assert ends[0] < facts.right < ends[1]
        assert plan.expected()["row_right"] == facts.right


@pytest.fixture(scope="module")
def options() -> list[Any]:
    return compare_queries(4000, epsilon=1.0, delta=1e-5, max_queries=1000, labels=4, abstain_below=0.25)


class TestComparison:
    def test_it_compares_fewer_rows_fills_and_mechanisms_and_puts_the_best_first(self, options: list[Any]) -> None:
        first = [o.plan.design for o in options if o.plan.release.mechanism.name == "gaussian"]
        assert {(d.rows, d.num_slots, d.shots_per_slot) for d in first} >= {
            ("units", 20, 1),
            ("units", 40, 1),
            *(("slots", slots, shots) for slots in (10, 20, 40) for shots in (2, 4, 8)),
        }
        assert {d.overfill for d in first if d.shots_per_slot == 4} == {1.0, 1.5}
        assert {o.plan.release.mechanism.name for o in options} == set(MECHANISMS)
        assert [o.rank for o in options] == sorted(o.rank for o in options)
        best = max(o.right_label_prob for o in options)
        assert options[0].right_label_prob > best - 0.005

    def test_every_noise_is_paid_for_and_little_more_than_needed(self, options: list[Any]) -> None:
        for o in options:
            fine = accounting.epsilon_upper_bound(o.plan.event(), delta=1e-5, adjacency="add_remove")
            assert 0.95 < fine <= o.plan.epsilon == 1.0
            assert 0 <= o.to_dict()["noise_multiplier"] - o.plan.noise_multiplier < 1e-4

    def test_what_it_shows_is_what_the_plan_expects(self, options: list[Any]) -> None:
        for o in options:
            signal = o.plan.expected(abstain_below=0.25)
            assert (o.right_label_prob, o.row_right) == (signal["right_label_prob"], signal["row_right"])
            assert o.private_calls == 1000 * round(o.plan.expected_rows)
            is_vector = o.plan.release.mechanism.releases == "vector"
            assert o.plan.release.constants == (() if is_vector else (0.25 * o.plan.expected_rows,))
            assert o.plan.width == 4 + len(o.plan.release.constants)
            assert o.to_dict()["right_label_prob"] == round(o.right_label_prob, 4)

    def test_the_other_mechanisms_are_tried_on_the_best_rows(self, options: list[Any]) -> None:
        others = {o.plan.design for o in options if o.plan.release.mechanism.name != "gaussian"}
        assert len(others) == 1
        assert others <= {o.plan.design for o in options if o.plan.release.mechanism.name == "gaussian"}

    def test_no_fine_grid_is_spent_on_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: Any, **__: Any) -> None:
            raise AssertionError("a fine grid was composed")

        monkeypatch.setattr(accounting, "epsilon_upper_bound", fail)
        found = compare_queries(3000, epsilon=1.0, delta=1e-5, max_queries=50, labels=2, mechanisms=("gaussian",))
        assert {o.plan.release.mechanism.name for o in found} == {"gaussian"}

    def test_where_labels_are_equally_right_fewer_calls_win(self) -> None:
        loud = compare_queries(
            100_000,
            epsilon=60.0,
            delta=1e-6,
            max_queries=3,
            labels=2,
            mechanisms=("gaussian",),
            source=rows_of(0.99, 2, correlation=0.5),
        )
        best = [o for o in loud if o.right_label_prob > loud[0].right_label_prob - 0.002]
        assert len(best) > 3
        assert loud[0].private_calls == min(o.private_calls for o in best) == 30

    def test_shapes_that_the_units_cannot_fill_are_left_out(self) -> None:
        found = compare_queries(30, epsilon=1.0, delta=1e-3, max_queries=2, labels=2, mechanisms=("gaussian",))
        assert {(o.plan.design.num_slots, o.plan.design.shots_per_slot) for o in found} == {(20, 1)} | {(10, 2)}
        few = compare_queries(9, epsilon=1.0, delta=1e-3, max_queries=2, labels=2, mechanisms=("gaussian",))
        assert [(o.plan.design.num_slots, o.plan.design.shots_per_slot) for o in few] == [(9, 1)]

    def test_a_fixed_sample_is_compared_with_the_others(self) -> None:
        base = RowDesign.choose(num_slots=10, shots_per_slot=4, sampling="fixed")
        given = {"epsilon": 1.0, "delta": 1e-5, "max_queries": 50, "labels": 2, "mechanisms": ("gaussian",)}
        found = compare_queries(3000, base=base, adjacency="replace_one", **given)
        assert base in {o.plan.design for o in found}
        with pytest.raises(ConfigurationError, match="sampling"):
            compare_queries(3000, base=base, **given)

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            ({"labels": 1}, "labels"),
            ({"abstain_below": 2.0}, "abstain_below"),
            ({"mechanisms": ()}, "mechanisms"),
            ({"mechanisms": ("laplace",)}, "mechanism"),
            ({"base": RowDesign.choose(num_slots=300)}, "public_size"),
            ({"public_size": 0}, "public_size"),
            ({"source": rows_of(0.5, 3)}, "labels: expected 3"),
        ],
    )
    def test_public_faults_are_refused(self, given: dict[str, Any], said: str) -> None:
        defaults = {"public_size": 200, "epsilon": 1.0, "delta": 1e-5, "max_queries": 10, "labels": 2}
        arguments = {**defaults, **given}
        with pytest.raises(ConfigurationError, match=said):
            compare_queries(arguments.pop("public_size"), **arguments)


def test_noise_too_small_to_be_priced_is_refused_as_such() -> None:
    with pytest.raises(ConfigurationError, match=r"noise_multiplier: .*finite epsilon, found 1e-06\. Raise it"):
        priced(1e-6)
