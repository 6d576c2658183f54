"""`dp_evaluate`: what it measures, what it refuses, what it charges, and that nobody else sees a record."""

from __future__ import annotations

import asyncio
import functools
import io
import json
import math
import queue
import re
import threading
from collections import Counter
from concurrent.futures import Future
from contextlib import redirect_stderr, redirect_stdout
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.globals import set_debug, set_llm_cache
from langchain_core.language_models import FakeListChatModel
from langchain_core.language_models.chat_models import agenerate_from_stream
from langchain_core.language_models.llms import LLM
from langchain_core.messages import AIMessageChunk
from langchain_core.output_parsers import JsonOutputParser, StrOutputParser
from langchain_core.outputs import ChatGenerationChunk
from langchain_core.prompts import ChatPromptTemplate, FewShotPromptTemplate, PromptTemplate
from langchain_core.runnables import RunnableLambda
from langchain_core.tracers.context import collect_runs
from scipy import stats

from langchain_dpicl import Budget, PrivateExamples, verify_report
from langchain_dpicl.backends.private_calls.call import OpaqueValue
from langchain_dpicl.evaluation import Exact, Judge, Pure, Score, dp_achoose, dp_aevaluate, dp_evaluate
from langchain_dpicl.evaluation.evaluate import silent_question
from langchain_dpicl.exceptions import (
    CapabilityError,
    ConfigurationError,
    DPICLError,
    PrivacyBudgetError,
    UnsilencableModelError,
)
from langchain_dpicl.privacy.extensions.outcome_counts import OutcomePlan, OutcomeTable
from langchain_dpicl.privacy.extensions.value_counts import DiscreteLaplaceMechanism
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM
from langchain_dpicl.privacy.mechanisms.release_plan import PoissonUnits
from tests.sealed_files import assert_found

TEMPLATE = PromptTemplate.from_template("{text}\nQueue:")
FAR = 25
"""Counts at epsilon 2, half of it for each of two tables, are off by more with a chance below 1e-10."""


class Reader(LLM):
    """Answers by what stands in the prompt; raises on one word, and is slow on none."""

    rule: dict[str, str]
    asked: int = 0

    @property
    def _llm_type(self) -> str:
        return "reader"

    def _call(self, prompt, stop=None, run_manager=None, **kwargs):
        if "broken" in prompt:
            raise ValueError(prompt)
        return next((answer for word, answer in self.rule.items() if word in prompt), "no idea")


def examples(dataset_id="tickets", broken=0, **declared):
    records = [{"text": "it was declined", "queue": "card"}] * 600 + [{"text": "not sent", "queue": "transfer"}] * 200
    records += [{"text": "broken CANARY-77", "queue": "transfer"}] * broken
    return PrivateExamples(
        records, label_key="queue", labels=("card", "transfer"), public_size=800, dataset_id=dataset_id, **declared
    )


def reader(**rule):
    return Reader(rule=rule or {"declined": "Card.", "sent": "**transfer**"})


def budget():
    return Budget(epsilon=20.0, delta=1e-5)


def assert_verified_unless_edited(found, edit):
    told = found.to_dict()
    assert verify_report(found.report).ok
    assert verify_report(told).ok
    edit(told["released"])
    assert_found(verify_report(told), "content_digest: the content was changed")
    assert_found(verify_report({**found.report, "released": told["released"]}), "content_digest: expected one")


def test_counts_and_figures_are_those_of_the_chain():
    found = dp_evaluate(TEMPLATE | reader(), examples(), evaluators=Exact(), budget=budget(), epsilon=2.0)
    truth = {("card", "card"): 600, ("transfer", "transfer"): 200}
    assert all(abs(count - truth.get(cell, 0)) < FAR for cell, count in found.confusion.items())
    assert all(abs(count - {1.0: 800}.get(score, 0)) < FAR for score, count in found.by_score["exact"].items())
    assert found.to_dict()["released"]["exact"]["by_score"] == [list(one) for one in found.by_score["exact"].items()]
    assert found.accuracy.low > 0.9
    assert found.recall("transfer").low > 0.8
    assert "epsilon 2" in str(found)
    assert "name no label" not in str(found)
    assert_verified_unless_edited(found, lambda released: released["exact"].update(mean=[0.97, 0.95, 0.99]))


