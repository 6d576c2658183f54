"""Mistakes of the writer and of a store, each of which a random schedule has to find."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from langchain_dpicl.privacy.ledger.writer import LedgerWriter
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
    def settle(self: LedgerWriter, source: object) -> None:
        self._doubtful = []

    patch.setattr(LedgerWriter, "_settle_doubts", settle)


def _write_doubts_again(patch: pytest.MonkeyPatch) -> None:
    def settle(self: LedgerWriter, source: object) -> None:
        doubtful, self._doubtful = self._doubtful, []
        for each in doubtful:
            for entry, count in each.commits.items() if not each.is_durable else ():
                self._note_waiting(entry, count)

    patch.setattr(LedgerWriter, "_settle_doubts", settle)


def _trust_lost_lines(patch: pytest.MonkeyPatch) -> None:
    def flush(self: EarlyStore, seq: int, head: str) -> None:
        log = self._schedule.log
        self._at("before the flush")
        log.durable = max(log.durable, len(log.lines))
        self._at("after the flush")

    patch.setattr(EarlyStore, "flush", flush)


SLIPS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "tickets are granted before the flush": (_grant_early, "whose line is not on the disk"),
    "lines count as seen before they are durable": (_see_early, "whose line is not on the disk|a false alarm"),
    "commits whose answer was lost are taken for written": (_drop_doubts, "of them written"),
    "commits whose answer was lost are written again": (_write_doubts_again, "breaks the rules|of them written"),
    "a flush does not look for its line": (_trust_lost_lines, "whose line is not on the disk|a false alarm"),
}
"""By what is done wrong: the patch, and what is found."""
