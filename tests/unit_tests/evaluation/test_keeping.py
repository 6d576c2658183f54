"""Which calls get a kept result, which pay, and what becomes of calls that fail, overlap or are forked."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import UsageMetadataCallbackHandler
from langchain_core.language_models import FakeListChatModel
from langchain_core.output_parsers import JsonOutputParser
from langchain_core.prompts import ChatPromptTemplate
from pydantic import BaseModel, PrivateAttr, SecretStr

from langchain_dpicl import Budget, PrivateExamples
from langchain_dpicl.backends.private_calls import call as call_pool
from langchain_dpicl.backends.private_calls.call import Crew, OpaqueValue
from langchain_dpicl.evaluation import Exact, Judge, Pure, Score, dp_achoose, dp_aevaluate, dp_choose, dp_evaluate
from langchain_dpicl.evaluation import chains as chains_module
from langchain_dpicl.evaluation.evaluate import silent_question
from langchain_dpicl.exceptions import ConfigurationError, LedgerError, PrivacyBudgetMismatchError, RunInterruptedError
from langchain_dpicl.privacy.ledger.shares import Reservation, Share
from langchain_dpicl.release import count_release
from tests.unit_tests.evaluation.test_evaluating import CARD, TEMPLATE, Reader, reader


def few(dataset_id="few"):
    """Examples for calls whose numbers do not matter."""
    return PrivateExamples(
        [CARD] * 40, label_key="queue", labels=("card", "transfer"), public_size=40, dataset_id=dataset_id
    )


MODEL, EXACT = reader(), Exact()
ONE = Score(Pure(lambda inputs, outputs, reference: 1))
BASE = {"chain": TEMPLATE | MODEL, "evaluators": EXACT, "epsilon": 0.5}
JUDGE = TEMPLATE | MODEL


def chat(text, human="{text}"):
    return ChatPromptTemplate.from_messages([("system", text), ("human", human)])


def judge(text):
    return Judge(chat(text, "{text} {answer}") | MODEL)


@pytest.fixture
def paid():
    """A budget and examples, as arguments of a call."""
    return {"budget": Budget(epsilon=20.0, delta=1e-5), "private": few("kept")}


def cost(paid):
    return round(20.0 - paid["budget"].remaining_epsilon, 2)


def spent(*calls, ask=dp_evaluate):
    """What calls cost together, each 0.5 unless its result was kept."""
    paid = {"budget": Budget(epsilon=20.0, delta=1e-5), "private": few("kept")}
    for call in calls:
        ask(**call, **paid)
    return cost(paid)


def of_marks(**marks):
    return {**BASE, "evaluators": Score(ONE.function, **marks)}


OTHERS = {
    "a system message": ({**BASE, "chain": chat("a") | MODEL}, {**BASE, "chain": chat("b") | MODEL}),
    "a judge's system message": (
        {**BASE, "evaluators": judge("a")}, {**BASE, "evaluators": judge("b")},
    ),
    "the timeout": (BASE, {**BASE, "timeout": 30}),
    "the marks": (of_marks(marks=(0, 1)), of_marks(marks=(1, 2))),
    "the seventh digit of a mark": (of_marks(marks=(0, 1)), of_marks(marks=(0, 1.0000001))),
    "a function": (of_marks(), {**BASE, "evaluators": Score(Pure(lambda inputs, outputs, reference: 1))}),
    "the sample": (BASE, {**BASE, "sample": 20}),
    "the baseline": ({**BASE, "baseline": chat("a") | MODEL}, {**BASE, "baseline": chat("b") | MODEL}),
    "chain and judge in turn": (
        {**BASE, "chain": chat("a") | MODEL, "evaluators": judge("b")},
        {**BASE, "chain": chat("b") | MODEL, "evaluators": judge("a")},
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", OTHERS)
def test_another_call_pays(what):
    one, other = OTHERS[what]
    assert spent(one, one) == 0.5
    assert spent(one, other) == 1.0


def test_a_model_of_other_settings_pays(paid):
    model = FakeListChatModel(responses=["card"])
    first = dp_evaluate(TEMPLATE | model, evaluators=EXACT, epsilon=2.0, **paid)
    model.responses = ["transfer"]
    again = dp_evaluate(TEMPLATE | model, evaluators=EXACT, epsilon=2.0, **paid)
    assert cost(paid) == 4.0
    assert first.accuracy.low > again.accuracy.high


def schema(answer):
    class Schema(BaseModel):
        queue: str = answer

    return Schema


class Holding(Reader):
    """Holds values of every kind that fields, private attributes and arguments have."""

    held: Any = None
    _said: str = PrivateAttr(default="card")


def change(model, **values):
    for name, value in values.items():
        setattr(model, name, value)
    return model


HELD = np.zeros(5_000)
SWAPS = {
    "an argument": (lambda model: model.bind(response_format=schema("card")), lambda model: model.bind(
        response_format=schema("transfer")
    )),
    "a private attribute": (lambda model: change(model, _said="card"), lambda model: change(model, _said="transfer")),
    "a secret": (
        lambda model: change(model, held=SecretStr("one")), lambda model: change(model, held=SecretStr("two")),
    ),
    "a digit of a long array": (
        lambda model: change(model, held=HELD), lambda model: change(model, held=HELD + np.eye(5_000)[2_500]),
    ),
    "a digit of the same array": (
        lambda model: change(model, held=HELD), lambda model: HELD.put(2_500, 1.0) or model,
    ),
    "a type of a number": (lambda model: change(model, held=[1]), lambda model: change(model, held=[True])),
}  # fmt: skip


@pytest.mark.parametrize("what", SWAPS)
def test_a_value_that_prints_as_another_does_is_another_value(what, paid):
    model = Holding(rule={})
    for swap in SWAPS[what]:
        dp_evaluate(TEMPLATE | swap(model), evaluators=EXACT, epsilon=0.5, **paid)
    assert cost(paid) == 1.0


def test_a_parser_of_another_schema_pays():
    score = Score(Pure(lambda inputs, outputs, reference: 1))
    one, other = (
        {**BASE, "evaluators": score, "chain": TEMPLATE | MODEL | JsonOutputParser(pydantic_object=schema(answer))}
        for answer in ("card", "transfer")
    )
    assert spent(one, one) == 0.5
    assert spent(one, other) == 1.0


def test_values_of_the_same_content_are_kept(paid):
    model = Holding(rule={})
    for _ in range(2):
        bound = change(model, held={"a": [1, 2.5, None]}, rule={"a": "b"}).bind(seed=[7])
        dp_evaluate(TEMPLATE | bound, evaluators=EXACT, epsilon=0.5, **paid)
    assert cost(paid) == 0.5


UNSENT = {
    "callbacks": [UsageMetadataCallbackHandler()], "tags": ["a"], "metadata": {"a": 1}, "name": "a", "verbose": True,
    "cache": InMemoryCache(),
}  # fmt: skip


@pytest.mark.parametrize("name", UNSENT)
def test_a_setting_that_private_calls_run_without_is_no_other_chain(name, paid):
    model = reader()
    for values in ({}, {name: UNSENT[name]}):
        dp_evaluate(TEMPLATE | change(model, **values), evaluators=EXACT, epsilon=0.5, **paid)
    assert cost(paid) == 0.5


def test_arguments_that_private_calls_leave_out_are_no_other_chain():
    one, other = ({**BASE, "chain": TEMPLATE | MODEL.bind(user=user, seed=1)} for user in "ab")
    assert spent(one, other) == 0.5


@pytest.mark.parametrize("stops", [(["x"], ["y"]), ([], ["y"])])
def test_other_ends_of_an_answer_are_another_chain(stops):
    assert spent(*({**BASE, "chain": TEMPLATE | MODEL.bind(stop=stop)} for stop in stops)) == 1.0


def test_other_records_of_the_same_name_are_refused_and_get_no_kept_result(paid):
    dp_evaluate(**BASE, **paid)
    with pytest.raises(PrivacyBudgetMismatchError, match="dataset_id"):
        dp_evaluate(**BASE, **{**paid, "private": few("kept")})


@pytest.mark.parametrize("component", [["a"], "", 1])
def test_a_component_that_is_no_name_is_refused(component, paid):
    with pytest.raises(ConfigurationError, match="component"):
        dp_evaluate(**BASE, component=component, **paid)
    with pytest.raises(ConfigurationError, match="component"):
        dp_choose({"a": JUDGE, "b": JUDGE}, evaluator=EXACT, component=component, **paid)


def test_candidates_in_another_order_pay():
    chains = {"a": chat("a") | MODEL, "b": chat("b") | MODEL}
    other = dict(reversed(chains.items()))
    base = {"evaluator": EXACT, "epsilon": 0.5}
    assert spent({**base, "chains": chains}, {**base, "chains": chains}, ask=dp_choose) == 0.5
    assert spent({**base, "chains": chains}, {**base, "chains": other}, ask=dp_choose) == 1.0


def test_a_choice_that_was_released_survives_a_commit_that_fails(monkeypatch, paid):
    chains = {"a": chat("a") | MODEL, "b": TEMPLATE | reader(x="y")}
    call = {"chains": chains, "evaluator": EXACT, "epsilon": 2.0, **paid}
    with monkeypatch.context() as patch:
        patch.setattr(Reservation, "commit", broken)
        with pytest.raises(LedgerError) as caught:
            dp_choose(**call)
    assert caught.value.run.result.name == "a"
    assert dp_choose(**call).name == "a"
    assert cost(paid) == 2.0
    assert not paid["budget"].dangling()


def broken(*args, **kwargs):
    raise LedgerError("the disk is full")


def test_counts_that_were_released_survive_a_commit_that_fails(monkeypatch, paid):
    with monkeypatch.context() as patch:
        patch.setattr(Reservation, "commit", broken)
        with pytest.raises(LedgerError) as caught:
            dp_evaluate(**BASE, **paid)
    assert dp_evaluate(**BASE, **paid).tables == caught.value.run.result.tables
    assert cost(paid) == 0.5
    assert not paid["budget"].dangling()


@pytest.mark.parametrize("ask", ["evaluate", "choose"])
def test_after_a_failure_behind_the_burn_the_same_call_pays_and_works(ask, monkeypatch, paid):

    def call():
        if ask == "evaluate":
            return dp_evaluate(**BASE, **paid)
        chains = {"a": TEMPLATE | MODEL, "b": chat("b") | MODEL}
        return dp_choose(chains, evaluator=EXACT, epsilon=0.5, **paid)

    real = count_release.opened
    monkeypatch.setattr("langchain_dpicl.evaluation.chains.Question.ask", broken)
    with pytest.raises(RunInterruptedError, match="again") as caught:
        call()
    assert "error.run" not in str(caught.value)
    assert cost(paid) == 0.5
    monkeypatch.undo()
    assert count_release.opened is real
    assert call() is not None
    assert cost(paid) == 1.0
    assert call() is not None
    assert cost(paid) == 1.0


CALLS = {
    "evaluate": (dp_evaluate, dp_aevaluate, BASE),
    "choose": (
        dp_choose, dp_achoose,
        {"chains": {"a": TEMPLATE | MODEL, "b": chat("b") | MODEL}, "evaluator": EXACT, "epsilon": 0.5},
    ),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("awaited", [False, True])
async def test_a_call_that_an_open_plan_refused_works_outside_of_it(call, awaited, paid):
    ask, aask, given = CALLS[call]

    async def answer():
        return await aask(**given, **paid) if awaited else ask(**given, **paid)

    with pytest.raises(ConfigurationError, match="expected a closed plan"), paid["budget"].plan():
        await answer()
    assert await answer() is not None
    assert cost(paid) == 0.5


def test_a_ticket_that_was_not_burnt_is_used_by_the_next_call(monkeypatch, paid):
    with monkeypatch.context() as patch:
        patch.setattr(Reservation, "burn", broken)
        with pytest.raises(LedgerError):
            dp_evaluate(**BASE, **paid)
    dp_evaluate(**BASE, **paid)
    assert cost(paid) == 0.5


@pytest.mark.parametrize("where", ["reserve", "burn"])
def test_a_report_shows_the_chain_that_was_measured_where_a_call_under_its_name_was_stopped(where, monkeypatch, paid):
    named = {**BASE, "component": "mine", **paid}
    with monkeypatch.context() as patch:
        patch.setattr(Reservation if where == "burn" else Share, where, broken)
        with pytest.raises(LedgerError):
            dp_evaluate(**named)
    with pytest.raises(ConfigurationError, match="component"):
        dp_evaluate(**{**named, "chain": chat("another prompt") | MODEL})
    found = dp_evaluate(**named)
    assert cost(paid) == 0.5
    (share,) = found.report["budget"]["shares"]
    (component,) = share["components"]
    assert component["public"]["chains"] == {"chain": {"template": chains_module._digest(TEMPLATE), "model": "Reader"}}


def test_the_same_calls_at_once_pay_once_in_threads(paid):
    with ThreadPoolExecutor(6) as pool:
        found = [each.result() for each in [pool.submit(lambda: dp_evaluate(**BASE, **paid)) for _ in range(6)]]
    assert len({str(each.tables) for each in found}) == 1
    assert cost(paid) == 0.5


async def test_the_same_calls_at_once_pay_once_when_awaited(paid):
    found = await asyncio.gather(*(dp_aevaluate(**BASE, **paid) for _ in range(6)))
    assert len({str(each.tables) for each in found}) == 1
    chains = {"a": TEMPLATE | MODEL, "b": chat("b") | MODEL}
    best = await asyncio.gather(*(
        dp_achoose(chains, evaluator=EXACT, epsilon=0.5, **paid) for _ in range(6)
    ))  # fmt: skip
    assert len({one.name for one in best}) == 1
    assert cost(paid) == 1.0


class Slow(FakeListChatModel):
    """Waits in its first call until it is let go."""

    def _call(self, *args, **kwargs):
        ENTERED.set()
        assert LET_GO.wait(60)
        return super()._call(*args, **kwargs)


ENTERED, LET_GO = threading.Event(), threading.Event()


def test_a_call_that_waits_for_its_model_stops_no_other_call(paid):
    ENTERED.clear()
    LET_GO.clear()
    slow = {**BASE, "chain": TEMPLATE | Slow(responses=["card"])}
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: dp_evaluate(**slow, **paid))
        assert ENTERED.wait(60)  # in the probe, before anything is declared
        dp_evaluate(**BASE, **paid)
        assert not waiting.done()
        if hasattr(os, "fork"):
            # A ledger in memory belongs to one process, so the child makes its own.
            assert _in_a_fork(lambda: dp_evaluate(**BASE, private=few("own"), budget=Budget(epsilon=20.0, delta=1e-5)))
        LET_GO.set()
        assert waiting.result().tables


def _in_a_fork(action):
    """Whether an action ends in a forked child while another thread of the parent holds what it holds."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            threading.Timer(240, os._exit, (2,)).start()
            action()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_the_number_of_threads_says_nothing_of_the_sample():
    """Also not for small samples, nor for the number of chains: threads start all at once and are shared."""
    seen = []

    class Counting(FakeListChatModel):
        def _call(self, *args, **kwargs):
            seen.append({thread for thread in threading.enumerate() if thread.name.startswith("dpicl")})
            return "card"

    chains = {name: chat(name) | Counting(responses=["card"]) for name in "abc"}
    question = silent_question(few(), chains, EXACT, inputs=None, timeout=None, is_choice=True)
    before = threading.active_count()
    for size in (1, 3, 200):
        question.ask([OpaqueValue((CARD,))] * size).run()
    assert seen[0]
    assert all(later <= seen[0] for later in seen)  # those of earlier tests may end meanwhile
    assert threading.active_count() - before <= call_pool.DEFAULT_CONCURRENCY


