"""Compares a ledger with an anchor, a second place that remembers the ledger's last line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from langchain_dpicl.exceptions import LedgerError, LedgerRollbackError, LedgerUnavailableError
from langchain_dpicl.privacy._validate import fail
from langchain_dpicl.privacy.extensions.ledger_outages import OutageWriter
from langchain_dpicl.privacy.stores import LedgerHeader, LedgerRecord, LedgerStore, LedgerTransaction


@runtime_checkable
class LedgerAnchor(Protocol):
    """Remembers how far a ledger has come, in a place that is not restored together with it.

    Formal guarantees that an implementation gives:
      - Once `write` has returned, `read` returns that line or a later one, in every process and after a crash.
      - An older line never takes a newer one's place, and one line never another's of the same number: that is a
        `LedgerRollbackError`, as two ledgers have gone on from one. What cannot be read or written is a
        `LedgerUnavailableError`.

    Attributes:
      description: public words for reports and errors, for instance "file /var/lib/anchor.json".
    """

    @property
    def description(self) -> str:
        """Public words on where the anchor lives."""

    def read(self, ledger_id: str) -> tuple[int, str] | None:
        """Returns number and hash of the last line known of a ledger, or None if none was ever written.

        Args:
          ledger_id: random name of the ledger.
        """

    def write(self, ledger_id: str, seq: int, head: str) -> None:
        """Remembers line `seq` with hash `head`, durably, unless a later one is known.

        Args:
          ledger_id: random name of the ledger.
          seq: number of the line.
          head: hash of the line, hex.
        """


def check_anchor(anchor: Any) -> LedgerAnchor | None:
    """Returns an anchor as it is, or None.

    Raises:
      ConfigurationError: it is something else, for instance a path, or the class of an anchor.
    """
    if anchor is None or (isinstance(anchor, LedgerAnchor) and not isinstance(anchor, type)):
        return anchor
    found = f"the class {anchor.__name__}" if isinstance(anchor, type) else type(anchor).__name__
    raise fail("anchor", "a LedgerAnchor such as FileAnchor(path), or None", found)


def read_anchor(anchor: LedgerAnchor, ledger_id: str) -> tuple[int, str] | None:
    """Returns number and hash of the last line that the anchor knows, or None.

    Raises:
      LedgerError: as the anchor says.
      LedgerUnavailableError: it raised something else, of which only the kind is told.
    """
    try:
        return anchor.read(ledger_id)
    except LedgerError:
        raise
    except Exception as error:  # noqa: BLE001  whatever an anchor of others raises
        kind = type(error).__name__
    raise LedgerUnavailableError(
        f"anchor: expected to read {anchor.description}, found {kind}. Nothing is granted; try again."
    )


def write_anchor(anchor: LedgerAnchor, ledger_id: str, last: tuple[int, str]) -> None:
    """Remembers the ledger's last line in the anchor; errors as `read_anchor`."""
    try:
        anchor.write(ledger_id, *last)
    except LedgerError:
        raise
    except Exception as error:  # noqa: BLE001  whatever an anchor of others raises
        kind = type(error).__name__
    else:
        return
    raise LedgerUnavailableError(
        f"anchor: expected to write to {anchor.description}, found {kind}. Nothing is granted; what the ledger holds "
        f"up to line {last[0]} stays charged. Try again."
    )


def never_seen(anchor: LedgerAnchor, ledger_id: str) -> LedgerRollbackError:
    """Returns the refusal of a ledger that the anchor does not know; the caller raises it."""
    return LedgerRollbackError(
        f"ledger {ledger_id}: expected one that the anchor knows ({anchor.description}), found one that it has never "
        "seen: another ledger took its place, or this is the wrong anchor. Nothing is granted. To add an anchor to a "
        "ledger that had none, open it once with adopt_anchor=True."
    )


