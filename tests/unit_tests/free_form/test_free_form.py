"""Answers in free form: what is asked in public and when, what is released, answered, remembered and charged."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.language_models import FakeListChatModel, GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder, PromptTemplate
from langchain_core.runnables import ConfigurableField, RunnableLambda
from langchain_core.stores import InMemoryByteStore

from langchain_dpicl import EmbeddingAnswers, FewShotTask, LabelAnswers, Noise, Rows, Serving
from langchain_dpicl.backends.fake import FakeBackend, scripted
from langchain_dpicl.backends.langchain.logprobs import DecisionsBackend
from langchain_dpicl.backends.langchain.texts import TextVoteBackend
from langchain_dpicl.backends.sync_async import run_sync
from langchain_dpicl.exceptions import (
    CapabilityError,
    ConfigurationError,
    DPICLError,
    ModelCallError,
    NoPrivacyBudgetError,
    PrivacyBudgetExceededError,
    UnsilencableModelError,
)
from langchain_dpicl.free_form import CandidateSource, DPFreeFormRunnable, PrivateDoor, PublicModel
from langchain_dpicl.privacy.private_examples import PrivateExamples
from langchain_dpicl.reports.report import verify_report
from langchain_dpicl.results import FreeFormResult
from langchain_dpicl.runs.query_plan import QUERY_TEMPLATE
from langchain_dpicl.serving import ChatEmbedded, EmbeddedLLM
from tests.free_form_doubles import (
    CANDIDATES,
    NOISELESS,
    RECORDS,
    VECTORS,
    WORDS,
    OneHot,
    PublicChat,
    Runs,
    Writer,
    budget_of,
    build,
    charged,
    embedding,
    keywords,
    last_said,
)
from tests.scripted_models import ScriptedChat, StatusError

pytestmark = pytest.mark.usefixtures("remembered_prices")

SPACES: dict[str, Callable[..., DPFreeFormRunnable]] = {"embedding": embedding, "keywords": keywords}


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How often private records were read."""
    real, found = PrivateExamples._pool, []

    def pool(private: PrivateExamples, label: str | None, *, ledger_id: str | None) -> Any:
        found.append("read")
        return real(private, label, ledger_id=ledger_id)

    monkeypatch.setattr(PrivateExamples, "_pool", pool)
    return found


# -- what is answered --------------------------------------------------------------------------------------------


def test_the_answer_is_the_candidate_that_most_records_agree_on() -> None:
    assert embedding().invoke("what now?") == "ask the bank"
    turned = [text.replace("bank", "tax office") for text in RECORDS]
    assert embedding(turned).invoke("what now?") == "open a claim"


def test_similarities_are_cosines_to_the_released_sum() -> None:
    found = embedding(answers=VECTORS.replace(embeddings=OneHot(length=7.0))).with_receipts().invoke("what now?")
    assert isinstance(found, FreeFormResult)
    assert (found.answer, str(found), found.keywords) == ("ask the bank", "ask the bank", None)
    length = (6**2 + 3**2 + 1**2) ** 0.5
    expected = {"wait a day": 1 / length, "open a claim": 3 / length, "ask the bank": 6 / length, "call the police": 0}
    assert found.similarities == pytest.approx(expected, abs=0.05)  # ten standard deviations
    assert list(found.similarities or {}) == CANDIDATES


def test_keywords_are_released_most_common_first_and_the_answer_is_written_from_them() -> None:
    llm = PublicChat(says=["zero-shot", "Ask the bank for a claim."])
    found = keywords(answers=WORDS.replace(writer=llm)).with_receipts().invoke("what now?")
    assert found.keywords == ("bank", "claim")
    assert (found.answer, found.similarities) == ("Ask the bank for a claim.", None)
    assert len(llm.asked) == 2
    assert "bank, claim" in llm.asked[1]
    assert llm.asked[1].endswith("asks: what now?")
    assert "bank" not in llm.asked[0]


def test_without_a_domain_the_words_of_the_query_and_of_public_answers_are_one() -> None:
    llm = PublicChat(says=["your bank", "make a claim", "nothing"])
    words = WORDS.replace(keywords=None, writer=llm, num_candidates=3)
    private = Writer(lambda prompt: f"snow, so {last_said(prompt)}")
    found = keywords(answers=words, llm=private).with_receipts().invoke("is snow a claim?")
    assert found.keywords == ("snow", "bank")  # "snow" stands in the query alone
    assert len(llm.asked) == 4
    few = keywords(answers=words.replace(max_keywords=2), llm=private).with_receipts()
    assert few.invoke("is snow a claim?").keywords == ("claim", "nothing")  # in two public texts, and the longest
    assert few.plan.width == 2


def test_candidates_of_ones_own_make_the_domain_too() -> None:
    component = keywords(answers=WORDS.replace(keywords=None, candidates=["the bank", "a claim"])).with_receipts()
    assert component.invoke("now?").keywords == ("bank", "claim")
    assert component.maker.public.kind == "given"


