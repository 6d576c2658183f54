"""Recorded votes of a real model, replayed through private releases: does the planner's chance come true?

The file is JSON: a "source" and one entry per task with

    "labels": labels that an answer can have; above 50 the task is open, and the answers that occur are its labels
    "votes": one word per question, parted by blanks, and one letter per prompt: "a" (local id 0) is the right answer,
        "b", "c", ... (1, 2, ...) are other answers in the order in which this question met them, "-" is no answer

The first six letters of a word are used: one model's answers to one question after six sets of demonstrations. It holds
no text and no prompt.

    python benchmarks/bench_recorded.py --data FILE.json [--json OUT]

On a random half of the questions `estimate_facts` fits three numbers, from which `vote_chances` predicts the chance of
the right label; it is compared with what the votes of the other half bring. Beside it stands a planner that takes rows
for independent, and has the measured half's true share of right rows. Of the noise every number is exact; one part
draws samples and noise from the operating system and compares. Splits and replayed rows have constant public seeds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from _voting_rows import answer
from _voting_task import PAPER
from numpy.random import PCG64, Generator
from numpy.typing import NDArray
from scipy import optimize, special

from langchain_dpicl.planning.expected_utility import RowDesign, noise_scale, occupancy, vote_chances
from langchain_dpicl.planning.row_law import RowFacts, estimate_facts, expected_rival, wins_fairly
from langchain_dpicl.privacy._validate import Adjacency
from langchain_dpicl.privacy.mechanisms.bounded import VoteSum
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM
from langchain_dpicl.privacy.mechanisms.release_plan import PoissonUnits, ReleasePlan
from langchain_dpicl.runs.query_plan import QueryPlan, plan_queries

PROMPTS = 6
OPEN_ABOVE = 50
EPSILONS = (1.0, 3.0, 8.0)
REPLAYS = 4
"""Times that rows are drawn from the recorded ones of a question."""
MEAN_GOAL, LARGEST_GOAL = 3.0, 8.0
"""Points by which predictions may miss: on average over all cells, and in the worst."""
OLD_RIVAL = 0.5
STANDARD_ERRORS = 4.0
"""Real noise may be so far from exact integration."""
RESAMPLES = 400
NUMBERS = ("right", "correlation", "rival")
Floats = NDArray[np.float64]

PUBLISHED: Mapping[str, tuple[int, Mapping[float, float]]] = {
    "AGNews": (4, PAPER["AGNews"]),
    "TREC": (6, PAPER["TREC"]),
    "SST-2": (2, PAPER["SST-2"]),
    "Amazon": (2, {1.0: 93.83, 3.0: 94.18, 8.0: 94.25, math.inf: 94.26}),
}
"""Labels and accuracies of Panda et al. (2023), table 1; see `_voting_task.PAPER`."""


@dataclass(frozen=True)
class Task:
    """The recorded votes of one task.

    Attributes:
      name: of the task.
      votes: int[questions, 6] local ids: 0 right, -1 none.
      labels: candidates of a release.
    """

    name: str
    votes: NDArray[np.int64] = field(repr=False)
    labels: int

    def facts(self, places: Any = slice(None), *, weights: Any = None) -> RowFacts:
        """Returns the fitted numbers of the questions at `places`."""
        votes = self.votes[places]
        return estimate_facts(votes, np.zeros(len(votes), np.int64), labels=self.labels, weights=weights)

    def rows(self) -> Floats:
        """Returns float64[questions, 6, labels]: the recorded rows as `VoteSum` counts them."""
        shown = (self.votes[:, :, None] == np.arange(self.labels)).astype(np.float64)
        counted = VoteSum().bounded_rows(shown.reshape(-1, self.labels), width=self.labels)
        return counted.reshape(shown.shape)


def read_votes(path: Path) -> list[Task]:
    """Reads a file of recorded votes."""
    found = json.loads(path.read_text())
    return [_task(name, each) for name, each in found.items() if isinstance(each, dict)]


def _task(name: str, found: Mapping[str, Any]) -> Task:
    words = found["votes"].split()
    if not words or min(len(word) for word in words) < PROMPTS:
        raise ValueError(f"{name}: expected words of at least {PROMPTS} letters.")
    votes = np.array([[-1 if letter == "-" else ord(letter) - ord("a") for letter in word[:PROMPTS]] for word in words])
    seen, labels = int(votes.max()) + 1, int(found["labels"])
    return Task(name, votes, max(2, seen) if labels > OPEN_ABOVE else max(labels, seen))


@dataclass(frozen=True)
class Design:
    """A shape of rows with its noise.

    Attributes:
      name: what the table shows.
      is_recorded: whether each recorded row fills one slot; otherwise rows are drawn from the recorded six.
    """

    name: str
    shape: RowDesign
    mechanism: str
    adjacency: Adjacency = "add_remove"
    is_recorded: bool = False

    def plan(self, labels: int, *, epsilon: float, public_size: int, **terms: Any) -> QueryPlan:
        """Returns the landed plan at `epsilon`."""
        return plan_queries(
            public_size,
            epsilon=epsilon,
            width=labels,
            adjacency=self.adjacency,
            aggregation=VoteSum(),
            mechanism=self.mechanism,
            design=self.shape,
            **terms,
        )


def _slots(num: int, shots: int, overfill: float = 1.0) -> RowDesign:
    return RowDesign.choose(rows="slots", num_slots=num, shots_per_slot=shots, overfill=overfill)


PANDA = Design("10 x 4 gaussian, replace_one (Panda)", _slots(10, 4), "gaussian", "replace_one")
DESIGNS = (
    Design("6 x 8 gumbel, recorded rows only", _slots(6, 8), "gumbel", is_recorded=True),
    PANDA,
    Design("10 x 4 gumbel, fill 1.5", _slots(10, 4, 1.5), "gumbel"),
    Design("20 x 4 gaussian (default)", _slots(20, 4), "gaussian"),
    Design("40 x 4 gaussian", _slots(40, 4), "gaussian"),
    Design("40 x 1 gumbel, fill 1.5", _slots(40, 1, 1.5), "gumbel"),
    Design("40 unit rows gumbel", RowDesign.choose(rows="units", num_slots=40), "gumbel"),
)


# ---- what the votes bring


def replayed(task: Task, plan: QueryPlan, *, is_recorded: bool, rng: Generator) -> Floats:
    """Returns float64[questions, replays, labels]: sums of votes of samples that the plan's sampler may draw."""
    size = (len(task.votes), REPLAYS)
    release = plan.release
    if is_recorded:
        copies = (rng.random((*size, PROMPTS)) >= occupancy(release, plan.public_size).empty).astype(np.float64)
    else:
        copies = rng.multinomial(_rows_in_use(plan, size, rng), np.full(PROMPTS, 1.0 / PROMPTS)).astype(np.float64)
    return np.asarray(np.einsum("qrp,qpl->qrl", copies, task.rows()))


