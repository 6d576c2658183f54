"""How released values are written: indented, and long lists one item per line; both are read the same strict way."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.released.base import FileForm
from langchain_dpicl.released.demonstrations import ReleasedDemonstrations
from langchain_dpicl.released.labelled_pool import LabelledPool, PoolEntry
from langchain_dpicl.reports.claims import content_digest
from tests.sealed_files import paid, sealed

INDENTED = FileForm("thing", "things", 1, frozenset({"items", "rest"}))
BY_LINE = replace(INDENTED, lines="items")
REPORT = {**paid(1.5), "parts": [{"text": "a\nb\u2028c"}, []], "none": None}
INFINITE = {"private": False, "epsilon": "infinity"}

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def test_a_form_with_lines_writes_one_item_per_line_and_indents_the_rest():
    state = {"items": [{"text": "a\nb\u2028ü", "votes": {"x": 1.5}}, "plain"], "rest": {"e": [1]}}
    digest = content_digest({"format": "things", "version": 1, **state})
    found = BY_LINE.text(state)
    assert found == (
        '{\n  "format": "things",\n  "version": 1,\n  "items": [\n'
        '    {"text": "a\\nb\\u2028\\u00fc", "votes": {"x": 1.5}},\n    "plain"\n  ],\n'
        f'  "rest": {{\n    "e": [\n      1\n    ]\n  }},\n  "content_digest": "{digest}"\n}}\n'
    )


@given(st.lists(values, max_size=4), values)
def test_both_forms_say_the_same(items, rest):
    state = {"items": items, "rest": rest}
    assert BY_LINE.read(BY_LINE.text(state)) == INDENTED.read(INDENTED.text(state))
    whole = sealed({"format": "things", "version": 1, **state})
    assert INDENTED.text(state) == json.dumps(whole, indent=2) + "\n"


def test_without_items_both_forms_write_the_same_text():
    state = {"items": [], "rest": REPORT}
    assert BY_LINE.text(state) == INDENTED.text(state)


@pytest.mark.parametrize("form", [INDENTED, BY_LINE], ids=["indented", "by line"])
@pytest.mark.parametrize("state", [{"items": [[math.nan]], "rest": 1}, {"items": [1], "rest": math.inf}], ids=str)
def test_what_is_no_number_is_never_written(form, state):
    with pytest.raises(ValueError, match="JSON"):
        form.text(state)


@pytest.mark.parametrize("wrong", ['"a": 1, "a": 2', '"a": NaN', '"a": 1e999, "a": 1'])
def test_lines_are_read_as_strictly_as_the_rest(wrong):
    right = BY_LINE.text({"items": [{"a": 1}], "rest": REPORT})
    assert right.count('{"a": 1}') == 1
    with pytest.raises(ConfigurationError):
        BY_LINE.read(right.replace('"a": 1', wrong))


def test_the_file_of_a_pool_has_one_line_per_entry():
    entries = [
        PoolEntry({"text": f"first line\nsecond line {place}"}, "card", "labelled", {"card": place + 0.25})
        for place in range(50)
    ]
    shown = {"card": "Card", "transfer": "Transfer"}
    terms = {"label_key": "queue", "labels": ("card", "transfer"), "shown": shown, "report": REPORT, "plan": {"p": []}}
    found = LabelledPool(entries, **terms)
    lines = [line for line in found.to_json().split("\n") if '"status"' in line]
    assert [json.loads(line.rstrip(",")) for line in lines] == [entry.to_dict() for entry in entries]
    whole = {"format": "langchain-dpicl/labelled-pool", "version": 1}
    whole |= {"entries": [entry.to_dict() for entry in entries], **terms, "labels": ["card", "transfer"]}
    assert json.loads(found.to_json()) == sealed(whole | {"student": None})
    assert LabelledPool.from_json(found.to_json()) == found


def test_the_file_of_demonstrations_is_indented_as_ever():
    released = ReleasedDemonstrations([{"input": "ü", "output": "a"}], report=INFINITE, plan={"steps": [1]})
    digest = json.loads(released.to_json())["report"]["content_digest"]
    assert released.to_json() == (
        '{\n  "format": "langchain-dpicl/released-demonstrations",\n  "version": 1,\n  "examples": [\n    {\n'
        '      "input": "\\u00fc",\n      "output": "a"\n    }\n  ],\n  "report": {\n    "private": false,\n    "epsilon": "infinity",\n'
        f'    "content_digest": "{digest}"\n  }},\n'
        '  "plan": {\n    "steps": [\n      1\n    ]\n  }\n}\n'
    )
