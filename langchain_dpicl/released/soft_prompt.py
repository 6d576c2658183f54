"""A released soft prompt with its privacy report, and its files: safetensors, in a folder in PEFT's layout."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import secrets
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, Protocol, Self, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl._plain_files import MAX_ARRAYS, check_path, faults_of, read_plain
from langchain_dpicl.backends.tuning.tasks import PromptTask
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy._validate import check_choice, check_int, fail
from langchain_dpicl.released.base import FileForm, Released, plain_json, text_in
from langchain_dpicl.reports.claims import json_digest
from langchain_dpicl.reports.rendering import format_rounded_up

Array: TypeAlias = NDArray[np.float32]

_MAX_HEADER = 1 << 16
_MAX_DIMENSIONS = 8
_ALIGNED = 8
_LITTLE_ENDIAN = np.dtype("<f4")


def array_bytes(arrays: Mapping[str, Array]) -> bytes:
    """Returns the content of a safetensors file with these arrays."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    blocks, end = [], 0
    for name, array in arrays.items():
        block = np.ascontiguousarray(array, dtype=_LITTLE_ENDIAN).tobytes()
        header[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [end, end + len(block)]}
        blocks.append(block)
        end += len(block)
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    # The format pads the header with blanks, so that the numbers are aligned.
    text += b" " * (-len(text) % _ALIGNED)
    return b"".join([len(text).to_bytes(8, "little"), text, *blocks])


def arrays_in(path: Path) -> dict[str, Array]:
    """Returns the float32 arrays of an untrusted safetensors file by name; builds no other objects."""
    whole = read_plain(path, MAX_ARRAYS)
    begin = 8 + int.from_bytes(whole[:8], "little")
    header = _header(whole[8:begin]) if begin <= min(len(whole), 8 + _MAX_HEADER) else None
    if header is None:
        raise ConfigurationError(f"{path.name}: expected a safetensors file.")
    # Sorted by offset: arrays must follow each other without gaps or overlaps.
    blocks = sorted((_block(path.name, name, entry), name) for name, entry in header.items())
    arrays: dict[str, Array] = {}
    end = 0
    for (first, last, shape), name in blocks:
        if first != end or begin + last > len(whole):
            raise _odd(path.name, name)
        arrays[name] = np.frombuffer(whole[begin + first : begin + last], _LITTLE_ENDIAN).reshape(shape)
        end = last
    if begin + end != len(whole):
        raise ConfigurationError(f"{path.name}: expected no bytes beside the arrays.")
    return {name: array.astype(np.float32) for name, array in arrays.items()}


