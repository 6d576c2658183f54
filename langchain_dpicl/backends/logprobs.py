"""Turns provider payloads into probabilities by pure functions that raise for no payload."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, TypeAlias

import numpy as np

from langchain_dpicl.backends.base import Rows, Token

# No payload may raise: else a payload could make its row end differently from others.
Probabilities: TypeAlias = dict[bytes, float]
"""Next-token probabilities by token bytes: values in [0, 1], sum <= 1."""

Entry: TypeAlias = tuple[object, object]
"""A reported token, as a provider writes it, and its logprob."""

Spell: TypeAlias = Callable[[int], bytes | None]
"""Turns a token id into bytes; None for an unknown id. Must not raise."""

EOS = b""
"""The end of the text. A token without bytes ends it too."""

EOS_TEXTS = frozenset(
    {
        "</s>",
        "<eos>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<end_of_turn>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    }
)
"""How providers spell the end of a text; all of them become `EOS`."""

FINISHED = frozenset({"stop", "eos", "eos_token", "end_turn"})
"""How providers say that the model ended the text by itself."""

MAX_ENTRIES = 300_000
"""Entries read of one position; above the largest vocabulary in use."""

_MAX_TOKEN_BYTES = 4096
_ROUNDING = 1e-3  # providers round logprobs of sure tokens to slightly above 0
_LOST = "\ufffd".encode()  # bytes of a token whose own bytes the provider lost
_UNREADABLE = re.compile(r"\ufffd|^bytes:\\x")  # placeholders for bytes outside the text
_BY_ID = re.compile(r"token_id:([0-9]{1,10})")  # vLLM's way, with `return_tokens_as_token_ids`


def next_token(
    payload: object,
    *,
    text: object = None,
    finish_reason: object = None,
    eos_texts: Iterable[str] = EOS_TEXTS,
    spell: Spell | None = None,
) -> Probabilities:
    """Returns the probabilities of an answer's first token, or certainty of the end if it ended at once."""
    try:
        if finish_reason == "content_filter":
            return {}
        entries = first_position(payload)
        ended = not entries and isinstance(finish_reason, str) and finish_reason in FINISHED and text == ""
        return {EOS: 1.0} if ended else probabilities(entries, eos_texts=eos_texts, spell=spell)
    except Exception:  # noqa: BLE001  objects of foreign classes may raise at any touch; such an answer is unreadable
        return {}


def first_position(payload: object, *, most: int = MAX_ENTRIES) -> list[Entry]:
    """Returns at most `most` entries reported for the first generated token; empty if unreadable."""
    return next((entries for _, entries in positions(payload, limit=1, most=most)), [])


def positions(payload: object, *, limit: int, most: int = MAX_ENTRIES) -> list[tuple[object, list[Entry]]]:
    """Returns the generated token and the entries reported for its place, for the first `limit` tokens.

    Four shapes are in use: `{"content": [{"top_logprobs": [entry, ...]}, ...]}` (chat, and completions of llama.cpp),
    the list in it alone (Ollama), and `{"top_logprobs": [{text: logprob, ...}, ...]}` with entries or with
    (text, logprob) pairs (completions of OpenAI, vLLM and llama-cpp-python).
    """
    if isinstance(payload, list | tuple):
        payload = {"content": payload}
    if not isinstance(payload, dict):
        return []
    content, tops = _listed(payload.get("content"), limit), _listed(payload.get("top_logprobs"), limit)
    if content and isinstance(content[0], dict):
        return [(place, _entries(place.get("top_logprobs"), most)) for place in content if isinstance(place, dict)]
    tokens = _listed(payload.get("tokens"), limit)
    return [(tokens[i] if i < len(tokens) else None, _entries(top, most)) for i, top in enumerate(tops)]


