"""What goes wrong at a provider: the row concerned abstains, the others are what they were, and nothing shows.

Faults are scripted at `tests/loopback_provider.py`. They meet requests that hold the canary, so the very same batch has
rows that are answered. Rows there are exact: the same request has the same answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from langchain_dpicl.backends.langchain.backend import LangChainBackend
from langchain_dpicl.backends.langchain.logprobs import DecisionsBackend
from langchain_dpicl.backends.langchain.texts import TextVoteBackend
from langchain_dpicl.backends.private_calls.call import RetryPolicy
from langchain_dpicl.exceptions import CapabilityError, ModelCallError
from tests.canary import RECORD, aobserve, canaries_in, describe, leaks, observe
from tests.live import (
    LABELS,
    Servers,
    anthropic_model,
    decision_model,
    give_up_soon,
    labelled,
    openai_model,
)
from tests.loopback_provider import (
    Fault,
    Hook,
    Provider,
    echoing_400,
    hang_up,
    html,
    huge,
    rate_limited,
    server_error,
    slow,
    truncated,
)

pytestmark = [
    pytest.mark.loopback,
    pytest.mark.filterwarnings("ignore:The class `OpenAIDecisions` is in beta"),
]

PROMPTS = [
    labelled("my card was declined in a shop"),
    labelled(f"{RECORD} the transfer"),
    labelled("the transfer to jo is pending"),
]
RETRY = RetryPolicy(max_attempts=2, first_wait=0.0, max_wait=0.0)


@dataclass(frozen=True)
class Engine:
    """An engine on a provider: rows for private prompts, both ways, and one public call."""

    rows: Callable[[], np.ndarray]
    arows: Callable[[], Any]
    public: Callable[[str], Any]


def _tokens(backend: LangChainBackend) -> Engine:
    domain = [token for token, _ in backend.top_tokens(PROMPTS[0], [], top_k=backend.max_top_k or 20)]
    session = backend.open(PROMPTS, [])
    return Engine(
        lambda: session.score(domain),
        lambda: session.ascore(domain),
        lambda text: backend.top_tokens(text, [], top_k=2),
    )


def _choices(backend: DecisionsBackend | TextVoteBackend) -> Engine:
    return Engine(
        lambda: np.exp(backend.score_choices(PROMPTS, LABELS)),
        lambda: _exp(backend.ascore_choices(PROMPTS, LABELS)),
        lambda text: backend.score_public(text, LABELS),
    )


async def _exp(rows: Any) -> np.ndarray:
    return np.exp(await rows)


def chat(servers: Servers, retry: RetryPolicy = RETRY, **options: Any) -> tuple[Provider, Engine]:
    served = servers.served()
    model = openai_model("ChatOpenAI", served.url, **options)
    return served, _tokens(LangChainBackend(model, continuation="instruct", retry=retry))


def vllm_chat(servers: Servers, retry: RetryPolicy = RETRY, **options: Any) -> tuple[Provider, Engine]:
    served = servers.served(dialect="vllm")
    return served, _tokens(LangChainBackend(openai_model("ChatOpenAI", served.url, **options), retry=retry))


def completions(servers: Servers, retry: RetryPolicy = RETRY, **options: Any) -> tuple[Provider, Engine]:
    served = servers.served(dialect="vllm")
    return served, _tokens(LangChainBackend(openai_model("OpenAI", served.url, **options), retry=retry))


def decisions(servers: Servers, retry: RetryPolicy = RETRY, **options: Any) -> tuple[Provider, Engine]:
    served = servers.served()
    return served, _choices(DecisionsBackend(decision_model(served.url, **options), retry=retry))


def anthropic(servers: Servers, retry: RetryPolicy = RETRY, **options: Any) -> tuple[Provider, Engine]:
    served = servers.served()
    return served, _choices(TextVoteBackend(anthropic_model(served.root, **options), retry=retry))


Make = Callable[..., tuple[Provider, Engine]]
Built = Callable[[Make], tuple[Provider, Engine]]
ENGINES = [chat, vllm_chat, completions, decisions, anthropic]
every_engine = pytest.mark.parametrize("make", ENGINES, ids=lambda make: make.__name__)
WAITED_OUT = {
    "429": rate_limited(retry_after="0"),
    "500": server_error(),
    "503": server_error(status=503),
    "hang-up": hang_up(),
}
FINAL = {
    "400-echo": echoing_400(),
    "html-200": html(),
    "html-403": html(status=403),
    "truncated": truncated(),
}


@pytest.fixture(scope="module")
def built(servers: Servers) -> Built:
    """Each engine once, as its probes take longer than a test; its provider without requests and faults."""
    kept: dict[Make, tuple[Provider, Engine]] = {}

    def built_once(make: Make) -> tuple[Provider, Engine]:
        served, engine = kept.setdefault(make, kept.get(make) or make(servers))
        served.clear()
        return served, engine

    return built_once


def asked(served: Provider) -> int:
    """How many requests with the canary have come in."""
    return sum(RECORD.encode() in request.raw for request in served.received)


async def check_abstention(served: Provider, engine: Engine, hook: Hook) -> None:
    clean = engine.rows()
    assert (clean.sum(axis=1) > 0.0).all()
    served.script(hook, when=RECORD)
    for seen in (observe(engine.rows), await aobserve(engine.arows)):
        assert seen.error is None
        assert np.array_equal(seen.result[[0, 2]], clean[[0, 2]])
        assert not seen.result[1].any()
        assert leaks(seen) == set()


@every_engine
class TestARow:
    @pytest.mark.parametrize("fault", WAITED_OUT)
    async def test_is_asked_again_and_then_abstains(self, built: Built, make: Make, fault: str) -> None:
        served, engine = built(make)
        before = asked(served)
        await check_abstention(served, engine, WAITED_OUT[fault])
        assert asked(served) - before == 1 + 2 * RETRY.max_attempts

    @pytest.mark.parametrize("fault", FINAL)
    async def test_abstains_at_once_where_asking_again_helps_nobody(self, built: Built, make: Make, fault: str) -> None:
        served, engine = built(make)
        before = asked(served)
        await check_abstention(served, engine, FINAL[fault])
        assert asked(served) - before == 1 + 2

    async def test_is_what_it_was_when_the_provider_comes_back(self, built: Built, make: Make) -> None:
        served, engine = built(make)
        clean = engine.rows()
        for ask in (engine.rows, engine.arows):
            served.script(rate_limited(retry_after="0"), when=RECORD, times=1)
            rows = ask()
            assert np.array_equal(rows if isinstance(rows, np.ndarray) else await rows, clean)
        assert asked(served) == 1 + 2 * 2


@pytest.mark.parametrize("make", [completions, anthropic], ids=lambda make: make.__name__)
async def test_a_row_that_is_not_answered_in_time_abstains(
    servers: Servers, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, engine = make(servers, RetryPolicy(max_attempts=1))
    give_up_soon(monkeypatch, served)
    await check_abstention(served, engine, slow(600.0))


@pytest.mark.parametrize("make", [chat, decisions, anthropic], ids=lambda make: make.__name__)
async def test_a_row_whose_answer_is_ten_megabytes_of_nothing_abstains(built: Built, make: Make) -> None:
    served, engine = built(make)
    await check_abstention(served, engine, huge(megabytes=10))


@every_engine
class TestAPublicCall:
    @pytest.mark.parametrize("status", [400, 403, 422])
    def test_raises_without_what_came_back(self, built: Built, make: Make, status: int) -> None:
        """A server may quote earlier requests, which were private."""
        served, engine = built(make)
        served.script(lambda request: Fault(status, json.dumps({"error": {"message": f"before: {RECORD}"}}).encode()))
        with pytest.raises(ModelCallError, match=f"HTTP {status}") as caught:
            engine.public("a public text")
        assert canaries_in(describe(caught.value)) == []

    @pytest.mark.parametrize(
        ("hook", "said"),
        [
            (rate_limited(), "answered, but is busy"),
            (server_error(), "answered, but with an error of its own"),
            (hang_up(), "could not be reached"),
        ],
        ids=["429", "500", "hang-up"],
    )
    def test_of_a_probe_names_a_provider_that_is_down(
        self, servers: Servers, make: Make, hook: Hook, said: str
    ) -> None:
        with pytest.raises(ModelCallError, match=said):
            _again(make, servers, hook)

    @pytest.mark.parametrize("fault", ["400-echo", "html-200"])
    def test_of_a_probe_says_that_the_provider_cannot(self, servers: Servers, make: Make, fault: str) -> None:
        said = r"(?s)(rejected a public probe|answered a public probe without).*(embedded model|another)"
        with pytest.raises(CapabilityError, match=said):
            _again(make, servers, FINAL[fault])


def _again(make: Make, servers: Servers, hook: Hook) -> None:
    """Builds the engine while the provider has the fault: `Servers.served` would forget it."""

    class Broken(Servers):
        def served(self, **options: Any) -> Provider:
            found = servers.served(**options)
            found.script(hook)
            return found

    make(Broken(servers._stack))
