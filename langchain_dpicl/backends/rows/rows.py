"""Scores one batch of private prompts so that a fault stays in its row, and rows over the whole vocabulary."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl._opaque import OpaqueRows, run_guarded
from langchain_dpicl.backends.base import (
    FullBackend,
    FullSession,
    GroupBackend,
    NextTokenBackend,
    ReportSession,
    Rows,
    Token,
    TokenSession,
)
from langchain_dpicl.backends.sync_async import (
    Effect,
    EffectGenerator,
    PublicAnswer,
    TopTokenRequest,
    apublic_call,
    arun_guarded,
    bare,
    cancel_to_completion,
    is_in_loop,
    public_call,
    public_failure,
    start_calls,
    start_thread,
    stopping_calls,
)
from langchain_dpicl.exceptions import ConfigurationError, DPICLError, ModelCallError


@dataclass(slots=True, repr=False, eq=False)
class RowSource:
    """Scores rows through one session; if an engine raises, row by row, so that a fault stays in its own row."""

    backend: NextTokenBackend
    prompts: tuple[str | None, ...]
    prefix: list[Token]
    session: TokenSession | None = field(default=None)

    def score(self, domain: tuple[Token, ...]) -> OpaqueRows:
        """Returns float64[prompts, d], boxed; a row that abstains or failed is zeros."""
        start_calls(self.backend)
        if not self._live():
            return self._spread(None, domain)
        return self._spread(run_guarded(lambda: self._open().score(domain)), domain)

    async def ascore(self, domain: tuple[Token, ...]) -> OpaqueRows:
        """Async twin of `score`."""
        if not self._live():
            return self._spread(None, domain)
        return self._spread(await arun_guarded(lambda: self._open().ascore(domain)), domain)

    def report(self) -> OpaqueRows:
        """Returns the replies of a session that asks before the candidates are known, boxed; None: there are none."""
        start_calls(self.backend)
        return OpaqueRows(run_guarded(lambda: self._reporting().report()) if self._live() else None)

    async def areport(self) -> OpaqueRows:
        """Async twin of `report`."""
        return OpaqueRows(await arun_guarded(lambda: self._reporting().areport()) if self._live() else None)

    def read_report(self, boxed: OpaqueRows, domain: tuple[Token, ...]) -> OpaqueRows | None:
        """Returns what `score` returns, from replies; None: they cannot be read, and the rows have to be scored."""
        live, found = self._live(), boxed.take()
        scored = run_guarded(lambda: self._reporting().read(found, domain)) if live else None
        return self._spread(scored, domain) if not live or fits(scored, len(live), len(domain)) else None

    def _reporting(self) -> ReportSession:
        session = self._open()
        if not isinstance(session, ReportSession):
            raise ConfigurationError("session: expected one that asks before the candidates are known, found another.")
        return session

    def push(self, token: Token) -> None:
        """Appends one released token to every row; a failed session is opened again for the next score."""
        self.prefix.append(token)
        if self.session is not None and run_guarded(partial(_pushed, self.session, token)) is None:
            self.session = None

    def close(self) -> None:
        """Drops prompts and caches."""
        session, self.session, self.prompts = self.session, None, ()
        if session is not None:
            run_guarded(session.close)

    def _live(self) -> tuple[int, ...]:
        return tuple(i for i, prompt in enumerate(self.prompts) if prompt is not None)

    def _open(self) -> TokenSession:
        if self.session is None:
            texts = [prompt for prompt in self.prompts if prompt is not None]
            self.session = self.backend.open(texts, tuple(self.prefix))
        return self.session

    def _spread(self, scored: Rows | None, domain: tuple[Token, ...]) -> OpaqueRows:
        """Puts scored rows into their places; without usable ones, scores row by row."""
        live, width = self._live(), len(domain)
        out = np.zeros((len(self.prompts), width))
        if fits(scored, len(live), width):
            out[list(live)] = scored
        else:
            for row in live:
                one = run_guarded(lambda row=row: self._score_one(row, domain))  # type: ignore[misc]
                out[row] = one[0] if one is not None and fits(one, 1, width) else 0.0
        return OpaqueRows(out)

    def _score_one(self, row: int, domain: tuple[Token, ...]) -> Rows:
        session = self.backend.open([self.prompts[row] or ""], tuple(self.prefix))
        with contextlib.closing(session):
            return session.score(domain)


def _pushed(session: TokenSession | FullSession, token: Token) -> bool:
    session.push(token)
    return True


def restrict(rows: Rows) -> Rows:
    """Returns each row divided by its own mass on the domain (Tang et al. 2023, Algorithm 1); empty rows stay zero."""
    # A caller's numpy error state must not turn a record's odd number into an exception.
    with np.errstate(all="ignore"):
        clean = np.clip(np.nan_to_num(rows, nan=0.0, posinf=0.0, neginf=0.0), 0.0, 1.0)
        mass = clean.sum(axis=1, keepdims=True)
        shares: Rows = np.divide(clean, mass, out=np.zeros_like(clean), where=mass > 0)
    return shares


def fits(rows: Rows | None, num_rows: int, width: int) -> TypeGuard[Rows]:
    """Whether an engine's answer has the requested type and shape."""
    return isinstance(rows, np.ndarray) and rows.shape == (num_rows, width) and rows.dtype.kind == "f"


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class PublicRowRequest:
    """Computes the public logits float64[V]; a failure is an error."""

    source: FullRowSource

    def run(self) -> NDArray[np.float64]:
        """Runs, blocking."""
        return self.source.public()

    async def arun(self) -> NDArray[np.float64]:
        """Runs, awaiting."""
        return await self.source.apublic()


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class LogitRequest:
    """Computes the private logits of one release, for the aggregation alone."""

    source: FullRowSource
    columns: NDArray[np.int64]

    def run(self) -> OpaqueRows:
        """Runs, blocking."""
        return self.source.logits(self.columns)

    async def arun(self) -> OpaqueRows:
        """Runs, awaiting."""
        return await self.source.alogits(self.columns)


