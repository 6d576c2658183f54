"""Tiny local models that fail in ways real ones do: out of memory, no numbers, errors, rows that move each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from langchain_dpicl.backends.hf.backend import HuggingFaceBackend
from tests import tiny_hf

CANARY = "zxcanaryzx"
PROMPTS = (
    "Topic: red\nText: the apple is red and the rose",
    "Topic: blue\nText: " + "the sea is blue and wide, a lake is blue. " * 9,
    "",
    "naïve café \U0001f600 12 €\nText:",
    None,
)
OTHER = "Question: why was my card charged twice?\nAnswer:"
LONG = "one charge is held and goes back; " * 30


def engine(model: Any = None, tokenizer: Any = None, **options: Any) -> HuggingFaceBackend:
    """An engine on a tiny model."""
    given = {"max_prompt_tokens": 40, "max_new_tokens": 24, "row_batch": 4} | options
    return HuggingFaceBackend(model or tiny_hf.llama(), tokenizer or tiny_hf.byte_tokenizer(), **given)


class Watched:
    """What was asked of a model: one (rows, columns) per forward."""

    def __init__(self, model: Any) -> None:
        self.shapes: list[tuple[int, ...]] = []
        model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, module: Any, args: Any, kwargs: Any) -> None:
        self.shapes.append(tuple(kwargs["input_ids"].shape))

    @property
    def most_rows(self) -> int:
        return max(rows for rows, _ in self.shapes)


class Narrow(Watched):
    """Runs out of memory above `most` rows, or at the calls that are named."""

    def __init__(self, model: Any, *, most: int = 10**9, kind: type[BaseException] = torch.OutOfMemoryError) -> None:
        self.most = most
        self.kind = kind
        self.failures = 0
        self.next_failures: list[int] = []
        super().__init__(model)

    def _note(self, module: Any, args: Any, kwargs: Any) -> None:
        super()._note(module, args, kwargs)
        is_named = bool(self.next_failures) and len(self.shapes) >= self.next_failures[0]
        if self.shapes[-1][0] > self.most or is_named:
            self.failures += 1
            self.next_failures = self.next_failures[is_named:]
            raise self.kind("CUDA out of memory. Tried to allocate 2.00 GiB")

    def fail_in(self, calls: int) -> None:
        """Fails at the call that comes after `calls` more."""
        self.next_failures.append(len(self.shapes) + calls + 1)


def poisoned(model: Any, id_: int, value: float = float("nan")) -> Any:
    """A model that gives no numbers for rows with one token."""
    with torch.no_grad():
        model.get_input_embeddings().weight[id_] = value
    return model


def raising(model: Any, id_: int, error: BaseException) -> Any:
    """A model that raises when it sees one token."""

    def refuse(module: Any, args: Any, kwargs: Any) -> None:
        if (kwargs["input_ids"] == id_).any():
            raise error

    model.register_forward_pre_hook(refuse, with_kwargs=True)
    return model


def coupled(model: Any, *, by_place: bool = False) -> Any:
    """A model whose rows move each other by very little, or depend on where they stand."""

    def mix(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        if by_place:
            return output + 1e-3 * torch.arange(len(output), dtype=output.dtype)[:, None, None]
        return output + 1e-3 * output.abs().amax()

    model.model.norm.register_forward_hook(mix)
    return model


def hasty(model: Any) -> Any:
    """A model that takes another way when no row is padded, as attention without a mask does on some machines."""
    unpadded = [False]

    def look(module: Any, args: Any, kwargs: Any) -> None:
        mask = kwargs.get("attention_mask")
        unpadded[0] = mask is not None and bool(mask.all())

    model.register_forward_pre_hook(look, with_kwargs=True)
    model.model.norm.register_forward_hook(lambda module, args, output: output * (1 + unpadded[0] * 1e-3))
    return model


def walk(session, tokens):
    """Returns the public row and the private ones before and after every token."""
    found = []
    for token in [*tokens, None]:
        found.append(np.vstack([session.public()[None], session.logits(None)]))
        if token is not None:
            session.push(token)
    session.close()
    return np.stack(found)


def tokens_of(backend, count, *, without=None):
    keys = [key for key in backend.vocabulary() if key != without]
    return [keys[(place * 31 + 7) % len(keys)] for place in range(count)]
