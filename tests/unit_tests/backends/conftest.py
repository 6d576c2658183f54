"""Fixtures of the engines' tests."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How many seconds blocking calls slept between attempts, each in its turn; nobody sleeps."""
    seconds: list[float] = []
    monkeypatch.setattr("langchain_dpicl.backends.private_calls.call.time", SimpleNamespace(sleep=seconds.append))
    return seconds


@pytest.fixture
def rows_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a local model's rows pass for unmoved in a batch of any size that fits; which sizes do is the processor's.

    For tests of memory and of which rows stand together; what bits the rows keep has tests of its own.
    """

    def keeps_apart(answers: Callable[[int], object], half: int, *, wherever: bool) -> bool:
        del half, wherever
        answers(0)
        answers(1)
        return True

    monkeypatch.setattr("langchain_dpicl.backends.hf.engine.keeps_apart", keeps_apart)
