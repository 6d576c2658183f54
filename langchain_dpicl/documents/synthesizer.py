"""DocumentSynthesizer: releases topics and writes documents for them, with checkpoints (after DP-SynRAG, 2025)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, cast

from langchain_core.documents import Document

from langchain_dpicl._construction import awaitable, tells_how_to_build
from langchain_dpicl.backends.resolve import as_backend
from langchain_dpicl.backends.sync_async import Blocking, EffectGenerator
from langchain_dpicl.budget.events import RunEvents
from langchain_dpicl.budget.handler import BudgetLike, resolve_budget
from langchain_dpicl.discovery import public_vocabulary
from langchain_dpicl.documents.plan import DocumentsPlan, plan_documents
from langchain_dpicl.generation.decoding_loop import DecodingSpec, PartialText, make_script
from langchain_dpicl.generation.plan import warn_of_noise
from langchain_dpicl.generation.synthesizer import DraftRun
from langchain_dpicl.generation.token_mechanisms import TokenRule, public_margin
from langchain_dpicl.options import Rows, Topics
from langchain_dpicl.options.base import LLM, Where, option_of
from langchain_dpicl.options.rows import LogitNoise, LogitNoiseName, Noise, NoiseName, noise_of
from langchain_dpicl.options.tasks import Decoding, GenerationTask
from langchain_dpicl.planning.expected_utility import RowDesign
from langchain_dpicl.privacy._validate import fail
from langchain_dpicl.privacy.data.private_examples import PrivateExamples
from langchain_dpicl.privacy.extensions.count_histograms import Count
from langchain_dpicl.privacy.extensions.topic_partition import TOPIC_TEMPLATE, TopicExamples, places, split_by_topics
from langchain_dpicl.privacy.ledger.shares import Reservation
from langchain_dpicl.release.count_release import release_counts
from langchain_dpicl.release.declare_share import declare_share, share_of_delta
from langchain_dpicl.released.documents import SyntheticDocuments, SyntheticText, release_id
from langchain_dpicl.runs.door import door
from langchain_dpicl.runs.journal import RunJournal
from langchain_dpicl.runs.release_run import RunCall


@dataclass(frozen=True, slots=True)
class TopicDecodingSpec(DecodingSpec):
    """Public parameters of a generation whose labels are places; prompts show the topic of a place.

    Attributes:
      topics: topic by place, once released.
    """

    topics: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, spec: DecodingSpec) -> TopicDecodingSpec:
        """Returns the same parameters, for topics that are not released yet."""
        return cls(**{each.name: getattr(spec, each.name) for each in dataclasses.fields(spec) if each.init})

    def known(self, draft: PartialText) -> dict[str, str]:
        """Returns the public or released values that the draft's prompts are filled with."""
        return {str(self.wording.label_key): self.topics[str(draft.label)], **draft.values}


@dataclass(slots=True)
class _Histogram:
    """The first item of a run: the released counts of keywords, the topics chosen from them, and the ticket."""

    counts: dict[str, int] = field(default_factory=dict)
    topics: tuple[Count, ...] | None = None
    ticket: Reservation | None = None
    done: bool = False
    busy: bool = False


