"""How the embedded model behaves: labels, rows that are alike, writing under privacy, leaks, nearest texts, speed.

Reads labelled data sets (JSON lines with `text`, `label_name` or `label`, and `split`), and with `--corpus` the public
tasks on which the model's numbers were chosen: trivia categories and intents of bank customers. The shipped tables
have read the texts of the public tasks; nothing was chosen on the other data sets.

    python benchmarks/bench_embedded.py --data FILE.jsonl.gz ... [--corpus FOLDER] [--parts labels,rows]
"""

from __future__ import annotations

import argparse
import lzma
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
from _voting_task import WORDINGS, plain, read_rows
from langchain_core.prompts import PromptTemplate
from numpy.typing import NDArray

from langchain_dpicl import (
    DPFewShotPromptTemplate,
    EmbeddedLLM,
    LabelAnswers,
    LabelClassifier,
    PrivacyBudgetCallbackHandler,
    PrivateExamples,
)
from langchain_dpicl.backends import LocalEmbeddings
from langchain_dpicl.backends.embedded import EmbeddedModel, ModelTables

TRIVIA = ("animals", "geography", "literature", "music", "science technology", "sports")
MOST_CHARACTERS = 400
RECORDS = 8_000
EXAMPLE = PromptTemplate.from_template("Text: {text}\nTopic: {label}")
SUFFIX = "Text: {input}\nTopic:"
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Task:
    """A data set: texts that may be shown by label, and questions with their label's place."""

    title: str
    labels: tuple[str, ...]
    shown: dict[str, list[str]]
    asked: list[tuple[str, int]]

    def questions(self, number: int, seed: int) -> list[tuple[str, int]]:
        """Returns `number` questions, drawn with a public seed."""
        return random.Random(seed).sample(self.asked, min(number, len(self.asked)))

    def balanced(self, shots: int, coins: random.Random) -> list[tuple[str, str]]:
        """Returns `shots` examples of each label in random order."""
        drawn = [(text, label) for label in self.labels for text in coins.sample(self.shown[label], shots)]
        coins.shuffle(drawn)
        return drawn


def labelled_task(path: Path) -> Task:
    """Reads one labelled data set; labels read as in the other benchmarks, in small letters."""
    name = path.name.partition(".")[0]
    words = WORDINGS[name].words if name in WORDINGS else {}
    rows = [(plain(row), row.get("split")) for row in read_rows(path)]
    texts = [(words.get(row["label"], row["label"]).lower(), _cut(row["text"]), split) for row, split in rows]
    labels = tuple(sorted({label for label, _, split in texts if split == "train"}))
    shown = {one: [text for label, text, split in texts if split == "train" and label == one] for one in labels}
    return Task(
        name, labels, shown, [(text, labels.index(label)) for label, text, split in texts if split in {"test", "val"}]
    )


def public_task(path: Path, title: str, chosen: Sequence[str] | None) -> Task:
    """Reads one file of "label: text" of the corpus; the last forty of each label are asked."""
    by_label: dict[str, list[str]] = {}
    with lzma.open(path, "rt", encoding="utf-8") as file:
        for document in file.read().split("\n\n"):
            label, _, text = document.partition(": ")
            by_label.setdefault(label.replace("_", " ").replace("-", " "), []).append(_cut(text.split("\n")[0]))
    coins = random.Random(3)
    large = sorted(label for label, texts in by_label.items() if len(texts) > 60)
    labels = tuple(coins.sample(large, 10) if chosen is None else chosen)
    for label in labels:
        random.Random(1).shuffle(by_label[label])
    asked = [(text, place) for place, label in enumerate(labels) for text in by_label[label][-40:]]
    return Task(title, labels, {label: by_label[label][:-40] for label in labels}, asked)


def _cut(text: str) -> str:
    return text.replace("\n", " ")[:MOST_CHARACTERS]


def _prompt(examples: Sequence[tuple[str, str]], question: str) -> str:
    return "".join(f"Text: {text}\nTopic: {label}\n\n" for text, label in examples) + f"Text: {question}\nTopic:"


def _shares(scores: Floats) -> Floats:
    shares = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.asarray(shares / shares.sum(axis=1, keepdims=True))


# ---- parts


