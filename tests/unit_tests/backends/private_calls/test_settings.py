"""What users set for public traffic goes along with no private call: storing, tags of users, keys of prompt caches."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain_core.messages import HumanMessage
from pydantic import Field

from langchain_dpicl.backends.langchain.backend import LangChainBackend
from langchain_dpicl.backends.private_calls.call import OpaqueValue, Reply, Request, RetryPolicy, silence
from langchain_dpicl.backends.private_calls.embeddings import SilentEmbeddings
from tests.hostile_provider import TARGET, Served, hostile_provider
from tests.live import anthropic_model, decision_model, labelled, openai_model
from tests.scripted_models import ScriptedChat, fixed

pytestmark = [
    pytest.mark.enable_socket,
    pytest.mark.filterwarnings("ignore:The class `OpenAIDecisions` is in beta"),
]

RETRY = RetryPolicy(max_attempts=1)
PRIVATE = labelled(f"{TARGET} my card was declined")
MARKS = {
    "metadata": {"team": "x"},
    "prompt_cache_key": "k1",
    "prompt_cache_retention": "24h",
    "prompt_cache_options": {"mode": "explicit"},
    "user": "me",
    "safety_identifier": "me",
    "session_id": "s1",
    "trace": {"trace_id": "t1"},
    "request_metadata": {"team": "x"},
    "requestMetadata": {"team": "x"},
}


class TestSettingsForPublicTraffic:
    def sent(self, model: Any, served: Served, *, is_async: bool) -> dict[str, Any]:
        silent = silence(model)
        asked = Request(OpaqueValue(PRIVATE), lambda text: [HumanMessage(text)] if silent.is_chat else text, {})
        if is_async:
            reply: Reply = asyncio.run(silent.aask(asked, retry=RETRY))
        else:
            reply = silent.ask(asked, retry=RETRY)
        assert reply.answer is not None
        return dict(served.seen[-1].body)

    @pytest.mark.parametrize("is_async", [False, True])
    @pytest.mark.parametrize("way", ["model_kwargs", "extra_body", "bound", "bound extra_body", "fields"])
    @pytest.mark.parametrize("kind", ["ChatOpenAI", "OpenAI"])
    @pytest.mark.filterwarnings("ignore:WARNING! |Parameters |.*was transferred to model_kwargs")
    def test_are_sent_with_no_private_call(self, kind: str, way: str, *, is_async: bool) -> None:
        marks = MARKS | ({"store": True} if kind == "ChatOpenAI" else {})
        with hostile_provider(None) as served:
            url = f"{served.root}/v1"
            if way == "bound":
                model = openai_model(kind, url).bind(**marks, seed=7)
            elif way == "bound extra_body":
                model = openai_model(kind, url).bind(extra_body=marks | {"seed": 7})
            elif way == "fields":
                model = openai_model(kind, url, **marks, seed=7)
            else:
                model = openai_model(kind, url, **{way: marks | ({"seed": 7} if way == "extra_body" else {})})
            body = self.sent(model, served, is_async=is_async)
            assert not MARKS.keys() & body.keys()
            assert body.get("store") in ([False] if kind == "ChatOpenAI" else [None])
            if way != "model_kwargs":
                assert body["seed"] == 7
            inner = getattr(model, "bound", model)
            if way in {"model_kwargs", "extra_body"}:
                assert getattr(inner, way)["user"] == "me"  # the given model is left as it is

    def test_nothing_is_stored_at_openai_whatever_the_account_is_set_to(self) -> None:
        hosts = {"https://api.openai.com/v1": False, "https://eu.api.openai.com/v1": False, "http://llm.invalid": None}
        for address, stored in hosts.items():
            assert silence(openai_model("ChatOpenAI", address))._model.store is stored

    @pytest.mark.parametrize(("store", "own_blocking", "own_awaited"), [(False, 1, 0), (False, 0, 1), (None, 0, 0)])
    def test_nothing_is_stored_at_openai_whatever_client_is_given(
        self, store: bool | None, own_blocking: int, own_awaited: int
    ) -> None:
        openai, hosts = pytest.importorskip("openai"), ("http://llm.invalid", "https://api.openai.com/v1")
        model = openai_model(
            "ChatOpenAI",
            "http://llm.invalid",
            client=openai.OpenAI(api_key="none", base_url=hosts[own_blocking]).chat.completions,
            async_client=openai.AsyncOpenAI(api_key="none", base_url=hosts[own_awaited]).chat.completions,
        )
        assert silence(model)._model.store is store

    def test_nothing_is_stored_at_openai_with_a_key_that_is_awaited(self) -> None:
        async def key() -> str:
            return "none"

        model = pytest.importorskip("langchain_openai").ChatOpenAI(model="m", api_key=key)
        assert silence(model)._model.store is False

    @pytest.mark.filterwarnings("ignore:Parameters")
    def test_anthropic(self) -> None:
        with hostile_provider(None) as served:
            marked = {"metadata": {"user_id": "me"}, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
            model = anthropic_model(served.root, model_kwargs={"metadata": {"user_id": "me"}}).bind(**marked)
            assert not marked.keys() & self.sent(model, served, is_async=False).keys()

    def test_embeddings(self) -> None:
        made = pytest.importorskip("langchain_openai").OpenAIEmbeddings
        with hostile_provider(None) as served:
            options = {
                "check_embedding_ctx_length": False,
                "model_kwargs": {"user": "me", "extra_body": {"user": "me"}},
            }
            SilentEmbeddings(made(base_url=f"{served.root}/v1", api_key="none", **options)).rows([OpaqueValue(PRIVATE)])
            assert all("user" not in one.body for one in served.seen)
            assert len(served.seen) == 2

    def test_fields_that_have_another_default_than_none(self) -> None:
        class Tagged(ScriptedChat):
            metadata: dict[str, str] = Field(default_factory=dict)  # type: ignore[assignment]
            session_id: str | None = Field(default_factory=lambda: "s1")  # as ChatOpenRouter's, from the environment

        model = Tagged(answer=fixed({"a": 1.0}), metadata={"team": "x"})
        quiet = silence(model)._model
        assert (quiet.metadata, quiet.session_id) == ({}, None)
        assert (model.metadata["team"], model.session_id) == ("x", "s1")

    def test_options_of_an_engine(self) -> None:
        with hostile_provider(None) as served:
            model = openai_model("ChatOpenAI", f"{served.root}/v1")
            engine = LangChainBackend(
                model, continuation="instruct", text_options={**MARKS, "store": True, "seed": 7}, retry=RETRY
            )
            engine.complete([PRIVATE], max_tokens=3)
            body = served.private()[-1].body
        assert not MARKS.keys() & body.keys()
        assert (body["store"], body["seed"]) == (False, 7)


def test_decision_models_have_none_of_them() -> None:
    with hostile_provider(None) as served:
        fields = type(decision_model(served.root)).model_fields
    assert not MARKS.keys() & fields.keys()
