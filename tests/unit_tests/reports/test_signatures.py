"""Signatures of reports and releases: what they cover, and what they do not."""

from __future__ import annotations

import base64
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization as forms
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from langchain_dpicl import Budget, PrivateExamples
from langchain_dpicl.cli.main import main
from langchain_dpicl.discovery import UnitCounter
from langchain_dpicl.exceptions import ConfigurationError, LedgerError
from langchain_dpicl.privacy.ledger.store import InMemoryStore
from langchain_dpicl.reports.ledger_audit import ExportedLedger
from langchain_dpicl.reports.signatures import Signature, problems_of, read_signed, sign_file
from langchain_dpicl.stores import SQLiteStore

NO_PASSWORD = forms.NoEncryption()


def key_pair(folder: Path, name: str = "key", *, form: str = "pem", password: bytes = b"") -> tuple[Path, Path]:
    made = Ed25519PrivateKey.generate()
    lock: Any = forms.BestAvailableEncryption(password) if password else NO_PASSWORD
    kind = forms.PrivateFormat.OpenSSH if form == "ssh" else forms.PrivateFormat.PKCS8
    private, public = folder / name, folder / f"{name}.pub"
    private.write_bytes(made.private_bytes(forms.Encoding.PEM, kind, lock))
    shown = (
        made.public_key().public_bytes(forms.Encoding.OpenSSH, forms.PublicFormat.OpenSSH)
        if form == "ssh"
        else made.public_key().public_bytes(forms.Encoding.PEM, forms.PublicFormat.SubjectPublicKeyInfo)
    )
    public.write_bytes(shown)
    return private, public


@pytest.fixture
def ledger(tmp_path: Path) -> SQLiteStore:
    return SQLiteStore.new(tmp_path / "budget.db")


@pytest.fixture
def report(tmp_path: Path, ledger: SQLiteStore) -> Path:
    budget = Budget(epsilon=2.0, delta=1e-6, store=ledger)
    private = PrivateExamples(["a", "b"], public_size=1000)
    UnitCounter.from_private_examples(private, budget=budget, epsilon=1.0).run()
    path = tmp_path / "report.json"
    path.write_text(budget.report().to_json(), encoding="utf-8")
    budget.report().save_html(tmp_path / "report.html")
    return path


@pytest.mark.parametrize("form", ["pem", "ssh"])
def test_a_signature_fits_its_file_key_and_ledger(form: str, tmp_path: Path, report: Path, ledger: SQLiteStore) -> None:
    private, public = key_pair(tmp_path, form=form)
    made = sign_file(report, key=private, ledger=ledger, signer="Ann Officer")
    read = Signature.from_json(made.to_json())
    assert read == made
    assert (read.signer, read.ledger) == ("Ann Officer", {"ledger_id": _id(ledger), **_head(ledger)})
    assert list(problems_of(read_signed(report), read, public_key=public, ledger=ledger)) == []


def _id(ledger: SQLiteStore) -> str:
    header = ledger.header()
    assert header is not None
    return header.ledger_id


def _head(ledger: SQLiteStore) -> dict[str, Any]:
    line, digest = ledger.head()
    return {"line": line, "hash": digest}


