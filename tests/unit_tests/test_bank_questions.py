"""The demo's private data: many invented questions, the same ones every time, and new ones that share no values."""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from bank_questions import LABELS, bank_questions, new_questions


def test_there_are_as_many_questions_of_each_label_as_asked_for():
    assert Counter(record["label"] for record in bank_questions()) == dict.fromkeys(LABELS, 1500)
    assert Counter(record["label"] for record in new_questions(30)) == dict.fromkeys(LABELS, 30)
    assert bank_questions(0) == []


def test_the_seed_fixes_the_data():
    assert bank_questions(50) == bank_questions(50)
    assert bank_questions(50, seed=1) != bank_questions(50, seed=2)


def test_nothing_is_left_unfilled():
    for record in [*bank_questions(), *new_questions(200)]:
        assert set(record) == {"text", "label"}
        assert not re.search(r"[{}]|  |^\s|\s$", record["text"])
        assert 20 < len(record["text"]) < 160


def test_most_records_hold_something_of_a_customer():
    texts = [record["text"] for record in bank_questions()]
    assert len(set(texts)) > 0.9 * len(texts)
    personal = [text for text in texts if re.search(r"[£€$]\d|\d [A-Z][a-z]+|[A-Z][a-z]+ [A-Z][a-z]+", text)]
    assert len(personal) > 0.8 * len(texts)


def test_new_questions_share_no_template_and_no_name_with_the_private_ones():
    def shapes(records):
        return {re.sub(r"[£€$][\d.]+|\d+|\b[A-Z]\w+", "*", record["text"]) for record in records}

    private, new = bank_questions(), new_questions(300)
    assert not shapes(private) & shapes(new)
    assert not {r["text"] for r in private} & {r["text"] for r in new}
    names = set(re.findall(r"(?:to|name is) ([A-Z]\w+ [A-Z]\w+)", " ".join(r["text"] for r in private)))
    assert len(names) > 500
    assert not names & set(re.findall(r"[A-Z]\w+ [A-Z]\w+", " ".join(r["text"] for r in new)))


@pytest.mark.parametrize("make", [bank_questions, new_questions])
def test_labels_come_in_no_order(make):
    first = [record["label"] for record in make(200)[:100]]
    assert min(Counter(first).values()) > 5
