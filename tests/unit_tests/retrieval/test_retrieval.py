"""DPRetrievalVotingRunnable: who takes part, who is debited, what is asked, what leaves, and what is refused."""

from __future__ import annotations

import asyncio
import copy
import os
import pickle
import re
import signal
import sqlite3
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from langchain_core.vectorstores import InMemoryVectorStore
from scipy import stats

from langchain_dpicl import (
    Budget,
    DPRetrievalVotingRunnable,
    LabelAnswers,
    Noise,
    PrivacyBudgetCallbackHandler,
    PrivateExamples,
    Retrieval,
)
from langchain_dpicl.backends.rows.neighbour_rows import LocalEmbeddings, SimilarTexts
from langchain_dpicl.exceptions import (
    ConfigurationError,
    LedgerError,
    LedgerRollbackError,
    ModelCallError,
    PrivacyBudgetError,
    PrivacyBudgetExceededError,
    PrivacyBudgetMismatchError,
    PrivateAccessError,
)
from langchain_dpicl.planning.row_law import RowGuess
from langchain_dpicl.privacy.accounting.events import GaussianEvent, NoEvent
from langchain_dpicl.privacy.extensions.individual_filter import FILTER_TEMPLATE, MemoryBalances
from langchain_dpicl.privacy.ledger import budget as ledger
from langchain_dpicl.privacy.ledger.tickets import Ticket
from langchain_dpicl.release import declare_share
from langchain_dpicl.release.samples import FilteredSample, FilterShare, open_participants
from langchain_dpicl.stores.beside_ledgers import SQLiteBalances
from tests.contracts.front_room import shown_by
from tests.retrieval_doubles import (
    CANARY,
    FRESH,
    LABELS,
    NEAR,
    PLAIN,
    TASK,
    TopicEmbeddings,
    documents,
    engine,
    examples,
    house,
    record,
    records,
    voter,
    votes,
)

pytestmark = pytest.mark.usefixtures("remembered_prices")


# -- who takes part --------------------------------------------------------------------------------------------------


@pytest.mark.traced
@pytest.mark.parametrize("rows", ["slots", "units"])
def test_those_near_the_query_vote_and_nobody_else(rows: str) -> None:
    made = voter(
        examples(*records("cough", "yes", 4), *records("cough", "no", 2), *records("fever", "no", 5)),
        retrieval=NEAR.replace(slots=8 if rows == "slots" else "per_unit"),
    )
    assert votes(made.invoke("what of the cough?")) == {"yes": 4, "no": 2}
    assert votes(made.invoke("what of the fever?")) == {"yes": 0, "no": 5}
    assert votes(made.invoke("what of the weather?")) == {"yes": 0, "no": 0}
    assert made.invoke("what of the cough?").label == "yes"


def test_a_unit_has_one_row_of_its_own_nearest_documents_and_one_participation_for_all_of_them() -> None:
    one = [record("cough", "no", "anna"), record("cough sleep", "yes", "anna"), record("fever", "no", "anna")]
    made = voter(
        examples(*one, *records("cough", "no", 2), records_per_unit=3), retrieval=NEAR.replace(participations=2)
    )
    # The purer one is nearer to the query: a row shows one document, and it says no.
    assert votes(made.invoke("cough")) == {"yes": 0, "no": 3}
    both = voter(
        examples(*one, *records("cough", "no", 2), records_per_unit=3),
        retrieval=NEAR.replace(participations=2, documents_per_unit=2),
    )
    assert votes(both.invoke("cough")) == {"yes": 1, "no": 2}
    assert votes(both.invoke("fever")) == {"yes": 0, "no": 1}
    assert votes(both.invoke("fever")) == {"yes": 0, "no": 0}  # two answers, on whatever topic


def test_an_exhausted_unit_leaves_silently_and_answers_go_on() -> None:
    made = voter(
        examples(*records("cough", "yes", 3), *records("fever", "no", 2)), retrieval=NEAR.replace(participations=2)
    )
    found = [votes(made.invoke(f"cough {place}")) for place in range(4)]
    assert found == [{"yes": 3, "no": 0}] * 2 + [{"yes": 0, "no": 0}] * 2
    assert votes(made.invoke("fever")) == {"yes": 0, "no": 2}  # others have theirs still
    assert made.share.remaining("query") == 100_000 - 5


