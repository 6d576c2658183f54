"""Releases words that many units write: weights of one round, Gaussian noise, and a threshold that is charged.

The words that may leave are not declared, so a word leaves only because several units hold it: what one unit alone
holds reaches the threshold with a probability that is part of delta. Proof: docs/proofs/released-words.md.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import NormalDist
from typing import Any, ClassVar, TypeAlias, final

import numpy as np

from langchain_dpicl.privacy._validate import (
    Adjacency,
    check_adjacency,
    check_int,
    check_name,
    check_real,
    fail,
    is_name,
)
from langchain_dpicl.privacy.accounting.events import (
    ComposedEvent,
    Event,
    FailureEvent,
    GaussianEvent,
    canonical_json,
)
from langchain_dpicl.privacy.extensions.value_counts import MOST_KEYWORDS, round_up_to_7_digits, words_of
from langchain_dpicl.privacy.mechanisms.bounded import LARGEST, BoundedSum, ClosedClass, NamedPart, Sensitivity
from langchain_dpicl.privacy.mechanisms.randomness import SecureRandom
from langchain_dpicl.privacy.mechanisms.release_plan import ROUND_UP, GaussianMechanism, grid_step

Weight: TypeAlias = tuple[str, float]
"""A word, or a pair of words, and the sum of its weights over the units, noise included."""

WORD_TEMPLATE = "words"
"""The ticket template of a release of words."""
FIRST_WORDS_TEMPLATE = "words before texts"
"""The ticket template of a release of words that texts of the same share follow."""
PAIR_TEMPLATE = "pairs of words"
"""The ticket template of the release of pairs that follows it."""
WEIGHT_STEPS = 2**20
"""Parts of 1 in which weights are counted: sums of whole numbers are exact in any order."""
MOST_COORDINATES = 2**40
"""Distinct words that the declared gap of the noise covers: more than a machine holds. Their number is private."""
FEWEST_LETTERS, MOST_LETTERS = 3, 30
"""Length of a word that may leave, in characters."""
MOST_PER_UNIT = 1024

# Thresholds are multiples of this, so that JSON and every machine hold the same number.
_THRESHOLD_STEP = 2.0**-10
# Above the roundings of the error function and of the quotient before it.
_TAIL_ROUNDING = 1.0 + 1e-9


def weight_of(num_words: int) -> int:
    """Returns the weight of each word of a unit that casts so many: 1/sqrt(num_words), in steps, rounded down.

    Args:
      num_words: at least 1.

    >>> weight_of(1), weight_of(4), 3 * weight_of(3) ** 2 <= WEIGHT_STEPS**2
    (1048576, 524288, True)
    """
    return math.isqrt(WEIGHT_STEPS**2 // num_words)


@final
@dataclass(frozen=True, slots=True)
class PublicWords:
    """How common words are in public text, and which say nothing. Holds no word of a record.

    Args:
      ranked: words in the form of `words_of`, the commonest first; every other word is rarer than all of them.
      left_out: words that no unit casts.
    """

    ranked: tuple[str, ...] = field(repr=False)
    left_out: frozenset[str] = field(repr=False)
    digest: str = field(init=False)
    _place: Mapping[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        whole = json.dumps([list(self.ranked), sorted(self.left_out)]).encode("utf-8")
        object.__setattr__(self, "digest", hashlib.sha256(whole).hexdigest()[:32])
        object.__setattr__(self, "_place", {word: place for place, word in enumerate(self.ranked)})

    def rarest(self, words: Iterable[str], most: int) -> list[str]:
        """Returns the words that are publicly rarest, ties in the order of their spelling.

        Args:
          words: distinct.
          most: how many to keep.
        """
        common = len(self.ranked)
        return heapq.nsmallest(most, words, key=lambda word: (-self._place.get(word, common), word))


@final
@dataclass(frozen=True, slots=True)
class UnitWords(ClosedClass):
    """At most `max_words` distinct words of a unit's texts: those that public text expects least.

    A word is one of `words_of`, of 3 to 30 letters and marks on them, that is neither publicly left out nor denied.

    Formal guarantees:
      - `of` looks at one unit and at public values alone, and returns at most `max_words` distinct words. What other
        units hold has no influence on which.

    Args:
      name: field of the records that holds the text.
      max_words: most words of one unit, public.
      denied: public words that no unit casts; each entry stands for all its words.
      public_words: digest of the `PublicWords` by which words are ranked.

    Raises:
      ConfigurationError: a parameter out of range, or an entry of `denied` without a word.

    Source: docs/proofs/released-words.md.
    """

    name: str
    max_words: int
    denied: tuple[str, ...]
    public_words: str
    _denied: frozenset[str] = field(init=False, repr=False, compare=False)
    kind: ClassVar[str] = "unit_words"

    def __post_init__(self) -> None:
        check_name("field", self.name)
        check_int("max_values", self.max_words, low=1, high=MOST_PER_UNIT)
        check_name("public_words", self.public_words)
        object.__setattr__(self, "denied", denied_words(self.denied))
        object.__setattr__(self, "_denied", frozenset(self.denied))

    def of(
        self, records: Iterable[Mapping[str, Any]], known: PublicWords, gone: frozenset[str] = frozenset()
    ) -> tuple[str, ...]:
        """Returns the words that one unit casts.

        Args:
          records: of the unit; none, as of a unit that was removed, have no word.
          known: the public ranking.
          gone: words that were released before, which no unit casts again.
        """
        held = {word for record in records for word in _texts_words(record.get(self.name))}
        cast = filter(may_leave, held - known.left_out - self._denied - gone)
        return tuple(known.rarest(cast, self.max_words))

    def to_dict(self) -> dict[str, Any]:
        """Returns the public parameters, for reports."""
        return {
            "kind": self.kind,
            "field": self.name,
            "max_values": self.max_words,
            "denied": list(self.denied),
            "public_words": self.public_words,
        }


@final
@dataclass(frozen=True, slots=True)
class UnitPairs(ClosedClass):
    """At most `max_words` ordered pairs of released words that are neighbours in a unit's texts, other words left out.

    They are the first ones in the order of the unit's texts. A pair is written as its two words with a blank between.

    Formal guarantees:
      - `of` looks at one unit and at the released words alone, and returns at most `max_words` distinct pairs.

    Args:
      name: field of the records that holds the text.
      max_words: most pairs of one unit, public.

    Raises:
      ConfigurationError: a parameter out of range.

    Source: docs/proofs/released-words.md, section "Pairs".
    """

    name: str
    max_words: int
    kind: ClassVar[str] = "unit_pairs"

    def __post_init__(self) -> None:
        check_name("field", self.name)
        check_int("max_values", self.max_words, low=1, high=MOST_PER_UNIT)

    def of(
        self, records: Iterable[Mapping[str, Any]], known: frozenset[str], gone: frozenset[str] = frozenset()
    ) -> tuple[str, ...]:
        """Returns the pairs that one unit casts.

        Args:
          records: of the unit.
          known: the released words.
          gone: released words that are in no pair.
        """
        held = dict[str, None]()
        for record in records:
            kept = [word for word in _texts_words(record.get(self.name)) if word in known and word not in gone]
            held.update(dict.fromkeys(f"{left} {right}" for left, right in pairwise(kept) if left != right))
        return tuple(held)[: self.max_words]

    def to_dict(self) -> dict[str, Any]:
        """Returns the public parameters, for reports."""
        return {"kind": self.kind, "field": self.name, "max_values": self.max_words}


def denied_words(entries: Iterable[str], name: str = "deny") -> tuple[str, ...]:
    """Returns the distinct words of public entries, sorted; errors show the argument `name`.

    Raises:
      ConfigurationError: an entry is no text or has no word, or there are too many.
    """
    if isinstance(entries, str) or not isinstance(entries, Iterable):
        raise fail(name, "a sequence of public words", type(entries).__name__)
    words = set[str]()
    for place, entry in enumerate(entries):
        # A column of records passed by mistake must not be printed: errors show places only.
        if not isinstance(entry, str) or not (found := words_of(entry)):
            raise fail(name, "a text with a word, each of them", f"another at place {place}")
        words.update(found)
    if len(words) > MOST_KEYWORDS:
        raise fail(name, f"at most {MOST_KEYWORDS} words", f"{len(words)} of them")
    return tuple(sorted(words))


def _texts_words(text: Any) -> list[str]:
    return words_of(text) if isinstance(text, str) else []


def may_leave(word: str) -> bool:
    """Whether a text is one word in the form of `words_of`, of a length that may leave, of letters and marks."""
    has_length = FEWEST_LETTERS <= len(word) <= MOST_LETTERS
    has_letters = word.isalpha() or (any(map(str.isalpha, word)) and all(map(_is_letter_or_mark, word)))
    return has_length and has_letters and is_name(word) and words_of(word) == [word]


def _is_letter_or_mark(character: str) -> bool:
    return character.isalpha() or unicodedata.category(character).startswith("M")


@final
@dataclass(frozen=True, slots=True)
class ThresholdedGaussianMechanism(NamedPart):
    """Adds normal noise to sums of weights and keeps what reaches a threshold.

    Formal guarantees:
      - Sums move by at most 1 in L2 under `add_remove` and sqrt(2) under `replace_one`, where a unit of j items gives
        each `weight_of(j)`. They get the noise of `GaussianMechanism` at that sensitivity: `GaussianEvent`.
      - What nobody holds is never released. Of j items that one unit alone holds, any is with a probability of at
        most `chance_alone`, for every j up to the most items of a unit: `FailureEvent(chance_alone)`.

    Args:
      noise_multiplier: standard deviation of the noise over the L2 sensitivity, in [1e-9, 1e12].
      threshold: least noisy sum that is released, a multiple of 2^-10 in (0, 2^20].

    Raises:
      ConfigurationError: a parameter out of range.

    Source: Korolova et al. (2009), the threshold; Gopi et al. (2020), weights; docs/proofs/released-words.md.
    """

    noise_multiplier: float
    threshold: float
    name: ClassVar[str] = "thresholded_gaussian"

    def __post_init__(self) -> None:
        checked = check_real("noise_multiplier", self.noise_multiplier, low=1e-9, high=1e12)
        object.__setattr__(self, "noise_multiplier", checked)
        threshold = check_real("threshold", self.threshold, low=0.0, high=LARGEST, low_open=True)
        if threshold % _THRESHOLD_STEP:
            raise fail("threshold", f"a multiple of {_THRESHOLD_STEP}", threshold)
        object.__setattr__(self, "threshold", threshold)

    def scale(self, adjacency: Adjacency) -> float:
        """Returns the standard deviation of the noise on each sum, in units that cast one item.

        Args:
          adjacency: neighbouring relation.
        """
        return self.noise_multiplier * l2_sensitivity(adjacency) * ROUND_UP

    def chance_alone(self, max_items: int, adjacency: Adjacency) -> float:
        """Returns the chance that any of the items of one unit reaches the threshold alone, rounded up to 7 digits.

        It is the largest over all numbers of items: fewer weigh more each, more have more chances.

        Args:
          max_items: most items of one unit.
          adjacency: neighbouring relation.
        """
        scale = self.scale(adjacency)
        least = self.threshold - grid_step(scale)  # the noisy sum is rounded to the grid, by half a step at most
        tails = ((j, _normal_tail((least - 1.0 / math.sqrt(j)) / scale)) for j in range(1, max_items + 1))
        worst = max(1.0 if tail >= 1.0 else -math.expm1(j * math.log1p(-tail)) for j, tail in tails)
        return round_up_to_7_digits(worst * _TAIL_ROUNDING)

    def event(self, max_items: int, adjacency: Adjacency) -> Event:
        """Returns what one release costs.

        Args:
          max_items: most items of one unit.
          adjacency: neighbouring relation.

        Raises:
          ConfigurationError: anybody passes the threshold.
        """
        alone = self.chance_alone(max_items, adjacency)
        if alone >= 1.0:
            raise fail("threshold", "one that an item of one unit hardly ever passes", self.threshold, "Raise it.")
        return ComposedEvent((GaussianEvent(self.noise_multiplier), FailureEvent(alone)))

    def release(self, weights: Mapping[str, int], *, adjacency: Adjacency, rng: SecureRandom) -> tuple[Weight, ...]:
        """Returns what reaches the threshold with its noisy sum, the largest first, ties by spelling.

        Args:
          weights: sum of the weights of each item, in steps; private.
          adjacency: neighbouring relation.
          rng: source of noise.
        """
        held = [item for item, weight in weights.items() if weight > 0]
        if not held:
            return ()
        sums = np.array([weights[item] / WEIGHT_STEPS for item in held], dtype=np.float64)  # [d]
        moved = Sensitivity(l2=l2_sensitivity(adjacency), range=None)
        noisy = GaussianMechanism(self.noise_multiplier).release(BoundedSum(sums, moved, "units", adjacency), rng=rng)
        values = () if noisy.values is None else noisy.values.tolist()
        found = [(item, value) for item, value in zip(held, values, strict=True) if value >= self.threshold]
        # Sorted by what is released: the order in which records came would reveal them.
        return tuple(sorted(found, key=lambda pair: (-pair[1], pair[0])))


def l2_sensitivity(adjacency: Adjacency) -> float:
    """Returns how far the vector of all sums moves between neighbours, in L2, rounded up: 1, or sqrt(2).

    Args:
      adjacency: neighbouring relation.
    """
    return 1.0 if check_adjacency(adjacency) == "add_remove" else math.nextafter(math.sqrt(2.0), math.inf)


def _normal_tail(deviations: float) -> float:
    return 0.5 * math.erfc(deviations / math.sqrt(2.0))


def least_threshold(noise_multiplier: float, max_items: int, adjacency: Adjacency, failure: float) -> float:
    """Returns the least threshold whose chance for the items of one unit alone is at most `failure`.

    Args:
      noise_multiplier: of the noise.
      max_items: most items of one unit.
      adjacency: neighbouring relation.
      failure: in (0, 1).

    Raises:
      ConfigurationError: no threshold up to 2^20 has it.
    """
    scale = ThresholdedGaussianMechanism(noise_multiplier, 1.0).scale(adjacency)
    law = NormalDist()
    single = ((j, -math.expm1(math.log1p(-failure) / j)) for j in range(1, max_items + 1))
    ideal = max(1.0 / math.sqrt(j) - scale * law.inv_cdf(chance) for j, chance in single)
    threshold = max(1, math.floor((ideal + grid_step(scale)) / _THRESHOLD_STEP)) * _THRESHOLD_STEP
    while threshold <= LARGEST:
        if ThresholdedGaussianMechanism(noise_multiplier, threshold).chance_alone(max_items, adjacency) <= failure:
            return threshold
        threshold += _THRESHOLD_STEP
    raise fail("delta", f"one that a threshold up to {LARGEST:g} gives", failure, "Ask for less noise.")


_RULES = (UnitWords, UnitPairs)


@dataclass(frozen=True, slots=True)
class WordRelease:
    """How words or pairs are released, once: what a unit casts, noise, threshold and neighbouring relation.

    Formal guarantees:
      - `event` bounds the privacy loss of one `release`, given everything that was released before; it is computed
        from what runs.

    Attributes:
      rule: what a unit casts.
      mechanism: adds the noise; holds the threshold.
      adjacency: the neighbouring relation all of it is stated under.

    Raises:
      ConfigurationError: a part of another class, or parts that do not fit together.
    """

    rule: UnitWords | UnitPairs
    mechanism: ThresholdedGaussianMechanism
    adjacency: Adjacency

    def __post_init__(self) -> None:
        check_adjacency(self.adjacency)
        for name, kinds in (("rule", _RULES), ("mechanism", (ThresholdedGaussianMechanism,))):
            if type(getattr(self, name)) not in kinds:  # what looks like one can do anything
                expected = f"one of {[kind.__name__ for kind in kinds]}, which a proof covers"
                raise fail(name, expected, type(getattr(self, name)).__name__)
        _ = self.event

    @property
    def event(self) -> Event:
        """What one release costs."""
        return self.mechanism.event(self.rule.max_words, self.adjacency)

    @property
    def failure(self) -> float:
        """The chance that something of one unit alone is released: the part of delta that the threshold takes."""
        return self.mechanism.chance_alone(self.rule.max_words, self.adjacency)

    @property
    def scale(self) -> float:
        """Standard deviation of the noise on each sum of weights."""
        return self.mechanism.scale(self.adjacency)

    @property
    def implementation_delta(self) -> float:
        """Declared gap between ideal and drawn noise, for any number of words that a machine can hold."""
        return GaussianMechanism(self.mechanism.noise_multiplier).implementation_delta(MOST_COORDINATES)

    def found_from(self, confidence: float = 0.95) -> int:
        """Returns how many units must cast an item, among `max_words` each, to release it with this probability.

        Args:
          confidence: in (0, 1).

        Raises:
          ConfigurationError: `confidence` out of range.
        """
        wanted = check_real("confidence", confidence, low=0.0, high=1.0, low_open=True, high_open=True)
        needed = self.mechanism.threshold + self.scale * NormalDist().inv_cdf(wanted)
        return max(1, math.ceil(needed * WEIGHT_STEPS / weight_of(self.rule.max_words)))

    def check_known(self, known: PublicWords | Sequence[str]) -> None:
        """Refuses another ranking than the declared one.

        Args:
          known: as for `release`.

        Raises:
          ConfigurationError: it is another one.
        """
        rule = self.rule
        if isinstance(rule, UnitWords) and getattr(known, "digest", None) != rule.public_words:
            raise fail("public_words", f"the ranking {rule.public_words}", getattr(known, "digest", None))

    def for_pairs(self) -> WordRelease:
        """Returns the release of pairs of these words: the same noise, threshold and number of each unit."""
        return WordRelease(UnitPairs(self.rule.name, self.rule.max_words), self.mechanism, self.adjacency)

    def release(
        self,
        units: Iterable[Iterable[Mapping[str, Any]]],
        known: Any,
        *,
        rng: SecureRandom,
        gone: frozenset[str] = frozenset(),
    ) -> tuple[Weight, ...]:
        """Adds the weights up, adds the noise and cuts at the threshold.

        Args:
          units: the records of each unit; private.
          known: what the rule looks at besides: public words, or words that were released before.
          rng: source of noise.
          gone: words that were released before, which no unit casts again.

        Raises:
          ConfigurationError: another public ranking than the declared one.
        """
        self.check_known(known)
        return self.mechanism.release(self.weights(units, known, gone), adjacency=self.adjacency, rng=rng)

    def weights(
        self, units: Iterable[Iterable[Mapping[str, Any]]], known: Any, gone: frozenset[str] = frozenset()
    ) -> Counter[str]:
        """Returns the sum of the weights of each item, in steps: private until `release` has added noise.

        Args:
          units: as for `release`.
          known: as for `release`.
          gone: as for `release`.
        """
        weights = Counter[str]()
        given: Any = frozenset(known) if isinstance(self.rule, UnitPairs) else known
        for records in units:
            cast = self.rule.of(records, given, gone)
            for item in cast:
                weights[item] += weight_of(len(cast))
        return weights

    def to_dict(self) -> dict[str, Any]:
        """Returns the public parameters, for plans and reports."""
        return {
            "rule": self.rule.to_dict(),
            "mechanism": self.mechanism.to_dict(),
            "adjacency": self.adjacency,
            "l2_sensitivity": l2_sensitivity(self.adjacency),
            "scale": self.scale,
            "failure": self.failure,
        }


def word_release(shown: Mapping[str, Any]) -> WordRelease:
    """Returns the plan that `WordRelease.to_dict` showed, which shows itself exactly as `shown`.

    Raises:
      ConfigurationError: parameters out of range, or numbers that do not go together.
      LookupError, TypeError, AttributeError: `shown` has another form.
    """
    rule, mechanism = shown["rule"], shown["mechanism"]
    if rule["kind"] == UnitPairs.kind:
        made: UnitWords | UnitPairs = UnitPairs(rule["field"], rule["max_values"])
    else:
        made = UnitWords(rule["field"], rule["max_values"], tuple(rule["denied"]), rule["public_words"])
    plan = WordRelease(
        made, ThresholdedGaussianMechanism(mechanism["noise_multiplier"], mechanism["threshold"]), shown["adjacency"]
    )
    if canonical_json(plan.to_dict()) != canonical_json(dict(shown)):
        raise fail("release", f"as its parts show it: {plan.to_dict()}", dict(shown))
    return plan
