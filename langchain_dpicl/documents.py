"""DocumentSynthesizer: plans and releases topics, their words, and texts for retrieval (after DP-SynRAG, 2025)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self, TypeAlias, cast, get_args

from langchain_core.documents import Document

from langchain_dpicl._calls import warn_caller
from langchain_dpicl._construction import tells_how_to_build
from langchain_dpicl.backends.resolve import as_backend
from langchain_dpicl.backends.sync_async import Blocking, EffectGenerator, awaitable, check_silent
from langchain_dpicl.budget.handler import BudgetLike, RunEvents, resolve_budget
from langchain_dpicl.exceptions import NoisyPlanWarning
from langchain_dpicl.generation.decoding_loop import DecodingSpec, PartialText, WordTree, make_script
from langchain_dpicl.generation.plan import (
    GenerationPlan,
    Segment,
    TokenRule,
    _with_noise,
    plan_generation,
    public_margin,
    warn_of_noise,
)
from langchain_dpicl.generation.synthesizer import DraftRun, commit_unless_done, weights_in
from langchain_dpicl.options import (
    LLM,
    Decoding,
    GenerationTask,
    LogitNoise,
    LogitNoiseName,
    Noise,
    NoiseName,
    Option,
    Rows,
    Topics,
    Where,
    noise_of,
    option_of,
)
from langchain_dpicl.planning.expected_utility import RowDesign
from langchain_dpicl.planning.share_plan import (
    FOR_THRESHOLDS,
    WORD_SHARE,
    Cost,
    SharePlan,
    check_counts,
    noise_of_words,
    num_branches,
    one_release,
    pricing_delta,
    warn_of_few_units,
    with_price,
    words_with,
)
from langchain_dpicl.privacy import accounting
from langchain_dpicl.privacy._validate import (
    Adjacency,
    check_choice,
    check_delta,
    check_epsilon,
    check_flag,
    check_int,
    check_positive_delta,
    check_real,
    fail,
)
from langchain_dpicl.privacy.accounting.events import Event, GaussianEvent, PureEvent, RepeatedEvent
from langchain_dpicl.privacy.extensions.private_streams import RollingRange
from langchain_dpicl.privacy.extensions.value_counts import (
    BY_COINS,
    MOST_TOPICS,
    PAIRS_OF_TOPIC_TEMPLATE,
    TOPIC_TEMPLATE,
    TOPIC_WORDS_TEMPLATE,
    WORDS_OF_TOPIC_TEMPLATE,
    CountPlan,
    DiscreteLaplaceMechanism,
    GaussianCountMechanism,
    TopicExamples,
    UnitKeywords,
    count_release,
    noise_margin,
    places,
    split_by_topics,
    words_of,
)
from langchain_dpicl.privacy.extensions.word_release import (
    MOST_PER_UNIT,
    UnitWords,
    Weight,
    WordRelease,
    denied_words,
    word_release,
)
from langchain_dpicl.privacy.ledger.shares import Reservation
from langchain_dpicl.privacy.ledger.tickets import Ticket, event_of_tickets
from langchain_dpicl.privacy.private_examples import PrivateExamples
from langchain_dpicl.release.count_release import release_counts, release_words
from langchain_dpicl.release.declare_share import (
    check_run,
    declare_share,
    range_of,
    runs_per_window,
    share_of_delta,
    stream_runs,
)
from langchain_dpicl.released.base import release_id
from langchain_dpicl.released.counts import WordGroup, without_words
from langchain_dpicl.released.documents import SyntheticDocuments, SyntheticText, blocks_of
from langchain_dpicl.reports.rendering import format_rounded_up
from langchain_dpicl.reports.verify import problems_in, public_words, topic_problems, topic_word_problems
from langchain_dpicl.runs.door import door
from langchain_dpicl.runs.release_run import RunCall, RunItem, RunJournal, as_declared, reads_of, report_of

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
        return self.topics.deviation if isinstance(self.topics, CountPlan) else self.topics.scale

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
      deny: public words that are never released as topics or words: keywords that hold one are left out.
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
        None if vocabulary is None else _allowed(vocabulary, frozenset(denied)),
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


def warn_of_few(plan: DocumentsPlan, public_size: int) -> None:
    """Warns the program that topics, or the words of one, may not be found among all declared units."""
    needed, words = plan.found_from(), plan.topics.rule.max_words if isinstance(plan.topics, WordRelease) else 1
    warn_of_few_units("A topic", needed, public_size, among=words)
    # One topic may hold all units: nobody declared how they spread.
    if needed <= public_size and plan.words is not None:
        warn_of_few_units("A word of a topic", plan.words.found_from(), public_size, among=plan.words.rule.max_words)


WORDS_BY_DEFAULT = 8
"""Words that a unit casts where words alone leave and the caller says no number."""
_TOPIC_KEYWORDS, _TOPIC_WORDS = 10, 16
_TOPIC_SHARE = 0.2


def _words_of_a_unit(words: int | None, documents_per_topic: int, *, pairs: bool) -> int:
    """Returns how many words of its topic a unit casts."""
    check_flag("pairs", pairs)
    most = words if words is not None else 0 if documents_per_topic else WORDS_BY_DEFAULT
    check_int("words", most, low=0, high=MOST_PER_UNIT)
    if not most and not documents_per_topic:
        advice = "documents_per_topic=0 makes a store of words alone."
        raise fail("words", "at least 1 word of a unit where no texts leave", most, advice)
    if pairs and not most:
        raise fail("pairs", "False where no words of topics are released", pairs, "Give words=8.")
    return most


def _allowed(vocabulary: Iterable[str], denied: frozenset[str]) -> tuple[str, ...]:
    """Returns the keywords without a denied word; what is no text is refused by the rule that reads them."""
    return tuple(each for each in vocabulary if not isinstance(each, str) or not _is_in(each, denied))


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
    return min(plans, key=lambda plan: plan.deviation)


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
        raise fail(
            "epsilon", f"at least {format_rounded_up(plan.epsilon, 4)}, which all steps cost together", epsilon, advice
        )
    return plan


def _priced(draft: DocumentsPlan) -> DocumentsPlan:
    """Returns the plan with its price, and the texts with their own, for reports."""
    texts = draft.generation
    return with_price(draft if texts is None else dataclasses.replace(draft, generation=with_price(texts)))


@dataclass(frozen=True, slots=True)
class TopicDecodingSpec(DecodingSpec):
    """Public parameters of a generation whose labels are places; prompts show the topic of a place."""

    topics: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, spec: DecodingSpec) -> TopicDecodingSpec:
        """Returns the same parameters, for topics that are not released yet."""
        return cls(**{each.name: getattr(spec, each.name) for each in dataclasses.fields(spec) if each.init})

    def known(self, draft: PartialText) -> dict[str, str]:
        """Returns the public or released values that the draft's prompts are filled with."""
        return {str(self.wording.label_key): self.topics[str(draft.label)], **draft.values}


