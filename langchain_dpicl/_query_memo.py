"""What a component was asked before, in whatever process: its answers in a memo that outlives it, and turns to answer.

Knows released outcomes and public queries only; no record, no row, no ticket. What is kept was released, hence public,
and is told to its own tenant alone.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from langchain_dpicl.asking import Query
from langchain_dpicl.backends.walk import Walk
from langchain_dpicl.exceptions import ConfigurationError, MemoError
from langchain_dpicl.privacy.ledger import Budget, Share
from langchain_dpicl.stores.memos import MemoKey, ReleaseMemo, memo_at, query_of, scope_of, tenant_of
from langchain_dpicl.tenants import Tenant, Tenants

_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5
_MOST_UNSAVED = 256
_PRICES = frozenset({"epsilon", "delta", "implementation_delta"})
"""What plans say of their cost: a release is what it is, whatever a later accountant says that it costs."""

logger = logging.getLogger(__name__)


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
        is written, before it is told, when it is asked for again.

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
        self._unsaved = Tenants(memo_size=_MOST_UNSAVED)

    def recall(self, tenant: Tenant, query: Query) -> Any:
        """Returns what the tenant was told, by any process, or None.

        Raises:
          MemoError: the memo cannot be read, or holds something broken.
        """
        key = self._key(tenant, query)
        told = self._unsaved.recall(tenant, query)
        if told is None:
            told = self._memo.recall(key)
        else:
            self._save(tenant, query, told)
        return None if told is None else self._unpacked(json.loads(told))

    def keep(self, tenant: Tenant, query: Query, outcome: Any) -> None:
        """Keeps what was released, before it is told and before its ticket is committed.

        Raises:
          MemoError: the memo cannot be written; the release stays charged, and in this process.
        """
        told = json.dumps(self._packed(outcome), ensure_ascii=True)
        self._unsaved.remember(tenant, query, told)  # before anything can fail
        self._save(tenant, query, told)

    def _save(self, tenant: Tenant, query: Query, told: str) -> None:
        failed = ""
        try:
            self._memo.remember(self._key(tenant, query), told)
        except MemoError as error:
            failed = str(error)
        if failed:
            raise MemoError(
                f"{failed} The release stays charged and is kept: asking again, as the same tenant and in this "
                "process, tells it for free once the memo can be written."
            )
        self._unsaved.forget(tenant, query, told)

    def turn(self, tenant: Tenant, recalled: Callable[[], Any], query: Query) -> Walk[str | None]:
        """Waits until no other process is answering the same (a walk).

        Returns:
          Whose turn it is, for `leave`; None where the answer is known by now, or where nobody can be waited for.

        Raises:
          MemoError: the memo cannot be read or written; nothing was charged.
        """
        key, holder, pause = self._key(tenant, query), secrets.token_hex(8), _FIRST_PAUSE
        while recalled() is None:
            if self._memo.claim(key, holder):
                return holder
            if not (yield Pause(pause)):
                return None
            pause = min(2 * pause, _LONGEST_PAUSE)
        return None

    def leave(self, tenant: Tenant, query: Query, holder: str) -> None:
        """Ends a turn; one that cannot be ended now ends by itself, and the answer stands whatever comes of it."""
        try:
            self._memo.leave(self._key(tenant, query), holder)
        except MemoError as error:
            logger.warning("%s The turn of a query ends by itself.", error)

    def _key(self, tenant: Tenant, query: Query) -> MemoKey:
        return MemoKey(self._scope, tenant_of(tenant.name), query_of(query))

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __repr__(self) -> str:
        return f"AnswerMemo({self.description})"


def checked_memo(given: Any, *, budget: Budget, memo_size: int) -> ReleaseMemo | None:
    """Returns the memo that a component was given, opened; None where it was given none.

    Raises:
      ConfigurationError: it is none, or would never find anything.
      MemoError: it cannot be used.
    """
    if given is None:
        return None
    if not memo_size:
        raise ConfigurationError("memo_size: expected at least 1 beside memo=, found 0. Leave one of them out.")
    memo = memo_at(given)
    if memo.durable and not budget.durable:
        raise ConfigurationError(
            "memo: expected a ledger that outlives the process, as the memo does, found one in memory: after a restart "
            "it is another ledger, whose answers are not there. Open a durable ledger, or leave memo= out."
        )
    return memo


def scope_of_plan(budget: Budget, share: Share, *, dataset_id: str, public: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what identifies the answers of a component, as JSON values; prices are no part of it."""
    plan = {name: value for name, value in public.items() if name not in _PRICES}
    return {"ledger": budget.ledger_id, "dataset": dataset_id, "component": share.component, "plan": plan}


__all__ = ["AnswerMemo", "Pause", "checked_memo", "scope_of_plan"]
