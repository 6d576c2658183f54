"""Stores the lines of a ledger as rows, within one transaction, for every database."""

from __future__ import annotations

import functools
import json
import math
import secrets
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Self

from langchain_dpicl._opaque import Uncopyable
from langchain_dpicl.exceptions import LedgerError, PrivacyBudgetMismatchError
from langchain_dpicl.privacy._validate import check_real
from langchain_dpicl.privacy.accounting.events import canonical_json
from langchain_dpicl.privacy.ledger.store import LedgerHeader, LedgerRecord, LineBlock, next_record

# The number and hash of the last line stand beside the lines. They reveal lines lost at the end, which the hash chain
# cannot; where they are lost as well, only an anchor reveals it.


COLUMNS = ("seq", "prev", "kind", "body", "stamp", "hash")
"""The columns of a line, in the order of its rows."""

ON_PURPOSE = "a new ledger is made on purpose (PrivacyBudgetCallbackHandler.create, dpicl ledger create)."
"""Advice where no ledger is found: opening makes none."""

OLDER_TABLES = (
    "A development version made them. Export the ledger with that version (dpicl ledger export), count what every "
    "ledger of its data sets spent, and begin a ledger and its anchor with what remains, in other files or databases. "
    "Never spend the old one again."
)
"""Advice where the tables are of a smaller version: no ledger of them was released."""

MOST_SECONDS = 1e6
"""The longest wait. Databases count milliseconds in 31 bits, for some limits twice as many; beyond that none waits."""

_SHORT = 512
"""Objects of fewer characters cannot be nested too deeply to be written again."""

_FEW = 8
"""Fewer rows are read one by one, which is faster."""

_BETWEEN = secrets.token_hex(16)


class LedgerHead(NamedTuple):
    """The number and hash of the last line; 0 and the header's digest where there is none."""

    seq: int
    hash: str


class LedgerRows(Protocol):
    """The rows of one ledger, inside an open transaction of its database."""

    def head(self) -> LedgerHead:
        """Returns what stands as the last line."""

    def lines(self, after: int, last: int) -> Iterable[Sequence[Any]]:
        """Returns the rows with `after < seq <= last`, in order, each as `COLUMNS` says."""

    def add(self, record: LedgerRecord) -> None:
        """Writes a line (`row_of` makes its row) and makes it the last one."""

    def bind(self, dataset_id: str) -> str | None:
        """Keeps that a data set is this ledger's; returns the name of the ledger whose it is if it is another's."""


def row_of(record: LedgerRecord) -> tuple[int, str, str, str, str, str]:
    """Returns the row of a line."""
    return record.seq, record.prev, record.kind, record.text, record.stamp, record.hash


def last_of(after: int, limit: int | None, head: LedgerHead) -> int:
    """Returns the number of the last line that is read."""
    return head.seq if limit is None else min(head.seq, after + limit)


def records_of(
    rows: Iterable[Sequence[Any]], *, after: int, head: LedgerHead, last: int | None = None
) -> Sequence[LedgerRecord]:
    """Returns the lines after line `after` up to `last` (None: the last one); does not check their chain.

    Raises:
      LedgerError: a row is no line, or one of them is missing, or the last one is not `head`.
    """
    rows = list(rows)
    end = head.seq if last is None else last
    records: Sequence[LedgerRecord] | None = _block_of(rows, after)
    if records is None:  # few, or what is wrong with them is found one by one
        records = tuple(record_of(row) for row in rows)
    is_whole = [row[0] for row in rows] == list(range(after + 1, end + 1))
    if not is_whole or (rows and end == head.seq and records[-1].hash != head.hash):
        raise LedgerError(
            f"ledger: expected the lines {after + 1} to {end} with no gap and no change, found "
            f"{len(rows)} of them or another end. Nothing is granted; restore an untouched copy."
        )
    return records


def _block_of(rows: Sequence[Sequence[Any]], after: int) -> LineBlock | None:
    """Returns the lines of rows in one step, or None where not every row is a line."""
    if len(rows) < _FEW or set(map(len, rows)) != {len(COLUMNS)}:
        return None
    seqs, prevs, kinds, texts, stamps, hashes = zip(*rows, strict=True)
    try:
        for column in (prevs, kinds, texts, stamps, hashes):
            "".join(column)
    except TypeError:  # not all of them are text
        return None
    if set(map(type, seqs)) != {int}:
        return None
    bodies = _objects_of(texts)
    return None if bodies is None else LineBlock(after, (prevs, kinds, bodies, stamps, hashes, texts))


def record_of(row: Sequence[Any]) -> LedgerRecord:
    """Returns the line of a row."""
    if len(row) == len(COLUMNS) and type(row[0]) is int and all(type(value) is str for value in row[1:]):
        seq, prev, kind, text, stamp, digest = row
        body = object_of(text)
        if body is not None:
            return LedgerRecord(seq, prev, kind, body, stamp, digest).read_from(text)
    raise LedgerError("ledger: expected its lines, found another row. Nothing is granted; restore an untouched copy.")


