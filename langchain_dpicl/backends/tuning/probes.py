"""Tests a model with public ids before private work: does it read a prompt, and a padded row like a bare one?"""

from __future__ import annotations

from typing import Any

import torch

from langchain_dpicl.backends.hf.batches import is_out_of_memory
from langchain_dpicl.backends.hf.vocabulary import distance, tolerance
from langchain_dpicl.backends.tuning.prompted import PROBE, PromptedModel, Rows, stacked
from langchain_dpicl.exceptions import CapabilityError, ModelCallError

_PADDING = 5


def check_model(prompted: PromptedModel, *, num_virtual_tokens: int, num_outputs: int | None) -> None:
    """Tests a model with public ids.

    Args:
      prompted: the model.
      num_virtual_tokens: of the prompts.
      num_outputs: labels that a head must tell apart; None: it answers with tokens.

    Raises:
      CapabilityError: it answers in another form or without numbers, ignores a prompt, or reads it in a way of its own.
      ModelCallError: memory ran out.
    """
    fault = ""
    try:
        with torch.no_grad():
            fault = _fault(prompted, num_virtual_tokens, num_outputs)
    except Exception as error:  # noqa: BLE001  whatever a model raises
        if is_out_of_memory(error):
            fault = "memory"
        else:
            fault = f"which failed on public ids with {type(error).__name__}; take another model, or " + _other(
                prompted
            )
    if fault == "memory":
        raise ModelCallError("the model ran out of memory on a single public row; take a smaller model or dtype")
    if fault:
        kind = type(prompted.model).__name__
        raise CapabilityError(
            f"expected a model that takes a {prompted.method} as {prompted.kind}, found {kind}, {fault}"
        )


def _fault(prompted: PromptedModel, count: int, num_outputs: int | None) -> str:
    """Returns what is wrong; "" if nothing is."""
    ids = prompted.public_ids(0, PROBE)
    first, second = (prompted.public_ids(number, count) for number in (1, 2))
    bare = _rows(prompted, ids, PROBE)
    logits = prompted.forward(prompted.written(first)[None], bare)
    if logits.ndim != 3 or logits.shape[1] != 1 or (num_outputs is not None and logits.shape[2] != num_outputs):
        form = f"{logits.shape[-1]} outputs" if logits.ndim == 3 else "an answer of another form"
        return f"with {form}; take a model of that kind, and labels in the order of its head"
    if not bool(logits.isfinite().all()):
        return "whose logits are no numbers: weights are missing or NaN, or the dtype is too narrow; load it again"
    close = tolerance(prompted.model.dtype)
    padded = prompted.forward(prompted.written(first)[None], _rows(prompted, ids, PROBE + _PADDING))
    if not distance(logits, padded) <= close:
        return "which answers otherwise when a row is padded; take another model, or attn_implementation='sdpa'"
    if torch.equal(logits, prompted.forward(prompted.written(second)[None], bare)):
        return f"which ignores it; {_other(prompted)}"
    plain = _plain(prompted, [*first, *ids])
    if plain is not None and not distance(logits, plain) <= close:
        return f"which reads it otherwise than the same tokens as text; take another model, or {_other(prompted)}"
    return ""


def _other(prompted: PromptedModel) -> str:
    return f"pass method={'prefix' if prompted.method == 'soft_prompt' else 'soft_prompt'!r}"


def _rows(prompted: PromptedModel, ids: list[int], length: int) -> Rows:
    rows = stacked([ids], length=length, filler=ids[0], device=prompted.device, is_causal=prompted.is_causal)
    rows.at = torch.tensor([PROBE // 2], device=prompted.device)
    return rows


def _plain(prompted: PromptedModel, ids: list[int]) -> torch.Tensor | None:
    """Returns the model's own answer to the same tokens as text; None where a prompt means something else."""
    if prompted.method == "prefix" and not prompted.is_causal:
        return None  # a text's keys and values would also see what stands behind it
    answer: Any = prompted.model(input_ids=torch.tensor([ids], device=prompted.device), return_dict=True)
    logits: torch.Tensor = answer.logits
    if prompted.kind == "sequence_classification":
        return logits[:, None]
    return logits[:, -1:] if prompted.is_causal else logits[:, len(ids) - PROBE + PROBE // 2][:, None]
