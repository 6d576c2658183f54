"""Checks releases of words: contribution of a unit, noise, threshold, and a game for a word that others hold."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from scipy import stats

from langchain_dpicl.audit.bounds import ALARM, clopper_pearson_lower
from langchain_dpicl.audit.count_games import MINE, NOISE, OTHER, Named, OnceGame
from langchain_dpicl.audit.game import AuditResult, result_of
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.documents.plan import DocumentsPlan
from langchain_dpicl.generation.plan import GenerationPlan
from langchain_dpicl.options import Noise
from langchain_dpicl.privacy.accounting.events import ComposedEvent, Event, FailureEvent, GaussianEvent
from langchain_dpicl.privacy.data.private_examples import PrivateExamples
from langchain_dpicl.privacy.extensions.word_release import (
    WEIGHT_STEPS,
    WORD_TEMPLATE,
    UnitPairs,
    WordRelease,
    least_threshold,
)
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM
from langchain_dpicl.reports.public_words import public_words
from langchain_dpicl.words import WordDiscovery, WordsPlan

# What a game costs in all is of no interest, and no budget is in its way.
_EPSILON = 1e12
_DELTA = 0.1
_RUNS = {"add_remove": 650, "replace_one": 1_350}
_VISIBLE_NOISES = (0.25, 2.0)
"""Noises at which a word of one unit is seen: at small ones that of units of one word, at wide ones that of many."""


def made_up(place: int, *, letters: int = 5) -> str:
    """Returns one of 26^letters words that no public text holds."""
    digits = []
    for _ in range(letters):
        place, digit = divmod(place, 26)
        digits.append(chr(ord("a") + digit))
    return "zq" + "".join(digits)


def finder_of(texts: tuple[str, ...], **options: Any) -> WordDiscovery:
    """Builds a discovery of words over units of one text each, on a budget of its own."""
    arguments = {"adjacency": "add_remove", "noise_multiplier": NOISE, "max_values": 1, **options}
    return WordDiscovery.from_private_examples(
        PrivateExamples(texts, public_size=1),
        budget=Budget(epsilon=_EPSILON, delta=_DELTA, adjacency=arguments.pop("adjacency")),
        epsilon=_EPSILON / 2,
        noise=Noise(multiplier=arguments.pop("noise_multiplier"), delta=_DELTA),
        **arguments,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class WordGame(OnceGame):
    """A game against `WordDiscovery.run` for a word that others hold too, where the Gaussian noise is all there is."""

    def build(self, units: tuple[str, ...]) -> WordDiscovery:
        """Builds the discovery."""
        return finder_of(units, **self.options)

    def release(self, made: WordDiscovery) -> tuple[Mapping[str, int], int]:
        """Releases the words."""
        return dict.fromkeys(made.run(progress=False).words, 1), made.share.remaining(WORD_TEMPLATE)

    def outcome(self, counts: Mapping[str, int]) -> str:
        """Returns whether the words speak for the target; of another in its place, against it."""
        is_replaced = self.options["adjacency"] == "replace_one"
        return MINE if MINE in counts and (not is_replaced or OTHER not in counts) else OTHER

    def event(self, side: Any) -> Event:
        """Returns the Gaussian event of the ticket of one release: no failure concerns words that others hold."""
        event = OnceGame.event(self, side)
        parts = event.events if isinstance(event, ComposedEvent) else (event,)
        (noise,) = (part for part in parts if isinstance(part, GaussianEvent))
        return noise


def word_games(*, adjacency: str) -> Iterator[WordGame]:
    """Yields the worst case of a word that others hold: a unit of one word is added, or replaced by another."""
    options = {"adjacency": adjacency, "noise_multiplier": NOISE}
    is_replaced = adjacency == "replace_one"
    crowd = (MINE, OTHER) * 2 if is_replaced else (MINE,)
    release = finder_of((), **options).plan.release

    def law(factor: float) -> tuple[float, float]:
        noise = stats.norm(0.0, release.scale / factor)
        held = len(crowd) // (2 if is_replaced else 1)
        more, less = (float(noise.sf(release.mechanism.threshold - weight)) for weight in (held + 1, held))
        return (more * (1.0 - less), less * (1.0 - more)) if is_replaced else (more, less)

    yield WordGame(
        name=f"one word that others hold: thresholded_gaussian, {adjacency}",
        units=(*crowd, MINE),
        neighbour=(*crowd, OTHER) if is_replaced else crowd,
        runs=_RUNS[adjacency],
        options=options,
        law=law,
    )


def word_checks(plan: WordsPlan) -> Iterator[Named]:
    """Yields the checks of one plan of words, except for games."""
    return _checks_of({"words": plan.release, "pairs": plan.pairs})


def document_checks(plan: DocumentsPlan) -> Iterator[Named]:
    """Yields the checks of what a store of documents releases as words: topics, words of topics, pairs."""
    topics = plan.topics if isinstance(plan.topics, WordRelease) else None
    return _checks_of({"topics": topics, "words": plan.words, "pairs": plan.pairs})


def first_word_checks(plan: GenerationPlan) -> Iterator[Named]:
    """Yields the checks of the words that leave before the texts of a generation; none where none do."""
    return _checks_of({"words": plan.words})


def _checks_of(releases: Mapping[str, WordRelease | None]) -> Iterator[Named]:
    for what, release in releases.items():
        if release is not None:
            yield f"{what}: one unit adds no more than charged", partial(check_contribution, release, what)
            yield f"{what}: noise, at your own size", partial(check_noise, release, what)
            yield f"{what}: the threshold's chance is charged", partial(check_threshold, release, what)
            yield f"{what}: one unit alone", partial(check_single_unit, release, what)


def check_contribution(release: WordRelease, what: str = "words") -> AuditResult:
    """Checks that no unit moves the sums by more than is charged, beside any others, and moves no other unit."""
    rule, limit = release.rule, (1 if release.adjacency == "add_remove" else 2) * WEIGHT_STEPS**2
    some = [made_up(place) for place in range(rule.max_words + 4)]
    known: Any = some if isinstance(rule, UnitPairs) else public_words()
    texts = [" ".join(some[:size]) for size in range(len(some) + 1)]
    texts += [" ".join(some * 9), " ".join(reversed(some)), " ".join(some).upper(), "\x00 \u200b", "?".join(some)]
    units = [(), *(({rule.name: text},) for text in texts), tuple({rule.name: text} for text in texts)]
    crowd, faults, tried = units[3:6], set[str](), 0
    without = release.weights(crowd, known)
    alone = [release.weights([unit], known) for unit in units]
    for unit, mine in zip(units, alone, strict=True):
        beside = release.weights([*crowd, unit], known)
        if any(beside[item] != without[item] + mine[item] for item in {*beside, *without, *mine}):
            faults.add("what a unit casts depends on the other units")
        moves = [{item: beside[item] - without[item] for item in {*beside, *without}}]
        if release.adjacency == "replace_one":
            moves += [{item: mine[item] - other[item] for item in {*mine, *other}} for other in alone]
        for move in moves:
            tried += 1
            square = sum(step**2 for step in move.values())
            if square > limit:
                faults.add(f"a unit moves the sums by {math.sqrt(square) / WEIGHT_STEPS:.4g} in L2, more than charged")
    check, blind = f"{what}: one unit adds no more than charged", ("units not tried",)
    return result_of(check, sorted(faults), runs=tried, blind=blind, is_certain=True)


def check_noise(release: WordRelease, what: str = "words", *, draws: int = 4_000) -> AuditResult:
    """Checks the tails of the noise on sums far above the threshold, and whether one reveals the next."""
    charged = _noise_charged(release)
    far, base = charged, math.ceil(release.mechanism.threshold + 20 * charged + 1)
    weights = {made_up(place): base * WEIGHT_STEPS for place in range(draws)}
    released = dict(release.mechanism.release(weights, adjacency=release.adjacency, rng=SYSTEM_RANDOM))
    noises = np.array([released.get(item, 0.0) - base for item in weights])
    chance = float(stats.norm.sf(1.0))
    tests = {
        "above": (noises >= far, chance),
        "below": (noises <= -far, chance),
        "two running": ((noises[:-1:2] >= far) & (noises[1::2] >= far), chance**2),
    }
    faults = [
        f"{name}: {int(coins.sum())} of {coins.size}, expected {share * coins.size:.1f}"
        for name, (coins, share) in tests.items()
        if stats.binomtest(int(coins.sum()), coins.size, share).pvalue < ALARM / len(tests)
    ]
    fewest = float(stats.binom.ppf(ALARM / (2 * len(tests)), draws, chance))
    power = float(stats.binom.cdf(fewest - 1, draws, float(stats.norm.sf(2.0))))
    blind = ("noise of which a small share is missing",)
    return result_of(f"{what}: noise, at your own size", faults, runs=draws, power=power, blind=blind)


def _noise_charged(release: WordRelease) -> float:
    """Returns the deviation that the event charges for, from the sensitivity by hand."""
    event = release.event
    parts = event.events if isinstance(event, ComposedEvent) else (event,)
    noise = math.fsum(part.noise_multiplier for part in parts if isinstance(part, GaussianEvent))
    return noise * (1.0 if release.adjacency == "add_remove" else math.sqrt(2.0))


def _failure_charged(release: WordRelease) -> float:
    event = release.event
    parts = event.events if isinstance(event, ComposedEvent) else (event,)
    return math.fsum(part.delta for part in parts if isinstance(part, FailureEvent))


def check_threshold(release: WordRelease, what: str = "words") -> AuditResult:
    """Checks that the ticket charges at least the chance that any item of one unit passes, by scipy's law."""
    charged, scale = _failure_charged(release), _noise_charged(release)
    least = release.mechanism.threshold
    costs = {
        j: -math.expm1(j * math.log1p(-float(stats.norm.sf((least - 1.0 / math.sqrt(j)) / scale))))
        for j in range(1, release.rule.max_words + 1)
    }
    number, cost = max(costs.items(), key=lambda pair: pair[1])
    words = f"one of {number} items of one unit passes with chance {cost:.3g}, charged is {charged:.3g}"
    faults = [words] if charged < cost * (1.0 - 1e-9) else []
    blind = ("what really runs: see the next check",)
    check = f"{what}: the threshold's chance is charged"
    result = result_of(check, faults, runs=1, blind=blind, is_certain=True)
    return dataclasses.replace(result, details=(words,))