@pytest.mark.parametrize(
    "llm", [EmbeddedLLM(), ChatEmbedded(), EmbeddedLLM().bind(max_tokens=20)], ids=["completion", "chat", "bound"]
)
def test_the_embedded_model_answers_and_a_hot_one_writes_candidates(llm: Any) -> None:
    hot = EmbeddedLLM(temperature=1.5, seed=3)
    vectors = DeterministicFakeEmbedding(size=12)
    written = VECTORS.replace(embeddings=vectors, candidates=None, writer=hot, num_candidates=6)
    found = embedding(llm=llm, answers=written).with_receipts().invoke("what now?")
    assert found.answer in found.similarities
    assert 2 <= len(found.similarities) <= 6
    found = (
        keywords(llm=llm, answers=WORDS.replace(writer=PublicChat(says=["an answer"])))
        .with_receipts()
        .invoke("what now?")
    )
    assert (len(found.keywords), found.answer) == (2, "an answer")


def test_models_of_langchain_answer_in_private_and_in_public() -> None:
    vectors = DeterministicFakeEmbedding(size=64)
    llm = FakeListChatModel(responses=["ask the bank"])
    public = GenericFakeChatModel(messages=iter([AIMessage(text) for text in CANDIDATES]))
    component = embedding(
        llm=llm, answers=VECTORS.replace(embeddings=vectors, candidates=None, num_candidates=4, writer=public)
    ).with_receipts()
    found = component.invoke("what now?")
    assert found.answer == "ask the bank"
    assert set(found.similarities) == set(CANDIDATES)
    assert found.similarities["ask the bank"] > 0.99


def test_private_rows_are_asked_as_the_options_say() -> None:
    llm = Writer()
    embedding(llm=llm, answers=VECTORS.replace(max_tokens=7, stop=("END", "\n"))).invoke("q")
    assert llm.options == [{"max_tokens": 7, "stop": ("END", "\n")}] * 3
    assert (llm.private, llm.public) == (10, 2)  # in public as the writer, and once as the private rows


@pytest.mark.parametrize(
    "form", [np.array, lambda texts: [AIMessage(text) for text in texts]], ids=["array", "messages"]
)
def test_an_engine_whose_texts_have_a_form_that_nobody_reads_is_refused_before_it_is_paid(form: Any) -> None:
    class Other(Writer):
        def complete(self, prompts: Any, **options: Any) -> Any:
            return form(super().complete(prompts, **options))

        async def acomplete(self, prompts: Any, **options: Any) -> Any:
            return self.complete(prompts, **options)

    component, runs = embedding(llm=Other()), Runs()
    watched: Any = {"callbacks": [runs]}
    for ask in (lambda: component.invoke("q", watched), lambda: asyncio.run(component.ainvoke("q", watched))):
        with pytest.raises(ModelCallError, match="list of texts"):
            ask()
    assert not runs.named("dpicl.charged")


def test_public_answers_end_where_private_ones_do() -> None:
    llm = PublicChat(says=[" ask the bank \nor not", "ask the bank", "open a claim END of it"])
    component = embedding(
        answers=VECTORS.replace(candidates=None, num_candidates=3, writer=llm, stop=("\n", "END"))
    ).with_receipts()
    assert set(component.invoke("q").similarities) == {"ask the bank", "open a claim"}


# -- where candidates come from ----------------------------------------------------------------------------------


def test_public_calls_are_made_in_the_open_and_only_the_last_is_part_of_the_answer() -> None:
    runs = Runs()
    llm = PublicChat(says=["the bank", "a claim"])
    keywords(answers=WORDS.replace(keywords=None, num_candidates=4, writer=llm)).invoke("now?", {"callbacks": [runs]})
    assert [tags for _, tags in runs.calls] == [("nostream",)] * 4 + [()]
    assert {prompt for prompt, _ in runs.calls[:4]} == {"asks: now?"}
    assert not any("says: " in prompt for prompt, _ in runs.calls)


def test_the_private_model_is_asked_in_public_where_another_one_writes() -> None:
    runs, llm = Runs(), PublicChat(says=["something"])
    other = PublicChat(says=list(CANDIDATES))
    component = embedding(llm=llm, answers=VECTORS.replace(candidates=None, num_candidates=4, writer=other))
    llm.asked.clear()
    component.invoke("now?", {"callbacks": [runs]})
    assert len(runs.calls) == 4
    assert [prompt for prompt in llm.asked if "says: " not in prompt] == ["asks: now?"]  # as private prompts are


