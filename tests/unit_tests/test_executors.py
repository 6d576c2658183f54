"""Jobs that are done elsewhere: handed out once, again when a worker is gone, and paid for by tickets of their own."""

from __future__ import annotations

import asyncio
import json
import pickle
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

import pytest
from langchain_core.prompts import PromptTemplate

from langchain_dpicl.backends.nearest_embeddings import LocalEmbeddings
from langchain_dpicl.evolution import PrivateEvolution
from langchain_dpicl.exceptions import (
    ConfigurationError,
    LedgerError,
    ModelCallError,
    PrivacyBudgetError,
    PrivacyBudgetExceededError,
    PrivacyBudgetMismatchError,
    SynthesisInterruptedError,
)
from langchain_dpicl.executors import MOST_DEATHS, Answer
from langchain_dpicl.privacy.examples import PrivateExamples
from langchain_dpicl.privacy.ledger import Budget, Reservation
from langchain_dpicl.privacy.ledger_state import COMMIT, RESERVE
from langchain_dpicl.prompts import DPFewShotPromptTemplate
from langchain_dpicl.stores import SQLiteMemo
from langchain_dpicl.working import Setup, Worker, Workplace
from tests.canary import RECORD
from tests.crews import Crew, House
from tests.ray_places import PUBLIC_SIZE, engine, records, talker


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


def lines(house: House, kind: str) -> int:
    """How many tickets the ledger's lines of one kind are about."""
    budget = house.budget()
    return sum(record.body["count"] for record in budget._store.records(0) if record.kind == kind)


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

    def test_are_streamed_as_they_come(self, house: House) -> None:
        made = house.synthesizer(house.crew())
        seen = list(made.stream(progress=False))
        assert sorted(map(str, seen)) == sorted(map(str, made.demonstrations))
        assert made.finished

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
        assert made.finished
        assert len(crew.jobs) == len(set(crew.jobs)) == 6
        assert house.budget().dangling() == ()

    def test_carry_no_record_to_or_from_a_worker(self, house: House) -> None:
        made = house.synthesizer(house.crew())
        told = pickle.dumps([made._elsewhere.work, *map(made._job, made._items)])
        assert RECORD.encode() not in told


class TestAWorkerThatDies:
    def test_before_it_spent_costs_nothing(self, house: House) -> None:
        crew = house.crew(dies=lambda number, job: number == 2)
        made = house.synthesizer(crew)
        made.run(progress=False)
        assert made.finished
        assert crew.hired == 3
        assert Counter(crew.jobs).most_common(1)[0][1] == 2
        assert crew.jobs[-1] == crew.jobs[1]  # behind all others
        assert house.budget().dangling() == ()

    def test_behind_its_commit_has_lost_and_doubled_nothing(self, house: House) -> None:
        crew = house.crew(dies=lambda number, job: "after" if number in {1, 4} else False)
        made = house.synthesizer(crew, redraw_every=3)
        made.run(progress=False)
        assert made.finished
        assert lines(house, RESERVE) == lines(house, COMMIT) == 6

    def test_at_one_job_again_and_again_stops_the_run_and_keeps_what_came(self, house: House) -> None:
        bad = ("card", 1)
        made = house.synthesizer(house.crew(dies=lambda number, job: job == bad))
        with pytest.raises(SynthesisInterruptedError, match=f"{MOST_DEATHS} workers died") as stop:
            made.run(progress=False)
        assert stop.value.synthesizer is made
        assert len(made.demonstrations) == 5

    def test_as_it_starts_again_and_again_stops_the_run(self, house: House) -> None:
        crew = house.crew(num_workers=1)
        crew._begin = lambda handle, work: crew._ask(lambda: None)
        with pytest.raises(SynthesisInterruptedError, match="died as they started"):
            house.synthesizer(crew).run(progress=False)
        assert crew.hired == MOST_DEATHS

    def test_that_never_comes_stops_the_run_in_the_end(self, house: House) -> None:
        crew = house.crew()
        crew.start_timeout = 0.3
        crew._ready = lambda awaited, seconds: ()
        with pytest.raises(SynthesisInterruptedError, match=r"no worker has begun within 0\.3 s"):
            house.synthesizer(crew).run(progress=False)


