"""What rows of one shape are worth: three numbers, how they are estimated, and the votes that they lead to."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
from numpy.random import PCG64, Generator
from numpy.typing import NDArray
from scipy import special

from langchain_dpicl.privacy._validate import check_int, check_real, fail

if TYPE_CHECKING:
    from typing import Self

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_NODES = 128
"""Quantiles of the law of a question's share of right rows."""
_LEAST_DRAWS, _MOST_DRAWS, _NUMBERS = 4, 32, 40_000
_SEED = 20_230_926
"""Of the questions that a plan is computed on: public numbers, which protect nobody."""
_ALIKE = 0.98
"""Largest correlation; at 1 the Beta law has no density."""

EXPECTED_CORRELATION = 0.55
"""Rows of real models on three labels and more: recorded votes .57 and .64, fitted to published curves .41 and .56."""
EXPECTED_CORRELATION_OF_TWO = 0.75
"""On two labels published curves hardly say it: fits lie between .76 and .98."""


def expected_correlation(labels: int) -> float:
    """Returns the correlation of rows where nothing was measured."""
    return EXPECTED_CORRELATION if labels > 2 else EXPECTED_CORRELATION_OF_TWO


def expected_rival(labels: int) -> float:
    """Returns the chance that two wrong rows name the same label where nothing was measured."""
    return 1.0 if labels <= 2 else 0.55 + 0.45 / (labels - 1)


@dataclass(frozen=True, slots=True)
class RowFacts:
    """What rows of one shape are worth, on one task and model.

    A question has a chance `p` that a row is right, drawn from a Beta law with mean `right` and intraclass correlation
    `correlation`. Of its other rows a share `silent` names no label, each by itself; the votes of the rest are spread
    over the wrong labels by one symmetric Dirichlet draw per question, such that two of them name the same label with
    chance `rival`.

    Attributes:
      right: share of rows that vote for the right label, in [0, 1].
      correlation: of "the row is right" between two rows of a question, in [0, 1).
      rival: chance that two wrong rows of a question name the same label, from 1 / (labels - 1) to 1.
      labels: labels that an answer can have.
      silent: share of the rows that are not right which name no label: failed calls, and answers in text that are no
        label.

    Raises:
      ConfigurationError: a number is out of its range.

    >>> round(RowFacts(right=0.6, correlation=0.55, rival=0.7, labels=4).ceiling(), 2)
    0.65
    """

    right: float
    correlation: float
    rival: float
    labels: int
    silent: float = 0.0

    def __post_init__(self) -> None:
        check_int("labels", self.labels, low=2)
        check_real("right", self.right, low=0.0, high=1.0)
        check_real("correlation", self.correlation, low=0.0, high=1.0)
        check_real("rival", self.rival, low=0.0, high=1.0)
        check_real("silent", self.silent, low=0.0, high=1.0)

    @classmethod
    def mean(cls, facts: Sequence[Self], weights: Sequence[float]) -> Self:
        """Returns the weighted mean of facts of the same labels, number by number.

        Args:
          facts: at least one.
          weights: of each.
        """
        numbers = zip(*((one.right, one.correlation, one.rival, one.silent) for one in facts), strict=True)
        total = sum(weights)
        means = (sum(map(operator.mul, own, weights)) / total for own in numbers)
        # A mean of ones may be rounded above 1.
        right, correlation, rival, silent = (min(max(float(mean), 0.0), 1.0) for mean in means)
        return cls(right, correlation, rival, facts[0].labels, silent)

    @property
    def rests_on(self) -> str:
        """What a chance rests on, in words."""
        return "numbers that were given"

    def facts(self, *, labels: int, shots: float, calibrated: bool = False) -> Self:  # noqa: ARG002  the same for all
        """Returns the same numbers for rows of any size, so that facts are a source too.

        Args:
          labels: must be theirs.
          shots: records of a row.
          calibrated: whether rows are divided by those on content-free inputs.

        Raises:
          ConfigurationError: they are of another number of labels.
        """
        if labels != self.labels:
            raise fail("labels", f"{self.labels}, as of the facts", labels)
        return self

    def interval(self, chance: Callable[[Self], float], **_: Any) -> tuple[float, float]:
        """Returns the chance itself, twice: nothing is unknown.

        Args:
          chance: of rows with these numbers.
        """
        return (chance(self),) * 2

    def shares(self, *, draws: int | None = None) -> Floats:
        """Returns float64[questions, labels]: the chances of a row's vote on each of many questions, right first.

        Args:
          draws: as of `votes`.
        """
        right = np.repeat(_right_quantiles(self.right, self.correlation), draws or _draws(self.labels))
        wrong = (1.0 - right) * (1.0 - self.silent)
        return np.concatenate([right[:, None], wrong[:, None] * _spread(self.rival, self.labels, right.size)], axis=1)

    def ceiling(self, *, draws: int | None = None) -> float:
        """Returns the chance of the right label with any number of such rows and no noise: the most there is.

        Args:
          draws: as of `votes`.
        """
        shares = self.shares(draws=draws)
        return float(_wins_fairly(shares).mean())

    def votes(self, trials: int, used: float, *, draws: int | None = None) -> Floats:
        """Returns float64[questions, labels]: the votes on each of many questions, right label first.

        The number of right votes is stratified over its quantiles; how many other rows vote, and for which labels, is
        drawn with a constant public seed. Against the summed law (960 settings) the mean chance of the right label is
        off by .1 points, and .6 at most, where all rows vote; where some may not, by .2 points, and 1.3 at most.

        Args:
          trials: rows, or units that may be drawn as a row.
          used: chance that one of them votes.
          draws: draws at each of 128 nodes; None: as many as the time of one plan allows.
        """
        draws = draws or _draws(self.labels)
        chances = used * _right_quantiles(self.right, self.correlation)
        # Each node's quantiles are shifted against those of the others, by van der Corput's sequence.
        shift = _van_der_corput(_NODES)[:, None]
        quantiles = (np.arange(draws)[None, :] + shift) / draws
        right = _binomial_quantiles(trials, chances, quantiles).ravel()
        chance = np.repeat(chances, draws)
        other = np.where(chance < 1.0, (used - chance) / np.maximum(1.0 - chance, 1e-300), 0.0).clip(0.0, 1.0)
        rng = Generator(PCG64(_SEED + 1))
        wrong = rng.binomial((trials - right).astype(np.int64), other * (1.0 - self.silent))
        spread = _spread(self.rival, self.labels, right.size)
        return np.concatenate([right[:, None], rng.multinomial(wrong, spread).astype(np.float64)], axis=1)


