"""What the PromptPATE benchmark teaches: settings, public inputs, published numbers.

A setting is a private data set and where its public inputs come from: the same data set, or another one.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from _voting_task import Task, load, plain, read_rows

from langchain_dpicl import PrivateExamples

OTHER_TITLES = {"ood_imdb": "IMDb", "ood_qqp_questions": "QQP", "agnews": "AGNews"}


class Published(NamedTuple):
    """What Duan et al. (2023) print: an epsilon that does not hold, and percent right.

    Attributes:
      epsilon: their data-dependent epsilon.
      accuracy: of the student.
      zero: of the model with the instruction alone.
      best: of the best private demonstration, without privacy.
      ensemble: of the teachers' votes without noise.
    """

    epsilon: float
    accuracy: float
    zero: float
    best: float
    ensemble: float


PUBLISHED: Mapping[str, Published] = {
    "SST-2": Published(0.178, 88.8, 76.3, 93.8, 90.0),
    "SST-2 <- IMDb": Published(0.187, 87.2, 76.3, 93.8, 90.0),
    "AGNews": Published(0.248, 71.7, 62.0, 78.2, 72.8),
    "AGNews <- ARISE": Published(0.258, 67.9, 62.0, 78.2, 72.8),
    "TREC": Published(0.281, 52.8, 40.7, 58.7, 57.6),
    "TREC <- QQP": Published(0.293, 50.9, 40.7, 58.7, 57.6),
    "DBPedia": Published(0.194, 80.3, 44.2, 85.6, 81.6),
    "DBPedia <- AGNews": Published(0.203, 74.6, 44.2, 85.6, 81.6),
}
"""By setting: 200 one-shot teachers of GPT-3 Babbage, 500 public inputs, delta 1e-6, student of one demonstration
(Table 2)."""

PUBLISHED_CURIE: Mapping[str, Published] = {
    "SST-2": Published(0.147, 92.3, 82.0, 95.2, 94.0),
    "SST-2 <- IMDb": Published(0.154, 92.7, 82.0, 95.2, 94.0),
}
"""The same with GPT-3 Curie (Table 2)."""

PUBLISHED_FOUR_SHOTS: Mapping[str, Published] = {
    "AGNews": Published(0.145, 73.5, 62.0, 81.0, 75.8),
    "AGNews <- ARISE": Published(0.145, 69.6, 62.0, 81.0, 75.8),
}
"""The same with teachers of four demonstrations, GPT-3 Babbage (Table 2)."""

PUBLISHED_TEXT: Mapping[str, Published] = {
    "SST-2": Published(0.048, 95.7, 92.7, 98.0, 96.0),
    "AGNews": Published(0.056, 74.6, 72.4, 82.7, 79.1),
    "TREC": Published(0.068, 79.3, 69.0, 82.2, 79.9),
    "DBPedia": Published(0.042, 90.9, 88.0, 93.5, 92.4),
}
"""By data set: 400 teachers of Claude, which gives text alone, 200 public inputs; 2, 2, 4 and 1 shots (Table 3)."""


@dataclass(frozen=True)
class Inputs:
    """Public inputs of one repeat.

    Attributes:
      texts: the inputs, no two alike.
      truths: place of the right label of each; None where nobody has given one.
      private: the records that stay private: without those that were held back as public inputs.
      source: where the inputs come from.
    """

    texts: tuple[str, ...] = field(repr=False)
    truths: tuple[int | None, ...] = field(repr=False)
    private: list[dict[str, str]] = field(repr=False)
    source: str


@dataclass(frozen=True)
class Setting:
    """A private data set and the source of its public inputs.

    Attributes:
      task: records, questions for students, labels, wording.
      name: what tables show.
      rows: of the file with the private data.
      other: rows of another file, which gives the public inputs; None: the same file does.
      most_chars: public inputs are cut to so many characters.
    """

    task: Task
    name: str
    rows: Sequence[Mapping[str, Any]] = field(repr=False)
    other: Sequence[Mapping[str, Any]] | None = field(repr=False)
    most_chars: int

    def inputs(self, count: int, *, seed: int) -> Inputs:
        """Draws 1 to `count` public inputs with a public seed; never a text that is a question or a private record.

        Of the same file: from "dev", or what is left of "test", or held back from the private records: the first of
        these that has enough.
        """
        coins = random.Random(f"inputs {seed}")
        if self.other is not None:
            found = self._distinct(self.other, "train", coins)
            if not found:
                raise SystemExit(f"{self.name}: no public inputs: expected rows of train with texts of their own")
            return self._made(found[:count], self.task.records, "another data set")
        for split in ("dev", "test"):
            if len(found := self._distinct(self.rows, split, coins)) >= count:
                return self._made(found[:count], self.task.records, split)
        order = coins.sample(self.task.records, len(self.task.records))
        asked = set(self.task.questions)
        distinct = {record["text"]: record for record in order if record["text"] not in asked}
        held = list(distinct.values())[: min(count, len(order) // 2)]
        texts = {record["text"] for record in held}
        left = [record for record in self.task.records if record["text"] not in texts]
        return self._made([(row["text"], row["label"]) for row in held], left, "held back from train")

    def _distinct(
        self, rows: Sequence[Mapping[str, Any]], split: str, coins: random.Random
    ) -> list[tuple[str, str | None]]:
        """Returns the distinct texts of a split with their labels, in a drawn order."""
        names = {str(row["label"]): plain(row)["label"] for row in self.rows if "label" in row}
        taken = {record["text"] for record in self.task.records} | set(self.task.questions)
        found: dict[str, str | None] = {}
        for row in rows:
            text = str(row["text"])[: self.most_chars]
            if row.get("split") == split and text not in taken:
                label = row.get("label_name", names.get(str(row.get("label"))))
                found.setdefault(text, None if label is None else str(label))
        return coins.sample(list(found.items()), len(found))

    def _made(self, found: Sequence[tuple[str, str | None]], private: list[dict[str, str]], source: str) -> Inputs:
        places: dict[str | None, int] = {label: place for place, label in enumerate(self.task.labels)}
        truths = tuple(places.get(label) for _, label in found)
        return Inputs(tuple(text for text, _ in found), truths, private, source)


def setting(
    path: Path, other: Path | None, *, questions: int, cap: int, seed: int, words: Mapping[str, str], most_chars: int
) -> Setting:
    """Reads the private data set, and the other one that gives public inputs, where there is one."""
    task = load(path, cap=cap, questions=questions, seed=seed, words=words)
    if other is None:
        return Setting(task, task.title, read_rows(path), None, most_chars)
    stem = other.name.partition(".")[0]
    name = f"{task.title} <- {OTHER_TITLES.get(stem, stem)}"
    return Setting(replace(task, title=name), name, read_rows(path), read_rows(other), most_chars)


def holder(task: Task, records: Sequence[Mapping[str, str]], *, dataset_id: str) -> PrivateExamples:
    """Returns a fresh holder of records."""
    return PrivateExamples(
        records,
        label_key="label",
        labels=task.labels,
        public_size=len(records),
        exact_size_is_public=True,
        dataset_id=dataset_id,
    )
