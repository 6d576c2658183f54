"""The journal of a run: whole lines only, its own file only, and arrays beside it."""

from __future__ import annotations

import errno
import json
import os
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.runs.release_run import RunJournal
from tests.faults.stops import stopped_at

TERMS: dict[str, Any] = {"component": "mine", "ledger_id": "1" * 32, "dataset_id": "lines", "plan": {"noise": 0.1}}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.jsonl"


def journal(path: Path, **terms: Any) -> RunJournal:
    return RunJournal(path, **{**TERMS, **terms})


def filled(path: Path) -> RunJournal:
    made = journal(path)
    made.append({"text": "café \ud800", "votes": [0.1, 3]})
    made.append({"text": "two"})
    return made


def test_entries_are_read_back_as_they_were_written(path: Path) -> None:
    made = filled(path)
    assert journal(path).entries == made.entries == [{"text": "café \ud800", "votes": [0.1, 3]}, {"text": "two"}]
    journal(path).append({"text": "three"})
    assert len(journal(path).entries) == 3
    assert RunJournal.component_in(path) == "mine"


def test_a_path_without_a_file_has_no_component_and_nothing_is_written_before_it_is_told(path: Path) -> None:
    assert RunJournal.component_in(path) is None
    assert RunJournal.component_in(None) is None
    made = journal(path)
    assert not path.exists()
    made.flush()
    assert RunJournal.component_in(path) == "mine"


@pytest.mark.parametrize("lines", [1, 3])
def test_a_last_line_that_lacks_its_newline_alone_counts(path: Path, lines: int) -> None:
    filled(path)
    whole = b"".join(path.read_bytes().splitlines(keepends=True)[:lines])
    path.write_bytes(whole[:-1])
    made = journal(path)
    assert len(made.entries) == lines - 1
    made.flush()
    assert path.read_bytes() == whole
    path.write_bytes(whole[:-1])
    journal(path).append({"text": "more"})
    assert len(journal(path).entries) == lines


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_what_tools_of_windows_made_of_a_file_goes_on(path: Path, mark: bytes) -> None:
    filled(path)
    path.write_bytes(mark + path.read_bytes().replace(b"\n", b"\r\n"))
    for number in range(2):
        journal(path).append({"number": number})
    assert [entry.get("number") for entry in journal(path).entries] == [None, None, 0, 1]


@pytest.mark.parametrize("kept", range(1, 80, 13))
def test_an_unfinished_last_line_is_dropped(path: Path, kept: int) -> None:
    filled(path)
    whole = path.read_bytes()
    start = whole.rindex(b"\n", 0, -1) + 1
    path.write_bytes(whole[: start + kept])
    made = journal(path)
    assert [entry["text"] for entry in made.entries] == ["café \ud800"]
    made.append({"text": "again"})
    assert [entry["text"] for entry in journal(path).entries] == ["café \ud800", "again"]


@pytest.mark.parametrize("kept", [0, 1, 40])
def test_an_unfinished_first_line_is_written_again(path: Path, kept: int) -> None:
    filled(path)
    path.write_bytes(path.read_bytes()[:kept])
    made = journal(path)
    made.append({"text": "again"})
    assert journal(path).entries == made.entries == [{"text": "again"}]


@pytest.mark.parametrize("changed", ["plan", "component", "ledger_id", "dataset_id"])
def test_the_file_of_another_run_is_refused_and_says_what_differs(path: Path, changed: str) -> None:
    filled(path)
    other = {"plan": {"noise": 0.2}}.get(changed, "another")
    with pytest.raises(ConfigurationError, match=rf"another run's: differences in \['{changed}'\]"):
        journal(path, **{changed: other})


def test_a_plan_that_is_priced_anew_goes_on_as_its_share_does(path: Path) -> None:
    texts = {"method": "generation", "rows": 4, "epsilon": 0.5, "labels": {"epsilon": "x"}}
    plan = {"method": "documents", "noise": 0.1, "epsilon": 1.0, "texts": texts}
    journal(path, plan=plan).append({"text": "one"})
    priced = {**plan, "epsilon": 0.75, "texts": {**texts, "epsilon": 0.25}}
    assert journal(path, plan=priced).entries == [{"text": "one"}]
    for change in ({"rows": 5}, {"labels": {"epsilon": "y"}}):  # a label of that name is no price
        with pytest.raises(ConfigurationError, match=r"differences in \['plan'\]"):
            journal(path, plan={**priced, "texts": {**texts, **change}})


