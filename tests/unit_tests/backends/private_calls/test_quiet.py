"""Nothing is logged or warned of by a private call, and no LangChain run starts inside one."""

from __future__ import annotations

import asyncio
import contextvars
import importlib
import inspect
import io
import logging
import logging.handlers
import queue
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import pytest
from langchain_core.callbacks import CallbackManager, StdOutCallbackHandler, manager
from langchain_core.callbacks.manager import trace_as_chain_group
from langchain_core.messages import HumanMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda
from langchain_core.tracers import context as tracers

from langchain_dpicl.backends.langchain.backend import LangChainBackend
from langchain_dpicl.backends.private_calls import log_guard
from langchain_dpicl.backends.private_calls.call import OpaqueValue, Reply, Request, RetryPolicy, SilentModel, silence
from langchain_dpicl.exceptions import UnsilencableModelError
from tests.canary import RECORD, VOTE, aobserve, canaries_in, leaks, observe
from tests.scripted_models import ScriptedChat, ScriptedLLM, fixed
from tests.unit_tests.backends.canned_provider import provider

ONCE = RetryPolicy(max_attempts=1)
ANSWERED = fixed({VOTE: 0.5, " plain": 0.25})
Explain = Literal["", "kind", "text"]


def request(text: str = RECORD, explain: Explain = "") -> Request:
    return Request(OpaqueValue(text), lambda prompt: [HumanMessage(prompt)], {}, explain=explain)


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """Everything that is logged, at any level, with what formatters add."""
    text = io.StringIO()
    root, handler = logging.getLogger(), logging.StreamHandler(text)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s %(extra)s", defaults={"extra": ""}))
    before = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield text
    root.removeHandler(handler)
    root.setLevel(before)


class Logging(ScriptedChat):
    """Logs its prompt in every way a record can carry it, as a careless SDK would."""

    def _generate(self, messages: Any, *args: Any, **kwargs: Any) -> Any:
        text, log = messages[0].text, logging.getLogger("careless.sdk")
        log.debug("Request options: %s", {"json_data": text})
        log.critical(text, extra={"extra": text}, stack_info=True)
        log.error("failed", exc_info=ValueError(text))
        return super()._generate(messages, *args, **kwargs)


