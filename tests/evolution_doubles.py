"""A muse, embeddings by topic, and a private evolution made of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from langchain_core.embeddings import Embeddings
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from pydantic import Field

from langchain_dpicl.budget.handler import PrivacyBudgetCallbackHandler, resolve_budget
from langchain_dpicl.evolution import PrivateEvolution
from langchain_dpicl.options import Evolution, Noise
from langchain_dpicl.privacy.ledger.store import InMemoryStore
from langchain_dpicl.privacy.private_examples import PrivateExamples

TOPICS = ("card", "boat", "film", "rain")
RECORDS = [f"my card number {place}" for place in range(14)] + [f"the boat number {place}" for place in range(6)]
NOISELESS = Noise(multiplier=1e-3)
"""Noise at which votes are what they are."""
SEARCH = Evolution(rounds=2, num_survivors=2, num_variations=1)


class Muse(BaseChatModel):
    """A text-only chat model: `says` in turn, or by a function of the prompt; keeps what it was asked."""

    says: Any = ("a card", "a boat", "a film", "the rain")
    asked: list[str] = Field(default_factory=list)
    options: list[dict[str, Any]] = Field(default_factory=list)
    lock: Any = Field(default_factory=threading.Lock)

    @property
    def _llm_type(self) -> str:
        return "muse"

    def _generate(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        with self.lock:
            turn = len(self.asked)
            self.asked.append("|".join(str(message.text) for message in messages))
            self.options.append(kwargs)
        said = self.says(self.asked[turn]) if callable(self.says) else self.says[turn % len(self.says)]
        if isinstance(said, BaseException):
            raise said
        return ChatResult(generations=[ChatGeneration(message=AIMessage(said))])


class Topical(Embeddings):
    """One direction per topic word, by how often it stands in the text; anything else has no direction."""

    def __init__(self, topics: Sequence[str] = TOPICS, *, failing: Callable[[str], bool] = lambda text: False) -> None:
        self.topics = tuple(topics)
        self.failing = failing
        self.asked: list[str] = []

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        self.asked += texts
        if any(map(self.failing, texts)):
            raise ValueError("bad text")
        return [[float(text.count(topic)) for topic in self.topics] + [1e-3] for text in texts]

    def embed_query(self, text: str) -> list[float]:
        return self.embed_documents([text])[0]


def budget_of(**options: Any) -> PrivacyBudgetCallbackHandler:
    return PrivacyBudgetCallbackHandler(**{"epsilon": 1e12, "delta": 1e-5, "store": InMemoryStore(), **options})


def charged(budget: Any) -> int:
    """Tickets that stay charged on a ledger."""
    signs = {"reserve": 1, "give_back": -1}
    return sum(
        signs.get(line.kind, 0) * line.body.get("count", 0) for line in resolve_budget(budget, None)._store.records()
    )


def evolution(records: Sequence[Any] = RECORDS, **options: Any) -> PrivateEvolution:
    """An evolution without noise to speak of, by default."""
    declared = options.pop("declared", {"public_size": len(RECORDS)})
    private = options.pop("private", None) or PrivateExamples(records, **declared)
    given: dict[str, Any] = {
        "llm": Muse(),
        "embeddings": Topical(),
        "budget": budget_of(),
        "epsilon": 9e11,
        "noise": NOISELESS,
        "evolution": SEARCH,
        "shots_per_label": 1,
    }
    return PrivateEvolution.from_private_examples(private, **{**given, **options})
