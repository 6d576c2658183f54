"""Keyword histograms: what a unit adds to them, what the noise is, and which topic a unit has by itself alone."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy import accounting
from langchain_dpicl.privacy.accounting.events import GaussianEvent
from langchain_dpicl.privacy.extensions.value_counts import (
    MOST_KEYWORDS,
    CountPlan,
    DiscreteLaplaceMechanism,
    GaussianCountMechanism,
    TopicSplit,
    UnitKeywords,
    UnitValues,
    count_release,
    words_of,
)
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM, SecureRandom
from langchain_dpicl.privacy.mechanisms.release_plan import GaussianMechanism

ALARM = 1e-6
VOCABULARY = ("card", "credit card", "transfer", "stra\u00dfe", "fee")
spoken = st.lists(
    st.sampled_from(["card", "Credit", "CARD", "transfer,", "strasse", "fee", "a", "", "\u00e9"]), max_size=9
).map(" ".join)
units = st.lists(st.fixed_dictionaries({"text": spoken}), max_size=4).map(tuple)
rules = st.builds(UnitKeywords, st.just("text"), st.integers(1, 6), st.just(VOCABULARY))


def unit(*texts: str) -> tuple[dict[str, str], ...]:
    return tuple({"text": text} for text in texts)


def vector_of(data: Any, rule: UnitKeywords) -> np.ndarray:
    found: Counter[str] = Counter()
    for records in data:
        found.update(rule.of(records))
    return np.array([found[keyword] for keyword in rule.declared])


def histogram(keywords: int = 2, noise: float = 3.0, adjacency: Any = "add_remove") -> CountPlan:
    return CountPlan(UnitKeywords("text", keywords, VOCABULARY), GaussianCountMechanism(noise), adjacency)


class TestTheKeywordsOfAUnit:
    @settings(max_examples=80, deadline=None)
    @given(st.lists(units, max_size=4), units, units, rules)
    def test_move_the_counts_by_no_more_than_their_sensitivities(self, others, mine, another, rule):
        without, with_me = vector_of(others, rule), vector_of([*others, mine], rule)
        replaced = vector_of([*others, another], rule)
        for one, other, adjacency in ((without, with_me, "add_remove"), (with_me, replaced, "replace_one")):
            moved = one - other
            assert np.abs(moved).max() <= 1
            assert np.abs(moved).sum() <= rule.l1_sensitivity(adjacency)
            assert math.sqrt(float(moved @ moved)) <= rule.l2_sensitivity(adjacency)

    def test_reach_their_sensitivities(self):
        rule = UnitKeywords("text", 2, VOCABULARY)
        one, other = vector_of([unit("card fee")], rule), vector_of([unit("transfer strasse")], rule)
        assert one.sum() == rule.l1_sensitivity("add_remove") == 2
        assert np.abs(one - other).sum() == rule.l1_sensitivity("replace_one") == 4
        assert np.linalg.norm(one) <= rule.l2_sensitivity("add_remove") <= math.sqrt(2) * (1 + 1e-15)
        assert rule.l2_sensitivity("replace_one") == 2.0

    def test_are_at_most_so_many_the_most_frequent_first_and_of_equals_those_declared_first(self):
        rule = UnitKeywords("text", 2, VOCABULARY)
        assert rule.of(unit("fee transfer card", "a fee")) == ("fee", "card")
        assert rule.of(unit(*["card transfer fee strasse"] * 50)) == ("card", "transfer")
        assert rule.of(unit()) == rule.of(unit("nothing of it")) == rule.of(({"other": "card"},)) == ()
        assert rule.of(({"text": None},)) == ()  # type: ignore[dict-item]

    def test_are_whole_words_in_one_form_and_may_be_several_words(self):
        rule = UnitKeywords("text", 5, VOCABULARY)
        assert rule.of(unit("a CARD-holder")) == ("card",)
        assert rule.of(unit("cardboard")) == ()
        assert set(rule.of(unit("Credit\tcard"))) == {"card", "credit card"}
        assert rule.of(unit("credit, card")) == rule.of(unit("credit card"))
        assert rule.of(unit("STRASSE")) == ("stra\u00dfe",)
        assert words_of("caf\u00e9") == words_of("cafe\u0301") == ["caf\u00e9"]

    def test_that_a_text_ends_within_are_not_found(self):
        rule = UnitKeywords("text", 1, ("card", "card holder", "film"))
        assert rule.of([{"text": "film film card"}]) == ("film",)

    def test_are_found_inside_clauses_of_scripts_that_write_no_spaces_between_words(self):
        declared = ("\u5361", "\u8f6c\u8d26", "\u30ab\u30fc\u30c9", "\u0e1a\u0e31\u0e15\u0e23", "\u0e01\u0e32", "card")
        rule = UnitKeywords("text", 9, declared)
        for text, found in {
            "\u6211\u7684\u5361\u5728\u5546\u5e97\u88ab\u62d2\u7edd\u4e86": {"\u5361"},
            "\u8f6c\u8d26\u8fd8\u6ca1\u6709\u5230\u8d26": {"\u8f6c\u8d26"},
            "\u8f6c\u5230\u8d26": set(),
            "\u79c1\u306e\u30ab\u30fc\u30c9\u304c\u4f7f\u3048\u307e\u305b\u3093": {"\u30ab\u30fc\u30c9"},
            "\u79c1\u306e\uff76\uff70\uff84\uff9e": {"\u30ab\u30fc\u30c9"},  # half width
            "\u0e1a\u0e31\u0e15\u0e23\u0e2b\u0e32\u0e22": {"\u0e1a\u0e31\u0e15\u0e23"},
            "\u0e01\u0e48\u0e32": set(),  # another sign on the first letter makes another syllable
            "card\u5361": {"card", "\u5361"},
            "cards\u5361": {"\u5361"},
            "\uce74\ub4dc\uac00": set(),
        }.items():
            assert set(rule.of(unit(text))) == found
            split = TopicSplit("text", "topic", declared, tuple("123456"))
            assert (split.of(unit(text))[1] != "") == bool(found)

    @settings(max_examples=60, deadline=None)
    @given(st.text(max_size=30))
    def test_read_a_text_and_its_form_alike(self, text):
        words = words_of(text)
        assert words_of(" ".join(words)) == words
        # Of ASCII alone there is a faster way; a letter of another script behind it takes the other one.
        plain = text.encode("ascii", "ignore").decode()
        assert words_of(f"{plain} \u00e9") == [*words_of(plain), "\u00e9"]

    @pytest.mark.parametrize(
        "wrong",
        [
            {"declared": ()},
            {"declared": "card"},
            {"declared": 7},
            {"declared": ("card", "CARD!")},
            {"declared": ("...",)},
            {"declared": ("a b c d e f g h i",)},
            {"declared": (7,)},
            {"declared": tuple(f"w{place}" for place in range(MOST_KEYWORDS + 1))},
            {"max_values": 0},
            {"max_values": True},
            {"name": ""},
        ],
    )
    def test_refuse_public_faults(self, wrong):
        with pytest.raises(ConfigurationError):
            UnitKeywords(**{"name": "text", "max_values": 2, "declared": VOCABULARY, **wrong})

    @pytest.mark.parametrize("alike", [("\u8f6c\u8d26", "\u8f6c \u8d26"), ("visa \u5361", "visa\u5361")])
    def test_of_scripts_without_spaces_that_differ_in_blanks_are_refused_for_this_reason(self, alike):
        with pytest.raises(ConfigurationError, match=r"at places .0, 1.* blanks beside letters of"):
            UnitKeywords("text", 2, alike)


@pytest.mark.parametrize(
    "column",
    [
        ("canary was admitted on the fourth of May with a rash",),
        ("canary doe", "Canary Doe"),
        ("canary" * 50,),
        ("canary\n",),
    ],
)
def test_records_passed_as_a_vocabulary_are_not_printed(column: tuple[str, ...]) -> None:
    with pytest.raises(ConfigurationError, match=r"vocabulary.*place") as caught:
        UnitKeywords("text", 1, ("fee", *column))
    assert "anary" not in str(caught.value)


class _NoNoise(SecureRandom):
    """Draws nothing but zeros: to see what stands under the noise."""

    __slots__ = ()

    def gaussian_draws(self, n: int) -> Any:
        draws = super().gaussian_draws(n)
        draws.values = np.zeros(n)
        return draws


class TestTheNoise:
    @pytest.mark.parametrize(("adjacency", "moved"), [("add_remove", 2.0), ("replace_one", math.sqrt(8.0))])
    def test_is_normal_at_the_l2_sensitivity(self, adjacency, moved):
        """False alarm: 1e-6 each (Kolmogorov-Smirnov over the rounding; the variance within 6 deviations of it)."""
        plan = histogram(keywords=4, noise=50.0, adjacency=adjacency)
        drawn = np.array([count for _ in range(600) for _, count in plan.release([], rng=SYSTEM_RANDOM)])
        scale = float(plan.scale)
        assert scale == pytest.approx(50.0 * moved)
        assert stats.kstest(drawn + SYSTEM_RANDOM.uniform(drawn.size) - 0.5, stats.norm(0, scale).cdf).pvalue > ALARM
        assert abs(drawn.var() / scale**2 - 1.0) < 6 * math.sqrt(2 / drawn.size)

    def test_goes_on_every_keyword_in_the_order_of_the_vocabulary(self):
        data = [unit("card fee"), unit("a card")]
        released = histogram().release(data, rng=_NoNoise())
        assert released == (("card", 2), ("credit card", 0), ("transfer", 0), ("stra\u00dfe", 0), ("fee", 1))
        assert [name for name, _ in histogram().release([], rng=SYSTEM_RANDOM)] == list(VOCABULARY)

    def test_costs_what_a_second_accountant_says(self):
        plan = histogram(noise=2.5)
        assert plan.event == GaussianEvent(2.5)
        ours = accounting.epsilon_upper_bound(plan.event, delta=1e-6, adjacency="add_remove")
        theirs = privacy_loss_distribution.from_gaussian_mechanism(2.5).get_epsilon_for_delta(1e-6)
        assert ours == pytest.approx(theirs, rel=2e-3)
        assert ours >= theirs * (1 - 1e-6)

    def test_declares_its_gap_and_the_discrete_one_has_none(self):
        assert histogram().implementation_delta == GaussianMechanism(3.0).implementation_delta(len(VOCABULARY)) > 0
        exact = CountPlan(UnitKeywords("text", 2, VOCABULARY), DiscreteLaplaceMechanism(1.0), "add_remove")
        assert exact.implementation_delta == 0.0
        assert dict(exact.release([unit("card")] * 10_000, rng=SYSTEM_RANDOM))["card"] > 9_000

    def test_needs_declared_values(self):
        with pytest.raises(ConfigurationError, match="declared"):
            CountPlan(UnitValues("field"), GaussianCountMechanism(1.0), "add_remove")
        values = CountPlan(UnitValues("field", 2, ("a", "b")), GaussianCountMechanism(1.0), "replace_one")
        assert float(values.scale) == values.deviation == 2.0
        with pytest.raises(ConfigurationError, match="noise_multiplier"):
            GaussianCountMechanism(0.0)
        with pytest.raises(ConfigurationError, match="UnitKeywords"):
            CountPlan(object(), GaussianCountMechanism(1.0), "add_remove")  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match="noise of a scale"):
            histogram(noise=1e12)

    @pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
    def test_is_rebuilt_from_what_it_shows_and_from_nothing_else(self, adjacency):
        plan = histogram(adjacency=adjacency)
        assert count_release(plan.to_dict()) == plan
        for changed in ({"l2_sensitivity": 1.0}, {"scale": 1.0}, {"l1_sensitivity": 1}):
            with pytest.raises(ConfigurationError, match="release"):
                count_release({**plan.to_dict(), **changed})
        fewer = {**plan.to_dict()["rule"], "max_values": 1}
        with pytest.raises(ConfigurationError, match="release"):
            count_release({**plan.to_dict(), "rule": fewer})


class TestTheTopicOfAUnit:
    split = TopicSplit("text", "topic", ("fee", "credit card", "card"), ("topic 1", "topic 2", "topic 3"))

    def test_is_the_first_topic_that_its_texts_hold(self):
        assert self.split.of(unit("my card"))[1] == "topic 3"
        assert self.split.of(unit("my credit card"))[1] == "topic 2"
        assert self.split.of(unit("my card", "a FEE"))[1] == "topic 1"
        assert self.split.of(unit("a boat", "a FEE"))[1] == "topic 1"
        assert self.split.of(unit("a boat")) == self.split.of(()) == ((), "")

    def test_leaves_out_the_records_that_do_not_hold_it(self):
        kept, label = self.split.of(unit("my card", "a boat", "the card again"))
        assert label == "topic 3"
        assert kept == ({"text": "my card", "topic": "card"}, {"text": "the card again", "topic": "card"})

    @settings(max_examples=60, deadline=None)
    @given(st.lists(units, max_size=5), units)
    def test_is_the_same_whoever_else_is_there(self, others, mine):
        alone = self.split.of(mine)
        assert [self.split.of(each) for each in [*others, mine]][-1] == alone
        assert alone[1] in {"", *self.split.labels}

    def test_refuses_more_topics_than_places(self):
        with pytest.raises(ConfigurationError, match="topics"):
            TopicSplit("text", "topic", ("a", "b"), ("topic 1",))
