"""Each provider live, on servers of this machine: what it can do works, what it cannot is refused with advice.

OpenAI's chat and completions and Anthropic's messages run against a real llama.cpp server; vLLM's dialect and the
Decisions API against `tests/loopback_provider.py`, as no such server runs here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from langchain_dpicl import DPFewShotPromptTemplate, LabelClassifier, PrivacyBudgetCallbackHandler, verify_report
from langchain_dpicl.backends.langchain.backend import LangChainBackend
from langchain_dpicl.backends.langchain.logprobs import LOST, DecisionsBackend, next_token
from langchain_dpicl.backends.langchain.texts import TextVoteBackend
from langchain_dpicl.backends.resolve import as_backend
from langchain_dpicl.exceptions import CapabilityError
from langchain_dpicl.options import Decoding
from tests.canary import RECORD, VOTE, Seen, aobserve, leaks, observe
from tests.live import (
    GENERATION,
    LABELS,
    PrivateCalls,
    Servers,
    anthropic_model,
    decision_model,
    labelled,
    openai_model,
    records,
)
from tests.loopback_answers import engine

pytestmark = [
    pytest.mark.loopback,
    pytest.mark.filterwarnings("ignore:The class `OpenAIDecisions` is in beta"),
]

CARD, TRANSFER = labelled("my card was declined in a shop"), labelled("the transfer to jo is pending")


def budget() -> PrivacyBudgetCallbackHandler:
    return PrivacyBudgetCallbackHandler(epsilon=6.0, delta=1e-4)


class Writes:
    """A provider with logprobs: demonstrations end to end, chains that serve them, labels by their first tokens."""

    top_k = 20

    def model(self, servers: Servers) -> Any:
        raise NotImplementedError

    def check(self, seen: Seen, paid: PrivacyBudgetCallbackHandler, calls: PrivateCalls) -> None:
        assert seen.error is None
        assert leaks(seen) == set()
        template = seen.result
        assert [sorted(example) for example in template.examples] == [["text"]]
        assert template.format(input="is it pending ?").endswith("text: is it pending ?")
        assert paid.remaining_epsilon == pytest.approx(2.0)
        report = json.loads(paid.report().to_json())
        assert verify_report(report).ok
        assert RECORD not in json.dumps(report) + template.format(input="")
        assert calls.made in {4, 8, 12}  # four slots, one to three tokens
        assert calls.failed == 0

    def test_demonstrations_are_written_unheard(self, servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
        model, paid, calls = self.model(servers), budget(), PrivateCalls(monkeypatch)
        options = {**GENERATION, "decoding": Decoding(candidates=self.top_k), "budget": paid}
        made = lambda: DPFewShotPromptTemplate.from_private_examples(records(), llm=model, **options)  # noqa: E731
        self.check(observe(made), paid, calls)
        assert calls.awaited == 0

    async def test_demonstrations_are_written_unheard_and_awaited(
        self, servers: Servers, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model, paid, calls = self.model(servers), budget(), PrivateCalls(monkeypatch)
        options = {**GENERATION, "decoding": Decoding(candidates=self.top_k), "budget": paid}
        made = lambda: DPFewShotPromptTemplate.afrom_private_examples(records(), llm=model, **options)  # noqa: E731
        self.check(await aobserve(made), paid, calls)
        assert calls.awaited == calls.made

    async def test_private_rows_are_not_overheard_where_the_naive_call_is(self, servers: Servers) -> None:
        model = self.model(servers)
        backend = as_backend(model)
        domain = [token for token, _ in backend.top_tokens(CARD, [], top_k=self.top_k)]
        session = backend.open([f"a ticket: {RECORD}", CARD], [])
        seen, awaited = observe(lambda: session.score(domain)), await aobserve(lambda: session.ascore(domain))
        for one in (seen, awaited):
            assert one.result[1].sum() > 0.0
            assert leaks(one) == set()
        naive = lambda: model.invoke(f"a ticket: {RECORD}", max_tokens=1)  # noqa: E731
        assert leaks(observe(naive)) >= {"config callbacks", "LangSmith", "debug output", "global cache", "logs"}

    async def test_labels_are_chosen_by_their_first_tokens(self, servers: Servers) -> None:
        model = self.model(servers)
        backend = LangChainBackend(model, continuation="instruct" if hasattr(model, "bind_tools") else None)
        likely = [token.decode() for token, _ in backend.top_tokens(CARD, [], top_k=self.top_k) if token.strip()]
        labels = self.labels(likely)
        chooser = LabelClassifier(llm=backend, labels=labels, verbalizers={name: name for name in labels})
        assert chooser.kind == "first tokens"
        rows = chooser.probabilities([CARD])
        assert rows.argmax() == 0
        assert rows[0, 0] > rows[0, 1]
        assert await chooser.aprobabilities([CARD]) == pytest.approx(rows, abs=1e-3)

    def labels(self, likely: list[str]) -> list[str]:
        """Two labels, the likelier first: a random model has words of its own."""
        first = likely[0].strip()
        other = next(word.strip() for word in reversed(likely) if not _begin_alike(word.strip(), first))
        return [first, other]


def _begin_alike(one: str, other: str) -> bool:
    return one.startswith(other) or other.startswith(one)


class Serves:
    """A provider that writes text: chains serve released demonstrations, in every way that a chain is run."""

    def model(self, servers: Servers) -> Any:
        raise NotImplementedError

    async def test_a_chain_serves_released_demonstrations(self, servers: Servers) -> None:
        from tests.cassette_scenarios import template

        chain = template() | self.model(servers).bind(temperature=0.0, max_tokens=6) | _text
        question = {"input": "is it pending ?"}
        said = chain.invoke(question)
        assert said
        assert await chain.ainvoke(question) == said
        assert chain.batch([question] * 2) == [said] * 2
        assert "".join(chain.stream(question)) == said
        assert "".join([piece async for piece in chain.astream(question)]) == said


def _text(answer: Any) -> str:
    return answer if isinstance(answer, str) else str(answer.text)


class TestOpenAIChat(Writes, Serves):
    def model(self, servers: Servers) -> Any:
        made = openai_model("ChatOpenAI", f"{servers.llama.url}/v1")
        return made.bind(extra_body={"cache_prompt": False})

    def test_the_whole_vocabulary_writes_demonstrations_too(
        self, servers: Servers, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        backend = LangChainBackend(self.model(servers), full_vocabulary=servers.llama.size)
        paid, calls = budget(), PrivateCalls(monkeypatch)
        options = {**GENERATION, "budget": paid}
        made = lambda: DPFewShotPromptTemplate.from_private_examples(records(), llm=backend, **options)  # noqa: E731
        self.check(observe(made), paid, calls)


class TestOpenAICompletions(Writes, Serves):
    def model(self, servers: Servers) -> Any:
        made = openai_model("OpenAI", f"{servers.llama.url}/v1")
        return made.bind(extra_body={"cache_prompt": False})


class TestVllmCompletions(Writes, Serves):
    def model(self, servers: Servers) -> Any:
        return openai_model("OpenAI", servers.served(dialect="vllm").url)

    def labels(self, likely: list[str]) -> list[str]:
        return list(LABELS)


class TestVllmChat(Writes, Serves):
    def model(self, servers: Servers) -> Any:
        return openai_model("ChatOpenAI", servers.served(dialect="vllm").url)

    def labels(self, likely: list[str]) -> list[str]:
        return list(LABELS)

    @pytest.mark.parametrize("echo", [True, False])
    async def test_released_tokens_are_continued_exactly(self, servers: Servers, echo: bool) -> None:
        served = servers.served(dialect="vllm", echo_prefix=echo)
        backend = LangChainBackend(openai_model("ChatOpenAI", served.url))
        assert (backend.continuation, backend.prefill) == ("prefill", "vllm")
        domain = [token for token, _ in backend.top_tokens(f"{CARD} The name of", [], top_k=20)]
        session = backend.open([CARD, TRANSFER], [b" The name", b" of"])
        served.clear()
        for rows in (session.score(domain), await session.ascore(domain)):
            raw = engine().open([f"{CARD} The name of", f"{TRANSFER} The name of"])
            expected = raw.score([engine().encode(token.decode())[0] for token in domain])
            seen = rows > 0.0
            assert seen.any(axis=1).all()
            assert rows[seen] == pytest.approx(expected[seen], rel=1e-9)
        for request in served.received:
            assert request.body["continue_final_message"] is True
            assert request.body["add_generation_prompt"] is False

    def test_the_whole_vocabulary_is_read_where_the_server_allows_it(self, servers: Servers) -> None:
        served = servers.served(dialect="vllm", max_logprobs=-1)
        backend = LangChainBackend(openai_model("OpenAI", served.url), full_vocabulary=-1)
        rows = backend.open([CARD], []).score(backend.vocabulary())
        assert len(backend.vocabulary()) > 7_000
        assert 0.95 < rows.sum() <= 1.0

    def test_token_ids_are_read_with_the_models_tokenizer(self, servers: Servers) -> None:
        served = servers.served(dialect="vllm", token_ids=True)
        model = openai_model("ChatOpenAI", served.url)
        with pytest.raises(CapabilityError, match=r"tokenizer=\.\.\."):
            LangChainBackend(model)
        by_id = LangChainBackend(model, tokenizer=engine()._tables.encoding)
        plain = LangChainBackend(openai_model("ChatOpenAI", servers.served(dialect="vllm").url))
        found = by_id.top_tokens(CARD, [], top_k=10)
        assert found == plain.top_tokens(CARD, [], top_k=10)
        assert found[0][0] == b" card"

    def test_half_characters_are_no_candidates(self, servers: Servers) -> None:
        model = openai_model("ChatOpenAI", servers.served(dialect="vllm", max_logprobs=-1).url)
        answer = model.bind(logprobs=True, top_logprobs=-1, max_tokens=1).invoke(CARD)
        payload = answer.response_metadata["logprobs"]
        assert [entry for entry in payload["content"][0]["top_logprobs"] if "\ufffd" in entry["token"]]
        backend = LangChainBackend(model, full_vocabulary=-1)
        assert LOST in next_token(payload)
        assert LOST not in {*backend.vocabulary(), *dict(backend.top_tokens(CARD, [], top_k=9_999))}


class TestAnthropic(Serves):
    """Text only: it serves and votes; writing token by token is refused before anything is spent."""

    def model(self, servers: Servers) -> Any:
        return anthropic_model(servers.llama.url)

    async def test_demonstrations_are_refused_with_advice(self, servers: Servers) -> None:
        paid, model = budget(), self.model(servers)
        with pytest.raises(CapabilityError, match=r"(?s)logprobs.*OpenAI-compatible.*TextVoteBackend"):
            DPFewShotPromptTemplate.from_private_examples(records(), llm=model, budget=paid, **GENERATION)
        with pytest.raises(CapabilityError, match="TextVoteBackend"):
            await DPFewShotPromptTemplate.afrom_private_examples(records(), llm=model, budget=paid, **GENERATION)
        assert paid.remaining_epsilon == 6.0

    async def test_private_votes_reach_a_real_server_unheard(
        self, servers: Servers, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model, calls = self.model(servers), PrivateCalls(monkeypatch)
        backend = TextVoteBackend(model, instructions="", max_tokens=4)
        said = backend.complete([f"a ticket: {RECORD}"], max_tokens=4)[0]
        assert said.strip()
        ask = lambda: backend.score_choices([f"a ticket: {RECORD}"], [said, "other"])  # noqa: E731
        aask = lambda: backend.ascore_choices([f"a ticket: {RECORD}"], [said, "other"])  # noqa: E731
        for seen in (observe(ask), await aobserve(aask)):
            assert seen.result.tolist() == [[0.0, -math.inf]]
            assert leaks(seen) == set()
        assert (calls.made, calls.failed) == (3, 0)
        naive = lambda: model.invoke(f"a ticket: {RECORD}")  # noqa: E731
        assert leaks(observe(naive)) >= {"config callbacks", "LangSmith", "global cache"}

    async def test_the_label_that_is_written_is_the_vote(self, servers: Servers) -> None:
        backend = TextVoteBackend(anthropic_model(servers.served().root))
        prompts = [
            labelled(f"{RECORD} my card was declined", label=VOTE),
            labelled(f"{RECORD} the transfer is pending"),
        ]
        ask = lambda: backend.score_choices(prompts, [VOTE, "card", "transfer"])  # noqa: E731
        aask = lambda: backend.ascore_choices(prompts, [VOTE, "card", "transfer"])  # noqa: E731
        for seen in (observe(ask), await aobserve(aask)):
            assert seen.result.argmax(axis=1).tolist() == [0, 2]
            assert np.exp(seen.result).sum(axis=1).tolist() == [1.0, 1.0]
            assert leaks(seen) == set()
        naive = lambda: anthropic_model(servers.served().root).invoke(prompts[0])  # noqa: E731
        assert VOTE in str(observe(naive).texts)

    async def test_labels_are_chosen_by_what_is_written(self, servers: Servers) -> None:
        chooser = LabelClassifier(llm=anthropic_model(servers.served().root), labels=LABELS)
        assert chooser.kind == "text votes"
        assert chooser.probabilities([CARD, TRANSFER]).argmax(axis=1).tolist() == [0, 1]
        assert (await chooser.aprobabilities([CARD, TRANSFER])).argmax(axis=1).tolist() == [0, 1]

    async def test_a_refusal_abstains(self, servers: Servers) -> None:
        backend = TextVoteBackend(anthropic_model(servers.served(refuse=RECORD).root))
        prompts = [labelled(RECORD), CARD]
        for rows in (backend.score_choices(prompts, LABELS), await backend.ascore_choices(prompts, LABELS)):
            assert np.isneginf(rows[0]).all()
            assert rows[1].tolist() == [0.0, -math.inf]


class TestDecisions:
    """A probability for every label; writing token by token is refused before anything is spent."""

    def model(self, servers: Servers, **options: Any) -> Any:
        return decision_model(servers.served(**options).url)

    async def test_demonstrations_are_refused_with_advice(self, servers: Servers) -> None:
        paid, model = budget(), self.model(servers)
        with pytest.raises(CapabilityError, match=r"LabelClassifier takes it.*reports logprobs"):
            DPFewShotPromptTemplate.from_private_examples(records(), llm=model, budget=paid, **GENERATION)
        with pytest.raises(CapabilityError, match="reports logprobs, or the embedded model"):
            await DPFewShotPromptTemplate.afrom_private_examples(records(), llm=model, budget=paid, **GENERATION)
        assert paid.remaining_epsilon == 6.0

    async def test_private_labels_have_probabilities_unheard(self, servers: Servers) -> None:
        model = self.model(servers)
        backend, labels = DecisionsBackend(model, instructions="Which queue?"), [VOTE, "card", "transfer"]
        prompts = [
            labelled(f"{RECORD} my card was declined", label=VOTE),
            labelled(f"{RECORD} the transfer is pending"),
        ]
        expected = engine().score_choices(
            [f"Which queue?\n\n{prompt}" for prompt in prompts], [f" {x}" for x in labels]
        )
        expected -= np.log(np.exp(expected).sum(axis=1, keepdims=True))
        ask = lambda: backend.score_choices(prompts, labels)  # noqa: E731
        aask = lambda: backend.ascore_choices(prompts, labels)  # noqa: E731
        for seen in (observe(ask), await aobserve(aask)):
            assert seen.result == pytest.approx(expected, abs=1e-9)
            assert seen.result.argmax(axis=1).tolist() == [0, 2]
            assert leaks(seen) == set()
        question = {"input": prompts[0], "questions": {"label": backend._question(labels)}}
        assert "LangSmith" in leaks(observe(lambda: model.invoke(question)))

    async def test_labels_are_chosen_by_their_probabilities(self, servers: Servers) -> None:
        chooser = LabelClassifier(llm=self.model(servers), labels=LABELS)
        assert chooser.kind == "decisions"
        rows = chooser.probabilities([CARD, TRANSFER])
        assert rows.argmax(axis=1).tolist() == [0, 1]
        assert rows.sum(axis=1) == pytest.approx(1.0)
        assert await chooser.aprobabilities([CARD, TRANSFER]) == pytest.approx(rows)

    async def test_a_refusal_abstains(self, servers: Servers) -> None:
        backend = DecisionsBackend(self.model(servers, refuse=RECORD))
        for rows in (
            backend.score_choices([labelled(RECORD), CARD], LABELS),
            await backend.ascore_choices([labelled(RECORD), CARD], LABELS),
        ):
            assert np.isneginf(rows[0]).all()
            assert rows[1].argmax() == 0


class TestRefusedWithAdvice:
    """Servers that cannot do what is asked; each is distinguished by a probe with public text, and nothing is spent."""

    @pytest.mark.parametrize(
        ("kind", "manners", "said"),
        [
            ("ChatOpenAI", {}, r"starts a new message.*completion model.*continuation='instruct'"),
            ("ChatOpenAI", {"dialect": "ignores"}, r"without logprobs.*llama\.cpp, vLLM.*embedded model"),
            ("OpenAI", {"dialect": "ignores"}, r"without logprobs.*llama\.cpp, vLLM.*embedded model"),
        ],
        ids=["new-message", "ignored-chat", "ignored-completion"],
    )
    def test_before_anything_is_spent(self, servers: Servers, kind: str, manners: dict[str, Any], said: str) -> None:
        paid, model = budget(), openai_model(kind, servers.served(**manners).url)
        with pytest.raises(CapabilityError, match=f"(?s){said}"):
            DPFewShotPromptTemplate.from_private_examples(records(), llm=model, budget=paid, **GENERATION)
        assert paid.remaining_epsilon == 6.0
        assert not any(RECORD in request.raw.decode() for request in servers.served(**manners).received)

    async def test_what_the_advice_says_works(self, servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
        calls = PrivateCalls(monkeypatch)
        model = openai_model("ChatOpenAI", servers.served().url)
        for make in (_blocking, _awaited):
            backend, paid = LangChainBackend(model, continuation="instruct"), budget()
            template = await make(records(), llm=backend, budget=paid, decoding=Decoding(candidates=20), **GENERATION)
            assert len(template.examples) == 1
            assert paid.remaining_epsilon == pytest.approx(2.0)
        assert calls.made >= 8
        assert calls.failed == 0


async def _blocking(*args: Any, **options: Any) -> Any:
    return DPFewShotPromptTemplate.from_private_examples(*args, **options)


_awaited: Callable[..., Any] = DPFewShotPromptTemplate.afrom_private_examples
