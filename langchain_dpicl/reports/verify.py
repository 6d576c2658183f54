"""Verifies what a report shows of a component against tickets, data set and price, and a receipt against the ledger."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_dpicl.exceptions import DPICLError, LedgerRollbackError, PrivacyBudgetMismatchError
from langchain_dpicl.privacy._validate import Adjacency, check_delta, check_int, check_real, fail
from langchain_dpicl.privacy.accounting import events
from langchain_dpicl.privacy.accounting.events import PureEvent, canonical_json
from langchain_dpicl.privacy.data.units import Declaration
from langchain_dpicl.privacy.extensions.gradient_sums import SampledBallEvent
from langchain_dpicl.privacy.extensions.individual_filter import FILTER_TEMPLATE, participation_plan
from langchain_dpicl.privacy.extensions.joint_plans import share_price
from langchain_dpicl.privacy.extensions.logit_sums import LOGIT_MECHANISMS, logit_sum
from langchain_dpicl.privacy.extensions.random_allocation import AllocatedEvent
from langchain_dpicl.privacy.extensions.registry import mechanism_by_name
from langchain_dpicl.privacy.ledger.state import RESERVE
from langchain_dpicl.privacy.ledger.store import LedgerHeader, LedgerStore
from langchain_dpicl.privacy.ledger.tickets import Component, Ticket, event_parts
from langchain_dpicl.privacy.mechanisms.noise import GumbelMechanism
from langchain_dpicl.privacy.mechanisms.randomness import SecureRandom

# Prices are rounded up at the seventh digit, which another machine's order of summation may move by one.
RECOMPUTE_TOLERANCE = 2e-6
# What is not priced but shown: the same decimals, or the same quotient.
SHOWN_TOLERANCE = 1e-9

# What the report of a token-by-token generation shows; then its tickets and noise gap follow from it.
_GENERATION = {"adjacency", "candidates", "delta", "epsilon", "labels", "max_tokens", "mechanism", "noise_multiplier"}
_DESIGN = {"num_slots", "shots_per_slot", "sampling", "overfill"}
# What the report of labels for public inputs shows; `verify_methods` compares all of it with the tickets.
_LABELLING = {"teachers", "max_queries", "mechanism"}

_ON_A_SAMPLE = (events.SubsampledEvent, AllocatedEvent)

# What a value of another form than ours brings about, wherever it is read.
UNREADABLE = (DPICLError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class VerificationContext:
    """What every share of a report is compared with."""

    adjacency: Adjacency
    datasets: Mapping[str, Declaration]
    this_version: bool

    def is_misstated(self, stated: Any, cost: float) -> bool:
        """Whether a price is not the recomputed one; another version's may be higher, never lower."""
        value = check_real("epsilon", stated, low=0.0)
        too_high = self.this_version and value > cost * (1 + RECOMPUTE_TOLERANCE)
        return too_high or value < cost * (1 - RECOMPUTE_TOLERANCE)

    def dataset_of(self, component: Component) -> Declaration | None:
        """Returns the declaration of the data set that a component reads, or None."""
        return self.datasets.get(component.partition or "")

    def dataset(self, component: Component) -> Declaration:
        """Returns the declaration of the data set that a component reads; refuses a component without one."""
        declared = self.dataset_of(component)
        if declared is None:
            raise fail("partition", "the dataset_id of a data set of the report", component.partition)
        return declared


def own_cost(component: Component, book: VerificationContext) -> float:
    """Returns what a component's tickets cost by themselves, at its own delta."""
    return share_price((component,), delta=check_delta(component.delta), adjacency=book.adjacency, opinions=False)[0]


def describe_fault(error: BaseException) -> str:
    """Returns what is wrong with a value that could not be read."""
    return f"{error} is missing" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"


def problems_in(problems: Iterable[str], subject: str) -> list[str]:
    """Returns all problems; a value of an unexpected form ends the comparison and is one problem."""
    try:
        return list(problems)
    except UNREADABLE as error:
        return [f"{subject} cannot be read: {describe_fault(error)}"]


