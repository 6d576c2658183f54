"""Attacks prompted models by membership inference (Duan et al. 2023, section 3): scores, ROC curves, what epsilon
allows; NOT PRIVATE.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from langchain_core.messages import BaseMessage
from langchain_core.prompt_values import ChatPromptValue
from langchain_core.prompts import BasePromptTemplate
from langchain_core.runnables import Runnable
from numpy.typing import ArrayLike, NDArray

from langchain_dpicl._templates import Template
from langchain_dpicl.backends.base import Rows
from langchain_dpicl.backends.langchain.texts import ChoiceNames
from langchain_dpicl.backends.private_calls.call import OpaqueValue
from langchain_dpicl.backends.resolve import as_choice_backend
from langchain_dpicl.backends.rows.label_rows import LabelRows
from langchain_dpicl.backends.sync_async import LimitConcurrency
from langchain_dpicl.exceptions import ConfigurationError, DPICLError, PrivateAccessError, RecordError
from langchain_dpicl.privacy._validate import (
    Adjacency,
    check_adjacency,
    check_choice,
    check_int,
    check_positive,
    check_real,
    fail,
)
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM, Ints, SecureRandom
from langchain_dpicl.privacy.private_examples import PrivateExamples
from langchain_dpicl.reports.rendering import format_rounded_up
from langchain_dpicl.results import VotingResult
from langchain_dpicl.runs.query_runnable import QueryRunnable
from langchain_dpicl.runs.release_run import new_bar, tick
from langchain_dpicl.serving import CONTENT_FREE
from langchain_dpicl.tasks import FewShotTemplate, distinct_texts, texts_of

# A higher score says "member". All rates are shares of members or non-members, in [0, 1].


Floats = NDArray[np.float64]

LOW_RATE = 0.01
"""The false-positive rate at which attacks are compared (Carlini et al. 2022 argue for low ones)."""

_GRID_POINTS = 101
_LOWEST_RATE = 1e-4


@dataclass(frozen=True, slots=True, eq=False)
class RocCurve:
    """True over false positives, one point per distinct score, from (0, 0) to (1, 1).

    Attributes:
      false_positives: float64[points], rising.
      true_positives: float64[points], rising.
    """

    false_positives: Floats = field(repr=False)
    true_positives: Floats = field(repr=False)

    @classmethod
    def of(cls, members: ArrayLike, nonmembers: ArrayLike) -> RocCurve:
        """Returns the curve of all thresholds "a score of at least t is a member's"; equal scores move together.

        Args:
          members: scores of members, at least one.
          nonmembers: scores of non-members, at least one.

        Raises:
          ConfigurationError: no scores, or scores that are no numbers.
        """
        inside, outside = check_scores("members", members), check_scores("nonmembers", nonmembers)
        scores = np.concatenate([inside, outside])
        order, ends = _thresholds(scores)
        is_member = (np.arange(len(scores)) < len(inside))[order]
        true = np.cumsum(is_member)[ends] / len(inside)
        false = np.cumsum(~is_member)[ends] / len(outside)
        return cls(_from_zero(false), _from_zero(true))

    @property
    def auc(self) -> float:
        """Area under the curve: the chance that a member scores above a non-member, equal scores counted half.

        Source: Hanley and McNeil (1982): the Mann-Whitney statistic over the product of both numbers.
        """
        return float(_area(self.false_positives, self.true_positives))

    def tpr_at(self, false_positive_rate: float = LOW_RATE) -> float:
        """Returns the largest true-positive rate of a threshold whose false-positive rate is at most this.

        No coins are tossed between thresholds: where even the highest score is common among non-members, it is 0.

        Args:
          false_positive_rate: in [0, 1].

        Raises:
          ConfigurationError: the rate is out of range.
        """
        rate = check_real("false_positive_rate", false_positive_rate, low=0.0, high=1.0)
        return float(self.true_positives[self.false_positives <= rate].max())

    def at(self, rates: ArrayLike) -> Floats:
        """Returns float64[rates]: the true-positive rates on the straight lines between the curve's points.

        Coins between two thresholds reach every point of such a line. Where the curve rises straight up its top counts.

        Args:
          rates: float64[rates], false-positive rates in [0, 1].
        """
        return _on_lines(self.false_positives, self.true_positives, np.asarray(rates, dtype=np.float64))


@dataclass(frozen=True, slots=True, eq=False)
class RocBand:
    """Mean and percentile band of ROC curves when whole groups of scores (prompts) are drawn again.

    The band is pointwise: at each rate it holds that share of the curves. Far fewer of them lie inside it everywhere.

    Attributes:
      rates: float64[grid], false-positive rates.
      mean: float64[grid], true-positive rates.
      low, high: float64[grid], the band.
      auc: (low, mean, high) of the area.
      tpr: (low, mean, high) of the true-positive rate at `LOW_RATE`.
      confidence: nominal coverage of the band, at each rate by itself.
    """

    rates: Floats = field(repr=False)
    mean: Floats = field(repr=False)
    low: Floats = field(repr=False)
    high: Floats = field(repr=False)
    auc: tuple[float, float, float]
    tpr: tuple[float, float, float]
    confidence: float


def roc_band(
    members: ArrayLike,
    nonmembers: ArrayLike,
    *,
    num_resamples: int = 400,
    confidence: float = 0.95,
    rng: SecureRandom = SYSTEM_RANDOM,
) -> RocBand:
    """Draws groups of scores with replacement, as many as there are, and returns mean and band of the pooled curves.

    Scores of one prompt hang together, so prompts are drawn and not scores. A band from few prompts is too narrow, and
    where all prompts agree (an attack that never errs) it has no width at all. The mean of the drawn ones compares
    scores within a prompt a little oftener (once more in as many prompts as there are) than the curve of all does.

    Args:
      members: float[groups, m], scores of members by prompt.
      nonmembers: float[groups, n], scores of non-members by prompt.
      num_resamples: how often.
      confidence: nominal coverage, in (0, 1).
      rng: where the draws come from.

    Raises:
      ConfigurationError: scores are no numbers, or the groups differ in number.

    Source: Efron and Tibshirani (1993), percentile intervals of the bootstrap over clusters.
    """
    inside, outside = _group_scores("members", members), _group_scores("nonmembers", nonmembers)
    if len(inside) != len(outside):
        raise fail("members, nonmembers", "as many groups in both", (len(inside), len(outside)))
    check_int("num_resamples", num_resamples, low=2)
    tail = (1 - check_real("confidence", confidence, low=0.0, high=1.0, low_open=True, high_open=True)) / 2
    groups = len(inside)
    order, ends = _thresholds(np.concatenate([inside.ravel(), outside.ravel()]))
    owner = np.concatenate([np.repeat(np.arange(groups), a.shape[1]) for a in (inside, outside)])[order]
    is_member = (np.arange(len(owner)) < inside.size)[order]
    curves, areas, rates_at_low = [], [], []
    grid = rate_grid()
    for _ in range(num_resamples):
        weights = np.bincount(rng.integers(groups, groups), minlength=groups)[owner]
        true = _from_zero(np.cumsum(weights * is_member)[ends] / inside.size)
        false = _from_zero(np.cumsum(weights * ~is_member)[ends] / outside.size)
        curves.append(_on_lines(false, true, grid))
        areas.append(_area(false, true))
        rates_at_low.append(true[false <= LOW_RATE].max())
    low, high = np.quantile(curves, [tail, 1 - tail], axis=0)
    return RocBand(
        rates=grid,
        mean=np.mean(curves, axis=0),
        low=low,
        high=high,
        auc=_interval(areas, tail),
        tpr=_interval(rates_at_low, tail),
        confidence=confidence,
    )


def rate_grid() -> Floats:
    """Returns float64[grid]: false-positive rates from 0 to 1, dense where they are low."""
    return np.unique(
        np.concatenate([[0.0], np.geomspace(_LOWEST_RATE, 1.0, _GRID_POINTS), np.linspace(0, 1, _GRID_POINTS)])
    )


@dataclass(frozen=True, slots=True)
class Claim:
    """What a component claims, and how well any attack can tell a member from an outsider under it.

    The attack here compares a record that was in with one that was not, drawn alike: to change the one for the other
    is to replace one record. A claim for adding or removing one counts twice, as that takes two steps.

    Attributes:
      epsilon: claimed, above 0.
      delta: claimed, in [0, 1).
      adjacency: neighbouring relation of the claim.

    Raises:
      ConfigurationError: a number is out of range.
    """

    epsilon: float
    delta: float
    adjacency: Adjacency

    def __post_init__(self) -> None:
        check_positive("epsilon", self.epsilon)
        check_real("delta", self.delta, low=0.0, high=1.0, high_open=True)
        check_adjacency(self.adjacency)

    @property
    def swapped(self) -> tuple[float, float]:
        """(epsilon, delta) for replacing one record.

        Two steps of the definition: P <= e^eps (e^eps Q + delta) + delta (group privacy; Vadhan 2017, Lemma 2.2).
        """
        if self.adjacency == "replace_one":
            return self.epsilon, self.delta
        return 2 * self.epsilon, min(self.delta * (1 + math.exp(min(self.epsilon, 700.0))), 1.0)

    @property
    def corners(self) -> tuple[Floats, Floats]:
        """Corners of the best ROC curve that the claim allows: false- and true-positive rates.

        Source: Kairouz, Oh and Viswanath (2015), Theorem 2.1: t <= e^eps f + delta, and 1 - f <= e^eps (1 - t) + delta.
        """
        epsilon, delta = self.swapped
        bend = (1 - delta) / (1 + math.exp(min(epsilon, 700.0)))
        false, true = [0.0, bend, 1 - delta, 1.0], [delta, 1 - bend, 1.0, 1.0]
        return np.array(false), np.array(true)

    @property
    def auc(self) -> float:
        """The largest expected area under a curve that the claim allows; e^eps / (1 + e^eps) where delta is 0."""
        return float(_area(*self.corners))

    def tpr_at(self, false_positive_rate: float = LOW_RATE) -> float:
        """Returns the largest expected true-positive rate that the claim allows at this false-positive rate.

        Args:
          false_positive_rate: in [0, 1].

        Raises:
          ConfigurationError: the rate is out of range.
        """
        rate = check_real("false_positive_rate", false_positive_rate, low=0.0, high=1.0)
        return float(_on_lines(*self.corners, np.array([rate]))[0])


def check_scores(name: str, scores: ArrayLike) -> Floats:
    """Returns scores as float64[n].

    Raises:
      ConfigurationError: there are none, or one is NaN. No message holds a score.
    """
    array = np.asarray(scores, dtype=np.float64).ravel()
    if not array.size or np.isnan(array).any():
        raise fail(name, "at least one score, none of them NaN", f"{array.size} scores")
    return array


def _group_scores(name: str, scores: ArrayLike) -> Floats:
    array = np.asarray(scores, dtype=np.float64)
    if array.ndim != 2:
        raise fail(name, "scores by group, float[groups, n]", f"{array.ndim} axes")
    check_scores(name, array)
    return array


def _thresholds(scores: Floats) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the order of the scores, highest first, and where each run of equal ones ends."""
    order = np.argsort(-scores, kind="stable")
    falling = scores[order]
    ends = np.flatnonzero(np.append(falling[1:] < falling[:-1], True))
    return order.astype(np.int64), ends.astype(np.int64)


