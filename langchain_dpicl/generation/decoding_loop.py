"""Writes one demonstration token by token, from public candidates and released words, one chosen index at a time."""

from __future__ import annotations

import codecs
import hashlib
import string
import sys
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, repeat
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.backends.base import Domain, FullBackend, NextTokenBackend, Token, cut_at_stop
from langchain_dpicl.backends.sync_async import (
    LEAST_BESIDE,
    EffectGenerator,
    Outage,
    PublicAnswer,
    TopTokenRequest,
    calls_at_once,
    check_silent,
    concurrency_limit,
)
from langchain_dpicl.exceptions import CapabilityError
from langchain_dpicl.generation.grammars import BoundGrammar, Grammar, Matcher, encoder_of, token_bytes_of
from langchain_dpicl.generation.plan import Segment, segments_of
from langchain_dpicl.options import Decoding, GenerationTask, LogitNoise, Noise, OpenLabel
from langchain_dpicl.privacy._validate import fail, plain_or_type
from langchain_dpicl.privacy.extensions.word_release import MOST_LETTERS
from langchain_dpicl.privacy.ledger.shares import Reservation
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM
from langchain_dpicl.privacy.private_examples import PrivateExamples
from langchain_dpicl.release.token_block import ReleaseBlock
from langchain_dpicl.tasks import GenerationTemplate, check_rules, distinct_texts, generation_wording, has_ended

if TYPE_CHECKING:
    from langchain_dpicl.released.counts import ReleasedWords


MOST_COLUMNS = 256
"""Tokens that a tree adds to one token at most: a plan declares so many candidates before any word is released."""

_ROOT: Hashable = ()


@dataclass(slots=True)
class WordColumns:
    """What a tree adds to the candidates of one token.

    Attributes:
      tokens: tokens that may be candidates beside the public ones.
      is_only: whether nothing else is: a word was begun that only the tree holds.
      ends_word: whether a word was just finished, so that no letter may follow but of a longer released word.
      added: of `tokens`, those that were no public candidate; set where candidates are narrowed.
    """

    tokens: tuple[Token, ...]
    is_only: bool = False
    ends_word: bool = False
    added: frozenset[Token] = frozenset()


@dataclass(frozen=True, slots=True, repr=False)
class WordTree:
    """Released words, each with a blank before it, cut into tokens of an engine.

    An engine that can cut text cuts a word one way. Of another one that takes bytes (a model that reports its top
    tokens), every beginning of a word may be its first token, and what is left of a word is one token where only one
    word is left.

    Formal guarantees:
      - A function of released words and of the engine's public vocabulary.

    Attributes:
      edges: by place, which token leads to which place; a place is what of a word is written.
      ends: places at which a word ends.
      columns: place of each token in the engine's vocabulary; empty for engines that report top tokens only.
    """

    edges: Mapping[Hashable, Mapping[Token, Hashable]]
    ends: frozenset[Hashable]
    columns: Mapping[Token, int] = field(default_factory=dict)

    @classmethod
    def of(cls, words: Iterable[str], backend: NextTokenBackend) -> Self:
        """Returns the tree of released words, the largest noisy weight first; what has no room is left out."""
        places = _vocabulary_places(backend)
        edges: dict[Hashable, dict[Token, Hashable]] = {_ROOT: {}}
        ends = set[Hashable]()
        for word in words:
            for steps in _cuts(f" {word}", backend, places):
                if not _has_room(edges, steps):
                    continue
                here = _ROOT
                for token, place in steps:
                    edges.setdefault(here, {})[token] = place
                    here = place
                ends.add(here)
        held = {token for after in edges.values() for token in after}
        return cls(edges, frozenset(ends), {token: places[token] for token in held} if places is not None else {})

    def __repr__(self) -> str:
        """Names the tree by its content, alike in every process."""
        content = repr(sorted(map(repr, self.edges.items())))
        return f"WordTree({hashlib.sha256(content.encode()).hexdigest()[:16]})"

    def after(self, place: Hashable | None) -> tuple[Token, ...]:
        """Returns the tokens that go on at a place; None: those that begin a word."""
        return tuple(self.edges.get(_ROOT if place is None else place, {}))

    def step(self, place: Hashable | None, token: Token) -> Hashable | None:
        """Returns the place behind a token; None where a word ends there, or none goes on so."""
        found = self.edges.get(_ROOT if place is None else place, {}).get(token)
        return None if found is None or found in self.ends else found

    def behind(self, tokens: Sequence[Token], text: str) -> dict[Token, Hashable | None]:
        """Returns the tokens that may go on behind released ones, each with the place that it goes on from.

        They continue a word whose beginning (also a shorter word) stands at the end, the longest beginning first, or
        begin one; there are no more than `MOST_COLUMNS`.
        """
        last = " " + text.rpartition(" ")[2]
        begun: list[Hashable] = [tuple(tokens[-size:]) for size in range(min(MOST_LETTERS, len(tokens)), 0, -1)]
        found: dict[Token, Hashable | None] = {}
        for place in (*begun, last, last.encode("utf-8")):
            found |= {token: place for token in self.edges.get(place, {}) if token not in found}
        found |= {token: None for token in self.after(None) if token not in found}
        return dict(islice(found.items(), MOST_COLUMNS))


