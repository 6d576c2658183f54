"""Private calls are seen by nobody, fail in silence, and wait for what is worth waiting for."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import gc
import importlib
import inspect
import json
import logging
import pickle
import time
import warnings
from collections.abc import Iterator
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from langchain_core.language_models import BaseChatModel, BaseLLM, FakeListChatModel
from langchain_core.messages import HumanMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.rate_limiters import InMemoryRateLimiter
from langchain_core.runnables import RunnableLambda, RunnableSerializable
from langchain_core.runnables.config import ensure_config
from langsmith import traceable
from pydantic import Field

from langchain_dpicl.backends.langchain.backend import LangChainBackend
from langchain_dpicl.backends.private_calls import call as silent
from langchain_dpicl.backends.private_calls.call import (
    ClassifiedError,
    OpaqueValue,
    ProbePolicy,
    Reply,
    Request,
    RetryPolicy,
    classify_error,
    read_silently,
    silence,
    unwrap,
)
from langchain_dpicl.exceptions import ConfigurationError, PrivateAccessError, UnsilencableModelError
from tests.canary import CHANNELS, RECORD, VOTE, Recorder, aobserve, canaries_in, describe, leaks, observe
from tests.scripted_models import ScriptedChat, ScriptedLLM, StatusError, by_word, fixed
from tests.unit_tests.backends.canned_provider import Provider, provider

TICKET = "Ticket:"
PROMPT = f"{TICKET} {RECORD}"
DOMAIN = [VOTE.encode(), b" plain"]
ANSWERS = by_word({RECORD: {VOTE: 0.5, " plain": 0.25}}, {" plain": 1.0})
QUICK = RetryPolicy(first_wait=0.001, max_wait=0.001)


def models(recorder: Recorder) -> dict[str, Any]:
    chat = ScriptedChat(answer=ANSWERS, callbacks=[recorder], verbose=True)
    return {
        "chat": chat,
        "bound chat": chat.bind(user="someone").with_config(tags=["x"]),
        "retrying chat": chat.with_retry(),
        "completion": ScriptedLLM(answer=ANSWERS, callbacks=[recorder], verbose=True),
    }


KINDS = tuple(models(Recorder()))


class Shown(int):
    """A status that shows itself as another text than its number, as members of some enumerations do."""

    def __str__(self) -> str:
        return f"Status.{int(self)}"


@pytest.mark.loopback
class TestNobodySeesAPrivateCall:
    """Each channel is shown to work: the ordinary call is seen on it, in the same net."""

    @pytest.mark.parametrize("kind", KINDS)
    async def test_blocking_and_awaited(self, kind: str) -> None:
        recorder = Recorder()
        backend = LangChainBackend(models(recorder)[kind], max_top_k=1)
        recorder.lines.clear()
        for seen in (
            observe(lambda: backend.open([PROMPT, "none"], []).score(DOMAIN), model_recorder=recorder),
            await aobserve(lambda: backend.open([PROMPT, "none"], []).ascore(DOMAIN), model_recorder=recorder),
        ):
            assert seen.result == pytest.approx(np.array([[0.5, 0.25], [0.0, 1.0]]))
            assert leaks(seen) == set()

    @pytest.mark.parametrize("kind", ["chat", "bound chat"])
    async def test_the_ordinary_call_is_seen_on_every_channel(self, kind: str) -> None:
        recorder = Recorder()
        model = models(recorder)[kind]
        seen = observe(lambda: model.invoke(PROMPT), model_recorder=recorder)
        assert leaks(seen) == set(CHANNELS) - {"astream_events"}
        seen = await aobserve(lambda: model.ainvoke(PROMPT), model_recorder=recorder)
        assert leaks(seen) == set(CHANNELS)

    async def test_the_ordinary_call_is_seen_even_without_callbacks(self) -> None:
        seen = await aobserve(lambda: ScriptedChat(answer=ANSWERS).ainvoke(PROMPT, {"callbacks": []}))
        assert leaks(seen) >= {"debug output", "global cache", "usage callback", "LangSmith"}

    @pytest.mark.parametrize("status", [400, 429])
    async def test_a_failing_call_is_seen_nowhere_and_abstains(self, status: int) -> None:
        recorder = Recorder()
        raises = {TICKET: lambda text: StatusError(text + VOTE, status_code=status)}
        model = ScriptedChat(answer=ANSWERS, raises=raises, callbacks=[recorder])
        backend = LangChainBackend(model, max_top_k=1, retry=QUICK)
        recorder.lines.clear()
        session = backend.open([PROMPT, "none"], [])
        for seen in (
            observe(lambda: session.score(DOMAIN), model_recorder=recorder),
            await aobserve(lambda: session.ascore(DOMAIN), model_recorder=recorder),
        ):
            assert seen.result.tolist() == [[0.0, 0.0], [0.0, 1.0]]
            assert seen.error is None
            assert leaks(seen) == set()
        naive = observe(lambda: model.invoke(PROMPT), model_recorder=recorder)
        assert leaks(naive) >= {"exception", "config callbacks", "model callbacks", "LangSmith", "debug output", "logs"}

    async def test_a_model_that_traces_inside_is_silent_too(self) -> None:
        """Tracing off is needed here: nothing else stops what LangSmith's decorators start inside the model."""

        @traceable
        def inside(text: str) -> str:
            return text

        class Traced(ScriptedChat):
            def _generate(self, messages: Any, *args: Any, **kwargs: Any) -> Any:
                inside(messages[0].text)
                return super()._generate(messages, *args, **kwargs)

        model = Traced(answer=ANSWERS)
        session = LangChainBackend(model, max_top_k=1).open([PROMPT], [])
        alone = silence(model)  # in this very thread, where the caller's context is
        seen = [
            observe(lambda: session.score(DOMAIN)),
            observe(lambda: alone.ask(request(), retry=QUICK)),
            await aobserve(lambda: session.ascore(DOMAIN)),
        ]
        assert [leaks(one) for one in seen] == [set()] * 3
        naive = await aobserve(lambda: model._agenerate([HumanMessage(PROMPT)]))
        assert leaks(naive) >= {"LangSmith"}

    async def test_the_empty_context_hides_a_private_call_from_what_asks_for_its_config(self) -> None:
        """A model that calls the handlers of its config by hand, which no tripwire sees, finds none."""

        class Nosy(ScriptedChat):
            def _generate(self, messages: Any, *args: Any, **kwargs: Any) -> Any:
                callbacks = ensure_config()["callbacks"]
                for handler in getattr(callbacks, "handlers", ()):
                    if isinstance(handler, Recorder):
                        handler.lines.append(messages[0].text)
                return super()._generate(messages, *args, **kwargs)

        model = Nosy(answer=ANSWERS)
        alone = silence(model)
        assert leaks(observe(lambda: alone.ask(request(), retry=QUICK))) == set()
        assert leaks(await aobserve(lambda: alone.aask(request(), retry=QUICK))) == set()
        assert leaks(observe(lambda: model._generate([HumanMessage(PROMPT)]))) >= {"config callbacks"}

    def test_a_public_failure_shows_no_private_text_either(self) -> None:
        model = ScriptedChat(answer=ANSWERS, raises={"public": StatusError("offline", status_code=400)})
        backend = LangChainBackend(model, max_top_k=1, retry=QUICK)
        session = backend.open([PROMPT], [])
        session.score(DOMAIN)
        seen = observe(lambda: backend.top_tokens("public", [], top_k=1))
        # Not the provider's text: it may quote what private calls used up.
        assert "StatusError (HTTP 400)" in str(seen.error)
        assert "offline" not in str(seen.error)
        assert leaks(seen) == set()


