"""Plans, calibrates and prices a release of synthetic documents."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias, get_args

from langchain_dpicl.generation.plan import GenerationPlan, Segment, _with_noise, plan_generation
from langchain_dpicl.generation.token_mechanisms import TokenRule
from langchain_dpicl.planning.expected_utility import RowDesign
from langchain_dpicl.planning.share_plan import Cost, SharePlan, check_counts, pricing_delta, with_price
from langchain_dpicl.planning.word_share import (
    FOR_THRESHOLDS,
    WORD_SHARE,
    noise_of_words,
    num_branches,
    one_release,
    words_with,
)
from langchain_dpicl.privacy import accounting
from langchain_dpicl.privacy._validate import (
    Adjacency,
    check_choice,
    check_delta,
    check_epsilon,
    check_int,
    check_positive_delta,
    check_real,
    fail,
)
from langchain_dpicl.privacy.accounting.events import (
    Event,
    GaussianEvent,
    PureEvent,
    RepeatedEvent,
)
from langchain_dpicl.privacy.extensions.count_histograms import (
    CountPlan,
    DiscreteLaplaceMechanism,
    GaussianCountMechanism,
    count_release,
    noise_margin,
)
from langchain_dpicl.privacy.extensions.topic_partition import (
    BY_COINS,
    MOST_TOPICS,
    PAIRS_OF_TOPIC_TEMPLATE,
    TOPIC_TEMPLATE,
    TOPIC_WORDS_TEMPLATE,
    WORDS_OF_TOPIC_TEMPLATE,
    places,
)
from langchain_dpicl.privacy.extensions.unit_values import UnitKeywords
from langchain_dpicl.privacy.extensions.word_release import (
    MOST_PER_UNIT,
    UnitWords,
    WordRelease,
    denied_words,
    word_release,
)
from langchain_dpicl.privacy.ledger.tickets import Ticket, event_of_tickets
from langchain_dpicl.reports.public_words import public_words

TopicNoise: TypeAlias = Literal["discrete_laplace", "gaussian"]
TOPIC_NOISES: tuple[TopicNoise, ...] = get_args(TopicNoise)
"""The supported noises on the histogram."""


@dataclass(frozen=True, slots=True)
class DocumentsPlan(SharePlan):
    """Everything public about one store of synthetic documents.

    Formal guarantees:
      - `tickets()` cover the release of `topics`, the words and pairs of every topic's place, and all texts of
        `generation`, whose branches are the places; together they are (epsilon, delta)-DP under one adjacency.

    Attributes:
      topics: how topics are found: a histogram of public keywords, or a release of words of all units.
      num_topics: maximum number of topics: the number of declared places.
      words: the release of words of one topic; None: no words leave but topics.
      pairs: the same of pairs of released words; None: no pairs.
      generation: the plan of the texts, by place of a topic; None: no texts leave.
      least_units: minimum noisy count of a topic; None: topics are words, which have a threshold.
      runs: so many times all of it is released, each with topics of its own: the runs that can touch one window of a
        stream. The texts of `generation` are those of all runs.
    """

    method: ClassVar[str] = "documents"

    topics: CountPlan | WordRelease
    num_topics: int
    words: WordRelease | None
    pairs: WordRelease | None
    generation: GenerationPlan | None
    least_units: int | None
    runs: int = 1

    @property
    def release(self) -> CountPlan | WordRelease:
        """The release of topics, which comes first."""
        return self.topics

    @property
    def sizes(self) -> Mapping[str | None, int]:
        """Declared units by place of a topic; nothing where no texts leave, which alone depend on them."""
        return {} if self.generation is None else self.generation.sizes

    @property
    def documents_per_topic(self) -> int:
        """Texts of each topic, in one run."""
        return 0 if self.generation is None else self.generation.shots_per_label // self.runs

    def one_run(self) -> DocumentsPlan:
        """Returns the plan of one run; its price is that of all."""
        texts = self.generation
        if texts is not None:
            texts = dataclasses.replace(texts, shots_per_label=self.documents_per_topic)
        return dataclasses.replace(self, generation=texts, runs=1)

    @property
    def implementation_delta(self) -> float:
        """Declared gap between ideal and drawn noise, of all steps that one unit takes part in."""
        of_words = sum(one.implementation_delta for one in (self.words, self.pairs) if one is not None)
        of_texts = 0.0 if self.generation is None else self.generation.implementation_delta
        of_places = of_words * num_branches(self.num_topics, self.topics.adjacency)
        return self.runs * (self.topics.implementation_delta + of_places) + of_texts

    @property
    def deviation(self) -> float:
        """Standard deviation of the noise on the count of one keyword, in units; of words, on a sum of weights."""
        return _deviation(self.topics) if isinstance(self.topics, CountPlan) else self.topics.scale

    @property
    def releases_words(self) -> bool:
        """Whether words that are not declared are released: of topics, or as topics."""
        return self.words is not None or isinstance(self.topics, WordRelease)

    @property
    def topic_template(self) -> str:
        """The ticket template of the release of topics."""
        return TOPIC_TEMPLATE if isinstance(self.topics, CountPlan) else TOPIC_WORDS_TEMPLATE

    def tickets(self) -> tuple[Ticket, ...]:
        """Returns the tickets of the share: topics of all units, then words, pairs and texts of each place."""
        how: dict[str, Any] = {"max_count": self.runs, "refundable": True}
        first = Ticket(template=self.topic_template, event=self.topics.event, **how)
        of_topics = ((WORDS_OF_TOPIC_TEMPLATE, self.words), (PAIRS_OF_TOPIC_TEMPLATE, self.pairs))
        words = (
            Ticket(template=template, event=release.event, label=place, **how)
            for place in places(self.num_topics)
            for template, release in of_topics
            if release is not None
        )
        return (first, *words, *(() if self.generation is None else self.generation.tickets()))

    def cost(self, *, record_tokens: int = 60, instruction_tokens: int = 30) -> Cost:
        """Returns model calls and tokens from public caps, as `GenerationPlan.cost`: topics and words call no model.

        Args:
          record_tokens: cap of a document.
          instruction_tokens: cap of the instruction.

        Raises:
          ConfigurationError: a count out of range.
        """
        if self.generation is None:
            check_counts(record_tokens=record_tokens)
            return Cost(0, 0, 0, 0)
        return self.generation.cost(record_tokens=record_tokens, instruction_tokens=instruction_tokens)

    def found_from(self, confidence: float = 0.95) -> int:
        """Returns how many units must hold a keyword for it to become a topic with this probability.

        Args:
          confidence: in (0, 1).

        Raises:
          ConfigurationError: `confidence` out of range.
        """
        if isinstance(self.topics, WordRelease):
            return self.topics.found_from(confidence)
        return (self.least_units or 0) + keyword_margin(self.topics, confidence)

    def words_from(self, confidence: float = 0.95) -> int | None:
        """Returns how many units of a topic must cast a word for it to be released; None: no words are.

        Args:
          confidence: probability of finding it, in (0, 1).

        Raises:
          ConfigurationError: `confidence` out of range.
        """
        return None if self.words is None else self.words.found_from(confidence)

    def expected(self, confidence: float = 0.95) -> dict[str, float]:
        """Returns the deviation of a keyword's count, and how many units a topic, and a word of one, needs to be found.

        Args:
          confidence: probability of finding it, in (0, 1).
        """
        found = {"deviation": self.deviation, "found_from": self.found_from(confidence)}
        return found if self.words is None else {**found, "words_from": self.words.found_from(confidence)}

    def _numbers(self) -> dict[str, Any]:
        return {
            "topics": self.topics.to_dict(),
            "num_topics": self.num_topics,
            "words": None if self.words is None else self.words.to_dict(),
            "pairs": None if self.pairs is None else self.pairs.to_dict(),
            "least_units": self.least_units,
            "generation": None if self.generation is None else self.generation.to_dict(),
            **({} if self.runs == 1 else {"runs": self.runs}),
        }

    @classmethod
    def rebuild(cls, shown: Mapping[str, Any]) -> DocumentsPlan:
        """Returns the plan of the parameters shown, see `SharePlan.rebuild`."""
        topics = _topics_shown(shown["topics"])
        words, pairs = (None if shown[name] is None else word_release(shown[name]) for name in ("words", "pairs"))
        num_topics = check_int("num_topics", shown["num_topics"], low=1, high=MOST_TOPICS)
        generation = None if shown["generation"] is None else GenerationPlan.rebuild(shown["generation"])
        least = shown["least_units"]
        if isinstance(topics, CountPlan):
            check_int("least_units", least, low=1)
        elif least is not None:
            raise fail("least_units", "None where topics are released words", least)
        _check_words(topics, words, pairs)
        if words is None and generation is None:
            raise fail("words, generation", "one of them", None)
        terms = {"partition": shown["dataset_id"], "delta": check_delta(shown["delta"])}
        if generation is not None:
            _coin_drawn_design(generation.design)
            of_texts = {"partition": generation.partition, "delta": generation.delta}
            if (terms, topics.adjacency) != (of_texts, generation.adjacency):
                found = {**of_texts, "adjacency": generation.adjacency}
                raise fail("generation", f"the terms of its topics: {terms}, {topics.adjacency!r}", found)
            if list(generation.sizes) != list(places(num_topics)):
                raise fail("generation", f"texts of the {num_topics} places of topics", list(generation.sizes))
        runs = check_int("runs", shown.get("runs", 1), low=1)
        if generation is not None and generation.shots_per_label % runs:
            raise fail("runs", f"a divisor of {generation.shots_per_label} texts of a topic", runs)
        return _priced(cls(topics, num_topics, words, pairs, generation, least, runs, epsilon=0.0, **terms))


def _topics_shown(shown: Mapping[str, Any]) -> CountPlan | WordRelease:
    """Returns the release of topics that a plan shows: of keywords, or of words."""
    if shown["rule"].get("kind") == UnitWords.kind:
        return word_release(shown)
    made = count_release(shown)
    if not isinstance(made.rule, UnitKeywords):
        raise fail("topics", "a histogram of keywords, or a release of words", made.rule.kind)
    return made


def _check_words(topics: CountPlan | WordRelease, words: WordRelease | None, pairs: WordRelease | None) -> None:
    """Refuses words that are not of the texts of the topics, and pairs that do not go with the words."""
    if words is None:
        if pairs is not None:
            raise fail("pairs", "None without words", pairs.to_dict())
        return
    of_topics, of_words = ((one.rule.name, one.adjacency) for one in (topics, words))
    if not isinstance(words.rule, UnitWords) or of_topics != of_words:
        raise fail("words", f"words of the texts of the topics: {of_topics}", (words.rule.kind, of_words))
    if isinstance(topics.rule, UnitWords) and words.rule != dataclasses.replace(
        topics.rule, max_words=words.rule.max_words
    ):
        raise fail("words", f"the denied words and public ones of the topics: {topics.rule.to_dict()}", words.to_dict())
    if pairs is not None and pairs != words.for_pairs():
        raise fail("pairs", f"the noise, threshold and field of the words: {words.for_pairs().to_dict()}", pairs)


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
    vocabulary: Sequence[str] | None,
    *,
    public_size: int,
    documents_per_topic: int,
    epsilon: float | None,
    delta: float,
    adjacency: Adjacency = "add_remove",
    text_key: str = "text",
    num_topics: int = 10,
    keywords_per_unit: int | None = None,
    topic_share: float | None = None,
    topic_noise: TopicNoise | None = None,
    least_units: int | None = None,
    topic_size: int | None = None,
    words: int | None = None,
    pairs: bool = False,
    deny: Iterable[str] = (),
    noise_multiplier: float | None = None,
    mechanism: str | TokenRule = "gumbel",
    design: RowDesign | None = None,
    redraw_every: int | Literal["run"] | None = None,
    max_tokens: int = 60,
    candidates: int = 101,
    partition: str = "private-examples by topic",
    runs: int = 1,
) -> DocumentsPlan:
    """Chooses the noise of all steps so that together they cost at most `epsilon`.

    Args:
      vocabulary: public keywords, each of which may become a topic; None: topics are released words.
      public_size: declared number of units.
      documents_per_topic: texts of each topic; their costs compose. 0: words alone.
      epsilon: target; the plan's epsilon is an upper bound at most this.
      delta: the share's delta; half of it goes to the thresholds of released words.
      adjacency: neighbouring relation.
      text_key: field of the records that holds the text.
      num_topics: maximum number of topics. Their costs do not add up, but smaller topics have a higher sampling rate.
      keywords_per_unit: keywords that a unit votes for at most, or words that it casts for topics; noise grows with it,
        Gaussian noise with its square root. None: 10 keywords, or 16 words.
      topic_share: share of epsilon in (0, 1) that the topics may cost by themselves; None: a fifth, and of topics that
        are released words beside words of topics, the noise of these.
      topic_noise: of a histogram, "discrete_laplace" or "gaussian"; None: the one with the smaller deviation.
      least_units: minimum noisy count of a topic; None: so high that with probability 95 % no keyword without units
        reaches it.
      topic_size: declared number of units of a topic, for sampling rates; None: `public_size` spread evenly.
      words: words of its topic that a unit casts at most; 0: none are released. None: 8 where no texts leave, else 0.
      pairs: whether pairs of released words that are neighbours are released too.
      deny: public words that are never released.
      noise_multiplier: noise on the texts in units of the sensitivity, instead of calibrating.
      mechanism: how a token is released; see `plan_generation`.
      design: shape of rows, with samples of no fixed size; by default `RowDesign.choose()`.
      redraw_every: tokens per secret sample, or "run": one sample for a text.
      max_tokens: cap of a text.
      candidates: width of the public domain per token.
      partition: public name under which topics split the units.
      runs: how often all of it is released; of a stream the runs that can touch one window.

    Raises:
      ConfigurationError: a public parameter is out of range, or the noise costs more than epsilon.

    >>> share = {"public_size": 5_000, "epsilon": 2.0, "delta": 1e-6, "num_topics": 2}
    >>> plan = plan_documents(["card", "transfer"], documents_per_topic=4, **share)
    >>> plan.num_topics, plan.epsilon <= 2.0, round(plan.deviation, 1)
    (2, True, 7.1)
    >>> plan_documents(["card", "transfer"], documents_per_topic=0, **share).words_from(0.95)
    56
    """
    check_positive_delta(delta)
    check_int("public_size", public_size, low=1)
    check_int("num_topics", num_topics, low=1, high=MOST_TOPICS)
    check_int("documents_per_topic", documents_per_topic, low=0)
    check_int("runs", runs, low=1)
    if vocabulary is not None and (isinstance(vocabulary, str) or not isinstance(vocabulary, Iterable)):
        raise fail("vocabulary", "a sequence of public keywords", type(vocabulary).__name__)
    if topic_share is not None:
        check_real("topic_share", topic_share, low=0.0, high=1.0, low_open=True, high_open=True)
    if epsilon is None:
        raise fail("epsilon", "this component's share of the budget", epsilon, "Give epsilon=...")
    target, denied = check_epsilon(epsilon), denied_words(deny)
    most = _words_of_a_unit(words, documents_per_topic, pairs=pairs)
    if keywords_per_unit is None:
        keywords_per_unit = _TOPIC_WORDS if vocabulary is None else _TOPIC_KEYWORDS
    if vocabulary is not None and not most and denied:
        raise fail("deny", "none where no words are released", f"{len(denied)} of them", "Give words=...")
    if vocabulary is None and (least_units, topic_noise) != (None, None):
        advice = "A released word has a threshold and Gaussian noise. Give vocabulary=... for a histogram."
        raise fail("min_units, noise", "None where topics are released words", (least_units, topic_noise), advice)
    releases = _first_releases(
        None if vocabulary is None else tuple(vocabulary),
        _WordTerms(text_key, denied, keywords_per_unit, most, pairs, num_topics, delta, adjacency, runs),
        epsilon=target,
        topic_share=topic_share,
        topic_noise=topic_noise,
        has_texts=documents_per_topic > 0,
    )
    topics = releases[0]
    if isinstance(topics, CountPlan):
        if least_units is None:
            least_units = 1 + keyword_margin(topics, 1.0 - 0.05 / len(topics.rule.declared or ()))
        check_int("least_units", least_units, low=1)
    size = max(1, public_size // num_topics) if topic_size is None else check_int("topic_size", topic_size, low=1)
    kind = mechanism if isinstance(mechanism, TokenRule) else TokenRule(mechanism)
    generation = None
    if documents_per_topic:
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
            shots_per_label=documents_per_topic * runs,
            segments=(Segment("text", max_tokens),),
            candidates=candidates,
            partition=partition,
        )
    terms: dict[str, Any] = {"partition": partition, "epsilon": 0.0, "delta": delta}
    draft = DocumentsPlan(topics, num_topics, *releases[1:], generation, least_units, runs, **terms)
    return _price_plan(draft, target, calibrates=noise_multiplier is None and not kind.fixes_noise)


WORDS_BY_DEFAULT = 8
"""Words that a unit casts where words alone leave and the caller says no number."""
_TOPIC_KEYWORDS, _TOPIC_WORDS = 10, 16
_TOPIC_SHARE = 0.2


def _words_of_a_unit(words: int | None, documents_per_topic: int, *, pairs: bool) -> int:
    """Returns how many words of its topic a unit casts."""
    if not isinstance(pairs, bool):
        raise fail("pairs", "True or False", pairs)
    most = words if words is not None else 0 if documents_per_topic else WORDS_BY_DEFAULT
    check_int("words", most, low=0, high=MOST_PER_UNIT)
    if not most and not documents_per_topic:
        advice = "documents_per_topic=0 makes a store of words alone."
        raise fail("words", "at least 1 word of a unit where no texts leave", most, advice)
    if pairs and not most:
        raise fail("pairs", "False where no words of topics are released", pairs, "Give words=8.")
    return most


@dataclass(frozen=True, slots=True)
class _WordTerms:
    """What topics and words are released of and how, but for their noise."""

    text_key: str
    denied: tuple[str, ...]
    topic_words: int
    words: int
    has_pairs: bool
    num_topics: int
    delta: float
    adjacency: Adjacency
    runs: int

    def release(self, most: int, noise: float, failure: float) -> WordRelease:
        """Returns a release of at most so many words of a unit."""
        rule = UnitWords(self.text_key, most, self.denied, public_words().digest)
        return words_with(rule, noise, failure, self.adjacency)

    def event(self, noise: float, failure: float, *, has_topics: bool, first: Sequence[Event] = ()) -> Event:
        """Returns what topics, if they are words, and the words and pairs of all places cost after other events."""
        one = one_release(noise, failure)
        runs = self.runs
        tickets = [Ticket(f"first {place}", event, max_count=runs) for place, event in enumerate(first)]
        tickets += [Ticket("topics", one, max_count=runs)] if has_topics else []
        of_place = ("words", "pairs")[: (2 if self.has_pairs else 1) if self.words else 0]
        tickets += [Ticket(n, one, label=place, max_count=runs) for place in places(self.num_topics) for n in of_place]
        return event_of_tickets(tickets, partition="units by topic")


def _first_releases(
    vocabulary: tuple[str, ...] | None,
    terms: _WordTerms,
    *,
    epsilon: float,
    topic_share: float | None,
    topic_noise: TopicNoise | None,
    has_texts: bool,
) -> tuple[CountPlan | WordRelease, WordRelease | None, WordRelease | None]:
    """Returns the releases of topics, of the words of one topic, and of pairs of these."""
    adjacency, delta = terms.adjacency, terms.delta
    rounds = (2 if terms.has_pairs else 1) * num_branches(terms.num_topics, adjacency) if terms.words else 0
    failure = delta * FOR_THRESHOLDS / max(1, rounds + (vocabulary is None)) / terms.runs

    def noise_for(share: float, *, has_topics: bool, own: _WordTerms = terms, first: Sequence[Event] = ()) -> float:
        return noise_of_words(
            lambda noise: own.event(noise, failure, has_topics=has_topics, first=first),
            epsilon=epsilon * share,
            delta=delta,
            adjacency=adjacency,
        )

    topics: CountPlan | WordRelease | None = None
    if vocabulary is not None:
        most = min(check_int("keywords_per_unit", terms.topic_words, low=1), max(1, len(vocabulary)))
        rule = UnitKeywords(terms.text_key, most, vocabulary)
        share = epsilon * (topic_share or _TOPIC_SHARE)
        topics = _histogram(rule, share, delta, adjacency, topic_noise, runs=terms.runs)
    elif topic_share is not None or not terms.words:
        alone = dataclasses.replace(terms, words=0)
        noise = noise_for(topic_share or _TOPIC_SHARE, has_topics=True, own=alone)
        topics = terms.release(terms.topic_words, noise, failure)
    if not terms.words:
        if topics is None:
            raise fail("topics", "a release of topics", None)
        return topics, None, None
    # Where texts follow, topics of a share of their own and words are calibrated apart; the total is the texts' matter.
    first = () if topics is None or has_texts else (topics.event,)
    noise = noise_for(WORD_SHARE if has_texts else 1.0, has_topics=topics is None, first=first)
    if topics is None:
        topics = terms.release(terms.topic_words, noise, failure)
    words = terms.release(terms.words, noise, failure)
    return topics, words, words.for_pairs() if terms.has_pairs else None


def _coin_drawn_design(design: RowDesign | None) -> RowDesign:
    """Returns a row design without samples of fixed size: a topic's number of units is private."""
    shape = RowDesign.choose() if design is None else design
    if shape.sampling not in BY_COINS:
        advice = "A unit that is replaced may leave its topic, so no topic has a known size."
        raise fail("sampling", f"one of {sorted(BY_COINS)}", shape.sampling, advice)
    return shape


