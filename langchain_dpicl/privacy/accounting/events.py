"""Says what was released, as frozen values with one JSON form.

Promise of the format (events are stored in ledgers and reports): an event's meaning never changes; a new
meaning is a new class; `kind` names are never reused. Every parameter is public.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from langchain_dpicl._lazy import provided
from langchain_dpicl.exceptions import UnknownEventError
from langchain_dpicl.privacy._validate import MAX_INT, describe_value


def require(condition: bool, event: str, expected: str, found: object) -> None:
    """Refuses a parameter of an event."""
    if not condition:
        msg = f"{event}: expected {expected}, found {describe_value(found)}."
        raise UnknownEventError(msg)


def is_positive(value: float) -> bool:
    """Returns whether a value is a number above 0."""
    try:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and float(value) > 0
    except OverflowError:  # a whole number beyond every float
        return False


@dataclass(frozen=True, slots=True)
class Event:
    """Base of the events. What is not in `CORE_EVENTS` or in `registry.EVENT_TYPES` is neither read nor priced."""

    kind: ClassVar[str]

    @property
    def parts(self) -> tuple[Event, ...]:
        """The events that this one is made of."""
        return ()

    def with_parts(self, parts: tuple[Event, ...]) -> Event:
        """Returns the same event made of other parts.

        Args:
          parts: as many as this one has.
        """
        del parts
        return self


@dataclass(frozen=True, slots=True)
class NoEvent(Event):
    """Nothing about private data was released."""

    kind: ClassVar[str] = "none"


@dataclass(frozen=True, slots=True)
class NonPrivateEvent(Event):
    """Private data was released without protection: epsilon is infinite."""

    kind: ClassVar[str] = "non_private"


@dataclass(frozen=True, slots=True)
class GaussianEvent(Event):
    """x + N(0, (noise_multiplier * L2 sensitivity)^2 I), the sensitivity being that of the adjacency in force.

    Attributes:
      noise_multiplier: standard deviation over the L2 sensitivity, > 0.

    Raises:
      UnknownEventError: the multiplier is no number above 0.
    """

    noise_multiplier: float
    kind: ClassVar[str] = "gaussian"

    def __post_init__(self) -> None:
        require(is_positive(self.noise_multiplier), "GaussianEvent", "noise_multiplier > 0", self.noise_multiplier)


@dataclass(frozen=True, slots=True)
class PureEvent(Event):
    """Any mechanism that is (epsilon, 0)-DP, for instance permute-and-flip.

    Attributes:
      epsilon: of the mechanism, > 0 and finite.

    Raises:
      UnknownEventError: epsilon is no finite number above 0.
    """

    epsilon: float
    kind: ClassVar[str] = "pure"

    def __post_init__(self) -> None:
        ok = is_positive(self.epsilon) and math.isfinite(self.epsilon)
        require(ok, "PureEvent", "finite epsilon > 0", self.epsilon)


@dataclass(frozen=True, slots=True)
class BoundedRangeEvent(Event):
    """An `bound`-bounded-range mechanism: the exponential mechanism whose scores move within a range of `bound`
    noise scales between neighbours (Dong, Durfee, Rogers 2020).

    Attributes:
      bound: range of the privacy loss, > 0 and finite.

    Raises:
      UnknownEventError: the bound is no finite number above 0.
    """

    bound: float
    kind: ClassVar[str] = "bounded_range"

    def __post_init__(self) -> None:
        ok = is_positive(self.bound) and math.isfinite(self.bound)
        require(ok, "BoundedRangeEvent", "finite bound > 0", self.bound)


@dataclass(frozen=True, slots=True)
class ZCdpEvent(Event):
    """Any rho-zCDP mechanism (Bun and Steinke 2016).

    Attributes:
      rho: of the mechanism, > 0 and finite.

    Raises:
      UnknownEventError: rho is no finite number above 0.
    """

    rho: float
    kind: ClassVar[str] = "zcdp"

    def __post_init__(self) -> None:
        require(is_positive(self.rho) and math.isfinite(self.rho), "ZCdpEvent", "finite rho > 0", self.rho)


@dataclass(frozen=True, slots=True)
class FailureEvent(Event):
    """Any mechanism that is (0, delta)-DP, such as a threshold that what one unit alone holds passes by chance.

    It tells nothing, but for an event of probability `delta` at most, where it may tell everything.

    Attributes:
      delta: of the mechanism, in (0, 1).

    Raises:
      UnknownEventError: delta is no number in (0, 1).
    """

    delta: float
    kind: ClassVar[str] = "failure"

    def __post_init__(self) -> None:
        ok = is_positive(self.delta) and self.delta < 1
        require(ok, "FailureEvent", "0 < delta < 1", self.delta)


@dataclass(frozen=True, slots=True)
class RepeatedEvent(Event):
    """`event`, `count` times, adaptively.

    Attributes:
      event: what is repeated.
      count: how often, from 0 to 2^63 - 1.

    Raises:
      UnknownEventError: the count is out of range, or `event` is none.
    """

    event: Event
    count: int
    kind: ClassVar[str] = "repeated"

    def __post_init__(self) -> None:
        ok = isinstance(self.count, int) and not isinstance(self.count, bool) and 0 <= self.count <= MAX_INT
        require(ok, "RepeatedEvent", "an integer count from 0 to 2^63 - 1", self.count)
        require_event("RepeatedEvent", self.event)

    @property
    def parts(self) -> tuple[Event, ...]:
        """The event inside."""
        return (self.event,)

    def with_parts(self, parts: tuple[Event, ...]) -> Event:
        """Returns the same event around another."""
        return dataclasses.replace(self, event=parts[0])


@dataclass(frozen=True, slots=True)
class ComposedEvent(Event):
    """All of `events`, adaptively, in any order.

    Attributes:
      events: the parts.

    Raises:
      UnknownEventError: one of `events` is none.
    """

    events: tuple[Event, ...]
    kind: ClassVar[str] = "composed"

    def __post_init__(self) -> None:
        object.__setattr__(self, "events", tuple(self.events))
        for event in self.events:
            require_event("ComposedEvent", event)

    @property
    def parts(self) -> tuple[Event, ...]:
        """All of the events."""
        return self.events

    def with_parts(self, parts: tuple[Event, ...]) -> Event:
        """Returns the composition of others."""
        return ComposedEvent(parts)


@dataclass(frozen=True, slots=True)
class SubsampledEvent(Event):
    """`event` on one secret sample that holds each unit independently with probability `sampling_rate`.

    Under `replace_one` it also stands for a fixed-size sample of that rate without replacement: both are bounded
    by the symmetrised profile. A block of several releases on one sample is a `RepeatedEvent` inside.

    Attributes:
      event: all that reads the sample.
      sampling_rate: probability, in (0, 1].

    Raises:
      UnknownEventError: the rate is out of range, or `event` is none.
    """

    event: Event
    sampling_rate: float
    kind: ClassVar[str] = "subsampled"

    def __post_init__(self) -> None:
        ok = is_positive(self.sampling_rate) and self.sampling_rate <= 1
        require(ok, "SubsampledEvent", "0 < sampling_rate <= 1", self.sampling_rate)
        require_event("SubsampledEvent", self.event)

    @property
    def parts(self) -> tuple[Event, ...]:
        """The event inside."""
        return (self.event,)

    def with_parts(self, parts: tuple[Event, ...]) -> Event:
        """Returns the same event around another."""
        return dataclasses.replace(self, event=parts[0])


@dataclass(frozen=True, slots=True)
class ParallelEvent(Event):
    """Each unit of data set `partition` has one declared label and only that label's branch reads it.

    Attributes:
      partition: the `dataset_id` whose labels split the units.
      branches: (label, event) pairs, sorted by label; a label that is absent is never read.

    Raises:
      UnknownEventError: a label stands twice, or a branch holds no event.
    """

    partition: str
    branches: tuple[tuple[str, Event], ...]
    kind: ClassVar[str] = "parallel"

    def __post_init__(self) -> None:
        ordered = tuple(sorted(((str(k), v) for k, v in self.branches), key=lambda pair: pair[0]))
        labels = [label for label, _ in ordered]
        require(len(set(labels)) == len(labels), "ParallelEvent", "distinct labels", labels)
        for _, event in ordered:
            require_event("ParallelEvent", event)
        object.__setattr__(self, "branches", ordered)

    @property
    def parts(self) -> tuple[Event, ...]:
        """The branches, without their labels."""
        return tuple(event for _, event in self.branches)

    def with_parts(self, parts: tuple[Event, ...]) -> Event:
        """Returns the same labels with other branches."""
        labels = (label for label, _ in self.branches)
        return ParallelEvent(self.partition, tuple(zip(labels, parts, strict=True)))


CORE_EVENTS: tuple[type[Event], ...] = (
    NoEvent,
    NonPrivateEvent,
    GaussianEvent,
    PureEvent,
    BoundedRangeEvent,
    ZCdpEvent,
    FailureEvent,
    RepeatedEvent,
    ComposedEvent,
    SubsampledEvent,
    ParallelEvent,
)


def event_types() -> tuple[type[Event], ...]:
    """Returns the closed list of all events: those of this module, and those of the extensions, which it loads."""
    found: tuple[type[Event], ...] = provided("extensions").EVENT_TYPES
    return found


def event_parts(event: Event) -> Iterator[Event]:
    """Yields an event and every event inside it."""
    yield event
    for part in event.parts:
        yield from event_parts(part)


def is_event(value: object) -> bool:
    """Returns whether a value is an event of the closed list, or derived from one."""
    return isinstance(value, CORE_EVENTS) or isinstance(value, event_types())  # noqa: SIM101 - loads the second list


def require_event(owner: str, event: object) -> None:
    """Refuses what is no event."""
    if not is_event(event):
        msg = f"{owner}: expected an event that has a price, found {type(event).__name__}."
        raise UnknownEventError(msg)


def event_to_dict(event: Event) -> dict[str, Any]:
    """Returns the JSON form of an event; `event_from_dict` inverts it exactly."""
    require_event("event_to_dict", event)
    out: dict[str, Any] = {"kind": event.kind}
    for field in dataclasses.fields(event):
        out[field.name] = _encode(getattr(event, field.name))
    return out


def _encode(value: Any) -> Any:
    if isinstance(value, Event):
        return event_to_dict(value)
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    return value


def event_from_dict(data: Mapping[str, Any]) -> Event:
    """Rebuilds an event from its JSON form.

    Raises:
      UnknownEventError: unknown `kind`, a missing, unknown or invalid parameter.
    """
    kind = data.get("kind") if isinstance(data, Mapping) else None
    cls = next((each for each in CORE_EVENTS if each.kind == kind), None)
    cls = cls or next((each for each in event_types() if each.kind == kind), None)
    if cls is None:
        msg = f"event_from_dict: expected a kind among {sorted(each.kind for each in event_types())}, found {kind!r}."
        raise UnknownEventError(msg)
    names = {field.name for field in dataclasses.fields(cls)}
    if set(data) - {"kind"} != names:
        msg = f"event_from_dict: {kind!r} takes {sorted(names)}, found {sorted(set(data) - {'kind'})}."
        raise UnknownEventError(msg)
    return cls(**{name: _decode(data[name]) for name in names})


def _decode(value: Any) -> Any:
    if isinstance(value, Mapping):
        return event_from_dict(value)
    if isinstance(value, list):
        return tuple(_decode(item) for item in value)
    return value


_quoted = json.encoder.encode_basestring  # what the encoder below does with a text
_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)


def canonical_json(data: Any) -> str:
    """Returns the one JSON text of a value: sorted keys, no spaces, no NaN (what hashes are taken of)."""
    return _quoted(data) if type(data) is str else _CANONICAL.encode(data)
