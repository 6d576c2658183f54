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


WAYS = ("by_wrapt", "by_wraps", "by_replacement", "by_partial", "by_an_object")


def known() -> Any:
    """A recorder of this same code in a package that is known to record calls; `Recorder` is of one that is not."""
    spec = spec_from_file_location("langfuse.recording", __file__)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Recorder()
