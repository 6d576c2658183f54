"""The public side of generation: wording, vocabularies, stop rules, and the walk that writes one demonstration.

Never sees a private record, a row or a sum: a block (see `curator.py`) gives it one public index at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.backends.base import NextTokenBackend, Token
from langchain_dpicl.backends.walk import AskTopTokens, Walk
from langchain_dpicl.curator import Block
from langchain_dpicl.decoding import Decoding
from langchain_dpicl.planning import Segment
from langchain_dpicl.privacy._validate import check_int, fail
from langchain_dpicl.privacy.examples import PrivateExamples
from langchain_dpicl.privacy.ledger import Reservation
from langchain_dpicl.privacy.randomness import SYSTEM_RANDOM
from langchain_dpicl.wording import GenerationWording

DEFAULT_STOP = ("\n",)


@dataclass(slots=True)
class Draft:
    """One demonstration in the making; everything in it is released or public."""

    label: str | None
    values: dict[str, str] = field(default_factory=dict)
    tokens: list[Token] = field(default_factory=list)
    segment: int = 0
    tickets: dict[int, list[tuple[int, Reservation | None]]] = field(default_factory=dict)
    done: bool = False


@dataclass(frozen=True, slots=True)
class Script:
    """The public side of a generation: engine, wording, vocabulary, stop rules. Shared with the baselines.

    Attributes:
      backend: the engine.
      wording: how prompts read.
      segments: (name, cap) of the generated fields, in order.
      public_top_k: candidates per token from the public prompt; None: the whole vocabulary.
      stop: strings that end a segment.
      decoding: how an index is read off a noised vector.
      open_labels: public list to draw open labels from; None: generated, or declared.
    """

    backend: NextTokenBackend
    wording: GenerationWording
    segments: tuple[Segment, ...]
    public_top_k: int | None
    stop: tuple[str, ...]
    decoding: Decoding
    open_labels: tuple[str, ...] | None = None

    def field_of(self, segment: Segment) -> str:
        """Returns the record field a segment fills."""
        return str(self.wording.label_key) if segment.name == "label" else self.wording.text_key

    def known(self, draft: Draft) -> dict[str, str]:
        """Returns the public or released values that the draft's prompts are filled with."""
        if self.open_labels is not None and not draft.values:
            pick = int(SYSTEM_RANDOM.integers(len(self.open_labels), 1)[0])
            draft.values[str(self.wording.label_key)] = self.open_labels[pick]
        declared = {self.wording.label_key: draft.label} if draft.label is not None and self.wording.label_key else {}
        return {**declared, **draft.values}

    def domain(self, prompt: str, prefix: Sequence[Token]) -> Walk[tuple[Token, ...]]:
        """Returns the public candidates of the next token; EOS is always among them (a walk).

        The public model is asked at every token, whatever the domain: its failure is the only outage signal.
        """
        keys, _ = yield from self.public_distribution(prompt, prefix)
        if self.public_top_k is None:
            return tuple(self.backend.vocabulary())
        return keys if self.backend.eos in keys else (*keys, self.backend.eos)

    def public_distribution(
        self, prompt: str, prefix: Sequence[Token]
    ) -> Walk[tuple[tuple[Token, ...], NDArray[np.float64]]]:
        """Returns the public model's likeliest tokens and their probabilities, float64[k] (a walk)."""
        pairs = yield AskTopTokens(self.backend, prompt, tuple(prefix), self.public_top_k or 1)
        return tuple(key for key, _ in pairs), np.array([chance for _, chance in pairs])

    def ended(self, tokens: Sequence[Token]) -> bool:
        """Whether released tokens end the segment: EOS, or a stop string in their text."""
        if tokens and tokens[-1] == self.backend.eos:
            return True
        text = self.backend.decode(tokens)
        return any(stop in text.lstrip() for stop in self.stop)

    def text(self, tokens: Sequence[Token]) -> str:
        """Returns the text of released tokens, cut before the first stop string, without outer blanks."""
        text = self.backend.decode([token for token in tokens if token != self.backend.eos]).lstrip()
        for stop in self.stop:
            text = text.split(stop, 1)[0]
        return text.strip()

    @property
    def candidates(self) -> int:
        """Width of the public domain, for planning."""
        return len(self.backend.vocabulary()) if self.public_top_k is None else self.public_top_k + 1

    def to_dict(self) -> dict[str, Any]:
        """Returns the public wording and rules as JSON values."""
        return {
            "model": self.backend.name,
            "public_top_k": self.public_top_k,
            "stop": list(self.stop),
            "decoding": self.decoding.to_dict(),
            "instruction": self.wording.instruction,
            "generation_prompt": self.wording.template,
            "text_key": self.wording.text_key,
            "label_key": self.wording.label_key,
            "open_labels": None if self.open_labels is None else list(self.open_labels),
        }


