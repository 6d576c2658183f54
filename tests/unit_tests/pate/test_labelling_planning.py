"""Plans of labels for public inputs: what is charged for each way of drawing teachers, and what can be expected."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.generation.plan import plan_generation
from langchain_dpicl.options import Rows
from langchain_dpicl.pate.labeler import _teachers
from langchain_dpicl.pate.plan import LabellingPlan, compare_teachers, plan_labelling, propose_labelling
from langchain_dpicl.planning.expected_utility import RowDesign
from langchain_dpicl.planning.row_law import RowFacts, RowGuess
from langchain_dpicl.privacy import accounting
from langchain_dpicl.privacy.accounting.events import (
    BoundedRangeEvent,
    ComposedEvent,
    GaussianEvent,
    PureEvent,
    RepeatedEvent,
    SubsampledEvent,
)
from langchain_dpicl.privacy.extensions.confident_gnmax import ConfidentGNMaxMechanism
from langchain_dpicl.privacy.extensions.fixed_size_slots import PartitionedSlots
from langchain_dpicl.privacy.extensions.joint_exponential import KeywordSum
from langchain_dpicl.privacy.extensions.normalized_sums import UnitVectorSum
from langchain_dpicl.privacy.extensions.registry import MECHANISMS, TEACHERS
from langchain_dpicl.privacy.mechanisms.release_plan import PoissonUnits
from langchain_dpicl.runs.query_plan import plan_queries, rejection

SST2, AGNEWS = 6920, 46377
DRAWS = 40_000
SIX_ERRORS = 6 * float(np.sqrt(0.25 / DRAWS))  # false alarms below 1e-8 each
TWENTY = RowDesign.choose(num_slots=20)
DEALT = RowDesign.choose(num_slots=20, shots_per_slot=2, sampling="partition")


def confident(
    row_shape: Any = "slots", *, threshold: float = 180, test: float = 1, votes: float = 20
) -> ConfidentGNMaxMechanism:
    """Noises in votes; unit rows under add_remove, slots under replace_one."""
    return ConfidentGNMaxMechanism.of_votes(
        threshold=threshold,
        sigma_threshold=test,
        sigma_votes=votes,
        row_shape=row_shape,
        adjacency="add_remove" if row_shape == "units" else "replace_one",
    )


def priced(noise_multiplier: float | None = 2.0, **given: Any) -> LabellingPlan:
    """A plan of given noise: 20 unit rows of 2,000 declared units, Gaussian noise, 30 inputs, three labels."""
    defaults = {"delta": 1e-5, "max_queries": 30, "width": 3, "mechanism": "gaussian"}
    if given.get("teachers") != "fixed":
        defaults["design"] = TWENTY
    public_size = given.pop("public_size", 2000)
    return plan_labelling(public_size, **{"epsilon": None, "noise_multiplier": noise_multiplier, **defaults, **given})


def fixed(**given: Any) -> LabellingPlan:
    """The paper's Confident-GNMax on 200 fixed teachers: the noise is in the mechanism."""
    defaults = {"teachers": "fixed", "adjacency": "replace_one", "mechanism": confident(), "delta": 1e-6}
    return priced(None, **{**defaults, "public_size": SST2, "max_queries": 500, **given})


