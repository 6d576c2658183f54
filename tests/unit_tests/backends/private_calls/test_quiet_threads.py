"""A private call stays silent in threads it starts, and the hooks neither pile up nor remember what they withheld."""

from __future__ import annotations

import asyncio
import functools
import gc
import io
import logging
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from langchain_core.messages import HumanMessage, SystemMessage

from langchain_dpicl.backends.private_calls import log_guard
from langchain_dpicl.backends.private_calls.call import OpaqueValue, Reply, Request, RetryPolicy, silence
from langchain_dpicl.exceptions import UnsilencableModelError
from tests.canary import RECORD, VOTE, leaks, logging_to, observe
from tests.scripted_models import ScriptedChat, fixed

ONCE = RetryPolicy(max_attempts=1)
ANSWERED = fixed({VOTE: 0.5, " plain": 0.25})
INNER = ScriptedChat(answer=ANSWERED)
LOG = logging.getLogger("careless.sdk")


def request(text: str = RECORD, *, is_public: bool = False) -> Request:
    return Request(OpaqueValue(text), lambda prompt: [HumanMessage(prompt)], {}, explain="kind" if is_public else "")


def doing(act: Callable[[str], Any]) -> Any:
    """A silent model that does this with its prompt."""

    class Doing(ScriptedChat):
        def _generate(self, messages: Any, *args: Any, **kwargs: Any) -> Any:
            act(messages[0].text)
            return super()._generate(messages, *args, **kwargs)

    return silence(Doing(answer=ANSWERED))


def in_a_thread(act: Callable[[str], Any], text: str) -> None:
    thread = threading.Thread(target=act, args=(text,))
    thread.start()
    thread.join()


def in_a_thread_of_its_own_class(act: Callable[[str], Any], text: str) -> None:
    class Own(threading.Thread):
        def run(self) -> None:
            act(text)

    thread = Own()
    thread.start()
    thread.join()


def in_a_timer(act: Callable[[str], Any], text: str) -> None:
    timer = threading.Timer(0.0, act, [text])
    timer.start()
    timer.join()


def in_a_pool(act: Callable[[str], Any], text: str) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(act, text).result()


def in_a_map(act: Callable[[str], Any], text: str) -> None:
    with ThreadPoolExecutor(1) as pool:
        list(pool.map(act, [text]))


def in_a_callback(act: Callable[[str], Any], text: str) -> None:
    done = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(done.wait).add_done_callback(fn=lambda future: act(text))
        done.set()


PLACES = (globals(), vars(sys))
"""Where warnings of this module, and of nobody on the stack, are written down."""
WAYS = [in_a_thread, in_a_thread_of_its_own_class, in_a_timer, in_a_pool, in_a_map, in_a_callback]


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """Everything that is logged, at any level."""
    gc.collect()  # what other tests left behind may log as it goes
    text = io.StringIO()
    with logging_to(text):
        yield text