def _has_room(edges: Mapping[Hashable, Mapping[Token, Hashable]], steps: Iterable[tuple[Token, Hashable]]) -> bool:
    """Whether a way to spell a word leaves every place with no more tokens than a plan declares."""
    here = _ROOT
    for token, place in steps:
        after = edges.get(here, {})
        if token not in after and len(after) >= MOST_COLUMNS:
            return False
        here = place
    return True


def _vocabulary_places(backend: NextTokenBackend) -> dict[Token, int] | None:
    """Returns the place of each token of an engine's vocabulary; None: it reports top tokens only."""
    if backend.max_top_k is not None:
        return None
    try:
        vocabulary = backend.vocabulary()
    except CapabilityError:
        return None
    return {token: place for place, token in enumerate(vocabulary)}


_Steps = list[tuple[Token, Hashable]]


def _cuts(text: str, backend: NextTokenBackend, places: Mapping[Token, int] | None) -> list[_Steps]:
    """Returns how an engine's tokens may spell a text: each token with the place behind it."""
    if (encode := encoder_of(backend)) is not None:
        path = tuple(encode(text))
        is_known = bool(path) and (places is None or all(token in places for token in path))
        if not is_known or backend.decode(path) != text:
            return []
        return [[(token, path[: at + 1]) for at, token in enumerate(path)]]
    if places is not None:
        return _cuts_in(text, places)
    # What is left of a word is one token: the engine takes any bytes.
    pieces = [text[:size] for size in range(2, len(text))]
    begun: list[_Steps] = [[(piece.encode(), piece), (text[len(piece) :].encode(), text)] for piece in pieces]
    return [[(text.encode(), text)], *begun]


def _cuts_in(text: str, places: Mapping[Token, int]) -> list[_Steps]:
    """Returns the one way to cut a text into the longest tokens of a vocabulary of bytes; none where there is none."""
    raw, steps, done = text.encode("utf-8"), list[tuple[Token, Hashable]](), 0
    while done < len(raw):
        size = next((size for size in range(len(raw) - done, 0, -1) if raw[done : done + size] in places), 0)
        if not size:
            return []
        steps.append((raw[done : done + size], raw[: done + size]))
        done += size
    return [steps]


def trees_of(words: ReleasedWords, labels: Sequence[str], backend: NextTokenBackend) -> dict[str | None, WordTree]:
    """Returns the tree of each label of released words, or one for all labels.

    Args:
      words: a `ReleasedWords`.
      labels: of the texts that are written; none: their labels are not declared.
      backend: the engine that writes.
    """
    from langchain_dpicl.released.counts import ReleasedWords as Kind

    if not isinstance(words, Kind):
        advice = "Release them first: WordDiscovery.from_private_examples(...).run()."
        raise fail("Decoding.released_words", "a ReleasedWords", plain_or_type(words), advice)
    found = set(words.by_label)
    if found != {None} and found != set(labels):
        advice = "Release the words of the same labels, or of all units."
        raise fail("Decoding.released_words", f"words of the labels {list(labels)}", sorted(map(str, found)), advice)
    return {label: WordTree.of(held, backend) for label, held in words.by_label.items()}