class TestTheThreeTeachers:
    @pytest.mark.parametrize(
        ("public_size", "epsilons"), [(SST2, (8.306, 1.385, 0.1192)), (AGNEWS, (8.306, 0.2257, 0.01536))]
    )
    def test_the_papers_noise_costs_three_honest_epsilons(self, public_size: int, epsilons: tuple[float, ...]) -> None:
        """200 teachers, noise of 20 votes, 500 queries, delta 1e-6; fixed teachers by the closed form of a Gaussian."""
        rows = compare_teachers(public_size, num_teachers=200, noise=20, max_queries=500, delta=1e-6)
        assert [float(f"{row.epsilon:.4g}") for row in rows] == list(epsilons)
        assert [row.teachers for row in rows] == ["fixed", "one_sample", "fresh"]
        assert [row.adjacency for row in rows] == ["replace_one", "add_remove", "add_remove"]
        assert rows[0].epsilon == pytest.approx(accounting.gdp_epsilon(np.sqrt(2 * 500) / 20, 1e-6), rel=1e-6)
        assert json.loads(json.dumps([row.to_dict() for row in rows]))[2]["sampling_rate"] == 200 / public_size

    def test_a_second_accountant_agrees_with_the_sampled_ones(self) -> None:
        rate = 200 / SST2
        one = SubsampledEvent(RepeatedEvent(GaussianEvent(20.0), 500), rate)
        # Composed inside, 500 answers are one Gaussian of sqrt(500) / 20; one sample of it has a closed form.
        alone = SubsampledEvent(GaussianEvent(20 / np.sqrt(500)), rate)
        bounds = [accounting.epsilon_bound(event, delta=1e-6, adjacency="add_remove") for event in (one, alone)]
        assert bounds[0].epsilon == pytest.approx(bounds[1].epsilon, rel=1e-6)
        assert bounds[1].opinions
        assert float(f"{bounds[0].epsilon:.4g}") == 1.385

    @pytest.mark.parametrize("given", [{"noise": 0.0}, {"num_teachers": 0}, {"num_teachers": SST2 + 1}, {"labels": 1}])
    def test_public_faults_are_refused(self, given: dict[str, Any]) -> None:
        with pytest.raises(ConfigurationError):
            compare_teachers(SST2, **{"num_teachers": 200, "noise": 20, "max_queries": 5, "delta": 1e-6, **given})


class TestWhatIsCharged:
    @pytest.mark.parametrize(
        ("mechanism", "event"),
        [("gumbel", BoundedRangeEvent(0.5)), ("gaussian", GaussianEvent(2.0)), ("permute_and_flip", PureEvent(0.5))],
    )
    def test_fresh_teachers_pay_for_each_input_one_sample_for_all_at_once(self, mechanism: str, event: Any) -> None:
        fresh, one = (priced(mechanism=mechanism, teachers=teachers) for teachers in ("fresh", "one_sample"))
        ((label,), (whole,)) = fresh.tickets(), one.tickets()
        assert (label.template, label.max_count, label.refundable) == ("label", 30, True)
        assert (whole.template, whole.max_count, whole.refundable) == ("labels", 1, True)
        assert label.event == SubsampledEvent(event, 0.01)
        assert whole.event == SubsampledEvent(RepeatedEvent(event, 30), 0.01)
        assert fresh.event() == RepeatedEvent(label.event, 30)
        assert one.release.redraw_every == 30
        assert one.epsilon > 2 * fresh.epsilon

    @pytest.mark.parametrize("mechanism", MECHANISMS)
    def test_fixed_teachers_are_not_amplified(self, mechanism: str) -> None:
        plan = priced(mechanism=mechanism, teachers="fixed", adjacency="replace_one")
        (ticket,) = plan.tickets()
        assert (ticket.template, ticket.max_count) == ("label", 30)
        assert ticket.event == plan.release.mechanism.event
        assert plan.release.sampler == PartitionedSlots(200, 1, 2000)
        assert plan.expected_rows == 200
        assert priced(teachers="fixed", adjacency="replace_one", public_size=70).expected_rows == 70

    @pytest.mark.parametrize("teachers", TEACHERS)
    @pytest.mark.parametrize("mechanism", MECHANISMS)
    def test_calibrated_noise_costs_the_epsilon_that_a_ledger_charges(self, teachers: Any, mechanism: str) -> None:
        adjacency = "replace_one" if teachers == "fixed" else "add_remove"
        plan = priced(None, epsilon=0.7, teachers=teachers, mechanism=mechanism, adjacency=adjacency)
        share = Budget(epsilon=1.0, delta=1e-5, adjacency=adjacency).declare(
            "labels", tickets=plan.tickets(), delta=1e-5, implementation_delta=plan.implementation_delta
        )
        assert share.epsilon == pytest.approx(plan.epsilon, rel=1e-6)
        assert 0.699 < plan.epsilon <= 0.7

    def test_labels_of_one_sample_are_as_dear_as_its_rate_makes_their_composition(self) -> None:
        """Gaussian labels inside one sample of everything cost what fixed ones do under the same relation."""
        everyone = RowDesign.choose(num_slots=2000)
        one = priced(teachers="one_sample", adjacency="replace_one", design=everyone)
        assert one.release.sampler == PoissonUnits(1.0)
        assert one.epsilon == priced(teachers="fixed", adjacency="replace_one").epsilon

    def test_the_gap_of_drawn_noise_counts_every_input(self) -> None:
        for teachers in ("fresh", "one_sample"):
            few, many = (priced(teachers=teachers, max_queries=n).implementation_delta for n in (30, 300))
            assert many == pytest.approx(10 * few)


