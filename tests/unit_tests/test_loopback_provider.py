"""The loopback provider, asked by the official SDK: its shapes are those of the SDK's types, its numbers the model's."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
from langchain_core.messages import AIMessage, HumanMessage
from pydantic import TypeAdapter

from langchain_dpicl.serving import flatten_messages
from tests.loopback_answers import REFUSAL, engine
from tests.loopback_provider import (
    Provider,
    provider,
)

openai = pytest.importorskip("openai")
pytestmark = pytest.mark.loopback

PROMPT = "text: why was my card payment declined ?\nlabel: card\n\ntext: my card payment is late\nlabel:"
USER = {"role": "user", "content": PROMPT}
STORY = {"role": "user", "content": "The name of the city on the river is"}
CHOICE = {
    "type": "choice",
    "name": "label",
    "instructions": "Which label comes next?",
    "choices": [{"value": "card"}, {"value": "transfer", "description": "Of money."}, {"value": "top up"}],
}
BEGUN = {"role": "assistant", "content": " The card"}


def client(served: Provider, **options: Any) -> Any:
    return _client(served.url, *options.items())


@cache
def _client(url: str, *options: tuple[str, Any]) -> Any:
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, **dict(options))


def strictly(kind: Any, answer: Any) -> dict[str, Any]:
    """The SDK builds its objects without checks; this checks one, and that no field is unknown to the SDK's types."""
    found = answer.model_dump(by_alias=True)
    _adapter(kind).validate_python(found, strict=True, extra="forbid")
    return dict(found)


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def row_of(prompt: str) -> np.ndarray:
    """The model's own next-token probabilities: the second source of what is reported."""
    return engine().open([prompt]).score(engine().vocabulary())[0]


@pytest.fixture(scope="module")
def openai_like() -> Iterator[Provider]:
    with provider() as served:
        yield served


@pytest.fixture(scope="module")
def vllm_like() -> Iterator[Provider]:
    with provider(dialect="vllm") as served:
        yield served


@pytest.fixture(autouse=True)
def forget(openai_like: Provider, vllm_like: Provider) -> None:
    openai_like.clear()
    vllm_like.clear()


class TestChat:
    def ask(self, served: Provider, *messages: Any, **options: Any) -> Any:
        options = {"max_tokens": 1, "logprobs": True, "top_logprobs": 20, **options}
        return client(served).chat.completions.create(model="loopback", messages=list(messages), **options)

    def test_an_answer_has_the_documented_shape(self, openai_like: Provider) -> None:
        found = strictly(openai.types.chat.ChatCompletion, self.ask(openai_like, USER, max_tokens=4))
        assert found["object"] == "chat.completion"
        assert found["usage"]["total_tokens"] == found["usage"]["prompt_tokens"] + found["usage"]["completion_tokens"]
        assert len(found["choices"][0]["logprobs"]["content"]) == len(
            engine().encode(found["choices"][0]["message"]["content"])
        )

    def test_reported_numbers_are_the_models_own(self, openai_like: Provider) -> None:
        (position,) = self.ask(openai_like, USER).choices[0].logprobs.content
        row = row_of(PROMPT)
        assert len(position.top_logprobs) == 20
        assert position.token == position.top_logprobs[0].token == engine().decode([int(row.argmax())])
        assert [math.exp(entry.logprob) for entry in position.top_logprobs] == pytest.approx(np.sort(row)[::-1][:20])
        (token,) = engine().encode(position.token)
        assert math.exp(position.logprob) == pytest.approx(row[token])

    def test_the_same_request_has_the_same_answer(self, openai_like: Provider) -> None:
        first, second = (self.ask(openai_like, USER, max_tokens=5, temperature=1.0) for _ in range(2))
        assert first == second

    @pytest.mark.parametrize(("logprobs", "top"), [(True, 21), (False, 5), (True, -1)])
    def test_numbers_beyond_the_documented_ones_are_rejected(
        self, openai_like: Provider, logprobs: bool, top: int
    ) -> None:
        with pytest.raises(openai.BadRequestError, match="top_logprobs"):
            self.ask(openai_like, USER, logprobs=logprobs, top_logprobs=top)

    def test_a_trailing_assistant_message_starts_a_new_message(self, openai_like: Provider) -> None:
        anew = self.ask(openai_like, USER, BEGUN).choices[0].logprobs.content[0]
        continued = row_of(f"{PROMPT} The card")
        assert math.exp(anew.logprob) != pytest.approx(continued.max())
        assert math.exp(anew.logprob) == pytest.approx(row_of(f"{PROMPT} The card\n\n{PROMPT}\n").max())

    def test_what_is_refused_comes_back_as_a_refusal(self) -> None:
        with provider(refuse="declined") as served:
            found = strictly(openai.types.chat.ChatCompletion, self.ask(served, USER))
            assert found["choices"][0]["message"]["refusal"] == REFUSAL
            assert self.ask(served, {"role": "user", "content": "hello"}).choices[0].message.refusal is None

    def test_a_stop_string_ends_the_text_before_it(self, openai_like: Provider) -> None:
        whole = self.ask(openai_like, STORY, max_tokens=6).choices[0].message.content
        word = whole.split()[1]
        short = self.ask(openai_like, STORY, max_tokens=6, stop=[word]).choices[0]
        assert short.message.content == whole[: whole.index(word)]
        assert short.finish_reason == "stop"

    def test_chunks_add_up_to_the_answer(self, openai_like: Provider) -> None:
        answer = self.ask(openai_like, STORY, max_tokens=6)
        whole = answer.choices[0]
        chunks = list(self.ask(openai_like, STORY, max_tokens=6, stream=True, stream_options={"include_usage": True}))
        for chunk in chunks:
            strictly(openai.types.chat.ChatCompletionChunk, chunk)
        pieces = [chunk.choices[0] for chunk in chunks if chunk.choices]
        assert "".join(piece.delta.content or "" for piece in pieces) == whole.message.content
        assert [
            entry for piece in pieces if piece.logprobs for entry in piece.logprobs.content
        ] == whole.logprobs.content
        assert pieces[-1].finish_reason == whole.finish_reason
        assert chunks[-1].usage == answer.usage


