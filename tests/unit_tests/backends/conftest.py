"""Fixtures of the engines' tests."""

from __future__ import annotations

from types import SimpleNamespace

import pytest


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How many seconds blocking calls slept between attempts, each in its turn; nobody sleeps."""
    seconds: list[float] = []
    monkeypatch.setattr("langchain_dpicl.backends.private_calls.call.time", SimpleNamespace(sleep=seconds.append))
    return seconds