class TestConfidentGNMax:
    @pytest.mark.parametrize(
        ("threshold_noise", "votes", "epsilon"), [(1, 20, 356.8987), (5, 20, 33.1069), (1, 50, 355.6260)]
    )
    def test_fixed_teachers_cost_the_published_closed_form(
        self, threshold_noise: float, votes: float, epsilon: float
    ) -> None:
        """500 tests and answers at delta 1e-6: mu^2 = 500 / s1^2 + 2 * 500 / s2^2."""
        plan = fixed(mechanism=confident(test=threshold_noise, votes=votes))
        assert plan.epsilon == pytest.approx(epsilon, abs=5.1e-5)

    def test_with_fixed_teachers_tests_and_answers_have_tickets_of_their_own(self) -> None:
        plan = fixed(max_answers=40)
        test, answer = plan.tickets()
        assert (test.template, test.max_count, test.event) == ("test", 500, GaussianEvent(1.0))
        assert (answer.template, answer.max_count) == ("answer", 40)
        assert answer.event == GaussianEvent(20 / np.sqrt(2))
        assert plan.event() == ComposedEvent((RepeatedEvent(test.event, 500), RepeatedEvent(answer.event, 40)))
        mu = np.sqrt(500 + 2 * 40 / 400)
        assert plan.epsilon == pytest.approx(accounting.gdp_epsilon(mu, 1e-6), rel=1e-6)
        assert fixed().max_answers == 500

    def test_one_sample_pays_for_as_many_answers_as_are_declared(self) -> None:
        mechanism = confident("units", test=50)
        plan = priced(None, mechanism=mechanism, teachers="one_sample", max_queries=100, max_answers=10)
        (ticket,) = plan.tickets()
        assert ticket.event == SubsampledEvent(mechanism.repeated(100, 10), 0.01)
        assert plan.epsilon < priced(None, mechanism=mechanism, teachers="one_sample", max_queries=100).epsilon

    def test_fresh_teachers_pay_for_both_questions_of_every_input(self) -> None:
        mechanism = confident("units", test=20)
        (ticket,) = priced(None, mechanism=mechanism).tickets()
        assert ticket.event == SubsampledEvent(mechanism.repeated(1, 1), 0.01)
        assert ticket.max_count == 30

    def test_its_noise_is_its_own_whatever_epsilon_is_given(self) -> None:
        assert fixed(epsilon=1.0).epsilon == fixed().epsilon > 100
        with pytest.raises(ConfigurationError, match="noise_multiplier: expected None"):
            priced(3.0, mechanism=confident("units"))

    def test_the_report_names_both_noises_in_votes(self) -> None:
        shown = json.loads(json.dumps(fixed(max_answers=7).to_dict()))
        assert (shown["threshold"], shown["test_noise_scale"], shown["max_answers"]) == (180.0, 1.0, 7)
        assert shown["noise_scale"] == pytest.approx(20)
        assert (shown["teachers"], shown["sampling"], shown["sampling_rate"]) == ("fixed", "partition", 1.0)


