"""Embeddings for tests: vectors that depend on one text, switches for every kind of failure, and a server's endpoint."""

from __future__ import annotations

import base64
import contextlib
import hashlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
from langchain_core.embeddings import Embeddings

from tests import loopback_provider
from tests.loopback_answers import Manners
from tests.loopback_provider import Provider, provider

SIZE = 6


def vector(text: str) -> list[float]:
    """A vector of a text: numbers that can be sent as float32 without loss."""
    digest = hashlib.sha256(text.encode()).digest()
    return [byte / 256 - 0.5 for byte in digest[:SIZE]]


class ScriptedEmbeddings(Embeddings):
    """Gives `vector`, or what `answers` and `raises` have for a mark in the text; `times` limits how often."""

    def __init__(self, **fields: Any) -> None:
        self.answers: dict[str, Any] = {}
        self.raises: dict[str, Any] = {}
        self.times: dict[str, int] = {}
        self.before: Callable[[str], object] = str
        self.asked: list[int] = []
        vars(self).update(fields)

    def embed_documents(self, texts: list[str]) -> Any:
        self.asked.append(len(texts))
        for text in texts:
            self.before(text)
            for mark, error in self.raises.items():
                if mark in text and self.times.setdefault(mark, -1):
                    self.times[mark] -= 1
                    raise error(text) if callable(error) else error
            for mark, answer in self.answers.items():
                if mark in text:
                    return answer
        return [vector(text) for text in texts]

    def embed_query(self, text: str) -> Any:
        return self.embed_documents([text])[0]


class AsyncEmbeddings(ScriptedEmbeddings):
    """The same with an awaitable method of its own."""

    async def aembed_documents(self, texts: list[str]) -> Any:
        return self.embed_documents(texts)


def endpoint(body: Any, manners: Manners) -> Any:
    """Answers POST /v1/embeddings, in the shape that OpenAI documents."""
    texts = [body["input"]] if isinstance(body["input"], str) else body["input"]
    spell = spelled if body.get("encoding_format") == "base64" else list
    listed = [{"object": "embedding", "index": i, "embedding": spell(vector(text))} for i, text in enumerate(texts)]
    usage = {"prompt_tokens": len(texts), "total_tokens": len(texts)}
    return {"object": "list", "model": manners.model, "data": listed, "usage": usage}


def spelled(numbers: list[float]) -> str:
    """Numbers as the SDK of OpenAI asks for them."""
    return base64.b64encode(np.array(numbers, np.float32).tobytes()).decode()


def stock(served: Provider, **options: Any) -> Any:
    """LangChain's class for OpenAI's endpoint, talking to a provider on this machine."""
    from langchain_openai import OpenAIEmbeddings

    given = {"api_key": "none", "max_retries": 0, "check_embedding_ctx_length": False, **options}
    return OpenAIEmbeddings(model="loopback", base_url=served.url, **given)


@contextlib.contextmanager
def embeddings_provider() -> Iterator[Provider]:
    """A provider on this machine that has an embeddings endpoint too."""
    with patch.dict(loopback_provider.ANSWERS, {"/v1/embeddings": endpoint}), provider() as served:
        yield served
