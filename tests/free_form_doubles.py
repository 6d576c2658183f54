"""Engines, embeddings and public models for tests of answers in free form, and a component made of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.embeddings import Embeddings
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from pydantic import Field

from langchain_dpicl.backends.private_calls.embeddings import SilentEmbeddings
from langchain_dpicl.budget.handler import PrivacyBudgetCallbackHandler
from langchain_dpicl.free_form import DPFreeFormRunnable
from langchain_dpicl.options import EmbeddingAnswers, KeywordAnswers, Noise, Rows
from langchain_dpicl.privacy.ledger.store import InMemoryStore
from langchain_dpicl.privacy.private_examples import PrivateExamples

NOISELESS = 1 / 30
"""A noise multiplier at which two rows more or less decide: another release has a chance of e^-30 per keyword."""

RECORDS = [f"says: {text}" for text in ["ask the bank"] * 6 + ["open a claim"] * 3 + ["wait a day"]]
CANDIDATES = ["wait a day", "open a claim", "ask the bank", "call the police"]


def last_said(prompt: str) -> str:
    """What the last record of a prompt says; of a public prompt, which has none, an answer of its own."""
    told = [line.removeprefix("says: ") for line in prompt.splitlines() if line.startswith("says: ")]
    return told[-1] if told else "call the police"


class Writer:
    """An engine that completes text by a function; counts prompts with and without records."""

    name = "writer"

    def __init__(self, answer: Callable[[str], str] = last_said) -> None:
        self.answer = answer
        self.private = self.public = 0
        self.options: list[dict[str, Any]] = []

    def complete(self, prompts: Sequence[str], *, max_tokens: int, stop: Sequence[str] = ()) -> list[str]:
        self.options.append({"max_tokens": max_tokens, "stop": tuple(stop)})
        for prompt in prompts:
            if "says: " in prompt:
                self.private += 1
            else:
                self.public += 1
        return [self.answer(prompt) for prompt in prompts]

    async def acomplete(self, prompts: Sequence[str], *, max_tokens: int, stop: Sequence[str] = ()) -> list[str]:
        return self.complete(prompts, max_tokens=max_tokens, stop=stop)


class OneHot(Embeddings):
    """Embeddings of known texts at right angles to each other; any other text is the last direction."""

    def __init__(self, texts: Sequence[str] = CANDIDATES, *, length: float = 1.0) -> None:
        self.places = {text: place for place, text in enumerate(texts)}
        self.length = length
        self.failing = False
        self.asked: list[str] = []

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        self.asked += texts
        if self.failing:
            raise ConnectionError("embeddings are out")
        places = [self.places.get(text, len(self.places)) for text in texts]
        return [[self.length * (column == place) for column in range(len(self.places) + 1)] for place in places]

    def embed_query(self, text: str) -> list[float]:
        return self.embed_documents([text])[0]


VECTORS = EmbeddingAnswers(embeddings=SilentEmbeddings(OneHot()), candidates=tuple(CANDIDATES))
"""Silent already: each component would start threads of its own."""

WORDS = KeywordAnswers(keywords=("police", "bank", "claim", "day", "snow"), num_keywords=2)


class PublicChat(BaseChatModel):
    """A public chat model that says what it is given, in turn; raises where that is an exception."""

    says: list[Any] = Field(default_factory=list)
    asked: list[str] = Field(default_factory=list)
    turn: list[int] = Field(default_factory=lambda: [0])
    lock: Any = Field(default_factory=threading.Lock)

    @property
    def _llm_type(self) -> str:
        return "public-chat"

    def _generate(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        with self.lock:
            said = self.says[self.turn[0] % len(self.says)]
            self.turn[0] += 1
            self.asked.append(str(messages[-1].text))
        if isinstance(said, Exception):
            raise said
        return ChatResult(generations=[ChatGeneration(message=AIMessage(said))])


class Runs(BaseCallbackHandler):
    """Writes down the public model calls of a run with their tags, and its custom events."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[str, ...]]] = []
        self.events: list[tuple[str, Any]] = []
        self.text: list[str] = []

    def on_chat_model_start(self, serialized: Any, messages: Any, *, tags: Any = None, **kwargs: Any) -> None:
        self.calls.append((str(messages[0][0].text), tuple(tags or ())))

    def on_llm_start(self, serialized: Any, prompts: Any, *, tags: Any = None, **kwargs: Any) -> None:
        self.calls += [(prompt, tuple(tags or ())) for prompt in prompts]

    def on_chain_start(self, *args: Any, **kwargs: Any) -> None:
        self.text.append(f"{args} {kwargs}")

    on_chain_end = on_chain_error = on_llm_end = on_llm_error = on_chain_start

    def on_custom_event(self, name: str, data: Any, **kwargs: Any) -> None:
        self.events.append((name, data))

    def named(self, name: str) -> list[Any]:
        return [data for found, data in self.events if found == name]


def budget_of(**options: Any) -> PrivacyBudgetCallbackHandler:
    return PrivacyBudgetCallbackHandler(**{"epsilon": 1e6, "delta": 1e-5, "store": InMemoryStore(), **options})


def charged(component: Any) -> int:
    """Tickets that stay charged on the ledger of a component, which has it to itself."""
    signs = {"reserve": 1, "give_back": -1}
    return sum(signs.get(line.kind, 0) * line.body.get("count", 0) for line in component.budget._store.records())


def build(records: Sequence[Any] = RECORDS, **options: Any) -> DPFreeFormRunnable:
    """A component whose sample is everybody and whose noise is next to nothing, by default."""
    private = options.pop("private", None) or PrivateExamples(records, public_size=len(RECORDS))
    given: dict[str, Any] = {
        "llm": Writer(),
        "example_prompt": "{text}",
        "suffix": "asks: {input}",
        "budget": options.pop("budget", None) or budget_of(),
        "epsilon": 9e5,
        "noise": Noise(multiplier=NOISELESS),
        "rows": Rows(units=len(RECORDS)),
        "max_queries": 8,
    }
    return DPFreeFormRunnable.from_private_examples(private, **{**given, **options})


def embedding(records: Sequence[Any] = RECORDS, **options: Any) -> DPFreeFormRunnable:
    """`build` with candidates that are given and embeddings at right angles."""
    return build(records, **{"answers": VECTORS, **options})


def keywords(records: Sequence[Any] = RECORDS, **options: Any) -> DPFreeFormRunnable:
    """`build` with a domain that is given; the public model writes the prompt back."""
    return build(records, **{"answers": WORDS, **options})
