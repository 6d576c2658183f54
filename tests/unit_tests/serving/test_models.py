"""The embedded model in LangChain: chains, streams, stop strings, callbacks and logprobs, all offline."""

from __future__ import annotations

import math
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.language_models import BaseChatModel, BaseLLM
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate

from langchain_dpicl.backends.base import ChoiceBackend, NextTokenBackend, TextBackend
from langchain_dpicl.backends.embedded import EmbeddedModel
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.serving import ChatEmbedded, EmbeddedLLM, flatten_messages

SHOTS = (
    "Question: Where is the transfer I sent?\nTopic: transfer\n\n"
    "Question: The ATM kept my cash.\nTopic: cash withdrawal\n\nQuestion: {question}\nTopic:"
)
ASKED = "I got no cash from the ATM"
CHAT = ChatPromptTemplate.from_messages(
    [
        ("system", "Topics of questions."),
        ("human", "Where is the transfer I sent?"),
        ("ai", "transfer"),
        ("human", "The ATM kept my cash."),
        ("ai", "cash withdrawal"),
        ("human", "{question}"),
    ]
)
MODELS: list[BaseLLM | BaseChatModel] = [EmbeddedLLM(), ChatEmbedded()]


class Listener(BaseCallbackHandler):
    def __init__(self) -> None:
        self.events: list[str] = []
        self.tokens: list[str] = []

    def on_llm_start(self, *_: Any, **__: Any) -> None:
        self.events.append("start")

    def on_chat_model_start(self, *_: Any, **__: Any) -> None:
        self.events.append("start")

    def on_llm_new_token(self, token: str, **_: Any) -> None:
        self.tokens.append(token)

    def on_llm_end(self, *_: Any, **__: Any) -> None:
        self.events.append("end")


@pytest.fixture(params=MODELS, ids=["llm", "chat"])
def model(request):
    return request.param


class TestChains:
    async def test_a_chain_answers_in_every_way_of_calling_it(self, model):
        chain = PromptTemplate.from_template(SHOTS) | model | StrOutputParser()
        asked = {"question": ASKED}
        expected = " cash withdrawal"
        assert chain.invoke(asked) == expected
        assert await chain.ainvoke(asked) == expected
        assert chain.batch([asked, {"question": "my transfer is late"}]) == [expected, " transfer"]
        assert await chain.abatch([asked, asked]) == [expected, expected]
        assert "".join(chain.stream(asked)) == expected
        assert "".join([chunk async for chunk in chain.astream(asked)]) == expected

    def test_a_stream_comes_token_by_token(self, model):
        chunks = [chunk for chunk in (model | StrOutputParser()).stream(SHOTS.format(question=ASKED)) if chunk]
        assert chunks == [" cash", " withdrawal"]

    def test_callbacks_hear_start_tokens_and_end(self, model):
        listener = Listener()
        list(model.stream(SHOTS.format(question=ASKED), config={"callbacks": [listener]}))
        assert listener.events == ["start", "end"]
        assert [token for token in listener.tokens if token] == [" cash", " withdrawal"]
        model.invoke("x", config={"callbacks": [listener]})
        assert listener.events == ["start", "end"] * 2

    def test_the_engine_is_at_hand_and_has_every_capability(self, model):
        assert isinstance(model.backend, EmbeddedModel)
        for capability in (NextTokenBackend, ChoiceBackend, TextBackend):
            assert isinstance(model.backend, capability)
        assert model.model_copy(update={"max_tokens": 3}).backend is model.backend

    def test_it_names_itself_without_its_tables(self, model):
        assert model._llm_type.startswith("dpicl")
        assert model._identifying_params == {
            "model_name": "dpicl-embedded",
            "engine": model.backend.fingerprint,
            "max_tokens": 64,
            "temperature": 0.0,
            "top_k": None,
            "top_p": 1.0,
            "seed": None,
            "own_stop": None,
        }
        assert "backend" not in repr(model) + str(model.model_dump())

    @pytest.mark.parametrize("fault", [{"max_tokens": 0}, {"temperature": -0.5}, {"seed": -1}, {"seed": 2**128}])
    @pytest.mark.parametrize("kind", [EmbeddedLLM, ChatEmbedded])
    def test_parameters_out_of_range_are_refused(self, kind, fault):
        with pytest.raises(ConfigurationError, match=next(iter(fault))):
            kind(**fault)

    def test_its_own_tokens_are_counted_offline(self, model):
        assert model.get_num_tokens("transfer to an account") == model.backend.count_tokens("transfer to an account")