CHANGES: dict[str, dict[str, Any]] = {
    "signer": {"signer": "Eve"},
    "sha256": {"sha256": "0" * 64},
    "ledger": {"ledger": None},
    "line": {"ledger": {"ledger_id": "x", "line": 1, "hash": "y"}},
    "value": {"value": "AAAA"},
    "no base64": {"value": "***"},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_statement_is_found(change: dict[str, Any], tmp_path: Path, report: Path, ledger: Any) -> None:
    private, public = key_pair(tmp_path)
    made = dataclasses.replace(sign_file(report, key=private, ledger=ledger), **change)
    found = list(problems_of(read_signed(report), made, public_key=public))
    assert any("does not fit this key" in problem for problem in found)


def test_a_changed_file_and_another_key_are_found(tmp_path: Path, report: Path) -> None:
    private, public = key_pair(tmp_path)
    _, other = key_pair(tmp_path, "other")
    made = sign_file(report, key=private)
    assert any("another key" in problem for problem in problems_of(read_signed(report), made, public_key=other))
    report.write_bytes(report.read_bytes() + b" ")
    found = list(problems_of(read_signed(report), made, public_key=public))
    assert found == ["file: it was changed after it was signed"]


def test_a_signature_by_another_key_that_names_the_trusted_one_does_not_fit(tmp_path: Path, report: Path) -> None:
    _, public = key_pair(tmp_path)
    forger, _ = key_pair(tmp_path, "forger")
    trusted = forms.load_pem_public_key(public.read_bytes())
    raw = trusted.public_bytes(forms.Encoding.Raw, forms.PublicFormat.Raw)

    made = dataclasses.replace(sign_file(report, key=forger), public_key=base64.b64encode(raw).decode())
    assert any("does not fit" in problem for problem in problems_of(read_signed(report), made, public_key=public))


def test_a_ledger_that_was_set_back_is_found(tmp_path: Path, report: Path, ledger: SQLiteStore) -> None:
    private, public = key_pair(tmp_path)
    early = sign_file(report, key=private, ledger=ledger)
    share = Budget.open(ledger).declare("more", tickets=_ticket(), epsilon=0.5)
    share.reserve("t").burn()
    late = sign_file(report, key=private, ledger=ledger)
    assert late.ledger is not None
    assert early.ledger is not None
    assert late.ledger["line"] > early.ledger["line"]
    assert list(problems_of(read_signed(report), early, public_key=public, ledger=ledger)) == []  # the ledger went on
    gone = dataclasses.replace(late, ledger={**late.ledger, "line": late.ledger["line"] + 5})
    assert any(
        "set back" in problem for problem in problems_of(read_signed(report), gone, public_key=public, ledger=ledger)
    )
    other = InMemoryStore()
    Budget(epsilon=2.0, delta=1e-6, store=other)
    assert any(
        "another one" in problem for problem in problems_of(read_signed(report), late, public_key=public, ledger=other)
    )
    alone = sign_file(report, key=private)
    assert any(
        "names none" in problem for problem in problems_of(read_signed(report), alone, public_key=public, ledger=ledger)
    )


def _ticket() -> Any:
    from langchain_dpicl.privacy.accounting.events import PureEvent
    from langchain_dpicl.privacy.ledger.tickets import Ticket

    return (Ticket("t", PureEvent(0.1)),)


def test_a_new_ledger_is_named_by_its_header(tmp_path: Path) -> None:
    private, public = key_pair(tmp_path)
    fresh, report = InMemoryStore(), tmp_path / "new.json"
    report.write_text(Budget(epsilon=1.0, delta=1e-6, store=fresh).report().to_json(), encoding="utf-8")
    made = sign_file(report, key=private, ledger=fresh)
    assert made.ledger is not None
    assert made.ledger["line"] == 0
    assert list(problems_of(read_signed(report), made, public_key=public, ledger=fresh)) == []


@pytest.mark.parametrize("content", [b"", b"CANARY-KEY-5", b"-----BEGIN " + b"PRIVATE KEY-----\nCANARY-KEY-5\n"])
def test_what_is_no_key_is_refused_without_a_word_of_it(content: bytes, tmp_path: Path, report: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_bytes(content)
    with pytest.raises(ConfigurationError, match="Ed25519 private key") as caught:
        sign_file(report, key=wrong)
    assert "CANARY" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("key", [None, 5, "a\0b", "\ud800"])
def test_what_is_no_path_of_a_key_is_refused(key: Any, report: Path) -> None:
    with pytest.raises(ConfigurationError, match="path: expected the path of a file, found"):
        sign_file(report, key=key)


def test_keys_of_other_kinds_and_with_passwords_are_refused(tmp_path: Path, report: Path) -> None:
    locked, _ = key_pair(tmp_path, "locked", password=b"secret")
    with pytest.raises(ConfigurationError, match="without a password"):
        sign_file(report, key=locked)
    other = tmp_path / "x25519"
    other.write_bytes(
        X25519PrivateKey.generate().private_bytes(forms.Encoding.PEM, forms.PrivateFormat.PKCS8, NO_PASSWORD)
    )
    with pytest.raises(ConfigurationError, match="Ed25519"):
        sign_file(report, key=other)
    with pytest.raises(ConfigurationError, match="public key"):
        list(problems_of(read_signed(report), sign_file(report, key=key_pair(tmp_path)[0]), public_key=other))


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", "null", '{"format": "langchain-dpicl/signature", "version": 2}', "[" * 100_000, b"\xff"],
)
def test_what_is_no_signature_is_refused(text: str | bytes) -> None:
    with pytest.raises(ConfigurationError, match="signature"):
        Signature.from_json(text)


@pytest.mark.parametrize(
    "change",
    [
        {"ledger": {}},
        {"ledger": {"ledger_id": "a", "line": -1, "hash": "b"}},
        {"signer": 7},
        {"more": 1},
        {"ledger": 5},
    ],
)
def test_a_signature_with_other_members_is_refused(change: dict[str, Any], tmp_path: Path, report: Path) -> None:
    data = json.loads(sign_file(report, key=key_pair(tmp_path)[0]).to_json())
    with pytest.raises(ConfigurationError, match="signature"):
        Signature.from_json(json.dumps({**data, **change}))


def test_the_commands_sign_and_verify(tmp_path: Path, report: Path, capsys: pytest.CaptureFixture[str]) -> None:
    private, public = key_pair(tmp_path, form="ssh")
    ledger = ["--ledger", str(tmp_path / "budget.db")]
    assert main(["report", "sign", str(report), "--key", str(private), "--signer", "Ann", *ledger]) == 0
    assert "report.json.signature.json, with line" in capsys.readouterr().out
    assert main(["report", "verify", str(report), "--key", str(public), *ledger]) == 0
    shown = capsys.readouterr().out
    assert "report.json: verified" in shown
    assert "epsilon 1, " in shown
    assert "that of the given key" in shown
    report.write_text(report.read_text(encoding="utf-8").replace('"promised"', '"promised" '), encoding="utf-8")
    assert main(["report", "verify", str(report), "--key", str(public)]) == 1
    assert "changed after it was signed" in capsys.readouterr().err
    assert main(["report", "sign", str(report), "--key", str(private)]) != 0  # never over another signature


def test_the_command_verifies_without_a_key_and_says_so(
    tmp_path: Path, report: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", "verify", str(report)]) == 0
    assert "not verified: no --key was given" in capsys.readouterr().out
    cheaper = json.loads(report.read_text(encoding="utf-8"))
    cheaper["shares"][0]["epsilon"] = 0.1
    report.write_text(json.dumps(cheaper), encoding="utf-8")
    assert main(["report", "verify", str(report)]) == 1
    assert main(["report", "verify", str(report), "--ledger", str(tmp_path / "budget.db")]) == 2
    assert "--key" in capsys.readouterr().err


def test_what_would_not_be_read_again_is_not_signed(
    tmp_path: Path, report: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `dpicl ledger show --json` prints it: the report beside what is left and open, which nothing vouches for."""
    private, _ = key_pair(tmp_path)
    report.write_text(json.dumps({"report": json.loads(report.read_text()), "remaining": {"epsilon": 9.0}}))
    assert main(["report", "sign", str(report), "--key", str(private)]) == 2
    assert "`dpicl ledger show --report`" in capsys.readouterr().err
    assert not report.with_name("report.json.signature.json").exists()


def test_a_report_that_was_edited_is_not_signed(
    tmp_path: Path, report: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    private, _ = key_pair(tmp_path)
    shown = json.loads(report.read_text())
    shown["promised"]["epsilon"] /= 2
    report.write_text(json.dumps(shown))
    assert main(["report", "sign", str(report), "--key", str(private)]) == 2
    assert "A signature of this file would not verify" in capsys.readouterr().err
    assert not report.with_name("report.json.signature.json").exists()


def test_a_page_is_signed_too(tmp_path: Path, report: Path, capsys: pytest.CaptureFixture[str]) -> None:
    private, public = key_pair(tmp_path)
    page = report.with_suffix(".html")
    assert main(["report", "sign", str(page), "--key", str(private)]) == 0
    assert main(["report", "verify", str(page), "--key", str(public)]) == 0
    assert "this is a page" in capsys.readouterr().out


def test_a_file_is_signed_with_its_own_ledger_only(tmp_path: Path, report: Path, ledger: SQLiteStore) -> None:
    private, public = key_pair(tmp_path)
    other, again = InMemoryStore(), Budget(epsilon=2.0, delta=1e-6, store=InMemoryStore())
    Budget(epsilon=2.0, delta=1e-6, store=other)
    records = PrivateExamples(["a", "b"], public_size=1000)
    release = tmp_path / "counts.json"
    UnitCounter.from_private_examples(records, budget=again, epsilon=1.0).run().save(release)
    for path in (report, report.with_suffix(".html"), release):
        with pytest.raises(ConfigurationError, match="which the file names"):
            sign_file(path, key=private, ledger=other)
    made = sign_file(report, key=private, ledger=ledger)
    forged = dataclasses.replace(made, ledger={"ledger_id": "x", "line": 1, "hash": "y"})
    found = list(problems_of(read_signed(report), forged, public_key=public))
    assert "ledger: the file names another one than its signature" in found
    assert sign_file(private.with_suffix(".pub"), key=private, ledger=other).ledger is not None  # it names none


def test_a_ledger_that_was_rewritten_around_the_signed_line_is_found(
    tmp_path: Path, report: Path, ledger: SQLiteStore
) -> None:
    private, public = key_pair(tmp_path)
    made = sign_file(report, key=private, ledger=ledger)
    header = ledger.header()
    assert header is not None
    first, *rest = ledger.records()
    rewritten = ExportedLedger(header, (dataclasses.replace(first, kind="note"), *rest), "a copy")
    found = list(problems_of(read_signed(report), made, public_key=public, ledger=rewritten))
    assert [problem[:20] for problem in found] == ["ledger: it is broken"]
    with pytest.raises(LedgerError):
        sign_file(report, key=private, ledger=rewritten)
    beyond = dataclasses.replace(made, ledger={"ledger_id": header.ledger_id, "line": 2**70, "hash": "y"})
    assert any(
        "set back" in text for text in problems_of(read_signed(report), beyond, public_key=public, ledger=ledger)
    )


def test_without_cryptography_signing_and_verifying_say_what_to_install(
    tmp_path: Path, report: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private, public = key_pair(tmp_path)
    made = sign_file(report, key=private)
    for name in [name for name in sys.modules if name.partition(".")[0] == "cryptography"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigurationError, match=r"langchain-dpicl\[sign\]"):
        sign_file(report, key=private)
    with pytest.raises(ConfigurationError, match=r"langchain-dpicl\[sign\]"):
        list(problems_of(read_signed(report), made, public_key=public))


def test_a_key_given_in_place_of_its_path_is_not_quoted(tmp_path: Path, report: Path) -> None:
    class Named:
        """A path that shows a name of its own."""

        def __fspath__(self) -> str:
            return text

        def __str__(self) -> str:
            return "key"

    text = key_pair(tmp_path)[0].read_text(encoding="ascii")
    for key in (text, bytearray(text, "ascii"), Named()):
        with pytest.raises(ConfigurationError, match="the path of the file of a key") as caught:
            sign_file(report, key=key)
        assert text.split()[3] not in str(caught.value)


def test_a_page_is_not_verified_without_a_key(tmp_path: Path, report: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for page in (report.with_suffix(".html"), tmp_path / "missing.html"):
        assert main(["report", "verify", str(page)]) == 2
        assert "of a page nothing else is verified" in capsys.readouterr().err


def test_the_command_shows_who_signed_and_the_ledger_that_was_not_compared(
    tmp_path: Path, report: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    private, public = key_pair(tmp_path)
    ledger = ["--ledger", str(tmp_path / "budget.db")]
    assert main(["report", "sign", str(report), "--key", str(private), "--signer", "Ann", *ledger]) == 0
    verify = ["report", "verify", str(report), "--key", str(public)]
    assert main(verify) == 0
    shown = capsys.readouterr().out
    assert "signer Ann" in shown
    assert "not compared: no --ledger was given" in shown
    assert main([*verify, *ledger]) == 0
    assert "is still there" in capsys.readouterr().out
    signature = tmp_path / "report.json.signature.json"
    data = json.loads(signature.read_text(encoding="utf-8"))
    signature.write_text(json.dumps({**data, "signer": "A\x1b[31m"}), encoding="utf-8")
    assert main(verify) == 2  # what a terminal would obey is no signature