class TestVllm:
    def ask(self, served: Provider, *messages: Any, **extra: Any) -> Any:
        options = {"max_tokens": 1, "logprobs": True, "top_logprobs": extra.pop("top_logprobs", 20)}
        made = client(served).chat.completions
        return made.create(model="loopback", messages=list(messages), extra_body=extra, **options).choices[0]

    def test_the_last_message_is_continued_only_when_told_to(self, vllm_like: Provider) -> None:
        told = {"continue_final_message": True, "add_generation_prompt": False}
        continued = row_of(f"{PROMPT} The card").max()
        right = self.ask(vllm_like, USER, BEGUN, **told)
        assert math.exp(right.logprobs.content[0].logprob) == pytest.approx(continued)
        assert right.message.content.startswith(" The card")
        for extra in ({}, {"add_generation_prompt": False}):
            anew = self.ask(vllm_like, USER, BEGUN, **extra)
            assert math.exp(anew.logprobs.content[0].logprob) != pytest.approx(continued)
            assert not anew.message.content.startswith(" The card")
        for extra in ({"continue_final_message": True}, {**told, "add_generation_prompt": True}):
            with pytest.raises(openai.BadRequestError, match="Cannot set both"):
                self.ask(vllm_like, USER, BEGUN, **extra)

    def test_twenty_tokens_are_the_most_unless_the_server_allows_all(self, vllm_like: Provider) -> None:
        for asked in (21, -1):
            with pytest.raises(openai.BadRequestError, match="greater than max allowed: 20"):
                self.ask(vllm_like, USER, top_logprobs=asked)
        with provider(dialect="vllm", max_logprobs=-1) as generous:
            (position,) = self.ask(generous, USER, top_logprobs=-1).logprobs.content
        assert len(position.top_logprobs) == len(engine().vocabulary())
        assert math.fsum(math.exp(entry.logprob) for entry in position.top_logprobs) == pytest.approx(1.0)

    def test_tokens_may_be_named_by_their_ids(self, vllm_like: Provider) -> None:
        plain = self.ask(vllm_like, USER).logprobs.content[0]
        (token,) = engine().encode(plain.token)
        by_id = self.ask(vllm_like, USER, return_tokens_as_token_ids=True).logprobs.content[0]
        assert by_id.token == f"token_id:{token}"
        assert bytes(by_id.bytes) == by_id.token.encode()
        with provider(dialect="vllm", token_ids=True) as served:
            assert self.ask(served, USER).logprobs.content[0] == by_id

    def test_bytes_are_those_of_what_is_shown(self) -> None:
        with provider(dialect="vllm", max_logprobs=-1) as served:
            (position,) = self.ask(served, USER, top_logprobs=-1).logprobs.content
        half = [entry for entry in position.top_logprobs if "\ufffd" in entry.token]
        assert half
        assert all(bytes(entry.bytes) == entry.token.encode() for entry in position.top_logprobs)

    def test_the_echo_can_be_left_out(self) -> None:
        with provider(dialect="vllm", echo_prefix=False) as served:
            found = self.ask(served, USER, BEGUN, continue_final_message=True, add_generation_prompt=False)
        assert not found.message.content.startswith(" The card")


