"""Public grammars, byte by byte with llguidance: which tokens may follow a text, and which text a grammar forces."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.backends.base import NextTokenBackend, Token
from langchain_dpicl.exceptions import CapabilityError, ConfigurationError
from langchain_dpicl.privacy._validate import check_choice, check_written, fail

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
        return token_bytes_of(backend, token) if self.columns is None else self.text_of.get(token, b"")

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
        if (encode := encoder_of(backend)) is None:
            return None
        try:
            tokens = tuple(encode(text.decode()))
        except UnicodeDecodeError:
            return None
        pieces = [self.bytes_of(backend, token) for token in tokens]
        return tokens if all(pieces) and b"".join(pieces) == text else None


def encoder_of(backend: NextTokenBackend) -> Callable[[str], Sequence[Token]] | None:
    """Returns how an engine cuts a public text that follows other text; None: its tokenizer is unknown."""
    found: Callable[[str], Sequence[Token]] | None
    found = getattr(backend, "continued", None) or getattr(backend, "encode", None)
    return found if callable(found) else None


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
    texts = [_usable(token_bytes_of(backend, token)) for token in vocabulary]
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


def token_bytes_of(backend: NextTokenBackend, token: Token) -> bytes:
    """Returns the bytes of a token; b"" for EOS, and where an engine does not say which part of a character one is."""
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


Kind: TypeAlias = Literal["regex", "json_schema", "lark", "choices"]

_SPACE = ord(" ")
_MAX_FORCED = 4096
"""Most tokens that one call of `forced` returns."""

# JSON is written in one style, that of models: with free blanks every separator would be a choice, which costs.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_NO_FORCING = '%llguidance {"no_forcing": true}\n'  # masks then hold every tokenisation of a forced text
_LITERALS = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/(?:\\.|[^/\\\n])+/')
_NOT_OF_TEXT = re.compile(r"<\[|\bmax_tokens\s*=|\btemperature\s*=")


@dataclass(frozen=True, slots=True)
class Grammar:
    r"""A constraint on generated texts: a regular expression, a JSON schema, a Lark grammar, or a list of texts.

    It says what the model writes, white space included. White space around a text is then stripped, as always.

    Formal guarantees:
      - A public value: it compares, hashes and pickles by `kind` and `source`, and holds nothing else.
      - What is allowed or forced after released tokens is a function of the grammar, the engine's vocabulary and the
        bytes of these tokens; the tokenisation of the bytes has no effect.

    Attributes:
      kind: "regex", "json_schema", "lark" or "choices".
      source: the pattern, the schema or the list of texts as JSON, or the Lark text.

    Raises:
      ConfigurationError: the source cannot be read, no text satisfies it, or llguidance is not installed.

    >>> Grammar.regex(r"(positive|negative)\.").to_dict()
    {'kind': 'regex', 'pattern': '(positive|negative)\\.'}
    """

    kind: Kind
    source: str

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, get_args(Kind))
        if not isinstance(self.source, str) or not self.source:
            raise fail(self.kind, "a non-empty text", self.source)
        check_written(self.kind, self.source)
        self.parse(spelling_of(None))  # raises for a source that cannot be read or that no text satisfies

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        r"""Returns the grammar of texts that match `pattern` completely.

        Args:
          pattern: regular expression without look-around and back-references; `\d` is any Unicode digit, so write
            [0-9] for the ten.
        """
        return cls("regex", pattern)

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | type[Any], *, closed: bool = True) -> Grammar:
        """Returns the grammar of JSON texts that follow `schema`, fields in the schema's order.

        The text is one line, with ", " and ": " as its only blanks between values.

        Args:
          schema: a JSON schema, or a pydantic model.
          closed: objects that list properties, and do not mention further ones, have no further ones (except in schemas
            that intersect others, which are not changed). Every text is valid under
            the schema as given, too; left open, the end of each object is a choice, which costs a release.

        Raises:
          ConfigurationError: not a JSON schema, or one that no text satisfies.
        """
        described = schema.model_json_schema() if hasattr(schema, "model_json_schema") else schema
        if not isinstance(described, Mapping):
            raise fail("schema", "a JSON schema as a mapping, or a pydantic model", type(schema).__name__)
        try:
            checked = json.loads(json.dumps(dict(described), allow_nan=False))
            if closed and not _intersects(checked):
                _close(checked)
        except (TypeError, ValueError, RecursionError) as error:
            raise fail("schema", "a JSON schema of JSON values", type(error).__name__) from error
        return cls("json_schema", json.dumps(checked, ensure_ascii=False))

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """Returns the grammar of a Lark text (llguidance's dialect), whose rule `start` the text follows.

        Tokens named by number, `max_tokens=` and `temperature=` are refused: they do not constrain text.

        Args:
          text: the rules.
        """
        return cls("lark", text)

    @classmethod
    def choices(cls, texts: Sequence[str]) -> Grammar:
        """Returns the grammar of exactly these texts.

        Args:
          texts: at least one; public.

        Raises:
          ConfigurationError: not a list of texts, or one of them is empty.
        """
        choices = list(texts) if isinstance(texts, Sequence) and not isinstance(texts, str | bytes) else []
        if not choices or not all(isinstance(text, str) and text for text in choices):
            raise fail("texts", "a list of non-empty texts", texts)
        return cls("choices", json.dumps(list(dict.fromkeys(choices)), ensure_ascii=False))

    def bind(self, backend: NextTokenBackend) -> BoundGrammar:
        """Returns the grammar on an engine's tokens; the vocabulary is read once per engine.

        Args:
          backend: the engine that writes.

        Raises:
          ConfigurationError: no text of the grammar begins with a token of the engine.
        """
        bound = BoundGrammar(self, backend)
        if bound.start().is_stuck():
            raise fail("grammar", f"a text that tokens of {backend.name} can begin", self.to_dict())
        return bound

    def to_dict(self) -> dict[str, Any]:
        """Returns the grammar as JSON values, for reports."""
        if self.kind == "json_schema":
            return {"kind": self.kind, "schema": json.loads(self.source)}
        if self.kind == "choices":
            return {"kind": self.kind, "texts": json.loads(self.source)}
        return {"kind": self.kind, "pattern" if self.kind == "regex" else "text": self.source}

    def parse(self, spelling: TokenSpelling) -> GrammarParse:
        """Returns the parse of the empty text; for `BoundGrammar`.

        Args:
          spelling: the engine's tokens, as bytes.
        """
        return parse_of(_as_lark(self.kind, self.source), spelling)


class BoundGrammar:
    """A grammar bound to the tokens of one engine; holds no released token."""

    def __init__(self, grammar: Grammar, backend: NextTokenBackend) -> None:
        self.grammar = grammar
        self.backend = backend
        self._spelling = spelling_of(backend)
        self._parse = grammar.parse(self._spelling)

    def start(self, released: Sequence[Token] = ()) -> Matcher:
        """Returns a matcher behind the tokens `released`."""
        matcher = Matcher(self.backend, self._spelling, self._parse.copy())
        for token in released:
            matcher.push(token)
        return matcher


class Matcher:
    """The state of a text in its grammar, after released and forced tokens.

    Formal guarantees:
      - Every answer is a function of the grammar, the vocabulary and the bytes pushed so far.
      - Forced tokens are the only continuation that the grammar and the vocabulary allow.
    """

    def __init__(self, backend: NextTokenBackend, spelling: TokenSpelling, parse: GrammarParse) -> None:
        self._backend = backend
        self._spelling = spelling
        self._parse = parse
        self._has_ended = False

    def allowed(self) -> NDArray[np.bool_]:
        """Returns bool[V] in the order of `backend.vocabulary()`: the tokens that may come next.

        EOS is allowed where the text may end, and a token with part of a UTF-8 character where that character may
        begin. A forced blank that is left to the next token (see `forced`) is not allowed by itself.
        """
        columns = self._spelling.columns_of(self._backend)
        if self._has_ended:
            return np.zeros(len(columns), np.bool_)
        mask = self._parse.bits[columns]  # bool[V]
        if whole_part(self._parse.forced) == b" " and self._leaves_space(b" "):
            mask &= columns != _SPACE
        mask[self._spelling.end_columns] = self._parse.accepts
        return mask

    def allowed_of(self, tokens: Sequence[Token]) -> NDArray[np.bool_]:
        """Returns bool[len(tokens)]: whether each token may come next."""
        if self._spelling.columns is None:
            return np.array([self._may_follow(token) for token in tokens], np.bool_)
        mask, spelling, backend = self.allowed(), self._spelling, self._backend
        columns = [spelling.first_column.get(spelling.bytes_of(backend, token), -1) for token in tokens]
        may_follow = np.array([column >= 0 and mask[column] for column in columns], np.bool_)
        may_follow[[token == backend.eos for token in tokens]] = self._parse.accepts and not self._has_ended
        return may_follow

    def forced(self) -> tuple[Token, ...]:
        """Returns the forced tokens, in one public spelling; empty where there is a choice.

        The spelling is the engine's own tokenisation, or else the one with the fewest tokens. It ends at a whole
        character, and before a last blank if every continuation has a token that begins with the blank, so that
        " word" stays one token.
        """
        # On a copy: looking ahead must not move this matcher.
        ahead = Matcher(self._backend, self._spelling, self._parse.copy())
        written: list[Token] = []
        while not self._has_ended and len(written) < _MAX_FORCED and (step := ahead._forced_here()):
            written += step
            for token in step:
                ahead.push(token)
        return tuple(written)

    def push(self, token: Token) -> None:
        """Appends a released or forced token."""
        if not self._may_follow(token):
            raise ConfigurationError(
                f"expected a token that the grammar allows after the text so far, found {token!r}; "
                "take one of allowed(), and start anew for another text"
            )
        self._has_ended = token == self._backend.eos
        if not self._has_ended:
            self._parse.consume(self._spelling.bytes_of(self._backend, token))

    def is_complete(self) -> bool:
        """Whether the text may end and nothing else can follow, so that EOS costs nothing."""
        return self._has_ended or (self._parse.accepts and not self._goes_on())

    def is_stuck(self) -> bool:
        """Whether the text may not end and no token of the vocabulary can follow; False for top-k engines."""
        return not (self._has_ended or self._parse.accepts or self._goes_on())

    def closing(self) -> tuple[Token, ...] | None:
        """Returns tokens after which the text may end, by a bounded deterministic search; None: not found."""
        if self._has_ended:
            return ()
        ending = closing_bytes(self._parse)
        return None if ending is None else self._spelling.spelled(self._backend, ending)

    def _may_follow(self, token: Token) -> bool:
        if self._has_ended:
            return False
        if token == self._backend.eos:
            return self._parse.accepts
        raw = self._spelling.bytes_of(self._backend, token)
        return bool(raw) and self._parse.can_follow(raw)

    def _forced_here(self) -> tuple[Token, ...]:
        text = whole_part(self._parse.forced)
        if text.endswith(b" ") and self._leaves_space(text):
            text = text[:-1]
        return self._spelling.spelled(self._backend, text, partly=True) or self._only_token()

    def _only_token(self) -> tuple[Token, ...]:
        """Returns the first token of the only continuation that the vocabulary can spell."""
        if self._spelling.columns is None or self._parse.accepts:
            return ()
        columns = np.flatnonzero(self._others())
        # Several tokens may spell the same bytes; they are one choice.
        if not len(columns) or np.ptp(self._spelling.columns[columns]):
            return ()
        return (self._backend.vocabulary()[int(columns[0])],)

    def _leaves_space(self, text: bytes) -> bool:
        """Whether a forced text leaves its last blank to the next token, as every continuation has a token for it."""
        after = self._parse.copy()
        after.consume(text)
        if after.accepts or not after.next_bytes.any():
            return False
        return self._spelling.columns is None or all(
            bytes([_SPACE, byte]) in self._spelling.first_column for byte in np.flatnonzero(after.next_bytes)
        )

    def _goes_on(self) -> bool:
        return bool((self._parse.next_bytes if self._spelling.columns is None else self._others()).any())

    def _others(self) -> NDArray[np.bool_]:
        """Returns bool[V]: the allowed tokens without EOS."""
        mask = self.allowed()
        mask[self._spelling.end_columns] = False
        return mask


def _as_lark(kind: Kind, source: str) -> str:
    """Returns any kind of grammar as one text of llguidance."""
    if kind == "lark":
        if forbidden := _NOT_OF_TEXT.search(_LITERALS.sub(" ", source)):
            raise fail("lark", "rules about text alone", forbidden[0], "Bound a length in the pattern: /[a-z]{1,20}/.")
        return _NO_FORCING + source
    if kind == "regex":
        return f"{_NO_FORCING}start: /{guidance().regex_to_lark(source, '')}/"
    value = _json_of(kind, source)
    if kind == "choices":
        return f"{_NO_FORCING}start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in value)
    style = _JSON_STYLE | value.get("x-guidance", {})
    return f"{_NO_FORCING}start: %json " + json.dumps(value | {"x-guidance": style}, ensure_ascii=False)


def _json_of(kind: Kind, source: str) -> Any:
    """Returns the schema or the texts that a source holds."""
    try:
        value = json.loads(source)
    except (ValueError, RecursionError):
        value = None
    if kind == "choices":
        ok = isinstance(value, list) and bool(value) and all(isinstance(text, str) and text for text in value)
    else:
        ok = isinstance(value, dict) and isinstance(value.get("x-guidance", {}), dict)
    if not ok:
        raise fail("source", "a JSON list of texts" if kind == "choices" else "a JSON schema as JSON", source)
    return value


def _parts(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the schemas inside a schema."""
    parts: list[Any] = []
    for key, value in schema.items():
        if key in {"items", "additionalProperties"}:
            parts.append(value)
        elif key in {"prefixItems", "anyOf", "oneOf"} and isinstance(value, list):
            parts += value
        elif key in {"properties", "$defs", "definitions"} and isinstance(value, dict):
            parts += value.values()
    return [part for part in parts if isinstance(part, dict)]


def _intersects(schema: dict[str, Any]) -> bool:
    """Whether an object is described in several places: to close one would forbid the others' properties."""
    # With properties beside alternatives, an object is described by both.
    alternatives = {"anyOf", "oneOf", "$ref"} & set(schema)
    here = {"allOf", "if", "not", "dependentSchemas"} & set(schema) or (alternatives and "properties" in schema)
    return bool(here) or any(_intersects(part) for part in _parts(schema))


def _close(schema: dict[str, Any]) -> None:
    """Forbids further properties, in place, for objects that list properties and do not mention further ones."""
    rules = {"additionalProperties", "patternProperties", "unevaluatedProperties"} & set(schema)
    if "properties" in schema and not rules:
        schema["additionalProperties"] = False
    for part in _parts(schema):
        _close(part)
