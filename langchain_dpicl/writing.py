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
from langchain_dpicl.blocks import Block
from langchain_dpicl.decoding import Decoding
from langchain_dpicl.planning import Segment
from langchain_dpicl.privacy._validate import check_int, fail
from langchain_dpicl.privacy.examples import PrivateExamples
from langchain_dpicl.privacy.ledger import Reservation
from langchain_dpicl.privacy.randomness import SYSTEM_RANDOM
from langchain_dpicl.wording import GenerationWording

DEFAULT_STOP = ("\n",)


@dataclass(slots=True)
class Held:
    """Tickets for blocks of one length.

    Attributes:
      length: tokens per block.
      owed: tickets to reserve before the next block; what was given back when a run stopped.
      reservation: the reserved ones; None until then, and on paths without a budget.
    """

    length: int
    owed: int
    reservation: Reservation | None = None


@dataclass(slots=True)
class Draft:
    """One demonstration in the making; everything in it is released or public."""

    label: str | None
    values: dict[str, str] = field(default_factory=dict)
    tokens: list[Token] = field(default_factory=list)
    segment: int = 0
    tickets: dict[int, list[Held]] = field(default_factory=dict)
    done: bool = False
    busy: bool = False


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
        """Returns the public candidates of the next token; EOS is among them after the first (a walk).

        The public model is asked at every token, whatever the domain: its failure is the only outage signal.
        """
        keys, _ = yield from self.public_distribution(prompt, prefix, top_k=self.public_top_k or 1)
        if self.public_top_k is None:
            keys = tuple(self.backend.vocabulary())
        others = tuple(key for key in keys if key != self.backend.eos)
        # A text that ends before it begins helps nobody, and leaving the end out is a public choice.
        return others if others and not prefix else (*others, self.backend.eos)

    def public_distribution(
        self, prompt: str, prefix: Sequence[Token], *, top_k: int
    ) -> Walk[tuple[tuple[Token, ...], NDArray[np.float64]]]:
        """Returns the public model's likeliest tokens and their probabilities, float64[k] (a walk)."""
        pairs = yield AskTopTokens(self.backend, prompt, tuple(prefix), top_k)
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
    for held in draft.tickets[draft.segment]:
        while held.reservation is not None and held.reservation.unburnt:
            yield held.length, held.reservation
        for _ in range(held.owed if held.reservation is None else 0):
            yield held.length, None


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
    if not isinstance(private, PrivateExamples):
        raise fail("private", "PrivateExamples", type(private).__name__)
    template = getattr(generation_prompt, "template", generation_prompt)
    wording = GenerationWording(
        instruction=instruction if instruction is not None else _default_instruction(private.text_key, label_key),
        template=template if template is not None else GenerationWording.default_template(private.text_key, label_key),
        text_key=private.text_key,
        label_key=label_key,
        fields=tuple(private.fields),
    )
    _check_example_prompt(example_prompt, wording)
    labels = None if open_labels is None else tuple(open_labels)
    rules = check_rules(backend, public_top_k, stop)
    return Script(backend, wording, segments, *rules, decoding, labels)


def check_rules(
    backend: NextTokenBackend, public_top_k: int | None, stop: Sequence[str]
) -> tuple[int | None, tuple[str, ...]]:
    """Returns the candidates per token that the engine can give, and the stop strings.

    Raises:
      ConfigurationError: out of range, or the whole vocabulary of an engine that reports top tokens only.
    """
    limit = backend.max_top_k
    if public_top_k is None and limit is not None:
        raise fail("public_top_k", f"a number up to {limit} (this model reports top tokens only)", None)
    if public_top_k is not None:
        check_int("public_top_k", public_top_k, low=1)
        public_top_k = public_top_k if limit is None else min(public_top_k, limit)
    return public_top_k, check_texts("stop", stop, least=0)


def check_texts(name: str, values: Sequence[str], *, least: int = 1) -> tuple[str, ...]:
    """Returns a sequence of at least `least` non-empty texts; a single text is not one.

    Raises:
      ConfigurationError: anything else.
    """
    ok = isinstance(values, Sequence) and not isinstance(values, (str, bytes)) and len(values) >= least
    if not ok or not all(isinstance(item, str) and item for item in values):
        raise fail(name, "a sequence of non-empty texts", values)
    return tuple(values)


def _check_example_prompt(example_prompt: Any, wording: GenerationWording) -> None:
    """Formats the template once with public text, so that a template that cannot show a demonstration fails first."""
    if example_prompt is None:
        return
    extra = sorted(set(getattr(example_prompt, "input_variables", ())) - wording.generated_fields)
    if extra:
        raise fail("example_prompt", f"variables among {sorted(wording.generated_fields)}", extra)
    problem = ""
    try:
        example_prompt.invoke(dict.fromkeys(wording.generated_fields, "text"))
    except Exception as error:  # noqa: BLE001  any template error is a public fault
        problem = type(error).__name__
    if problem:
        raise fail("example_prompt", "a prompt template that formats text fields", problem)


def _default_instruction(text_key: str, label_key: str | None) -> str:
    return f"Write a {text_key}." if label_key is None else f"Write a {text_key} for the given {label_key}."