class TestLengthAndStop:
    def text(self, model, *, stream, **kwargs):
        chain = model | StrOutputParser()
        return "".join(chain.stream(PROMPT, **kwargs)) if stream else chain.invoke(PROMPT, **kwargs)

    @pytest.mark.parametrize("stream", [False, True])
    def test_stop_strings_are_cut_off_even_across_tokens(self, model, stream):
        whole = self.text(model, stream=stream)
        assert whole == " one two three four five"
        assert self.text(model, stream=stream, stop=["o three"]) == " one tw"
        assert self.text(model, stream=stream, stop=["four", "two"]) == " one "
        assert self.text(model, stream=stream, stop=["fives", " one two four"]) == whole

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_text_as_stop_is_one_string(self, model, stream):
        assert self.text(model, stream=stream, stop="o three") == " one tw"

    @pytest.mark.parametrize(
        "fault",
        [
            *({"max_tokens": wrong} for wrong in ("x", 1.5, 0)),
            *({"temperature": wrong} for wrong in ("hot", -1.0, math.nan)),
            *({"seed": wrong} for wrong in ("x", -1, 2**128)),
            *({"stop": wrong} for wrong in (5, [5])),
            {"top_logprobs": "x", "logprobs": True},
            {"top_logprobs": 3},
            {"top_logprobs": 3, "logprobs": False},
        ],
        ids=str,
    )
    def test_options_of_a_call_out_of_range_are_refused(self, model, fault):
        with pytest.raises(ConfigurationError, match=rf"{next(iter(fault))}: expected .*, found"):
            model.invoke(PROMPT, **fault)

    @pytest.mark.parametrize(
        ("stop", "found"), [(5, "int"), (["our", 5], "int"), ([["our"]], "list"), ({"our"}, "set")]
    )
    def test_a_wrong_stop_is_named_by_its_type(self, model, stop, found):
        with pytest.raises(ConfigurationError, match=rf"stop: expected .*texts.*, found {found}\."):
            model.invoke(PROMPT, stop=stop)

    @pytest.mark.parametrize("stream", [False, True])
    def test_max_tokens_is_of_the_model_or_of_the_call(self, model, stream):
        assert self.text(model, stream=stream, max_tokens=2) == " one two"
        assert self.text(model.model_copy(update={"max_tokens": 3}), stream=stream) == " one two three"
        assert self.text(model.bind(max_tokens=1), stream=stream) == " one"

    @pytest.mark.parametrize("stream", [False, True])
    def test_characters_of_several_tokens_arrive_whole(self, model, stream):
        prompt = "Say: \U0001f642 東 ok\n\nSay:"
        chain = model | StrOutputParser()
        chunks = list(chain.stream(prompt)) if stream else [chain.invoke(prompt)]
        assert "".join(chunks) == " \U0001f642 東 ok"
        assert not any("\ufffd" in chunk for chunk in chunks)

    def test_a_seed_repeats_and_no_seed_varies(self, model):
        warm = model.model_copy(update={"temperature": 1.0, "max_tokens": 12})
        chain = warm | StrOutputParser()
        for seed in (3, 2**64 - 1, 2**128 - 1):
            assert chain.invoke("I want", seed=seed) == chain.invoke("I want", seed=seed)
        assert EmbeddedLLM(seed=2**64 - 1, max_tokens=1, temperature=1.0).invoke("I want")
        assert len({chain.invoke("I want") for _ in range(8)}) > 2


