"""Text votes through `ChatAnthropic`, on the /v1/messages endpoint of a real llama.cpp server with a tiny random model.

The model writes noise, so what it is seen to write (asked without LangChain) serves as the label it then votes for.
Skipped where `xllamacpp`, `gguf` or `langchain-anthropic` is missing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from langchain_dpicl.backends.langchain.texts import TextVoteBackend
from langchain_dpicl.backends.private_calls.call import RetryPolicy
from langchain_dpicl.backends.resolve import as_backend, as_choice_backend
from langchain_dpicl.exceptions import CapabilityError, ModelCallError
from langchain_dpicl.serving import LabelClassifier
from tests.canary import RECORD, aobserve, leaks, observe
from tests.integration_tests.test_llama_server import PROMPTS, Server, server

pytest.importorskip("xllamacpp")
pytest.importorskip("gguf")
anthropic = pytest.importorskip("langchain_anthropic")
pytestmark = pytest.mark.loopback

__all__ = ["server"]  # the fixture
QUICK = RetryPolicy(max_attempts=2, first_wait=0.01)
NOT_SAID = "zebra crossing"
BEYOND_THE_CONTEXT = "card " * 6000


@pytest.fixture
def model(server: Server) -> Any:
    return anthropic.ChatAnthropic(model="tiny", base_url=server.url, api_key="none", max_retries=0)


@pytest.fixture
def engine(model: Any) -> TextVoteBackend:
    # The prompt cache moves probabilities by up to 1e-3, which may turn a word.
    options = {"extra_body": {"cache_prompt": False}}
    return TextVoteBackend(model, instructions="", max_tokens=4, options=options, retry=QUICK)


@pytest.fixture(scope="module")
def written(server: Server) -> list[str]:
    """What the server writes after each prompt, without LangChain and without an SDK."""
    texts = []
    for prompt in PROMPTS:
        asked = {"model": "tiny", "max_tokens": 4, "temperature": 0.0, "cache_prompt": False}
        answer = server.post("/v1/messages", messages=[{"role": "user", "content": prompt}], **asked)
        texts.append("".join(part["text"] for part in answer["content"]))
    assert len({text.casefold() for text in texts}) == len(texts)
    return texts


class TestAnthropic:
    async def test_completions_are_what_the_server_writes(self, engine: TextVoteBackend, written: list[str]) -> None:
        assert engine.complete(PROMPTS, max_tokens=4) == written
        assert await engine.acomplete(PROMPTS, max_tokens=4) == written

    async def test_votes_go_to_the_label_that_is_written_and_all_else_abstains(
        self, engine: TextVoteBackend, written: list[str]
    ) -> None:
        prompts = [*PROMPTS, BEYOND_THE_CONTEXT]
        expected = np.full((4, 3), -np.inf)
        expected[0, 2] = expected[1, 0] = 0.0
        for rows in (
            engine.score_choices(prompts, [written[1], NOT_SAID, written[0]]),
            await engine.ascore_choices(prompts, [written[1], NOT_SAID, written[0]]),
        ):
            assert np.array_equal(rows, expected)

    async def test_a_public_prompt_that_does_not_fit_is_an_error(
        self, engine: TextVoteBackend, written: list[str]
    ) -> None:
        labels = [written[0], NOT_SAID]
        verbalizers = dict(zip(("said", "not said"), labels, strict=True))
        one = LabelClassifier(engine, labels=list(verbalizers), verbalizers=verbalizers)
        assert one.probabilities(PROMPTS[:1]).tolist() == [[1.0, 0.0]]
        with pytest.raises(ModelCallError, match="HTTP 400"):
            one.probabilities([BEYOND_THE_CONTEXT])
        with pytest.raises(ModelCallError, match="names none of the labels"):
            await one.aprobabilities(PROMPTS[1:])

    def test_the_class_is_known_to_vote(self, model: Any) -> None:
        engine = as_choice_backend(model)
        assert isinstance(engine, TextVoteBackend)
        assert engine.name == "tiny"
        assert LabelClassifier(model, labels=["card", "cash"]).kind == "text votes"

    def test_the_class_is_known_not_to_write_token_by_token(self, model: Any) -> None:
        with pytest.raises(CapabilityError, match=r"Anthropic reports none.*TextVoteBackend"):
            as_backend(model)

    async def test_nobody_overhears_the_stock_client(self, model: Any, engine: TextVoteBackend) -> None:
        prompts = [f"a ticket: {RECORD}", f"{RECORD} {BEYOND_THE_CONTEXT}"]
        labels = ["card", NOT_SAID]
        assert leaks(observe(lambda: engine.score_choices(prompts, labels))) == set()
        assert leaks(await aobserve(lambda: engine.ascore_choices(prompts, labels))) == set()
        naive = leaks(await aobserve(lambda: model.ainvoke(prompts[0], max_tokens=4)))
        assert naive >= {"LangSmith", "global cache", "logs", "run collector", "astream_events"}
