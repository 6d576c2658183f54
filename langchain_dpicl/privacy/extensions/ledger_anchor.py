"""What stands beside a ledger: the anchor that knows its last line, and what its owners declare in its header."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

from langchain_dpicl.exceptions import LedgerError, LedgerRollbackError, LedgerUnavailableError
from langchain_dpicl.privacy._validate import check_choice, check_name, fail
from langchain_dpicl.privacy.extensions.durable_writer import OutageWriter
from langchain_dpicl.privacy.ledger.state import LedgerState
from langchain_dpicl.privacy.ledger.store import (
    LedgerHeader,
    LedgerRecord,
    LedgerStore,
    LedgerTransaction,
    public_fields,
)
from langchain_dpicl.privacy.ledger.writer import LineAppender

T = TypeVar("T")

_SOON = 1.0
"""Seconds within which an anchor that fails is asked again; a slower one has waited for others by itself."""


@runtime_checkable
class LedgerAnchor(Protocol):
    """Holds the number and hash of a ledger's last line, in a place that is not restored together with the ledger.

    Formal guarantees that an implementation gives:
      - Once `write` has returned, `read` returns that line or a later one, in every process and after a crash.
      - An older line never replaces a newer one, and raises nothing: another process wrote a later line first.
      - A line never replaces another line of the same number: that raises a `LedgerRollbackError`, since two ledgers
        have diverged. A failed read or write is a `LedgerUnavailableError`.

    One whose class also has `write_lines(ledger_id, lines)` gets several lines at once, as pairs of number and hash in
    their order, and does what as many calls of `write` do, with none of another process between them.
    """

    @property
    def description(self) -> str:
        """Where the anchor lives, in public words, such as "file /var/lib/anchor.json"."""

    def read(self, ledger_id: str) -> tuple[int, str] | None:
        """Returns number and hash of the last line known of a ledger, or None if none was ever written.

        Args:
          ledger_id: random name of the ledger.
        """

    def write(self, ledger_id: str, seq: int, head: str) -> None:
        """Stores the number and hash of a line, durably, unless a later line is stored.

        Args:
          ledger_id: random name of the ledger.
          seq: number of the line.
          head: hash of the line, hex.
        """


def check_anchor(anchor: Any) -> LedgerAnchor | None:
    """Returns an anchor, or None, as it is; refuses everything else, such as a path or the class of an anchor."""
    if anchor is None or (isinstance(anchor, LedgerAnchor) and not isinstance(anchor, type)):
        return anchor
    kind = f"the class {anchor.__name__}" if isinstance(anchor, type) else type(anchor).__name__
    raise fail("anchor", "a LedgerAnchor such as FileAnchor(path), or None", kind)


def read_anchor(anchor: LedgerAnchor, ledger_id: str) -> tuple[int, str] | None:
    """Returns number and hash of the anchor's line, or None; of a foreign error only the type is shown."""
    return _asked(lambda: anchor.read(ledger_id), f"read {anchor.description}")


def write_anchor(anchor: LedgerAnchor, ledger_id: str, *lines: tuple[int, str]) -> None:
    """Stores the ledger's last line in the anchor, or several in their order; errors as `read_anchor`."""
    several: Any = anchor
    wanted, charged = (
        f"write to {anchor.description}",
        f" What the ledger holds up to line {lines[-1][0]} stays charged.",
    )
    if len(lines) > 1 and _takes_lines(anchor):
        _asked(lambda: several.write_lines(ledger_id, lines), wanted, charged)
        return
    for line in lines:
        _asked(functools.partial(anchor.write, ledger_id, *line), wanted, charged)


def _takes_lines(anchor: LedgerAnchor) -> bool:
    """Whether an anchor takes several lines at once, by the class that also has its `write`.

    A class with a `write` of its own gets each line by it, also where it inherits `write_lines`.
    """
    write, write_lines = (
        next((kind for kind in type(anchor).__mro__ if name in vars(kind)), None) for name in ("write", "write_lines")
    )
    return write is not None and write is write_lines


def _asked(action: Callable[[], T], wanted: str, advice: str = "") -> T:
    """Returns an anchor's answer, or raises its fault with `advice`; one that fails at once is asked a second time.

    The ledger has charged the line that it writes, so a connection that was lost for a moment would cost a ticket.
    """
    end, fault, kind = time.monotonic() + _SOON, "", ""
    for _ in range(2):
        try:
            return action()
        except LedgerUnavailableError as error:
            fault, kind = str(error), "it unavailable"
        except LedgerError:
            raise
        except Exception as error:  # noqa: BLE001  whatever an anchor of others raises
            fault, kind = "", type(error).__name__
        if time.monotonic() > end:
            break
    fault = fault or f"anchor: expected to {wanted}, found {kind}. Nothing is granted; try again."
    raise LedgerUnavailableError(f"{fault}{advice}")