@dataclass(frozen=True, slots=True)
class TextDecoder:
    """Chooses a token from noised probabilities.

    Formal guarantees:
      - A function of the noised vector and fresh random numbers only, so it costs nothing (post-processing).
      - Negative entries count as 0; if nothing is positive the choice is uniform.

    Attributes:
      temperature: 0 takes the largest entry; above 0 samples proportionally to `value ** (1 / temperature)`.
      top_k: sample among the `top_k` largest only (None: all).
      top_p: sample among the fewest largest entries that hold this share of the mass (1: all).
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0

    @classmethod
    def of(cls, noise: Noise | LogitNoise, decoding: Decoding) -> TextDecoder:
        """Returns how tokens are chosen under a mechanism; the logit mechanisms have their temperature in the noise.

        Raises:
          ConfigurationError: sampling is asked of a mechanism that releases only an index, or without a temperature.
        """
        is_logit = isinstance(noise, LogitNoise)
        made = cls(0.0 if is_logit else decoding.temperature or 0.0, decoding.top_k, decoding.top_p)
        if made != cls() and noise.mechanism != "gaussian":
            advice = "That mechanism releases only an index; use noise='gaussian'."
            named = "temperature, top_k, top_p" if not is_logit else "top_k, top_p"
            raise fail(f"Decoding: {named}", f"their defaults with {noise!r}", decoding, advice)
        if not made.temperature and made != cls():
            advice = "Without one the largest noised candidate is taken, whatever they are."
            raise fail("Decoding: top_k, top_p", "a temperature beside them", decoding, advice)
        return made

    def choose(self, values: NDArray[np.float64]) -> int:
        """Returns an index into `values`, float64[d]."""
        weights = np.maximum(values, 0.0)
        if not (weights > 0).any():
            return int(SYSTEM_RANDOM.integers(len(weights), 1)[0])
        if self.temperature == 0:
            return int(np.argmax(weights))
        return self._sample(weights / weights.sum())

    def _sample(self, weights: NDArray[np.float64]) -> int:
        order = np.argsort(-weights, kind="stable")
        share = weights[order]
        # Nucleus: the entry that crosses top_p stays in.
        keep = (np.cumsum(share) - share) < self.top_p
        if self.top_k is not None:
            keep &= np.arange(len(share)) < self.top_k
        keep &= share > 0
        logits = np.log(share[keep]) / self.temperature
        chance = np.exp(logits - logits.max())
        cumulative = np.cumsum(chance / chance.sum())
        pick = int(np.searchsorted(cumulative, SYSTEM_RANDOM.uniform(1)[0], side="right"))
        return int(order[keep][min(pick, len(cumulative) - 1)])

    def to_dict(self) -> dict[str, Any]:
        """Returns the public parameters."""
        return {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}


MAX_FORCED = 4096
"""Most tokens of a text that a grammar may force: a public bound for grammars that force text without end."""


@dataclass(slots=True)
class BlockTickets:
    """Tickets for blocks of one length.

    Attributes:
      length: tokens per block.
      owed: tickets to reserve before the next block.
      reservation: the reserved tickets; None before that, and without a budget.
    """

    length: int
    owed: int
    reservation: Reservation | None = None


@dataclass(slots=True)
class PartialText:
    """A partial demonstration, the `number`-th of its label; holds released and public values only.

    `spent` counts its tickets by segment and block length, where they are reserved one by one; or its blocks, where one
    ticket pays for all texts of a label.
    """

    label: str | None
    number: int = 0
    values: dict[str, str] = field(default_factory=dict)
    tokens: list[Token] = field(default_factory=list)
    segment: int = 0
    tickets: dict[int, list[BlockTickets]] = field(default_factory=dict)
    spent: Counter[tuple[int, int]] = field(default_factory=Counter)
    done: bool = False
    busy: bool = False


@dataclass(frozen=True, slots=True)
class DecodingSpec:
    """The public parameters of a generation: engine, prompts, vocabulary, stop rules. Shared with the baselines.

    Attributes:
      backend: the engine.
      wording: the prompt template.
      segments: (name, cap) of the generated fields, in order.
      public_top_k: candidates per token from the public prompt; None: the whole vocabulary.
      stop: strings that end a segment.
      decoder: how an index is chosen from a noised vector.
      open_labels: public list to draw open labels from; None: generated, or declared.
      needs_logits: whether candidates come with public logits.
      margin: candidates this close to the last of the public top-K are candidates too (Top-k+).
      grammar: constrains the texts; None: unconstrained.
      trees: released words by label, whose tokens are candidates too; those of None are for all labels. None: no words.
      is_fused: whether the engine computes the public row in the batch of the private ones.
      eos_column: the column of EOS in the vocabulary, for such engines.
      room: tokens that the engine can write behind a prompt; a text ends there, whatever forces more of it.
    """

    backend: NextTokenBackend
    wording: GenerationTemplate
    segments: tuple[Segment, ...]
    public_top_k: int | None
    stop: tuple[str, ...]
    decoder: TextDecoder
    open_labels: tuple[str, ...] | None = None
    needs_logits: bool = False
    margin: float = 0.0
    grammar: BoundGrammar | None = None
    trees: Mapping[str | None, WordTree] | None = None
    is_fused: bool = field(init=False, default=False)
    eos_column: int = field(init=False, default=0)
    room: int = field(init=False, default=sys.maxsize)

    def __post_init__(self) -> None:
        # Asked before every token: a check against a protocol takes longer than the rest of a step's bookkeeping.
        object.__setattr__(self, "is_fused", isinstance(self.backend, FullBackend))
        if self.is_fused:
            object.__setattr__(self, "eos_column", list(self.backend.vocabulary()).index(self.backend.eos))
        if (room := getattr(self.backend, "room", None)) is not None:
            object.__setattr__(self, "room", room)

    def field_of(self, segment: Segment) -> str:
        """Returns the record field a segment fills."""
        return str(self.wording.label_key) if segment.name == "label" else self.wording.text_key

    def known(self, draft: PartialText) -> dict[str, str]:
        """Returns the public or released values that the draft's prompts are filled with."""
        if self.open_labels is not None and not draft.values:
            pick = int(SYSTEM_RANDOM.integers(len(self.open_labels), 1)[0])
            draft.values[str(self.wording.label_key)] = self.open_labels[pick]
        # A declared label is public; an open one is drawn or generated, and is then in `values`.
        declared = {self.wording.label_key: draft.label} if draft.label is not None and self.wording.label_key else {}
        return {**declared, **draft.values}

    def tree(self, label: str | None) -> WordTree | None:
        """Returns the released words whose tokens are candidates of a text; None: there are none."""
        return None if self.trees is None else self.trees.get(label, self.trees.get(None))

    def domain(
        self,
        prompt: str,
        prefix: Sequence[Token],
        *,
        block: ReleaseBlock | None = None,
        matcher: Matcher | None = None,
        words: WordColumns | None = None,
    ) -> EffectGenerator[Domain]:
        """Returns the public candidates of the next token; EOS is one behind other than blanks (an effect generator).

        The public model is called at every token, also where the domain does not need it: only a failure of a public
        call may stop a run.
        """
        if block is not None:
            logits = yield from block.public_logits()
            return self._narrow_candidates(
                Domain(self.backend.vocabulary(), logits, np.arange(len(logits))), prefix, matcher, words
            )
        pairs = yield self.question(prompt, prefix, matcher=matcher)
        return self.domain_of(pairs, prefix, matcher=matcher, words=words)

    def question(self, prompt: str, prefix: Sequence[Token], *, matcher: Matcher | None = None) -> TopTokenRequest:
        """Returns what the public model is asked about the next token."""
        # A grammar may forbid all of the top K, so it needs the whole vocabulary where the engine has it.
        if self.needs_logits or (matcher is not None and self.backend.max_top_k is None):
            top_k = len(self.backend.vocabulary())
        else:
            top_k = self.public_top_k or 1
        return TopTokenRequest(self.backend, prompt, tuple(prefix), top_k)

    def domain_of(
        self,
        pairs: Sequence[tuple[Token, float]],
        prefix: Sequence[Token],
        *,
        matcher: Matcher | None = None,
        words: WordColumns | None = None,
    ) -> Domain:
        """Returns the candidates of the next token from the answer to `question`."""
        if self.public_top_k is None and not self.needs_logits:
            return self._narrow_candidates(Domain(tuple(self.backend.vocabulary())), prefix, matcher, words)
        with np.errstate(divide="ignore"):
            seen = Domain(tuple(key for key, _ in pairs), np.log(np.array([chance for _, chance in pairs])))
        return self._narrow_candidates(seen, prefix, matcher, words)

    def asks_beside(self, outage: Outage) -> bool:
        """Whether the public question of a token goes beside its rows: the model is elsewhere and answers.

        A grammar or released words may leave one candidate, which is written without rows, so they need the answer
        before.
        """
        limit = concurrency_limit()
        most = min(calls_at_once(self.backend), limit or sys.maxsize)
        is_free = self.grammar is None and self.trees is None
        return is_free and not self.is_fused and most >= LEAST_BESIDE and not outage.is_on

    def _narrow_candidates(
        self, domain: Domain, prefix: Sequence[Token], matcher: Matcher | None, words: WordColumns | None = None
    ) -> Domain:
        """Returns the likeliest candidates that may follow; a function of public and released values only."""
        if words is not None and words.is_only:
            return self._columns_of(domain, words.tokens)
        may = np.ones(len(domain), dtype=bool)
        if matcher is not None:
            may = matcher.allowed() if domain.columns is not None else matcher.allowed_of(domain.keys)
        ends = self._ends(domain)
        others = domain.only(may & ~ends)
        if self.public_top_k is not None:
            others = others.likeliest(self.public_top_k, margin=self.margin)
        if words is not None:
            others = self._with_words(domain, others, words)
        if matcher is None and self.public_top_k is not None:
            others = others.only(self._keeps_characters(others.keys, prefix))
        end = domain.only(may & ends)
        # An empty text is useless; what is written is public, and so is the choice to leave EOS out behind it.
        # A grammar says itself where a text may end: it may force blanks without end.
        if len(others) and not (prefix if matcher is not None else self.text(prefix)):
            return others
        if not len(end) and (matcher is None or matcher.allowed_of((self.backend.eos,))[0]):
            # EOS outside the top K is added with logit -inf, so that a text can always end.
            end = Domain((self.backend.eos,), None if domain.logits is None else np.array([-np.inf]))
        return others.joined(end)

    def _keeps_characters(self, keys: Sequence[Token], prefix: Sequence[Token]) -> NDArray[np.bool_]:
        """Returns bool[d]: tokens behind which released text is UTF-8 whose last character may lack bytes yet."""
        written = b"".join(token_bytes_of(self.backend, token) for token in prefix)
        begun = written[codecs.utf_8_decode(written, "replace", False)[1] :]
        return np.array([_is_begun(begun + token_bytes_of(self.backend, token)) for token in keys], dtype=bool)

    def _with_words(self, domain: Domain, others: Domain, words: WordColumns) -> Domain:
        """Returns public candidates with those of released words; behind a whole word a letter of a longer one only."""
        public = frozenset(others.keys)
        words.added = frozenset(words.tokens) - public
        found = others.joined(self._columns_of(domain, [token for token in words.tokens if token in words.added]))
        if not words.ends_word:
            return found
        of_words = frozenset(words.tokens)
        goes_on = [token not in of_words and self.backend.decode([token])[:1].isalnum() for token in found.keys]
        return found.only(~np.array(goes_on, dtype=bool))

    def _columns_of(self, domain: Domain, tokens: Sequence[Token]) -> Domain:
        """Returns tokens of released words as candidates, with their public logits where the domain has all."""
        if domain.columns is not None:
            places = dict(zip(domain.columns.tolist(), range(len(domain)), strict=True))
            at = {token: place for tree in (self.trees or {}).values() for token, place in tree.columns.items()}
            return domain.only(np.array([places[at[token]] for token in tokens], dtype=np.int64))
        if self.needs_logits:
            known = {token: place for place, token in enumerate(domain.tokens)}
            return domain.only(np.array([known[token] for token in tokens if token in known], dtype=np.int64))
        return Domain(tuple(tokens))

    def _ends(self, domain: Domain) -> NDArray[np.bool_]:
        """Returns bool[d]: which candidate is the end of the text."""
        eos = self.backend.eos
        if domain.columns is None:
            return np.array([key == eos for key in domain.tokens], dtype=bool)
        return np.asarray(domain.columns == self.eos_column)

    def ended(self, tokens: Sequence[Token]) -> bool:
        """Whether released tokens end the segment: EOS, a stop string in their text, or no room for more."""
        return len(tokens) >= self.room or has_ended(self.backend, tokens, self.stop)

    def text_of(self, tokens: Sequence[Token]) -> str:
        """Returns the text of released tokens, as they are."""
        return self.backend.decode([token for token in tokens if token != self.backend.eos])

    def text(self, tokens: Sequence[Token]) -> str:
        """Returns the text of released tokens, cut before the first stop string and stripped.

        A character at its end whose last bytes are missing is left out.
        """
        cut = cut_at_stop(self.text_of(tokens), self.stop, is_stripped=True)
        return cut.strip().rstrip("\ufffd" + string.whitespace)

    @property
    def candidates(self) -> int:
        """Most candidates of a token, for planning."""
        if self.public_top_k is None or self.needs_logits:
            return len(self.backend.vocabulary())
        return self.public_top_k + 1 + (0 if self.trees is None else MOST_COLUMNS)

    def to_dict(self) -> dict[str, Any]:
        """Returns the public wording and rules as JSON values."""
        fingerprint = getattr(self.backend, "tokenizer_fingerprint", None)
        return {
            "model": self.backend.name,
            **({} if fingerprint is None else {"tokenizer": fingerprint}),
            "public_top_k": self.public_top_k,
            "stop": list(self.stop),
            "decoding": self.decoder.to_dict(),
            "instruction": self.wording.instruction,
            "generation_prompt": self.wording.template,
            "text_key": self.wording.text_key,
            "label_key": self.wording.label_key,
            "open_labels": None if self.open_labels is None else list(self.open_labels),
            **({} if self.grammar is None else {"grammar": self.grammar.grammar.to_dict()}),
            **({} if self.trees is None else {"released_words": True}),
        }


