"""The leak matrix on the installed langchain-core, and proof that it can fail: bugs planted here turn cells red.

`tests/check_leaks.py` runs the whole table on the lowest and the newest langchain-core and prints it.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import json
import logging
import subprocess
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from langchain_core.runnables import RunnableLambda

from langchain_dpicl.backends.private_calls import call, log_guard
from langchain_dpicl.backends.private_calls.call import OpaqueValue, Reply, SilentModel
from langchain_dpicl.budget.handler import RunEvents
from langchain_dpicl.exceptions import ModelCallError, UnsilencableModelError
from langchain_dpicl.pate.labeler import PromptPATELabeler
from langchain_dpicl.privacy.private_examples import PrivateExamples
from langchain_dpicl.release.curator import SecretSample
from langchain_dpicl.runs.release_run import RunJournal
from tests import check_leaks
from tests.canary import RECORD, VOTE
from tests.check_leaks import PROCESSES
from tests.leaks.channels import CHANNELS, GROUPS, Channel
from tests.leaks.channels.registry import everywhere
from tests.leaks.matrix import Cell, Verdict, run_cell, run_once
from tests.leaks.models import RECORDS, LeakyChat
from tests.leaks.rooms import ROOMS, Room
from tests.leaks.scene import ASYNC, ENTRIES, HALVES, Scene, entries_of
from tests.leaks.table import FEWEST_CHANNELS, cell_from, column, faults, markdown, text

pytestmark = pytest.mark.loopback

PLAIN = [one for one in CHANNELS if one.group == "plain"]
CALL, PROMPT, LABELS = (next(r for r in ROOMS if r.name == name) for name in ("one call", "few-shot prompt", "labels"))

IN_TURN = list(zip(PLAIN, itertools.cycle(ENTRIES), strict=False))
"""Every channel by one entry point, in turn."""


@pytest.mark.parametrize(("channel", "entry"), IN_TURN, ids=lambda one: getattr(one, "name", one))
def test_naive_leaks_and_ours_does_not(channel: Channel, entry: str) -> None:
    # A sample of the table. `check_leaks.py` runs half of it on the lowest and the other half on the newest core
    # (`make leaks`: all of it, on this one as well), and the channels of global instrumentation in processes of their own.
    assert run_cell(channel, entry).fault == ""


def test_every_group_has_a_process() -> None:
    assert sorted(group for groups in PROCESSES for group in groups) == sorted(GROUPS)
    assert {one.group for one in CHANNELS} == set(GROUPS)
    assert len({one.name for one in CHANNELS}) == len(CHANNELS) >= FEWEST_CHANNELS


def test_every_entry_point_of_every_room_is_on_the_table() -> None:
    assert {entry for room in ROOMS for entry in room.entries} == set(ENTRIES)
    # The sample takes them all, each on several channels that exist here.
    exist = [(channel, entry) for channel, entry in IN_TURN if not channel.unless(entry)]
    assert min(Counter(entry for _, entry in exist).get(entry, 0) for entry in ENTRIES) > 2


def test_two_halves_are_the_table_and_each_has_every_channel_and_every_room() -> None:
    for row in range(len(CHANNELS)):
        halves = [entries_of(row, half) for half in (0, 1)]
        assert sorted(entry for half in halves for entry in half) == sorted(entries_of(row)) == sorted(ENTRIES)
        for half in halves:
            assert 0 < len(ASYNC & set(half)) < len(half)
            assert [room.name for room in ROOMS if not set(room.entries) & set(half)] == []
    assert {entries_of(0, 0), entries_of(1, 0)} == set(HALVES)  # so each version sees every entry point


# -- the net can fail: planted bugs ---------------------------------------------------------------------------------


def red(entries: Sequence[str] = ("invoke", "ainvoke"), room: Room = CALL, among: Collection[str] = ()) -> set[str]:
    """Names of the channels (`among` them; all if empty) where a room of ours leaks by one of the entry points."""
    channels = [one for one in PLAIN if not among or one.name in among]
    channels = [one for one in channels if one.name != "LangGraph events v3"]  # not in every supported langgraph
    marks = {(one.name, entry): run_once(one, entry, room) for one in channels for entry in entries}
    return {name for (name, _), verdict in marks.items() if verdict is not None and {"R", "V"} & set(verdict.mark)}


@pytest.fixture
def in_the_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: `.invoke` in place of `_generate`, on the same silent copy in the same empty context."""

    def attempt(self: SilentModel, request: Any, retry: Any) -> Reply:
        with contextlib.suppress(Exception):
            self._model.invoke(request.prompt.reveal())
        return Reply(fault="content")

    async def aattempt(self: SilentModel, request: Any, retry: Any, threads: Any) -> Reply:
        with contextlib.suppress(Exception):
            await self._model.ainvoke(request.prompt.reveal())
        return Reply(fault="content")

    monkeypatch.setattr(SilentModel, "_attempt", attempt)
    monkeypatch.setattr(SilentModel, "_aattempt", aattempt)