def test_every_changed_byte_is_refused(path: Path) -> None:
    filled(path)
    whole = path.read_bytes()
    for place in range(len(whole) - 1):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(ConfigurationError, match="checkpoint"):
            journal(path)


@pytest.mark.parametrize("content", [b"notes of mine", b"notes\n", b"[]\n", b'{"entry":1,"digest":""}\n', b"\x00" * 90])
def test_a_file_of_something_else_is_refused_and_kept(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match="checkpoint"):
        filled(path)
    assert path.read_bytes() == content


def test_a_number_that_is_too_large_is_refused(path: Path) -> None:
    filled(path)
    path.write_bytes(path.read_bytes().replace(b"0.1", b"1e400"))
    with pytest.raises(ConfigurationError, match="line 2"):
        journal(path)


def test_lines_out_of_order_or_left_out_are_refused(path: Path) -> None:
    filled(path)
    head, first, second = path.read_bytes().splitlines(keepends=True)
    for lines in ((head, second, first), (head, second), (first, second)):
        path.write_bytes(b"".join(lines))
        with pytest.raises(ConfigurationError, match="checkpoint"):
            journal(path)


@pytest.mark.parametrize("has_locks", [True, False])
def test_a_file_that_another_run_continued_or_put_there_is_left_alone(
    path: Path, monkeypatch: pytest.MonkeyPatch, *, has_locks: bool
) -> None:
    def missing(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")  # as Lustre without its option "flock" does

    if not has_locks:
        monkeypatch.setattr("langchain_dpicl.runs.release_run.fcntl", SimpleNamespace(flock=missing, LOCK_EX=2))
    first, second = filled(path), journal(path)
    second.append({"text": "of the second"})
    with pytest.raises(ConfigurationError, match="another run wrote to"):
        first.append({"text": "of the first"})
    path.unlink()
    (third := journal(path)).append({"text": "of the third"})
    with pytest.raises(ConfigurationError, match="another run wrote to"):
        second.append({"text": "more"})
    assert journal(path).entries == third.entries


@pytest.mark.parametrize("kept", [None, 0, 1, 3])
def test_a_file_that_is_gone_or_is_an_older_copy_gets_what_it_lacks(path: Path, kept: int | None) -> None:
    first, second = filled(path), journal(path)
    second.append({"text": "of the second"})
    lines = path.read_bytes().splitlines(keepends=True)
    path.unlink()
    if kept is not None:
        path.write_bytes(b"".join(lines[:kept]))
    second.append({"text": "more"})
    assert journal(path).entries == second.entries
    assert len(second.entries) == 4
    with pytest.raises(ConfigurationError, match="another run wrote to"):
        first.append({"text": "of the first"})


def test_a_file_that_loses_its_name_to_an_older_copy_in_between_is_not_written(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = filled(path).entries and path.read_bytes()
    (made := journal(path)).append({"text": "three"})
    path.unlink()
    (other := journal(path)).append({"text": "of the other"})

    def rejoin(self: RunJournal) -> bool:
        path.rename(path.with_name("others"))
        path.write_bytes(older)
        return joined(self)

    joined = RunJournal._rejoin
    with monkeypatch.context() as patched:
        patched.setattr(RunJournal, "_rejoin", rejoin)
        with pytest.raises(ConfigurationError, match="another run wrote to"):
            made.append({"text": "four"})
    assert journal(path.with_name("others")).entries == other.entries
    made.flush()
    assert [entry["text"] for entry in journal(path).entries][2:] == ["three", "four"]


def test_a_file_that_was_refused_goes_on_when_it_or_a_copy_of_it_is_put_back(path: Path) -> None:
    filled(path)
    path.write_bytes(path.read_bytes()[:-1])
    (made := journal(path)).flush()
    mine = path.read_bytes()
    path.write_bytes(b"x" * (len(mine) - 1) + b"\n")
    with pytest.raises(ConfigurationError, match="another run wrote to"):
        made.append({"text": "more"})
    path.write_bytes(mine.replace(b"\n", b"\r\n") + b'{"entry"')  # the end of a line that was torn
    made.flush()
    assert journal(path).entries == made.entries


def test_no_older_copy_becomes_longer_than_what_can_be_read_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = filled(path)
    monkeypatch.setattr("langchain_dpicl.runs.release_run.MAX_TEXT", path.stat().st_size)
    older = b"\r\n".join(path.read_bytes().split(b"\n")[:2]) + b"\r\n"
    path.write_bytes(older)
    with pytest.raises(ConfigurationError, match="which is what can be read again"):
        made.flush()
    assert path.read_bytes() == older


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_failed_write_is_made_good_by_the_next(path: Path, monkeypatch: pytest.MonkeyPatch, *, is_gone: bool) -> None:
    made = filled(path)
    if is_gone:
        path.unlink()

    def full(number: int) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="disk full"):
            made.append({"text": "three"})
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 9)  # the disk kept a part of the line
    made.append({"text": "four"})
    assert journal(path).entries == made.entries
    assert [entry["text"] for entry in made.entries][2:] == ["three", "four"]


