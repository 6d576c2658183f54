"""The base class of Runnables that charge a budget per answer, and LangChain's wrappers of it."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, contextmanager
from contextvars import ContextVar
from functools import partial
from inspect import signature
from typing import Annotated, Any, ClassVar, Generic, NoReturn, Protocol, Self, SupportsIndex, TypeAlias, TypeVar, cast

from langchain_core.runnables import (
    ConfigurableField,
    ConfigurableFieldSpec,
    Runnable,
    RunnableBinding,
    RunnableConfig,
    RunnableSerializable,
    RunnableWithFallbacks,
)
from langchain_core.runnables.base import RunnableEach
from langchain_core.runnables.config import ensure_config, var_child_runnable_config
from langchain_core.runnables.configurable import RunnableConfigurableAlternatives, RunnableConfigurableFields
from langchain_core.runnables.retry import ExponentialJitterParams, RunnableRetry
from langchain_core.runnables.utils import AnyConfigurableField
from langchain_core.tools import BaseTool
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, create_model
from typing_extensions import override

from langchain_dpicl._construction import HidesInput
from langchain_dpicl.backends.private_calls.log_guard import lend_threads
from langchain_dpicl.backends.sync_async import (
    AcquireGate,
    Call,
    Effect,
    EffectGenerator,
    LimitConcurrency,
    run_async,
    run_in_thread,
    run_sync,
)
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.budget.handler import (
    REFUSED,
    RELEASE,
    RunEvents,
    arecord_event,
    budget_of,
    check_config,
    check_configs,
    describe_tickets_left,
    record_event,
    resolve_budget,
)
from langchain_dpicl.exceptions import (
    ConfigurationError,
    DPICLError,
    LedgerError,
    PrivacyBudgetError,
    PrivacyBudgetExceededError,
    PrivateAccessError,
    TenantCapExceededError,
)
from langchain_dpicl.options import Exhausted, QueryInput, Serving, option_of
from langchain_dpicl.privacy._validate import calls_at_once, check_int, fail
from langchain_dpicl.privacy.ledger.shares import Reservation
from langchain_dpicl.reports.rendering import format_rounded_up
from langchain_dpicl.results import Receipt, Source
from langchain_dpicl.runs.answer_memo import SPECS, Tenant, TenantRegistry, open_memo
from langchain_dpicl.runs.private_tool import RESERVED, PrivateTool
from langchain_dpicl.runs.query_plan import QUERY_TEMPLATE
from langchain_dpicl.runs.release_run import new_bar, report_of, tick
from langchain_dpicl.stores.memos import ReleaseMemo
from langchain_dpicl.tasks import Query

WITHOUT_WRAPPERS = "Leave wrappers (with_config, bind, with_retry) out: the tool has a config of its own."
"""What to do where a wrapper stands instead of a component."""

ErrorClasses: TypeAlias = tuple[type[BaseException], ...]
Rule: TypeAlias = Callable[[BaseException], bool]


class ReraisesOwnErrors:
    """Retries and fallbacks of a component that charges, and of every wrapper of it.

    Formal guarantees:
      - A retry never follows a refusal by the budget, and follows other errors of this package only if they are named.
      - A fallback never handles an error of this package that is not named.
    """

    def with_retry(
        self: Any,
        *,
        retry_if_exception_type: ErrorClasses | Rule = (Exception,),
        wait_exponential_jitter: bool = True,
        exponential_jitter_params: ExponentialJitterParams | None = None,
        stop_after_attempt: int = 3,
    ) -> Runnable[Any, Any]:
        """As LangChain's `with_retry`, but does not retry this package's errors. Every release is charged.

        Args:
          retry_if_exception_type: classes to retry on; errors of this package have to be named themselves
            (`ModelCallError`), as base classes outside the package do not cover them. Or a function of the error, also
            with versions of langchain-core that take classes only; it is not called for refusals by the budget.
          wait_exponential_jitter: as in LangChain.
          exponential_jitter_params: as in LangChain.
          stop_after_attempt: as in LangChain.

        Raises:
          ConfigurationError: a refusal by the budget is named, which a retry cannot change.
        """
        return _Retry(
            bound=self,
            kwargs={},
            config={},
            retry_exception_types=(_errors_by(_retry_rule(retry_if_exception_type)),),
            wait_exponential_jitter=wait_exponential_jitter,
            max_attempt_number=stop_after_attempt,
            exponential_jitter_params=exponential_jitter_params,
        )

    def with_fallbacks(
        self: Any,
        fallbacks: Sequence[Runnable[Any, Any]],
        *,
        exceptions_to_handle: ErrorClasses = (Exception,),
        exception_key: str | None = None,
    ) -> RunnableWithFallbacks[Any, Any]:
        """As LangChain's `with_fallbacks`, but does not handle this package's errors.

        Args:
          fallbacks: as in LangChain.
          exceptions_to_handle: classes to fall back on; errors of this package have to be named themselves. Naming a
            refusal by the budget sends the query to the fallback, which then must not read private records.
          exception_key: as in LangChain.
        """
        named = _classes("exceptions_to_handle", exceptions_to_handle)
        return _Fallbacks(
            runnable=self,
            fallbacks=fallbacks,
            exceptions_to_handle=(_errors_by(partial(_is_named, named)),),
            exception_key=exception_key,
        )

    def bind(self: Any, **kwargs: Any) -> Runnable[Any, Any]:
        """As LangChain's `bind`."""
        return _wrap_binding(Runnable.bind(self, **kwargs))

    def with_config(self: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Runnable[Any, Any]:
        """As LangChain's `with_config`."""
        return _wrap_binding(Runnable.with_config(self, config, **kwargs))

    def with_listeners(self: Any, **listeners: Any) -> Runnable[Any, Any]:
        """As LangChain's `with_listeners`."""
        return _wrap_binding(Runnable.with_listeners(self, **listeners))

    def with_alisteners(self: Any, **listeners: Any) -> Runnable[Any, Any]:
        """As LangChain's `with_alisteners`."""
        return _wrap_binding(Runnable.with_alisteners(self, **listeners))

    def with_types(self: Any, **types: Any) -> Runnable[Any, Any]:
        """As LangChain's `with_types`."""
        return _wrap_binding(Runnable.with_types(self, **types))

    def as_tool(self: Any, *args: Any, **options: Any) -> BaseTool:
        """As LangChain's `as_tool`, which knows no allowance, and needs `arg_types` where a question is one text.

        Raises:
          ConfigurationError: it cannot make a tool of these arguments.
        """
        try:
            return Runnable.as_tool(self, *args, **options)
        except TypeError as error:
            advice = f"{WITHOUT_WRAPPERS} LangChain's tool of a wrapper takes arg_types=, and no queries_per_thread=."
            raise fail("as_tool", "a component that answers queries", type(self).__name__, advice) from error

    def map(self: Any) -> Runnable[Sequence[Any], list[Any]]:
        """As LangChain's `map`."""
        return _MappedRunnable(bound=self)

    def configurable_fields(self: Any, **kwargs: AnyConfigurableField) -> RunnableSerializable[Any, Any]:
        """As LangChain's `configurable_fields`."""
        return _Fields(**vars(RunnableSerializable.configurable_fields(self, **kwargs)))

    def configurable_alternatives(self: Any, which: ConfigurableField, **kwargs: Any) -> RunnableSerializable[Any, Any]:
        """As LangChain's `configurable_alternatives`."""
        return _Alternatives(**vars(RunnableSerializable.configurable_alternatives(self, which, **kwargs)))


# LangChain's own classes differ in these signatures.
class _Binding(ReraisesOwnErrors, RunnableBinding[Any, Any]):  # type: ignore[misc, no-redef]
    """A binding whose retries and fallbacks do not handle this package's errors."""

    def with_receipts(self) -> Runnable[Any, Any]:
        """As the component's, in the same binding: LangChain's own would be left with the config, and its tenant."""
        return self.model_copy(update={"bound": self.bound.with_receipts()})  # type: ignore[attr-defined]


class _MappedRunnable(ReraisesOwnErrors, RunnableEach[Any, Any]):  # type: ignore[misc]
    """A map whose retries and fallbacks do not handle this package's errors."""


# Not [Any, Any]: pydantic would accept no component as a `RunnableSerializable[Any, Any]`.
class _Fields(ReraisesOwnErrors, RunnableConfigurableFields):  # type: ignore[type-arg]
    """Configurable fields whose retries and fallbacks do not handle this package's errors."""

    def with_receipts(self) -> Runnable[Any, Any]:
        """As the component's, with the same configurable fields."""
        return self.model_copy(update={"default": self.default.with_receipts()})  # type: ignore[attr-defined]


class _Alternatives(ReraisesOwnErrors, RunnableConfigurableAlternatives):  # type: ignore[type-arg]
    """Configurable alternatives whose retries and fallbacks do not handle this package's errors."""

    def with_receipts(self) -> NoReturn:
        """Raises ConfigurationError: an alternative may be any Runnable, without receipts."""
        advice = "Call with_receipts() on the component, and configurable_alternatives() on what it returns."
        found = "with_receipts() after them"
        raise fail("configurable_alternatives", "receipts before the alternatives", found, advice)


class _Retry(ReraisesOwnErrors, RunnableRetry[Any, Any]):  # type: ignore[no-redef]
    """A retry in which the inputs of a batch are independent.

    LangChain's class ends a whole batch with the first error that is not retried, which would lose paid answers.
    """

    batch = Runnable.batch  # type: ignore[pydantic-field]
    abatch = Runnable.abatch  # type: ignore[pydantic-field]


class _Fallbacks(ReraisesOwnErrors, RunnableWithFallbacks[Any, Any]):
    """Fallbacks chosen by `isinstance`, which a metaclass can override; LangChain uses `except`, which ignores it."""

    @override
    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        return self._call_with_config(self._first, input, config, **kwargs)

    @override
    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        return await self._acall_with_config(self._afirst, input, config, **kwargs)

    @override
    def stream(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Iterator[Any]:
        yield from self._transform_stream_with_config(iter([input]), self._stream_fallbacks, config, **kwargs)

    @override
    async def astream(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> AsyncIterator[Any]:
        async def inputs() -> AsyncIterator[Any]:
            yield input

        async for chunk in self._atransform_stream_with_config(inputs(), self._astream_fallbacks, config, **kwargs):
            yield chunk

    def _first(self, value: Any, run_manager: Any, config: RunnableConfig, **kwargs: Any) -> Any:
        del run_manager
        attempts = _Attempts(self, value)
        for runnable in self.runnables:
            with attempts:
                return runnable.invoke(attempts.input, config, **kwargs)
        return attempts.give_up()

    async def _afirst(self, value: Any, run_manager: Any, config: RunnableConfig, **kwargs: Any) -> Any:
        del run_manager
        attempts = _Attempts(self, value)
        for runnable in self.runnables:
            with attempts:
                return await runnable.ainvoke(attempts.input, config, **kwargs)
        return attempts.give_up()

    def _stream_fallbacks(
        self, inputs: Iterator[Any], run_manager: Any, config: RunnableConfig, **kwargs: Any
    ) -> Iterator[Any]:
        del run_manager
        attempts = _Attempts(self, next(inputs))
        for runnable in self.runnables:
            with attempts:
                stream = runnable.stream(attempts.input, config, **kwargs)
                chunk = next(stream)
                break
        else:
            attempts.give_up()
        yield chunk
        yield from stream

    async def _astream_fallbacks(
        self, inputs: AsyncIterator[Any], run_manager: Any, config: RunnableConfig, **kwargs: Any
    ) -> AsyncIterator[Any]:
        del run_manager
        attempts = _Attempts(self, await anext(inputs))
        for runnable in self.runnables:
            with attempts:
                stream = runnable.astream(attempts.input, config, **kwargs)
                chunk = await anext(stream)
                break
        else:
            attempts.give_up()
        yield chunk
        async for later in stream:
            yield later


class _Attempts:
    """Suppresses the errors that a fallback handles; raises the first of them if every runnable fails."""

    def __init__(self, owner: _Fallbacks, value: Any) -> None:
        if owner.exception_key is not None and not isinstance(value, dict):
            raise ConfigurationError(f"input: expected a dict beside exception_key=, found {type(value).__name__}.")
        self.input = value
        self._handled = owner.exceptions_to_handle
        self._key = owner.exception_key
        self._first: BaseException | None = None

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if error is None or not isinstance(error, self._handled):
            return False
        self._first = self._first or error
        if self._key is not None:  # LangChain passes the error to the next runnable under this key
            self.input = {**self.input, self._key: error}
        return True

    def give_up(self) -> NoReturn:
        if self._first is None:
            raise ConfigurationError("with_fallbacks: expected a runnable to try, found none.")
        raise self._first


def _wrap_binding(binding: Any) -> _Binding:
    return _Binding(**vars(binding))


class _ByRule(type):
    """A metaclass of error classes whose `isinstance` calls a rule."""

    rule: Rule

    def __instancecheck__(cls, error: object) -> bool:
        return isinstance(error, BaseException) and cls.rule(error)


def _errors_by(rule: Rule) -> type[BaseException]:
    return cast("type[BaseException]", _ByRule("ErrorsByRule", (Exception,), {"rule": staticmethod(rule)}))


def _is_named(classes: ErrorClasses, error: BaseException) -> bool:
    """Whether an error is one of the classes; a DPICLError only matches classes of its own tree."""
    ours = _holds(error, DPICLError)
    return any(isinstance(error, c) and (not ours or issubclass(c, DPICLError)) for c in classes)


def _holds(error: BaseException, kind: type[Exception]) -> bool:
    """Whether an error is of a class, or a group that contains one."""
    if isinstance(error, BaseExceptionGroup):
        return error.subgroup(kind) is not None
    return isinstance(error, kind)


def _retry_rule(named: ErrorClasses | Rule) -> Rule:
    if callable(named) and not isinstance(named, type):
        return lambda error: (
            isinstance(error, Exception) and not _holds(error, PrivacyBudgetError) and bool(named(error))
        )
    classes = _classes("retry_if_exception_type", named)
    refusals = [c.__name__ for c in classes if issubclass(c, PrivacyBudgetError) or c is DPICLError]
    if refusals:
        msg = f"retry_if_exception_type: expected no refusal by the budget, found {refusals}: a retry cannot help."
        raise ConfigurationError(msg + " Raise the share; or name ModelCallError, where each attempt is charged.")
    return partial(_is_named, classes)


def _classes(name: str, named: Any) -> ErrorClasses:
    classes = (named,) if isinstance(named, type) else named
    if not isinstance(classes, tuple) or not all(isinstance(c, type) and issubclass(c, BaseException) for c in classes):
        raise ConfigurationError(f"{name}: expected a tuple of exception classes, found {named!r}.")
    return classes


class TicketCharge(Protocol):
    """Charges tickets: `with pay("query") as reservation:`; refundable tickets that did not burn are handed back."""

    def __call__(
        self,
        template: str,
        *,
        label: str | None = None,
        count: int = 1,
        tenant: str | None = None,
        tenant_cap: int | None = None,
    ) -> AbstractContextManager[Reservation]:
        """Reserves the tickets, durably, before the block starts; see `Share.reserve`."""


def _step(value: Any, **kwargs: Any) -> Any:
    """The signature of what LangChain calls: it names no config, of which LangChain would make a second copy."""


class _Step:
    """What LangChain calls in a run: `_run`, with the run's config, which it finds in the context.

    Its signature is computed once: LangChain reads it twice per run, and computing it dominates a run.
    """

    __slots__ = ("_call",)
    __signature__ = signature(_step)

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, value: Any, **kwargs: Any) -> Any:
        return self._call(value, _config_here(), **kwargs)


class _AsyncStep(_Step):
    """The same of `_arun`."""

    async def __call__(self, value: Any, **kwargs: Any) -> Any:
        return await self._call(value, _config_here(), **kwargs)


def _config_here() -> RunnableConfig:
    """Returns the config of the run that goes on here, with its callbacks."""
    config = var_child_runnable_config.get()
    return ensure_config() if config is None else config


T = TypeVar("T")
ResultT = TypeVar("ResultT", bound=BaseModel)
_BAR: ContextVar[Any] = ContextVar("dpicl_query_bar", default=None)


def _notification(
    name: str, data: Callable[[], Mapping[str, Any]], config: RunnableConfig, is_slow: Callable[[], bool]
) -> Call:
    """Returns the call that sends an event to the run's observers; `is_slow`: whether `data` may wait for a ledger."""
    return Call(lambda: record_event(name, data, config), lambda: arecord_event(name, data, config, is_slow=is_slow()))


class QueryRunnable(HidesInput, ReraisesOwnErrors, RunnableSerializable[QueryInput, str], Generic[ResultT]):
    """Base of Runnables that answer queries from private examples, each with a text; `with_receipts()` shows more.

    Formal guarantees:
      - Every entry point runs `_answer_effects` once per input, which charges only through `pay`.
      - Every run resolves the budget first: a different one in the config or the context is refused.
      - The run's observers receive the tickets that stay charged as `dpicl.charged` and a refusal as `dpicl.refused`,
        once each.
      - Copies share the handles and so spend the same budget; pickling is refused.
      - Every answer takes exactly one ticket, which burns before a private record is read. It takes none if the answer
        is in the tenant's cache, or if the budget is spent and the answer is zero-shot.
      - With a `memo` that outlives the process, the answer is written to it before it is returned and before its ticket
        is committed. A kill at any moment loses at most the ticket; a stored answer is never charged again.
      - The public model is asked before the ticket is reserved, so an outage costs nothing; unless the component asks
        it beside the private rows (`DPVotingRunnable`), where the first answer of an outage costs its ticket.
      - Tenants and their caps can only refuse queries; the ledger alone limits what the data set releases.

    Subclasses implement how an answer is prepared, released and returned.
    """

    private: Any = Field(exclude=True, repr=False)
    """The opaque handle of the private examples."""

    budget: Any = Field(exclude=True, repr=False)
    """The budget (or handler) that `share` belongs to."""

    share: Any = Field(exclude=True, repr=False)
    """The share that `pay` reserves tickets from."""

    wording: Any = Field(exclude=True, repr=False)
    """Prompt templates: a `FewShotTemplate`. Public."""

    plan: Any = Field(exclude=True, repr=False)
    """Release and price of all answers: a `QueryPlan` or `RetrievalPlan`. Public."""

    tenants: Any = Field(exclude=True, repr=False)
    """Caps and cached answers by tenant; shared by all copies."""

    memo: Any = Field(default=None, exclude=True, repr=False)
    """The `AnswerMemo` of answers that outlive the process; None: only the cache in `tenants`."""

    on_exhausted: Exhausted = "raise"
    """What to do when the budget, or the tenant's cap, is spent."""

    runs: Any = Field(default=None, exclude=True, repr=False)
    """The `AnsweringRuns` on a rolling range, of which answers come from the newest; None: there is one run."""

    gives_receipts: bool = Field(default=False, exclude=True, repr=False)
    """Whether answers are results with a receipt; set by `with_receipts`."""

    max_query_chars: int | None = None
    """Characters of all of a query's variables together; None: the cap of a record's text, `private.max_chars`."""

    public_first: bool = False
    """Whether the public prompt is asked before a ticket is reserved, also where it could go beside the rows."""

    CONFIGURABLE: ClassVar[frozenset[str]] = frozenset({"on_exhausted"})
    """Fields that `configurable_fields` may name: price, rows and payer do not depend on them."""

    RESULT: ClassVar[type[BaseModel]]
    """The class of results."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    @abstractmethod
    def _prepare(self, query: Query, config: RunnableConfig) -> EffectGenerator[Any]:
        """Makes the public calls before a ticket is reserved; a failed call raises ModelCallError."""

    @abstractmethod
    def _released(
        self, query: Query, prepared: Any, ticket: Reservation, config: RunnableConfig, keep: Callable[[Any], None]
    ) -> EffectGenerator[Any]:
        """Makes the release that `ticket` pays for; calls `keep` with the outcome before the ticket is committed."""

    def _open(self, pay: TicketCharge) -> None:
        """Pays once for what all answers share; does nothing where each answer has a ticket of its own."""

    @abstractmethod
    def _zero_shot(self, query: Query, prepared: Any, config: RunnableConfig) -> EffectGenerator[Any]:
        """Answers without private records."""

    @abstractmethod
    def _text(self, outcome: Any) -> str:
        """Returns the answer."""

    @abstractmethod
    def _result(self, outcome: Any, receipt: Receipt) -> ResultT:
        """Returns the answer with its receipt and what was released beside it."""

    def with_receipts(self) -> Runnable[QueryInput, ResultT]:
        """Returns this component with results as answers: the same share, tickets and cached answers."""
        return cast("Runnable[QueryInput, ResultT]", self.model_copy(update={"gives_receipts": True}))

    @property
    def component(self) -> str:
        """Name in the ledger."""
        return str(self.share.component)

    @property
    def queries_left(self) -> int:
        """Queries that the share still pays for, on a stream in the present run; reads the ledger."""
        share = self.share if self.runs is None else self.runs.share_of_now(self.share)
        return int(share.remaining(QUERY_TEMPLATE))

    @property
    def report(self) -> dict[str, Any]:
        """The public privacy report of all answers, with the plan; reads the ledger."""
        return report_of(self.budget, self.share, self.plan)

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

    @property
    @override
    def OutputType(self) -> Any:
        return self.RESULT if self.gives_receipts else str

    @override
    def as_tool(  # type: ignore[override]  # a name has a default
        self,
        args_schema: object = None,
        *,
        name: str = "ask_private_examples",
        description: str | None = None,
        arg_types: object = None,
        queries_per_thread: int | None = None,
    ) -> PrivateTool:
        """Returns a tool for any agent or graph; give the component a `memo`: agents repeat their runs.

        Args:
          args_schema: None: the component knows what a question holds.
          name: of the tool.
          description: what the model reads of it; None: what the component says.
          arg_types: None, as `args_schema`.
          queries_per_thread: charged questions of each thread (`config["configurable"]["thread_id"]`); None: threads
            have no allowance of their own. It must be None where the component has `tenant_max_queries`.

        Raises:
          ConfigurationError: an argument is out of range, or LangChain or pydantic gives a variable's name another
            meaning.
        """
        for option, value in {"args_schema": args_schema, "arg_types": arg_types}.items():
            if value is not None:
                known = f"None, as a question holds the variables {sorted(self.wording.input_variables)}"
                raise fail(option, known, type(value))
        if clash := sorted(filter(_has_meaning, self.wording.input_variables)):
            known = f"variables other than {sorted(RESERVED)} and pydantic's own, without a leading '_', for a tool"
            raise fail("suffix, prefix", known, clash)
        if queries_per_thread is not None:
            check_int("queries_per_thread", queries_per_thread, low=0)
        if queries_per_thread is not None and self.tenants.max_queries is not None:
            # The ledger counts a ticket under one name: a thread's, or its tenant's.
            expected = "None where the component has tenant_max_queries, which counts all threads of a tenant"
            raise fail("queries_per_thread", expected, queries_per_thread, "Give one of the two.")
        fields: dict[str, Any] = dict.fromkeys(names := self.wording.input_variables, (str, ...))

        def asks(text: str, asked: ValidationInfo) -> str:
            """Refuses what `invoke` refuses: a fault of the schema is a message that the model reads and can mend."""
            self._query_of({**asked.data, names[-1]: text})
            return text

        fields[names[-1]] = (Annotated[str, AfterValidator(asks)], ...)
        return PrivateTool(
            name=name,
            description=self._purpose if description is None else description,
            args_schema=create_model("Query", __config__=ConfigDict(hide_input_in_errors=True), **fields),
            component=self,
            queries_per_thread=queries_per_thread,
        )

    @property
    def _purpose(self) -> str:
        """Description of a tool made of this Runnable."""
        return "Answers a query from private examples, under differential privacy."

    @override
    def configurable_fields(self, **kwargs: AnyConfigurableField) -> RunnableSerializable[Any, Any]:
        """As LangChain's `configurable_fields`, restricted to the fields in `CONFIGURABLE`.

        Raises:
          ConfigurationError: another field was named: a caller could choose the private examples or the payer.
        """
        if fixed := sorted(set(kwargs) - self.CONFIGURABLE):
            raise fail("configurable_fields", f"fields among {sorted(self.CONFIGURABLE)}", fixed, "Leave them fixed.")
        return super().configurable_fields(**kwargs)

    @override
    def invoke(self, input: QueryInput, config: RunnableConfig | None = None, **kwargs: Any) -> str:
        check_config(config)
        return self._call_with_config(_Step(self._run), input, config, **kwargs)

    @override
    async def ainvoke(self, input: QueryInput, config: RunnableConfig | None = None, **kwargs: Any) -> str:
        check_config(config)
        return await self._acall_with_config(_AsyncStep(self._arun), input, config, **kwargs)

    @override
    def batch(
        self, inputs: list[Any], config: Any = None, *, return_exceptions: bool = False, **kwargs: Any
    ) -> list[str]:
        self._check_batch(inputs, config, return_exceptions=return_exceptions)
        if not return_exceptions:
            self._refuse_too_many(inputs, config)
        with self._bar(len(inputs)):
            return super().batch(inputs, config, return_exceptions=return_exceptions, **kwargs)

    @override
    async def abatch(
        self, inputs: list[Any], config: Any = None, *, return_exceptions: bool = False, **kwargs: Any
    ) -> list[str]:
        self._check_batch(inputs, config, return_exceptions=return_exceptions)
        if not return_exceptions:
            await run_in_thread(lambda: self._refuse_too_many(inputs, config), is_slow=self._is_slow)
        with self._bar(len(inputs)):
            return await super().abatch(inputs, config, return_exceptions=return_exceptions, **kwargs)

    @override
    def batch_as_completed(self, inputs: Sequence[Any], config: Any = None, **options: Any) -> Iterator[Any]:
        keeps_errors = bool(options.get("return_exceptions"))
        self._check_batch(inputs, config, return_exceptions=keeps_errors)
        if not keeps_errors:
            self._refuse_too_many(inputs, config)
        return super().batch_as_completed(inputs, config, **options)

    @override
    def abatch_as_completed(self, inputs: Sequence[Any], config: Any = None, **options: Any) -> AsyncIterator[Any]:
        keeps_errors = bool(options.get("return_exceptions"))
        self._check_batch(inputs, config, return_exceptions=keeps_errors)
        answers = super().abatch_as_completed(inputs, config, **options)
        return answers if keeps_errors else self._each_paid_for(answers, inputs, config)

    async def _each_paid_for(self, answers: Any, inputs: Sequence[Any], config: Any) -> AsyncIterator[Any]:
        async with aclosing(answers):
            await run_in_thread(lambda: self._refuse_too_many(inputs, config), is_slow=self._is_slow)
            async for answer in answers:
                yield answer

    def _check_batch(self, inputs: Sequence[Any], config: Any, *, return_exceptions: bool) -> None:
        """Checks all inputs before the first is charged: where one raises, the answers of the others are lost."""
        check_configs(config)
        if isinstance(inputs, str) or not isinstance(inputs, Sequence):
            advice = "Write [...] around one, or list(...) around a column."
            raise fail("inputs", "a list of queries", type(inputs), advice)
        if not return_exceptions:
            for value in inputs:
                self._query_of(value)

    def _refuse_too_many(self, inputs: Sequence[Any], config: Any) -> None:
        """Refuses a batch of more queries than are left before the first is charged: its answers would be lost."""
        # Where none is left, the ledger refuses the first one. A run on a rolling range may end between two queries.
        if self.on_exhausted != "raise" or self.runs is not None or len(inputs) < 2:
            return
        configs: Sequence[Any] = config if isinstance(config, Sequence) else [config] * len(inputs)
        asked = [
            (self.tenants.of(ensure_config(one)), self._query_of(value))
            for value, one in zip(inputs, configs, strict=False)  # LangChain refuses another number of configs
        ]
        if self.tenants.memo_size:  # of equal queries of a tenant the first is charged
            firsts: dict[tuple[str, Query], tuple[Tenant, Query]] = {}
            for tenant, query in asked:
                firsts.setdefault((tenant.name, query), (tenant, query))
            asked = list(firsts.values())
        try:
            left = self.share.remaining(QUERY_TEMPLATE)
            if not left or (left >= len(asked) and self._beyond_caps(asked) is None):
                return
        except LedgerError:
            if any(self._read_memo(*one) is None for one in asked):
                raise
            return
        new = [one for one in asked if self._read_memo(*one) is None]
        if left < len(new):
            raise self._too_many(len(new), left, None)
        if (beyond := self._beyond_caps(new)) is not None:
            raise self._too_many(sum(tenant.name == beyond.name for tenant, _ in new), self._left_of(beyond), beyond)

    def _beyond_caps(self, asked: list[tuple[Tenant, Query]]) -> Tenant | None:
        """Returns a tenant with a cap below the number of its queries; None: there is none.

        Each query may have a cap of its own. They are asked at once, so any may be the last.
        """
        number = Counter(tenant.name for tenant, _ in asked)
        capped = (tenant for tenant in dict.fromkeys(tenant for tenant, _ in asked) if tenant.cap is not None)
        return next((tenant for tenant in capped if self._left_of(tenant) < number[tenant.name]), None)

    def _too_many(self, asked: int, left: int, tenant: Tenant | None) -> PrivacyBudgetExceededError:
        """Returns the refusal of a batch; `tenant`: whose cap it is beyond, None: the budget's."""
        kind = PrivacyBudgetExceededError if tenant is None else TenantCapExceededError
        who = "" if tenant is None else f" of tenant {tenant.name!r}"
        msg = f"inputs: expected at most {left} queries{who} without an answer, as many as are left, found {asked}."
        advice = "Ask fewer, or give return_exceptions=True. Nothing was charged."
        error = kind(f"{msg} {advice}", requested=asked, remaining=left)
        self._explain(error)
        return error

    def _now(self) -> Self:
        """Returns this component as it answers now: on a rolling range, in the newest run."""
        return self if self.runs is None else self.runs.of_now(self)

    def _run(self, value: QueryInput, config: RunnableConfig, **kwargs: Any) -> str:
        if (now := self._now()) is not self:
            return now._run(value, config, **kwargs)  # noqa: SLF001  this component, in its newest run
        with self._events(config) as events:
            resolve_budget(self.budget, config)
            answer: str = run_sync(self._answer_effects(value, partial(self._pay, events), config, kwargs))
            return answer

    async def _arun(self, value: QueryInput, config: RunnableConfig, **kwargs: Any) -> str:
        is_due = self.runs is not None and self.runs.is_due
        if (now := await run_in_thread(self._now, is_slow=is_due)) is not self:
            return await now._arun(value, config, **kwargs)  # noqa: SLF001  this component, in its newest run
        async with self._events(config) as events:
            resolve_budget(self.budget, config)
            walk = self._answer_effects(value, partial(self._pay, events), config, kwargs)
            with lend_threads(self.tenants.threads_here()):
                answer: str = await run_async(walk, is_slow=self._is_slow)
            return answer

    @property
    def _is_slow(self) -> bool:
        """Whether a call of the ledger or the memo may block, so that async code runs it in a thread."""
        return self.memo is not None or budget_of(self.budget, "budget").durable

    def _events(self, config: RunnableConfig) -> RunEvents:
        return RunEvents(type(self).__name__, budget=self.budget, share=self.share, config=config)

    @contextmanager
    def _pay(
        self, events: RunEvents, template: str, *, label: str | None = None, count: int = 1, **whose: Any
    ) -> Iterator[Reservation]:
        reservation = self.share.reserve(template, label=label, count=count, **whose)
        events.tickets += count
        try:
            yield reservation
        finally:
            events.tickets -= reservation.give_back()

    def _answer_effects(
        self, value: Any, pay: TicketCharge, config: RunnableConfig, kwargs: Mapping[str, Any]
    ) -> EffectGenerator[Any]:
        """Answers one input (an effect generator); reads private records only inside `with pay(...)`."""
        if kwargs:
            raise fail("invoke", "no further arguments", sorted(kwargs))
        query = self._query_of(value)
        tenant = self.tenants.of(config)
        calls_at_once(config)
        try:
            # Concurrent equal queries of a tenant wait for the first one, and then read its cached answer.
            with self.tenants.turn(tenant, query) as gate:
                is_gate_ours = False if gate is None else (yield AcquireGate(gate))
                try:
                    told = yield from self._serialised(tenant, query, pay, config)
                finally:
                    if is_gate_ours and gate is not None:
                        gate.__exit__(None, None, None)
            # Observers may need a thread of the event loop, in all of which such queries may wait.
            return (yield from told)
        finally:
            self._tick()

    def _query_of(self, value: Any) -> Query:
        """Returns an input's query; refuses one that asks nothing, or a long one, which every row would contain."""
        query: Query = self.wording.query(value)
        if not any(text.strip() for text in query):
            raise fail("input", "a query with text", "a blank one", "Nothing was charged.")
        most = self.private.max_chars if self.max_query_chars is None else self.max_query_chars
        if (length := sum(map(len, query))) > most:
            raise fail(
                "input", f"at most {most:,} characters", length, "Shorten the query, or raise Serving.max_query_chars."
            )
        return query

    def _serialised(
        self, tenant: Tenant, query: Query, pay: TicketCharge, config: RunnableConfig
    ) -> EffectGenerator[EffectGenerator[Any]]:
        """Answers (an effect generator) while no other process answers the same query, if there is a memo."""
        if self.memo is None:
            return (yield from self._answered(tenant, query, pay, config))
        holder = yield from self.memo.turn(tenant, lambda: self._settled(tenant, query), query)
        try:
            return (yield from self._answered(tenant, query, pay, config))
        finally:
            if holder is not None:
                self.memo.leave(tenant, query, holder)

    def _answered(
        self, tenant: Tenant, query: Query, pay: TicketCharge, config: RunnableConfig
    ) -> EffectGenerator[EffectGenerator[Any]]:
        """Answers one query of one tenant (an effect generator): from the cache, by a release, or zero-shot.

        Returns the rest of the run, which needs no turn: an effect generator that tells the observers of the answer.
        """
        if (outcome_before := self._read_memo(tenant, query)) is not None:
            outcome = yield from self._finished(tenant, query, outcome_before, config)
            return self._told(outcome, "memo", None, config)
        self._refuse_early(tenant, pay)
        # The public calls that are not made beside the rows come before the ticket: an outage then costs nothing.
        prepared = yield from self._prepare(query, config)
        is_opening = False
        try:
            with self.tenants.seat(tenant) as seat:
                seat.charged = False
                with pay(QUERY_TEMPLATE, tenant=tenant.ledger_name, tenant_cap=tenant.cap) as ticket:
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
            return self._told(outcome, "release", ticket, config)
        # After the `except` block, so that later errors do not have the refusal as their context.
        return self._told_refused(query, prepared, refusal, config)

    def _refuse_early(self, tenant: Tenant, pay: TicketCharge) -> None:
        """Refuses a query that cannot be paid for before its public calls are made."""
        if self.on_exhausted == "raise":
            self.tenants.refuse_beyond_cap(tenant)
            # The ledger raises the refusal, so that its message is the same as in a race.
            if not self._has_ticket(tenant):
                self._refuse(tenant, pay)

    def _has_ticket(self, tenant: Tenant) -> bool:
        """Whether a ticket is left for a query of a tenant; another call may take it, or give one back."""
        return bool((tenant.cap is None or self._left_of(tenant) > 0) and self.share.remaining(QUERY_TEMPLATE) > 0)

    def _left_of(self, tenant: Tenant) -> int:
        """Returns how many queries the cap of a tenant that has one still allows."""
        used: int = max(self.tenants.used(tenant.name), self.share.used_by(tenant.name))
        return (tenant.cap or 0) - used

    def _refuse(self, tenant: Tenant, pay: TicketCharge) -> None:
        """Lets the ledger raise the refusal; a ticket that was handed back meanwhile is handed back again."""
        try:
            with pay(QUERY_TEMPLATE, tenant=tenant.ledger_name, tenant_cap=tenant.cap):
                pass
        except PrivacyBudgetExceededError as error:
            self._explain(error)
            raise

    def _explain(self, error: PrivacyBudgetExceededError) -> None:
        """Adds to a refusal what the share paid for, and what to do."""
        if isinstance(error, TenantCapExceededError):
            return  # its message is complete: the share is not involved
        price = f"epsilon {format_rounded_up(self.share.epsilon, 4)} at delta {format_rounded_up(self.share.delta, 4)}"
        advice = "Build another component for more, or take Serving(on_exhausted='zero_shot')."
        most = self.plan.max_queries
        queries = "queries of one window cost" if self._most != most else f"{most} queries cost"
        paid = f"Its one query cost {price}" if self._most == most == 1 else f"Its {queries} {price} together"
        error.args = (f"{error.args[0]} {paid}. {advice}",)

    def _read_memo(self, tenant: Tenant, query: Query) -> Any:
        """Returns the cached outcome of this query for the tenant, or None."""
        outcome = self.tenants.recall(tenant, query)
        if outcome is None and self.memo is not None:
            outcome = self.memo.recall(tenant, query)
            if outcome is not None and self._is_whole(outcome):
                self.tenants.remember(tenant, query, outcome)
        return outcome

    def _settled(self, tenant: Tenant, query: Query) -> Any:
        """Returns a cached outcome that needs no further call, or None."""
        outcome = self._read_memo(tenant, query)
        return outcome if outcome is not None and self._is_whole(outcome) else None

    def _is_whole(self, outcome: Any) -> bool:  # noqa: ARG002  overridden where outcomes are completed later
        return True

    def _keep(self, tenant: Tenant, query: Query, outcome: Any, *, instead_of: Any = None) -> None:
        """Writes a released outcome to the memo, if there is one."""
        if self.memo is not None:
            self.memo.keep(tenant, query, outcome, instead_of=instead_of)

    def _finished(self, tenant: Tenant, query: Query, outcome: Any, config: RunnableConfig) -> EffectGenerator[Any]:
        """Completes a released outcome after the ticket is settled, and caches it."""
        del config  # used by subclasses that make a public call here
        self.tenants.remember(tenant, query, outcome)
        return outcome
        yield  # makes this a generator

    @staticmethod
    def _limit_concurrency(ask: Callable[[T], Effect], config: RunnableConfig) -> Callable[[T], Effect]:
        """Returns `ask`, with as many calls in flight as the run's `max_concurrency` says."""
        limit = calls_at_once(config)
        return ask if limit is None else lambda prompts: LimitConcurrency(ask(prompts), limit)

    def _told(
        self, outcome: Any, source: Source, ticket: Reservation | None, config: RunnableConfig
    ) -> EffectGenerator[Any]:
        def whole() -> ResultT:
            return self._result(outcome, self._receipt(source, ticket))

        # A receipt reads the ledger, so it is made only where a caller or an observer gets it.
        result = whole() if self.gives_receipts else None
        yield _notification(
            RELEASE, lambda: self._news(result or whole()), config, lambda: result is None and self._is_slow
        )
        return self._text(outcome) if result is None else result

    def _told_refused(
        self, query: Query, prepared: Any, refusal: Mapping[str, Any], config: RunnableConfig
    ) -> EffectGenerator[Any]:
        """Answers without private records and reports the refusal (an effect generator)."""
        outcome = yield from self._zero_shot(query, prepared, config)  # first: it may fail, and the report names it
        yield _notification(REFUSED, lambda: self._refusal(refusal), config, lambda: False)
        return (yield from self._told(outcome, "zero-shot", None, config))

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
            index=None if ticket is None else ticket.index,
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

    def _news(self, result: ResultT) -> dict[str, Any]:
        shown = {name: value for name, value in result.model_dump(include={"receipt", "scores"}).items() if value}
        return {"component": type(self).__name__, "tickets": shown["receipt"]["tickets"], **shown}

    def _refusal(self, numbers: Mapping[str, Any]) -> dict[str, Any]:
        shown = {"name": self.budget.name, "epsilon": self.budget.epsilon, "delta": self.budget.delta}
        return {
            "component": type(self).__name__,
            **numbers,
            "budget": {**shown, "adjacency": self.budget.adjacency},
            "answered": "zero-shot",
        }

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        name = type(self).__name__
        raise PrivateAccessError(f"{name}: cannot be pickled: a copy would spend the budget again. Build another one.")

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """Copies the public options only: handles, engines and caches are shared by all copies."""
        return self.__copy__()

    @property
    def _most(self) -> int:
        """Queries of one run of a stream, or of all."""
        return int(getattr(self.share, "most", self.plan.max_queries))

    def __repr__(self) -> str:
        queries_left = describe_tickets_left(lambda: self.queries_left)
        of_all = f"queries_left={queries_left} of {self._most}"
        return f"{type(self).__name__}(component={self.share.component!r}, {of_all})"

    __str__ = __repr__

    @contextmanager
    def _bar(self, total: int) -> Iterator[None]:
        with new_bar(total, "query", "private answers", progress=None if total > 1 else False) as bar:
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


def _has_meaning(name: str) -> bool:
    """Whether a variable of this name is no argument of a tool: LangChain or pydantic takes it for something else."""
    return name in RESERVED or name.startswith("_") or (name.startswith("model_") and hasattr(BaseModel, name))


def served(
    serving: Serving | None, *, budget: Budget, component: str | None
) -> tuple[dict[str, Any], ReleaseMemo | None]:
    """Returns the fields of a component that `serving=` gives, and the memo, which is opened here."""
    options = option_of("serving", serving, Serving)
    memo = open_memo(options.memo, budget=budget, memo_size=options.memo_size, component=component)
    tenants = TenantRegistry(max_queries=options.tenant_max_queries, memo_size=options.memo_size)
    limits = {"max_query_chars": options.max_query_chars, "on_exhausted": options.on_exhausted}
    return {"tenants": tenants, **limits, "public_first": options.public_first}, memo
