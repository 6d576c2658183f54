"""Keeps the run that a component on a rolling range answers from, until the blocks of the next one are closed."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any, TypeVar

from langchain_dpicl._opaque import Opaque
from langchain_dpicl.privacy.extensions.private_streams import RollingRange
from langchain_dpicl.privacy.extensions.run_tickets import QueryShare

if TYPE_CHECKING:
    from langchain_dpicl.runs.query_runnable import QueryRunnable

RunnableT = TypeVar("RunnableT", bound="QueryRunnable[Any]")


class AnsweringRuns(Opaque):
    """The runs of a component that answers queries on a rolling range; all copies of the component share it.

    Formal guarantees:
      - A run begins every `every` blocks from the component's first one on, by the clock and public numbers alone, so
        that it is the same in every process.
      - Range, tickets and kept answers of a query are those of one run.
    """

    def __init__(self, source: RollingRange, first: int) -> None:
        self._source = source
        self._first = first
        self._locks: dict[int, threading.Lock] = {}  # of each process: a fork may come while a thread holds its own
        self._current: tuple[int, dict[str, Any]] | None = None

    @property
    def is_due(self) -> bool:
        """Whether `of_now` has to read another range first."""
        current = self._current
        return current is None or current[0] != self._source.run_start(self._first)

    def share_of_now(self, share: QueryShare) -> QueryShare:
        """Returns the component's share, seen from the newest run; reads no range, so that no record becomes late."""
        start = self._source.run_start(self._first)
        return share.of_run((start, start + self._source.length - 1))

    def of_now(self, component: RunnableT) -> RunnableT:
        """Returns a component as it answers in the newest run."""
        with self._locks.setdefault(os.getpid(), threading.Lock()):
            start = self._source.run_start(self._first)  # inside: who waited goes on with the run that it finds
            if self._current is None or self._current[0] != start:
                self._current = None  # what the last run read is dropped before more is
                private = self._source.run_from(start)
                memo = component.memo
                self._current = (
                    start,
                    {
                        "private": private,
                        "share": component.share.of_run(private.blocks),
                        "memo": None if memo is None else memo.of_run(private.blocks),
                        "tenants": component.tenants.of_run(),
                        "runs": None,
                    },
                )
            return component.model_copy(update=self._current[1])
