"""Canaries of one training run: what is said where no noise at all would not be seen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from langchain_dpicl.audit import component_games
from langchain_dpicl.privacy.mechanisms.randomness import SecureRandom
from tests.contracts.doubles import FixedDraws

RUN: dict[str, Any] = {"noise_multiplier": None, "epsilon": 1.0, "delta": 1e-6, "steps": 100, "sampling_rate": 0.01}


def test_a_sampled_run_without_noise_is_never_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four canaries of ten are never drawn, and their guesses are coins: nothing is refuted, and nothing is claimed."""
    monkeypatch.setattr(SecureRandom, "gaussian_draws", lambda self, n: FixedDraws(np.zeros(n)))
    found = component_games.canaries(RUN)
    assert found.verdict == "undecided"
    assert (found.delta, found.lower_bound, found.claimed_epsilon) == (1e-12, found.found, found.claimed)
    assert found.lower_bound > 0.5


def test_a_run_is_played_only_if_canaries_could_refute_it() -> None:
    given = {"adjacency": "add_remove", "noise_multiplier": 1.0, "sampling_rate": 0.01}
    assert not component_games.can_refute({"steps": 100, **given})  # claimed: 2.1, and without any noise 0.8 is proved
    assert component_games.can_refute({"steps": 100, **given, "noise_multiplier": 4.0})
    assert not component_games.can_refute({"steps": 2, **given, "noise_multiplier": 4.0})  # 98 % are never drawn


def test_canaries_that_are_replaced_turn_round(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    real = component_games.training_of
    monkeypatch.setattr(
        component_games, "training_of", lambda units, *a, **k: seen.extend(units) or real(units, *a, **k)
    )
    component_games.canaries({**RUN, "sampling_rate": 1.0, "steps": 1, "adjacency": "replace_one"})
    lengths = [float(unit.split(":")[1]) for unit in seen]
    assert len(lengths) == 1_000
    assert set(lengths) == {2.5, -2.5}
