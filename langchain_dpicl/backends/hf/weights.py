"""Says which weights a model has, for reports and files. All of it is public; knows no text and no prompt."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

_LOOKED_AT = 4096
"""Numbers of each weight that a fingerprint is taken of, evenly spread over it."""
_TOLD = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def digest(model: Any) -> str:
    """Returns a hash of all weights and buffers of a model, byte for byte."""
    total = hashlib.sha256()
    with torch.no_grad():
        for name, tensor in sorted(model.state_dict().items()):
            plain = tensor.detach().cpu().contiguous()
            total.update(f"{name} {plain.dtype} {tuple(plain.shape)}\n".encode())
            total.update(plain.flatten().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def fingerprint(model: Any) -> str:
    """Returns what tells the weights of a model from others; "" if it cannot be told, as of quantised ones.

    Numbers are compared as bfloat16 shows them, so that a model that is read in float32 in one place and in bfloat16 in
    another is the same one. Names and order play no part, nor whether two parts share a weight: wrappers and versions
    of libraries change them. Some thousand numbers of each weight are looked at: enough to tell two models apart, and a
    moment's work for the largest one.
    """
    weights = list(model.parameters())
    if not weights or any(weight.dtype not in _TOLD or weight.is_meta for weight in weights):
        return ""
    with torch.no_grad():
        each = sorted({_glance(weight) for weight in weights})
    # Rounded twice, float16 numbers are others: they are told from their like alone.
    seen_as = "float16" if any(weight.dtype == torch.float16 for weight in weights) else "bfloat16"
    return f"{seen_as}:{hashlib.sha256(b''.join(each)).hexdigest()[:32]}"


def _glance(weight: torch.Tensor) -> bytes:
    """Returns a hash of some numbers of a weight, and of its shape."""
    count = weight.numel()
    some = min(count, _LOOKED_AT)
    places = torch.arange(some, device=weight.device) * count // max(some, 1)
    seen = weight.detach().flatten()[places].float().bfloat16().cpu()
    return hashlib.sha256(f"{tuple(weight.shape)}".encode() + seen.view(torch.uint8).numpy().tobytes()).digest()
