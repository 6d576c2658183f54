"""Models that only write text: votes, completions, what abstains, the probe, and silence."""

from __future__ import annotations

import asyncio
import math
import traceback
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from langchain_core.language_models import BaseChatModel, BaseLLM, FakeListChatModel, FakeListLLM
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult, Generation, LLMResult
from pydantic import Field

from langchain_dpicl.backends.base import PublicChoiceBackend
from langchain_dpicl.backends.langchain.texts import INSTRUCTIONS, TextVoteBackend
from langchain_dpicl.backends.private_calls.call import RetryPolicy
from langchain_dpicl.backends.resolve import as_backend
from langchain_dpicl.exceptions import CapabilityError, ConfigurationError, ModelCallError, UnsilencableModelError
from tests.canary import CHANNELS, RECORD, VOTE, aobserve, describe, leaks, observe
from tests.contracts.backend import ChoiceContract, TextContract, same_bits
from tests.scripted_models import StatusError

QUICK = RetryPolicy(first_wait=0.001, max_wait=0.001)
LABELS = ("card", "cash machine")
Say = Callable[[str], Any]


def _said(model: Any, text: str, options: dict[str, Any]) -> Any:
    model.seen.append(({"text": text}, options))
    for mark, error in model.raises.items():
        if mark in text and len(model.seen) <= model.num_raises:
            raise error
    said = model.say(text)
    return said[: options["max_tokens"]] if isinstance(said, str) and model.is_cut else said


class TextChat(BaseChatModel):
    """A chat model that says a function of what it is sent: a text, or a whole message."""

    say: Say
    raises: dict[str, Any] = Field(default_factory=dict)
    num_raises: float = math.inf
    seen: list[Any] = Field(default_factory=list)
    is_cut: bool = False
    info: dict[str, Any] = Field(default_factory=dict)
    about: dict[str, Any] = Field(default_factory=dict)
    beside: dict[str, Any] = Field(default_factory=dict)
    model_name: str = "text-chat"

    @property
    def _llm_type(self) -> str:
        return "text-chat"

    def _generate(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        assert [message.type for message in messages] == ["human"]
        said = _said(self, messages[0].text, kwargs)
        message = said if isinstance(said, AIMessage) else AIMessage(said)
        message.usage_metadata = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}
        message.response_metadata = {"model_name": self.model_name, **self.beside}
        made = ChatGeneration(message=message, generation_info=self.info or None)
        return ChatResult(generations=[made], llm_output=self.about or None)


