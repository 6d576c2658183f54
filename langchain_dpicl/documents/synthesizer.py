"""DocumentSynthesizer: releases topics and writes documents for them, with checkpoints (after DP-SynRAG, 2025)."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, cast

from langchain_core.documents import Document

from langchain_dpicl._construction import awaitable, tells_how_to_build
from langchain_dpicl._opaque import Uncopyable
from langchain_dpicl.backends.resolve import as_backend
from langchain_dpicl.backends.sync_async import EffectGenerator, run_in_thread
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.budget.events import RunEvents
from langchain_dpicl.budget.handler import BudgetLike, resolve_budget
from langchain_dpicl.discovery import public_vocabulary
from langchain_dpicl.documents.plan import DocumentsPlan, plan_documents
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.generation.decoding_loop import DecodingSpec, PartialText, make_script
from langchain_dpicl.generation.plan import GenerationPlan, deal_name, template_name
from langchain_dpicl.generation.synthesizer import DemonstrationSynthesizer
from langchain_dpicl.generation.token_mechanisms import TokenRule, public_margin
from langchain_dpicl.options import Rows, Topics
from langchain_dpicl.options.base import LLM, Where, option_of
from langchain_dpicl.options.rows import LogitNoise, LogitNoiseName, Noise, NoiseName, noise_of
from langchain_dpicl.options.tasks import Decoding, GenerationTask
from langchain_dpicl.planning.expected_utility import RowDesign
from langchain_dpicl.privacy._validate import check_int, fail
from langchain_dpicl.privacy.data.private_examples import PrivateExamples
from langchain_dpicl.privacy.extensions.count_histograms import Count
from langchain_dpicl.privacy.extensions.topic_partition import TOPIC_TEMPLATE, TopicExamples, places, split_by_topics
from langchain_dpicl.privacy.ledger.shares import Reservation, Share
from langchain_dpicl.release.count_release import release_counts
from langchain_dpicl.release.declare_share import declare_share, share_of_delta
from langchain_dpicl.released.documents import SyntheticDocuments, SyntheticText, release_id, text_of
from langchain_dpicl.released.files import CheckpointFile, FileForm
from langchain_dpicl.runs.door import door
from langchain_dpicl.runs.streamed_run import StreamedRun, carrying, report_of

SYNTHESIZER = "DocumentSynthesizer"


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


class TopicWriter(DemonstrationSynthesizer):
    """Generates the texts of topics. Made by `DocumentSynthesizer`."""

    _noun = "synthesizer"

    def __init__(
        self,
        private: TopicExamples,
        script: TopicDecodingSpec,
        *,
        budget: Budget,
        share: Share,
        plan: GenerationPlan,
        keep: Callable[[], None],
    ) -> None:
        super().__init__(private, script, budget=budget, share=share, plan=plan)
        self._topics = script.topics
        self._keep = keep

    def take(self, topics: Mapping[str, str], texts: Sequence[SyntheticText] | None = None) -> None:
        """Sets the topics by place, and restores earlier texts if given; places without a topic are dropped.

        Texts that the ledger has no tickets for are dropped: they were lost with a killed process.
        """
        self._topics.update(topics)
        # A checkpoint names topics, not places: the plan's places have no names of their own.
        place_of = {topic: place for place, topic in topics.items()}
        written = {(place_of.get(text.topic), text.number): text.text for text in texts or ()}
        items = [draft for draft in self._items if draft.label in topics]
        if not set(written) <= {(draft.label, draft.number) for draft in items}:
            raise fail("checkpoint", "at most the planned documents of its topics", len(texts or ()))
        for draft in items:
            if (text := written.get((draft.label, draft.number))) is not None:
                draft.values[self._script.wording.text_key], draft.done = text, True
        if texts is not None:
            remaining = {place: self._left(place) for place in topics}
            items = [draft for draft in items if draft.done or self._takes(remaining, draft)]
        # In place, because the base holds the same list.
        self._items[:] = items

    @staticmethod
    def _takes(remaining: dict[str, int], draft: PartialText) -> bool:
        place = str(draft.label)
        remaining[place] -= 1
        return remaining[place] >= 0

    def _left(self, place: str) -> int:
        """Returns how many whole texts the remaining tickets of a place pay for."""
        plan, share = self.plan, self._share
        if plan.design.sampling == "disjoint":
            deals = share.remaining(deal_name(plan.shots_per_label), label=place)
            return plan.shots_per_label if deals else 0
        branch = dict(plan.branches)[place]
        return min(
            share.remaining(template_name(segment.name, length), label=place) // count
            for segment in plan.segments
            for length, count in branch.blocks(segment.max_tokens)
        )

    @property
    def texts(self) -> list[SyntheticText]:
        """The texts so far, topic by topic."""
        done = [draft for draft in self._items if draft.done]
        done.sort(key=lambda draft: list(self._topics).index(str(draft.label)))
        return [self._text(draft) for draft in done]

    @staticmethod
    def text_of(made: Mapping[str, str]) -> SyntheticText:
        """Returns the text that `stream` or `astream` yielded."""
        return SyntheticText(made["text"], made["topic"], int(made["number"]))

    def _examples(self, draft: PartialText) -> list[dict[str, str]]:
        text = self._text(draft)
        return [{"text": text.text, "topic": text.topic, "number": str(text.number)}]

    def _text(self, draft: PartialText) -> SyntheticText:
        written = draft.values[self._script.wording.text_key]
        return SyntheticText(written, self._topics[str(draft.label)], draft.number)

    def _make(self, draft: PartialText, bar: Any, events: RunEvents) -> EffectGenerator[None]:
        yield from super()._make(draft, bar, events)
        self._keep()

    def _events(self) -> RunEvents:
        return RunEvents(SYNTHESIZER, budget=self._budget, share=self._share)

    def _so_far(self) -> str:
        return f"{len(self.texts)} of {len(self._items)} documents are"


class DocumentsCheckpoint(CheckpointFile):
    """A file that stores the topics before their ticket is committed, and every finished document.

    Its content is untrusted: topics and texts are bounded by the run's terms, and the ledger knows which topics were
    released (`TopicExamples.name_topics`) and how many texts remain.
    """

    _FORM = FileForm(
        "a checkpoint of synthetic documents",
        "langchain-dpicl/synthetic-documents-checkpoint",
        1,
        frozenset({"terms", "topics", "documents"}),
    )

    def read(self) -> tuple[tuple[tuple[str, int], ...], tuple[SyntheticText, ...]] | None:
        """Returns topics with their noisy counts, and documents; None: there is no file yet."""
        if (state := self._state()) is None:
            return None
        topics, texts = state["topics"], state["documents"]
        # The file is untrusted: every value is checked before it is used.
        is_form = isinstance(topics, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in topics)
        if not is_form or not isinstance(texts, list):
            raise ConfigurationError("checkpoint: expected lists of topics and documents, found something else.")
        counts = tuple((str(topic), check_int("topics", count, low=-(2**53))) for topic, count in topics)
        return counts, tuple(map(text_of, texts))

    def save(self, topics: Sequence[tuple[str, int]], texts: Sequence[SyntheticText]) -> None:
        """Writes the topics and documents so far."""
        pairs = [list(pair) for pair in topics]
        self._write(topics=pairs, documents=[dataclasses.asdict(text) for text in texts])


@tells_how_to_build()
class DocumentSynthesizer(Uncopyable, StreamedRun[Document, SyntheticDocuments]):
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
      >>> notes = ["my card was declined"] * 400 + ["the transfer is late"] * 400
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

    def __init__(
        self,
        private: TopicExamples,
        script: TopicDecodingSpec,
        *,
        plan: DocumentsPlan,
        budget: Budget,
        share: Share,
        public: Mapping[str, Any],
        checkpoint: DocumentsCheckpoint | None = None,
    ) -> None:
        self.plan = plan
        self._private = private
        self._budget = budget
        self._share = share
        self._public = dict(public)
        self._checkpoint = checkpoint
        self._lock = threading.Lock()
        self._topics: tuple[Count, ...] | None = None
        self._chosen: tuple[Count, ...] | None = None
        self._uncommitted: Reservation | None = None
        self._counts: dict[str, int] = {}
        self._writer = TopicWriter(
            private, script, budget=budget, share=share, plan=plan.generation, keep=self._keep_texts
        )
        stored = None if checkpoint is None else checkpoint.read()
        if stored is not None:
            self._name(self._checked(stored[0]), stored[1])

    @classmethod
    @door(SYNTHESIZER)
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
          private: the documents, declared without labels, such as `PrivateExamples.from_documents(loader, ...)`; bound
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
          checkpoint: file that stores the topics before their ticket is committed, and every finished text. If it
            exists, the run continues from it, also in another process, with the same durable ledger.

        Raises:
          ConfigurationError: a public argument is invalid; nothing was charged and no private call was made.
          PrivacyBudgetError: no budget, a different budget, or too small a budget.

        Source: Mori et al. (2025), DP-SynRAG (arXiv 2510.06719), with topics that split the units.
        """
        spender = resolve_budget(budget)
        if not isinstance(private, PrivateExamples):
            raise fail("private", "PrivateExamples", type(private).__name__)
        # A list becomes a tuple of texts there; a single text is refused.
        found = topics if isinstance(topics, Topics) else Topics(cast("tuple[str, ...] | None", topics))
        mechanism = noise_of(noise, Noise, LogitNoise)
        shape, writing = option_of("rows", rows, Rows), option_of("decoding", decoding, Decoding)
        name = spender.fresh_name("documents") if component is None else component
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
        script = TopicDecodingSpec.of(dataclasses.replace(made, margin=public_margin(plan.generation.release)))
        shown = plan.to_dict()
        public = {**shown, "generation": {**shown["generation"], **script.to_dict()}}
        terms = {"ledger_id": spender.ledger_id, "dataset_id": by_topic.dataset_id, "component": name, "public": public}
        store = None if checkpoint is None else DocumentsCheckpoint(checkpoint, terms)
        share = declare_share(by_topic, spender, plan, component=name, epsilon=epsilon, public=public, engines=[script])
        return cls(by_topic, script, plan=plan, budget=spender, share=share, public=public, checkpoint=store)

    afrom_private_examples = awaitable(from_private_examples)

    @property
    def topics(self) -> tuple[Count, ...]:
        """The released topics with their noisy counts, the largest first; empty before the histogram is released."""
        return tuple(sorted(self._topics or (), key=lambda pair: (-pair[1], pair[0])))

    @property
    def counts(self) -> dict[str, int]:
        """The noisy count of every keyword of the vocabulary, as this process released it (public)."""
        return dict(self._counts)

    @property
    def finished(self) -> bool:
        """Whether all documents are released."""
        return self._topics is not None and self._writer.finished

    def stream(self, *, progress: bool | None = None) -> Iterator[Document]:
        """Yields each document as soon as it is released.

        Args:
          progress: True shows a bar, False hides it, None shows it on a terminal only.

        Raises:
          RunInterruptedError: the public model call failed; released values are kept, and another `run` or
            `stream` continues with the unburnt tickets. Other errors and Ctrl-C carry `run` as well.
          ModelCallError: the histogram could not be computed; its ticket stays burnt.
          PrivacyBudgetError: the tickets could not be reserved.
        """
        with carrying(run=self):
            with self._events() as events:
                self._find(events)
            for made in self._writer.stream(progress=progress):
                yield self._document(self._writer.text_of(made))

    async def astream(self, *, progress: bool | None = None) -> AsyncIterator[Document]:
        """Async version of `stream`."""
        with carrying(run=self):
            async with self._events() as events:
                await run_in_thread(lambda: self._find(events))
            async for made in self._writer.astream(progress=progress):
                yield self._document(self._writer.text_of(made))

    def released(self) -> SyntheticDocuments:
        """Returns everything released so far with its privacy report."""
        report = report_of(self._budget, self._share, self.plan)
        return SyntheticDocuments(self._texts(), self.topics, report, self._public)

    _whole = released

    def _find(self, events: RunEvents) -> None:
        """Releases the histogram and sets the topics, once; concurrent callers wait."""
        with self._lock:
            if self._topics is not None:
                return
            # Released but not stored by an earlier attempt: only the commit is missing.
            if self._chosen is None:
                self._release_histogram(events)
            self._commit_histogram()
            self._name(self._chosen or (), None)

    def _release_histogram(self, events: RunEvents) -> None:
        ticket = self._share.reserve(TOPIC_TEMPLATE)
        events.tickets += 1
        try:
            counts = release_counts(self._private, ticket, plan=self.plan.topics)
            self._counts, self._chosen = dict(counts), choose_topics(counts, self.plan)
            self._uncommitted = ticket
        finally:
            events.tickets -= ticket.give_back()  # unburnt tickets only

    def _commit_histogram(self) -> None:
        """Commits the ticket once the topics are in the checkpoint; after a failed write, the next run tries again."""
        if self._uncommitted is None:
            return
        if self._checkpoint is not None:
            self._checkpoint.save(self._chosen or (), ())
        self._uncommitted.commit()
        self._uncommitted = None

    def _name(self, topics: tuple[Count, ...], texts: Sequence[SyntheticText] | None) -> None:
        """Splits the units by topics, permanently on this ledger, and passes the topics to the writer."""
        if len(topics) > self.plan.num_topics:
            raise fail("checkpoint", f"at most {self.plan.num_topics} topics", len(topics))
        if topics:
            named = self._private.name_topics(topic for topic, _ in topics)
            self._budget.bind(named)
        by_place = dict(zip(places(self.plan.num_topics), (topic for topic, _ in topics), strict=False))
        self._writer.take(by_place, texts)
        self._topics = topics

    def _checked(self, topics: tuple[Count, ...]) -> tuple[Count, ...]:
        """Refuses topics from a checkpoint that the paid histogram cannot have released."""
        known, least = frozenset(self.plan.topics.rule.declared or ()), self.plan.least_units
        if not all(topic in known and count >= least for topic, count in topics):
            raise fail("checkpoint", f"topics of the vocabulary, of {least} units or more", "others")
        # An unused histogram ticket proves that these topics were not released on this ledger.
        if self._share.remaining(TOPIC_TEMPLATE):
            raise fail("checkpoint", "topics of a histogram that was released", "a ledger on which none was")
        return topics

    def _keep_texts(self) -> None:
        if self._checkpoint is not None:
            self._checkpoint.save(self._topics or (), self._texts())

    def _texts(self) -> tuple[SyntheticText, ...]:
        return tuple(self._writer.texts)

    def _document(self, text: SyntheticText) -> Document:
        return text.document(release_id(self._names(), self.topics))

    def _names(self) -> dict[str, str]:
        return {
            "component": self._share.component,
            "dataset_id": self.plan.partition,
            "ledger_id": self._budget.ledger_id,
        }

    def _events(self) -> RunEvents:
        return RunEvents(SYNTHESIZER, budget=self._budget, share=self._share)

    def __repr__(self) -> str:
        return f"DocumentSynthesizer(component={self._share.component!r}, topics={self.plan.num_topics})"


def choose_topics(counts: Iterable[Count], plan: DocumentsPlan) -> tuple[Count, ...]:
    """Returns the topics, smallest noisy count first: a unit with several topics belongs to the rarest."""
    seen = [pair for pair in counts if pair[1] >= plan.least_units]
    most = sorted(seen, key=lambda pair: -pair[1])[: plan.num_topics]
    return tuple(reversed(most))
