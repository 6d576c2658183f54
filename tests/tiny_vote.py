"""The smallest component that charges: a voter on a fake engine, with one ticket per question and no memo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from langchain_dpicl import DPVotingRunnable, LabelAnswers, Noise, PrivateExamples, Rows, Serving
from langchain_dpicl.backends.fake import FakeBackend, word_copier
from tests.contracts.front_room import CANARY, Room

LABELS = ("card", "transfer")
TOKENS = tuple(f" {label}" for label in LABELS)
VoterT = TypeVar("VoterT", bound=DPVotingRunnable)


def tiny_engine() -> FakeBackend:
    return FakeBackend(word_copier(TOKENS), vocabulary=TOKENS)


def tiny_private() -> PrivateExamples:
    records = [{"text": f"{CANARY} {number}", "label": LABELS[number % 2]} for number in range(20)]
    return PrivateExamples(records, label_key="label", labels=LABELS, public_size=40)


def tiny_vote(kind: type[VoterT], private: PrivateExamples, **options: Any) -> VoterT:
    """Returns a voter of a class; its cost is of no interest."""
    loud: dict[str, Any] = {"noise": Noise(multiplier=0.05), "epsilon": 2e4, "rows": Rows(units=20)}
    plain: dict[str, Any] = {"answers": LabelAnswers(calibrate=False), "serving": Serving(memo_size=0)}
    return kind.from_private_examples(private, **{"llm": tiny_engine(), **loud, **plain, **options})


class TinyVoteScene:
    """What the contracts of rooms ask of it."""

    def make_private(self) -> PrivateExamples:
        return tiny_private()

    def make_engine(self) -> FakeBackend:
        return tiny_engine()

    def make(self, room: Room, *, max_queries: int = 6, **options: Any) -> DPVotingRunnable:
        given = {"llm": room.engine, "budget": room.budget, "max_queries": max_queries, **options}
        return tiny_vote(DPVotingRunnable, room.private, **given)

    def faulty_constructions(self, room: Room) -> Sequence[Callable[[], Any]]:
        return [lambda: self.make(room, max_queries=0), lambda: self.make(room, budget="a budget")]
