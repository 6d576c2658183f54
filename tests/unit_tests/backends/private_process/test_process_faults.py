"""A private process that is killed, hangs or does not start costs what failed calls cost, and shows nothing."""

from __future__ import annotations

import asyncio
import copy
import gc
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from langchain_dpicl import ChatLocal
from langchain_dpicl.backends import PrivateProcess
from langchain_dpicl.backends.private_calls.call import OpaqueValue, RetryPolicy
from langchain_dpicl.backends.private_process import child, connection
from langchain_dpicl.backends.private_process.engines import ProcessEngine
from langchain_dpicl.backends.resolve import as_backend, as_choice_backend, as_text_backend
from langchain_dpicl.backends.rows.rows import RowSource
from langchain_dpicl.backends.sync_async import run_async, run_sync
from langchain_dpicl.exceptions import (
    CapabilityError,
    ConfigurationError,
    ModelCallError,
    PrivateAccessError,
    UnsilencableModelError,
)
from langchain_dpicl.runs.answer_memo import traits_of
from tests import process_models
from tests.contracts.backend import same_bits
from tests.forked_starts import nursery, quick_starts  # noqa: F401  fixtures

CHOICES = [" red", " blue"]
SECRET = "zx-secret-canary"


@pytest.fixture(scope="module")
def mortal() -> Iterator[PrivateProcess]:
    with PrivateProcess(process_models.mortal) as process:
        yield process


def pid_of(process: PrivateProcess) -> int:
    return process._client.connected()._process.pid


