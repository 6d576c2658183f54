"""PromptPATEExampleSelector: in LangChain's own templates, growing, kept in files, and free once the labels are out."""

from __future__ import annotations

import asyncio
import copy
import json
import math
import pickle
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from langchain_core.embeddings import Embeddings
from langchain_core.example_selectors import BaseExampleSelector
from langchain_core.language_models import FakeListChatModel
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import (
    ChatPromptTemplate,
    FewShotChatMessagePromptTemplate,
    FewShotPromptTemplate,
    PromptTemplate,
)
from langchain_core.runnables import RunnableLambda
from langchain_core.vectorstores import InMemoryVectorStore

from langchain_dpicl import (
    DPFewShotPromptTemplate,
    EmbeddedLLM,
    FewShotTask,
    LabelAnswers,
    LabelledPool,
    PrivateExamples,
    PromptPATEExampleSelector,
    PromptPATELabeler,
    Rows,
    verify_report,
)
from langchain_dpicl.backends import TextVoteBackend
from langchain_dpicl.backends.sync_async import run_in_thread
from langchain_dpicl.exceptions import (
    CapabilityError,
    ConfigurationError,
    LedgerError,
    ModelCallError,
    NoPrivacyBudgetError,
    PrivacyBudgetExceededError,
    RunInterruptedError,
)
from langchain_dpicl.options import ByLength, Similar, StrategyLike, Student
from langchain_dpicl.pate import example_selector
from langchain_dpicl.released.labelled_pool import PoolEntry
from tests.contracts.front_room import CANARY, CHARGED, REFUSED, AsyncObserver, Observer
from tests.durable import until
from tests.labelling_doubles import (
    CARD,
    GAUSSIAN,
    LABELS,
    MUTE,
    PLAIN,
    TEACHERS,
    WIRE,
    Spy,
    counts,
    examples,
    fails,
    house,
    labeler,
    lines,
    loud,
)
from tests.sealed_files import sealed
from tests.unit_tests.test_private_frames import locals_of_ours, shows_private

pytestmark = pytest.mark.usefixtures("remembered_prices")

BRACED = "where is {my} card? {0} }{"
INPUTS = [CARD, WIRE, BRACED, "send it {home}", "a card in blue", "pay to Peru"]
EXAMPLE = PromptTemplate.from_template("text: {text}\nqueue: {queue}")
SUFFIX = "text: {input}\nqueue:"
STUDENT = Student(shots=2, num_candidates=4, num_validation=2)
LEARNS = STUDENT.replace(llm=Spy())


def selector(private: PrivateExamples | None = None, *, budget: Any = None, **options: Any) -> Any:
    """A selector whose labels are those of `by_query`."""
    return PromptPATEExampleSelector.from_private_examples(
        private or examples(), budget=budget or house(), **_given(options)
    )


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    return {"llm": Spy(), "public_inputs": INPUTS, "max_queries": 9, "student": STUDENT, **loud(**options)}


def built(awaited: bool, private: PrivateExamples | None = None, *, budget: Any = None, **options: Any) -> Any:
    """Is `selector`, by either door."""
    if not awaited:
        return selector(private, budget=budget, **options)
    make = PromptPATEExampleSelector.afrom_private_examples
    return asyncio.run(make(private or examples(), budget=budget or house(), **_given(options)))


async def test_the_awaited_door_labels_in_no_thread_that_a_cancellation_leaves_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def cancelled(*_: Any, **__: Any) -> None:
        raise asyncio.CancelledError

    monkeypatch.setattr(PromptPATELabeler, "arun", cancelled)
    monkeypatch.setattr(PromptPATELabeler, "run", lambda *_, **__: pytest.fail("labelled in a thread"))
    with pytest.raises(asyncio.CancelledError):
        await PromptPATEExampleSelector.afrom_private_examples(examples(), budget=house(), **_given({}))


async def test_the_awaited_door_counts_inputs_without_the_ledger_on_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def cancelled(*_: Any, **__: Any) -> None:
        raise asyncio.CancelledError

    readers: list[threading.Thread] = []
    report = PromptPATELabeler.report
    read = property(lambda run: (readers.append(threading.current_thread()), report.__get__(run))[1])
    monkeypatch.setattr(PromptPATELabeler, "report", read)
    monkeypatch.setattr(PromptPATELabeler, "arun", cancelled)
    with pytest.raises(asyncio.CancelledError):
        await PromptPATEExampleSelector.afrom_private_examples(examples(), budget=house(), **_given({}))
    assert readers
    assert threading.current_thread() not in readers


def released(**options: Any) -> Any:
    """A selector over a pool without any teachers or ledger."""
    return PromptPATEExampleSelector(pool(), **options)


def pool(texts: Mapping[str, str | None] | None = None) -> LabelledPool:
    """Inputs whose labels were given; None: rejected."""
    given = {t: "card" if "card" in t else "transfer" for t in INPUTS} if texts is None else texts
    plan = {
        "example_prompt": EXAMPLE.template,
        "prefix": "",
        "suffix": SUFFIX,
        "example_separator": "\n\n",
        "verbalizers": {label: [f" {label}"] for label in LABELS},
        "votes": "hard",
        "text_key": "text",
        "content_free_inputs": ["N/A"],
    }
    entries = [PoolEntry({"text": t}, label, "rejected" if label is None else "public") for t, label in given.items()]
    shown = {label: label for label in LABELS}
    return LabelledPool(tuple(entries), label_key="queue", labels=LABELS, shown=shown, report={}, plan=plan)


