"""Holds private records that go on arriving, by the block of their own time, and gives ranges of blocks to releases."""

from __future__ import annotations

import functools
import json
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, date, datetime
from typing import Any, TypeAlias

from langchain_dpicl._opaque import Opaque, PerProcess, run_guarded, tells_how_to_build
from langchain_dpicl.exceptions import ConfigurationError, RecordError
from langchain_dpicl.privacy._validate import check_choice, check_delta, check_int, fail, is_finite
from langchain_dpicl.privacy.extensions.stream_ledger import LAST_BLOCK, LENGTHS, StreamTerms, runs_touching
from langchain_dpicl.privacy.ledger.store import LIFE
from langchain_dpicl.privacy.ledger.tickets import Blocks, Extent
from langchain_dpicl.privacy.private_examples import (
    Declaration,
    DocumentLoader,
    OpenPool,
    PrivateExamples,
    Record,
    Sealed,
    Split,
    UnitBinding,
    Units,
    check_number,
    container_fault,
    each_record,
    fields_of,
    make_declaration,
    make_opaque_pool,
    read_record,
    reduce_groups,
    unit_name,
)

_Dated: TypeAlias = dict[tuple[float, str], Record]
"""Records by their time and canonical text, which put those of one person in one order, whichever way they came."""


@tells_how_to_build()
class PrivateStream(Opaque):
    """Private records that go on arriving. Each belongs to the block of its own time; releases read ranges of blocks.

    Formal guarantees:
      - A record's block is a function of its time alone: not of when it came, nor of other records.
      - In a range a person (all records of one `unit_key`) is one unit: the newest `records_per_unit` records of the
        most frequent label, chosen by looking at that person alone.
      - Only a budget whose promise is for windows (`per="30 days"`) can pay for releases of a stream; what a release
        reads is charged to every window that touches its blocks. Deleted records bring no budget back.
      - As for `PrivateExamples`, no error, repr or format shows content or counts.

    Records live in this process. After a restart `extend` them again: they fall into the same blocks. Extend first and
    ask for ranges then: a record of a block that a range of this process has read is late, and is dropped.

    Args:
      dataset_id: declared name of the stream. Public.
      time_key: field that holds when the record was made: a `datetime` with a zone, a `date` (its midnight, UTC),
        either as ISO 8601 text, or seconds since 1970.
      unit_key: field that names the person.
      public_size: people in a range, by its length in blocks: {7: 2_400, 30: 9_000}. For another length the next longer
        one counts. Public; a wrong number costs utility, not privacy.
      text_key: field that holds the text.
      label_key: field that holds the label, if labels split the people.
      labels: every label that may occur, in the order that breaks ties. Public.
      fields: further text fields that prompts may use.
      block: "hour", "day" or "week", in UTC; that of the budget's windows.
      grace: a block can be read so many blocks after its end, so that slow sources are in it.
      max_chars: characters kept of each text.
      records_per_unit: the number of newest records kept of each person in a range. Public.
      retention: records are dropped so many blocks after their block; None: never.

    Raises:
      ConfigurationError: a public argument is out of range.

    Example:
      >>> stream = PrivateStream(dataset_id="tickets", time_key="created", unit_key="user", public_size={7: 900})
      >>> stream.extend([{"created": "2026-11-02T10:00:00+00:00", "user": "ann", "text": "my card is gone"}])
      >>> stream.between("2026-11-01", "2026-11-07")
      PrivateRange(dataset_id='tickets', 2026-11-01 to 2026-11-07, content=<private>)
    """

    __slots__ = ("_bond", "_declared", "_extend", "_identity", "_kept", "_range", "_remove", "_terms")

    def __init__(
        self,
        *,
        dataset_id: str,
        time_key: str,
        unit_key: str,
        public_size: Mapping[int, int],
        text_key: str = "text",
        label_key: str | None = None,
        labels: Iterable[str] | None = None,
        fields: Iterable[str] = (),
        block: str = "day",
        grace: int = 1,
        max_chars: int = 20_000,
        records_per_unit: int = 1,
        retention: int | None = None,
    ) -> None:
        period, _ = LENGTHS[check_choice("block", block, LENGTHS)]
        if not isinstance(public_size, Mapping) or not public_size:
            advice = "Declare, say, {7: 400, 30: 1_200}: the people in a range of 7, and of 30 blocks."
            raise fail("public_size", "people by the length of a range in blocks", type(public_size).__name__, advice)
        for people in public_size.values():
            check_number("public_size", people)
        self._declared = make_declaration(
            dataset_id=dataset_id,
            public_size=max(public_size.values()),
            text_key=text_key,
            label_key=label_key,
            labels=labels,
            unit_key=unit_key,
            fields=fields,
            max_chars=max_chars,
            records_per_unit=records_per_unit,
            stream={"time_key": time_key, "block": period, "grace": grace, "sizes": dict(public_size)},
        )
        if retention is not None:
            check_int("retention", retention, low=1)
        terms = StreamTerms.parse(f"1 {block}")
        if terms is None:
            raise fail("block", f"another period than {LIFE!r}", block)
        self._terms = terms
        self._kept = retention
        self._identity = object()
        self._bond = UnitBinding(lambda *_: None)
        self._extend, self._range, self._remove = _make_opaque_stream(self._declared, terms, grace, retention)

    @property
    def dataset_id(self) -> str:
        """The declared name of the stream."""
        return self._declared.dataset_id

    @property
    def declaration(self) -> dict[str, Any]:
        """All declared values as JSON, as ledgers and reports show them."""
        return self._declared.to_dict()

    def extend(self, records: Iterable[Any] | DocumentLoader) -> None:
        """Adds records, in any order. One that is equal to another of the same person changes nothing.

        A record of a block that this process has read, that `retention` has dropped, or from before 2001 is left out;
        nothing says so.

        Args:
          records: mappings with the declared fields, or LangChain documents, in any iterable, a document loader, a
            frame or a data set.

        Raises:
          RecordError: a record lacks a field, has no time, or another than can be read, or an undeclared label. It is
            left out, and all others are in: whether those of other people are read never depends on it. Nothing is
            added where `records` is none of these, or cannot be read to its end. Index and value are hidden.
        """
        fault = self._extend(records)
        del records
        if fault:
            raise RecordError(f"{fault} Index and value are hidden.")

    def last(self, length: int) -> PrivateRange:
        """Returns the last blocks that can be read now, by the clock.

        Args:
          length: number of blocks.

        Raises:
          ConfigurationError: it is below 1, or longer than `retention` keeps records.
        """
        return self._ranged(None, check_int("length", length, low=1))

    def between(self, first: str | date, last: str | date) -> PrivateRange:
        """Returns the blocks from that of one day to that of another.

        Args:
          first: a day, as ISO 8601 text or as a date.
          last: a day, not before it; its last block is included.

        Raises:
          ConfigurationError: it is no range, a block of it cannot be read yet, or `retention` has dropped one.
        """
        start, _ = self._terms.blocks_of("first", first)
        _, end = self._terms.blocks_of("last", last)
        if not 0 <= start <= end:
            raise fail("first, last", "two days in their order, from 2001 on", (str(first), str(last)))
        return self._ranged(start, end - start + 1)

    def rolling(self, length: int, *, every: int, until: str | date | None = None) -> RollingRange:
        """Returns the last blocks of each run, for a component that runs again and again: its share never runs out.

        Args:
          length: blocks that a run reads.
          every: blocks from one run to the next one; the share is priced for the runs that can touch one window.
          until: the last day that this run reads; None: the last blocks that can be read now.

        Raises:
          ConfigurationError: a number is below 1, or `until` is no day.
        """
        end = None if until is None else self._terms.blocks_of("until", until)[1]
        return RollingRange(self, check_int("length", length, low=1), check_int("every", every, low=1), end)

    def remove(self, person: str | int) -> None:
        """Deletes all records of a person that this process holds, also in ranges. No budget comes back.

        Does not tell whether there were any. What the person's records released before stays released; records of the
        person that come later are added.

        Args:
          person: value of `unit_key`.

        Raises:
          ConfigurationError: it is neither text nor an integer.
        """
        name = unit_name(person)
        if name is None:
            raise fail("person", f"a value of {self._declared.unit_key!r}", type(person).__name__)
        self._remove(name)

    @property
    def _closed(self) -> int:
        """The last block that can be read now."""
        grace = 0 if self._declared.stream is None else self._declared.stream.grace
        return self._terms.block_at(time.time()) - 1 - grace

    def _ranged(self, first: int | None, length: int) -> PrivateRange:
        made: list[PrivateRange] = []
        fault = self._range(first, length, lambda blocks, sealed: made.append(PrivateRange._of(self, blocks, sealed)))  # noqa: SLF001
        if fault is not None:
            raise ConfigurationError(fault)
        return made[0]

    def __repr__(self) -> str:
        declared = getattr(self, "_declared", None)
        return f"PrivateStream(dataset_id={declared and declared.dataset_id!r}, content=<private>)"


