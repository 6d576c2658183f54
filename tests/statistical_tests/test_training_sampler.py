"""A training step's sample is Poisson, as it is priced: each unit by its own coin, anew at every step.

What is looked at is what the engine is asked for, step by step, in a real run. A shuffled loader, which most training
code has, is the plant to find: each unit once per epoch, in batches of one size, costs epsilon 23 where Poisson's 3 is
claimed (67,349 units, batches of 1,024). Checks share a false-alarm rate of 1e-6 in all.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from scipy import stats

from langchain_dpicl import PrivateExamples
from langchain_dpicl.privacy.mechanisms.release_plan import PoissonUnits
from tests.audit_games import ALARM
from tests.gradient_doubles import LABELS, LogisticEngine, prepared, training

pytestmark = pytest.mark.usefixtures("free_prices")

UNITS, RATE = 64, 0.25
_EACH = ALARM / 5


class Asked(LogisticEngine):
    """Remembers what it is asked for, and says nothing."""

    def gradients(self, parameters: Any, groups: Any, *, add: Any) -> None:
        self.calls.append(tuple(tuple(example.text for example in group) for group in groups))


def samples_of_a_run(steps: int) -> list[list[int]]:
    """The units that the engine is asked for, at each step of a run."""
    records = [{"text": str(unit), "label": LABELS[unit % 2]} for unit in range(UNITS)]
    private = PrivateExamples(records, label_key="label", labels=LABELS, public_size=UNITS)
    engine = Asked(1, 2)
    prepared(
        private, engine=engine, training=training(expected_batch_size=int(UNITS * RATE), steps=steps), epsilon=1.0
    ).run()
    return [[int(text) for group in call for text in group or ()] for call in engine.calls]


def faults(samples: list[list[int]]) -> set[str]:
    """Returns what is no Poisson sampling at the claimed rate; every test but "sizes" is exact.

    "twice": a unit stands in a step twice (never). "rate": the share of all units at all steps that were drawn.
    "steps": how often a unit is in two steps that follow each other. "pairs": how often two units are in one step.
    "sizes": the spread of the numbers of units in a step; its chi-square law is approximate and its alarm is therefore
    set a thousand times lower. "units": one unit is drawn more or less often than claimed.
    """
    drawn = np.array([[unit in sample for unit in range(UNITS)] for sample in map(set, samples)])  # [steps, units]
    found = {"twice"} if any(len(set(sample)) < len(sample) for sample in samples) else set()
    steps = len(drawn) // 2 * 2
    both_steps = drawn[0:steps:2] & drawn[1:steps:2]  # disjoint pairs of steps: independent coins
    both_units = drawn[:, 0::2] & drawn[:, 1::2]
    spread = np.square(drawn.sum(axis=1) - UNITS * RATE).sum() / (UNITS * RATE * (1 - RATE))
    by_unit = min(_binomial(drawn[:, unit], RATE) for unit in range(UNITS))
    chances = {
        "rate": _binomial(drawn, RATE),
        "steps": _binomial(both_steps, RATE**2),
        "pairs": _binomial(both_units, RATE**2),
        "sizes": 1000 * 2 * min(stats.chi2.cdf(spread, len(drawn)), stats.chi2.sf(spread, len(drawn))),
        "units": UNITS * by_unit,
    }
    return found | {name for name, chance in chances.items() if chance < _EACH}


def _binomial(coins: np.ndarray, chance: float) -> float:
    return float(stats.binomtest(int(coins.sum()), coins.size, chance).pvalue)


def test_every_step_draws_each_unit_by_a_coin_of_its_own() -> None:
    assert faults(samples_of_a_run(400)) == set()


# --- plants: each has been made by somebody ---------------------------------------------------------------------------


def shuffled_loader() -> Callable[..., Any]:
    """Every epoch deals the units into batches, in random order."""

    def batches() -> Iterator[tuple[tuple[int], ...]]:
        size = int(UNITS * RATE)
        while True:
            order = np.random.default_rng().permutation(UNITS)
            for start in range(0, UNITS, size):
                yield tuple((int(unit),) for unit in order[start : start + size])

    made = batches()
    return lambda self, n, *, rng: next(made)


def fixed_size() -> Callable[..., Any]:
    """Each step draws the same number of units, without replacement."""
    return lambda self, n, *, rng: tuple((int(u),) for u in rng.choice_without_replacement(n, int(n * RATE)))


def with_replacement() -> Callable[..., Any]:
    return lambda self, n, *, rng: tuple((int(u),) for u in np.random.default_rng().integers(n, size=int(n * RATE)))


def one_sample_for_all_steps() -> Callable[..., Any]:
    """As large as a sample is on average: two steps share the right number of units if there are 3 to 5 in all."""
    return lambda self, n, *, rng: tuple((unit,) for unit in range(0, n, round(1 / RATE)))


def everybody() -> Callable[..., Any]:
    return lambda self, n, *, rng: tuple((unit,) for unit in range(n))


def in_turn() -> Callable[..., Any]:
    """Poisson sizes, and units in their order, round after round."""
    real, turn = PoissonUnits.draw, itertools.cycle(range(UNITS))
    return lambda self, n, *, rng: tuple((next(turn),) for _ in real(self, n, rng=rng))


def a_quarter_more() -> Callable[..., Any]:
    real = PoissonUnits.draw
    return lambda self, n, *, rng: real(PoissonUnits(1.25 * RATE), n, rng=rng)


@pytest.mark.parametrize(
    ("plant", "seen"),
    [
        (shuffled_loader, {"steps", "sizes"}),
        (fixed_size, {"sizes"}),
        (with_replacement, {"twice"}),
        (one_sample_for_all_steps, {"steps", "units"}),
        (everybody, {"rate", "sizes"}),
        (in_turn, {"steps"}),
        (a_quarter_more, {"rate"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_sampler_that_is_not_the_one_priced_is_found(
    plant: Callable[[], Any], seen: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Missed with a chance below 1e-12, that of the quarter more; the other plants are missed never, or far more rarely."""
    monkeypatch.setattr(PoissonUnits, "draw", plant())
    assert seen <= faults(samples_of_a_run(128))
