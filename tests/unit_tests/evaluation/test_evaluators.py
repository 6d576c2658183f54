"""Which outcome an answer has: labels and marks that look alike, failures of one chain, objects that cannot be shown."""

from __future__ import annotations

import functools

import pytest
from langchain_core.language_models import FakeListChatModel
from langchain_core.output_parsers import CommaSeparatedListOutputParser, JsonOutputParser, StrOutputParser
from langchain_core.prompts import FewShotPromptTemplate, PromptTemplate
from langchain_core.runnables import RunnableLambda, RunnableSerializable
from langsmith import traceable
from langsmith.evaluation import StringEvaluator, run_evaluator

from langchain_dpicl import Budget, PrivateExamples
from langchain_dpicl.backends.private_calls.call import OpaqueValue
from langchain_dpicl.evaluation import Exact, Judge, Pure, Score, dp_choose, dp_evaluate
from langchain_dpicl.evaluation.evaluate import silent_question
from langchain_dpicl.evaluation.evaluators import BoundEvaluator, cell_of
from langchain_dpicl.exceptions import CapabilityError, ConfigurationError, DPICLError
from tests.unit_tests.evaluation.test_evaluating import BROKEN, CARD, FAR, SENT, TEMPLATE, examples, reader


def rows(units, evaluator, *, private=None, baseline=None, chain=None, is_choice=False):
    chains = {"chain": TEMPLATE | reader() if chain is None else chain, **({"old": baseline} if baseline else {})}
    asked = silent_question(
        private or examples(), chains, evaluator, inputs=None, timeout=None, is_choice=is_choice
    )  # fmt: skip
    return asked.ask([OpaqueValue(tuple(unit)) for unit in units]).run().take()


@pytest.mark.parametrize("labels", [("card", "other"), ("other", "(other)"), ("other", "card", "(other)")], ids=str)
def test_a_label_named_other_is_told_from_an_answer_that_names_no_label(labels):
    private = PrivateExamples([], label_key="queue", labels=labels, public_size=100)
    bound = silent_question(private, {"c": TEMPLATE | reader()}, Exact(), inputs=None, timeout=None).evaluators[0]
    assert len(set(bound.cells)) == len(bound.cells) == len(labels) * (len(labels) + 1)
    right = {cell for cell, score in zip(bound.cells, bound.scores, strict=True) if score}
    assert right == {(label, label) for label in labels}
    failed = {bound.cells[bound.worst({"text": "", "queue": label})] for label in labels}
    assert not failed & right
    assert not {said for _, said in failed} & set(labels)


def test_an_answer_that_names_no_label_is_wrong_where_a_label_is_named_other():
    records = [{"text": "no idea", "queue": "other"}] * 400 + [{"text": "declined", "queue": "card"}] * 400
    private = PrivateExamples(records, label_key="queue", labels=("card", "other"), public_size=800)
    model = reader(declined="card", idea="I cannot tell")
    found = dp_evaluate(
        TEMPLATE | model, private, evaluators=Exact(), budget=Budget(epsilon=2.0, delta=1e-5), epsilon=2.0
    )
    assert found.mean().high < 0.6
    assert abs(sum(found.confusion.values()) - 800) < 6 * FAR


def test_two_outcomes_of_one_name_are_refused():
    with pytest.raises(ConfigurationError, match="cells"):
        BoundEvaluator("twice", (("", "1"), ("", "1")), (0.0, 1.0), lambda *_: 0, lambda _: 0)


def test_marks_that_differ_in_the_seventh_digit_are_two_outcomes():
    marks = (0.1234567, 0.12345671, 1_000_000.0, 1_000_001.0)
    private = examples()
    judge = PromptTemplate.from_template("{text} {answer}") | reader(declined="1000001", sent="0.12345671")
    for evaluator in (Score(Pure(lambda inputs, outputs, reference: marks[3]), marks=marks), Judge(judge, marks=marks)):
        bound = evaluator.bind(private.fields, private.label_key, private.labels)
        assert len(set(bound.cells)) == 4
    assert rows([[CARD], [SENT]], Judge(judge, marks=marks)).ravel().tolist() == [3, 1]


def test_marks_of_a_pair_keep_all_their_digits():
    marks = (0.0, 1 / 3)
    third = Score(Pure(lambda inputs, outputs, reference: marks[1]), marks=marks)
    found = dp_evaluate(
        TEMPLATE | reader(), examples(), evaluators=third, baseline=TEMPLATE | reader(sent="x"),
        budget=Budget(epsilon=30.0, delta=1e-5), epsilon=30.0,
    )  # fmt: skip
    assert found.mean().value == pytest.approx(1 / 3, rel=1e-12)


