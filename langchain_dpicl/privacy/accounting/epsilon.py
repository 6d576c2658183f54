"""Computes epsilon of events, rounded up: the least proved bound of a normal form; unknown events are refused.

The engine composes pessimistic loss distributions with dp-accounting; closed forms are used where they are exact.
Proofs: docs/proofs/accounting.md.

Two events that mean the same are the same `Terms`, so counts add up and the order of composition cannot matter.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, ClassVar, cast

import numpy as np

from langchain_dpicl._lazy import provided
from langchain_dpicl.exceptions import ConfigurationError, UnknownEventError
from langchain_dpicl.privacy._validate import (
    Adjacency,
    check_adjacency,
    check_delta,
    effective_delta,
    exact,
    round_up,
)
from langchain_dpicl.privacy.accounting import profiles
from langchain_dpicl.privacy.accounting.events import (
    CORE_EVENTS,
    BoundedRangeEvent,
    ComposedEvent,
    Event,
    FailureEvent,
    GaussianEvent,
    NoEvent,
    NonPrivateEvent,
    ParallelEvent,
    PureEvent,
    RepeatedEvent,
    SubsampledEvent,
    ZCdpEvent,
    event_parts,
    event_types,
)
from langchain_dpicl.privacy.accounting.profiles import (
    Bound,
    CurveBound,
    FloatArray,
    GridBound,
    Losses,
    MomentBound,
    Profile,
    Steps,
    compose,
    deltas,
    least_epsilon,
)

MAX_COUNT = 10**12
"""Most steps of a kind that are priced."""
_HOPELESS = 1e9


class Step:
    """Base of the steps that extensions price: frozen dataclasses, sorted by class and fields.

    Attributes:
      bound_name: what the bound on a single one is called.
    """

    __slots__ = ()
    bound_name: ClassVar[str]

    @property
    @abstractmethod
    def is_empty(self) -> bool:
        """Whether nothing about private data leaves."""

    @property
    @abstractmethod
    def is_bounded(self) -> bool:
        """Whether a finite price is worth computing."""

    @property
    @abstractmethod
    def key(self) -> tuple[Any, ...]:
        """The fields, in their order."""

    @abstractmethod
    def profile(self, adjacency: Adjacency) -> Profile:
        """Returns a dominating pair of one step."""

    def __lt__(self, other: Step) -> bool:
        return (type(self).__name__, self.key) < (type(other).__name__, other.key)


@dataclass(frozen=True, slots=True)
class ExtensionEvent(Event):
    """Base of the events of extensions, which say themselves what they consist of.

    Attributes:
      own_adjacencies: neighbouring relations under which `reduced` is proved; elsewhere `bounded_by` is priced alone.
    """

    own_adjacencies: ClassVar[frozenset[str]]

    @abstractmethod
    def reduced(self) -> Event | Step:
        """Returns an event that means the same, or the step that it is."""

    @property
    def bounded_by(self) -> Event | None:
        """Another event that costs at least as much and is priced as well, or None."""
        return None

    @abstractmethod
    def outweighs(self, other: Event) -> bool:
        """Returns whether this visibly costs at least what `other` does."""


@dataclass(frozen=True, order=True, slots=True)
class Terms:
    """A composition without failures, sorted.

    Attributes:
      mu_squared: all unsampled Gaussians together.
      pure: (epsilon, count) of the unsampled pure steps.
      ranges: (bound, count) of the unsampled bounded-range steps.
      rho: all unsampled zCDP steps together.
      sampled: (what is done on one secret sample, its rate, count).
      others: (step, count) of what extensions price.
      is_private: False if anything was released without protection.
    """

    mu_squared: float = 0.0
    pure: tuple[tuple[float, int], ...] = ()
    ranges: tuple[tuple[float, int], ...] = ()
    rho: float = 0.0
    sampled: tuple[tuple[Terms, float, int], ...] = ()
    others: tuple[tuple[Step, int], ...] = ()
    is_private: bool = True

    @property
    def is_empty(self) -> bool:
        """Whether nothing about private data leaves."""
        return self == Terms()

    @property
    def is_bounded(self) -> bool:
        """Whether a finite price is worth computing; what costs billions counts as not private."""
        pure = math.fsum(value * count for value, count in self.pure + self.ranges)
        return self.is_private and max(self.mu_squared, self.rho, pure) < _HOPELESS

    @property
    def range_rho(self) -> float:
        """What the bounded-range steps cost together as zCDP: bound^2 / 8 each (Cesar and Rogers 2021)."""
        return math.fsum(count * bound * bound / 8.0 for bound, count in self.ranges)


@dataclass(frozen=True, slots=True)
class UnitTerms:
    """What an event does to a unit of one place: the terms to price, and the failures that come out of delta before.

    Attributes:
      terms: everything but the failures.
      failure: chances of all failures, added and rounded up: at least the chance of any of them.
      labels: the labels that the unit has, by partition; under `replace_one` the one it leaves and the one it joins.
    """

    terms: Terms
    failure: float = 0.0
    labels: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def delta_left(self, delta: float) -> float:
        """Returns the delta that the failures leave to the terms, rounded down; 0 where they leave nothing."""
        return max(effective_delta(delta, self.failure), 0.0)


class _Tally:
    """Counts leaves; sums are taken once, at the end, so that grouping cannot change a digit."""

    def __init__(self) -> None:
        self.gaussian: Counter[float] = Counter()
        self.pure: Counter[float] = Counter()
        self.ranges: Counter[float] = Counter()
        self.rho: Counter[float] = Counter()
        self.sampled: Counter[tuple[Terms, float]] = Counter()
        self.others: Counter[Step] = Counter()
        self.failures: Counter[float] = Counter()
        self.is_private = True

    def add(self, event: Event, count: int) -> None:
        """Adds `count` times `event`."""
        _check_class(event)
        if count > MAX_COUNT:
            raise ConfigurationError(f"count: expected at most {MAX_COUNT} steps of a kind, found {count}.")
        if count == 0:
            return
        match event:
            case RepeatedEvent():
                self.add(event.event, count * event.count)
            case ComposedEvent():
                for part in event.events:
                    self.add(part, count)
            case SubsampledEvent():
                self._add_sampled(event, count)
            case ExtensionEvent():
                self._add_extension(event, count)
            case NonPrivateEvent():
                self.is_private = False
            case _:
                self._add_leaf(event, count)

    def _add_leaf(self, event: Event, count: int) -> None:
        match event:
            case NoEvent():
                pass
            case GaussianEvent():
                mu = 1.0 / float(event.noise_multiplier)
                self.gaussian[mu * mu] += count
            case PureEvent():
                self.pure[float(event.epsilon)] += count
            case BoundedRangeEvent():
                self.ranges[float(event.bound)] += count
            case ZCdpEvent():
                self.rho[float(event.rho)] += count
            case FailureEvent():
                self.failures[float(event.delta)] += count
            case _:
                raise UnknownEventError(
                    f"event: expected a {type(event).__name__} outside of blocks, found one inside."
                )

    def _add_sampled(self, event: SubsampledEvent, count: int) -> None:
        if event.sampling_rate == 1:
            self.add(event.event, count)
            return
        base = normal_form(event.event)
        self.is_private = self.is_private and base.is_bounded
        if not base.is_empty:
            self.sampled[base, float(event.sampling_rate)] += count

    def _add_extension(self, event: ExtensionEvent, count: int) -> None:
        reduced = event.reduced()
        if isinstance(reduced, Event):
            self.add(reduced, count)
            return
        self.is_private = self.is_private and reduced.is_bounded
        if not reduced.is_empty:
            self.others[reduced] += count

    def terms(self) -> Terms:
        """The normal form of everything added."""
        return Terms(
            mu_squared=math.fsum(value * count for value, count in self.gaussian.items()),
            pure=tuple(sorted((value, count) for value, count in self.pure.items() if count)),
            ranges=tuple(sorted((value, count) for value, count in self.ranges.items() if count)),
            rho=math.fsum(value * count for value, count in self.rho.items()),
            sampled=tuple(sorted((base, rate, count) for (base, rate), count in self.sampled.items() if count)),
            others=tuple(sorted((step, count) for step, count in self.others.items() if count)),
            is_private=self.is_private,
        )

    def failure(self) -> float:
        """The chances of all failures, added exactly and rounded up."""
        return round_up(sum(exact(value) * count for value, count in self.failures.items()))


def check_event(event: object) -> None:
    """Refuses an event that is not, with all its parts, exactly of the priced classes.

    A subclass may mean something else, so none of its methods is called before its class is known.
    """
    unchecked: list[object] = [event]
    while unchecked:
        one = unchecked.pop()
        _check_class(one)
        unchecked += cast("Event", one).parts


def _check_class(event: object) -> None:
    if type(event) not in CORE_EVENTS and type(event) not in event_types():
        names = ", ".join(cls.__name__ for cls in event_types())
        raise UnknownEventError(
            f"event: expected one of {names}, found {type(event).__name__}. "
            "An event without a theorem here has no price."
        )


def normal_form(event: Event) -> Terms:
    """The terms of an event without `ParallelEvent`s and without failures, which have no place on secret samples.

    Raises:
      UnknownEventError: there is one, or an event without a theorem.
    """
    world = world_of(event)
    if world.failure > 0.0:
        raise UnknownEventError("event: expected failures outside of secret samples, found one inside.")
    return world.terms


def world_of(event: Event, labels: tuple[tuple[str, tuple[str, ...]], ...] = ()) -> UnitTerms:
    """What an event without `ParallelEvent`s does."""
    tally = _Tally()
    tally.add(event, 1)
    return UnitTerms(tally.terms(), tally.failure(), labels)


def readings(event: Event, adjacency: Adjacency) -> tuple[Event, ...]:
    """Events each of which bounds `event`: itself, and one in which what extensions bound otherwise is replaced.

    Only the second where an extension has no theorem of its own for the adjacency.
    """
    if not any(isinstance(part, ExtensionEvent) for part in event_parts(event)):
        return (event,)
    found: tuple[Event, ...] = provided("label_places").readings(event, adjacency)
    return found


def unit_terms(event: Event, adjacency: Adjacency) -> tuple[UnitTerms, ...]:
    """What the event does at each place that a unit may have: its price is the largest of theirs.

    An event that labels do not split does the same everywhere.
    """
    if not any(isinstance(part, ParallelEvent) for part in event_parts(event)):
        return (world_of(event),)
    found: tuple[UnitTerms, ...] = provided("label_places").unit_terms(event, adjacency)
    return found


_MANY = 200_000  # pure steps; beyond, their exact composition is not worth its table
_PURE_RHO = 0.5  # a pure step is epsilon^2 / 2-zCDP (Bun and Steinke 2016, Proposition 3.3), a Gaussian mu^2 / 2
_LARGEST_LOSS = 600.0  # inside a block on one secret sample; e^x must stay a float

# --- what a composition consists of -------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def steps(terms: Terms, adjacency: Adjacency) -> tuple[tuple[Profile, int], ...]:
    """The dominating pairs of a composition and how often each occurs; unsampled families enter as one block each."""
    found: list[tuple[Profile, int]] = []
    if terms.mu_squared > 0:
        found.append((profiles.gaussian(math.sqrt(terms.mu_squared)), 1))
    found.extend((_pure_block(epsilon, count), 1) for epsilon, count in terms.pure)
    if terms.ranges or terms.rho > 0:
        found.append((_range_block(terms), 1))
    found.extend((_sampled_step(base, rate, adjacency), count) for base, rate, count in terms.sampled)
    found.extend((step.profile(adjacency), count) for step, count in terms.others)
    return tuple(found)


def _pure_block(epsilon: float, count: int) -> Profile:
    if count > _MANY:
        return profiles.minimum(profiles.zcdp(_PURE_RHO * count * epsilon**2))
    return profiles.randomised_response(epsilon, count)


def _range_block(terms: Terms) -> Profile:
    """All bounded-range and zCDP steps as one interactive mechanism; see docs/proofs/zcdp-block.md."""
    as_zcdp = profiles.zcdp(terms.range_rho + terms.rho)
    if not terms.ranges:
        return profiles.minimum(as_zcdp)
    one_by_one: list[tuple[Profile, int]] = [(profiles.bounded_range(bound), count) for bound, count in terms.ranges]
    if terms.rho > 0:
        one_by_one.append((profiles.zcdp(terms.rho), 1))
    if len(one_by_one) == 1 and one_by_one[0][1] == 1:
        return one_by_one[0][0]
    options = [as_zcdp, _tabulated(compose(one_by_one, is_coarse=False))]
    if len(one_by_one) == 1 and one_by_one[0][1] <= _MANY:
        options.append(profiles.randomised_response(*terms.ranges[0]))
    return profiles.minimum(*options)


@lru_cache(maxsize=256)
def _sampled_step(base: Terms, rate: float, adjacency: Adjacency) -> Profile:
    """One release, or a block of them, on one secret sample: composed inside, amplified once."""
    profile = single_profile(base, adjacency)
    return profiles.symmetrise(profile, rate) if adjacency == "replace_one" else profiles.amplify_poisson(profile, rate)


def single_profile(terms: Terms, adjacency: Adjacency) -> Profile:
    """One profile of a whole composition, against every strategy."""
    inside = steps(terms, adjacency)
    is_one = len(inside) == 1 and inside[0][1] == 1
    return inside[0][0] if is_one else _tabulated(compose(inside, is_coarse=False))


def _tabulated(bound: GridBound) -> Profile:
    """The profile of something composed on a grid, as a curve that can be amplified."""
    x_up, up = _table(bound.up, bound.lost)
    if bound.down is bound.up:
        return profiles.tabulated_profile(x_up, up, x_up, up)
    x_down, down = _table(bound.down, bound.lost)
    # Both start at the total variation distance, so the smaller bound holds for both.
    return profiles.tabulated_profile(x_up, np.minimum(up, down[0]), x_down, np.minimum(down, up[0]))


def _table(losses: Losses, lost: float) -> tuple[FloatArray, FloatArray]:
    """Knots of H_x; from the last one on it counts as constant, that is, as mass at infinite loss."""
    floor = 4.0 * (losses.infinite + lost)
    top = least_epsilon(losses, floor) if floor < 1.0 else 0.0
    x = np.linspace(0.0, min(max(top, 1e-9), _LARGEST_LOSS), 4097)
    return x, np.minimum(deltas(losses, x) + lost, 1.0)


# --- bounds on a composition --------------------------------------------------------------------------------------


@lru_cache(maxsize=2)  # of up to 2^20 cells each; prices are remembered elsewhere
def bounds(terms: Terms, adjacency: Adjacency, *, is_coarse: bool) -> tuple[Bound, ...]:
    """All bounds we can prove for a composition that is private and not empty; the least of them is its price."""
    inside = steps(terms, adjacency)
    found: list[Bound] = [] if terms.sampled or terms.others else _closed_forms(terms)
    if len(inside) > 1 or inside[0][1] > 1:
        found.append(compose(inside, is_coarse=is_coarse))
        found.extend(_sum_of_pure(inside))
    elif terms.sampled:
        found.append(CurveBound("one sampled release, closed form", inside[0][0]))
    elif terms.others:
        found.append(CurveBound(terms.others[0][0].bound_name, inside[0][0]))
    elif terms.ranges:
        found.append(CurveBound("bounded-range block", inside[0][0]))
    return tuple(found)


def _sum_of_pure(inside: Steps) -> list[Bound]:
    """Where every step's loss is bounded, the sum of the bounds: what few and loud steps cost at most."""
    tops = [(max(p.top_up, p.top_down) * (1.0 + 1e-9), p, count) for p, count in inside]
    if any(curve(np.array([top]))[0] > 0.0 for top, p, _ in tops for curve in (p.up, p.down)):
        return []
    total = math.fsum(count * top for top, _, count in tops)
    return [CurveBound("sum of pure losses", profiles.randomised_response(total))]


