"""Reports as a page to sign: the unit first, beliefs that are rounded up, and no name that is markup."""

from __future__ import annotations

import base64
import importlib
import math
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.privacy.accounting.events import GaussianEvent, SubsampledEvent
from langchain_dpicl.privacy.ledger.tickets import Ticket
from langchain_dpicl.privacy.private_examples import PrivateExamples
from langchain_dpicl.reports.rendering import belief, fragment_of, page_of
from langchain_dpicl.reports.report import PrivacyReport

Shown: TypeAlias = tuple[Any, str, Any]
NAME = "<script>alert('ü')</script>"


def filled(about: Any = None, **declared: Any) -> Budget:
    budget = Budget(epsilon=2.0, delta=1e-6, name=NAME, about=about)
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
    assert text.index("one record, which is not a person") < text.index("epsilon at most")
    person = Reader(filled(unit_key="user").report().to_html()).text
    assert "all records of one 'user'" in person
    assert "which is not a person" not in person


def test_the_first_sentence_is_the_unit_also_of_a_stream() -> None:
    budget = Budget(epsilon=2.0, delta=1e-6, per="30 days")
    text = re.sub(r"\s+", " ", Reader(budget.report().to_html()).text)
    heading = "Privacy report of budget "
    assert text[text.rindex(heading) + len(heading) :].startswith("The promise holds for one unit of data that is yet")


def test_a_page_names_shares_tickets_recipients_and_what_is_not_covered(report: PrivacyReport) -> None:
    text = re.sub(r"\s+", " ", Reader(report.to_html()).text)
    for words in (
        "epsilon 0.5 of 2 in shares",
        "7 x query",
        "Gaussian noise, multiplier 3 of the sensitivity on a secret sample of rate 0.01",
        "component model host, as called country, as declared votes <b>tiny</b> h not declared",
        "1 votes 0.5 25.0 % ",
        "they receive private text in the clear",
        "computed anew when the page was made, and agree",
        "approved by",
        report.to_dict()["digest"],
    ):
        assert words in text, words


def test_a_page_shows_what_was_declared_and_asks_for_the_rest() -> None:
    about = {"purpose": "<i>support</i>", "owner": "Ann", "countries": {"h": "Germany", "other": "France"}}
    budget = filled(about=about)
    text = re.sub(r"\s+", " ", Reader(budget.report().to_html()).text)
    for words in (
        "purpose <i>support</i> owner Ann In the owner's own words",
        "Not declared: approved by, kept for.",
        "votes <b>tiny</b> h Germany",
        "Declared, and not called by any share: other (France).",
        "To be filled in approved by kept for decision",
    ):
        assert words in text, words


@pytest.mark.parametrize(
    ("declared", "shown"),
    [
        ({"h:443": "A"}, "h:443 A"),
        ({"h": "A"}, "h:443 A"),
        ({"h": "B", "h:443": "A"}, "h:443 A"),
        ({"h:8000": "A"}, "h:443 not declared"),
        ({"443": "A"}, "h:443 not declared"),
    ],
)
def test_a_country_is_of_a_host_with_its_port_or_without(declared: dict[str, str], shown: str) -> None:
    data = filled(about={"countries": declared}).report().to_dict()
    data["shares"][0]["components"][0]["public"]["seen_by"] = ["h:443"]
    text = re.sub(r"\s+", " ", Reader(page_of(data, ())).text)
    assert f"votes <b>tiny</b> {shown}" in text
    assert ("not called by any share" in text) is ("not declared" in shown.split(" ", 1)[1])


def by_response(prior: float, epsilon: float, delta: float) -> tuple[float, float]:
    """The worst mechanism of this price, answer by answer: the belief in the truth after an answer that does not tell
    everything, at most, and on average over all answers."""
    grown = math.exp(epsilon)
    present = {"all, in": delta, "in": (1 - delta) * grown / (1 + grown), "out": (1 - delta) / (1 + grown)}
    absent = {"all, out": delta, "in": present["out"], "out": present["in"]}
    after = {
        answer: prior * chance / (prior * chance + (1 - prior) * absent.get(answer, 0.0))
        for answer, chance in present.items()
        if chance
    }
    return max(after["in"], after["out"]), sum(present[answer] * belief for answer, belief in after.items())