@pytest.mark.parametrize("labels", [4, 10])
def test_the_accuracy_of_many_labels_is_about_as_sharp_as_without_noise(labels):
    """Of 2,000 records at epsilon .5. Noise that moves the width so far has a chance below 1e-6."""
    names = [f"queue{number}" for number in range(labels)]
    words = [names[(place + (place % 5 == 0)) % labels] for place in range(2_000)]
    records = [{"says": word, "queue": names[place % labels]} for place, word in enumerate(words)]
    private = PrivateExamples(records, text_key="says", label_key="queue", labels=names, public_size=2_000)
    chain = PromptTemplate.from_template("{says}\nQueue:") | Reader(rule={f"{name}\n": name for name in names})
    found = dp_evaluate(chain, private, evaluators=Exact(), budget=budget(), epsilon=0.5).accuracy
    assert abs(found.value - 0.8) < 0.05
    assert found.half_width <= 1.1 * 1.96 * (0.8 * 0.2 / 2_000) ** 0.5


@pytest.mark.parametrize(("where", "other"), [
    (("widths",), [[6]]), (("outcomes", "table", "widths"), [6]), (("outcomes", "scale"), 0.5),
], ids=str)  # fmt: skip
def test_a_report_that_shows_the_noise_of_one_table_for_two_is_refused(where, other):
    found = dp_evaluate(TEMPLATE | reader(), examples(), evaluators=Exact(), budget=budget(), epsilon=2.0)
    told = json.loads(found.to_json())
    assert verify_report(told).ok
    place = functools.reduce(dict.get, where[:-1], told["plan"])
    place[where[-1]] = other
    assert any("plan" in problem for problem in verify_report(told).problems)


def test_a_record_that_fails_counts_as_wrong_and_moves_no_other():
    found = dp_evaluate(TEMPLATE | reader(), examples(broken=100), evaluators=Exact(), budget=budget(), epsilon=2.0)
    assert abs(found.confusion["transfer", "other"] - 100) < FAR
    assert abs(found.confusion["card", "card"] - 600) < FAR


def test_answers_that_name_no_label_are_told_where_they_are_many():
    chain = TEMPLATE | reader(declined="it is a card, or a transfer")
    found = dp_evaluate(chain, examples(), evaluators=Exact(), budget=budget(), epsilon=2.0)
    assert re.search(r"exact: at least [89]\d % of the answers name no label, or their calls failed; ask", str(found))


class ServerIsBusyError(Exception):
    """What a server that is asked too often answers."""

    status_code = 429


class Throttled(LLM):
    """Answers no prompt before its sixth attempt."""

    attempts: Counter[str]

    @property
    def _llm_type(self) -> str:
        return "throttled"

    def _call(self, prompt, stop=None, run_manager=None, **kwargs):
        self.attempts[prompt] += 1
        if "record" in prompt and self.attempts[prompt] < 6:
            raise ServerIsBusyError
        return "card"


@pytest.mark.parametrize("limits", [{}, {"timeout": 100}], ids=["default", "timeout"])
def test_right_answers_of_a_server_that_refuses_at_first_count_as_right(limits, monkeypatch):
    monkeypatch.setattr("langchain_dpicl.backends.private_calls.call.time", SimpleNamespace(sleep=lambda seconds: None))
    records = [{"text": f"record {number}", "queue": "card"} for number in range(80)]
    private = PrivateExamples(records, label_key="queue", labels=("card", "transfer"), public_size=80)
    chain = TEMPLATE | Throttled(attempts=Counter())
    found = dp_evaluate(chain, private, evaluators=Exact(), budget=budget(), epsilon=2.0, **limits)
    assert abs(found.confusion["card", "card"] - 80) < FAR
    assert abs(found.confusion["card", "other"]) < FAR


