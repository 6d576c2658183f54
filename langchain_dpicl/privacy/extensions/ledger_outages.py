"""Writes a ledger whose store may be out for a while."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from langchain_dpicl.exceptions import LedgerUnavailableError
from langchain_dpicl.privacy.desk import Desk
from langchain_dpicl.privacy.stores import LedgerHeader, LedgerRecord, LedgerStore, LedgerTransaction

# A thread that waited longer than this, in seconds, through an outage of the ledger does not try it again by itself:
# of many that wait in turn the last would wait for ever.
PATIENCE = 10.0


class OutageWriter(Desk):
    """Refuses threads that waited through an outage, and settles once where an answer of the store was lost."""

    def __init__(
        self, store: LedgerStore, header: LedgerHeader, *, allowed_wrappers: Callable[[], Sequence[str]] = tuple
    ) -> None:
        super().__init__(store, header, allowed_wrappers=allowed_wrappers)
        self._outages = 0
        self._doubtful: dict[tuple[int, str], LedgerRecord] = {}  # settlements that failed and may stand all the same

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        outages, since = self._outages, time.monotonic()
        with self.lock:
            if self._outages != outages and time.monotonic() - since > PATIENCE:
                msg = f"ledger: expected one that answers, found {self.store.description} out while others waited for"
                raise LedgerUnavailableError(f"{msg} it. Nothing is granted; try again.")
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
            if record is not None:  # the line may stand although the answer was lost
                self._doubtful[reservation, kind] = record
            raise
        if self._doubtful:
            self._doubtful.pop((reservation, kind), None)

    def _written_before(self, view: LedgerTransaction, kind: str, body: Mapping[str, Any]) -> LedgerRecord | None:
        """Returns the line of a settlement whose answer was lost, if the ledger holds it."""
        earlier = self._doubtful.get((body["reservation"], kind))
        if earlier is None or dict(earlier.body) != body:
            return None
        found = next(iter(view.records(earlier.seq - 1)), None)
        return found if found is not None and found.hash == earlier.hash else None
