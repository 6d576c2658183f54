"""A key-value cache that is written in place, with room to grow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

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
    """Some rows of a batch that are read separately.

    Attributes:
      rows: which.
      size: rows of the batch.
      note: called with each layer that has been written.
    """

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