@dataclass(frozen=True, slots=True)
class PublicRowContext:
    """The public facts of a session with a public row.

    Attributes:
      prompt: the public prompt.
      shared: text that all prompts start with.
      num_rows: number of private rows where it is public, None where it is secret.
      max_new_tokens: most tokens that will be pushed.
    """

    prompt: str
    shared: str = ""
    num_rows: int | None = None
    max_new_tokens: int | None = None


@dataclass(slots=True, repr=False, eq=False)
class FullRowSource:
    """Scores rows over the whole vocabulary beside the public one; if an engine raises, row by row."""

    backend: FullBackend
    prompts: tuple[str | None, ...]
    prefix: list[Token]
    side: PublicRowContext
    session: FullSession | None = field(default=None)

    def public(self) -> NDArray[np.float64]:
        """Returns the public logits float64[V]."""
        # The traceback of a stop or fault would show prompts: both are raised again from here.
        return _answer(run_guarded(self._public))

    async def apublic(self) -> NDArray[np.float64]:
        """Async twin of `public`."""
        return _answer(await arun_guarded(self._apublic))

    def _public(self) -> NDArray[np.float64] | DPICLError:
        try:
            return public_call(lambda: self._open().public())
        except DPICLError as error:
            return bare(error)

    async def _apublic(self) -> NDArray[np.float64] | DPICLError:
        try:
            return await apublic_call(lambda: self._open().apublic())
        except DPICLError as error:
            return bare(error)

    def begun(self) -> FullSession | None:
        """Returns the session, opened; None if that fails, which the next request says."""
        return run_guarded(self._open)

    def logits(self, columns: NDArray[np.int64]) -> OpaqueRows:
        """Returns float64[prompts, d], boxed; a row that abstains or failed is NaN."""
        return self._boxed(run_guarded(lambda: self._open().logits(columns)), columns)

    async def alogits(self, columns: NDArray[np.int64]) -> OpaqueRows:
        """Async twin of `logits`."""
        return self._boxed(await arun_guarded(lambda: self._open().alogits(columns)), columns)

    def push(self, token: Token) -> None:
        """Appends one released token to every row; a failed session is opened again for the next request."""
        self.prefix.append(token)
        if self.session is not None and run_guarded(partial(_pushed, self.session, token)) is None:
            self._drop()

    def close(self) -> None:
        """Drops prompts and caches."""
        self.prompts = ()
        self._drop()

    def _drop(self) -> None:
        session, self.session = self.session, None
        if session is not None:
            run_guarded(session.close)

    def _open(self) -> FullSession:
        if self.session is None:
            self.session = self._opened(self.prompts, self.side.num_rows)
        return self.session

    def _opened(self, prompts: tuple[str | None, ...], num_rows: int | None) -> FullSession:
        return self.backend.open_full(
            prompts,
            tuple(self.prefix),
            public=self.side.prompt,
            num_rows=num_rows,
            shared=self.side.shared,
            max_new_tokens=self.side.max_new_tokens,
        )

    def _boxed(self, scored: Rows | None, columns: NDArray[np.int64]) -> OpaqueRows:
        width = len(columns)
        if fits(scored, len(self.prompts), width):
            # In one memory layout, so that sums along a row do not depend on how many rows there are.
            return OpaqueRows(np.ascontiguousarray(scored))
        out = np.full((len(self.prompts), width), np.nan)
        for row in range(len(self.prompts)):
            one = run_guarded(lambda row=row: self._score_one(row, columns))  # type: ignore[misc]
            if fits(one, 1, width):
                out[row] = one[0]
        return OpaqueRows(out)

    def _score_one(self, row: int, columns: NDArray[np.int64]) -> Rows:
        """Scores a row alone, at its place and in the shape of the batch, so that its bits stay the same."""
        place, alone = 0, self.prompts[row : row + 1]
        if self.side.num_rows is not None:
            place, alone = row, tuple(prompt if i == row else None for i, prompt in enumerate(self.prompts))
        with contextlib.closing(self._opened(alone, self.side.num_rows)) as session:
            return session.logits(columns)[place : place + 1]


