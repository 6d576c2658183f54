"""A training process that is killed (kill -9) on a durable ledger: what is lost, what is charged, how it goes on."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from langchain_dpicl import Budget, SoftPrompt
from langchain_dpicl.exceptions import ConfigurationError, RunInterruptedError
from langchain_dpicl.privacy.ledger.shares import Reservation, Share
from langchain_dpicl.runs.release_run import RunJournal
from langchain_dpicl.soft_prompts.trainer import PromptDPSGD
from langchain_dpicl.stores import SQLiteStore
from tests.faults.children import Child, Teller
from tests.gradient_doubles import LogisticEngine, examples, prepared, short_of_steps, training
from tests.labelling_doubles import counts, house, lines

pytestmark = pytest.mark.usefixtures("free_prices")

STEPS = 7
BOTH = pytest.mark.parametrize("awaited", [False, True], ids=["sync", "async"])
MOMENTS: dict[str, tuple[Any, str] | None] = {
    "as the gradients are computed": None,
    "behind the reservation": (Share, "reserve"),
    "behind the checkpoint": (RunJournal, "append"),
    "behind the commit": (Reservation, "commit"),
}


class Place:
    """A durable ledger and a checkpoint, which processes open one after the other."""

    def __init__(self, folder: Path) -> None:
        self.ledger, self.checkpoint = folder / "ledger.db", folder / "state.json"
        Budget(epsilon=1e6, delta=1e-4, store=SQLiteStore.new(self.ledger)).close()

    def prepared(self, engine: LogisticEngine, *, block: int) -> PromptDPSGD:
        budget = Budget.open(SQLiteStore(self.ledger))
        return prepared(
            examples(dataset_id="letters"),
            engine=engine,
            budget=budget,
            component="letters",
            training=training(steps=STEPS),
            block=block,
            checkpoint=self.checkpoint,
        )

    def trained(self, tell: Teller, *, block: int, awaited: bool = False) -> None:
        """Trains, and reports each private call as it begins."""
        engine = LogisticEngine()
        engine.at_gradients = lambda: tell("call")
        made = self.prepared(engine, block=block)
        asyncio.run(made.arun(progress=False)) if awaited else made.run(progress=False)


def _kill_at(moment: str, number: int) -> None:
    """Lets this process kill itself the `number`-th time that it comes to a moment."""
    owner, name = MOMENTS[moment] or (LogisticEngine, "gradients")
    real, passed = getattr(owner, name), iter(range(1, number))

    def dies(self: Any, *args: Any, **options: Any) -> Any:
        found = real(self, *args, **options)
        if next(passed, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    setattr(owner, name, dies)


def _ended(place: Place, *, block: int, awaited: bool = False) -> tuple[SoftPrompt, PromptDPSGD]:
    """Goes on in this process to the end; returns the prompt and the run."""
    made = place.prepared(LogisticEngine(), block=block)
    if made.step + made.steps_left < STEPS:
        return short_of_steps(made, awaited=awaited), made
    return asyncio.run(made.arun()) if awaited else made.run(), made


@BOTH
@pytest.mark.parametrize("block", [1, 3])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_run_loses_at_most_one_block_and_never_returns_as_if_it_had_not(
    moment: str, block: int, awaited: bool, tmp_path: Path
) -> None:
    place = Place(tmp_path)

    def die(tell: Teller) -> None:
        _kill_at(moment, 2)
        place.trained(tell, block=block, awaited=awaited)

    child = Child(die)
    calls = child.lines().count("call")
    prompt, made = _ended(place, block=block, awaited=awaited)
    calls += len(made.engine.calls)
    charged = counts(made._budget)
    assert STEPS - block <= made.step == prompt.report["step"] <= STEPS
    assert calls <= charged["reserve step"] - charged["give_back step"] == STEPS
    assert charged["reserve step"] - calls <= block
    assert prompt.epsilon == made.share.epsilon == 1e5
    made._budget.verify()


def test_a_run_that_lost_nothing_to_a_kill_returns_its_prompt(tmp_path: Path) -> None:
    place = Place(tmp_path)

    def die(tell: Teller) -> None:
        _kill_at("behind the commit", 3)
        place.trained(tell, block=1)

    assert Child(die).lines().count("call") == 3
    prompt, made = _ended(place, block=1)
    assert (len(made.engine.calls), made.step, prompt.report["step"]) == (STEPS - 3, STEPS, STEPS)
    assert made.steps_left == 0


def test_many_kills_at_random_moments_charge_every_call_and_lose_a_block_each(tmp_path: Path) -> None:
    place, block, calls, kills = Place(tmp_path), 2, 0, 0
    for _ in range(8):
        child = Child(lambda tell: place.trained(tell, block=block))
        child.wait_for_a_word()
        time.sleep(random.uniform(0, 0.02))
        child.kill()
        told = child.lines()
        calls += told.count("call")
        kills += not any(isinstance(one, dict) for one in told)
    budget = Budget.open(SQLiteStore(place.ledger))
    charged = counts(budget)
    charged_steps = charged["reserve step"] - charged["give_back step"]
    assert calls <= charged_steps <= STEPS
    # A killed child loses the commits that it had not written, also one that had ended the run.
    assert charged_steps - charged["commit step"] <= block * (kills + 1)
    budget.close()
    prompt, made = _ended(place, block=block)
    assert prompt.report["step"] == made.step >= charged["commit step"]
    made._budget.verify()


@BOTH
def test_tickets_are_reserved_block_by_block_before_each_private_call_at_one_price(awaited: bool) -> None:
    engine, budget = LogisticEngine(), house()
    seen: list[int] = []
    engine.at_gradients = lambda: seen.append(counts(budget)["reserve step"])
    made = prepared(engine=engine, budget=budget, training=training(steps=STEPS), block=3)
    before = budget.remaining_epsilon
    asyncio.run(made.arun()) if awaited else made.run()
    assert seen == [3, 3, 3, 6, 6, 6, 7]
    [sealed] = [line.body for line in lines(budget) if line.kind == "seal"]
    assert sealed["components"][0]["tickets"][0]["max_count"] == STEPS
    assert (sealed["epsilon"], budget.remaining_epsilon) == (1e5, before)
    assert counts(budget) == {"reserve step": STEPS, "commit step": STEPS}


@pytest.mark.parametrize(("steps", "block"), [(1, 1), (7, 1), (39, 1), (40, 2), (1000, 50)])
def test_a_twentieth_of_the_steps_is_reserved_at_a_time_by_default(steps: int, block: int) -> None:
    assert prepared(training=training(steps=steps), block=None)._block == block


@BOTH
def test_a_run_without_tickets_raises_again_and_again_and_spends_nothing(awaited: bool) -> None:
    private, budget = examples(), house()
    first = prepared(private, budget=budget, component="c", training=training(steps=2))
    first.run()
    late = prepared(private, budget=budget, component="c", training=training(steps=2))
    before = lines(budget)
    for _ in range(2):
        assert short_of_steps(late, awaited=awaited).report["step"] == 0
    with pytest.raises(RunInterruptedError, match=r"0 of 2 steps are released and kept; the tickets of the others"):
        list(late.stream())
    assert (lines(budget), late.engine.calls) == (before, [])


def test_a_run_whose_file_another_run_wrote_stops_before_its_next_block(tmp_path: Path) -> None:
    private, budget, path = examples(), house(), tmp_path / "state.json"
    given: dict[str, Any] = {"budget": budget, "component": "c", "checkpoint": path, "block": 1}
    first = prepared(private, **given)
    stream = first.stream()
    next(stream)
    next(prepared(private, **given).stream())
    kept, charged = path.read_bytes(), counts(budget)
    with pytest.raises(ConfigurationError, match="one that another run wrote to"):
        next(stream)
    assert (path.read_bytes(), counts(budget)) == (kept, charged)
