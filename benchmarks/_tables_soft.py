"""Cells of trained prompts (PromptDPSGD, Duan et al.): where torch and a base model are at hand."""

from __future__ import annotations

import argparse
import importlib.util
import math
from pathlib import Path
from typing import Any

from _tables_cells import NON_PRIVATE, ZERO, Cell
from _tables_files import DataFile
from _tables_room import Knobs, Result, Room, delta_of

from langchain_dpicl.soft_prompts.plan import TrainingPlan, plan_training

SOFT_KNOBS: dict[str, Any] = {
    "questions": 400,
    "prompt": "soft_prompt",
    "steps": 60,
    "batch": 128,
    "clip": 0.1,
    "rate": 0.02,
    "optimizer": "adam",
    "schedule": "linear",
    "virtual_tokens": 8,
    "length": 40,
}
"""As in `bench_soft_prompts`."""


class SoftModels:
    """The base model, read the first time it is asked for.

    Args:
      folder: of a masked model; None: there is none.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._read: tuple[Any, Any] | None = None

    @property
    def absent(self) -> str:
        """Why prompts cannot be trained here; "" where they can."""
        without = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
        if without:
            return f"{' and '.join(without)} not installed: pip install 'langchain-dpicl[hf]'"
        if self.folder is None:
            return "no base model: `make bench-soft-prompts` makes one, or give --soft-model FOLDER"
        return ""

    @property
    def name(self) -> str:
        """What cells say of the model."""
        return "none" if self.folder is None else self.folder.name

    def get(self) -> tuple[Any, Any]:
        """Returns model and tokenizer."""
        if self._read is None:
            import transformers

            transformers.logging.disable_progress_bar()
            options: dict[str, Any] = {"local_files_only": True}
            try:
                model = transformers.AutoModelForMaskedLM.from_pretrained(self.folder, **options)
                self._read = model, transformers.AutoTokenizer.from_pretrained(self.folder, **options)
            except (OSError, ValueError) as error:
                raise SystemExit(
                    f"--soft-model: expected the folder of a masked model, found {type(error).__name__} in reading it"
                ) from error
        return self._read


def found_base(kept: Path) -> Path | None:
    """Returns the folder of the base model that `bench_soft_prompts` made last; None where there is none."""
    made = sorted(kept.glob("base-*/made.json"), key=lambda path: path.stat().st_mtime)
    return made[-1].parent if made else None


def soft_prompt(room: Room, cell: Cell, knobs: Knobs, models: SoftModels) -> Result:
    """Measures a trained prompt."""
    from _soft_task import soft_task
    from _soft_utility import SoftBench

    def made() -> SoftBench:
        task = soft_task(room.file.path, limit=knobs["questions"], length=knobs["length"], seed=cell.seed)
        return SoftBench(*models.get(), task, argparse.Namespace(**knobs))

    bench = room.once(("soft", str(knobs)), made)
    if cell.at == ZERO:
        return {"accuracy": bench.zero_shot()}
    epsilon = math.inf if cell.at == NON_PRIVATE else float(cell.at)
    return {"accuracy": bench.accuracy(bench.trained(knobs["prompt"], epsilon))}


def soft_cost_plan(file: DataFile, knobs: Knobs) -> TrainingPlan:
    """Returns a plan to count gradients by; the number of weights does not change it."""
    return plan_training(
        file.train,
        epsilon=4.0,
        delta=delta_of(file.train),
        expected_batch_size=min(knobs["batch"], file.train),
        l2_clip_norm=knobs["clip"],
        width=knobs["virtual_tokens"],
        steps=knobs["steps"],
        is_rough=True,
    )
