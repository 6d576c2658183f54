"""`dpicl label`, `dpicl evolve` and `dpicl train`: what they release, save and refuse."""

from __future__ import annotations

import base64
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from langchain_core.language_models import FakeListChatModel

from langchain_dpicl import ReleasedDemonstrations, verify_report
from langchain_dpicl.backends.fake import FakeBackend, scripted
from langchain_dpicl.budget.handler import PrivacyBudgetCallbackHandler
from langchain_dpicl.cli import runs
from langchain_dpicl.cli.main import main
from langchain_dpicl.evolution import PrivateEvolution
from langchain_dpicl.pate.labeler import PromptPATELabeler
from langchain_dpicl.released.labelled_pool import LabelledPool
from langchain_dpicl.released.soft_prompt import SoftPrompt
from langchain_dpicl.soft_prompts.trainer import PromptDPSGD
from tests.gradient_doubles import LogisticEngine

CANARY = "canary-7f3a"
DECLARED = ("--label-key", "topic", "--label", "card", "--label", "transfer", "--public-size", "300")
TERMS = (*DECLARED, "--epsilon", "8", "--delta", "1e-6")
SURE = FakeBackend(scripted({" card": 0.9, " transfer": 0.1}), vocabulary=[" card", " transfer"])
MUTE = FakeListChatModel(responses=["I cannot help with that."])
ENGINE = LogisticEngine()
HERE = "tests.unit_tests.cli.test_cli_label"
EVOLVING = ("--set", "evolution.rounds=1", "--set", "shots_per_label=1", "--set", "evolution.num_variations=0")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    rows = [("my card was declined", "card"), ("my transfer is late", "transfer"), (CANARY, "card")] * 100
    lines = [json.dumps({"text": text, "topic": topic}) for text, topic in rows]
    (tmp_path / "records.jsonl").write_text("\n".join(lines))
    (tmp_path / "inputs.txt").write_text("why was my card declined?\nwhere is my transfer?\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def label(*more: str) -> int:
    given = () if "--inputs" in more else ("--inputs", "inputs.txt")
    return main(["label", "records.jsonl", *TERMS, *given, "--out", "pool.json", *more])


def test_the_embedded_model_labels_public_inputs_and_saves_the_pool(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # About one row in twenty is wrong about the first, hardly any about the second, under noise of 1.3: below 1e-6 in all.
    (folder / "inputs.txt").write_text("my card is blocked\nmy transfer is late\n")
    assert label() == 0
    said, pool = capsys.readouterr(), LabelledPool.load(folder / "pool.json")
    assert said.out.splitlines()[:2] == ["card\tmy card is blocked", "transfer\tmy transfer is late"]
    assert [entry.label for entry in pool.entries] == ["card", "transfer"]
    assert verify_report(pool).epsilon <= 8.0
    assert CANARY not in said.out + said.err + (folder / "pool.json").read_text()


def test_a_model_that_names_no_label_is_told_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert label("--model", f"{HERE}:MUTE", "--set", "answers.votes=text") == 0
    said = capsys.readouterr()
    assert said.out.splitlines()[0].startswith("(rejected)")
    assert said.err.count("note: The answer to a public prompt gives no label any probability (text votes): rows") == 1


def test_inputs_that_find_no_ticket_wait_and_the_exit_code_says_so(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ("--model", f"{HERE}:SURE", "--max-queries", "1", "--json")
    assert label(*model) == 3
    said = capsys.readouterr()
    assert "dpicl: label: 1 of 2 inputs wait: the share of 'pate' is spent.\n" in said.err
    assert said.out == f"{(folder / 'pool.json').read_text()}\n"
    assert [entry["status"] for entry in json.loads(said.out)["entries"]] == ["labelled", "waiting"]


def test_a_share_that_is_spent_leaves_no_file_but_for_labels_of_its_checkpoint(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    PrivacyBudgetCallbackHandler.create("ledger.db", epsilon=8.0, delta=1e-6).budget.close()
    spent = ("--ledger", "ledger.db", "--component", "labels", "--max-queries", "1", "--model", f"{HERE}:SURE")
    kept = (*spent, "--checkpoint", "kept.json")
    for typed in (kept, (*spent, "--out", "new.json"), (*spent, "--out", "new.json"), (*kept, "--out", "copy.json")):
        monkeypatch.setattr("langchain_dpicl.privacy.ledger.budget._IDENTITIES", {})  # as in another process
        assert label(*typed) == 3
        said = capsys.readouterr().err
        assert f"{1 + ('new.json' in typed)} of 2 inputs wait: the share of 'labels' is" in said
        assert ("Nothing is saved in new.json." in said) == ("new.json" in typed)
        assert said.count("Nothing is saved") == ("new.json" in typed)
    assert not (folder / "new.json").exists()
    assert (folder / "copy.json").read_text() == (folder / "pool.json").read_text()


def test_no_file_that_the_command_reads_is_written_over(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    PrivacyBudgetCallbackHandler.create("ledger.db", epsilon=8.0, delta=1e-6).budget.close()
    kept = (folder / "ledger.db").read_bytes(), (folder / "inputs.txt").read_bytes()
    spent = ("--ledger", "ledger.db", "--component", "labels", "--model", f"{HERE}:SURE")
    for out in ("ledger.db", "inputs.txt", "new.db"):
        assert label("--inputs", "inputs.txt", *spent, "--checkpoint", "new.db", "--out", out) == 2
        assert "--out: expected another file than those" in capsys.readouterr().err
    assert ((folder / "ledger.db").read_bytes(), (folder / "inputs.txt").read_bytes()) == kept


def test_equal_inputs_are_counted_once_as_they_are_charged(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        '{"text": "is my card blocked?", "id": 1}',
        '{"text": "is my card blocked?", "id": 2}',
        '{"text": "where?"}',
    ]
    (folder / "inputs.jsonl").write_text("\n".join(rows))
    given = ("--inputs", "inputs.jsonl", "--model", f"{HERE}:SURE")
    assert label(*given, "--dry-run", "--json") == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert (plan["public_inputs"], plan["max_queries"]) == (2, 2)
    assert label(*given, "--max-queries", "1") == 3
    assert "1 of 2 inputs wait" in capsys.readouterr().err


@pytest.mark.usefixtures("folder")
def test_a_share_for_later_inputs_too_is_planned_as_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--max-queries", "7", "--model", f"{HERE}:SURE")
    assert label(*asked, "--dry-run", "--json") == 0
    planned = json.loads(capsys.readouterr().out)["plan"]
    assert label(*asked, "--dry-run") == 0
    assert "for labels of 7 public inputs, 2 of them known (nothing is spent)" in capsys.readouterr().out
    assert label(*asked, "--json") == 0
    ran = json.loads(capsys.readouterr().out)["report"]["plan"]
    assert (ran["max_queries"], ran["noise_multiplier"]) == (7, planned["noise_multiplier"])


@pytest.mark.usefixtures("folder")
def test_a_rejection_is_shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    answered = PromptPATELabeler._answered

    def rejected(self: PromptPATELabeler, entry: object, released: object) -> object:
        found = answered(self, entry, released)  # type: ignore[arg-type]
        return type(found)(fields=found.fields, label=None, status="rejected")

    monkeypatch.setattr(PromptPATELabeler, "_answered", rejected)
    assert label("--model", f"{HERE}:SURE") == 0
    assert capsys.readouterr().out.startswith("(rejected)\twhy was my card declined?\n")


def test_dry_runs_read_no_record(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "records.jsonl").unlink()
    assert label("--dry-run", "--json") == 0
    assert json.loads(capsys.readouterr().out)["plan"]["public_inputs"] == 2
    assert main(["evolve", "records.jsonl", *TERMS, "--dry-run"]) == 0
    assert "rounds" in capsys.readouterr().out
    assert main(["generate", "records.jsonl", *TERMS, "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["mechanism"] == "gumbel"
    training = ("--set", "training.expected_batch_size=30", "--set", "training.steps=3")
    assert main(["train", "records.jsonl", *TERMS, *training, "--dry-run"]) == 0
    assert "for 3 training steps (nothing is spent)" in capsys.readouterr().out


def test_an_evolution_is_saved_and_printed_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    candidates = ("--set", 'evolution.candidates=["a card payment was declined", "a boat on the sea"]')
    given = ("--public-size", "300", "--epsilon", "8", "--delta", "1e-6", *EVOLVING, *candidates)
    assert main(["evolve", "records.jsonl", *given, "--out", "out.json", "--json"]) == 0
    said, released = capsys.readouterr(), ReleasedDemonstrations.load(folder / "out.json")
    assert released.examples == ({"text": "a card payment was declined"},)
    assert json.loads(said.out) == json.loads((folder / "out.json").read_text())
    assert CANARY not in said.out + said.err


@pytest.mark.parametrize(("lost", "paid"), [("bad", "good"), ("good", "bad")])
def test_the_paid_label_of_an_evolution_is_saved_where_another_lost_its_tickets(
    lost: str, paid: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = ("a card payment was declined", "a boat on the sea")
    rows = [{"text": texts[place % 2], "topic": ("good", "bad")[place % 2]} for place in range(600)]
    (folder / "records.jsonl").write_text("\n".join(map(json.dumps, rows)))
    PrivacyBudgetCallbackHandler.create("ledger.db", epsilon=8.0, delta=1e-6).budget.close()
    declared = ("--set", "data.label_key=topic", "--set", 'data.labels=["good", "bad"]', "--public-size", "300")
    kept = ("--ledger=ledger.db", "--component=evo", "--checkpoint=kept", "--out=out.json", "--delta=1e-7")
    given = ("--epsilon", "8", *EVOLVING, "--set", f"evolution.candidates={json.dumps(texts)}", *declared, *kept)
    made = PrivateEvolution._keep

    def stops(self: PrivateEvolution, population: Any, *more: Any) -> Any:
        if population.label == lost:  # as a process that is killed there
            raise KeyboardInterrupt
        return made(self, population, *more)

    with monkeypatch.context() as patch:
        patch.setattr(PrivateEvolution, "_keep", stops)
        assert main(["evolve", "records.jsonl", *given]) == 130
    (folder / "out.json").unlink(missing_ok=True)
    monkeypatch.setattr("langchain_dpicl.privacy.ledger.budget._IDENTITIES", {})
    capsys.readouterr()
    assert main(["evolve", "records.jsonl", *given]) == 4
    assert "What was released is saved in out.json." in capsys.readouterr().err
    assert [each["topic"] for each in ReleasedDemonstrations.load(folder / "out.json").examples] == [paid]


def test_an_evolution_that_stops_before_its_first_round_saves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stops(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(PrivateEvolution, "_keep", stops)
    candidates = ("--set", 'evolution.candidates=["a card payment was declined", "a boat on the sea"]')
    given = ("--public-size", "300", "--epsilon", "8", "--delta", "1e-6", *EVOLVING, *candidates)
    assert main(["evolve", "records.jsonl", *given, "--out", "out.json"]) == 130
    assert "Nothing was released." in capsys.readouterr().err
    assert not (folder / "out.json").exists()


def test_an_older_checkpoint_replaces_no_later_round_of_an_evolution(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    PrivacyBudgetCallbackHandler.create("ledger.db", epsilon=8.0, delta=1e-6).budget.close()
    candidates = ("--set", 'evolution.candidates=["a card payment was declined", "a boat on the sea"]')
    kept = ("--ledger", "ledger.db", "--component", "evo", "--checkpoint", "kept", "--out", "out.json")
    given = ("--public-size", "300", "--epsilon", "8", "--delta", "1e-7", *EVOLVING, *candidates, *kept)
    given = (*given, "--set", "evolution.rounds=2", "--set", "evolution.num_variations=1", "--model", f"{HERE}:MUTE")
    for code, lines in ((0, 3), (0, 2), (2, 2)):
        assert main(["evolve", "records.jsonl", *given]) == code
        assert ReleasedDemonstrations.load(folder / "out.json").report["step"] == 2
        (folder / "kept").write_text("".join((folder / "kept").read_text().splitlines(keepends=True)[:lines]))
        monkeypatch.setattr("langchain_dpicl.privacy.ledger.budget._IDENTITIES", {})
    assert "--checkpoint: expected all that 'out.json' holds, found 'less'." in capsys.readouterr().err


def train(*more: str) -> int:
    training = ("--set", "training.expected_batch_size=30", "--set", "training.steps=3", "--out", "soft")
    return main(["train", "records.jsonl", *TERMS, *training, *more])


def train_engine(folder: Path, *more: str) -> int:
    rows = [{"text": f"{CANARY} {place}", "topic": ("good", "bad")[place % 2]} for place in range(300)]
    (folder / "records.jsonl").write_text("\n".join(map(json.dumps, rows)))
    labels = ("--set", 'data.labels=["good", "bad"]')
    terms = [part for part in TERMS if part not in {"--label", "card", "transfer"}]
    steps = ("--set", "training.expected_batch_size=30", "--set", "training.steps=3", "--set", "noise=gaussian")
    return main(["train", "records.jsonl", *terms, *labels, *steps, "--model", f"{HERE}:ENGINE", *more])


def test_a_prompt_is_trained_and_saved(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_engine(folder, "--out", "soft") == 0
    assert "step x 3" in capsys.readouterr().out
    assert SoftPrompt.load(folder / "soft").epsilon <= 8.0
    kept = (folder / "soft" / "soft_prompt.json").read_bytes()
    assert train_engine(folder, "--out", "soft") == 2
    assert "--out: expected a file that does not exist yet, found 'soft/soft_prompt.json'" in capsys.readouterr().err
    assert (folder / "soft" / "soft_prompt.json").read_bytes() == kept


def test_a_prompt_whose_last_step_was_paid_in_vain_is_saved_by_the_next_command(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    PrivacyBudgetCallbackHandler.create("ledger.db", epsilon=8.0, delta=1e-6).budget.close()
    kept = ("--ledger", "ledger.db", "--component", "soft", "--checkpoint", "kept", "--out", "soft", "--delta", "1e-7")
    made = PromptDPSGD._keep

    def stops(self: PromptDPSGD, *given: Any) -> Any:
        if self.step == 2:  # as a process that is killed there
            raise KeyboardInterrupt
        return made(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(PromptDPSGD, "_keep", stops)
        assert train_engine(folder, *kept) == 130
    shutil.rmtree(folder / "soft")
    monkeypatch.setattr("langchain_dpicl.privacy.ledger.budget._IDENTITIES", {})
    capsys.readouterr()
    assert train_engine(folder, *kept) == 4
    said = capsys.readouterr().err
    assert "What was released is saved in soft. The same command continues where this one stopped, if tickets" in said
    assert SoftPrompt.load(folder / "soft").report["step"] == 2
    monkeypatch.setattr(PromptDPSGD, "step", property(lambda _: 1))  # as with an older copy of the checkpoint
    monkeypatch.setattr("langchain_dpicl.privacy.ledger.budget._IDENTITIES", {})
    assert train_engine(folder, *kept) == 2
    assert "--checkpoint: expected all that 'soft/soft_prompt.json' holds, found 'less'" in capsys.readouterr().err
    assert SoftPrompt.load(folder / "soft").report["step"] == 2


@pytest.mark.parametrize(
    ("out", "said"),
    [
        ("/proc/prompt", "--out: expected a place that can be written, found /proc/prompt ("),
        ("signed", "found ['soft_prompt.json.signature.json'] in it"),
        ("link", "expected a path in a folder that exists, found 'link'"),
        ("kept", "--out: expected another file than those that the command reads or keeps, found kept."),
    ],
)
def test_a_folder_that_could_not_be_written_at_the_end_is_refused_before_a_budget_is_opened(
    out: str, said: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "signed").mkdir()
    (folder / "signed" / "soft_prompt.json").touch()
    (folder / "signed" / "soft_prompt.json.signature.json").touch()
    (folder / "link").symlink_to(folder / "nowhere" / "soft")
    monkeypatch.setattr(runs, "budget_of", lambda settings: pytest.fail("a budget is opened"))
    assert train_engine(folder, "--out", out, "--checkpoint", "kept") == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("fault", ["No space left on device", "a file that no other command writes meanwhile"])
def test_a_prompt_that_cannot_be_saved_is_printed_with_its_numbers(
    fault: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = folder / "soft" / "soft_prompt.json"

    def fsync(_: int) -> None:
        if fault.startswith("No space"):
            raise OSError(28, fault)
        theirs.parent.mkdir(exist_ok=True)
        theirs.write_text("of another command")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        assert train_engine(folder, "--out", "soft", "--quiet") == 2
    said = capsys.readouterr()
    assert not theirs.exists() or theirs.read_text() == "of another command"
    (folder / "again").mkdir()
    for name, content in json.loads(said.out)["files_in_base64"].items():
        (folder / "again" / name).write_bytes(base64.b64decode(content))
    assert SoftPrompt.load(folder / "again").epsilon <= 8.0
    assert fault in said.err
    assert "The prompt's files are printed in base64, by name: decode each into a new folder." in said.err
    assert CANARY not in said.out + said.err


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_the_model_of_a_folder_is_trained_for_the_task_of_the_settings(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    from tests import tiny_hf

    tiny_hf.llama().save_pretrained("model")
    tiny_hf.byte_tokenizer().save_pretrained("model")
    Path("public.jsonl").write_text(json.dumps({"text": "a card", "topic": "card"}))
    task = 'task={kind="causal_lm", labels=["card", "transfer"], words=["c", "t"]}'
    assert train("--model", "model", "--validation", "public.jsonl", "--set", task) == 0
    said = capsys.readouterr()
    assert said.out.startswith("step 1 of 3: validation loss ")
    assert CANARY not in said.out + said.err
    assert SoftPrompt.load("soft").task.labels == ("card", "transfer")


@pytest.mark.parametrize(
    ("command", "given", "said"),
    [
        ("label", (), "--inputs: expected the file of the public inputs, found none"),
        (
            "label",
            ("--inputs", "records.jsonl", "--out", "o.json"),
            "--inputs: expected a PUBLIC file, found the recor",
        ),
        ("label", ("--inputs", "inputs.txt"), "--out: expected the file for what is released, found none"),
        (
            "label",
            ("--inputs", "inputs.txt", "--dry-run", "--set", "rows.redraw_every=3"),
            "Rows.redraw_every: expected None or 'run' for labels, found 3.",
        ),
        (
            "label",
            (
                "--inputs",
                "inputs.txt",
                "--dry-run",
                "--set",
                "rows.sampling=partition",
                "--set",
                "rows.redraw_every=run",
            ),
            "Rows(sampling='partition'): expected no redraw_every",
        ),
        ("evolve", (), "--out: expected the file for what is released, found none"),
        (
            "evolve",
            ("--dry-run", "--set", "guess.rehearsal=r.json"),
            "['voting', 'retrieval', 'pate'] beside guess.reh",
        ),
        ("evolve", ("--out", "o.json", "--max-tokens", "0"), "dpicl: max_tokens: expected an integer >= 1, found 0."),
        ("evolve", ("--dry-run", "--max-tokens", "0"), "dpicl: max_tokens: expected an integer >= 1, found 0."),
        (
            "generate",
            ("--dry-run", "--set", "task.open_label.key=q"),
            "OpenLabel.key: expected a declared field of exa",
        ),
        ("generate", ("--dry-run", "--set", "task.hints=['a']"), "task: expected neither variation_prompt nor hints"),
        ("evolve", ("--dry-run", "--set", "task.open_label.key=q"), "GenerationTask: expected fields among ['hints',"),
        (
            "evolve",
            ("--dry-run", "--set", "evolution.candidates=['a','b']"),
            "candidates: expected at least 4 distinct",
        ),
        ("evolve", ("--dry-run", "--set", "evolution.num_candidates=3"), "candidates: expected at least 4 distinct"),
        ("evolve", ("--set", "method=generation"), "method: expected one of ['evolution']"),
        ("evolve", ("--out", "o.json", "--embeddings", "nowhere:x"), "model.embeddings: no module named 'nowhere'"),
        ("evolve", ("--out", "o.json", "--embeddings", "x"), "expected provider:model or module:attribute, found 'x'"),
        (
            "generate",
            ("--dry-run", "--model", "nowhere"),
            "--model: expected 'embedded', a folder that holds a model, ",
        ),
        ("train", ("FEW", "--dry-run", "--set", "model.device=cpu"), "model.device: expected none unless --model is"),
        ("train", (), "training: expected a table with expected_batch_size, and epochs or steps, found None"),
        ("train", ("FEW", "--out", "inputs.txt"), "--out: expected a folder, new or of an earlier run"),
        ("train", ("FEW", "--out", "."), "--out: expected a folder, new or of an earlier run"),
        ("train", ("FEW", "--out", "soft", "--model", ""), "--model: expected 'embedded', a folder"),
        ("train", ("FEW", "--out", "soft"), "--model: expected the folder of a local model"),
        ("train", ("FEW", "--out", "soft", "--model", ".", "--set", "model.chat=true"), "expected name, device and"),
        ("train", ("FEW", "--out", "soft", "--validation", "records.jsonl"), "--validation: expected a PUBLIC file"),
        ("train", ("FEW", "--out", "s", "--model", ".", "--set", "task.labels=5"), "task: expected a table with kind"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_bad_input_is_refused(
    command: str, given: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["--set", "training.expected_batch_size=30", "--set", "training.steps=3"]
    typed = [part for each in given for part in (few if each == "FEW" else [each])]
    assert main([command, "records.jsonl", *TERMS, *typed]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert CANARY not in error


@pytest.mark.parametrize("command", ["generate", "evolve", "vote"])
def test_labels_that_differ_in_case_or_spaces_alone_are_told_before_anything_is_spent(
    command: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    question = ("--query", "why?", "--model", f"{HERE}:SURE") if command == "vote" else ("--dry-run",)
    asked = [command, "records.jsonl", *TERMS, *question, "--label", "Card"]
    assert main(asked) == 0
    told = "dpicl: note: the labels 'card' and 'Card' differ in case or spaces alone: each is a label of its own."
    assert capsys.readouterr().err.count(told) == 1
    assert main(asked[:-2]) == 0
    assert "in case or spaces" not in capsys.readouterr().err