class PrivateRange(PrivateExamples):
    """The people of some blocks of a `PrivateStream`, for releases. Made by the stream's methods.

    `remove` deletes a person from the stream and from all its ranges; see `PrivateStream.remove`.

    Raises:
      ConfigurationError: it was called; only a stream makes ranges.
    """

    __slots__ = ("_blocks", "_stream")

    _blocks: Blocks
    _stream: PrivateStream

    def __init__(self) -> None:
        raise ConfigurationError(
            "PrivateRange: expected a range that a stream made, found a call. Take stream.last(30), "
            "stream.between(...) or stream.rolling(30, every=7)."
        )

    @classmethod
    def _of(cls, stream: PrivateStream, blocks: Blocks, sealed: Sealed) -> PrivateRange:
        declared = stream._declared  # noqa: SLF001  its own module
        made = cls.__new__(cls)
        made._blocks, made._stream = blocks, stream  # noqa: SLF001  its own class
        length = blocks[1] - blocks[0] + 1
        size = declared.total_size if declared.stream is None else declared.stream.size_of(length)
        own = {name: getattr(declared, name) for name in Declaration.__slots__} | {"public_size": size}
        opened, _, split = sealed  # a removal is the stream's, so that no other range keeps the person
        made._adopt(Declaration(**own), (opened, stream._remove, split), stream._bond)  # noqa: SLF001
        made._identity = stream._identity  # noqa: SLF001  ledgers bind the stream
        return made

    @property
    def blocks(self) -> Blocks:
        """The first and the last block."""
        return self._blocks

    @property
    def declaration(self) -> dict[str, Any]:
        """All declared values of the stream as JSON."""
        return self._stream.declaration

    def check_delta(self, delta: float) -> None:
        """Refuses a delta above 1 / (10 * people of the longest range that the stream declares).

        Args:
          delta: the budget's delta.

        Raises:
          ConfigurationError: delta is out of range or above the limit.
        """
        declared = self._stream._declared  # noqa: SLF001  its own module
        limit = declared.most_delta
        if check_delta(delta) > limit:
            rule = f"{declared.delta_rule} = {limit}"
            expected = f"at most {rule} for {self.dataset_id!r}, whose longest range counts"
            raise fail("delta", expected, delta, "A larger delta may give away whole records. Lower delta.")

    def redeclared(self, **declared: Any) -> PrivateExamples:
        """Refuses: the people of a range cannot be split anew."""
        del declared
        raise ConfigurationError(
            "private: expected examples that are of no stream, found a range of one. Declare labels on the stream."
        )

    def __repr__(self) -> str:
        words = " to ".join(map(self._stream._terms.name_of, self._blocks))  # noqa: SLF001
        return f"PrivateRange(dataset_id={self.dataset_id!r}, {words}, content=<private>)"


