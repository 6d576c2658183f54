"""Jobs that are done elsewhere: handed out once, again when a worker is gone, and paid for by tickets of their own."""

from __future__ import annotations

import asyncio
import json
import pickle
import sqlite3
import threading
import time
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
from langchain_core.stores import InMemoryByteStore

from langchain_dpicl import Decoding, PromptPATELabeler, Rows
from langchain_dpicl.backends.rows.neighbour_rows import LocalEmbeddings
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.distributed import MOST_DEATHS, JobResult, Worker, WorkerFactory, Workplace
from langchain_dpicl.evolution import PrivateEvolution, PublicTextJob
from langchain_dpicl.exceptions import (
    ConfigurationError,
    LedgerError,
    MemoError,
    ModelCallError,
    PrivacyBudgetError,
    PrivacyBudgetExceededError,
    PrivacyBudgetMismatchError,
    PrivateAccessError,
    RunInterruptedError,
)
from langchain_dpicl.options import Evolution, FewShotTask, GenerationTask, Noise
from langchain_dpicl.planning import share_plan
from langchain_dpicl.privacy.ledger.shares import Reservation, Share
from langchain_dpicl.privacy.ledger.state import COMMIT, RESERVE
from langchain_dpicl.privacy.private_examples import PrivateExamples
from langchain_dpicl.prompts import DPFewShotPromptTemplate
from langchain_dpicl.stores import SQLiteMemo, StoreMemo
from tests.canary import RECORD
from tests.contracts.release_run import entries_in
from tests.crews import Crew, House
from tests.ray_places import engine, records, talker


class Clock:
    """Stands for `time`: every look at it takes some seconds, and nobody sleeps."""

    def __init__(self, *, step: float = 0.0) -> None:
        self.now, self.step = 0.0, step

    def monotonic(self) -> float:
        self.now += self.step
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


def lines(house: House, kind: str) -> int:
    """How many tickets the ledger's lines of one kind are about."""
    budget = house.budget()
    return sum(record.body["count"] for record in budget._store.records(0) if record.kind == kind)


def repriced() -> Any:
    """Plans are priced as by a later accountant, whose bound is smaller."""
    return patch.object(share_plan, "_finite_epsilon", lambda bound, **_: bound - 1e-6)


class TestDemonstrations:
    def test_are_as_many_and_cost_as_much_as_in_one_process(self, house: House) -> None:
        here = house.synthesizer(None, component="here").run(progress=False)
        crew = house.crew(num_workers=3)
        there = house.synthesizer(crew).run(progress=False)
        assert Counter(one["queue"] for one in there.examples) == Counter(one["queue"] for one in here.examples)
        assert there.epsilon == here.epsilon
        assert {**there.plan} == {**here.plan}
        assert (crew.hired, len(crew.jobs)) == (3, 6)

    def test_leave_no_ticket_reserved_that_is_not_committed(self, house: House) -> None:
        house.synthesizer(house.crew()).run(progress=False)
        assert house.budget().dangling() == ()
        assert 6 <= lines(house, RESERVE) == lines(house, COMMIT) <= 18

    def test_are_found_again_and_not_paid_for_again(self, house: House) -> None:
        first = house.synthesizer(house.crew()).run(progress=False)
        spent = lines(house, RESERVE)
        again = house.synthesizer(house.crew()).run(progress=False)
        assert again.examples == first.examples
        assert lines(house, RESERVE) == spent

    def test_are_found_by_a_plan_that_a_later_accountant_prices_otherwise(self, house: House) -> None:
        noise = Noise("gaussian", multiplier=4.0)
        made = house.synthesizer(house.crew(), noise=noise)
        first = made.run(progress=False)
        spent = lines(house, RESERVE)
        with repriced():
            later = house.synthesizer(house.crew(), noise=noise)
            assert later.plan.epsilon < made.plan.epsilon
            assert later.run(progress=False).examples == first.examples
        assert lines(house, RESERVE) == spent

    def test_that_say_nothing_are_left_out_of_the_checkpoint_too(self, house: House) -> None:
        silent = Decoding(candidates=3, stop=(" paid", " late", " twice"))
        for _ in range(2):
            made = house.synthesizer(house.crew(), decoding=silent, checkpoint=house.memo.parent / "kept.jsonl")
            with pytest.raises(PrivacyBudgetExceededError, match="requested 6 demonstrations"):
                made.run(progress=False)

    def test_are_streamed_as_they_come(self, house: House) -> None:
        made = house.synthesizer(house.crew())
        seen = list(made.stream(progress=False))
        assert sorted(map(str, seen)) == sorted(map(str, made.demonstrations))
        assert made.is_finished

    async def test_can_be_awaited(self, house: House) -> None:
        made = house.synthesizer(house.crew())
        seen = [one async for one in made.astream(progress=False)]
        assert len(seen) == len((await made.arun(progress=False)).examples) == 6

    async def test_a_cancelled_run_goes_on_later_and_pays_nothing_twice(self, house: House) -> None:
        crew = house.crew()
        made = house.synthesizer(crew)
        stream = made.astream(progress=False)
        await anext(stream)
        await stream.aclose()
        await asyncio.to_thread(made.run, progress=False)
        assert made.is_finished
        assert len(crew.jobs) == len(set(crew.jobs)) == 6
        assert house.budget().dangling() == ()

    def test_carry_no_record_to_or_from_a_worker(self, house: House) -> None:
        made = house.synthesizer(house.crew())
        told = pickle.dumps([made._elsewhere.work, *map(made._job, made._items)])
        assert RECORD.encode() not in told