def _rows_in_use(plan: QueryPlan, size: tuple[int, int], rng: Generator) -> NDArray[np.int64]:
    sampler = plan.release.sampler
    if isinstance(sampler, PoissonUnits):
        return np.asarray(rng.binomial(plan.public_size, sampler.sampling_rate, size))
    return np.asarray(rng.binomial(sampler.num_slots, 1.0 - occupancy(plan.release, plan.public_size).empty, size))


def right_chances(release: ReleasePlan, sums: Floats) -> Floats:
    """Returns float64[...]: the chance that coordinate 0 of each float64[..., labels] has the noisy maximum.

    Gumbel noise: the softmax. Gaussian noise: a Gauss-Hermite sum over the noise of coordinate 0.
    """
    gaps = (sums[..., :1] - sums[..., 1:]) / noise_scale(release)
    if release.mechanism.name == "gumbel":
        return np.asarray(1.0 / (1.0 + np.exp(np.minimum(-gaps, 700.0)).sum(axis=-1)))
    if release.mechanism.name != "gaussian":
        raise ValueError(f"mechanism: expected 'gumbel' or 'gaussian', found {release.mechanism.name!r}.")
    nodes, weights = np.polynomial.hermite_e.hermegauss(64)
    chance = np.zeros(gaps.shape[:-1])
    for node, weight in zip(nodes, weights, strict=True):
        chance += weight * special.ndtr(gaps + node).prod(axis=-1)
    return np.asarray(chance / math.sqrt(2.0 * math.pi))


