"""The peak memory of one way to make a training step, each in a process of its own.

    python benchmarks/_soft_memory.py '{"way": "ours", "method": "prefix", "size": {...}, "device": "cpu"}'

prints one line of JSON. On a processor it is the peak of resident memory, Python and all libraries included; on a GPU
what torch has allocated at most.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from _local_memory import _forget_peak, _peak
from _soft_speed import SpeedSize, Track

_STEPS = 2


def peak_of(way: str, method: str, size: SpeedSize, *, device: str) -> dict[str, float]:
    """Returns what `measured` finds in a fresh process with as many threads."""
    asked = {"way": way, "method": method, "size": dataclasses.asdict(size), "device": device}
    given = json.dumps(asked | {"threads": torch.get_num_threads()})
    done = subprocess.run(  # noqa: S603  this file, by this Python
        [sys.executable, str(Path(__file__).resolve()), given], check=True, capture_output=True, text=True
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def measured(way: str, method: str, size: SpeedSize, *, device: str) -> dict[str, float]:
    """Returns MiB: at most, and beyond what stood there when the model was made."""
    track = Track(size, device=device)
    gc.collect()
    _forget_peak(device)
    before = _peak(device)
    job = track.ready(way, method, steps=_STEPS)()
    if way != "ours":
        track.model = None  # peft works on a copy of its own: one model is counted for everybody
        gc.collect()
        _forget_peak(device)
    for _ in range(_STEPS):
        job()
    return {"peak": _peak(device), "beyond": _peak(device) - before}


def main() -> None:
    asked: dict[str, Any] = json.loads(sys.argv[1])
    torch.set_num_threads(asked["threads"])
    print(json.dumps(measured(asked["way"], asked["method"], SpeedSize(**asked["size"]), device=asked["device"])))


if __name__ == "__main__":
    main()