def raising(inputs, outputs, reference):
    if outputs == "bad":
        raise ValueError(inputs)
    return int(outputs == "good")


@pytest.mark.parametrize(("new", "old", "pair"), [
    ("good", "bad", (1, 0)), ("bad", "good", (0, 1)), ("bad", "bad", (0, 0)), ("good", "good", (1, 1)),
])  # fmt: skip
def test_an_evaluator_that_raises_for_one_chain_of_a_pair_leaves_the_other_its_score(new, old, pair):
    chain, baseline = (TEMPLATE | reader() | RunnableLambda(Pure(lambda text, word=word: word)) for word in (new, old))
    found = rows([[CARD]], Score(Pure(raising)), chain=chain, baseline=baseline).item()
    assert found == pair[0] * 2 + pair[1]


class Unshown:
    """An answer that cannot be shown to a judge."""

    def __str__(self):
        raise RuntimeError("no text")


def test_an_answer_that_cannot_be_shown_to_a_judge_fails_for_its_record_only():
    """Without its own guard it would take the rows of all records with it."""
    step = RunnableLambda(Pure(lambda text: Unshown() if "transfer" in text else text))
    judge = PromptTemplate.from_template("{text} {answer}") | reader(declined="1", sent="1")
    found = rows([[CARD], [SENT], [CARD]], Judge(judge), chain=TEMPLATE | reader() | step).ravel().tolist()
    assert found == [1, 0, 1]


@pytest.mark.parametrize("declared", [{"text_key": "answer"}, {"fields": ("answer",)}], ids=str)
def test_a_judge_is_refused_where_a_field_is_named_as_the_answer(declared):
    """The field would be overwritten, or shown for the answer."""
    private = PrivateExamples([], public_size=100, **declared)
    judge = Judge(PromptTemplate.from_template("{answer}") | reader())
    shown = private.text_key
    chain = PromptTemplate.from_template("{" + shown + "}") | reader()
    with pytest.raises(ConfigurationError, match="answer"):
        silent_question(private, {"c": chain}, judge, inputs=None, timeout=None)


def test_the_mean_of_the_data_holds_where_one_record_of_several_is_drawn():
    """Half of each unit's records are right: which one is drawn is as good as a coin, also where all units are read."""
    records = [
        {"text": text, "queue": "card", "user": str(user)} for user in range(200) for text in ("declined", "broken")
    ]
    missed = 0
    for run in range(24):
        private = PrivateExamples(
            records, label_key="queue", labels=("card", "transfer"), public_size=200, unit_key="user",
            records_per_unit=2, dataset_id=f"users {run}",
        )  # fmt: skip
        found = dp_evaluate(
            TEMPLATE | reader(declined="card"), private, evaluators=Exact(),
            budget=Budget(epsilon=20.0, delta=1e-5), epsilon=20.0,
        ).mean(of="data")  # fmt: skip
        missed += not found.low <= 0.5 <= found.high
    assert missed <= 10  # of 24 at 5 %: more have a chance below 1e-8


def test_a_record_that_fails_has_the_least_mark_also_where_marks_are_not_in_order():
    evaluator = Score(Pure(lambda inputs, outputs, reference: 1 / 0), marks=(3.0, 1.0, 2.0))
    assert rows([[CARD], [BROKEN]], evaluator).ravel().tolist() == [0, 0]
    assert evaluator.bind(("text",), None, None).scores[0] == 1.0


def keyword_only(*, inputs, outputs, reference):
    return inputs == {"text": CARD["text"]} and outputs.lower() == f"{reference}."


def in_another_order(reference_outputs, outputs, inputs):
    return keyword_only(inputs=inputs, outputs=outputs, reference=reference_outputs)


def two_of_them(outputs, reference, case=str.lower):
    return case(outputs) == f"{reference}."


def all_of_them(**given):
    return keyword_only(**{name: given[name] for name in ("inputs", "outputs", "reference")})


@pytest.mark.parametrize("function", [keyword_only, in_another_order, two_of_them, all_of_them])
def test_an_own_function_is_called_by_the_names_it_takes(function):
    assert rows([[CARD]], Score(Pure(function))).item() == 1


