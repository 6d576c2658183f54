"""LangChain models as engines: rows, continuation, public calls, completions and what becomes of an outage."""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import ConfigurableField, RunnableLambda

from langchain_dpicl.backends.base import NextTokenBackend
from langchain_dpicl.backends.fake import FakeBackend, scripted
from langchain_dpicl.backends.langchain.backend import LangChainBackend
from langchain_dpicl.backends.langchain.logprobs import CONTINUE
from langchain_dpicl.backends.private_calls.call import RetryPolicy, unwrap
from langchain_dpicl.backends.resolve import as_backend
from langchain_dpicl.budget.handler import PrivacyBudgetCallbackHandler
from langchain_dpicl.exceptions import CapabilityError, ConfigurationError, ModelCallError, UnsilencableModelError
from langchain_dpicl.privacy.private_examples import PrivateExamples
from langchain_dpicl.prompts import DPFewShotPromptTemplate
from langchain_dpicl.serving import ChatEmbedded, EmbeddedLLM
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

    def test_an_echo_of_the_prefix_alone_is_an_end_at_once(self) -> None:
        """Some servers repeat what they were given; nothing came after it."""

        class Echoing(ScriptedChat):
            def _generate(self, messages: Any, *args: Any, **kwargs: Any) -> Any:
                if messages[0].text != "done":
                    return super()._generate(messages, *args, **kwargs)
                self.seen.append(kwargs)
                info = {"finish_reason": self.finish_reason, "logprobs": None}
                message = AIMessage(messages[-1].text)
                return ChatResult(generations=[ChatGeneration(message=message, generation_info=info)])

        for finish_reason, row, num_calls in (("stop", [0.0, 0.0, 1.0], 1), ("length", [0.0, 0.0, 0.0], 8)):
            model = Echoing(answer=fixed(spread(WORDS)), finish_reason=finish_reason)
            session = LangChainBackend(model).open(["done"], [b" my", b" card"])
            model.seen.clear()
            assert session.score(DOMAIN).tolist() == [row]
            assert len(model.seen) == num_calls  # an end is final; an answer without logprobs is asked for again


