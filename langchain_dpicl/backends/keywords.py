"""Finds which of some public keywords occur in a text."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.backends.calls import whole
from langchain_dpicl.exceptions import ConfigurationError

MOST_CHARACTERS = 16_384
"""Characters of a text that are read; the rest does not count."""

MOST_PARTS = 16
"""Words and punctuation marks of one keyword, together."""

# Unicode's stream-safe text format (UAX #15) has no more than this; sorting longer runs takes quadratic time.
_MOST_MARKS_IN_A_ROW = 30
_ZERO_WIDTH_SPACE = "\u200b"

# fmt: off
STOP_WORDS = frozenset({
    "a", "about", "after", "again", "all", "also", "am", "an", "and", "any", "are", "as", "at", "be", "because",
    "been", "before", "being", "but", "by", "can", "could", "did", "do", "does", "down", "for", "from", "had",
    "has", "have", "he", "her", "here", "his", "how", "i", "if", "in", "into", "is", "it", "its", "just",
    "like", "me", "more", "most", "my", "no", "not", "of", "off", "on", "only", "or", "other", "our", "out",
    "over", "own", "same", "she", "should", "so", "some", "such", "than", "that", "the", "their", "them",
    "then", "there", "these", "they", "this", "those", "through", "to", "too", "up", "us", "very", "was", "we",
    "were", "what", "when", "where", "which", "who", "why", "will", "with", "would", "you", "your",
})
# fmt: on
"""English words without much content."""


# A text is read word by word, in lower case and compatible form (Unicode casefolding, NFKC). A keyword occurs where its
# words and punctuation follow each other: "card" is in "CARD-holder" but not in "cardboard".
class Keywords:
    r"""A public domain of keywords, its order kept.

    Formal guarantees:
      - `bits` is a function of the text and the domain; it returns 0 or 1 per keyword, whatever it is given, and raises
        nothing.
      - Its time is linear in the length of the text, of which it reads the first `MOST_CHARACTERS` characters, and does
        not grow with the number of keywords but for writing the answer.

    Args:
      domain: public texts, distinct in the form in which they are looked for. A keyword may have several words, which
        then have to follow each other; white space between words and marks does not count.

    Raises:
      ConfigurationError: the domain is empty, or a keyword is no text, has nothing to look for, has too many words, or
        reads like another one.

    >>> Keywords(["new york", "york", "boat"]).bits("In New\u00a0York, by BOAT.").tolist()
    [1.0, 1.0, 1.0]
    >>> Keywords(["card"]).bits("a cardboard box").tolist()
    [0.0]
    """

    def __init__(self, domain: Sequence[str]) -> None:
        listed = _texts("domain", domain)
        self._places: dict[tuple[str, ...], int] = {}
        for keyword in listed:
            parts = tuple(_parts(keyword))
            if not 1 <= len(parts) <= MOST_PARTS:
                raise ConfigurationError(
                    f"expected keywords of 1 to {MOST_PARTS} words and marks, found {keyword!r} with {len(parts)}; "
                    "leave it out or shorten it"
                )
            if parts in self._places:
                raise ConfigurationError(
                    f"expected distinct keywords, found {listed[self._places[parts]]!r} and {keyword!r}, which read "
                    "alike in lower case and compatible form; leave one out"
                )
            self._places[parts] = len(self._places)
        if not listed:
            raise ConfigurationError("expected 1 or more keywords, found none; declare what answers may be about")
        self._words = tuple(listed)
        self._lengths = tuple(sorted({len(parts) for parts in self._places}))

    @classmethod
    def of_texts(cls, texts: Sequence[str], *, most: int, stop_words: Iterable[str] = STOP_WORDS) -> Keywords:
        """Returns the words that occur in most of some PUBLIC texts, such as zero-shot answers or documentation.

        A word counts once per text, however often it stands there; of words in equally many texts longer ones go
        first, then the alphabet decides. Never hand in private texts: which words are found is not noised.

        Args:
          texts: public texts.
          most: how many words to keep at most.
          stop_words: words to leave out.

        Raises:
          ConfigurationError: no word is left, or `most` is no whole number >= 1.

        >>> Keywords.of_texts(["The card was lost", "a lost phone"], most=3).words
        ('lost', 'phone', 'card')
        """
        left_out = {part for word in stop_words for part in _parts(word)}
        counts: Counter[str] = Counter()
        for text in _texts("texts", texts):
            counts.update({part for part in _parts(text) if _is_word(part)} - left_out)
        ranked = sorted(counts, key=lambda word: (-counts[word], -len(word), word))
        if not ranked:
            raise ConfigurationError("expected public texts with words other than stop words, found none; give others")
        return cls(ranked[: whole("most", most)])

    def __len__(self) -> int:
        return len(self._words)

    def __repr__(self) -> str:
        return f"Keywords({len(self)} of them, {self._words[0]!r} first)"

    @property
    def words(self) -> tuple[str, ...]:
        """The keywords as they were given, in their order."""
        return self._words

    def bits(self, text: object) -> NDArray[np.float64]:
        """Returns float64[keywords]: 1 where the keyword occurs in the text; 0 everywhere for what is no text."""
        bits: NDArray[np.float64] = np.zeros(len(self))
        # By `str`, as a text of another class may be sliced by anybody's code.
        parts = list(_parts(str.__getitem__(text, slice(MOST_CHARACTERS)))) if isinstance(text, str) else []
        for length in self._lengths:
            for start in range(len(parts) - length + 1):
                place = self._places.get(tuple(parts[start : start + length]))
                if place is not None:
                    bits[place] = 1.0
        return bits


def _texts(name: str, values: Sequence[str]) -> list[str]:
    """Returns public texts as a list, or raises ConfigurationError without showing the values."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ConfigurationError(f"expected {name} as a list of texts, found {type(values).__name__}")
    listed = list(values)
    strange = next((type(value).__name__ for value in listed if not isinstance(value, str)), "")
    if strange:
        raise ConfigurationError(f"expected {name} as a list of texts, found one of type {strange} among them")
    return listed


def _parts(text: str) -> Iterator[str]:
    """Yields the words of a text, and each other visible character by itself."""
    word: list[str] = []
    for character in _folded(text):
        if character.isalnum() or character == "_":
            word.append(character)
            continue
        category = unicodedata.category(character)
        if category == "Cf" and character != _ZERO_WIDTH_SPACE:  # soft hyphens, joiners, directions: nobody sees them
            continue
        if category.startswith("M"):  # accents and vowel signs belong to the letter before
            word.append(character)
            continue
        if word:
            yield "".join(word)
            word.clear()
        if not character.isspace() and category not in {"Cc", "Cf"}:
            yield character
    if word:
        yield "".join(word)


def _folded(text: str) -> str:
    """Returns a text without differences of case, width and composition."""
    if text.isascii():
        return text.lower()
    composed = unicodedata.normalize("NFKC", _with_few_marks(text))
    return unicodedata.normalize("NFKC", _with_few_marks(composed.casefold()))


def _with_few_marks(text: str) -> str:
    """Cuts runs of combining marks that are longer than any script needs."""
    characters: list[str] = []
    run = 0
    for character in text:
        run = run + 1 if unicodedata.combining(character) else 0
        if run <= _MOST_MARKS_IN_A_ROW:
            characters.append(character)
    return "".join(characters)


def _is_word(part: str) -> bool:
    return any(character.isalnum() for character in part)
