"""Ends a run whose test hangs, as pytest-timeout's threads do, from one thread for all tests.

A thread for each test costs as much processor time as all the rest that pytest does for a small test, and its start and end
wait for a processor each: on a busy machine that took longer than the tests.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic, sleep
from typing import Any

from pytest_timeout import timeout_timer

PACE = 2.0
"""Seconds between two looks at the clock."""


def pause(sleep: Callable[[float], None] = sleep) -> None:
    """Waits for the next look: as long as this process knew to sleep when it began, whatever a test replaces."""
    sleep(PACE)


class HangGuard:
    """Knows the test that runs, and until when it may.

    Args:
      end: what is called with a test that ran too long, and its settings.
      clock: returns seconds.
      wait: ends when it is time to look again.
    """

    def __init__(
        self,
        end: Callable[[Any, Any], object] = timeout_timer,
        clock: Callable[[], float] = monotonic,
        wait: Callable[[], object] = pause,
    ) -> None:
        self._end, self._clock, self._wait = end, clock, wait
        self._watched: tuple[float, Any, Any] | None = None
        self._thread: threading.Thread | None = None

    def watch(self, item: Any, settings: Any) -> None:
        """Lets a test run for `settings.timeout` seconds from now."""
        self._watched = (self._clock() + settings.timeout, item, settings)
        if self._thread is None:
            self._thread = threading.Thread(target=self._look, name="watches for tests that hang", daemon=True)
            self._thread.start()

    def leave(self) -> None:
        """The test is over."""
        self._watched = None

    def look(self) -> None:
        """Ends the run if its test has run too long."""
        watched = self._watched
        if watched is not None and self._clock() > watched[0]:
            self._watched = None
            self._end(*watched[1:])

    def _look(self) -> None:
        while True:
            self._wait()
            self.look()