def _is_begun(raw: bytes) -> bool:
    """Whether bytes are UTF-8 but for a last character that is not complete."""
    try:
        codecs.utf_8_decode(raw, "strict", False)
    except UnicodeDecodeError:
        return False
    return True


Opener: TypeAlias = Callable[[PartialText, int, str, dict[str, str]], AbstractContextManager[ReleaseBlock]]
"""Opens a block for (draft, length, field, known values)."""


def write_draft(
    script: DecodingSpec,
    draft: PartialText,
    opener: Opener,
    tick: Callable[[], None],
) -> EffectGenerator[None]:
    """Writes one demonstration segment by segment (a generator); released tokens stay in the draft after any error.

    Over an API the public question of a token goes beside its rows, once one of this text was answered: the first goes
    before any ticket burns, and so does the next one after a failure. Other texts have no say in it.
    """
    seen = Outage(is_on=True)
    while draft.segment < len(script.segments):
        segment = script.segments[draft.segment]
        name = script.field_of(segment)
        known = script.known(draft)
        writer = _SegmentWriter(script, draft, script.wording.renderer(name, known)(()), tick, seen)
        if segment.name == "text":
            writer.follow(script.grammar)
            writer.tree = script.tree(draft.label)
        for length in () if writer.has_ended() else _unburnt(draft):
            # The first domain is computed before the block opens: a failing public model must not cost a ticket.
            # A fused engine computes the public row inside the block, with the private ones, and so do calls beside
            # them: they had an answer before.
            domain = None
            if script.is_fused or script.asks_beside(seen):
                check_silent(script.backend)
            else:
                domain = yield from writer.domain(None)
            if writer.has_ended():  # nothing that the grammar allows is a candidate
                break
            with opener(draft, length, name, known) as block:
                for _ in range(length):
                    if not (yield from writer.release(block, domain)):
                        break
                    domain = None
            if writer.has_ended():
                break
        writer.close()
        value = script.text(draft.tokens)
        # The tickets burnt without a token, or for white space: the text is left out. A label may be empty.
        if not (value if segment.name == "text" else draft.tokens):
            break
        draft.values[name] = value
        draft.tokens, draft.segment = [], draft.segment + 1
    draft.done = True


