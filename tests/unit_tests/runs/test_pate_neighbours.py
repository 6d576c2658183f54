"""Labels over neighbouring data sets and hostile texts.

Where a noisy test decides about tickets, its threshold is out of everybody's reach.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from langchain_dpicl import Budget, LabelAnswers, Noise, PrivateExamples, PromptPATELabeler, Rows
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.options import ConfidentGNMax
from langchain_dpicl.privacy.ledger.store import InMemoryStore
from langchain_dpicl.released.labelled_pool import LabelledPool
from langchain_dpicl.runs import release_run
from tests import pate_plants as pate
from tests.contracts.neighbours import (
    BREAKS_THE_CALL,
    HOSTILE,
    PLAIN,
    PLANTS,
    Fragile,
    NeighbourContract,
    fault,
    fixed_coins,
    owned,
    unstamped,
)
from tests.contracts.release_run import entries_in

pytestmark = pytest.mark.usefixtures("free_prices")

SLOTS = Rows(slots=3, shots=2)
FIXED = {"rows": SLOTS.replace(sampling="partition"), "adjacency": "replace_one"}
ONCE = {"rows": SLOTS.replace(redraw_every="run")}
ALL_PASS, NONE_PASSES = ConfidentGNMax(-1e5, 2.0, 3.0), ConfidentGNMax(1e5, 2.0, 3.0)
QUIET, ALIKE = Noise(multiplier=2.0), LabelAnswers(calibrate=False)
DESIGNS: dict[str, dict[str, Any]] = {
    "fresh units": {"rows": Rows(units=6)},
    "fresh slots, histograms": {
        "rows": SLOTS,
        "noise": QUIET.replace(mechanism="gaussian"),
        "answers": ALIKE.replace(votes="soft"),
    },
    "fresh slots, none passes": {"rows": SLOTS, "noise": NONE_PASSES},
    "one sample": {**ONCE, "noise": QUIET.replace(mechanism="permute_and_flip")},
    "one sample, all pass": {**ONCE, "noise": ALL_PASS.replace(max_answers=2)},
    "fixed, calibrated": {**FIXED, "answers": ALIKE.replace(calibrate=True)},
    "fixed, all pass": {**FIXED, "noise": ALL_PASS.replace(max_answers=2)},
    "fixed, none passes": {**FIXED, "noise": NONE_PASSES.replace(max_answers=2)},
}
OUTAGE = "RAISES, in public"
RELEASED = ("labelled", "rejected")


class Scene:
    """One data set, its ledger and its file; starts as often as it is asked to."""

    def __init__(self, texts: tuple[str, ...], *, design: str, path: Path, users: str | None = None) -> None:
        self.options = {**DESIGNS[design]}
        self.engine, self.store, self.path = Fragile(), InMemoryStore(), path
        adjacency = self.options.pop("adjacency", "add_remove")
        self.budget = Budget(epsilon=50, delta=1e-4, adjacency=adjacency, store=self.store)
        records = owned([{"text": text, "answer": "no"} for text in texts], users)
        given: dict[str, Any] = {"labels": ("yes", "no", "maybe"), "public_size": 6, "unit_key": users and "user"}
        self.private = PrivateExamples(records, label_key="answer", **given)

    def start(self) -> PromptPATELabeler:
        return PromptPATELabeler.from_private_examples(
            self.private,
            llm=self.engine,
            budget=self.budget,
            epsilon=40,
            public_inputs=["how long?", OUTAGE, "why?"],
            max_queries=3,
            checkpoint=self.path,
            **{"noise": QUIET, "answers": ALIKE, **self.options},
        )

    def asked(self) -> list[Any]:
        """What the engine is asked: the size of every call where rows are public, else the calls without a record."""
        if self.options["rows"].units is None:
            return [len(prompts) for prompts in self.engine.calls]
        return [prompts for prompts in self.engine.calls if len(prompts) == 1 and prompts[0].count("answer:") == 1]


def _masked(found: Any) -> Any:
    """A value without what the noise decides, and without stamps and hashes."""
    if isinstance(found, dict):
        if found.get("status") in RELEASED:
            votes = found["votes"] and list(found["votes"])
            assert (found["label"] in {"yes", "no", "maybe"}) == (found["status"] == "labelled")
            found = {**found, "status": "released", "label": "", "votes": votes}
        return {key: _masked(value) for key, value in unstamped(found).items()}
    return [_masked(value) for value in found] if isinstance(found, (list, tuple)) else found


class TestLabelling(NeighbourContract):
    """A run that labels public inputs, with an outage, a refusal and a second start from its file."""

    designs = DESIGNS
    owned_designs = ("fresh units", "fresh slots, histograms", "one sample")
    async_designs = ("one sample", "fixed, all pass")
    planted_design = "fresh slots, histograms"
    plants: ClassVar[Any] = {
        **PLANTS,
        "failed rows are tried again": (pate.redrawn_until_all_voted, "FAILS"),
        "inputs without votes are free": (pate.free_where_nobody_votes, "FAILS"),
        "a run stops where nobody votes": (pate.stops_at_disagreement, "FAILS"),
    }
    progress = release_run

    @classmethod
    def scene(cls, texts: tuple[str, ...], *, design: str, path: Path, users: str | None) -> Scene:
        return Scene(texts, design=design, path=path / "labels.json", users=users)

    @classmethod
    def steps(cls, scene: Scene, *, is_async: bool) -> Iterator[Any]:
        """Yields what is seen of a run that is interrupted and started again, and of single inputs."""
        labeler = scene.start()

        def run() -> LabelledPool:
            return asyncio.run(labeler.arun(progress=True)) if is_async else labeler.run(progress=True)

        for action in (
            run,
            lambda: labeler.label(7j),
            lambda: labeler.label(OUTAGE),
            lambda: labeler.label("who?"),
            lambda: labeler.label("why?"),
            lambda: labeler.label("one too many"),
            run,
        ):
            try:
                found = action()
                yield _masked(json.loads(found.to_json()) if isinstance(found, LabelledPool) else found.to_dict())
            except Exception as error:
                yield fault(error)
            yield [labeler.queries_left, repr(labeler), _masked(entries_in(scene.path))]
        again = scene.start()
        yield _masked(json.loads(again.result.to_json()))
        yield [again.queries_left, repr(again), repr(again.rows), again.plan.to_dict(), repr(again.cost())]
        yield [repr(scene.private), repr(scene.budget), scene.private.declaration]

    @classmethod
    def calls(cls, scene: Scene) -> Any:
        return scene.asked()

    def is_compared(self, design: str, record: str) -> bool:
        return record in BREAKS_THE_CALL or " pass" not in design

    def is_seen(self, error: Exception, record: str) -> bool:
        """Labels that no ticket paid for are refused at the restart."""
        return isinstance(error, ConfigurationError) and "paid for on this ledger" in str(error)

    @pytest.mark.parametrize("design", DESIGNS)
    def test_what_is_compared_holds_labels_files_and_every_kind_of_fault(self, design: str) -> None:
        seen = json.loads(self.usual(design))
        steps, files = seen[:14:2], [shown[2] for shown in seen[1:14:2]]
        paid = DESIGNS[design]["noise"].max_answers if "all pass" in design else 3
        assert [one[0] if isinstance(one, list) else one.get("status", "pool") for one in steps] == [
            "RunInterruptedError",
            "ConfigurationError",
            "ModelCallError",
            "released",
            "released" if paid == 3 else "PrivacyBudgetExceededError",
            "PrivacyBudgetExceededError",
            "pool",
        ]
        assert "1 of 3 inputs are released" in steps[0][1]
        done = [[entry["status"] for entry in file].count("released") for file in files]
        assert done == [1, 1, 1, 2, paid, paid, paid]
        assert seen[-1][:2] == {
            "fresh units": [[f"text: {query}\nanswer:"] for query in ("how long?", OUTAGE)],
            "fixed, calibrated": [2, 6],
        }.get(design, [1, 3]), "a public call, then one for the declared slots"


# --- one record, one row ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("record", HOSTILE)
@pytest.mark.parametrize("design", ["fresh units", "one sample", "fixed, calibrated"])
def test_a_hostile_record_moves_its_own_row_alone(
    design: str, record: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The last unit stands in the last row, for every input; every other row stays the same to the last bit."""
    matrices = fixed_coins(monkeypatch)
    for text in ("one more", HOSTILE[record]):
        labeler = Scene((*PLAIN, text), design=design, path=tmp_path / f"{len(matrices)}.json").start()
        for given in ("how long?", "why?"):
            labeler.label(given)
    usual_rows, rows = matrices[:2], matrices[2:]
    for before, after in zip(usual_rows, rows, strict=True):
        assert after.shape == before.shape
        assert after[:-1].tobytes() == before[:-1].tobytes()
        sums = [labeler.plan.release.bound(found, width=3).value for found in (before, after)]
        allowed = labeler.plan.release.aggregation.sensitivity(row_shape="slots", adjacency="replace_one")
        move = sums[1] - sums[0]
        assert np.linalg.norm(move) <= allowed.l2
        assert max(move.max(), 0.0) - min(move.min(), 0.0) <= allowed.range
        assert abs(sums[1].max() - sums[0].max()) <= allowed.linf
    if record in {"fails", *BREAKS_THE_CALL}:
        assert not any(after[-1].any() for after in rows)
