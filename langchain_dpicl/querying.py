"""The base of Runnables that answer queries from private examples: one query, one ticket.

Knows who asks, what was told before and what to do when the budget is spent; how an answer is released, the subclasses
say. Never sees a record, a row or a sum.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, Self, TypeAlias, TypeVar

from langchain_core.runnables import ConfigurableFieldSpec, RunnableConfig
from pydantic import Field, create_model
from tqdm.auto import tqdm
from typing_extensions import override

from langchain_dpicl._query_memo import AnswerMemo
from langchain_dpicl._query_plan import QUERY_TEMPLATE
from langchain_dpicl.asking import Query
from langchain_dpicl.backends.walk import Ask, AtMost, Turn, Walk, adrive, drive
from langchain_dpicl.callbacks import shown_left
from langchain_dpicl.exceptions import LedgerError, PrivacyBudgetExceededError, TenantCapExceededError
from langchain_dpicl.privacy._validate import check_int, fail
from langchain_dpicl.privacy.ledger import Reservation
from langchain_dpicl.receipts import Receipt, Source
from langchain_dpicl.run_events import REFUSED, arecord_event, record_event
from langchain_dpicl.runnables import ChargingRunnable, Pay
from langchain_dpicl.tenants import SPECS, Tenant

RELEASE = "dpicl.release"
"""Name of the event: an answer was given, with its receipt."""

T = TypeVar("T")
Exhausted: TypeAlias = Literal["raise", "zero_shot"]
_BAR: ContextVar[Any] = ContextVar("dpicl_query_bar", default=None)


@dataclass(slots=True)
class Tell:
    """Tells the run's observers of an event, on the way of a walk."""

    name: str
    data: Callable[[], Mapping[str, Any]]
    config: RunnableConfig
    is_slow: bool

    def run(self) -> None:
        """Tells, blocking."""
        record_event(self.name, self.data, self.config)

    async def arun(self) -> None:
        """Tells, awaiting."""
        await arecord_event(self.name, self.data, self.config, is_slow=self.is_slow)