@pytest.mark.parametrize("rows", ["slots", "units"])
def test_a_unit_changes_nothing_of_what_another_unit_does(rows: str) -> None:
    """The heart of it: with one unit more, all others take part in the same queries, until the same one."""
    others = [*records("cough", "no", 3), *records("fever", "no", 2)]
    questions = ["cough", "fever", "cough fever", "cough", "cough", "fever", "sleep"]
    for joined in ("cough", "fever", "cough fever sleep"):
        with_one = voter(
            examples(record(joined, "yes", "anna"), *others),
            retrieval=NEAR.replace(slots=8 if rows == "slots" else "per_unit"),
        )
        without = voter(examples(*others), retrieval=NEAR.replace(slots=8 if rows == "slots" else "per_unit"))
        for question in questions:
            assert votes(with_one.invoke(question))["no"] == votes(without.invoke(question))["no"]


def test_more_participants_than_slots_are_left_out_by_coins_and_debited_all_the_same() -> None:
    made = voter(examples(*records("cough", "yes", 9)), retrieval=NEAR.replace(participations=2, slots=4))
    assert [sum(votes(made.invoke("cough")).values()) for _ in range(4)] == [4, 4, 0, 0]


def test_the_threshold_is_where_it_says() -> None:
    near = SimilarTexts(TopicEmbeddings(), threshold=0.7)
    query = near.request_public("cough").run()
    found = near.ask([("cough",), ("cough fever",), ("cough fever sleep",), ("  ",), ()], query).run().take()
    assert found == {0: (0,), 1: (0,)}  # 1, 0.71 and 0.58
    assert near.ask([("fever", "cough fever", "cough")], query).run().take() == {0: (2,)}


def test_what_is_found_of_a_unit_is_the_same_whatever_else_is_compared() -> None:
    source = SimilarTexts(TopicEmbeddings(), threshold=0.3, most=3)
    query = source.request_public("cough sleep").run()
    alone = [source.ask([unit], query).run().take() for unit in (("cough", "fever"), ("sleep",))]
    crowd = [(f"{topic} {place}",) for topic in ("cough", "fever") for place in range(3_000)]
    together = source.ask([("cough", "fever"), *crowd, ("sleep",)], query).run().take()
    assert {0: together[0]} == alone[0]
    assert {0: together[6_001]} == alone[1]


def test_an_embedding_that_fails_concerns_its_own_unit_and_is_tried_again() -> None:
    embeddings = TopicEmbeddings()
    embeddings.broken = "cough-yes-1"
    made = voter(examples(*records("cough", "yes", 3)), retrieval=NEAR.replace(embeddings=embeddings, participations=9))
    assert votes(made.invoke("cough"))["yes"] == 2
    embeddings.broken = ""
    assert votes(made.invoke("cough"))["yes"] == 3


def test_each_document_is_embedded_once_however_many_ask_at_first() -> None:
    embeddings = TopicEmbeddings()
    made = voter(
        examples(*records("cough", "yes", 5)), retrieval=NEAR.replace(embeddings=embeddings, participations=99)
    )
    embeddings.seconds = 0.01
    made.batch([f"cough {place}" for place in range(6)])
    seen = {text: count for text, count in embeddings.seen.items() if CANARY in text}
    assert len(seen) == 5
    assert set(seen.values()) == {1}


def test_removed_documents_take_part_no_more() -> None:
    private = examples(*records("cough", "yes", 3))
    made = voter(private, retrieval=NEAR.replace(participations=9))
    assert votes(made.invoke("cough"))["yes"] == 3
    private.remove("cough-yes-1")
    assert votes(made.invoke("cough"))["yes"] == 2


# -- what is asked ---------------------------------------------------------------------------------------------------


def test_with_slots_the_model_is_asked_as_often_whoever_takes_part() -> None:
    asked = []
    for count in (0, 1, 8, 30):
        backend = engine()
        made = voter(examples(*records("cough", "yes", count)), llm=backend, retrieval=NEAR.replace(participations=1))
        before = backend.calls.total()
        made.batch(["cough", "fever", "cough"])
        asked.append(backend.calls.total() - before)
    assert len(set(asked)) == 1


