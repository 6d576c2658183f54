"""Binds private examples to a ledger, and keeps the sum of all shares of its budget within it."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from langchain_dpicl._lazy import provided
from langchain_dpicl._opaque import Uncopyable
from langchain_dpicl.exceptions import PrivacyBudgetExceededError, PrivacyBudgetMismatchError, SealedShareError
from langchain_dpicl.privacy._validate import (
    Adjacency,
    check_adjacency,
    check_delta,
    check_epsilon,
    check_name,
    exact,
    fail,
    round_down,
)
from langchain_dpicl.privacy.ledger.shares import Share
from langchain_dpicl.privacy.ledger.state import LedgerState
from langchain_dpicl.privacy.ledger.store import LIFE, InMemoryStore, LedgerHeader, LedgerStore
from langchain_dpicl.privacy.ledger.tickets import (
    Component,
    Extent,
    ShareTerms,
    Ticket,
    event_of_components,
    event_of_tickets,
    extent_of,
    price,
)
from langchain_dpicl.privacy.ledger.writer import LedgerWriter, ShareStatus, budget_exceeded, check_same_terms
from langchain_dpicl.privacy.private_examples import PrivateExamples

# A request above the rest by less than this is float rounding (0.1 + 0.2): it gets the rest, never more.
ROUNDING_SLACK = Fraction(1, 10**12)

# The least part of delta for a share that requests no epsilon: some shares cost almost nothing.
MIN_PROPORTION = 1e-3


class DeclaredShares:
    """The shares declared in this process, and the epsilon and delta that all shares leave."""

    _price_together = staticmethod(price)  # overridden for pools, and for what is declared together

    def __init__(self, desk: LedgerWriter) -> None:
        self.desk = desk
        self._standings: dict[str, tuple[Component, ShareStatus]] = {}

    def admit(self, component: Component) -> ShareStatus:
        """Sets aside a share of one component, unless the same share is declared or sealed already."""
        self.check_extent(component)
        known = self.known(component)
        if known is not None:
            return known
        try:
            return self._admit_new(component)
        except (PrivacyBudgetExceededError, SealedShareError):
            known = self.known(component)  # another process may have sealed this very share meanwhile
            if known is None:
                raise
        return known

    def check_extent(self, component: Component) -> None:
        """Refuses a component whose promise is of another kind than the ledger's, with a ConfigurationError."""
        if self.desk.header.stream is not None:
            provided("streams").check_declared(component)
        elif component.extent is not None:
            raise fail("extent", "none: this ledger's promise is for life", component.extent)

    def _admit_new(self, component: Component) -> ShareStatus:
        wanted = component.delta if component.delta is not None else self._proportional_delta(component)
        epsilon, delta = self.fit(component.epsilon, wanted, {component.name}, component.extent)
        requested = None if component.epsilon is None else epsilon
        terms = self.priced((component,), epsilon=requested, delta=delta)
        with self.desk.lock:  # another thread may have declared this very share meanwhile
            return self._declared(component) or self.add_pending(terms, ShareStatus())

    def _proportional_delta(self, component: Component) -> float:
        """Returns the part of the remaining delta that the share's price is of the ledger's epsilon."""
        limits = self.desk.header
        if limits.delta == 0:
            return 0.0
        remaining = round_down(self.room({component.name}, component.extent)[1])
        if remaining <= 0:
            raise budget_exceeded(f"delta of budget {limits.name!r}", limits.delta, Fraction(0), "No delta remains.")
        # The price at the largest possible delta is the lowest, so the proportion is never too large.
        least, _ = self._price((component,), delta=remaining, adjacency=limits.adjacency, opinions=False)
        proportion = min(max(least / limits.epsilon, MIN_PROPORTION), 1.0)
        return round_down(exact(remaining) * exact(proportion))

    def known(self, component: Component) -> ShareStatus | None:
        """Returns the standing of the same share if it is sealed, or pending on the same terms."""
        with self.desk.lock:
            return self.sealed(component) or self._declared(component)

    def _declared(self, component: Component) -> ShareStatus | None:
        """Returns the standing of the same share if it was declared in this process, and not declared anew since."""
        mine, standing = self._standings.get(component.name, (None, None))
        if mine is None or standing is None or standing.refusal or mine.changed_terms(component):
            return None
        return standing

    def sealed(self, component: Component) -> ShareStatus | None:
        """Returns the standing of the same share if it is sealed; refuses one sealed on other terms."""
        state = self.desk.refresh()
        sealed = state.sealed_component(component.name)
        if sealed is None:
            return None
        check_same_terms(component, sealed)
        return ShareStatus(terms=state.shares[component.name].terms)

    def _price(self, components: Sequence[Component], **how: Any) -> tuple[float, dict[str, Any]]:
        is_plain = len(components) == 1 and components[0].limit is None
        return price(components, **how) if is_plain else self._price_together(components, **how)

    def check_price(
        self, components: Sequence[Component], *, epsilon: float | None, delta: float | None, opinions: bool = False
    ) -> tuple[float, dict[str, Any]]:
        """Returns the price of components, refused above `epsilon`; slow, so it runs without the lock."""
        adjacency = self.desk.header.adjacency
        cost, pricing = self._price(components, delta=check_delta(delta), adjacency=adjacency, opinions=opinions)
        limit = self.desk.header.epsilon if epsilon is None else epsilon
        if cost > limit:
            names = ", ".join(repr(component.name) for component in components)
            advice = "Raise the share or the noise, or declare fewer tickets."
            raise budget_exceeded(f"epsilon of {names}", cost, exact(limit), advice)
        return cost, pricing

    def priced(
        self, components: Sequence[Component], *, epsilon: float | None, delta: float, joint: bool = False
    ) -> ShareTerms:
        """Returns the terms of a share, second opinions included."""
        cost, pricing = self.check_price(components, epsilon=epsilon, delta=delta, opinions=True)
        return ShareTerms(
            components=tuple(components),
            epsilon=cost if epsilon is None else epsilon,
            delta=delta,
            joint=joint,
            event=event_of_components(components),
            pricing={**pricing, "epsilon": cost},
        )

    def add_pending(self, terms: ShareTerms, standing: ShareStatus) -> ShareStatus:
        """Makes a priced share pending if it fits; it replaces unsealed shares of the same names."""
        names = {component.name for component in terms.components}
        with self.desk.lock:
            if names & set(self.desk.refresh().shares):
                raise SealedShareError(f"{sorted(names)}: another process sealed one of these. Declare them again.")
            # Pricing ran without the lock, so the share has to fit again.
            epsilon, delta = self.fit(terms.epsilon, terms.delta, names, extent_of(terms.components))
            if epsilon < terms.pricing["epsilon"] or delta < terms.delta:
                raise budget_exceeded("epsilon", terms.pricing["epsilon"], exact(epsilon), "Lower the share a little.")
            standing.terms = replace(terms, epsilon=epsilon)
            for name in names:
                _, old = self._standings.pop(name, (None, None))
                if old is not None:
                    old.refusal = "it was declared anew before its first reservation."
            self._standings.update({component.name: (component, standing) for component in terms.components})
            return standing

    def fit(
        self, epsilon: float | None, delta: float | None, replaced: set[str], extent: Extent | None = None
    ) -> tuple[float, float]:
        """Returns the charge, lowered to the rest if it is above by float rounding only; refuses a larger one."""
        of_epsilon, of_delta = self.room(replaced, extent)
        return (
            self._fitted("epsilon", epsilon or 0.0, of_epsilon, replaced),
            self._fitted("delta", delta or 0.0, of_delta, replaced),
        )

    def _fitted(self, name: str, requested: float, rest: Fraction, replaced: set[str]) -> float:
        if exact(requested) > rest * (1 + ROUNDING_SLACK):
            advice = "Shares add up; declare components inside `with budget.plan():`, or lower them."
            if not rest:
                advice = "It is spent for good, or set aside. What was released stays free to use."
                if self.desk.header.stream is not None:
                    advice = "In some window of these blocks it is spent or set aside; later blocks bring more."
            if unused := self._unused(replaced):
                advice += f" Declared in this process, with no ticket reserved: {unused}; component={unused[0]!r} with "
                advice += "the same plan finds that share again."
            raise budget_exceeded(f"{name} of budget {self.desk.header.name!r}", requested, rest, advice)
        return requested if exact(requested) <= rest else round_down(rest)

    def _unused(self, replaced: set[str]) -> list[str]:
        """Returns the components of this process, except those about to be replaced, whose share is not sealed yet."""
        with self.desk.lock:
            pending = self.pending(self.desk.refresh(), replaced=replaced)
            return sorted(each.name for terms in pending for each in terms.components)

    def room(self, replaced: set[str] | None = None, extent: Extent | None = None) -> tuple[Fraction, Fraction]:
        """Returns the epsilon and delta that no share has, except shares about to be replaced.

        Of a stream: in every window that touches the blocks of `extent`, or in every window; what is pending counts
        in full where it touches one of them.
        """
        with self.desk.lock:
            state = self.desk.refresh()
            epsilon, delta = self._rest(state, extent, self.pending(state, replaced=replaced))
            return max(epsilon, Fraction(0)), max(delta, Fraction(0))

    def _rest(
        self, state: LedgerState, extent: Extent | None, pending: Sequence[ShareTerms]
    ) -> tuple[Fraction, Fraction]:
        """Returns the epsilon and delta that sealed shares and these leave, below 0 where they do not fit."""
        epsilon, delta = state.promised(extent)
        for terms in pending:
            if not state.is_apart(terms, extent):
                epsilon += exact(terms.epsilon)
                delta += exact(terms.delta)
        limits = self.desk.header
        return exact(limits.epsilon) - epsilon, exact(limits.delta) - delta

    def pending(
        self, state: LedgerState, *, replaced: set[str] | None = None, first: str | None = None
    ) -> list[ShareTerms]:
        """Returns the shares declared in this process that can still be sealed: others may have sealed theirs first.

        Not those of components to be `replaced`; the share of the component `first` is looked at first.
        """
        declared = {id(s): s.terms for _, s in self._standings.values() if s.terms is not None and not s.refusal}
        taken = state.shares.keys() | (replaced or set())
        unsealed = [t for t in declared.values() if taken.isdisjoint(each.name for each in t.components)]
        unsealed.sort(key=lambda terms: first not in {each.name for each in terms.components})
        if min(self._rest(state, None, unsealed)) >= 0:
            return unsealed
        found: list[ShareTerms] = []
        for terms in unsealed:
            left = self._rest(state, extent_of(terms.components), [*found, terms])
            found += [terms] if min(left) >= 0 else []
        return found