class TextLLM(BaseLLM):
    """A completion model that says a function of the prompt."""

    say: Say
    raises: dict[str, Any] = Field(default_factory=dict)
    num_raises: float = math.inf
    seen: list[Any] = Field(default_factory=list)
    is_cut: bool = False

    @property
    def _llm_type(self) -> str:
        return "text-llm"

    def _generate(
        self, prompts: list[str], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> LLMResult:
        return LLMResult(generations=[[Generation(text=_said(self, prompt, kwargs))] for prompt in prompts])


KINDS = (TextChat, TextLLM)


def saying(table: dict[str, Any], otherwise: Any = "loan") -> Say:
    """What the table says of the first of its words found in the text."""
    return lambda text: next((said for word, said in table.items() if word in text), otherwise)


def chooses(text: str) -> str:
    """A choice of the list in the text, by a checksum of what stands below the list."""
    head, _, prompt = text.partition("\n\n")
    choices = [line[2:] for line in head.splitlines() if line.startswith("- ")]
    return f"**{choices[zlib.crc32(prompt.encode('utf-8', 'replace')) % len(choices)]}**."


def lettered(text: str) -> str:
    """Six letters that change with every text."""
    return "".join(chr(97 + (zlib.crc32(f"{text}|{place}".encode("utf-8", "replace")) % 26)) for place in range(6))


def votes(*chosen: str | None) -> np.ndarray:
    """float64[chosen, LABELS]: one-hot rows as log-likelihoods."""
    return np.array([[0.0 if label == one else -np.inf for label in LABELS] for one in chosen])


class _Choices(ChoiceContract):
    kind: Any

    def make(self) -> TextVoteBackend:
        return TextVoteBackend(self.kind(say=chooses), retry=QUICK)

    @pytest.mark.xfail(reason="a vote names one choice, also one that another begins", strict=True)
    def test_a_longer_choice_is_no_likelier_than_its_beginning(self, engine: TextVoteBackend) -> None:
        super().test_a_longer_choice_is_no_likelier_than_its_beginning(engine)

    def test_rows_are_votes(self, engine: TextVoteBackend) -> None:
        rows = engine.score_choices(self.prompts, self.choices)
        assert set(rows.ravel()) == {0.0, -np.inf}
        assert ((rows == 0.0).sum(axis=1) == 1).all()
        assert len({tuple(row) for row in rows}) > 1

    def test_it_scores_public_prompts_too(self, engine: TextVoteBackend) -> None:
        assert isinstance(engine, PublicChoiceBackend)
        rows = engine.score_choices(self.prompts, self.choices)
        assert same_bits(np.array([engine.score_public(prompt, self.choices) for prompt in self.prompts]), rows)


class TestChoicesOfChatModels(_Choices):
    kind = TextChat


class TestChoicesOfCompletionModels(_Choices):
    kind = TextLLM


class TestTextOfChatModels(TextContract):
    def make(self) -> TextVoteBackend:
        return TextVoteBackend(TextChat(say=lettered, is_cut=True), retry=QUICK)


class TestTextOfCompletionModels(TextContract):
    def make(self) -> TextVoteBackend:
        return TextVoteBackend(TextLLM(say=lettered, is_cut=True), retry=QUICK)


@pytest.mark.parametrize("kind", KINDS)
class TestWhatIsSent:
    def sent(self, kind: Any, **options: Any) -> tuple[TextVoteBackend, list[Any]]:
        model = kind(say=saying({}))
        engine = TextVoteBackend(model, **options)
        model.seen.clear()
        return engine, model.seen

    def test_is_the_list_of_choices_above_the_prompt(self, kind: Any) -> None:
        engine, seen = self.sent(kind)
        engine.score_choices(["Ticket: {a} %s\nQueue:"], [" cash machine", " card"])
        text = f"{INSTRUCTIONS}\n- card\n- cash machine\n\nTicket: {{a}} %s\nQueue:"
        assert seen == [({"text": text}, {"temperature": 0.0, "max_tokens": len("cash machine") + 16})]

    def test_can_be_the_prompt_alone_or_under_other_words(self, kind: Any) -> None:
        engine, seen = self.sent(kind, instructions="")
        engine.score_choices(["Queue:"], LABELS)
        assert seen[0][0] == {"text": "Queue:"}
        engine, seen = self.sent(kind, instructions="Which queue?")
        engine.score_choices(["Queue:"], LABELS)
        assert seen[0][0] == {"text": "Which queue?\n- card\n- cash machine\n\nQueue:"}

    def test_has_room_for_the_longest_choice_in_bytes_unless_told(self, kind: Any) -> None:
        engine, seen = self.sent(kind)
        engine.score_choices(["a"], ["\u5361" * 30, "b"])
        assert seen[-1][1]["max_tokens"] == 90 + 16
        engine, seen = self.sent(kind, max_tokens=7)
        engine.score_choices(["a"], LABELS)
        assert seen[-1][1]["max_tokens"] == 7

    def test_has_further_options_that_go_before_ours(self, kind: Any) -> None:
        engine, seen = self.sent(kind, options={"temperature": 0.5, "max_tokens": None, "seed": 7})
        engine.score_choices(["a"], LABELS)
        assert seen[-1][1] == {"temperature": 0.5, "seed": 7}
        assert dict(engine.options) == {"temperature": 0.5, "max_tokens": None, "seed": 7}

    def test_completions_are_the_prompt_alone(self, kind: Any) -> None:
        engine, seen = self.sent(kind)
        assert engine.complete(["Once"], max_tokens=9, stop=["a"]) == ["lo"]
        assert seen[-1][0] == {"text": "Once"}
        assert seen[-1][1]["max_tokens"] == 9

    async def test_white_space_before_an_answer_is_no_end_of_it(self, kind: Any) -> None:
        engine = TextVoteBackend(kind(say=lambda _: "\n\n a card\nNext"))
        how: dict[str, Any] = {"max_tokens": 9, "stop": ["\n"]}
        # A completion model is sent the stop strings, so that its server ends there.
        said = "a card" if kind is TextChat else ""
        assert engine.complete(["x"], **how) == await engine.acomplete(["x"], **how) == [said]
        if kind is TextChat:
            assert engine.complete_public("x", **how) == await engine.acomplete_public("x", **how) == said
            with pytest.raises(ModelCallError, match="no text that counts"):
                engine.complete_public("x", max_tokens=9, stop=["a card"])
        assert engine.complete(["x"], max_tokens=9) == ["\n\n a card\nNext"]
        [cut] = engine.complete(["x"], max_tokens=9, stop=["\n a"])  # is more than white space
        assert not cut.strip()


class TestVotes:
    def engine(self, table: dict[str, Any], **changes: Any) -> TextVoteBackend:
        return TextVoteBackend(TextChat(say=saying(table), **changes), retry=QUICK)

    def test_go_to_the_choice_that_is_named(self) -> None:
        engine = self.engine({"aaa": "Queue: **Card**.", "bbb": "cash"})
        assert same_bits(engine.score_choices(["aaa", "bbb"], LABELS), votes("card", "cash machine"))
        assert same_bits(engine.score_choices(["aaa", "bbb"], LABELS[::-1]), votes("card", "cash machine")[:, ::-1])

    @pytest.mark.parametrize(
        "said",
        [
            "",
            "loan",
            "card or cash machine",
            "c\u0430rd",
            "I'm sorry, but I can't help with that.",
            AIMessage("card", additional_kwargs={"refusal": "no"}),
            AIMessage([]),
            AIMessage([{"type": "tool_use", "id": "1", "name": "card", "input": {}}]),
            AIMessage([{"type": "thinking", "thinking": "card"}]),
            AIMessage("card", tool_calls=[{"name": "route", "args": {}, "id": "1"}]),
        ],
        ids=lambda said: None,
    )
    async def test_are_none_where_no_choice_is_named(self, said: Any) -> None:
        engine = self.engine({"bad": said, "good": "card"})
        for rows in (
            engine.score_choices(["bad", "good"], LABELS),
            await engine.ascore_choices(["bad", "good"], LABELS),
        ):
            assert same_bits(rows, votes(None, "card"))

    @pytest.mark.parametrize(
        "reason", ["content_filter", "refusal", "SAFETY", "tool_calls", "tool_use", "guardrail_intervened"]
    )
    @pytest.mark.parametrize("place", ["info", "about", "beside"])
    def test_are_none_where_the_answer_was_filtered_or_calls_a_tool(self, reason: str, place: str) -> None:
        """The three places where LangChain's classes put the reason of the end; the third is that of Bedrock's."""
        name = {"info": "finish_reason", "about": "stop_reason", "beside": "stopReason"}[place]
        engine = self.engine({"bad": "card"})
        setattr(engine._model._model, place, {name: reason})
        assert same_bits(engine.score_choices(["bad"], LABELS), votes(None))
        assert engine.complete(["bad"], max_tokens=5) == [""]
        setattr(engine._model._model, place, {name: "end_turn"})
        assert same_bits(engine.score_choices(["bad"], LABELS), votes("card"))
        assert engine.complete(["bad"], max_tokens=5) == ["card"]

    @pytest.mark.parametrize(
        "error",
        [StatusError("content", status_code=400), StatusError("busy", status_code=503), KeyError("x"), SystemExit(1)],
    )
    async def test_are_none_where_the_call_fails(self, error: BaseException) -> None:
        engine = self.engine({"good": "card"}, raises={"bad": error})
        for rows in (
            engine.score_choices(["bad", "good"], LABELS),
            await engine.ascore_choices(["bad", "good"], LABELS),
        ):
            assert same_bits(rows, votes(None, "card"))
        assert engine.complete(["bad", "good"], max_tokens=5) == ["", "card"]

    @pytest.mark.parametrize(
        "said",
        ["", "loan", AIMessage("card", additional_kwargs={"refusal": "no"}), AIMessage([])],
        ids=["empty", "none of them", "refused", "no text"],
    )
    @pytest.mark.parametrize("reason", ["stop", "refusal", "content_filter"])
    async def test_have_a_column_for_answers_without_a_choice_but_none_for_failed_calls(
        self, said: Any, reason: str
    ) -> None:
        failed = StatusError("content", status_code=400)
        engine = self.engine({"bad": said}, raises={"down": failed})
        engine._model._model.info = {"finish_reason": reason}  # after the probe, which needs an answer
        expected = [[-np.inf, -np.inf, 0.0], [-np.inf] * 3]
        assert engine.score_with_other(["bad", "down"], LABELS).tolist() == expected
        assert (await engine.ascore_with_other(["bad", "down"], LABELS)).tolist() == expected

    @pytest.mark.parametrize("kind", KINDS)
    async def test_are_the_same_with_that_column(self, kind: Any) -> None:
        engine = TextVoteBackend(kind(say=lambda text: chooses(text) if "a" in text[-5:] else "loan"), retry=QUICK)
        prompts = [*(f"a {place}" for place in range(9)), "none"]
        rows = engine.score_choices(prompts, LABELS)
        for found in (engine.score_with_other(prompts, LABELS), await engine.ascore_with_other(prompts, LABELS)):
            assert same_bits(found[:, :-1], rows)
            assert found[:, -1].tolist() == [-np.inf] * 9 + [0.0]
        assert engine.score_with_other([], LABELS).shape == (0, 3)

    @pytest.mark.parametrize("choices", [[], ["a", "A "], ["a", ""], "ab", ["a", 1]])
    async def test_need_choices_that_can_be_told_apart(self, choices: Any) -> None:
        engine = self.engine({})
        for call in (lambda: engine.score_choices(["a"], choices), lambda: engine.score_public("a", choices)):
            with pytest.raises(ConfigurationError, match="verbalizers"):
                call()
        with pytest.raises(ConfigurationError, match="verbalizers"):
            await engine.ascore_choices([], choices)


class TestThoughts:
    """What a model thinks before its answer is no part of it, where its server leaves the thoughts in the text."""

    @pytest.mark.parametrize(
        "said",
        [
            "<think>\nIs it a cash machine? No.\n</think>\n\ncard",
            "<think></think>card",
            "So it is the cash machine. No.\n</think>\n\ncard",  # whose template opens the thoughts
            "<think>a</think>cash machine <think>no</think>\ncard",
            "<thinking>cash machine</thinking>\ncard",
            "<thought>cash machine</thought>\ncard",
            "[THINK]cash machine[/THINK]card",
            "<|channel|>analysis<|message|>cash<|end|><|start|>assistant<|channel|>final<|message|>card",
        ],
    )
    async def test_are_dropped(self, said: str) -> None:
        engine = TextVoteBackend(TextChat(say=saying({"aaa": said})), retry=QUICK)
        assert same_bits(engine.score_choices(["aaa"], LABELS), votes("card"))
        assert same_bits(await engine.ascore_choices(["aaa"], LABELS), votes("card"))
        assert same_bits(engine.score_public("aaa", LABELS), votes("card")[0])
        assert engine.complete(["aaa"], max_tokens=99, stop=["\n"]) == ["card"]
        assert await engine.acomplete(["aaa"], max_tokens=99, stop=["\n"]) == ["card"]
        assert engine.complete_public("aaa", max_tokens=99, stop=["\n"]) == "card"
        assert await engine.acomplete_public("aaa", max_tokens=99, stop=["\n"]) == "card"

    @pytest.mark.parametrize("said", ["<think>\ncard", "\n<think>card", "[THINK]card", "<think>a</think> <think>card"])
    async def test_that_do_not_end_leave_no_answer(self, said: str) -> None:
        engine = TextVoteBackend(TextChat(say=saying({"aaa": said})), retry=QUICK)
        assert same_bits(engine.score_choices(["aaa"], LABELS), votes(None))
        assert engine.complete(["aaa"], max_tokens=9) == [""]
        with pytest.raises(ModelCallError, match="give it more room"):
            engine.complete_public("aaa", max_tokens=9)
        with pytest.raises(ModelCallError, match="give it more room"):
            await engine.acomplete_public("aaa", max_tokens=9)

    @pytest.mark.parametrize("kind", KINDS)
    def test_that_do_not_end_in_the_room_of_the_probe_are_refused(self, kind: Any) -> None:
        advised = r"without text.*more room.*'max_tokens'.*'enable_thinking': False"
        with pytest.raises(CapabilityError, match=advised):
            TextVoteBackend(kind(say=saying({}, "<think>\nOkay"), is_cut=True))

    def test_of_an_answer_without_any_are_not_looked_for(self) -> None:
        engine = TextVoteBackend(TextChat(say=saying({"aaa": "I <think> so\n"})), retry=QUICK)
        assert engine.complete(["aaa"], max_tokens=9) == ["I <think> so\n"]


class TestPrivateFrames:
    @pytest.mark.parametrize("choices", [["a", "A"], ["a", ""]])
    async def test_bad_choices_leave_no_prompt_in_a_frame(self, choices: list[str]) -> None:
        engine = TextVoteBackend(TextChat(say=saying({})))
        with pytest.raises(ConfigurationError) as caught:
            engine.score_choices([RECORD], choices)
        assert RECORD not in describe(caught.value)
        with pytest.raises(ConfigurationError) as caught:
            await engine.ascore_choices([RECORD], choices)
        assert RECORD not in describe(caught.value)
        with pytest.raises(ConfigurationError) as caught:
            engine.score_with_other([RECORD], choices)
        assert RECORD not in describe(caught.value)
        with pytest.raises(ConfigurationError) as caught:
            await engine.ascore_with_other([RECORD], choices)
        assert RECORD not in describe(caught.value)

    async def test_an_answer_that_raises_when_it_is_read_abstains(self) -> None:
        class Hostile(str):
            __slots__ = ()

            def __getitem__(self, key: Any) -> Any:
                raise SystemExit(VOTE)

        class Odd(BaseLLM):
            @property
            def _llm_type(self) -> str:
                return "odd"

            def _generate(self, prompts: list[str], *args: Any, **kwargs: Any) -> LLMResult:
                made = Generation(text="card")
                if RECORD in prompts[0]:
                    made = Generation.model_construct(text=Hostile("card"), generation_info=None)
                return LLMResult.model_construct(generations=[[made]], llm_output=None)

        engine = TextVoteBackend(Odd())
        assert np.isneginf(engine.score_choices([RECORD], LABELS)).all()
        assert np.isneginf(await engine.ascore_choices([RECORD], LABELS)).all()
        assert np.isneginf(engine.score_with_other([RECORD], LABELS)).all()
        assert np.isneginf(await engine.ascore_with_other([RECORD], LABELS)).all()
        assert engine.complete([RECORD, "x"], max_tokens=3) == ["", "card"]
        assert await engine.acomplete([RECORD, "x"], max_tokens=3) == ["", "card"]


class TestPublicCalls:
    async def test_an_answer_without_text_says_what_to_do(self) -> None:
        engine = TextVoteBackend(TextChat(say=lambda text: "" if "long thoughts" in text else "card"))
        with pytest.raises(ModelCallError, match=r"no text that counts\. If it thinks .* give it more room"):
            engine.score_public("long thoughts", LABELS)
        with pytest.raises(ModelCallError, match="no text that counts"):
            await engine.ascore_public("long thoughts", LABELS)
        assert np.isneginf(engine.score_choices(["long thoughts"], LABELS)).all()

    async def test_a_refusal_and_an_answer_that_ends_at_once_name_no_choice(self) -> None:
        def say(text: str) -> Any:
            return AIMessage("", additional_kwargs={"refusal": "No."}) if "refused" in text else "card"

        engine = TextVoteBackend(TextChat(say=say))
        done = TextVoteBackend(
            TextChat(say=lambda text: "" if "silent" in text else "card", info={"finish_reason": "STOP"})
        )
        assert np.isneginf(done.score_public("silent", LABELS)).all()
        assert np.isneginf(engine.score_public("refused", LABELS)).all()
        assert np.isneginf(await engine.ascore_public("refused", LABELS)).all()

    async def test_raise_when_they_fail_and_tell_the_kind_only(self) -> None:
        error = StatusError("gateway says: down", status_code=502)
        engine = TextVoteBackend(TextChat(say=saying({}), raises={"down": error}), retry=QUICK)
        with pytest.raises(ModelCallError, match=r"text-chat failed \(StatusError \(HTTP 502\)\)") as caught:
            engine.score_public("down", LABELS)
        assert "gateway says" not in str(caught.value)
        with pytest.raises(ModelCallError, match="HTTP 502") as caught:
            await engine.ascore_public("down", LABELS)
        assert "gateway says" not in str(caught.value)

    async def test_abstain_where_no_choice_is_named(self) -> None:
        engine = TextVoteBackend(TextChat(say=saying({"aaa": "card"})))
        assert same_bits(engine.score_public("aaa", LABELS), votes("card")[0])
        assert same_bits(await engine.ascore_public("bbb", LABELS), votes(None)[0])


@pytest.mark.parametrize("kind", KINDS)
class TestProbe:
    def test_is_one_call_with_public_text(self, kind: Any) -> None:
        model = kind(say=saying({}))
        TextVoteBackend(model)
        assert len(model.seen) == 1
        assert "Snow" in model.seen[0][0]["text"]

    @pytest.mark.parametrize("said", ["", " \n"])
    def test_refuses_a_model_that_says_nothing(self, kind: Any, said: str) -> None:
        with pytest.raises(CapabilityError, match=r"without text.*max_tokens"):
            TextVoteBackend(kind(say=saying({}, said)))

    def test_leaves_the_temperature_out_where_it_is_rejected(self, kind: Any) -> None:
        class Fixed(kind):  # type: ignore[misc]
            def _generate(self, *args: Any, **kwargs: Any) -> Any:
                if "temperature" in kwargs:
                    self.seen.append(("rejected", kwargs))
                    raise StatusError("temperature must be 1", status_code=400)
                return super()._generate(*args, **kwargs)

        model = Fixed(say=saying({}, "card"))
        engine = TextVoteBackend(model)
        assert ["temperature" in options for _, options in model.seen] == [True, False, True]
        assert engine.options["temperature"] is None
        assert "options=[]" in repr(engine)
        assert same_bits(engine.score_choices(["a"], LABELS), votes("card"))
        assert "temperature" not in model.seen[-1][1]
        with pytest.raises(CapabilityError, match="temperature must be 1"):
            TextVoteBackend(Fixed(say=saying({})), options={"temperature": 0.3})

    def test_keeps_the_temperature_where_a_failure_passes(self, kind: Any) -> None:
        model = kind(say=saying({}), raises={"Snow": StatusError("null for choices", status_code=400)}, num_raises=1)
        engine = TextVoteBackend(model)
        assert engine.options["temperature"] == 0.0
        engine.score_choices(["a"], LABELS)
        assert ["temperature" in options for _, options in model.seen] == [True, False, True, True]

    def test_takes_a_failure_in_the_last_of_these_calls_for_what_it_is(self, kind: Any) -> None:
        class Fading(kind):  # type: ignore[misc]
            def _generate(self, *args: Any, **kwargs: Any) -> Any:
                answer = super()._generate(*args, **kwargs)
                if len(self.seen) != 2:
                    raise StatusError("down", status_code=400 if len(self.seen) == 1 else 503)
                return answer

        with pytest.raises(ModelCallError, match=r"an error of its own.*Nothing was spent"):
            TextVoteBackend(Fading(say=saying({})), retry=QUICK)

    @pytest.mark.parametrize("code", [429, 502])
    def test_asks_again_where_the_body_of_a_good_reply_is_a_passing_error(self, kind: Any, code: int) -> None:
        """LangChain's classes for OpenAI raise such a body as a ValueError; routers and proxies send it."""
        error = ValueError({"message": "Provider returned error", "code": code})
        model = kind(say=saying({}), raises={"Snow": error}, num_raises=1)
        assert TextVoteBackend(model, retry=QUICK).options["temperature"] == 0.0
        assert len(model.seen) == 2

    def test_repeats_what_the_server_said(self, kind: Any) -> None:
        error = StatusError("max_tokens is unknown", status_code=400)
        with pytest.raises(CapabilityError, match=r"max_tokens is unknown\)\. Its own options go into .*options="):
            TextVoteBackend(kind(say=saying({}), raises={"Snow": error}))

    @pytest.mark.parametrize("error", [ConnectionError("refused"), StatusError("loading", status_code=503)])
    def test_says_soon_that_a_server_cannot_be_reached(self, kind: Any, error: Exception) -> None:
        model = kind(say=saying({}), raises={"Snow": error})
        with pytest.raises(ModelCallError, match=r"(could not be reached|with an error of its own).*Nothing was spent"):
            TextVoteBackend(model, retry=QUICK)
        assert len(model.seen) == 2

    @pytest.mark.parametrize("changes", [{"instructions": None}, {"max_tokens": 0}, {"max_concurrency": 0}])
    def test_refuses_unusable_settings(self, kind: Any, changes: dict[str, Any]) -> None:
        with pytest.raises(ConfigurationError, match=next(iter(changes))):
            TextVoteBackend(kind(say=saying({})), **changes)

    def test_refuses_wrappers(self, kind: Any) -> None:
        with pytest.raises(UnsilencableModelError, match="fallback"):
            TextVoteBackend(kind(say=saying({})).with_fallbacks([kind(say=saying({}))]))

    def test_writing_token_by_token_is_refused_there(self, kind: Any) -> None:
        with pytest.raises(CapabilityError, match="without logprobs"):
            as_backend(kind(say=saying({})))


@pytest.mark.parametrize("model", [FakeListChatModel(responses=["Card!"]), FakeListLLM(responses=[" card\n"])])
def test_stock_models_vote(model: Any) -> None:
    engine = TextVoteBackend(model)
    assert same_bits(engine.score_choices(["a", "b"], LABELS), votes("card", "card"))
    assert engine.kind == "text votes"


def test_it_shows_its_public_settings_but_no_option_values() -> None:
    model = TextChat(say=saying({}))
    engine = TextVoteBackend(model, instructions="Which?", options={"extra_headers": {"x-key": "zx-secret"}})
    assert (
        repr(engine) == "TextVoteBackend('text-chat', instructions='Which?', options=['extra_headers', 'temperature'])"
    )
    assert engine.instructions == "Which?"


@pytest.mark.loopback
class TestNobodySeesAPrivateCall:
    table = ((RECORD, VOTE),)
    prompts = (f"a ticket: {RECORD}", "none")

    @pytest.mark.parametrize("kind", KINDS)
    async def test_sync_or_async(self, kind: Any) -> None:
        engine = TextVoteBackend(kind(say=saying(dict(self.table))))
        seen = observe(lambda: engine.score_choices(self.prompts, ["card", VOTE]))
        assert seen.result.tolist() == [[-np.inf, 0.0], [-np.inf, -np.inf]]
        assert leaks(seen) == set()
        assert leaks(await aobserve(lambda: engine.ascore_choices(self.prompts, ["card", VOTE]))) == set()
        seen = observe(lambda: engine.score_with_other(self.prompts, ["card", VOTE]))
        assert seen.result.tolist() == [[-np.inf, 0.0, -np.inf], [-np.inf, -np.inf, 0.0]]
        assert leaks(seen) == set()
        assert leaks(await aobserve(lambda: engine.ascore_with_other(self.prompts, ["card", VOTE]))) == set()
        seen = observe(lambda: engine.complete(self.prompts, max_tokens=50))
        assert seen.result == [VOTE, "loan"]
        assert leaks(seen) == set()
        assert leaks(await aobserve(lambda: engine.acomplete(self.prompts, max_tokens=50))) == set()

    async def test_though_the_ordinary_call_is_seen(self) -> None:
        model = TextChat(say=saying(dict(self.table)))
        naive = leaks(await aobserve(lambda: model.ainvoke(self.prompts[0], max_tokens=50)))
        assert naive >= set(CHANNELS) - {"model callbacks"}

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("ask", ["score_choices", "score_with_other", "complete"])
    def test_a_stop_shows_nothing(self, kind: Any, ask: str) -> None:
        def stop(text: str) -> str:
            if RECORD in text:
                raise KeyboardInterrupt(text)
            return "loan"

        class Forgetful(kind):  # type: ignore[misc]
            def _generate(self, *args: Any, **kwargs: Any) -> Any:
                try:
                    return super()._generate(*args, **kwargs)
                finally:
                    self.seen.clear()

        engine = TextVoteBackend(Forgetful(say=stop))
        with pytest.raises(KeyboardInterrupt) as caught:
            if ask == "complete":
                engine.complete(self.prompts, max_tokens=5)
            else:
                getattr(engine, ask)(self.prompts, LABELS)
        assert RECORD not in describe(caught.value)

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("ask", ["ascore_choices", "ascore_with_other", "acomplete"])
    async def test_a_cancelled_task_shows_nothing(self, kind: Any, ask: str) -> None:
        asked = asyncio.Event()

        class Endless(kind):  # type: ignore[misc]
            async def _agenerate(self, *args: Any, **kwargs: Any) -> Any:
                asked.set()
                await asyncio.Event().wait()

        engine = TextVoteBackend(Endless(say=saying({})))
        asks: dict[str, Any] = {
            "ascore_choices": lambda: engine.ascore_choices(self.prompts, LABELS),
            "ascore_with_other": lambda: engine.ascore_with_other(self.prompts, LABELS),
            "acomplete": lambda: engine.acomplete(self.prompts, max_tokens=5),
        }
        task = asyncio.create_task(asks[ask]())
        await asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError) as caught:
            await task
        assert ask in "".join(traceback.format_tb(caught.value.__traceback__))
        assert RECORD not in describe(caught.value)
