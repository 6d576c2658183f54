"""Checks torch modules: refuses those that would show their inputs to others, and fingerprints weights."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.modules import module as modules

from langchain_dpicl.backends.private_calls.method_checks import (
    NAMELESS,
    AcceptedWrappers,
    allowed_wrappers,
    is_shown,
    is_within,
    static_attribute,
    tops_of,
)
from langchain_dpicl.exceptions import CapabilityError, UnsilencableModelError

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Attributes of a module that hold hooks on inputs, answers or gradients."""

_GLOBAL_HOOKS = tuple(f"_global{name}" for name in _HOOKS)
_CALLED = ("__call__", "_wrapped_call_impl", "_call_impl", "forward")
_CALLED_INSTEAD = ("forward", "_compiled_call_impl")
"""Instance attributes that replace a method of the module's class."""
_HELD = (*_HOOKS, *_CALLED_INSTEAD, "_hf_hook")
"""Attributes of a module that may hold code of others."""

_TRUSTED_PACKAGES = frozenset({"torch", "transformers", "langchain_dpicl"})


def parts_of(model: Any) -> list[Any]:
    """Returns a model and all its parts, as `model.modules()` does, which takes five times as long."""
    parts: dict[int, Any] = {}
    todo = [model]
    while todo:
        part = todo.pop()
        if part is not None and id(part) not in parts:
            parts[id(part)] = part
            todo += part._modules.values()  # noqa: SLF001  no public way
    return [*parts.values()]


def end_training_mode(model: Any) -> None:
    """Puts a model into evaluation mode, with every part: dropout takes coins that depend on a row's place.

    The model's own flag says nothing of its parts, and a part's `train` may ignore its argument.

    Raises:
      CapabilityError: a part stays in training mode.
    """
    parts = parts_of(model)
    if any(part.training for part in parts):
        model.eval()
        for part in parts:
            part.training = False
        if stuck := [type(part).__name__ for part in parts if part.training]:
            raise CapabilityError(
                f"expected a model whose parts leave training mode, found {stuck[0]}, which stays in it: there dropout "
                "makes a row depend on others. Replace that part."
            )


class Hooks:
    """Checks the hooks on forward and backward of a model and its parts.

    Hooks of torch, transformers, accelerate and peft are accepted, and those of modules that the operator names. Each
    private call is checked, so that training mode ends here too.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._named = allowed_wrappers()
        self._judged: dict[type, list[Any]] = {}
        self.check()

    def check(self) -> None:
        """Inspects the model as it is now; raises UnsilencableModelError if foreign code would see private values."""
        end_training_mode(self._model)
        parts = parts_of(self._model)
        kinds = {type(part) for part in parts}
        hooked = [part for part in parts if any(map(vars(part).get, _HELD))]
        shared = [hooks for name in _GLOBAL_HOOKS if (hooks := getattr(modules, name, None))]
        changed = [kind for kind in kinds if self._is_changed(kind)]
        if not (hooked or shared or changed):
            return
        bench = AcceptedWrappers(_TRUSTED_PACKAGES | tops_of(kinds), is_strict=True, place="torch", named=self._named)
        for place, value in _standing(hooked, shared, changed):
            if culprit := self._culprit(bench, value):
                raise UnsilencableModelError(_message(type(self._model).__name__, culprit, place))
        self._judged |= {kind: _methods(kind) for kind in changed}

    def _is_changed(self, kind: type) -> bool:
        """Whether a class's methods differ from those that were inspected."""
        seen = self._judged.get(kind)
        # By identity, as proxies say that they are equal.
        return seen is None or not all(map(operator.is_, _methods(kind), seen))

    def _culprit(self, bench: AcceptedWrappers, value: Any) -> str:
        """Returns the package that may not hook there; accelerate's hook objects hold no code and count by class."""
        if type(value) in {list, tuple}:
            return next(filter(None, (self._culprit(bench, item) for item in value)), "")
        if not callable(value):
            module = str(type(value).__module__)
            is_fine = is_shown(module, "torch") or is_within(module, self._named)
            return "" if is_fine else module
        return bench.culprit(value)


def _methods(kind: type) -> list[Any]:
    """Returns what runs when a module of this class is called: its methods, and the code of each."""
    methods = [static_attribute(kind, name) for name in _CALLED]
    return [*methods, *(getattr(method, "__code__", None) for method in methods)]


def _standing(hooked: list[Any], shared: list[Any], changed: list[type]) -> Iterator[tuple[str, Any]]:
    """Yields (place, value) of everything that has to be judged."""
    for hooks in shared:
        yield from (("every module", hook) for hook in list(hooks.values()))
    for part in hooked:
        own, named = vars(part), type(part).__name__
        for name in _HOOKS:
            yield from ((f"{named}.{name.strip('_')}", hook) for hook in list((own.get(name) or {}).values()))
        yield from ((f"{named}.{name}", own[name]) for name in _CALLED_INSTEAD if own.get(name) is not None)
        if (hook := own.get("_hf_hook")) is not None:
            yield f"{named}.forward", [hook, *getattr(hook, "hooks", ())]
    for kind in changed:
        yield from ((f"{kind.__name__}.{name}", static_attribute(kind, name)) for name in _CALLED)


def _message(model: str, culprit: str, place: str) -> str:
    named = "" if culprit == NAMELESS else f", or, if it keeps nothing, call allow_wrappers({culprit!r}) before"
    return (
        f"{model} cannot be used in silence: {culprit} is in the path of {place} and may see the prompts; remove its "
        f"hooks (handle.remove()) and build the engine after that{named}"
    )


_FINGERPRINT_SIZE = 4096
"""Numbers per weight in a fingerprint, evenly spread over it."""
_FINGERPRINT_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def digest(model: Any) -> str:
    """Returns a hash of all weights and buffers of a model, byte for byte."""
    total = hashlib.sha256()
    with torch.no_grad():
        for name, tensor in sorted(model.state_dict().items()):
            plain = tensor.detach().cpu().contiguous()
            total.update(f"{name} {plain.dtype} {tuple(plain.shape)}\n".encode())
            total.update(plain.flatten().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def fingerprint(model: Any, *, by_name: bool = False) -> str:
    """Returns a fingerprint of a model's weights; "" where there is none, as for quantised ones.

    Of a large weight some numbers count. Numbers are rounded to bfloat16, so that a model loaded in float32 and in
    bfloat16 has one fingerprint. Order and shared weights do not count, and names only if asked for, as wrappers and
    library versions change them.
    """
    named = dict(model.named_parameters())
    weights = list(named.values())
    if not weights or any(weight.dtype not in _FINGERPRINT_DTYPES or weight.is_meta for weight in weights):
        return ""
    with torch.no_grad():
        each = sorted({(name if by_name else "").encode() + _glance(weight) for name, weight in named.items()})
    # Rounding float16 to bfloat16 changes numbers: float16 models are compared among themselves only.
    seen_as = "float16" if any(weight.dtype == torch.float16 for weight in weights) else "bfloat16"
    return f"{seen_as}:{hashlib.sha256(b''.join(each)).hexdigest()[:32]}"


def _glance(weight: torch.Tensor) -> bytes:
    """Returns a hash of some numbers of a weight, and of its shape."""
    count = weight.numel()
    some = min(count, _FINGERPRINT_SIZE)
    places = torch.arange(some, device=weight.device) * count // max(some, 1)
    seen = weight.detach().flatten()[places].float().bfloat16().cpu()
    return hashlib.sha256(f"{tuple(weight.shape)}".encode() + seen.view(torch.uint8).numpy().tobytes()).digest()
