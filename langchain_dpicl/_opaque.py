"""Bases of objects that are shared instead of copied, and what keeps private content out of errors and frames.

Also tells a process from those that it was forked from, and makes a wrong call of a constructor an error without the
values that were passed.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from abc import ABCMeta
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NoReturn, SupportsIndex, TypeVar

from langchain_dpicl._lazy import provided
from langchain_dpicl.exceptions import ConfigurationError, PrivateAccessError

C = TypeVar("C", bound=type)
T = TypeVar("T")


class CopiedAsItself:
    """Is shared by all copies of what holds it."""

    __slots__ = ()

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self


class Uncopyable(CopiedAsItself):
    """Cannot be copied or pickled: a copy of a budget, share or reservation would spend twice."""

    __slots__ = ()
    _pickle_advice: ClassVar[str] = "a copy would spend the budget again. Share a durable store"

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        # A TypeError, as Python's own of what cannot be pickled: at any other Ray ends the worker, and runs the task
        # again with other tickets.
        raise PrivateAccessError(f"{type(self).__name__} cannot be pickled: {self._pickle_advice}.")


_forks = 0


def _count_fork() -> None:
    global _forks  # noqa: PLW0603  of the process
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)


def this_process() -> tuple[int, int]:
    """Returns what tells this process from those that it was forked from: its number may have been one of theirs."""
    return os.getpid(), _forks


_FIRST = this_process()


def is_forked() -> bool:
    """Whether this process was forked from one that had imported this package."""
    return this_process() != _FIRST


class PerProcess(Generic[T]):
    """What each process has of its own: a gate or lock that a thread held at a fork would stay shut in the child.

    A caller that enters and leaves it takes `here` once, as a fork may come in between.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made = {this_process(): make()}

    @property
    def here(self) -> T:
        """The one of this process."""
        process = this_process()
        if process not in self._made:
            self._made.setdefault(process, self._make())
        return self._made[process]


class Opaque(Uncopyable):
    """Holds private content and shows only its class."""

    __slots__ = ()
    _pickle_advice = "it holds private content. Build it again where it is needed"

    def __repr__(self) -> str:
        return f"{type(self).__name__}(<private>)"

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)


class OpaqueRows(Opaque):
    """Private rows, or their running sum, between engine and aggregation: read once, never shown."""

    __slots__ = ("_rows",)

    def __init__(self, rows: Any) -> None:
        self._rows: list[Any] = [rows]

    def take(self) -> Any:
        """Returns the rows and forgets them."""
        return self._rows.pop()


def run_guarded(action: Callable[[], T]) -> T | None:
    """Returns the result of `action`, or None if it raised; Ctrl-C is raised again from here, without the frames."""
    stopped = False
    try:
        return action()
    except KeyboardInterrupt:
        stopped = True
    except BaseException:  # noqa: BLE001  panics of tokenizers and stray exits are faults of a row, not stops
        stopped = False
    if stopped:
        raise KeyboardInterrupt
    return None


class SaysHowToBuild(ABCMeta):
    """Answers a constructor that a class does not have, such as `from_llm`, with the one that it has."""

    if not TYPE_CHECKING:  # a type checker that saw a `__getattr__` would accept any name

        def __getattr__(cls, name: str) -> Any:
            with contextlib.suppress(AttributeError):
                return super().__getattr__(name)  # that of pydantic's models; other classes have none
            is_door = name.startswith(("from_", "afrom_"))
            advice = f" {provided('calls').how_to_build(cls)}" if is_door else ""
            raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}.{advice}")


def tells_how_to_build(call: str = "") -> Callable[[C], C]:
    """Makes a class raise an error that says how to build it (with `call`) for arguments that its constructor lacks."""

    def decorate(cls: C) -> C:
        build: Callable[..., None] = vars(cls)["__init__"]
        takes = inspect.signature(build)

        @functools.wraps(build)
        def checked(self: Any, *args: Any, **kwargs: Any) -> None:
            try:
                if not _binds(takes, (self, *args), kwargs):
                    fault = provided("calls").fault_in(takes, (self, *args), kwargs, type(self))
                    wanted = f"Build it with {call}." if call else provided("calls").how_to_build(type(self))
                    raise ConfigurationError(f"{type(self).__name__}: {fault} {wanted}")
                build(self, *args, **kwargs)
            finally:
                del args, kwargs  # crash reporters show the variables of a frame that raises

        type.__setattr__(cls, "__init__", checked)
        return cls

    return decorate


def _binds(takes: inspect.Signature, args: Iterable[Any], kwargs: Mapping[str, Any]) -> bool:
    try:
        takes.bind(*args, **kwargs)
    except TypeError:
        return False
    return True