class TestPublicFaults:
    @pytest.mark.parametrize(
        ("given", "said"),
        [
            ({"teachers": "old"}, "teachers: expected one of"),
            ({"teachers": "fixed", "design": DEALT}, "Use a new sample for each input"),
            ({"teachers": "fixed", "adjacency": "replace_one", "design": TWENTY}, "sampling: expected 'partition'"),
            (
                {"design": DEALT, "adjacency": "replace_one"},
                "sampling: expected 'poisson' or 'fixed', or 'partition' for fixed",
            ),
            ({"design": dataclasses.replace(DEALT, sampling="fixed")}, "sampling: expected 'poisson'"),
            ({"max_answers": 3}, "max_answers: expected None"),
            ({"teachers": "one_sample", "max_answers": 3}, "max_answers: expected None"),
            (
                {"mechanism": confident("units"), "noise_multiplier": None, "max_answers": 3},
                "max_answers: expected None",
            ),
            ({"threshold": 3.0, "mechanism": "gumbel"}, "threshold: expected None: gumbel"),
            ({"threshold": float("nan")}, "threshold"),
            ({"mechanism": confident("units"), "noise_multiplier": None, "constants": (2.0,)}, "constants"),
            ({"mechanism": confident("units"), "noise_multiplier": None, "aggregation": KeywordSum()}, "mechanism"),
            ({"max_queries": 0}, "max_queries"),
            ({"max_queries": 10**12 + 1}, "max_queries: expected an integer >= 1 and <= 1000000000000"),
            ({"width": 0}, "width"),
            ({"delta": 1e-30}, "delta: expected more than the noise's declared gap"),
            ({"noise_multiplier": None}, "epsilon: expected a share"),
            ({"public_size": 19}, "public_size: expected at least 20 units, one for each row"),
            ({"partition": ""}, "partition"),
        ],
    )
    def test_are_refused(self, given: dict[str, Any], said: str) -> None:
        with pytest.raises(ConfigurationError, match=said):
            priced(**{"noise_multiplier": 2.0, **given})

    @pytest.mark.parametrize("answers", [0, 501])
    def test_answers_are_between_one_and_all(self, answers: int) -> None:
        with pytest.raises(ConfigurationError, match="max_answers"):
            fixed(max_answers=answers)

    def test_a_partition_is_for_fixed_teachers_alone(self) -> None:
        terms = {"epsilon": None, "noise_multiplier": 2.0, "delta": 1e-5, "adjacency": "replace_one", "design": DEALT}
        with pytest.raises(ConfigurationError, match="sampling: expected 'poisson' or 'fixed'"):
            plan_queries(2000, **terms, max_queries=3, width=3)
        with pytest.raises(ConfigurationError, match="sampling: expected 'poisson' or 'fixed'"):
            plan_generation({None: 2000}, **terms)
        with pytest.raises(ConfigurationError, match="rows: expected 'slots'"):
            RowDesign.choose(rows="units", sampling="partition")


def rows_of(right: float, labels: int = 3, *, correlation: float = 0.0, rival: float = 0.6) -> RowFacts:
    return RowFacts(right, correlation, 1.0 if labels == 2 else rival, labels)


def simulated(plan: LabellingPlan, facts: RowFacts) -> np.ndarray:
    """Shares of draws in which the right label, another one or nothing leaves: questions, units, votes, both noises."""
    generator = np.random.default_rng(11)
    release = plan.release
    if isinstance(release.sampler, PoissonUnits):
        rows = generator.binomial(plan.public_size, release.sampler.sampling_rate, size=DRAWS)
    else:
        rows = np.full(DRAWS, min(release.sampler.num_slots, plan.public_size))
    right, others = np.full(DRAWS, facts.right), facts.labels - 1
    if facts.correlation:
        strength = (1 - facts.correlation) / facts.correlation
        right = generator.beta(facts.right * strength, (1 - facts.right) * strength, size=DRAWS)
    total = (1 - facts.rival) / (facts.rival - 1 / others) if others > 1 else 1.0
    spread = generator.dirichlet(np.full(others, total / others), size=DRAWS)
    chances = np.hstack([right[:, None], (1 - right)[:, None] * spread])
    sums = generator.multinomial(rows, chances / chances.sum(axis=1, keepdims=True)).astype(float)
    noisy = sums + release.mechanism.noise_multiplier * release.sensitivity.l2 * generator.normal(size=sums.shape)
    if isinstance(release.mechanism, ConfidentGNMaxMechanism):
        test = release.mechanism.test_noise_multiplier * release.sensitivity.linf * generator.normal(size=DRAWS)
        passed = sums.max(axis=1) + test >= release.mechanism.threshold
    else:
        passed = noisy.max(axis=1) >= plan.threshold
    won = noisy.argmax(axis=1) == 0
    return np.array([(won & passed).mean(), (~won & passed).mean(), (~passed).mean()])


