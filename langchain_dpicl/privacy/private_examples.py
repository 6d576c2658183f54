"""Holds private examples in units, each with one label by a rule that looks at it alone."""

from __future__ import annotations

import gc
import json
import math
import os
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from numbers import Integral, Real
from typing import Any, Final, NoReturn, Protocol, TypeAlias, runtime_checkable

import numpy as np

from langchain_dpicl._lazy import provided
from langchain_dpicl._opaque import Opaque, SaysHowToBuild, run_guarded, tells_how_to_build
from langchain_dpicl.exceptions import (
    ConfigurationError,
    ExactSizeWarning,
    LargeDeltaWarning,
    PrivacyBudgetMismatchError,
    PrivateAccessError,
    RecordError,
)
from langchain_dpicl.privacy._validate import (
    HIDDEN,
    PRINTABLE,
    check_delta,
    check_flag,
    check_int,
    check_name,
    fail,
    is_name,
    plain_text,
)
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM

# A fault of a record is returned, never raised here: the caller raises it from a frame that holds no record.

Record: TypeAlias = dict[str, str]
Unit: TypeAlias = tuple[Record, ...]
"""The records of one unit, all of one label; empty once the unit was removed."""

SPLIT_RULE = 2
"""The version of `relabel_unit`, `normalized` and `TopicSplit`; change it with their behaviour."""


