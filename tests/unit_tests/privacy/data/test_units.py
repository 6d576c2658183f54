from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy.private_examples import (
    Declaration,
    Units,
    make_declaration,
    read_units,
    unit_label,
)

LABELS = ("a", "b", "c")
USERS = st.sampled_from(["u1", "u2", "u3", "u4", 5, 6])
RECORDS = st.lists(
    st.fixed_dictionaries({"text": st.text(max_size=12), "label": st.sampled_from(LABELS), "user": USERS}), max_size=12
)
FEW = settings(max_examples=50)


def declaration(**changes: Any) -> Declaration:
    given_: dict[str, Any] = {
        "dataset_id": "d",
        "public_size": 10,
        "text_key": "text",
        "label_key": "label",
        "labels": LABELS,
        "unit_key": "user",
        "fields": (),
        "max_chars": 100,
        "records_per_unit": 3,
    }
    return make_declaration(**{**given_, **changes})


def units_of(records: list[Any], **changes: Any) -> Units:
    units, fault = read_units(iter(records), declaration(**changes))
    assert fault == ""
    assert units is not None
    return units


def contents(units: Units) -> dict[str, tuple[dict[str, str], ...]]:
    return {name: units.contents[position] for name, position in units.positions.items()}


@FEW
@given(RECORDS)
def test_a_unit_is_reduced_by_looking_at_that_unit_alone(records: list[dict[str, Any]]) -> None:
    """Removing every record of one unit (the neighbour) leaves all other units as they were."""
    full = contents(units_of(records))
    for name in full:
        rest = [record for record in records if str(record["user"]) != name]
        assert contents(units_of(rest)) == {key: value for key, value in full.items() if key != name}


@FEW
@given(RECORDS)
def test_every_unit_stands_in_exactly_one_label(records: list[dict[str, Any]]) -> None:
    units = units_of(records)
    seats = [position for seats in units.by_label.values() for position in seats]
    assert sorted(seats) == list(range(len(units.contents)))
    for label, positions in units.by_label.items():
        for position in positions:
            assert {record["label"] for record in units.contents[position]} == {label}


@FEW
@given(RECORDS)
def test_the_label_of_a_unit_is_its_most_frequent_one(records: list[dict[str, Any]]) -> None:
    units = units_of(records)
    for name, position in units.positions.items():
        counts = Counter(record["label"] for record in records if str(record["user"]) == name)
        label = units.contents[position][0]["label"]
        assert counts[label] == max(counts.values())
        assert not [other for other in LABELS[: LABELS.index(label)] if counts[other] == counts[label]]


@FEW
@given(RECORDS, st.integers(1, 4))
def test_a_unit_keeps_its_first_records_up_to_the_public_cap(records: list[dict[str, Any]], cap: int) -> None:
    units = units_of(records, records_per_unit=cap)
    for name, unit in contents(units).items():
        mine = [r for r in records if str(r["user"]) == name and r["label"] == unit[0]["label"]]
        assert [record["text"] for record in unit] == [r["text"] for r in mine][:cap]


@FEW
@given(RECORDS)
def test_positions_follow_the_first_record_of_each_unit(records: list[dict[str, Any]]) -> None:
    order = list(dict.fromkeys(str(record["user"]) for record in records))
    assert list(units_of(records).positions) == order


@given(st.lists(st.text(max_size=300), max_size=5), st.integers(1, 250))
def test_text_is_cut_at_the_public_cap_and_never_refused(texts: list[str], cap: int) -> None:
    changes = {"label_key": None, "labels": None, "unit_key": None, "max_chars": cap}
    found = [unit[0]["text"] for unit in units_of(list(texts), **changes).contents]
    assert [len(text) for text in found] == [min(len(text), cap) for text in texts]
    assert all(text == given_[:cap] for text, given_ in zip(found, texts, strict=True) if given_.isprintable())


def test_ties_go_to_the_label_declared_first() -> None:
    assert unit_label(["b", "c", "c", "b"], ("c", "b")) == "c"
    assert unit_label(["b", "c", "c", "b"], ("b", "c")) == "b"
    assert unit_label(["c"], ("a", "b", "c")) == "c"


def test_whole_numbers_and_their_text_name_one_unit() -> None:
    records = [{"text": "x", "label": "a", "user": user} for user in (7, "7", np.int64(7))]
    assert list(units_of(records).positions) == ["7"]


def test_lone_surrogates_become_text_that_any_engine_can_encode() -> None:
    units = units_of(["ok \ud800 \N{GRINNING FACE}"], label_key=None, labels=None, unit_key=None)
    assert units.contents[0][0]["text"] == "ok ? \N{GRINNING FACE}"


def test_only_declared_fields_are_kept() -> None:
    record = {"text": "x", "label": "a", "user": 1, "ssn": "123", "title": "t"}
    assert units_of([record]).contents[0] == ({"text": "x", "label": "a"},)
    assert units_of([record], fields=("title",)).contents[0] == ({"text": "x", "label": "a", "title": "t"},)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"labels": None}, "labels"),
        ({"label_key": None}, "label_key"),
        ({"labels": ()}, "labels"),
        ({"labels": "abc"}, "labels"),
        ({"labels": 3}, "labels"),
        ({"labels": ("a", "a")}, "labels"),
        ({"labels": ("a", "")}, "labels"),
        ({"labels": ("a", 1)}, "labels"),
        ({"labels": ("a", "b\n")}, "labels"),
        ({"labels": ("a", "\ud800")}, "labels"),
        ({"label_key": "text"}, "label_key"),
        ({"label_key": ""}, "label_key"),
        ({"text_key": 1}, "text_key"),
        ({"unit_key": ""}, "unit_key"),
        ({"fields": "title"}, "fields"),
        ({"fields": ("x", "x")}, "fields"),
        ({"dataset_id": ""}, "dataset_id"),
        ({"dataset_id": "x" * 201}, "dataset_id"),
        ({"public_size": 0}, "public_size"),
        ({"public_size": True}, "public_size"),
        ({"public_size": 2.5}, "public_size"),
        ({"public_size": None}, "public_size"),
        ({"public_size": {"a": 1, "b": 1}}, "public_size"),
        ({"public_size": {"a": 1, "b": 1, "c": 1, "d": 1}}, "public_size"),
        ({"public_size": {"a": 1, "b": 1, "c": 0}}, "public_size"),
        ({"public_size": {"a": 5}, "label_key": None, "labels": None}, "public_size"),
        ({"max_chars": 0}, "max_chars"),
        ({"records_per_unit": 0}, "records_per_unit"),
    ],
)
def test_public_faults_name_the_argument(changes: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{name}"):
        declaration(**changes)


def test_a_declaration_says_what_is_public() -> None:
    declared = declaration(public_size={"c": 3, "a": 1, "b": 2}, fields=("text", "title"))
    assert declared.total_size == 6
    assert declared.public_size == (("a", 1), ("b", 2), ("c", 3))
    assert declared.fields == ("text", "label", "title")
    assert declared.unit == "all records of one 'user'"
    assert declaration(unit_key=None).unit == "one record"
    assert declared.to_dict()["public_size"] == {"a": 1, "b": 2, "c": 3}
