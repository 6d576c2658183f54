"""Writes a ledger to a file of JSON lines, and reads such a file as a store that grants nothing."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NoReturn

from langchain_dpicl._plain_files import read_plain
from langchain_dpicl.exceptions import LedgerError
from langchain_dpicl.privacy.accounting.events import canonical_json
from langchain_dpicl.privacy.stores import LedgerHeader, LedgerRecord, LedgerStore, LedgerTransaction

EXPORT_FORMAT = 1
_MOST = 2**63
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
        """Refuses.

        Raises:
          LedgerError: always.
        """
        _refuse_to_write(header.name)

    def header(self) -> LedgerHeader:
        """Returns the header of the ledger that was exported."""
        return self._header

    def records(self, after: int = 0) -> Sequence[LedgerRecord]:
        """Returns every line with `seq > after`, as it stands in the file."""
        return self._records[after:]

    def transaction(self) -> AbstractContextManager[LedgerTransaction]:
        """Refuses.

        Raises:
          LedgerError: always.
        """
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
    for record in store.records():
        yield canonical_json({"record": record.to_dict()})
        count, head = count + 1, record.hash
    yield canonical_json({"end": {"records": count, "head": head}})


def is_export(path: Path) -> bool:
    """Returns whether a path is a file of JSON lines rather than a database.

    Closing a file drops the process's POSIX locks on it. So a ledger that is open in this process is never opened here,
    and SQLite, which respects locks, examines a database first.
    """
    from langchain_dpicl.stores._sqlite_logs import check_free

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
    from langchain_dpicl.stores._sqlite_logs import check_free

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
    try:
        value = json.loads(line.decode("utf-8"), parse_int=_small)
        canonical_json(value).encode("utf-8")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise _of_another_form(number)
    return value


def _small(digits: str) -> int:
    number = int(digits)
    if abs(number) >= _MOST:
        raise ValueError("a number that no ledger holds")
    return number


def _member(data: Mapping[str, Any], name: str, number: int) -> Mapping[str, Any]:
    if not isinstance(data.get(name), dict):
        raise _of_another_form(number)
    return data[name]  # type: ignore[no-any-return]


def _of_another_form(number: int) -> LedgerError:
    return LedgerError(f"export: expected a line as `dpicl ledger export` writes it, found another (line {number}).")
