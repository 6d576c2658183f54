"""Reads the values, public keywords or topic that a unit counts for, and bounds what one unit adds to the counts."""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias, final

from langchain_dpicl.privacy._validate import Adjacency, check_adjacency, check_int, fail
from langchain_dpicl.privacy.extensions.redeclared import forms_of, normalized
from langchain_dpicl.privacy.ledger.amounts import PRINTABLE, check_name, is_name
from langchain_dpicl.privacy.mechanisms.bounded import ClosedClass

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
        if not isinstance(self.fold_case, bool):
            raise fail("fold_case", "True or False", self.fold_case)
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
    """Returns the words of a text in the form in which they are compared: NFKC, upper and lower case made one.

    A word is a run of letters, digits and the marks on them; everything else stands between words.

    >>> words_of("My CARD-holder\u2019s card")
    ['my', 'card', 'holder', 's', 'card']
    """
    if text.isascii():
        return _ASCII_WORDS.findall(text.lower())
    form = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return "".join(letter if _is_of_a_word(letter) else " " for letter in form).split()


def _is_of_a_word(letter: str) -> bool:
    return letter.isalnum() or unicodedata.category(letter).startswith("M")


class _KeywordReader:
    """Finds declared keywords in a text; it holds public values only."""

    __slots__ = ("_keywords", "_lengths", "place")

    def __init__(self, keywords: Iterable[str]) -> None:
        self._keywords: dict[Words, str] = {}
        for place, keyword in enumerate(keywords):
            # A column of records passed by mistake must not be printed: errors show places and numbers only.
            if not is_name(keyword):
                raise fail("vocabulary", f"{PRINTABLE}, each of them", f"another at place {place}")
            words = tuple(words_of(keyword))
            if not 1 <= len(words) <= MOST_WORDS:
                raise fail("vocabulary", f"keywords of 1 to {MOST_WORDS} words", f"{len(words)} at place {place}")
            if words in self._keywords:
                advice = "Keywords that differ in case or punctuation alone are one: declare it once."
                alike = [list(self._keywords).index(words), place]
                raise fail("vocabulary", "keywords that read differently", f"the same at places {alike}", advice)
            self._keywords[words] = keyword
        if not 1 <= len(self._keywords) <= MOST_KEYWORDS:
            raise fail("vocabulary", f"1 to {MOST_KEYWORDS} keywords", f"{len(self._keywords)} of them")
        self._lengths = sorted({len(words) for words in self._keywords})
        self.place = {keyword: place for place, keyword in enumerate(self._keywords.values())}

    @property
    def keywords(self) -> tuple[str, ...]:
        """The keywords as they were declared, in their order."""
        return tuple(self._keywords.values())

    def found(self, text: Any) -> Iterator[str]:
        """Yields each occurrence of a keyword; none in what is no text."""
        words = words_of(text) if isinstance(text, str) else []
        for length in self._lengths:
            for start in range(len(words) - length + 1):
                keyword = self._keywords.get(tuple(words[start : start + length]))
                if keyword is not None:
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