def test_marks_judges_and_several_evaluators_pay_together():
    length = Score(Pure(lambda inputs, outputs, reference: reference == outputs.lower().strip(".* ")), name="same")
    judge = Judge(
        PromptTemplate.from_template("{text} | {answer} | {queue}") | reader(declined="5", sent="2"), marks=(1, 2, 5)
    )
    spent = budget()
    found = dp_evaluate(TEMPLATE | reader(), examples(), evaluators=[length, judge], budget=spent, epsilon=4.0)
    assert abs(found.tables["judge"]["", "5"] - 600) < FAR
    assert found.mean("judge").low < 4.25 < found.mean("judge").high
    assert found.mean("same").low > 0.9
    assert spent.remaining_epsilon == pytest.approx(16.0, abs=0.01)
    assumed = spent.report().to_dict()["shares"][0]["components"][0]["public"]["assumed"]
    assert len(assumed) == 1
    assert "lambda" in assumed[0]


def test_a_difference_is_of_the_same_records():
    found = dp_evaluate(
        TEMPLATE | reader(), examples(), evaluators=Exact(), baseline=TEMPLATE | reader(declined="card"),
        budget=budget(), epsilon=2.0,
    )  # fmt: skip
    assert abs(found.tables["exact"]["1", "0"] - 200) < FAR
    assert found.difference().low < 0.25 < found.difference().high
    assert found.mean().low > 0.9
    with pytest.raises(ConfigurationError, match="recall"):
        found.recall("card")
    with pytest.raises(ConfigurationError, match="confusion: expected an Exact evaluator and no baseline"):
        _ = found.confusion


def test_asked_again_it_returns_the_kept_result_and_other_arguments_pay():
    spent, private, model = budget(), examples(), reader()
    first = dp_evaluate(TEMPLATE | model | StrOutputParser(), private, evaluators=Exact(), budget=spent, epsilon=1.0)
    again = dp_evaluate(TEMPLATE | model | StrOutputParser(), private, evaluators=Exact(), budget=spent, epsilon=1.0)
    assert again.tables == first.tables
    assert spent.remaining_epsilon == pytest.approx(19.0, abs=0.01)
    dp_evaluate(TEMPLATE | reader(), private, evaluators=Exact(), budget=spent, epsilon=1.0)
    assert spent.remaining_epsilon == pytest.approx(18.0, abs=0.01)