@pytest.mark.parametrize("function", [
    lambda i, o, r: 1, lambda outputs, expected: 1, lambda outputs, /: 1, lambda *given: 1, lambda: 1,
    lambda inputs, reference: 1,
], ids=["short names", "another name", "by position", "any number", "none", "no answer"])  # fmt: skip
def test_an_own_function_of_other_names_is_refused_before_it_pays(function):
    spender = Budget(epsilon=1.0, delta=1e-5)
    with pytest.raises(ConfigurationError, match="reference_outputs"):
        dp_evaluate(TEMPLATE | reader(), examples(), evaluators=Score(Pure(function)), budget=spender, epsilon=0.5)
    assert spender.remaining_epsilon == 1.0


class CriteriaEvalChain(RunnableSerializable):
    """A stock evaluator of langchain_classic in shape: a chain that can be called, and asks a model."""

    def invoke(self, input, config=None, **kwargs):  # noqa: A002  as LangChain names it
        pytest.fail("it was asked")

    def __call__(self, inputs, outputs, reference_outputs):
        pytest.fail("it was asked")


class ExactMatchStringEvaluator:
    """Another one, which cannot be called."""

    def evaluate_strings(self, *, prediction, reference=None):
        pytest.fail("it was asked")


def openevals_function():
    """An evaluator of openevals in shape: a function that traces what it sees."""

    def exact_match(*, outputs, reference_outputs=None, **kwargs):
        pytest.fail("it was asked")

    exact_match.__module__ = "openevals.exact"
    return exact_match


@run_evaluator
def of_langsmith(run, example):
    """An evaluator of LangSmith."""
    pytest.fail("it was asked")


@traceable
def traced(outputs, reference):
    """An own function whose arguments LangSmith gets."""
    pytest.fail("it was asked")


class TracedWhereCalled:
    """An own object whose arguments LangSmith gets."""

    @traceable
    def __call__(self, outputs, reference):
        pytest.fail("it was asked")


class FixingParser(StrOutputParser):
    """A stock parser of langchain in shape: its parse asks a model."""

    def parse(self, text):
        pytest.fail("it was asked")

    parse.__module__ = "langchain.output_parsers.fix"


STOCK = {
    "a chain": CriteriaEvalChain(),
    "its invoke": CriteriaEvalChain().invoke,
    "a model's invoke": reader().invoke,
    "a model's generate": reader().generate,
    "a parser that asks": FixingParser().parse,
    "an object": ExactMatchStringEvaluator(),
    "openevals": openevals_function(),
    "a part of it": functools.partial(openevals_function(), outputs="x"),
    "langsmith": of_langsmith,
    "a string evaluator": StringEvaluator(grading_function=lambda *given: {"score": 1}),
    "a traced function": traced,
    "a traced object": TracedWhereCalled(),
}


@pytest.mark.parametrize(
    "wrap", [lambda one: one, lambda one: [Exact(), one], Score, lambda one: Score(Pure(one)), Judge]
)
@pytest.mark.parametrize("kind", STOCK)
def test_a_stock_evaluator_is_refused_with_what_to_write_and_nothing_is_charged(kind, wrap):
    spender = Budget(epsilon=1.0, delta=1e-5)
    with pytest.raises(DPICLError, match=r"Pure|prompt \| model"):
        dp_evaluate(TEMPLATE | reader(), examples(), evaluators=wrap(STOCK[kind]), budget=spender, epsilon=0.5)
    assert spender.remaining_epsilon == 1.0


def test_the_evaluator_that_is_refused_is_named_among_others():
    with pytest.raises(ConfigurationError, match="ExactMatchStringEvaluator"):
        dp_evaluate(
            TEMPLATE | reader(),
            examples(),
            evaluators=[Exact(), STOCK["an object"]],
            budget=Budget(epsilon=1.0, delta=1e-5),
        )
    with pytest.raises(ConfigurationError, match=r"ExactMatchStringEvaluator.*Judge\(prompt"):
        chains = {name: TEMPLATE | reader(x=name) for name in "ab"}
        dp_choose(chains, examples(), evaluator=STOCK["an object"], budget=Budget(epsilon=1.0, delta=1e-5))


@pytest.mark.parametrize("function", [
    str.strip, StrOutputParser().parse, functools.partial(max, "a"), TEMPLATE.format,
])  # fmt: skip
def test_functions_of_python_and_the_parse_of_a_parser_may_be_declared_pure(function):
    assert Pure(function).function is function


