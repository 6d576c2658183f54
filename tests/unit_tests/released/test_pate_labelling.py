"""The FAQ example runs: labels are paid for once, braces survive both stock templates, everything after is free."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from langchain_dpicl import PromptPATEExampleSelector
from langchain_dpicl.options import ByLength
from langchain_dpicl.released.labelled_pool import PoolEntry

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


@pytest.fixture(scope="module")
def faq() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        import pate_labelling

        yield pate_labelling
        for name in ("pate_labelling", "bank_questions"):
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def taught(faq: Any) -> tuple[Any, Any]:
    """A labeler that has run, and its selector."""
    labeler, _ = faq.make_labeler()
    labeler.run(progress=False)
    return labeler, faq.make_selector(labeler, progress=False)


def test_every_line_of_the_faq_gets_an_answer_and_most_labels_are_right(faq: Any, taught: tuple[Any, Any]) -> None:
    pool = taught[0].result
    right, labels = faq.right_and_all(pool)
    assert labels + len(pool.rejected) == len(faq.TOPIC_OF) == 40
    assert not pool.waiting
    # Ten runs had 34 to 39 right, chance has 10. A line that is right with probability .8 makes this fail once in 1e8.
    assert right > 15
    assert taught[0].queries_left == 0


def test_a_line_with_braces_reads_the_same_in_both_stock_templates(faq: Any, taught: tuple[Any, Any]) -> None:
    selector = taught[1].with_strategy(ByLength(max_length=10_000))
    selector.add_public_example({"text": "What is {shop} in my statement?", "label": "card payment"})
    for prompt in (faq.as_prompt(selector), faq.as_chat_prompt(selector)):
        assert "What is {shop} in my statement?" in prompt.format(input="Who is {shop}?")


def test_string_and_chat_chains_answer_with_topics(faq: Any, taught: tuple[Any, Any]) -> None:
    entries = [PoolEntry({"text": line}, topic, "public") for line, topic in faq.TOPIC_OF.items()]
    pool = replace(taught[0].result, entries=tuple(entries), student=None)  # true labels: the same answers in every run
    for name, chain in faq.chains(PromptPATEExampleSelector(pool, strategy=ByLength(max_length=10_000))).items():
        assert chain.invoke({"input": "How do I cancel a transfer?"}).strip() in faq.LABELS, name


def test_the_example_prints_the_votes_the_report_and_a_picture(
    faq: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    faq.main(["--no-curve", "--out", str(tmp_path)])
    shown = capsys.readouterr().out
    assert "label x 40" in shown
    assert "Privacy report" in shown
    assert all(line in shown for line in faq.TOPIC_OF)
    assert "picture" in shown
