"""docs/sign-off: numbers are those of the formula, and what officers search for stands there."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from langchain_dpicl.reports.rendering import belief

PAGES = Path(__file__).parents[2] / "docs" / "sign-off"


def test_the_table_for_a_meeting_is_that_of_the_bound_rounded_up() -> None:
    rows = re.findall(
        r"^\| ([\d.]+) \| ([\d.]+) in 1,000 \| ([\d.]+) in 100 \| ([\d.]+) in 10 \|",
        _read("choosing-epsilon"),
        re.MULTILINE,
    )
    assert [row[0] for row in rows] == ["0.5", "1", "2", "4", "8"]
    for epsilon, *shown in rows:
        for text, whole in zip(shown, (1000, 100, 10), strict=True):
            digits = len(text.partition(".")[2])
            exact = belief(1 / whole, float(epsilon)) * whole
            assert float(text) == math.ceil(exact * 10**digits) / 10**digits, (epsilon, whole)


def _read(name: str) -> str:
    return (PAGES / f"{name}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["officer", "dpia", "notice"])
def test_beliefs_in_words_are_those_of_the_bound(name: str) -> None:
    assert math.ceil(belief(0.01, 1.0) * 1000) / 10 == 2.7
    assert re.search(r"\[?2\.7\]? in 100", re.sub(r"\s+>? ?", " ", _read(name)))


@pytest.mark.parametrize(
    "word",
    [
        "PII", "Presidio", "PIIMiddleware", "LLM02", "LLM08", "SP 800-226", "28/2024", "05/2014", "recital 26",
        "5(1)(b)", "13, 14", "15, 17", "25:", "28:", "32:", "35:", "44",
    ],
)  # fmt: skip
def test_the_officer_finds(word: str) -> None:
    assert word in _read("officer")


def test_every_source_has_its_address() -> None:
    sources = _read("officer").partition("## Sources")[2]
    items = re.split(r"\n- ", sources)[1:]
    assert len(items) >= 6
    assert all("](https://" in item for item in items)


def test_the_processor_list_has_every_point_of_article_28_3() -> None:
    page = _read("processor")
    for words in (
        "documented instructions",
        "confidentiality",
        "Sub-processors",
        "requests of the people",
        "deleted",
        "audit",
    ):
        assert words in page
