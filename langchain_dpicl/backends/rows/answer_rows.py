"""Turns private prompts into rows by the model's answers: their embeddings, or the public keywords in them."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl._opaque import OpaqueRows
from langchain_dpicl._templates import is_unspaced
from langchain_dpicl.backends.base import Rows, TextBackend, check_whole
from langchain_dpicl.backends.langchain.texts import stops_of
from langchain_dpicl.backends.private_calls.call import OpaqueValue
from langchain_dpicl.backends.private_calls.embeddings import SilentEmbeddings
from langchain_dpicl.backends.rows.rows import fits
from langchain_dpicl.backends.sync_async import Call, Effect, EffectGenerator, Guarded, start_calls
from langchain_dpicl.exceptions import CapabilityError, ConfigurationError

MOST_CHARACTERS = 16_384
"""Characters of a text that are read; the rest does not count."""

MOST_PARTS = 32
"""Words and punctuation marks of one keyword, together; letters where a script writes no spaces between words."""

# Unicode's stream-safe text format (UAX #15) has no more than this; sorting longer runs takes quadratic time.
_MOST_MARKS_IN_A_ROW = 30
_ZERO_WIDTH_SPACE = "\u200b"
_ASCII_WORDS = re.compile(r"[a-z0-9]+")

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
# words and punctuation follow each other: "card" is in "CARD-holder" but not in "cardboard". Where a script writes no
# spaces, a letter with its marks is read as a word, and a keyword is found inside its clause.
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
        first, then the alphabet decides. Scripts that write no spaces show no words: give a domain for them. Never hand
        in private texts: which words are found is not noised.

        Raises:
          ConfigurationError: no word is left, or `most` is no whole number >= 1.

        >>> Keywords.of_texts(["The card was lost", "a lost phone"], most=3).words
        ('lost', 'phone', 'card')
        """
        left_out = {part for word in stop_words for part in _parts(word)}
        counts: Counter[str] = Counter()
        num_spaced = num_unspaced = 0
        for text in _texts("texts", texts):
            words = [part for part in _parts(text) if _is_word(part)]
            spaced = [word for word in words if not is_unspaced(word)]
            num_spaced += sum(map(len, spaced))
            num_unspaced += len(words) - len(spaced)
            counts.update(set(spaced) - left_out)
        ranked = sorted(counts, key=lambda word: (-counts[word], -len(word), word))
        if not ranked or num_unspaced > num_spaced:  # numbers and names of such a text say little of it
            raise ConfigurationError(
                "expected public texts with words other than stop words, found none; give others, or keywords= where a "
                "script writes no spaces between words"
            )
        return cls(ranked[: check_whole("most", most)])

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
    """Yields the words of a text, and each other visible character, or letter of an unspaced script, by itself."""
    word: list[str] = []
    for character in fold_text(text):
        if character.isalnum() or character == "_":
            if word and (is_unspaced(character) or is_unspaced(word[0])):
                yield "".join(word)
                word.clear()
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


def fold_text(text: str) -> str:
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


def words_in(text: str) -> list[str]:
    """Returns the runs of letters, digits and marks on them, in the form in which keywords are looked for.

    A joiner that keeps letters apart (U+200C), as before Persian endings, parts them here, as a space would.
    """
    if text.isascii():
        return _ASCII_WORDS.findall(text.lower())
    return [word for part in _parts(text.replace("\u200c", " ")) for word in part.split("_") if _is_word(word)]


Box = OpaqueValue[str]


class AnswerRows:
    """Turns private prompts into rows by way of their answers.

    Formal guarantees:
      - Row i is computed from prompt i, the engine and public settings alone.
      - A row whose prompt is None, whose call failed, or whose answer is blank or cannot be
        read, is zeros. The content of a prompt or answer raises nothing; Ctrl-C and a cancelled task go on from frames
        that hold nothing private.
      - Neither prompts nor answers are kept after the ask is gone.

    Raises:
      CapabilityError: the engine does not complete text.
      ConfigurationError: another argument is not what is expected here.

    >>> from langchain_dpicl.backends.fake import FakeBackend, scripted
    >>> engine = FakeBackend(scripted({"a red": 1.0}, {" boat": 1.0}), max_top_k=1)
    >>> source = AnswerRows.keywords(engine, Keywords(["boat", "car"]), max_tokens=4)
    >>> source.ask(("what floats?", None)).run().take().tolist()
    [[1.0, 0.0], [0.0, 0.0]]
    """

    def __init__(self, engine: TextBackend, reader: AnswerReader, *, max_tokens: int, stop: Sequence[str]) -> None:
        if isinstance(engine, type) or not isinstance(engine, TextBackend):
            kind = engine.__name__ if isinstance(engine, type) else type(engine).__name__
            raise CapabilityError(
                f"expected an engine that completes text, found {kind}; take LangChainBackend or TextVoteBackend "
                "around a LangChain model, or the embedded model"
            )
        self._engine = engine
        self._reader = reader
        self._options: dict[str, Any] = {"max_tokens": check_whole("max_tokens", max_tokens), "stop": stops_of(stop)}

    @classmethod
    def embedded(
        cls, engine: TextBackend, embeddings: SilentEmbeddings, *, max_tokens: int, stop: Sequence[str] = ()
    ) -> AnswerRows:
        """Returns rows that are the embeddings of answers."""
        if not isinstance(embeddings, SilentEmbeddings):
            raise ConfigurationError(
                f"expected SilentEmbeddings, found {type(embeddings).__name__}; wrap it: SilentEmbeddings(embeddings)"
            )
        return cls(engine, _EmbeddedAnswers(embeddings), max_tokens=max_tokens, stop=stop)

    @classmethod
    def keywords(
        cls, engine: TextBackend, keywords: Keywords, *, max_tokens: int, stop: Sequence[str] = ()
    ) -> AnswerRows:
        """Returns rows of bits: which keywords occur in an answer."""
        if not isinstance(keywords, Keywords):
            raise ConfigurationError(
                f"expected Keywords, found {type(keywords).__name__}; wrap it: Keywords(domain), or Keywords.of_texts("
                "public_texts, most=...)"
            )
        return cls(engine, _KeywordAnswers(keywords), max_tokens=max_tokens, stop=stop)

    @property
    def width(self) -> int:
        """Number of columns of a row."""
        return self._reader.width

    def ask(self, prompts: Sequence[str | None]) -> Effect:
        """Returns the effect that computes the rows of these private prompts: `OpaqueRows` float64[prompts, width]."""
        return _AnswerRequest(
            self._engine,
            self._reader,
            self._options,
            tuple(None if prompt is None else OpaqueValue(prompt) for prompt in prompts),
        )


