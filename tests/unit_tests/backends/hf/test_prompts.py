import asyncio
import copy
import inspect
import json
import math
import pickle
import sys
import warnings
from types import ModuleType
from typing import ClassVar

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.example_selectors import LengthBasedExampleSelector
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.load import dumps, loads
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import (
    ChatPromptTemplate,
    FewShotChatMessagePromptTemplate,
    FewShotPromptTemplate,
    HumanMessagePromptTemplate,
    MessagesPlaceholder,
    PromptTemplate,
    SystemMessagePromptTemplate,
)
from langchain_core.runnables import ConfigurableField

from langchain_dpicl import Decoding, GenerationTask
from langchain_dpicl.backends.fake import FakeBackend, word_copier
from langchain_dpicl.budget.handler import PrivacyBudgetCallbackHandler
from langchain_dpicl.exceptions import ConfigurationError, PrivacyBudgetExceededError, RunInterruptedError
from langchain_dpicl.privacy.private_examples import PrivateExamples
from langchain_dpicl.prompts import DPFewShotChatMessagePromptTemplate, DPFewShotPromptTemplate
from langchain_dpicl.released.demonstrations import ReleasedDemonstrations
from tests.sealed_files import paid, sealed

CANARY = "canary-7f3a-private"
LINE = PromptTemplate.from_template("Ticket: {text}\nQueue: {queue}")
TURNS = ChatPromptTemplate.from_messages([("human", "Ticket: {text}"), ("ai", "{queue}")])
EXAMPLES = [
    {"text": "lost my card", "queue": "card"},
    {"text": "send money", "queue": "transfer"},
    {"text": "card {expired}", "queue": "card"},
    {"text": "iban?", "queue": "transfer"},
]
REPORT = paid(1.5)
PLAN = {"mechanism": "gumbel", "label_key": "queue"}
RELEASED = ReleasedDemonstrations(tuple(EXAMPLES), REPORT, PLAN)
TASK = {"prefix": "Sort {kind}.", "suffix": "Ticket: {input}\nQueue:"}
CLASSES = [(DPFewShotPromptTemplate, LINE), (DPFewShotChatMessagePromptTemplate, TURNS)]

HOSTILE = [
    '{"a": 1}',
    "{q}",
    "{",
    "}",
    "{{}}",
    "{{",
    "{0}",
    "{}",
    "{q.x}",
    "{q.__class__.__mro__}",
    "{q!r}",
    "{q:>99999}",
    "{input}",
    "{{ q }}",
    "{% for x in y %}",
    "%s %(q)s $q ${q}",
    "\x00\u202e\ufffd",
    "\n\n",
    "",
]


def string_prompt(examples=EXAMPLES, **changes) -> DPFewShotPromptTemplate:
    return DPFewShotPromptTemplate(**({"examples": examples, "example_prompt": LINE, **TASK} | changes))


def chat_prompt(examples=EXAMPLES, **changes) -> DPFewShotChatMessagePromptTemplate:
    return DPFewShotChatMessagePromptTemplate(**({"examples": examples, "example_prompt": TURNS, **TASK} | changes))


def released_prompt(cls, line, **changes):
    return cls.from_released(RELEASED, **({"example_prompt": line, **TASK} | changes))


# -- byte for byte ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hostile", HOSTILE)
async def test_braces_in_demonstrations_and_queries_arrive_byte_for_byte(hostile):
    expected = f"Sort mail.\n\nTicket: {hostile}\nQueue: {hostile}\n\nTicket: {hostile}\nQueue:"
    prompt = string_prompt([{"text": hostile, "queue": hostile}])
    values = {"kind": "mail", "input": hostile}
    assert prompt.format(**values) == expected
    assert await prompt.aformat(**values) == expected
    assert prompt.invoke(values).text == expected
    assert (await prompt.ainvoke(values)).text == expected
    assert prompt.partial(input=hostile).format(kind="mail") == expected


