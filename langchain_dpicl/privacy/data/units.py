"""Reads records into units, each with one label by a rule that looks at it alone, and refuses moved labels."""

from __future__ import annotations

import gc
import json
import math
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from numbers import Integral, Real
from typing import Any, Final, TypeAlias

import numpy as np

from langchain_dpicl._lazy import provided
from langchain_dpicl.privacy._validate import check_int, fail, plain_or_type
from langchain_dpicl.privacy.ledger.amounts import check_name
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM

# A fault of a record is returned, never raised here: the caller raises it from a frame that holds no record.

Record: TypeAlias = dict[str, str]
Unit: TypeAlias = tuple[Record, ...]
"""The records of one unit, all of one label; empty once the unit was removed."""

SPLIT_RULE = 1
"""The version of `relabel_unit` and `normalized`; change it with their behaviour."""


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
        if self.allow_large_delta:  # left out otherwise, as in ledgers of earlier versions
            shown["allow_large_delta"] = True
        if self.origin is not None:  # left out otherwise, as in ledgers of earlier versions
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
        allow_large_delta=_check_flag(allow_large_delta),
    )


def _check_flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise fail("allow_large_delta", "True or False", plain_or_type(value))
    return value


def _check_names(name: str, values: Iterable[str]) -> tuple[str, ...]:
    is_listed = isinstance(values, Iterable) and not isinstance(values, (str, bytes))
    names = tuple(values) if is_listed else ()
    are_texts = all(isinstance(value, str) for value in names)
    if not is_listed or not are_texts or len(set(names)) != len(names):
        # A column of records passed by mistake must not be printed.
        raise fail(name, "a sequence of distinct strings", type(values).__name__)
    return tuple(check_name(name, value) for value in names)


def _check_labels(label_key: str | None, labels: Iterable[Any] | None) -> tuple[str, ...]:
    if label_key is None and labels is None:
        return ()
    if labels is None:
        raise fail("labels", f"the declared labels of {label_key!r}", labels, "They are public: list them by hand.")
    if label_key is None:
        raise fail("label_key", "the field that holds the label, since labels are declared", label_key)
    listed: Any = tuple(labels) if isinstance(labels, Iterable) and not isinstance(labels, (str, bytes)) else labels
    if isinstance(listed, tuple) and (numbers := [type(label) for label in listed if label_text(label) is not label]):
        raise fail("labels", "text", numbers[0], AS_TEXT.strip())
    declared = _check_names("labels", listed)
    if not declared:
        raise fail("labels", "at least one label", labels)
    return declared


def _check_label_key(label_key: str, text_key: str) -> str:
    if label_key == text_key:
        raise fail("label_key", "another field than text_key", label_key)
    return check_name("label_key", label_key)


def _check_size(size: int | Mapping[Any, int], labels: tuple[str, ...]) -> int | tuple[tuple[str, int], ...]:
    if not isinstance(size, Mapping):
        return check_number("public_size", size)
    if not labels or set(size) != set(labels):
        advice = "Give one number, or one number for each declared label."
        raise fail("public_size", f"exactly the labels {list(labels)}", sorted(map(str, size)), advice)
    return tuple((label, check_number(f"public_size[{label!r}]", size[label])) for label in labels)


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
        return "", {}, "records: expected every record to be text, a mapping or a Document; one is none of them."
    unit = str(number) if declared.unit_key is None else unit_name(fields.get(declared.unit_key))
    if unit is None:
        return "", {}, f"records: expected text or an integer under {declared.unit_key!r}; a record has neither."
    record: Record = {}
    for field in declared.fields:
        value, is_label = fields.get(field), field == declared.label_key
        if is_label and labels_as_text:
            value = label_text(value)
        if not isinstance(value, str):
            advice = AS_TEXT if is_label and label_text(value) is not value else ""
            if field not in fields:
                option = "label_key" if is_label else "text_key" if field == declared.text_key else "fields"
                advice = f" If it has another name, give {option}=."
            return "", {}, f"records: expected text under {field!r}; a record has {kind_of(value)}.{advice}"
        if is_label:
            if value not in known:
                advice = "Declare every label that occurs."
                return "", {}, f"records: expected a declared label under {field!r}; a record has another. {advice}"
            record[field] = known[value]
        else:
            record[field] = _clean(value, declared.max_chars)
    return unit, record, ""


def fields_of(raw: Any, text_key: str) -> Mapping[str, Any] | None:
    """Returns the fields of a text, a mapping or a LangChain document; None for anything else."""
    if isinstance(raw, str):
        return {text_key: raw}
    if isinstance(raw, Mapping):
        return raw
    metadata, content = getattr(raw, "metadata", None), getattr(raw, "page_content", None)
    return {**metadata, text_key: content} if isinstance(metadata, Mapping) and content is not None else None


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
    """Returns the name of a unit as text (7 and "7" are one unit), or None if the value cannot name a unit."""
    if isinstance(value, str):
        return str(value)
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
