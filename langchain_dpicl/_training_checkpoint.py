"""The file from which training goes on: released state only, as JSON text. Knows no record, no sum and no model.

Vectors are the base64 of their little-endian float64 bytes, so that a run goes on with the same bits; nothing in the
file is executed or unpickled, and a file from a stranger is checked and compared before anything is paid for.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from langchain_dpicl._optimizers import LARGEST_WEIGHT, WEIGHT_GRID, Floats, OptimizerState
from langchain_dpicl._released_files import FileForm, plain, text_in, write_whole
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy._validate import check_int, fail

_TERMS = ("component", "ledger_id", "dataset_id", "adjacency")
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
        write_whole(path, _FORM.text({**terms, "public": dict(self.public), "step": self.state.step, **vectors}))

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, width: int, num_moments: int) -> Checkpoint:
        """Reads a file that `save` wrote, and nothing else.

        Args:
          path: the file.
          width: length of every vector.
          num_moments: how many vectors stand beside the weights.

        Raises:
          ConfigurationError: the content is not what `save` writes for such a run.
          OSError: the file is missing or unreadable.
        """
        found = _FORM.read(text_in(path))
        terms = {name: found[name] for name in _TERMS}
        if not all(isinstance(value, str) for value in terms.values()):
            raise fail("training checkpoint", "text under " + ", ".join(_TERMS), "another type")
        moments = found["moments"]
        if not isinstance(moments, list) or len(moments) != num_moments:
            number = len(moments) if isinstance(moments, list) else type(moments).__name__
            raise fail("training checkpoint: moments", f"a list of {num_moments} vectors", number)
        state = OptimizerState(
            check_int("training checkpoint: step", found["step"], low=0),
            _weights(_vector("weights", found["weights"], width)),
            tuple(_vector(f"moments[{place}]", moment, width) for place, moment in enumerate(moments)),
        )
        return cls(**terms, public=plain("training checkpoint: public", found["public"]), state=state)

    def check_is_of(self, *, component: str, ledger_id: str, dataset_id: str, adjacency: str, public: Any) -> None:
        """Refuses to go on as another run: on another ledger, of other examples, of another plan or model.

        Raises:
          ConfigurationError: a term differs.
        """
        wanted = (component, ledger_id, dataset_id, adjacency)
        other = [name for name, value in zip(_TERMS, wanted, strict=True) if getattr(self, name) != value]
        shown = json.loads(json.dumps(dict(public)))  # tuples are lists in files
        other += sorted(key for key in {*self.public, *shown} if self.public.get(key) != shown.get(key))
        if other:
            advice = "Take another file for this run, or give the plan, model and ledger that the file was made with."
            raise fail("checkpoint", "the state of this very run", f"another in {other}", advice)


def checked_path(path: Any) -> Path | None:
    """Returns the path of a checkpoint that can be written.

    Raises:
      ConfigurationError: no path, or a folder that is missing or cannot be written.
    """
    if path is None:
        return None
    if not isinstance(path, str | os.PathLike):
        raise fail("checkpoint", "the path of a file, or None", type(path).__name__)
    found = Path(path)
    if not found.parent.is_dir() or not os.access(found.parent, os.W_OK) or found.is_dir():
        raise fail("checkpoint", "a file in a folder that exists and can be written", str(found))
    return found


def _text(values: Floats) -> str:
    return base64.b64encode(values.astype("<f8").tobytes()).decode("ascii")


def _vector(name: str, text: object, width: int) -> Floats:
    """Returns a vector of a file, its length and its numbers checked."""
    raw = b""
    if isinstance(text, str):
        try:
            raw = base64.b64decode(text.encode("ascii", "replace"), validate=True)
        except binascii.Error:
            raw = b""
    if len(raw) != 8 * width:
        raise ConfigurationError(f"training checkpoint: {name}: expected the base64 of {width} float64 numbers.")
    values = np.frombuffer(raw, dtype="<f8").astype(np.float64)
    if not np.isfinite(values).all():
        raise ConfigurationError(f"training checkpoint: {name}: expected finite numbers.")
    return values


def _weights(values: Floats) -> Floats:
    if (np.abs(values) > LARGEST_WEIGHT).any() or (values * WEIGHT_GRID % 1.0 != 0).any():
        raise ConfigurationError("training checkpoint: weights: expected multiples of 2^-24, at most 2^20.")
    return values
