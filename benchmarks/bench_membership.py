"""Membership inference in the setting of Duan et al. (2023): prompts of real records leak, what is released does not.

Reads JSON lines (plain or gzipped) with `text`, `label_name` and `split`; members and non-members are drawn from
"train". With the embedded model everything runs offline. The numbers are NOT PRIVATE: run it on public or made-up data.

    python benchmarks/bench_membership.py --data FILE.jsonl.gz [FILE ...]
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from _membership_systems import Systems, soft_prompts, worded
from _voting_task import load

from langchain_dpicl import EmbeddedLLM
from langchain_dpicl.audit.membership import NOTICE, Claim, MembershipResult, Nonmembers, Target, membership_attack
from langchain_dpicl.cli.inputs import Model, load_model
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.reports.rendering import format_rounded_up

SHOTS = (1, 4)
PARTS = ("prompts", "components", "soft")
DRAWN = (
    "real prompt, 1-shot",
    "real prompt, 4-shot",
    "DPFewShotPromptTemplate, gumbel",
    "DPFewShotPromptTemplate, clip_and_blend",
    "DPVotingRunnable, noisy votes",
    "PromptPATE, student's prompt",
    "soft prompt, NOT PRIVATE",
    "PromptDPSGD, soft prompt",
)
"""What the pictures show; the table has everything."""
MOST_DRAWN = 8
HEAD = (
    "| target | attacker reads | AUC [95 %] | TPR at 1 % FPR | mean of members | of others | AUC its claim allows |\n"
    "|---|---|---|---|---|---|---|"
)


class Bench:
    """One run on one data set: attacks, rows and numbers."""

    def __init__(self, asked: argparse.Namespace, llm: Any, path: Path) -> None:
        self.asked = asked
        self.path = path
        found = load(path, cap=asked.cap, questions=1, seed=0, words={})
        self.named, self.task = found.records, worded(found)
        rest = [record["text"] for record in load(path, cap=10**9, questions=1, seed=0, words={}).records]
        attacked = {record["text"] for record in self.task.records}
        public = [text for text in dict.fromkeys(rest) if text not in attacked][: asked.inputs]
        queries = asked.members + asked.nonmembers
        self.claim = Claim(asked.epsilon, asked.delta, "add_remove")
        self.systems = Systems(
            self.task, llm, asked.records, asked.epsilon, asked.delta, asked.rows, queries, tuple(public)
        )
        self.results: list[MembershipResult] = []

    def run(self) -> Iterator[MembershipResult]:
        """Yields a result per attack."""
        parts = self.asked.parts
        found = self._prompts() if "prompts" in parts else iter(())
        yield from self._kept(found)
        if "components" in parts:
            targets = itertools.chain(self.systems.components(), self.systems.without_noise())
            yield from self._kept(self._built(target) for target in targets if self.asked.only in target.name)
        if "soft" in parts:
            yield from self._kept(self._soft())

    def _kept(self, found: Iterator[MembershipResult]) -> Iterator[MembershipResult]:
        for result in found:
            self.results.append(result)
            yield result

    def _prompts(self) -> Iterator[MembershipResult]:
        """Prompts of real records, as the paper attacks them, and with non-members of the member's label only."""
        real, said = self.systems.real_prompt(), self.systems.real_prompt(votes="text")
        for shots in SHOTS:
            yield self._attacked(real.named(f"real prompt, {shots}-shot"), shots)
        yield self._attacked(said.named(f"real prompt, {SHOTS[-1]}-shot, text"), SHOTS[-1])
        for shots in SHOTS:
            yield self._attacked(real.named(f"real prompt, {shots}-shot, same label"), shots, nonmembers="same_label")

    def _attacked(self, target: Target, shots: int, nonmembers: Nonmembers = "any") -> MembershipResult:
        asked = self.asked
        return membership_attack(
            self._records(nonmembers, shots + asked.nonmembers),
            target,
            num_records=shots,
            num_prompts=asked.prompts,
            num_nonmembers=asked.nonmembers,
            nonmembers=nonmembers,
        )

    def _records(self, nonmembers: Nonmembers, needed: int) -> list[dict[str, str]]:
        """Returns the records; without labels that have too few, where non-members take the member's label."""
        records = self.task.records
        if nonmembers == "any":
            return records
        texts = {label: {r["text"] for r in records if r["label"] == label} for label in self.task.labels}
        return [record for record in records if len(texts[record["label"]]) >= needed]

    def _built(self, target: Target, *, soft: bool = False) -> MembershipResult:
        """Attacks what is built of a data set: many members per build, as building takes time."""
        asked = self.asked
        return membership_attack(
            self.named if soft else self.task.records,
            target,
            num_records=asked.records,
            num_prompts=asked.soft_releases if soft else asked.releases,
            num_members=asked.members,
            num_nonmembers=asked.nonmembers,
        )

    def _soft(self) -> Iterator[MembershipResult]:
        folders = sorted(self.asked.soft_base.glob("base-*/made.json"))
        if not folders or find_spec("torch") is None:
            print(f"(soft prompts need torch, and a model under {self.asked.soft_base}: make bench-soft-prompts)")
            return
        shape: dict[str, Any] = {"records": self.asked.records, "claim": self.claim}
        for target in soft_prompts(self.path, folders[-1].parent, **shape):
            yield self._built(target, soft=True)

    def row(self, result: MembershipResult) -> str:
        """Returns a line of the table."""
        low, _, high = result.band().auc
        allowed = "-" if result.claim is None else format_rounded_up(result.claim.auc, 3)
        cells = (
            result.name,
            result.reads,
            f"{result.auc:.3f} [{low:.3f}, {high:.3f}]",
            f"{100 * result.tpr_at():.1f} %",
            f"{result.member_scores.mean():.3f}",
            f"{result.nonmember_scores.mean():.3f}",
            allowed,
        )
        return f"| {' | '.join(cells)} |"

    def pictures(self, folder: Path) -> list[Path]:
        """Draws the ROC curves and the histograms; returns the files, none without matplotlib."""
        try:
            from langchain_dpicl.audit.plots import plot_probabilities, plot_roc

            stem = self.path.name.partition(".")[0]
            curves, scores = (folder / f"membership_{kind}_{stem}.png" for kind in ("roc", "scores"))
            title = f"Membership inference, {self.task.title}"
            drawn = [result for result in self.results if result.name in DRAWN] or self.results[:MOST_DRAWN]
            plot_roc(drawn, curves, title=title)
            plot_probabilities(drawn, scores, title=title)
        except ConfigurationError as error:
            print(f"(no pictures: {error})")
            return []
        return [curves, scores]


