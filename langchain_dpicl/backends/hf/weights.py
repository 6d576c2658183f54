"""Fingerprints the weights of a model, for reports and files."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

_LOOKED_AT = 4096
"""Numbers per weight in a fingerprint, evenly spread over it."""
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
    """Returns a fingerprint of a model's weights; "" where there is none, as for quantised ones.

    Numbers are rounded to bfloat16, so that a model loaded in float32 and in bfloat16 has one fingerprint. Names, order
    and shared weights do not count, as wrappers and library versions change them.
    """
    weights = list(model.parameters())
    if not weights or any(weight.dtype not in _TOLD or weight.is_meta for weight in weights):
        return ""
    with torch.no_grad():
        each = sorted({_glance(weight) for weight in weights})
    # Rounding float16 to bfloat16 changes numbers: float16 models are compared among themselves only.
    seen_as = "float16" if any(weight.dtype == torch.float16 for weight in weights) else "bfloat16"
    return f"{seen_as}:{hashlib.sha256(b''.join(each)).hexdigest()[:32]}"


def _glance(weight: torch.Tensor) -> bytes:
    """Returns a hash of some numbers of a weight, and of its shape."""
    count = weight.numel()
    some = min(count, _LOOKED_AT)
    places = torch.arange(some, device=weight.device) * count // max(some, 1)
    seen = weight.detach().flatten()[places].float().bfloat16().cpu()
    return hashlib.sha256(f"{tuple(weight.shape)}".encode() + seen.view(torch.uint8).numpy().tobytes()).digest()
