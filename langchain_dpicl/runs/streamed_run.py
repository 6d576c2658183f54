"""The base of runs that stream their releases, with progress bars and the privacy report of a release."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from typing import Generic, TypeVar

from langchain_dpicl.backends.sync_async import run_in_thread
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.runs.release_run import attempt, carrying, new_bar, report_of, tick

__all__ = ["StreamedRun", "attempt", "carrying", "new_bar", "report_of", "tick"]

PartT = TypeVar("PartT")
WholeT = TypeVar("WholeT")


class StreamedRun(ABC, Generic[PartT, WholeT]):
    """A run that yields parts of its release and returns the whole."""

    _budget: Budget

    @abstractmethod
    def stream(self, *, progress: bool | None = None) -> Iterator[PartT]:
        """Yields each part as soon as it is released."""

    @abstractmethod
    def astream(self, *, progress: bool | None = None) -> AsyncIterator[PartT]:
        """Async version of `stream`."""

    @abstractmethod
    def _whole(self) -> WholeT:
        """Returns everything released so far, with its privacy report; may wait for the ledger."""

    def run(self, *, progress: bool | None = None) -> WholeT:
        """Releases what is missing and returns everything released; errors as in `stream`.

        Args:
          progress: True shows a bar, False hides it, None shows it on a terminal only.
        """
        for _ in self.stream(progress=progress):
            pass
        return self._whole()

    async def arun(self, *, progress: bool | None = None) -> WholeT:
        """Async version of `run`; the calls of one release run concurrently."""
        async for _ in self.astream(progress=progress):
            pass
        return await run_in_thread(self._whole, is_slow=self._budget.durable)
