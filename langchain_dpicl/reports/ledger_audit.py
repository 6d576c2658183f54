"""Recomputes a ledger from its lines alone, and writes and reads ledgers as files of JSON lines."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from langchain_dpicl._plain_files import MAX_TEXT, read_plain
from langchain_dpicl.exceptions import ConfigurationError, DPICLError, LedgerError
from langchain_dpicl.privacy.accounting.events import canonical_json
from langchain_dpicl.privacy.extensions.ledger_anchor import LedgerAnchor
from langchain_dpicl.privacy.ledger.state import LedgerState
from langchain_dpicl.privacy.ledger.store import LedgerHeader, LedgerRecord, LedgerStore, LedgerTransaction, in_blocks
from langchain_dpicl.reports.report import PrivacyReport, ShareEntry, verify_report
from langchain_dpicl.reports.verify import UNREADABLE, check_receipt, describe_fault
from langchain_dpicl.stores.rows import object_of

Receipts = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class LedgerCheckResult:
    """The result of `check_ledger`."""

    header: LedgerHeader
    lines: int  # valid lines from the first on
    head: str  # hash of the last of them
    shares: int  # shares that were priced again
    epsilon: float  # sum of their prices; infinite if one could not be computed, or the chain is broken
    promised: float  # sum of their charges
    delta: float
    checked: tuple[str, ...]  # what else was compared, in words
    problems: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON form; epsilon is null where it is infinite."""
        return {
            "ok": not self.problems,
            "ledger": self.header.to_dict(),
            "lines": self.lines,
            "head": self.head,
            "shares": self.shares,
            "recomputed": {"epsilon": self.epsilon if math.isfinite(self.epsilon) else None, "delta": self.delta},
            "charged": {"epsilon": self.promised, "delta": self.delta},
            "checked": list(self.checked),
            "problems": list(self.problems),
        }


def check_ledger(
    store: LedgerStore, *, anchor: LedgerAnchor | None = None, receipts: Receipts = ()
) -> LedgerCheckResult:
    """Recomputes a ledger and compares it with its anchor and receipts; refuses what cannot be read at all."""
    header = store.header()
    if header is None:
        raise LedgerError("ledger: expected one, found none. Create it with `dpicl ledger create`.")
    state, problems, checked = LedgerState(header), [], []
    for block in in_blocks(store):
        try:
            state.apply_all(block)
        except LedgerError as error:
            problems.append(str(error))
            break
    is_whole = not problems
    try:
        getattr(store, "check", lambda: None)()
    except LedgerError as error:
        problems.append(str(error))
    if anchor is not None:
        problems.extend(anchor_problems(anchor, header, store))
        checked.append(f"anchor: {anchor.description}")
    # Behind a line that cannot be replayed there may be others, whose own hashes tell.
    count = functools.cache(lambda: state.seq if is_whole else sum(map(len, in_blocks(store))))
    for number, receipt in enumerate(receipts, start=1):
        found = _receipt_problems(receipt, header, store, count)
        problems.extend(f"receipt {number}: {problem}" for problem in found)
    problems.extend(_double_spending(receipts))
    if receipts:
        checked.append(f"receipts: {len(receipts)}")
    report, epsilon, wrong = _recheck_prices(store, header, state)
    return LedgerCheckResult(
        header=header,
        lines=state.seq,
        head=state.head,
        shares=len(state.sealed),
        epsilon=epsilon if is_whole else math.inf,
        promised=report.epsilon,
        delta=report.delta,
        checked=tuple(checked),
        problems=(*problems, *wrong),
    )


def _recheck_prices(
    store: LedgerStore, header: LedgerHeader, state: LedgerState
) -> tuple[PrivacyReport, float, list[str]]:
    """Prices every sealed share again, and compares the shown parameters with its tickets."""
    shares, wrappers = [ShareEntry(share.terms, share.stamp) for share in state.sealed], sorted(state.allowed_wrappers)
    try:
        report = PrivacyReport.build(header, store, state.bindings, shares, wrappers, windows=state.windows)
        verified = verify_report(report)
    except UNREADABLE as error:
        report = PrivacyReport.build(header, store, {}, shares, wrappers, windows=state.windows)
        return report, math.inf, [f"entries cannot be read: {describe_fault(error)}"]
    return report, verified.epsilon, list(verified.problems)