def test_a_line_is_added_as_a_whole_or_not_where_a_stop_comes_and_the_others_are_not_copied(path: Path) -> None:
    places = range(stopped_at(partial(journal(path)._add, {"text": "three"}), sys.maxsize, of="RunJournal._add")[1])
    assert len(places) > 2
    for place in (*places, sys.maxsize):  # the last one: no stop
        made = filled(path)
        before = made.entries
        stopped_at(partial(made._add, {"text": "three"}), place, of="RunJournal._add")
        assert made.entries is before
        assert len(before) == 2 + (not made.is_flushed)
        path.unlink()


def test_only_json_values_are_taken(path: Path) -> None:
    for value in (float("nan"), object(), {1, 2}):
        with pytest.raises(ConfigurationError, match="release"):
            journal(path).append({"value": value})


def test_the_arrays_of_the_last_release_are_read_back(path: Path) -> None:
    made = journal(path)
    for number in range(5):
        if number == 3:
            path.unlink()
        made.append({"step": number}, arrays=bytes([number]) * 9)
        assert journal(path).arrays() == made.arrays() == bytes([number]) * 9
    assert sorted(each.name for each in path.parent.iterdir()) == [
        "run.jsonl",
        "run.jsonl.arrays0",
        "run.jsonl.arrays1",
    ]


def test_a_relative_path_stays_where_it_was_when_the_run_was_built(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    made = journal(Path(path.name))
    (elsewhere := path.parent / "elsewhere").mkdir()
    monkeypatch.chdir(elsewhere)
    made.append({"step": 1}, arrays=b"1")
    assert made.arrays() == journal(path).arrays() == b"1"
    assert not list(elsewhere.iterdir())


def test_arrays_stand_beside_the_file_that_a_link_leads_to_or_where_an_earlier_version_put_them(path: Path) -> None:
    (link := path.with_name("link")).symlink_to("disk/run.jsonl")
    (file := path.with_name("disk") / path.name).parent.mkdir()
    journal(link).append({"step": 0}, arrays=b"zero")
    assert journal(link).arrays() == journal(file).arrays() == b"zero"
    assert [each.name for each in path.parent.glob("link*")] == ["link"]
    file.with_name("run.jsonl.arrays0").rename(link.with_name("link.arrays0"))
    made = journal(link)
    assert made.arrays() == b"zero"
    for step in (1, 2):
        made.append({"step": step}, arrays=b"newer")
        assert journal(file).arrays() == b"newer"


def test_arrays_whose_line_was_not_written_do_not_replace_those_of_the_last_release(path: Path) -> None:
    made = journal(path)
    made.append({"step": 0}, arrays=b"zero")
    made.append({"step": 1}, arrays=b"one")
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.rindex(b"\n", 0, -1) + 20])  # killed behind the arrays
    assert journal(path).arrays() == b"zero"


def test_changed_arrays_are_refused(path: Path) -> None:
    made = journal(path)
    made.append({"step": 0}, arrays=b"zero")
    path.with_name("run.jsonl.arrays0").write_bytes(b"other")
    with pytest.raises(ConfigurationError, match="arrays of its last release"):
        journal(path).arrays()


def test_another_version_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("langchain_dpicl.runs.release_run.VERSION", 1)
    filled(path)
    monkeypatch.undo()
    with pytest.raises(ConfigurationError, match="version 2"):
        journal(path)


def test_the_digest_of_the_plan_stands_there_and_not_the_plan(path: Path) -> None:
    filled(path)
    head = json.loads(path.read_bytes().splitlines()[0])["entry"]
    assert len(head["plan"]) == 64
    assert set(head) == {"format", "version", "component", "ledger_id", "dataset_id", "plan"}
