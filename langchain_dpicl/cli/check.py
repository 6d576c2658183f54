"""Runs `dpicl check`, `audit` and `report`, and prices a JSON file of accounting checks; spends nothing."""

from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import importlib
import json
import os
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_dpicl._plain_files import unique_keys
from langchain_dpicl._templates import is_field_name
from langchain_dpicl.cli.inputs import (
    UNREADABLE,
    Data,
    as_typed,
    check_out,
    csv_reader,
    is_csv,
    numbered_lines,
    numbered_rows,
    open_records,
    read_data,
    read_json,
    toml_text,
    too_large,
)
from langchain_dpicl.cli.ledger import DONE, WRONG, CommandOutput, opened_store, write_new
from langchain_dpicl.exceptions import ConfigurationError, DPICLError
from langchain_dpicl.privacy._validate import (
    Adjacency,
    RowShape,
    check_delta,
    check_int,
    check_name,
    check_positive,
    check_real,
    fail,
)
from langchain_dpicl.privacy.accounting import epsilon_upper_bound
from langchain_dpicl.privacy.accounting.events import (
    BoundedRangeEvent,
    ComposedEvent,
    Event,
    GaussianEvent,
    PureEvent,
    RepeatedEvent,
    SubsampledEvent,
)
from langchain_dpicl.privacy.extensions.logit_sums import ClippedLogitMean
from langchain_dpicl.privacy.extensions.redeclared import normalized
from langchain_dpicl.privacy.mechanisms.bounded import VoteSum
from langchain_dpicl.privacy.private_examples import (
    Declaration,
    fields_of,
    kind_of,
    label_text,
    make_declaration,
    read_record,
    unit_label,
    unit_name,
)
from langchain_dpicl.reports.rendering import format_rounded_up

if TYPE_CHECKING:
    from langchain_dpicl.privacy.ledger.store import LedgerStore


# Every other command shows nothing of the records. This one shows counts, labels and line numbers, to the one person
# who holds the file anyway; its output is as private as the file.


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
    data = read_data(arguments)
    found = _read(path, data.text_key)
    declared = _Declared.of(data, found)
    refused, lines = _refused(declared, found)
    report = [
        _FOR_THE_OWNER,
        *_section("file", _file_lines(path, found)),
        *_section("fields", _field_lines(data, found)),
        *_section("texts", _text_lines(path, data, found)),
        *_section("labels", _label_lines(data, found, declared)),
        *_section("persons", _unit_lines(data, found)),
        *_section("refused", lines),
        *_section("declare", declared.lines()),
    ]
    say("\n".join(report))
    is_empty = not found.records and not found.broken  # all is declared by hand
    has_text = is_empty or data.text_key in found.names() or _texts(data, found)
    missing = [] if has_text else [f"a text under {data.text_key!r}"]
    if declared.declaration.label_key != data.label_key:
        missing.append(f"a label under {data.label_key!r}")
    if out is not None and missing:
        say(f"not written: {out}; no record has {' or '.join(missing)}")
    elif out is not None:
        try:
            write_new(out, declared.toml(path))
        except UnicodeEncodeError:
            advice = "Rename the file, or the field that an option names."
            raise fail("--out", "names in UTF-8, which a file of settings can hold", "another", advice) from None
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


_NO_UTF8 = "invalid UTF-8; save the file as UTF-8"
_OTHER_BYTES = re.compile("[\udc80-\udcff]")
"""What stands for bytes that are no UTF-8, after reading with "surrogateescape"."""
_NO_COMMAS = "expected cells between commas, found another sign between the names of the first line"
_NO_CSV = (
    "no CSV from here on: expected a first line of distinct names, and cells between commas (not ; or tabs), in quotes "
    "where they hold a comma, a quote or a line break"
)


