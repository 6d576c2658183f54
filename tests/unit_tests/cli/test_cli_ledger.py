"""`dpicl ledger`: create, show, verify, export, backup."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.cli.ledger import redact
from langchain_dpicl.cli.main import main
from langchain_dpicl.reports.report import verify_report
from langchain_dpicl.stores import FileAnchor, SQLiteStore, open_store
from tests.ledger_files import Shell, body_of, forged, spend

SECRET = "hunter2-secret"
ADDRESS = f"postgresql://user:{SECRET}@127.0.0.1:1/db"


@pytest.fixture
def dpicl(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A ledger of eight lines with an anchor beside it, and its receipts."""
    path, anchor = tmp_path / "budget.db", FileAnchor.new(tmp_path / "anchor.json")
    with SQLiteStore.new(path) as store:
        budget = Budget(epsilon=4.0, delta=1e-6, store=store, anchor=anchor)
        first, second = spend(budget)
        receipts = [
            {"ledger_id": budget.ledger_id, "entry": taken.entry, "entry_hash": taken.entry_hash, "component": name}
            for taken, name in ((first, "few-shot"), (second, "labels"))
        ]
    (tmp_path / "receipts.json").write_text(json.dumps(receipts))
    return path


def spend_more(file: Path) -> None:
    with open_store(file) as store:
        budget = Budget.open(store, anchor=FileAnchor(file.with_name("anchor.json")))
        pool = budget.gdp_pool("more", epsilon=0.25)
        pool.reserve(mu=pool.mu)


# --- create -----------------------------------------------------------------------------------------------------------


def test_a_ledger_is_created_once_and_opened_ever_after(dpicl: Shell, tmp_path: Path) -> None:
    path, anchor = tmp_path / "b.db", tmp_path / "a.json"
    limits = ("--epsilon", 4, "--delta", 1e-6)
    assert dpicl("create", path, *limits, "--adjacency", "replace_one", "--anchor", anchor) == 0
    assert "epsilon 4, delta 1e-06, adjacency replace_one" in dpicl.out
    with open_store(path) as store:
        budget = Budget.open(store)
        assert (budget.epsilon, budget.delta, budget.adjacency, budget.name) == (4.0, 1e-6, "replace_one", "budget")
        header = store.header()
        assert header is not None
        assert FileAnchor(anchor).read(budget.ledger_id) == (0, header.digest)
        assert budget.ledger_id in dpicl.out
    before = path.read_bytes()
    assert dpicl("create", path, *limits) == 2
    assert "found one" in dpicl.err
    assert path.read_bytes() == before
    assert dpicl("create", path, *limits, "--name", "other", "--anchor", anchor) == 0  # beside it, on the same anchor
    for name in ("budget", "other"):
        assert dpicl("verify", path, "--name", name, "--anchor", anchor) == 0


def test_a_creation_that_died_before_it_wrote_limits_can_be_done_again(dpicl: Shell, tmp_path: Path) -> None:
    path = tmp_path / "b.db"
    SQLiteStore.new(path).close()
    assert dpicl("show", path) == 2
    assert dpicl("verify", path) == 1
    assert dpicl("create", path, "--epsilon", 4, "--delta", 1e-6) == 0
    assert dpicl("verify", path) == 0
    assert dpicl("create", path, "--epsilon", 4, "--delta", 1e-6) == 2


@pytest.mark.parametrize(
    "options",
    [
        ("--epsilon", "-1", "--delta", "1e-6"),
        ("--epsilon", "1", "--delta", "1"),
        ("--epsilon", "nan", "--delta", "1e-6"),
        ("--epsilon", "1", "--delta", "1e-6", "--name", "a\nb"),
        ("--epsilon", "1", "--delta", "1e-6", "--adjacency", "zero_out"),
        ("--epsilon", "1"),
    ],
)
def test_bad_limits_are_refused_before_anything_is_made(options: tuple[str, ...], dpicl: Shell, tmp_path: Path) -> None:
    assert dpicl("create", tmp_path / "b.db", *options, "--anchor", tmp_path / "a.json") == 2
    assert dpicl.err
    assert list(tmp_path.iterdir()) == []


