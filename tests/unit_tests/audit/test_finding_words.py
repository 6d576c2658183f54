"""Audits of released words: sound ones pass, and each of the known mistakes turns the check red that looks at it."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from langchain_dpicl.audit import Subject, count_games, suite
from langchain_dpicl.audit.game import ALARM, play, power_of
from langchain_dpicl.audit.suite import _checks, games_of
from langchain_dpicl.discovery import plan_words
from langchain_dpicl.privacy.accounting.events import GaussianEvent
from langchain_dpicl.privacy.extensions import word_release
from langchain_dpicl.privacy.extensions.word_release import (
    WEIGHT_STEPS,
    ThresholdedGaussianMechanism,
    UnitWords,
    WordRelease,
)
from langchain_dpicl.privacy.mechanisms.release_plan import GaussianMechanism

PLAN = plan_words(epsilon=1.0, delta=1e-6, max_values=6, pairs=True)
REPLACED = plan_words(epsilon=1.0, delta=1e-6, max_values=6, adjacency="replace_one")
Plant = Callable[[pytest.MonkeyPatch], None]


def test_a_plan_of_words_is_rebuilt_at_its_price_and_every_check_has_a_name() -> None:
    told = json.loads(json.dumps(PLAN.to_dict()))
    subject = Subject.of({"plan": told})
    assert (subject.method, subject.plan.event()) == ("words", PLAN.event())
    assert suite.check_price(subject).verdict == "sound"
    assert suite.check_price(Subject.of({**told, "epsilon": 0.9})).verdict == "violated"
    names = [check.name for check in _checks(subject, controls=True)]
    assert {"words: one unit alone", "pairs: one unit alone"} <= set(names)
    assert sum(name.startswith("control") for name in names) == 1


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_the_game_would_see_half_of_the_noise(adjacency: str) -> None:
    (game,) = count_games.word_games(adjacency=adjacency)
    event = game.event(game.sides()[0])
    assert event == GaussianEvent(0.5)
    missed = 1.0 - (power_of(game, event) or 0.0)
    assert missed < 1e-6
    # A control plays it at half of its noise, where the same words have to pass or not: the law moves no threshold.
    options = {**game.options, "noise_multiplier": game.options["noise_multiplier"] / 2}
    whole, half = (one.build(()).plan.release for one in (game, dataclasses.replace(game, options=options)))
    assert half.scale == pytest.approx(whole.scale / 2)
    assert half.mechanism.threshold == pytest.approx(whole.mechanism.threshold, abs=0.01)


def test_a_component_of_words_is_audited_by_its_ledger_too() -> None:
    made = count_games.word_finder_of(("mine",))
    subject = Subject.of(made)
    checks = [suite.check_price, suite.check_tickets, suite.check_report]
    assert [check(subject).verdict for check in checks] == ["sound"] * 3
    assert subject.plan is made.plan
    assert games_of(subject)


@pytest.mark.parametrize("release", [PLAN.release, PLAN.pairs, REPLACED.release], ids=["words", "pairs", "replaced"])
def test_sound_parts_are_sound(release: WordRelease) -> None:
    for check in (
        count_games.check_word_contribution,
        count_games.check_word_threshold,
        count_games.check_unit_with_a_word,
    ):
        assert check(release).verdict == "sound"
    found = count_games.check_word_noise(release)
    assert (found.verdict, found.power > 0.999) == ("sound", True)


def test_the_looks_at_one_unit_share_one_false_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    real, looks = count_games.clopper_pearson_lower, []

    def lower(hits: int, runs: int, alarm: float) -> float:
        if hits < 0:  # a look
            looks.append((runs, alarm))
            return 0.0
        return real(hits, runs, alarm)

    monkeypatch.setattr(count_games, "_hits", lambda *_: (-1, 0.05))
    monkeypatch.setattr(count_games, "clopper_pearson_lower", lower)
    found = count_games.check_unit_with_a_word(PLAN.release)
    assert sum(alarm for _, alarm in looks) <= ALARM
    assert found.runs == sum(runs for runs, _ in looks)


# --- what others have got wrong -------------------------------------------------------------------------------------


def weights_of_one(patch: pytest.MonkeyPatch) -> None:
    """Every word of a unit counts 1."""
    patch.setattr(word_release, "weight_of", lambda number: WEIGHT_STEPS)


def weights_too_flat(patch: pytest.MonkeyPatch) -> None:
    """A word of j weighs 1/j^0.4."""
    patch.setattr(word_release, "weight_of", lambda number: math.floor(WEIGHT_STEPS / number**0.4))


def weights_rounded_up(patch: pytest.MonkeyPatch) -> None:
    """By one step of 2^-20, which sums of squares show."""
    patch.setattr(word_release, "weight_of", lambda number: math.ceil(WEIGHT_STEPS / math.sqrt(number)))


def cap_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A unit casts all its words, at the weight of one of the most that it may cast."""
    real = UnitWords.of
    patch.setattr(
        UnitWords,
        "of",
        lambda self, records, known, gone: real(dataclasses.replace(self, max_words=99), records, known, gone),
    )
    weight = word_release.weight_of(6)
    patch.setattr(word_release, "weight_of", lambda number: weight)


