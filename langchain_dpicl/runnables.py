"""The base of our Runnables that charge a budget: every entry point of LangChain comes down to one walk per input.

A subclass says how one input is answered. Knows no prompt, no row and no mechanism: private examples only pass by as
an opaque handle.
"""

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
    """Charges tickets: `with pay("query") as reservation:`; what did not burn goes back where the ledger allows it."""

    def __call__(
        self,
        template: str,
        *,
        label: str | None = None,
        count: int = 1,
        tenant: str | None = None,
        tenant_cap: int | None = None,
    ) -> AbstractContextManager[Reservation]:
        """Reserves the tickets, durably, before the block's first line runs; see `Share.reserve`."""


def _step(given: Any, config: RunnableConfig, **kwargs: Any) -> Any:
    """Stands for what a run calls: LangChain gives what the signature names, the config of the run's children."""


class _Step:
    """A call whose signature is known: LangChain asks for it twice a run, and to work it out takes most of the run."""

    __slots__ = ("_call",)
    __signature__ = signature(_step)

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, given: Any, **kwargs: Any) -> Any:
        return self._call(given, **kwargs)


class ChargingRunnable(HidesInput, PassesOurErrors, RunnableSerializable[Input, Output], Generic[Input, Output]):
    """Base of Runnables that charge a budget for each answer.

    Formal guarantees:
      - Every entry point runs `_answer` or `_aanswer` once per input, and those charge only through `pay`.
      - Every run asks for the budget first: another one in the config or the context is refused.
      - What stays charged is told as `dpicl.charged`, a refusal as `dpicl.refused`, once each, to the run's observers.
      - Copies hold the same handles and so spend the same budget; pickling is refused.

    Subclasses hold public values in fields and implement `_answer` and `_aanswer`.
    """

    private: Any = Field(exclude=True, repr=False)
    """The opaque holder of private examples."""

    budget: Any = Field(exclude=True, repr=False)
    """The budget (or handler) that `share` belongs to."""

    share: Any = Field(exclude=True, repr=False)
    """Where `pay` takes tickets from."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    @abstractmethod
    def _answer(self, given: Input, pay: Pay, config: RunnableConfig, **kwargs: Any) -> Output:
        """Answers one input; private records are read inside `with pay(...)` only."""

    @abstractmethod
    async def _aanswer(self, given: Input, pay: Pay, config: RunnableConfig, **kwargs: Any) -> Output:
        """Is `_answer`, awaitable; a walk is driven by `adrive(walk, is_slow=self._is_slow)`."""

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
        """Is LangChain's `configurable_fields`, for public fields.

        Raises:
          ConfigurationError: a caller could then choose the private examples, or who pays.
        """
        if handles := sorted(set(kwargs) & set(_HANDLES)):
            raise ConfigurationError(f"configurable_fields: expected public fields, found {handles}. Leave them fixed.")
        return super().configurable_fields(**kwargs)

    def _run(self, given: Input, config: RunnableConfig, **kwargs: Any) -> Output:
        with self._events(config) as events:
            resolve_budget(self.budget, config)
            return self._answer(given, partial(self._pay, events), config, **kwargs)

    async def _arun(self, given: Input, config: RunnableConfig, **kwargs: Any) -> Output:
        async with self._events(config) as events:
            resolve_budget(self.budget, config)
            return await self._aanswer(given, partial(self._pay, events), config, **kwargs)

    @property
    def _is_slow(self) -> bool:
        """Whether the ledger may have to be waited for, which async code does off the event loop."""
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
        raise PrivacyBudgetError(f"{name}: cannot be pickled, its copy would spend the budget again. Build it anew.")
