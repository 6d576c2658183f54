"""Runs PUBLIC texts behind trained prompts on one local model, each prompt read once, and keeps classifier heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from langchain_dpicl.backends.hf import cache as caches
from langchain_dpicl.backends.hf.batches import BatchShape, ModelBody, RightBatch, ahead, padded
from langchain_dpicl.backends.hf.engine import Engine
from langchain_dpicl.exceptions import CapabilityError, ConfigurationError

if TYPE_CHECKING:
    from langchain_dpicl.backends.hf.backend import HuggingFaceBackend


Beginning = list[caches.Pair]
"""Keys and values [1, heads, positions, size] of one prompt, by layer."""


def from_embeddings(body: ModelBody, numbers: NDArray[np.float32]) -> Beginning:
    """Returns the keys and values of virtual tokens float32[positions, width] at the beginning of a text."""
    layers = caches.roomy_layers(body.config, len(numbers))
    embeddings = torch.tensor(numbers, dtype=body.model.dtype, device=body.device)[None]
    places = torch.arange(len(numbers), device=body.device)[None]
    cache = caches.cache_of(layers)
    with torch.inference_mode():
        given = {"inputs_embeds": embeddings, body.facts.cache: cache, "position_ids": places}
        body.model(**given, use_cache=True, return_dict=True)
    return [layer.written() for layer in layers]


def from_prefix(body: ModelBody, numbers: NDArray[np.float32], *, heads: int) -> Beginning:
    """Returns the keys and values of a prefix float32[positions, 2 * layers * heads * size], in peft's order."""
    flat = torch.tensor(numbers, dtype=body.model.dtype, device=body.device)
    count = len(caches.roomy_layers(body.config, 1))
    stored = flat.view(len(numbers), count, 2, heads, -1).permute(1, 2, 3, 0, 4)[:, :, None]
    return [(layer[0].contiguous(), layer[1].contiguous()) for layer in stored]


class PromptRegistry:
    """Trained prompts of one model, by name; each is read at its first use, and cached.

    Args:
      engine: runs the model.

    Raises:
      CapabilityError: its rows cannot begin with what was read before.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._body = engine.body
        filler = engine.vocabulary.filler
        if not engine.shape(2, 1, (filler,)).shared:
            kind = type(self._body.model).__name__
            raise CapabilityError(
                f"expected a model with positions and a plain key-value cache, found {kind}; "
                "serve the prompt with PeftModel.from_pretrained(model, folder) of the peft package"
            )
        with engine.lock, torch.inference_mode():
            self._shapes = [tuple(pair[0].shape) for pair in self._body.begun((filler,))]
        self._made: dict[str, Callable[[], Beginning]] = {}
        self._read: dict[str, Beginning] = {}

    def put(self, name: str, method: str, numbers: NDArray[np.float32], *, heads: int) -> None:
        """Adds a prompt float32[positions, width]; refuses one that was trained on another model."""
        width = int(self._body.model.get_input_embeddings().weight.shape[1])
        width_found: object = numbers.shape[1]
        if method == "prefix":
            layers, (_, own, _, size) = len(self._shapes), self._shapes[0]
            width, width_found = (
                2 * layers * own * size,
                width_found if heads == own else f"{width_found} of {heads} heads",
            )
        if width_found != width or len(set(self._shapes)) > 1:
            raise ConfigurationError(
                f"prompt {name!r}: expected {width} numbers per virtual token, as {type(self._body.model).__name__} "
                f"takes them, found {width_found}; take the model that it was trained on"
            )
        if method == "prefix":
            self._made[name] = lambda: from_prefix(self._body, numbers, heads=heads)
        else:
            self._made[name] = lambda: from_embeddings(self._body, numbers)

    def take(self, names: Sequence[str]) -> list[Beginning]:
        """Returns prompts by name."""
        for name in set(names) - set(self._read):
            self._read[name] = self._made[name]()
        return [self._read[name] for name in names]


class PromptedBatch(RightBatch):
    """Rows that begin with prompts of different lengths; the padding behind short prompts is masked.

    Args:
      body: the model.
      begin: returns the prompts, one per row.
      shape: rows, tokens of the longest row (its prompt not counted), and tokens to come.
    """

    def __init__(self, body: ModelBody, begin: Callable[[], Sequence[Beginning]], shape: BatchShape) -> None:
        super().__init__(body, shape)
        self._begin = begin

    def start(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """Reads the rows behind their prompts: all but each row's last token at once, the last ones as a step."""
        begun, counts = self._take(self._begin())
        device, width = self._body.device, self._shape.length
        ids, lengths = (torch.from_numpy(array).to(device) for array in padded(rows, width, self._body.filler))
        ends = lengths[:, None] - 1
        if width > 1:
            places = torch.arange(width - 1, device=device)[None]
            mask = self._mask[..., : begun + width - 1].repeat(1, 1, width - 1, 1)
            mask[..., begun:].masked_fill_(ahead(width - 1, device), self._body.lowest)
            self._body.forward(ids[:, :-1], self._cache, attention_mask=mask, position_ids=counts + places)
            self._mask[:, 0, 0, begun : begun + width - 1].masked_fill_(places >= ends, self._body.lowest)
        self._used = begun + width - 1
        self._positions = counts + ends
        return self.step(ids.gather(1, ends)[:, 0])

    def _take(self, beginnings: Sequence[Beginning]) -> tuple[int, torch.Tensor]:
        """Puts the prompts into the cache; returns the longest one's positions, and int64[rows, 1] all lengths."""
        device, shape = self._body.device, self._shape
        counts = torch.tensor([[one[0][0].shape[-2]] for one in beginnings], device=device)
        begun = int(counts.max())
        room = begun + shape.length + shape.room
        self._layers = caches.roomy_layers(self._body.config, room, _stack_prompts(beginnings, begun))
        self._cache = caches.cache_of(self._layers)
        self._mask = torch.zeros((shape.size, 1, 1, room), dtype=self._mask.dtype, device=device)
        unseen = torch.arange(begun, device=device)[None] >= counts
        self._mask[:, 0, 0, :begun].masked_fill_(unseen, self._body.lowest)
        return begun, counts


