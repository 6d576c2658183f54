"""Applies the lines of a ledger to its totals, by one set of rules for writing, reading and verifying."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

from langchain_dpicl._lazy import provided
from langchain_dpicl.exceptions import DPICLError, LedgerError
from langchain_dpicl.privacy._validate import (
    MAX_INT,
    Amount,
    check_delta,
    check_int,
    check_positive,
    check_real,
    exact,
    fail,
)
from langchain_dpicl.privacy.ledger.store import LedgerHeader, LedgerRecord, LineBlock
from langchain_dpicl.privacy.ledger.tickets import Blocks, Component, Extent, Kind, ShareTerms, event_of_components

BIND = "bind"
SEAL = "seal"
RESERVE = "reserve"
COMMIT = "commit"
GIVE_BACK = "give_back"
SNAPSHOT = "snapshot"

RESERVED = ("blocks", "stream")
"""Members of a line's body that only ledgers of streams have."""

SNAPSHOT_LINES = 4096
"""A snapshot follows at least so many lines, and more where it is large itself."""

Undo = Callable[[], object]
"""Takes one line back; lines are taken back in the opposite order."""

_Inverse = tuple[Callable[..., object], tuple[Any, ...]]
"""What takes the totals of one line back, and its arguments."""

_NOTHING: _Inverse = (lambda: None, ())

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
      holder: random name of the process that reserved them; None in a ledger in memory.
      mine: whether that is this process.
    """

    entry: int
    component: str
    template: str
    label: str | None
    count: int
    stamp: str
    holder: str | None = None
    mine: bool = False


@dataclass(slots=True)
class _SlotTotals:
    """What a slot of a sealed component holds, and how many of its tickets are open."""

    component: Component
    slot: Slot
    left: Amount
    refundable: bool
    unsettled: int = 0
    taken: Any = None  # what `StreamState` keeps of it


@dataclass(slots=True)
class _UnsettledReservation:
    """A reservation not yet settled in full."""

    totals: _SlotTotals
    unit: Amount
    unsettled: int
    tenant: str
    stamp: str
    holder: str | None
    blocks: Blocks | None = None  # of a stream: what the tickets may read


@functools.lru_cache(maxsize=1024, typed=True)  # a ledger has few amounts
def _checked_unit(kind: Kind, amount: object) -> Amount:
    """Returns what one ticket of a line takes."""
    return unit_cost(kind, check_positive("amount", amount))


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
    """Totals, shares, bindings and open reservations after the lines applied so far.

    Of a ledger of a stream it is a `StreamState`, which is loaded for it: other rules apply there.
    """

    windows: Any = None  # what is promised for each window of a stream; None: the promise is for life

    def __new__(cls, header: LedgerHeader | None = None) -> LedgerState:  # noqa: PYI034  the kind is the header's
        """Returns the state for the kind of promise that the header makes; refuses rules of the other kind."""
        kind: type[LedgerState] = cls  # None: a copy
        if header is not None:
            kind = LedgerState if header.stream is None else provided("streams").StreamState
        if not issubclass(kind, cls):
            raise LedgerError("ledger: expected a header of the kind that these rules are for, found another.")
        return object.__new__(kind)

    def __init__(self, header: LedgerHeader) -> None:
        self.header = header
        self.seq = 0  # number of the last line applied
        self.head = header.digest  # its hash
        self.bindings: dict[str, Mapping[str, Any]] = {}  # declarations by `dataset_id`
        self.shares: dict[str, SealedShare] = {}  # by component
        # Modules that operators named in any process that reserved tickets; see `allow_wrappers`.
        self.allowed_wrappers: frozenset[str] = frozenset()
        self._sealed: list[SealedShare] = []
        self._spent = Fraction(0), Fraction(0)  # their epsilons and deltas: summed anew for each, it would be quadratic
        self._components: dict[str, Component] = {}
        self._slots: dict[tuple[str, str, str | None], _SlotTotals] = {}  # by component and slot
        self._open: dict[int, _UnsettledReservation] = {}
        self._used: dict[tuple[str, str], int] = {}
        self._named: list[list[Any]] = []  # number and hash of the lines that bind and seal
        self._last_snapshot = 0  # its number

    @classmethod
    def from_snapshot(cls, header: LedgerHeader, lines: Sequence[LedgerRecord]) -> LedgerState:
        """Returns the state after a snapshot, without the lines that it sums up.

        Args:
          header: of the ledger.
          lines: those before the snapshot that bind and seal, then the snapshot.

        Raises:
          LedgerError: a line was changed, or they do not go together.
        """
        *named, last = lines
        state, fault = cls(header), ""
        state._expect_snapshot()
        for line in named:
            state.seq, state.head = line.seq - 1, line.prev  # the lines between are in the snapshot
            state.apply(line)
        try:
            state._take_over(last)
        except (DPICLError, ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
            fault = f"{type(error).__name__}: {error}"
        if fault:
            msg = f"ledger: line {last.seq} is no snapshot of the lines before it ({fault}). Restore an untouched copy."
            raise LedgerError(msg)
        return state

    def _take_over(self, record: LedgerRecord) -> None:
        """Takes over the totals of a snapshot; the shares and bindings are there."""
        body = record.body
        _require(record.kind == SNAPSHOT and record.hash == record.computed_hash, "a snapshot that was not changed")
        self.allowed_wrappers = frozenset(_text(module, "a module's name") for module in body["wrappers"])
        for name, tenant, count in body["used"]:
            self._used[self._components[name].name, _text(tenant, "a tenant's name")] = check_int("count", count, low=1)
        for entry, name, template, label, unit, count, tenant, stamp, holder, *blocks in body["open"]:
            totals = self._slots[name, template, label]
            by = None if holder is None else str(holder)
            check_int("count", count, low=1)
            amount = amount_of(totals.component, unit)
            read = self._blocks_of(*blocks)
            self._open[entry] = _UnsettledReservation(totals, amount, count, str(tenant), str(stamp), by, read)
            totals.unsettled += count
        for totals, pair in zip(self._slots.values(), body["left"], strict=True):
            totals.left = amount_of(totals.component, pair)
            _require(self._is_possible(totals), "no more than there was")
        self._take_over_windows(body)
        # Whatever was read is written again: nothing was left out, and no value is of another type.
        self.seq, self.head = record.seq - 1, record.prev
        self.apply(record)

    # `StreamState` overrides what follows, and `promised`, `check_request`, `_left_for`, `_charge` and `_refund`.

    def _expect_snapshot(self) -> None:
        """Called before the lines that a snapshot names are applied."""

    def _blocks_of(self) -> Blocks | None:
        """Returns what an open reservation of a snapshot says of blocks: nothing, so that more is refused."""
        return None

    def _is_possible(self, totals: _SlotTotals) -> bool:
        return 0 <= totals.left <= allowance(totals.component, totals.slot)

    def _take_over_windows(self, body: Mapping[str, Any]) -> None:
        """Takes over what else a snapshot holds."""

    def snapshot(self) -> dict[str, Any]:
        """Returns the totals after the lines applied so far: the body of a line `snapshot`, in a fixed order.

        What `from_snapshot` needs to go on without the lines before it: names the lines that bind and seal, which are
        read, and holds what the others add up to.
        """
        return {
            "lines": self._named,
            "left": [pair_of(it.left) for it in self._slots.values()],  # in the order of the shares and their slots
            "used": sorted([*key, count] for key, count in self._used.items() if count),
            "open": [
                [entry, *_place(it), pair_of(it.unit), it.unsettled, it.tenant, it.stamp, it.holder]
                + ([] if it.blocks is None else [list(it.blocks)])
                for entry, it in sorted(self._open.items())
            ],
            "wrappers": sorted(self.allowed_wrappers),
        }

    @property
    def needs_snapshot(self) -> bool:
        """Whether so many lines follow the last snapshot that reading them takes longer than reading another."""
        size = 10 * (len(self._open) + len(self._used))
        return self.seq - self._last_snapshot >= max(SNAPSHOT_LINES, size)

    @property
    def sealed(self) -> tuple[SealedShare, ...]:
        """Every sealed share, in order."""
        return tuple(self._sealed)

    def promised(self, extent: Extent | None = None) -> tuple[Fraction, Fraction]:  # noqa: ARG002  an override does
        """Returns the sums of all sealed shares: basic composition, valid however adaptively they were made.

        Of a stream: the largest of the windows that touch the blocks of `extent`; None: of all windows.
        """
        return self._spent

    def is_apart(self, terms: ShareTerms, extent: Extent | None) -> bool:  # noqa: ARG002  an override does
        """Whether no promise covers both a share and what reads the blocks of `extent`: never, where it is for life."""
        return False

    def check_request(
        self,
        component: Component,
        slot: Slot,
        cost: Amount,  # noqa: ARG002  an override does
        *,
        blocks: Blocks | None,
        run_cap: int | None,
    ) -> None:
        """Refuses a reservation for another reason than what is left."""
        if component.extent is not None or blocks is not None or run_cap is not None:
            raise fail("blocks", f"none for {component.name!r} {slot[0]!r}: this promise is for life", blocks)

    def available(
        self,
        component: Component,
        slot: Slot,
        *,
        blocks: Blocks | None = None,
        run_cap: int | None = None,  # noqa: ARG002
    ) -> Amount:
        """Returns what of a slot can be reserved, of a component that is sealed or not."""
        is_sealed = component.name in self.shares
        return self.left(component.name, slot, blocks) if is_sealed else allowance(component, slot)

    def left(self, component: str, slot: Slot, blocks: Extent | None = None) -> Amount:
        """Returns what a sealed component's slot still holds; of a stream: for blocks, or where least is left."""
        return self._left_for(self._slots[component, *slot], blocks)

    def _left_for(self, totals: _SlotTotals, blocks: Extent | None) -> Amount:  # noqa: ARG002  an override does
        return totals.left

    def taken(self, component: str, slot: Slot) -> Amount:
        """Returns what was reserved of a slot and not given back, over the ledger's life."""
        totals = self._slots[component, *slot]
        return allowance(totals.component, slot) - totals.left

    def used_by(self, tenant: str, component: str) -> int:
        """Returns how many tickets of a component a tenant has; a line without a tenant counts for ""."""
        return self._used.get((component, tenant), 0)

    @property
    def users(self) -> tuple[tuple[str, str], ...]:
        """The pairs of a component and a tenant that has tickets of it; "": lines without a tenant."""
        return tuple(self._used)

    def unsettled(self, component: str, slot: Slot) -> int:
        """Returns how many tickets of a slot are reserved, and neither committed nor given back."""
        totals = self._slots.get((component, *slot))
        return 0 if totals is None else totals.unsettled

    def is_of(self, entry: int, component: str, slot: Slot) -> bool:
        """Returns whether a reservation has open tickets of a slot."""
        opened = self._open.get(entry)
        return opened is not None and opened.totals is self._slots.get((component, *slot))

    def open_reservations(self, after: int = 0) -> Iterator[OpenReservation]:
        """Yields the reservations behind a line with tickets neither committed nor given back, in order."""
        for entry in sorted(entry for entry in self._open if entry > after):
            it = self._open[entry]
            yield OpenReservation(entry, *_place(it), it.unsettled, it.stamp, it.holder)

    def sealed_component(self, name: str) -> Component | None:
        """Returns the sealed terms of a component, or None."""
        return self._components.get(name)

    def apply(self, record: LedgerRecord) -> Undo:
        """Applies the next line; returns what takes it back, for a line that does not stand in the end.

        Raises:
          LedgerError: the line does not follow in the chain, was changed, or breaks a rule; the state is unchanged.
        """
        follows = record.seq == self.seq + 1 and record.prev == self.head
        if not follows or record.hash != record.computed_hash:
            msg = f"ledger: line {self.seq + 1} does not follow from the lines before it. Restore an untouched copy."
            raise LedgerError(msg)
        undo, values = self._follow(((record.seq, record.kind, record.body, record.stamp, record.hash),))

        def take_back() -> None:
            undo(*values)
            self.seq, self.head = record.seq - 1, record.prev

        return take_back

    def apply_all(self, lines: Sequence[LedgerRecord]) -> None:
        """Applies the next lines, which stay applied up to one that is refused.

        Raises:
          LedgerError: as `apply`.
        """
        if isinstance(lines, LineBlock) and lines.follow(self.seq, self.head):
            self._follow(lines.lines())
            return
        for line in lines:
            self.apply(line)

    def _follow(self, lines: Iterable[tuple[int, str, Mapping[str, Any], str, str]]) -> _Inverse:
        """Applies lines whose place in the chain was checked; returns what takes the last one's totals back."""
        fault, rules, inverse = "", self._RULES, _NOTHING
        seq, kind = self.seq, ""
        (blocks, stream), members = RESERVED, self._MEMBERS
        try:
            for seq, kind, body, stamp, digest in lines:
                is_other = (stream in body and kind != members.get(stream)) or (
                    blocks in body and kind != members.get(blocks)
                )
                if is_other:
                    raise LedgerError("expected members that this version reads")
                inverse = rules[kind](self, seq, body, stamp, digest)
                self.seq, self.head = seq, digest
        except (DPICLError, ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
            fault = f"{type(error).__name__}: {error}"
        if fault:
            msg = f"ledger: line {seq} ({kind}) breaks the rules of this version ({fault})"
            raise LedgerError(msg)
        return inverse

    # Everything is checked before anything changes: a refused line leaves the state as it was.

    def _bind(self, seq: int, body: Mapping[str, Any], stamp: str, digest: str) -> _Inverse:  # noqa: ARG002  as all rules
        name = body["dataset_id"]
        _require(name not in self.bindings, "a data set not yet bound")
        self.bindings[name] = body
        self._named.append([seq, digest])

        def undo() -> None:
            self._named.pop()
            del self.bindings[name]

        return undo, ()

    def _seal(self, seq: int, body: Mapping[str, Any], stamp: str, digest: str) -> _Inverse:
        terms = ShareTerms.from_dict(body)
        names = [component.name for component in terms.components]
        _require(len(set(names)) == len(names) and not set(names) & set(self.shares), "components not yet sealed")
        # A line with another event than that of its tickets would charge less than they can release.
        _require(terms.event == event_of_components(terms.components), "the event of its tickets")
        price = exact(check_real("epsilon", terms.epsilon, low=0.0)), exact(check_delta(terms.delta))
        totals = {(c.name, *slot): _totals(c, slot) for c in terms.components for slot in slots(c)}
        take_charge_back = self._charge(terms, price, totals.values())
        share = SealedShare(terms, stamp)
        self._sealed.append(share)
        self.shares.update(dict.fromkeys(names, share))
        self._components.update({component.name: component for component in terms.components})
        self._slots.update(totals)
        self._named.append([seq, digest])

        def undo() -> None:
            take_charge_back()
            self._named.pop()
            self._sealed.pop()
            for name in names:
                del self.shares[name], self._components[name]
            for key in totals:
                del self._slots[key]

        return undo, ()

    def _charge(
        self,
        terms: ShareTerms,
        price: tuple[Fraction, Fraction],
        totals: Iterable[_SlotTotals],  # noqa: ARG002
    ) -> Undo:
        """Refuses a share that does not fit, or promises something else; returns what takes its charge back."""
        before = self._spent
        epsilon, delta = (spent + more for spent, more in zip(before, price, strict=True))
        _require(epsilon <= exact(self.header.epsilon) and delta <= exact(self.header.delta), "a share that fits")
        _require(all(c.extent is None for c in terms.components), "no extent where the promise is for life")
        self._spent = epsilon, delta

        def undo() -> None:
            self._spent = before

        return undo

    def _reserve(self, seq: int, body: Mapping[str, Any], stamp: str, digest: str) -> _Inverse:  # noqa: ARG002  as all rules
        name, count, amount = body["component"], body["count"], body["amount"]
        totals = self._slots.get((name, body["template"], body["label"]))
        if totals is None:
            raise LedgerError("expected a sealed component, and a ticket of it")
        is_ticket = totals.component.limit is None and amount == 1.0 and type(amount) is float
        unit = 1 if is_ticket else _checked_unit(totals.component.kind, amount)
        if type(count) is not int or not 0 < count <= MAX_INT:
            check_int("count", count, low=1)
        read = self._read_by(totals.component, body)
        if self._left_for(totals, read) < unit * count:
            raise LedgerError("expected no more than what is left")
        tenant, holder = body.get("tenant", ""), body.get("holder")
        if type(tenant) is not str or (holder is not None and not isinstance(holder, str)):
            raise LedgerError("expected the names of a tenant and a process as text")
        wrappers = self.allowed_wrappers
        if "allowed_wrappers" in body:
            modules = body["allowed_wrappers"]
            _require(isinstance(modules, list | tuple) and all(isinstance(m, str) for m in modules), "names of modules")
            self.allowed_wrappers |= frozenset(modules)
        self._open[seq] = entry = _UnsettledReservation(totals, unit, count, tenant, stamp, holder, read)
        totals.unsettled += count
        self._refund(entry, -count)
        return self._take_reservation_back, (seq, count, wrappers)

    def _read_by(self, component: Component, body: Mapping[str, Any]) -> Blocks | None:  # noqa: ARG002  an override does
        """Returns the blocks that a line reserves tickets for; None where the promise is for life."""
        return None

    def _take_reservation_back(self, seq: int, count: int, wrappers: frozenset[str]) -> None:
        self.allowed_wrappers = wrappers
        entry = self._open.pop(seq)
        entry.totals.unsettled -= count
        self._refund(entry, count)

    def _commit(self, seq: int, body: Mapping[str, Any], stamp: str, digest: str) -> _Inverse:  # noqa: ARG002  as all rules
        number, count = body["reservation"], body["count"]
        entry = self._open[number]
        if type(count) is not int or not 0 < count <= entry.unsettled:
            check_int("count", count, low=1, high=entry.unsettled)
        self._settle(number, entry, count)
        return self._settle, (number, entry, -count)

    def _give_back(self, seq: int, body: Mapping[str, Any], stamp: str, digest: str) -> _Inverse:  # noqa: ARG002
        number, count = body["reservation"], body["count"]
        entry = self._open[number]
        _require(entry.totals.refundable, "a refundable ticket")
        check_int("count", count, low=1, high=entry.unsettled)
        self._settle(number, entry, count)
        self._refund(entry, count)

        def undo() -> None:
            self._refund(entry, -count)
            self._settle(number, entry, -count)

        return undo, ()

    def _settle(self, number: int, entry: _UnsettledReservation, count: int) -> None:
        """Closes tickets of a reservation; a negative count opens them again."""
        entry.unsettled -= count
        entry.totals.unsettled -= count
        if entry.unsettled:
            self._open[number] = entry
        else:
            del self._open[number]

    def _refund(self, entry: _UnsettledReservation, count: int) -> None:
        """Lets tickets that were settled be reserved again; a negative count reserves them."""
        totals, user = entry.totals, (entry.totals.component.name, entry.tenant)
        totals.left += entry.unit * count
        self._used[user] = self._used.get(user, 0) - count

    def _snapshot(self, seq: int, body: Mapping[str, Any], stamp: str, digest: str) -> _Inverse:  # noqa: ARG002
        _require(body == self.snapshot(), "the totals of the lines before it")
        before, self._last_snapshot = self._last_snapshot, seq

        def undo() -> None:
            self._last_snapshot = before

        return undo, ()

    _RULES: ClassVar[dict[str, Callable[[LedgerState, int, Mapping[str, Any], str, str], _Inverse]]] = {
        BIND: _bind,
        SEAL: _seal,
        RESERVE: _reserve,
        COMMIT: _commit,
        GIVE_BACK: _give_back,
        SNAPSHOT: _snapshot,
    }
    """What a line of each kind does; a kind that is not here is refused."""

    _MEMBERS: ClassVar[Mapping[str, str]] = {}
    """The kind of line that may have each of `RESERVED`."""


def slots(component: Component) -> Iterator[Slot]:
    """Yields every (template, label) of a component."""
    if component.limit is not None:
        yield component.kind, None
    for ticket in component.tickets:
        yield ticket.template, ticket.label


def _totals(component: Component, slot: Slot) -> _SlotTotals:
    """Returns the totals of a slot before anything is reserved."""
    refundable = component.limit is not None or component.ticket(*slot).refundable
    return _SlotTotals(component, slot, allowance(component, slot), refundable)


def _place(entry: _UnsettledReservation) -> tuple[str, str, str | None]:
    """Returns the component, template and label of a reservation."""
    return entry.totals.component.name, *entry.totals.slot


def pair_of(amount: Amount) -> list[int]:
    """Returns the JSON form of an exact amount."""
    return [amount.numerator, amount.denominator]


def amount_of(component: Component, pair: Sequence[int]) -> Amount:
    """Returns the amount of `pair_of`."""
    numerator, denominator = pair
    amount = Fraction(numerator, denominator)
    return int(amount) if component.kind == "tickets" and denominator == 1 else amount


def _text(value: object, what: str) -> str:
    if type(value) is not str:
        raise LedgerError(f"expected {what} as text")
    return value


def _require(condition: bool, expected: str) -> None:
    if not condition:
        raise LedgerError(f"expected {expected}")
