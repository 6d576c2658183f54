"""Adds joint plans, pools, anchors and reports to the budget of a ledger, and counts what it and its process did."""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from datetime import UTC, date, datetime, timedelta
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from langchain_dpicl._calls import warn_caller
from langchain_dpicl._construction import tells_how_to_build
from langchain_dpicl.backends.private_calls.method_checks import allowed_wrappers
from langchain_dpicl.exceptions import LedgerError, PrivacyBudgetExceededError
from langchain_dpicl.privacy._validate import (
    Adjacency,
    Amount,
    check_epsilon,
    check_flag,
    check_int,
    check_name,
    check_real,
    exact,
    fail,
    round_down,
    round_up,
)
from langchain_dpicl.privacy.extensions.durable_writer import MOST_HELD, OutageWriter
from langchain_dpicl.privacy.extensions.joint_plans import (
    GdpPool,
    JointPlan,
    PlannedPromises,
    ZCdpPool,
    as_pool,
    open_plan,
)
from langchain_dpicl.privacy.extensions.ledger_anchor import (
    AnchoredWriter,
    LedgerAnchor,
    check_anchor,
    write_anchor,
)
from langchain_dpicl.privacy.extensions.stream_ledger import LAST_BLOCK, retire
from langchain_dpicl.privacy.ledger.budget import LedgerBudget, check_store
from langchain_dpicl.privacy.ledger.state import LedgerState, OpenReservation, Slot, allowance, slots
from langchain_dpicl.privacy.ledger.store import LIFE, LedgerHeader, LedgerRecord, LedgerStore
from langchain_dpicl.privacy.ledger.tickets import Component, Extent, Kind
from langchain_dpicl.privacy.ledger.writer import Grant, LedgerWriter, ShareStatus, process_name
from langchain_dpicl.stores import check_apart

if TYPE_CHECKING:  # what reports need is loaded when one is asked for: it takes a fifth of the time of an import
    from langchain_dpicl.reports.report import PrivacyReport


logger = logging.getLogger(__name__)

_BIN = 1.02
_SHORTEST = 1e-9


