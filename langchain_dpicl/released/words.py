"""Released words with their privacy report, as a value and as a JSON file."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from langchain_core.documents import Document

from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy._validate import check_real, fail
from langchain_dpicl.privacy.extensions.word_release import Weight, WordRelease, denied_words, word_release
from langchain_dpicl.privacy.ledger.amounts import check_name
from langchain_dpicl.released.base import Released, release_id
from langchain_dpicl.released.files import FileForm
from langchain_dpicl.reports.verify_released import word_problems

FORMAT = "langchain-dpicl/released-words"
VERSION = 1

_LARGEST = 2.0**53


class WordGroup(NamedTuple):
    """What was released of the units of one label, or of all units. Public.

    Attributes:
      label: the label, or None for all units.
      words: words and their noisy sums of weights, the largest first.
      pairs: pairs of these words, "left right", in the same form; empty where none were asked for.
    """

    label: str | None
    words: tuple[Weight, ...]
    pairs: tuple[Weight, ...] = ()

    def text(self) -> str:
        """Returns the label, the words and, a line each, the pairs."""
        lines = (self.label or "", " ".join(word for word, _ in self.words), *(pair for pair, _ in self.pairs))
        return "\n".join(lines).strip()

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON form; `group_of` reads it."""
        return {"label": self.label, "words": list(map(list, self.words)), "pairs": list(map(list, self.pairs))}


@dataclass(frozen=True)
class ReleasedWords(Released):
    """Words that many units write, by label where labels split the units, with their privacy report.

    Formal guarantees:
      - Holds public values only; printing, saving and using it is free post-processing.

    Read the words before you send them on: what many people write is released unchanged, names too. `without` takes
    words out.

    Args:
      groups: a `WordGroup` for each label, in the order of the labels, or one for all units.
      report: JSON-able privacy report.
      plan: JSON-able public plan (`WordsPlan.to_dict`).

    Raises:
      ConfigurationError: a value is of another type, or the words contradict the plan.
    """

    _FORM = FileForm("released words", FORMAT, VERSION, frozenset({"words", "plan", "report"}))

    groups: tuple[WordGroup, ...]
    report: Mapping[str, Any]
    plan: Mapping[str, Any]

    def __post_init__(self) -> None:
        if isinstance(self.groups, str | bytes) or not isinstance(self.groups, Sequence):
            raise fail("groups", "a sequence of WordGroup", type(self.groups).__name__)
        if not all(isinstance(group, WordGroup) for group in self.groups):
            raise fail("groups", "WordGroup, each of them", sorted({type(group).__name__ for group in self.groups}))
        object.__setattr__(self, "groups", tuple(_checked(group) for group in self.groups))
        self._copy_public("report", "plan")
        try:
            problems = list(word_problems(self.groups, self.plan))
        except (LookupError, TypeError, AttributeError):
            problems = ["plan: expected the plan of a release of words, found another"]
        for problem in problems:
            raise ConfigurationError(f"{problem}.")

    @property
    def release(self) -> WordRelease:
        """The release plan: what a unit casts, noise, threshold, adjacency."""
        return word_release(self.plan["words"])

    @property
    def words(self) -> tuple[str, ...]:
        """All released words, each once, the largest noisy weight first."""
        return _by_weight(group.words for group in self.groups)

    @property
    def pairs(self) -> tuple[str, ...]:
        """All released pairs of words, "left right", each once, the largest noisy weight first."""
        return _by_weight(group.pairs for group in self.groups)

    @property
    def by_label(self) -> dict[str | None, tuple[str, ...]]:
        """The words of each label, the largest noisy weight first; of all units under None, where no label splits."""
        return {group.label: tuple(word for word, _ in group.words) for group in self.groups}

    @property
    def documents(self) -> list[Document]:
        """A document for each label that has words, for any vector store; free post-processing.

        Its text is the label, the words and, a line each, the pairs; `label` and `release` are metadata. It says which
        words belong to the label, not how: a model that writes sentences from it makes the rest up.
        The `id` depends on the words and pairs of the document: with others it is another document.
        """
        release = release_id(self.report, ())
        made = []
        for place, group in enumerate(self.groups):
            if group.words:
                metadata = {"label": group.label, "release": release}
                own = f"{release_id(self.report, (*group.words, *group.pairs))}-{place}"
                made.append(Document(group.text(), metadata=metadata, id=own))
        return made

    def __len__(self) -> int:
        return len(self.words)

    def without(self, words: Iterable[str]) -> Self:
        """Returns what is left without some words, and without the pairs that hold them; free post-processing.

        Args:
          words: to take out, compared as they were counted: without case. An entry stands for each of its words, so
            "friend velda" takes out both words and every pair with one of them.

        Raises:
          ConfigurationError: an entry is no text or has no word, or there are too many.
        """
        gone = frozenset(denied_words(words, "words"))
        return dataclasses.replace(self, groups=tuple(without_words(group, gone) for group in self.groups))

    def _state(self) -> dict[str, Any]:
        return {"words": [group.to_dict() for group in self.groups], "plan": self.plan, "report": self.report}

    @classmethod
    def _of_state(cls, state: Mapping[str, Any]) -> Self:
        if not isinstance(state["words"], list):
            raise ConfigurationError("words: expected a list of groups, found something else.")
        return cls(tuple(map(group_of, state["words"])), state["report"], state["plan"])


def without_words(group: WordGroup, gone: frozenset[str]) -> WordGroup:
    """Returns a group without some words and the pairs that hold them."""
    return group._replace(
        words=tuple(pair for pair in group.words if pair[0] not in gone),
        pairs=tuple(pair for pair in group.pairs if gone.isdisjoint(pair[0].split(" "))),
    )


def group_of(item: Any) -> WordGroup:
    """Returns one group from its JSON form."""
    if not isinstance(item, Mapping) or set(item) != {"label", "words", "pairs"}:
        raise ConfigurationError("words: expected groups with a label, words and pairs, found another.")
    return _checked(WordGroup(item["label"], item["words"], item["pairs"]))


def _checked(group: WordGroup) -> WordGroup:
    if group.label is not None:
        check_name("label", group.label)
    return WordGroup(group.label, _weights("words", group.words), _weights("pairs", group.pairs))


def _weights(name: str, pairs: Any) -> tuple[Weight, ...]:
    if isinstance(pairs, str | bytes) or not isinstance(pairs, Sequence):
        raise fail(name, "a sequence of pairs of a text and a number", type(pairs).__name__)
    for pair in pairs:
        if isinstance(pair, str | bytes) or not isinstance(pair, Sequence) or len(pair) != 2:
            raise fail(name, "pairs of a text and a number", type(pair).__name__)
    return tuple((check_name(name, item), check_real(name, weight, low=0.0, high=_LARGEST)) for item, weight in pairs)


def _by_weight(groups: Iterable[Sequence[Weight]]) -> tuple[str, ...]:
    best: dict[str, float] = {}
    for found in groups:
        for item, weight in found:
            best[item] = max(weight, best.get(item, weight))
    return tuple(sorted(best, key=lambda item: (-best[item], item)))
