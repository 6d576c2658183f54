"""Runs token rows of a local model in batches of one public shape, with a cache that is written in place."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from langchain_dpicl.backends.hf.loading import ModelInfo
from langchain_dpicl.backends.hf.model_checks import Hooks
from langchain_dpicl.backends.hf.vocabulary import OutputHead, is_wrapped

Pair = tuple[torch.Tensor, torch.Tensor]


if TYPE_CHECKING:

    class _Layer:
        """What is used of the library's layer, whose methods are untyped."""

        is_initialized: bool
        keys: torch.Tensor | None
        values: torch.Tensor | None
        dtype: torch.dtype
        device: torch.device

else:
    _Layer = DynamicLayer


class FilledCache(Exception):  # noqa: N818  no error
    """All layers are written; the rest of the forward is not needed."""


@dataclass(frozen=True, slots=True)
class CacheSlice:
    """Some rows of a batch that are read separately."""

    rows: slice
    size: int
    note: Callable[[RoomyLayer], None]


class RoomyLayer(_Layer):
    """One layer's keys and values, in one block of memory as long as the session needs.

    The library's own layer copies the whole cache for every token, and attention over its static one always covers
    the full length. This one does neither.

    Args:
      room: positions to allocate; doubled when they run out.
      begun: keys and values [1, heads, length, size] that all rows begin with.
    """

    def __init__(self, room: int, begun: Pair | None = None) -> None:
        super().__init__()
        self._room = room
        self._begun = begun
        self.part: CacheSlice | None = None
        self._key_store = self._value_store = torch.empty(0)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes new positions; returns all of them."""
        del args, kwargs
        part = self.part
        if not self.is_initialized:
            self._begin(key_states, value_states, size=part.size if part else len(key_states))
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        if end > self._key_store.shape[-2]:
            self._grow(end)
        rows = part.rows if part else slice(None)
        self._key_store[rows, :, start:end] = key_states
        self._value_store[rows, :, start:end] = value_states
        if part:
            part.note(self)
        else:
            self.rewind(end)
        return (
            (self._key_store[rows, :, :end], self._value_store[rows, :, :end]) if start else (key_states, value_states)
        )

    def get_seq_length(self, *args: Any) -> int:
        """Returns the number of positions written."""
        del args
        if self.is_initialized and self.keys is not None:
            return int(self.keys.shape[-2])
        return 0 if self._begun is None else int(self._begun[0].shape[-2])

    def rewind(self, length: int) -> None:
        """Forgets positions from `length` on, or includes those up to it that were written in parts."""
        if self.is_initialized:
            self.keys, self.values = self._key_store[:, :, :length], self._value_store[:, :, :length]

    def moved(self, device: torch.device | str) -> bool:
        """Moves the written part, bit for bit; False if it is there already, so that nothing is freed."""
        if not self.is_initialized or self._key_store.device == torch.device(device):
            return False
        length = self.get_seq_length()
        self._key_store, self._value_store = self._key_store.to(device), self._value_store.to(device)
        self.rewind(length)
        return True

    def written(self) -> Pair:
        """Returns the keys and values of all positions."""
        length = self.get_seq_length()
        return self._key_store[:, :, :length], self._value_store[:, :, :length]

    def _begin(self, key_states: torch.Tensor, value_states: torch.Tensor, *, size: int) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        length = self.get_seq_length()
        room = max(self._room, length + key_states.shape[-2])
        self._key_store, self._value_store = _roomy(key_states, size, room), _roomy(value_states, size, room)
        if self._begun is not None:
            self._key_store[:, :, :length], self._value_store[:, :, :length] = self._begun
            self._begun = None
        self.is_initialized = True
        self.rewind(length)

    def _grow(self, length: int) -> None:
        room = max(length, 2 * self._key_store.shape[-2])
        written = self.get_seq_length()
        keys, values = self._key_store, self._value_store
        self._key_store, self._value_store = _roomy(keys, len(keys), room), _roomy(values, len(keys), room)
        self._key_store[:, :, :written] = keys[:, :, :written]
        self._value_store[:, :, :written] = values[:, :, :written]


def _roomy(like: torch.Tensor, size: int, room: int) -> torch.Tensor:
    return like.new_empty((size, like.shape[1], room, like.shape[-1]))


@contextmanager
def reading(layers: Sequence[RoomyLayer], rows: slice, size: int, *, stops: bool) -> Iterator[None]:
    """Makes a forward in the block write some rows' keys and values; `stops`: it ends at the last layer's."""
    unwritten = {id(layer) for layer in layers}

    def note(layer: RoomyLayer) -> None:
        unwritten.discard(id(layer))
        if stops and not unwritten:
            raise FilledCache

    for layer in layers:
        layer.part = CacheSlice(rows, size, note)
    try:
        yield
    except FilledCache:
        pass
    finally:
        for layer in layers:
            layer.part = None


def is_plain(config: Any) -> bool:
    """Whether a model's cache consists of keys and values alone, sliding windows included."""
    return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in DynamicCache(config=config).layers)