def request(text: str = PROMPT, **options: Any) -> Request:
    return Request(OpaqueValue(text), lambda prompt: [HumanMessage(prompt)], options)


def chat(**options: Any) -> ScriptedChat:
    return ScriptedChat(answer=fixed({"a": 1.0}), **options)


class TestStops:
    """Interruptions go on, without the frames and contexts they came through."""

    @pytest.mark.parametrize("stray", [SystemExit, GeneratorExit, asyncio.CancelledError])
    async def test_what_only_looks_like_a_stop_is_the_row_s_own_fault(self, stray: type[BaseException]) -> None:
        model = silence(chat(raises={TICKET: stray}))
        assert model.ask(request(), retry=QUICK) == Reply(fault="content")
        assert await model.aask(request(), retry=QUICK) == Reply(fault="content")

    def test_an_interrupt_carries_nothing(self) -> None:
        model = silence(chat(raises={TICKET: lambda text: KeyboardInterrupt(text + VOTE)}))
        with pytest.raises(KeyboardInterrupt) as caught:
            model.ask(request(), retry=QUICK)
        assert not [canary for canary in (RECORD, VOTE) if canary in describe(caught.value)]
        assert caught.value.__context__ is None

    @pytest.mark.parametrize("stray", [SystemExit, asyncio.CancelledError, KeyError, KeyboardInterrupt])
    async def test_an_exception_that_raises_when_it_is_looked_at_takes_nothing_along(
        self, stray: type[BaseException]
    ) -> None:
        class Hostile(Exception):  # noqa: N818  its name is not the point
            @property
            def status_code(self) -> int:
                raise stray(RECORD)

        model = silence(chat(raises={TICKET: Hostile}))
        if stray is not KeyboardInterrupt:
            assert model.ask(request(), retry=QUICK) == Reply(fault="content")
            assert await model.aask(request(), retry=QUICK) == Reply(fault="content")
            return
        with pytest.raises(KeyboardInterrupt) as caught:
            model.ask(request(), retry=QUICK)
        assert canaries_in(describe(caught.value)) == []
        assert caught.value.__context__ is None

    def test_an_interrupt_while_a_failure_is_looked_at_carries_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupted(error: BaseException, **asked: Any) -> Reply:
            raise KeyboardInterrupt

        model = silence(chat(raises={TICKET: ValueError}))
        monkeypatch.setattr(silent, "_outcome", interrupted)
        with pytest.raises(KeyboardInterrupt) as caught:
            model.ask(request(), retry=QUICK)
        assert canaries_in(describe(caught.value)) == []
        assert caught.value.__context__ is None

    async def test_a_call_that_cancels_itself_is_its_row_s_own_fault(self) -> None:
        class Quits(ScriptedChat):
            async def _agenerate(self, messages: Any, *args: Any, **kwargs: Any) -> Any:
                task = asyncio.current_task()
                assert task is not None
                if TICKET in str(messages):
                    task.cancel()
                    await asyncio.sleep(1)
                return self._generate(messages, *args, **kwargs)

        assert await silence(Quits(answer=fixed({}))).aask(request(), retry=QUICK) == Reply(fault="content")

    @pytest.mark.parametrize("kind", [asyncio.CancelledError, ConnectionError])
    async def test_a_cancellation_is_one_whatever_the_call_answers_and_carries_nothing(
        self, kind: type[BaseException]
    ) -> None:
        class Slow(ScriptedChat):
            async def _agenerate(self, messages: Any, *args: Any, **kwargs: Any) -> Any:
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError as error:
                    raise kind(messages) from (error if kind is asyncio.CancelledError else None)

        task = asyncio.create_task(silence(Slow(answer=fixed({}))).aask(request(), retry=QUICK))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError) as caught:
            await task
        assert RECORD not in describe(caught.value)

    async def test_the_event_loop_s_own_debug_log_shows_nothing(self, caplog: pytest.LogCaptureFixture) -> None:
        """It writes out tasks, their results and what they wait for; the naive task shows that it does."""

        def hold() -> None:
            time.sleep(0.02)

        class Slow(ScriptedChat):
            async def _agenerate(self, messages: Any, *args: Any, **kwargs: Any) -> Any:
                hold()
                reply = await super()._agenerate(messages, *args, **kwargs)
                hold()
                return reply

        async def naive(text: str) -> str:
            hold()
            return text

        loop = asyncio.get_running_loop()
        before = loop.get_debug(), loop.slow_callback_duration
        loop.set_debug(True)
        loop.slow_callback_duration = 0.01
        caplog.set_level("DEBUG")
        try:
            await silence(Slow(answer=fixed({VOTE: 1.0}))).aask(request(), retry=QUICK)
            shown, ours = caplog.text, caplog.text.count("Executing")
            await asyncio.create_task(naive(RECORD))
        finally:
            loop.set_debug(before[0])
            loop.slow_callback_duration = before[1]
        assert ours >= 2
        assert not canaries_in(shown)
        assert canaries_in(caplog.text) == [RECORD]

    def test_an_unknown_base_exception_abstains(self) -> None:
        class Strange(BaseException):
            pass

        assert silence(chat(raises={TICKET: Strange()})).ask(request(), retry=QUICK).fault == "content"

    def test_text_that_cannot_become_a_message_abstains(self) -> None:
        broken = Request(OpaqueValue(RECORD + "\ud800"), lambda prompt: str(prompt.encode()), {})
        assert silence(chat()).ask(broken, retry=QUICK).fault == "content"

    def test_an_exception_whose_attributes_raise_abstains(self) -> None:
        class HostileError(Exception):
            @property
            def status_code(self) -> int:
                raise RuntimeError(RECORD)

        assert silence(chat(raises={TICKET: HostileError()})).ask(request(), retry=QUICK).fault == "content"

    def test_a_result_without_generations_abstains(self) -> None:
        class Empty(ScriptedChat):
            def _generate(self, *args: Any, **kwargs: Any) -> Any:
                return None

        assert silence(Empty(answer=fixed({}))).ask(request(), retry=QUICK).fault == "content"

    def test_no_frame_of_ours_keeps_the_prompt_alive(self) -> None:
        class Text(str):
            __slots__ = ()

        silence(chat(raises={TICKET: lambda text: StatusError(text, status_code=400)})).ask(
            request(Text(PROMPT)), retry=QUICK
        )
        gc.collect()
        assert not [item for item in gc.get_objects() if type(item) is Text]


