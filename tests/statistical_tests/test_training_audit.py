"""One training run with many canaries: how well the released weights tell which of them were in the data.

The adversary of Steinke, Nasr and Jagielski, Privacy Auditing with One (1) Training Run (NeurIPS 2023): each canary is
in the data by a fair coin; a guesser sees the trained weights and says, of those it is surest about, who was in. If a
run is (epsilon, delta)-DP, right guesses are hardly more than coins that fall right with chance e^epsilon / (1 +
e^epsilon). The least epsilon under which so many right guesses have a chance of 1e-6 or more is a lower bound of the
true one, at confidence 1 - 1e-6. Canaries here are gradients along axes of their own, the worst there can be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from langchain_dpicl import PrivateExamples
from langchain_dpicl.audit import game
from langchain_dpicl.audit.component_games import right_guesses
from langchain_dpicl.options import Training
from langchain_dpicl.privacy.extensions.gradient_sums import RunningSum
from langchain_dpicl.privacy.mechanisms import release_plan as mechanisms
from langchain_dpicl.privacy.mechanisms.randomness import SecureRandom
from langchain_dpicl.privacy.mechanisms.release_plan import PoissonUnits
from langchain_dpicl.soft_prompts.trainer import PromptDPSGD
from tests.audit_games import ALARM
from tests.contracts.doubles import FixedDraws
from tests.gradient_doubles import LABELS, LogisticEngine, prepared
from tests.labelling_doubles import house

CANARIES, GUESSES, STEPS = 400, 200, 8
CLAIMED, DELTA = 1.5, 1e-8
LOUD = 25.0
"""Length of a canary's gradient, in clips."""


class Canaries(LogisticEngine):
    """The gradient of a canary is long, and along an axis of its own."""

    def __init__(self) -> None:
        super().__init__(1, CANARIES)

    def gradients(self, parameters: Any, groups: Any, *, add: Callable[[Any], None]) -> None:
        rows = np.zeros((len(groups), self.width))
        for row, group in zip(rows, groups, strict=True):
            row[int(group[0].text)] = -LOUD * 0.1
        add(rows)


def trained(present: np.ndarray, rate: float) -> PromptDPSGD:
    records = [{"text": str(place), "label": LABELS[0]} for place in present.nonzero()[0]]
    private = PrivateExamples(records, label_key="label", labels=LABELS, public_size=CANARIES)
    budget = house(epsilon=CLAIMED, delta=DELTA)
    learning = Training(
        expected_batch_size=int(rate * CANARIES), steps=STEPS, optimizer="sgd", learning_rate=1.0, l2_clip_norm=0.1
    )
    made = prepared(private, engine=Canaries(), budget=budget, epsilon=CLAIMED, noise=None, training=learning)
    made.run()
    return made


def lower_bound(right: int, guesses: int, *, delta: float = DELTA) -> float:
    """Returns the least epsilon that the guesses leave possible, at confidence 1 - `ALARM`."""
    return game.lower_bound(right, guesses, delta=delta, canaries=CANARIES)


def audited(rate: float) -> float:
    """Returns the lower bound that one run gives; how many guesses are made is fixed before."""
    present = np.random.default_rng().random(CANARIES) < 0.5
    made = trained(present, rate)
    assert made.report["epsilon"] == CLAIMED
    assert 0.95 * CLAIMED < made.plan.epsilon <= CLAIMED
    return lower_bound(right_guesses(made.weights, present, GUESSES), GUESSES)


@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_one_run_gives_away_no_more_than_it_is_charged(rate: float) -> None:
    """False alarm at most 1e-6 for each rate: that is the confidence of the bound."""
    assert audited(rate) <= CLAIMED


# --- plants -----------------------------------------------------------------------------------------------------------


def no_noise(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SecureRandom, "gaussian_draws", lambda self, n: FixedDraws(np.zeros(n)))


def a_tenth_of_the_noise(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(mechanisms, "ROUND_UP", 0.1)


def no_clip(patch: pytest.MonkeyPatch) -> None:
    """Rows are divided by the clip, and not cut."""
    real = RunningSum.add

    def add(self: Any, rows: Any) -> None:
        for _ in range(int(LOUD)):  # a row of 25 clips is the sum of 25 rows of one
            real(self, rows)

    patch.setattr(RunningSum, "add", add)


def units_that_come_often(patch: pytest.MonkeyPatch) -> None:
    real = PoissonUnits.draw
    patch.setattr(PoissonUnits, "draw", lambda self, n, *, rng: real(self, n, rng=rng) * 25)


@pytest.mark.parametrize("bug", [no_noise, a_tenth_of_the_noise, no_clip, units_that_come_often])
def test_a_run_that_gives_away_more_is_found(
    bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    assert audited(1.0) > CLAIMED


def test_the_bound_is_that_of_randomised_response() -> None:
    """Without delta: 400 right of 400 leave an epsilon whose coin falls right 400 times with chance 1e-6."""
    coin = ALARM ** (1 / 400)
    assert lower_bound(400, 400, delta=0.0) == pytest.approx(np.log(coin / (1 - coin)), rel=1e-9)
    assert lower_bound(200, 400) == 0.0
    assert lower_bound(390, 400) < lower_bound(400, 400) < lower_bound(400, 400, delta=0.0) + 1e-9


def test_the_bound_is_not_above_the_truth_where_guesses_come_from_randomised_response() -> None:
    """The worst mechanism there is for this game: 2,000 games at epsilon 1.5, none above (expected: 0.002)."""
    rng = np.random.default_rng(1)
    right = rng.binomial(CANARIES, 1 / (1 + np.exp(-1.5)), size=2000)
    assert lower_bound(int(right.max()), CANARIES, delta=0.0) <= 1.5
    assert lower_bound(int(np.median(right)), CANARIES, delta=0.0) > 0.8
