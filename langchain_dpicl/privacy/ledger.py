"""One budget for many components: shares, joint plans and pools on one ledger. Knows no record, no model, no framework.

Shares add up, which is a valid filter however adaptively and concurrently they are made and used. A share is composed
numerically inside, sealed durably at its first reservation, and never exchanged for another's.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from langchain_dpicl._wrapper_rules import allowed_wrappers
from langchain_dpicl.exceptions import LedgerError, PrivacyBudgetExceededError, PrivacyBudgetMismatchError
from langchain_dpicl.privacy._validate import Adjacency, check_adjacency, check_delta, check_epsilon, fail
from langchain_dpicl.privacy.amounts import check_name, exact, round_down
from langchain_dpicl.privacy.anchored import check_anchor, write_anchor
from langchain_dpicl.privacy.desk import Desk
from langchain_dpicl.privacy.examples import PrivateExamples
from langchain_dpicl.privacy.ledger_state import OpenReservation
from langchain_dpicl.privacy.promises import JointPlan, Promises, open_plan
from langchain_dpicl.privacy.receipt_checks import check_receipt
from langchain_dpicl.privacy.report import PrivacyReport, ShareEntry
from langchain_dpicl.privacy.shares import GdpPool, Reservation, Share, Uncopyable, ZCdpPool
from langchain_dpicl.privacy.stores import InMemoryStore, LedgerAnchor, LedgerHeader, LedgerStore
from langchain_dpicl.privacy.tickets import Component, Kind, Ticket, event_of_tickets

# Which examples a dataset_id means on a ledger, for this process: every budget object on one store has to agree.
_IDENTITIES: dict[tuple[str, str], object] = {}


class Budget(Uncopyable):
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
        wanted = LedgerHeader(
            ledger_id=uuid.uuid4().hex,
            name=check_name("name", name),
            epsilon=check_epsilon(epsilon),
            delta=check_delta(delta),
            adjacency=check_adjacency(adjacency),
        )
        self._store: LedgerStore = InMemoryStore() if store is None else _checked(store)
        found = self._store.header() or _created(self._store, wanted, check_anchor(anchor))
        limits = [f for f in ("epsilon", "delta", "adjacency") if getattr(found, f) != getattr(wanted, f)]
        if limits:
            msg = f"store: expected a ledger with the limits given, found other {limits}."
            advice = "Take its own: PrivacyBudgetCallbackHandler.open(path or store), or Budget.open(store)."
            raise PrivacyBudgetMismatchError(f"{msg} {advice}")
        self._desk = Desk(self._store, found, check_anchor(anchor))
        self._promises = Promises(self._desk)
        self._desk.open(adopt_anchor=adopt_anchor)

    @classmethod
    def open(cls, store: LedgerStore, *, anchor: LedgerAnchor | None = None, adopt_anchor: bool = False) -> Budget:
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
        header = _checked(store).header()
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

    @property
    def ledger_id(self) -> str:
        """Random name of the ledger; examples are bound to it."""
        return self._desk.header.ledger_id

    @property
    def name(self) -> str:
        """Public name for reports."""
        return self._desk.header.name

    @property
    def epsilon(self) -> float:
        """Limit of the whole ledger."""
        return self._desk.header.epsilon

    @property
    def delta(self) -> float:
        """Limit of the whole ledger."""
        return self._desk.header.delta

    @property
    def adjacency(self) -> Adjacency:
        """The neighbouring relation of everything on this ledger."""
        return self._desk.header.adjacency

    @property
    def durable(self) -> bool:
        """Whether the ledger survives this process."""
        return self._store.durable

    @property
    def remaining_epsilon(self) -> float:
        """Epsilon not yet promised to a share, sealed by any process or declared in this one."""
        return round_down(self._promises.room()[0])

    @property
    def remaining_delta(self) -> float:
        """Delta not yet promised to a share."""
        return round_down(self._promises.room()[1])

    def default_delta(self, epsilon: float) -> float:
        """Returns the delta that goes with a share of `epsilon`: delta * epsilon / limit, rounded down.

        Args:
          epsilon: of the share.

        Raises:
          ConfigurationError: epsilon is no finite number above 0.
        """
        return round_down(exact(self.delta) * exact(check_epsilon(epsilon)) / exact(self.epsilon))

    def bind(self, private: PrivateExamples) -> None:
        """Binds private examples to this ledger, once and for ever; again for the same object changes nothing.

        Args:
          private: the examples; they can be bound to one ledger alone.

        Raises:
          ConfigurationError: they are none, or delta is above 1/(10 * public_size).
          PrivacyBudgetMismatchError: they belong to another ledger, or `dataset_id` names other examples here.
          PrivateAccessError: they were opened without privacy before.
        """
        if not isinstance(private, PrivateExamples):
            raise fail("private", "PrivateExamples", type(private).__name__)
        private.check_delta(self.delta)
        lineage = private._lineage  # noqa: SLF001  units declared again have their first declaration before this one
        # Tells two objects of one name apart.
        own = {(self.ledger_id, each.dataset_id): each._identity for each in lineage}  # noqa: SLF001
        with self._desk.lock:
            for key, identity in own.items():
                if _IDENTITIES.get(key, identity) is not identity:
                    msg = (
                        f"dataset_id: {key[1]!r} already names other examples on this ledger. Pass the object "
                        "that was bound first, or give each data set a dataset_id of its own."
                    )
                    raise PrivacyBudgetMismatchError(msg)
            self._desk.bind([each.declaration for each in lineage], private._attach)  # noqa: SLF001  the private door
            _IDENTITIES.update(own)
        private._keep_bound(None if self._desk.store.durable else self._desk.store)  # noqa: SLF001  the private door

    def check_fits(self, component: str, *, epsilon: float, delta: float) -> None:
        """Refuses a new share that cannot fit, before examples are bound for it.

        A name that is declared already, or a declaration inside `plan()`, is judged when it is declared.

        Args:
          component: public name of the share.
          epsilon: of the share.
          delta: of the share.

        Raises:
          ConfigurationError: epsilon or delta is out of range.
          PrivacyBudgetExceededError: epsilon or delta is above what remains.
        """
        if self._promises.open_plan is not None or component in self._desk.refresh().shares:
            return
        try:
            self._promises.fit(check_epsilon(epsilon), check_delta(delta), {component})
        except PrivacyBudgetExceededError:
            # Of workers that start together, another may have sealed this very share meanwhile.
            if component not in self._desk.refresh().shares:
                raise

    def fresh_name(self, prefix: str) -> str:
        """Returns `prefix`, or `prefix-2`, ...: the first component name that nobody was given or has used.

        Args:
          prefix: what the name starts with.

        Raises:
          ConfigurationError: the prefix is no public name.
        """
        return self._promises.fresh_name(check_name("prefix", prefix))

    def declare(
        self,
        component: str,
        *,
        tickets: Sequence[Ticket],
        partition: str | None = None,
        epsilon: float | None = None,
        delta: float | None = None,
        implementation_delta: float = 0.0,
        public: Mapping[str, Any] | None = None,
    ) -> Share:
        """Declares what a component may release, and sets its share aside.

        Formal guarantees:
          - The share's event is computed from the tickets; its price at `delta - implementation_delta` is an upper
            bound and must not exceed `epsilon`.
          - The same name with the same terms is the same share, with the tickets it has left, in any process.

        Args:
          component: public name, one per share. Before its first reservation a share may be declared anew.
          tickets: what it may run; inside one (template, label) nothing but `max_count` limits the order.
          partition: `dataset_id` of bound examples whose labels split the units; needed if a ticket has a label.
          epsilon: the share; None: what the tickets cost.
          delta: None: `default_delta` of the share's epsilon, given or computed.
          implementation_delta: declared gap between ideal and drawn noise over all tickets; comes out of delta.
          public: parameters to show in reports, as JSON values.

        Raises:
          ConfigurationError: an argument is out of range; nothing was spent.
          PrivacyBudgetExceededError: the tickets cost more than `epsilon`, or the share does not fit.
          SealedShareError: the name is sealed with other terms.
        """
        items = tuple(tickets)
        event_of_tickets(items, partition=partition)
        self._check_partition(items, partition)
        wanted = Component(
            name=component,
            kind="tickets",
            tickets=items,
            partition=partition,
            epsilon=epsilon,
            delta=self._delta_for(epsilon, delta),
            implementation_delta=implementation_delta,
            public=public or {},
        )
        return Share(self._desk, wanted, self._promises.admit(wanted))

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

    def verify(self) -> None:
        """Recomputes the ledger's whole chain and every rule, and asks the anchor, if there is one.

        Raises:
          LedgerError: a line was changed, dropped or breaks a rule.
          LedgerRollbackError: a line that was seen before, or that the anchor knows, is gone or changed.
        """
        self._desk.verify()

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
        check_receipt(self._desk, receipt)

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

    def _check_partition(self, tickets: Sequence[Ticket], partition: str | None) -> None:
        labels = {ticket.label for ticket in tickets if isinstance(ticket, Ticket) and ticket.label is not None}
        if not labels:
            return
        bound = self._desk.refresh().bindings.get(partition or "")
        known = [] if bound is None else list(bound["labels"])
        if not labels <= set(known):
            advice = "Call budget.bind(private) first; labels run in parallel only where the examples declare them."
            raise fail("partition, labels", f"labels among {known} of a bound data set", sorted(labels), advice)

    def _delta_for(self, epsilon: float | None, delta: float | None) -> float | None:
        return self.default_delta(epsilon) if delta is None and epsilon is not None else delta

    def _make_pool(self, name: str, kind: Kind, epsilon: float, delta: float | None, gap: float) -> Component:
        at = self._delta_for(check_epsilon(epsilon), delta)
        return Component(name=name, kind=kind, epsilon=epsilon, delta=at, implementation_delta=gap).as_pool()

    def __repr__(self) -> str:
        if not hasattr(self, "_desk"):
            return "Budget(not made)"
        return (
            f"Budget(name={self.name!r}, epsilon={self.epsilon}, delta={self.delta}, adjacency={self.adjacency!r}, "
            f"ledger={self._store.description})"
        )


def _checked(store: Any) -> LedgerStore:
    if isinstance(store, LedgerStore) and not isinstance(store, type):
        return store
    found = f"the class {store.__name__}" if isinstance(store, type) else type(store).__name__
    raise fail("store", "a LedgerStore", found, "PrivacyBudgetCallbackHandler.open takes paths and addresses.")


def _created(store: LedgerStore, wanted: LedgerHeader, anchor: LedgerAnchor | None) -> LedgerHeader:
    """Writes the header, and before it tells the anchor: a ledger that stands without its anchor would be refused."""
    if anchor is not None:
        write_anchor(anchor, wanted.ledger_id, (0, wanted.digest))
    return store.create(wanted)


__all__ = [
    "Budget",
    "GdpPool",
    "JointPlan",
    "Reservation",
    "Share",
    "Ticket",
    "ZCdpPool",
    "event_of_tickets",
]
