"""Splits private examples by topics that are released after the split was declared and charged; its tickets."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from langchain_dpicl.exceptions import PrivateAccessError, RecordError
from langchain_dpicl.privacy._validate import check_int, fail
from langchain_dpicl.privacy.data.private_examples import OpenPool, Pool, PrivateExamples, Redeclare
from langchain_dpicl.privacy.data.units import SPLIT_RULE, Declaration, make_declaration
from langchain_dpicl.privacy.extensions.redeclared import KEYWORDS, NO_SPLIT
from langchain_dpicl.privacy.extensions.unit_values import TopicSplit

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
