"""Neighbouring data sets and hostile texts: nothing that a record does is seen but in its own row, under the noise.

Of a training run with an outage, a second start from its file and public validation. Coins stay random, so what is
compared is everything beside the released weights: errors, files, reports, events, logs, progress, reprs, ledger lines.
"""

from __future__ import annotations

import asyncio
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from langchain_core.runnables import RunnableLambda

from langchain_dpicl import Budget, PrivateExamples, _progress
from langchain_dpicl._training_options import ExampleFields
from langchain_dpicl.backends import gradients
from langchain_dpicl.backends.base import TrainingExample
from langchain_dpicl.blocks import NOT_COMPUTED
from langchain_dpicl.exceptions import ModelCallError, TrainingInterruptedError
from langchain_dpicl.privacy import accounting
from langchain_dpicl.privacy.gradient_sums import RunningSum
from langchain_dpicl.privacy.sampling import PoissonUnits
from langchain_dpicl.privacy.stores import InMemoryStore
from langchain_dpicl.soft_prompts import PromptDPSGD
from langchain_dpicl.training_run import TrainingRun
from tests.gradient_doubles import LABELS, PUBLIC, LogisticEngine, features
from tests.pate_games import free_price
from tests.unit_tests.test_pate_neighbours import Events, Log, _fault
from tests.unit_tests.test_training_run import Bar
from tests.unit_tests.test_voting_neighbours import HOSTILE as TEXTS
from tests.unit_tests.test_voting_neighbours import ORDER, PLAIN

HOSTILE = {**TEXTS, "bytes that are no text": b"\xff\xfe\x00 good".decode(errors="surrogateescape")}
DESIGNS: dict[str, dict[str, Any]] = {
    "adam": {},
    "sgd, few": {"optimizer": "sgd", "schedule": "linear", "expected_batch_size": 1},
    "replaced": {"adjacency": "replace_one", "expected_batch_size": 6},
}

STOPPED = (
    "Training stopped: {}. {} of 4 steps are made and kept; tickets that burnt stay charged. Call run() on "
    "error.training_run to continue."
)


@pytest.fixture(autouse=True)
def free_prices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounting, "epsilon_bound", free_price)


