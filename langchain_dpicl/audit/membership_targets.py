"""Builds the targets of membership attacks: prompts of real records, and released outputs."""

# A prompt of real records takes the way of public prompts: observers and caches of its model see it. So the records
# have to be made up, or the auditor's own.

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import numpy as np
from langchain_core.messages import BaseMessage
from langchain_core.prompt_values import ChatPromptValue
from langchain_core.prompts import BasePromptTemplate
from langchain_core.runnables import Runnable

from langchain_dpicl._label_scorers import LabelScorer, continuations_of, distinct_texts, label_scorer
from langchain_dpicl.asking import TaskWording, template_text
from langchain_dpicl.audit.scores import Claim, Floats
from langchain_dpicl.backends.answers import Names
from langchain_dpicl.backends.base import Rows
from langchain_dpicl.backends.resolve import as_choice_backend
from langchain_dpicl.classification import CONTENT_FREE, content_free_probabilities, label_probabilities
from langchain_dpicl.privacy._validate import check_int, fail
from langchain_dpicl.receipts import VotingResult

Record: TypeAlias = Mapping[str, str]
Ask: TypeAlias = Callable[[Sequence[str]], Rows]
"""From texts to float64[texts, labels]: what is made of each label; zeros where the answer names none."""
Votes: TypeAlias = Literal["text"] | None


@dataclass(frozen=True, slots=True)
class Target:
    """Something to attack.

    Attributes:
      name: for tables and pictures.
      labels: every label, in the order of the rows.
      reads: what the attacker sees, in words.
      build: makes it from records, and returns how it is asked.
      claim: what it claims; None: it claims nothing.
    """

    name: str
    labels: tuple[str, ...]
    reads: str
    build: Callable[[Sequence[Record]], Ask] = field(repr=False)
    claim: Claim | None = None

    def named(self, name: str, claim: Claim | None = None) -> Target:
        """Returns the same target under another name, with a claim.

        Args:
          name: public.
          claim: what the component claims; None: nothing.
        """
        return replace(self, name=name, claim=claim)


def few_shot_without_privacy(
    llm: Any,
    *,
    labels: Sequence[str],
    example_prompt: Any,
    suffix: Any,
    prefix: Any = "",
    example_separator: str = "\n\n",
    fields: Sequence[str] = ("text", "label"),
    label_key: str = "label",
    verbalizers: Mapping[str, str] | None = None,
    votes: Votes = None,
    calibrate: bool = False,
    content_free: Sequence[str] = CONTENT_FREE,
    max_concurrency: int = 8,
    name: str = "real few-shot prompt",
) -> Target:
    """Puts the REAL RECORDS into the prompt, all of them: nothing is protected. The prompt that Duan et al. attack.

    Args:
      llm: an engine or a LangChain model; it SEES the records, and its observers too.
      labels: every label.
      example_prompt: f-string template of one record.
      suffix: template of the query.
      prefix: template before the examples.
      example_separator: stands between the parts.
      fields: what records hold.
      label_key: field of the label.
      verbalizers: label to the text that stands for it, verbatim; by default a space and the label.
      votes: "text" takes what the model writes as its answer, also where it has probabilities.
      calibrate: whether label probabilities are divided by those on content-free inputs (Zhao et al. 2021).
      content_free: inputs without content.
      max_concurrency: calls in flight at once.
      name: for tables and pictures.

    Raises:
      ConfigurationError: a template or a label is unusable, or text votes are to be calibrated.
      CapabilityError: the model cannot choose among labels.
    """
    reader = _Reader(llm, labels, verbalizers, votes=votes, max_concurrency=max_concurrency)
    if calibrate and reader.kind == "text votes":
        raise fail("calibrate", "False with text votes", calibrate, "A vote is no probability.")
    shown = {label: text.strip() for label, text in zip(reader.labels, reader.continuations, strict=True)}
    wording = TaskWording(
        example_prompt=template_text("example_prompt", example_prompt),
        suffix=template_text("suffix", suffix),
        prefix=template_text("prefix", prefix),
        separator=example_separator,
        fields=tuple(fields),
        shown={label_key: shown},
    )
    without = distinct_texts("content_free", content_free, least=1, empty=True) if calibrate else ()

    def build(records: Sequence[Record]) -> Ask:
        def prompts(texts: Sequence[str]) -> list[str]:
            return list(wording.renderer([wording.query(text) for text in texts])(records))

        base = reader.base(prompts(without)) if without else None
        return lambda texts: reader.probabilities(prompts(texts), base)

    return Target(name, reader.labels, reader.reads, build)


