"""Counts what a budget's ledger and this process did: for dashboards, and for hooks that warn before a share ends."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any, NamedTuple, Self

from langchain_dpicl.exceptions import PrivacyBudgetExceededError
from langchain_dpicl.privacy._validate import fail
from langchain_dpicl.privacy.extensions.ledger_anchor import AnchoredWriter, OutageWriter
from langchain_dpicl.privacy.ledger.amounts import Amount, exact, round_down, round_up
from langchain_dpicl.privacy.ledger.purse import Grant
from langchain_dpicl.privacy.ledger.state import LedgerState, Slot, allowance, slots
from langchain_dpicl.privacy.ledger.tickets import Component
from langchain_dpicl.privacy.ledger.writer import ShareStatus

logger = logging.getLogger(__name__)

_BIN = 1.02
_SHORTEST = 1e-9


class TicketUse(NamedTuple):
    """The tickets of one component, of all its templates and labels together.

    Attributes:
      left: can still be reserved here.
      held: reserved, and neither committed nor given back: in use, held by another process, or left by one that ended.
      committed: used, with their result stored.
    """

    left: int
    held: int
    committed: int


@dataclass(frozen=True, slots=True)
class BudgetUse:
    """What was spent of a budget, in all processes, and what this process did with it. Public, for the operator.

    Attributes:
      epsilon: limit of the ledger.
      delta: limit of the ledger.
      epsilon_spent: charged for sealed shares.
      delta_spent: as `epsilon_spent`.
      tickets: by component whose share is sealed.
      pools: what is left, in mu squared or rho, by pool whose share is sealed.
      lines: of the ledger.
      waiting_commits: tickets whose commit this process has not written yet, or of which it is not known.
      flushes: how often this process waited for the disk; threads share a wait.
      wait_ms_p50: median time that a reservation of this process took, in milliseconds; None before the first.
      wait_ms_p99: 99th percentile of it.
      refused: reservations of this process that a limit, a share or a tenant's cap refused.
      outages: turns of this process in which the store or the anchor was unavailable.
    """

    epsilon: float
    delta: float
    epsilon_spent: float
    delta_spent: float
    tickets: Mapping[str, TicketUse]
    pools: Mapping[str, float]
    lines: int
    waiting_commits: int
    flushes: int
    wait_ms_p50: float | None
    wait_ms_p99: float | None
    refused: int
    outages: int

    def to_dict(self) -> dict[str, Any]:
        """Returns the use as JSON values."""
        tickets = {name: each._asdict() for name, each in self.tickets.items()}
        return {field.name: getattr(self, field.name) for field in fields(self)} | {"tickets": tickets}

    def ledger_dict(self) -> dict[str, Any]:
        """Returns `to_dict` without what this process counted."""
        return {name: value for name, value in self.to_dict().items() if name not in _OF_PROCESS}


_OF_PROCESS = {"waiting_commits", "flushes", "wait_ms_p50", "wait_ms_p99", "refused", "outages"}


class Waits:
    """Durations in seconds, counted in bins 2 % wide: those of many processes add up in little memory."""

    def __init__(self) -> None:
        self._bins: Counter[int] = Counter()
        self._longest = 0.0

    def add(self, seconds: float) -> None:
        """Counts one duration."""
        self._bins[math.ceil(math.log(max(seconds, _SHORTEST), _BIN))] += 1
        self._longest = max(self._longest, seconds)

    @property
    def count(self) -> int:
        """How many durations there are."""
        return self._bins.total()

    def quantile(self, part: float) -> float:
        """Returns a time that so many of the durations did not exceed, at most 2 % too long; NaN without any."""
        rest = part * self.count
        for number, count in sorted(self._bins.items()):
            rest -= count
            if rest <= 0:
                return min(_BIN**number, self._longest)
        return math.nan

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON form; `merged` reads it."""
        return {"bins": list(self._bins.items()), "longest": self._longest}

    @classmethod
    def merged(cls, parts: Iterable[Mapping[str, Any]]) -> Self:
        """Returns the durations of several processes."""
        whole = cls()
        for part in parts:
            whole._bins.update(dict(part["bins"]))
            whole._longest = max(whole._longest, part["longest"])
        return whole


SpentHook = Callable[[BudgetUse], object]
"""What `on_spent` calls, with the use of the budget."""


@dataclass(frozen=True, slots=True, eq=False)
class _SpentHook:
    part: float
    hook: SpentHook
    component: str | None