class TestLogs:
    async def test_a_private_call_logs_nothing_sync_and_async(self, stream: io.StringIO) -> None:
        """The async call runs in a thread of LangChain's executor, to which the context is copied."""
        silent = silence(Logging(answer=ANSWERED))
        stream.truncate(0)
        stream.seek(0)  # the event loop logs its start
        assert silent.ask(request(), retry=ONCE).answer is not None
        assert (await silent.aask(request(), retry=ONCE)).answer is not None
        assert stream.getvalue() == ""
        silent._model._generate([HumanMessage(RECORD)])
        assert stream.getvalue().count(RECORD) >= 4

    @pytest.mark.parametrize("explain", ["kind", "text"])
    def test_a_public_call_logs_as_ever(self, stream: io.StringIO, explain: Explain) -> None:
        silence(Logging(answer=ANSWERED)).ask(request("hello", explain), retry=ONCE)
        assert "DEBUG Request options: {'json_data': 'hello'}" in stream.getvalue()
        assert "CRITICAL hello hello" in stream.getvalue()

    @pytest.mark.loopback
    @pytest.mark.parametrize("kind", ["ChatAnthropic", "ChatOpenAI"])
    async def test_the_debug_log_of_an_sdk_is_withheld(self, stream: io.StringIO, kind: str) -> None:
        with provider() as served:
            model = served.models[kind]()
            silent = silence(model)
            await asyncio.get_running_loop().run_in_executor(None, model.invoke, RECORD)
            naive = stream.getvalue()
            # OpenAI's SDK logs no bodies any more, but one line for each step of each call.
            sdk = importlib.import_module("anthropic" if kind == "ChatAnthropic" else "openai")
            logs_bodies = "Request options" in inspect.getsource(sdk._base_client)
            assert canaries_in(naive) == ([RECORD] if logs_bodies else [])
            assert logs_bodies or kind == "ChatOpenAI"
            assert "HTTP Request: POST" in naive
            stream.truncate(0)
            stream.seek(0)
            assert silent.ask(request(), retry=ONCE).answer is not None
            assert (await silent.aask(request(), retry=ONCE)).answer is not None
            written = [line for line in stream.getvalue().splitlines() if "HTTP" in line or canaries_in(line)]
            assert written == []
            assert [RECORD in body for body in served.bodies] == [True] * 3

    @pytest.mark.parametrize("is_chained", [True, False])
    def test_a_factory_that_another_library_sets_later_sees_nothing(
        self, stream: io.StringIO, monkeypatch: pytest.MonkeyPatch, is_chained: bool
    ) -> None:
        silent = silence(Logging(answer=ANSWERED))
        silent.ask(request(), retry=ONCE)
        seen: list[Any] = []
        before = logging.getLogRecordFactory() if is_chained else logging.LogRecord

        def theirs(*args: Any, **kwargs: Any) -> logging.LogRecord:
            seen.append((args, kwargs))
            record = before(*args, **kwargs)
            record.trace_id = "abc"
            return record

        monkeypatch.setattr(logging, "_logRecordFactory", theirs)
        silent.ask(request(), retry=ONCE)
        assert seen == []
        assert stream.getvalue() == ""
        silent.ask(request("hello", "kind"), retry=ONCE)
        assert len(seen) == 3
        assert stream.getvalue() != ""

    def test_handlers_of_every_level_queues_and_the_last_resort_get_no_record(
        self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        waiting: queue.Queue[Any] = queue.Queue()
        log = logging.getLogger("careless.sdk")
        monkeypatch.setattr(log, "handlers", [logging.handlers.QueueHandler(waiting)])
        caplog.set_level(logging.NOTSET, logger="careless.sdk")
        silent = silence(Logging(answer=ANSWERED))
        silent.ask(request(), retry=ONCE)
        assert (caplog.records, waiting.qsize()) == ([], 0)
        monkeypatch.setattr(log, "handlers", [])
        monkeypatch.setattr(log, "propagate", False)
        silent.ask(request(), retry=ONCE)
        assert capsys.readouterr().err == ""
        silent._model._generate([HumanMessage(RECORD)])
        assert RECORD in capsys.readouterr().err

    @pytest.mark.parametrize("on", ["logger", "handler"])
    def test_filters_see_neither_records_nor_their_number(self, monkeypatch: pytest.MonkeyPatch, on: str) -> None:
        seen: list[logging.LogRecord] = []
        log, handler = logging.getLogger("careless.sdk"), logging.StreamHandler(io.StringIO())
        target: Any = log if on == "logger" else handler
        monkeypatch.setattr(target, "filters", [lambda record: seen.append(record) or True])
        monkeypatch.setattr(log, "handlers", [handler])
        silent = silence(Logging(answer=ANSWERED))
        silent.ask(request(), retry=ONCE)
        assert seen == []
        silent.ask(request("hello", "kind"), retry=ONCE)
        assert "hello" in [record.getMessage() for record in seen]

    def test_what_others_log_meanwhile_is_shown(self, stream: io.StringIO) -> None:
        def log_elsewhere() -> None:
            thread = threading.Thread(target=logging.getLogger("app").warning, args=("from elsewhere",))
            thread.start()
            thread.join()

        class Waits(ScriptedChat):
            def _generate(self, *args: Any, **kwargs: Any) -> Any:
                contextvars.Context().run(log_elsewhere)
                return super()._generate(*args, **kwargs)

        silence(Waits(answer=ANSWERED)).ask(request(), retry=ONCE)
        logging.getLogger("app").warning("and after %s", "it")
        assert stream.getvalue() == "WARNING from elsewhere \nWARNING and after it \n"


class Warning_(ScriptedChat):  # noqa: N801
    """Warns of its prompt, as providers warn of models and parameters."""

    def _generate(self, messages: Any, *args: Any, **kwargs: Any) -> Any:
        warnings.warn(f"odd input: {messages[0].text}", UserWarning, stacklevel=2)
        return super()._generate(messages, *args, **kwargs)


class TestWarnings:
    @pytest.fixture(autouse=True)
    def _always(self) -> Iterator[None]:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            yield

    async def test_a_private_call_shows_no_warning(self, capsys: pytest.CaptureFixture[str]) -> None:
        warnings.showwarning = lambda *args, **kwargs: print(*args)
        silent = silence(Warning_(answer=ANSWERED))
        silent.ask(request(), retry=ONCE)
        await silent.aask(request(), retry=ONCE)
        assert capsys.readouterr().out == ""
        silent._model._generate([HumanMessage(RECORD)])
        assert "odd input: zx-record" in capsys.readouterr().out

    def test_a_public_call_warns_as_ever(self) -> None:
        with pytest.warns(UserWarning, match="odd input: hello"):
            silence(Warning_(answer=ANSWERED)).ask(request("hello", "kind"), retry=ONCE)

    def test_recorders_of_warnings_get_only_public_ones(self) -> None:
        silent = silence(Warning_(answer=ANSWERED))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            silent.ask(request(), retry=ONCE)
            warnings.warn("mine", DeprecationWarning, stacklevel=1)
        assert [str(one.message) for one in caught] == ["mine"]

    def test_warnings_that_go_to_the_log_do_not_go_there(self, stream: io.StringIO) -> None:
        silent = silence(Warning_(answer=ANSWERED))
        logging.captureWarnings(False)  # libraries turn it on when they are imported
        logging.captureWarnings(True)
        try:
            silent.ask(request(), retry=ONCE)
            shown = stream.getvalue()
            silent._model._generate([HumanMessage(RECORD)])
        finally:
            logging.captureWarnings(False)
        assert shown == ""
        assert RECORD in stream.getvalue()

    def test_a_warning_turned_into_an_error_is_the_row_s_fault(self) -> None:
        warnings.simplefilter("error")
        assert silence(Warning_(answer=ANSWERED)).ask(request(), retry=ONCE) == Reply(fault="content")


INNER = ScriptedChat(answer=ANSWERED)
COMPLETION = ScriptedLLM(answer=ANSWERED)


def graph() -> Any:
    from langgraph.graph import START, StateGraph

    built: Any = StateGraph(dict)
    built.add_node("ask", lambda state: {"said": str(state["text"])})
    built.add_edge(START, "ask")
    return built.compile()


def group(text: str) -> None:
    with trace_as_chain_group("group", inputs={"text": text}) as run:
        INNER.invoke(text, {"callbacks": run})


def in_a_thread(act: Callable[[], Any]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(act).result()


RUNS: dict[str, Callable[[str], Any]] = {
    "invoke": INNER.invoke,
    "invoke without callbacks": lambda text: INNER.invoke(text, {"callbacks": []}),
    "invoke with handlers of its own": lambda text: INNER.invoke(text, {"callbacks": [StdOutCallbackHandler()]}),
    "invoke with a manager of its own": lambda text: INNER.invoke(text, {"callbacks": CallbackManager([])}),
    "bound invoke": lambda text: INNER.bind(user="x").with_config(tags=["x"]).invoke(text, {"callbacks": []}),
    "batch": lambda text: INNER.batch([text, text], {"callbacks": []}),
    "stream": lambda text: list(INNER.stream(text, {"callbacks": []})),
    "generate": lambda text: INNER.generate([[HumanMessage(text)]], callbacks=[]),
    "completion": lambda text: COMPLETION.invoke(text, {"callbacks": []}),
    "completion batch": lambda text: COMPLETION.batch([text], {"callbacks": []}),
    "lambda": lambda text: RunnableLambda(str).invoke(text),
    "chain": (RunnableLambda(str) | INNER).invoke,
    "retries": lambda text: INNER.with_retry().invoke(text, {"callbacks": []}),
    "fallbacks": lambda text: INNER.with_fallbacks([COMPLETION]).invoke(text, {"callbacks": []}),
    "prompt template": lambda text: ChatPromptTemplate.from_template("{text}").invoke({"text": text}),
    "chain group": group,
    "graph": lambda text: graph().invoke({"text": text}),
}
AWAITED: dict[str, Callable[[str], Any]] = {
    "ainvoke": lambda text: INNER.ainvoke(text, {"callbacks": []}),
    "abatch": lambda text: INNER.abatch([text, text], {"callbacks": []}),
    "agenerate": lambda text: INNER.agenerate([[HumanMessage(text)]], callbacks=[]),
    "completion": COMPLETION.ainvoke,
    "lambda": lambda text: RunnableLambda(str).ainvoke(text),
    "retries": lambda text: INNER.with_retry().ainvoke(text, {"callbacks": []}),
    "graph": lambda text: graph().ainvoke({"text": text}),
    "gathered tasks": lambda text: asyncio.gather(INNER.ainvoke(text), INNER.ainvoke(text)),
    "a worker thread": lambda text: asyncio.to_thread(INNER.invoke, text),
}


def starting(runs: Callable[[str], Any], *, only_on: str = "", catches: bool = False) -> ScriptedChat:
    """A model that starts a run inside its call."""

    class Starting(ScriptedChat):
        def _generate(self, messages: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                if only_on in messages[0].text:
                    runs(messages[0].text)
            except Exception:
                if not catches:
                    raise
            return super()._generate(messages, *args, **kwargs)

    return Starting(answer=ANSWERED)


def awaiting(runs: Callable[[str], Any]) -> ScriptedChat:
    """Its async twin; the sync call starts nothing."""

    class Awaiting(ScriptedChat):
        async def _agenerate(self, messages: Any, *args: Any, **kwargs: Any) -> Any:
            await runs(messages[0].text)
            return await super()._agenerate(messages, *args, **kwargs)

    return Awaiting(answer=ANSWERED)


ADVICE = r"Starting starts LangChain runs of its own inside a call.*pass the inner model itself"


@pytest.mark.loopback
class TestRunsInside:
    """The naive call is the same model's own method, called as we call it: the run inside shows."""

    @pytest.mark.parametrize("name", RUNS)
    def test_are_refused_in_public_and_stopped_unseen_in_private(self, name: str) -> None:
        silent = silence(starting(RUNS[name]))
        with pytest.raises(UnsilencableModelError, match=ADVICE):
            silent.ask(request("hello", "text"), retry=ONCE)
        private = observe(lambda: silent.ask(request(), retry=ONCE))
        assert (private.result, private.error) == (Reply(fault="content"), None)
        assert leaks(private) == set()
        assert leaks(observe(lambda: silent._model._generate([HumanMessage(RECORD)]))) >= {"debug output"}

    @pytest.mark.parametrize("name", AWAITED)
    async def test_are_refused_and_stopped_when_they_are_awaited(self, name: str) -> None:
        silent = silence(awaiting(AWAITED[name]))
        with pytest.raises(UnsilencableModelError, match="starts LangChain runs of its own"):
            await silent.aask(request("hello", "kind"), retry=ONCE)
        private = await aobserve(lambda: silent.aask(request(), retry=ONCE))
        assert (private.result, private.error) == (Reply(fault="content"), None)
        assert leaks(private) == set()
        naive = await aobserve(lambda: silent._model._agenerate([HumanMessage(RECORD)]))
        assert leaks(naive) & {"debug output", "LangSmith"}

    @pytest.mark.parametrize("how", ["astream", "astream_events"])
    async def test_are_stopped_when_they_are_streamed(self, how: str) -> None:
        async def run(text: str) -> None:
            async for _ in getattr(INNER, how)(text, {"callbacks": []}):
                pass

        silent = silence(awaiting(run))
        private = await aobserve(lambda: silent.aask(request(), retry=ONCE))
        assert private.result == Reply(fault="content")
        assert leaks(private) == set()
        assert leaks(await aobserve(lambda: silent._model._agenerate([HumanMessage(RECORD)]))) >= {"debug output"}

    def test_are_found_though_the_model_catches_what_stops_them(self) -> None:
        silent = silence(starting(INNER.invoke, catches=True))
        with pytest.raises(UnsilencableModelError, match=ADVICE):
            silent.ask(request("hello", "kind"), retry=ONCE)
        assert silent.ask(request(), retry=ONCE) == Reply(fault="content")

    def test_of_a_model_that_is_hidden_from_the_fields_show_when_it_is_first_probed(self) -> None:
        with pytest.raises(UnsilencableModelError, match=ADVICE):
            LangChainBackend(starting(INNER.invoke), max_top_k=1)

    def test_that_only_a_private_prompt_starts_make_that_row_abstain_unseen(self) -> None:
        model = starting(INNER.invoke, only_on=RECORD)
        backend = LangChainBackend(model, max_top_k=1)
        seen = observe(lambda: backend.open([RECORD, "none"], []).score([VOTE.encode()]))
        assert seen.result.tolist() == [[0.0], [pytest.approx(0.5)]]
        assert leaks(seen) == set()

    def test_are_stopped_before_the_cache_is_asked(self) -> None:
        """Completion models look into the cache before they tell anybody of the run."""
        from langchain_core.caches import InMemoryCache
        from langchain_core.globals import set_llm_cache

        asked: list[str] = []

        class Cache(InMemoryCache):
            def lookup(self, prompt: str, llm_string: str) -> Any:
                asked.append(prompt)
                return super().lookup(prompt, llm_string)

        silent = silence(starting(COMPLETION.invoke))
        set_llm_cache(Cache())
        try:
            silent.ask(request(), retry=ONCE)
            assert asked == []
            silent._model._generate([HumanMessage(RECORD)])
            assert asked == [RECORD]
        finally:
            set_llm_cache(None)

    async def test_in_threads_that_lose_the_context_are_found_by_the_text_of_a_probe(self) -> None:
        run = contextvars.Context().run
        silent = silence(starting(lambda text: run(in_a_thread, lambda: INNER.invoke(text, {"callbacks": []}))))
        with pytest.raises(UnsilencableModelError, match=ADVICE):
            silent.ask(request("a probe", "text"), retry=ONCE)
        with pytest.raises(UnsilencableModelError, match=ADVICE):
            await silent.aask(request("a probe", "text"), retry=ONCE)
        assert log_guard._WATCHED == []

    def test_of_others_are_left_alone_and_do_not_count(self) -> None:
        """Another thread's chain runs while a probe and a private call are under way."""
        others: list[Any] = []

        def meanwhile_elsewhere() -> None:
            contextvars.Context().run(in_a_thread, lambda: others.append(INNER.invoke("another text")))

        meanwhile = starting(lambda text: meanwhile_elsewhere())
        silent = silence(meanwhile)
        assert silent.ask(request("a probe", "text"), retry=ONCE).answer is not None
        assert silent.ask(request(), retry=ONCE).answer is not None
        assert [one.text for one in others] == [VOTE] * 2
        assert INNER.invoke("afterwards").text == VOTE


class TestTheHooks:
    def test_are_set_again_where_somebody_took_them_away(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tracers, "_configure_hooks", [])
        assert silence(starting(INNER.invoke)).ask(request(), retry=ONCE) == Reply(fault="content")
        assert [hook[0] for hook in tracers._configure_hooks] == [log_guard._TRIPWIRE]

    def test_are_set_once(self) -> None:
        silent = silence(ScriptedChat(answer=ANSWERED))
        for _ in range(3):
            silent.ask(request(), retry=ONCE)
        assert [hook[0] for hook in tracers._configure_hooks].count(log_guard._TRIPWIRE) == 1
        assert type(warnings.showwarning) is log_guard._ShowWarning

    @pytest.mark.parametrize("explain", ["", "kind"])
    def test_that_langchain_does_not_ask_are_a_public_error(
        self, monkeypatch: pytest.MonkeyPatch, explain: Explain
    ) -> None:
        silent = silence(ScriptedChat(answer=ANSWERED))
        monkeypatch.setattr(manager, "_configure", lambda kind, *args, **kwargs: kind([]))
        with pytest.raises(UnsilencableModelError, match="expected LangChain to ask its configure hooks"):
            silent.ask(request(explain=explain), retry=ONCE)
        monkeypatch.undo()
        assert silent.ask(request(explain=explain), retry=ONCE).answer is not None

    def test_a_call_leaves_no_mark_on_its_caller(self) -> None:
        silent: SilentModel = silence(ScriptedChat(answer=ANSWERED))
        silent.ask(request(), retry=ONCE)
        assert log_guard._CALL.get() is None
        assert INNER.invoke("hello").text == VOTE