@dataclass(frozen=True, slots=True)
class Declaration:
    """The declared properties of private examples, all public, as `PrivateExamples` documents them."""

    dataset_id: str
    public_size: int | tuple[tuple[str, int], ...]
    text_key: str
    label_key: str | None
    labels: tuple[str, ...]
    unit_key: str | None
    extra_fields: tuple[str, ...]
    max_chars: int
    records_per_unit: int
    # Of units that are declared again: the name of their first declaration, and whether labels were compared without
    # case (None: labels are those of the first declaration).
    origin: tuple[str, bool | None] | None = None
    # What splits units that are declared again: see `redeclared`; None: the values of a field do.
    by: str | None = None
    stream: Any = None  # `StreamDeclaration`, of a range of a stream
    # Whether delta may be as large as 1 / public_size.
    allow_large_delta: bool = False

    @property
    def fields(self) -> tuple[str, ...]:
        """Every declared field, without repetition."""
        label = () if self.label_key is None else (self.label_key,)
        return tuple(dict.fromkeys((self.text_key, *label, *self.extra_fields)))

    @property
    def total_size(self) -> int:
        """The declared number of units over all labels."""
        if isinstance(self.public_size, int):
            return self.public_size
        return sum(size for _, size in self.public_size)

    @property
    def most_delta(self) -> float:
        """The largest delta of a ledger that these units may be bound to: 1 / (10 * size), or 1 / size if allowed."""
        return 1 / (self.total_size if self.allow_large_delta else 10 * self.total_size)

    @property
    def delta_rule(self) -> str:
        """`most_delta`, in words."""
        return "1/public_size" if self.allow_large_delta else "1/(10 * public_size)"

    @property
    def unit(self) -> str:
        """The protected unit, in words."""
        if self.unit_key is None:
            return "one record"
        return f"all records of one {self.unit_key!r}"

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON form."""
        size = self.public_size if isinstance(self.public_size, int) else dict(self.public_size)
        shown: dict[str, Any] = {
            "dataset_id": self.dataset_id,
            "public_size": size,
            "text_key": self.text_key,
            "label_key": self.label_key,
            "labels": list(self.labels),
            "unit": self.unit,
            "unit_key": self.unit_key,
            "extra_fields": list(self.extra_fields),
            "max_chars": self.max_chars,
            "records_per_unit": self.records_per_unit,
        }
        if self.allow_large_delta:
            shown["allow_large_delta"] = True
        if self.origin is not None:
            shown["redeclared"] = {"from": self.origin[0], "fold_case": self.origin[1], "rule": SPLIT_RULE}
            if self.by is not None:
                shown["redeclared"]["by"] = self.by
        if self.stream is not None:
            shown["stream"] = self.stream.to_dict()
        return shown


def make_declaration(
    *,
    dataset_id: str,
    public_size: int | Mapping[Any, int],
    text_key: str,
    label_key: str | None,
    labels: Iterable[Any] | None,
    unit_key: str | None,
    fields: Iterable[str],
    max_chars: int,
    records_per_unit: int,
    allow_large_delta: bool = False,
    redeclared: Mapping[str, Any] | None = None,
    stream: Mapping[str, Any] | None = None,
) -> Declaration:
    """Checks the public arguments of `PrivateExamples`, or those that a report shows, and freezes them."""
    declared = _check_labels(label_key, labels)
    flow = None if stream is None else provided("streams").make_stream_declaration(**stream)
    is_whole = redeclared is not None or flow is None or public_size == flow.sizes[-1][1]
    if flow is not None and (unit_key is None or not is_whole):
        raise fail("unit_key, public_size", "a unit_key, and the people of the longest range", (unit_key, public_size))
    return Declaration(
        dataset_id=check_name("dataset_id", dataset_id),
        public_size=_check_size(public_size, declared),
        text_key=check_name("text_key", text_key),
        label_key=None if label_key is None else _check_label_key(label_key, text_key),
        labels=declared,
        unit_key=None if unit_key is None else check_name("unit_key", unit_key),
        extra_fields=_check_names("fields", fields),
        max_chars=check_int("max_chars", max_chars, low=1),
        records_per_unit=check_int("records_per_unit", records_per_unit, low=1),
        origin=None if redeclared is None else provided("redeclared").check_origin(redeclared, dataset_id, label_key),
        by=None if redeclared is None else redeclared.get("by"),
        stream=flow,
        allow_large_delta=check_flag("allow_large_delta", allow_large_delta),
    )


def _check_names(name: str, values: Iterable[str]) -> tuple[str, ...]:
    # Types alone are shown: a column of records may be passed by mistake.
    if isinstance(values, _UNORDERED):
        raise fail(name, "a list of texts, whose order is declared too", type(values).__name__, "Write sorted(...).")
    if not _is_listed(values):
        raise fail(name, "a list of texts", type(values).__name__)
    names = tuple(values)
    if others := [type(value) for value in names if not isinstance(value, str)]:
        raise fail(name, "texts alone", others[0])
    if len(set(names)) != len(names):
        raise fail(name, "distinct texts", "one of them twice")
    if not all(map(is_name, names)):  # they may be a column of records, given by mistake: none is shown
        advice = f"Where all look so, a character {HIDDEN}, in the records too (as U+200C and U+00A0)."
        raise fail(name, PRINTABLE, "another text among them", advice)
    return tuple(map(plain_text, names))


def _check_labels(label_key: str | None, labels: Iterable[Any] | None) -> tuple[str, ...]:
    if label_key is None and labels is None:
        return ()
    if labels is None:
        raise fail("labels", f"the declared labels of {label_key!r}", labels, "They are public: list them by hand.")
    if label_key is None:
        raise fail("label_key", "the field that holds the label, since labels are declared", label_key)
    listed: Any = tuple(labels) if _is_listed(labels) else labels
    if isinstance(listed, tuple) and (numbers := [type(label) for label in listed if label_text(label) is not label]):
        raise fail("labels", "text", numbers[0], AS_TEXT.strip())
    declared = _check_names("labels", listed)
    if not declared:
        raise fail("labels", "at least one label", labels)
    return declared


_UNORDERED = (set, frozenset)
"""Two processes would declare the same names in two orders, and the ledger would refuse the second."""


def _is_listed(values: Any) -> bool:
    """Whether names come one by one, in an order."""
    return isinstance(values, Iterable) and not isinstance(values, (str, bytes, *_UNORDERED))


def _check_label_key(label_key: str, text_key: str) -> str:
    if label_key == text_key:
        raise fail("label_key", "another field than text_key", label_key)
    return check_name("label_key", label_key)


def _check_size(size: int | Mapping[Any, int], labels: tuple[str, ...]) -> int | tuple[tuple[str, int], ...]:
    if not isinstance(size, Mapping):
        return check_number("public_size", size)
    if not labels or set(size) != set(labels):
        known = len(set(labels).intersection(size))  # keys, and labels, may be records that were given by mistake
        found = f"{known} of them and {len(size) - known} others"
        advice = "Give one number, or one number for each declared label."
        raise fail("public_size", f"a number for each of the {len(labels)} declared labels", found, advice)
    return tuple((label, check_number("public_size of a label", size[label])) for label in labels)


def check_number(name: str, value: Any) -> int:
    """Returns a public number of people or records; what was passed instead of one may be private and is not shown."""
    if not isinstance(value, int):
        advice = "Write int(...) around it." if isinstance(value, Integral) else ""
        raise fail(name, "an integer >= 1", type(value).__name__, advice)
    return check_int(name, value, low=1)


@dataclass(slots=True, repr=False, eq=False)
class Units:
    """The content of all units. It lives in a closure of `pools` and is never handed out whole."""

    contents: list[Unit]
    by_label: dict[str, list[int]]
    positions: dict[str, int]
    version: int = 0
    """Raised after each removal: what was made of the contents at an older one is out of date."""


def read_units(
    records: Iterable[Any], declared: Declaration, *, labels_as_text: bool = False
) -> tuple[Units | None, str]:
    """Returns the units in the order of their first record, and ""; or None and a fault without index and value.

    The label of a unit is its most frequent one, ties going to the label declared first; its records of other labels
    are dropped, then the first `records_per_unit` are kept. Each unit is reduced by looking at that unit alone.
    """
    groups: dict[str, list[Record]] = {}
    fault = ""
    known = {label: label for label in declared.labels}
    try:
        for number, raw in enumerate(records):
            name, record, fault = read_record(raw, declared, number, known, labels_as_text=labels_as_text)
            if fault:
                return None, fault
            groups.setdefault(name, []).append(record)
    except Exception as error:  # noqa: BLE001  whatever the caller's records raise may quote them
        fault = f"records: the iterable raised {type(error).__name__} (its message may hold private text)."
    return (None, fault) if fault else (reduce_groups(groups, declared), "")


def read_record(
    raw: Any, declared: Declaration, number: int, known: Mapping[str, str], *, labels_as_text: bool = False
) -> tuple[str, Record, str]:
    """Returns (unit name, declared fields, fault); `known` is a mapping because there may be many labels."""
    fields = fields_of(raw, declared.text_key)
    if fields is None:
        advice = "Make a dict of each, as dict(row), dataclasses.asdict and model_dump do."
        expected = "expected every record to be text, a mapping or a Document"
        return "", {}, f"records: {expected}; one is of another type. {advice}"
    key = declared.unit_key
    unit = str(number) if key is None else unit_name(fields.get(key))
    if unit is None:
        return "", {}, _unit_fault(fields, str(key))
    record: Record = {}
    for field in declared.fields:
        value, is_label = fields.get(field), field == declared.label_key
        if is_label and labels_as_text:
            value = label_text(value)
        if not isinstance(value, str):
            advice = _advice_on(value, is_label=is_label)
            if field not in fields:
                option = "label_key" if is_label else "text_key" if field == declared.text_key else "fields"
                advice = f" If it has another name, give {option}=."
            return "", {}, f"records: expected text under {field!r}; a record has {kind_of(value)}.{advice}"
        if is_label:
            if value not in known:
                advice = "Declare every label, letter by letter: case and white space count"
                booleans = "; of booleans 'true' and 'false'" if labels_as_text else ""
                fault = f"records: expected a declared label under {field!r}; a record has another."
                return "", {}, f"{fault} {advice}{booleans}."
            record[field] = known[value]
        else:
            record[field] = _clean(value, declared.max_chars)
    return unit, record, ""


def _advice_on(value: Any, *, is_label: bool) -> str:
    """Returns what to do with a value in the place of a text, by its kind alone."""
    kind = kind_of(value)
    if is_label and label_text(value) is not value:
        return AS_TEXT
    if is_label and kind == "another number":
        return _FROM_GAPS
    if kind == "none":
        return " Leave out records without one."
    if kind == "a value of another type":
        return " Put its text, such as 2026-03-02 for a date, into a field of its own."
    return " Write str(...) around it."


def _unit_fault(fields: Mapping[str, Any], unit_key: str) -> str:
    """Returns what is wrong with the field that should name the unit of a record."""
    found, advice = "none", "If it has another name, give unit_key=."
    if unit_key in fields:
        advice = "Leave out records without one: under one text they would be one unit."
        kind = kind_of(fields[unit_key])
        if kind != "none" and not isinstance(fields[unit_key], str):
            is_number = kind == "another number"
            found, advice = "neither", (_FROM_GAPS if is_number else " Write str(...) around it.").strip()
    return f"records: expected text or an integer under {unit_key!r}; a record has {found}. {advice}"


def fields_of(raw: Any, text_key: str) -> Mapping[str, Any] | None:
    """Returns the fields of a text, a mapping or a LangChain document; None for anything else."""
    if isinstance(raw, str):
        return {text_key: raw}
    if isinstance(raw, Mapping):
        return raw
    metadata, content = getattr(raw, "metadata", None), getattr(raw, "page_content", None)
    return {**metadata, text_key: content} if isinstance(metadata, Mapping) and content is not None else None


_FROM_GAPS = " Make it an integer: a column with gaps holds 1.0 for 1."
AS_TEXT = " Give labels_as_text=True, which reads integers and booleans as text."


def label_text(value: Any) -> Any:
    """Returns an integer or a boolean as text (7 as "7", True as "true"); anything else as it is."""
    if isinstance(value, (bool, np.bool_)):
        return "true" if value else "false"
    return str(int(value)) if isinstance(value, Integral) else value


def kind_of(value: Any) -> str:
    """Returns what stands in the place of a text, by its type; tables have marks of their own for missing values."""
    is_nan = isinstance(value, float) and math.isnan(value)
    if value is None or is_nan or type(value).__name__ in {"NAType", "NaTType"}:
        return "none"
    if isinstance(value, (bool, np.bool_)):
        return "a boolean"
    if isinstance(value, Integral):
        return "an integer"
    return "another number" if isinstance(value, Real) else "a value of another type"


def unit_name(value: Any) -> str | None:
    """Returns the name of a unit as text (7 and "7" are one unit), or None if the value cannot name a unit.

    A blank text names none: an empty cell of a table is one, and all records without a name would be one unit.
    """
    if isinstance(value, str):
        return plain_text(value) if value.strip() else None
    if isinstance(value, Integral) and not isinstance(value, bool):
        return str(int(value))
    return None


def _clean(text: str, max_chars: int) -> str:
    """Returns at most `max_chars` characters, with lone surrogates replaced so that the text can be encoded."""
    return text[:max_chars].encode("utf-8", "replace").decode("utf-8")


def reduce_groups(groups: Mapping[str, list[Record]], declared: Declaration) -> Units:
    """Returns the units of records by name, each reduced by looking at it alone; the first records are kept."""
    units = Units(contents=[], by_label={label: [] for label in declared.labels}, positions={})
    for position, (name, records) in enumerate(groups.items()):
        units.positions[name] = position
        own = records
        if declared.label_key is not None:
            label = unit_label([record[declared.label_key] for record in records], declared.labels)
            own = [record for record in records if record[declared.label_key] == label]
            units.by_label[label].append(position)
        units.contents.append(tuple(own[: declared.records_per_unit]))
    return units


def unit_label(own: Iterable[str], labels: tuple[str, ...]) -> str:
    """Returns the most frequent label of one unit; ties go to the label declared first."""
    counts = Counter(own)
    most = max(counts.values())
    tied = {label for label, count in counts.items() if count == most}
    return tied.pop() if len(tied) == 1 else next(label for label in labels if label in tied)


def records_of(units: Units, position: int) -> Iterator[Record]:
    """Yields fresh copies of the records of one unit."""
    return map(dict, units.contents[position])


# The labels of one data set are priced in parallel, which is valid only while each unit keeps its label.

Found: TypeAlias = "str | Counter[str]"
LabelsByUnit: TypeAlias = Mapping[bytes, Found]
"""The label of each unit by its digest; how often each label occurs where several records cannot be distinguished."""

# A forked child keeps the key and the records: it may go on with the parent's ledger.
_KEY: Final = SYSTEM_RANDOM.entropy(32)
_BOUND: dict[tuple[Any, ...], dict[str, tuple[LabelsByUnit, Callable[[], object]]]] = {}
"""By declared name and ledger: the labels, and a reference that is dead once the ledger is gone."""
_WRITING = threading.RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_WRITING.acquire, after_in_parent=_WRITING.release, after_in_child=_WRITING.release)


def labels_by_unit(units: Units, declared: Declaration) -> LabelsByUnit:
    """Returns the label of each unit; an empty mapping if labels do not split the units.

    With `unit_key` a unit is identified by its name. Without it a unit is one record, identified by all its declared
    fields but the label: its position changes if records are inserted before it.
    """
    by_unit: dict[bytes, Found] = {}
    key = declared.label_key
    if key is None:
        return by_unit
    others = [field for field in declared.fields if field != key]
    for name, position in units.positions.items():
        record = units.contents[position][0]
        identity = name if declared.unit_key is not None else json.dumps([record[field] for field in others])
        _count(by_unit, _digest(identity), record[key])
    return by_unit


def has_moved(labels: LabelsByUnit, declared: Declaration) -> bool:
    """Returns whether a unit has another label than this process has bound for it under the same declared name."""
    if not _has_moved_here(labels, declared):
        return False
    gc.collect()  # an unreferenced ledger in memory may wait for the collector
    return _has_moved_here(labels, declared)


def record_bound_labels(labels: LabelsByUnit, declared: Declaration, ledger_id: str, ledger: object | None) -> None:
    """Records the labels of examples that were bound to a ledger, while the ledger exists; removed units included."""
    if not labels:
        return
    alive = (lambda: True) if ledger is None else weakref.ref(ledger)
    with _WRITING:
        ledgers = {key: bound for key, bound in _BOUND.get(_name_of(declared), {}).items() if bound[1]() is not None}
        before = ledgers[ledger_id][0] if ledger_id in ledgers else {}
        # New mappings: another thread may be reading the old ones.
        merged = labels if labels == before or not before else {**before, **labels, **_unions(before, labels)}
        _BOUND[_name_of(declared)] = {**ledgers, ledger_id: (merged, alive)}


def _has_moved_here(labels: LabelsByUnit, declared: Declaration) -> bool:
    """Returns whether a unit has another label than in a ledger that still exists."""
    ledgers = _BOUND.get(_name_of(declared), {}).values()
    others = [bound for bound, alive in ledgers if alive() is not None and bound != labels]
    return any(_is_moved(bound[unit], label) for bound in others for unit, label in labels.items() if unit in bound)


def _name_of(declared: Declaration) -> tuple[Any, ...]:
    """Returns the declared values that two data sets share if a ledger can read them as one split."""
    return declared.dataset_id, declared.label_key, declared.labels, declared.unit_key


def _digest(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), key=_KEY, digest_size=16).digest()


def _count(by_unit: dict[bytes, Found], unit: bytes, label: str) -> None:
    # A Counter only for records that cannot be distinguished: one for every unit would cost much memory.
    before = by_unit.get(unit)
    if before is None:
        by_unit[unit] = label
    elif isinstance(before, str):
        by_unit[unit] = Counter((before, label))
    else:  # in place: a new Counter for each record would take time that grows with its square
        before[label] += 1


def _is_moved(before: Found, now: Found) -> bool:
    """Returns whether one label lost a unit and another gained one."""
    if isinstance(before, str) and isinstance(now, str):
        return before != now
    old, new = _counter(before), _counter(now)
    return bool(old - new) and bool(new - old)


def _unions(bound: LabelsByUnit, labels: LabelsByUnit) -> dict[bytes, Found]:
    """Returns, for every unit in both whose labels differ, the larger count of each label."""
    changed = [unit for unit, label in labels.items() if bound.get(unit, label) != label]
    return {unit: _counter(bound[unit]) | _counter(labels[unit]) for unit in changed}


def _counter(labels: Found) -> Counter[str]:
    return Counter((labels,)) if isinstance(labels, str) else labels


class Pool(Opaque):
    """The units of one label, or all of them, as the curator reads them. Counts and content are private."""

    __slots__ = ("_count", "_name", "_read", "_version")

    def __init__(
        self,
        count: Callable[[], int],
        read: Callable[[int], Unit],
        name: Callable[[int], str] | None = None,
        version: Callable[[], int] | None = None,
    ) -> None:
        self._count = count
        self._read = read
        self._name = name
        self._version = version

    @property
    def version(self) -> int:
        """A number that each removal raises, after the records are gone; only in a pool of all units."""
        if self._version is None:
            raise PrivateAccessError("Pool: expected a pool of all units, found another.")
        return self._version()

    @property
    def num_units(self) -> int:
        """The private number of units, removed ones included: they keep their position and hold no record."""
        return self._count()

    def records(self, position: int) -> Unit:
        """Returns copies of the records of the unit at `position`; empty if it was removed."""
        if not 0 <= position < self._count():
            raise PrivateAccessError("Pool: expected a position of this pool, found another.")
        return self._read(position)

    def name(self, position: int) -> str:
        """Returns the private name of the unit at `position`; only in a pool of all units."""
        if self._name is None or not 0 <= position < self._count():
            raise PrivateAccessError("Pool: expected a position of a pool of all units, found another.")
        return self._name(position)


OpenPool: TypeAlias = Callable[[str | None], Pool]
"""Opens the pool of a label, or of all units."""
Split: TypeAlias = Callable[[Unit], tuple[Unit, str]]
"""Returns a unit's records of its label, and the label, from that unit alone; () and "" if it has no label."""
Redeclare: TypeAlias = Callable[[tuple[str, ...], Split], OpenPool | None]
"""Splits the units by other labels with the given rule; returns None if that failed."""
Sealed: TypeAlias = tuple[OpenPool, Callable[[str], None], Redeclare]
"""Functions that open a pool, remove a unit, and split the units by other labels."""