class Hostile(str):
    """A text that raises when it is compared, and at most other touches."""

    __slots__ = ()

    def touched(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("hostile")

    __eq__ = __ne__ = __len__ = __iter__ = __contains__ = __getitem__ = __bool__ = encode = strip = touched
    __hash__ = str.__hash__


class HostileBytes(bytes):
    """Bytes that raise when they are compared, after they were read."""

    __slots__ = ()
    __hash__ = bytes.__hash__

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("hostile")


class Encoding(str):
    """A text whose bytes are hostile."""

    __slots__ = ()

    def encode(self, *args: Any) -> bytes:
        return HostileBytes(str.encode(self, *args))


class TestAnswersOfForeignClasses:
    """What an answer holds may be any object; its row abstains and nothing shows."""

    @pytest.mark.parametrize("where", ["text", "token", "bytes"])
    async def test_abstain(self, where: str) -> None:
        class Foreign(ScriptedChat):
            def _generate(self, messages: Any, *args: Any, **kwargs: Any) -> Any:
                result = super()._generate(messages, *args, **kwargs)
                if messages[0].text == "bad":
                    first = result.generations[0]
                    odd = Encoding(" card") if where == "bytes" else Hostile(" card")
                    entry = {"token": odd if where != "text" else " card", "bytes": None, "logprob": -0.1}
                    first.generation_info["logprobs"] = {"content": [{**entry, "top_logprobs": [entry]}]}
                    if where == "text":
                        first.__dict__["text"] = odd
                return result

        session = LangChainBackend(Foreign(answer=ANSWERS), retry=QUICK).open(["aaa", "bad", "bbb"], [])
        good = LangChainBackend(ScriptedChat(answer=ANSWERS)).open(["aaa", "bbb"], []).score(DOMAIN)
        for rows in (session.score(DOMAIN), await session.ascore(DOMAIN)):
            assert np.array_equal(rows[[0, 2]], good)
            assert not rows[1].any()

    def test_are_read_out_of_the_callers_sight(self, caplog: pytest.LogCaptureFixture) -> None:
        class Logging(str):
            __slots__ = ()

            def __eq__(self, other: object) -> bool:
                logging.getLogger("foreign").warning("the answer is %s", str.__str__(self))
                return str.__eq__(self, other)

            __hash__ = str.__hash__

        class Foreign(ScriptedChat):
            def _generate(self, *args: Any, **kwargs: Any) -> Any:
                result = super()._generate(*args, **kwargs)
                result.generations[0].__dict__["text"] = Logging("secret")
                return result

        session = LangChainBackend(Foreign(answer=ANSWERS), continuation="instruct").open(["aaa"], [])
        caplog.clear()
        assert session.score(DOMAIN)[0, 0] == 0.5
        assert [record.getMessage() for record in caplog.records if "secret" in record.getMessage()] == []


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
            bound = model.bind(max_tokens=50, top_logprobs=2, seed=7) if isinstance(model, ScriptedChat) else model
            LangChainBackend(bound, max_top_k=7).open(["aaa"], []).score(DOMAIN)
            extra = {"seed": 7} if isinstance(model, ScriptedChat) else {}
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

    async def test_raise_when_their_answer_cannot_be_read(self) -> None:
        payload: Any = lambda tops: chat_payload(tops) if " w0" in tops else None  # noqa: E731
        backend = LangChainBackend(ScriptedChat(answer=ANSWERS, payload=payload), retry=QUICK)
        with pytest.raises(ModelCallError, match="brought no logprobs"):
            backend.top_tokens("aaa", [], top_k=3)
        with pytest.raises(ModelCallError, match="brought no logprobs"):
            await backend.atop_tokens("aaa", [], top_k=3)

    def test_refuse_more_tokens_than_the_model_reports(self, backend: LangChainBackend) -> None:
        with pytest.raises(CapabilityError, match="top_k <= 20"):
            backend.top_tokens("aaa", [], top_k=21)

    @pytest.mark.parametrize("kind", [ScriptedChat, ScriptedLLM])
    @pytest.mark.parametrize("awaited", [False, True], ids=["blocking", "awaited"])
    async def test_do_not_hang_on_one_end_that_was_sampled_and_is_not_reported(self, kind: Any, awaited: bool) -> None:
        """As of OpenAI's servers: a text would end by the public model's coin, before any row is heard."""
        for num_ends, expected, num_calls in ((3, b" w0", 4), (7, b" w0", 8), (8, b"", 8), (99, b"", 8)):
            tops = iter([{}] * num_ends + [spread(WORDS)])
            model = kind(
                answer=lambda text, tops=tops: next(tops) if "done" in text else spread(WORDS),
                payload=lambda tops: chat_payload(tops) if tops else None,
                finish_reason="stop",
            )
            backend = LangChainBackend(model)
            model.seen.clear()
            found = (
                await backend.atop_tokens("done", [], top_k=1) if awaited else backend.top_tokens("done", [], top_k=1)
            )
            assert ([token for token, _ in found], len(model.seen)) == ([expected], num_calls)

    async def test_alone_look_behind_such_an_end(self) -> None:
        """A private row counts it, which is right on average, and asks no more than another row."""
        model = ScriptedChat(answer=by_word({"done": {}}, spread(WORDS)), finish_reason="stop")
        session = LangChainBackend(model).open(["done", "aaa"], [])
        model.seen.clear()
        assert session.score(DOMAIN)[0].tolist() == [0.0, 0.0, 1.0]
        assert (await session.ascore(DOMAIN))[0].tolist() == [0.0, 0.0, 1.0]
        assert len(model.seen) == 4

    @pytest.mark.parametrize("reason", ["refusal", "content_filter"])
    def test_that_are_refused_are_asked_once(self, reason: str) -> None:
        model = ScriptedChat(answer=by_word({"bad": {}}, spread(WORDS)))
        backend = LangChainBackend(model)
        model.seen.clear()
        changed: Any = backend._model._model
        changed.refusal, changed.finish_reason = ("no", "stop") if reason == "refusal" else (None, reason)
        with pytest.raises(ModelCallError, match="no logprobs"):
            backend.top_tokens("bad", [], top_k=1)
        assert len(model.seen) == 1

    def test_have_no_vocabulary_where_only_top_tokens_are_reported(self, backend: LangChainBackend) -> None:
        assert backend.max_top_k == 20
        with pytest.raises(CapabilityError, match="full_vocabulary="):
            backend.vocabulary()


def limited() -> StatusError:
    error = StatusError("slow down", status_code=429)
    error.response = type("Response", (), {"headers": {"retry-after": "0"}, "status_code": 429})()  # type: ignore[attr-defined]
    return error


OUTAGES: dict[str, Callable[[], Exception]] = {
    "429": limited,
    "500": lambda: StatusError("oops", status_code=500),
    "503": lambda: StatusError("gateway", status_code=503),
    "timeout": lambda: TimeoutError("too late"),
    "no connection": lambda: ConnectionError("refused"),
}


@pytest.mark.parametrize("outage", OUTAGES)
@pytest.mark.parametrize("kind", [ScriptedChat, ScriptedLLM])
class TestOutages:
    """They are waited out, and shown by public calls alone: private rows abstain and raise nothing."""

    async def test_are_waited_out_by_public_calls_and_by_rows_alike(self, kind: type, outage: str) -> None:
        model = kind(answer=ANSWERS, raises={"aaa": OUTAGES[outage]()})
        backend = LangChainBackend(model, retry=QUICK)
        for awaited in (False, True):
            model.times["aaa"] = 3
            model.seen.clear()
            found = await backend.atop_tokens("aaa", [], top_k=1) if awaited else backend.top_tokens("aaa", [], top_k=1)
            assert found == [(b" card", pytest.approx(0.5))]
            model.times["aaa"] = 3
            session = backend.open(["aaa"], [])
            rows = await session.ascore(DOMAIN) if awaited else session.score(DOMAIN)
            assert rows[0, 0] == pytest.approx(0.5)
            assert len(model.seen) == 4 + 4

    async def test_that_last_are_told_by_public_calls_alone(self, kind: type, outage: str) -> None:
        error = OUTAGES[outage]()
        model = kind(answer=ANSWERS, raises={"aaa": error})
        backend = LangChainBackend(model, retry=RetryPolicy(max_attempts=3, first_wait=0.001, max_wait=0.001))
        for awaited in (False, True):
            model.seen.clear()
            with pytest.raises(ModelCallError, match=type(error).__name__) as caught:
                _ = await backend.atop_tokens("aaa", [], top_k=1) if awaited else backend.top_tokens("aaa", [], top_k=1)
            assert caught.value.__cause__ is None
            assert caught.value.__context__ is None
            session = backend.open(["aaa"] * 2, [])
            rows = await session.ascore(DOMAIN) if awaited else session.score(DOMAIN)
            assert not rows.any()
            assert len(model.seen) == 3 + 2 * 3


class TestPublicCallsThatFail:
    @pytest.mark.parametrize(
        ("error", "told"),
        [
            (StatusError("x", status_code=400), r"HTTP 400\)\)\. Check the model and the length of the prompt, then"),
            (StatusError("x", status_code=401), r"HTTP 401\)\)\. The server did not accept the key"),
            (StatusError("x", status_code=402), r"HTTP 402\)\)\. The account has no credit left"),
            (StatusError("x", status_code=404), r"HTTP 404\)\)\. Nothing is served there: check base_url"),
            (StatusError("x", status_code=429), r"HTTP 429\)\)\. Wait, or lower max_concurrency, then call again"),
            (StatusError("x", status_code=500), r"HTTP 500\)\)\. Look at the server and its load, then call again"),
            (TimeoutError("x"), r"TimeoutError\)\. Raise the client's timeout"),
            (ConnectionError("x"), r"ConnectionError\)\. Check the address"),
        ],
        ids=["400", "401", "402", "404", "429", "500", "timeout", "connection"],
    )
    async def test_say_what_to_do(self, error: Exception, told: str) -> None:
        backend = LangChainBackend(ScriptedChat(answer=ANSWERS, raises={"down": error}), retry=QUICK)
        with pytest.raises(ModelCallError, match=told):
            backend.top_tokens("down", [], top_k=2)
        with pytest.raises(ModelCallError, match=told):
            await backend.atop_tokens("down", [], top_k=2)


class TestAnOutageDuringARelease:
    def template(self, raises: dict[str, Exception], budget: PrivacyBudgetCallbackHandler) -> DPFewShotPromptTemplate:
        model = ScriptedLLM(answer=fixed(spread([" yes", " no", " a", " b", " c"])), raises=raises)
        return DPFewShotPromptTemplate.from_private_examples(
            PrivateExamples([{"text": f"case {number}"} for number in range(40)], public_size=40),
            llm=LangChainBackend(model, retry=RetryPolicy(max_attempts=2, first_wait=0.0)),
            budget=budget,
            epsilon=8.0,
            example_prompt=PromptTemplate.from_template("text: {text}"),
            suffix="text: {input}",
            instruction="Words.",
            max_tokens=2,
        )

    def test_of_private_calls_alone_shows_in_nothing(self) -> None:
        budget = PrivacyBudgetCallbackHandler(epsilon=9.0, delta=1e-3)
        template = self.template({"case": StatusError("down", status_code=503)}, budget)
        assert set(template.examples[0]["text"].split()) <= {"yes", "no", "a", "b", "c"}
        assert budget.remaining_epsilon == pytest.approx(1.0)  # the whole charge, as usual

    def test_of_the_public_call_ends_it(self) -> None:
        budget = PrivacyBudgetCallbackHandler(epsilon=9.0, delta=1e-3)
        with pytest.raises(ModelCallError, match="HTTP 503"):
            self.template({"Words.": StatusError("down", status_code=503)}, budget)


class TestSmallThings:
    def test_it_is_an_engine_with_a_public_name(self, backend: LangChainBackend) -> None:
        assert isinstance(backend, NextTokenBackend)
        assert LangChainBackend(MODELS["chat"]).name == "scripted-chat"
        assert LangChainBackend(MODELS["completion"]).name == "ScriptedLLM"

    def test_it_shows_its_public_settings(self) -> None:
        engine = LangChainBackend(ScriptedChat(answer=fixed(spread(WORDS[:7]))), continuation="instruct")
        assert repr(engine) == "LangChainBackend('scripted-chat', continuation='instruct', max_top_k=7)"
        plain = LangChainBackend(ScriptedChat(answer=fixed(spread(WORDS))))
        assert repr(plain) == "LangChainBackend('scripted-chat', continuation='prefill', prefill='plain', max_top_k=20)"
        whole = LangChainBackend(ScriptedLLM(answer=fixed(spread(WORDS, mass=0.9999))), full_vocabulary=20)
        assert repr(whole) == "LangChainBackend('ScriptedLLM', continuation='completion', max_top_k=None)"

    def test_tokens_are_counted_by_their_bytes(self, backend: LangChainBackend) -> None:
        assert backend.count_tokens("é a") == 4

    def test_tokens_decode_together(self, backend: LangChainBackend) -> None:
        assert backend.decode([b"caf", b"\xc3", b"\xa9", backend.eos]) == "café"
        with pytest.raises(ConfigurationError, match="as bytes"):
            backend.decode(["a"])

    def test_other_spellings_of_the_end_can_be_declared(self) -> None:
        model = ScriptedLLM(answer=fixed({"<halt>": 0.5, **spread(WORDS, mass=0.4)}))
        assert LangChainBackend(model, eos_texts={"<halt>"}).open(["x"], []).score([b""])[0, 0] == pytest.approx(0.5)

    @pytest.mark.parametrize("wrong", ["</s>", b"</s>", None, 7, [b"</s>"], ["</s>", None]])
    def test_spellings_of_the_end_are_a_collection_of_texts(self, wrong: Any) -> None:
        model = ScriptedChat(answer=ANSWERS)
        with pytest.raises(ConfigurationError, match="expected eos_texts as a collection of texts"):
            LangChainBackend(model, eos_texts=wrong)
        assert model.seen == []

    @pytest.mark.parametrize("wrong", ["temperature", [], [("temperature", 1)], 0])
    def test_options_of_texts_are_a_mapping(self, wrong: Any) -> None:
        model = ScriptedChat(answer=ANSWERS)
        with pytest.raises(ConfigurationError, match="expected text_options as a mapping"):
            LangChainBackend(model, text_options=wrong)
        assert model.seen == []

    @pytest.mark.filterwarnings("ignore:The class `OpenAIDecisions` is in beta")
    def test_a_decision_model_is_sent_to_its_own_engine(self) -> None:
        decisions = pytest.importorskip("langchain_openai.decisions")
        model = decisions.OpenAIDecisions(model="gpt-6-luna", api_key="none", base_url="http://127.0.0.1:9/v1")
        with pytest.raises(CapabilityError, match="DecisionsBackend"):
            LangChainBackend(model)

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

    @pytest.mark.parametrize("what", [RunnableLambda(str), ScriptedChat(answer=ANSWERS) | RunnableLambda(str)])
    def test_refuses_anything_else_with_advice(self, what: Any) -> None:
        with pytest.raises(CapabilityError, match="pass the model itself"):
            as_backend(what)

    def test_refuses_a_name_without_a_provider(self) -> None:
        with pytest.raises(ConfigurationError, match=r'"provider:model", found \'gpt\''):
            as_backend("gpt")

    def test_refuses_models_that_cannot_be_silenced(self) -> None:
        class Wrapper(ScriptedChat):
            inner: Any = None

        with pytest.raises(UnsilencableModelError):
            as_backend(Wrapper(answer=ANSWERS, inner=ScriptedChat(answer=ANSWERS)))
