"""Answers in free form through live providers on this machine: embeddings, keywords, faults, and nobody overhears.

Chats and embeddings come from the loopback provider, whose embedded model copies the label of its prompt's one example,
so that private answers and their vectors are known; a real llama.cpp server answers as well. Noise is next to nothing
(a keyword with one row less is released before another with chance below 1e-20).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from langchain_dpicl import DPFreeFormRunnable, EmbeddingAnswers, KeywordAnswers, Serving
from langchain_dpicl.backends.langchain.texts import TextVoteBackend
from langchain_dpicl.backends.private_calls.embeddings import SilentEmbeddings
from langchain_dpicl.backends.resolve import as_text_backend
from langchain_dpicl.exceptions import ModelCallError
from tests.canary import RECORD, aobserve, canaries_in, describe, leaks, observe
from tests.live import PrivateCalls, Servers, openai_model
from tests.live_queries import (
    MAX_QUERIES,
    QUERY,
    RETRY,
    ROWS,
    TEXTS,
    asked_privately,
    component_options,
    labelled_examples,
    left,
    reserved,
)
from tests.loopback_provider import Provider, Received, echoing_400, server_error
from tests.unit_tests.backends.embedding_models import embeddings_provider, stock, vector

pytestmark = [pytest.mark.loopback, pytest.mark.usefixtures("remembered_prices")]


CANDIDATES = ["It is lost.", "transfer", "card"]
WORDED = KeywordAnswers(keywords=("card", "transfer", "bank"), num_keywords=2, max_tokens=1)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Provider]:
    """A provider of chats and embeddings."""
    with embeddings_provider() as served:
        yield served


@pytest.fixture
def served(endpoint: Provider) -> Provider:
    endpoint.clear()
    return endpoint


def helper(served: Provider, **options: Any) -> Any:
    model = openai_model("ChatOpenAI", served.url)
    given = component_options(**{"llm": TextVoteBackend(model, retry=RETRY), **options})
    return DPFreeFormRunnable.from_private_examples(labelled_examples(), **given).with_receipts()


def vectors_of(served: Provider) -> EmbeddingAnswers:
    embeddings = SilentEmbeddings(stock(served), retry=RETRY)
    return EmbeddingAnswers(embeddings=embeddings, candidates=tuple(CANDIDATES), max_tokens=1)


def by_embeddings(served: Provider) -> Any:
    return helper(served, answers=vectors_of(served))


def by_keywords(served: Provider) -> Any:
    return helper(served, answers=WORDED)


def nearest(answers: Sequence[str]) -> dict[str, float]:
    """Cosines of the candidates to the sum of the answers' unit vectors."""
    units = {text: np.array(vector(text)) / np.linalg.norm(vector(text)) for text in {*answers, *CANDIDATES}}
    total = np.sum([units[text] for text in answers], axis=0)
    return {text: float(units[text] @ total / np.linalg.norm(total)) for text in CANDIDATES}


