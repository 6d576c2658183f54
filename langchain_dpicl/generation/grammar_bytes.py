"""Parses grammars byte by byte with llguidance, and maps text to tokens of a vocabulary."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.backends.base import NextTokenBackend, Token
from langchain_dpicl.exceptions import CapabilityError, ConfigurationError

BYTES = 256
_FIRST_OUTSIDE_UTF8 = 0xF5  # from here on no byte is part of UTF-8; 0xFF marks control tokens in llguidance
_CONTROL = b"\xff"
_LONGEST = 128  # bytes of one token; llguidance bounds them, and common vocabularies stay below
_LOST = "\ufffd"

_BRANCHES = 16
_BEAM = 32
_MOST_CHOICES = 192
_MOST_BYTES = 4096
_PREFERRED = b"\"}]'),. 0123456789aeiou"
"""Bytes that an ending tries first: closing quotes and brackets, then filling characters."""


def guidance() -> Any:
    """Returns llguidance."""
    try:
        import llguidance
    except ImportError as error:
        raise ConfigurationError(
            "grammars: expected the package llguidance, found none; install langchain-dpicl[grammar]"
        ) from error
    return llguidance


class GrammarParse:
    """The state of a text in its grammar, byte by byte; `copy` is cheap."""

    def __init__(self, core: Any, size: int) -> None:
        self._core = core
        self._size = size
        self._bits: NDArray[np.bool_] | None = None
        self._forced: bytes | None = None

    def copy(self) -> GrammarParse:
        """Returns an independent parse at the same place."""
        twin = GrammarParse(self._core.deep_copy(), self._size)
        # Both caches are replaced and never changed in place, so copies may share them.
        twin._bits, twin._forced = self._bits, self._forced
        return twin

    def prepare(self) -> None:
        """Computes the properties that copies share."""
        _ = self.bits, self.forced

    @property
    def bits(self) -> NDArray[np.bool_]:
        """bool[size]: which words of llguidance's vocabulary may follow; the last one, the end, is False."""
        if self._bits is None:
            packed = np.frombuffer(self._core.compute_bitmask(), np.uint8)
            self._check()
            self._bits = np.unpackbits(packed, bitorder="little")[: self._size].astype(np.bool_)
            self._bits[-1] = False
            self._bits.flags.writeable = False
        return self._bits

    @property
    def next_bytes(self) -> NDArray[np.bool_]:
        """bool[256]: the bytes that may follow."""
        return self.bits[:BYTES]

    @property
    def accepts(self) -> bool:
        """Whether the text may end here."""
        return bool(self._core.is_accepting())

    @property
    def forced(self) -> bytes:
        """The bytes that must follow; empty where the text may end."""
        if self._forced is None:
            self._forced = bytes(self._core.compute_ff_bytes())
            self._check()
        return self._forced

    def can_follow(self, raw: bytes) -> bool:
        """Whether these bytes may follow."""
        return bool(self._core.validate_tokens(list(raw)) == len(raw))

    def consume(self, raw: bytes) -> None:
        """Appends bytes that may follow."""
        self._bits = self._forced = None
        self._core.consume_tokens(list(raw))
        self._check()

    def _check(self) -> None:
        if self._core.is_error():
            raise ConfigurationError(
                "expected a grammar that some text satisfies, within the limits of its parser, found "
                f"{_first_line(self._core.get_error())}; correct or simplify the grammar"
            )


