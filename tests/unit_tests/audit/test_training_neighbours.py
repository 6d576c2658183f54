"""Training steps over neighbouring data sets and hostile texts: nothing is seen but under the noise, and one clip."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from langchain_dpicl import Budget, PrivateExamples
from langchain_dpicl.backends.base import TrainingExample
from langchain_dpicl.backends.rows import gradient_rows
from langchain_dpicl.exceptions import ModelCallError, RunInterruptedError
from langchain_dpicl.options import Noise, Training
from langchain_dpicl.privacy.extensions.gradient_sums import RunningSum
from langchain_dpicl.privacy.ledger.store import InMemoryStore
from langchain_dpicl.privacy.mechanisms.release_plan import PoissonUnits
from langchain_dpicl.release.curator import NOT_COMPUTED
from langchain_dpicl.runs import release_run
from langchain_dpicl.soft_prompts.plan import ExampleFields
from langchain_dpicl.soft_prompts.trainer import PromptDPSGD
from tests.contracts.neighbours import (
    HOSTILE,
    OTHER_SIZES,
    PLAIN,
    NeighbourContract,
    fault,
    owned,
    unguarded,
    unstamped,
)
from tests.contracts.release_run import entries_in
from tests.gradient_doubles import LABELS, PUBLIC, LogisticEngine, features, prepared

pytestmark = pytest.mark.usefixtures("free_prices")

DESIGNS: dict[str, dict[str, Any]] = {
    "adam": {},
    "sgd, few": {"optimizer": "sgd", "schedule": "linear", "expected_batch_size": 1},
    "replaced": {"expected_batch_size": 6},
}

STOPPED = (
    "PromptDPSGD stopped: {}. {} of 4 steps are released and kept; tickets that burnt stay charged. Call run() on "
    "error.run to continue."
)


def private_of(texts: tuple[str, ...], users: str | None, *, records_per_unit: int) -> PrivateExamples:
    records = owned([{"text": text, "label": "good"} for text in texts], users)
    unit = {} if users is None else {"unit_key": "user", "records_per_unit": records_per_unit}
    return PrivateExamples(records, label_key="label", labels=LABELS, public_size=6, **unit)


class Scene:
    """One data set, its ledger and its file; starts as often as it is asked to."""

    def __init__(self, texts: tuple[str, ...], *, design: str, path: Path, users: str | None = None) -> None:
        self.training = Training(
            **{"expected_batch_size": 3, "steps": 4, "validation": PUBLIC, "validate_every": 2, **DESIGNS[design]}
        )
        adjacency = "replace_one" if design == "replaced" else "add_remove"
        self.store, self.path = InMemoryStore(), path
        self.budget = Budget(epsilon=50, delta=1e-4, adjacency=adjacency, store=self.store)
        self.private = private_of(texts, users, records_per_unit=2)
        self.engine = LogisticEngine()
        self.engine.losses = lambda weights, examples: np.arange(len(examples))  # type: ignore[method-assign]

    def start(self) -> PromptDPSGD:
        made = prepared(
            self.private,
            engine=self.engine,
            budget=self.budget,
            epsilon=40,
            training=self.training,
            noise=Noise(multiplier=2.0),
            checkpoint=self.path,
            block=2,
        )
        is_out = [True]

        def outage() -> None:
            if made.step == 1 and is_out:
                is_out.clear()
                raise ModelCallError("no memory for public texts.")

        self.engine.at_gradients = outage
        return made


def _masked(found: Any) -> Any:
    """A value without the numbers that were released, and without stamps and hashes."""
    if isinstance(found, dict):
        found = {key: value for key, value in found.items() if key not in {"digest", "arrays"}}
        return {key: _masked(value) for key, value in unstamped(found).items()}
    return [_masked(value) for value in found] if isinstance(found, (list, tuple)) else found


def _counted(patch: pytest.MonkeyPatch) -> None:
    real = RunningSum.total

    def total(self: Any) -> Any:
        logging.getLogger("langchain_dpicl").warning("%d rows", self._num_rows)
        return real(self)

    patch.setattr(RunningSum, "total", total)


def _no_update_without_rows(patch: pytest.MonkeyPatch) -> None:
    ask, keep, groups = PromptDPSGD._ask, PromptDPSGD._keep, []
    patch.setattr(PromptDPSGD, "_ask", lambda self, given: groups.append(given) or ask(self, given))
    patch.setattr(
        PromptDPSGD,
        "_keep",
        lambda self, *given: keep(self, *given) if groups[-1] else None,
    )


def _skips_steps_without_rows(patch: pytest.MonkeyPatch) -> None:
    real = PromptDPSGD._ask

    def ask(self: Any, groups: Any) -> Any:
        if not groups:
            raise ValueError("an empty batch")
        return real(self, groups)

    patch.setattr(PromptDPSGD, "_ask", ask)


def _private_loss_in_the_bar(patch: pytest.MonkeyPatch) -> None:
    real = PromptDPSGD._ask

    def ask(self: Any, groups: Any) -> Any:
        release_run.tqdm.shown.append(f"loss of {len([group for group in groups if group])}")
        return real(self, groups)

    patch.setattr(PromptDPSGD, "_ask", ask)


class TestTraining(NeighbourContract):
    """A training run with an outage, a second start from its file and public validation."""

    designs = DESIGNS
    owned_designs = ("adam",)
    async_designs = ("adam",)
    planted_design = "replaced"  # all of six records are in every sample; none is where there are no records
    plants: ClassVar[Any] = {
        "the error of a row goes on": (unguarded(gradient_rows), "RAISES"),
        "rows are logged": (_counted, ""),
        "an empty batch moves nothing": (_no_update_without_rows, ""),
        "an empty batch is no step": (_skips_steps_without_rows, ""),
        "a private loss is shown": (_private_loss_in_the_bar, ""),
    }
    sizes: ClassVar[Any] = {**OTHER_SIZES, "sixty without numbers": ("NUMBERS",) * 60}
    progress = release_run

    @classmethod
    def scene(cls, texts: tuple[str, ...], *, design: str, path: Path, users: str | None) -> Scene:
        return Scene(texts, design=design, path=path / "state.json", users=users)

    @classmethod
    def steps(cls, scene: Scene, *, is_async: bool) -> Iterator[Any]:
        """Yields what is seen of a run that an outage interrupts, and that is started again from its file."""
        made = scene.start()
        for again in (False, False, True):
            made = scene.start() if again else made
            try:
                prompt = asyncio.run(made.arun(progress=True)) if is_async else made.run(progress=True)
                yield [repr(prompt), _masked(prompt.report), {name: a.shape for name, a in prompt.arrays.items()}]
            except Exception as error:
                yield fault(error)
            yield [made.step, made.steps_left, repr(made), _masked(entries_in(scene.path))]
            told: list[Any] = []
            try:
                for step in made.stream():
                    told.append(repr(step))  # noqa: PERF401  kept where the stream raises
            except Exception as error:
                told += fault(error)
            yield [told, repr(made.plan.cost()), made.plan.to_dict()]
        yield [repr(scene.private), repr(scene.budget), scene.private.declaration]

    def is_seen(self, error: Exception, record: str) -> bool:
        """Neither is heard of where records are plain."""
        texts = {record, STOPPED.format(NOT_COMPUTED.rstrip("."), 0)}
        return isinstance(error, (RuntimeError, RunInterruptedError)) and str(error) in texts

    def test_what_is_compared_holds_steps_files_bars_and_an_outage(self) -> None:
        seen = json.loads(self.usual("adam"))
        assert seen[0][:2] == [
            "RunInterruptedError",
            STOPPED.format("no memory for public texts", 1),
        ]
        assert [shown[0] for shown in seen[0:9:3]] == ["RunInterruptedError"] * 3
        assert [shown[:2] for shown in seen[1:9:3]] == [[1, 2], [3, 0], [3, 0]]
        assert [shown[3][-1]["step"] for shown in seen[1:9:3]] == [1, 3, 3]
        ended = [told.index("RunInterruptedError") for told, *_ in seen[2:9:3]]
        assert ended == [2, 0, 0]
        kinds = [kind for kind, _ in seen[12]]
        assert kinds.count("commit") == 3
        assert [data["tickets"] for name, data in seen[11] if name == "dpicl.charged"] == [2, 2]
        assert "public validation loss 0.5" in seen[14]


# --- one unit, one clipped row ----------------------------------------------------------------------------------------


class Wild(LogisticEngine):
    """Gradients as long as a text says, whatever the prompt."""

    def _gradient(self, parameters: np.ndarray, example: TrainingExample) -> np.ndarray:
        row = super()._gradient(parameters, example)
        if "HUGE" in example.text:
            return row + 1e300
        if "TINY" in example.text:
            return row * 0 + 1e-300
        if "BACK" in example.text:
            return -1e9 * (1 + features("good", self.width))
        return row


def rows_and_sum(
    texts: tuple[str, ...], patch: pytest.MonkeyPatch, users: str | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Takes one step with every unit in its sample; returns the rows as they are added, and the bounded sum."""
    rows: list[np.ndarray] = []
    sums: list[np.ndarray] = []
    real_add, real_total = RunningSum.add, RunningSum.total

    def add(self: Any, given: Any) -> None:
        rows.extend(np.array(given))
        real_add(self, given)

    def total(self: Any) -> Any:
        found = real_total(self)
        sums.append(found.value.copy())
        return found

    with patch.context() as inner:
        inner.setattr(RunningSum, "add", add)
        inner.setattr(RunningSum, "total", total)
        inner.setattr(PoissonUnits, "draw", lambda self, n, *, rng: tuple((unit,) for unit in range(n)))
        private = private_of(texts, users, records_per_unit=4)
        budget = Budget(epsilon=50, delta=1e-4)
        shape = Training(steps=1, expected_batch_size=3)
        prepared(private, engine=Wild(), budget=budget, epsilon=40, training=shape, noise=Noise(multiplier=2.0)).run()
    return np.array(rows), sums[-1]


