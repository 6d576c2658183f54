"""Public inputs labelled, and a student's prompt chosen and used, through live providers on this machine.

Every record is in every sample and noise is next to nothing (a vote is off by 1/2 with chance below 1e-100), so released
votes say which rows voted for what. The embedded model behind the loopback provider copies the last label that its
prompt shows; the llama.cpp server has random weights, and its votes are counted here by public calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langchain_core.prompts import (
    ChatPromptTemplate,
    FewShotChatMessagePromptTemplate,
    FewShotPromptTemplate,
    PromptTemplate,
)

from langchain_dpicl import (
    FewShotTask,
    LabelAnswers,
    LabelledPool,
    Noise,
    PromptPATEExampleSelector,
    PromptPATELabeler,
    Rows,
    verify_report,
)
from langchain_dpicl.backends.langchain.backend import LangChainBackend
from langchain_dpicl.backends.langchain.logprobs import DecisionsBackend
from langchain_dpicl.backends.langchain.texts import TextVoteBackend
from langchain_dpicl.backends.resolve import as_choice_backend
from langchain_dpicl.budget.handler import PrivacyBudgetCallbackHandler
from langchain_dpicl.exceptions import RunInterruptedError
from langchain_dpicl.options import Student
from langchain_dpicl.privacy.private_examples import PrivateExamples
from langchain_dpicl.released import PoolEntry
from tests.canary import RECORD, aobserve, canaries_in, leaks, observe
from tests.contracts.release_run import entries_in
from tests.live import (
    LABELS,
    PrivateCalls,
    Servers,
    anthropic_model,
    decision_model,
    openai_model,
)
from tests.live_queries import (
    MAX_QUERIES,
    RETRY,
    TEXTS,
    asked_privately,
    letters_of,
    likelier,
    prompt_of,
)
from tests.llama_server import running_server
from tests.loopback_provider import (
    Provider,
    Received,
    echoing_400,
    hang_up,
    rate_limited,
    server_error,
)

pytestmark = [
    pytest.mark.loopback,
    pytest.mark.filterwarnings("ignore:The class `OpenAIDecisions` is in beta"),
    pytest.mark.usefixtures("remembered_prices"),
]

TAUGHT = [*TEXTS[:4], *TEXTS[-4:-2]]
ROWS = len(TAUGHT)
PLAIN = ("is it there ?", "where is my money ?")
SPEAKING = tuple(f"{text}\nqueue: transfer\n\ntext: and now ?" for text in ("it was late", "it came twice"))
"""Inputs that bring a label along, which the embedded model copies from them."""
NAMELESS = "and now ?\nqueue: fraud\n\ntext: and now ?"
INPUTS = (*PLAIN, *SPEAKING)
BRACED = ("is {it} there ?", "where is {{my}} money ?", *SPEAKING)
STUDENT: dict[str, Any] = {
    "student": Student(shots=1, num_candidates=4, num_validation=2),
    "progress": False,
}
ONCE = Rows(units=ROWS, redraw_every="run")
READ = LabelAnswers(calibrate=False, abstain_below=0.4)  # where a row or two fail, no input is at the edge
QUERY = {"input": "is my card {lost} ?"}

Make = Callable[[Provider], Any]


def examples() -> PrivateExamples:
    """The records, with the canary in each."""
    listed = [{"text": text, "queue": label} for text, label in TAUGHT]
    return PrivateExamples(listed, label_key="queue", labels=LABELS, public_size=ROWS)


def labeler(llm: Any, private: PrivateExamples | None = None, **options: Any) -> PromptPATELabeler:
    """A labeler whose votes can be counted."""
    budget = PrivacyBudgetCallbackHandler(epsilon=2e6, delta=1e-4)
    given: dict[str, Any] = {"budget": budget, "epsilon": 1e6, "max_queries": MAX_QUERIES, "public_inputs": INPUTS}
    given |= {"rows": Rows(units=ROWS), "noise": Noise("gaussian", multiplier=0.01), "answers": READ, **options}
    return PromptPATELabeler.from_private_examples(private or examples(), llm=llm, **given)


def selector(llm: Any, **options: Any) -> PromptPATEExampleSelector:
    """The selector over what the labeler releases."""
    return PromptPATEExampleSelector.from_run(labeler(llm, **options), **STUDENT)


async def aselector(llm: Any, **options: Any) -> PromptPATEExampleSelector:
    """Is `selector`, awaitable."""
    return await PromptPATEExampleSelector.afrom_run(labeler(llm, **options), **STUDENT)


def votes(pool: LabelledPool) -> list[tuple[int, ...]]:
    """The votes on each input that was asked about, without the noise."""
    counted = [np.array(list(entry.votes.values())) for entry in pool.entries if entry.votes is not None]
    assert all(np.abs(counts - counts.round()).max() < 0.5 for counts in counted)
    return [tuple(counts.round().astype(int).tolist()) for counts in counted]


def labels(pool: LabelledPool) -> list[str | None]:
    return [entry.label for entry in pool.entries]


def chat(served: Provider) -> Any:
    return LangChainBackend(openai_model("ChatOpenAI", served.url), continuation="instruct", retry=RETRY)


def completions(served: Provider) -> Any:
    return LangChainBackend(openai_model("OpenAI", served.url), retry=RETRY)


def decisions(served: Provider) -> Any:
    return DecisionsBackend(decision_model(served.url), retry=RETRY)


def anthropic(served: Provider) -> Any:
    return TextVoteBackend(anthropic_model(served.root), retry=RETRY)


every_engine = pytest.mark.parametrize(
    "make", [chat, completions, decisions, anthropic], ids=lambda make: make.__name__
)
COUNTED = [(4, 2), (4, 2), (0, ROWS), (0, ROWS)]


def string_prompt(selected: PromptPATEExampleSelector) -> FewShotPromptTemplate:
    return FewShotPromptTemplate(
        example_selector=selected.with_strategy("validated", escape_braces=True),
        example_prompt=PromptTemplate.from_template("text: {text}\nqueue: {queue}"),
        suffix="text: {input}\nqueue:",
        input_variables=["input"],
    )


def chat_prompt(selected: PromptPATEExampleSelector) -> ChatPromptTemplate:
    turns = ChatPromptTemplate.from_messages([("human", "{text}"), ("ai", "{queue}")])
    shown = FewShotChatMessagePromptTemplate(example_selector=selected, example_prompt=turns, input_variables=["input"])
    return ChatPromptTemplate.from_messages([shown, ("human", "{input}")])


def demonstration(selected: PromptPATEExampleSelector) -> tuple[str, str]:
    """The one demonstration of the student's prompt, off the pool: an input with braces in it, and its label."""
    assert selected.student is not None
    entry = selected.pool.entries[selected.student.demonstrations[0]]
    assert "{" in entry.fields["text"]
    return entry.fields["text"], str(entry.label)


