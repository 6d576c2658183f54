"""Computes the expected utility of a design of rows, and compares designs at equal epsilon."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy import special

from langchain_dpicl.options import Rows, option_of
from langchain_dpicl.planning.row_law import RowFacts, ShotLaw, binomial_masses, wins_fairly
from langchain_dpicl.privacy._validate import (
    ROW_SHAPES,
    RowShape,
    check_choice,
    check_int,
    check_positive,
    check_real,
    fail,
)
from langchain_dpicl.privacy.extensions.confident_gnmax import ConfidentGNMaxMechanism
from langchain_dpicl.privacy.extensions.fixed_size_slots import BalancedSlots, PartitionedSlots
from langchain_dpicl.privacy.extensions.logit_sums import ClippedDifferenceMean, ClippedLogitMean
from langchain_dpicl.privacy.extensions.random_allocation import AllocatedSlots
from langchain_dpicl.privacy.mechanisms.release_plan import PoissonSlots, PoissonUnits, ReleasePlan, Sampler

Floats = NDArray[np.float64]

_Curve: TypeAlias = Callable[[Floats], Floats]
EntryT = TypeVar("EntryT")

_MOST_TIES = 38
"""Other labels whose tie with the right one is counted exactly."""
_LEAST_SCALE = 0.05
"""Less noise than this is none: votes are whole numbers."""


@dataclass(frozen=True, slots=True)
class Contest:
    """How rows vote, and the noise on their votes.

    Attributes:
      trials: rows, or units that may be drawn as a row; at most about 150 of them may vote.
      used: chance that one of them votes.
      labels: labels that an answer can have.
      noise: "gaussian" or "gumbel"; None: the most votes win, and equals share.
      scale: of the noise on the votes of each label.
    """

    trials: int
    used: float
    labels: int
    noise: str | None = None
    scale: float = 0.0

    def rights(self, facts: Sequence[RowFacts]) -> Floats:
        """Returns float64[len(facts)]: the chances of the right label, for rows with these numbers.

        The rows of a question are right or wrong by a Beta-binomial law, and the votes of the wrong ones are spread by
        a Dirichlet-multinomial one; both are summed, and the noise is integrated. What depends on the rival alone is
        computed at a few rivals and interpolated between them.
        """
        counts = np.arange(self.most + 1.0)
        # On this scale the chance bends about as much near evenly spread votes as far from them.
        even = 1.0 / (self.labels - 1)
        places = np.log(np.array([max(one.rival - even, 0.0) for one in facts]) + _NEARLY_EVEN)
        nodes = np.linspace(places.min(), places.max(), _num_nodes(float(np.ptp(places))) if self.labels > 2 else 1)
        wins = self._wins(np.exp(nodes) - _NEARLY_EVEN + even, counts)  # [rival, right, wrong]
        shares = [np.prod([(places - to) / (at - to) for to in nodes if to != at], axis=0) for at in nodes]
        own = np.einsum("cf,crw->frw", np.array([np.broadcast_to(share, places.shape) for share in shares]), wins)
        for place, one in enumerate(facts):
            if one.silent > 0.0:
                # Row by row: a product of whole matrices wakes BLAS threads, which then spin.
                own[place] = (own[place][:, None, :] @ _thinned(len(counts), 1.0 - one.silent).T)[:, 0]
        return np.asarray((own * self._votes(facts, counts)).sum(axis=(1, 2)).clip(0.0, 1.0))

    @property
    def most(self) -> int:
        """Most rows that vote; more do so with a chance below 1e-6."""
        mean = self.trials * self.used
        return min(self.trials, int(mean + 5.0 * np.sqrt(mean * (1.0 - self.used)) + 4.0))

    def _votes(self, facts: Sequence[RowFacts], counts: Floats) -> Floats:
        """Returns float64[facts, right, not right]: the chance of so many rows that are right, and that are not."""
        right, wrong = counts[:, None], counts[None, :]
        rows = (right + wrong).clip(0.0, self.trials)
        ways = special.gammaln(self.trials + 1.0) - special.gammaln(self.trials - rows + 1.0)
        ways += special.xlogy(rows, self.used) + special.xlogy(self.trials - rows, 1.0 - self.used)
        ways -= special.gammaln(right + 1.0) + special.gammaln(wrong + 1.0)
        ways[right + wrong > self.trials] = -np.inf
        share = np.array([min(max(one.right, 1e-9), 1.0 - 1e-9) for one in facts])
        alike = np.array([min(max(one.correlation, 1e-5), 0.98) for one in facts])
        first, second = (part * (1.0 - alike) / alike for part in (share, 1.0 - share))
        own = special.gammaln(counts + first[:, None]) - special.gammaln(first)[:, None]
        others = special.gammaln(counts + second[:, None]) - special.gammaln(second)[:, None]
        both = (first + second)[:, None]
        together = special.gammaln(np.arange(2 * len(counts) - 1) + both) - special.gammaln(both)
        places = (right + wrong).astype(np.int64)
        return np.asarray(np.exp(ways + own[:, :, None] + others[:, None, :] - together[:, places]))

    def _wins(self, rivals: Floats, counts: Floats) -> Floats:
        """Returns float64[rivals, right, wrong]: the chance that so many right votes win against so many wrong ones."""
        others, votes = self.labels - 1, counts / max(self.scale, _LEAST_SCALE)
        if self.noise is None or self.scale < _LEAST_SCALE:
            # Equals share: of j others with as many votes each is behind with a chance that is drawn once for all.
            ties, shares = _between_0_and_1((min(others, _MOST_TIES) + 2) // 2)
            behind = counts[:, None] - counts[None, :]  # [right, votes of another]
            below = np.where(behind[:, None, :] > 0, 1.0, np.where(behind[:, None, :] < 0, 0.0, ties[None, :, None]))
            found = _others_below(below.reshape(-1, len(counts)), rivals, others)
            return np.asarray(np.einsum("n,crnw->crw", shares, found.reshape(len(rivals), *below.shape)))
        curves, step, low, high = _GRIDS[self.noise]
        at = np.arange(-low, votes[-1] + high, step)[:, None] - votes  # [noisy votes, votes]
        with np.errstate(over="ignore"):
            below, density = curves(at)
        return np.asarray(step * np.einsum("nr,cnw->crw", density, _others_below(below, rivals, others)))


_NEARLY_EVEN = 0.03
"""What is added to a rival before its logarithm is taken."""


def _num_nodes(width: float) -> int:
    """Returns how many rivals stand for all, by the width of the range of their logarithms: errors are below 6e-4."""
    return 1 if width < 1e-9 else 2 + sum(width > one for one in (0.2, 0.7, 1.5, 2.6))


def _normal(at: Floats) -> tuple[Floats, Floats]:
    return special.ndtr(at), np.exp(-(at**2) / 2.0) / np.sqrt(2.0 * np.pi)


def _gumbel(at: Floats) -> tuple[Floats, Floats]:
    tail = np.exp(-at)
    return np.exp(-tail), np.exp(-at - tail)


_GRIDS = {"gaussian": (_normal, 0.5, 5.0, 5.0), "gumbel": (_gumbel, 0.9, 3.5, 16.0)}
"""The chance that noise stays below and its density; step and reach of its grid: errors < 3e-5 with up to 77 labels."""


@functools.lru_cache(maxsize=16)
def _between_0_and_1(count: int) -> tuple[Floats, Floats]:
    """Returns nodes and weights of Gauss-Legendre quadrature."""
    nodes, weights = np.polynomial.legendre.leggauss(count)
    return (nodes + 1.0) / 2.0, weights / 2.0


def _thinned(size: int, chance: float) -> Floats:
    """Returns float64[trials, hits]: the chance of so many hits among fewer than `size` trials."""
    counts = np.arange(size)
    missed = counts[:, None] - counts[None, :]
    return np.asarray(_ways(size) * chance**counts * ((1.0 - chance) ** counts)[missed])


@functools.lru_cache(maxsize=16)
def _ways(size: int) -> Floats:
    """Returns float64[trials, hits]: in how many ways so many of the trials are hits."""
    return np.asarray(special.binom(*np.meshgrid(np.arange(size), np.arange(size), indexing="ij")))


def _others_below(below: Floats, rivals: Floats, others: int) -> Floats:
    """Returns float64[rivals, nodes, votes]: the chance that all other labels, which share these votes, stay below.

    Args:
      below: float64[nodes, votes]: the chance for one label that has so many.
      rivals: chance that two of these votes are for the same label.
      others: the labels that share them.
    """
    if others == 1:
        return np.broadcast_to(below, (len(rivals), *below.shape))
    even = 1.0 / others
    alike = rivals.clip(even + 1e-6, 1.0)[:, None, None]
    alpha = np.maximum((1.0 - alike) / (alike - even) / others, 1e-6)
    votes, scale = np.arange(below.shape[1]), np.log1p(others * alpha)
    # The generating function of a Dirichlet-multinomial law is a power; x is scaled such that no term overflows.
    one, whole = (
        np.exp(special.gammaln(votes + part) - special.gammaln(part) - special.gammaln(votes + 1.0) - votes * scale)
        for part in (alpha, others * alpha)
    )
    return np.asarray(np.moveaxis(_power(np.moveaxis(below * one, 2, 0).copy(), others), 0, 2) / whole)


def _power(series: Floats, exponent: int) -> Floats:
    """Returns float64[d, ...]: the first d terms of a power of each power series, whose terms are float64[d, ...]."""
    result: Floats | None = None
    while True:
        if exponent & 1:
            result = series if result is None else _times(result, series)
        exponent >>= 1
        if not exponent:
            return np.asarray(result)
        series = _times(series, series)


def _times(one: Floats, other: Floats) -> Floats:
    product = np.empty_like(one)
    for place in range(len(one)):
        np.einsum("i...,i...->...", one[: place + 1], other[place::-1], out=product[place])
    return product


_Column: TypeAlias = tuple[np.ndarray, int]
"""float64[n] votes of a candidate, and the number of candidates with these votes."""

PUBLIC_SHARE = 0.25
"""Default guess of the public model's chance of the right token, as a share of a row's chance."""
_UNLIMITED_CLIP = 1e3
_GRID = 2001
ROUGH_DRAWS = 8
"""Draws where many chances are computed, for an interval or a choice."""
_TINY = 1e-280
"""Below this a chance has lost digits, and so has all that is computed from it."""
_REACH = 7.0
"""Deviations within which normal noise is integrated."""
_NUM_NODES = 64


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Expected occupancy of rows, from declared sizes.

    Attributes:
      rows: expected number of rows with at least one unit.
      shots: expected units per row after truncation (slots count empty ones too).
      empty: chance that a slot is empty (0 for unit rows).
    """

    rows: float
    shots: float
    empty: float


