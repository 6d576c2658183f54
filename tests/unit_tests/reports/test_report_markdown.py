"""Reports as Markdown: everything that a reader has to know, public values only, and no name is markup."""

from __future__ import annotations

import importlib.metadata
import platform
import re

import pytest

from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.privacy.accounting import events
from langchain_dpicl.privacy.accounting.events import GaussianEvent, PureEvent, SubsampledEvent, event_to_dict
from langchain_dpicl.privacy.extensions.gradient_sums import SampledBallEvent
from langchain_dpicl.privacy.extensions.random_allocation import AllocatedEvent
from langchain_dpicl.privacy.extensions.registry import EVENT_TYPES
from langchain_dpicl.privacy.ledger.tickets import Ticket
from langchain_dpicl.privacy.private_examples import PrivateExamples
from langchain_dpicl.reports.rendering import (
    code_span,
    event_words,
    format_rounded_down,
    format_rounded_up,
    markdown_of,
)
from langchain_dpicl.reports.report import PrivacyReport
from tests.ledgers import use_simple_prices

CANARY = "zx-markdown-canary-7"


def filled() -> Budget:
    ledger = Budget(epsilon=8.0, delta=1e-6, name="ours")
    sizes = {"a": 700, "b": 300}
    ledger.bind(
        PrivateExamples([], public_size=sizes, label_key="label", labels=("a", "b"), unit_key="user", dataset_id="mail")
    )
    step = SubsampledEvent(GaussianEvent(2.0), 0.01)
    tickets = [Ticket("token", step, label, 20, refundable=True) for label in ("a", "b")]
    public = {"model": "tiny", "noise_multiplier": 2.0}
    share = ledger.declare("few-shot", tickets=tickets, partition="mail", epsilon=1.0, public=public)
    share.reserve("token", label="a")
    with ledger.plan():
        for name in ("vote", "select"):
            ledger.declare(name, tickets=[Ticket("query", PureEvent(0.05), None, 10)], epsilon=0.6)
    ledger.gdp_pool("mu pool", epsilon=1.0).reserve(mu=0.01)
    return ledger


@pytest.fixture(scope="module")
def report() -> PrivacyReport:
    return filled().report()


def test_a_report_in_markdown_says_all_that_a_reader_has_to_know(report: PrivacyReport) -> None:
    text = report.to_markdown()
    data = report.to_dict()
    opinion = data["shares"][0]["pricing"]["opinions"][0]
    for words in (
        "# Privacy report of `ours`",
        "epsilon 8, delta 1e-06",
        "`add_remove`: two data sets are neighbours if",
        "| `mail` | `all records of one 'user'` | `a: 700, b: 300` | `a`, `b` |",
        f"| `few-shot` | 1 | 1.25e-07 | `{data['shares'][0]['sealed_at']}` |",
        "joint plan of `vote`, `select`",
        "not yet: only declared, nothing ran",
        "| `token` | `b` | 20 | Gaussian noise, multiplier 2 of the sensitivity on a secret sample of rate 0.01 |",
        "| `query` | all | 10 | a release of pure epsilon 0.05 |",
        "| `noise_multiplier` | `2.0` |",
        "A pool of mu ",
        "| `few-shot` | 0.131504 | `PLD` | `prv-accountant`: ",
        f"{format_rounded_down(opinion['lower'])} to {format_rounded_up(opinion['upper'])}",
        "`prv-accountant: no theorem for these steps, or unsound on them`",
        "- queries and their number",
        "they SEE it",
        "at most 32",
        "no signature",
        "dies with its process",
        f"| `dp-accounting` | `{importlib.metadata.version('dp-accounting')}` |",
        f"| `prv-accountant` | `{importlib.metadata.version('prv-accountant')}` |",
        f"| `python` | `{platform.python_version()}` |",
        data["digest"],
    ):
        assert words in text
    assert text.endswith("`\n")
    assert "\n\n\n" not in text


def test_the_versions_of_what_priced_it_are_in_every_form(report: PrivacyReport) -> None:
    versions = report.to_dict()["packages"]
    assert list(versions) == ["langchain-dpicl", "dp-accounting", "prv-accountant", "numpy", "scipy", "python"]
    for name in ("dp-accounting", "prv-accountant", "numpy", "scipy"):
        assert versions[name] == importlib.metadata.version(name)
        assert f"{name} {versions[name]}" in report.to_text()


def test_an_empty_report_has_no_empty_table() -> None:
    text = Budget(epsilon=1.0, delta=1e-6).report().to_markdown()
    assert "None was declared." in text
    assert "None is bound." in text
    assert "Mechanisms" not in text
    assert not re.search(r"\| --- \|\n\n", text)


