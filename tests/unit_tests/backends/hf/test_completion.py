"""Completions through LangChain models: whole texts, cut at the first stop string, in the same silence as rows."""

from __future__ import annotations

from typing import Any

import pytest

from langchain_dpicl.backends.base import TextBackend
from langchain_dpicl.backends.langchain.backend import LangChainBackend
from langchain_dpicl.backends.langchain.texts import requests_for, stops_of, text_of
from langchain_dpicl.backends.private_calls.call import ModelOutput, OpaqueValue, Reply, RetryPolicy
from langchain_dpicl.exceptions import ConfigurationError
from tests.canary import RECORD, aobserve, leaks, observe
from tests.contracts.backend import TextContract
from tests.scripted_models import ScriptedChat, StatusError, by_word, fixed, spread
from tests.writing_models import WritingChat, WritingLLM, odd_rows

QUICK = RetryPolicy(max_attempts=2, first_wait=0.001, max_wait=0.001)
LETTERS = [" ab", "cd", "ef ", "gh", " ij", "kl"]


class TestContractOfChat(TextContract):
    def make(self) -> LangChainBackend:
        return LangChainBackend(WritingChat(answer=odd_rows(LETTERS)))


class TestContractOfCompletion(TextContract):
    def make(self) -> LangChainBackend:
        return LangChainBackend(WritingLLM(answer=odd_rows(LETTERS)))


def reply(text: Any, *, finish_reason: Any = "stop", refused: bool = False) -> Reply:
    return Reply(OpaqueValue(ModelOutput(text=text, logprobs=None, finish_reason=finish_reason, refused=refused)))


class TestText:
    @pytest.mark.parametrize(
        ("stop", "expected"),
        [
            ((), "one two\nthree"),
            (("\n",), "one two"),
            (("three", "\n", " t"), "one"),
            (("o",), ""),
            (("four",), "one two\nthree"),
        ],
    )
    def test_ends_before_the_first_stop_string(self, stop: tuple[str, ...], expected: str) -> None:
        assert text_of(reply("one two\nthree"), stop) == expected

    @pytest.mark.parametrize(
        "failed",
        [
            Reply(fault="content"),
            Reply(),
            reply("no", refused=True),
            reply("no", finish_reason="content_filter"),
            reply("no", finish_reason="refusal"),
            reply(None),
            reply(["no"]),
        ],
        ids=["failed", "nothing", "refused", "filtered", "refusal", "no text", "another type"],
    )
    def test_of_an_answer_that_is_none_is_empty(self, failed: Reply) -> None:
        assert text_of(failed, ("x",)) == ""

    @pytest.mark.parametrize("wrong", ["\n", [""], ["a", ""], [7]])
    def test_needs_stop_strings_that_can_be_found(self, wrong: Any) -> None:
        with pytest.raises(ConfigurationError, match="expected stop as a list of strings"):
            stops_of(wrong)
        backend = LangChainBackend(WritingLLM(answer=odd_rows(LETTERS)))
        with pytest.raises(ConfigurationError, match="expected stop"):
            backend.complete(["a"], max_tokens=2, stop=wrong)


class TestRequests:
    def options(self, **options: Any) -> dict[str, Any]:
        return dict(requests_for([OpaqueValue("a")], max_tokens=9, **options)[0].options)

    def test_ask_for_the_likeliest_text(self) -> None:
        assert self.options(is_chat=True) == {"temperature": 0.0, "max_tokens": 9}

    def test_send_stop_strings_to_completion_models_only_and_four_at_most(self) -> None:
        stop = tuple("abcdef")
        assert "stop" not in self.options(is_chat=True, stop=stop)
        assert self.options(is_chat=False, stop=stop)["stop"] == list("abcd")
        assert "stop" not in self.options(is_chat=False)

    def test_let_public_options_win_and_none_leave_one_out(self) -> None:
        found = self.options(is_chat=True, options={"temperature": None, "max_tokens": 3, "reasoning_effort": "none"})
        assert found == {"max_tokens": 3, "reasoning_effort": "none"}

    def test_are_one_per_prompt_and_hold_it_in_its_box(self) -> None:
        requests = requests_for([OpaqueValue("secret one"), OpaqueValue("secret two")], is_chat=False, max_tokens=1)
        assert [request.prompt.reveal() for request in requests] == ["secret one", "secret two"]
        assert "secret" not in repr(requests)

    @pytest.mark.parametrize("wrong", [0, -1, 1.5, True, None])
    def test_need_room_for_a_token(self, wrong: Any) -> None:
        with pytest.raises(ConfigurationError, match="max_tokens"):
            requests_for([OpaqueValue("a")], is_chat=True, max_tokens=wrong)


class TestThroughTheEngine:
    async def test_what_is_sent_is_the_prompt_alone_and_the_options_of_the_engine(self) -> None:
        chat, llm = WritingChat(answer=odd_rows(LETTERS)), WritingLLM(answer=odd_rows(LETTERS))
        options = {"temperature": None, "seed": 3}
        for model in (chat, llm):
            backend = LangChainBackend(model, text_options=options)
            assert isinstance(backend, TextBackend)
            backend.complete(["Q: {brace} %s"], max_tokens=2, stop=["\n"])
            await backend.acomplete(["Q: {brace} %s"], max_tokens=2, stop=["\n"])
        asked = {"max_tokens": 2, "seed": 3}
        assert chat.seen[-2:] == [{"messages": [("human", "Q: {brace} %s")], **asked}] * 2
        assert llm.seen[-2:] == [{"prompt": "Q: {brace} %s", "stop": ["\n"], **asked}] * 2

    @pytest.mark.parametrize(
        "error", [StatusError("x", status_code=400), StatusError("x", status_code=503), KeyError()]
    )
    async def test_a_failed_call_is_an_empty_text_and_moves_no_other(self, error: Exception) -> None:
        model = ScriptedChat(answer=by_word({"aaa": {" card": 0.5}}, spread([" x", " y"])), raises={"bad": error})
        backend = LangChainBackend(model, retry=QUICK)
        for texts in (
            backend.complete(["aaa", "bad", "bbb"], max_tokens=1),
            await backend.acomplete(["aaa", "bad", "bbb"], max_tokens=1),
        ):
            assert texts == [" card", "", " x"]

    def test_an_outage_is_waited_out(self) -> None:
        model = ScriptedChat(answer=fixed(spread([" x", " y"])), raises={"bad": StatusError("x", status_code=429)})
        backend = LangChainBackend(model, retry=QUICK)
        model.times["bad"] = 1
        assert backend.complete(["bad"], max_tokens=1) == [" x"]

    @pytest.mark.loopback
    async def test_nobody_overhears(self) -> None:
        backend = LangChainBackend(WritingChat(answer=odd_rows(LETTERS)))
        assert leaks(observe(lambda: backend.complete([f"a {RECORD}"], max_tokens=3))) == set()
        assert leaks(await aobserve(lambda: backend.acomplete([f"a {RECORD}"], max_tokens=3))) == set()
