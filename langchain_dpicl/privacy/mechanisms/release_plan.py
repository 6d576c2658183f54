"""One release as a frozen plan: Poisson sampling, a bounded sum, Gaussian or Gumbel noise, and their event.

A noise multiplier is the noise scale over the sensitivity in the mechanism's own norm; nobody multiplies by hand.
Proofs: docs/proofs/gaussian.md, gumbel.md.

A draw never looks at a unit, only at how many there are; that number is secret under add_remove, so no error and no
public shape depends on it. Proof: docs/proofs/poisson-slots.md.

Sampler, sensitivity, noise and event come out of one value, so that what runs is what is charged.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeAlias, final

import numpy as np
import numpy.typing as npt

from langchain_dpicl._lazy import provided
from langchain_dpicl.exceptions import ConfigurationError, SensitivityError
from langchain_dpicl.privacy._validate import Adjacency, RowShape, check_adjacency, check_int, check_real, fail
from langchain_dpicl.privacy.accounting.events import (
    BoundedRangeEvent,
    ComposedEvent,
    Event,
    GaussianEvent,
    RepeatedEvent,
    SubsampledEvent,
)
from langchain_dpicl.privacy.mechanisms.bounded import (
    GRID,
    LARGEST,
    Aggregation,
    BoundedSum,
    Floats,
    NamedPart,
    Norm,
    ProbabilitySum,
    Sensitivity,
    VoteSum,
)
from langchain_dpicl.privacy.mechanisms.randomness import Coins, GaussianDraws, Noise, SecureRandom

# Noise is rounded up by more than the roundings of scale and event together can take away.
ROUND_UP = 1.0 + 2.0**-50
# A noisy vector is rounded to multiples of a power of two that is at most this share of the noise scale,
_GRID_SHARE = 2.0**-16
# but no finer than the grid of the sums, which are at most LARGEST: then every multiple is a float.
_FINEST_GRID = 1.0 / GRID
# Share of (grid + scale + noise) within which float arithmetic may misplace a draw: 256 units of 2^-52.
_MARGIN = 2.0**-44


@dataclass(frozen=True, slots=True, eq=False)
class Release:
    """What one release made public.

    Attributes:
      index: the chosen coordinate, or None.
      values: float64[d] noisy sum on a public grid, or None; free to post-process.
      event: what the accountant charges.
      indices: the chosen coordinates in their released order, or None.
    """

    index: int | None
    values: Floats | None = field(repr=False)
    event: Event
    indices: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Mechanism(NamedPart, is_base=True):
    """Base of the mechanisms.

    Attributes:
      norm: norm of the sensitivity that the noise is scaled to.
      kind: what is drawn.
      releases: what leaves.
    """

    __slots__ = ()
    noise_multiplier: float
    norm: ClassVar[Norm]
    kind: ClassVar[Noise | Coins]
    releases: ClassVar[Literal["vector", "index", "indices"]]

    def __post_init__(self) -> None:
        checked = check_real("noise_multiplier", self.noise_multiplier, low=1e-9, high=1e12)
        object.__setattr__(self, "noise_multiplier", checked)

    @property
    @abstractmethod
    def event(self) -> Event:
        """The event of one release."""

    @abstractmethod
    def release(self, total: BoundedSum, *, rng: SecureRandom) -> Release:
        """Releases a noisy function of a sum."""

    def repeated(self, length: int, answers: int | None = None) -> Event:
        """Returns the event of `length` releases on the same rows.

        Args:
          length: public.
          answers: how many of them may answer, for a mechanism that tests first; others always answer and refuse it.
        """
        if answers is not None:
            raise fail("answers", f"None: {self.name} answers every time", answers)
        return self.event if length == 1 else RepeatedEvent(self.event, length)

    def check_sum(self, aggregation: Aggregation, sensitivity: Sensitivity, constants: tuple[float, ...]) -> None:
        """Refuses a sum whose bound in `norm` is not all that the proof needs."""

    def with_noise(self, noise_multiplier: float) -> Self:
        """Returns the same mechanism with another noise multiplier."""
        return dataclasses.replace(self, noise_multiplier=noise_multiplier)

    def _scale(self, total: BoundedSum) -> float:
        scale = self.noise_multiplier * total.sensitivity.require(self.norm) * ROUND_UP
        if not np.isfinite(total.value).all():
            raise SensitivityError(f"{self.name}: expected a finite sum; build sums with `aggregation` only.")
        return scale

    def implementation_delta(self, d: int) -> float:
        """Returns what one release over `d` candidates may add to delta, beyond the ideal mechanism.

        Source: docs/proofs/randomness.md, sections 4 and 5.
        """
        return SecureRandom.implementation_delta(self.kind, check_int("d", d, low=1))


@functools.lru_cache(maxsize=64)
def _bounded_range(noise_multiplier: float) -> BoundedRangeEvent:
    """Returns the event of Gumbel noise, which every release asks for: public, frozen and so made once."""
    return BoundedRangeEvent(1.0 / noise_multiplier)


class NoisyMax(Mechanism, is_base=True):
    """The argmax of noisy scores; nothing else leaves."""

    __slots__ = ()

    def _choose(self, total: BoundedSum, standard_noise: Callable[[int], Floats]) -> Release:
        scale = self._scale(total)
        # Scores relative to the best one: exact on the grid of sums, and small where it matters.
        scores = total.value - total.value.max()  # [d], <= 0
        index = int((scores + scale * standard_noise(scores.size)).argmax())
        return Release(index=index, values=None, event=self.event)


def grid_step(scale: float) -> float:
    """Returns the public grid of a noisy vector, from its noise scale alone."""
    return max(math.ldexp(_GRID_SHARE, math.frexp(scale)[1] - 1), _FINEST_GRID)


def rounded(value: Floats, draws: GaussianDraws, scale: float, step: float) -> Floats:
    """Returns float64[d]: value + scale * ideal draw, rounded to the nearest multiple of `step` as in real arithmetic.

    Floats decide where they are certain; a sum within their error of the middle between two multiples is settled with
    rationals and fresh coins. Needs |value| <= LARGEST.
    """
    whole = np.rint(value / step)
    rest = value - whole * step  # [d], exact, at most half a step
    cells = (rest + scale * draws.values) / step
    nearest = np.rint(cells)
    doubt = _MARGIN * (1.0 + scale / step * (1.0 + np.abs(draws.values)))  # [d], in steps
    for i in (0.5 - np.abs(cells - nearest) <= doubt).nonzero()[0]:
        lower = math.floor(cells[i])
        middle = Fraction(lower + 0.5) * Fraction(step) - Fraction(float(rest[i]))
        nearest[i] = lower if draws.is_below(int(i), middle / Fraction(scale)) else lower + 1
    return (whole + nearest + 0.0) * step  # + 0.0: no negative zero, whose sign is not part of the ideal result


@final
@dataclass(frozen=True, slots=True)
class GaussianMechanism(Mechanism):
    """Adds independent normal noise to every coordinate of a sum and rounds the result to a public grid.

    Formal guarantees:
      - `values` is `total.value + N(0, (noise_multiplier * L2 sensitivity)^2 I)`, under `total.adjacency`, rounded to
        the nearest multiples of a power of two: between 2^-17 and 2^-16 of the noise scale, and at least 2^-32.
      - It equals the rounding of real normal noise except with a probability that `implementation_delta` covers, so
        `values` may be used by any post-processing (argmax, thresholds, sampling, cutting at zero).
      - The event is `GaussianEvent(noise_multiplier)`.
      - Coordinates beyond 2^20 in magnitude, which no sum of up to 2^20 rows has, are cut to it before the noise.

    The released law is discrete, on a public grid, and a post-processing of the continuous mechanism: its event, also
    subsampled, is exact for a vector that leaves as a whole. Why not the discrete Gaussian: docs/proofs/gaussian.md.

    Args:
      noise_multiplier: standard deviation of the noise over the L2 sensitivity, in [1e-9, 1e12].

    >>> GaussianMechanism(2.0).event
    GaussianEvent(noise_multiplier=2.0)

    Source: Balle and Wang (2018), Theorem 8; docs/proofs/gaussian.md.
    """

    noise_multiplier: float
    name: ClassVar[str] = "gaussian"
    norm: ClassVar[Norm] = "l2"
    kind: ClassVar[Noise | Coins] = "gaussian"
    releases: ClassVar[Literal["vector", "index", "indices"]] = "vector"

    @property
    def event(self) -> GaussianEvent:
        """The event of one release."""
        return GaussianEvent(self.noise_multiplier)

    def release(self, total: BoundedSum, *, rng: SecureRandom) -> Release:
        """Adds the noise to a float64[d] sum and rounds; refuses a sum that carries no L2 bound."""
        scale = self._scale(total)
        bounded = np.minimum(np.maximum(total.value, -LARGEST), LARGEST)  # moves no two sums apart
        values = rounded(bounded, rng.gaussian_draws(total.value.size), scale, grid_step(scale))  # [d]
        return Release(index=None, values=values, event=self.event)


@final
@dataclass(frozen=True, slots=True)
class GumbelMechanism(NoisyMax):
    """Releases the argmax of a sum plus Gumbel noise: the exponential mechanism.

    Formal guarantees:
      - `index` is i with probability proportional to exp(total.value[i] / (noise_multiplier * range)).
      - The event is `BoundedRangeEvent(1 / noise_multiplier)`; within `implementation_delta` of it.

    Args:
      noise_multiplier: Gumbel scale over the range of a neighbour's change, in [1e-9, 1e12].

    Source: McSherry and Talwar (2007); Dong, Durfee, Rogers (2020); docs/proofs/gumbel.md.
    """

    noise_multiplier: float
    name: ClassVar[str] = "gumbel"
    norm: ClassVar[Norm] = "range"
    kind: ClassVar[Noise | Coins] = "gumbel"
    releases: ClassVar[Literal["vector", "index", "indices"]] = "index"

    @property
    def event(self) -> BoundedRangeEvent:
        """The event of one release."""
        return _bounded_range(self.noise_multiplier)

    def release(self, total: BoundedSum, *, rng: SecureRandom) -> Release:
        """Chooses the noisy best coordinate of a float64[d] sum; refuses a sum that carries no range bound."""
        return self._choose(total, rng.gumbel)


Sample: TypeAlias = tuple[tuple[int, ...], ...]
"""One inner tuple of unit positions per row."""

BOTH: frozenset[str] = frozenset({"add_remove", "replace_one"})


class Sampler(NamedPart, is_base=True):
    """Base of the samplers.

    Attributes:
      row_shape: "slots" (a fixed, public number of rows; a unit less or more, coins kept, changes the row of one place
        and leaves the others where they stand) or "units".
      adjacencies: neighbouring relations that it is proved under.
      is_batched: whether a draw is read batch by batch (see `random_allocation`).
    """

    __slots__ = ()
    row_shape: ClassVar[RowShape]
    adjacencies: ClassVar[frozenset[str]]
    is_batched: ClassVar[bool] = False

    if TYPE_CHECKING:  # fields of some samplers, properties or constants of others, or not there

        @property
        def num_slots(self) -> int:
            """Rows of a draw, or of a batch, where rows are slots."""

        @property
        def shots_per_slot(self) -> int:
            """Most units in a row, where rows are slots."""

        @property
        def sampling_rate(self) -> float:
            """Probability that a unit is in a draw, as it is priced."""

        @property
        def num_rows(self) -> int | None:
            """Number of rows of every draw, public; None where it is secret."""

    @abstractmethod
    def draw(self, num_units: int, *, rng: SecureRandom) -> Sample:
        """Draws a fresh secret sample of units 0 .. num_units - 1."""

    @abstractmethod
    def amplify(self, event: Event) -> Event:
        """Returns the event of `event` run on one secret draw."""


def assign(included: Sequence[int], slots: Sequence[int], *, num_slots: int, shots_per_slot: int) -> Sample:
    """Puts each included unit into its own slot; a full slot turns later units away. Pure: all coins are arguments.

    Formal guarantees:
      - Striking one unit (and its slot) out of the arguments changes at most one inner tuple.
      - Where `included` is in random order, what stays in an over-full slot is a uniform choice among its units.

    Args:
      included: distinct unit positions, in order of priority.
      slots: for each included unit, its slot in 0 .. num_slots - 1.
      num_slots: length of the result, public.
      shots_per_slot: most units per slot, public.
    """
    rows: list[list[int]] = [[] for _ in range(num_slots)]
    for unit, slot in zip(included, slots, strict=True):
        if len(rows[slot]) < shots_per_slot:
            rows[slot].append(unit)
    return tuple(tuple(row) for row in rows)


def poisson(num_units: int, sampling_rate: float, rng: SecureRandom) -> list[int]:
    """Returns a Poisson sample in random order: a binomial size, then a uniform selection of that size."""
    size = rng.binomial(num_units, sampling_rate)
    units: list[int] = rng.choice_without_replacement(num_units, size).tolist()
    return units


def check_rate(value: float) -> float:
    """Returns a sampling rate in (0, 1], or refuses it."""
    return check_real("sampling_rate", value, low=0.0, high=1.0, low_open=True)


def amplified(event: Event, sampling_rate: float) -> Event:
    """Returns the event of `event` on one secret sample."""
    return event if sampling_rate == 1.0 else SubsampledEvent(event, sampling_rate)


@final
@dataclass(frozen=True, slots=True)
class PoissonSlots(Sampler):
    """Each unit joins with probability `sampling_rate`, in a uniformly random one of `num_slots` slots.

    Formal guarantees:
      - Units are independent of each other; adding, removing or replacing one, with the coins of the others kept,
        changes at most one slot. An over-full slot keeps `shots_per_slot` of its units, chosen uniformly.
      - There are always `num_slots` rows, some possibly empty, for every number of units.
      - `amplify(event)` prices a block of releases on one draw, under either adjacency.

    Args:
      sampling_rate: probability in (0, 1] that a unit is included.
      num_slots: number of rows, public.
      shots_per_slot: most units in a row, public.

    >>> from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM
    >>> sample = PoissonSlots(0.5, num_slots=3, shots_per_slot=2).draw(10, rng=SYSTEM_RANDOM)
    >>> len(sample), max(len(row) for row in sample) <= 2
    (3, True)

    Source: Balle, Barthe, Gaboardi (2018), Poisson amplification; docs/proofs/poisson-slots.md.
    """

    sampling_rate: float
    num_slots: int
    shots_per_slot: int
    name: ClassVar[str] = "poisson_slots"
    row_shape: ClassVar[RowShape] = "slots"
    adjacencies: ClassVar[frozenset[str]] = BOTH

    def __post_init__(self) -> None:
        object.__setattr__(self, "sampling_rate", check_rate(self.sampling_rate))
        check_int("num_slots", self.num_slots, low=1)
        check_int("shots_per_slot", self.shots_per_slot, low=1)

    @property
    def num_rows(self) -> int:
        """Number of rows of every draw, public."""
        return self.num_slots

    def draw(self, num_units: int, *, rng: SecureRandom) -> Sample:
        """Draws a fresh secret sample; time and entropy grow with the units drawn, not with the private `num_units`."""
        included = poisson(num_units, self.sampling_rate, rng)
        slots = rng.integers(self.num_slots, len(included)).tolist()
        return assign(included, slots, num_slots=self.num_slots, shots_per_slot=self.shots_per_slot)

    def amplify(self, event: Event) -> Event:
        """Returns the event of `event` run on one secret draw."""
        return amplified(event, self.sampling_rate)


@final
@dataclass(frozen=True, slots=True)
class PoissonUnits(Sampler):
    """Each unit is a row of its own with probability `sampling_rate`, independently.

    Formal guarantees:
      - A unit never appears twice; with the coins of the others kept, adding or removing one adds or removes one row.
      - The number of rows is secret (`num_rows` is None); a sum over the rows must be scaled by public numbers only.
      - `amplify(event)` prices a block of releases on one draw, under either adjacency.

    Args:
      sampling_rate: probability in (0, 1] that a unit is included.

    Source: Balle, Barthe, Gaboardi (2018), Poisson amplification; docs/proofs/poisson-slots.md.
    """

    sampling_rate: float
    name: ClassVar[str] = "poisson_units"
    row_shape: ClassVar[RowShape] = "units"
    adjacencies: ClassVar[frozenset[str]] = BOTH
    num_rows: ClassVar[None] = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "sampling_rate", check_rate(self.sampling_rate))

    def draw(self, num_units: int, *, rng: SecureRandom) -> Sample:
        """Draws a fresh secret sample of one-unit rows in random order; see `PoissonSlots.draw`."""
        return tuple([(unit,) for unit in poisson(num_units, self.sampling_rate, rng)])

    def amplify(self, event: Event) -> Event:
        """Returns the event of `event` run on one secret draw."""
        return amplified(event, self.sampling_rate)


# What looks like one of these can do anything: the proofs cover exactly these classes and those of `registry`.
_PROVED: dict[str, tuple[type, ...]] = {
    "sampler": (PoissonSlots, PoissonUnits),
    "aggregation": (ProbabilitySum, VoteSum),
    "mechanism": (GaussianMechanism, GumbelMechanism),
    "test": (type(None),),
}


def check_proved(name: str, part: object) -> None:
    """Refuses a part of a class that no proof covers.

    The classes of this folder are compared first, so a plan of them never depends on an extension. Only another part
    loads the closed lists of the extensions; `type(part)` is compared, which no attribute of the part can change.
    """
    if type(part) in _PROVED[name]:
        return
    proved = _PROVED[name] + provided("extensions").PROVED[name]
    if type(part) not in proved:
        names = ", ".join(each.__name__ for each in proved)
        advice = "docs/extending.md says what a new one takes."
        raise ConfigurationError(f"{name}: expected one of {names}, found {type(part).__name__}. {advice}")


@functools.lru_cache(maxsize=64)
def _block_event(mechanism: Mechanism, sampler: Sampler, length: int, answers: int | None) -> Event:
    """Returns the event that every ticket is compared with: public, frozen and so made once."""
    return sampler.amplify(mechanism.repeated(length, answers))


@dataclass(frozen=True, slots=True)
class ReleasePlan:
    """How one index, vector or sequence is released, again and again, from one pool of units.

    Formal guarantees:
      - `block_event(c)` bounds the privacy loss of `c` adaptive releases on one secret sample drawn by `sampler`.
      - `event(n)` bounds `n` releases, redrawn every `redraw_every` of them.

    Attributes:
      sampler: draws the secret sample; fixes the row shape.
      aggregation: turns rows into a bounded sum; holds the sensitivity.
      mechanism: adds the noise; holds the event.
      adjacency: the neighbouring relation all of it is stated under.
      redraw_every: releases per secret sample (c), public.
      constants: public scores of further candidates, which no row moves ("abstain"); rounded to multiples of 2^-32.
      test: None, or a `SparseVectorTest`: asks before every release whether the rows are far from the public
        distribution; where they are not, what leaves is public. Only for sums that the public logits belong to.
      private_releases: with `test`, how many releases of a block may come from the rows; what follows is public.

    Raises:
      ConfigurationError: a part of a class that no proof covers, parts that do not fit together, or a constant that is
        not finite or beyond 2^20.
    """

    sampler: Sampler
    aggregation: Aggregation
    mechanism: Mechanism
    adjacency: Adjacency
    redraw_every: int = 1
    constants: tuple[float, ...] = ()
    test: Any = None
    private_releases: int = 0

    def __post_init__(self) -> None:
        check_adjacency(self.adjacency)
        check_int("redraw_every", self.redraw_every, low=1)
        for name in _PROVED:
            check_proved(name, getattr(self, name))
        if self.adjacency not in self.sampler.adjacencies:
            msg = (
                f"sampler: expected one proved under adjacency={self.adjacency!r}, found "
                f"{type(self.sampler).__name__} ({', '.join(sorted(self.sampler.adjacencies))})."
            )
            raise ConfigurationError(msg)
        if getattr(self.sensitivity, self.mechanism.norm) is None:
            msg = (
                f"mechanism: expected one whose norm ({self.mechanism.norm}) {type(self.aggregation).__name__} "
                f"bounds, found {type(self.mechanism).__name__}."
            )
            raise ConfigurationError(msg)
        object.__setattr__(self, "constants", self._check_constants())
        self.mechanism.check_sum(self.aggregation, self.sensitivity, self.constants)
        check_int("private_releases", self.private_releases, low=0 if self.test is None else 1)
        if self.test is None and self.private_releases:
            raise fail("private_releases", "0 without a test", self.private_releases)
        if self.test is not None and not self.aggregation.needs_public:
            raise fail("test", "none beside a sum that no public logits belong to", self.aggregation.name)

    def _check_constants(self) -> tuple[float, ...]:
        """Returns the constants on their grid."""
        if not isinstance(self.constants, (tuple, list)):
            raise fail("constants", "a tuple of numbers", self.constants)
        if self.constants and not self.aggregation.takes_constants:
            expected = "none beside " + self.aggregation.name
            raise fail("constants", expected, self.constants, "Add constants to votes or probabilities only.")
        checked = (check_real("constants", c, low=-LARGEST, high=LARGEST) for c in self.constants)
        return tuple(round(c * GRID) / GRID for c in checked)

    @property
    def row_shape(self) -> RowShape:
        """The shape of a row: a slot of several units, or one unit."""
        return self.sampler.row_shape

    @property
    def sensitivity(self) -> Sensitivity:
        """The sensitivity of one aggregated sum."""
        return self.aggregation.sensitivity(row_shape=self.row_shape, adjacency=self.adjacency)

    def bound(self, rows: Any, *, width: int, public: npt.NDArray[Any] | None = None) -> BoundedSum:
        """Returns the bounded sum of private rows with the plan's constants behind it.

        Args:
          rows: real[n, width], one per slot or per included unit; or a running sum that the plan's aggregation made.
          width: columns of a row, public; the sum has `len(constants)` coordinates more.
          public: real[width] logits of the public prompt, for sums that they belong to; the others ignore them.
        """
        total = self.aggregation.bound(
            rows, row_shape=self.row_shape, adjacency=self.adjacency, width=width, public=public
        )
        return total.with_constants(self.constants)

    def with_noise(self, noise_multiplier: float) -> ReleasePlan:
        """Returns the same plan with another noise multiplier; the mechanism keeps its other parameters."""
        return dataclasses.replace(self, mechanism=self.mechanism.with_noise(noise_multiplier))

    def block_event(self, length: int, answers: int | None = None) -> Event:
        """Returns the event of `length` releases on one secret sample, composed inside and amplified once.

        Args:
          length: releases, or tests of the confident mechanism; public.
          answers: how many of the tests may be answered at most, public; None is all of them, and the only choice for
            the other mechanisms, which always answer.
        """
        check_int("length", length, low=1)
        if self.test is not None:
            # A run of the test goes with every private release; after the last of them nothing private is read.
            runs = min(length, self.private_releases)
            return self.sampler.amplify(self.test.with_releases(self.mechanism.event, runs))
        if length == 1 and answers is None and isinstance(self.sampler, PoissonUnits):
            rate = self.sampler.sampling_rate
            tighter = self.aggregation.sampled_event(self.mechanism.event, rate, self.adjacency)
            if tighter is not None:
                return tighter
        return _block_event(self.mechanism, self.sampler, length, answers)

    def blocks(self, num_releases: int) -> tuple[tuple[int, int], ...]:
        """Returns (length, count) of the blocks that make `num_releases`; only the last may be shorter."""
        full, rest = divmod(check_int("num_releases", num_releases, low=0), self.redraw_every)
        pairs = ((self.redraw_every, full), (rest, 1))
        return tuple((length, count) for length, count in pairs if length and count)

    def event(self, num_releases: int) -> Event:
        """Returns the event of `num_releases` releases."""
        parts = tuple(RepeatedEvent(self.block_event(length), count) for length, count in self.blocks(num_releases))
        return parts[0] if len(parts) == 1 else ComposedEvent(parts)

    def implementation_delta(self, num_releases: int, *, width: int) -> float:
        """Returns the declared gap between ideal and drawn coins over `num_releases` of `width` candidates."""
        sampling = SecureRandom.implementation_delta("binomial")
        tests = 0.0 if self.test is None else self.test.implementation_delta(1)
        return num_releases * (self.mechanism.implementation_delta(width) + sampling + tests)

    def to_dict(self) -> dict[str, Any]:
        """Returns the public parameters, for plans and reports."""
        return {
            "sampler": self.sampler.to_dict(),
            "aggregation": self.aggregation.to_dict(),
            "mechanism": self.mechanism.to_dict(),
            "adjacency": self.adjacency,
            "redraw_every": self.redraw_every,
            "sensitivity": dataclasses.asdict(self.sensitivity),
            **({"constants": list(self.constants)} if self.constants else {}),
            **({} if self.test is None else {"test": self.test.to_dict(), "private_releases": self.private_releases}),
        }
