"""DocumentSynthesizer: releases topics, their words, and texts, with checkpoints (after DP-SynRAG, 2025)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, cast

from langchain_core.documents import Document

from langchain_dpicl._construction import awaitable, tells_how_to_build
from langchain_dpicl.backends.resolve import as_backend
from langchain_dpicl.backends.sync_async import Blocking, EffectGenerator
from langchain_dpicl.budget.events import RunEvents
from langchain_dpicl.budget.handler import BudgetLike, resolve_budget
from langchain_dpicl.documents.plan import DocumentsPlan, plan_documents
from langchain_dpicl.generation.decoding_loop import DecodingSpec, PartialText, make_script
from langchain_dpicl.generation.plan import warn_of_noise
from langchain_dpicl.generation.synthesizer import DraftRun, commit_unless_done, weights_in
from langchain_dpicl.generation.token_mechanisms import TokenRule, public_margin
from langchain_dpicl.generation.word_tree import WordTree
from langchain_dpicl.options import Option, Rows, Topics
from langchain_dpicl.options.base import LLM, Where, option_of
from langchain_dpicl.options.rows import LogitNoise, LogitNoiseName, Noise, NoiseName, noise_of
from langchain_dpicl.options.tasks import Decoding, GenerationTask
from langchain_dpicl.planning.expected_utility import RowDesign
from langchain_dpicl.privacy._validate import check_int, fail
from langchain_dpicl.privacy.data.private_examples import PrivateExamples
from langchain_dpicl.privacy.extensions.count_histograms import CountPlan
from langchain_dpicl.privacy.extensions.private_streams import RollingRange
from langchain_dpicl.privacy.extensions.topic_partition import (
    PAIRS_OF_TOPIC_TEMPLATE,
    WORDS_OF_TOPIC_TEMPLATE,
    TopicExamples,
    places,
    split_by_topics,
)
from langchain_dpicl.privacy.extensions.unit_values import words_of
from langchain_dpicl.privacy.extensions.word_release import Weight, WordRelease
from langchain_dpicl.privacy.ledger.shares import Reservation
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
from langchain_dpicl.released.documents import SyntheticDocuments, SyntheticText, blocks_of
from langchain_dpicl.released.words import WordGroup, without_words
from langchain_dpicl.reports.public_words import public_words
from langchain_dpicl.reports.verify import problems_in
from langchain_dpicl.reports.verify_released import topic_problems, topic_word_problems
from langchain_dpicl.runs.door import door
from langchain_dpicl.runs.journal import RunJournal
from langchain_dpicl.runs.release_run import RunCall, reads_of, report_of


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
class _Findings:
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
    ticket: Reservation | None = None
    done: bool = False
    busy: bool = False


@tells_how_to_build()
class DocumentSynthesizer(DraftRun[Document, SyntheticDocuments]):
    r"""Turns private documents into public ones by topic, once; searching them afterwards is free.

    Topics are keywords of a public vocabulary with large noisy counts, or words that many units write. A unit belongs
    to at most one topic. For each topic it releases words that many of its units write, or texts that are
    written from its units, or both.

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
      ...     topics=("card", "transfer", "boat"),
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
          deny: public words that are never released; each entry stands for all its words.
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
            dataset_id=f"{private.dataset_id} by topics of {name}",
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
        script, public = None, plan.to_dict()
        if made is not None and plan.generation is not None:
            warn_of_noise(plan.generation)
            script = TopicDecodingSpec.of(dataclasses.replace(made, margin=public_margin(plan.generation.release)))
            public = {**public, "generation": {**public["generation"], **script.to_dict()}}
        terms = {"component": name, "ledger_id": spender.ledger_id, "dataset_id": by_topic.dataset_id, "plan": public}
        journal = RunJournal.open(checkpoint, **terms)
        engines = [] if script is None else [script]
        runs = None
        if per_window is not None and private.blocks is not None:
            how: dict[str, Any] = {"per_window": per_window, "parts": plan.one_run().tickets()}
            runs = stream_runs(source, private.blocks, spender, component=name, **how)
            public = {**public, "stream": runs.to_dict()}
        paid: dict[str, Any] = {"component": name, "epsilon": epsilon, "runs": runs}
        share = declare_share(by_topic, spender, plan, public=public, engines=engines, **paid)
        run = {"share": share, "budget": spender, "journal": journal, "review": found.review}
        return cls(by_topic, script, plan=plan, public=public, **run)

    afrom_private_examples = awaitable(from_private_examples)

    @property
    def topics(self) -> tuple[Weight, ...]:
        """The released topics with their noisy counts, or weights, the largest first; empty before their release.

        Without those that a review took out.
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
        dropped = frozenset(found)
        if others := sorted(map(str, dropped - set(released))):
            raise fail("Topics.review", "words to drop, of those that it was given", others[:3])
        return dropped

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
        if not isinstance(is_reviewed, bool) or (dropped and not is_reviewed):
            raise fail("checkpoint", "whether there was a review", type(is_reviewed).__name__)
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

    def _value(self) -> SyntheticDocuments:
        order = list(self._topics)
        written = sorted(self._written(), key=lambda draft: order.index(str(draft.label)))
        return SyntheticDocuments(tuple(map(self._text, written)), self.topics, self.report, self._public, self.words)

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
    """Whether a word of a topic was dropped."""
    return not dropped.isdisjoint(words_of(topic))