def _from_zero(rates: NDArray[np.generic]) -> Floats:
    return np.concatenate([[0.0], np.asarray(rates, dtype=np.float64)])


def _area(false: Floats, true: Floats) -> float:
    return float(np.sum(np.diff(false) * (true[1:] + true[:-1])) / 2)


def _on_lines(false: Floats, true: Floats, rates: Floats) -> Floats:
    """Interpolates; at a rate where the curve rises straight up, the highest point counts.

    Just before such a rise the line still ends at its lowest point: both of its ends are kept.
    """
    rates = np.clip(rates, 0.0, 1.0)
    before = np.searchsorted(false, rates, side="right") - 1
    after = np.minimum(before + 1, len(false) - 1)
    width, rise = false[after] - false[before], true[after] - true[before]
    slope = np.divide(rise, width, out=np.zeros_like(width), where=width > 0)
    return np.asarray(true[before] + slope * (rates - false[before]), dtype=np.float64)


def _interval(values: Sequence[float], tail: float) -> tuple[float, float, float]:
    low, high = np.quantile(values, [tail, 1 - tail])
    return float(low), float(np.mean(values)), float(high)


# A prompt of real records takes the way of public prompts: observers and caches of its model see it. So the records
# have to be made up, or the auditor's own.


Record: TypeAlias = Mapping[str, str]
AskTarget: TypeAlias = Callable[[Sequence[str]], Rows]
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
    build: Callable[[Sequence[Record]], AskTarget] = field(repr=False)
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
    verbalizers: Mapping[str, str | Sequence[str]] | None = None,
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
      verbalizers: label to the text, or texts, that stand for it, verbatim; by default a space and the label.
      votes: "text" takes what the model writes as its answer, also where it has probabilities.
      calibrate: whether label probabilities are divided by those on content-free inputs (Zhao et al. 2021).
      content_free: inputs without content.
      max_concurrency: calls in flight at once.
      name: for tables and pictures.

    Raises:
      ConfigurationError: a template or a label is unusable, or text votes are to be calibrated.
      CapabilityError: the model cannot choose among labels.
    """
    free = distinct_texts("content_free", content_free, least=1, empty=True) if calibrate else ()
    reader = _LabelReader(llm, labels, verbalizers, votes=votes, content_free=free, max_concurrency=max_concurrency)
    shown = {label: texts[0].strip() for label, texts in reader.texts.items()}
    wording = FewShotTemplate(
        example_prompt=Template.of("example_prompt", example_prompt).text,
        suffix=Template.of("suffix", suffix).text,
        prefix=Template.of("prefix", prefix).text,
        separator=example_separator,
        fields=tuple(fields),
        shown={label_key: shown},
    )

    def build(records: Sequence[Record]) -> AskTarget:
        def prompts(texts: Sequence[str]) -> list[str]:
            return list(wording.renderer([wording.query(text) for text in texts])(records))

        return lambda texts: reader.probabilities(texts, prompts)

    return Target(name, reader.labels, reader.reads, build)


def prompt_target(
    make: Callable[[Sequence[Record]], BasePromptTemplate[Any]],
    llm: Any,
    *,
    labels: Sequence[str],
    verbalizers: Mapping[str, str | Sequence[str]] | None = None,
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
    free = distinct_texts("content_free", content_free, least=1, empty=True) if calibrate else ()
    reader = _LabelReader(llm, labels, verbalizers, votes=votes, content_free=free, max_concurrency=max_concurrency)

    def build(records: Sequence[Record]) -> AskTarget:
        template = make(records)
        if len(names := template.input_variables) != 1:
            raise fail("make", "a template with one variable, the query", sorted(names))

        def prompts(texts: Sequence[str]) -> list[str]:
            return [_render(template, names[0], text) for text in texts]

        return lambda texts: reader.probabilities(texts, prompts)

    return Target(name, reader.labels, reader.reads, build, claim)


def answer_target(
    make: Callable[[Sequence[Record]], Runnable[Any, Any]],
    *,
    labels: Sequence[str],
    verbalizers: Mapping[str, str | Sequence[str]] | None = None,
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
      verbalizers: label to the text, or texts, that the answers have for it; by default the label.
      reads: what the attacker sees, in words.
      name: for tables and pictures.
      claim: what the Runnable claims.

    Raises:
      ConfigurationError: labels differ in case or white space only.
    """
    listed = distinct_texts("labels", labels, least=2)
    shown = [(text, label) for label, texts in texts_of(listed, verbalizers).items() for text in texts]
    names, named = ChoiceNames([text for text, _ in shown]), [label for _, label in shown]

    def build(records: Sequence[Record]) -> AskTarget:
        made = make(records)
        asked = made.with_receipts() if isinstance(made, QueryRunnable) else made  # noisy votes leave with the result
        return lambda texts: np.array([_read_answer(one, names, named, listed) for one in asked.batch(list(texts))])

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

    def build(records: Sequence[Record]) -> AskTarget:
        scores = make(records)
        return lambda texts: np.array([[float(row[label]) for label in listed] for row in scores(list(texts))])

    return Target(name, listed, "label probabilities", build, claim)


