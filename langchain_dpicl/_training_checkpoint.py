"""The file from which training goes on: released state only, as JSON text. Knows no record, no sum and no model.

Vectors are the base64 of their little-endian float64 bytes, so that a run goes on with the same bits; nothing in the
file is executed or unpickled, and a file from a stranger is checked and compared before anything is paid for.
"""

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

from langchain_dpicl._optimizers import LARGEST_WEIGHT, WEIGHT_GRID, Floats, OptimizerState
from langchain_dpicl._plain_files import MAX_ARRAYS, checked_target
from langchain_dpicl._released_files import FileForm, plain, write_whole
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy._validate import check_int, fail

_TERMS = ("component", "ledger_id", "dataset_id", "adjacency")
_FOLLOWING = re.compile(r"release\.|(epochs|implementation_delta|noise_scale|sampling_rate|width)$")
"""Public numbers that follow from others, and are told where nothing else differs."""
_NOTHING = "nothing"
_FORM = FileForm(
    "training checkpoint",
    "langchain-dpicl/training-checkpoint",
    1,
    frozenset({*_TERMS, "public", "step", "weights", "moments"}),
)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a file holds: whose run it is, and its released state.

    Attributes:
      component: name of the share that pays.
      ledger_id: the ledger.
      dataset_id: the private data set.
      adjacency: the neighbouring relation.
      public: the plan, the optimizer and the model, as JSON values.
      state: the state after the last step that was released.
    """

    component: str
    ledger_id: str
    dataset_id: str
    adjacency: str
    public: Mapping[str, Any]
    state: OptimizerState

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the file; a reader sees the old one or the whole new one, never a part.

        Raises:
          OSError: the folder is missing or cannot be written; the old file is then untouched.
        """
        terms = {name: getattr(self, name) for name in _TERMS}
        vectors = {"weights": _text(self.state.weights), "moments": [_text(moment) for moment in self.state.moments]}
        state = {**terms, "public": dict(self.public), "step": self.state.step, **vectors}
        write_whole(path, _FORM.text(state), MAX_ARRAYS)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, width: int | None = None, num_moments: int | None = None
    ) -> Checkpoint:
        """Reads a file that `save` wrote, and nothing else.

        Args:
          path: the file.
          width: length of every vector; None: as many as the weights have.
          num_moments: how many vectors stand beside the weights; None: any number. A run that goes on has to ask for
            both (`check_sizes`), once it is clear that the file is its own.

        Raises:
          ConfigurationError: the content is not what `save` writes for such a run.
          OSError: the file is missing or unreadable.
        """
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
        read = cls(**terms, public=plain("training checkpoint: public", content["public"]), state=state)
        read.check_sizes(width=width, num_moments=num_moments)
        return read

    def check_sizes(self, *, width: int | None, num_moments: int | None) -> None:
        """Refuses vectors of another length or number; None: any.

        Raises:
          ConfigurationError: there are others.
        """
        sizes = len(self.state.weights), len(self.state.moments)
        if width not in {None, sizes[0]}:
            raise fail("training checkpoint: weights", f"{width} float64 numbers", sizes[0])
        if num_moments not in {None, sizes[1]}:
            raise fail("training checkpoint: moments", f"a list of {num_moments} vectors", sizes[1])

    def check_is_of(self, *, component: str, ledger_id: str, dataset_id: str, adjacency: str, public: Any) -> None:
        """Refuses to go on as another run: on another ledger, of other examples, of another plan or model.

        Raises:
          ConfigurationError: a term differs.
        """
        shown = json.loads(json.dumps(dict(public)))  # tuples are lists in files
        ours = dict(zip(_TERMS, (component, ledger_id, dataset_id, adjacency), strict=True)) | dict(_leaves(shown))
        theirs = {name: getattr(self, name) for name in _TERMS} | dict(_leaves(self.public))
        other = {name for name in {*ours, *theirs} if ours.get(name, _NOTHING) != theirs.get(name, _NOTHING)}
        if other:
            names = sorted(name for name in other if not _FOLLOWING.match(name)) or sorted(other)
            differences = [(name, theirs.get(name, _NOTHING), ours.get(name, _NOTHING)) for name in names]
            differs = [f"{name}: {there!r:.80} in the file, {here!r:.80} here" for name, there, here in differences]
            raise ConfigurationError(
                f"checkpoint: expected the state of this very run, found another's ({'; '.join(differs)}). "
                "Take another file for this run, or give the plan, model and ledger that the file was made with."
            )


def _leaves(value: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the values of a JSON object with the paths of their keys."""
    for key, one in value.items():
        if isinstance(one, Mapping):
            yield from _leaves(one, f"{within}{key}.")
        else:
            yield within + key, one


def checked_path(path: Any) -> Path | None:
    """Returns the path of a checkpoint that can be written.

    Raises:
      ConfigurationError: no path, or a folder that is missing or cannot be written.
    """
    return None if path is None else checked_target("checkpoint", path)


def _text(values: Floats) -> str:
    return base64.b64encode(values.astype("<f8").tobytes()).decode("ascii")


def _vector(name: str, text: object, width: int | None) -> Floats:
    """Returns a vector of a file, its length and its numbers checked."""
    raw = b""
    if isinstance(text, str):
        try:
            raw = base64.b64decode(text.encode("ascii", "replace"), validate=True)
        except binascii.Error:
            raw = b""
    if len(raw) % 8 or len(raw) != 8 * (width or len(raw) // 8) or not raw:
        many = "" if width is None else f"{width} "
        raise ConfigurationError(f"training checkpoint: {name}: expected the base64 of {many}float64 numbers.")
    values = np.frombuffer(raw, dtype="<f8").astype(np.float64)
    if not np.isfinite(values).all():
        raise ConfigurationError(f"training checkpoint: {name}: expected finite numbers.")
    return values


def _weights(values: Floats) -> Floats:
    if (np.abs(values) > LARGEST_WEIGHT).any() or (values * WEIGHT_GRID % 1.0 != 0).any():
        raise ConfigurationError("training checkpoint: weights: expected multiples of 2^-24, at most 2^20.")
    return values
