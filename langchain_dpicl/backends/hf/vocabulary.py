"""The vocabulary of a local model: the candidate tokens, and the output layer that scores them."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray

from langchain_dpicl.backends.base import Token, row_coins
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
      ends: id, or ids, that end the text, the first of which is `eos`; None: the tokenizer's and the model's own.

    Raises:
      ConfigurationError: the two do not belong together, or nothing ends a text.
    """

    def __init__(self, tokens: TokenizerMaps, facts: ModelInfo, *, ends: int | Sequence[int] | None) -> None:
        size = min(facts.width, facts.reads)
        if tokens.size > size:
            raise ConfigurationError(
                f"expected a tokenizer of at most {size} tokens, which the model reads and writes, found "
                f"{tokens.size}: they do not belong together, or tokens were added; then call "
                "model.resize_token_embeddings(...)"
            )
        self.width = facts.width
        self.ends = _ends(tokens, facts, ends)
        self.eos = self.ends[0]
        allowed = (tokens.known - tokens.markers - set(self.ends)) | {self.eos}
        self.candidates: Ints = np.array(sorted(allowed), np.int64)
        self.keys: tuple[int, ...] = tuple(self.candidates.tolist())
        self.is_candidate: NDArray[np.bool_] = np.zeros(self.width, bool)
        self.is_candidate[self.candidates] = True
        self.filler = next(id_ for id_ in self.keys if id_ != self.eos)

    def ids(self, columns: Ints) -> Ints:
        """Returns the ids at places of the vocabulary."""
        columns = np.asarray(columns)
        if columns.dtype.kind not in "iu" or not ((columns >= 0) & (columns < len(self.keys))).all():
            raise ConfigurationError(f"expected columns between 0 and {len(self.keys) - 1}, found others")
        return self.candidates[columns]

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


def _ends(tokens: TokenizerMaps, facts: ModelInfo, requested: int | Sequence[int] | None) -> tuple[int, ...]:
    own = [*([] if tokens.eos is None else [tokens.eos]), *facts.ends]
    ends = None
    with suppress(TypeError, ValueError):
        ends = tuple(dict.fromkeys(map(operator.index, own if requested is None else np.ravel(requested).tolist())))
    if ends is None:
        raise ConfigurationError(
            f"expected eos_token_id as an id, or several, found {requested!r}; "
            "tokenizer.convert_tokens_to_ids(token) gives the id of a token"
        )
    if not ends:
        raise ConfigurationError(
            "expected a model that can end a text, found no end-of-sequence token in its tokenizer or configuration; "
            "pass eos_token_id=..., the id (or ids) of what it writes last, such as that of a newline"
        )
    size = min(facts.width, facts.reads)
    if not all(0 <= id_ < size for id_ in ends):
        raise ConfigurationError(
            f"expected eos_token_id between 0 and {size - 1}, found {list(ends)}; correct it in the model's config and "
            "generation_config, or pass HuggingFaceBackend(eos_token_id=...)"
        )
    return ends


class LogitReader:
    """Turns a batch's raw logits into the candidates', on their device, row by row."""

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


# The output layer is the widest of a model, and private rows are read only at the few columns that the public row left
# as candidates. So a batch keeps the layer's input, and the layer computes what is requested: the public row, private
# rows at some columns, or all. Where a public prompt shows that the layer's own answer differs from the model's in any
# bit, the model's logits are kept instead.
Kind = Literal["slots", "units"]
"""Whether the number of rows is public (a row may depend on its place) or secret (it may not)."""

_FEWEST = 16
"""Fewest columns computed; their number is a power of two, so that few shapes need a test."""
_NUM_TEST_ROWS = 2048
"""Numbers of one place that are compared before a shape is trusted."""


