"""Budgets as they are used: reopened, shared by graphs and nested runs, several data sets, and people who leave."""

from __future__ import annotations

import asyncio
import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict

import pytest
from langchain_core.runnables import RunnableLambda, RunnableParallel
from langgraph.graph import END, START, StateGraph

from langchain_dpicl import Budget, DPVotingRunnable, PrivateExamples
from langchain_dpicl.exceptions import (
    LedgerError,
    PrivacyBudgetExceededError,
    PrivacyBudgetMismatchError,
    PrivateAccessError,
)
from langchain_dpicl.options import LabelAnswers, Noise, Rows, Serving
from langchain_dpicl.privacy.ledger.store import InMemoryStore, LedgerStore
from langchain_dpicl.stores import SQLiteStore
from tests.contracts.front_room import CANARY
from tests.durable import UNAVAILABLE, WatchedStore, spent
from tests.labelling_doubles import CARD, LABELS, Spy

pytestmark = pytest.mark.usefixtures("free_prices")


@pytest.fixture
def restarted(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], Budget]:
    """Opens a ledger as a new process does, which has seen no examples yet."""

    def restart(path: Path) -> Budget:
        monkeypatch.setattr("langchain_dpicl.privacy.ledger.budget._IDENTITIES", {})
        return Budget.open(SQLiteStore(path))

    return restart


def people(count: int = 20, records: int = 2, **options: Any) -> PrivateExamples:
    """Users with some records each."""
    made = [
        {"text": f"{CANARY} user{user} says {number}", "queue": LABELS[user % 2], "user": f"user{user}"}
        for user in range(count)
        for number in range(records)
    ]
    declared = {"label_key": "queue", "labels": LABELS, "public_size": 20, "unit_key": "user", **options}
    return PrivateExamples(made, **{"records_per_unit": 2, **declared})


def house(store: LedgerStore, **options: Any) -> Budget:
    return Budget(**{"epsilon": 1e6, "delta": 1e-4, "store": store, **options})


def voter(private: PrivateExamples, budget: Budget, **options: Any) -> DPVotingRunnable:
    given: dict[str, Any] = {"llm": Spy(), "max_queries": 6, "rows": Rows(units=20), "epsilon": 2e4}
    given |= {"noise": Noise(multiplier=0.05), "answers": LabelAnswers(calibrate=False), "component": "voting"}
    given |= {"serving": Serving(memo_size=0), **options}
    return DPVotingRunnable.from_private_examples(private, budget=budget, **given)


def ledger_of(store: Any) -> list[Any]:
    return [(line.seq, line.kind, dict(line.body), line.hash) for line in store.records()]


# -- people who leave ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [InMemoryStore, WatchedStore])
def test_a_person_who_leaves_after_releases_changes_neither_ledger_nor_rates(kind: Callable[[], Any]) -> None:
    store, spy = kind(), Spy()
    private = people()
    made = voter(private, house(store), llm=spy)
    assert made.invoke(CARD) == "card"
    before = ledger_of(store)
    plan, declared, report = made.plan, private.declaration, made.budget.report().to_dict()
    private.remove("user7")
    private.remove("nobody was ever called so")
    assert ledger_of(store) == before
    assert (made.plan, private.declaration) == (plan, declared)
    assert made.budget.report().to_dict() == report
    seen = len(spy.private)
    for _ in range(5):
        assert made.invoke(CARD) == "card"
    texts = [prompt for prompts in spy.private[seen:] for prompt in prompts]
    assert any("user6 " in text for text in texts)
    assert not [text for text in texts if "user7 " in text]
    made.budget.close()  # writes the commits that wait
    kept = ledger_of(store)
    assert kept[: len(before)] == before
    assert sorted(one[1] for one in kept[len(before) :]) == ["commit"] * (5 + store.durable) + ["reserve"] * 5
    with pytest.raises(PrivacyBudgetExceededError):
        made.invoke(CARD)


def test_who_left_stays_away_after_a_restart_at_the_same_rates_and_charges(
    tmp_path: Path, restarted: Callable[[Path], Budget]
) -> None:
    path = tmp_path / "budget.db"
    first = voter(people(), house(SQLiteStore.new(path)))
    first.invoke(CARD)
    again = voter(people(count=19), restarted(path))  # rebuilt without the last; the same declaration
    assert again.plan == first.plan
    assert again.share.remaining("query") == first.share.remaining("query") == 5
    assert again.invoke(CARD) == "card"
    assert again.budget.report().to_dict() == first.budget.report().to_dict()


