"""The frozen plan of a release: sampler, sum, noise and event under one neighbouring relation.

Sampler, sensitivity, noise and event come out of one value, so that what runs is what is charged.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from langchain_dpicl._lazy import provided
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy._validate import Adjacency, RowShape, check_adjacency, check_int, check_real, fail
from langchain_dpicl.privacy.accounting.events import ComposedEvent, Event, RepeatedEvent
from langchain_dpicl.privacy.mechanisms.bounded import GRID, LARGEST, Aggregation, BoundedSum, Sensitivity
from langchain_dpicl.privacy.mechanisms.noise import GaussianMechanism, GumbelMechanism, Mechanism
from langchain_dpicl.privacy.mechanisms.randomness import SecureRandom
from langchain_dpicl.privacy.mechanisms.sampling import PoissonSlots, PoissonUnits, Sampler
from langchain_dpicl.privacy.mechanisms.vote_sums import ProbabilitySum, VoteSum

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

    Args:
      name: field of the plan.
      part: its value.

    Raises:
      ConfigurationError: its class is in neither list.
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

        Raises:
          ConfigurationError: see `ProbabilitySum.bound`.
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

        Raises:
          ConfigurationError: a count out of range.
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
