"""What a component was asked before, in whatever process: its answers in a memo that outlives it, and turns to answer.

Knows released outcomes and public queries only; no record, no row, no ticket. What is kept was released, hence public,
and is told to its own tenant alone.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, TypeVar

from langchain_dpicl.asking import Query
from langchain_dpicl.backends.silent import unwrap
from langchain_dpicl.backends.walk import Walk
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.exceptions import ConfigurationError, DPICLError, MemoError
from langchain_dpicl.privacy.shares import Share
from langchain_dpicl.stores import memo_at
from langchain_dpicl.stores.memos import MemoKey, ReleaseMemo, query_of, scope_of, tenant_of
from langchain_dpicl.tenants import Tenant

_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5
_MOST_UNSAVED = 256
"""Answers that may wait for the memo; while there are more, nobody is charged for another one."""

_FORMAT = 1
"""Of what is kept; another one is another plan, so that nothing old is read in a new way."""

_TRAITS = (
    *("model_name", "model", "model_id", "instructions", "continuation", "prefill"),
    *("temperature", "top_p", "top_k", "max_tokens", "max_completion_tokens", "seed"),
)
"""Public settings that decide what a model writes; further ones may be credentials."""

_PRICES = frozenset({"epsilon", "delta", "implementation_delta"})
"""What plans say of their cost: a release is what it is, whatever a later accountant says that it costs."""

_MALFORMED = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
"""What reading an outcome raises that is none."""

T = TypeVar("T")
logger = logging.getLogger(__name__)


class _Told(NamedTuple):
    """An outcome as text, and the one that it completes."""

    text: str
    instead_of: str | None


@dataclass(slots=True)
class Pause:
    """Waits a moment, on the way of a walk; says whether it did."""

    seconds: float

    def run(self) -> bool:
        """Waits, blocking; not below a running event loop, which others may need."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            time.sleep(self.seconds)
            return True
        return False

    async def arun(self) -> bool:
        """Waits, awaiting."""
        await asyncio.sleep(self.seconds)
        return True


class AnswerMemo:
    """The answers of one component in a memo that outlives the process.

    Formal guarantees:
      - An answer is found by ledger, data set, component, public parameters of the plan, tenant and query: all of them.
      - `keep` returns when the answer stands in the memo. Where the memo is out, the answer stays in this process and
        is written, before it is told, when it is asked for again. None of those is dropped: where there are 256, no
        other question is charged until they are written.

    Args:
      memo: where answers are kept.
      scope: what identifies the plan, as JSON values.
      packed: makes JSON values of an outcome.
      unpacked: makes an outcome of those.
    """

    def __init__(
        self,
        memo: ReleaseMemo,
        *,
        scope: Mapping[str, Any],
        packed: Callable[[Any], Any],
        unpacked: Callable[[Any], Any],
    ) -> None:
        self.description = memo.description
        self._memo = memo
        self._scope = scope_of(scope)
        self._packed = packed
        self._unpacked = unpacked
        self._unsaved: dict[tuple[str, Query], _Told] = {}
        self._lock = threading.Lock()

    def recall(self, tenant: Tenant, query: Query) -> Any:
        """Returns what the tenant was told, by any process, or None.

        Raises:
          MemoError: the memo cannot be read, or holds something broken.
        """
        key = self._key(tenant, query)
        with self._lock:
            waiting = self._unsaved.get((tenant.name, query))
        if waiting is not None:
            self._save(tenant, query, waiting)
        told = self._asked(lambda: self._memo.recall(key))
        if told is None and waiting is not None:
            told = waiting.text  # kept, and pushed out at once: it was paid for all the same
        return None if told is None else self._read(told)

    def _read(self, told: str) -> Any:
        """Returns the outcome that a text says; whoever can write the memo may have put another one there."""
        try:
            return self._unpacked(json.loads(told))
        except _MALFORMED as error:
            kind = type(error).__name__
        raise MemoError(
            f"memo {self.description}: expected an answer of this component, found a broken one ({kind}). It is not "
            "told, and nothing was charged. Restore a copy, or forget the tenant; what is asked again is charged again."
        )

    def keep(self, tenant: Tenant, query: Query, outcome: Any, *, instead_of: Any = None) -> None:
        """Keeps what was released, before it is told and before its ticket is committed; an answer that stands stays.

        Args:
          tenant: who asked.
          query: what.
          outcome: what was released.
          instead_of: the outcome that this one completes.

        Raises:
          MemoError: the memo cannot be written; the release stays charged, and in this process.
        """
        told = _Told(self._text(outcome), None if instead_of is None else self._text(instead_of))
        self._hold(tenant, query, told)  # before anything can fail
        self._save(tenant, query, told)

    def _text(self, outcome: Any) -> str:
        return json.dumps(self._packed(outcome), ensure_ascii=True)

    def _hold(self, tenant: Tenant, query: Query, told: _Told) -> None:
        with self._lock:
            self._unsaved[tenant.name, query] = told

    def _save(self, tenant: Tenant, query: Query, told: _Told) -> None:
        failed = self._written(tenant.name, query, told)
        if failed:
            raise MemoError(
                f"{failed} The release stays charged and is kept: asking again, as the same tenant and in this "
                "process, tells it for free once the memo can be written."
            )

    def _written(self, name: str, query: Query, told: _Told) -> str:
        """Writes an answer that waits; returns why not, or ""."""
        try:
            key = _key(self._scope, name, query)
            self._asked(lambda: self._memo.remember(key, told.text, instead_of=told.instead_of))
        except MemoError as error:
            return str(error)
        with self._lock:
            if self._unsaved.get((name, query)) == told:
                del self._unsaved[name, query]
        return ""

    def _make_room(self) -> None:
        """Refuses another question while too many answers that were paid for cannot be written."""
        with self._lock:
            waiting = list(self._unsaved.items()) if len(self._unsaved) >= _MOST_UNSAVED else []
        for (name, query), told in waiting:
            if failed := self._written(name, query, told):
                raise MemoError(
                    f"{failed} {len(waiting)} answers that were paid for wait in this process to be written; nothing "
                    "was charged for this question. Ask again once the memo can be written."
                )

    def turn(self, tenant: Tenant, recalled: Callable[[], Any], query: Query) -> Walk[str | None]:
        """Waits until no other process is answering the same (a walk).

        Returns:
          Whose turn it is, for `leave`; None where the answer is known by now, or where nobody can be waited for.

        Raises:
          MemoError: the memo cannot be read or written; nothing was charged.
        """
        key, holder, pause = self._key(tenant, query), secrets.token_hex(8), _FIRST_PAUSE
        while recalled() is None:
            self._make_room()
            if self._asked(lambda: self._memo.claim(key, holder)):
                return holder
            if not (yield Pause(pause)):
                return None
            pause = min(2 * pause, _LONGEST_PAUSE)
        return None

    def leave(self, tenant: Tenant, query: Query, holder: str) -> None:
        """Ends a turn; one that cannot be ended now ends by itself, and the answer stands whatever comes of it."""
        try:
            self._asked(lambda: self._memo.leave(self._key(tenant, query), holder))
        except MemoError as error:
            logger.warning("%s The turn of a query ends by itself.", error)

    def _key(self, tenant: Tenant, query: Query) -> MemoKey:
        return _key(self._scope, tenant.name, query)

    def _asked(self, action: Callable[[], T]) -> T:
        """Asks the memo; of what one of somebody else raises only the kind is told, as its text may hold a password."""
        try:
            return action()
        except DPICLError:
            raise
        except Exception as error:  # noqa: BLE001  whatever a memo that is not ours raises
            kind = type(error).__name__
        raise MemoError(f"memo {self.description}: expected a memo that answers, found {kind}. Try again later.")

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __repr__(self) -> str:
        return f"AnswerMemo({self.description})"


