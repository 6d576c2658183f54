"""Builds the engine that trains a prompt of a local model."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from langchain_dpicl._plain_files import read_plain
from langchain_dpicl.backends.base import GradientBackend
from langchain_dpicl.backends.hf.backend import HuggingFaceBackend
from langchain_dpicl.backends.tuning.tasks import PromptTask, TaskKind
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.options import SoftPromptConfig, TrainableModel
from langchain_dpicl.options.base import Where
from langchain_dpicl.privacy._validate import fail

_KINDS: dict[str, TaskKind] = {
    "ForSequenceClassification": "sequence_classification",
    "ForMaskedLM": "masked_lm",
    "ForCausalLM": "causal_lm",
    "LMHeadModel": "causal_lm",
}
_MOST_CONFIG = 1 << 24


def engine_of(
    llm: TrainableModel | HuggingFaceBackend | GradientBackend | Where,
    *,
    task: PromptTask | None = None,
    prompt: SoftPromptConfig | None = None,
    labels: Sequence[str] = (),
) -> Any:
    """Returns the engine that trains a prompt of `llm`; one that computes gradients is returned unchanged.

    Args:
      llm: the model.
      task: template and answers; None: the usual template of the model's kind, and `labels`.
      prompt: what is trained.
      labels: the answers of a task that is not given; (): the prompt learns to write texts.
    """
    wanted = SoftPromptConfig() if prompt is None else prompt
    if not isinstance(wanted, SoftPromptConfig):
        raise fail("prompt", "SoftPromptConfig(...)", type(prompt).__name__)
    if not isinstance(task, PromptTask | None):
        raise fail("task", "PromptTask(...)", type(task).__name__)
    if isinstance(llm, GradientBackend):
        if task is not None or wanted.replace(init_text=None) != SoftPromptConfig():
            expected = "no task, and of a prompt init_text alone, together with an engine, which has its own"
            raise fail("task, prompt", expected, "others")
        return llm
    if isinstance(llm, str | os.PathLike | HuggingFaceBackend):
        llm = TrainableModel(llm)
    if not isinstance(llm, TrainableModel):
        expected = "TrainableModel(...), a HuggingFaceBackend or the folder of a local model"
        raise fail("llm", expected, type(llm).__name__, "Give a model object as TrainableModel(model, tokenizer).")
    model, tokenizer = model_parts(llm.model, llm.tokenizer)
    return _engine_class()(
        model,
        tokenizer,
        method=wanted.method,
        num_virtual_tokens=wanted.num_virtual_tokens,
        task=_default_task(kind_of(model), labels) if task is None else task,
        reparameterize=wanted.encoder_hidden_size,
        micro_batch=llm.micro_batch,
        device=llm.device,
        dtype=llm.dtype,
    )


def model_parts(model: Any, tokenizer: Any) -> tuple[Any, Any]:
    """Returns model and tokenizer; for a `HuggingFaceBackend`, the engine's."""
    if not isinstance(model, HuggingFaceBackend):
        return model, tokenizer
    from langchain_dpicl.backends.tuning.serving import parts_of

    if tokenizer is not None:
        raise fail("tokenizer", "None with an engine, which has its own", type(tokenizer).__name__)
    engine, tokenizer = parts_of(model)
    return engine.body.model, tokenizer


def kind_of(model: Any) -> TaskKind:
    """Returns the task kind of a model, by its class name or by the configuration in its folder."""
    names = [type(model).__name__]
    if isinstance(model, str | os.PathLike):
        names = _architectures(Path(model) / "config.json")
    for name in names:
        for ending, kind in _KINDS.items():
            if name.endswith(ending):
                return kind
    expected = f"a model whose class ends in one of {list(_KINDS)}, or the folder of one"
    raise fail("llm", expected, names, "Give task=PromptTask(...) for another.")


def _architectures(path: Path) -> list[str]:
    try:
        names = json.loads(read_plain(path, _MOST_CONFIG)).get("architectures")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        advice = "Hub names are not downloaded: download the model first and pass its folder."
        raise fail("llm", "a model object, or the folder of a local model", str(path.parent), advice) from error
    return [str(name) for name in names] if isinstance(names, list) else []


def _default_task(kind: TaskKind, labels: Sequence[str]) -> PromptTask:
    if kind == "sequence_classification":
        advice = "The order of the labels is that of the head's outputs, which only you know."
        raise fail("task", f'PromptTask("{kind}", labels=[...]) for a model with a head', None, advice)
    return PromptTask(kind, labels=tuple(labels))


def _engine_class() -> Any:
    """Imports the engine class, which needs torch."""
    missing = None
    try:
        from langchain_dpicl.backends.tuning.engine import PromptEngine
    except ImportError as error:
        missing = error.name or "torch"
    else:
        return PromptEngine
    raise ConfigurationError(f"expected the packages of local models, found no {missing}; install langchain-dpicl[hf]")
