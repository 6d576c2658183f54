"""Who asks: caps per tenant, and what each tenant was told before. Knows no budget, no record and no model.

A tenant is a name in `config["configurable"]`. Its cap only ever refuses: what a data set may release is the ledger's
word, whatever names callers give themselves. What is remembered is released, hence public, and dies with the process.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from langchain_core.runnables import ConfigurableFieldSpec

from langchain_dpicl.exceptions import PrivacyBudgetExceededError
from langchain_dpicl.privacy._validate import check_int, fail

TENANT = "tenant"
"""Key of the tenant's name in `config["configurable"]`."""

TENANT_CAP = "tenant_max_queries"
"""Key of a cap in `config["configurable"]`; it can lower the cap of the constructor, never raise it."""

_MOST_NAME = 200
_MOST_TENANTS = 1024

SPECS = [
    ConfigurableFieldSpec(
        id=TENANT, annotation=str, default="", name="Tenant", description="Who asks; memo and caps are per tenant."
    ),
    ConfigurableFieldSpec(
        id=TENANT_CAP,
        annotation=int | None,
        default=None,
        name="Most queries of the tenant",
        description="Charged queries of this tenant in this process; lowers the constructor's cap, never raises it.",
    ),
]


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who asks, and how many charged queries that one may have; None: as many as the ledger allows."""

    name: str
    cap: int | None


class Seat:
    """A place among a tenant's charged queries; given up again unless `charged` is set."""

    __slots__ = ("charged",)

    def __init__(self) -> None:
        self.charged = False


class Tenants:
    """Caps and memos by tenant; shared by all copies of one component. Copying or pickling gives itself or nothing.

    Formal guarantees:
      - At most `cap` queries of a tenant hold a seat at once or were charged before, in this process.
      - What one tenant was told is never returned to another, and pushes nothing of another's out of its memo.
      - Memory is bounded: `memo_size` answers for each of the 1,024 tenants heard last.

    Args:
      max_queries: cap of every tenant; None: none.
      memo_size: answers kept per tenant; 0: none.
    """

    def __init__(self, *, max_queries: int | None = None, memo_size: int = 0) -> None:
        self.max_queries = None if max_queries is None else check_int(TENANT_CAP, max_queries, low=0)
        self.memo_size = check_int("memo_size", memo_size, low=0)
        self._lock = threading.Lock()
        self._used: Counter[str] = Counter()
        self._told: OrderedDict[str, OrderedDict[Hashable, Any]] = OrderedDict()

    def of(self, config: Mapping[str, Any]) -> Tenant:
        """Returns who asks, by the run's config.

        Raises:
          ConfigurationError: the name is no short text, or the cap no whole number.
        """
        given = config.get("configurable") or {}
        name, cap = given.get(TENANT), given.get(TENANT_CAP)
        name = "" if name is None else name
        if not isinstance(name, str) or len(name) > _MOST_NAME:
            raise fail(TENANT, f"a text of at most {_MOST_NAME} characters", type(name).__name__)
        caps = [self.max_queries, None if cap is None else check_int(TENANT_CAP, cap, low=0)]
        return Tenant(name, min((limit for limit in caps if limit is not None), default=None))

    @contextmanager
    def seat(self, tenant: Tenant) -> Iterator[Seat]:
        """Takes a place among the tenant's queries for the block.

        Raises:
          PrivacyBudgetExceededError: the tenant's cap is reached; nothing was charged.
        """
        seat = Seat()
        with self._lock:
            used = self._used[tenant.name]
            if tenant.cap is not None and used >= tenant.cap:
                msg = f"tenant {tenant.name!r}: requested 1 query, remaining 0 of {tenant.cap} in this process."
                raise PrivacyBudgetExceededError(msg + " Raise the tenant's cap.", requested=1, remaining=0)
            self._used[tenant.name] += 1
        try:
            yield seat
        finally:
            if not seat.charged:
                self._give_up(tenant.name)

    def used(self, name: str) -> int:
        """Returns how many queries of a tenant were charged or are under way."""
        return self._used.get(name, 0)

    def recall(self, tenant: Tenant, key: Hashable) -> Any:
        """Returns what the tenant was told before, or None."""
        with self._lock:
            memo = self._told.get(tenant.name)
            if memo is None or key not in memo:
                return None
            self._told.move_to_end(tenant.name)
            memo.move_to_end(key)
            return memo[key]

    def remember(self, tenant: Tenant, key: Hashable, told: Any) -> None:
        """Keeps what the tenant was told, in place of the oldest of its answers."""
        if not self.memo_size:
            return
        with self._lock:
            memo = self._told.setdefault(tenant.name, OrderedDict())
            self._told.move_to_end(tenant.name)
            memo[key] = told
            memo.move_to_end(key)
            if len(memo) > self.memo_size:
                memo.popitem(last=False)
            if len(self._told) > _MOST_TENANTS:
                self._told.popitem(last=False)

    def forget(self, tenant: Tenant, key: Hashable, told: Any) -> None:
        """Forgets what the tenant was told, unless something else was remembered since."""
        with self._lock:
            memo = self._told.get(tenant.name)
            if memo is not None and memo.get(key) is told:
                del memo[key]

    def _give_up(self, name: str) -> None:
        with self._lock:
            self._used[name] -= 1
            if not self._used[name]:
                del self._used[name]

    def __repr__(self) -> str:
        return f"Tenants(max_queries={self.max_queries}, memo_size={self.memo_size})"