class TestAnExecutorUsedAgain:
    """Each worker does what the run at hand was planned as, whatever it had begun before."""

    def begun(self, made: Any, crew: Crew) -> None:
        """Has a worker begin an order, and stops before anything is reserved."""
        with patch.object(crew, "_do", lambda *given: crew._ask(lambda: JobResult("fault", error="ModelCallError"))):
            list(crew.spread(made._elsewhere.work, [made._job(made._items[0])]))

    def noise(self, made: Any) -> Any:
        return made.plan.release.mechanism

    def test_takes_the_noise_of_a_share_that_was_declared_anew(self, house: House) -> None:
        crew = house.crew(num_workers=1)
        self.begun(house.synthesizer(crew, epsilon=4.0), crew)
        later = house.synthesizer(crew, epsilon=2.0)
        assert later.run(progress=False).epsilon == 2.0
        first, second = crew._hands[0].handle._works.values()
        assert self.noise(later) == second.blocks.plan.release.mechanism != first.blocks.plan.release.mechanism

    def test_takes_the_instruction_of_the_report(self, house: House) -> None:
        crew = house.crew(num_workers=1)
        self.begun(house.synthesizer(crew, instruction="One."), crew)
        told = house.synthesizer(crew, instruction="Two.").run(progress=False).plan["instruction"]
        assert (
            told
            == [one.blocks.script.wording.instruction for one in crew._hands[0].handle._works.values()][-1]
            == "Two."
        )

    def test_takes_the_wording_of_labels(self, house: House) -> None:
        crew = house.crew(num_workers=1)
        self.begun(house.labeler(crew, ["one"], max_queries=2, task=FewShotTask(prefix="First.")), crew)
        house.labeler(crew, ["two"], max_queries=2, task=FewShotTask(prefix="Second.")).run(progress=False)
        told = [one.__self__._public["prefix"] for one in crew._hands[0].handle._works.values()]
        assert told == ["First.", "Second."]

    def test_has_keys_that_outlive_pickling_and_tell_orders_apart(self, house: House) -> None:
        changes: list[dict[str, Any]] = [
            {},
            {"instruction": "x"},
            {"epsilon": 3.0},
            {"max_tokens": 2},
            {"decoding": Decoding(stop=(".",))},
        ]
        works = [house.synthesizer(house.crew(), **one)._elsewhere.work for one in changes]
        works += [
            house.labeler(house.crew(), ["a"], **one)._elsewhere.work for one in ({}, {"task": FewShotTask(prefix="x")})
        ]
        assert len({work.key for work in works}) == len(works)
        assert [pickle.loads(pickle.dumps(work)).key for work in works] == [work.key for work in works]  # noqa: S301

    def test_is_refused_an_order_under_the_key_of_another(self) -> None:
        worker = Worker(WorkerFactory("tests.ray_places:writer", {}), is_one_host=True)
        work = PublicTextJob("FakeBackend", 3, ())
        assert worker.begin(work).kind == worker.begin(PublicTextJob("FakeBackend", 3, ())).kind == "done"
        with patch.object(PublicTextJob, "key", work.key):
            answer = worker.begin(PublicTextJob("FakeBackend", 4, ()))
        assert (answer.kind, answer.error) == ("fault", "ConfigurationError")


class TestAWorkerThatDies:
    def test_before_it_spent_costs_nothing(self, house: House) -> None:
        crew = house.crew(dies=lambda number, job: number == 2)
        made = house.synthesizer(crew)
        made.run(progress=False)
        assert made.is_finished
        assert crew.hired == 3
        assert Counter(crew.jobs).most_common(1)[0][1] == 2
        assert crew.jobs[-1] == crew.jobs[1]  # behind all others
        assert house.budget().dangling() == ()

    def test_behind_its_commit_has_lost_and_doubled_nothing(self, house: House) -> None:
        crew = house.crew(dies=lambda number, job: "after" if number in {1, 4} else False)
        made = house.synthesizer(crew, rows=Rows(units=4, redraw_every=3))
        made.run(progress=False)
        assert made.is_finished
        assert lines(house, RESERVE) == lines(house, COMMIT) == 6

    def test_at_one_job_again_and_again_stops_the_run_and_keeps_what_came(self, house: House) -> None:
        bad = ("card", 1)
        made = house.synthesizer(house.crew(dies=lambda number, job: job == bad))
        with pytest.raises(RunInterruptedError, match=f"{MOST_DEATHS} workers died") as stop:
            made.run(progress=False)
        assert stop.value.run is made
        assert len(made.demonstrations) == 5

    def test_as_it_starts_again_and_again_stops_the_run(self, house: House) -> None:
        crew = house.crew(num_workers=1)
        crew._begin = lambda handle, work: crew._ask(lambda: None)
        with pytest.raises(RunInterruptedError, match="died as they started"):
            house.synthesizer(crew).run(progress=False)
        assert crew.hired == MOST_DEATHS

    def test_late_in_a_run_is_replaced_and_what_replaces_it_gets_its_own_time_to_start(self, house: House) -> None:
        clock = Clock()

        def dies(number: int, job: Any) -> bool:
            clock.now += 2000.0 * (number == 4)
            return number == 4

        crew = house.crew(num_workers=1, dies=dies)
        ready = crew._ready
        looks: list[int] = []

        def slow(awaited: Any, seconds: float) -> Any:
            looks.append(1)
            return ready(awaited, seconds) if len(looks) % 2 else ()

        made = house.synthesizer(crew)
        with patch("langchain_dpicl.distributed.time", clock), patch.object(crew, "_ready", slow):
            made.run(progress=False)
        assert made.is_finished
        assert crew.hired == 2

    def test_late_in_a_run_whose_replacement_never_begins_stops_it_after_the_time_to_start(self, house: House) -> None:
        """In simulated seconds alone: neither a busy machine nor how long ago it was started may count."""
        clock, died, look = Clock(), 2000.0, 10.0

        def dies(number: int, job: Any) -> bool:
            clock.now += died * (number == 4)
            return number == 4

        crew = house.crew(num_workers=1, dies=dies)
        ready = crew._ready

        def never(awaited: Any, seconds: float) -> Any:
            if crew.hired == 1:
                return ready(awaited, seconds)
            clock.now += look
            return ()

        with (
            patch("langchain_dpicl.distributed.time", clock),
            patch.object(crew, "_ready", never),
            pytest.raises(RunInterruptedError, match="no worker has begun"),
        ):
            house.synthesizer(crew).run(progress=False)
        assert died + crew.start_timeout < clock.now <= died + crew.start_timeout + look
        assert crew.hired == crew.dismissed + 1 == 2

    def test_that_never_comes_leaves_nothing_behind_that_stops_the_next_run(self, house: House) -> None:
        crew = house.crew()
        with (
            patch.object(crew, "_ready", lambda awaited, seconds: ()),
            patch("langchain_dpicl.distributed.time", Clock(step=500)),
            pytest.raises(RunInterruptedError, match="no worker has begun"),
        ):
            house.synthesizer(crew).run(progress=False)
        assert crew._flights == {}
        assert crew.dismissed == crew.hired == 2
        assert len(house.synthesizer(crew).run(progress=False).examples) == 6

    def test_while_it_begins_for_a_run_that_was_left_says_nothing_of_the_next(self, house: House) -> None:
        crew = house.crew(num_workers=2)
        begun: list[int] = []
        fault = JobResult("fault", error="LedgerError", message="not now")
        begin = crew._begin

        def late(handle: Any, work: Any) -> int:
            begun.append(1)
            return crew._ask(lambda: fault) if len(begun) <= 2 else begin(handle, work)

        crew._begin = late
        made = house.synthesizer(crew)
        with pytest.raises(LedgerError, match="not now"):
            made.run(progress=False)
        assert len(made.run(progress=False).examples) == 6
        assert crew.hired == 4

    def test_as_it_starts_now_and_then_does_not_stop_the_run(self, house: House) -> None:
        begun: list[int] = []
        crew = house.crew(num_workers=1, dies=lambda number, job: number % 2 == 1 and number < 12)
        begin = crew._begin

        def often(handle: Any, work: Any) -> int:
            begun.append(1)
            return crew._ask(lambda: None) if len(begun) % 2 else begin(handle, work)

        crew._begin = often
        made = house.synthesizer(crew)
        made.run(progress=False)
        assert made.is_finished
        assert len(begun) > 2 * MOST_DEATHS

    def test_that_never_comes_stops_the_run_in_the_end(self, house: House) -> None:
        crew = house.crew()
        crew.start_timeout = 0.3
        crew._ready = lambda awaited, seconds: ()
        with pytest.raises(RunInterruptedError, match=r"no worker has begun within 0\.3 s"):
            house.synthesizer(crew).run(progress=False)