def plan_problems(
    component: Component,
    book: VerificationContext,
    plan: str,
    *,
    tickets: Sequence[Ticket],
    gap: float,
    numbers: Iterable[tuple[str, Any]],
) -> Iterator[str]:
    """Compares a component with the plan that its parameters make: tickets, noise gap, numbers shown, terms."""
    shown = component.public
    if component.tickets != tuple(tickets):
        yield f"shows {plan}, which makes other tickets than it has"
    if not is_same_number(component.implementation_delta, gap):
        yield f"implementation_delta: expected {gap!r}, found {component.implementation_delta!r}"
    for name, value in numbers:
        number = shown.get(name)
        is_number = isinstance(value, float) and math.isfinite(value)
        if not (is_same_number(number, value) if is_number else canonical_json(number) == canonical_json(value)):
            yield f"shows {name} {number!r}, its release, data set and share make it {value!r}"
    yield from terms_problems(component, book)


def terms_problems(component: Component, book: VerificationContext) -> Iterator[str]:
    """Compares the adjacency, delta and epsilon that a component shows with its share and its recomputed price."""
    shown = component.public
    if (shown["adjacency"], shown["delta"]) != (book.adjacency, component.delta):
        own = f"the ledger's adjacency is {book.adjacency!r}, the share's delta {component.delta!r}"
        yield f"shows adjacency {shown['adjacency']!r} and delta {shown['delta']!r}; {own}"
    if book.is_misstated(shown["epsilon"], cost := own_cost(component, book)):
        yield f"shows epsilon {shown['epsilon']!r}, its tickets cost up to {cost!r}"


def has_members(holder: object, *names: str) -> bool:
    """Returns whether a JSON object has these keys, or another object these attributes."""
    if isinstance(holder, Mapping):
        return set(names) <= set(holder)
    return all(hasattr(holder, name) for name in names)


def member(holder: object, name: str) -> Any:
    """Returns a member of a JSON object, or an attribute of another object; None where there is none."""
    return holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)


def shows_labels(component: Component) -> bool:
    """Returns whether a component shows the parameters of labels for public inputs."""
    return set(component.public) >= _LABELLING


def parameter_problems(component: Component, book: VerificationContext) -> Iterator[str]:
    """Compares the parameters shown with the tickets, the data set and the prices."""
    shown = component.public
    if component.limit is not None and (component.tickets or component.kind == "tickets"):
        yield "has tickets and is charged as a pool"
    noises = {noise for ticket in component.tickets for noise in map(_noise, event_parts(ticket.event)) if noise}
    is_one_noise = "noise_multiplier" in shown and not shows_labels(component)
    if noises and is_one_noise and not any(is_same_number(shown["noise_multiplier"], noise) for noise in noises):
        yield f"shows noise_multiplier {shown['noise_multiplier']!r}, its tickets have {sorted(noises)}"
    branches = shown.get("labels")
    branches = [b for b in branches if isinstance(b, Mapping)] if isinstance(branches, list) else []
    for branch in branches:
        yield from _branch_problems(branch, component, book)
    if _GENERATION | {"shots_per_label"} <= set(shown):
        yield from _generation_problems(component, book)


def _branch_problems(branch: Mapping[str, Any], component: Component, book: VerificationContext) -> Iterator[str]:
    label, shown = branch.get("label"), component.public
    rate, size = branch.get("sampling_rate"), branch.get("public_size")
    released = [ticket.event for ticket in component.tickets if ticket.label == label]
    rates = {event.sampling_rate if isinstance(event, _ON_A_SAMPLE) else 1.0 for event in released}
    if rate is not None and not (rates and all(is_same_number(rate, one) for one in rates)):
        yield f"shows sampling_rate {rate!r} of label {label!r}, its tickets have {sorted(rates)}"
    declared = book.dataset_of(component)
    if size is not None and (declared is None or size != _size_of(declared, label)):
        yield f"shows public_size {size!r} of label {label!r}, which no data set of the report declares"
    if rate is not None and size is not None and set(shown) >= _DESIGN:
        overfill = 1 if shown["sampling"] == "fixed" else shown["overfill"]
        batches = max((event.num_batches for event in released if isinstance(event, AllocatedEvent)), default=1)
        drawn = batches * shown["num_slots"] * shown["shots_per_slot"] * overfill
        if not is_same_number(rate, min(1.0, drawn / size)):
            yield f"shows sampling_rate {rate!r} of label {label!r}, its rows and public_size make {drawn / size!r}"


