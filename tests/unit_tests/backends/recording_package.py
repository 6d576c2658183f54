"""Stands for an installed package that instruments methods, in each of the ways in use, and keeps what passes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

import wrapt


class Recorder:
    """What it made keeps the arguments of every call in `seen`."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def by_wrapt(self, original: Any) -> Any:
        """As OpenTelemetry's instrumentors do it."""

        def wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
            self.seen.append(f"{args} {kwargs}")
            return wrapped(*args, **kwargs)

        return wrapt.FunctionWrapper(original, wrapper)

    def _note(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        self.seen.append(f"{args} {kwargs}")
        return wrapped(*args, **kwargs)

    def by_wrapt_and_a_method(self, original: Any) -> Any:
        """As Braintrust and Datadog do it."""
        return wrapt.FunctionWrapper(original, self._note)

    def by_wrapt_and_a_class_method(self, original: Any) -> Any:
        """With state of the class."""
        return wrapt.FunctionWrapper(original, type("Noting", (_Noting,), {"seen": self.seen}).note)

    def by_wrapt_and_a_static_method(self, original: Any) -> Any:
        """Held by a class, which plays no part."""
        return wrapt.FunctionWrapper(original, functools.partial(_Noting.noted, self.seen))

    def by_wrapt_and_a_partial(self, original: Any) -> Any:
        """As OpenTelemetry does it for httpx, with a hook among the arguments."""
        return wrapt.FunctionWrapper(original, functools.partial(_told, hook=self.seen.append))

    def by_wrapt_and_an_object(self, original: Any) -> Any:
        """With an object that can be called."""
        return wrapt.FunctionWrapper(original, _Callable(self._note))

    def by_wrapt_twice(self, original: Any) -> Any:
        """Behind a wrapper of a wrapper, and a partial of a partial."""
        inner = wrapt.FunctionWrapper(original, functools.partial(functools.partial(self._note)))
        return wrapt.FunctionWrapper(inner, wrapt.FunctionWrapper(self._note, _pass))

    def by_a_descriptor(self, original: Any) -> Any:
        """With an object that cannot be called, and gives something that can."""
        return _Descriptor(self.by_replacement(original))

    def by_wraps(self, original: Any) -> Any:
        """As Sentry does it."""
        return functools.wraps(original)(self.by_replacement(original))

    def by_replacement(self, original: Any) -> Any:
        """Without a trace of what was there."""

        def replacement(*args: Any, **kwargs: Any) -> Any:
            self.seen.append(f"{args} {kwargs}")
            return original(*args, **kwargs)

        return replacement

    def by_partial(self, original: Any) -> Any:
        """With arguments bound."""
        return functools.partialmethod(self.by_replacement(original))

    def by_an_object(self, original: Any) -> Any:
        """With an object that can be called."""
        return _Callable(self.by_replacement(original))


class _Callable:
    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self._call, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)


class _Descriptor:
    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self._call, instance)


class _Noting:
    seen: list[str]

    @classmethod
    def note(cls, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        cls.seen.append(f"{args} {kwargs}")
        return wrapped(*args, **kwargs)

    @staticmethod
    def noted(seen: list[str], wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        seen.append(f"{args} {kwargs}")
        return wrapped(*args, **kwargs)


def _told(wrapped: Any, instance: Any, args: Any, kwargs: Any, *, hook: Callable[[str], None]) -> Any:
    hook(f"{args} {kwargs}")
    return wrapped(*args, **kwargs)


def _pass(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    return wrapped(*args, **kwargs)


WAYS = (
    "by_wrapt",
    "by_wrapt_and_a_method",
    "by_wrapt_and_a_class_method",
    "by_wrapt_and_a_static_method",
    "by_wrapt_and_a_partial",
    "by_wrapt_and_an_object",
    "by_wrapt_twice",
    "by_wraps",
    "by_replacement",
    "by_partial",
    "by_an_object",
    "by_a_descriptor",
)


def known() -> Any:
    """A recorder of this same code in a package that is known to record calls; `Recorder` is of one that is not."""
    spec = spec_from_file_location("langfuse.recording", __file__)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Recorder()