def _header(text: bytes) -> dict[str, Any] | None:
    """Returns the header's entry of each array; None if it is not a header."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return {name: entry for name, entry in value.items() if name != "__metadata__"} if isinstance(value, dict) else None


def _block(file: str, name: str, entry: Any) -> tuple[int, int, tuple[int, ...]]:
    """Returns the offsets of an array and its shape."""
    state = entry if isinstance(entry, dict) else {}
    shape, place = _sizes(state.get("shape")), _sizes(state.get("data_offsets"))
    if state.get("dtype") != "F32" or shape is None or place is None or len(place) != 2:
        raise _odd(file, name)
    if len(shape) > _MAX_DIMENSIONS or 0 in shape or place[1] - place[0] != 4 * math.prod(shape):
        raise _odd(file, name)
    return place[0], place[1], shape


def _sizes(value: Any) -> tuple[int, ...] | None:
    is_list = isinstance(value, list) and all(type(one) is int and 0 <= one <= MAX_ARRAYS for one in value)
    return tuple(value) if is_list else None


def _odd(file: str, name: str) -> ConfigurationError:
    return ConfigurationError(f"{file}: expected {name!r} as float32 numbers, each stored once.")


def write_folder(
    path: str | os.PathLike[str], files: Mapping[str, bytes], *, check: Callable[[], object] | None = None
) -> None:
    """Writes a folder of exactly these files; a reader sees the old folder, the whole new one, or briefly none.

    `check` is called immediately before the old folder is replaced, and may raise.
    """
    target = check_folder(path, files)
    mark = secrets.token_hex(8)
    part, old = target.with_name(f".{target.name}.{mark}.part"), target.with_name(f".{target.name}.{mark}.old")
    try:
        with faults_of(path):
            part.mkdir()
            for name, content in files.items():
                with (part / name).open("xb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
            if check is not None:
                check()
            _swap(part, target, old)
    finally:
        shutil.rmtree(part, ignore_errors=True)
        # The old folder is deleted only if a complete one is in place.
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)


def check_folder(path: str | os.PathLike[str], names: Collection[str]) -> Path:
    """Returns the path of a folder of exactly these files, with links followed; refuses what it must not replace."""
    target = check_path("path", path)
    if not target.parent.is_dir():
        shown = os.fspath(path)
        raise ConfigurationError(f"expected a path in a folder that exists, found {shown!r}; create that folder first")
    if not target.exists():
        return target
    if not target.is_dir():
        raise ConfigurationError(f"expected a folder to write to, found the file {target.name!r}; give another path")
    if strange := sorted({one.name for one in target.iterdir()} - set(names)):
        raise ConfigurationError(
            f"expected a new folder, or one of {sorted(names)} to replace, found {strange[:5]} in it; give another path"
        )
    return target


def _swap(part: Path, target: Path, old: Path) -> None:
    """Moves `target` to `old` and `part` to `target`; moves `old` back on failure."""
    had_one = target.exists()
    if had_one:
        target.rename(old)
    try:
        part.rename(target)
    except OSError:
        if had_one:
            old.rename(target)
        raise


FORMAT = "langchain-dpicl/soft-prompt"
VERSION = 1

ARRAY = "prompt_embeddings"
PEFT_CONFIG = "adapter_config.json"
PEFT_ARRAYS = "adapter_model.safetensors"
OURS = "soft_prompt.json"

Method: TypeAlias = Literal["soft_prompt", "prefix"]

PEFT_TYPES: Final[Mapping[str, str]] = MappingProxyType({"soft_prompt": "PROMPT_TUNING", "prefix": "PREFIX_TUNING"})

_HEAD = "base_model."
_KNOWN_OF_BASE = frozenset({"name", "tokenizer"})
_MAX_TEXT = 1 << 24


class TrainableEngine(Protocol):
    """An engine whose trained parameters become a soft prompt; all of it is public."""

    @property
    def name(self) -> str:
        """Public name of the base model."""

    @property
    def tokenizer_fingerprint(self) -> str:
        """Fingerprint of its tokenizer."""

    @property
    def method(self) -> Any:
        """Where the prompt is inserted: "soft_prompt" or "prefix"."""

    @property
    def num_virtual_tokens(self) -> int:
        """Number of virtual tokens of the prompt."""

    @property
    def task(self) -> PromptTask:
        """The task that it was trained for."""

    def arrays(self, parameters: NDArray[np.float64]) -> Mapping[str, Array]:
        """Returns {"prompt_embeddings": float32[positions, width]} in PEFT's layout."""

    def peft_config(self) -> Mapping[str, Any]:
        """Returns the content of PEFT's `adapter_config.json`."""