class _LabelReader:
    """Reads the labels of a model after prompts; an answer that names none is a row of zeros, a failed call raises."""

    def __init__(
        self,
        llm: Any,
        labels: Sequence[str],
        verbalizers: Mapping[str, str | Sequence[str]] | None,
        *,
        votes: Votes,
        content_free: tuple[str, ...],
        max_concurrency: int,
    ) -> None:
        self.labels = distinct_texts("labels", labels, least=2)
        self.texts = texts_of(self.labels, verbalizers)
        self._content_free = content_free
        self._limit = check_int("max_concurrency", max_concurrency, low=1)
        engine = as_choice_backend(llm, votes=votes)
        self._rows = LabelRows(engine, list(self.texts.values()), calibrate=bool(self._content_free))

    @property
    def reads(self) -> str:
        kind = self._rows.kind
        return "answered text" if kind == "text votes" else f"label probabilities ({kind})"

    def probabilities(self, texts: Sequence[str], prompts: Callable[[Sequence[str]], list[str]]) -> Rows:
        """Returns float64[texts, labels]."""
        free, asked = prompts(self._content_free), prompts(texts)
        scores = LimitConcurrency(self._rows.request_public_texts([*asked, *free], is_whole=True), self._limit).run()
        nothing = [scores[prompt] for prompt in free]
        return np.array([self._rows.calibrated(scores[prompt], nothing) for prompt in asked], dtype=np.float64)