def join_texts(effects: Sequence[object]) -> bool:
    """Lets sessions of texts that ask at once share a batch; returns whether all effects ask one such engine."""
    requests = [effect for effect in effects if isinstance(effect, PublicRowRequest | LogitRequest)]
    backends = {id(request.source.backend): request.source.backend for request in requests}
    for key, backend in backends.items():
        sources = [request.source for request in requests if id(request.source.backend) == key]
        if isinstance(backend, GroupBackend) and len(sources) > 1:
            sessions = [session for source in sources if (session := source.begun()) is not None]
            run_guarded(lambda backend=backend, sessions=sessions: backend.join(sessions))  # type: ignore[misc]
    is_joined = all(isinstance(backend, GroupBackend) for backend in backends.values())
    return is_joined and len(requests) == len(effects) and len(backends) == 1


def _answer(outcome: NDArray[np.float64] | DPICLError | None) -> NDArray[np.float64]:
    """Returns public logits, or raises the error that replaces them."""
    if outcome is None:
        raise public_failure("a panic")
    if isinstance(outcome, DPICLError):
        raise outcome
    if not bool((outcome < np.inf).all() and np.isfinite(outcome).any()):  # a NaN is below nothing
        raise ModelCallError(
            "the model gave no numbers for the public prompt: expected logits, -inf for tokens that cannot follow, "
            "found NaN, +inf, or -inf alone; check the model on the public prompt, or load it in another dtype"
        )
    return outcome


def log_rows(rows: Rows) -> Rows:
    """Returns the logits of probability rows; a row without mass, which has failed, is NaN."""
    with np.errstate(all="ignore"):
        logits: Rows = np.log(rows)
        logits[~(rows.sum(axis=1) > 0)] = np.nan
    return logits


def softmax_rows(logits: Rows) -> Rows:
    """Returns each row's probabilities on the domain; a row with a NaN, which has failed, is zeros."""
    with np.errstate(all="ignore"):
        weights = np.exp(logits - logits.max(axis=1, keepdims=True, initial=-np.inf))
        shares: Rows = weights / weights.sum(axis=1, keepdims=True)
        shares[~np.isfinite(shares).all(axis=1)] = 0.0
    return shares


_PUBLIC = (PublicAnswer, TopTokenRequest)
"""Effects that ask public questions alone; they may raise, so no private call may be in flight beside them."""


