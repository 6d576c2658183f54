"""`dpicl evaluate` and `dpicl choose`: what they say before and after, and what they never say."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from langchain_dpicl import PrivateExamples, verify_report
from langchain_dpicl.cli.inputs import private_examples
from langchain_dpicl.cli.main import main
from langchain_dpicl.privacy.extensions.outcome_counts import part_of

CANARY = "canary-7f3a"
TERMS = ("--epsilon", "2", "--delta", "1e-5", "--public-size", "400", "--label-key", "queue")
LABELS = ("--label", "card", "--label", "transfer")
MODELS = """
from langchain_core.language_models.llms import LLM
from langchain_dpicl.evaluation import Judge, Pure, Score
from langchain_core.prompts import PromptTemplate
from langchain_dpicl.backends.fake import FakeBackend

class Reader(LLM):
    down: bool = False
    @property
    def _llm_type(self):
        return "reader"
    def _call(self, prompt, stop=None, run_manager=None, **kwargs):
        if self.down:
            raise ConnectionError("no server")
        if "canary" in prompt:
            raise ValueError(prompt)
        return "card" if "declined" in prompt or "Always" in prompt else "transfer"

llm, down = Reader(), Reader(down=True)
short = Score(Pure(lambda inputs, outputs, reference: len(outputs) < 6), name="short")
judge = Judge(PromptTemplate.from_template("{text} {answer}") | llm, marks=(1, 2))
engine = FakeBackend(lambda prompt, text: {"card": 1.0}, vocabulary=["card"])
def plain(outputs):
    return 1
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    rows = [{"text": "it was declined", "queue": "card"}] * 250 + [{"text": "not sent", "queue": "transfer"}] * 149
    rows += [{"text": CANARY, "queue": "transfer"}]
    (tmp_path / "r.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "good.txt").write_text("{text}\nQueue:\n")
    (tmp_path / "bad.txt").write_text("Always the same. {text}\n")
    (tmp_path / "evaluation_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "evaluation_models", raising=False)
    return tmp_path


def dpicl(command: str, *more: str, model: str = "evaluation_models:llm") -> int:
    return main([command, "r.jsonl", *TERMS, *LABELS, "--model", model, *more])


def test_a_prompt_is_measured_saved_and_recomputed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dpicl("evaluate", "--prompt", "good.txt", "--out", "out.json") == 0
    said, saved = capsys.readouterr(), (here / "out.json").read_text()
    found = json.loads(saved)["released"]["exact"]
    assert verify_report(saved).ok
    assert found["mean"][0] > 0.9
    assert {tuple(cell): count for *cell, count in found["counts"]}["card", "card"] > 200
    assert "95 %" in said.out
    assert CANARY not in said.out + said.err + saved


def test_nothing_is_charged_where_another_command_writes_the_target_first(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def beside(settings: Any) -> PrivateExamples:
        (here / "out.json").write_text("of another command")
        return private_examples(settings)

    monkeypatch.setattr("langchain_dpicl.cli.vote.private_examples", beside)
    assert dpicl("evaluate", "--prompt", "good.txt", "--out", "out.json") == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "It may be paid for, and stays. This command charged nothing: name another file." in said.err
    assert (here / "out.json").read_text() == "of another command"


def test_a_baseline_gives_a_difference(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ("--baseline", "bad.txt", "--out", "out.json", "--json")
    assert dpicl("evaluate", "--prompt", "good.txt", *more) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((here / "out.json").read_text())
    assert printed["released"]["exact"]["difference"][1] > 0


def test_own_evaluators_are_named(here: Path) -> None:
    for name in ("short", "judge"):
        more = ("--evaluator", f"evaluation_models:{name}", "--out", f"{name}.json", "--quiet")
        assert dpicl("evaluate", "--prompt", "good.txt", *more) == 0
        assert list(json.loads((here / f"{name}.json").read_text())["released"]) == [name]


def test_the_best_prompt_is_chosen(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dpicl("choose", "--prompt", "bad.txt", "--prompt", "good.txt", "--out", "out.json") == 0
    saved = (here / "out.json").read_text()
    assert json.loads(saved)["released"]["chosen"] == "good"
    assert verify_report(saved).ok
    assert "chosen: good" in capsys.readouterr().out


def test_prompts_of_one_name_are_named_by_their_paths(here: Path) -> None:
    (here / "other").mkdir()
    (here / "other" / "good.txt").write_text("Always {text}")
    assert dpicl("choose", "--prompt", "other/good.txt", "--prompt", "good.txt", "--out", "out.json", "--quiet") == 0
    assert json.loads((here / "out.json").read_text())["released"]["chosen"] == "good.txt"


@pytest.mark.parametrize("command", ["evaluate", "choose"])
def test_a_dry_run_reads_nothing_and_asks_no_model(
    command: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ("--prompt", "good.txt", *(("--prompt", "bad.txt") if command == "choose" else ()))
    (here / "r.jsonl").unlink()
    before = sorted(here.iterdir())
    assert dpicl(command, *prompts, "--dry-run", model="evaluation_models:down") == 0
    said = capsys.readouterr().out
    assert "400 of the declared units" in said
    assert f"{400 if command == 'evaluate' else 800:,} calls" in said
    assert dpicl(command, *prompts, "--sample", "100", "--dry-run", "--json", model="evaluation_models:down") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["calls"] == (100 if command == "evaluate" else 200)
    assert printed["plan"]["epsilon"] <= 2.0
    assert sorted(here.iterdir()) == before


@pytest.mark.parametrize(
    ("epsilon", "said"), [("2", r"lead     0\.\d+ % of the range of marks above"), ("1e-4", "lead     no lead wins")]
)
@pytest.mark.usefixtures("here")
def test_a_dry_run_says_what_lead_wins_a_choice(epsilon: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert dpicl("choose", "--prompt", "good.txt", "--prompt", "bad.txt", "--dry-run", "--epsilon", epsilon) == 0
    assert re.search(said, capsys.readouterr().out)


@pytest.mark.parametrize("command", ["evaluate", "choose"])
@pytest.mark.parametrize("given", [("--part", "test"), ("--set", "part=test")], ids=["flag", "setting"])
def test_a_half_of_the_records_is_read_and_planned(
    command: str, given: tuple[str, str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ("--prompt", "good.txt", *(("--prompt", "bad.txt") if command == "choose" else ()))
    assert dpicl(command, *prompts, *given, "--dry-run", "--json") == 0
    planned = json.loads(capsys.readouterr().out)["plan"]
    assert (planned["part"], planned["public_size"]) == ("test", 200)
    assert dpicl(command, *prompts, *given, "--out", "out.json", "--quiet") == 0
    found = json.loads((here / "out.json").read_text())
    (share,) = found["budget"]["shares"]
    public = share["components"][0]["public"]
    assert {name: public[name] for name in planned} == planned
    assert verify_report(json.dumps(found)).ok


def test_halves_of_one_run_are_different_records(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Records of one half alone are right: the other half has none of them."""
    rows = [{"text": f"it was declined {number}", "queue": "card"} for number in range(400)]
    (here / "r.jsonl").write_text("\n".join(json.dumps(row) for row in rows if part_of_row(row) == "choose"))
    for part, least, most in (("choose", 100, 300), ("test", -30, 30)):
        assert dpicl("evaluate", "--prompt", "good.txt", "--part", part, "--out", f"{part}.json", "--quiet") == 0
        counts = json.loads((here / f"{part}.json").read_text())["released"]["exact"]["counts"]
        assert least < sum(count for *_, count in counts) < most


def part_of_row(row: dict[str, str]) -> str:
    return part_of(json.dumps([row], sort_keys=True))


FAULTS = [
    ("evaluate", (), 2, "--prompt: expected one file"),
    ("evaluate", ("--prompt", "good.txt", "--prompt", "bad.txt"), 2, "dpicl choose"),
    ("choose", ("--prompt", "good.txt"), 2, "two files"),
    ("choose", ("--prompt", "good.txt", "--prompt", "good.txt"), 2, "different files"),
    ("evaluate", ("--prompt", "good.txt"), 2, "--out"),
    ("evaluate", ("--prompt", "good.txt", "--out", "bad.txt"), 2, "--out: expected a file that does not exist yet"),
    ("choose", ("--prompt", "good.txt", "--prompt", "x.txt", "--out", "bad.txt"), 2, "does not exist yet, found 'bad"),
    ("evaluate", ("--prompt", "missing.txt", "--out", "o.json"), 2, "missing.txt"),
    ("evaluate", ("--prompt", "broken.txt", "--out", "o.json"), 2, "f-string template"),
    ("evaluate", ("--prompt", "label.txt", "--out", "o.json"), 2, "reference"),
    ("evaluate", ("--prompt", "good.txt", "--evaluator", "evaluation_models:llm", "--out", "o.json"), 2, "--evaluator"),
    (
        "evaluate",
        ("--prompt", "good.txt", "--evaluator", "evaluation_models:plain", "--dry-run"),
        2,
        "Score(Pure(plain)",
    ),
    ("evaluate", ("--prompt", "good.txt", "--set", "zzz=1", "--out", "o.json"), 2, "zzz"),
    ("evaluate", ("--prompt", "good.txt", "--part", "train", "--out", "o.json"), 2, "'choose', 'test'"),
    ("evaluate", ("--prompt", "good.txt", "--part", "all", "--dry-run"), 2, "found 'all'"),
    ("evaluate", ("--prompt", "good.txt", "--set", "model.private_process=true", "--dry-run"), 2, "found True"),
    (
        "choose",
        ("--prompt", "good.txt", "--prompt", "bad.txt", "--set", "model.private_process=true", "--out", "o.json"),
        2,
        "model.private_process: expected false",
    ),
    (
        "evaluate",
        ("--prompt", "good.txt", "--model", "evaluation_models:engine", "--out", "o.json"),
        2,
        "found FakeBackend",
    ),
    (
        "choose",
        ("--prompt", "good.txt", "--prompt", "bad.txt", "--model", "evaluation_models:engine", "--out", "o.json"),
        2,
        "--model: expected a LangChain model",
    ),
    (
        "evaluate",
        ("--prompt", "good.txt", "--model", "evaluation_models:down", "--out", "o.json"),
        4,
        "the server is up",
    ),
]


@pytest.mark.parametrize("fault", FAULTS, ids=[fault[3] for fault in FAULTS])
def test_faults_are_explained_without_a_record(
    fault: tuple[str, tuple[str, ...], int, str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command, more, code, said = fault
    (here / "broken.txt").write_text("{text")
    (here / "label.txt").write_text("{text} {queue}")
    assert dpicl(command, *more) == code
    err = capsys.readouterr().err
    assert said in err
    assert CANARY not in err
    assert not (here / "o.json").exists()


def later(monkeypatch: pytest.MonkeyPatch, *asked: str) -> int:
    """Runs a command as another process would, which knows no object of this one."""
    monkeypatch.setattr("langchain_dpicl.privacy.ledger.budget._IDENTITIES", {})
    return main([*asked])


def test_a_ledger_pays_once_and_then_refuses(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ledger", "create", "b.db", "--epsilon", "3", "--delta", "1e-5"]) == 0
    rest = ("r.jsonl", "--public-size", "400", "--label-key", "queue", *LABELS, "--ledger", "b.db", "--epsilon", "2")
    asked = ("evaluate", *rest, "--model", "evaluation_models:llm", "--prompt", "good.txt", "--component", "one")
    for more in (("--dry-run",), ("--out", "out.json")):
        assert main([*(each for each in asked if each not in ("--epsilon", "2")), *more]) == 2
        assert "epsilon: expected this component's share of the ledger, found None" in capsys.readouterr().err
    assert main([*asked, "--dry-run"]) == 0
    assert main([*asked, "--out", "out.json"]) == 0
    assert later(monkeypatch, *asked, "--out", "again.json") == 3
    assert "'one'" in capsys.readouterr().err
    assert main([*asked, "--delta", "1e-6", "--out", "again.json"]) == 2
    assert not (here / "again.json").exists()
    assert main(["ledger", "verify", "b.db"]) == 0
    assert "--delta" in capsys.readouterr().err


def test_on_a_ledger_a_later_command_measures_a_candidate_on_the_other_half_for_free(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ledger", "create", "b.db", "--epsilon", "3", "--delta", "1e-5"]) == 0
    terms = ("--public-size", "400", "--label-key", "queue", *LABELS, "--ledger", "b.db", "--epsilon", "2", "--set",
             "data.dataset_id=tickets", "--model", "evaluation_models:llm")  # fmt: skip
    prompts = ("--prompt", "bad.txt", "--prompt", "good.txt")
    rest = ("--part", "choose", "--component", "pick", "--out", "best.json")
    assert main(["choose", "r.jsonl", *terms, *prompts, *rest]) == 0
    (here / "third.txt").write_text("Another one: {text}\n")
    test = ("evaluate", "r.jsonl", *terms, "--part", "test", "--component", "pick test")
    assert later(monkeypatch, *test, "--prompt", "third.txt", "--out", "third.json") == 2
    assert "another component=" in capsys.readouterr().err
    assert later(monkeypatch, *test, "--prompt", "good.txt", "--out", "found.json") == 0
    assert "remaining epsilon 1," in capsys.readouterr().out
    assert later(monkeypatch, *test, "--prompt", "bad.txt", "--out", "again.json") == 3
    assert "pick test" in capsys.readouterr().err
    found = (here / "found.json").read_text()
    assert json.loads(found)["released"]["exact"]["mean"][0] > 0.8
    assert verify_report(found).ok
    assert main(["ledger", "verify", "b.db"]) == 0


@pytest.mark.parametrize(
    "typed",
    [
        ("evaluate", "r.jsonl", "--prompt", "r.jsonl"),
        ("evaluate", "r.jsonl", "--prompt", "good.txt", "--baseline", "r.jsonl"),
        ("choose", "r.jsonl", "--prompt", "good.txt", "--prompt", "r.jsonl"),
    ],
)
def test_the_records_are_no_prompt(here: Path, capsys: pytest.CaptureFixture[str], typed: tuple[str, ...]) -> None:
    assert main([*typed, *TERMS, *LABELS, "--out", "out.json", "--model", "evaluation_models:llm"]) == 2
    said = "".join(capsys.readouterr())
    assert "expected a PUBLIC file, found the records" in said
    assert "declined" not in said
    assert CANARY not in said


@pytest.mark.parametrize("command", ["evaluate", "choose"])
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "other.txt"),
        ("{text} {nope}", "expected variables that are among ['text'], found 'nope'"),
        ("{text} {queue}", "expected a template that does not show the label, found 'queue'"),
    ],
)
def test_a_dry_run_refuses_a_prompt_that_the_run_refuses(
    command: str, text: str | None, said: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (here / "other.txt").write_text(text)
    prompts = ("--prompt", "other.txt", *(("--prompt", "good.txt") if command == "choose" else ()))
    for more in (("--out", "out.json"), ("--dry-run",)):
        assert dpicl(command, *prompts, *more) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "said"),
    [("nowhere", "--model: expected 'embedded', a folder"), (".", "--model: expected embedded, provider:model or mod")],
)
@pytest.mark.usefixtures("here")
def test_a_dry_run_refuses_a_model_that_the_run_refuses(
    model: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for more in (("--out", "out.json"), ("--dry-run",)):
        assert dpicl("evaluate", "--prompt", "good.txt", *more, model=model) == 2
        assert said in capsys.readouterr().err
