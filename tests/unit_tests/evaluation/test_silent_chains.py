"""What a chain under test is taken for: what makes it another chain, what its steps show, and which answers count."""

from __future__ import annotations

import logging
import warnings

import pytest
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.prompts import ChatPromptTemplate, FewShotPromptTemplate, PromptTemplate
from langchain_core.runnables import RunnableLambda
from pydantic import Field

from langchain_dpicl.backends.private_calls.call import OpaqueValue
from langchain_dpicl.evaluation import Exact, Judge, Pure, Score
from langchain_dpicl.evaluation.chains import SilentChain
from langchain_dpicl.evaluation.evaluate import silent_question
from tests.unit_tests.evaluation.test_evaluating import CARD, TEMPLATE, examples, reader

MODEL = FakeListChatModel(responses=["card"])
PARTS = {
    "system": "Be brief.", "human": "Queue of {text}?", "ai": "I read {text}.", "fixed": HumanMessage("Hello."),
    "said": AIMessage("card"),
}  # fmt: skip


def chat(**changed):
    parts = {**PARTS, **changed}
    fixed = [parts["fixed"], parts["said"]]
    return ChatPromptTemplate.from_messages([*fixed, *((role, parts[role]) for role in ("system", "human", "ai"))])


def few_shot(**changed):
    parts = {"examples": [{"q": "lost", "a": "card"}], "shown": "{q} {a}", "suffix": "{text}", "prefix": "Sort."}
    parts |= changed
    return FewShotPromptTemplate(
        examples=parts["examples"], example_prompt=PromptTemplate.from_template(parts["shown"]),
        suffix=parts["suffix"], prefix=parts["prefix"], input_variables=["text"],
    )  # fmt: skip


def told(prompt, model=MODEL):
    return SilentChain.of(prompt | model, known=("text", "queue"))


@pytest.mark.parametrize("other", [
    chat(system="Be long."), chat(human="Which queue has {text}?"), chat(ai="I saw {text}."),
    chat(fixed=HumanMessage("Hi.")), chat(said=AIMessage("transfer")), chat(said=HumanMessage("card")),
    ChatPromptTemplate.from_messages([("system", "{text} {a}")]).partial(a="x"),
    ChatPromptTemplate.from_messages([("system", "{text} {a}")]).partial(a="y"),
    few_shot(), few_shot(examples=[{"q": "lost", "a": "transfer"}]), few_shot(shown="{q}: {a}"),
    few_shot(suffix="{text}:"), few_shot(prefix=""),
    PromptTemplate.from_template("{text}"), PromptTemplate.from_template("{text}:"),
    PromptTemplate.from_template("{text}{a}").partial(a="x"), PromptTemplate.from_template("{text}{a}").partial(a="y"),
], ids=lambda prompt: type(prompt).__name__)  # fmt: skip
def test_a_prompt_of_another_text_is_another_chain(other):
    every = [told(one) for one in (chat(), other)]
    assert every[0].identity != every[1].identity
    assert every[0].to_dict()["template"] != every[1].to_dict()["template"]


def test_a_prompt_of_the_same_text_is_the_same_chain():
    assert told(chat()).identity == told(chat()).identity
    assert told(few_shot()).to_dict() == told(few_shot()).to_dict()


def test_no_two_of_many_prompts_are_taken_for_the_same():
    shown = {
        told(ChatPromptTemplate.from_messages([("human", f"{n} {{text}}")])).to_dict()["template"] for n in range(50)
    }
    assert len(shown) == 50


def test_a_model_whose_settings_changed_is_another_chain():
    model = FakeListChatModel(responses=["card"])
    before = told(chat(), model).identity
    assert told(chat(), model).identity == before
    model.responses = ["transfer"]
    assert told(chat(), model).identity != before


class Anthropic(FakeListChatModel):
    """Calls the texts that end an answer by another name than OpenAI's class."""

    stop_sequences: list[str] | None = Field(None, alias="stop")


@pytest.mark.parametrize("model", [
    MODEL.bind(stop=["x"]), MODEL.bind(stop_sequences=["x"]), Anthropic(responses=["card"], stop=["x"]),
    Anthropic(responses=["card"], stop=["y"]).bind(stop="x"),
])  # fmt: skip
def test_the_texts_that_end_an_answer_are_kept_under_either_name(model):
    assert told(chat(), model).stop == ("x",)


@pytest.mark.parametrize("bound", [{"stop": []}, {"stop": ()}, {"stop": ""}, {"stop_sequences": []}], ids=str)
def test_an_empty_list_of_them_takes_those_of_the_model_away_as_langchain_does(bound):
    assert told(chat(), Anthropic(responses=["card"], stop=["y"]).bind(**bound)).stop == ()
    assert told(chat(), Anthropic(responses=["card"], stop=["y"]).bind(**dict.fromkeys(bound))).stop == ("y",)


def noisy(*shown, **named):
    """A step that says what it sees, in every way that code has."""
    warnings.warn(str((shown, named)), stacklevel=2)
    logging.getLogger("noisy").critical("seen %s %s", shown, named)
    return "card"


@pytest.mark.parametrize("place", ["parser", "score", "judge"])
def test_what_own_functions_warn_of_and_log_is_dropped(place, caplog, recwarn):
    """The control comes first: the same function outside of a release is heard."""
    noisy("CONTROL")
    assert "CONTROL" in caplog.text
    assert "CONTROL" in str(recwarn.pop().message)
    caplog.clear()
    step = RunnableLambda(Pure(noisy))
    chain, evaluator = TEMPLATE | reader(), Exact()
    if place == "parser":
        chain = chain | step
    elif place == "score":
        evaluator = Score(Pure(noisy))
    else:
        judge = PromptTemplate.from_template("{text} {answer}") | reader(declined="1") | step
        evaluator = Judge(judge)
    question = silent_question(examples(), {"chain": chain}, evaluator, inputs=None, timeout=None)
    assert question.ask([OpaqueValue((CARD,))] * 3).run().take().shape == (3, question.width)
    assert not caplog.records
    assert not recwarn.list
    assert not any("declined" in str(key) for key in globals().get("__warningregistry__", {}))


class Refusing(FakeListChatModel):
    """Answers with a reason for the end that some provider gives where it refuses."""

    reason: str
    responses: tuple[str, ...] = ("card",)

    def _generate(self, messages, stop=None, run_manager=None, **kwargs):
        info = {"finish_reason": self.reason}
        return ChatResult(generations=[ChatGeneration(message=AIMessage("card"), generation_info=info)])


@pytest.mark.parametrize("reason", [
    "content_filter", "refusal", "SAFETY", "RECITATION", "BLOCKLIST", "PROHIBITED_CONTENT", "SPII", "LANGUAGE",
    "guardrail_intervened", "content_filtered",
])  # fmt: skip
def test_a_refusal_counts_as_no_answer_whatever_its_provider_calls_it(reason):
    def cell(model):
        question = silent_question(examples(), {"chain": TEMPLATE | model}, Exact(), inputs=None, timeout=None)
        return question.ask([OpaqueValue((CARD,))]).run().take().tolist()

    assert cell(Refusing(reason="stop")) == [[0, 1]]
    assert cell(Refusing(reason=reason)) == [[2, 0]]
