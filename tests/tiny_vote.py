"""The smallest component that charges: one ticket per question, through the real ledger and the real corridor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from langchain_core.runnables import RunnableConfig
from pydantic import Field

from langchain_dpicl.backends.fake import FakeBackend, word_copier
from langchain_dpicl.backends.sync_async import EffectGenerator, run_async, run_sync
from langchain_dpicl.budget.handler import resolve_budget
from langchain_dpicl.generation.plan import release_plan
from langchain_dpicl.privacy._validate import check_int
from langchain_dpicl.privacy.ledger.tickets import Ticket
from langchain_dpicl.privacy.mechanisms.release_plan import PoissonUnits, ReleasePlan
from langchain_dpicl.privacy.private_examples import PrivateExamples
from langchain_dpicl.release.token_block import open_block
from langchain_dpicl.runs.query_runnable import ChargingRunnable, TicketCharge
from tests.contracts.front_room import CANARY, Room

LABELS = ("card", "transfer")
TOKENS = tuple(f" {label}" for label in LABELS)


def tiny_engine() -> FakeBackend:
    return FakeBackend(word_copier(TOKENS), vocabulary=TOKENS)


class TinyVote(ChargingRunnable[str, str]):
    """Answers with the label that follows the question's last word in most records."""

    plan: ReleasePlan
    engine: Any = Field(exclude=True, repr=False)
    ask_for: str = "topic"

    @classmethod
    def from_private_examples(
        cls,
        private: PrivateExamples,
        *,
        llm: Any,
        budget: Any = None,
        config: Any = None,
        max_queries: int = 1,
        component: str | None = None,
    ) -> TinyVote:
        check_int("max_queries", max_queries, low=1)
        spender = resolve_budget(budget, config)
        plan = release_plan(PoissonUnits(sampling_rate=1.0), noise_multiplier=0.05)
        spender.bind(private)
        ticket = Ticket("query", plan.block_event(1), max_count=max_queries, refundable=True)
        name = component or spender.fresh_name("tiny-vote")
        share = spender.declare(name, tickets=(ticket,), partition=private.dataset_id)
        return cls(private=private, budget=spender, share=share, plan=plan, engine=llm)

    def _answer(self, given: str, pay: TicketCharge, config: RunnableConfig, **kwargs: Any) -> str:
        return run_sync(self._vote(given, pay, **kwargs))

    async def _aanswer(self, given: str, pay: TicketCharge, config: RunnableConfig, **kwargs: Any) -> str:
        return await run_async(self._vote(given, pay, **kwargs), is_slow=self._is_slow)

    def _vote(self, question: str, pay: TicketCharge, *, word: str | None = None) -> EffectGenerator[str]:
        with pay("query") as ticket, self._block(ticket, word or self.ask_for) as block:
            index = yield from block.next_index([token.encode() for token in TOKENS])
        return LABELS[index]

    def _block(self, ticket: Any, last_word: str) -> Any:
        return open_block(
            self.private,
            ticket,
            plan=self.plan,
            length=1,
            backend=self.engine,
            render=_renderer(last_word),
            choose=lambda values: int(values.argmax()),
        )


def _renderer(last_word: str) -> Callable[[Sequence[Any]], str]:
    return lambda records: "\n".join([*(f"{record['text']} {last_word} card" for record in records), last_word])


class TinyVoteScene:
    """What the contracts of rooms ask of it."""

    def make_private(self) -> PrivateExamples:
        return PrivateExamples([f"{CANARY} {number}" for number in range(20)], public_size=40)

    def make_engine(self) -> FakeBackend:
        return tiny_engine()

    def make(self, room: Room, *, max_queries: int = 6, **options: Any) -> TinyVote:
        given = {"llm": room.engine, "budget": room.budget, **options}
        return TinyVote.from_private_examples(room.private, max_queries=max_queries, **given)

    def faulty_constructions(self, room: Room) -> Sequence[Callable[[], Any]]:
        return [lambda: self.make(room, max_queries=0), lambda: self.make(room, budget="a budget")]