class TestCompletions:
    def ask(self, served: Provider, prompt: Any = PROMPT, **options: Any) -> Any:
        return client(served).completions.create(model="loopback", prompt=prompt, **{"max_tokens": 3, **options})

    def test_an_answer_has_the_documented_shape(self, openai_like: Provider) -> None:
        found = strictly(openai.types.Completion, self.ask(openai_like, logprobs=5))
        logprobs = found["choices"][0]["logprobs"]
        assert "".join(logprobs["tokens"]) == found["choices"][0]["text"]
        assert logprobs["text_offset"] == [0, *np.cumsum([len(token) for token in logprobs["tokens"][:-1]])]
        assert [
            math.exp(top[token]) for top, token in zip(logprobs["top_logprobs"], logprobs["tokens"], strict=True)
        ] == [math.exp(logprob) for logprob in logprobs["token_logprobs"]]
        assert math.exp(logprobs["token_logprobs"][0]) == pytest.approx(row_of(PROMPT).max())

    def test_every_prompt_of_a_list_has_its_own_answer(self, openai_like: Provider) -> None:
        both = self.ask(openai_like, [PROMPT, "The name of the river is"]).choices
        assert [choice.index for choice in both] == [0, 1]
        assert both[0].text == self.ask(openai_like).choices[0].text != both[1].text

    def test_each_dialect_has_its_own_limit(self, openai_like: Provider, vllm_like: Provider) -> None:
        with pytest.raises(openai.BadRequestError, match="from 0 to 5, got 6"):
            self.ask(openai_like, logprobs=6)
        with pytest.raises(openai.BadRequestError, match="greater than max allowed: 20"):
            self.ask(vllm_like, logprobs=21)
        assert len(self.ask(vllm_like, logprobs=20, max_tokens=1).choices[0].logprobs.top_logprobs[0]) == 20

    def test_ids_are_spelled_in_the_legacy_shape_too(self, vllm_like: Provider) -> None:
        found = self.ask(vllm_like, logprobs=2, extra_body={"return_tokens_as_token_ids": True}).choices[0].logprobs
        assert all(token.startswith("token_id:") for token in [*found.tokens, *found.top_logprobs[0]])

    def test_chunks_add_up_to_the_answer(self, openai_like: Provider) -> None:
        whole = self.ask(openai_like, logprobs=3).choices[0]
        chunks = list(self.ask(openai_like, logprobs=3, stream=True))
        for chunk in chunks[:-1]:
            assert chunk.choices[0].finish_reason is None
            chunk.choices[0].finish_reason = "stop"  # the SDK has no type for a chunk, which says nothing here
        for chunk in chunks:
            strictly(openai.types.Completion, chunk)
        assert "".join(chunk.choices[0].text for chunk in chunks) == whole.text
        assert chunks[-1].choices[0].finish_reason == whole.finish_reason


def test_a_server_that_ignores_logprobs_answers_without_them() -> None:
    with provider(dialect="ignores") as served:
        asked = {"model": "loopback", "max_tokens": 1}
        chat = client(served).chat.completions.create(messages=[USER], logprobs=True, top_logprobs=5, **asked)
        text = client(served).completions.create(prompt=PROMPT, logprobs=5, **asked)
    assert chat.choices[0].message.content == text.choices[0].text != ""
    assert chat.choices[0].logprobs is text.choices[0].logprobs is None


def test_a_chat_with_an_assistant_in_it_reads_as_the_embedded_model_reads_it(openai_like: Provider) -> None:
    asked = [{"role": "user", "content": "red"}, {"role": "assistant", "content": "colour"}, USER]
    found = client(openai_like).chat.completions.create(model="loopback", messages=asked, logprobs=True, max_tokens=1)
    prompt = flatten_messages([HumanMessage("red"), AIMessage("colour"), HumanMessage(PROMPT)])
    assert math.exp(found.choices[0].logprobs.content[0].logprob) == pytest.approx(row_of(prompt).max())


def test_models_are_listed_and_other_paths_are_not_found(openai_like: Provider) -> None:
    (model,) = client(openai_like).models.list()
    assert strictly(openai.types.Model, model)["id"] == "loopback"
    with pytest.raises(openai.NotFoundError):
        client(openai_like).embeddings.create(model="loopback", input="text")


