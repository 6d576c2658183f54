"""The main job, offline: private bank-customer questions in, private demonstrations out, and what they are worth.

The questions are sorted into four queues whose names say nothing: what a queue is for, only the records know. So an
instruction alone is no better than guessing, and the private demonstrations show what the records bring.

Run with `make demo`. Everything runs on the embedded model, which writes keywords rather than sentences; the "private"
records are made up by `bank_questions.py`. A picture is saved to `out/demo.png`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from bank_questions import LABELS as TOPICS
from bank_questions import bank_questions, new_questions
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import PromptTemplate

from langchain_dpicl import (
    Decoding,
    DemonstrationSynthesizer,
    DPFewShotPromptTemplate,
    EmbeddedLLM,
    GenerationTask,
    LabelAnswers,
    LabelClassifier,
    PrivacyBudgetCallbackHandler,
    PrivateExamples,
    ReleasedDemonstrations,
    Rows,
)
from langchain_dpicl.baselines import (
    demonstrations_from_instruction,
    demonstrations_without_privacy,
    real_demonstrations_without_privacy,
)

EPSILONS = (0.25, 1.0, 2.0, 4.0, 8.0)
DELTA = 1e-5
SIZE = 1500
QUEUES = dict(zip(TOPICS, ("queue A", "queue B", "queue C", "queue D"), strict=True))
LABELS = tuple(QUEUES.values())
INSTRUCTION = "Questions of bank customers."
GENERATION = "queue: {label}\nquestion: {text}"
TASK = {
    "example_prompt": PromptTemplate.from_template("question: {text}\nqueue: {label}"),
    "prefix": INSTRUCTION,
    "suffix": "question: {input}\nqueue:",
}


def in_queues(questions: list[dict[str, str]]) -> list[dict[str, str]]:
    """Returns the questions with the name of their queue as label."""
    return [{**question, "label": QUEUES[question["label"]]} for question in questions]


def private_examples() -> PrivateExamples:
    """A fresh opaque holder of the same made-up records."""
    return PrivateExamples(
        in_queues(bank_questions(num_per_label=SIZE)),
        label_key="label",
        labels=LABELS,
        public_size=dict.fromkeys(LABELS, SIZE),
        dataset_id="bank-questions",
    )


def private_run(model: EmbeddedLLM, epsilon: float, *, shots: int, show: bool) -> tuple[ReleasedDemonstrations, str]:
    """Generates demonstrations at one epsilon with a budget of its own."""
    budget = PrivacyBudgetCallbackHandler(epsilon=epsilon, delta=DELTA)
    synthesizer = DemonstrationSynthesizer.from_private_examples(
        private_examples(),
        llm=model,
        budget=budget,
        epsilon=epsilon,
        shots_per_label=shots,
        instruction=INSTRUCTION,
        task=GenerationTask(record_prompt=GENERATION),
        max_tokens=24,
        rows=Rows(units=80),
    )
    if show:
        plan = synthesizer.plan
        print(f"   noise multiplier {plan.noise_multiplier:.2f}, about {plan.design.num_slots} rows per token")
    for example in synthesizer.stream():
        if show:
            print(f"   [{example['label']}] {example['text']}", flush=True)
    return synthesizer.result, str(budget.report())


def accuracies(
    model: EmbeddedLLM, released: ReleasedDemonstrations | None, queries: list[dict[str, str]]
) -> list[float]:
    """Returns raw and calibrated accuracy of the demonstrations on new questions."""
    examples = [] if released is None else list(released.examples)
    prompt = DPFewShotPromptTemplate(examples=examples, **TASK)
    out = []
    for calibrate in (False, True):
        how = None if calibrate else LabelAnswers(calibrate=False)
        classifier = LabelClassifier(model, labels=LABELS, prompt=prompt, answers=how)
        answers = classifier.batch([query["text"] for query in queries])
        out.append(sum(a == q["label"] for a, q in zip(answers, queries, strict=True)) / len(queries))
    return out


def section(title: str) -> None:
    print(f"\n== {title}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="generations per method")
    parser.add_argument("--shots", type=int, default=4, help="demonstrations per label")
    parser.add_argument("--queries", type=int, default=60, help="new questions per label")
    parser.add_argument("--out", type=Path, default=Path("out"))
    arguments = parser.parse_args()
    started = time.perf_counter()
    model = EmbeddedLLM()
    queries = in_queues(new_questions(num_per_label=arguments.queries))

    section("One private prompt copies a record; a noisy majority does not")
    one = demonstrations_without_privacy(
        private_examples(),
        llm=model,
        task=GenerationTask(INSTRUCTION, GENERATION),
        max_tokens=40,
        rows=Rows(slots=1, shots=4, redraw_every="run"),
        decoding=Decoding(candidates="all"),
    )
    print("one prompt, no noise (epsilon = infinity):")
    records = {record["text"] for record in bank_questions(num_per_label=SIZE)}
    for example in one.examples:
        copied = "  <- a customer's record, word for word" if example["text"] in records else ""
        print(f"   [{example['label']}] {example['text']}{copied}")
    print("noisy majority of about 80 prompts (epsilon = 2):")
    _, report = private_run(model, 2.0, shots=1, show=True)

    section("A stock chain answers with demonstrations that are now public")
    released, _ = private_run(model, 4.0, shots=arguments.shots, show=False)
    prompt = DPFewShotPromptTemplate.from_released(released, **TASK)
    chain = prompt | model.bind(max_tokens=4, stop=["\n"]) | StrOutputParser()
    for query in queries[:: max(1, len(queries) // 4)][:4]:
        print(
            f"   {query['text']!r} -> {chain.invoke({'input': query['text']}).strip()!r} (should be {query['label']!r})"
        )

    section("Accuracy on new questions (4 queues), raw and calibrated, mean and standard deviation")
    table = measure(model, queries, arguments.repeats, arguments.shots)

    section("The budget report of one run")
    print(report)
    picture = draw(table, arguments.out)
    print(f"\npicture: {picture}" if picture else "\nno picture: pip install matplotlib")
    print(f"done in {time.perf_counter() - started:.0f} s")
    return 0


def measure(
    model: EmbeddedLLM, queries: list[dict[str, str]], repeats: int, shots: int
) -> list[tuple[str, list[list[float]]]]:
    """Runs every method `repeats` times; returns (name, [[raw, calibrated], ...]) and prints the table."""
    methods: list[tuple[str, Callable[[], ReleasedDemonstrations | None]]] = [("zero-shot", lambda: None)]
    methods.append(("instruction only, eps 0", lambda: public_demonstrations(model, shots)))
    methods += [
        (f"private, eps {epsilon:g}", lambda e=epsilon: private_run(model, e, shots=shots, show=False)[0])
        for epsilon in EPSILONS
    ]
    methods.append(("no noise, eps inf", lambda: unprotected(model, shots)))
    methods.append(
        (
            "real records, eps inf",
            lambda: real_demonstrations_without_privacy(private_examples(), shots_per_label=shots),
        )
    )
    print(f"   {'method':<24}{'raw':>16}{'calibrated':>16}")
    table = []
    for name, make in methods:
        runs = [accuracies(model, make(), queries) for _ in range(1 if name == "zero-shot" else repeats)]
        table.append((name, runs))
        cells = [f"{statistics.mean(c):.2f} +- {statistics.pstdev(c):.2f}" for c in zip(*runs, strict=True)]
        print(f"   {name:<24}{cells[0]:>16}{cells[1]:>16}", flush=True)
    return table


def public_demonstrations(model: EmbeddedLLM, shots: int) -> ReleasedDemonstrations:
    """Instruction-only generation."""
    return demonstrations_from_instruction(
        llm=model,
        label_key="label",
        labels=LABELS,
        task=GenerationTask(INSTRUCTION, GENERATION),
        shots_per_label=shots,
        max_tokens=24,
    )


def unprotected(model: EmbeddedLLM, shots: int) -> ReleasedDemonstrations:
    """Algorithm 1 without noise."""
    return demonstrations_without_privacy(
        private_examples(),
        llm=model,
        task=GenerationTask(INSTRUCTION, GENERATION),
        shots_per_label=shots,
        max_tokens=24,
        rows=Rows(units=80),
    )


def draw(table: list[tuple[str, list[list[float]]]], folder: Path) -> Path | None:
    """Draws calibrated accuracy against epsilon beside the baselines; returns the file."""
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return None
    means = {name: statistics.mean(run[1] for run in runs) for name, runs in table}
    spread = {name: statistics.pstdev([run[1] for run in runs]) for name, runs in table}
    names = [f"private, eps {epsilon:g}" for epsilon in EPSILONS]
    figure, axes = plt.subplots(figsize=(7.5, 4.5))
    axes.errorbar(
        EPSILONS,
        [means[n] for n in names],
        yerr=[spread[n] for n in names],
        marker="o",
        capsize=4,
        lw=2,
        label="private demonstrations",
    )
    styles = [
        ("zero-shot", ":"),
        ("instruction only, eps 0", "--"),
        ("no noise, eps inf", "-."),
        ("real records, eps inf", "-"),
    ]
    for number, (name, style) in enumerate(styles):
        axes.axhline(means[name], ls=style, color=f"C{number + 1}", label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(EPSILONS, [f"{epsilon:g}" for epsilon in EPSILONS])
    axes.set_ylim(0, 1)
    axes.set_xlabel(f"epsilon (delta {DELTA:g}, add_remove, one record)")
    axes.set_ylabel("accuracy on new questions (calibrated)")
    axes.set_title("Private demonstrations of bank questions, embedded model")
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "demo.png"
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    return path


if __name__ == "__main__":
    sys.exit(main())
