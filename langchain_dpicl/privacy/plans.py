"""The frozen plan of a release: sampling x aggregation x mechanism x event x adjacency. Knows no data and no model.

Sampler, sensitivity, noise and event come out of one value, so that what runs is what is charged.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, TypeAlias, get_args

import numpy.typing as npt

from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy._validate import Adjacency, RowShape, check_adjacency, check_int, check_real, fail
from langchain_dpicl.privacy.aggregation import (
    Aggregation,
    ClippedDifferenceMean,
    ClippedGradientSum,
    ClippedLogitMean,
    KeywordSum,
    MaxNormalizedSum,
    ProbabilitySum,
    VoteSum,
)
from langchain_dpicl.privacy.bounded import GRID, LARGEST, BoundedSum, Sensitivity
from langchain_dpicl.privacy.confident import ConfidentGNMaxMechanism
from langchain_dpicl.privacy.events import ComposedEvent, Event, RepeatedEvent, SampledBallEvent
from langchain_dpicl.privacy.gradient_sums import RunningSum
from langchain_dpicl.privacy.joint import JointExponentialMechanism
from langchain_dpicl.privacy.mechanisms import GaussianMechanism, GumbelMechanism, PermuteAndFlipMechanism
from langchain_dpicl.privacy.randomness import SecureRandom
from langchain_dpicl.privacy.sampling import Sampler
from langchain_dpicl.privacy.sparse import SparseVectorTest

Mechanism: TypeAlias = (
    GaussianMechanism | GumbelMechanism | PermuteAndFlipMechanism | JointExponentialMechanism | ConfidentGNMaxMechanism
)
# What looks like one of these may do anything: the proofs cover exactly these classes.
_PROVED = {"sampler": get_args(Sampler), "aggregation": get_args(Aggregation), "mechanism": get_args(Mechanism)}
_PROVED["test"] = (SparseVectorTest, type(None))
# Sums on the grid of the constants, with coordinates that a constant can be compared with.
_TAKE_CONSTANTS = (VoteSum, ProbabilitySum, MaxNormalizedSum)


@functools.lru_cache(maxsize=64)
def _block_event(release: Event, sampler: Sampler, length: int) -> Event:
    """Returns the event that every ticket is compared with: public, frozen and so made once."""
    return sampler.amplify(release if length == 1 else RepeatedEvent(release, length))


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
      test: asks before every release whether the rows are far from the public distribution; where they are not, what
        leaves is public. Only for sums that the public logits belong to.
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
    test: SparseVectorTest | None = None
    private_releases: int = 0

    def __post_init__(self) -> None:
        check_adjacency(self.adjacency)
        check_int("redraw_every", self.redraw_every, low=1)
        self._check_classes()
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
        if isinstance(self.mechanism, JointExponentialMechanism) and not isinstance(self.aggregation, KeywordSum):
            advice = "Its exact sampler counts sequences by whole-number gaps; choose KeywordSum()."
            raise fail("aggregation", "keyword_sum for joint_exponential", self.aggregation.name, advice)
        object.__setattr__(self, "constants", self._checked_constants())
        if isinstance(self.mechanism, ConfidentGNMaxMechanism):
            self._check_threshold()
        check_int("private_releases", self.private_releases, low=0 if self.test is None else 1)
        if self.test is None and self.private_releases:
            raise fail("private_releases", "0 without a test", self.private_releases)
        if self.test is not None and not self.aggregation.needs_public:
            raise fail("test", "none beside a sum that no public logits belong to", self.aggregation.name)

    def _check_classes(self) -> None:
        """Refuses parts that only look like a proved one."""
        for name, proved in _PROVED.items():
            found = type(getattr(self, name))
            if found not in proved:
                names = ", ".join(each.__name__ for each in proved)
                advice = "docs/extending.md says what a new one takes."
                raise ConfigurationError(f"{name}: expected one of {names}, found {found.__name__}. {advice}")

    def _check_threshold(self) -> None:
        """Refuses sums whose largest coordinate is no count of agreement."""
        if self.sensitivity.linf is None:
            advice = "A threshold needs a bound on the largest coordinate."
            raise fail("aggregation", "vote_sum or probability_sum for confident_gnmax", self.aggregation.name, advice)
        if self.constants:
            advice = "The threshold itself says when there is no answer."
            raise fail("constants", "none beside confident_gnmax", self.constants, advice)

    def _checked_constants(self) -> tuple[float, ...]:
        """Returns the constants on their grid."""
        if not isinstance(self.constants, (tuple, list)):
            raise fail("constants", "a tuple of numbers", self.constants)
        if self.constants and not isinstance(self.aggregation, _TAKE_CONSTANTS):
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

    def bound(self, rows: npt.NDArray[Any], *, width: int, public: npt.NDArray[Any] | None = None) -> BoundedSum:
        """Returns the bounded sum of private rows with the plan's constants behind it.

        Args:
          rows: real[n, width], one per slot or per included unit.
          width: columns of a row, public; the sum has `len(constants)` coordinates more.
          public: real[width] logits of the public prompt, for sums that they belong to; the others ignore them.

        Raises:
          ConfigurationError: see `ProbabilitySum.bound`.
        """
        if isinstance(self.aggregation, ClippedLogitMean | ClippedDifferenceMean):
            return self.aggregation.bound(
                rows, row_shape=self.row_shape, adjacency=self.adjacency, width=width, public=public
            )
        total = self.aggregation.bound(rows, row_shape=self.row_shape, adjacency=self.adjacency, width=width)
        return total.with_constants(self.constants)

    def running_sum(self, width: int) -> RunningSum:
        """Returns an empty sum that takes private gradients batch by batch; see `total_of`.

        Args:
          width: parameters of a gradient, public.

        Raises:
          ConfigurationError: the plan does not add gradients, or a width out of range.
        """
        if not isinstance(self.aggregation, ClippedGradientSum):
            advice = "Other rows are bounded together, by bound()."
            raise fail("aggregation", "clipped_gradient_sum for a running sum", self.aggregation.name, advice)
        return RunningSum(self.aggregation, row_shape=self.row_shape, adjacency=self.adjacency, width=width)

    def total_of(self, running: RunningSum, *, width: int) -> BoundedSum:
        """Returns the bounded sum of all gradients added to a running sum of this plan, which is closed then.

        Raises:
          ConfigurationError: it is of another plan or width, or was taken already.
        """
        mine = (self.aggregation, self.row_shape, self.adjacency, width)
        found = (running.aggregation, running.row_shape, running.adjacency, running.width)
        if found != mine:
            raise fail("running sum", f"one of this plan, {mine}", found, "Make it with the plan's running_sum(width).")
        return running.total()

    def with_noise(self, noise_multiplier: float) -> ReleasePlan:
        """Returns the same plan with another noise multiplier; the mechanism keeps its other parameters."""
        mechanism = dataclasses.replace(self.mechanism, noise_multiplier=noise_multiplier)
        return dataclasses.replace(self, mechanism=mechanism)

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
        if isinstance(self.mechanism, ConfidentGNMaxMechanism):
            inside = self.mechanism.event_of(length, length if answers is None else answers)
            return _block_event(inside, self.sampler, 1)
        if self.test is not None:
            # A run of the test goes with every private release; after the last of them nothing private is read.
            runs = min(length, self.private_releases)
            each = (RepeatedEvent(self.test.event, runs), RepeatedEvent(self.mechanism.event, runs))
            return _block_event(ComposedEvent(each), self.sampler, 1)
        is_ball = isinstance(self.aggregation, ClippedGradientSum) and isinstance(self.mechanism, GaussianMechanism)
        if is_ball and self.adjacency == "replace_one" and length == 1 and answers is None:
            # Of a clipped gradient more is known than how far it moves when it is replaced: that it is near to none.
            return SampledBallEvent(self.mechanism.noise_multiplier, self.sampler.sampling_rate)
        if answers is not None:
            raise fail("answers", f"None: {self.mechanism.name} answers every time", answers)
        return _block_event(self.mechanism.event, self.sampler, length)

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
