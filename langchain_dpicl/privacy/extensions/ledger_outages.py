"""Writes a ledger whose store may be unavailable for a while."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from langchain_dpicl.exceptions import LedgerUnavailableError
from langchain_dpicl.privacy.desk import Desk
from langchain_dpicl.privacy.stores import LedgerHeader, LedgerRecord, LedgerStore, LedgerTransaction

# A thread that waited longer than this many seconds through an outage is refused: if each of many waiting threads
# tried the store again, the last would wait without limit.
PATIENCE = 10.0


class OutageWriter(Desk):
    """Refuses threads that waited through an outage, and writes no settlement twice if the store's reply was lost."""

    def __init__(
        self, store: LedgerStore, header: LedgerHeader, *, allowed_wrappers: Callable[[], Sequence[str]] = tuple
    ) -> None:
        super().__init__(store, header, allowed_wrappers=allowed_wrappers)
        self._outages = 0
        self._doubtful: dict[tuple[int, str], LedgerRecord] = {}  # settlements that failed but may have been committed

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        outages, since = self._outages, time.monotonic()
        with self.lock:
            if self._outages != outages and time.monotonic() - since > PATIENCE:
                msg = f"ledger: expected it to respond, found {self.store.description} unavailable for other threads."
                raise LedgerUnavailableError(f"{msg} Nothing is granted; try again.")
            try:
                yield
            except LedgerUnavailableError:
                self._outages += 1
                raise

    def settle(self, kind: str, reservation: int, count: int) -> None:
        """Records a settlement; after a failure, the same settlement again writes no second line."""
        body = {"reservation": reservation, "count": count}
        record = None
        try:
            with self.exclusive() as writer:
                if self._doubtful:
                    record = self._written_before(writer.view, kind, body)
                if record is None:
                    record = writer.append(kind, body)
        except BaseException:
            if record is not None:  # the store may have committed the line although it raised
                self._doubtful[reservation, kind] = record
            raise
        if self._doubtful:
            self._doubtful.pop((reservation, kind), None)

    def _written_before(self, view: LedgerTransaction, kind: str, body: Mapping[str, Any]) -> LedgerRecord | None:
        """Returns the line of an earlier, failed settlement if the ledger holds it."""
        earlier = self._doubtful.get((body["reservation"], kind))
        if earlier is None or dict(earlier.body) != body:
            return None
        line = next(iter(view.records(earlier.seq - 1)), None)
        return line if line is not None and line.hash == earlier.hash else None
