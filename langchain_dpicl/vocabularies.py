"""Public vocabularies for keyword histograms."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from langchain_dpicl.backends._embedded_tables import load_tables
from langchain_dpicl.backends.keywords import STOP_WORDS, Keywords
from langchain_dpicl.privacy._validate import check_int, fail
from langchain_dpicl.privacy.unit_keywords import MOST_KEYWORDS

_FEWEST_LETTERS = 3
_SHORTEST = 4
"""Length of a token of the embedded model above which it counts as a word: shorter ones are mostly pieces of words."""


def public_vocabulary(
    texts: Sequence[str] | None = None, *, size: int = 1_000, stop_words: Iterable[str] = STOP_WORDS
) -> tuple[str, ...]:
    """Returns words of PUBLIC texts, the most frequent first.

    Never pass private texts, nor texts that were chosen by looking at private ones: no noise is added. Good public
    texts are of the same domain: help pages, a product catalogue, titles of a public corpus, answers of a model that
    saw no records.

    Args:
      texts: public texts; a word counts once in each, numbers and words of one or two letters not at all. Review
        the list: frequent words ("said", "Monday") are often not topics. None: the words of the embedded model, which
        was trained on public text of many domains (docs/embedded-model.md).
      size: maximum number of words.
      stop_words: words to leave out; English ones by default.

    Raises:
      ConfigurationError: no word is left, or `size` is out of range.

    >>> public_vocabulary(["The card was lost", "a lost phone"], size=2)
    ('lost', 'phone')
    >>> len(public_vocabulary(size=500))
    500
    """
    check_int("size", size, low=1, high=MOST_KEYWORDS)
    if texts is not None:
        ranked_words = Keywords.of_texts(texts, most=MOST_KEYWORDS, stop_words=stop_words).words
        words_of_it = tuple(word for word in ranked_words if _says_something(word))[:size]
        if not words_of_it:
            raise fail(
                "texts", "texts with words of at least three letters that are not stop words", f"{len(texts)} without"
            )
        return words_of_it
    tables, left_out = load_tables(), frozenset(stop_words)
    # The embedded model's tokens that begin with a blank are whole words; unigram counts rank them.
    pieces = (token.decode("utf-8", "ignore") for token in tables.token_bytes)
    words = {
        piece[1:]: float(tables.unigram[place])
        for place, piece in enumerate(pieces)
        if piece.startswith(" ") and piece[1:].isalpha() and piece.islower() and len(piece) > _SHORTEST
    }
    ranked = sorted(words.keys() - left_out, key=lambda word: (-words[word], word))
    return tuple(ranked[:size])


def _says_something(word: str) -> bool:
    is_short = word.isascii() and len(word) < _FEWEST_LETTERS
    return not is_short and "_" not in word and any(letter.isalpha() for letter in word)
