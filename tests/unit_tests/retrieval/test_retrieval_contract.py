"""The contract of charging Runnables, for answers from retrieved documents: charged is the filter, counted each answer.

The filter's one ticket is paid when a component is made here, so that what remains is one ticket per answer; a release
is a debit. Doors that lead to one and the same method elsewhere are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from langchain_core.language_models import FakeListChatModel
from langchain_core.output_parsers import StrOutputParser

from langchain_dpicl import DPRetrievalFreeFormRunnable, DPRetrievalVotingRunnable, KeywordAnswers, PrivateExamples
from langchain_dpicl.backends.fake import FakeBackend, scripted
from langchain_dpicl.budget.handler import PrivacyBudgetCallbackHandler
from langchain_dpicl.privacy.extensions.individual_filter import FILTER_TEMPLATE, MemoryBalances
from langchain_dpicl.privacy.ledger.store import InMemoryStore
from langchain_dpicl.runs.query_runnable import RELEASE
from tests.contracts.front_room import (
    CANARY,
    CHARGED,
    FEW_DOORS,
    ChargingRunnableContract,
    Door,
    Room,
)
from tests.retrieval_doubles import NEAR, QUIET, TASK, engine, examples

WRITER = FakeListChatModel(responses=["written in public"]) | StrOutputParser()
SPOKEN = KeywordAnswers(keywords=("syrup", "rest", "tablets"), num_keywords=2, writer=WRITER)


@dataclass
class FilterRoom(Room):
    """A room that leaves the filters' own tickets out of account, once they are paid for."""

    @property
    def charged(self) -> int:
        return super().charged - self._filters

    @property
    def reserved(self) -> int:
        return super().reserved - self._filters

    @property
    def _filters(self) -> int:
        return sum(line.body.get("template") == FILTER_TEMPLATE for line in self.store.records())


class TestContract(ChargingRunnableContract):
    told: ClassVar[list[str]] = [RELEASE, CHARGED]
    doors: ClassVar[Mapping[str, Door]] = FEW_DOORS

    @pytest.fixture
    def room(self, monkeypatch: pytest.MonkeyPatch) -> Room:
        store = InMemoryStore()
        budget = PrivacyBudgetCallbackHandler(epsilon=1e10, delta=1e-4, store=store, name="house")
        room = FilterRoom(self.make_private(), self.make_engine(), store, budget)
        real = MemoryBalances.debit

        def counted(balances: MemoryBalances, units: Any, settled: int) -> Any:
            room.reads.append(room.reserved)
            return real(balances, units, settled)

        monkeypatch.setattr(MemoryBalances, "debit", counted)
        return room

    def make_private(self) -> PrivateExamples:
        return examples({"text": f"one topic {CANARY}", "patient": "anna"})

    def make_engine(self) -> FakeBackend:
        return engine()

    def make(self, room: Room, *, max_queries: int = 6, **options: Any) -> DPRetrievalVotingRunnable:
        given: dict[str, Any] = {"llm": room.engine, "budget": room.budget, "max_queries": max_queries, **QUIET}
        given |= {"retrieval": NEAR.replace(participations=3, slots=2), "task": TASK, **options}
        made = DPRetrievalVotingRunnable.from_private_examples(room.private, **given)
        made.filter.open(lambda template: nullcontext(made.share.reserve(template)))
        return made

    def make_refused(self, room: Room) -> Any:
        component = self.make(room, max_queries=1)
        component.invoke(self.questions[0])
        return component

    def faulty_constructions(self, room: Room) -> Sequence[Callable[[], Any]]:
        faults: list[dict[str, Any]] = [
            {"max_queries": 0},
            {"retrieval": None},
            {"retrieval": NEAR.replace(documents_per_unit=2)},
            {"retrieval": NEAR.replace(embeddings=object())},
            {"task": TASK.replace(labels=("yes",))},
            {"top_k": 3},
            {"noise": "gumbel"},
            {"epsilon": -1.0},
            {"serving": {"memo_size": 0}},
            {"llm": object()},
        ]
        return [lambda fault=fault: self.make(room, **fault) for fault in faults]  # type: ignore[misc]


class TestFreeFormContract(TestContract):
    def make_engine(self) -> FakeBackend:
        return FakeBackend(scripted({"rest": 1.0}), max_top_k=1)

    def make(self, room: Room, *, max_queries: int = 6, **options: Any) -> DPRetrievalFreeFormRunnable:
        given: dict[str, Any] = {"llm": room.engine, "budget": room.budget, "max_queries": max_queries, **QUIET}
        given |= {"retrieval": NEAR.replace(participations=3, slots=2), "answers": SPOKEN, **options}
        made = DPRetrievalFreeFormRunnable.from_private_examples(room.private, **given)
        made.filter.open(lambda template: nullcontext(made.share.reserve(template)))
        return made

    def faulty_constructions(self, room: Room) -> Sequence[Callable[[], Any]]:
        faults: list[dict[str, Any]] = [
            {"max_queries": 0},
            {"retrieval": None},
            {"retrieval": NEAR.replace(documents_per_unit=2)},
            {"answers": SPOKEN.replace(keywords=("one",))},
            {"answers": "words"},
            {"noise": "gumbel"},
            {"epsilon": -1.0},
            {"serving": {"memo_size": 0}},
            {"llm": object()},
        ]
        return [lambda fault=fault: self.make(room, **fault) for fault in faults]  # type: ignore[misc]
