"""Stores the released state of a training run in a file, and reads it back."""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from langchain_dpicl._plain_files import MAX_ARRAYS, check_target
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy._validate import check_int, fail
from langchain_dpicl.released.files import FileForm, plain_json, write_whole
from langchain_dpicl.soft_prompts.options import LARGEST_WEIGHT, WEIGHT_GRID, Floats, OptimizerState

_TERMS = ("component", "ledger_id", "dataset_id", "adjacency")
_FOLLOWING = re.compile(r"release\.|(epochs|implementation_delta|noise_scale|sampling_rate|width)$")
"""Public numbers that follow from others; named in messages only if nothing else differs."""
_NOTHING = "nothing"
_FORM = FileForm(
    "training checkpoint",
    "langchain-dpicl/training-checkpoint",
    1,
    frozenset({*_TERMS, "public", "step", "weights", "moments"}),
)


@dataclass(frozen=True, slots=True)
class TrainingCheckpoint:
    """The content of a checkpoint: the run's public terms and its released state.

    Vectors are stored as base64 of little-endian float64, so that a run continues with the same bits. The file is
    untrusted: it is checked and compared with the run before anything is charged.

    Attributes:
      component: name of the share that pays.
      ledger_id: the ledger.
      dataset_id: the private data set.
      adjacency: the neighbouring relation.
      public: the plan, the optimizer and the model, as JSON values.
      state: the state after the last released step.
    """

    component: str
    ledger_id: str
    dataset_id: str
    adjacency: str
    public: Mapping[str, Any]
    state: OptimizerState

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the file atomically: a reader sees the old file or the whole new one."""
        terms = {name: getattr(self, name) for name in _TERMS}
        vectors = {"weights": _text(self.state.weights), "moments": [_text(moment) for moment in self.state.moments]}
        state = {**terms, "public": dict(self.public), "step": self.state.step, **vectors}
        write_whole(path, _FORM.text(state), MAX_ARRAYS)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, width: int | None = None, num_moments: int | None = None
    ) -> TrainingCheckpoint:
        """Reads a file that `save` wrote, and nothing else."""
        content = _FORM.load(path, most=MAX_ARRAYS)
        terms = {name: content[name] for name in _TERMS}
        if not all(isinstance(value, str) for value in terms.values()):
            raise fail("training checkpoint", "text under " + ", ".join(_TERMS), "another type")
        moments = content["moments"]
        if not isinstance(moments, list):
            raise fail("training checkpoint: moments", "a list of vectors", type(moments).__name__)
        weights = _weights(_vector("weights", content["weights"], width))
        state = OptimizerState(
            check_int("training checkpoint: step", content["step"], low=0),
            weights,
            tuple(_vector(f"moments[{place}]", moment, len(weights)) for place, moment in enumerate(moments)),
        )
        read = cls(**terms, public=plain_json("training checkpoint: public", content["public"]), state=state)
        read.check_sizes(width=width, num_moments=num_moments)
        return read

    def check_sizes(self, *, width: int | None, num_moments: int | None) -> None:
        """Refuses vectors of another length or number; None accepts any."""
        sizes = len(self.state.weights), len(self.state.moments)
        if width not in {None, sizes[0]}:
            raise fail("training checkpoint: weights", f"{width} float64 numbers", sizes[0])
        if num_moments not in {None, sizes[1]}:
            raise fail("training checkpoint: moments", f"a list of {num_moments} vectors", sizes[1])

    def check_is_of(self, *, component: str, ledger_id: str, dataset_id: str, adjacency: str, public: Any) -> None:
        """Refuses the checkpoint of a run with another ledger, data set, plan or model."""
        shown = json.loads(json.dumps(dict(public)))  # JSON turns tuples into lists
        ours = dict(zip(_TERMS, (component, ledger_id, dataset_id, adjacency), strict=True)) | dict(_leaves(shown))
        theirs = {name: getattr(self, name) for name in _TERMS} | dict(_leaves(self.public))
        other = {name for name in {*ours, *theirs} if ours.get(name, _NOTHING) != theirs.get(name, _NOTHING)}
        if other:
            names = sorted(name for name in other if not _FOLLOWING.match(name)) or sorted(other)
            differences = [(name, theirs.get(name, _NOTHING), ours.get(name, _NOTHING)) for name in names]
            differs = [f"{name}: {there!r:.80} in the file, {here!r:.80} here" for name, there, here in differences]
            raise ConfigurationError(
                f"checkpoint: expected the state of this run, found another run's ({'; '.join(differs)}). "
                "Pass another file, or the plan, model and ledger of the file."
            )


def _leaves(value: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the values of a JSON object with the paths of their keys."""
    for key, one in value.items():
        if isinstance(one, Mapping):
            yield from _leaves(one, f"{within}{key}.")
        else:
            yield within + key, one


def check_checkpoint_path(path: Any) -> Path | None:
    """Returns the path of a writable checkpoint."""
    return None if path is None else check_target("checkpoint", path)


def _text(values: Floats) -> str:
    return base64.b64encode(values.astype("<f8").tobytes()).decode("ascii")


def _vector(name: str, text: object, width: int | None) -> Floats:
    """Returns a checked vector from a file."""
    raw = b""
    if isinstance(text, str):
        try:
            raw = base64.b64decode(text.encode("ascii", "replace"), validate=True)
        except binascii.Error:
            raw = b""
    if len(raw) % 8 or len(raw) != 8 * (width or len(raw) // 8) or not raw:
        many = "" if width is None else f"{width} "
        raise ConfigurationError(f"training checkpoint: {name}: expected the base64 of {many}float64 numbers.")
    # Copied: `frombuffer` returns a read-only view of the file's bytes.
    values = np.frombuffer(raw, dtype="<f8").astype(np.float64)
    if not np.isfinite(values).all():
        raise ConfigurationError(f"training checkpoint: {name}: expected finite numbers.")
    return values


def _weights(values: Floats) -> Floats:
    if (np.abs(values) > LARGEST_WEIGHT).any() or (values * WEIGHT_GRID % 1.0 != 0).any():
        raise ConfigurationError("training checkpoint: weights: expected multiples of 2^-24, at most 2^20.")
    return values
