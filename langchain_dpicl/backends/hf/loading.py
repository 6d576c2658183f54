"""Loads local models and refuses those whose rows are not independent."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_dpicl.exceptions import CapabilityError, ConfigurationError

if TYPE_CHECKING:
    import torch

# Everything here is decided from the model, its configuration and the caller's options, and is therefore public. Models
# that couple rows are refused by their parts: no test on sample inputs proves that a scale shared by the batch never
# matters.
DTYPES = ("float32", "bfloat16", "float16")
AUTO_CLASSES = {
    "causal_lm": "AutoModelForCausalLM",
    "masked_lm": "AutoModelForMaskedLM",
    "sequence_classification": "AutoModelForSequenceClassification",
}
"""The class of transformers that reads a folder, by the kind of model."""

_CONTEXTS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length", "seq_length")
_CAPACITIES = ("expert_capacity", "capacity_factor", "moe_capacity_factor", "expert_capacity_factor")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "moe_num_routed_experts")
_EXPERT_MODULES = re.compile(r"Moe|MoE|MOE|Expert")
_RESCALED = ("dynamic", "longrope")
"""Rotary scalings that depend on the batch's longest row once it exceeds the original length."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The public facts about a model.

    Attributes:
      context: tokens it can read and write together; None: it names no limit.
      window: tokens the narrowest sliding attention sees; None: all attention sees everything.
      width: columns of its logits.
      reads: number of ids that it can read.
      mixes_rows: whether experts gather tokens of all rows, so that it runs one row at a time.
      ends: the end-of-text ids of its own configuration.
      takes: the names of its forward's arguments.
      cache: the name of the argument that takes a cache: "cache" since transformers 5.24.
    """

    context: int | None
    window: int | None
    width: int
    reads: int
    mixes_rows: bool
    ends: tuple[int, ...]
    takes: frozenset[str]
    cache: str


def load(
    model: Any, tokenizer: Any, *, device: str | None, dtype: str | None, kind: str = "causal_lm"
) -> tuple[Any, Any, frozenset[str]]:
    """Returns model and tokenizer, read from a local folder where a path was given, and the weights it lacks.

    Those are made at random at each load. An object keeps its device and dtype unless `device` differs. `kind` is a key
    of `AUTO_CLASSES`.
    """
    check_installed()
    if dtype is not None and dtype not in DTYPES:
        raise ConfigurationError(f"expected dtype in {DTYPES} or None, found {dtype!r}")
    tokenizer = _tokenizer(tokenizer, model)
    lacking: frozenset[str] = frozenset()
    if isinstance(model, str | os.PathLike):
        model, lacking = _from_folder(_folder(model), dtype, AUTO_CLASSES[kind])
        device = _best_device() if device is None else device
    elif not hasattr(model, "config") or not hasattr(model, "parameters"):
        raise ConfigurationError(
            f"expected a model of transformers, or the path of one, found {type(model).__name__}; of a pipeline or "
            "a wrapper pass the model in it"
        )
    elif dtype is not None and str(model.dtype) != f"torch.{dtype}":
        raise ConfigurationError(
            f"expected a model object in dtype {dtype}, found {model.dtype}: its weights are yours and are not "
            "converted here; call model.to(...) before, or pass the path of the model"
        )
    if device is not None and str(model.device) != device:
        _move(model, device)
    model.eval()
    return model, tokenizer, lacking


def _move(model: Any, device: Any) -> None:
    try:
        model.to(device)
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        kind = type(error).__name__
    else:
        return
    import torch

    here = "cpu, cuda" if torch.cuda.is_available() else "cpu"
    raise ConfigurationError(f"expected a device that takes the model ({here}), found device={device!r}: {kind}")


def check_installed() -> None:
    """Refuses to run without the extra `hf`."""
    missing = None
    try:
        import torch
        import transformers
    except ImportError as error:
        missing = error.name or "torch"
    else:
        del torch, transformers
    if missing:
        raise ConfigurationError(
            f"expected the packages of local models, found no {missing}; install langchain-dpicl[hf]"
        )


def _folder(path: str | os.PathLike[str]) -> Path:
    if not os.path.exists(path):  # noqa: PTH110  Path.exists raises for a name too long, such as a prompt in its place
        raise ConfigurationError(
            f"expected a model object or the path of a local model, found {os.fspath(path)!r}, which does not exist; "
            "names of a hub are not looked up: download the model first and pass its folder"
        )
    return Path(path)


def _from_folder(folder: Path, dtype: str | None, auto: str) -> tuple[Any, frozenset[str]]:
    import torch
    import transformers

    options = {"dtype": getattr(torch, dtype) if dtype else "auto", "output_loading_info": True}
    model, told = _read_local(getattr(transformers, auto), folder, **options)
    return model, frozenset(told["missing_keys"])


def _tokenizer(tokenizer: Any, model: Any) -> Any:
    if tokenizer is None and not isinstance(model, str | os.PathLike):
        raise ConfigurationError("expected a tokenizer with a model object, found None; pass tokenizer=...")
    tokenizer = model if tokenizer is None else tokenizer
    if not isinstance(tokenizer, str | os.PathLike):
        if not hasattr(tokenizer, "get_vocab"):
            raise ConfigurationError(
                f"expected a tokenizer of transformers, or the path of one, found {type(tokenizer).__name__}"
            )
        return tokenizer
    from transformers import AutoTokenizer

    return _read_local(AutoTokenizer, _folder(tokenizer))


def _read_local(kind: Any, folder: Path, **options: Any) -> Any:
    """Returns what `kind` reads from a folder, without fetching files or running the folder's code."""
    try:
        with _no_progress_bars():
            return kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **options)
    except Exception as error:  # every reader of weights has errors of its own
        msg = (
            f"expected a folder that {kind.__name__} reads without fetching files or running code, found {folder}, "
            f"which it does not: {type(error).__name__}: {error}; "
            "save model and tokenizer there with save_pretrained, or pass the objects"
        )
        raise ConfigurationError(msg) from error


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    from transformers.utils import logging

    bars: Any = logging  # its functions are untyped
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()