def _render(template: BasePromptTemplate[Any], variable: str, text: str) -> str:
    value = template.format_prompt(**{variable: text})
    # As LabelClassifier: a conversation is scored where the model's turn begins.
    return value.to_string() + ("\nAI:" if isinstance(value, ChatPromptValue) else "")


def _read_answer(answer: Any, names: ChoiceNames, named: Sequence[str], labels: tuple[str, ...]) -> Floats:
    """Returns float64[labels]: noisy votes, or 1 for the label that was named."""
    if isinstance(answer, VotingResult):
        if answer.scores is not None:
            return np.array([answer.scores[label] for label in labels])
        answer = answer.label
    text = answer.text if isinstance(answer, BaseMessage) else answer
    row = np.zeros(len(labels))
    if (place := names.named(str(text))) is not None:
        row[labels.index(named[place])] = 1.0
    return row


# A score reads the record in question, and its statistics add up what many releases say of it: no claim of a release
# covers that. A result belongs in no report and beside no release; printing one shows its name and size only.


Nonmembers: TypeAlias = Literal["any", "same_label"]

NOTICE = "NOT PRIVATE (epsilon = infinity): an audit reads records. For synthetic or your own records only."


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MembershipResult:
    """Scores of an attack on one target, prompt by prompt. NOT PRIVATE.

    Attributes:
      name: of the target.
      reads: what the attacker saw.
      num_records: records that each prompt was made of.
      nonmembers: "any", or "same_label": non-members with the labels of the members.
      claim: what the target claims; None: nothing.
      member_scores: float64[prompts, members], at the right label.
      nonmember_scores: float64[prompts, nonmembers], at the right label.
    """

    name: str
    reads: str
    num_records: int
    nonmembers: Nonmembers
    claim: Claim | None
    member_scores: Floats = field(repr=False)
    nonmember_scores: Floats = field(repr=False)

    def __post_init__(self) -> None:
        for name in ("member_scores", "nonmember_scores"):
            scores = np.array(getattr(self, name), dtype=np.float64)
            scores.setflags(write=False)
            object.__setattr__(self, name, scores)

    @property
    def is_private(self) -> bool:
        """False, always."""
        return False

    @property
    def num_prompts(self) -> int:
        """Prompts that were attacked."""
        return len(self.member_scores)

    @property
    def curve(self) -> RocCurve:
        """The curve of one threshold for all prompts."""
        return RocCurve.of(self.member_scores, self.nonmember_scores)

    @property
    def auc(self) -> float:
        """Area under the curve; 1/2 is guessing."""
        return self.curve.auc

    @property
    def mean_prompt_auc(self) -> float:
        """Mean over prompts of the area of each prompt's own scores: the attacker may set a threshold per prompt."""
        pairs = zip(self.member_scores, self.nonmember_scores, strict=True)
        return float(np.mean([RocCurve.of(inside, outside).auc for inside, outside in pairs]))

    def tpr_at(self, false_positive_rate: float = LOW_RATE) -> float:
        """Returns the true-positive rate at a false-positive rate; see `RocCurve.tpr_at`.

        Args:
          false_positive_rate: in [0, 1].
        """
        return self.curve.tpr_at(false_positive_rate)

    def band(self, *, num_resamples: int = 400, confidence: float = 0.95, rng: SecureRandom = SYSTEM_RANDOM) -> RocBand:
        """Returns mean and band of the curve when prompts are drawn again; see `roc_band`.

        Args:
          num_resamples: draws of prompts.
          confidence: share of the curves that the band holds at each false-positive rate; fewer lie in it everywhere.
          rng: of the draws.
        """
        options: dict[str, Any] = {"num_resamples": num_resamples, "confidence": confidence, "rng": rng}
        return roc_band(self.member_scores, self.nonmember_scores, **options)

    def to_dict(self, *, with_scores: bool = False) -> dict[str, Any]:
        """Returns the result as JSON values, marked as what it is.

        Args:
          with_scores: whether every single score is shown too.
        """
        band = self.band()
        values: dict[str, Any] = {
            "private": False,
            "epsilon": "infinity",
            "notice": NOTICE,
            "target": self.name,
            "reads": self.reads,
            "prompts": self.num_prompts,
            "records_per_prompt": self.num_records,
            "members_per_prompt": self.member_scores.shape[1],
            "nonmembers_per_prompt": self.nonmember_scores.shape[1],
            "nonmembers": self.nonmembers,
            "auc": self.auc,
            "auc_band": [band.auc[0], band.auc[2]],
            "mean_prompt_auc": self.mean_prompt_auc,
            "tpr_at_1_percent_fpr": self.tpr_at(LOW_RATE),
            "tpr_band": [band.tpr[0], band.tpr[2]],
            "mean_member_score": float(self.member_scores.mean()),
            "mean_nonmember_score": float(self.nonmember_scores.mean()),
        }
        if self.claim is not None:
            terms = {"epsilon": self.claim.epsilon, "delta": self.claim.delta, "adjacency": self.claim.adjacency}
            allowed = {"auc": self.claim.auc, "tpr_at_1_percent_fpr": self.claim.tpr_at(LOW_RATE)}
            values["claimed"] = {**terms, "allows": allowed}
        if with_scores:
            values["member_scores"] = self.member_scores.tolist()
            values["nonmember_scores"] = self.nonmember_scores.tolist()
        return values

    def summary(self) -> str:
        """Returns two lines: the numbers, and that they are not private."""
        low, _, high = self.band().auc
        allowed = "" if self.claim is None else f", at most {format_rounded_up(self.claim.auc, 3)} under its claim"
        return (
            f"{self.name}: AUC {self.auc:.3f} [{low:.3f}, {high:.3f}]{allowed}; TPR {self.tpr_at(LOW_RATE):.1%} at 1 % "
            f"FPR; {self.num_prompts} prompts of {self.num_records} records, {self.reads}\n{NOTICE}"
        )

    def __repr__(self) -> str:
        return f"MembershipResult({self.name!r}, {self.num_prompts} prompts, NOT PRIVATE)"