def make_opaque_pool(units: Units) -> Sealed:
    """Returns three closures, which are the only references to the content."""

    def open_pool(label: str | None) -> Pool:
        if label is None:
            return Pool(
                lambda: len(units.contents),
                lambda position: tuple(records_of(units, position)),
                name_of_units(units),
                lambda: units.version,
            )
        index = units.by_label[label]
        return Pool(lambda: len(index), lambda position: tuple(records_of(units, index[position])))

    def remove(name: str) -> None:
        # The position stays, so that the units of other positions and all sampling rates do not change.
        position = units.positions.pop(name, None)
        if position is not None:
            units.contents[position] = ()
            units.version += 1  # last: a reader of this number, then of the contents, may keep what is made of them

    def redeclare(labels: tuple[str, ...], split: Split) -> OpenPool | None:
        return run_guarded(lambda: provided("redeclared").split_units(units, labels, split))

    return open_pool, remove, redeclare


def name_of_units(units: Units) -> Callable[[int], str]:
    """Returns a function from a position to the unit's name; "" for a unit that was removed before the first call.

    The list of names is built on the first call: only retrieval needs it, and the time to build it depends on the
    private number of units.
    """
    lock = threading.Lock()
    made: list[list[str]] = []

    def name_of(position: int) -> str:
        with lock:
            if not made:
                made.append(_names(units))
        return made[0][position]

    return name_of


