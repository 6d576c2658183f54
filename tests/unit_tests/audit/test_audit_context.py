"""What surrounds an audit: the caller's context, classes of users, the command's own faults, the counts of a session."""

from __future__ import annotations

from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
from _pytest.reports import CollectReport, TestReport
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.tracers import context as tracers
from langchain_core.tracers.context import register_configure_hook
from langchain_core.tracers.langchain import LangChainTracer
from langsmith.utils import get_env_var

from langchain_dpicl import get_privacy_budget_callback
from langchain_dpicl.audit import AuditReport, AuditResult, Subject, audit, component_checks, suite
from langchain_dpicl.audit.targets import QUERY, helper_of, labeler_of, synthesizer_of, voter_of
from langchain_dpicl.cli.main import main
from langchain_dpicl.exceptions import ConfigurationError
from tests.check_audit import PLAYED, ROOT, Counts

# --- the caller's context ---------------------------------------------------------------------------------------------


class Counting(BaseCallbackHandler):
    def __init__(self) -> None:
        self.starts = 0

    def on_chain_start(self, *args: Any, **kwargs: Any) -> None:
        self.starts += 1


WATCHER: ContextVar[BaseCallbackHandler | None] = ContextVar("audit_test_watcher", default=None)


@pytest.fixture
def watcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counting]:
    """A handler of the caller's context; its registration is taken back."""
    monkeypatch.setattr(tracers, "_configure_hooks", list(tracers._configure_hooks))
    register_configure_hook(WATCHER, inheritable=True)
    seen = Counting()
    token = WATCHER.set(seen)
    yield seen
    WATCHER.reset(token)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves one check, which makes and asks a component as the whole audit does."""

    def check() -> AuditResult:
        voter = voter_of((), max_queries=200, rows="units")
        return component_checks.check_freshness(lambda: voter.invoke(QUERY) == "yes")

    monkeypatch.setattr(suite, "_checks", lambda subject, *, controls: iter([suite.AuditCheck("one", check)]))


def test_a_handler_of_the_callers_context_sees_no_run_of_an_audit(watcher: Counting, quick: None) -> None:
    voter = voter_of((), max_queries=3)
    voter.invoke(QUERY)
    assert watcher.starts > 0  # it watches
    before = watcher.starts
    assert audit(voter).verdict == "sound"
    assert watcher.starts == before


def test_an_audit_runs_inside_a_budget_of_the_caller_and_spends_none_of_it(quick: None) -> None:
    voter = voter_of((), max_queries=3)
    with get_privacy_budget_callback(epsilon=1.0, delta=1e-6) as handler:
        before = handler.budget.report().to_dict()
        assert audit(voter).verdict == "sound"
        assert handler.budget.report().to_dict() == before


@pytest.fixture
def tracers_made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Where the environment asks for every run to be traced: says whenever a tracer would be made."""
    made: list[str] = []

    def refused(self: Any, **_: Any) -> None:
        made.append("a tracer")
        raise ConnectionError  # which LangChain logs and goes on

    with monkeypatch.context() as patch:
        patch.setattr(LangChainTracer, "__init__", refused)
        patch.setenv("LANGSMITH_TRACING", "true")
        get_env_var.cache_clear()
        yield made
    get_env_var.cache_clear()


def test_an_audit_is_not_traced_even_where_everything_is(quick: None, tracers_made: list[str]) -> None:
    voter = voter_of((), max_queries=3)
    voter.invoke(QUERY)
    assert tracers_made  # it would be
    tracers_made.clear()
    assert audit(voter).verdict == "sound"
    assert tracers_made == []


def test_what_is_told_of_the_progress_is_told_in_the_callers_context(watcher: Counting, quick: None) -> None:
    seen: list[Any] = []
    audit(voter_of((), max_queries=3), progress=lambda result: seen.append((result.verdict, WATCHER.get())))
    assert seen == [("sound", watcher)]


