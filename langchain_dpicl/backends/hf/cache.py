"""A key-value cache with room to grow: written in place, shared beginnings read once. Knows no tokens."""

from __future__ import annotations

from collections.abc import Sequence
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


class RoomyLayer(_Layer):
    """One layer's keys and values, in one block of memory that is as long as the session will need.

    The library's own layer copies the whole cache for every token; its static one is attended to over its whole
    length. This one does neither.

    Args:
      room: positions to make room for; doubled when they do not do.
      begun: keys and values [1, heads, length, size] that all rows begin with.
    """

    def __init__(self, room: int, begun: Pair | None = None) -> None:
        super().__init__()
        self._room = room
        self._begun = begun
        self._key_store = self._value_store = torch.empty(0)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes new positions; returns all of them."""
        del args, kwargs
        if not self.is_initialized:
            self._begin(key_states, value_states)
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        if end > self._key_store.shape[-2]:
            self._grow(end)
        self._key_store[:, :, start:end] = key_states
        self._value_store[:, :, start:end] = value_states
        self.keys, self.values = self._key_store[:, :, :end], self._value_store[:, :, :end]
        return (self.keys, self.values) if start else (key_states, value_states)

    def get_seq_length(self, *args: Any) -> int:
        """Returns the number of positions written."""
        del args
        if self.is_initialized and self.keys is not None:
            return int(self.keys.shape[-2])
        return 0 if self._begun is None else int(self._begun[0].shape[-2])

    def rewind(self, length: int) -> None:
        """Forgets all positions from `length` on."""
        if self.is_initialized:
            self.keys, self.values = self._key_store[:, :, :length], self._value_store[:, :, :length]

    def moved(self, device: torch.device | str) -> bool:
        """Moves what is written, bit for bit; False if it is there already, and nothing is freed."""
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

    def _begin(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        length = self.get_seq_length()
        room = max(self._room, length + key_states.shape[-2])
        self._key_store, self._value_store = _roomy(key_states, room), _roomy(value_states, room)
        if self._begun is not None:
            self._key_store[:, :, :length], self._value_store[:, :, :length] = self._begun
            self._begun = None
        self.is_initialized = True
        self.rewind(length)

    def _grow(self, length: int) -> None:
        room = max(length, 2 * self._key_store.shape[-2])
        written = self.get_seq_length()
        keys, values = self._key_store, self._value_store
        self._key_store, self._value_store = _roomy(keys, room), _roomy(values, room)
        self._key_store[:, :, :written] = keys[:, :, :written]
        self._value_store[:, :, :written] = values[:, :, :written]


def _roomy(like: torch.Tensor, room: int) -> torch.Tensor:
    return like.new_empty((*like.shape[:2], room, like.shape[-1]))


def is_plain(config: Any) -> bool:
    """Returns whether a model's cache is keys and values alone, sliding windows included."""
    return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in DynamicCache(config=config).layers)


def roomy_layers(config: Any, room: int, begun: Sequence[Pair] | None = None) -> list[RoomyLayer]:
    """Returns the layers for a model whose cache is plain."""
    count = len(DynamicCache(config=config).layers) or int(config.num_hidden_layers)
    return [RoomyLayer(room, begun[place] if begun else None) for place in range(count)]


def cache_of(layers: Sequence[RoomyLayer]) -> Cache:
    """Returns the cache that has these layers."""
    given: list[Any] = [*layers]
    return Cache(layers=given)


def own_cache(config: Any) -> Cache:
    """Returns the cache that the library makes for a model."""
    return DynamicCache(config=config)