def _generation_problems(component: Component, book: VerificationContext) -> Iterator[str]:
    shown = component.public
    is_logit = shown["mechanism"] in LOGIT_MECHANISMS
    by_name = GumbelMechanism if is_logit else mechanism_by_name(shown["mechanism"])
    mechanism = by_name(noise_multiplier=shown["noise_multiplier"])
    releases = shown["shots_per_label"] * sum(shown["max_tokens"].values())
    by_label: dict[str | None, int] = {}
    for ticket in component.tickets:
        if type(mechanism.event) not in {type(part) for part in event_parts(ticket.event)}:
            yield f"shows mechanism {shown['mechanism']!r}, ticket {ticket.template!r} is of another"
        by_label[ticket.label] = by_label.get(ticket.label, 0) + ticket.max_count * _length(ticket)
    paid = _private_releases(shown) if "free_tokens" in shown else releases
    if set(by_label.values()) != {paid} or {branch["label"] for branch in shown["labels"]} != set(by_label):
        yield f"shows {paid} releases for each of its labels, its tickets allow {by_label}"
    if is_logit:
        yield from _logit_problems(component, book)
    yield from _design_problems(component)
    if shown.get("sampling") == "fixed" and book.adjacency != "replace_one":
        yield f"shows a sample of fixed size under {book.adjacency!r}, for which there is no theorem"
    if shown.get("sampling") in {"fixed", "partition"} and _hides_sizes(component, set(by_label), book):
        yield "shows a sample of fixed size of labels whose sizes are private: a unit that is replaced may leave one"
    twice = 2 if book.adjacency == "replace_one" and len(by_label) > 1 else 1
    gap = mechanism.implementation_delta(shown["candidates"]) + SecureRandom.implementation_delta("binomial")
    if not is_same_number(component.implementation_delta, twice * (releases * gap)):
        yield f"implementation_delta: expected {twice * releases * gap!r}, found {component.implementation_delta!r}"
    yield from terms_problems(component, book)


def _hides_sizes(component: Component, labels: set[str | None], book: VerificationContext) -> bool:
    """Whether a unit may leave what is sampled from: one of several labels, or one that split the units later."""
    declared = book.dataset_of(component)
    is_split_anew = declared is not None and declared.origin is not None and declared.origin[1] is not None
    return len(labels) > 1 or (is_split_anew and labels != {None})


def origin_problems(datasets: Mapping[str, Declaration]) -> Iterator[str]:
    """Compares what is declared again with the first declaration of the same units, where the report has it.

    Args:
      datasets: declarations by `dataset_id`.
    """
    unchanged = ("text_key", "unit_key", "extra_fields", "max_chars", "records_per_unit")
    for name, declared in datasets.items():
        first = datasets.get(declared.origin[0]) if declared.origin is not None else None
        others = [key for key in unchanged if first is not None and getattr(declared, key) != getattr(first, key)]
        if others:
            yield f"datasets: {name!r} declares the units again, with another {', '.join(others)}"