def test_every_step_that_makes_a_check_is_away_from_the_callers_context(
    watcher: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def checks(subject: Subject, *, controls: bool) -> Iterator[Any]:
        seen.append(WATCHER.get())
        yield suite.AuditCheck("one", lambda: AuditResult(check="one", verdict="sound"))
        seen.append(WATCHER.get())
        yield suite.AuditCheck("two", lambda: AuditResult(check=str(WATCHER.get()), verdict="sound"))

    monkeypatch.setattr(suite, "_checks", checks)
    report = audit(voter_of((), max_queries=3))
    assert seen == [None, None]
    assert [result.check for result in report.results] == ["one", "None"]
    assert WATCHER.get() is watcher


# --- classes of users -------------------------------------------------------------------------------------------------

COMPONENTS = {
    "DPVotingRunnable": lambda: voter_of((), max_queries=3),
    "DPFreeFormRunnable": lambda: helper_of((), max_queries=3),
    "PromptPATELabeler": lambda: labeler_of((), 3),
    "DemonstrationSynthesizer": lambda: synthesizer_of((), 3),
}


@pytest.mark.parametrize("name", COMPONENTS)
def test_a_class_derived_of_a_component_is_refused_as_its_base_would_be_audited(name: str) -> None:
    component = COMPONENTS[name]()
    assert Subject.of(component).name == name
    component.__class__ = type("Mine", (type(component),), {})
    with pytest.raises(ConfigurationError, match=f"expected a {name}, no class derived of it, found 'Mine'"):
        Subject.of(component)


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leaves", ["sys.exit(0)", "raise SystemExit", "sys.exit('a secret in a message')"])
def test_a_module_that_leaves_when_it_is_imported_was_not_audited(
    leaves: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "leaving_audited_module.py").write_text(f"import sys\n{leaves}\n")
    assert main(["audit", "leaving_audited_module:voter"]) == 2
    told = capsys.readouterr()
    assert "found SystemExit" in told.err
    assert "secret" not in told.err + told.out


@pytest.mark.parametrize(
    ("alarms", "said"),
    [(0, "0."), (1, "1e-06."), (3, "3e-06."), (9, "9e-06."), (10, "1e-05."), (11, "2e-05."), (14, "2e-05.")],
)
def test_the_chance_of_a_false_alarm_is_never_rounded_down(alarms: int, said: str) -> None:
    results = tuple(AuditResult(check="one", verdict="sound") for _ in range(alarms))
    report = AuditReport(subject="x", results=results)
    assert f"with a chance of at most {said}" in report.summary()


def test_the_command_says_that_code_it_imports_runs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["audit", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "Importing and calling your code runs it as usual" in told
    assert "below 1e-5" not in told


# --- the session that plays every audit -------------------------------------------------------------------------------


def reported(name: str, outcome: Any, when: Any = "call") -> TestReport:
    place = ("tests/x.py", 1, name)
    return TestReport(f"tests/test_x.py::{name}", place, {}, outcome, "why", when)


@pytest.mark.parametrize("when", ["setup", "call"])
@pytest.mark.parametrize("name", ["test_a_planted_bug_is_caught", "test_all_is_well"])
def test_a_skipped_check_is_neither_caught_nor_sound_and_fails_the_session(when: str, name: str) -> None:
    counts = Counts()
    counts.pytest_runtest_logreport(reported(name, "skipped", when))
    assert counts.found.total() == 0
    assert counts.skipped == 1
    assert counts.bad
    assert "SKIPPED" in counts.bad[0]
    assert "skipped              1" in counts.table()


def test_a_file_that_is_skipped_as_a_whole_fails_the_session() -> None:
    counts = Counts()
    counts.pytest_collectreport(CollectReport("tests/test_x.py", "skipped", "why", None))
    assert counts.bad


def test_what_was_played_is_counted_as_before() -> None:
    counts = Counts()
    for name, outcome in (("test_a_planted_bug_is_caught", "passed"), ("test_all_is_well", "failed")):
        for when in ("setup", "call", "teardown"):
            counts.pytest_runtest_logreport(reported(name, outcome if when == "call" else "passed", when))
    assert counts.found == {("planted", True): 1, ("sound", False): 1}
    assert counts.skipped == 0
    assert [line.split(":")[0] for line in counts.bad] == ["FALSE ALARM"]


@pytest.mark.parametrize("played", PLAYED)
def test_what_make_audit_plays_is_there(played: str) -> None:
    file, _, name = played.partition("::")
    assert f"def {name or 'test_'}" in (ROOT / "tests" / file).read_text(encoding="utf-8")
