"""Data sets of the tables: labelled texts, or texts with a slot to fill.

Which records stand in for the private data, which questions are asked and in which order is drawn with a public seed.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import bench_trec
from _pate_task import Setting, setting
from _voting_task import MOST_LABELS, WORDINGS, Task, Wording, labelled_rows, load, plain, read_rows

from langchain_dpicl import PrivateExamples
from langchain_dpicl.tasks import FewShotTemplate

LABELS, SLOTS = "labels", "slots"
INSTRUCTIONS: Mapping[str, str] = {
    "sst2": "Film reviews and their sentiment.",
    "trec": "Questions and the kind of answer they ask for.",
    "agnews": "News articles and their topics.",
    "dbpedia": "Articles of an encyclopedia and what each one is about.",
    "amazon": "Reviews of products and their sentiment.",
    "rte": "Passages, each with a statement that follows from it or does not.",
    "mit_g": "Sentences about films and the genre that they name.",
    "mit_d": "Sentences about films and the director that they name.",
}
OTHER_INSTRUCTION = "Short texts and their labels."
SLOT_WORDINGS: Mapping[str, Wording] = {
    "mit_g": Wording("MIT-G", "Sentence", "Genre"),
    "mit_d": Wording("MIT-D", "Sentence", "Director"),
}
_MOST_CHARS = 400


@dataclass(frozen=True)
class DataFile:
    """A file of the tables, read once to see what it is.

    Attributes:
      path: where it is.
      kind: "labels" or "slots".
      title: its name in the tables.
      digest: of its bytes: another file, other cells.
      train: rows of "train"; records can be fewer, by a method's cap.
      test: rows of "test" that can be asked.
      commonest: share of the commonest answer among those.
      words: labels that read as other words.
    """

    path: Path
    kind: str
    title: str
    digest: str
    train: int
    test: int
    commonest: float
    words: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def stem(self) -> str:
        """The name that cells have it by."""
        return self.path.name.partition(".")[0]

    @property
    def instruction(self) -> str:
        """What stands first where an instruction does."""
        return INSTRUCTIONS.get(self.stem, OTHER_INSTRUCTION)


@dataclass(frozen=True)
class SlotTask:
    """Texts in which something is to be found.

    Attributes:
      title: the data set's name.
      records: private records with "text" and "slot".
      questions: what is asked.
      right: what is to be found in each.
      wording: how prompts read.
    """

    title: str
    records: list[dict[str, str]] = field(repr=False)
    questions: tuple[str, ...] = field(repr=False)
    right: tuple[str, ...] = field(repr=False)
    wording: FewShotTemplate

    def private(self) -> PrivateExamples:
        """Returns the records, in a holder that no ledger protects."""
        return PrivateExamples(
            self.records,
            public_size=len(self.records),
            exact_size_is_public=True,
            fields=("slot",),
            dataset_id="benchmark",
        )


def data_file(path: Path, *, words: Mapping[str, str]) -> DataFile:
    """Reads a file of the format and says what it is.

    Raises:
      SystemExit: it cannot be read, or has no "train" and "test" with answers. No message holds a row.
    """
    if not path.is_file():
        raise SystemExit(f"no data file at {path}: give one with --data FILE.jsonl.gz")
    rows = labelled_rows(path)
    answers = {
        split: Counter(plain(row)["label"] for row in rows if row["split"] == split) for split in ("train", "test")
    }
    kind = LABELS if len(answers["train"]) <= MOST_LABELS else SLOTS
    if kind == LABELS:
        # What the methods will refuse is refused now, before the first cell.
        load(path, cap=10**9, questions=1, seed=0, words=words)
        answers["test"] = Counter({name: n for name, n in answers["test"].items() if name in answers["train"]})
    if not answers["test"] or not answers["train"]:
        raise SystemExit(f"{path.name}: expected rows of both train and test, found one of them")
    stem, size = path.name.partition(".")[0], sum(answers["test"].values())
    title = {**WORDINGS, **SLOT_WORDINGS}.get(stem, Wording(stem)).title
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    share = max(answers["test"].values()) / size
    return DataFile(path, kind, title, digest, sum(answers["train"].values()), size, share, words)


def labelled(file: DataFile, *, questions: int, seed: int, cap: int) -> Task:
    """Returns a labelled task with the seed's records and questions."""
    return load(file.path, cap=cap, questions=questions, seed=seed, words=file.words)


