"""Counts of values: what a unit moves, what the noise is, what the threshold lets through, and what all of it costs."""

from __future__ import annotations

import itertools
import math
import sys
import unicodedata
from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from langchain_dpicl.discovery import plan_discovery
from langchain_dpicl.exceptions import ConfigurationError, UnknownEventError
from langchain_dpicl.privacy import accounting
from langchain_dpicl.privacy._validate import in_unicode_14
from langchain_dpicl.privacy.accounting.events import (
    ComposedEvent,
    FailureEvent,
    GaussianEvent,
    ParallelEvent,
    PureEvent,
    RepeatedEvent,
    SubsampledEvent,
    event_from_dict,
    event_to_dict,
)
from langchain_dpicl.privacy.extensions.random_allocation import AllocatedEvent
from langchain_dpicl.privacy.extensions.redeclared import normalized
from langchain_dpicl.privacy.extensions.value_counts import (
    UNITS,
    CountPlan,
    DiscreteLaplaceMechanism,
    UnitValues,
    count_release,
    noise_margin,
    round_up_to_7_digits,
    tail_bound,
    words_of,
)
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM

ALARM = 1e-6
texts = st.text(st.sampled_from("aAbB\t \u00a0é\u0301ß\u200b9"), max_size=4)
units = st.lists(st.fixed_dictionaries({"field": texts}), max_size=6).map(tuple)


rules = st.builds(UnitValues, st.just("field"), st.integers(1, 3), st.sampled_from([None, ("a", "b é")]), st.booleans())


def unit(*values: str) -> tuple[dict[str, str], ...]:
    return tuple({"field": value} for value in values)


def counts_of(data: Any, rule: UnitValues) -> Counter[str]:
    found: Counter[str] = Counter()
    for records in data:
        found.update(rule.of(records))
    return found


def moved(one: Counter[str], other: Counter[str]) -> list[int]:
    return [abs(one[value] - other[value]) for value in {*one, *other}]


