"""Measures whether plans and rehearsals say what comes out, on the embedded model.

Private records and public examples are disjoint parts of the training data; questions are of the test data. The rows of
a plan are drawn from the private records as its sampler draws them, the model votes, and the noise on these votes is
integrated exactly, so an accuracy errs by the questions alone (.03 with 300). Parts:

- defaults: what `DPVotingRunnable` plans with no option named, against the same votes without noise; and what its plan
  says, which rests on a guess.
- rehearsed: 60 public examples; the plan that `propose_rows` chooses, what it says, and whether it is right to spend,
  against what is free: the model without examples, and votes of the public examples.
- labels: the share of right labels of PromptPATE, with the rows of the rehearsal.

    python benchmarks/bench_rehearse.py --data ../shared/data [--parts defaults,rehearsed,labels] [--sets agnews,trec]
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from _voting_task import WORDINGS, plain
from numpy.random import PCG64, Generator
from numpy.typing import NDArray

from langchain_dpicl import Budget, DPVotingRunnable, EmbeddedLLM, LabelAnswers, PrivateExamples
from langchain_dpicl.backends.rows.label_rows import LabelRows
from langchain_dpicl.backends.sync_async import run_sync
from langchain_dpicl.baselines import fixed_rows
from langchain_dpicl.options import FewShotTask
from langchain_dpicl.pate.plan import plan_labelling
from langchain_dpicl.planning.expected_utility import chances_of_votes
from langchain_dpicl.privacy.mechanisms.release_plan import PoissonUnits, ReleasePlan
from langchain_dpicl.rehearsal import Proposal, propose_rows, rehearse
from langchain_dpicl.rehearsal.choice import FREE_ROWS
from langchain_dpicl.runs.query_plan import rejection
from langchain_dpicl.tasks import PublicRecords, VotingTask, reader_of

SETS = ("agnews", "dbpedia", "trec", "amazon", "sst2", "ood_imdb", "rte")
MOST_RECORDS, MOST_CHARACTERS = 8_000, 300
DELTA = 1e-6
QUERIES, EPSILONS = (100, 1_000), (1.0, 4.0)
Floats = NDArray[np.float64]


@dataclass
class Task:
    """One data set, split with a public seed."""

    name: str
    labels: tuple[str, ...]
    public: list[dict[str, str]]
    private: list[dict[str, str]]
    asked: list[dict[str, str]]
    llm: Any
    _reader: dict[bool, tuple[VotingTask, LabelRows]] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path, name: str, *, seed: int, examples: int, questions: int) -> Task:
        """Reads a data set: public examples, private records and questions are disjoint."""
        words = WORDINGS[name].words if name in WORDINGS else {}
        train, test = [], []
        with gzip.open(folder / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
            rows = [json.loads(line) for line in lines]
        for row in rows:
            text = f"{row['premise']} / {row['hypothesis']}" if "premise" in row else row["text"]
            label = plain({**row, "text": text})["label"]
            record = {
                "text": " ".join(text.split())[:MOST_CHARACTERS],
                "label": words.get(label, label).lower(),
            }
            (train if row["split"] == "train" else test).append(record)
        coins = random.Random(seed)
        coins.shuffle(train)
        coins.shuffle(test)
        labels = tuple(sorted({record["label"] for record in train}))
        private = train[examples:][:MOST_RECORDS]
        return cls(name, labels, train[:examples], private, test[:questions], EmbeddedLLM())

    @property
    def public_size(self) -> int:
        """A declared size: two digits of the number of records."""
        digits = 10 ** (len(str(len(self.private))) - 2)
        return len(self.private) // digits * digits

    def reader(self, calibrated: bool) -> tuple[VotingTask, LabelRows]:
        """Returns the wording and what reads votes."""
        if calibrated not in self._reader:
            records = PublicRecords.of(
                self.public, FewShotTask(), text_key="text", label_key="label", labels=self.labels, instead=""
            )
            answers = LabelAnswers(calibrate=calibrated)
            task = VotingTask.of(records, FewShotTask(), answers)
            task, scorer, _ = reader_of(self.llm, task, is_wanted=calibrated)
            self._reader[calibrated] = task, scorer
        return self._reader[calibrated]

    def votes(self, rows: Sequence[Sequence[Sequence[dict[str, str]]]], calibrated: bool) -> Floats:
        """Returns float64[questions, labels]: the votes of each question's rows, its right label first.

        A row without records votes for nothing, except where it is the only one: the prompt without examples.
        """
        task, scorer = self.reader(calibrated)
        prompts: list[tuple[str, ...]] = []
        places: list[int] = []
        for place, (question, own) in enumerate(zip(self.asked, rows, strict=True)):
            render = task.wording.renderer(task.queries((question["text"],)))
            for row in own:
                if row or len(own) == 1:
                    prompts.append(render(row))
                    places.append(place)
        scores = run_sync(_asked(scorer, prompts))
        votes = np.zeros((len(self.asked), len(self.labels)))
        np.add.at(votes, (np.array(places), scores.argmax(axis=1)), 1.0)
        for place, question in enumerate(self.asked):
            right = self.labels.index(question["label"])
            votes[place, [0, right]] = votes[place, [right, 0]]
        return votes

    def drawn(self, plan: ReleasePlan, seed: int) -> list[list[list[dict[str, str]]]]:
        """Returns the rows of every question, each on a fresh sample of the private records."""
        rng = Generator(PCG64([seed, 17]))
        sampler = plan.sampler
        every = []
        for _ in self.asked:
            taken = rng.permutation(np.nonzero(rng.random(len(self.private)) < sampler.sampling_rate)[0])
            if isinstance(sampler, PoissonUnits):
                every.append([[self.private[unit]] for unit in taken])
                continue
            slots = rng.integers(sampler.num_slots, size=len(taken))
            every.append(
                [
                    [self.private[unit] for unit in taken[slots == slot][: sampler.shots_per_slot]]
                    for slot in range(sampler.num_slots)
                ]
            )
        return every

    def zero_shot(self, calibrated: bool) -> float:
        """Returns the accuracy of the prompt without examples."""
        return float(self.votes([[[]]] * len(self.asked), calibrated)[:, 0].mean())

    def share_of(self, label: str) -> float:
        """Returns the accuracy of one label that is always answered."""
        return float(np.mean([question["label"] == label for question in self.asked]))

    def free_votes(self, calibrated: bool, *, rows: int, shots: int) -> float:
        """Returns the accuracy of votes of the public examples, as `PublicVotingRunnable` draws their rows."""
        drawn = fixed_rows(len(self.public), num_rows=rows, shots=shots)
        shown = [[self.public[place] for place in row] for row in drawn]
        votes = self.votes([shown] * len(self.asked), calibrated)
        top = votes == votes.max(axis=1, keepdims=True)
        return float((top[:, 0] / top.sum(axis=1)).mean())


def _asked(scorer: LabelRows, prompts: Sequence[tuple[str, ...]]) -> Any:
    return (yield scorer.request_public_rows(prompts))


def percent(value: float) -> str:
    return f"{100 * value:5.1f}"


def tasks(options: argparse.Namespace) -> Iterator[tuple[int, Task]]:
    for name in options.sets:
        for seed in range(options.seeds):
            yield seed, Task.read(options.data, name, seed=seed, examples=options.examples, questions=options.questions)


def defaults(options: argparse.Namespace) -> list[dict[str, Any]]:
    """With no option named: accuracy at 100 queries with and without noise, and what the plan says."""
    print("\n## Defaults: no option named, 100 queries, delta 1e-6\n")
    print(
        f"{'set':<10}{'seed':>5}{'records':>9}{'eps':>5}{'private':>9}{'no noise':>10}{'said':>7}{'range':>12}  advice"
    )
    found = []
    for seed, task in tasks(options):
        for epsilon in EPSILONS:
            private = PrivateExamples(task.private, label_key="label", labels=task.labels, public_size=task.public_size)
            voter = DPVotingRunnable.from_private_examples(
                private, llm=task.llm, budget=Budget(epsilon=epsilon, delta=DELTA), epsilon=epsilon, max_queries=100
            )
            votes = task.votes(task.drawn(voter.plan.release, seed), bool(voter.task.content_free))
            seen, said = chances_of_votes(voter.plan.release, votes), voter.expected()
            spends = said["without_noise_prob"] - said["right_label_prob"] <= 0.03
            found.append(
                {
                    "set": task.name,
                    "seed": seed,
                    "epsilon": epsilon,
                    "private": seen.right,
                    "no_noise": seen.without_noise,
                    "said": said["right_label_prob"],
                    "low": said["right_label_low"],
                    "high": said["right_label_high"],
                    "spends": spends,
                }
            )
            span = f"{100 * said['right_label_low']:.0f}-{100 * said['right_label_high']:.0f}"
            print(
                f"{task.name:<10}{seed:>5}{task.public_size:>9}{epsilon:>5g}{percent(seen.right):>9}"
                f"{percent(seen.without_noise):>10}{percent(said['right_label_prob']):>7}{span:>12}"
                f"  {'spend' if spends else 'do not spend'}",
                flush=True,
            )
    for epsilon, most in ((1.0, 3.0), (4.0, 1.5)):
        lost = [100 * (row["no_noise"] - row["private"]) for row in found if row["epsilon"] == epsilon]
        judge(f"noise takes at most {most} points at epsilon {epsilon:g}", max(lost, default=0.0), most)
    inside = np.mean([row["low"] <= row["private"] <= row["high"] for row in found])
    print(f"the range of the guess holds the accuracy in {100 * inside:.0f} % of {len(found)} cells")
    return found


def rehearsed(options: argparse.Namespace) -> list[dict[str, Any]]:
    """After a rehearsal on public examples: what is said, what is seen, and whether spending was right."""
    print(f"\n## After a rehearsal on {options.examples} public examples\n")
    print(
        f"{'set':<10}{'seed':>5}{'eps':>5}{'queries':>9}{'said':>7}{'range':>9}{'seen':>7}{'no noise':>10}"
        f"{'free':>7}{'best free':>11}  verdict; design; free rival"
    )
    found = []
    for seed, task in tasks(options):
        begun = time.perf_counter()
        rehearsal = rehearse(task.llm, task.public, labels=task.labels, max_calls=10**6, progress=False)
        took = time.perf_counter() - begun
        free: dict[Any, float] = {(0, False, label): task.share_of(label) for label in task.labels}
        free |= {(0, read, None): task.zero_shot(read) for read in rehearsal.readings}
        free |= {
            (shots, read, None): task.free_votes(read, rows=FREE_ROWS, shots=shots)
            for read in rehearsal.readings
            for shots in rehearsal.shots(read)
            if shots >= 4
        }
        cache: dict[Any, Floats] = {}
        for queries in QUERIES:
            for epsilon in EPSILONS:
                proposal = propose_rows(rehearsal, task.public_size, epsilon=epsilon, delta=DELTA, max_queries=queries)
                found.append(
                    cell(task, proposal, cache, free, seed=seed, epsilon=epsilon, queries=queries)
                    | {"seconds": took, "calls": rehearsal.calls}
                )
                tell(found[-1])
    verdicts(found)
    return found


def cell(
    task: Task,
    proposal: Proposal,
    cache: dict[Any, Floats],
    free: dict[Any, float],
    *,
    seed: int,
    epsilon: float,
    queries: int,
) -> dict[str, Any]:
    key = proposal.design, proposal.calibrated
    if key not in cache:
        cache[key] = task.votes(task.drawn(proposal.plan.release, seed), proposal.calibrated)
    seen = chances_of_votes(proposal.plan.release, cache[key])
    return {
        "set": task.name,
        "seed": seed,
        "epsilon": epsilon,
        "queries": queries,
        "said": proposal.right,
        "low": proposal.low,
        "high": proposal.high,
        "seen": seen.right,
        "no_noise": seen.without_noise,
        "free": free[proposal.free.shots, proposal.free.calibrated, proposal.free.label],
        "best_free": max(free.values()),
        "said_free": proposal.free.right,
        "said_gain": proposal.gain,
        "verdict": proposal.verdict,
        "spends": proposal.spends,
        "design": f"{proposal.design.num_slots} x {proposal.design.shots_per_slot}"
        f" fill {proposal.design.overfill:g}{' calibrated' if proposal.calibrated else ''}",
        "rival": proposal.free.name,
    }


def tell(row: dict[str, Any]) -> None:
    span = f"{100 * row['low']:.0f}-{100 * row['high']:.0f}"
    print(
        f"{row['set']:<10}{row['seed']:>5}{row['epsilon']:>5g}{row['queries']:>9,}{percent(row['said']):>7}{span:>9}"
        f"{percent(row['seen']):>7}{percent(row['no_noise']):>10}{percent(row['free']):>7}"
        f"{percent(row['best_free']):>11}  {row['verdict']}; {row['design']}; {row['rival']}",
        flush=True,
    )


def verdicts(found: Sequence[dict[str, Any]]) -> None:
    """Prints the goals: intervals, bias, and whether spending was right against the rival that was named."""
    print(f"\n{len(found)} cells")
    judge_least(
        "intervals that hold, %", 100 * float(np.mean([r["low"] <= r["seen"] <= r["high"] for r in found])), 85.0
    )
    judge("mean half width, points", 100 * float(np.mean([(r["high"] - r["low"]) / 2 for r in found])), 13.0)
    judge_errors([r["said"] - r["seen"] for r in found])
    for rival in ("free", "best_free"):
        gains = np.array([r["seen"] - r[rival] for r in found])
        spends = np.array([r["spends"] for r in found])
        words = "the free rival that was named" if rival == "free" else "the best free rival in hindsight"
        print(f"against {words}: spends in {spends.sum()} of {len(found)} cells")
        judge("  spends for less than 1 point, % of cells", 100 * float((spends & (gains < 0.01)).mean()), 10.0)
        wrong = (gains[spends] < 0.01).mean() if spends.any() else 0.0
        judge("  spends for less than 1 point, % of cells that spend", 100 * float(wrong), 10.0)
        large = gains > 0.05
        judge("  gains of more than 5 points missed, % of cells", 100 * float((~spends & large).mean()), 15.0)
        missed = (~spends[large]).mean() if large.any() else 0.0
        judge(f"  gains of more than 5 points missed, % of these {large.sum()}", 100 * float(missed), 15.0)


def labels(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The share of right labels of PromptPATE: fresh teachers of the usual shape, inputs with few votes rejected."""
    print("\n## PromptPATE: share of right labels among 100 inputs, rows of the usual shape\n")
    print(f"{'set':<10}{'seed':>5}{'eps':>5}{'said':>7}{'range':>9}{'seen':>7}")
    found = []
    for seed, task in tasks(options):
        rehearsal = rehearse(task.llm, task.public, labels=task.labels, max_calls=10**6, progress=False)
        for epsilon in EPSILONS:
            plan = usual_labels(task, epsilon)
            said = plan.expected(rehearsal, calibrated=True)
            votes = task.votes(task.drawn(plan.release, seed), True)
            seen = chances_of_votes(plan.release, votes, threshold=plan.threshold)
            found.append(
                {
                    "set": task.name,
                    "seed": seed,
                    "epsilon": epsilon,
                    "said": said["right_label_prob"],
                    "low": said["right_label_low"],
                    "high": said["right_label_high"],
                    "seen": seen.right,
                }
            )
            row = found[-1]
            span = f"{100 * row['low']:.0f}-{100 * row['high']:.0f}"
            print(
                f"{task.name:<10}{seed:>5}{epsilon:>5g}{percent(row['said']):>7}{span:>9}{percent(row['seen']):>7}",
                flush=True,
            )
    print(f"\n{len(found)} cells")
    judge_least(
        "intervals that hold, %", 100 * float(np.mean([r["low"] <= r["seen"] <= r["high"] for r in found])), 85.0
    )
    judge("mean half width, points", 100 * float(np.mean([(r["high"] - r["low"]) / 2 for r in found])), 13.0)
    judge_errors([r["said"] - r["seen"] for r in found])
    return found