class TestSignal:
    @pytest.mark.parametrize("facts", [rows_of(0.6, 2), rows_of(0.45, 4), rows_of(0.7, 4, correlation=0.4)])
    @pytest.mark.parametrize(
        "plan",
        [
            priced(None, mechanism=confident("units", threshold=12, test=2, votes=3)),
            priced(
                None,
                mechanism=confident("units", threshold=60, test=8, votes=9),
                design=RowDesign.choose(num_slots=100),
            ),
            fixed(mechanism=confident(threshold=120, test=10, votes=20)),
            fixed(mechanism=confident(threshold=12, test=3, votes=2), design=DEALT),
            priced(threshold=13.0),
            priced(9.0, threshold=60.0, design=RowDesign.choose(num_slots=100)),
            priced(teachers="fixed", adjacency="replace_one", threshold=115.0),
        ],
        ids=["test, units", "test, many units", "test, fixed", "test, slots", "histogram", "many units", "fixed"],
    )
    def test_answers_and_rejections_match_a_simulation(self, plan: LabellingPlan, facts: RowFacts) -> None:
        """Within 6 standard errors of the simulation (false alarms below 1e-8) and a point of the planner's own."""
        shown = dataclasses.replace(plan, width=facts.labels).expected(facts)
        chances = [shown["right_label_prob"], shown["wrong_label_prob"], shown["abstain_prob"]]
        assert sum(chances) == pytest.approx(1.0)
        assert chances == pytest.approx(simulated(plan, facts), abs=0.01 + SIX_ERRORS)

    def test_a_threshold_far_below_rejects_nothing_and_one_far_above_everything(self) -> None:
        plain = priced().expected(rows_of(0.6))
        for low, high in ((priced(threshold=-90.0), priced(threshold=900.0)), self._confident()):
            assert low.expected(rows_of(0.6))["abstain_prob"] < 1e-6
            assert low.expected(rows_of(0.6))["right_label_prob"] == pytest.approx(plain["right_label_prob"], abs=1e-4)
            assert high.expected(rows_of(0.6))["abstain_prob"] > 1 - 1e-6

    def _confident(self) -> tuple[LabellingPlan, ...]:
        return tuple(priced(None, mechanism=confident("units", threshold=at, test=3, votes=2)) for at in (-90.0, 900.0))

    def test_a_partition_is_as_full_as_the_units_allow(self) -> None:
        design = RowDesign.choose(num_slots=10, shots_per_slot=4, sampling="partition")
        for units, shots in ((2000, 4.0), (40, 4.0), (25, 2.5)):
            shown = priced(teachers="fixed", adjacency="replace_one", design=design, public_size=units).expected(
                rows_of(0.6)
            )
            assert (shown["expected_rows"], shown["expected_shots"], shown["empty_slot_prob"]) == (10, shots, 0.0)

    def test_other_sums_have_no_right_label(self) -> None:
        with pytest.raises(ConfigurationError, match="aggregation: expected votes"):
            priced(aggregation=UnitVectorSum()).expected(rows_of(0.6))

    def test_a_constant_candidate_stands_for_too_few_votes_where_an_index_leaves(self) -> None:
        terms: dict[str, Any] = {"public_size": 2000}
        assert rejection(0.4, TWENTY, mechanism="gumbel", **terms) == {"constants": (8.0,), "threshold": None}
        assert rejection(0.4, TWENTY, mechanism="gaussian", **terms) == {"constants": (), "threshold": 8.0}
        assert rejection(None, TWENTY, mechanism=confident(), **terms) == {"constants": (), "threshold": None}
        with pytest.raises(ConfigurationError, match="abstain_below: expected None"):
            rejection(0.4, TWENTY, mechanism=confident(), **terms)
        with pytest.raises(ConfigurationError, match="abstain_below"):
            rejection(1.4, TWENTY, mechanism="gumbel", **terms)


class TestRightRowsNeeded:
    @pytest.mark.parametrize("mechanism", MECHANISMS)
    @pytest.mark.parametrize("chance", [0.5, 0.9])
    def test_it_is_the_least_percent_that_is_enough(self, mechanism: str, chance: float) -> None:
        plan = priced(mechanism=mechanism)
        found = plan.right_rows_needed(chance)
        assert found is not None
        assert found == round(found, 2)
        alike = RowGuess().facts(labels=3, shots=1)
        enough, less = (dataclasses.replace(alike, right=round(found - step, 2)) for step in (0.0, 0.01))
        assert plan.expected(enough)["right_label_prob"] >= chance
        assert plan.expected(less)["right_label_prob"] < chance

    def test_rows_that_are_alike_have_to_be_right_far_more_often(self) -> None:
        """Of rows on their own 46 % can do; the recorded rows of a real model need nine of ten."""
        plan = priced(1.0)
        alone, alike = (plan.right_rows_needed(source=rows_of(0.5, correlation=rho)) for rho in (0.0, 0.55))
        assert alone is not None
        assert alike is not None
        assert alone < 0.75
        assert alike > 0.85

    def test_noise_that_nothing_beats_has_none_and_weak_noise_needs_less(self) -> None:
        assert priced(100.0).right_rows_needed() is None
        assert priced(6.0).right_rows_needed() > priced(1.0).right_rows_needed()  # type: ignore[operator]

    @pytest.mark.parametrize("chance", [0.0, 1.5])
    def test_a_chance_that_is_none_is_refused(self, chance: float) -> None:
        with pytest.raises(ConfigurationError, match="chance"):
            priced().right_rows_needed(chance)


