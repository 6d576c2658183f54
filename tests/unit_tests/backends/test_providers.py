"""Classes of LangChain's providers: how they spell options, where they put log-probabilities, and who only writes text."""

from __future__ import annotations

import math
import types
from typing import Any

import numpy as np
import pytest

from langchain_dpicl.backends.langchain.backend import LangChainBackend
from langchain_dpicl.backends.langchain.logprobs import LOST, next_token
from langchain_dpicl.backends.langchain.texts import TextVoteBackend
from langchain_dpicl.backends.private_calls.call import SPELLINGS, spelling_of
from langchain_dpicl.backends.private_calls.public_calls import advice
from langchain_dpicl.backends.resolve import as_backend, as_choice_backend
from langchain_dpicl.exceptions import CapabilityError, ConfigurationError, UnsilencableModelError
from tests.scripted_models import ScriptedChat
from tests.unit_tests.backends.provider_doubles import (
    TOPS,
    ChatBedrockConverse,
    ChatGoogleGenerativeAI,
    ChatLiteLLM,
    ChatMistralAI,
    ChatOllama,
    ChatVertexAI,
    HuggingFaceEndpoint,
    OllamaLLM,
    PlainChat,
    Talk,
    logprob_objects,
)

TEXT_CLASSES = [OllamaLLM, ChatGoogleGenerativeAI, HuggingFaceEndpoint, ChatMistralAI, ChatBedrockConverse]


class TestSpellings:
    def test_a_text_vote_of_ollama_sets_fields_and_passes_no_foreign_argument(self) -> None:
        for model in (ChatOllama(num_ctx=4096), OllamaLLM()):
            engine = TextVoteBackend(model)
            assert engine.score_choices(["Snow is"], ["white", "black"]).tolist() == [[0.0, -np.inf]]
            sent = model.talk.sent[-1]
            assert (sent["num_predict"], sent["temperature"]) == (len("white") + 16, 0.0)
            assert sent.get("num_ctx") == (4096 if isinstance(model, ChatOllama) else None)

    def test_the_model_of_the_user_keeps_its_own_options(self) -> None:
        model = ChatOllama(num_predict=256, temperature=0.8)
        TextVoteBackend(model, max_tokens=3).complete(["Snow is"], max_tokens=7)
        assert (model.num_predict, model.temperature) == (256, 0.8)
        assert [sent["num_predict"] for sent in model.talk.sent] == [3, 7]

    def test_options_in_the_names_of_the_class_go_before_ours(self) -> None:
        model = ChatOllama()
        TextVoteBackend(model, options={"num_predict": 40})
        TextVoteBackend(ChatGoogleGenerativeAI(talk=model.talk), options={"max_output_tokens": 50})
        assert [sent.get("num_predict", sent.get("max_output_tokens")) for sent in model.talk.sent] == [40, 50]

    def test_bound_options_in_either_spelling_give_way_to_ours(self) -> None:
        model = ChatOllama()
        for bound in ({"num_predict": 99}, {"max_tokens": 99}):
            TextVoteBackend(model.bind(**bound), max_tokens=5)
        assert [sent["num_predict"] for sent in model.talk.sent] == [5, 5]

    @pytest.mark.parametrize("kind", [ChatOllama, OllamaLLM])
    def test_a_mapping_that_replaces_the_fields_of_ollama_takes_our_options_in(self, kind: Any) -> None:
        bound = {"num_ctx": 8192, "num_predict": 99, "temperature": 0.8, "stop": ["w"]}
        TextVoteBackend((model := kind()).bind(options=bound), max_tokens=5)
        sent = {name: value for name, value in model.talk.sent[0].items() if not name.endswith("logprobs")}
        assert sent == {"num_ctx": 8192, "num_predict": 5, "temperature": 0.0}
        assert bound["num_predict"] == 99
        stopped = TextVoteBackend(kind(talk=model.talk).bind(options=bound), options={"stop": ["."]})
        assert model.talk.sent[-1]["stop"] == ["."]
        assert stopped.options["stop"] == ["."]

    def test_options_of_ollama_that_are_no_mapping_are_refused(self) -> None:
        model = ChatOllama()
        with pytest.raises(ConfigurationError, match=r"expected options= of ChatOllama to be a mapping, found list"):
            TextVoteBackend(model.bind(options=[("num_ctx", 8192)]))
        assert model.talk.sent == []

    def test_gemini_is_asked_for_output_tokens(self) -> None:
        model = ChatGoogleGenerativeAI()
        assert isinstance(as_choice_backend(model), TextVoteBackend)
        assert model.talk.sent == [{"max_output_tokens": 5 + 16, "temperature": 0.0}]

    def test_tgi_takes_the_likeliest_token_without_a_temperature(self) -> None:
        model = HuggingFaceEndpoint()
        engine = TextVoteBackend(model)
        assert model.talk.sent == [{"max_new_tokens": 5 + 16, "do_sample": False}]
        assert engine.options["temperature"] == 0.0  # nothing was rejected

    def test_litellm_is_kept_from_logging_and_caching(self) -> None:
        model = ChatLiteLLM()
        TextVoteBackend(model)
        assert (model.talk.sent[0]["no-log"], model.talk.sent[0]["caching"]) == (True, False)

    @pytest.mark.parametrize("name", ["logger_fn", "success_callback", "input_callback", "cache"])
    def test_an_observer_of_litellm_is_not_sent_with_a_call(self, name: str) -> None:
        model = ChatLiteLLM()
        TextVoteBackend(model.bind(**{name: print}, caching=True), options={name: print, "no-log": False})
        assert name not in model.talk.sent[0]
        assert (model.talk.sent[0]["no-log"], model.talk.sent[0]["caching"]) == (True, False)

    def test_arguments_named_as_an_observer_of_litellm_are_sent_by_other_classes(self) -> None:
        model = PlainChat()
        TextVoteBackend(model.bind(cache="off", caching=True), options={"logger_fn": "none"})
        sent = model.talk.sent[0]
        assert (sent["cache"], sent["caching"], sent["logger_fn"]) == ("off", True, "none")

    def test_a_class_that_only_holds_litellm_sends_none_of_its_observers(self) -> None:
        class Held(PlainChat):
            client: Any = None

        model = Held(client=types.ModuleType("litellm"))
        TextVoteBackend(model.bind(logger_fn=print, caching=True))
        assert not model.talk.sent[0].keys() & {"logger_fn", "caching"}

    def test_a_subclass_inherits_and_an_unknown_class_has_the_names_of_openai(self) -> None:
        class Own(ChatOllama):
            pass

        class NamedAlike(ScriptedChat):
            pass

        NamedAlike.__name__ = "ChatOllama"
        assert spelling_of(Own()) is spelling_of(ChatOllama())
        assert spelling_of(Own()).cap == "num_predict"
        assert spelling_of(NamedAlike(answer=lambda text: TOPS)).cap == "max_tokens"

    def test_a_listed_class_that_is_installed_exists_under_that_name(self) -> None:
        for package, name in SPELLINGS:
            if package not in {"langchain_anthropic", "langchain_huggingface"}:
                continue  # the others are looked at by `make providers`
            module = pytest.importorskip(package)
            assert getattr(module, name).__name__ == name
            assert getattr(module, name).__module__.startswith(f"{package}.")