def last_resort(terms: Terms, adjacency: Adjacency) -> Bound:
    """A bound for deltas so small that the errors of a transform would swallow them."""
    return MomentBound("moments of the PLD", steps(terms, adjacency))


def _closed_forms(terms: Terms) -> list[Bound]:
    """The bounds on an unsampled composition that need no grid."""
    if terms == Terms(mu_squared=terms.mu_squared):
        return [CurveBound("Gaussian closed form", profiles.gaussian(math.sqrt(terms.mu_squared)))]
    pure = terms.pure + terms.ranges  # a bounded-range step is pure as well
    found: list[Bound] = []
    if len(pure) == 1 and pure[0][1] <= _MANY and terms == Terms(pure=terms.pure, ranges=terms.ranges):
        found.append(CurveBound("optimal composition of pure steps", profiles.randomised_response(*pure[0])))
    pure_rho = math.fsum(_PURE_RHO * count * epsilon**2 for epsilon, count in terms.pure)
    rho = terms.rho + terms.range_rho + terms.mu_squared / 2.0 + pure_rho
    return [*found, CurveBound("zCDP conversion", profiles.zcdp(rho))]


# --- the price of one world -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Price:
    """The least bound on a world; remembered, so it holds no distributions.

    Attributes:
      world: what is priced.
      delta: what the world's failures leave of the delta that was asked for.
      removed: epsilon of removals.
      added: epsilon of additions.
      engine: what proved the bound.
      error: how far the bound may lie above the epsilon of the dominating pairs.
    """

    world: UnitTerms
    delta: float
    removed: float
    added: float
    engine: str
    error: float = 0.0

    @property
    def epsilon(self) -> float:
        """The larger of both orders."""
        return max(self.removed, self.added)


