"""Released words as candidates: a tree over an engine's tokens. Holds released words only, and reads no record."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Self

from langchain_dpicl.backends.base import NextTokenBackend, Token
from langchain_dpicl.exceptions import CapabilityError
from langchain_dpicl.privacy._validate import fail, plain_or_type
from langchain_dpicl.privacy.extensions.word_release import MOST_LETTERS

if TYPE_CHECKING:
    from langchain_dpicl.released.words import ReleasedWords

MOST_COLUMNS = 256
"""Tokens that a tree adds to one token at most: a plan declares so many candidates before any word is released."""

_ROOT: Hashable = ()


@dataclass(slots=True)
class WordColumns:
    """What a tree adds to the candidates of one token.

    Attributes:
      tokens: tokens that may be candidates beside the public ones.
      is_only: whether nothing else is: a word was begun that only the tree holds.
      ends_word: whether a word was just finished, so that no letter may follow.
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
        """Returns the tree of released words, the largest noisy weight first; what has no room is left out.

        Args:
          words: released.
          backend: whose tokens they are cut into.
        """
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

        They continue a word whose beginning stands at the end, the longest beginning first, or begin one; there are no
        more than `MOST_COLUMNS`.

        Args:
          tokens: released.
          text: what they spell.
        """
        last = " " + text.rpartition(" ")[2]
        begun: list[Hashable] = [tuple(tokens[-size:]) for size in range(min(MOST_LETTERS, len(tokens)), 0, -1)]
        found: dict[Token, Hashable | None] = {}
        for place in (*begun, last, last.encode("utf-8")):
            if place not in self.ends:
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
    encode: Callable[[str], Sequence[Any]] | None = getattr(backend, "encode", None)
    if callable(encode):
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

    Raises:
      ConfigurationError: something else, or words of other labels.
    """
    from langchain_dpicl.released.words import ReleasedWords as Kind

    if not isinstance(words, Kind):
        advice = "Release them first: WordDiscovery.from_private_examples(...).run()."
        raise fail("Decoding.released_words", "a ReleasedWords", plain_or_type(words), advice)
    found = set(words.by_label)
    if found != {None} and found != set(labels):
        advice = "Release the words of the same labels, or of all units."
        raise fail("Decoding.released_words", f"words of the labels {list(labels)}", sorted(map(str, found)), advice)
    return {label: WordTree.of(held, backend) for label, held in words.by_label.items()}
