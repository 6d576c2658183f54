"""The tables of docs/what-epsilon-means.md: every number is computed here, from closed forms and from the accountant."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from scipy.stats import norm

from langchain_dpicl.privacy.accounting import calibrate, delta_upper_bound, epsilon_upper_bound, gdp_mu
from langchain_dpicl.privacy.accounting.events import (
    BoundedRangeEvent,
    Event,
    GaussianEvent,
    PureEvent,
    RepeatedEvent,
    SubsampledEvent,
)

PAGE = Path(__file__).resolve().parents[4] / "docs" / "what-epsilon-means.md"
DELTA = 1e-6
AT = [0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]


def rows_of(head: str) -> dict[int, list[str]]:
    """Returns the cells of the table that begins with this heading, by the number of their row."""
    table = PAGE.read_text(encoding="utf-8").partition(f"| {head} |")[2].partition("\n\n")[0]
    cells = [[cell.strip() for cell in line.strip("| ").split("|")] for line in table.split("\n")[2:]]
    return {int(row[0]): row[1:] for row in cells}


def assert_shown(cell: str, value: float) -> None:
    """Requires that a cell is this number, rounded to the digits that it shows."""
    digits, percent = re.fullmatch(r"(\d*\.?\d*)( %)?", cell).groups()  # type: ignore[union-attr]
    shown = 100 * value if percent else value
    assert abs(float(digits) - shown) <= 0.5000001 * 10 ** -len(digits.partition(".")[2]), (cell, value)


def advantage(epsilon: float, delta: float) -> float:
    return (math.exp(epsilon) - 1 + 2 * delta) / (math.exp(epsilon) + 1)


def tpr(fpr: float, epsilon: float) -> float:
    return min(math.exp(epsilon) * fpr + DELTA, 1 - math.exp(-epsilon) * (1 - DELTA - fpr))


def posterior(prior: float, epsilon: float) -> float:
    odds = math.exp(epsilon) * prior / (1 - prior)
    return odds / (1 + odds)


def group_delta(epsilon: float, units: int) -> float:
    return DELTA * (math.exp(units * epsilon) - 1) / (math.exp(epsilon) - 1)


def against(event: Event) -> tuple[float, float]:
    """The best advantage, and the most that TPR can be at 1 % FPR, of an attacker on this event."""
    deltas = [delta_upper_bound(event, epsilon=epsilon, adjacency="add_remove") for epsilon in AT]
    return deltas[0], min(math.exp(e) * 0.01 + delta for e, delta in zip(AT, deltas, strict=True))


def tokens(noise: float) -> Event:
    """A hundred tokens, each of a fresh secret sample of one record in a hundred."""
    return RepeatedEvent(SubsampledEvent(BoundedRangeEvent(1 / noise), 0.01), 100)


@pytest.mark.parametrize("epsilon", [1, 2, 4, 8])
def test_what_any_mechanism_of_this_price_allows(epsilon: int) -> None:
    beliefs = [posterior(prior, epsilon) for prior in (0.5, 0.1, 0.01)]
    values = [advantage(epsilon, DELTA), tpr(0.01, epsilon), tpr(0.001, epsilon), *beliefs]
    for cell, value in zip(rows_of("epsilon")[epsilon], values, strict=True):
        assert_shown(cell, value)
    # At epsilon 0 delta is the total variation distance, which is the best advantage.
    best = delta_upper_bound(PureEvent(float(epsilon)), epsilon=0.0, adjacency="add_remove")
    assert math.isclose(best, advantage(epsilon, 0.0), rel_tol=1e-5)


@pytest.mark.parametrize("epsilon", [1, 2, 4, 8])
def test_what_the_mechanisms_here_allow(epsilon: int) -> None:
    mu = gdp_mu(float(epsilon), DELTA)  # Gaussian noise that costs exactly this
    found, caught = against(GaussianEvent(1 / mu))
    assert math.isclose(found, 2 * norm.cdf(mu / 2) - 1, rel_tol=1e-4)  # Dong, Roth and Su (2022)
    assert norm.cdf(norm.ppf(0.01) + mu) <= caught <= 1.1 * norm.cdf(norm.ppf(0.01) + mu)
    noise = calibrate(tokens, epsilon=float(epsilon), delta=DELTA, adjacency="add_remove")
    for cell, value in zip(
        rows_of("total epsilon at delta 1e-6")[epsilon], [found, caught, *against(tokens(noise))], strict=True
    ):
        assert_shown(cell, value)


def test_what_several_records_of_one_person_get() -> None:
    for units, cells in rows_of("records of one person").items():
        for epsilon, cell in zip((1, 2, 4), cells, strict=True):
            delta = group_delta(epsilon, units)
            shown = f"{delta:.1e}".replace("e-0", "e-")
            assert cell == "nothing" if delta > 1 else re.fullmatch(rf"{units * epsilon} at (?:delta )?{shown}", cell)


def test_the_general_price_of_a_group_is_an_upper_bound() -> None:
    one = GaussianEvent(1 / gdp_mu(1.0, DELTA))
    five = GaussianEvent(one.noise_multiplier / 5)  # five rows move the sum by five times as much
    assert epsilon_upper_bound(five, delta=group_delta(1.0, 5), adjacency="add_remove") <= 5.0