class TestCost:
    def test_calls_and_tokens_of_teachers_and_students_are_counted_from_public_caps(self) -> None:
        """20 rows of one record and one public row per input, and 50 student prompts of four labelled inputs."""
        plan = priced()
        cost = plan.cost(record_tokens=50, query_tokens=20, answer_tokens=3, student_calls=50, student_shots=4)
        assert (cost.private_calls, cost.public_calls) == (600, 30 + 50)
        assert cost.tokens_in == 600 * 70 + 30 * 20 + 50 * 220
        assert cost.tokens_out == 680 * 3
        assert plan.cost().public_calls == 30
        assert plan.cost(calls_per_row=3, public_rows=2).public_calls == 180

    def test_a_student_without_examples_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="student_shots"):
            priced().cost(student_shots=0)

    def test_every_way_of_drawing_calls_as_often(self) -> None:
        costs = {priced(teachers=teachers).cost() for teachers in ("fresh", "one_sample")}
        costs |= {
            priced(
                teachers="fixed", adjacency="replace_one", design=dataclasses.replace(DEALT, shots_per_slot=1)
            ).cost()
        }
        assert len(costs) == 1


ROWS = rows_of(0.62)
SHAPES = (RowDesign.choose(num_slots=20), RowDesign.choose(num_slots=60))


@pytest.fixture(scope="module")
def options() -> list[Any]:
    return propose_labelling(
        2000,
        epsilon=0.3,
        delta=1e-5,
        public_inputs=24,
        mechanisms=("gaussian", "gumbel"),
        labels=3,
        adjacency="replace_one",
        designs=SHAPES,
        source=ROWS,
    )


