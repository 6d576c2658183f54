"""Noisy counts of the values, keywords or topics of units, and the split of units by released topics.

What is not declared may be released only because others hold it too: the noisy count of what one unit alone holds
passes the threshold with a probability that is charged. Proof: docs/proofs/value-counts.md.
"""

from __future__ import annotations

import math
import re
import threading
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import ROUND_CEILING, Context, Decimal
from fractions import Fraction
from typing import Any, ClassVar, NoReturn, TypeAlias, final

import numpy as np

from langchain_dpicl._templates import is_unspaced
from langchain_dpicl.exceptions import PrivateAccessError, RecordError
from langchain_dpicl.privacy._validate import (
    PRINTABLE,
    Adjacency,
    check_adjacency,
    check_flag,
    check_int,
    check_name,
    check_real,
    fail,
    in_unicode_14,
    is_name,
)
from langchain_dpicl.privacy.accounting.events import (
    ComposedEvent,
    Event,
    FailureEvent,
    GaussianEvent,
    PureEvent,
    canonical_json,
)
from langchain_dpicl.privacy.extensions.redeclared import KEYWORDS, NO_SPLIT, forms_of, normalized
from langchain_dpicl.privacy.ledger.tickets import Ticket
from langchain_dpicl.privacy.mechanisms.bounded import BoundedSum, ClosedClass, NamedPart, Sensitivity
from langchain_dpicl.privacy.mechanisms.randomness import SecureRandom
from langchain_dpicl.privacy.mechanisms.release_plan import GaussianMechanism
from langchain_dpicl.privacy.private_examples import (
    SPLIT_RULE,
    Declaration,
    OpenPool,
    Pool,
    PrivateExamples,
    Redeclare,
    make_declaration,
)

UNITS = "units"
"""The one value of every unit, if units are counted instead of values of a field."""


class _ValueLimit(ClosedClass, is_base=True):
    """The sensitivity of counts of values, if a unit has at most `max_values` distinct values."""

    __slots__ = ()
    max_values: int

    def l1_sensitivity(self, adjacency: Adjacency) -> int:
        """Returns how far the counts of all values move between neighbours, added up.

        Args:
          adjacency: neighbouring relation.
        """
        return self.max_values * (1 if check_adjacency(adjacency) == "add_remove" else 2)

    def l2_sensitivity(self, adjacency: Adjacency) -> float:
        """Returns how far they move as a vector, in L2, rounded up: each count by 1 at most.

        Args:
          adjacency: neighbouring relation.
        """
        square = self.l1_sensitivity(adjacency)
        root = math.sqrt(square)
        return root if math.isqrt(square) ** 2 == square else math.nextafter(root, math.inf)