@functools.lru_cache(maxsize=16)
def header_of(text: Any, digest: Any) -> LedgerHeader | None:
    """Returns the header kept as JSON text beside its digest, or None where none was written.

    Raises:
      LedgerError: it is no header, or not the one that the digest was taken of.
    """
    if text is None and digest is None:
        return None
    data = object_of(text) if type(text) is str else None
    header = None if data is None else LedgerHeader.from_dict(data)
    if header is None or header.digest != digest:
        raise LedgerError("ledger: the header is broken or was changed. Nothing is granted; restore an untouched copy.")
    return header


def check_bindings(stored: Sequence[tuple[object, object]], bound: Sequence[tuple[object, object]], where: str) -> None:
    """Refuses a place where a data set has two ledgers, none, or one whose lines do not bind it.

    Args:
      stored: each data set and the ledger that has it.
      bound: each data set and the ledger of each line that binds it; in places of old there may be two.
      where: words on the place.

    Raises:
      LedgerError: they do not agree.
    """
    owned = dict(stored)
    if len(owned) == len(stored) and owned.keys() == dict(bound).keys() and owned.items() <= set(bound):
        return
    raise LedgerError(
        f"{where}: expected for each data set the ledger that has it, found other bindings than its lines say. Nothing "
        "is granted; restore an untouched copy."
    )


def header_text(header: LedgerHeader) -> str:
    """Returns the JSON text of a header; `header_of` inverts it."""
    return canonical_json(header.to_dict())


def object_of(text: str) -> dict[str, Any] | None:
    """Returns the JSON object, or None if it is none whose hash can be taken: no NaN, no lone half of a character."""
    try:
        data = _DECODER.decode(text)
        if len(text) > _SHORT or "\\" in text:
            canonical_json(data).encode()  # too deep a nesting, and half of a character, are found here
    except (ValueError, TypeError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def _objects_of(texts: Sequence[str]) -> list[dict[str, Any]] | None:
    """Returns what `object_of` returns for each, in one step, or None where it is None for one of them."""
    # Nobody who writes a row can guess what stands between two of them, so that none can open what another one closes.
    try:
        joined = f',"{_BETWEEN}",'.join(texts)
        values = _DECODER.decode(f'["{_BETWEEN}",{joined}]')
        objects = values[1::2]
        if max(map(len, texts)) > _SHORT or "\\" in joined:
            for text, data in zip(texts, objects, strict=True):
                if len(text) > _SHORT or "\\" in text:
                    canonical_json(data).encode()
    except (ValueError, TypeError, RecursionError):
        return None
    is_each_alone = values[::2].count(_BETWEEN) == len(texts) == len(objects) and set(map(type, objects)) == {dict}
    return objects if is_each_alone else None


def _refuse(name: str) -> float:
    raise ValueError(name)


@functools.lru_cache(maxsize=256)  # a ledger has few amounts
def _finite(text: str) -> float:
    """Returns the number; 1e400 is none."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


_DECODER = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite)


class RowTransaction:
    """One transaction as the ledger's only writer sees it. The store sets `alive` to False when it ends."""

    def __init__(self, rows: LedgerRows) -> None:
        self._rows = rows
        self.alive = True

    def head(self) -> tuple[int, str]:
        """Returns the number and hash of the last line, lines of this transaction included."""
        self._check_alive()
        return self._rows.head()

    def records(self, after: int = 0, *, limit: int | None = None) -> Sequence[LedgerRecord]:
        """Returns the lines with `seq > after`, at most `limit`, lines of this transaction included."""
        self._check_alive()
        head = self._rows.head()
        after = min(after, head.seq)
        last = last_of(after, limit, head)
        return records_of(self._rows.lines(after, last) if after < last else (), after=after, head=head, last=last)

    def append(self, kind: str, body: Mapping[str, Any]) -> LedgerRecord:
        """Adds one line; it stands when the transaction ends well."""
        self._check_alive()
        seq, head = self._rows.head()
        record = next_record(seq, head, kind, body)
        self._rows.add(record)
        return record

    def bind(self, dataset_id: str) -> None:
        """Keeps that a data set is this ledger's, for good; again changes nothing. Stands when the transaction does.

        Raises:
          PrivacyBudgetMismatchError: it is another's, of the same place.
        """
        self._check_alive()
        owner = self._rows.bind(dataset_id)
        if owner is not None:
            raise PrivacyBudgetMismatchError(
                f"dataset_id: expected {dataset_id!r} to have one ledger, found it bound to another of the same "
                f"database, {owner!r}: its budget and this one would add up. Open that ledger, or give a different "
                "data set a dataset_id of its own."
            )

    def _check_alive(self) -> None:
        if not self.alive:
            raise LedgerError("ledger: expected an open transaction, found one that has ended. Open another.")


def check_seconds(name: str, value: Any) -> float:
    """Returns how long to wait for others, above 0 and at most `MOST_SECONDS`."""
    return check_real(name, value, low=0.0, high=MOST_SECONDS, low_open=True)


class Connected(Uncopyable):
    """What closes its connection at the end of a `with` block and stays in its process."""

    _pickle_advice = "it owns a connection. Open another in the other process"

    @abstractmethod
    def close(self) -> None:
        """Closes the connection for good."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
