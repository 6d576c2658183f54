"""Defines the hash-chained lines of a ledger, the protocol of its stores, and a store in memory."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple, Protocol, Self, TypeVar, overload, runtime_checkable

from langchain_dpicl._lazy import provided
from langchain_dpicl._opaque import Uncopyable, this_process
from langchain_dpicl.exceptions import DPICLError, LedgerError
from langchain_dpicl.privacy._validate import Adjacency, check_adjacency, check_delta, check_epsilon
from langchain_dpicl.privacy.accounting.events import canonical_json

LEDGER_FORMAT = 2
"""The version of the line format; no other is read."""

LIFE = "life"
"""The window of a ledger whose promise is for everything that a person ever does."""

T = TypeVar("T")

BLOCK = 1000
"""Lines that are read at once where a whole ledger is read."""

_parsed = json.JSONDecoder().raw_decode


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def _now() -> str:
    return _stamp_of(time.time() // 1)


@functools.lru_cache(maxsize=1)
def _stamp_of(second: float) -> str:
    with contextlib.suppress(ValueError, OverflowError, OSError):  # outside years 1 to 9999, or no number
        return datetime.fromtimestamp(second, UTC).isoformat()
    msg = f"ledger: expected a clock between the years 1 and 9999, found {second} seconds since 1970. Set the clock."
    raise LedgerError(msg)


@dataclass(frozen=True, slots=True)
class LedgerHeader:
    """The identity and limits of a ledger; its digest is the first link of the chain.

    Attributes:
      ledger_id: random name of the ledger; private examples are bound to it.
      name: public name for people.
      epsilon: limit of the whole ledger.
      delta: limit of the whole ledger.
      adjacency: the one neighbouring relation of everything on the ledger.
      stamp: time of creation (UTC); informative.
      ledger_format: version of the line format.
      stream: `StreamTerms` of a ledger that promises for each window; None: it promises for life.
      about: `LedgerAbout`: what its owners declared of it; None: nothing.
    """

    ledger_id: str
    name: str
    epsilon: float
    delta: float
    adjacency: Adjacency
    stamp: str = dataclasses.field(default_factory=_now)
    ledger_format: int = LEDGER_FORMAT
    stream: Any = None
    about: Any = None

    @property
    def digest(self) -> str:
        """SHA-256 of the header, hex."""
        return _digest(canonical_json(self.to_dict()))

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON form; `from_dict` inverts it exactly."""
        data = {name: getattr(self, name) for name in public_fields(type(self))}
        for name in _OPTIONAL:
            if (value := data.pop(name)) is not None:
                data[name] = value.to_dict()
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LedgerHeader:
        """Rebuilds a header from storage.

        Args:
          data: the result of `to_dict`.

        Raises:
          LedgerError: another format, or a field is missing, unknown or out of range.
        """
        optional: dict[str, Any] = dict.fromkeys(_OPTIONAL)
        _require_fields(cls, {**optional, **data} if isinstance(data, Mapping) else data)
        if type(found := data["ledger_format"]) is not int or found != LEDGER_FORMAT:
            msg = f"ledger: expected format {LEDGER_FORMAT}, found {found!r}. Use the matching version."
            raise LedgerError(msg)
        fault = ""
        try:
            check_epsilon(data["epsilon"])
            check_delta(data["delta"])
            check_adjacency(data["adjacency"])
            if "stream" in data:
                optional["stream"] = provided("streams").StreamTerms.from_dict(data["stream"])
            if "about" in data:
                optional["about"] = provided("about").LedgerAbout.parse(data["about"])
            # One form alone: the digest is taken of what was read, and has to tell another text apart.
            if any(optional[name] is None or optional[name].to_dict() != data[name] for name in _OPTIONAL & set(data)):
                raise LedgerError("expected no empty member")
        except (DPICLError, TypeError) as error:
            fault = str(error)
        if fault:
            msg = f"ledger: the header is broken ({fault})"
            raise LedgerError(msg)
        return cls(**{**data, **optional})


_OPTIONAL = {"stream", "about"}
"""Members of a header that stand there only where they say something."""


