"""The voting benchmark's measurements: votes once per question, noise many times, and what that says.

Sampling, rendering, adding up and noise are the package's own, as they run for `DPVotingRunnable`; only the ledger is
left out, because what is measured is never released.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from _voting_task import Task
from numpy.typing import NDArray

from langchain_dpicl._opaque import OpaqueRows
from langchain_dpicl.backends.rows.label_rows import LabelRows
from langchain_dpicl.backends.sync_async import run_sync
from langchain_dpicl.baselines import release_once_without_privacy
from langchain_dpicl.planning.expected_utility import RowDesign, noise_deviation
from langchain_dpicl.privacy.mechanisms.bounded import ProbabilitySum, VoteSum
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM
from langchain_dpicl.privacy.mechanisms.release_plan import GumbelMechanism, Release, ReleasePlan
from langchain_dpicl.runs.query_plan import QueryPlan, plan_queries

CONTENT_FREE = ("N/A",)
ALL_CONTENT_FREE = ("N/A", "", "[MASK]")
"""The three inputs of Zhao et al. (2021), which Tang et al. and Duan et al. follow."""
# Differences within so many standard errors are none.
SIGNIFICANT = 2.0

Matrices = list[NDArray[np.float64]]
"""One float64[rows, labels] of label probabilities per question."""


@dataclass(frozen=True)
class Method:
    """One row of a table: how records become rows and rows a label."""

    num_slots: int
    shots: int
    mechanism: str
    rows: str = "slots"
    votes: str = "hard"
    calibrate: bool = False
    overfill: float | None = None
    note: str = ""

    @property
    def name(self) -> str:
        """What the table shows."""
        shape = f"{self.num_slots} unit rows" if self.rows == "units" else f"{self.num_slots} x {self.shots}"
        soft = " soft" if self.votes == "soft" else ""
        return f"{shape} {self.mechanism}{soft}{' cal.' if self.calibrate else ''}{self.note}"

    def design(self) -> RowDesign:
        """Returns the shape of its rows."""
        return RowDesign.choose(
            rows=self.rows, num_slots=self.num_slots, shots_per_slot=self.shots, overfill=self.overfill
        )

    def plan(self, task: Task, *, epsilon: float, delta: float, max_queries: int, adjacency: Any) -> QueryPlan:
        """Returns its noise, calibrated for the task's declared size."""
        return plan_queries(
            len(task.records),
            epsilon=epsilon,
            delta=delta,
            max_queries=max_queries,
            width=len(task.labels),
            adjacency=adjacency,
            aggregation=ProbabilitySum() if self.votes == "soft" else VoteSum(),
            mechanism=self.mechanism,
            design=self.design(),
        )


@dataclass(frozen=True)
class Measured:
    """What was measured of one method.

    Attributes:
      noisy: by epsilon, float64[draws] accuracies.
      deviation: by epsilon, standard deviation of the noise on a label's votes.
      clean: bool[questions], right without noise.
      zero: bool[questions], right without records; calibrated where the method is.
      constant: bool[questions], where the commonest label is right.
      sampling_rate: of a record, per query.
    """

    noisy: dict[float, NDArray[np.float64]]
    deviation: dict[float, float]
    clean: NDArray[np.bool_]
    zero: NDArray[np.bool_]
    constant: NDArray[np.bool_]
    sampling_rate: float

    def closed(self, epsilon: float) -> float | None:
        """Returns the share of the gap that is closed at `epsilon`; None without a gap."""
        return gap_closed(self.zero, self.clean, float(self.noisy[epsilon].mean()))

    @property
    def beats_commonest(self) -> bool:
        """Whether the votes say more than that one label is common."""
        return is_above(self.clean, self.constant)

    def to_dict(self) -> dict[str, Any]:
        """Returns the numbers as JSON values."""
        return {
            "sampling_rate": self.sampling_rate,
            "zero_shot": float(self.zero.mean()),
            "no_noise": float(self.clean.mean()),
            "beats_commonest": self.beats_commonest,
            "by_epsilon": {
                f"{epsilon:g}": {
                    "mean": float(accuracies.mean()),
                    "sd": float(accuracies.std()),
                    "closed": self.closed(epsilon),
                    "noise_deviation": self.deviation[epsilon],
                }
                for epsilon, accuracies in self.noisy.items()
            },
        }