def real_hits(task: Task, design: Design, plan: QueryPlan, *, rng: Generator) -> Floats:
    """Returns float64[questions]: whether one real release, of a real sample with real noise, names the right label."""
    rows, width = task.rows(), task.labels
    hits = np.zeros(len(rows))
    for place, recorded in enumerate(rows):
        sample = plan.release.sampler.draw(plan.public_size, rng=SYSTEM_RANDOM)
        prompts = np.arange(PROMPTS) if design.is_recorded else rng.integers(PROMPTS, size=len(sample))
        shown = recorded[prompts] * np.array([bool(units) for units in sample], np.float64)[:, None]
        released = plan.release.mechanism.release(plan.release.bound(shown, width=width), rng=SYSTEM_RANDOM)
        hits[place] = answer(released) == 0
    return hits


# ---- cells


@dataclass(frozen=True)
class Cell:
    """One task, design and epsilon; all in percent, over the splits.

    Attributes:
      measured: float64[splits] right on the measured halves.
      predicted: float64[splits] predicted by the numbers of the other halves.
      independent: float64[splits] predicted by independent rows that are right as often as the measured ones.
      no_noise: of all questions, without noise.
    """

    task: str
    design: str
    epsilon: float
    measured: Floats
    predicted: Floats
    independent: Floats
    no_noise: float
    is_recorded: bool = False

    @property
    def error(self) -> float:
        """Points by which the prediction of one half misses the other, on average over the splits."""
        return float(np.abs(self.predicted - self.measured).mean())

    @property
    def bias(self) -> float:
        """The same with its sign: what is left of it without the chance of the halves."""
        return float((self.predicted - self.measured).mean())

    @property
    def independent_error(self) -> float:
        """As `error`, of independent rows."""
        return float(np.abs(self.independent - self.measured).mean())

    def to_dict(self) -> dict[str, Any]:
        """Returns the numbers as JSON values."""
        return {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in vars(self).items()}