def labels(task: Task, questions: int, seeds: int) -> None:
    """Prints the accuracy of label likelihood, raw and calibrated by "N/A", and how sure the model is of its best."""
    model, choices = EmbeddedModel(), [f" {label}" for label in task.labels]
    for shots in (0, 1, 4):
        found: list[tuple[float, ...]] = []
        for seed in range(seeds):
            asked, coins = task.questions(questions, seed), random.Random(seed)
            drawn = [task.balanced(shots, coins) for _ in asked]
            raw = model.score_choices(
                [_prompt(shown, text) for shown, (text, _) in zip(drawn, asked, strict=True)], choices
            )
            free = model.score_choices([_prompt(shown, "N/A") for shown in drawn], choices)
            right = np.array([place for _, place in asked])
            found.append(
                tuple(
                    value
                    for scores in (raw, raw - free)
                    for value in ((scores.argmax(axis=1) == right).mean(), _shares(scores).max(axis=1).mean())
                )
            )
        accuracy, sure, calibrated, calibrated_sure = np.mean(found, axis=0)
        print(
            f"{task.title:10} {len(task.labels):3} labels, {shots} shots: right {accuracy:.2f} (says {sure:.2f}), "
            f"calibrated {calibrated:.2f} (says {calibrated_sure:.2f})",
            flush=True,
        )


def correlation(right: Floats) -> float:
    """Returns the intraclass correlation of right float64[questions, rows]: 1 if the rows of a question are all alike.

    Where every row is right, or none is, there is nothing to compare: nan.
    """
    if right.min() == right.max():
        return math.nan
    number = right.shape[1]
    shares = right.mean(axis=1)
    between = number * ((shares - shares.mean()) ** 2).sum() / (len(shares) - 1)
    within = (shares * (1 - shares)).sum() * number / (len(shares) * (number - 1))
    return float((between - within) / (between + (number - 1) * within))


