"""Answers from retrieved documents where something is in the way: forks, readers, copies of a file, stops, two at once."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding

import langchain_dpicl.retrieval as filters
from langchain_dpicl import DPRetrievalVotingRunnable, Noise, PrivacyBudgetCallbackHandler, PrivateExamples
from langchain_dpicl.backends.private_calls.embeddings import SilentEmbeddings
from langchain_dpicl.backends.rows import neighbour_rows
from langchain_dpicl.backends.rows.neighbour_rows import LocalEmbeddings, SimilarTexts, direction_of
from langchain_dpicl.backends.sync_async import run_sync
from langchain_dpicl.exceptions import (
    ConfigurationError,
    LedgerError,
    LedgerRollbackError,
    LedgerUnavailableError,
    ModelCallError,
    PrivacyBudgetError,
    PrivacyBudgetExceededError,
    PrivacyBudgetMismatchError,
    UnsilencableModelError,
)
from langchain_dpicl.options import LabelAnswers
from langchain_dpicl.privacy.extensions.individual_filter import FILTER_TEMPLATE, MemoryBalances, ParticipationPlan
from langchain_dpicl.privacy.ledger import budget as ledger
from langchain_dpicl.privacy.ledger.shares import Reservation
from langchain_dpicl.release.samples import FilteredQuery, PoolTexts
from langchain_dpicl.retrieval import IndividualFilter
from langchain_dpicl.stores import beside_ledgers
from langchain_dpicl.stores.beside_ledgers import SQLiteBalances
from tests.retrieval_doubles import CANARY, FRESH, NEAR, TopicEmbeddings, examples, house, record, records, voter, votes

pytestmark = pytest.mark.usefixtures("remembered_prices")

COUGHS = records("cough", "yes", 3)


def durable(
    folder: Path, *, private: PrivateExamples | None = None, is_kept: bool = True, **options: Any
) -> DPRetrievalVotingRunnable:
    """Opens the ledger, the balances and the documents anew, as another process would."""
    place = folder / "ledger.db"
    ledger._IDENTITIES.clear()
    if place.exists():
        budget = PrivacyBudgetCallbackHandler.open(place)
    else:
        budget = PrivacyBudgetCallbackHandler.create(place, epsilon=1e8, delta=1e-4)
    near = options.pop("retrieval", NEAR)
    if near.balances is None and is_kept:
        near = near.replace(balances=folder / "balances.db")
    given: dict[str, Any] = {"component": "notes", "retrieval": near, **options}
    return voter(examples(*COUGHS) if private is None else private, budget=budget, **given)


def on(place: str, folder: Path, **options: Any) -> DPRetrievalVotingRunnable:
    return durable(folder, **options) if place == "file" else voter(examples(*COUGHS), **options)


@contextlib.contextmanager
def others_at(path: Path, begin: str = "BEGIN") -> Iterator[None]:
    """Holds a lock of the file for 0.15 seconds, beginning now."""
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=0.0)
    connection.execute(begin)
    connection.execute("SELECT * FROM filter").fetchall()
    timer = threading.Timer(0.15, connection.close)
    timer.start()
    yield
    timer.join()


# -- forks -----------------------------------------------------------------------------------------------------------


class Forks:
    """An ask that forks when it is answered."""

    def __init__(self, ask: Any, children: list[int]) -> None:
        self._ask, self._children = ask, children

    def run(self) -> Any:
        found = self._ask.run()
        self._children.append(os.fork())
        return found


@pytest.mark.parametrize("place", ["memory", "file"])
@pytest.mark.parametrize("asked", ["model", "embeddings"])
def test_a_fork_while_somebody_is_asked_releases_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str, asked: str
) -> None:
    made = on(place, tmp_path, retrieval=NEAR.replace(participations=1))
    children: list[int] = []
    holder = type(made.rows) if asked == "model" else SimilarTexts
    ask: Callable[..., Any] = holder.ask
    monkeypatch.setattr(holder, "ask", lambda *given: Forks(ask(*given), children))
    try:
        found = made.invoke("cough")
    except LedgerError:
        os._exit(7 if children == [0] else 8)
    if children == [0]:
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 7
    assert votes(found) == {"yes": 3, "no": 0}
    monkeypatch.setattr(holder, "ask", ask)
    assert votes(made.invoke("cough 2")) == {"yes": 0, "no": 0}


def test_a_child_answers_although_another_thread_had_its_turn_when_it_forked(tmp_path: Path) -> None:
    made = durable(tmp_path, retrieval=NEAR.replace(participations=2))
    made.invoke("fever")
    with made.filter.participants._gates.here:  # somebody else's turn, in a thread that the child does not have
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            os._exit(votes(made.invoke("cough"))["yes"])
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3


# -- the file, others and copies of it -------------------------------------------------------------------------------


def test_a_reader_of_the_file_costs_no_filter(tmp_path: Path) -> None:
    made = durable(tmp_path)
    with others_at(tmp_path / "balances.db"):
        assert votes(made.invoke("cough")) == {"yes": 3, "no": 0}
    assert votes(durable(tmp_path).invoke("cough 2")) == {"yes": 3, "no": 0}


def test_a_full_disk_answers_alike_whether_nobody_or_everybody_takes_part(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = durable(tmp_path, private=examples(*records("cough", "yes", 200)))
    made.warm_up()
    connect = beside_ledgers._connect

    def full(path: Path, timeout: float) -> sqlite3.Connection:
        connection = connect(path, timeout)
        connection.execute("PRAGMA max_page_count = 1")  # that is, as many as there are
        return connection

    monkeypatch.setattr(beside_ledgers, "_connect", full)
    assert votes(made.invoke("what of the weather?")) == {"yes": 0, "no": 0}
    assert votes(made.invoke("what of the cough?"))["yes"] > 0


def test_space_for_debits_is_set_aside_anew_where_a_process_was_killed_in_one(tmp_path: Path) -> None:
    """SQLite undoes what it wrote, and removes the journal: the next debits would take space by who takes part."""
    made = durable(tmp_path, private=examples(*records("cough", "yes", 200)))
    made.warm_up()
    journal = tmp_path / "balances.db-journal"
    size = journal.stat().st_size

    def killed(connection: sqlite3.Connection) -> None:
        connection.execute("PRAGMA cache_size = 1")
        connection.executemany(beside_ledgers._COUNT, [(os.urandom(32),) for _ in range(1_000)])
        os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        made.filter.balances._file.write(killed)
    os.waitpid(child, 0)
    for query in ("what of the weather?", "what of the cough?"):
        made.invoke(query)
        assert journal.stat().st_size == size


def test_the_ledger_is_not_waited_for_with_the_file_locked(tmp_path: Path) -> None:
    made = durable(tmp_path)
    seen = []

    @contextlib.contextmanager
    def pay(template: str, **_: Any) -> Iterator[Any]:
        with others_at(tmp_path / "balances.db", "BEGIN EXCLUSIVE"):
            seen.append(template)
        yield made.share.reserve(template)

    made.filter.open(pay)
    assert seen == [FILTER_TEMPLATE]
    assert made.filter.participants is not None


def test_who_comes_while_another_process_pays_takes_up_what_it_paid_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first, second = (
        durable(tmp_path, retrieval=NEAR.replace(participations=5)),
        durable(tmp_path, retrieval=NEAR.replace(participations=5)),
    )
    has_ticket, bought = threading.Event(), IndividualFilter._bought

    def slow(self: IndividualFilter, *given: Any) -> Any:
        has_ticket.set()
        threading.Event().wait(0.2)
        return bought(self, *given)

    monkeypatch.setattr(IndividualFilter, "_bought", slow)
    monkeypatch.setattr(filters, "_PATIENCE", 60.0)
    paying = threading.Thread(target=first.invoke, args=("cough",))
    paying.start()
    has_ticket.wait()
    assert votes(second.invoke("cough 2")) == {"yes": 3, "no": 0}
    paying.join()
    assert first.share.remaining(FILTER_TEMPLATE) == 0


def test_an_outage_of_the_ledger_behind_the_burnt_ticket_loses_no_filter_in_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The commits are noted, and written some time; nobody else can use what is in this memory."""
    made, commit = durable(tmp_path, is_kept=False), Reservation.commit

    def out(ticket: Reservation, count: int = 1, *, wait: bool = False) -> None:
        commit(ticket, count)
        if wait:
            raise LedgerUnavailableError("locked")

    monkeypatch.setattr(Reservation, "commit", out)
    assert votes(made.invoke("what of the cough?"))["yes"] == 3


