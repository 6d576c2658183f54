"""Synthetic documents: are the right topics found, and what is a stock retriever over the texts worth?

Topics: share of the exact top keywords that the noisy histogram finds, by epsilon of the histogram alone. Retrieval:
each test text is a question; the nearest document of a store is looked up, and it is a hit if it is of the question's
class. Synthetic texts have no class: for this measurement alone each gets the commonest one of its nearest test texts
that are not asked. The rows of private documents are not private: give files that are nobody's secret.

    python benchmarks/bench_documents.py                                    # the invented questions of the examples
    python benchmarks/bench_documents.py --data FILE.jsonl.gz [FILE ...] [--json OUT]
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from langchain_dpicl import Budget, DocumentSynthesizer, EmbeddedLLM, PrivateExamples
from langchain_dpicl.backends import LocalEmbeddings
from langchain_dpicl.discovery import public_vocabulary
from langchain_dpicl.documents import DocumentsPlan, choose_topics, plan_documents
from langchain_dpicl.options import Topics
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM

EPSILONS = (0.5, 1.0, 2.0, 4.0)
DELTA = 1e-6
NUM_TOPICS, PER_TOPIC, MAX_TOKENS = 12, 4, 20
WORD_TOPICS = 48
NEIGHBOURS = 9
BANK = Path("bank")
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def texts_in(path: Path) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Returns (text, class) of the private and of the test split, in an order of a public seed."""
    if path == BANK:
        return _bank()
    opener: Any = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    found: tuple[list[tuple[str, str]], list[tuple[str, str]]] = ([], [])
    for row in rows:
        if row["split"] in {"train", "test"}:
            found[row["split"] == "test"].append(
                (row["text"], str(row["label_name"] if "label_name" in row else row["label"]))
            )
    for split in found:
        random.Random(11).shuffle(split)
    return found


def _bank() -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Returns the invented questions to a bank, and ones in other words about other shops and people."""
    spec = importlib.util.spec_from_file_location("bank_questions", EXAMPLES / "bank_questions.py")
    if spec is None or spec.loader is None:
        raise FileNotFoundError(EXAMPLES)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = (module.bank_questions(num_per_label=1_500), module.new_questions(num_per_label=300))
    splits = tuple([(row["text"], row["label"]) for row in rows] for rows in found)
    for split in splits:
        random.Random(11).shuffle(split)
    return splits[0], splits[1]


def recalls(texts: Sequence[str], *, noise: str, draws: int) -> Iterator[tuple[float, float, float]]:
    """Yields (epsilon of the histogram, share of the exact top keywords found, deviation of the noise)."""
    words = public_vocabulary()
    for epsilon in EPSILONS:
        plan = plan_documents(
            words,
            public_size=len(texts),
            documents_per_topic=PER_TOPIC,
            epsilon=2 * epsilon,
            topic_share=0.5,
            delta=DELTA,
            num_topics=NUM_TOPICS,
            topic_noise=noise,  # type: ignore[arg-type]
            least_units=1,
        )
        exact = Counter(keyword for text in texts for keyword in plan.topics.rule.of(({"text": text},)))
        best = {keyword for keyword, _ in exact.most_common(NUM_TOPICS)}
        yield epsilon, statistics.mean(_found(plan, exact, best) for _ in range(draws)), plan.deviation


def _found(plan: DocumentsPlan, exact: Counter[str], best: set[str]) -> float:
    """Returns the share of the best keywords among those of one noisy histogram."""
    release, declared = plan.topics, plan.topics.rule.declared or ()
    given: dict[str, Any] = {"declared": declared, "rng": SYSTEM_RANDOM}
    if release.mechanism.name == "gaussian":
        given |= {"rule": release.rule, "adjacency": release.adjacency}
    else:
        given["l1_sensitivity"] = release.l1_sensitivity
    counts = release.mechanism.release(exact, **given)
    return len(best & {keyword for keyword, _ in choose_topics(counts, plan)}) / len(best)


class Judge:
    """Says which class a text is of, and how often the nearest document is of the question's."""

    def __init__(self, test: Sequence[tuple[str, str]], *, questions: int) -> None:
        self._embeddings = LocalEmbeddings()
        self.questions, judges = test[:questions], test[questions : 4 * questions]
        self._asked = self._vectors([text for text, _ in self.questions])
        self._judges, self._classes = self._vectors([text for text, _ in judges]), [label for _, label in judges]

    def _vectors(self, texts: Sequence[str]) -> np.ndarray:
        found = np.array(self._embeddings.embed_documents(list(texts)))
        lengths: np.ndarray = np.linalg.norm(found, axis=1, keepdims=True)
        return found / np.maximum(lengths, 1e-12)

    def score(self, texts: Sequence[str], labels: Sequence[str] | None = None) -> tuple[float, float]:
        """Returns the hit rate and the mean similarity of the nearest document, in percent."""
        vectors = self._vectors(texts)
        own = [self._class_of(vector) for vector in vectors] if labels is None else labels
        near = self._asked @ vectors.T  # [questions, documents]
        best = near.argmax(axis=1)
        hits = [own[place] == label for place, (_, label) in zip(best, self.questions, strict=True)]
        return 100 * statistics.mean(hits), 100 * float(near.max(axis=1).mean())

    def _class_of(self, vector: np.ndarray) -> str:
        near = np.argsort(-(self._judges @ vector), kind="stable")[:NEIGHBOURS]
        return Counter(self._classes[place] for place in near).most_common(1)[0][0]