class AnswerReader(Protocol):
    """Turns texts into rows."""

    @property
    def width(self) -> int:
        """Number of columns of a row."""

    def rows(self, texts: Sequence[Box]) -> EffectGenerator[Rows]:
        """Returns float64[texts, width] (an effect generator)."""


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class _EmbeddedAnswers:
    """Reads answers by their embeddings."""

    embeddings: SilentEmbeddings

    @property
    def width(self) -> int:
        return self.embeddings.dimension

    def rows(self, texts: Sequence[Box]) -> EffectGenerator[Rows]:
        rows: Rows = yield Call(lambda: self.embeddings.rows(texts), lambda: self.embeddings.arows(texts))
        return rows

    def start_calls(self) -> None:
        start_calls(self.embeddings)


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class _KeywordAnswers:
    """Reads answers by the keywords that occur in them."""

    domain: Keywords

    @property
    def width(self) -> int:
        return len(self.domain)

    def rows(self, texts: Sequence[Box]) -> EffectGenerator[Rows]:
        yield from ()  # asks nobody
        return np.array([self.domain.bits(text.reveal()) for text in texts]).reshape(len(texts), self.width)


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class _AnswerRequest:
    """Computes the rows of one release; private frames run below `run_guarded`, so a stop finds hidden values only."""

    engine: TextBackend
    reader: AnswerReader
    options: dict[str, Any]
    prompts: tuple[Box | None, ...]

    def run(self) -> OpaqueRows:
        start_calls(self.engine)
        start_calls(self.reader)
        return Guarded(self._rows).run() or OpaqueRows(self._zeros())

    async def arun(self) -> OpaqueRows:
        return await Guarded(self._rows).arun() or OpaqueRows(self._zeros())

    def _rows(self) -> EffectGenerator[OpaqueRows]:
        answers = _scatter(self.prompts, (yield from _each(self._answers, _present(self.prompts), _fit_answers)))
        rows = yield from _each(self.reader.rows, _present(answers), self._fit_rows)
        return self._boxed(answers, rows)

    def _answers(self, prompts: Sequence[Box]) -> EffectGenerator[list[str]]:
        answers: list[str] = yield Call(
            lambda: self.engine.complete([prompt.reveal() for prompt in prompts], **self.options),
            lambda: self.engine.acomplete([prompt.reveal() for prompt in prompts], **self.options),
        )
        return answers

    def _fit_rows(self, rows: Any, count: int) -> list[Any] | None:
        """Returns one row per text, or None for any other result."""
        return list(rows) if fits(rows, count, self.reader.width) else None

    def _boxed(self, answers: Sequence[Box | None], rows: Sequence[Any]) -> OpaqueRows:
        out = self._zeros()
        for place, row in zip([i for i, answer in enumerate(answers) if answer is not None], rows, strict=True):
            out[place] = 0.0 if row is None else row
        return OpaqueRows(out)

    def _zeros(self) -> Rows:
        return np.zeros((len(self.prompts), self.reader.width))


def _each(
    action: Callable[[Sequence[Box]], EffectGenerator[Any]],
    boxes: Sequence[Box],
    fit: Callable[[Any, int], list[Any] | None],
) -> EffectGenerator[list[Any]]:
    """Returns an action's result for each box: of all at once or, if that fails, one by one; None where it fails."""

    def together() -> EffectGenerator[list[Any] | None]:
        return fit((yield from action(boxes)), len(boxes))

    if not boxes:
        return []
    results = yield Guarded(together)
    if results is None and len(boxes) > 1:
        results = []
        for box in boxes:
            results += yield from _each(action, [box], fit)
    return [None] * len(boxes) if results is None else results


def _fit_answers(answers: Any, count: int) -> list[Any] | None:
    """Hides answers, with None for a blank one; None if their number is wrong."""
    if not isinstance(answers, list | tuple) or len(answers) != count:
        return None
    return [OpaqueValue(answer) if isinstance(answer, str) and answer.strip() else None for answer in answers]


def _present(boxes: Sequence[Box | None]) -> list[Box]:
    return [box for box in boxes if box is not None]


def _scatter(prompts: Sequence[Box | None], answers: Sequence[Box | None]) -> list[Box | None]:
    """Returns the answers at the places of their prompts."""
    remaining = iter(answers)
    return [None if prompt is None else next(remaining) for prompt in prompts]