PROMPT = "Count: one two three four five\n\nCount:"


class TestChatLogprobs:
    def test_they_have_the_shape_of_openai(self):
        chat = ChatEmbedded().bind(logprobs=True, top_logprobs=4)
        content = chat.invoke(SHOTS.format(question=ASKED)).response_metadata["logprobs"]["content"]
        assert [position["token"] for position in content] == [" cash", " withdrawal"]
        for position in content:
            top = position["top_logprobs"]
            assert len(top) == 4
            assert bytes(position["bytes"]).decode() == position["token"]
            assert position["logprob"] == max(entry["logprob"] for entry in top)
            assert sum(math.exp(entry["logprob"]) for entry in top) <= 1

    def test_they_are_the_rows_of_the_engine(self):
        chat = ChatEmbedded()
        result = chat._generate([HumanMessage(PROMPT)], logprobs=True, top_logprobs=3, max_tokens=1)
        top = result.generations[0].generation_info["logprobs"]["content"][0]["top_logprobs"]
        expected = chat.backend.top_tokens(PROMPT, [], top_k=3)
        assert [math.exp(entry["logprob"]) for entry in top] == pytest.approx([p for _, p in expected])
        assert [entry["token"] for entry in top] == [chat.backend.decode([token]) for token, _ in expected]

    def test_a_merged_stream_has_them_all(self):
        chat = ChatEmbedded().bind(logprobs=True, top_logprobs=2)
        chunks = list(chat.stream(PROMPT))
        whole = chunks[0]
        for chunk in chunks[1:]:
            whole += chunk
        assert len(whole.response_metadata["logprobs"]["content"]) == 5
        assert whole.response_metadata["finish_reason"] == "stop"

    def test_without_asking_there_are_none(self):
        message = ChatEmbedded().invoke(PROMPT, max_tokens=2)
        assert "logprobs" not in message.response_metadata
        assert message.response_metadata["finish_reason"] == "length"
        read = EmbeddedModel().count_tokens(PROMPT)
        assert message.usage_metadata == {"input_tokens": read, "output_tokens": 2, "total_tokens": read + 2}


class TestChatPrompts:
    def test_answers_in_the_chat_are_demonstrations(self):
        chain = CHAT | ChatEmbedded() | StrOutputParser()
        assert chain.invoke({"question": ASKED}) == "cash withdrawal"
        assert chain.invoke({"question": "when does a transfer arrive"}) == "transfer"

    def test_messages_are_joined_by_blank_lines_and_answers_follow_their_question(self):
        system, human, answer = SystemMessage("S"), HumanMessage("H"), AIMessage("A")
        assert flatten_messages([system, human]) == "S\n\nH"
        assert flatten_messages([system, human, answer, human]) == "S\n\nH\nA\n\nH\n"
        assert flatten_messages([human, answer]) == "H A"
        assert flatten_messages([human, AIMessage(" A")]) == "H A"
        assert flatten_messages([human, answer, human, answer]) == "H\nA\n\nH\nA"

    @pytest.mark.parametrize(
        ("asked", "found"),
        [
            ([], r"\[\]"),
            ([HumanMessage([{"type": "image_url", "image_url": {"url": "data:,"}}])], "image_url"),
            ([SystemMessage("Be brief."), HumanMessage([{"type": "text", "text": " "}, {"type": "image"}])], "image"),
        ],
    )
    def test_a_question_without_any_text_is_refused(self, asked: list[Any], found: str):
        model = ChatEmbedded()
        for ask in (model.invoke, lambda messages: list(model.stream(messages))):
            with pytest.raises(ConfigurationError, match=f"messages: expected text, found .*{found}"):
                ask(asked)
        assert model.invoke([SystemMessage("Say a word.")]).content

    def test_text_blocks_are_read_and_others_ignored(self):
        blocks = [{"type": "text", "text": "one"}, {"type": "image_url", "image_url": {"url": "data:,"}}]
        assert flatten_messages([HumanMessage(blocks)]) == "one"