def rows(task: Task, questions: int, seeds: int, number: int = 16) -> None:
    """Prints how often rows of random records are right, how alike they are, and what their majority is worth."""
    model, choices = EmbeddedModel(), [f" {label}" for label in task.labels]
    everything = [(text, label) for label in task.labels for text in task.shown[label]]
    for shots in (1, 4):
        found = []
        for seed in range(seeds):
            coins = random.Random(seed)
            right = np.array(
                [
                    model.score_choices(
                        [_prompt(coins.sample(everything, shots), text) for _ in range(number)], choices
                    ).argmax(axis=1)
                    == place
                    for text, place in task.questions(questions // 4, seed)
                ],
                dtype=np.float64,
            )
            found.append((right.mean(), correlation(right), (right.mean(axis=1) > 0.5).mean()))
        share, alike, majority = np.mean(found, axis=0)
        print(
            f"{task.title:10} rows of {shots} random records: right {share:.2f}, correlation {alike:.2f}, "
            f"majority right {majority:.2f}",
            flush=True,
        )


def leaks(task: Task, questions: int, seeds: int) -> None:
    """Prints how often a prompt without noise goes on with the first fifty characters of one of its records."""
    model = EmbeddedModel()
    for size in (1, 4, 15):
        repeated = asked = 0
        for seed in range(seeds):
            coins = random.Random(seed)
            own = [
                (label, coins.sample(task.shown[label], size))
                for label in task.labels
                for _ in range(max(1, questions // len(task.labels)))
                if len(task.shown[label]) >= size
            ]
            prompts = [
                "".join(f"Topic: {label}\nText: {text}\n\n" for text in texts) + f"Topic: {label}\nText:"
                for label, texts in own
            ]
            written = model.complete(prompts, max_tokens=60)
            repeated += sum(
                any(text[:50].strip() in found for text in texts)
                for (_, texts), found in zip(own, written, strict=True)
            )
            asked += len(own)
        print(f"{task.title:10} prompts of {size:2} records repeat one: {repeated / asked:.3f} of {asked}", flush=True)


def near(task: Task, questions: int, seeds: int) -> None:
    """Prints how many of the five nearest of 1,000 texts have the same label, by `LocalEmbeddings`."""
    embeddings, shares = LocalEmbeddings(), []
    everything = [(text, place) for place, label in enumerate(task.labels) for text in task.shown[label]]
    for seed in range(seeds):
        asked = task.questions(questions // 3, seed)
        drawn = random.Random(seed).sample(everything, min(1000, len(everything)))
        texts = np.array(embeddings.embed_documents([text for text, _ in drawn]))
        queries = np.array(embeddings.embed_documents([text for text, _ in asked]))
        nearest = np.argsort(-(queries @ texts.T), axis=1, kind="stable")[:, :5]
        places = np.array([place for _, place in drawn])
        shares.append((places[nearest] == np.array([place for _, place in asked])[:, None]).mean())
    print(f"{task.title:10} nearest texts of the same label: {statistics.mean(shares):.3f}", flush=True)


def writing(task: Task, questions: int, seeds: int, tokens: int = 15, shots: int = 2) -> None:
    """Prints the calibrated accuracy of private demonstrations beside zero-shot and real records of their length."""
    model = EmbeddedLLM()
    records = [{"text": text, "label": label} for label in task.labels for text in task.shown[label]]
    random.Random(0).shuffle(records)
    records = records[:RECORDS]
    size = 10 ** (len(str(len(records))) - 1)
    public_size = len(records) // size * size
    lines: dict[str, list[float]] = {}

    def judge(method: str, examples: Sequence[dict[str, str]], asked: Sequence[tuple[str, int]]) -> None:
        safe = [{name: value.replace("{", "(").replace("}", ")") for name, value in one.items()} for one in examples]
        prompt = DPFewShotPromptTemplate(examples=safe, example_prompt=EXAMPLE, suffix=SUFFIX)
        classifier = LabelClassifier(model, labels=task.labels, prompt=prompt, answers=LabelAnswers(calibrate=True))
        answers = classifier.batch([text for text, _ in asked])
        right = [answer == task.labels[place] for answer, (_, place) in zip(answers, asked, strict=True)]
        lines.setdefault(method, []).append(statistics.mean(right))

    for seed in range(seeds):
        asked, coins = task.questions(questions, seed), random.Random(seed)
        judge("zero-shot", [], asked)
        real = [{"text": text, "label": label} for text, label in task.balanced(shots, coins)]
        judge("real records", real, asked)
        words = round(0.7 * tokens)
        judge("real, cut", [{**one, "text": " ".join(one["text"].split()[:words])} for one in real], asked)
        for epsilon in (1.0, 4.0):
            private = PrivateExamples(records, label_key="label", labels=task.labels, public_size=public_size)
            made = DPFewShotPromptTemplate.from_private_examples(
                private,
                llm=model,
                budget=PrivacyBudgetCallbackHandler(epsilon=epsilon, delta=1e-5),
                epsilon=epsilon,
                max_tokens=tokens,
                shots_per_label=shots,
                example_prompt=EXAMPLE,
                suffix=SUFFIX,
            )
            judge(f"epsilon {epsilon:g}", made.examples or [], asked)
    for method, found in lines.items():
        print(
            f"{task.title:10} {method:14} {statistics.mean(found):.3f} ({min(found):.2f} to {max(found):.2f})",
            flush=True,
        )


def speed(task: Task) -> None:
    """Prints prompts opened per second, rows of open prompts per second, and labels per second."""
    started = time.perf_counter()
    with resources.as_file(resources.files("langchain_dpicl.backends") / "data" / "model.npz") as shipped:
        ModelTables(shipped)
    print(f"tables loaded in {time.perf_counter() - started:.2f} s")
    model, coins, domain = EmbeddedModel(), random.Random(0), list(range(300, 400))
    label = task.labels[0]
    texts = [text[:90] for text in coins.sample(task.shown[label], 80)]
    prompts = [f"Topic: {label}\nText: {text}\n\n" * 2 + f"Topic: {label}\nText:" for text in texts]
    asked = [_prompt(task.balanced(4, coins), text) for text, _ in task.questions(128, 0)]
    opened, going, scored = [], [], []
    for _ in range(5):
        begun = time.perf_counter()
        session = model.open(prompts)
        session.score(domain)
        opened.append(len(prompts) / (time.perf_counter() - begun))
        begun = time.perf_counter()
        for token in range(400, 415):
            session.push(token)
            session.score(domain)
        going.append(15 * len(prompts) / (time.perf_counter() - begun))
        begun = time.perf_counter()
        model.score_choices(asked, [f" {one}" for one in task.labels])
        scored.append(len(asked) / (time.perf_counter() - begun))
    print(
        f"{task.title:10} per second, best of 5: {max(opened):,.0f} prompts opened, {max(going):,.0f} rows of open "
        f"prompts, {max(scored):,.0f} prompts of 4 shots per label"
    )


PARTS: dict[str, Callable[[Task, int, int], None]] = {
    "labels": labels,
    "rows": rows,
    "leaks": leaks,
    "near": near,
    "writing": writing,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the parts that were asked for on every data set."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, nargs="*", default=[], help="labelled data sets")
    parser.add_argument("--corpus", type=Path, help="folder of the public corpus, for the public tasks")
    parser.add_argument("--questions", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--parts", default=",".join([*PARTS, "speed"]))
    options = parser.parse_args(arguments)
    tasks = [labelled_task(path) for path in options.data]
    if options.corpus is not None:
        tasks.append(public_task(options.corpus / "opentrivia.txt.xz", "trivia", TRIVIA))
        tasks.append(public_task(options.corpus / "banking77.txt.xz", "banking77", None))
    for part in options.parts.split(","):
        print(f"\n== {part}", flush=True)
        for task in tasks if part != "speed" else tasks[-1:]:
            if part == "speed":
                speed(task)
            else:
                PARTS[part](task, options.questions, options.seeds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
