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

from langchain_dpicl.backends.base import FullBackend, NextTokenBackend, Token
from langchain_dpicl.backends.domains import Domain
from langchain_dpicl.backends.walk import AskTopTokens, Walk
from langchain_dpicl.blocks import Block
from langchain_dpicl.decoding import Decoding
from langchain_dpicl.exceptions import CapabilityError
from langchain_dpicl.grammars import BoundGrammar, Grammar, Matcher
from langchain_dpicl.planning import Segment
from langchain_dpicl.privacy._validate import check_int, fail
from langchain_dpicl.privacy.examples import PrivateExamples
from langchain_dpicl.privacy.ledger import Reservation
from langchain_dpicl.privacy.randomness import SYSTEM_RANDOM
from langchain_dpicl.wording import GenerationWording

DEFAULT_STOP = ("\n",)
MAX_FORCED = 4096
"""Tokens of a text beyond which a grammar writes none for free: a public end of grammars that force without one."""


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
    """One demonstration in the making, the `number`-th of its label; everything in it is released or public."""

    label: str | None
    number: int = 0
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
      needs_logits: whether candidates come with public logits.
      margin: candidates this close to the last of the public top-K are candidates too (Top-k+).
      grammar: what a text may be; None: anything.
      eos_column: the place of EOS in the vocabulary, for engines that compute the public row with the private ones.
    """

    backend: NextTokenBackend
    wording: GenerationWording
    segments: tuple[Segment, ...]
    public_top_k: int | None
    stop: tuple[str, ...]
    decoding: Decoding
    open_labels: tuple[str, ...] | None = None
    needs_logits: bool = False
    margin: float = 0.0
    grammar: BoundGrammar | None = None
    eos_column: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        if self.is_fused:
            object.__setattr__(self, "eos_column", list(self.backend.vocabulary()).index(self.backend.eos))

    @property
    def is_fused(self) -> bool:
        """Whether the engine computes the public row in the batch of the private ones."""
        return isinstance(self.backend, FullBackend)

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

    def domain(
        self, prompt: str, prefix: Sequence[Token], *, block: Block | None = None, matcher: Matcher | None = None
    ) -> Walk[Domain]:
        """Returns the public candidates of the next token; EOS is among them after the first (a walk).

        The public model is asked at every token, whatever the domain: its failure is the only outage signal.

        Args:
          prompt: the public prompt.
          prefix: released tokens.
          block: whose batch carries the public row; None: the public model is asked on its own.
          matcher: what the grammar allows next.
        """
        if block is not None:
            logits = yield from block.public_logits()
            return self._narrowed(Domain(self.backend.vocabulary(), logits, np.arange(len(logits))), prefix, matcher)
        if self.needs_logits or (matcher is not None and self.backend.max_top_k is None):
            top_k = len(self.backend.vocabulary())
        else:
            top_k = self.public_top_k or 1
        keys, chances = yield from self.public_distribution(prompt, prefix, top_k=top_k)
        with np.errstate(divide="ignore"):
            seen = Domain(keys, np.log(chances))
        if self.public_top_k is None and not self.needs_logits:
            seen = Domain(tuple(self.backend.vocabulary()))
        return self._narrowed(seen, prefix, matcher)

    def _narrowed(self, domain: Domain, prefix: Sequence[Token], matcher: Matcher | None) -> Domain:
        """Returns the likeliest of the candidates that may follow; a function of public and released things only."""
        may = np.ones(len(domain), dtype=bool)
        if matcher is not None:
            may = matcher.allowed() if domain.columns is not None else matcher.allowed_of(domain.keys)
        ends = self._ends(domain)
        others = domain.only(may & ~ends)
        if self.public_top_k is not None:
            others = others.likeliest(self.public_top_k, margin=self.margin)
        end = domain.only(may & ends)
        # A text that ends before it begins helps nobody, and leaving the end out is a public choice.
        if len(others) and not prefix:
            return others
        if not len(end) and (matcher is None or matcher.allowed_of((self.backend.eos,))[0]):
            end = Domain((self.backend.eos,), None if domain.logits is None else np.array([-np.inf]))
        return others.joined(end)

    def _ends(self, domain: Domain) -> NDArray[np.bool_]:
        """Returns bool[d]: which candidate is the end of the text."""
        eos = self.backend.eos
        if domain.columns is None:
            return np.array([key == eos for key in domain.tokens], dtype=bool)
        return np.asarray(domain.columns == self.eos_column)

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
        """Most candidates of a token, for planning."""
        if self.public_top_k is None or self.needs_logits:
            return len(self.backend.vocabulary())
        return self.public_top_k + 1

    def to_dict(self) -> dict[str, Any]:
        """Returns the public wording and rules as JSON values."""
        fingerprint = getattr(self.backend, "tokenizer_fingerprint", None)
        return {
            "model": self.backend.name,
            **({} if fingerprint is None else {"tokenizer": fingerprint}),
            "public_top_k": self.public_top_k,
            "stop": list(self.stop),
            "decoding": self.decoding.to_dict(),
            "instruction": self.wording.instruction,
            "generation_prompt": self.wording.template,
            "text_key": self.wording.text_key,
            "label_key": self.wording.label_key,
            "open_labels": None if self.open_labels is None else list(self.open_labels),
            **({} if self.grammar is None else {"grammar": self.grammar.grammar.to_dict()}),
        }


Opener: TypeAlias = Callable[[Draft, int, Reservation | None, str, dict[str, str]], AbstractContextManager[Block]]
"""Opens a block for (draft, length, ticket, field, known values)."""


def write_draft(script: Script, draft: Draft, opener: Opener, tick: Callable[[], None]) -> Walk[None]:
    """Writes one demonstration, segment after segment; released tokens stay in the draft whatever happens (a walk)."""
    while draft.segment < len(script.segments):
        segment = script.segments[draft.segment]
        name = script.field_of(segment)
        known = script.known(draft)
        writer = _SegmentWriter(script, draft, script.wording.renderer(name, known)(()), tick)
        if segment.name == "text":
            writer.follow(script.grammar)
        for length, ticket in () if writer.has_ended() else _unburnt(draft):
            domain = None if script.is_fused else (yield from writer.domain(None))
            if writer.has_ended():  # nothing that the grammar allows is a candidate
                break
            with opener(draft, length, ticket, name, known) as block:
                for _ in range(length):
                    if domain is None:
                        domain = yield from writer.domain(block)
                    if writer.has_ended() or not block.left:
                        break
                    writer.write(domain.token((yield from block.next_index(domain))), block)
                    domain = None
                    if writer.has_ended():
                        break
            if writer.has_ended():
                break
        writer.close()
        draft.values[name] = script.text(draft.tokens)
        draft.tokens, draft.segment = [], draft.segment + 1
    draft.done = True


@dataclass(slots=True)
class _SegmentWriter:
    """Writes released tokens, and what a grammar forces for free, into the draft and the open block."""

    script: Script
    draft: Draft
    prompt: str
    tick: Callable[[], None]
    matcher: Matcher | None = None
    stuck: bool = False

    def follow(self, grammar: BoundGrammar | None) -> None:
        """Takes up the grammar where the draft stands."""
        if grammar is not None:
            self.matcher = grammar.start(self.draft.tokens)
            self._write_forced(None)

    def domain(self, block: Block | None) -> Walk[Domain]:
        """Returns the candidates of the next token (a walk); the only one that a grammar leaves is written for free."""
        carrier = block if block is not None and block.carries_public else None
        while True:
            candidates = yield from self.script.domain(
                self.prompt, self.draft.tokens, block=carrier, matcher=self.matcher
            )
            self.stuck = not len(candidates)
            if self.matcher is None or len(candidates) != 1 or len(self.draft.tokens) >= MAX_FORCED:
                return candidates
            self._append(candidates.token(0), block)
            self._write_forced(block)
            if self.has_ended():
                return candidates

    def write(self, token: Token, block: Block) -> None:
        """Appends a released token, and what must follow it."""
        self._append(token, block)
        self.tick()
        self._write_forced(block)

    def has_ended(self) -> bool:
        """Whether the segment is over; a function of released and public things."""
        if self.stuck or (self.matcher is not None and self.matcher.is_stuck()):
            return True
        if self.draft.tokens and self.matcher is not None and self.matcher.is_complete():
            return True
        return bool(self.draft.tokens) and self.script.ended(self.draft.tokens)

    def close(self) -> None:
        """Completes a text that its cap cut short, if the grammar says how: free, as it is made of released tokens."""
        if self.matcher is not None and not self.matcher.is_complete():
            self.draft.tokens += self.matcher.closing() or ()

    def _write_forced(self, block: Block | None) -> None:
        while self.matcher is not None and not self.has_ended() and (forced := self.matcher.forced()):
            for token in forced[: max(1, MAX_FORCED - len(self.draft.tokens))]:
                self._append(token, block)
            if len(self.draft.tokens) >= MAX_FORCED:
                return

    def _append(self, token: Token, block: Block | None) -> None:
        self.draft.tokens.append(token)
        if block is not None:
            block.push(token)
        if self.matcher is not None:
            self.matcher.push(token)


def _unburnt(draft: Draft) -> Iterator[tuple[int, Reservation | None]]:
    for block in draft.tickets[draft.segment]:
        while block.reservation is not None and block.reservation.unburnt:
            yield block.length, block.reservation
        for _ in range(block.owed if block.reservation is None else 0):
            yield block.length, None


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
    needs_logits: bool = False,
    grammar: Grammar | None = None,
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
    check_example_prompt(example_prompt, wording)
    labels = None if open_labels is None else tuple(open_labels)
    rules = check_rules(backend, public_top_k, stop)
    if needs_logits and backend.max_top_k is not None:
        msg = (
            f"mechanism: expected a model that shows its whole vocabulary, found one that reports {backend.max_top_k} "
            "top tokens. Take a local model, a server with enough top_logprobs, or mechanism='gumbel'."
        )
        raise CapabilityError(msg)
    if grammar is not None and not isinstance(grammar, Grammar):
        raise fail("grammar", "a Grammar, such as Grammar.regex(...)", type(grammar).__name__)
    bound = None if grammar is None else grammar.bind(backend)
    return Script(backend, wording, segments, *rules, decoding, labels, needs_logits=needs_logits, grammar=bound)


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


def check_example_prompt(example_prompt: Any, wording: GenerationWording) -> None:
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