class TestDecisions:
    def ask(self, served: Provider, *questions: Any, asked: Any = PROMPT) -> Any:
        return client(served).decisions.create(model="gpt-6-luna", input=asked, questions=list(questions))

    def test_probabilities_are_the_likelihoods_of_the_labels(self, openai_like: Provider) -> None:
        decision = self.ask(openai_like, CHOICE)
        assert strictly(openai.types.Decision, decision)["answers"][0]["name"] == "label"
        (answer,) = decision.answers
        assert 0.0 <= answer.confidence <= 1.0
        prompt = f"Which label comes next?\n\n{PROMPT}"
        scores = engine().score_choices([prompt], [" card", " transfer", " top up"])[0]
        expected = np.exp(scores) / np.exp(scores).sum()
        assert [entry.probability for entry in answer.probabilities] == pytest.approx(expected)
        assert answer.choice == "card"  # the demonstration says so

    def test_booleans_are_values_of_their_own(self, openai_like: Provider) -> None:
        values = [{"value": True}, {"value": "true"}, {"value": False}]
        (answer,) = self.ask(openai_like, {**CHOICE, "choices": values}).answers
        assert [entry.value for entry in answer.probabilities] == [True, "true", False]

    def test_messages_and_parts_are_read_as_one_text(self, openai_like: Provider) -> None:
        parts = [{"type": "input_text", "text": PROMPT}]
        listed = self.ask(openai_like, CHOICE, asked=[{"role": "user", "content": parts}])
        assert listed.answers == self.ask(openai_like, CHOICE).answers

    def test_one_question_may_be_refused(self) -> None:
        bad = {**CHOICE, "name": "bad", "instructions": "Is it forbidden?"}
        with provider(refuse="forbidden") as served:
            found = strictly(openai.types.Decision, self.ask(served, bad, CHOICE))
        assert found["answers"][0] == {"type": "refusal", "name": "bad"}
        assert found["answers"][1]["type"] == "choice"

    @pytest.mark.parametrize(
        "wrong",
        [
            {"choices": [{"value": "card"}]},
            {"choices": [{"value": "card"}, {"value": "card"}]},
            {"choices": [{"value": str(number)} for number in range(256)]},
            {"choices": [{"value": 1}, {"value": 2}]},
            {"instructions": ""},
            {"type": "guess"},
        ],
        ids=["one", "twice", "many", "numbers", "nothing-asked", "unknown"],
    )
    def test_questions_outside_the_documented_limits_are_rejected(
        self, openai_like: Provider, wrong: dict[str, Any]
    ) -> None:
        with pytest.raises(openai.BadRequestError):
            self.ask(openai_like, {**CHOICE, **wrong})


class TestMessages:
    def ask(self, served: Provider, *messages: Any, **options: Any) -> Any:
        anthropic = pytest.importorskip("anthropic")
        asked = anthropic.Anthropic(base_url=served.root, api_key="none", max_retries=0)
        return asked.messages.create(model="loopback", messages=list(messages), **{"max_tokens": 4, **options})

    def test_an_answer_has_the_documented_shape(self, openai_like: Provider) -> None:
        anthropic = pytest.importorskip("anthropic")
        found = strictly(anthropic.types.Message, self.ask(openai_like, STORY))
        assert found["content"][0]["text"] == engine().complete([STORY["content"]], max_tokens=4)[0]
        assert (found["stop_reason"], found["usage"]["output_tokens"]) == ("max_tokens", 4)

    def test_events_add_up_to_the_answer(self, openai_like: Provider) -> None:
        anthropic = pytest.importorskip("anthropic")
        events = list(self.ask(openai_like, STORY, stream=True))
        for event in events:
            strictly(anthropic.types.RawMessageStreamEvent, event)
        pieces = [event.delta.text for event in events if event.type == "content_block_delta"]
        assert "".join(pieces) == self.ask(openai_like, STORY).content[0].text
        assert events[-1].type == "message_stop"

    def test_an_assistant_message_is_not_continued(self, openai_like: Provider) -> None:
        with pytest.raises(Exception, match="does not support assistant message prefill"):
            self.ask(openai_like, USER, BEGUN)

    def test_what_is_refused_has_no_text(self) -> None:
        with provider(refuse="declined") as served:
            found = self.ask(served, USER)
        assert (found.stop_reason, found.content) == ("refusal", [])
