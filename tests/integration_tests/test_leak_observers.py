"""The judge of `make leaks-observers` can fail: planted observers that leak, see nothing, or stop recording."""

from __future__ import annotations

import subprocess
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests

from langchain_dpicl.exceptions import UnsilencableModelError
from tests import check_leaks, check_observers
from tests.canary import RECORD, VOTE
from tests.leaks import sink
from tests.leaks.channels.handlers import Everything
from tests.leaks.matrix import Cell, Verdict
from tests.leaks.models import answer
from tests.leaks.observers import registry
from tests.leaks.observers.collector import collector
from tests.leaks.observers.listed import OBSERVERS
from tests.leaks.observers.registry import BLIND, CASES, UNNAMED, VOTERS, Eyes, Observer, named, run_case
from tests.leaks.observers.words import NO_PROOF, NOTHING, Row, faults, shown, text, word
from tests.leaks.rooms import Room
from tests.leaks.scene import ENTRIES, Scene

pytestmark = pytest.mark.loopback

PLANTED = Observer("planted", (), lambda: Eyes(list), ("planted",), ("OpenAI",))


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """An observer that will never record the marker need not be waited for."""
    monkeypatch.setattr(registry, "PATIENCE", 0.3)
    monkeypatch.setattr(registry, "QUIET", 0.1)


