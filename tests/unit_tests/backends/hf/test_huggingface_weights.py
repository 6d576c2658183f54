"""Two fingerprints say whether two models have the same weights: in any precision, behind any wrapper."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from langchain_dpicl.backends.hf import model_checks
from tests import tiny_hf, tiny_tuning


def llama() -> Any:
    return copy.deepcopy(tiny_tuning.llama())


def changed(change: Callable[[Any], Any]) -> Any:
    model = llama()
    with torch.no_grad():
        change(model)
    return model


SAME: dict[str, Callable[[], Any]] = {
    "read again": llama,
    "bfloat16": lambda: llama().to(torch.bfloat16),
    "bfloat16 and back": lambda: llama().to(torch.bfloat16).float(),
    "float64": lambda: llama().double(),
    "wrapped": lambda: torch.nn.ModuleDict({"model": llama()}),
    "in another order": lambda: torch.nn.ModuleList(reversed(list(llama().children()))),
    "shared or not": lambda: torch.nn.ModuleDict({"model": llama(), "again": llama().lm_head}),
    "learning": lambda: llama().requires_grad_(True).train(),
    "not contiguous": lambda: changed(
        lambda model: setattr(
            model.lm_head, "weight", torch.nn.Parameter(model.lm_head.weight.T.contiguous().T.requires_grad_(False))
        )
    ),
}
OTHER: dict[str, Callable[[Any], Any]] = {
    "a layer trained": lambda model: model.model.layers[1].self_attn.q_proj.weight.mul_(1.02),
    "a norm": lambda model: model.model.norm.weight.add_(0.05),
    "embeddings": lambda model: model.get_input_embeddings().weight.mul_(0.9),
    "more tokens": lambda model: model.resize_token_embeddings(450, mean_resizing=False),
    "one layer less": lambda model: setattr(model.model, "layers", model.model.layers[:1]),
}


@pytest.mark.parametrize("made", SAME)
def test_the_same_weights_are_the_same(made: str) -> None:
    assert model_checks.fingerprint(SAME[made]()) == model_checks.fingerprint(llama()) != ""


@pytest.mark.parametrize("change", OTHER)
def test_other_weights_are_others(change: str) -> None:
    assert model_checks.fingerprint(changed(OTHER[change])) != model_checks.fingerprint(llama())


def test_another_model_of_the_same_sizes_is_another() -> None:
    assert model_checks.fingerprint(
        tiny_hf._made("LlamaForCausalLM", llama().config, seed=5)
    ) != model_checks.fingerprint(llama())


def test_float16_is_compared_with_its_like_alone() -> None:
    half = model_checks.fingerprint(llama().half())
    assert half.startswith("float16:")
    assert model_checks.fingerprint(llama()).startswith("bfloat16:")
    assert half == model_checks.fingerprint(llama().half())
    assert half != model_checks.fingerprint(changed(OTHER["a norm"]).half())


def test_of_packed_or_missing_weights_nothing_can_be_told() -> None:
    packed = llama()
    packed.lm_head.weight = torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.uint8), requires_grad=False)
    assert model_checks.fingerprint(packed) == ""
    assert model_checks.fingerprint(llama().to("meta")) == ""
    assert model_checks.fingerprint(torch.nn.Identity()) == ""


def test_a_large_weight_is_looked_at_from_end_to_end() -> None:
    big = torch.nn.Linear(1000, 1000, bias=False)
    before = model_checks.fingerprint(big)
    for begin in (0, 250_000, 999_000):
        with torch.no_grad():
            part = big.weight.view(-1)[begin : begin + 1000]
            kept = part.clone()
            part.add_(1.0)
            assert model_checks.fingerprint(big) != before
            part.copy_(kept)
    assert model_checks.fingerprint(big) == before