def words_by_what_others_hold(patch: pytest.MonkeyPatch) -> None:
    """A unit casts its words that most units hold: one more unit moves the words of all."""
    real = WordRelease.weights

    def weights(self: Any, units: Any, known: Any, gone: Any = frozenset()) -> Any:
        listed = [list(records) for records in units]
        held = Counter(word for records in listed for r in records for word in set(r[self.rule.name].lower().split()))
        ranked = tuple(sorted(held, key=lambda word: (held[word], word)))  # the rule takes the last ones
        return real(self, listed, word_release.PublicWords(ranked, known.left_out))

    patch.setattr(WordRelease, "weights", weights)


def failure_forgotten(patch: pytest.MonkeyPatch) -> None:
    """The threshold is thought to be free."""
    patch.setattr(
        ThresholdedGaussianMechanism, "event", lambda self, most, adjacency: GaussianEvent(self.noise_multiplier)
    )


def threshold_of_one_word(patch: pytest.MonkeyPatch) -> None:
    """The chance of a unit of one word is charged, whatever a unit holds."""
    real = ThresholdedGaussianMechanism.chance_alone
    patch.setattr(ThresholdedGaussianMechanism, "chance_alone", lambda self, most, adjacency: real(self, 1, adjacency))


def threshold_too_low(patch: pytest.MonkeyPatch) -> None:
    """What leaves is compared with 95 % of the threshold."""
    _with_threshold(patch, 0.95)


def _with_threshold(patch: pytest.MonkeyPatch, factor: float) -> None:
    real = ThresholdedGaussianMechanism.release

    def release(self: Any, weights: Any, **given: Any) -> Any:
        low = ThresholdedGaussianMechanism(self.noise_multiplier, math.floor(self.threshold * factor * 1024) / 1024)
        return real(low, weights, **given)

    patch.setattr(ThresholdedGaussianMechanism, "release", release)
    # What a plan cannot release is refused when it is stored; the bug here is in the release itself.
    patch.setattr("langchain_dpicl.released.counts.word_problems", lambda groups, plan: ())


def counts_under_the_threshold(patch: pytest.MonkeyPatch) -> None:
    """Whole counts are compared with a threshold for weights of less than one."""
    real = ThresholdedGaussianMechanism.release

    def release(self: Any, weights: Any, **given: Any) -> Any:
        return real(self, dict.fromkeys(weights, WEIGHT_STEPS), **given)

    patch.setattr(ThresholdedGaussianMechanism, "release", release)


def half_of_the_noise(patch: pytest.MonkeyPatch) -> None:
    real = GaussianMechanism.release

    def release(self: Any, total: Any, *, rng: Any) -> Any:
        return real(self.with_noise(self.noise_multiplier / 2), total, rng=rng)

    patch.setattr(GaussianMechanism, "release", release)


PARTS: dict[str, tuple[Plant, Callable[[WordRelease], Any]]] = {
    "weights of one": (weights_of_one, count_games.check_word_contribution),
    "weights too flat": (weights_too_flat, count_games.check_word_contribution),
    "weights rounded up": (weights_rounded_up, count_games.check_word_contribution),
    "cap forgotten": (cap_forgotten, count_games.check_word_contribution),
    "words by what others hold": (words_by_what_others_hold, count_games.check_word_contribution),
    "failure forgotten": (failure_forgotten, count_games.check_word_threshold),
    "threshold of one word": (threshold_of_one_word, count_games.check_word_threshold),
    "threshold of one word, played": (threshold_of_one_word, count_games.check_unit_with_a_word),
    "threshold too low": (threshold_too_low, count_games.check_unit_with_a_word),
    "counts under the threshold": (counts_under_the_threshold, count_games.check_unit_with_a_word),
    "half of the noise": (half_of_the_noise, count_games.check_word_noise),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_planted_mistake_is_found_in_the_part_it_is_in(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, check = PARTS[name]
    plant(monkeypatch)
    assert check(PLAN.release).verdict == "violated"


@pytest.mark.planted
@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_the_game_against_the_component_refutes_half_of_the_noise(
    adjacency: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The game misses half of the noise with a chance below 1e-6: see the test of its power."""
    (game,) = count_games.word_games(adjacency=adjacency)
    assert play(dataclasses.replace(game, runs=100)).verdict != "violated"
    half_of_the_noise(monkeypatch)
    # Its grid is finer, which the released words alone refuse; the game has to find the noise itself.
    monkeypatch.setattr("langchain_dpicl.reports.verify.grid_step", lambda scale: scale * 0.0 + 2.0**-40)
    assert play(game, looks=6).verdict == "violated"
