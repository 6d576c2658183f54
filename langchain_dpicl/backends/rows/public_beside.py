"""Asks the public prompt of a query first, or beside the private rows of its release."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from langchain_dpicl._opaque import OpaqueRows
from langchain_dpicl.backends.sync_async import Effect

LEAST_BESIDE = 8
"""Calls in flight from which a public one goes beside private ones: it takes a place of theirs."""


def calls_at_once(engine: object) -> int:
    """Returns how many calls of a model elsewhere an engine has in flight at once; 1 where it does not say."""
    found = getattr(engine, "calls_at_once", 1)
    return found if type(found) is int else 1


@dataclass(slots=True)
class Outage:
    """Whether the last public call of a component failed; its public prompts go first until one succeeds."""

    is_on: bool = False

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Notes whether the public call of the block failed."""
        try:
            yield
        except Exception:
            self.is_on = True
            raise
        self.is_on = False


@dataclass(slots=True, repr=False, eq=False)
class PublicAnswer:
    """The answer to one PUBLIC question, asked once or, where that failed beside private calls, twice.

    Attributes:
      ask: returns the effect that asks.
      outage: of the component.
      value: the answer; None: there is none yet.
      stop: what ended the first try and has to end the caller, such as Ctrl-C.
    """

    ask: Callable[[], Effect]
    outage: Outage
    value: Any = field(default=None)
    stop: BaseException | None = field(default=None)

    def run(self) -> Any:
        """Asks, blocking; raises ModelCallError where the call failed."""
        with self.outage.noted():
            self.value = self.ask().run()
        return self.value

    async def arun(self) -> Any:
        """Asks, awaiting."""
        with self.outage.noted():
            self.value = await self.ask().arun()
        return self.value

    def try_once(self) -> None:
        """Asks, blocking; without an answer `value` stays None."""
        try:
            self.run()
        except Exception:  # noqa: BLE001  asked again, alone; that call raises
            self.value = None
        except BaseException as stop:  # noqa: BLE001  raised by the caller's thread, in which it means something
            self.value, self.stop = None, stop

    async def atry_once(self) -> None:
        """Async twin of `try_once`."""
        try:
            await self.arun()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            self.value = None  # the client's own, which is a failed call
        except Exception:  # noqa: BLE001  asked again, alone; that call raises
            self.value = None


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class AskBeside:
    """Computes private rows while a public question is asked; the answer is the rows alone.

    Formal guarantees:
      - Neither call ends the other: the effect answers after both have ended. A cancelled task stops both; after Ctrl-C
        the thread of the public call ends by itself.
      - A public call that failed beside the rows is made again after all private calls of this answer have ended, and
        only that one raises: whether an answer comes does not depend on how many of them are in flight. A provider's
        limit for a minute may still count them, see `docs/known-limitations.md`.
      - What is raised holds neither rows nor prompts.

    Attributes:
      rows: the effect that computes the private rows.
      public: the question.
      is_final: False: the caller asks again, when no other private call is in flight either.
    """

    rows: Effect
    public: PublicAnswer
    is_final: bool = True

    def run(self) -> OpaqueRows:
        """Runs, blocking; the public call in a thread of its own."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            aside = threading.Thread(
                target=contextvars.copy_context().run, args=(self.public.try_once,), name="dpicl-public", daemon=True
            )
            aside.start()
            try:
                rows: OpaqueRows = self.rows.run()
            except Exception:
                aside.join()
                raise
            with dropped(rows):
                aside.join()
        else:  # the loop is stopped here, and what a thread waits for may be one of its calls
            self.public.try_once()
            rows = self.rows.run()
        if self.public.stop is not None:
            with dropped(rows):
                raise self.public.stop
        if self.public.value is None and self.is_final:
            with dropped(rows):
                self.public.run()
        return rows

    async def arun(self) -> OpaqueRows:
        """Runs, awaiting."""
        aside = asyncio.ensure_future(self.public.atry_once())
        try:
            rows: OpaqueRows = await self.rows.arun()
            with dropped(rows):
                await aside
        except asyncio.CancelledError:
            aside.cancel()
            await asyncio.wait([aside])
            raise
        finally:
            aside.cancel()  # a coroutine that is closed can await nothing
        if self.public.value is None and self.is_final:
            with dropped(rows):
                await self.public.arun()
        return rows


@contextmanager
def dropped(rows: OpaqueRows) -> Iterator[None]:
    """Drops the rows where the block raises: frames of the error hold the box."""
    try:
        yield
    except BaseException:
        rows.take()
        raise
