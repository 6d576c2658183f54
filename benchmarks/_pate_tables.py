"""What the PromptPATE benchmark measured of one setting, and how that reads in a table. Asks no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from _pate_runs import Hits, Taught, Teaching
from _pate_task import PUBLISHED, Published
from _voting_rows import gap_closed, is_above
from numpy.typing import NDArray

from langchain_dpicl.pate.plan import TeacherPrice

NAME = 27
THRESHOLDS = (0.25, 0.5, 0.75, 0.9)
"""Shares of the teachers that a threshold may ask for; the paper asks for .9."""
LEGEND = """\
Accuracies in percent, mean +- standard deviation over repeats of the public choices: which inputs are
labelled, which prompts are tried. The questions stay the same.
eps      honest epsilon of all labels of this run together, at the delta and relation of the head
labels   right labels among all released, where the inputs' labels are known
<.5      share of inputs with fewer noisy votes than half the teachers. Here every label counts, unless
         --abstain-below says otherwise; the package's default rejects only below half of what chance
         gives, 0.5 / labels of the teachers
closed   (student - zero-shot) / (best private prompt - zero-shot) in percent, from the better of both
         zero-shots, since both are free. "no gap": the best private prompt is not better than
         that by two standard errors; "no signal": nor than always saying the commonest label
cal.     calibrated on "N/A", as the package does by itself with prompts of one example"""


@dataclass(frozen=True)
class Bounds:
    """What students are compared with, by their number of shots.

    Attributes:
      zero: bool[questions], right without any example, read as such a student is.
      upper: bool[questions], right after the best private prompt: NOT PRIVATE.
      constant: bool[questions], where the commonest label is right.
      ensemble: by shots of a teacher, accuracy of the votes without noise: NOT PRIVATE.
    """

    zero: Mapping[int, Hits]
    upper: Mapping[int, Hits]
    constant: Hits
    ensemble: Mapping[int, float]

    @property
    def free(self) -> Hits:
        """The better of the zero-shots."""
        return max(self.zero.values(), key=lambda hits: float(hits.mean()))

    def closed(self, accuracy: float, *, shots: int) -> float | None:
        """Returns the share of the gap that is closed; None without a gap."""
        return gap_closed(self.free, self.upper[shots], accuracy)

    def has_signal(self, *, shots: int) -> bool:
        """Whether the best private prompt says more than that one label is common."""
        return is_above(self.upper[shots], self.constant)

    def to_dict(self) -> dict[str, Any]:
        """Returns the numbers as JSON values."""
        return {
            "zero_shot": {str(shots): float(hits.mean()) for shots, hits in self.zero.items()},
            "best_private_prompt_without_privacy": {str(k): float(hits.mean()) for k, hits in self.upper.items()},
            "ensemble_without_privacy": {str(shots): value for shots, value in self.ensemble.items()},
            "commonest_label": float(self.constant.mean()),
        }


@dataclass
class Row:
    """One kind of teachers in one setting: a run of the labeler per repeat, and its students.

    Attributes:
      teaching: the teachers.
      runs: what they released, by repeat.
      students: by shots, bool[questions] per repeat; None where a pool had too few labels.
    """

    teaching: Teaching
    runs: list[Taught] = field(default_factory=list)
    students: dict[int, list[Hits | None]] = field(default_factory=dict)

    @property
    def epsilon(self) -> float:
        """Largest epsilon of a repeat; they differ only where inputs were held back from the records."""
        return max(run.pool.epsilon for run in self.runs)

    @property
    def noise(self) -> float:
        """Standard deviation of the noise on a label's votes."""
        plan = self.runs[0].plan
        return plan.noise_multiplier * plan.release.sensitivity.require("l2")

    def label_accuracies(self, share: float = 0.0) -> list[float]:
        """Returns the accuracy of the labels of each repeat that has labels and known truths."""
        found = (run.label_accuracy(share) for run in self.runs)
        return [accuracy for accuracy in found if accuracy is not None]

    def accuracies(self, shots: int) -> NDArray[np.float64]:
        """Returns float64[repeats with a student]."""
        return np.array([float(hits.mean()) for hits in self.students[shots] if hits is not None])

    def to_dict(self, bounds: Bounds) -> dict[str, Any]:
        """Returns the numbers as JSON values."""
        return {
            "epsilon": self.epsilon,
            "adjacency": self.teaching.adjacency,
            "noise_in_votes": self.noise,
            "sampling_rate": self.runs[0].plan.release.sampler.sampling_rate,
            "rejected": float(np.mean([len(run.pool.rejected) / len(run.pool.entries) for run in self.runs])),
            "label_accuracy": self.label_accuracies(),
            "by_threshold": {
                f"{share:g}": {
                    "rejected": float(np.mean([run.rejected(share) for run in self.runs])),
                    "label_accuracy": self.label_accuracies(share),
                }
                for share in THRESHOLDS
            },
            "students": {
                str(shots): {
                    "accuracy": self.accuracies(shots).tolist(),
                    "closed": self._closed(bounds, shots),
                }
                for shots in self.students
            },
        }

    def _closed(self, bounds: Bounds, shots: int) -> float | None:
        found = self.accuracies(shots)
        return bounds.closed(float(found.mean()), shots=shots) if found.size else None

    def shown(self, bounds: Bounds) -> str:
        """Returns the row's line."""
        rejected = percent(float(np.mean([run.rejected(0.5) for run in self.runs])))
        out = f"{self.teaching.name:<{NAME}}{self.epsilon:>8.4g}{spread(self.label_accuracies()):>11}{rejected:>5}"
        for shots in self.students:
            out += f"{spread(self.accuracies(shots)):>12}{self._said(bounds, shots):>11}"
        return out

    def _said(self, bounds: Bounds, shots: int) -> str:
        """Returns the share of the gap that is closed, or why that would say nothing."""
        if not bounds.has_signal(shots=shots):
            return "no signal"
        closed = self._closed(bounds, shots)
        return "no gap" if closed is None else percent(closed)


