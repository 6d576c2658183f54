"""What notebooks show of answers and measurements: a short table, in which nothing is markup."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import pytest

from langchain_dpicl.evaluation.evaluate import Saved
from langchain_dpicl.options import html_table
from langchain_dpicl.results import FreeFormResult, Receipt, RetrievalResult, VotingResult

RECEIPT = Receipt(
    source="release", tickets=1, component="<b>votes</b>", dataset_id="mail", ledger_id="0" * 32, entry=2,
    adjacency="add_remove", epsilon=1.0, delta=1e-6, mechanism="gaussian", noise_multiplier=1.0, queries_left=3,
)  # fmt: skip
VOTE: dict[str, Any] = {"label": "<i>yes</i>", "abstained": False, "scores": {"<i>yes</i>": 3.0}, "receipt": RECEIPT}


class Measured(Saved):
    def __init__(self) -> None:
        self.report = {"component": "<b>votes</b>", "dataset_id": "mail", "epsilon": 1.0, "delta": 0.0}

    def _released(self) -> dict[str, Any]:
        return {"<i>yes</i>": {"right": 0.5}}


SHOWN: list[Any] = [
    VotingResult(expected_votes=4.0, **VOTE),
    RetrievalResult(min_votes=None, noise_stddev=1.0, **VOTE),
    FreeFormResult(answer="<i>yes</i>" + "x" * 5000, keywords=None, similarities=None, receipt=RECEIPT),
    Measured(),
]


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.add(tag)


@pytest.mark.parametrize("value", SHOWN, ids=lambda value: type(value).__name__)
def test_an_answer_is_a_short_table_with_its_price(value: Any) -> None:
    shown = value._repr_html_()
    assert Tags(shown).seen == {"table", "caption", "tr", "th", "td"}
    for words in (f"<caption>{type(value).__name__}</caption>", "&lt;i&gt;yes&lt;/i&gt;", "&lt;b&gt;votes", "mail"):
        assert words in shown, words
    assert "<th>epsilon</th><td>1.0</td>" in shown
    assert len(shown) < 2500
    assert "None" not in shown


def test_of_a_long_value_the_beginning_is_shown() -> None:
    assert "<td>" + "x" * 500 + " ...</td>" in html_table("title", {"text": "x" * 501})
    assert "<td>" + "x" * 500 + "</td>" in html_table("title", {"text": "x" * 500})


def test_a_receipt_is_a_table_of_its_own() -> None:
    assert "<th>queries_left</th><td>3</td>" in RECEIPT._repr_html_()