@pytest.mark.parametrize("limits", [{}, {"max_concurrency": 2}])
async def test_the_numbers_of_later_tasks_say_nothing_of_the_records(limits):
    async def number():
        await asyncio.sleep(0)
        return int(asyncio.current_task().get_name().removeprefix("Task-"))

    seen = []
    for size in (3, 40):
        private = PrivateExamples([CARD] * size, label_key="queue", labels=("card", "transfer"), public_size=40)
        before = await asyncio.create_task(number())
        await dp_aevaluate(**BASE, private=private, budget=Budget(epsilon=20.0, delta=1e-5), config=limits)
        seen.append(await asyncio.create_task(number()) - before)
    assert seen[0] == seen[1]


def test_threads_that_are_asked_for_at_once_start_once():
    for _ in range(20):
        crew, ready = Crew(4), threading.Barrier(6)

        def ask(crew=crew, ready=ready):
            ready.wait(60)
            return crew.here()

        with ThreadPoolExecutor(6) as pool:
            pools = {each.result() for each in [pool.submit(ask) for _ in range(6)]}
        (threads,) = pools
        assert [each.result(60) for each in [threads.submit(int) for _ in range(40)]] == [0] * 40


def test_nobody_gets_threads_that_another_caller_is_still_starting(monkeypatch):
    start, asked = call_pool._start_all, threading.Event()

    def slowly(threads, size):
        asked.wait(60)
        threading.Event().wait(0.1)
        start(threads, size)

    monkeypatch.setattr(call_pool, "_start_all", slowly)
    crew, both = Crew(4), threading.Barrier(2, action=asked.set)

    def ask():
        both.wait(60)
        return len(crew.here()._threads)

    with ThreadPoolExecutor(2) as pool:
        assert [each.result() for each in [pool.submit(ask) for _ in range(2)]] == [4, 4]