def _design_problems(component: Component) -> Iterator[str]:
    """A deal is one ticket for all demonstrations of a label; else blocks are as long as the redraw period says."""
    shown = component.public
    if "sampling" not in shown:
        return
    caps, period = shown["max_tokens"].values(), shown["redraw_every"]
    if shown["sampling"] == "disjoint":
        wanted = {shown["shots_per_label"]: sum(caps)}
        batches = {_batches(ticket): _length(ticket) // _batches(ticket) for ticket in component.tickets}
        if "free_tokens" not in shown and batches != wanted:
            yield f"shows batches and releases of a deal {wanted}, its tickets have {batches}"
        if {ticket.max_count for ticket in component.tickets} != {1} or set(batches) != set(wanted):
            yield "shows one deal for each of its labels, its tickets are others"
    elif any(_batches(ticket) > 1 for ticket in component.tickets):
        yield f"shows sampling {shown['sampling']!r}, its tickets are deals"
    elif "free_tokens" not in shown:
        wanted_lengths = {length for cap in caps for length in (min(period, cap), cap % period) if length}
        if (lengths := {_length(ticket) for ticket in component.tickets}) != wanted_lengths:
            yield f"shows redraw_every {period!r}, its tickets have blocks of {sorted(lengths)}"


def _batches(ticket: Ticket) -> int:
    return ticket.event.num_batches if isinstance(ticket.event, AllocatedEvent) else 1


def _private_releases(shown: Mapping[str, Any]) -> int:
    """Returns how many tokens a test lets be private: so many of every sample, which lasts for a field, or for all."""
    caps = shown["max_tokens"].values()
    lasts = [sum(caps)] if shown["sampling"] == "disjoint" else caps
    return int(shown["shots_per_label"] * sum(min(shown["private_tokens"], cap) for cap in lasts))


def _logit_problems(component: Component, book: VerificationContext) -> Iterator[str]:
    """Clip, temperature and noise hang together; the test's noise is the tickets'."""
    shown = component.public
    clipped = logit_sum(
        shown["mechanism"],
        clip=shown["clip"],
        num_slots=shown["num_slots"],
        blend_weight=shown.get("blend_weight"),
        center=shown.get("center") if shown["mechanism"] == "clip_and_blend" else None,
    )
    moved = clipped.sensitivity(row_shape=shown["rows"], adjacency=book.adjacency).require("range")
    if not is_same_number(shown["noise_scale"], shown["temperature"]):
        yield f"shows noise_scale {shown['noise_scale']!r}, which is its temperature {shown['temperature']!r}"
    if shown.get("center") != clipped.center:
        yield f"shows center {shown.get('center')!r}, mechanism {shown['mechanism']!r} has {clipped.center!r}"
    if "free_tokens" in shown:
        check_real("free_tokens", shown["free_tokens"], low=0.0, high=1.0, low_open=True, high_open=True)
    if not is_same_number(shown["temperature"], temperature := shown["noise_multiplier"] * moved):
        yield f"shows temperature {shown['temperature']!r}, its clip and noise make {temperature!r}"
    tests = {part.epsilon for t in component.tickets for part in event_parts(t.event) if isinstance(part, PureEvent)}
    wanted = {2.0 / shown["test_noise_multiplier"]} if "free_tokens" in shown else set()
    if len(tests) != len(wanted) or not all(map(is_same_number, sorted(tests), sorted(wanted))):
        yield f"shows tests of {sorted(wanted)}, its tickets have {sorted(tests)}"


def _length(ticket: Ticket) -> int:
    """Returns the releases of one ticket: a block on one secret sample, or on each batch of a deal, is one event."""
    inner = ticket.event.event if isinstance(ticket.event, _ON_A_SAMPLE) else ticket.event
    batches = _batches(ticket)
    if isinstance(inner, events.ComposedEvent):  # runs of a test, and what they let through
        counts = [part.count for part in inner.events if isinstance(part, events.RepeatedEvent)]
        if len(counts) != len(inner.events) or len(set(counts)) != 1:
            return 0
        return batches * counts[0]
    return batches * (inner.count if isinstance(inner, events.RepeatedEvent) else 1)


def _noise(event: events.Event) -> float | None:
    """Returns the noise multiplier behind an event; None where it has none."""
    if isinstance(event, events.GaussianEvent | SampledBallEvent):
        return event.noise_multiplier
    if isinstance(event, events.BoundedRangeEvent):
        return 1 / event.bound
    return 1 / event.epsilon if isinstance(event, events.PureEvent) else None


def _size_of(declared: Declaration, label: str | None) -> int | None:
    size = declared.public_size
    if label is None:
        return declared.total_size
    return max(1, size // max(1, len(declared.labels))) if isinstance(size, int) else dict(size).get(label)


def is_same_number(left: Any, right: Any) -> bool:
    """Returns whether both are numbers, and the same."""
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (left, right))
    return numbers and math.isclose(left, right, rel_tol=SHOWN_TOLERANCE)


# A ledger cannot detect that an older copy of it was restored; the holder of a receipt can.

_FIELDS = ("ledger_id", "entry", "entry_hash")


def check_receipt(receipt: Any, header: LedgerHeader, store: LedgerStore, count: Callable[[], int]) -> None:
    """Refuses a receipt that names no line of a ledger of `count()` lines; see `Budget.check_receipt`."""
    ledger_id, entry, entry_hash = _read_receipt(receipt)
    if ledger_id != header.ledger_id:
        msg = f"receipt: expected one of ledger {header.ledger_id}, found one of {ledger_id}."
        raise PrivacyBudgetMismatchError(msg + " Open the ledger that it names.")
    last = count()
    if entry is None:
        return
    line = next(iter(store.records(entry - 1)), None) if entry <= last else None
    fault = ""
    if line is None:
        fault = f"{last} lines"
    elif line.hash != line.computed_hash or entry_hash not in {None, line.hash}:
        fault = f"another line with the hash {line.hash}"
    elif line.kind != RESERVE:
        fault = f"a line of the kind {line.kind!r}"
    if fault:
        msg = f"receipt: expected line {entry} with the hash {entry_hash} in ledger {ledger_id}, found {fault}."
        advice = "An older copy, or one that went on elsewhere, took the ledger's place. Bring the ledger itself back."
        raise LedgerRollbackError(f"{msg} {advice}")


def _read_receipt(receipt: Any) -> tuple[str, int | None, str | None]:
    if isinstance(receipt, Mapping):
        ledger_id, entry, entry_hash = (receipt.get(name) for name in _FIELDS)
    else:
        ledger_id, entry, entry_hash = (getattr(receipt, name, None) for name in _FIELDS)
    is_number = isinstance(entry, int) and not isinstance(entry, bool) and entry >= 1
    if not isinstance(ledger_id, str) or not (entry is None or is_number) or not isinstance(entry_hash, str | None):
        advice = "Give a receipt, a reservation, or a dict of these three."
        raise fail("receipt", f"{', '.join(_FIELDS)}", type(receipt).__name__, advice)
    return ledger_id, entry, entry_hash


def shows_participation(component: Component) -> bool:
    """Returns whether a component shows the parameters of an individual filter, or has the ticket of one."""
    return "participation" in component.public or any(
        ticket.template == FILTER_TEMPLATE for ticket in component.tickets
    )


def participation_problems(component: Component, book: VerificationContext) -> Iterator[str]:
    """Compares the filter that a component shows with its tickets, its share and its price.

    Formal guarantees:
      - No problem means: noise, rows and participations shown make exactly the tickets that are charged, one filter and
        free queries, and every number shown beside them is the release's or the share's.
    """
    shown, plan = component.public, participation_plan(component.public["participation"])
    queries, width = (check_int(name, shown[name], low=1) for name in ("max_queries", "width"))
    gap, tickets = plan.implementation_delta(queries, width=width), plan.tickets(queries)
    numbers = {
        "implementation_delta": gap,
        "noise_stddev": plan.noise_stddev,
        "public_size": book.dataset(component).total_size,
    }
    yield from plan_problems(component, book, "a filter", tickets=tickets, gap=gap, numbers=numbers.items())