def test_rows_of_nobody_do_not_vote_and_failed_rows_neither() -> None:
    made = voter(examples(*records("cough", "yes", 2)), llm=engine(fail_rows_containing="cough-yes-1"))
    assert votes(made.invoke("cough")) == {"yes": 1, "no": 0}  # six of eight rows are asked the public question


# -- when things go wrong --------------------------------------------------------------------------------------------


def test_the_filter_is_paid_for_before_the_first_document_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    embeddings, made_of = TopicEmbeddings(), records("cough", "yes", 2)
    made = voter(examples(*made_of), retrieval=NEAR.replace(embeddings=embeddings))
    looked: list[int] = []

    def watch(texts: list[str]) -> list[list[float]]:
        if any(CANARY in text for text in texts):
            looked.append(made.share.remaining(FILTER_TEMPLATE))
        return TopicEmbeddings().embed_documents(texts)

    assert not any(CANARY in text for text in embeddings.seen)
    assert made.share.remaining(FILTER_TEMPLATE) == 1
    monkeypatch.setattr(embeddings, "embed_documents", watch)
    made.invoke("cough")
    assert set(looked) == {0}


@pytest.mark.parametrize("broken", ["seats", "release"])
def test_debits_stay_whatever_fails_after_them(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    made = voter(examples(*records("cough", "yes", 3)), retrieval=NEAR.replace(participations=2))

    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError(CANARY)

    with monkeypatch.context() as broke:
        broke.setattr(type(made.plan.release), broken, fails)
        with pytest.raises(ModelCallError) as told:
            made.invoke("cough")
    assert CANARY not in str(told.value)
    assert [votes(made.invoke("cough"))["yes"] for _ in range(3)] == [3, 0, 0]


def test_debits_come_before_the_model_is_asked_and_are_on_the_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    made = voter(examples(*records("cough", "yes", 3)))
    order: list[str] = []
    ask, debit = type(made.rows).ask, MemoryBalances.debit

    def asks(self: Any, prompts: Any) -> Any:
        order.append(f"asked, {made.share.committed('query')} committed")
        return ask(self, prompts)

    def debits(self: Any, units: Any, settled: int) -> Any:
        order.append(f"debited {len(units)}, {made.share.committed('query')} committed")
        return debit(self, units, settled)

    monkeypatch.setattr(type(made.rows), "ask", asks)
    monkeypatch.setattr(MemoryBalances, "debit", debits)
    made.invoke("cough")
    assert order == ["debited 3, 0 committed", "asked, 1 committed"]


def test_an_outage_of_the_model_or_the_embeddings_costs_nobody_anything() -> None:
    embeddings = TopicEmbeddings()
    made = voter(examples(*records("cough", "yes", 3)), retrieval=NEAR.replace(embeddings=embeddings))
    embeddings.broken = "cough"
    with pytest.raises(ModelCallError):
        made.invoke("cough")
    embeddings.broken = ""
    assert made.share.remaining(FILTER_TEMPLATE) == 1
    assert made.share.remaining("query") == 100_000


def test_threads_never_let_a_unit_in_more_often() -> None:
    made = voter(examples(*records("cough", "yes", 4)), retrieval=NEAR.replace(participations=5))
    found = made.batch([f"cough {place}" for place in range(24)], {"max_concurrency": 8})
    assert sorted(votes(each)["yes"] for each in found) == [0] * 19 + [4] * 5


def test_async_answers_are_those_of_the_other_doors() -> None:
    made = voter(examples(*records("cough", "yes", 4)), retrieval=NEAR.replace(participations=3))

    async def ask() -> list[Any]:
        return [
            *await made.abatch(["cough a", "cough b"]),
            await made.ainvoke("cough c"),
            await made.ainvoke("cough d"),
        ]

    assert [votes(each)["yes"] for each in asyncio.run(ask())] == [4, 4, 4, 0]
    assert votes(next(made.stream("fever"))) == {"yes": 0, "no": 0}


def test_max_queries_are_a_public_end() -> None:
    made = voter(examples(*records("cough", "yes", 1)), max_queries=2)
    made.batch(["cough", "fever"])
    with pytest.raises(PrivacyBudgetExceededError, match="max_queries"):
        made.invoke("sleep")
    other = voter(examples(dataset_id="none"), max_queries=1, serving=FRESH.replace(on_exhausted="zero_shot"))
    sources = [each.receipt.source for each in other.batch(["sleep", "cough"])]  # two threads: either may be first
    assert sorted(sources) == ["release", "zero-shot"]


# -- what is shown ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answers", [PLAIN, PLAIN.replace(abstain_below=None), PLAIN.replace(abstain_below=None, min_votes=8.0)]
)
def test_a_plan_counts_answers_that_too_few_votes_make_abstentions(answers: LabelAnswers) -> None:
    made = voter(
        examples(*records("cough", "yes", 8)),
        retrieval=NEAR.replace(participations=150),
        answers=answers,
        noise=Noise(multiplier=3.0),
    )
    said = made.plan.expected(participants=8, source=RowGuess(skill=1.0, growth=0.0, correlation=0.0), answers=answers)
    assert said["right_label_low"] <= said["right_label_prob"] <= said["right_label_high"]
    found = Counter(made.invoke("cough").label for _ in range(150))
    for label, chance in {"yes": "right_label_prob", answers.abstain_label: "abstain_prob"}.items():
        ways = stats.binom(150, said[chance])  # a false alarm of the three cases together: below 1e-6
        assert min(ways.cdf(found[label]), ways.sf(found[label] - 1)) > 5e-8