def test_a_component_without_a_name_is_named_anew_after_a_restart_with_a_warning(
    tmp_path: Path, restarted: Callable[[Path], Budget]
) -> None:
    path = tmp_path / "budget.db"
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*earlier process")
        first, private = house(SQLiteStore.new(path)), people()
        names = [voter(private, first, component=None).share.component for _ in range(2)]
        assert names == ["voting", "voting-2"]
    voter(private, first).invoke(CARD)
    with pytest.warns(UserWarning, match="'voting' is a share by an earlier process; 'voting-2' is a new one"):
        assert voter(people(), restarted(path), component=None).share.component == "voting-2"


# -- users as units, over restarts ------------------------------------------------------------------------------------


def test_units_are_users_in_every_process_of_a_ledger(tmp_path: Path, restarted: Callable[[Path], Budget]) -> None:
    path, spy = tmp_path / "budget.db", Spy()
    voter(people(), house(SQLiteStore.new(path))).invoke(CARD)
    for other in ({"unit_key": None}, {"records_per_unit": 1}, {"public_size": 21}, {"max_chars": 5}):
        advice = "the same records, declared otherwise" if "public_size" in other else "give a different data set"
        with pytest.raises(PrivacyBudgetMismatchError, match=f"the declaration this ledger holds, .*{advice}"):
            voter(people(**other), restarted(path))
    voter(people(), restarted(path), llm=spy).invoke(CARD)
    rows = [prompt for prompts in spy.private for prompt in prompts if CANARY in prompt]
    assert rows
    for row in rows:  # a row is one user, with all that is kept of them
        users = {word for word in row.split() if word.startswith("user") and word[4:].isdigit()}
        assert len(users) == 1
    assert ledger_of(SQLiteStore(path))[0][2]["unit_key"] == "user"


# -- several data sets and ledgers ------------------------------------------------------------------------------------


def test_several_data_sets_share_one_ledger_each_by_its_name() -> None:
    store = WatchedStore()
    ledger = house(store)
    one = voter(people(dataset_id="tickets"), ledger, component="one")
    two = voter(people(dataset_id="mails"), ledger, component="two")
    assert [one.invoke(CARD), two.invoke(CARD)] == ["card", "card"]
    assert sorted(Budget.open(store)._desk.refresh().bindings) == ["mails", "tickets"]
    with pytest.raises(PrivacyBudgetMismatchError, match="already names other examples"):
        voter(people(dataset_id="mails"), ledger, component="three")


def test_of_two_data_sets_of_one_name_that_are_bound_at_once_the_first_keeps_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = InMemoryStore()
    ledger, beside = house(store), Budget.open(store)
    bound = type(beside._desk).bind

    def meanwhile(desk: Any, *rest: Any) -> None:
        monkeypatch.undo()
        voter(people(), ledger, component="one")
        bound(desk, *rest)

    monkeypatch.setattr(type(beside._desk), "bind", meanwhile)
    with pytest.raises(PrivacyBudgetMismatchError, match="already names other examples"):
        voter(people(), beside, component="two")


def test_one_data_set_is_bound_to_one_ledger_for_good() -> None:
    private = people()
    first, other = house(InMemoryStore()), house(InMemoryStore())
    voter(private, first)
    lines = ledger_of(other._store)
    with pytest.raises(PrivacyBudgetMismatchError):
        voter(private, other)
    assert ledger_of(other._store) == lines == []


# -- outages, and workers that start together ---------------------------------------------------------------------------


@pytest.mark.parametrize("is_awaited", [True, False])
@pytest.mark.parametrize("exhausted", ["raise", "zero_shot"])
def test_a_ledger_that_is_out_behind_the_commit_loses_no_paid_answer(is_awaited: bool, exhausted: Any) -> None:
    store = WatchedStore()
    made = voter(people(), house(store), serving=Serving(memo_size=0, on_exhausted=exhausted)).with_receipts()

    def out() -> None:
        raise UNAVAILABLE

    def after(kinds: list[str]) -> None:
        if "reserve" in kinds:
            store.at_read = out

    def ask() -> Any:
        return asyncio.run(made.ainvoke(CARD)) if is_awaited else made.invoke(CARD)

    store.after_commit = after
    told = ask()
    assert told.label == "card"
    assert (told.receipt.queries_left, told.receipt.epsilon, told.receipt.delta) == (None, None, None)
    store.at_read, store.after_commit = (lambda: None), (lambda kinds: None)
    made.budget.check_receipt(told.receipt)
    again = ask().receipt
    assert (again.queries_left, again.epsilon) == (4, made.share.epsilon)
    assert spent(store) == {"reserve": 2, "commit": 2, "give_back": 0}