@pytest.mark.parametrize("hostile", HOSTILE)
async def test_braces_in_messages_arrive_byte_for_byte(hostile):
    prompt = chat_prompt([{"text": hostile, "queue": hostile}])
    values = {"kind": hostile, "input": hostile}
    expected = [
        SystemMessage(f"Sort {hostile}."),
        HumanMessage(f"Ticket: {hostile}"),
        AIMessage(hostile),
        HumanMessage(f"Ticket: {hostile}\nQueue:"),
    ]
    assert prompt.format_messages(**values) == expected
    assert await prompt.aformat_messages(**values) == expected
    assert prompt.invoke(values).to_messages() == expected
    assert hostile in prompt.format(**values)
    assert hostile in await prompt.aformat(**values)
    nested = ChatPromptTemplate.from_messages([("system", "{kind}"), prompt])
    assert nested.invoke(values).to_messages() == [SystemMessage(hostile), *expected]


def test_the_stock_class_does_not_pass_the_byte_for_byte_test():
    """The positive control: what the tests above would see without our `format`."""
    stock = FewShotPromptTemplate(examples=[{"text": "see {input}", "queue": ""}], example_prompt=LINE, **TASK)
    assert "see {input}" not in stock.format(kind="mail", input="QUERY")
    broken = FewShotPromptTemplate(examples=[{"text": "{", "queue": ""}], example_prompt=LINE, **TASK)
    with pytest.raises(ValueError, match=r"[{}]"):
        broken.format(kind="mail", input="QUERY")


plain = st.text(st.characters(exclude_characters="{}", exclude_categories=["Cs"]), max_size=20)


@given(
    fields=st.fixed_dictionaries(
        {
            "examples": st.lists(st.fixed_dictionaries({"text": plain, "queue": plain}), max_size=3),
            "prefix": plain | st.just("Sort {kind}."),
            "suffix": plain | st.just("{input}"),
            "example_separator": plain,
            "example_prompt": st.sampled_from([LINE, PromptTemplate.from_template("{text}")]),
        }
    ),
    kind=plain,
    query=plain,
)
@example({"examples": [], "prefix": "", "suffix": "", "example_prompt": LINE}, "", "")
@example({"examples": [{"text": "", "queue": ""}], "prefix": "{kind}", "suffix": "-", "example_prompt": LINE}, "", "")
def test_without_braces_in_the_text_it_equals_the_stock_class(fields, kind, query):
    ours, stock = DPFewShotPromptTemplate(**fields), FewShotPromptTemplate(**fields)
    assert ours.input_variables == stock.input_variables
    assert ours.format(kind=kind, input=query) == stock.format(kind=kind, input=query)


@given(examples=st.lists(st.fixed_dictionaries({"text": st.text(), "queue": st.text()}), max_size=3))
def test_without_prefix_and_suffix_the_chat_class_equals_the_stock_class(examples):
    ours = DPFewShotChatMessagePromptTemplate(examples=examples, example_prompt=TURNS)
    stock = FewShotChatMessagePromptTemplate(examples=examples, example_prompt=TURNS)
    assert ours.input_variables == stock.input_variables == []
    assert ours.format_messages() == stock.format_messages()
    assert ours.format() == stock.format()


# -- a drop-in ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cls", "line"), CLASSES)
async def test_every_entry_point_gives_the_same_prompt(cls, line):
    prompt = released_prompt(cls, line)
    values = {"kind": "mail", "input": "a {b}"}
    expected = prompt.format_prompt(**values)
    assert "card {expired}" in expected.to_string()
    assert prompt.invoke(values) == expected
    assert await prompt.ainvoke(values) == expected
    assert prompt.batch([values, values]) == [expected] * 2
    assert await prompt.abatch([values]) == [expected]
    assert list(prompt.stream(values)) == [expected]
    assert [chunk async for chunk in prompt.astream(values)] == [expected]
    assert await prompt.aformat_prompt(**values) == expected


@pytest.mark.parametrize(("cls", "line"), CLASSES)
async def test_a_chain_runs_invoked_batched_streamed_and_async(cls, line):
    def chain(replies: int):
        model = GenericFakeChatModel(messages=iter([AIMessage("to the card queue")] * replies))
        return released_prompt(cls, line).partial(kind="mail") | model | StrOutputParser()

    assert chain(1).invoke("q {x}") == "to the card queue"
    assert chain(2).batch([{"input": "a"}, {"input": "{b"}]) == ["to the card queue"] * 2
    assert "".join(chain(1).stream({"input": "}"})) == "to the card queue"
    assert await chain(1).ainvoke({"input": "a"}) == "to the card queue"
    assert "".join([part async for part in chain(1).astream("a")]) == "to the card queue"