def test_nothing_that_is_shown_tells_a_balance_or_who_took_part() -> None:
    """Two houses that differ in who is exhausted show the same; scores apart, which are noise and votes."""
    shown = []
    for private, participations in ((examples(*records("cough", "yes", 9)), 1), (examples(), 1)):
        budget = house()
        made = voter(private, budget=budget, retrieval=NEAR.replace(participations=participations), component="notes")
        answers = [made.invoke("cough"), made.invoke("cough again")]
        looks = [shown_by(thing) for thing in (made, made.filter, made.filter.participants, made.plan, made.task)]
        looks.append(repr([(each.receipt.tickets, each.receipt.queries_left) for each in answers]))
        lines = [
            (line.kind, line.body.get("template"), line.body.get("count")) for line in made.share._desk.store.records()
        ]
        looks += [repr(lines), repr(sorted(budget.report().to_dict()["shares"][0]))]
        shown.append([_without_addresses(look) for look in looks])
        assert CANARY not in repr(shown)
    assert shown[0] == shown[1]


def _without_addresses(text: str) -> str:
    return re.sub(r"0x[0-9a-f]+|[0-9a-f]{32,}", "<>", text)


def test_nothing_of_it_is_copied_or_pickled() -> None:
    made = voter(examples(*records("cough", "yes", 2)), retrieval=NEAR.replace(participations=2))
    made.invoke("cough")
    for thing in (made, made.filter, made.filter.participants, made.filter.texts):
        with pytest.raises(PrivateAccessError):
            pickle.dumps(thing)
    twin = copy.deepcopy(made)
    assert [votes(each.invoke("cough"))["yes"] for each in (twin, made, twin)] == [2, 0, 0]
    assert copy.copy(made.filter.participants) is copy.deepcopy(made.filter.participants) is made.filter.participants


def test_the_price_is_paid_once_and_is_that_of_the_participations() -> None:
    budget = PrivacyBudgetCallbackHandler(epsilon=4.0, delta=1e-5)
    made = voter(examples(*records("cough", "yes", 9)), budget=budget, epsilon=3.0, noise=None)
    made.batch([f"cough {place}" for place in range(30)])
    assert budget.remaining_epsilon == pytest.approx(1.0)
    assert 2.9 < made.plan.epsilon <= 3.0
    assert made.plan.noise_multiplier == pytest.approx(made.plan.release.event.noise_multiplier * 2**0.5, rel=1e-9)
    told = made.invoke("cough")
    assert told.receipt.epsilon == pytest.approx(3.0)
    assert told.noise_stddev == pytest.approx(made.plan.noise_multiplier * 2**0.5)


def test_answers_that_only_noise_gave_are_mostly_no_answers() -> None:
    """Of 300 queries that nobody takes part in, one of twenty is answered; binomial, false alarm 1e-6."""
    budget = house()
    made = voter(examples(), budget=budget, answers=PLAIN.replace(abstain_below="auto"), noise=Noise(multiplier=1.0))
    answered = sum(not told.abstained for told in made.batch([f"cough {place}" for place in range(300)]))
    assert stats.binomtest(answered, 300, 0.05).pvalue > 1e-6