def price_of(world: UnitTerms, delta: float, adjacency: Adjacency, *, is_coarse: bool) -> Price:
    """The least bound on a world at `delta`, of which its failures are taken here and nowhere else."""
    terms, left = world.terms, world.delta_left(delta)
    if not terms.is_bounded:
        return Price(world, left, math.inf, math.inf, "not private")
    if delta == 0.0 and world.failure == 0.0:
        pure = _pure_epsilon(terms)
        return Price(world, left, pure, pure, "sum of pure losses")
    if left <= 0.0:
        return Price(world, left, math.inf, math.inf, "failures alone reach delta")
    if terms.is_empty:
        return Price(world, left, 0.0, 0.0, "nothing released")
    prices = list(_bound_prices(bounds(terms, adjacency, is_coarse=is_coarse), world, left))
    if any(price.epsilon == math.inf for price in prices):
        prices.extend(_bound_prices((last_resort(terms, adjacency),), world, left))
    return min(prices, key=lambda price: price.epsilon)


def _pure_epsilon(terms: Terms) -> float:
    """The epsilons of all pure steps, added: at delta 0 their composition costs no less.

    What is drawn with a gap has no price at delta 0: Gaussians and zCDP steps, secret samples, what extensions price.
    """
    if terms.mu_squared > 0.0 or terms.rho > 0.0 or terms.sampled or terms.others:
        return math.inf
    return round_up(sum((exact(epsilon) * count for epsilon, count in terms.pure + terms.ranges), Fraction(0)))