@pytest.fixture(autouse=True)
def _hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts the hooks back that were there before."""
    for hook in log_guard._HOOKS:
        monkeypatch.setattr(hook.owner, hook.name, getattr(hook.owner, hook.name))


class TestThreads:
    @pytest.mark.parametrize("way", WAYS)
    def test_that_a_private_call_starts_log_nothing(
        self, stream: io.StringIO, capsys: pytest.CaptureFixture[str], way: Callable[..., None]
    ) -> None:
        def log(text: str) -> None:
            LOG.critical(text)
            warnings.warn(text, UserWarning, stacklevel=1)

        silent = doing(lambda text: way(log, text))
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            assert silent.ask(request(), retry=ONCE).answer is not None
            assert stream.getvalue() == ""
            assert "UserWarning" not in capsys.readouterr().err
            with pytest.warns(UserWarning, match="hello"):
                silent.ask(request("hello", is_public=True), retry=ONCE)
        assert stream.getvalue() == "hello\n"

    async def test_that_an_async_call_sends_to_an_executor_log_nothing(self, stream: io.StringIO) -> None:
        class Sends(ScriptedChat):
            def _generate(self, messages: Any, *args: Any, **kwargs: Any) -> Any:
                LOG.debug("Request options: %s", messages[0].text)
                return super()._generate(messages, *args, **kwargs)

            async def _agenerate(self, messages: Any, *args: Any, **kwargs: Any) -> Any:
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(None, functools.partial(self._generate, messages, **kwargs))

        silent = silence(Sends(answer=ANSWERED))
        assert (await silent.aask(request(), retry=ONCE)).answer is not None
        assert "Request options" not in stream.getvalue()
        await silent.aask(request("hello", is_public=True), retry=ONCE)
        assert "Request options: hello" in stream.getvalue()

    def test_that_outlive_the_call_stay_silent(self, stream: io.StringIO) -> None:
        go, left = threading.Event(), []

        def wait_and_log(text: str) -> None:
            go.wait(60)
            LOG.critical(text)

        def leave(text: str) -> None:
            left.append(threading.Thread(target=wait_and_log, args=(text,)))
            left[-1].start()

        doing(leave).ask(request(), retry=ONCE)
        go.set()
        left[0].join()
        assert stream.getvalue() == ""

    def test_of_a_pool_work_for_others_afterwards(self, stream: io.StringIO) -> None:
        """The worker is started by the private call, and by the pool, not by the work."""
        with ThreadPoolExecutor(1) as pool:
            silent = doing(lambda text: pool.submit(LOG.critical, text).result())
            assert silent.ask(request(), retry=ONCE).answer is not None
            assert len(pool._threads) == 1
            pool.submit(LOG.critical, "mine").result()
            assert pool.submit(log_guard._CALL.get).result() is None
            assert pool.submit(lambda: INNER.invoke("hello").text).result() == VOTE
        assert stream.getvalue() == "mine\n"

    @pytest.mark.loopback
    @pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
    @pytest.mark.parametrize("way", [in_a_thread, in_a_timer, in_a_pool])
    def test_are_part_of_the_call_for_the_runs_they_start(self, way: Callable[..., None]) -> None:
        """In public too, where the text of the run is not the probe's, and a thread tells nobody that it failed."""
        silent = doing(lambda text: way(lambda text: INNER.invoke(text, {"callbacks": []}), text))
        seen = observe(lambda: silent.ask(request(), retry=ONCE))
        assert (seen.result, seen.error, leaks(seen)) == (Reply(fault="content"), None, set())
        assert leaks(observe(lambda: silent._model._generate([HumanMessage(RECORD)]))) >= {"debug output"}
        silent = doing(lambda text: way(lambda text: INNER.invoke("of another text"), text))
        with pytest.raises(UnsilencableModelError, match="starts LangChain runs of its own"):
            silent.ask(request("hello", is_public=True), retry=ONCE)

    @pytest.mark.parametrize("way", [in_a_thread, in_a_timer])
    def test_that_fail_show_their_error_only_in_public(
        self, monkeypatch: pytest.MonkeyPatch, way: Callable[..., None]
    ) -> None:
        shown: list[str] = []
        monkeypatch.setattr(threading, "excepthook", lambda info: shown.append(str(info.exc_value)))

        def fail(text: str) -> None:
            raise ValueError(text)

        silent = doing(lambda text: way(fail, text))
        assert silent.ask(request(), retry=ONCE).answer is not None
        assert shown == []
        silent.ask(request("hello", is_public=True), retry=ONCE)
        assert shown == ["hello"]

    def test_that_fail_are_unseen_by_who_wraps_what_runs_in_threads_later(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As error reporters do: they look at what `run` raises."""
        shown: list[str] = []
        silent = doing(lambda text: in_a_thread(int, text))
        silent.ask(request(), retry=ONCE)
        before = threading.Thread.start

        def start(thread: threading.Thread) -> None:
            inner = thread.run

            def run() -> None:
                try:
                    inner()
                except ValueError as error:
                    shown.append(str(error))

            thread.run = run  # type: ignore[method-assign]
            before(thread)

        monkeypatch.setattr(threading.Thread, "start", start)
        silent.ask(request(), retry=ONCE)
        assert shown == []
        silent.ask(request("hello", is_public=True), retry=ONCE)
        assert len(shown) == 1

    def test_are_freed_with_what_they_were_given_once_they_have_ended(self) -> None:
        ended: list[weakref.ref[threading.Thread]] = []

        def leave(text: str) -> None:
            thread = threading.Thread(target=len, args=(text,))
            ended.append(weakref.ref(thread))
            thread.start()
            thread.join()

        gc.disable()
        try:
            doing(leave).ask(request(), retry=ONCE)
            assert ended[0]() is None
        finally:
            gc.enable()

    def test_get_nothing_else_of_the_context(self) -> None:
        from langsmith.run_helpers import get_tracing_context

        found: list[Any] = []
        doing(lambda text: in_a_pool(lambda text: found.append(get_tracing_context()["enabled"]), text)).ask(
            request(), retry=ONCE
        )
        assert found == [None]

    def test_a_worker_s_frame_of_ours_names_no_argument_and_the_future_tells_the_model_what_failed(self) -> None:
        frames: list[set[str]] = []

        def send(text: str) -> None:
            with ThreadPoolExecutor(1) as pool:
                error = pool.submit(int, text).exception()
            assert isinstance(error, ValueError)
            trace = error.__traceback__
            while trace is not None:
                if trace.tb_frame.f_code.co_filename == log_guard.__file__:
                    frames.append({repr(value) for value in trace.tb_frame.f_locals.values()})
                trace = trace.tb_next

        assert doing(send).ask(request(), retry=ONCE).answer is not None
        assert len(frames) == 1
        assert RECORD not in str(frames)


class TestRegistries:
    @pytest.mark.parametrize("action", ["default", "module", "once"])
    @pytest.mark.parametrize("is_instance", [True, False])
    @pytest.mark.parametrize("stacklevel", [1, 2, 1000])
    def test_are_as_before_and_the_next_public_warning_shows(
        self, monkeypatch: pytest.MonkeyPatch, action: Any, stacklevel: int, *, is_instance: bool
    ) -> None:
        def warn(text: str) -> None:
            said: Any = UserWarning(text) if is_instance else text
            warnings.warn(said, None if is_instance else UserWarning, stacklevel=stacklevel)

        shown: list[str] = []
        silent = doing(warn)
        for place in PLACES:
            monkeypatch.delitem(place, "__warningregistry__", raising=False)
        with warnings.catch_warnings():
            warnings.simplefilter(action)
            monkeypatch.setattr(warnings, "showwarning", lambda message, *args, **kwargs: shown.append(str(message)))
            silent.ask(request("other", is_public=True), retry=ONCE)
            before = self.kept()
            silent.ask(request("odd"), retry=ONCE)
            assert shown == ["other"]
            assert self.kept() == before
            assert "other" in before
            for _ in range(2):
                silent.ask(request("odd", is_public=True), retry=ONCE)
            assert shown == ["other", "odd"]

    @staticmethod
    def kept() -> str:
        return str([place.get("__warningregistry__") for place in PLACES] + [warnings.onceregistry])  # type: ignore[attr-defined]

    def test_of_other_modules_keep_what_was_shown_in_public(self, monkeypatch: pytest.MonkeyPatch) -> None:
        kept = {("odd", UserWarning): True}
        monkeypatch.setitem(PLACES[0], "__warningregistry__", kept)
        elsewhere: dict[str, Any] = {"warnings": warnings}
        exec(compile("def warn(text): warnings.warn(text)", "elsewhere", "exec"), elsewhere)  # noqa: S102  another file's frame
        doing(elsewhere["warn"]).ask(request("odd"), retry=ONCE)
        assert kept == {("odd", UserWarning): True}
        assert "odd" not in str(elsewhere["__warningregistry__"])

    def test_forget_every_key_that_a_version_of_python_writes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Own(UserWarning):
            def __str__(self) -> str:
                return "in other words"

        keys = [(text, Own, *line) for text in ("odd", "in other words") for line in ((7,), (0,), ())]
        kept: dict[Any, Any] = dict.fromkeys(keys, True) | {("other", Own, 7): True}
        monkeypatch.setitem(PLACES[0], "__warningregistry__", kept)
        doing(lambda text: warnings.showwarning(Own(text), Own, __file__, 7)).ask(request("odd"), retry=ONCE)
        assert list(kept) == [("other", Own, 7)]


class TestTheGuards:
    @pytest.mark.parametrize("hook", log_guard._HOOKS, ids=lambda hook: f"{hook.owner.__name__}.{hook.name}")
    def test_do_not_pile_up_below_others_who_want_to_be_on_top(
        self, monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, hook: Any
    ) -> None:
        silent = doing(lambda text: in_a_pool(LOG.critical, text))
        ours: list[Any] = []
        depth = 0
        for _ in range(10):
            silent.ask(request(), retry=ONCE)
            present = getattr(hook.owner, hook.name)
            if present not in ours:
                depth += 1
                ours = [self.over(present)]
                monkeypatch.setattr(hook.owner, hook.name, ours[0])
        assert stream.getvalue() == ""
        assert depth == 1

    @staticmethod
    def over(inner: Any) -> Any:
        def theirs(*args: Any, **kwargs: Any) -> Any:
            return inner(*args, **kwargs)

        return theirs

    @pytest.mark.parametrize("hook", log_guard._HOOKS, ids=lambda hook: f"{hook.owner.__name__}.{hook.name}")
    def test_are_set_again_where_somebody_took_them_away(
        self, monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, hook: Any
    ) -> None:
        silent = doing(lambda text: [way(LOG.critical, text) for way in WAYS])
        silent.ask(request(), retry=ONCE)
        guarded = getattr(hook.owner, hook.name)
        original = guarded
        while hasattr(original, "__wrapped__"):
            original = original.__wrapped__
        for _ in range(2):
            monkeypatch.setattr(hook.owner, hook.name, original)
            silent.ask(request(), retry=ONCE)
            assert getattr(hook.owner, hook.name).__wrapped__ is original
            monkeypatch.setattr(hook.owner, hook.name, guarded)
            silent.ask(request(), retry=ONCE)
            assert getattr(hook.owner, hook.name) is guarded
        assert stream.getvalue() == ""

    def test_go_on_top_of_what_refuses_to_be_tried(self, monkeypatch: pytest.MonkeyPatch, stream: io.StringIO) -> None:
        def theirs(*args: Any, **kwargs: Any) -> None:
            raise ValueError

        silent = doing(LOG.critical)
        monkeypatch.setattr(logging.Logger, "handle", theirs)
        assert silent.ask(request(), retry=ONCE).answer is not None
        assert logging.Logger.handle is not theirs

    def test_withhold_records_made_by_other_means_than_the_factory(self, stream: io.StringIO) -> None:
        class Own(logging.Logger):
            def makeRecord(self, name: str, level: int, *args: Any, **kwargs: Any) -> logging.LogRecord:  # noqa: N802
                return logging.LogRecord(name, level, "", 0, *args[2:5])

        def log(text: str) -> None:
            own = Own("own")
            own.parent = logging.getLogger()
            own.critical(text)
            LOG.handle(logging.makeLogRecord({"msg": text, "levelno": logging.CRITICAL}))

        silent = doing(log)
        silent.ask(request(), retry=ONCE)
        assert stream.getvalue() == ""
        silent.ask(request("hello", is_public=True), retry=ONCE)
        assert stream.getvalue() == "hello\n" * 2

    def test_leave_the_caller_s_place_in_public_records(self, caplog: pytest.LogCaptureFixture) -> None:
        silence(INNER).ask(request(), retry=ONCE)
        LOG.critical("where", stack_info=True)
        (record,) = caplog.records
        assert record.funcName == "test_leave_the_caller_s_place_in_public_records"


class TestTheWatcher:
    def test_of_probes_runs_no_code_of_others(self) -> None:
        """Somebody's slow `__repr__` would hold up their run while we probe."""
        asked: list[str] = []

        class Slow:
            def __repr__(self) -> str:
                asked.append("repr")
                time.sleep(0.01)
                return RECORD

        call = log_guard.CallMark(withholds=False)
        with log_guard.watch_runs(call, "a probe"):
            INNER.invoke("hello", {"metadata": {"slow": Slow()}})
            log_guard._WATCHER.on_chain_start({}, {"slow": Slow(), "list": [Slow()], "said": "hello"}, metadata=Slow())
        assert (asked, call.tripped) == ([], False)

    @pytest.mark.parametrize(
        "inputs",
        [
            "this is a probe",
            {"messages": [HumanMessage("a probe")]},
            [[SystemMessage("x"), HumanMessage([{"type": "text", "text": "a probe"}])]],
            ("a probe",),
        ],
        ids=["text", "messages of a graph", "blocks", "tuple"],
    )
    def test_finds_a_probe_in_texts_and_messages(self, inputs: Any) -> None:
        for given in ({"inputs": inputs}, None):
            call = log_guard.CallMark(withholds=False)
            with log_guard.watch_runs(call, "a probe"):
                if given:
                    log_guard._WATCHER.on_tool_start({}, "", **given)
                else:
                    log_guard._WATCHER.on_chain_start({}, inputs)
            assert call.tripped

    @pytest.mark.parametrize("is_message", [True, False])
    def test_is_not_caught_in_what_holds_itself(self, *, is_message: bool) -> None:
        endless: list[Any] = ["hello"]
        endless.append(HumanMessage.model_construct(content=endless) if is_message else endless)
        call = log_guard.CallMark(withholds=False)
        with log_guard.watch_runs(call, "a probe"):
            log_guard._WATCHER.on_chain_start({}, endless)
        assert not call.tripped
