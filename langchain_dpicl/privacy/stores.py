"""Where a ledger's records are kept: the hash-chained format, the store's Protocol, and a store in memory.

Knows no budget rule: what a record means, and whether it may be written, is decided in `ledger_state.py`. Built for
durable stores shared by many processes; time stamps inform and decide nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol, runtime_checkable

from langchain_dpicl.exceptions import DPICLError, LedgerError
from langchain_dpicl.privacy._validate import Adjacency, check_adjacency, check_delta, check_epsilon
from langchain_dpicl.privacy.events import canonical_json

LEDGER_FORMAT = 1


def _digest(data: Any) -> str:
    return hashlib.sha256(canonical_json(data).encode("utf-8")).hexdigest()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True, slots=True)
class LedgerHeader:
    """The first line of a ledger: who it is and what it may spend. Its digest is the first link of the chain.

    Attributes:
      ledger_id: random name of this ledger; private examples are bound to it.
      name: public name for people.
      epsilon: limit of the whole ledger.
      delta: limit of the whole ledger.
      adjacency: the one neighbouring relation of everything on this ledger.
      stamp: when it was made (UTC); informative.
      ledger_format: version of the record format.
    """

    ledger_id: str
    name: str
    epsilon: float
    delta: float
    adjacency: Adjacency
    stamp: str = dataclasses.field(default_factory=_now)
    ledger_format: int = LEDGER_FORMAT

    @property
    def digest(self) -> str:
        """SHA-256 of the header, hex."""
        return _digest(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON form; `from_dict` inverts it exactly."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LedgerHeader:
        """Rebuilds a header from storage.

        Raises:
          LedgerError: another format, or a field is missing, unknown or out of range.
        """
        _require_fields(cls, data)
        if data["ledger_format"] != LEDGER_FORMAT:
            msg = f"ledger: expected format {LEDGER_FORMAT}, found {data['ledger_format']!r}. Use the matching version."
            raise LedgerError(msg)
        fault = ""
        try:
            check_epsilon(data["epsilon"])
            check_delta(data["delta"])
            check_adjacency(data["adjacency"])
        except DPICLError as error:
            fault = str(error)
        if fault:
            msg = f"ledger: the header is broken ({fault})"
            raise LedgerError(msg)
        return cls(**data)


@dataclass(frozen=True, slots=True)
class LedgerRecord:
    """One line of a ledger, chained to the line before. Public by construction: it holds no private content.

    Attributes:
      seq: 1, 2, 3, ... without gaps.
      prev: hash of the line before; the header's digest for the first.
      kind: what happened (see `ledger_state`).
      body: JSON object.
      stamp: when it was written (UTC); informative.
      hash: SHA-256 over all of the above, hex.
    """

    seq: int
    prev: str
    kind: str
    body: Mapping[str, Any]
    stamp: str
    hash: str

    @property
    def computed_hash(self) -> str:
        """The hash that the content asks for; differs from `hash` if the line was changed."""
        return _digest({"seq": self.seq, "prev": self.prev, "kind": self.kind, "body": self.body, "stamp": self.stamp})

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON form; `from_dict` inverts it exactly."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LedgerRecord:
        """Rebuilds a record from storage; does not check its place in the chain.

        Raises:
          LedgerError: a field is missing or unknown.
        """
        _require_fields(cls, data)
        return cls(**data)


def _require_fields(cls: type[Any], data: Mapping[str, Any]) -> None:
    names = {field.name for field in dataclasses.fields(cls)}
    found = set(data) if isinstance(data, Mapping) else set()
    if found != names:
        msg = f"{cls.__name__}: expected the fields {sorted(names)}, found {sorted(map(str, found))}."
        raise LedgerError(msg)


def next_record(seq: int, head: str, kind: str, body: Mapping[str, Any]) -> LedgerRecord:
    """Returns the line that follows line `seq` with hash `head`; stores use it to append."""
    plain = json.loads(canonical_json(body))
    draft = LedgerRecord(seq=seq + 1, prev=head, kind=kind, body=plain, stamp=_now(), hash="")
    return dataclasses.replace(draft, hash=draft.computed_hash)


class LedgerTransaction(Protocol):
    """The ledger as its only writer sees it; dead once the transaction ends."""

    def records(self, after: int = 0) -> Sequence[LedgerRecord]:
        """Returns every line with `seq > after`, in order, lines of this transaction included."""

    def append(self, kind: str, body: Mapping[str, Any]) -> LedgerRecord:
        """Adds one line; it stands when the transaction ends well, otherwise it never was."""


@runtime_checkable
class LedgerStore(Protocol):
    """Keeps one ledger. `tests/contracts/store.py` is the suite every implementation passes.

    Formal guarantees that an implementation gives:
      - One writer at a time over all processes; a transaction sees every line committed before it began.
      - When a transaction ends well its lines survive whatever `durable` claims; when it ends in an exception,
        none of them ever appears.
      - Lines are never changed, dropped or reordered. What cannot be read, locked or written is a `LedgerError`.

    Attributes:
      durable: whether lines survive the end of this process.
      description: public words for reports, for instance "in memory; dies with this process".
    """

    @property
    def durable(self) -> bool:
        """Whether lines survive the end of this process."""

    @property
    def description(self) -> str:
        """Public words on where the ledger lives."""

    def create(self, header: LedgerHeader) -> LedgerHeader:
        """Writes `header` if there is none yet; returns the one that stands (the first writer wins)."""

    def header(self) -> LedgerHeader | None:
        """Returns the header, or None before `create`."""

    def records(self, after: int = 0) -> Sequence[LedgerRecord]:
        """Returns every committed line with `seq > after`, in order."""

    def transaction(self) -> AbstractContextManager[LedgerTransaction]:
        """Opens the ledger for its only writer; waits for its turn. Does not nest.

        Raises:
          LedgerError: no header yet, a transaction inside a transaction, or the store failed.
        """


class InMemoryStore:
    """Keeps a ledger in this process; it dies with it. Threads may share it, other processes cannot.

    Example:
      >>> store = InMemoryStore()
      >>> store.durable, store.description
      (False, 'in memory; dies with this process')
    """

    durable = False
    description = "in memory; dies with this process"

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._header: LedgerHeader | None = None
        self._lines: list[LedgerRecord] = []
        self._view: _View | None = None
        self._pid = os.getpid()

    def create(self, header: LedgerHeader) -> LedgerHeader:
        """Keeps `header` unless one is there; returns the one that stands."""
        self._check_process()
        with self._lock:
            if self._header is None:
                self._header = header
            return self._header

    def header(self) -> LedgerHeader | None:
        """Returns the header, or None before `create`."""
        self._check_process()
        return self._header

    def records(self, after: int = 0) -> Sequence[LedgerRecord]:
        """Returns every committed line with `seq > after`."""
        self._check_process()
        with self._lock:
            return tuple(_copy(line) for line in self._lines[after:])

    @contextlib.contextmanager
    def transaction(self) -> Iterator[LedgerTransaction]:
        """Opens the ledger for one thread; keeps its lines only if the block ends well."""
        self._check_process()
        with self._lock:
            if self._view is not None:
                raise LedgerError("ledger: expected no open transaction in this thread, found one. Close it first.")
            if self._header is None:
                raise LedgerError("ledger: expected a header, found none. Call create(header) first.")
            self._view = _View(self._header, self._lines)
            committed = len(self._lines)
            try:
                yield self._view
            except BaseException:
                del self._lines[committed:]
                raise
            finally:
                self._view.alive = False
                self._view = None

    def _check_process(self) -> None:
        # A forked child holds a copy of the ledger: both would spend the same budget.
        if os.getpid() != self._pid:
            raise LedgerError("ledger: an in-memory ledger belongs to the process that made it. Use a durable store.")

    def __repr__(self) -> str:
        return f"InMemoryStore({self.description})"

    def __copy__(self) -> InMemoryStore:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> InMemoryStore:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise LedgerError("ledger: an in-memory ledger cannot be pickled: its copy would spend the budget again.")


class _View:
    """One transaction of an `InMemoryStore`."""

    def __init__(self, header: LedgerHeader, lines: list[LedgerRecord]) -> None:
        self._header = header
        self._lines = lines
        self.alive = True

    def records(self, after: int = 0) -> Sequence[LedgerRecord]:
        self._check_alive()
        return tuple(_copy(line) for line in self._lines[after:])

    def append(self, kind: str, body: Mapping[str, Any]) -> LedgerRecord:
        self._check_alive()
        head = self._lines[-1].hash if self._lines else self._header.digest
        self._lines.append(next_record(len(self._lines), head, kind, body))
        return _copy(self._lines[-1])

    def _check_alive(self) -> None:
        if not self.alive:
            raise LedgerError("ledger: expected an open transaction, found one that has ended. Open another.")


def _copy(line: LedgerRecord) -> LedgerRecord:
    """Returns the line with a body of its own, so that no reader can change the ledger."""
    return dataclasses.replace(line, body=json.loads(canonical_json(line.body)))
