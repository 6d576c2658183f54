"""What the tests of answers through live providers share: records, and components that all of them take part in.

Every record is in every sample and noise is next to nothing, so released numbers say which rows said what. Text is
invented.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from langchain_dpicl.backends.private_calls.call import RetryPolicy
from langchain_dpicl.budget.handler import PrivacyBudgetCallbackHandler
from langchain_dpicl.options import Noise, Rows
from langchain_dpicl.privacy.private_examples import PrivateExamples
from tests.canary import RECORD
from tests.live import LABELS
from tests.loopback_provider import Provider

TEXTS = [(f"{RECORD} my card number {i} was declined", "card") for i in range(8)]
TEXTS += [(f"{RECORD} the transfer number {i} is pending", "transfer") for i in range(4)]
ROWS = len(TEXTS)
QUERY = "is it there ?"
MAX_QUERIES = 8
RETRY = RetryPolicy(max_attempts=3, first_wait=0.0, max_wait=0.0)


def component_options(**options: Any) -> dict[str, Any]:
    """What a component is built with: a budget of its own, all records in every sample, noise next to nothing."""
    budget = PrivacyBudgetCallbackHandler(epsilon=2e6, delta=1e-4)
    sample = {"rows": Rows(units=ROWS), "epsilon": 1e6, "noise": Noise(multiplier=0.01)}
    return {"budget": budget, "max_queries": MAX_QUERIES, **sample, **options}


def labelled_examples() -> PrivateExamples:
    """The records, with the canary in each."""
    listed = [{"text": text, "queue": label} for text, label in TEXTS]
    return PrivateExamples(listed, label_key="queue", labels=LABELS, public_size=ROWS)


def left(made: Any) -> int:
    """How many queries a component may still answer."""
    return int(made.share.remaining("query"))


def reserved(made: Any) -> int:
    """How many tickets were ever reserved on a component's ledger, those that were given back included."""
    return sum(line.body.get("count", 0) for line in made.budget._store.records() if line.kind == "reserve")


def asked_privately(served: Provider) -> int:
    """How many requests with a private record have come in."""
    return sum(RECORD.encode() in request.raw for request in served.received)


def prompt_of(text: str, shown: str, query: str = QUERY) -> str:
    """The prompt of a row, as the components write it."""
    return f"text: {text}\nqueue: {shown}\n\ntext: {query}\nqueue:"


def letters_of(engine: Any) -> list[str]:
    """Two letters that a server finds likely: a random model says no label, and letters can stand for them."""
    found = engine.top_tokens(prompt_of(*TEXTS[0]), [], top_k=engine.max_top_k)
    letters = [
        token.decode().strip().lower() for token, _ in found if len(token.strip()) == 1 and token.strip().isalpha()
    ]
    return list(dict.fromkeys(letters))[:2]


def likelier(engine: Any, prompt: str, said: Mapping[str, str]) -> str:
    """The label whose letter a server finds likelier, in either case and with a space or not; "": it reports neither."""
    mass = dict.fromkeys(said, 0.0)
    for token, probability in engine.top_tokens(prompt, [], top_k=engine.max_top_k):
        for label, letter in said.items():
            if token.removeprefix(b" ").lower() == letter.encode():
                mass[label] += probability
    return max(mass, key=lambda label: mass[label]) if any(mass.values()) else ""