SOURCES: dict[str, Any] = {
    "function": lambda text: [f"{text} {word}" for word in CANDIDATES],
    "runnable": RunnableLambda(lambda text: [f"{text} {word}" for word in CANDIDATES]),
    "documents": lambda text: [Document(f"{text} {word}") for word in CANDIDATES],
    "messages": lambda text: tuple(AIMessage(f"{text} {word}") for word in CANDIDATES),
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_candidates_are_fetched_for_each_query(source: Any) -> None:
    component = embedding(answers=VECTORS.replace(candidates=source)).with_receipts()
    for query in ("one", "two"):
        assert list(component.invoke(query).similarities) == [f"{query} {word}" for word in CANDIDATES]
    assert component.maker.public.kind == "fetched"


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_answers_that_the_embeddings_know_nothing_of_are_no_candidates(is_async: bool) -> None:
    found: list[str] = ["\U0001f44d", "ask the bank", "?!"]
    local = VECTORS.replace(embeddings=None, candidates=lambda _: found)
    component = embedding(answers=local).with_receipts()
    with pytest.raises(ConfigurationError, match=r"found 1.*other embeddings="):
        _ = asyncio.run(component.ainvoke("one")) if is_async else component.invoke("one")
    assert charged(component) == 0
    found.append("wait a day")
    answer = asyncio.run(component.ainvoke("one")) if is_async else component.invoke("one")
    assert list(answer.similarities) == ["ask the bank", "wait a day"]
    with pytest.raises(ConfigurationError, match="\U0001f44d"):
        embedding(answers=local.replace(candidates=tuple(found)))


async def test_candidates_are_fetched_by_coroutines_and_of_all_variables() -> None:
    asked: list[Any] = []

    async def source(given: Any) -> list[str]:
        asked.append(given)
        return CANDIDATES

    component = embedding(answers=VECTORS.replace(candidates=source), suffix="{who} asks: {input}")
    assert await component.ainvoke({"who": "she", "input": "now?"}) == "ask the bank"
    assert asked == [{"who": "she", "input": "now?"}]


def test_an_engine_that_is_no_runnable_writes_candidates_too() -> None:
    texts = iter(["ask the bank", "open a claim", "ask the bank"] * 9)
    component = embedding(
        llm=Writer(lambda p: "ask the bank" if "says: " in p else next(texts)), answers=VECTORS.replace(candidates=None)
    )
    assert component.invoke("q") == "ask the bank"
    assert (component.maker.space.embeddings.name, component.maker.public.kind) == ("OneHot", "written")


# -- public faults cost nothing ----------------------------------------------------------------------------------


def out(_: Any) -> Any:
    raise ConnectionError("the account of zx-secret is out of credit")


PUBLIC_FAULTS: dict[str, tuple[Callable[[], DPFreeFormRunnable], type[DPICLError], str]] = {
    "the public model is out": (
        lambda: embedding(answers=VECTORS.replace(candidates=None, writer=RunnableLambda(out))),
        ModelCallError,
        r"public call to RunnableLambda failed \(ConnectionError\)",
    ),
    "one of several calls fails": (
        lambda: embedding(
            answers=VECTORS.replace(candidates=None, num_candidates=3, writer=PublicChat(says=["a", "b", OSError("x")]))
        ),
        ModelCallError,
        r"PublicChat failed \(OSError\)",
    ),
    "the private model is out": (
        lambda: embedding(
            llm=Writer(lambda p: "" if "says: " not in p else "a"),
            answers=VECTORS.replace(writer=PublicChat(says=["x"])),
        ),
        ModelCallError,
        "Writer brought no text before the first of stop",
    ),
    "the private model of a domain that is given is out": (
        lambda: keywords(llm=Writer(lambda p: "" if "says: " not in p else "a")),
        ModelCallError,
        "Writer brought no text",
    ),
    "candidates cannot be fetched": (
        lambda: embedding(answers=VECTORS.replace(candidates=out)),
        ModelCallError,
        r"candidates failed \(ConnectionError\)",
    ),
    "candidates are no list": (
        lambda: embedding(answers=VECTORS.replace(candidates=str)),
        ConfigurationError,
        "candidates: expected a list",
    ),
    "candidates are no texts": (
        lambda: embedding(answers=VECTORS.replace(candidates=lambda _: [1, 2])),
        ConfigurationError,
        "candidates: expected answers that are text",
    ),
    "one candidate": (
        lambda: embedding(answers=VECTORS.replace(candidates=lambda _: ["same", " same ", "", "  "])),
        ConfigurationError,
        r"at least 2 distinct public answers.*found 1.*temperature above 0",
    ),
    "a model that always says the same": (
        lambda: embedding(answers=VECTORS.replace(candidates=None, num_candidates=3), llm=EmbeddedLLM()),
        ConfigurationError,
        r"found [01].*your own candidates=",
    ),
    "a public model that writes no text": (
        lambda: embedding(answers=VECTORS.replace(candidates=None, num_candidates=2, writer=RunnableLambda(len))),
        ConfigurationError,
        "RunnableLambda: expected answers that are text",
    ),
    "a domain that is too small": (
        lambda: keywords(answers=WORDS.replace(keywords=None, num_keywords=3, candidates=["the bank", "a bank"])),
        ConfigurationError,
        r"at least num_keywords=3 in the public domain, found 1",
    ),
    "a domain without words": (
        lambda: keywords(answers=WORDS.replace(keywords=None, candidates=["the", "a"]), suffix="{input} ?"),
        ConfigurationError,
        "words other than stop words",
    ),
}


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("fault", PUBLIC_FAULTS.values(), ids=PUBLIC_FAULTS)
def test_a_public_fault_costs_nothing_and_reads_nothing(fault: Any, opened: list[str], is_async: bool) -> None:
    make, kind, said = fault
    component = make()
    before = len(list(component.budget._store.records()))
    with pytest.raises(kind, match=said) as caught:
        asyncio.run(component.ainvoke("the")) if is_async else component.invoke("the")
    assert "zx-secret" not in str(caught.value)
    assert (caught.value.__cause__, caught.value.__context__) == (None, None)
    assert opened == []
    assert len(list(component.budget._store.records())) == before


@pytest.mark.parametrize(
    "beside",
    [
        {"tool_calls": [{"name": "search", "args": {}, "id": "1"}]},
        {"additional_kwargs": {"refusal": "no"}},
        {"response_metadata": {"finish_reason": "SAFETY"}},
        {"response_metadata": {"stop_reason": "refusal"}},
        {"response_metadata": {"stopReason": "guardrail_intervened"}},
    ],
    ids=lambda beside: next(iter(beside)),
)
def test_public_answers_count_only_where_private_ones_would(beside: Any) -> None:
    said = [AIMessage("Let me look that up.", **beside), "open a claim"]
    component = embedding(answers=VECTORS.replace(candidates=lambda _: said))
    with pytest.raises(ConfigurationError, match="found 1"):
        component.invoke("now?")


@pytest.mark.parametrize("candidates", [CANDIDATES, lambda _: CANDIDATES], ids=["given", "fetched"])
def test_embeddings_that_are_out_cost_nothing(opened: list[str], candidates: Any) -> None:
    vectors = OneHot()
    component = embedding(answers=VECTORS.replace(embeddings=vectors, candidates=candidates))
    vectors.failing = True
    component.maker.space.embeddings._calls._retry = type(component.maker.space.embeddings._calls._retry)(1, 0.0, 0.0)
    with pytest.raises(ModelCallError, match="OneHot"):
        component.invoke("now?")
    assert (opened, charged(component)) == ([], 0)
    vectors.failing = False
    assert component.invoke("now?") == "ask the bank"


def test_candidates_that_are_given_are_embedded_once() -> None:
    vectors = OneHot()
    component = embedding(answers=VECTORS.replace(embeddings=vectors))
    assert sorted(vectors.asked[1:]) == sorted(CANDIDATES)  # the first one is the probe; threads embed the others
    vectors.asked.clear()
    component.invoke("now?")
    assert len(vectors.asked) == 1 + len(RECORDS)  # one to see that it is there


def test_a_refusal_of_another_budget_on_the_public_side_is_no_exhaustion_of_ours() -> None:
    def refused(_: Any) -> Any:
        raise PrivacyBudgetExceededError("another component's", requested=1, remaining=0)

    component = embedding(answers=VECTORS.replace(candidates=refused), serving=Serving(on_exhausted="zero_shot"))
    with pytest.raises(PrivacyBudgetExceededError, match="another component's"):
        component.invoke("now?")


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_an_engine_may_have_nothing_to_say_in_public_where_it_can_be_asked_otherwise(is_async: bool) -> None:
    """Its "" is an answer where its tokens can be asked for, and else a call that failed."""
    ask = (lambda c, q: asyncio.run(c.ainvoke(q))) if is_async else (lambda c, q: c.invoke(q))

    def line(text: str) -> dict[str, float]:
        return {last_said(text.replace("human:", "")) if "says: " in text else "what it likes": 1.0}

    tokens = FakeBackend(lambda prompt, _: {last_said(prompt) if "says: " in prompt else "": 1.0}, max_top_k=1)
    component = embedding(llm=tokens, serving=Serving(on_exhausted="zero_shot"), max_queries=1)
    assert ask(component.with_receipts(), "q").receipt.source == "release"
    with pytest.raises(ModelCallError, match="brought no text"):  # an empty text answers no caller
        ask(component, "other")
    failing = FakeBackend(lambda prompt, _: {"": 1.0}, max_top_k=1, fail_public_call=1)
    with pytest.raises(ModelCallError, match="public call 1 failed"):
        ask(embedding(llm=failing), "q")
    chat = ScriptedChat(answer=line)
    component = embedding(llm=TextVoteBackend(chat))
    chat.raises["asks: "] = StatusError("zx-secret", status_code=400)
    with pytest.raises(ModelCallError, match="public call to scripted-chat failed"):
        ask(component, "q")
    assert charged(component) == 0


class Short(Writer):
    """Would cut prompts of more than 150 letters, and then keep no record."""

    def check_public(self, prompt: str) -> None:
        if len(prompt) > 150:
            raise ModelCallError("expected a shorter prompt")


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("wordings", [(), (FewShotTask(example_prompt="{text}", suffix="in short: {input}"),)])
def test_a_query_that_the_engine_would_cut_costs_nothing(is_async: bool, wordings: tuple[FewShotTask, ...]) -> None:
    engine, writer = Short(), Writer()
    task = FewShotTask(example_prompt="{text}", suffix="{input}", wordings=wordings)
    answers = WORDS.replace(writer=writer)
    component = build(llm=engine, task=task, example_prompt=None, suffix=None, answers=answers, rows=None)
    long = "x" * (145 if wordings else 151)
    with pytest.raises(ModelCallError, match="a shorter prompt"):
        _ = asyncio.run(component.ainvoke(long)) if is_async else component.invoke(long)
    assert (charged(component), engine.private, writer.public) == (0, 0, 0)
    component.invoke("x" * 100)
    assert charged(component) == 1


# -- one query, one ticket ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", SPACES.values(), ids=SPACES)
class TestBothSpaces:
    def test_the_same_query_is_told_again_for_free_to_the_same_tenant_only(self, make: Any, opened: list[str]) -> None:
        component = make().with_receipts()
        first = component.invoke("now?")
        again = component.invoke({"input": "now?"})
        assert again.model_dump(exclude={"receipt"}) == first.model_dump(exclude={"receipt"})
        assert (again.receipt.source, again.receipt.tickets, len(opened)) == ("memo", 0, 1)
        component.invoke("now?", {"configurable": {"tenant": "other"}})
        assert (len(opened), charged(component)) == (2, 2)

    def test_sync_and_async_answer_alike(self, make: Any) -> None:
        component = make(serving=Serving(memo_size=0)).with_receipts()
        sync, awaited = component.invoke("now?"), asyncio.run(component.ainvoke("now?"))
        assert (sync.answer, sync.keywords) == (awaited.answer, awaited.keywords)
        assert (sync.similarities or {}) == pytest.approx(awaited.similarities or {}, abs=0.06)
        assert charged(component) == 2

    @pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
    def test_an_awaited_answer_needs_no_thread_in_which_an_equal_question_waits(self, make: Any, loop: str) -> None:
        """A writer that is a function and an observer that is not asynchronous take threads of the loop."""
        usual = VECTORS if make is embedding else WORDS
        component = make(answers=usual.replace(writer=RunnableLambda(lambda _: "ask the bank")))

        async def both() -> list[str]:
            own = ThreadPoolExecutor(1, thread_name_prefix="asyncio")  # as the loop makes it itself
            asyncio.get_running_loop().set_default_executor(own)
            watched: Any = {"callbacks": [BaseCallbackHandler()]}
            asked: list[asyncio.Future[str]] = []
            with component.tenants.turn(component.tenants.of({}), ("now?",)) as gate:
                gate.__enter__()
                for ask in (component.ainvoke("now?", watched), asyncio.to_thread(component.invoke, "now?")):
                    asked.append(asyncio.ensure_future(ask))
                    while len(gate._waiting) < len(asked):  # noqa: ASYNC110  no event tells that a question waits
                        await asyncio.sleep(0.001)
                gate.__exit__(None, None, None)
                _, left = await asyncio.wait(asked, timeout=10.0)
                if left:
                    gate.__exit__(None, None, None)  # one more place: a failure does not hang
                answers = await asyncio.gather(*asked)
            assert not left, "they wait for each other"
            return answers

        with asyncio.Runner(loop_factory=pytest.importorskip(loop).new_event_loop) as runner:
            assert runner.run(both()) == ["ask the bank"] * 2
        assert charged(component) == 1

    def test_what_is_spent_is_answered_zero_shot_where_that_was_asked_for(self, make: Any, opened: list[str]) -> None:
        runs = Runs()
        usual = VECTORS if make is embedding else WORDS
        component = make(
            max_queries=1,
            serving=Serving(on_exhausted="zero_shot"),
            answers=usual.replace(writer=PublicChat(says=["zero-shot answer"])),
        ).with_receipts()
        assert component.invoke("one").receipt.source == "release"
        found = component.invoke("two", {"callbacks": [runs]})
        assert (found.answer, found.keywords, found.similarities) == ("zero-shot answer", None, None)
        assert (found.receipt.source, found.receipt.tickets) == ("zero-shot", 0)
        assert (len(opened), charged(component)) == (1, 1)
        assert [data["answered"] for data in runs.named("dpicl.refused")] == ["zero-shot"]

    @pytest.mark.parametrize("serving", [Serving(), Serving(tenant_max_queries=1)], ids=["share", "tenant"])
    def test_what_is_spent_asks_for_one_public_answer_and_for_no_candidates(self, make: Any, serving: Serving) -> None:
        usual = VECTORS.replace(candidates=None) if make is embedding else WORDS.replace(keywords=None)
        llm = PublicChat(says=["ask the bank", "open a claim", "wait a day"])
        component = make(
            max_queries=1 if serving.tenant_max_queries is None else 8,
            serving=serving.replace(on_exhausted="zero_shot"),
            answers=usual.replace(writer=llm, num_candidates=6),
        )
        component.invoke("one")
        llm.says[:] = ["it"]  # one text, and no keyword: a release could not be made of it
        llm.asked.clear()
        assert component.invoke("two") == "it"
        assert len(llm.asked) == 1
        assert charged(component) == 1

    def test_a_ticket_that_comes_back_after_the_zero_shot_answer_waits_for_the_next_query(self, make: Any) -> None:
        held: list[Any] = []
        llm = RunnableLambda(lambda _: f"{held.pop().give_back()} came back" if held else "it")
        component = make(
            max_queries=1,
            serving=Serving(on_exhausted="zero_shot", memo_size=0),
            answers=(VECTORS if make is embedding else WORDS).replace(writer=llm),
        ).with_receipts()
        held.append(component.share.reserve(QUERY_TEMPLATE))
        assert component.invoke("one").answer == "1 came back"
        assert charged(component) == 0
        assert component.invoke("one").receipt.source == "release"

    def test_results_are_texts_unless_receipts_are_asked_for(self, make: Any) -> None:
        plain, typed = make(), make().with_receipts()
        assert isinstance(plain.invoke("now?"), str)
        assert isinstance(typed.invoke("now?"), FreeFormResult)
        assert (plain.OutputType, typed.OutputType) == (str, FreeFormResult)
        assert plain.get_output_schema().model_json_schema()["type"] == "string"

    def test_only_what_no_price_rests_on_is_configurable(self, make: Any) -> None:
        component = make()
        assert component.configurable_fields(on_exhausted=ConfigurableField(id="spent")).invoke("now?")
        for name in ("maker", "owed", "plan", "gives_receipts"):
            with pytest.raises(ConfigurationError):
                component.configurable_fields(**{name: ConfigurableField(id="x")})

    def test_its_report_recomputes_and_says_what_ran(self, make: Any) -> None:
        budget = budget_of(epsilon=4.0, delta=1e-6)
        component = make(budget=budget, epsilon=1.0, noise=Noise(multiplier=9.0), max_queries=2, component="helper")
        component.invoke("now?")
        report = budget.report()
        verify_report(report)
        assert "helper" in str(report.to_dict() if hasattr(report, "to_dict") else report)
        assert component.plan.epsilon <= 1.0
        assert component.share.delta == pytest.approx(0.25e-6)


# -- a release whose answer could not be written -----------------------------------------------------------------


@pytest.mark.parametrize("memo_size", [256, 0])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_release_whose_answer_could_not_be_written_is_kept_and_finished_for_free(
    opened: list[str], is_async: bool, memo_size: int
) -> None:
    ask = (lambda c, *q: asyncio.run(c.ainvoke(*q))) if is_async else (lambda c, *q: c.invoke(*q))
    runs = Runs()
    llm = PublicChat(says=["zero-shot", OSError("zx-secret"), OSError("x"), "Ask the bank.", "zero-shot", "Again."])
    component = keywords(answers=WORDS.replace(writer=llm), serving=Serving(memo_size=memo_size)).with_receipts()
    with pytest.raises(ModelCallError, match=r"asking again.*free.*\['bank', 'claim'\]") as caught:
        ask(component, "now?", {"callbacks": [runs]})
    assert "zx-secret" not in str(caught.value)
    assert (caught.value.__cause__, caught.value.__context__) == (None, None)
    assert (charged(component), len(opened)) == (1, 1)
    assert [data["tickets"] for data in runs.named("dpicl.charged")] == [1]
    assert runs.named("dpicl.release") == []
    with pytest.raises(ModelCallError, match="stays charged"):
        ask(component, "now?")
    found = ask(component, "now?")
    assert (found.answer, found.keywords) == ("Ask the bank.", ("bank", "claim"))
    assert (found.receipt.source, found.receipt.tickets) == ("memo", 0)
    assert (charged(component), len(opened)) == (1, 1)
    assert len(llm.asked) == 4
    again = ask(component, "now?")
    assert (again.answer, charged(component)) == (("Ask the bank.", 1) if memo_size else ("Again.", 2))


def test_all_releases_wait_for_their_answer_however_many_and_whosever_they_are() -> None:
    said = {"Words": ""}
    writer = RunnableLambda(lambda prompt: next((said[key] for key in said if key in str(prompt)), "zero-shot"))
    component = keywords(answers=WORDS.replace(writer=writer), max_queries=300, serving=Serving(memo_size=1))
    asked = [(f"{place}?", {"configurable": {"tenant": f"{place % 20}"}}) for place in range(270)]
    for question, config in asked:
        with pytest.raises(ModelCallError, match="asking again"):
            component.invoke(question, config)
    said["Words"] = "In time."
    assert {component.invoke(question, config) for question, config in asked} == {"In time."}
    assert charged(component) == 270
    assert not component.owed


def test_what_one_tenant_is_owed_no_other_is_told() -> None:
    llm = PublicChat(says=["zero-shot", OSError("x"), "zero-shot", "Other.", "Ask the bank."])
    component = keywords(answers=WORDS.replace(writer=llm))
    with pytest.raises(ModelCallError):
        component.invoke("now?", {"configurable": {"tenant": "one"}})
    assert component.invoke("now?", {"configurable": {"tenant": "two"}}) == "Other."
    assert charged(component) == 2
    assert component.invoke("now?", {"configurable": {"tenant": "one"}}) == "Ask the bank."
    assert charged(component) == 2


async def test_of_two_releases_that_wait_for_their_answer_each_is_kept_until_it_is_told() -> None:
    """The first one answered does not take away what the second is still owed."""
    turns = [asyncio.Event(), asyncio.Event()]
    said = iter([(turns[0], "first"), (turns[1], OSError("out"))])

    async def write(prompt: Any) -> str:
        if "Words" not in str(prompt):
            return "zero-shot"
        turn, answer = next(said, (None, "at last"))
        if turn is not None:
            await turn.wait()
        if isinstance(answer, Exception):
            raise answer
        return answer

    component = keywords(
        answers=WORDS.replace(writer=RunnableLambda(lambda _: "", afunc=write)), serving=Serving(memo_size=0)
    )
    both = [asyncio.create_task(component.ainvoke("now?")) for _ in range(2)]
    while charged(component) < 2:  # noqa: ASYNC110  what it waits for is the ledger's
        await asyncio.sleep(0.01)
    turns[0].set()
    (told,), (waiting,) = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    assert await told == "first"
    turns[1].set()
    with pytest.raises(ModelCallError):
        await waiting
    assert await component.ainvoke("now?") == "at last"
    assert charged(component) == 2


def test_an_answer_without_text_is_no_answer() -> None:
    component = keywords(answers=WORDS.replace(writer=PublicChat(says=["zero-shot", "\n ", "In time."])))
    said = r"no text before the first stop string\. Check the model, then ask again\. The release stays charged.*free"
    with pytest.raises(ModelCallError, match=said):
        component.invoke("now?")
    assert component.invoke("now?") == "In time."
    assert charged(component) == 1


def test_a_line_break_before_an_answer_does_not_end_it() -> None:
    component = keywords(answers=WORDS.replace(writer=PublicChat(says=["zero-shot", "\n\nIn time.\nMore."])))
    assert component.invoke("now?") == "In time."


async def test_a_cancelled_writing_is_kept_too() -> None:
    begun = asyncio.Event()

    async def write(prompt: Any) -> str:
        if "Words" in str(prompt) and not begun.is_set():
            begun.set()
            await asyncio.sleep(60)
        return "written"

    component = keywords(answers=WORDS.replace(writer=RunnableLambda(lambda _: "written", afunc=write)))
    task = asyncio.create_task(component.ainvoke("now?"))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await component.ainvoke("now?") == "written"
    assert charged(component) == 1


def test_threads_that_hang_in_one_loop_stop_no_answer_of_another() -> None:
    component = keywords(answers=WORDS.replace(writer=RunnableLambda(lambda _: "ask the bank")))
    may_end = threading.Event()

    async def hang() -> None:
        threads = component.tenants.threads_here()
        for _ in range(threads._max_workers):
            threads.submit(may_end.wait)
        assert component.tenants.threads_here() is threads

    try:
        asyncio.run(hang())
        assert asyncio.run(asyncio.wait_for(component.ainvoke("now?"), 60.0)) == "ask the bank"
    finally:
        may_end.set()


# -- the prompt that answers are written from --------------------------------------------------------------------


def test_the_answer_prompt_may_be_any_template_of_the_keywords_and_the_query() -> None:
    chat = ChatPromptTemplate.from_messages([("system", "Use: {keywords}"), ("human", "{input}")])
    for given, asked in (
        ("{keywords} <- {input}", "bank, claim <- now {x}?"),
        (PromptTemplate.from_template("{keywords}!"), "bank, claim!"),
        (chat, "now {x}?"),
    ):
        llm = PublicChat(says=["answer"])
        keywords(answers=WORDS.replace(answer_prompt=given, writer=llm)).invoke("now {x}?")
        assert llm.asked[-1] == asked


def test_the_default_answer_prompt_is_the_public_prompt_under_the_keywords() -> None:
    llm = PublicChat(says=["answer"])
    component = keywords(
        answers=WORDS.replace(writer=llm),
        example_prompt=None,
        suffix=None,
        task=FewShotTask("{text}", "asks: {input}", prefix="Help {who}.", example_separator="\n{/}\n"),
    )
    component.invoke({"who": "her", "input": "now?"})
    head, hint, tail = llm.asked[-1].split("\n{/}\n")
    assert (head, tail) == ("Help her.", "asks: now?")
    assert hint.endswith(": bank, claim")


@pytest.mark.parametrize(
    "given",
    ["no variable", "{keywords} {other}", "{input}", "{keywords", "{}", 5, ChatPromptTemplate.from_messages([MessagesPlaceholder("keywords")])],
    ids=["none", "another", "no keywords", "open", "unnamed", "number", "messages"],
)  # fmt: skip
def test_an_answer_prompt_that_cannot_be_filled_is_refused_at_once(given: Any) -> None:
    with pytest.raises(ConfigurationError, match="answer_prompt"):
        keywords(answers=WORDS.replace(answer_prompt=given))


def test_a_variable_called_keywords_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="another name than"):
        keywords(suffix="{input} {keywords}")