def _stack_prompts(beginnings: Sequence[Beginning], length: int) -> Beginning:
    """Returns the prompts of all rows, padded with zeros to one length."""

    def whole(layer: int, part: int) -> torch.Tensor:
        stored = [one[layer][part] for one in beginnings]
        return torch.cat([torch.nn.functional.pad(one, (0, 0, 0, length - one.shape[-2])) for one in stored])

    return [(whole(layer, 0), whole(layer, 1)) for layer in range(len(beginnings[0]))]


def parts_of(backend: HuggingFaceBackend) -> tuple[Engine, Any]:
    """Returns the runner of an engine's model, and its tokenizer."""
    return backend._engine, backend._prompts.tokens._tokenizer  # noqa: SLF001  parts of one engine


# A head may be untrained random numbers: the prompt works with that head only, so it is stored with the prompt.
Arrays = Mapping[str, NDArray[np.float32]]

_ENDINGS = ("classifier", "score")
"""Endings of names by which peft finds the parts of a head."""
_WITHIN = "base_model."


def head_of(model: Any) -> dict[str, NDArray[np.float32]]:
    """Returns the parameters of a classifier's head; {} if the model has none of a known name."""
    return {name: tensor.detach().float().cpu().numpy().copy() for name, tensor in _tensors(model).items()}


def has_head(model: Any, head: Arrays) -> bool:
    """Whether a model has this head, in its own precision."""
    own = _tensors(model)
    if set(own) != set(head):
        return False
    return all(torch.equal(tensor.detach().cpu(), _cast(head[name], tensor)) for name, tensor in own.items())


def put_head(model: Any, head: Arrays) -> bool:
    """Gives a model this head; returns False and changes nothing if its own head has other parts."""
    own = _tensors(model)
    if {name: tuple(tensor.shape) for name, tensor in own.items()} != {name: head[name].shape for name in head}:
        return False
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(_cast(head[name], tensor))
    return True


def _tensors(model: Any) -> dict[str, torch.Tensor]:
    parts = [(name, module) for name, module in model.named_modules() if name.endswith(_ENDINGS)]
    return {
        f"{_WITHIN}{name}.{key}": tensor
        for name, module in parts
        for key, tensor in [*module.named_parameters(), *module.named_buffers()]
    }


def _cast(array: NDArray[np.float32], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(array, dtype=like.dtype)