@pytest.mark.parametrize("ask", [dp_evaluate, lambda **call: asyncio.run(dp_aevaluate(**call))])
def test_where_no_more_threads_start_nothing_is_charged(ask, monkeypatch, paid):
    start, started = threading.Thread.start, itertools.count()

    def with_little_room(thread):
        if thread.name.startswith("dpicl") and next(started) >= 20:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(chains_module, "_CREW", Crew(32))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", with_little_room)
        with pytest.raises(ConfigurationError, match="the system allows fewer"):
            ask(**BASE, **paid)
    assert cost(paid) == 0.0
    ask(**BASE, **paid)
    assert cost(paid) == 0.5


def test_two_candidates_at_once_share_what_was_set_aside_without_a_refusal(paid):
    chains = {"a": TEMPLATE | MODEL, "b": chat("b") | MODEL}
    dp_choose(chains, evaluator=EXACT, epsilon=1.0, part="choose", **paid)
    ready = threading.Barrier(2)

    def ask(chain):
        ready.wait(60)
        return dp_evaluate(chain, evaluators=EXACT, epsilon=1.0, part="test", **paid)

    with ThreadPoolExecutor(2) as pool:
        found = [each.result() for each in [pool.submit(ask, chain) for chain in chains.values()]]
    assert len(found) == 2
    assert cost(paid) == 2.0
