"""LangChain models as engines: rows, continuation, capability probes and concurrency."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import threading
import time
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from langchain_core.language_models import FakeListChatModel
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import ConfigurableField, RunnableLambda

from langchain_dpicl.backends.base import NextTokenBackend
from langchain_dpicl.backends.fake import FakeBackend, scripted
from langchain_dpicl.backends.langchain import CONTINUE, LangChainBackend
from langchain_dpicl.backends.resolve import as_backend
from langchain_dpicl.backends.silent import RetryPolicy, unwrap
from langchain_dpicl.classification import LabelClassifier
from langchain_dpicl.exceptions import CapabilityError, ConfigurationError, ModelCallError, UnsilencableModelError
from langchain_dpicl.models import ChatEmbedded, EmbeddedLLM
from langchain_dpicl.privacy.examples import PrivateExamples
from langchain_dpicl.privacy.ledger import Budget
from langchain_dpicl.prompts import DPFewShotPromptTemplate
from tests.contracts.backend import NextTokenContract
from tests.scripted_models import (
    ScriptedChat,
    ScriptedLLM,
    StatusError,
    by_word,
    chat_payload,
    fixed,
    legacy_payload,
    spread,
)

WORDS = [f" w{i}" for i in range(20)]
DOMAIN = [b" card", b" cash", b""]
QUICK = RetryPolicy(first_wait=0.001, max_wait=0.001)
ANSWERS = by_word(
    {"aaa": {" card": 0.5, " cash": 0.25, "</s>": 0.125}, "bbb": {" cash": 0.75, " other": 0.25}}, spread(WORDS)
)
MODELS: dict[str, Any] = {
    "chat": ScriptedChat(answer=ANSWERS),
    "completion": ScriptedLLM(answer=ANSWERS),
    "completion with chat logprobs": ScriptedLLM(
        answer=ANSWERS, payload=lambda tops: chat_payload(tops) | {"tokens": None, "top_logprobs": None}
    ),
}


@pytest.fixture(params=MODELS)
def backend(request: pytest.FixtureRequest) -> LangChainBackend:
    return LangChainBackend(MODELS[request.param])


def reads(words: list[str], mass: float) -> Any:
    """An answer that changes with every text: the same slope over the words, turned by a checksum."""

    def answer(text: str) -> dict[str, float]:
        turn = zlib.crc32(text.encode("utf-8", "replace")) % len(words)
        return spread([*words[turn:], *words[:turn]], mass=mass)

    return answer


class TestContractOfTopKChat(NextTokenContract):
    unknown_token = b"never"
    failing_prompt = "this one fails"

    def make(self) -> LangChainBackend:
        raises = {"fails": StatusError("content", status_code=400)}
        return LangChainBackend(ScriptedChat(answer=reads([*WORDS, "</s>"], 0.9), raises=raises), retry=QUICK)


class TestContractOfTopKCompletion(NextTokenContract):
    unknown_token = b"never"
    failing_prompt = "this one fails"

    def make(self) -> LangChainBackend:
        raises = {"fails": StatusError("busy", status_code=503)}
        return LangChainBackend(ScriptedLLM(answer=reads(WORDS, 0.9), raises=raises), max_top_k=20, retry=QUICK)


class TestContractOfFullVocabulary(NextTokenContract):
    unknown_token = b"never"
    failing_prompt = "this one fails"

    def make(self) -> LangChainBackend:
        raises = {"fails": StatusError("content", status_code=400)}
        model = ScriptedChat(answer=reads([*WORDS, "</s>"], 1.0 - 1e-10), raises=raises)
        return LangChainBackend(model, full_vocabulary=21, retry=QUICK)


class TestRows:
    def test_hold_the_reported_probabilities_and_zero_elsewhere(self, backend: LangChainBackend) -> None:
        rows = backend.open(["aaa", "bbb"], []).score([*DOMAIN, b" never"])
        assert rows == pytest.approx(np.array([[0.5, 0.25, 0.125, 0.0], [0.0, 0.75, 0.0, 0.0]]))
        assert rows.dtype == np.float64

    def test_missing_mass_is_dropped_and_not_given_to_others(self, backend: LangChainBackend) -> None:
        assert backend.open(["bbb"], []).score([b" other"]) == pytest.approx(np.array([[0.25]]))

    def test_replacing_one_prompt_moves_one_row(self, backend: LangChainBackend) -> None:
        before = backend.open(["aaa", "bbb", "ccc"], []).score(DOMAIN)
        after = backend.open(["aaa", "aaa", "ccc"], []).score(DOMAIN)
        assert np.array_equal(before[[0, 2]], after[[0, 2]])
        assert not np.array_equal(before[1], after[1])

    async def test_are_the_same_awaited(self, backend: LangChainBackend) -> None:
        session = backend.open(["aaa", "bbb"], [])
        assert np.array_equal(await session.ascore(DOMAIN), session.score(DOMAIN))

    def test_of_nothing_have_the_right_shape(self, backend: LangChainBackend) -> None:
        assert backend.open([], []).score(DOMAIN).shape == (0, 3)
        assert backend.open(["aaa"], []).score([]).shape == (1, 0)

    def test_a_closed_session_is_refused(self, backend: LangChainBackend) -> None:
        session = backend.open(["aaa"], [])
        session.close()
        for use in (lambda: session.score(DOMAIN), lambda: session.push(b"a")):
            with pytest.raises(ConfigurationError, match="closed"):
                use()


class TestRowsThatFail:
    """A row that cannot be read abstains; the others stay exactly as they are."""

    @pytest.mark.parametrize(
        "error", [StatusError("content", status_code=400), StatusError("busy", status_code=503), KeyError("x")]
    )
    async def test_errors_abstain(self, error: Exception) -> None:
        model = ScriptedChat(answer=ANSWERS, raises={"bad": error})
        session = LangChainBackend(model, retry=QUICK).open(["aaa", "bad", "bbb"], [])
        good = LangChainBackend(ScriptedChat(answer=ANSWERS)).open(["aaa", "bbb"], []).score(DOMAIN)
        for rows in (session.score(DOMAIN), await session.ascore(DOMAIN)):
            assert np.array_equal(rows[[0, 2]], good)
            assert not rows[1].any()

    @pytest.mark.parametrize(
        "payload", [None, {}, {"content": None}, {"content": [{"top_logprobs": [{"token": 3}]}]}, "x", 7]
    )
    def test_malformed_logprobs_abstain(self, payload: Any) -> None:
        def broken(tops: Any) -> Any:
            return payload if " broken" in tops else chat_payload(tops)

        model = ScriptedChat(answer=by_word({"bad": {" broken": 1.0}}, spread(WORDS)), payload=broken)
        rows = LangChainBackend(model).open(["bad", "good"], []).score([b" w0"])
        assert rows[0, 0] == 0.0
        assert rows[1, 0] > 0.0

    def test_refusals_and_filtered_answers_abstain(self) -> None:
        model = ScriptedChat(answer=ANSWERS)
        backend = LangChainBackend(model)
        backend._model._model.refusal = "I will not"  # type: ignore[union-attr]
        assert not backend.open(["aaa"], []).score(DOMAIN).any()
        backend._model._model.refusal = None  # type: ignore[union-attr]
        backend._model._model.finish_reason = "content_filter"  # type: ignore[union-attr]
        assert not backend.open(["aaa"], []).score(DOMAIN).any()

    def test_an_answer_that_ends_at_once_votes_for_the_end(self) -> None:
        model = ScriptedChat(answer=by_word({"done": {}}, spread(WORDS)), finish_reason="stop")
        assert LangChainBackend(model).open(["done"], []).score(DOMAIN).tolist() == [[0.0, 0.0, 1.0]]


class TestContinuation:
    def echoing(self, kind: type, **options: Any) -> tuple[LangChainBackend, list[str]]:
        texts: list[str] = []

        def answer(text: str) -> dict[str, float]:
            texts.append(text)
            return spread(WORDS)

        backend = LangChainBackend(kind(answer=answer), **options)
        texts.clear()
        return backend, texts

    def test_completion_sends_one_text(self) -> None:
        backend, texts = self.echoing(ScriptedLLM)
        backend.open(["Q:"], []).score(DOMAIN)
        session = backend.open(["Q: {brace} %s"], [b" my", b" card"])
        session.push(b" is")
        session.score(DOMAIN)
        assert texts == ["Q:", "Q: {brace} %s my card is"]

    def test_prefill_ends_with_the_assistants_message(self) -> None:
        backend, texts = self.echoing(ScriptedChat)
        assert backend.continuation == "prefill"
        for prefix in ([], [b" my"]):
            backend.open(["Q:"], prefix).score(DOMAIN)
        assert texts == ["human:Q:", "human:Q:|ai: my"]

    def test_instruct_asks_to_go_on(self) -> None:
        backend, texts = self.echoing(ScriptedChat, continuation="instruct")
        for prefix in ([], [b" my"]):
            backend.open(["Q:"], prefix).score(DOMAIN)
        assert texts == ["human:Q:", f"human:Q:|ai: my|human:{CONTINUE}"]

    def test_the_end_adds_nothing_to_the_prefix(self) -> None:
        backend, texts = self.echoing(ScriptedLLM)
        backend.open(["Q:"], [b" a", backend.eos]).score(DOMAIN)
        assert texts == ["Q: a"]

    def test_characters_may_be_spread_over_tokens(self) -> None:
        backend, texts = self.echoing(ScriptedLLM)
        session = backend.open(["Q:"], [b"\xc3"])
        session.push(b"\xa9")
        session.score(DOMAIN)
        assert texts == ["Q:é"]

    @pytest.mark.parametrize(
        ("kind", "asked"),
        [(ScriptedChat, "completion"), (ScriptedLLM, "prefill"), (ScriptedLLM, "instruct"), (ScriptedChat, "magic")],
    )
    def test_must_suit_the_kind_of_model(self, kind: type, asked: Any) -> None:
        with pytest.raises(ConfigurationError, match="expected continuation in"):
            LangChainBackend(kind(answer=ANSWERS), continuation=asked)

    def test_what_is_asked_is_one_token_with_logprobs(self) -> None:
        for model, asked in (
            (ScriptedChat(answer=ANSWERS), {"logprobs": True, "top_logprobs": 7}),
            (ScriptedLLM(answer=ANSWERS), {"logprobs": 7}),
        ):
            bound = model.bind(max_tokens=50, top_logprobs=2, user="u") if isinstance(model, ScriptedChat) else model
            LangChainBackend(bound, max_top_k=7).open(["aaa"], []).score(DOMAIN)
            extra = {"user": "u"} if isinstance(model, ScriptedChat) else {}
            assert model.seen[-1] == {**asked, **extra, "max_tokens": 1, "temperature": 1.0}


class TestPublicCalls:
    async def test_bring_the_likeliest_tokens_first(self, backend: LangChainBackend) -> None:
        expected = [(b" card", pytest.approx(0.5)), (b" cash", pytest.approx(0.25)), (b"", pytest.approx(0.125))]
        assert backend.top_tokens("aaa", [], top_k=20) == expected
        assert backend.top_tokens("aaa", [], top_k=2) == expected[:2]
        assert await backend.atop_tokens("aaa", [], top_k=20) == expected

    def test_leave_out_incomplete_characters(self) -> None:
        def payload(tops: Any) -> Any:
            made = chat_payload(tops)
            made["content"][0]["top_logprobs"][0] |= {"token": "", "bytes": [226]}
            return made

        found = LangChainBackend(ScriptedChat(answer=fixed(spread(WORDS)), payload=payload)).top_tokens(
            "x", [], top_k=20
        )
        assert [token for token, _ in found] == [word.encode() for word in WORDS[1:]]

    async def test_raise_when_they_fail(self) -> None:
        model = ScriptedChat(answer=ANSWERS, raises={"down": StatusError("gateway", status_code=502)})
        backend = LangChainBackend(model, retry=QUICK)
        with pytest.raises(ModelCallError, match=r"StatusError \(HTTP 502\)"):
            backend.top_tokens("down", [], top_k=3)
        with pytest.raises(ModelCallError):
            await backend.atop_tokens("down", [], top_k=3)

    def test_refuse_more_tokens_than_the_model_reports(self, backend: LangChainBackend) -> None:
        with pytest.raises(CapabilityError, match="top_k <= 20"):
            backend.top_tokens("aaa", [], top_k=21)

    def test_have_no_vocabulary_where_only_top_tokens_are_reported(self, backend: LangChainBackend) -> None:
        assert backend.max_top_k == 20
        with pytest.raises(CapabilityError, match="full_vocabulary="):
            backend.vocabulary()


def rejecting(kind: str, most: int, *, reported: int = 20) -> tuple[Any, str]:
    """A model whose server rejects more than `most` top tokens, and how the number is called there."""
    base: Any = ScriptedChat if kind == "chat" else ScriptedLLM
    name = "top_logprobs" if kind == "chat" else "logprobs"

    class Rejecting(base):  # type: ignore[misc]
        def _generate(self, *args: Any, **kwargs: Any) -> Any:
            if kwargs[name] > most:
                self.seen.append(dict(kwargs))
                raise StatusError(f"{name} must be at most {most}", status_code=400)
            return super()._generate(*args, **kwargs)

    def cut(payload: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda tops: payload(dict(list(tops.items())[: min(most, reported)]))

    payload = chat_payload if kind == "chat" else legacy_payload
    return Rejecting(answer=fixed(spread(WORDS)), payload=cut(payload)), name


class TestProbe:
    """Capabilities are checked when the engine is built, once, with public text."""

    def test_is_one_call(self) -> None:
        model = ScriptedChat(answer=ANSWERS)
        LangChainBackend(model)
        assert len(model.seen) == 1

    @pytest.mark.parametrize("kind", [ScriptedChat, ScriptedLLM])
    def test_refuses_a_server_that_ignores_logprobs(self, kind: type) -> None:
        with pytest.raises(CapabilityError, match=r"without logprobs.*llama\.cpp"):
            LangChainBackend(kind(answer=ANSWERS, payload=lambda tops: None))

    def test_does_not_take_an_early_end_for_logprobs(self) -> None:
        with pytest.raises(CapabilityError, match="without logprobs"):
            LangChainBackend(ScriptedChat(answer=fixed({}), finish_reason="stop"))

    def test_repeats_what_the_server_said(self) -> None:
        model = ScriptedChat(
            answer=ANSWERS, raises={"Quartz": StatusError("no assistant prefill here", status_code=400)}
        )
        with pytest.raises(CapabilityError, match="no assistant prefill here"):
            LangChainBackend(model)

    @pytest.mark.parametrize("kind", [ScriptedChat, ScriptedLLM])
    @pytest.mark.parametrize("reported", [2, 5, 12, 19])
    def test_takes_as_many_tokens_as_are_reported(self, kind: type, reported: int) -> None:
        model = kind(answer=fixed(spread(WORDS[:reported])))
        backend = as_backend(model)
        assert backend.max_top_k == reported
        assert len(backend.top_tokens("x", [], top_k=reported)) == reported
        assert len(model.seen) == 2
        with pytest.raises(CapabilityError, match=f"top_k <= {reported}"):
            backend.top_tokens("x", [], top_k=reported + 1)

    def test_takes_no_more_tokens_than_were_asked_for(self) -> None:
        assert as_backend(ScriptedChat(answer=fixed(spread([*WORDS, " more"])))).max_top_k == 20

    @pytest.mark.parametrize(
        ("most", "asked", "taken"), [(19, [20, 10], 10), (8, [20, 10, 5], 5), (3, [20, 10, 5, 2], 2)]
    )
    @pytest.mark.parametrize("kind", ["chat", "completion"])
    def test_asks_for_fewer_where_the_server_rejects_the_number(
        self, kind: str, most: int, asked: list[int], taken: int
    ) -> None:
        model, name = rejecting(kind, most)
        backend = as_backend(model)
        assert backend.max_top_k == taken
        assert [options[name] for options in model.seen] == asked
        assert backend.open(["x"], []).score([b" w0"])[0, 0] > 0.0
        assert model.seen[-1][name] == taken

    def test_takes_what_is_reported_of_a_number_that_is_not_rejected(self) -> None:
        model, _ = rejecting("chat", 12, reported=7)
        assert as_backend(model).max_top_k == 7

    def test_refuses_a_server_that_rejects_every_number(self) -> None:
        model, _ = rejecting("chat", 0)
        with pytest.raises(
            CapabilityError, match=r"rejected a public probe.*at most 0.*LangChainBackend\(llm, max_top_k"
        ):
            as_backend(model)
        assert [options["top_logprobs"] for options in model.seen] == [20, 10, 5, 2]

    def test_refuses_a_single_token_unless_it_is_asked_for(self) -> None:
        model = ScriptedChat(answer=fixed({" w": 0.9}))
        with pytest.raises(CapabilityError, match=r"LangChainBackend\(llm, max_top_k=1\)"):
            as_backend(model)
        assert LangChainBackend(model, max_top_k=1).max_top_k == 1

    def test_holds_the_server_to_a_number_that_was_given(self) -> None:
        with pytest.raises(CapabilityError, match=r"LangChainBackend\(llm, max_top_k=5\)"):
            LangChainBackend(ScriptedChat(answer=fixed(spread(WORDS[:5]))), max_top_k=20)
        assert LangChainBackend(ScriptedChat(answer=fixed(spread(WORDS[:5]))), max_top_k=5).max_top_k == 5
        model, _ = rejecting("chat", 10)
        with pytest.raises(CapabilityError, match="at most 10"):
            LangChainBackend(model, max_top_k=20)
        assert len(model.seen) == 1

    def test_lets_the_front_rooms_take_a_model_that_reports_five(self) -> None:
        model = ScriptedLLM(answer=fixed(spread([" yes", " no", " a", " b", "\n"])))
        scores = LabelClassifier(model, labels=["yes", "no"], calibrate=False).score(["is it?"])
        assert scores[0, 0] > scores[0, 1]
        template = DPFewShotPromptTemplate.from_private_examples(
            PrivateExamples([{"text": f"case {number}"} for number in range(40)], public_size=40),
            llm=model,
            budget=Budget(epsilon=8.0, delta=1e-3),
            epsilon=8.0,
            example_prompt=PromptTemplate.from_template("text: {text}"),
            suffix="text: {input}",
            max_tokens=2,
        )
        assert set(template.examples[0]["text"].split()) <= {"yes", "no", "a", "b"}

    @pytest.mark.parametrize("error", [ConnectionError("refused"), StatusError("loading", status_code=503)])
    def test_says_soon_that_a_server_cannot_be_reached(self, error: Exception) -> None:
        model = ScriptedChat(answer=ANSWERS, raises={"Quartz": error})
        started = time.monotonic()
        with pytest.raises(ModelCallError, match=rf"could not be reached.*{type(error).__name__}"):
            as_backend(model)
        assert time.monotonic() - started < 5.0
        assert len(model.seen) == 2

    def test_waits_once_for_a_busy_server_but_not_as_long_as_the_provider_likes(self) -> None:
        error = StatusError("slow down", status_code=429)
        error.response = type("Response", (), {"headers": {"retry-after": "60"}, "status_code": 429})()  # type: ignore[attr-defined]
        model = ScriptedChat(answer=ANSWERS, raises={"Quartz": error}, times={"Quartz": 1})
        started = time.monotonic()
        assert LangChainBackend(model, retry=RetryPolicy(max_wait=0.01)).max_top_k == 20
        assert time.monotonic() - started < 1.0

    def test_has_all_the_patience_with_an_answer_that_another_try_may_better(self) -> None:
        payloads = iter([None] * 5)
        model = ScriptedChat(answer=ANSWERS, payload=lambda tops: next(payloads, chat_payload(tops)))
        assert as_backend(model).max_top_k == 20
        assert len(model.seen) == 6

    @pytest.mark.parametrize("first", ["Qu", "Quartz", "h", "Hum"])
    def test_refuses_a_chat_that_starts_a_new_message(self, first: str) -> None:
        model = ScriptedChat(answer=fixed({first: 0.5, **spread(WORDS, mass=0.4)}))
        with pytest.raises(CapabilityError, match="continuation='instruct'"):
            LangChainBackend(model)
        assert LangChainBackend(model, continuation="instruct").continuation == "instruct"

    def test_accepts_a_chat_that_goes_on(self) -> None:
        model = ScriptedChat(answer=fixed({" hum": 0.5, **spread(WORDS, mass=0.4)}))
        assert LangChainBackend(model).continuation == "prefill"

    @pytest.mark.parametrize("asked", [20, -1])
    def test_learns_the_whole_vocabulary(self, asked: int) -> None:
        model = ScriptedChat(answer=by_word({"aaa": {" w1": 1.0}}, spread(WORDS, mass=0.9999)))
        backend = LangChainBackend(model, full_vocabulary=asked)
        assert backend.max_top_k is None
        assert set(backend.vocabulary()) == {b"", *(word.encode() for word in WORDS)}
        assert model.seen[0]["top_logprobs"] == asked
        assert backend.top_tokens("aaa", [], top_k=500) == [(b" w1", 1.0)]

    @pytest.mark.parametrize(("asked", "mass"), [(20, 0.9), (-1, 0.9), (500, 0.9999)])
    def test_refuses_part_of_a_vocabulary(self, asked: int, mass: float) -> None:
        with pytest.raises(CapabilityError, match="found 20 tokens"):
            LangChainBackend(ScriptedChat(answer=fixed(spread(WORDS, mass=mass))), full_vocabulary=asked)

    @pytest.mark.parametrize(
        "wrong",
        [{"max_top_k": 0}, {"max_top_k": True}, {"max_top_k": 2.0}, {"full_vocabulary": -2}, {"max_concurrency": 0}],
    )
    def test_impossible_numbers_are_refused_before_any_call(self, wrong: dict[str, Any]) -> None:
        model = ScriptedChat(answer=ANSWERS)
        with pytest.raises(ConfigurationError, match="whole number"):
            LangChainBackend(model, **wrong)
        assert model.seen == []


class Gauge:
    """How many calls run at once."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self.threads: set[str] = set()
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
            self.threads.add(threading.current_thread().name)

    def __exit__(self, *args: object) -> None:
        with self._lock:
            self.now -= 1