@dataclass(frozen=True, slots=True)
class LedgerRecord:
    """One line of a ledger, chained to the line before. It holds no private content.

    Attributes:
      seq: 1, 2, 3, ... without gaps.
      prev: hash of the line before; the header's digest for the first.
      kind: what happened (see `ledger.state`).
      body: JSON object.
      stamp: time of writing (UTC); informative.
      hash: SHA-256 over all of the above, hex.
    """

    seq: int
    prev: str
    kind: str
    body: Mapping[str, Any]
    stamp: str
    hash: str
    # The body as its store holds it, hashed as it stands; a copy with another body has none.
    _text: str | None = field(default=None, init=False, repr=False, compare=False)

    def read_from(self, text: str) -> Self:
        """Returns this line, whose hash is computed from the text that its body was read from.

        Args:
          text: the body, as stored.
        """
        object.__setattr__(self, "_text", text)
        return self

    @property
    def computed_hash(self) -> str:
        """The hash of the content; differs from `hash` if the line was changed."""
        return _chain_digest(self.seq, self.prev, self.kind, self.text, self.stamp)

    @property
    def text(self) -> str:
        """The body as its store holds it, of which the hash is taken."""
        return canonical_json(self.body) if self._text is None else self._text

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON form; `from_dict` inverts it exactly."""
        return {name: getattr(self, name) for name in public_fields(type(self))}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LedgerRecord:
        """Rebuilds a record from storage; does not check its place in the chain.

        Args:
          data: the result of `to_dict`.

        Raises:
          LedgerError: a field is missing or unknown.
        """
        _require_fields(cls, data)
        return cls(**data)


def public_fields(cls: type[Any]) -> list[str]:
    """Returns the names of the fields of a dataclass that have a JSON form."""
    return [known.name for known in dataclasses.fields(cls) if not known.name.startswith("_")]


def _require_fields(cls: type[Any], data: Mapping[str, Any]) -> None:
    names = set(public_fields(cls))
    keys = set(data) if isinstance(data, Mapping) else set()
    if keys != names:
        msg = f"{cls.__name__}: expected the fields {sorted(names)}, found {sorted(map(str, keys))}."
        raise LedgerError(msg)


def next_record(after: int, head: str, kind: str, body: Mapping[str, Any]) -> LedgerRecord:
    """Returns line `after + 1`, which follows line `after` with hash `head`; stores use it to append."""
    return _StoredLine.after(after, head, kind, canonical_json(body)).record(after + 1, head)


_quoted = json.encoder.encode_basestring  # as `canonical_json` does with a text


def _chain_digest(seq: int, prev: str, kind: str, body: str, stamp: str) -> str:
    """Returns the digest of the canonical JSON of a line: all its members, sorted; `body` is canonical JSON already."""
    # A line from elsewhere may hold any JSON value.
    text = _quoted if type(prev) is type(kind) is type(stamp) is str else canonical_json
    number = seq if type(seq) is int else canonical_json(seq)
    return _line_digest(body, text(kind), text(prev), number, text(stamp))


def _line_digest(body: str, kind: str, prev: str, seq: int | str, stamp: str) -> str:
    """Returns the digest of a line, given the canonical JSON of its members."""
    try:
        line = f'{{"body":{body},"kind":{kind},"prev":{prev},"seq":{seq},"stamp":{stamp}}}'.encode()
        return hashlib.sha256(line).hexdigest()
    except UnicodeEncodeError:
        fault = "ledger: expected lines of valid Unicode text, found half of a surrogate pair. Nothing is granted."
    raise LedgerError(fault)  # outside the handler, whose error holds the line


class LineBlock(Sequence[LedgerRecord]):
    """Lines in a row, by column: checked and applied at once; a record is made only of a line that is looked at.

    Args:
      after: number of the line before them.
      columns: of all lines their `prev`, `kind`, `body`, `stamp` and `hash`, and the body as stored.
    """

    def __init__(self, after: int, columns: Sequence[Sequence[Any]]) -> None:
        self._after = after
        self._columns = columns

    def follow(self, seq: int, head: str) -> bool:
        """Whether they follow line `seq` with hash `head`, each the one before, and none was changed."""
        prevs, kinds, _, stamps, hashes, texts = self._columns
        if self._after != seq or [head, *hashes[:-1]] != list(prevs):
            return False
        text_of = {text: _quoted(text) for text in {*kinds, *stamps}}.__getitem__
        members = texts, map(text_of, kinds), map(_quoted, prevs), itertools.count(seq + 1), map(text_of, stamps)
        with contextlib.suppress(LedgerError):  # found again where they are looked at one by one
            return list(map(_line_digest, *members)) == list(hashes)
        return False

    def lines(self) -> Iterator[tuple[int, str, Mapping[str, Any], str, str]]:
        """Yields number, kind, body, stamp and hash of each."""
        _, kinds, bodies, stamps, hashes, _ = self._columns
        return zip(itertools.count(self._after + 1), kinds, bodies, stamps, hashes)

    def __len__(self) -> int:
        return len(self._columns[-1])

    @overload
    def __getitem__(self, place: int) -> LedgerRecord: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[LedgerRecord]: ...

    def __getitem__(self, place: int | slice) -> LedgerRecord | Sequence[LedgerRecord]:
        if isinstance(place, slice):
            first, _, step = place.indices(len(self))
            if step != 1:
                return tuple(self)[place]
            return LineBlock(self._after + first, [column[place] for column in self._columns])
        seq = self._after + 1 + range(len(self))[place]
        *members, text = (column[place] for column in self._columns)
        return LedgerRecord(seq, *members).read_from(text)

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, tuple | LineBlock) else NotImplemented

    __hash__ = None  # type: ignore[assignment]


class _StoredLine(NamedTuple):
    """A line as kept in memory, with its body as text, so that no reader of a record can change the ledger."""

    kind: str
    body: str
    stamp: str
    hash: str

    @classmethod
    def after(cls, seq: int, head: str, kind: str, body: str) -> _StoredLine:
        """Returns the line that follows line `seq` with hash `head`."""
        stamp = _now()
        return cls(kind, body, stamp, _chain_digest(seq + 1, head, kind, body, stamp))

    def record(self, seq: int, prev: str) -> LedgerRecord:
        """Returns the line as record number `seq`, with a body of its own."""
        body = _parsed(self.body)[0]
        return LedgerRecord(seq, prev, self.kind, body, self.stamp, self.hash).read_from(self.body)


class LedgerTransaction(Protocol):
    """The ledger as its only writer sees it; unusable once the transaction ends."""

    def records(self, after: int = 0, *, limit: int | None = None) -> Sequence[LedgerRecord]:
        """Returns the lines with `seq > after`, in order, lines of this transaction included.

        Args:
          after: number of the last known line; 0: from the first on.
          limit: at most so many of them; None: all.
        """

    def append(self, kind: str, body: Mapping[str, Any]) -> LedgerRecord:
        """Adds one line, which lasts if the transaction commits.

        Args:
          kind: what happened.
          body: a JSON object without private content.
        """


@runtime_checkable
class LedgerStore(Protocol):
    """Keeps one ledger. `tests/contracts/store.py` is the suite every implementation passes.

    A store, and its transactions, may also have `head()`, which returns the number and hash of the last line (0 and
    the header's digest where there is none), so that unchanged ledgers are not read again. The transactions of a
    database of several ledgers have `bind(dataset_id)`, which records that this ledger binds a data set, and raises a
    `PrivacyBudgetMismatchError` if another ledger does. A store may also have:
      - `flush(seq, head)`: looks up the line of this number and hash, and returns when it and all lines before it
        survive what `durable` claims, or raises a `LedgerUnavailableError`. The lines of its `transaction(flush=False)`
        are only visible when that ends, so that its lock is held for a shorter time.
      - `last_snapshot()`: returns the last line of that kind after the lines before it that bind and seal, or nothing.
        Without it no snapshots are written.
      - `check()`: reads what its lines stand in, such as all of a file or which ledger has each data set, and raises a
        `LedgerError` if that is broken.

    Formal guarantees that an implementation gives:
      - One writer at a time over all processes; a transaction sees every line committed before it began.
      - When a transaction ends without an exception its lines survive what `durable` claims; otherwise none of them
        ever appears.
      - Lines are never changed, dropped or reordered. What cannot be read, locked or written is a `LedgerError`.
    """

    @property
    def durable(self) -> bool:
        """Whether lines survive the end of this process."""

    @property
    def description(self) -> str:
        """Where the ledger lives, in public words for reports, such as "in memory; dies with this process"."""

    def create(self, header: LedgerHeader) -> LedgerHeader:
        """Writes `header` if there is none yet; returns the header that the ledger has (the first writer wins).

        Args:
          header: limits and name.
        """

    def header(self) -> LedgerHeader | None:
        """Returns the header, or None before `create`."""

    def records(self, after: int = 0, *, limit: int | None = None) -> Sequence[LedgerRecord]:
        """Returns the committed lines with `seq > after`, in order.

        Args:
          after: number of the last known line; 0: from the first on.
          limit: at most so many of them; None: all.
        """

    def transaction(self) -> AbstractContextManager[LedgerTransaction]:
        """Opens the ledger for its only writer; waits for its turn. Does not nest.

        Raises:
          LedgerError: there is no header yet, the transaction is nested, or the store failed.
        """


def in_blocks(source: LedgerStore | LedgerTransaction, after: int = 0) -> Iterator[Sequence[LedgerRecord]]:
    """Yields the lines with `seq > after` in order, some of them at a time.

    Args:
      source: where they are.
      after: number of the last known line; 0: from the first on.
    """
    while block := source.records(after, limit=BLOCK):
        yield block
        after += len(block)
        if len(block) != BLOCK:
            return


def hide_password(value: T) -> Callable[[], T]:
    """Returns a closure over a value that may hold a password, so that no repr and no frame variable shows it."""
    return lambda: value


class InMemoryStore(Uncopyable):
    """Keeps a ledger in this process, until it ends. Threads may share it, other processes cannot.

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
        self._lines: list[_StoredLine] = []
        self._view: _MemoryTransaction | None = None
        self._home = this_process()

    def create(self, header: LedgerHeader) -> LedgerHeader:
        """Keeps `header` unless there is one; returns the header that the ledger has."""
        self._check_process()
        with self._lock:
            if self._header is None:
                self._header = header
            return self._header

    def header(self) -> LedgerHeader | None:
        """Returns the header, or None before `create`."""
        self._check_process()
        return self._header

    def records(self, after: int = 0, *, limit: int | None = None) -> Sequence[LedgerRecord]:
        """Returns the committed lines with `seq > after`, at most `limit` of them."""
        self._check_process()
        with self._lock:
            return _records(self._header, self._lines, after, limit)

    def head(self) -> tuple[int, str]:
        """Returns the number and hash of the last line, or 0 and the header's digest."""
        self._check_process()
        with self._lock:
            return _head(self._header, self._lines)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[LedgerTransaction]:
        """Opens the ledger for one thread; keeps its lines only if the block ends well."""
        self._check_process()
        with self._lock:
            if self._view is not None:
                raise LedgerError("ledger: expected no open transaction in this thread, found one. Close it first.")
            if self._header is None:
                raise LedgerError("ledger: expected a header, found none. Call create(header) first.")
            committed = len(self._lines)
            try:
                self._view = _MemoryTransaction(self._header, self._lines)
                yield self._view
            except BaseException:
                del self._lines[committed:]
                raise
            finally:
                view, self._view = self._view, None  # first: an interrupt here must not block later transactions
                if view is not None:
                    view.alive = False

    def _check_process(self) -> None:
        # A forked child holds a copy of the ledger: both would spend the same budget.
        if this_process() != self._home:
            raise LedgerError("ledger: an in-memory ledger belongs to the process that made it. Use a durable store.")

    def __repr__(self) -> str:
        return f"InMemoryStore({self.description})"


class _MemoryTransaction:
    """One transaction of an `InMemoryStore`."""

    def __init__(self, header: LedgerHeader, lines: list[_StoredLine]) -> None:
        self._header = header
        self._lines = lines
        self.alive = True

    def records(self, after: int = 0, *, limit: int | None = None) -> Sequence[LedgerRecord]:
        self._check_alive()
        return _records(self._header, self._lines, after, limit)

    def head(self) -> tuple[int, str]:
        self._check_alive()
        return _head(self._header, self._lines)

    def append(self, kind: str, body: Mapping[str, Any]) -> LedgerRecord:
        self._check_alive()
        lines = self._lines
        text, (_, head) = canonical_json(body), _head(self._header, lines)
        # Queries reserve equal bodies again and again: their text is kept once.
        for line in lines[-2:]:
            text = line.body if line.body == text else text
        lines.append(_StoredLine.after(len(lines), head, kind, text))
        return lines[-1].record(len(lines), head)

    def _check_alive(self) -> None:
        if not self.alive:
            raise LedgerError("ledger: expected an open transaction, found one that has ended. Open another.")


def _records(
    header: LedgerHeader | None, lines: list[_StoredLine], after: int, limit: int | None
) -> tuple[LedgerRecord, ...]:
    """Returns the lines with `seq > after` as records, each with a body of its own."""
    _, prev = _head(header, lines[after - 1 : after] if after else [])
    records = []
    for seq, line in enumerate(lines[after : None if limit is None else after + limit], start=after + 1):
        records.append(line.record(seq, prev))
        prev = line.hash
    return tuple(records)


def _head(header: LedgerHeader | None, lines: list[_StoredLine]) -> tuple[int, str]:
    if lines:
        return len(lines), lines[-1].hash
    return 0, "" if header is None else header.digest
