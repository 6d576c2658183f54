"""Builds the engine that trains a prompt from the user's model and task options."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from langchain_dpicl._plain_files import read_plain
from langchain_dpicl.backends.base import GradientBackend
from langchain_dpicl.backends.tuning.tasks import PromptTask, TaskKind
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy._validate import fail

_KINDS: dict[str, TaskKind] = {
    "ForSequenceClassification": "sequence_classification",
    "ForMaskedLM": "masked_lm",
    "ForCausalLM": "causal_lm",
    "LMHeadModel": "causal_lm",
}
_MOST_CONFIG = 1 << 24
_TEMPLATES: dict[TaskKind, str] = {
    "causal_lm": "{text}\nLabel:",
    "masked_lm": "{text} {mask}",
    "sequence_classification": "",
}


def engine_of(
    model: Any,
    tokenizer: Any = None,
    *,
    method: str = "soft_prompt",
    num_virtual_tokens: int = 10,
    task: PromptTask | None = None,
    template: str | None = None,
    labels: Sequence[str] | None = None,
    verbalizers: Mapping[str, str] | None = None,
    max_input_tokens: int = 128,
    max_target_tokens: int = 64,
    reparameterize: int | None = None,
    micro_batch: int = 16,
    device: str | None = None,
    dtype: str | None = None,
) -> Any:
    """Returns the engine that trains a prompt of `model`; a `GradientBackend` is returned unchanged."""
    # First statement, so that `locals()` holds exactly the arguments.
    options = {name: value for name, value in locals().items() if name not in {"model", "tokenizer"}}
    if isinstance(model, GradientBackend):
        changed = sorted(_changed(options)) + (["tokenizer"] if tokenizer is not None else [])
        if changed:
            raise fail(", ".join(changed), "their defaults together with an engine, which has its own", "others")
        return model
    worded = {name: options.pop(name) for name in ("template", "labels", "verbalizers")}
    counts = {name: options.pop(name) for name in ("max_input_tokens", "max_target_tokens")}
    if options["task"] is None:
        options["task"] = task_of(kind_of(model), **worded, **counts)
    elif changed := sorted(_changed({**worded, **counts})):
        raise fail(", ".join(changed), "their defaults together with task=, which has its own", "others")
    return _engine_class()(model, tokenizer, **options)


def _changed(options: Mapping[str, Any]) -> list[str]:
    """Returns the names of the options that differ from their defaults."""
    defaults = inspect.signature(engine_of).parameters
    return [name for name, value in options.items() if value != defaults[name].default]


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
    raise fail("model", expected, names, "Give task=PromptTask(...) for another.")


def _architectures(path: Path) -> list[str]:
    try:
        names = json.loads(read_plain(path, _MOST_CONFIG)).get("architectures")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        advice = "Hub names are not downloaded: download the model first and pass its folder."
        raise fail("model", "a model object, or the folder of a local model", str(path.parent), advice) from error
    return [str(name) for name in names] if isinstance(names, list) else []


def task_of(
    kind: TaskKind,
    *,
    template: str | None = None,
    labels: Sequence[str] | None = None,
    verbalizers: Mapping[str, str] | None = None,
    **counts: int,
) -> PromptTask:
    """Builds the task from the single options."""
    if isinstance(labels, str | bytes) or not isinstance(labels, Sequence | None):
        raise fail("labels", "a list of texts", type(labels).__name__, 'Give labels=["...", "..."].')
    if not isinstance(verbalizers, Mapping | None):
        advice = 'Give verbalizers={"label": " word", ...}.'
        raise fail("verbalizers", "a dict from label to word", type(verbalizers).__name__, advice)
    known = tuple(labels if labels is not None else verbalizers or ())
    words = {label: f" {label}" for label in known} if verbalizers is None else dict(verbalizers)
    if set(words) != set(known):
        raise fail("verbalizers", f"one word for each of the labels {list(known)}", sorted(words))
    if kind == "sequence_classification":
        if verbalizers is not None:
            raise fail("verbalizers", "None with a classification head", sorted(verbalizers))
        words = {}
    wording = _TEMPLATES[kind] if template is None else template
    return PromptTask(kind, wording, known, tuple(words[label] for label in known if words), **counts)


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