def test_a_creation_that_is_refused_leaves_no_anchor(dpicl: Shell, file: Path, tmp_path: Path) -> None:
    before = sorted(path.name for path in tmp_path.iterdir())
    assert dpicl("create", file, "--epsilon", 8, "--delta", 1e-6, "--anchor", tmp_path / "a2.json") == 2
    assert "found one" in dpicl.err
    assert dpicl("create", tmp_path / "no" / "b.db", "--epsilon", 8, "--delta", 1e-6, "--anchor", "a2.json") == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_creation_whose_anchor_cannot_be_made_can_be_done_again(dpicl: Shell, tmp_path: Path) -> None:
    create = ("create", tmp_path / "b.db", "--epsilon", 4, "--delta", 1e-6, "--anchor")
    assert dpicl(*create, tmp_path / "no" / "a.json") == 2
    assert dpicl(*create, tmp_path / "a.json") == 0
    assert dpicl("verify", tmp_path / "b.db", "--anchor", tmp_path / "a.json") == 0


def test_a_place_that_cannot_be_written_is_refused(dpicl: Shell, tmp_path: Path) -> None:
    assert dpicl("create", tmp_path / "no" / "b.db", "--epsilon", 1, "--delta", 1e-6) == 2
    assert str(tmp_path / "no") in dpicl.err


# --- show -------------------------------------------------------------------------------------------------------------


def test_show_says_what_is_promised_left_and_open(dpicl: Shell, file: Path) -> None:
    assert dpicl("show", file, "--anchor", file.with_name("anchor.json")) == 0
    for words in (
        "limit     epsilon 4, delta 1e-06",
        "promised  epsilon 1.5, delta 3.75e-07",
        "remaining epsilon 2.5, delta 6.25e-07\n    of few-shot: ",
        "'letters': unit = one record, size = 900",
        "few-shot",
        "pool, mu = ",
        "open reservations: 1",
        "'few-shot', token x 1",
        "count as spent",
    ):
        assert words in dpicl.out
    assert "dies" not in dpicl.out


def test_show_prints_json_that_verifies(dpicl: Shell, file: Path) -> None:
    assert dpicl("show", file, "--json", "--deltas", "1e-6,1e-8") == 0
    data = json.loads(dpicl.out)
    assert verify_report(data["report"]).problems == ()
    assert [row["delta"] for row in data["report"]["epsilons"]["rows"]] == [1e-8, 1e-6]
    assert data["remaining"] == {"epsilon": 2.5, "delta": 6.25e-7}
    (entry,) = data["dangling"]
    assert entry.pop("stamp").startswith("20")
    assert re.fullmatch("[0-9a-f]{16}", entry.pop("holder"))
    assert entry == {"entry": 3, "component": "few-shot", "template": "token", "label": None, "count": 1}


