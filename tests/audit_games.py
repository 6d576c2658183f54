"""Distinguishing games against `DPVotingRunnable.invoke`: what two neighbouring data sets let an adversary tell apart.

An adversary knows everything but one unit: it chose the records, the engine and the query, and sees the answers. From
the answers alone this module bounds, from below and with stated confidence, what one answer gives away, in the unit of
the event that a ticket is charged for, and compares the two. Knows no noise and no internals of the package.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any
from unittest import mock

import numpy as np
from scipy import special, stats

from langchain_dpicl import Budget, PrivateExamples
from langchain_dpicl.privacy import accounting
from langchain_dpicl.privacy.events import BoundedRangeEvent, Event, GaussianEvent, PureEvent, SubsampledEvent
from langchain_dpicl.voting import DPVotingRunnable

ALARM = 1e-6
"""Most false alarms of one verdict on a sound package."""

QUERY = "which one?"
_MARK, _SEPARATOR = "votes ", "\n\n"
PRICED = cache(accounting.epsilon_bound)
"""The accountants, asked once for each price."""
# Room for every query of the longest game; the price of the share is of no interest here.
_MOST_QUERIES, _EPSILON = 4_000, 1e9


class ReadVotes:
    """The worst engine for privacy: a prompt's first record says what its row votes, exactly.

    A record's text lists the probability of each label, as "1,0"; all zeros: the row fails. A prompt without records
    votes for the last label.

    Attributes:
      prompts: the records of each private row asked so far, if `spies`.
    """

    name = "reads votes"

    def __init__(self, *, spies: bool = False) -> None:
        self.prompts: list[list[str]] = []
        self._spies = spies

    def score_choices(self, prompts: Any, choices: Any) -> np.ndarray:
        if self._spies:
            self.prompts.append([_first(prompt) for prompt in prompts])
        rows = [_log_votes(_first(prompt), len(choices)) for prompt in prompts]
        return np.array(rows, dtype=np.float64).reshape(len(prompts), len(choices))

    async def ascore_choices(self, prompts: Any, choices: Any) -> np.ndarray:
        return self.score_choices(prompts, choices)


def _first(prompt: str) -> str:
    return prompt[len(_MARK) : prompt.index(_SEPARATOR)] if prompt.startswith(_MARK) else ""


@lru_cache(maxsize=64)
def _log_votes(record: str, width: int) -> tuple[float, ...]:
    shares = [float(share) for share in record.split(",")] if record else [0.0] * (width - 1) + [1.0]
    return tuple(math.log(share) if share > 0 else -math.inf for share in shares)


def voter_of(units: tuple[str, ...], *, engine: Any = None, **options: Any) -> DPVotingRunnable:
    """Builds the audited component over units that vote as their texts say; every query is charged.

    Args:
      units: text of each unit; see `ReadVotes`.
      engine: takes the place of a fresh `ReadVotes`.
      **options: of `from_private_examples`, and `public_size` and `adjacency`.
    """
    given = {"labels": ("yes", "no"), "rows": "slots", "overfill": 1.0, "noise_multiplier": 0.5, "memo_size": 0}
    given = {**given, "num_slots": options.get("public_size", 1), "max_queries": _MOST_QUERIES, **options}
    size, adjacency = given.pop("public_size", 1), given.pop("adjacency", "add_remove")
    with mock.patch.object(accounting, "epsilon_bound", PRICED):
        return DPVotingRunnable.from_private_examples(
            PrivateExamples(units, public_size=size),
            llm=ReadVotes() if engine is None else engine,
            budget=Budget(epsilon=_EPSILON, delta=1e-6, adjacency=adjacency),
            epsilon=_EPSILON / 2,
            example_prompt=_MARK + "{text}",
            suffix="{input}",
            example_separator=_SEPARATOR,
            calibrate=False,
            **given,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Game:
    """One choice of the adversary.

    Attributes:
      units: the data set with the target.
      neighbour: the data set without it, or with another in its place.
      runs: answers to ask of each side.
      options: of `voter_of`.
      direction: with scores, the adversary projects them on it and asks whether the result exceeds `threshold`.
      threshold: see `direction`.
    """

    units: tuple[str, ...]
    neighbour: tuple[str, ...]
    runs: int
    options: Mapping[str, Any] = field(default_factory=dict)
    direction: tuple[float, ...] | None = None
    threshold: float = 0.0

    def voter(self, units: tuple[str, ...]) -> DPVotingRunnable:
        return voter_of(units, with_scores=self.direction is not None, **self.options)

    def outcomes(self) -> tuple[str, ...]:
        """Every outcome there can be; of two, one says all."""
        labels = tuple(self.options.get("labels", ("yes", "no")))
        known = ("above", "below") if self.direction is not None else labels
        known += ("abstain",) if self.direction is None and "abstain_below" in self.options else ()
        return known[:1] if len(known) == 2 else known

    def outcome(self, answer: Any) -> str:
        """What the adversary makes of an answer."""
        if self.direction is None:
            return str(answer)
        votes = float(np.dot(self.direction, list(answer.scores.values())))
        return "above" if votes > self.threshold else "below"


def refutations(game: Game, *, looks: int = 1) -> list[str]:
    """Plays a game; returns what refutes the charge, or nothing. False alarm on a sound package: `ALARM`, at one look.

    Args:
      game: what to play.
      looks: how often to look at the counts on the way, and to stop at the first refutation: for planted bugs only,
        since every look may alarm.
    """
    sides = game.voter(game.units), game.voter(game.neighbour)
    event = sides[0].plan.release.block_event(1)
    counts: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
    found: list[str] = []
    for runs in _pieces(game.runs, looks):
        for voter, count in zip(sides, counts, strict=True):
            count.update(game.outcome(voter.invoke(QUERY)) for _ in range(runs))
            if voter.share.remaining("query") != _MOST_QUERIES - count.total():
                found.append("tickets: the ledger holds another number of them than there were answers")
        found += _refuted(event, counts, game.outcomes())
        if found:
            break
    return found


def _pieces(runs: int, looks: int) -> list[int]:
    ends = [round(runs * 2.0 ** ((1 + i - looks) / 4)) for i in range(looks)]
    return [end - start for start, end in itertools.pairwise([0, *ends])]


def _refuted(event: Event, counts: tuple[Counter[str], Counter[str]], outcomes: tuple[str, ...]) -> Iterator[str]:
    # Two bounds for each outcome and for its complement.
    alarm = ALARM / (4 * len(outcomes))
    runs = counts[0].total(), counts[1].total()
    for outcome in outcomes:
        for name, hits in ((outcome, [c[outcome] for c in counts]), (f"not {outcome}", None)):
            seen = hits or [total - c[outcome] for total, c in zip(runs, counts, strict=True)]
            least, most = lowest(seen[0], runs[0], alarm), highest(seen[1], runs[1], alarm)
            if (lost := loss(event, least, most)) > (limit := claimed(event)):
                yield f"{name}: above {least:.3g} with the target, below {most:.3g} without: {lost:.3g} > {limit:.3g}"


def lowest(hits: int, runs: int, alarm: float) -> float:
    """Returns the Clopper-Pearson lower bound: above the true chance with probability at most `alarm`."""
    return float(stats.beta.ppf(alarm, hits, runs - hits + 1)) if hits else 0.0


def highest(hits: int, runs: int, alarm: float) -> float:
    """Returns the Clopper-Pearson upper bound: below the true chance with probability at most `alarm`."""
    return float(stats.beta.isf(alarm, hits + 1, runs - hits)) if hits < runs else 1.0


def claimed(event: Event) -> float:
    """Returns what an event allows, in the unit of `loss`: mu, range or epsilon of one release on a known sample."""
    match event:
        case GaussianEvent(noise_multiplier=noise):
            return 1.0 / noise
        case BoundedRangeEvent(bound=bound):
            return bound
        case PureEvent(epsilon=epsilon):
            return epsilon
        case SubsampledEvent(event=inner):
            return claimed(inner)
    raise AssertionError(f"no game knows {event}")


def loss(event: Event, chance: float, chance_without: float) -> float:
    """Returns the least parameter of an event of this kind under which an outcome can have these two chances.

    Gaussian: mu, from the trade-off of two normals. Bounded range: the two odds differ by a factor of at most e^range.
    Pure: neither the chances nor those of the complement differ by more than a factor of e^epsilon. On a sample that
    holds the target with probability q: the chance given that it does is at least (chance - (1 - q) without) / q.
    """
    if isinstance(event, SubsampledEvent):
        rate = event.sampling_rate
        given = (chance - (1.0 - rate) * chance_without) / rate
        return math.inf if given >= 1.0 else loss(event.event, max(given, 0.0), chance_without)
    if chance <= 0.0 or chance_without >= 1.0:
        return -math.inf
    match event:
        case GaussianEvent():
            return float(special.ndtri(chance) - special.ndtri(chance_without))
        case BoundedRangeEvent():
            return float(special.logit(chance) - special.logit(chance_without))
    return max(math.log(chance / chance_without), math.log((1.0 - chance_without) / (1.0 - chance)))


# --- released scores -------------------------------------------------------------------------------------------------


def faults(answers: Sequence[Any], votes: Sequence[float], scale: float) -> set[str]:
    """Returns what is wrong with scores that were released again and again for one query; false alarm `ALARM` in all.

    "scale": a label's variance, or that of all, is not the claimed one (chi-square, exact). "law": the noise is not
    normal (Kolmogorov-Smirnov). "links": labels, or one query and the next, correlate (t test, exact). "repeats": a
    noise vector came twice; by chance below 1e-12 for four labels, 2^16 steps to a scale and 4,000 answers. "grid":
    scores off the public grid. "label": the label is not made of the scores.

    Args:
      answers: results with scores.
      votes: the true votes.
      scale: standard deviation that is claimed for every label.
    """
    values = np.array([list(answer.scores.values()) for answer in answers])  # [runs, labels]
    noise = values - np.array(votes)
    step = 2.0 ** (math.floor(math.log2(scale)) - 16)
    best = [max(answer.scores, key=answer.scores.get) for answer in answers]
    found = {name for name, pvalues in _pvalues(noise / scale).items() if min(pvalues) < ALARM / (3 * len(pvalues))}
    found |= {"repeats"} if len({row.tobytes() for row in noise}) < len(noise) else set()
    found |= {"grid"} if (values % step).any() else set()
    return found | ({"label"} if [answer.label for answer in answers] != best else set())


def _pvalues(noise: np.ndarray) -> dict[str, list[float]]:
    even, odd = noise[: len(noise) // 2 * 2 : 2], noise[1::2]  # disjoint pairs of queries: independent samples
    pairs = [(noise[:, i], noise[:, j]) for i, j in itertools.combinations(range(noise.shape[1]), 2)]
    pairs += [(even[:, i], odd[:, j]) for i, j in itertools.product(range(noise.shape[1]), repeat=2)]
    constant = [pair for pair in pairs if not (np.ptp(pair[0]) and np.ptp(pair[1]))]
    return {
        "scale": [_variance(column) for column in (*noise.T, noise.ravel())],
        "law": [stats.kstest(noise.ravel(), "norm").pvalue],
        "links": [0.0] if constant else [stats.pearsonr(*pair).pvalue for pair in pairs],
    }


def _variance(noise: np.ndarray) -> float:
    total = float(np.square(noise).sum())
    return 2 * min(stats.chi2.cdf(total, noise.size), stats.chi2.sf(total, noise.size))


def is_fair_and_fresh(coins: Sequence[bool]) -> bool:
    """True if coins may be fair and independent: heads, and changes from one to the next, are binomial; `ALARM`."""
    changes = sum(one != next_one for one, next_one in itertools.pairwise(coins))
    tests = stats.binomtest(sum(coins), len(coins), 0.5), stats.binomtest(changes, len(coins) - 1, 0.5)
    return min(test.pvalue for test in tests) > ALARM / 2