class TestFreeForm:
    async def test_private_answers_are_embedded_unheard(self, served: Provider) -> None:
        made = by_embeddings(served)
        expected = nearest(["card"] * 8 + ["transfer"] * 4)
        for seen in (observe(lambda: made.invoke(QUERY)), await aobserve(lambda: made.ainvoke("and that ?"))):
            assert seen.error is None
            assert leaks(seen) == set()
            result = seen.result
            assert result.similarities == pytest.approx(expected, abs=0.05)
            assert result.answer == max(expected, key=lambda text: expected[text])
            assert result.receipt.tickets == 1
        texts = [request.body["input"] for request in served.received if request.path == "/v1/embeddings"]
        assert all(isinstance(text, str) or len(text) == 1 for text in texts)  # one text per call
        assert Counter(json.dumps(text).strip('"[] ') for text in texts)["card"] >= 2 * 8

    async def test_keywords_are_counted_unheard_and_an_answer_is_written(self, served: Provider) -> None:
        """By a public model in the open, which is seen where private calls are not."""
        writer = openai_model("ChatOpenAI", served.url, temperature=0.0, max_tokens=4)
        made = helper(served, answers=WORDED.replace(writer=writer))
        for seen in (observe(lambda: made.invoke(QUERY)), await aobserve(lambda: made.ainvoke("and that ?"))):
            assert seen.error is None
            assert leaks(seen) <= {"usage callback"}
            assert "card, transfer" in seen.texts["config callbacks"]
            assert seen.result.keywords == ("card", "transfer")
            assert seen.result.answer
        asked = [request for request in served.received if b"card, transfer" in request.raw]
        assert len(asked) == 2
        assert not any(RECORD.encode() in request.raw for request in asked)

    async def test_a_real_server_answers_in_free_form(self, servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
        model = openai_model("ChatOpenAI", f"{servers.llama.url}/v1", temperature=0.0, max_tokens=6)
        engine, calls = as_text_backend(model.bind(extra_body={"cache_prompt": False})), PrivateCalls(monkeypatch)
        prompts = [f"text: {text}\nqueue: {label}\n\ntext: {QUERY}\nqueue:" for text, label in TEXTS]
        said = engine.complete(prompts, max_tokens=6, stop=["\n"])
        counted = Counter(word for answer in said for word in set(re.findall(r"\b[a-z]+\b", answer)))
        domain = [*dict(counted.most_common(3)), "zebra"]
        made = helper(
            servers.served(),
            llm=engine,
            answers=KeywordAnswers(keywords=tuple(domain), num_keywords=1, writer=model, max_tokens=6),
        )
        calls.made = calls.failed = 0
        for result in (made.invoke(QUERY), await made.ainvoke(QUERY, {"configurable": {"tenant": "other"}})):
            assert counted[result.keywords[0]] == max(counted.values()) > 0
            assert result.answer
        assert calls.made >= 2 * ROWS
        assert calls.failed == 0

    @pytest.mark.parametrize("make", [by_embeddings, by_keywords], ids=["embeddings", "keywords"])
    async def test_an_outage_is_raised_before_any_ticket(
        self, served: Provider, make: Callable[[Provider], Any]
    ) -> None:
        made = make(served)
        for path in ("/v1/chat/completions", "/v1/embeddings")[: 1 + (make is by_embeddings)]:
            served.clear()
            served.script(server_error(), when=_to(path))
            with pytest.raises(ModelCallError) as caught:
                made.invoke(QUERY)
            with pytest.raises(ModelCallError):
                await made.ainvoke(QUERY)
            assert canaries_in(describe(caught.value)) == []
            assert asked_privately(served) == 0
        assert (left(made), reserved(made)) == (MAX_QUERIES, 0)
        served.clear()
        assert made.invoke(QUERY).receipt.queries_left == MAX_QUERIES - 1

    def test_an_engine_that_is_out_or_says_nothing_before_a_stop_says_why(self, served: Provider) -> None:
        made = by_keywords(served)
        served.script(server_error(status=503))
        with pytest.raises(ModelCallError, match="HTTP 503"):
            made.invoke(QUERY)
        assert left(made) == MAX_QUERIES
        served.clear()
        blank = helper(
            served,
            answers=vectors_of(served).replace(stop=("Is", "The", "a")),
            serving=Serving(on_exhausted="zero_shot"),
            max_queries=1,
        )
        with pytest.raises(ModelCallError, match="no text that counts"):
            blank.invoke(QUERY)
        assert left(blank) == 1

    @pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings"])
    async def test_rows_that_fail_abstain(self, served: Provider, path: str) -> None:
        """Of the answers "transfer" none is embedded, or made: what is left is the other label's vector alone."""
        made = helper(served, answers=vectors_of(served).replace(candidates=tuple(CANDIDATES[::2])))
        mark = b"queue: transfer" if path.endswith("completions") else b"transfer"
        served.script(echoing_400(), when=lambda request: request.path == path and mark in request.raw)
        for seen in (observe(lambda: made.invoke(QUERY)), await aobserve(lambda: made.ainvoke("and that ?"))):
            assert seen.error is None
            assert leaks(seen) == set()
            alone = nearest(["card"] * 8)
            assert seen.result.similarities == pytest.approx({text: alone[text] for text in CANDIDATES[::2]}, abs=0.05)

    async def test_an_answer_that_could_not_be_written_is_written_later_for_free(self, served: Provider) -> None:
        made = by_keywords(served)
        served.script(server_error(), when="card, transfer")
        with pytest.raises(ModelCallError, match=r"stays charged and is kept.*'card', 'transfer'"):
            await made.ainvoke(QUERY)
        assert left(made) == MAX_QUERIES - 1
        served.clear()
        result = await made.ainvoke(QUERY)
        assert (result.receipt.source, result.keywords) == ("memo", ("card", "transfer"))
        assert asked_privately(served) == 0
        assert left(made) == MAX_QUERIES - 1


def _to(path: str) -> Callable[[Received], bool]:
    return lambda request: request.path == path