class Scene:
    """One data set, its ledger and its file; starts as often as it is told to.

    Args:
      texts: the records.
      users: who owns each; None: everybody has one record.
    """

    def __init__(self, texts: tuple[str, ...], *, design: str, path: Path, users: str | None = None) -> None:
        self.options = {"expected_batch_size": 3, **DESIGNS[design]}
        adjacency = self.options.pop("adjacency", "add_remove")
        self.store, self.path = InMemoryStore(), path
        self.budget = Budget(epsilon=50, delta=1e-4, adjacency=adjacency, store=self.store)
        records = [{"text": text, "label": "good"} for text in texts]
        owned: dict[str, Any] = {}
        if users is not None:
            records = [{**record, "user": user} for record, user in zip(records, users, strict=True)]
            owned = {"unit_key": "user", "records_per_unit": 2}
        self.private = PrivateExamples(records, label_key="label", labels=LABELS, public_size=6, **owned)
        self.engine = LogisticEngine()
        self.engine.losses = lambda weights, examples: np.arange(len(examples))  # type: ignore[method-assign]

    def start(self) -> TrainingRun:
        made = PromptDPSGD(self.engine).prepare(
            self.private,
            budget=self.budget,
            epsilon=40,
            noise_multiplier=2.0,
            steps=4,
            validation=PUBLIC,
            validate_every=2,
            checkpoint=self.path,
            reserve_steps=2,
            **self.options,
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
        if "weights" in found and "moments" in found:
            found = {**found, "weights": len(found["weights"]), "moments": [len(one) for one in found["moments"]]}
        return {
            key: _masked(value) for key, value in found.items() if key not in {"sealed_at", "digest", "content_digest"}
        }
    return [_masked(value) for value in found] if isinstance(found, (list, tuple)) else found


def _steps(scene: Scene, *, is_async: bool) -> Iterator[Any]:
    """Yields what is seen of a run that an outage interrupts, and that is started again from its file."""
    made = scene.start()
    for again in (False, False, True):
        made = scene.start() if again else made
        try:
            prompt = asyncio.run(made.arun(progress=True)) if is_async else made.run(progress=True)
            yield [repr(prompt), _masked(prompt.report), {name: a.shape for name, a in prompt.arrays.items()}]
        except Exception as error:
            yield _fault(error)
        yield [made.step, made.steps_left, repr(made), _masked(json.loads(scene.path.read_text()))]
        told: list[Any] = []
        try:
            for step in made.stream():
                told.append(repr(step))  # noqa: PERF401  kept where the stream raises
        except Exception as error:
            told += _fault(error)
        yield [told, repr(made.plan.cost()), made.plan.to_dict()]
    yield [repr(scene.private), repr(scene.budget), scene.private.declaration]


def observe(texts: tuple[str, ...], *, design: str, users: str | None = None, is_async: bool = False) -> str:
    """Everything that anybody but the engine sees of it, as one text without random ids."""
    events, log, bar = Events(), Log(), type("OneBar", (Bar,), {"shown": []})
    logging.getLogger().addHandler(log)
    real, _progress.tqdm = _progress.tqdm, bar
    try:
        with (
            TemporaryDirectory() as folder,
            warnings.catch_warnings(record=True) as warned,
            redirect_stdout(StringIO()) as printed,
            redirect_stderr(printed),
        ):
            warnings.simplefilter("always")
            warnings.simplefilter("ignore", ResourceWarning)  # sockets of other tests, collected meanwhile
            scene = Scene(texts, design=design, path=Path(folder) / "state.json", users=users)
            steps = RunnableLambda(lambda _: list(_steps(scene, is_async=is_async)))
            seen = steps.invoke(None, {"callbacks": [events]})
            seen.append(sorted(path.name for path in Path(folder).iterdir()))
    finally:
        _progress.tqdm = real
        logging.getLogger().removeHandler(log)
    lines = [[line.kind, dict(line.body)] for line in scene.store.records()]
    seen += [events.told, lines, log.lines, bar.shown, [str(one.message) for one in warned], printed.getvalue()]
    return json.dumps(seen, default=repr).replace(scene.budget.ledger_id, "<ledger>").replace(folder, "<folder>")


@cache
def usual(design: str, users: str | None = None, is_async: bool = False) -> str:
    """What is seen of plain records."""
    return observe((*PLAIN, "one more"), design=design, users=users, is_async=is_async)


def test_what_is_compared_holds_steps_files_bars_and_an_outage() -> None:
    seen = json.loads(usual("adam"))
    assert seen[0][:2] == [
        "TrainingInterruptedError",
        STOPPED.format("no memory for public texts", 1),
    ]
    assert [shown[0] for shown in seen[0:9:3]] == ["TrainingInterruptedError"] * 3
    assert [shown[:2] for shown in seen[1:9:3]] == [[1, 2], [3, 0], [3, 0]]
    assert [shown[3]["step"] for shown in seen[1:9:3]] == [1, 3, 3]
    ended = [told.index("TrainingInterruptedError") for told, *_ in seen[2:9:3]]
    assert ended == [2, 0, 0]
    kinds = [kind for kind, _ in seen[12]]
    assert kinds.count("commit") == 3
    assert [data["tickets"] for name, data in seen[11] if name == "dpicl.charged"] == [2, 2]
    assert "public validation loss 0.5" in seen[14]


# --- neighbours -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("record", HOSTILE)
@pytest.mark.parametrize("design", DESIGNS)
def test_a_replaced_record_is_seen_nowhere_but_under_the_noise(design: str, record: str) -> None:
    assert observe((*PLAIN, HOSTILE[record]), design=design) == usual(design)


@pytest.mark.parametrize("design", ["adam", "sgd, few"])
@pytest.mark.parametrize(
    "texts",
    [(), PLAIN[:1], PLAIN, (*PLAIN, ORDER, ORDER), ("FAILS",) * 6, ("RAISES",) * 6, ("NUMBERS",) * 60],
    ids=["none", "one", "five", "seven", "six that fail", "six that raise", "sixty without numbers"],
)
def test_added_and_removed_records_are_seen_nowhere_but_under_the_noise(design: str, texts: tuple[str, ...]) -> None:
    assert observe(texts, design=design) == usual(design)


@pytest.mark.parametrize("users", ["aaaaaa", "aaaaab", "abcdea"])
def test_who_owns_the_records_is_seen_nowhere_but_under_the_noise(users: str) -> None:
    assert observe((*PLAIN, "one more"), design="adam", users=users) == usual("adam", users="abcdef")


@pytest.mark.parametrize("record", ["fails", "raises", "raises outside Exception", "exits", "injection", "empty"])
def test_a_replaced_record_is_seen_nowhere_in_async_code(record: str) -> None:
    assert observe((*PLAIN, HOSTILE[record]), design="adam", is_async=True) == usual("adam", is_async=True)


def _loud(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(gradients, "guarded", lambda action: action())


def _counted(patch: pytest.MonkeyPatch) -> None:
    real = RunningSum.total

    def total(self: Any) -> Any:
        logging.getLogger("langchain_dpicl").warning("%d rows", self._num_rows)
        return real(self)

    patch.setattr(RunningSum, "total", total)


def _no_update_without_rows(patch: pytest.MonkeyPatch) -> None:
    ask, keep, groups = TrainingRun._ask, TrainingRun._keep, []
    patch.setattr(TrainingRun, "_ask", lambda self, given: groups.append(given) or ask(self, given))
    patch.setattr(
        TrainingRun,
        "_keep",
        lambda self, *given: keep(self, *given) if groups[-1] else self._unsettled.append(given[1]),
    )


def _skips_steps_without_rows(patch: pytest.MonkeyPatch) -> None:
    real = TrainingRun._ask

    def ask(self: Any, groups: Any) -> Any:
        if not groups:
            raise ValueError("an empty batch")
        return real(self, groups)

    patch.setattr(TrainingRun, "_ask", ask)


def _private_loss_in_the_bar(patch: pytest.MonkeyPatch) -> None:
    real = TrainingRun._ask

    def ask(self: Any, groups: Any) -> Any:
        _progress.tqdm.shown.append(f"loss of {len([group for group in groups if group])}")
        return real(self, groups)

    patch.setattr(TrainingRun, "_ask", ask)


@pytest.mark.parametrize(
    ("bug", "record"),
    [
        pytest.param(_loud, "RAISES", id="the error of a row goes on"),
        pytest.param(_counted, "", id="rows are logged"),
        pytest.param(_no_update_without_rows, "", id="an empty batch moves nothing"),
        pytest.param(_skips_steps_without_rows, "", id="an empty batch is no step"),
        pytest.param(_private_loss_in_the_bar, "", id="a private loss is shown"),
    ],
)
def test_a_planted_difference_between_neighbours_is_seen(
    bug: Callable[[pytest.MonkeyPatch], None], record: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of six records are in every sample of "replaced"; none is where there are no records."""
    expected = usual("replaced")
    bug(monkeypatch)
    try:
        found = observe((record,) * 6 if record else (), design="replaced")
    except (RuntimeError, TrainingInterruptedError) as error:
        assert str(error) in {record, STOPPED.format(NOT_COMPUTED.rstrip("."), 0)}  # noqa: PT017  neither is heard of where records are plain
        return
    assert found != expected


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


def rows_and_sum(texts: tuple[str, ...], patch: pytest.MonkeyPatch, users: str = "") -> tuple[np.ndarray, np.ndarray]:
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
        records = [{"text": text, "label": "good"} for text in texts]
        owned: dict[str, Any] = {}
        if users:
            records = [{**record, "user": user} for record, user in zip(records, users, strict=True)]
            owned = {"unit_key": "user", "records_per_unit": 4}
        private = PrivateExamples(records, label_key="label", labels=LABELS, public_size=6, **owned)
        budget = Budget(epsilon=50, delta=1e-4)
        options: dict[str, Any] = {"epsilon": 40, "noise_multiplier": 2.0, "steps": 1, "expected_batch_size": 3}
        PromptDPSGD(Wild()).train(private, budget=budget, **options)
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
    monkeypatch.setattr(gradients._Counted, "add", lambda self, rows: self._total.add(rows))
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