def synthetic(texts: Sequence[str], *, epsilon: float) -> tuple[list[str], list[str]]:
    """Returns the texts and the topics of one store."""
    made = DocumentSynthesizer.from_private_examples(
        PrivateExamples(texts, public_size=len(texts), exact_size_is_public=True, max_chars=400),
        llm=EmbeddedLLM(),
        budget=Budget(epsilon=epsilon, delta=DELTA),
        epsilon=epsilon,
        topics=Topics(public_vocabulary(), NUM_TOPICS),
        documents_per_topic=PER_TOPIC,
        max_tokens=MAX_TOKENS,
    )
    found = made.run(progress=False)
    return [text.text for text in found.texts if text.text], [topic for topic, _ in found.topics]


def of_words(texts: Sequence[str], *, epsilon: float, vocabulary: Sequence[str] | None) -> list[str]:
    """Returns the documents of a store of released words, with topics of a public vocabulary or released ones."""
    made = DocumentSynthesizer.from_private_examples(
        PrivateExamples(texts, public_size=len(texts), exact_size_is_public=True, max_chars=400),
        topics=Topics(None if vocabulary is None else tuple(vocabulary), WORD_TOPICS),
        documents_per_topic=0,
        budget=Budget(epsilon=epsilon, delta=DELTA),
        epsilon=epsilon,
    )
    return [document.page_content for document in made.run(progress=False).documents]


def from_instruction(topics: Sequence[str]) -> list[str]:
    """Returns as many texts for the same topics from the model alone: no record is read."""
    model = EmbeddedLLM(max_tokens=MAX_TOKENS, stop=["\n"], temperature=1.0)
    asked = [
        f"Write a text for the given topic.\n\ntopic: {topic}\ntext:" for topic in topics for _ in range(PER_TOPIC)
    ]
    return [text.strip() or "nothing" for text in model.batch(asked)]


def retrieval(path: Path, *, size: int, questions: int, draws: int) -> Iterator[dict[str, Any]]:
    """Yields the rows of one file."""
    private, test = texts_in(path)
    private, judge = private[:size], Judge(test, questions=questions)
    texts, labels = [text for text, _ in private], [label for _, label in private]
    few, topics = NUM_TOPICS * PER_TOPIC, list[str]()
    hits, near = judge.score(texts, labels)
    yield {
        "store": f"all {len(texts)} private documents (not private)",
        "hits": [hits],
        "near": [near],
        "documents": size,
    }
    drawn = [judge.score(texts[few * k : few * (k + 1)], labels[few * k : few * (k + 1)]) for k in range(draws)]
    yield {"store": f"{few} of them (not private)", **_columns(drawn), "documents": few}
    for epsilon in EPSILONS:
        scores, sizes = [], []
        for _ in range(draws):
            written, topics = synthetic(texts, epsilon=epsilon)
            sizes.append(len(written))
            scores.append(judge.score(written) if written else (0.0, 0.0))
        yield {"store": f"synthetic, epsilon {epsilon:g}", **_columns(scores), "documents": statistics.mean(sizes)}
    for name, vocabulary in (("released", None), ("public", public_vocabulary())):
        for epsilon in EPSILONS:
            stores = [of_words(texts, epsilon=epsilon, vocabulary=vocabulary) for _ in range(draws)]
            yield {
                "store": f"words, {name} topics, epsilon {epsilon:g}",
                **_columns([judge.score(store) if store else (0.0, 0.0) for store in stores]),
                "documents": statistics.mean(map(len, stores)),
            }
    common_words = list(public_vocabulary(size=NUM_TOPICS))
    for name, words in (("the topics of epsilon 4", topics or common_words), ("public topics, no data", common_words)):
        yield {
            "store": f"instruction only, {name}",
            **_columns([judge.score(from_instruction(words)) for _ in range(draws)]),
            "documents": few,
        }
    common = max(Counter(label for _, label in judge.questions).values()) / questions
    yield {"store": "always the commonest class", "hits": [100 * common], "near": [0.0], "documents": 0}


def _columns(scores: Sequence[tuple[float, float]]) -> dict[str, list[float]]:
    return {"hits": [hit for hit, _ in scores], "near": [near for _, near in scores]}


def _show(values: Sequence[float]) -> str:
    spread = f" +- {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{spread}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, nargs="+", default=[BANK], help="JSON lines: text, label_name, split")
    parser.add_argument("--size", type=int, default=4_000, help="private documents taken (default 4000)")
    parser.add_argument("--questions", type=int, default=300)
    parser.add_argument("--draws", type=int, default=3, help="runs of each store")
    parser.add_argument("--json", type=Path, help="file for all numbers")
    options = parser.parse_args(argv)
    out: dict[str, Any] = {}
    for path in options.data:
        name, start = path.name.split(".")[0], time.monotonic()
        texts = [text for text, _ in texts_in(path)[0][: options.size]]
        print(
            f"{name}: {len(texts)} private documents\n  {'epsilon of the histogram':<28}",
            *(f"{e:>10g}" for e in EPSILONS),
        )
        for noise in ("discrete_laplace", "gaussian"):
            found = list(recalls(texts, noise=noise, draws=30))
            out[f"{name} topics {noise}"] = found
            print(f"  {noise:<28}", *(f"{100 * share:>6.0f} %  " for _, share, _ in found))
        rows = list(retrieval(path, size=len(texts), questions=options.questions, draws=options.draws))
        out[f"{name} retrieval"] = rows
        for row in rows:
            print(f"  {row['store']:<46} {_show(row['hits']):>14} {_show(row['near']):>14} {row['documents']:>8.0f}")
        print(f"  {time.monotonic() - start:.0f} s")
    if options.json is not None:
        options.json.write_text(json.dumps(out, indent=2))


if __name__ == "__main__":
    main()