def percent(share: float) -> str:
    """Returns a share in whole percent."""
    return f"{100 * share:.0f}"


def spread(values: Sequence[float] | NDArray[np.float64]) -> str:
    """Returns mean and standard deviation in percent; a dash for no values."""
    found = np.asarray(values, dtype=float)
    return f"{100 * found.mean():.1f}+-{100 * found.std():.1f}" if found.size else "-"


def head(shots: Sequence[int]) -> str:
    """Returns the headings over `Row.shown`."""
    students = "".join(f"{f'{k}-shot':>12}{'closed':>11}" for k in shots)
    return f"{'teachers':<{NAME}}{'eps':>8}{'labels':>11}{'<.5':>5}{students}"


def bounds_lines(bounds: Bounds, *, candidates: int, teachers: int, questions: int) -> list[str]:
    """Returns what students are compared with, in the columns of `Row.shown`."""
    wide = NAME + 24

    def line(name: str, cells: Mapping[int, Hits]) -> str:
        return f"{name:<{wide}}" + "".join(f"{100 * float(hits.mean()):>12.1f}{'':>11}" for hits in cells.values())

    out = [line("always saying the commonest label, eps 0", dict.fromkeys(bounds.zero, bounds.constant))]
    out.append(line("zero-shot, eps 0 (with one shot: cal.)", bounds.zero))
    out.append(line(f"best of {candidates} private prompts: NOT PRIVATE", bounds.upper))
    for shots, accuracy in bounds.ensemble.items():
        name = f"votes of {teachers} {shots}-shot teachers without noise, {questions} questions: NOT PRIVATE"
        out.append(f"{name} {100 * accuracy:.1f}")
    return [each.rstrip() for each in out]


class PaperTerms(NamedTuple):
    """The terms of Duan et al. for their GPT-3 teachers."""

    num_teachers: int = 200
    noise: float = 20.0
    max_queries: int = 500
    delta: float = 1e-6


TEXT_TERMS = PaperTerms(num_teachers=400, noise=50.0, max_queries=200)
"""The terms for Claude, which gives text alone."""


def honest_lines(name: str, size: int, prices: Sequence[TeacherPrice], terms: PaperTerms) -> list[str]:
    """Returns the honest epsilons of the paper's terms, and beside them the published one."""
    shape = f"{terms.num_teachers} one-shot teachers, sigma {terms.noise:g}, {terms.max_queries} inputs"
    out = [f"{shape}, delta {terms.delta:g}, {size:,} records:"]
    out += [f"  {price.teachers:<12}{price.epsilon:>10.4g}  {price.adjacency}" for price in prices]
    return out + published_lines(PUBLISHED.get(name))


def published_lines(found: Published | None) -> list[str]:
    """Returns what the paper prints of a setting, if it does."""
    if found is None:
        return []
    return [f"  published   {found.epsilon:>10.4g}  does not hold; {found.accuracy} % right with another model"]
