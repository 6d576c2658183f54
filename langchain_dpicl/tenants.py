"""Caps the charged queries of each tenant, and caches the answers of each tenant in memory."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

from langchain_core.runnables import ConfigurableFieldSpec

from langchain_dpicl.backends.calls import Gate
from langchain_dpicl.exceptions import TenantCapExceededError
from langchain_dpicl.privacy._validate import check_int, fail
from langchain_dpicl.privacy.amounts import is_written

TENANT = "tenant"
"""Key of the tenant's name in `config["configurable"]`."""

TENANT_CAP = "tenant_max_queries"
"""Key of a cap in `config["configurable"]`; it can lower the cap of the constructor, never raise it."""

_MOST_NAME = 200
_MOST_TENANTS = 1024

SPECS = [
    ConfigurableFieldSpec(
        id=TENANT,
        annotation=str,
        default="",
        name="Tenant",
        description="The tenant of the query; caches and caps are per tenant.",
    ),
    ConfigurableFieldSpec(
        id=TENANT_CAP,
        annotation=int | None,
        default=None,
        name="Most queries of the tenant",
        description="Most charged queries of this tenant; lowers the constructor's cap, never raises it.",
    ),
]


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant and the cap on its charged queries; None: as many as the ledger allows."""

    name: str
    cap: int | None

    @property
    def known_as(self) -> str | None:
        """The name in the ledger; None for queries without a tenant, which are counted too."""
        return self.name or None


class Seat:
    """One of a tenant's charged queries; released only if it is known that nothing was charged."""

    __slots__ = ("charged",)

    def __init__(self) -> None:
        self.charged = True


class Tenants:
    """Caps and cached answers by tenant; copying returns the same object, so all copies of a component share it.

    Formal guarantees:
      - In this process, the queries of a tenant that hold a seat or were charged are at most `cap`.
      - Answers of one tenant are never returned to another, and never evict another's answers.
      - Memory is bounded: `memo_size` answers for each of the 1,024 most recent tenants.

    Args:
      max_queries: cap of every tenant; None: none.
      memo_size: answers cached per tenant; 0: none.
    """

    def __init__(self, *, max_queries: int | None = None, memo_size: int = 0) -> None:
        self.max_queries = None if max_queries is None else check_int(TENANT_CAP, max_queries, low=0)
        self.memo_size = check_int("memo_size", memo_size, low=0)
        self._nobody = Tenant("", self.max_queries)
        self._lock = threading.Lock()
        self._used: Counter[str] = Counter()
        self._turns: dict[tuple[str, Hashable], tuple[Gate, int]] = {}
        self._told: OrderedDict[str, OrderedDict[Hashable, Any]] = OrderedDict()

    def of(self, config: Mapping[str, Any]) -> Tenant:
        """Returns the tenant that a run's config names."""
        configurable = config.get("configurable")
        if not configurable:
            return self._nobody
        name, cap = configurable.get(TENANT), configurable.get(TENANT_CAP)
        name = "" if name is None else name
        if not isinstance(name, str) or len(name) > _MOST_NAME:
            raise fail(TENANT, f"a text of at most {_MOST_NAME} characters", type(name).__name__)
        if not is_written(name):
            raise fail(TENANT, "a text that can be written as UTF-8", "a lone surrogate", "Decode the name again.")
        caps = [self.max_queries, None if cap is None else check_int(TENANT_CAP, cap, low=0)]
        return Tenant(name, min((limit for limit in caps if limit is not None), default=None))

    def refuse_beyond_cap(self, tenant: Tenant) -> None:
        """Raises if the tenant's cap is reached."""
        if tenant.cap is not None and self.used(tenant.name) >= tenant.cap:
            msg = f"tenant {tenant.name!r}: requested 1 query, remaining 0 of {tenant.cap} in this process."
            raise TenantCapExceededError(msg + " Raise the tenant's cap.", requested=1, remaining=0)

    @contextmanager
    def seat(self, tenant: Tenant) -> Iterator[Seat]:
        """Takes a seat of the tenant for the block."""
        seat = Seat()
        with self._lock:
            self.refuse_beyond_cap(tenant)
            self._used[tenant.name] += 1
        try:
            yield seat
        finally:
            if not seat.charged:
                self._give_up(tenant.name)

    def used(self, name: str) -> int:
        """Returns the number of a tenant's queries that were charged or are running."""
        return self._used.get(name, 0)

    def recall(self, tenant: Tenant, key: Hashable) -> Any:
        """Returns the tenant's cached outcome, or None."""
        with self._lock:
            memo = self._told.get(tenant.name)
            if memo is None or key not in memo:
                return None
            self._told.move_to_end(tenant.name)
            memo.move_to_end(key)
            return memo[key]

    def remember(self, tenant: Tenant, key: Hashable, outcome: Any) -> None:
        """Caches an outcome, evicting the tenant's oldest one if the cache is full."""
        if not self.memo_size:
            return
        with self._lock:
            memo = self._told.setdefault(tenant.name, OrderedDict())
            self._told.move_to_end(tenant.name)
            memo[key] = outcome
            memo.move_to_end(key)
            if len(memo) > self.memo_size:
                memo.popitem(last=False)
            # Names come from callers: without this bound they could fill the memory.
            if len(self._told) > _MOST_TENANTS:
                self._told.popitem(last=False)

    def forget(self, tenant: Tenant, key: Hashable, outcome: Any) -> None:
        """Removes an outcome from the cache, unless another one replaced it."""
        with self._lock:
            memo = self._told.get(tenant.name)
            if memo is not None and memo.get(key) is outcome:
                del memo[key]

    @contextmanager
    def turn(self, tenant: Tenant, key: Hashable) -> Iterator[Gate | None]:
        """Yields the gate that concurrent equal queries share, so that one is charged and the others read the cache.

        The caller enters the gate; None without a cache.
        """
        if not self.memo_size:
            yield None
            return
        place = (tenant.name, key)
        with self._lock:
            gate, asking = self._turns.get(place, (None, 0))
            gate = Gate(1) if gate is None else gate
            self._turns[place] = (gate, asking + 1)
        try:
            yield gate
        finally:
            with self._lock:
                asking = self._turns[place][1] - 1
                self._turns[place] = (gate, asking)
                if not asking:
                    del self._turns[place]

    def _give_up(self, name: str) -> None:
        with self._lock:
            self._used[name] -= 1
            if not self._used[name]:  # keeps the counter from growing with names that charged nothing
                del self._used[name]

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __repr__(self) -> str:
        return f"Tenants(max_queries={self.max_queries}, memo_size={self.memo_size})"
