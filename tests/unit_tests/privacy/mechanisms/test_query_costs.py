"""What one release costs this process grows with its sample, never with the number of records, which is secret."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import langchain_dpicl
from langchain_dpicl import (
    Budget,
    DemonstrationSynthesizer,
    DPFreeFormRunnable,
    DPVotingRunnable,
    KeywordAnswers,
    PrivateExamples,
    PromptDPSGD,
    PromptPATELabeler,
    Rows,
    Serving,
)
from langchain_dpicl.backends.fake import FakeBackend, scripted, word_copier
from langchain_dpicl.budget.budget import Waits
from langchain_dpicl.options import Training
from langchain_dpicl.privacy.mechanisms.randomness import SecureRandom
from langchain_dpicl.privacy.private_examples import Units
from tests.doubles import WORDS
from tests.free_form_doubles import Writer
from tests.gradient_doubles import LogisticEngine

FEW, MANY = 1_000, 300_000
OURS = str(Path(langchain_dpicl.__file__).parent)
SPREAD = 200_000
"""Bytes that two runs may differ by; a list with a place for each of many records takes ten times as much."""


class Coins:
    """Falls as from a seed, from the start again after `begin`."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self._drawn = np.random.default_rng(3)

    def __call__(self, num_bytes: int) -> bytes:
        return self._drawn.bytes(num_bytes)


@pytest.fixture(autouse=True)
def coins(monkeypatch: pytest.MonkeyPatch) -> Coins:
    """Every sample holds the same number of units, whatever their number; coins fall and waits last alike."""
    made, add = Coins(), Waits.add
    monkeypatch.setattr(Waits, "add", lambda self, seconds: add(self, 0.001))  # the first wait in a bin is a call more
    monkeypatch.setattr(SecureRandom, "entropy", lambda self, num_bytes: made(num_bytes))
    monkeypatch.setattr(SecureRandom, "binomial", lambda self, n, p: min(n, 12))
    monkeypatch.setattr(SecureRandom, "choice_without_replacement", lambda self, n, k: np.arange(k) * (n // 20))
    monkeypatch.setattr("langchain_dpicl.privacy.ledger.store._now", lambda: "2026-11-23T08:00:00+00:00")
    return made


def examples(number: int, monkeypatch: pytest.MonkeyPatch, **declared: Any) -> PrivateExamples:
    """Builds so many units that share one record for each label, without reading them one by one."""
    given: dict[str, Any] = {"label_key": "queue", "labels": ("good", "bad"), **declared}
    labels = given["labels"] or ("",)
    shown = [({"text": "my card was declined", **({"queue": label} if label else {})},) for label in labels]
    units = Units(
        contents=[shown[place % len(shown)] for place in range(number)],
        by_label={label: list(range(place, number, len(labels))) for place, label in enumerate(labels) if label},
        positions={str(place): place for place in range(number)},
    )
    with monkeypatch.context() as patch:
        patch.setattr("langchain_dpicl.privacy.private_examples.read_units", lambda records, declared, **_: (units, ""))
        patch.setattr("langchain_dpicl.privacy.private_examples.labels_by_unit", lambda units, declared: {})
        return PrivateExamples([], public_size=20_000, **given)


def voting(private: PrivateExamples, how: dict[str, Any]) -> Callable[[int], object]:
    engine = FakeBackend(scripted({" good": 0.6, " bad": 0.4}), max_top_k=5)
    voter = DPVotingRunnable.from_private_examples(
        private, llm=engine, **how, max_queries=10, rows=Rows(units=10), serving=Serving(memo_size=0)
    )
    return lambda number: voter.invoke(f"question {number}")


def free_form(private: PrivateExamples, how: dict[str, Any]) -> Callable[[int], object]:
    answers = DPFreeFormRunnable.from_private_examples(
        private,
        llm=Writer(),
        **how,
        max_queries=10,
        answers=KeywordAnswers(keywords=("ask", "bank"), num_keywords=1),
        serving=Serving(memo_size=0),
    )
    return lambda number: answers.invoke(f"question {number}")


def labelling(private: PrivateExamples, how: dict[str, Any]) -> Callable[[int], object]:
    engine = FakeBackend(scripted({" good": 0.6, " bad": 0.4}), max_top_k=5)
    made = [
        PromptPATELabeler.from_private_examples(
            private, llm=engine, **how, component=f"pate {number}", public_inputs=["one"], max_queries=1
        )
        for number in range(3)
    ]
    return lambda number: made[number].run(progress=False)


def generation(private: PrivateExamples, how: dict[str, Any]) -> Callable[[int], object]:
    made = [
        DemonstrationSynthesizer.from_private_examples(
            private,
            llm=FakeBackend(word_copier(WORDS), vocabulary=WORDS),
            **how,
            component=f"texts {number}",
            shots_per_label=1,
            max_tokens=3,
        )
        for number in range(3)
    ]
    return lambda number: made[number].run(progress=False)


def training(private: PrivateExamples, how: dict[str, Any]) -> Callable[[int], object]:
    shape = Training(steps=2, expected_batch_size=8)
    made = [
        PromptDPSGD.from_private_examples(
            private,
            llm=LogisticEngine(),
            training=shape,
            **how,
            component=f"prompt {number}",
        )
        for number in range(3)
    ]
    return lambda number: made[number].run(progress=False)


def work_of(action: Callable[[], object]) -> tuple[int, int]:
    """Returns how many functions an action calls, those written in C among them, and how many lines of ours it runs."""
    counted = {"calls": 0, "lines": 0}

    def called(frame: FrameType, event: str, arg: object) -> None:
        counted["calls"] += event in {"call", "c_call"}

    def entered(frame: FrameType, event: str, arg: object) -> Any:
        counted["lines"] += event == "line"
        return entered if frame.f_code.co_filename.startswith(OURS) else None

    gc.disable()  # a round of the collector may call what it likes
    before = sys.gettrace(), sys.getprofile()  # of the coverage of a run
    sys.setprofile(called)
    sys.settrace(entered)
    try:
        action()
    finally:
        sys.settrace(before[0])
        sys.setprofile(before[1])
        gc.enable()
    return counted["calls"], counted["lines"]


def memory_of(action: Callable[[], object]) -> int:
    """Returns the bytes that an action holds at most beyond those of before."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        action()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("component", [voting, free_form, labelling, generation, training])
def test_a_release_takes_the_same_steps_and_memory_for_few_and_many_records(
    component: Callable[..., Callable[[int], object]], monkeypatch: pytest.MonkeyPatch, coins: Coins
) -> None:
    seen = []
    for number in (FEW, FEW, MANY):  # the first one fills what is kept for equal plans
        private = examples(number, monkeypatch)
        budget = Budget(epsilon=8.0, delta=1e-8)
        release = component(private, {"budget": budget, "epsilon": 2.0})
        release(0)  # imports, caches, the first opening
        coins.begin()
        work = work_of(lambda release=release: release(1))
        seen.append((work, memory_of(lambda release=release: release(2))))
    _, (few, few_bytes), (many, many_bytes) = seen
    assert few == many
    assert abs(many_bytes - few_bytes) < SPREAD
