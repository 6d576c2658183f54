"""LangChain's wrappers of a Runnable, changed so that retries and fallbacks do not handle this package's errors."""

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
from typing_extensions import override

from langchain_dpicl.exceptions import ConfigurationError, DPICLError, PrivacyBudgetError

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


class _MappedRunnable(ReraisesOwnErrors, RunnableEach[Any, Any]):  # type: ignore[misc]
    """A map whose retries and fallbacks do not handle this package's errors."""


# Not [Any, Any]: pydantic would accept no component as a `RunnableSerializable[Any, Any]`.
class _Fields(ReraisesOwnErrors, RunnableConfigurableFields):  # type: ignore[type-arg]
    """Configurable fields whose retries and fallbacks do not handle this package's errors."""


class _Alternatives(ReraisesOwnErrors, RunnableConfigurableAlternatives):  # type: ignore[type-arg]
    """Configurable alternatives whose retries and fallbacks do not handle this package's errors."""


class _Retry(ReraisesOwnErrors, RunnableRetry[Any, Any]):  # type: ignore[no-redef]
    """A retry in which the inputs of a batch are independent.

    LangChain's class ends a whole batch with the first error that is not retried, which would lose paid answers.
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
        """Raises the first suppressed error."""
        if self._first is None:
            raise ConfigurationError("with_fallbacks: expected a runnable to try, found none.")
        raise self._first


def _wrap_binding(binding: Any) -> _Binding:
    """Returns LangChain's binding as a `_Binding`."""
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
