"""What finds unsteady tests: the order of a seed, and what is shown of failures."""

from __future__ import annotations

import contextlib
import random
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import check_steady
from tests.check_steady import Run, read, told
from tests.ordering import shuffled


def items(modules: int = 5, tests: int = 8) -> list[Any]:
    return [SimpleNamespace(path=f"m{module}", name=f"t{test}") for module in range(modules) for test in range(tests)]


def names(some: list[Any]) -> list[tuple[str, str]]:
    return [(one.path, one.name) for one in some]


def test_a_seed_gives_its_order_again_and_another_seed_another() -> None:
    assert names(shuffled(items(), 1)) == names(shuffled(items(), 1))
    assert names(shuffled(items(), 1)) != names(shuffled(items(), 2))
    assert sorted(names(shuffled(items(), 1))) == sorted(names(items()))


def test_the_tests_of_a_module_stay_together_in_another_order() -> None:
    found = names(shuffled(items(), 3))
    assert len({module for module, _ in found[:8]}) == 1
    assert [name for _, name in found[:8]] != [f"t{test}" for test in range(8)]
    assert list(dict.fromkeys(module for module, _ in found)) != [f"m{module}" for module in range(5)]


def test_the_suite_s_own_randomness_is_left_alone() -> None:
    random.seed(5)
    expected = random.random()
    random.seed(5)
    shuffled(items(), 1)
    assert random.random() == expected


def test_failures_are_told_by_test_with_their_seeds_and_counted_in_the_last_line() -> None:
    runs = [Run(7, 1, 90, {"a::x": "AssertionError", "b::y": "timed out"}, 1.0), Run(8, 1, 90, {"a::x": "gone"}, 1.0)]
    lines = told([*runs, Run(9, 0, 90, {}, 1.0)]).splitlines()
    assert lines[0] == "2 of 3  a::x  (seeds 7, 8)"
    assert lines[1:3] == ["    AssertionError", "    gone"]
    assert lines[-1] == "3 runs, 2 failed; 270 tests, 3 failures of 2 tests"


@pytest.mark.parametrize(
    ("code", "tests", "failures", "is_whole"),
    [
        (0, 5, {}, True),
        (1, 5, {"a": "b"}, True),
        (1, 5, {}, False),
        (2, 5, {}, False),
        (0, 0, {}, False),
        (5, 0, {}, False),
    ],
)
def test_a_run_without_tests_or_with_another_end_counts_as_failed(
    code: int, tests: int, failures: dict[str, str], is_whole: bool
) -> None:
    run = Run(1, code, tests, failures, 1.0)
    assert run.is_whole == is_whole
    assert ("no whole run with the seeds 1" in told([run])) != is_whole
    assert told([run]).splitlines()[-1].startswith(f"1 runs, {int(bool(failures) or not is_whole)} failed")


def test_a_report_of_pytest_is_read(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    assert read(report) == (0, {})
    report.write_text(
        '<testsuites><testsuite><testcase classname="a" name="x"/><testcase classname="a" name="y">'
        '<failure message="AssertionError: 1&#10;more">all</failure></testcase>'
        '<testcase classname="a" name="z"><error message="">E fixture</error></testcase></testsuite></testsuites>'
    )
    assert read(report) == (3, {"a::y": "AssertionError: 1", "a::z": "E fixture"})


def test_without_the_load_no_run_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_steady.shutil, "which", lambda name: None)
    monkeypatch.setattr(check_steady, "once", lambda *given: pytest.fail("a run was begun"))
    with pytest.raises(SystemExit, match="found none"):
        check_steady.main(["--runs", "1"])


@pytest.fixture
def runs_of_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """The seeds of runs that are over at once, without a load; every fifth one fails."""
    seeds: list[int] = []

    def once(seed: int, arguments: Any) -> Run:
        seeds.append(seed)
        return Run(seed, int(seed % 5 == 0), 9, {"a::x": "gone"} if seed % 5 == 0 else {}, 1.0, 2.0)

    monkeypatch.setattr(check_steady, "once", once)
    monkeypatch.setattr(check_steady, "load", lambda processors: contextlib.nullcontext())
    monkeypatch.setattr(check_steady, "ROOT", tmp_path)
    monkeypatch.setattr(check_steady, "LOG", tmp_path / "out/steady.jsonl")
    monkeypatch.setattr(check_steady, "state_of_files", lambda: "one commit")
    monkeypatch.setattr(signal, "signal", lambda *given: None)
    return seeds


def test_a_later_start_adds_the_runs_that_are_missing_and_counts_all(
    runs_of_nothing: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert check_steady.main(["--runs", "2", "--seed", "1"]) == 0
    with check_steady.LOG.open("a") as log:
        log.write('{"ended": "20')  # killed while it wrote
    assert check_steady.main(["--runs", "6", "--seed", "1"]) == 1
    assert check_steady.main(["--runs", "6"]) == 1
    assert runs_of_nothing == [1, 2, 3, 4, 5, 6]
    assert capsys.readouterr().out.splitlines()[-1] == "6 runs, 1 failed; 54 tests, 1 failures of 1 tests"


def test_runs_of_other_files_or_other_tests_count_for_nothing(
    runs_of_nothing: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_steady.main(["--runs", "1", "--seed", "1"])
    check_steady.main(["--runs", "1", "--seed", "1", "--", "tests/unit_tests"])
    monkeypatch.setattr(check_steady, "state_of_files", lambda: "one commit+changes")
    check_steady.main(["--runs", "1", "--seed", "1"])
    assert runs_of_nothing == [1, 1, 1]


def test_a_change_that_is_not_committed_is_another_state(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"diff": "", "status": "", "rev-parse": "abc\n"}
    monkeypatch.setattr(
        check_steady.subprocess, "run", lambda command, **options: SimpleNamespace(stdout=said[command[1]])
    )
    assert check_steady.state_of_files() == "abc"
    said["diff"] = "+ a line"
    assert check_steady.state_of_files() != "abc"