class RollingRange(Opaque):
    """The last blocks of a stream, of each run of a component anew. Made by `PrivateStream.rolling`.

    Attributes:
      stream: whose blocks they are.
      length: blocks that a run reads.
      every: blocks from one run to the next one.
    """

    __slots__ = ("_end", "every", "length", "stream")

    def __init__(self, stream: PrivateStream, length: int, every: int, end: int | None = None) -> None:
        self.stream = stream
        self.length = length
        self.every = every
        self._end = end

    @property
    def max_chars(self) -> int:
        """Characters kept of each text, declared for the whole stream."""
        return self.stream._declared.max_chars  # noqa: SLF001  its own module

    def latest(self) -> PrivateRange:
        """Returns the blocks that this run reads."""
        if self._end is None:
            return self.stream.last(self.length)
        return self.stream._ranged(self._end - self.length + 1, self.length)  # noqa: SLF001  its own module

    def run_start(self, first: int) -> int:
        """Returns the first block of the newest run of those that begin with `first` and every `every` blocks later.

        Args:
          first: first block of the first run; public, and the same in every process.
        """
        if self._end is not None:
            return self._end - self.length + 1
        return first + (self.stream._closed - self.length + 1 - first) // self.every * self.every  # noqa: SLF001

    def first_run(self, extent: Extent | None) -> PrivateRange:
        """Returns the newest run of a component that answers until the next one begins.

        Args:
          extent: of its share, if another process has sealed it; None: this run is the first one.

        Raises:
          ConfigurationError: a block cannot be read yet, or `retention` drops one before the next run begins.
        """
        kept, declared = self.stream._kept, self.stream._declared.stream  # noqa: SLF001
        least = self.length + self.every - 1 + (0 if declared is None else declared.grace)
        if kept is not None and kept < least:
            raise fail("retention", f"at least {least} blocks, which a run that answers until the next one needs", kept)
        return self.latest() if extent is None else self.run_from(self.run_start(extent[0]))

    def run_from(self, start: int) -> PrivateRange:
        """Returns the blocks of a run.

        Args:
          start: its first block.
        """
        return self.stream._ranged(start, self.length)  # noqa: SLF001

    def runs_per_window(self, window: int) -> int:
        """Returns how many runs can touch one window.

        Args:
          window: blocks of a window.
        """
        return runs_touching(self.length, every=self.every, window=window)

    def __repr__(self) -> str:
        return f"RollingRange({self.stream!r}, length={self.length}, every={self.every})"


