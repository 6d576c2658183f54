"""Who asks: caps per tenant, and what each tenant was told before. Knows no budget, no record and no model.

A tenant is a name in `config["configurable"]`. Its cap only ever refuses: what a data set may release is the ledger's
word, whatever names callers give themselves. The ledger counts the tickets of each tenant too, over all processes;
what is counted here is what is under way, and refuses sooner. What is remembered is released, hence public, and dies
with the process; `_query_memo` keeps it for longer.
"""

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
        id=TENANT, annotation=str, default="", name="Tenant", description="Who asks; memo and caps are per tenant."
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
    """Who asks, and how many charged queries that one may have; None: as many as the ledger allows."""

    name: str
    cap: int | None

    @property
    def known_as(self) -> str | None:
        """What the ledger calls it: None for nobody in particular, whom it counts all the same."""
        return self.name or None


class Seat:
    """A place among a tenant's charged queries; kept unless it is known that nothing was charged."""

    __slots__ = ("charged",)

    def __init__(self) -> None:
        self.charged = True


class Tenants:
    """Caps and memos by tenant; shared by all copies of one component, so a copy is the thing itself.

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
        self._nobody = Tenant("", self.max_queries)
        self._lock = threading.Lock()
        self._used: Counter[str] = Counter()
        self._turns: dict[tuple[str, Hashable], tuple[Gate, int]] = {}
        self._told: OrderedDict[str, OrderedDict[Hashable, Any]] = OrderedDict()

    def of(self, config: Mapping[str, Any]) -> Tenant:
        """Returns who asks, by the run's config.

        Raises:
          ConfigurationError: the name is no short text, or the cap no whole number.
        """
        given = config.get("configurable")
        if not given:
            return self._nobody
        name, cap = given.get(TENANT), given.get(TENANT_CAP)
        name = "" if name is None else name
        if not isinstance(name, str) or len(name) > _MOST_NAME:
            raise fail(TENANT, f"a text of at most {_MOST_NAME} characters", type(name).__name__)
        if not is_written(name):
            raise fail(TENANT, "a text that can be written as UTF-8", "half of a character", "Decode the name anew.")
        caps = [self.max_queries, None if cap is None else check_int(TENANT_CAP, cap, low=0)]
        return Tenant(name, min((limit for limit in caps if limit is not None), default=None))

    def refuse_beyond_cap(self, tenant: Tenant) -> None:
        """Does nothing where the tenant may take a seat now.

        Raises:
          TenantCapExceededError: the tenant's cap is reached.
        """
        if tenant.cap is not None and self.used(tenant.name) >= tenant.cap:
            msg = f"tenant {tenant.name!r}: requested 1 query, remaining 0 of {tenant.cap} in this process."
            raise TenantCapExceededError(msg + " Raise the tenant's cap.", requested=1, remaining=0)

    @contextmanager
    def seat(self, tenant: Tenant) -> Iterator[Seat]:
        """Takes a place among the tenant's queries for the block.

        Raises:
          TenantCapExceededError: the tenant's cap is reached; nothing was charged.
        """
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

    @contextmanager
    def turn(self, tenant: Tenant, key: Hashable) -> Iterator[Gate | None]:
        """Holds one gate for all who ask the same at the same time, so that the others are told what the first was.

        The gate is made here, and entered by whoever asks; None without a memo.
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
            if not self._used[name]:
                del self._used[name]

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __repr__(self) -> str:
        return f"Tenants(max_queries={self.max_queries}, memo_size={self.memo_size})"
