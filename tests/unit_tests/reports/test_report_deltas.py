"""Epsilon of a report over deltas: an upper bound everywhere, by the method that the report states."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy.accounting import epsilon_upper_bound, gdp_epsilon, zcdp_epsilon
from langchain_dpicl.privacy.accounting.events import (
    ComposedEvent,
    GaussianEvent,
    PureEvent,
    RepeatedEvent,
)
from langchain_dpicl.privacy.ledger.tickets import Ticket
from langchain_dpicl.reports import report as report_deltas
from langchain_dpicl.reports.report import METHOD, NO_BOUND, PrivacyReport, default_deltas, verify_report
from tests.sealed_files import with_digest

DELTAS = (1e-12, 1e-9, 3e-8, 1e-6, 1e-5)


def gaussian_share(ledger: Budget, name: str, noise: float, *, delta: float, count: int = 1) -> None:
    share = ledger.declare(name, tickets=[Ticket("t", GaussianEvent(noise), None, count)], delta=delta)
    share.reserve("t")


@pytest.fixture(scope="module")
def gaussians() -> PrivacyReport:
    """Two shares whose exact joint curve is known, of unequal deltas."""
    ledger = Budget(epsilon=30.0, delta=1e-5)
    gaussian_share(ledger, "a", 2.0, delta=1e-6, count=3)
    gaussian_share(ledger, "b", 5.0, delta=3e-6)
    return ledger.report()


def exact_gaussian_epsilon(mu: float, delta: float) -> float:
    """Balle and Wang (2018), Theorem 8, solved by bisection: no code of the package."""

    def excess(epsilon: float) -> float:
        low = norm.logcdf(-epsilon / mu - mu / 2)
        return float(norm.cdf(-epsilon / mu + mu / 2) - math.exp(epsilon + low) - delta)

    return float(brentq(excess, 0.0, 200.0, xtol=1e-12))


def test_every_bound_is_above_what_the_shares_really_cost_together(gaussians: PrivacyReport) -> None:
    mu = math.sqrt(3 / 2.0**2 + 1 / 5.0**2)
    for row in gaussians.epsilons(DELTAS).rows:
        assert row.epsilon is not None
        assert row.epsilon >= exact_gaussian_epsilon(mu, row.delta)


def test_one_share_has_its_exact_curve() -> None:
    ledger = Budget(epsilon=30.0, delta=1e-5)
    gaussian_share(ledger, "a", 2.0, delta=1e-6, count=3)
    for row in ledger.report().epsilons(DELTAS).rows:
        exact = exact_gaussian_epsilon(math.sqrt(3) / 2, row.delta)
        assert row.epsilon is not None
        assert exact <= row.epsilon <= exact * (1 + 1e-6)


def test_each_share_is_priced_at_its_part_of_delta(gaussians: PrivacyReport) -> None:
    for row in gaussians.epsilons(DELTAS).rows:
        parts = (row.delta * 1e-6 / 4e-6, row.delta * 3e-6 / 4e-6)
        wanted = gdp_epsilon(math.sqrt(3) / 2, parts[0]) + gdp_epsilon(1 / 5, parts[1])
        assert row.epsilon == pytest.approx(wanted, rel=1e-6)


def test_the_table_does_not_speak_for_shares_that_were_sealed_because_of_what_others_released() -> None:
    """Seal a second share only where the loss of the first is within its row: the loss passes its row too often."""
    row, noises = 1e-6, (20.0, 0.25)

    def table(*noises: float) -> float:
        ledger = Budget(epsilon=200.0, delta=1e-5)
        for name, noise in enumerate(noises):
            gaussian_share(ledger, str(name), noise, delta=1e-6)
        (found,) = ledger.report().epsilons([row]).rows
        assert found.epsilon is not None
        return found.epsilon

    stopped, went_on = table(noises[0]), table(*noises)
    mu, second = 1 / noises[0], 1 / noises[1]
    losses = np.linspace(mu**2 / 2 - 8 * mu, stopped, 4001)  # of the first share, where the second is sealed
    left = went_on - losses
    curve = norm.cdf(second / 2 - left / second) - np.exp(left + norm.logcdf(-second / 2 - left / second))
    failed = np.trapezoid(norm.pdf((losses - mu**2 / 2) / mu) / mu * curve, losses)
    assert row + failed > 1.3 * row  # `row` where the run stops
    assert "where no share was sealed because of what another one had released" in METHOD


def test_a_joint_plan_is_priced_once_and_pools_by_their_closed_form() -> None:
    ledger = Budget(epsilon=30.0, delta=1e-5)
    ten = [Ticket("query", PureEvent(0.3), None, 10)]
    with ledger.plan(delta=4e-6):
        shares = [ledger.declare(name, tickets=ten) for name in ("vote", "select")]
    for share in shares:
        share.reserve("query")
    pool = ledger.zcdp_pool("rho", epsilon=1.0, delta=4e-6)
    pool.reserve(rho=pool.rho / 3)
    (row,) = ledger.report().epsilons([1e-7]).rows
    event = ComposedEvent((RepeatedEvent(PureEvent(0.3), 10), RepeatedEvent(PureEvent(0.3), 10)))
    joint = epsilon_upper_bound(event, delta=5e-8, adjacency="add_remove")
    assert row.epsilon == pytest.approx(joint + zcdp_epsilon(pool.rho, 5e-8), rel=1e-6)


def test_only_what_was_sealed_counts_and_nothing_costs_nothing() -> None:
    ledger = Budget(epsilon=30.0, delta=1e-5)
    ledger.declare("c", tickets=[Ticket("t", PureEvent(1.0))])
    assert [row.epsilon for row in ledger.report().epsilons().rows] == [0.0] * 4
    gaussian_share(ledger, "a", 2.0, delta=1e-6)
    (row,) = ledger.report().epsilons([1e-6]).rows
    assert row.epsilon == pytest.approx(gdp_epsilon(0.5, 1e-6), rel=1e-6)


def test_without_deltas_the_ledgers_own_and_three_smaller_ones_are_taken() -> None:
    assert default_deltas(2e-6) == (2e-9, 2e-8, 2e-7, 2e-6)
    rows = Budget(epsilon=1.0, delta=2e-6).report().epsilons().rows
    assert [row.delta for row in rows] == [2e-9, 2e-8, 2e-7, 2e-6]


def test_a_delta_below_the_declared_gap_of_the_noise_has_no_finite_bound() -> None:
    ledger = Budget(epsilon=30.0, delta=1e-5)
    share = ledger.declare("c", tickets=[Ticket("t", PureEvent(1.0))], delta=1e-6, implementation_delta=1e-9)
    share.reserve("t")
    report = ledger.report().with_epsilons([1e-10, 1e-9, 1e-300, 1e-8])
    assert report.table is not None
    assert [row.epsilon for row in report.table.rows] == [math.inf, math.inf, math.inf, 1.0]
    rows = report.to_dict()["epsilons"]["rows"]
    assert [row["epsilon"] for row in rows] == [None, None, None, 1.0]
    assert [row["note"] for row in rows] == [NO_BOUND, NO_BOUND, NO_BOUND, ""]
    assert NO_BOUND in report.to_markdown()
    assert NO_BOUND in report.to_text()
    assert verify_report(report).problems == ()


@pytest.mark.parametrize(
    "deltas", [[], [0.0], [1.0], [-1e-6], [float("nan")], [True], ["1e-6"], [1e-9 * k for k in range(1, 202)]]
)
def test_deltas_out_of_range_are_refused(deltas: Any) -> None:
    with pytest.raises(ConfigurationError):
        Budget(epsilon=1.0, delta=1e-6).report().epsilons(deltas)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), True])
def test_a_cap_on_time_out_of_range_is_refused(seconds: Any) -> None:
    with pytest.raises(ConfigurationError, match="max_seconds"):
        Budget(epsilon=1.0, delta=1e-6).report().epsilons(max_seconds=seconds)


# --- with prices that a person can follow -----------------------------------------------------------------------------


def use_prices(monkeypatch: pytest.MonkeyPatch, cost: Callable[[float], float]) -> list[float]:
    """Prices every share by its part of delta alone; returns the list of those parts."""
    asked: list[float] = []

    def price(components: Any, *, delta: float, adjacency: str, opinions: bool) -> tuple[float, dict[str, Any]]:
        assert (adjacency, opinions) == ("add_remove", False)
        asked.append(delta)
        return cost(delta), {}

    monkeypatch.setattr(report_deltas, "share_price", price)
    return asked


def test_what_holds_at_a_smaller_delta_holds_at_a_larger_one(
    gaussians: PrivacyReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_prices(monkeypatch, lambda delta: 9.0 if delta > 1e-7 else 2.0)
    rows = gaussians.epsilons([1e-8, 2e-6, 3e-6]).rows
    assert [row.epsilon for row in rows] == [4.0, 4.0, 4.0]


def test_the_charges_bound_every_delta_from_their_own_sum_on(
    gaussians: PrivacyReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_prices(monkeypatch, lambda _: 1000.0)
    rows = gaussians.epsilons([3.9e-6, 4e-6, 5e-6]).rows
    assert [row.epsilon for row in rows] == [2000.0, gaussians.epsilon, gaussians.epsilon]


def test_the_parts_of_delta_never_add_to_more_than_it(
    gaussians: PrivacyReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    for delta in (1e-7, 1.1e-7, 3.3333333333333e-7, 7e-12):
        asked = use_prices(monkeypatch, lambda _: 1.0)
        gaussians.epsilons([delta])
        assert len(asked) == 2
        assert math.fsum(asked) <= delta
        assert math.fsum(asked) >= delta * (1 - 1e-12)


def test_no_price_is_begun_once_time_is_over_and_the_largest_delta_comes_first(
    gaussians: PrivacyReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count()  # a second a look
    monkeypatch.setattr(report_deltas, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    asked = use_prices(monkeypatch, lambda _: 1.5)
    table = gaussians.epsilons([1e-9, 1e-8, 1e-7], max_seconds=4.0)
    assert len(asked) == 3  # both shares at the largest delta, one of the next
    assert [row.epsilon for row in table.rows] == [None, None, 3.0]
    assert [row.note for row in table.rows] == ["not computed within 4 s", "not computed within 4 s", ""]
    assert table.to_dict()["rows"][0] == {"delta": 1e-9, "epsilon": None, "note": "not computed within 4 s"}


# --- in reports -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def with_table(gaussians: PrivacyReport) -> PrivacyReport:
    return gaussians.with_epsilons([1e-8, 1e-6])


def test_a_report_has_a_table_only_where_it_was_asked_for(gaussians: PrivacyReport, with_table: PrivacyReport) -> None:
    assert "epsilons" not in gaussians.to_dict()
    table = with_table.to_dict()["epsilons"]
    assert table["method"] == METHOD
    assert [row["delta"] for row in table["rows"]] == [1e-8, 1e-6]
    for form in (with_table, with_table.to_json(), with_table.to_dict()):
        assert verify_report(form).problems == ()
    for text in (with_table.to_text(), with_table.to_markdown()):
        assert METHOD in text
        assert "1e-08" in text


def lower_bound(data: dict[str, Any]) -> None:
    data["epsilons"]["rows"][0]["epsilon"] *= 0.999


def other_method(data: dict[str, Any]) -> None:
    data["epsilons"]["method"] = "advanced composition"


def smaller_delta(data: dict[str, Any]) -> None:
    data["epsilons"]["rows"][1]["delta"] = 1e-7


def no_rows(data: dict[str, Any]) -> None:
    del data["epsilons"]["rows"]


def bound_as_text(data: dict[str, Any]) -> None:
    data["epsilons"]["rows"][0]["epsilon"] = "little"


def too_many_rows(data: dict[str, Any]) -> None:
    data["epsilons"]["rows"] = [{"delta": 1e-9 * k, "epsilon": 1e6, "note": ""} for k in range(1, 1000)]


def bound_as_note(data: dict[str, Any]) -> None:
    data["epsilons"]["rows"][0].update(epsilon=None, note="0.31")


def number_as_note(data: dict[str, Any]) -> None:
    data["epsilons"]["rows"][0].update(epsilon=None, note=0)


EDITS = [lower_bound, other_method, smaller_delta, no_rows, bound_as_text, bound_as_note, number_as_note, too_many_rows]


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_table_is_found_behind_a_fitting_digest(
    edit: Callable[[dict[str, Any]], None], with_table: PrivacyReport
) -> None:
    data = json.loads(with_table.to_json())
    edit(data)
    verified = verify_report(with_digest(data))
    assert not verified.ok
    assert not any("digest" in problem for problem in verified.problems)


def test_a_bound_that_is_too_high_or_left_out_is_no_fault(with_table: PrivacyReport) -> None:
    data = json.loads(with_table.to_json())
    data["epsilons"]["rows"][0]["epsilon"] *= 2
    for note in ("", NO_BOUND, "not computed within 0.5 s"):
        data["epsilons"]["rows"][1].update(epsilon=None, note=note)
        assert verify_report(with_digest(data)).problems == ()


def test_shares_that_were_not_sealed_cannot_be_left_out_by_saying_so(with_table: PrivacyReport) -> None:
    data = json.loads(with_table.to_json())
    data["shares"][0]["sealed_at"] = None
    assert verify_report(with_digest(data)).ok  # a higher bound than needed
    data["epsilons"]["rows"][0]["epsilon"] = 1e-3
    assert any("epsilons" in problem for problem in verify_report(with_digest(data)).problems)


def test_deltas_of_the_table_and_limits_of_pools_are_rounded_up_in_every_form() -> None:
    ledger = Budget(epsilon=1.2345612, delta=1.00000049e-6)
    assert "epsilon 1.23457, delta 1.00001e-06" in ledger._repr_html_()
    pool = ledger.gdp_pool("labels", epsilon=0.4)
    assert pool.mu > 0.0950695  # to the nearest of six digits
    report = ledger.report().with_epsilons([1.00000049e-6])
    for text in (report.to_text(), report.to_markdown(), report.to_html()):
        assert "0.0950696" in text
        assert re.search(r"(?<![\d.])1e-06", text) is None