@dataclass(slots=True)
class _Findings(RunItem):
    """The first item of a run: topics with their noisy counts, the words of each place, and the ticket at work.

    Attributes:
      counts: noisy counts of all keywords, or weights of all released words.
      topics: chosen from them, in the order in which units look for theirs; None: not released yet.
      words: released words by place; a place whose ticket was lost has none.
      pairs: released pairs by place.
      gone: topics that the review took out before they were named; None: not asked yet.
      dropped: released words that the review took out, those topics too; None: not all words are released.
      is_reviewed: whether there was a review, in this process or in the one that wrote the checkpoint.
    """

    counts: dict[str, float] = field(default_factory=dict)
    topics: tuple[Weight, ...] | None = None
    words: dict[str, tuple[Weight, ...]] = field(default_factory=dict)
    pairs: dict[str, tuple[Weight, ...]] = field(default_factory=dict)
    gone: frozenset[str] | None = None
    dropped: frozenset[str] | None = None
    is_reviewed: bool = False


@tells_how_to_build()
class DocumentSynthesizer(DraftRun[Document, SyntheticDocuments]):
    r"""Turns private documents into public ones by topic, once; searching them afterwards is free.

    Topics are keywords of a public vocabulary with large noisy counts, or words that many units write. A unit belongs
    to at most one topic, the rarest in its texts. For each topic it releases words that many of its units write, or
    texts that are written from its units, or both. A topic whose records all hold a rarer one has no units, whatever
    its count: its texts are noise alone. Choose keywords that do not stand in the same records.

    Formal guarantees:
      - Everything it returns or shows is a post-processing of the topics, words, pairs and indices released under
        `plan`, whose event is charged to the budget as one share, reserved before the first private record is read.
      - A histogram covers the whole vocabulary, which is public; topics are chosen from its noisy counts only. Topics
        and words that are not declared leave as `WordDiscovery` releases them.
      - Which topic a unit has follows from its own texts and from the released topics, so words and texts of different
        topics read different units, and their costs do not add up. A unit without a topic is in none of them.

    Words that many people write are released unchanged, names too: read them before you send them on, or give a
    review.

    Build it with `from_private_examples`; `run` and `arun` release, and continue after an interruption.

    Example:
      >>> from langchain_dpicl import Budget, EmbeddedLLM, PrivateExamples
      >>> from langchain_dpicl.options import Topics
      >>> notes = ["a card was declined"] * 400 + ["the transfer is late"] * 400
      >>> synthesizer = DocumentSynthesizer.from_private_examples(
      ...     PrivateExamples(notes, public_size=1_000),
      ...     llm=EmbeddedLLM(),
      ...     topics=Topics(("card", "transfer", "boat"), num_topics=2),
      ...     documents_per_topic=1,
      ...     max_tokens=4,
      ...     budget=Budget(epsilon=4.0, delta=1e-6),
      ...     epsilon=4.0,
      ... )
      >>> documents = synthesizer.run(progress=False)
      >>> sorted(topic for topic, _ in documents.topics), len(documents)
      (['card', 'transfer'], 2)
      >>> retriever = documents.as_retriever(search_kwargs={"k": 1})

      Words alone need no model:

      >>> synthesizer = DocumentSynthesizer.from_private_examples(
      ...     PrivateExamples(notes, public_size=1_000),
      ...     topics=Topics(("card", "transfer", "boat"), num_topics=2),
      ...     documents_per_topic=0,
      ...     budget=Budget(epsilon=4.0, delta=1e-6),
      ...     epsilon=2.0,
      ... )
      >>> sorted(document.page_content for document in synthesizer.run(progress=False).documents)
      ['card\ndeclined', 'transfer\nlate']
    """

    _item_name = "document"
    _private: TopicExamples
    _script: TopicDecodingSpec
    plan: DocumentsPlan

    def __init__(
        self,
        private: TopicExamples,
        script: TopicDecodingSpec | None,
        *,
        plan: DocumentsPlan,
        public: Mapping[str, Any],
        review: Callable[[tuple[str, ...]], Iterable[str]] | None = None,
        **run: Any,
    ) -> None:
        self._public = dict(public)
        self._found = _Findings()
        self._topics: dict[str, str] = {} if script is None else script.topics
        self._look = review
        # Those of topics are filled in once they are released; words that were released before stand there already.
        is_open = script is not None and script.trees is not None and not script.trees
        self._trees: dict[str | None, WordTree] | None = {} if is_open else None
        if script is not None and self._trees is not None:
            script = dataclasses.replace(script, trees=self._trees)
        super().__init__(private, script, plan=plan, generation=plan.one_run().generation, first=[self._found], **run)
        self._resume()

    @classmethod
    @door("DocumentSynthesizer", streams=True)
    def from_private_examples(
        cls,
        private: PrivateExamples | RollingRange,
        *,
        documents_per_topic: int,
        llm: LLM | None = None,
        topics: Topics | Sequence[str] | None = None,
        deny: Iterable[str] = (),
        max_tokens: int = 60,
        budget: BudgetLike | None = None,
        epsilon: float | None = None,
        instruction: str | None = None,
        task: GenerationTask | None = None,
        rows: Rows | None = None,
        noise: Noise | LogitNoise | NoiseName | LogitNoiseName | None = None,
        decoding: Decoding | None = None,
        component: str | None = None,
        checkpoint: Where | None = None,
    ) -> Self:
        """Plans the noise of all steps and declares the share; nothing is spent yet.

        Args:
          private: the documents, declared without labels, such as `PrivateExamples(loader, ...)`; bound
            to the budget's ledger here. Or a range of a stream: of `stream.rolling(7, every=7)` this week's run, which
            new records alone pay for; its documents say which days they are of, and go into the same store.
          documents_per_topic: 0 releases words of each topic alone: no text and no model; they hold facts at a few
            dozen units. 1 or more writes so many texts of each topic: sentences, for several times the epsilon; their
            costs compose. `topics=Topics(words=8)` releases both.
          llm: an engine, an object that carries one, or a LangChain model with token log-probabilities. It SEES the
            private prompts; not needed where no texts leave.
          topics: a `Topics`, or its vocabulary: public keywords that may become topics, never words of the records;
            None: words that many documents hold, which are released as such.
          deny: public words that are never released as topics or words; each entry stands for all its words. Keywords
            that hold one are left out of the vocabulary; texts may hold them.
          max_tokens: cap of a text, in tokens.
          budget: a PrivacyBudgetCallbackHandler, a Budget or a RunnableConfig that holds one; None: the context's.
          epsilon: this component's share of the budget (all noise is calibrated to it).
          instruction: public task description, the first paragraph of every prompt.
          task: a `GenerationTask`: the wording of prompts, with the topic's field: "topic", or "topic_" where the
            documents have a field of that name.
          rows: a `Rows`: how many prompts a token reads, of how many records, and how often they are drawn anew.
          noise: on the texts: a `Noise` on next-token probabilities, a `LogitNoise`, or the name of a mechanism; None:
            "gumbel". Its delta is the share's.
          decoding: a `Decoding`: candidates, stops, sampling, grammar.
          component: name in the ledger; the same name and plan reopen the same share with its remaining tickets.
          checkpoint: file that stores topics, words, and the tokens of every block, before their tickets are committed.
            If it exists, the run continues from it, also in another process, with the same durable ledger.

        Raises:
          ConfigurationError: a public argument is invalid; nothing was charged and no private call was made.
          PrivacyBudgetError: no budget, a different budget, or too small a budget.

        Source: Mori et al. (2025), DP-SynRAG (arXiv 2510.06719), with topics that split the units.
        """
        spender = resolve_budget(budget)
        # A list becomes a tuple of texts there; a single text is refused.
        found = topics if isinstance(topics, Topics) else Topics(cast("tuple[str, ...] | None", topics))
        mechanism = noise_of(noise, Noise, LogitNoise)
        shape, writing = option_of("rows", rows, Rows), option_of("decoding", decoding, Decoding)
        wording = GenerationTask.of(task, instruction)
        per_window, source = runs_per_window(private, spender), private
        private = range_of(private)
        if per_window is not None:
            check_run(component, shape.sampling, checkpoint=checkpoint)
        named = component if component is not None else RunJournal.component_in(checkpoint)
        name = spender.fresh_name("documents") if named is None else named
        total = private.public_size_of(None)
        size = max(1, total // found.num_topics)
        # Declared with places before any topic is known, so that one share covers all steps.
        by_topic = split_by_topics(
            private,
            dataset_id=f"{private.dataset_id} by {found.num_topics} topics of {name}, {size} units each",
            topic_key=_topic_key(private.fields),
            public_size=dict.fromkeys(places(found.num_topics), size),
        )
        made = None
        if check_int("documents_per_topic", documents_per_topic, low=0):
            if llm is None:
                raise fail("llm", "a model that writes texts", None, "Give llm=..., or documents_per_topic=0.")
            made = make_script(
                by_topic, as_backend(llm), task=wording, max_tokens=max_tokens, noise=mechanism, decoding=writing
            )
        else:
            _check_unused(
                shape, writing, wording, multiplier=mechanism.multiplier, mechanism=getattr(noise, "mechanism", noise)
            )
        plan = plan_documents(
            found.vocabulary,
            public_size=total,
            documents_per_topic=documents_per_topic,
            epsilon=epsilon,
            delta=share_of_delta(spender, epsilon=epsilon, delta=mechanism.delta),
            adjacency=spender.adjacency,
            text_key=private.text_key,
            num_topics=found.num_topics,
            keywords_per_unit=found.keywords_per_unit,
            topic_share=found.epsilon_share,
            least_units=found.min_units,
            topic_size=size,
            words=found.words,
            pairs=found.pairs,
            deny=deny,
            noise_multiplier=mechanism.multiplier,
            mechanism=TokenRule.of(mechanism, writing.temperature),
            design=RowDesign.of(shape, smallest_size=size) or RowDesign.choose(smallest_size=size),
            redraw_every=shape.redraw_every,
            max_tokens=max_tokens,
            candidates=101 if made is None else made.candidates,
            partition=by_topic.dataset_id,
            runs=per_window or 1,
        )
        if writing.released_words is True and plan.words is None:
            raise fail("Decoding.released_words", "True where words of topics leave", True, "Give Topics(words=8).")
        if found.review is not None and not plan.releases_words:
            raise fail("Topics.review", "None where no words are released", found.review, "Give Topics(words=8).")
        warn_of_few(plan, total)
        script, public = None, plan.to_dict()
        if made is not None and plan.generation is not None:
            warn_of_noise(plan.generation)
            script = TopicDecodingSpec.of(dataclasses.replace(made, margin=public_margin(plan.generation.release)))
            public = {**public, "generation": {**public["generation"], **script.to_dict()}}
        _, journal = RunJournal.of(checkpoint, name, "documents", budget=spender, private=by_topic, plan=public)
        engines = [] if script is None else [script]
        how: dict[str, Any] = {"per_window": per_window, "parts": plan.one_run().tickets()}
        runs = stream_runs(source, private.blocks, spender, component=name, **how)
        if runs is not None:
            public = {**public, "stream": runs.to_dict()}
        paid: dict[str, Any] = {"component": name, "epsilon": epsilon, "runs": runs}
        share = declare_share(by_topic, spender, plan, public=public, engines=engines, **paid)
        run = {"share": share, "budget": spender, "journal": journal, "review": found.review}
        return cls(by_topic, script, plan=plan, public=public, **run)

    afrom_private_examples = awaitable(from_private_examples)

    @property
    def topics(self) -> tuple[Weight, ...]:
        """The released topics with their noisy counts, or weights, the largest first; empty before their release.

        Counts are of all units that hold a topic, also of those that belong to a rarer one. Without those that a review
        took out.
        """
        dropped = self._found.dropped or self._found.gone or frozenset()
        topics = (pair for pair in self._found.topics or () if self._topics and not _is_in(pair[0], dropped))
        return tuple(sorted(topics, key=lambda pair: (-pair[1], pair[0])))

    @property
    def words(self) -> tuple[WordGroup, ...]:
        """The released words of each topic, the smallest topic first; without those that a review took out."""
        dropped = self._found.dropped or self._found.gone or frozenset()
        groups = (
            WordGroup(topic, self._found.words[place], self._found.pairs.get(place, ()))
            for place, topic in self._topics.items()
            if place in self._found.words and not _is_in(topic, dropped)
        )
        return tuple(without_words(group, dropped) for group in groups)

    @property
    def counts(self) -> dict[str, float]:
        """The noisy count of every keyword, or weight of every word, as this process released it (public).

        With a review, of words those that became topics and that it left: it sees no others.
        """
        is_reviewed = self._look is not None and isinstance(self.plan.topics, WordRelease)
        return dict(self.topics) if is_reviewed else dict(self._found.counts)

    @property
    def report(self) -> dict[str, Any]:
        """The privacy report (public), and whether released words were reviewed; reads the ledger."""
        if not self.plan.releases_words:
            return super().report
        dropped = self._found.dropped
        shown = {"words_dropped": len(dropped)} if dropped is not None and self._found.is_reviewed else None
        return report_of(self._budget, self.share, self.plan, review=shown)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _make(self, item: Any, call: RunCall) -> EffectGenerator[None]:
        if isinstance(item, PartialText):
            yield from super()._make(item, call)
        else:
            if self.plan.generation is not None:
                check_silent(self._script.backend)  # topics are paid for the texts
            yield Blocking(lambda: self._find(item, call.events))

    def _find(self, item: _Findings, events: RunEvents) -> None:
        """Releases topics and words, each once, and has them reviewed; what an earlier call released stays."""
        if item.topics is None:  # otherwise an earlier call released it and could not store or split
            item.ticket = self.share.reserve(self.plan.topic_template)
            events.tickets += 1
            found = self._release_topics(item.ticket)
            item.counts, item.topics = dict(found), choose_topics(found, self.plan)
        self._record_once({"topics": item.topics}, item.ticket)
        commit_unless_done(item.ticket)
        has_words = isinstance(self.plan.topics, WordRelease)
        if item.gone is None:
            # Before they are named: the ledger and every report show the names.
            item.gone = self._reviewed(topic for topic, _ in item.topics) if has_words else frozenset()
            item.is_reviewed = has_words and self._look is not None
        if has_words and item.dropped is None:
            self._record_once({"topics_dropped": sorted(item.gone), "is_reviewed": item.is_reviewed})
        self._name(item.topics, item.gone)
        for place, topic in self._topics.items() if self.plan.words is not None else ():
            self._release_words(item, place, frozenset(words_of(topic)), events)
        if item.dropped is None and self.plan.releases_words:
            words = (word for group in self.words for word, _ in group.words)
            item.dropped, item.is_reviewed = self._reviewed(words) | item.gone, self._look is not None
        if item.dropped is not None:
            self._record_once({"dropped": sorted(item.dropped), "is_reviewed": item.is_reviewed})
        self._write(item)
        if not item.topics:
            said = f"no topic was found: one is with a chance of 95 % if {self.plan.found_from():,} units hold it"
            warn_caller(NoisyPlanWarning(f"{said}. The result is empty, and paid for."))

    def _release_topics(self, ticket: Reservation) -> tuple[Weight, ...]:
        plan = self.plan.topics
        if isinstance(plan, CountPlan):
            return release_counts(self._private, ticket, plan=plan)
        return release_words(self._private, ticket, plan=plan, known=public_words())

    def _release_words(self, item: _Findings, place: str, own: frozenset[str], events: RunEvents) -> None:
        """Releases the words of a place but those of its topic, and pairs of them, each once."""
        for name, template, plan, held in (
            ("words", WORDS_OF_TOPIC_TEMPLATE, self.plan.words, item.words),
            ("pairs", PAIRS_OF_TOPIC_TEMPLATE, self.plan.pairs, item.pairs),
        ):
            if plan is not None and place not in held:
                known = public_words() if name == "words" else tuple(word for word, _ in item.words[place])
                how: dict[str, Any] = {"plan": plan, "known": known, "gone": own}
                held[place] = self._words_once(item, template, place, events, **how)
            if plan is not None:
                self._record_once({"place": place, name: held[place]}, item.ticket)
            commit_unless_done(item.ticket)

    def _reviewed(self, words: Iterable[str]) -> frozenset[str]:
        """Returns the released words that the review takes out; it gets them all and can add none."""
        released = dict.fromkeys(words)
        if self._look is None or not released:
            return frozenset()
        found = self._look(tuple(released))
        if isinstance(found, str) or not isinstance(found, Iterable):
            raise fail("Topics.review", "a function that returns the words to drop", type(found).__name__)
        dropped = tuple(found)
        if others := sorted(str(word) for word in dropped if not isinstance(word, str) or word not in released):
            raise fail("Topics.review", "words to drop, of those that it was given", others[:3])
        return frozenset(dropped)

    def _restore(self, entry: Mapping[str, Any]) -> None:
        found = self._found
        if found.done:
            super()._restore(entry)
        elif found.topics is None:
            found.topics = self._checked(entry.get("topics"))
            if not isinstance(self.plan.topics, WordRelease):
                self._restore_names(frozenset())
            if not self.plan.releases_words:
                self._write(found)
        elif found.gone is None:
            self._restore_names(self._dropped_in(entry, "topics_dropped"))
        elif "place" in entry:
            self._restore_words(entry)
        else:
            self._restore_review(entry)

    def _checked(self, found: Any) -> tuple[Weight, ...]:
        """Returns topics from a checkpoint; refuses those that the paid release cannot have released."""
        topics = weights_in(found)
        if len(topics) > self.plan.num_topics or problems_in(topic_problems(topics, self.plan), "topics"):
            least = self.plan.least_units
            expected = "words that its plan can release" if least is None else "topics of the vocabulary, "
            expected += "" if least is None else f"of {least} units or more"
            raise fail("checkpoint", expected, "others")
        self._check_used(self.plan.topic_template, None)
        return topics

    def _restore_words(self, entry: Mapping[str, Any]) -> None:
        """Restores the words or pairs of one place; refuses those that its paid release cannot have released."""
        place, found = entry["place"], self._found
        is_pairs = "pairs" in entry
        held = found.pairs if is_pairs else found.words
        items = weights_in(entry.get("pairs" if is_pairs else "words"))
        template = PAIRS_OF_TOPIC_TEMPLATE if is_pairs else WORDS_OF_TOPIC_TEMPLATE
        if not isinstance(place, str) or place not in self._topics or place in held:
            raise fail("checkpoint", "words of a topic's place, each once", "others")
        words, pairs = (found.words.get(place, ()), items) if is_pairs else (items, ())
        if problems_in(topic_word_problems(self._topics[place], words, pairs, plan=self.plan), "words"):
            raise fail("checkpoint", "words that the plan can release", "others")
        self._check_used(template, place)
        held[place] = items

    def _restore_names(self, gone: frozenset[str]) -> None:
        self._name(self._found.topics or (), gone)
        self._found.gone = gone

    def _restore_review(self, entry: Mapping[str, Any]) -> None:
        self._found.dropped = self._dropped_in(entry, "dropped")
        self._write(self._found)

    def _dropped_in(self, entry: Mapping[str, Any], key: str) -> frozenset[str]:
        """Returns what a review took out; refuses a review of words that a run without one went on with."""
        dropped, is_reviewed = entry.get(key), entry.get("is_reviewed")
        if not isinstance(dropped, list) or not all(isinstance(word, str) for word in dropped):
            raise fail("checkpoint", "what a review dropped", type(dropped).__name__)
        if not isinstance(is_reviewed, bool):
            raise fail("checkpoint", "whether there was a review", type(is_reviewed).__name__)
        # A run without a review keeps out the topics that an earlier one took out.
        if not is_reviewed and not (self._found.gone or frozenset()).issuperset(dropped):
            raise fail("checkpoint", "nothing dropped where there was no review", "words")
        if self._look is not None and not is_reviewed:
            advice = "Texts may hold its words. Leave the review out, and take words out with documents.without(...)."
            raise fail("Topics.review", "None, as in the run that wrote the checkpoint", "a review", advice)
        self._found.is_reviewed = is_reviewed
        return frozenset(dropped)

    def _name(self, topics: tuple[Weight, ...], gone: frozenset[str]) -> None:
        """Splits the units by the topics that the review left, permanently on this ledger."""
        if names := [topic for topic, _ in topics if topic not in gone]:
            self._budget.bind(self._private.name_topics(names))
        self._topics.update(zip(places(self.plan.num_topics), names, strict=False))

    def _write(self, item: _Findings) -> None:
        """Adds the texts of the topics that were not dropped; words that were not are candidates of theirs."""
        if self._trees is not None:
            held = {group.label: group.words for group in self.words}
            for place, topic in self._topics.items():
                words = (*words_of(topic), *(word for word, _ in held.get(topic, ())))
                self._trees[place] = WordTree.of(words, self._script.backend)
        if self.plan.generation is not None:
            dropped = item.dropped or frozenset()
            self._begin({place for place, topic in self._topics.items() if not _is_in(topic, dropped)})
        item.done = True

    def _examples(self, item: Any) -> list[Document]:
        if isinstance(item, PartialText):
            is_written = self._is_written(item)
            names = self._names()
            return [self._text(item).document(release_id(names, self.topics), blocks_of(names))] if is_written else []
        return [each for each in self._value().documents if "kind" in each.metadata] if self.words else []

    def _steps_left(self) -> int:
        if self.plan.generation is None:
            return sum(not item.done for item in self._items)
        return super()._steps_left()

    @property
    def _num_texts(self) -> int:
        return super()._num_texts if self.plan.generation is not None else 0

    def _check_end(self, *, has_more: bool = False) -> None:
        super()._check_end(has_more=has_more or bool(self.words))

    def _value(self) -> SyntheticDocuments:
        order = list(self._topics)
        written = sorted(self._written(), key=lambda draft: order.index(str(draft.label)))
        texts, report = tuple(map(self._text, written)), self.report
        shown = as_declared(self._public, report["budget"], self.component)
        return SyntheticDocuments(texts, self.topics, report, shown, self.words)

    def _text(self, draft: PartialText) -> SyntheticText:
        topic = self._topics[str(draft.label)]
        return SyntheticText(draft.values[self._script.wording.text_key], topic, draft.number)

    def _names(self) -> dict[str, Any]:
        return {
            "component": self.component,
            "dataset_id": self.plan.partition,
            "ledger_id": self._budget.ledger_id,
            **reads_of(self._budget, self.share),
        }

    def __repr__(self) -> str:
        return f"DocumentSynthesizer(component={self.component!r}, topics={self.plan.num_topics})"


def choose_topics(found: Iterable[Weight], plan: DocumentsPlan) -> tuple[Weight, ...]:
    """Returns the topics, smallest noisy count first: a unit with several topics belongs to the rarest."""
    seen = [pair for pair in found if plan.least_units is None or pair[1] >= plan.least_units]
    most = sorted(seen, key=lambda pair: -pair[1])[: plan.num_topics]
    return tuple(reversed(most))


def _topic_key(fields: Collection[str]) -> str:
    """Returns the field of the topic in prompts: one that the documents do not have."""
    key = "topic"
    while key in fields:
        key += "_"
    return key


def _check_unused(*options: Option, **given: Any) -> None:
    """Refuses what says how texts are written where none are."""
    unused = [type(option).__name__ for option in options if option.to_dict()]
    if unused := [*unused, *(f"noise.{name}" for name, value in given.items() if value is not None)]:
        raise fail(", ".join(unused), "none with documents_per_topic=0: no text is written", "some", "Leave them out.")


def _is_in(topic: str, dropped: frozenset[str]) -> bool:
    """Whether a word of a topic was dropped or denied."""
    return not dropped.isdisjoint(words_of(topic))
