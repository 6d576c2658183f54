"""What a call leaves behind, and what of it others in the process see: no examples, and no number of records."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from langchain_core.language_models import FakeListChatModel
from langchain_core.language_models.llms import LLM

from langchain_dpicl import Budget, PrivateExamples
from langchain_dpicl.budget.handler import PrivacyBudgetCallbackHandler
from langchain_dpicl.evaluation import Exact, dp_achoose, dp_aevaluate, dp_choose, dp_evaluate
from langchain_dpicl.evaluation.chains import DEFAULT_CONCURRENCY
from langchain_dpicl.exceptions import DPICLError, LedgerError
from langchain_dpicl.privacy.ledger.shares import Reservation, Share
from tests.unit_tests.evaluation.test_evaluating import CARD, TEMPLATE, reader

EXACT, MODEL, OTHER = Exact(), reader(), reader(declined="transfer")
MARK = "leftover"


class Down(FakeListChatModel):
    """Answers nothing."""

    def _call(self, *args, **kwargs):
        raise ConnectionError("no server")


def few(size=40):
    return PrivateExamples(
        [CARD] * size, label_key="queue", labels=("card", "transfer"), public_size=40, dataset_id=MARK
    )


def alive():
    """The private examples that something still holds."""
    found = (one for one in gc.get_objects() if type(one) is PrivateExamples)
    return [one for one in found if one.dataset_id.startswith(MARK)]


def all_are_gone():
    """Whether they go: a thread that has handed over its result may hold its work a moment longer."""
    deadline = time.monotonic() + 60
    gc.collect()
    while alive():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
        gc.collect()
    return True


def broken(*args, **kwargs):
    raise LedgerError("the disk is full")


FAULTS = {
    "the model is down": None,
    "the budget is too small": None,
    "reserve": (Share, "reserve"),
    "burn": (Reservation, "burn"),
    "the rows": ("langchain_dpicl.evaluation.chains.Question.ask", broken),
    "commit": (Reservation, "commit"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("ask", [dp_evaluate, dp_achoose])
def test_a_failed_call_leaves_nothing_that_holds_the_private_examples(ask, fault, monkeypatch):
    budget = Budget(epsilon=20.0, delta=1e-5)
    model = Down(responses=["card"]) if fault == "the model is down" else MODEL
    given = {"private": few(), "budget": budget, "epsilon": 30.0 if "small" in fault else 1.0}
    if ask is dp_evaluate:
        given |= {"chain": TEMPLATE | model, "evaluators": EXACT}
    else:
        given |= {"chains": {"a": TEMPLATE | model, "b": TEMPLATE | OTHER}, "evaluator": EXACT, "part": "choose"}
    if (place := FAULTS[fault]) is not None:
        monkeypatch.setattr(*place, *(() if place[1] is broken else (broken,)))
    assert alive()
    with contextlib.suppress(DPICLError):
        made = ask(**given)
        asyncio.run(made) if asyncio.iscoroutine(made) else None
        pytest.fail("the call did not fail")
    del given
    assert all_are_gone()
    assert budget.remaining_epsilon > 18.0


class FailsOnce(FakeListChatModel):
    """Fails in its first call, once it is let go."""

    entered: Any
    let_go: Any

    def _call(self, *args, **kwargs):
        if not self.entered.is_set():
            self.entered.set()
            assert self.let_go.wait(60)
            raise ValueError
        return "card"


def test_calls_that_waited_for_one_that_failed_pay_once_together():
    budget, model = Budget(epsilon=20.0, delta=1e-5), FailsOnce(
        responses=["card"], entered=threading.Event(), let_go=threading.Event()
    )  # fmt: skip
    given = {"chain": TEMPLATE | model, "evaluators": EXACT, "private": few(), "budget": budget, "epsilon": 0.5}
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(lambda: dp_evaluate(**given))
        assert model.entered.wait(60)
        others = [pool.submit(lambda: dp_evaluate(**given)) for _ in range(3)]
        model.let_go.set()
        assert isinstance(first.exception(60), DPICLError)
        assert len({str(each.result(60).tables) for each in others}) == 1
    assert round(20.0 - budget.remaining_epsilon, 2) == 0.5


async def test_a_ticket_whose_reservation_was_cancelled_is_there_for_the_next_call(tmp_path, monkeypatch):
    budget = PrivacyBudgetCallbackHandler.create(tmp_path / "b.db", epsilon=8.0, delta=1e-6)
    given = {"chain": TEMPLATE | MODEL, "evaluators": EXACT, "private": few(), "budget": budget, "epsilon": 0.5}
    reserve, loop = Share.reserve, asyncio.get_running_loop()

    def reserve_while_cancelled(*args, **kwargs):
        made = reserve(*args, **kwargs)
        loop.call_soon_threadsafe(task.cancel)
        time.sleep(0.2)
        return made

    with monkeypatch.context() as patch:
        patch.setattr(Share, "reserve", reserve_while_cancelled)
        task = asyncio.create_task(dp_aevaluate(**given))
        with pytest.raises(asyncio.CancelledError):
            await task
    await dp_aevaluate(**given)
    use = budget.budget.use()
    assert (list(use.tickets), use.tickets["evaluation"].committed) == (["evaluation"], 1)
    budget.budget.close()


@pytest.mark.parametrize("ask", [dp_evaluate, dp_choose])
def test_a_kept_result_does_not_hold_the_private_examples_either(ask):
    budget, private = Budget(epsilon=20.0, delta=1e-5), few()
    given = {"private": private, "budget": budget, "epsilon": 1.0}
    if ask is dp_evaluate:
        given |= {"chain": TEMPLATE | MODEL, "evaluators": EXACT}
    else:
        given |= {"chains": {"a": TEMPLATE | MODEL, "b": TEMPLATE | OTHER}, "evaluator": EXACT, "part": "choose"}
    first = ask(**given)
    assert ask(**given).to_dict()["released"] == first.to_dict()["released"]
    left = budget.remaining_epsilon
    del private, given
    assert all_are_gone()
    assert budget.remaining_epsilon == left


class Meeting(LLM):
    """Answers a record once as many calls are in flight as were allowed; counts them, and the tasks beside them."""

    barrier: Any
    at_work: Any
    tasks: list[int]
    awaited: Any = None

    @property
    def _llm_type(self):
        return "meeting"

    def _call(self, prompt, stop=None, run_manager=None, **kwargs):
        if "declined" in prompt:
            with self.at_work:
                self.barrier.wait(60)
        return "card"

    async def _acall(self, prompt, stop=None, run_manager=None, **kwargs):
        if "declined" in prompt:
            with self.at_work:
                self.tasks.append(len(asyncio.all_tasks()))
                await asyncio.wait_for(self.awaited.wait(), 60)
        return "card"


class AtWork:
    """Counts who is inside."""

    def __init__(self):
        self.now, self.most, self._lock = 0, 0, threading.Lock()

    def __enter__(self):
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)

    def __exit__(self, *error):
        with self._lock:
            self.now -= 1


def measured(ask, limit, size):
    """Evaluates with at most `limit` calls at once; returns the model, which had so many at once in every round."""
    model = Meeting(barrier=threading.Barrier(limit), at_work=AtWork(), tasks=[])
    records = [{"text": "it was declined", "queue": "card"}] * size
    private = PrivateExamples(records, label_key="queue", labels=("card", "transfer"), public_size=100)
    config = {} if limit == DEFAULT_CONCURRENCY else {"max_concurrency": limit}
    given = {"evaluators": EXACT, "budget": Budget(epsilon=20.0, delta=1e-5), "epsilon": 20.0, "config": config}

    async def awaited():
        model.awaited = asyncio.Barrier(limit)
        return await dp_aevaluate(TEMPLATE | model, private, **given)

    found = dp_evaluate(TEMPLATE | model, private, **given) if ask == "sync" else asyncio.run(awaited())
    assert abs(found.confusion["card", "card"] - size) < 8
    return model


@pytest.mark.parametrize("limit", [1, 3, DEFAULT_CONCURRENCY, 70])
@pytest.mark.parametrize("ask", ["sync", "async"])
def test_as_many_calls_are_in_flight_as_the_config_allows(ask, limit):
    assert measured(ask, limit, 2 * limit).at_work.most == limit


def test_the_tasks_of_an_event_loop_show_the_calls_in_flight_and_not_how_many_there_will_be():
    few_tasks, many_tasks = (max(measured("async", 4, size).tasks) for size in (8, 400))
    assert few_tasks == many_tasks


def test_more_records_start_no_more_threads():
    """Those of earlier tests may end meanwhile."""

    def of_ours():
        return {thread for thread in threading.enumerate() if thread.name.startswith("dpicl")}

    measured("sync", 40, 40)
    before = of_ours()
    assert before
    measured("sync", 40, 400)
    assert of_ours() <= before