def anchor_problems(anchor: LedgerAnchor, header: LedgerHeader, store: LedgerStore) -> Iterator[str]:
    """Yields a problem unless the chain holds the anchor's line."""
    known = anchor.read(header.ledger_id)
    if known is None:
        advice = "If this ledger never had an anchor, `dpicl ledger anchor` adds one, once"
        yield f"anchor: {anchor.description} has never seen ledger {header.ledger_id}: it proves nothing. {advice}"
        return
    seq, head = known
    line = _line(store, seq)
    if head != (header.digest if seq == 0 else line and line.hash):
        what = f"anchor: {anchor.description} has seen line {seq}, which is gone or changed: an older copy, or a fork"
        yield f"{what}. Restore the ledger itself"


def _line(store: LedgerStore, seq: int) -> LedgerRecord | None:
    """Returns one line, or None where the ledger has none of this number."""
    return next(iter(store.records(seq - 1, limit=1)), None) if seq > 0 else None


def _receipt_problems(
    receipt: Mapping[str, Any], header: LedgerHeader, store: LedgerStore, count: Callable[[], int]
) -> Iterator[str]:
    try:
        line = check_receipt(receipt, header, store, count)
    except DPICLError as error:
        yield str(error).removeprefix("receipt: ")
        return
    if line is not None and "component" in receipt and line.body.get("component") != receipt["component"]:
        yield f"line {line.seq} is no reservation of {receipt['component']!r}"


