"""Selects a local model's candidate tokens, and turns raw logits into theirs."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from langchain_dpicl.backends.base import Token
from langchain_dpicl.backends.hf.loading import ModelInfo
from langchain_dpicl.backends.langchain.backend import byte_alphabet
from langchain_dpicl.exceptions import ConfigurationError

# Encoded text is always plain text: special tokens in it are broken up, so that no record can end its message or
# imitate another role. The encoder is a copy: neither the library's warnings about long texts, which would reveal a
# prompt's length, nor settings of the caller's tokenizer play a part.
_ANCHORS = ("\n", "|", "a")
"""Texts put before a continuation if the tokenizer would otherwise add a space."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_CONTENT = "zqcontentqz"
"""Replaces the user's message while the chat template is split."""


class TokenizerMaps:
    """What the engine needs of a tokenizer.

    Args:
      tokenizer: of the transformers package.
      chat: whether prompts are messages of a user; None: if there is a chat template.

    Raises:
      ConfigurationError: the chat template is missing or cannot be taken apart.
    """

    def __init__(self, tokenizer: Any, *, chat: bool | None) -> None:
        self._tokenizer = tokenizer
        self._ids = _encoder(tokenizer)
        self.size = max(tokenizer.get_vocab().values()) + 1
        added = {id_: str(token) for id_, token in tokenizer.added_tokens_decoder.items()}
        template = tokenizer.chat_template if isinstance(getattr(tokenizer, "chat_template", None), str) else ""
        template = template or str(getattr(tokenizer, "chat_template", None) or "")
        special = {id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.special = frozenset(special | set(tokenizer.all_special_ids))
        self.markers = self.special | {id_ for id_, text in added.items() if text and text in template}
        self._added = added
        texts = sorted({text for text in added.values() if len(text) > 1}, key=len, reverse=True)
        self._marker = re.compile("|".join(map(re.escape, texts))) if texts else None
        self.eos: int | None = tokenizer.eos_token_id
        self.chat = bool(template) if chat is None else chat
        if self.chat and not template:
            raise ConfigurationError("expected a tokenizer with a chat template for chat=True; pass chat=False")
        self.header, self.footer = self._frame()

    @functools.cached_property
    def fingerprint(self) -> str:
        """A public hash of the tokenizer: equal for equal vocabularies."""
        entries = sorted(self._tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
        vocabulary = json.dumps([entries, sorted(self.special)], ensure_ascii=True)
        return hashlib.sha256(vocabulary.encode()).hexdigest()[:16]

    @functools.cached_property
    def token_bytes(self) -> tuple[bytes, ...]:
        """The bytes that each id adds to a text; special tokens and ids without a token add none."""
        names: list[str | None] = [None] * self.size
        for name, id_ in self._tokenizer.get_vocab().items():
            names[id_] = name
        spell = _speller(self._tokenizer)
        return tuple([self._bytes_of(id_, name, spell) for id_, name in enumerate(names)])

    def _bytes_of(self, id_: int, name: str | None, spell: Callable[[str], bytes]) -> bytes:
        if name is None or id_ in self.special:
            return b""
        return self._added[id_].encode() if id_ in self._added else spell(name)

    @property
    def known(self) -> frozenset[int]:
        """The ids that have a token."""
        return frozenset(self._tokenizer.get_vocab().values())

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a plain text."""
        ids: list[int] = []
        for piece in self._plain(text):
            ids += self._ids(piece, False)
        return [id_ for id_ in ids if id_ not in self.markers]

    def continued(self, text: str) -> list[int]:
        """Returns the ids of a text that follows other text: no space is added before it."""
        if not self._begins_with_space:
            return self.encode(text)
        for anchor in _ANCHORS:
            alone, both = self.encode(anchor), self.encode(anchor + text)
            if both[: len(alone)] == alone:
                return both[len(alone) :]
        return self.encode(text)

    def count(self, text: str) -> int:
        """Returns the number of tokens of a text."""
        return len(self.encode(text))

    @functools.cached_property
    def _begins_with_space(self) -> bool:
        return b"".join(self.token_bytes[id_] for id_ in self.encode("a")) != b"a"

    def _plain(self, text: str) -> Iterator[str]:
        """Yields a text in pieces without special tokens; broken characters are replaced."""
        text = text.encode("utf-8", "replace").decode("utf-8")
        begin = 0
        if self._marker is not None:
            for marker in self._marker.finditer(text):
                yield text[begin : marker.start() + 1]
                begin = marker.start() + 1
        yield text[begin:]

    def _frame(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the ids before and after every prompt."""
        if not self.chat:
            plain, marked = self._ids("a", False), self._ids("a", True)
            before = next((i for i in range(len(marked)) if marked[i : i + len(plain)] == plain), 0)
            return tuple(marked[:before]), ()
        messages = [{"role": "user", "content": _CONTENT}]
        shown = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        pieces = str(shown).split(_CONTENT)
        if len(pieces) != 2:
            raise ConfigurationError(
                f"expected a chat template that shows the user's message once, found it {len(pieces) - 1} times; "
                "pass chat=False, or a tokenizer with another template"
            )
        return tuple(self._ids(pieces[0], False)), tuple(self._ids(pieces[1], False))

    @functools.cached_property
    def answers_after_space(self) -> bool:
        """Whether the chat template ends with white space before the answer."""
        messages = [{"role": "user", "content": _CONTENT}]
        shown = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return str(shown)[-1:].isspace()


def _encoder(tokenizer: Any) -> Callable[[str, bool], list[int]]:
    """Returns what encodes a text, with or without the special tokens around every text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return lambda text, framed: (
            list(tokenizer.encode(text, add_special_tokens=framed, verbose=False)) if text else []
        )
    own = copy.deepcopy(backend)
    own.no_truncation()
    own.no_padding()
    return lambda text, framed: list(own.encode(text, add_special_tokens=framed).ids) if text else []


def _speller(tokenizer: Any) -> Callable[[str], bytes]:
    """Returns the function from a token's name to its bytes."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoders = json.loads(backend.to_str()).get("decoder") if backend is not None else None
    kinds = {one.get("type") for one in _flat(decoders)}
    if "ByteLevel" in kinds or hasattr(tokenizer, "byte_decoder"):
        return _bytes_of_letters
    return _bytes_of_piece


def _flat(decoder: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    if decoder:
        yield decoder
        for inner in decoder.get("decoders", ()):
            yield from _flat(inner)


def _bytes_of_letters(name: str) -> bytes:
    letters = byte_alphabet()
    return bytes(letters[letter] for letter in name) if all(map(letters.__contains__, name)) else name.encode()


def _bytes_of_piece(name: str) -> bytes:
    if byte := _BYTE_TOKEN.fullmatch(name):
        return bytes([int(byte[1], 16)])
    return name.replace("\u2581", " ").encode("utf-8", "replace")


Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_SHAVED = 1.0 - 2.0**-40
"""Keeps a rounded sum of probabilities at or below 1."""


class Vocabulary:
    """The candidates: ordinary tokens, and one end of the text that stands for all of the model's ends.

    Special tokens (start, padding, chat markers) and ids of the model that the tokenizer does not know cannot follow.

    Args:
      tokens: the tokenizer's maps.
      facts: the model's.
      ends: ids that end the text, the first of which is `eos`; None: the tokenizer's and the model's own.

    Raises:
      ConfigurationError: the two do not belong together, or nothing ends a text.
    """

    def __init__(self, tokens: TokenizerMaps, facts: ModelInfo, *, ends: Sequence[int] | None) -> None:
        size = min(facts.width, facts.reads)
        if tokens.size > size:
            raise ConfigurationError(
                f"expected a tokenizer of at most {size} tokens, which the model reads and writes, found "
                f"{tokens.size}: they do not belong together, or tokens were added; then call "
                "model.resize_token_embeddings(...)"
            )
        self._tokens = tokens
        self.width = facts.width
        self.ends = _ends(tokens, facts, ends)
        self.eos = self.ends[0]
        allowed = (tokens.known - tokens.markers - set(self.ends)) | {self.eos}
        self.candidates: Ints = np.array(sorted(allowed), np.int64)
        self.keys: tuple[int, ...] = tuple(self.candidates.tolist())
        self.is_candidate: NDArray[np.bool_] = np.zeros(self.width, bool)
        self.is_candidate[self.candidates] = True
        self.filler = next(id_ for id_ in self.keys if id_ != self.eos)

    @functools.cached_property
    def readable(self) -> NDArray[np.bool_]:
        """bool[candidates]: tokens of whole characters, and the end of the text."""
        spelled = self._tokens.token_bytes
        return np.array([id_ == self.eos or _is_text(spelled[id_]) for id_ in self.keys])

    def ids(self, columns: Ints) -> Ints:
        """Returns the ids at places of the vocabulary."""
        columns = np.asarray(columns)
        if columns.dtype.kind not in "iu" or not ((columns >= 0) & (columns < len(self.keys))).all():
            raise ConfigurationError(f"expected columns between 0 and {len(self.keys) - 1}, found others")
        ids: Ints = self.candidates[columns]
        return ids

    def known(self, domain: Sequence[Token]) -> tuple[Ints, NDArray[np.bool_]]:
        """Returns int64[d] ids, and which of them are candidates; other keys get the id of the end."""
        if domain is self.keys:
            return self.candidates, np.ones(len(self.keys), bool)
        wanted = np.array([self._place(token) for token in domain], np.int64)
        is_known = wanted >= 0
        return np.where(is_known, wanted, self.eos), is_known

    def checked(self, token: Token) -> int:
        """Returns the id of a token; refuses anything but a candidate of this model."""
        if (place := self._place(token)) < 0:
            raise ConfigurationError(
                f"expected one of the {len(self.keys)} tokens of this model's vocabulary(), found another value; "
                "tokens of another engine, and special tokens, cannot be pushed"
            )
        return place

    def _place(self, token: Token) -> int:
        if isinstance(token, int | np.integer) and 0 <= token < self.width and self.is_candidate[int(token)]:
            return int(token)
        return -1


def _ends(tokens: TokenizerMaps, facts: ModelInfo, requested: Sequence[int] | None) -> tuple[int, ...]:
    own = [*([] if tokens.eos is None else [tokens.eos]), *facts.ends]
    ends = tuple(dict.fromkeys(int(id_) for id_ in (own if requested is None else requested)))
    if not ends:
        raise ConfigurationError(
            "expected a model that can end a text, found no end-of-sequence token in its tokenizer or configuration; "
            "pass eos_token_id=..., the id (or ids) of what it writes last, such as that of a newline"
        )
    size = min(facts.width, facts.reads)
    if not all(0 <= id_ < size for id_ in ends):
        raise ConfigurationError(f"expected eos_token_id between 0 and {size - 1}, found {list(ends)}")
    return ends


def _is_text(spelled: bytes) -> bool:
    try:
        return bool(spelled.decode())
    except UnicodeDecodeError:
        return False


class LogitReader:
    """Turns a batch's raw logits into the candidates', on their device, row by row.

    Args:
      vocabulary: the candidates.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        barred = np.flatnonzero(~vocabulary.is_candidate)
        self._barred = torch.from_numpy(barred)
        self._ends = torch.tensor(vocabulary.ends) if len(vocabulary.ends) > 1 else None
        self._moved: dict[torch.device, tuple[torch.Tensor, torch.Tensor | None]] = {}

    def settle(self, raw: torch.Tensor) -> torch.Tensor:
        """Returns float32[rows, width]: -inf for other ids than candidates, all ends merged; a failed row is NaN."""
        logits = raw.to(torch.float32, copy=True)
        barred, ends = self._on(logits.device)
        if ends is not None:
            logits[:, self._vocabulary.eos] = logits.index_select(1, ends).logsumexp(dim=1)
        if len(barred):
            logits.index_fill_(1, barred, -torch.inf)
        highest = logits.amax(dim=1, keepdim=True)  # NaN where any is
        return logits.masked_fill_(~highest.isfinite(), torch.nan)

    def with_ends(self, ids: Ints) -> Ints:
        """Returns the ids whose raw logits decide those of candidates `ids`: with all end ids if the end is one."""
        vocabulary = self._vocabulary
        if self._ends is None or not (ids == vocabulary.eos).any():
            return ids
        return np.concatenate([ids, np.array(vocabulary.ends, np.int64)])

    def settle_some(self, raw: torch.Tensor, ids: Ints) -> torch.Tensor:
        """Returns float32[rows, d] as `settle` does, from the logits of `with_ends(ids)`."""
        logits = raw.to(torch.float32, copy=True)
        count = len(ids)
        if logits.shape[1] > count:
            places = torch.from_numpy(np.flatnonzero(ids == self._vocabulary.eos)).to(logits.device)
            logits[:, places] = logits[:, count:].logsumexp(dim=1, keepdim=True)
        logits = logits[:, :count]
        highest = logits.amax(dim=1, keepdim=True)  # NaN where any is
        return logits.masked_fill_(highest.isnan() | highest.isposinf(), torch.nan)

    def _on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
        if device not in self._moved:
            ends = None if self._ends is None else self._ends.to(device)
            self._moved[device] = (self._barred.to(device), ends)
        return self._moved[device]


def select_logits(settled: torch.Tensor, ids: Ints | None = None) -> Floats:
    """Returns float64[rows, d]: logits of the ids, or of all columns; a failed row is NaN."""
    chosen = settled if ids is None else settled.index_select(1, torch.from_numpy(ids).to(settled.device))
    logits: Floats = chosen.cpu().numpy().astype(np.float64)
    return logits


def probabilities(settled: torch.Tensor, ids: Ints) -> Floats:
    """Returns float64[rows, d]: probabilities of the ids among all candidates; a failed row is zeros."""
    weights = (settled - settled.amax(dim=1, keepdim=True)).exp_()
    mass = weights.sum(dim=1, keepdim=True, dtype=_widest(settled.device))
    chosen = weights.index_select(1, torch.from_numpy(ids).to(settled.device))
    shares = chosen.cpu().numpy().astype(np.float64) / mass.cpu().numpy().astype(np.float64)
    return np.asarray(np.nan_to_num(shares, nan=0.0) * _SHAVED)


def log_probabilities(settled: torch.Tensor, ids: Any) -> Floats:
    """Returns float64[rows, d]: logarithms of probabilities; a failed row is -inf."""
    with np.errstate(divide="ignore"):
        shares = select_logits(settled, ids)
    highest = settled.amax(dim=1, keepdim=True)
    mass = (settled - highest).exp_().sum(dim=1, keepdim=True, dtype=_widest(settled.device))
    normaliser = highest.cpu().numpy().astype(np.float64) + np.log(mass.cpu().numpy().astype(np.float64))
    return np.asarray(np.nan_to_num(np.minimum(shares - normaliser, 0.0), nan=-np.inf, neginf=-np.inf))


def _widest(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def distance(left: torch.Tensor, right: torch.Tensor) -> float:
    """Returns the total variation between two answers, as logits; 1 if one has no numbers."""
    difference = left.float().softmax(dim=-1) - right.float().softmax(dim=-1)
    return float(torch.nan_to_num(difference.abs().sum() / 2, nan=1.0))


def tolerance(dtype: torch.dtype) -> float:
    """Returns the distance up to which two ways to compute an answer count as the same."""
    # 0.15: what rounding to 8 or 11 bits changes in a model of many layers.
    return 1e-3 if dtype in {torch.float32, torch.float64} else 0.15