@pytest.mark.parametrize(("cls", "line"), CLASSES)
def test_partial_works_after_an_invoke_and_keeps_report_and_plan(cls, line):
    prompt = released_prompt(cls, line)
    before = prompt.partial(kind="mail")
    expected = prompt.invoke({"kind": "mail", "input": "x"})
    after = prompt.partial(kind="mail")
    for one in (before, after, after.partial()):
        assert one.invoke({"input": "x"}) == expected
        assert one.input_variables == ["input"]
        assert one.privacy_report == REPORT
        assert one.plan == PLAN
        assert one.epsilon == 1.5
    again = after.partial(input="x")
    assert again.invoke({}) == expected
    assert prompt.input_variables == ["input", "kind"]


def test_a_partial_may_be_a_function():
    assert string_prompt().partial(kind=lambda: "today's mail").format(input="x").startswith("Sort today's mail.")
    assert chat_prompt().partial(kind=lambda: "{it}").format_messages(input="x")[0].content == "Sort {it}."


@pytest.mark.parametrize(("cls", "line"), CLASSES)
def test_fields_stay_configurable_after_an_invoke(cls, line):
    prompt = released_prompt(cls, line)
    prompt.invoke({"kind": "mail", "input": "x"})
    flexible = prompt.configurable_fields(prefix=ConfigurableField(id="opening"))
    config = {"configurable": {"opening": "Now {kind}!"}}
    assert "Now mail!" in flexible.invoke({"kind": "mail", "input": "x"}, config).to_string()
    assert "Sort mail." in flexible.invoke({"kind": "mail", "input": "x"}).to_string()
    assert flexible.with_config(config).invoke({"kind": "mail", "input": "x"}) != prompt.invoke(
        {"kind": "mail", "input": "x"}
    )


def test_the_chat_class_composes_like_the_stock_class():
    shots = DPFewShotChatMessagePromptTemplate(examples=EXAMPLES[:1], example_prompt=TURNS)
    expected = [SystemMessage("Sort."), HumanMessage("Ticket: lost my card"), AIMessage("card"), HumanMessage("{x")]
    listed = ChatPromptTemplate.from_messages([("system", "Sort."), shots, ("human", "{input}")])
    added = (
        SystemMessagePromptTemplate.from_template("Sort.") + shots + HumanMessagePromptTemplate.from_template("{input}")
    )
    for whole in (listed, added):
        assert whole.input_variables == ["input"]
        assert whole.invoke({"input": "{x"}).to_messages() == expected


def test_input_variables_are_inferred_from_prefix_and_suffix_alone():
    assert string_prompt().input_variables == ["input", "kind"]
    assert chat_prompt().input_variables == ["input", "kind"]
    assert chat_prompt(prefix="").input_variables == ["input"]
    assert string_prompt(partial_variables={"kind": "mail"}).input_variables == ["input"]
    assert chat_prompt(partial_variables={"kind": "mail"}).input_variables == ["input"]


@pytest.mark.parametrize("build", [string_prompt, chat_prompt])
def test_a_missing_variable_is_named_as_in_the_stock_class(build):
    with pytest.raises(KeyError, match="input"):
        build().invoke({"kind": "mail"})


@pytest.mark.parametrize("build", [string_prompt, chat_prompt])
def test_unknown_fields_stay_forbidden(build):
    with pytest.raises(ConfigurationError, match="another argument: Extra inputs"):
        build(exmaples=[])


@pytest.mark.parametrize(("cls", "line"), CLASSES)
def test_copies_and_pickles_format_alike(cls, line):
    prompt = released_prompt(cls, line)
    values = {"kind": "mail", "input": "{"}
    expected = prompt.invoke(values)
    for one in (copy.copy(prompt), copy.deepcopy(prompt), pickle.loads(pickle.dumps(prompt))):  # noqa: S301
        assert one.invoke(values) == expected
        assert one.privacy_report == REPORT
        assert one.partial(kind="mail").invoke("{") == expected


def test_the_prompt_types_differ_from_the_stock_ones():
    assert string_prompt()._prompt_type == "dp_few_shot"
    assert chat_prompt()._prompt_type == "dp_few_shot_chat"


def test_pretty_repr_shows_text_with_braces():
    assert "card {expired}" in string_prompt().pretty_repr()


# -- templating languages that run code ---------------------------------------------------------------------------

