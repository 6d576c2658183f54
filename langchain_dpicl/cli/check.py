"""Runs `dpicl check`: shows the owner what a file of records holds, what is refused and which declaration fits."""

# Every other command shows nothing of the records. This one shows counts, labels and line numbers, to the one person
# who holds the file anyway; its output is as private as the file.

from __future__ import annotations

import argparse
import csv
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from langchain_dpicl.cli.config import METHODS, Data, read_settings
from langchain_dpicl.cli.inputs import UNREADABLE, check_out, is_csv, numbered_lines, numbered_rows, open_records
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy._validate import fail
from langchain_dpicl.privacy.data.units import (
    Declaration,
    fields_of,
    kind_of,
    label_text,
    make_declaration,
    read_record,
    unit_name,
)
from langchain_dpicl.privacy.extensions.redeclared import normalized
from langchain_dpicl.privacy.ledger.amounts import check_name

_REFUSED = 1
_FOR_THE_OWNER = "For the owner of the records alone, never for sharing: counts, labels and line numbers are private."
_MAX_CHARS = 20_000
"""Characters that are kept of a text; the default of `PrivateExamples`."""
_SHOWN = 10
_FEW_VALUES = 20
"""A field with at most this many values may be a label."""
_UNEVEN = 2.0
"""Labels are declared one by one where the largest has more units than this many times the smallest."""


def run_check(arguments: argparse.Namespace, *, say: Callable[[str], object]) -> int:
    """Prints what the file holds; returns 0, or 1 where a record would be refused."""
    path, out = arguments.file, arguments.out
    if out is not None:
        check_out(out, path)
        if out.exists():
            raise fail("--out", "a file that does not exist yet", str(out), "Remove it first, or name another.")
    data = read_settings(arguments, methods=tuple(METHODS)).data
    found = _read(path, data.text_key)
    declared = _Declared.of(data, found)
    refused, lines = _refused(declared, found)
    report = [
        _FOR_THE_OWNER,
        *_section("file", _file_lines(path, found)),
        *_section("fields", _field_lines(data, found)),
        *_section("texts", _text_lines(data, found)),
        *_section("labels", _label_lines(data, found, declared)),
        *_section("persons", _unit_lines(data, found)),
        *_section("refused", lines),
        *_section("declare", declared.lines()),
    ]
    say("\n".join(report))
    if out is not None:
        with out.open("x", encoding="utf-8") as file:
            file.write(declared.toml(path))
        say(f"written: {out}; its labels and size were read off the records: change what is not public")
    return _REFUSED if refused else 0


# -- reading -----------------------------------------------------------------------------------------------------


@dataclass
class _Found:
    """What a file holds.

    Attributes:
      text_key: field of a record that is a text alone.
      records: with the numbers of their lines.
      broken: what is wrong with lines that cannot be read, and their numbers.
    """

    text_key: str
    records: list[tuple[int, Any]] = field(default_factory=list)
    broken: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))

    def values(self, name: str) -> list[tuple[int, Any]]:
        """Returns the values of a field with their lines."""
        fields = ((number, fields_of(record, self.text_key) or {}) for number, record in self.records)
        return [(number, one.get(name)) for number, one in fields]

    def names(self) -> list[str]:
        """Returns the fields that occur, in the order of their first record."""
        return list(dict.fromkeys(name for _, one in self.records if isinstance(one, Mapping) for name in one))


_NO_CSV = (
    "no CSV from here on: expected a first line of distinct names, and cells between commas (not ; or tabs), in quotes "
    "where they hold a comma, a quote or a line break"
)