Opener: TypeAlias = Callable[[Draft, int, Reservation | None, str, dict[str, str]], AbstractContextManager[Block]]
"""Opens a block for (draft, length, ticket, field, known values)."""


def write_draft(script: Script, draft: Draft, opener: Opener, tick: Callable[[], None]) -> Walk[None]:
    """Writes one demonstration, segment after segment; released tokens stay in the draft whatever happens (a walk)."""
    while draft.segment < len(script.segments):
        segment = script.segments[draft.segment]
        name = script.field_of(segment)
        known = script.known(draft)
        prompt = script.wording.renderer(name, known)(())
        for length, ticket in _unburnt(draft):
            domain = yield from script.domain(prompt, draft.tokens)
            with opener(draft, length, ticket, name, known) as block:
                for step in range(length):
                    if step:
                        domain = yield from script.domain(prompt, draft.tokens)
                    token = domain[(yield from block.next_index(domain))]
                    draft.tokens.append(token)
                    block.push(token)
                    tick()
                    if script.ended(draft.tokens):
                        break
            if script.ended(draft.tokens):
                break
        draft.values[name] = script.text(draft.tokens)
        draft.tokens, draft.segment = [], draft.segment + 1
    draft.done = True


def _unburnt(draft: Draft) -> Iterator[tuple[int, Reservation | None]]:
    for length, ticket in draft.tickets[draft.segment]:
        if ticket is None:
            yield length, None
        while ticket is not None and ticket.unburnt:
            yield length, ticket


def make_script(
    private: PrivateExamples,
    backend: NextTokenBackend,
    *,
    label_key: str | None,
    instruction: str | None,
    generation_prompt: Any,
    example_prompt: Any,
    segments: tuple[Segment, ...],
    public_top_k: int | None,
    stop: Sequence[str],
    decoding: Decoding,
    open_labels: Sequence[str] | None,
) -> Script:
    """Checks the public side of a generation and returns it; no call is made and nothing is charged."""
    template = getattr(generation_prompt, "template", generation_prompt)
    wording = GenerationWording(
        instruction=instruction if instruction is not None else _default_instruction(private.text_key, label_key),
        template=template if template is not None else GenerationWording.default_template(private.text_key, label_key),
        text_key=private.text_key,
        label_key=label_key,
        fields=tuple(private.fields),
    )
    extra = sorted(set(getattr(example_prompt, "input_variables", ())) - wording.generated_fields)
    if extra:
        raise fail("example_prompt", f"variables among {sorted(wording.generated_fields)}", extra)
    limit = backend.max_top_k
    if public_top_k is None and limit is not None:
        raise fail("public_top_k", f"a number up to {limit} (this model reports top tokens only)", None)
    if public_top_k is not None:
        check_int("public_top_k", public_top_k, low=1)
        public_top_k = public_top_k if limit is None else min(public_top_k, limit)
    if isinstance(stop, str) or not all(isinstance(item, str) and item for item in stop):
        raise fail("stop", "a sequence of non-empty strings", stop)
    labels = None if open_labels is None else tuple(open_labels)
    return Script(backend, wording, segments, public_top_k, tuple(stop), decoding, labels)


def _default_instruction(text_key: str, label_key: str | None) -> str:
    return f"Write a {text_key}." if label_key is None else f"Write a {text_key} for the given {label_key}."