def test_workers_that_start_together_find_the_share_that_one_of_them_sealed(monkeypatch: pytest.MonkeyPatch) -> None:
    store, private = WatchedStore(), people()
    first = voter(private, house(store, epsilon=2e4))  # the share fills the budget
    second = Budget.open(store)
    fit = second._promises.fit

    def late(*given: Any) -> Any:
        if not first.share.sealed:  # it looked before, and the first worker seals it now
            first.invoke(CARD)
        return fit(*given)

    monkeypatch.setattr(second._promises, "fit", late)
    made = voter(private, second)
    assert first.share.sealed
    assert made.share.remaining("query") == 5
    with pytest.raises(PrivacyBudgetExceededError, match="requested 20000, remaining 0"):
        voter(private, second, component="another")


# -- graphs and nested runs -------------------------------------------------------------------------------------------


class State(TypedDict, total=False):
    asked: str
    one: Any
    two: Any


def graph_of(one: Any, two: Any) -> Any:
    """Two components side by side in one graph."""
    built = StateGraph(State)
    built.add_node("first", RunnableLambda(lambda state: {"one": one.invoke(state["asked"])}, afunc=_into("one", one)))
    built.add_node("second", RunnableLambda(lambda state: {"two": two.invoke(state["asked"])}, afunc=_into("two", two)))
    for name in ("first", "second"):
        built.add_edge(START, name)
        built.add_edge(name, END)
    return built.compile()


def _into(name: str, made: Any) -> Any:
    async def node(state: Any, config: Any) -> Any:
        return {name: await made.ainvoke(state["asked"], config)}

    return node


@pytest.mark.parametrize("kind", [InMemoryStore, WatchedStore])
def test_runs_of_a_graph_share_one_budget_to_the_last_ticket(kind: Callable[[], Any]) -> None:
    store = kind()
    ledger, private = house(store), people()
    options: dict[str, Any] = {"max_queries": 5, "serving": Serving(memo_size=0, on_exhausted="zero_shot")}
    made = (voter(private, ledger, component=name, **options) for name in ("one", "two"))
    compiled = graph_of(*(one.with_receipts() for one in made))
    if kind is WatchedStore:
        store.on_loop.clear()

    async def main() -> list[Any]:
        return await asyncio.gather(*(compiled.ainvoke({"asked": f"{CARD} {n}"}) for n in range(12)))

    found = asyncio.run(main())
    assert getattr(store, "on_loop", []) == []
    for name in ("one", "two"):
        sources = [run[name].receipt.source for run in found]
        assert (sources.count("release"), sources.count("zero-shot")) == (5, 7)
    assert spent(store) == {"reserve": 10, "commit": 10, "give_back": 0}
    entries = [run[name].receipt.entry for run in found for name in ("one", "two")]
    paid = sorted(entry for entry in entries if entry is not None)
    assert len(set(paid)) == 10
    for run in found:
        ledger.check_receipt(run["one"].receipt)


@pytest.mark.parametrize("is_awaited", [True, False])
def test_components_inside_one_another_are_charged_once_each(is_awaited: bool) -> None:
    store = WatchedStore()
    ledger, private = house(store), people()
    inner = voter(private, ledger, component="inner")
    outer = voter(private, ledger, component="outer")
    chain = RunnableParallel(first=inner, second=inner | RunnableLambda(lambda label: f"{label} {CARD}") | outer)
    found = asyncio.run(chain.ainvoke(CARD)) if is_awaited else chain.invoke(CARD)
    assert found == {"first": "card", "second": "card"}
    assert [inner.share.remaining("query"), outer.share.remaining("query")] == [4, 5]
    assert ledger.dangling() == ()
    ledger.verify()


# -- processes ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_worker_spends_the_same_ledger_and_a_pickled_one_does_not_exist(tmp_path: Path) -> None:
    path = tmp_path / "budget.db"
    made = voter(people(), house(SQLiteStore.new(path)))
    assert made.invoke(CARD) == "card"
    held = made.share.reserve("query")
    child = os.fork()
    if not child:
        code = 1
        try:
            answers = [made.invoke(CARD), asyncio.run(made.ainvoke(CARD))]
            try:
                held.burn()
            except LedgerError:
                code = 0 if answers == ["card", "card"] and held.give_back() == 0 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert made.share.remaining("query") == 2
    held.give_back()
    assert made.share.remaining("query") == 3
    for thing in (made, made.budget, made.share, held, made.private):
        with pytest.raises(PrivateAccessError):
            pickle.dumps(thing)
