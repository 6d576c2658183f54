"""Caps queries by tenant, and keeps released answers in memory or in a memo that outlives the process."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from langchain_core.runnables import ConfigurableFieldSpec

from langchain_dpicl._opaque import CopiedAsItself, PerProcess
from langchain_dpicl.backends.private_calls.call import unwrap
from langchain_dpicl.backends.sync_async import Call, EffectGenerator, FairSemaphore, is_in_loop
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.exceptions import ConfigurationError, DPICLError, MemoError, TenantCapExceededError
from langchain_dpicl.privacy._validate import check_int, check_written, fail
from langchain_dpicl.privacy.ledger.shares import Share
from langchain_dpicl.privacy.ledger.tickets import Blocks
from langchain_dpicl.stores import memo_at
from langchain_dpicl.stores.memos import MemoKey, ReleaseMemo, query_of, scope_of, tenant_of
from langchain_dpicl.tasks import Query

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
    def ledger_name(self) -> str | None:
        """The name in the ledger; None for queries without a tenant, which are counted too."""
        return self.name or None


@dataclass(slots=True)
class TenantSlot:
    """One of a tenant's charged queries; `charged` stays True unless it is known that nothing was."""

    charged: bool = True


_NO_GATE = nullcontext()


class TenantRegistry(CopiedAsItself):
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
        self._lock = PerProcess(threading.Lock)
        self._used: Counter[str] = Counter()
        self._threads: PerProcess[WeakKeyDictionary[Any, ThreadPoolExecutor]] = PerProcess(WeakKeyDictionary)
        self._turns: PerProcess[dict[tuple[str, Hashable], tuple[FairSemaphore, int]]] = PerProcess(dict)
        self._told: OrderedDict[str, OrderedDict[Hashable, Any]] = OrderedDict()

    def threads_here(self) -> ThreadPoolExecutor:
        """Returns threads for what awaited answers hand to those of the running event loop: as many as its own.

        Equal queries may wait for their turn in all of its own. Another loop has others, as it would of its own.
        """
        loop, pools = asyncio.get_running_loop(), self._threads.here
        with self._lock.here:
            if (pool := pools.get(loop)) is None:
                pool = pools[loop] = ThreadPoolExecutor(thread_name_prefix="dpicl-public")
            return pool

    def of(self, config: Mapping[str, Any]) -> Tenant:
        """Returns the tenant that a run's config names."""
        configurable = config.get("configurable")
        if not configurable:
            return self._nobody
        name, cap = configurable.get(TENANT), configurable.get(TENANT_CAP)
        name = "" if name is None else name
        if not isinstance(name, str) or len(name) > _MOST_NAME:
            raise fail(TENANT, f"a text of at most {_MOST_NAME} characters", type(name).__name__)
        check_written(TENANT, name)
        caps = [self.max_queries, None if cap is None else check_int(TENANT_CAP, cap, low=0)]
        return Tenant(name, min((limit for limit in caps if limit is not None), default=None))

    def refuse_beyond_cap(self, tenant: Tenant) -> None:
        """Raises if the tenant's cap is reached."""
        if tenant.cap is not None and self.used(tenant.name) >= tenant.cap:
            msg = f"tenant {tenant.name!r}: requested 1 query, remaining 0 of {tenant.cap} in this process."
            raise TenantCapExceededError(msg + " Raise the tenant's cap.", requested=1, remaining=0)

    def of_run(self) -> TenantRegistry:
        """Returns a registry without cached answers, whose tenants have the caps and counts of this one."""
        other = TenantRegistry(max_queries=self.max_queries, memo_size=self.memo_size)
        other._lock, other._used = self._lock, self._used
        return other

    @contextmanager
    def seat(self, tenant: Tenant) -> Iterator[TenantSlot]:
        """Takes a seat of the tenant; gives it back only if the block says that nothing was charged."""
        with self._lock.here:
            self.refuse_beyond_cap(tenant)
            self._used[tenant.name] += 1
        slot = TenantSlot()
        try:
            yield slot
        finally:
            if not slot.charged:
                with self._lock.here:
                    self._used[tenant.name] -= 1
                    if not self._used[tenant.name]:  # keeps the counter from growing with names that charged nothing
                        del self._used[tenant.name]

    def used(self, name: str) -> int:
        """Returns the number of a tenant's queries that were charged or are running."""
        return self._used.get(name, 0)

    def recall(self, tenant: Tenant, key: Hashable) -> Any:
        """Returns the tenant's cached outcome, or None."""
        with self._lock.here:
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
        with self._lock.here:
            memo = self._told.setdefault(tenant.name, OrderedDict())
            self._told.move_to_end(tenant.name)
            memo[key] = outcome
            memo.move_to_end(key)
            if len(memo) > self.memo_size:
                memo.popitem(last=False)
            # Names come from callers: without this bound they could fill the memory.
            if len(self._told) > _MOST_TENANTS:
                self._told.popitem(last=False)

    def turn(self, tenant: Tenant, key: Hashable) -> AbstractContextManager[FairSemaphore | None]:
        """Yields the gate that concurrent equal queries share, so that one is charged and the others read the cache.

        The caller enters the gate; None without a cache.
        """
        if not self.memo_size:
            return _NO_GATE
        return self._turn((tenant.name, key))

    @contextmanager
    def _turn(self, place: tuple[str, Hashable]) -> Iterator[FairSemaphore | None]:
        turns = self._turns.here
        with self._lock.here:
            gate, asking = turns.get(place, (None, 0))
            gate = FairSemaphore(1) if gate is None else gate
            turns[place] = (gate, asking + 1)
        try:
            yield gate
        finally:
            with self._lock.here:
                asking = turns[place][1] - 1
                turns[place] = (gate, asking)
                if not asking:
                    del turns[place]

    def __repr__(self) -> str:
        return f"TenantRegistry(max_queries={self.max_queries}, memo_size={self.memo_size})"


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