@dataclass(frozen=True, repr=False, eq=False)
class SoftPrompt(Released):
    """A trained prompt: its numbers, its task, and its privacy report.

    Formal guarantees:
      - Holds public values only; copying, pickling, printing, saving and serving it is free post-processing.

    Args:
      arrays: {"prompt_embeddings": float32[num_virtual_tokens, width]} in the layout of the PEFT package: embeddings
        of virtual tokens for "soft_prompt", keys and values of all layers for "prefix".
      method: where it is inserted: in front of the text ("soft_prompt") or at every layer ("prefix").
      num_virtual_tokens: its number of virtual tokens.
      task: template and answers of the training task.
      peft_config: content of PEFT's `adapter_config.json`.
      base: {"name": public name of the base model, "tokenizer": its tokenizer's fingerprint}, and if known
        "weights": the fingerprint of its weights.
      report: JSON-able privacy report; `report["epsilon"]` is a number >= 0 or the string "infinity".
      head: for a classifier, the head that was frozen in training, float32 by PEFT's names; else {}.

    Raises:
      ConfigurationError: a value is of another type, is not finite, contradicts the others, or cannot be written.
    """

    _FORM = FileForm(
        "soft prompt",
        FORMAT,
        VERSION,
        frozenset({"method", "num_virtual_tokens", "task", "base", "report", "arrays", "peft_config"}),
    )

    arrays: Mapping[str, Array]
    _: KW_ONLY
    method: Method
    num_virtual_tokens: int
    task: PromptTask
    peft_config: Mapping[str, Any]
    base: Mapping[str, str]
    report: Mapping[str, Any]
    head: Mapping[str, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_choice("method", self.method, get_args(Method))
        check_int("num_virtual_tokens", self.num_virtual_tokens, low=1)
        if not isinstance(self.task, PromptTask):
            raise fail("task", "a PromptTask", type(self.task).__name__)
        self._copy_public("peft_config", "report")
        object.__setattr__(self, "base", _check_base(self.base))
        width = _width(self.peft_config, self.method, self.num_virtual_tokens)
        object.__setattr__(self, "arrays", _check_arrays(self.arrays, (self.num_virtual_tokens, width)))
        object.__setattr__(self, "head", _check_head(self.head, self.task))

    @classmethod
    def of(cls, engine: TrainableEngine, parameters: NDArray[np.float64], *, report: Mapping[str, Any]) -> SoftPrompt:
        """Returns the prompt of trained parameters.

        Args:
          engine: the engine that they were trained on.
          parameters: float64[width]; already released: no noise is added here.
          report: as of this class.

        Raises:
          ConfigurationError: the numbers are not finite, or the engine's values contradict each other.
        """
        return cls(
            engine.arrays(parameters),
            method=engine.method,
            num_virtual_tokens=engine.num_virtual_tokens,
            task=engine.task,
            peft_config=engine.peft_config(),
            base=base_of(engine),
            report=report,
            head=getattr(engine, "head", dict)(),
        )

    @property
    def plan(self) -> Mapping[str, Any]:  # type: ignore[override]
        """The public plan of the training; empty if the report names none."""
        plan: Mapping[str, Any] = self.report.get("plan", {})
        return plan

    @functools.cached_property
    def fingerprint(self) -> str:
        """Digest of numbers, method and task."""
        identity = json.dumps([self.method, self.task.to_dict(), _digest(self._numbers)])
        return hashlib.sha256(identity.encode()).hexdigest()[:16]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a folder that `PeftModel.from_pretrained` reads, with the task and the report beside it.

        A reader sees the old folder, the whole new one, or briefly none.

        Args:
          path: folder to create or replace; its parent must exist.

        Raises:
          ConfigurationError: something other than such a folder is at `path`, or its parent is missing; nothing is
            written.
          OSError: it cannot be written; what was at `path` is then still there.
        """
        write_folder(path, self.files())

    def files(self) -> dict[str, bytes]:
        """Returns the files that `save` writes, whole, by name."""
        return {**self.files_of_peft(), OURS: self.to_json().encode("ascii")}

    def files_of_peft(self) -> dict[str, bytes]:
        """Returns those of them that PEFT reads."""
        return {
            PEFT_CONFIG: (json.dumps(self.peft_config, indent=2, sort_keys=True) + "\n").encode("ascii"),
            PEFT_ARRAYS: array_bytes(self._numbers),
        }

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a folder written by `save`.

        Args:
          path: the folder; nothing in it is executed, and links in it are followed to plain files only.

        Raises:
          ConfigurationError: the content is not what `save` writes, was changed after it was written, or its report's
            claims contradict its ledger's report.
          OSError: a file is missing or unreadable.
        """
        folder = check_path("path", path)
        state = cls._FORM.load(folder / OURS, most=_MAX_TEXT)
        peft_config = _parse_config(text_in(folder / PEFT_CONFIG, _MAX_TEXT))
        numbers = arrays_in(folder / PEFT_ARRAYS)
        # The digests tie PEFT's two files to the report: neither can be exchanged unnoticed.
        for file, name, digest in (
            (PEFT_ARRAYS, "arrays", _digest(numbers)),
            (PEFT_CONFIG, "peft_config", json_digest(peft_config)),
        ):
            if state[name] != digest:
                raise ConfigurationError(
                    f"{file}: expected the content with the digest in {OURS}, found another; save the prompt again."
                )
        return cls._of_state({**state, "arrays": numbers, "peft_config": peft_config})

    def _state(self) -> dict[str, Any]:
        # What `save` adds to PEFT's files: task, base, report, and the digests of the files.
        return {
            "method": self.method,
            "num_virtual_tokens": self.num_virtual_tokens,
            "task": self.task.to_dict(),
            "base": dict(self.base),
            "report": self.report,
            "arrays": _digest(self._numbers),
            "peft_config": json_digest(self.peft_config),
        }

    @classmethod
    def _of_state(cls, state: Mapping[str, Any]) -> Self:
        numbers = state["arrays"]
        if not isinstance(numbers, Mapping):
            raise fail("text", "a folder, with the numbers of the prompt", "their digest", "Use SoftPrompt.load.")
        return cls(
            {name: array for name, array in numbers.items() if name == ARRAY},
            method=state["method"],
            num_virtual_tokens=state["num_virtual_tokens"],
            task=PromptTask.from_dict(state["task"]),
            peft_config=state["peft_config"],
            base=state["base"],
            report=state["report"],
            head={name: array for name, array in numbers.items() if name != ARRAY},
        )

    @property
    def _numbers(self) -> dict[str, Array]:
        """All arrays of the safetensors file, in the order of their names."""
        return dict(sorted({**self.arrays, **self.head}.items()))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SoftPrompt):
            return NotImplemented
        return self.to_json() == other.to_json() and self.peft_config == other.peft_config

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        base, epsilon = self.base["name"], format_rounded_up(self.epsilon)
        return f"SoftPrompt({self.method!r}, {self.num_virtual_tokens} x {base!r}, epsilon={epsilon})"


