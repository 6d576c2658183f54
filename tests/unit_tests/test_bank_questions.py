"""The demo's private data: invented questions and notes, the same every time, and new ones that share no person."""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import clinic_notes
from bank_questions import LABELS, bank_questions, new_questions
from clinic_notes import new_notes


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


def test_notes_of_the_clinic_are_complete_and_some_hold_a_phone_number():
    private, new = clinic_notes.clinic_notes(200), new_notes(50)
    assert Counter(record["label"] for record in private) == dict.fromkeys(clinic_notes.LABELS, 200)
    assert private == clinic_notes.clinic_notes(200)
    assert not any(re.search(r"[{}]|  |^\s|\s$", record["text"]) for record in [*private, *new])
    assert sum(" 07" in record["text"] for record in private) > 0.2 * len(private)


def test_new_notes_and_public_lines_hold_no_text_and_no_person_of_the_private_ones():
    private = {record["text"] for record in clinic_notes.clinic_notes()}
    public = {record["text"] for record in new_notes(300)} | set(clinic_notes.PUBLIC_LINES)
    assert not private & public
    assert not [text for text in public if re.search(r"07\d{3}|[A-Z]\w+ [A-Z]\w+", text)]


@pytest.mark.parametrize("make", [bank_questions, new_questions, clinic_notes.clinic_notes, new_notes])
def test_labels_come_in_no_order(make):
    first = [record["label"] for record in make(200)[:100]]
    assert min(Counter(first).values()) > 5