class TestConcurrency:
    def slow(self, gauge: Gauge) -> ScriptedChat:
        class Slow(ScriptedChat):
            def _generate(self, *args: Any, **kwargs: Any) -> Any:
                with gauge:
                    time.sleep(0.02)
                    return super()._generate(*args, **kwargs)

            async def _agenerate(self, *args: Any, **kwargs: Any) -> Any:
                with gauge:
                    await asyncio.sleep(0.02)
                    return super()._generate(*args, **kwargs)

        return Slow(answer=ANSWERS)

    @pytest.mark.parametrize("limit", [1, 3])
    async def test_rows_run_together_up_to_the_limit(self, limit: int) -> None:
        prompts = ["aaa", "bbb"] * 4
        expected = LangChainBackend(ScriptedChat(answer=ANSWERS)).open(prompts, []).score(DOMAIN)
        for awaited in (False, True):
            gauge = Gauge()
            session = LangChainBackend(self.slow(gauge), max_concurrency=limit).open(prompts, [])
            rows = await session.ascore(DOMAIN) if awaited else session.score(DOMAIN)
            assert gauge.most == limit
            assert np.array_equal(rows, expected)

    def test_threads_are_kept_for_the_next_token(self) -> None:
        gauge = Gauge()
        session = LangChainBackend(self.slow(gauge), max_concurrency=2).open(["aaa"] * 4, [])
        for _ in range(3):
            session.score(DOMAIN)
        assert len({name for name in gauge.threads if name.startswith("dpicl")}) == 2

    def test_one_engine_serves_several_event_loops(self) -> None:
        backend = LangChainBackend(ScriptedChat(answer=ANSWERS), max_concurrency=1)
        results: list[Any] = []

        def run() -> None:
            results.append(asyncio.run(backend.open(["aaa"] * 3, []).ascore(DOMAIN)))

        for _ in range(2):
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
        assert np.array_equal(results[0], results[1])

    async def test_a_cancelled_release_stops_its_calls(self) -> None:
        gauge = Gauge()
        backend = LangChainBackend(self.slow(gauge), max_concurrency=2)
        task = asyncio.create_task(backend.open(["aaa"] * 50, []).ascore(DOMAIN))
        await asyncio.sleep(0.03)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert gauge.now == 0

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
    @pytest.mark.filterwarnings("ignore:This process")
    def test_a_forked_process_gets_threads_of_its_own(self) -> None:
        backend = LangChainBackend(ScriptedChat(answer=ANSWERS))
        session = backend.open(["aaa"], [])
        expected = session.score(DOMAIN)
        child = os.fork()
        if child == 0:
            os._exit(0 if np.array_equal(session.score(DOMAIN), expected) else 1)
        deadline = time.monotonic() + 10.0
        while (status := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        if status[0] == 0:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        assert status == (child, 0)


class TestSmallThings:
    def test_it_is_an_engine_with_a_public_name(self, backend: LangChainBackend) -> None:
        assert isinstance(backend, NextTokenBackend)
        assert LangChainBackend(MODELS["chat"]).name == "scripted-chat"
        assert LangChainBackend(MODELS["completion"]).name == "ScriptedLLM"

    def test_it_shows_its_public_settings(self) -> None:
        engine = LangChainBackend(ScriptedChat(answer=fixed(spread(WORDS[:7]))), continuation="instruct")
        assert repr(engine) == "LangChainBackend('scripted-chat', continuation='instruct', max_top_k=7)"
        whole = LangChainBackend(ScriptedLLM(answer=fixed(spread(WORDS, mass=0.9999))), full_vocabulary=20)
        assert repr(whole) == "LangChainBackend('ScriptedLLM', continuation='completion', max_top_k=None)"

    def test_tokens_are_counted_by_their_bytes_or_as_told(self, backend: LangChainBackend) -> None:
        assert backend.count_tokens("é a") == 4
        assert LangChainBackend(MODELS["chat"], count_tokens=lambda text: len(text.split())).count_tokens("a b") == 2

    def test_tokens_decode_together(self, backend: LangChainBackend) -> None:
        assert backend.decode([b"caf", b"\xc3", b"\xa9", backend.eos]) == "café"
        with pytest.raises(ConfigurationError, match="as bytes"):
            backend.decode(["a"])

    def test_other_spellings_of_the_end_can_be_declared(self) -> None:
        model = ScriptedLLM(answer=fixed({"<halt>": 0.5, **spread(WORDS, mass=0.4)}))
        assert LangChainBackend(model, eos_texts={"<halt>"}).open(["x"], []).score([b""])[0, 0] == pytest.approx(0.5)

    def test_sessions_show_no_prompt(self, backend: LangChainBackend) -> None:
        session = backend.open(["very private"], [])
        assert "very private" not in repr(session) + repr(vars(session)) + repr(vars(backend))

    def test_legacy_probabilities_are_exact(self) -> None:
        payload = legacy_payload({" card": 0.5})
        assert math.exp(payload["top_logprobs"][0][" card"]) == pytest.approx(0.5)


class TestAsBackend:
    def test_takes_engines_as_they_are(self) -> None:
        fake = FakeBackend(scripted(), max_top_k=1)
        assert as_backend(fake) is fake

    def test_takes_the_engine_a_model_carries_also_when_bound(self) -> None:
        class Carrying(ScriptedChat):
            backend: Any = None

        fake = FakeBackend(scripted(), max_top_k=1)
        model = Carrying(answer=ANSWERS, backend=fake)
        assert as_backend(model) is fake
        assert as_backend(model.bind(stop=["x"])) is fake

    @pytest.mark.parametrize("model", [EmbeddedLLM(), ChatEmbedded(), ScriptedChat(answer=ANSWERS)], ids=type)
    def test_refuses_a_wrapper_that_chooses_a_model_for_each_call(self, model: Any) -> None:
        field = "max_tokens" if "max_tokens" in type(model).model_fields else "model_name"
        for wrapped in (
            model.with_fallbacks([model]),
            model.configurable_fields(**{field: ConfigurableField(id="x")}),
            model.configurable_alternatives(ConfigurableField(id="y"), other=model),
        ):
            for held in (wrapped, wrapped.bind(stop=["x"])):
                with pytest.raises(CapabilityError, match="pass the model itself"):
                    as_backend(held)
                with pytest.raises(UnsilencableModelError, match="pass the model itself"):
                    LangChainBackend(held)

    def test_takes_the_engine_that_an_object_carries_on_purpose(self) -> None:
        class Holder:
            backend = FakeBackend(scripted(), max_top_k=1)

        assert as_backend(Holder()) is Holder.backend

    def test_takes_the_embedded_engine_through_bindings_and_retries(self) -> None:
        for model in (EmbeddedLLM(), ChatEmbedded()):
            held = model.bind(stop=["x"]).with_config(tags=["y"]).with_retry()
            assert as_backend(held) is unwrap(held)[0].backend is model.backend

    @pytest.mark.parametrize("kind", [ScriptedChat, ScriptedLLM])
    def test_adapts_langchain_models(self, kind: type) -> None:
        assert isinstance(as_backend(kind(answer=ANSWERS).bind(user="u")), LangChainBackend)

    def test_refuses_models_without_logprobs(self) -> None:
        with pytest.raises(CapabilityError, match="without logprobs"):
            as_backend(FakeListChatModel(responses=["a"]))

    @pytest.mark.parametrize(
        "what", [None, "gpt", RunnableLambda(str), ScriptedChat(answer=ANSWERS) | RunnableLambda(str)]
    )
    def test_refuses_anything_else_with_advice(self, what: Any) -> None:
        with pytest.raises(CapabilityError, match="pass the model itself"):
            as_backend(what)

    def test_refuses_models_that_cannot_be_silenced(self) -> None:
        class Wrapper(ScriptedChat):
            inner: Any = None

        with pytest.raises(UnsilencableModelError):
            as_backend(Wrapper(answer=ANSWERS, inner=ScriptedChat(answer=ANSWERS)))