GRADIENTS = {**HOSTILE, "huge": "HUGE", "tiny": "TINY", "backwards": "BACK", "two faults": "NUMBERS HUGE"}


@pytest.mark.parametrize("record", GRADIENTS)
def test_a_hostile_record_moves_its_own_row_alone_and_by_no_more_than_the_clip(
    record: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last unit gives the last row; every other row stays the same to the last bit. Sums are in clips."""
    usual_rows, usual_sum = rows_and_sum((*PLAIN, "one more"), monkeypatch)
    rows, changed = rows_and_sum((*PLAIN, GRADIENTS[record]), monkeypatch)
    assert np.array(rows[:5]).tobytes() == np.array(usual_rows[:5]).tobytes()
    _, without = rows_and_sum(PLAIN, monkeypatch)
    assert np.linalg.norm(changed - usual_sum) <= 2.0
    assert np.linalg.norm(changed - without) <= 1.0
    if record in {"fails", "raises", "exits", "raises outside Exception", "is not a number", "two faults"}:
        assert changed.tobytes() == without.tobytes()


@pytest.mark.parametrize(
    "texts",
    [("HUGE",) * 4, ("NUMBERS", "good", "good", "good"), ("RAISES",) * 4, ("BACK", "HUGE", "good", "TINY"), ("x",) * 9],
    ids=["huge", "one without numbers", "raising", "mixed", "more than are kept"],
)
def test_a_user_of_many_records_moves_the_sum_by_no_more_than_one_clip(
    texts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    others = "bcdef"
    _, without = rows_and_sum(PLAIN, monkeypatch, users=others)
    rows, changed = rows_and_sum((*PLAIN, *texts), monkeypatch, users=others + "a" * len(texts))
    assert len(rows) <= 6
    assert np.linalg.norm(changed - without) <= 1.0


def test_records_that_are_clipped_one_by_one_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plant: every record is a row, as in most training code; a user of four then moves the sum by four clips."""
    real = LogisticEngine.gradients

    def each(self: Any, parameters: Any, groups: Any, *, add: Any) -> None:
        real(self, parameters, [(example,) for group in groups for example in group or ()], add=add)

    monkeypatch.setattr(LogisticEngine, "gradients", each)
    monkeypatch.setattr(gradient_rows._RowCounter, "add", lambda self, rows: self._total.add(rows))
    _, without = rows_and_sum(PLAIN, monkeypatch, users="bcdef")
    _, changed = rows_and_sum((*PLAIN, *["HUGE"] * 4), monkeypatch, users="bcdefaaaa")
    assert np.linalg.norm(changed - without) > 3.9


def test_an_example_without_its_parts_costs_its_own_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record cannot lack a field; should reading one fail all the same, its unit abstains."""
    real = ExampleFields.examples_of

    def fragile(self: Any, records: Any) -> Any:
        if any(record["text"] == "one more" for record in records):
            raise KeyError("one more")
        return real(self, records)

    _, without = rows_and_sum(PLAIN, monkeypatch)
    monkeypatch.setattr(ExampleFields, "examples_of", fragile)
    _, changed = rows_and_sum((*PLAIN, "one more"), monkeypatch)
    assert changed.tobytes() == without.tobytes()
