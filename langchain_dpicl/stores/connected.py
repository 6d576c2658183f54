"""Base of objects that own a connection: closed by `with`, shared by copies, never pickled."""

from __future__ import annotations

from abc import abstractmethod
from types import TracebackType
from typing import Any, ClassVar, NoReturn, Self

from langchain_dpicl.exceptions import DPICLError, LedgerError


class Connected:
    """What closes its connection at the end of a `with` block and stays in its process."""

    _pickle_error: ClassVar[type[DPICLError]] = LedgerError

    @abstractmethod
    def close(self) -> None:
        """Closes the connection for good."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # A copy would be a second owner of the one connection.
    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        name = type(self).__name__
        raise self._pickle_error(f"{name}: expected to stay in its process, found pickle. Open another there.")