@dataclass(slots=True)
class _SegmentWriter:
    """Appends released tokens, and tokens that a grammar forces, to the draft and the open block."""

    script: DecodingSpec
    draft: PartialText
    prompt: str
    tick: Callable[[], None]
    outage: Outage
    matcher: Matcher | None = None
    stuck: bool = False
    tree: WordTree | None = None
    place: Hashable | None = None
    """What is written of a word that only the tree holds; None: no such word is begun."""
    ends_word: bool = False
    ways: dict[Token, Hashable | None] = field(default_factory=dict)
    """Tokens that are candidates because of the tree alone, with the place that each goes on from."""

    def follow(self, grammar: BoundGrammar | None) -> None:
        """Starts the grammar behind the tokens of the draft."""
        if grammar is not None:
            self.matcher = grammar.start(self.draft.tokens)
            self._write_forced(None)

    def domain(self, block: ReleaseBlock | None) -> EffectGenerator[Domain]:
        """Returns the candidates of the next token (a generator); a single candidate is appended without a release."""
        carrier = block if block is not None and block.carries_public else None
        while True:
            self._finish_word(block)
            words = self._words()
            with self.outage.noted() if carrier is None else nullcontext():
                candidates = yield from self.script.domain(
                    self.prompt, self.draft.tokens, block=carrier, matcher=self.matcher, words=words
                )
            if words is not None:
                self.ways = {token: way for token, way in self.ways.items() if words.is_only or token in words.added}
            self.stuck = not len(candidates)
            if self.matcher is None or len(candidates) != 1 or len(self.draft.tokens) >= MAX_FORCED:
                return candidates
            self._append(candidates.token(0), block)
            self._write_forced(block)
            if self.has_ended():
                return candidates

    def question(self) -> tuple[PublicAnswer, Callable[[Any], Domain]]:
        """Returns the public question about the next token, and what makes candidates of its answer."""
        asked = self.script.question(self.prompt, self.draft.tokens)
        return PublicAnswer(lambda: asked, self.outage), partial(self.script.domain_of, prefix=tuple(self.draft.tokens))

    def release(self, block: ReleaseBlock, domain: Domain | None) -> EffectGenerator[bool]:
        """Releases and writes the next token (an effect generator); returns whether another one may follow."""
        if domain is None and block.left and self.script.asks_beside(self.outage):
            index, domain = yield from block.next_beside(*self.question())
        else:
            if domain is None:
                domain = yield from self.domain(block)
            if self.has_ended() or not block.left:
                return False
            index = yield from block.next_index(domain)
        self.write(domain.token(index), block)
        return not self.has_ended()

    def write(self, token: Token, block: ReleaseBlock) -> None:
        """Appends a released token, and the tokens that the grammar, or the one word left, forces behind it."""
        self._append(token, block)
        if token in self.ways:
            self._enter(token)
        else:
            self.ends_word = False
        self.tick()
        self._write_forced(block)
        self._finish_word(block)

    def _words(self) -> WordColumns | None:
        """Returns what the tree adds to the next token: its first ones, or those that finish the word begun."""
        if self.tree is None:
            return None
        if self.place is None:
            self.ways = self.tree.behind(self.draft.tokens, self.script.text_of(self.draft.tokens))
        else:
            self.ways = dict.fromkeys(self.tree.after(self.place), self.place)
        return WordColumns(tuple(self.ways), is_only=self.place is not None, ends_word=self.ends_word)

    def _enter(self, token: Token) -> None:
        """Goes on in the word that a written token begins or continues."""
        if self.tree is not None:
            self.place = self.tree.step(self.ways.get(token, self.place), token)
            self.ends_word = self.place is None

    def _finish_word(self, block: ReleaseBlock | None) -> None:
        """Writes what is left of a released word for free, as long as only one token goes on."""
        while self.tree is not None and self.place is not None and not self.has_ended():
            rest = self.tree.after(self.place)
            if len(rest) != 1:
                return
            self._append(rest[0], block)
            self.ways = {rest[0]: self.place}
            self._enter(rest[0])

    def has_ended(self) -> bool:
        """Whether the segment has ended; a function of released and public values."""
        if self.stuck or (self.matcher is not None and self.matcher.is_stuck()):
            return True
        if self.draft.tokens and self.matcher is not None and self.matcher.is_complete():
            return True
        return bool(self.draft.tokens) and self.script.ended(self.draft.tokens)

    def close(self) -> None:
        """Completes a text that was cut at its cap, if the grammar has an ending; costs nothing."""
        if self.matcher is not None and not self.matcher.is_complete():
            self.draft.tokens += self.matcher.closing() or ()

    def _write_forced(self, block: ReleaseBlock | None) -> None:
        while self.matcher is not None and not self.has_ended() and (forced := self.matcher.forced()):
            for token in forced[: max(1, min(MAX_FORCED, self.script.room) - len(self.draft.tokens))]:
                self._append(token, block)
            if len(self.draft.tokens) >= MAX_FORCED:
                return

    def _append(self, token: Token, block: ReleaseBlock | None) -> None:
        self.draft.tokens.append(token)
        if block is not None:
            block.push(token)
        if self.matcher is not None:
            self.matcher.push(token)