class TestABurntTicket:
    def test_stays_burnt_and_what_it_was_for_is_told_as_missing(self, house: House) -> None:
        # Somebody else burns one ticket of the share and is gone, as a worker that is killed within a block.
        made = house.synthesizer(house.crew(), rows=Rows(units=4, redraw_every=3))
        template = made.plan.tickets()[0].template
        made.share.reserve(template, label="card").burn()
        with pytest.raises(PrivacyBudgetExceededError, match="requested 1 more, remaining 0") as refusal:
            made.run(progress=False)
        assert refusal.value.run is made
        assert Counter(one["queue"] for one in made.demonstrations) == {"card": 2, "cash": 3}
        assert lines(house, RESERVE) == 6
        assert lines(house, COMMIT) == 5
        with pytest.raises(PrivacyBudgetExceededError):
            house.synthesizer(house.crew(), rows=Rows(units=4, redraw_every=3)).run(progress=False)
        assert lines(house, RESERVE) == 6  # nothing more was granted

    def test_of_several_jobs_are_told_together(self, house: House) -> None:
        made = house.synthesizer(house.crew(), rows=Rows(units=4, redraw_every=3))
        made.share.reserve(made.plan.tickets()[0].template, label="card", count=3).burn(3)
        with pytest.raises(PrivacyBudgetExceededError, match="requested 3 more, remaining 0"):
            made.run(progress=False)
        assert Counter(one["queue"] for one in made.demonstrations) == {"cash": 3}

    def test_of_a_text_with_one_ticket_a_token_costs_one_token(self, house: House) -> None:
        made = house.synthesizer(house.crew(), rows=Rows(units=4, redraw_every=1))
        made.share.reserve(made.plan.tickets()[0].template, label="card").burn()
        assert len(made.run(progress=False).examples) == 6
        assert sum(one.count for one in house.budget().dangling()) == 1

    def test_a_draft_left_behind_is_gone_on_with(self, house: House) -> None:
        stop = house.memo.parent / "stop"
        made = house.synthesizer(
            house.crew(num_workers=1, options={"stop_file": str(stop)}), rows=Rows(units=4, redraw_every=1)
        )
        stop.touch()
        with pytest.raises(RunInterruptedError):
            made.run(progress=False)
        stop.unlink()
        spent = lines(house, RESERVE)
        assert spent == 1  # one token was released, and then the public model was out
        crew = house.crew(num_workers=1)
        assert len(house.synthesizer(crew, rows=Rows(units=4, redraw_every=1)).run(progress=False).examples) == 6
        assert lines(house, RESERVE) <= 18
        assert house.budget().dangling() == ()


