"""Wrappers that LangChain puts around a Runnable, made so that retries and fallbacks let our errors by.

Knows error classes only: no budget, no private record.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn, TypeAlias, cast

from langchain_core.runnables import (
    ConfigurableField,
    Runnable,
    RunnableBinding,
    RunnableConfig,
    RunnableSerializable,
    RunnableWithFallbacks,
)
from langchain_core.runnables.base import RunnableEach
from langchain_core.runnables.configurable import RunnableConfigurableAlternatives, RunnableConfigurableFields
from langchain_core.runnables.retry import ExponentialJitterParams, RunnableRetry
from langchain_core.runnables.utils import AnyConfigurableField
from langchain_core.tools import BaseTool, StructuredTool
from typing_extensions import override

from langchain_dpicl.exceptions import ConfigurationError, DPICLError, PrivacyBudgetError
from langchain_dpicl.privacy._validate import fail

ErrorClasses: TypeAlias = tuple[type[BaseException], ...]
Rule: TypeAlias = Callable[[BaseException], bool]


class QueryTool(StructuredTool):
    """A tool that takes a query as a plain text too, as a stock tool of one argument does."""

    @override
    def run(self, tool_input: str | dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        return super().run(self._named(tool_input), *args, **kwargs)

    @override
    async def arun(self, tool_input: str | dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        return await super().arun(self._named(tool_input), *args, **kwargs)

    def _named(self, given: str | dict[str, Any]) -> dict[str, Any]:
        names = list(self.args)
        if not isinstance(given, str):
            return given
        if len(names) != 1:
            raise fail("input", f"a dict with {names}", "text", "A text is enough where a query has one variable.")
        return {names[0]: given}


class PassesOurErrors:
    """What a component that charges, and everything wrapped around it, does about retries and fallbacks.

    Formal guarantees:
      - A retry never follows a refusal by the budget, and follows our other errors only if they are named.
      - A fallback never stands in for one of our errors that is not named.
    """

    def with_retry(
        self: Any,
        *,
        retry_if_exception_type: ErrorClasses | Rule = (Exception,),
        wait_exponential_jitter: bool = True,
        exponential_jitter_params: ExponentialJitterParams | None = None,
        stop_after_attempt: int = 3,
    ) -> Runnable[Any, Any]:
        """Is LangChain's `with_retry`, but leaves our errors alone. Every attempt that gets as far as a release pays.

        Args:
          retry_if_exception_type: classes to retry on; one of ours has to be named itself (`ModelCallError`), its
            base classes outside this package do not cover it. Or a function of the error, also on versions of
            langchain-core that take classes only; it is not asked about refusals by the budget.
          wait_exponential_jitter: as in LangChain.
          exponential_jitter_params: as in LangChain.
          stop_after_attempt: as in LangChain.

        Raises:
          ConfigurationError: a refusal by the budget is named: it stays one, however often one asks.
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
        """Is LangChain's `with_fallbacks`, but lets our errors through.

        Args:
          fallbacks: as in LangChain.
          exceptions_to_handle: classes to fall back on; one of ours has to be named itself. Naming a refusal by the
            budget sends the question to the fallback: see to it that no private record is behind that.
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
        """Is LangChain's `bind`."""
        return _kept(Runnable.bind(self, **kwargs))

    def with_config(self: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Runnable[Any, Any]:
        """Is LangChain's `with_config`."""
        return _kept(Runnable.with_config(self, config, **kwargs))

    def with_listeners(self: Any, **listeners: Any) -> Runnable[Any, Any]:
        """Is LangChain's `with_listeners`."""
        return _kept(Runnable.with_listeners(self, **listeners))

    def with_alisteners(self: Any, **listeners: Any) -> Runnable[Any, Any]:
        """Is LangChain's `with_alisteners`."""
        return _kept(Runnable.with_alisteners(self, **listeners))

    def with_types(self: Any, **types: Any) -> Runnable[Any, Any]:
        """Is LangChain's `with_types`."""
        return _kept(Runnable.with_types(self, **types))

    def as_tool(self: Any, args_schema: Any = None, **kwargs: Any) -> BaseTool:
        """Is LangChain's `as_tool`; what is not given, the component inside gives: what a query holds, what it does."""
        inside = self
        while isinstance(inside, PassesOurErrors) and not hasattr(inside, "tool_defaults"):
            held = vars(inside)
            inside = held.get("bound") or held.get("default") or held.get("runnable")
        given = inside.tool_defaults() if hasattr(inside, "tool_defaults") else {}
        if args_schema is not None:
            given["args_schema"] = args_schema
        made = Runnable.as_tool(self, **{**given, **kwargs})
        return QueryTool(**dict(made)) if isinstance(made, StructuredTool) else made

    def map(self: Any) -> Runnable[Sequence[Any], list[Any]]:
        """Is LangChain's `map`."""
        return _Each(bound=self)

    def configurable_fields(self: Any, **kwargs: AnyConfigurableField) -> RunnableSerializable[Any, Any]:
        """Is LangChain's `configurable_fields`."""
        return _Fields(**vars(RunnableSerializable.configurable_fields(self, **kwargs)))

    def configurable_alternatives(self: Any, which: ConfigurableField, **kwargs: Any) -> RunnableSerializable[Any, Any]:
        """Is LangChain's `configurable_alternatives`."""
        return _Alternatives(**vars(RunnableSerializable.configurable_alternatives(self, which, **kwargs)))


# LangChain's own classes differ in these signatures.
class _Binding(PassesOurErrors, RunnableBinding[Any, Any]):  # type: ignore[misc, no-redef]
    """A binding whose retries and fallbacks leave our errors alone."""


class _Each(PassesOurErrors, RunnableEach[Any, Any]):  # type: ignore[misc]
    """A map whose retries and fallbacks leave our errors alone."""


# Not [Any, Any]: pydantic would take no component for a `RunnableSerializable[Any, Any]`.
class _Fields(PassesOurErrors, RunnableConfigurableFields):  # type: ignore[type-arg]
    """Configurable fields whose retries and fallbacks leave our errors alone."""


class _Alternatives(PassesOurErrors, RunnableConfigurableAlternatives):  # type: ignore[type-arg]
    """Configurable alternatives whose retries and fallbacks leave our errors alone."""


class _Retry(PassesOurErrors, RunnableRetry[Any, Any]):  # type: ignore[no-redef]
    """A retry in which every input of a batch stands for itself.

    The stock class ends a whole batch with the first error that is not retried, and paid answers would be lost.
    """

    @override
    def batch(
        self,
        inputs: list[Any],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        return Runnable.batch(self, inputs, config, return_exceptions=return_exceptions, **kwargs)

    @override
    async def abatch(
        self,
        inputs: list[Any],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        return await Runnable.abatch(self, inputs, config, return_exceptions=return_exceptions, **kwargs)


class _Fallbacks(PassesOurErrors, RunnableWithFallbacks[Any, Any]):
    """Fallbacks chosen by `isinstance`, which a rule can answer; an `except` clause, as in the stock class, cannot."""

    @override
    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        return self._call_with_config(self._first, input, config, **kwargs)

    @override
    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        return await self._acall_with_config(self._afirst, input, config, **kwargs)

    @override
    def stream(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Iterator[Any]:
        yield from self._transform_stream_with_config(iter([input]), self._streamed, config, **kwargs)

    @override
    async def astream(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> AsyncIterator[Any]:
        async def inputs() -> AsyncIterator[Any]:
            yield input

        async for chunk in self._atransform_stream_with_config(inputs(), self._astreamed, config, **kwargs):
            yield chunk

    def _first(self, given: Any, run_manager: Any, config: RunnableConfig, **kwargs: Any) -> Any:
        del run_manager
        attempts = _Attempts(self, given)
        for runnable in self.runnables:
            with attempts:
                return runnable.invoke(attempts.input, config, **kwargs)
        return attempts.give_up()

    async def _afirst(self, given: Any, run_manager: Any, config: RunnableConfig, **kwargs: Any) -> Any:
        del run_manager
        attempts = _Attempts(self, given)
        for runnable in self.runnables:
            with attempts:
                return await runnable.ainvoke(attempts.input, config, **kwargs)
        return attempts.give_up()

    def _streamed(
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

    async def _astreamed(
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
    """Holds back the errors that a fallback stands in for; the first of them is raised if none did better."""

    def __init__(self, owner: _Fallbacks, given: Any) -> None:
        if owner.exception_key is not None and not isinstance(given, dict):
            raise ConfigurationError(f"input: expected a dict beside exception_key=, found {type(given).__name__}.")
        self.input = given
        self._handled = owner.exceptions_to_handle
        self._key = owner.exception_key
        self._first: BaseException | None = None

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if error is None or not isinstance(error, self._handled):
            return False
        self._first = self._first or error
        if self._key is not None:
            self.input = {**self.input, self._key: error}
        return True

    def give_up(self) -> NoReturn:
        """Raises the first error that was held back."""
        if self._first is None:
            raise ConfigurationError("with_fallbacks: expected a runnable to try, found none.")
        raise self._first


def _kept(binding: Any) -> _Binding:
    """Returns the stock binding as one of ours."""
    return _Binding(**vars(binding))


class _ByRule(type):
    """A class of errors whose `isinstance` asks a rule."""

    rule: Rule

    def __instancecheck__(cls, error: object) -> bool:
        return isinstance(error, BaseException) and cls.rule(error)


def _errors_by(rule: Rule) -> type[BaseException]:
    return cast("type[BaseException]", _ByRule("ErrorsByRule", (Exception,), {"rule": staticmethod(rule)}))


def _is_named(classes: ErrorClasses, error: BaseException) -> bool:
    """Whether an error is one of the classes; one of ours has to be named inside our own tree."""
    ours = _holds(error, DPICLError)
    return any(isinstance(error, c) and (not ours or issubclass(c, DPICLError)) for c in classes)


def _holds(error: BaseException, kind: type[Exception]) -> bool:
    """Whether an error is of a kind, or a group with one of that kind inside."""
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
        msg = f"retry_if_exception_type: expected no refusal by the budget, found {refusals}: asking again cannot help."
        raise ConfigurationError(msg + " Raise the share; or name ModelCallError, and each attempt pays.")
    return partial(_is_named, classes)


def _classes(name: str, named: Any) -> ErrorClasses:
    classes = (named,) if isinstance(named, type) else named
    if not isinstance(classes, tuple) or not all(isinstance(c, type) and issubclass(c, BaseException) for c in classes):
        raise ConfigurationError(f"{name}: expected a tuple of exception classes, found {named!r}.")
    return classes
