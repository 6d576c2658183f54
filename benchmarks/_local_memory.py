"""The peak memory of one way to write, each in a process of its own.

    python benchmarks/_local_memory.py '{"way": "ours", "size": {...}, "device": "cpu", "dtype": "float32"}'

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
from _local_model import Size
from _local_runs import Place

MEBIBYTE = 2**20
WAYS = ("ours", "plain")


def peak_of(way: str, size: Size, *, device: str, dtype: str) -> dict[str, float]:
    """Returns what `measured` finds in a fresh process."""
    asked = json.dumps({"way": way, "size": dataclasses.asdict(size), "device": device, "dtype": dtype})
    done = subprocess.run(  # noqa: S603  this file, by this Python
        [sys.executable, str(Path(__file__).resolve()), asked], check=True, capture_output=True, text=True
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def measured(way: str, size: Size, *, device: str, dtype: str) -> dict[str, float]:
    """Returns MiB: at most, and beyond what stood there when the model was made."""
    place = Place(size, device=device, dtype=getattr(torch, dtype))
    ready = place.ours("recentered_clip") if way == "ours" else place.plain()
    job = ready()
    gc.collect()
    _forget_peak(device)
    before = _peak(device)
    job()
    return {"peak": _peak(device), "beyond": _peak(device) - before}


def _forget_peak(device: str) -> None:
    """Starts to look for the peak from here: making the model took memory that is free again."""
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        return
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        print("the peak includes the making of the model: it cannot be reset here", file=sys.stderr)


def _peak(device: str) -> float:
    if device != "cpu":
        return torch.cuda.max_memory_allocated() / MEBIBYTE
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text(encoding="ascii").splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) / 1024
    import resource  # other systems know no better

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (MEBIBYTE if sys.platform == "darwin" else 1024)


def main() -> None:
    asked: dict[str, Any] = json.loads(sys.argv[1])
    found = measured(asked["way"], Size(**asked["size"]), device=asked["device"], dtype=asked["dtype"])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