def test_a_report_in_markdown_depends_on_no_record_and_on_no_use(monkeypatch: pytest.MonkeyPatch) -> None:
    use_simple_prices(monkeypatch)
    texts = set()
    for records, used, given_back in (([], 1, 0), ([CANARY] * 50, 7, 2)):
        ledger = Budget(epsilon=1.0, delta=1e-6)
        ledger.bind(PrivateExamples(records, public_size=100))
        share = ledger.declare("c", tickets=[Ticket("t", PureEvent(0.1), None, 10, refundable=True)], epsilon=1.0)
        reservation = share.reserve("t", count=used)
        reservation.burn(used - given_back)
        reservation.give_back()
        data = ledger.report().with_epsilons().to_dict()
        data["digest"] = data["ledger"]["ledger_id"] = data["shares"][0]["sealed_at"] = "same"
        texts.add(markdown_of(data))
    assert len(texts) == 1
    assert CANARY not in texts.pop()


HOSTILE = [
    "a|b",
    "`x`",
    "``y",
    "<script>",
    "[l](http://u)",
    "*b*",
    "_i_",
    "a\\",
    " ",
    "# h",
    "\\|",
    "`|`",
    "`<script>`",
    "`` <script> ```",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_is_never_markup_and_never_breaks_a_table(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_simple_prices(monkeypatch)
    ledger = Budget(epsilon=4.0, delta=1e-6, name=name)
    ledger.bind(PrivateExamples([], public_size=100, dataset_id=name, labels=(name,), label_key="k"))
    ticket = Ticket(name, PureEvent(0.1), name)
    ledger.declare(name, tickets=[ticket], partition=name, epsilon=1.0, public={name: name, "more": {"x": name}})
    text = ledger.report().to_markdown()
    assert code_span(name) in text
    columns = None
    for line in text.splitlines():
        if not line.startswith("| "):
            columns = None
            continue
        found = re.sub(r"\\[!-/:-@\[-`{-~]", "", line).count("|")  # a bar after an escaped backslash ends a cell
        assert columns in {None, found}, line
        columns = found
    outside = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", text)  # what no code span holds
    assert "<script>" not in outside
    assert "http://u" not in outside


def test_text_with_line_ends_stays_on_one_line() -> None:
    assert code_span("a\nb") == '`"a\\nb"`'
    assert "\n" not in code_span({"x": "a\nb"})


EVENTS = [
    events.NoEvent(),
    events.NonPrivateEvent(),
    GaussianEvent(2.0),
    PureEvent(0.5),
    events.BoundedRangeEvent(0.25),
    events.ZCdpEvent(0.1),
    events.RepeatedEvent(events.ComposedEvent((PureEvent(0.5), GaussianEvent(3.0))), 1200),
    SubsampledEvent(events.RepeatedEvent(GaussianEvent(2.0), 5), 0.01),
    SampledBallEvent(1.5, 0.02),
    AllocatedEvent(GaussianEvent(2.0), 2000, 0.5),
    events.ParallelEvent("d", (("a", PureEvent(0.5)),)),
    events.FailureEvent(2e-7),
]


def test_every_event_has_words_with_its_parameters() -> None:
    assert {type(event) for event in EVENTS} | {events.ComposedEvent} == set(EVENT_TYPES)
    texts = [event_words(event_to_dict(event)) for event in EVENTS]
    assert not any("event of kind" in text for text in texts)
    assert texts[6] == "1,200 times (a release of pure epsilon 0.5 and Gaussian noise, multiplier 3 of the sensitivity)"
    assert texts[7] == "(5 times Gaussian noise, multiplier 2 of the sensitivity) on a secret sample of rate 0.01"
    for text, numbers in zip(texts, ((), (), "2", "0.5", ("0.25",), ("0.1",)), strict=False):
        assert all(number in text for number in numbers)
    assert "2,000 batches (rate 0.5)" in texts[9]
    assert texts[11] == "something that tells nothing but with probability 2e-07"
    assert event_words({"kind": "new"}) == "an event of kind `new`"


@pytest.mark.parametrize(
    ("event", "numbers"),
    [
        (PureEvent(0.6333122229), ["0.633313"]),
        (events.FailureEvent(2.061554e-6), ["2.06156e-06"]),
        (events.BoundedRangeEvent(0.25000004), ["0.250001"]),
        (events.ZCdpEvent(0.10000004), ["0.100001"]),
        (SubsampledEvent(GaussianEvent(2.9999998), 0.010000004), ["2.99999", "0.0100001"]),
        (SampledBallEvent(1.4999998, 0.020000004), ["1.49999", "0.0200001"]),
    ],
)
def test_numbers_of_an_event_are_rounded_to_less_privacy(event: events.Event, numbers: list[str]) -> None:
    assert re.findall(r"\d\S*\d", event_words(event_to_dict(event))) == numbers


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (4.3771711, "4.37718"),
        (1e-6, "1e-06"),
        (2.0, "2"),
        (0.0, "0"),
        (12000.0, "12000"),
        (9.9999999, "10"),
        (1.1, "1.1"),
    ],
)
def test_a_bound_is_shown_rounded_up(value: float, text: str) -> None:
    assert format_rounded_up(value) == text
    assert float(format_rounded_up(value)) >= value
    assert float(format_rounded_down(value)) <= value
    assert float(format_rounded_down(value)) == pytest.approx(value, rel=1e-5)


def test_an_infinite_bound_is_shown_as_such() -> None:
    assert format_rounded_up(float("inf")) == "inf"
    assert format_rounded_up(0.12301, 3) == "0.124"
