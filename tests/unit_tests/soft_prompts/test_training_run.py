"""A run of PromptDPSGD: what steps cost, what stops a run, what it keeps, how it goes on, and what never shows."""

from __future__ import annotations

import asyncio
import copy
import itertools
import math
import pickle
import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from langchain_dpicl import Budget, PrivateExamples, SoftPrompt, verify_report
from langchain_dpicl.backends.rows.gradient_rows import GradientRequest
from langchain_dpicl.exceptions import (
    ConfigurationError,
    LedgerError,
    ModelCallError,
    PrivacyBudgetError,
    PrivateAccessError,
    RunInterruptedError,
)
from langchain_dpicl.options import Noise
from langchain_dpicl.privacy import accounting
from langchain_dpicl.privacy.accounting.events import GaussianEvent, RepeatedEvent, SubsampledEvent
from langchain_dpicl.privacy.extensions.gradient_sums import RunningSum, SampledBallEvent
from langchain_dpicl.privacy.ledger.shares import Reservation
from langchain_dpicl.privacy.mechanisms.randomness import SecureRandom
from langchain_dpicl.privacy.mechanisms.release_plan import GaussianMechanism, PoissonUnits
from langchain_dpicl.runs import release_run
from langchain_dpicl.soft_prompts.plan import WEIGHT_GRID, ExampleFields
from langchain_dpicl.soft_prompts.trainer import PromptDPSGD, TrainingStep
from tests.canary import OURS
from tests.contracts.doubles import FixedDraws
from tests.contracts.front_room import CANARY
from tests.contracts.neighbours import Bar
from tests.contracts.release_run import CANARY as RUN_CANARY
from tests.contracts.release_run import Calls, JournalContract, entries_in, stop_once_while_a_line_is_made
from tests.durable import until
from tests.gradient_doubles import PUBLIC, LogisticEngine, examples, prepared, short_of_steps, texts, training
from tests.labelling_doubles import counts, fails, house, lines
from tests.ledgers import free_price
from tests.unit_tests.test_private_frames import locals_of_ours, shows_private, stop


