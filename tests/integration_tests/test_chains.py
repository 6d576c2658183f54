"""The main job, in a stock chain, on the offline model: private records in, answers out."""

from __future__ import annotations

import json
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, FewShotPromptTemplate, PromptTemplate
from langchain_core.runnables import Runnable

from langchain_dpicl import (
    ChatEmbedded,
    DPFewShotChatMessagePromptTemplate,
    DPFewShotPromptTemplate,
    EmbeddedLLM,
    GenerationTask,
    LabelClassifier,
    PrivacyBudgetCallbackHandler,
    PrivateExamples,
    verify_report,
)
from langchain_dpicl.baselines import demonstrations_from_instruction, real_demonstrations_without_privacy

QUESTIONS = {
    "card payment": ["Why was my card payment to {} declined?", "My card payment at {} was charged twice."],
    "transfer": ["Why has my transfer to {} not arrived yet?", "My transfer to {} is still pending."],
}
LABELS = tuple(QUESTIONS)
RECORDS = [
    {"text": question.format(f"Person {number}"), "topic": label}
    for label, questions in QUESTIONS.items()
    for number in range(200)
    for question in questions
]
EXAMPLE = PromptTemplate.from_template("question: {text}\ntopic: {topic}")
TASK = {"prefix": "Questions of bank customers.", "suffix": "question: {input}\ntopic:"}
OPTIONS: dict[str, Any] = {
    "epsilon": 4.0,
    "max_tokens": 12,
    "instruction": "Questions of bank customers.",
    "task": GenerationTask(record_prompt="topic: {topic}\nquestion: {text}"),
}


def private_examples() -> PrivateExamples:
    return PrivateExamples(RECORDS, label_key="topic", labels=LABELS, public_size=dict.fromkeys(LABELS, 400))


@pytest.fixture(scope="module")
def budget() -> PrivacyBudgetCallbackHandler:
    return PrivacyBudgetCallbackHandler(epsilon=4.0, delta=1e-5)


@pytest.fixture(scope="module")
def prompt(budget: PrivacyBudgetCallbackHandler) -> DPFewShotPromptTemplate:
    return DPFewShotPromptTemplate.from_private_examples(
        private_examples(), llm=EmbeddedLLM(), budget=budget, example_prompt=EXAMPLE, **TASK, **OPTIONS
    )


@pytest.fixture(scope="module")
def chain(prompt: DPFewShotPromptTemplate) -> Runnable[Any, str]:
    return prompt | EmbeddedLLM().bind(max_tokens=4, stop=["\n"]) | StrOutputParser()


def test_a_demonstration_per_label_is_released(prompt: DPFewShotPromptTemplate) -> None:
    assert [example["topic"] for example in prompt.examples] == list(LABELS)
    assert prompt.epsilon <= 4.0


def test_the_budget_is_spent_once_and_the_report_recomputes(
    budget: PrivacyBudgetCallbackHandler, prompt: DPFewShotPromptTemplate, chain: Any
) -> None:
    before = budget.remaining_epsilon
    for _ in range(5):
        chain.invoke({"input": "my card does not work"})
    assert budget.remaining_epsilon == before
    verified = verify_report(json.loads(budget.report().to_json()))
    assert verified.ok
    assert 3.5 < verified.epsilon <= 4.0


INPUT = {"input": "Why was my card payment refused?"}


def test_invoke_and_batch_and_stream_agree(chain: Any) -> None:
    answer = chain.invoke(INPUT)
    assert isinstance(answer, str)
    assert chain.batch([INPUT, INPUT]) == [answer, answer]
    assert "".join(chain.stream(INPUT)) == answer


async def test_async_agrees(chain: Any) -> None:
    answer = await chain.ainvoke(INPUT)
    assert answer == chain.invoke(INPUT)
    assert await chain.abatch([INPUT] * 2) == [answer] * 2
    assert "".join([part async for part in chain.astream(INPUT)]) == answer


def test_partial_works_also_after_an_invoke(prompt: DPFewShotPromptTemplate) -> None:
    prompt.invoke(INPUT)
    assert prompt.partial(input="x").format() == prompt.format(input="x")