class Voters:
    """Label rows of one engine on one task; keeps what was scored, by shape of rows.

    Args:
      task: the data.
      engine: the model.
      progress: shows how far it is.
      content_free: inputs without content, which calibrated rows are divided by.
    """

    def __init__(
        self, task: Task, engine: Any, *, progress: Callable[..., Any], content_free: Sequence[str] = CONTENT_FREE
    ) -> None:
        self.task = task
        self._content_free = tuple((text,) for text in content_free)
        self._scorers = {
            calibrate: LabelRows(engine, [list(texts) for texts in task.texts], calibrate=calibrate)
            for calibrate in (False, True)
        }
        self._progress = progress
        self._private = task.private()
        self._kept: dict[tuple[RowDesign, bool], Matrices] = {}

    def zero_shot(self, *, calibrate: bool) -> NDArray[np.bool_]:
        """Returns bool[questions]: whether the model is right without records."""
        rows = run_sync(
            _ask(self._scorers[calibrate].request_public_rows([render(()) for render in self._renderers()]))
        )
        return np.array([int(row.argmax()) for row in rows]) == self.task.right

    def matrices(self, design: RowDesign, *, calibrate: bool) -> Matrices:
        """Returns the rows of a fresh sample per question, as the curator draws and renders them."""
        if (design, calibrate) not in self._kept:
            plan = ReleasePlan(design.sampler(len(self.task.records)), VoteSum(), GumbelMechanism(1.0), "add_remove")
            shown = f"{self.task.title}: {design.num_slots} x {design.shots_per_slot} {design.rows}"
            self._kept[design, calibrate] = [
                self._rows(plan, render, self._scorers[calibrate])
                for render in self._progress(self._renderers(), desc=shown + (" calibrated" if calibrate else ""))
            ]
        return self._kept[design, calibrate]

    def _rows(self, plan: ReleasePlan, render: Any, scorer: LabelRows) -> NDArray[np.float64]:
        kept: list[NDArray[np.float64]] = []
        width = len(self.task.labels)
        walk = release_once_without_privacy(
            self._private,
            plan=plan,
            rows=lambda prompts: Copied(scorer.ask(prompts), kept),
            render=render,
            width=width,
        )
        run_sync(walk)
        return kept[0]

    def _renderers(self) -> list[Any]:
        return [self.task.wording.renderer([(text,), *self._content_free]) for text in self.task.questions]


@dataclass(frozen=True)
class Copied:
    """Asks, and keeps a copy of the rows for several noise draws: the records are nobody's."""

    ask: Any
    kept: Matrices

    def run(self) -> OpaqueRows:
        rows = self.ask.run().take()
        self.kept.append(rows)
        return OpaqueRows(rows.copy())


def _ask(question: Any) -> Any:
    return (yield question)


def noisy_accuracies(
    plan: QueryPlan, matrices: Matrices, right: NDArray[np.int64], *, draws: int
) -> NDArray[np.float64]:
    """Returns float64[draws]: the accuracy over all questions in each noise draw."""
    width, mechanism = plan.width, plan.release.mechanism
    hits = np.empty((draws, len(matrices)), dtype=bool)
    for place, rows in enumerate(matrices):
        total = plan.release.bound(rows, width=width)
        hits[:, place] = [answer(mechanism.release(total, rng=SYSTEM_RANDOM)) == right[place] for _ in range(draws)]
    accuracies: NDArray[np.float64] = hits.mean(axis=1)
    return accuracies


def answer(released: Release) -> int:
    """Returns the place of the label that a release names."""
    return int(np.argmax(released.values)) if released.index is None else released.index


def clean_hits(plan: QueryPlan, matrices: Matrices, right: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Returns bool[questions]: whether the largest sum without noise is the right label's; the first of equals."""
    sums = [plan.release.bound(rows, width=plan.width).value for rows in matrices]
    return np.array([int(total.argmax()) for total in sums]) == right


def is_above(better: NDArray[np.bool_], worse: NDArray[np.bool_]) -> bool:
    """Whether one column of hits beats another on the same questions by more than chance would."""
    difference = better.astype(float) - worse.astype(float)
    error = difference.std(ddof=1) / math.sqrt(difference.size) if difference.size > 1 else math.inf
    return bool(difference.mean() > SIGNIFICANT * error)


def gap_closed(zero: NDArray[np.bool_], clean: NDArray[np.bool_], accuracy: float) -> float | None:
    """Returns (accuracy - zero-shot) / (no noise - zero-shot); None where that gap is no larger than chance."""
    if not is_above(clean, zero):
        return None
    return (accuracy - float(zero.mean())) / float(clean.mean() - zero.mean())


def published_gap_closed(numbers: Mapping[float, float], epsilon: float) -> float:
    """Returns the same share from published accuracies by epsilon (0: zero-shot, infinity: no noise)."""
    return (numbers[epsilon] - numbers[0.0]) / (numbers[math.inf] - numbers[0.0])


def measure(
    method: Method,
    voters: Voters,
    *,
    epsilons: Sequence[float],
    draws: int,
    zero: NDArray[np.bool_],
    **terms: Any,
) -> Measured:
    """Measures one method; the votes are drawn once per question, the noise `draws` times."""
    task = voters.task
    matrices = voters.matrices(method.design(), calibrate=method.calibrate)
    plans = {epsilon: method.plan(task, epsilon=epsilon, **terms) for epsilon in epsilons}
    one = plans[epsilons[0]]
    return Measured(
        noisy={epsilon: noisy_accuracies(plan, matrices, task.right, draws=draws) for epsilon, plan in plans.items()},
        deviation={epsilon: noise_deviation(plan.release) for epsilon, plan in plans.items()},
        clean=clean_hits(one, matrices, task.right),
        zero=zero,
        constant=task.right == task.commonest,
        sampling_rate=one.release.sampler.sampling_rate,
    )