@functools.lru_cache(maxsize=64)  # a choice among designs asks for the same rows at many sizes of a vote
def _right_quantiles(right: float, correlation: float) -> Floats:
    """Returns float64[128], read-only: midpoint quantiles of a question's share of right rows."""
    if correlation < 1e-3 or right in {0.0, 1.0}:
        return _kept(np.full(_NODES, right))
    alike = min(correlation, _ALIKE)
    strength = (1.0 - alike) / alike
    middle = (np.arange(_NODES) + 0.5) / _NODES
    quantiles = special.betaincinv(right * strength, (1.0 - right) * strength, middle)
    return _kept(np.nan_to_num(quantiles).clip(0.0, 1.0))


@functools.lru_cache(maxsize=16)
def _spread(rival: float, labels: int, num: int) -> Floats:
    """Returns float64[num, labels - 1], read-only: how each question's wrong votes are spread over the wrong labels."""
    others = labels - 1
    if others == 1:
        return _kept(np.ones((num, 1)))
    rng = Generator(PCG64(_SEED))
    even = 1.0 / others
    likely = min(max(rival, even), 1.0)
    if likely <= even + 1e-6:
        return _kept(np.full((num, others), even))
    alpha = max((1.0 - likely) / (likely - even) / others, 1e-6)
    # A gamma number of a tiny shape is below every float, so it is drawn as a logarithm:
    # G(a) has the law of G(a + 1) U^(1/a).
    logs = np.log(rng.standard_gamma(alpha + 1.0, size=(num, others))) + np.log(rng.random((num, others))) / alpha
    weights = np.exp(logs - logs.max(axis=1, keepdims=True))
    return _kept(weights / weights.sum(axis=1, keepdims=True))


def _kept(numbers: Any) -> Floats:
    """Returns an array that a cache can hand out: it cannot be changed."""
    array = np.asarray(numbers, dtype=np.float64)
    array.flags.writeable = False
    return array


