"""What the tests of streams share."""

from __future__ import annotations

import pytest

from tests.stream_times import simulated_clock


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that a stream reads."""
    return simulated_clock(monkeypatch)
