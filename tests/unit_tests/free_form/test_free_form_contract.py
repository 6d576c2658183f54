"""Free-form answers keep the contract of everything that charges, in both spaces."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from langchain_dpicl import DPFreeFormRunnable, Noise, PrivateExamples, Rows, Serving
from langchain_dpicl.backends.fake import FakeBackend, scripted
from langchain_dpicl.runs.query_runnable import RELEASE
from tests.contracts.front_room import CANARY, CHARGED, FEW_DOORS, ChargingRunnableContract, Room
from tests.free_form_doubles import NOISELESS, VECTORS, WORDS, embedding, keywords


class _FreeForm(ChargingRunnableContract):
    told: ClassVar[list[str]] = [RELEASE, CHARGED]
    build: ClassVar[Callable[..., DPFreeFormRunnable]]

    def make_private(self) -> PrivateExamples:
        return PrivateExamples([f"says: {CANARY} {number}" for number in range(20)], public_size=40)

    def make_engine(self) -> FakeBackend:
        return FakeBackend(scripted({"ask the bank": 1.0}), max_top_k=1)

    def make(self, room: Room, *, max_queries: int = 6, **options: Any) -> DPFreeFormRunnable:
        given = {
            "budget": room.budget,
            "llm": room.engine,
            "epsilon": None,
            "noise": Noise(multiplier=NOISELESS, delta=1e-6),
            "rows": Rows(units=10),
            "serving": Serving(memo_size=0),
            **options,
        }
        return type(self).build(private=room.private, max_queries=max_queries, **given)

    @abstractmethod
    def faults(self) -> list[dict[str, Any]]:
        """Returns options that are faulty in this space."""

    def faulty_constructions(self, room: Room) -> Sequence[Callable[[], Any]]:
        faults: list[dict[str, Any]] = [
            {"max_queries": 0},
            {"budget": "a budget"},
            {"answers": "mean"},
            {"serving": {"memo_size": 0}},
            {"suffix": "no variable"},
            {"rows": "units"},
            {"noise": "permute_and_flip"},
            {"llm": 7},
            *self.faults(),
        ]
        return [lambda fault=fault: self.make(room, **fault) for fault in faults]  # type: ignore[misc]


class TestByEmbeddings(_FreeForm):
    build = staticmethod(embedding)

    def faults(self) -> list[dict[str, Any]]:
        return [{"answers": VECTORS.replace(embeddings=object())}, {"answers": VECTORS.replace(candidates=("one",))}]


class TestByKeywords(_FreeForm):
    doors = FEW_DOORS
    build = staticmethod(keywords)

    def faults(self) -> list[dict[str, Any]]:
        return [{"answers": WORDS.replace(keywords=("one",))}, {"answers": WORDS.replace(answer_prompt="none")}]