OPEN = {
    "set_debug output",
    "configure hook (environment variable)",
    "LangSmith by environment variables",
    "LangSmith's record of a failed run",
    "Ctrl-C or cancellation in a private call",
    "log: the model's client at DEBUG",
    "warnings of the model",
    "a model that starts runs of its own",
}
"""What sees a call by `.invoke` even on a silent copy in an empty context."""

INHERITED = {
    "callbacks in the chain's config (inherited)",
    "callbacks in the component's config",
    "async callback handler",
    "bind() with callbacks=[] (the bind trap)",
    "configure hook (context variable)",
    "run collector (collect_runs)",
    "usage callback",
    "astream_events v1",
    "astream_events v2",
    "astream_log",
    "LangGraph stream_mode messages",
    "LangSmith by tracing_context(enabled=True)",
    "LangSmith below a @traceable function",
    "log: LangChain on a handler that fails",
    "on_chain_error, on_llm_error",
    "with_retry",
}
"""What sees it as well when the caller's context is kept."""

PRINTED = {
    "repr, str, format, f-string of a chain",
    "dumps, dumpd",
    "copy, deepcopy",
    "LangGraph stream_mode updates, debug",
    "LangGraph checkpoint bytes",
}
"""What shows an object by its repr."""


class TestPlantedBugs:
    def test_without_a_bug_nothing_is_red(self) -> None:
        assert red(("invoke",)) == set()

    def test_invoke_in_place_of_generate(self, in_the_open: None) -> None:
        assert red() == OPEN

    def test_invoke_in_the_caller_s_context(self, in_the_open: None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(call, "contextvars", SimpleNamespace(Context=contextvars.copy_context))
        assert red() == OPEN | INHERITED
        tokens = {"streamed tokens (on_llm_new_token)"}
        monkeypatch.delitem(call._QUIET, "streaming")
        assert red(among=tokens) == tokens

    @pytest.mark.parametrize(
        ("kept", "channels"),
        [
            ("cache", {"global cache in memory", "global cache on disk (file bytes)", "model's own cache"}),
            ("callbacks", {"model's own callbacks"}),
            ("verbose", {"model with verbose=True (the same)", "set_verbose (what its handler is sent)"}),
        ],
        ids=["a cached model", "a handler kept", "verbose kept"],
    )
    def test_a_switch_left_on(
        self, kept: str, channels: set[str], in_the_open: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delitem(call._QUIET, kept)
        assert red() == OPEN | channels

    def test_a_chained_exception(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def chained(error: BaseException, **options: Any) -> Reply:
            raise ModelCallError("a private call failed") from error

        monkeypatch.setattr(call, "_outcome", chained)
        assert red() == {
            "exception: text, args, attributes, cause, context",
            "on_chain_error, on_llm_error",
            "LangSmith's record of a failed run",
            "Ctrl-C or cancellation in a private call",
        }

    def test_a_box_that_shows_its_content(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(OpaqueValue, "__repr__", lambda self: f"OpaqueValue({self._value!r})")
        assert red() == PRINTED | {"Ctrl-C or cancellation in a private call"}

    def test_a_holder_that_shows_its_records(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(PrivateExamples, "__repr__", lambda self: repr(RECORDS))
        assert red(("invoke", "abatch"), PROMPT, PRINTED) == PRINTED

    def test_a_record_in_a_released_entry(self, monkeypatch: pytest.MonkeyPatch) -> None:
        answered = PromptPATELabeler._answered
        entry = {"fields": {"text": RECORDS[0]["text"]}}
        monkeypatch.setattr(PromptPATELabeler, "_answered", lambda *args: replace(answered(*args), **entry))
        seen = PRINTED | {"pickle", "model_dump, model_dump_json, dict"}
        assert red(LABELS.entries, LABELS, seen) == seen

    @pytest.mark.parametrize("entry", LABELS.entries)
    def test_a_record_in_a_file_alone(self, entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
        append = RunJournal.append
        noted = lambda self, entry, **more: append(self, {**entry, "note": RECORD}, **more)  # noqa: E731
        monkeypatch.setattr(RunJournal, "append", noted)
        seen = {"usage callback", "exception: text, args, attributes, cause, context"}  # a broken run's file too
        assert red((entry,), LABELS, seen) == seen

    @pytest.mark.parametrize("entry", LABELS.entries)
    def test_a_record_in_an_event(self, entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
        charge = RunEvents._charge
        monkeypatch.setattr(RunEvents, "_charge", lambda self: {**charge(self), "asked": RECORD})
        seen = {"callbacks in the chain's config (inherited)", "async callback handler", "astream_events v2"}
        assert red((entry,), LABELS, {*seen, "usage callback"}) == seen

    def test_a_kept_sample_that_shows_its_records(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(SecretSample, "__repr__", lambda self: repr(RECORDS))
        assert red(LABELS.entries, LABELS, PRINTED) == PRINTED

    def test_logs_and_warnings_that_are_not_withheld(self, monkeypatch: pytest.MonkeyPatch) -> None:
        begin = call.begin
        monkeypatch.setattr(call, "begin", lambda **options: begin(withholds=False))
        assert red() == {"log: the model's client at DEBUG", "warnings of the model"}

    def test_models_that_start_runs_inside_a_call(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(call, "refuse_open_models", lambda model: None)
        assert red() == set()  # the tripwire holds
        monkeypatch.setattr(log_guard._Tripwire, "get", lambda self: None)
        assert red() == {"a model around another model", "a model that starts runs of its own"}


# -- the judge can fail ---------------------------------------------------------------------------------------------


def watched(watch: Callable[[Scene], Iterator[None]], **options: Any) -> Channel:
    given = {"needs": "RV", "group": "plain", "unless": everywhere, **options}
    return Channel("a channel", contextlib.contextmanager(watch), **given)


def blind(scene: Scene) -> Iterator[None]:
    yield


def cell(**options: Any) -> Cell:
    """A cell in order, but for `options`."""
    given = {"naive": Verdict("RV"), "ours": {"room": Verdict("-")}, "needs": "RV", **options}
    return Cell("a channel", "invoke", **given)


class TestTheJudge:
    def test_an_observer_that_sees_nothing_is_vacuous(self) -> None:
        assert "vacuous: naive shows -" in run_cell(watched(blind), "invoke", [CALL]).fault

    def test_one_canary_is_not_both(self) -> None:
        def sees_votes(scene: Scene) -> Iterator[None]:
            yield
            scene.saw(VOTE)

        assert "vacuous: naive shows V" in run_cell(watched(sees_votes), "invoke", [CALL]).fault
        assert "ours: one call V" in run_cell(watched(sees_votes, needs="V"), "invoke", [CALL]).fault

    def test_a_room_that_calls_nobody_proves_nothing(self) -> None:
        idle = Room("idle room", ENTRIES, lambda scene: RunnableLambda(str))
        cell = run_cell(watched(blind, needs=""), "invoke", [idle])
        assert cell.fault == "ours: idle room idle"

    def test_a_room_that_breaks_proves_nothing(self) -> None:
        def build(scene: Scene) -> Any:
            scene.model().invoke(RECORD)
            raise KeyError("lost")

        found = run_cell(watched(blind, needs=""), "invoke", [Room("broken room", ENTRIES, build)])
        assert found.fault == "ours: broken room broken KeyError"

    def test_a_refusal_after_a_private_call_is_no_refusal(self) -> None:
        def build(scene: Scene) -> Any:
            scene.model().invoke(RECORD)
            raise UnsilencableModelError("too late")

        found = run_cell(watched(blind, needs=""), "invoke", [Room("late room", ENTRIES, build)])
        assert found.fault == "ours: late room broken UnsilencableModelError: too late"

    def test_a_refusal_counts_only_where_there_is_something_to_refuse(self) -> None:
        early = Room("early room", ENTRIES, lambda scene: _refuse())
        assert run_cell(watched(blind, needs="", may_refuse=True), "invoke", [early]).ours["early room"].mark == "x"
        found = run_cell(watched(blind, needs=""), "invoke", [early])
        assert found.fault == "ours: early room idle UnsilencableModelError: no"

    def test_faults_name_leaks_gaps_and_too_few_channels(self) -> None:
        many = [f"channel {number}" for number in range(FEWEST_CHANNELS)]
        right = [replace(cell(), channel=name, entry=entry) for name in many for entry in ENTRIES]
        assert faults([column("1", right)], expected=many) == []
        assert faults([column("1", right[1:])], expected=many) == ["1, channel 0, invoke: did not run"]
        halves = [column(str(half), _half(right, half), half) for half in (0, 1)]
        assert faults(halves, expected=many) == []
        assert faults(halves[:1], expected=many) == ["half 1 of the cells: no version ran it"]
        assert faults(halves[:1], expected=many, is_half_enough=True) == []
        assert faults([], expected=many, is_half_enough=True) == ["expected at least one version, found none"]
        assert faults([replace(halves[0], half=None)], expected=many)[0] == "0, channel 0, batch: did not run"
        assert faults([halves[0], replace(halves[0], half=1)], expected=many)[0] == "0, channel 0, batch: did not run"
        assert "expected at least 22 channels, found 21" in faults([column("1", right[6:])], expected=many[1:])[0]
        assert faults([], expected=many) == ["expected at least one version, found none"]
        leak = replace(right[0], ours={"room": Verdict("R")})
        assert faults([column("1", [leak, *right[1:]])], expected=many) == ["1, channel 0, invoke: ours: room R"]

    @pytest.mark.parametrize(
        ("options", "fault"),
        [
            ({}, ""),
            ({"ours": {"room": Verdict("x", "refused")}}, ""),
            ({"naive": None, "reason": "no such API"}, ""),
            ({"naive": None}, "no reason"),
            ({"ours": {}}, "no room of ours ran"),
            ({"ours": {"room": Verdict("-"), "other": Verdict("RV")}}, "ours: other RV"),
            ({"naive": Verdict("R")}, "vacuous: naive shows R , expected RV"),
        ],
        ids=["right", "refused", "no channel", "no reason", "no room", "leak", "vacuous"],
    )
    def test_a_cell_says_what_is_wrong_with_it(self, options: dict[str, Any], fault: str) -> None:
        assert cell(**options).fault == fault

    def test_the_table_shows_every_cell_within_its_width(self) -> None:
        cells = [replace(cell(), channel=one.name, entry=entry) for one in CHANNELS for entry in ENTRIES]
        refused = replace(cells[0], ours={"room": Verdict("x", "no, thank you " * 20)})
        missing = replace(cells[1], naive=None, reason="no such API")
        names = [one.name for one in CHANNELS]
        columns = [column(core, [refused, missing, *cells[2:]]) for core in ("1.3.3", "1.7.2", "1.8.2")]
        shown = text(columns, names)
        assert max(map(len, shown.splitlines())) <= 150
        halves = [column("1", _half(cells, 0), 0), column("2", _half(cells, 1), 1)]
        assert text(halves, names).count("RV/-") == len(cells)
        assert shown.count("RV/x") == shown.count("n/a  ") == 3
        for note in (f"{names[0]}: no, thank you", f"{names[0]}: no such API"):
            assert shown.count(note) == 1
            assert markdown(columns, names).count(note) == 1

    def test_cells_survive_the_way_between_processes(self) -> None:
        for one in (cell(), cell(naive=None, reason="none")):
            assert cell_from(json.loads(json.dumps(asdict(one)))) == one


def _half(cells: Sequence[Cell], half: int) -> list[Cell]:
    rows = list(dict.fromkeys(one.channel for one in cells))
    return [one for one in cells if one.entry in entries_of(rows.index(one.channel), half)]


def _refuse() -> Any:
    raise UnsilencableModelError("no")


class TestTheCheck:
    def test_the_lowest_environment_has_the_floors_and_all_observers(self) -> None:
        asked = check_leaks.requirements()
        assert "langchain-core==1.3.3" in asked
        assert any(one.startswith("openai==") for one in asked)
        assert sum(bool(check_leaks.OBSERVERS.match(one)) for one in asked) == len(asked) >= 9

    @pytest.mark.parametrize("leaky", [False, True], ids=["clean", "one leak"])
    def test_it_fails_on_one_leak_and_writes_the_table(
        self, leaky: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        cells = [replace(cell(), channel=one.name, entry=entry) for one in CHANNELS for entry in ENTRIES]
        if leaky:
            cells[7] = replace(cells[7], ours={"room": Verdict("V")})
        monkeypatch.setattr(check_leaks, "run_all", lambda *_, **__: ([column("1.3.3", cells)], "no network"))
        monkeypatch.setattr(check_leaks, "OUT", tmp_path / "out" / "leaks.md")
        assert check_leaks.main() == leaky
        shown = capsys.readouterr().out
        assert ("No leak, no empty proof." in shown) is not leaky
        assert ("ainvoke: ours: room V" in shown) is leaky
        assert "no network" in shown
        assert (tmp_path / "out" / "leaks.md").read_text().count("RV/V") == leaky

    @pytest.mark.parametrize(
        ("codes", "answer", "expected"),
        [
            ((0, 0), "99.0", (2, "")),
            ((0, 0), version("langchain-core"), (1, "")),
            ((0, 1), "", (1, "cannot be imported")),
            ((1, 0), "", (1, "could not be fetched")),
        ],
        ids=["newer", "the same", "unusable", "offline"],
    )
    def test_the_newest_core_is_laid_over_the_installed_one_where_it_works(
        self,
        codes: tuple[int, int],
        answer: str,
        expected: tuple[int, str],
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
    ) -> None:
        def run(*command: Any, path: Path | None = None) -> subprocess.CompletedProcess[str]:
            is_pip = "pip" in command
            if is_pip:
                Path(command[command.index("--target") + 1]).mkdir()
            return subprocess.CompletedProcess(command, codes[not is_pip], answer, "because")

        monkeypatch.setattr(check_leaks, "run", run)
        monkeypatch.setattr(check_leaks, "NEWEST", tmp_path / "newest")
        found, why = check_leaks.newest()
        assert len(found) == expected[0]
        assert expected[1] in why
        assert bool(why) is bool(expected[1])


def test_scripted_models_tell_private_from_public() -> None:
    model = LeakyChat()
    assert VOTE in model.invoke(RECORD).text
    assert VOTE not in model.invoke("hello").text
    assert logging.getLogger("some.sdk").level == logging.NOTSET