def roomy_layers(config: Any, room: int, begun: Sequence[Pair] | None = None) -> list[RoomyLayer]:
    """Returns the layers for a model whose cache is plain."""
    count = len(DynamicCache(config=config).layers) or int(config.num_hidden_layers)
    return [RoomyLayer(room, begun[place] if begun else None) for place in range(count)]


def cache_of(layers: Sequence[RoomyLayer]) -> Cache:
    """Returns the cache that has these layers."""
    untyped: list[Any] = [*layers]
    return Cache(layers=untyped)


def own_cache(config: Any) -> Cache:
    """Returns the library's own cache for a model."""
    return DynamicCache(config=config)


# Rows are padded to one length, and every row is computed whatever it holds, so that the shape of the work never
# depends on its content. Two layouts:
# - `RightBatch`, fast: rows start at the left, and causal attention never looks at the padding behind them. The mask is
# one row of numbers that grows by a zero per token; a shared beginning is read once. A forward ends at the last keys
# and values, and on a CPU takes some rows at a time, so that intermediate results stay in cache.
# - `LeftBatch`, for models that need adjacent tokens (narrow sliding windows, recurrent layers) or make their own
# masks. Its first column is always padding: without any, models take a short cut that depends on other rows' lengths.
KEEPS = ("logits_to_keep", "num_logits_to_keep")
"""Names of the forward's argument for how many last positions get logits, by version of transformers."""

_AT_ONCE = 2560
"""Tokens that a CPU reads at once, rounded to whole rows."""


@dataclass(frozen=True, slots=True)
class BatchShape:
    """The public shape of a batch.

    Attributes:
      size: rows.
      length: tokens that every row is padded to, shared ones included.
      room: tokens to come.
      shared: ids that all rows begin with, read once; not part of the rows that are passed.
      is_fast: whether the fast layout is used.
    """

    size: int
    length: int
    room: int
    shared: tuple[int, ...] = ()
    is_fast: bool = False