def test_a_process_that_died_with_the_ticket_leaves_no_filter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(filters, "_PATIENCE", 0.05)
    durable(tmp_path).share.reserve(FILTER_TEMPLATE).burn()
    with pytest.raises(PrivacyBudgetExceededError, match="lost with it"):
        durable(tmp_path).invoke("cough")


def test_two_threads_that_come_first_pay_once() -> None:
    made = voter(examples(*COUGHS))
    reserved: list[str] = []

    @contextlib.contextmanager
    def pay(template: str, **_: Any) -> Iterator[Any]:
        reserved.append(template)
        threading.Event().wait(0.05)
        yield made.share.reserve(template)

    threads = [threading.Thread(target=made.filter.open, args=(pay,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert reserved == [FILTER_TEMPLATE]


def test_a_running_filter_never_debits_another_filters_file(tmp_path: Path) -> None:
    mine = durable(tmp_path, retrieval=NEAR.replace(participations=1))
    other = durable(
        tmp_path, retrieval=NEAR.replace(participations=1_000, balances=tmp_path / "other.db"), component="other"
    )
    mine.invoke("cough")
    for place in range(3):
        other.invoke(f"fever {place}")
    (tmp_path / "balances.db").write_bytes((tmp_path / "other.db").read_bytes())
    with pytest.raises(PrivacyBudgetMismatchError, match="another's"):
        mine.invoke("cough 2")


def test_of_two_copies_in_use_at_the_same_moment_one_releases(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Both debit before either is on the ledger, which is the moment at which counts alone do not tell them apart."""
    first = durable(tmp_path, retrieval=NEAR.replace(participations=1))
    first.invoke("fever")
    (tmp_path / "copy.db").write_bytes((tmp_path / "balances.db").read_bytes())
    second = durable(tmp_path, retrieval=NEAR.replace(participations=1, balances=tmp_path / "copy.db"))
    second.warm_up()
    both, debit = threading.Barrier(2), SQLiteBalances.debit

    def together(self: SQLiteBalances, units: Any, settled: int) -> list[bool]:
        let_in = debit(self, units, settled)
        both.wait(60)
        return let_in

    monkeypatch.setattr(SQLiteBalances, "debit", together)
    found: list[Any] = []

    def ask(made: DPRetrievalVotingRunnable) -> None:
        try:
            found.append(votes(made.invoke("cough"))["yes"])
        except LedgerRollbackError as error:
            found.append("two copies go on" in str(error))

    threads = [threading.Thread(target=ask, args=(made,)) for made in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found in ([3, True], [True, 3], [True, True])


def test_units_keep_their_balances_under_their_names_however_they_are_listed(tmp_path: Path) -> None:
    """Declared anew by label, in another order, with a newcomer in front: who is exhausted stays so."""

    def split(*listed: dict[str, str]) -> PrivateExamples:
        first = examples(*({**each, "ward": "a"} for each in listed), fields=("ward",))
        return first.redeclared(dataset_id="split", public_size=100, label_key="ward", labels=("a", "b"))

    old, newcomer = record("cough", "yes", "anna"), record("cough", "no", "bo")
    again = [record("fever", "no", "cy"), newcomer, old]
    found = [
        votes(
            durable(tmp_path, retrieval=NEAR.replace(participations=1), private=split(*listed)).invoke(f"cough {place}")
        )
        for place, listed in enumerate([[old], [newcomer, old], again])
    ]
    assert found == [{"yes": 1, "no": 0}, {"yes": 0, "no": 1}, {"yes": 0, "no": 0}]


def test_only_another_order_lets_nobody_in_again(tmp_path: Path) -> None:
    mixed = [record("cough", "yes", "anna"), record("fever", "no", "bo")]
    found = [
        votes(durable(tmp_path, retrieval=NEAR.replace(participations=1), private=examples(*listed)).invoke(question))
        for question, listed in (("cough", mixed), ("fever", mixed[::-1]), ("cough fever", mixed))
    ]
    assert found == [{"yes": 1, "no": 0}, {"yes": 0, "no": 1}, {"yes": 0, "no": 0}]


def test_a_file_that_another_ledgers_line_paid_for_is_refused(tmp_path: Path) -> None:
    made = durable(tmp_path)
    line = {"ledger_id": made.budget.ledger_id, "entry": 1, "entry_hash": "0" * 64}
    SQLiteBalances(tmp_path / "balances.db").take_up(made.filter._terms(), lambda: line)
    with pytest.raises(LedgerRollbackError):
        made.invoke("cough")


def test_a_file_is_known_by_all_that_it_was_paid_for() -> None:
    budget, private = house(), examples(*COUGHS)
    one = voter(private, budget=budget, component="one")
    for other in (
        voter(private, budget=budget, component="two"),
        voter(private, budget=budget, component="three", noise=Noise(multiplier=0.02)),
        voter(private, budget=budget, component="four", retrieval=NEAR.replace(slots=9)),
    ):
        unlike = {name for name, value in other.filter._terms().items() if one.filter._terms()[name] != value}
        assert unlike == ({"component"} if other.share.component == "two" else {"component", "plan"})


# -- tickets ---------------------------------------------------------------------------------------------------------


def test_a_querys_ticket_of_another_component_buys_nothing() -> None:
    budget, private = house(), examples(*COUGHS)
    made = voter(private, budget=budget, component="a", max_queries=1, retrieval=NEAR.replace(participations=9))
    other = voter(private, budget=budget, component="b")
    made.invoke("cough")
    render = made.wording.renderer(made.task.queries(("cough",)))
    direction = made.filter.texts.request_public("cough").run()
    question = FilteredQuery(direction, rows=made.rows.ask, render=render, width=2)
    ticket = other.share.reserve("query")
    with pytest.raises(PrivacyBudgetError, match="and component"):
        run_sync(made.filter.participants.release(question, ticket, settled=lambda: 0))
    assert ticket.unburnt == 1
    with pytest.raises(PrivacyBudgetError, match="another's"):
        filters.open_participants(
            private,
            other.share.reserve(FILTER_TEMPLATE),
            plan=made.plan.release,
            texts=made.filter.texts,
            balances=MemoryBalances(2),
            payer=made.filter.participants._payer,
        )


def test_balances_that_are_gone_are_told_also_where_answers_would_go_on_without_them(tmp_path: Path) -> None:
    spent = FRESH.replace(on_exhausted="zero_shot")
    assert durable(tmp_path, is_kept=False, serving=spent).invoke("cough").receipt.source == "release"
    for serving in (spent, FRESH):
        with pytest.raises(PrivacyBudgetExceededError, match="lost with it") as told:
            durable(tmp_path, is_kept=False, serving=serving).invoke("cough")
        assert "max_queries" not in str(told.value)


# -- two at once, and stops ------------------------------------------------------------------------------------------


def test_debits_come_in_the_order_of_the_queries_however_long_one_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    made = voter(
        examples(*records("fever", "no", 2), record("fever cough", "yes", "anna")),
        retrieval=NEAR.replace(participations=1),
    )
    made.invoke("sleep")
    began, ended, debit = threading.Event(), [], MemoryBalances.debit

    def debits(self: MemoryBalances, units: Any, settled: int) -> list[bool]:
        if not began.is_set():
            began.set()
            threading.Event().wait(0.15)  # a query of many documents, or on a slow disk
        ended.append(len(units))
        return debit(self, units, settled)

    monkeypatch.setattr(MemoryBalances, "debit", debits)
    first = threading.Thread(target=made.invoke, args=("fever",))
    first.start()
    began.wait()
    assert votes(made.invoke("cough")) == {"yes": 0, "no": 0}
    first.join()
    assert ended == [3, 1]


def test_what_was_embedded_before_a_stop_is_not_embedded_again() -> None:
    class Slow(TopicEmbeddings):
        async def aembed_documents(self, texts: list[str]) -> list[list[float]]:
            if CANARY in texts[0] and sum(CANARY in text for text in self.seen) >= 200:
                stuck.set()
                await asyncio.sleep(60)
            return self.embed_documents(texts)

    embeddings, stuck = Slow(), asyncio.Event()
    made = voter(
        examples(*records("cough", "yes", 230)), retrieval=NEAR.replace(embeddings=embeddings, participations=9)
    )

    async def cancelled() -> None:
        asking = asyncio.create_task(made.ainvoke("cough"))
        await stuck.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    asyncio.run(cancelled())
    made.invoke("cough")
    seen = [count for text, count in embeddings.seen.items() if CANARY in text]
    assert len(seen) == 230
    assert seen.count(1) >= 128


def test_warming_up_pays_and_embeds_and_debits_nobody() -> None:
    embeddings = TopicEmbeddings()
    made = voter(examples(*COUGHS), retrieval=NEAR.replace(embeddings=embeddings, participations=1))
    for _ in range(2):
        made.warm_up()
    assert sorted(count for text, count in embeddings.seen.items() if CANARY in text) == [1, 1, 1]
    assert made.share.remaining(FILTER_TEMPLATE) == 0
    assert made.share.remaining("query") == made.plan.max_queries
    assert votes(made.invoke("cough")) == {"yes": 3, "no": 0}
    assert sum(count for text, count in embeddings.seen.items() if CANARY in text) == 3


def test_warming_up_pays_nothing_where_an_instrumentor_would_hear_the_documents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    embeddings = TopicEmbeddings()
    made = voter(examples(*COUGHS), retrieval=NEAR.replace(embeddings=embeddings))
    embeddings.seen.clear()
    recorder: dict[str, Any] = {"__name__": "opentelemetry.instrumentation.later"}
    exec("def wrapped(call): return lambda *given: call(*given)", recorder)  # noqa: S102  a function of another package
    monkeypatch.setattr(TopicEmbeddings, "embed_documents", recorder["wrapped"](TopicEmbeddings.embed_documents))
    with pytest.raises(UnsilencableModelError):
        made.warm_up()
    assert made.share.remaining(FILTER_TEMPLATE) == 1
    assert not embeddings.seen


def test_documents_are_not_compared_on_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    made, where, compared = voter(examples(*COUGHS)), [], SimilarTexts._compare

    def compares(self: SimilarTexts, *given: Any) -> Any:
        where.append(threading.current_thread() is threading.main_thread())
        return compared(self, *given)

    monkeypatch.setattr(SimilarTexts, "_compare", compares)
    assert votes(asyncio.run(made.ainvoke("cough"))) == {"yes": 3, "no": 0}
    assert where == [False]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_call_that_fails_for_all_is_made_for_each(monkeypatch: pytest.MonkeyPatch, is_async: bool) -> None:
    made, name = voter(examples(*COUGHS), retrieval=NEAR.replace(participations=3)), "arows" if is_async else "rows"
    real = getattr(SilentEmbeddings, name)

    def fails(self: SilentEmbeddings, texts: Any) -> Any:
        if len(texts) > 1:
            raise RuntimeError(CANARY)
        return real(self, texts)

    monkeypatch.setattr(SilentEmbeddings, name, fails)
    found = asyncio.run(made.ainvoke("cough")) if is_async else made.invoke("cough")
    assert votes(found) == {"yes": 3, "no": 0}


def test_directions_are_kept_as_long_as_a_unit_has_the_text() -> None:
    private = examples(*COUGHS)
    made = voter(private, retrieval=NEAR.replace(participations=9))
    held: list[int] = []
    for question in ("cough", "cough 2", "cough 3"):
        made.invoke(question)
        held.append(len(made.filter.texts._held.reveal()))
        private.remove("cough-yes-1")
    assert held == [3, 2, 2]
    made.filter.texts.forget()
    assert not made.filter.texts._held.reveal()


def test_documents_are_read_again_only_after_a_removal(monkeypatch: pytest.MonkeyPatch) -> None:
    private, reads, real = examples(*COUGHS), [0], PoolTexts.own
    made = voter(private, retrieval=NEAR.replace(participations=9))

    def own(self: PoolTexts, place: int) -> Any:
        reads[0] += 1
        return real(self, place)

    monkeypatch.setattr(PoolTexts, "own", own)
    units, found = len(COUGHS), []
    for _ in range(3):
        made.invoke("cough")
        found.append(reads[0])
    private.remove("cough-yes-1")
    assert votes(made.invoke("cough again")) == {"yes": 2, "no": 0}
    assert [*found, reads[0]] == [units, units, units, 2 * units]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_text_that_could_not_be_embedded_is_asked_again_alone(
    monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    source = SimilarTexts(LocalEmbeddings(), threshold=0.9)
    query = source.request_public("fever").run()
    units = Kept([("fever",), ("cough",), ("fever",)])
    name = "arows" if is_async else "rows"
    real, asked = getattr(SilentEmbeddings, name), []

    def near() -> Any:
        ask = source.ask(units, query)
        return (asyncio.run(ask.arun()) if is_async else ask.run()).take()

    def spoil(found: np.ndarray, texts: Any) -> np.ndarray:
        asked.append(len(texts))
        found[:] = 0.0 if len(asked) == 1 else found
        return found

    def rows(self: SilentEmbeddings, texts: Any) -> Any:
        return spoil(real(self, texts), texts)

    async def arows(self: SilentEmbeddings, texts: Any) -> Any:
        return spoil(await real(self, texts), texts)

    monkeypatch.setattr(SilentEmbeddings, name, arows if is_async else rows)
    assert [near(), near(), near()] == [{}, {0: (0,), 2: (0,)}, {0: (0,), 2: (0,)}]
    assert asked == [2, 2]


@pytest.mark.parametrize("topics", [True, False], ids=["dense", "sparse"])
def test_what_a_kept_matrix_finds_is_what_each_unit_alone_gives(
    monkeypatch: pytest.MonkeyPatch, *, topics: bool
) -> None:
    monkeypatch.setattr(neighbour_rows, "_BLOCK", 7)
    words = ["fever", "cough", "sleep", "night", "ward"]
    texts = [
        tuple(" ".join(words[(start + step) % 5] for step in range(1 + start % 3)) for start in range(place, place + 3))
        for place in range(40)
    ]
    source = SimilarTexts(LocalEmbeddings(topics=topics), threshold=0.5, most=2)
    assert source.embeddings.is_sparse == (not topics)
    kept = Kept(texts)
    for question in ("fever at night", "sleep", "cough ward"):
        query = source.request_public(question).run()
        found = source.ask(kept, query).run().take()
        assert found
        for place, unit in enumerate(texts):
            alone = SimilarTexts(source.embeddings, threshold=0.5, most=2).ask([unit], query).run().take()
            assert alone.get(0) == found.get(place)
    source.ask(Kept(texts[5:]), query).run()  # other units: a new matrix, of parts of the old one
    assert source.ask(Kept(texts), query).run().take() == found


@pytest.mark.parametrize("topics", [True, False], ids=["dense", "sparse"])
def test_who_reaches_the_threshold_is_exact_to_the_last_bit(monkeypatch: pytest.MonkeyPatch, *, topics: bool) -> None:
    monkeypatch.setattr(neighbour_rows, "_BLOCK", 3)
    monkeypatch.setattr(neighbour_rows, "_AT_ONCE", 4_000)  # 3 dense texts
    texts = ["a fever", "a cough", "no sleep at night", "ward", "fever fever", "night", "the ward at night", "fevers"]
    source = SimilarTexts(LocalEmbeddings(topics=topics), threshold=0.5)
    query = source.request_public("fever at night").run()
    vectors = LocalEmbeddings(topics=topics).embed_documents(texts)
    whole = [direction_of(np.array(vector), 2.0**11).astype(int) for vector in vectors]
    asked = query.astype(int)
    exact = [int(row @ asked) / math.sqrt(int(row @ row) * int(asked @ asked)) for row in whole]
    units = Kept([(text,) for text in texts])
    reached = [value for value in exact if value > 0]
    assert len(reached) > 4
    for threshold in (*reached, *(math.nextafter(value, 1.0) for value in reached)):
        source.threshold = threshold
        near = [place for place, value in enumerate(exact) if value >= threshold]
        assert source.ask(units, query).run().take() == dict.fromkeys(near, (0,))
    kept = source._kept.reveal()
    assert kept is not None
    assert kept.cosines(query).tolist() == exact


class Kept:
    """Texts that stay as they are."""

    version = 1

    def __init__(self, units: Sequence[tuple[str, ...]]) -> None:
        self._units = units

    def __len__(self) -> int:
        return len(self._units)

    def own(self, place: int) -> tuple[str, ...]:
        return self._units[place]


def test_a_unit_that_is_removed_during_the_first_query_takes_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    private, debited = examples(*COUGHS), []
    made, real, rows = voter(private), MemoryBalances.debit, SilentEmbeddings.rows

    def removes(self: SilentEmbeddings, texts: Any) -> Any:
        for place in (0, 1):
            private.remove(f"cough-yes-{place}")
        return rows(self, texts)

    def debit(self: MemoryBalances, units: Any, settled: int) -> Any:
        debited.append(list(units))
        return real(self, units, settled)

    monkeypatch.setattr(SilentEmbeddings, "rows", removes)
    monkeypatch.setattr(MemoryBalances, "debit", debit)
    assert votes(made.invoke("cough")) == {"yes": 1, "no": 0}
    assert debited == [["cough-yes-2"]]


def test_a_refusal_of_the_balances_is_told_from_frames_that_hold_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    made = voter(examples(*COUGHS))

    def refuses(self: MemoryBalances, units: Any, settled: int) -> Any:
        raise LedgerError(f"no disk for {len(units) > 0}")

    monkeypatch.setattr(MemoryBalances, "debit", refuses)
    with pytest.raises(LedgerError, match="no disk for True") as told:
        made.invoke("cough")
    assert "refuses" not in {entry.name for entry in told.traceback}
    shown = [entry for entry in told.traceback if "langchain_dpicl" in str(entry.path)]
    assert "cough-yes" not in repr([entry.frame.f_locals for entry in shown])


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_what_frames_hold_after_a_stop_is_empty(monkeypatch: pytest.MonkeyPatch, error: type[BaseException]) -> None:
    """Boxes show nothing, and a debugger opens boxes: after an error there is nothing in them any more."""
    made = voter(examples(*COUGHS))

    def stops(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(ParticipationPlan, "release", stops)
    with pytest.raises((KeyboardInterrupt, ModelCallError)) as stopped:
        made.invoke("cough")
    held = [value for entry in stopped.traceback for value in entry.frame.f_locals.values()]
    rows = [value for value in held if type(value).__name__ == "_ParticipantRows"]
    assert rows
    assert not any(value.row_units for value in rows)
    monkeypatch.setattr(SimilarTexts, "_compare", stops)
    if error is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt) as stopped:
            made.invoke("fever")
        held = [value for entry in stopped.traceback for value in entry.frame.f_locals.values()]
        asks = [value for value in held if type(value).__name__ == "_NeighbourRequest"]
        assert asks
        assert not any(value.units for value in asks)


# -- public faults ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [3, 64, 384])
def test_a_text_is_at_similarity_one_to_itself(size: int) -> None:
    source = SimilarTexts(DeterministicFakeEmbedding(size=size), threshold=1.0)
    for place in range(20):
        query = source.request_public(f"text {place}").run()
        found = source.ask([(f"text {place}",), (f"other {place}",)], query)
        assert found.run().take() == {0: (0,)}
        with pytest.raises(ConfigurationError, match="a second"):
            found.run()
    assert source.ask([("text 1",)], np.zeros(size)).run().take() == {}


def test_rows_of_more_documents_than_a_unit_has_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="documents_per_unit"):
        voter(examples(*COUGHS), retrieval=NEAR.replace(documents_per_unit=2))
    voter(examples(*COUGHS, records_per_unit=2), retrieval=NEAR.replace(documents_per_unit=2))


@pytest.mark.parametrize("blank", ["", "  ", "\n\t", "???"])
def test_a_question_without_a_direction_is_refused_before_anything_is_charged(blank: str) -> None:
    made = voter(examples(*COUGHS), retrieval=NEAR.replace(embeddings=LocalEmbeddings()))
    for ask in (made.invoke, lambda given: asyncio.run(made.ainvoke(given))):
        with pytest.raises(ConfigurationError, match="Nothing was charged"):
            ask(blank)
    assert made.share.remaining("query") == made.plan.max_queries
    assert made.share.remaining(FILTER_TEMPLATE) == 1


def test_a_name_for_votes_that_are_not_counted_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="other_label"):
        voter(examples(*COUGHS), answers=LabelAnswers(other_label="unclear"))