def probabilities(
    entries: Iterable[Entry], *, eos_texts: Iterable[str] = EOS_TEXTS, spell: Spell | None = None
) -> Probabilities:
    """Turns entries into probabilities; unreadable ones are left out.

    Several tokens with the same bytes (control tokens, byte fallbacks) add up; a sum above 1 is scaled back to 1.
    """
    ends = frozenset(eos_texts)
    by_token: Probabilities = {}
    for entry, logprob in entries:
        value, key = probability(logprob), token_key(entry, eos_texts=ends, spell=spell)
        if key is not None and value > 0.0:
            by_token[key] = min(1.0, by_token.get(key, 0.0) + value)
    total = math.fsum(by_token.values())
    margin = 1.0 - 2.0**-40  # so that the sum stays at or below 1 in whatever order it is taken
    if total <= margin or len(by_token) == 1:
        return by_token
    return {key: value * (margin / total) for key, value in by_token.items()}


def probability(logprob: object) -> float:
    """Returns exp(logprob), or 0 for anything but a logprob (NaN, above 0, text, a boolean)."""
    if isinstance(logprob, bool) or not isinstance(logprob, int | float) or not logprob <= _ROUNDING:
        return 0.0
    return math.exp(min(0.0, max(logprob, -1e4)))


def token_key(entry: object, *, eos_texts: frozenset[str] = EOS_TEXTS, spell: Spell | None = None) -> bytes | None:
    """Returns the key of a reported token: its bytes, `EOS`, or None if they are not complete UTF-8."""
    fields = entry if isinstance(entry, dict) else {}
    text = fields.get("token") if isinstance(entry, dict) else entry
    if isinstance(text, str) and text in eos_texts:
        return EOS
    number = spelled_by_id(text)
    if number is not None:  # what it reports as bytes then are those of the placeholder
        return _complete(spell(number) if spell else None, eos_texts)
    raw = _reported_bytes(fields.get("bytes"))
    if raw is None or _LOST in raw:
        known = _by_id_field(fields, spell)
        raw = known if known is not None else None if raw else _encoded(text)
    return _complete(raw, eos_texts)


def spelled_by_id(entry: object) -> int | None:
    """Returns the id of a token that is spelled as a placeholder with its id, None for any other."""
    text = entry.get("token") if isinstance(entry, dict) else entry
    match = _BY_ID.fullmatch(text) if isinstance(text, str) else None
    return int(match[1]) if match else None


def to_rows(reported: Sequence[Mapping[Any, float]], domain: Sequence[Token]) -> Rows:
    """Arranges probabilities as float64[rows, len(domain)]; an unreported token is 0."""
    rows = np.zeros((len(reported), len(domain)), dtype=np.float64)
    column = {token: j for j, token in enumerate(domain)}
    for i, row in enumerate(reported):
        smaller = row if len(row) < len(column) else column
        for token in smaller:
            if token in row and token in column:
                rows[i, column[token]] = row[token]
    return rows


def _listed(values: object, limit: int) -> Sequence[Any]:
    return values[:limit] if isinstance(values, list | tuple) else ()


def _entries(top: object, most: int) -> list[Entry]:
    if isinstance(top, dict):
        return list(islice(top.items(), most))
    if isinstance(top, list | tuple):
        return [(entry, entry.get("logprob")) for entry in top[:most] if isinstance(entry, dict)]
    return []


def _complete(raw: bytes | None, eos_texts: frozenset[str]) -> bytes | None:
    try:
        return None if raw is None else EOS if raw.decode("utf-8") in eos_texts else raw
    except UnicodeError:
        return None


def _encoded(text: object) -> bytes | None:
    if not isinstance(text, str) or len(text) > _MAX_TOKEN_BYTES or _UNREADABLE.search(text):
        return None
    try:
        return text.encode("utf-8")
    except UnicodeError:
        return None


def _by_id_field(fields: Mapping[str, object], spell: Spell | None) -> bytes | None:
    number = fields.get("id", fields.get("token_id"))
    return spell(number) if spell and isinstance(number, int) and not isinstance(number, bool) else None


def _reported_bytes(values: object) -> bytes | None:
    """Returns the reported bytes, or None if the provider gave none (the text is used then)."""
    if isinstance(values, bytes):
        return values[:_MAX_TOKEN_BYTES]
    if not isinstance(values, list | tuple) or len(values) > _MAX_TOKEN_BYTES:
        return None
    whole = all(isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 256 for value in values)
    return bytes(values) if whole else None
