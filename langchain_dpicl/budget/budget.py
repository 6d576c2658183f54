"""The budget that users hold: a ledger's budget with joint plans, pools, an anchor and reports."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Self

from langchain_dpicl._wrapper_rules import allowed_wrappers
from langchain_dpicl.exceptions import LedgerError
from langchain_dpicl.privacy._validate import Adjacency, check_epsilon
from langchain_dpicl.privacy.amounts import check_name
from langchain_dpicl.privacy.desk import Desk
from langchain_dpicl.privacy.extensions.adaptive_pools import GdpPool, ZCdpPool, as_pool
from langchain_dpicl.privacy.extensions.joint_plans import JointPlan, PlannedPromises, open_plan
from langchain_dpicl.privacy.extensions.ledger_anchor import AnchoredWriter, LedgerAnchor, check_anchor, write_anchor
from langchain_dpicl.privacy.extensions.ledger_outages import OutageWriter
from langchain_dpicl.privacy.ledger.budget import LedgerBudget, check_store
from langchain_dpicl.privacy.ledger_state import OpenReservation
from langchain_dpicl.privacy.receipt_checks import check_receipt
from langchain_dpicl.privacy.report import PrivacyReport, ShareEntry
from langchain_dpicl.privacy.stores import LedgerHeader, LedgerStore
from langchain_dpicl.privacy.tickets import Component, Kind


class Budget(LedgerBudget):
    """The privacy budget of all examples bound to one ledger.

    Formal guarantees:
      - The epsilons of all shares never add to more than `epsilon`, nor their deltas to more than `delta`, in this
        and every other process on the ledger; each share's charge is an upper bound of what its tickets can release.
      - Hence everything released is (epsilon, delta)-DP under `adjacency` for one unit, by basic composition, which
        stays valid when components, their parameters and their order are chosen from earlier releases.
      - Nothing is granted if the ledger cannot be read, verified or written, or, with an anchor, is not the one that
        the anchor knows.

    Args:
      epsilon: limit for the ledger's whole life.
      delta: limit for the ledger's whole life; at most 1/(10 * public_size) of every data set bound.
      adjacency: the one neighbouring relation of everything on this ledger.
      store: where the ledger lives; None: in memory, which dies with this process. A store that was merely opened
        makes no ledger: it holds one, or is refused.
      name: public name for reports.
      anchor: a second place that remembers the ledger's last line, so that an older copy of the ledger is known.
      adopt_anchor: take an anchor that does not know the ledger, which is otherwise refused. Once, to add one.

    Raises:
      ConfigurationError: an argument is out of range.
      PrivacyBudgetMismatchError: the store holds a ledger with other limits.
      LedgerError: the ledger is broken, cannot be read, or is not the one that the anchor knows.

    Source: basic composition as a filter: Rogers et al. (2016); concurrent: Haney et al. (2023).

    Example:
      >>> budget = Budget(epsilon=4.0, delta=1e-6)
      >>> budget.remaining_epsilon
      4.0
    """

    _promises: PlannedPromises

    def __init__(
        self,
        *,
        epsilon: float,
        delta: float,
        adjacency: Adjacency = "add_remove",
        store: LedgerStore | None = None,
        name: str = "budget",
        anchor: LedgerAnchor | None = None,
        adopt_anchor: bool = False,
    ) -> None:
        self._anchor, self._adopts = check_anchor(anchor), adopt_anchor
        super().__init__(epsilon=epsilon, delta=delta, adjacency=adjacency, store=store, name=name)

    def _created(self, wanted: LedgerHeader) -> LedgerHeader:
        # The anchor first: a ledger that its anchor does not know would be refused.
        if self._anchor is not None:
            write_anchor(self._anchor, wanted.ledger_id, (0, wanted.digest))
        return super()._created(wanted)

    def _opened(self, header: LedgerHeader) -> Desk:
        if self._anchor is None:
            desk = OutageWriter(self._store, header, allowed_wrappers=allowed_wrappers)
            desk.refresh()
            return desk
        anchored = AnchoredWriter(self._store, header, self._anchor, allowed_wrappers=allowed_wrappers)
        anchored.open(adopt_anchor=self._adopts)
        return anchored

    def _declared(self, desk: Desk) -> PlannedPromises:
        return PlannedPromises(desk)

    @classmethod
    def open(cls, store: LedgerStore, *, anchor: LedgerAnchor | None = None, adopt_anchor: bool = False) -> Self:
        """Opens the ledger that a store holds, with its own limits.

        Args:
          store: holds a ledger already.
          anchor: a second place that remembers the ledger's last line.
          adopt_anchor: take an anchor that does not know the ledger, which is otherwise refused.

        Raises:
          LedgerError: the store holds no ledger, or a broken one.
          LedgerRollbackError: the anchor does not know the ledger, or knows a line that is not on it.
          ConfigurationError: `store` is no store, or `anchor` no anchor.
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
            anchor=anchor,
            adopt_anchor=adopt_anchor,
        )

    def check_fits(self, component: str, *, epsilon: float, delta: float) -> None:
        """Refuses a new share that cannot fit; inside `plan()` it is judged when the plan ends."""
        if self._promises.open_plan is None:
            super().check_fits(component, epsilon=epsilon, delta=delta)

    def fresh_name(self, prefix: str) -> str:
        """Returns `prefix`, or `prefix-2`, ...: the first component name that was not given or used before.

        Args:
          prefix: what the name starts with.

        Raises:
          ConfigurationError: the prefix is no public name.
        """
        return self._promises.fresh_name(check_name("prefix", prefix))

    def plan(self, *, epsilon: float | None = None, delta: float | None = None) -> AbstractContextManager[JointPlan]:
        """Opens a joint plan: components declared inside the block are composed together and cost less.

        On a clean exit the joint cost becomes one share; components can reserve from then on. An exception
        declares nothing. Components declared by other threads meanwhile are not part of it.

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
        """Sets a share aside for unsampled Gaussian releases whose noise is chosen on the way.

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
        """Sets a share aside for unsampled zCDP releases whose parameters are chosen on the way.

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
        """Returns what was promised to whom, from public values only; `verify_report` recomputes it."""
        with self._desk.lock:
            state = self._desk.refresh()
            sealed = [ShareEntry(share.terms, share.stamp) for share in state.sealed]
            pending = [ShareEntry(terms, None) for terms in self._promises.pending(state)]
            named = sorted({*state.allowed_wrappers, *allowed_wrappers()})
            shares = [*sealed, *pending]
            return PrivacyReport.build(self._desk.header, self._store, state.bindings, shares, named)

    def check_receipt(self, receipt: Any) -> None:
        """Holds a receipt against the ledger: the line that it names must stand there unchanged.

        Two receipts of one ledger and entry with different hashes prove that two copies of the ledger were spent.

        Args:
          receipt: a `Receipt`, a `Reservation`, or anything with (or a dict of) `ledger_id`, `entry` and `entry_hash`.
            Without an entry nothing was charged, and only the ledger is compared; without a hash, only the number.

        Raises:
          ConfigurationError: it is no such thing.
          PrivacyBudgetMismatchError: it is of another ledger.
          LedgerRollbackError: the line is gone or another: an older copy took the ledger's place.
        """
        check_receipt(receipt, self._desk.header, self._store, lambda: self._desk.refresh().seq)

    def dangling(self) -> tuple[OpenReservation, ...]:
        """Returns the reservations with tickets neither committed nor given back, in order. For the operator.

        They are counted as spent and stay so. Some are under way right now, in this or another process; the others
        were left by a crash, a failure, or a block that paid for more than was released. Not part of a report: shown
        beside releases, it would tell when the model was out.
        """
        with self._desk.lock:
            return tuple(self._desk.refresh().open_reservations())

    def close(self) -> None:
        """Closes the store, if it can be closed. The budget and all that was taken from it are of no use afterwards."""
        close = getattr(self._store, "close", None)
        if close is not None:
            close()

    def _make_pool(self, name: str, kind: Kind, epsilon: float, delta: float | None, gap: float) -> Component:
        at = self._delta_for(check_epsilon(epsilon), delta)
        return as_pool(Component(name=name, kind=kind, epsilon=epsilon, delta=at, implementation_delta=gap))
