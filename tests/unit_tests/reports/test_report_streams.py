"""The report of a stream says the promise for windows and what longer stays cost, and is recomputed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy.accounting import epsilon_upper_bound
from langchain_dpicl.privacy.accounting.events import GaussianEvent, RepeatedEvent
from langchain_dpicl.privacy.extensions.stream_ledger import StreamTerms
from langchain_dpicl.privacy.ledger.tickets import ShareTerms, Ticket
from langchain_dpicl.privacy.private_examples import PrivateExamples
from langchain_dpicl.reports import verify_report
from langchain_dpicl.reports.claims import heaviest, report_digest, stream_claims, sum_over_shares


def ledger(**options: Any) -> Budget:
    budget = Budget(**{"epsilon": 4.0, "delta": 1e-6, "per": "30 days", **options})
    for name, extent, noise in [
        ("standing", (0, None), 12.0),
        ("october", (0, 30), 9.0),
        ("next year", (365, 395), 9.0),
    ]:
        tickets = [Ticket("run", GaussianEvent(noise), max_count=2, refundable=True)]
        share = budget.declare(name, tickets=tickets, epsilon=1.0, delta=2e-7, extent=extent)
        share.reserve("run", blocks=(extent[0], extent[0] + 6))
    return budget


def test_what_is_promised_is_that_of_the_fullest_window() -> None:
    report = ledger().report()
    assert (report.epsilon, report.delta) == (2.0, 4e-7)
    verified = verify_report(report)
    assert verified.ok, verified.problems
    assert verified.epsilon < 2.0


@pytest.mark.parametrize(
    ("adjacency", "words"), [("add_remove", "if they have no others"), ("replace_one", "presence")]
)
def test_the_promise_is_said_in_every_form_of_the_report(adjacency: Any, words: str) -> None:
    report = ledger(adjacency=adjacency).report()
    for text in (report.to_text(), report.to_markdown(), report.to_html()):
        assert "For any person and any 30 days in a row" in text
        assert words in text
        assert "360 blocks: at most epsilon" in text
        assert "not of the releases" in text
    life = Budget(epsilon=1.0, delta=1e-6).report()
    assert "stream" not in life.to_dict()
    assert "in a row" not in life.to_text() + life.to_markdown() + life.to_html()


@pytest.mark.parametrize(
    ("epsilon", "delta", "words"),
    [
        (2.0, 1e-6, "(4, 8.39e-06)-DP as to the records of that time of a person who has others."),
        (40.0, 1e-6, "nothing is promised as to the records of that time of a person who has others, for whom delta"),
        (1000.0, 1e-6, "nothing is promised as to the records of that time of a person who has others, for whom delta"),
        (1000.0, 0.0, "(2000, 0)-DP as to the records of that time of a person who has others."),
    ],
)
def test_a_delta_of_1_or_more_is_no_promise(epsilon: float, delta: float, words: str) -> None:
    report = Budget(epsilon=epsilon, delta=delta, per="30 days").report()
    assert words in report.to_text()
    assert verify_report(report).ok


def test_a_longer_stay_costs_what_the_tickets_of_its_windows_compose_to() -> None:
    rows = ledger().report().to_dict()["stream"]["longer_stays"]
    assert [(row["windows"], row["blocks"]) for row in rows] == [(2, 60), (3, 90), (6, 180), (12, 360)]
    for row in rows:
        standing = RepeatedEvent(GaussianEvent(12.0), 2 * row["windows"])
        dated = RepeatedEvent(GaussianEvent(9.0), 4)  # of 31 days, which two windows cover
        costs = [max(1.0, epsilon_upper_bound(e, delta=2e-7, adjacency="add_remove")) for e in (standing, dated)]
        shares = 2 + (row["blocks"] >= 360)  # a stay of 360 days is touched by both dated ones
        assert row["epsilon"] == pytest.approx(costs[0] + (shares - 1) * costs[1], rel=1e-6)
        assert row["delta"] == pytest.approx(shares * 2e-7)


@pytest.mark.traced
def test_what_retires_leaves_the_windows_that_it_has_not_read() -> None:
    budget = ledger()
    budget.retire("standing")
    report = budget.report()
    assert report.to_dict()["stream"]["retired"] == {"standing": 6}
    assert report.epsilon == 2.0  # the windows of the first days
    verified = verify_report(report)
    assert verified.ok, verified.problems
    budget.retire("october")
    assert verify_report(budget.report()).ok


def stays(data: dict[str, Any]) -> Any:
    return data["stream"]["longer_stays"]


DECLARED = PrivateExamples([{"text": "a", "user": "b"}], unit_key="user", public_size=400).declaration
HOURS = {"time_key": "at", "block": "PT1H", "grace": 0, "sizes": {"7": 400}}

EDITS: dict[str, Callable[[dict[str, Any]], object]] = {
    "promise": lambda data: data["stream"].update(promise="no person is ever harmed"),
    "a lower stay": lambda data: stays(data)[1].update(epsilon=0.5),
    "a stay that costs nothing": lambda data: stays(data)[1].update(epsilon=0.0),
    "no bound on the data": lambda data: stays(data).pop(),
    "a shorter stay": lambda data: stays(data)[0].update(blocks=3000),
    "window": lambda data: data["stream"].update(window=60),
    "retired": lambda data: data["stream"]["retired"].update(standing=3),
    "retired for nothing": lambda data: data["stream"]["retired"].update(standing=None),
    "retired nobody": lambda data: data["stream"]["retired"].update(nobody=3),
    "extent": lambda data: data["shares"][0]["components"][0].update(extent=[900, 901]),
    "promised": lambda data: data["promised"].update(epsilon=1.0),
    "life": lambda data: data.pop("stream"),
    "more": lambda data: data["stream"].update(note="x"),
    "data of other blocks": lambda data: data["datasets"].append({**DECLARED, "stream": HOURS}),
    "data without a time": lambda data: data["datasets"].append(DECLARED),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_promise_is_found_also_under_a_fitting_digest(name: str) -> None:
    data = copy.deepcopy(ledger().report().to_dict())
    EDITS[name](data)
    del data["digest"]
    data["digest"] = report_digest(data)
    assert not verify_report(data).ok


def remade(data: dict[str, Any]) -> dict[str, Any]:
    """Makes every number of a report anew that follows from what it says of retired components."""
    shares = [ShareTerms.from_dict({k: v for k, v in item.items() if k != "sealed_at"}) for item in data["shares"]]
    found = data["stream"]
    terms = StreamTerms.from_dict({name: found[name] for name in ("block", "origin", "window")})
    data["stream"] = stream_claims(shares, terms, found["retired"], **data["limits"], adjacency=data["adjacency"])
    data["promised"] = {name: sum_over_shares(data, [s[name] for s in data["shares"]]) for name in data["promised"]}
    del data["digest"]
    return {**data, "digest": report_digest(data)}


@pytest.mark.parametrize(
    ("retired", "words"),
    [
        ({"standing": None}, "expected blocks that the sealed share of 'standing' has read, found none"),
        ({"next year": 364}, "expected the last block of a reservation of 'next year', found 364"),
        ({"october": 31}, "expected the last block of a reservation of 'october', found 31"),
        ({"declared": 6}, "retired ['declared'], of which no ticket was reserved"),
    ],
)
def test_no_share_is_said_to_have_read_what_it_cannot(retired: dict[str, int | None], words: str) -> None:
    budget = ledger()
    budget.declare("declared", tickets=[Ticket("run", GaussianEvent(12.0))], epsilon=1.0, delta=2e-7, extent=(0, None))
    data = copy.deepcopy(budget.report().to_dict())
    assert verify_report(remade(copy.deepcopy(data))).ok
    data["stream"]["retired"] = retired
    assert verify_report(remade(data)).problems == (f"stream: {words}",)


def test_a_table_over_deltas_is_refused_since_it_would_be_of_a_life() -> None:
    with pytest.raises(ConfigurationError, match="for life"):
        ledger().report().epsilons()


def test_the_fullest_window_is_found_among_all() -> None:
    shares = [((0, 10), 0.1), ((5, None), 0.2), ((40, 41), 0.3), ((70, 70), 0.4), (None, 9.0)]
    assert heaviest(shares, 30) == pytest.approx(0.9)  # the window from 41 to 70
    assert heaviest(shares, 29) == pytest.approx(0.6)
    assert heaviest([], 30) == 0.0


def test_every_form_of_the_report_rounds_up_what_is_promised() -> None:
    stated = Budget(epsilon=1.2345612, delta=1.0000001e-6, per="30 days")
    stated.declare("q", tickets=[Ticket("run", GaussianEvent(9.0))], epsilon=1.0, delta=2.004e-7, extent=(0, 6))
    report = stated.report()
    for text in (report.to_text(), report.to_markdown(), report.to_html()):
        assert "(1.23457, 1.00001e-06)-DP" in text
        assert "(2.46913, 4.44e-06)-DP" in text  # (1 + exp(epsilon)) * delta is 4.4369e-06
        assert "60 blocks: at most epsilon" in text
        assert "delta 2.01e-07" in text
        assert "1e-06" not in text.replace("1.00001e-06", "")
    assert verify_report(report).ok
