"""A device that dies stops training instead of training on noise; no record can bring that about, or shows in it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from langchain_dpicl import Budget, PrivateExamples
from langchain_dpicl.backends.rows.gradient_rows import CheckRequest, GradientRequest
from langchain_dpicl.backends.tuning.tasks import PromptTask
from langchain_dpicl.exceptions import ModelCallError, RunInterruptedError
from langchain_dpicl.options import Noise, SoftPromptConfig, TrainableModel
from langchain_dpicl.soft_prompts.plan import engine_of
from langchain_dpicl.soft_prompts.trainer import PromptDPSGD
from tests.contracts.front_room import CANARY
from tests.gradient_doubles import LogisticEngine, examples, prepared, short_of_steps, texts, training
from tests.labelling_doubles import counts, house, lines
from tests.unit_tests.test_private_frames import shows_private, stop

pytestmark = pytest.mark.usefixtures("free_prices")

COUNT = 40
BOTH = pytest.mark.parametrize("awaited", [False, True], ids=["sync", "async"])


def run(made: PromptDPSGD, *, awaited: bool) -> Any:
    return asyncio.run(made.arun()) if awaited else made.run()


class Mortal(LogisticEngine):
    """Works on a device that dies with a given call for gradients: from then on nothing on it succeeds.

    Whatever is asked of it privately then looks like units that all fail, as with an engine that guards its rows.
    """

    def __init__(self, dies_at: int | None = None) -> None:
        super().__init__()
        self.dies_at, self.is_dead, self.steps = dies_at, False, 0
        self.at_gradients, self.at_check = self._works, self._answers

    def _works(self) -> None:
        self.steps += not self.is_dead
        self.is_dead |= self.steps == self.dies_at
        self._answers()

    def _answers(self) -> None:
        if self.is_dead:
            raise RuntimeError("CUDA error: unspecified launch failure")


# -- what is found before a ticket burns -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "said"),
    [(RuntimeError("cuda " + CANARY), "failed with RuntimeError"), (ModelCallError("no room"), "^no room")],
    ids=["another's", "ours"],
)
def test_a_model_that_does_not_work_is_refused_before_anything_is_bound(error: Exception, said: str) -> None:
    def raises() -> None:
        raise error

    engine, budget, private = LogisticEngine(), house(), examples()
    engine.at_check = raises
    before = lines(budget), budget.remaining_epsilon
    with pytest.raises(ModelCallError, match=said) as caught:
        prepared(private, engine=engine, budget=budget)
    assert CANARY not in str(caught.value)
    assert caught.value.__cause__ is caught.value.__context__ is None
    assert (lines(budget), budget.remaining_epsilon) == before
    assert private._ledger_id is None


@BOTH
def test_a_dead_device_burns_no_ticket_however_often_it_is_tried(awaited: bool) -> None:
    engine, budget = Mortal(), house()
    made = prepared(engine=engine, budget=budget)
    engine.is_dead = True
    for _ in range(3):
        with pytest.raises(RunInterruptedError, match=r"0 of 4 steps are released"):
            run(made, awaited=awaited)
    assert (made.step, made.steps_left, engine.calls) == (0, 4, [])
    assert counts(budget) == {"reserve step": 12, "give_back step": 12}
    engine.is_dead = False
    run(made, awaited=awaited)
    assert (made.step, made.steps_left) == (4, 0)


def test_weights_without_numbers_burn_one_ticket_and_no_more() -> None:
    """As after too large a step: the engine has no number there, and every row would count zero from then on.

    The noise alone moves each of eight weights by about 10; all of them by less than 0.01 with a chance below 1e-24.
    """
    engine, budget = LogisticEngine(), house()

    def at_check() -> None:
        if np.abs(engine.checks[-1]).max() > 0.01:
            raise ModelCallError("no finite loss; lower the learning rate")

    engine.at_check = at_check
    made = prepared(engine=engine, budget=budget, training=training(learning_rate=1e3, optimizer="sgd"))
    for _ in range(3):
        with pytest.raises(RunInterruptedError, match=r"no finite loss; lower the learning rate\. 1 of 4 steps"):
            made.run()
    assert (made.step, made.steps_left) == (1, 2)
    assert counts(budget) == {"reserve step": 8, "commit step": 1, "give_back step": 6}


# -- what is found in the middle of a step -----------------------------------------------------------------------------


@BOTH
def test_a_device_that_dies_in_a_step_stops_the_run_with_the_weights_before_it(awaited: bool) -> None:
    engine, budget = Mortal(dies_at=2), house()
    made = prepared(engine=engine, budget=budget)
    told = made.stream()
    next(told)
    before = made.weights.copy()
    told.close()
    with pytest.raises(RunInterruptedError, match=r"failed with RuntimeError.*1 of 4 steps are released") as caught:
        run(made, awaited=awaited)
    assert caught.value.run is made
    assert shows_private(caught.value) == []
    assert np.array_equal(made.weights, before)
    assert (made.step, made.steps_left) == (1, 2)  # its ticket has burnt, and stays charged
    engine.is_dead, engine.dies_at = False, None
    short_of_steps(made, awaited=awaited)
    assert (made.step, made.steps_left) == (3, 0)
    charged = counts(budget)
    assert charged["reserve step"] - charged["give_back step"] == 4
    assert charged["commit step"] == 3
    budget.verify()


@BOTH
def test_ctrl_c_while_it_is_tried_out_keeps_the_charge_and_carries_the_run(awaited: bool) -> None:
    engine, budget = LogisticEngine(), house()
    made = prepared(engine=engine, budget=budget)
    engine.at_gradients = lambda: setattr(engine, "at_check", stop)
    with pytest.raises(KeyboardInterrupt) as caught:
        run(made, awaited=awaited)
    assert caught.value.run is made
    assert CANARY not in repr(shows_private(caught.value))
    assert counts(budget) == {"reserve step": 4, "give_back step": 3}


def test_a_killed_process_takes_its_tickets_along_and_a_durable_ledger_keeps_the_rest(tmp_path: Path) -> None:
    """Another process sees what the store holds: the tickets of steps that were never made are not given back."""
    budget, private = house(), examples(dataset_id="letters")
    given: dict[str, Any] = {"checkpoint": tmp_path / "state.json", "epsilon": 30.0, "block": 3}
    stream = prepared(private, budget=budget, **given).stream()
    next(stream)
    next(stream)  # and here it is killed
    opened = Budget.open(budget._store)
    made = prepared(private, budget=opened, **given)
    assert (made.step, made.steps_left) == (2, 1)
    assert short_of_steps(made).report["step"] == 3
    assert opened.remaining_epsilon == budget.remaining_epsilon > 30.0
    assert counts(opened) == {"reserve step": 4, "commit step": 3}


# -- nothing private has a part in it ----------------------------------------------------------------------------------

GIVEN: dict[str, Callable[[], list[tuple[str, str]]]] = {
    "nobody": list,
    "one": lambda: texts(1),
    "forty": texts,
    **{
        word: lambda word=word: [*texts(COUNT // 2), *[(f"{word} {CANARY} {i}", "good") for i in range(COUNT // 2)]]  # type: ignore[misc]
        for word in ("RAISES", "PANICS", "EXITS", "NUMBERS", "FAILS")
    },
    "all raise": lambda: [(f"RAISES {i}", "good") for i in range(COUNT)],
}


@pytest.mark.parametrize("given", GIVEN)
@BOTH
def test_no_records_change_when_it_is_tried_out_or_stop_a_run(given: str, awaited: bool) -> None:
    """As the run is prepared, before its first ticket burns, and behind each step's rows: whatever those were."""
    engine, order = LogisticEngine(), []
    engine.at_check = lambda: order.append("check")
    engine.at_gradients = lambda: order.append("rows")
    made = prepared(examples(GIVEN[given]()), engine=engine, training=training(expected_batch_size=COUNT))
    run(made, awaited=awaited)
    assert made.step == 4
    # An engine that raises is asked for the rows of a step again, one by one.
    told = [one for place, one in enumerate(order) if one == "check" or order[place - 1] == "check"]
    assert told == ["check", "check", *["rows", "check"] * 4]


