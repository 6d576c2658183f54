"""Checks the public options of query answering and fills in their defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np

from langchain_dpicl._label_scorers import distinct_texts
from langchain_dpicl.asking import Query, TaskWording, template_text
from langchain_dpicl.backends.label_rows import LabelRows
from langchain_dpicl.backends.resolve import as_choice_backend
from langchain_dpicl.privacy._validate import check_choice, check_int, check_real, fail
from langchain_dpicl.privacy.examples import PrivateExamples
from langchain_dpicl.privacy.extensions.registry import MECHANISMS
from langchain_dpicl.row_design import RowDesign

Votes: TypeAlias = Literal["hard", "soft", "text"]
VoteOutcome: TypeAlias = tuple[int | None, tuple[float, ...] | None]
"""Place of the label (None: abstained) and the noisy votes, if they were released."""


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
    wording: TaskWording
    votes: Votes
    content_free: tuple[str, ...]

    @classmethod
    def of(
        cls,
        private: PrivateExamples,
        *,
        labels: Sequence[str] | None,
        verbalizers: Mapping[str, str | Sequence[str]] | None,
        votes: Votes,
        calibrate: bool | None,
        content_free: Sequence[str],
        **wording: Any,
    ) -> VotingTask:
        """Checks the options and fills in defaults; `wording` holds the keyword arguments of `wording_of`."""
        answers = labels_of(private, labels)
        texts = texts_of(answers, verbalizers)
        words = wording_of(private, texts=texts, **wording)
        check_choice("votes", votes, ("hard", "soft", "text"))
        if calibrate is not None and not isinstance(calibrate, bool):
            raise fail("calibrate", "True, False or None", calibrate)
        names = words.input_variables
        can_calibrate = votes != "text" and (len(names) == 1 or "input" in names)
        is_wanted = can_calibrate if calibrate is None else calibrate
        inputs = distinct_texts("content_free", content_free, least=1, empty=True) if is_wanted else ()
        if inputs:
            words.with_content(("",) * len(names), "")
        return cls(answers, texts, words, votes, inputs)

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


def labels_of(private: PrivateExamples, labels: Sequence[str] | None) -> tuple[str, ...]:
    """Returns the labels that an answer can have: `labels`, or the declared ones."""
    if not isinstance(private, PrivateExamples):
        raise fail("private", "PrivateExamples", type(private).__name__)
    if labels is None and private.labels is None:
        raise fail("labels", "the labels an answer can have (the examples declare none)", None)
    return distinct_texts("labels", tuple(private.labels or ()) if labels is None else labels, least=2)


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
    private: PrivateExamples,
    *,
    example_prompt: Any,
    prefix: Any,
    suffix: Any,
    separator: str,
    texts: Mapping[str, tuple[str, ...]] | None = None,
) -> TaskWording:
    """Returns the few-shot template; by default text and label on one line each, labels shown as their first text."""
    text_key, label_key = private.text_key, private.label_key
    if (example_prompt is None or suffix is None) and label_key is None:
        raise fail("example_prompt, suffix", "both (the examples have no label field)", (example_prompt, suffix))
    if example_prompt is None:
        example_prompt = f"{text_key}: {{{text_key}}}\n{label_key}: {{{label_key}}}"
    read = {label: words[0].strip() for label, words in (texts or {}).items()}
    return TaskWording(
        example_prompt=template_text("example_prompt", example_prompt),
        suffix=template_text("suffix", f"{text_key}: {{input}}\n{label_key}:" if suffix is None else suffix),
        prefix=template_text("prefix", prefix),
        separator=separator,
        fields=private.fields,
        shown={} if label_key is None else {label_key: read},
    )


def mechanism_of(mechanism: str | None, *, with_scores: bool) -> str:
    """Returns the mechanism's name; Gumbel noise unless scores are released."""
    chosen = ("gaussian" if with_scores else "gumbel") if mechanism is None else mechanism
    check_choice("mechanism", chosen, MECHANISMS)
    if with_scores and chosen != "gaussian":
        raise fail("mechanism", "'gaussian' with with_scores=True (the others release only an index)", chosen)
    return chosen


def check_flags(*, name: object, progress: object, max_query_chars: object = None, **flags: object) -> None:
    """Refuses wrong flags, names and limits before anything is declared."""
    if max_query_chars is not None:
        check_int("max_query_chars", max_query_chars, low=1)
    for flag, value in {**flags, "progress": False if progress is None else progress}.items():
        if not isinstance(value, bool):
            raise fail(flag, "True or False" + (", or None" if flag == "progress" else ""), value)
    if name is not None and not isinstance(name, str):
        raise fail("name", "a text or None", type(name).__name__)


def check_abstention(labels: tuple[str, ...], below: float | None, answer: str) -> None:
    """Refuses a threshold outside (0, 1], and an abstention text that is also a label."""
    if below is not None:
        check_real("abstain_below", below, low=0.0, high=1.0, low_open=True)
    if not isinstance(answer, str) or not answer or answer in labels:
        raise fail("abstain_label", f"a text that is none of {labels!r}", answer)


def design_of(
    private: PrivateExamples,
    *,
    rows: str | None,
    num_slots: int | None,
    shots_per_slot: int | None,
    sampling: str,
    overfill: float | None,
) -> RowDesign | None:
    """Returns the requested shape of rows; None lets the planner choose."""
    if (rows, num_slots, shots_per_slot, overfill) == (None,) * 4 and sampling == "poisson":
        return None
    return RowDesign.choose(
        rows=rows,
        num_slots=num_slots,
        shots_per_slot=shots_per_slot,
        sampling=sampling,
        overfill=overfill,
        smallest_size=private.public_size_of(None),
    )


def reader_of(
    llm: Any, task: VotingTask, *, is_wanted: bool | None, shots: int, other: bool = False
) -> tuple[VotingTask, LabelRows, dict[str, str]]:
    """Returns the task as it will run, the source of label rows, and what reports say about the model.

    Args:
      llm: the model.
      task: with the content-free inputs that there would be.
      is_wanted: whether to calibrate; None: where the model goes on writing the prompt and a row holds one record.
      shots: records per row.
      other: whether answers in text that name no label are a candidate of their own.

    Raises:
      CapabilityError: the model cannot choose among labels.
      ModelCallError: it could not be reached.
      ConfigurationError: it cannot tell the labels apart.
    """
    engine = as_choice_backend(llm, votes="text" if task.votes == "text" else None)
    texts = list(task.texts.values())
    scorer = LabelRows(engine, texts, calibrate=False, other=other)
    # A chat model answers in a message of its own: its content-free rows say little about its bias.
    goes_on_writing = scorer.kind in {"whole labels", "first tokens"}
    if task.content_free and (is_wanted or (goes_on_writing and shots == 1)):
        scorer = LabelRows(engine, texts, calibrate=True)
    else:
        task = replace(task, content_free=())
    return task, scorer, {"model": getattr(engine, "name", type(engine).__name__), "reads": scorer.kind}


def packed_votes(outcome: VoteOutcome) -> list[Any]:
    """Returns an outcome as JSON values."""
    place, votes = outcome
    return [None if place is None else int(place), votes]


def unpacked_votes(stored: Any, *, width: int) -> VoteOutcome:
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