_Made = Callable[[Blocks, Sealed], object]
_Ranged = Callable[[int | None, int, _Made], str | None]


def _make_opaque_stream(  # noqa: C901  closures over one state, which no attribute shows
    declared: Declaration, terms: StreamTerms, grace: int, retention: int | None
) -> tuple[Callable[[Any], str], _Ranged, Callable[[str], None]]:
    """Returns three closures, the only references to the records: they extend, make a range, and remove a person."""
    blocks: dict[int, dict[str, _Dated]] = {}
    ranges: weakref.WeakValueDictionary[Blocks, _Kept] = weakref.WeakValueDictionary()
    locks = PerProcess(threading.RLock)  # a fork may come while another thread holds that of its parent
    read_up_to = -1

    def present() -> int:
        return terms.block_at(time.time())

    def forget() -> int:
        """Drops what is older than `retention`; returns the first block that is kept."""
        first = 0 if retention is None else max(present() - retention, 0)
        for block in [block for block in blocks if block < first]:
            del blocks[block]
        return first

    def extend(records: Any) -> str:
        found: list[tuple[str, float, str, Record]] = []
        if unread := container_fault(records):
            return f"{unread} Nothing was added."
        if (fault := run_guarded(lambda: _read(records, declared, terms, found))) is None:
            return "records: they could not be read (the cause may hold private text). Nothing was added."
        with locks.here:
            first = max(forget(), read_up_to + 1)
            for person, seconds, text, record in found:
                if (block := terms.block_at(seconds)) >= first:
                    blocks.setdefault(block, {}).setdefault(person, {})[seconds, text] = record
        return fault and f"{fault} What cannot be read was left out, and all else was added."

    def ranged(first: int | None, length: int, made: _Made) -> str | None:
        nonlocal read_up_to
        with locks.here:
            kept, closed = forget(), present() - 1 - grace
            start = closed - length + 1 if first is None else first
            last = start + length - 1
            if last > closed or last > LAST_BLOCK:
                day = terms.start_of(closed).date()
                return (
                    f"range: expected blocks that are closed, the last of them that of {day}, found a later one. A "
                    f"block is closed {grace} blocks after its end."
                )
            if start < kept:
                day = terms.start_of(kept).date()
                return f"range: expected blocks from that of {day} on, which are kept, found an earlier one."
            read_up_to = max(read_up_to, last)
            pool = ranges.get((start, last))
            if pool is None:
                sealed = run_guarded(lambda: make_opaque_pool(_units(blocks, (start, last), declared)))
                if sealed is None:
                    return "range: expected records that can be merged by person, found others. The cause is hidden."
                pool = ranges[start, last] = _Kept(sealed)
            # The functions refer to `pool`, so that it is there as long as a range is, and is removed from.
            made((start, last), pool.sealed())
            return None

    def remove(person: str) -> None:
        with locks.here:
            for people in blocks.values():
                people.pop(person, None)
            for pool in list(ranges.values()):
                pool.remove(person)

    return extend, ranged, remove


