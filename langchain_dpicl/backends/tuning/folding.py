"""Turns trained parameters into a prompt, and gradients of the prompt into those of the parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

# Plain prompts are their own parameters. A reparameterised prompt is the output of a small network (an embedding per
# virtual token, a layer, tanh, a layer), which is trained instead and folded into the prompt before a release.
_AT_ONCE = 2**24
"""Numbers of per-example gradients of a network computed at once."""


class Folding(Protocol):
    """How parameters become a prompt."""

    num_virtual_tokens: int
    width: int

    def fold(self, vector: torch.Tensor) -> torch.Tensor:
        """Returns the prompt float32[virtual tokens, dim] that float32[width] parameters write."""

    def pull(self, vector: torch.Tensor, gradients: torch.Tensor) -> torch.Tensor:
        """Returns float32[rows, width]: each row's gradient, from float32[rows, virtual tokens, dim] of its prompt."""

    def solve(self, prompt: torch.Tensor, draw: Callable[..., torch.Tensor]) -> torch.Tensor:
        """Returns parameters float64[width] that write a prompt; `draw(*shape)` gives public normal coins."""


class PlainFolding:
    """The parameters are the prompt."""

    def __init__(self, num_virtual_tokens: int, dim: int) -> None:
        self.num_virtual_tokens = num_virtual_tokens
        self._shape = (num_virtual_tokens, dim)
        self.width = num_virtual_tokens * dim

    def fold(self, vector: torch.Tensor) -> torch.Tensor:
        """Returns the prompt."""
        return vector.view(self._shape)

    def pull(self, vector: torch.Tensor, gradients: torch.Tensor) -> torch.Tensor:
        """Returns the gradients as they are."""
        del vector
        return gradients.flatten(1)

    def solve(self, prompt: torch.Tensor, draw: Callable[..., torch.Tensor]) -> torch.Tensor:
        """Returns the prompt's numbers."""
        del draw
        return prompt.double().flatten()


class NetworkFolding:
    """The parameters are those of a network that writes the prompt.

    Args:
      num_virtual_tokens: rows of the prompt.
      dim: columns of the prompt.
      inner: columns of the embeddings.
      hidden: width of the layer between.
    """

    def __init__(self, num_virtual_tokens: int, dim: int, *, inner: int, hidden: int) -> None:
        self.num_virtual_tokens = num_virtual_tokens
        self._shapes = ((num_virtual_tokens, inner), (hidden, inner), (hidden,), (dim, hidden), (dim,))
        self._sizes = [torch.Size(shape).numel() for shape in self._shapes]
        self.width = sum(self._sizes)

    def fold(self, vector: torch.Tensor) -> torch.Tensor:
        """Returns the network's output."""
        pairs = zip(vector.split(self._sizes), self._shapes, strict=True)
        embeddings, first, first_bias, second, second_bias = [part.view(shape) for part, shape in pairs]
        return torch.tanh(embeddings @ first.T + first_bias) @ second.T + second_bias

    def pull(self, vector: torch.Tensor, gradients: torch.Tensor) -> torch.Tensor:
        """Returns each row's gradient of the network, a public number of rows at a time."""
        _, back = torch.func.vjp(self.fold, vector)
        step = max(1, _AT_ONCE // self.width)
        parts = [torch.func.vmap(back)(part)[0] for part in gradients.split(step)]
        return torch.cat(parts)

    def solve(self, prompt: torch.Tensor, draw: Callable[..., torch.Tensor]) -> torch.Tensor:
        """Returns a random network whose last layer is solved for the prompt; close to it if `hidden` is too small."""
        target = prompt.double()
        (count, inner), (hidden, _) = self._shapes[:2]
        embeddings = draw(count, inner)
        first = draw(hidden, inner) / inner**0.5
        bias = target.mean(dim=0)
        features = torch.tanh(embeddings @ first.T)
        second = (torch.linalg.pinv(features) @ (target - bias)).T
        zeros = torch.zeros(hidden, dtype=torch.float64)
        return torch.cat([part.flatten() for part in (embeddings, first, zeros, second, bias)])
