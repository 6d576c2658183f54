"""Public inputs with the labels that were released for them, and the report of what that cost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Literal, Self, TypeAlias, get_args

from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy._validate import check_choice, check_real, fail, is_finite
from langchain_dpicl.released.base import FileForm, Released, epsilon_of, listed

FORMAT = "langchain-dpicl/labelled-pool"
VERSION = 1

Status: TypeAlias = Literal["labelled", "public", "rejected", "waiting"]

_ENTRY = frozenset({"fields", "label", "status", "votes"})
_LABELLED = ("labelled", "public")
_RELEASED = ("labelled", "rejected")


@dataclass(frozen=True)
class PoolEntry:
    """One public input with its status and label.

    Formal guarantees:
      - It has a label if and only if its status is "labelled" or "public", and votes only if something was released
        for it: "labelled" or "rejected".

    Args:
      fields: the input, field name to text.
      label: the label; None: there is none.
      status: "labelled": a release by the private teachers; "public": given with its label, free; "rejected": a
        release without a label (the teachers abstained); "waiting": nothing was released for it.
      votes: the noisy votes by label, if they were released.

    Raises:
      ConfigurationError: a value is of another type, or label and votes do not fit the status.
    """

    fields: Mapping[str, str]
    label: str | None
    status: Status
    votes: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        check_choice("status", self.status if isinstance(self.status, str) else "", get_args(Status))
        object.__setattr__(self, "fields", _texts("fields", self.fields))
        if not self.fields:
            raise fail("fields", "at least one field", {})
        if not isinstance(self.label, str) if self.status in _LABELLED else self.label is not None:
            expected = f"{'a text' if self.status in _LABELLED else 'None'} with status {self.status!r}"
            raise fail("label", expected, type(self.label).__name__)
        if self.votes is not None:
            if self.status not in _RELEASED:
                raise fail("votes", f"None with status {self.status!r}", type(self.votes).__name__)
            object.__setattr__(self, "votes", _numbers("votes", self.votes))

    def to_dict(self) -> dict[str, Any]:
        """Returns the entry as JSON values; `from_dict` reads them."""
        votes = None if self.votes is None else dict(self.votes)
        return {"fields": dict(self.fields), "label": self.label, "status": self.status, "votes": votes}

    @classmethod
    def from_dict(cls, state: object) -> PoolEntry:
        """Reads what `to_dict` returned, and nothing else.

        Args:
          state: a result of `to_dict`.

        Raises:
          ConfigurationError: missing or unknown keys, or wrong values.
        """
        if not isinstance(state, Mapping) or frozenset(state) != _ENTRY:
            raise ConfigurationError(f"expected an object with exactly the keys {sorted(_ENTRY)}.")
        return cls(state["fields"], state["label"], state["status"], state["votes"])


@dataclass(frozen=True)
class LabelledPool(Released):
    """Public inputs, the labels released for them, the report of their cost and their plan.

    Formal guarantees:
      - Holds public values only; copying, pickling, printing, saving and selecting from it is free post-processing.

    Args:
      entries: the inputs, in the given order.
      label_key: the field of an example that holds its label.
      labels: every label an input can have.
      shown: the text of each label in examples; all different.
      report: privacy report as JSON values; empty if nothing was charged.
      plan: public plan as JSON values.
      student: choice of the best student prompt (`StudentChoice.to_dict`); None: none was chosen.

    Raises:
      ConfigurationError: a value is of another type, an entry's label is none of `labels`, or an entry has a field
        named `label_key`.

    >>> pool = LabelledPool(
    ...     [PoolEntry({"text": "my card was declined"}, "card", "public"), PoolEntry({"text": "hm"}, None, "waiting")],
    ...     label_key="queue",
    ...     labels=("card", "transfer"),
    ...     shown={"card": "Card", "transfer": "Transfer"},
    ...     report={},
    ...     plan={},
    ... )
    >>> pool.examples, len(pool.waiting)
    ([{'text': 'my card was declined', 'queue': 'Card'}], 1)
    """

    _FORM = FileForm(
        "labelled pool",
        FORMAT,
        VERSION,
        frozenset({"entries", "label_key", "labels", "shown", "report", "plan", "student"}),
        lines="entries",
    )
    _MAY_BE_FREE = True

    entries: tuple[PoolEntry, ...]
    _: KW_ONLY
    label_key: str
    labels: tuple[str, ...]
    shown: Mapping[str, str]
    report: Mapping[str, Any]
    plan: Mapping[str, Any]
    student: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.label_key, str) or not self.label_key:
            raise fail("label_key", "a non-empty text", type(self.label_key).__name__)
        # Copies: a caller that changes its arguments later must not change the pool.
        object.__setattr__(self, "labels", _distinct(self.labels))
        object.__setattr__(self, "shown", _label_texts(self.shown, self.labels))
        object.__setattr__(self, "entries", listed("entries", self.entries))
        for place, entry in enumerate(self.entries):
            self._check(f"entries[{place}]", entry)
        self._copy_public("report", "plan", *(() if self.student is None else ("student",)))

    @property
    def examples(self) -> list[dict[str, str]]:
        """The entries that have a label, in order: their fields, and the label's text under `label_key`."""
        return [self.example_of(entry) for entry in self.entries if entry.label is not None]

    @property
    def labelled(self) -> tuple[PoolEntry, ...]:
        """The entries whose label was released by the private teachers."""
        return self._with_status("labelled")

    @property
    def public(self) -> tuple[PoolEntry, ...]:
        """The entries that were added with a public label."""
        return self._with_status("public")

    @property
    def rejected(self) -> tuple[PoolEntry, ...]:
        """The entries that were charged and got no label from the teachers."""
        return self._with_status("rejected")

    @property
    def waiting(self) -> tuple[PoolEntry, ...]:
        """The entries without a release so far."""
        return self._with_status("waiting")

    @property
    def epsilon(self) -> float:
        """The reported upper bound on epsilon.

        Without a report: 0.0 if every entry is public, otherwise `math.inf`.
        """
        if self.report:
            return epsilon_of(self.report)
        return 0.0 if all(entry.status == "public" for entry in self.entries) else math.inf

    def example_of(self, entry: PoolEntry) -> dict[str, str]:
        """Returns an entry as an example of a prompt.

        Args:
          entry: an entry of this pool.

        Raises:
          ConfigurationError: it has no label, or does not fit the pool.
        """
        self._check("entry", entry)
        if entry.label is None:
            raise fail("entry", "an entry with a label", f"status {entry.status!r}")
        return {**entry.fields, self.label_key: self.shown[entry.label]}

    def with_entry(self, entry: PoolEntry, *, place: int | None = None) -> LabelledPool:
        """Returns a pool with one more entry at its end, or with `entry` instead of the one at `place`.

        Args:
          entry: the new entry.
          place: position of the entry that it replaces; None: it is appended.

        Raises:
          ConfigurationError: the entry does not fit the pool, or `place` is out of range.
        """
        if place is None:
            return self.with_entries([entry])
        if not isinstance(place, int) or isinstance(place, bool) or not 0 <= place < len(self.entries):
            raise fail("place", f"the place of one of {len(self.entries)} entries", place)
        return replace(self, entries=(*self.entries[:place], entry, *self.entries[place + 1 :]))

    def with_entries(self, entries: Iterable[PoolEntry]) -> LabelledPool:
        """Returns a pool with these entries at its end.

        Args:
          entries: the new entries, in order.

        Raises:
          ConfigurationError: an entry does not fit the pool.
        """
        if not isinstance(entries, Iterable):
            raise fail("entries", "a sequence", type(entries).__name__)
        return replace(self, entries=(*self.entries, *entries))

    def with_threshold(self, votes: float) -> LabelledPool:
        """Returns a pool in which a label needs at least `votes` released noisy votes; other inputs are rejected.

        Formal guarantees:
          - Post-processing of released votes: free, and the report stays the same. Entries without votes do not change.

        The choice of a student's prompt depends on the labels, so it is dropped.

        Args:
          votes: least noisy votes of a label, for instance half of `labeler.plan.expected_rows`.

        Raises:
          ConfigurationError: `votes` is not a number, or no entry has votes (`mechanism="gaussian"` releases them).
        """
        check_real("votes", votes)
        if not any(entry.votes for entry in self.entries):
            raise fail("votes", "a pool with released votes (mechanism='gaussian')", "none")
        return replace(self, entries=tuple(self._decided(entry, votes) for entry in self.entries), student=None)

    def _decided(self, entry: PoolEntry, least: float) -> PoolEntry:
        if not entry.votes:
            return entry
        best = max(entry.votes, key=entry.votes.__getitem__)
        has_label = best in self.labels and entry.votes[best] >= least
        return PoolEntry(
            entry.fields, best if has_label else None, "labelled" if has_label else "rejected", entry.votes
        )

    def _state(self) -> dict[str, Any]:
        return {
            "entries": [entry.to_dict() for entry in self.entries],
            "label_key": self.label_key,
            "labels": list(self.labels),
            "shown": dict(self.shown),
            "report": self.report,
            "plan": self.plan,
            "student": self.student,
        }

    @classmethod
    def _of_state(cls, state: Mapping[str, Any]) -> Self:
        return cls(
            tuple(_entry(place, entry) for place, entry in enumerate(listed("entries", state["entries"]))),
            label_key=state["label_key"],
            labels=state["labels"],
            shown=state["shown"],
            report=state["report"],
            plan=state["plan"],
            student=state["student"],
        )

    def _with_status(self, status: Status) -> tuple[PoolEntry, ...]:
        return tuple(entry for entry in self.entries if entry.status == status)

    def _check(self, name: str, entry: object) -> None:
        """Refuses an entry that does not fit this pool."""
        if not isinstance(entry, PoolEntry):
            raise fail(name, "a PoolEntry", type(entry).__name__)
        if entry.label is not None and entry.label not in self.labels:
            raise fail(f"{name}.label", f"one of {len(self.labels)} labels", "another text")
        if self.label_key in entry.fields:
            raise fail(f"{name}.fields", "an input without its label's field", self.label_key)


