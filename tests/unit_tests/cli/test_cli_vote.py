"""`dpicl vote`: what it answers, pays, prints and saves, and what it never says."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from langchain_dpicl.backends.fake import FakeBackend, scripted
from langchain_dpicl.budget.handler import PrivacyBudgetCallbackHandler
from langchain_dpicl.cli.inputs import settings_of
from langchain_dpicl.cli.main import main
from langchain_dpicl.cli.spending import Call
from langchain_dpicl.cli.vote import _check_added_to, _keep
from langchain_dpicl.exceptions import ConfigurationError, ModelCallError
from langchain_dpicl.options import Serving
from langchain_dpicl.voting import DPVotingRunnable
from tests.other_shells import OtherShells

CANARY = "canary-7f3a"
DECLARED = ("--label-key", "topic", "--label", "card", "--label", "transfer", "--public-size", "300")
TERMS = (*DECLARED, "--epsilon", "8", "--delta", "1e-6")
CARD, TRANSFER = "why was my card declined?", "where is my transfer?"
SURE = FakeBackend(scripted({" card": 0.9, " transfer": 0.1}), vocabulary=[" card", " transfer"])
HERE = "tests.unit_tests.cli.test_cli_vote"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    rows = [("my card was declined", "card"), ("my transfer is late", "transfer"), (CANARY, "card")] * 100
    lines = [json.dumps({"text": text, "topic": topic}) for text, topic in rows]
    (tmp_path / "records.jsonl").write_text("\n".join(lines))
    (tmp_path / "questions.txt").write_text(f"{CARD}\n\n{TRANSFER}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def vote(*more: str, terms: tuple[str, ...] = TERMS) -> int:
    return main(["vote", "records.jsonl", *terms, *more])


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_embedded_model_answers_questions_of_a_file_and_of_the_command_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Of 20 rows at most one in nineteen is wrong about any of these, under noise of 1.5: below 1e-6 in all.
    (folder / "questions.txt").write_text("my card is blocked\n\nmy transfer is late\n")
    assert vote("--queries", "questions.txt", "--query", "is my\n card blocked?", "--out", "answers.jsonl") == 0
    said = capsys.readouterr()
    first, second, third, *report = said.out.splitlines()
    assert first.split("\t") == ["card", "is my card blocked?"]
    assert second.split("\t") == ["card", "my card is blocked"]
    assert third.split("\t") == ["transfer", "my transfer is late"]
    assert any("query x 3" in line for line in report)
    assert [answer["label"] for answer in lines_of(folder / "answers.jsonl")] == ["card", "card", "transfer"]
    assert CANARY not in said.out + said.err + (folder / "answers.jsonl").read_text()


def test_json_is_one_line_per_answer_with_its_receipt_and_nothing_else(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "questions.jsonl").write_text(f'{{"text": "{CARD}", "id": 7}}\n{{"input": "{TRANSFER}"}}\n"{CARD}"\n')
    given = ("--model", f"{HERE}:SURE", "--set", "answers.scores=true", "--json", "--quiet")
    assert vote("--queries", "questions.jsonl", *given) == 0
    said = capsys.readouterr()
    answers = [json.loads(line) for line in said.out.splitlines()]
    assert [answer["query"] for answer in answers] == [{"input": CARD}, {"input": TRANSFER}, CARD]
    assert [answer["label"] for answer in answers] == ["card"] * 3
    assert set(answers[0]["scores"]) == {"card", "transfer"}
    # The third is the first again.
    assert [answer["receipt"]["tickets"] for answer in answers] == [1, 1, 0]
    assert said.err == ""


def test_an_answer_is_in_the_file_before_it_is_printed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(_: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("langchain_dpicl.cli.main._say", closed)
    assert vote("--query", CARD, "--model", f"{HERE}:SURE", "--out", "answers.jsonl") == 2
    assert [answer["label"] for answer in lines_of(folder / "answers.jsonl")] == ["card"]


@pytest.mark.parametrize("out", [(), ("--out", "answers.jsonl")])
def test_no_further_question_is_paid_for_where_nobody_reads_the_answers(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], out: tuple[str, ...]
) -> None:
    read: list[str] = []
    monkeypatch.setattr("langchain_dpicl.cli.main._say", lambda text: read.append(text) or False)
    given = ("--queries", "questions.txt", "--model", f"{HERE}:SURE", "--json", *out)
    assert vote(*given) == (0 if out else 2)
    assert len(read) == (2 if out else 1)
    if not out:
        said = capsys.readouterr().err
        assert "vote: 1 of 2 questions are answered." in said
        assert "nobody reads the answers, and each costs a ticket" in said


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("name", ["q.json", "q.ndjson", "q.tsv", "q.json.gz"])
def test_a_file_of_another_format_is_not_asked_line_by_line(capsys: pytest.CaptureFixture[str], name: str) -> None:
    Path(name).write_text('[\n  {"text": "my card is gone"}\n]\n')
    assert vote("--queries", name, "--model", f"{HERE}:SURE") == 2
    assert f"--queries: expected JSON lines (.jsonl), CSV (.csv) or one text a line (.txt), found {name!r}." in (
        capsys.readouterr().err
    )


@pytest.mark.usefixtures("folder")
def test_an_answer_that_cannot_be_written_is_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("langchain_dpicl.cli.vote._check_added_to", lambda out: out.symlink_to("/dev/full"))
    assert vote("--query", CARD, "--model", f"{HERE}:SURE", "--out", "answers.jsonl", "--quiet") == 2
    assert json.loads(capsys.readouterr().out)["label"] == "card"


@pytest.mark.usefixtures("folder")
def test_a_question_of_several_fields_and_a_dry_run_without_one_are_explained(
    capsys: pytest.CaptureFixture[str],
) -> None:
    two = ("--set", "task.suffix={first} {second}:", "--set", "task.example_prompt={text}: {topic}")
    assert vote("--query", CARD, "--model", f"{HERE}:SURE", *two) == 2
    said = "question: expected the fields ['first', 'second'], found 'one text'. Put one question on a line of a .jsonl"
    assert said in capsys.readouterr().err
    assert vote("--dry-run") == 2
    assert "for a plan --dry-run --max-queries N" in capsys.readouterr().err


@pytest.mark.usefixtures("folder")
def test_an_abstention_is_shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DPVotingRunnable, "_outcome", lambda *_: (None, None))
    assert vote("--query", CARD, "--model", f"{HERE}:SURE", "--set", "answers.abstain_label=unsure") == 0
    assert capsys.readouterr().out.splitlines()[0] == f"unsure (no label had enough votes)\t{CARD}"


def test_a_ledger_that_two_processes_spend_refuses_with_its_own_exit_code(
    folder: Path, other_shells: OtherShells, capsys: pytest.CaptureFixture[str]
) -> None:
    PrivacyBudgetCallbackHandler.create("ledger.db", epsilon=8.0, delta=1e-6).budget.close()
    paid = (*DECLARED, "--ledger", "ledger.db", "--component", "help", "--epsilon", "8", "--max-queries", "3")
    asked = ("vote", "records.jsonl", *paid, "--model", f"{HERE}:SURE", "--queries", "questions.txt")
    assert main([*asked]) == 0
    first = capsys.readouterr()
    assert first.out.splitlines()[1] == f"card\t{TRANSFER}", first.err
    second = other_shells.run(*asked, folder=folder)
    assert second.returncode == 3
    assert second.stdout.splitlines() == [f"card\t{CARD}"]
    assert "dpicl: vote: 1 of 2 questions are answered." in second.stderr
    assert "requested 1, remaining 0" in second.stderr
    assert "\n  remaining epsilon 0, delta 0\n    of help: 1 tickets\n" in first.out
    assert CANARY not in first.out + first.err + second.stdout + second.stderr
    assert main([*asked, "--dry-run"]) == 0
    assert "dpicl: note: 'help' is a share of this ledger: 0 of its tickets are left" in capsys.readouterr().err
    # Another component finds nothing left, in a dry run too.
    other = [*asked, "--component", "other"]
    assert main([*other, "--dry-run"]) == 3
    assert main(other) == 3


def test_a_memo_gives_the_answers_of_an_earlier_process_for_nothing(
    folder: Path, other_shells: OtherShells, capsys: pytest.CaptureFixture[str]
) -> None:
    PrivacyBudgetCallbackHandler.create("ledger.db", epsilon=8.0, delta=1e-6).budget.close()
    paid = (*DECLARED, "--ledger", "ledger.db", "--component", "help", "--epsilon", "8", "--max-queries", "1")
    asked = ("--query", CARD, "--model", f"{HERE}:SURE", "--memo", "answers.memo")
    assert other_shells.run("vote", "records.jsonl", *paid, *asked, folder=folder).returncode == 0
    assert vote(*asked, terms=paid) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"card (from the memo, free)\t{CARD}"


def test_a_model_that_fails_ends_with_its_own_exit_code_and_keeps_what_was_answered(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = DPVotingRunnable._prepare

    def out_after_one(self: DPVotingRunnable, query: Any, config: Any) -> Any:
        if query == (TRANSFER,):
            raise ModelCallError("the public call failed")
        return prepare(self, query, config)

    monkeypatch.setattr(DPVotingRunnable, "_prepare", out_after_one)
    asked = ("--queries", "questions.txt", "--model", f"{HERE}:SURE")
    assert vote(*asked, "--out", "answers.jsonl") == 4
    said = capsys.readouterr()
    assert said.err == "dpicl: vote: 1 of 2 questions are answered.\ndpicl: the public call failed\n"
    assert [answer["query"] for answer in lines_of(folder / "answers.jsonl")] == [CARD]


@pytest.mark.usefixtures("folder")
def test_ctrl_c_ends_with_its_usual_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(DPVotingRunnable, "_prepare", stopped)
    assert vote("--query", CARD, "--model", f"{HERE}:SURE") == 130
    assert capsys.readouterr().err.endswith("0 of 1 questions are answered.\ndpicl: interrupted.\n")


def test_a_size_that_is_not_declared_is_asked_for_by_its_flag(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["vote", "records.jsonl", "--query", CARD, "--epsilon", "1", "--delta", "1e-6"]) == 2
    said = (
        "--public-size, data.public_size: expected the declared number of units, or one number per label, found None."
    )
    assert said in capsys.readouterr().err


def test_answers_are_added_to_a_file_and_never_written_over_it(folder: Path) -> None:
    asked = ("--query", CARD, "--model", f"{HERE}:SURE", "--out", "answers.jsonl", "--quiet")
    assert vote(*asked) == vote(*asked) == 0
    assert len(lines_of(folder / "answers.jsonl")) == 2


@pytest.mark.parametrize("is_kept", [True, False])
def test_an_answer_is_added_to_what_has_the_name_by_then(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, is_kept: bool
) -> None:
    """An editor saves a new file under the old name."""

    def saved(text: str) -> None:
        if json.loads(text)["query"] == CARD:
            (folder / "new").write_bytes(out.read_bytes() if is_kept else b"")
            (folder / "new").replace(out)

    out = folder / "answers.jsonl"
    monkeypatch.setattr("langchain_dpicl.cli.main._say", saved)
    assert vote("--queries", "questions.txt", "--model", f"{HERE}:SURE", "--out", "answers.jsonl", "--json") == 0
    assert len(lines_of(out)) == 1 + is_kept


def test_a_file_that_nothing_can_be_added_to_is_told_before_an_answer_is_paid_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def opened(self: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
        if self == out and mode == "a":
            raise PermissionError(13, "Permission denied", str(self))
        return opens(self, mode, *args, **options)

    opens, out = Path.open, Path("answers.jsonl")
    out.write_text('{"query": "earlier"}\n')
    monkeypatch.setattr(Path, "open", opened)
    assert vote("--query", CARD, "--model", f"{HERE}:SURE", "--out", str(out), "--json") == 2
    said = capsys.readouterr()
    assert "answers.jsonl: Permission denied" in said.err
    assert not said.out  # an answer that is paid for is printed


def test_an_answer_never_continues_a_line_that_a_full_disk_has_cut(tmp_path: Path) -> None:
    for before in ("", '{"query": "a"}\n', '{"query": "a"}\n{"query": "b", "la'):
        (file := tmp_path / "answers.jsonl").write_text(before)
        _keep('{"query": "c"}', Call(argparse.Namespace(out=file), settings_of({"method": "voting"}), print, print))
        assert file.read_text().splitlines()[-1] == '{"query": "c"}'
        assert file.read_text().startswith(before)
        assert "\n\n" not in file.read_text()


@pytest.mark.parametrize("content", ['{\n  "examples": []\n}', '{"format": "a checkpoint"}\n', "SQLite format 3\0\xff"])
def test_answers_are_added_to_no_file_of_something_else(
    content: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "paid.json").write_bytes(content.encode("latin-1"))
    assert vote("--query", CARD, "--model", f"{HERE}:SURE", "--out", "paid.json") == 2
    assert "--out: expected a new file, or one of answers, found 'paid.json'" in capsys.readouterr().err
    assert (folder / "paid.json").read_bytes() == content.encode("latin-1")


def test_of_a_line_to_add_answers_below_no_more_is_read_than_of_any_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out.jsonl").write_text('{"query": "a"}')
    _check_added_to(tmp_path / "out.jsonl")
    monkeypatch.setattr("langchain_dpicl.cli.vote.MAX_TEXT", 10)
    with pytest.raises(ConfigurationError, match="expected a new file, or one of answers"):
        _check_added_to(tmp_path / "out.jsonl")


def test_a_dry_run_reads_no_record_asks_no_model_and_pays_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "records.jsonl").unlink()
    PrivacyBudgetCallbackHandler.create("ledger.db", epsilon=8.0, delta=1e-6).budget.close()
    before = (folder / "ledger.db").read_bytes()
    paid = (*DECLARED, "--ledger", "ledger.db", "--component", "help", "--epsilon", "2")
    assert vote("--queries", "questions.txt", "--model", "nowhere:llm", "--dry-run", terms=paid) == 0
    assert "at delta 2.5e-07, adjacency add_remove, for 2 queries (nothing is spent)" in capsys.readouterr().out
    assert vote("--max-queries", "50", "--dry-run", "--json") == 0
    assert json.loads(capsys.readouterr().out)["plan"]["max_queries"] == 50
    sizes = ("--epsilon", "8", "--delta", "1e-6", "--public-size", "300", "--set", "guess.labels=2")
    assert main(["vote", "records.jsonl", *sizes, "--max-queries", "50", "--dry-run"]) == 0
    assert (folder / "ledger.db").read_bytes() == before


def test_settings_of_a_file_are_those_of_python(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "task.toml").write_text(
        'suffix = "Q: {question}\\ntopic:"\n[data]\nfile = "records.jsonl"\nlabel_key = "topic"\n'
        'labels = ["card", "transfer"]\npublic_size = 300\n[budget]\nepsilon = 8.0\ndelta = 1e-6\n'
        f'[model]\nname = "{HERE}:SURE"\n[rows]\nslots = 10\n'
    )
    (folder / "questions.jsonl").write_text(json.dumps({"question": CARD}))
    assert main(["vote", "--config", "task.toml", "--queries", "questions.jsonl", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["query"], answer["expected_votes"]) == ({"question": CARD}, 10.0)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((), "--query, --queries: expected a question, found none."),
        (("--queries", "records.jsonl"), "--queries: expected a PUBLIC file, found the records"),
        (("--queries", "broken.jsonl"), "found a broken line"),
        (("--queries", "other.jsonl"), "--queries: expected fields ['text'] on every line, found \"['text'] missing\""),
        (
            ("--queries", "numbers.jsonl"),
            "--queries: expected a text, or an object of fields, on every line, found 'int'",
        ),
        (("--query", "x" * 100_000), "question 1: expected at most"),
        (("--query", CARD, "--out", "records.jsonl"), "--out: expected another file than those"),
        (("--queries", "questions.txt", "--out", "questions.txt"), "--out: expected another file than those"),
        (("--query", CARD, "--out", "new.db", "--memo", "new.db"), "--out: expected another file than those"),
        (("--query", CARD, "--out", "l.db", "--ledger", "l.db", "--component", "a"), "--out: expected another file"),
        (("--query", CARD, "--quiet"), "--out: expected a file for the answers, since --quiet prints none"),
        (("--query", CARD, "--query", "  "), "question 2: expected text, found 'none'"),
        (("--query", CARD, "--set", "method=pate"), "method: expected one of ['voting']"),
        (("--query", CARD, "--rehearsal", "nowhere.json"), "nowhere.json"),
        (("--query", CARD, "--rehearsal", "r.json", "--set", "rows.slots=4"), "guess.rehearsal: expected a rehearsal"),
        (("--query", CARD, "--ledger", "nowhere.db", "--component", "a"), "nowhere.db"),
    ],
)
def test_bad_input_is_refused_before_anything_is_paid_and_quotes_no_line(
    given: tuple[str, ...], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "broken.jsonl").write_text(f'{{"text": "{CANARY}\n')
    (folder / "numbers.jsonl").write_text('"a text"\n5\nnull\n[1]')
    (folder / "other.jsonl").write_text(json.dumps({"words": CANARY}))
    assert vote(*given, "--model", f"{HERE}:SURE") == 2
    error = capsys.readouterr().err
    assert said in error
    assert CANARY not in error


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ('"a text"\n5\nnull', "--queries: expected a text, or an object of fields, on every line, found 'int'"),
        ('{"words": "a text"}', "--queries: expected fields ['text'] on every line"),
        ('""', "question 1: expected text, found 'none'"),
    ],
)
def test_a_dry_run_refuses_questions_that_the_run_refuses(
    given: str, said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "asked.jsonl").write_text(given)
    for more in ((), ("--dry-run",)):
        assert vote("--queries", "asked.jsonl", "--model", f"{HERE}:SURE", *more) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--set", "suffix=no variable"), "suffix: expected a template with the query's variable"),
        (("--set", "example_prompt={text} {foo}"), "example_prompt: expected a template with fields among"),
        (("--set", "example_prompt={a.b}"), "Rename the field 'a.b': a template reads no name with . or [ in it"),
        (("--text-key", "topic"), "label_key: expected another field than text_key, found 'topic'"),
        (("--set", "data.file=records.json"), "records.json: expected JSON lines or CSV, in a file that ends in"),
        (("--label", "card "), "labels: expected labels that differ in more than spaces around them, found"),
        (("--label-key", "topic "), "label_key: expected a name with a letter first, no space last"),
        (("--text-key", "1"), "text_key: expected a name with a letter first"),
        (("--model", "nowhere"), "--model: expected 'embedded', a folder that holds a model, provider:model or"),
    ],
)
def test_a_dry_run_refuses_what_the_run_refuses_with_and_without_a_question(
    given: tuple[str, ...], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [] if "data.file=records.json" in given else ["records.jsonl"]
    (folder / "records.json").write_text("[]")
    for more in (("--query", CARD), ("--query", CARD, "--dry-run"), ("--max-queries", "5", "--dry-run")):
        assert main(["vote", *records, *TERMS, *more, *given]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("field", "label", "said"),
    [("topic", "loan", "rehearsal.labels"), ("topic", "transfer", ""), ("queue", "transfer", "name the public file's")],
)
def test_a_plan_and_a_dry_run_refuse_a_rehearsal_of_other_labels_or_templates(
    field: str, label: str, said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"text": f"{word} {place}", "topic": word} for word in ("card", "transfer") for place in range(12)]
    (folder / "public.jsonl").write_text("\n".join(map(json.dumps, rows)))
    asked = ("rehearse", "public.jsonl", "--label-key", "topic", "--out", "r.json", "--yes")
    assert main([*asked, "--model", f"{HERE}:SURE"]) == 0
    sizes = ("--public-size", "300", "--epsilon", "8", "--delta", "1e-6", "--max-queries", "5")
    rehearsed, own = ("--rehearsal", "r.json"), ("--set", f"data.label_key={field}")
    labels = ("--set", f"data.labels=['card','{label}']")

    def code_of(*command: str) -> int:
        capsys.readouterr()
        return main([*command, *sizes])

    plan = ("plan", "--method", "voting", "--no-compare", *rehearsed)
    labels_of_pate = ("plan", "--method", "pate", "--no-compare", "--public-inputs", "5", *rehearsed)
    # Labels that no one names are those of the rehearsal.
    for command in (
        ("vote", "records.jsonl", "--dry-run", *rehearsed, *own, *labels),
        (*plan, *own, *labels),
        (*labels_of_pate, *own, *labels),
        *([(*plan, *own)] if label == "transfer" else []),
    ):
        assert code_of(*command) == (2 if said else 0)
        assert said in capsys.readouterr().err
    whole = [plan, labels_of_pate, ("vote", "records.jsonl", "--query", CARD, "--dry-run", *rehearsed)]
    for asked_otherwise, wrong in (
        ("answers.votes=text", "rehearsal.reads"),
        ("answers={calibrate=true, content_free=['?']}", "LabelAnswers.content_free: expected"),
    ):
        for command in [] if said else whole:
            assert code_of(*command, *own, *labels, "--set", asked_otherwise) == 2
            assert wrong in capsys.readouterr().err
    if label == "transfer":  # rows of one's own, a field or labels that are not known: nothing that a vote would refuse
        for more in ((*own, *labels, "--set", "rows.slots=3"), labels, (*own, "--set", "guess.labels=2")):
            assert code_of(*plan, *more) == 0


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (("--component", "other", "--text-key", "words"), "found another in ['text_key']"),
        (("--component", "other", "--unit-key", "customer"), "found another in ['unit', 'unit_key']"),
        (("--max-queries", "2"), "'max_queries'"),
    ],
)
def test_a_dry_run_refuses_another_declaration_or_number_of_queries_than_the_ledger_holds(
    changed: tuple[str, ...],
    said: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    record = {"text": "a", "words": "a", "topic": "card", "customer": "c"}
    (folder / "records.jsonl").write_text(json.dumps(record))
    PrivacyBudgetCallbackHandler.create("ledger.db", epsilon=8.0, delta=1e-6).budget.close()
    paid = (*DECLARED, "--ledger", "ledger.db", "--component", "help", "--epsilon", "4", "--max-queries", "3")
    asked = ("vote", "records.jsonl", *paid, "--model", f"{HERE}:SURE", "--query", CARD)
    assert main([*asked]) == 0
    assert main([*asked, "--dry-run"]) == 0
    monkeypatch.setattr("langchain_dpicl.privacy.ledger.budget._IDENTITIES", {})  # as in another process
    capsys.readouterr()
    for more in ((), ("--dry-run",)):
        assert main([*asked, *changed, *more]) == 3
        error = capsys.readouterr().err
        assert said in error
        assert error.count("'implementation_delta'") <= 1


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("memo_size", "count"), [(256, 2), (1, 3), (0, 3)])
def test_equal_questions_take_one_ticket_unless_the_first_answer_is_forgotten(
    capsys: pytest.CaptureFixture[str], memo_size: int, count: int
) -> None:
    Path("questions.jsonl").write_text("\n".join(map(json.dumps, (CARD, TRANSFER, {"text": CARD}))))
    asked = ("--queries", "questions.jsonl", "--model", f"{HERE}:SURE", "--set", f"serving.memo_size={memo_size}")
    assert vote(*asked, "--dry-run", "--json") == 0
    assert json.loads(capsys.readouterr().out)["plan"]["max_queries"] == count
    assert vote(*asked) == 0
    assert "of voting: 0 tickets" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["vote", "--help-all"])
    told = f"one for each question where more than serving.memo_size ({Serving().memo_size}) are different"
    assert told in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_questions_without_a_ticket_are_told_before_the_first_one_is_paid_for(
    folder: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...]
) -> None:
    asked = ("--query", CARD, "--query", TRANSFER, "--query", CARD, "--model", f"{HERE}:SURE")
    assert vote(*asked, "--max-queries", "1", *more) == (0 if more else 3)
    note, *rest = capsys.readouterr().err.splitlines()
    assert note == (
        "dpicl: note: --max-queries: up to 2 questions to pay for, and tickets for 1; the others are answered from a "
        "memo or not at all. Raise it, leave it out, or give serving.on_exhausted=zero_shot (--set, or the settings file)"
    )
    assert any("take serving.on_exhausted=zero_shot (--set" in line for line in rest) == (not more)
    for enough in (("--max-queries", "2"), (), ("--max-queries", "1", "--set", "serving.on_exhausted=zero_shot")):
        assert vote(*asked, *enough, *more) == 0
        assert "max-queries" not in capsys.readouterr().err