class Words(Embeddings):
    """Counts two words and the length of a text."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [self.embed_query(text) for text in texts]

    def embed_query(self, text: str) -> list[float]:
        return [1.0 + 9 * text.count("card"), 1.0 + 9 * text.count("it "), len(text) / 100]


NEAR = Similar(Words(), k=2)
STRATEGIES: dict[str, StrategyLike] = {
    "validated": "validated",
    "similarity": NEAR,
    "mmr": NEAR.replace(fetch_k=4),
    "length": ByLength(max_length=15),
}
strategies = pytest.mark.parametrize("strategy", STRATEGIES)


def joined(shown: list[dict[str, str]], query: str) -> str:
    """A few-shot prompt, byte for byte."""
    parts = [f"text: {example['text']}\nqueue: {example['queue']}" for example in shown]
    return "\n\n".join([*parts, f"text: {query}\nqueue:"])


def stock(chosen: Any, cls: Any = FewShotPromptTemplate) -> Any:
    return cls(example_selector=chosen, example_prompt=EXAMPLE, suffix=SUFFIX, input_variables=["input"])


def chat(chosen: Any) -> FewShotChatMessagePromptTemplate:
    turns = ChatPromptTemplate.from_messages([("human", "{text}"), ("ai", "{queue}")])
    return FewShotChatMessagePromptTemplate(example_selector=chosen, example_prompt=turns, input_variables=["input"])


# -- from private examples to demonstrations ---------------------------------------------------------------------


@pytest.mark.parametrize("teachers", TEACHERS)
@pytest.mark.parametrize("awaited", [False, True])
def test_labels_are_paid_for_once_and_everything_after_them_is_free(teachers: str, awaited: bool) -> None:
    budget, spy = house("replace_one"), Spy()
    made = built(awaited, budget=budget, llm=spy, rows=TEACHERS[teachers], public_inputs=[*INPUTS, MUTE])
    assert isinstance(made, BaseExampleSelector)
    assert {e["text"]: e["queue"] for e in made.examples} == {t: "card" if "card" in t else "transfer" for t in INPUTS}
    assert made.rejected == [{"text": MUTE}]
    assert made.waiting == []
    assert made.queries_left == 2
    paid, asked = lines(budget), len(spy.private)
    shown = made.select_examples({"input": "x"})
    assert asyncio.run(made.aselect_examples({"input": "x"})) == shown
    assert stock(made, DPFewShotPromptTemplate).format(input="x") == joined(shown, "x")
    made.choose_student(STUDENT.replace(llm=Spy()))
    made.with_strategy(NEAR).select_examples({"input": "x"})
    made.add_public_example({"text": "new card", "queue": "card"})
    assert (lines(budget), len(spy.private)) == (paid, asked)
    assert sum(n for name, n in counts(budget).items() if "reserve" in name) == (1 if teachers == "one_sample" else 7)
    assert verify_report(made.pool).ok
    assert made.epsilon == made.privacy_report["epsilon"] == 2e5
    assert made.privacy_report["private"] is True
    budget.verify()


def knows(needed: str, private: str = "card") -> Callable[..., Mapping[str, float]]:
    """A student that is right about an input only behind one demonstration; teachers are always right."""

    def answers(prompt: str, prefix: tuple[bytes, ...]) -> Mapping[str, float]:
        *shown, query = prompt.split("\n\n")
        is_card = private in query.split("queue:", maxsplit=1)[0]
        is_right = CANARY in prompt or any(needed in example for example in shown)
        card = 0.9 if is_card == is_right else 0.1
        return {" card": card, " transfer": 1 - card}

    return answers


@pytest.mark.parametrize("awaited", [False, True])
def test_the_prompt_that_does_best_on_held_back_labels_is_shown(awaited: bool) -> None:
    found = []
    for needed in INPUTS[:3]:
        student = STUDENT.replace(llm=Spy(knows(needed)), num_candidates=40)
        made = selector(student=student.replace(seed=INPUTS.index(needed)))
        if awaited:
            asyncio.run(made.achoose_student(student))
        choice = made.student
        shown = [example["text"] for example in made.select_examples({})]
        texts = [entry.fields["text"] for entry in made.pool.entries]
        assert shown == [texts[place] for place in choice.demonstrations]
        assert len(shown) == 2
        held_back = [texts[place] for place in choice.held_back]
        assert len(held_back) == 2
        assert not set(held_back) & {texts[place] for one in choice.candidates for place in one.places}
        if needed not in held_back:
            assert needed in shown
            assert choice.accuracy == 1.0
            found.append(needed)
    assert found


async def test_a_cancelled_search_ends_with_the_work_of_its_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended = threading.Event(), threading.Event()

    def slow(*_: object) -> None:
        begun.set()
        time.sleep(0.2)
        ended.set()

    monkeypatch.setattr(example_selector, "_scorer_of", slow)
    task = asyncio.create_task(released().achoose_student(LEARNS))
    await until(begun.is_set)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


def test_the_same_seed_chooses_the_same_prompt_and_moves_no_noise() -> None:
    first, again = (selector(student=STUDENT.replace(seed=3)) for _ in range(2))
    assert first.student == again.student
    assert first.select_examples({}) == again.select_examples({})
    other = [selector(student=STUDENT.replace(seed=seed)).student.demonstrations for seed in range(4, 9)]
    assert any(places != first.student.demonstrations for places in other)


def test_a_student_of_its_own_sees_public_text_only() -> None:
    teachers, student = Spy(), Spy()
    selector(llm=teachers, student=STUDENT.replace(llm=student))
    assert student.private == []
    assert student.public
    assert CANARY not in repr(student.public)
    assert {prompt.count("text: ") for prompt in teachers.public} == {1}  # inputs alone: no student's prompt
    assert max(prompt.count("text: ") for prompt in student.public) == 3


@pytest.mark.parametrize("wanted", [True, False])
def test_a_student_is_calibrated_where_it_is_asked_to(wanted: bool) -> None:
    student = Spy()
    selector(student=STUDENT.replace(llm=student, calibrate=wanted), answers=PLAIN.replace(content_free=("nothing",)))
    free = [prompt for prompt in student.public if prompt.endswith("text: nothing\nqueue:") and "\n\n" in prompt]
    assert bool(free) is wanted


def test_other_strategies_search_for_no_prompt() -> None:
    spy = Spy()
    made = selector(llm=spy, strategy=NEAR)
    assert made.student is None
    assert {prompt.count("text: ") for prompt in spy.public} == {1}
    assert len(made.select_examples({"input": CARD})) == 2


@pytest.mark.parametrize("student", [None, FakeListChatModel(responses=["card"])], ids=["the teachers' own", "another"])
def test_models_that_only_write_teach_and_learn(student: Any) -> None:
    wanted = STUDENT.replace(llm=student)
    answers = LabelAnswers(votes="text", abstain_below=0.1)
    made = selector(llm=FakeListChatModel(responses=["Card."]), answers=answers, student=wanted)
    assert {example["queue"] for example in made.examples} == {"card"}
    assert made.student.accuracy == 1.0
    assert PromptPATEExampleSelector.from_run(made._labeler, student=wanted).student == made.student


def test_a_student_that_only_writes_cannot_stand_beside_teachers_with_probabilities() -> None:
    budget = house()
    with pytest.raises(CapabilityError):
        selector(student=STUDENT.replace(llm=FakeListChatModel(responses=["card"])), budget=budget)
    assert lines(budget) == []


FAULTS: list[dict[str, Any]] = [
    {"student": "gpt"},
    {"student": STUDENT.replace(llm="gpt")},
    {"student": STUDENT.replace(llm=TextVoteBackend(FakeListChatModel(responses=["card"])), calibrate=True)},
    {"strategy": "nearest"},
    {"strategy": "similarity"},
    {"strategy": Similar("openai:embeddings")},
    {"strategy": Similar(None)},
    {"strategy": Similar(InMemoryVectorStore)},
    {"strategy": ByLength(get_text_length=3)},
    {"strategy": NEAR.to_dict()},
    {"public_inputs": "one text"},
    {"num_shots": 2},
    {"unknown": 1},
    {"budget": "a budget"},
]


@pytest.mark.parametrize("fault", FAULTS, ids=[str(number) for number in range(len(FAULTS))])
@pytest.mark.parametrize("awaited", [False, True])
def test_a_public_fault_binds_nothing_and_asks_nothing_private(fault: dict[str, Any], awaited: bool) -> None:
    private, spy, budget = examples(), Spy(), house()
    with pytest.raises(ConfigurationError):
        built(awaited, private, **{"llm": spy, "budget": budget, **fault})
    assert (lines(budget), spy.private) == ([], [])
    assert budget.report().to_dict()["promised"]["epsilon"] == 0.0
    if not awaited:
        selector(private, budget=house(), public_inputs=[CARD, WIRE])


def test_refusals_and_charges_are_told() -> None:
    observer, later = Observer(), AsyncObserver()
    made: list[Any] = []

    def run(_: Any) -> None:
        made.append(selector(max_queries=len(INPUTS)))
        made[0].add_example({"text": "one more"})

    async def arun(_: Any) -> None:
        await made[0].aadd_example({"text": "one more"})

    with pytest.raises(PrivacyBudgetExceededError):
        RunnableLambda(run).invoke(0, {"callbacks": [observer]})
    assert [data["tickets"] for data in observer.named(CHARGED)] == [1] * len(INPUTS)
    assert [data["error"] for data in observer.named(REFUSED)] == ["PrivacyBudgetExceededError"]
    with pytest.raises(PrivacyBudgetExceededError):
        asyncio.run(RunnableLambda(arun).ainvoke(0, {"callbacks": [later]}))
    assert [name for name, _ in later.heard] == [REFUSED]
    with pytest.raises(NoPrivacyBudgetError):
        PromptPATEExampleSelector.from_private_examples(examples(), llm=Spy(), public_inputs=INPUTS, **loud())


# -- in LangChain's own classes ----------------------------------------------------------------------------------


def test_the_stock_string_template_breaks_on_braces_without_the_option() -> None:
    made = released()
    assert BRACED in [example["text"] for example in made.select_examples({})]
    with pytest.raises((KeyError, ValueError, IndexError)):
        stock(made).format(input="x")
    with pytest.raises((KeyError, ValueError, IndexError)):
        asyncio.run(stock(made).aformat(input="x"))


@strategies
@pytest.mark.parametrize("query", ["my card", "a {brace} card", ""])
def test_braces_arrive_byte_for_byte_in_every_class(strategy: str, query: str) -> None:
    plain, escaped = (released(strategy=STRATEGIES[strategy], escape_braces=on) for on in (False, True))
    shown = plain.select_examples({"input": query})
    assert shown
    expected = joined(shown, query)
    for prompt in (stock(escaped), stock(plain, DPFewShotPromptTemplate)):
        assert prompt.format(input=query) == expected
        assert asyncio.run(prompt.aformat(input=query)) == expected
        assert prompt.invoke({"input": query}).to_string() == expected
        assert asyncio.run(prompt.ainvoke({"input": query})).to_string() == expected
    turns = [text for example in shown for text in (example["text"], example["queue"])]
    assert [message.content for message in chat(plain).format_messages(input=query)] == turns
    assert [message.content for message in asyncio.run(chat(plain).aformat_messages(input=query))] == turns


def test_escaping_is_for_string_templates_only() -> None:
    doubled = [message.content for message in chat(released(escape_braces=True)).format_messages(input="x")]
    assert BRACED not in doubled
    assert BRACED.replace("{", "{{").replace("}", "}}") in doubled


def test_it_stands_in_a_chain() -> None:
    made = selector().with_strategy(escape_braces=True)
    seen: list[Any] = []

    def answer(value: Any) -> Any:
        seen.append(value.to_string())
        return value

    watch = RunnableLambda(answer)
    chain = stock(made) | watch | FakeListChatModel(responses=["card"]) | StrOutputParser()
    assert chain.invoke({"input": "lost {it}"}) == asyncio.run(chain.ainvoke({"input": "lost {it}"})) == "card"
    assert chain.batch([{"input": "lost {it}"}] * 2) == ["card"] * 2
    plain = made.with_strategy("validated", escape_braces=False)
    expected = joined(plain.select_examples({}), "lost {it}")
    assert seen == [expected] * 4
    turns = ChatPromptTemplate.from_messages([("system", "Sort."), chat(plain), ("human", "{input}")])
    messages = (turns | FakeListChatModel(responses=["card"])).invoke({"input": "lost {it}"})
    assert messages.content == "card"
    assert [m.type for m in turns.invoke({"input": "x"}).messages] == ["system", *["human", "ai"] * 2, "human"]


def test_it_stands_in_the_package_s_own_template_with_all_its_ways() -> None:
    prompt = stock(selector(), DPFewShotPromptTemplate)
    assert asyncio.run(prompt.abatch([{"input": "{a}"}]))[0].to_string() == prompt.format(input="{a}")


def test_what_it_gives_are_copies() -> None:
    made = selector()
    for give in (lambda: made.select_examples({}), lambda: made.examples, lambda: made.rejected or made.examples):
        give()[0]["text"] = "changed"
        assert "changed" not in repr(give())
    made.privacy_report["epsilon"] = 0.0
    assert made.epsilon == 2e5


# -- growing -----------------------------------------------------------------------------------------------------


def add(made: Any, example: Any, awaited: bool) -> Any:
    return asyncio.run(made.aadd_example(example)) if awaited else made.add_example(example)


@pytest.mark.parametrize("awaited", [False, True])
def test_add_example_labels_one_more_input_and_pays_for_it_once(awaited: bool) -> None:
    budget, spy = house(), Spy()
    made = selector(budget=budget, llm=spy)
    before, shown, student = len(spy.private), made.select_examples({}), made.student
    assert add(made, {"text": "new card"}, awaited) == "card"
    assert add(made, {"input": "new card"}, awaited) == "card"
    assert add(made, {"text": f"{MUTE}?"}, awaited) is None
    assert add(made, {"text": f"{MUTE}?"}, awaited) is None
    assert add(made, {"text": CARD}, awaited) == "card"
    assert len(spy.private) == before + 2
    assert counts(budget) == {"reserve label": 8, "commit label": 8}
    assert made.examples[-1] == {"text": "new card", "queue": "card"}
    assert made.rejected == [{"text": f"{MUTE}?"}]
    assert (made.select_examples({}), made.student, made.queries_left) == (shown, student, 1)
    assert made.pool.entries == made._labeler.result.entries
    assert verify_report(made.pool).ok
    for bad in ({"text": "x", "queue": "card"}, {"words": "x"}, 5):
        with pytest.raises(ConfigurationError):
            add(made, bad, awaited)
    assert counts(budget)["reserve label"] == 8


@pytest.mark.parametrize("awaited", [False, True])
def test_a_label_in_the_pool_is_not_paid_for_again_by_a_labeler_that_does_not_know_it(awaited: bool) -> None:
    """The pool of an earlier process, and a labeler on the component that paid, without a checkpoint."""
    private, budget, terms = examples(), house(), {"component": "faq", "max_queries": 9}
    paid = selector(private, budget=budget, public_inputs=[CARD, WIRE, MUTE], **terms)
    other = labeler(private, budget=budget, public_inputs=[], **terms)
    made = PromptPATEExampleSelector(paid.pool, labeler=other)
    assert [add(made, {"text": text}, awaited) for text in (CARD, WIRE, MUTE)] == ["card", "transfer", None]
    assert counts(budget)["reserve label"] == 3
    assert add(made, {"text": "new card"}, awaited) == "card"
    assert counts(budget)["reserve label"] == 4


@pytest.mark.parametrize("awaited", [False, True])
def test_add_example_says_when_nothing_is_left_and_costs_nothing_in_an_outage(awaited: bool) -> None:
    spy = Spy()
    made = selector(llm=spy, max_queries=7)
    spy.at_public = fails(*[ModelCallError("down")] * 5)
    with pytest.raises(ModelCallError):
        add(made, {"text": "new card"}, awaited)
    assert (made.queries_left, len(made.examples)) == (1, 6)
    spy.at_public = fails()
    assert add(made, {"text": "new card"}, awaited) == "card"
    with pytest.raises(PrivacyBudgetExceededError):
        add(made, {"text": "yet another"}, awaited)
    assert add(made, {"text": "new card"}, awaited) == "card"
    assert len(made.examples) == 7


@pytest.mark.parametrize("awaited", [False, True])
def test_add_public_example_is_free_and_nobody_pays_for_it_later(awaited: bool) -> None:
    budget = house()
    made = selector(
        budget=budget, task=FewShotTask(verbalizers={"card": " plastic", "transfer": " wire"}), llm=_plastic()
    )
    paid = lines(budget)

    def add_public(example: Any) -> None:
        asyncio.run(made.aadd_public_example(example)) if awaited else made.add_public_example(example)

    add_public({"text": "by label", "queue": "card"})
    add_public({"text": "by text", "queue": "wire"})
    by_label, by_text = made.examples[-2:]
    assert (by_label, by_text) == (
        {"text": "by label", "queue": "plastic"},
        {"text": "by text", "queue": "wire"},
    )
    assert [entry.label for entry in made.pool.public] == ["card", "transfer"]
    for bad in (
        {"text": "x", "queue": "cash"},
        {"text": "x"},
        {"words": "x", "queue": "card"},
        {"text": CARD, "queue": "card"},
        {"text": "by text", "queue": "card"},
        "text",
    ):
        with pytest.raises(ConfigurationError):
            add_public(bad)
    assert add(made, {"text": "by label"}, awaited) == "card"
    assert lines(budget) == paid
    assert made.epsilon == 2e5
    assert verify_report(made.pool).ok


def _plastic() -> Spy:
    spy = Spy(lambda prompt, _: {" plastic": 0.9, " wire": 0.1})
    spy._vocabulary = None
    spy._max_top_k = 2
    return spy


def test_an_input_that_waits_takes_a_public_label() -> None:
    made = selector(public_inputs=[CARD, WIRE, "waits"], max_queries=2)
    assert made.waiting == [{"text": "waits"}]
    made.add_public_example({"text": "waits", "queue": "transfer"})
    assert made.waiting == []
    assert [example["text"] for example in made.examples] == [CARD, WIRE, "waits"]


@pytest.mark.parametrize("awaited", [False, True])
@pytest.mark.parametrize("fetched", [None, 4])
def test_selection_by_vectors_knows_what_was_added(fetched: int | None, awaited: bool) -> None:
    made = selector(strategy=NEAR.replace(k=1, fetch_k=fetched))
    text = "card card card card"
    assert made.select_examples({"input": text})[0]["text"] != text
    add(made, {"text": text}, awaited)
    assert made.select_examples({"input": text}) == [{"text": text, "queue": "card"}]
    text = "it it it it it it it it it it it it"
    made.add_public_example({"text": text, "queue": "transfer"})
    assert asyncio.run(made.aselect_examples({"input": text})) == [{"text": text, "queue": "transfer"}]


def test_selection_by_vectors_knows_what_was_added_while_the_ledger_could_not_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, text = selector(strategy=NEAR.replace(k=1)), "card card card card"

    def unreadable(_: Any) -> dict[str, Any]:
        raise LedgerError("the ledger cannot be read")

    with monkeypatch.context() as broken, pytest.raises(LedgerError):
        broken.setattr(type(made._labeler), "report", property(unreadable))
        made.add_example({"text": text})
    assert made.add_example({"text": text}) == "card"
    assert made.select_examples({"input": text}) == [{"text": text, "queue": "card"}]


@pytest.mark.parametrize("is_public", [False, True])
async def test_an_example_whose_call_was_cancelled_while_the_pool_took_it_is_selected(
    is_public: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, text = await run_in_thread(lambda: selector(strategy=NEAR.replace(k=1))), "card card card card"
    loop, took = asyncio.get_running_loop(), LabelledPool.with_entry

    def cancelled(pool: LabelledPool, entry: PoolEntry, *, place: int | None = None) -> LabelledPool:
        is_cancelled = threading.Event()
        loop.call_soon_threadsafe(call.cancel)
        loop.call_soon_threadsafe(is_cancelled.set)
        assert is_cancelled.wait(30)
        return took(pool, entry, place=place)

    given = {"text": text, "queue": "card"}
    call = asyncio.ensure_future(made.aadd_public_example(given) if is_public else made.aadd_example({"text": text}))
    with monkeypatch.context() as busy, pytest.raises(asyncio.CancelledError):
        busy.setattr(LabelledPool, "with_entry", cancelled)
        await call
    assert made.examples[-1] == given
    assert await made.aselect_examples({"input": text}) == [given]


def test_a_selection_by_length_goes_on_while_an_example_is_added() -> None:
    during: list[Any] = []

    def length(text: str) -> int:
        if "new card" in text:  # as another thread may, while this one measures the example
            during.append(made.select_examples({"input": "x"}))
        return 1

    made = released(strategy=ByLength(max_length=100, get_text_length=length))
    made.add_public_example({"text": "new card", "queue": "card"})
    assert [len(shown) for shown in during] == [len(INPUTS)]
    assert len(made.select_examples({"input": "x"})) == len(INPUTS) + 1


def test_threads_that_add_the_same_pay_once() -> None:
    made = selector()
    answers: list[Any] = []

    def ask() -> None:
        for _ in range(300):
            try:
                answers.append(made.add_example({"text": "new card"}))
            except ConfigurationError:  # the labeler is busy with another
                continue
            return

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers
    assert set(answers) == {"card"}
    assert made.queries_left == 2
    assert [example["text"] for example in made.examples].count("new card") == 1


# -- strategies --------------------------------------------------------------------------------------------------


@strategies
def test_every_strategy_selects_from_the_pool_sync_and_async(strategy: str) -> None:
    made = selector().with_strategy(STRATEGIES[strategy])
    shown = made.select_examples({"input": "my card"})
    assert shown
    assert asyncio.run(made.aselect_examples({"input": "my card"})) == shown
    assert all(example in made.examples for example in shown)
    assert f"strategy={STRATEGIES[strategy]!r}" in repr(made)
    assert made.queries_left == 3


def test_the_nearest_examples_are_shown_first_whatever_the_variable_is_called() -> None:
    made = released(strategy=NEAR)
    for name in ("input", "text", "question"):
        assert {e["queue"] for e in made.select_examples({name: "card"})} == {"card"}
        assert {e["queue"] for e in made.select_examples({name: "it it it "})} == {"transfer"}


def test_a_vector_store_of_ones_own_is_filled_with_this_pool_alone() -> None:
    store = InMemoryVectorStore(Words())
    made = released(strategy=Similar(store, k=1))
    assert made.select_examples({"input": "card card"})
    assert len(store.store) == len(INPUTS)


def test_with_strategy_shares_teachers_and_keeps_the_pool() -> None:
    budget = house()
    made = selector(budget=budget)
    other = made.with_strategy(STRATEGIES["length"], escape_braces=True)
    assert other.escape_braces
    assert other.pool == made.pool
    other.add_example({"text": "new card"})
    assert (len(other.examples), len(made.examples)) == (7, 6)
    paid = lines(budget)
    made.add_example({"text": "new card"})
    assert (len(made.examples), lines(budget)) == (7, paid)
    for bad in ("nearest", "similarity", Similar("openai:embeddings"), STUDENT):
        with pytest.raises(ConfigurationError):
            made.with_strategy(bad)


@pytest.mark.parametrize("bad", [None, "pool", {"entries": []}])
def test_it_is_built_on_a_pool_and_nothing_else(bad: Any) -> None:
    with pytest.raises(ConfigurationError, match="LabelledPool"):
        PromptPATEExampleSelector(bad)


# -- too few labels, outages and stops ---------------------------------------------------------------------------


@pytest.mark.parametrize(("inputs", "found"), [([MUTE, f"{MUTE}!"], 0), ([MUTE, CARD], 1)])
@pytest.mark.parametrize("awaited", [False, True])
def test_too_few_labels_warn_and_do_not_raise(inputs: list[str], found: int, awaited: bool) -> None:
    with pytest.warns(UserWarning, match=f"{found} of 2 inputs got a label, {2 - found} were rejected"):
        made = built(awaited, public_inputs=inputs)
    assert made.student is None
    assert len(made.rejected) == 2 - found
    assert made.select_examples({"input": "x"}) == made.examples
    assert len(made.examples) == found
    with pytest.raises(ConfigurationError, match="at least two"):
        made.choose_student()
    made.add_public_example({"text": "given", "queue": "card"})
    made.add_public_example({"text": "given too", "queue": "transfer"})
    assert made.choose_student(STUDENT).validated >= 1
    assert made.select_examples({})


def test_labels_that_no_input_got_are_named_where_a_prompt_is_searched() -> None:
    cards = [CARD, "a card in blue", f"{CARD} again"]
    with pytest.warns(UserWarning, match=r"no input was labelled \['transfer'\]: .* add_public_example") as caught:
        made = selector(public_inputs=cards)
    assert made.student.accuracy == 1.0, "which says nothing of the other label"
    assert {warning.filename for warning in caught} == {__file__}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "PromptPATE")
        selector(public_inputs=INPUTS)
        selector(public_inputs=cards, strategy=ByLength())


def test_where_answers_name_no_label_the_advice_is_to_mend_that_first() -> None:
    llm = TextVoteBackend(FakeListChatModel(responses=["who knows"]))
    answers = LabelAnswers(votes="text", abstain_below="never")
    with pytest.warns(UserWarning, match="0 of 2 inputs got a label, 2 were rejected.*name no label, mend that first"):
        built(False, llm=llm, answers=answers, public_inputs=[CARD, WIRE])


def test_a_run_without_inputs_may_have_fields_beside_the_text() -> None:
    records = [{"title": "t", "text": f"{CANARY} {i}", "queue": LABELS[i % 2]} for i in range(40)]
    private = PrivateExamples(records, label_key="queue", labels=LABELS, public_size=40, fields=("title",))
    task = FewShotTask("{title}\ntext: {text}\nqueue: {queue}", "{title}\ntext: {text}\nqueue:")
    with pytest.warns(UserWarning, match="no student's prompt"):
        made = PromptPATEExampleSelector.from_run(labeler(private, public_inputs=[], max_queries=3, task=task))
    given = [{"title": "a", "text": CARD}, {"title": "b", "text": WIRE}, {"title": "c", "text": "new card"}]
    assert [made.add_example(example) for example in given] == ["card", "transfer", "card"]
    assert made.choose_student(STUDENT).demonstrations


@pytest.mark.parametrize("awaited", [False, True])
def test_too_few_inputs_warn_at_the_callers_line_before_a_ticket_burns(awaited: bool) -> None:
    budget, llm = house(), Spy()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "public_inputs: expected at least 2 that differ, .*, found 1: no student")
        with pytest.raises(UserWarning):
            built(awaited, budget=budget, llm=llm, public_inputs=[CARD, CARD])
    assert llm.private == []
    with pytest.warns(UserWarning, match="found 1: no student") as caught:
        built(awaited, public_inputs=[CARD])
    if not awaited:  # a task of its own has no caller
        assert {warning.filename for warning in caught} == {__file__}
    with pytest.warns(UserWarning, match="1 of 1 inputs got a label, 0 were rejected.*more inputs") as caught:
        built(awaited, public_inputs=[CARD])
    assert "name no label" not in str(caught[-1].message)


@strategies
def test_a_pool_without_labels_selects_nothing_and_formats(strategy: str) -> None:
    made = PromptPATEExampleSelector(pool({MUTE: None}), strategy=STRATEGIES[strategy])
    assert made.select_examples({"input": "x"}) == asyncio.run(made.aselect_examples({"input": "x"})) == []
    assert stock(made).format(input="x") == "text: x\nqueue:"
    assert chat(made).format_messages(input="x") == []


@pytest.mark.parametrize("awaited", [False, True])
def test_an_outage_of_the_student_keeps_every_label(awaited: bool) -> None:
    budget, student = house(), Spy()
    student.at_public = fails(*[ModelCallError("the student is down")] * 40)
    wanted = STUDENT.replace(llm=student)
    with pytest.raises(RunInterruptedError, match="All labels are released and kept") as caught:
        built(awaited, student=wanted, budget=budget)
    assert (caught.value.__cause__, caught.value.__context__) == (None, None)
    paid = lines(budget)
    again: PromptPATELabeler = caught.value.run
    assert len(again.result.labelled) == len(INPUTS)
    student.at_public = fails()
    if awaited:
        made = asyncio.run(PromptPATEExampleSelector.afrom_run(again, student=wanted))
    else:
        made = PromptPATEExampleSelector.from_run(again, student=wanted)
    assert made.student.accuracy == 1.0
    assert lines(budget) == paid


@pytest.mark.parametrize("awaited", [False, True])
def test_an_outage_of_the_teachers_is_resumed_from_the_error(awaited: bool) -> None:
    budget, spy = house(), Spy()
    spy.at_public = fails(None, *[ModelCallError("down")] * 5)  # type: ignore[arg-type]
    with pytest.raises(RunInterruptedError, match="1 of 6 inputs") as caught:
        built(awaited, llm=spy, budget=budget)
    again = caught.value.run
    spy.at_public = fails()
    made = PromptPATEExampleSelector.from_run(again, student=STUDENT)
    assert len(made.examples) == 6
    assert counts(budget) == {"reserve label": 6, "commit label": 6}


@pytest.mark.parametrize("at", ["labels", "student"])
def test_ctrl_c_carries_the_labeler_and_shows_nothing(at: str) -> None:
    spy, student = Spy(), Spy()
    stopped = fails(None, KeyboardInterrupt())  # type: ignore[arg-type]
    if at == "labels":
        spy.at_private = stopped
    else:
        student.at_public = fails(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt) as caught:
        selector(llm=spy, student=STUDENT.replace(llm=student))
    again: PromptPATELabeler = caught.value.run  # type: ignore[attr-defined]
    assert len(again.result.labelled) == (1 if at == "labels" else 6)
    public = "array([0.9, 0.1])"  # the public model's own answer
    assert [look for look in shows_private(caught.value) if look != public] == []
    assert CANARY not in repr(locals_of_ours(caught.value))


# -- files, copies and what shows --------------------------------------------------------------------------------


def test_a_saved_selector_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "pool.json"
    made = selector(public_inputs=[*INPUTS, MUTE], noise=GAUSSIAN)
    made.add_public_example({"text": "given", "queue": "card"})
    made.save(path)
    again = PromptPATEExampleSelector.load(path)
    assert again.pool == made.pool
    assert again.student == made.student
    assert again.examples == made.examples
    assert again.rejected == made.rejected
    assert again.select_examples({}) == made.select_examples({})
    assert (again.epsilon, again.privacy_report) == (made.epsilon, made.privacy_report)
    assert verify_report(again.pool).ok
    assert again.queries_left == 0
    with pytest.raises(ConfigurationError, match="add_public_example"):
        again.add_example({"text": "x"})
    with pytest.raises(ConfigurationError, match="llm"):
        again.choose_student()
    assert again.choose_student(LEARNS) == made.choose_student(LEARNS)
    again.save(path)
    assert PromptPATEExampleSelector.load(path, escape_braces=True).pool == again.pool
    other = PromptPATEExampleSelector.load(path, strategy=NEAR)
    assert len(other.select_examples({"input": "card"})) == 2


def test_the_labels_of_a_run_that_stopped_are_a_selector_too(tmp_path: Path) -> None:
    path = tmp_path / "labels.json"
    spy = Spy()
    spy.at_public = fails(None, None, *[ModelCallError("down")] * 5)  # type: ignore[arg-type]
    with pytest.raises(RunInterruptedError) as caught:
        PromptPATEExampleSelector.from_run(labeler(llm=spy, public_inputs=INPUTS), student=STUDENT)
    caught.value.run.result.save(path)
    made = PromptPATEExampleSelector.load(path)
    assert [example["queue"] for example in made.select_examples({})] == ["card", "transfer"]
    assert len(made.waiting) == 4
    assert made.choose_student(LEARNS).validated == 1


def _moved(state: dict[str, Any]) -> None:
    for one in state["student"]["candidates"]:
        one["places"] = [place + 70 for place in one["places"]]
    state["student"]["demonstrations"] = [place + 70 for place in state["student"]["demonstrations"]]


HOSTILE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "another format": lambda state: state.update(format="pickle"),
    "no student": lambda state: state.update(student={}),
    "a student of other entries": _moved,
    "a student that boasts": lambda state: state["student"].update(accuracy=2.0),
}


@pytest.mark.parametrize("change", HOSTILE)
def test_a_hostile_file_is_refused(change: str, tmp_path: Path) -> None:
    path = tmp_path / "pool.json"
    selector().save(path)
    assert PromptPATEExampleSelector.load(path)
    state = json.loads(path.read_text())
    HOSTILE[change](state)
    path.write_text(json.dumps(sealed(state)))  # its digest fits
    with pytest.raises(ConfigurationError):
        PromptPATEExampleSelector.load(path)


@pytest.mark.parametrize(
    "change",
    [
        {"verbalizers": 5},
        {"verbalizers": {"card": [" card"]}},
        {"verbalizers": {"card": " a", "transfer": " a"}},
        {"suffix": 5},
        {"suffix": "{a.b}"},
        {"example_prompt": "{text.__class__}"},
        {"votes": "loud"},
        {"text_key": 5},
        {"content_free_inputs": 5},
        {"content_free_inputs": [5]},
        {"example_separator": 5},
    ],
    ids=str,
)
def test_a_plan_that_asks_for_no_prompt_chooses_no_student(change: dict[str, Any]) -> None:
    state = json.loads(pool().to_json())
    made = PromptPATEExampleSelector(LabelledPool.from_json(json.dumps(state)))
    assert made.choose_student(LEARNS)
    state["plan"].update(change)
    made = PromptPATEExampleSelector(LabelledPool.from_json(json.dumps(sealed(state))))
    with pytest.raises(ConfigurationError):
        made.choose_student(LEARNS)
    assert made.select_examples({})


def test_a_pickle_holds_no_handle_and_a_deep_copy_the_same_one() -> None:
    budget = house()
    made = selector(budget=budget)
    data = pickle.dumps(made)
    assert CANARY.encode() not in data
    assert b"PromptPATELabeler" not in data
    thawed = pickle.loads(data)  # noqa: S301
    assert (thawed.queries_left, thawed.pool, thawed.select_examples({})) == (0, made.pool, made.select_examples({}))
    with pytest.raises(ConfigurationError, match="copied from another process"):
        thawed.add_example({"text": "x"})
    thawed.add_public_example({"text": "given", "queue": "card"})
    assert len(thawed.examples) == len(made.examples) + 1
    for copied in (copy.copy(made), copy.deepcopy(made)):
        assert (copied.pool, copied.select_examples({}), copied.queries_left) == (
            made.pool,
            made.select_examples({}),
            made.queries_left,
        )
        copied.add_public_example({"text": "copied", "queue": "card"})
        assert len(copied.examples) == len(made.examples) + 1
    left = made.queries_left
    copy.deepcopy(made).add_example({"text": "new card"})
    assert made.queries_left == left - 1
    assert copy.deepcopy(made.with_strategy(escape_braces=True)).escape_braces


def test_a_pool_of_public_labels_costs_nothing_and_others_say_infinity() -> None:
    assert released().epsilon == 0.0
    assert PromptPATEExampleSelector(pool({MUTE: None})).epsilon == math.inf


def test_a_run_goes_on_to_its_end_and_a_pool_has_the_labels_so_far() -> None:
    made = labeler(public_inputs=INPUTS)
    stream = made.stream()
    for _ in range(3):
        next(stream)
    stream.close()
    early = PromptPATEExampleSelector(made.result, labeler=made)
    assert (len(early.examples), len(early.waiting), early.queries_left) == (3, 3, 3)
    assert len(PromptPATEExampleSelector.from_run(made, student=STUDENT).examples) == 6
    assert early.add_example({"text": INPUTS[-1]}) == "transfer"  # labelled meanwhile
    assert (len(early.examples), len(early.waiting)) == (4, 2)


@pytest.mark.parametrize("awaited", [False, True])
@pytest.mark.parametrize(
    "fault",
    [
        {"escape_braces": "yes"},
        {"strategy": "nearest"},
        {"strategy": Similar("openai:embeddings")},
        {"student": "gpt"},
        {"student": STUDENT.replace(llm="gpt")},
        {"student": STUDENT.replace(calibrate=True), "llm": TextVoteBackend(FakeListChatModel(responses=["card"]))},
    ],
    ids=str,
)
def test_a_fault_of_the_selector_stops_the_run_before_it_charges(fault: dict[str, Any], awaited: bool) -> None:
    budget, options = house(), {**fault}
    llm = options.pop("llm", Spy())
    answers = PLAIN.replace(votes="hard" if isinstance(llm, Spy) else "text")
    run = labeler(budget=budget, llm=llm, answers=answers)
    with pytest.raises(ConfigurationError):
        if awaited:
            asyncio.run(PromptPATEExampleSelector.afrom_run(run, **options))
        else:
            PromptPATEExampleSelector.from_run(run, **options)
    assert [name for name in counts(budget) if "reserve" in name] == []
    for wrong in (budget, run.result):
        with pytest.raises(ConfigurationError, match="run: expected a PromptPATELabeler"):
            PromptPATEExampleSelector.from_run(wrong)  # type: ignore[arg-type]


def test_bars_show_where_they_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    PromptPATEExampleSelector.from_run(labeler(), student=STUDENT, progress=True)
    shown = capsys.readouterr().err
    assert "private labels" in shown
    assert "student prompts" in shown
    PromptPATEExampleSelector.from_run(labeler(), student=STUDENT, progress=False)
    assert "private labels" not in capsys.readouterr().err


def test_the_embedded_model_teaches_and_learns_offline() -> None:
    """Of 60 teachers of eight records nearly all are right about each input: the majority is beyond chance."""
    records = [{"text": f"my {LABELS[i % 2]} {i}", "queue": LABELS[i % 2]} for i in range(480)]
    private = PrivateExamples(records, label_key="queue", labels=LABELS, public_size=480)
    inputs = [f"{word} {label}" for label in LABELS for word in ("my", "another", "this")]
    rows = Rows(slots=60, shots=8, sampling="partition")
    made = selector(private, llm=EmbeddedLLM(), budget=house("replace_one"), public_inputs=inputs, rows=rows)
    assert [example["queue"] for example in made.examples] == ["card"] * 3 + ["transfer"] * 3
    assert made.student.accuracy == 1.0


# -- what is compared, and what is shown without a choice -----------------------------------------------------------


class Heard(Words):
    """Remembers what it embedded as a query."""

    def __init__(self) -> None:
        self.queries: list[str] = []

    def embed_query(self, text: str) -> list[float]:
        self.queries.append(text)
        return super().embed_query(text)

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [super(Heard, self).embed_query(text) for text in texts]


@pytest.mark.parametrize("keys", [None, ("input",), ("lang",), ("lang", "input")])
def test_similarity_compares_the_query_and_not_what_else_the_prompt_needs(keys: tuple[str, ...] | None) -> None:
    heard = Heard()
    made = selector(strategy=Similar(heard, k=1, input_keys=keys))
    values: Any = {"input": "my card", "lang": "English", "history": None}
    if keys != ("lang",) and keys is not None:
        values = {name: values[name] for name in ("input", "lang")}
    made.select_examples(values)
    asyncio.run(made.aselect_examples(values))
    wanted = {None: "my card", ("input",): "my card", ("lang",): "English", ("lang", "input"): "my card English"}
    assert heard.queries == [wanted[keys]] * 2


def test_without_the_wording_s_variable_everything_is_compared() -> None:
    heard = Heard()
    made = selector(strategy=Similar(heard))
    made.select_examples({"question": "what", "b": "else"})
    assert heard.queries == ["else what"]
    with pytest.raises(ConfigurationError, match="input_keys"):
        made.with_strategy(Similar(heard, input_keys=("nowhere",))).select_examples({"a": "b"})
    for odd in (None, "text", ["x"]):
        with pytest.raises(ConfigurationError, match="input_variables"):
            made.select_examples(odd)  # type: ignore[arg-type]


def test_without_a_chosen_prompt_labels_take_turns() -> None:
    pool = LabelledPool(
        [
            *(PoolEntry({"text": f"card {i}"}, "card", "public") for i in range(5)),
            PoolEntry({"text": "w"}, "transfer", "public"),
        ],
        label_key="queue",
        labels=LABELS,
        shown={label: label for label in LABELS},
        report={},
        plan={},
    )
    made = PromptPATEExampleSelector(pool)
    shown = [example["text"] for example in made.select_examples({"input": "x"})]
    assert shown == ["card 0", "card 1", "card 2", "w"]
    made.add_public_example({"text": "w 2", "queue": "transfer"})
    assert [example["text"] for example in made.select_examples({"input": "x"})] == ["card 0", "card 1", "w", "w 2"]


def test_a_rejected_input_may_get_a_public_label() -> None:
    made = selector(public_inputs=[CARD, WIRE, MUTE])
    assert made.rejected == [{"text": MUTE}]
    made.add_public_example({"text": MUTE, "queue": "card"})
    assert made.rejected == []
    assert made.examples[-1] == {"text": MUTE, "queue": "card"}
    with pytest.raises(ConfigurationError, match="has a label"):
        made.add_public_example({"text": MUTE, "queue": "card"})


def test_the_template_of_the_labels_measures_lengths() -> None:
    made = selector(strategy=ByLength(max_length=12))
    longer = made.with_strategy(ByLength(max_length=1_000))
    assert 0 < len(made.select_examples({"input": "x"})) < len(longer.select_examples({"input": "x"}))


def test_a_template_over_a_selector_has_the_selector_s_epsilon() -> None:
    made = selector()
    shown = PromptTemplate.from_template("text: {text}\nqueue: {queue}")
    own = DPFewShotPromptTemplate(example_selector=made, example_prompt=shown, suffix="text: {input}\nqueue:")
    assert own.epsilon == made.epsilon < math.inf