class _Kept(Opaque):
    """The pool of a range, which lives as long as one of its functions."""

    __slots__ = ("__weakref__", "_open", "_remove", "_split")

    def __init__(self, sealed: Sealed) -> None:
        self._open, self._remove, self._split = sealed

    def remove(self, person: str) -> None:
        """Removes a person."""
        self._remove(person)

    def open(self, label: str | None) -> Any:
        """Opens the pool of a label, or of all."""
        return self._open(label)

    def split(self, labels: tuple[str, ...], rule: Split) -> OpenPool | None:
        """Splits the people by other labels."""
        return self._split(labels, rule)

    def sealed(self) -> Sealed:
        """Returns functions that keep the pool alive."""
        return self.open, self.remove, self.split


def _read(records: Any, declared: Declaration, terms: StreamTerms, found: list[tuple[str, float, str, Record]]) -> str:
    """Appends person, time, canonical text and record of each that has them; returns the first fault of others, or "".

    A fault names neither index nor value.
    """
    known = {label: label for label in declared.labels}
    time_key = "" if declared.stream is None else declared.stream.time_key
    first = ""

    def read(raw: Any, number: int) -> str:
        person, record, fault = read_record(raw, declared, number, known)
        if fault:
            return fault
        seconds = _seconds((fields_of(raw, declared.text_key) or {}).get(time_key))
        if seconds is None or terms.block_at(seconds) > LAST_BLOCK:
            return f"records: expected a time with a zone under {time_key!r}; a record has none, or one far off."
        found.append((person, seconds, json.dumps(record, sort_keys=True), record))
        return ""

    for number, raw in enumerate(each_record(records)):
        fault = run_guarded(functools.partial(read, raw, number))
        first = first or ("records: a record could not be read; the cause is hidden." if fault is None else fault)
    return first


def _units(blocks: Mapping[int, Mapping[str, _Dated]], span: Blocks, declared: Declaration) -> Units:
    """Returns the people of some blocks: each is one unit, reduced by looking at that person alone."""
    merged: dict[str, _Dated] = {}
    for block in range(span[0], span[1] + 1):
        for person, dated in blocks.get(block, {}).items():
            merged.setdefault(person, {}).update(dated)
    newest = {person: [dated[key] for key in sorted(dated, reverse=True)] for person, dated in merged.items()}
    return reduce_groups(newest, declared)


def _seconds(value: Any) -> float | None:
    """Returns a time in seconds since 1970, or None for what is none: without a zone, or not of ISO 8601."""
    if isinstance(value, str):
        try:
            value = date.fromisoformat(value) if len(value) <= 10 else datetime.fromisoformat(value)
        except ValueError:
            return None
    if isinstance(value, datetime):
        return None if value.tzinfo is None else value.timestamp()
    if isinstance(value, date):
        return datetime(value.year, value.month, value.day, tzinfo=UTC).timestamp()
    return float(value) if is_finite(value) else None
