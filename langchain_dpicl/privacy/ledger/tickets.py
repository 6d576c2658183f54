"""Defines tickets, components and share terms, and computes the price of a share from its tickets."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from langchain_dpicl._lazy import provided
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy import accounting
from langchain_dpicl.privacy._validate import (
    NEEDS_DELTA,
    Adjacency,
    check_delta,
    check_epsilon,
    check_flag,
    check_int,
    check_name,
    check_real,
    effective_delta,
    fail,
)
from langchain_dpicl.privacy.accounting.events import (
    ComposedEvent,
    Event,
    GaussianEvent,
    NoEvent,
    NonPrivateEvent,
    ParallelEvent,
    RepeatedEvent,
    ZCdpEvent,
    canonical_json,
    event_from_dict,
    event_parts,
    event_to_dict,
    is_event,
)

Kind: TypeAlias = Literal["tickets", "gdp", "zcdp"]

Blocks: TypeAlias = tuple[int, int]
"""The first and the last block of a range of a stream."""

Extent: TypeAlias = tuple[int, int | None]
"""The first and the last block that the tickets of a component may read; None: every block to come."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """The right to run one kind of release, a declared number of times.

    Attributes:
      template: public name, distinct within the share for each label.
      event: of one ticket, amplification included; a block on one secret sample is one ticket.
      label: the declared label whose units it reads; None: it may read every unit.
      max_count: how many tickets there are.
      refundable: whether a reserved ticket whose private calls never started may be given back. Only for tickets
        of one release: a longer block is indivisible.

    Raises:
      ConfigurationError: a name, a count or the event is invalid.
    """

    template: str
    event: Event
    label: str | None = None
    max_count: int = 1
    refundable: bool = False

    def __post_init__(self) -> None:
        check_name("template", self.template)
        check_int("max_count", self.max_count, low=1)
        if self.label is not None:
            check_name("label", self.label)
        check_flag("refundable", self.refundable)
        if not is_event(self.event):
            raise fail("event", "an event of privacy.events", type(self.event).__name__)
        inside = {type(part) for part in event_parts(self.event)}
        if NonPrivateEvent in inside:
            advice = "A release without protection has no price: it needs separate, public inputs."
            raise fail("event", "an event with a finite cost", NonPrivateEvent.kind, advice)
        if ParallelEvent in inside:
            raise fail("event", "the event of one label", ParallelEvent.kind, "Give the ticket a label instead.")

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON form; `from_dict` inverts it exactly."""
        return {
            "template": self.template,
            "event": event_to_dict(self.event),
            "label": self.label,
            "max_count": self.max_count,
            "refundable": self.refundable,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Ticket:
        """Rebuilds a ticket from its JSON form.

        Args:
          data: the result of `to_dict`.
        """
        return cls(**{**data, "event": event_from_dict(data["event"])})


def event_of_tickets(tickets: Sequence[Ticket], *, partition: str | None = None) -> Event:
    """Returns what all tickets together may release.

    Formal guarantees:
      - Tickets without a label compose; tickets of different labels run in parallel over the units of `partition`,
        tickets of one label compose inside their branch.
    """
    items = tuple(tickets)
    if not items or not all(isinstance(ticket, Ticket) for ticket in items):
        raise fail("tickets", "at least one Ticket", [type(ticket).__name__ for ticket in items])
    names = [(ticket.template, ticket.label) for ticket in items]
    if len(set(names)) != len(names):
        raise fail("tickets", "each (template, label) once", names)
    branches: dict[str | None, list[Event]] = {}
    for ticket in items:
        event = ticket.event if ticket.max_count == 1 else RepeatedEvent(ticket.event, ticket.max_count)
        branches.setdefault(ticket.label, []).append(event)
    everyone = branches.pop(None, [])
    if not branches:
        return compose_events(everyone)
    if partition is None:
        raise fail("partition", "the dataset_id that declares the labels of the tickets", partition)
    parallel = ParallelEvent(
        partition, tuple((str(label), compose_events(events)) for label, events in branches.items())
    )
    return compose_events([*everyone, parallel])


def compose_events(events: Sequence[Event]) -> Event:
    """Returns the composition of events; of one event, the event itself."""
    return events[0] if len(events) == 1 else ComposedEvent(tuple(events))


@dataclass(frozen=True, slots=True)
class Component:
    """What one named component is allowed to run. All of it is public."""

    name: str  # one per ledger
    kind: Kind
    tickets: tuple[Ticket, ...] = ()
    partition: str | None = None  # `dataset_id` whose labels split the tickets
    epsilon: float | None = None  # the requested share; None: whatever it costs
    delta: float | None = None  # with implementation deltas; None inside a plan with a delta of its own
    implementation_delta: float = 0.0  # declared gap between ideal and drawn noise over all tickets
    limit: float | None = None  # mu of a GDP pool or rho of a zCDP pool
    public: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # parameters to show in reports
    extent: Extent | None = None  # of a stream: the blocks that its tickets may read, whose counts hold per window
    # What of `public` is a term as well. Of this process: a ledger holds `public` alone.
    plan: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_name("component", self.name)
        if self.extent is not None:
            object.__setattr__(self, "extent", provided("streams").checked_extent(self.extent))
        if self.epsilon is not None:
            object.__setattr__(self, "epsilon", check_epsilon(self.epsilon))
        if self.delta is not None:
            object.__setattr__(self, "delta", check_delta(self.delta))
        gap = check_real("implementation_delta", self.implementation_delta, low=0.0, high=1.0)
        object.__setattr__(self, "implementation_delta", gap)
        object.__setattr__(self, "public", _plain_json("public", self.public))
        object.__setattr__(self, "plan", _plain_json("plan", self.plan))

    @property
    def event(self) -> Event:
        """What the component may release in all."""
        if self.limit is None:
            return event_of_tickets(self.tickets, partition=self.partition)
        return GaussianEvent(1 / self.limit) if self.kind == "gdp" else ZCdpEvent(self.limit)

    def ticket(self, template: str, label: str | None) -> Ticket:
        """Returns the ticket of a template and label; refuses others."""
        for ticket in self.tickets:
            if (ticket.template, ticket.label) == (template, label):
                return ticket
        known = sorted({(ticket.template, ticket.label or "") for ticket in self.tickets})
        raise fail("template, label", f"one of {known} (declared by {self.name!r})", (template, label))

    @property
    def parameters(self) -> dict[str, Any]:
        """The public parameters without the recipients of private text, which only reports show."""
        return {name: value for name, value in self.public.items() if name != "seen_by"}

    def changed_terms(self, wanted: Component) -> list[str]:
        """Returns the names of the terms in which the two differ; of `public` they are the wanted plan and its runs.

        Without them a report would show another plan than was run. What a plan costs, and how much a pool holds, may
        differ: they follow from the other terms, and another version or processor may bound them otherwise.
        """
        free: dict[str, Any] = {"public": None, "limit": None}
        mine, theirs = ({**each.to_dict(), **free, "runs": each._runs} for each in (self, wanted))  # noqa: SLF001
        changed = [key for key in {**mine, **theirs} if mine.get(key) != theirs.get(key)]
        others = [name for name, value in wanted.plan.items() if not _is_shown(name, value, self.public)]
        return list(dict.fromkeys(changed + others))

    @property
    def _runs(self) -> Any:
        return None if self.extent is None else self.public.get("stream")

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON form; `from_dict` inverts it exactly."""
        data = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del data["plan"]
        extent = data.pop("extent")
        if extent is not None:
            data["extent"] = list(extent)
        return {**data, "tickets": [ticket.to_dict() for ticket in self.tickets], "public": dict(self.public)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Component:
        """Rebuilds a component from its JSON form."""
        made = cls(**{**data, "tickets": tuple(Ticket.from_dict(item) for item in data["tickets"])})
        kinds = ("tickets",) if made.limit is None else ("gdp", "zcdp")
        if made.kind not in kinds:
            raise fail("kind", f"one of {kinds}, with the limit {made.limit}", made.kind)
        return made


def _is_shown(name: str, value: Any, public: Any) -> bool:
    """Whether a part of a plan is what a component shows, which may show more beside it; a price may be another one."""
    shown = public.get(name)
    if isinstance(value, Mapping) and isinstance(shown, Mapping):
        return all(_is_shown(key, part, shown) for key, part in value.items())
    return (name == "epsilon" and "method" in public) or canonical_json(value) == canonical_json(shown)


def as_shown(plan: Mapping[str, Any], public: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a plan as a component shows it, without what it shows beside the plan."""
    return {
        name: as_shown(value, public[name])
        if isinstance(value, Mapping) and isinstance(public[name], Mapping)
        else public[name]
        for name, value in plan.items()
        if name in public
    }


def _plain_json(name: str, shown: Mapping[str, Any]) -> Mapping[str, Any]:
    plain = None
    if isinstance(shown, Mapping):
        try:
            plain = json.loads(canonical_json(dict(shown)).encode("utf-8"))
        except (TypeError, ValueError):
            plain = None
    if plain is None:
        raise ConfigurationError(f"{name}: expected a mapping of JSON values (finite numbers, text), found another.")
    return dict(plain)


@dataclass(frozen=True, slots=True)
class ShareTerms:
    """A share of the budget: one component, or several composed together, and its charge."""

    components: tuple[Component, ...]
    epsilon: float
    delta: float
    joint: bool  # declared inside `budget.plan()`
    event: Event
    pricing: Mapping[str, Any]  # engine, opinions and skipped checks of the accountant, as JSON values

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON form; `from_dict` inverts it exactly."""
        return {
            "components": [component.to_dict() for component in self.components],
            "epsilon": self.epsilon,
            "delta": self.delta,
            "joint": self.joint,
            "event": event_to_dict(self.event),
            "pricing": dict(self.pricing),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ShareTerms:
        """Rebuilds a share from its JSON form."""
        components = tuple(Component.from_dict(item) for item in data["components"])
        return cls(**{**data, "components": components, "event": event_from_dict(data["event"])})


def event_of_components(components: Iterable[Component]) -> Event:
    """Returns what the components may release together; components without tickets release nothing."""
    events = [component.event for component in components]
    return compose_events(events) if events else NoEvent()


def extent_of(components: Iterable[Component]) -> Extent | None:
    """Returns the least range with the blocks of all components of a stream, or None."""
    extents = [component.extent for component in components if component.extent is not None]
    return provided("streams").hull_of(extents) if extents else None


def implementation_delta_of(components: Iterable[Component]) -> float:
    """Returns the declared noise gaps of all components, added."""
    return math.fsum(component.implementation_delta for component in components)


def delta_for_mechanisms(components: Iterable[Component], delta: float) -> float:
    """Returns what `delta` leaves once the declared noise gaps are set aside; refuses a delta that leaves nothing."""
    remaining = effective_delta(delta, gap := implementation_delta_of(components))
    if gap > 0 and delta == 0:
        raise fail("delta", f"more than the declared implementation_delta {gap:.3g}", delta, NEEDS_DELTA)
    if remaining < 0 or (remaining == 0 and delta > 0):
        raise fail("delta", "more than the declared implementation_delta", delta, "Raise delta or run fewer releases.")
    return remaining


def price(
    components: Sequence[Component], *, delta: float, adjacency: Adjacency, opinions: bool = True
) -> tuple[float, dict[str, Any]]:
    """Returns an upper bound of what the components cost together at `delta`, and how it was computed.

    Formal guarantees:
      - The declared implementation deltas are set aside first; the mechanisms are priced at the rest of `delta`.
      - `opinions=False` gives the same price without asking a second accountant.
    """
    rest = delta_for_mechanisms(components, delta)
    bound = accounting.epsilon_bound(
        event_of_components(components), delta=rest, adjacency=adjacency, opinions=opinions
    )
    intervals = [{"name": o.name, "lower": _finite(o.lower), "upper": _finite(o.upper)} for o in bound.opinions]
    return bound.epsilon, {"engine": bound.engine, "opinions": intervals, "skipped": list(bound.skipped)}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
