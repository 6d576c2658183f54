"""Two pictures of the PromptPATE benchmark: consensus of the teachers, and utility against queries. Asks no model.

Everything drawn is released: noisy votes, labels, and what students made of them; the lines called "NOT PRIVATE" aside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from _pate_tables import Bounds, Row
from numpy.typing import NDArray


@dataclass(frozen=True)
class Curve:
    """Utility of the first inputs of a run.

    Attributes:
      name: of the teachers.
      queries: numbers of inputs.
      epsilons: honest epsilon of a run of so many inputs.
      accuracies: by number of inputs, the accuracy of the student of each repeat that has one.
      shots: of the students.
    """

    name: str
    queries: tuple[int, ...]
    epsilons: tuple[float, ...]
    accuracies: tuple[tuple[float, ...], ...]
    shots: int

    def to_dict(self) -> dict[str, Any]:
        """Returns the numbers as JSON values."""
        return {
            "teachers": self.name,
            "student_shots": self.shots,
            "queries": list(self.queries),
            "epsilons": list(self.epsilons),
            "accuracies": [list(found) for found in self.accuracies],
        }


def pictures(measured: Mapping[str, tuple[Bounds, Sequence[Row], Curve]], folder: Path) -> list[Path]:
    """Draws both pictures, a panel per setting; returns the files, none without matplotlib."""
    try:
        import matplotlib as mpl
    except ImportError:
        return []
    mpl.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    return [
        _drawn(measured, _consensus, folder / "pate_consensus.png"),
        _drawn(measured, _queries, folder / "pate_queries.png"),
    ]


def _drawn(measured: Mapping[str, Any], panel: Any, path: Path) -> Path:
    import matplotlib.pyplot as plt

    columns = min(3, len(measured))
    lines = -(-len(measured) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(5.2 * columns, 3.6 * lines), squeeze=False, layout="tight")
    for place, axis in enumerate(axes.flat):
        axis.set_visible(place < len(measured))
    for axis, (name, found) in zip(axes.flat, measured.items(), strict=False):
        panel(axis, *found)
        axis.set_title(name)
        axis.legend(fontsize=7)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def _consensus(axis: Any, _: Bounds, rows: Sequence[Row], __: Curve) -> None:
    """How many teachers agree, as far as noise lets it be seen."""
    for row in rows:
        shares: NDArray[np.float64] = np.concatenate([run.consensus for run in row.runs])
        axis.hist(shares, bins=np.linspace(0.0, 1.3, 27), histtype="step", lw=1.5, label=row.teaching.name)
    axis.axvline(0.5, color="grey", ls="--", label="half the teachers")
    axis.set_xlabel("largest noisy votes / teachers")
    axis.set_ylabel("public inputs")


def _queries(axis: Any, bounds: Bounds, _: Sequence[Row], curve: Curve) -> None:
    """Accuracy of the student by number of labelled inputs, with what each number costs."""
    points = [(at, 100 * np.array(found)) for at, found in zip(curve.queries, curve.accuracies, strict=True) if found]
    middle, width = [found.mean() for _, found in points], [found.std() for _, found in points]
    axis.errorbar([at for at, _ in points], middle, yerr=width, marker="o", capsize=3, label=curve.name)
    axis.axhline(100 * bounds.free.mean(), ls=":", color="C1", label="zero-shot")
    axis.axhline(100 * bounds.upper[curve.shots].mean(), ls="-.", color="C3", label="best private prompt: NOT PRIVATE")
    axis.set_xscale("log")
    axis.minorticks_off()
    axis.set_ylim(0, 100)
    axis.set_xticks(
        curve.queries, [f"{at}\n{cost:.2g}" for at, cost in zip(curve.queries, curve.epsilons, strict=True)], fontsize=7
    )
    axis.set_xlabel("labelled inputs, and the epsilon of a run of so many")
    axis.set_ylabel(f"{curve.shots}-shot student, % right")
