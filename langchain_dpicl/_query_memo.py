"""Stores released answers in a memo that outlives the process, and lets one process at a time answer a query."""

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
"""Most answers that wait to be written to the memo; with more, new queries are refused before they are charged."""

_FORMAT = 1
"""Version of stored answers, a part of their key: another version never reads them."""

_TRAITS = (
    *("model_name", "model", "model_id", "instructions", "continuation", "prefill"),
    *("temperature", "top_p", "top_k", "max_tokens", "max_completion_tokens", "seed"),
)
"""Public settings that decide what a model writes; other attributes may be credentials."""

_PRICES = frozenset({"epsilon", "delta", "implementation_delta"})
"""Prices in plans, left out of keys: a release stays valid if a later accountant prices it differently."""

_MALFORMED = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
"""What reading a malformed outcome raises."""

T = TypeVar("T")
logger = logging.getLogger(__name__)


class _Told(NamedTuple):
    """An outcome as text, and the stored text that it replaces."""

    text: str
    instead_of: str | None


@dataclass(slots=True)
class Pause:
    """An `Ask` that sleeps; its answer says whether it did."""

    seconds: float

    def run(self) -> bool:
        """Sleeps, blocking; not below a running event loop, which would be blocked as well."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            time.sleep(self.seconds)
            return True
        return False

    async def arun(self) -> bool:
        """Sleeps, awaiting."""
        await asyncio.sleep(self.seconds)
        return True


class AnswerMemo:
    """The cache of one component's answers in a memo that outlives the process.

    Formal guarantees:
      - The key of an answer is ledger, data set, component, public parameters of the plan, tenant and query.
      - `keep` returns when the answer is stored. If the memo fails, the answer stays in this process and is written,
        before it is returned, when the query is asked again. None is dropped: with 256 such answers, new queries are
        refused before they are charged.

    Args:
      memo: the store.
      scope: what identifies the plan, as JSON values.
      packed: converts an outcome to JSON values.
      unpacked: converts JSON values to an outcome.
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
        """Returns the outcome that any process stored for the tenant's query, or None."""
        key = self._key(tenant, query)
        with self._lock:
            waiting = self._unsaved.get((tenant.name, query))
        if waiting is not None:
            self._save(tenant, query, waiting)
        text = self._asked(lambda: self._memo.recall(key))
        if text is None and waiting is not None:
            text = waiting.text  # the memo stored it and evicted it at once; it is paid for all the same
        return None if text is None else self._read(text)

    def _read(self, text: str) -> Any:
        """Parses a stored outcome; another writer of the memo may have put a malformed one there."""
        try:
            return self._unpacked(json.loads(text))
        except _MALFORMED as error:
            kind = type(error).__name__
        raise MemoError(
            f"memo {self.description}: expected an answer of this component, found a malformed one ({kind}). "
            "Nothing was charged. Restore a copy, or forget the tenant, whose queries are then charged again."
        )

    def keep(self, tenant: Tenant, query: Query, outcome: Any, *, instead_of: Any = None) -> None:
        """Stores a released outcome before its ticket is committed; a stored answer is not overwritten."""
        entry = _Told(self._text(outcome), None if instead_of is None else self._text(instead_of))
        self._hold(tenant, query, entry)  # first: writing may fail, and the answer is paid for
        self._save(tenant, query, entry)

    def _text(self, outcome: Any) -> str:
        return json.dumps(self._packed(outcome), ensure_ascii=True)

    def _hold(self, tenant: Tenant, query: Query, entry: _Told) -> None:
        with self._lock:
            self._unsaved[tenant.name, query] = entry

    def _save(self, tenant: Tenant, query: Query, entry: _Told) -> None:
        failed = self._written(tenant.name, query, entry)
        if failed:
            raise MemoError(
                f"{failed} The release stays charged and is kept: asking again, as the same tenant and in this "
                "process, returns it for free once the memo can be written."
            )

    def _written(self, name: str, query: Query, entry: _Told) -> str:
        """Writes an unsaved answer; returns the fault, or ""."""
        try:
            key = _key(self._scope, name, query)
            self._asked(lambda: self._memo.remember(key, entry.text, instead_of=entry.instead_of))
        except MemoError as error:
            return str(error)
        with self._lock:
            # Another thread may have replaced the entry while this one was written.
            if self._unsaved.get((name, query)) == entry:
                del self._unsaved[name, query]
        return ""

    def _make_room(self) -> None:
        """Refuses a new query while too many paid answers cannot be written."""
        with self._lock:
            waiting = list(self._unsaved.items()) if len(self._unsaved) >= _MOST_UNSAVED else []
        for (name, query), entry in waiting:
            if failed := self._written(name, query, entry):
                raise MemoError(
                    f"{failed} {len(waiting)} paid answers wait in this process to be written; nothing was charged for "
                    "this query. Ask again once the memo can be written."
                )

    def turn(self, tenant: Tenant, recalled: Callable[[], Any], query: Query) -> Walk[str | None]:
        """Waits until no other process is answering the same (a walk)."""
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
        """Ends a turn; if the memo fails, the turn expires, and the answer is stored in any case."""
        try:
            self._asked(lambda: self._memo.leave(self._key(tenant, query), holder))
        except MemoError as error:
            logger.warning("%s The turn of a query expires by itself.", error)

    def _key(self, tenant: Tenant, query: Query) -> MemoKey:
        return _key(self._scope, tenant.name, query)

    def _asked(self, action: Callable[[], T]) -> T:
        """Calls the memo; of foreign errors only the class is reported, as their text may contain a password."""
        try:
            return action()
        except DPICLError:
            raise
        except Exception as error:  # noqa: BLE001  whatever a memo that is not ours raises
            kind = type(error).__name__
        raise MemoError(f"memo {self.description}: expected a memo that works, found {kind}. Try again later.")

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __repr__(self) -> str:
        return f"AnswerMemo({self.description})"