@pytest.fixture(autouse=True)
def _prices(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run costs is of interest in few tests, and takes most of the time."""
    if request.node.get_closest_marker("usefixtures") is None:
        monkeypatch.setattr(accounting, "epsilon_bound", free_price)


PRICED = pytest.mark.usefixtures("remembered_prices")


def run(made: PromptDPSGD, *, awaited: bool = False, **options: Any) -> Any:
    return asyncio.run(made.arun(**options)) if awaited else made.run(**options)


def loss_of(made: PromptDPSGD) -> float:
    return float(np.mean(LogisticEngine().losses(made.weights, made._validation.examples)))


BOTH = pytest.mark.parametrize("awaited", [False, True], ids=["sync", "async"])

# -- what it trains, and what that costs ---------------------------------------------------------------------------


@PRICED
@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_a_run_is_priced_from_its_own_tickets(adjacency: str) -> None:
    budget = house(adjacency)
    made = prepared(budget=budget, epsilon=None, noise=Noise(multiplier=2.0, delta=1e-5), training=training(steps=7))
    run(made)
    step = {
        "add_remove": SubsampledEvent(GaussianEvent(2.0), 10 / 40),
        "replace_one": SampledBallEvent(2.0, 10 / 40),
    }[adjacency]
    by_hand = RepeatedEvent(step, 7)
    [sealed] = [line.body for line in lines(budget) if line.kind == "seal"]
    assert made.plan.event() == by_hand
    left = 1e-5 - made.plan.implementation_delta
    again = accounting.epsilon_upper_bound(by_hand, delta=left, adjacency=adjacency)  # type: ignore[arg-type]
    assert sealed["epsilon"] == made.plan.epsilon == pytest.approx(again, rel=1e-6)
    assert counts(budget) == {"reserve step": 7, "commit step": 7}
    assert verify_report(made.result).ok
    assert made.result.epsilon == sealed["epsilon"]
    budget.verify()


@BOTH
def test_all_tickets_are_reserved_before_the_first_private_call(awaited: bool) -> None:
    engine, budget = LogisticEngine(), house()
    seen: list[Any] = []
    engine.at_gradients = lambda: seen.append(dict(counts(budget)))
    run(prepared(engine=engine, budget=budget), awaited=awaited)
    assert [found["reserve step"] for found in seen] == [4, 4, 4, 4]
    assert [found.get("commit step", 0) for found in seen] == [0, 1, 2, 3]


@BOTH
def test_it_learns_what_the_examples_say(awaited: bool) -> None:
    """Forty rows point the same way; the noise on a coordinate is .05 of one row."""
    made = prepared(
        noise=Noise(multiplier=0.05),
        training=training(expected_batch_size=40, steps=10, learning_rate=0.3, validation=PUBLIC),
    )
    assert loss_of(made) == pytest.approx(math.log(2))
    prompt = run(made, awaited=awaited)
    assert loss_of(made) < 0.1
    assert prompt.arrays["prompt_embeddings"].ravel().tolist() == made.weights.astype(np.float32).tolist()
    assert (made.step, made.steps_left) == (10, 0)


def test_a_step_follows_the_noised_sum_over_public_numbers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worked out by hand: three units of the forty are drawn, ten were expected."""
    monkeypatch.setattr(SecureRandom, "gaussian_draws", lambda self, n: FixedDraws(np.zeros(n)))
    monkeypatch.setattr(PoissonUnits, "draw", lambda self, n, *, rng: ((0,), (1,), (2,)))
    engine = LogisticEngine()
    made = prepared(engine=engine, training=training(steps=1, l2_clip_norm=0.25, learning_rate=0.5, optimizer="sgd"))
    made.run()
    rows: list[Any] = []
    held = examples()._open(None)
    groups = [made._fields.examples_of(held.records(unit)) for unit in range(3)]
    engine.gradients(np.zeros(engine.width), groups, add=rows.extend)
    clipped = [row * min(1.0, 0.25 / np.linalg.norm(row)) for row in rows]
    assert [np.linalg.norm(row) > 0.25 for row in rows] == [True] * 3
    assert made.weights == pytest.approx(-0.5 * np.sum(clipped, axis=0) / 10, abs=1e-5)


def test_a_unit_s_examples_are_combined_first_and_clipped_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user with three records, two of whom pull one way: the mean is clipped, to one length, and counts once."""
    monkeypatch.setattr(SecureRandom, "gaussian_draws", lambda self, n: FixedDraws(np.zeros(n)))
    monkeypatch.setattr(PoissonUnits, "draw", lambda self, n, *, rng: tuple((unit,) for unit in range(n)))
    records = [{"text": f"good {place}", "label": "good", "user": "one"} for place in range(3)]
    private = PrivateExamples(
        records, label_key="label", labels=("good", "bad"), public_size=40, unit_key="user", records_per_unit=2
    )
    engine = LogisticEngine()
    made = prepared(
        private, engine=engine, training=training(steps=1, l2_clip_norm=0.1, learning_rate=1.0, optimizer="sgd")
    )
    made.run()
    assert engine.calls == [(("good 0", "good 1"),)]
    assert np.linalg.norm(made.weights) == pytest.approx(0.1 / 10, abs=1e-6)


def test_released_weights_are_on_the_public_grid_from_the_first_to_the_last() -> None:
    engine = LogisticEngine()
    engine.initial = lambda text=None: np.linspace(0.1, 0.9, engine.width)  # type: ignore[method-assign]
    made = prepared(engine=engine)
    for _ in itertools.chain([None], made.stream()):
        assert (made.weights * WEIGHT_GRID % 1.0 == 0).all()
        assert not made.weights.flags.writeable
    assert made.result.arrays["prompt_embeddings"].dtype == np.float32


@pytest.mark.parametrize("given", [(), texts(1), [("FAILS", "good")] * 40], ids=["nobody", "one", "forty that fail"])
def test_an_empty_sample_is_a_step_of_pure_noise_on_the_same_path(given: Any) -> None:
    budget = house()
    made = prepared(examples(given), budget=budget, training=training(expected_batch_size=1, steps=3))
    weights = [made.weights.copy() for _ in made.stream()]
    assert len({one.tobytes() for one in weights}) == 3
    # The noise of a coordinate is zero, on its grid of 2^16 steps to a deviation, with a chance of 6e-6; of three: 1e-13.
    assert all(np.count_nonzero(one) >= one.size - 2 for one in weights)
    assert counts(budget) == {"reserve step": 3, "commit step": 3}


def test_no_seed_has_a_part_in_the_noise() -> None:
    """Two noise vectors on a grid of 2^16 steps to a deviation agree with probability below 1e-30."""
    found = set()
    for _ in range(2):
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        made = prepared(examples(()), training=training(steps=1, optimizer="sgd"))
        made.run()
        found.add(made.weights.tobytes())
    assert len(found) == 2


def test_noise_reaches_the_weights_at_the_plan_s_scale() -> None:
    """800 draws: their sum of squares lies near the claim, but for a chance below 1e-7 (chi-square)."""
    engine = LogisticEngine(num_virtual_tokens=10, token_dim=80)
    made = prepared(
        examples(()),
        engine=engine,
        training=training(steps=1, learning_rate=1.0, optimizer="sgd"),
        noise=Noise(multiplier=30.0),
    )
    made.run()
    claimed = 30.0 * 0.1 / 10  # multiplier times clip, over the expected batch
    assert made.plan.noise_scale == pytest.approx(claimed)
    assert 0.75 < np.mean((made.weights / claimed) ** 2) < 1.3


# -- what stops it ---------------------------------------------------------------------------------------------------


@PRICED
@BOTH
def test_an_outage_keeps_what_was_spent_and_gives_back_what_never_burnt(awaited: bool) -> None:
    engine, budget = LogisticEngine(), house()
    engine.at_gradients = fails(None, ModelCallError("out of memory."), None)  # type: ignore[arg-type]
    made = prepared(engine=engine, budget=budget, training=training(steps=6))
    with pytest.raises(RunInterruptedError, match=r"^PromptDPSGD stopped: out of memory\. 1 of 6 steps") as caught:
        run(made, awaited=awaited)
    assert caught.value.run is made
    assert caught.value.__context__ is None
    assert (made.step, made.steps_left) == (1, 4)
    assert counts(budget) == {"reserve step": 6, "commit step": 1, "give_back step": 4}
    prompt = short_of_steps(caught.value.run, awaited=awaited)
    assert (made.step, made.steps_left) == (5, 0)
    assert counts(budget) == {"reserve step": 10, "commit step": 5, "give_back step": 4}
    assert verify_report(prompt).ok
    assert prompt.epsilon == made.share.epsilon == 1e5
    budget.verify()


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (ExampleFields, "examples_of"),
        (PoissonUnits, "draw"),
        (LogisticEngine, "_row"),
        (RunningSum, "add"),
        (RunningSum, "total"),
        (GaussianMechanism, "release"),
    ],
    ids=["rendering", "drawing", "gradients", "bounding", "adding", "noising"],
)
@BOTH
def test_ctrl_c_keeps_the_charge_carries_the_run_and_shows_nothing(
    owner: Any, name: str, awaited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = house()
    made = prepared(budget=budget)
    next(made.stream())
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, stop)
        with pytest.raises(KeyboardInterrupt) as caught:
            run(made, awaited=awaited)
    assert caught.value.run is made
    assert shows_private(caught.value) == []
    assert (made.step, made.steps_left) == (1, 2)
    short_of_steps(made, awaited=awaited)
    assert (made.step, made.steps_left) == (3, 0)
    charged = counts(budget)
    assert charged["reserve step"] - charged["give_back step"] == 4
    assert charged["commit step"] == 3


async def test_a_cancellation_keeps_the_charge_and_shows_nothing() -> None:
    class Slow(LogisticEngine):
        async def agradients(self, *args: Any, **options: Any) -> None:
            self.waits.set()
            await asyncio.sleep(60)

    engine, budget = Slow(), house()
    engine.waits = asyncio.Event()  # type: ignore[attr-defined]
    made = prepared(engine=engine, budget=budget)
    task = asyncio.ensure_future(made.arun())
    await engine.waits.wait()  # type: ignore[attr-defined]
    task.cancel()
    with pytest.raises(asyncio.CancelledError) as caught:
        await task
    assert shows_private(caught.value) == []
    assert counts(budget) == {"reserve step": 4, "give_back step": 3}
    assert (made.step, made.steps_left) == (0, 3)


@pytest.mark.parametrize("word", ["RAISES", "PANICS", "EXITS", "NUMBERS", "FAILS"])
@BOTH
def test_whatever_a_record_does_the_run_goes_on_and_the_others_count(word: str, awaited: bool) -> None:
    private = examples([*texts(39), (f"{word} {CANARY}", "good")])
    made = prepared(
        private,
        noise=Noise(multiplier=0.05),
        training=training(expected_batch_size=40, steps=10, learning_rate=0.3, validation=PUBLIC),
    )
    run(made, awaited=awaited)
    assert loss_of(made) < 0.1


def test_an_engine_that_gives_more_rows_than_units_is_stopped() -> None:
    class Greedy(LogisticEngine):
        def gradients(self, parameters: Any, groups: Any, *, add: Callable[[Any], None]) -> None:
            super().gradients(parameters, groups, add=add)
            add(np.ones((1, self.width)))

    with pytest.raises(RunInterruptedError, match="more rows than there are units"):
        prepared(engine=Greedy()).run()


def test_losses_that_fail_stop_the_run_after_the_step_is_kept() -> None:
    engine, budget = LogisticEngine(), house()
    engine.at_losses = fails(None, RuntimeError("cuda"))  # type: ignore[arg-type]
    made = prepared(engine=engine, budget=budget, training=training(validation=PUBLIC))
    with pytest.raises(RunInterruptedError, match="failed with RuntimeError"):
        made.run()
    assert (made.step, made.steps_left) == (2, 2)
    assert counts(budget) == {"reserve step": 4, "commit step": 2, "give_back step": 2}
    made.run()
    assert (made.step, made.steps_left) == (4, 0)


@PRICED
def test_a_share_that_no_longer_fits_is_refused_and_carries_the_run() -> None:
    budget = house(epsilon=10.0)
    late = prepared(budget=budget, epsilon=9.0, noise=Noise(multiplier=5.0), component="late")
    other = Budget.open(budget._store)
    prepared(
        examples(dataset_id="others"), budget=other, epsilon=9.0, noise=Noise(multiplier=5.0), component="early"
    ).run()
    with pytest.raises(PrivacyBudgetError) as caught:
        late.run()
    assert caught.value.run is late
    assert late.step == 0


def test_a_removed_unit_stays_away_and_leaves_the_plan_as_it_was() -> None:
    private, engine = examples(), LogisticEngine()
    gone = texts()[0][0]
    made = prepared(private, engine=engine, training=training(expected_batch_size=40))
    private.remove(0)
    made.run()
    assert [gone in str(call) for call in engine.calls] == [False] * 4
    assert [len(call) for call in engine.calls] == [40] * 4
    assert made.plan.sampling_rate == 1.0


# -- one at a time -----------------------------------------------------------------------------------------------------


def test_a_call_that_begins_between_a_release_and_its_commit_commits_nothing_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a second thread does: the ticket is the first one's to commit, once its weights are safe."""
    budget, refused = house(), []
    made = prepared(budget=budget)
    real = Reservation.commit

    def commit(self: Any, count: int = 1) -> None:
        if not refused:
            with pytest.raises(ConfigurationError, match="no other run") as caught:
                made.run()
            refused.append((caught.value, counts(budget)["commit step"]))
        real(self, count)

    monkeypatch.setattr(Reservation, "commit", commit)
    made.run()
    assert [number for _, number in refused] == [0]
    assert counts(budget) == {"reserve step": 4, "commit step": 4}


def test_a_stream_that_is_left_gives_back_what_it_did_not_use() -> None:
    budget = house()
    made = prepared(budget=budget)
    for told in made.stream():
        assert told == TrainingStep(1, 4, None)
        break
    assert counts(budget) == {"reserve step": 4, "commit step": 1, "give_back step": 3}
    assert made.steps_left == 3


async def test_an_async_stream_that_is_left_gives_back_what_it_did_not_use() -> None:
    budget = house()
    made = prepared(budget=budget)
    stream = made.astream()
    assert await anext(stream) == TrainingStep(1, 4, None)
    await stream.aclose()  # type: ignore[attr-defined]
    assert counts(budget) == {"reserve step": 4, "commit step": 1, "give_back step": 3}


# -- resuming ----------------------------------------------------------------------------------------------------------


def seeded(patch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes noise and samples functions of how many there were; returns what starts counting anew."""
    turns = {"noise": itertools.count(), "draw": itertools.count()}

    def draws(self: Any, n: int) -> FixedDraws:
        return FixedDraws(np.random.default_rng([1, next(turns["noise"])]).normal(size=n))

    def draw(self: Any, n: int, *, rng: Any) -> Any:
        kept = np.random.default_rng([2, next(turns["draw"])]).random(n) < self.sampling_rate
        return tuple((int(unit),) for unit in kept.nonzero()[0])

    patch.setattr(SecureRandom, "gaussian_draws", draws)
    patch.setattr(PoissonUnits, "draw", draw)
    return lambda: turns.update(noise=itertools.count(), draw=itertools.count())


@PRICED
@pytest.mark.parametrize("way", ["the same run", "the file"])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_a_run_that_was_stopped_between_steps_ends_as_one_that_was_not(
    way: str, optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    anew = seeded(monkeypatch)
    learning = training(steps=6, optimizer=optimizer, schedule="linear", validation=PUBLIC)
    whole, budget = house(), house()
    straight = prepared(budget=whole, training=learning)
    straight.run()
    anew()
    private, path = examples(), tmp_path / "state.json"
    made = prepared(private, budget=budget, checkpoint=path, training=learning)
    for told in made.stream():
        if told.step == 3:
            break
    if way == "the file":
        made = prepared(private, budget=budget, checkpoint=path, training=learning)
    assert (made.step, made.steps_left) == (3, 3)
    made.run()
    assert made.weights.tobytes() == straight.weights.tobytes()
    assert made.result.arrays["prompt_embeddings"].tobytes() == (straight.result.arrays["prompt_embeddings"].tobytes())
    assert counts(whole) == {"reserve step": 6, "commit step": 6}
    assert counts(budget) == {"reserve step": 9, "commit step": 6, "give_back step": 3}
    for ledger in (whole, budget):
        ledger.verify()
    assert (budget.remaining_epsilon, budget.remaining_delta) == (whole.remaining_epsilon, whole.remaining_delta)
    one, other = (verify_report(run.result) for run in (made, straight))
    assert (one.ok, one.epsilon, one.delta) == (True, other.epsilon, other.delta)
    assert other.ok


def test_a_resumed_run_has_fresh_coins(tmp_path: Path) -> None:
    """As above, without fixed coins: two noise vectors agree with probability below 1e-30."""
    private, budget, path = examples(()), house(), tmp_path / "state.json"
    made = prepared(private, budget=budget, checkpoint=path, training=training(optimizer="sgd"))
    first = next(made.stream()) and made.weights.copy()
    again = prepared(private, budget=budget, checkpoint=path, training=training(optimizer="sgd"))
    next(again.stream())
    assert (again.weights - first).tobytes() != first.tobytes()


def test_the_files_hold_released_state_alone(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    made = prepared(checkpoint=path, training=training(validation=PUBLIC))
    made.run()
    assert [set(entry) for entry in entries_in(path)] == [{"step", "arrays"}] * 4
    assert {one.name for one in tmp_path.iterdir()} == {"state.json", "state.json.arrays0", "state.json.arrays1"}
    assert all(CANARY.encode() not in one.read_bytes() for one in tmp_path.iterdir())
    assert path.with_name("state.json.arrays1").read_bytes()[: 8 * 8] == made.weights.tobytes()


def test_a_folder_that_is_gone_stops_the_run_before_anything_is_paid_for(tmp_path: Path) -> None:
    path, budget = tmp_path / "kept" / "state.json", house()
    path.parent.mkdir()
    made = prepared(budget=budget, checkpoint=path)
    next(made.stream())
    path.parent.rename(tmp_path / "moved")
    before = lines(budget)
    with pytest.raises(FileNotFoundError):
        made.run()
    assert lines(budget) == before


@BOTH
def test_a_full_disk_keeps_the_step_and_commits_it_when_there_is_room(
    awaited: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, budget = tmp_path / "state.json", house()
    made = prepared(budget=budget, checkpoint=path)
    next(made.stream())

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(OSError, match="No space") as caught:
            run(made, awaited=awaited)
        assert caught.value.run is made
        assert CANARY not in repr(locals_of_ours(caught.value))
        assert (made.step, len(entries_in(path))) == (2, 1)
        assert counts(budget)["commit step"] == 1
        with pytest.raises(OSError, match="No space"):
            run(made, awaited=awaited)  # found out before anything more is reserved
        assert (made.step, made.steps_left) == (2, 2)
    run(made, awaited=awaited)
    assert (made.step, len(entries_in(path))) == (4, 4)
    charged = counts(budget)
    assert charged["commit step"] == charged["reserve step"] - charged["give_back step"] == 4
    budget.verify()


def test_a_full_disk_is_found_out_before_anything_is_paid_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = house()
    made = prepared(budget=budget, checkpoint=tmp_path / "state.json")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        made.run()
    assert counts(budget) == {}


def test_a_ledger_that_fails_at_commit_keeps_the_step_and_settles_later(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = house()
    made = prepared(budget=budget)

    def broken(self: Any, count: int = 1) -> None:
        raise LedgerError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(Reservation, "commit", broken)
        with pytest.raises(LedgerError) as caught:
            made.run()
    assert caught.value.run is made
    assert CANARY not in repr(locals_of_ours(caught.value))
    assert (made.step, counts(budget)["commit step"]) == (1, 0)
    made.run()
    assert (made.step, counts(budget)["commit step"]) == (4, 4)


def test_ctrl_c_right_behind_the_commit_commits_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = house()
    made = prepared(budget=budget)
    real = Reservation.commit

    def commit(self: Any, count: int = 1) -> None:
        real(self, count)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Reservation, "commit", commit)
        with pytest.raises(KeyboardInterrupt):
            made.run()
    assert (made.step, counts(budget)["commit step"]) == (1, 1)
    made.run()
    assert (made.step, counts(budget)["commit step"]) == (4, 4)
    budget.verify()


@PRICED
def test_components_planned_together_train_too() -> None:
    budget = house()
    private = examples()
    with budget.plan():
        one, other = (
            prepared(private, budget=budget, component=name, epsilon=None, noise=Noise(multiplier=1.0, delta=1e-6))
            for name in ("one", "other")
        )
    prompts = [made.run() for made in (one, other)]
    assert [verify_report(prompt).ok for prompt in prompts] == [True, True]
    assert prompts[0].epsilon == prompts[1].epsilon < one.plan.epsilon + other.plan.epsilon
    assert counts(budget) == {"reserve step": 8, "commit step": 8}


OTHERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "plan": lambda _: {"training": training(steps=5)},
    "noise": lambda _: {"noise": Noise(multiplier=2.0)},
    "clip": lambda _: {"training": training(l2_clip_norm=0.2)},
    "rate": lambda _: {"training": training(learning_rate=0.02)},
    "optimizer": lambda _: {"training": training(optimizer="sgd")},
    "schedule": lambda _: {"training": training(schedule="linear")},
    "model": lambda _: {"engine": type("Other", (LogisticEngine,), {"weights_digest": lambda self: "1" * 64})()},
    "size": lambda _: {"engine": LogisticEngine(3, 4)},
    "shape": lambda _: {"engine": LogisticEngine(4, 2)},
    "ledger": lambda _: {"budget": house(), "private": examples()},
    "examples": lambda _: {"private": examples(dataset_id="others")},
    "component": lambda _: {"component": "another"},
}


SAID_OF_OTHERS = {"ledger": "ledger_id", "examples": "dataset_id", "component": "component"}


@pytest.mark.parametrize("other", OTHERS)
def test_a_file_of_another_run_is_refused_and_nothing_is_declared(other: str, tmp_path: Path) -> None:
    private, budget, path = examples(), house(), tmp_path / "state.json"
    given: dict[str, Any] = {"private": private, "engine": LogisticEngine(), "budget": budget, "checkpoint": path}
    next(prepared(**given).stream())
    changed = {**given, **OTHERS[other](None)}
    before = lines(changed["budget"]), changed["budget"].remaining_epsilon
    with pytest.raises(
        ConfigurationError, match=rf"another run's: differences in .*'{SAID_OF_OTHERS.get(other, 'plan')}'"
    ):
        prepared(**changed)
    assert (lines(changed["budget"]), changed["budget"].remaining_epsilon) == before


def forged(made: PromptDPSGD, path: Path, *states: bytes) -> None:
    """Writes the journal that this run would have written with such states."""
    assert made._journal is not None
    made._journal._path = path
    for step, state in enumerate(states, start=1):
        made._journal.append({"step": step}, arrays=state)


def test_weights_that_the_share_has_not_paid_for_are_refused(tmp_path: Path) -> None:
    given: dict[str, Any] = {"private": examples(), "budget": house(), "component": "c"}
    path = tmp_path / "forged"
    made = prepared(**given, checkpoint=tmp_path / "state.json")
    next(prepared(**given).stream())
    forged(made, path, *[made._training.state.to_bytes()] * 2)
    with pytest.raises(ConfigurationError, match="at most the 1 steps that this component has paid for"):
        prepared(**given, checkpoint=path)


def test_arrays_that_no_run_wrote_are_refused_and_nothing_is_declared(tmp_path: Path) -> None:
    given: dict[str, Any] = {"private": examples(), "budget": house(), "component": "c"}
    vectors = np.zeros((3, 8))
    faults = {
        "3 vectors of 8 float64 numbers, found 40": np.zeros(5),
        "found 0": np.zeros(0),
        "finite numbers": vectors + np.nan,
        "multiples of": vectors + 0.5 / WEIGHT_GRID,
        "at most 2": vectors + 2.0**21,
    }
    for number, (said, state) in enumerate(faults.items()):
        made = prepared(**given, checkpoint=tmp_path / "state.json")
        forged(made, tmp_path / f"{number}", state.tobytes())
        before = lines(given["budget"])
        with pytest.raises(ConfigurationError, match=said):
            prepared(**given, checkpoint=tmp_path / f"{number}")
        assert lines(given["budget"]) == before


def test_a_second_run_of_the_same_share_has_the_tickets_it_left() -> None:
    private, budget = examples(), house()
    next(prepared(private, budget=budget, component="c").stream())
    again = prepared(private, budget=budget, component="c")
    assert (again.step, again.steps_left) == (0, 3)
    short_of_steps(again)
    assert counts(budget) == {"reserve step": 7, "commit step": 4, "give_back step": 3}


# -- what shows --------------------------------------------------------------------------------------------------------


@BOTH
def test_the_bar_shows_steps_and_the_loss_of_public_records_alone(
    awaited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bar = type("OneBar", (Bar,), {"shown": []})
    monkeypatch.setattr(release_run, "tqdm", bar)
    engine, asked = LogisticEngine(), []
    real = engine.losses
    engine.losses = lambda weights, given: asked.extend(given) or real(weights, given)  # type: ignore[method-assign]
    made = prepared(engine=engine, training=training(validation=PUBLIC, validate_every=3))
    run(made, awaited=awaited, progress=True)
    options, *told = bar.shown
    assert options["total"] == 4
    assert options["disable"] is False
    at_three, at_four = (shown for shown in told if shown not in {"tick", "end"})
    assert told == ["tick", "tick", at_three, "tick", at_four, "tick", "end"]
    loss = np.mean(real(made.weights, made._validation.examples))
    assert at_four == f"public validation loss {loss:.4g}"
    assert {example.text for example in asked} == {record["text"] for record in PUBLIC}


def test_steps_tell_their_number_of_how_many_and_the_public_loss() -> None:
    made = prepared(training=training(steps=5, validation=PUBLIC, validate_every=2))
    told = list(made.stream())
    assert [(one.step, one.steps) for one in told] == [(step, 5) for step in range(1, 6)]
    assert [one.validation_loss is None for one in told] == [True, False, True, False, False]
    assert told[-1].validation_loss == pytest.approx(
        np.mean(LogisticEngine().losses(made.weights, made._validation.examples))
    )


def test_losses_that_are_no_numbers_are_left_out_of_the_mean() -> None:
    engine = LogisticEngine()
    engine.losses = lambda *_: np.array([np.nan, 2.0, np.inf])  # type: ignore[method-assign]
    assert [
        told.validation_loss for told in prepared(engine=engine, training=training(steps=1, validation=PUBLIC)).stream()
    ] == [2.0]
    engine.losses = lambda *_: np.array([np.nan])  # type: ignore[method-assign]
    [told] = prepared(engine=engine, training=training(steps=1, validation=PUBLIC)).stream()
    assert math.isnan(told.validation_loss or 0.0)


async def test_a_cancelled_run_ends_with_the_work_of_a_validation() -> None:
    engine, begun, ended = LogisticEngine(), threading.Event(), threading.Event()

    def slow(*_: object) -> Any:
        begun.set()
        time.sleep(0.2)
        ended.set()
        return np.ones(1)

    engine.losses = slow  # type: ignore[method-assign]
    task = asyncio.create_task(prepared(engine=engine, training=training(validation=PUBLIC)).arun(progress=False))
    await until(begun.is_set)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


def test_a_run_shows_nothing_private_and_cannot_be_copied_or_sent() -> None:
    made = prepared()
    made.run()
    for thing in (made, made.plan, made.report, made.result, made.weights, made._budget.report().to_dict()):
        assert CANARY not in f"{thing!r} {thing} {getattr(thing, '__dict__', '')!r}"
    assert copy.copy(made) is made
    assert copy.deepcopy(made) is made
    with pytest.raises(PrivateAccessError):
        pickle.dumps(made)
    ask = GradientRequest(
        made.engine, made.weights, [made._fields.examples_of([{"text": CANARY, "label": "good"}])], None
    )  # type: ignore[arg-type]
    assert CANARY not in repr(ask)


def test_private_groups_stand_under_no_name_while_the_engine_is_asked() -> None:
    """What a debugger finds in our frames as an engine is called: boxes that show nothing."""
    found: list[str] = []

    def look() -> None:
        frame: Any = sys._getframe()
        while frame is not None:
            if OURS in frame.f_code.co_filename:
                found.append(repr(list(frame.f_locals.values())))
            frame = frame.f_back

    engine = LogisticEngine()
    engine.at_gradients = look
    prepared(engine=engine, training=training(steps=1)).run()
    assert len(found) > 5
    assert [shown for shown in found if CANARY in shown] == []


def test_the_report_of_a_run_names_what_was_trained_and_how() -> None:
    made = prepared()
    made.run()
    [sealed] = [line.body for line in lines(made._budget) if line.kind == "seal"]
    shown = sealed["components"][0]["public"]["training"]
    assert shown["optimizer"] == {
        "name": "adam",
        "learning_rate": 0.01,
        "schedule": "constant",
        "weight_grid": 2.0**-24,
    }
    assert (shown["text_key"], shown["pair_key"], shown["target_key"]) == ("text", None, "label")
    assert (shown["model"], shown["method"], shown["num_virtual_tokens"]) == ("logistic", "soft_prompt", 2)
    assert shown["task"]["labels"] == ["good", "bad"]
    assert made.report["step"] == 4


class TestContract(JournalContract):
    """Acts at the losses of public records, which follow a step that is kept: no ticket is lost."""

    # A step that is streamed is progress; what is released is the prompt of the last one.
    test_a_stream_yields_what_could_not_be_written_too = None  # type: ignore[assignment]

    @pytest.fixture(autouse=True)
    def _examples(self) -> None:
        self._bound: dict[str, PrivateExamples] = {}  # a ledger knows a data set by its object

    def build(self, budget: Budget, calls: Calls, *, component: str = "mine", checkpoint: Any = None) -> PromptDPSGD:
        engine = LogisticEngine()
        engine.losses = lambda *_: calls() or np.full(2, 0.5)  # type: ignore[func-returns-value,method-assign]
        private = examples(texts(word=RUN_CANARY), dataset_id="letters")
        return prepared(
            self._bound.setdefault(budget.ledger_id, private),
            engine=engine,
            budget=budget,
            component=component,
            checkpoint=checkpoint,
            training=training(validation=PUBLIC, validate_every=1),
            block=None,
        )

    def parts(self, result: SoftPrompt) -> list[TrainingStep]:
        return [TrainingStep(step, 4, 0.5) for step in range(1, result.report["step"] + 1)]


def test_ctrl_c_while_a_line_is_made_loses_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private, path, budget = examples(), tmp_path / "run.jsonl", house()
    made = prepared(private, budget=budget, checkpoint=path)
    stop_once_while_a_line_is_made(monkeypatch, at=2)
    with pytest.raises(KeyboardInterrupt):
        made.run()
    made.run()
    again = prepared(private, budget=budget, checkpoint=path)
    assert (again.step, again.is_finished) == (made.step, True)