def _names(units: Units) -> list[str]:
    names = [""] * len(units.contents)
    for name, position in list(units.positions.items()):
        names[position] = name
    return names


class UnitBinding:
    """The state that all declarations of the same units share."""

    __slots__ = ("by_declaration", "exposed", "keep_bound", "ledger_id", "lock", "warned_of")

    def __init__(self, keep_bound: Callable[[str, object | None], None]) -> None:
        self.keep_bound: Callable[[str, object | None], None] | None = keep_bound  # None after the first call
        self.lock = threading.Lock()
        # The examples that are split by topics; `value_counts` returns one object for equal declarations.
        self.by_declaration: dict[Declaration, PrivateExamples] = {}
        self.ledger_id: str | None = None
        self.exposed = False  # opened without a charge
        self.warned_of: set[tuple[str, float]] = set()  # large deltas, by declaration


@runtime_checkable
class DocumentLoader(Protocol):
    """A loader of LangChain."""

    def lazy_load(self) -> Iterator[Any]:
        """Yields documents."""


@tells_how_to_build()
class PrivateExamples(Opaque, metaclass=SaysHowToBuild):
    """Private examples, readable only through releases that are charged to a ledger.

    Formal guarantees:
      - A unit (one record, or all records of one `unit_key`) has one position in one label, chosen by a rule that
        looks at that unit alone; adding or removing a unit changes no other unit.
      - After construction nothing depends on the records: no length, iteration, equality by content, pickle or
        copy exists, and no error, repr or format shows content or counts.
      - They are attached to at most one ledger, permanently; attached examples refuse every read without a charge, and
        examples that were read without a charge can never be attached.

    Args:
      records: texts, mappings with the declared fields, or LangChain documents (`page_content` is the text, `metadata`
        holds the other fields), in any iterable, a document loader, a pandas or polars frame or a Hugging Face data
        set. They are read once, in order. Zero records are fine. Chunks of one document need a `unit_key`, such as
        "source", which most loaders set, or each chunk is protected by itself; `CSVLoader` sets it to the file, one
        unit, unless `source_column` names the person.
      public_size: declared number of units, or one number per label. Public and required; it sets sampling rates. A
        wrong number costs utility, not privacy. A number of more than two significant digits gives an
        `ExactSizeWarning`, once: it reads like a count of the records.
      text_key: field that holds the text.
      label_key: field that holds the label, if labels split the examples.
      labels: every label that may occur, in the order that breaks ties. Public.
      unit_key: field that names the unit (for instance a user). None: every record is a unit of its own.
      fields: further text fields that prompts may use.
      dataset_id: declared name of the data set. Public; two data sets on one ledger need two names.
      max_chars: characters kept of each text; longer texts are cut. Public.
      records_per_unit: the number of first records kept of each unit. Public.
      labels_as_text: reads integer and boolean labels as text, declared ones too: 7 as "7", True as "true".
      exact_size_is_public: the number of units is public, as under `replace_one`; silences the warning.
      allow_large_delta: a ledger's delta may be as large as 1 / public_size, as in the papers, not only a tenth of it;
        gives a `LargeDeltaWarning` and stands in reports.

    Raises:
      ConfigurationError: a public argument is out of range.
      RecordError: a record lacks a field, holds no text or an undeclared label, or a unit has another label than in
        examples of this `dataset_id` that this process bound to an existing ledger. Index and value are hidden.

    Example:
      >>> private = PrivateExamples(
      ...     [{"text": "my card was charged twice", "queue": "billing"}],
      ...     label_key="queue",
      ...     labels=("billing", "login"),
      ...     public_size=12_000,
      ... )
      >>> private
      PrivateExamples(dataset_id='private-examples', content=<private>)
      >>> private.fields
      ('text', 'queue')
    """

    __slots__ = ("_bond", "_declared", "_identity", "_open", "_redeclare", "_remove", "_root")

    def __init__(
        self,
        records: Iterable[Any] | DocumentLoader,
        *,
        public_size: int | Mapping[str, int] | Mapping[int, int] | None = None,
        text_key: str = "text",
        label_key: str | None = None,
        labels: Iterable[str | int] | None = None,
        unit_key: str | None = None,
        fields: Iterable[str] = (),
        dataset_id: str = "private-examples",
        max_chars: int = 20_000,
        records_per_unit: int = 1,
        labels_as_text: bool = False,
        exact_size_is_public: bool = False,
        allow_large_delta: bool = False,
    ) -> None:
        wrong_container = container_fault(records)
        source = iter(()) if wrong_container else each_record(records)
        del records
        if wrong_container:
            raise ConfigurationError(wrong_container)
        check_flag("labels_as_text", labels_as_text)
        check_flag("exact_size_is_public", exact_size_is_public)
        if public_size is None:
            raise fail("public_size", "the declared number of units, or one number per label", None, _NO_SIZE)
        if labels_as_text:
            labels = _as_text(labels)
            public_size = _as_text(public_size) if isinstance(public_size, Mapping) else public_size
        declared = self._declared = make_declaration(
            dataset_id=dataset_id,
            public_size=public_size,
            text_key=text_key,
            label_key=label_key,
            labels=labels,
            unit_key=unit_key,
            fields=fields,
            max_chars=max_chars,
            records_per_unit=records_per_unit,
            allow_large_delta=allow_large_delta,
        )
        if not exact_size_is_public:
            _warn_of_count(declared)
        units, fault = read_units(source, declared, labels_as_text=labels_as_text)
        del source
        if units is None:
            shown = "for JSON lines or CSV, `dpicl check FILE` with the same declaration shows them to the owner"
            raise RecordError(f"{fault} Index and value are hidden; {shown}.")
        label_of = labels_by_unit(units, declared)
        if has_moved(label_of, declared):
            del units, label_of
            raise RecordError(_MOVED)
        self._adopt(declared, make_opaque_pool(units), UnitBinding(_keeping(label_of, declared)))

    def redeclared(
        self,
        *,
        dataset_id: str,
        public_size: int | Mapping[str, int],
        label_key: str | None = None,
        labels: Iterable[str] | None = None,
        fold_case: bool = True,
    ) -> PrivateExamples:
        """Declares the same units again: with another size, or split by labels that were released since.

        Formal guarantees:
          - All declarations share the units and the ledger: binding, opening or removing through one applies to all,
            and their releases add up on one ledger. Binding one also binds the first declaration under its name, so
            other processes cannot bind the same units to another ledger of the same store.
          - The rule that gives a unit its label is part of the declaration: one name never has two splits.
          - A unit's label is chosen by looking at that unit alone: the most frequent of the declared labels among the
            values of `label_key` in its records, compared by the public rule of `normalized`, ties going to the label
            declared first. Its other records are left out; a unit without a declared label is in no label's branch.

        Args:
          dataset_id: public name of this declaration; has to be new.
          public_size: as in the constructor. The budget's delta has to suit the first declaration's as well.
          label_key: a declared field that holds the new label; None: labels stay as they are.
          labels: every label that splits the units from now on, in the order that breaks ties. Public: declared, or
            released by a discovery. Without `label_key`: the present labels, in their order.
          fold_case: whether labels are compared without case.

        Raises:
          ConfigurationError: a public argument is out of range, or the examples have a label already.
          RecordError: the units could not be split; the message hides the cause.
        """
        how: dict[str, Any] = {"public_size": public_size, "label_key": label_key, "labels": labels}
        again: PrivateExamples = provided("redeclared").redeclared(
            self, dataset_id=dataset_id, fold_case=fold_case, **how
        )
        return again

    def _adopt(
        self, declared: Declaration, sealed: Sealed, bond: UnitBinding, root: PrivateExamples | None = None
    ) -> None:
        self._declared = declared
        self._open, self._remove, self._redeclare = sealed
        self._bond, self._identity, self._root = bond, object(), root

    @property
    def dataset_id(self) -> str:
        """The declared name of the data set."""
        return self._declared.dataset_id

    @property
    def public_size(self) -> int | dict[str, int]:
        """The declared number of units, per label if it was declared so."""
        size = self._declared.public_size
        return size if isinstance(size, int) else dict(size)

    @property
    def text_key(self) -> str:
        """The field that holds the text."""
        return self._declared.text_key

    @property
    def label_key(self) -> str | None:
        """The field that holds the label, or None."""
        return self._declared.label_key

    @property
    def labels(self) -> tuple[str, ...] | None:
        """The declared labels, or None if labels do not split the examples."""
        return self._declared.labels or None

    @property
    def unit_key(self) -> str | None:
        """The field that names the unit, or None."""
        return self._declared.unit_key

    @property
    def fields(self) -> tuple[str, ...]:
        """Every declared field, text and label included."""
        return self._declared.fields

    @property
    def max_chars(self) -> int:
        """Characters kept of each text."""
        return self._declared.max_chars

    @property
    def records_per_unit(self) -> int:
        """Records kept of each unit."""
        return self._declared.records_per_unit

    @property
    def blocks(self) -> tuple[int, int] | None:
        """Of a range of a stream: its first and last block; None: the examples are of no stream."""
        return None

    @property
    def declaration(self) -> dict[str, Any]:
        """All declared values as JSON, as ledgers and reports show them."""
        return self._declared.to_dict()

    def public_size_of(self, label: str | None) -> int:
        """Returns the declared number of units of a label, or of all units for None.

        One number declared over several labels counts as spread evenly, rounded down to at least 1; this affects
        utility only.

        Args:
          label: a declared label, or None for all units.

        Raises:
          ConfigurationError: the label is not declared.
        """
        self._check_label(label)
        size = self._declared.public_size
        if label is None:
            return self._declared.total_size
        if isinstance(size, int):
            return max(1, size // len(self._declared.labels))
        return dict(size)[label]

    def check_delta(self, delta: float) -> None:
        """Refuses a delta above 1 / (10 * public_size), for this and the first declaration of the units.

        With `allow_large_delta` it refuses one above 1 / public_size, and warns once of one above a tenth of that.

        Args:
          delta: the budget's delta.

        Raises:
          ConfigurationError: delta is out of range or above the limit.
        """
        checked = check_delta(delta)
        for each in self._lineage:
            declared = each._declared  # noqa: SLF001  its own class
            if checked > declared.most_delta:
                expected = f"at most {declared.delta_rule} = {declared.most_delta} for {each.dataset_id!r}"
                advice = "A larger delta may give away whole records. Lower delta, or correct public_size."
                raise fail("delta", expected, delta, advice)
            known = each.dataset_id, checked
            if checked > 1 / (10 * declared.total_size) and known not in self._bond.warned_of:
                self._bond.warned_of.add(known)
                warnings.warn(
                    f"delta: {checked:.3g} is above 1/(10 * public_size) of {each.dataset_id!r}, as allow_large_delta "
                    f"says. Publishing a whole record with a chance of {checked * declared.total_size:.0%} would "
                    "satisfy it too.",
                    LargeDeltaWarning,
                    stacklevel=2,
                )

    def remove(self, unit: str | int) -> None:
        """Deletes the content of one unit. Its position stays, so rates, sampling and ledger do not change.

        Does not tell whether the unit existed. Releases made before the removal stay as they are.

        Args:
          unit: value of `unit_key` (7 and "7" name the same unit); without `unit_key`, the 0-based position that
            the record had at construction.

        Raises:
          ConfigurationError: `unit` is not of the type that names a unit here.
        """
        if self.unit_key is None:
            name: str | None = str(check_int("unit", unit, low=0)) if isinstance(unit, int) else None
        else:
            name = unit_name(unit)
        if name is None:
            wanted = "a position (an integer)" if self.unit_key is None else f"a value of {self.unit_key!r}"
            raise fail("unit", wanted, type(unit).__name__)
        self._remove(name)

    def _attach(self, ledger_id: str) -> None:
        """Binds these examples to one ledger, permanently; the same ledger again changes nothing."""
        with self._bond.lock:
            if self._bond.exposed:
                msg = f"{self.dataset_id!r} was read without a charge, so no ledger can protect it. Build it again."
                raise PrivateAccessError(msg)
            if self._bond.ledger_id not in {None, ledger_id}:
                raise self._other_ledger(ledger_id)
            self._bond.ledger_id = ledger_id

    def _keep_bound(self, ledger: object | None) -> None:
        """Records the labels of bound units once; `ledger` is the store whose end frees the record, or None."""
        with self._bond.lock:
            record, self._bond.keep_bound = self._bond.keep_bound, None
        if record is not None and self._ledger_id is not None:
            record(self._ledger_id, ledger)

    @property
    def _lineage(self) -> tuple[PrivateExamples, ...]:
        """The first declaration of these units, then this one; a ledger binds both."""
        return (self,) if self._root is None else (self._root, self)

    @property
    def _ledger_id(self) -> str | None:
        return self._bond.ledger_id

    def _pool(self, label: str | None, *, ledger_id: str | None) -> Pool:
        """Opens the pool of one label, or of all units. Only the curator may call this."""
        self._check_label(label)
        with self._bond.lock:
            if ledger_id is None:
                self._expose()
            elif ledger_id != self._ledger_id:
                raise self._other_ledger(ledger_id)
        return self._open(label)

    def _other_ledger(self, ledger_id: str) -> PrivacyBudgetMismatchError:
        msg = f"{self.dataset_id!r}: expected ledger {self._ledger_id}, to which it is bound, found {ledger_id}."
        return PrivacyBudgetMismatchError(f"{msg} Give all components of these examples one budget.")

    def _expose(self) -> None:
        if self._ledger_id is not None:
            msg = f"{self.dataset_id!r} is bound to a ledger and refuses every read without a privacy charge."
            raise PrivateAccessError(msg)
        self._bond.exposed = True

    def _check_label(self, label: str | None) -> None:
        if label is not None and label not in self._declared.labels:
            raise fail("label", f"None or a declared label among {list(self._declared.labels)}", label)

    def __bool__(self) -> bool:
        """Always true: `__len__` alone would make a truth test raise."""
        return True

    def __len__(self) -> NoReturn:
        raise PrivateAccessError(_CLOSED)

    def __getitem__(self, key: object) -> NoReturn:
        del key
        raise PrivateAccessError(_CLOSED)

    def __iter__(self) -> NoReturn:
        raise PrivateAccessError(_CLOSED)

    def __contains__(self, record: object) -> NoReturn:
        del record
        raise PrivateAccessError(_CLOSED)

    def __repr__(self) -> str:
        declared = getattr(self, "_declared", None)  # absent while an error of the constructor is shown
        return f"PrivateExamples(dataset_id={declared and declared.dataset_id!r}, content=<private>)"


_CLOSED = (
    "PrivateExamples has no length, index or iteration, because each would show private records without a charge: give "
    "it to a component, such as DPVotingRunnable or UnitCounter, which releases answers or counts on a budget."
)
_NO_SIZE = (
    "Give PrivateExamples(records, public_size=...): a public figure or a round number, not the number of records, "
    "which is private."
)
_MOVED = (
    "records: expected every unit to have the label that it has in the bound examples of this dataset_id, found "
    "another label. The unit would be read under two labels at the price of one. Index and value are hidden; restore "
    "the label, leave the unit out, or give these records a dataset_id and a share of their own."
)


def _keeping(labels: LabelsByUnit, declared: Declaration) -> Callable[[str, object | None], None]:
    """Returns a closure over the labels, so that no attribute shows how many units there are."""
    return lambda ledger_id, ledger: record_bound_labels(labels, declared, ledger_id, ledger)


_DIGITS = 2
"""Significant digits of a declared size that looks declared."""
_WARNED: set[int] = set()
_CALLER = 4
"""Frames from the warning to the caller of the constructor, which `tells_how_to_build` wraps."""


def _warn_of_count(declared: Declaration) -> None:
    """Warns once of each declared number that reads like a count; looks at nothing but the number."""
    size = declared.public_size
    for number in (size,) if isinstance(size, int) else dict(size).values():
        digits = str(number)
        if len(digits.rstrip("0")) > _DIGITS and number not in _WARNED:
            message = (
                f"public_size: {number} reads like a count of the records, which is private. Declare a round number, "
                f"such as {digits[:_DIGITS].ljust(len(digits), '0')} (a wrong one costs utility, not privacy), or say "
                "exact_size_is_public=True."
            )
            warnings.warn(message, ExactSizeWarning, stacklevel=_CALLER)
            _WARNED.add(number)


def _as_text(declared: Any) -> Any:
    """Returns declared labels, or sizes by label, with integers and booleans as text."""
    if isinstance(declared, Mapping):
        texts = {label_text(label): size for label, size in declared.items()}
        if len(texts) < len(declared):
            raise fail("public_size", "one number per label", "two for one text", "1 and '1' are one label.")
        return texts
    return tuple(map(label_text, declared)) if _is_listed(declared) else declared


def container_fault(records: Any) -> str:
    """Returns what is wrong with the container of records, by its type and attributes."""
    if isinstance(records, DocumentLoader):
        return ""
    is_frame = hasattr(records, "columns")  # its columns are attributes too, whatever their names
    # The lines of a file are no records: a quoted cell may hold several. Some files forward what they have.
    is_file = not is_frame and hasattr(records, "readline")
    # A document can be iterated, as every pydantic object: over its fields.
    is_document = not is_frame and hasattr(records, "page_content")
    is_record = isinstance(records, Mapping) or is_document
    if is_record or is_file or isinstance(records, (str, bytes)) or not isinstance(records, Iterable):
        advice = " Of a table of splits give one; put a single record into a list." * is_record
        if is_file or isinstance(records, (str, os.PathLike)):
            advice = " Read the file first: csv.DictReader(file), map(json.loads, file), a data frame or a loader."
        return f"records: expected an iterable of texts or mappings, found {type(records).__name__}.{advice}"
    return ""


def each_record(records: Any) -> Iterator[Any]:
    """Yields what a frame, a loader or any other iterable holds."""
    if isinstance(records, DocumentLoader):
        yield from records.lazy_load()
    elif hasattr(records, "iter_rows"):  # polars
        yield from records.iter_rows(named=True)
    elif hasattr(records, "iloc") and hasattr(records, "columns"):  # pandas; a Series has no columns
        yield from records.to_dict("records")
    else:
        yield from records
