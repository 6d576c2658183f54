"""The one place that writes a ledger: catch up, decide, append, all inside one exclusive transaction.

Knows no records, no accountant and no component's purpose. Safe for threads of this process and, with a durable
store, for other processes on the same ledger.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from langchain_dpicl.exceptions import (
    ConfigurationError,
    LedgerError,
    PrivacyBudgetExceededError,
    PrivacyBudgetMismatchError,
    SealedShareError,
)
from langchain_dpicl.privacy.amounts import Amount, exact, round_down, round_up
from langchain_dpicl.privacy.ledger_state import BIND, RESERVE, SEAL, LedgerState, Slot, allowance, unit_cost
from langchain_dpicl.privacy.stores import InMemoryStore, LedgerHeader, LedgerRecord, LedgerStore, LedgerTransaction
from langchain_dpicl.privacy.tickets import Component, ShareTerms


@dataclass(slots=True, eq=False)
class Standing:
    """Where a declared share stands in this process.

    Attributes:
      terms: what it is charged; None while the plan it belongs to is open.
      refusal: why it can no longer be used; "" if it can.
    """

    terms: ShareTerms | None = None
    refusal: str = ""

    def usable_terms(self, name: str) -> ShareTerms:
        """Returns the terms to seal.

        Raises:
          ConfigurationError: the plan is still open.
          SealedShareError: the share was replaced or given up.
        """
        if self.refusal:
            raise SealedShareError(f"{name!r}: {self.refusal} Use the share declared last, or declare it again.")
        if self.terms is None:
            msg = (
                f"{name!r}: expected a closed plan, found an open one: its joint cost is not known yet. "
                "Leave the `with budget.plan()` block, then run the component."
            )
            raise ConfigurationError(msg)
        return self.terms


@dataclass(slots=True)
class _Writer:
    """Appends lines and applies each to the state at once."""

    view: LedgerTransaction
    state: LedgerState
    is_ours: bool
    wrote: bool = False

    def append(self, kind: str, body: Mapping[str, Any]) -> LedgerRecord:
        self.wrote = True
        record = self.view.append(kind, body)
        # A store of others may return anything; ours took the hash from these very members a moment ago.
        self.state.apply(record, is_hashed=self.is_ours)
        return record


class Desk:
    """One process's hand on one ledger."""

    def __init__(self, store: LedgerStore, header: LedgerHeader) -> None:
        self.store = store
        self.header = header
        self.lock = threading.RLock()
        self._state = LedgerState(header)
        self._seen = (0, "")  # number and hash of the last line that stood, kept when the state is read anew
        self._agreed: dict[str, tuple[Component, Component]] = {}

    def refresh(self) -> LedgerState:
        """Returns the state after every committed line.

        Raises:
          LedgerError: the ledger went back in time, was changed, or cannot be read.
        """
        with self.lock:
            self._catch_up(self.store)
            return self._state

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[_Writer]:
        """Opens the ledger for this thread alone, caught up; its lines stand if the block ends well."""
        with self.lock:
            writer = None
            try:
                with self.store.transaction() as view:
                    self._catch_up(view)
                    writer = _Writer(view, self._state, is_ours=type(self.store) is InMemoryStore)
                    yield writer
                self._seen = (self._state.seq, self._state.head)
            except BaseException:
                # Whether lines that were written stand is the store's word: read it again from the start.
                if writer is not None and writer.wrote:
                    self._state = LedgerState(self.header)
                raise

    def _catch_up(self, source: LedgerStore | LedgerTransaction) -> None:
        known = self._state
        head: Callable[[], tuple[int, str]] | None = getattr(source, "head", None)
        if head is not None and known.seq >= self._seen[0] and head() == (known.seq, known.head):
            return
        fresh = list(source.records(max(known.seq - 1, 0)))
        # The last line seen must still be there: a restored older copy would give budget back.
        number, seen = max(self._seen, (known.seq, known.head))
        place = number - max(known.seq, 1)
        if number and (place >= len(fresh) or fresh[place].hash != seen):
            msg = f"ledger {self.header.ledger_id}: lines seen before are gone or changed. Nothing is granted."
            raise LedgerError(msg)
        try:
            for record in fresh[1:] if known.seq else fresh:
                known.apply(record)
        except BaseException:
            self._state = LedgerState(self.header)  # half a line may stand: read from the start
            raise
        self._seen = (known.seq, known.head)

    def verify(self) -> None:
        """Recomputes the whole chain and every rule from the first line.

        Raises:
          LedgerError: a line was changed, dropped or breaks a rule.
        """
        if self.store.header() != self.header:
            raise LedgerError(f"ledger {self.header.ledger_id}: the header was changed. Nothing is granted.")
        with self.lock:
            fresh = LedgerState(self.header)
            for record in self.store.records(0):
                fresh.apply(record)
            self._catch_up(self.store)

    def bind(self, declaration: Mapping[str, Any], attach: Callable[[str], object]) -> None:
        """Binds a data set: attaches the examples, then writes their declaration unless it stands already."""
        name = declaration["dataset_id"]
        with self.exclusive() as writer:
            known = writer.state.bindings.get(name)
            changed = [] if known is None else [key for key in known if known[key] != declaration.get(key)]
            if changed:
                msg = (
                    f"{name!r}: expected the declaration this ledger holds, found another in {changed}. "
                    "Give a different data set a dataset_id of its own."
                )
                raise PrivacyBudgetMismatchError(msg)
            attach(self.header.ledger_id)
            if known is None:
                writer.append(BIND, declaration)

    def reserve(self, standing: Standing, component: Component, slot: Slot, *, count: int, amount: float = 1.0) -> int:
        """Reserves tickets durably and returns the reservation's number; the first one seals the share.

        Raises:
          PrivacyBudgetExceededError: not so many tickets are left, or the share no longer fits.
          SealedShareError: the share was replaced, or is sealed on other terms.
          ConfigurationError: its plan is still open.
        """
        cost = unit_cost(component.kind, amount) * count
        with self.exclusive() as writer:
            terms = standing.usable_terms(component.name)
            sealed = writer.state.sealed_component(component.name)
            if sealed is None:
                left = allowance(component, slot)
            else:
                self._check_same_terms(component, sealed)
                left = writer.state.left(component.name, slot)
            if cost > left:
                raise _too_few(component, slot, cost, left)
            if sealed is None:
                self._seal(writer, terms)
            body = {"component": component.name, "template": slot[0], "label": slot[1]}
            return writer.append(RESERVE, {**body, "count": count, "amount": float(amount)}).seq

    def _check_same_terms(self, wanted: Component, sealed: Component) -> None:
        """Is `check_same_terms`, once for two objects: neither ever changes."""
        seen = self._agreed.get(wanted.name)
        if seen is None or seen[0] is not wanted or seen[1] is not sealed:
            check_same_terms(wanted, sealed)
            self._agreed[wanted.name] = wanted, sealed

    def _seal(self, writer: _Writer, terms: ShareTerms) -> None:
        taken = [c.name for c in terms.components if c.name in writer.state.shares]
        if taken:
            raise SealedShareError(f"{taken}: sealed meanwhile by another process. Declare the plan again.")
        for name, spent, limit, wanted in self._sums(writer.state, terms):
            if exact(wanted) > limit - spent:
                raise exceeded(name, wanted, max(limit - spent, Fraction(0)), "Other processes sealed shares first.")
        writer.append(SEAL, terms.to_dict())

    def _sums(self, state: LedgerState, terms: ShareTerms) -> Iterator[tuple[str, Fraction, Fraction, float]]:
        epsilon, delta = state.spent
        yield "epsilon", epsilon, exact(self.header.epsilon), terms.epsilon
        yield "delta", delta, exact(self.header.delta), terms.delta

    def settle(self, kind: str, reservation: int, count: int) -> None:
        """Records that reserved tickets were committed or given back."""
        with self.exclusive() as writer:
            writer.append(kind, {"reservation": reservation, "count": count})