@BOTH
def test_it_is_tried_out_at_released_weights_alone(awaited: bool) -> None:
    engine = LogisticEngine()
    made = prepared(engine=engine, noise=Noise(multiplier=3.0))
    known = {made.weights.tobytes()}

    async def walk() -> None:
        async for _ in made.astream():
            known.add(made.weights.tobytes())

    if awaited:
        asyncio.run(walk())
    for _ in made.stream():
        known.add(made.weights.tobytes())
    assert len(known) == 5
    assert {one.tobytes() for one in engine.checks} < known  # the last ones were not asked about


class Total:
    """Counts what is added."""

    def __init__(self) -> None:
        self.rows = 0

    def add(self, rows: Any) -> None:
        self.rows += len(rows)

    def clear(self) -> None:
        self.rows = 0


@BOTH
def test_what_is_wrong_is_told_without_a_frame_of_the_engine(awaited: bool) -> None:
    engine, total = LogisticEngine(), Total()
    engine.at_check = Mortal()._answers
    engine.at_check.__self__.is_dead = True  # type: ignore[attr-defined]
    question = GradientRequest(engine, np.zeros(engine.width), (), total)
    with pytest.raises(ModelCallError, match="failed with RuntimeError") as caught:
        asyncio.run(question.arun()) if awaited else question.run()
    assert caught.value.__cause__ is caught.value.__context__ is None
    asked = CheckRequest(engine, np.zeros(engine.width))
    found = asyncio.run(asked.arun()) if awaited else asked.run()
    assert isinstance(found, ModelCallError)
    assert found.__traceback__ is None


