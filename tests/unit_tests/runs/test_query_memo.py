"""Answers that outlive the process: found by their own plan, tenant and query alone, and paid for once."""

from __future__ import annotations

import asyncio
import copy
import logging
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from langchain_core.stores import InMemoryByteStore

from langchain_dpicl import FewShotTask, LabelAnswers, Noise, PrivacyBudgetCallbackHandler, PrivateExamples, Serving
from langchain_dpicl.backends.langchain.texts import TextVoteBackend
from langchain_dpicl.exceptions import (
    ConfigurationError,
    LedgerUnavailableError,
    MemoError,
    ModelCallError,
    PrivacyBudgetExceededError,
    TenantCapExceededError,
)
from langchain_dpicl.privacy.ledger.shares import Reservation, Share
from langchain_dpicl.stores import MemoKey, ReleaseMemo, SQLiteMemo, StoreMemo
from tests.faults.children import Child, together
from tests.free_form_doubles import VECTORS, WORDS, PublicChat, embedding, keywords
from tests.memo_house import CANARY, DEAF, LABELS, Engine, House, house, no_prices, used, who

LONG = 3_600.0
"""Seconds that no test waits: pytest ends one that hangs."""

__all__ = ["house", "no_prices"]

# -- who gets which answer --------------------------------------------------------------------------------------------------


def test_another_process_is_told_the_same_for_free(house: House) -> None:
    first = house.voter(**DEAF)
    told = [first.invoke(str(number)).label for number in range(7)]
    second = house.voter(**DEAF)
    again = [second.invoke(str(number)) for number in range(7)]
    # By chance alone the same with a chance of 2^-7; the sources and the charges are certain.
    assert [answer.label for answer in again] == told
    assert {answer.receipt.source for answer in again} == {"memo"}
    assert {answer.receipt.tickets for answer in again} == {0}
    assert used(second) == 7


def test_the_scores_that_were_released_are_told_to_the_last_bit(house: House) -> None:
    options = {**DEAF, "answers": LabelAnswers(calibrate=False, scores=True)}
    first, second = (house.voter(**options).invoke("which?") for _ in range(2))
    assert first.scores == second.scores
    assert (first.receipt.source, second.receipt.source) == ("release", "memo")


@pytest.mark.parametrize("mechanism", ["gumbel", "permute_and_flip", "gaussian"])
def test_what_every_mechanism_releases_is_kept(house: House, mechanism: str) -> None:
    first, second = (house.voter(noise=Noise(mechanism, multiplier=0.05)).invoke("which?") for _ in range(2))
    assert (first.label, first.receipt.source) == ("card", "release")
    assert (second.label, second.receipt.source) == ("card", "memo")


def test_an_abstention_is_remembered_as_one(house: House) -> None:
    options = {"answers": LabelAnswers(calibrate=False, abstain_below=1.0, abstain_label="nobody"), **DEAF}
    found = [house.voter(**options).invoke(str(number)) for number in range(6)]
    again = [house.voter(**options).invoke(str(number)) for number in range(6)]
    assert [(answer.label, answer.abstained) for answer in again] == [(a.label, a.abstained) for a in found]
    assert {answer.receipt.source for answer in again} == {"memo"}


PLAIN = LabelAnswers(calibrate=False)


@pytest.mark.parametrize(
    "change",
    [
        {"component": "queues-2"},
        {"component": "queues-2", "noise": Noise(multiplier=0.06)},
        {"prefix": "Sort it."},
        {"suffix": "message: {input}\nqueue:"},
        {"example_prompt": "message: {text}\nqueue: {queue}"},
        {"task": FewShotTask(example_separator="\n--\n")},
        {"task": FewShotTask(verbalizers={"card": " cards", "transfer": " transfer"})},
        {"component": "queues-2", "task": FewShotTask(labels=("transfer", "card"))},
        {"component": "queues-2", "answers": PLAIN.replace(votes="soft")},
        {"component": "queues-2", "answers": PLAIN.replace(abstain_below=0.5)},
    ],
    ids=str,
)
def test_nothing_is_told_of_another_plan(house: House, change: dict[str, Any]) -> None:
    house.voter().invoke("which?")
    other = house.voter(**change)
    before = used(other)
    assert other.invoke("which?").receipt.source == "release"
    assert used(other) == before + 1