def _digest(arrays: Mapping[str, Array]) -> str:
    return hashlib.sha256(array_bytes(arrays)).hexdigest()


def base_of(engine: TrainableEngine) -> dict[str, str]:
    """Returns name, tokenizer fingerprint and, if known, weights fingerprint of the base model."""
    known = {"name": engine.name, "tokenizer": engine.tokenizer_fingerprint}
    weights: str = getattr(engine, "weights_fingerprint", str)()
    return known | ({"weights": weights} if weights else {})


def _check_base(base: object) -> dict[str, str]:
    names = plain_json("base", base)
    is_known = _KNOWN_OF_BASE <= set(names) <= _KNOWN_OF_BASE | {"weights"}
    if not is_known or not all(isinstance(value, str) for value in names.values()):
        raise fail("base", "texts under 'name', 'tokenizer' and optionally 'weights'", sorted(names))
    return names


def _width(peft_config: Mapping[str, Any], method: str, num_virtual_tokens: int) -> int:
    """Returns the numbers per virtual token, by PEFT's configuration."""
    expected = {"peft_type": PEFT_TYPES[method], "num_virtual_tokens": num_virtual_tokens}
    actual = {name: peft_config.get(name) for name in expected}
    if actual != expected or isinstance(actual["num_virtual_tokens"], bool):
        raise fail("peft_config", f"{expected}", actual)
    width = check_int("peft_config['token_dim']", peft_config.get("token_dim"), low=1)
    if method == "prefix":
        # A prefix holds one key and one value per layer.
        width *= 2 * check_int("peft_config['num_layers']", peft_config.get("num_layers"), low=1)
    return width


def _check_arrays(arrays: object, shape: tuple[int, int]) -> Mapping[str, Array]:
    """Returns a read-only copy."""
    if not isinstance(arrays, Mapping) or set(arrays) != {ARRAY}:
        raise fail("arrays", f"exactly {ARRAY!r}", type(arrays).__name__)
    array = _numbers(f"arrays[{ARRAY!r}]", arrays[ARRAY], "Train with a lower learning rate.")
    if array.shape != shape:
        raise fail(f"arrays[{ARRAY!r}]", f"float32 of shape {shape}", f"shape {array.shape}")
    return {ARRAY: array}


def _check_head(head: object, task: PromptTask) -> Mapping[str, Array]:
    """Returns a read-only copy."""
    if not isinstance(head, Mapping) or not all(isinstance(name, str) for name in head):
        raise fail("head", "arrays by name", type(head).__name__)
    if head and task.kind != "sequence_classification":
        raise fail("head", f"none with a task of kind {task.kind!r}", sorted(head)[:5])
    if strange := [name for name in head if not name.startswith(_HEAD) or not name.isascii()]:
        raise fail("head", f"names that begin with {_HEAD!r}", sorted(strange)[:5])
    return {name: _numbers(f"head[{name!r}]", head[name], "Take a model with finite weights.") for name in head}


def _numbers(name: str, values: object, advice: str) -> Array:
    """Returns a read-only copy of finite float32 numbers."""
    array: Array = np.array(values, copy=True, order="C")
    if array.dtype != np.float32:
        raise fail(name, "float32 numbers", str(array.dtype))
    if not np.isfinite(array).all():
        raise fail(name, "finite numbers", "NaN or an infinity", advice)
    array.setflags(write=False)
    return array


def _parse_config(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{PEFT_CONFIG}: expected JSON text ({type(error).__name__}).") from None
    return plain_json(PEFT_CONFIG, value)
