"""Capabilities are learnt when the engine is built, with public text, and each lack is named with what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.prompts import PromptTemplate

from langchain_dpicl.backends.langchain.backend import LangChainBackend
from langchain_dpicl.backends.langchain.logprobs import PROMPT, agreement
from langchain_dpicl.backends.langchain.texts import TextVoteBackend
from langchain_dpicl.backends.private_calls.call import RetryPolicy
from langchain_dpicl.backends.private_calls.public_calls import FACTS, advice, combine_advice
from langchain_dpicl.backends.resolve import as_backend, as_choice_backend
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.exceptions import CapabilityError, ConfigurationError, ModelCallError
from langchain_dpicl.privacy.private_examples import PrivateExamples
from langchain_dpicl.prompts import DPFewShotPromptTemplate
from langchain_dpicl.serving import LabelClassifier
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
from tests.writing_models import SWITCHES, WritingChat, WritingLLM, odd_rows

WORDS = [f" w{i}" for i in range(20)]
ANSWERS = by_word(
    {"aaa": {" card": 0.5, " cash": 0.25, "</s>": 0.125}, "bbb": {" cash": 0.75, " other": 0.25}}, spread(WORDS)
)
QUICK = RetryPolicy(first_wait=0.001, max_wait=0.001)


def tries(model: Any) -> list[dict[str, Any]]:
    """The calls that asked whether logprobs come, without those that asked whether a message is continued."""
    return [options for options in model.seen if options["max_tokens"] > 1]


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


class Thinker(WritingChat):
    """A chat model whose first tokens are thoughts; a server with a reasoning parser hides them from its text."""

    is_hidden: bool
    finish_reason: str = "length"

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        [made] = super()._generate(*args, **kwargs).generations
        info = {**(made.generation_info or {}), "finish_reason": self.finish_reason}
        said = AIMessage("") if self.is_hidden else made.message
        return ChatResult(generations=[ChatGeneration(message=said, generation_info=info)])


class TestLogprobs:
    def test_of_a_completion_model_take_one_call(self) -> None:
        model = WritingLLM(answer=odd_rows())
        LangChainBackend(model)
        assert [options["prompt"] for options in model.seen] == [PROMPT]

    @pytest.mark.parametrize("kind", [ScriptedChat, ScriptedLLM])
    def test_are_missed_where_a_server_ignores_the_request(self, kind: type) -> None:
        with pytest.raises(CapabilityError, match=r"without logprobs\. .*llama\.cpp"):
            LangChainBackend(kind(answer=ANSWERS, payload=lambda tops: None))

    def test_are_not_to_be_had_from_a_model_that_only_writes_text(self) -> None:
        with pytest.raises(CapabilityError, match=r"without logprobs.*hand it to TextVoteBackend"):
            LangChainBackend(FakeListChatModel(responses=["a"]))

    def test_are_not_taken_from_an_early_end(self) -> None:
        with pytest.raises(CapabilityError, match="without logprobs"):
            LangChainBackend(ScriptedChat(answer=fixed({}), finish_reason="stop"))

    def test_that_cannot_be_read_are_refused(self) -> None:
        payload = {"content": [{"token": "a", "top_logprobs": [{"token": "\ufffd", "logprob": -0.5}] * 20}]}
        with pytest.raises(CapabilityError, match="20 top tokens to a public probe, and none that can be read"):
            LangChainBackend(ScriptedChat(answer=ANSWERS, payload=lambda tops: payload))

    def test_of_tokens_without_bytes_are_refused_where_there_is_text(self) -> None:
        """Each of them is read as the end, so that every demonstration would be empty."""

        def without_bytes(tops: Any) -> Any:
            content = chat_payload(tops)["content"]
            bare = [[{**one, "bytes": []} for one in place["top_logprobs"]] for place in content]
            return {"content": [{**place, "top_logprobs": top} for place, top in zip(content, bare, strict=True)]}

        with pytest.raises(CapabilityError, match="20 top tokens to a public probe, and none that can be read"):
            LangChainBackend(ScriptedChat(answer=fixed(spread(WORDS)), payload=without_bytes), continuation="instruct")
        ended = ScriptedChat(answer=fixed({"</s>": 0.5, "<|im_end|>": 0.25}), finish_reason="stop")
        assert LangChainBackend(ended, continuation="instruct").max_top_k == 2

    def test_that_come_as_ids_need_a_tokenizer(self) -> None:
        tops = {f"token_id:{number}": 0.04 for number in range(20)}
        for kind in (ScriptedChat, ScriptedLLM):
            with pytest.raises(CapabilityError, match=r"spells tokens as ids.*tokenizer="):
                LangChainBackend(kind(answer=fixed(tops)))

    @pytest.mark.parametrize("engine", [as_backend, as_choice_backend])
    @pytest.mark.parametrize("is_hidden", [True, False], ids=["hidden", "shown"])
    def test_of_thoughts_are_refused_with_how_to_switch_them_off(
        self, is_hidden: bool, engine: Callable[[Any], Any]
    ) -> None:
        model = Thinker(answer=fixed({"<think>": 0.9, " card": 0.05}), is_hidden=is_hidden)
        advised = r"thinks first.*reasoning=False.*reasoning_effort='none'.*'enable_thinking': False.*'max_tokens'"
        with pytest.raises(CapabilityError, match=advised):
            engine(model)
        assert len(model.seen) == 1

    def test_of_thoughts_are_refused_of_completion_models_that_show_them(self) -> None:
        with pytest.raises(CapabilityError, match="thinks first"):
            LangChainBackend(WritingLLM(answer=fixed({"<think>": 0.9, " card": 0.05})))

    def test_of_a_blank_beginning_are_no_thoughts(self) -> None:
        blank = fixed({"\n": 0.9, " card": 0.05})
        assert LangChainBackend(WritingLLM(answer=blank)).max_top_k == 2  # such a model shows what it writes
        ended = Thinker(answer=blank, is_hidden=True, finish_reason="stop")
        assert LangChainBackend(ended, continuation="instruct").max_top_k == 2

    @pytest.mark.parametrize("kind", [ScriptedChat, ScriptedLLM])
    @pytest.mark.parametrize("reported", [2, 5, 12, 19])
    def test_are_taken_for_as_many_tokens_as_are_reported(self, kind: type, reported: int) -> None:
        model = kind(answer=fixed(spread(WORDS[:reported])))
        backend = as_backend(model)
        assert backend.max_top_k == reported
        assert len(backend.top_tokens("x", [], top_k=reported)) == reported
        assert len(tries(model)) == 1
        with pytest.raises(CapabilityError, match=f"top_k <= {reported}"):
            backend.top_tokens("x", [], top_k=reported + 1)

    def test_are_taken_for_no_more_tokens_than_were_asked_for(self) -> None:
        assert as_backend(ScriptedChat(answer=fixed(spread([*WORDS, " more"])))).max_top_k == 20

    @pytest.mark.parametrize(
        ("most", "asked", "taken"), [(19, [20, 10], 10), (8, [20, 10, 5], 5), (3, [20, 10, 5, 2], 2)]
    )
    @pytest.mark.parametrize("kind", ["chat", "completion"])
    def test_are_asked_for_fewer_tokens_where_the_server_rejects_the_number(
        self, kind: str, most: int, asked: list[int], taken: int
    ) -> None:
        model, name = rejecting(kind, most)
        backend = as_backend(model)
        assert backend.max_top_k == taken
        assert [options[name] for options in tries(model)] == asked
        assert backend.open(["x"], []).score([b" w0"])[0, 0] > 0.0
        assert model.seen[-1][name] == taken

    def test_are_taken_as_they_come_of_a_number_that_is_not_rejected(self) -> None:
        model, _ = rejecting("chat", 12, reported=7)
        assert as_backend(model).max_top_k == 7

    def test_are_missed_where_the_server_rejects_every_number(self) -> None:
        model, _ = rejecting("chat", 0)
        with pytest.raises(
            CapabilityError, match=r"rejected a public probe.*at most 0.*LangChainBackend\(llm, max_top_k"
        ):
            as_backend(model)
        assert [options["top_logprobs"] for options in model.seen] == [20, 10, 5, 2]

    def test_of_a_single_token_are_refused_unless_asked_for(self) -> None:
        model = ScriptedChat(answer=fixed({" w": 0.9}))
        with pytest.raises(CapabilityError, match=r"LangChainBackend\(llm, max_top_k=1\)"):
            as_backend(model)
        assert LangChainBackend(model, max_top_k=1).max_top_k == 1

    @pytest.mark.parametrize("kind", [ScriptedChat, ScriptedLLM])
    @pytest.mark.parametrize("reported", [5, 10, 17])
    def test_must_come_for_the_whole_of_a_number_that_was_given(self, kind: type, reported: int) -> None:
        with pytest.raises(CapabilityError, match=f"expected 20 top logprobs from .*, found {reported}"):
            LangChainBackend(kind(answer=fixed(spread(WORDS[:reported]))), max_top_k=20)

    def test_may_share_a_text_and_then_count_each(self) -> None:
        twice = spread([*WORDS[:19], "</s>", "<eos>"])  # one token, the end
        backend = LangChainBackend(ScriptedChat(answer=fixed(twice)), max_top_k=21)
        assert backend.max_top_k == 21
        assert len(backend.top_tokens("x", [], top_k=21)) == 20

    def test_may_have_lost_a_few_that_share_a_text_where_texts_are_the_keys(self) -> None:
        tops = spread(WORDS[:19])
        assert LangChainBackend(ScriptedLLM(answer=fixed(tops)), max_top_k=20).max_top_k == 20
        with pytest.raises(CapabilityError, match="found 19"):
            LangChainBackend(ScriptedChat(answer=fixed(tops)), max_top_k=20)

    @pytest.mark.parametrize("kind", [ScriptedChat, ScriptedLLM])
    def test_of_a_vocabulary_smaller_than_the_given_number_are_all_there_is(self, kind: type) -> None:
        assert LangChainBackend(kind(answer=fixed(spread(WORDS[:7], mass=0.9999))), max_top_k=20).max_top_k == 7

    @pytest.mark.parametrize(
        ("error", "advised"),
        [
            (StatusError("no", status_code=401), "check api_key"),
            (StatusError("no", status_code=402), "no credit left"),
            (StatusError("no", status_code=403), "check api_key"),
            (StatusError("no", status_code=404), "check base_url"),
            (TypeError("create() got an unexpected keyword argument 'bogus'"), r"remove it from bind"),
            (TypeError("create() got an unexpected keyword argument 'logprobs'"), "embedded model"),
            (AttributeError("'str' object has no attribute 'model_dump'"), "check base_url.* ends in /v1"),
        ],
        ids=["401", "402", "403", "404", "argument", "no logprobs", "web page"],
    )
    def test_are_asked_for_once_where_no_other_number_helps(self, error: Exception, advised: str) -> None:
        model = ScriptedChat(answer=ANSWERS, raises={"Quartz": error})
        with pytest.raises(CapabilityError, match=f"rejected a public probe.*{advised}") as caught:
            as_backend(model)
        assert len(model.seen) == 1
        assert str(caught.value).startswith(
            "scripted-chat rejected" if "HTTP" in str(caught.value) else "the client of"
        )

    def test_must_come_for_a_number_that_was_given(self) -> None:
        with pytest.raises(CapabilityError, match=r"LangChainBackend\(llm, max_top_k=5\)"):
            LangChainBackend(ScriptedChat(answer=fixed(spread(WORDS[:5]))), max_top_k=20)
        assert LangChainBackend(ScriptedChat(answer=fixed(spread(WORDS[:5]))), max_top_k=5).max_top_k == 5
        model, _ = rejecting("chat", 10)
        with pytest.raises(CapabilityError, match="at most 10"):
            LangChainBackend(model, max_top_k=20)
        assert len(model.seen) == 1

    def test_for_five_tokens_are_enough_for_the_front_rooms(self) -> None:
        model = ScriptedLLM(answer=fixed(spread([" yes", " no", " a", " b", "\n"])))
        scores = LabelClassifier(model, labels=["yes", "no"]).probabilities(["is it?"])
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

    @pytest.mark.parametrize("asked", [20, -1])
    def test_of_the_whole_vocabulary_are_learnt(self, asked: int) -> None:
        model = ScriptedChat(answer=by_word({"aaa": {" w1": 1.0}}, spread(WORDS, mass=0.9999)))
        backend = LangChainBackend(model, full_vocabulary=asked)
        assert backend.max_top_k is None
        assert set(backend.vocabulary()) == {b"", *(word.encode() for word in WORDS)}
        assert model.seen[0]["top_logprobs"] == asked
        assert backend.top_tokens("aaa", [], top_k=500) == [(b" w1", 1.0)]

    @pytest.mark.parametrize(("asked", "mass"), [(20, 0.9), (-1, 0.9), (500, 0.9999)])
    def test_of_part_of_a_vocabulary_are_refused_as_the_whole(self, asked: int, mass: float) -> None:
        with pytest.raises(CapabilityError, match="found 20 tokens"):
            LangChainBackend(ScriptedChat(answer=fixed(spread(WORDS, mass=mass))), full_vocabulary=asked)

    @pytest.mark.parametrize(
        ("asked", "mass", "advised"),
        [
            (500, 0.9999, r"if that is its whole vocabulary, give full_vocabulary=20; if not, raise"),
            (20, 0.9, r"probability; ask for more: give the size of the model's vocabulary"),
            (500, 0.9, r"probability; raise the server's limit on logprobs \(vLLM: --max-logprobs -1\)"),
            (-1, 0.9, r"probability; raise the server's limit on logprobs \(vLLM: --max-logprobs -1\)"),
        ],
        ids=["more than there are", "fewer than there are", "cut", "all, cut"],
    )
    def test_of_part_of_a_vocabulary_say_how_to_get_the_rest(self, asked: int, mass: float, advised: str) -> None:
        with pytest.raises(CapabilityError, match=advised):
            LangChainBackend(ScriptedChat(answer=fixed(spread(WORDS, mass=mass))), full_vocabulary=asked)

    def test_of_the_whole_vocabulary_that_do_not_come_for_minus_one_need_its_size(self) -> None:
        silent = ScriptedChat(answer=ANSWERS, payload=lambda tops: None)
        with pytest.raises(CapabilityError, match=r"without logprobs.*llama\.cpp takes the size of the vocabulary"):
            LangChainBackend(silent, full_vocabulary=-1, retry=QUICK)
        with pytest.raises(CapabilityError, match=r"without logprobs\. Some servers take the request and ignore it"):
            LangChainBackend(silent, full_vocabulary=20, retry=QUICK)

    @pytest.mark.parametrize(("status", "advised"), [(400, "--max-logprobs -1"), (401, "check api_key")])
    def test_of_the_whole_vocabulary_may_be_rejected(self, status: int, advised: str) -> None:
        model = ScriptedChat(answer=ANSWERS, raises={"Quartz": StatusError("-1 is too low", status_code=status)})
        with pytest.raises(CapabilityError, match=advised):
            LangChainBackend(model, full_vocabulary=-1)

    @pytest.mark.parametrize(
        "wrong",
        [{"max_top_k": 0}, {"max_top_k": True}, {"max_top_k": 2.0}, {"full_vocabulary": -2}, {"max_concurrency": 0}],
    )
    def test_are_asked_for_in_numbers_that_are_possible(self, wrong: dict[str, Any]) -> None:
        model = ScriptedChat(answer=ANSWERS)
        with pytest.raises(ConfigurationError, match="whole number"):
            LangChainBackend(model, **wrong)
        assert model.seen == []

    def test_are_asked_for_in_one_number(self) -> None:
        model = ScriptedChat(answer=fixed(spread(WORDS, mass=0.9999)))
        with pytest.raises(ConfigurationError, match="expected max_top_k or full_vocabulary, found both"):
            LangChainBackend(model, max_top_k=20, full_vocabulary=20)
        assert model.seen == []


class TestPatience:
    @pytest.mark.parametrize(
        ("error", "told"),
        [
            (
                ConnectionError("refused"),
                r"could not be reached: .*\(ConnectionError\).*check the address.*max_top_k=10",
            ),
            (StatusError("loading", status_code=503), r"answered, but with an error of its own: .*HTTP 503\)"),
            (StatusError("Used 1101", status_code=429), r"answered, but is busy: .*HTTP 429\).*max_concurrency"),
            (TimeoutError("5 s"), r"did not answer in time: .*\(TimeoutError\).*the client's timeout"),
            (StatusError("insufficient_quota", status_code=429), r"no credit left: .*HTTP 429\).*plan and billing"),
        ],
        ids=["refused", "503", "429", "timeout", "quota"],
    )
    def test_is_short_with_a_server_that_gives_no_answer(self, error: Exception, told: str, slept: list[float]) -> None:
        model = ScriptedChat(answer=ANSWERS, raises={"Quartz": error})
        with pytest.raises(ModelCallError, match=told) as caught:
            as_backend(model)
        assert "Nothing was spent" in str(caught.value)
        assert str(error) not in str(caught.value)  # such texts may quote what private calls used
        if "busy" in str(caught.value):
            assert "address" not in str(caught.value)
        assert sum(slept) < 3.0
        assert len(model.seen) == 2

    def test_is_not_as_long_as_the_provider_likes(self, slept: list[float]) -> None:
        error = StatusError("slow down", status_code=429)
        error.response = type("Response", (), {"headers": {"retry-after": "60"}, "status_code": 429})()  # type: ignore[attr-defined]
        model = ScriptedChat(answer=ANSWERS, raises={"Quartz": error}, times={"Quartz": 1})
        assert LangChainBackend(model, retry=RetryPolicy(max_wait=0.01)).max_top_k == 20
        assert slept == [0.01]

    def test_is_whole_with_an_answer_that_another_try_may_better(self) -> None:
        payloads = iter([None] * 5)
        model = ScriptedChat(answer=ANSWERS, payload=lambda tops: next(payloads, chat_payload(tops)))
        assert as_backend(model).max_top_k == 20
        assert len(tries(model)) == 6

    def test_looks_behind_an_end_that_was_sampled_and_is_not_reported(self) -> None:
        tops = iter([{}] * 5)
        model = ScriptedChat(answer=lambda text: next(tops, ANSWERS(text)), finish_reason="stop")
        assert as_backend(model).max_top_k == 20
        assert len(tries(model)) == 6

    def test_ends_while_it_is_asked_whether_the_server_goes_on(self) -> None:
        model = ScriptedChat(answer=ANSWERS, raises={"|ai:": StatusError("loading", status_code=503)})
        with pytest.raises(ModelCallError, match="answered, but with an error of its own"):
            LangChainBackend(model, retry=QUICK)


class TestWhetherTheServerGoesOn:
    """Two answers of the server are compared: no word needs to make sense."""

    @pytest.mark.parametrize("seed", range(12))
    @pytest.mark.parametrize("goes_on", ["plain", "vllm"])
    @pytest.mark.parametrize("echo", [True, False], ids=["echoing", "not echoing"])
    def test_is_seen_whatever_its_tokens_are(self, seed: int, goes_on: Literal["plain", "vllm"], echo: bool) -> None:
        model = WritingChat(answer=odd_rows(seed=seed), goes_on=goes_on, echo=echo)
        backend = LangChainBackend(model)
        assert backend.prefill == goes_on
        assert len(model.seen) <= (3 if goes_on == "plain" else 5)
        assert f"prefill={goes_on!r}" in repr(backend)

    @pytest.mark.parametrize("seed", range(12))
    def test_is_denied_whatever_its_tokens_are(self, seed: int) -> None:
        model = WritingChat(answer=odd_rows(seed=seed), goes_on="never")
        way = r"starts a new message.*vLLM's switches.*LangChainBackend\(model, continuation='instruct'\).*--model"
        with pytest.raises(CapabilityError, match=way):
            LangChainBackend(model)
        assert LangChainBackend(model, continuation="instruct").prefill is None

    def test_is_seen_with_two_top_tokens(self) -> None:
        model = WritingChat(answer=lambda text: dict(list(odd_rows()(text).items())[:2]), goes_on="vllm")
        assert LangChainBackend(model).prefill == "vllm"

    def test_is_asked_after_the_servers_own_words_and_with_all_of_its_top_tokens(self) -> None:
        model = WritingChat(answer=odd_rows(), goes_on="never")
        with pytest.raises(CapabilityError):
            LangChainBackend(model)
        steps = model.written(f"<human>{PROMPT}</human><ai>", {"max_tokens": 3})
        two, three = ("".join(next(iter(tops)) for tops in steps[:n]) for n in (2, 3))
        given = [call["messages"][1:] for call in model.seen[1:]]
        assert given == [[("ai", two)], [("ai", three)]] * 2
        assert [call.get("extra_body") for call in model.seen] == [None, None, None, SWITCHES, SWITCHES]
        assert {call["top_logprobs"] for call in model.seen} == {20}

    def test_is_seen_by_the_switches_where_a_plain_message_is_rejected(self) -> None:
        model = WritingChat(answer=odd_rows(), goes_on="vllm", rejects=frozenset({"plain"}))
        assert LangChainBackend(model).prefill == "vllm"

    def test_is_denied_with_what_the_server_said(self) -> None:
        model = WritingChat(answer=odd_rows(), goes_on="never", rejects=frozenset({"plain", "vllm"}))
        with pytest.raises(CapabilityError, match=r"plain: .*no assistant prefill here.*vllm: .*Unknown parameter"):
            LangChainBackend(model)

    @pytest.mark.parametrize("first", ["Qu", "Quartz", "h", "Hum"])
    def test_is_denied_by_its_words_where_it_writes_a_single_token(self, first: str) -> None:
        model = ScriptedChat(answer=fixed({first: 0.5, **spread(WORDS, mass=0.4)}))
        with pytest.raises(CapabilityError, match="continuation='instruct'"):
            LangChainBackend(model)
        assert LangChainBackend(model, continuation="instruct").continuation == "instruct"

    def test_is_believed_by_its_words_where_it_writes_a_single_token(self) -> None:
        model = ScriptedChat(answer=fixed({" hum": 0.5, **spread(WORDS, mass=0.4)}))
        assert LangChainBackend(model).prefill == "plain"

    @pytest.mark.parametrize("said", ["plain", "vllm"])
    def test_can_be_declared_and_is_then_taken_at_its_word(self, said: Literal["plain", "vllm"]) -> None:
        model = WritingChat(answer=odd_rows(), goes_on="never")
        assert LangChainBackend(model, prefill=said).prefill == said
        assert len(model.seen) == 1

    @pytest.mark.parametrize(
        ("kind", "wrong"),
        [
            (WritingChat, {"prefill": "both"}),
            (WritingChat, {"prefill": "vllm", "continuation": "instruct"}),
            (WritingLLM, {"prefill": "plain"}),
        ],
    )
    def test_can_be_declared_of_chat_models_only(self, kind: type, wrong: dict[str, Any]) -> None:
        with pytest.raises(ConfigurationError, match="expected prefill as"):
            LangChainBackend(kind(answer=odd_rows()), **wrong)

    @pytest.mark.parametrize("kind", [WritingChat, WritingLLM])
    def test_is_not_asked_of_a_server_that_loses_the_spaces_of_its_tokens(self, kind: type) -> None:
        words = [f" w{number}" for number in range(16)]
        with pytest.raises(CapabilityError, match=r"without the spaces before them.*return_tokens_as_token_ids"):
            LangChainBackend(kind(answer=odd_rows(words), bare=True))

    @pytest.mark.parametrize("mark", ["\u0120", "\u2581"])
    def test_is_not_asked_of_a_server_that_spells_tokens_as_its_vocabulary_does(self, mark: str) -> None:
        class Marked(WritingChat):
            def _generate(self, *args: Any, **kwargs: Any) -> Any:
                result = super()._generate(*args, **kwargs)
                places = (result.generations[0].generation_info["logprobs"] or {"content": []})["content"]
                for entry in [entry for place in places for entry in (place, *place["top_logprobs"])]:
                    entry.pop("bytes", None)
                    entry["token"] = entry["token"].replace(" ", mark)
                return result

        words = [f" w{number}" for number in range(16)]  # the first token too has a mark, and the text no space
        for more in ({}, {"continuation": "instruct"}):
            with pytest.raises(CapabilityError, match=r"with marks in place of their spaces.*return_tokens_as_token"):
                LangChainBackend(Marked(answer=odd_rows(words)), **more)


class TestVllmSwitches:
    """They go out with a prefix only, on top of what the model and its bindings send."""

    def bodies(self, model: Any, **options: Any) -> tuple[Any, Any]:
        """The `extra_body` of a call without and of a call with a prefix."""
        backend = LangChainBackend(model, **options)
        inner = getattr(model, "bound", model)
        session = backend.open(["x"], [])
        session.score([b"zz"])
        session.push(b" qua")
        session.score([b"zz"])
        return tuple(call.get("extra_body") for call in inner.seen[-2:])

    def test_are_sent_with_a_prefix_only(self) -> None:
        assert self.bodies(WritingChat(answer=odd_rows(), goes_on="vllm")) == (None, SWITCHES)

    def test_are_not_sent_where_a_server_goes_on_by_itself(self) -> None:
        assert self.bodies(WritingChat(answer=odd_rows())) == (None, None)

    def test_stand_beside_what_the_model_and_its_bindings_send(self) -> None:
        model = WritingChat(answer=odd_rows(), goes_on="vllm", extra_body={"top_k": 3, "seed": 1})
        own = {"top_k": 3, "seed": 2, "cache_salt": "s"}
        bound = model.bind(extra_body={"cache_salt": "s"}).bind(extra_body={"seed": 2, "cache_salt": "s"})
        assert self.bodies(bound) == (own, {**own, **SWITCHES})
        assert model.extra_body == {"top_k": 3, "seed": 1}

    def test_that_a_user_bound_are_kept_from_calls_without_a_prefix(self) -> None:
        model = WritingChat(answer=odd_rows(), goes_on="vllm").bind(extra_body={"seed": 2, **SWITCHES})
        assert self.bodies(model) == ({"seed": 2}, {"seed": 2, **SWITCHES})

    def test_change_no_row_of_a_server_that_goes_on_either_way(self) -> None:
        plain, switched = (
            LangChainBackend(WritingChat(answer=odd_rows(), echo=echo), prefill=prefill)
            for prefill, echo in (("plain", True), ("vllm", False))
        )
        domain = [word.encode() for word in (" qua", "zz", "é", " la")]
        rows = [engine.open(["x", "y"], [b" hum"]).score(domain) for engine in (plain, switched)]
        assert rows[0].any()
        assert rows[0].tolist() == rows[1].tolist()


masses = st.dictionaries(st.sampled_from([b"a", b"b", b"c", b"d"]), st.floats(1e-9, 0.25), max_size=4)


@given(masses, masses)
def test_agreement_is_a_share_that_is_whole_for_equal_and_nothing_for_disjoint_reports(left: Any, right: Any) -> None:
    found = agreement(left, right)
    assert 0.0 <= found <= 1.0 + 1e-12
    assert found == pytest.approx(agreement(right, left))
    assert agreement(left, left) == (pytest.approx(1.0) if left else 0.0)
    assert agreement(left, {b"z": 0.5}) == 0.0


ELSEWHERE = "This model is only supported in v1/responses and not in v1/chat/completions."
TOO_NEW = "Error code: 400 - Unknown parameter: 'store'."
"""What OpenAI says of a model without Chat Completions, and Azure of an older API version."""


class TestAdvice:
    @pytest.mark.parametrize(
        ("kind", "model", "said", "expected"),
        [
            ("ChatOpenAI", "gpt-5.1", "", r"reasoning_effort='none'"),
            ("ChatOpenAI", "gpt-5.4-mini", "BadRequestError (HTTP 400): logprobs", r"reasoning_effort='none'"),
            ("ChatOpenAI", "openai/gpt-5.2", "", r"reasoning_effort='none'"),
            ("ChatOpenAI", "gpt-5", "", r"never report them"),
            ("ChatOpenAI", "gpt-5-mini", "HTTP 400", r"never report them"),
            ("ChatOpenAI", "o3", "", r"never report them"),
            ("ChatOpenAI", "o4-mini", "", r"never report them"),
            ("ChatOpenAI", "gpt-5.1-codex", "HTTP 404", r"Responses API only"),
            ("ChatOpenAI", "o3-pro", "", r"Responses API only"),
            (
                "ChatOpenAI",
                "gpt-4o",
                "TypeError: create() got an unexpected keyword argument 'include'",
                r"Leave it out",
            ),
            ("AzureChatOpenAI", "my-deployment", "", r"On Azure"),
            ("ChatAnthropic", "claude-opus-4-6", "TypeError", r"Anthropic reports none"),
            ("ChatOpenAI", "anthropic/claude-sonnet-4-6", "", r"on any host"),
            ("ChatGoogleGenerativeAI", "gemini-2.5-pro", "", r"for Gemini pass none on"),
            ("ChatBedrockConverse", "x", "", r"Bedrock"),
            ("ChatOllama", "llama3", "TypeError: unexpected keyword argument 'logprobs'", r"langchain-ollama 1\.1"),
            ("HuggingFacePipeline", "gpt2", "", r"vLLM or llama\.cpp"),
            ("ChatOpenAI", "gpt-4o", "AuthenticationError (HTTP 401): wrong", r"check api_key"),
            ("ChatOpenAI", "mine", "NotFoundError (HTTP 404): no", r"check base_url"),
            ("ChatOpenAI", "gpt-5.6-sol", f"NotFoundError (HTTP 404): {ELSEWHERE}", r"its Responses API only"),
            ("AzureChatOpenAI", "mine", f"BadRequestError (HTTP 400): {TOO_NEW}", r"newer API version"),
            ("ChatOpenAI", "mine", "HTTP 400: Unrecognized request argument supplied: store", r"leave out a store="),
            ("ChatOpenAI", "gpt-5.1", "NotFoundError (HTTP 404): no", r"check base_url"),
            ("ChatOpenAI", "gpt-5.1-codex", "AuthenticationError (HTTP 401): no", r"check api_key"),
            ("ChatOpenAI", "o3", "APIStatusError (HTTP 402): pay", r"plan and billing"),
            ("ChatOpenAI", "gpt-5.1", "TypeError: got an unexpected keyword argument 'foo'", r"remove it from bind"),
            ("ChatAnthropic", "claude", "TypeError: unexpected keyword argument 'logprobs'", r"Anthropic reports none"),
            (
                "ChatOpenAI",
                "gpt-5.1",
                "AttributeError: 'str' object has no attribute 'model_dump'",
                r"not an answer of the",
            ),
            ("ChatOpenAI", "o3", "JSONDecodeError: Expecting value: line 1", r"check base_url .*/v1"),
            ("ChatOpenAI", "m", "TypeError: Received response with null value for 'choices'.", r"check base_url"),
            ("ChatOllama", "llama3", "", r"0\.12\.11 .*reasoning=False"),
            ("ChatOpenAI", "mine", "BadRequestError (HTTP 400): no", r"max_top_k="),
            ("ChatOpenAI", "mine", "", r"transformers serve"),
        ],
    )
    def test_is_by_public_facts(self, kind: str, model: str, said: str, expected: str) -> None:
        assert re.search(expected, advice(kind, model, said))

    @pytest.mark.parametrize(
        ("said", "told"),
        [
            (ELSEWHERE, r"\)\. OpenAI serves that model by its Responses API only, .*Its own options go into"),
            (TOO_NEW, r"\)\. The server does not know `store`, [^.]*newer API version[^.]*\.$"),
        ],
    )
    def test_of_what_openai_and_azure_say_is_given_by_other_engines_too(self, said: str, told: str) -> None:
        model = ScriptedChat(answer=ANSWERS, raises={"Snow": StatusError(said, status_code=400)})
        with pytest.raises(CapabilityError, match=told):
            TextVoteBackend(model)

    @pytest.mark.parametrize(
        ("status", "told"),
        [
            (401, r"HTTP 401\): .*\)\. The server did not accept the key: [^.]*\.$"),
            (402, r"\(StatusError \(HTTP 402\)\)\. The account has no credit left: [^.]*\.$"),
            (404, r"HTTP 404\): .*\)\. Nothing is served there: check base_url.*Its own options go into"),
            (400, r"HTTP 400\): .*\)\. Its own options go into"),
        ],
    )
    def test_of_the_account_and_the_address_is_given_by_other_engines_too(self, status: int, told: str) -> None:
        model = ScriptedChat(answer=ANSWERS, raises={"Snow": StatusError("no", status_code=status)})
        with pytest.raises(CapabilityError, match=told):
            TextVoteBackend(model)

    @pytest.mark.enable_socket  # the client tries its socket options
    @pytest.mark.parametrize("engine", [as_backend, TextVoteBackend])
    def test_of_a_key_that_is_awaited_says_that_the_probe_blocks(self, engine: Callable[[Any], Any]) -> None:
        async def key() -> str:
            return "none"

        model = pytest.importorskip("langchain_openai").ChatOpenAI(model="m", api_key=key)
        with pytest.raises(CapabilityError, match=r"\)\. An engine makes a blocking call .* is not async\.$"):
            engine(model)

    def test_of_the_address_is_given_once(self) -> None:
        assert combine_advice("NotFoundError (HTTP 404): no", "Check base_url.") == "Check base_url."
        assert combine_advice("NotFoundError (HTTP 404): no", "Take another.").startswith("Nothing is served there")
        assert combine_advice("NotFoundError (HTTP 404): no", "Take another.").endswith("Take another.")

    def test_is_there_for_everything(self) -> None:
        assert advice("", "", "").endswith(".")
        assert all(fact.advice.endswith((".", "'none').")) for fact in FACTS)

    def test_stands_in_the_error(self) -> None:
        model = ScriptedChat(answer=ANSWERS, payload=lambda tops: None, model_name="gpt-5.1")
        with pytest.raises(CapabilityError, match=r"gpt-5\.1 answered.*reasoning_effort='none'"):
            LangChainBackend(model, retry=QUICK)