def is_lost(process: PrivateProcess) -> bool:
    connection = process._client._places.here.connection
    return connection is not None and connection.is_lost


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.usefixtures("quick_starts")
class TestACrash:
    def test_costs_the_row_that_caused_it_and_no_other(self, mortal: PrivateProcess) -> None:
        engine, here = as_choice_backend(mortal), process_models.mortal()
        rows = engine.score_choices(["red", f"die {SECRET}", "blue"], CHOICES)
        assert same_bits(rows[[0, 2]], here.score_choices(["red", "blue"], CHOICES))
        assert (rows[1] == -np.inf).all()
        assert same_bits(engine.score_choices(["red", "blue"], CHOICES), rows[[0, 2]])

    async def test_costs_the_same_awaited(self, mortal: PrivateProcess) -> None:
        rows = await as_choice_backend(mortal).ascore_choices(["blue", "die"], CHOICES)
        assert same_bits(rows[:1], process_models.mortal().score_choices(["blue"], CHOICES))
        assert (rows[1] == -np.inf).all()

    def test_leaves_a_session_that_goes_on_without_its_row(self, mortal: PrivateProcess) -> None:
        engine, here = as_backend(mortal), process_models.mortal()
        session = engine.open(["red", "blue", "die"], [])
        known = here.open(["red", "blue"], [])
        domain = [b" red", b" blue", here.eos]
        for _ in range(2):
            rows = session.score(domain)
            assert same_bits(rows[:2], known.score(domain))
            assert (rows[2] == 0).all()
            session.push(b" red")
            known.push(b" red")
        session.close()

    def test_of_a_full_session_keeps_rows_at_their_places_and_the_public_row(self) -> None:
        with PrivateProcess(process_models.mortal_full) as process:
            there, here = as_backend(process), process_models.mortal_full()
            options: dict[str, Any] = {"public": "blue", "num_rows": 3}
            session = there.open_full(["red", "die", "blue"], [], **options)  # type: ignore[attr-defined]
            known = here.open_full(["red", None, "blue"], [], **options)
            assert same_bits(session.logits(), known.logits())
            assert same_bits(session.public(), known.public())

    def test_in_a_public_call_is_an_error_and_the_next_call_works(self, mortal: PrivateProcess) -> None:
        engine = as_backend(mortal)
        with pytest.raises(ModelCallError, match="during a public call"):
            engine.top_tokens("die", [], top_k=2)
        assert engine.top_tokens("red", [], top_k=1)[0][0] == b" red"

    @pytest.mark.parametrize("record", ["blue", "die"])
    def test_of_somebody_s_private_row_fails_no_public_call(self, record: str, tmp_path: Path) -> None:
        with PrivateProcess(process_models.ended_from_outside, folder=str(tmp_path)) as process:
            engine, answers = as_backend(process), []
            asks = threading.Thread(target=lambda: answers.append(engine.top_tokens("slow red", [], top_k=1)))
            asks.start()
            until((tmp_path / "begun").exists)
            rows = engine.open([record, "red"], []).score([b" red"])
            (tmp_path / "goes on").touch()
            asks.join()
        assert (rows[0] == 0).all() == (record == "die")
        assert answers == [[(b" red", 0.5)]]

    def test_of_somebody_s_private_row_fails_nobody_who_asks_what_the_model_is(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with PrivateProcess(process_models.ended_from_outside, folder=str(tmp_path)) as process:
            engine, wait, asked = as_backend(process), connection.Connection.wait, list[str]()

            def ended(self: Any, message: Any, seconds: float) -> Any:
                if message["does"] == "facts":
                    asked.append("facts")
                    if len(asked) == 1:
                        assert (engine.open(["die"], []).score([b" red"]) == 0).all()
                        return connection.LOST
                return wait(self, message, seconds)

            monkeypatch.setattr(connection.Connection, "wait", ended)
            assert as_text_backend(process).complete(["red"], max_tokens=1) == [" red"]
        assert asked == ["facts", "facts"]

    def test_between_two_calls_costs_nothing(self, mortal: PrivateProcess) -> None:
        engine = as_choice_backend(mortal)
        rows, first = engine.score_choices(["red"], CHOICES), pid_of(mortal)
        os.kill(first, signal.SIGKILL)
        until(lambda: not is_running(first))
        assert same_bits(engine.score_choices(["red"], CHOICES), rows)
        assert pid_of(mortal) != first

    @pytest.mark.parametrize("units", [0, 5])
    def test_of_every_start_is_tried_a_public_number_of_times_however_many_rows_there_are(
        self, units: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        mark, starts = tmp_path / "mark", list[int]()
        with PrivateProcess(process_models.only_once, mark=str(mark)) as process:
            engine = as_backend(process)
            os.kill(pid_of(process), signal.SIGKILL)
            until(lambda: is_lost(process))
            begin = connection.Connection.__init__

            def counted(one: connection.Connection) -> None:
                starts.append(1)
                begin(one)

            monkeypatch.setattr(connection.Connection, "__init__", counted)
            assert not RowSource(engine, ("red",) * units, []).score((b" red",)).take().any()
            assert len(starts) <= 1 + connection.MOST_FAILED_STARTS  # one of all rows, and then of each row alone
            for match in ["ended as it started", "ended as it started", "ended as it started", "3 times in a row"]:
                with pytest.raises(ModelCallError, match=match):
                    process._client.connected()

    @pytest.mark.parametrize("units", [0, 5])
    def test_whose_restarts_failed_for_a_while_is_over_then_however_many_rows_there_were(
        self, units: int, tmp_path: Path
    ) -> None:
        mark = tmp_path / "mark"
        with PrivateProcess(process_models.only_once, mark=str(mark)) as process:
            engine = as_backend(process)
            os.kill(pid_of(process), signal.SIGKILL)
            until(lambda: is_lost(process))
            RowSource(engine, ("red",) * units, []).score((b" red",))
            mark.unlink()  # the machine has room again
            assert engine.top_tokens("red", [], top_k=1) == [(b" red", 0.5)]

    def test_whose_restart_cannot_reach_the_provider_makes_rows_abstain_and_quotes_nothing(
        self, tmp_path: Path
    ) -> None:
        with PrivateProcess(process_models.quota_used_up, mark=str(tmp_path / "mark")) as process:
            engine = as_backend(process)
            session = engine.open([f"red {SECRET}"], [])
            os.kill(pid_of(process), signal.SIGKILL)
            assert (session.score([b" red", b" blue"]) == 0).all()
            with pytest.raises(ModelCallError) as caught:
                engine.top_tokens("red", [], top_k=2)
            assert process_models.QUOTA not in str(caught.value)

    @pytest.mark.parametrize("reply", ["object", "array"])
    def test_of_what_reads_replies_does_not_happen_and_no_call_waits(
        self, reply: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        died: list[Any] = []
        monkeypatch.setattr(threading, "excepthook", died.append)
        with PrivateProcess(process_models.Unreadable) as process:
            engine = as_text_backend(process)
            assert engine.complete([f"{reply} {SECRET}"], max_tokens=1) == [""]
            assert engine.complete(["text"], max_tokens=1) == ["read"]
        assert died == []


class FakeConnection:
    """A process that takes no time to start; `fails` says whether another one starts."""

    fails = False
    made: ClassVar[list[FakeConnection]] = []

    def __init__(self) -> None:
        self.is_lost = self.loses_calls = False
        self.made.append(self)

    def wait(self, message: Any, seconds: float) -> connection.Answer:
        is_lost = self.fails if message["does"] == "start" else self.loses_calls
        return connection.LOST if is_lost else connection.Answer("done", OpaqueValue({"name": "m", "answer": 1}))

    async def await_answer(self, message: Any, seconds: float) -> connection.Answer:
        return self.wait(message, seconds)

    def kill(self) -> None:
        self.is_lost = True


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessEngine]:
    monkeypatch.setattr(connection, "Connection", FakeConnection)
    monkeypatch.setattr(FakeConnection, "made", [])
    yield ProcessEngine(connection.Client({}, name="m", retry=process_models.ONCE), "texts")
    FakeConnection.fails = False


class TestFailedStarts:
    @staticmethod
    def ask(engine: ProcessEngine, *, awaited: bool = False) -> Any:
        asked = engine._public("top_tokens")
        return asyncio.run(run_async(asked)) if awaited else run_sync(asked)

    def test_of_spare_processes_do_not_count_however_many_public_calls_a_crash_left(self, fake: ProcessEngine) -> None:
        shared = FakeConnection.made[0]
        shared.loses_calls = True
        asked = [fake._public("top_tokens") for _ in range(connection.MOST_FAILED_STARTS)]
        answers = [next(one).run() for one in asked]  # all of them were under way
        FakeConnection.fails = True
        for one, answer in zip(asked, answers, strict=True):
            with pytest.raises(ModelCallError, match="ended as it started"):
                one.send(answer).run()
        shared.is_lost, FakeConnection.fails = True, False
        assert self.ask(fake)["answer"] == 1

    @pytest.mark.parametrize("awaited", [False, True])
    @pytest.mark.parametrize("rows", [0, 1])
    def test_are_in_a_row_between_public_calls_whether_rows_started_the_process_or_a_call_did(
        self, fake: ProcessEngine, rows: int, awaited: bool
    ) -> None:
        for _ in range(2):  # twice in a row, and then it works
            FakeConnection.made[-1].is_lost = FakeConnection.fails = True
            for _ in range(connection.MOST_FAILED_STARTS - 1):
                with pytest.raises(ModelCallError):
                    fake._client.connected()
            FakeConnection.fails = False
            for _ in range(rows):
                run_sync(fake._rows("complete", [OpaqueValue("red")]))
            assert self.ask(fake, awaited=awaited)["answer"] == 1

    @pytest.mark.parametrize("awaited", [False, True])
    def test_are_one_for_each_public_call_and_said(self, fake: ProcessEngine, awaited: bool) -> None:
        FakeConnection.made[0].is_lost = FakeConnection.fails = True
        for match in [*["ended as it started"] * connection.MOST_FAILED_STARTS, "3 times in a row"]:
            with pytest.raises(ModelCallError, match=match):
                self.ask(fake, awaited=awaited)
        assert len(FakeConnection.made) == 1 + connection.MOST_FAILED_STARTS

    def test_no_spare_process_outlives_a_call_that_was_given_up_as_it_started(
        self, fake: ProcessEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        spare, started = connection.Spare(fake._client), fake._client.started

        def given_up() -> connection.Connection:
            spare.close()  # as a coroutine does that is closed, whose thread goes on
            return started()

        monkeypatch.setattr(fake._client, "started", given_up)
        spare.connected()
        assert FakeConnection.made[-1].is_lost

    def test_of_many_calls_that_a_crash_left_are_not_at_the_same_time(
        self, fake: ProcessEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        FakeConnection.made[0].loses_calls = True
        inside, together, wait = list[int](), threading.Event(), FakeConnection.wait

        def slow(self: FakeConnection, message: Any, seconds: float) -> connection.Answer:
            if message["does"] == "start":
                inside.append(1)
                if len(inside) > 1:
                    together.set()
                together.wait(0.2)
                inside.pop()
            return wait(self, message, seconds)

        monkeypatch.setattr(FakeConnection, "wait", slow)
        threads = [threading.Thread(target=self.ask, args=(fake,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(FakeConnection.made) == 4
        assert not together.is_set()


@pytest.mark.usefixtures("quick_starts")
def test_a_row_that_hangs_is_given_up_and_its_process_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    with PrivateProcess(process_models.mortal) as process:
        engine, first = as_choice_backend(process), pid_of(process)
        monkeypatch.setattr(process._client, "_row_seconds", 1.0)
        assert (engine.score_choices(["hang"], CHOICES) == -np.inf).all()
        until(lambda: not is_running(first))
        monkeypatch.setattr(process._client, "_row_seconds", 3600.0)
        assert same_bits(
            engine.score_choices(["red"], CHOICES), process_models.mortal().score_choices(["red"], CHOICES)
        )


@pytest.mark.usefixtures("quick_starts")
class TestAProcessWithoutRoomForThreads:
    @pytest.fixture(autouse=True)
    def few_seconds(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(connection, "START_SECONDS", 20.0)
        monkeypatch.setattr(connection.Client, "_seconds", lambda *_: 20.0)

    def test_does_not_start_and_says_why(self) -> None:
        how: dict[str, Any] = {"retry": RetryPolicy(max_attempts=1, deadline=10.0, max_wait=1.0)}
        with (
            PrivateProcess(process_models.with_few_threads, room=0, **how) as process,
            pytest.raises(ConfigurationError, match="can't start new thread"),
        ):
            as_choice_backend(process)

    def test_answers_one_call_after_the_other(self) -> None:
        with PrivateProcess(process_models.with_few_threads, room=1) as process:
            engine, found = as_choice_backend(process), dict[str, Any]()

            def ask(row: str) -> None:
                found[row] = engine.score_choices([row], CHOICES)

            threads = [threading.Thread(target=ask, args=(f"red {number}",)) for number in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        here = process_models.mortal().score_choices(["red"], CHOICES)
        assert [same_bits(rows, here) for rows in found.values()] == [True] * 3

    async def test_answers_an_awaited_session(self) -> None:
        with PrivateProcess(process_models.with_few_threads, room=1) as process:
            rows = await as_backend(process).open(["red"], []).ascore([b" red", b" blue"])
        assert same_bits(rows, process_models.mortal().open(["red"], []).score([b" red", b" blue"]))


def test_a_session_that_is_closed_while_it_is_opened_leaves_no_prompt_in_its_process() -> None:
    with Path(os.devnull).open("wb") as nobody:
        server = child._Server(nobody.fileno())
        is_open, may_go_on, closed = threading.Event(), threading.Event(), threading.Event()

        def opening(prompts: Any, prefix: Any) -> Any:
            is_open.set()
            may_go_on.wait(60.0)
            return SimpleNamespace(close=closed.set)

        server._engines["tokens"] = SimpleNamespace(open=opening)
        how = {"role": "tokens", "open": {"prompts": [SECRET], "prefix": []}, "push": [], "method": "score"}
        server._take({"id": 1, "does": "session", "session": 7, **how})
        is_open.wait(60.0)
        server._take({"id": 2, "does": "close", "session": 7})
        until(lambda: not server._sessions)
        may_go_on.set()
        server._threads.shutdown(wait=True)
        assert closed.is_set()
        assert not server._sessions


def descriptors() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


@pytest.mark.usefixtures("quick_starts")
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open descriptors")
class TestAnApplicationWithoutRoom:
    """Whether a process is started anew for private rows depends on the rows, so that nothing may raise there."""

    @pytest.fixture(params=["process", "first thread", "second thread"])
    def room_ends(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[Any]]:
        """Returns what lets no process start from then on, and returns those that are begun."""
        begun, popen, start = list[Any](), connection.subprocess.Popen, threading.Thread.start
        threads_left = int(request.param == "second thread")

        def process(*given: Any, **options: Any) -> Any:
            if request.param == "process":
                raise BlockingIOError(11, "Resource temporarily unavailable")
            begun.append(popen(*given, **options))
            return begun[-1]

        def thread(one: threading.Thread) -> None:
            nonlocal threads_left
            if one.name == "dpicl-private-process":
                threads_left -= 1
                if threads_left < 0:
                    raise RuntimeError("can't start new thread")
            start(one)

        def end() -> list[Any]:
            monkeypatch.setattr(connection.subprocess, "Popen", process)
            monkeypatch.setattr(threading.Thread, "start", thread)
            return begun

        return end

    def test_is_told_what_the_system_says(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def absent(*_: Any, **__: Any) -> Any:
            raise FileNotFoundError(2, "No such file or directory", "/nowhere/python")

        monkeypatch.setattr(connection.subprocess, "Popen", absent)
        with pytest.raises(ModelCallError, match=r"could not be started \(FileNotFoundError: .*/nowhere/python"):
            as_choice_backend(PrivateProcess(process_models.mortal))

    def test_keeps_nothing_of_a_process_that_did_not_start(self, room_ends: Callable[[], list[Any]]) -> None:
        before, threads, begun = descriptors(), threading.active_count(), room_ends()
        with PrivateProcess(process_models.mortal) as process:
            for _ in range(2):
                with pytest.raises(ModelCallError, match="could not be started"):
                    as_choice_backend(process)
            until(lambda: threading.active_count() <= threads)  # an earlier test's may still have been ending
            assert descriptors() <= before
        assert not any(is_running(one.pid) for one in begun)

    @pytest.mark.parametrize("awaited", [False, True])
    def test_makes_rows_abstain(self, awaited: bool, room_ends: Callable[[], list[Any]]) -> None:
        with PrivateProcess(process_models.mortal) as process:
            engine = as_choice_backend(process)
            process._client.connected().kill()
            room_ends()
            asked = (["red", "blue"], CHOICES)
            rows = asyncio.run(engine.ascore_choices(*asked)) if awaited else engine.score_choices(*asked)
        assert (rows == -np.inf).all()


@pytest.mark.usefixtures("quick_starts")
async def test_a_cancelled_task_cancels_its_call(tmp_path: Path) -> None:
    with PrivateProcess(process_models.Sleeper, folder=str(tmp_path)) as process:
        engine = as_text_backend(process)
        task = asyncio.ensure_future(engine.acomplete([SECRET], max_tokens=1))
        await asyncio.to_thread(until, (tmp_path / "begun").exists)
        task.cancel()
        with pytest.raises(asyncio.CancelledError) as caught:
            await task
        assert SECRET not in "".join(
            traceback.TracebackException.from_exception(caught.value, capture_locals=True).format()
        )
        await asyncio.to_thread(until, (tmp_path / "cancelled").exists)
        assert engine.complete(["one"], max_tokens=1) == ["awake"]


class TestWhatIsShown:
    def test_no_object_shows_a_prompt(self, mortal: PrivateProcess) -> None:
        engine = as_backend(mortal)
        session = engine.open([SECRET], [])
        session.score([b" red"])
        held = mortal._client.connected()
        for thing in (mortal, engine, session, mortal._client, held):
            assert SECRET not in f"{thing!r} {thing} {vars(thing)!r}"
        assert copy.copy(engine) is engine
        assert copy.deepcopy(mortal) is mortal
        for thing in (mortal, engine):
            with pytest.raises(PrivateAccessError, match="cannot be pickled"):
                pickle.dumps(thing)

    def test_prints_logs_and_errors_of_the_model_stay_there(self, capfd: pytest.CaptureFixture[str]) -> None:
        with PrivateProcess(process_models.LoudChat, retry=process_models.ONCE) as process:
            engine = as_choice_backend(process)
            rows = engine.open([f"raises {SECRET}", f"red {SECRET}"], []).score([b" red", b" blue"])  # type: ignore[union-attr]
        assert (rows[0] == 0).all()
        assert rows[1].sum() > 0
        shown = capfd.readouterr()
        assert SECRET not in shown.out + shown.err

    def test_ctrl_c_shows_no_prompt(self, mortal: PrivateProcess, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = as_choice_backend(mortal)

        class Interrupted:
            def __init__(self) -> None:
                self.set_result = lambda _: None

            def result(self, seconds: float) -> Any:
                raise KeyboardInterrupt

        monkeypatch.setattr(connection, "Future", Interrupted)
        boxes = [OpaqueValue(SECRET)]
        with pytest.raises(KeyboardInterrupt) as caught:
            engine._client.ask(lambda _: engine._message("score_choices", boxes, CHOICES), 1)  # type: ignore[union-attr]
        shown = traceback.TracebackException.from_exception(caught.value, capture_locals=True).format()
        assert SECRET not in "".join(shown)


class TestTheStart:
    @pytest.mark.usefixtures("quick_starts")
    def test_names_the_error_of_what_makes_the_model(self) -> None:
        process = PrivateProcess("tests.process_models:failing", reason="no key")
        with pytest.raises(ConfigurationError, match=r"RuntimeError: no key$"):
            as_backend(process)

    def test_from_the_module_of_the_model_s_function_starts_no_other_there(self, tmp_path: Path) -> None:
        program = textwrap.dedent("""
            import os, signal
            signal.alarm(240)  # whatever happens, this ends each process
            with open("pids", "a+") as pids:
                print(os.getpid(), file=pids, flush=True)
                pids.seek(0)
                if len(pids.readlines()) > 3:
                    os._exit(1)
            from langchain_dpicl.backends import PrivateProcess
            from tests import process_models
            def model():
                return process_models.mortal()
            PrivateProcess(model).engine("choices")
        """)
        (tmp_path / "application.py").write_text(program)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-c", "import application"]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=300
        )
        assert "ConfigurationError: PrivateProcess: expected a model that is made without another" in done.stderr
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        assert len(pids) == 2
        until(lambda: not any(map(is_running, pids)))

    @pytest.mark.filterwarnings("ignore:There is no current event loop")
    def test_leaves_the_current_event_loop_to_the_model(self) -> None:
        with PrivateProcess(process_models.closes_the_current_loop) as process:
            assert as_backend(process).top_tokens("any", [], top_k=1)

    @pytest.mark.usefixtures("quick_starts")
    def test_raises_the_errors_that_the_model_raises_here(self) -> None:
        with PrivateProcess(process_models.busy_inside) as process, pytest.raises(UnsilencableModelError, match="Busy"):
            as_backend(process)
        with (
            PrivateProcess(ChatLocal.from_path, path="none") as process,
            pytest.raises(ConfigurationError, match="'none'"),
        ):
            as_backend(process)
        with PrivateProcess("no_such_provider:model") as process, pytest.raises(ConfigurationError, match="no_such"):
            as_backend(process)
        with PrivateProcess("tests.process_models:writer") as process, pytest.raises(CapabilityError):
            as_backend(process)

    @pytest.mark.parametrize(
        ("model", "arguments", "match"),
        [
            ("gpt-4o", {}, "provider:model"),
            (lambda: None, {}, "Move it to the top"),
            (process_models.mortal().open, {}, "Move it to the top"),
            (process_models.mortal(), {}, "object of FakeBackend"),
            ("openai:gpt-4o", {"http_client": object()}, "http_client"),
            ("openai:gpt-4o", {"retry": 3}, "RetryPolicy"),
        ],
    )
    def test_refuses_what_another_process_cannot_make(self, model: Any, arguments: Any, match: str) -> None:
        with pytest.raises(ConfigurationError, match=match) as caught:
            PrivateProcess(model, **arguments)
        assert "sk-" not in str(caught.value)

    def test_inherits_no_instrumentation_and_keeps_keys(self, monkeypatch: pytest.MonkeyPatch) -> None:
        dropped = ["OTEL_SERVICE_NAME", "LANGSMITH_TRACING", "SENTRY_DSN", "DD_TRACE_ENABLED", "PYTHONSTARTUP"]
        for name in [*dropped, "OPENAI_API_KEY"]:
            monkeypatch.setenv(name, "x")
        names = ",".join([*dropped, "OPENAI_API_KEY", "DPICL_PRIVATE_PROCESS"])  # so its workers start no other
        with PrivateProcess("tests.process_models:environment", names=names) as process:
            found = dict(as_backend(process).top_tokens("any", [], top_k=8))
        assert {token for token in found if token} == {b" OPENAI_API_KEY", b" DPICL_PRIVATE_PROCESS"}

    def test_that_is_interrupted_leaves_no_process(self, monkeypatch: pytest.MonkeyPatch) -> None:
        begun: list[connection.Connection] = []

        def interrupted(self: connection.Connection, *_: Any) -> Any:
            begun.append(self)
            raise KeyboardInterrupt

        monkeypatch.setattr(connection.Connection, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            as_backend(PrivateProcess(process_models.mortal))
        assert not is_running(begun[0]._process.pid)

    def test_shows_no_argument_in_the_command_line(self) -> None:
        with PrivateProcess(process_models.copier, fails="sk-key") as process:
            command = Path(f"/proc/{pid_of(process)}/cmdline")
            assert not command.exists() or b"sk-key" not in command.read_bytes()
            for thing in (process, process._client, process._client.connected()):
                assert "sk-key" not in f"{thing!r} {vars(thing)!r}"

    def test_is_told_apart_from_others_by_a_memo(self) -> None:
        made = [PrivateProcess("openai:gpt-4o", temperature=heat, api_key="sk-key") for heat in (0.0, 1.0)]
        traits = [traits_of(process) for process in made]
        assert traits[0]["model"] == "openai:gpt-4o"
        assert traits[0] != traits[1]
        assert "sk-key" not in str(traits)


@pytest.mark.usefixtures("quick_starts")
class TestTheEnd:
    def test_comes_with_close_also_while_the_process_starts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        process, started = PrivateProcess(process_models.mortal), []
        wait = connection.Connection.wait

        def closed_meanwhile(self: connection.Connection, message: Any, seconds: float) -> Any:
            answer = wait(self, message, seconds)
            started.append(self)
            process.close()
            return answer

        monkeypatch.setattr(connection.Connection, "wait", closed_meanwhile)
        with pytest.raises(ConfigurationError, match="is closed"):
            process.engine("choices")
        assert [one._process.poll() is None for one in started] == [False]

    def test_comes_with_the_application_also_while_the_model_is_made(self, tmp_path: Path) -> None:
        mark, made = tmp_path / "mark", connection.Connection()
        how = PrivateProcess(process_models.never_made, mark=str(mark))._client._start
        _, started = made.post({"does": "start", "allowed": [], "how": how})
        until(mark.exists)
        made._outbox.put(None)  # its pipe is closed, as where the application is killed
        try:
            assert started.result(60) is connection.LOST
        finally:
            made.kill()

    def test_comes_with_close_and_with_the_last_reference(self) -> None:
        process = PrivateProcess(process_models.mortal)
        engine, pid = as_choice_backend(process), pid_of(process)
        del process
        gc.collect()
        assert is_running(pid)  # the engine keeps it
        del engine
        gc.collect()
        assert not is_running(pid)
        other = PrivateProcess(process_models.mortal)
        engine, pid = as_choice_backend(other), pid_of(other)
        other.close()
        assert not is_running(pid)
        with pytest.raises(ConfigurationError, match="closed"):
            engine.score_choices(["red"], CHOICES)

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
    def test_comes_with_the_application_and_a_forked_one_has_a_process_of_its_own(self) -> None:
        program = textwrap.dedent("""
            import os, sys
            from langchain_dpicl.backends import PrivateProcess
            from langchain_dpicl.backends.resolve import as_choice_backend
            from tests import process_models
            process = PrivateProcess(process_models.mortal)
            engine = as_choice_backend(process)
            rows = engine.score_choices(["red"], [" red", " blue"]).tolist()
            forked = os.fork()
            same = engine.score_choices(["red"], [" red", " blue"]).tolist() == rows
            print(process._client.connected()._process.pid, same, flush=True)
            if forked:
                same = os.waitpid(forked, 0)[1] == 0
                again = engine.score_choices(["red"], [" red", " blue"]).tolist() == rows
                print(process._client.connected()._process.pid, same and again, flush=True)
        """)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, timeout=300
        )
        lines = [line.split() for line in done.stdout.splitlines()]
        assert [same for _, same in lines] == ["True"] * 3
        pids = {int(pid) for pid, _ in lines}
        assert len(pids) == 2
        until(lambda: not any(map(is_running, pids)))
