"""Classifies the exceptions of model calls by whether another attempt makes sense."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

_BUSY_STATUS = frozenset({408, 409, 425, 429})
_OTHER_LOOP = re.compile(r"event loop|different loop", re.IGNORECASE)
_BUSY_NAMES = ("Timeout", "Connection", "RateLimit", "ServiceUnavailable", "Overloaded", "InternalServer")


class Sorted(NamedTuple):
    """A classified failure; the fields are those of `silent.Reply`."""

    fault: Literal["busy", "loop", "content"]
    retry_after: float | None = None
    detail: str = ""


def sort(error: BaseException, *, explain: Literal["", "kind", "text"]) -> Sorted:
    """Classifies a failure, and never raises, although attributes of the exception may; `explain`: see `Request`."""
    try:
        status = _status(error)
        names = [base.__name__ for base in type(error).__mro__]
        busy = status in _BUSY_STATUS or status >= 500 or isinstance(error, TimeoutError | ConnectionError)
        busy = busy or (status == 0 and any(mark in name for name in names for mark in _BUSY_NAMES))
        # SDKs raise their own connection error from the event loop's complaint.
        lost = any(isinstance(one, RuntimeError) and _OTHER_LOOP.search(str(one)) for one in _linked(error))
        detail = names[0] + (f" (HTTP {status})" if status else "") if explain else ""
        detail += f": {str(error)[:300]}" if explain == "text" else ""
        return Sorted("loop" if lost else "busy" if busy else "content", _retry_after(error), detail)
    except Exception:  # noqa: BLE001  see the docstring
        return Sorted("content")


def _linked(error: BaseException | None) -> Iterator[BaseException]:
    for _ in range(10):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__


def _status(error: BaseException) -> int:
    """Returns the HTTP status of an exception, 0 where it has none."""
    status = getattr(error, "status_code", None) or getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else 0


def _retry_after(error: BaseException) -> float | None:
    headers = getattr(getattr(error, "response", None), "headers", None) or {}
    asked = str(headers.get("retry-after", ""))
    return float(asked) if asked.isdecimal() and asked.isascii() else None