# Constructed, because the checks of the stock class need jinja2 itself.
JINJA = PromptTemplate.model_construct(template="{{ text }}", template_format="jinja2", input_variables=["text"])
MUSTACHE_TURN = HumanMessagePromptTemplate.from_template("{{text}}", template_format="mustache")


@pytest.mark.parametrize("found", ["jinja2", "mustache", "", None])
def test_other_template_formats_are_refused(found):
    with pytest.raises(ConfigurationError, match="f-string"):
        string_prompt(template_format=found)


@pytest.mark.parametrize(
    "line",
    [
        ChatPromptTemplate.from_messages([("human", "{{text}}")], template_format="mustache"),
        ChatPromptTemplate.from_messages([("human", "x"), ChatPromptTemplate([MUSTACHE_TURN])]),
        MUSTACHE_TURN,
        HumanMessagePromptTemplate(prompt=[JINJA]),
        FewShotChatMessagePromptTemplate(examples=[], example_prompt=MUSTACHE_TURN),
    ],
)
def test_other_formats_are_refused_wherever_they_hide_in_a_chat_template(line):
    with pytest.raises(ConfigurationError, match="f-string"):
        chat_prompt(example_prompt=line)


def test_other_formats_are_refused_in_the_line_of_a_string_template():
    with pytest.raises(ConfigurationError, match="jinja2"):
        string_prompt(example_prompt=JINJA)


@pytest.mark.parametrize("build", [string_prompt, chat_prompt])
@pytest.mark.parametrize("suffix", ["{input.__class__}", "{input[0]}", "{0}", "{", "{a:{b}}"])
def test_templates_that_reach_into_values_are_refused(build, suffix):
    with pytest.raises(ValueError):
        build(suffix=suffix)


def test_a_later_change_of_format_has_no_effect():
    prompt = string_prompt()
    prompt.template_format = "jinja2"
    assert prompt.format(kind="mail", input="{{ 7 * 7 }}").endswith("Ticket: {{ 7 * 7 }}\nQueue:")


# -- the release they carry ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cls", "line"), CLASSES)
def test_a_saved_release_comes_back_whole(cls, line, tmp_path):
    first = released_prompt(cls, line)
    first.save_released(tmp_path / "demos.json")
    again = cls.from_released(tmp_path / "demos.json", example_prompt=line, **TASK)
    assert again == first
    assert again.released == RELEASED
    assert cls.from_released(str(tmp_path / "demos.json"), example_prompt=line, **TASK) == first