# -- construction ------------------------------------------------------------------------------------------------


def decision_model() -> Any:
    from tests.unit_tests.backends.langchain.test_decisions import ScriptedDecisions, hashed

    return ScriptedDecisions(answer=hashed)


class Keeper(OneHot):
    """Embeddings that keep what they were asked."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = InMemoryByteStore()


class ChoosesOnly:
    score_choices = FakeBackend.score_choices
    ascore_choices = FakeBackend.ascore_choices


LABELLED: dict[str, Any] = {
    "example_prompt": None,
    "suffix": None,
    "task": FewShotTask("{text}", "asks: {input}", labels=("yes", "no")),
}
REFUSED: dict[str, tuple[Callable[..., Any], type[DPICLError], str]] = {
    "a decision model": (
        lambda b: embedding(llm=decision_model(), budget=b),
        CapabilityError,
        "chooses among given labels",
    ),
    "a decisions engine": (
        lambda b: embedding(llm=DecisionsBackend(decision_model()), budget=b),
        CapabilityError,
        "DPVotingRunnable takes it",
    ),
    "an engine for choices": (lambda b: embedding(llm=ChoosesOnly(), budget=b), CapabilityError, "cannot write text"),
    "a chain": (
        lambda b: embedding(llm=EmbeddedLLM() | StrOutputParser(), budget=b),
        CapabilityError,
        "pass the model itself",
    ),
    "a class": (lambda b: embedding(llm=EmbeddedLLM, budget=b), CapabilityError, "found the class EmbeddedLLM"),
    "a public model that writes no text": (
        lambda b: embedding(answers=VECTORS.replace(writer=ChoosesOnly()), budget=b),
        CapabilityError,
        "cannot write text",
    ),
    "no embeddings": (
        lambda b: embedding(answers=VECTORS.replace(embeddings=object()), budget=b),
        ConfigurationError,
        "embeddings: expected",
    ),
    "embeddings that keep texts": (
        lambda b: embedding(answers=VECTORS.replace(embeddings=Keeper()), budget=b),
        UnsilencableModelError,
        "Keeper",
    ),
    "one candidate": (
        lambda b: embedding(answers=VECTORS.replace(candidates=["a", "a "]), budget=b),
        ConfigurationError,
        "at least 2",
    ),
    "candidates in one text": (
        lambda b: embedding(answers=VECTORS.replace(candidates="a, b"), budget=b),
        ConfigurationError,
        "candidates",
    ),
    "no private examples": (lambda b: embedding(private=RECORDS, budget=b), ConfigurationError, "private"),
    "other answers": (
        lambda b: build(answers=LabelAnswers(), budget=b),
        ConfigurationError,
        "answers: expected EmbeddingAnswers(...) or KeywordAnswers(...)",
    ),
    "labels": (lambda b: embedding(**LABELLED, budget=b), ConfigurationError, "no labels and no verbalizers"),
    "a task beside a template": (
        lambda b: embedding(task=FewShotTask("{text}", "asks: {input}"), budget=b),
        ConfigurationError,
        "found 'both'",
    ),
    "another mechanism": (
        lambda b: keywords(noise=Noise("gumbel", multiplier=NOISELESS), budget=b),
        ConfigurationError,
        "'joint_exponential' noise",
    ),
    "one sample for all queries": (
        lambda b: embedding(rows=Rows(units=10, redraw_every="run"), budget=b),
        ConfigurationError,
        "redraw_every",
    ),
    "a small domain": (
        lambda b: keywords(answers=WORDS.replace(num_keywords=6), budget=b),
        ConfigurationError,
        "num_keywords=6",
    ),
    "a small cap": (
        lambda b: keywords(answers=WORDS.replace(keywords=None, num_keywords=6, max_keywords=5), budget=b),
        ConfigurationError,
        "max_keywords",
    ),
    "no queries": (lambda b: embedding(max_queries=0, budget=b), ConfigurationError, "max_queries"),
}


@pytest.mark.parametrize("refused", REFUSED.values(), ids=REFUSED)
def test_what_cannot_work_is_refused_before_anything_is_bound_or_set_aside(refused: Any, opened: list[str]) -> None:
    make, kind, said = refused
    budget = budget_of()
    before = len(list(budget.budget._store.records()))
    with pytest.raises(kind, match=re.escape(said)) as caught:
        make(budget)
    assert type(caught.value) is kind
    assert len(list(budget.budget._store.records())) == before
    assert opened == []


def test_without_a_budget_nothing_is_built() -> None:
    private = PrivateExamples(RECORDS, public_size=10)
    with pytest.raises(NoPrivacyBudgetError):
        DPFreeFormRunnable.from_private_examples(
            private, llm=Writer(), max_queries=1, answers=EmbeddingAnswers(embeddings=OneHot())
        )


def test_an_embedding_has_the_width_of_the_plan_and_a_domain_has_its_cap() -> None:
    assert embedding().plan.width == len(CANDIDATES) + 1
    assert keywords().plan.width == 5
    assert keywords(answers=WORDS.replace(keywords=None)).plan.width == 256
    assert embedding().plan.release.aggregation.name == "unit_vector_sum"
    plan = keywords(answers=WORDS.replace(num_keywords=3)).plan
    assert (plan.release.aggregation.name, plan.release.mechanism.num_choices) == ("keyword_sum", 3)


def test_rows_are_units_unless_slots_are_asked_for() -> None:
    plan = embedding(rows=None).plan
    assert (plan.design.rows, plan.design.num_slots) == ("units", 10)
    slots = embedding(rows=Rows(slots=4, shots=2))
    assert (slots.plan.design.rows, slots.plan.design.shots_per_slot) == ("slots", 2)
    assert slots.invoke("q") in CANDIDATES


def test_a_completion_engine_around_a_langchain_model_is_taken_as_it_is() -> None:
    llm = TextVoteBackend(FakeListChatModel(responses=["ask the bank"]))
    assert embedding(llm=llm).invoke("q") == "ask the bank"


def test_a_fake_engine_needs_no_langchain_model_at_all() -> None:
    engine = FakeBackend(scripted({"ask the bank": 1.0}), max_top_k=1)
    assert embedding(llm=engine).invoke("q") == "ask the bank"


def test_a_tool_takes_the_query() -> None:
    tool = embedding().as_tool(name="helper", description="Answers.")
    assert tool.invoke({"input": "now?"}) == "ask the bank"


def test_inputs_of_other_shapes_are_refused_before_anything_is_asked() -> None:
    llm = Writer()
    component = embedding(llm=llm)
    for given in ({"other": "x"}, 1.5j, None):
        with pytest.raises(ConfigurationError):
            component.invoke(given)
    assert (llm.public, charged(component)) == (0, 0)


def before(engine: Any) -> Any:
    """The public calls of a query that an engine writes two candidates for."""
    limits: dict[str, Any] = {"max_tokens": 5, "stop": ()}
    door = PrivateDoor(engine, name="engine", **limits)
    source = CandidateSource(PublicModel(engine, **limits), door=door, count=2)
    return source.before(["Question"], {"input": "Question"}, {})


def test_an_engine_that_can_is_told_that_a_prompt_is_public() -> None:
    class Told(Writer):
        def complete(
            self, prompts: Sequence[str], *, max_tokens: int, stop: Sequence[str] = (), public: bool = False
        ) -> list[str]:
            said = super().complete(prompts, max_tokens=max_tokens, stop=stop)
            self.options[-1]["public"] = public
            return said

        async def acomplete(self, prompts: Sequence[str], **options: Any) -> list[str]:
            return self.complete(prompts, **options)

    engine = Told()
    run_sync(before(engine))
    assert [options["public"] for options in engine.options] == [True, False]  # the latter as private rows are asked
    plain = Writer()
    run_sync(before(plain))
    assert plain.public == 3