def membership_attack(
    records: Iterable[Record],
    target: Target,
    *,
    num_records: int,
    num_prompts: int = 100,
    num_members: int = 1,
    num_nonmembers: int = 50,
    nonmembers: Nonmembers = "any",
    text_key: str = "text",
    label_key: str = "label",
    progress: bool | None = None,
    rng: SecureRandom = SYSTEM_RANDOM,
) -> MembershipResult:
    """Attacks a target: can its answers tell who it was built of?

    Each of `num_prompts` times: draws `num_records` records, builds the target of them, and scores `num_members` of
    them and `num_nonmembers` others, asked in random order. A score is what the target gives the record's own label.

    Formal guarantees:
      - Before the target is built, members and non-members are alike: any of them could have been the other.
      - Records with the same text count once, so that no non-member reads as a member.
      - NONE of privacy: scores are functions of the records. The result says so.

    Args:
      records: made up, or your own; never what a ledger protects. They are read in clear, and the target's model sees
        those that it is built of.
      target: what is attacked: one of the `*_target` functions, or `few_shot_without_privacy`.
      num_records: records that the target is built of: the shots of a few-shot prompt, the data set of a component.
      num_prompts: how often it is built.
      num_members: records scored of those it was built of; 1 as in the paper.
      num_nonmembers: records scored that it was not built of.
      nonmembers: "any"; or "same_label": with the labels of the members in turn. A prompt that only says its labels
        again leaks to the first and not to the second.
      text_key: field of the text that is asked.
      label_key: field of the right label.
      progress: True shows a bar, False hides it, None shows it on a terminal only.
      rng: who is a member, and in which order they are asked.

    Returns:
      The scores; NOT PRIVATE.

    Raises:
      PrivateAccessError: `records` is a holder of private examples.
      RecordError: a record has no such texts, or a label that the target does not have.
      ConfigurationError: too few records, or what builds or answers failed: the message says with what kind of error,
        and none of it holds a record.

    Source: Duan et al. (2023), Flocks of Stochastic Parrots, section 3.
    """
    if isinstance(records, PrivateExamples):
        raise PrivateAccessError("membership_attack: expected a list of made-up or own records, found PrivateExamples.")
    check_choice("nonmembers", nonmembers, get_args(Nonmembers))
    shape = _Shape(
        check_int("num_records", num_records, low=1),
        check_int("num_members", num_members, low=1, high=num_records),
        check_int("num_nonmembers", num_nonmembers, low=1),
        is_same_label=nonmembers == "same_label",
    )
    pool, faults = _read_records(records, target, (text_key, label_key), shape)
    del records  # from here on in a box: no frame of an error shows one
    if faults:
        raise RecordError(faults) if pool is None else ConfigurationError(faults)
    inside, outside = [], []
    check_int("num_prompts", num_prompts, low=1)
    with new_bar(num_prompts, "prompt", f"membership: {target.name}", progress=progress) as bar:
        for _ in range(num_prompts):
            scores, failure = _attempt(pool, target, shape, rng)
            if failure is not None:
                raise failure
            inside.append(scores[: shape.num_members])
            outside.append(scores[shape.num_members :])
            tick(bar)
    return MembershipResult(
        name=target.name,
        reads=target.reads,
        num_records=num_records,
        nonmembers=nonmembers,
        claim=target.claim,
        member_scores=np.array(inside),
        nonmember_scores=np.array(outside),
    )