def _read(path: Path, text_key: str) -> _Found:
    found = _Found(text_key)
    number, fault = 0, ""
    try:
        with open_records(path) as file:
            if is_csv(path):
                for number, row in numbered_rows(file):
                    if row is None:
                        found.broken["more cells than the first line has fields; quote texts with commas"].append(
                            number
                        )
                    else:
                        found.records.append((number, row))
            else:
                for number, line in numbered_lines(file):
                    _read_line(found, number, line)
    except ConfigurationError:
        raise
    except UNREADABLE as error:
        kind = f"({type(error).__name__}): neither UTF-8 nor whole rows"
        fault = _NO_CSV if isinstance(error, csv.Error) else f"nothing is readable from here on {kind}"
    if fault:
        found.broken[fault].append(number + 1)
    return found


def _read_line(found: _Found, number: int, line: str) -> None:
    if line.lstrip().startswith("["):
        found.broken["a JSON array; write one record per line"].append(number)
        return
    try:
        found.records.append((number, json.loads(line)))
    except (ValueError, RecursionError):
        found.broken["no JSON"].append(number)


# -- what is shown -----------------------------------------------------------------------------------------------


def _section(title: str, lines: Iterable[str]) -> list[str]:
    return [f"{title if not place else '':<9}{line}" for place, line in enumerate(lines)]


def _places(numbers: Sequence[int]) -> str:
    more = f" and {len(numbers) - _SHOWN:,} more" if len(numbers) > _SHOWN else ""
    return f"line {', '.join(map(str, numbers[:_SHOWN]))}{more}"


def _file_lines(path: Path, found: _Found) -> Iterable[str]:
    yield f"{path}: {len(found.records):,} records"
    for fault, numbers in found.broken.items():
        yield f"cannot be read: {len(numbers):,}, {fault} ({_places(numbers)})"


def _field_lines(data: Data, found: _Found) -> Iterable[str]:
    for name in found.names() or [data.text_key]:
        kinds = Counter("text" if isinstance(value, str) else kind_of(value) for _, value in found.values(name))
        kinds = Counter({kind.removeprefix("a ").removeprefix("an "): count for kind, count in kinds.items()})
        yield f"{name}: {', '.join(f'{kind} {count:,}' for kind, count in kinds.most_common())}"


def _text_lines(data: Data, found: _Found) -> Iterable[str]:
    texts = [(number, value) for number, value in found.values(data.text_key) if isinstance(value, str)]
    if not texts:
        others = [name for name in found.names() if any(isinstance(value, str) for _, value in found.values(name))]
        yield f"none under {data.text_key!r}; fields with text: {others}. Give --text-key."
        return
    lengths = sorted(len(text) for _, text in texts)
    yield f"{len(texts):,} of {lengths[len(lengths) // 2]:,} characters in the middle, {lengths[-1]:,} at most"
    if empty := [number for number, text in texts if not text.strip()]:
        yield f"empty: {len(empty):,}, taken and of no use ({_places(empty)})"
    if long := [number for number, text in texts if len(text) > _MAX_CHARS]:
        yield f"longer than max_chars = {_MAX_CHARS:,}: {len(long):,}, cut there ({_places(long)})"
    if repeated := len(texts) - len({text for _, text in texts}):
        yield f"equal to an earlier one: {repeated:,}"
    known = {data.text_key, data.label_key, data.unit_key, *(data.fields or ())}
    more = [name for name in found.names() if name not in known and _may_be_text(found, name)]
    if more:
        yield f"further texts: {more}; dropped, unless declared: data.fields, for prompts that show them too"


def _label_lines(data: Data, found: _Found, declared: _Declared) -> Iterable[str]:
    if data.label_key is None:
        names = [name for name in found.names() if name != data.text_key and _may_be_label(found, name)]
        yield f"no --label-key; fields of few values: {names or 'none'}"
        return
    counts = Counter(label_text(value) for _, value in found.values(data.label_key) if _is_label(value))
    if not counts:
        names = [name for name in found.names() if name != data.text_key and _may_be_label(found, name)]
        yield f"none under {data.label_key!r}; fields of few values: {names or 'none'}. Give --label-key."
    for label, count in counts.most_common(_FEW_VALUES):
        reason = "not declared" if _may_be_declared(label) else "no label: 1 to 200 printable characters are"
        undeclared = "" if label in declared.known else f" ({reason})"
        yield f"{_short(label)}: {count:,}{undeclared}"
    if len(counts) > _FEW_VALUES:
        yield f"and {len(counts) - _FEW_VALUES:,} more"
    for label in declared.labels or ():
        if label not in counts:
            yield f"{_short(label)}: declared, and no record has it"


