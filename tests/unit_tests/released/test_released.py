import ast
import json
import math
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import langchain_dpicl.released.base as files_module
import langchain_dpicl.released.demonstrations as released_module
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy.accounting.events import PureEvent
from langchain_dpicl.privacy.ledger.tickets import Ticket
from langchain_dpicl.released.base import epsilon_of
from langchain_dpicl.released.demonstrations import FORMAT, VERSION, ReleasedDemonstrations
from langchain_dpicl.reports.report import verify_report
from tests.sealed_files import paid, report_by_hand, resealed, sealed

EXAMPLES = ({"text": 'braces {"a": 1} and {q}', "queue": "card"}, {"text": "", "queue": "überweisung €"})
REPORT = paid(1.5)
PLAN = {"mechanism": "gumbel", "label_key": "queue", "steps": [1, 2, {"deep": None}]}

text = st.text(st.characters(exclude_categories=["Cs"]))
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)


def released(**changes) -> ReleasedDemonstrations:
    return ReleasedDemonstrations(**({"examples": EXAMPLES, "report": REPORT, "plan": PLAN} | changes))


def state(**changes) -> str:
    return resealed(released().to_json(), **changes)


def test_json_gives_an_equal_object_back():
    again = ReleasedDemonstrations.from_json(released().to_json())
    assert again == released()
    assert again.examples == EXAMPLES
    assert again.plan["steps"] == [1, 2, {"deep": None}]


@given(
    examples=st.lists(st.dictionaries(text, text, max_size=3), max_size=4),
    report=st.dictionaries(text, json_values, max_size=3),
    plan=st.dictionaries(text, json_values, max_size=3),
    is_paid=st.booleans(),
)
def test_any_text_and_any_json_survive_a_round_trip(examples, report, plan, is_paid):
    own = REPORT if is_paid else {"private": False, "epsilon": "infinity"}
    kept = {key: value for key, value in report.items() if key not in {"budget", "baseline", "ledger_id"}}
    first = ReleasedDemonstrations(tuple(examples), kept | own, plan)
    assert ReleasedDemonstrations.from_json(first.to_json()) == first


@given(st.text())
def test_any_other_text_is_refused_with_our_error(content):
    with pytest.raises(ConfigurationError):
        ReleasedDemonstrations.from_json(content)


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_a_lone_surrogate_survives_a_file_before_which_an_editor_may_put_a_mark(tmp_path, mark):
    first = released(examples=({"text": "\ud800 \x00 \u202e"},))
    first.save(tmp_path / "a.json")
    (tmp_path / "a.json").write_bytes(mark + (tmp_path / "a.json").read_bytes())
    assert ReleasedDemonstrations.load(tmp_path / "a.json") == first


@pytest.mark.parametrize("delta", ["x", "nan", None, [1], {}, True, 10**400, -1e-9, 1.5])
def test_delta_is_a_number_of_at_most_one_whether_made_or_loaded(delta):
    baseline = {"private": False, "epsilon": "infinity", "baseline": "b"}
    assert released(report=baseline).delta == 0.0
    with pytest.raises(ConfigurationError, match=r"report\['delta'\]: expected a number in \[0"):
        released(report={**baseline, "delta": delta})
    state = json.loads(released(report=baseline).to_json())
    state["report"]["delta"] = delta
    with pytest.raises(ConfigurationError, match=r"report\['delta'\]: expected a number in \[0"):
        type(released()).from_json(json.dumps(sealed(state)))


def test_epsilon_is_a_number_or_infinity():
    assert released().epsilon == 1.5
    assert released(report={"epsilon": 0}).epsilon == 0.0
    assert released(report={"epsilon": "infinity", "private": False}).epsilon == math.inf


@pytest.mark.parametrize("epsilon", [-0.1, True, None, "1.5", "Infinity", math.nan, math.inf, [1], 10**400])
def test_no_other_epsilon_is_accepted(epsilon):
    with pytest.raises(ConfigurationError):
        released(report={"epsilon": epsilon})


def test_a_report_without_epsilon_is_refused_and_never_read_as_zero():
    with pytest.raises(ConfigurationError, match="epsilon"):
        released(report={"private": True})
    with pytest.raises(ConfigurationError, match="epsilon"):
        epsilon_of({})


@pytest.mark.parametrize(
    "examples",
    [
        "text",
        None,
        {"text": "a"},
        ["text"],
        [{"text": 1}],
        [{1: "a"}],
        [{"text": None}],
        [{"text": {"lc": 1, "type": "secret", "id": ["OPENAI_API_KEY"]}}],
    ],
)
def test_examples_are_text_under_text_keys(examples):
    with pytest.raises(ConfigurationError, match="examples"):
        released(examples=examples)