@dataclass(frozen=True, slots=True)
class _Shape:
    num_records: int
    num_members: int
    num_nonmembers: int
    is_same_label: bool


@dataclass(frozen=True, slots=True)
class _Pool:
    """Distinct records, with the place of each one's label among the target's."""

    records: tuple[dict[str, str], ...]
    texts: tuple[str, ...]
    places: Ints


def _read_records(
    records: Iterable[Record], target: Target, keys: tuple[str, str], shape: _Shape
) -> tuple[OpaqueValue[_Pool] | None, str]:
    """Returns the records in a box, and what is wrong with them: no word of it is a record's."""
    place = {label: index for index, label in enumerate(target.labels)}
    distinct: dict[str, dict[str, str]] = {}
    for record in records:
        known = isinstance(record, Mapping) and all(isinstance(record.get(key), str) for key in keys)
        if not known or record[keys[1]] not in place:
            return None, (
                f"records: expected texts under {list(keys)}, the label among {list(target.labels)}, found another "
                "one. Index and value are hidden."
            )
        distinct.setdefault(record[keys[0]], dict(record))
    places = np.array([place[record[keys[1]]] for record in distinct.values()], dtype=np.int64)
    needed = shape.num_records + shape.num_nonmembers
    num_read = len(places)
    if shape.is_same_label:
        counts = np.bincount(places, minlength=len(place))
        num_read = int(counts[counts > 0].min(initial=num_read))
    box = OpaqueValue(_Pool(tuple(distinct.values()), tuple(distinct), places))
    if num_read < needed:
        of = "of every label that there is, " if shape.is_same_label else ""
        return box, f"records: expected at least {needed} {of}with distinct texts, found {num_read}."
    return box, ""