def test_the_memo_tells_again_without_debits() -> None:
    made = voter(
        examples(*records("cough", "yes", 3)),
        serving=FRESH.replace(memo_size=9),
        retrieval=NEAR.replace(participations=2),
    )
    assert [votes(made.invoke(each))["yes"] for each in ("cough", "cough", "cough", "cough!", "cough?")] == [
        3,
        3,
        3,
        3,
        0,
    ]


# -- balances that outlive the process -------------------------------------------------------------------------------


def durable(folder: Path, **options: Any) -> DPRetrievalVotingRunnable:
    """Opens the ledger, the balances and the documents anew, as another process would."""
    place, path = folder / "ledger.db", options.pop("path", folder / "balances.db")
    limits: dict[str, Any] = {"epsilon": 1e8, "delta": 1e-4}
    opened = PrivacyBudgetCallbackHandler.open if place.exists() else PrivacyBudgetCallbackHandler.create
    budget = opened(place, **({} if place.exists() else limits))
    listed = options.pop("listed", records("cough", "yes", 3))
    near = options.pop("retrieval", NEAR).replace(balances=path)
    return voter(examples(*listed), budget=budget, component="notes", retrieval=near, **options)


def test_balances_in_a_file_are_shared_by_whoever_opens_them(tmp_path: Path) -> None:
    found = []
    for place in range(4):
        ledger._IDENTITIES.clear()  # as another process, which knows the examples by their name alone
        listed = [record("fever", "no", "new"), *records("cough", "yes", 3)][place % 2 :]  # in another order, too
        made = durable(tmp_path, listed=listed, retrieval=NEAR.replace(participations=3))
        found.append(votes(made.invoke(f"cough {place}"))["yes"])
        assert made.share.remaining(FILTER_TEMPLATE) == 0
    assert found == [3, 3, 3, 0]
    assert (tmp_path / "balances.db").stat().st_mode & 0o777 == 0o600
    assert CANARY not in (tmp_path / "balances.db").read_text(errors="replace")
    assert "cough-yes" not in (tmp_path / "balances.db").read_text(errors="replace")


def test_other_embeddings_and_another_threshold_go_on_with_the_balances_and_the_share(tmp_path: Path) -> None:
    found = []
    for threshold, topics in ((0.5, TopicEmbeddings()), (0.6, TopicEmbeddings()), (0.7, LocalEmbeddings())):
        ledger._IDENTITIES.clear()
        near = NEAR.replace(embeddings=topics, similarity_threshold=threshold)
        made = durable(tmp_path, retrieval=near)
        found.append(votes(made.invoke("cough"))["yes"])
    assert found == [3, 3, 0]  # two participations each, whatever they were near to


def test_private_text_that_goes_to_a_host_that_reports_do_not_show_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for host in ("llm.bank.example:443", "llm.bank.example:443", "other.example:443"):
        assert not caplog.records
        ledger._IDENTITIES.clear()
        monkeypatch.setattr(declare_share, "recipients", lambda *_, host=host: [host])
        durable(tmp_path).invoke("cough")
    assert "llm.bank.example:443, as its share was first declared" in caplog.text
    assert "found other.example:443" in caplog.text


def test_a_new_process_without_its_balances_is_refused(tmp_path: Path) -> None:
    durable(tmp_path, path=None).invoke("cough")
    ledger._IDENTITIES.clear()
    with pytest.raises(PrivacyBudgetExceededError, match="lost with it"):
        durable(tmp_path, path=None).invoke("cough")


def test_a_lost_file_is_not_made_anew(tmp_path: Path) -> None:
    durable(tmp_path).invoke("cough")
    (tmp_path / "balances.db").unlink()
    ledger._IDENTITIES.clear()
    with pytest.raises(PrivacyBudgetExceededError, match="The file of balances is new"):
        durable(tmp_path).invoke("cough")


def test_an_older_copy_of_the_file_lets_nobody_in(tmp_path: Path) -> None:
    made = durable(tmp_path, retrieval=NEAR.replace(participations=5))
    made.invoke("cough 1")
    older = (tmp_path / "balances.db").read_bytes()
    made.invoke("cough 2")
    (tmp_path / "balances.db").write_bytes(older)
    with pytest.raises(LedgerRollbackError, match="older copy"):
        made.invoke("cough 3")


