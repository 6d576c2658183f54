"""Reports as a page to sign: the unit first, beliefs that are rounded up, and no name that is markup."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.privacy.accounting.events import GaussianEvent, SubsampledEvent
from langchain_dpicl.privacy.data.private_examples import PrivateExamples
from langchain_dpicl.privacy.ledger.tickets import Ticket
from langchain_dpicl.reports.page import belief, fragment_of, page_of
from langchain_dpicl.reports.report import PrivacyReport

NAME = "<script>alert('ü')</script>"


def filled(**declared: Any) -> Budget:
    budget = Budget(epsilon=2.0, delta=1e-6, name=NAME)
    budget.bind(PrivateExamples([], public_size=1000, dataset_id="mail", **declared))
    step = SubsampledEvent(GaussianEvent(3.0), 0.01)
    share = budget.declare(
        "votes",
        tickets=[Ticket("query", step, None, 7)],
        epsilon=0.5,
        public={"model": "<b>tiny</b>", "seen_by": ["h"]},
    )
    share.reserve("query")
    return budget


@pytest.fixture(scope="module")
def report() -> PrivacyReport:
    return filled().report()


class Reader(HTMLParser):
    """Reads a page: its tags, what they load, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.loads: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        self.loads += [value for name, value in attrs if name in {"src", "href", "data", "action"}]
        if tag not in {"meta", "br"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.text += " " + data


def test_a_page_is_whole_and_runs_and_loads_nothing(report: PrivacyReport) -> None:
    page = report.to_html()
    read = Reader(page)
    assert read.open == []
    assert "script" not in read.tags
    assert read.loads == []
    assert "url(" not in page
    assert "@import" not in page
    assert NAME in read.text  # as text, not as a tag
    assert "<b>tiny</b>" in read.text


def test_a_page_says_for_whom_the_promise_holds_before_any_number(report: PrivacyReport) -> None:
    text = Reader(report.to_html()).text
    assert text.index("One record is not a person") < text.index("epsilon at most")
    person = Reader(filled(unit_key="user").report().to_html()).text
    assert "all records of one 'user'" in person
    assert "One record is not a person" not in person


def test_a_page_names_shares_tickets_recipients_and_what_is_not_covered(report: PrivacyReport) -> None:
    text = re.sub(r"\s+", " ", Reader(report.to_html()).text)
    for words in (
        "epsilon 0.5 of 2 in shares",
        "7 x query",
        "Gaussian noise, multiplier 3 of the sensitivity on a secret sample of rate 0.01",
        "Who receives private text h ",
        "they receive private text in the clear",
        "computed anew when the page was made, and agree",
        "approved by",
        report.to_dict()["digest"],
    ):
        assert words in text, words


def test_beliefs_are_those_of_bayes_rule_and_rounded_up(report: PrivacyReport) -> None:
    text = re.sub(r"\s+", " ", Reader(report.to_html()).text)
    odds = 2.718281828459045**2 / 99
    assert belief(0.01, 2.0) == pytest.approx(odds / (1 + odds), rel=1e-12)  # .06945
    assert "1% 7.0 % 10% 45.1 % 50% 88.1 %" in text
    assert belief(0.5, 0.0) == 0.5
    assert "more than 99.9 %" in page_of({**report.to_dict(), "limits": {"epsilon": 20.0, "delta": 1e-6}}, ())


def test_where_a_unit_is_replaced_the_page_asks_which_of_two_it_is() -> None:
    budget = Budget(epsilon=1.0, delta=1e-6, adjacency="replace_one")
    assert "which of two candidates" in budget.report().to_html()
    assert "whether one unit is in the data" not in budget.report().to_html()


def test_a_page_shows_what_a_recomputation_found(report: PrivacyReport) -> None:
    page = page_of(report.to_dict(), ("votes: charged 0.1, costs <0.5>",))
    assert "This report does not hold" in page
    assert "votes: charged 0.1, costs &lt;0.5&gt;" in page
    assert "and agree" not in page


def test_a_notebook_shows_the_report_without_recomputing_it(report: PrivacyReport) -> None:
    shown = report._repr_html_()
    assert Reader(shown).open == []
    assert "Recomputed" not in shown
    assert "approved by" not in shown
    assert shown == fragment_of(report.to_dict())


def test_a_saved_page_is_ascii_and_shows_the_same(report: PrivacyReport, tmp_path: Path) -> None:
    report.save_html(tmp_path / "report.html")
    assert Reader((tmp_path / "report.html").read_bytes().decode("ascii")).text == Reader(report.to_html()).text
    with pytest.raises(OSError, match="missing"):
        report.save_html(tmp_path / "missing" / "report.html")
