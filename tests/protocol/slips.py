"""Mistakes of the writer and of a store, each of which a random schedule has to find."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from langchain_dpicl.privacy.extensions.durable_writer import (
    CarryingAppender,
    Lease,
    LeasedGrant,
    LeasingWriter,
    Purse,
)
from langchain_dpicl.privacy.ledger.state import RESERVE
from langchain_dpicl.privacy.ledger.store import LedgerRecord
from langchain_dpicl.privacy.ledger.writer import LedgerWriter, TicketRequest
from tests.protocol.schedules import EarlyStore


def _grant_early(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LedgerWriter, "_flush", lambda self, state, seq, head: None)


def _see_early(patch: pytest.MonkeyPatch) -> None:
    real = LedgerWriter._note_visible

    def note(self: LedgerWriter) -> Any:
        last = real(self)
        self._seen = last[1:]
        return last

    patch.setattr(LedgerWriter, "_note_visible", note)


def _drop_doubts(patch: pytest.MonkeyPatch) -> None:
    def settle(self: LeasingWriter, source: object) -> None:
        self._doubtful = []

    patch.setattr(LeasingWriter, "_settle_doubts", settle)


def _write_doubts_again(patch: pytest.MonkeyPatch) -> None:
    def settle(self: LeasingWriter, source: object) -> None:
        doubtful, self._doubtful = self._doubtful, []
        for each in doubtful:
            for entry, count in each.commits.items() if not each.is_durable else ():
                self._note_waiting(entry, count)

    patch.setattr(LeasingWriter, "_settle_doubts", settle)


def _trust_lost_lines(patch: pytest.MonkeyPatch) -> None:
    def flush(self: EarlyStore, seq: int, head: str) -> None:
        log = self._schedule.log
        self._at("before the flush")
        log.durable = max(log.durable, len(log.lines))
        self._at("after the flush")

    patch.setattr(EarlyStore, "flush", flush)


def _fill_early(patch: pytest.MonkeyPatch) -> None:
    ask, fill, give_up, append = Purse.ask, Purse.fill, Purse.give_up, CarryingAppender.append
    asked: list[tuple[Purse, Lease]] = []
    filled: set[Lease] = set()

    def note(self: Purse, lease: Lease, most: int) -> None:
        ask(self, lease, most)
        asked[:] = [(self, lease)] if lease.count > 1 else []

    def append_and_fill(self: CarryingAppender, kind: str, body: Any) -> LedgerRecord:
        record = append(self, kind, body)
        if kind == RESERVE and asked:
            purse, lease = asked.pop()
            filled.add(lease)
            fill(purse, lease, record, self.state.sealed_component(lease.key.component))
        return record

    def fill_once(self: Purse, lease: Lease, line: LedgerRecord, sealed: Any) -> LeasedGrant:
        return LeasedGrant(line, 0, lease) if lease in filled else fill(self, lease, line, sealed)

    patch.setattr(Purse, "ask", note)
    patch.setattr(CarryingAppender, "append", append_and_fill)
    patch.setattr(Purse, "fill", fill_once)
    patch.setattr(Purse, "give_up", lambda self, lease: lease in filled or give_up(self, lease))


def _keep_what_goes_back(patch: pytest.MonkeyPatch) -> None:
    real = Purse.remove

    def remove(self: Purse, *given: Any, **options: Any) -> Any:
        kept = [(key, lot, list(lot.grants)) for key, lot in self._full.items()]
        removed = real(self, *given, **options)
        for key, lot, grants in kept:
            self._full[key], lot.grants = lot, grants
        return removed

    patch.setattr(Purse, "remove", remove)


def _grant_what_went_back(patch: pytest.MonkeyPatch) -> None:
    real = Purse.remove

    def remove(self: Purse, *given: Any, **options: Any) -> Any:
        counts = [(lease, lease.count) for lease in self._pending]
        removed = real(self, *given, **options)
        for lease, count in counts:
            lease.count = count
        return removed

    patch.setattr(Purse, "remove", remove)


def _put_back_twice(patch: pytest.MonkeyPatch) -> None:
    real = Purse.put_back

    def put_back(self: Purse, grant: LeasedGrant) -> bool:
        real(self, grant)
        return False

    patch.setattr(Purse, "put_back", put_back)


def _take_twice(patch: pytest.MonkeyPatch) -> None:
    real = Purse.take

    def take(self: Purse, key: TicketRequest) -> LeasedGrant | None:
        grant = real(self, key)
        if grant is not None and len(self._lots[key].grants) == 1:
            self._lots[key].grants.append(grant)
        return grant

    patch.setattr(Purse, "take", take)


def _forget(patch: pytest.MonkeyPatch, *members: str) -> None:
    """Lets the purse look tickets up without some of what their line names."""
    sealed, take = Purse.sealed, Purse.take

    def alike(self: Purse, key: TicketRequest) -> TicketRequest:
        rest = key._replace(**dict.fromkeys(members))
        others = (each for each, lot in self._full.items() if lot.grants)
        return next((each for each in others if each._replace(**dict.fromkeys(members)) == rest), key)

    patch.setattr(Purse, "sealed", lambda self, key: sealed(self, alike(self, key)))
    patch.setattr(Purse, "take", lambda self, key: take(self, alike(self, key)))


SLIPS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "tickets are granted before the flush": (_grant_early, "whose line is not on the disk"),
    "lines count as seen before they are durable": (_see_early, "whose line is not on the disk|a false alarm"),
    "commits whose answer was lost are taken for written": (_drop_doubts, "of them written"),
    "commits whose answer was lost are written again": (_write_doubts_again, "breaks the rules|of them written"),
    "the purse is filled before the line is durable": (
        _fill_early,
        "whose line is not on the disk|a ticket burnt twice",
    ),
    "tickets that go back stay in the purse": (_keep_what_goes_back, "burnt twice, or was given back|breaks the rules"),
    "a ticket goes back into the purse and to the ledger": (_put_back_twice, "burnt twice, or was given back|breaks"),
    "what went back of a lease that waits enters the purse": (
        _grant_what_went_back,
        "burnt twice, or was given back|breaks the rules",
    ),
    "a ticket of the purse is handed out twice": (_take_twice, "of one line and index"),
    "the purse does not name the tenant": (lambda patch: _forget(patch, "tenant"), "a ticket of another tenant"),
    "the purse does not name the cap": (lambda patch: _forget(patch, "cap"), "tickets of a tenant, cap 1"),
    "a flush does not look for its line": (_trust_lost_lines, "whose line is not on the disk|a false alarm"),
}
"""By what is done wrong: the patch, and what is found."""