def test_of_two_copies_that_go_on_one_is_refused(tmp_path: Path) -> None:
    first = durable(tmp_path, retrieval=NEAR.replace(participations=5))
    first.invoke("cough 1")
    (tmp_path / "copy.db").write_bytes((tmp_path / "balances.db").read_bytes())
    first.invoke("cough 2")
    ledger._IDENTITIES.clear()
    with pytest.raises(LedgerRollbackError):
        durable(tmp_path, path=tmp_path / "copy.db", retrieval=NEAR.replace(participations=5)).invoke("cough 3")


def test_a_file_belongs_to_one_filter(tmp_path: Path) -> None:
    balances = SQLiteBalances(tmp_path / "balances.db")
    assert balances.take_up({"participations": 2, "of": "a"}, lambda: {"entry": 1})[1]
    assert balances.take_up({"participations": 2, "of": "a"}, pytest.fail) == ({"entry": 1}, False)
    with pytest.raises(PrivacyBudgetMismatchError, match="another's"):
        balances.take_up({"participations": 9, "of": "a"}, pytest.fail)
    with sqlite3.connect(tmp_path / "balances.db") as connection, pytest.raises(sqlite3.IntegrityError):
        connection.execute("UPDATE filter SET most = 99")


def test_what_cannot_be_a_file_of_balances_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no database, but some text that is long enough to look like one" * 99)
    (tmp_path / "folder").mkdir()
    with sqlite3.connect(tmp_path / "other.db") as connection:
        connection.execute("CREATE TABLE mine (x)")
    for name in ("text", "folder", "other.db", "missing/file.db", "a.db-wal"):
        with pytest.raises(LedgerError):
            SQLiteBalances(tmp_path / name)
    with pytest.raises(LedgerError, match="none that was paid for"):
        SQLiteBalances(tmp_path / "new.db").debit(["a"], 0)
    with pytest.raises(ConfigurationError):
        SQLiteBalances(None)  # type: ignore[arg-type]
    assert "new.db" in repr(SQLiteBalances(tmp_path / "new.db"))


def test_processes_together_let_a_unit_in_as_often_as_declared(tmp_path: Path) -> None:
    balances = SQLiteBalances(tmp_path / "balances.db")
    balances.take_up({"participations": 7}, lambda: {"entry": 1})
    children = []
    for _ in range(3):
        child = os.fork()
        if child == 0:
            let_in = sum(balances.debit(["a"], 0)[0] for _ in range(4))
            os._exit(let_in)
        children.append(child)
    counts = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert sum(counts) == 7
    with sqlite3.connect(tmp_path / "balances.db") as connection:
        assert connection.execute("SELECT releases FROM filter").fetchone() == (12,)


def test_a_kill_at_any_moment_gives_no_participation_back(tmp_path: Path) -> None:
    """Children are killed by SIGKILL somewhere in a query; whatever they did, nobody is let in more than declared."""
    durable(tmp_path, retrieval=NEAR.replace(participations=4)).invoke(
        "fever"
    )  # paid for, and embedded for the children
    ledger._IDENTITIES.clear()
    told = tmp_path / "told"
    for moment in range(5):
        child = os.fork()
        if child == 0:
            made = durable(tmp_path, retrieval=NEAR.replace(participations=4))
            ask = type(made.rows).ask

            def asks(self: Any, prompts: Any, made: Any = made, moment: int = moment, ask: Any = ask) -> Any:
                if moment % 2:
                    os.kill(os.getpid(), signal.SIGKILL)  # the debits stand, and nothing was asked
                return ask(self, prompts)

            type(made.rows).ask = asks
            yes = votes(made.invoke(f"cough {moment}"))["yes"]
            with told.open("a") as file:
                file.write(f"{yes}\n")
                file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)
    assert told.read_text().split() == ["3", "3", "0"]  # three of the first four were let in, or killed and debited
    ledger._IDENTITIES.clear()
    assert votes(durable(tmp_path, retrieval=NEAR.replace(participations=4)).invoke("cough"))["yes"] == 0


# -- what is refused -------------------------------------------------------------------------------------------------