def _bound_prices(found: tuple[Bound, ...], world: UnitTerms, left: float) -> Iterator[Price]:
    for bound in found:
        removed, added = bound.epsilons(left)
        yield Price(world, left, removed, added, bound.name, bound.error(left))


_DIGITS = 7


@dataclass(frozen=True, slots=True)
class Opinion:
    """What another computation says about the same steps.

    Attributes:
      name: who computed it.
      lower: the dominating pairs do cost at least this.
      upper: they cost at most this; infinity where only a lower bound is offered.
    """

    name: str
    lower: float
    upper: float


@dataclass(frozen=True, slots=True)
class EpsilonBound:
    """An upper bound on epsilon and who agrees with it.

    Attributes:
      epsilon: the bound, rounded up; infinity if something was released without protection.
      delta: at which delta.
      adjacency: under which neighbouring relation.
      engine: what proved the bound.
      opinions: intervals of independent computations that were compared with it.
      skipped: second opinions that were not asked, and why.
    """

    epsilon: float
    delta: float
    adjacency: Adjacency
    engine: str
    opinions: tuple[Opinion, ...]
    skipped: tuple[str, ...]


def epsilon_bound(event: Event, *, delta: float, adjacency: Adjacency, opinions: bool = True) -> EpsilonBound:
    """Bounds epsilon and compares the bound with an independent computation.

    Formal guarantees:
      - Everything `event` describes, chosen adaptively and interleaved in any order, is (epsilon, delta)-DP.
      - The failures of every place that a unit may have come out of delta before that place is priced; where nothing is
        left, epsilon is infinite.
      - Composition never ignores a count: `RepeatedEvent(e, n + 1)` costs at least `RepeatedEvent(e, n)`.
      - Under `add_remove` both orders of neighbours are covered: removals compose with removals, additions with
        additions, and the larger result is reported.

    Args:
      event: what was, or will be, released.
      delta: from 0, which only pure steps have a price at, to below 1.
      adjacency: "add_remove" or "replace_one"; noise in `event` is relative to the sensitivity of that relation.
      opinions: whether to ask second accountants (up to seconds).

    Raises:
      UnknownEventError: no theorem prices the event.
      AccountantsDisagreeError: two computations differ beyond their declared errors.
      ConfigurationError: delta or adjacency out of range.

    >>> from langchain_dpicl.privacy.accounting.events import GaussianEvent
    >>> epsilon_bound(GaussianEvent(1.0), delta=1e-5, adjacency="add_remove").epsilon
    4.377179

    Source: Balle and Wang (2018), Theorem 8; Doroshenko et al. (2022), Algorithm 1; Zhu, Dong and Wang (2022),
    composition of dominating pairs; Kairouz, Oh and Viswanath (2015), Theorem 3.3; Canonne, Kamath and Steinke (2020),
    Proposition 12.
    """
    price = _price(event, check_delta(delta), check_adjacency(adjacency), is_coarse=False)
    heard: tuple[Opinion, ...] = ()
    skipped: tuple[str, ...] = ()
    if opinions and price.epsilon < math.inf:
        heard, skipped = second_opinions(event, price, delta=delta, adjacency=adjacency)
    return EpsilonBound(_up(price.epsilon), delta, adjacency, price.engine, heard, skipped)