# -- a local model -----------------------------------------------------------------------------------------------------

SAID = [{"text": f"the sea is {i}", "label": ("warm", "cold")[i % 2]} for i in range(16)]
HOSTILE = ("", "\ud800 lone", "</s><s><pad>", "x " * 3000, "\x00\uffff", "{text}{pair}{mask}")


def local() -> Any:
    from tests import tiny_tuning

    return engine_of(
        TrainableModel(tiny_tuning.gpt2(), tiny_tuning.causal_tokenizer(), micro_batch=4),
        task=PromptTask("causal_lm", labels=("warm", "cold"), words=(" red", " blue"), max_input_tokens=16),
        prompt=SoftPromptConfig(num_virtual_tokens=3),
    )


def started(engine: Any, budget: Any, records: Any = SAID) -> PromptDPSGD:
    private = PrivateExamples(records, label_key="label", labels=("warm", "cold"), public_size=16)
    return prepared(private, engine=engine, budget=budget, training=training(expected_batch_size=8, steps=3), block=3)


@pytest.mark.usefixtures("one_thread")
def test_memory_that_is_missing_burns_no_ticket(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def full(*args: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    engine, budget = local(), house()
    before = lines(budget)
    with monkeypatch.context() as patch:
        patch.setattr(engine.prompted, "forward", full)
        with pytest.raises(ModelCallError, match="out of memory with a single row; lower max_input_tokens"):
            started(engine, budget)
    assert lines(budget) == before
    assert started(engine, budget).run().report["step"] == 3


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("numbers", [False, True], ids=["raises", "no numbers"])
def test_a_model_that_dies_under_a_run_stops_it(numbers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, budget = local(), house()
    made = started(engine, budget)
    stream = made.stream()
    next(stream)
    real = engine.prompted.forward

    def dies(*args: Any, **options: Any) -> Any:
        if not numbers:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return real(*args, **options) * float("nan")

    monkeypatch.setattr(engine.prompted, "forward", dies)
    said = "no finite loss and gradient for made-up public texts" if numbers else "failed on public rows: RuntimeError"
    with pytest.raises(RunInterruptedError, match=said):
        next(stream)
    assert (made.step, made.steps_left) == (1, 1)
    assert counts(budget) == {"reserve step": 3, "commit step": 1, "give_back step": 1}
    monkeypatch.setattr(engine.prompted, "forward", real)
    short_of_steps(made)
    assert made.step == 2


@pytest.mark.usefixtures("one_thread")
def test_no_text_stops_a_local_model() -> None:
    records = [{"text": text, "label": "warm"} for text in HOSTILE * 2]
    assert started(local(), house(), records).run().report["step"] == 3


@pytest.mark.usefixtures("one_thread")
def test_a_prompt_without_numbers_is_told_from_one_that_has_some() -> None:
    engine = local()
    good = engine.initial("the sea")
    assert engine.check(good) == engine.check()
    with pytest.raises(ModelCallError, match="lower the learning rate, or take dtype float32"):
        engine.check(np.where(good > 0, np.inf, good))
    from langchain_dpicl.exceptions import ConfigurationError

    with pytest.raises(ConfigurationError, match="parameters: expected shape"):
        engine.check(good[1:])