def _store() -> Any:
    return InMemoryVectorStore(TopicEmbeddings())


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: voter(examples(), retrieval=NEAR.replace(embeddings=_store())), "may depend on that document"),
        (
            lambda: voter(examples(), retrieval=NEAR.replace(embeddings=_store().as_retriever())),
            "may depend on that document",
        ),
        (lambda: voter(examples(), top_k=4), "found 'top_k'"),
        (lambda: voter(_store()), "expected PrivateExamples, found 'InMemoryVectorStore'"),
        (lambda: voter(examples(), retrieval={"participations": 2}), r"retrieval: expected Retrieval\(\.\.\.\)"),
        (lambda: voter(examples(), retrieval=NEAR.replace(embeddings=object())), "expected LangChain embeddings"),
        (lambda: voter(examples(), retrieval=NEAR.replace(similarity_threshold=0.0)), "similarity_threshold"),
        (lambda: voter(examples(), retrieval=NEAR.replace(similarity_threshold=1.1)), "similarity_threshold"),
        (lambda: voter(examples(), retrieval=NEAR.replace(similarity_threshold="high")), "similarity_threshold"),
        (lambda: voter(examples(), retrieval=NEAR.replace(participations=0)), "participations"),
        (lambda: voter(examples(), retrieval=NEAR.replace(documents_per_unit=0)), "documents_per_unit"),
        (lambda: voter(examples(), max_queries=0), "max_queries"),
        (
            lambda: voter(examples(), max_queries=10**12 + 1),
            "max_queries: expected an integer >= 1 and <= 10{12}, found",
        ),
        (lambda: voter(examples(), retrieval=NEAR.replace(slots="both")), "slots"),
        (lambda: voter(examples(), answers=PLAIN.replace(abstain_below=0.5)), "number of participating documents"),
        (lambda: voter(examples(), noise=Noise("gumbel", multiplier=1.0)), "'gaussian' noise"),
        (lambda: voter(examples(), answers=PLAIN.replace(abstain_label="yes")), "abstain_label"),
        (lambda: voter(examples(), budget=house(adjacency="replace_one")), "two filters move at once"),
        (lambda: voter(examples(), task=TASK.replace(suffix="{one} {other}")), "one called 'input'"),
        (lambda: voter(examples(), retrieval=NEAR.replace(balances="balances.db")), "ledger in memory"),
        (lambda: voter("records"), "PrivateExamples"),  # type: ignore[arg-type]
        (lambda: voter(examples(), task=TASK.replace(labels=None)), "labels"),
    ],
)
def test_public_faults_are_refused_before_anything_is_spent(build: Callable[[], Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        build()


@pytest.mark.parametrize(
    ("answers", "least"),
    [
        (LabelAnswers(), "floor"),
        (LabelAnswers(abstain_below="auto"), "floor"),
        (LabelAnswers(abstain_below="never"), None),
        (LabelAnswers(min_votes=3.5), 3.5),
    ],
)
def test_an_answer_needs_votes_above_the_noise_unless_told_otherwise(answers: LabelAnswers, least: Any) -> None:
    made = voter(examples(), answers=answers.replace(calibrate=False))
    assert made.min_votes == (made.plan.noise_floor if least == "floor" else least)


def test_balances_in_a_file_need_names(tmp_path: Path) -> None:
    budget = PrivacyBudgetCallbackHandler.create(tmp_path / "ledger.db", epsilon=1e8, delta=1e-4)
    with pytest.raises(ConfigurationError, match="component"):
        voter(examples(), budget=budget, retrieval=NEAR.replace(balances=tmp_path / "b.db"))
    nameless = PrivateExamples(["cough"], public_size=9)
    with pytest.raises(ConfigurationError, match="unit_key"):
        voter(nameless, budget=budget, retrieval=NEAR.replace(balances=tmp_path / "b.db"), component="notes")
    with pytest.raises(ConfigurationError, match="balances"):
        voter(examples(), budget=budget, retrieval=NEAR.replace(balances=7), component="notes")


def test_documents_are_compared_by_local_embeddings_unless_told_otherwise() -> None:
    held = documents(*records("cough", "yes", 3))
    private = PrivateExamples(held, public_size=100, unit_key="patient")
    made = voter(private, retrieval=Retrieval(similarity_threshold=0.1, participations=1))
    assert votes(made.invoke("cough")) == {"yes": 3, "no": 0}
    assert made.filter.texts.embeddings.name == repr(LocalEmbeddings()).removesuffix("()")
    assert made.labels == LABELS
    assert made.cost().private_calls == 32


def test_a_ticket_that_is_no_querys_is_refused() -> None:
    made = voter(examples(*records("cough", "yes", 1)))
    made.invoke("cough")
    opened: FilteredSample = made.filter.participants
    other = Budget(epsilon=1.0, delta=1e-6)
    for event in (GaussianEvent(9.0), NoEvent()):
        tickets = (Ticket("query", event), Ticket("rest", GaussianEvent(99.0)))
        share = other.declare(f"of {event.kind}", tickets=tickets, epsilon=0.5)
        with pytest.raises(PrivacyBudgetError, match="a query's of this filter's ledger"):
            next(opened.release(None, share.reserve("query"), settled=lambda: 0))  # type: ignore[arg-type]


def test_balances_in_memory_are_never_opened_without_the_ticket_that_pays_for_them() -> None:
    made = voter(examples(*records("cough", "yes", 1)))
    payer = FilterShare(made.budget.ledger_id, made.share.component, made.private.dataset_id)
    given: dict[str, Any] = {"plan": made.plan.release, "texts": made.filter.texts, "payer": payer}
    with pytest.raises(PrivacyBudgetError, match="balances of this process"):
        open_participants(made.private, None, balances=MemoryBalances(2), **given)
    wrong = made.share.reserve("query")
    with pytest.raises(PrivacyBudgetError, match="another event"):
        open_participants(made.private, wrong, balances=MemoryBalances(2), **given)
    assert wrong.unburnt == 1


def test_the_forked_filter_lets_nobody_in() -> None:
    made = voter(examples(*records("cough", "yes", 1)), retrieval=NEAR.replace(participations=9))
    made.invoke("cough")
    child = os.fork()
    if child == 0:
        try:
            made.invoke("cough 2")
        except LedgerError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


@pytest.mark.parametrize("stops", ["embedding", "balances", "model", "noise"])
def test_ctrl_c_leaves_nothing_private_in_our_frames(monkeypatch: pytest.MonkeyPatch, stops: str) -> None:
    embeddings, backend = TopicEmbeddings(), engine()
    made = voter(examples(*records("cough", "yes", 3)), retrieval=NEAR.replace(embeddings=embeddings), llm=backend)

    def stop(*given: Any, **_: Any) -> Any:
        if stops != "embedding" or CANARY in repr(given):
            raise KeyboardInterrupt
        return [[1.0, 0.0, 0.0, 0.1]]

    holders: dict[str, tuple[Any, str]] = {
        "embedding": (embeddings, "embed_documents"),
        "balances": (MemoryBalances, "debit"),
        "model": (backend, "score_choices"),
        "noise": (type(made.plan.release), "release"),
    }
    if stops == "model":
        made.invoke("sleep")  # the public call of the next query goes the same way: stop private ones alone
        real = backend.score_choices
        monkeypatch.setattr(
            backend,
            "score_choices",
            lambda prompts, labels: (stop if CANARY in repr(prompts) else real)(prompts, labels),
        )
    else:
        monkeypatch.setattr(*holders[stops], stop)
    with pytest.raises(KeyboardInterrupt) as stopped:
        made.invoke("cough")
    shown = [entry for entry in stopped.traceback if "langchain_dpicl" in str(entry.path)]
    assert len(shown) > 5
    assert CANARY not in repr([entry.frame.f_locals for entry in shown])
    assert "cough-yes" not in repr([entry.frame.f_locals for entry in shown])


def test_async_stops_and_failures_keep_the_debits() -> None:
    made = voter(
        examples(*records("cough", "yes", 3)),
        retrieval=NEAR.replace(embeddings=TopicEmbeddings(), participations=2),
        llm=engine(),
    )

    async def cancelled() -> None:
        task = asyncio.create_task(made.ainvoke("cough"))
        for _ in range(6):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    let_in = [votes(made.invoke(f"cough {place}"))["yes"] for place in range(4)]
    assert sum(let_in) in {3, 6}  # the one that was cancelled was debited, or had not begun; never more