def second_opinions(
    event: Event, price: Price, *, delta: float, adjacency: Adjacency
) -> tuple[tuple[Opinion, ...], tuple[str, ...]]:
    """Compares a price with other computations, which are loaded for it: they may refuse it and cannot change it."""
    found: tuple[tuple[Opinion, ...], tuple[str, ...]] = provided("second_opinions").second_opinions(
        event, price, delta=delta, adjacency=adjacency
    )
    return found


def epsilon_upper_bound(event: Event, *, delta: float, adjacency: Adjacency) -> float:
    """Bounds epsilon, rounded up, without asking for second opinions. See `epsilon_bound`.

    Args:
      event: what was, or will be, released.
      delta: from 0, which only pure steps have a price at, to below 1.
      adjacency: "add_remove" or "replace_one".

    Raises:
      ConfigurationError: an argument is out of range.
      UnknownEventError: no theorem prices the event.
    """
    return _up(_price(event, check_delta(delta), check_adjacency(adjacency), is_coarse=False).epsilon)


def _price(event: Event, delta: float, adjacency: Adjacency, *, is_coarse: bool) -> Price:
    check_event(event)  # before it is hashed
    return _cached_price(event, delta, adjacency, is_coarse)


@lru_cache(maxsize=1024)
def _cached_price(event: Event, delta: float, adjacency: Adjacency, is_coarse: bool) -> Price:
    """The least price of all that bound the event."""
    prices = [_price_in(reading, delta, adjacency, is_coarse=is_coarse) for reading in readings(event, adjacency)]
    return min(prices, key=lambda price: price.epsilon)


