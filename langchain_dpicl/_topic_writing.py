"""Generates the texts of released topics with the token-by-token synthesizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from langchain_dpicl.backends.resolve import as_backend
from langchain_dpicl.backends.walk import Walk
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.decoding import Decoding
from langchain_dpicl.grammars import Grammar
from langchain_dpicl.planning import GenerationPlan, Segment, deal_name, template_name
from langchain_dpicl.privacy._validate import fail
from langchain_dpicl.privacy.shares import Share
from langchain_dpicl.privacy.topic_examples import TopicExamples
from langchain_dpicl.released_documents import SyntheticText
from langchain_dpicl.row_design import RowDesign
from langchain_dpicl.run_events import RunEvents
from langchain_dpicl.synthesis import DemonstrationSynthesizer, _rules
from langchain_dpicl.token_rules import TokenRule
from langchain_dpicl.writing import DEFAULT_STOP, Draft, Script, make_script

SYNTHESIZER = "DocumentSynthesizer"


@dataclass(frozen=True, slots=True)
class WritingOptions:
    """The generation options of `DemonstrationSynthesizer.from_private_examples`."""

    mechanism: str = "gumbel"
    clip: float | None = None
    blend_weight: float | None = None
    center: str | None = None
    free_tokens: float | None = None
    private_tokens: int | None = None
    rows: str | None = None
    num_slots: int | None = None
    shots_per_slot: int | None = None
    sampling: str = "poisson"
    overfill: float | None = None
    redraw_every: int | None = None
    noise_multiplier: float | None = None
    public_top_k: int | None = 100
    stop: Sequence[str] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float = 1.0
    grammar: Grammar | None = None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> WritingOptions:
        """Builds the options from keyword arguments."""
        names = {each.name for each in dataclasses.fields(cls)}
        if strange := sorted(set(options) - names):
            raise fail("options", f"some of {sorted(names)}", strange)
        return cls(**options)

    @property
    def rule(self) -> TokenRule:
        """How a token is released."""
        names = ("clip", "blend_weight", "center", "free_tokens", "private_tokens")
        return self._rules({name: getattr(self, name) for name in names})[0]

    @property
    def decoding(self) -> Decoding:
        """How an index is chosen from a noised vector."""
        return self._rules({})[1]

    def _rules(self, tested: dict[str, Any]) -> tuple[TokenRule, Decoding]:
        return _rules(self.mechanism, self.temperature, tested, top_k=self.top_k, top_p=self.top_p)

    def design(self, size: int) -> RowDesign:
        """Returns the row design for topics of `size` declared units."""
        return RowDesign.choose(
            rows=self.rows,
            num_slots=self.num_slots,
            shots_per_slot=self.shots_per_slot,
            sampling=self.sampling,
            overfill=self.overfill,
            smallest_size=size,
        )


@dataclass(frozen=True, slots=True)
class TopicScript(Script):
    """Public parameters of a generation whose labels are places; prompts show the topic of a place.

    Attributes:
      topics: topic by place, once released.
    """

    topics: dict[str, str] = field(default_factory=dict)

    def known(self, draft: Draft) -> dict[str, str]:
        """Returns the public or released values that the draft's prompts are filled with."""
        return {str(self.wording.label_key): self.topics[str(draft.label)], **draft.values}


def topic_script(
    private: TopicExamples,
    llm: Any,
    options: WritingOptions,
    *,
    instruction: str | None,
    generation_prompt: Any,
    max_tokens: int,
) -> TopicScript:
    """Checks the public parameters of the texts; no private call is made and nothing is charged."""
    made = make_script(
        private,
        as_backend(llm),
        label_key=private.label_key,
        instruction=instruction,
        generation_prompt=generation_prompt,
        example_prompt=None,
        segments=(Segment("text", max_tokens),),
        public_top_k=options.public_top_k,
        stop=options.stop if options.stop is not None else (DEFAULT_STOP if options.grammar is None else ()),
        decoding=options.decoding,
        open_labels=None,
        needs_logits=options.rule.is_logit,
        grammar=options.grammar,
    )
    parts = {each.name: getattr(made, each.name) for each in dataclasses.fields(made) if each.init}
    return TopicScript(**parts)


class TopicWriter(DemonstrationSynthesizer):
    """Generates the texts of topics. Made by `DocumentSynthesizer`."""

    _noun = "synthesizer"

    def __init__(
        self,
        private: TopicExamples,
        script: TopicScript,
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
    def _takes(remaining: dict[str, int], draft: Draft) -> bool:
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

    def _examples(self, draft: Draft) -> list[dict[str, str]]:
        text = self._text(draft)
        return [{"text": text.text, "topic": text.topic, "number": str(text.number)}]

    def _text(self, draft: Draft) -> SyntheticText:
        written = draft.values[self._script.wording.text_key]
        return SyntheticText(written, self._topics[str(draft.label)], draft.number)

    def _make(self, draft: Draft, bar: Any, events: RunEvents) -> Walk[None]:
        yield from super()._make(draft, bar, events)
        self._keep()

    def _events(self) -> RunEvents:
        return RunEvents(SYNTHESIZER, budget=self._budget, share=self._share)

    def _so_far(self) -> str:
        return f"{len(self.texts)} of {len(self._items)} documents are"