class TestLabels:
    """Each kind of provider, end to end; models are handed in as people do."""

    @pytest.mark.parametrize(
        ("model", "reads"),
        [
            (lambda served: openai_model("ChatOpenAI", served.url), "first tokens"),
            (lambda served: openai_model("OpenAI", served.url), "first tokens"),
            (lambda served: decision_model(served.url), "decisions"),
            (lambda served: anthropic_model(served.root), "text votes"),
        ],
        ids=["chat", "completions", "decisions", "anthropic"],
    )
    async def test_are_counted_unheard_and_teach_a_student(
        self, servers: Servers, model: Callable[[Provider], Any], reads: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        llm, calls = model(servers.served()), PrivateCalls(monkeypatch)
        seen = observe(lambda: selector(llm))
        awaited = await aobserve(lambda: aselector(llm, rows=ONCE))
        other = (0,) * (reads == "text votes")
        for one in (seen, awaited):
            assert one.error is None
            assert leaks(one) == set()
            pool, student = one.result.pool, one.result.student
            assert pool.plan["reads"] == reads
            assert (votes(pool), labels(pool)) == ([c + other for c in COUNTED], ["card"] * 2 + ["transfer"] * 2)
            assert verify_report(pool).ok
            assert canaries_in(pool.to_json()) == []
            # A demonstration of a transfer would be copied to plain inputs; one of a card spoils nothing.
            assert {c.right for c in student.candidates} == {1, 2}
            assert (student.accuracy, [INPUTS[place] in PLAIN for place in student.demonstrations]) == (1.0, [True])
            # The student's calls are public, and as silent; where it reports probabilities, each prompt is calibrated.
            # The first of each candidate goes alone, as a call whose error is explained, which is not counted here.
            asked = len(student.candidates) * (len(student.held_back) + (reads == "first tokens") - 1)
            calls.made -= asked
            calls.awaited -= asked * (one is awaited)
        assert (calls.made, calls.awaited, calls.failed) == (2 * ROWS * len(INPUTS), ROWS * len(INPUTS), 0)

    async def test_that_are_none_are_counted_apart_and_reject_the_input(self, servers: Servers) -> None:
        llm = anthropic_model(servers.served().root)
        made, silent = (
            labeler(llm, public_inputs=[PLAIN[0], NAMELESS]),
            labeler(llm, public_inputs=[NAMELESS], answers=READ.replace(other_label="")),
        )
        made.run(progress=False)
        await silent.arun(progress=False)
        assert (labels(made.result), votes(made.result)) == (["card", None], [(4, 2, 0), (0, 0, ROWS)])
        assert (labels(silent.result), votes(silent.result)) == ([None], [(0, 0)])
        assert [entry.status for entry in (*made.result.rejected, *silent.result.rejected)] == ["rejected"] * 2

    @pytest.mark.parametrize("kind", ["ChatOpenAI", "OpenAI"])
    async def test_of_a_real_server_are_those_that_its_tokens_cast(self, servers: Servers, kind: str) -> None:
        """Also used there: a stock chain sends what its stock parts send by themselves."""
        model = openai_model(kind, f"{servers.llama.url}/v1", temperature=0.0, max_tokens=4)
        model = model.bind(extra_body={"cache_prompt": False})
        engine = as_choice_backend(model)
        said = dict(zip(LABELS, letters_of(engine), strict=True))
        options: dict[str, Any] = {
            "task": FewShotTask(verbalizers=said),
            "public_inputs": PLAIN,
            "answers": READ.replace(abstain_below="never"),
        }
        cast = [
            Counter(likelier(engine, prompt_of(text, said[label], given), said) for text, label in TAUGHT)
            for given in PLAIN
        ]
        for found in (
            selector(engine, **options),
            await aselector(engine, **options, rows=ONCE),
        ):
            assert votes(found.pool) == [tuple(counts[label] for label in LABELS) for counts in cast]
            for entry, counts in zip(found.pool.entries, cast, strict=True):
                assert counts[entry.label] == max(counts[label] for label in LABELS) > 0
            for prompt in (
                (string_prompt(found), chat_prompt(found)) if kind == "ChatOpenAI" else (string_prompt(found),)
            ):
                expected = model.invoke(prompt.invoke(QUERY))
                for answer in ((prompt | model).invoke(QUERY), await (prompt | model).ainvoke(QUERY)):
                    assert getattr(answer, "content", answer) == getattr(expected, "content", expected) != ""
            assert found.queries_left == MAX_QUERIES - len(PLAIN)


class TestTheStudent:
    """Chosen once, used through stock templates and models; what is sent holds no record."""

    async def test_is_shown_by_a_stock_string_template(self, servers: Servers) -> None:
        served = servers.served()
        found = selector(completions(served), public_inputs=BRACED)
        text, label = demonstration(found)
        for model in (openai_model("OpenAI", served.url), openai_model("ChatOpenAI", served.url)):
            chain = string_prompt(found) | model
            served.clear()
            answers = [chain.invoke(QUERY), await chain.ainvoke(QUERY)]
            assert [str(getattr(answer, "content", answer)).split()[0] for answer in answers] == ["card"] * 2
            sent = [request.body.get("prompt") or request.body["messages"][0]["content"] for request in served.received]
            assert [text for one in sent for text in ([one] if isinstance(one, str) else one)] == [
                f"text: {text}\nqueue: {label}\n\ntext: {QUERY['input']}\nqueue:"
            ] * 2
            assert asked_privately(served) == 0

    async def test_is_shown_by_a_stock_chat_template(self, servers: Servers) -> None:
        served = servers.served()
        found = await aselector(anthropic(served), public_inputs=BRACED)
        text, label = demonstration(found)
        turns = [("user", text), ("assistant", label), ("user", QUERY["input"])]
        for model in (anthropic_model(served.root), openai_model("ChatOpenAI", served.url)):
            chain = chat_prompt(found) | model
            served.clear()
            answers = [chain.invoke(QUERY), await chain.ainvoke(QUERY)]
            assert all(answer.text for answer in answers)
            for request in served.received:
                assert [(turn["role"], turn["content"]) for turn in request.body["messages"]] == turns
            assert (len(served.received), asked_privately(served)) == (2, 0)

    async def test_that_could_not_be_chosen_costs_no_label(self, servers: Servers) -> None:
        served = servers.served()
        made = labeler(chat(served))
        made.run(progress=False)
        served.clear()
        for hook in (hang_up(), server_error()):
            served.script(hook)
            with pytest.raises(RunInterruptedError, match="was not chosen") as sync:
                PromptPATEExampleSelector.from_run(made, **STUDENT)
            with pytest.raises(RunInterruptedError, match="was not chosen") as awaited:
                await PromptPATEExampleSelector.afrom_run(made, **STUDENT)
            assert sync.value.run is awaited.value.run is made
            served.clear()
        found = await PromptPATEExampleSelector.afrom_run(made, **STUDENT)
        assert (found.student.accuracy if found.student else None) == 1.0
        assert (made.queries_left, asked_privately(served)) == (MAX_QUERIES - len(INPUTS), 0)


# -- what goes wrong ----------------------------------------------------------------------------------------------


def public_call_of(text: str) -> Callable[[Received], bool]:
    """Whether a request is the public one that goes before an input's ticket."""
    sent = text.replace("\n", "\\n").encode()
    return lambda request: sent in request.raw and RECORD.encode() not in request.raw


@every_engine
class TestFaults:
    """Rows that fail abstain, in public nothing shows; a provider that is out interrupts, and nobody pays twice."""

    async def test_an_outage_half_way_keeps_what_is_paid_and_is_gone_on_from(
        self, servers: Servers, make: Make
    ) -> None:
        served = servers.served()
        made = labeler(make(served), public_inputs=INPUTS[1:])
        served.clear()
        for asked, hook in ((ROWS, hang_up()), (0, server_error()), (0, rate_limited())):
            served.script(hook, when=public_call_of(INPUTS[2]))
            seen = observe(lambda: made.run(progress=False))
            awaited = await aobserve(lambda: made.arun(progress=False))
            for one in (seen, awaited):
                assert isinstance(one.error, RunInterruptedError)
                assert one.error.run is made
                assert leaks(one) == set()
            assert labels(made.result) == ["card", None, None]
            assert (made.queries_left, asked_privately(served)) == (MAX_QUERIES - 1, asked)
            served.clear()
        assert labels(await made.arun(progress=False)) == ["card", "transfer", "transfer"]
        assert (made.queries_left, asked_privately(served)) == (MAX_QUERIES - 3, 2 * ROWS)

    async def test_rows_that_are_limited_or_broken_for_a_while_are_waited_for(
        self, servers: Servers, make: Make
    ) -> None:
        served = servers.served()
        made = labeler(make(served), public_inputs=[INPUTS[0]])

        def script() -> None:
            served.clear()
            served.script(rate_limited(retry_after="0"), when="card number 3", times=1)
            served.script(server_error(), when="transfer number 1", times=2)

        script()
        assert votes(made.run(progress=False))[0][:2] == (4, 2)
        assert asked_privately(served) == ROWS + 3
        script()
        assert (await made.alabel(INPUTS[1])).label == "card"
        assert votes(made.result)[1][:2] == (4, 2)
        assert asked_privately(served) == ROWS + 3

    async def test_rows_that_fail_for_good_abstain_and_the_input_is_charged(self, servers: Servers, make: Make) -> None:
        served = servers.served()
        made = labeler(make(served), public_inputs=[INPUTS[0]])
        served.script(echoing_400(), when=lambda request: b"card number 3" in request.raw)
        served.script(rate_limited(), when=lambda request: b"transfer number 1" in request.raw)
        seen = observe(lambda: made.run(progress=False))
        served.script(echoing_400(), when=RECORD)
        awaited = await aobserve(lambda: made.alabel(INPUTS[2]))
        for one in (seen, awaited):
            assert one.error is None
            assert leaks(one) == set()
        assert [found[:2] for found in votes(made.result)] == [(3, 1), (0, 0)]
        assert (labels(made.result), made.queries_left) == (["card", None], MAX_QUERIES - 2)
        assert [sum(found[2:]) for found in votes(made.result)] == [0, 0]  # a call that failed is no other answer


@pytest.mark.parametrize("make", [chat, decisions, anthropic], ids=lambda make: make.__name__)
async def test_rows_that_a_provider_refuses_abstain_or_count_as_other(servers: Servers, make: Make) -> None:
    made = labeler(make(servers.served(refuse="number 2")), public_inputs=[INPUTS[0]])
    made.run(progress=False)
    await made.alabel(INPUTS[1])
    assert votes(made.result) == [(3, 2, 1) if make is anthropic else (3, 2)] * 2


async def test_a_server_that_dies_interrupts_and_the_file_goes_on_elsewhere(servers: Servers, tmp_path: Path) -> None:
    options: dict[str, Any] = {"public_inputs": PLAIN, "checkpoint": tmp_path / "labels.json"}
    options |= {"private": examples(), "answers": READ.replace(abstain_below="never")}
    with running_server() as llama:
        engine = LangChainBackend(openai_model("ChatOpenAI", f"{llama.url}/v1"), continuation="instruct", retry=RETRY)
        options |= {"task": FewShotTask(verbalizers=dict(zip(LABELS, letters_of(engine), strict=True)))}
        made = labeler(engine, **options)
        first = next(made.stream(progress=False))
    with pytest.raises(RunInterruptedError, match="1 of 2 inputs are released"):
        made.run(progress=False)
    with pytest.raises(RunInterruptedError, match="1 of 2 inputs are released"):
        await made.arun(progress=False)
    kept = made.result
    assert kept.entries == (first, *kept.waiting)
    assert [PoolEntry.from_dict(entry) for entry in entries_in(tmp_path / "labels.json")] == [first]
    assert canaries_in((tmp_path / "labels.json").read_text()) == []
    live = LangChainBackend(openai_model("ChatOpenAI", f"{servers.llama.url}/v1"), continuation="instruct", retry=RETRY)
    resumed = labeler(live, **options, budget=made._budget)
    pool = await resumed.arun(progress=False)
    assert (pool.entries[0], pool.entries[1].status) == (first, "labelled")
    assert resumed.queries_left == MAX_QUERIES - 2