def _read(path: Path, text_key: str) -> _Found:
    found = _Found(text_key)
    number, fault = 0, ""
    try:
        # Reading strictly fails up to 8 KiB before the bytes at fault, and names no line.
        with open_records(path, errors="surrogateescape") as file:
            if is_csv(path):
                reader = csv_reader(file)
                if _OTHER_BYTES.search("".join(reader.fieldnames or ())):
                    found.broken[_NO_UTF8].append(1)
                for number, row in numbered_rows(reader):
                    _read_row(found, number, row)
            else:
                for number, line in numbered_lines(file):
                    _read_line(found, number, line)
    except ConfigurationError:
        raise
    except UNREADABLE as error:
        cut = f"nothing is readable from here on ({type(error).__name__}): the file is cut or broken"
        fault = _NO_CSV if isinstance(error, csv.Error) else cut
    except MemoryError:
        fault = too_large()
    if fault:
        found.broken[fault].append(number + 1)
    return found


def _read_row(found: _Found, number: int, row: dict[str, Any] | None) -> None:
    if row is None:
        found.broken["more cells than the first line has fields; quote texts with commas"].append(number)
        return
    if _OTHER_BYTES.search("".join(value or "" for value in row.values())):
        found.broken[_NO_UTF8].append(number)
    else:
        found.records.append((number, row))


def _read_line(found: _Found, number: int, line: str) -> None:
    if _OTHER_BYTES.search(line):
        found.broken[_NO_UTF8].append(number)
        return
    if line.lstrip().startswith("["):
        found.broken["a JSON array; write one record per line"].append(number)
        return
    try:
        found.records.append((number, json.loads(line, object_pairs_hook=unique_keys)))
    except (ValueError, RecursionError):
        found.broken["no JSON, or a key twice"].append(number)


# -- what is shown -----------------------------------------------------------------------------------------------


def _section(title: str, lines: Iterable[str]) -> list[str]:
    return [f"{title if not place else '':<9}{line}" for place, line in enumerate(lines)]


def _places(numbers: Sequence[int]) -> str:
    more = f" and {len(numbers) - _SHOWN:,} more" if len(numbers) > _SHOWN else ""
    return f"line {', '.join(map(str, numbers[:_SHOWN]))}{more}"


def _file_lines(path: Path, found: _Found) -> Iterable[str]:
    yield f"{path}: {len(found.records):,} records"
    if not found.records and not found.broken:
        yield "a run on no record is taken, and spends its budget on noise alone"
    for fault, numbers in found.broken.items():
        yield f"cannot be read: {len(numbers):,}, {fault} ({_places(numbers)})"


def _field_lines(data: Data, found: _Found) -> Iterable[str]:
    for name in found.names() or ([data.text_key] if found.records else []):
        kinds = Counter("text" if isinstance(value, str) else kind_of(value) for _, value in found.values(name))
        kinds = Counter({kind.removeprefix("a ").removeprefix("an "): count for kind, count in kinds.items()})
        is_read = is_field_name(name) or name not in {data.text_key, data.label_key, *(data.fields or ())}
        unread = "" if is_read else f"; no prompt can show {name!r}: rename the field"
        yield f"{name}: {', '.join(f'{kind} {count:,}' for kind, count in kinds.most_common())}{unread}"


def _texts(data: Data, found: _Found) -> list[tuple[int, str]]:
    return [(number, value) for number, value in found.values(data.text_key) if isinstance(value, str)]