def halves(questions: int, splits: int) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Returns pairs of random halves of the questions: to fit, to measure."""
    orders = [Generator(PCG64(split)).permutation(questions) for split in range(splits)]
    return [(order[: questions // 2], order[questions // 2 :]) for order in orders]


def independent_facts(right: float, labels: int) -> RowFacts:
    """Returns rows that are right independently of each other, with the rival that was assumed for them."""
    return RowFacts(right, 0.0, OLD_RIVAL, labels)


def cell(task: Task, design: Design, plan: QueryPlan, *, epsilon: float, splits: int) -> Cell:
    """Measures one cell."""
    sums = replayed(task, plan, is_recorded=design.is_recorded, rng=Generator(PCG64(len(task.votes))))
    right = right_chances(plan.release, sums).mean(axis=1)
    measured, predicted, independent = [], [], []
    for fitted, held_out in halves(len(right), splits):
        share = float((task.votes[held_out] == 0).mean())
        measured.append(100.0 * float(right[held_out].mean()))
        predicted.append(_predicted(plan, task.facts(fitted)))
        independent.append(_predicted(plan, independent_facts(share, task.labels)))
    no_noise = float(wins_fairly(sums.reshape(-1, task.labels)).mean())
    return Cell(
        task.name,
        design.name,
        epsilon,
        measured=np.array(measured),
        predicted=np.array(predicted),
        independent=np.array(independent),
        no_noise=100.0 * no_noise,
        is_recorded=design.is_recorded,
    )


def _predicted(plan: QueryPlan, facts: RowFacts) -> float:
    return 100.0 * vote_chances(plan.release, plan.public_size, facts=facts).right


@dataclass(frozen=True)
class Verdict:
    """Errors over all cells, in points, and whether they meet the goal."""

    mean: float
    largest: float
    worst: Cell
    mean_bias: float
    largest_bias: float
    independent_mean: float
    independent_largest: float

    @property
    def is_met(self) -> bool:
        """Whether both goals are met."""
        return self.mean <= MEAN_GOAL and self.largest <= LARGEST_GOAL

    def lines(self) -> str:
        """Returns what is printed."""
        return (
            f"{'PASS' if self.is_met else 'MISSED'}: mean |error| {self.mean:.1f} points (at most {MEAN_GOAL:g}), "
            f"largest {self.largest:.1f} (at most {LARGEST_GOAL:g}), in {self.worst.task}, {self.worst.design}, "
            f"epsilon {self.worst.epsilon:g}\n"
            f"without the chance of the halves (bias over the splits): mean {self.mean_bias:.1f}, largest "
            f"{self.largest_bias:.1f}\n"
            f"independent rows: mean |error| {self.independent_mean:.1f}, largest {self.independent_largest:.1f}"
        )


def verdict(cells: Sequence[Cell]) -> Verdict:
    """Compares all cells with the goal."""
    worst = max(cells, key=lambda each: each.error)
    biases = [abs(each.bias) for each in cells]
    independent = [each.independent_error for each in cells]
    return Verdict(
        mean=float(np.mean([each.error for each in cells])),
        largest=worst.error,
        worst=worst,
        mean_bias=float(np.mean(biases)),
        largest_bias=max(biases),
        independent_mean=float(np.mean(independent)),
        independent_largest=max(independent),
    )


# ---- parts


def show_facts(task: Task) -> dict[str, Any]:
    """Prints the three numbers of a task with their bootstrap interval, and the ceiling."""
    facts, rng, number = task.facts(), Generator(PCG64(0)), len(task.votes)
    again = [task.facts(weights=rng.multinomial(number, np.full(number, 1.0 / number))) for _ in range(RESAMPLES)]
    shown: dict[str, Any] = {"questions": number, "labels": task.labels, "ceiling": facts.ceiling()}
    parts = []
    for name in NUMBERS:
        low, high = np.quantile([getattr(one, name) for one in again], (0.025, 0.975))
        shown[name] = [getattr(facts, name), float(low), float(high)]
        parts.append(f"{name} {getattr(facts, name):.3f} ({low:.3f} to {high:.3f})")
    print(
        f"\n## {task.name}: {number:,} questions, {task.labels} labels\n\n{', '.join(parts)}; "
        f"ceiling {100 * shown['ceiling']:.1f} % right with any number of such rows and no noise\n"
    )
    return shown


def show_cells(tables: Mapping[str, Sequence[Cell]]) -> None:
    """Prints the table of one task: measured / predicted / independent rows."""
    print(f"{'right, %':<38}" + "".join(f"{f'epsilon {epsilon:g}':>21}" for epsilon in EPSILONS) + f"{'no noise':>10}")
    for name, cells in tables.items():
        triples = (f"{c.measured.mean():.1f} / {c.predicted.mean():.1f} / {c.independent.mean():.1f}" for c in cells)
        print(f"{name:<38}" + "".join(f"{triple:>21}" for triple in triples) + f"{cells[0].no_noise:>10.1f}")


def check_real_noise(task: Task, design: Design, plan: QueryPlan) -> tuple[float, float]:
    """Returns by how many points real releases differ from exact chances, and the standard error of that."""
    rng = Generator(PCG64(1))
    exact = right_chances(plan.release, replayed(task, plan, is_recorded=design.is_recorded, rng=rng)).mean(axis=1)
    difference = 100.0 * (real_hits(task, design, plan, rng=rng) - exact)
    return float(difference.mean()), float(difference.std(ddof=1) / math.sqrt(difference.size))


def show_real_noise(tasks: Sequence[Task], **terms: Any) -> bool:
    """Prints whether real samples and noise agree with the exact chances, at epsilon 3."""
    print("\n## Real samples and noise against exact integration, epsilon 3: difference in points (standard error)\n")
    agrees = True
    for design in DESIGNS:
        found = [check_real_noise(task, design, design.plan(task.labels, epsilon=3.0, **terms)) for task in tasks]
        agrees &= all(abs(difference) <= STANDARD_ERRORS * error for difference, error in found)
        print(f"{design.name:<38}" + "".join(f"{difference:>+8.1f} ({error:.1f})" for difference, error in found))
    print(f"{'PASS' if agrees else 'MISSED'}: all within {STANDARD_ERRORS:g} standard errors")
    return agrees


MOST_ALIKE = 0.98
"""Above this the law of rows does not change any more."""
_FIRST_STEPS = np.array([[0.0, 0.0], [-0.5, 0.0], [0.0, 1.0]])


def fit_published(
    labels: int,
    paper: Mapping[float, float],
    *,
    known: Sequence[float] = (*EPSILONS, math.inf),
    design: Design = PANDA,
    is_even: bool = False,
    **terms: Any,
) -> dict[str, Any]:
    """Fits (right, correlation) to published accuracies by least squares, and independent rows to the last.

    Args:
      labels: of the task.
      paper: accuracies by epsilon.
      known: the columns that the fit sees.
      design: rows and noise.
      is_even: whether wrong votes fall evenly on the other labels, instead of as the planner expects.
      **terms: of the plan.
    """
    plans = {epsilon: design.plan(labels, epsilon=epsilon, **terms) for epsilon in EPSILONS}
    rival = 1.0 / (labels - 1) if is_even else expected_rival(labels)
    wanted = np.array([paper[epsilon] for epsilon in (*EPSILONS, math.inf)])

    def curve(right: float, correlation: float) -> Floats:
        facts = RowFacts(right, correlation, rival if correlation else OLD_RIVAL, labels)
        found = [vote_chances(plan.release, plan.public_size, facts=facts) for plan in plans.values()]
        return 100.0 * np.array([*(each.right for each in found), found[0].without_noise])

    def numbers(place: Floats) -> tuple[float, float]:
        right, correlation = special.expit(place)
        return float(right), min(float(correlation), MOST_ALIKE)

    seen = [place for place, column in enumerate((*EPSILONS, math.inf)) if column in known]

    def loss(place: Floats) -> float:
        return float(((curve(*numbers(place)) - wanted)[seen] ** 2).sum())

    def gap(right: float) -> float:
        return float(curve(right, 0.0)[-1] - wanted[-1])

    # Votes are whole numbers, so the chances move in small steps: a search without derivatives.
    start = np.array([special.logit(wanted[-1] / 100.0), 0.5])
    options = {"maxiter": 80, "xatol": 0.01, "fatol": 0.001, "initial_simplex": start + _FIRST_STEPS}
    right, correlation = numbers(optimize.minimize(loss, start, method="Nelder-Mead", options=options).x)
    alone = float(optimize.brentq(gap, 1.0 / (2.0 * labels), 0.999, xtol=1e-3))
    return {
        "paper": wanted.tolist(),
        "right": right,
        "correlation": correlation,
        "fitted": curve(right, correlation).tolist(),
        "independent_right": alone,
        "independent": curve(alone, 0.0).tolist(),
    }


KNOWN = (1.0, math.inf)
"""Columns of the paper that the law is fitted to in silico; it has to predict the others."""
CLOSE, CLOSE_CELLS = 1.0, 7
"""Points by which a predicted cell may miss, and how many of the eight cells have to be so close."""
RECORDS: Mapping[str, int] = {"AGNews": 8_000, "TREC": 5_452, "SST-2": 6_920, "Amazon": 8_000}
"""Exemplars by data set: Panda et al. (2023), table 3."""
PANDA_PRINTED = dataclasses.replace(PANDA, name="10 x 4 gaussian, add_remove", adjacency="add_remove")
"""The noise of the accountant that the paper prints: a subsampled Gaussian sum of sensitivity 1."""


def predicted(known: Sequence[float], *, max_queries: int, delta: float, **law: Any) -> dict[str, dict[str, Any]]:
    """Returns by data set what a law fitted to the known columns says, and "off": predicted - printed of the others."""
    columns, found = (*EPSILONS, math.inf), {}
    for name, (labels, paper) in PUBLISHED.items():
        terms = {"max_queries": max_queries, "delta": delta, "public_size": RECORDS[name]}
        one = fit_published(labels, paper, known=known, **law, **terms)
        pairs = zip(columns, one["fitted"], strict=True)
        found[name] = {**one, "off": {column: value - paper[column] for column, value in pairs if column not in known}}
    return found


def show_in_silico(**terms: Any) -> dict[str, Any]:
    """Prints what a law says of columns that it was not fitted to, and the same with other laws, noise and columns."""
    del terms["public_size"]
    print("\n## In silico: Panda et al. (2023), table 1, fitted to epsilon 1 and no noise; predicted - printed\n")
    print(f"{'':<8}{'right':>6}{'correlation':>13}{'epsilon 3':>22}{'epsilon 8':>22}")
    law: dict[str, Any] = {"design": PANDA_PRINTED, "is_even": True}
    main = predicted(KNOWN, **law, **terms)
    for name, one in main.items():
        printed = PUBLISHED[name][1]
        shown = (f"{printed[at] + off:.2f} - {printed[at]:.2f} = {off:+.2f}" for at, off in one["off"].items())
        print(f"{name:<8}{one['right']:>6.3f}{one['correlation']:>13.2f}" + "".join(f"{each:>22}" for each in shown))
    close, most = _close(main)
    verdict = "PASS" if close >= CLOSE_CELLS else "MISSED"
    print(f"{verdict}: {close} of 8 cells within {CLOSE:g} point (at least {CLOSE_CELLS}), largest {most:.2f}")
    others = {
        "wrong votes as the planner expects them": (KNOWN, {**law, "is_even": False}),
        "noise for replacing a record": (KNOWN, {**law, "design": PANDA}),
        "both": (KNOWN, {"design": PANDA, "is_even": False}),
        "fitted to epsilon 1 and 3": ((1.0, 3.0), law),
        "fitted to epsilon 1 and 8": ((1.0, 8.0), law),
    }
    for name, (known, changed) in others.items():
        close, most = _close(predicted(known, **changed, **terms))
        print(f"{name}: {close} of 8 within {CLOSE:g} point, largest {most:.2f}", flush=True)
    close, most = _close(without_a_law())
    print(f"no law, the column without noise for both: {close} of 8 within {CLOSE:g} point, largest {most:.2f}")
    return main


def without_a_law() -> dict[str, dict[str, Any]]:
    """Returns what the printed column without noise says of the columns that are predicted: what a law has to beat."""
    return {
        name: {"off": {at: paper[math.inf] - paper[at] for at in EPSILONS if at not in KNOWN}}
        for name, (_, paper) in PUBLISHED.items()
    }


def _close(found: Mapping[str, Mapping[str, Any]]) -> tuple[int, float]:
    off = [abs(each) for one in found.values() for each in one["off"].values()]
    return sum(each <= CLOSE for each in off), max(off)


def show_published(**terms: Any) -> dict[str, Any]:
    """Prints the published curves beside the fitted ones and independent rows."""
    print(
        "\n## Panda et al. (2023), table 1: epsilon 1, 3, 8, no noise\n\n"
        f"{'':<8}{'paper':<22}{'right, correlation -> fitted':<38}independent rows"
    )
    numbers = {}
    for name, (labels, paper) in PUBLISHED.items():
        found = numbers[name] = fit_published(labels, paper, **terms)
        paper_shown, fitted, alone = (
            " ".join(f"{value:.1f}" for value in found[key]) for key in ("paper", "fitted", "independent")
        )
        numbers_shown = f"{found['right']:.3f}, {found['correlation']:.2f} -> {fitted}"
        print(f"{name:<8}{paper_shown:<22}{numbers_shown:<38}{found['independent_right']:.3f} -> {alone}", flush=True)
    off = {
        key: max(float(np.abs(np.subtract(found[key], found["paper"])).max()) for found in numbers.values())
        for key in ("fitted", "independent")
    }
    print(f"at most {off['fitted']:.1f} points off; independent rows {off['independent']:.1f}")
    return numbers


LEGEND = """Every cell: measured / predicted / independent rows, in percent right, averaged over {splits} splits.
Beyond the six recorded rows of a question, rows are drawn from these six again: such rows are somewhat too alike, and
measured numbers with more than six rows somewhat too low. All rows are of one shape: designs differ in the number of
rows and in noise, not in what their records are worth."""


def compared(tasks: Sequence[Task], *, splits: int, numbers: dict[str, Any], **terms: Any) -> list[Cell]:
    """Prints the tables of all tasks and returns their cells."""
    cells: list[Cell] = []
    for task in tasks:
        numbers[task.name] = show_facts(task)
        tables = {
            design.name: [
                cell(task, design, design.plan(task.labels, epsilon=epsilon, **terms), epsilon=epsilon, splits=splits)
                for epsilon in EPSILONS
            ]
            for design in DESIGNS
        }
        show_cells(tables)
        cells += [each for row in tables.values() for each in row]
    return cells


def main(given: Sequence[str] | None = None) -> int:
    """Prints all tables; 1 where a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument(
        "--data", type=Path, required=True, help="recorded votes; the format is at the top of this file"
    )
    parser.add_argument("--max-queries", type=int, default=10_000, help="declared queries")
    parser.add_argument("--public-size", type=int, default=8_000, help="declared records")
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--splits", type=int, default=10, help="random halves of the questions")
    parser.add_argument("--json", type=Path, metavar="OUT", help="where the numbers go too")
    asked = parser.parse_args(given)
    if not asked.data.is_file():
        print(f"no recorded votes at {asked.data}: nothing to replay; give a file with --data FILE.json")
        return 0
    started, numbers = time.perf_counter(), dict[str, Any]()
    terms = {"max_queries": asked.max_queries, "public_size": asked.public_size, "delta": asked.delta}
    print(LEGEND.format(splits=asked.splits))
    tasks = read_votes(asked.data)
    cells = compared(tasks, splits=asked.splits, numbers=numbers, **terms)
    reached = verdict(cells)
    print(f"\n## All {len(cells)} cells\n\n{reached.lines()}")
    recorded = verdict([each for each in cells if each.is_recorded])
    print(
        f"cells of recorded rows only: mean |error| {recorded.mean:.1f}, largest {recorded.largest:.1f}; "
        f"independent rows {recorded.independent_mean:.1f}, {recorded.independent_largest:.1f}"
    )
    agrees = show_real_noise(tasks, **terms)
    numbers |= {
        "cells": [each.to_dict() for each in cells],
        "verdict": {**dataclasses.asdict(reached), "worst": reached.worst.design, "is_met": reached.is_met},
        "real_noise_agrees": agrees,
        "published": show_published(**terms),
        "in_silico": show_in_silico(**terms),
    }
    if asked.json is not None:
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        asked.json.write_text(json.dumps(numbers, indent=2))
        print(f"\nnumbers in {asked.json}")
    print(f"\n{time.perf_counter() - started:.0f} s")
    return 0 if reached.is_met and agrees else 1


if __name__ == "__main__":
    sys.exit(main())