def _unburnt(draft: PartialText) -> Iterator[int]:
    """Yields the length of each block of a segment that may still be opened; opening the first may reserve all."""
    for block in draft.tickets[draft.segment]:
        left = block.owed if block.reservation is None else block.reservation.unburnt
        yield from repeat(block.length, left)


def make_script(
    private: PrivateExamples,
    backend: NextTokenBackend,
    *,
    task: GenerationTask,
    max_tokens: int,
    noise: Noise | LogitNoise,
    decoding: Decoding,
) -> DecodingSpec:
    """Checks the public parameters of a generation and returns them; no call is made and nothing is charged.

    Raises:
      ConfigurationError: a public argument is invalid.
      ModelCallError: the engine would cut a public prompt.
    """
    wording = wording_of_texts(private, task)
    is_logit = isinstance(noise, LogitNoise)
    if is_logit and backend.max_top_k is not None:
        msg = (
            f"noise: expected a model that shows its whole vocabulary, found one that reports {backend.max_top_k} "
            "top tokens. Take a local model, a server with enough top_logprobs, or noise='gumbel'."
        )
        raise CapabilityError(msg)
    trees = decoding.released_words
    if trees is not None and decoding.grammar is not None:
        raise fail("Decoding.released_words", "None with a grammar, which says what may follow", "both")
    made = DecodingSpec(
        backend,
        wording,
        segments_of(task.open_label, max_tokens=max_tokens),
        *check_rules(backend, decoding),
        TextDecoder.of(noise, decoding),
        None if task.open_label is None else task.open_label.values,
        needs_logits=is_logit,
        grammar=_bound(decoding.grammar, backend),
        # True: of words that are not released yet, which a store of documents fills in.
        trees=None if trees is None else {} if trees is True else trees_of(trees, private.labels or (), backend),
    )
    check_room(made, made.open_labels or private.labels or (None,))
    return made