def _unit_lines(data: Data, found: _Found) -> Iterable[str]:
    if data.unit_key is None:
        names = [name for name in found.names() if name != data.text_key and _may_be_unit(found, name)]
        yield f"no --unit-key: each record is a unit of its own; fields whose values repeat: {names or 'none'}"
        return
    counts = Counter(name for _, value in found.values(data.unit_key) if (name := unit_name(value)) is not None)
    several = sum(count > 1 for count in counts.values())
    kept = data.records_per_unit or 1
    most = max(counts.values(), default=0)
    yield f"{len(counts):,} values of {data.unit_key!r}, {several:,} of them on several records, at most {most:,}"
    if several:
        yield f"records_per_unit = {kept} keeps the first {kept} of each"
    if alike := len(counts) - len({normalized(name) for name in counts}):
        yield f"names that differ from another in case or spaces alone: {alike:,}; two names are two units"
    if data.label_key is not None:
        labels: dict[str, set[Any]] = defaultdict(set)
        for (_, name), (_, label) in zip(found.values(data.unit_key), found.values(data.label_key), strict=True):
            labels[unit_name(name) or ""].add(label_text(label) if _is_label(label) else None)
        if mixed := sum(len(each) > 1 for each in labels.values()):
            yield f"with several labels: {mixed:,}, each keeps the records of its most frequent one"


def _refused(declared: _Declared, found: _Found) -> tuple[bool, list[str]]:
    """Returns whether a record would be refused, and what is said about it."""
    faults: dict[str, list[int]] = defaultdict(list)
    known = {label: label for label in declared.declaration.labels}
    for place, (number, record) in enumerate(found.records):
        fault = read_record(record, declared.declaration, place, known, labels_as_text=declared.labels_as_text)[2]
        if fault:
            faults[fault.removeprefix("records: ")].append(number)
    lines = [f"{len(numbers):,}: {fault} ({_places(numbers)})" for fault, numbers in faults.items()]
    if found.records and declared.data.label_key is not None and declared.declaration.label_key is None:
        lines.append(f"the whole file: no record has a label under {declared.data.label_key!r}")
    if found.broken:
        lines.append("the whole file, for its lines that cannot be read")
    return bool(lines), lines or ["nothing, with the declaration below"]