def occupancy(plan: ReleasePlan, public_size: int) -> Occupancy:
    """Returns the expected occupancy of one sample from `public_size` units."""
    sampler = plan.sampler
    if isinstance(sampler, PoissonUnits):
        return Occupancy(rows=public_size * sampler.sampling_rate, shots=1.0, empty=0.0)
    shots, slots = sampler.shots_per_slot, sampler.num_slots
    if isinstance(sampler, BalancedSlots | PartitionedSlots):
        filled = min(shots, public_size / slots)
        return Occupancy(rows=min(slots, public_size), shots=filled, empty=max(0.0, 1.0 - public_size / slots))
    chance = _slot_masses(sampler, public_size)
    expected = float((np.arange(shots) * chance).sum() + shots * (1.0 - chance.sum()))
    return Occupancy(rows=slots * (1.0 - float(chance[0])), shots=expected, empty=float(chance[0]))


def _slot_masses(sampler: Sampler, units: int) -> np.ndarray:
    """Returns float64[shots]: the chance that a slot holds 0, 1, ... units, each from the one before it."""
    places = sampler.num_rows if isinstance(sampler, AllocatedSlots) else sampler.num_slots
    # A slot holds Binomial(n, q / M) units before truncation; M counts the slots of all batches of one deal.
    chance, counts = sampler.sampling_rate / places, np.arange(sampler.shots_per_slot)
    if chance >= 1.0:
        return np.asarray(counts == units, dtype=np.float64)
    none = np.exp(units * np.log1p(-chance))
    if none < _TINY:
        [masses] = binomial_masses(units, np.array([chance]), counts)
        return np.asarray(masses)
    ratios = (units - counts[1:] + 1.0) / counts[1:] * (chance / (1.0 - chance))
    return np.asarray(none * np.cumprod(np.append(1.0, ratios)))