class TestTheRuleOfAUnit:
    @settings(max_examples=60, deadline=None)
    @given(st.lists(units, max_size=4), units, units, rules)
    def test_moves_the_counts_by_no_more_than_its_sensitivity(self, others, mine, another, rule):
        without, with_me = counts_of(others, rule), counts_of([*others, mine], rule)
        replaced = counts_of([*others, another], rule)
        assert sum(moved(without, with_me)) <= rule.l1_sensitivity("add_remove")
        assert max(moved(without, with_me), default=0) <= 1
        assert sum(moved(with_me, replaced)) <= rule.l1_sensitivity("replace_one")

    def test_reaches_its_sensitivity(self):
        rule = UnitValues("field", 2)
        one, other = counts_of([unit("a", "b", "c")], rule), counts_of([unit("d", "e")], rule)
        assert sum(moved(one, Counter())) == rule.l1_sensitivity("add_remove") == 2
        assert sum(moved(one, other)) == rule.l1_sensitivity("replace_one") == 4

    def test_takes_the_most_frequent_values_and_of_equals_the_first(self):
        assert UnitValues("field", 2).of(unit("c", "a", "b", "b", "d")) == ("b", "c")
        assert UnitValues("field").of(unit("z", "y")) == ("z",)

    def test_compares_values_in_one_public_form(self):
        spellings = ("Christopher Nolan", " christopher\tNOLAN ", "CHRISTOPHER\u2003nolan\x00", "Ｃhristopher nolan")
        assert {normalized(text) for text in spellings} == {"christopher nolan"}
        assert UnitValues("field").of(unit(*spellings)) == ("christopher nolan",)
        assert normalized("Nolan", fold_case=False) == "Nolan"
        assert normalized("STRASSE") == normalized("Straße")
        assert normalized("e\u0301") == normalized("é")
        assert len(normalized("long " * 100)) <= 200

    @settings(max_examples=40, deadline=None)
    @given(st.text(max_size=20), st.booleans())
    def test_has_a_form_that_is_its_own_form_and_can_be_a_name(self, text, fold):
        form = normalized(text, fold_case=fold)
        assert normalized(form, fold_case=fold) == form
        assert form.isprintable()

    def test_compares_alike_in_every_version_of_unicode(self):
        """What is new in Unicode 15, 15.1 and 16: an emoji, letters that are composed or folded, an ideograph."""
        for new in ("\U0001fae8", "\U0001e030", "\U00010d50", "\U00010d70", "\ua7cb", "\U0002ebf0", "\U0001ccf0"):
            assert normalized(f"Billing{new}") == normalized(f"{new}Billing", fold_case=True) == "billing"
            assert words_of(f"My{new}Card") == ["my", "card"]
            assert UnitValues("field", 1, ("Billing", "Login")).of(unit(f"Billing{new}", "Login", "Billing")) == (
                "Billing",
            )

    @pytest.mark.skipif(unicodedata.unidata_version != "14.0.0", reason="this Python has another version of Unicode")
    def test_leaves_out_exactly_what_unicode_14_lacks(self):
        # Planes that are empty, or all of private use, have the same in between.
        between = {number for number in range(0x40000, sys.maxunicode + 1) if 0xFF < number % 0x10000 < 0xFFF0}
        tags = range(0xE0000, 0xE1000)
        letters = [
            chr(number)
            for number in range(sys.maxunicode + 1)
            if number not in between or number in tags or number % 97 == 0
        ]
        known = "".join(" " if unicodedata.category(one) == "Cn" else one for one in letters)
        assert in_unicode_14("".join(letters)) == known

    def test_counts_nothing_for_what_is_not_declared_or_shows_nothing(self):
        declared = UnitValues("field", 3, ("Login", "Card"))
        assert declared.of(unit("login", "LOGIN", "other", "card")) == ("Login", "Card")
        assert UnitValues("field").of(unit("", " \t", "\u200b")) == ()
        assert UnitValues("field").of(({"another": "x"},)) == ()

    def test_counts_units_that_have_a_record_where_no_field_is_given(self):
        assert UnitValues(None).of(unit("a", "b")) == (UNITS,)
        assert UnitValues(None).of(()) == ()

    @pytest.mark.parametrize(
        "wrong",
        [
            {"max_values": 0},
            {"name": ""},
            {"declared": ()},
            {"declared": ("a", "A")},
            {"declared": ("a", "\n")},
            {"fold_case": 1},
            {"name": None, "max_values": 2},
            {"name": None, "declared": ("a",)},
        ],
    )
    def test_refuses_public_faults(self, wrong):
        with pytest.raises(ConfigurationError):
            UnitValues(**{"name": "field", **wrong})


class TestTheNoise:
    def test_is_a_discrete_laplace_law_of_its_own_scale(self):
        mechanism = DiscreteLaplaceMechanism(0.8)
        scale = float(mechanism.scale(2))
        assert 1.6 <= scale <= 1.6 + 2.0**-19
        runs = 4_000
        drawn = [
            mechanism.release({"a": 7}, declared=("a",), l1_sensitivity=2, rng=SYSTEM_RANDOM)[0][1] - 7
            for _ in range(runs)
        ]
        law = stats.dlaplace(1.0 / scale)
        edges = np.arange(-5, 6)
        wanted = [law.cdf(-6), *law.pmf(edges), law.sf(5)]
        found = [
            sum(z < -5 for z in drawn),
            *(sum(z == edge for z in drawn) for edge in edges),
            sum(z > 5 for z in drawn),
        ]
        assert stats.chisquare(found, runs * np.array(wanted)).pvalue > ALARM / 2
        pairs = list(zip(drawn[::2], drawn[1::2], strict=True))
        assert stats.spearmanr(*zip(*pairs, strict=True)).pvalue > ALARM / 2

    @settings(max_examples=40, deadline=None)
    @given(st.floats(1e-3, 1e6), st.integers(1, 20))
    def test_is_never_of_a_smaller_scale_than_charged(self, noise, sensitivity):
        scale = DiscreteLaplaceMechanism(noise).scale(sensitivity)
        assert scale * Fraction(1.0 / noise) >= sensitivity
        assert scale <= Fraction(noise) * sensitivity * (1 + Fraction(1, 2**49)) + Fraction(1, 2**20)

    @pytest.mark.parametrize("scale", [0.3, 1.0, 2.7, 40.0])
    @pytest.mark.parametrize("least", [0, 1, 14, 200])
    def test_has_the_tail_of_the_law_rounded_up(self, scale, least):
        exact = Fraction(scale)
        # scipy's own survival function is a difference, which has no digits out there.
        true = stats.dlaplace(1.0 / scale).pmf(least) / -math.expm1(-1.0 / scale)
        assert true * (1 - 1e-9) <= tail_bound(exact, least) <= max(true * (1 + 1e-5), 2e-200)

    def test_rounds_up_at_seven_digits_on_every_machine(self):
        assert round_up_to_7_digits(0.12345671) == 0.1234568
        assert round_up_to_7_digits(0.0) == 1e-200
        assert round_up_to_7_digits(1e-7) == 1e-7

    @pytest.mark.parametrize("confidence", [0.5, 0.95, 0.999])
    def test_has_the_least_margin_of_a_confidence(self, confidence):
        law = stats.dlaplace(1.0 / 2.5)
        margin = noise_margin(Fraction(5, 2), confidence)
        assert law.sf(margin) <= 1 - confidence
        assert margin == 0 or law.sf(margin - 1) > 1 - confidence