ShotLaw: TypeAlias = Sequence[tuple[int, float]]
"""How many records a row in use shows, with the chance of each number."""


class RowSource(Protocol):
    """Where the numbers of rows come from: a guess, or what was measured on public examples."""

    @property
    def rests_on(self) -> str:
        """What a chance rests on, in words."""

    def facts(self, *, labels: int, shots: float, calibrated: bool) -> RowFacts:
        """Returns the numbers of rows of so many records.

        Args:
          labels: labels that an answer can have.
          shots: records of a row.
          calibrated: whether rows are divided by those on content-free inputs.
        """

    def interval(
        self, chance: Callable[[RowFacts], float], *, labels: int, law: ShotLaw, calibrated: bool
    ) -> tuple[float, float]:
        """Returns the range in which a chance is likely to be, from what is not known about the rows.

        Args:
          chance: of rows with the given numbers.
          labels: labels that an answer can have.
          law: how many records a row shows.
          calibrated: as of `facts`.
        """


def mean_facts(source: RowSource, *, labels: int, law: ShotLaw, calibrated: bool) -> RowFacts:
    """Returns the numbers of rows, averaged over how many records they show."""
    facts = [source.facts(labels=labels, shots=float(shots), calibrated=calibrated) for shots, _ in law]
    return RowFacts.mean(facts, [chance for _, chance in law])


@dataclass(frozen=True, slots=True)
class RowGuess:
    """What rows are taken to be worth where nothing was measured.

    A row of k records is right with chance `1/L + (1 - 1/L) min(.95, skill + growth log2 k)` on L labels. The usual
    numbers are the median of 20 base models on four tasks (skill of four records: .23 on TREC, .34 on DBPedia, .49 on
    AGNews, .63 on SST-2), and the correlation of recorded votes.

    Attributes:
      skill: share of the way from chance to certainty of a one-shot row, in [0, 1].
      growth: what doubling the records adds to it.
      correlation: intraclass correlation of "the row is right"; None: .55, or .75 on two labels.

    Raises:
      ConfigurationError: a number is out of its range.
    """

    skill: float = 0.35
    growth: float = 0.05
    correlation: float | None = None

    def __post_init__(self) -> None:
        check_real("skill", self.skill, low=0.0, high=1.0)
        check_real("growth", self.growth, low=0.0, high=1.0)
        if self.correlation is not None:
            check_real("correlation", self.correlation, low=0.0, high=1.0)

    @property
    def rests_on(self) -> str:
        """What a chance rests on, in words."""
        return "a guess"

    def facts(self, *, labels: int, shots: float, calibrated: bool = False) -> RowFacts:  # noqa: ARG002  not measured
        """Returns the numbers of rows of so many records.

        Args:
          labels: labels that an answer can have.
          shots: records of a row.
          calibrated: not distinguished.
        """
        correlation = expected_correlation(labels) if self.correlation is None else self.correlation
        return self._facts(labels, shots, skill=self.skill, correlation=correlation)

    def interval(
        self,
        chance: Callable[[RowFacts], float],
        *,
        labels: int,
        law: ShotLaw,
        calibrated: bool = False,  # noqa: ARG002  not measured
    ) -> tuple[float, float]:
        """Returns the chances of poor rows that are alike, and of good rows that are less so.

        Args:
          chance: of rows with the given numbers.
          labels: labels that an answer can have.
          law: how many records a row shows, with the chance of each number.
          calibrated: not distinguished.
        """
        shots = sum(count * share for count, share in law) / sum(share for _, share in law)
        low, high = (0.55, 0.9) if labels <= 2 else (0.4, 0.7)
        ends = (
            chance(self._facts(labels, shots, skill=min(self.skill, _POOR), correlation=high)),
            chance(self._facts(labels, shots, skill=max(self.skill, _GOOD), correlation=low)),
        )
        return min(ends), max(ends)

    def _facts(self, labels: int, shots: float, *, skill: float, correlation: float) -> RowFacts:
        skilled = min(0.95, skill + self.growth * float(np.log2(max(shots, 1.0))))
        chance = 1.0 / check_int("labels", labels, low=2)
        return RowFacts(chance + (1.0 - chance) * skilled, correlation, expected_rival(labels), labels)


