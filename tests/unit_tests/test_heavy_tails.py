"""Heavier tails find a test that noise fails once in tens of thousands of runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from langchain_dpicl.privacy.mechanisms.randomness import SecureRandom
from tests import heavy_tails

SELDOM = """
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM

def test_seldom_fails():
    assert abs(SYSTEM_RANDOM.gaussian(1)[0]) < 4.0

def test_never_fails():
    assert SYSTEM_RANDOM.binomial(10, 0.5) <= 10

def test_draws_nothing():
    pass
"""


def test_a_test_that_seldom_fails_is_found(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A draw beyond 4, of chance 6e-5, comes in one of seven runs here: 100 runs miss it with a chance below 1e-6."""
    (tmp_path / "test_once.py").write_text(SELDOM)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    place = ("-c", str(tmp_path / "pytest.ini"), "-p", "no:cacheprovider", str(tmp_path / "test_once.py"))
    assert heavy_tails.main(["--power", "8", "--times", "100", *place]) == 0
    *_, found, counts = capfd.readouterr().out.splitlines()
    assert "test_once.py::test_seldom_fails" in found
    assert found.startswith("failed ")
    assert counts == "2 tests draw noise, 1 of them failed"


class Last(SecureRandom):
    """The entropy whose level is nearest 1."""

    def entropy(self, num_bytes: int) -> bytes:
        return b"\xff" * num_bytes


def test_a_level_stays_below_1_and_a_binomial_draw_below_its_number_of_coins(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("exponential", "gaussian_draws", "_level", "geometric"):
        monkeypatch.setattr(SecureRandom, name, getattr(SecureRandom, name))
    heavy_tails.Tails(8.0).install()
    assert Last()._level() < 1
    assert Last().binomial(10, 0.5) == 10
