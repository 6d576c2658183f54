"""Released counts of values, and released words, with their privacy report."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self, TypeAlias

from langchain_core.documents import Document

from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy._validate import check_choice, check_int, check_name, check_real, fail
from langchain_dpicl.privacy.extensions.value_counts import UNITS, CountPlan, UnitValues, count_release, noise_margin
from langchain_dpicl.privacy.extensions.word_release import Weight, WordRelease, denied_words, word_release
from langchain_dpicl.privacy.private_examples import PrivateExamples
from langchain_dpicl.released.base import FileForm, Released, listed, release_id
from langchain_dpicl.reports.verify import word_problems

FORMAT = "langchain-dpicl/released-counts"
VERSION = 1

Side: TypeAlias = Literal["lower", "middle", "upper"]

_LARGEST = 2**53


@dataclass(frozen=True)
class ReleasedCounts(Released):
    """Noisy counts of the units that hold each value of a field, with their privacy report.

    Formal guarantees:
      - Holds public values only; printing, saving and using it is free post-processing.

    Args:
      counts: noisy count by value; may be negative for declared values. Found values: the largest first.
      report: JSON-able privacy report.
      plan: JSON-able public plan (`DiscoveryPlan.to_dict`).

    Raises:
      ConfigurationError: a value is of another type, or the counts contradict the plan.
    """

    _FORM = FileForm("released counts", FORMAT, VERSION, frozenset({"counts", "plan", "report"}))

    counts: Mapping[str, int]
    report: Mapping[str, Any]
    plan: Mapping[str, Any]

    def __post_init__(self) -> None:
        if not isinstance(self.counts, Mapping):
            raise fail("counts", "a mapping of values to whole numbers", type(self.counts).__name__)
        checked = {
            check_name("counts", value): check_int(f"counts[{value!r}]", count, low=-_LARGEST, high=_LARGEST)
            for value, count in self.counts.items()
        }
        object.__setattr__(self, "counts", checked)
        self._copy_public("report", "plan")
        release = self.release
        rule, threshold = release.rule, release.mechanism.threshold
        expected = (UNITS,) if rule.name is None else rule.declared
        if expected is not None and tuple(checked) != expected:
            raise fail("counts", f"one for each of {list(expected)}", list(checked))
        if threshold is not None and any(count < threshold for count in checked.values()):
            raise fail("counts", f"none below the threshold, {threshold}", min(checked.values()))

    @property
    def release(self) -> CountPlan:
        """The release plan: what a unit counts for, noise, threshold, adjacency."""
        try:
            release = count_release(self.plan["counts"])
        except (LookupError, TypeError):
            raise ConfigurationError("plan: expected the plan of a release of counts, found another.") from None
        if not isinstance(release.rule, UnitValues):
            raise fail("plan", "the plan of counts of units or values", release.rule.kind)
        return release

    @property
    def field(self) -> str | None:
        """The counted field; None: units."""
        return self.release.rule.name

    @property
    def values(self) -> tuple[str, ...]:
        """The values, in order; usable as `labels=`."""
        return tuple(self.counts)

    def public_size(self, *, confidence: float = 0.95, side: Side = "lower") -> int | dict[str, int]:
        """Returns a public size for `public_size=`: by value, or one number of units.

        Formal guarantees:
          - "lower": for each value separately, the number is 1, or exceeds the true count with probability at most
            1 - confidence over the noise; "upper": is below it. Numbers are at least 1, also for values without units.
          - Privacy does not depend on it: no number releases anything that was not paid for.

        If the number is too low, samples are larger than planned: more calls and full slots. If it is too high, they
        are smaller: empty slots. To compare delta with the number of records, use "upper".

        Args:
          confidence: in (0, 1); ignored by "middle".
          side: "lower", "middle" (the noisy count itself) or "upper".

        Raises:
          ConfigurationError: an argument out of range.
        """
        check_choice("side", side, ("lower", "middle", "upper"))
        margin = noise_margin(self.release.scale, confidence)
        move = {"lower": -margin, "middle": 0, "upper": margin}[side]
        sizes = {value: max(1, count + move) for value, count in self.counts.items()}
        return sizes[UNITS] if self.field is None else sizes

    def redeclare(
        self,
        private: PrivateExamples,
        *,
        dataset_id: str | None = None,
        public_size: int | Mapping[str, int] | None = None,
        confidence: float = 0.95,
        side: Side = "lower",
    ) -> PrivateExamples:
        """Returns the same units, on the same ledger, declared with the counts: see `PrivateExamples.redeclared`.

        Counts of units set the size. Counts of a field split the units by its values and set the size of each; counts
        of the declared label set the sizes only.

        The returned examples are bound to the ledger that paid for the counts, so that the costs of later releases add
        up with theirs. If that ledger is gone (it was in memory), use `private.redeclared(labels=...)` with another
        one, and add the epsilons of both.

        Args:
          private: the counted examples.
          dataset_id: public name of the new declaration; by default the old one and the counted field.
          public_size: the size; by default `public_size(confidence=, side=)`.
          confidence: as for `public_size`.
          side: as for `public_size`.

        Raises:
          ConfigurationError: nothing was found, or other examples were counted.
          PrivacyBudgetMismatchError: the examples are bound to a ledger that did not pay for the counts.
          PrivateAccessError: the examples were opened without privacy, and the counts were paid for.
        """
        counted = self.report.get("dataset_id")
        if private.dataset_id != counted:
            raise fail("private", f"the examples {counted!r}, which were counted", private.dataset_id)
        if not self.counts:
            raise fail("counts", "at least one value", "none", "Nothing reached the threshold; declare labels by hand.")
        size = self.public_size(confidence=confidence, side=side) if public_size is None else public_size
        name = f"{private.dataset_id} by {self.field or UNITS}" if dataset_id is None else dataset_id
        # Counts of units or of the declared label change sizes only; other fields become the label.
        split: dict[str, Any] = {}
        if self.field not in {None, private.label_key}:
            fold_case = self.release.rule.to_dict()["fold_case"]
            split = {"label_key": self.field, "labels": self.values, "fold_case": fold_case}
        made = private.redeclared(dataset_id=name, public_size=size, **split)
        paid_by = self.report.get("ledger_id")
        if isinstance(paid_by, str):
            private._attach(paid_by)  # noqa: SLF001  binds to the ledger that paid, and to no other
        return made

    def _state(self) -> dict[str, Any]:
        return {"counts": list(self.counts.items()), "plan": self.plan, "report": self.report}

    @classmethod
    def _of_state(cls, state: Mapping[str, Any]) -> Self:
        pairs = state["counts"]
        if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
            raise ConfigurationError("counts: expected a list of pairs of a value and a number.")
        counts = {str(value): count for value, count in pairs}
        if len(counts) != len(pairs):
            raise ConfigurationError("counts: expected distinct values, found a repeated one.")
        return cls(counts, state["report"], state["plan"])


WORDS_FORMAT = "langchain-dpicl/released-words"


_LARGEST_SUM = 2.0**53


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

    _FORM = FileForm("released words", WORDS_FORMAT, VERSION, frozenset({"words", "plan", "report"}))

    groups: tuple[WordGroup, ...]
    report: Mapping[str, Any]
    plan: Mapping[str, Any]

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", word_groups("groups", self.groups))
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
                # A UUID, because some stores accept no other ids.
                named = uuid.uuid5(uuid.NAMESPACE_URL, f"{WORDS_FORMAT}/{own}")
                made.append(Document(group.text(), metadata=metadata, id=str(named)))
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
        return cls(tuple(map(group_of, listed("words", state["words"]))), state["report"], state["plan"])


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
    return WordGroup(item["label"], item["words"], item["pairs"])


def word_groups(name: str, groups: object) -> tuple[WordGroup, ...]:
    """Returns the groups of a sequence, checked."""
    found = listed(name, groups)
    if not all(isinstance(group, WordGroup) for group in found):
        raise fail(name, "WordGroup, each of them", sorted({type(group).__name__ for group in found}))
    return tuple(map(_checked, found))


def _checked(group: WordGroup) -> WordGroup:
    if group.label is not None:
        check_name("label", group.label)
    return WordGroup(group.label, _weights("words", group.words), _weights("pairs", group.pairs))


def _weights(name: str, pairs: Any) -> tuple[Weight, ...]:
    found = listed(name, pairs)
    for pair in found:
        if isinstance(pair, str | bytes) or not isinstance(pair, Sequence) or len(pair) != 2:
            raise fail(name, "pairs of a text and a number", type(pair).__name__)
    return tuple(
        (check_name(name, item), check_real(name, weight, low=0.0, high=_LARGEST_SUM)) for item, weight in found
    )


def _by_weight(groups: Iterable[Sequence[Weight]]) -> tuple[str, ...]:
    best: dict[str, float] = {}
    for found in groups:
        for item, weight in found:
            best[item] = max(weight, best.get(item, weight))
    return tuple(sorted(best, key=lambda item: (-best[item], item)))
