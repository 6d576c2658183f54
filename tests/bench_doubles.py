"""What the tests of benchmarks share: a file of records, a model that learns from its prompt, marks of right answers."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np

from langchain_dpicl.backends.fake import FakeBackend


def written(path: Path, rows: Any) -> Path:
    text = "\n".join(json.dumps(row) for row in rows).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def engine(*, is_neutral: bool = False) -> FakeBackend:
    """Says "up" by itself, and "down" of a text that begins so, but only after an example of "down".

    Args:
      is_neutral: whether it says nothing of a text without content, so that calibration changes nothing.
    """

    def reading(prompt: str, prefix: tuple[bytes, ...]) -> dict[str, float]:
        asked = prompt.rpartition("Text: ")[2]
        if is_neutral and asked.startswith("N/A"):
            return {" up": 0.4, " down": 0.4}
        asks_down = asked.startswith("down")
        return {" up": 0.4, " down": 0.5 if "Label: down" in prompt and asks_down else 0.1}

    return FakeBackend(reading, vocabulary=[" up", " down"])


def hits(right: int, of: int = 100) -> Any:
    return np.arange(of) < right
