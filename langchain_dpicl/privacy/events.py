"""What was done, as frozen values; `accounting.py` prices them. Knows no data, no noise and no epsilon.

Promise of the format (events are stored in ledgers and reports): an event's meaning never changes; a new
meaning is a new class; `kind` names are never reused. Every parameter is public.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from langchain_dpicl.exceptions import UnknownEventError
from langchain_dpicl.privacy._validate import MAX_INT, shown

MAX_BATCHES = 100_000
"""Batches of one deal, at most: what the accountant can add up."""


def _require(condition: bool, event: str, expected: str, found: object) -> None:
    if not condition:
        msg = f"{event}: expected {expected}, found {shown(found)}."
        raise UnknownEventError(msg)


def _positive(value: float) -> bool:
    try:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and float(value) > 0
    except OverflowError:  # a whole number beyond every float
        return False


@dataclass(frozen=True, slots=True)
class NoEvent:
    """Nothing about private data was released."""

    kind: ClassVar[str] = "none"


@dataclass(frozen=True, slots=True)
class NonPrivateEvent:
    """Private data was released without protection: epsilon is infinite."""

    kind: ClassVar[str] = "non_private"


@dataclass(frozen=True, slots=True)
class GaussianEvent:
    """x + N(0, (noise_multiplier * L2 sensitivity)^2 I), the sensitivity being that of the adjacency in force.

    Attributes:
      noise_multiplier: standard deviation over the L2 sensitivity, > 0.

    Raises:
      UnknownEventError: the multiplier is no number above 0.
    """

    noise_multiplier: float
    kind: ClassVar[str] = "gaussian"

    def __post_init__(self) -> None:
        _require(_positive(self.noise_multiplier), "GaussianEvent", "noise_multiplier > 0", self.noise_multiplier)


@dataclass(frozen=True, slots=True)
class PureEvent:
    """Any mechanism that is (epsilon, 0)-DP, for instance permute-and-flip.

    Attributes:
      epsilon: of the mechanism, > 0 and finite.

    Raises:
      UnknownEventError: epsilon is no finite number above 0.
    """

    epsilon: float
    kind: ClassVar[str] = "pure"

    def __post_init__(self) -> None:
        ok = _positive(self.epsilon) and math.isfinite(self.epsilon)
        _require(ok, "PureEvent", "finite epsilon > 0", self.epsilon)


@dataclass(frozen=True, slots=True)
class BoundedRangeEvent:
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
        ok = _positive(self.bound) and math.isfinite(self.bound)
        _require(ok, "BoundedRangeEvent", "finite bound > 0", self.bound)


@dataclass(frozen=True, slots=True)
class ZCdpEvent:
    """Any rho-zCDP mechanism (Bun and Steinke 2016).

    Attributes:
      rho: of the mechanism, > 0 and finite.

    Raises:
      UnknownEventError: rho is no finite number above 0.
    """

    rho: float
    kind: ClassVar[str] = "zcdp"

    def __post_init__(self) -> None:
        _require(_positive(self.rho) and math.isfinite(self.rho), "ZCdpEvent", "finite rho > 0", self.rho)


@dataclass(frozen=True, slots=True)
class FailureEvent:
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
        ok = _positive(self.delta) and self.delta < 1
        _require(ok, "FailureEvent", "0 < delta < 1", self.delta)


@dataclass(frozen=True, slots=True)
class RepeatedEvent:
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
        _require(ok, "RepeatedEvent", "an integer count from 0 to 2^63 - 1", self.count)
        _require_event("RepeatedEvent", self.event)


@dataclass(frozen=True, slots=True)
class ComposedEvent:
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
            _require_event("ComposedEvent", event)


@dataclass(frozen=True, slots=True)
class SubsampledEvent:
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
        ok = _positive(self.sampling_rate) and self.sampling_rate <= 1
        _require(ok, "SubsampledEvent", "0 < sampling_rate <= 1", self.sampling_rate)
        _require_event("SubsampledEvent", self.event)


@dataclass(frozen=True, slots=True)
class SampledBallEvent:
    """x + N(0, (noise_multiplier * L2 sensitivity)^2 I), x being the sum of the vectors of one secret sample.

    Each unit is in the sample independently with probability `sampling_rate`; then it adds one vector of a ball around
    zero, else nothing. The sensitivity is that of the adjacency in force: the ball's radius under `add_remove`, where
    this is a `SubsampledEvent` of a `GaussianEvent`, and its diameter under `replace_one`, where that knows less.

    Attributes:
      noise_multiplier: standard deviation over the L2 sensitivity, > 0.
      sampling_rate: probability, in (0, 1].

    Raises:
      UnknownEventError: the multiplier or the rate is out of range.
    """

    noise_multiplier: float
    sampling_rate: float
    kind: ClassVar[str] = "sampled_ball"

    def __post_init__(self) -> None:
        _require(_positive(self.noise_multiplier), "SampledBallEvent", "noise_multiplier > 0", self.noise_multiplier)
        ok = _positive(self.sampling_rate) and self.sampling_rate <= 1
        _require(ok, "SampledBallEvent", "0 < sampling_rate <= 1", self.sampling_rate)


@dataclass(frozen=True, slots=True)
class AllocatedEvent:
    """`event` on each of `num_batches` batches of one secret deal; a unit stands in one of them at most.

    Each unit joins with probability `sampling_rate` and then stands in a uniformly random batch, by its own secret
    coins, which serve every release on the deal and no other. `event` is everything that one batch releases.

    Attributes:
      event: all that one batch releases.
      num_batches: batches of the deal, from 1 to `MAX_BATCHES`.
      sampling_rate: probability of being dealt at all, in (0, 1].

    Raises:
      UnknownEventError: a number is out of range, or `event` is none.
    """

    event: Event
    num_batches: int
    sampling_rate: float
    kind: ClassVar[str] = "allocated"

    def __post_init__(self) -> None:
        count = self.num_batches
        ok = isinstance(count, int) and not isinstance(count, bool) and 1 <= count <= MAX_BATCHES
        _require(ok, "AllocatedEvent", f"an integer num_batches in 1 .. {MAX_BATCHES}", count)
        ok = _positive(self.sampling_rate) and self.sampling_rate <= 1
        _require(ok, "AllocatedEvent", "0 < sampling_rate <= 1", self.sampling_rate)
        _require_event("AllocatedEvent", self.event)


@dataclass(frozen=True, slots=True)
class ParallelEvent:
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
        _require(len(set(labels)) == len(labels), "ParallelEvent", "distinct labels", labels)
        for _, event in ordered:
            _require_event("ParallelEvent", event)
        object.__setattr__(self, "branches", ordered)


Event: TypeAlias = (
    NoEvent
    | NonPrivateEvent
    | GaussianEvent
    | PureEvent
    | BoundedRangeEvent
    | ZCdpEvent
    | FailureEvent
    | RepeatedEvent
    | ComposedEvent
    | SubsampledEvent
    | SampledBallEvent
    | AllocatedEvent
    | ParallelEvent
)

EVENT_TYPES: tuple[type[Any], ...] = (
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
    SampledBallEvent,
    AllocatedEvent,
    ParallelEvent,
)
_BY_KIND = {cls.kind: cls for cls in EVENT_TYPES}


def _require_event(owner: str, event: object) -> None:
    if not isinstance(event, EVENT_TYPES):
        msg = f"{owner}: expected an event of this module, found {type(event).__name__}."
        raise UnknownEventError(msg)


def event_to_dict(event: Event) -> dict[str, Any]:
    """Returns the JSON form of an event; `event_from_dict` inverts it exactly."""
    _require_event("event_to_dict", event)
    out: dict[str, Any] = {"kind": event.kind}
    for field in dataclasses.fields(event):
        out[field.name] = _encode(getattr(event, field.name))
    return out


def _encode(value: Any) -> Any:
    if isinstance(value, EVENT_TYPES):
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
    cls = _BY_KIND.get(kind) if isinstance(kind, str) else None
    if cls is None:
        msg = f"event_from_dict: expected a kind among {sorted(_BY_KIND)}, found {kind!r}."
        raise UnknownEventError(msg)
    names = {field.name for field in dataclasses.fields(cls)}
    if set(data) - {"kind"} != names:
        msg = f"event_from_dict: {kind!r} takes {sorted(names)}, found {sorted(set(data) - {'kind'})}."
        raise UnknownEventError(msg)
    return cls(**{name: _decode(data[name]) for name in names})  # type: ignore[no-any-return]


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