class _StoredOutcome(NamedTuple):
    """An outcome as text, and the stored text that it replaces."""

    text: str
    instead_of: str | None


def _pause(seconds: float) -> bool:
    """Sleeps and returns whether it did; not below a running event loop, which would be blocked as well."""
    if is_in_loop():
        return False
    time.sleep(seconds)
    return True


class AnswerMemo(CopiedAsItself):
    """The cache of one component's answers in a memo that outlives the process.

    Formal guarantees:
      - The key of an answer is ledger, data set, component, public parameters of the plan, tenant, query and run.
      - `keep` returns when the answer is stored. If the memo fails, the answer stays in this process and is written,
        before it is returned, when the query is asked again. None is dropped: with 256 such answers, new queries are
        refused before they are charged.
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
        self._run: Query = ()
        self._packed = packed
        self._unpacked = unpacked
        self._unsaved: dict[tuple[str, Query], _StoredOutcome] = {}
        self._lock = PerProcess(threading.Lock)

    def of_run(self, blocks: Blocks) -> AnswerMemo:
        """Returns the cache of the answers of one run on a stream, whose keys hold its blocks.

        They do so beside the query: of all runs of a component a memo keeps as many answers as of one. An answer that
        could not be stored is kept as long as its run.
        """
        other = AnswerMemo(self._memo, scope={}, packed=self._packed, unpacked=self._unpacked)
        other._scope, other._run = self._scope, tuple(map(str, blocks))
        return other

    def recall(self, tenant: Tenant, query: Query) -> Any:
        """Returns the outcome that any process stored for the tenant's query, or None."""
        key = self._key(tenant.name, query)
        with self._lock.here:
            waiting = self._unsaved.get((tenant.name, query))
        if waiting is not None:
            self._save(tenant, query, waiting)
        text = self._ask_memo(lambda: self._memo.recall(key))
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
        entry = _StoredOutcome(self._text(outcome), None if instead_of is None else self._text(instead_of))
        self._hold(tenant, query, entry)  # first: writing may fail, and the answer is paid for
        self._save(tenant, query, entry)

    def _text(self, outcome: Any) -> str:
        return json.dumps(self._packed(outcome), ensure_ascii=True)

    def _hold(self, tenant: Tenant, query: Query, entry: _StoredOutcome) -> None:
        with self._lock.here:
            self._unsaved[tenant.name, query] = entry

    def _save(self, tenant: Tenant, query: Query, entry: _StoredOutcome) -> None:
        failed = self._written(tenant.name, query, entry)
        if failed:
            raise MemoError(
                f"{failed} The release stays charged and is kept: asking again, as the same tenant and in this "
                "process, returns it for free once the memo can be written."
            )

    def _written(self, name: str, query: Query, entry: _StoredOutcome) -> str:
        """Writes an unsaved answer; returns the fault, or ""."""
        try:
            key = self._key(name, query)
            self._ask_memo(lambda: self._memo.remember(key, entry.text, instead_of=entry.instead_of))
        except MemoError as error:
            return str(error)
        with self._lock.here:
            # Another thread may have replaced the entry while this one was written.
            if self._unsaved.get((name, query)) == entry:
                del self._unsaved[name, query]
        return ""

    def _make_room(self) -> None:
        """Refuses a new query while too many paid answers cannot be written."""
        with self._lock.here:
            waiting = list(self._unsaved.items()) if len(self._unsaved) >= _MOST_UNSAVED else []
        for (name, query), entry in waiting:
            if failed := self._written(name, query, entry):
                raise MemoError(
                    f"{failed} {len(waiting)} paid answers wait in this process to be written; nothing was charged for "
                    "this query. Ask again once the memo can be written."
                )

    def turn(self, tenant: Tenant, recalled: Callable[[], Any], query: Query) -> EffectGenerator[str | None]:
        """Waits until no other process is answering the same (an effect generator)."""
        key, holder, pause = self._key(tenant.name, query), secrets.token_hex(8), _FIRST_PAUSE
        while recalled() is None:
            self._make_room()
            if self._ask_memo(lambda: self._memo.claim(key, holder)):
                return holder
            if not (yield Call(partial(_pause, pause), partial(asyncio.sleep, pause, result=True))):
                return None
            pause = min(2 * pause, _LONGEST_PAUSE)
        return None

    def leave(self, tenant: Tenant, query: Query, holder: str) -> None:
        """Ends a turn; if the memo fails, the turn expires, and the answer is stored in any case."""
        try:
            self._ask_memo(lambda: self._memo.leave(self._key(tenant.name, query), holder))
        except MemoError as error:
            logger.warning("%s The turn of a query expires by itself.", error)

    def _key(self, name: str, query: Query) -> MemoKey:
        return MemoKey(self._scope, tenant_of(name), query_of((*query, *self._run)))

    def _ask_memo(self, action: Callable[[], T]) -> T:
        """Calls the memo; of foreign errors only the class is reported, as their text may contain a password."""
        try:
            return action()
        except DPICLError:
            raise
        except Exception as error:  # noqa: BLE001  whatever a memo that is not ours raises
            kind = type(error).__name__
        raise MemoError(f"memo {self.description}: expected a memo that works, found {kind}. Try again later.")

    def __repr__(self) -> str:
        return f"AnswerMemo({self.description})"


def open_memo(memo_or_path: Any, *, budget: Budget, memo_size: int, component: str | None) -> ReleaseMemo | None:
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