def check_room(script: DecodingSpec, labels: Sequence[str | None]) -> None:
    """Refuses texts that the engine has no room for, and public prompts that it would cut.

    Of private prompts that are cut like these, nothing of the records would be left. An open label stands in them with
    as many words as it may have tokens.

    Raises:
      ConfigurationError: a text may have more tokens than the engine can write.
      ModelCallError: a prompt is too long.
    """
    longest = max(segment.max_tokens for segment in script.segments)
    if longest > script.room:
        advice = "Lower it, or max_prompt_tokens of the engine."
        raise fail("max_tokens", f"at most {script.room}, which the model's context leaves", longest, advice)
    check = getattr(script.backend, "check_public", None)
    if check is None:
        return
    for label in labels:
        known = {} if label is None else {str(script.wording.label_key): label}
        for segment in script.segments:
            name = script.field_of(segment)
            check(script.wording.renderer(name, known)(()))
            known[name] = " x" * segment.max_tokens


def wording_of_texts(private: PrivateExamples, task: GenerationTask) -> GenerationTemplate:
    """Returns how the prompts of a generation read; refuses a task that the declaration of the records does not fit."""
    label_key = _label_key(private, task.open_label)
    if task.variation_prompt is not None or task.hints:
        raise fail("task", "neither variation_prompt nor hints, which are of PrivateEvolution", task)
    return generation_wording(private.text_key, label_key, private.fields, task.instruction, task.record_prompt)


