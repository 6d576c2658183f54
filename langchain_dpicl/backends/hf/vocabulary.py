"""Reads a local model's tokenizer, selects the candidate tokens, and turns raw logits into theirs."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from langchain_dpicl.backends.base import Token
from langchain_dpicl.backends.hf.loading import ModelInfo
from langchain_dpicl.backends.hf.tokens import TokenizerMaps
from langchain_dpicl.exceptions import ConfigurationError

# Encoded text is always plain text: special tokens in it are broken up, so that no record can end its message or
# imitate another role. The encoder is a copy: neither the library's warnings about long texts, which would reveal a
# prompt's length, nor settings of the caller's tokenizer play a part.

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
