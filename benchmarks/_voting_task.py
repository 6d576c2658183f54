"""What the benchmarks of votes ask: data sets, their wording, a paper's numbers."""

from __future__ import annotations

import gzip
import json
import math
import random
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl import PrivateExamples
from langchain_dpicl.tasks import FewShotTemplate

MOST_LABELS = 50


@dataclass(frozen=True)
class Wording:
    """How a data set reads in a prompt."""

    title: str
    text: str = "Text"
    label: str = "Label"
    words: Mapping[str, str] = field(default_factory=dict)


WORDINGS = {
    "sst2": Wording("SST-2", "Review", "Sentiment"),
    "agnews": Wording(
        "AGNews",
        "Article",
        "Topic",
        {"Sci/Tech": "technology", "World": "world", "Business": "business", "Sports": "sports"},
    ),
    "trec": Wording(
        "TREC",
        "Question",
        "Answer type",
        {
            "ABBR": "abbreviation",
            "DESC": "description",
            "ENTY": "thing",
            "HUM": "person",
            "LOC": "place",
            "NUM": "number",
        },
    ),
    "dbpedia": Wording(
        "DBPedia",
        "Article",
        "Article type",
        {
            "Company": "company",
            "EducationalInstitution": "school",
            "Artist": "artist",
            "Athlete": "athlete",
            "OfficeHolder": "politician",
            "MeanOfTransportation": "transportation",
            "Building": "building",
            "NaturalPlace": "nature",
            "Village": "village",
            "Animal": "animal",
            "Plant": "plant",
            "Album": "album",
            "Film": "film",
            "WrittenWork": "book",
        },
    ),
    "amazon": Wording("Amazon", "Review", "Sentiment"),
    "rte": Wording("RTE", "Passage", "Answer", {"entailment": "true", "not_entailment": "false"}),
    "cb": Wording("CB", "Passage", "Answer", {"entailment": "true", "contradiction": "false", "neutral": "neither"}),
}
PAIR = "{premise}\nQuestion: {hypothesis} True or false?"
"""How a pair reads as one text; pairs come with "val" in place of "test"."""

PAPER: Mapping[str, Mapping[float, float]] = {
    "SST-2": {0.0: 91.0, 1.0: 95.06, 3.0: 95.80, 8.0: 95.92, math.inf: 96.05},
    "Amazon": {0.0: 91.0, 1.0: 93.83, 3.0: 94.18, 8.0: 94.25, math.inf: 94.26},
    "AGNews": {0.0: 46.0, 1.0: 73.16, 3.0: 78.98, 8.0: 79.77, math.inf: 81.43},
    "TREC": {0.0: 20.0, 1.0: 25.83, 3.0: 26.75, 8.0: 27.18, math.inf: 28.42},
}
"""Accuracy of Panda et al. (2023) in percent by epsilon; 0: zero-shot, infinity: no noise. 4 shots, 10 slots, 10,000
queries, at most 8,000 records, replacement, delta and noise not stated."""


@dataclass(frozen=True)
class Task:
    """A data set, ready to ask.

    Attributes:
      title: its name.
      records: the private records.
      questions: what is asked.
      right: int[questions], place of the right label.
      labels: every label, in the order that breaks ties.
      wording: how prompts read.
      texts: what stands for each label.
    """

    title: str
    records: list[dict[str, str]] = field(repr=False)
    questions: tuple[str, ...] = field(repr=False)
    right: NDArray[np.int64] = field(repr=False)
    labels: tuple[str, ...]
    wording: FewShotTemplate
    texts: tuple[tuple[str, ...], ...]

    def private(self) -> PrivateExamples:
        """Returns the records, in a holder that no ledger protects."""
        return PrivateExamples(
            self.records,
            public_size=len(self.records),
            exact_size_is_public=True,
            fields=("label",),
            dataset_id="benchmark",
        )

    @property
    def commonest(self) -> int:
        """Place of the label that most questions have: the best that can be done without reading them."""
        return int(np.bincount(self.right, minlength=len(self.labels)).argmax())