class TestATurn:
    """Two live workers at one job: one of them pays, and the other waits."""

    def asker(self, house: House, work: Any) -> tuple[Workplace, Any]:
        """Returns a place whose turns are long, and what does a job of a work in it."""
        place = house.setup().place()
        place._is_one_host = True
        place.memo._turn = 60.0
        return place, work.begin(place)

    @pytest.mark.parametrize("kind", ["demo", "label"])
    def test_is_kept_by_a_worker_that_is_slower_than_it(self, house: House, kind: str) -> None:
        made = self.run_of(house, kind)
        place, ask = self.asker(house, made._elsewhere.work)
        _, other = self.asker(house, made._elsewhere.work)
        found: list[Any] = []
        clock = Clock()
        claim = place.memo.claim

        def renewed(key: Any, holder: str) -> bool:
            found.append(claim(key, holder))
            if len(found) > 1:
                clock.now += 30.0  # half a turn for every block
                assert other(self.job(made)).kind == "busy"
            return found[-1]

        place.memo.claim = renewed
        with patch("langchain_dpicl.distributed.time", clock):
            clock.step = 20.0
            assert ask(self.job(made)).kind == "done"
        assert len(found) > 1
        assert all(found)

    @pytest.mark.parametrize("kind", ["demo", "label"])
    def test_that_went_to_another_worker_is_noticed_before_anything_is_paid(self, house: House, kind: str) -> None:
        made = self.run_of(house, kind)
        place, ask = self.asker(house, made._elsewhere.work)
        _, other = self.asker(house, made._elsewhere.work)
        told: list[JobResult] = []
        claim = place.memo.claim

        def late(key: Any, holder: str) -> bool:
            if not told:
                told.append(JobResult("busy"))
                assert claim(key, holder)
                place.memo.leave(key, holder)  # as a turn that is over
                told[0] = other(self.job(made))
                return True
            return claim(key, holder)

        place.memo.claim = late
        clock = Clock(step=20.0)
        before, recall = iter([None, None]), place.memo.recall  # as before the other had kept anything
        late_look = patch.object(place.memo, "recall", lambda key: next(before, recall(key)))
        with patch("langchain_dpicl.distributed.time", clock), late_look:
            answer = ask(self.job(made))
        spent = lines(house, RESERVE)
        assert (told[0].kind, told[0].tickets) == ("done", spent)
        assert (answer.kind, answer.tickets, answer.result) == ("busy", 0, 60.0)
        again = ask(self.job(made))
        assert (again.kind, again.result, again.tickets) == ("done", told[0].result, 0)
        assert lines(house, RESERVE) == spent

    @pytest.mark.parametrize("kind", ["demo", "label"])
    def test_that_cannot_be_left_loses_neither_the_text_nor_its_cost(self, house: House, kind: str) -> None:
        made = self.run_of(house, kind)
        place, ask = self.asker(house, made._elsewhere.work)
        with patch.object(place.memo, "leave", side_effect=MemoError("held")):
            answer = ask(self.job(made))
        assert (answer.kind, answer.tickets) == ("done", lines(house, RESERVE))
        assert answer.tickets > 0

    @pytest.mark.parametrize("kind", ["demo", "label"])
    def test_is_left_when_the_job_is_done(self, house: House, kind: str) -> None:
        made = self.run_of(house, kind)
        made.run(progress=False)
        with closing(sqlite3.connect(house.memo)) as memo:
            assert memo.execute("SELECT count(*) FROM turns").fetchone() == (0,)

    @pytest.mark.parametrize("kind", ["demo", "label"])
    def test_that_ends_in_a_fault_says_what_was_paid(self, house: House, kind: str) -> None:
        made = self.run_of(house, kind)
        place, ask = self.asker(house, made._elsewhere.work)
        with patch.object(place.memo, "remember", side_effect=MemoError("no space")):
            answer = ask(self.job(made))
        assert (answer.kind, answer.error, answer.tickets) == ("fault", "MemoError", 1)
        assert lines(house, RESERVE) == 1

    def test_of_another_run_is_waited_for_and_then_told(self, house: House) -> None:
        made = self.run_of(house, "label")
        crew = made._elsewhere.executor
        answers = iter([JobResult("busy", 100.0, tickets=1), JobResult("busy", 100.0), JobResult("busy", 100.0)])
        clock = Clock()

        def do(handle: Any, key: str, job: Any) -> int:
            clock.now += 150.0
            return crew._ask(lambda: next(answers))

        with patch.object(crew, "_do", do), patch("langchain_dpicl.distributed.time", clock):
            found = [one for one in crew.spread(made._elsewhere.work, [self.job(made)]) if one is not None]
        assert [(one.kind, one.error, one.tickets) for _, one in found] == [("fault", "ConfigurationError", 1)]
        assert list(answers) == []

    def run_of(self, house: House, kind: str) -> Any:
        crew = house.crew(num_workers=1)
        if kind == "demo":
            return house.synthesizer(crew, rows=Rows(units=4, redraw_every=1))
        return house.labeler(crew, ["one"], max_queries=2)

    def job(self, made: Any) -> Any:
        return (("text", "one"),) if isinstance(made, PromptPATELabeler) else ("card", 0)


