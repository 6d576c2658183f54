"""Applies the lines of a ledger to its totals, by one set of rules for writing, reading and verifying."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Any, ClassVar

from langchain_dpicl.exceptions import DPICLError, LedgerError
from langchain_dpicl.privacy._validate import check_int, check_positive, check_real
from langchain_dpicl.privacy.ledger.amounts import Amount, exact
from langchain_dpicl.privacy.ledger.store import LedgerHeader, LedgerRecord
from langchain_dpicl.privacy.ledger.tickets import Component, Kind, ShareTerms, event_of_components

BIND = "bind"
SEAL = "seal"
RESERVE = "reserve"
COMMIT = "commit"
GIVE_BACK = "give_back"

Slot = tuple[str, str | None]
"""(template, label) of a ticket; (kind, None) of a pool."""


@dataclass(frozen=True, slots=True)
class SealedShare:
    """The terms of a sealed share, and when its first reservation sealed it."""

    terms: ShareTerms
    stamp: str


@dataclass(frozen=True, slots=True)
class OpenReservation:
    """A reservation some of whose tickets were neither committed nor given back; they stay charged. Public.

    Attributes:
      entry: number of its line in the ledger.
      component: name of the component that took it.
      template: the tickets' template ("gdp" or "zcdp" for a pool).
      label: their label, or None.
      count: how many tickets are open.
      stamp: when they were reserved (UTC); informative.
    """

    entry: int
    component: str
    template: str
    label: str | None
    count: int
    stamp: str


@dataclass(slots=True)
class _UnsettledReservation:
    """A reservation not yet settled in full."""

    component: str
    slot: Slot
    unit: Amount
    unsettled: int
    refundable: bool
    tenant: str
    stamp: str


def unit_cost(kind: Kind, amount: float) -> Amount:
    """Returns what one ticket takes: 1 of its count, mu^2 of a GDP pool, rho of a zCDP pool."""
    if kind == "tickets":
        return 1
    return exact(amount) ** 2 if kind == "gdp" else exact(amount)


def allowance(component: Component, slot: Slot) -> Amount:
    """Returns what a slot holds before anything is reserved."""
    if component.limit is not None:
        return unit_cost(component.kind, component.limit)
    return component.ticket(*slot).max_count


class LedgerState:
    """Totals, shares, bindings and open reservations after the lines applied so far."""

    def __init__(self, header: LedgerHeader) -> None:
        self.header = header
        self.seq = 0  # number of the last line applied
        self.head = header.digest  # its hash
        self.bindings: dict[str, Mapping[str, Any]] = {}  # declarations by `dataset_id`
        self.shares: dict[str, SealedShare] = {}  # by component
        # Modules that operators named in any process that reserved tickets; see `allow_wrappers`.
        self.allowed_wrappers: frozenset[str] = frozenset()
        self._sealed: list[SealedShare] = []
        self._components: dict[str, Component] = {}
        self._left: dict[tuple[str, Slot], Amount] = {}
        self._open: dict[int, _UnsettledReservation] = {}
        self._used: dict[tuple[str, str], int] = {}

    @property
    def sealed(self) -> tuple[SealedShare, ...]:
        """Every sealed share, in order."""
        return tuple(self._sealed)

    @property
    def spent(self) -> tuple[Fraction, Fraction]:
        """Epsilon and delta of all sealed shares: basic composition, valid however adaptively they were made."""
        return (
            sum((exact(share.terms.epsilon) for share in self._sealed), Fraction(0)),
            sum((exact(share.terms.delta) for share in self._sealed), Fraction(0)),
        )

    def left(self, component: str, slot: Slot) -> Amount:
        """Returns what a sealed component's slot still holds."""
        return self._left[component, slot]

    def held(self) -> Mapping[tuple[str, Slot], Amount]:
        """Returns what every slot of every sealed component still holds."""
        return MappingProxyType(self._left)

    def used_by(self, tenant: str, component: str) -> int:
        """Returns how many tickets of a component a tenant has; a line without a tenant counts for ""."""
        return self._used.get((component, tenant), 0)

    def open_reservations(self) -> Iterator[OpenReservation]:
        """Yields the reservations with tickets neither committed nor given back, in order."""
        for entry, opened in sorted(self._open.items()):
            yield OpenReservation(entry, opened.component, *opened.slot, opened.unsettled, opened.stamp)

    def sealed_component(self, name: str) -> Component | None:
        """Returns the sealed terms of a component, or None."""
        return self._components.get(name)

    def apply(self, record: LedgerRecord, *, is_hashed: bool = False) -> None:
        """Applies the next line; `is_hashed`: its hash was computed just now from its content.

        Raises:
          LedgerError: the line does not follow in the chain, was changed, or breaks a rule; the state is unchanged.
        """
        follows = record.seq == self.seq + 1 and record.prev == self.head
        if not follows or not (is_hashed or record.hash == record.computed_hash):
            msg = f"ledger: line {self.seq + 1} does not follow from the lines before it. Restore an untouched copy."
            raise LedgerError(msg)
        fault = ""
        try:
            self._RULES[record.kind](self, record)
        except (DPICLError, ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
            fault = f"{type(error).__name__}: {error}"
        if fault:
            msg = f"ledger: line {record.seq} ({record.kind}) breaks the rules of this version ({fault})"
            raise LedgerError(msg)
        self.seq, self.head = record.seq, record.hash

    def _bind(self, record: LedgerRecord) -> None:
        name = record.body["dataset_id"]
        _require(name not in self.bindings, "a data set not yet bound")
        self.bindings[name] = record.body

    def _seal(self, record: LedgerRecord) -> None:
        terms = ShareTerms.from_dict(record.body)
        names = [component.name for component in terms.components]
        _require(len(set(names)) == len(names) and not set(names) & set(self.shares), "components not yet sealed")
        # A line with another event than that of its tickets would charge less than they can release.
        _require(terms.event == event_of_components(terms.components), "the event of its tickets")
        epsilon, delta = self.spent
        epsilon += exact(check_real("epsilon", terms.epsilon, low=0.0))
        delta += exact(check_positive("delta", terms.delta))
        _require(epsilon <= exact(self.header.epsilon) and delta <= exact(self.header.delta), "a share that fits")
        left = {(c.name, slot): allowance(c, slot) for c in terms.components for slot in slots(c)}
        share = SealedShare(terms, record.stamp)
        self._sealed.append(share)
        self.shares.update(dict.fromkeys(names, share))
        self._components.update({component.name: component for component in terms.components})
        self._left.update(left)

    def _reserve(self, record: LedgerRecord) -> None:
        body = record.body
        component = self.sealed_component(body["component"])
        if component is None:
            raise LedgerError("expected a sealed component")
        slot: Slot = (body["template"], body["label"])
        count = check_int("count", body["count"], low=1)
        unit = unit_cost(component.kind, check_positive("amount", body["amount"]))
        # Everything is checked before anything changes: a refused line leaves the state as it was.
        left = self._left[component.name, slot] - unit * count
        _require(left >= 0, "no more than what is left")
        refundable = component.limit is not None or component.ticket(*slot).refundable
        tenant = body.get("tenant", "")
        if type(tenant) is not str:
            raise LedgerError("expected a tenant's name as text")
        modules = body.get("allowed_wrappers", [])
        _require(isinstance(modules, list | tuple) and all(isinstance(m, str) for m in modules), "names of modules")
        self.allowed_wrappers |= frozenset(modules)
        self._left[component.name, slot] = left
        self._open[record.seq] = _UnsettledReservation(
            component.name, slot, unit, count, refundable, tenant, record.stamp
        )
        key = component.name, tenant
        self._used[key] = self._used.get(key, 0) + count

    def _give_back(self, record: LedgerRecord) -> None:
        entry = self._open[record.body["reservation"]]
        _require(entry.refundable, "a refundable ticket")
        count = self._settle(record)
        self._left[entry.component, entry.slot] += entry.unit * count
        self._used[entry.component, entry.tenant] -= count

    def _settle(self, record: LedgerRecord) -> int:
        number = record.body["reservation"]
        entry = self._open[number]
        count = check_int("count", record.body["count"], low=1, high=entry.unsettled)
        entry.unsettled -= count
        if not entry.unsettled:
            del self._open[number]
        return count

    _RULES: ClassVar[dict[str, Callable[[LedgerState, LedgerRecord], object]]] = {
        BIND: _bind,
        SEAL: _seal,
        RESERVE: _reserve,
        COMMIT: _settle,
        GIVE_BACK: _give_back,
    }


def slots(component: Component) -> Iterator[Slot]:
    """Yields every (template, label) of a component."""
    if component.limit is not None:
        yield component.kind, None
    for ticket in component.tickets:
        yield ticket.template, ticket.label


def _require(condition: bool, expected: str) -> None:
    if not condition:
        raise LedgerError(f"expected {expected}")