def _price_in(event: Event, delta: float, adjacency: Adjacency, *, is_coarse: bool) -> Price:
    """The price of the costliest world; cheap coarse prices, which are bounds too, spare most fine ones."""
    everywhere = unit_terms(event, adjacency)
    if len(everywhere) == 1 or is_coarse:
        return max((price_of(w, delta, adjacency, is_coarse=is_coarse) for w in everywhere), key=lambda p: p.epsilon)
    rough = [price_of(world, delta, adjacency, is_coarse=True) for world in everywhere]
    rough.sort(key=lambda price: -price.epsilon)
    worst = price_of(rough[0].world, delta, adjacency, is_coarse=False)
    for price in rough[1:]:
        if price.epsilon > worst.epsilon:
            fine = price_of(price.world, delta, adjacency, is_coarse=False)
            worst = max(worst, fine, key=lambda p: p.epsilon)
    return worst


def _up(value: float, digits: int = _DIGITS) -> float:
    """Rounds up to so many significant digits."""
    if value <= 0.0:
        return 0.0
    if not math.isfinite(value):
        return value
    value = max(value, 1e-200)
    scale = 10.0 ** (digits - 1 - math.floor(math.log10(value)))
    steps = math.floor(value * scale) - 1  # the product is rounded: the search begins below it
    while steps / scale < value:
        steps += 1
    return steps / scale
