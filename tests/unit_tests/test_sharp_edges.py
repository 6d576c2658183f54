"""Ten of the refusals that docs/sharp-edges.md speaks of: each raises its own error before anything is charged."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from langchain_dpicl import (
    Decoding,
    DemonstrationSynthesizer,
    DPVotingRunnable,
    EmbeddedLLM,
    PrivacyBudgetCallbackHandler,
    PrivateExamples,
    Rows,
)
from langchain_dpicl.backends.fake import FakeBackend, scripted
from langchain_dpicl.exceptions import (
    CapabilityError,
    ConfigurationError,
    DPICLError,
    PrivacyBudgetExceededError,
    PrivacyBudgetMismatchError,
    PrivateAccessError,
    RecordError,
)
from langchain_dpicl.privacy.accounting.events import PureEvent
from langchain_dpicl.privacy.ledger.tickets import Ticket

TOKEN = Ticket("token", PureEvent(0.1), max_count=9)


@dataclass(frozen=True)
class Bound:
    """Made-up records that are bound to a budget, and components on both."""

    private: PrivateExamples
    budget: PrivacyBudgetCallbackHandler

    def generated(self, **options: Any) -> object:
        return DemonstrationSynthesizer.from_private_examples(
            self.private, llm=engine(), budget=self.budget, epsilon=1.0, max_tokens=2, **options
        )

    def voting(self, **options: Any) -> object:
        given = {"llm": engine(), "rows": Rows(units=40), **options}
        return DPVotingRunnable.from_private_examples(
            self.private, budget=self.budget, epsilon=1.0, max_queries=5, **given
        )

    def declared(self, epsilon: float) -> object:
        return self.budget.budget.declare("x", tickets=[TOKEN], epsilon=epsilon)


def engine() -> FakeBackend:
    return FakeBackend(scripted({" card": 0.6, " transfer": 0.4}), vocabulary=[" card", " transfer"])


@pytest.fixture
def bound() -> Bound:
    records = [{"text": "my card was declined", "queue": "card"}] * 300
    private = PrivateExamples(records, label_key="queue", labels=("card", "transfer"), public_size=300)
    budget = PrivacyBudgetCallbackHandler(epsilon=4.0, delta=1e-6)
    budget.bind(private)
    return Bound(private, budget)


REFUSALS: dict[str, tuple[type[DPICLError], Callable[[Bound], object]]] = {
    "top-p on a private score": (ConfigurationError, lambda it: it.generated(decoding=Decoding(top_p=0.9))),
    "temperature of a noisy maximum": (ConfigurationError, lambda it: it.generated(decoding=Decoding(temperature=0.7))),
    "a fixed sample under add_remove": (
        ConfigurationError,
        lambda it: it.voting(rows=Rows(slots=40, sampling="fixed")),
    ),
    "a model with fallbacks": (
        CapabilityError,
        lambda it: it.voting(llm=EmbeddedLLM().with_fallbacks([EmbeddedLLM()])),
    ),
    "more than is left": (PrivacyBudgetExceededError, lambda it: it.declared(9.0)),
    "tickets above their share": (PrivacyBudgetExceededError, lambda it: it.declared(0.5)),
    "a delta for whole records": (
        ConfigurationError,
        lambda it: PrivacyBudgetCallbackHandler(4.0, 0.01).bind(it.private),
    ),
    "a second ledger": (
        PrivacyBudgetMismatchError,
        lambda it: PrivacyBudgetCallbackHandler(4.0, 1e-6).bind(it.private),
    ),
    "a pickled budget": (PrivateAccessError, lambda it: pickle.dumps(it.budget)),
    "pickled records": (PrivateAccessError, lambda it: pickle.dumps(it.private)),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_a_sharp_edge_is_refused_before_anything_is_charged(what: str, bound: Bound) -> None:
    kind, attempt = REFUSALS[what]
    with pytest.raises(DPICLError) as refusal:
        attempt(bound)
    assert type(refusal.value) is kind
    assert bound.budget.remaining_epsilon == 4.0


def test_a_copy_of_a_budget_is_the_budget(bound: Bound) -> None:
    assert copy.deepcopy(bound.budget) is bound.budget


def test_a_plan_is_the_same_with_some_records_or_none() -> None:
    def planned(records: list[dict[str, str]]) -> object:
        private = PrivateExamples(records, label_key="queue", labels=("card", "transfer"), public_size=900)
        budget = PrivacyBudgetCallbackHandler(epsilon=1.0, delta=1e-6)
        return DPVotingRunnable.from_private_examples(
            private, llm=engine(), budget=budget, epsilon=1.0, max_queries=10
        ).plan

    assert planned([{"text": "my card was declined", "queue": "card"}] * 4) == planned([])


def test_an_undeclared_label_is_refused_without_the_label_or_its_record() -> None:
    with pytest.raises(RecordError, match="a record has another") as refusal:
        PrivateExamples(
            [{"text": "it is late", "queue": "transfer"}], label_key="queue", labels=("card",), public_size=9
        )
    assert "transfer" not in str(refusal.value)
    assert "late" not in str(refusal.value)
