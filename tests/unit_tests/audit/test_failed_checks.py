"""A check that ends with an exception: it is shown, by the class alone, the others are played, and the audit fails."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from langchain_dpicl.audit import (
    AuditReport,
    AuditResult,
    PrivacyAuditError,
    assert_private,
    audit,
    component_checks,
    suite,
)
from langchain_dpicl.audit.game import Verdict
from langchain_dpicl.audit.targets import voter_of
from langchain_dpicl.cli.main import main
from langchain_dpicl.exceptions import LedgerUnavailableError
from langchain_dpicl.runs.query_plan import plan_queries

SECRET = "postgresql://user:hunter2@host"  # pragma: allowlist secret


class ForeignError(Exception):
    """What a driver, an engine or a numerical library may raise: no error of ours."""


def sound(name: str) -> suite.AuditCheck:
    return suite.AuditCheck(name, lambda: AuditResult(check=name, verdict="sound"))


def raising(name: str, error: BaseException) -> suite.AuditCheck:
    def play() -> AuditResult:
        raise error

    return suite.AuditCheck(name, play)


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[suite.AuditCheck]:
    """What the audit is made of; put checks in."""
    made: list[suite.AuditCheck] = []
    monkeypatch.setattr(suite, "_checks", lambda subject, *, controls: iter(made))
    return made


@pytest.mark.parametrize("error", [ForeignError(SECRET), LedgerUnavailableError(SECRET), MemoryError(SECRET)], ids=type)
def test_what_one_check_raises_is_its_result_and_the_others_are_played(
    error: Exception, checks: list[suite.AuditCheck]
) -> None:
    checks += [sound("before"), raising("in the middle", error), sound("behind")]
    seen: list[AuditResult] = []
    report = audit(voter_of((), max_queries=3), progress=seen.append)
    assert [(result.check, result.verdict) for result in seen] == [
        ("before", "sound"),
        ("in the middle", "failed"),
        ("behind", "sound"),
    ]
    assert list(report.results) == seen
    assert (report.verdict, report.ok, report.violations()) == ("failed", False, ())
    told = str(report) + report.to_json() + repr(report)
    assert f"it raised {type(error).__name__}" in told
    assert "(3 checks, 0 skipped, 1 not finished" in told
    assert "hunter2" not in told


def test_a_failed_check_fails_an_assertion_whatever_may_be_undecided(checks: list[suite.AuditCheck]) -> None:
    checks += [sound("before"), raising("in the middle", ForeignError(SECRET))]
    with pytest.raises(PrivacyAuditError, match="it raised ForeignError") as caught:
        assert_private(voter_of((), max_queries=3), allow_undecided=True)
    assert "hunter2" not in str(caught.value)
    assert caught.value.report.results[0].verdict == "sound"
    assert caught.value.__cause__ is caught.value.__context__ is None


def test_where_the_next_check_cannot_be_made_nobody_takes_the_audit_for_finished(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(subject: Any, *, controls: bool) -> Iterator[suite.AuditCheck]:
        yield sound("before")
        raise ForeignError(SECRET)

    monkeypatch.setattr(suite, "_checks", broken)
    report = audit(voter_of((), max_queries=3))
    assert [result.verdict for result in report.results] == ["sound", "failed"]
    assert "all that would have followed" in report.results[1].check
    assert not report.ok


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_somebody_who_stops_an_audit_stops_it(stop: type[BaseException], checks: list[suite.AuditCheck]) -> None:
    checks += [sound("before"), raising("in the middle", stop())]
    with pytest.raises(stop):
        audit(voter_of((), max_queries=3))


def test_what_the_callers_own_progress_raises_is_raised(checks: list[suite.AuditCheck]) -> None:
    def broken(result: AuditResult) -> None:
        raise ForeignError(result.check)

    checks.append(sound("before"))
    with pytest.raises(ForeignError, match="before"):
        audit(voter_of((), max_queries=3), progress=broken)


def verdict_of(*verdicts: Verdict) -> Verdict:
    return AuditReport(subject="x", results=tuple(AuditResult(check="x", verdict=one) for one in verdicts)).verdict


def test_a_refuted_claim_is_worse_than_a_failed_check_and_that_worse_than_one_too_small() -> None:
    assert verdict_of("sound", "failed") == verdict_of("undecided", "failed", "skipped") == "failed"
    assert verdict_of("failed", "violated", "sound") == "violated"


def test_a_real_audit_goes_on_behind_a_fault_of_the_budgets_store_and_names_the_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(subject: Any, **_: Any) -> AuditResult:
        raise ForeignError(SECRET)

    monkeypatch.setattr(suite, "check_report", broken)
    monkeypatch.setattr(component_checks, "check_noise_scale", broken)
    monkeypatch.setattr(suite, "games_of", lambda subject: ())
    monkeypatch.setattr(suite, "_sample_checks", lambda subject: ())
    monkeypatch.setattr(suite, "_coin_of", lambda subject: None)
    report = audit(voter_of((), max_queries=3))
    assert [result.check for result in report.results if result.verdict == "failed"] == [
        "ledger: report",
        "noise: scale",
    ]
    assert {result.verdict for result in report.results} == {"sound", "failed", "skipped"}


@pytest.mark.parametrize("options", [[], ["--strict"], ["--json"]], ids=" ".join)
def test_the_command_ends_with_1_and_says_what_it_could(
    options: list[str],
    checks: list[suite.AuditCheck],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = plan_queries(800, max_queries=20, width=3, epsilon=1.0, delta=1e-6)
    (tmp_path / "plan.json").write_text(json.dumps(plan.to_dict()))
    checks += [sound("before"), raising("in the middle", ForeignError(SECRET)), sound("behind")]
    assert main(["audit", "plan.json", *options]) == 1
    told = capsys.readouterr()
    assert all(word in told.out for word in ("before", "in the middle", "it raised ForeignError", "behind"))
    assert "hunter2" not in told.out + told.err
    assert "Traceback" not in told.err