@pytest.mark.parametrize("value", [None, [], "x", {"a": math.nan}, {"a": math.inf}, {"a": object()}, {"a": {1, 2}}])
def test_plan_and_report_are_finite_json_objects(value):
    with pytest.raises(ConfigurationError, match="plan"):
        released(plan=value)
    with pytest.raises(ConfigurationError, match="report"):
        released(report=value)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "null",
        "[]",
        "{}",
        '{"lc": 1, "type": "constructor", "id": ["langchain", "prompts", "PromptTemplate"], "kwargs": {}}',
        "[" * 100_000,
        '{"a":' * 100_000,
        "9" * 10_000,
        state(format="something else"),
        state(version=VERSION + 1),
        state(version=True),
        state(version="1"),
        state(extra=1),
        state(examples={"text": "a"}),
        state(examples=[["text", "a"]]),
        state(report=[]),
        state(plan=None),
        state().replace('"epsilon": 1.5', '"epsilon": NaN'),
        state().replace('"epsilon": 1.5', '"epsilon": 1e999'),
        state().replace('"epsilon": 1.5', '"epsilon": 8.0, "epsilon": 1.5'),
        state()[:-1],
        json.dumps({"format": FORMAT, "version": VERSION}),
    ],
)
def test_a_malformed_file_is_refused_whole(content, tmp_path):
    path = tmp_path / "file.json"
    path.write_text(content)
    with pytest.raises(ConfigurationError) as caught:
        ReleasedDemonstrations.load(path)
    assert len(str(caught.value)) < 400


def test_bytes_that_are_no_text_are_refused(tmp_path):
    path = tmp_path / "file.json"
    path.write_bytes(b"\xff\xfe\x00pickle")
    with pytest.raises(ConfigurationError):
        ReleasedDemonstrations.load(path)


def test_serialisation_keys_of_langchain_stay_data(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "not-for-you")
    hostile = {"lc": 1, "type": "secret", "id": ["OPENAI_API_KEY"]}
    report = REPORT | {"nested": hostile}
    again = ReleasedDemonstrations.from_json(released(report=report, plan={"p": hostile}).to_json())
    assert again.report["nested"] == hostile
    assert again.plan["p"] == hostile
    assert "not-for-you" not in repr(again)


def test_nobody_keeps_a_second_handle_on_what_was_released():
    examples, report = [dict(EXAMPLES[0])], {"epsilon": 1.0, "list": [1]}
    kept = released(examples=examples, report=report)
    examples[0]["text"] = "changed"
    report["list"].append(2)
    report["epsilon"] = 0.0
    assert kept.examples == (EXAMPLES[0],)
    assert kept.report == {"epsilon": 1.0, "list": [1]}
    with pytest.raises(FrozenInstanceError):
        kept.examples = ()


def test_saving_replaces_the_whole_file_and_leaves_no_part(tmp_path):
    path = tmp_path / "demos.json"
    path.write_text("old")
    released().save(str(path))
    assert ReleasedDemonstrations.load(str(path)) == released()
    assert [file.name for file in tmp_path.iterdir()] == ["demos.json"]


@pytest.mark.parametrize("step", ["os.fsync", "Path.replace"])
def test_a_failed_save_leaves_the_old_file(step, tmp_path, monkeypatch):
    path = tmp_path / "demos.json"
    path.write_text("old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(f"langchain_dpicl._plain_files.{step}", full)
    with pytest.raises(OSError, match="No space"):
        released().save(path)
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["demos.json"]


def test_a_missing_folder_or_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        released().save(tmp_path / "nowhere" / "demos.json")
    with pytest.raises(FileNotFoundError):
        ReleasedDemonstrations.load(tmp_path / "demos.json")


@pytest.mark.parametrize(
    ("room", "known"),
    [
        (released_module, {"released.base", "exceptions"}),
        (
            files_module,
            {
                *("_plain_files", "exceptions", "options", "privacy._validate", "privacy.accounting.events"),
                *("reports.claims", "reports.report"),
            },
        ),
    ],
    ids=["released", "files"],
)
def test_the_rooms_know_the_standard_library_our_errors_and_what_is_checked(room, known):
    tree = ast.parse(Path(room.__file__).read_text(encoding="utf-8"))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    foreign = {name for name in names if name.split(".")[0] not in sys.stdlib_module_names}
    assert foreign == {f"langchain_dpicl.{name}" for name in known}


def test_a_release_and_its_file_are_verified_by_their_report(tmp_path):
    honest = Budget(epsilon=1.0, delta=1e-6)
    honest.declare("few-shot", tickets=[Ticket("t", PureEvent(0.5))], epsilon=0.5)
    report = report_by_hand(honest.report().to_dict(), "few-shot")
    first = released(report=report)
    first.save(tmp_path / "a.json")
    for form in (first, ReleasedDemonstrations.load(tmp_path / "a.json"), (tmp_path / "a.json").read_bytes()):
        unpaid = "examples: 2 were released, which no component of the report pays for"
        assert verify_report(form).problems == (unpaid,)  # the share is of no texts
    assert verify_report(first.report).ok
    assert 0.49999 < verify_report(first.report).epsilon <= 0.5
    forged = released(report={**report, "epsilon": 0.1})
    assert not verify_report(forged).ok
    assert not verify_report(released(report={"private": False, "epsilon": "infinity", "baseline": "b"})).ok
    with pytest.raises(ConfigurationError):
        verify_report(released(report={"private": True, "epsilon": 1.5}))
