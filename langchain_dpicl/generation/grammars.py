"""Public grammars: which tokens may follow a text, and which text a grammar forces."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.backends.base import NextTokenBackend, Token
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.generation.grammar_bytes import (
    GrammarParse,
    TokenSpelling,
    closing_bytes,
    guidance,
    parse_of,
    spelling_of,
    whole_part,
)
from langchain_dpicl.privacy._validate import check_choice, fail

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
        except (TypeError, ValueError) as error:
            raise fail("schema", "a JSON schema of JSON values", type(error).__name__) from error
        if closed and not _intersects(checked):
            _close(checked)
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
    """A grammar bound to the tokens of one engine; holds no released token.

    Attributes:
      grammar: the grammar.
      backend: the engine.
    """

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

    def closing(self, released: Sequence[Token]) -> tuple[Token, ...] | None:
        """Returns tokens that end the text properly; see `Matcher.closing`."""
        return self.start(released).closing()


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
        if self._holds_space():
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

    def _holds_space(self) -> bool:
        return whole_part(self._parse.forced) == b" " and self._leaves_space(b" ")

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
    except ValueError:
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
