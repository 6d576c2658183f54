"""Reads and writes the frozen head of a classifier, named as peft names it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

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