class TestLogprobsOfOllama:
    def test_the_chat_model_votes_with_its_first_tokens_and_writes(self) -> None:
        model = ChatOllama()
        engine = as_choice_backend(model)
        assert isinstance(engine, LangChainBackend)
        assert engine.max_top_k == len(TOPS)
        session = engine.open(["Snow is"], prefix=[])
        np.testing.assert_allclose(session.score([b"white", b"black", b" red"]), [[0.7, 0.2, 0.1]])
        assert model.talk.sent[-1] == {"num_predict": 1, "temperature": 1.0, "logprobs": True, "top_logprobs": 20}

    @pytest.mark.parametrize("nested", [False, True], ids=["a list", "an object with content"])
    def test_objects_of_an_sdk_are_read_as_mappings_are(self, nested: bool) -> None:
        listed = logprob_objects({"a": 0.5, "b": 0.25}, 5)
        holder = type("Holder", (type(listed[0]).__mro__[2],), {"__annotations__": {"content": list[Any]}})
        payload = holder(content=listed) if nested else listed
        assert next_token(payload) == pytest.approx({b"a": 0.5, b"b": 0.25})

    def test_bytes_that_the_sdk_has_lost_are_no_token_of_their_own(self) -> None:
        found = next_token(logprob_objects({"\ufffd": 0.5, "b": 0.25}, 5))
        assert found == pytest.approx({LOST: 0.5, b"b": 0.25})

    @pytest.mark.parametrize(("reason", "expected"), [("stop", 1.0), ("length", 0.0)])
    def test_an_answer_that_the_model_ended_at_once_is_the_end(self, reason: str, expected: float) -> None:
        engine = LangChainBackend(model := ChatOllama(), continuation="instruct")
        model.talk.text, model.talk.reason, model.talk.tops = "", reason, {}
        assert engine.open(["Snow is"], prefix=[]).score([engine.eos]).tolist() == [[expected]]


