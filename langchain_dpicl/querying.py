"""The base class of Runnables that answer queries from private examples at one ticket per query."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, Self, TypeAlias, TypeVar

from langchain_core.runnables import ConfigurableFieldSpec, RunnableConfig
from pydantic import Field, create_model
from typing_extensions import override

from langchain_dpicl._progress import new_bar, tick
from langchain_dpicl._query_memo import AnswerMemo
from langchain_dpicl._query_plan import QUERY_TEMPLATE
from langchain_dpicl.asking import Query
from langchain_dpicl.backends.walk import Ask, AtMost, Turn, Walk, adrive, drive
from langchain_dpicl.callbacks import shown_left
from langchain_dpicl.exceptions import LedgerError, PrivacyBudgetExceededError, TenantCapExceededError
from langchain_dpicl.privacy._validate import check_int, fail
from langchain_dpicl.privacy.shares import Reservation
from langchain_dpicl.receipts import Receipt, Source
from langchain_dpicl.run_events import REFUSED, arecord_event, record_event
from langchain_dpicl.runnables import ChargingRunnable, Pay
from langchain_dpicl.tenants import SPECS, Tenant

RELEASE = "dpicl.release"
"""Name of the event of an answer, with its receipt."""

T = TypeVar("T")
Exhausted: TypeAlias = Literal["raise", "zero_shot"]
_BAR: ContextVar[Any] = ContextVar("dpicl_query_bar", default=None)


@dataclass(slots=True)
class Tell:
    """An `Ask` that sends an event to the run's observers."""

    name: str
    data: Callable[[], Mapping[str, Any]]
    config: RunnableConfig
    is_slow: bool

    def run(self) -> None:
        """Sends, blocking."""
        record_event(self.name, self.data, self.config)

    async def arun(self) -> None:
        """Sends, awaiting."""
        await arecord_event(self.name, self.data, self.config, is_slow=self.is_slow)


