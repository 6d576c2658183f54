"""`dpicl rehearse`: says what it costs, asks, measures, and keeps no text of an example."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from langchain_dpicl import EmbeddedLLM
from langchain_dpicl.cli import rehearse as commands
from langchain_dpicl.cli.main import main
from langchain_dpicl.rehearsal import Rehearsal, rehearsal_cost, rehearse

FEW = ("--examples", "16", "--shots", "1,2", "--yes")
CANARY = "zebra-quartz-7731"


@pytest.fixture
def public(tmp_path: Path) -> Path:
    path = tmp_path / "public.jsonl"
    shutil.copy(Path(commands.__file__).parent / "data" / "topics.jsonl", path)
    return path


def test_what_it_saves_is_what_python_measures(
    public: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rehearsal.json"
    assert main(["rehearse", str(public), "--out", str(out), *FEW]) == 0
    printed = capsys.readouterr().out
    examples = [json.loads(line) for line in public.read_text().splitlines()]
    measured = rehearse(EmbeddedLLM(), examples, shots=(1, 2), max_examples=16, progress=False)
    assert Rehearsal.load(out) == measured
    assert measured.table() in printed


def test_it_says_first_what_it_costs_and_that_nothing_private_is_read(
    public: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prices = ["--set", "cost.price_in=2.0", "--set", "cost.price_out=8.0", "--set", "cost.record_tokens=100"]
    assert main(["rehearse", str(public), *FEW, *prices]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    cost = rehearsal_cost(16, shots=(1, 2), record_tokens=100)
    money = cost.most.money(price_in=2.0, price_out=8.0)
    assert money == pytest.approx((2 * cost.most.tokens_in + 8 * cost.most.tokens_out) / 1e6)
    calls = f"{cost.least.public_calls:,} to {cost.most.public_calls:,} calls, at most "
    assert first.startswith(f"16 of 64 examples (--examples): {calls}")
    assert f"{money:.2f} money; nothing private is read." in first
    assert main(["rehearse", str(public), *FEW, "--set", "answers.calibrate=false"]) == 0
    assert capsys.readouterr().out.startswith(f"16 of 64 examples (--examples): {cost.least.public_calls // 2:,} to")


def test_rows_that_many_labels_leave_no_room_for_are_not_in_its_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A question and one example of every other label stand in no row about it."""
    public = tmp_path / "public.jsonl"
    examples = [{"text": f"note {place} of topic {place % 14}", "label": f"topic {place % 14}"} for place in range(28)]
    public.write_text("\n".join(map(json.dumps, examples)))
    cost = rehearsal_cost(28, num_labels=14)
    assert cost.most.public_calls < rehearsal_cost(28).most.public_calls
    assert main(["rehearse", str(public), "--yes"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"{cost.least.public_calls:,} to {cost.most.public_calls:,} calls, at most ")
    [made] = re.findall(r": ([\d,]+) calls, epsilon 0", printed)
    assert cost.least.public_calls <= int(made.replace(",", "")) <= cost.most.public_calls


@pytest.mark.parametrize(
    ("typed", "goes_on"), [("y\n", True), ("YES\n", True), ("\n", False), ("n\n", False), ("", False)]
)
def test_on_a_terminal_it_asks(
    typed: str, goes_on: bool, public: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal(typed))
    assert main(["rehearse", str(public), *FEW[:-1]]) == 0
    captured = capsys.readouterr()
    assert "calls, at most" in captured.err
    assert captured.err.rstrip().endswith("Go on? [y/N]")
    assert ("zero-shot" in captured.out) is goes_on
    assert ("No call was made." in captured.out) is not goes_on


def test_without_a_terminal_it_wants_to_be_told(
    public: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    monkeypatch.setattr(commands, "load_model", _fail)
    assert main(["rehearse", str(public), *FEW[:-1]]) == 2
    assert capsys.readouterr().err.startswith("dpicl: --yes: expected where no terminal can be asked")


def _fail(*_: Any) -> Any:
    raise AssertionError("a model was loaded")


def test_the_private_records_are_no_public_examples(
    public: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "task.toml"
    config.write_text(f'[data]\nfile = "{public}"\n')
    other = tmp_path / "same.jsonl"
    other.symlink_to(public)
    monkeypatch.setattr(commands, "load_model", _fail)
    for command in ("rehearse", "try"):
        assert main([command, str(other), "--config", str(config), *FEW]) == 2
        assert "FILE: expected a PUBLIC file, found the records" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["{}", '{"format": "langchain-dpicl-demonstrations"}'])
def test_no_file_of_something_else_is_replaced(
    content: str, public: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (out := tmp_path / "paid.json").write_text(content)
    assert main(["rehearse", str(public), "--out", str(out), *FEW]) == 2
    assert "--out: expected a new file, or that of an earlier rehearsal, found" in capsys.readouterr().err
    assert out.read_text() == content


def test_no_text_of_an_example_leaves(public: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [json.loads(line) for line in public.read_text().splitlines()]
    marked = [{**line, "text": f"{CANARY} {line['text']}"} for line in lines]
    public.write_text("".join(json.dumps(line) + "\n" for line in marked))
    out = tmp_path / "rehearsal.json"
    assert main(["rehearse", str(public), "--out", str(out), *FEW]) == 0
    assert main(["rehearse", str(public), "--json", *FEW]) == 0
    broken = tmp_path / "broken.jsonl"
    broken.write_text(json.dumps({"text": CANARY, "label": None}) + "\n" + json.dumps({"text": CANARY}))
    assert main(["rehearse", str(broken), *FEW]) == 2
    captured = capsys.readouterr()
    assert CANARY not in captured.out + captured.err
    assert "zebra" not in captured.out + captured.err
    files = {path.name: path.read_text() for path in tmp_path.iterdir() if path not in {public, broken}}
    assert list(files) == ["rehearsal.json"]
    assert CANARY not in files["rehearsal.json"]
    assert "zebra" not in files["rehearsal.json"]


def test_templates_and_labels_are_those_of_the_settings(public: Path, tmp_path: Path) -> None:
    plain, worded = tmp_path / "plain.json", tmp_path / "worded.json"
    config = tmp_path / "task.toml"
    config.write_text(
        'method = "pate"\nsuffix = "message: {input}\\nkind:"\nexample_prompt = "message: {text}\\nkind: {label}"\n'
    )
    assert main(["rehearse", str(public), "--out", str(plain), "--quiet", *FEW]) == 0
    order = [part for label in ("weather", "sport", "music", "cooking") for part in ("--label", label)]
    assert main(["rehearse", str(public), "--out", str(worded), "--quiet", *FEW, "--config", str(config), *order]) == 0
    one, other = Rehearsal.load(plain), Rehearsal.load(worded)
    assert one.wording != other.wording
    assert other.labels == ("weather", "sport", "music", "cooking")


def test_origin_and_shots_are_told(public: Path, tmp_path: Path) -> None:
    out = tmp_path / "made_up.json"
    assert main(["rehearse", str(public), "--out", str(out), "--quiet", *FEW, "--origin", "made_up"]) == 0
    found = Rehearsal.load(out)
    assert (found.origin, found.shots(False), len(found.gold)) == ("made_up", (1, 2), 16)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--max-calls", "10"], "max_calls: expected at least the"),
        (["--examples", "2"], "num_examples: expected an integer >= 3"),
        (["--shots", "40"], "public_examples: expected at least 80 examples more than there are labels"),
        (["--model", "nowhere"], "--model: expected 'embedded'"),
        (["--label-key", "topic"], "expected text under 'topic'"),
        (["--set", "row.slots=3"], "found 'row'. Did you mean 'rows'"),
    ],
)
def test_what_cannot_be_rehearsed_is_refused(
    given: list[str], said: str, public: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rehearse", str(public), "--yes", *given]) == 2
    assert said in capsys.readouterr().err


def test_a_target_that_could_not_be_written_is_refused_before_a_call(
    public: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "load_model", _fail)
    for out in (str(public), str(tmp_path / "nowhere" / "out.json")):
        assert main(["rehearse", str(public), "--out", out, *FEW]) == 2
        assert "--out: expected" in capsys.readouterr().err
    assert main(["rehearse", *FEW]) == 2
    assert "FILE: expected the file of public examples, found none" in capsys.readouterr().err


def test_a_rehearsal_that_cannot_be_saved_is_printed(
    public: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Rehearsal, "save", full)
    assert main(["rehearse", str(public), "--out", str(tmp_path / "rehearsal.json"), *FEW, "--quiet"]) == 2
    printed = capsys.readouterr()
    (copied := tmp_path / "copied.json").write_text(printed.out)
    assert len(Rehearsal.load(copied).gold) == 16
    assert "No space left on device" in printed.err


def test_quiet_prints_nothing_and_json_nothing_else(public: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["rehearse", str(public), "--quiet", *FEW]) == 0
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")
    assert main(["rehearse", str(public), "--json", *FEW]) == 0
    captured = capfd.readouterr()
    assert json.loads(captured.out)["examples"] == 16
    assert captured.err == ""


def test_numbers_that_are_none_are_a_fault_of_typing(public: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["rehearse", str(public), "--shots", "one"])
    assert "expected numbers such as 1,2,4,8, found 'one'" in capsys.readouterr().err