class TestTextOnly:
    @pytest.mark.parametrize("kind", TEXT_CLASSES)
    def test_it_votes_with_its_text_without_being_asked_for_logprobs(self, kind: Any) -> None:
        model = kind()
        engine = as_choice_backend(model)
        assert isinstance(engine, TextVoteBackend)
        assert engine.score_choices(["Snow is"], ["white", "black"]).tolist() == [[0.0, -np.inf]]
        assert not any(sent.get("logprobs") for sent in model.talk.sent)

    @pytest.mark.parametrize("kind", TEXT_CLASSES)
    def test_it_is_refused_for_writing_with_advice(self, kind: Any) -> None:
        with pytest.raises(CapabilityError, match=r"(?s)TextVoteBackend") as caught:
            as_backend(kind())
        assert "\n" not in str(caught.value)
        assert "errors.pydantic.dev" not in str(caught.value)

    def test_the_advice_for_a_completion_model_of_ollama_is_the_chat_model(self) -> None:
        assert "take ChatOllama" in advice("OllamaLLM", "m")
        assert as_choice_backend(ChatOllama()).max_top_k == 3  # type: ignore[union-attr]  it works

    def test_the_advice_for_an_endpoint_is_the_client_that_reads_logprobs(self) -> None:
        assert "ChatOpenAI(base_url='http://HOST:PORT/v1'" in advice("HuggingFaceEndpoint", "m")


class TestServersWithoutProbabilities:
    @staticmethod
    def one_hot(tops: Any) -> dict[str, Any]:
        first, *others = tops
        entry = {"token": first, "bytes": None, "logprob": 0.0}
        rest = [{"token": token, "bytes": None, "logprob": -9999.0} for token in others]
        return {"content": [{**entry, "top_logprobs": [entry, *rest]}]}

    def test_zero_and_minus_9999_are_refused_with_advice_to_vote_by_text(self) -> None:
        model = ScriptedChat(answer=lambda text: TOPS, payload=self.one_hot)
        with pytest.raises(CapabilityError, match=r'votes="text".*these are no log-probabilities'):
            as_choice_backend(model)
        assert isinstance(as_choice_backend(model, votes="text"), TextVoteBackend)

    def test_a_sure_model_is_not_taken_for_one(self) -> None:
        sure = {"white": 1.0 - 1e-13, "black": 1e-13}
        assert LangChainBackend(ScriptedChat(answer=lambda text: sure), continuation="instruct").max_top_k == 2
        alone = ScriptedChat(answer=lambda text: {"white": 1.0})
        assert LangChainBackend(alone, continuation="instruct", max_top_k=1).max_top_k == 1
        certain = ScriptedChat(
            answer=lambda text: TOPS,
            payload=lambda tops: {
                "content": [{"top_logprobs": [{"token": "a", "logprob": math.log(p)} for p in TOPS.values()]}]
            },
        )
        assert LangChainBackend(certain, continuation="instruct").max_top_k == 3


def test_a_chat_model_around_an_endpoint_is_refused_with_an_address_that_works() -> None:
    class ChatHuggingFace(ChatMistralAI):
        llm: Any = None

    with pytest.raises(
        UnsilencableModelError, match=r"take ChatOpenAI\(base_url='http://HOST:PORT/v1'.*HuggingFaceEndpoint"
    ):
        as_choice_backend(ChatHuggingFace(llm=HuggingFaceEndpoint(talk=Talk())))


class Channel:
    """Stands for `grpc.Channel`."""


Channel.__module__ = "grpc"


def test_the_class_of_vertex_ai_is_refused_before_it_makes_its_client_of_grpc() -> None:
    model = ChatVertexAI()
    with pytest.raises(UnsilencableModelError, match=r"through grpc.*take ChatGoogleGenerativeAI\(.*vertexai=True"):
        as_choice_backend(model)
    assert model.talk.sent == []


def test_a_client_of_grpc_that_comes_with_the_first_call_ends_the_probe() -> None:
    class Late(PlainChat):
        client: Any = None

        def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> Any:
            self.client = Channel()
            return super()._generate(messages, stop, run_manager, **kwargs)

    model = Late()
    with pytest.raises(UnsilencableModelError, match=r"Late calls through grpc, and not through httpx"):
        TextVoteBackend(model)
    assert len(model.talk.sent) == 1


def test_a_class_whose_copies_close_its_client_is_refused_and_left_open() -> None:
    class Closing(ChatGoogleGenerativeAI):
        def __del__(self) -> None:
            self.talk.sent.append({"closed": True})

    model = Closing()
    with pytest.raises(UnsilencableModelError, match=r"a copy of it is dropped.*langchain-google-genai 4\.4 or newer"):
        as_choice_backend(model)
    assert model.talk.sent == []