def _text_lines(path: Path, data: Data, found: _Found) -> Iterable[str]:
    texts = _texts(data, found)
    if not texts and is_csv(path) and len(found.names()) == 1 and re.search("[;\t]", found.names()[0]):
        yield f"none: {_NO_COMMAS}"
        return
    if not texts:
        others = [name for name in found.names() if any(isinstance(value, str) for _, value in found.values(name))]
        yield f"none under {data.text_key!r}; fields with text: {others}. Give --text-key."
        return
    lengths = sorted(len(text) for _, text in texts)
    yield f"{len(texts):,} of {lengths[len(lengths) // 2]:,} characters in the middle, {lengths[-1]:,} at most"
    if empty := [number for number, text in texts if not text.strip()]:
        yield f"empty: {len(empty):,}, taken and of no use ({_places(empty)})"
    most = data.max_chars or _MAX_CHARS
    if long := [number for number, text in texts if len(text) > most]:
        yield f"longer than max_chars = {most:,}: {len(long):,}, cut there ({_places(long)})"
    if several := sum("\n" in text.strip() for _, text in texts):
        end = 'unless decoding.stop names another end, such as ["\\n\\n"]'
        yield f"of several lines: {several:,}; written ones end at the first line break, {end}"
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
        others = f"; fields of few values: {names}. Give --label-key." if names else ""
        yield f"none under {data.label_key!r}{others}"
    for label, count in counts.most_common(_FEW_VALUES):
        reason = "not declared" if _may_be_declared(label) else "no label: 1 to 200 printable characters are"
        undeclared = "" if label in declared.known else f" ({reason})"
        yield f"{_short(label)}: {count:,}{undeclared}"
    if len(counts) > _FEW_VALUES:
        yield f"and {len(counts) - _FEW_VALUES:,} more"
    every = {*counts, *(declared.labels or ())}
    if alike := len(every) - len(set(map(normalized, every))):
        yield f"labels that differ from another in case or spaces alone: {alike:,}; two spellings are two labels"
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
        for (_, value), (_, label) in zip(found.values(data.unit_key), found.values(data.label_key), strict=True):
            if (name := unit_name(value)) is not None:
                labels[name].add(label_text(label) if _is_label(label) else None)
        if mixed := sum(len(each) > 1 for each in labels.values()):
            yield (
                f"with several labels: {mixed:,}, each keeps the records of its most frequent one; where several are "
                "as frequent, of the one declared first"
            )