def unknown_ledger(anchor: LedgerAnchor, ledger_id: str) -> LedgerRollbackError:
    """Returns the error of a ledger that the anchor does not know; the caller raises it."""
    return LedgerRollbackError(
        f"ledger {ledger_id}: expected one that the anchor knows ({anchor.description}), found one that it has never "
        "seen: another ledger took its place, or this is the wrong anchor. Nothing is granted. To add an anchor to a "
        "ledger that had none, open it once with adopt_anchor=True."
    )


class AnchoredWriter(OutageWriter):
    """Writes a ledger whose last line is also stored by an anchor.

    Formal guarantees:
      - Tickets are granted only after the anchor, too, holds the line that charges them.
      - The anchor gets durable lines only: what a crash of the ledger's host may lose, it never expects.
      - The anchor gets, and is compared with, the hashes of the chain to which this process appended its line. The
        ledger is not read again for it after a commit: a copy may have replaced it by then.
      - A ledger that lacks the anchor's line, or holds a changed one, grants nothing.
    """

    def __init__(
        self,
        store: LedgerStore,
        header: LedgerHeader,
        anchor: LedgerAnchor,
        *,
        allowed_wrappers: Callable[[], Sequence[str]] = tuple,
        most_held: int = 1,
    ) -> None:
        super().__init__(store, header, allowed_wrappers=allowed_wrappers, most_held=most_held)
        self.anchor = anchor
        self._anchored = (-1, "")  # the anchor's line that was last matched with the chain
        self._is_matched = False  # whether that was the chain which is read now
        self._first = -1  # hashes are kept from this line on
        self._untold: dict[int, str] = {}  # hashes of the lines after the anchor's line, by number
        self._adopts = False  # whether an anchor that does not know the ledger is accepted
        self._lags = False  # whether the anchor may lack a durable line

    def open(self, *, adopt_anchor: bool = False) -> None:
        """Reads the whole ledger, and updates the anchor; `adopt_anchor` accepts one that does not know the ledger."""
        with self.lock:
            self._adopts = adopt_anchor
            try:
                state = self.refresh()
                self._before_grant(state, state.seq)
                # With an anchor that can only be read, each process would charge a line before it is refused.
                write_anchor(self.anchor, self.header.ledger_id, self._anchored)
            finally:
                self._adopts = False

    def _start_anew(self) -> None:
        super()._start_anew()
        self._untold = {}
        self._is_matched = False

    def _may_skip_to(self, seq: int) -> bool:
        return seq <= self._first  # the hashes from the anchor's line on are compared with the anchor, or sent to it

    def _take_back(self, writer: LineAppender) -> None:
        super()._take_back(writer)
        self._untold = {seq: head for seq, head in self._untold.items() if seq <= self._state.seq}

    def _applied(self, lines: Sequence[LedgerRecord]) -> None:
        for record in lines[max(self._first - lines[0].seq, 0) :]:
            if record.seq == self._first or not self._adopts:
                self._untold[record.seq] = record.hash

    def _before_grant(self, state: LedgerState, seq: int) -> None:
        with self._turn(self.lock):
            if self._state is not state:
                raise LedgerUnavailableError(
                    f"ledger {self.header.ledger_id}: expected the lines that this thread wrote to, found them read "
                    "anew after a fault. Nothing is granted; what the ledger holds stays charged. Try again."
                )
            if self._anchored[0] < seq:
                self._lags = True
                self._anchor_lines(self._seen)
                self._lags = False

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[LineAppender]:
        """As of the class above; an anchor that cannot be written is found out before a further ticket is charged."""
        if self._lags:
            with self._turn(self.lock):
                self._read(self.store)
                if self._anchored[0] < self._seen[0]:
                    self._anchor_lines(self._seen)
                self._lags = False
        with super().exclusive() as writer:
            yield writer

    def _read(self, source: LedgerStore | LedgerTransaction, *, is_writing: bool = False) -> None:
        """Catches up, and compares with the anchor before the first read and before every write."""
        if self._state.seq and not is_writing:
            self._catch_up_from(self._anchored[0], source)
            return
        # Read the anchor first: the ledger may grow between the two reads, but never shrink.
        known = read_anchor(self.anchor, self.header.ledger_id)
        if known is not None and known[0] < self._anchored[0]:  # it lost lines, which it gets again
            self._anchored = (-1, "")
            self._start_anew()
        self._catch_up_from(max(self._anchored[0], (known or self._anchored)[0]), source)
        if known is None and self._adopts:
            return
        if known is None or known != self._anchored or not self._is_matched:
            self._set_anchored(self._check_known(known, self._head_at(known)))

    def _catch_up_from(self, first: int, source: LedgerStore | LedgerTransaction) -> None:
        self._first = first
        self._catch_up(source)

    def _check_known(self, known: tuple[int, str] | None, head: str | None) -> tuple[int, str]:
        """Refuses a ledger that the anchor does not know, or whose hash `head` of the anchor's line differs."""
        if known is None:
            raise unknown_ledger(self.anchor, self.header.ledger_id)
        if head != known[1]:
            msg = (
                f"ledger {self.header.ledger_id}: expected line {known[0]} as the anchor knows it "
                f"({self.anchor.description}), found {self._state.seq} lines without it. An older copy, or one that "
                "went on elsewhere, replaced the ledger: nothing is granted on it. Restore the ledger itself."
            )
            raise LedgerRollbackError(msg)
        return known

    def _set_anchored(self, known: tuple[int, str]) -> None:
        self._anchored, self._is_matched = known, True
        self._untold = {seq: head for seq, head in self._untold.items() if seq > known[0]}

    def _head_at(self, known: tuple[int, str] | None) -> str | None:
        """Returns the hash of the chain's line with the number of the anchor's line, or None."""
        if known is None or known[0] == 0:
            return self.header.digest
        return self._state.head if known[0] == self._state.seq else self._untold.get(known[0])

    def _anchor_lines(self, last: tuple[int, str]) -> None:
        """Writes the new lines up to the last durable one to the anchor, and checks that it holds that.

        All of them, because of two diverging copies one then finds the other's line of the same number.
        """
        name = self.header.ledger_id
        before = [] if self._adopts else [line for line in self._untold.items() if line[0] < last[0]]
        write_anchor(self.anchor, name, *before, last)
        known = read_anchor(self.anchor, name)
        if known is not None and known[0] < last[0]:
            msg = (
                f"anchor: expected line {last[0]} in {self.anchor.description}, where it was written, found {known[0]}."
            )
            raise LedgerUnavailableError(f"{msg} Nothing is granted; what the ledger holds stays charged.")
        if known != last:
            first = self._anchored[0]
            if self._adopts and known is not None:
                # Another process wrote more to it. Hashes of the lines that were read were not kept: read them again.
                self._adopts = False
                self._start_anew()
                first = known[0]
            self._catch_up_from(first, self.store)  # other processes may have appended, here or to a copy
            self._check_known(known, self._head_at(known))
        self._set_anchored(known or last)

    def _verify_lines(self) -> None:
        known = read_anchor(self.anchor, self.header.ledger_id)
        head = self._recomputed(0 if known is None else known[0])
        self.refresh()  # may write a line that waited, which takes the anchor on from `known`
        self._check_known(known, head)


