"""What leaks and what it costs to stop it, offline: questions to a bank, and notes of a clinic.

Both are sorted into four queues whose names say nothing: what a queue is for, the records show. Real records in a
prompt are copied, and an attacker tells whose record it is. Then the same task with what a private release leaves:
made-up demonstrations for the bank, public lines that the notes have labelled for the clinic. Beside it stands what is
free: no examples, examples that the model invents, and public examples that somebody sorts by hand.

Epsilon holds for a person: `unit_key` names the customer or patient of each record.

Run with `make demo`; it takes less than a minute on two cores. Everything runs on the embedded model, which writes
keywords rather than sentences; the "private" records are made up by `bank_questions.py` and `clinic_notes.py`. A
picture is saved to `out/demo.png`.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import random
import statistics
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import bank_questions
import clinic_notes
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import PromptTemplate

from langchain_dpicl import (
    Decoding,
    DPFewShotPromptTemplate,
    EmbeddedLLM,
    GenerationTask,
    LabelAnswers,
    LabelClassifier,
    PrivacyBudgetCallbackHandler,
    PrivateExamples,
    PromptPATELabeler,
    Rows,
)
from langchain_dpicl.audit.membership import (
    MembershipResult,
    RocCurve,
    Target,
    few_shot_without_privacy,
    membership_attack,
    prompt_target,
)
from langchain_dpicl.baselines import (
    demonstrations_from_instruction,
    demonstrations_without_privacy,
    real_demonstrations_without_privacy,
)
from langchain_dpicl.exceptions import RestsOnGuessWarning

Record = dict[str, str]

EPSILONS = (4.0, 1.0, 0.1)
SHOWN = 1.0
"""The epsilon of the texts and of the report."""
DELTA = 1e-6
SIZE = 1500
"""Records of each queue; declared, and public."""
QUEUES = ("queue A", "queue B", "queue C", "queue D")
SHOTS = 3
"""Demonstrations of each queue."""
SCORED = 50
"""Members, and others, that the attacker is asked about, for each release."""
NONE = "none (zero-shot)"
PUBLIC = "public, sorted by hand"
REAL = "real records, not private"
TRIES = 20
RED, BLUE = "#b3261e", "#1f5fa8"


@dataclass(frozen=True)
class Domain:
    """A task: where its records come from, and how they are released."""

    title: str
    noun: str
    instruction: str
    topics: tuple[str, ...]
    private: Callable[..., list[Record]]
    new: Callable[..., list[Record]]
    public: tuple[str, ...]
    release: Callable[[Domain, EmbeddedLLM, PrivateExamples, PrivacyBudgetCallbackHandler], list[Record]]
    released: str

    @property
    def wording(self) -> dict[str, Any]:
        """How examples and queries stand in a prompt."""
        return {
            "example_prompt": PromptTemplate.from_template(f"{self.noun}: {{text}}\nqueue: {{label}}"),
            "prefix": self.instruction,
            "suffix": f"{self.noun}: {{input}}\nqueue:",
        }

    @property
    def generation(self) -> str:
        """How a record stands in a prompt that writes another."""
        return f"queue: {{label}}\n{self.noun}: {{text}}"

    def records(self) -> list[Record]:
        """Twice as many as one data set has: half of them are in it, and the attacker has to find out which."""
        records = self.in_queues(self.private(num_per_label=2 * SIZE))
        return [{**record, "person": str(number)} for number, record in enumerate(records)]

    def in_queues(self, records: list[Record]) -> list[Record]:
        """Returns records with the name of their queue as label."""
        queue = dict(zip(self.topics, QUEUES, strict=True))
        return [{**record, "label": queue[record["label"]]} for record in records]

    def prompt(self, examples: Sequence[Record]) -> DPFewShotPromptTemplate:
        """Puts public examples into a prompt."""
        return DPFewShotPromptTemplate(examples=list(examples), **self.wording)


def private_examples(domain: Domain, records: Sequence[Record]) -> PrivateExamples:
    """Wraps records: from here on nothing shows them, and epsilon holds for a person."""
    return PrivateExamples(
        records,
        unit_key="person",
        label_key="label",
        labels=QUEUES,
        public_size=dict.fromkeys(QUEUES, SIZE),
        dataset_id=domain.title.replace(" ", "-"),
    )


def made_up(
    domain: Domain, model: EmbeddedLLM, private: PrivateExamples, budget: PrivacyBudgetCallbackHandler
) -> list[Record]:
    """Made-up demonstrations, written by a noisy majority of about 80 prompts."""
    prompt = DPFewShotPromptTemplate.from_private_examples(
        private,
        llm=model,  # sees the private prompts
        budget=budget,
        epsilon=budget.epsilon,
        shots_per_label=SHOTS,
        instruction=domain.instruction,
        task=GenerationTask(record_prompt=domain.generation),
        max_tokens=16,
        rows=Rows(units=80),
        **domain.wording,
    )
    return list(prompt.examples or [])


def labelled(
    domain: Domain, model: EmbeddedLLM, private: PrivateExamples, budget: PrivacyBudgetCallbackHandler
) -> list[Record]:
    """Public lines, each with the queue that a noisy majority of 40 prompts gives it."""
    labeler = PromptPATELabeler.from_private_examples(
        private,
        llm=model,  # sees the private prompts
        budget=budget,
        epsilon=budget.epsilon,
        public_inputs=domain.public,
        example_prompt=f"{domain.instruction}\n\n{domain.wording['example_prompt'].template}",
        suffix=domain.wording["suffix"],
        rows=Rows(slots=40, shots=8),
        answers=LabelAnswers(calibrate=False),
    )
    return labeler.run(progress=False).examples


BANK = Domain(
    title="questions to a bank",
    noun="question",
    instruction="Questions of bank customers.",
    topics=bank_questions.LABELS,
    private=bank_questions.bank_questions,
    new=bank_questions.new_questions,
    public=bank_questions.PUBLIC_LINES,
    release=made_up,
    released="made-up questions",
)
CLINIC = Domain(
    title="notes of a clinic",
    noun="note",
    instruction="Notes of a clinic.",
    topics=clinic_notes.LABELS,
    private=clinic_notes.clinic_notes,
    new=clinic_notes.new_notes,
    public=clinic_notes.PUBLIC_LINES,
    release=labelled,
    released="labels of public lines",
)


@dataclass(frozen=True)
class Measured:
    """Right answers on new texts, and the attacker's success; one number per repetition, in [0, 1].

    Of a private release also what the last one released, and the budget report of each.
    """

    name: str
    right: list[float]
    attacked: list[float] = field(default_factory=list)
    released: list[Record] = field(default_factory=list)
    reports: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Story:
    """What the demo found in one domain."""

    domain: Domain
    copied: Record | None
    rows: list[Measured]

    @property
    def shown(self) -> Measured:
        """The private release whose texts and report are shown."""
        return self.of(private_name(SHOWN))

    def of(self, name: str) -> Measured:
        """Returns the row of a method."""
        return next(row for row in self.rows if row.name == name)


def private_name(epsilon: float) -> str:
    return f"private, epsilon {epsilon:g}"


def copied_record(domain: Domain, model: EmbeddedLLM) -> Record | None:
    """One prompt of real records writes on: returns a text that is one of them word for word, with a number in it."""
    records = domain.records()[: SIZE * len(QUEUES)]
    texts = {record["text"] for record in records}
    for _ in range(TRIES):
        written = demonstrations_without_privacy(
            private_examples(domain, records),
            llm=model,
            task=GenerationTask(domain.instruction, domain.generation),
            max_tokens=40,
            rows=Rows(slots=1, shots=4, redraw_every="run"),
            decoding=Decoding(candidates="all"),
        ).examples
        for example in written:
            if example["text"] in texts and " 07" in example["text"]:
                return dict(example)
    return None


def accuracy(domain: Domain, model: EmbeddedLLM, examples: Sequence[Record], queries: Sequence[Record]) -> float:
    """Returns the share of new texts that are sent to the right queue: the one that the model finds most probable."""
    answers = LabelAnswers(calibrate=False)
    classifier = LabelClassifier(model, labels=QUEUES, prompt=domain.prompt(examples), answers=answers)
    found = classifier.batch([query["text"] for query in queries])
    return statistics.mean(answer == query["label"] for answer, query in zip(found, queries, strict=True))


def success(result: MembershipResult) -> list[float]:
    """How often the attacker picks the member out of a member and an outsider, prompt by prompt; 1/2 is guessing."""
    pairs = zip(result.member_scores, result.nonmember_scores, strict=True)
    return [RocCurve.of(inside, outside).auc for inside, outside in pairs]


def attacked(records: Sequence[Record], target: Target, *, size: int, prompts: int, members: int) -> list[float]:
    """Attacks prompts of `size` records each, drawn at random, as Duan et al. (2023) do."""
    shape = {"num_records": size, "num_prompts": prompts, "num_members": members, "num_nonmembers": SCORED}
    return success(membership_attack(records, target, progress=False, **shape))


def without_examples(domain: Domain, model: EmbeddedLLM, asked: Sequence[Record], _: int) -> Measured:
    """Asks the model alone; there is nothing to repeat."""
    return Measured(NONE, [accuracy(domain, model, [], asked)])


def from_instruction(domain: Domain, model: EmbeddedLLM, asked: Sequence[Record], repeats: int) -> Measured:
    """Lets the model write its examples from an instruction and the names of the queues."""
    task = GenerationTask(domain.instruction, domain.generation)
    written = [
        demonstrations_from_instruction(
            llm=model, label_key="label", labels=QUEUES, task=task, shots_per_label=SHOTS, max_tokens=16
        ).examples
        for _ in range(repeats)
    ]
    return Measured("from an instruction", [accuracy(domain, model, examples, asked) for examples in written])


def public_examples(domain: Domain, model: EmbeddedLLM, asked: Sequence[Record], repeats: int) -> Measured:
    """Takes public lines, sorted by a person who knows the queues; each time others."""
    each = len(domain.public) // len(QUEUES)
    chosen = [
        [
            {"text": line, "label": queue}
            for place, queue in enumerate(QUEUES)
            for line in random.sample(domain.public[place * each : (place + 1) * each], SHOTS)
        ]
        for _ in range(repeats)
    ]
    return Measured(PUBLIC, [accuracy(domain, model, examples, asked) for examples in chosen])


def private_release(
    domain: Domain, model: EmbeddedLLM, asked: Sequence[Record], repeats: int, *, epsilon: float
) -> Measured:
    """Releases examples, each time from other records, and attacks them."""
    found = Measured(private_name(epsilon), [])

    def make(members: Sequence[Any]) -> Any:
        budget = PrivacyBudgetCallbackHandler(epsilon=epsilon, delta=DELTA)
        found.released[:] = domain.release(domain, model, private_examples(domain, members), budget)
        found.reports.append(str(budget.report()))
        found.right.append(accuracy(domain, model, found.released, asked))
        return domain.prompt(found.released)

    target = prompt_target(make, model, labels=QUEUES)
    size = SIZE * len(QUEUES)
    found.attacked.extend(attacked(domain.records(), target, size=size, prompts=repeats, members=SCORED))
    return found


def real_records(domain: Domain, model: EmbeddedLLM, asked: Sequence[Record], repeats: int) -> Measured:
    """Puts real records into the prompt, and attacks them."""
    records, size = domain.records(), SHOTS * len(QUEUES)
    real = few_shot_without_privacy(model, labels=QUEUES, **domain.wording)
    chosen = [
        real_demonstrations_without_privacy(private_examples(domain, records), shots_per_label=SHOTS).examples
        for _ in range(repeats)
    ]
    right = [accuracy(domain, model, examples, asked) for examples in chosen]
    return Measured(REAL, right, attacked(records, real, size=size, prompts=4 * repeats, members=size))


def measure(
    domain: Domain,
    model: EmbeddedLLM,
    *,
    repeats: int,
    queries: int,
    epsilons: Sequence[float] = EPSILONS,
    submit: Callable[..., Future[Any]] | None = None,
) -> Callable[[], Story]:
    """Starts all measurements, through `submit` on other processes; returns what prints the table and the story."""
    asked = domain.in_queues(domain.new(num_per_label=queries))
    private = [functools.partial(private_release, epsilon=epsilon) for epsilon in epsilons]
    methods = (without_examples, from_instruction, public_examples, *private, real_records)
    started = [_started(submit, method, domain, model, asked, repeats) for method in methods]
    copied = _started(submit, copied_record, domain, model)

    def collect() -> Story:
        print(f"\n== {domain.title}: mean and standard deviation of {repeats} releases each")
        print(f"   {'examples in the prompt':<28}{'right answers':>16}{'attacker':>16}")
        rows: list[Measured] = []
        for each in started:
            rows.append(each())
            print(f"   {rows[-1].name:<28}{spread(rows[-1].right):>16}{spread(rows[-1].attacked):>16}", flush=True)
        return Story(domain, copied(), rows)

    return collect


def _started(submit: Callable[..., Future[Any]] | None, work: Callable[..., Any], *given: Any) -> Callable[[], Any]:
    """Starts work on another process, or leaves it until its result is asked for."""
    return submit(work, *given).result if submit else functools.partial(work, *given)


def spread(values: Sequence[float]) -> str:
    """Returns mean and standard deviation in per cent."""
    if not values:
        return "-"
    return f"{statistics.mean(values):.0%}" + (f" +- {statistics.pstdev(values):.0%}" if len(values) > 1 else "")


def tell(story: Story, model: EmbeddedLLM) -> None:
    """Prints what was copied, what was released, and a stock chain that answers with it."""
    print("\n   A prompt of real records writes on:")
    if story.copied is None:
        print(f"      (no record with a phone number was copied in {TRIES} runs)")
    else:
        print(f"      {story.copied['text']}\n      ^ somebody's record, word for word")
    print(f"   What leaves at epsilon {SHOWN:g} ({story.domain.released}):")
    for example in one_per_queue(story.shown.released):
        print(f"      [{example['label']}] {example['text']}")
    print("   A stock chain answers with it, free:")
    chain = story.domain.prompt(story.shown.released) | model.bind(max_tokens=4, stop=["\n"]) | StrOutputParser()
    for query in story.domain.in_queues(story.domain.new(num_per_label=1))[:2]:
        answer = chain.invoke({"input": query["text"]}).strip()
        print(f"      {query['text']} -> {answer} (right: {query['label']})")


def one_per_queue(examples: Sequence[Record]) -> list[Record]:
    """Returns the first example of each queue that has one."""
    first: dict[str, Record] = {}
    for example in examples:
        first.setdefault(example["label"], example)
    return [first[queue] for queue in QUEUES if queue in first]


def quiet() -> None:
    """Warns of no guess: what answers are worth is measured here."""
    warnings.simplefilter("ignore", RestsOnGuessWarning)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="releases per method")
    parser.add_argument("--queries", type=int, default=40, help="new texts per queue")
    parser.add_argument("--out", type=Path, default=Path("out"))
    arguments = parser.parse_args()
    quiet()
    started = time.perf_counter()
    model = EmbeddedLLM()
    print("Attacker: shown a record that was used and one that was not, how often does it name the used one?")
    print("50 % is guessing. It is one attacker, and no proof: the proof is the budget report at the end.")
    runs = {"repeats": arguments.repeats, "queries": arguments.queries}
    context = multiprocessing.get_context("spawn")
    stories: list[Story] = []
    with ProcessPoolExecutor(2, mp_context=context, initializer=quiet) as pool:
        for collect in [measure(domain, model, submit=pool.submit, **runs) for domain in (BANK, CLINIC)]:
            stories.append(collect())
            tell(stories[-1], model)
    print(f"\n== the budget report of one run ({BANK.title})\n{stories[0].shown.reports[-1]}")
    picture = draw(stories, arguments.out)
    print(f"\npicture: {picture}" if picture else "\nno picture: pip install matplotlib")
    print(f"done in {time.perf_counter() - started:.0f} s")
    return 0


def draw(stories: Sequence[Story], folder: Path) -> Path | None:
    """Draws what was copied and released beside the attacker's success and the right answers; returns the file."""
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return None
    figure, grid = plt.subplots(
        len(stories), 3, figsize=(13, 4.2 * len(stories)), width_ratios=(5, 4, 4), squeeze=False
    )
    names = [REAL, *map(private_name, EPSILONS)]
    ticks = ["real\nrecords", *(f"epsilon\n{epsilon:g}" for epsilon in EPSILONS)]
    for story, (words, attacker, right) in zip(stories, grid, strict=True):
        words.axis("off")
        words.set_title(story.domain.title, loc="left", fontweight="bold")
        copied = [story.copied] if story.copied else []
        boxes = [
            (0.98, "A prompt of real records copies one", copied, RED),
            (
                0.54,
                f"Released at epsilon {SHOWN:g}: {story.domain.released}",
                one_per_queue(story.shown.released)[:3],
                BLUE,
            ),
        ]
        for height, title, examples, color in boxes:
            words.text(0, height, title, color=color, va="top", fontsize=12, fontweight="bold")
            style = {"boxstyle": "round,pad=0.5", "facecolor": "white", "edgecolor": color}
            text = "\n".join(textwrap.fill(f"{one['text']}  [{one['label']}]", 50) for one in examples)
            words.text(0.02, height - 0.12, text, va="top", fontsize=11, bbox=style)
        for axes, title, kind in (
            (attacker, "attacker names the used record", "attacked"),
            (right, "right answers", "right"),
        ):
            values = [getattr(story.of(name), kind) for name in names]
            for place, (runs, color) in enumerate(zip(values, [RED] + [BLUE] * len(EPSILONS), strict=True)):
                mean, error = 100 * statistics.mean(runs), 100 * statistics.pstdev(runs)
                axes.errorbar(place, mean, yerr=error, fmt="o", ms=8, capsize=5, lw=2, color=color)
                axes.annotate(f"{mean:.0f} %", (place, mean), xytext=(9, 4), textcoords="offset points", fontsize=11)
            axes.set_title(title)
            axes.set_xticks(range(len(names)), ticks)
            axes.set_xlim(-0.4, len(names) - 0.4)
            axes.spines[["top", "right"]].set_visible(False)
        attacker.axhline(50, ls=":", color="0.4")
        attacker.annotate("guessing", (-0.35, 51), color="0.4")
        attacker.set_ylim(35, 105)
        for row, style in zip(story.rows[:3], (":", "--", "-."), strict=True):
            mean, error = 100 * statistics.mean(row.right), 100 * statistics.pstdev(row.right)
            right.axhline(mean, ls=style, color="0.4", label=f"free: {row.name}")
            right.axhspan(mean - error, mean + error, color="0.4", alpha=0.12, lw=0)
        right.legend(frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2)
        right.set_ylim(0, 100)
    figure.suptitle(f"Embedded model, delta {DELTA:g}, one person, add_remove; bars: standard deviation of releases")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "demo.png"
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


if __name__ == "__main__":
    import demo  # under this name another process finds what it is to run

    sys.exit(demo.main())