_POOR, _GOOD = 0.15, 0.6
"""Skill of a one-shot row on a task that is hard for the model, and on an easy one."""


def estimate_facts(
    votes: Any,
    gold: Any,
    *,
    labels: int,
    weights: Any = None,
    deals: Sequence[int] | None = None,
) -> RowFacts:
    """Estimates the numbers of rows from their votes on questions whose answers are known.

    All three are counts of rows and of pairs of rows of the same question and deal (moments), so a failed row counts as
    wrong and weights make a bootstrap.

    Args:
      votes: int[questions, rows] places of labels; -1: no vote.
      gold: int[questions] places of the right labels.
      labels: labels that an answer can have.
      weights: float64[questions]; None: each question counts once.
      deals: int[rows]: the deal that each row is of; the rows of one deal show different examples. None: one deal.
    """
    counts = VoteCounts.of(votes, gold, labels=labels, deals=deals, within=True)
    each = np.ones(len(counts.right)) if weights is None else np.asarray(weights, dtype=np.float64)
    [[right, correlation, rival, silent]] = counts.numbers(each[None]).tolist()
    return RowFacts(right, correlation, rival, labels, silent)


@dataclass(frozen=True, slots=True, eq=False)
class VoteCounts:
    """What `estimate_facts` counts of the votes on each question, from which any weights of the questions make facts.

    Attributes:
      labels: labels that an answer can have.
      rows: of a question.
      pairs: ordered pairs of rows of a question that are counted together.
      right: float64[questions]: rows that are right.
      both: pairs of which both rows are right.
      wrong: pairs of which both rows are wrong.
      alike: those of them that name the same label.
      silent: rows that name no label.
    """

    labels: int
    rows: int
    pairs: float
    right: Floats
    both: Floats
    wrong: Floats
    alike: Floats
    silent: Floats

    @classmethod
    def of(cls, votes: Any, gold: Any, *, labels: int, deals: Sequence[int] | None, within: bool) -> Self:
        """Counts the votes and, `within` deals, pairs of rows that share no example, or else pairs of different deals.

        Other arguments are as of `estimate_facts`.
        """
        cast, place = np.asarray(votes), np.asarray(gold)
        tallies = _tallies(cast, deals, labels)  # [deals, questions, labels]
        right = np.take_along_axis(tallies, place[None, :, None], axis=2)[:, :, 0]
        wrong = tallies.copy()
        np.put_along_axis(wrong, place[None, :, None], 0, axis=2)
        sizes = _tallies(np.zeros_like(cast[:1]), deals, 1)[:, 0, :]  # [deals, 1]: rows of each deal
        return cls(
            labels=labels,
            rows=cast.shape[1],
            pairs=float(_pairs(sizes[:, None, :], within)[0, 0]),
            right=right.sum(axis=0).astype(np.float64),
            both=_pairs(right[:, :, None], within)[:, 0],
            wrong=_pairs(wrong.sum(axis=2, keepdims=True), within)[:, 0],
            alike=_pairs(wrong, within).sum(axis=-1),
            silent=(cast < 0).sum(axis=1).astype(np.float64),
        )

    def numbers(self, weights: Floats, *, invented: float = 4.0) -> Floats:
        """Returns float64[n, 4]: right, correlation, rival and silent of the rows, for each weighting of the questions.

        Args:
          weights: float64[n, questions].
          invented: questions of the expected correlation and rival that are added, against the chance of few questions.
        """
        labels, rows, total = self.labels, self.rows, weights.sum(axis=1)
        counted = np.stack([self.right, self.both, self.wrong, self.alike, self.silent], axis=1)
        right, both, wrong, alike, silent = (weights @ counted).T
        mean = right / (total * rows)
        rival = (alike + 4.0 * invented * expected_rival(labels)) / np.maximum(wrong + 4.0 * invented, 1e-12)
        correlation, variance = np.full(len(weights), expected_correlation(labels)), mean * (1.0 - mean)
        different = total * total - (weights * weights).sum(axis=1)  # weight of pairs of different questions
        known = (variance > 0) & (different > 0) & (self.pairs > 0)
        if known.any():
            # The unbiased square of the mean, over pairs of different questions.
            share = weights * (self.right / rows)
            square = ((mean * total) ** 2 - (share * share).sum(axis=1))[known] / different[known]
            found = ((both / (total * self.pairs))[known] - square) / variance[known]
            weight = (invented / (invented + total))[known]
            correlation[known] = (1.0 - weight) * found.clip(0.0, _ALIKE) + weight * correlation[known]
        not_right = total * rows * (1.0 - mean)
        silent = np.divide(silent, not_right, out=np.zeros_like(silent), where=not_right > 0)
        rival = rival.clip(1.0 / max(1, labels - 1), 1.0)
        return np.stack([mean, correlation, rival, np.minimum(silent, 1.0)], axis=1)