@dataclass(frozen=True)
class _Declared:
    """The declaration that fits a file: what was given, and for the rest what the records suggest."""

    data: Data
    labels: tuple[str, ...] | None
    labels_as_text: bool
    public_size: Any
    declaration: Declaration

    @classmethod
    def of(cls, data: Data, found: _Found) -> _Declared:
        """Returns the declaration."""
        key = data.label_key
        values = [] if key is None else [value for _, value in found.values(key) if _is_label(value)]
        as_text = data.labels_as_text or any(label_text(value) is not value for value in values)
        counts = Counter(label_text(value) for value in values)
        labels = data.labels or tuple(sorted(label for label in counts if _may_be_declared(label))) or None
        size = data.public_size or _size_of(data, found, labels)
        declaration = make_declaration(
            dataset_id=data.dataset_id or "private-examples",
            public_size=size,
            text_key=data.text_key,
            label_key=key if labels else None,
            labels=labels,
            unit_key=data.unit_key,
            fields=data.fields or (),
            max_chars=_MAX_CHARS,
            records_per_unit=data.records_per_unit or 1,
        )
        return cls(data, labels, as_text, size, declaration)

    @property
    def known(self) -> frozenset[str]:
        """The declared labels."""
        return frozenset(self.labels or ())

    def table(self) -> dict[str, Any]:
        """Returns the table [data], without the file."""
        given = {"text_key": self.data.text_key, "label_key": self.declaration.label_key, "labels": self.labels}
        more = {name: getattr(self.data, name) for name in ("unit_key", "records_per_unit", "fields", "dataset_id")}
        flag = {"labels_as_text": True} if self.labels_as_text else {}
        table = {**given, **flag, "public_size": self.public_size, **more}
        return {name: value for name, value in table.items() if value is not None}

    def delta(self) -> str:
        """Returns the largest power of ten, at most 1e-6, that the size allows."""
        digits = 6
        while 10.0**-digits > 1 / (10 * self.declaration.total_size):
            digits += 1
        return f"1e-{digits}"

    def lines(self) -> Iterable[str]:
        """Returns the declaration as a settings file holds it."""
        for name, value in self.table().items():
            is_long = isinstance(value, (tuple, dict)) and len(value) > _FEW_VALUES
            yield f"{name} = {f'one entry for each of {len(value):,}' if is_long else _toml(value)}"
        yield f"delta = {self.delta()} or less; public_size is rounded, a figure known without counting is better"

    def toml(self, path: Path) -> str:
        """Returns a settings file."""
        table = "\n".join(f"{name} = {_toml(value)}" for name, value in self.table().items())
        return (
            "# Labels and public_size were read off the records. Keep them only if they are public.\n"
            f"[data]\nfile = {_toml(str(path))}\n{table}\n\n"
            f"[budget]\nepsilon = 1.0  # yours to decide\ndelta = {self.delta()}\n"
        )


def _size_of(data: Data, found: _Found, labels: Sequence[str] | None) -> Any:
    """Returns the number of units, rounded; one for each label where labels differ much in size."""
    names = range(len(found.records)) if data.unit_key is None else [
        unit_name(value) for _, value in found.values(data.unit_key)
    ]  # fmt: skip
    units = dict.fromkeys(names)
    total = _round(len(units))
    if labels is None or data.label_key is None:
        return total
    values = [label_text(value) if _is_label(value) else None for _, value in found.values(data.label_key)]
    counts = Counter(label for _, label in dict.fromkeys(zip(names, values, strict=True)))
    sizes = {label: _round(counts[label]) for label in labels}
    is_uneven = max(sizes.values()) > _UNEVEN * min(sizes.values())
    return sizes if is_uneven else total


def _round(count: int) -> int:
    """Returns a number near a count with one digit, or one and a half; at least 1."""
    power = 10 ** (len(str(count)) - 1)
    steps = [1, *(step * power // 2 for step in (2, 3, *range(4, 21, 2)))]
    return min(steps, key=lambda step: (abs(step - count), step)) or 1


def _is_label(value: Any) -> bool:
    return isinstance(value, str) or label_text(value) is not value


def _may_be_declared(label: str) -> bool:
    try:
        check_name("label", label)
    except ConfigurationError:
        return False
    return True


def _may_be_text(found: _Found, name: str) -> bool:
    """Whether a field holds words of its own on most records: neither a label nor a name."""
    texts = {value for _, value in found.values(name) if isinstance(value, str) and " " in value.strip()}
    return 2 * len(texts) > len(found.records)


def _may_be_label(found: _Found, name: str) -> bool:
    values = [value for _, value in found.values(name)]
    distinct = {label_text(value) for value in values if _is_label(value)}
    return all(map(_is_label, values)) and 1 < len(distinct) <= min(_FEW_VALUES, len(values) // 2)


def _may_be_unit(found: _Found, name: str) -> bool:
    names = [unit_name(value) for _, value in found.values(name)]
    return None not in names and _FEW_VALUES < len(set(names)) < len(names)


def _short(label: str) -> str:
    return repr(label if len(label) <= 60 else label[:60] + "...")


def _toml(value: Any) -> str:
    """Returns a value as TOML; of JSON's texts it differs in one control character."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml(str(name))} = {_toml(part)}" for name, part in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