class GrowingBatch(Protocol):
    """Rows that grow; answers are states float[rows, size] or, for `many`, float[rows, k, size]."""

    def start(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """Reads the rows."""

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Adds one token to every row: int64[rows]."""

    def many(self, tokens: torch.Tensor) -> torch.Tensor:
        """Adds several tokens to every row at once: int64[rows, k]."""

    def mark(self) -> Any:
        """Returns the present state."""

    def rewind(self, mark: Any) -> None:
        """Goes back to a state, as often as wanted."""

    def moved(self, device: torch.device | str) -> bool:
        """Moves the cache, bit for bit; False if it stays where it is."""


class ModelBody:
    """A model and how its forward is called.

    Attributes:
      hooks: checks the model's hooks before private rows run.
      head: the output layer.
      stops: whether a model that only fills a cache may be stopped when that is done.
    """

    def __init__(self, model: Any, facts: ModelInfo, *, filler: int) -> None:
        self.model = model
        self.hooks = Hooks(model)
        self.head = OutputHead(model)
        # A wrapper around a module's call may have work to do after it.
        self.stops = not any(is_wrapped(module) for module in model.modules())
        self.facts = facts
        self.filler = filler
        self.config = model.config.get_text_config(decoder=True)
        self.takes_positions = "position_ids" in facts.takes
        self._keep = next((name for name in KEEPS if name in facts.takes), None)
        self._begun: dict[tuple[int, ...], list[Pair]] = {}

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return torch.device(self.model.device)

    @property
    def lowest(self) -> float:
        """The number that a mask adds to hidden positions."""
        return float(torch.finfo(self.model.dtype).min)

    def forward(self, ids: torch.Tensor, cache: Any, *, keep: int = 1, **inputs: torch.Tensor | None) -> torch.Tensor:
        """Returns the states float[rows, keep, size] of the last `keep` positions."""
        if self.model.training:
            self.model.eval()
        arguments: dict[str, Any] = {name: value for name, value in inputs.items() if value is not None}
        if self._keep:
            arguments[self._keep] = keep
        arguments |= {"input_ids": ids, self.facts.cache: cache, "use_cache": True, "return_dict": True}
        return self.head.states(keep, **arguments)

    def fill(
        self,
        ids: torch.Tensor,
        layers: Sequence[RoomyLayer],
        *,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> None:
        """Writes the keys and values of int64[rows, length], which share attention mask and positions."""
        size, length = ids.shape
        cache = cache_of(layers)
        start = layers[0].get_seq_length()
        for rows in _parts(size, length) if ids.device.type == "cpu" else [slice(0, size)]:
            with reading(layers, rows, size, stops=self.stops):
                self.forward(ids[rows], cache, attention_mask=attention_mask, position_ids=position_ids)
        for layer in layers:
            layer.rewind(start + length)

    def begun(self, shared: tuple[int, ...]) -> list[Pair]:
        """Returns the keys and values of a PUBLIC beginning for one row; the last two beginnings are cached."""
        if shared not in self._begun:
            layers = roomy_layers(self.config, len(shared))
            self.fill(torch.tensor([shared], device=self.device), layers)
            while len(self._begun) > 1:
                del self._begun[next(iter(self._begun))]
            self._begun[shared] = [layer.written() for layer in layers]
        return self._begun[shared]

    def forget(self) -> None:
        """Drops the cached public beginnings."""
        self._begun.clear()


class RightBatch:
    """Rows at the left, padding after them."""

    def __init__(self, body: ModelBody, shape: BatchShape) -> None:
        self._body = body
        self._shape = shape
        begun = body.begun(shape.shared) if shape.shared else None
        room = shape.length + shape.room
        self._layers = roomy_layers(body.config, room, begun)
        self._cache = cache_of(self._layers)
        self._mask = torch.zeros((shape.size, 1, 1, room), dtype=body.model.dtype, device=body.device)
        self._positions = torch.zeros((shape.size, 1), dtype=torch.int64, device=body.device)
        self._used = len(shape.shared)

    def start(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """Reads the rows: all but each row's last token at once, the last tokens as a step."""
        shape, device = self._shape, self._body.device
        begun, width = len(shape.shared), shape.length - len(shape.shared)
        ids, lengths = padded(rows, width, self._body.filler)
        last = torch.from_numpy(ids[np.arange(len(rows)), lengths - 1]).to(device)
        ends = torch.from_numpy(lengths).to(device)[:, None] - 1
        if width > 1:
            body = torch.from_numpy(ids[:, :-1]).to(device)
            places = torch.arange(begun, begun + width - 1, device=device)[None]  # the same for all rows
            mask = self._after_shared(width - 1) if begun else None
            self._body.fill(body, self._layers, attention_mask=mask, position_ids=places)
            hidden = torch.arange(width - 1, device=device)[None] >= ends
            self._mask[:, 0, 0, begun : begun + width - 1].masked_fill_(hidden, self._body.lowest)
        self._used = begun + width - 1
        self._positions = begun + ends
        return self.step(last)

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Adds one token to every row."""
        self._reserve(1)
        raw = self._body.forward(
            tokens[:, None],
            self._cache,
            attention_mask=self._mask[..., : self._used + 1],
            position_ids=self._positions,
        )
        self._used += 1
        self._positions = self._positions + 1
        return raw[:, -1]

    def many(self, tokens: torch.Tensor) -> torch.Tensor:
        """Adds several tokens to every row."""
        count, device = tokens.shape[1], self._body.device
        self._reserve(count)
        end = self._used + count
        mask = self._mask[..., :end].repeat(1, 1, count, 1)
        mask[..., self._used :].masked_fill_(ahead(count, device), self._body.lowest)
        raw = self._body.forward(
            tokens,
            self._cache,
            keep=count,
            attention_mask=mask,
            position_ids=self._positions + torch.arange(count, device=device),
        )
        self._used = end
        self._positions = self._positions + count
        return raw

    def mark(self) -> Any:
        """Returns the present state."""
        return self._used, self._positions

    def rewind(self, mark: Any) -> None:
        """Goes back to a state."""
        self._used, self._positions = mark
        for layer in self._layers:
            layer.rewind(self._used)

    def moved(self, device: torch.device | str) -> bool:
        """Moves the cache."""
        moved = [layer.moved(device) for layer in self._layers]
        return all(moved)

    def _after_shared(self, count: int) -> torch.Tensor:
        """Returns a mask for all rows: the shared beginning and earlier tokens are visible."""
        begun, device = len(self._shape.shared), self._body.device
        mask = torch.zeros((1, 1, count, begun + count), dtype=self._mask.dtype, device=device)
        mask[..., begun:].masked_fill_(ahead(count, device), self._body.lowest)
        return mask

    def _reserve(self, count: int) -> None:
        """Makes the mask longer if more tokens come than planned."""
        missing = self._used + count - self._mask.shape[-1]
        if missing > 0:
            self._mask = torch.nn.functional.pad(self._mask, (0, max(missing, self._mask.shape[-1])))


class LeftBatch:
    """Padding first, rows after it; a shared beginning is read with every row."""

    def __init__(self, body: ModelBody, shape: BatchShape) -> None:
        self._body = body
        self._shape = shape
        self._cache = own_cache(body.config)
        self._mask = torch.zeros((shape.size, 0), dtype=torch.int64, device=body.device)
        self._positions = torch.zeros((shape.size, 1), dtype=torch.int64, device=body.device)

    def start(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """Reads the rows."""
        shape, device = self._shape, self._body.device
        whole = [[*shape.shared, *row] for row in rows]
        ids, lengths = padded([row[::-1] for row in whole], shape.length + 1, self._body.filler)
        real = np.arange(shape.length + 1)[None] < lengths[:, None]
        self._mask = torch.from_numpy(np.ascontiguousarray(real[:, ::-1])).to(device).to(torch.int64)
        places = (self._mask.cumsum(dim=1) - 1).clamp_(min=0)
        self._positions = places[:, -1:] + 1
        return self._run(torch.from_numpy(np.ascontiguousarray(ids[:, ::-1])).to(device), places, 1)[:, -1]

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Adds one token to every row."""
        return self._add(tokens[:, None])[:, -1]

    def many(self, tokens: torch.Tensor) -> torch.Tensor:
        """Adds several tokens to every row."""
        return self._add(tokens)

    def mark(self) -> Any:
        """Returns a copy of the present state."""
        return copy.deepcopy(self._cache), self._mask, self._positions

    def rewind(self, mark: Any) -> None:
        """Goes back to a state."""
        cache, self._mask, self._positions = mark
        self._cache = copy.deepcopy(cache)

    def moved(self, device: torch.device | str) -> bool:
        """Leaves the cache where it is: its layers are the library's."""
        del device
        return False

    def _add(self, ids: torch.Tensor) -> torch.Tensor:
        count = ids.shape[1]
        self._mask = torch.nn.functional.pad(self._mask, (0, count), value=1)
        places = self._positions + torch.arange(count, device=ids.device)
        self._positions = self._positions + count
        return self._run(ids, places, count)

    def _run(self, ids: torch.Tensor, places: torch.Tensor, keep: int) -> torch.Tensor:
        positions = places if self._body.takes_positions else None
        return self._body.forward(ids, self._cache, keep=keep, attention_mask=self._mask, position_ids=positions)


def _parts(size: int, length: int) -> list[slice]:
    """Cuts rows into parts of one size, overlapping at the end: the shape decides the bits."""
    rows = -(-size // -(-size * length // _AT_ONCE))
    return [slice(start := min(place, size - rows), start + rows) for place in range(0, size, rows)]


def padded(rows: Sequence[Sequence[int]], width: int, filler: int) -> tuple[Any, Any]:
    """Returns int64[rows, width], and each row's length."""
    ids = np.full((len(rows), width), filler, np.int64)
    for place, row in enumerate(rows):
        ids[place, : len(row)] = row
    return ids, np.array([len(row) for row in rows], np.int64)


def ahead(count: int, device: torch.device) -> torch.Tensor:
    """Returns bool[count, count]: the positions after each position."""
    return torch.ones((count, count), dtype=torch.bool, device=device).triu_(1)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    message = str(error).lower() if isinstance(error, RuntimeError) else ""
    return "out of memory" in message or "can't allocate memory" in message or "not enough memory" in message


def kind_of(error: BaseException) -> str:
    """Returns the public word for an error: "memory" if that ran out, otherwise its class."""
    return "memory" if is_out_of_memory(error) else type(error).__name__