class TestABurntTicket:
    def test_stays_burnt_and_what_it_was_for_is_told_as_missing(self, house: House) -> None:
        # Somebody else burns one ticket of the share and is gone, as a worker that is killed within a block.
        made = house.synthesizer(house.crew(), redraw_every=3)
        template = made.plan.tickets()[0].template
        made._share.reserve(template, label="card").burn()
        with pytest.raises(PrivacyBudgetExceededError, match="requested 1 more, remaining 0") as refusal:
            made.run(progress=False)
        assert refusal.value.synthesizer is made
        assert Counter(one["queue"] for one in made.demonstrations) == {"card": 2, "cash": 3}
        assert lines(house, RESERVE) == 6
        assert lines(house, COMMIT) == 5
        with pytest.raises(PrivacyBudgetExceededError):
            house.synthesizer(house.crew(), redraw_every=3).run(progress=False)
        assert lines(house, RESERVE) == 6  # nothing more was granted

    def test_of_several_jobs_are_told_together(self, house: House) -> None:
        made = house.synthesizer(house.crew(), redraw_every=3)
        made._share.reserve(made.plan.tickets()[0].template, label="card", count=3).burn(3)
        with pytest.raises(PrivacyBudgetExceededError, match="requested 3 more, remaining 0"):
            made.run(progress=False)
        assert Counter(one["queue"] for one in made.demonstrations) == {"cash": 3}

    def test_of_a_text_with_one_ticket_a_token_costs_one_token(self, house: House) -> None:
        made = house.synthesizer(house.crew(), redraw_every=1)
        made._share.reserve(made.plan.tickets()[0].template, label="card").burn()
        assert len(made.run(progress=False).examples) == 6
        assert sum(one.count for one in house.budget().dangling()) == 1

    def test_a_draft_left_behind_is_gone_on_with(self, house: House) -> None:
        stop = house.memo.parent / "stop"
        made = house.synthesizer(house.crew(num_workers=1, options={"stop_file": str(stop)}), redraw_every=1)
        stop.touch()
        with pytest.raises(SynthesisInterruptedError):
            made.run(progress=False)
        stop.unlink()
        spent = lines(house, RESERVE)
        assert spent == 1  # one token was released, and then the public model was out
        crew = house.crew(num_workers=1)
        assert len(house.synthesizer(crew, redraw_every=1).run(progress=False).examples) == 6
        assert lines(house, RESERVE) <= 18
        assert house.budget().dangling() == ()


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
        house.synthesizer(house.crew(), redraw_every=1).run(progress=False)
        before = len(kept)
        assert kept == list(range(1, before + 1))
        house.labeler(house.crew(), ("one", "two")).run(progress=False)
        assert kept == list(range(1, before + 3))

    def test_is_not_taken_from_somebody_who_goes_on_with_it(self, house: House) -> None:
        made = house.synthesizer(house.crew(), redraw_every=1)
        place = house.setup().place()
        place._is_one_host = True
        remember = place.memo.remember
        place.memo.remember = lambda key, told, **how: remember(key, "another's", **how)
        answer = made._elsewhere.work.begin(place)(("card", 0))
        assert (answer.kind, answer.error, answer.tickets) == ("fault", "MemoError", 1)


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

    def test_that_forgets_what_the_run_released_is_refused(self, house: House) -> None:
        place = Workplace(engine(), private=records(), budget=house.budget(), memo=SQLiteMemo(house.memo, size=2))
        place._is_one_host = True
        with pytest.raises(ConfigurationError, match="room for 3 answers"):
            place.paid(ledger_id=house.budget().ledger_id, num_jobs=3)


class TestWhatAWorkerHas:
    def test_has_to_be_the_model_of_the_plan(self, house: House) -> None:
        with pytest.raises(ConfigurationError, match="another in"):
            house.synthesizer(house.crew(options={"name": "other"})).run(progress=False)
        assert lines(house, RESERVE) == 0

    def test_has_to_be_declared_as_the_ledger_knows_it(self, house: House) -> None:
        with pytest.raises(PrivacyBudgetError, match="dataset_id"):
            house.synthesizer(house.crew(options={"public_size": 9})).run(progress=False)
        assert lines(house, RESERVE) == 0

    @pytest.mark.parametrize("function", ["broken", "nothing", "absent"])
    def test_is_told_by_the_kind_of_what_its_function_raised(self, house: House, function: str) -> None:
        with pytest.raises(ConfigurationError, match="to return a Workplace") as refusal:
            house.synthesizer(Crew(Setup(f"tests.ray_places:{function}", {}))).run(progress=False)
        assert RECORD not in str(refusal.value)

    def test_is_told_in_our_words_where_they_are_ours(self, house: House) -> None:
        with pytest.raises(LedgerError, match="missing"):
            house.synthesizer(Crew(Setup("tests.ray_places:place", {"ledger": "missing.db", "memo": "x"}))).run(
                progress=False
            )

    def test_says_nothing_of_what_is_raised_beside_our_errors(self) -> None:
        worker = Worker(Setup("tests.ray_places:writer", {}), is_one_host=True)
        worker._works["x"] = lambda job: engine().complete(RECORD, None, 3)
        assert worker.do("x", None) == Answer("fault", error="TypeError")
        assert str(worker.do("y", None).as_error()) == "a worker's call failed (KeyError)"

    def test_is_never_pickled_and_shows_nothing(self) -> None:
        place = Workplace(engine(), private=records())
        assert RECORD not in repr(place)
        with pytest.raises(PrivacyBudgetError, match="cannot be pickled"):
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
        found = Answer.of_fault(error).as_error()
        assert type(found) is type(error)
        assert str(found) == str(error)
        assert getattr(found, "requested", None) == getattr(error, "requested", None)

    def test_bring_of_other_errors_the_kind_alone(self) -> None:
        assert str(Answer.of_fault(ValueError(RECORD)).as_error()) == "a worker's call failed (ValueError)"


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
        with pytest.raises(ConfigurationError, match="One secret deal"):
            house.synthesizer(house.crew(), sampling="disjoint", num_slots=2, shots_per_label=2)

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

    async def test_can_be_awaited(self, house: House) -> None:
        made = house.labeler(house.crew(), self.INPUTS)
        assert len([one async for one in made.astream(progress=False)]) == 4

    def test_beyond_the_share_wait(self, house: House) -> None:
        pool = house.labeler(house.crew(), self.INPUTS, max_queries=3).run(progress=False)
        assert Counter(one.status == "waiting" for one in pool.entries) == {True: 1, False: 3}

    def test_of_a_worker_that_died_are_asked_for_again(self, house: House) -> None:
        crew = house.crew(dies=lambda number, job: {1: True, 3: "after"}.get(number, False))
        pool = house.labeler(crew, self.INPUTS).run(progress=False)
        assert "waiting" not in {one.status for one in pool.entries}
        assert lines(house, RESERVE) == lines(house, COMMIT) == 4

    @pytest.mark.parametrize("teachers", ["one_sample"])
    def test_of_one_sample_stay_in_one_process(self, house: House, teachers: Any) -> None:
        with pytest.raises(ConfigurationError, match="stays in one process"):
            house.labeler(house.crew(), self.INPUTS, teachers=teachers)


