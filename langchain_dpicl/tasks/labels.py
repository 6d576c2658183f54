"""Checks the public options of votes and fills in their defaults."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np

from langchain_dpicl._templates import Template
from langchain_dpicl.backends.base import row_hint_of
from langchain_dpicl.backends.resolve import as_choice_backend
from langchain_dpicl.backends.rows.label_rows import LabelRows
from langchain_dpicl.options.answers import LabelAnswers, Votes
from langchain_dpicl.options.tasks import FewShotTask
from langchain_dpicl.privacy._validate import fail
from langchain_dpicl.tasks.templates import FewShotTemplate, Query


def distinct_texts(name: str, values: Sequence[str], *, least: int, empty: bool = False) -> tuple[str, ...]:
    """Returns distinct texts as a tuple, or raises ConfigurationError."""
    expected = f"a sequence of at least {least} distinct {'' if empty else 'non-empty '}texts"
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence) or len(values) < least:
        raise fail(name, expected, values)
    if not all(isinstance(text, str) and (text or empty) for text in values) or len(set(values)) < len(values):
        raise fail(name, expected, values)
    return tuple(values)


class RecordFields(Protocol):
    """What prompts and votes need to know of records, all of it public; `PrivateExamples` declare it."""

    @property
    def text_key(self) -> str:
        """The field that holds the text."""

    @property
    def label_key(self) -> str | None:
        """The field that holds the label, or None."""

    @property
    def labels(self) -> tuple[str, ...] | None:
        """The declared labels, or None."""

    @property
    def fields(self) -> tuple[str, ...]:
        """Every field that prompts may show."""


VoteOutcome: TypeAlias = tuple[int | None, tuple[float, ...] | None]
"""Place of the label (None: abstained) and the noisy votes, if they were released."""


def wording_digest(task: VotingTask) -> str:
    """Returns the digest of what a prompt says besides its examples: templates, labels and their texts."""
    shown = {name: value for name, value in task.to_dict().items() if name not in {"content_free", "votes"}}
    shown["labels"] = sorted(shown["labels"])
    return hashlib.sha256(json.dumps(shown, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class VotingTask:
    """What is voted on, and how it reads. Public.

    Attributes:
      labels: every label an answer can have.
      texts: what stands for each label in prompts and answers.
      wording: how prompts read.
      votes: "hard", "soft", or "text".
      content_free: inputs that rows are, or may be, calibrated with; none: no calibration.
    """

    labels: tuple[str, ...]
    texts: Mapping[str, tuple[str, ...]]
    wording: FewShotTemplate
    votes: Votes
    content_free: tuple[str, ...]

    @classmethod
    def of(cls, records: RecordFields, task: FewShotTask, answers: LabelAnswers) -> VotingTask:
        """Fills in defaults, and checks the options against the fields of the records."""
        labels = labels_of(records, task.labels)
        texts = texts_of(labels, task.verbalizers)
        words = wording_of(records, task, texts=texts)
        names = words.input_variables
        can_calibrate = answers.votes != "text" and (len(names) == 1 or "input" in names)
        is_wanted = can_calibrate if answers.calibrate is None else answers.calibrate
        inputs = distinct_texts("content_free", answers.content_free, least=1, empty=True) if is_wanted else ()
        if inputs:
            words.with_content(("",) * len(names), "")
        return cls(labels, texts, words, answers.votes, inputs)

    def queries(self, query: Query) -> list[Query]:
        """Returns the query and, where rows are calibrated, its content-free versions."""
        return [query, *(self.wording.with_content(query, text) for text in self.content_free)]

    def to_dict(self) -> dict[str, Any]:
        """Returns the task as JSON values, for reports."""
        return {
            **self.wording.to_dict(),
            "labels": list(self.labels),
            "verbalizers": {label: list(shown) for label, shown in self.texts.items()},
            "votes": self.votes,
            "content_free": list(self.content_free),
        }


def labels_of(records: RecordFields, labels: Sequence[str] | None) -> tuple[str, ...]:
    """Returns the labels that an answer can have: `labels`, or the declared ones."""
    if labels is None and records.labels is None:
        advice = (
            'The examples declare none: give PrivateExamples(..., label_key="label", labels=[...]), every label that '
            "may occur."
        )
        raise fail("labels", "the labels an answer can have", None, advice)
    return distinct_texts("labels", tuple(records.labels or ()) if labels is None else labels, least=2)


def texts_of(
    labels: tuple[str, ...], verbalizers: Mapping[str, str | Sequence[str]] | None
) -> dict[str, tuple[str, ...]]:
    """Returns the texts that stand for each label, in the order of the labels."""
    if verbalizers is None:
        return {label: (f" {label}",) for label in labels}
    if not isinstance(verbalizers, Mapping) or set(verbalizers) != set(labels):
        shown = list(verbalizers) if isinstance(verbalizers, Mapping) else type(verbalizers)
        raise fail("verbalizers", f"one text, or several, for each of {labels!r}", shown)
    listed = {label: verbalizers[label] for label in labels}
    return {
        label: distinct_texts("verbalizers", [texts] if isinstance(texts, str) else texts, least=1)
        for label, texts in listed.items()
    }


def wording_of(
    records: RecordFields, task: FewShotTask, *, texts: Mapping[str, tuple[str, ...]] | None = None
) -> FewShotTemplate:
    """Returns the few-shot template; by default text and label on one line each, labels shown as their first text."""
    example_prompt, suffix = task.example_prompt, task.suffix
    text_key, label_key = records.text_key, records.label_key
    if (example_prompt is None or suffix is None) and label_key is None:
        raise fail("example_prompt, suffix", "both (the examples have no label field)", (example_prompt, suffix))
    if example_prompt is None:
        example_prompt = f"{text_key}: {{{text_key}}}\n{label_key}: {{{label_key}}}"
    if suffix is None:
        suffix = f"{text_key}: {{input}}\n{label_key}:"
    read = {label: words[0].strip() for label, words in (texts or {}).items()}
    return FewShotTemplate(
        example_prompt=Template.of("example_prompt", example_prompt).text,
        suffix=Template.of("suffix", suffix).text,
        prefix=Template.of("prefix", task.prefix).text,
        separator=task.example_separator,
        fields=records.fields,
        shown={} if label_key is None else {label_key: read},
        others=tuple([wording_of(records, other, texts=texts) for other in task.wordings]),
    )


def abstention_of(answers: LabelAnswers, labels: tuple[str, ...], *, usual: Literal["auto", "never"]) -> float | None:
    """Returns the share of the expected votes that an answer needs; None: the most noisy votes are enough.

    Args:
      answers: the caller's option.
      labels: the answers.
      usual: what `abstain_below=None` stands for.

    Raises:
      ConfigurationError: `min_votes` is given, or the answer of abstentions is a label.
    """
    if answers.min_votes is not None:
        raise fail(
            "LabelAnswers.min_votes", "None where votes can be expected", answers.min_votes, "Use abstain_below."
        )
    check_abstain_label(answers, labels)
    below = answers.abstain_below or usual
    if below == "never":
        return None
    return 0.5 / len(labels) if below == "auto" else below


def check_abstain_label(answers: LabelAnswers, labels: tuple[str, ...]) -> None:
    """Refuses an abstention text that is also a label."""
    if not answers.abstain_label or answers.abstain_label in labels:
        raise fail("LabelAnswers.abstain_label", f"a text that is none of {labels!r}", answers.abstain_label)


def check_other_label(answers: LabelAnswers) -> None:
    """Refuses a name of votes that name no label, for components that do not count them."""
    if answers.other_label not in {"", LabelAnswers().other_label}:
        advice = "A vote that names no label counts for none."
        raise fail("LabelAnswers.other_label", "the default", answers.other_label, advice)


def choice_engine(llm: Any, task: VotingTask) -> Any:
    """Returns what a model has for choosing among labels; errors as `reader_of`."""
    return as_choice_backend(llm, votes="text" if task.votes == "text" else None)


def reader_of(
    llm: Any, task: VotingTask, *, is_wanted: bool | None, other: bool = False
) -> tuple[VotingTask, LabelRows, dict[str, str]]:
    """Returns the task as it will run, the source of label rows, and what reports say about the model.

    Args:
      llm: the model.
      task: with the content-free inputs that there would be.
      is_wanted: whether to calibrate; None: where the model goes on writing the prompt and declares nothing else.
      other: whether answers in text that name no label are a candidate of their own.

    Raises:
      CapabilityError: the model cannot choose among labels.
      ModelCallError: it could not be reached.
      ConfigurationError: it cannot tell the labels apart.
    """
    engine = choice_engine(llm, task)
    texts = list(task.texts.values())
    scorer = LabelRows(engine, texts, calibrate=False, other=other)
    # A chat model answers in a message of its own: its content-free rows say little about its bias.
    goes_on_writing = scorer.kind in {"whole labels", "first tokens"}
    wanted = goes_on_writing and row_hint_of(engine).calibrate if is_wanted is None else is_wanted
    if task.content_free and wanted:
        scorer = LabelRows(engine, texts, calibrate=True)
    else:
        task = replace(task, content_free=())
    return task, scorer, {"model": getattr(engine, "name", type(engine).__name__), "reads": scorer.kind}


def outcome_to_json(outcome: VoteOutcome) -> list[Any]:
    """Returns an outcome as JSON values."""
    place, votes = outcome
    return [None if place is None else int(place), votes]


def outcome_from_json(stored: Any, *, width: int) -> VoteOutcome:
    """Returns an outcome from its JSON values; ValueError or TypeError for anything else."""
    place, votes = stored
    if not (place is None or (type(place) is int and 0 <= place < width)):
        raise ValueError("no label")
    if votes is None:
        return place, None
    scores = tuple(float(vote) for vote in votes)
    if len(scores) != width or not np.isfinite(scores).all():
        raise ValueError("no votes")
    return place, scores