def _tallies(votes: Ints, deals: Sequence[int] | None, labels: int) -> Ints:
    """Returns int64[deals, questions, labels]: the votes for each label in each deal."""
    dealt = np.zeros(votes.shape[1], dtype=np.int64) if deals is None else np.asarray(deals)
    names = np.arange(labels)
    return np.stack(
        [(votes[:, dealt == deal, None] == names).sum(axis=1) for deal in range(int(dealt.max(initial=0)) + 1)]
    )


def _pairs(tallies: Any, within: bool) -> Floats:
    """Returns float64[questions, columns]: ordered pairs of rows that are counted together, by column."""
    counts = np.asarray(tallies, dtype=np.float64)
    inside = (counts * (counts - 1.0)).sum(axis=0)
    if within:
        return np.asarray(inside)
    whole = counts.sum(axis=0)
    return np.asarray(whole * whole - (counts * counts).sum(axis=0))


def wins_fairly(votes: Floats) -> Floats:
    """Returns float64[questions]: the chance that the right label, column 0, has the most votes, equals sharing it."""
    return np.where(votes.max(axis=1) > 0, _wins_fairly(votes), 1.0 / votes.shape[1])


def _wins_fairly(votes: Floats) -> Floats:
    top = votes >= votes.max(axis=1, keepdims=True)
    return np.asarray(top[:, 0] / top.sum(axis=1))


def _draws(labels: int) -> int:
    """Returns how many draws stand at each node: fewer with many labels, for the time of a plan."""
    wanted = _NUMBERS / (_NODES * labels)
    return int(2 ** np.clip(np.round(np.log2(wanted)), np.log2(_LEAST_DRAWS), np.log2(_MOST_DRAWS)))


@functools.cache
def _van_der_corput(count: int) -> Floats:
    """Returns float64[count]: the first numbers of van der Corput's sequence in base 2, moved off 0."""
    bits = int(count - 1).bit_length()
    reversed_bits = [int(f"{place:0{bits}b}"[::-1], 2) for place in range(count)]
    return (np.array(reversed_bits) + 0.5) / (1 << bits)


def _binomial_quantiles(trials: int, chances: Floats, quantiles: Floats) -> Floats:
    """Returns float64[nodes, draws]: the quantiles of Binomial(trials, chances[node])."""
    deviation = np.sqrt(trials * chances * (1.0 - chances))
    low = int(max(0.0, np.floor((trials * chances - 7.0 * deviation).min()) - 1.0))
    high = int(min(float(trials), np.ceil((trials * chances + 7.0 * deviation).max()) + 1.0))
    counts = np.arange(low, high + 1)
    below = np.cumsum(binomial_masses(trials, chances, counts), axis=1)
    below[:, -1] = 1.0
    # Node by node on one ascending axis, on which each node has the interval from its number to the next.
    first = np.arange(len(below), dtype=np.float64)[:, None]
    places = np.searchsorted((first + below).ravel(), (first + quantiles).ravel()).reshape(quantiles.shape)
    return np.asarray(counts[places % len(counts)], dtype=np.float64)


def binomial_masses(trials: int, chances: Floats, counts: Ints) -> Floats:
    """Returns float64[chances, counts]: the chance of each count under Binomial(trials, chance)."""
    ways = special.gammaln(trials + 1.0) - special.gammaln(counts + 1.0) - special.gammaln(trials - counts + 1.0)
    each = np.asarray(chances)[:, None]
    with np.errstate(invalid="ignore"):  # 0 log 0 is 0
        hit, missed = counts * special.xlogy(1.0, each), (trials - counts) * special.xlog1py(1.0, -each)
    hit[:, counts == 0] = 0.0
    missed[:, counts == trials] = 0.0
    return np.asarray(np.exp(ways + hit + missed))