def _key(scope: str, name: str, query: Query) -> MemoKey:
    return MemoKey(scope, tenant_of(name), query_of(query))


def checked_memo(memo_or_path: Any, *, budget: Budget, memo_size: int, component: str | None) -> ReleaseMemo | None:
    """Opens the memo of a component and checks that it can find answers; None: no memo is given."""
    if memo_or_path is None:
        return None
    if not memo_size:
        raise ConfigurationError("memo_size: expected at least 1 beside memo=, found 0. Leave one of them out.")
    if component is None:
        raise ConfigurationError(
            "component: expected a name beside memo=, found none: an unnamed component is a new one at each start, "
            "which finds no answer and takes a share of its own. Name it, or leave memo= out."
        )
    memo = memo_at(memo_or_path)
    if memo.durable and not budget.durable:
        raise ConfigurationError(
            "memo: expected a ledger that outlives the process, as the memo does, found one in memory, which is "
            "another ledger after a restart, without answers in the memo. Open a durable ledger, or leave memo= out."
        )
    return memo


def traits_of(model: Any) -> dict[str, Any]:
    """Returns the public settings that identify a model or an engine, as JSON values."""
    inner, bound = unwrap(model)
    traits: dict[str, Any] = {"kind": type(inner).__name__}
    # The outermost setting wins: a binding overrides its model, a model overrides its engine.
    for part in (bound, inner, getattr(inner, "backend", None)):
        for settings in (part, getattr(part, "options", None)):
            for name in _TRAITS:
                value = settings.get(name) if isinstance(settings, Mapping) else getattr(settings, name, None)
                if isinstance(value, (str, int, float)):
                    traits.setdefault(name, value if isinstance(value, str) else repr(value))
    return traits


def scope_of_plan(budget: Budget, share: Share, *, dataset_id: str, public: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what identifies the answers of a component, as JSON values, without prices."""
    plan = {name: value for name, value in public.items() if name not in _PRICES}
    names = {"ledger": budget.ledger_id, "dataset": dataset_id, "component": share.component}
    return {"format": _FORMAT, **names, "plan": plan}


__all__ = ["AnswerMemo", "Pause", "checked_memo", "scope_of_plan", "traits_of"]