class Writer(PublicChat):
    """Has a name and a temperature, as models of providers have."""

    model_name: str = "a"
    temperature: float | None = None


@pytest.mark.parametrize(
    "change",
    [
        {"instructions": "Answer with the opposite of one of these:"},
        {"options": {"temperature": 0.5}},
        {"llm": Writer(says=["card"], model_name="b")},
    ],
    ids="-".join,
)
def test_nothing_is_told_of_other_instructions_or_another_model(house: House, change: dict[str, Any]) -> None:
    given = {"llm": Writer(says=["card"])}
    engines = [TextVoteBackend(**given), TextVoteBackend(**given), TextVoteBackend(**{**given, **change})]
    told = [
        house.voter(llm=engine, answers=LabelAnswers(votes="text", calibrate=False)).invoke("which?").receipt.source
        for engine in engines
    ]
    assert told == ["release", "memo", "release"]


def test_nothing_is_told_of_another_data_set_or_ledger(house: House, tmp_path: Path) -> None:
    first = house.voter()
    first.invoke("which?")
    other = house.voter(private=house.examples("others"), component="queues-2")
    assert other.invoke("which?").receipt.source == "release"
    (tmp_path / "elsewhere").mkdir()
    elsewhere = House(tmp_path / "elsewhere")
    assert elsewhere.voter(serving=Serving(memo=house.memo)).invoke("which?").receipt.source == "release"
    elsewhere.budget.close()


def test_nothing_is_told_to_another_tenant(house: House) -> None:
    house.voter().invoke("which?", who("acme"))
    second = house.voter()
    sources = [second.invoke("which?", config).receipt.source for config in (who("other"), {}, who(""), who("acme"))]
    assert sources == ["release", "release", "memo", "memo"]  # no name and "" are the same nobody
    assert used(second) == 3


def test_what_is_told_again_takes_no_place_of_a_tenant_and_asks_no_model(house: House) -> None:
    capped = {"serving": Serving(memo=house.memo, tenant_max_queries=1)}
    house.voter(**capped).invoke("which?", who("acme"))
    engine = Engine()
    second = house.voter(llm=engine, **capped)
    probed = engine.asked
    assert second.invoke("which?", who("acme")).receipt.source == "memo"
    with pytest.raises(TenantCapExceededError):
        second.invoke("else?", who("acme"))
    assert (used(second), engine.asked) == (1, probed)
    second.invoke("else?", who("other"))
    assert engine.asked > probed


def test_what_was_paid_for_is_told_when_nothing_is_left(house: House) -> None:
    house.voter(max_queries=1).invoke("which?")
    second = house.voter(max_queries=1, serving=Serving(memo=house.memo, on_exhausted="zero_shot"))
    assert second.invoke("which?").receipt.source == "memo"
    assert second.invoke("else?").receipt.source == "zero-shot"
    assert (
        house.voter(max_queries=1, serving=Serving(memo=house.memo, on_exhausted="zero_shot"))
        .invoke("else?")
        .receipt.source
        == "zero-shot"
    )


def test_a_price_that_a_later_accountant_reads_otherwise_loses_no_answer(house: House) -> None:
    from langchain_dpicl.runs.answer_memo import scope_of_plan

    voter = house.voter()
    public = {"noise_multiplier": 0.5, "epsilon": 1.0, "delta": 1e-6, "implementation_delta": 1e-30}
    scopes = [
        scope_of_plan(voter.budget, voter.share, dataset_id="d", public={**public, **change})
        for change in ({}, {"epsilon": 0.9}, {"delta": 1e-7, "implementation_delta": 0.0}, {"noise_multiplier": 0.6})
    ]
    assert scopes[0] == scopes[1] == scopes[2] != scopes[3]
    assert scopes[0]["format"] == 1  # what is kept in another way is not looked at