class TicketUse(NamedTuple):
    """The tickets of one component, of all its templates and labels together.

    Attributes:
      left: can still be reserved here; of a share of a stream that is not over: where least is left, over all windows
        that are not over.
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
      epsilon_spent: charged for sealed shares; of a stream: the most over all windows that are not over.
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
        spent = state.promised(_to_come(state.header))
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
        left = _left(state, component, slot)
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
    """Returns which part is charged: of the ledger's limits, or of a component's slot of which least is left.

    0 of a retired component, which nobody waits for.
    """
    if component is None:
        limits, spent = (state.header.epsilon, state.header.delta), state.promised(_to_come(state.header))
        return float(max(each / exact(limit) for each, limit in zip(spent, limits, strict=True) if limit))
    terms = state.sealed_component(component)
    if terms is None or (state.windows is not None and state.windows.is_retired(component)):
        return 0.0
    # A ticket that is taken once for all others, as retrieval's is, says nothing of how many are left.
    several = [slot for slot in slots(terms) if allowance(terms, slot) > 1]
    return float(max(_slot_part(state, terms, slot) for slot in several or slots(terms)))


def _slot_part(state: LedgerState, component: Component, slot: Slot) -> Fraction:
    allowed = Fraction(allowance(component, slot))
    return 1 - Fraction(_left(state, component, slot)) / allowed


def _left(state: LedgerState, component: Component, slot: Slot) -> Amount:
    """Returns what a slot has left; of a share of a stream that is not over: in the windows that are not over."""
    windows, to_come = state.windows, _to_come(state.header)
    # What a share has used whose windows are all over never comes back.
    is_over = windows is None or component.extent is None or not windows.meet(component.extent, to_come)
    return state.left(component.name, slot, None if is_over else to_come)


def _to_come(header: LedgerHeader) -> Extent | None:
    """Returns the blocks of a stream from the present one on: the windows that touch them are not over."""
    return None if header.stream is None else header.stream.to_come()


@tells_how_to_build("Budget(epsilon=..., delta=1e-6), with delta at most 1/(10 * public_size)")
class Budget(LedgerBudget):
    """The privacy budget of all examples bound to one ledger.

    Formal guarantees:
      - The epsilons of all shares never add to more than `epsilon`, nor their deltas to more than `delta`, in this
        and every other process on the ledger; each share's charge is an upper bound of what its tickets can release.
      - Hence everything released is (epsilon, delta)-DP under `adjacency` for one unit, by basic composition, which
        stays valid when components, their parameters and their order are chosen from earlier releases.
      - Nothing is granted if the ledger cannot be read, verified or written, or does not match its anchor.

    Args:
      epsilon: limit for the ledger's whole life.
      delta: limit for the ledger's whole life; at most 1/(10 * public_size) of every data set bound.
      adjacency: the one neighbouring relation of everything on this ledger.
      store: where the ledger lives; None: in memory, until this process ends. A store that was opened rather than
        created has to hold a ledger.
      name: public name for reports.
      per: "life", or the windows that the promise is for, in hours, days or weeks of the records' own time, such as
        "30 days": then only a `PrivateStream` can be charged. It never changes.
      about: public texts for those who approve the ledger, by name: `purpose`, `owner`, `approver`, `retention`, and
        `countries`, a mapping from the hosts that receive private text to their countries. Reports show them. Nothing
        checks them, and they never change.
      anchor: a second store of the ledger's last line, not in its database, which detects an older copy of the ledger.
      adopt_anchor: accept an anchor that does not know the ledger, which is otherwise refused. Use it once, to add one.
      most_held: on a durable ledger, most tickets of one kind that this process charges before they are asked for, so
        that not every query waits for the disk. They are lost if it is killed. 1: none.

    Raises:
      ConfigurationError: an argument is out of range, or a `PostgresAnchor` is in the ledger's own database.
      PrivacyBudgetMismatchError: the store holds a ledger with other limits.
      LedgerError: the ledger is broken, cannot be read, or does not match the anchor.

    Source: basic composition as a filter: Rogers et al. (2016); concurrent: Haney et al. (2023).

    Example:
      >>> budget = Budget(epsilon=4.0, delta=1e-6)
      >>> budget.remaining_epsilon
      4.0
    """

    _desk: CountingWriter
    _promises: PlannedPromises

    def __init__(
        self,
        *,
        epsilon: float,
        delta: float,
        adjacency: Adjacency = "add_remove",
        store: LedgerStore | None = None,
        name: str = "budget",
        per: str = LIFE,
        about: Mapping[str, Any] | None = None,
        anchor: LedgerAnchor | None = None,
        adopt_anchor: bool = False,
        most_held: int = MOST_HELD,
    ) -> None:
        self._anchor, self._adopts = check_anchor(anchor), check_flag("adopt_anchor", adopt_anchor)
        self._most_held = check_int("most_held", most_held, low=1)
        limits: dict[str, Any] = {"epsilon": epsilon, "delta": delta, "adjacency": adjacency, "per": per}
        super().__init__(**limits, store=store, name=name, about=about)

    def _created(self, wanted: LedgerHeader) -> LedgerHeader:
        self._check_apart()
        # Write the anchor first: a ledger unknown to its anchor is refused when it is opened.
        if self._anchor is not None:
            write_anchor(self._anchor, wanted.ledger_id, (0, wanted.digest))
        return super()._created(wanted)

    def _check_apart(self) -> None:
        check_apart(lambda: self._store, lambda: self._anchor)

    def _opened(self, header: LedgerHeader) -> CountingWriter:
        self._check_apart()
        how: dict[str, Any] = {"allowed_wrappers": allowed_wrappers, "most_held": self._most_held}
        if self._anchor is None:
            desk = CountingWriter(self._store, header, **how)
            desk.refresh()
            return desk
        anchored = CountingAnchoredWriter(self._store, header, self._anchor, **how)
        anchored.open(adopt_anchor=self._adopts)
        return anchored

    def _declared(self, desk: LedgerWriter) -> PlannedPromises:
        return PlannedPromises(desk)

    @classmethod
    def open(
        cls,
        store: LedgerStore,
        *,
        anchor: LedgerAnchor | None = None,
        adopt_anchor: bool = False,
        most_held: int = MOST_HELD,
    ) -> Self:
        """Opens the ledger that a store holds, with its own limits.

        Args:
          store: holds a ledger already.
          anchor: a second store of the ledger's last line.
          adopt_anchor: accept an anchor that does not know the ledger, which is otherwise refused.
          most_held: most tickets of one kind that this process charges before they are asked for.

        Raises:
          LedgerError: the store holds no ledger, or a broken one.
          LedgerRollbackError: the anchor does not know the ledger, or holds a line that the ledger lacks.
          ConfigurationError: `store` or `anchor` is of another type, or in one database, or `most_held` is below 1.
        """
        header = check_store(store).header()
        if header is None:
            msg = "store: expected a ledger, found none. Make one: PrivacyBudgetCallbackHandler.create(path, epsilon=,"
            raise LedgerError(f"{msg} delta=), or Budget(epsilon=, delta=, store=) with a store just made.")
        return cls(
            epsilon=header.epsilon,
            delta=header.delta,
            adjacency=header.adjacency,
            store=store,
            name=header.name,
            per=LIFE if header.stream is None else header.stream.words,
            anchor=anchor,
            adopt_anchor=adopt_anchor,
            most_held=most_held,
        )

    @property
    def about(self) -> dict[str, Any]:
        """What the owners declared of the ledger when they made it; nothing changes it, or checks it."""
        about = self._desk.header.about
        return {} if about is None else about.to_dict()

    @property
    def remaining_epsilon(self) -> float:
        """Epsilon not yet promised to a share, sealed by any process or declared in this one.

        Of a stream: the least over all windows that are not over.
        """
        return round_down(self._promises.room(extent=_to_come(self._desk.header))[0])

    @property
    def remaining_delta(self) -> float:
        """Delta not yet promised to a share; of a stream as `remaining_epsilon`."""
        return round_down(self._promises.room(extent=_to_come(self._desk.header))[1])

    def verify(self) -> None:
        """Recomputes the ledger's whole chain and every rule, and compares it with the anchor, if there is one.

        Raises:
          LedgerError: a line was changed, dropped or breaks a rule.
          LedgerRollbackError: a line that was read before, or that the anchor knows, is missing or changed.
        """
        self._desk.verify()

    def check_fits(self, component: str, *, epsilon: float, delta: float, extent: Extent | None = None) -> None:
        """Refuses a new share that cannot fit; inside `plan()` it is checked when the plan ends."""
        if self._promises.open_plan is None:
            super().check_fits(component, epsilon=epsilon, delta=delta, extent=extent)

    def fresh_name(self, prefix: str) -> str:
        """Returns the first of `prefix`, `prefix-2`, ... that no component uses.

        On a ledger that outlives the process, warns where an earlier process used `prefix`.

        Args:
          prefix: what the name starts with.

        Raises:
          ConfigurationError: the prefix is no public name.
        """
        name = self._promises.fresh_name(check_name("prefix", prefix))
        if name != prefix and self.durable and prefix not in self._promises.names():
            said = f"{prefix!r} is a share by an earlier process; {name!r} is a new one, at a further charge"
            warn_caller(UserWarning(f"{said}. To go on with a share after a restart, give component= a name."))
        return name

    def remaining_at(self, day: str | date) -> tuple[float, float]:
        """Returns the epsilon and the delta that every window with a day has left: what a dated share of it may cost.

        Args:
          day: as ISO 8601 text or as a date, in UTC; of the records' time.

        Raises:
          ConfigurationError: it is no day from 2001 on, or this budget's promise is for life.
        """
        stream = self._desk.header.stream
        if stream is None:
            advice = "Of a budget for life take remaining_epsilon and remaining_delta."
            raise fail("budget", "one whose promise is for windows of a stream", f"per={self.per!r}", advice)
        first, last = stream.blocks_of("day", day)
        if not 0 <= first <= last <= LAST_BLOCK:
            raise fail("day", "a day from 2001 on", str(day))
        epsilon, delta = self._promises.room(extent=(first, last))
        return round_down(epsilon), round_down(delta)

    def retire(self, component: str) -> None:
        """Ends a component of a stream: it releases no more, and its price leaves the windows that it has not read.

        Windows with a block that it reserved keep its price for good. Again changes nothing.

        Args:
          component: public name of its share.

        Raises:
          SealedShareError: it is no component of a stream that has reserved a ticket.
          ConfigurationError: it is no public name.
        """
        retire(self._desk, check_name("component", component))

    def plan(self, *, epsilon: float | None = None, delta: float | None = None) -> AbstractContextManager[JointPlan]:
        """Opens a joint plan: components declared inside the block are composed together and cost less.

        On a clean exit the joint cost becomes one share; components can reserve from then on. An exception
        declares nothing. Components that other threads declare are not part of it.

        Args:
          epsilon: the joint share; None: what it costs.
          delta: the joint delta; None: in proportion to the joint epsilon, at most the sum of the components'.

        Raises:
          ConfigurationError: a plan inside a plan, or an argument out of range.
          PrivacyBudgetExceededError: the joint share does not fit.
        """
        return open_plan(self._promises, epsilon=epsilon, delta=delta)

    def gdp_pool(
        self, component: str, *, epsilon: float, delta: float | None = None, implementation_delta: float = 0.0
    ) -> GdpPool:
        """Reserves a share for unsampled Gaussian releases with adaptively chosen noise.

        Args:
          component: public name, one per share.
          epsilon: the share; it fixes the pool's mu at `delta - implementation_delta`.
          delta: None: `default_delta(epsilon)`.
          implementation_delta: declared gap between ideal and drawn noise over all releases.

        Raises:
          ConfigurationError: inside an open plan, or an argument out of range.
          PrivacyBudgetExceededError: the share does not fit.
          SealedShareError: the name is sealed with other terms.
        """
        pool = self._make_pool(component, "gdp", epsilon, delta, implementation_delta)
        return GdpPool(self._desk, pool, self._promises.admit(pool))

    def zcdp_pool(
        self, component: str, *, epsilon: float, delta: float | None = None, implementation_delta: float = 0.0
    ) -> ZCdpPool:
        """Reserves a share for unsampled zCDP releases with adaptively chosen parameters.

        Args:
          component: public name, one per share.
          epsilon: the share; it fixes the pool's rho at `delta - implementation_delta`.
          delta: None: `default_delta(epsilon)`.
          implementation_delta: declared gap between ideal and drawn noise over all releases.

        Raises:
          ConfigurationError: inside an open plan, or an argument out of range.
          PrivacyBudgetExceededError: the share does not fit.
          SealedShareError: the name is sealed with other terms.
        """
        pool = self._make_pool(component, "zcdp", epsilon, delta, implementation_delta)
        return ZCdpPool(self._desk, pool, self._promises.admit(pool))

    def report(self) -> PrivacyReport:
        """Returns the report of all shares, from public values only; `verify_report` recomputes it."""
        return self._report_at(self._desk.refresh)

    def _last_report(self, component: str) -> PrivacyReport:
        """Returns `report` as of what this process read last: in an outage, for what the component released."""
        return self._report_at(self._desk.last_read, component)

    def _report_at(self, read: Callable[[], LedgerState], paid: str | None = None) -> PrivacyReport:
        from langchain_dpicl.reports.report import PrivacyReport, ShareEntry

        with self._desk.lock:
            state = read()
            sealed = [ShareEntry(share.terms, share.stamp) for share in state.sealed]
            pending = [ShareEntry(terms, None) for terms in self._promises.pending(state, first=paid)]
            wrappers = sorted({*state.allowed_wrappers, *allowed_wrappers()})
            shares = [*sealed, *pending]
            return PrivacyReport.build(
                self._desk.header, self._store, state.bindings, shares, wrappers, windows=state.windows
            )

    def check_receipt(self, receipt: Any) -> None:
        """Compares a receipt with the ledger, which must hold the receipt's line unchanged.

        Two receipts of one ledger and entry with different hashes prove that two copies of the ledger were used; two of
        one ledger, entry and index that two copies of a process were.

        Args:
          receipt: a `Receipt`, a `Reservation`, or anything with (or a dict of) `ledger_id`, `entry`, `entry_hash` and
            `index`. Without an entry nothing was charged, and only the ledger is compared; a hash or an index that is
            missing is not compared.

        Raises:
          ConfigurationError: it is of another type.
          PrivacyBudgetMismatchError: it names another ledger.
          LedgerRollbackError: the line is missing, another, or reserved fewer tickets: an older copy replaced the
            ledger.
        """
        from langchain_dpicl.reports.verify import check_receipt

        check_receipt(receipt, self._desk.header, self._store, lambda: self._desk.refresh().seq)

    def dangling(
        self, *, after: int = 0, limit: int = 1000, older_than: timedelta | None = None
    ) -> tuple[OpenReservation, ...]:
        """Returns the reservations with tickets neither committed nor given back, in order. For the operator.

        They count as spent. Some are in use, in this or another process, or held by another one; the others were left
        by a crash, a failure, or a block that was charged more than it released. What this process holds for later is
        left out. Reports leave all of them out, because they tell when a model failed.

        Args:
          after: number of a line; only later ones are returned. Pass the last `entry` of a page to get the next.
          limit: at most so many.
          older_than: only those that were reserved so long ago, by the time stamps of their lines.

        Raises:
          ConfigurationError: an argument is out of range.
        """
        check_int("after", after, low=0)
        check_int("limit", limit, low=1)
        if older_than is not None and not isinstance(older_than, timedelta):
            raise fail("older_than", "a timedelta, or None", type(older_than).__name__)
        with self._desk.lock:
            opened = self._desk.refresh().open_reservations(after)
            kept = self._desk.kept()
            page = (self._with_holder(each, kept) for each in opened if _is_older(each.stamp, older_than))
            return tuple(itertools.islice((each for each in page if each.count), limit))

    def _with_holder(self, opened: OpenReservation, kept: Mapping[int, int]) -> OpenReservation:
        """Returns what is open without the commits that wait here and `kept`, and whether this process holds it."""
        count = opened.count - self._desk.waiting(opened.entry) - kept.get(opened.entry, 0)
        mine = opened.holder == process_name() if self.durable else True
        return replace(opened, count=count, mine=mine)

    def check_ready(self) -> None:
        """Reads the ledger and its anchor, without which nothing is granted; whether they can be written shows later.

        Raises:
          LedgerError: one of them cannot be read, or they do not fit.
        """
        self._desk.check_ready()

    def use(self) -> BudgetUse:
        """Returns what is spent, left and open in all processes, and what this process did, in time O(components).

        Raises:
          LedgerError: the ledger cannot be read.
        """
        return self._desk.use()

    def lines(self, *, after: int = 0) -> Sequence[LedgerRecord]:
        """Returns the lines behind a number, in order; public.

        Args:
          after: number of a line; 0: from the first on.

        Raises:
          ConfigurationError: `after` is below 0, or no whole number.
          LedgerError: they cannot be read.
        """
        check_int("after", after, low=0)
        return self._store.records(after)

    def tenants(self) -> dict[str, dict[str, int]]:
        """Returns how many tickets each tenant has reserved or used, by component and tenant; "": without a tenant.

        Raises:
          LedgerError: the ledger cannot be read.
        """
        return self._desk.tenants()

    def spent_parts(self) -> dict[str | None, float]:
        """Returns which part is charged of the whole ledger (None), and of each component; as `on_spent` counts it.

        Raises:
          LedgerError: the ledger cannot be read.
        """
        return self._desk.spent_parts()

    def on_spent(self, part: float, hook: SpentHook, *, component: str | None = None) -> None:
        """Calls a hook once, as soon as a part of the budget is charged; it warns, and guards nothing.

        The hook is called in the thread of the reservation of this process that finds so much charged, by any process,
        after its tickets were granted. What it raises is logged by type.

        Args:
          part: above 0, at most 1. Of the ledger's epsilon or delta, whichever is further; of a component: of the
            tickets of that template and label of which least is left, or of the pool; a single ticket beside others of
            which there are several does not count. Of a stream as in `BudgetUse`.
          hook: is called with the use of the budget.
          component: public name of a share, declared here or sealed by any process; None: the whole ledger.

        Raises:
          ConfigurationError: an argument is out of range, or no such component is known.
        """
        check_real("part", part, low=0.0, high=1.0, low_open=True)
        if not callable(hook):
            raise fail("hook", "something to call with a BudgetUse", type(hook).__name__)
        if component is not None and component not in {*self._desk.refresh().shares, *self._promises.names()}:
            advice = "Declare it first, or build its component."
            raise fail("component", "a component of this ledger", component, advice)
        self._desk.add_hook(part, hook, component)

    def settle(self) -> None:
        """Writes the commits that wait for the next line of this process.

        Raises:
          LedgerError: they cannot be written now; they go on waiting.
        """
        self._desk.write_waiting()

    def close(self) -> None:
        """Writes the commits that wait, gives back what this process holds, and closes the store, if it can be closed.

        Nothing of a ledger in a file or database can be used afterwards; one in memory has nothing to close.
        """
        close = getattr(self._store, "close", None)
        try:
            self._desk.write_waiting(is_closing=True)
        finally:
            if close is not None:
                close()

    def _repr_html_(self) -> str:
        from langchain_dpicl.options import html_table
        from langchain_dpicl.reports.rendering import about_rows, format_rounded_down, format_rounded_up

        limit = f"{format_rounded_up(self.epsilon)}, delta {format_rounded_up(self.delta)}"
        left = f"{format_rounded_down(self.remaining_epsilon)}, delta {format_rounded_down(self.remaining_delta)}"
        shown = {
            "limit": f"epsilon {limit}, for {self.per}",
            "left": f"epsilon {left}",
            "adjacency": self.adjacency,
            "ledger": self._store.description,
        }
        for share in self.report().shares:
            names = ", ".join(component.name for component in share.terms.components)
            state = "" if share.sealed_at else ", declared, not begun"
            shown[f"share of {names}"] = f"epsilon {format_rounded_up(share.terms.epsilon)}{state}"
        return html_table(f"{type(self).__name__} {self.name}", {**dict(about_rows(self.about)), **shown})

    def _make_pool(self, name: str, kind: Kind, epsilon: float, delta: float | None, gap: float) -> Component:
        at = self._delta_for(check_epsilon(epsilon), delta)
        return as_pool(Component(name=name, kind=kind, epsilon=epsilon, delta=at, implementation_delta=gap))


def _is_older(stamp: str, age: timedelta | None) -> bool:
    """Returns whether a line was written so long ago; true where its stamp is no time, so that nobody overlooks it."""
    if age is None:
        return True
    try:
        written = datetime.fromisoformat(stamp)
    except ValueError:
        return True
    return written.tzinfo is None or datetime.now(UTC) - written >= age
