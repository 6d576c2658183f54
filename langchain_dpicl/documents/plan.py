"""Plans, calibrates and prices a release of synthetic documents."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias, get_args

from langchain_dpicl.generation.plan import GenerationPlan, Segment, _with_noise, plan_generation
from langchain_dpicl.generation.token_mechanisms import TokenRule
from langchain_dpicl.planning.expected_utility import RowDesign
from langchain_dpicl.planning.share_plan import Cost, SharePlan, pricing_delta, with_price
from langchain_dpicl.privacy import accounting
from langchain_dpicl.privacy._validate import (
    Adjacency,
    check_choice,
    check_delta,
    check_epsilon,
    check_int,
    check_real,
    fail,
)
from langchain_dpicl.privacy.accounting.events import GaussianEvent, PureEvent
from langchain_dpicl.privacy.extensions.count_histograms import (
    CountPlan,
    DiscreteLaplaceMechanism,
    GaussianCountMechanism,
    count_release,
    noise_margin,
)
from langchain_dpicl.privacy.extensions.topic_partition import BY_COINS, TOPIC_TEMPLATE, places
from langchain_dpicl.privacy.extensions.unit_values import UnitKeywords
from langchain_dpicl.privacy.ledger.tickets import Ticket

TopicNoise: TypeAlias = Literal["discrete_laplace", "gaussian"]
TOPIC_NOISES: tuple[TopicNoise, ...] = get_args(TopicNoise)
"""The supported noises on the histogram."""


@dataclass(frozen=True, slots=True)
class DocumentsPlan(SharePlan):
    """Everything public about one store of synthetic documents.

    Formal guarantees:
      - `tickets()` cover the histogram of `topics` and all texts of `generation`, whose branches are the places of
        the topics; together they are (epsilon, delta)-DP under one adjacency.

    Attributes:
      topics: the plan of the keyword histogram: vocabulary, keywords per unit, noise.
      generation: the plan of the texts, by place of a topic.
      least_units: minimum noisy count of a topic.
    """

    method: ClassVar[str] = "documents"

    topics: CountPlan
    generation: GenerationPlan
    least_units: int

    @property
    def release(self) -> CountPlan:
        """The histogram, which is released first."""
        return self.topics

    @property
    def sizes(self) -> Mapping[str | None, int]:
        """Declared units by place of a topic."""
        return self.generation.sizes

    @property
    def num_topics(self) -> int:
        """Maximum number of topics: the number of declared places."""
        return len(self.generation.branches)

    @property
    def documents_per_topic(self) -> int:
        """Texts of each topic."""
        return self.generation.shots_per_label

    @property
    def implementation_delta(self) -> float:
        """Declared gap between ideal and drawn noise, of both steps."""
        return self.topics.implementation_delta + self.generation.implementation_delta

    @property
    def deviation(self) -> float:
        """Standard deviation of the noise on the count of one keyword, in units."""
        return _deviation(self.topics)

    def tickets(self) -> tuple[Ticket, ...]:
        """Returns the tickets of the share: one histogram over all units, then the texts of each place."""
        return (*self.topics.tickets(TOPIC_TEMPLATE), *self.generation.tickets())

    def cost(self, *, record_tokens: int = 60, instruction_tokens: int = 30) -> Cost:
        """Returns model calls and tokens from public caps, as `GenerationPlan.cost`: the histogram calls no model.

        Args:
          record_tokens: cap of a document.
          instruction_tokens: cap of the instruction.
        """
        return self.generation.cost(record_tokens=record_tokens, instruction_tokens=instruction_tokens)

    def found_from(self, confidence: float = 0.95) -> int:
        """Returns how many units must hold a keyword for its noisy count to reach `least_units` with this probability.

        Args:
          confidence: in (0, 1).

        Raises:
          ConfigurationError: `confidence` out of range.
        """
        return self.least_units + keyword_margin(self.topics, confidence)

    def expected(self, confidence: float = 0.95) -> dict[str, float]:
        """Returns the deviation of a keyword's count, and how many units a topic needs to be found.

        Args:
          confidence: probability of finding it, in (0, 1).
        """
        return {"deviation": self.deviation, "found_from": self.found_from(confidence)}

    def _numbers(self) -> dict[str, Any]:
        return {
            "topics": self.topics.to_dict(),
            "least_units": self.least_units,
            "generation": self.generation.to_dict(),
        }

    @classmethod
    def rebuild(cls, shown: Mapping[str, Any]) -> DocumentsPlan:
        """Returns the plan of the parameters shown, see `SharePlan.rebuild`."""
        topics = count_release(shown["topics"])
        if not isinstance(topics.rule, UnitKeywords):
            raise fail("topics", "a histogram of keywords", topics.rule.kind)
        generation = GenerationPlan.rebuild(shown["generation"])
        _coin_drawn_design(generation.design)
        least = check_int("least_units", shown["least_units"], low=1)
        terms = {"partition": shown["dataset_id"], "delta": check_delta(shown["delta"])}
        of_texts = {"partition": generation.partition, "delta": generation.delta}
        if (terms, topics.adjacency) != (of_texts, generation.adjacency):
            found = {**of_texts, "adjacency": generation.adjacency}
            raise fail("generation", f"the terms of its topics: {terms}, {topics.adjacency!r}", found)
        return _priced(cls(topics, generation, least, epsilon=0.0, **terms))


def keyword_margin(release: CountPlan, confidence: float) -> int:
    """Returns a bound on how far a noisy count is above (or below) the true one, with probability `confidence`."""
    if not isinstance(release.mechanism, GaussianCountMechanism):
        return noise_margin(release.scale, confidence)
    from scipy.special import ndtri

    share = check_real("confidence", confidence, low=0.0, high=1.0, low_open=True, high_open=True)
    # A count is rounded to the nearest whole number, upwards from a half.
    return max(0, math.ceil(float(release.scale) * float(ndtri(share)) - 0.5))


def _deviation(release: CountPlan) -> float:
    scale = float(release.scale)
    if isinstance(release.mechanism, GaussianCountMechanism):
        return scale
    rate = 1.0 / scale
    return math.sqrt(2.0 * math.exp(-rate)) / -math.expm1(-rate)


def plan_documents(
    vocabulary: Sequence[str],
    *,
    public_size: int,
    epsilon: float | None,
    delta: float,
    adjacency: Adjacency = "add_remove",
    text_key: str = "text",
    num_topics: int = 10,
    keywords_per_unit: int = 10,
    topic_share: float = 0.2,
    topic_noise: TopicNoise | None = None,
    least_units: int | None = None,
    topic_size: int | None = None,
    noise_multiplier: float | None = None,
    mechanism: str | TokenRule = "gumbel",
    design: RowDesign | None = None,
    redraw_every: int | Literal["run"] | None = None,
    documents_per_topic: int = 4,
    max_tokens: int = 60,
    candidates: int = 101,
    partition: str = "private-examples by topic",
) -> DocumentsPlan:
    """Chooses the noise of both steps so that together they cost at most `epsilon`.

    Args:
      vocabulary: public keywords, each of which may become a topic.
      public_size: declared number of units.
      epsilon: target; the plan's epsilon is an upper bound at most this.
      delta: the share's delta.
      adjacency: neighbouring relation.
      text_key: field of the records that holds the text.
      num_topics: maximum number of topics. Their costs do not add up, but smaller topics have a higher sampling rate.
      keywords_per_unit: keywords that a unit votes for at most; noise grows with it, Gaussian noise with its square
        root.
      topic_share: share of epsilon in (0, 1) that the histogram may cost by itself; the texts get the rest.
      topic_noise: "discrete_laplace" or "gaussian"; None: the one with the smaller deviation.
      least_units: minimum noisy count of a topic; None: so high that with probability 95 % no keyword without units
        reaches it.
      topic_size: declared number of units of a topic, for sampling rates; None: `public_size` spread evenly.
      noise_multiplier: noise on the texts in units of the sensitivity, instead of calibrating.
      mechanism: how a token is released; see `plan_generation`.
      design: shape of rows, with samples of no fixed size; by default `RowDesign.choose()`.
      redraw_every: tokens per secret sample, or "run": one sample for a text.
      documents_per_topic: texts of each topic; their costs compose.
      max_tokens: cap of a text.
      candidates: width of the public domain per token.
      partition: public name under which topics split the units.

    Raises:
      ConfigurationError: a public parameter is out of range, or the noise costs more than epsilon.

    >>> plan = plan_documents(["card", "transfer"], public_size=5_000, epsilon=2.0, delta=1e-6, num_topics=2)
    >>> plan.num_topics, plan.epsilon <= 2.0, round(plan.deviation, 1)
    (2, True, 7.1)
    """
    check_delta(delta)
    check_int("public_size", public_size, low=1)
    check_int("num_topics", num_topics, low=1)
    if isinstance(vocabulary, str) or not isinstance(vocabulary, Iterable):
        raise fail("vocabulary", "a sequence of public keywords", type(vocabulary).__name__)
    check_real("topic_share", topic_share, low=0.0, high=1.0, low_open=True, high_open=True)
    if epsilon is None:
        raise fail("epsilon", "this component's share of the budget", epsilon, "Give epsilon=...")
    rule = UnitKeywords(text_key, keywords_per_unit, tuple(vocabulary))
    if keywords_per_unit > len(rule.declared):  # the vocabulary has no more
        rule = UnitKeywords(text_key, len(rule.declared), rule.declared)
    topics = _histogram(rule, check_epsilon(epsilon) * topic_share, delta, adjacency, topic_noise)
    if least_units is None:
        least_units = 1 + keyword_margin(topics, 1.0 - 0.05 / len(rule.declared))
    check_int("least_units", least_units, low=1)
    size = max(1, public_size // num_topics) if topic_size is None else check_int("topic_size", topic_size, low=1)
    kind = mechanism if isinstance(mechanism, TokenRule) else TokenRule(mechanism)
    generation = plan_generation(
        dict.fromkeys(places(num_topics), size),
        epsilon=epsilon if kind.fixes_noise else None,
        delta=delta,
        adjacency=adjacency,
        # Refused there where clip and temperature decide the noise.
        noise_multiplier=1.0 if noise_multiplier is None and not kind.fixes_noise else noise_multiplier,
        mechanism=kind,
        design=_coin_drawn_design(design),
        redraw_every=redraw_every,
        shots_per_label=documents_per_topic,
        segments=(Segment("text", max_tokens),),
        candidates=candidates,
        partition=partition,
    )
    draft = DocumentsPlan(topics, generation, least_units, partition=partition, epsilon=0.0, delta=delta)
    return _price_plan(draft, epsilon, calibrates=noise_multiplier is None and not kind.fixes_noise)


def _coin_drawn_design(design: RowDesign | None) -> RowDesign:
    """Returns a row design without samples of fixed size: a topic's number of units is private."""
    shape = RowDesign.choose() if design is None else design
    if shape.sampling not in BY_COINS:
        advice = "A unit that is replaced may leave its topic, so no topic has a known size."
        raise fail("sampling", f"one of {sorted(BY_COINS)}", shape.sampling, advice)
    return shape


