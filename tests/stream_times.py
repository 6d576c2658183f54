"""The time in the tests of streams, which nothing but a test moves."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from langchain_dpicl.privacy.extensions import private_streams, stream_ledger

DAY = 86_400
START = datetime(2026, 6, 1, 12, tzinfo=UTC).timestamp()
"""A Monday at noon."""


def simulated_clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replaces the clock that streams and their ledgers read; returns its time, to be moved."""
    now = [START]
    for module in (private_streams, stream_ledger):
        monkeypatch.setattr(module, "time", type("Clock", (), {"time": staticmethod(lambda: now[0])}))
    return now