def _double_spending(receipts: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields a problem for every ticket that paid for two answers; the same receipt may be given twice."""
    known: dict[str, tuple[int, Mapping[str, Any]]] = {}
    for number, receipt in enumerate(receipts, start=1):
        if receipt.get("entry") is None or receipt.get("index") is None:
            continue
        place = json.dumps([receipt.get(name) for name in ("ledger_id", "entry", "index")], default=repr)
        first, other = known.setdefault(place, (number, receipt))
        if any(receipt.get(name, value) != value for name, value in other.items()):  # one may be a shorter form
            yield f"receipt {number}: it and receipt {first} name one ticket: a process was copied, and both went on"


def read_receipts(path: Path) -> list[Mapping[str, Any]]:
    """Reads receipts, or results that hold one: a JSON object or list, or one JSON value per line."""
    from langchain_dpicl.stores.sqlite_file import check_free

    check_free(path, "--receipt")
    text = read_plain(path, MAX_TEXT)
    try:
        try:
            value = json.loads(text)
        except ValueError:
            value = [json.loads(line) for line in text.splitlines() if line.strip()]
    except (ValueError, RecursionError, MemoryError):
        value = None
    items = [_receipt_in(item) for item in (value if isinstance(value, list) else [value])]
    if not items or None in items:
        raise ConfigurationError(
            f"--receipt: expected receipts as JSON (`ledger_id`, `entry`, `entry_hash`), found others in {path}."
        )
    return [item for item in items if item is not None]


def _receipt_in(item: Any) -> Mapping[str, Any] | None:
    receipt = item.get("receipt", item) if isinstance(item, Mapping) else None
    return receipt if isinstance(receipt, Mapping) and {"ledger_id", "entry"} <= set(receipt) else None


EXPORT_FORMAT = 1
_MOST_BYTES = 1 << 32
"""Of an export that is read: about ten million lines."""


class ExportedLedger:
    """An exported ledger as a read-only store, which cannot grant budget."""

    durable = True

    def __init__(self, header: LedgerHeader, records: Sequence[LedgerRecord], description: str) -> None:
        self.description = description
        self._header = header
        self._records = tuple(records)

    def create(self, header: LedgerHeader) -> LedgerHeader:
        """Refuses."""
        _refuse_to_write(header.name)

    def header(self) -> LedgerHeader:
        """Returns the header of the ledger that was exported."""
        return self._header

    def records(self, after: int = 0, *, limit: int | None = None) -> Sequence[LedgerRecord]:
        """Returns every line with `seq > after`, as it stands in the file."""
        return self._records[after : None if limit is None else after + limit]

    def transaction(self) -> AbstractContextManager[LedgerTransaction]:
        """Refuses."""
        _refuse_to_write(self._header.name)


def _refuse_to_write(name: str) -> NoReturn:
    raise LedgerError(f"ledger {name!r}: expected the ledger itself, found an exported file, which grants nothing.")


def export_lines(store: LedgerStore) -> Iterator[str]:
    """Yields a ledger as lines of JSON.

    Raises:
      LedgerError: the store holds no ledger, or cannot be read.
    """
    header = store.header()
    if header is None:
        raise LedgerError("export: expected a ledger, found none. Create one with `dpicl ledger create`.")
    yield canonical_json({"dpicl_ledger_export": EXPORT_FORMAT, "header": header.to_dict()})
    count, head = 0, header.digest
    for record in itertools.chain.from_iterable(in_blocks(store)):
        yield canonical_json({"record": record.to_dict()})
        count, head = count + 1, record.hash
    yield canonical_json({"end": {"records": count, "head": head}})


def is_export(path: Path) -> bool:
    """Returns whether a path is a file of JSON lines rather than a database.

    Closing a file drops the process's POSIX locks on it. So a ledger that is open in this process is never opened here,
    and SQLite, which respects locks, examines a database first.
    """
    from langchain_dpicl.stores.sqlite_file import check_free

    try:
        check_free(path, "export")
    except LedgerError:
        return False
    if not _is_no_database(path):
        return False
    try:
        with path.open("rb") as file:  # a regular file: SQLite has read it
            return file.read(1) == b"{"
    except OSError:
        return False


def _is_no_database(path: Path) -> bool:
    """Returns whether SQLite finds another format; writes no journal beside the file."""
    if not path.is_file():
        return False
    address = f"{Path(os.path.realpath(path)).as_uri()}?mode=ro&immutable=1"
    try:
        with contextlib.closing(sqlite3.connect(address, uri=True)) as connection:
            connection.execute("PRAGMA schema_version").fetchone()
    except sqlite3.Error as error:
        return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_NOTADB
    return False


def read_export(path: Path) -> ExportedLedger:
    """Reads an exported ledger; its lines are checked when a ledger is built from them.

    Raises:
      LedgerError: the file is no export, was cut off, holds a line of another form, or is a ledger's that is open here.
      ConfigurationError: it is no plain file, or too large.
      OSError: it cannot be read.
    """
    from langchain_dpicl.stores.sqlite_file import check_free

    check_free(path, "export")
    lines = read_plain(path, _MOST_BYTES).removesuffix(b"\n").split(b"\n")
    first = _json_object(lines[0], 1)
    if first.get("dpicl_ledger_export") != EXPORT_FORMAT:
        msg = f"{path}: expected a ledger exported in format {EXPORT_FORMAT}, found another file. Export it anew."
        raise LedgerError(msg)
    header = LedgerHeader.from_dict(_member(first, "header", 1))
    if not isinstance(header.ledger_id, str) or not isinstance(header.name, str):
        raise LedgerError(f"{path}: expected a header with an id and a name as text, found another.")
    end = _json_object(lines[-1], len(lines)).get("end")
    records = [_record(line, number) for number, line in enumerate(lines[1:-1], start=2)] if end is not None else []
    head = records[-1].hash if records else header.digest
    if end != {"records": len(records), "head": head}:
        raise LedgerError(f"{path}: expected all lines of the export and its last one, found others. Export it anew.")
    return ExportedLedger(header, records, f"exported file {path}")


def _record(line: bytes, number: int) -> LedgerRecord:
    record = LedgerRecord.from_dict(_member(_json_object(line, number), "record", number))
    texts = (record.prev, record.kind, record.stamp, record.hash)
    if type(record.seq) is not int or not isinstance(record.body, dict) or not all(isinstance(t, str) for t in texts):
        raise _of_another_form(number)
    return record


def _json_object(line: bytes, number: int) -> dict[str, Any]:
    """Returns a line's JSON object, of values that have a canonical text."""
    value = None
    with contextlib.suppress(UnicodeDecodeError):
        value = object_of(line.decode("utf-8"))
    if value is None:
        raise _of_another_form(number)
    return value


def _member(data: Mapping[str, Any], name: str, number: int) -> Mapping[str, Any]:
    if not isinstance(data.get(name), dict):
        raise _of_another_form(number)
    return data[name]  # type: ignore[no-any-return]


def _of_another_form(number: int) -> LedgerError:
    return LedgerError(f"export: expected a line as `dpicl ledger export` writes it, found another (line {number}).")