@final
@dataclass(frozen=True, slots=True)
class UnitValues(_ValueLimit):
    """At most `max_values` distinct values of a unit: its most frequent ones, ties going to the one that came first.

    Formal guarantees:
      - `of` looks at one unit alone and returns distinct values, at most `max_values` of them.
      - Hence a unit that comes or goes moves the counts of values by at most `max_values` in L1, each by at most 1; one
        that is replaced, by at most twice that in L1.
      - With `declared` values, what is not declared counts nothing; without, every text that shows anything is a value.

    Args:
      name: field of the records; None: every unit that has a record stands for `UNITS`, and nothing else.
      max_values: most values of one unit, public.
      declared: the values that may occur, public; None: they are not known.
      fold_case: whether upper and lower case are made one.

    Raises:
      ConfigurationError: a parameter out of range, or two declared values that are one by the rule.

    Source: docs/proofs/value-counts.md.
    """

    name: str | None
    max_values: int = 1
    declared: tuple[str, ...] | None = None
    fold_case: bool = True
    _known: Mapping[str, str] = field(init=False, repr=False, compare=False)
    kind: ClassVar[str] = "unit_values"

    def __post_init__(self) -> None:
        check_int("max_values", self.max_values, low=1)
        check_flag("fold_case", self.fold_case)
        if self.name is None and (self.declared is not None or self.max_values != 1):
            raise fail("field", "a name beside values or max_values", self.name)
        if self.name is not None:
            check_name("field", self.name)
        object.__setattr__(self, "_known", self._forms())

    def _forms(self) -> dict[str, str]:
        """Returns the declared values by their form."""
        if self.declared is None:
            return {}
        known = forms_of(self.declared, fold_case=self.fold_case)
        object.__setattr__(self, "declared", tuple(known.values()))
        return known

    def of(self, records: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
        """Returns the values of one unit: declared ones as they are declared, others in their form.

        Args:
          records: of the unit; none, as of a unit that was removed, have no value.
        """
        if self.name is None:
            return (UNITS,) if any(True for _ in records) else ()
        counts: Counter[str] = Counter()
        for record in records:
            form = normalized(record.get(self.name) or "", fold_case=self.fold_case)
            value = form if self.declared is None else self._known.get(form, "")
            if value:
                counts[value] += 1
        return tuple(value for value, _ in counts.most_common(self.max_values))

    def to_dict(self) -> dict[str, Any]:
        """Returns the public parameters, for reports."""
        return {
            "field": self.name,
            "max_values": self.max_values,
            "values": None if self.declared is None else list(self.declared),
            "fold_case": self.fold_case,
        }


Words: TypeAlias = tuple[str, ...]

MOST_KEYWORDS = 20_000
"""Keywords of one vocabulary: a report shows them all."""
MOST_WORDS = 8
"""Words of one keyword."""

_ASCII_WORDS = re.compile(r"[a-z0-9]+")


def words_of(text: str) -> list[str]:
    """Returns the words of a text in the form in which they are compared: in Unicode 14, NFKC, case folded.

    A word is a run of letters, digits and the marks on them; everything else stands between words.

    >>> words_of("My CARD-holder\u2019s card")
    ['my', 'card', 'holder', 's', 'card']
    """
    if text.isascii():
        return _ASCII_WORDS.findall(text.lower())
    form = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", in_unicode_14(text)).casefold())
    return "".join(letter if _is_of_a_word(letter) else " " for letter in form).split()


def _is_of_a_word(letter: str) -> bool:
    return letter.isalnum() or unicodedata.category(letter).startswith("M")


def _pieces_of(text: str) -> list[str]:
    """Returns the words of a text, in which letters of scripts without spaces stand alone, each with its marks."""
    words = words_of(text)
    if text.isascii() or not any(map(is_unspaced, "".join(words))):
        return words
    pieces: list[str] = []
    for word in words:
        for place, letter in enumerate(word):
            is_mark = unicodedata.category(letter).startswith("M")
            if place and (is_mark or not (is_unspaced(letter) or is_unspaced(pieces[-1]))):
                pieces[-1] += letter
            else:
                pieces.append(letter)
    return pieces


class _KeywordReader:
    """Finds declared keywords in a text, inside its clauses where a script writes no spaces; holds public values."""

    __slots__ = ("_keywords", "_lengths", "place")

    def __init__(self, keywords: Iterable[str]) -> None:
        self._keywords: dict[Words, str] = {}
        for place, keyword in enumerate(keywords):
            # A column of records passed by mistake must not be printed: errors show places and numbers only.
            if not is_name(keyword):
                raise fail("vocabulary", f"{PRINTABLE}, each of them", f"another at place {place}")
            length, words = len(words_of(keyword)), tuple(_pieces_of(keyword))
            if not 1 <= length <= MOST_WORDS:
                raise fail("vocabulary", f"keywords of 1 to {MOST_WORDS} words", f"{length} at place {place}")
            if words in self._keywords:
                advice = (
                    "Keywords that differ only in case, in punctuation, or in blanks beside letters of scripts without "
                    "spaces, are one: declare it once."
                )
                alike = [list(self._keywords).index(words), place]
                raise fail("vocabulary", "keywords that read differently", f"the same at places {alike}", advice)
            self._keywords[words] = keyword
        if not 1 <= len(self._keywords) <= MOST_KEYWORDS:
            raise fail("vocabulary", f"1 to {MOST_KEYWORDS} keywords", f"{len(self._keywords)} of them")
        self._lengths: dict[str, set[int]] = {}
        for words in self._keywords:
            self._lengths.setdefault(words[0], set()).add(len(words))
        self.place = {keyword: place for place, keyword in enumerate(self._keywords.values())}

    @property
    def keywords(self) -> tuple[str, ...]:
        """The keywords as they were declared, in their order."""
        return tuple(self._keywords.values())

    def found(self, text: Any) -> Iterator[str]:
        """Yields each occurrence of a keyword; none in what is no text."""
        words = _pieces_of(text) if isinstance(text, str) else []
        for start, first in enumerate(words):
            for length in self._lengths.get(first, ()):
                # A slice at the end of the text may be shorter, and a keyword by itself.
                keyword = self._keywords.get(tuple(words[start : start + length]))
                if keyword is not None and start + length <= len(words):
                    yield keyword


@final
@dataclass(frozen=True, slots=True)
class UnitKeywords(_ValueLimit):
    """At most `max_values` keywords of a public vocabulary that occur in a unit's texts.

    They are its most frequent ones; of equally frequent ones, those declared first.

    Formal guarantees:
      - `of` looks at one unit alone and returns distinct declared keywords, at most `max_values` of them.
      - Hence a unit that comes or goes moves the counts of all keywords by at most `max_values` in L1 and by at most
        the root of `max_values` in L2; one that is replaced, by at most twice that in L1 and sqrt(2) times that in L2.

    Args:
      name: field of the records that holds the text.
      max_values: most keywords of one unit, public.
      declared: the vocabulary, public: distinct keywords of 1 to 8 words, at most 20,000 of them.

    Raises:
      ConfigurationError: a parameter out of range, or two keywords that read alike.

    Source: docs/proofs/value-counts.md, section "Keywords".
    """

    name: str
    max_values: int
    declared: tuple[str, ...]
    _reader: _KeywordReader = field(init=False, repr=False, compare=False)
    kind: ClassVar[str] = "unit_keywords"

    def __post_init__(self) -> None:
        check_name("field", self.name)
        check_int("keywords_per_unit", self.max_values, low=1)
        if isinstance(self.declared, str) or not isinstance(self.declared, Iterable):
            raise fail("vocabulary", "a sequence of texts", type(self.declared).__name__)
        object.__setattr__(self, "_reader", _KeywordReader(self.declared))
        object.__setattr__(self, "declared", self._reader.keywords)

    def of(self, records: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
        """Returns the keywords of one unit, as they are declared.

        Args:
          records: of the unit; none, as of a unit that was removed, have no keyword.
        """
        counts: Counter[str] = Counter()
        for record in records:
            counts.update(self._reader.found(record.get(self.name)))
        if len(counts) <= self.max_values:
            return tuple(counts)
        ranked = sorted(counts, key=lambda keyword: (-counts[keyword], self._reader.place[keyword]))
        return tuple(ranked[: self.max_values])

    def to_dict(self) -> dict[str, Any]:
        """Returns the public parameters, for reports."""
        return {
            "kind": self.kind,
            "field": self.name,
            "max_values": self.max_values,
            "values": list(self.declared),
        }


@final
@dataclass(frozen=True, slots=True)
class TopicSplit:
    """Which of some released topics a unit belongs to: the first one that occurs in its texts, or none.

    Formal guarantees:
      - `of` looks at one unit and at the released topics alone, and gives at most one topic: topics split the units.

    Args:
      text_key: field of the records that holds the text.
      topic_key: field that is to hold the topic.
      topics: released, in the order in which they are looked for.
      labels: the public name of each topic's place, as declared before the topics were known.

    Raises:
      ConfigurationError: there are more topics than places, or they are no vocabulary.
    """

    text_key: str
    topic_key: str
    topics: tuple[str, ...]
    labels: tuple[str, ...]
    _reader: _KeywordReader = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_reader", _KeywordReader(self.topics))
        if len(self.topics) > len(self.labels):
            raise fail("topics", f"at most {len(self.labels)}", len(self.topics))

    def of(self, unit: Iterable[Mapping[str, str]]) -> tuple[tuple[dict[str, str], ...], str]:
        """Returns a unit's records that hold its topic, with it, and the label; none and "" where it has no topic.

        Args:
          unit: its records.
        """
        read = [(record, frozenset(self._reader.found(record.get(self.text_key)))) for record in unit]
        of_unit: frozenset[str] = frozenset().union(*(keywords for _, keywords in read))
        for topic, label in zip(self.topics, self.labels, strict=False):
            if topic in of_unit:
                return tuple({**record, self.topic_key: topic} for record, keywords in read if topic in keywords), label
        return (), ""


Count: TypeAlias = tuple[str, int]
"""A value and how many units hold it, noise included."""

COUNT_TEMPLATE = "counts"
"""The ticket template of one release of counts."""
MAX_THRESHOLD = 2**53
MAX_SCALE = 2**40
"""Noise of this scale is beyond 2^53, which no count may be, with a probability below e^-8000."""

# Parts of a count in which the scale of the noise is given.
_STEPS = 2**20
# The scale is rounded up by more than the rounding of the event can take away.
_ROUND_UP = 1 + Fraction(1, 2**50)
# Above the roundings of the exponential below, whose argument is 800 at most where the result is no zero.
_TAIL_ROUNDING = 1.0 + 1e-12


@final
@dataclass(frozen=True, slots=True)
class DiscreteLaplaceMechanism(NamedPart):
    """Adds two-sided geometric noise to whole counts; with a threshold, keeps what reaches it.

    Formal guarantees:
      - Noise z has probability proportional to exp(-|z| / scale), exactly, for ideal coins; scale is at least
        `noise_multiplier` times the L1 sensitivity. `implementation_delta` is 0.
      - Counts of declared values are charged as `PureEvent(1 / noise_multiplier)`.
      - With `threshold`, a value that nobody holds is never released, and one that a single unit holds is with a
        probability below `chance_alone`; `event` adds `FailureEvent(max_values * chance_alone)`.

    Args:
      noise_multiplier: scale of the noise over the L1 sensitivity, in [1e-9, 1e12].
      threshold: least noisy count that is released of values that are not declared, from 2; None: they are declared.

    Raises:
      ConfigurationError: a parameter out of range.

    Source: Ghosh, Roughgarden and Sundararajan (2009), the geometric mechanism; Korolova et al. (2009), the threshold;
      docs/proofs/value-counts.md.
    """

    noise_multiplier: float
    threshold: int | None = None
    name: ClassVar[str] = "discrete_laplace"

    def __post_init__(self) -> None:
        checked = check_real("noise_multiplier", self.noise_multiplier, low=1e-9, high=1e12)
        object.__setattr__(self, "noise_multiplier", checked)
        if self.threshold is not None:
            check_int("threshold", self.threshold, low=2, high=MAX_THRESHOLD)

    def scale(self, l1_sensitivity: int) -> Fraction:
        """Returns the scale of the noise in counts: a multiple of 2^-20, rounded up.

        Args:
          l1_sensitivity: of the counts.
        """
        steps = Fraction(self.noise_multiplier) * l1_sensitivity * _ROUND_UP * _STEPS
        return Fraction(max(1, math.ceil(steps)), _STEPS)

    def chance_alone(self, l1_sensitivity: int) -> float:
        """Returns the chance that a count of 1 reaches the threshold, rounded up to 7 digits.

        Args:
          l1_sensitivity: of the counts.

        Raises:
          ConfigurationError: there is no threshold.
        """
        if self.threshold is None:
            raise fail("threshold", "a whole number for values that are not declared", self.threshold)
        return tail_bound(self.scale(l1_sensitivity), self.threshold - 1)

    def event(self, rule: UnitValues | UnitKeywords, adjacency: Adjacency) -> Event:
        """Returns what one release costs.

        Args:
          rule: what a unit stands for.
          adjacency: neighbouring relation.

        Raises:
          ConfigurationError: the threshold does not go with the values, or is passed by anybody.
        """
        if (self.threshold is None) == (rule.declared is None and rule.name is not None):
            raise fail("threshold", "one for values that are not declared, and none for others", self.threshold)
        noisy = PureEvent(1.0 / self.noise_multiplier)
        if self.threshold is None:
            return noisy
        alone = round_up_to_7_digits(rule.max_values * self.chance_alone(rule.l1_sensitivity(adjacency)))
        if alone >= 1.0:
            raise fail("threshold", "one that a value of one unit hardly ever passes", self.threshold, "Raise it.")
        return ComposedEvent((noisy, FailureEvent(alone)))

    def release(
        self, counts: Mapping[str, int], *, declared: Iterable[str] | None, l1_sensitivity: int, rng: SecureRandom
    ) -> tuple[Count, ...]:
        """Returns values with noisy counts, the largest first; declared ones all, and in their order.

        Args:
          counts: how many units hold each value; private.
          declared: the declared values, public; None: those of `counts` that reach the threshold.
          l1_sensitivity: of the counts.
          rng: source of noise.
        """
        scale = self.scale(l1_sensitivity)

        def noisy(count: int) -> int:
            # A multiple of the numerator's decay, floored: geometric at the quotient (Canonne, Kamath, Steinke 2020).
            up, down = (rng.geometric(scale.numerator) // scale.denominator for _ in range(2))
            return count + up - down

        if declared is not None:
            return tuple((value, noisy(counts.get(value, 0))) for value in declared)
        if self.threshold is None:
            return ()
        drawn = ((value, noisy(count)) for value, count in counts.items() if count > 0)
        found = [(value, count) for value, count in drawn if count >= self.threshold]
        # Sorted by what is released: the order in which records came would reveal them.
        return tuple(sorted(found, key=lambda pair: (-pair[1], pair[0])))


def tail_bound(scale: Fraction, least: int) -> float:
    """Returns P[z >= least] of the noise for least >= 0: exp(-least / scale) / (1 + exp(-1 / scale)), rounded up.

    Args:
      scale: of the noise.
      least: in whole counts.
    """
    rate = float(1 / scale)
    return round_up_to_7_digits(math.exp(-least * rate) / (1.0 + math.exp(-rate)) * _TAIL_ROUNDING)


def round_up_to_7_digits(value: float) -> float:
    """Returns a positive number at 7 digits, so that every machine says the same of what it computed; never 0."""
    short = Context(prec=7, rounding=ROUND_CEILING).create_decimal(Decimal(max(value, 1e-200)))
    return float(short)


@final
@dataclass(frozen=True, slots=True)
class GaussianCountMechanism(NamedPart):
    """Adds normal noise to the counts of declared values and rounds them to whole numbers.

    Formal guarantees:
      - The counts are those of `GaussianMechanism` on the vector of all counts, at their L2 sensitivity, rounded: a
        post-processing. The event is `GaussianEvent(noise_multiplier)`.
      - Every declared value gets a count, whether anybody holds it or not. Counts above 2^20 are cut to it first.

    Args:
      noise_multiplier: standard deviation of the noise over the L2 sensitivity, in [1e-9, 1e12].

    Raises:
      ConfigurationError: `noise_multiplier` out of range.

    Source: Balle and Wang (2018), Theorem 8; docs/proofs/value-counts.md, section "Keywords".
    """

    noise_multiplier: float
    threshold: ClassVar[None] = None
    name: ClassVar[str] = "gaussian"

    def __post_init__(self) -> None:
        checked = check_real("noise_multiplier", self.noise_multiplier, low=1e-9, high=1e12)
        object.__setattr__(self, "noise_multiplier", checked)

    def scale(self, rule: _ValueLimit, adjacency: Adjacency) -> Fraction:
        """Returns the standard deviation of the noise, in counts.

        Args:
          rule: what a unit stands for.
          adjacency: neighbouring relation.
        """
        return Fraction(self.noise_multiplier * rule.l2_sensitivity(adjacency))

    def event(self, declared: tuple[str, ...] | None) -> GaussianEvent:
        """Returns what one release costs.

        Args:
          declared: the values that get a count.

        Raises:
          ConfigurationError: they are not declared: Gaussian noise has no threshold here.
        """
        if declared is None:
            raise fail("values", "declared ones, of which every one gets a count", declared)
        return GaussianEvent(self.noise_multiplier)

    def implementation_delta(self, num_values: int) -> float:
        """Returns what one release may add to delta, beyond the ideal mechanism.

        Args:
          num_values: how many values are declared.
        """
        return GaussianMechanism(self.noise_multiplier).implementation_delta(check_int("num_values", num_values, low=1))

    def release(
        self,
        counts: Mapping[str, int],
        *,
        declared: Iterable[str],
        rule: _ValueLimit,
        adjacency: Adjacency,
        rng: SecureRandom,
    ) -> tuple[tuple[str, int], ...]:
        """Returns the declared values with noisy counts, in their order.

        Args:
          counts: how many units hold each value; private.
          declared: the declared values, public.
          rule: what a unit stands for; holds the sensitivity.
          adjacency: neighbouring relation.
          rng: source of noise.
        """
        names = tuple(declared)
        held = np.array([counts.get(name, 0) for name in names], dtype=np.float64)
        moved = Sensitivity(l2=rule.l2_sensitivity(adjacency), range=None)
        released = GaussianMechanism(self.noise_multiplier).release(
            BoundedSum(held, moved, "units", adjacency), rng=rng
        )
        noisy = () if released.values is None else released.values.tolist()
        return tuple((name, math.floor(count + 0.5)) for name, count in zip(names, noisy, strict=True))


_RULES = (UnitValues, UnitKeywords)
_MECHANISMS = (DiscreteLaplaceMechanism, GaussianCountMechanism)


@dataclass(frozen=True, slots=True)
class CountPlan:
    """How counts of values are released, once: what a unit stands for, noise, threshold and neighbouring relation.

    Formal guarantees:
      - `event` bounds the privacy loss of one `release`; it is computed from what runs.

    Attributes:
      rule: what a unit stands for; holds the sensitivity.
      mechanism: adds the noise; holds the threshold.
      adjacency: the neighbouring relation all of it is stated under.

    Raises:
      ConfigurationError: a part of another class, or parts that do not fit together.
    """

    rule: UnitValues | UnitKeywords
    mechanism: DiscreteLaplaceMechanism | GaussianCountMechanism
    adjacency: Adjacency

    def __post_init__(self) -> None:
        check_adjacency(self.adjacency)
        for name, kinds in (("rule", _RULES), ("mechanism", _MECHANISMS)):
            if type(getattr(self, name)) not in kinds:  # what looks like one can do anything
                expected = f"one of {[kind.__name__ for kind in kinds]}, which a proof covers"
                raise fail(name, expected, type(getattr(self, name)).__name__)
        _ = self.event
        if self.scale > MAX_SCALE:
            expected = f"noise of a scale up to {MAX_SCALE} counts"
            raise fail(
                "noise_multiplier, max_values", expected, (self.mechanism.noise_multiplier, self.rule.max_values)
            )

    @property
    def l1_sensitivity(self) -> int:
        """How far all counts together move between neighbours."""
        return self.rule.l1_sensitivity(self.adjacency)

    @property
    def scale(self) -> Fraction:
        """Scale of the noise, in counts; of Gaussian noise, its standard deviation."""
        if isinstance(self.mechanism, GaussianCountMechanism):
            return self.mechanism.scale(self.rule, self.adjacency)
        return self.mechanism.scale(self.l1_sensitivity)

    @property
    def deviation(self) -> float:
        """Standard deviation of the noise, in counts."""
        scale = float(self.scale)
        if isinstance(self.mechanism, GaussianCountMechanism):
            return scale
        rate = 1.0 / scale
        return math.sqrt(2.0 * math.exp(-rate)) / -math.expm1(-rate)

    @property
    def event(self) -> Event:
        """What one release costs."""
        if isinstance(self.mechanism, GaussianCountMechanism):
            return self.mechanism.event(self.rule.declared)
        return self.mechanism.event(self.rule, self.adjacency)

    @property
    def implementation_delta(self) -> float:
        """The declared gap of the noise: none where its coins are exact."""
        if isinstance(self.mechanism, GaussianCountMechanism):
            return self.mechanism.implementation_delta(len(self.rule.declared or ()))
        return 0.0

    def tickets(self, template: str = COUNT_TEMPLATE) -> tuple[Ticket, ...]:
        """Returns the one ticket of the share; unburnt, it can be handed back.

        Args:
          template: its public name.
        """
        return (Ticket(template=template, event=self.event, refundable=True),)

    def release(self, units: Iterable[Iterable[Mapping[str, Any]]], *, rng: SecureRandom) -> tuple[Count, ...]:
        """Counts and adds the noise.

        Args:
          units: the records of each unit; private.
          rng: source of noise.
        """
        counts: Counter[str] = Counter()
        for records in units:
            counts.update(self.rule.of(records))
        declared = (UNITS,) if self.rule.name is None else self.rule.declared
        if isinstance(self.mechanism, GaussianCountMechanism):
            shape: Any = {"rule": self.rule, "adjacency": self.adjacency}
            return self.mechanism.release(counts, declared=declared or (), rng=rng, **shape)
        return self.mechanism.release(counts, declared=declared, l1_sensitivity=self.l1_sensitivity, rng=rng)

    def to_dict(self) -> dict[str, Any]:
        """Returns the public parameters, for plans and reports."""
        is_gaussian = isinstance(self.mechanism, GaussianCountMechanism)
        return {
            "rule": self.rule.to_dict(),
            "mechanism": self.mechanism.to_dict(),
            "adjacency": self.adjacency,
            "l1_sensitivity": self.l1_sensitivity,
            **({"l2_sensitivity": self.rule.l2_sensitivity(self.adjacency)} if is_gaussian else {}),
            "scale": float(self.scale),
        }


def count_release(shown: Mapping[str, Any]) -> CountPlan:
    """Returns the plan that `CountPlan.to_dict` showed, which shows itself exactly as `shown`.

    Raises:
      ConfigurationError: another mechanism, or parameters that do not fit together.
      LookupError, TypeError: what is shown is of another form.
    """
    for name in ("rule", "mechanism"):
        if not isinstance(shown[name], Mapping):
            raise TypeError(name)
    plan = CountPlan(_rule(shown["rule"]), _mechanism(shown["mechanism"]), shown["adjacency"])
    if canonical_json(plan.to_dict()) != canonical_json(dict(shown)):
        raise fail("release", f"as its parts show it: {plan.to_dict()}", dict(shown))
    return plan


def _rule(shown: Mapping[str, Any]) -> UnitValues | UnitKeywords:
    values = shown["values"]
    if shown.get("kind") == UnitKeywords.kind:
        return UnitKeywords(shown["field"], shown["max_values"], tuple(values))
    declared = None if values is None else tuple(values)
    return UnitValues(shown["field"], shown["max_values"], declared, shown["fold_case"])


def _mechanism(shown: Mapping[str, Any]) -> DiscreteLaplaceMechanism | GaussianCountMechanism:
    if shown.get("name") == GaussianCountMechanism.name:
        return GaussianCountMechanism(shown["noise_multiplier"])
    return DiscreteLaplaceMechanism(shown["noise_multiplier"], shown["threshold"])


def noise_margin(scale: Fraction, confidence: float) -> int:
    """Returns the least m with P[noise > m] at most 1 - confidence.

    Args:
      scale: of the noise, in counts.
      confidence: in (0, 1).

    Raises:
      ConfigurationError: `confidence` out of range.
    """
    wrong = 1.0 - check_real("confidence", confidence, low=0.0, high=1.0, low_open=True, high_open=True)
    return least_count(scale, wrong) - 1


def least_count(scale: Fraction, chance: float) -> int:
    """Returns the least t >= 1 with P[noise >= t] at most `chance`."""
    wide = float(scale)
    least = max(1, math.floor(-wide * math.log(chance * (1.0 + math.exp(-1.0 / wide)))) - 1)
    while tail_bound(scale, least) > chance:
        least += 1
    return least


_NAMED = ", topics named"


class DeferredPools:
    """Opens the pool of all units at any time, and those of topics once the topics are assigned.

    Formal guarantees:
      - `assign` accepts one split only: the pool of a label holds the same units whenever it is opened.
    """

    __slots__ = ("_lock", "_opened", "_redeclare", "_split", "open_all")

    def __init__(self, open_all: OpenPool, redeclare: Redeclare) -> None:
        self.open_all, self._redeclare = open_all, redeclare
        self._lock = threading.Lock()
        self._split: TopicSplit | None = None
        self._opened: OpenPool | None = None

    def __call__(self, label: str | None) -> Pool:
        """Opens the pool of a label, or of all units; refuses labels before topics are assigned."""
        if label is None:
            return self.open_all(None)
        if self._opened is None:
            raise PrivateAccessError("topics: expected released ones, found none yet. Release them first.")
        return self._opened(label)

    def assign(self, split: TopicSplit) -> None:
        """Splits the units by released topics, once; the same split again changes nothing, another is refused."""
        with self._lock:
            if self._split is None:
                self._opened = self._redeclare(split.labels, split.of)
                if self._opened is None:
                    raise RecordError(NO_SPLIT)
                self._split = split
            elif self._split != split:
                raise PrivateAccessError("topics: expected those by which the units are split already, found others.")


class TopicExamples(PrivateExamples):
    """The units of other examples, split by topics that are named once, later. Made by `split_by_topics`.

    Formal guarantees:
      - As for `PrivateExamples.redeclared`: the same units on the same ledger, permanently.
      - The places of the topics are declared before any topic is known, so what is released from them can be priced
        before a record is read. Until topics are named, all units can be read together, those of a place by nobody.
      - A unit belongs to one place at most, by a rule that looks at it and at the named topics alone, and topics are
        named once: other ones are refused, here and, where the ledger is durable, in every process.
      - Of a range of a stream each object is of one run, which is one ticket of one process and has topics of its own.
    """

    __slots__ = ()

    @property
    def blocks(self) -> tuple[int, int] | None:
        """Those of the first declaration."""
        return None if self._root is None else self._root.blocks

    def check_delta(self, delta: float) -> None:
        """As the first declaration does, and for the places of the topics."""
        if self._root is not None:
            self._root.check_delta(delta)
        super().check_delta(delta)

    def redeclared(self, **declared: Any) -> NoReturn:  # noqa: ARG002  all are refused
        """Refuses: topics that are named later are no part of another declaration, which could hide two splits.

        Raises:
          ConfigurationError: always.
        """
        advice = "Call `redeclared` of the examples that were declared first."
        raise fail("private", "examples that are not split by topics", self.dataset_id, advice)

    def name_topics(self, topics: Iterable[str]) -> PrivateExamples:
        """Splits the units by released topics, once, and returns the declaration that says which they are.

        A unit belongs to the first of `topics` that occurs in its texts (`TopicSplit`), or to none; topic i has the
        i-th declared place. Bind what is returned: the ledger then refuses other topics for this split. Of a range it
        is the declaration without topics, which differ from run to run.

        Raises:
          ConfigurationError: the topics are no vocabulary of that size.
          PrivateAccessError: other topics were named before.
          RecordError: the units could not be split.
        """
        declared, late = self._declared, self._open
        if not isinstance(late, DeferredPools) or declared.label_key is None:
            raise fail("topics", "examples from `split_by_topics`", self.dataset_id)
        split = TopicSplit(declared.text_key, declared.label_key, tuple(topics), declared.labels)
        place = dict(zip(split.topics, split.labels, strict=False))
        sizes = dict(declared.public_size) if not isinstance(declared.public_size, int) else {}
        named = _declaration(
            self, declared.dataset_id + _NAMED, declared.label_key, {topic: sizes[place[topic]] for topic in place}
        )
        late.assign(split)
        if self.blocks is not None:
            return self

        def open_topic(topic: str | None) -> Pool:
            return late(None if topic is None else place[topic])

        with self._bond.lock:
            made = self._bond.by_declaration.get(named)
            if made is None:
                made = PrivateExamples.__new__(PrivateExamples)
                made._adopt(named, (open_topic, self._remove, self._redeclare), self._bond, self._root)  # noqa: SLF001
                self._bond.by_declaration[named] = made
        return made


def split_by_topics(
    private: PrivateExamples, *, dataset_id: str, topic_key: str, public_size: Mapping[str, int]
) -> TopicExamples:
    """Declares the same units again, split by topics that `TopicExamples.name_topics` names later.

    The same declaration again is the same object, with the topics that it has.

    Raises:
      ConfigurationError: a public argument is out of range, or the examples have labels.
    """
    if not isinstance(private, PrivateExamples):
        raise fail("private", "PrivateExamples", type(private).__name__)
    if dataset_id == private.dataset_id:
        raise fail("dataset_id", "another name than that of the first declaration", dataset_id)
    if private.label_key is not None:
        advice = "Topics split examples that are declared without labels."
        raise fail("private", "examples without labels", private.label_key, advice)
    if topic_key in private.fields:
        raise fail("topic_key", f"another field than {list(private.fields)}", topic_key)
    declared = _declaration(private, dataset_id, topic_key, public_size)
    _declaration(private, dataset_id + _NAMED, topic_key, public_size)  # its name fits, too
    bond = private._bond  # noqa: SLF001  its own family
    with bond.lock:
        made = bond.by_declaration.get(declared)
        if not isinstance(made, TopicExamples) or private.blocks is not None:
            made = TopicExamples.__new__(TopicExamples)
            late = DeferredPools(private._open, private._redeclare)  # noqa: SLF001
            sealed = (late, private._remove, private._redeclare)  # noqa: SLF001
            made._adopt(declared, sealed, bond, private._root or private)  # noqa: SLF001
            if private.blocks is not None:
                made._identity = private._identity  # noqa: SLF001  ledgers bind the stream
            else:
                bond.by_declaration[declared] = made
    return made


def _declaration(
    private: PrivateExamples, dataset_id: str, topic_key: str, public_size: Mapping[str, int]
) -> Declaration:
    old, root = private._declared, private._root or private  # noqa: SLF001  its own family
    if not isinstance(public_size, Mapping):
        raise fail("public_size", "a number by place of a topic", type(public_size).__name__)
    return make_declaration(
        dataset_id=dataset_id,
        public_size=public_size,
        text_key=old.text_key,
        label_key=topic_key,
        labels=tuple(public_size),
        unit_key=old.unit_key,
        fields=old.extra_fields,
        max_chars=old.max_chars,
        records_per_unit=old.records_per_unit,
        allow_large_delta=old.allow_large_delta,
        redeclared={"from": root.dataset_id, "fold_case": True, "rule": SPLIT_RULE, "by": KEYWORDS},
        stream=None if old.stream is None else old.stream.to_dict(),
    )


TOPIC_TEMPLATE = "topics: one noisy histogram of keywords"
"""The ticket template of the histogram."""
TOPIC_WORDS_TEMPLATE = "topics: words that many units write"
"""The ticket template of topics that are released words."""
WORDS_OF_TOPIC_TEMPLATE = "words of a topic"
"""The ticket template of the words of one topic."""
PAIRS_OF_TOPIC_TEMPLATE = "pairs of words of a topic"
"""The ticket template of the pairs that follow them."""
MOST_TOPICS = 1000
BY_COINS = frozenset({"poisson", "disjoint"})
"""Sampling methods that use no number of units, since the number in a topic is private."""


def places(num_topics: int) -> tuple[str, ...]:
    """Returns the declared places of so many topics, in order.

    Args:
      num_topics: at most 1,000.

    Raises:
      ConfigurationError: the number is out of range.

    >>> places(2)
    ('topic 1', 'topic 2')
    """
    check_int("num_topics", num_topics, low=1, high=MOST_TOPICS)
    return tuple(f"topic {place}" for place in range(1, num_topics + 1))