def votes(rows: float, agreement: float, candidates: int) -> np.ndarray:
    """Returns float64[d] of expected votes: right index, one rival with half of the wrong votes, the others."""
    out = np.full(max(candidates, 2), rows * (1 - agreement) / 2 / max(candidates - 2, 1))
    out[0], out[1] = rows * agreement, rows * (1 - agreement) / 2
    return out


def noise_scale(plan: ReleasePlan) -> float:
    """Returns the scale of the noise on the sum (standard deviation, Gumbel or exponential scale)."""
    bound = getattr(plan.sensitivity, plan.mechanism.norm)
    return float(plan.mechanism.noise_multiplier * bound)


def expected_values(
    plan: ReleasePlan, *, rows: float, agreement: float, candidates: int, public_agreement: float | None = None
) -> np.ndarray:
    """Returns float64[d]: the expected sum before noise, of the right token, one rival and the others.

    For sums of probabilities these are `votes`. For logit sums every row in use gives the right token the probability
    `agreement`, and the public prompt gives it `public_agreement`; half of the remainder goes to one rival, the same
    for both, and the rest is spread evenly. The plan's own aggregation centres, clips and adds them; an unused row adds
    zeros, which for differences to the public logits equals the public prompt. Logits are assumed to be log
    probabilities, which matters if rows are clipped without centring.

    Args:
      plan: the release.
      rows: expected number of rows in use.
      agreement: guessed chance of the right token in a row.
      candidates: d, public.
      public_agreement: guessed chance of the right token after the public prompt; None: `PUBLIC_SHARE` of `agreement`.
    """
    mean = plan.aggregation
    if not isinstance(mean, ClippedLogitMean | ClippedDifferenceMean):
        return votes(rows, agreement, candidates)
    row = _log_votes(agreement, candidates)
    public = _log_votes(_public_guess(agreement, public_agreement), candidates)
    share = mean.bounded_rows(row[None], width=row.size, public=public)[0]
    no_rows = np.empty((0, row.size))
    alone = mean.bound(no_rows, row_shape="units", adjacency="add_remove", width=row.size, public=public).value
    return np.asarray(alone + rows * share)


def _log_votes(agreement: float, candidates: int) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(votes(1.0, agreement, candidates)))


def _public_guess(agreement: float, public_agreement: float | None) -> float:
    if public_agreement is None:
        return PUBLIC_SHARE * agreement
    return check_real("public_agreement", public_agreement, low=0.0, high=1.0)


def token_signal(
    plan: ReleasePlan, *, rows: float, agreement: float, candidates: int, public_agreement: float | None = None
) -> dict[str, float]:
    """Returns the chance that a released token is the one most rows predict; arguments as of `expected_values`.

    The measure, one for all mechanisms, ignores variety: noise on a sum of probabilities selects its maximum, while the
    logit mechanisms sample from a softmax and miss the likeliest token at times even without privacy. `ceiling_prob`
    states that limit.

    Returns:
      `signal_to_noise` ((right - rival) / deviation of the noise), `right_token_prob`, `ceiling_prob` (the same at
      unlimited epsilon: nothing clipped, the same temperature) and, for logit sums, the `public_agreement` it rests on.
    """
    guess = {"rows": rows, "agreement": agreement, "candidates": candidates, "public_agreement": public_agreement}
    values = expected_values(plan, **guess)  # type: ignore[arg-type]
    mean = plan.aggregation
    if isinstance(mean, ClippedLogitMean | ClippedDifferenceMean):
        unclipped = dataclasses.replace(plan, aggregation=dataclasses.replace(mean, clip=_UNLIMITED_CLIP))
        ceiling = _softmax_chance(expected_values(unclipped, **guess) / noise_scale(plan))  # type: ignore[arg-type]
        stated = {"public_agreement": _public_guess(agreement, public_agreement)}
    else:
        ceiling, stated = float(values[0] == values.max()) / float((values == values.max()).sum()), {}
    return {
        **stated,
        "signal_to_noise": float((values[0] - values[1]) / noise_deviation(plan)),
        "right_token_prob": _law(plan).first(values / noise_scale(plan)),
        "ceiling_prob": ceiling,
    }