def released(plan: CountPlan, data: Any) -> tuple[tuple[str, int], ...]:
    return plan.release(data, rng=SYSTEM_RANDOM)


class TestTheThreshold:
    def test_lets_the_value_of_one_unit_through_as_often_as_is_charged_and_no_more(self):
        plan = CountPlan(UnitValues("field"), DiscreteLaplaceMechanism(1.0, 3), "add_remove")
        chance = plan.mechanism.chance_alone(1)
        runs = 2_000
        passed = sum(bool(released(plan, [unit("mine")])) for _ in range(runs))
        assert stats.binomtest(passed, runs, chance).pvalue > ALARM
        assert ComposedEvent((PureEvent(1.0), FailureEvent(chance))) == plan.event

    def test_releases_nothing_that_nobody_holds(self):
        plan = CountPlan(UnitValues("field"), DiscreteLaplaceMechanism(50.0, 2), "add_remove")
        assert all(dict(released(plan, [unit("a")])).keys() <= {"a"} for _ in range(200))
        assert released(plan, []) == ()

    def test_releases_what_many_hold_with_its_noisy_count_and_the_largest_first(self):
        plan = CountPlan(UnitValues("field"), DiscreteLaplaceMechanism(0.1, 4), "add_remove")
        data = [unit("few")] * 2 + [unit("some")] * 40 + [unit("many")] * 90
        assert released(plan, data) == (("many", 90), ("some", 40))

    def test_does_not_tell_in_which_order_records_came(self):
        plan = CountPlan(UnitValues("field"), DiscreteLaplaceMechanism(0.001, 2), "add_remove")
        data = [unit(name) for name in "bca" for _ in range(9)]
        assert {released(plan, list(order)) for order in (data, data[::-1])} == {(("a", 9), ("b", 9), ("c", 9))}

    @pytest.mark.parametrize("most", [1, 3])
    @pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
    def test_is_the_least_whose_failures_fit_into_delta(self, most, adjacency):
        plan = plan_discovery("field", epsilon=1.0, delta=1e-6, max_values=most, adjacency=adjacency)
        scale = 1.0 / float(plan.release.scale)
        alone = stats.dlaplace(scale).sf(plan.threshold - 2)
        assert alone * most <= plan.threshold_delta <= 0.99e-6
        assert stats.dlaplace(scale).sf(plan.threshold - 3) * most > 0.98e-6
        assert plan.epsilon <= 1.0
        assert accounting.epsilon_upper_bound(plan.release.event, delta=1e-6, adjacency=adjacency) == plan.epsilon

    def test_is_needed_for_unknown_values_and_refused_for_declared_ones(self):
        for rule, threshold in (
            (UnitValues("field"), None),
            (UnitValues("field", 1, ("a",)), 9),
            (UnitValues(None), 9),
        ):
            with pytest.raises(ConfigurationError, match="threshold"):
                CountPlan(rule, DiscreteLaplaceMechanism(1.0, threshold), "add_remove")
        with pytest.raises(ConfigurationError, match="hardly ever"):
            CountPlan(UnitValues("field", 9), DiscreteLaplaceMechanism(1.0, 2), "add_remove")
        with pytest.raises(ConfigurationError):
            DiscreteLaplaceMechanism(1.0, 1)