@dataclass(frozen=True, slots=True, eq=False)
class TokenSpelling:
    """How an engine's tokens spell text; numbers index llguidance's vocabulary. Holds no engine.

    That vocabulary is the 256 bytes and each distinct text of a token, so one mask answers for bytes and for tokens.

    Attributes:
      tokenizer: llguidance's vocabulary: the bytes, the distinct texts of tokens, the end.
      size: its length; the last number is the end.
      columns: int64[V]: the number of each token, `size - 1` where a token has no text; None for top-k engines.
      end_columns: int64[...]: columns of EOS.
      first_column: text -> its first column.
      text_of: token -> its bytes, b"" for EOS and tokens without text; empty for top-k engines.
      parses: the parses of the empty text, by grammar.
    """

    tokenizer: Any
    size: int
    columns: NDArray[np.int64] | None
    end_columns: NDArray[np.int64]
    first_column: dict[bytes, int]
    text_of: dict[Token, bytes]
    parses: dict[str, GrammarParse] = field(default_factory=dict)

    def columns_of(self, backend: NextTokenBackend) -> NDArray[np.int64]:
        """Returns int64[V]."""
        if self.columns is None:
            raise CapabilityError(
                f"expected a model that tells its whole vocabulary, found {backend.name}, which reports top tokens "
                "only; ask allowed_of(tokens) about these"
            )
        return self.columns

    def bytes_of(self, backend: NextTokenBackend, token: Token) -> bytes:
        """Returns the bytes of a token; b"" for EOS, unknown tokens and tokens without text."""
        return _text_of(backend, token) if self.columns is None else self.text_of.get(token, b"")

    def spelled(self, backend: NextTokenBackend, text: bytes, *, partly: bool = False) -> tuple[Token, ...] | None:
        """Returns a public spelling of a text, or None; with `partly`, of its longest prefix that has one."""
        if not text:
            return ()
        if self.columns is None and isinstance(
            backend.eos, bytes
        ):  # any text is a token of an engine whose tokens are bytes
            return (text,)
        own = self._own(backend, text)
        if own is not None:
            return own
        lengths = _fewest(text, self.first_column, partly=partly)
        if lengths is None:
            return None
        vocabulary, tokens, place = backend.vocabulary(), [], 0
        for length in lengths:
            tokens.append(vocabulary[self.first_column[text[place : place + length]]])
            place += length
        return tuple(tokens)

    def _own(self, backend: NextTokenBackend, text: bytes) -> tuple[Token, ...] | None:
        """Returns the engine's own tokenisation of a text; None if it has none or decodes to another text."""
        encode = getattr(backend, "encode", None)
        if not callable(encode):
            return None
        try:
            tokens = tuple(encode(text.decode()))
        except UnicodeDecodeError:
            return None
        pieces = [self.bytes_of(backend, token) for token in tokens]
        return tokens if all(pieces) and b"".join(pieces) == text else None


_SPELLINGS: WeakKeyDictionary[Any, TokenSpelling] = WeakKeyDictionary()
_TOP_ONLY: list[TokenSpelling] = []
_LOCK = threading.Lock()


def spelling_of(backend: NextTokenBackend | None) -> TokenSpelling:
    """Returns the cached spelling of an engine; of single bytes for None and for top-k engines."""
    with _LOCK:
        if backend is None or backend.max_top_k is not None:
            if not _TOP_ONLY:
                _TOP_ONLY.append(_spelling([], [], {}))
            return _TOP_ONLY[0]
        try:
            known = _SPELLINGS.get(backend)
        except TypeError:  # not hashable or not weakly referable: not cached
            return _read_vocabulary(backend)
        if known is None:
            known = _SPELLINGS[backend] = _read_vocabulary(backend)
        return known


def parse_of(lark: str, spelling: TokenSpelling) -> GrammarParse:
    """Returns the parse of the empty text."""
    known = spelling.parses.get(lark)
    if known is None:
        matcher = guidance().LLMatcher
        core = matcher(spelling.tokenizer, matcher.grammar_from_lark(lark), log_level=0)
        if core.is_error():
            raise ConfigurationError(
                f"expected a grammar that llguidance reads, found: {_first_line(core.get_error())}; correct it"
            )
        known = GrammarParse(core, spelling.size)
        known.prepare()
        spelling.parses[lark] = known
    return known.copy()


def whole_part(raw: bytes) -> bytes:
    """Returns bytes without an incomplete UTF-8 character at their end."""
    for back in range(1, min(len(raw), 4) + 1):
        byte = raw[-back]
        if byte & 0xC0 != 0x80:  # a first byte: its leading ones are the number of bytes of the character
            needed = 1 if byte < 0x80 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return raw if needed <= back else raw[:-back]
    return raw


def closing_bytes(parse: GrammarParse) -> bytes | None:
    """Returns a short text after which the parse accepts, by a bounded beam search; None if it finds none.

    Each round adds one free choice, and what it forces, to at most `_BEAM` texts; the shortest accepted text of the
    first round that has one is the result.
    """
    beam = [_follow_forced(parse.copy(), 0, parse.forced, parse.forced)]
    for _ in range(_MOST_CHOICES):
        if done := [text for _, text, place in beam if place.accepts]:
            return min(done, key=lambda text: (len(text), text))
        grown = [
            (cost + rank, text + bytes([byte]), place)
            for cost, text, place in beam
            for rank, byte in enumerate(_rank_bytes(place.next_bytes))
        ]
        grown.sort(key=lambda item: (item[0], len(item[1]), item[1]))
        beam = []
        for cost, text, place in grown[:_BEAM]:
            ahead = place.copy()
            ahead.consume(text[-1:])
            if len(text) + len(ahead.forced) <= _MOST_BYTES:
                beam.append(_follow_forced(ahead, cost, text + ahead.forced, ahead.forced))
    return None