def _best_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def inspect_model(model: Any) -> ModelInfo:
    """Returns the public facts about a causal model; refuses other kinds, and coupled rows."""
    if getattr(model.config, "is_encoder_decoder", False) or not {"input_ids", _cache_name(model)} <= _takes(model):
        raise CapabilityError(
            f"expected a causal language model with a key-value cache, found {type(model).__name__}; "
            "take a decoder-only model of AutoModelForCausalLM, not compiled, and of a peft model merge_and_unload()"
        )
    is_body = bool(getattr(model, "base_model", None) is model)
    if is_body and model.get_output_embeddings() is None:
        raise CapabilityError(
            f"expected a causal language model, found {type(model).__name__}, which has no head; load it with "
            "AutoModelForCausalLM"
        )
    return inspect_rows(model)


def inspect_rows(model: Any) -> ModelInfo:
    """Returns the public facts about a model of any kind; refuses coupled rows."""
    config = _text_config(model.config)
    if reason := _couples(model, config):
        raise CapabilityError(
            f"expected a model that computes each row from its own prompt, found {type(model).__name__} with {reason}: "
            "one record would move all rows; take the same model without it"
        )
    return ModelInfo(
        context=_context(config),
        window=_window(config),
        width=_width(model, config),
        reads=_reads(model, config),
        mixes_rows=_mixes_rows(model, config),
        ends=tuple(dict.fromkeys([*_ids(getattr(model, "generation_config", None)), *_ids(config)])),
        takes=_takes(model),
        cache=_cache_name(model),
    )


def _takes(model: Any) -> frozenset[str]:
    return frozenset(inspect.signature(model.forward).parameters)


def _cache_name(model: Any) -> str:
    # Some heads hand the cache on to their body without naming it.
    bodies = (model, getattr(model, "base_model", model))
    return "cache" if any("cache" in _takes(body) for body in bodies) else "past_key_values"


def _text_config(config: Any) -> Any:
    get_text_config = getattr(config, "get_text_config", None)
    return get_text_config(decoder=True) if callable(get_text_config) else config


def _ids(config: Any) -> Iterable[int]:
    ids = getattr(config, "eos_token_id", None)
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


def _context(config: Any) -> int | None:
    names = list(_CONTEXTS)
    ropes = [getattr(config, name, None) or {} for name in ("rope_parameters", "rope_scaling")]
    ropes += [inner for rope in ropes for inner in rope.values() if isinstance(inner, dict)]
    rescaled = [rope for rope in ropes if (rope.get("rope_type") or rope.get("type")) in _RESCALED]
    limits = [rope.get("original_max_position_embeddings") for rope in rescaled]
    limits += [getattr(config, name, None) for name in [*names, *["original_max_position_embeddings"] * bool(rescaled)]]
    return min([value for value in limits if isinstance(value, int) and value > 0], default=None)


def _window(config: Any) -> int | None:
    from transformers.cache_utils import DynamicCache

    layers = DynamicCache(config=config).layers
    windows = [int(getattr(layer, "sliding_window", 0) or 0) for layer in layers if getattr(layer, "is_sliding", False)]
    return min(windows, default=None)


def _width(model: Any, config: Any) -> int:
    head = model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    return int(config.vocab_size if weight is None or weight.ndim != 2 else max(head.weight.shape[0], 0))


def _reads(model: Any, config: Any) -> int:
    count = getattr(model.get_input_embeddings(), "num_embeddings", None)
    return count if isinstance(count, int) else int(config.vocab_size)


def _mixes_rows(model: Any, config: Any) -> bool:
    counted = any(isinstance(count := getattr(config, name, None), int) and count > 1 for name in _EXPERTS)
    return counted or any(_EXPERT_MODULES.search(type(module).__name__) for module in model.modules())


def _couples(model: Any, config: Any) -> str:
    """Returns what couples the rows of a batch; "" if nothing known does."""
    import torch

    if any(getattr(config, name, None) for name in _CAPACITIES):
        return "experts of limited capacity"
    for module in model.modules():
        kind = type(module)
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):  # noqa: SLF001  the base of all of them
            return "batch normalisation"
        if ".quantized.dynamic" in kind.__module__ or kind.__name__ == "Linear8bitLt":
            return "quantisation of activations at run time"
    return _quantisation(model, config)


def _quantisation(model: Any, config: Any) -> str:
    reason = "quantisation of activations at run time"
    if any(_is_activation_quantised(parameter) for parameter in model.parameters()):
        return reason
    settings = getattr(config, "quantization_config", None) or getattr(model.config, "quantization_config", None) or {}
    settings = settings if isinstance(settings, dict) else vars(settings)
    dynamic = settings.get("activation_scheme") == "dynamic" or settings.get("load_in_8bit")
    return reason if dynamic or "'dynamic': True" in str(settings.get("config_groups")) else ""


def _is_activation_quantised(parameter: torch.Tensor) -> bool:
    names = f"{type(parameter).__name__} {type(parameter.data).__name__}"
    return "ActivationQuantized" in names


def public_name(model: Any) -> str:
    """Returns a model's own name without the folder it was read from."""
    written = str(getattr(model.config, "_name_or_path", "") or "")
    return Path(written).name or type(model).__name__