def test_show_writes_a_page_to_sign(dpicl: Shell, file: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    assert dpicl("show", file, "--html", page) == 0
    assert "computed anew when the page was made, and agree" in page.read_text()


def test_show_writes_the_report_that_is_signed_and_verified(dpicl: Shell, file: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    assert dpicl("show", file, "--report", report) == 0
    assert main(["report", "verify", str(report)]) == 0
    assert "dangling" not in report.read_text()  # what is open is the operator's
    assert dpicl("show", file, "--report", file.with_name("anchor.json")) == 2
    assert "--report: expected a file that is not there yet" in dpicl.err


def test_show_prints_markdown_with_the_operators_part_at_its_end(dpicl: Shell, file: Path) -> None:
    assert dpicl("show", file, "--markdown") == 0
    report, _, operator = dpicl.out.partition("## For the operator")
    assert report.startswith("# Privacy report of `budget`")
    assert "| `few-shot` | 1 | 2.5e-07 |" in report
    assert "Remaining: epsilon 2.5" in operator
    assert re.search(r"\| `3` \| `20[^`]+` \| `few-shot` \| `token` \| `null` \| `1` \|", operator)
    assert "open" not in report.lower()  # reservations are the operator's


def test_show_and_verify_write_nothing(dpicl: Shell, file: Path) -> None:
    places = [file, file.with_name("anchor.json")]
    spent = FileAnchor(places[1]).read(json.loads(file.with_name("receipts.json").read_text())[0]["ledger_id"])
    before = [path.read_bytes() for path in places]
    assert dpicl("show", file, "--anchor", places[1], "--json") == 0
    assert dpicl("verify", file, "--anchor", places[1]) == 0
    assert [path.read_bytes() for path in places] == before
    assert spent is not None
    assert spent[0] == 8


def test_show_draws_pictures(dpicl: Shell, file: Path, tmp_path: Path) -> None:
    bars, curve = tmp_path / "bars.png", tmp_path / "curve.svg"
    assert dpicl("show", file, "--plot", bars, "--curve", curve, "--deltas", "1e-8,1e-7,1e-6") == 0
    assert bars.read_bytes().startswith(b"\x89PNG")
    assert "<svg" in curve.read_text()
    assert dpicl("show", file, "--plot", tmp_path / "bars.doc") == 2
    assert ".png" in dpicl.err


@pytest.mark.parametrize("option", ["--html", "--plot", "--curve"])
def test_a_page_or_picture_takes_the_place_of_no_other_file(dpicl: Shell, file: Path, option: str) -> None:
    records = file.with_name("records")
    records.write_text("a record")
    places = [file, file.with_name("anchor.json"), file.with_name("receipts.json"), records]
    before = [place.read_bytes() for place in places]
    for place in places:
        assert dpicl("show", file, option, place) == 2
        assert f"expected a file that ends in {'.html' if option == '--html' else '.png'}" in dpicl.err
    assert [place.read_bytes() for place in places] == before


@pytest.mark.parametrize("deltas", ["", "much", "1e-6;1e-7", "0", "2", "1e-6,"])
def test_show_refuses_deltas_that_are_none(deltas: str, dpicl: Shell, file: Path) -> None:
    assert dpicl("show", file, "--deltas", deltas) == 2
    assert "delta" in dpicl.err


def test_show_refuses_a_ledger_that_went_back_behind_its_anchor(dpicl: Shell, file: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    assert dpicl("backup", file, copy) == 0
    spend_more(file)
    assert dpicl("show", file, "--anchor", file.with_name("anchor.json")) == 0
    assert dpicl("show", copy, "--anchor", file.with_name("anchor.json")) == 2
    assert "older copy" in dpicl.err
    assert dpicl("show", copy) == 0  # without an anchor nobody can tell


# --- verify -----------------------------------------------------------------------------------------------------------


def test_verify_recomputes_everything_and_says_what(dpicl: Shell, file: Path) -> None:
    options = ("--anchor", file.with_name("anchor.json"), "--receipt", file.with_name("receipts.json"))
    assert dpicl("verify", file, *options) == 0
    for words in (
        ": verified",
        "lines     8, last ",
        "shares    2, charged epsilon 1.5",
        "receipts: 2",
        "anchor: file",
    ):
        assert words in dpicl.out
    assert dpicl.err == ""
    assert dpicl("verify", file, *options, "--json") == 0
    data = json.loads(dpicl.out)
    assert (data["ok"], data["lines"], data["problems"]) == (True, 8, [])
    assert 0.65 < data["recomputed"]["epsilon"] < 0.7
    assert dpicl("verify", file) == 0
    assert "no anchor was given" in dpicl.out


def test_verify_ends_with_one_where_an_older_copy_took_the_ledgers_place(
    dpicl: Shell, file: Path, tmp_path: Path
) -> None:
    copy, anchor = tmp_path / "copy.db", file.with_name("anchor.json")
    assert dpicl("backup", file, copy) == 0
    assert dpicl("verify", copy, "--anchor", anchor) == 0
    spend_more(file)
    assert dpicl("verify", file, "--anchor", anchor) == 0
    assert dpicl("verify", copy, "--anchor", anchor) == 1
    assert "NOT verified" in dpicl.out
    assert dpicl.err.startswith("dpicl: not verified: anchor: ")
    assert "older copy" in dpicl.err
    assert dpicl("verify", copy, "--anchor", anchor, "--json") == 1
    assert json.loads(dpicl.out)["ok"] is False


def test_verify_ends_with_one_where_a_receipts_line_is_gone(dpicl: Shell, file: Path, tmp_path: Path) -> None:
    receipts = json.loads(file.with_name("receipts.json").read_text())
    receipts[1]["entry_hash"] = "f" * 64
    (tmp_path / "r.json").write_text(json.dumps(receipts))
    assert dpicl("verify", file, "--receipt", tmp_path / "r.json") == 1
    assert "receipt 2: expected line 7" in dpicl.err
    assert "receipt 1" not in dpicl.err


def damaged(change: Callable[[bytes], bytes]) -> Callable[[Path], Path]:
    def make(file: Path) -> Path:
        target = file.with_name("damaged.db")
        target.write_bytes(change(file.read_bytes()))
        return target

    return make


FAULTS: dict[str, Callable[[Path], Path]] = {
    "missing": lambda file: file.with_name("nothing.db"),
    "a folder": lambda file: file.parent,
    "empty": damaged(lambda _: b""),
    "text": damaged(lambda _: b"hello"),
    "half of it": damaged(lambda data: data[: len(data) // 2]),
    "a changed byte": damaged(lambda data: data.replace(b'"count":4', b'"count":3')),
    "binary": damaged(lambda _: bytes(range(256)) * 40),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_verify_ends_with_one_on_whatever_cannot_be_shown_to_be_whole(fault: str, dpicl: Shell, file: Path) -> None:
    target = FAULTS[fault](file)
    assert dpicl("verify", target) == 1
    assert dpicl.err.startswith("dpicl: not verified: ")
    assert dpicl("verify", target, "--json") == 1
    data = json.loads(dpicl.out)
    assert data["ok"] is False
    assert data["problems"]
    assert dpicl("show", target) == 2


def test_a_header_with_a_number_beyond_every_float_ends_with_one(dpicl: Shell, file: Path) -> None:
    with contextlib.closing(sqlite3.connect(file)) as database:
        (text,) = database.execute("SELECT header FROM ledgers").fetchone()
        forged_text = text.replace('"epsilon":4.0', '"epsilon":' + "9" * 400)
        assert forged_text != text
        digest = hashlib.sha256(forged_text.encode()).hexdigest()
        for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
            database.execute(f"DROP TRIGGER {name}")
        database.execute("UPDATE ledgers SET header = ?, digest = ?", (forged_text, digest))
        database.commit()
    assert dpicl("verify", file) == 1
    assert dpicl.err.startswith("dpicl: not verified: ")
    assert dpicl("show", file) == 2


def test_a_row_that_is_no_line_is_refused_in_words(dpicl: Shell, file: Path) -> None:
    clean = file.read_bytes()
    for body in (
        '{"x":NaN}',
        '{"x":Infinity}',
        '{"x":1e400}',
        '{"x":"\\ud800"}',
        "{",
        '{"x":' + "[" * 9999 + "]" * 9999 + "}",
    ):
        file.write_bytes(clean)
        with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as database:
            number, seq, head = database.execute("SELECT id, seq, head FROM ledgers").fetchone()
            values = (number, seq + 1, head, "commit", body, "s", "h" * 64)
            database.execute("INSERT INTO lines VALUES (?, ?, ?, ?, ?, ?, ?)", values)
            database.execute("UPDATE ledgers SET seq = ?, head = ?", (seq + 1, "h" * 64))
        for action, code in (("show", 2), ("export", 2), ("verify", 1)):
            assert dpicl(action, file) == code
            assert "found another row" in dpicl.err


def test_verify_ends_with_one_on_a_missing_anchor_or_receipt(dpicl: Shell, file: Path, tmp_path: Path) -> None:
    for option in ("--anchor", "--receipt"):
        assert dpicl("verify", file, option, tmp_path / "none") == 1
        assert "none" in dpicl.err
    (tmp_path / "r.json").write_text("hello")
    assert dpicl("verify", file, "--receipt", tmp_path / "r.json") == 1
    other = FileAnchor.new(tmp_path / "other.json")
    assert other.read("x") is None
    assert dpicl("verify", file, "--anchor", tmp_path / "other.json") == 1
    assert "never seen" in dpicl.err


# --- anchor -----------------------------------------------------------------------------------------------------------


def test_an_anchor_that_has_never_seen_a_ledger_is_added_on_purpose(dpicl: Shell, file: Path, tmp_path: Path) -> None:
    anchor, copy = tmp_path / "new.json", tmp_path / "copy.db"
    FileAnchor.new(anchor)
    assert dpicl("show", file, "--anchor", anchor) == 2
    assert "dpicl ledger anchor" in dpicl.err
    assert dpicl("verify", file, "--anchor", anchor) == 1
    assert "dpicl ledger anchor" in dpicl.err
    assert dpicl("backup", file, copy) == 0
    for _ in range(2):
        assert dpicl("anchor", file, "--anchor", anchor) == 0
        assert "remembers line 8" in dpicl.out
    assert dpicl("verify", file, "--anchor", anchor) == 0
    with open_store(file) as store:
        pool = Budget.open(store, anchor=FileAnchor(anchor)).gdp_pool("more", epsilon=0.25)
        pool.reserve(mu=pool.mu)
    assert dpicl("anchor", copy, "--anchor", anchor) == 2  # it knows better
    assert dpicl("verify", copy, "--anchor", anchor) == 1
    assert dpicl("verify", file, "--anchor", anchor) == 0


def test_an_anchor_is_made_for_a_sound_ledger_alone(dpicl: Shell, file: Path, tmp_path: Path) -> None:
    anchor, out = tmp_path / "new.json", tmp_path / "ledger.jsonl"
    assert dpicl("export", file, "--out", out) == 0
    for where in (tmp_path / "none.db", out, FAULTS["a changed byte"](file)):
        assert dpicl("anchor", where, "--anchor", anchor) == 2
        assert not anchor.exists()
    assert dpicl("anchor", file) == 2
    assert dpicl("anchor", file, "--anchor", anchor) == 0
    assert dpicl("show", file, "--anchor", anchor) == 0


# --- export -----------------------------------------------------------------------------------------------------------


def test_an_export_is_verified_and_shown_without_a_database(dpicl: Shell, file: Path, tmp_path: Path) -> None:
    out = tmp_path / "ledger.jsonl"
    assert dpicl("export", file, "--out", out) == 0
    assert "8 lines" in dpicl.out
    assert dpicl("export", file) == 0
    assert dpicl.out == out.read_text()
    file.unlink()
    options = ("--anchor", file.with_name("anchor.json"), "--receipt", file.with_name("receipts.json"))
    assert dpicl("verify", out, *options) == 0
    assert ": verified" in dpicl.out
    assert dpicl("show", out, "--name", "budget") == 0
    assert "remaining epsilon 2.5" in dpicl.out
    assert "    of few-shot: " in dpicl.out
    assert dpicl("show", out, "--name", "other") == 2
    assert dpicl("export", out) == 2
    assert dpicl("backup", out, tmp_path / "x") == 2
    assert "export" in dpicl.err


@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "utf-8"])
def test_what_a_program_reads_is_json_whatever_stdout_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    named = ("Prüfung", "\N{FIRE}")
    with SQLiteStore.new(path := tmp_path / "budget.db") as store:
        budget = Budget(epsilon=4.0, delta=1e-6, store=store, name=named[0])
        pool = budget.gdp_pool(named[1], epsilon=0.25)
        pool.reserve(mu=pool.mu)
    for action in (["export"], ["show", "--json"], ["dangling", "--json"]):
        written = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
        assert main(["ledger", action[0], str(path), *action[1:]]) == 0
        sys.stdout.flush()
        text = written.getvalue().decode("utf-8")
        data = [json.loads(line) for line in (text.splitlines() if action == ["export"] else [text])]
        assert named[1] in json.dumps(data, ensure_ascii=False)
        if action == ["export"]:
            (tmp_path / "export.jsonl").write_text(text)
    assert main(["ledger", "verify", str(tmp_path / "export.jsonl")]) == 0


def test_an_export_never_replaces_a_file(dpicl: Shell, file: Path, tmp_path: Path) -> None:
    out = tmp_path / "mine.txt"
    out.write_text("mine")
    assert dpicl("export", file, "--out", out) == 2
    assert out.read_text() == "mine"
    assert dpicl("export", file, "--out", tmp_path / "no" / "x") == 2


def cheaper(lines: list[dict[str, Any]]) -> None:
    seal = body_of(lines, "seal")
    seal["epsilon"] = seal["pricing"]["epsilon"] = seal["components"][0]["epsilon"] = 0.01


def opinions_of_another_kind(lines: list[dict[str, Any]]) -> None:
    body_of(lines, "seal")["pricing"]["opinions"] = "all agree"


def no_unit(lines: list[dict[str, Any]]) -> None:
    del body_of(lines, "bind")["unit"]


def test_a_forged_export_ends_with_one(dpicl: Shell, file: Path, tmp_path: Path) -> None:
    out = tmp_path / "ledger.jsonl"
    assert dpicl("export", file, "--out", out) == 0
    assert dpicl("verify", forged(out, tmp_path / "x", cheaper)) == 1
    assert "cost up to" in dpicl.err
    assert dpicl("verify", forged(out, tmp_path / "x", cheaper, refit=False)) == 1
    assert "does not follow" in dpicl.err


@pytest.mark.parametrize("change", [opinions_of_another_kind, no_unit])
def test_entries_of_another_form_are_refused_and_not_shown(
    change: Callable[[list[dict[str, Any]]], None], dpicl: Shell, file: Path, tmp_path: Path
) -> None:
    assert dpicl("export", file, "--out", tmp_path / "ledger.jsonl") == 0
    assert dpicl("show", forged(tmp_path / "ledger.jsonl", tmp_path / "x", change), "--markdown") == 2
    assert "cannot be shown" in dpicl.err


# --- backup -----------------------------------------------------------------------------------------------------------


def test_a_backup_is_a_ledger_of_its_own_and_never_replaces_a_file(dpicl: Shell, file: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    assert dpicl("backup", file, copy) == 0
    assert "Never restore it" in dpicl.out
    with open_store(file) as old, open_store(copy) as new:
        assert old.header() == new.header()
        assert list(old.records()) == list(new.records())
    before = copy.read_bytes()
    assert dpicl("backup", file, copy) == 2
    assert copy.read_bytes() == before
    assert dpicl("backup", file) == 2


# --- addresses --------------------------------------------------------------------------------------------------------

COMMANDS: list[tuple[str, ...]] = [
    ("show", ADDRESS),
    ("show", ADDRESS, "--name", "x"),
    ("show", "b.db", ADDRESS),
    ("show", "b.db", "--anchor", ADDRESS),
    ("show", ADDRESS.replace("postgresql", "mysql")),
    ("show", ADDRESS.upper().replace(SECRET.upper(), SECRET)),
    ("show", f"postgresql://user:pass word{SECRET}@127.0.0.1:1/db", "more"),
    ("show", f"host=127.0.0.1 port=1 password={SECRET}"),
    ("show", f"host=127.0.0.1 port=1 password = '{SECRET}'"),
    ("verify", ADDRESS),
    ("verify", ADDRESS, "--json"),
    ("verify", "b.db", "--receipt", ADDRESS),
    ("verify", "b.db", "--receipt", ADDRESS, "--json"),
    ("export", ADDRESS),
    ("export", "b.db", "--out", ADDRESS),
    ("backup", ADDRESS, "x.db"),
    ("backup", "b.db", ADDRESS),
    ("create", ADDRESS, "--epsilon", "1", "--delta", "1e-6"),
    ("create", "x.db", "--epsilon", ADDRESS, "--delta", "1e-6"),
    ("create", "x.db", "--epsilon", "1", "--delta", "1e-6", "--anchor", ADDRESS),
    (ADDRESS,),
    ("show", "--format", ADDRESS),
]


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda a: " ".join(re.sub(r"[^a-z]+", " ", w)[:12] for w in a))
def test_no_address_and_no_password_is_ever_printed(
    arguments: tuple[str, ...], dpicl: Shell, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(file.parent)
    file.rename("b.db")
    assert dpicl(*arguments) in {1, 2}
    assert dpicl.err
    assert SECRET not in dpicl.out + dpicl.err


SPELLINGS = (
    f"host=h password={SECRET}",
    f"dbname=d host=h user={SECRET}",
    f"postgresql+psycopg://u:{SECRET}@h/d",
    f"POSTGRESQL://u:{SECRET}@h/d",
    f" postgresql://u:{SECRET}@h/d",
    f"postgresql:/u:{SECRET}@h/d",
)


def test_an_address_of_another_spelling_is_neither_taken_nor_printed(
    dpicl: Shell, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(file.parent)
    before = sorted(file.parent.iterdir())
    limits = ("--epsilon", 1, "--delta", 1e-6)
    for spelling in SPELLINGS:
        for arguments in (
            ("show", spelling),
            ("show", file, "--plot", spelling),
            ("verify", file, "--json", "--anchor", spelling),
            ("verify", file, "--receipt", spelling),
            ("export", file, "--out", spelling),
            ("backup", file, spelling),
            ("create", spelling, *limits),
            ("create", "x.db", *limits, "--anchor", spelling),
        ):
            assert dpicl(*arguments) in {1, 2}
            assert "address" in dpicl.out + dpicl.err
            assert SECRET not in dpicl.out + dpicl.err
    assert sorted(file.parent.iterdir()) == before


def test_an_address_is_no_file(dpicl: Shell, file: Path) -> None:
    for arguments in (
        ("export", file, "--out", ADDRESS),
        ("backup", file, ADDRESS),
        ("verify", file, "--receipt", ADDRESS),
    ):
        assert dpicl(*arguments) == 2
        assert "expected a file, found an address" in dpicl.err


def test_an_address_is_hidden_in_every_spelling() -> None:
    for text in (
        f"no such file: {ADDRESS!r}",
        f"cannot reach {ADDRESS}, really",
        f"POSTGRES://u:{SECRET}@h",
        f"host=h password={SECRET} x=1",
        f"password = '{SECRET} x'",
    ):
        assert SECRET not in redact(text)
    assert redact("expected a postgresql:// address") == "expected a postgresql:// address"
    strange = f"postgresql://u:a {SECRET}'\"@h"
    assert SECRET not in redact(f"found {strange!r} or {strange}", [strange])
    assert redact("passwords.db: missing", ["passwords.db"]) == "passwords.db: missing"


# --- the process that holds the ledger -------------------------------------------------------------------------------

TRY_TO_LOCK = """
import fcntl, os, sys
number = os.open(sys.argv[1], os.O_RDWR)
try:
    fcntl.lockf(number, fcntl.LOCK_EX | fcntl.LOCK_NB, 510, 0x40000000 + 2)
except BlockingIOError:
    print("held")
else:
    print("free")
"""


@pytest.mark.skipif(os.name != "posix", reason="elsewhere a closed file drops no lock")
@pytest.mark.parametrize(
    "arguments",
    [
        ("verify", "{file}"),
        ("show", "{file}"),
        ("export", "{file}"),
        ("backup", "{file}", "{file}.copy"),
        ("show", "{file}", "--name", "other"),
        ("verify", "{file}", "--anchor", "{file}.none"),
        ("create", "{file}", "--epsilon", "4", "--delta", "1e-6"),
    ],
    ids=lambda a: "-".join(word for word in a if "{" not in word),
)
def test_no_command_drops_the_locks_of_a_ledger_that_this_process_holds(
    arguments: tuple[str, ...], dpicl: Shell, file: Path
) -> None:
    def state() -> str:
        command = [sys.executable, "-c", TRY_TO_LOCK, str(file)]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.strip()

    with open_store(file) as store:
        store.header()
        assert state() == "held"
        dpicl(*(word.format(file=file) for word in arguments))
        assert state() == "held"
        os.close(os.open(file, os.O_RDONLY))  # what the commands do not do
        assert state() == "free"


# --- the command itself -----------------------------------------------------------------------------------------------


def test_ledger_needs_an_action_and_explains_itself(dpicl: Shell) -> None:
    assert dpicl() == 2
    assert "ACTION" in dpicl.err
    assert dpicl("--help") == 0
    for name in ("create", "show", "verify", "export", "anchor", "backup", "PGPASSWORD"):
        assert name in dpicl.out
    assert dpicl("verify", "--help") == 0
    assert "--receipt" in dpicl.out