# The examples that each (ledger, dataset_id) names, for all budget objects of this process on one store.
_IDENTITIES: dict[tuple[str, str], object] = {}


class LedgerBudget(Uncopyable):
    """The privacy budget of all examples bound to one ledger.

    Formal guarantees:
      - The epsilons of all shares never add to more than `epsilon`, nor their deltas to more than `delta`, in this
        and every other process on the ledger; each share's charge is an upper bound of what its tickets can release.
      - Hence everything released is (epsilon, delta)-DP under `adjacency` for one unit, by basic composition, which
        stays valid when components, their parameters and their order are chosen from earlier releases.
      - Of a ledger of a stream: for every window, what the shares that may touch it add to (docs/proofs/windows.md).
      - Nothing is granted if the ledger cannot be read, verified or written.

    Source: basic composition as a filter: Rogers et al. (2016); concurrent: Haney et al. (2023).
    """

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
    ) -> None:
        wanted = LedgerHeader(
            ledger_id=uuid.uuid4().hex,
            name=check_name("name", name),
            epsilon=check_epsilon(epsilon),
            delta=check_delta(delta),
            adjacency=check_adjacency(adjacency),
            stream=None if per == LIFE else provided("streams").StreamTerms.parse(per),
            about=None if about is None else provided("about").LedgerAbout.parse(about),
        )
        self._store: LedgerStore = InMemoryStore() if store is None else check_store(store)
        header = self._store.header() or self._created(wanted)
        asked = ["epsilon", "delta", "adjacency", "stream", *(["about"] if about is not None else [])]
        limits = [name for name in asked if getattr(header, name) != getattr(wanted, name)]
        if limits:
            msg = f"store: expected a ledger with the requested limits, found other {limits}."
            advice = "Use its own limits: PrivacyBudgetCallbackHandler.open(path or store), or Budget.open(store)."
            raise PrivacyBudgetMismatchError(f"{msg} {advice}")
        self._desk = self._opened(header)
        self._promises = self._declared(self._desk)

    # `Budget` overrides these three: its writers check more, and its shares include pools and joint plans.

    def _created(self, wanted: LedgerHeader) -> LedgerHeader:
        """Creates the ledger; returns its header, which another process may have written first."""
        return self._store.create(wanted)

    def _opened(self, header: LedgerHeader) -> LedgerWriter:
        """Reads the whole ledger; returns its writer."""
        desk = LedgerWriter(self._store, header)
        desk.refresh()
        return desk

    def _declared(self, desk: LedgerWriter) -> DeclaredShares:
        """Returns an empty register of the shares of this process."""
        return DeclaredShares(desk)

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
    def per(self) -> str:
        """What epsilon and delta are for: "life", or windows of the records' time, such as "30 days"."""
        stream = self._desk.header.stream
        return LIFE if stream is None else stream.words

    @property
    def window(self) -> int | None:
        """Blocks of a window of a ledger of a stream; None: its promise is for life."""
        stream = self._desk.header.stream
        return None if stream is None else stream.window

    def sealed_extent(self, component: str) -> Extent | None:
        """Returns the blocks that a sealed component of a stream may read; None: it is not sealed, or of no stream.

        Args:
          component: public name of its share.
        """
        sealed = self._desk.refresh().sealed_component(component)
        return None if sealed is None else sealed.extent

    @property
    def durable(self) -> bool:
        """Whether the ledger survives this process."""
        return self._store.durable

    def default_delta(self, epsilon: float) -> float:
        """Returns the delta that goes with a share of `epsilon`: delta * epsilon / limit, rounded down.

        Args:
          epsilon: of the share.

        Raises:
          ConfigurationError: epsilon is no finite number above 0.
        """
        return round_down(exact(self.delta) * exact(check_epsilon(epsilon)) / exact(self.epsilon))

    def bind(self, private: PrivateExamples) -> None:
        """Binds private examples to this ledger, permanently; binding the same object again changes nothing.

        Args:
          private: the examples; they can be bound to one ledger only.

        Raises:
          ConfigurationError: `private` is of another type, or delta is above 1/(10 * public_size).
          PrivacyBudgetMismatchError: they belong to another ledger, or `dataset_id` names other examples here.
          PrivateAccessError: they were read without a charge before.
        """
        if not isinstance(private, PrivateExamples):
            raise fail("private", "PrivateExamples", type(private).__name__)
        private.check_delta(self.delta)
        self._check_kind(private)
        lineage = private._lineage  # noqa: SLF001  the first declaration of the units, then this one
        # Two objects of one dataset_id might hold different records.
        own = {(self.ledger_id, each.dataset_id): each._identity for each in lineage}  # noqa: SLF001
        with self._desk.lock:
            self._check_names(own, _IDENTITIES.get)
            self._desk.bind([each.declaration for each in lineage], private._attach)  # noqa: SLF001  the private door
            # Another thread may have bound other examples meanwhile, with a budget object of its own.
            self._check_names(own, _IDENTITIES.setdefault)
        private._keep_bound(None if self._desk.store.durable else self._desk.store)  # noqa: SLF001  the private door

    @staticmethod
    def _check_names(own: Mapping[tuple[str, str], object], named_by: Callable[[Any, object], object]) -> None:
        """Refuses examples of whose names one stands for others already."""
        for key, identity in own.items():
            if named_by(key, identity) is not identity:
                msg = (
                    f"dataset_id: {key[1]!r} already names other examples on this ledger. Pass the object that was "
                    "bound first; the same records need another process to be bound anew. Other records need a "
                    "dataset_id of their own, which for the same people is a second budget."
                )
                raise PrivacyBudgetMismatchError(msg)

    def _check_kind(self, private: PrivateExamples) -> None:
        """Refuses examples without a time where the promise is for windows, and a stream where it is not."""
        terms, declared = self._desk.header.stream, private.declaration.get("stream")
        if (None if terms is None else terms.block) != (None if declared is None else declared["block"]):
            raise provided("streams").wrong_kind(private, terms, self.per)

    def check_fits(self, component: str, *, epsilon: float, delta: float, extent: Extent | None = None) -> None:
        """Refuses a new share that cannot fit, before examples are bound for it.

        A name that is declared already is checked when it is declared again.

        Args:
          component: public name of the share.
          epsilon: of the share.
          delta: of the share.
          extent: of a stream: the blocks that the share may read.

        Raises:
          ConfigurationError: epsilon or delta is out of range.
          PrivacyBudgetExceededError: epsilon or delta is above what remains.
        """
        if component in self._desk.refresh().shares:
            return
        try:
            self._promises.fit(check_epsilon(epsilon), check_delta(delta), {component}, extent)
        except PrivacyBudgetExceededError:
            # Another of several workers may have sealed the same share in the meantime.
            if component not in self._desk.refresh().shares:
                raise

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
        plan: Mapping[str, Any] | None = None,
        extent: Extent | None = None,
    ) -> Share:
        """Declares what a component may release, and reserves its share of the budget.

        Formal guarantees:
          - The share's event is computed from the tickets; its price at `delta - implementation_delta` is an upper
            bound and must not exceed `epsilon`.
          - The same name with the same terms is the same share, with its remaining tickets, in any process.

        Args:
          component: public name, one per share. Before its first reservation a share may be declared again.
          tickets: the releases it may run, in any order, each up to its `max_count`.
          partition: `dataset_id` of bound examples whose labels split the units; needed if a ticket has a label.
          epsilon: the share; None: what the tickets cost.
          delta: None: `default_delta` of the share's epsilon, given or computed.
          implementation_delta: declared gap between ideal and drawn noise over all tickets; part of delta.
          public: parameters to show in reports, as JSON values.
          plan: those of them that are terms of the share as well, but for the price "epsilon"; None: none.
          extent: of a stream, where each `max_count` holds for every window: the first and last block that the tickets
            may read. None as the last: every block to come, so that the share is charged to every window to come.

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
            plan=plan or {},
            extent=extent,
        )
        kind: type[Share] = Share if extent is None else provided("streams").StreamShare
        return kind(self._desk, wanted, self._promises.admit(wanted))

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

    def __repr__(self) -> str:
        if not hasattr(self, "_desk"):
            return f"{type(self).__name__}(not made)"
        per = "" if self.window is None else f"per={self.per!r}, "
        return (
            f"{type(self).__name__}(name={self.name!r}, epsilon={self.epsilon}, delta={self.delta}, {per}"
            f"adjacency={self.adjacency!r}, ledger={self._store.description})"
        )


def check_store(store: Any) -> LedgerStore:
    """Returns a store as it is; refuses everything else."""
    if isinstance(store, LedgerStore) and not isinstance(store, type):
        return store
    kind = f"the class {store.__name__}" if isinstance(store, type) else type(store).__name__
    raise fail("store", "a LedgerStore", kind, "PrivacyBudgetCallbackHandler.open takes paths and addresses.")