def _histogram(
    rule: UnitKeywords, epsilon: float, delta: float, adjacency: Adjacency, noise: TopicNoise | None
) -> CountPlan:
    """Returns the histogram with the least noise that costs `epsilon` by itself."""
    if noise is not None:
        check_choice("topic_noise", noise, TOPIC_NOISES)
    # Which noise deviates less depends on delta and the keywords per unit, so both are calibrated and compared.
    plans = []
    if noise != "gaussian":
        laplace = accounting.calibrate(lambda x: PureEvent(1.0 / x), epsilon=epsilon, delta=delta, adjacency=adjacency)
        plans.append(CountPlan(rule, DiscreteLaplaceMechanism(laplace), adjacency))
    if noise != "discrete_laplace":
        normal = accounting.calibrate(GaussianEvent, epsilon=epsilon, delta=delta, adjacency=adjacency)
        plans.append(CountPlan(rule, GaussianCountMechanism(normal), adjacency))
    return min(plans, key=_deviation)


def _price_plan(draft: DocumentsPlan, epsilon: float, *, calibrates: bool) -> DocumentsPlan:
    """Returns the plan with its price, and with noise on the texts that keeps the total within epsilon."""

    def with_noise(noise_multiplier: float) -> DocumentsPlan:
        return dataclasses.replace(draft, generation=_with_noise(draft.generation, noise_multiplier))

    if calibrates:
        delta, adjacency = pricing_delta(draft), draft.adjacency
        noise = accounting.calibrate(lambda x: with_noise(x).event(), epsilon=epsilon, delta=delta, adjacency=adjacency)
        draft = with_noise(noise)
    plan = _priced(draft)
    if plan.epsilon > epsilon:
        advice = "Raise noise_multiplier, lower topic_share, or leave the noise to the plan."
        raise fail("epsilon", f"at least {plan.epsilon:.4g}, which histogram and texts cost together", epsilon, advice)
    return plan


def _priced(draft: DocumentsPlan) -> DocumentsPlan:
    """Returns the plan with its price, and the texts with their own, for reports."""
    return with_price(dataclasses.replace(draft, generation=with_price(draft.generation)))