def test_a_sample_reads_about_so_many_units_and_users_count_once():
    records = [{"text": "it was declined", "queue": "card", "user": str(number // 4)} for number in range(3_200)]
    private = PrivateExamples(
        records, label_key="queue", labels=("card", "transfer"), public_size=800, unit_key="user", dataset_id="users"
    )
    found = dp_evaluate(TEMPLATE | reader(), private, evaluators=Exact(), budget=budget(), epsilon=2.0, sample=200)
    assert 80 < sum(found.confusion.values()) < 320


async def test_it_can_be_awaited_and_many_at_once():
    spent = budget()
    one, two = await asyncio.gather(*(
        dp_aevaluate(TEMPLATE | reader(), examples(name), evaluators=Exact(), budget=spent, epsilon=2.0)
        for name in ("one", "two")
    ))  # fmt: skip
    assert min(one.accuracy.low, two.accuracy.low) > 0.9


def test_no_observer_sees_a_run_or_a_record():
    seen = io.StringIO()
    set_debug(True)
    try:
        with redirect_stdout(seen), redirect_stderr(seen), collect_runs() as runs:
            found = dp_evaluate(
                TEMPLATE | reader(), examples(broken=5), evaluators=Exact(), budget=budget(), epsilon=2.0
            )
            control = (TEMPLATE | reader()).invoke({"text": "declined CONTROL"})
    finally:
        set_debug(False)
    assert control == "Card."
    assert "CONTROL" in seen.getvalue()
    assert "CANARY" not in seen.getvalue() + repr(found) + str(found.report)
    assert len(runs.traced_runs) == 1


def with_partial():
    return TEMPLATE.partial(text=lambda: "x") | reader()


REFUSED = {
    "a function": lambda: TEMPLATE | reader() | RunnableLambda(str.upper),
    "fallbacks": lambda: TEMPLATE | reader().with_fallbacks([reader()]),
    "a function in the template": with_partial,
    "mustache": lambda: PromptTemplate.from_template("{{text}}", template_format="mustache") | reader(),
    "no prompt": reader,
    "a subclass of a template": lambda: (
        type("Mine", (PromptTemplate,), {})(template="{text}", input_variables=["text"]) | reader()
    ),
    "an agent-like dict": lambda: {"text": RunnableLambda(lambda x: x)} | TEMPLATE | reader(),
    "a placeholder of messages": lambda: ChatPromptTemplate.from_messages([("placeholder", "{text}")]) | reader(),
}


class Relay(LLM):
    """Hands each prompt to a thread that was started before, which invokes an inner model there."""

    asked: Any

    @property
    def _llm_type(self) -> str:
        return "relay"

    def _call(self, prompt, stop=None, run_manager=None, **kwargs):
        answer = Future()
        self.asked.put((prompt, answer))
        return answer.result()


class AwaitedRelay(Reader):
    """Does so only where it is awaited."""

    relay: Any

    async def _acall(self, prompt, stop=None, run_manager=None, **kwargs):
        return await asyncio.to_thread(self.relay, prompt)


class ChatRelay(FakeListChatModel):
    """A chat model of the same kind, whose awaited answer is put together from its stream."""

    relay: Any
    responses: tuple[str, ...] = ("card",)

    async def _astream(self, messages, stop=None, run_manager=None, **kwargs):
        said = await asyncio.to_thread(self.relay, messages[0].content)
        yield ChatGenerationChunk(message=AIMessageChunk(said))

    async def _agenerate(self, messages, stop=None, run_manager=None, **kwargs):
        return await agenerate_from_stream(self._astream(messages))


@pytest.fixture
def relay():
    asked = queue.SimpleQueue()

    def work():
        inner = FakeListChatModel(responses=["card"])
        while (found := asked.get()) is not None:
            prompt, answer = found
            try:
                answer.set_result(inner.invoke(prompt).content)
            except Exception as error:
                answer.set_exception(error)

    thread = threading.Thread(target=work)
    thread.start()
    yield Relay(asked=asked)
    asked.put(None)
    thread.join()


@pytest.mark.parametrize("place", ["chain", "baseline", "judge"])
def test_a_model_that_starts_runs_in_an_older_thread_is_refused_and_nothing_is_charged(relay, place):
    """The control comes first: the runs of that thread reach LangChain's cache."""
    seen, spender = InMemoryCache(), budget()
    set_llm_cache(seen)
    try:
        relay.invoke("CONTROL")
        assert "CONTROL" in str(seen._cache)
        call = {"chain": TEMPLATE | reader(), "evaluators": Exact()}
        judge = PromptTemplate.from_template("{text} {answer}") | relay
        call |= {"evaluators": Judge(judge)} if place == "judge" else {place: TEMPLATE | relay}
        with pytest.raises(UnsilencableModelError, match="starts LangChain runs"):
            dp_evaluate(**call, private=examples(), budget=spender)
    finally:
        set_llm_cache(None)
    assert "declined" not in str(seen._cache)
    assert spender.remaining_epsilon == 20.0


AWAITED = {
    "a completion model": lambda relay: AwaitedRelay(rule={"declined": "card"}, relay=relay._call),
    "a chat model": lambda relay: ChatRelay(relay=relay._call),
}


@pytest.mark.parametrize("kind", AWAITED)
async def test_a_model_that_does_so_only_where_it_is_awaited_is_refused_where_it_would_be(kind, relay):
    seen, spender, model = InMemoryCache(), budget(), AWAITED[kind](relay)
    call = {"chain": TEMPLATE | model, "evaluators": Exact(), "private": examples(), "budget": spender, "epsilon": 1.0}
    set_llm_cache(seen)
    try:
        with pytest.raises(UnsilencableModelError, match="starts LangChain runs"):
            await dp_aevaluate(**call)
        with pytest.raises(UnsilencableModelError, match="starts LangChain runs"):
            await dp_achoose(
                {"a": TEMPLATE | reader(), "b": TEMPLATE | model}, call["private"], evaluator=Exact(), budget=spender
            )
        assert spender.remaining_epsilon == 20.0
        await asyncio.to_thread(lambda: dp_evaluate(**call))  # blocking, it goes another way
    finally:
        set_llm_cache(None)
    assert "declined" not in str(seen._cache)


def test_a_template_that_shows_too_little_of_a_text_to_recognize_it_is_refused():
    spender = budget()
    chain = PromptTemplate.from_template("{text:.3}") | reader()
    with pytest.raises(CapabilityError, match="characters"):
        dp_evaluate(chain, examples(), evaluators=Exact(), budget=spender)
    assert spender.remaining_epsilon == 20.0


@pytest.mark.parametrize("template", ["{text!z}", "{text:d}", "{text: Queue}"])
def test_a_template_with_a_format_that_text_does_not_have_is_refused(template):
    spender = budget()
    with pytest.raises(CapabilityError, match="format specifications"):
        dp_evaluate(PromptTemplate.from_template(template) | reader(), examples(), evaluators=Exact(), budget=spender)
    assert spender.remaining_epsilon == 20.0


@pytest.mark.parametrize("kind", REFUSED)
def test_a_chain_of_other_parts_is_refused_and_nothing_is_charged(kind):
    spent = budget()
    with pytest.raises(DPICLError):
        dp_evaluate(REFUSED[kind](), examples(), evaluators=Exact(), budget=spent, epsilon=1.0)
    assert spent.remaining_epsilon == 20.0


@pytest.mark.parametrize(
    "evaluators", [[], [lambda run, example: 1], len, "exact_match"], ids=["none", "functions", "a function", "a name"]
)
def test_other_evaluators_are_refused(evaluators):
    with pytest.raises(ConfigurationError, match="evaluators"):
        dp_evaluate(TEMPLATE | reader(), examples(), evaluators=evaluators, budget=budget(), epsilon=1.0)


def test_an_own_function_has_to_be_declared_pure_and_its_marks_listed():
    with pytest.raises(ConfigurationError, match="Pure"):
        Score(len)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="marks"):
        Score(Pure(len), marks=(1.0,))


def test_a_template_that_shows_the_label_is_refused():
    with pytest.raises(ConfigurationError, match="reference"):
        dp_evaluate(
            PromptTemplate.from_template("{text} {queue}") | reader(), examples(), evaluators=Exact(), budget=budget()
        )


@pytest.mark.parametrize("place", ["chain", "baseline", "judge"])
@pytest.mark.parametrize("prompt", [
    PromptTemplate.from_template("Queue:"), PromptTemplate.from_template("{text}").partial(text="lost"),
    ChatPromptTemplate.from_messages([("human", "Which queue?")]),
], ids=["text", "partial", "chat"])  # fmt: skip
def test_a_prompt_without_a_variable_is_refused_and_nothing_is_charged(prompt, place):
    spent, same = budget(), prompt | reader()
    call = {"chain": TEMPLATE | reader(), "evaluators": Exact()}
    call |= {"evaluators": Judge(same)} if place == "judge" else {place: same}
    with pytest.raises(ConfigurationError, match=f"{place}: expected a template with a variable among .*'text'"):
        dp_evaluate(**call, private=examples(), budget=spent)
    assert spent.remaining_epsilon == 20.0


def test_stock_parts_are_taken():
    shots = FewShotPromptTemplate(
        examples=[{"q": "lost", "a": "card"}], example_prompt=PromptTemplate.from_template("{q} {a}"),
        suffix="{question}\nQueue:", input_variables=["question"],
    )  # fmt: skip
    spent, private = budget(), examples()
    chat = ChatPromptTemplate.from_messages([("system", "Be brief."), ("human", "{text}")])
    told = (
        chat
        | FakeListChatModel(responses=['{"queue": "card"}'])
        | JsonOutputParser()
        | RunnableLambda(Pure(lambda x: x["queue"]))
    )
    for chain, inputs in ((shots | reader(), {"question": "text"}), (told, None)):
        found = dp_evaluate(chain, private, evaluators=Exact(), budget=spent, epsilon=2.0, inputs=inputs)
        assert found.recall("card").low > 0.9


def test_the_ticket_is_burnt_before_the_first_record_is_read_and_stays_charged():
    spent = Budget(epsilon=1.0, delta=1e-5)
    private = examples()
    with pytest.raises(PrivacyBudgetError):
        dp_evaluate(TEMPLATE | reader(), private, evaluators=Exact(), budget=spent, epsilon=2.0)
    dp_evaluate(TEMPLATE | reader(), private, evaluators=Exact(), budget=spent, epsilon=1.0)
    with pytest.raises(PrivacyBudgetError):
        dp_evaluate(TEMPLATE | reader(), private, evaluators=Exact(), budget=spent, epsilon=0.5)


def cells(units, evaluator=None, model=None):
    """The rows of units: what leaves the question, before the noise."""
    question = silent_question(
        examples(), {"chain": TEMPLATE | (model or reader())}, evaluator or Exact(), inputs=None, timeout=None
    )
    return question.ask([OpaqueValue(tuple(unit)) for unit in units]).run().take()


CARD = {"text": "it was declined", "queue": "card"}
SENT = {"text": "not sent", "queue": "transfer"}
BROKEN = {"text": "broken", "queue": "transfer"}


@pytest.mark.parametrize("more", [[CARD], [SENT] * 5, [BROKEN], [], [{"text": "}{ {x}", "queue": "card"}]], ids=str)
def test_a_unit_more_adds_one_row_and_moves_no_other(more):
    """The neighbour contract of the rows."""
    others = [[CARD], [SENT], [BROKEN], [CARD, CARD]]
    without, with_it = cells(others), cells([*others, more])
    assert with_it[:-1].tolist() == without.tolist()
    assert with_it.shape == (5, 2)
    assert tuple(with_it[-1]) in ({(-1.0, -1.0)} if not more else {(cell, cell in {0.0, 4.0}) for cell in range(6)})


def remembering():
    seen = []

    def mark(inputs, outputs, reference):
        seen.append(inputs)
        return len(seen) % 2

    return Score(Pure(mark))


def test_planted_bug_an_evaluator_that_remembers_breaks_the_neighbour_contract():
    assert (
        cells([[CARD], [SENT]], remembering())[-1].tolist()
        != cells([[CARD], [CARD], [SENT]], remembering())[-1].tolist()
    )


PLANTS = {
    "nothing": (1, True, 1.0),
    "a unit that counts once per record": (6, True, 1.0),
    "noise of one table for several": (1, True, 0.5),
    "no noise": (1, False, 1.0),
}


@pytest.mark.parametrize("plant", PLANTS)
def test_planted_bugs_are_seen_by_the_neighbour_game(plant):
    """A unit more or less: how much likelier is it that all its cells are high? Alarm 1e-6 for each chance."""
    runs, (records, is_noisy, part) = 4_000, PLANTS[plant]
    release = OutcomePlan(PoissonUnits(1.0), OutcomeTable((2, 2)), DiscreteLaplaceMechanism(part), "add_remove")

    def high(rows):
        tables = release.release(rows, rng=SYSTEM_RANDOM) if is_noisy else release.table.counts(rows)
        return all(table[0] >= 1 for table in tables)

    with_it, without = (sum(high(np.zeros((count, 2))) for _ in range(runs)) for count in (records, 0))
    most = stats.beta.ppf(1 - 1e-6, without + 1, runs - without)
    least = stats.beta.ppf(1e-6, with_it, runs - with_it + 1) if with_it else 0.0
    assert (math.log(least / most) > 1.0) == (plant != "nothing")
