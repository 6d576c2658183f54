"""Components on a stream spend a ledger in a real PostgreSQL server as they do one in a file."""

from __future__ import annotations

import random
from typing import Any

import pytest

from langchain_dpicl import DemonstrationSynthesizer, DPVotingRunnable, PrivacyBudgetCallbackHandler
from langchain_dpicl.backends.fake import FakeBackend, scripted
from langchain_dpicl.exceptions import PrivacyBudgetExceededError, SealedShareError
from langchain_dpicl.options import Rows, Serving
from langchain_dpicl.reports import verify_report
from langchain_dpicl.reports.ledger_audit import check_ledger
from langchain_dpicl.stores.postgres import PostgresStore
from langchain_dpicl.streams import PrivateStream
from tests.postgres import PostgresServer
from tests.stream_times import DAY, START, simulated_clock

pytestmark = pytest.mark.traced

VOTES = FakeBackend(lambda prompt, prefix: {" card": 0.7, " transfer": 0.2}, vocabulary=[" card", " transfer"])
TEXTS = FakeBackend(scripted({" hello": 0.6, " card": 0.4}), max_top_k=20)

clock = pytest.fixture(simulated_clock)


def stream() -> PrivateStream:
    labels = ("card", "transfer")
    some = PrivateStream(
        dataset_id="d", time_key="at", unit_key="user", public_size={30: 9000}, label_key="queue", labels=labels
    )
    rng = random.Random(0)
    some.extend(
        {"at": START - 40 * DAY + rng.random() * 100 * DAY, "user": n, "text": "hello", "queue": labels[n % 2]}
        for n in range(300)
    )
    return some


def test_weeks_of_votes_and_demonstrations_in_two_processes_on_one_ledger(
    postgres: PostgresServer, clock: list[float]
) -> None:
    where: dict[str, Any] = {"schema": postgres.fresh("schema")}
    made = PrivacyBudgetCallbackHandler.create(
        PostgresStore.new(postgres.conninfo(), **where), epsilon=4.0, delta=1e-6, per="30 days"
    )
    other = PrivacyBudgetCallbackHandler.open(PostgresStore(postgres.conninfo(), **where))
    some = stream()
    votes = [
        DPVotingRunnable.from_private_examples(
            some.rolling(30, every=7),
            llm=VOTES,
            budget=budget,
            epsilon=2.0,
            max_queries=12,
            component="votes",
            rows=Rows(slots=10, shots=2),
            serving=Serving(memo_size=0),
        )
        for budget in (made, other)
    ]
    for week in range(3):
        for number in range(12):
            votes[number % 2].invoke(f"{week} {number}")
        for each in votes:
            with pytest.raises(PrivacyBudgetExceededError, match="of one run"):
                each.invoke("another")
        shots = DemonstrationSynthesizer.from_private_examples(
            some.rolling(30, every=7),
            llm=TEXTS,
            budget=(made, other)[week % 2],
            epsilon=1.0,
            max_tokens=2,
            component="shots",
        )
        assert shots.run(progress=False).examples
        clock[0] += 7 * DAY
    assert made.remaining_epsilon == other.remaining_epsilon == 1.0
    assert made.remaining_at("2026-05-20")[0] == 1.0
    other.retire("votes")
    assert made.remaining_epsilon == 1.0  # windows that the last votes read are not over
    clock[0] += 60 * DAY
    assert made.remaining_epsilon == 3.0
    with pytest.raises(SealedShareError, match="retired"):
        votes[0].invoke("after that")
    made.budget.verify()
    report = made.budget.report()
    assert "votes" in report.to_dict()["stream"]["retired"]
    assert verify_report(report).ok
    store = PostgresStore(postgres.conninfo(), **where)
    assert check_ledger(store).problems == ()
    for each in (made.budget, other.budget, store):
        each.close()