@pytest.mark.parametrize("prior", [0.01, 0.1, 0.5, 0.99])
@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0, 4.0, 30.0])
@pytest.mark.parametrize("delta", [0.0, 1e-6, 0.2])
def test_beliefs_are_bounds_of_the_worst_mechanism_of_that_price(prior: float, epsilon: float, delta: float) -> None:
    most, average = by_response(prior, epsilon, delta)
    assert belief(prior, epsilon) == pytest.approx(most, rel=1e-12)
    assert average <= belief(prior, epsilon, delta) * (1 + 1e-12)
    assert belief(prior, epsilon, delta) == pytest.approx(delta + (1 - delta) * most, rel=1e-12)


def test_the_page_counts_delta_as_certainty(report: PrivacyReport) -> None:
    page = page_of({**report.to_dict(), "limits": {"epsilon": 2.0, "delta": 0.05}}, ())
    assert "1 % 11.6 % 10 % 47.9 % 50 % 88.7 %" in re.sub(r"\s+", " ", Reader(page).text)


def test_beliefs_are_those_of_bayes_rule_and_rounded_up(report: PrivacyReport) -> None:
    text = re.sub(r"\s+", " ", Reader(report.to_html()).text)
    odds = 2.718281828459045**2 / 99
    assert belief(0.01, 2.0) == pytest.approx(odds / (1 + odds), rel=1e-12)  # .06945
    assert "1 % 7.0 % 10 % 45.1 % 50 % 88.1 %" in text
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
    assert "To be filled in" not in shown
    assert shown == fragment_of(report.to_dict())


def test_a_saved_page_is_ascii_and_shows_the_same(report: PrivacyReport, tmp_path: Path) -> None:
    report.save_html(tmp_path / "report.html")
    assert Reader((tmp_path / "report.html").read_bytes().decode("ascii")).text == Reader(report.to_html()).text
    with pytest.raises(OSError, match="missing"):
        report.save_html(tmp_path / "missing" / "report.html")


@pytest.mark.loopback
@pytest.mark.parametrize(("width", "dark"), [(1440, False), (390, False), (390, True)])
def test_a_browser_shows_the_whole_page_on_desktop_and_phone(width: int, dark: bool, shown: Shown) -> None:
    browser, address, check = shown
    browser.screen(width, 900, phone=width < 600, dark=dark)
    browser.open(address)
    assert browser.run(check.WIDE) == []
    assert browser.run(check.COVERED) == []
    paper, ink = browser.run(
        "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.querySelector('h1')).color]"
    )
    assert (paper != "rgba(0, 0, 0, 0)") is dark
    assert ink == ("rgb(232, 236, 242)" if dark else "rgb(27, 35, 48)")


@pytest.mark.loopback
def test_a_browser_prints_it_on_pages_of_a4_with_its_bars(shown: Shown) -> None:
    browser, address, _ = shown
    browser.screen(1440, 900, dark=True)
    browser.open(address)
    printed = base64.b64decode(browser.call("Page.printToPDF", preferCSSPageSize=True)["data"])
    boxes = {tuple(map(float, box.split())) for box in re.findall(rb"/MediaBox \[([\d. ]+)\]", printed)}
    assert all((right, top) == pytest.approx((595.3, 841.9), abs=1.5) for _, _, right, top in boxes)
    assert boxes
    browser.call("Emulation.setEmulatedMedia", media="print")
    assert browser.run("getComputedStyle(document.querySelector('.bar i')).printColorAdjust") == "exact"
    assert browser.run("getComputedStyle(document.querySelector('h1')).color") == "rgb(27, 35, 48)"  # also in the dark


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    """A browser, the address of a full report's page, and what looks for faults; skipped where there is no Chromium."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[3] / "docs" / "tools"))
        browser, check = importlib.import_module("browser"), importlib.import_module("check_site")
        if (program := browser.chromium()) is None:
            pytest.skip("Chromium is not installed")
        folder = tmp_path_factory.mktemp("page")
        about = {"purpose": "x" * 300, "owner": "Ann", "countries": {"h": "Germany"}}
        budget = filled(about=about)
        for number in range(3):
            ticket = Ticket("a-rather-long-name-of-a-ticket", GaussianEvent(90.0), None, 10)
            budget.declare(f"component-of-a-long-name-{number}", tickets=[ticket], public={"seen_by": ["h" * 60]})
        budget.report().save_html(folder / "report.html")
        with browser.served(folder) as address, browser.Browser(program) as chromium:
            yield chromium, f"{address}/report.html", check
