"""What a client that is not trusted may send, and what an operator may get wrong, is refused by us and charges nothing."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from langchain_core.documents import Document

from langchain_dpicl import (
    Budget,
    KeywordAnswers,
    LabelClassifier,
    Noise,
    PrivacyBudgetCallbackHandler,
    PrivateExamples,
    Serving,
)
from langchain_dpicl.exceptions import ConfigurationError, LedgerError, MemoError
from langchain_dpicl.privacy.ledger import store as stores
from langchain_dpicl.retrieval import DPRetrievalFreeFormRunnable
from langchain_dpicl.stores import FileAnchor, SQLiteBalances, SQLiteMemo, SQLiteStore
from langchain_dpicl.voting import DPVotingRunnable
from tests import free_form_doubles, retrieval_doubles
from tests.labelling_doubles import Spy

RECORDS = [{"text": "my card is lost", "queue": "card"}]


def house() -> PrivacyBudgetCallbackHandler:
    return PrivacyBudgetCallbackHandler(epsilon=8.0, delta=1e-6)


def voting(**options: Any) -> Any:
    private = PrivateExamples(RECORDS, label_key="queue", labels=("card", "wire"), public_size=500, max_chars=300)
    given: dict[str, Any] = {"llm": Spy(), "budget": house(), "epsilon": 2.0, "max_queries": 5, **options}
    return DPVotingRunnable.from_private_examples(private, **given)


def free_form(**options: Any) -> Any:
    private = PrivateExamples(free_form_doubles.RECORDS, public_size=10, max_chars=300)
    return free_form_doubles.keywords(private=private, **options)


def retrieval(**options: Any) -> Any:
    record = retrieval_doubles.record("cough", "yes", "p")
    return retrieval_doubles.voter(retrieval_doubles.examples(record, max_chars=300), **options)


def retrieval_answers(**options: Any) -> Any:
    record = retrieval_doubles.record("cough", "yes", "p")
    return DPRetrievalFreeFormRunnable.from_private_examples(
        retrieval_doubles.examples(record, max_chars=300),
        llm=free_form_doubles.Writer(),
        retrieval=retrieval_doubles.NEAR,
        budget=retrieval_doubles.house(),
        epsilon=1e7,
        noise=Noise(multiplier=0.1),
        answers=KeywordAnswers(keywords=("ask", "bank"), num_keywords=1),
        **options,
    )


ROOMS: list[Callable[..., Any]] = [voting, free_form, retrieval, retrieval_answers]


@pytest.mark.parametrize("build", ROOMS)
@pytest.mark.parametrize(
    ("serving", "most"),
    [(Serving(), 300), (Serving(max_query_chars=20), 20), (Serving(max_query_chars=301), 301)],
)
def test_a_query_that_is_too_long_is_refused_before_any_call_and_ticket(
    build: Callable[..., Any], serving: Serving, most: int
) -> None:
    made = build(serving=serving)
    left = made.share.remaining("query")
    too_long = "q" * (most + 1)
    for ask in (
        lambda: made.invoke(too_long),
        lambda: made.invoke([Document(too_long)]),
        lambda: made.batch([too_long]),
        lambda: asyncio.run(made.ainvoke({"input": too_long} if "input" in made.wording.input_variables else too_long)),
    ):
        with pytest.raises(ConfigurationError, match=rf"input: expected at most {most} characters, found {most + 1}"):
            ask()
    assert made.share.remaining("query") == left
    made.invoke("q" * most)


def test_no_model_is_asked_about_a_query_that_is_too_long() -> None:
    spy = Spy()
    made = voting(llm=spy, serving=Serving(max_query_chars=5))
    asked = len(spy.public)
    with pytest.raises(ConfigurationError):
        made.invoke("123456")
    assert (len(spy.public), spy.private) == (asked, [])


CONFIGS: list[Any] = [
    {"configurable": []},
    {"configurable": "x"},
    {"configurable": {1: "x"}},
    {"max_concurrency": "3"},
    {"max_concurrency": 0},
    {"max_concurrency": True},
    {"callbacks": "x"},
    {"callbacks": 5},
    {"callbacks": ("x",)},
    {"callbacks": ["x"]},
    {"callbacks": [Budget(epsilon=1.0, delta=1e-6)]},
    {"tags": 5},
    {"tags": "x"},
    {"tags": [5]},
    {"metadata": []},
    {"metadata": "x"},
    {"run_name": 5},
    "x",
    5,
]


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
def test_a_config_that_is_none_is_refused_by_us_whatever_asks(config: Any) -> None:
    made = voting()

    async def gathered(stream: Any) -> list[Any]:
        return [item async for item in stream]

    for ask in (
        lambda: made.invoke("q", config),
        lambda: asyncio.run(made.ainvoke("q", config)),
        lambda: list(made.stream("q", config)),
        lambda: asyncio.run(gathered(made.astream("q", config))),
        lambda: made.batch(["q"], config),
        lambda: made.batch(["q", "r"], [{}, config]),
        lambda: asyncio.run(made.abatch(["q"], config)),
        lambda: list(made.batch_as_completed(["q"], config)),
        lambda: asyncio.run(gathered(made.abatch_as_completed(["q"], config))),
    ):
        with pytest.raises(ConfigurationError, match=r"^config(\['\w+'\])?: expected"):
            ask()
    with pytest.raises(ConfigurationError):
        voting(budget=config)
    assert made.share.remaining("query") == 5


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
def test_a_public_classifier_refuses_it_as_well_before_the_model_is_asked(config: Any) -> None:
    spy = Spy()
    made = LabelClassifier(spy, labels=("card", "transfer"))
    for ask in (
        lambda: made.invoke("q", config),
        lambda: asyncio.run(made.ainvoke("q", config)),
        lambda: made.batch(["q", "r"], [{}, config]),
        lambda: asyncio.run(made.abatch(["q"], config)),
    ):
        with pytest.raises(ConfigurationError, match=r"^config(\['\w+'\])?: expected"):
            ask()
    assert spy.public == []


@pytest.mark.parametrize("second", [1e18, -1e18, math.nan, math.inf, 253402300800.0])
def test_a_clock_beyond_all_years_grants_nothing(second: float, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = Budget(epsilon=1.0, delta=1e-6)
    private = PrivateExamples(RECORDS, public_size=500)
    monkeypatch.setattr(stores, "time", SimpleNamespace(time=lambda: second))
    for act in (lambda: Budget(epsilon=1.0, delta=1e-6), lambda: budget.bind(private)):
        with pytest.raises(LedgerError, match="expected a clock"):
            act()
    assert budget.report().to_dict()["shares"] == []


@pytest.mark.parametrize("name", ["a\0b", "a" * 300], ids=["zero", "long"])
def test_a_path_that_no_file_system_has_is_refused_by_us(name: str, tmp_path: Path) -> None:
    wrong, anchor = str(tmp_path / name), tmp_path / "anchor.json"
    limits: dict[str, Any] = {"epsilon": 1.0, "delta": 1e-6}
    store = SQLiteStore.new(tmp_path / "budget.db")
    for act in (
        lambda: SQLiteStore(wrong),
        lambda: SQLiteStore.new(wrong),
        lambda: store.backup(wrong),
        lambda: FileAnchor(wrong),
        lambda: FileAnchor.new(wrong),
        lambda: SQLiteMemo(wrong),
        lambda: SQLiteBalances(wrong),
        lambda: PrivacyBudgetCallbackHandler.create(wrong, **limits),
        lambda: PrivacyBudgetCallbackHandler.create(wrong, **limits, anchor=anchor),
        lambda: PrivacyBudgetCallbackHandler.create(tmp_path / "new.db", **limits, anchor=wrong),
        lambda: PrivacyBudgetCallbackHandler(**limits, anchor=wrong),
        lambda: PrivacyBudgetCallbackHandler.open(wrong),
        lambda: voting(serving=Serving(memo=wrong), component="v"),
    ):
        with pytest.raises((ConfigurationError, LedgerError, MemoError)):
            act()


def test_too_many_queries_are_told_how_many_are_possible() -> None:
    with pytest.raises(ConfigurationError, match=r"max_queries: expected at most ([\d,]+) queries at delta") as caught:
        voting(max_queries=10**9, noise="gumbel")
    possible = int(str(caught.value).split("at most ")[1].split(" ")[0].replace(",", ""))
    assert 0 < possible < 10**9
    assert "gap" not in str(caught.value)
    with pytest.raises(ConfigurationError, match="max_queries: expected an integer"):
        voting(max_queries=1e9)
    for noise in (None, "gumbel"):
        with pytest.raises(
            ConfigurationError, match="max_queries: expected an integer >= 1 and <= 1000000000000, found"
        ):
            voting(max_queries=2**63 - 1, noise=noise)