class Awaited:
    """An own object that has to be awaited."""

    async def __call__(self, outputs):
        return 1


@pytest.mark.parametrize("function", [Awaited(), Awaited().__call__, functools.partial(Awaited().__call__, "x")])
def test_what_has_to_be_awaited_is_refused(function):
    with pytest.raises(ConfigurationError, match="returns its result"):
        Pure(function)


def test_a_judge_that_is_not_shown_the_answer_is_refused_before_it_pays():
    spender, blind = Budget(epsilon=1.0, delta=1e-5), PromptTemplate.from_template("{text} {queue}") | reader()
    call = {"private": examples(), "budget": spender, "epsilon": 0.5}
    with pytest.raises(ConfigurationError, match=r"judge: .* that shows 'answer', .* found \['queue', 'text'\]"):
        dp_evaluate(TEMPLATE | reader(), evaluators=[Exact(), Judge(blind)], **call)
    with pytest.raises(ConfigurationError, match="judge: expected a template that shows 'answer'"):
        dp_choose({"a": TEMPLATE | reader(), "b": TEMPLATE | reader()}, evaluator=Judge(blind), **call)
    assert spender.remaining_epsilon == 1.0
    renamed = Judge(PromptTemplate.from_template("{said}") | reader(card="1"))
    asked = silent_question(examples(), {"c": TEMPLATE | reader()}, renamed, inputs={"said": "answer"}, timeout=None)
    assert asked.judges[0].fields == {"said": "answer"}


def test_an_own_function_right_behind_a_chat_model_is_refused_as_it_would_get_a_text():
    model, own = FakeListChatModel(responses=["card"]), RunnableLambda(Pure(lambda message: message.content))
    with pytest.raises(CapabilityError, match="StrOutputParser"):
        rows([[CARD]], Exact(), chain=TEMPLATE | model | own)
    text = RunnableLambda(Pure(lambda text: text.upper()))
    assert rows([[CARD]], Exact(), chain=TEMPLATE | model | StrOutputParser() | text).tolist() == [[0, 1]]


@pytest.mark.parametrize("parser", [JsonOutputParser(), CommaSeparatedListOutputParser()], ids=["json", "list"])
@pytest.mark.parametrize("place", ["chain", "judge"])
def test_an_answer_that_is_no_text_is_refused_where_a_text_is_compared(parser, place):
    chain = TEMPLATE | reader() | parser
    judge = PromptTemplate.from_template("{text} {answer}") | reader() | parser
    with pytest.raises(CapabilityError, match="StrOutputParser"):
        rows(
            [[CARD]], *((Exact(),) if place == "chain" else (Judge(judge),)), chain=chain if place == "chain" else None
        )
    own = RunnableLambda(Pure(str))
    assert rows([[CARD]], Exact(), chain=chain | own).shape == (1, 2)
    assert rows([[CARD]], Score(Pure(keyword_only)), chain=chain).shape == (1, 1)


TEN = tuple(range(1, 11))


@pytest.mark.parametrize(("found", "place"), [
    ({"key": "right", "score": True}, 1), ({"score": 0}, 0), ({"key": "right"}, 0), ({"score": None}, 0), (1.0, 1),
    ([1], 0), (None, 0),
], ids=repr)  # fmt: skip
def test_an_own_function_may_return_what_one_for_langsmith_does(found, place):
    assert rows([[CARD]], Score(Pure(lambda outputs: found))).item() == place


