"""Every class that `make providers` runs: its package and floor, how it is made, and what it is expected to do."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tests.loopback_answers import Dialect

Votes = Literal["first tokens", "text", "refused"]
Writes = Literal["prefill", "instruct", "completion", ""]
Spoil = Callable[[bytes], bytes]


@dataclass(frozen=True)
class Case:
    """One class of a provider.

    Attributes:
      name: the class, and how it is used where that matters.
      package: the distribution that has it.
      floor: the lowest release that is run.
      make: builds a model that talks to the address, which ends without a slash.
      reports: what the provider's API reports.
      votes: how it votes by default.
      writes: how it continues a text; "": it does not write.
      missing: what is missing, "" for nothing.
      at_floor: `votes` and `writes` of the floor, where they differ.
      dialect: manners of the server.
      spoil: what the server makes of its answers.
      needs: further requirements of its environment.
      is_in_readme: whether README's first program runs on it too, with one line changed.
    """

    name: str
    package: str
    floor: str
    make: Callable[[str], Any] = field(repr=False)
    reports: str
    votes: Votes
    writes: Writes
    missing: str = ""
    at_floor: tuple[Votes, Writes] | None = None
    dialect: Dialect = "openai"
    spoil: Spoil = field(default=bytes, repr=False)
    needs: tuple[str, ...] = ()
    is_in_readme: bool = False

    def expected(self, *, is_floor: bool) -> tuple[Votes, Writes]:
        """Returns how the class votes and writes at a release."""
        return self.at_floor if is_floor and self.at_floor is not None else (self.votes, self.writes)


NOBODY = "none"
"""The key that every server of `make providers` takes."""


def _made(module: str, name: str, **options: Any) -> Any:
    return getattr(importlib.import_module(module), name)(**options)


def one_hot(answer: bytes) -> bytes:
    """Replaces the log-probabilities of a chat answer by 0 for the written token and -9999 for others."""
    body = json.loads(answer)
    for choice in body.get("choices", []):
        for place in (choice.get("logprobs") or {}).get("content") or []:
            for entry in (place, *place["top_logprobs"]):
                entry["logprob"] = 0.0 if entry["token"] == place["token"] else -9999.0
    return json.dumps(body).encode()


def _openai(name: str, **more: Any) -> Callable[[str], Any]:
    options = {"model": "loopback", "api_key": NOBODY, "max_retries": 0, **more}
    return lambda url: _made("langchain_openai", name, base_url=f"{url}/v1", **options)


def _azure(url: str) -> Any:
    options = {"azure_deployment": "deployment", "api_version": "2024-10-21", "api_key": NOBODY, "max_retries": 0}
    return _made("langchain_openai", "AzureChatOpenAI", azure_endpoint=url, **options)


def _named(url: str) -> Any:
    options = {"model_provider": "openai", "api_key": NOBODY, "base_url": f"{url}/v1", "max_retries": 0}
    return importlib.import_module("langchain.chat_models").init_chat_model("loopback", **options)


def _anthropic(url: str) -> Any:
    options = {"model": "loopback", "api_key": NOBODY, "max_retries": 0}
    return _made("langchain_anthropic", "ChatAnthropic", base_url=url, **options)


def _ollama(name: str) -> Callable[[str], Any]:
    return lambda url: _made("langchain_ollama", name, model="loopback", base_url=url)


def _gemini(url: str) -> Any:
    options = {"model": "gemini-loopback", "api_key": NOBODY, "max_retries": 1}
    return _made("langchain_google_genai", "ChatGoogleGenerativeAI", base_url=url, **options)


def _gemini_on_vertex(url: str) -> Any:
    options = {"model": "gemini-loopback", "api_key": NOBODY, "max_retries": 1, "vertexai": True}
    return _made("langchain_google_genai", "ChatGoogleGenerativeAI", base_url=url, **options)


def _vertex(url: str) -> Any:
    options = {"model": "gemini-loopback", "project": "none", "location": "us-central1", "api_endpoint": url}
    google = importlib.import_module("google.auth.credentials")
    return _made("langchain_google_vertexai", "ChatVertexAI", credentials=google.AnonymousCredentials(), **options)


def _mistral(url: str) -> Any:
    return _made("langchain_mistralai", "ChatMistralAI", model="loopback", api_key=NOBODY, base_url=f"{url}/v1")


def _groq(url: str) -> Any:
    options = {"model": "loopback", "api_key": NOBODY, "max_retries": 0}
    return _made("langchain_groq", "ChatGroq", base_url=url, **options)


def _bedrock(url: str) -> Any:
    options = {"model": "amazon.loopback-v1:0", "region_name": "us-east-1", "endpoint_url": url}
    keys = {"aws_access_key_id": NOBODY, "aws_secret_access_key": NOBODY}
    return _made("langchain_aws", "ChatBedrockConverse", **options, **keys)


def _deepseek(url: str) -> Any:
    options = {"model": "loopback", "api_key": NOBODY, "max_retries": 0}
    return _made("langchain_deepseek", "ChatDeepSeek", api_base=f"{url}/v1", **options)


def _xai(url: str) -> Any:
    options = {"model": "loopback", "api_key": NOBODY, "max_retries": 0}
    return _made("langchain_xai", "ChatXAI", xai_api_base=f"{url}/v1/", **options)


def _together(url: str) -> Any:
    options = {"model": "loopback", "api_key": NOBODY, "max_retries": 0}
    return _made("langchain_together", "ChatTogether", base_url=f"{url}/v1", **options)


def _fireworks(url: str) -> Any:
    options = {"model": "accounts/loopback", "api_key": NOBODY, "max_retries": 0}
    return _made("langchain_fireworks", "ChatFireworks", base_url=f"{url}/fireworks", **options)


def _openrouter(url: str) -> Any:
    options = {"model": "loop/back", "api_key": NOBODY, "max_retries": 0}
    return _made("langchain_openrouter", "ChatOpenRouter", base_url=f"{url}/api/v1", **options)


def _litellm(url: str) -> Any:
    return _made(
        "langchain_litellm", "ChatLiteLLM", model="openai/loopback", api_key=NOBODY, api_base=f"{url}/v1", max_retries=0
    )


def _endpoint(url: str) -> Any:
    return _made("langchain_huggingface", "HuggingFaceEndpoint", endpoint_url=f"{url}/tgi")


def _chat_endpoint(url: str) -> Any:
    return _made(
        "langchain_huggingface", "ChatHuggingFace", llm=_endpoint(url), model_id="loop/back", tokenizer=object()
    )


_INSTEAD = "take `ChatOpenAI(base_url=...)` of the server's `/v1` address"
CASES = (
    Case("ChatOpenAI", "langchain-openai", "1.1.14", _openai("ChatOpenAI"), "top 20", "first tokens", "instruct"),
    Case(
        "ChatOpenAI to vLLM",
        "langchain-openai",
        "1.1.14",
        _openai("ChatOpenAI"),
        "as `--max-logprobs`",
        "first tokens",
        "prefill",
        dialect="vllm",
    ),
    Case("OpenAI", "langchain-openai", "1.1.14", _openai("OpenAI"), "top 5", "first tokens", "completion"),
    Case("AzureChatOpenAI", "langchain-openai", "1.1.14", _azure, "as the deployment", "first tokens", "instruct"),
    Case(
        "init_chat_model",
        "langchain",
        "1.3.9",
        _named,
        "as the class it makes",
        "first tokens",
        "instruct",
        needs=("langchain-openai",),
    ),
    Case("ChatAnthropic", "langchain-anthropic", "1.1.0", _anthropic, "nothing", "text", ""),
    Case(
        "ChatOllama",
        "langchain-ollama",
        "1.0.0",
        _ollama("ChatOllama"),
        "top 20, from Ollama 0.12.11",
        "first tokens",
        "prefill",
        missing="log-probabilities below `langchain-ollama` 1.1 (text votes on request)",
        at_floor=("refused", ""),
        is_in_readme=True,
    ),
    Case(
        "OllamaLLM",
        "langchain-ollama",
        "1.0.0",
        _ollama("OllamaLLM"),
        "top 20, from Ollama 0.12.11",
        "text",
        "",
        missing="the class drops them: take `ChatOllama`",
    ),
    Case(
        "ChatGoogleGenerativeAI",
        "langchain-google-genai",
        "4.0.0",
        _gemini,
        "on Vertex AI, for some models",
        "text",
        "",
        missing="the class drops them; releases that close their client (4.0) are refused",
        at_floor=("refused", ""),
    ),
    Case(
        "ChatGoogleGenerativeAI, vertexai=True",
        "langchain-google-genai",
        "4.0.0",
        _gemini_on_vertex,
        "for some models",
        "text",
        "",
        missing="the class drops them; releases that close their client (4.0) are refused",
        at_floor=("refused", ""),
    ),
    Case(
        "ChatVertexAI",
        "langchain-google-vertexai",
        "3.2.0",
        _vertex,
        "for some models",
        "refused",
        "",
        missing="gRPC cannot be limited: take `ChatGoogleGenerativeAI(vertexai=True)`",
    ),
    Case("ChatMistralAI", "langchain-mistralai", "1.0.0", _mistral, "nothing", "text", ""),
    Case(
        "ChatGroq",
        "langchain-groq",
        "1.0.0",
        _groq,
        "nothing known",
        "first tokens",
        "instruct",
        missing="the API, where the probe refuses it",
    ),
    Case("ChatBedrockConverse", "langchain-aws", "1.0.0", _bedrock, "nothing", "text", ""),
    Case("ChatDeepSeek", "langchain-deepseek", "1.0.0", _deepseek, "top 20", "first tokens", "instruct"),
    Case(
        "ChatDeepSeek, 0 and -9999",
        "langchain-deepseek",
        "1.0.0",
        _deepseek,
        "0 and -9999, by some models",
        "refused",
        "",
        missing='no probabilities: `votes="text"`',
        spoil=one_hot,
    ),
    Case("ChatXAI", "langchain-xai", "1.0.0", _xai, "by model", "first tokens", "instruct"),
    Case("ChatTogether", "langchain-together", "0.4.0", _together, "by model", "first tokens", "instruct"),
    Case(
        "ChatFireworks",
        "langchain-fireworks",
        "1.0.0",
        _fireworks,
        "top 5",
        "first tokens",
        "instruct",
        missing="log-probabilities at 1.0.0 (text votes on request)",
        at_floor=("refused", ""),
    ),
    Case("ChatOpenRouter", "langchain-openrouter", "0.2.1", _openrouter, "by model", "first tokens", "instruct"),
    Case(
        "ChatLiteLLM",
        "langchain-litellm",
        "0.3.5",
        _litellm,
        "as the provider behind it",
        "first tokens",
        "instruct",
        missing="refused while a callback or cache of LiteLLM is set",
    ),
    Case(
        "HuggingFaceEndpoint",
        "langchain-huggingface",
        "1.2.1",
        _endpoint,
        "TGI: top 5",
        "text",
        "",
        missing=f"the class drops them: {_INSTEAD}",
    ),
    Case(
        "ChatHuggingFace around an endpoint",
        "langchain-huggingface",
        "1.2.1",
        _chat_endpoint,
        "TGI: top 5",
        "refused",
        "",
        missing=f"it holds a runnable: {_INSTEAD}",
    ),
)
ENVIRONMENT: Mapping[str, str] = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MODE": "PRODUCTION"}
"""Variables without which a package reaches for the internet as it is imported."""
