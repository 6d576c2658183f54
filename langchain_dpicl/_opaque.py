"""Bases of objects that are shared instead of copied: those that spend, own a connection, or hold private content."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn, SupportsIndex

from langchain_dpicl.exceptions import DPICLError, PrivacyBudgetError, PrivateAccessError


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