NAMED = [
    (TEN, "8", 8), (TEN, "10", 10), (TEN, "1", 1), (TEN, "**8**", 8), (TEN, "Score: 8", 8), (TEN, "**Score:** 8.", 8),
    (TEN, 'The score is: "8"', 8), (TEN, "8.0", 8), (TEN, "8.", 8), (TEN, "\n8\nIt is right.", 8), (TEN, "+8", 8),
    (TEN, "8 - it is right", 8), (TEN, "8, as it is right", 8), (TEN, "8. It is right", 8), (TEN, "8: right", 8),
    (TEN, "(8)", 8), (TEN, "\uff18", 8), (TEN, "8 (right)", 8), (TEN, "score = 8", 8), (TEN, "- 8", 8),
    ((-1, 0, 1), "-1", -1), ((-1, 0, 1), "\u22121", -1), ((-1, 0, 1), "+1", 1), ((-1, 0, 1), "Mark: -1", -1),
    ((0, 0.5, 1), ".5", 0.5), ((0, 0.5, 1), "0.50", 0.5), ((0, 1e-5), "1e-05", 1e-5), ((0, 1e-5), "0.00001", 1e-5),
]  # fmt: skip
UNCLEAR = [
    "8/10", "8 / 10", "8 of 10", "8 out of 10", "8 out of ten", "8\u204410", "\u00bd", "8\u00bd", "8 or 9", "7-8", "8, 9",
    "not 8", "not good", "I would not give 8", "8 is too much", "8 is wrong", "8th", "8%", "8 %", "8+", "8.5", "8,000",
    "1,0", "1. Polite\n2. Right\nScore: 8", "8\nor 9", "Politeness: 8\nScore: 9", "score 8", "-8", "8e1", "v8", "x-8",
    "eight", "", " ", "\x00", "11", "0", "Score: not 8", "8x", "8 * 2", "8\u00b2", "nan", "inf", "8points", "8 stars",
    "Score: 8/10", "Is it 8? No.", "a-" * 50_000 + "8", "8" + "*" * 100_000 + "a", "(" * 100_000 + "8",
]  # fmt: skip


@pytest.mark.parametrize(("marks", "said", "mark"), NAMED, ids=[repr(said) for _, said, _ in NAMED])
def test_a_judge_that_names_one_mark_gives_it(marks, said, mark):
    bound = Judge(None, marks=marks).bind(("text",), None, None)
    assert bound.scores[cell_of(bound, {}, "an answer", said)] == mark


@pytest.mark.parametrize("said", UNCLEAR, ids=lambda said: repr(said[:20]))
def test_a_judge_whose_mark_is_unclear_gives_the_least_one(said):
    bound = Judge(None, marks=(-1.5, *TEN)).bind(("text",), None, None)
    assert bound.scores[cell_of(bound, {}, "an answer", said)] == -1.5
    assert cell_of(bound, {}, "an answer", None) == 0


@pytest.mark.parametrize(("said", "mark"), [(8, 8), (8.0, 8), ({"score": 8}, -1.5), ([8], -1.5), (float("nan"), -1.5)])
def test_a_judge_may_give_its_mark_as_a_number_that_a_pure_step_has_read(said, mark):
    bound = Judge(None, marks=(-1.5, *TEN)).bind(("text",), None, None)
    assert bound.scores[cell_of(bound, {}, "an answer", said)] == mark


@pytest.mark.parametrize("said", ["not good", "good, not bad", "bad or good", "not bad", "good/bad", "good or bad?"])
def test_an_answer_that_may_mean_another_label_names_none(said):
    names = ("good", "bad")
    bound = Exact().bind(("text", "label"), "label", names)
    assert bound.cells[cell_of(bound, {"label": "good"}, said, None)] == ("good", "other")


QUESTION = PromptTemplate.from_template("{question}")
ASKED = Judge(PromptTemplate.from_template("{question} {answer}") | reader(declined="1"))


def test_inputs_name_the_fields_of_a_judge_too():
    question = silent_question(
        examples(), {"chain": QUESTION | reader()}, ASKED, inputs={"question": "text"}, timeout=None
    )  # fmt: skip
    assert question.ask([OpaqueValue((CARD,))]).run().take().item() == 1


@pytest.mark.parametrize("inputs", [["question"], "question", {"question": ["text"]}, {1: "text"}, 5], ids=str)
def test_inputs_that_name_no_fields_are_refused(inputs):
    with pytest.raises(ConfigurationError, match="inputs: expected the field of each variable"):
        silent_question(examples(), {"chain": QUESTION | reader()}, Exact(), inputs=inputs, timeout=None)


def test_a_brace_in_the_text_of_an_example_is_named():
    shots = FewShotPromptTemplate(
        examples=[{"q": "a {brace}", "a": "card"}], example_prompt=PromptTemplate.from_template("{q} {a}"),
        suffix="{text}", input_variables=["text"],
    )  # fmt: skip
    with pytest.raises(CapabilityError, match=r"write \{\{ \}\} for braces"):
        dp_evaluate(
            shots | reader(), examples(), evaluators=Exact(), budget=Budget(epsilon=1.0, delta=1e-5), epsilon=0.5
        )


def test_a_variable_of_inputs_that_no_template_has_is_refused():
    with pytest.raises(ConfigurationError, match="quesion"):
        silent_question(examples(), {"chain": TEMPLATE | reader()}, Exact(), inputs={"quesion": "text"}, timeout=None)
