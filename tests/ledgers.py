"""Small ledgers for tests, and prices that a person can add up in place of the accountants."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest

from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.privacy import accounting
from langchain_dpicl.privacy.accounting.events import (
    ComposedEvent,
    Event,
    GaussianEvent,
    NoEvent,
    ParallelEvent,
    PureEvent,
    RepeatedEvent,
    ZCdpEvent,
)
from langchain_dpicl.privacy.ledger.shares import Share
from langchain_dpicl.privacy.ledger.store import InMemoryStore
from langchain_dpicl.privacy.ledger.tickets import Ticket
from langchain_dpicl.privacy.private_examples import PrivateExamples

LABELS = ("a", "b")


def simple_price(event: Event) -> float:
    """Pure events add up, labels run in parallel, mu is the price of a Gaussian and rho that of zCDP."""
    price = 0.0
    match event:
        case PureEvent(epsilon=epsilon):
            price = epsilon
        case GaussianEvent(noise_multiplier=noise):
            price = 1 / noise
        case ZCdpEvent(rho=rho):
            price = rho
        case RepeatedEvent(event=inner, count=count):
            price = count * simple_price(inner)
        case ComposedEvent(events=events):
            price = sum(simple_price(inner) for inner in events)
        case ParallelEvent(branches=branches):
            price = max(simple_price(inner) for _, inner in branches)
        case _:
            assert isinstance(event, NoEvent), event
    return price


remembered_price = functools.cache(accounting.epsilon_bound)


def free_price(event: Event, *, delta: float, adjacency: Any, opinions: bool = True) -> accounting.EpsilonBound:
    """The same for everything, and at once."""
    return accounting.EpsilonBound(1.0, delta, adjacency, "none", (), ())


def use_simple_prices(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Event, float, str]]:
    """Replaces the accountants; returns the list of what was priced: (event, delta, adjacency)."""
    asked: list[tuple[Event, float, str]] = []

    def epsilon_bound(event: Event, *, delta: float, adjacency: str, opinions: bool = True) -> Any:
        asked.append((event, delta, adjacency))
        opinion = SimpleNamespace(name="by hand", lower=0.0, upper=float("inf"))
        return SimpleNamespace(
            epsilon=simple_price(event), engine="simple", opinions=(opinion,) * opinions, skipped=("a second look",)
        )

    monkeypatch.setattr(accounting, "epsilon_bound", epsilon_bound)
    monkeypatch.setattr(accounting, "gdp_epsilon", lambda mu, _: mu)
    monkeypatch.setattr(accounting, "gdp_mu", lambda epsilon, _: epsilon)
    monkeypatch.setattr(accounting, "zcdp_epsilon", lambda rho, _: rho)
    monkeypatch.setattr(accounting, "zcdp_rho", lambda epsilon, _: epsilon)
    return asked


def budget(epsilon: float = 4.0, delta: float = 1e-6, **options: Any) -> Budget:
    return Budget(epsilon=epsilon, delta=delta, **options)


def tickets(epsilon: float = 0.1, count: int = 10, **options: Any) -> tuple[Ticket, ...]:
    return (Ticket("t", PureEvent(epsilon), max_count=count, **options),)


def private(dataset_id: str = "d", **options: Any) -> PrivateExamples:
    given_ = {"label_key": "label", "labels": LABELS, "public_size": 1000, **options}
    return PrivateExamples([{"text": "x", "label": "a"}], dataset_id=dataset_id, **given_)


def records(store: InMemoryStore) -> list[tuple[str, Any]]:
    return [(record.kind, dict(record.body)) for record in store.records()]


def share_of(ledger: Budget, **options: Any) -> Share:
    return ledger.declare("c", tickets=tickets(**options), epsilon=1.0)


def spend_and_leave(path: str, count: int, tell: Any) -> None:
    """Uses tickets in a process that is ended without closing its budget; says how many it holds then."""
    from langchain_dpicl.privacy.extensions import durable_writer
    from langchain_dpicl.stores import SQLiteStore

    durable_writer.time = SimpleNamespace(monotonic=lambda: 1000.0)  # type: ignore[assignment]  a busy machine
    ledger = Budget.open(SQLiteStore(path))
    share = ledger.declare("c", tickets=tickets(5e-5, 10_000, refundable=True), epsilon=1.0)
    for _ in range(count):
        held = share.reserve("t")
        held.burn()
        held.commit()
    tell.send(sum(ledger._desk.kept().values()))