class TestProposals:
    def test_each_labels_as_many_halves_as_are_right_often_enough(self, options: list[Any]) -> None:
        assert {o.plan.max_queries for o in options} == {24, 12, 6}
        for o in options:
            plan = o.plan
            assert plan.max_queries in {24, 12, 6}
            assert o.is_enough == (o.right_label_prob >= 0.95)
            if not o.is_enough:
                assert plan.max_queries == 6
            elif plan.max_queries < 24:
                larger = next(n for n in (24, 12) if n // 2 == plan.max_queries)
                again = self._again(o, larger)
                assert again.expected(ROWS)["right_label_prob"] < 0.95

    def _again(self, option: Any, max_queries: int) -> LabellingPlan:
        plan = option.plan
        return plan_labelling(
            2000,
            epsilon=0.3,
            delta=1e-5,
            max_queries=max_queries,
            width=3,
            teachers=plan.teachers,
            adjacency="replace_one",
            mechanism=plan.release.mechanism.name,
            design=plan.design,
            is_rough=True,
        )

    def test_every_noise_is_paid_for(self, options: list[Any]) -> None:
        for o in options:
            fine = accounting.epsilon_upper_bound(o.plan.event(), delta=1e-5, adjacency="replace_one")
            assert 0.27 < fine <= o.plan.epsilon == 0.3

    def test_what_it_shows_is_what_the_plan_expects(self, options: list[Any]) -> None:
        for o in options:
            shown = o.plan.expected(ROWS)
            assert (o.right_label_prob, o.row_right) == (shown["right_label_prob"], shown["row_right"])
            assert o.ceiling_prob == pytest.approx(shown["ceiling_prob"], abs=0.01)
            assert o.private_calls == round(o.plan.max_queries * o.plan.expected_rows)
            assert json.loads(json.dumps(o.to_dict()))["teachers"] == o.plan.teachers

    def test_the_best_are_enough_for_most_inputs_with_fewest_calls(self, options: list[Any]) -> None:
        keys = [(not o.is_enough, -o.plan.max_queries, o.private_calls) for o in options if o.is_enough]
        assert keys == sorted(keys)
        assert [o.is_enough for o in options] == sorted((o.is_enough for o in options), reverse=True)
        assert options[0].plan.teachers == "fresh"

    def test_every_way_and_mechanism_is_compared(self, options: list[Any]) -> None:
        assert {o.plan.teachers for o in options} == set(TEACHERS)
        assert {o.plan.release.mechanism.name for o in options} == {"gaussian", "gumbel"}
        assert len(options) == 3 * (2 + 1)
        dealt = {o.plan.design for o in options if o.plan.teachers == "fixed"}
        assert {(d.sampling, d.num_slots) for d in dealt} == {("partition", 20), ("partition", 60)}

    def test_fixed_teachers_are_left_out_under_add_remove(self) -> None:
        terms = {"epsilon": 1.0, "delta": 1e-5, "public_inputs": 8, "labels": 2, "designs": SHAPES[:1]}
        found = propose_labelling(2000, **terms, mechanisms=("gaussian",))
        assert {o.plan.teachers for o in found} == {"fresh", "one_sample"}
        with pytest.raises(ConfigurationError, match="Fixed teachers need adjacency='replace_one'"):
            propose_labelling(2000, **terms, teachers=("fixed",))

    def test_a_given_number_of_inputs_is_kept_and_rejection_is_planned(self) -> None:
        terms = {"epsilon": 0.01, "delta": 1e-5, "public_inputs": 64, "labels": 2, "designs": SHAPES[:1]}
        found = propose_labelling(2000, **terms, max_queries=40, abstain_below=0.4, teachers=("fresh",))
        assert {o.plan.max_queries for o in found} == {40}
        assert {(o.plan.release.mechanism.name, o.plan.release.constants, o.plan.threshold) for o in found} == {
            ("gumbel", (8.0,), None),
            ("permute_and_flip", (8.0,), None),
            ("gaussian", (), 8.0),
        }
        assert not any(o.is_enough for o in found)

    def test_shapes_that_few_units_cannot_fill_are_left_out(self) -> None:
        found = propose_labelling(
            30, epsilon=5.0, delta=1e-4, public_inputs=2, labels=2, mechanisms=("gaussian",), teachers=("fresh",)
        )
        assert {(o.plan.design.num_slots, o.plan.design.shots_per_slot) for o in found} == {
            (20, 4),
            (30, 1),
            (10, 4),
            (30, 4),
            (20, 8),
        }

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            ({"labels": 1}, "labels"),
            ({"public_inputs": 0}, "public_inputs"),
            ({"max_queries": 9}, "max_queries"),
            ({"source": rows_of(0.5, 3)}, "labels: expected 3"),
            ({"chance": 0.0}, "chance"),
            ({"mechanisms": ()}, "mechanisms"),
            ({"mechanisms": ("laplace",)}, "mechanism"),
            ({"teachers": ()}, "teachers"),
            ({"teachers": ("old",)}, "teachers"),
            ({"abstain_below": 2.0}, "abstain_below"),
            ({"designs": (RowDesign.choose(num_slots=300),)}, "public_size"),
            ({"public_size": 0}, "public_size"),
        ],
    )
    def test_public_faults_are_refused(self, given: dict[str, Any], said: str) -> None:
        terms = {"public_size": 200, "epsilon": 1.0, "delta": 1e-5, "public_inputs": 8, "labels": 2, **given}
        with pytest.raises(ConfigurationError, match=said):
            propose_labelling(terms.pop("public_size"), **terms)  # type: ignore[arg-type]


def test_a_threshold_of_votes_is_for_as_many_teachers_as_it_was_chosen_for() -> None:
    """Otherwise the number of teachers would be the engine's, and a threshold could lie above all of them."""
    asked: dict[str, Any] = {"engine": None, "mechanism": None, "calibrate": False, "epsilon": 1.0}
    for rows in (Rows(shots=2), Rows(sampling="fixed"), Rows(), Rows(slots=30)):
        _, chosen = _teachers(rows, 900, is_confident=True, **asked)
        assert chosen.design.num_slots == (rows.slots or 40)
    assert _teachers(Rows(shots=2), 900, is_confident=False, **asked)[1].design.num_slots == 20
