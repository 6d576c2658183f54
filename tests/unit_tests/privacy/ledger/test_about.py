"""What the owners of a ledger declare of it: kept in its first line, shown, never changed, never checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from langchain_dpicl import PrivacyBudgetCallbackHandler, verify_report
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.cli.main import main
from langchain_dpicl.exceptions import ConfigurationError, LedgerError, PrivacyBudgetMismatchError
from langchain_dpicl.privacy.extensions.ledger_anchor import LedgerAbout
from langchain_dpicl.privacy.ledger.store import InMemoryStore, LedgerHeader
from langchain_dpicl.reports.claims import report_digest
from langchain_dpicl.stores import SQLiteStore

ABOUT = {
    "purpose": "examples for the support assistant",
    "owner": "A. Owner, support",
    "approver": "B. Officer, 2026-11-28",
    "retention": "messages 24 months, ledger 5 years",
    "countries": {"llm.bank.example": "Germany", "127.0.0.1:8000": "this machine"},
}
LINES = (*[str(ABOUT[name]) for name in ("purpose", "owner", "approver", "retention")], "llm.bank.example: Germany")


def header(**members: Any) -> LedgerHeader:
    return LedgerHeader("f0" * 16, "x", 4.0, 1e-6, "add_remove", "2026-01-02T03:04:05+00:00", **members)


def test_a_ledger_keeps_what_was_declared_when_it_was_made(tmp_path: Path) -> None:
    made = PrivacyBudgetCallbackHandler.create(tmp_path / "budget.db", epsilon=4.0, delta=1e-6, about=ABOUT)
    assert made.budget.about == ABOUT
    made.budget.close()
    opened = PrivacyBudgetCallbackHandler.open(tmp_path / "budget.db")
    assert opened.budget.about == ABOUT
    assert opened.report().to_dict()["ledger"]["about"] == ABOUT
    opened.budget.verify()
    opened.budget.close()


def test_reports_show_it_in_every_form_and_verify(tmp_path: Path) -> None:
    report = Budget(epsilon=4.0, delta=1e-6, about=ABOUT).report()
    for form in (report.to_text(), report.to_markdown()):
        for line in LINES:
            assert line in form
    page = report.to_html()
    for name in ("purpose", "owner", "approver", "retention"):
        assert ABOUT[name] in page
    assert "llm.bank.example (Germany)" in page
    assert verify_report(report).ok
    edited = json.loads(report.to_json())
    edited["ledger"]["about"]["purpose"] = "advertising"
    assert verify_report(edited).problems == ("digest: the report was changed after it was made",)


def test_without_a_declaration_header_and_report_are_those_of_earlier_versions() -> None:
    assert set(header().to_dict()) == {
        "ledger_id", "name", "epsilon", "delta", "adjacency", "stamp", "ledger_format",
    }  # fmt: skip
    budget = Budget(epsilon=4.0, delta=1e-6, about={})
    assert budget.about == {}
    assert "about" not in budget.report().to_dict()["ledger"]
    assert "purpose" not in budget.report().to_text()
    assert "purpose" not in budget.report().to_markdown()
    assert "Not declared: purpose, owner, approved by, kept for." in budget.report().to_html()


def test_what_is_declared_changes_the_first_link_of_the_chain() -> None:
    plain, declared = header(), header(about=LedgerAbout.parse(ABOUT))
    other = header(about=LedgerAbout.parse({**ABOUT, "owner": "C"}))
    assert len({plain.digest, declared.digest, other.digest}) == 3


TEXT = st.text(st.characters(categories=["L", "N", "P"]), min_size=1, max_size=500)


@given(
    texts=st.dictionaries(st.sampled_from(["purpose", "owner", "approver", "retention"]), TEXT),
    countries=st.dictionaries(TEXT.filter(lambda text: len(text) <= 200), TEXT, max_size=3),
)
def test_a_header_is_read_as_it_was_written(texts: dict[str, str], countries: dict[str, str]) -> None:
    about = {**texts, **({"countries": countries} if countries else {})}
    made = header(about=LedgerAbout.parse(about))
    read = LedgerHeader.from_dict(json.loads(json.dumps(made.to_dict())))
    assert read == made
    assert read.digest == made.digest
    assert ({} if read.about is None else read.about.to_dict()) == about


@pytest.mark.parametrize(
    "about",
    [
        {"reason": "x"},
        {"purpose": ""},
        {"approver": "  "},
        {"countries": {f"host{number}": "Germany" for number in range(101)}},
        {"purpose": "a\nb"},
        {"purpose": "x" * 501},
        {"purpose": 3},
        {"countries": "Germany"},
        {"countries": {"": "Germany"}},
        {"countries": {"host": ""}},
        {"countries": {"host": None}},
        {1: "x"},
        "support",
        [("purpose", "x")],
    ],
)
def test_anything_else_is_refused_before_a_ledger_is_made(about: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"^about"):
        PrivacyBudgetCallbackHandler.create(tmp_path / "budget.db", epsilon=4.0, delta=1e-6, about=about)
    assert list(tmp_path.iterdir()) == []


def test_a_text_that_is_refused_is_not_quoted() -> None:
    with pytest.raises(ConfigurationError) as refused:
        Budget(epsilon=4.0, delta=1e-6, about={"purpose": "Ann Example\nis ill"})
    assert "Ann" not in str(refused.value)


EMPTY = {"purpose": "x", "countries": {}}


@pytest.mark.parametrize(
    "member", [{"about": None}, {"about": {}}, {"about": {"x": "y"}}, {"about": "x"}, {"about": EMPTY}]
)
def test_a_header_with_a_broken_declaration_is_refused(member: dict[str, Any]) -> None:
    with pytest.raises(LedgerError, match="header is broken"):
        LedgerHeader.from_dict({**header().to_dict(), **member})


def test_a_ledger_is_opened_with_its_own_declaration_or_with_none() -> None:
    store = InMemoryStore()
    Budget(epsilon=4.0, delta=1e-6, store=store, about=ABOUT)
    assert Budget(epsilon=4.0, delta=1e-6, store=store).about == ABOUT
    assert Budget(epsilon=4.0, delta=1e-6, store=store, about=ABOUT).about == ABOUT
    assert Budget.open(store).about == ABOUT
    for other in ({}, {**ABOUT, "owner": "C"}):
        with pytest.raises(PrivacyBudgetMismatchError, match="about"):
            Budget(epsilon=4.0, delta=1e-6, store=store, about=other)


def test_the_command_declares_and_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = str(tmp_path / "budget.db")
    words = [f"--{name}={ABOUT[name]}" for name in ("purpose", "owner", "approver", "retention")]
    words += [f"--country={host}={country}" for host, country in ABOUT["countries"].items()]  # type: ignore[attr-defined]
    assert main(["ledger", "create", ledger, "--epsilon=4", "--delta=1e-6", *words]) == 0
    assert "purpose   examples for the support assistant" in capsys.readouterr().out
    header = SQLiteStore(tmp_path / "budget.db").header()
    assert header is not None
    assert header.about == LedgerAbout.parse(ABOUT)
    for form in ("--json", "--markdown", f"--html={tmp_path / 'page.html'}"):
        assert main(["ledger", "show", ledger, form]) == 0
        assert ABOUT["approver"] in capsys.readouterr().out
    assert "Germany" in (tmp_path / "page.html").read_text(encoding="ascii")
    out = tmp_path / "ledger.jsonl"
    assert main(["ledger", "export", ledger, "--out", str(out)]) == 0
    assert main(["ledger", "verify", str(out)]) == 0


@pytest.mark.parametrize("words", [["--country=x"], ["--country==x"], ["--country=a=b", "--country=a=c"]])
def test_the_command_refuses_a_country_without_its_host(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ledger", "create", str(tmp_path / "budget.db"), "--epsilon=4", "--delta=1e-6", *words]) == 2
    assert "HOST=COUNTRY" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("about", [{"x": "y"}, {"purpose": ""}, "support", None, {}, EMPTY])
def test_a_report_with_another_declaration_does_not_verify(about: Any) -> None:
    data = Budget(epsilon=4.0, delta=1e-6, about=ABOUT).report().to_dict()
    data["ledger"]["about"] = about
    data["digest"] = report_digest({name: value for name, value in data.items() if name != "digest"})
    [problem] = verify_report(data).problems
    assert "cannot be read" in problem