MOST_OF_ABOUT, MOST_HOSTS = 500, 100
"""Characters of one declared text, and hosts with a country: a first line is read often."""


@dataclass(frozen=True, slots=True)
class LedgerAbout:
    """What the owners of a ledger declare for those who approve it: public text, which nothing checks.

    Attributes:
      purpose: what the records are used for; "": not declared, as with the others.
      owner: who answers for the ledger.
      approver: who agreed to its limits.
      retention: how long records, ledger and releases are kept.
      countries: hosts that receive private text, each with the country where it stands, sorted.
    """

    purpose: str = ""
    owner: str = ""
    approver: str = ""
    retention: str = ""
    countries: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, about: Any) -> LedgerAbout | None:
        """Reads texts by name, and `countries` as a mapping from host to country; nothing declared is None.

        Raises:
          ConfigurationError: a name is another, a text is blank, not printable, or longer than 500 characters, or there
            are more than 100 hosts.
        """
        if about is not None and not isinstance(about, Mapping):
            raise fail("about", "a mapping", type(about).__name__, f"Its names are {', '.join(public_fields(cls))}.")
        given = {check_choice("about", name, public_fields(cls)): value for name, value in (about or {}).items()}
        countries = given.pop("countries", {})
        if not isinstance(countries, Mapping):
            raise fail("about: countries", "a mapping from host to country", type(countries).__name__)
        if len(countries) > MOST_HOSTS:
            raise fail("about: countries", f"at most {MOST_HOSTS} hosts", len(countries))
        pairs = ((check_name("about: host", host), _check_text(host, place)) for host, place in countries.items())
        made = cls(**{name: _check_text(name, value) for name, value in given.items()}, countries=tuple(sorted(pairs)))
        return None if made == cls() else made

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON form of what was declared; `parse` inverts it exactly."""
        data = {**{name: getattr(self, name) for name in public_fields(type(self))}, "countries": dict(self.countries)}
        return {name: value for name, value in data.items() if value}


def _check_text(name: str, value: Any) -> str:
    if isinstance(value, str) and value.strip() and len(value) <= MOST_OF_ABOUT and value.isprintable():
        return value
    found = f"a text of {len(value)} characters" if isinstance(value, str) else type(value).__name__
    raise fail(f"about: {name}", f"one line of printable text, not blank, of at most {MOST_OF_ABOUT} characters", found)