def _chance_of_first(scaled: Floats, log_below: _Curve = special.log_ndtr, quantiles: _Curve = special.ndtri) -> float:
    """Returns the chance `E[prod_i F(v_0 - v_i + noise)]` that index 0 of float64[d] is released, by quadrature.

    `log_below` is the logarithm of F and `quantiles` its inverse, of normal noise by default.
    """
    # Midpoint rule over the quantiles of the noise on index 0; equal gaps are evaluated once.
    u = (np.arange(_GRID) + 0.5) / _GRID
    unique, counts = np.unique(scaled[0] - scaled[1:], return_counts=True)
    log_chance = (counts[:, None] * log_below(unique[:, None] + quantiles(u)[None, :])).sum(axis=0)
    return float(np.exp(log_chance).mean())


def _exponential_chance(scaled: Floats) -> float:
    with np.errstate(divide="ignore"):  # exponential noise is never negative
        return _chance_of_first(scaled, lambda x: np.log(-np.expm1(-np.maximum(x, 0.0))), lambda u: -np.log1p(-u))


def _softmax_chance(scores: np.ndarray) -> float:
    """Returns the same for Gumbel noise: the softmax of float64[d]."""
    return float(1.0 / np.exp(np.minimum(scores - scores[0], 700.0)).sum())  # e^-700 is 0 to the last digit


@dataclass(frozen=True, slots=True)
class VoteChances:
    """The chances of one release of votes, from the numbers of its rows.

    Attributes:
      right: chance that the right label is released.
      wrong: chance that any other label is.
      abstain: chance that a constant is, or that nothing reaches the threshold.
      without_noise: chance of the right label where the same rows vote without noise, constants and threshold.
      ceiling: chance of the right label with any number of such rows and no noise.
    """

    right: float
    wrong: float
    abstain: float
    without_noise: float
    ceiling: float


MUCH_NOISE = 0.03
"""Chance of the right label that noise may take before a plan advises against it."""