def prompt_target(
    make: Callable[[Sequence[Record]], BasePromptTemplate[Any]],
    llm: Any,
    *,
    labels: Sequence[str],
    verbalizers: Mapping[str, str] | None = None,
    votes: Votes = None,
    calibrate: bool = False,
    content_free: Sequence[str] = CONTENT_FREE,
    max_concurrency: int = 8,
    name: str = "released prompt",
    claim: Claim | None = None,
) -> Target:
    """Attacks a prompt made of the records: a `DPFewShotPromptTemplate`, or any template with one variable.

    Args:
      make: builds the template from the records; what it charges is its own affair: a budget per call.
      llm: the model that the prompt is for: an engine or a LangChain model.
      labels: every label.
      verbalizers: see `few_shot_without_privacy`, as the next four.
      votes: "text" or None.
      calibrate: whether label probabilities are calibrated.
      content_free: inputs without content.
      max_concurrency: calls in flight at once.
      name: for tables and pictures.
      claim: what the template claims.

    Raises:
      ConfigurationError: a label is unusable, or text votes are to be calibrated; when it is built, a template with
        other than one variable.
      CapabilityError: the model cannot choose among labels.
    """
    reader = _Reader(llm, labels, verbalizers, votes=votes, max_concurrency=max_concurrency)
    if calibrate and reader.kind == "text votes":
        raise fail("calibrate", "False with text votes", calibrate, "A vote is no probability.")
    without = distinct_texts("content_free", content_free, least=1, empty=True) if calibrate else ()

    def build(records: Sequence[Record]) -> Ask:
        template = make(records)
        if len(names := template.input_variables) != 1:
            raise fail("make", "a template with one variable, the query", sorted(names))

        def prompts(texts: Sequence[str]) -> list[str]:
            return [_rendered(template, names[0], text) for text in texts]

        base = reader.base(prompts(without)) if without else None
        return lambda texts: reader.probabilities(prompts(texts), base)

    return Target(name, reader.labels, reader.reads, build, claim)


def answer_target(
    make: Callable[[Sequence[Record]], Runnable[Any, Any]],
    *,
    labels: Sequence[str],
    verbalizers: Mapping[str, str] | None = None,
    reads: str = "answered text",
    name: str = "answers",
    claim: Claim | None = None,
) -> Target:
    """Attacks a Runnable that answers texts: a `DPVotingRunnable`, a chain, anything. Text only, no scores.

    An answer counts 1 for the label that it names by the public rules of `backends.answers`, and 0 for the others;
    noisy votes that a `VotingResult` carries count as they are.

    Args:
      make: builds the Runnable from the records.
      labels: every label.
      verbalizers: label to the text that the answers have for it; by default the label.
      reads: what the attacker sees, in words.
      name: for tables and pictures.
      claim: what the Runnable claims.

    Raises:
      ConfigurationError: labels differ in case or white space only.
    """
    listed = distinct_texts("labels", labels, least=2)
    names = Names([text.strip() for text in continuations_of(listed, verbalizers)])

    def build(records: Sequence[Record]) -> Ask:
        asked = make(records)
        return lambda texts: np.array([_said(answer, names, listed) for answer in asked.batch(list(texts))])

    return Target(name, listed, reads, build, claim)


def score_target(
    make: Callable[[Sequence[Record]], Callable[[Sequence[str]], Sequence[Mapping[str, float]]]],
    *,
    labels: Sequence[str],
    name: str = "label scores",
    claim: Claim | None = None,
) -> Target:
    """Attacks what gives a number per label, such as `SoftPromptClassifier.scores`.

    Args:
      make: builds it from the records and returns its function from texts to a number per label.
      labels: every label.
      name: for tables and pictures.
      claim: what it claims.

    Raises:
      ConfigurationError: too few labels.
    """
    listed = distinct_texts("labels", labels, least=2)

    def build(records: Sequence[Record]) -> Ask:
        scores = make(records)
        return lambda texts: np.array([[float(row[label]) for label in listed] for row in scores(list(texts))])

    return Target(name, listed, "label probabilities", build, claim)


class _Reader:
    """Reads the labels of a model after prompts; an answer that names none is a row of zeros, a failed call raises."""

    def __init__(
        self,
        llm: Any,
        labels: Sequence[str],
        verbalizers: Mapping[str, str] | None,
        *,
        votes: Votes,
        max_concurrency: int,
    ) -> None:
        self.labels = distinct_texts("labels", labels, least=2)
        self.continuations = continuations_of(self.labels, verbalizers)
        self._limit = check_int("max_concurrency", max_concurrency, low=1)
        self._scorer: LabelScorer = label_scorer(as_choice_backend(llm, votes=votes), self.continuations)

    @property
    def kind(self) -> str:
        return self._scorer.kind

    @property
    def reads(self) -> str:
        return "answered text" if self.kind == "text votes" else f"label probabilities ({self.kind})"

    def probabilities(self, prompts: Sequence[str], base: Floats | None = None) -> Rows:
        """Returns float64[prompts, labels].

        Raises:
          ModelCallError: a call failed.
        """
        rows = self._rows(prompts)
        named = np.isfinite(rows).any(axis=1, keepdims=True)
        return np.where(named, label_probabilities(rows, base), 0.0)

    def base(self, prompts: Sequence[str]) -> Floats:
        """Returns float64[labels]: mean probabilities after prompts without content."""
        return content_free_probabilities(self._rows(prompts))

    def _rows(self, prompts: Sequence[str]) -> Rows:
        scored = self._scorer.score(prompts, self._limit)
        return np.array(scored, dtype=np.float64).reshape(len(prompts), len(self.labels))


def _rendered(template: BasePromptTemplate[Any], variable: str, text: str) -> str:
    value = template.format_prompt(**{variable: text})
    # As LabelClassifier: a conversation is scored where the model's turn begins.
    return value.to_string() + ("\nAI:" if isinstance(value, ChatPromptValue) else "")


def _said(answer: Any, names: Names, labels: tuple[str, ...]) -> Floats:
    """Returns float64[labels]: noisy votes, or 1 for the label that was named."""
    if isinstance(answer, VotingResult):
        if answer.scores is not None:
            return np.array([answer.scores[label] for label in labels])
        answer = answer.label
    text = answer.text if isinstance(answer, BaseMessage) else answer
    row = np.zeros(len(labels))
    if (place := names.named(str(text))) is not None:
        row[place] = 1.0
    return row