# -- order, faults, kills ----------------------------------------------------------------------------------------------


class Spy(SQLiteMemo):
    """Remembers what stands in the ledger when something is asked of it; fails on wish."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: list[tuple[str, int]] = []
        self.uncommitted: Callable[[], int] = lambda: -1
        self.fails: set[str] = set()

    def _note(self, name: str) -> None:
        self.seen.append((name, self.uncommitted()))
        if name in self.fails:
            raise MemoError(f"memo: cannot {name} now.")

    def recall(self, key: MemoKey) -> str | None:
        self._note("recall")
        return super().recall(key)

    def remember(self, key: MemoKey, told: str, *, instead_of: str | None = None) -> None:
        self._note("remember")
        super().remember(key, told, instead_of=instead_of)

    def claim(self, key: MemoKey, holder: str) -> bool:
        self._note("claim")
        return super().claim(key, holder)

    def leave(self, key: MemoKey, holder: str) -> None:
        self._note("leave")
        super().leave(key, holder)


def test_the_answer_stands_in_the_memo_before_its_ticket_is_committed(house: House) -> None:
    spy = Spy(house.memo)
    voter = house.voter(serving=Serving(memo=spy))
    spy.uncommitted = lambda: sum(held.count for held in house.budget.budget.dangling())
    voter.invoke("which?")
    assert spy.seen == [("recall", 0), ("claim", 0), ("recall", 0), ("remember", 1), ("leave", 0)]
    spy.seen.clear()
    voter.invoke("which?")
    assert spy.seen == []  # this process knows
    house.voter(serving=Serving(memo=spy)).invoke("which?")
    assert spy.seen == [("recall", 0)]


@pytest.mark.parametrize("what", ["recall", "claim"])
def test_a_memo_that_is_out_refuses_before_anything_is_charged(house: House, what: str) -> None:
    spy = Spy(house.memo)
    voter = house.voter(serving=Serving(memo=spy))
    spy.fails = {what}
    with pytest.raises(MemoError):
        voter.invoke("which?")
    assert used(voter) == 0
    spy.fails = set()
    assert voter.invoke("which?").receipt.source == "release"


def test_an_answer_that_cannot_be_kept_is_not_told_and_not_lost(house: House) -> None:
    spy = Spy(house.memo)
    voter = house.voter(serving=Serving(memo=spy), **DEAF)
    spy.fails = {"remember"}
    for _ in range(2):
        with pytest.raises(MemoError, match="stays charged and is kept") as caught:
            voter.invoke("which?", who("acme"))
        frames = [frame for frame, _ in traceback.walk_tb(caught.tb) if "langchain_dpicl" in frame.f_code.co_filename]
        assert len(frames) > 5
        assert CANARY not in repr([frame.f_locals for frame in frames])
    assert used(voter) == 1
    spy.fails = set()
    assert voter.invoke("which?", who("acme")).receipt.source == "memo"
    assert house.voter(**DEAF).invoke("which?", who("acme")).receipt.source == "memo"
    assert used(voter) == 1


def test_while_too_many_paid_answers_wait_no_other_question_is_charged(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("langchain_dpicl.runs.answer_memo._MOST_UNSAVED", 2)
    spy = Spy(house.memo)
    voter = house.voter(serving=Serving(memo=spy))
    spy.fails = {"remember"}
    for name in ("acme", "other", "third"):
        with pytest.raises(MemoError):
            voter.invoke("which?", who(name))
    with pytest.raises(MemoError, match=r"2 paid answers wait.* nothing was charged"):
        voter.invoke("else?", who("acme"))
    assert used(voter) == 2
    spy.fails = set()
    assert voter.invoke("else?", who("acme")).receipt.source == "release"
    again = house.voter(serving=Serving(memo=spy))  # all that waited stands by now
    assert [again.invoke("which?", who(name)).receipt.source for name in ("acme", "other")] == ["memo", "memo"]
    assert used(voter) == 3


class ReadOnly(InMemoryByteStore):
    def mset(self, pairs: Any) -> None:
        raise PermissionError(f"redis://user:{CANARY}@host")


def test_a_store_that_cannot_be_written_is_noticed_before_anything_is_charged(house: House) -> None:
    voter = house.voter(serving=Serving(memo=StoreMemo(ReadOnly(), durable=True)))
    for text in ("a", "b"):
        with pytest.raises(MemoError, match="PermissionError") as caught:
            voter.invoke(text)
        assert CANARY not in str(caught.value)
    assert used(voter) == 0


class Own(ReleaseMemo):
    """Somebody's memo that raises what it likes."""

    durable, description = True, "a memo of their own"
    fails: str = ""

    def _is_up(self, name: str) -> None:
        if name == self.fails:
            raise ConnectionError(f"pw={CANARY}")

    def recall(self, key: MemoKey) -> None:
        self._is_up("recall")

    def remember(self, key: MemoKey, told: str, *, instead_of: str | None = None) -> None:
        self._is_up("remember")

    def claim(self, key: MemoKey, holder: str) -> bool:
        self._is_up("claim")
        return True

    def leave(self, key: MemoKey, holder: str) -> None:
        self._is_up("leave")


