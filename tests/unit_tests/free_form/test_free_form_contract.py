"""Free-form answers keep the contract of everything that charges, in both spaces."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from langchain_dpicl import DPFreeFormRunnable, PrivateExamples
from langchain_dpicl.backends.fake import FakeBackend, scripted
from langchain_dpicl.runs.query_runnable import RELEASE
from tests.contracts.front_room import CANARY, CHARGED, ChargingRunnableContract, Room
from tests.free_form_doubles import embedding, keywords


class _FreeForm(ChargingRunnableContract):
    told: ClassVar[list[str]] = [RELEASE, CHARGED]
    build: ClassVar[Callable[..., DPFreeFormRunnable]]

    def make_private(self) -> PrivateExamples:
        return PrivateExamples([f"says: {CANARY} {number}" for number in range(20)], public_size=40)

    def make_engine(self) -> FakeBackend:
        return FakeBackend(scripted({"ask the bank": 1.0}), max_top_k=1)

    def make(self, room: Room, *, max_queries: int = 6, **options: Any) -> DPFreeFormRunnable:
        given = {"budget": room.budget, "llm": room.engine, "memo_size": 0, "epsilon": None, "delta": 1e-6, **options}
        return type(self).build(private=room.private, max_queries=max_queries, num_slots=10, **given)

    @abstractmethod
    def faults(self) -> list[dict[str, Any]]:
        """Returns options that are faulty in this space."""

    def faulty_constructions(self, room: Room) -> Sequence[Callable[[], Any]]:
        faults: list[dict[str, Any]] = [
            {"max_queries": 0},
            {"budget": "a budget"},
            {"aggregation": "mean"},
            {"on_exhausted": "guess"},
            {"memo_size": -1},
            {"suffix": "no variable"},
            {"num_candidates": 0, "candidates": None},
            {"max_tokens": 0},
            {"llm": "a name"},
            *self.faults(),
        ]
        return [lambda fault=fault: self.make(room, **fault) for fault in faults]  # type: ignore[misc]


class TestByEmbeddings(_FreeForm):
    build = staticmethod(embedding)

    def faults(self) -> list[dict[str, Any]]:
        return [{"embeddings": None}, {"embeddings": "a name"}, {"candidates": ["one"]}, {"keyword_domain": ["a", "b"]}]


class TestByKeywords(_FreeForm):
    build = staticmethod(keywords)

    def faults(self) -> list[dict[str, Any]]:
        return [{"num_keywords": 0}, {"keyword_domain": ["one"]}, {"keyword_domain": "text"}, {"answer_prompt": "none"}]