def _refused(declared: _Declared, found: _Found) -> tuple[bool, list[str]]:
    """Returns whether a record would be refused, and what is said about it."""
    faults: dict[str, list[int]] = defaultdict(list)
    known = {label: label for label in declared.declaration.labels}
    # Where no record has a label, the declaration names no field of labels, and the reason is in each record.
    declaration = dataclasses.replace(declared.declaration, label_key=declared.data.label_key)
    for place, (number, record) in enumerate(found.records):
        fault = read_record(record, declaration, place, known, labels_as_text=declared.labels_as_text)[2]
        if fault:
            faults[as_typed(fault.removeprefix("records: "))].append(number)
    lines = [f"{len(numbers):,}: {fault} ({_places(numbers)})" for fault, numbers in faults.items()]
    if found.broken:
        lines.append("the whole file, for its lines that cannot be read")
    names = [name for name in (declared.data.text_key, declared.data.label_key) if name and not is_field_name(name)]
    lines += [
        f"all where a prompt shows them, for {name!r}: none can show a field of this name; rename it" for name in names
    ]
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
        key = data.label_key
        values = [] if key is None else [value for _, value in found.values(key) if _is_label(value)]
        as_text = data.labels_as_text or any(label_text(value) is not value for value in values)
        counts = Counter(label_text(value) for value in values)
        sized = tuple(map(str, data.public_size)) if isinstance(data.public_size, Mapping) else ()
        found_labels = tuple(sorted(label for label in counts if _may_be_declared(label)))
        labels = data.labels or sized or found_labels or None
        size = data.public_size or _size_of(data, found, labels)
        declaration = make_declaration(
            dataset_id=data.dataset_id or "private-examples",
            public_size=size,
            text_key=data.text_key,
            label_key=key if labels else None,
            labels=labels,
            unit_key=data.unit_key,
            fields=data.fields or (),
            max_chars=data.max_chars or _MAX_CHARS,
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
        more = {
            name: getattr(self.data, name)
            for name in ("unit_key", "records_per_unit", "fields", "dataset_id", "max_chars")
        }
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
            yield f"{name} = {f'one entry for each of {len(value):,}' if is_long else toml_text(value)}"
        yield f"delta = {self.delta()} or less; public_size is rounded, a figure known without counting is better"

    def toml(self, path: Path) -> str:
        table = "\n".join(f"{name} = {toml_text(value)}" for name, value in self.table().items())
        return (
            "# Labels and public_size were read off the records. Keep them only if they are public.\n"
            f"[data]\nfile = {toml_text(str(path))}\n{table}\n\n"
            f"[budget]\nepsilon = 1.0  # yours to decide\ndelta = {self.delta()}\n"
        )


def _size_of(data: Data, found: _Found, labels: Sequence[str] | None) -> Any:
    """Returns the number of units, rounded; one for each label where labels differ much in size."""
    names = range(len(found.records)) if data.unit_key is None else [
        unit_name(value) for _, value in found.values(data.unit_key)
    ]  # fmt: skip
    total = _round(len(set(names)))
    if labels is None or data.label_key is None:
        return total
    known, own = frozenset(labels), defaultdict[Any, list[str]](list)
    for name, (_, value) in zip(names, found.values(data.label_key), strict=True):
        if _is_label(value) and (label := label_text(value)) in known:
            own[name].append(label)
    counts = Counter(unit_label(each, tuple(labels)) for each in own.values())
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


VIOLATED = 1
_NAME = re.compile(r"([A-Za-z_][\w.]*):([A-Za-z_][\w.]*)(\(\))?")

_NOTES_OF_AUDIT = """\
WHAT is a file that `dpicl plan --json` wrote, or module:name of a component or plan in your own code; module:name()
calls a function without arguments that makes one. Of a DPRetrievalFreeFormRunnable name the plan. For a prompt
template or selector name the component that made it.

Records are made up and the model is a fake: the audit reads no record, calls no model and spends nothing of a budget.
Importing and calling your code runs it as usual: what it opens, reads, calls and binds in a ledger does happen.
The exit status is 1 where a claim is refuted (sound code: 1e-6 by chance for each check that tosses coins; the summary
adds them up) or a check ended with an exception, with --strict also where a check was too small to tell, and 2 where
WHAT could not be read or imported.
What no audit can see is listed with every result: docs/audits.md.
"""


def add_audit(commands: Any, *, run: Any) -> None:
    """Adds the command."""
    command = commands.add_parser(
        "audit",
        help="play against a configuration: does its epsilon hold?",
        description="Audits a configuration: lower bounds of epsilon against what is claimed.",
        notes=_NOTES_OF_AUDIT,
    )
    command.add_argument("what", metavar="WHAT", help="plan.json, or module:name")
    command.add_argument("--controls", action="store_true", help="also show that the audit detects halved noise")
    command.add_argument("--strict", action="store_true", help="fail where a check is too small to tell")
    command.add_argument("--json", action="store_true", help="print JSON and nothing else")
    command.set_defaults(run=run)


def run_audit(arguments: argparse.Namespace, *, say: Callable[[str], object]) -> int:
    """Runs the audit and prints each result; returns 0, or `VIOLATED`."""
    from langchain_dpicl.audit import audit

    subject = _find_object(arguments.what)

    def show(result: Any) -> None:
        say(f"  {result}")

    report = audit(
        subject,
        controls=arguments.controls,
        progress=None if arguments.json else show,
        name=arguments.what if _NAME.fullmatch(arguments.what) else Path(arguments.what).name,
    )
    say(report.to_json() if arguments.json else report.summary())
    failed = not report.ok or (arguments.strict and report.verdict == "undecided")
    return VIOLATED if failed else 0


def _find_object(what: str) -> Any:
    named = _NAME.fullmatch(what)
    return read_json(Path(what)) if named is None else _import_object(named[1], named[2], is_called=bool(named[3]))


def _import_object(module: str, name: str, *, is_called: bool) -> Any:
    """Imports an object; code beside the caller is found as `python -m` finds it."""
    here, problem = os.getcwd(), ""  # noqa: PTH109  an entry of sys.path is a text
    if here not in sys.path:
        sys.path.insert(0, here)
    target: Any = None
    try:
        target = importlib.import_module(module)
        for part in name.split("."):
            target = getattr(target, part)
        if is_called:
            target = target()
    # Code that leaves when it is imported was not audited either.
    except (Exception, SystemExit) as error:  # noqa: BLE001  theirs; its message may quote anything
        problem = type(error).__name__
    if problem:
        what = f"{module}:{name}" + ("()" if is_called else "")
        raise ConfigurationError(f"audit: expected {what} to be importable, found {problem}. Try it in Python.")
    return target


_SPELLINGS: dict[str, tuple[Adjacency | None, RowShape]] = {
    "any": (None, "slots"),
    "add_remove": ("add_remove", "slots"),
    "add_remove_null": ("add_remove", "units"),
    "substitution": ("replace_one", "slots"),
    "replace_one": ("replace_one", "slots"),
}
_ADJACENCY_OF_TYPE: dict[str, Adjacency] = {
    "poisson_gaussian": "add_remove",
    "poisson_pure": "add_remove",
    "slot_gaussian": "replace_one",
    "slot_pure": "replace_one",
}

_Fields = Mapping[str, Any]


def _gaussian(fields: _Fields) -> Event:
    return GaussianEvent(check_positive("noise_multiplier", fields["noise_multiplier"]))


def _pure(fields: _Fields) -> Event:
    return PureEvent(check_positive("eps", fields["eps"]))


def _sampled_event(base: Callable[[_Fields], Event]) -> Callable[[_Fields], Event]:
    def event(fields: _Fields) -> Event:
        return SubsampledEvent(base(fields), check_real("q", fields["q"], low=0.0, high=1.0, low_open=True))

    return event


def _votes(fields: _Fields, name: str) -> Event:
    """A noisy vote histogram; the format fixes its sensitivity to that of a vote that changes."""
    l2 = VoteSum().sensitivity(row_shape="slots", adjacency="replace_one").require("l2")
    return GaussianEvent(check_positive(name, fields[name]) / l2)


_SIMPLE: dict[str, tuple[frozenset[str], Callable[[_Fields], Event]]] = {
    "gaussian": (frozenset({"noise_multiplier"}), _gaussian),
    "poisson_gaussian": (frozenset({"q", "noise_multiplier"}), _sampled_event(_gaussian)),
    "slot_gaussian": (frozenset({"q", "noise_multiplier"}), _sampled_event(_gaussian)),
    "pure": (frozenset({"eps"}), _pure),
    "poisson_pure": (frozenset({"q", "eps"}), _sampled_event(_pure)),
    "slot_pure": (frozenset({"q", "eps"}), _sampled_event(_pure)),
    "bounded_range": (frozenset({"E"}), lambda fields: BoundedRangeEvent(check_positive("E", fields["E"]))),
    "gnmax": (frozenset({"sigma"}), lambda fields: _votes(fields, "sigma")),
}
_EXP_MECH = frozenset({"clip", "slots", "tau", "count"})
_CONFIDENT_GNMAX = frozenset({"sigma1", "sigma2", "thresholds", "labels"})


def _exp_mech(fields: _Fields, row_shape: RowShape, adjacency: Adjacency) -> Event:
    """Softmax sampling at temperature tau of the mean of clipped logits."""
    mean = ClippedLogitMean(
        clip=check_positive("clip", fields["clip"]), num_slots=check_int("slots", fields["slots"], low=1)
    )
    score_range = mean.sensitivity(row_shape=row_shape, adjacency=adjacency).require("range")
    once = BoundedRangeEvent(score_range / check_positive("tau", fields["tau"]))
    return RepeatedEvent(once, check_int("count", fields["count"], low=0))


def _confident_gnmax(fields: _Fields) -> Event:
    """Threshold tests on the largest count (sensitivity 1) and noisy histograms; an unused noise may be null."""
    thresholds = check_int("thresholds", fields["thresholds"], low=0)
    labels = check_int("labels", fields["labels"], low=0)
    parts: list[Event] = []
    if thresholds:
        parts.append(RepeatedEvent(GaussianEvent(check_positive("sigma1", fields["sigma1"])), thresholds))
    if labels:
        parts.append(RepeatedEvent(_votes(fields, "sigma2"), labels))
    return ComposedEvent(tuple(parts))


def event_of_check(check: Mapping[str, Any]) -> tuple[Event, Adjacency]:
    """Translates one check.

    Args:
      check: mapping with `id`, `mechanisms` (each with a `type` and its parameters), `adjacency` and `delta`.

    Returns:
      The composition of all mechanisms, and the adjacency to price it under.

    Raises:
      ConfigurationError: a field is missing, unknown, out of range or contradicts the adjacency; the message names
        the check and the field.

    >>> event_of_check(
    ...     {
    ...         "id": "A1",
    ...         "mechanisms": [{"type": "gaussian", "noise_multiplier": 1.0, "count": 2}],
    ...         "adjacency": "any",
    ...         "delta": 1e-5,
    ...     }
    ... )
    (RepeatedEvent(event=GaussianEvent(noise_multiplier=1.0), count=2), 'add_remove')
    """
    name = _identifier(check)
    spelling = check.get("adjacency")
    if not isinstance(spelling, str) or spelling not in _SPELLINGS:
        raise _fault(name, "adjacency", f"expected one of {', '.join(_SPELLINGS)}; found {spelling!r}")
    mechanisms = check.get("mechanisms")
    if not isinstance(mechanisms, Sequence) or isinstance(mechanisms, str) or not mechanisms:
        raise _fault(name, "mechanisms", f"expected a list of at least one mechanism, found {mechanisms!r}")
    declared, row_shape = _SPELLINGS[spelling]
    adjacency = declared or _implied_adjacency(mechanisms)
    parts = []
    for position, fields in enumerate(mechanisms):
        try:
            parts.append(_event_of_mechanism(fields, row_shape, adjacency))
        except DPICLError as error:
            raise _fault(name, f"mechanisms[{position}]", str(error)) from error
    return (parts[0] if len(parts) == 1 else ComposedEvent(tuple(parts))), adjacency


def _implied_adjacency(mechanisms: Sequence[Any]) -> Adjacency:
    """What the sampled types of a check with adjacency "any" were priced under."""
    types = (fields.get("type") for fields in mechanisms if isinstance(fields, Mapping))
    return next((_ADJACENCY_OF_TYPE[t] for t in types if isinstance(t, str) and t in _ADJACENCY_OF_TYPE), "add_remove")


def _event_of_mechanism(fields: Any, row_shape: RowShape, adjacency: Adjacency) -> Event:
    kind = fields.get("type") if isinstance(fields, Mapping) else None
    if not isinstance(kind, str) or kind not in {*_SIMPLE, "exp_mech", "confident_gnmax"}:
        known = ", ".join(sorted({*_SIMPLE, "exp_mech", "confident_gnmax"}))
        raise ConfigurationError(f"type: expected one of {known}; found {kind!r}.")
    if _ADJACENCY_OF_TYPE.get(kind, adjacency) != adjacency:
        raise ConfigurationError(f"type: expected one that is defined under {adjacency!r}, found {kind!r}.")
    if kind == "exp_mech":
        return _exp_mech(_exactly(fields, _EXP_MECH), row_shape, adjacency)
    if kind == "confident_gnmax":
        return _confident_gnmax(_exactly(fields, _CONFIDENT_GNMAX))
    names, once = _SIMPLE[kind]
    given = _exactly(fields, names | {"count"})
    return RepeatedEvent(once(given), check_int("count", given["count"], low=0))


def _exactly(fields: _Fields, names: frozenset[str]) -> _Fields:
    found = set(fields) - {"type"}
    if found != names:
        raise ConfigurationError(
            f"fields: expected {', '.join(sorted(names))}; found {', '.join(sorted(map(str, found)))}."
        )
    return fields


def evaluate_checks(data: Mapping[str, Any] | Sequence[Any]) -> list[dict[str, Any]]:
    """Prices every check of a file.

    Args:
      data: a mapping with the list `checks`, or the list itself.

    Returns:
      One `{"id": str, "epsilon": float}` per check, in order; epsilon is an upper bound, rounded up.

    Raises:
      ConfigurationError: the data is no list of checks, or a check is malformed (its id and field are named) or has
        numbers whose price cannot be computed.
    """
    checks = data.get("checks") if isinstance(data, Mapping) else data
    if not isinstance(checks, Sequence) or isinstance(checks, (str, bytes)):
        raise ConfigurationError(
            f"checks: expected a list, or a mapping with the list 'checks'; found {type(checks).__name__}."
        )
    return [{"id": _identifier(check), "epsilon": _price(check)} for check in checks]


def _price(check: Mapping[str, Any]) -> float:
    event, adjacency = event_of_check(check)
    try:
        delta = check_delta(check.get("delta"))
    except ConfigurationError as error:
        raise _fault(_identifier(check), "delta", str(error)) from error
    try:
        return epsilon_upper_bound(event, delta=delta, adjacency=adjacency)
    except DPICLError:
        raise
    except (ArithmeticError, ValueError, MemoryError) as error:
        raise ConfigurationError(
            f"check {_identifier(check)!r}: expected numbers whose price can be computed, found too extreme ones "
            f"({type(error).__name__}). Give less extreme ones."
        ) from error


def _identifier(check: Any) -> str:
    if not isinstance(check, Mapping):
        raise ConfigurationError(f"checks: expected mappings, found {type(check).__name__}.")
    name = check.get("id")
    if not isinstance(name, str) or not name:
        raise ConfigurationError(f"check: field 'id': expected a text that is not empty, found {name!r}.")
    return name


def _fault(name: str, field: str, problem: str) -> ConfigurationError:
    return ConfigurationError(f"check {name!r}: field {field!r}: {problem.rstrip('.')}.")


# Importing runs the user's code in the environment of the command, as pytest and uvicorn do.


_SUFFIX = ".signature.json"
_NOTES_OF_REPORT = """\
A key pair: `ssh-keygen -t ed25519 -N "" -f KEY` makes KEY and KEY.pub. Keep KEY secret. Give KEY.pub to
those who verify, but do not send it together with the report.
"""


def add_report(commands: Any, *, run: Callable[[argparse.Namespace], int]) -> None:
    """Adds `dpicl report` and its two commands."""
    command = commands.add_parser("report", help="sign a report or a release, and verify it", notes=_NOTES_OF_REPORT)
    command.set_defaults(run=run, act=None)
    actions = command.add_subparsers(metavar="ACTION", required=True)
    sign = _action(actions, "sign", _sign, "sign a file with an Ed25519 key")
    sign.add_argument("--key", type=Path, required=True, help="private key without a password, PEM or OpenSSH")
    sign.add_argument("--signer", default="-", help="public name of who signs")
    sign.add_argument("--out", type=Path, help=f"file to make (default: FILE{_SUFFIX})")
    verify = _action(actions, "verify", _verify, "compute a report anew, and verify its signature if --key is given")
    verify.add_argument("--key", type=Path, help="public key that you trust, PEM or OpenSSH")
    verify.add_argument("--signature", type=Path, help=f"file of the signature (default: FILE{_SUFFIX})")


def _action(
    actions: Any, name: str, act: Callable[[argparse.Namespace], CommandOutput], text: str
) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = actions.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    command.add_argument("file", type=Path, help="report as JSON or HTML, or a release; of a soft prompt its folder")
    command.add_argument("--ledger", help="its ledger; its last line becomes part of the signature")
    command.add_argument("--name", help="which of the ledgers there (default: budget)")
    command.set_defaults(act=act)
    return command


@contextlib.contextmanager
def _ledger(arguments: argparse.Namespace) -> Iterator[LedgerStore | None]:
    if arguments.ledger is None:
        yield None
        return
    with opened_store(arguments.ledger, arguments.name) as store:
        yield store


def _sign(arguments: argparse.Namespace) -> CommandOutput:
    from langchain_dpicl.reports.signatures import read_signed, sign_file

    file = _file_in(arguments.file)
    if not _is_page(file):
        _, problems = _recomputed(read_signed(file))  # refuses what no `report verify` reads
        for problem in problems:
            raise ConfigurationError(f"{problem}. A signature of this file would not verify.")
    for problem in _problems_beside(file, arguments.out):
        raise ConfigurationError(f"{problem}. A signature of this folder would not verify.")
    with _ledger(arguments) as store:
        signature = sign_file(file, key=arguments.key, ledger=store, signer=arguments.signer)
    out = arguments.out or _beside(file)
    write_new(out, signature.to_json())
    line = "" if signature.ledger is None else f", with line {signature.ledger['line']} of its ledger"
    return CommandOutput(DONE, f"{file} is signed in {out}{line}")


def _file_in(path: Path) -> Path:
    """Returns the file that is signed: of a soft prompt the one that holds the digests of the others."""
    from langchain_dpicl.released.soft_prompt import OURS

    return path / OURS if path.is_dir() else path


def _is_page(path: Path) -> bool:
    return path.suffix.lower() in {".html", ".htm"}


def _beside(path: Path) -> Path:
    return path.with_name(path.name + _SUFFIX)


def _verify(arguments: argparse.Namespace) -> CommandOutput:
    from langchain_dpicl.reports.signatures import read_signed

    is_page = _is_page(arguments.file)
    if arguments.key is None and (is_page or arguments.signature is not None or arguments.ledger is not None):
        advice = "A signature needs one, and of a page nothing else is verified."
        raise ConfigurationError(f"--key: expected the public key that you trust, found none. {advice}")
    file = _file_in(arguments.file)
    data = read_signed(file)
    problems: list[str] = []
    words = ["  prices     not computed anew: this is a page; verify the JSON report too"]
    if not is_page:
        words, problems = _recomputed(data)
        problems.extend(_problems_beside(file, arguments.signature))
    if arguments.key is None:
        words.append("  signature  not verified: no --key was given")
    else:
        said, wrong = _unsigned(data, file, arguments)
        problems.extend(wrong)
        words.extend(("  signature  NOT verified",) if wrong else said)
    words.insert(0, f"{file}: {'NOT ' if problems else ''}verified")
    return CommandOutput(WRONG if problems else DONE, "\n".join(words), tuple(f"not verified: {p}" for p in problems))


def _recomputed(data: bytes) -> tuple[list[str], list[str]]:
    """Returns what a report costs, computed anew, and what is wrong with it."""
    from langchain_dpicl.reports.report import verify_report

    found = verify_report(data)
    price = f"epsilon {format_rounded_up(found.epsilon)}, delta {format_rounded_up(found.delta)}"
    return [f"  prices     {price}, computed anew from the tickets"], list(found.problems)


def _problems_beside(file: Path, signature: Path | None) -> Iterator[str]:
    """Says what is wrong with the files beside that of a soft prompt, of which it holds the digests.

    Formal guarantees:
      - Nothing means that the folder holds the three files of a prompt, those of PEFT byte for byte as they are
        written, and at most a signature beside them: a digest of numbers is none of a file.
    """
    from langchain_dpicl._plain_files import MAX_ARRAYS, read_plain
    from langchain_dpicl.released.soft_prompt import OURS, SoftPrompt

    if file.name != OURS:
        return
    try:
        written = SoftPrompt.load(file.parent).files_of_peft()
        for name, data in written.items():
            if read_plain(file.parent / name, MAX_ARRAYS) != data:
                yield f"{name}: expected the file as SoftPrompt.save writes it, found another with the same content"
    except (ConfigurationError, OSError) as error:
        yield str(error)
    else:
        known = {file, _beside(file), *(file.parent / name for name in written)} | ({signature} if signature else set())
        kept = {path.name for path in known if path.parent.resolve() == file.parent.resolve()}
        if strange := sorted({path.name for path in file.parent.iterdir()} - kept):
            yield f"{file.parent}: expected the files of a prompt alone, found {strange[:5]}, which nothing signs"


def _unsigned(data: bytes, file: Path, arguments: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Returns what the signature says, and what is wrong with it."""
    from langchain_dpicl._plain_files import read_plain
    from langchain_dpicl.reports.signatures import MOST_OF_SIGNATURE, Signature, problems_of

    text = read_plain(arguments.signature or _beside(file), MOST_OF_SIGNATURE)
    signature = Signature.from_json(text)
    with _ledger(arguments) as store:
        problems = list(problems_of(data, signature, public_key=arguments.key, ledger=store))
    said = [f"  signature  that of the given key; signer {signature.signer}"]
    if (signed := signature.ledger) is not None:
        compared = "is still there" if arguments.ledger is not None else "not compared: no --ledger was given"
        said.append(f"  ledger     {signed['ledger_id']}, line {signed['line']} {compared}")
    return said, problems
