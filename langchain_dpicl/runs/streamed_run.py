"""The base of runs that stream their releases, with progress bars and the privacy report of a release."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Generic, TypeVar

from tqdm.auto import tqdm

from langchain_dpicl.backends.sync_async import EffectGenerator, run_in_thread
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.exceptions import ModelCallError
from langchain_dpicl.planning.share_plan import SharePlan
from langchain_dpicl.privacy.ledger.shares import Share
from langchain_dpicl.reports.claims import RELEASE_FORMAT, unit_of

PartT = TypeVar("PartT")
WholeT = TypeVar("WholeT")
T = TypeVar("T")


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


def attempt(walk: EffectGenerator[T]) -> EffectGenerator[tuple[T | None, str]]:
    """Runs a walk (an effect generator); returns its result, or the message of a failed model call.

    The caller raises its own error outside `except`, so that the error has no context that could hold private text.
    """
    try:
        return (yield from walk), ""
    except ModelCallError as error:
        return None, str(error)


def report_of(budget: Budget, share: Share, plan: SharePlan, **shown: Any) -> dict[str, Any]:
    """Returns the public privacy report of a share's release; `shown` stands before the budget's own report."""
    inner = budget.report().to_dict()
    return {
        "format": RELEASE_FORMAT,
        "private": True,
        "method": plan.method,
        "component": share.component,
        "ledger_id": budget.ledger_id,
        "dataset_id": plan.partition,
        "unit": unit_of(inner, plan.partition),
        "adjacency": budget.adjacency,
        "epsilon": share.epsilon,
        "delta": share.delta,
        "plan": plan.to_dict(),
        **shown,
        "budget": inner,
    }


def new_bar(total: int, unit: str, words: str, *, progress: bool | None) -> Any:
    """Returns a progress bar; `progress` None: shown on a terminal only."""
    return tqdm(total=total, unit=unit, desc=words, disable=None if progress is None else not progress, leave=False)


def tick(bar: Any) -> None:
    """Moves a bar by one step; a closed terminal must not stop a paid run."""
    with suppress(OSError, ValueError):
        bar.update()


@contextmanager
def carrying(**owner: object) -> Iterator[None]:
    """Sets attributes, such as `labeler=`, on an error that ends the block, so that no release is lost with it."""
    try:
        yield
    except BaseException as error:
        # Exceptions with slots take no attributes; the error itself matters more.
        with suppress(AttributeError, TypeError):
            for name, value in owner.items():
                setattr(error, name, value)
        raise
