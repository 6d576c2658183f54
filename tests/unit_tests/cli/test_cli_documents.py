"""`dpicl documents`: what it plans, saves and says, and what it never says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from langchain_dpicl import SyntheticDocuments, verify_report
from langchain_dpicl.backends.fake import FakeBackend, word_copier
from langchain_dpicl.cli.main import main
from langchain_dpicl.released.documents import SyntheticDocuments as Released

CANARY = "canary-7f3a"
TERMS = (
    "--epsilon",
    "6",
    "--delta",
    "1e-9",  # bounds the chance that the one unit's word is released
    "--public-size",
    "600",
    "--set",
    "topics.num_topics=2",
    "--set",
    "max_tokens=2",
)
FEW = ("--documents-per-topic", "1", "--set", "rows.slots=10", "--set", "topics.min_units=100")
OUT_AFTER_ONE = FakeBackend(word_copier([" my", " card"]), vocabulary=[" my", " card"], fail_public_call=3)

COPIER = FakeBackend(word_copier([" my", " card"]), vocabulary=[" my", " card"])


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    path = tmp_path / "notes.jsonl"
    texts = ["my card was declined"] * 300 + ["the transfer is late"] * 250 + [CANARY]
    path.write_text("\n".join(json.dumps({"text": text, "user": str(place)}) for place, text in enumerate(texts)))
    return path


@pytest.fixture
def words(tmp_path: Path) -> Path:
    path = tmp_path / "words.txt"
    path.write_text("card\n\ntransfer\nboat\n")
    return path


def documents(notes: Path, *more: str) -> int:
    return main(["documents", str(notes), *TERMS, *FEW, *more])


def test_documents_are_released_saved_and_recomputed(
    notes: Path, words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    assert documents(notes, "--vocabulary", str(words), "--unit-key", "user", "--out", str(out)) == 0
    found, said = SyntheticDocuments.load(out), capsys.readouterr()
    assert sorted(topic for topic, _ in found.topics) == ["card", "transfer"]
    assert len(found) == 2
    assert verify_report(out.read_text()).epsilon <= 6.0
    assert verify_report(found).ok
    assert f"{found.texts[0].topic}: {found.texts[0].text}" in said.out
    assert "noisy count" in said.out
    assert CANARY not in said.out + said.err + out.read_text()


def test_the_commands_of_the_page_run_one_after_the_other_on_one_ledger(
    notes: Path, words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "cli.md").read_text()
    monkeypatch.chdir(tmp_path)
    data = f'[data]\nfile = "{notes.name}"\npublic_size = 600\ndataset_id = "notes"\n'
    Path("notes.toml").write_text(data + '[budget]\nledger = "budget.db"\n')
    words.rename("keywords.txt")
    assert main(["ledger", "create", "budget.db", "--epsilon", "8", "--delta", "1e-6"]) == 0
    for line in re.findall(r"^dpicl (documents .*)$", page, re.MULTILINE):
        monkeypatch.setattr("langchain_dpicl.privacy.ledger.budget._IDENTITIES", {})
        model = "tests.unit_tests.cli.test_cli_documents:COPIER"
        assert main([*line.split(), "--set", "max_tokens=2", "--model", model]) == 0


def test_a_dry_run_reads_and_spends_nothing(tmp_path: Path, words: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert documents(tmp_path / "nowhere.jsonl", "--vocabulary", str(words), "--dry-run") == 0
    assert "at most 2 of 3 public keywords, 3 of each unit" in capsys.readouterr().out
    assert documents(tmp_path / "nowhere.jsonl", "--vocabulary-size", "300") == 0
    assert "300 public keywords" in capsys.readouterr().out
    assert documents(tmp_path / "nowhere.jsonl", "--public-texts", str(words), "--set", "rows.sampling=disjoint") == 0
    few = ("--documents-per-topic", "0", "--set", "topics.num_topics=100")
    assert main(["documents", str(tmp_path / "nowhere.jsonl"), *TERMS, *few, "--dry-run"]) == 0
    assert "but a topic has 6 units if they spread evenly over 100" in capsys.readouterr().out


def test_nothing_found_is_said(notes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = tmp_path / "other.txt"
    words.write_text("film\nboat\n")
    assert documents(notes, "--vocabulary", str(words), "--out", str(tmp_path / "out.json")) == 0
    assert "no topic, no text" in capsys.readouterr().out
    assert documents(notes, "--vocabulary", str(words), "--out", str(tmp_path / "two.json"), "--quiet") == 0
    assert capsys.readouterr().out == ""


def test_what_was_released_before_a_stop_is_saved(
    notes: Path, words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    model = "tests.unit_tests.cli.test_cli_documents:OUT_AFTER_ONE"
    assert documents(notes, "--vocabulary", str(words), "--out", str(out), "--model", model) == 4
    assert len(SyntheticDocuments.load(out)) == 1
    assert "is saved in" in capsys.readouterr().err


def test_topics_are_saved_where_no_text_is_left(notes: Path, words: Path, tmp_path: Path) -> None:
    out, settings = tmp_path / "out.json", tmp_path / "settings.toml"
    settings.write_text('[decoding]\nstop = [" my", " card"]\n')
    model = "tests.unit_tests.cli.test_cli_documents:COPIER"
    given = ("--vocabulary", str(words), "--out", str(out), "--config", str(settings), "--model", model)
    assert documents(notes, *given) == 3
    assert sorted(topic for topic, _ in SyntheticDocuments.load(out).topics) == ["card", "transfer"]


def test_ctrl_c_saves_and_a_file_that_cannot_be_written_is_printed(
    notes: Path, words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.json"

    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("langchain_dpicl.documents.choose_topics", stopped)
    assert documents(notes, "--vocabulary", str(words), "--out", str(out)) == 130
    assert not out.exists(), "the same command has to find its name free"
    monkeypatch.undo()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Released, "save", full)
    assert documents(notes, "--vocabulary", str(words), "--out", str(out)) == 2
    assert "langchain-dpicl/synthetic-documents" in capsys.readouterr().out


def test_public_faults_are_refused(
    notes: Path, words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert documents(notes, "--vocabulary", str(notes), "--out", str(tmp_path / "out.json")) == 2
    assert "PUBLIC" in capsys.readouterr().err
    for option in ("--vocabulary", "--public-texts"):
        assert documents(notes, option, str(words), "--out", str(words)) == 2
        assert "another file than those that the command reads" in capsys.readouterr().err
    assert words.read_text() == "card\n\ntransfer\nboat\n"
    for more in (("--dry-run",), ("--out", str(tmp_path / "out.json"))):
        assert documents(notes, "--vocabulary", str(words), "--vocabulary-size", "1", *more) == 2
        said = "--vocabulary-size: expected none beside --vocabulary, all of whose lines are taken, found 1."
        assert said in capsys.readouterr().err
        assert documents(notes, "--documents-per-topic", "1", "--model", "nowhere", *more) == 2
        assert "--model: expected 'embedded', a folder" in capsys.readouterr().err
    words.write_bytes(b"\xff\xfe\x00card")
    assert documents(notes, "--public-texts", str(words), "--out", str(tmp_path / "out.json")) == 2
    assert documents(notes, "--set", "topics.num_topics=0", "--dry-run") == 2
    assert documents(notes, "--set", "noise=loud", "--dry-run") == 2


def test_words_alone_ask_no_model_and_keep_denied_ones_out(
    notes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (denied := tmp_path / "denied.txt").write_text("declined\n")
    out = tmp_path / "out.json"
    given = [*TERMS, "--documents-per-topic", "0", "--model", "tests.nowhere:none", "--deny", str(denied)]
    assert main(["documents", str(notes), *given, "--out", str(out)]) == 0
    found, said = SyntheticDocuments.load(out), capsys.readouterr()
    words = {word for group in found.words for word, _ in group.words} | {topic for topic, _ in found.topics}
    assert words <= {"card", "transfer", "late"}
    assert verify_report(out.read_text()).ok
    assert "no model is asked" in said.out
    assert "embedded model writes" not in said.err
    assert CANARY not in said.out + said.err + out.read_text()


def test_an_older_checkpoint_replaces_no_words(
    notes: Path, words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    given = (*TERMS, "--documents-per-topic", "0", "--vocabulary", str(words), "--set", "topics.min_units=100")
    assert main(["ledger", "create", "ledger.db", "--epsilon", "8", "--delta", "1e-6"]) == 0
    kept = ("--ledger", "ledger.db", "--component", "words", "--checkpoint", "kept", "--out", "out.json", "--quiet")
    for code, lines in ((0, 5), (0, 3), (2, 2), (2, 2)):  # the head, the topics, and the words of both
        assert main(["documents", str(notes), *given, *kept]) == code
        assert [len(group.words) > 0 for group in SyntheticDocuments.load("out.json").words] == [True, True]
        monkeypatch.setattr("langchain_dpicl.privacy.ledger.budget._IDENTITIES", {})
        Path("kept").write_text("".join(Path("kept").read_text().splitlines(keepends=True)[:lines]))
    assert "--checkpoint: expected all that 'out.json' holds, found 'less'." in capsys.readouterr().err


def test_a_plan_shows_what_each_part_brings_and_costs(capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["plan", "--method", "documents", "--public-size", "4000", "--epsilon", "2", "--delta", "1e-6"]
    assert main([*plan, "--documents-per-topic", "2", "--set", "topics.words=8"]) == 0
    said = capsys.readouterr().out
    for part in (
        "alone: topics 0.676, words 0.676, texts",
        "reach with a chance of 2.5e-07\n",
        "a word of 125 units of a topic",
        "texts    2 of each topic; gumbel, noise multiplier 1.7690,",
    ):
        assert part in said
    assert "spread evenly" not in said
    for size, warns in (("4000", False), ("40", True)):
        few = [size if each == "4000" else each for each in plan]
        assert main([*few, "--documents-per-topic", "0", "--set", "topics.num_topics=100"]) == 0
        shown = capsys.readouterr()
        assert ("note: A topic is found" in shown.err) == warns
        assert "units if they spread evenly over 100" in shown.out
    assert main([*plan, "--documents-per-topic", "0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["generation"] is None
    assert main(plan) == 2
    assert "0 for words of each topic alone" in capsys.readouterr().err