def handler_eyes() -> Eyes:
    """A callback handler in the chain's config."""
    kept = Everything()

    def arrange(scene: Scene) -> None:
        scene.chain_config = {"callbacks": [kept]}

    return Eyes(lambda: kept.lines, arrange=arrange)


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the provider is asked and answers, kept beside it: below every door of ours."""
    kept: list[str] = []

    def answered(asked: str) -> dict[str, float]:
        tops = answer(asked)
        kept.append(f"{asked} {tops}")
        return tops

    monkeypatch.setattr(sink, "answer", answered)
    return kept


class TestPlantedObservers:
    @pytest.mark.parametrize("entry", registry.ENTRIES)
    def test_one_that_sees_our_requests_is_told_as_a_leak(self, entry: str, wire: list[str]) -> None:
        found = run_case(Eyes(lambda: wire), PLANTED, "OpenAI", entry)
        assert word(found) == "LEAKED RV"
        assert faults([Row("planted", cells=[found])])[0].startswith(f"planted, OpenAI, {entry}: LEAKED RV")

    @pytest.mark.parametrize("entry", registry.ENTRIES)
    def test_one_that_sees_the_naive_chain_alone_saw_nothing_of_ours(self, entry: str) -> None:
        found = run_case(handler_eyes(), PLANTED, "OpenAI", entry)
        assert (found.naive, set(found.ours)) == (Verdict("RV"), {"voting", "voting by text"})
        assert shown(found) == f"RV / {NOTHING}"
        assert faults([Row("planted", cells=[found])]) == []

    def test_one_that_sees_nothing_proves_nothing(self) -> None:
        found = run_case(Eyes(list), PLANTED, "OpenAI", "invoke")
        assert found.naive == Verdict(BLIND, "a public call after it is not recorded")
        assert shown(found) == f"{BLIND} / {NO_PROOF}"

    def test_one_that_sees_public_calls_alone_proves_nothing(self, wire: list[str]) -> None:
        found = run_case(Eyes(lambda: [line for line in wire if RECORD not in line]), PLANTED, "OpenAI", "invoke")
        assert found.naive == Verdict("-", "2 records")
        assert word(found) == NO_PROOF

    def test_one_that_stops_after_the_naive_chain_proves_nothing(self) -> None:
        kept = Everything()
        runs: list[Scene] = []

        def arrange(scene: Scene) -> None:
            runs.append(scene)
            scene.chain_config = {"callbacks": [kept]} if len(runs) == 1 else {}

        found = run_case(Eyes(lambda: kept.lines, arrange=arrange), PLANTED, "OpenAI", "invoke")
        assert found.naive == Verdict("RV")
        assert word(found) == f"unclear: {BLIND} (voting), {BLIND} (voting by text)"
        assert faults([Row("planted", cells=[found])])

    @pytest.mark.parametrize("behind", ["0.4 seconds", "two markers"])
    def test_one_that_delivers_the_rest_after_the_marker_is_waited_for(
        self, behind: str, wire: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        now = [0.0]

        def sleep(seconds: float) -> None:
            now[0] += seconds

        clock = SimpleNamespace(monotonic=lambda: now[0], monotonic_ns=time.monotonic_ns, sleep=sleep)
        monkeypatch.setattr(registry, "time", clock)
        monkeypatch.setattr(registry, "PATIENCE", 3.0)
        monkeypatch.setattr(registry, "QUIET", 0.8)
        first_of_ours: list[int] = []
        come: dict[int, float] = {}

        def arrange(scene: Scene) -> None:
            if not scene.is_naive:
                first_of_ours.append(len(wire))

        def is_late(number: int) -> bool:
            is_ours = bool(first_of_ours) and number >= first_of_ours[0]
            passed = now[0] - come.setdefault(number, now[0])
            markers = sum(registry.MARKER in line for line in wire[number:])
            has_come = passed >= 0.4 if behind == "0.4 seconds" else markers > 1
            return is_ours and registry.MARKER not in wire[number] and not has_come

        def lines() -> list[str]:
            return [line for number, line in enumerate(wire) if not is_late(number)]

        found = run_case(Eyes(lines, arrange=arrange), PLANTED, "OpenAI", "invoke", VOTERS[:1])
        assert word(found) == "LEAKED RV"

    @pytest.mark.parametrize(("said", "expected"), [("planted stands there", "refused"), ("no", None)])
    def test_a_refusal_has_to_name_the_observer(self, said: str, expected: str | None) -> None:
        def build(scene: Scene) -> Any:
            raise UnsilencableModelError(said)

        found = run_case(handler_eyes(), PLANTED, "OpenAI", "invoke", [Room("a room", ENTRIES, build)])
        assert word(found) == (expected or f"unclear: {UNNAMED} (a room)")


def cell(naive: Verdict | None = Verdict("RV"), **ours: Verdict) -> Cell:  # noqa: B008  frozen
    return Cell("OpenAI", "invoke", naive, ours)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (cell(voting=Verdict("-")), NOTHING),
        (cell(voting=Verdict("x", "planted")), "refused"),
        (cell(voting=Verdict("-"), text=Verdict("x", "planted")), "refused"),
        (cell(Verdict("V"), voting=Verdict("-")), NOTHING),
        (cell(voting=Verdict("-"), text=Verdict("R")), "LEAKED R"),
        (cell(Verdict("-"), voting=Verdict("V"), text=Verdict("RV")), "LEAKED RV"),
        (cell(None, voting=Verdict("R")), "LEAKED R"),
        (cell(Verdict("-"), voting=Verdict("-")), NO_PROOF),
        (cell(Verdict("-"), voting=Verdict("x", "planted")), NO_PROOF),
        (cell(Verdict(BLIND), voting=Verdict("-")), NO_PROOF),
        (cell(Verdict("idle"), voting=Verdict("-")), NO_PROOF),
        (cell(None, voting=Verdict("-")), NO_PROOF),
        (cell(voting=Verdict("idle")), "unclear: idle (voting)"),
        (cell(voting=Verdict("broken", "KeyError")), "unclear: broken (voting)"),
        (cell(), "unclear: no voter ran"),
    ],
)
def test_no_cell_is_clean_without_a_naive_leak_and_a_run_of_ours(found: Cell, expected: str) -> None:
    assert word(found) == expected
    is_wrong = expected.startswith(("LEAKED", "unclear"))
    good = Row("good", cells=[cell(voting=Verdict("-"))])
    assert bool(faults([good, Row("planted", cells=[found])])) is is_wrong


def test_a_table_that_proves_nothing_is_a_fault() -> None:
    none = Row("planted", cells=[cell(Verdict("-"), voting=Verdict("-"))])
    assert faults([none, Row("lost", trouble="not installed")]) == [
        "expected at least one cell that proves something, found none"
    ]
    assert faults([]) == faults([none])


def test_the_table_tells_what_did_not_run_and_why() -> None:
    rows = [
        Row(
            "seen", {"package": "1.0"}, [cell(voting=Verdict("-")), replace(cell(voting=Verdict("R")), entry="abatch")]
        ),
        Row("lost", trouble="not installed: no such release"),
        Row("quiet", {}, [cell(Verdict("-", "3 records"), voting=Verdict("-"))]),
        Row(
            "shut",
            {},
            [
                cell(
                    voting=Verdict(
                        "x", "UnsilencableModelError: shut is in the path of create and would see the prompts; stop"
                    )
                )
            ],
        ),
    ]
    told = text(rows)
    for part in ("seen: package 1.0", "RV / nothing seen", "RV / LEAKED R", "lost: not installed: no such release"):
        assert told.count(part) == 1
    assert "quiet, OpenAI: no proof, naive: 3 records" in told
    assert "shut, OpenAI: UnsilencableModelError: shut is in the path of create\n" in f"{told}\n"


def test_a_refusal_by_another_name_is_none() -> None:
    assert named(Verdict("x", "opik stands there"), ("opik",)).mark == "x"
    assert named(Verdict("x", "opik stands there"), ("weave",)).mark == UNNAMED
    assert named(Verdict("-", ""), ("weave",)).mark == "-"


def test_the_collector_reads_chunks_and_compressed_bodies() -> None:
    import gzip
    import zlib

    address, bodies = collector({"digest": "d"})
    for encode in (gzip.compress, zlib.compress, bytes):
        assert requests.put(f"{address}/a", data=encode(RECORD.encode()), timeout=60).json() == {"digest": "d"}
    requests.post(f"{address}/b", data=iter([VOTE.encode(), b" and more"]), timeout=60)
    assert bodies == [*[f"/a {RECORD}"] * 3, f"/b {VOTE} and more"]


class TestTheList:
    def test_every_observer_has_a_name_of_its_own_requirements_and_cases(self) -> None:
        assert len({one.name for one in OBSERVERS}) == len(OBSERVERS) >= 25
        for one in OBSERVERS:
            assert set(one.cases) <= set(CASES)
            assert len(check_observers.requirements(one)) == len(one.needs) + 2
            assert one.called

    def test_every_requirement_of_the_group_belongs_to_an_observer(self) -> None:
        groups = check_observers.groups()
        used = {name for one in OBSERVERS for name in one.needs}
        assert {check_leaks.name_of(line) for line in groups["observers"]} <= used


class TestTheCheck:
    @pytest.fixture(autouse=True)
    def elsewhere(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(check_observers, "OUT", tmp_path / "out" / "table.txt")
        monkeypatch.setattr(check_observers, "FOLDER", tmp_path / "environments")
        monkeypatch.setattr("sys.argv", ["check_observers"])

    @pytest.mark.parametrize(
        ("ours", "naive", "code"),
        [("-", "RV", 0), ("x", "R", 0), ("V", "RV", 1), ("R", "-", 1), ("idle", "RV", 1), ("-", "-", 1)],
    )
    def test_it_ends_with_one_on_a_leak_and_writes_the_table(
        self, ours: str, naive: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        row = Row("planted", {"package": "1.0"}, [cell(Verdict(naive), voting=Verdict(ours))])
        monkeypatch.setattr(check_observers, "run_all", lambda asked: [row])
        assert check_observers.main() == code
        assert ("No leak." in capsys.readouterr().out) is (code == 0)
        assert "planted" in check_observers.OUT.read_text()

    def test_what_cannot_be_installed_is_not_run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def run(*command: Any, path: Path | None = None) -> subprocess.CompletedProcess[str]:
            return subprocess.CompletedProcess(command, 1, "", "ERROR: no matching distribution\nHINT: none")

        monkeypatch.setattr(check_leaks, "run", run)
        (row,) = check_observers.run_all(OBSERVERS[:1])
        assert row.trouble == "not installed: ERROR: no matching distribution"
        assert row.cells == ()

    def test_a_process_that_fails_is_not_run(self, tmp_path: Path) -> None:
        python = tmp_path / "python"
        python.write_text("#!/bin/sh\necho 'ImportError: no such thing' >&2\nexit 1\n")
        python.chmod(0o755)
        assert check_observers.observe(PLANTED, python).trouble == "ImportError: no such thing"
