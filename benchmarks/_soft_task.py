"""What the soft-prompt benchmark trains and asks: data sets, their wording, delta."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path

from _soft_corpus import plain
from _voting_task import load

from langchain_dpicl import PrivateExamples
from langchain_dpicl.soft_prompts import PromptTask

_WORDED: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "sst2": ("{text} it was{mask}.", {"negative": "terrible", "positive": "great"}),
    "agnews": ("{text} topic:{mask}.", {"Sci/Tech": "science"}),
    "trec": (
        "{text} answer:{mask}.",
        {"ABBR": "short", "DESC": "description", "ENTY": "thing", "HUM": "person", "LOC": "place", "NUM": "number"},
    ),
    "rte": ("{text} answer:{mask}.", {"entailment": "yes", "not_entailment": "no"}),
    "dbpedia": (
        "{text} topic:{mask}.",
        {
            "Athlete": "player",
            "EducationalInstitution": "school",
            "MeanOfTransportation": "car",
            "NaturalPlace": "nature",
            "OfficeHolder": "leader",
            "WrittenWork": "book",
        },
    ),
}
_OTHER = "{text} label:{mask}."
_ALL = 10**9


@dataclasses.dataclass(frozen=True)
class SoftTask:
    """A data set, ready to train on and to ask.

    Attributes:
      title: its name.
      task: how a text is put to a masked model.
      records: the private records.
      questions: what is asked.
      right: the label of each.
    """

    title: str
    task: PromptTask
    records: list[dict[str, str]] = dataclasses.field(repr=False)
    questions: list[str] = dataclasses.field(repr=False)
    right: list[str] = dataclasses.field(repr=False)

    @property
    def delta(self) -> float:
        """1 / (10 x records), rounded down to one digit."""
        exact = 1.0 / (10.0 * len(self.records))
        unit = 10.0 ** math.floor(math.log10(exact))
        return math.floor(exact / unit * (1.0 + 1e-9)) * unit

    def private(self) -> PrivateExamples:
        """Returns the records, in a fresh holder."""
        return PrivateExamples(
            self.records,
            label_key="label",
            labels=self.task.labels,
            public_size=len(self.records),
            exact_size_is_public=True,
            dataset_id=f"{self.title}-train",
        )


def soft_task(path: Path, *, limit: int, length: int, seed: int = 0) -> SoftTask:
    """Reads a labelled file: "train" is private, up to `limit` of "test" are asked, each label with its share.

    Args:
      path: JSON lines with `text`, `label_name` (or `label`) and `split`.
      limit: most questions.
      length: tokens that a text is padded or cut to.
      seed: public: which questions; never noise.

    Raises:
      SystemExit: the file cannot be read.
    """
    found = load(path, cap=_ALL, questions=limit, seed=seed, words={})
    template, words = _WORDED.get(path.name.partition(".")[0], (_OTHER, {}))
    spoken = tuple(f" {words.get(label, label.lower())}" for label in found.labels)
    return SoftTask(
        found.title,
        PromptTask("masked_lm", template, found.labels, spoken, max_input_tokens=length),
        [{"text": plain(record["text"]), "label": record["label"]} for record in found.records],
        [plain(text) for text in found.questions],
        [found.labels[place] for place in found.right],
    )