def test_the_chat_class_serves_the_same_demonstrations(prompt: DPFewShotPromptTemplate) -> None:
    turns = ChatPromptTemplate.from_messages([("human", "{text}"), ("ai", "{topic}")])
    chat = DPFewShotChatMessagePromptTemplate.from_released(
        prompt.released, example_prompt=turns, prefix=TASK["prefix"], suffix="{input}"
    )
    answer = (chat | ChatEmbedded() | StrOutputParser()).invoke(INPUT)
    assert isinstance(answer, str)
    assert len(chat.invoke(INPUT).to_messages()) == 2 + 2 * len(LABELS)


async def test_demonstrations_can_be_made_async() -> None:
    made = await DPFewShotPromptTemplate.afrom_private_examples(
        private_examples(),
        llm=EmbeddedLLM(),
        budget=PrivacyBudgetCallbackHandler(epsilon=4.0, delta=1e-5),
        example_prompt=EXAMPLE,
        **TASK,
        **OPTIONS,
    )
    assert len(made.examples) == 2


def test_documents_can_be_private() -> None:
    documents = [Document(page_content=r["text"], metadata={"topic": r["topic"]}) for r in RECORDS]
    private = PrivateExamples(documents, label_key="topic", labels=LABELS, public_size=dict.fromkeys(LABELS, 400))
    budget = PrivacyBudgetCallbackHandler(epsilon=4.0, delta=1e-5)
    made = DPFewShotPromptTemplate.from_private_examples(
        private, llm=EmbeddedLLM(), budget=budget, example_prompt=EXAMPLE, **TASK, **OPTIONS
    )
    assert len(made.examples) == 2


def test_real_questions_are_told_apart_with_what_was_released(prompt: DPFewShotPromptTemplate) -> None:
    """Sanity, not a benchmark: easy questions with the same words as the records."""
    classifier = LabelClassifier(EmbeddedLLM(), labels=LABELS, prompt=prompt)
    queries = ["Why was my card payment declined?", "Why has my transfer not arrived?"] * 3
    answers = classifier.batch(queries)
    assert set(answers) <= set(LABELS)


def test_the_stock_class_would_have_failed_where_ours_does_not() -> None:
    """The upstream behaviour that this package works around; if it is fixed, so can ours be."""
    hostile = {"text": '{"a": 1}', "topic": "x"}
    stock = FewShotPromptTemplate(examples=[hostile], example_prompt=EXAMPLE, suffix="{input}")
    with pytest.raises(KeyError):
        stock.format(input="q")
    ours = DPFewShotPromptTemplate(examples=[hostile], example_prompt=EXAMPLE, suffix="{input}")
    assert '{"a": 1}' in ours.format(input="q")


class TestAReleasedReport:
    """What travels with released demonstrations can be verified, and an edit of it shows."""

    def test_verifies_as_it_is(self, prompt: DPFewShotPromptTemplate) -> None:
        for form in (prompt.privacy_report, prompt.released, prompt.released.to_json()):
            assert verify_report(form).ok

    @pytest.mark.parametrize(
        "edit",
        [
            lambda report: report.update(epsilon=0.001),
            lambda report: report.update(delta=1e-12),
            lambda report: report.update(adjacency="replace_one"),
            lambda report: report["budget"]["shares"][0]["components"][0]["public"].update(noise_multiplier=99.0),
            lambda report: report["budget"]["datasets"][0]["public_size"].update(transfer=4),
        ],
    )
    def test_an_edit_shows(self, edit: Any, prompt: DPFewShotPromptTemplate) -> None:
        report = json.loads(json.dumps(prompt.privacy_report))
        edit(report)
        assert not verify_report(report).ok

    def test_baselines_verify_as_what_they_are(self) -> None:
        public = demonstrations_from_instruction(llm=EmbeddedLLM(), instruction="Questions.", max_tokens=3)
        assert verify_report(public).ok
        assert verify_report(public).epsilon == 0.0
        real = real_demonstrations_without_privacy(private_examples())
        assert not verify_report(real).ok