class OutputHead:
    """The last layer of a model; until `part` has shown that it can run alone, states are the model's logits."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._linear: torch.nn.Linear | None = None
        self._tail: Callable[[torch.Tensor], torch.Tensor] = _identity
        self._kept_apart: dict[tuple[Kind, int, int], bool] = {}

    @property
    def is_apart(self) -> bool:
        """Whether `states` returns the layer's input."""
        return self._linear is not None

    def part(self, ids: torch.Tensor) -> None:
        """Runs alone from now on if the layer's answer to PUBLIC ids int64[rows, length] is the model's."""
        linear = _plain_linear(self._model)
        if linear is None:
            return
        logits = self._model(input_ids=ids, use_cache=False).logits
        with _capture_input(linear) as heard:
            self._model(input_ids=ids, use_cache=False)
        if len(heard) != 1 or heard[0].shape[:2] != ids.shape:
            return
        for tail in _tails(self._model.config.get_text_config(decoder=True)):
            if _is_same(tail(linear(heard[0])), logits):
                self._linear, self._tail = linear, tail
                return

    def states(self, keep: int, **inputs: Any) -> torch.Tensor:
        """Runs the model; returns the layer's input float[rows, keep, size], or logits float[rows, keep, width]."""
        if self._linear is None:
            logits: torch.Tensor = self._model(**inputs).logits
            return logits[:, -keep:]
        with _capture_input(self._linear) as heard:
            self._model(**inputs)
        return heard[-1][:, -keep:]

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Returns raw logits float[rows, width] of states for one position."""
        if self._linear is None:
            return states
        return self._tail(self._linear(states[:, None]))[:, 0]  # with a position, as the model calls it

    def some(self, states: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Returns raw logits float[rows, d] of some columns."""
        if self._linear is None:
            return states.index_select(1, ids)
        weight, bias = self._linear.weight.index_select(0, ids), self._linear.bias
        logits = torch.nn.functional.linear(states, weight, None if bias is None else bias.index_select(0, ids))
        return self._tail(logits)

    def has_some(self, kind: Kind, states: torch.Tensor, count: int) -> bool:
        """Whether `count` columns are worth computing alone and keep the rows apart; public, and tried out once."""
        if self._linear is None or _is_hooked(self._linear) or not 0 < 2 * count <= self.width:
            return False
        key = (kind, len(states), count)
        if key not in self._kept_apart:
            self._kept_apart[key] = self._keeps_apart(states, count, wherever=kind == "units")
        return self._kept_apart[key]

    def _keeps_apart(self, states: torch.Tensor, count: int, *, wherever: bool) -> bool:
        """Tests a shape with made-up states: one in half of the places, beside others, several times.

        Few columns may keep their bits by luck, so the number of compared numbers is fixed.
        """
        coins = torch.Generator().manual_seed(0)  # draws public numbers
        size, half = len(states), (len(states) + 1) // 2
        ids = torch.arange(count, device=states.device) * (self.width // count)
        for _ in range(max(1, _NUM_TEST_ROWS // count)):
            made = torch.randn((5, *states.shape), generator=coins)

            def answers(number: int, made: torch.Tensor = made) -> torch.Tensor:
                is_probe = (torch.arange(size) < half) == (number % 2 == 0)
                mixed = torch.where(is_probe[:, None], made[4, :1], made[number])
                return self.some(mixed.to(states), ids)

            if not keeps_apart(answers, half, wherever=wherever):
                return False
        return True

    @property
    def width(self) -> int:
        """Columns of the layer; 0 where it is not separate."""
        return 0 if self._linear is None else len(self._linear.weight)


class LazyLogits:
    """The last states of a batch, read lazily and never shown.

    Args:
      states: of one position from `OutputHead.states`, float[size, ...].
      head: the output layer.
      reader: turns logits into the candidates'.
      kind: whether a row may depend on its place.
      publics: places of public rows, which are computed together.
    """

    def __init__(
        self,
        states: torch.Tensor,
        head: OutputHead,
        reader: LogitReader,
        *,
        kind: Kind,
        publics: Sequence[int] = (),
    ) -> None:
        self._states = states
        self._head = head
        self._reader = reader
        self._kind = kind
        self._settled: torch.Tensor | None = None
        self._publics = list(publics)
        self._public_rows: torch.Tensor | None = None

    @property
    def device(self) -> torch.device:
        """The device of the states."""
        return self._states.device

    def to(self, device: torch.device | str) -> LazyLogits:
        """Returns the states on a device."""
        return self if self.device == torch.device(device) else self._with(self._states.to(device))

    def only(self, places: list[int]) -> LazyLogits:
        """Returns some of the rows."""
        return self._with(self._states[places])

    def spread(self, size: int) -> LazyLogits:
        """Returns one row in all of `size` places: rows are read at the shape of their batch."""
        return self._with(self._states.expand(size, -1).contiguous())

    def settled(self) -> torch.Tensor:
        """Returns float32[size, width]: all candidates of all rows; see `LogitReader.settle`."""
        if self._settled is None:
            self._settled = self._reader.settle(self._head.logits(self._states))
        return self._settled

    def rows(self, places: slice) -> torch.Tensor:
        """Returns float32[rows, width]: all candidates of some rows, computed without the others."""
        if not self._head.is_apart:
            return self.settled()[places]
        if places.start in self._publics and places.stop == places.start + 1:
            if self._public_rows is None:
                self._public_rows = self._reader.settle(self._head.logits(self._states[self._publics]))
            place = self._publics.index(places.start)
            return self._public_rows[place : place + 1]
        return self._reader.settle(self._head.logits(self._states[places]))

    def some(self, ids: Ints) -> torch.Tensor:
        """Returns float32[size, d]: some candidates of all rows; see `LogitReader.settle_some`."""
        wanted = self._reader.with_ends(ids)
        count = num_computed_columns(len(wanted))
        if not self._head.has_some(self._kind, self._states, count):
            return self.settled().index_select(1, torch.from_numpy(ids).to(self.device))
        padded = np.concatenate([wanted, np.repeat(wanted[:1], count - len(wanted))])
        raw = self._head.some(self._states, torch.from_numpy(padded).to(self.device))
        settled = self._reader.settle_some(raw[:, : len(wanted)], ids)
        return settled.masked_fill_(~self._states.isfinite().all(dim=1, keepdim=True), torch.nan)

    def _with(self, states: torch.Tensor) -> LazyLogits:
        return LazyLogits(states, self._head, self._reader, kind=self._kind)


def num_computed_columns(count: int) -> int:
    """Returns the columns that are computed where `count` are wanted."""
    return 0 if count == 0 else max(_FEWEST, 1 << (count - 1).bit_length())


def keeps_apart(answers: Callable[[int], torch.Tensor], half: int, *, wherever: bool) -> bool:
    """Whether a row keeps its bits whatever its neighbours are, and, if asked, wherever it stands.

    Args:
      answers: by number: rows, of which the same one stands in the first half of the places (even numbers) or in the
        others, each time beside other rows.
      half: how many places the first half has.
      wherever: whether its place must not matter either.
    """
    first, second = answers(0), answers(1)
    if bool((first[:half] == first[:1]).all() and (second[half:] == first[:1]).all()):
        return True
    if wherever:
        return False
    again = answers(2), answers(3)
    return bool(torch.equal(first[:half], again[0][:half]) and torch.equal(second[half:], again[1][half:]))


@contextmanager
def _capture_input(linear: torch.nn.Linear) -> Iterator[list[torch.Tensor]]:
    """Captures the layer's input in this thread, and lets the layer run on no position."""
    heard: list[torch.Tensor] = []
    own = threading.get_ident()

    def take(module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        del module
        if threading.get_ident() != own:  # the model may be used elsewhere too
            return None
        heard.append(args[0])
        return (args[0][:, :0], *args[1:])

    handle = linear.register_forward_pre_hook(take)
    try:
        yield heard
    finally:
        handle.remove()


def _plain_linear(model: Any) -> torch.nn.Linear | None:
    """Returns the output layer if it is one plain matrix on the model's device, called without hooks or wrappers."""
    linear = model.get_output_embeddings()
    if type(linear) is not torch.nn.Linear or is_wrapped(model) or is_wrapped(linear):
        return None
    is_plain = type(linear.weight.data) is torch.Tensor and linear.weight.device == model.device
    return linear if is_plain and not _is_hooked(linear) else None


def _is_hooked(linear: torch.nn.Linear) -> bool:
    """Whether hooks run before or after the layer, such as a norm of its weights."""
    return bool(linear._forward_pre_hooks or linear._forward_hooks)  # noqa: SLF001


def is_wrapped(module: Any) -> bool:
    """Whether a module's call is wrapped: compiled, spread over devices, or changed by a library's hooks."""
    is_compiled = hasattr(module, "_orig_mod") or module._compiled_call_impl is not None  # noqa: SLF001
    return bool(is_compiled or "forward" in vars(module))


def _tails(config: Any) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """Yields functions that models apply to their logits, according to their configuration."""
    yield _identity
    if cap := getattr(config, "final_logit_softcapping", None):
        yield lambda logits: torch.tanh(logits / cap) * cap
    if scale := getattr(config, "logit_scale", None):
        yield lambda logits: logits * scale
    if divisor := getattr(config, "logits_scaling", None):
        yield lambda logits: logits / divisor


def _identity(logits: torch.Tensor) -> torch.Tensor:
    return logits


def _is_same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return bool(torch.equal(left.float(), right.float()))


class SamplingOptions:
    """How a next token is drawn.

    Args:
      temperature: 0 takes the likeliest token.
      top_k: only this many likeliest tokens; None: all.
      top_p: only the likeliest tokens that together have this probability.
      rng: source of the sampling, which protects nobody; one for all rows, or for each.
    """

    def __init__(
        self, temperature: float, top_k: int | None, top_p: float, rng: Generator | Sequence[Generator]
    ) -> None:
        if not temperature >= 0:
            raise ConfigurationError(f"expected temperature >= 0, found temperature={temperature}")
        if top_k is not None and top_k < 1:
            raise ConfigurationError(f"expected top_k >= 1 or None, found top_k={top_k}")
        if not 0 < top_p <= 1:
            raise ConfigurationError(f"expected 0 < top_p <= 1, found top_p={top_p}")
        self.temperature = temperature
        self._top_k = top_k
        self._top_p = top_p
        self._rng = rng

    def choose(self, rows: Floats) -> Ints:
        """Returns one column of each row of probabilities."""
        if self.temperature == 0:
            return np.asarray(rows.argmax(axis=1))
        with np.errstate(divide="ignore", invalid="ignore"):
            weights = np.exp((np.log(rows) - np.log(rows.max(axis=1, keepdims=True))) / self.temperature)
        levels = np.cumsum(self._kept(np.nan_to_num(weights)), axis=1)
        coins = row_coins(self._rng, len(rows)) * levels[:, -1:]
        return np.asarray(np.minimum((levels <= coins).sum(axis=1), rows.shape[1] - 1))

    def _kept(self, weights: Floats) -> Floats:
        if self._top_k is None and self._top_p == 1:
            return weights
        order = np.argsort(-weights, axis=1, kind="stable")
        ranked = np.take_along_axis(weights, order, axis=1)
        before = np.cumsum(ranked, axis=1) - ranked
        is_kept = before < self._top_p * ranked.sum(axis=1, keepdims=True)
        if self._top_k is not None:
            is_kept[:, self._top_k :] = False
        out = np.zeros_like(weights)
        np.put_along_axis(out, order, np.where(is_kept, ranked, 0.0), axis=1)
        return out


def likeliest(settled: torch.Tensor, vocabulary: Vocabulary) -> Ints:
    """Returns the likeliest token of each row; the end of the text for a row that failed."""
    failed = settled.amax(dim=1).isnan()
    chosen: Ints = settled.argmax(dim=1).masked_fill(failed, vocabulary.eos).cpu().numpy()
    return chosen


def draw_tokens(rows: Floats, taste: SamplingOptions, vocabulary: Vocabulary) -> Ints:
    """Returns a token id per row of probabilities; the end of the text for a row that failed."""
    return np.where(rows.any(axis=1), taste.choose(rows), vocabulary.eos)


def shares(settled: torch.Tensor, vocabulary: Vocabulary) -> Floats:
    """Returns float64[rows, ids]: probabilities by id; 0 for other ids than candidates, and in a failed row."""
    out = np.zeros((settled.shape[0], vocabulary.width))
    out[:, vocabulary.candidates] = probabilities(settled, vocabulary.candidates)
    return out