def shot_law(plan: ReleasePlan, public_size: int) -> ShotLaw:
    """Returns how many records a row in use shows, with the chance of each number."""
    sampler = plan.sampler
    if isinstance(sampler, PoissonUnits):
        return ((1, 1.0),)
    shots, slots = sampler.shots_per_slot, sampler.num_slots
    if isinstance(sampler, BalancedSlots | PartitionedSlots):
        return ((max(1, min(shots, public_size // slots)), 1.0),)
    chances = _slot_masses(sampler, public_size)
    full = max(1.0 - float(chances.sum()), 1e-12)
    return (*((count, float(chances[count])) for count in range(1, shots)), (shots, full))


def vote_chances(
    plan: ReleasePlan,
    public_size: int,
    *,
    facts: RowFacts,
    threshold: float | None = None,
    draws: int | None = None,
) -> VoteChances:
    """Returns the chances of one release of hard votes, over the questions that `facts` describe.

    The votes of each question are drawn; the noise on them is integrated. Slots are assumed to be empty independently
    of each other.

    Args:
      plan: the release; its constants come after the labels.
      public_size: declared units.
      facts: the numbers of a row in use.
      threshold: least value of the largest coordinate of a released noisy vector; Gaussian noise only.
      draws: as of `RowFacts.votes`.
    """
    return chances_of_votes(
        plan, drawn_votes(plan, public_size, facts, draws=draws), threshold=threshold, ceiling=facts.ceiling()
    )


def right_chance(
    plan: ReleasePlan,
    public_size: int,
    *,
    facts: RowFacts,
    threshold: float | None = None,
    draws: int | None = None,
) -> float:
    """Returns what `vote_chances(...).right` is, without the other chances: for comparisons of many plans."""
    columns = _columns(plan, drawn_votes(plan, public_size, facts, draws=draws))
    return _won(plan, columns, 0, _failed(plan, columns, threshold), threshold)


def rough_ceiling(facts: RowFacts) -> float:
    """Returns the chance of the right label without noise, roughly: for intervals."""
    return facts.ceiling(draws=ROUGH_DRAWS)


def ranges(right: float, low: float, high: float, *, ceiling: float, most: tuple[float, float]) -> dict[str, float]:
    """Returns the chance of the right label and its ceiling, each with its range; no end lies above its ceiling."""
    low, high = min(low, right), max(high, right)
    ceiling = max(ceiling, right)
    return {
        "right_label_prob": right,
        "right_label_low": low,
        "right_label_high": high,
        "ceiling_prob": ceiling,
        "ceiling_low": max(min(most[0], ceiling), low),
        "ceiling_high": max(most[1], ceiling, high),
    }


def chances_of_votes(
    plan: ReleasePlan, votes: np.ndarray, *, threshold: float | None = None, ceiling: float = 1.0
) -> VoteChances:
    """Returns the chances of one release, over questions whose votes are known; the noise is integrated.

    Args:
      plan: the release; its constants come after the labels.
      votes: float64[questions, labels], the right label first.
      threshold: as of `vote_chances`.
      ceiling: what is reported as such.
    """
    columns = _columns(plan, votes)
    winners = (0, *range(votes.shape[1], len(columns)))
    failed = _failed(plan, columns, threshold)
    won = [_won(plan, columns, column, failed, threshold) for column in winners]
    right, abstained = won[0], sum(won[1:]) + float(failed.mean())
    return VoteChances(
        right=right,
        wrong=max(0.0, 1.0 - right - abstained),
        abstain=abstained,
        without_noise=float(wins_fairly(votes).mean()),
        ceiling=ceiling,
    )


def _columns(plan: ReleasePlan, votes: np.ndarray) -> list[_Column]:
    """The votes of each label, then the plan's constants."""
    constants = [(np.full(len(votes), constant), 1) for constant in plan.constants]
    return [*((votes[:, place], 1) for place in range(votes.shape[1])), *constants]


def _failed(plan: ReleasePlan, columns: list[_Column], threshold: float | None) -> np.ndarray:
    """Returns float64[n] or float64[1]: the chance that a test or the threshold keeps every candidate back."""
    if threshold is not None and plan.mechanism.releases != "vector":
        raise fail("threshold", f"None: {plan.mechanism.name} releases no noisy vector", threshold)
    if isinstance(plan.mechanism, ConfidentGNMaxMechanism):
        return _test_fails(plan, plan.mechanism, columns)
    return np.zeros(1) if threshold is None else _all_below(plan, columns, threshold)


def _won(plan: ReleasePlan, columns: list[_Column], column: int, failed: np.ndarray, threshold: float | None) -> float:
    """Returns the mean chance that a column is released."""
    if isinstance(plan.mechanism, ConfidentGNMaxMechanism):
        return float(((1.0 - failed) * _wins(plan, columns, column)).mean())
    return float(_wins(plan, columns, column, threshold=threshold).mean())


def top_chances(plan: ReleasePlan, sums: np.ndarray, *, others: int = 0, rest: np.ndarray | None = None) -> np.ndarray:
    """Returns float64[n]: the chance that the first candidate of each sum is released, by closed form or quadrature.

    Args:
      plan: the release; its noise is added to sums of probabilities or votes.
      sums: float64[n, d], at the scale of the plan's rows; -inf: no candidate.
      others: further candidates of each sum.
      rest: float64[n], what these hold together, in equal parts.
    """
    columns = [(sums[:, place], 1) for place in range(sums.shape[1])]
    if others and rest is not None:
        columns.append((rest / others, others))
    return _wins(plan, columns, 0)


def right_with_normal_noise(votes: np.ndarray, stddev: float, *, least: float | None) -> float:
    """Returns the chance of the right label, column 0 of float64[questions, labels], under normal noise on all.

    Its noisy votes are at least `least`, if that is given.
    """
    rivals: list[_Column] = [(votes[:, place], 1) for place in range(1, votes.shape[1])]
    return float(_normal_wins(votes[:, 0], rivals, stddev, least=least).mean())


def below_with_normal_noise(votes: np.ndarray, stddev: float, *, least: float | None) -> float:
    """Returns the chance that all noisy votes of float64[questions, labels] are below `least`; 0 for None."""
    return 0.0 if least is None else float(special.ndtr((least - votes) / stddev).prod(axis=1).mean())


def right_chances(plan: ReleasePlan, public_size: int, facts: Sequence[RowFacts]) -> np.ndarray:
    """Returns float64[len(facts)]: `right_chance` of rows with each of these numbers, summed and not drawn.

    Exponential noise, constants and votes of many rows are drawn after all.
    """
    noise = plan.mechanism.name
    contest = Contest(*_rows_asked(plan, public_size), facts[0].labels, noise, noise_scale(plan))
    if noise not in _GRIDS or plan.constants or contest.most > _MOST_SUMMED:
        return np.array([right_chance(plan, public_size, facts=one, draws=ROUGH_DRAWS) for one in facts])
    return contest.rights(facts)


_MOST_SUMMED = 150
"""Rows whose votes are summed: the time grows with their square, and at 170 a chance is below every float."""


def _rows_asked(plan: ReleasePlan, public_size: int) -> tuple[int, float]:
    """Returns the rows of one release, or the units that may be drawn as a row, and the chance that one votes."""
    trials = public_size if isinstance(plan.sampler, PoissonUnits) else min(plan.sampler.num_slots, public_size)
    return trials, min(1.0, occupancy(plan, public_size).rows / trials)


def drawn_votes(plan: ReleasePlan, public_size: int, facts: RowFacts, *, draws: int | None = None) -> np.ndarray:
    """Returns float64[questions, labels]: the votes of one release on each of many questions, right label first."""
    return facts.votes(*_rows_asked(plan, public_size), draws=draws)


def _test_fails(plan: ReleasePlan, mechanism: ConfidentGNMaxMechanism, columns: list[_Column]) -> np.ndarray:
    """Returns float64[n]: the chance that the largest count with the noise of the test is below the threshold."""
    largest = np.max([values for values, count in columns if count], axis=0)
    scale = mechanism.test_noise_multiplier * plan.sensitivity.require("linf")
    return np.asarray(special.ndtr((mechanism.threshold - largest) / scale))


def _all_below(plan: ReleasePlan, columns: list[_Column], threshold: float) -> np.ndarray:
    """Returns float64[n]: the chance that every noisy count is below the threshold."""
    below = [special.ndtr((threshold - values) / noise_scale(plan)) ** count for values, count in columns if count]
    return np.asarray(np.prod(below, axis=0))


def _wins(plan: ReleasePlan, columns: list[_Column], winner: int, *, threshold: float | None = None) -> np.ndarray:
    """Returns float64[n]: the chance that a column of one candidate has the noisy maximum and reaches `threshold`."""
    rivals = [(values, count) for i, (values, count) in enumerate(columns) if count and i != winner]
    more = {} if threshold is None else {"least": threshold}
    return _law(plan).wins(columns[winner][0], rivals, noise_scale(plan), **more)


def _normal_wins(own: np.ndarray, rivals: list[_Column], scale: float, *, least: float | None = None) -> np.ndarray:
    """Returns float64[n]: the chance that `own` with normal noise is at least `least`, and above every noisy rival.

    The integrand is analytic: with up to 10 rivals the error is below 1e-10, with 1,000 below 1e-4.
    """
    nodes, weights = _nodes()
    low = np.full((1, 1), -_REACH) if least is None else np.clip((least - own) / scale, -_REACH, _REACH)[:, None]
    noise = low + (_REACH - low) * nodes  # [n, z]
    chance = np.repeat(np.exp(-(noise**2) / 2.0), own.size // len(noise), axis=0)
    votes = [values for values, count in rivals if count == 1 and _is_votes(values)] if _is_votes(own) else []
    if votes:
        _outdo_votes(chance, own.astype(np.int64), np.array(votes, dtype=np.int64).T, scale, noise)
        rivals = [(values, count) for values, count in rivals if count != 1 or not _is_votes(values)]
    for values, count in rivals:
        gap = (own - values) / scale
        # Sums repeat, and so do their gaps: each is integrated once.
        different, places = np.unique(gap, return_inverse=True) if len(noise) == 1 else (gap, slice(None))
        chance *= _to_the(special.ndtr(different[:, None] + noise), count)[places]
    # A product with `@` wakes BLAS threads, which then spin.
    return np.asarray((_REACH - low)[:, 0] * np.einsum("nz,z->n", chance, weights) / np.sqrt(2.0 * np.pi))


def _is_votes(values: np.ndarray) -> bool:
    """Whether all are whole numbers, few enough that each has a place in a table."""
    return bool(((values >= 0) & (values < _MOST_VOTES) & (values == np.floor(values))).all())


_MOST_VOTES = 200
"""A table grows with the square of the votes: beyond, it takes longer than what it spares."""
_FEW_RIVALS = 6
"""Rivals up to which it takes longer to put the ones without votes aside."""


def _outdo_votes(chance: np.ndarray, own: np.ndarray, votes: np.ndarray, scale: float, noise: np.ndarray) -> None:
    """Multiplies float64[n, z] by the chance that noise on each of int64[n, rivals] votes stays below that on `own`.

    Numbers of votes repeat: what depends on them is computed once for each, and once for all rivals without votes.
    """
    low, most = int(own.min()), int(votes.max()) + 1
    levels = np.arange(low, int(own.max()) + 1)
    gaps = levels[:, None] - np.arange(most)[None, :]  # [own, rival]
    if len(noise) == 1:  # the gap alone decides
        least = int(gaps.min())
        table = special.ndtr(np.arange(least, int(gaps.max()) + 1)[:, None] / scale + noise)
        places = gaps - least
    else:  # so does the noise from which on `own` has enough
        first = np.zeros(len(levels), dtype=np.int64)
        first[own - low] = np.arange(len(own))
        table = special.ndtr((gaps / scale)[:, :, None] + noise[first][:, None, :]).reshape(-1, noise.shape[1])
        places = np.arange(gaps.size).reshape(gaps.shape)
    own = own - low
    if votes.shape[1] <= _FEW_RIVALS:
        for column in votes.T:
            chance *= table[places[own, column]]
        return
    votes = -np.sort(-votes, axis=1)
    num_voted = (votes > 0).sum(axis=1)
    order = np.argsort(-num_voted, kind="stable")
    fewest = votes.shape[1] - int(num_voted.max())
    without = table[places[:, 0]]
    powers = [without**fewest]
    for _ in range(int(num_voted.max()) - int(num_voted.min())):
        powers.append(powers[-1] * without)
    product = np.array(powers)[votes.shape[1] - num_voted[order] - fewest, own[order]]
    for rival in range(int(num_voted.max())):
        some = order[: int((num_voted > rival).sum())]
        product[: len(some)] *= table[places[own[some], votes[some, rival]]]
    chance[order] *= product


def _gumbel_wins(own: np.ndarray, rivals: list[_Column], scale: float) -> np.ndarray:
    """Returns float64[n]: the same for Gumbel noise, a softmax."""
    odds = np.ones_like(own)
    for values, count in rivals:
        odds += count * np.exp(np.minimum(-((own - values) / scale), 700.0))  # beyond: 0 to the last digit
    return np.asarray(1.0 / odds)


def _exponential_wins(own: np.ndarray, rivals: list[_Column], scale: float) -> np.ndarray:
    """Returns float64[n]: the same for exponential noise, exact with up to 127 rivals.

    In `v = e^-noise`, which is uniform, the integrand is a polynomial whose degree is the number of rivals, and 0 if a
    gap is larger than the noise.
    """
    nodes, weights = _nodes()
    gaps = [((own - values) / scale, count) for values, count in rivals]
    least = np.max([np.zeros(own.size), *(-gap for gap, _ in gaps)], axis=0)  # of the noise
    chance = np.ones((own.size, nodes.size))
    for gap, count in gaps:
        chance *= _to_the(1.0 - np.exp(-gap - least)[:, None] * nodes, count)
    return np.asarray(np.exp(-least) * (chance @ weights))


@functools.cache
def _nodes() -> np.ndarray:
    """Returns float64[2, n]: nodes and weights of Gauss-Legendre quadrature on [0, 1]."""
    return np.asarray((np.polynomial.legendre.leggauss(_NUM_NODES) + np.array([[1.0], [0.0]])) / 2.0)


def _to_the(base: np.ndarray, count: int) -> np.ndarray:
    return base if count == 1 else np.asarray(base**count)


class _Law(NamedTuple):
    """What plans compute of noise: at scale 1 its deviation and the chance of the first of some sums, and `_wins`."""

    deviation: float
    first: Callable[[Floats], float]
    wins: Callable[..., Floats]


_LAWS = {
    "gumbel": _Law(float(np.pi / np.sqrt(6)), _softmax_chance, _gumbel_wins),
    "gaussian": _Law(1.0, _chance_of_first, _normal_wins),
    "permute_and_flip": _Law(1.0, _exponential_chance, _exponential_wins),
    ConfidentGNMaxMechanism.name: _Law(1.0, _chance_of_first, _normal_wins),
}


def entry_of(table: Mapping[str, EntryT], mechanism: str, name: str) -> EntryT:
    """Returns what a table says of a mechanism; one that it does not name is refused."""
    if mechanism not in table:
        raise fail("mechanism", f"one of {', '.join(table)}", mechanism, f"Add it to {name}.")
    return table[mechanism]


def _law(plan: ReleasePlan) -> _Law:
    return entry_of(_LAWS, plan.mechanism.name, "planning/expected_utility._LAWS")


def noise_deviation(plan: ReleasePlan) -> float:
    """Returns the standard deviation of the noise on one coordinate of the sum."""
    return noise_scale(plan) * _law(plan).deviation


def agreement_of(shots: float, *, one_shot: float) -> float:
    """Returns the guessed share of rows that want the same token: `one_shot` plus .05 per doubling, at most .99."""
    check_real("agreement", one_shot, low=0.0, high=1.0)
    return float(min(0.99, one_shot + _AGREEMENT_PER_DOUBLING * np.log2(max(shots, 1.0))))


_AGREEMENT_PER_DOUBLING = 0.05

DEFAULT_NUM_SLOTS = 40
DEFAULT_OVERFILL = 1.5
_MANY_SHOTS = 3
"""Shots from which on slots are not overfilled: a missing record costs less there than the noise of a larger sample."""
SAMPLINGS = ("poisson", "fixed", "partition", "disjoint")


@dataclass(frozen=True, slots=True)
class RowDesign:
    """The shape of rows before noise is chosen.

    Attributes:
      rows: "units" or "slots".
      num_slots: slots, or expected unit rows.
      shots_per_slot: records per slot (1 for unit rows).
      sampling: "poisson", "fixed" (a secret sample of fixed size), "partition" (every unit stays in one slot) or
        "disjoint" (one secret allocation per run: a unit is in the batch of at most one demonstration).
      overfill: expected units per shot of a slot.
    """

    rows: RowShape
    num_slots: int
    shots_per_slot: int
    sampling: str
    overfill: float

    @classmethod
    def choose(
        cls,
        *,
        rows: str | None = None,
        num_slots: int | None = None,
        shots_per_slot: int | None = None,
        sampling: str = "poisson",
        overfill: float | None = None,
        smallest_size: int | None = None,
    ) -> RowDesign:
        """Fills in defaults: unit rows unless several shots per slot, or another sampling than Poisson, are requested.

        Without `num_slots` there are 40 rows, or `smallest_size` (the least declared size) if that is fewer.
        """
        check_choice("sampling", sampling, SAMPLINGS)
        shots = check_int("shots_per_slot", 1 if shots_per_slot is None else shots_per_slot, low=1)
        shape = rows if rows is not None else ("slots" if shots > 1 or sampling != "poisson" else "units")
        check_choice("rows", shape, ROW_SHAPES)
        if shape == "units" and (shots > 1 or sampling != "poisson"):
            raise fail("rows", "'slots' with several shots per slot or sampling other than 'poisson'", shape)
        most = DEFAULT_NUM_SLOTS if smallest_size is None else min(DEFAULT_NUM_SLOTS, smallest_size)
        slots = check_int("num_slots", most if num_slots is None else num_slots, low=1)
        is_random = shape == "slots" and sampling in {"poisson", "disjoint"}
        fill = (DEFAULT_OVERFILL if is_random and shots < _MANY_SHOTS else 1.0) if overfill is None else overfill
        return cls(shape, slots, shots, sampling, check_positive("overfill", fill))  # type: ignore[arg-type]

    def takes_wordings(self, wordings: int) -> bool:
        """Returns whether each of so many public wordings has a slot; one wording takes any rows."""
        return wordings <= 1 or (self.rows == "slots" and self.num_slots >= wordings)

    def check_wordings(self, wordings: int) -> RowDesign:
        """Returns the shape, or refuses it if several wordings do not go with it; see `SlotRenderers`."""
        if not self.takes_wordings(wordings):
            expected = f"a slot for each of {wordings} wordings (the place of a unit row depends on other units)"
            advice = "Give rows=Rows(slots=...), or fewer wordings."
            raise fail("FewShotTask.wordings", expected, f"{self.num_slots} {self.rows}", advice)
        return self

    @classmethod
    def of(cls, rows: Rows | None, *, smallest_size: int | None = None) -> RowDesign | None:
        """Returns the shape that `rows=` asks for; None, where it asks for none, lets the planner choose."""
        rows = option_of("rows", rows, Rows)
        if rows.replace(redraw_every=None) == Rows():
            return None
        return cls.choose(
            rows=None if rows.units is None and rows.slots is None else "units" if rows.slots is None else "slots",
            num_slots=rows.slots if rows.units is None else rows.units,
            shots_per_slot=rows.shots,
            sampling=rows.sampling,
            overfill=rows.fill,
            smallest_size=smallest_size,
        )

    @classmethod
    def shown(cls, plan: Mapping[str, Any]) -> RowDesign:
        """Returns the shape that a plan shows."""
        return cls.choose(**{part.name: plan[part.name] for part in dataclasses.fields(cls)})

    def option(self) -> dict[str, Any]:
        """Returns the fields of the `Rows` that asks for this shape; what is usual is left out."""
        if self.rows == "units":
            return {"units": self.num_slots}
        asked: dict[str, Any] = {"slots": self.num_slots, "shots": self.shots_per_slot}
        if self.sampling != "poisson":
            asked["sampling"] = self.sampling
        if self.overfill != RowDesign.choose(shots_per_slot=self.shots_per_slot, rows="slots").overfill:
            asked |= {"fill": self.overfill} if self.sampling in {"poisson", "disjoint"} else {}
        return asked

    def sampler(self, public_size: int, *, num_batches: int = 1) -> Sampler:
        """Returns the sampler for a pool of `public_size` declared units."""
        if public_size < self.num_slots:
            expected = f"at least {self.num_slots} units, one for each row, for every label"
            raise fail("public_size", expected, public_size, f"Set fewer rows: rows.{self.rows}.")
        if self.sampling == "fixed":
            return BalancedSlots(num_slots=self.num_slots, shots_per_slot=self.shots_per_slot, public_size=public_size)
        if self.sampling == "partition":
            return PartitionedSlots(self.num_slots, self.shots_per_slot, public_size)
        wanted = self.num_slots * self.shots_per_slot * self.overfill
        if self.sampling == "disjoint":
            rate = min(1.0, num_batches * wanted / public_size)
            return AllocatedSlots(rate, num_batches, self.num_slots, self.shots_per_slot)
        rate = min(1.0, wanted / public_size)
        if self.rows == "units":
            return PoissonUnits(sampling_rate=rate)
        return PoissonSlots(sampling_rate=rate, num_slots=self.num_slots, shots_per_slot=self.shots_per_slot)


def with_redraw(design: RowDesign) -> RowDesign:
    """Returns the design if its samples are redrawn; a partition or an allocation is not."""
    if design.sampling in {"partition", "disjoint"}:
        advice = "'partition' is for labels of PromptPATE, 'disjoint' for demonstrations."
        raise fail("sampling", "'poisson' or 'fixed'", design.sampling, advice)
    return design


class Ranked(Protocol):
    """A planned design that is compared with others."""

    @property
    def rank(self) -> Any:
        """Sort key, best first."""


OptionT = TypeVar("OptionT", bound=Ranked)
KeyT = TypeVar("KeyT", bound=Hashable)


def search_designs(
    option: Callable[[KeyT], OptionT | None], *stages: Callable[[Sequence[OptionT]], Iterable[KeyT]]
) -> list[OptionT]:
    """Returns the options of all stages, best first (by `rank`).

    Args:
      option: plans a design; None: the declared sizes do not allow it.
      stages: each returns which designs to plan next, given the options so far, best first. A design is planned once.
    """
    found: dict[KeyT, OptionT] = {}
    for stage in stages:
        for key in stage(_best_first(found.values())):
            if key not in found and (made := option(key)) is not None:
                found[key] = made
    return _best_first(found.values())


def _best_first(options: Iterable[OptionT]) -> list[OptionT]:
    return sorted(options, key=lambda one: one.rank)


def shapes_like(start: RowDesign, all_shots: Iterable[int]) -> Iterator[RowDesign]:
    """Yields shapes with as many records as `start`: unit rows, then slots of the numbers of shots that divide them."""
    records = start.num_slots * start.shots_per_slot
    yield RowDesign.choose(rows="units", num_slots=records)
    for shots in all_shots:
        slots, rest = divmod(records, shots)
        if rest == 0 and slots >= 2:
            yield RowDesign.choose(rows="slots", num_slots=slots, shots_per_slot=shots)