def chances(counts: dict[str, int], plan: CountPlan, reach: int = 24) -> dict[tuple[Any, ...], float]:
    """Returns the law of a release of at most two values, written from the definitions; None: not released."""
    law = stats.dlaplace(1.0 / float(plan.scale))
    least = plan.mechanism.threshold
    parts = []
    for value in ("known", "mine"):
        count = counts.get(value, 0)
        if count == 0:
            parts.append({None: 1.0})
            continue
        shown = {count + z: float(law.pmf(z)) for z in range(-reach, reach + 1) if count + z >= least}
        parts.append({None: 1.0 - math.fsum(shown.values()), **shown})
    return {pair: parts[0][pair[0]] * parts[1][pair[1]] for pair in itertools.product(*parts)}


@pytest.mark.parametrize(("threshold", "noise", "epsilon"), [(3, 0.7, 1.0), (6, 1.3, 1.1), (9, 1.0, 1.6)])
def test_the_whole_law_of_a_discovery_keeps_what_its_event_is_priced_at(threshold, noise, epsilon):
    """Hockey-stick divergence of the exact laws, both orders, over what a unit does to a known and a new value."""
    plan = CountPlan(UnitValues("field", 2), DiscreteLaplaceMechanism(noise, threshold), "add_remove")
    allowed = accounting.delta_upper_bound(plan.event, epsilon=epsilon, adjacency="add_remove")
    worst = 0.0
    for known in (1, threshold - 1, threshold, threshold + 4):
        for without, with_me in (
            ({"known": known}, {"known": known + 1, "mine": 1}),
            ({"known": known}, {"known": known, "mine": 1}),
            ({}, {"known": 1, "mine": 1}),
        ):
            one, other = chances(without, plan), chances(with_me, plan)
            for a, b in ((one, other), (other, one)):
                lost = math.fsum(max(a.get(pair, 0.0) - math.exp(epsilon) * b.get(pair, 0.0), 0.0) for pair in a)
                worst = max(worst, lost)
                assert lost <= allowed + 1e-12
    # Two new values are what the failure is charged for: 1 - (1 - p)^2 is nearly reached.
    failure = plan.event.events[1].delta
    assert worst >= failure - failure**2


class TestThePrice:
    def test_of_declared_counts_is_the_one_of_a_second_accountant(self):
        plan = CountPlan(UnitValues("field", 2, ("a", "b")), DiscreteLaplaceMechanism(0.9), "add_remove")
        theirs = privacy_loss_distribution.from_discrete_laplace_mechanism(
            1.0 / float(plan.scale), 2, value_discretization_interval=1e-5
        ).get_epsilon_for_delta(1e-6)
        ours = accounting.epsilon_upper_bound(plan.event, delta=1e-6, adjacency="add_remove")
        assert theirs - 2e-5 <= ours <= 1.0 / 0.9
        assert ours == pytest.approx(theirs, abs=1e-4)

    @pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
    def test_of_failures_comes_out_of_delta(self, adjacency):
        both = ComposedEvent((GaussianEvent(3.0), RepeatedEvent(FailureEvent(1e-7), 4)))
        alone = accounting.epsilon_bound(GaussianEvent(3.0), delta=6e-7, adjacency=adjacency)
        together = accounting.epsilon_bound(both, delta=1e-6, adjacency=adjacency)
        assert together.epsilon == pytest.approx(alone.epsilon, rel=1e-6)
        assert together.epsilon >= alone.epsilon
        assert [opinion.name for opinion in together.opinions] == [opinion.name for opinion in alone.opinions] != []
        assert accounting.delta_upper_bound(both, epsilon=0.5, adjacency=adjacency) == pytest.approx(
            accounting.delta_upper_bound(GaussianEvent(3.0), epsilon=0.5, adjacency=adjacency) + 4e-7, rel=1e-6
        )

    def test_is_infinite_where_failures_reach_delta(self):
        event = ComposedEvent((PureEvent(1.0), FailureEvent(1e-6)))
        for delta in (1e-7, 1e-6):
            assert accounting.epsilon_bound(event, delta=delta, adjacency="add_remove").epsilon == math.inf
        assert accounting.epsilon_bound(event, delta=1.1e-6, adjacency="add_remove").epsilon <= 1.0
        assert accounting.epsilon_bound(FailureEvent(1e-7), delta=1e-6, adjacency="add_remove").epsilon == 0.0
        assert accounting.delta_upper_bound(FailureEvent(0.25), epsilon=0.0, adjacency="add_remove") == 0.25

    def test_of_split_data_is_that_of_the_label_with_the_largest_failure(self):
        split = ParallelEvent("d", (("a", FailureEvent(4e-7)), ("b", FailureEvent(2e-7))))
        event = ComposedEvent((GaussianEvent(3.0), split))
        for adjacency, left in (("add_remove", 6e-7), ("replace_one", 4e-7)):
            alone = accounting.epsilon_upper_bound(GaussianEvent(3.0), delta=left, adjacency=adjacency)
            assert accounting.epsilon_upper_bound(event, delta=1e-6, adjacency=adjacency) == pytest.approx(
                alone, rel=1e-6
            )

    @pytest.mark.parametrize(
        "inside",
        [
            SubsampledEvent(FailureEvent(1e-7), 0.5),
            SubsampledEvent(ComposedEvent((GaussianEvent(1.0), FailureEvent(1e-7))), 0.5),
            AllocatedEvent(FailureEvent(1e-7), 4, 0.5),
        ],
    )
    def test_is_refused_for_failures_on_a_secret_sample(self, inside):
        with pytest.raises(UnknownEventError, match="outside of secret samples"):
            accounting.epsilon_upper_bound(inside, delta=1e-6, adjacency="add_remove")

    @pytest.mark.parametrize("delta", [0, 0.0, 1.0, -1e-9, math.nan, True, "x"])
    def test_is_refused_for_a_failure_without_a_chance(self, delta):
        with pytest.raises(UnknownEventError):
            FailureEvent(delta)
        assert event_from_dict(event_to_dict(FailureEvent(1e-9))) == FailureEvent(1e-9)


