"""Releases of words: what a unit casts by itself, how far it moves the sums, the law of threshold and noise."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy import accounting
from langchain_dpicl.privacy.accounting.events import ComposedEvent, FailureEvent, GaussianEvent
from langchain_dpicl.privacy.extensions.word_release import (
    WEIGHT_STEPS,
    PublicWords,
    ThresholdedGaussianMechanism,
    UnitPairs,
    UnitWords,
    WordRelease,
    denied_words,
    l2_sensitivity,
    least_threshold,
    may_leave,
    weight_of,
    word_release,
)
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM

ALARM = 1e-6
PUBLIC = PublicWords(("night", "card", "fee"), frozenset({"the", "and"}))
CANARY = "canaryword"
spoken = st.lists(
    st.sampled_from(["card", "Night", "velda", "GORGON", "fee", "the", "a", "7up", "\u00e9t\u00e9", "x" * 31]),
    max_size=12,
).map(" ".join)
units = st.lists(st.fixed_dictionaries({"text": spoken}), max_size=3).map(tuple)


def unit(*texts: str) -> tuple[dict[str, str], ...]:
    return tuple({"text": text} for text in texts)


def words(most: int = 3, denied: tuple[str, ...] = ()) -> UnitWords:
    return UnitWords("text", most, denied, PUBLIC.digest)


def released(
    rule: Any = None, *, noise: float = 1.0, threshold: float = 4.0, adjacency: Any = "add_remove"
) -> WordRelease:
    mechanism = ThresholdedGaussianMechanism(noise, threshold)
    return WordRelease(words() if rule is None else rule, mechanism, adjacency)


class TestTheWordsOfAUnit:
    def test_are_the_publicly_rarest_ones_ties_by_spelling(self) -> None:
        texts = unit("the night fee and card", "zorn velda gorgon velda velda")
        assert words(3).of(texts, PUBLIC) == ("gorgon", "velda", "zorn")
        assert words(4).of(texts, PUBLIC) == ("gorgon", "velda", "zorn", "fee")
        assert words(9).of(texts, PUBLIC)[-2:] == ("card", "night")

    def test_do_not_hang_on_order_case_or_how_often_they_are_written(self) -> None:
        one = words(2).of(unit("velda gorgon zorn night"), PUBLIC)
        assert one == words(2).of(unit("NIGHT zorn", "Gorgon, velda! velda velda"), PUBLIC) == ("gorgon", "velda")

    def test_are_no_numbers_no_stop_words_and_neither_short_nor_long_ones(self) -> None:
        texts = unit("the and a of 7up 1999 id5 ab abc " + "x" * 30 + " " + "x" * 31, "\x00 \ud800 \u202e")
        assert words(9).of(texts, PUBLIC) == ("abc", "x" * 30)
        assert words(9).of(unit(), PUBLIC) == words(9).of(({"other": "velda"},), PUBLIC) == ()

    def test_that_are_denied_take_no_place_from_others(self) -> None:
        assert words(1, ("Gorgon Smith",)).of(unit("gorgon velda"), PUBLIC) == ("velda",)
        assert words(1, ("Gorgon Smith",)).denied == ("gorgon", "smith")

    @settings(max_examples=60, deadline=None)
    @given(st.lists(units, max_size=4), units, units, st.integers(1, 5))
    def test_move_the_sums_by_no_more_than_the_sensitivity_and_no_other_unit(self, others, mine, another, most) -> None:
        release = released(words(most))
        without, one, two = (release.weights(data, PUBLIC) for data in (others, [*others, mine], [*others, another]))
        alone = release.weights([mine], PUBLIC)
        assert all(one[word] - without[word] == alone[word] for word in {*one, *alone})
        for left, right, limit in ((without, one, 1), (one, two, 2)):
            square = sum((left[word] - right[word]) ** 2 for word in {*left, *right})
            assert square <= limit * WEIGHT_STEPS**2

    @pytest.mark.parametrize("number", [1, 2, 3, 7, 8, 100, 1024])
    def test_weigh_1_together_in_squares_and_hardly_less(self, number: int) -> None:
        assert number * weight_of(number) ** 2 <= WEIGHT_STEPS**2 < number * (weight_of(number) + 1) ** 2

    def test_reach_the_sensitivities(self) -> None:
        release = released(words(4))
        one, other = (release.weights([unit(text)], PUBLIC) for text in ("aaa bbb ccc ddd", "eee fff ggg hhh"))
        assert sum(weight**2 for weight in one.values()) == WEIGHT_STEPS**2
        assert sum((one[word] - other[word]) ** 2 for word in {*one, *other}) == 2 * WEIGHT_STEPS**2
        assert (l2_sensitivity("add_remove"), l2_sensitivity("replace_one") ** 2 >= 2.0) == (1.0, True)

    def test_refuse_another_ranking_than_the_declared_one(self) -> None:
        other = PublicWords(("card", "night", "fee"), frozenset())
        with pytest.raises(ConfigurationError, match="public_words"):
            released().release([unit("velda")], other, rng=SYSTEM_RANDOM)

    @pytest.mark.parametrize(
        "wrong", [{"max_words": 0}, {"max_words": True}, {"max_words": 9999}, {"name": ""}, {"denied": "velda"}]
    )
    def test_refuse_public_faults(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(ConfigurationError):
            UnitWords(**{"name": "text", "max_words": 2, "denied": (), "public_words": "x", **wrong})


def test_records_passed_as_a_denylist_are_not_printed() -> None:
    for wrong in ([CANARY, "..."], [CANARY, 7], [CANARY, f"{CANARY}", ""]):
        with pytest.raises(ConfigurationError, match=r"deny.*at place") as caught:
            denied_words(wrong)  # type: ignore[arg-type]
        assert CANARY not in str(caught.value)
    with pytest.raises(ConfigurationError, match="at most 20000"):
        denied_words(f"w{place}" for place in range(20_001))


class TestThePairsOfAUnit:
    KNOWN = frozenset({"velda", "friend", "otter", "night"})

    def test_are_released_words_that_are_neighbours_without_the_others(self) -> None:
        rule = UnitPairs("text", 8)
        assert rule.of(unit("The friend of Velda is the otter."), self.KNOWN) == ("friend velda", "velda otter")
        assert rule.of(unit("otter", "friend"), self.KNOWN) == ()
        assert rule.of(unit("velda velda friend"), self.KNOWN) == ("velda friend",)

    def test_are_at_most_so_many_distinct_ones_the_first(self) -> None:
        texts = unit("velda otter velda otter friend")
        assert UnitPairs("text", 2).of(texts, self.KNOWN) == ("velda otter", "otter velda")
        assert released(UnitPairs("text", 1)).weights([texts], tuple(self.KNOWN)) == {"velda otter": WEIGHT_STEPS}

    def test_hold_nothing_that_was_not_released(self) -> None:
        assert UnitPairs("text", 9).of(unit(f"velda {CANARY} otter"), self.KNOWN) == ("velda otter",)


class TestTheThreshold:
    @pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
    @pytest.mark.parametrize(("noise", "most"), [(0.3, 8), (2.0, 1), (4.4, 8), (8.3, 32)])
    def test_lets_items_of_one_unit_through_as_often_as_is_charged_and_no_more(
        self, noise: float, most: int, adjacency: Any
    ) -> None:
        """The normal law of scipy is the second source, for every number of items."""
        threshold = least_threshold(noise, most, adjacency, 5e-7)
        charged = ThresholdedGaussianMechanism(noise, threshold).chance_alone(most, adjacency)
        scale = noise * (1.0 if adjacency == "add_remove" else math.sqrt(2.0))
        tails = [float(stats.norm.sf((threshold - 1 / math.sqrt(j)) / scale)) for j in range(1, most + 1)]
        chances = [1.0 - (1.0 - tail) ** (place + 1) for place, tail in enumerate(tails)]
        assert max(chances) <= charged <= 5e-7
        assert charged <= max(chances) * 1.01
        below = ThresholdedGaussianMechanism(noise, threshold - 2.0**-9).chance_alone(most, adjacency)
        assert below > 5e-7

    def test_is_the_worst_of_all_numbers_of_items(self) -> None:
        """At little noise one heavy item is the worst, at much noise it is many light ones."""
        for noise, worst in ((0.05, 1), (5.0, 8)):
            threshold = least_threshold(noise, 8, "add_remove", 1e-3)
            tails = {j: stats.norm.sf((threshold - 1 / math.sqrt(j)) / noise) for j in range(1, 9)}
            assert max(tails, key=lambda j: 1.0 - (1.0 - tails[j]) ** j) == worst

    def test_grows_with_the_noise_and_is_refused_where_it_leaves_the_range(self) -> None:
        assert least_threshold(9.0, 8, "add_remove", 1e-6) > least_threshold(3.0, 8, "add_remove", 1e-6)
        with pytest.raises(ConfigurationError, match="threshold"):
            least_threshold(1e9, 8, "add_remove", 1e-6)

    def test_that_anybody_passes_is_refused_or_priced_at_infinity(self) -> None:
        release = released(noise=1000.0, threshold=1.0)
        assert accounting.epsilon_upper_bound(release.event, delta=1e-6, adjacency="add_remove") == math.inf
        with pytest.raises(ConfigurationError, match="hardly ever"):
            _ = released(noise=0.01, threshold=0.5).event

    @pytest.mark.parametrize("threshold", [0.0, -1.0, 1.0001, math.nan, 2.0**21])
    def test_is_a_number_that_json_and_all_machines_hold(self, threshold: float) -> None:
        with pytest.raises(ConfigurationError):
            ThresholdedGaussianMechanism(1.0, threshold)


class TestARelease:
    def test_holds_common_words_and_no_word_of_few(self) -> None:
        data = [unit("velda gorgon")] * 40 + [unit(CANARY)]
        found = dict(released(threshold=10.0).release(data, PUBLIC, rng=SYSTEM_RANDOM))
        assert set(found) == {"velda", "gorgon"}
        assert all(abs(weight - 40 / math.sqrt(2)) < 8 for weight in found.values())

    def test_of_nothing_is_nothing(self) -> None:
        assert released().release([], PUBLIC, rng=SYSTEM_RANDOM) == ()
        assert released().release([unit(), unit("the 7")], PUBLIC, rng=SYSTEM_RANDOM) == ()

    def test_does_not_tell_in_which_order_records_came(self) -> None:
        data = [unit("velda gorgon")] * 40 + [unit("otter")] * 40
        for order in (data, data[::-1]):
            found = released().release(order, PUBLIC, rng=SYSTEM_RANDOM)
            assert list(found) == sorted(found, key=lambda pair: (-pair[1], pair[0]))

    @pytest.mark.parametrize(("adjacency", "moved"), [("add_remove", 1.0), ("replace_one", math.sqrt(2.0))])
    def test_has_normal_noise_at_the_l2_sensitivity(self, adjacency: Any, moved: float) -> None:
        """False alarm: 1e-6 each (Kolmogorov-Smirnov; the variance within 6 deviations of it)."""
        release = released(noise=3.0, threshold=1.0, adjacency=adjacency)
        weights = Counter({f"w{place}": 1000 * WEIGHT_STEPS for place in range(6000)})
        found = release.mechanism.release(weights, adjacency=adjacency, rng=SYSTEM_RANDOM)
        drawn = np.array([weight - 1000 for _, weight in found])
        assert drawn.size == 6000
        assert stats.kstest(drawn, stats.norm(0, 3.0 * moved).cdf).pvalue > ALARM
        assert abs(drawn.var() / (3.0 * moved) ** 2 - 1.0) < 6 * math.sqrt(2 / drawn.size)

    def test_costs_a_gaussian_and_a_failure(self) -> None:
        release = released(noise=2.5, threshold=20.0)
        assert release.event == ComposedEvent((GaussianEvent(2.5), FailureEvent(release.failure)))
        alone = accounting.epsilon_upper_bound(GaussianEvent(2.5), delta=1e-6 - release.failure, adjacency="add_remove")
        both = accounting.epsilon_upper_bound(release.event, delta=1e-6, adjacency="add_remove")
        assert both == pytest.approx(alone, rel=1e-6)
        assert release.implementation_delta <= 2.0**-89

    def test_finds_a_word_with_the_chance_that_is_said(self) -> None:
        threshold = least_threshold(2.0, 4, "add_remove", 1e-6)
        release = released(words(4), noise=2.0, threshold=threshold)
        data = [unit("aaa bbb ccc ddd")] * release.found_from(0.95)
        hits = sum(len(release.release(data, PUBLIC, rng=SYSTEM_RANDOM)) for _ in range(200))
        # At least 95 % of 800, and hardly more: both sides at 1e-6.
        assert 724 <= hits <= 800

    @pytest.mark.parametrize("rule", [words(2, ("smith",)), UnitPairs("text", 3)])
    def test_is_read_back_from_what_it_shows(self, rule: Any) -> None:
        release = released(rule, adjacency="replace_one", noise=5.0, threshold=37.5)
        shown = json.loads(json.dumps(release.to_dict()))
        assert word_release(shown) == release
        for changed in ({"scale": 1.0}, {"failure": 1e-9}, {"adjacency": "add_remove"}, {"l2_sensitivity": 1.0}):
            with pytest.raises(ConfigurationError):
                word_release({**shown, **changed})
        for part, changed in (("mechanism", {"threshold": 4.0}), ("rule", {"max_values": 1})):
            with pytest.raises(ConfigurationError):
                word_release({**shown, part: {**shown[part], **changed}})

    def test_takes_no_part_that_only_looks_like_one(self) -> None:
        class Loose:
            name, max_words, noise_multiplier, threshold = "text", 1, 1.0, 4.0

        for parts in ((Loose(), ThresholdedGaussianMechanism(1.0, 4.0)), (words(), Loose())):
            with pytest.raises(ConfigurationError, match="which a proof covers"):
                WordRelease(*parts, "add_remove")  # type: ignore[arg-type]


@pytest.mark.parametrize("epsilon", [0.2, 1.0, 2.0])
@pytest.mark.parametrize(("noise", "threshold"), [(0.7, 2.5), (1.5, 4.0)])
def test_the_law_of_a_known_and_a_new_word_keeps_what_its_event_is_priced_at(
    noise: float, threshold: float, epsilon: float
) -> None:
    """Hockey-stick divergence of the exact laws on a grid, both orders: one word that others hold, one that is new."""
    release = released(words(2), noise=noise, threshold=threshold)
    allowed = accounting.delta_upper_bound(release.event, epsilon=epsilon, adjacency="add_remove")
    step = 0.02
    edges = np.arange(threshold, threshold + 12 * noise + 6, step)

    def law(weight: float) -> np.ndarray:
        """Chances of "not released" and of each cell of released weights."""
        if weight == 0.0:
            return np.concatenate([[1.0], np.zeros(edges.size)])
        cells = stats.norm.sf(edges, weight, noise)
        return np.concatenate([[1.0 - cells[0]], cells - np.append(cells[1:], 0.0)])

    for known, (mine, new) in itertools.product((0.0, 1.0, threshold), ((1.0, 0.0), (0.5**0.5, 0.5**0.5), (0.0, 1.0))):
        if known == 0.0 and mine > 0:
            continue
        one = np.outer(law(known), law(0.0)).ravel()
        other = np.outer(law(known + mine), law(new)).ravel()
        for a, b in ((one, other), (other, one)):
            # Cells of a width of 0.02 lose nothing that is released, and show less than it does.
            assert np.maximum(a - math.exp(epsilon) * b, 0.0).sum() <= allowed + 1e-9


def test_a_word_is_letters_and_marks_on_them_and_nothing_else() -> None:
    texts = ("\u0bf0\u0bf1\u0bf2", "\u09f4\u09f5\u09f6\u09f7", "\u0301\u0302\u0303", "ab\u0bf0", "abc1", "ab")
    assert not any(map(may_leave, texts))
    assert all(map(may_leave, ("abc", "na\u00efve", "\u0dbd\u0d82\u0d9a\u0dcf\u0dc0")))