@dataclass(slots=True, repr=False, eq=False)
class Outcome:
    """What an effect or a computation returned, or the error that ended it."""

    value: Any = None
    error: BaseException | None = None

    def drop(self) -> None:
        """Forgets both: the value may be a box of private rows."""
        self.value = self.error = None


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Together:
    """Runs effects at once; the answer is a list of `Outcome`, in their order.

    Formal guarantees:
      - An error of one effect ends no other one, and is its outcome. Ctrl-C and a cancellation end all: awaited calls
        are cancelled, and threads begin no further call.
      - Public questions that go alone are asked before the others, and all private calls begin after they ended.
    """

    effects: tuple[Effect, ...]

    def run(self) -> list[Outcome]:
        """Runs, blocking; each effect in a thread, but one after the other inside a running event loop."""
        outcomes = [Outcome() for _ in self.effects]
        try:
            for places in self._parts():
                self._run(places, outcomes)
        except BaseException:
            _drop(outcomes)
            raise
        return outcomes

    async def arun(self) -> list[Outcome]:
        """Runs, awaiting."""
        outcomes = [Outcome() for _ in self.effects]
        try:
            for places in self._parts():
                await self._arun(places, outcomes)
        except BaseException:
            _drop(outcomes)
            raise
        return outcomes

    def _parts(self) -> list[list[int]]:
        """Returns the places of public questions that go alone, then those of all other effects."""
        alone = [place for place, effect in enumerate(self.effects) if isinstance(effect, _PUBLIC)]
        return [part for part in (alone, [i for i in range(len(self.effects)) if i not in alone]) if part]

    def _run(self, places: Sequence[int], outcomes: list[Outcome]) -> None:
        lock, left = threading.Lock(), threading.Event()

        def one(place: int) -> None:
            found = Outcome()
            try:
                found.value = self.effects[place].run()
            except BaseException as error:  # noqa: BLE001  raised by `_check_stop`, or the outcome
                found.error = error
            with lock:
                # After a stop nothing takes the rows any more, and frames of the error hold the outcomes.
                if not left.is_set():
                    outcomes[place].value, outcomes[place].error = found.value, found.error
            found.drop()

        # The texts of a local engine share a batch, whose step the first of them makes. Inside a running loop, which is
        # stopped here, a thread might wait for one of its calls.
        if join_texts([self.effects[place] for place in places]) or is_in_loop():
            for place in places:
                one(place)
                _check_stop(outcomes)
            return
        with stopping_calls():
            try:
                threads = {place: start_thread(partial(one, place), name="dpicl-together") for place in places[1:]}
                for place in [places[0], *(place for place, thread in threads.items() if thread is None)]:
                    one(place)
                    _check_stop(outcomes)
                for thread in threads.values():
                    if thread is not None:
                        thread.join()
                _check_stop(outcomes)
            except BaseException:
                with lock:
                    left.set()
                raise

    async def _arun(self, places: Sequence[int], outcomes: list[Outcome]) -> None:
        async def one(place: int) -> None:
            try:
                outcomes[place].value = await self.effects[place].arun()
            except Exception as error:  # noqa: BLE001  the outcome
                outcomes[place].error = error

        if join_texts([self.effects[place] for place in places]):
            for place in places:
                await one(place)
            return
        tasks = [asyncio.ensure_future(one(place)) for place in places]
        try:
            await asyncio.wait(tasks)
        except asyncio.CancelledError:
            await cancel_to_completion(tasks)
            raise
        finally:
            for task in tasks:
                task.cancel()  # a coroutine that is closed can await nothing
        for place, task in zip(places, tasks, strict=True):
            if task.cancelled():  # by the client itself, which is a failed call
                outcomes[place].error = public_failure("CancelledError")
            else:
                task.result()


def advance_together(walks: Sequence[EffectGenerator[Any]]) -> EffectGenerator[list[Outcome]]:
    """Runs effect generators to their ends, in waves (an effect generator); an error ends one of them and no other.

    Their own steps run one after the other. A stop, such as Ctrl-C, closes them all.
    """
    if len(walks) == 1:
        return [Outcome((yield from walks[0]))]
    outcomes = [Outcome() for _ in walks]
    replies = dict(enumerate(Outcome() for _ in walks))
    live = dict(enumerate(walks))
    try:
        while live:
            asked: dict[int, Effect] = {}
            for place, walk in list(live.items()):
                reply = replies[place]
                try:
                    asked[place] = walk.send(reply.value) if reply.error is None else walk.throw(reply.error)
                except StopIteration as end:
                    outcomes[place].value = end.value
                    del live[place]
                except Exception as error:  # noqa: BLE001  the outcome
                    outcomes[place].error = error
                    del live[place]
                finally:
                    reply.drop()
            if asked:
                found = yield Together(tuple(asked.values()))
                replies = dict(zip(asked, found, strict=True))
    finally:
        _drop(list(replies.values()))
        with ExitStack() as stack:
            for walk in live.values():
                stack.callback(walk.close)
    try:
        return outcomes
    finally:
        del outcomes  # breaks a cycle: the frames of their errors hold this one


def _drop(outcomes: Sequence[Outcome]) -> None:
    for outcome in outcomes:
        outcome.drop()


def _check_stop(outcomes: Sequence[Outcome]) -> None:
    """Raises what has to stop everything."""
    for outcome in outcomes:
        if outcome.error is not None and not isinstance(outcome.error, Exception):
            raise outcome.error