def _attempt(
    box: OpaqueValue[_Pool] | None, target: Target, shape: _Shape, rng: SecureRandom
) -> tuple[Floats, DPICLError | None]:
    """Returns the scores of one prompt, members first, or an error whose frames and words hold no record."""
    failure: DPICLError
    try:
        return _scores(box, target, shape, rng), None  # type: ignore[arg-type]  # it is a box where nothing is wrong
    except DPICLError as error:
        failure = error.with_traceback(None)
        failure.__cause__ = failure.__context__ = None
    except Exception as error:  # noqa: BLE001  what builds is anybody's, and its words may be a record's
        advice = "Call target.build(records)(texts) on made-up records to see where."
        failure = fail(f"target {target.name!r}", "something that builds and answers", type(error).__name__, advice)
    return np.empty(0), failure


def _scores(box: OpaqueValue[_Pool], target: Target, shape: _Shape, rng: SecureRandom) -> Floats:
    pool = box.reveal()
    order = rng.permutation(len(pool.texts))
    built_of, rest = order[: shape.num_records], order[shape.num_records :]
    members = rng.permutation(shape.num_records)[: shape.num_members]
    asked = np.concatenate([built_of[members], _others(pool, built_of[members], rest, shape)])
    ask = target.build([pool.records[index] for index in built_of])
    # A target that drifts while it is asked (a memory, a cache, a limit) would tell members by when they are asked.
    turns = rng.permutation(len(asked))
    rows = np.asarray(ask([pool.texts[index] for index in asked[turns]]), dtype=np.float64)
    expected = (len(asked), len(target.labels))
    if rows.shape != expected:
        raise fail(f"target {target.name!r}", f"rows of shape {expected}", rows.shape)
    if np.isnan(rows).any():
        raise fail(f"target {target.name!r}", "numbers", "NaN")
    scores = np.empty(len(asked))
    scores[turns] = rows[np.arange(len(asked)), pool.places[asked[turns]]]
    return scores


def _others(pool: _Pool, members: Ints, rest: Ints, shape: _Shape) -> Ints:
    """Returns the places of the non-members: the first that were drawn, or those with the members' labels in turn."""
    if not shape.is_same_label:
        return rest[: shape.num_nonmembers]
    by_label = {label: iter(rest[pool.places[rest] == label]) for label in set(pool.places[members].tolist())}
    turns = [int(pool.places[member]) for member in members]
    return np.array([next(by_label[turns[turn % len(turns)]]) for turn in range(shape.num_nonmembers)])
