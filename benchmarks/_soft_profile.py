"""Where the time of our training steps goes: the model, and everything beside it. Looks on; changes no result."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from _local_profile import Watch, replaced
from _soft_speed import Track

from langchain_dpicl.backends.tuning.engine import MicroBatches, PromptEngine
from langchain_dpicl.privacy.extensions.gradient_sums import RunningSum
from langchain_dpicl.privacy.mechanisms.release_plan import GaussianMechanism
from langchain_dpicl.soft_prompts.plan import Optimizer

MODEL, REST = "model", "all other Python"
PARTS = {
    MODEL: "forward and backward of the rows",
    "engine": "chunks, locks, means of units around them",
    "reading": "texts to ids",
    "clip and sum": "each row clipped by itself, exact sum",
    "noise": "private coins, one per parameter",
    "update": "optimizer and grid of the weights",
    REST: "tickets, sample, records, ledger, callbacks",
}
_PLACES: tuple[tuple[str, Any, str], ...] = (
    ("engine", PromptEngine, "gradients"),
    (MODEL, MicroBatches, "gradients"),
    ("reading", MicroBatches, "read"),
    ("clip and sum", RunningSum, "add"),
    ("noise", GaussianMechanism, "release"),
    ("update", Optimizer, "update"),
)


def shares(track: Track, method: str, *, steps: int) -> dict[str, float]:
    """Returns the seconds that each part of a step took, as a mean over `steps`."""
    watch = Watch(track.wait)
    with ExitStack() as stack:
        for name, holder, attribute in _PLACES:
            stack.enter_context(replaced(holder, attribute, watch.wrapped(name, getattr(holder, attribute))))
        job = track.ready("ours", method, steps=steps + 1)()
        job()
        watch.spent.clear()
        with watch.part(REST):
            for _ in range(steps):
                job()
    return {name: watch.spent[name] / steps for name in PARTS}


def table(spent: Mapping[str, Mapping[str, float]]) -> str:
    """Returns the parts by method, as shares and milliseconds of a step."""
    lines = [f"{'part':<18}" + "".join(f"{method + ' %':>16}{'ms':>8}" for method in spent) + "  what"]
    for name, what in PARTS.items():
        cells = "".join(
            f"{100 * one[name] / sum(one.values()):>16.2f}{1000 * one[name]:>8.2f}" for one in spent.values()
        )
        lines.append(f"{name:<18}{cells}  {what}")
    return "\n".join(lines)