class QueryRunnable(ChargingRunnable[Any, Any]):
    """Base of Runnables that answer queries from private examples.

    Formal guarantees:
      - Every answer takes exactly one ticket, which burns before a private record is read. It takes none if the answer
        is in the tenant's cache, or if the budget is spent and the answer is zero-shot.
      - With a `memo` that outlives the process, the answer is written to it before it is returned and before its ticket
        is committed. A kill at any moment loses at most the ticket; a stored answer is never charged again.
      - The public model is asked before the ticket is reserved, so an outage costs nothing.
      - Tenants and their caps can only refuse queries; the ledger alone limits what the data set releases.

    Subclasses implement how an answer is prepared, released and returned.
    """

    wording: Any = Field(exclude=True, repr=False)
    """Prompt templates: a `TaskWording`. Public."""

    plan: Any = Field(exclude=True, repr=False)
    """Release and price of all answers: a `QueryPlan` or `RetrievalPlan`. Public."""

    tenants: Any = Field(exclude=True, repr=False)
    """Caps and cached answers by tenant; shared by all copies."""

    memo: AnswerMemo | None = Field(default=None, exclude=True, repr=False)
    """Cache of answers that outlives the process; None: only the cache in `tenants`."""

    on_exhausted: Exhausted = "raise"
    """What to do when the budget, or the tenant's cap, is spent."""

    with_receipt: bool = False
    """Whether answers are typed results with a receipt."""

    max_query_chars: int | None = None
    """Characters of all of a query's variables together; None: the cap of a record's text, `private.max_chars`."""

    progress: bool | None = None
    """Whether batches show a bar; None: on a terminal."""

    CONFIGURABLE: ClassVar[frozenset[str]] = frozenset({"on_exhausted", "progress", "with_receipt"})
    """Fields that `configurable_fields` may name: price, rows and payer do not depend on them."""

    @abstractmethod
    def _prepared(self, query: Query, config: RunnableConfig) -> Walk[Any]:
        """Makes the public calls before a ticket is reserved; a failed call raises ModelCallError."""

    @abstractmethod
    def _released(
        self, query: Query, prepared: Any, ticket: Reservation, config: RunnableConfig, keep: Callable[[Any], None]
    ) -> Walk[Any]:
        """Makes the release that `ticket` pays for; calls `keep` with the outcome before the ticket is committed."""

    def _open(self, pay: Pay) -> None:
        """Pays once for what all answers share; does nothing where each answer has a ticket of its own."""

    @abstractmethod
    def _zero_shot(self, query: Query, prepared: Any, config: RunnableConfig) -> Walk[Any]:
        """Answers without private records."""

    @abstractmethod
    def _shown(self, outcome: Any, receipt: Receipt | None) -> Any:
        """Returns what the caller gets: the plain answer, or a typed result if there is a receipt."""

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
        """Returns the default arguments schema and description of a tool made of this Runnable or a wrapper of it."""
        fields: dict[str, Any] = dict.fromkeys(self.wording.input_variables, (str, ...))
        return {"args_schema": create_model("Query", **fields), "description": self._purpose}

    @property
    def _purpose(self) -> str:
        """Description of a tool made of this Runnable."""
        return "Answers a query from private examples, under differential privacy."

    @override
    def configurable_fields(self, **kwargs: Any) -> Any:
        """As LangChain's `configurable_fields`, restricted to the fields in `CONFIGURABLE`.

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
    def _answer(self, value: Any, pay: Pay, config: RunnableConfig, **kwargs: Any) -> Any:
        return drive(self._walk(value, pay, config, kwargs))

    @override
    async def _aanswer(self, value: Any, pay: Pay, config: RunnableConfig, **kwargs: Any) -> Any:
        return await adrive(self._walk(value, pay, config, kwargs), is_slow=self._is_slow)

    def _walk(self, value: Any, pay: Pay, config: RunnableConfig, kwargs: Mapping[str, Any]) -> Walk[Any]:
        if kwargs:
            raise fail("invoke", "no further arguments", sorted(kwargs))
        query = self.wording.query(value)
        self._check_length(query)
        tenant = self.tenants.of(config)
        _calls_at_once(config)
        try:
            # Concurrent equal queries of a tenant wait for the first one, and then read its cached answer.
            with self.tenants.turn(tenant, query) as gate:
                is_gate_ours = False if gate is None else (yield Turn(gate))
                try:
                    return (yield from self._in_turn(tenant, query, pay, config))
                finally:
                    if is_gate_ours and gate is not None:
                        gate.__exit__(None, None, None)
        finally:
            self._tick()

    def _check_length(self, query: Query) -> None:
        """Refuses a long query before any model call: every row would contain it."""
        most = self.private.max_chars if self.max_query_chars is None else self.max_query_chars
        if (length := sum(map(len, query))) > most:
            raise fail("input", f"at most {most:,} characters", length, "Shorten the query, or raise max_query_chars.")

    def _in_turn(self, tenant: Tenant, query: Query, pay: Pay, config: RunnableConfig) -> Walk[Any]:
        """Answers when no other process answers the same query; without a memo there is no other process (a walk)."""
        if self.memo is None:
            return (yield from self._answered(tenant, query, pay, config))
        holder = yield from self.memo.turn(tenant, lambda: self._settled(tenant, query), query)
        try:
            return (yield from self._answered(tenant, query, pay, config))
        finally:
            if holder is not None:
                self.memo.leave(tenant, query, holder)

    def _answered(self, tenant: Tenant, query: Query, pay: Pay, config: RunnableConfig) -> Walk[Any]:
        """Answers one query of one tenant: from the cache, by a release, or zero-shot (a walk)."""
        if (outcome_before := self._recalled(tenant, query)) is not None:
            outcome = yield from self._finished(tenant, query, outcome_before, config)
            return (yield from self._told(outcome, "memo", None, config))
        self._refuse_early(tenant, pay)
        # The public calls come before the ticket: an outage of the model then costs nothing.
        prepared = yield from self._prepared(query, config)
        is_opening = False
        try:
            with self.tenants.seat(tenant) as seat:
                seat.charged = False
                with pay(QUERY_TEMPLATE, tenant=tenant.known_as, tenant_cap=tenant.cap) as ticket:
                    seat.charged = True  # counts as charged until the ticket is known not to have burnt
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
                raise  # the filter that all answers share is lost; zero-shot answers would hide that
            if self.on_exhausted != "zero_shot":
                self._explain(error)
                raise
            refusal = {"error": type(error).__name__, "requested": error.requested, "remaining": error.remaining}
        else:
            outcome = yield from self._finished(tenant, query, outcome, config)
            return (yield from self._told(outcome, "release", ticket, config))
        # After the `except` block, so that later errors do not have the refusal as their context.
        yield Tell(REFUSED, lambda: self._refusal(refusal), config, is_slow=False)
        outcome = yield from self._zero_shot(query, prepared, config)
        return (yield from self._told(outcome, "zero-shot", None, config))

    def _refuse_early(self, tenant: Tenant, pay: Pay) -> None:
        """Refuses a query that cannot be paid for before its public calls are made."""
        if self.on_exhausted == "raise":
            self.tenants.refuse_beyond_cap(tenant)
            if tenant.cap is not None and self.share.used_by(tenant.name) >= tenant.cap:
                self._refuse(tenant, pay)
            # The ledger raises the refusal, so that its message is the same as in a race.
            if not self.share.remaining(QUERY_TEMPLATE):
                self._refuse(tenant, pay)

    def _refuse(self, tenant: Tenant, pay: Pay) -> None:
        """Lets the ledger raise the refusal; a ticket that was handed back meanwhile is handed back again."""
        try:
            with pay(QUERY_TEMPLATE, tenant=tenant.known_as, tenant_cap=tenant.cap):
                pass
        except PrivacyBudgetExceededError as error:
            self._explain(error)
            raise

    def _explain(self, error: PrivacyBudgetExceededError) -> None:
        """Adds to a refusal what the share paid for, and what to do."""
        if isinstance(error, TenantCapExceededError):
            return  # its message is complete: the share is not involved
        spent = f"Its {self.plan.max_queries} queries cost epsilon {self.share.epsilon:.4g} at {self.share.delta:.4g}"
        advice = "Build another component for more, or take on_exhausted='zero_shot'."
        error.args = (f"{error.args[0]} {spent.replace(' at ', ' at delta ')} together. {advice}",)

    def _recalled(self, tenant: Tenant, query: Query) -> Any:
        """Returns the cached outcome of this query for the tenant, or None."""
        outcome = self.tenants.recall(tenant, query)
        if outcome is None and self.memo is not None:
            outcome = self.memo.recall(tenant, query)
            if outcome is not None and self._is_whole(outcome):
                self.tenants.remember(tenant, query, outcome)
        return outcome

    def _settled(self, tenant: Tenant, query: Query) -> Any:
        """Returns a cached outcome that needs no further call, or None."""
        outcome = self._recalled(tenant, query)
        return outcome if outcome is not None and self._is_whole(outcome) else None

    def _is_whole(self, outcome: Any) -> bool:  # noqa: ARG002  overridden where outcomes are completed later
        return True

    def _keep(self, tenant: Tenant, query: Query, outcome: Any, *, instead_of: Any = None) -> None:
        """Writes a released outcome to the memo, if there is one."""
        if self.memo is not None:
            self.memo.keep(tenant, query, outcome, instead_of=instead_of)

    def _finished(self, tenant: Tenant, query: Query, outcome: Any, config: RunnableConfig) -> Walk[Any]:
        """Completes a released outcome after the ticket is settled, and caches it."""
        del config  # used by subclasses that make a public call here
        self.tenants.remember(tenant, query, outcome)
        return outcome
        yield  # makes this a generator

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
        # A receipt reads the ledger, so it is made only where a caller or an observer gets it.
        receipt = self._receipt(source, ticket) if self._gives_receipts else None

        def news() -> dict[str, Any]:
            return self._news(receipt or self._receipt(source, ticket))

        yield Tell(RELEASE, news, config, is_slow=receipt is None and self._is_slow)
        return self._shown(outcome, receipt)

    @property
    def _gives_receipts(self) -> bool:
        return self.with_receipt or self.on_exhausted == "zero_shot"

    def _receipt(self, source: Source, ticket: Reservation | None) -> Receipt:
        epsilon, delta, queries_left = self._standing()
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
            queries_left=queries_left,
        )

    def _standing(self) -> tuple[float | None, float | None, int | None]:
        """Returns epsilon, delta and remaining queries of the share; None for all three if the ledger cannot be read.

        The answer is paid for or free by then, and must not be lost for numbers that can be read later.
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
        """Copies the public options only: handles, engines and caches are shared by all copies."""
        return self.__copy__()

    def __repr__(self) -> str:
        queries_left = shown_left(lambda: self.share.remaining(QUERY_TEMPLATE))
        of_all = f"queries_left={queries_left} of {self.plan.max_queries}"
        return f"{type(self).__name__}(component={self.share.component!r}, {of_all})"

    __str__ = __repr__

    @contextmanager
    def _bar(self, total: int) -> Iterator[None]:
        """Shows the progress of a batch."""
        progress = False if self.progress is None and total <= 1 else self.progress
        with new_bar(total, "query", "private answers", progress=progress) as bar:
            token = _BAR.set(bar)
            try:
                yield
            finally:
                _BAR.reset(token)

    @staticmethod
    def _tick() -> None:
        bar = _BAR.get()
        if bar is not None:
            tick(bar)

    @classmethod
    async def afrom_private_examples(cls, private: Any, **options: Any) -> Self:
        """Asynchronous version of `from_private_examples`: a model is probed and noise calibrated in a thread."""
        build: Callable[..., Self] = cls.from_private_examples  # type: ignore[attr-defined]
        return await asyncio.to_thread(build, private, **options)


def _calls_at_once(config: RunnableConfig) -> int | None:
    limit = config.get("max_concurrency")
    return None if limit is None else check_int("max_concurrency", limit, low=1)