@pytest.mark.parametrize(("what", "charged"), [("recall", 0), ("claim", 0), ("remember", 1)])
def test_what_a_memo_of_ones_own_raises_is_told_by_its_kind_alone(house: House, what: str, charged: int) -> None:
    own = Own()
    own.fails = what
    voter = house.voter(serving=Serving(memo=own))
    with pytest.raises(MemoError, match="found ConnectionError") as caught:
        voter.invoke("which?")
    assert CANARY not in str(caught.value)
    assert used(voter) == charged


def test_a_paid_answer_that_a_memo_drops_at_once_is_told_all_the_same(house: House) -> None:
    own = Own()  # it keeps nothing
    own.fails = "remember"
    voter = house.voter(serving=Serving(memo=own))
    with pytest.raises(MemoError):
        voter.invoke("which?")
    own.fails = ""
    assert voter.invoke("which?").receipt.source == "memo"
    assert used(voter) == 1


def test_a_turn_that_a_memo_of_ones_own_does_not_end_costs_no_answer(house: House) -> None:
    own = Own()
    own.fails = "leave"
    assert house.voter(serving=Serving(memo=own)).invoke("which?").receipt.source == "release"


BAD_VOTES = ("[99, null]", "[-1, null]", "[2, null]", "[0]", "null", "{", "[true, null]", "[0.5, null]", '["x", null]')
BAD_SCORES = ("[0, [1.0]]", "[0, [NaN, 1.0]]", '[0, ["x", 1]]', "[0, 1]", "[" * 100_000)


@pytest.mark.parametrize("forged", BAD_VOTES + BAD_SCORES, ids=range(14))
def test_an_entry_that_is_no_vote_is_told_as_broken(house: House, forged: str) -> None:
    memo, voter = SQLiteMemo(house.memo), house.voter()
    memo.remember(voter.memo._key("", ("which?",)), forged)
    with pytest.raises(MemoError, match="malformed"):
        voter.invoke("which?")
    assert used(voter) == 0


def test_a_turn_that_cannot_be_left_loses_no_answer(house: House, caplog: pytest.LogCaptureFixture) -> None:
    spy = Spy(house.memo)
    voter = house.voter(serving=Serving(memo=spy))
    spy.fails = {"leave"}
    with caplog.at_level(logging.WARNING, "langchain_dpicl"):
        assert voter.invoke("which?").receipt.source == "release"
    assert "expires by itself" in caplog.text