def exceeded(what: str, requested: float, remaining: Amount, advice: str) -> PrivacyBudgetExceededError:
    """Returns the refusal of a request; the caller raises it."""
    left = round_down(remaining)
    msg = f"{what}: requested {requested:.9g}, remaining {left:.9g}. {advice}"
    return PrivacyBudgetExceededError(msg, requested=requested, remaining=left)


def check_same_terms(wanted: Component, sealed: Component) -> None:
    """Refuses terms that differ from the sealed ones.

    Raises:
      SealedShareError: they differ.
    """
    changed = sealed.changed_terms(wanted)
    if changed:
        msg = (
            f"{wanted.name!r}: expected the terms sealed by its first reservation, found others in {changed}. "
            "Declare the same terms to go on with its tickets, or another component name for a new share."
        )
        raise SealedShareError(msg)


def _too_few(component: Component, slot: Slot, cost: Amount, left: Amount) -> PrivacyBudgetExceededError:
    if component.kind == "tickets":
        what = (
            f"tickets {slot[0]!r}" + ("" if slot[1] is None else f" for label {slot[1]!r}") + f" of {component.name!r}"
        )
    else:
        what = f"{'mu^2' if component.kind == 'gdp' else 'rho'} of pool {component.name!r}"
    return exceeded(what, round_up(cost), left, "What was reserved stays charged; a new share needs budget of its own.")