class TestWaiting:
    @pytest.mark.parametrize(
        "error", [StatusError("x", status_code=code) for code in (408, 409, 425, 429, 500, 503, 529)]
    )
    def test_busy_servers_are_waited_out(self, error: Exception) -> None:
        model = chat(raises={TICKET: error}, times={TICKET: 3})
        reply = silence(model).ask(request(), retry=QUICK)
        assert reply.answer is not None
        assert len(model.seen) == 4

    @pytest.mark.parametrize(
        "error", [TimeoutError(), ConnectionResetError(), type("APITimeoutError", (Exception,), {})()]
    )
    async def test_timeouts_and_connections_are_waited_out(self, error: Exception) -> None:
        model = chat(raises={TICKET: error}, times={TICKET: 1})
        assert (await silence(model).aask(request(), retry=QUICK)).answer is not None

    @pytest.mark.parametrize("name", ["ConnectError", "ReadError", "RemoteProtocolError", "ReadTimeout", "ProxyError"])
    def test_a_connection_that_httpx_itself_lost_is_asked_for_again(self, name: str) -> None:
        """ChatOllama streams, and its client passes these on as they are."""
        model = chat(raises={TICKET: getattr(httpx, name)("lost")}, times={TICKET: 1})
        assert silence(model).ask(request(), retry=QUICK).answer is not None

    @pytest.mark.parametrize("name", ["LocalProtocolError", "UnsupportedProtocol", "DecodingError"])
    def test_a_request_that_httpx_cannot_make_is_final(self, name: str) -> None:
        model = chat(raises={TICKET: getattr(httpx, name)("wrong")})
        assert silence(model).ask(request(), retry=QUICK).fault == "content"

    @pytest.mark.parametrize(("status", "fault"), [(429, "busy"), (503, "busy"), (400, "content")])
    def test_a_status_is_found_where_each_client_puts_it(self, status: int, fault: str) -> None:
        """botocore's response is a dict and its classes are named by the service; Google's is `code`."""
        made = {"HTTPStatusCode": status, "HTTPHeaders": {"retry-after": "3"}}
        for places in (
            {"response": {"ResponseMetadata": made}},
            {"code": HTTPStatus(status)},
            {"code": Shown(status)},
            {"status": status},
            {"code": "rate_limit", "status_code": status},
            {"code": str(status)},  # as LiteLLM writes it
        ):
            error = type("ServiceError", (Exception,), places)("x")
            after = 3.0 if "response" in places else None
            assert classify_error(error, explain="") == ClassifiedError(fault, after)  # type: ignore[arg-type]
            (told := Exception("of LangChain's class for Google")).__cause__ = error
            assert classify_error(told, explain="") == ClassifiedError(fault, after)  # type: ignore[arg-type]
            (handled := Exception("of another fault")).__context__ = error
            assert classify_error(handled, explain="") == ClassifiedError("content")
        for code in (status, str(status)):  # of a reply of status 200, by LangChain's classes for OpenAI
            body = ValueError({"message": "x", "code": code})
            assert classify_error(body, explain="") == ClassifiedError(fault)  # type: ignore[arg-type]

    def test_a_number_that_is_no_status_of_a_failure_leaves_it_to_the_name(self) -> None:
        """The number of the system's error, or the status of a reply that never ended."""
        for places in ({"code": 111}, {"status": 200}, {"code": "4xx"}, {"code": "5000"}):
            error = type("ServerConnectionError", (Exception,), places)("x")
            assert classify_error(error, explain="").fault == "busy"

    @pytest.mark.parametrize(
        "error", [StatusError("x", status_code=400), StatusError("x", status_code=422), ValueError("x")]
    )
    def test_content_errors_are_final(self, error: Exception) -> None:
        model = chat(raises={TICKET: error})
        assert silence(model).ask(request(), retry=QUICK) == Reply(fault="content")
        assert len(model.seen) == 1

    def test_waiting_ends_and_the_row_abstains(self) -> None:
        model = chat(raises={TICKET: StatusError("x", status_code=429)})
        assert silence(model).ask(request(), retry=QUICK).fault == "busy"
        assert len(model.seen) == QUICK.max_attempts

    @pytest.mark.parametrize(
        "complaint",
        ["Event loop is closed", "unable to perform operation on <TCPTransport closed=True>; the handler is closed"],
    )
    async def test_an_async_client_of_another_event_loop_is_replaced_by_the_blocking_one(self, complaint: str) -> None:
        class Lost(ScriptedChat):
            async def _agenerate(self, *args: Any, **kwargs: Any) -> Any:
                self.seen.append({"awaited": True})
                raise RuntimeError(complaint)

        model = Lost(answer=fixed({"a": 1.0}), raises={TICKET: StatusError("x", status_code=503)}, times={TICKET: 2})
        policy = RetryPolicy(max_attempts=3, first_wait=0.0, max_wait=0.0)  # as many as blocking calls take
        assert (await silence(model).aask(request(), retry=policy)).answer is not None
        assert model.seen == [{"awaited": True}, {}, {}, {}]

    async def test_the_loop_s_complaint_is_found_under_the_connection_error_of_an_sdk(self) -> None:
        class Lost(ScriptedChat):
            async def _agenerate(self, *args: Any, **kwargs: Any) -> Any:
                raise ConnectionError("Connection error.") from RuntimeError("Event loop is closed")

        policy = RetryPolicy(max_attempts=2, first_wait=600.0, max_wait=600.0)  # a busy server would be waited for
        started = time.monotonic()
        reply = await silence(Lost(answer=fixed({"a": 1.0}))).aask(request(), retry=policy)
        assert reply.answer is not None
        assert time.monotonic() - started < 300.0

    async def test_an_answer_that_cannot_be_read_is_asked_for_again_and_then_given(self) -> None:
        model = chat()
        again = Request(
            OpaqueValue(PROMPT), lambda prompt: [HumanMessage(prompt)], {}, lambda answer: len(model.seen) >= 3
        )
        assert silence(model).ask(again, retry=QUICK).fault is None
        assert len(model.seen) == 3
        never = Request(OpaqueValue(PROMPT), lambda prompt: [HumanMessage(prompt)], {}, lambda answer: False)
        reply = await silence(model).aask(never, retry=QUICK)
        assert (reply.fault, len(model.seen)) == ("unreadable", 3 + QUICK.max_attempts)
        assert reply.answer is not None

    def test_each_row_has_its_own_patience(self) -> None:
        model = chat(
            raises={"bad": StatusError("x", status_code=429), "slow": StatusError("x", status_code=429)},
            times={"slow": 5},
        )
        rows = LangChainBackend(model, max_top_k=1, retry=QUICK).open(["bad", "slow", "good"], []).score([b"a"])
        assert rows.tolist() == [[0.0], [1.0], [1.0]]

    def test_waits_grow_follow_the_provider_and_stay_bounded(self) -> None:
        policy, busy = RetryPolicy(max_attempts=6), Reply(fault="busy")
        assert [policy.wait(busy, attempt=i) for i in range(1, 6)] == [0.5, 1.0, 2.0, 4.0, 8.0]
        assert policy.wait(busy, attempt=6) is None
        assert policy.wait(Reply(fault="busy", retry_after=7.0), attempt=1) == 7.0
        assert policy.wait(Reply(fault="busy", retry_after=1e9), attempt=1) == 30.0
        assert policy.wait(Reply(fault="content"), attempt=1) is None
        assert policy.wait(Reply(fault="unreadable"), attempt=5) == 0.0

    def test_a_probe_asks_a_busy_server_twice_and_keeps_the_rest_of_the_patience(self) -> None:
        probe = ProbePolicy.of(RetryPolicy(max_attempts=6, first_wait=0.25))
        busy, unreadable = Reply(fault="busy", retry_after=90.0), Reply(fault="unreadable")
        assert [probe.wait(busy, attempt=attempt) for attempt in (1, 2)] == [2.0, None]
        assert probe.wait(Reply(fault="busy"), attempt=1) == 0.25
        assert [probe.wait(unreadable, attempt=attempt) for attempt in (1, 5, 6)] == [0.0, 0.0, None]
        assert ProbePolicy.of(RetryPolicy(max_attempts=1)).wait(busy, attempt=1) is None

    def test_the_providers_wish_is_read_from_the_response(self) -> None:
        error = StatusError("x", status_code=429)
        error.response = type("Response", (), {"headers": {"retry-after": "0"}, "status_code": 429})()  # type: ignore[attr-defined]
        assert (
            silence(chat(raises={TICKET: error})).ask(request(), retry=RetryPolicy(max_attempts=1)).retry_after == 0.0
        )

    @pytest.mark.parametrize("wrong", [{"max_attempts": 0}, {"first_wait": -1.0}, {"max_wait": float("nan")}])
    def test_impossible_patience_is_refused(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(ConfigurationError, match="max_attempts"):
            RetryPolicy(**wrong)

    async def test_the_models_rate_limiter_is_honoured(self) -> None:
        limiter = InMemoryRateLimiter(requests_per_second=50, check_every_n_seconds=0.005, max_bucket_size=1)
        model = silence(chat(rate_limiter=limiter))
        started = time.monotonic()
        for _ in range(4):
            model.ask(request(), retry=QUICK)
        for _ in range(4):
            await model.aask(request(), retry=QUICK)
        assert time.monotonic() - started >= 7 / 50 * 0.9


class TestSilence:
    def test_the_given_model_is_left_as_it_is(self) -> None:
        recorder = Recorder()
        model = chat(callbacks=[recorder], verbose=True, cache=True)
        quiet = silence(model)._model
        assert (quiet.callbacks, quiet.verbose, quiet.cache) == (None, False, False)
        assert model.callbacks == [recorder]
        assert model.verbose
        assert model.cache is True

    def test_bindings_are_unwrapped_and_the_outermost_argument_wins(self) -> None:
        model = chat()
        bound = model.bind(a=1, b=1).with_config(tags=["x"]).bind(b=2).with_retry()
        assert unwrap(bound) == (model, {"a": 1, "b": 2})
        silence(bound).ask(request(c=3), retry=QUICK)
        assert model.seen == [{"a": 1, "b": 2, "c": 3}]

    def test_arguments_that_would_change_the_answers_shape_are_dropped(self) -> None:
        model = chat()
        silence(model.bind(stop=["x"], stop_sequences=["x"], n=3, stream=True, seed=7)).ask(request(), retry=QUICK)
        assert model.seen == [{"seed": 7}]

    def test_switches_of_the_model_are_set_for_one_plain_answer(self) -> None:
        class Switches(ScriptedChat):
            streaming: bool = True
            n: int = 3
            use_responses_api: bool | None = None
            stop: list[str] | None = Field(default_factory=lambda: ["\n"])

        class Sees(Switches):
            def _generate(self, *args: Any, **kwargs: Any) -> Any:
                self.seen.append({"state": (self.streaming, self.n, self.use_responses_api, self.stop)})
                return super()._generate(*args, **kwargs)

        model = Sees(answer=fixed({"a": 1.0}))
        silence(model).ask(request(), retry=QUICK)
        assert model.seen[0] == {"state": (False, 1, False, [])}

    def test_stop_strings_of_the_model_are_left_out_under_either_name(self) -> None:
        class Endpoint(ScriptedChat):
            stop_sequences: list[str] = Field(default_factory=list)

        class Anthropic(ScriptedChat):
            stop_sequences: list[str] | None = Field(None, alias="stop")

        answer = fixed({"a": 1.0})
        endpoint = Endpoint(answer=answer, stop_sequences=["\n"])
        models = [endpoint, *(Anthropic(answer=answer, stop=stop) for stop in (["\n"], None))]
        assert [silence(model)._model.stop_sequences for model in models] == [[], [], None]
        assert endpoint.stop_sequences == ["\n"]

    @pytest.mark.parametrize(
        "what",
        [
            chat() | RunnableLambda(str),
            ChatPromptTemplate.from_template("{x}"),
            chat().with_fallbacks([chat()]),
            RunnableLambda(str),
            "a model name",
            None,
        ],
        ids=["chain", "prompt", "fallbacks", "lambda", "text", "none"],
    )
    def test_what_is_no_model_is_refused(self, what: Any) -> None:
        with pytest.raises(UnsilencableModelError, match="expected a chat or completion model"):
            silence(what)

    def test_a_model_around_another_runnable_is_refused(self) -> None:
        class Wrapper(ScriptedChat):
            inner: Any = None
            many: Any = None

        for fields in ({"inner": chat()}, {"many": [chat()]}, {"many": {"a": chat()}}, {"inner": Recorder()}):
            with pytest.raises(UnsilencableModelError, match="pass the inner model itself"):
                silence(Wrapper(answer=fixed({}), **fields))

    def test_a_model_that_overrides_the_caching_step_is_refused(self) -> None:
        class Overriding(ScriptedChat):
            async def _agenerate_with_cache(self, *args: Any, **kwargs: Any) -> Any:
                return await super()._agenerate_with_cache(*args, **kwargs)

        with pytest.raises(UnsilencableModelError, match="_agenerate_with_cache"):
            silence(Overriding(answer=fixed({})))

    def test_stock_models_are_silenced(self) -> None:
        reply = silence(FakeListChatModel(responses=["yes"])).ask(request(), retry=QUICK)
        assert reply.answer is not None
        assert reply.answer.reveal().text == "yes"


def decision_request(text: str = PROMPT, **options: Any) -> Request:
    questions = {"label": decisions().Choice(instructions="Which?", choices={VOTE: None, "plain": None})}
    return Request(OpaqueValue(text), lambda prompt: {"input": prompt, "questions": questions}, options)


def decisions() -> Any:
    return pytest.importorskip("langchain_openai.decisions", reason="this langchain-openai has no decisions")


@pytest.fixture(scope="module")
def served() -> Iterator[Provider]:
    with provider() as running:
        yield running


@pytest.fixture(scope="module")
def built(served: Provider) -> Any:
    decisions()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is in beta
        return served.models["OpenAIDecisions"]()


@pytest.mark.loopback
class TestDecisions:
    @pytest.fixture
    def model(self, served: Provider, built: Any) -> Any:
        served.bodies.clear()
        return built

    async def test_the_whole_response_is_the_answer_sync_and_async(self, model: Any, served: Provider) -> None:
        silent = silence(model)
        assert (silent.kind, silent.is_chat, silent.name) == ("decisions", False, "m")
        for reply in (
            silent.ask(decision_request(), retry=QUICK),
            await silent.aask(decision_request(), retry=QUICK),
        ):
            assert reply.fault is None
            assert reply.answer is not None
            decision = reply.answer.reveal().decision
            assert decision.choices["label"].probabilities == {VOTE: 0.75, "plain": 0.25}
            assert VOTE not in f"{reply} {reply.answer} {reply.answer.reveal()}"
        assert [json.loads(body)["input"] for body in served.bodies] == [PROMPT] * 2

    async def test_nobody_sees_a_private_decision(self, model: Any) -> None:
        silent = silence(model)
        assert leaks(observe(lambda: silent.ask(decision_request(), retry=QUICK))) == set()
        assert leaks(await aobserve(lambda: silent.aask(decision_request(), retry=QUICK))) == set()
        asked = decision_request().render(PROMPT)
        assert leaks(observe(lambda: model.invoke(asked))) >= {"run collector", "LangSmith"}
        assert leaks(await aobserve(lambda: model.ainvoke(asked))) >= {"astream_events", "run collector"}

    def test_retries_and_configs_are_taken_off(self, model: Any, served: Provider) -> None:
        wrapped = model.with_config(tags=["x"]).with_retry(stop_after_attempt=9)
        assert silence(wrapped).ask(decision_request(), retry=QUICK).fault is None
        assert len(served.bodies) == 1

    def test_bound_arguments_that_nobody_would_read_are_refused(self, model: Any) -> None:
        with pytest.raises(ConfigurationError, match=r"takes none with a call, found \['model', 'temperature'\]"):
            silence(model.bind(temperature=3).bind(model="another"))

    def test_options_are_refused(self, model: Any) -> None:
        with pytest.raises(ConfigurationError, match=r"no options for a decision model, found \['logprobs'\]"):
            silence(model).ask(decision_request(logprobs=True), retry=QUICK)

    async def test_a_failure_abstains_and_an_unreadable_answer_is_asked_for_again(
        self, model: Any, served: Provider
    ) -> None:
        broken = Request(OpaqueValue(PROMPT), lambda prompt: {"input": prompt}, {})
        assert silence(model).ask(broken, retry=QUICK) == Reply(fault="content")
        never = dataclasses.replace(decision_request(), is_readable=lambda answer: answer.decision is None)
        reply = await silence(model).aask(never, retry=RetryPolicy(max_attempts=3, first_wait=0.0))
        assert (reply.fault, len(served.bodies)) == ("unreadable", 3)

    def test_a_runnable_that_only_has_such_methods_is_no_decision_model(self) -> None:
        class Router(RunnableLambda):
            def _decide(self, request: Any) -> Any: ...

            async def _adecide(self, request: Any) -> Any: ...

        with pytest.raises(UnsilencableModelError, match="expected a chat or completion model or OpenAIDecisions"):
            silence(Router(str))

    def test_a_decision_model_that_lost_the_methods_we_call_is_refused(self) -> None:
        class OpenAIDecisions(RunnableLambda):
            __module__ = "langchain_openai.decisions.base"

            def _decide(self, request: Any) -> Any: ...

        with pytest.raises(UnsilencableModelError, match="found OpenAIDecisions"):
            silence(OpenAIDecisions(str))

    async def test_a_decision_model_of_langchain_core_is_asked_by_its_own_methods(self) -> None:
        class Classifier(core_decision_model()):  # type: ignore[misc]
            @property
            def _provider(self) -> str:
                return "test"

            def _classify(self, state: Any, questions: Any) -> Any:
                return SimpleNamespace(answers=dict.fromkeys(questions, state))

            async def _aclassify(self, state: Any, questions: Any) -> Any:
                return self._classify(f"async {state}", questions)

        silent = silence(Classifier(model="m"))
        assert silent.kind == "decisions"
        as_input = Request(OpaqueValue(PROMPT), lambda text: {"input": text, "questions": {"label": 1}}, {})
        as_state = Request(OpaqueValue(PROMPT), lambda text: {"state": text, "questions": {"q": 1}}, {})
        first = silent.ask(as_input, retry=QUICK).answer
        second = (await silent.aask(as_state, retry=QUICK)).answer
        assert first is not None
        assert first.reveal().decision.answers == {"label": PROMPT}
        assert second is not None
        assert second.reveal().decision.answers == {"q": f"async {PROMPT}"}


def core_decision_model() -> Any:
    """The base class of langchain-core 1.8 and later; before that, one of the same name and place."""
    try:
        from langchain_core.decisions import BaseDecisionModel
    except ImportError:

        class BaseDecisionModel(RunnableSerializable):
            __module__ = "langchain_core.decisions.base"
            model: str

            def invoke(self, *args: Any, **kwargs: Any) -> Any:
                raise AssertionError("private calls do not go through invoke")

    return BaseDecisionModel


class TestTheMethodsThatAreCalledPrivately:
    """They are not public, so every supported version must have them as they are called here."""

    @pytest.mark.parametrize("name", ["_generate", "_agenerate"])
    @pytest.mark.parametrize(("kind", "first"), [(BaseChatModel, "messages"), (BaseLLM, "prompts")])
    def test_langchain_core(self, kind: type, first: str, name: str) -> None:
        found = inspect.signature(getattr(kind, name)).parameters
        assert list(found) == ["self", first, "stop", "run_manager", "kwargs"]
        assert found["stop"].default is found["run_manager"].default is None
        assert inspect.iscoroutinefunction(getattr(kind, name)) == name.startswith("_a")

    @pytest.mark.parametrize(
        ("package", "kind"),
        [("langchain_openai", "ChatOpenAI"), ("langchain_openai", "OpenAI"), ("langchain_anthropic", "ChatAnthropic")],
    )
    def test_the_stock_clients(self, package: str, kind: str) -> None:
        client = getattr(importlib.import_module(package), kind)
        for name in ("_generate", "_agenerate"):
            first = "prompts" if kind == "OpenAI" else "messages"
            found = list(inspect.signature(getattr(client, name)).parameters)
            assert found == ["self", first, "stop", "run_manager", "kwargs"]

    @pytest.mark.parametrize("name", ["_decide", "_adecide"])
    def test_openai_decisions(self, name: str) -> None:
        found = getattr(decisions().OpenAIDecisions, name)
        assert list(inspect.signature(found).parameters) == ["self", "request"]
        assert inspect.iscoroutinefunction(found) == (name == "_adecide")
        assert set(decisions().DecisionRequest.__annotations__) == {"input", "questions"}

    def test_decision_models_of_langchain_core(self) -> None:
        base = pytest.importorskip("langchain_core.decisions", reason="langchain-core < 1.8").BaseDecisionModel
        for name in ("_classify", "_aclassify"):
            assert list(inspect.signature(getattr(base, name)).parameters) == ["self", "state", "questions"]


class TestHidden:
    def test_a_box_shows_cannot_be_pickled_or_copied(self) -> None:
        box = OpaqueValue(RECORD)
        assert RECORD not in f"{box} {box!r} {[box]}"
        assert not hasattr(box, "__dict__")
        assert copy.copy(box) is copy.deepcopy(box) is box
        with pytest.raises(PrivateAccessError):
            pickle.dumps(box)

    def test_requests_and_replies_show_nothing(self) -> None:
        reply = silence(chat()).ask(request(), retry=QUICK)
        failed = silence(chat(raises={TICKET: ValueError(RECORD)})).ask(request(), retry=QUICK)
        assert RECORD not in repr((request(), reply, failed))
        assert repr(reply) == repr(failed)


class TestReadingAnswers:
    """What is done with a private answer, in our own code or in a tokenizer of the user's."""

    def test_is_as_silent_as_the_call(self, caplog: pytest.LogCaptureFixture) -> None:
        def read() -> str:
            logging.getLogger("tokenizer").warning("odd id in %s", VOTE)
            return VOTE

        with caplog.at_level(logging.DEBUG):
            assert read() == VOTE
            assert VOTE in caplog.text
            caplog.clear()
            assert read_silently(read) == VOTE
        assert VOTE not in caplog.text

    @pytest.mark.parametrize("stray", [SystemExit, GeneratorExit, ValueError, asyncio.CancelledError])
    def test_raises_nothing(self, stray: type[BaseException]) -> None:
        def read() -> None:
            raise stray(VOTE)

        assert read_silently(read) is None

    def test_lets_an_interrupt_through_without_what_it_carries(self) -> None:
        def read() -> None:
            raise KeyboardInterrupt(VOTE)

        with pytest.raises(KeyboardInterrupt) as caught:
            read_silently(read)
        assert canaries_in(describe(caught.value)) == []
        assert caught.value.__context__ is None

    def test_a_binding_names_the_model(self) -> None:
        assert silence(chat().bind(model="another")).name == "another"