def usual_labels(task: Task, epsilon: float) -> Any:
    first = plan_labelling(task.public_size, epsilon=epsilon, delta=DELTA, max_queries=100, width=len(task.labels))
    rejects = rejection(
        0.5 / len(task.labels), first.design, public_size=task.public_size, mechanism=first.release.mechanism.name
    )
    return plan_labelling(
        task.public_size, epsilon=epsilon, delta=DELTA, max_queries=100, width=len(task.labels), **rejects
    )


def judge_errors(errors: Sequence[float]) -> None:
    """Judges errors as a whole, where those of some cells make up for others, and what one cell is off by."""
    judge("bias over all cells, points", 100 * abs(float(np.mean(errors))), 1.5)
    judge("said minus seen, points, absolute", 100 * float(np.mean(np.abs(errors))), 1.5)


def judge(what: str, seen: float, most: float) -> None:
    print(f"{'PASS' if seen <= most else 'MISSED':<7} {what}: {seen:.1f} (goal: at most {most:g})")


def judge_least(what: str, seen: float, least: float) -> None:
    print(f"{'PASS' if seen >= least else 'MISSED':<7} {what}: {seen:.1f} (goal: at least {least:g})")


PARTS = {"defaults": defaults, "rehearsed": rehearsed, "labels": labels}


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of NAME.jsonl.gz")
    parser.add_argument("--sets", type=lambda text: text.split(","), default=list(SETS))
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--questions", type=int, default=300)
    parser.add_argument("--examples", type=int, default=60)
    parser.add_argument("--json", type=Path, help="writes every cell")
    options = parser.parse_args(given)
    options.sets = [name for name in options.sets if (options.data / f"{name}.jsonl.gz").exists()]
    if not options.sets:
        print(f"no data set in {options.data}: nothing to measure")
        return 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the plans of this benchmark rest on a guess on purpose
        found = {part: PARTS[part](options) for part in options.parts}
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