class AnchoredWriter(OutageWriter):
    """Writes a ledger whose last line is also remembered by an anchor.

    Formal guarantees:
      - What is granted is granted after the line that charges it stands in the anchor, too.
      - The anchor is told hashes of the chain that this process wrote its own line on, and compared with them. Nothing
        is read again for it after a commit: a copy may have taken the ledger's place by then.
      - A ledger on which a line that the anchor knows is gone or changed grants nothing.
    """

    def __init__(
        self,
        store: LedgerStore,
        header: LedgerHeader,
        anchor: LedgerAnchor,
        *,
        allowed_wrappers: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        super().__init__(store, header, allowed_wrappers=allowed_wrappers)
        self.anchor = anchor
        self._anchored = (-1, "")  # the anchor's line that was last found on the chain
        self._first = -1  # hashes are kept from this line on
        self._untold: dict[int, str] = {}  # hashes of the lines after the anchor's, as they were applied
        self._adopts = False  # whether an anchor that does not know the ledger is accepted

    def open(self, *, adopt_anchor: bool = False) -> None:
        """Reads the whole ledger, and brings an anchor that lags behind up to its last line.

        Args:
          adopt_anchor: the anchor is new to this ledger, or has missed so much that its last line is taken at once.

        Raises:
          LedgerError: the ledger is broken, or cannot be read.
          LedgerRollbackError: a line that the anchor knows is not on it, or the anchor has never seen the ledger.
        """
        with self.lock:
            self._adopts = adopt_anchor
            try:
                self.refresh()
                self._after_commit()
            finally:
                self._adopts = False

    def _start_anew(self) -> None:
        super()._start_anew()
        self._untold = {}

    def _applied(self, record: LedgerRecord) -> None:
        if record.seq == self._first or (record.seq > self._first and not self._adopts):
            self._untold[record.seq] = record.hash

    def _after_commit(self) -> None:
        if self._anchored[0] < self._state.seq:
            self._anchor_last_line()

    def _read(self, source: LedgerStore | LedgerTransaction, *, is_writing: bool = False) -> None:
        """Catches up, and compares with the anchor where lines are read from the start or about to be written."""
        if self._state.seq and not is_writing:
            self._catch_up_from(self._anchored[0], source)
            return
        # The anchor first: meanwhile others may go on, never back.
        known = read_anchor(self.anchor, self.header.ledger_id)
        if known is not None and known[0] < self._anchored[0]:  # it forgot lines, and is to be told them again
            self._anchored = (-1, "")
            self._start_anew()
        self._catch_up_from(max(self._anchored[0], (known or self._anchored)[0]), source)
        if known is None and self._adopts:
            return
        if known is None or known != self._anchored:
            self._check_known(known, self._head_at(known))

    def _catch_up_from(self, first: int, source: LedgerStore | LedgerTransaction) -> None:
        self._first = first
        self._catch_up(source)

    def _check_known(self, known: tuple[int, str] | None, head: str | None) -> None:
        """Refuses a ledger that the anchor does not know, or whose line of that number has another hash than it knows.

        Args:
          known: what the anchor knows.
          head: hash of the ledger's line of that number; None where there is none.
        """
        if known is None:
            raise never_seen(self.anchor, self.header.ledger_id)
        if head != known[1]:
            msg = (
                f"ledger {self.header.ledger_id}: expected line {known[0]} as the anchor knows it "
                f"({self.anchor.description}), found {self._state.seq} lines without it. An older copy, or one that "
                "went on elsewhere, took the ledger's place: nothing is granted on it. Bring the ledger itself back."
            )
            raise LedgerRollbackError(msg)
        self._set_anchored(known)

    def _set_anchored(self, known: tuple[int, str]) -> None:
        self._anchored = known
        self._untold = {seq: head for seq, head in self._untold.items() if seq > known[0]}

    def _head_at(self, known: tuple[int, str] | None) -> str | None:
        """Returns the hash that the anchor's line has on the chain that was read, None where there is none."""
        if known is None or known[0] == 0:
            return self.header.digest
        return self._state.head if known[0] == self._state.seq else self._untold.get(known[0])

    def _anchor_last_line(self) -> None:
        """Tells the anchor what was read and written here, and checks that the anchor holds it.

        Line by line: of two copies that go on at the same moment, one meets the other's line of the same number.
        """
        name, last = self.header.ledger_id, (self._state.seq, self._state.head)
        if not self._adopts:
            for line in self._untold.items():
                if line[0] < last[0]:
                    write_anchor(self.anchor, name, line)
        write_anchor(self.anchor, name, last)
        known = read_anchor(self.anchor, name)
        if known is not None and known[0] < last[0]:
            msg = (
                f"anchor: expected line {last[0]} in {self.anchor.description}, where it was written, found {known[0]}."
            )
            raise LedgerUnavailableError(f"{msg} Nothing is granted; what the ledger holds stays charged.")
        if known != last:
            self._catch_up_from(self._anchored[0], self.store)  # others may have gone on, in this ledger or in a copy
            self._check_known(known, self._head_at(known))
        self._set_anchored(known or last)

    def _verify_lines(self) -> None:
        known = read_anchor(self.anchor, self.header.ledger_id)
        head = self._recomputed(0 if known is None else known[0])
        self.refresh()
        self._check_known(known, head)