def check_single_unit(release: WordRelease, what: str = "words", *, units: int = 5_000) -> AuditResult:
    """Plays releases at a delta that can be seen: something of one unit alone leaves no more often than is charged.

    Every unit of a run holds items that no other holds, so that a run is as many trials. Words are played by the
    component itself; units of one item and of the most that the plan allows, 32 at most.
    """
    faults, charged = list[str](), 0.0
    most = min(release.rule.max_words, 32)
    for noise, size in itertools.product(_VISIBLE_NOISES, sorted({1, most})):
        hits, charged = _hits(release, noise, size, most, units)
        if (least := clopper_pearson_lower(hits, units, ALARM)) > charged:
            faults.append(f"{size} items at noise {noise}: seen with a chance above {least:.3g}, charged {charged:.3g}")
    fewest = next(hits for hits in range(units + 1) if clopper_pearson_lower(hits, units, ALARM) > charged)
    power = float(stats.binom.sf(fewest - 1, units, 1.5 * charged))
    return result_of(
        f"{what}: one unit alone",
        faults,
        runs=2 * units,
        power=power,
        power_for="one and a half times the chance to be found",
        blind=(
            "thresholds of another delta than this game's",
            "units of numbers of items between those that are played",
        ),
    )


def _hits(release: WordRelease, noise: float, size: int, most: int, units: int) -> tuple[int, float]:
    """Returns how many of so many units, alone with `size` items each, something was released of, and the charge."""
    held = [[made_up(unit * most + place) for place in range(size + 1)] for unit in range(units)]
    owner = {word: unit for unit, words in enumerate(held) for word in words}
    if isinstance(release.rule, UnitPairs):
        threshold = least_threshold(noise, most, release.adjacency, _DELTA / 2)
        mechanism = dataclasses.replace(release.mechanism, noise_multiplier=noise, threshold=threshold)
        made = WordRelease(UnitPairs("text", most), mechanism, release.adjacency)
        records = [({"text": " ".join(words)},) for words in held]
        found = [pair.split(" ")[0] for pair, _ in made.release(records, tuple(owner), rng=SYSTEM_RANDOM)]
        return len({owner[word] for word in found}), _failure_charged(made)
    texts = tuple(" ".join(words[:size]) for words in held)
    finder = finder_of(texts, adjacency=release.adjacency, noise_multiplier=noise, max_values=most)
    charged = _failure_charged(finder.plan.release)
    return len({owner[word] for word in finder.run(progress=False).words}), charged