class CountingWriter(OutageWriter):
    """Counts the reservations of this process, and calls the hooks of `Budget.on_spent` after one was granted."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._hooks: list[_SpentHook] = []
        self._count_anew()

    def _count_anew(self) -> None:
        self._counts = threading.Lock()
        self._waits = Waits()
        self._refused = self._outages = self.flushes = 0

    def _move_in(self) -> None:
        # Before the child uses them: a thread of the parent may have held the lock while it forked.
        self._count_anew()
        super()._move_in()

    def reserve(self, standing: ShareStatus, component: Component, slot: Slot, **how: Any) -> Grant:
        """Reserves as `LedgerWriter.reserve` does; a hook can neither refuse a reservation nor make it fail."""
        start = time.monotonic()
        try:
            grant = super().reserve(standing, component, slot, **how)
        except PrivacyBudgetExceededError:
            with self._counts:
                self._refused += 1
            raise
        with self._counts:
            self._waits.add(time.monotonic() - start)
        if self._hooks:
            self._call_hooks()
        return grant

    def use(self) -> BudgetUse:
        """Returns the use of the ledger as it stands."""
        self.refresh()  # without the lock: it may wait for the disk
        with self.lock:
            return self._use(self._state)

    def _use(self, state: LedgerState) -> BudgetUse:
        spent = state.spent
        components = [each for share in state.sealed for each in share.terms.components]
        priced = [each for each in components if each.kind == "tickets"]
        pools = [each for each in components if each.kind != "tickets"]
        entries = {*self._waiting, *(entry for each in self._doubtful for entry in each.commits)}
        waiting = {entry: self.waiting(entry) for entry in entries}
        with self._counts:
            p50, p99 = (1e3 * self._waits.quantile(part) if self._waits.count else None for part in (0.5, 0.99))
            return BudgetUse(
                epsilon=self.header.epsilon,
                delta=self.header.delta,
                epsilon_spent=round_up(spent[0]),
                delta_spent=round_up(spent[1]),
                tickets={each.name: self._tickets(state, each, waiting) for each in priced},
                pools={each.name: round_down(self._left(state, each, (each.kind, None))) for each in pools},
                lines=state.seq,
                waiting_commits=sum(waiting.values()),
                flushes=self.flushes,
                wait_ms_p50=p50,
                wait_ms_p99=p99,
                refused=self._refused,
                outages=self._outages,
            )

    def _left(self, state: LedgerState, component: Component, slot: Slot) -> Amount:
        """Returns what can still be reserved here: what is in the purse is charged, and not held by a reservation."""
        left = state.left(component.name, slot)
        # Of a stream: in the window where least is left, which the purse need not touch.
        return left if state.windows is not None else left + self._purse.cost(component.name, slot)

    def _tickets(self, state: LedgerState, component: Component, waiting: Mapping[int, int]) -> TicketUse:
        places = list(slots(component))
        taken = sum(int(state.taken(component.name, slot)) for slot in places)
        left = sum(int(self._left(state, component, slot)) for slot in places)
        held = sum(state.unsettled(component.name, slot) for slot in places)
        in_purse = sum(int(self._purse.cost(component.name, slot)) for slot in places)
        held -= in_purse
        for entry, count in waiting.items():
            if any(state.is_of(entry, component.name, slot) for slot in places):
                held -= count
        return TicketUse(left, held, taken - in_purse - held)

    def tenants(self) -> dict[str, dict[str, int]]:
        """Returns the tickets of each tenant by component, as `Share.used_by` counts them."""
        state, found = self.refresh(), dict[str, dict[str, int]]()
        with self.lock:
            for component, tenant in state.users:
                count = state.used_by(tenant, component) - self._purse.of_tenant(component, tenant)
                found.setdefault(component, {})[tenant] = count
        return found

    def spent_parts(self) -> dict[str | None, float]:
        """Returns which part is charged of the ledger (None) and of each component whose share is sealed."""
        state = self.refresh()
        with self.lock:
            names = [each.name for share in state.sealed for each in share.terms.components]
            return {name: charged_part(state, name) for name in (None, *names)}

    def add_hook(self, part: float, hook: SpentHook, component: str | None) -> None:
        """Adds a hook that is called once."""
        with self._counts:
            self._hooks.append(_SpentHook(part, hook, component))

    def _call_hooks(self) -> None:
        due: list[_SpentHook] = []
        try:
            with self.lock:
                state = self._state
                due = [each for each in self._hooks if charged_part(state, each.component) >= each.part]
                use = self._use(state) if due else None
            for each in due:
                with self._counts:
                    if each not in self._hooks:  # another thread called it
                        continue
                    self._hooks.remove(each)
                if use is not None:
                    _call(each.hook, use)
        except Exception as error:  # noqa: BLE001  the tickets are granted: nothing may keep them from who pays for them
            logger.warning("on_spent: the hooks were not called (%s)", type(error).__name__)


class CountingAnchoredWriter(CountingWriter, AnchoredWriter):
    """A `CountingWriter` of a ledger that has an anchor."""


def _call(hook: SpentHook, use: BudgetUse) -> None:
    try:
        hook(use)
    except Exception as error:  # noqa: BLE001  whatever a hook raises; its message may hold anything
        logger.warning("on_spent: a hook raised %s", type(error).__name__)


def charged_part(state: LedgerState, component: str | None) -> float:
    """Returns which part is charged: of the ledger's limits, or of a component's slot of which least is left."""
    if component is None:
        limits = state.header.epsilon, state.header.delta
        return float(max(spent / exact(limit) for spent, limit in zip(state.spent, limits, strict=True) if limit))
    terms = state.sealed_component(component)
    if terms is None:
        return 0.0
    return float(max(_slot_part(state, terms, slot) for slot in slots(terms)))


def _slot_part(state: LedgerState, component: Component, slot: Slot) -> Fraction:
    allowed = Fraction(allowance(component, slot))
    return 1 - Fraction(state.left(component.name, slot)) / allowed


def check_part(part: Any) -> float:
    """Returns the part at which a hook is called; refuses what is not above 0 and at most 1."""
    if isinstance(part, bool) or not isinstance(part, (int, float)) or not 0.0 < part <= 1.0:
        raise fail("part", "a number above 0 and at most 1, such as 0.8", part)
    return float(part)