@pytest.mark.parametrize("build", [string_prompt, chat_prompt])
def test_a_template_built_by_hand_claims_no_epsilon_and_has_no_release(build, tmp_path):
    assert build().epsilon == math.inf
    assert build().privacy_report == {}
    with pytest.raises(ConfigurationError, match="privacy report"):
        build().save_released(tmp_path / "demos.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("build", [string_prompt, chat_prompt])
@pytest.mark.parametrize("report", [{"private": True}, {"epsilon": "small"}, {"epsilon": -1}])
def test_a_report_without_a_readable_epsilon_is_refused(build, report):
    with pytest.raises(ConfigurationError, match="epsilon"):
        build(privacy_report=report)


@pytest.mark.parametrize("build", [string_prompt, chat_prompt])
def test_the_stock_save_is_refused_with_advice(build, tmp_path):
    with pytest.raises(ConfigurationError, match="save_released"):
        build().save(tmp_path / "prompt.json")
    assert not list(tmp_path.iterdir())


async def test_an_example_selector_works_and_carries_no_claim():
    selector = LengthBasedExampleSelector(examples=EXAMPLES, example_prompt=LINE)
    prompt = string_prompt(None, example_selector=selector)
    assert prompt.epsilon == math.inf
    assert "card {expired}" in prompt.format(kind="mail", input="x")
    assert "card {expired}" in await prompt.aformat(kind="mail", input="x")
    with pytest.raises(ConfigurationError, match="example_selector"):
        string_prompt(None, example_selector=selector, privacy_report=REPORT)
    with pytest.raises(ConfigurationError, match="selector"):
        prompt.with_shots(1, label_key="queue")


def test_a_stranger_s_file_is_refused_or_inert(tmp_path):
    path = tmp_path / "demos.json"
    path.write_text('{"lc": 1, "type": "secret", "id": ["KEY"]}')
    with pytest.raises(ConfigurationError):
        DPFewShotPromptTemplate.from_released(path, example_prompt=LINE, **TASK)
    hostile = json.loads(RELEASED.to_json())
    hostile["report"]["x"] = {"lc": 1, "type": "secret", "id": ["KEY"]}
    path.write_text(json.dumps(sealed(hostile)))
    prompt = DPFewShotPromptTemplate.from_released(path, example_prompt=LINE, **TASK)
    assert prompt.privacy_report["x"]["id"] == ["KEY"]


@pytest.mark.parametrize(("cls", "line"), CLASSES)
def test_a_demonstration_without_a_variable_of_the_line_is_refused(cls, line):
    short = ReleasedDemonstrations(({"text": "a"},), REPORT, PLAN)
    with pytest.raises(ConfigurationError, match="queue"):
        cls.from_released(short, example_prompt=line, **TASK)


def test_a_template_does_not_share_its_state_with_the_release():
    released = ReleasedDemonstrations(({"text": "a", "queue": "b"},), REPORT | {"parts": [1]}, {"stop": ["x"]})
    prompt = DPFewShotPromptTemplate.from_released(released, example_prompt=LINE, **TASK)
    prompt.examples[0]["text"] = "changed"
    prompt.privacy_report["parts"].append(2)
    prompt.plan["stop"].append("y")
    assert released.examples[0]["text"] == "a"
    assert released.report["parts"] == [1]
    assert released.plan == {"stop": ["x"]}


# -- with_shots ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cls", "line"), CLASSES)
def test_with_shots_keeps_the_first_of_each_label_and_the_whole_cost(cls, line):
    prompt = released_prompt(cls, line)
    prompt.invoke({"kind": "mail", "input": "x"})
    assert prompt.with_shots(1).examples == EXAMPLES[:2]
    assert prompt.with_shots(2).examples == prompt.with_shots(9).examples == EXAMPLES
    assert prompt.with_shots(0).examples == []
    assert prompt.with_shots(1).epsilon == 1.5
    assert prompt.with_shots(1).with_shots(2).examples == EXAMPLES[:2]
    assert len(prompt.examples) == 4
    assert "send money" not in prompt.with_shots(0).invoke({"kind": "mail", "input": "x"}).to_string()


def test_with_shots_takes_the_label_field_from_the_plan_or_the_caller():
    assert string_prompt().with_shots(1, label_key="queue").examples == EXAMPLES[:2]
    assert string_prompt(plan={"label_key": None}).with_shots(3).examples == EXAMPLES[:3]
    with pytest.raises(ConfigurationError, match="label_key"):
        string_prompt().with_shots(1)
    with pytest.raises(ConfigurationError, match="label_key"):
        string_prompt().with_shots(1, label_key="label")


@pytest.mark.parametrize("count", [-1, 1.0, True, "1", None])
def test_with_shots_takes_a_count(count):
    with pytest.raises(ConfigurationError, match="n_per_label"):
        string_prompt().with_shots(count, label_key="queue")


# -- from private examples ----------------------------------------------------------------------------------------


def private_examples(fields=("text", "queue")):
    """Examples with a text that nobody may show."""
    label = fields[1]
    return PrivateExamples([{"text": CANARY, label: "card"}], label_key=label, labels=["card"], public_size=100)


class Synthesizer:
    """Stands for the real one: records how it was built and run."""

    built: ClassVar[list["Synthesizer"]]
    failures: int = 0

    def __init__(self, private, options):
        self.private, self.options, self.runs = private, options, []
        self.failures = type(self).failures
        self.fields = (private.text_key, private.label_key)

    @classmethod
    def from_private_examples(cls, private, **options):
        cls.built.append(cls(private, options))
        return cls.built[-1]

    def run(self):
        self.runs.append("run")
        if len(self.runs) <= self.failures:
            raise RunInterruptedError("stopped half-way", run=self)
        return RELEASED

    async def arun(self):
        released = self.run()
        self.runs[-1] = "arun"
        return released


@pytest.fixture
def synthesizer(monkeypatch):
    class Fresh(Synthesizer):
        built: ClassVar[list[Synthesizer]] = []

    module = ModuleType("langchain_dpicl.generation.synthesizer")
    module.DemonstrationSynthesizer = Fresh
    monkeypatch.setitem(sys.modules, "langchain_dpicl.generation.synthesizer", module)
    return Fresh


@pytest.mark.parametrize(("cls", "line"), CLASSES)
async def test_private_examples_become_a_template_sync_and_async(cls, line, synthesizer):
    private, llm = private_examples(), FakeBackend(word_copier([" a"]), vocabulary=[" a"])
    arguments = {"llm": llm, "budget": "budget", "epsilon": 1.5, "example_prompt": line, **TASK}
    first = cls.from_private_examples(private, **arguments)
    second = await cls.afrom_private_examples(private, **arguments)
    assert first == second == released_prompt(cls, line)
    assert [one.runs for one in synthesizer.built] == [["run"], ["arun"]]
    assert all(one.private is private and one.options["llm"] is llm for one in synthesizer.built)


@pytest.mark.parametrize(("cls", "line"), CLASSES)
def test_each_option_goes_to_the_synthesizer(cls, line, synthesizer):
    task, decoding = GenerationTask(record_prompt="{text}"), Decoding(stop=("\n",))
    options = {"instruction": "Write.", "task": task, "shots_per_label": 2, "decoding": decoding, "noise": "gaussian"}
    cls.from_private_examples(private_examples(), llm="llm", epsilon=1.0, example_prompt=line, **options, **TASK)
    kept = {name: value for name, value in synthesizer.built[0].options.items() if value is not None}
    assert kept == {"llm": "llm", "epsilon": 1.0, "max_tokens": 60, **options}


@pytest.mark.parametrize(("cls", "line"), CLASSES)
def test_other_fields_of_the_template_are_given_with_the_run(cls, line, synthesizer):
    run = synthesizer(private_examples(), {})
    prompt = cls.from_run(run, example_prompt=line, partial_variables={"kind": "mail"}, metadata={"m": 1}, **TASK)
    assert prompt.partial_variables == {"kind": "mail"}
    assert prompt.metadata == {"m": 1}


def test_an_example_prompt_may_be_a_text(synthesizer):
    run = synthesizer(private_examples(), {})
    prompt = DPFewShotPromptTemplate.from_run(run, example_prompt=LINE.template, **TASK)
    assert prompt == released_prompt(DPFewShotPromptTemplate, LINE)
    with pytest.raises(ConfigurationError, match="example_prompt"):
        DPFewShotPromptTemplate.from_run(run, example_prompt="{text", **TASK)


@pytest.mark.parametrize("run", [None, RELEASED, "llm"])
def test_only_a_run_of_demonstrations_becomes_a_template(run):
    with pytest.raises(ConfigurationError, match="DemonstrationSynthesizer or PrivateEvolution"):
        DPFewShotPromptTemplate.from_run(run, example_prompt=LINE, **TASK)


@pytest.mark.parametrize(("cls", "line"), CLASSES)
def test_both_constructors_explain_a_wrong_keyword_and_have_one_signature(cls, line):
    assert inspect.signature(cls.from_private_examples) == inspect.signature(cls.afrom_private_examples)
    with pytest.raises(ConfigurationError, match=rf"{cls.__name__}.*found 'slots'. Give rows=Rows\(slots=...\)"):
        cls.from_private_examples(private_examples(), llm="llm", example_prompt=line, slots=3, **TASK)
    with pytest.raises(ConfigurationError, match=rf"{cls.__name__}.*found 'slots'. Give rows=Rows\(slots=...\)"):
        asyncio.run(cls.afrom_private_examples(private_examples(), llm="llm", example_prompt=line, slots=3, **TASK))


BAD_TEMPLATES = [
    {"suffix": "{input"},
    {"suffix": "{input.secret}"},
    {"suffix": 3},
    {"prefix": None},
    {"prefix": "{0}"},
    {"example_prompt": "Ticket: {text"},
    {"example_prompt": None},
    {"template_format": "jinja2"},
    {"output_parser": "text"},
    {"examples": []},
    {"example_selector": None},
    {"privacy_report": {}},
    {"plan": {}},
    {"partial_variables": {"stop": "x"}},
]


@pytest.mark.parametrize(("cls", "line"), CLASSES)
@pytest.mark.parametrize("bad", BAD_TEMPLATES, ids=str)
async def test_a_bad_template_argument_fails_before_a_synthesizer_exists(cls, line, bad, synthesizer):
    arguments = {"example_prompt": line, **TASK} | bad
    with pytest.raises(ConfigurationError) as caught:
        cls.from_private_examples(private_examples(), llm="llm", **arguments)
    assert CANARY not in str(caught.value)
    with pytest.raises(ConfigurationError):
        await cls.afrom_private_examples(private_examples(), llm="llm", **arguments)
    ready = synthesizer(private_examples(), {})
    with pytest.raises(ConfigurationError):
        cls.from_run(ready, **arguments)
    with pytest.raises(ConfigurationError):
        await cls.afrom_run(ready, **arguments)
    with pytest.raises(ConfigurationError):
        cls.from_released(RELEASED, **arguments)
    assert synthesizer.built == []
    assert ready.runs == []


def test_the_string_template_needs_a_suffix_before_anything_is_spent(synthesizer):
    with pytest.raises(ConfigurationError, match="suffix"):
        DPFewShotPromptTemplate.from_private_examples(private_examples(), llm="llm", example_prompt=LINE)
    assert synthesizer.built == []
    alone = DPFewShotChatMessagePromptTemplate.from_private_examples(
        private_examples(), llm="llm", example_prompt=TURNS
    )
    assert len(alone.format_messages()) == 8


@pytest.mark.parametrize(("cls", "line"), CLASSES)
def test_variables_of_the_line_must_be_declared_fields(cls, line, synthesizer):
    with pytest.raises(ConfigurationError, match=r"\['queue'\]"):
        cls.from_private_examples(private_examples(fields=("text", "label")), llm="llm", example_prompt=line, **TASK)
    assert synthesizer.built == []


@pytest.mark.parametrize("private", [[{"text": CANARY}], CANARY, {"fields": CANARY}, None])
def test_bare_records_are_refused_without_being_shown(private, synthesizer):
    with pytest.raises(ConfigurationError, match="PrivateExamples") as caught:
        DPFewShotPromptTemplate.from_private_examples(private, llm="llm", example_prompt=LINE, **TASK)
    assert CANARY not in str(caught.value)
    assert synthesizer.built == []


@pytest.mark.parametrize(("cls", "line"), CLASSES)
async def test_an_interrupted_synthesis_resumes_from_its_synthesizer(cls, line, synthesizer):
    synthesizer.failures = 2
    with pytest.raises(RunInterruptedError) as caught:
        cls.from_private_examples(private_examples(), llm="llm", example_prompt=line, **TASK)
    with pytest.raises(RunInterruptedError):
        await cls.afrom_run(caught.value.run, example_prompt=line, **TASK)
    prompt = cls.from_run(caught.value.run, example_prompt=line, **TASK)
    assert prompt == released_prompt(cls, line)
    assert len(synthesizer.built) == 1


# -- stock templates ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize(("cls", "line"), CLASSES)
def test_a_stock_template_says_the_same_and_langchain_dumps_and_loads_it(cls, line, text):
    released = ReleasedDemonstrations(({"text": text, "queue": text}, *EXAMPLES), REPORT, PLAN)
    fields = {"partial_variables": {"kind": "mail"}, "metadata": {"m": 1}, "tags": ["t"]}
    if cls is DPFewShotPromptTemplate:
        fields["example_separator"] = "\n{-}\n"
    prompt = cls.from_released(released, example_prompt=line, **fields, **TASK)
    stock = prompt.to_stock()
    assert type(stock) in {PromptTemplate, ChatPromptTemplate}
    assert stock.input_variables == prompt.input_variables == ["input"]
    assert (stock.metadata, stock.tags) == ({"m": 1}, ["t"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `loads` is beta
        again = loads(dumps(stock), allowed_objects="core")
    for one in (stock, again):
        assert one.invoke({"input": "{x}"}) == prompt.invoke({"input": "{x}"})


@pytest.mark.parametrize(("cls", "line"), CLASSES)
def test_a_template_with_a_selector_has_no_stock_form(cls, line):
    selector = LengthBasedExampleSelector(examples=EXAMPLES, example_prompt=LINE)
    with pytest.raises(ConfigurationError, match="selector"):
        cls(example_selector=selector, example_prompt=line, suffix="{input}", input_variables=["input"]).to_stock()


# -- what observers see -------------------------------------------------------------------------------------------


class Recorder(BaseCallbackHandler):
    def __init__(self):
        self.seen: list[str] = []

    def on_chain_start(self, serialized, inputs, **kwargs):
        self.seen.append(f"{json.dumps(serialized)} {inputs!r} {kwargs!r}")

    def on_chain_end(self, outputs, **kwargs):
        self.seen.append(repr(outputs))


@pytest.mark.parametrize(("cls", "line"), CLASSES)
def test_dumps_traces_and_repr_show_released_demonstrations_only(cls, line, synthesizer):
    prompt = cls.from_private_examples(private_examples(), llm="llm", example_prompt=line, **TASK)
    recorder = Recorder()
    prompt.invoke({"kind": "mail", "input": "x"}, {"callbacks": [recorder]})
    shown = [*recorder.seen, repr(prompt), str(prompt), dumps(prompt), prompt.model_dump_json()]
    shown += [repr(vars(prompt)), pickle.dumps(prompt).decode("latin-1"), prompt.released.to_json()]
    shown += [str(prompt.get_input_jsonschema()), str(prompt.get_output_jsonschema())]
    assert len(recorder.seen) == 2
    assert all(CANARY not in text for text in shown)
    assert all("lost my card" in text for text in shown[:8])


def test_a_validation_error_does_not_show_the_examples_it_was_given():
    with pytest.raises(ConfigurationError) as caught:
        string_prompt(CANARY)
    assert CANARY not in str(caught.value)


def test_a_placeholder_may_stand_in_a_chat_line():
    line = ChatPromptTemplate.from_messages([("human", "{text}"), MessagesPlaceholder("history", optional=True)])
    assert chat_prompt(EXAMPLES[:1], example_prompt=line, prefix="", suffix="").format_messages() == [
        HumanMessage("lost my card")
    ]


# -- the whole house ----------------------------------------------------------------------------------------------

WORDS = [" my", " card", " payment", " declined", " vanished"]
RECORDS = [
    {"text": f"my {CANARY} card declined", "queue": "card"},
    {"text": "my payment vanished", "queue": "transfer"},
]


def real_arguments(**engine):
    model = FakeBackend(word_copier(WORDS), vocabulary=WORDS, **engine)
    private = PrivateExamples(
        RECORDS * 100, text_key="text", label_key="queue", labels=["card", "transfer"], public_size=200
    )
    budget = PrivacyBudgetCallbackHandler(epsilon=4.0, delta=1e-6)
    options = {"shots_per_label": 1, "max_tokens": 3, "decoding": Decoding(candidates=5)}
    return private, {"llm": model, "budget": budget, "epsilon": 2.0, **options}


@pytest.mark.parametrize(("cls", "line"), CLASSES)
async def test_private_examples_go_in_and_a_charged_template_comes_out(cls, line):
    private, arguments = real_arguments()
    first = cls.from_private_examples(private, example_prompt=line, **TASK, **arguments)
    second = await cls.afrom_private_examples(private, example_prompt=line, **TASK, **arguments)
    for prompt in (first, second):
        assert prompt.epsilon <= 2.0
        assert [shown["queue"] for shown in prompt.examples] == ["card", "transfer"]
        shown = prompt.invoke({"kind": "mail", "input": "{x}"}).to_string()
        assert shown.endswith("Ticket: {x}\nQueue:")
        assert CANARY not in shown + repr(prompt) + dumps(prompt) + prompt.released.to_json()
    assert arguments["budget"].remaining_epsilon == pytest.approx(0.0, abs=1e-9)
    with pytest.raises(PrivacyBudgetExceededError):
        cls.from_private_examples(private, example_prompt=line, **TASK, **arguments)


def test_a_bad_template_leaves_the_budget_whole():
    private, arguments = real_arguments()
    with pytest.raises(ConfigurationError):
        DPFewShotPromptTemplate.from_private_examples(private, example_prompt=LINE, suffix="{", **arguments)
    assert arguments["budget"].remaining_epsilon == 4.0


@pytest.mark.parametrize(("cls", "line"), CLASSES)
def test_a_model_failure_half_way_is_resumed_for_what_was_charged(cls, line):
    private, arguments = real_arguments(fail_public_call=4)
    with pytest.raises(RunInterruptedError) as caught:
        cls.from_private_examples(private, example_prompt=line, **TASK, **arguments)
    assert arguments["budget"].remaining_epsilon == pytest.approx(2.0, abs=1e-9)
    prompt = cls.from_run(caught.value.run, example_prompt=line, **TASK)
    assert len(prompt.examples) == 2
    assert arguments["budget"].remaining_epsilon == pytest.approx(2.0, abs=1e-9)