def load(path: Path, *, cap: int, questions: int, seed: int, words: Mapping[str, str]) -> Task:
    """Reads a file of JSON lines with `text`, `label_name` (or `label`) and `split`: "train" or "test".

    What cannot be read ends the command with one line that says where.

    Which records stand in for the private data, and which questions are asked, is drawn with a public `seed`; nothing
    that protects anybody is.
    """
    rows = labelled_rows(path)
    train, test = ([plain(row) for row in rows if row["split"] == split] for split in ("train", "test"))
    labels = tuple(sorted({row["label"] for row in train}))
    if not train or not test or not 2 <= len(labels) <= MOST_LABELS:
        found = f"{len(train)} rows of train, {len(test)} of test, {len(labels)} labels"
        raise SystemExit(f"{path.name}: expected both splits and 2 to {MOST_LABELS} labels, found {found}")
    coins = random.Random(seed)
    train = coins.sample(train, min(cap, len(train)))
    asked = in_proportion([row for row in test if row["label"] in labels], questions, coins)
    wording = WORDINGS.get(path.name.partition(".")[0], Wording(path.name.partition(".")[0]))
    shown = {label: {**wording.words, **words}.get(label, label) for label in labels}
    return Task(
        title=wording.title,
        records=train,
        questions=tuple(row["text"] for row in asked),
        right=np.array([labels.index(row["label"]) for row in asked]),
        labels=labels,
        wording=_task_wording(wording, shown),
        texts=tuple((f" {shown[label]}",) for label in labels),
    )


def labelled_rows(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of train and test, each with a label; see `read_rows`."""
    rows = [row for row in read_rows(path) if row.get("split") in ("train", "test")]
    if not rows or not all("label_name" in row or "label" in row for row in rows):
        raise SystemExit(
            f"{path.name}: expected rows of train and test with label (or label_name), found none or others"
        )
    return rows


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a file of JSON lines, plain or gzipped; each has a `text`. No message holds a row."""
    rows: list[dict[str, Any]] = []
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as lines:
            rows.extend(_joined(json.loads(line)) for line in lines)
    except ValueError:  # no JSON or no text; a line is named, its content is not
        problem = f"line {len(rows) + 1}: expected one JSON object per line, found something else"
    except (OSError, EOFError, zlib.error) as error:
        problem = f"expected a readable {'gzipped ' * (path.suffix == '.gz')}file, found {type(error).__name__}"
    else:
        wrong = (place for place, row in enumerate(rows, 1) if not isinstance(row, dict) or "text" not in row)
        if (place := next(wrong, None)) is None:
            return rows
        problem = f"line {place}: expected a JSON object with text"
    raise SystemExit(f"{path.name}: {problem}")


def _joined(row: Any) -> Any:
    """Returns a row; a pair of premise and hypothesis as one text, and its "val" as "test"."""
    if not isinstance(row, dict) or not {"premise", "hypothesis"} <= row.keys():
        return row
    split = "test" if row.get("split") == "val" else row.get("split")
    return {**row, "text": PAIR.format(premise=row["premise"], hypothesis=row["hypothesis"]), "split": split}


def in_proportion(rows: list[dict[str, str]], count: int, coins: random.Random) -> list[dict[str, str]]:
    """Returns up to `count` rows, each label with its share of them."""
    ordered = sorted(coins.sample(rows, len(rows)), key=lambda row: row["label"])
    taken = min(count, len(rows))
    return [ordered[place * len(rows) // taken] for place in range(taken)]


def plain(row: Mapping[str, Any]) -> dict[str, str]:
    """Returns text and label of a row."""
    return {"text": str(row["text"]), "label": str(row["label_name"] if "label_name" in row else row["label"])}


def _task_wording(wording: Wording, shown: Mapping[str, str]) -> FewShotTemplate:
    return FewShotTemplate(
        example_prompt=f"{wording.text}: {{text}}\n{wording.label}: {{label}}",
        suffix=f"{wording.text}: {{input}}\n{wording.label}:",
        prefix="",
        separator="\n\n",
        fields=("text", "label"),
        shown={"label": shown},
    )