class TestWhatIsReleased:
    def test_stands_in_the_memo_before_its_ticket_is_committed(
        self, house: House, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kept: list[int] = []
        commit = Reservation.commit

        def counted(ticket: Reservation, count: int = 1) -> None:
            with closing(sqlite3.connect(house.memo)) as memo:
                told = [json.loads(one) for (one,) in memo.execute("SELECT told FROM answers")]
            blocks = [number for one in told for _, _, number in one.get("spent", [])]
            kept.append(sum(blocks) + sum("status" in one for one in told))
            commit(ticket, count)

        monkeypatch.setattr(Reservation, "commit", counted)
        house.synthesizer(house.crew(), rows=Rows(units=4, redraw_every=1)).run(progress=False)
        before = len(kept)
        assert kept == list(range(1, before + 1))
        house.labeler(house.crew(), ("one", "two")).run(progress=False)
        assert kept == list(range(1, before + 3))

    def test_is_not_taken_from_somebody_who_goes_on_with_it(self, house: House) -> None:
        made = house.synthesizer(house.crew(), rows=Rows(units=4, redraw_every=1))
        place = house.setup().place()
        place._is_one_host = True
        remember = place.memo.remember
        place.memo.remember = lambda key, told, **how: remember(key, "another's", **how)
        answer = made._elsewhere.work.begin(place)(("card", 0))
        assert (answer.kind, answer.tickets) == ("busy", 1)


class TestALedgerOrMemo:
    def test_in_memory_is_refused_before_anything_is_declared(self, house: House) -> None:
        budget = Budget(epsilon=4.0, delta=1e-3)
        with pytest.raises(LedgerError, match="all workers reach"):
            house.synthesizer(house.crew(), budget=budget)
        assert budget.remaining_epsilon == 4.0

    def test_in_a_file_is_refused_where_workers_may_be_on_other_hosts(self, house: House) -> None:
        with pytest.raises(LedgerError, match="found SQLiteStore"):
            house.synthesizer(house.crew(is_one_host=False))

    def test_of_a_worker_that_is_another_is_refused(self, house: House, tmp_path: Path) -> None:
        (tmp_path / "other").mkdir()
        other = House(tmp_path / "other")
        made = house.synthesizer(Crew(other.setup()))
        with pytest.raises(PrivacyBudgetMismatchError, match="expected ledger"):
            made.run(progress=False)
        assert lines(other, RESERVE) == lines(house, RESERVE) == 0

    @pytest.mark.parametrize("missing", ["private", "budget", "memo"])
    def test_that_is_missing_is_refused(self, house: House, missing: str) -> None:
        given = {"private": records(), "budget": house.budget(), "memo": SQLiteMemo(house.memo)}
        place = Workplace(engine(), **{**given, missing: None})
        with pytest.raises(ConfigurationError, match="private, budget and memo"):
            place.paid(ledger_id="x", num_jobs=1)

    def test_that_may_be_each_workers_own_is_refused(self, house: House) -> None:
        memo = StoreMemo(InMemoryByteStore(), durable=True)
        memo.size = 9  # type: ignore[attr-defined]
        place = Workplace(engine(), private=records(), budget=house.budget(), memo=memo)
        place._is_one_host = True
        with pytest.raises(LedgerError, match="memo: expected one that all workers reach"):
            place.paid(ledger_id=house.budget().ledger_id, num_jobs=1)

    def test_that_forgets_what_the_run_released_is_refused(self, house: House) -> None:
        place = Workplace(engine(), private=records(), budget=house.budget(), memo=SQLiteMemo(house.memo, size=2))
        place._is_one_host = True
        with pytest.raises(ConfigurationError, match="room for 3 answers"):
            place.paid(ledger_id=house.budget().ledger_id, num_jobs=3)


class TestWhatAWorkerHas:
    def test_has_to_be_the_model_of_the_plan(self, house: House) -> None:
        with pytest.raises(ConfigurationError, match="differences in"):
            house.synthesizer(house.crew(options={"name": "other"})).run(progress=False)
        assert lines(house, RESERVE) == 0

    def test_has_to_be_the_model_of_the_plan_for_labels_too(self, house: House) -> None:
        with pytest.raises(ConfigurationError, match=r"differences in \['model'\]"):
            house.labeler(house.crew(options={"name": "other"}), ["one"]).run(progress=False)
        assert lines(house, RESERVE) == 0

    def test_has_to_be_declared_as_the_ledger_knows_it(self, house: House) -> None:
        with pytest.raises(PrivacyBudgetError, match="dataset_id"):
            house.synthesizer(house.crew(options={"public_size": 9})).run(progress=False)
        assert lines(house, RESERVE) == 0

    @pytest.mark.parametrize("function", ["broken", "nothing", "absent"])
    def test_is_told_by_the_kind_of_what_its_function_raised(self, house: House, function: str) -> None:
        with pytest.raises(ConfigurationError, match="to return a Workplace") as refusal:
            house.synthesizer(Crew(WorkerFactory(f"tests.ray_places:{function}", {}))).run(progress=False)
        assert RECORD not in str(refusal.value)

    def test_has_to_be_the_package_of_the_driver(self, house: House, monkeypatch: pytest.MonkeyPatch) -> None:
        setup = house.setup()
        other, older = replace(setup, name="tests.ray_places:broken", version="0.0.1"), object.__new__(WorkerFactory)
        older.__setstate__(["tests.ray_places:broken", {}])  # it sends no version; its function is not called either
        monkeypatch.setattr("langchain_dpicl.distributed._own_version", lambda: "0.0.2")
        for sent, said in ((other, "0.0.1"), (older, "an older one")):
            crew = Crew(sent)
            with pytest.raises(ConfigurationError, match=rf"the driver's langchain-dpicl, {said}, found 0\.0\.2"):
                house.labeler(crew, ["one"]).run(progress=False)
            assert (lines(house, RESERVE), crew.jobs, crew.dismissed) == (0, [], crew.hired)
        house.labeler(Crew(replace(setup, version="unknown")), ["one"]).run(progress=False)  # not installed there

    @pytest.mark.parametrize("found", ["0.0.1", None])  # workers from before both looks say nothing of it
    def test_has_to_be_the_package_of_the_driver_also_where_the_worker_does_not_look(
        self, house: House, monkeypatch: pytest.MonkeyPatch, found: str | None
    ) -> None:
        crew = Crew(replace(house.setup(), version="0.0.2"))
        monkeypatch.setattr("langchain_dpicl.distributed._own_version", lambda: "0.0.2")
        there, begin = [found], Worker.begin

        def begun(worker: Worker, work: Any) -> JobResult:
            return replace(begin(worker, work), result=there[0])

        monkeypatch.setattr(Worker, "begin", begun)
        said = rf"the driver's langchain-dpicl, 0\.0\.2, found {found or 'an older one'}"
        with pytest.raises(ConfigurationError, match=said):
            house.labeler(crew, ["one"]).run(progress=False)
        assert (lines(house, RESERVE), crew.jobs, crew.dismissed) == (0, [], crew.hired)
        there[0] = "unknown"  # not installed there
        house.labeler(crew, ["one"]).run(progress=False)

    def test_says_which_package_it_has(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("langchain_dpicl.distributed._own_version", lambda: "0.0.3")
        worker = Worker(WorkerFactory("tests.ray_places:writer", {}, version="0.0.3"), is_one_host=True)
        assert worker.begin(PublicTextJob("FakeBackend", 3, ())) == JobResult("done", "0.0.3")

    def test_is_told_in_our_words_where_they_are_ours(self, house: House) -> None:
        with pytest.raises(LedgerError, match="missing"):
            house.synthesizer(Crew(WorkerFactory("tests.ray_places:place", {"ledger": "missing.db", "memo": "x"}))).run(
                progress=False
            )

    def test_says_nothing_of_what_is_raised_beside_our_errors(self) -> None:
        worker = Worker(WorkerFactory("tests.ray_places:writer", {}), is_one_host=True)
        worker._works["x"] = lambda job: engine().complete(RECORD, None, 3)
        assert worker.do("x", None) == JobResult("fault", error="TypeError")
        assert str(worker.do("y", None).as_error()) == "a worker's call failed (KeyError)"

    def test_is_never_pickled_and_shows_nothing(self) -> None:
        place = Workplace(engine(), private=records())
        assert RECORD not in repr(place)
        with pytest.raises(PrivateAccessError, match="cannot be pickled"):
            pickle.dumps(place)


class TestAnswers:
    @pytest.mark.parametrize(
        "error",
        [
            ConfigurationError("of a parameter"),
            LedgerError("of a ledger"),
            ModelCallError("of a call"),
            PrivacyBudgetExceededError("too much", requested=2, remaining=1),
        ],
    )
    def test_bring_our_errors_home_as_they_are(self, error: Any) -> None:
        found = JobResult.of_fault(error).as_error()
        assert type(found) is type(error)
        assert str(found) == str(error)
        assert getattr(found, "requested", None) == getattr(error, "requested", None)

    def test_bring_of_other_errors_the_kind_alone(self) -> None:
        assert str(JobResult.of_fault(ValueError(RECORD)).as_error()) == "a worker's call failed (ValueError)"


class TestHandingOut:
    def test_one_run_at_a_time(self, house: House) -> None:
        crew = house.crew()
        made = house.synthesizer(crew)
        first = made.stream(progress=False)
        next(first)
        other = house.synthesizer(crew, component="other")
        with pytest.raises(ConfigurationError, match="one run at a time"):
            other.run(progress=False)
        first.close()
        assert len(other.run(progress=False).examples) == 6

    def test_a_run_ends_where_its_executor_is_closed_beside_it(self, house: House) -> None:
        crew = house.crew()
        made = house.synthesizer(crew)
        stream = made.stream(progress=False)
        next(stream)
        crew.close()
        hired = crew.hired
        with pytest.raises(RunInterruptedError, match="closed while this run went on"):
            list(stream)
        assert crew.hired == hired
        assert len(made.run(progress=False).examples) == 6

    def test_what_another_run_has_the_turn_of_is_waited_for(self, house: House) -> None:
        made = house.synthesizer(house.crew())
        place = house.setup().place()
        place._is_one_host = True
        writer = made._elsewhere.work.begin(place)
        turns = []
        claim = place.memo.claim

        def held_once(key: Any, holder: str) -> bool:
            turns.append(key)
            return len(turns) > 1 and claim(key, holder)

        place.memo.claim = held_once
        assert writer(("card", 0)).kind == "busy"
        assert writer(("card", 0)).kind == "done"

    def test_disjoint_batches_stay_in_one_process(self, house: House) -> None:
        with pytest.raises(ConfigurationError, match="share one secret partition"):
            house.synthesizer(house.crew(), rows=Rows(slots=2, sampling="disjoint"), shots_per_label=2)

    @pytest.mark.parametrize("executor", ["dask", 3, object()])
    def test_other_executors_are_refused(self, house: House, executor: Any) -> None:
        with pytest.raises(ConfigurationError, match="executor: expected 'ray'"):
            house.synthesizer(executor)


class TestLabels:
    INPUTS = ("one", "two", "three", "four")

    def test_are_released_by_workers_and_found_again(self, house: House) -> None:
        pool = house.labeler(house.crew(), self.INPUTS).run(progress=False)
        assert {entry.status for entry in pool.entries} <= {"labelled", "rejected"}
        assert lines(house, RESERVE) == lines(house, COMMIT) == 4
        again = house.labeler(house.crew(), self.INPUTS).run(progress=False)
        assert [one.to_dict() for one in again.entries] == [one.to_dict() for one in pool.entries]
        assert lines(house, RESERVE) == 4

    def test_are_found_by_a_plan_that_a_later_accountant_prices_otherwise(self, house: House) -> None:
        noise = Noise("gaussian", multiplier=2.0)
        made = house.labeler(house.crew(), self.INPUTS, noise=noise)
        pool = made.run(progress=False)
        with repriced():
            later = house.labeler(house.crew(), self.INPUTS, noise=noise)
            assert later.plan.epsilon < made.plan.epsilon
            assert later.run(progress=False).entries == pool.entries
        assert lines(house, RESERVE) == 4

    async def test_can_be_awaited(self, house: House) -> None:
        made = house.labeler(house.crew(), self.INPUTS)
        assert len([one async for one in made.astream(progress=False)]) == 4

    @pytest.mark.parametrize("way", ["label", "alabel"])
    async def test_asked_for_one_by_one_come_from_workers_too_and_are_paid_for_once(
        self, house: House, way: str
    ) -> None:
        crew = house.crew()
        made = house.labeler(crew, self.INPUTS[:2], max_queries=2)
        entry = await made.alabel("one") if way == "alabel" else await asyncio.to_thread(made.label, "one")
        assert crew.jobs == [(("text", "one"),)]
        assert made.result.entries[0] == entry
        later = house.labeler(house.crew(), self.INPUTS[:2], max_queries=2)
        assert later.run(progress=False).entries[0] == entry
        assert lines(house, RESERVE) == lines(house, COMMIT) == 2
        with pytest.raises(PrivacyBudgetExceededError, match="remaining 0"):
            later.label("three")

    @pytest.mark.parametrize("inner", ["label", "alabel"])
    @pytest.mark.parametrize("way", ["label", "alabel"])
    def test_asked_for_inside_another_call_are_refused(self, house: House, way: str, inner: str) -> None:
        crew, refused = house.crew(), list[str]()
        made, do = house.labeler(crew, ["one", "two"]), crew._do

        def asks(way: str, text: str) -> None:
            made.label(text) if way == "label" else asyncio.run(made.alabel(text))

        def within(handle: Any, key: str, job: Any) -> int:  # as an executor or a handler of yours might
            try:
                asks(inner, "two")
            except ConfigurationError as refusal:
                refused.append(str(refusal))
            return do(handle, key, job)

        crew._do = within
        asking = threading.Thread(target=asks, args=(way, "one"), daemon=True)
        asking.start()
        asking.join(20.0)
        if asking.is_alive():
            made._gates.here.__exit__(None, None, None)
            asking.join()
        assert ["no call inside another" in said for said in refused] == [True]

    def test_asked_for_in_an_event_loop_that_is_left_take_the_turn_from_nobody_later(self, house: House) -> None:
        crew, begun, go, ended = house.crew(), threading.Event(), threading.Event(), threading.Event()
        made, do = house.labeler(crew, ["one"]), crew._do
        hand_out = made._hand_out

        def waits(*given: Any) -> int:
            begun.set()
            go.wait(20.0)
            return do(*given)

        def hands_out(*given: Any) -> None:
            hand_out(*given)
            ended.set()

        crew._do, made._hand_out = waits, hands_out  # type: ignore[method-assign]
        loop = asyncio.new_event_loop()
        asking = loop.create_task(made.alabel("one"))
        loop.run_until_complete(asyncio.to_thread(begun.wait, 20.0))
        asking.get_coro().close()  # its thread goes on
        assert made._holder is None
        go.set()
        assert ended.wait(20.0)
        assert made._holder is None
        loop.run_until_complete(asyncio.wait([asking]))
        loop.close()

    async def test_asked_for_at_once_come_one_after_the_other(self, house: House) -> None:
        made = house.labeler(house.crew(), self.INPUTS)
        asked = (made.alabel(text) for text in (*self.INPUTS, *self.INPUTS))
        told = await asyncio.gather(*asked, asyncio.to_thread(made.label, self.INPUTS[0]))
        assert [entry.fields["text"] for entry in told] == [*self.INPUTS, *self.INPUTS, self.INPUTS[0]]
        assert lines(house, RESERVE) == lines(house, COMMIT) == 4

    def test_are_in_the_checkpoint_as_they_come(self, house: House) -> None:
        path = house.memo.parent / "pool.json"
        made = house.labeler(house.crew(), self.INPUTS, checkpoint=path)
        for count, _ in enumerate(made.stream(progress=False), 1):
            assert len(entries_in(path)) == count

    def test_beyond_the_share_wait(self, house: House) -> None:
        pool = house.labeler(house.crew(), self.INPUTS, max_queries=3).run(progress=False)
        assert Counter(one.status == "waiting" for one in pool.entries) == {True: 1, False: 3}

    def test_that_the_memo_could_not_keep_are_kept_later_and_not_paid_for_again(self, house: House) -> None:
        crew = house.crew(num_workers=1)
        made = house.labeler(crew, self.INPUTS[:1])
        broken = patch.object(SQLiteMemo, "remember", side_effect=MemoError("no space"))
        with broken, pytest.raises(MemoError, match="no space"):
            made.run(progress=False)
        (item,) = next(iter(crew._hands[0].handle._works.values())).__self__._items
        (entry,) = made.run(progress=False).entries
        assert entry.to_dict() == item.entry.to_dict()
        assert entry.status != "waiting"
        assert house.labeler(house.crew(), self.INPUTS[:1]).run(progress=False).entries == (entry,)
        assert lines(house, RESERVE) == 1

    def test_that_a_budget_refuses_for_another_reason_are_not_told_as_unpaid(self, house: House) -> None:
        made = house.labeler(house.crew(), self.INPUTS)
        refusal = PrivacyBudgetExceededError("the account is empty", requested=1, remaining=0)
        refused = patch.object(Share, "reserve", side_effect=refusal)
        with refused, pytest.raises(PrivacyBudgetExceededError, match="the account is empty"):
            made.run(progress=False)

    def test_of_a_worker_that_died_are_asked_for_again(self, house: House) -> None:
        crew = house.crew(dies=lambda number, job: {1: True, 3: "after"}.get(number, False))
        pool = house.labeler(crew, self.INPUTS).run(progress=False)
        assert "waiting" not in {one.status for one in pool.entries}
        assert lines(house, RESERVE) == lines(house, COMMIT) == 4

    def test_are_charged_when_they_are_asked_for_as_a_worker_may_be_killed_at_any_time(self, house: House) -> None:
        made = house.labeler(house.crew(), [f"input {number}" for number in range(200)], epsilon=50.0)
        for count, _ in zip(range(1, 31), made.stream(progress=False), strict=False):
            assert lines(house, RESERVE) == lines(house, COMMIT) == count
        assert made.queries_left == 170

    def test_of_one_sample_stay_in_one_process(self, house: House) -> None:
        with pytest.raises(ConfigurationError, match="stays in one process"):
            house.labeler(house.crew(), self.INPUTS, rows=Rows(units=4, redraw_every="run"))


class TestCandidates:
    """Of private evolution: workers write public texts, and nothing else is theirs."""

    GIVEN: ClassVar[dict[str, Any]] = {
        "embeddings": LocalEmbeddings(),
        "epsilon": 40.0,
        "noise": Noise(multiplier=1.0),
        "shots_per_label": 1,
        "evolution": Evolution(rounds=2, num_candidates=20, num_survivors=2, num_variations=2),
        "task": GenerationTask(hints=tuple(f"Number {place}." for place in range(20))),
    }

    def evolution(self, house: House, executor: Any, **options: Any) -> PrivateEvolution:
        budget = Budget(epsilon=100.0, delta=1e-3)
        private = PrivateExamples(["the card"] * 8, public_size=8, dataset_id="texts")
        given = {**self.GIVEN, "llm": talker().llm, "budget": budget, "executor": executor, **options}
        return PrivateEvolution.from_private_examples(private, **given)

    def test_are_written_by_workers_and_found_in_their_order(self, house: House) -> None:
        crew = Crew(WorkerFactory("tests.ray_places:talker", {}), num_workers=3)
        there = self.evolution(house, crew)
        here = self.evolution(house, None)
        assert len(there.run(progress=False).examples) == len(here.run(progress=False).examples) == 1
        assert list(there.history[None][0]) == list(here.history[None][0])  # the first candidates
        assert len(crew.jobs) == 4  # three of the first round, one of the second

    def test_of_a_worker_that_died_are_asked_for_again(self, house: House) -> None:
        crew = Crew(WorkerFactory("tests.ray_places:talker", {}), dies=lambda number, job: number == 1)
        self.evolution(house, crew).run(progress=False)
        assert crew.jobs[0] in crew.jobs[1:]

    async def test_can_be_awaited(self, house: House) -> None:
        crew = Crew(WorkerFactory("tests.ray_places:talker", {}))
        assert len((await self.evolution(house, crew).arun(progress=False)).examples) == 1

    def test_that_came_are_kept_where_others_could_not_be_written(self, house: House) -> None:
        crew = Crew(WorkerFactory("tests.ray_places:talker", {}), num_workers=3)
        made = self.evolution(house, crew)
        do, fault = crew._do, JobResult("fault", error="ModelCallError")
        crew._do = lambda handle, key, job: crew._ask(lambda: fault) if job[0] == 1 else do(handle, key, job)
        with pytest.raises(RunInterruptedError):
            made.run(progress=False)
        del crew._do
        first = [job[0] for job in crew.jobs]
        made.run(progress=False)
        assert first == [0, 2]
        assert [job[0] for job in crew.jobs[2:]] == [1, 0]  # what was missing, and the variations
        assert list(made.history[None][0]) == list(self.history_here(house))

    def history_here(self, house: House) -> dict[str, float]:
        here = self.evolution(house, None)
        here.run(progress=False)
        return here.history[None][0]

    async def test_that_are_awaited_can_be_cancelled_between_two_jobs(self, house: House) -> None:
        crew = Crew(WorkerFactory("tests.ray_places:talker", {}), num_workers=1)
        made = self.evolution(house, crew)
        do = crew._do
        started = asyncio.Event()
        loop = asyncio.get_running_loop()

        def slow(handle: Any, key: str, job: Any) -> int:
            loop.call_soon_threadsafe(started.set)
            time.sleep(0.05)
            return do(handle, key, job)

        crew._do = slow
        run = asyncio.create_task(made.arun(progress=False))
        await started.wait()
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        assert len(crew.jobs) < 3

    @pytest.mark.parametrize("way", ["run", "arun"])
    async def test_of_an_executor_of_the_environment_leave_no_worker_behind(
        self, house: House, monkeypatch: pytest.MonkeyPatch, way: str
    ) -> None:
        crew = Crew(WorkerFactory("tests.ray_places:talker", {}))
        monkeypatch.setattr("langchain_dpicl.distributed.RayExecutor.from_environment", lambda: crew)
        dismiss, threads = crew._dismiss, set[int]()

        def dismissed(handle: Any) -> None:
            threads.add(threading.get_ident())
            dismiss(handle)

        monkeypatch.setattr(crew, "_dismiss", dismissed)
        made = self.evolution(house, "ray")  # its ledger is in memory, and writing there takes no time
        if way == "run":
            await asyncio.to_thread(made.run, progress=False)
        else:
            await made.arun(progress=False)
        assert crew.dismissed == crew.hired > 0
        assert threading.get_ident() not in threads  # the end of workers takes seconds

    def test_that_cannot_be_written_cost_nothing(self, house: House) -> None:
        crew = Crew(WorkerFactory("tests.ray_places:talker", {"is_out": True}))
        made = self.evolution(house, crew)
        with pytest.raises(RunInterruptedError, match="a public call to RunnableLambda failed"):
            made.run(progress=False)
        assert made._budget.dangling() == ()

    def test_of_another_model_are_refused(self, house: House) -> None:
        with pytest.raises(ConfigurationError, match="expected the model of the driver, RunnableLambda"):
            self.evolution(house, Crew(WorkerFactory("tests.ray_places:writer", {}))).run(progress=False)


class TestATemplate:
    def test_is_made_from_what_workers_released(self, house: House) -> None:
        prompt = DPFewShotPromptTemplate.from_run(
            house.synthesizer(house.crew()), example_prompt="{text} -> {queue}", suffix="{input} ->"
        )
        assert len(prompt.examples or ()) == 6
        assert prompt.epsilon == 4.0


@pytest.mark.parametrize("kind", ["demo", "label"])
def test_an_executor_of_the_environment_is_closed_behind_a_refusal(
    house: House, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    crew = house.crew()
    monkeypatch.setattr("langchain_dpicl.distributed.RayExecutor.from_environment", lambda: crew)
    made = house.synthesizer("ray") if kind == "demo" else house.labeler("ray", ["one"])
    refusal = PrivacyBudgetExceededError("the account is empty", requested=1, remaining=0)
    with patch.object(Share, "reserve", side_effect=refusal), pytest.raises(PrivacyBudgetExceededError):
        made.run(progress=False)
    assert crew.dismissed == crew.hired > 0


def test_an_executor_of_the_environment_is_closed_when_all_is_done(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    crew = house.crew()
    monkeypatch.setattr("langchain_dpicl.distributed.RayExecutor.from_environment", lambda: crew)
    stream = house.synthesizer("ray").stream(progress=False)
    next(stream)
    with patch.object(crew, "_ready", return_value=()):  # jobs are under way
        stream.close()
    assert crew.dismissed == 0
    house.synthesizer("ray").run(progress=False)
    assert crew.dismissed == crew.hired


async def test_an_executor_of_the_environment_is_closed_beside_the_event_loop(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    crew, threads = house.crew(), []
    monkeypatch.setattr("langchain_dpicl.distributed.RayExecutor.from_environment", lambda: crew)
    monkeypatch.setattr(crew, "_dismiss", lambda handle: threads.append(threading.get_ident()))
    await house.labeler("ray", ["one"]).arun(progress=False)
    await house.labeler("ray", ["two"], component="other").alabel("two")
    assert len(threads) == 2
    assert threading.get_ident() not in threads
