"""The base of all runs: releases item by item, here or on workers, stops and continues, and keeps a journal."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Generator,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import (
    AbstractContextManager,
    AsyncExitStack,
    ExitStack,
    aclosing,
    closing,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Generic, Self, TypeVar

from langchain_core.runnables import RunnableConfig
from tqdm.auto import tqdm

from langchain_dpicl._opaque import PerProcess, Uncopyable
from langchain_dpicl._plain_files import MAX_ARRAYS, MAX_TEXT, check_path, check_target, read_plain, write_bytes
from langchain_dpicl.backends.rows.rows import Outcome, advance_together
from langchain_dpicl.backends.sync_async import (
    EffectGenerator,
    ThreadedContext,
    limit_concurrency,
    run_async,
    run_in_thread,
    run_sync,
)
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.budget.handler import RunEvents, check_config, resolve_budget
from langchain_dpicl.distributed import RemoteExecution, iterate_in_threads, tickets_missing
from langchain_dpicl.exceptions import (
    ConfigurationError,
    DPICLError,
    LedgerUnavailableError,
    ModelCallError,
    RunInterruptedError,
)
from langchain_dpicl.options import LocalExecutor
from langchain_dpicl.planning.share_plan import SharePlan
from langchain_dpicl.privacy._validate import fail
from langchain_dpicl.privacy.extensions.stream_ledger import RunShare, StreamTerms
from langchain_dpicl.privacy.ledger.shares import Reservation, Share
from langchain_dpicl.privacy.ledger.tickets import as_shown
from langchain_dpicl.privacy.private_examples import PrivateExamples
from langchain_dpicl.released.base import parse_json, plain_json
from langchain_dpicl.reports.claims import RELEASE_FORMAT, reads_claims, unit_of

try:
    import fcntl
except ImportError:  # pragma: no cover  Windows has no such locks
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

FORMAT = "langchain-dpicl/run"
VERSION = 2
_TERMS = ("component", "ledger_id", "dataset_id", "plan")
_END = 80
"""Bytes at the end of a file by which it is known: more than the digest of its last line."""


class RunJournal:
    """The checkpoint of one run. Line 1 names the run, every other line holds one release as JSON.

    Formal guarantees:
      - A line is written and synced as a whole before `append` returns. The unfinished last line of a killed process is
        dropped, unless it lacks its newline alone: its ticket burnt and was not committed.
      - Each line has a digest of itself and of all lines above it. A file that was changed, belongs to another run, or
        was continued by another process is refused, and nothing is written to it.
      - A file that is gone, or is an older copy, gets the lines that it lacks at the next `append` or `flush`.

    The file is untrusted: readers of `entries` check their values.

    Args:
      path: file to create or continue; its folder must exist.
      component: name of the share that pays.
      ledger_id: the ledger.
      dataset_id: the private data set.
      plan: the public parameters of the run, as JSON values; the file holds a digest of all but their prices, which
        follow from the tickets and which another version of the accountant may bound otherwise.

    Attributes:
      entries: what the file holds, and what was appended since.
      is_new: whether the file held nothing: no run with this checkpoint has burnt a ticket.

    Raises:
      ConfigurationError: no file can be written there, or it is not a journal of this run.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, component: str, ledger_id: str, dataset_id: str, plan: Mapping[str, Any]
    ) -> None:
        self._given = check_target("checkpoint", path).absolute()
        # Arrays are written beside the file. Earlier versions wrote them beside the link to it, if one is given.
        self._path = check_path("checkpoint", self._given)
        digest = _digest("", plain_json("plan", _without_price(plan)))
        terms = dict(zip(_TERMS, (component, ledger_id, dataset_id, digest), strict=True))
        self._head = {"format": FORMAT, "version": VERSION, **terms}
        lines, on_file, torn = _read(self._path)
        self.entries = [entry for entry, _ in lines[1:]]
        self.is_new = not lines
        self._pending = b"\n" if lines and not on_file.endswith(b"\n") else b""
        self._arrays: dict[Path, bytes] = {}
        self._torn = torn if lines else b""  # without a first line it may be a file of something else
        self._digest = lines[-1][1] if lines else ""
        self._size, self._end = len(on_file), on_file[-_END:]
        if lines:
            self._check_head(lines[0][0])
        else:
            self._pending, self._digest = next(self._own_lines())

    @staticmethod
    def component_in(path: str | os.PathLike[str] | None) -> str | None:
        """Returns the component whose journal a path holds; None without a path or a file."""
        lines = [] if path is None else _read(check_target("checkpoint", path))[0]
        component = lines[0][0].get("component") if lines else None
        return component if isinstance(component, str) else None

    @classmethod
    def of(
        cls,
        path: str | os.PathLike[str] | None,
        component: str | None,
        prefix: str,
        *,
        budget: Budget,
        private: PrivateExamples,
        plan: Mapping[str, Any],
    ) -> tuple[str, Self | None]:
        """Returns the component's name and its journal, which is None without a path.

        The name is the given one, that of the journal or a new one.
        """
        found = cls.component_in(path) if component is None else component
        name = budget.fresh_name(prefix) if found is None else found
        if path is None:
            return name, None
        return name, cls(path, component=name, ledger_id=budget.ledger_id, dataset_id=private.dataset_id, plan=plan)

    def append(self, entry: Mapping[str, Any], *, arrays: bytes | None = None) -> None:
        """Writes and syncs one release; after an error the line is kept, and the next `append` or `flush` writes it.

        Args:
          entry: JSON values, public.
          arrays: what is too large for a line; only those of the last two releases are kept, in files beside.

        Raises:
          ConfigurationError: another process has written to the file.
          OSError: the file cannot be written.
        """
        entry = plain_json("release", entry)
        if arrays is not None:
            # Two files in turn: those of the last release stay until the next line is written.
            self._arrays[_beside(self._path, len(self.entries))] = arrays
            entry["arrays"] = hashlib.sha256(arrays).hexdigest()
        self._add(entry)
        self.flush()

    def holds(self, entry: Mapping[str, Any]) -> bool:
        """Whether a release is in the file, or is one that could not be written and waits for the next `flush`."""
        plain = plain_json("release", entry)
        return any(one == plain for one in reversed(self.entries))  # mostly the last one

    @property
    def is_flushed(self) -> bool:
        """Whether all releases are in the file."""
        return not self._pending and not self._arrays

    def flush(self) -> None:
        """Writes and syncs what is not written yet; errors as in `append`."""
        with _opened(self._path) as file:
            if fcntl is not None:  # another run may not write between the look and the line
                with suppress(OSError):  # a file system without locks
                    fcntl.flock(file, fcntl.LOCK_EX)
            if (written := self._written(file)) is None and self._rejoin():
                logger.warning("checkpoint: expected the file as this run left it; what it lacks is written again")
                written = self._written(file)  # under the name another one may stand by now
            if written is None:
                advice = "Two runs cannot share one: build this one again to continue from the file, or take another."
                raise fail("checkpoint", "the file as this run left it", "one that another run wrote to", advice)
            if self._size + len(self._pending) > MAX_TEXT:
                raise fail("checkpoint", f"at most {MAX_TEXT:,} bytes, which is what can be read again", "more")
            for path, arrays in self._arrays.items():
                write_bytes(path, arrays)
            self._arrays.clear()
            if not self._pending:
                return
            file.seek(self._size + written)
            file.truncate()
            file.write(self._pending[written:])
            file.flush()
            os.fsync(file.fileno())
        size = self._size + len(self._pending)
        end = (self._end + self._pending)[-_END:]
        self._size, self._end, self._pending, self._torn = size, end, b"", b""

    def arrays(self) -> bytes:
        """Returns the arrays of the last release.

        Raises:
          ConfigurationError: they are not those that were written with it, or there is no file of them.
        """
        for path in (self._path, self._given):
            with suppress(FileNotFoundError):
                data = read_plain(_beside(path, len(self.entries) - 1), MAX_ARRAYS)
                if hashlib.sha256(data).hexdigest() == self.entries[-1].get("arrays"):
                    return data
        raise fail("checkpoint", "the arrays of its last release beside it", "others", "Keep the files together.")

    def _add(self, entry: dict[str, Any]) -> None:
        digest = _digest(self._digest, entry)
        pending, number = self._pending + _line(entry, digest), len(self.entries)
        # All or none, where Ctrl-C comes: it comes after calls, of which there is none here.
        self.entries[number:], self._pending, self._digest = [entry], pending, digest

    def _own_lines(self) -> Iterator[tuple[bytes, str]]:
        """Yields all lines of this run, with their digests."""
        digest = ""
        for entry in (self._head, *self.entries):
            digest = _digest(digest, entry)
            yield _line(entry, digest), digest

    def _rejoin(self) -> bool:
        """Makes the lines pending that the file lacks; False, and nothing changes: it holds others than this run's."""
        try:
            lines, on_file, torn = _read(self._path)
        except ConfigurationError:
            return False
        own = list(self._own_lines())
        if [digest for _, digest in lines] != [digest for _, digest in own[: len(lines)]] or (torn and not lines):
            return False
        pending = b"".join(line for line, _ in own[len(lines) :])
        pending = pending if not lines or on_file.endswith(b"\n") else b"\n" + pending
        self._pending, self._size, self._end, self._torn = pending, len(on_file), on_file[-_END:], torn
        return True

    def _written(self, file: BinaryIO) -> int | None:
        """Returns how many bytes of the pending lines the file ends with; None: it is not as this run knows it."""
        file.seek(self._size - len(self._end))
        found = file.read()
        rest = found.removeprefix(self._end)
        if not found.startswith(self._end) or not (rest == self._torn or self._pending.startswith(rest)):
            return None
        return 0 if rest == self._torn else len(rest)

    def _check_head(self, found: Mapping[str, Any]) -> None:
        if found.get("format") != FORMAT or found.get("version") != VERSION:
            raise fail("checkpoint", f"a file whose format is {FORMAT!r}, version {VERSION}", "another")
        if other := [name for name in _TERMS if found.get(name) != self._head[name]]:
            advice = "Continue with the same ledger, data set, component and options; or take another file."
            raise fail("checkpoint", "one of this run", f"another run's: differences in {other}", advice)


