"""Bases of objects that are shared instead of copied, and what keeps private content out of errors and frames."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NoReturn, SupportsIndex, TypeVar

from langchain_dpicl.exceptions import DPICLError, PrivacyBudgetError, PrivateAccessError

T = TypeVar("T")


class Uncopyable:
    """Cannot be copied or pickled: a copy of a budget, share or reservation would spend twice."""

    __slots__ = ()
    _pickle_error: ClassVar[type[DPICLError]] = PrivacyBudgetError
    _pickle_advice: ClassVar[str] = "a copy would spend the budget again. Share a durable store"

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise self._pickle_error(f"{type(self).__name__} cannot be pickled: {self._pickle_advice}.")


class Opaque(Uncopyable):
    """Holds private content and shows only its class."""

    __slots__ = ()
    _pickle_error = PrivateAccessError
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