def test_an_answer_whose_commit_the_ledger_refused_is_told_again_for_free(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    voter = house.voter()
    with monkeypatch.context() as out:

        def commit(ticket: Reservation, count: int = 1) -> None:
            raise LedgerUnavailableError("ledger: out.")

        out.setattr(Reservation, "commit", commit)
        with pytest.raises(LedgerUnavailableError):
            voter.invoke("which?")
    assert voter.invoke("which?").receipt.source == "memo"
    assert used(voter) == 1


def test_a_query_that_fails_in_public_gives_its_turn_back(house: House) -> None:
    voter = house.voter(serving=Serving(memo=SQLiteMemo(house.memo, turn_seconds=LONG)))
    real = voter.rows.request_public_rows

    def out(*_: Any, **__: Any) -> Any:
        raise ModelCallError("out")

    voter.rows.request_public_rows = out
    with pytest.raises(ModelCallError):
        voter.invoke("which?")
    voter.rows.request_public_rows = real
    assert voter.invoke("which?").receipt.source == "release"  # at once: the turn would be a long one
    assert used(voter) == 1


def killer(where: str) -> None:
    """Makes this process kill itself at one point of the next query."""

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def before(owner: Any, name: str) -> None:
        real = getattr(owner, name)
        setattr(owner, name, lambda *args, **options: (die(), real(*args, **options)))

    def after(owner: Any, name: str) -> None:
        real = getattr(owner, name)
        setattr(owner, name, lambda *args, **options: (real(*args, **options), die()))

    points = {
        "before the ticket": lambda: before(Share, "reserve"),
        "before it burns": lambda: before(Reservation, "burn"),
        "after it burnt": lambda: after(Reservation, "burn"),
        "before the memo": lambda: before(SQLiteMemo, "remember"),
        "after the memo": lambda: after(SQLiteMemo, "remember"),
        "before the commit": lambda: before(Reservation, "commit"),
        "after the commit": lambda: after(Reservation, "commit"),
        "before the turn ends": lambda: before(SQLiteMemo, "leave"),
    }
    points[where]()


@pytest.mark.parametrize(
    ("where", "charged", "source"),
    [
        ("before the ticket", 0, "release"),
        ("before it burns", 1, "release"),
        ("after it burnt", 1, "release"),
        ("before the memo", 1, "release"),
        ("after the memo", 1, "memo"),
        ("before the commit", 1, "memo"),
        ("after the commit", 1, "memo"),
        ("before the turn ends", 1, "memo"),
    ],
)
def test_a_kill_loses_at_most_the_ticket_and_no_answer_that_stands_is_paid_for_again(
    house: House, where: str, charged: int, source: str
) -> None:
    memo = SQLiteMemo(house.memo, turn_seconds=0.2)
    house.budget.close()

    def act(tell: Any) -> str:
        budget = house.opened()
        voter = house.voter(budget=budget, serving=Serving(memo=memo))
        killer(where)
        return str(voter.invoke("which?", who("acme")))

    child = Child(act)
    assert child.lines() == []  # killed before it could tell
    house.budget = house.opened()
    voter = house.voter(serving=Serving(memo=memo))
    assert used(voter) == charged
    assert voter.invoke("which?", who("acme")).receipt.source == source
    assert used(voter) == charged + (source == "release")


# -- at once -----------------------------------------------------------------------------------------------------------


def test_processes_that_ask_the_same_at_once_pay_once(house: House) -> None:
    house.budget.close()

    def action(tenant: str) -> Any:
        def act(start: Any) -> list[str]:
            with_budget = house.opened()
            voter = house.voter(budget=with_budget, llm=Engine(0.2), **DEAF)
            start()
            told = voter.invoke("which?", who(tenant))
            return [tenant, told.label, told.receipt.source]

        return act

    told = together([action("acme"), action("acme"), action("acme"), action("other")])
    house.budget = house.opened()
    mine = [answer for tenant, *answer in told if tenant == "acme"]
    assert len({label for label, _ in mine}) == 1
    assert sorted(source for _, source in mine) == ["memo", "memo", "release"]
    assert used(house.voter(**DEAF)) == 2


def test_a_process_that_takes_longer_than_its_turn_is_waited_for_no_longer(house: House) -> None:
    memo = Spy(house.memo, turn_seconds=0.2)
    voter = house.voter(serving=Serving(memo=memo))
    assert memo.claim(voter.memo._key("", ("which?",)), "somebody slow")
    assert voter.invoke("which?").receipt.source == "release"
    assert [name for name, _ in memo.seen].count("claim") >= 2  # its own were refused until the turn was over
    assert house.voter(serving=Serving(memo=memo)).invoke("which?").receipt.source == "memo"


def test_of_two_answers_that_were_paid_for_the_earlier_one_stays(house: House) -> None:
    first, late = house.voter(), house.voter()
    query = late.wording.query("which?")
    kept = first.invoke("which?").label  # of the sample, and so not always the same
    other = next(place for place, label in enumerate(LABELS) if label != kept)
    late.memo.keep(late.tenants.of({}), query, (other, None))  # took longer than its turn
    assert house.voter().invoke("which?").label == kept


async def test_tasks_and_threads_wait_without_holding_up_the_loop(house: House) -> None:
    begun, may_end = threading.Event(), threading.Event()

    class Held(Engine):
        def score_choices(self, prompts: Any, choices: Any) -> Any:
            if len(prompts) > 1:  # the private ones
                begun.set()
                assert may_end.wait(LONG)
            return super().score_choices(prompts, choices)

    slow, other = house.voter(llm=Held()), house.voter(llm=Held())  # two components as of two processes
    first = asyncio.create_task(asyncio.to_thread(slow.invoke, "which?"))
    await asyncio.to_thread(begun.wait, LONG)
    second = asyncio.create_task(other.ainvoke("which?"))
    for _ in range(5):
        await asyncio.sleep(0.01)  # a loop that is held up never comes back here
    may_end.set()
    told = [await second, await first]
    assert [answer.receipt.source for answer in told] == ["memo", "release"]
    assert used(other) == 1


async def test_blocking_below_a_running_loop_waits_for_nobody(house: House) -> None:
    """It would wait without end for another task of the same loop; it pays instead."""
    voter = house.voter(serving=Serving(memo=SQLiteMemo(house.memo, turn_seconds=LONG)))
    others = SQLiteMemo(house.memo, turn_seconds=LONG)
    assert others.claim(voter.memo._key("", ("which?",)), "somebody")
    assert voter.invoke("which?").receipt.source == "release"  # the turn of the others is not over yet


# -- free-form answers ---------------------------------------------------------------------------------------------------


@pytest.fixture
def writes(house: House) -> Callable[..., Any]:
    private = PrivateExamples([f"says: {text}" for text in ["ask the bank"] * 10], public_size=10, dataset_id="notes")
    PrivacyBudgetCallbackHandler.create(house.folder / "notes.db", epsilon=1e6, delta=1e-5).close()
    budget = PrivacyBudgetCallbackHandler.open(house.folder / "notes.db")

    def make(kind: Callable[..., Any], **options: Any) -> Any:
        given = {"private": private, "budget": budget, "component": "notes", "serving": house.serving()}
        return kind(**{**given, **options}).with_receipts()

    return make


def test_an_answer_in_free_form_is_told_again_with_what_it_rests_on(writes: Any) -> None:
    first, second = (writes(embedding).invoke("what now?") for _ in range(2))
    assert (first.answer, first.similarities) == (second.answer, second.similarities)
    assert (first.receipt.source, second.receipt.source) == ("release", "memo")


def test_keywords_and_the_answer_that_was_written_are_told_again(writes: Any) -> None:
    says = [PublicChat(says=["zero-shot", f"Answer {number}."]) for number in range(2)]
    first, second = (writes(keywords, answers=WORDS.replace(writer=llm)).invoke("what now?") for llm in says)
    assert (first.answer, first.keywords) == (second.answer, second.keywords)
    assert first.answer == "Answer 0."
    assert isinstance(second.keywords, tuple)
    assert (first.receipt.source, second.receipt.source) == ("release", "memo")


def test_keywords_whose_answer_could_not_be_written_are_owed_by_every_process(writes: Any) -> None:
    first = writes(keywords, answers=WORDS.replace(writer=PublicChat(says=["zero-shot"])))
    first._written = None  # the process dies here, after the release
    with pytest.raises(TypeError):
        first.invoke("what now?")
    second = writes(keywords, answers=WORDS.replace(writer=PublicChat(says=["Written later."])))
    told = second.invoke("what now?")
    assert (told.answer, told.receipt.source, used(second)) == ("Written later.", "memo", 1)
    assert (
        writes(keywords, answers=WORDS.replace(writer=PublicChat(says=["No."]))).invoke("what now?").answer
        == "Written later."
    )


class Slow(PublicChat):
    """Takes its time over all but its first answer."""

    delay: float = 0.0

    def _generate(self, *args: Any, **options: Any) -> Any:
        time.sleep(self.delay if self.turn[0] else 0.0)
        return super()._generate(*args, **options)


def test_an_answer_that_another_process_is_writing_is_waited_for(writes: Any) -> None:
    first = writes(keywords, answers=WORDS.replace(writer=Slow(says=["zero-shot", "Answer A."], delay=0.7)))
    says = Slow(says=["zero-shot", "Answer B."])
    second = writes(keywords, answers=WORDS.replace(writer=says))
    query = second.wording.query("what now?")
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(first.invoke, "what now?")
        while second.memo.recall(second.tenants.of({}), query) is None:  # released, and still to be written
            assert not writing.done() or writing.exception() is None
            time.sleep(0.01)
        told = second.invoke("what now?")
        assert (told.answer, writing.result().answer) == ("Answer A.", "Answer A.")
    assert says.asked == []
    assert used(second) == 1


def test_keywords_that_another_process_made_a_sentence_of_are_written_once(writes: Any) -> None:
    first = writes(
        keywords, answers=WORDS.replace(writer=PublicChat(says=["zero-shot", ModelCallError("out"), "Answer A."]))
    )
    with pytest.raises(ModelCallError):
        first.invoke("what now?")
    second = writes(keywords, answers=WORDS.replace(writer=PublicChat(says=["Answer B."])))
    assert [one.invoke("what now?").answer for one in (second, first, first)] == ["Answer B."] * 3


@pytest.mark.parametrize(
    "change", [{"keywords": ("police", "bank", "claim", "day", "rain")}, {"answer_prompt": "Say {keywords} to {input}"}]
)
def test_lists_and_prompts_that_no_report_shows_are_part_of_the_plan(writes: Any, change: dict[str, Any]) -> None:
    writes(keywords).invoke("what now?")
    try:
        other = writes(keywords, answers=WORDS.replace(**change))
    except Exception:
        other = writes(keywords, component="notes-2", answers=WORDS.replace(**change))
    assert other.invoke("what now?").receipt.source == "release"


@pytest.mark.parametrize("change", [{"model_name": "b"}, {"temperature": 0.5}], ids="-".join)
def test_another_model_that_writes_in_public_is_another_plan(writes: Any, change: dict[str, Any]) -> None:
    said = {"says": ["zero-shot", "From a."]}
    models = [Writer(**said), Writer(**said), Writer(says=["zero-shot", "From b."], **change)]
    told = [writes(keywords, answers=WORDS.replace(writer=model)).invoke("what now?") for model in models]
    assert [answer.receipt.source for answer in told] == ["release", "memo", "release"]
    assert [answer.answer for answer in told] == ["From a.", "From a.", "From b."]


def test_settings_that_are_bound_to_a_model_count_as_its_own(writes: Any) -> None:
    model = Writer(says=["zero-shot", "Said."])
    told = [
        writes(keywords, answers=WORDS.replace(writer=model.bind(temperature=warmth))).invoke("what now?")
        for warmth in (0.1, 0.2)
    ]
    assert [answer.receipt.source for answer in told] == ["release", "release"]


@pytest.mark.parametrize(
    "forged",
    [
        "[]",
        '{"answer": "x"}',
        '{"answer": null, "keywords": null, "similarities": null}',
        '{"answer": 3, "keywords": ["a"], "similarities": null}',
        '{"answer": "x", "keywords": "ab", "similarities": null}',
        '{"answer": "x", "keywords": null, "similarities": {"x": "y"}}',
        '{"answer": "x", "keywords": null, "similarities": [1]}',
    ],
    ids=range(7),
)
def test_an_entry_that_is_no_answer_in_free_form_is_told_as_broken(writes: Any, house: House, forged: str) -> None:
    component = writes(keywords)
    memo = SQLiteMemo(house.memo)
    memo.remember(component.memo._key("", ("what now?",)), forged)
    with pytest.raises(MemoError, match="malformed"):
        component.invoke("what now?")
    assert used(component) == 0


def test_other_candidates_are_another_plan(writes: Any) -> None:
    writes(embedding).invoke("what now?")
    changed = ("wait a day", "open a claim", "ask the bank", "ask nobody")
    assert (
        writes(embedding, answers=VECTORS.replace(candidates=changed)).invoke("what now?").receipt.source == "release"
    )


# -- what may be given ---------------------------------------------------------------------------------------------------


def test_a_memo_that_would_never_find_anything_is_refused(house: House, tmp_path: Path) -> None:
    in_memory = PrivacyBudgetCallbackHandler(epsilon=1e5, delta=1e-4)
    with pytest.raises(ConfigurationError, match="outlives the process"):
        house.voter(private=house.examples("others"), budget=in_memory, serving=Serving(memo=tmp_path / "other.db"))
    with pytest.raises(ConfigurationError, match="memo_size"):
        house.voter(serving=Serving(memo_size=0, memo=house.memo))
    with pytest.raises(ConfigurationError, match="component: expected a name"):
        house.voter(component=None)
    with pytest.raises(ConfigurationError, match="memo: expected"):
        house.voter(serving=Serving(memo=3))
    assert house.budget.remaining_epsilon == 1e5


def test_a_store_of_somebody_else_serves_as_a_memo(house: House) -> None:
    memo = StoreMemo(InMemoryByteStore())
    assert isinstance(memo, ReleaseMemo)
    assert [house.voter(serving=Serving(memo=memo)).invoke("which?").receipt.source for _ in range(2)] == [
        "release",
        "memo",
    ]


def test_an_unnamed_free_form_component_with_a_memo_is_refused(writes: Any) -> None:
    with pytest.raises(ConfigurationError, match="component: expected a name"):
        writes(embedding, component=None)


def test_copies_have_the_same_memo_and_nobody_may_choose_it_by_config(house: House) -> None:
    voter = house.voter()
    assert copy.deepcopy(voter).memo is voter.model_copy().memo is voter.memo
    with pytest.raises(ConfigurationError, match="memo"):
        voter.configurable_fields(memo=None)
    assert "which" not in repr(voter.memo)


# -- caps and shares distinguished ---------------------------------------------------------------------------------------------


def test_a_tenants_cap_and_a_spent_share_are_told_apart(house: House) -> None:
    voter = house.voter(max_queries=2, serving=Serving(memo=house.memo, tenant_max_queries=1))
    voter.invoke("a", who("acme"))
    with pytest.raises(TenantCapExceededError, match="Raise") as capped:
        voter.invoke("b", who("acme"))
    assert "Build another component" not in str(capped.value)
    with pytest.raises(TenantCapExceededError):  # by the ledger's count, in another process
        house.voter(max_queries=2, serving=Serving(memo=house.memo, tenant_max_queries=1)).invoke("b", who("acme"))
    voter.invoke("a", who("other"))
    with pytest.raises(PrivacyBudgetExceededError, match="Build another component") as spent:
        voter.invoke("a", who("third"))
    assert not isinstance(spent.value, TenantCapExceededError)