class TestCandidates:
    """Of private evolution: workers write public texts, and nothing else is theirs."""

    GIVEN: ClassVar[dict[str, Any]] = {
        "embeddings": LocalEmbeddings(),
        "epsilon": 40.0,
        "noise_multiplier": 1.0,
        "shots_per_label": 1,
        "rounds": 2,
        "num_candidates": 20,
        "num_survivors": 2,
        "num_variations": 2,
        "hints": [f"Number {place}." for place in range(20)],
    }

    def evolution(self, house: House, executor: Any, **options: Any) -> PrivateEvolution:
        budget = Budget(epsilon=100.0, delta=1e-3)
        private = PrivateExamples(["the card"] * 8, public_size=8, dataset_id="texts")
        given = {**self.GIVEN, "llm": talker().llm, "budget": budget, "executor": executor, **options}
        return PrivateEvolution.from_private_examples(private, **given)

    def test_are_written_by_workers_and_found_in_their_order(self, house: House) -> None:
        crew = Crew(Setup("tests.ray_places:talker", {}), num_workers=3)
        there = self.evolution(house, crew)
        here = self.evolution(house, None)
        assert len(there.run(progress=False).examples) == len(here.run(progress=False).examples) == 1
        assert list(there.history[None][0]) == list(here.history[None][0])  # the first candidates
        assert len(crew.jobs) == 4  # three of the first round, one of the second

    def test_of_a_worker_that_died_are_asked_for_again(self, house: House) -> None:
        crew = Crew(Setup("tests.ray_places:talker", {}), dies=lambda number, job: number == 1)
        self.evolution(house, crew).run(progress=False)
        assert crew.jobs[0] in crew.jobs[1:]

    async def test_can_be_awaited(self, house: House) -> None:
        crew = Crew(Setup("tests.ray_places:talker", {}))
        assert len((await self.evolution(house, crew).arun(progress=False)).examples) == 1

    def test_that_cannot_be_written_cost_nothing(self, house: House) -> None:
        crew = Crew(Setup("tests.ray_places:talker", {"is_out": True}))
        made = self.evolution(house, crew)
        with pytest.raises(SynthesisInterruptedError, match="a public call to RunnableLambda failed"):
            made.run(progress=False)
        assert made._budget.dangling() == ()

    def test_of_another_model_are_refused(self, house: House) -> None:
        with pytest.raises(ConfigurationError, match="expected the model of the driver, RunnableLambda"):
            self.evolution(house, Crew(Setup("tests.ray_places:writer", {}))).run(progress=False)


class TestATemplate:
    def test_is_made_from_what_workers_released(self, house: House) -> None:
        prompt = DPFewShotPromptTemplate.from_private_examples(
            records(str(house.ledger), PUBLIC_SIZE),
            llm=engine(),
            budget=house.budget(),
            component="demo",
            epsilon=4.0,
            max_tokens=3,
            num_slots=4,
            public_top_k=3,
            example_prompt=PromptTemplate.from_template("{text} -> {queue}"),
            suffix="{input} ->",
            executor=house.crew(),
            progress=False,
        )
        assert len(prompt.examples or ()) == 2
        assert prompt.epsilon == 4.0


def test_an_executor_of_the_environment_is_closed_when_all_is_done(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    crew = house.crew()
    monkeypatch.setattr("langchain_dpicl.ray_executor.RayExecutor.from_environment", lambda: crew)
    stream = house.synthesizer("ray").stream(progress=False)
    next(stream)
    stream.close()
    assert crew.dismissed == 0
    house.synthesizer("ray").run(progress=False)
    assert crew.dismissed == crew.hired