def _key(scope: str, name: str, query: Query) -> MemoKey:
    return MemoKey(scope, tenant_of(name), query_of(query))


def checked_memo(given: Any, *, budget: Budget, memo_size: int, component: str | None) -> ReleaseMemo | None:
    """Returns the memo that a component was given, opened; None where it was given none.

    Raises:
      ConfigurationError: it is none, or would never find anything.
      MemoError: it cannot be used.
    """
    if given is None:
        return None
    if not memo_size:
        raise ConfigurationError("memo_size: expected at least 1 beside memo=, found 0. Leave one of them out.")
    if component is None:
        raise ConfigurationError(
            "component: expected a name beside memo=, found none: an unnamed component is another one at each start, "
            "which finds no answer and takes a share of its own. Name it, or leave memo= out."
        )
    memo = memo_at(given)
    if memo.durable and not budget.durable:
        raise ConfigurationError(
            "memo: expected a ledger that outlives the process, as the memo does, found one in memory: after a restart "
            "it is another ledger, whose answers are not there. Open a durable ledger, or leave memo= out."
        )
    return memo


def traits_of(model: Any) -> dict[str, Any]:
    """Returns what tells a model, or an engine, from another one: kind, name, wording and numbers; JSON values.

    Args:
      model: as it was given; of what stands inside a chain, nothing is seen.
    """
    inner, bound = unwrap(model)
    found: dict[str, Any] = {"kind": type(inner).__name__}
    for part in (bound, inner, getattr(inner, "backend", None)):
        for settings in (part, getattr(part, "options", None)):
            for name in _TRAITS:
                value = settings.get(name) if isinstance(settings, Mapping) else getattr(settings, name, None)
                if isinstance(value, (str, int, float)):
                    found.setdefault(name, value if isinstance(value, str) else repr(value))
    return found


def scope_of_plan(budget: Budget, share: Share, *, dataset_id: str, public: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what identifies the answers of a component, as JSON values; prices are no part of it."""
    plan = {name: value for name, value in public.items() if name not in _PRICES}
    names = {"ledger": budget.ledger_id, "dataset": dataset_id, "component": share.component}
    return {"format": _FORMAT, **names, "plan": plan}


__all__ = ["AnswerMemo", "Pause", "checked_memo", "scope_of_plan", "traits_of"]
