"""A ledger and a memo in files, and voters on both as many processes would have them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from langchain_dpicl import (
    DPVotingRunnable,
    LabelAnswers,
    Noise,
    PrivacyBudgetCallbackHandler,
    PrivateExamples,
    Rows,
    Serving,
)
from langchain_dpicl.backends.fake import FakeBackend
from langchain_dpicl.privacy import accounting
from langchain_dpicl.stores import SQLiteMemo
from tests.contracts.memo import TURN

CANARY = "zebra-crossing-canary"
LABELS = ("card", "transfer")
FAST: dict[str, Any] = {"rows": Rows(units=20), "answers": LabelAnswers(calibrate=False)}
LOUD: dict[str, Any] = {**FAST, "noise": Noise(multiplier=0.05), "epsilon": 2e4}
"""Noise decides nothing: the majority of the sample wins, which is another than that of all with probability 1e-9."""

DEAF: dict[str, Any] = {**FAST, "noise": Noise(multiplier=400.0), "epsilon": 1.0}
"""Every answer is a coin: two releases agree with a chance of a half, however often nobody was asked."""


@pytest.fixture(autouse=True)
def no_prices(monkeypatch: pytest.MonkeyPatch) -> None:
    """What noise costs is of no interest here, and takes seconds to compute."""
    opinion = SimpleNamespace(name="by hand", lower=0.0, upper=float("inf"))
    bound = SimpleNamespace(epsilon=0.5, engine="by hand", opinions=(opinion,), skipped=("a second look",))
    monkeypatch.setattr(accounting, "epsilon_bound", lambda event, **options: bound)


def copies_its_label(prompt: str, prefix: tuple[bytes, ...]) -> Mapping[str, float]:
    last = [line.removeprefix("queue: ") for line in prompt.split("\n") if line.startswith("queue: ")]
    votes = [2.0 if label in last else 1.0 for label in LABELS]
    return {f" {label}": vote / sum(votes) for label, vote in zip(LABELS, votes, strict=True)}


class Engine(FakeBackend):
    """Takes its time over private prompts."""

    def __init__(self, delay: float = 0.0) -> None:
        super().__init__(copies_its_label, vocabulary=[f" {label}" for label in LABELS])
        self.delay = delay
        self.asked = 0

    def score_choices(self, prompts: Any, choices: Any) -> Any:
        self.asked += len(prompts)
        time.sleep(self.delay if len(prompts) > 1 else 0.0)
        return super().score_choices(prompts, choices)


class House:
    """A ledger and a memo in files, and as many processes' voters as one likes, made one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.memo = folder / "memo.db"
        self.private = self.examples()
        PrivacyBudgetCallbackHandler.create(folder / "budget.db", epsilon=1e5, delta=1e-4).close()
        self.budget = self.opened()

    def examples(self, dataset_id: str = "tickets") -> PrivateExamples:
        records = [{"text": f"{CANARY} {i}", "queue": "card" if i % 20 else "transfer"} for i in range(40)]
        return PrivateExamples(records, label_key="queue", labels=LABELS, public_size=40, dataset_id=dataset_id)

    def opened(self) -> PrivacyBudgetCallbackHandler:
        return PrivacyBudgetCallbackHandler.open(self.folder / "budget.db")

    def serving(self) -> Serving:
        """Of a memo whose turns no machine outlasts by standing still."""
        return Serving(memo=SQLiteMemo(self.memo, turn_seconds=TURN))

    def voter(self, **options: Any) -> Any:
        """A voter that gives receipts."""
        given = {"llm": Engine(), "max_queries": 40, "component": "queues", "serving": self.serving()}
        given = {"private": self.private, "budget": self.budget, **given, **LOUD, **options}
        return DPVotingRunnable.from_private_examples(given.pop("private"), **given).with_receipts()


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path)
    yield made
    made.budget.close()


def who(tenant: str, **more: Any) -> dict[str, Any]:
    return {"configurable": {"tenant": tenant, **more}}


def used(voter: Any) -> int:
    """Tickets that are charged."""
    return int(voter.plan.max_queries - voter.share.remaining("query"))