def _label_key(private: PrivateExamples, label: OpenLabel | None) -> str | None:
    """Returns the field of the label, declared or open."""
    if not isinstance(private, PrivateExamples):
        raise fail("private", "PrivateExamples", type(private).__name__)
    if label is None:
        return private.label_key
    if private.label_key is not None or label.key not in private.fields:
        raise fail("OpenLabel.key", "a declared field of examples without declared labels", label.key)
    if label.values is not None:
        distinct_texts("OpenLabel.values", label.values, least=1)
    return label.key


def _bound(grammar: Grammar | None, backend: NextTokenBackend) -> BoundGrammar | None:
    if grammar is not None and not isinstance(grammar, Grammar):
        raise fail("Decoding.grammar", "a Grammar, such as Grammar.regex(...)", type(grammar).__name__)
    return None if grammar is None else grammar.bind(backend)


def generated_fields(private: PrivateExamples, task: GenerationTask | None) -> frozenset[str]:
    """Returns the fields of a demonstration that these examples are declared to give."""
    label_key = _label_key(private, GenerationTask.of(task, None).open_label)
    return frozenset({private.text_key} if label_key is None else {private.text_key, label_key})


def check_example_prompt(example_prompt: Any, fields: Collection[str], *, text_key: str) -> None:
    """Formats the template once with public text, so that an unusable template fails before anything is spent."""
    names = set(getattr(example_prompt, "input_variables", ()))
    extra = sorted(names - set(fields))
    if extra:
        advice = "A demonstration has one text: join several in the records, such as a premise and a hypothesis."
        raise fail("example_prompt", f"variables among {sorted(fields)}", extra, advice)
    if text_key not in names:
        advice = "Nothing else of what is released and paid for would be shown."
        raise fail("example_prompt", f"a template with {{{text_key}}}, the released text", sorted(names), advice)
    problem = ""
    try:
        values = dict.fromkeys(fields, "text")
        if hasattr(example_prompt, "invoke"):
            example_prompt.invoke(values)
        else:  # one message, which a chat template takes too
            example_prompt.format_messages(**values)
    except Exception as error:  # noqa: BLE001  any template error is about public text
        problem = type(error).__name__
    if problem:
        raise fail("example_prompt", "a prompt template that formats text fields", problem)