def _histogram(
    rule: UnitKeywords, epsilon: float, delta: float, adjacency: Adjacency, noise: TopicNoise | None, *, runs: int
) -> CountPlan:
    """Returns the histogram with the least noise that costs `epsilon` by itself, over all runs."""

    def scale(event: Callable[[float], Event]) -> float:
        def of_all(noise: float) -> Event:
            return event(noise) if runs == 1 else RepeatedEvent(event(noise), runs)

        return accounting.calibrate(of_all, epsilon=epsilon, delta=delta, adjacency=adjacency)

    if noise is not None:
        check_choice("topic_noise", noise, TOPIC_NOISES)
    # Which noise deviates less depends on delta and the keywords per unit, so both are calibrated and compared.
    plans = []
    if noise != "gaussian":
        laplace = scale(lambda x: PureEvent(1.0 / x))
        plans.append(CountPlan(rule, DiscreteLaplaceMechanism(laplace), adjacency))
    if noise != "discrete_laplace":
        plans.append(CountPlan(rule, GaussianCountMechanism(scale(GaussianEvent)), adjacency))
    return min(plans, key=_deviation)


def _price_plan(draft: DocumentsPlan, epsilon: float, *, calibrates: bool) -> DocumentsPlan:
    """Returns the plan with its price, and with noise on the texts that keeps the total within epsilon."""
    generation = draft.generation

    def with_noise(texts: GenerationPlan, noise_multiplier: float) -> DocumentsPlan:
        return dataclasses.replace(draft, generation=_with_noise(texts, noise_multiplier))

    if calibrates and generation is not None:
        delta, adjacency = pricing_delta(draft), draft.adjacency
        noise = accounting.calibrate(
            lambda x: with_noise(generation, x).event(), epsilon=epsilon, delta=delta, adjacency=adjacency
        )
        draft = with_noise(generation, noise)
    plan = _priced(draft)
    if plan.epsilon > epsilon:
        advice = "Raise noise_multiplier, lower topic_share, or leave the noise to the plan."
        raise fail("epsilon", f"at least {plan.epsilon:.4g}, which all steps cost together", epsilon, advice)
    return plan


def _priced(draft: DocumentsPlan) -> DocumentsPlan:
    """Returns the plan with its price, and the texts with their own, for reports."""
    texts = draft.generation
    return with_price(draft if texts is None else dataclasses.replace(draft, generation=with_price(texts)))
