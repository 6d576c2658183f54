"""How the time of one private text grows with slots, tokens, prompt length and vocabulary, beside `model.generate`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from _local_model import Size
from _local_runs import Place, race

BASE = Size(layers=4, width=256, vocabulary=8_192, slots=10, prompt=200, tokens=50)
"""Smaller than what the goals are measured at, so that all of it is soon done."""
STEPS: dict[str, tuple[int, ...]] = {
    "slots": (2, 10, 40),
    "tokens": (10, 50, 200),
    "prompt": (50, 200, 600),
    "vocabulary": (2_048, 8_192, 50_257),
    "shared": (0, 50, 150),
}
SHOWN = {
    "slots": "slots",
    "tokens": "new tokens",
    "prompt": "prompt tokens",
    "vocabulary": "vocabulary",
    "shared": "of 200 prompt tokens shared",
}


@dataclass(frozen=True)
class Point:
    """One size of one thing: seconds of a private text and of `model.generate`, and the one over the other."""

    value: int
    ours: float
    plain: float
    ratio: float


def grown(*, base: Size = BASE, turns: int = 3, device: str, dtype: Any) -> dict[str, list[Point]]:
    """Returns the points of every thing that grows, all others as in `base`."""
    known: dict[Size, Point] = {}
    found: dict[str, list[Point]] = {}
    for name, values in STEPS.items():
        found[name] = []
        for value in values:
            size = replace(base, **{name: value})
            if size not in known:
                known[size] = _point(size, turns=turns, device=device, dtype=dtype)
            found[name].append(replace(known[size], value=value))
    return found


def _point(size: Size, *, turns: int, device: str, dtype: Any) -> Point:
    place = Place(size, device=device, dtype=dtype)
    ways = {"ours": (place.ours("recentered_clip"), size.tokens), "plain": (place.plain(), size.tokens)}
    times = race(ways, turns=turns)
    return Point(0, times["ours"].median, times["plain"].median, times["ours"].over(times["plain"]))


def table(found: dict[str, list[Point]]) -> str:
    """Returns a line per point."""
    lines = [f"{'':<28}{'size':>8}{'private s':>11}{'plain s':>10}{'ratio':>8}"]
    for name, points in found.items():
        lines += [
            f"{SHOWN[name]:<28}{point.value:>8,}{point.ours:>11.3f}{point.plain:>10.3f}{point.ratio:>8.2f}"
            for point in points
        ]
    return "\n".join(lines)


def picture(found: dict[str, list[Point]], path: Path, *, say: Callable[[str], None]) -> None:
    """Saves a figure, where matplotlib is there."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        say("no figure: matplotlib is not installed (pip install langchain-dpicl[plot])")
        return
    figure = Figure(figsize=(3.2 * len(found), 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (name, points) in zip(figure.subplots(1, len(found), squeeze=False)[0], found.items(), strict=True):
        values = [point.value for point in points]
        axes.plot(values, [point.plain for point in points], "o--", color="0.5", label="model.generate, no privacy")
        axes.plot(values, [point.ours for point in points], "s-", color="tab:blue", label="private text")
        axes.set_xlabel(SHOWN[name])
        axes.set_ylim(0, 1.1 * max(max(point.ours, point.plain) for point in points))
        axes.locator_params(axis="x", nbins=4)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("seconds per text")
    figure.axes[0].legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