def _follow_forced(place: GrammarParse, cost: int, text: bytes, forced: bytes) -> tuple[int, bytes, GrammarParse]:
    if forced:
        place.consume(forced)
    return cost, text, place


def _rank_bytes(allowed: NDArray[np.bool_]) -> list[int]:
    """Returns the bytes to try, in the order of `_PREFERRED`."""
    possible = np.flatnonzero(allowed).tolist()
    order = {byte: rank for rank, byte in enumerate(_PREFERRED)}
    return sorted(possible, key=lambda byte: (order.get(byte, len(order)), byte))[:_BRANCHES]


def _read_vocabulary(backend: NextTokenBackend) -> TokenSpelling:
    vocabulary = backend.vocabulary()
    texts = [_usable(_text_of(backend, token)) for token in vocabulary]
    ends = [column for column, token in enumerate(vocabulary) if token == backend.eos]
    return _spelling(texts, ends, dict(zip(vocabulary, texts, strict=True)))


def _usable(text: bytes) -> bytes:
    return text if 0 < len(text) <= _LONGEST and max(text) < _FIRST_OUTSIDE_UTF8 else b""


def _spelling(texts: Sequence[bytes], ends: Sequence[int], text_of: dict[Token, bytes]) -> TokenSpelling:
    """Builds llguidance's vocabulary from the bytes and the texts."""
    library = guidance()
    words = [bytes([number]) if number < _FIRST_OUTSIDE_UTF8 else b"" for number in range(BYTES)]
    number = {word: place for place, word in enumerate(words) if word}
    first_column: dict[bytes, int] = {}
    for column, text in enumerate(texts):
        if text:
            first_column.setdefault(text, column)
            if text not in number:
                number[text] = len(words)
                words.append(text)
    end = len(words)
    words.append(_CONTROL + b"<end of text>")
    columns = np.array([number.get(text, end) for text in texts], np.int64) if texts else None
    tokenizer = library.LLTokenizer(library.TokenizerWrapper(_TokenizerVocabulary(words)))
    return TokenSpelling(tokenizer, end + 1, columns, np.array(ends, np.int64), first_column, text_of)


class _TokenizerVocabulary:
    """The tokenizer interface that llguidance requires."""

    bos_token_id = None

    def __init__(self, words: list[bytes]) -> None:
        self.tokens = words
        self.eos_token_id = len(words) - 1
        self.special_token_ids = [self.eos_token_id]

    def __call__(self, text: bytes | str) -> list[int]:
        """Spells by single bytes; required by the interface and not used here."""
        return list(text.encode() if isinstance(text, str) else text)


def _text_of(backend: NextTokenBackend, token: Token) -> bytes:
    if token == backend.eos:
        return b""
    if isinstance(token, bytes):
        return token
    if callable(tell := getattr(backend, "token_bytes", None)):
        return bytes(tell(token))
    text = backend.decode([token])
    return b"" if _LOST in text else text.encode()  # part of a character: its bytes cannot be recovered


def _fewest(text: bytes, known: dict[bytes, int], *, partly: bool) -> list[int] | None:
    """Returns the lengths of the fewest known pieces that spell a text, longest first (`partly`: its prefix)."""
    # Dynamic programming over positions: first which ones are reachable, then the fewest pieces from each.
    reached = [True] + [False] * len(text)
    for start in (place for place in range(len(text)) if reached[place]):
        for length in range(1, min(_LONGEST, len(text) - start) + 1):
            reached[start + length] |= text[start : start + length] in known
    last = max(place for place, is_reached in enumerate(reached) if is_reached)
    if last < len(text) and not partly:
        return None
    count, piece = [0] * (last + 1), [0] * (last + 1)
    for start in range(last - 1, -1, -1):
        count[start] = last + 1  # more than any spelling has
        for length in range(min(_LONGEST, last - start), 0, -1):
            if count[start + length] + 1 < count[start] and text[start : start + length] in known:
                count[start], piece[start] = count[start + length] + 1, length
    lengths, place = [], 0
    while place < last:
        lengths.append(piece[place])
        place += piece[place]
    return lengths


def _first_line(message: str) -> str:
    return message.strip().split("\n", 1)[0][:200]