def labelled_setting(file: DataFile, *, questions: int, seed: int, cap: int) -> Setting:
    """Returns a labelled task and its public inputs, from the same file."""
    options = {"questions": questions, "cap": cap, "seed": seed, "most_chars": _MOST_CHARS}
    return setting(file.path, None, words=file.words, **options)


def generation_task(task: Task, *, min_size: int) -> bench_trec.Task:
    """Returns a task whose labels split the records; labels with fewer records than `min_size` are left out."""
    shown = [texts[0].strip() for texts in task.texts]
    names = dict(zip(task.labels, shown, strict=True))
    sizes = Counter(names[record["label"]] for record in task.records)
    kept = tuple(sorted(name for name, size in sizes.items() if size >= min_size))
    if len(kept) < 2:
        raise SystemExit(f"{task.title}: expected two labels of {min_size} records or more, found {len(kept)}")
    train = [{"text": one["text"], "label_name": names[one["label"]]} for one in task.records]
    asked = zip(task.questions, task.right, strict=True)
    test = [{"text": text, "label_name": shown[place]} for text, place in asked]
    return bench_trec.Task(
        [row for row in train if row["label_name"] in kept],
        [row for row in test if row["label_name"] in kept],
        kept,
        {name: sizes[name] for name in kept},
        {name: size for name, size in sizes.items() if name not in kept},
    )


def slot_task(file: DataFile, *, questions: int, seed: int, cap: int) -> SlotTask:
    """Returns a slot task with the seed's records and questions."""
    rows = read_rows(file.path)
    coins = random.Random(seed)
    train, test = ([plain(row) for row in rows if row.get("split") == split] for split in ("train", "test"))
    train = coins.sample(train, min(cap, len(train)))
    asked = coins.sample(test, min(questions, len(test)))
    words = SLOT_WORDINGS.get(file.stem, Wording(file.stem))
    return SlotTask(
        title=file.title,
        records=[{"text": row["text"], "slot": row["label"]} for row in train],
        questions=tuple(row["text"] for row in asked),
        right=tuple(row["label"] for row in asked),
        wording=FewShotTemplate(
            example_prompt=f"{words.text}: {{text}}\n{words.label}: {{slot}}",
            suffix=f"{words.text}: {{input}}\n{words.label}:",
            prefix="",
            separator="\n\n",
            fields=("text", "slot"),
        ),
    )


def normal(text: str) -> str:
    """Returns an answer as it is compared: small letters, one space between words, nothing around them.

    >>> normal("  Stanley  Kubrick. ")
    'stanley kubrick'
    """
    return re.sub(r"\s+", " ", text.lower()).strip(" .,;:!?\"'")


def exact(answer: str, right: str) -> float:
    """Returns 1 where an answer is what was to be found."""
    return float(normal(answer) == normal(right))


def overlap(answer: str, right: str) -> float:
    """Returns the F1 of an answer's words and the right ones.

    >>> overlap("british horror", "horror")
    0.6666666666666666
    """
    said, wanted = Counter(normal(answer).split()), Counter(normal(right).split())
    both = sum((said & wanted).values())
    return 2 * both / (sum(said.values()) + sum(wanted.values())) if both else 0.0


def spans(text: str, *, most: int = 3) -> list[str]:
    """Returns every span of up to `most` words of a PUBLIC text, each once, in order.

    >>> spans("a dark comedy", most=2)
    ['a', 'a dark', 'dark', 'dark comedy', 'comedy']
    """
    words = text.split()
    found = (" ".join(words[i:j]) for i in range(len(words)) for j in range(i + 1, min(i + most, len(words)) + 1))
    return list(dict.fromkeys(found)) or [text]
