"""A test that hangs ends the run, and no other does."""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import GUARD
from tests.hang_guard import HangGuard


def settings(timeout: float) -> Any:
    return SimpleNamespace(timeout=timeout, method="thread")


@pytest.fixture
def ended() -> list[Any]:
    return []


@pytest.fixture
def now() -> list[float]:
    return [1000.0]


@pytest.fixture
def guard(ended: list[Any], now: list[float]) -> HangGuard:
    """One that looks when it is asked to."""
    return HangGuard(
        end=lambda item, settings: ended.append((item, settings.timeout)),
        clock=lambda: now[0],
        wait=threading.Event().wait,
    )


def test_a_test_that_runs_too_long_is_ended_once_with_its_own_settings(
    guard: HangGuard, ended: list[Any], now: list[float]
) -> None:
    guard.watch("quick", settings(900.0))
    now[0] += 300.0
    guard.watch("slow", settings(600.0))
    for later in (599.0, 2.0, 700.0):
        now[0] += later
        guard.look()
    assert ended == [("slow", 600.0)]


def test_what_is_over_is_not_ended(guard: HangGuard, ended: list[Any], now: list[float]) -> None:
    guard.watch("quick", settings(600.0))
    guard.leave()
    now[0] += 5000.0
    guard.look()
    assert not ended


def test_one_thread_looks_by_itself(now: list[float]) -> None:
    looks, seen = threading.Semaphore(0), queue.Queue()
    guard = HangGuard(end=lambda item, settings: seen.put(item), clock=lambda: now[0], wait=looks.acquire)
    threads = set()
    for number in range(3):
        guard.watch(number, settings(600.0))
        threads.add(guard._thread)
    assert len(threads) == 1
    now[0] += 601.0
    looks.release(5)
    assert seen.get(timeout=60) == 2
    assert seen.empty()


def test_the_tests_of_this_run_are_watched(request: pytest.FixtureRequest) -> None:
    watched = GUARD._watched
    if request.config._env_timeout_method != "thread" or not request.config._env_timeout:
        pytest.skip("this run has other limits")
    assert watched is not None
    assert watched[1] is request.node
    assert watched[2].timeout == request.config._env_timeout
    assert GUARD._thread is not None
    assert GUARD._thread.is_alive()
