"""The base class of Runnables that charge a budget: every LangChain entry point runs `_answer` once per input."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from inspect import signature
from typing import Any, Generic, NoReturn, Protocol, SupportsIndex

from langchain_core.runnables import RunnableConfig, RunnableSerializable
from langchain_core.runnables.utils import AnyConfigurableField, Input, Output
from pydantic import ConfigDict, Field
from typing_extensions import override

from langchain_dpicl._constructing import HidesInput
from langchain_dpicl._wrappers import PassesOurErrors
from langchain_dpicl.callbacks import check_config, check_configs, may_wait, resolve_budget
from langchain_dpicl.exceptions import ConfigurationError, PrivacyBudgetError
from langchain_dpicl.privacy.shares import Reservation
from langchain_dpicl.run_events import RunEvents

_HANDLES = ("private", "budget", "share")


class Pay(Protocol):
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


def _step(value: Any, config: RunnableConfig, **kwargs: Any) -> Any:
    """The signature of `_run` and `_arun`: LangChain passes the config because it is named here."""


class _Step:
    """A callable with a precomputed signature: LangChain reads it twice per run, and computing it dominates a run."""

    __slots__ = ("_call",)
    __signature__ = signature(_step)

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, value: Any, **kwargs: Any) -> Any:
        return self._call(value, **kwargs)


class ChargingRunnable(HidesInput, PassesOurErrors, RunnableSerializable[Input, Output], Generic[Input, Output]):
    """Base of Runnables that charge a budget for each answer.

    Formal guarantees:
      - Every entry point runs `_answer` or `_aanswer` once per input, and those charge only through `pay`.
      - Every run resolves the budget first: a different one in the config or the context is refused.
      - The run's observers receive the tickets that stay charged as `dpicl.charged` and a refusal as `dpicl.refused`,
        once each.
      - Copies share the handles and so spend the same budget; pickling is refused.

    Subclasses hold public values in fields and implement `_answer` and `_aanswer`.
    """

    private: Any = Field(exclude=True, repr=False)
    """The opaque handle of the private examples."""

    budget: Any = Field(exclude=True, repr=False)
    """The budget (or handler) that `share` belongs to."""

    share: Any = Field(exclude=True, repr=False)
    """The share that `pay` reserves tickets from."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    @abstractmethod
    def _answer(self, value: Input, pay: Pay, config: RunnableConfig, **kwargs: Any) -> Output:
        """Answers one input; reads private records only inside `with pay(...)`."""

    @abstractmethod
    async def _aanswer(self, value: Input, pay: Pay, config: RunnableConfig, **kwargs: Any) -> Output:
        """Asynchronous version of `_answer`; a walk is driven by `adrive(walk, is_slow=self._is_slow)`."""

    @override
    def invoke(self, input: Input, config: RunnableConfig | None = None, **kwargs: Any) -> Output:
        check_config(config)
        return self._call_with_config(_Step(self._run), input, config, **kwargs)

    @override
    async def ainvoke(self, input: Input, config: RunnableConfig | None = None, **kwargs: Any) -> Output:
        check_config(config)
        return await self._acall_with_config(_Step(self._arun), input, config, **kwargs)

    @override
    def batch(self, inputs: list[Any], config: Any = None, **options: Any) -> list[Any]:
        check_configs(config)
        return super().batch(inputs, config, **options)

    @override
    async def abatch(self, inputs: list[Any], config: Any = None, **options: Any) -> list[Any]:
        check_configs(config)
        return await super().abatch(inputs, config, **options)

    @override
    def batch_as_completed(self, inputs: Sequence[Any], config: Any = None, **options: Any) -> Iterator[Any]:
        check_configs(config)
        return super().batch_as_completed(inputs, config, **options)

    @override
    def abatch_as_completed(self, inputs: Sequence[Any], config: Any = None, **options: Any) -> AsyncIterator[Any]:
        check_configs(config)
        return super().abatch_as_completed(inputs, config, **options)

    @override
    def configurable_fields(self, **kwargs: AnyConfigurableField) -> RunnableSerializable[Any, Any]:
        """As LangChain's `configurable_fields`, restricted to public fields.

        Raises:
          ConfigurationError: a handle was named: a caller could choose the private examples or the payer.
        """
        if handles := sorted(set(kwargs) & set(_HANDLES)):
            raise ConfigurationError(f"configurable_fields: expected public fields, found {handles}. Leave them fixed.")
        return super().configurable_fields(**kwargs)

    def _run(self, value: Input, config: RunnableConfig, **kwargs: Any) -> Output:
        with self._events(config) as events:
            resolve_budget(self.budget, config)
            return self._answer(value, partial(self._pay, events), config, **kwargs)

    async def _arun(self, value: Input, config: RunnableConfig, **kwargs: Any) -> Output:
        async with self._events(config) as events:
            resolve_budget(self.budget, config)
            return await self._aanswer(value, partial(self._pay, events), config, **kwargs)

    @property
    def _is_slow(self) -> bool:
        """Whether a ledger call may block, so that async code runs it in a thread."""
        return may_wait(self.budget)

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

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        name = type(self).__name__
        raise PrivacyBudgetError(f"{name}: cannot be pickled: a copy would spend the budget again. Build another one.")