class TestAPlan:
    @pytest.mark.parametrize(
        ("rule", "threshold"),
        [(UnitValues("field", 2), 90), (UnitValues("f", 1, ("A", "b")), None), (UnitValues(None), None)],
    )
    def test_is_read_back_from_what_it_shows(self, rule, threshold):
        plan = CountPlan(rule, DiscreteLaplaceMechanism(2.0, threshold), "replace_one")
        assert count_release(plan.to_dict()) == plan
        for change in (
            {"scale": 1.0},
            {"l1_sensitivity": 1},
            {"adjacency": "add_remove"},
            {"mechanism": {"name": "x"}},
        ):
            with pytest.raises((ConfigurationError, LookupError)):
                count_release({**plan.to_dict(), **change})

    def test_takes_proved_parts_only(self):
        class Loose:
            threshold = None

        with pytest.raises(ConfigurationError, match="UnitValues"):
            CountPlan(Loose(), DiscreteLaplaceMechanism(1.0), "add_remove")
        with pytest.raises(ConfigurationError, match="DiscreteLaplaceMechanism"):
            CountPlan(UnitValues(None), Loose(), "add_remove")
        with pytest.raises(TypeError, match="closed"):
            type("Mine", (UnitValues,), {})

    def test_has_noise_that_a_count_can_hold(self):
        with pytest.raises(ConfigurationError, match="scale"):
            plan_discovery("field", values=("a",), max_values=2_000, epsilon=None, delta=1e-6, noise_multiplier=1e9)

    def test_says_what_it_can_find(self):
        plan = plan_discovery("field", epsilon=1.0, delta=1e-6)
        law = stats.dlaplace(1.0 / float(plan.release.scale))
        least = plan.found_from(0.95)
        assert law.sf(plan.threshold - least - 1) >= 0.95 > law.sf(plan.threshold - least)
        assert plan.deviation == pytest.approx(law.std())
        assert plan_discovery(None, epsilon=1.0, delta=1e-6).found_from() is None

    def test_refuses_what_costs_more_or_is_not_told(self):
        with pytest.raises(ConfigurationError, match="noise_multiplier"):
            plan_discovery("field", epsilon=0.5, delta=1e-6, noise_multiplier=1.0)
        with pytest.raises(ConfigurationError, match="epsilon"):
            plan_discovery("field", epsilon=None, delta=1e-6)
        given = plan_discovery("field", epsilon=None, delta=1e-6, noise_multiplier=2.0)
        assert given.epsilon == pytest.approx(0.5, rel=1e-4)
