"""Plans from public numbers: calibrated, monotone, and the same numbers as what will be charged."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.generation.plan import Segment, compare, plan_generation, release_plan
from langchain_dpicl.planning import share_plan as _cost
from langchain_dpicl.planning.expected_utility import RowDesign, agreement_of, occupancy, token_signal, votes
from langchain_dpicl.privacy.accounting import epsilon_upper_bound
from langchain_dpicl.privacy.accounting.events import GaussianEvent, RepeatedEvent, SubsampledEvent
from langchain_dpicl.privacy.extensions.fixed_size_slots import BalancedSlots
from langchain_dpicl.privacy.extensions.registry import MECHANISMS
from langchain_dpicl.privacy.mechanisms.release_plan import PoissonSlots, PoissonUnits

SIZES = {"a": 1000, "b": 4000}
TEXT = (Segment("text", 25),)


def test_the_calibrated_noise_costs_at_most_the_target_and_little_less() -> None:
    plan = plan_generation(SIZES, epsilon=1.0, delta=1e-5, segments=TEXT)
    assert 0.97 < plan.epsilon <= 1.0
    assert plan.epsilon == epsilon_upper_bound(
        plan.event(), delta=1e-5 - plan.implementation_delta, adjacency="add_remove"
    )


def test_labels_run_in_parallel_and_the_smallest_one_decides() -> None:
    noise = {"noise_multiplier": 1.0, "epsilon": None, "delta": 1e-5, "segments": TEXT}
    small = plan_generation({None: 1000}, **noise)
    both = plan_generation(SIZES, **noise)
    assert both.epsilon == pytest.approx(small.epsilon, rel=1e-6)


def test_a_unit_that_changes_label_pays_for_two_under_replace_one() -> None:
    noise = {"noise_multiplier": 1.0, "epsilon": None, "delta": 1e-5, "segments": TEXT, "adjacency": "replace_one"}
    single = plan_generation({None: 1000}, **noise)
    two = plan_generation({"a": 1000, "b": 1000}, **noise)
    assert two.epsilon > 1.2 * single.epsilon


def test_a_gaussian_slot_plan_prices_as_the_published_one_does() -> None:
    """Tang et al. 2023, TREC: sigma 1.36, q = 80/835, 15 tokens, delta 1/835 gives epsilon .95."""
    design = RowDesign.choose(rows="slots", num_slots=80, shots_per_slot=1, overfill=1.0)
    plan = plan_generation(
        {None: 835},
        epsilon=None,
        noise_multiplier=1.36,
        delta=1 / 835,
        mechanism="gaussian",
        design=design,
        segments=(Segment("text", 15),),
    )
    assert plan.epsilon == pytest.approx(0.9505, abs=0.005)
    event = RepeatedEvent(SubsampledEvent(GaussianEvent(1.36), 80 / 835), 15)
    assert plan.epsilon == pytest.approx(epsilon_upper_bound(event, delta=1 / 835, adjacency="add_remove"), rel=1e-6)


@pytest.mark.parametrize(("redraw", "expected"), [(1, 1.41), (5, 2.35), (10, 3.17), (25, 4.76), (100, 8.88)])
def test_a_longer_redraw_period_needs_the_noise_it_is_known_to_need(redraw: int, expected: float) -> None:
    """Gaussian, 4 x 100 tokens, q .0133, epsilon 1, delta 1e-6: reference values computed with another PLD script."""
    design = RowDesign.choose(rows="slots", num_slots=40, shots_per_slot=2, overfill=1.0)
    plan = plan_generation(
        {None: 6015},
        epsilon=1.0,
        delta=1e-6,
        mechanism="gaussian",
        design=design,
        redraw_every=redraw,
        shots_per_label=4,
        segments=(Segment("text", 100),),
    )
    assert plan.noise_multiplier == pytest.approx(expected, rel=0.005)


def test_tickets_are_the_blocks_that_will_run() -> None:
    plan = plan_generation(
        {None: 1000}, epsilon=None, noise_multiplier=2.0, delta=1e-5, redraw_every=10, shots_per_label=3, segments=TEXT
    )
    counts = {ticket.template: ticket.max_count for ticket in plan.tickets()}
    assert sorted(counts.values()) == [3, 6]
    assert not any(ticket.refundable for ticket in plan.tickets())


def test_cost_counts_calls_from_public_caps() -> None:
    plan = plan_generation(
        {"a": 1000, "b": 1000}, epsilon=None, noise_multiplier=2.0, delta=1e-5, shots_per_label=2, segments=TEXT
    )
    cost = plan.cost(record_tokens=50, instruction_tokens=10)
    assert cost.private_calls == 2 * 2 * 25 * 40
    assert cost.public_calls == 100
    assert cost.tokens_out == cost.private_calls + cost.public_calls
    assert cost.money(price_in=1.0, price_out=0.0) == pytest.approx(cost.tokens_in / 1e6)


@pytest.mark.parametrize(
    "given",
    [
        {"rows": "units", "shots_per_slot": 2},
        {"rows": "nope"},
        {"num_slots": 0},
        {"sampling": "shuffle"},
        {"overfill": float("inf")},
        {"rows": "units", "sampling": "fixed"},
    ],
)
def test_impossible_designs_are_refused(given: dict) -> None:
    with pytest.raises(ConfigurationError):
        RowDesign.choose(**given)


def test_the_design_chooses_its_sampler() -> None:
    assert isinstance(RowDesign.choose().sampler(1000), PoissonUnits)
    assert isinstance(RowDesign.choose(shots_per_slot=2).sampler(1000), PoissonSlots)
    assert isinstance(RowDesign.choose(sampling="fixed").sampler(1000), BalancedSlots)
    assert RowDesign.choose(num_slots=40, shots_per_slot=4).sampler(1000).sampling_rate == pytest.approx(0.16)
    assert RowDesign.choose(num_slots=40, shots_per_slot=2).sampler(1000).sampling_rate == pytest.approx(0.12)
    with pytest.raises(ConfigurationError, match="public_size"):
        RowDesign.choose(num_slots=100).sampler(99)


def test_a_fixed_sample_is_offered_only_where_it_is_proved() -> None:
    fixed = RowDesign.choose(sampling="fixed")
    assert (
        plan_generation(
            {None: 1000}, epsilon=2.0, delta=1e-5, design=fixed, adjacency="replace_one", segments=TEXT
        ).epsilon
        <= 2.0
    )
    for sizes, adjacency in (({None: 1000}, "add_remove"), (SIZES, "replace_one")):
        with pytest.raises(ConfigurationError, match="sampling"):
            plan_generation(sizes, epsilon=2.0, delta=1e-5, design=fixed, adjacency=adjacency, segments=TEXT)


class TestSignal:
    def test_occupancy_of_slots_matches_simulation(self) -> None:
        """Poisson(4) fills 3.2 of 4 shots and leaves 2 % empty; one expected unit leaves 37 %."""
        plan = release_plan(PoissonSlots(sampling_rate=0.16, num_slots=40, shots_per_slot=4))
        fill = occupancy(plan, 1000)
        assert fill.shots == pytest.approx(3.22, abs=0.03)
        assert fill.empty == pytest.approx(0.018, abs=0.002)
        one = occupancy(release_plan(PoissonSlots(sampling_rate=0.04, num_slots=40, shots_per_slot=1)), 1000)
        assert one.empty == pytest.approx(np.exp(-1), abs=0.005)

    @pytest.mark.parametrize("mechanism", MECHANISMS)
    def test_the_chance_of_the_right_index_matches_simulation(self, mechanism: str) -> None:
        """20,000 draws: the closed form lies within 6 standard errors (false alarms below 1e-8)."""
        plan = release_plan(PoissonUnits(sampling_rate=0.1), mechanism=mechanism, noise_multiplier=4.0)
        chance = token_signal(plan, rows=40, agreement=0.5, candidates=50)["right_token_prob"]
        generator = np.random.default_rng(0)
        draw = {"gumbel": stats.gumbel_r, "gaussian": stats.norm, "permute_and_flip": stats.expon}[mechanism]
        noise = draw.rvs(size=(20_000, 50), random_state=generator) * 4.0
        seen = ((votes(40, 0.5, 50) + noise).argmax(axis=1) == 0).mean()
        assert chance == pytest.approx(seen, abs=6 * np.sqrt(0.25 / 20_000))

    def test_the_reference_comparison_of_shapes(self) -> None:
        """More rows of fewer shots: 10 x 4 at 80 % agreement against 40 x 1 at 70 %."""
        few = release_plan(PoissonSlots(sampling_rate=0.1, num_slots=10, shots_per_slot=4), noise_multiplier=1.0)
        many = release_plan(PoissonSlots(sampling_rate=0.1, num_slots=40, shots_per_slot=1), noise_multiplier=1.0)
        right_few = token_signal(few, rows=10, agreement=0.8, candidates=2)["right_token_prob"]
        right_many = token_signal(many, rows=40, agreement=0.7, candidates=2)["right_token_prob"]
        assert right_many > right_few


def test_the_comparison_keeps_records_and_epsilon_and_puts_the_best_first() -> None:
    options = compare(
        {None: 5000},
        epsilon=1.0,
        delta=1e-5,
        base=RowDesign.choose(shots_per_slot=2, num_slots=20),
        segments=[Segment("text", 20)],
    )
    chances = [round(option.right_token_prob, 3) for option in options]
    assert chances == sorted(chances, reverse=True)
    assert len({option.plan.release.mechanism.name for option in options}) == 3
    assert {option.plan.design.num_slots * option.plan.design.shots_per_slot for option in options} == {40}
    assert all(option.plan.epsilon <= 1.0 for option in options)
    assert options[0].plan.release.redraw_every == 1


def test_guessed_agreement_grows_with_shots_and_stays_below_one() -> None:
    assert agreement_of(1, one_shot=0.7) == 0.7
    assert agreement_of(4, one_shot=0.7) == pytest.approx(0.8)
    assert agreement_of(1e9, one_shot=0.9) == 0.99


@pytest.mark.parametrize(("mechanism", "noise"), [("gaussian", 1e-6), ("gaussian", 1e-9)])
def test_noise_too_small_to_be_priced_is_refused_as_such(mechanism: str, noise: float) -> None:
    with pytest.raises(ConfigurationError, match=r"noise_multiplier: .*finite epsilon, found 1e-0\d\. Raise it"):
        plan_generation(SIZES, epsilon=None, noise_multiplier=noise, mechanism=mechanism, delta=1e-5, segments=TEXT)


class TestOneDealForAWholeRun:
    terms = {"epsilon": None, "noise_multiplier": 1.0, "delta": 1e-5, "shots_per_label": 3}  # noqa: RUF012

    def test_refuses_a_redraw_period_that_it_would_not_follow(self) -> None:
        design = RowDesign.choose(sampling="disjoint")
        fields = (Segment("label", 5), Segment("text", 25))
        for period in (1, 5, 24):
            with pytest.raises(ConfigurationError, match=r"redraw_every: expected None .*max_tokens=25.* found"):
                plan_generation(SIZES, design=design, segments=fields, redraw_every=period, **self.terms)
        plans = [
            plan_generation(SIZES, design=design, segments=fields, redraw_every=period, **self.terms)
            for period in (None, 25)
        ]
        assert plans[0] == plans[1]
        assert plans[0].release.redraw_every == 25

    def test_is_compared_with_others_from_any_start(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_cost.accounting, "calibrate", lambda *_, **__: 1.0)  # prices do not matter here
        monkeypatch.setattr(_cost.accounting, "epsilon_upper_bound", lambda *_, **__: 1.0)
        given = {"epsilon": 4.0, "delta": 1e-5, "shots_per_label": 3, "segments": [Segment("text", 25)]}
        options = compare({None: 4000}, base=RowDesign.choose(sampling="disjoint"), **given)
        dealt = [option for option in options if option.plan.design.sampling == "disjoint"]
        assert {option.plan.release.redraw_every for option in dealt} == {25}
        assert len(dealt) < len(options)
        with pytest.raises(ConfigurationError, match="redraw_every"):
            compare({None: 4000}, base=RowDesign.choose(sampling="disjoint"), redraw_every=3, **given)

    def test_without_one_a_fresh_sample_is_drawn_for_every_token(self) -> None:
        assert plan_generation(SIZES, **self.terms).release.redraw_every == 1
