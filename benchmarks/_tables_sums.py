"""What finished cells say together: means, spreads, and how much of a gap is closed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from _tables_cells import NON_PRIVATE, ZERO, Done
from _voting_rows import SIGNIFICANT

NO_GAP, NO_SIGNAL = "no gap", "†"


@dataclass(frozen=True)
class Column:
    """The cells of one column: one number per seed.

    Attributes:
      by_seed: accuracies.
    """

    by_seed: Mapping[int, float]

    @property
    def mean(self) -> float:
        """The mean over seeds."""
        return statistics.fmean(self.by_seed.values())

    @property
    def spread(self) -> float | None:
        """The standard deviation over seeds (n - 1); None for a single seed."""
        return statistics.stdev(self.by_seed.values()) if len(self.by_seed) > 1 else None

    @property
    def shown(self) -> str:
        """Mean and standard deviation in percent."""
        spread = self.spread
        return f"{100 * self.mean:.1f}" + ("" if spread is None else f" ± {100 * spread:.1f}")


def columns(done: Iterable[Done], *, number: str = "accuracy") -> dict[str, Column]:
    """Returns the columns of cells of one method, data set and variant."""
    found: dict[str, dict[int, float]] = {}
    for one in done:
        if number in one.result:
            found.setdefault(one.cell.at, {})[one.cell.seed] = one.result[number]
    return {at: Column(dict(sorted(by_seed.items()))) for at, by_seed in found.items()}


def share_closed(zero: float, private: float, without: float) -> float | None:
    """Returns (private - zero-shot) / (non-private - zero-shot); None where there is no gap to close.

    >>> share_closed(0.2, 0.35, 0.5), share_closed(0.5, 0.6, 0.5)
    (0.5, None)
    """
    gap = without - zero
    return (private - zero) / gap if gap > 0 else None


def closed(found: Mapping[str, Column], at: str, *, questions: int, most: int) -> float | None:
    """Returns the share of the gap that a column closes, over the seeds that all three columns have.

    None where non-private is not better than zero-shot by two standard errors: the larger one of what so many questions
    tell apart, and of the differences seed by seed.

    Args:
      found: columns of a method on a data set.
      at: the private column.
      questions: of one seed.
      most: distinct questions that there are.
    """
    if not {ZERO, NON_PRIVATE, at} <= set(found):
        return None
    shared = sorted(set.intersection(*(set(found[name].by_seed) for name in (ZERO, NON_PRIVATE, at))))
    if not shared:
        return None
    zero, without, private = ([found[name].by_seed[seed] for seed in shared] for name in (ZERO, NON_PRIVATE, at))
    if not is_gap(zero, without, questions=min(most, questions * len(shared))):
        return None
    return share_closed(statistics.fmean(zero), statistics.fmean(private), statistics.fmean(without))


def is_gap(zero: Sequence[float], without: Sequence[float], *, questions: int) -> bool:
    """Whether accuracies, seed by seed, differ by more than two standard errors; `questions` are those of all seeds."""
    means = statistics.fmean(zero), statistics.fmean(without)
    by_questions = math.sqrt(sum(share * (1 - share) for share in means) / questions)
    differences = [high - low for low, high in zip(zero, without, strict=True)]
    by_seeds = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else 0.0
    return statistics.fmean(differences) > SIGNIFICANT * max(by_questions, by_seeds)


def closed_shown(found: Mapping[str, Column], at: str, *, commonest: float, **asked: int) -> str:
    """Returns the share in percent, why there is none, or "" where a cell is missing.

    A dagger marks a share of a gap up to something that is no better than always saying the commonest answer.

    Args:
      found: columns of a method on a data set.
      at: the private column.
      commonest: share of the commonest answer.
      asked: as for `closed`.
    """
    if not {ZERO, NON_PRIVATE, at} <= set(found):
        return ""
    share = closed(found, at, **asked)
    if share is None:
        return NO_GAP
    without = list(found[NON_PRIVATE].by_seed.values())
    questions = min(asked["most"], asked["questions"] * len(without))
    has_signal = is_gap([commonest] * len(without), without, questions=questions)
    return f"{100 * share:.0f}" + ("" if has_signal else f" {NO_SIGNAL}")