class QueryRunnable(ChargingRunnable[Any, Any]):
    """Base of Runnables that answer queries from private examples.

    Formal guarantees:
      - Every answer takes exactly one ticket, which burns before a private record is read, or none: where the same
        tenant was told the answer before, or where the budget is spent and the answer is zero-shot.
      - With a `memo` that outlives the process, the answer stands in it before it is told and before its ticket is
        committed. A kill at any moment loses at most the ticket; an answer that stands is never charged again.
      - The public model is asked before the ticket is reserved, so an outage costs nothing.
      - Tenants and their caps only ever refuse; the share of the data set is the ledger's.

    Subclasses say how an answer is prepared, released and shown.
    """

    wording: Any = Field(exclude=True, repr=False)
    """How prompts read: a `TaskWording`. Public."""

    plan: Any = Field(exclude=True, repr=False)
    """What one answer is and what all of them cost: a `QueryPlan`. Public."""

    tenants: Any = Field(exclude=True, repr=False)
    """Caps and memos by tenant; shared by all copies."""

    memo: AnswerMemo | None = Field(default=None, exclude=True, repr=False)
    """Answers that outlive the process; None: those of `tenants` alone."""

    on_exhausted: Exhausted = "raise"
    """What follows when the budget, or the tenant's cap, is spent."""

    with_receipt: bool = False
    """Whether answers are typed results with a receipt."""

    max_query_chars: int | None = None
    """Characters of all of a query's variables together; None: the cap of a record's text, `private.max_chars`."""

    progress: bool | None = None
    """Whether batches show a bar; None: on a terminal."""

    CONFIGURABLE: ClassVar[frozenset[str]] = frozenset({"on_exhausted", "progress", "with_receipt"})
    """Fields that `configurable_fields` may name: those that no price, no row and no payer rests on."""

    @abstractmethod
    def _prepared(self, query: Query, config: RunnableConfig) -> Walk[Any]:
        """Asks what may be asked in public before a ticket is taken; a failed call raises ModelCallError."""

    @abstractmethod
    def _released(
        self, query: Query, prepared: Any, ticket: Reservation, config: RunnableConfig, keep: Callable[[Any], None]
    ) -> Walk[Any]:
        """Makes the one release that `ticket` pays for; what follows is given to `keep` before the ticket's commit."""

    def _open(self, pay: Pay) -> None:
        """Pays for what all answers rest on together, where that is not paid yet; nothing, where each has its own."""

    @abstractmethod
    def _zero_shot(self, query: Query, prepared: Any, config: RunnableConfig) -> Walk[Any]:
        """Answers without private records."""

    @abstractmethod
    def _shown(self, outcome: Any, receipt: Receipt | None) -> Any:
        """Returns what the caller gets: plain, or a typed result where there is a receipt."""

    @property
    def config_specs(self) -> list[ConfigurableFieldSpec]:
        """What `config["configurable"]` may hold."""
        return list(SPECS)

    @property
    @override
    def InputType(self) -> Any:
        names = self.wording.input_variables
        fields: dict[str, Any] = dict.fromkeys(names, (Any, ...))
        return str | dict[str, Any] if len(names) == 1 else create_model("Query", **fields)

    def tool_defaults(self) -> dict[str, Any]:
        """Returns what a tool made of this, or of anything around it, takes and says unless told otherwise."""
        fields: dict[str, Any] = dict.fromkeys(self.wording.input_variables, (str, ...))
        return {"args_schema": create_model("Query", **fields), "description": self._purpose}

    @property
    def _purpose(self) -> str:
        """What a tool says it does."""
        return "Answers a question from private examples, under differential privacy."

    @override
    def configurable_fields(self, **kwargs: Any) -> Any:
        """Is LangChain's `configurable_fields`, for fields that no price, no row and no payer rests on.

        Raises:
          ConfigurationError: another field was named.
        """
        if fixed := sorted(set(kwargs) - self.CONFIGURABLE):
            raise fail("configurable_fields", f"fields among {sorted(self.CONFIGURABLE)}", fixed, "Leave them fixed.")
        return super().configurable_fields(**kwargs)

    @override
    def batch(
        self, inputs: list[Any], config: Any = None, *, return_exceptions: bool = False, **kwargs: Any | None
    ) -> list[Any]:
        with self._bar(len(inputs)):
            return super().batch(inputs, config, return_exceptions=return_exceptions, **kwargs)

    @override
    async def abatch(
        self, inputs: list[Any], config: Any = None, *, return_exceptions: bool = False, **kwargs: Any | None
    ) -> list[Any]:
        with self._bar(len(inputs)):
            return await super().abatch(inputs, config, return_exceptions=return_exceptions, **kwargs)

    @override
    def _answer(self, given: Any, pay: Pay, config: RunnableConfig, **kwargs: Any) -> Any:
        return drive(self._walk(given, pay, config, kwargs))

    @override
    async def _aanswer(self, given: Any, pay: Pay, config: RunnableConfig, **kwargs: Any) -> Any:
        return await adrive(self._walk(given, pay, config, kwargs), is_slow=self._is_slow)

    def _walk(self, given: Any, pay: Pay, config: RunnableConfig, kwargs: Mapping[str, Any]) -> Walk[Any]:
        if kwargs:
            raise fail("invoke", "no further arguments", sorted(kwargs))
        query = self.wording.query(given)
        self._check_length(query)
        tenant = self.tenants.of(config)
        _calls_at_once(config)
        try:
            with self.tenants.turn(tenant, query) as gate:
                held = False if gate is None else (yield Turn(gate))
                try:
                    return (yield from self._in_turn(tenant, query, pay, config))
                finally:
                    if held and gate is not None:
                        gate.__exit__(None, None, None)
        finally:
            self._tick()

    def _check_length(self, query: Query) -> None:
        """Refuses a long query before a model is asked, as every row would carry it."""
        most = self.private.max_chars if self.max_query_chars is None else self.max_query_chars
        if (found := sum(map(len, query))) > most:
            raise fail("input", f"at most {most:,} characters", found, "Shorten the query, or raise max_query_chars.")

    def _in_turn(self, tenant: Tenant, query: Query, pay: Pay, config: RunnableConfig) -> Walk[Any]:
        """Answers when no other process is answering the same; without a memo none is known (a walk)."""
        if self.memo is None:
            return (yield from self._answered(tenant, query, pay, config))
        holder = yield from self.memo.turn(tenant, lambda: self._settled(tenant, query), query)
        try:
            return (yield from self._answered(tenant, query, pay, config))
        finally:
            if holder is not None:
                self.memo.leave(tenant, query, holder)

    def _answered(self, tenant: Tenant, query: Query, pay: Pay, config: RunnableConfig) -> Walk[Any]:
        """Answers one query of one tenant, whoever else asks (a walk)."""
        if (told := self._recalled(tenant, query)) is not None:
            outcome = yield from self._finished(tenant, query, told, config)
            return (yield from self._told(outcome, "memo", None, config))
        self._refuse_early(tenant, pay)
        prepared = yield from self._prepared(query, config)
        is_opening = False
        try:
            with self.tenants.seat(tenant) as seat:
                seat.charged = False
                with pay(QUERY_TEMPLATE, tenant=tenant.known_as, tenant_cap=tenant.cap) as ticket:
                    seat.charged = True  # until it is known that the ticket did not burn
                    try:
                        keep = partial(self._keep, tenant, query)
                        is_opening = True
                        self._open(pay)
                        is_opening = False
                        outcome = yield from self._released(query, prepared, ticket, config, keep)
                    finally:
                        seat.charged = not ticket.unburnt
        except PrivacyBudgetExceededError as error:
            if is_opening:
                raise  # what all answers rest on is gone, which zero-shot answers would hide
            if self.on_exhausted != "zero_shot":
                self._explain(error)
                raise
            refusal = {"error": type(error).__name__, "requested": error.requested, "remaining": error.remaining}
        else:
            outcome = yield from self._finished(tenant, query, outcome, config)
            return (yield from self._told(outcome, "release", ticket, config))
        yield Tell(REFUSED, lambda: self._refusal(refusal), config, is_slow=False)
        outcome = yield from self._zero_shot(query, prepared, config)
        return (yield from self._told(outcome, "zero-shot", None, config))

    def _refuse_early(self, tenant: Tenant, pay: Pay) -> None:
        """Refuses what would be refused after the public calls, before they cost anything."""
        if self.on_exhausted == "raise":
            self.tenants.refuse_beyond_cap(tenant)
            if tenant.cap is not None and self.share.used_by(tenant.name) >= tenant.cap:
                self._refuse(tenant, pay)
            if not self.share.remaining(QUERY_TEMPLATE):
                self._refuse(tenant, pay)

    def _refuse(self, tenant: Tenant, pay: Pay) -> None:
        """Lets the ledger refuse; a ticket that came back meanwhile goes back again."""
        try:
            with pay(QUERY_TEMPLATE, tenant=tenant.known_as, tenant_cap=tenant.cap):
                pass
        except PrivacyBudgetExceededError as error:
            self._explain(error)
            raise

    def _explain(self, error: PrivacyBudgetExceededError) -> None:
        """Adds to a refusal what the share paid for, and what else could be done."""
        if isinstance(error, TenantCapExceededError):
            return  # it says what to do: the share has nothing to do with it
        spent = f"Its {self.plan.max_queries} queries cost epsilon {self.share.epsilon:.4g} at {self.share.delta:.4g}"
        advice = "Build another component for more, or take on_exhausted='zero_shot'."
        error.args = (f"{error.args[0]} {spent.replace(' at ', ' at delta ')} together. {advice}",)

    def _recalled(self, tenant: Tenant, query: Query) -> Any:
        """Returns what was released to the tenant for this query before, or None."""
        told = self.tenants.recall(tenant, query)
        if told is None and self.memo is not None:
            told = self.memo.recall(tenant, query)
            if told is not None and self._is_whole(told):
                self.tenants.remember(tenant, query, told)
        return told

    def _settled(self, tenant: Tenant, query: Query) -> Any:
        """Returns what can be told as it is, or None: then it takes a turn."""
        told = self._recalled(tenant, query)
        return told if told is not None and self._is_whole(told) else None

    def _is_whole(self, outcome: Any) -> bool:  # noqa: ARG002  for those whose outcomes are completed later
        return True

    def _keep(self, tenant: Tenant, query: Query, outcome: Any, *, instead_of: Any = None) -> None:
        """Makes what was released outlive the process, where there is a memo for that."""
        if self.memo is not None:
            self.memo.keep(tenant, query, outcome, instead_of=instead_of)

    def _finished(self, tenant: Tenant, query: Query, outcome: Any, config: RunnableConfig) -> Walk[Any]:
        """Makes of what was released what is told, after the ticket is settled, and remembers it."""
        del config  # for those who ask something more
        self.tenants.remember(tenant, query, outcome)
        return outcome
        yield  # a walk that asks nothing

    @property
    @override
    def _is_slow(self) -> bool:
        return self.memo is not None or super()._is_slow

    @staticmethod
    def _limited(ask: Callable[[T], Ask], config: RunnableConfig) -> Callable[[T], Ask]:
        """Returns `ask`, with as many calls in flight as the run's `max_concurrency` says."""
        limit = _calls_at_once(config)
        return ask if limit is None else lambda prompts: AtMost(ask(prompts), limit)

    def _told(self, outcome: Any, source: Source, ticket: Reservation | None, config: RunnableConfig) -> Walk[Any]:
        receipt = self._receipt(source, ticket) if self._gives_receipts else None

        def news() -> dict[str, Any]:
            return self._news(receipt or self._receipt(source, ticket))

        yield Tell(RELEASE, news, config, is_slow=receipt is None and self._is_slow)
        return self._shown(outcome, receipt)

    @property
    def _gives_receipts(self) -> bool:
        return self.with_receipt or self.on_exhausted == "zero_shot"

    def _receipt(self, source: Source, ticket: Reservation | None) -> Receipt:
        epsilon, delta, left = self._standing()
        return Receipt(
            source=source,
            tickets=0 if ticket is None else 1,
            component=self.share.component,
            dataset_id=self.plan.partition,
            ledger_id=self.budget.ledger_id,
            entry=None if ticket is None else ticket.entry,
            entry_hash=None if ticket is None else ticket.entry_hash,
            adjacency=self.plan.release.adjacency,
            epsilon=epsilon,
            delta=delta,
            mechanism=self.plan.release.mechanism.name,
            noise_multiplier=self.plan.noise_multiplier,
            queries_left=left,
        )

    def _standing(self) -> tuple[float | None, float | None, int | None]:
        """Returns the share's epsilon and delta and what it has left; None of it while the ledger is out.

        By then the answer is paid for, or free: it is not lost for numbers that can be read later.
        """
        try:
            return self.share.epsilon, self.share.delta, self.share.remaining(QUERY_TEMPLATE)
        except LedgerError:
            return None, None, None

    def _news(self, receipt: Receipt) -> dict[str, Any]:
        return {"component": type(self).__name__, "tickets": receipt.tickets, "receipt": receipt.model_dump()}

    def _refusal(self, numbers: Mapping[str, Any]) -> dict[str, Any]:
        shown = {"name": self.budget.name, "epsilon": self.budget.epsilon, "delta": self.budget.delta}
        return {
            "component": type(self).__name__,
            **numbers,
            "budget": {**shown, "adjacency": self.budget.adjacency},
            "answered": "zero-shot",
        }

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """Copies the public options alone: handles, engines and memos are the same in every copy."""
        return self.__copy__()

    def __repr__(self) -> str:
        left = shown_left(lambda: self.share.remaining(QUERY_TEMPLATE))
        of_all = f"queries_left={left} of {self.plan.max_queries}"
        return f"{type(self).__name__}(component={self.share.component!r}, {of_all})"

    __str__ = __repr__

    @contextmanager
    def _bar(self, total: int) -> Iterator[None]:
        """Shows the progress of a batch."""
        hidden = (None if total > 1 else True) if self.progress is None else not self.progress
        with tqdm(total=total, unit="query", desc="private answers", disable=hidden, leave=False) as bar:
            token = _BAR.set(bar)
            try:
                yield
            finally:
                _BAR.reset(token)

    @staticmethod
    def _tick() -> None:
        bar = _BAR.get()
        if bar is not None:
            with suppress(OSError, ValueError):  # a terminal that went away does not stop a paid run
                bar.update()

    @classmethod
    async def afrom_private_examples(cls, private: Any, **options: Any) -> Self:
        """Is `from_private_examples`, awaitable: a model is probed and noise calibrated in a thread."""
        build: Callable[..., Self] = cls.from_private_examples  # type: ignore[attr-defined]
        return await asyncio.to_thread(build, private, **options)


def _calls_at_once(config: RunnableConfig) -> int | None:
    limit = config.get("max_concurrency")
    return None if limit is None else check_int("max_concurrency", limit, low=1)