def _beside(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.arrays{number % 2}")


def _without_price(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a plan without its prices, which a later accountant may state otherwise."""
    kept = {name: value for name, value in plan.items() if name != "epsilon" or "method" not in plan}
    return {name: _without_price(value) if isinstance(value, Mapping) else value for name, value in kept.items()}


def check_paid(released: int, *, used: int, what: str) -> None:
    """Refuses a checkpoint with more releases than the share has paid for, such as one beside an older ledger."""
    if released > used:
        expected = f"at most the {used} {what} that this component has paid for on this ledger"
        raise fail("checkpoint", expected, released, "Give the component that paid, or another file.")


def _read(path: Path) -> tuple[list[tuple[dict[str, Any], str]], bytes, bytes]:
    """Returns the entries of a file with their digests, its whole lines, and its unfinished last line.

    Tools of Windows may have changed its line ends, and put a byte order mark before it.
    """
    content = b""
    with suppress(FileNotFoundError):
        content = read_plain(path, MAX_TEXT)
    *whole, torn = content.split(b"\n")
    lines: list[tuple[dict[str, Any], str]] = []
    for number, raw in enumerate(whole, start=1):
        lines.append(_parsed(f"checkpoint, line {number}", raw, lines))
    with suppress(ConfigurationError):
        lines.append(_parsed("the last line", torn, lines))
        torn = b""
    return lines, content[: len(content) - len(torn)], torn


def _parsed(what: str, raw: bytes, above: Sequence[tuple[dict[str, Any], str]]) -> tuple[dict[str, Any], str]:
    """Returns the entry of a line and its digest, behind the lines above it."""
    line = parse_json(what, raw.decode("utf-8-sig", "replace"))
    entry = line.get("entry") if isinstance(line, dict) else None
    digest = _digest(above[-1][1] if above else "", plain_json(what, entry)) if isinstance(entry, dict) else ""
    if not isinstance(line, dict) or not isinstance(entry, dict) or line.get("digest") != digest:
        raise ConfigurationError(f"{what}: expected what a run wrote there, found other content. Take another file.")
    return entry, digest


def _digest(above: str, entry: Mapping[str, Any]) -> str:
    """Returns the digest of an entry and of the lines above it."""
    text = json.dumps(entry, allow_nan=False, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(f"{above}\n{text}".encode("ascii")).hexdigest()


def _line(entry: Mapping[str, Any], digest: str) -> bytes:
    return json.dumps({"entry": entry, "digest": digest}, separators=(",", ":")).encode("ascii") + b"\n"


def _opened(path: Path) -> BinaryIO:
    flags = os.O_RDWR | (0 if path.exists() else os.O_CREAT) | getattr(os, "O_BINARY", 0)
    return os.fdopen(os.open(path, flags, 0o666), "r+b")


Item = TypeVar("Item")
Result = TypeVar("Result")
T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class RunItem:
    """One unit of work of a run and the ticket at work; holds public or released values only.

    Items that keep their tickets in another way have `done` and `busy` themselves.
    """

    ticket: Reservation | None = None
    done: bool = False
    busy: bool = False


@dataclass(slots=True)
class OneResult(RunItem, Generic[T]):
    """The one item of a run, and what was released."""

    value: T | None = None

    def keep(self, value: T) -> None:
        """Keeps what was released; called before its ticket is committed, which may fail."""
        self.value = value
        self.done = True


@dataclass(frozen=True, slots=True)
class RunCall:
    """One call of `run` or `stream`."""

    events: RunEvents
    bar: Any
    config: RunnableConfig | None

    def tick(self) -> None:
        """Moves the bar by one step; a closed terminal must not stop a paid run."""
        tick(self.bar)


class ReleaseRun(ABC, Uncopyable, Generic[Item, Result]):
    """A run: it charges tickets and releases item by item; it can be interrupted and continued.

    Formal guarantees:
      - Released values stay in the run after any error, and every error and Ctrl-C carries the run as `error.run`.
      - Calling `run` again continues with tickets that never burnt; with a checkpoint so does another process.
      - No item is made by two calls at once.

    Attributes:
      plan: what is released, and what it costs; public.
      share: the component's share of the budget; public.
    """

    _item_name: ClassVar[str] = "release"
    """What one item is called in messages."""
    _unit: ClassVar[str] = "release"
    """What the bar counts."""
    _title: ClassVar[str] = "private run"
    """Title of the bar."""
    _reports_per_call: ClassVar[bool] = False
    """Whether charges are reported once per call of `run` or `stream`, not once per item."""

    plan: Any

    def __init__(
        self,
        private: PrivateExamples,
        items: Iterable[Any],
        *,
        plan: Any,
        budget: Budget,
        share: Share,
        journal: RunJournal | None = None,
        executor: RemoteExecution | LocalExecutor | None = None,
    ) -> None:
        self.plan = plan
        self.share = share
        self._private = private
        self._items = list(items)
        self._budget = budget
        self._journal = journal
        self._elsewhere = executor if isinstance(executor, RemoteExecution) else None
        self._max_concurrency = executor.max_concurrency if isinstance(executor, LocalExecutor) else None
        self._lock = PerProcess(threading.Lock)
        self._unstored: list[Reservation] = []
        self._unseen: deque[Any] = deque()

    @property
    def component(self) -> str:
        """Name of the component in the ledger."""
        return self.share.component

    @property
    def is_finished(self) -> bool:
        """Whether everything is released."""
        return all(item.done for item in self._items)

    @property
    def result(self) -> Result:
        """Everything released so far, with its privacy report; free."""
        return self._value()

    @property
    def report(self) -> dict[str, Any]:
        """The privacy report (public); reads the ledger."""
        return report_of(self._budget, self.share, self.plan)

    def run(self, *, progress: bool | None = None, config: RunnableConfig | None = None) -> Result:
        """Releases what is missing and returns everything released.

        Args:
          progress: True shows a bar, False hides it, None shows it on a terminal only.
          config: a RunnableConfig: its callbacks hear of charges and of calls that show no private text; its
            `max_concurrency` limits the model calls in flight.

        Raises:
          RunInterruptedError: a model call failed. Released values are kept, and `error.run.run()` continues with the
            unburnt tickets. Other errors and Ctrl-C carry `run` too.
          PrivacyBudgetError: the tickets could not be reserved, or the config or the context holds another budget.
          LedgerError: the ledger cannot be read or written; nothing is granted.
        """
        for _ in self.stream(progress=progress, config=config):
            pass
        with carrying(run=self):
            return self._value()

    async def arun(self, *, progress: bool | None = None, config: RunnableConfig | None = None) -> Result:
        """Async version of `run`; the calls of one release run concurrently."""
        async for _ in self.astream(progress=progress, config=config):
            pass
        with carrying(run=self):
            return await run_in_thread(self._value, is_slow=self._is_slow)

    def stream(self, *, progress: bool | None = None, config: RunnableConfig | None = None) -> Iterator[Item]:
        """Yields each part once it and those that are written with it are released; arguments and errors as in `run`.

        Raises:
          ConfigurationError: `config` is no config, or another call works on the same item now.
        """
        check_config(config)
        with (
            carrying(run=self),
            self._events(config) as events,
            self._session(events),
            new_bar(self._steps_left(), self._unit, self._title, progress=progress) as bar,
            closing(self._made(RunCall(events, bar, config))) as made,
        ):
            for item in made:
                if item is not None:
                    self._show(bar)
                    yield from self._examples(item)
            self._check_end()

    async def astream(
        self, *, progress: bool | None = None, config: RunnableConfig | None = None
    ) -> AsyncIterator[Item]:
        """Async version of `stream`.

        Raises:
          ConfigurationError: as in `stream`.
        """
        check_config(config)
        with carrying(run=self):
            async with self._events(config) as events:
                session = ThreadedContext(self._session(events), is_slow=self._is_slow)
                async with session:
                    steps = await run_in_thread(self._steps_left, is_slow=self._is_slow)
                    with new_bar(steps, self._unit, self._title, progress=progress) as bar:
                        async with aclosing(self._amade(RunCall(events, bar, config))) as made:
                            async for item in made:
                                self._show(bar)
                                session.is_at_yield = True
                                for example in self._examples(item):
                                    yield example
                                session.is_at_yield = False
                        await run_in_thread(self._check_end, is_slow=self._is_slow)

    # -- defined by subclasses ---------------------------------------------------------------------------------------

    @abstractmethod
    def _make(self, item: Any, call: RunCall) -> EffectGenerator[None]:
        """Works on one item (an effect generator); released parts stay in the item after any error."""

    @abstractmethod
    def _examples(self, item: Any) -> Iterable[Item]:
        """Returns what `stream` yields for an item that was worked on; nothing while it is incomplete."""

    @abstractmethod
    def _value(self) -> Result:
        """Returns everything released so far; may wait for the ledger."""

    def _check_end(self) -> None:
        """Raises at the end of a run that released nothing of what it is for; `_value` never does."""

    def _give_back(self, item: Any, events: RunEvents) -> None:
        """Returns an item's unburnt tickets to the share, if they are refundable."""
        if (ticket := getattr(item, "ticket", None)) is not None:
            events.tickets -= ticket.give_back()  # an unburnt ticket only

    def _restore(self, entry: Mapping[str, Any]) -> None:
        """Restores one release from the journal, whose content is untrusted."""
        raise NotImplementedError

    def _job(self, item: Any) -> Hashable:
        """Returns the public job that makes an item on a worker."""
        raise NotImplementedError

    def _take(self, item: Any, result: Any, call: RunCall) -> None:
        """Stores a worker's result in an item, which completes it."""
        raise NotImplementedError

    def _without_tickets(self, missing: int) -> str:
        """Says why jobs found no ticket, for an interruption; "" if that is the end of the run."""
        raise tickets_missing(self.component, missing)

    @contextmanager
    def _session(self, events: RunEvents) -> Iterator[None]:  # noqa: ARG002  for subclasses that hold tickets
        """Wraps one call of `run` or `stream`; stores and commits first what an earlier call could not.

        Behind it the workers that this run started are ended, which takes seconds.
        """
        try:
            with self._lock.here:
                self._settle()
            yield
        finally:
            self._rest()

    def _groups(self, at_once: int | None) -> Iterator[list[Any]]:  # noqa: ARG002  for subclasses
        """Yields the items to work on, those of one list at once; `at_once` calls may be in flight."""
        return ([item] for item in self._open_items())

    def _open_items(self) -> Iterator[Any]:
        """Yields the items to work on, one after the other."""
        return (item for item in self._items if not item.done)

    def _steps_left(self) -> int:
        """Returns the length of the bar."""
        return sum(1 for item in self._items if not item.done)

    def _so_far(self) -> str:
        """Returns how much is released, as the start of a sentence for error messages."""
        return f"{sum(item.done for item in self._items)} of {len(self._items)} {self._item_name}s are"

    def _show(self, bar: Any) -> None:
        """Shows the state after an item on the bar."""

    def _rest(self) -> None:
        """Stops the workers that this run started."""
        if self._elsewhere is not None:
            self._elsewhere.rest()

    # -- for subclasses ----------------------------------------------------------------------------------------------

    def _resume(self) -> None:
        """Restores what the journal holds; called at the end of a subclass's constructor."""
        for entry in self._journal.entries if self._journal is not None else ():
            self._restore(entry)

    def _record(self, entry: Mapping[str, Any], *tickets: Reservation, arrays: bytes | None = None) -> None:
        """Writes a release into the journal; called before its tickets are committed.

        If that fails, the next call of `run` or `stream` writes it and commits the tickets.
        """
        if self._journal is None:
            return
        with self._lock.here:
            try:
                self._journal.append(entry, arrays=arrays)
            except BaseException:
                self._unstored += tickets
                raise

    @contextmanager
    def _committing(self, ticket: Reservation, num_kept: Callable[[], int]) -> Iterator[None]:
        """Wraps one release and its commit: where a kept release ends in an error, the next call commits the ticket."""
        before = num_kept()
        try:
            yield
        except BaseException:
            if num_kept() > before and ticket not in self._unstored:
                self._unstored.append(ticket)
            raise

    # -- inside ------------------------------------------------------------------------------------------------------

    @property
    def _is_slow(self) -> bool:
        """Whether the steps of a run may block, so that async code runs them in threads."""
        return self._budget.durable or self._journal is not None

    def _settle(self) -> None:
        if self._journal is not None and not (self.is_finished and self._journal.is_flushed):
            self._journal.flush()  # the file of a finished run may be deleted
        while self._unstored:
            if self._unstored[-1].uncommitted:  # Ctrl-C may come between the commit and the `pop`
                self._unstored[-1].commit()
            self._unstored.pop()

    def _events(self, config: RunnableConfig | None) -> RunEvents:
        resolve_budget(self._budget, config)  # refuses another budget in the config or the context
        return RunEvents(type(self).__name__, budget=self._budget, share=self.share, config=config)

    def _events_of_item(self, call: RunCall) -> RunEvents | nullcontext[RunEvents]:
        return nullcontext(call.events) if self._reports_per_call else self._events(call.config)

    def _limit(self, call: RunCall) -> int | None:
        """Returns how many model calls the config or the executor allows in flight; None: they do not say."""
        return (call.config or {}).get("max_concurrency") or self._max_concurrency

    def _made(self, call: RunCall) -> Generator[Any]:
        """Works on items and yields each; None while workers are busy."""
        return self._run_locally(call) if self._elsewhere is None else self._run_remotely(self._elsewhere, call)

    def _run_locally(self, call: RunCall) -> Generator[Any]:
        limit = self._limit(call)
        yield from self._unseen_items()
        for group in self._groups(limit):
            failure, fault, made = "", None, list[Any]()
            try:
                # Entered from the last to the first, so that their events come in the order of the items.
                with ExitStack() as stack, _limited(limit):
                    for item in reversed(group):
                        events = stack.enter_context(self._events_of_item(call))
                        stack.enter_context(self._at_work(item, events))
                        made.append(attempt(self._make(item, replace(call, events=events))))
                    failure = self._ended(group, run_sync(advance_together(made[::-1])))
            except BaseException as error:
                self._note_done(group[len(group) - len(made) :])  # not those that another call works on
                if not self._unseen or not isinstance(error, Exception):
                    raise
                fault = error
            yield from self._unseen_items()
            try:
                if fault is not None:
                    raise fault
            finally:
                fault = None  # see `_ended`
            self._check_done(failure)

    async def _amade(self, call: RunCall) -> AsyncGenerator[Any]:
        if self._elsewhere is not None:
            async with aclosing(iterate_in_threads(self._run_remotely(self._elsewhere, call))) as remote:
                async for remote_item in remote:
                    yield remote_item
            return
        is_slow, limit = self._is_slow, self._limit(call)
        for item in self._unseen_items():
            yield item
        groups = self._groups(limit)
        # The next items may be chosen by what the ledger says.
        while (group := await run_in_thread(lambda: next(groups, None), is_slow=is_slow)) is not None:
            failure, fault, made = "", None, list[Any]()
            try:
                async with AsyncExitStack() as stack:
                    for item in reversed(group):
                        events = await stack.enter_async_context(self._events_of_item(call))
                        await stack.enter_async_context(ThreadedContext(self._at_work(item, events), is_slow=is_slow))
                        made.append(attempt(self._make(item, replace(call, events=events))))
                    with _limited(limit):
                        failure = self._ended(group, await run_async(advance_together(made[::-1]), is_slow=is_slow))
            except BaseException as error:
                self._note_done(group[len(group) - len(made) :])  # not those that another call works on
                if not self._unseen or not isinstance(error, Exception):
                    raise
                fault = error
            for item in self._unseen_items():
                yield item
            try:
                if fault is not None:
                    raise fault
            finally:
                fault = None  # see `_ended`
            self._check_done(failure)

    def _ended(self, group: Sequence[Any], outcomes: Sequence[Outcome]) -> str:
        """Notes the items that ended well; raises the first error, or returns the first failed call's message."""
        for item, outcome in zip(group, outcomes, strict=True):
            if outcome.error is None and not outcome.value[1]:
                self._unseen.append(item)
        try:
            for outcome in outcomes:
                if outcome.error is not None:
                    raise outcome.error
            return next((outcome.value[1] for outcome in outcomes if outcome.value[1]), "")
        finally:
            del outcome, outcomes  # breaks a cycle: the frames of their errors hold this one

    def _note_done(self, group: Sequence[Any]) -> None:
        """Notes what ended well beside an error or a stop; after a stop the next call yields it."""
        self._unseen += [item for item in group if item.done and all(item is not one for one in self._unseen)]

    def _unseen_items(self) -> Iterator[Any]:
        """Yields the items that ended and were not yielded, also by an earlier call that was closed between two."""
        while self._unseen:
            yield self._unseen.popleft()

    def _run_remotely(
        self, elsewhere: RemoteExecution, call: RunCall, wanted: Iterable[Any] | None = None
    ) -> Generator[Any]:
        """Has workers make the wanted or all open items; stores every result before it raises for the missing ones."""
        items = {self._job(item): item for item in (self._open_items() if wanted is None else wanted)}
        faults: list[DPICLError] = []
        missing = 0
        with ExitStack() as stack, self._events(call.config) as events:
            # All items are marked busy at once, because a job may finish in any order.
            for item in items.values():
                stack.enter_context(self._at_work(item, events))
            try:
                for one in elsewhere.executor.spread(elsewhere.work, list(items)):
                    if one is None:
                        yield None
                        continue
                    job, answer = one
                    events.tickets += answer.tickets
                    if answer.kind == "done":
                        self._take(items[job], answer.result, call)
                        yield items[job]
                    elif answer.kind == "lost":
                        missing += 1
                    else:
                        faults.append(answer.as_error())
            except ModelCallError as error:
                faults.append(error)
            # A refusal of the budget or a configuration error stops the run; failed model calls are an interruption.
            refusal = next((fault for fault in faults if not isinstance(fault, ModelCallError)), None)
            if refusal is not None:
                raise refusal
            failure = self._without_tickets(missing) if missing and not faults else ""
        self._check_done(str(faults[0]) if faults else failure)

    @contextmanager
    def _at_work(self, item: Any, events: RunEvents) -> Iterator[None]:
        """Marks an item as busy, and returns its unburnt tickets at the end."""
        with self._lock.here:
            # Two runs of one item would burn tickets for the same release twice.
            if item.busy:
                msg = f"{type(self).__name__}: expected no other run of this component's object, found one."
                raise ConfigurationError(f"{msg} Wait for its end; in a forked child, build the component anew.")
            item.busy = True
        try:
            yield
        finally:
            try:
                self._give_back(item, events)
            finally:
                item.busy = False

    def _check_done(self, failure: str) -> None:
        """Raises for an interruption, outside `except`, so that the error has no cause that could hold private text."""
        if failure:
            msg = (
                f"{type(self).__name__} stopped: {failure.rstrip('.')}. {self._so_far()} released and kept; tickets "
                "that burnt stay charged. Call run() on error.run to continue."
            )
            raise RunInterruptedError(msg, run=self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(component={self.component!r}, plan={self.plan!r})"


def _limited(limit: int | None) -> AbstractContextManager[None]:
    """Limits the calls in flight; None: to what holds already."""
    return nullcontext() if limit is None else limit_concurrency(limit)


def attempt(walk: EffectGenerator[T]) -> EffectGenerator[tuple[T | None, str]]:
    """Runs a walk (an effect generator); returns its result, or the message of a failed model call.

    The caller raises its own error outside `except`, so that the error has no context that could hold private text.
    """
    try:
        return (yield from walk), ""
    except ModelCallError as error:
        return None, str(error)


def report_of(budget: Budget, share: Share, plan: SharePlan, **shown: Any) -> dict[str, Any]:
    """Returns the public privacy report of a share's release; `shown` stands before the budget's own report.

    In an outage it is of the ledger as this process read it last: what is paid for must not be lost.
    """
    try:
        inner = budget.report().to_dict()
    except LedgerUnavailableError:
        said = "%s: the ledger is out of reach: the report is of the ledger as it was read last. Save it again later."
        logger.warning(said, share.component)  # a warning that is made an error would lose what is paid for
        inner = budget._last_report(share.component).to_dict()  # noqa: SLF001  others get a report that is read anew
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
        "plan": as_declared(plan.to_dict(), inner, share.component),
        **reads_of(budget, share),
        **shown,
        "budget": inner,
    }


def as_declared(plan: Mapping[str, Any], report: Mapping[str, Any], component: str) -> dict[str, Any]:
    """Returns a plan as the component shows it in the budget's `report`: at the price at which it was sealed."""
    declared = (one for each in report["shares"] for one in each["components"])
    return as_shown(plan, next((one["public"] for one in declared if one["name"] == component), plan))


def reads_of(budget: Budget, share: Share) -> dict[str, Any]:
    """Returns the blocks that a run on a stream reads, by number and by name; nothing of another share."""
    terms = StreamTerms.parse(budget.per)
    if terms is None or not isinstance(share, RunShare):
        return {}
    return {"reads": reads_claims(terms, share.blocks)}


@contextmanager
def new_bar(total: int, unit: str, words: str, *, progress: bool | None) -> Iterator[Any]:
    """Shows a progress bar; `progress` None: on a terminal only, unless TQDM_DISABLE is set.

    A process without stderr, such as a service of Windows, or with a closed one shows none.
    """
    is_off = bool(os.environ.get("TQDM_DISABLE")) or None if progress is None else not progress
    is_shown = sys.stderr is not None and not getattr(sys.stderr, "closed", False)
    how: dict[str, Any] = {"file": _Terminal(sys.stderr), "dynamic_ncols": True, "leave": False}
    with tqdm(total=total, unit=unit, desc=words, disable=is_off if is_shown else True, **how) as bar:
        yield bar


class _Terminal:
    """The stderr of a bar, which takes nothing any more once it is gone: an error would leave tqdm's lock held."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __eq__(self, other: object) -> bool:  # tqdm looks so for the bars to clear before a line of a log
        return self._stream is getattr(other, "_stream", other)

    def __hash__(self) -> int:
        return hash(self._stream)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def fileno(self) -> int:
        """Returns the number by which tqdm asks for the size; of 0 x 0, as containers may say, it shows no bar.

        Raises:
          OSError: no size is known; tqdm then takes its usual width.
        """
        number = int(self._stream.fileno())
        if 0 in os.get_terminal_size(number):
            raise OSError("a terminal without a size")
        return number

    def write(self, text: str) -> None:
        with suppress(OSError, ValueError):
            self._stream.write(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()


def tick(bar: Any) -> None:
    """Moves a bar by one step; a closed terminal must not stop a paid run."""
    with suppress(OSError, ValueError):
        bar.update()


@contextmanager
def carrying(**owner: object) -> Iterator[None]:
    """Sets attributes, such as `run=`, on an error that ends the block, so that no release is lost with it."""
    try:
        yield
    except BaseException as error:
        # Exceptions with slots take no attributes; the error itself matters more.
        with suppress(AttributeError, TypeError):
            for name, value in owner.items():
                setattr(error, name, value)
        raise
