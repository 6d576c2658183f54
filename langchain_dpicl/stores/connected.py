"""Base of objects that own a connection: closed by `with`, shared by copies, never pickled."""

from __future__ import annotations

from abc import abstractmethod
from types import TracebackType
from typing import ClassVar, Self

from langchain_dpicl._opaque import Uncopyable
from langchain_dpicl.exceptions import DPICLError, LedgerError


class Connected(Uncopyable):
    """What closes its connection at the end of a `with` block and stays in its process."""

    _pickle_error: ClassVar[type[DPICLError]] = LedgerError
    _pickle_advice = "it owns a connection. Open another in the other process"

    @abstractmethod
    def close(self) -> None:
        """Closes the connection for good."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
