"""What noisy votes choose, and what chance would have: private evolution over a public corpus, offline.

The muse is no language model: its "variation" of a survivor is another text of the public corpus, drawn from those
nearest to it, so the model's part is neither good nor bad and what is measured is the votes. Reads gzipped JSON lines
with `text`, `label_name` and `split` ("train" votes, "test" is measured) and a public corpus without labels.

Two numbers per setting, mean and standard deviation over runs: the mean cosine of a test text to the nearest
demonstration of its own label, and how often the nearest demonstration of all has the right label.

    python benchmarks/bench_evolution.py --data trec.jsonl.gz --public ood_qqp_questions.jsonl.gz
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from langchain_core.embeddings import Embeddings
from langchain_core.runnables import RunnableLambda

from langchain_dpicl import Budget, Noise, PrivateEvolution, PrivateExamples
from langchain_dpicl.backends import LocalEmbeddings
from langchain_dpicl.options import Evolution

NEAR = 12
"""Public texts among which a variation is drawn."""


class Looked(Embeddings):
    """`LocalEmbeddings`, computed before anything is measured."""

    def __init__(self, texts: Sequence[str]) -> None:
        rows = np.array(LocalEmbeddings().embed_documents(list(texts)))
        rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
        self.table = dict(zip(texts, rows, strict=True))

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Looks texts up; what is new is embedded."""
        missing = [text for text in texts if text not in self.table]
        new = dict(zip(missing, LocalEmbeddings().embed_documents(missing), strict=True))
        return [new[text] if text in new else self.table[text].tolist() for text in texts]

    def embed_query(self, text: str) -> list[float]:
        """Looks one text up."""
        return self.embed_documents([text])[0]


def rows_of(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def muse_of(corpus: Sequence[str], looked: Looked, seed: int) -> RunnableLambda[Any, str]:
    """A public text for the first candidates, and a neighbour of the survivor for a variation."""
    coins = random.Random(seed)
    matrix = np.array([looked.table[text] for text in corpus])

    def say(prompt: str) -> str:
        if "Rewrite" not in prompt:
            return coins.choice(corpus)
        survivor = prompt.split("\ntext: ", 1)[1].split("\n\nAnother", 1)[0]
        near = np.argsort(-(matrix @ looked.table[survivor]))[: NEAR + 1]
        return corpus[int(coins.choice(list(near)))]

    return RunnableLambda(say)


def measured(examples: Sequence[dict[str, str]], test: Sequence[dict[str, str]], looked: Looked) -> tuple[float, float]:
    """Returns the mean cosine to the nearest demonstration of the own label, and the share of right nearest ones."""
    shown = np.array([looked.table[example["text"]] for example in examples])
    labels = np.array([example["label_name"] for example in examples])
    near, right = [], []
    for row in test:
        cosine = shown @ looked.table[row["text"]]
        near.append(float(cosine[labels == row["label_name"]].max()))
        right.append(bool(labels[int(cosine.argmax())] == row["label_name"]))
    return statistics.mean(near), statistics.mean(right)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--public", type=Path, required=True)
    parser.add_argument("--corpus", type=int, default=4_000, help="public texts that are used")
    parser.add_argument("--min-size", type=int, default=500, help="labels with fewer records are dropped")
    parser.add_argument("--max-words", type=int, default=40, help="words kept of every text")
    parser.add_argument("--epsilon", type=float, nargs="+", default=[0.5, 1.0, 2.0, 4.0])
    parser.add_argument("--delta", type=float, default=1e-6)
    parser.add_argument("--rounds", type=int, nargs="+", default=[1, 5])
    parser.add_argument("--shots", type=int, default=4)
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()

    def cut(text: str) -> str:
        return " ".join(text.split()[: arguments.max_words])

    rows = [
        {"text": cut(row["text"]), "label_name": str(row.get("label_name", row["label"])), "split": row["split"]}
        for row in rows_of(arguments.data)
    ]
    sizes = Counter(row["label_name"] for row in rows if row["split"] == "train")
    labels = tuple(sorted(label for label, size in sizes.items() if size >= arguments.min_size))
    train = [row for row in rows if row["split"] == "train" and row["label_name"] in labels]
    test = [row for row in rows if row["split"] == "test" and row["label_name"] in labels][:500]
    corpus = list(dict.fromkeys(cut(row["text"]) for row in rows_of(arguments.public)))[: arguments.corpus]
    declared = {label: sizes[label] for label in labels}
    looked = Looked(list(dict.fromkeys([*(row["text"] for row in [*train, *test]), *corpus])))
    print(f"{len(train)} private, {len(test)} test, {len(corpus)} public texts, labels {dict(sizes)}")

    def told(name: str, found: list[tuple[float, float]], noise: str = "-") -> None:
        numbers = [[100 * value for value in column] for column in zip(*found, strict=True)]
        shown = "  ".join(f"{statistics.mean(c):5.1f} +- {statistics.pstdev(c):3.1f}" for c in numbers)
        print(f"{name:<32}{noise:>8}  {shown}", flush=True)

    def at_random(pool: Any, seed: int) -> list[dict[str, str]]:
        coins = random.Random(seed)
        return [
            {"text": text, "label_name": label}
            for label in labels
            for text in coins.sample(pool(label), arguments.shots)
        ]

    print(f"{'demonstrations':<32}{'noise':>8}  cosine to own  right label (%)")
    seeds = range(arguments.runs)
    told("public texts at random", [measured(at_random(lambda _: corpus, seed), test, looked) for seed in seeds])
    own = {label: [row["text"] for row in train if row["label_name"] == label] for label in labels}
    told("private texts (no privacy)", [measured(at_random(own.get, seed), test, looked) for seed in seeds])
    for rounds in arguments.rounds:
        for epsilon in [*arguments.epsilon, None]:
            found, noise = [], 0.0
            for run in seeds:
                evolution = PrivateEvolution.from_private_examples(
                    PrivateExamples(train, label_key="label_name", labels=labels, public_size=declared),
                    llm=muse_of(corpus, looked, run),
                    embeddings=looked,
                    budget=Budget(epsilon=1e9 if epsilon is None else epsilon, delta=arguments.delta),
                    epsilon=9e8 if epsilon is None else epsilon,
                    noise=Noise(multiplier=1e-3) if epsilon is None else None,
                    evolution=Evolution(rounds=rounds),
                    shots_per_label=arguments.shots,
                )
                noise = evolution.plan.noise_multiplier
                found.append(measured(evolution.run(progress=False).examples, test, looked))
            told(f"{rounds} round(s), epsilon {epsilon or 'infinity'}", found, f"{noise:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
