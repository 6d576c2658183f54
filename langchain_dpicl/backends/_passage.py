"""Limits of one attempt of a silent call over HTTP: what its exchanges may take and send, and what became of them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any, Literal, TypeAlias
from urllib.parse import urlsplit

from langchain_dpicl.backends._bodies import Body, TooLargeError, UnknownEncodingError
from langchain_dpicl.backends._quiet import EXCHANGE, Call

Explain: TypeAlias = Literal["", "kind", "text"]


class RefusedReplyError(Exception):
    """An HTTP exchange of a silent call went beyond its limits; says nothing of what was sent or received."""


class Passage:
    """The limits of one attempt of a silent call, and what became of its HTTP exchanges.

    Once an exchange has been refused, so is every further one of the attempt: SDKs try again by themselves.

    Args:
      deadline: seconds from the first request of the attempt until its last reply is read.
      max_reply_bytes: size of each reply's body, before and after decompression.

    Attributes:
      hosts: names and ports that requests were sent to, and those of proxies.
      stray: what something else than a limited client did, "" if there was none; follows the model's name.
    """

    __slots__ = (
        "_deadline",
        "_ends",
        "_is_calling",
        "_is_over",
        "_kind",
        "_target",
        "hosts",
        "max_reply_bytes",
        "stray",
    )

    def __init__(self, deadline: float, max_reply_bytes: int) -> None:
        self._deadline = deadline
        self._ends: float | None = None
        self._kind = self._target = ""
        self.max_reply_bytes = max_reply_bytes
        self.hosts: dict[str, None] = {}
        self.stray = ""
        self._is_calling = self._is_over = False

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """Marks the model's call: there are no limits before."""
        self._is_calling = True
        try:
            yield
        finally:
            self._is_over = True

    def now(self) -> Passage | None:
        """Returns the limits that hold now; None before the model is called.

        A thread that the model started and keeps has the mark of that one call for good. What it does for later ones
        gets limits of its own: nothing that one row met may stop the exchanges of others.
        """
        if not self._is_calling:
            return None
        if not self._is_over:
            return self
        exchange = EXCHANGE.get()
        if isinstance(exchange, _Exchange) and not exchange.is_over:
            return exchange.passage
        later = Passage(self._deadline, self.max_reply_bytes)
        later._is_calling = True
        return later

    @property
    def is_refused(self) -> bool:
        """Whether an exchange went beyond its limits."""
        return bool(self._kind)

    def reason(self, explain: Explain) -> str:
        """Says why an exchange was refused, as far as `silent.Request.explain` allows; "" of a private call."""
        if not explain:
            return ""
        return self._kind + (f" {self._target}" if explain == "text" and self._target else "")

    def refuse(self, kind: str, target: str = "") -> RefusedReplyError:
        """Notes why an exchange is refused, the first time; returns the error to raise."""
        if not self._kind:
            self._kind, self._target = kind, target
        return RefusedReplyError(f"a reply of a private model call was refused: {self._kind}")

    def left(self) -> float:
        """Returns the seconds that are left, above 0; the first call starts the clock."""
        now = time.monotonic()
        self._ends = now + self._deadline if self._ends is None else self._ends
        if self._kind or now >= self._ends:
            raise self.late()
        return self._ends - now

    def late(self) -> RefusedReplyError:
        """Notes that the time is up; returns the error to raise."""
        return self.refuse(f"no whole reply within the deadline of {self._deadline:g} seconds")

    def check_status(self, status: int, location: str | None, asked: str) -> None:
        """Refuses redirects, and interim replies that a client takes for the answer.

        The answer comes after an interim reply, so the next row on the connection would read it.
        """
        if status < 200:
            raise self.refuse(f"an interim reply in the place of an answer (HTTP {status})")
        if 300 <= status < 400:
            raise self.refuse(f"a redirect (HTTP {status})", f"to {_pointed_to(location, asked)}")

    def body(self, encoding: str | None) -> Body:
        """Returns what collects a reply's body."""
        try:
            return Body(encoding or "", limit=self.max_reply_bytes)
        except UnknownEncodingError:
            raise self.refuse("an encoding of the reply that cannot be decoded") from None

    def add(self, body: Body, chunk: bytes) -> None:
        """Adds to a body what came, within time and size."""
        self.left()
        try:
            body.add(chunk)
        except TooLargeError:
            raise self.refuse(f"more than {self.max_reply_bytes} bytes of a reply") from None


def _pointed_to(location: str | None, asked: str) -> str:
    """Returns scheme, host and port of a redirect's address; never its path, which may repeat what was sent."""
    own = urlsplit(asked)
    try:
        parts = urlsplit(location or "")
        host, port = parts.hostname, f":{parts.port}" if parts.port else ""
    except ValueError:
        return "an address that cannot be read"
    itself = own.netloc.rpartition("@")[2]  # without a password
    return f"{parts.scheme or own.scheme}://{host}{port}" if host else f"{itself} itself"


class _Exchange:
    """A limited exchange; over once it is left, also for threads that were started in it."""

    __slots__ = ("is_over", "passage")

    def __init__(self, passage: Passage) -> None:
        self.passage = passage
        self.is_over = False


@contextlib.contextmanager
def inside(passage: Passage) -> Iterator[None]:
    """Marks what runs inside as part of a limited exchange: connections that are opened there are its own."""
    exchange = _Exchange(passage)
    token = EXCHANGE.set(exchange)
    try:
        yield
    finally:
        exchange.is_over = True
        EXCHANGE.reset(token)


def is_inside() -> bool:
    """Whether the current code is part of a limited exchange."""
    exchange = EXCHANGE.get()
    return isinstance(exchange, _Exchange) and not exchange.is_over


def passage_of(call: Call) -> Passage | None:
    """Returns the limits of a call; None where no model is called, or is not yet: a rate limiter comes first."""
    return call.passage.now() if isinstance(call.passage, Passage) else None


def at_most(timeout: float | None, remaining: float) -> float:
    """Returns the shorter of two waits; None is no limit."""
    return remaining if timeout is None else min(timeout, remaining)


@contextlib.contextmanager
def waiting(passage: Passage, plain: Any) -> Iterator[None]:
    """Limits what a socket waits inside by the time that is left; one of an event loop does not wait."""
    own, remaining = plain.gettimeout(), passage.left()
    if own == 0.0:
        yield
        return
    plain.settimeout(at_most(own, remaining))
    try:
        yield
    except TimeoutError:
        if own is None or remaining <= own:
            raise passage.late() from None
        raise
    finally:
        plain.settimeout(own)