def count(text: str) -> int:
    """Returns a number of things."""
    if not text.isascii() or not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, found {text!r}")
    return int(text)


def parsed(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the settings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, nargs="+", default=[], metavar="FILE", action="append", help="the last --data counts")
    add("--parts", nargs="+", choices=PARTS, default=PARTS[:2], help="soft needs the extra hf and bench-soft-prompts")
    add("--only", default="", metavar="WORD", help="of the components those with this in their name")
    add("--model", default="embedded", help="'embedded', or module:attribute of a model or engine; it SEES the records")
    add("--prompts", type=count, default=100, help="prompts of real records")
    add("--releases", type=count, default=12, help="builds of each component")
    add("--soft-releases", type=count, default=8, help="soft prompts that are trained")
    add("--members", type=count, default=8, help="members scored per build of a component")
    add("--nonmembers", type=count, default=50, help="non-members scored per prompt")
    add("--records", type=count, default=40, help="records that a component is built of")
    add("--rows", type=count, default=10, help="rows of a release")
    add("--inputs", type=count, default=20, help="public inputs of PromptPATE")
    add("--epsilon", type=float, default=8.0, help="what components claim")
    add("--delta", type=float, default=1e-5)
    add("--cap", type=count, default=5_000, help="most records; what is left gives public inputs")
    add("--soft-base", type=Path, default=Path("out/soft_base"), metavar="FOLDER")
    add("--out", type=Path, default=Path("out"), metavar="FOLDER", help="of bench_membership.json and the pictures")
    arguments = parser.parse_args(given)
    arguments.data = arguments.data[-1] if arguments.data else []
    return arguments


def main(given: Sequence[str] | None = None) -> int:
    """Attacks every data set; what the package refuses about the settings ends it with that one line."""
    asked = parsed(given)
    if not asked.data or (missing := [str(path) for path in asked.data if not path.is_file()]):
        print(f"no data file at {', '.join(missing) if asked.data else '...'}: give one with --data FILE.jsonl.gz")
        return 2
    try:
        return measured(asked)
    except ConfigurationError as error:
        problem = str(error)
    print(f"bench_membership.py: {problem}", file=sys.stderr)
    return 2


def measured(asked: argparse.Namespace) -> int:
    """Attacks every data set; returns the exit code."""
    started = time.perf_counter()
    # As a LangChain model, for answers that are text.
    llm = EmbeddedLLM() if asked.model == "embedded" else load_model(Model(name=asked.model))
    asked.out.mkdir(parents=True, exist_ok=True)
    print(NOTICE)
    numbers: dict[str, Any] = {"notice": NOTICE, "private": False}
    for path in asked.data:
        bench = Bench(asked, llm, path)
        print(f"\n## {bench.task.title}: {len(bench.task.records):,} records, {len(bench.task.labels)} labels")
        print(f"Components: {asked.records} records, epsilon {asked.epsilon:g}, delta {asked.delta:g}, add_remove.\n")
        print(HEAD)
        for result in bench.run():
            print(bench.row(result), flush=True)
        numbers[bench.task.title] = [result.to_dict() for result in bench.results]
        (asked.out / "bench_membership.json").write_text(json.dumps(numbers, indent=2))
        for picture in bench.pictures(asked.out):
            print(f"picture: {picture}", flush=True)
    seconds, busy = time.perf_counter() - started, time.process_time()
    print(f"\nnumbers in {asked.out / 'bench_membership.json'}, {seconds:.0f} s, {busy:.0f} CPU s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