def _entry(place: int, state: object) -> PoolEntry:
    """Returns an entry of a file; an error names its position."""
    try:
        return PoolEntry.from_dict(state)
    except ConfigurationError as error:
        message = f"entries[{place}]: {error}"
    raise ConfigurationError(message)


def _texts(name: str, value: object) -> dict[str, str]:
    """Returns a copy of a mapping from text to text; an error contains no content."""
    if not isinstance(value, Mapping):
        raise fail(name, "an object", type(value).__name__)
    if not all(isinstance(part, str) for item in value.items() for part in item):
        raise ConfigurationError(f"{name}: expected text under text keys.")
    return dict(value)


def _numbers(name: str, value: object) -> dict[str, float]:
    """Returns a copy of a mapping from text to finite number."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) and is_finite(n) for key, n in value.items()):
        raise fail(name, "finite numbers under text keys", type(value).__name__)
    return {key: float(number) for key, number in value.items()}


def _distinct(labels: object) -> tuple[str, ...]:
    found = listed("labels", labels)
    if not all(isinstance(label, str) and label for label in found) or len(set(found)) < max(2, len(found)):
        raise fail("labels", "at least two distinct non-empty texts", f"{len(found)} values")
    return found


def _label_texts(shown: object, labels: tuple[str, ...]) -> dict[str, str]:
    """Returns the text of each label, in the order of the labels."""
    texts = _texts("shown", shown)
    if set(texts) != set(labels) or len(set(texts.values())) < len(labels):
        raise fail("shown", "a text for each label, no two alike", f"{len(texts)} texts")
    return {label: texts[label] for label in labels}
