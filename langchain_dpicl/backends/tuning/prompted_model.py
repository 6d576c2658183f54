"""Runs a frozen model with a prompt for every row, and PUBLIC texts behind trained prompts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import DynamicCache

from langchain_dpicl.backends.hf import batches, loading
from langchain_dpicl.backends.hf.batches import KEEPS, BatchShape, ModelBody, RightBatch, ahead, padded
from langchain_dpicl.backends.hf.engine import Engine
from langchain_dpicl.backends.hf.model_checks import Hooks, end_training_mode
from langchain_dpicl.backends.tuning.tasks import TaskKind
from langchain_dpicl.exceptions import CapabilityError, ConfigurationError, DPICLError, ModelCallError

if TYPE_CHECKING:
    from langchain_dpicl.backends.hf.backend import HuggingFaceBackend


# Prompts are laid out as in peft: a soft prompt is embeddings before the row, [rows, virtual tokens, embedding]; a
# prefix is keys and values in every layer, [rows, virtual tokens, 2 * layers * width]. Masks and positions are made
# here in full for every row: the library's short cuts for unpadded batches would let one row decide how others are
# computed. Rows of a causal model are padded in front, so that all end in one place; rows of an encoder behind, because
# a head reads the first place.
Method: TypeAlias = Literal["soft_prompt", "prefix"]
T = TypeVar("T")

METHODS: tuple[Method, ...] = ("soft_prompt", "prefix")
PROBE = 7
"""Tokens of the public rows that a model is tested with."""


@dataclass(slots=True, repr=False, eq=False)
class PromptedRows:
    """Rows of ids at one public length; shows nothing.

    Attributes:
      ids: int64[rows, length].
      mask: bool[rows, length], False for padding.
      types: int64[rows, length] types of tokens, where the model knows any.
      at: int64[rows], the place whose logits are returned; masked models only.
    """

    ids: torch.Tensor
    mask: torch.Tensor
    types: torch.Tensor | None = None
    at: torch.Tensor | None = None


class PromptedModel:
    """A model that reads each row behind that row's prompt.

    Formal guarantees:
      - Logits are those of peft's `PeftModel` with the same prompt, up to rounding, wherever a row is padded.
      - A row's logits are a function of its own prompt and ids; what stands in the padding plays no part.

    Raises:
      CapabilityError: it computes a row from others, is no model of this kind, fails on public ids, or keeps no keys
        and values where a prefix needs them.
      ModelCallError: memory ran out.
    """

    def __init__(self, model: Any, *, method: Method, kind: TaskKind) -> None:
        self.model = model
        self.hooks = Hooks(model)
        self.method: Method = method
        self.kind: TaskKind = kind
        self.facts = loading.inspect_model(model) if kind == "causal_lm" else loading.inspect_rows(model)
        if kind != "causal_lm" and getattr(model.config, "is_encoder_decoder", False):
            raise CapabilityError(
                f"expected an encoder for {kind!r}, found {type(model).__name__}, which has a decoder too; take a "
                "model such as BERT or RoBERTa, or a causal model with label words"
            )
        self._keep = next((name for name in KEEPS if name in self.facts.takes), None)
        self.offset = self.attempt(self._find_offset)
        self._shape = self.attempt(self._cache_shape) if method == "prefix" else None
        self._head = self.attempt(self._find_head) if kind == "masked_lm" else None

    @property
    def device(self) -> torch.device:
        """Where ids go."""
        return torch.device(self.model.device)

    @property
    def is_causal(self) -> bool:
        """Whether a token sees only what stands before it."""
        return self.kind == "causal_lm"

    @property
    def token_dim(self) -> int:
        """Columns of an embedding or, for a prefix, of one layer's keys; named as in peft."""
        if self._shape is None:
            return int(self.model.get_input_embeddings().weight.shape[1])
        return self._shape[1] * self._shape[2]

    @property
    def num_layers(self) -> int:
        """Layers that a prefix enters."""
        return int(self._config.num_hidden_layers) if self._shape is None else self._shape[0]

    @property
    def num_heads(self) -> int:
        """Heads of the keys or, for a soft prompt, of the attention; named as in peft."""
        return int(self._config.num_attention_heads) if self._shape is None else self._shape[1]

    @property
    def dim(self) -> int:
        """Columns of one virtual token."""
        return self.token_dim if self._shape is None else 2 * self.num_layers * self.token_dim

    @functools.cached_property
    def limit(self) -> int | None:
        """Tokens that the model can read and write, prompt included; None: it names no limit."""
        context = self.facts.context
        limits = [None if context is None else context - (self.offset or 0), self.facts.window]
        return min([limit for limit in limits if limit is not None], default=None)

    def attempt(self, action: Callable[[], T]) -> T:
        """Returns what an action computes on public ids, without gradients.

        Raises:
          CapabilityError: the model failed in another way.
          ModelCallError: memory ran out.
        """
        try:
            with torch.no_grad():
                return action()
        except DPICLError:
            raise
        except Exception as error:  # noqa: BLE001  whatever a model raises
            fault = batches.kind_of(error)
        if fault == "memory":
            raise ModelCallError("the model ran out of memory on a single public row; take a smaller model or dtype")
        raise CapabilityError(
            f"expected a model that takes a {self.method} as {self.kind}, found {type(self.model).__name__}, which "
            f"failed on public ids with {fault}; take another model or dtype"
        )

    def forward(self, prompts: torch.Tensor, rows: PromptedRows, *, keep: int = 1) -> torch.Tensor:
        """Returns raw logits float[rows, places, outputs].

        Args:
          prompts: float[rows, virtual tokens, dim], one prompt per row.
          rows: what stands behind them.
          keep: how many of the last places are asked about; causal models only. Of others it is one place: the one at
            `rows.at`, or the head.
        """
        arguments = self._inputs(prompts, rows)
        if self.is_causal:
            arguments["use_cache"] = self.facts.cache in arguments
            if self._keep:
                arguments[self._keep] = keep
            return _logits(self.model(**arguments))[:, -keep:]
        if self.kind == "sequence_classification":
            return _logits(self.model(**arguments))[:, None]
        return self._at(arguments, rows, in_front=prompts.shape[1] if self.method == "soft_prompt" else 0)

    def written(self, ids: Sequence[int]) -> torch.Tensor:
        """Returns float32[len(ids), dim]: PUBLIC ids as a prompt, embeddings or keys and values."""
        row = torch.tensor([list(ids)], device=self.device)
        with torch.no_grad():
            if self.method == "soft_prompt":
                return self._embedded(row)[0].detach().float()  # a hook may ask for gradients even here
            pairs = self._pairs(row)
        layers = [tensor[0].transpose(0, 1).reshape(len(row[0]), -1) for pair in pairs for tensor in pair]
        return torch.cat(layers, dim=1).float()

    def public_ids(self, number: int, length: int) -> list[int]:
        """Returns public ids from all over the vocabulary; different ones for each `number`."""
        barred = getattr(self._config, "pad_token_id", None)  # some models count positions by it
        ids = [(place * 7919 + 104729 * number + 13) % self.facts.reads for place in range(2 * length)]
        return [id_ for id_ in ids if id_ != barred][:length]

    @property
    def _config(self) -> Any:
        return self.model.config.get_text_config(decoder=True) if self.is_causal else self.model.config

    def _embedded(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model.get_input_embeddings()(ids)

    def _inputs(self, prompts: torch.Tensor, rows: PromptedRows) -> dict[str, Any]:
        """Returns the arguments of a forward."""
        count = prompts.shape[1]
        seen = torch.nn.functional.pad(rows.mask, (count, 0), value=True)
        if self.method == "soft_prompt":
            asked, types = seen, _zeros_before(rows.types, count)
            embedded = self._embedded(rows.ids)
            arguments = {"inputs_embeds": torch.cat([prompts.to(embedded.dtype), embedded], dim=1)}
        else:
            asked, types = rows.mask, rows.types
            arguments = {"input_ids": rows.ids, self.facts.cache: self._cache(prompts)}
        arguments |= self._positions(seen, asked.shape[1])
        arguments["attention_mask"] = self._bias(seen, asked.shape[1])
        if types is not None and "token_type_ids" in self.facts.takes:
            arguments["token_type_ids"] = types
        return arguments | {"return_dict": True}

    def _positions(self, seen: torch.Tensor, last: int) -> dict[str, torch.Tensor]:
        """Returns the positions of each row's last places, not counting padding."""
        if self.offset is None:
            return {}
        places = (seen.cumsum(dim=1) - 1).clamp_(min=0) + self.offset
        return {"position_ids": places[:, -last:]}

    def _bias(self, seen: torch.Tensor, last: int) -> torch.Tensor:
        """Returns float[rows, 1, last places, all places]: 0 for visible places, the lowest number for the others."""
        dtype, places = self.model.dtype, seen.shape[1]
        hidden = ~seen[:, None, None, :].expand(-1, 1, last, -1)
        if self.is_causal:
            ahead = torch.ones((last, places), dtype=torch.bool, device=seen.device).triu_(1 + places - last)
            hidden = hidden | ahead
        bias = torch.zeros(hidden.shape, dtype=dtype, device=seen.device)
        return bias.masked_fill_(hidden, torch.finfo(dtype).min)

    def _cache(self, prompts: torch.Tensor) -> Any:
        """Returns a cache that holds each row's keys and values."""
        layers, heads, size = self._shape or (0, 0, 0)
        split = prompts.to(self.model.dtype).view(*prompts.shape[:2], 2 * layers, heads, size)
        # Each [rows, heads, virtual tokens, size]; one unbind, as the gradient of every index would be as large as all.
        parts = split.permute(2, 0, 3, 1, 4).unbind(0)
        cache: Any = DynamicCache()
        for layer in range(layers):
            cache.update(parts[2 * layer], parts[2 * layer + 1], layer)
        return cache

    def _pairs(self, ids: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns each layer's keys and values float[1, heads, length, size] of public ids."""
        cache: Any = DynamicCache()
        options = {"use_cache": True} if self.is_causal else {}
        self.model(**{"input_ids": ids, self.facts.cache: cache}, return_dict=True, **options)
        return [(layer.keys, layer.values) for layer in cache.layers]

    def _cache_shape(self) -> tuple[int, int, int]:
        """Returns layers, heads and size of the keys."""
        fault = ""
        shapes: set[tuple[int, ...]] = set()
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        try:
            pairs = self._pairs(self._probe(0))
            shapes = {tuple(tensor.shape[1:]) for pair in pairs for tensor in pair}
        except (TypeError, ValueError, AttributeError) as error:
            fault = f" ({type(error).__name__})"
        if len(shapes) != 1 or len(next(iter(shapes))) != 3:
            raise CapabilityError(
                "expected a model whose layers all keep keys and values of one shape, found "
                f"{type(self.model).__name__}{fault}, which does not: it takes no prefix; take another model, or try "
                "method='soft_prompt'"
            )
        heads, _, size = next(iter(shapes))
        return len(pairs), heads, size

    def _probe(self, number: int) -> torch.Tensor:
        return torch.tensor([self.public_ids(number, PROBE)], device=self.device)

    def _find_offset(self) -> int | None:
        """Returns the model's position of a row's first token; None if it takes no positions, or counts differently."""
        if "position_ids" not in self.facts.takes:
            return None
        pad = getattr(self._config, "pad_token_id", None)
        ids = self._probe(0)
        expected = _logits(self.model(input_ids=ids, return_dict=True))
        for offset in [0, *([] if pad is None else [int(pad) + 1])]:
            places = torch.arange(ids.shape[1], device=ids.device)[None] + offset
            logits = _logits(self.model(input_ids=ids, position_ids=places, return_dict=True))
            if bool(((logits - expected).abs() <= 1e-4 * expected.abs().amax()).all()):
                return offset
        return None

    def _find_head(self) -> Any:
        """Returns the layers after a masked model's body, to run them at one place only; None if unknown."""
        body = self.model.base_model
        rest = [child for child in self.model.children() if child is not body]
        if body is self.model or len(rest) != 1:
            return None
        ids = self._probe(0)
        expected = _logits(self.model(input_ids=ids, return_dict=True))
        logits = rest[0](body(input_ids=ids, return_dict=True).last_hidden_state)
        same = (
            isinstance(logits, torch.Tensor)
            and logits.shape == expected.shape
            and torch.allclose(logits, expected, atol=1e-4)
        )
        return rest[0] if same else None

    def _at(self, arguments: dict[str, Any], rows: PromptedRows, *, in_front: int) -> torch.Tensor:
        """Returns the logits float[rows, 1, outputs] at `rows.at`."""
        if rows.at is None:
            raise CapabilityError("expected rows that say which place is asked about, found none")
        places = (rows.at + in_front)[:, None, None]
        if self._head is None:
            every = _logits(self.model(**arguments))
            return every.take_along_dim(places, dim=1)
        hidden = self.model.base_model(**arguments).last_hidden_state
        return self._head(hidden.take_along_dim(places, dim=1))


def stack_inputs(
    inputs: Sequence[Sequence[int]],
    *,
    length: int,
    filler: int,
    device: torch.device,
    is_causal: bool,
    types: Sequence[Sequence[int]] | None = None,
) -> PromptedRows:
    """Returns inputs of at most `length` ids as rows: padded in front for causal models, else behind."""
    ids = torch.full((len(inputs), length), filler, dtype=torch.int64)
    mask = torch.zeros((len(inputs), length), dtype=torch.bool)
    kinds = None if types is None else torch.zeros((len(inputs), length), dtype=torch.int64)
    for row, row_ids in enumerate(inputs):
        place = slice(length - len(row_ids), length) if is_causal else slice(0, len(row_ids))
        ids[row, place] = torch.tensor(row_ids, dtype=torch.int64)
        mask[row, place] = True
        if kinds is not None and types is not None:
            kinds[row, place] = torch.tensor(types[row], dtype=torch.int64)
    return PromptedRows(ids.to(device), mask.to(device), None if kinds is None else kinds.to(device))


def _logits(answer: Any) -> torch.Tensor:
    return answer.logits


def _zeros_before(types: torch.Tensor | None, count: int) -> torch.Tensor | None:
    return None if types is None else torch.nn.functional.pad(types, (count, 0))


Beginning = list[batches.Pair]
"""Keys and values [1, heads, positions, size] of one prompt, by layer."""


def from_embeddings(body: ModelBody, numbers: NDArray[np.float32]) -> Beginning:
    """Returns the keys and values of virtual tokens float32[positions, width] at the beginning of a text."""
    layers = batches.roomy_layers(body.config, len(numbers))
    embeddings = torch.tensor(numbers, dtype=body.model.dtype, device=body.device)[None]
    places = torch.arange(len(numbers), device=body.device)[None]
    cache = batches.cache_of(layers)
    with torch.inference_mode():
        given = {"inputs_embeds": embeddings, body.facts.cache: cache, "position_ids": places}
        body.model(**given, use_cache=True, return_dict=True)
    return [layer.written() for layer in layers]


def from_prefix(body: ModelBody, numbers: NDArray[np.float32], *, heads: int) -> Beginning:
    """Returns the keys and values of a prefix float32[positions, 2 * layers * heads * size], in peft's order."""
    flat = torch.tensor(numbers, dtype=body.model.dtype, device=body.device)
    count = len(batches.roomy_layers(body.config, 1))
    stored = flat.view(len(numbers), count, 2, heads, -1).permute(1, 2, 3, 0, 4)[:, :, None]
    return [(layer[0].contiguous(), layer[1].contiguous()) for layer in stored]


class PromptRegistry:
    """Trained prompts of one model, by name; each is read at its first use, and cached.

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
        """Returns prompts by name, for a batch of the model, which is put into evaluation mode."""
        end_training_mode(self._body.model)
        for name in set(names) - set(self._read):
            self._read[name] = self._made[name]()
        return [self._read[name] for name in names]


class PromptedBatch(RightBatch):
    """Rows that begin with prompts of different lengths; the padding behind short prompts is masked."""

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
        self._layers = batches.roomy_layers(self._body.config, room, _stack_prompts(beginnings, begun))
        self._cache = batches.cache_of(self._layers)
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
