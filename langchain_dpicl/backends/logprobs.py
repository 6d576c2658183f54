"""Provider payloads to probabilities, as pure total functions. Knows no model, no network and no privacy.

Whatever a provider returned, the answer is a mapping from token bytes to numbers in [0, 1] that sum to at most 1:
no payload raises, so no payload can make one row end differently from another.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, TypeAlias

import numpy as np

from langchain_dpicl.backends.base import Rows, Token

Probabilities: TypeAlias = dict[bytes, float]
"""Next-token probabilities by token bytes: values in [0, 1], sum <= 1."""

EOS = b""
"""The end of the text. A token without any bytes ends it too: nothing can be read after it."""

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
_UNREADABLE = re.compile(r"\ufffd|^bytes:\\x|^token_id:\d+$")  # placeholders for bytes that the text cannot show


def next_token(
    payload: object, *, text: object = None, finish_reason: object = None, eos_texts: Iterable[str] = EOS_TEXTS
) -> Probabilities:
    """Reads one answer: the probabilities of its first token, or certainty of the end where it ended at once.

    Args:
      payload: the provider's `logprobs` value, in any of the shapes of `first_position`, or anything else.
      text: the generated text.
      finish_reason: why generation stopped; a content filter makes the answer unreadable.
      eos_texts: spellings of the end of a text.
    """
    if finish_reason == "content_filter":
        return {}
    entries = first_position(payload)
    if entries:
        return probabilities(entries, eos_texts=eos_texts)
    ended = isinstance(finish_reason, str) and finish_reason in FINISHED
    return {EOS: 1.0} if ended and text == "" else {}


def first_position(payload: object) -> list[tuple[object, object]]:
    """Returns (token entry, logprob) pairs reported for the first generated token; empty if unreadable.

    Three shapes are in use: `{"content": [{"top_logprobs": [entry, ...]}, ...]}` (chat, and completions of llama.cpp),
    and `{"top_logprobs": [{text: logprob, ...}, ...]}` (completions of OpenAI, vLLM and llama-cpp-python).
    """
    if not isinstance(payload, dict):
        return []
    content = _first(payload.get("content"))
    top = content.get("top_logprobs") if isinstance(content, dict) else _first(payload.get("top_logprobs"))
    if isinstance(top, dict):
        return list(islice(top.items(), MAX_ENTRIES))
    if isinstance(top, list | tuple):
        return [(entry, entry.get("logprob")) for entry in top[:MAX_ENTRIES] if isinstance(entry, dict)]
    return []


def probabilities(entries: Iterable[tuple[object, object]], *, eos_texts: Iterable[str] = EOS_TEXTS) -> Probabilities:
    """Turns (token entry, logprob) pairs into probabilities; what cannot be read is left out.

    Several tokens with the same bytes (control tokens, byte fallbacks) add up; a sum above 1 is scaled back to 1.
    """
    ends = frozenset(eos_texts)
    found: Probabilities = {}
    for entry, logprob in entries:
        value, key = probability(logprob), token_key(entry, eos_texts=ends)
        if key is not None and value > 0.0:
            found[key] = min(1.0, found.get(key, 0.0) + value)
    total = math.fsum(found.values())
    if total <= 1.0:
        return found
    scale = (1.0 - 2.0**-40) / total  # the margin keeps a sum in any order at or below 1
    return {key: value * scale for key, value in found.items()}


def probability(logprob: object) -> float:
    """Returns exp(logprob), or 0 for anything that is no logprob (NaN, above 0, text, a boolean)."""
    if isinstance(logprob, bool) or not isinstance(logprob, int | float) or not logprob <= _ROUNDING:
        return 0.0
    return math.exp(min(0.0, max(logprob, -1e4)))


def token_key(entry: object, *, eos_texts: frozenset[str] = EOS_TEXTS) -> bytes | None:
    """Returns the key of a reported token: its bytes, `EOS`, or None where they are no complete UTF-8 text."""
    text = entry.get("token") if isinstance(entry, dict) else entry
    if isinstance(text, str) and text in eos_texts:
        return EOS
    raw = _reported_bytes(entry.get("bytes")) if isinstance(entry, dict) else None
    try:
        if raw is None:
            return _encode(text) if isinstance(text, str) else None
        return EOS if raw.decode("utf-8") in eos_texts else raw
    except UnicodeError:
        return None


def to_rows(found: Sequence[Mapping[Any, float]], domain: Sequence[Token]) -> Rows:
    """Lays probabilities out as float64[len(found), len(domain)]; a token that was not reported is 0."""
    rows = np.zeros((len(found), len(domain)), dtype=np.float64)
    column = {token: j for j, token in enumerate(domain)}
    for i, row in enumerate(found):
        smaller = row if len(row) < len(column) else column
        for token in smaller:
            if token in row and token in column:
                rows[i, column[token]] = row[token]
    return rows


def _first(values: object) -> object:
    return values[0] if isinstance(values, list | tuple) and values else None


def _encode(text: str) -> bytes | None:
    unreadable = len(text) > _MAX_TOKEN_BYTES or _UNREADABLE.search(text)
    return None if unreadable else text.encode("utf-8")


def _reported_bytes(values: object) -> bytes | None:
    """Returns the reported bytes, or None where the provider gave none (the text then counts)."""
    if isinstance(values, bytes):
        return values[:_MAX_TOKEN_BYTES]
    if not isinstance(values, list | tuple) or len(values) > _MAX_TOKEN_BYTES:
        return None
    whole = all(isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 256 for value in values)
    return bytes(values) if whole else None
