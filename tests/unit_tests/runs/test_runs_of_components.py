"""The contract of runs, for the components that are runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from langchain_dpicl import Budget, DemonstrationSynthesizer, DocumentSynthesizer, PrivateEvolution, PrivateExamples
from langchain_dpicl.backends.base import Token
from langchain_dpicl.backends.fake import FakeBackend, word_copier
from langchain_dpicl.options import Decoding, Evolution, Rows, Topics
from tests.contracts.release_run import CANARY, Calls, JournalContract
from tests.doubles import WORDS
from tests.evolution_doubles import Muse, Topical

pytestmark = pytest.mark.usefixtures("remembered_prices")


class Acting(FakeBackend):
    """An engine that lets the suite act at its public calls."""

    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__(word_copier(WORDS), vocabulary=WORDS)
        self._act = act

    def top_tokens(self, prompt: str, prefix: Sequence[Token], *, top_k: int) -> list[tuple[Token, float]]:
        self._act()
        return super().top_tokens(prompt, prefix, top_k=top_k)

    async def atop_tokens(self, prompt: str, prefix: Sequence[Token], *, top_k: int) -> list[tuple[Token, float]]:
        self._act()
        return await super().atop_tokens(prompt, prefix, top_k=top_k)


NOTES = [{"text": f"my card was declined {CANARY}"}] * 300 + [{"text": f"my transfer is late {CANARY}"}] * 300


@cache
def notes_on(ledger_id: str) -> PrivateExamples:
    """The notes of a ledger: in one process a ledger has one object of them.

    All have one name: prices are remembered by events, which name the data set whose labels they split.
    """
    return PrivateExamples(NOTES, public_size=600, dataset_id="notes")


class TestDemonstrations(JournalContract):
    FAILS_AT = 6

    def build(
        self, budget: Budget, calls: Calls, *, component: str = "mine", checkpoint: Path | None = None, **options: Any
    ) -> DemonstrationSynthesizer:
        given = {"rows": Rows(slots=10), "decoding": Decoding(candidates=10), "shots_per_label": 3, **options}
        return DemonstrationSynthesizer.from_private_examples(
            notes_on(budget.ledger_id),
            llm=Acting(calls),
            budget=budget,
            epsilon=100.0,
            component=component,
            checkpoint=checkpoint,
            max_tokens=4,
            **given,
        )

    def parts(self, result: Any) -> list[Any]:
        return list(result.examples)


class TestDemonstrationsOnOneSample(TestDemonstrations):
    """One ticket pays for a whole text."""

    def build(self, *args: Any, **options: Any) -> DemonstrationSynthesizer:
        return super().build(*args, rows=Rows(slots=10, redraw_every="run"), **options)


class TestDocuments(JournalContract):
    FAILS_AT = 6

    def build(
        self, budget: Budget, calls: Calls, *, component: str = "mine", checkpoint: Path | None = None
    ) -> DocumentSynthesizer:
        return DocumentSynthesizer.from_private_examples(
            notes_on(budget.ledger_id),
            llm=Acting(calls),
            topics=Topics(("card", "transfer", "boat"), 2),
            documents_per_topic=2,
            budget=budget,
            epsilon=200.0,
            component=component,
            checkpoint=checkpoint,
            max_tokens=4,
            rows=Rows(slots=10),
            decoding=Decoding(candidates=10),
        )

    def parts(self, result: Any) -> list[Any]:
        return list(result.documents)


class ActingMuse(Muse):
    """A model that lets the suite act as it is asked."""

    act: Any

    def _generate(self, *given: Any, **options: Any) -> Any:
        self.act()
        return super()._generate(*given, **options)


class TestEvolution(JournalContract):
    FAILS_AT = 6

    def build(
        self, budget: Budget, calls: Calls, *, component: str = "mine", checkpoint: Path | None = None
    ) -> PrivateEvolution:
        return PrivateEvolution.from_private_examples(
            notes_on(budget.ledger_id),
            llm=ActingMuse(act=calls, says=("a card", "a transfer", "a film", "the rain")),
            embeddings=Topical(("card", "transfer")),  # the two that all votes are for survive every round
            budget=budget,
            epsilon=200.0,
            component=component,
            checkpoint=checkpoint,
            evolution=Evolution(rounds=2, num_candidates=4, num_survivors=2, num_variations=1),
            shots_per_label=2,
        )

    def parts(self, result: Any) -> list[Any]:
        return list(result.examples)

    def kept(self, made: Any) -> list[Any]:
        """Rounds: the survivors of one are no result yet, and a later one may replace them."""
        return [(label, *one) for label, rounds in made.history.items() for one in enumerate(rounds)]