@tells_how_to_build()
class DocumentSynthesizer(DraftRun[Document, SyntheticDocuments]):
    """Turns private documents into synthetic ones by topic, once; searching them afterwards is free.

    Every unit votes for a few keywords of a public vocabulary. The keywords with the largest noisy counts become
    topics. A unit belongs to at most one topic, and the texts of a topic are generated from its units.

    Formal guarantees:
      - Everything it returns or shows is a post-processing of one noisy histogram and of indices released under `plan`,
        whose event is charged to the budget as one share, reserved before the first private record is read.
      - The histogram covers the whole vocabulary, which is public; topics are chosen from its noisy counts only.
      - Which topic a unit has follows from its own texts and from the released topics, so texts of different topics
        read different units, and their costs do not add up. A unit without a topic is in no text.

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
    """

    _item_name = "document"
    _private: TopicExamples
    _script: TopicDecodingSpec
    plan: DocumentsPlan

    def __init__(
        self,
        private: TopicExamples,
        script: TopicDecodingSpec,
        *,
        plan: DocumentsPlan,
        public: Mapping[str, Any],
        **run: Any,
    ) -> None:
        self._public = dict(public)
        self._histogram = _Histogram()
        super().__init__(private, script, plan=plan, generation=plan.generation, first=[self._histogram], **run)
        self._resume()

    @classmethod
    @door("DocumentSynthesizer")
    def from_private_examples(
        cls,
        private: PrivateExamples,
        *,
        llm: LLM,
        topics: Topics | Sequence[str] | None = None,
        documents_per_topic: int = 4,
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
        """Plans the noise of both steps and declares the share; nothing is spent yet.

        Args:
          private: the documents, declared without labels, such as `PrivateExamples(loader, ...)`; bound
            to the budget's ledger here.
          llm: an engine, an object that carries one, or a LangChain model with token log-probabilities. It SEES the
            private prompts.
          topics: a `Topics`, or its vocabulary: public keywords that may become topics, never words of the records;
            None: words of `public_vocabulary()`.
          documents_per_topic: texts of each topic; their costs compose.
          max_tokens: cap of a text, in tokens.
          budget: a PrivacyBudgetCallbackHandler, a Budget or a RunnableConfig that holds one; None: the context's.
          epsilon: this component's share of the budget (both noises are calibrated to it).
          instruction: public task description, the first paragraph of every prompt.
          task: a `GenerationTask`: the wording of prompts, with the topic's field.
          rows: a `Rows`: how many prompts a token reads, of how many records, and how often they are drawn anew.
          noise: on the texts: a `Noise` on next-token probabilities, a `LogitNoise`, or the name of a mechanism; None:
            "gumbel". Its delta is the share's.
          decoding: a `Decoding`: candidates, stops, sampling, grammar.
          component: name in the ledger; the same name and plan reopen the same share with its remaining tickets.
          checkpoint: file that stores the topics, and the tokens of every block, before their tickets are committed. If
            it exists, the run continues from it, also in another process, with the same durable ledger.

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
        named = component if component is not None else RunJournal.component_in(checkpoint)
        name = spender.fresh_name("documents") if named is None else named
        total = private.public_size_of(None)
        size = max(1, total // found.num_topics) if found.topic_size is None else found.topic_size
        # Declared with places before any topic is known, so that one share covers both steps.
        by_topic = split_by_topics(
            private,
            dataset_id=f"{private.dataset_id} by topics of {name}",
            topic_key=found.key,
            public_size=dict.fromkeys(places(found.num_topics), size),
        )
        made = make_script(
            by_topic,
            as_backend(llm),
            task=GenerationTask.of(task, instruction),
            max_tokens=max_tokens,
            noise=mechanism,
            decoding=writing,
        )
        plan = plan_documents(
            public_vocabulary() if found.vocabulary is None else found.vocabulary,
            public_size=total,
            epsilon=epsilon,
            delta=share_of_delta(spender, epsilon=epsilon, delta=mechanism.delta),
            adjacency=spender.adjacency,
            text_key=private.text_key,
            num_topics=found.num_topics,
            keywords_per_unit=found.keywords_per_unit,
            topic_share=found.epsilon_share,
            topic_noise=found.noise,
            least_units=found.min_units,
            topic_size=size,
            noise_multiplier=mechanism.multiplier,
            mechanism=TokenRule.of(mechanism, writing.temperature),
            design=RowDesign.of(shape, smallest_size=size) or RowDesign.choose(smallest_size=size),
            redraw_every=shape.redraw_every,
            documents_per_topic=documents_per_topic,
            max_tokens=max_tokens,
            candidates=made.candidates,
            partition=by_topic.dataset_id,
        )
        warn_of_noise(plan.generation)
        script = TopicDecodingSpec.of(dataclasses.replace(made, margin=public_margin(plan.generation.release)))
        shown = plan.to_dict()
        public = {**shown, "generation": {**shown["generation"], **script.to_dict()}}
        terms = {"component": name, "ledger_id": spender.ledger_id, "dataset_id": by_topic.dataset_id, "plan": public}
        journal = RunJournal.open(checkpoint, **terms)
        share = declare_share(by_topic, spender, plan, component=name, epsilon=epsilon, public=public, engines=[script])
        return cls(by_topic, script, plan=plan, public=public, share=share, budget=spender, journal=journal)

    afrom_private_examples = awaitable(from_private_examples)

    @property
    def topics(self) -> tuple[Count, ...]:
        """The released topics with their noisy counts, the largest first; empty before the histogram is released."""
        topics = self._histogram.topics if self._histogram.done else None
        return tuple(sorted(topics or (), key=lambda pair: (-pair[1], pair[0])))

    @property
    def counts(self) -> dict[str, int]:
        """The noisy count of every keyword of the vocabulary, as this process released it (public)."""
        return dict(self._histogram.counts)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _make(self, item: Any, call: RunCall) -> EffectGenerator[None]:
        if isinstance(item, PartialText):
            yield from super()._make(item, call)
        else:
            yield Blocking(lambda: self._find(item, call.events))

    def _find(self, item: _Histogram, events: RunEvents) -> None:
        """Releases the histogram, once, and sets the topics."""
        if item.topics is None:  # otherwise an earlier call released it and could not store or split
            item.ticket = self.share.reserve(TOPIC_TEMPLATE)
            events.tickets += 1
            counts = release_counts(self._private, item.ticket, plan=self.plan.topics)
            item.counts, item.topics = dict(counts), choose_topics(counts, self.plan)
            self._record({"topics": item.topics}, item.ticket)
        if item.ticket is not None and item.ticket.uncommitted:
            item.ticket.commit()
        self._name(item.topics)

    def _give_back(self, item: Any, events: RunEvents) -> None:
        if isinstance(item, PartialText):
            super()._give_back(item, events)
        elif item.ticket is not None:
            events.tickets -= item.ticket.give_back()  # an unburnt ticket only

    def _restore(self, entry: Mapping[str, Any]) -> None:
        if self._histogram.done:
            super()._restore(entry)
        else:
            self._name(self._checked(entry.get("topics")))

    def _checked(self, found: Any) -> tuple[Count, ...]:
        """Returns topics from a checkpoint; refuses those that the paid histogram cannot have released."""
        known, least = frozenset(self.plan.topics.rule.declared or ()), self.plan.least_units
        pairs = found if isinstance(found, list) and len(found) <= self.plan.num_topics else [None]
        topics = tuple((pair[0], pair[1]) for pair in pairs if isinstance(pair, list) and len(pair) == 2)
        are_known = all(isinstance(topic, str) and topic in known for topic, _ in topics)
        if (
            len(topics) < len(pairs)
            or not are_known
            or not all(type(count) is int and count >= least for _, count in topics)
        ):
            raise fail("checkpoint", f"topics of the vocabulary, of {least} units or more", "others")
        # An unused histogram ticket proves that these topics were not released on this ledger.
        if self.share.remaining(TOPIC_TEMPLATE):
            raise fail("checkpoint", "topics of a histogram that was released", "a ledger on which none was")
        return topics

    def _name(self, topics: tuple[Count, ...]) -> None:
        """Splits the units by topics, permanently on this ledger, and adds the texts of these topics."""
        if topics:
            named = self._private.name_topics(topic for topic, _ in topics)
            self._budget.bind(named)
        by_place = dict(zip(places(self.plan.num_topics), (topic for topic, _ in topics), strict=False))
        self._script.topics.update(by_place)
        self._begin(by_place)
        self._histogram.topics, self._histogram.done = topics, True

    def _examples(self, item: Any) -> list[Document]:
        is_text = isinstance(item, PartialText) and self._is_written(item)
        return [self._text(item).document(release_id(self._names(), self.topics))] if is_text else []

    def _value(self) -> SyntheticDocuments:
        order = list(self._script.topics)
        written = sorted(self._written(), key=lambda draft: order.index(str(draft.label)))
        return SyntheticDocuments(tuple(map(self._text, written)), self.topics, self.report, self._public)

    def _text(self, draft: PartialText) -> SyntheticText:
        topic = self._script.topics[str(draft.label)]
        return SyntheticText(draft.values[self._script.wording.text_key], topic, draft.number)

    def _names(self) -> dict[str, str]:
        return {
            "component": self.component,
            "dataset_id": self.plan.partition,
            "ledger_id": self._budget.ledger_id,
        }

    def __repr__(self) -> str:
        return f"DocumentSynthesizer(component={self.component!r}, topics={self.plan.num_topics})"


def choose_topics(counts: Iterable[Count], plan: DocumentsPlan) -> tuple[Count, ...]:
    """Returns the topics, smallest noisy count first: a unit with several topics belongs to the rarest."""
    seen = [pair for pair in counts if pair[1] >= plan.least_units]
    most = sorted(seen, key=lambda pair: -pair[1])[: plan.num_topics]
    return tuple(reversed(most))
