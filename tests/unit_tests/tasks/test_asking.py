"""How records and queries become prompts: byte for byte, with public faults only."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.documents import Document
from langchain_core.messages import (
    AIMessage,
    ChatMessage,
    HumanMessage,
    HumanMessageChunk,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.prompt_values import ChatPromptValue, StringPromptValue
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate

from langchain_dpicl._templates import Template
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.options import FewShotTask
from langchain_dpicl.privacy.private_examples import PrivateExamples
from langchain_dpicl.tasks import FewShotTemplate, wording_of


def wording(**changes: Any) -> FewShotTemplate:
    given = {
        "example_prompt": "Ticket: {text}\nQueue: {queue}",
        "suffix": "Ticket: {input}\nQueue:",
        "prefix": "Sort.",
        "separator": "\n\n",
        "fields": ("text", "queue"),
    }
    return FewShotTemplate(**{**given, **changes})


def test_a_prompt_is_prefix_examples_and_the_query() -> None:
    render = wording().renderer([("my pin",)])
    records = [{"text": "no cash", "queue": "atm"}, {"text": "lost", "queue": "card"}]
    assert render(records) == (
        "Sort.\n\nTicket: no cash\nQueue: atm\n\nTicket: lost\nQueue: card\n\nTicket: my pin\nQueue:",
    )


def test_no_records_give_the_public_prompt() -> None:
    assert wording().renderer([("my pin",)])(()) == ("Sort.\n\nTicket: my pin\nQueue:",)


def test_an_empty_prefix_leaves_no_separator() -> None:
    assert wording(prefix="").renderer([("q",)])(()) == ("Ticket: q\nQueue:",)


def test_each_query_gets_a_prompt_over_the_same_records() -> None:
    first, second = wording().renderer([("one",), ("N/A",)])([{"text": "lost", "queue": "card"}])
    assert first.replace("Ticket: one", "Ticket: N/A") == second


@given(text=st.text(), query=st.text())
def test_values_arrive_byte_for_byte_and_are_never_formatted_again(text: str, query: str) -> None:
    (prompt,) = wording().renderer([(query,)])([{"text": text, "queue": "{input}"}])
    assert prompt == f"Sort.\n\nTicket: {text}\nQueue: {{input}}\n\nTicket: {query}\nQueue:"


def test_declared_values_read_as_they_are_shown() -> None:
    render = wording(shown={"queue": {"LOC": "place"}}).renderer([("q",)])
    assert "Queue: place" in render([{"text": "t", "queue": "LOC"}])[0]
    assert "Queue: other" in render([{"text": "t", "queue": "other"}])[0]


def test_a_missing_field_is_empty_and_no_error() -> None:
    assert "Queue: \n" in wording().renderer([("q",)])([{"text": "t"}])[0]


@pytest.mark.parametrize(
    "given",
    [
        "my pin",
        {"input": "my pin", "else": 3},
        HumanMessage("my pin"),
        StringPromptValue(text="my pin"),
        {"input": AIMessage([{"type": "text", "text": "my pin"}])},
    ],
    ids=["text", "dict", "message", "prompt value", "message in a dict"],
)
def test_queries_come_in_the_ways_of_langchain(given: Any) -> None:
    assert wording().query(given) == ("my pin",)


def test_a_chat_prompt_is_read_as_text() -> None:
    one = ChatPromptValue(messages=[HumanMessage("my pin")])
    several = ChatPromptValue(messages=[SystemMessage("Be kind."), HumanMessage("my pin")])
    assert wording().query(one) == ("my pin",)
    assert wording().query(several) == ("System: Be kind.\nHuman: my pin",)
    asked = [HumanMessage("my card"), AIMessage("which?"), HumanMessage("the blue one")]
    assert wording().query(asked) == ("Human: my card\nAI: which?\nHuman: the blue one",)
    assert wording().query(asked) == wording().query(ChatPromptValue(messages=asked))
    assert wording().query(asked[:1]) == ("my card",)
    both = wording(suffix="{history}\n\nTicket: {input}\nQueue:").query({"input": "q", "history": asked[:2]})
    assert both == ("Human: my card\nAI: which?", "q")
    called = AIMessage("", tool_calls=[{"name": "ask", "args": {}, "id": "call_8f3a"}])
    steps = [asked[0], called, ToolMessage("blue", tool_call_id="call_8f3a"), RemoveMessage(id="3"), asked[2]]
    for talk in (steps, ChatPromptValue(messages=[step for step in steps if not isinstance(step, RemoveMessage)])):
        assert wording().query(talk) == ("Human: my card\nTool: blue\nHuman: the blue one",)
    assert wording().query([ChatMessage("hm", role="Clerk"), HumanMessageChunk("a")]) == ("Clerk: hm\nHuman: a",)
    assert wording().query([HumanMessage(""), AIMessage(" ")]) == ("",)
    with pytest.raises(ConfigurationError, match="image"):
        wording().query([*asked, HumanMessage([{"type": "image", "url": "https://example.org/a.png"}])])


def test_retrieved_documents_are_joined() -> None:
    task = wording(suffix="Notes: {context}\nTicket: {input}\nQueue:")
    pages = [Document("one"), Document("two")]
    assert task.input_variables == ("context", "input")
    assert task.query({"input": "q", "context": pages}) == ("one\n\ntwo", "q")
    assert task.query({"input": "q", "context": []}) == ("", "q")
    assert task.query({"input": "q", "context": pages[0]}) == ("one", "q")
    assert task.query({"input": "q", "context": ["one", HumanMessage("two")]}) == ("one\n\ntwo", "q")


HALVES = ["\ud83d", HumanMessage("\ud83d"), {"input": [Document("\ud83d")]}]


@pytest.mark.parametrize("given", [None, 1.5j, [], [None], {"other": "a"}, {"input": None}, {"input": [3]}, *HALVES])
def test_other_inputs_are_public_faults(given: Any) -> None:
    with pytest.raises(ConfigurationError, match="input"):
        wording().query(given)


def test_several_variables_need_a_dict() -> None:
    with pytest.raises(ConfigurationError, match="a dict with"):
        wording(suffix="{context} {input}").query("q")


def test_content_is_replaced_in_the_query_alone() -> None:
    task = wording(suffix="{context} {input}")
    assert task.with_content(("pages", "q"), "N/A") == ("pages", "N/A")
    assert wording().with_content(("q",), "N/A") == ("N/A",)
    with pytest.raises(ConfigurationError, match="'input'"):
        wording(suffix="{context} {question}").with_content(("pages", "q"), "N/A")


@pytest.mark.parametrize(
    "change",
    [
        {"example_prompt": "no field"},
        {"example_prompt": "{unknown}"},
        {"example_prompt": "{text!r}"},
        {"example_prompt": "{text.upper}"},
        {"example_prompt": "{text:>10}"},
        {"example_prompt": "{"},
        {"example_prompt": 3},
        {"suffix": "no variable"},
        {"suffix": "{0}"},
        {"prefix": "{}"},
        {"separator": 3},
        {"prefix": "half of a pair \ud83d"},
        {"separator": "\ud83d"},
    ],
    ids=lambda change: f"{next(iter(change))}={next(iter(change.values()))!a}",
)
def test_templates_that_cannot_be_filled_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        wording(**change)


def test_templates_are_texts_or_plain_prompt_templates() -> None:
    assert Template.of("suffix", PromptTemplate.from_template("{a}")) == Template.of("suffix", "{a}")
    refused = [
        PromptTemplate.from_template("{{a}}", template_format="mustache"),
        ChatPromptTemplate.from_template("{a}"),
        PromptTemplate.from_template("{a} {b}", partial_variables={"b": "x"}),
        3,
    ]
    for template in refused:
        with pytest.raises(ConfigurationError, match="suffix"):
            Template.of("suffix", template)


@pytest.mark.parametrize("name", ["Queue Name", "Ticket #", "queue/team", "e-mail", "Größe", "_id", "q", "Is it spam?"])
def test_a_field_may_have_the_name_of_a_column(name: str) -> None:
    """LangChain fills such names, too."""
    task = wording(example_prompt=f"{{text}} -> {{{name}}}", suffix=f"{{{name}}}", fields=("text", name))
    assert task.renderer([("q",)])([{"text": "a", name: "card"}]) == ("Sort.\n\na -> card\n\nq",)
    assert PromptTemplate.from_template(f"{{{name}}}").format(**{name: "x"}) == "x"


@pytest.mark.parametrize("name", ["a.b", "a[0]", "a!r", "a:>9", " a", "a ", "1", "'a'", '"a"', "a\\", ""])
def test_other_names_would_be_read_as_something_else(name: str) -> None:
    with pytest.raises(ConfigurationError, match="plain"):
        Template.of("suffix", f"{{{name}}}")


@pytest.mark.parametrize(
    ("example", "asked"),
    [
        (None, "body: {input}\nqueue:"),
        ("Mail: {body}\nTeam: {queue}", "Mail: {input}\nTeam:"),
        ("{{ {body} }} -> {queue}.", "{{ {input} }} ->"),
        ("{body}\n{queue}", "{input}\n"),
        ("{queue}: {body}", "body: {input}\nqueue:"),
    ],
)
def test_a_query_without_a_template_is_asked_as_the_example_shows_its_text(example: str | None, asked: str) -> None:
    private = PrivateExamples([], text_key="body", label_key="queue", labels=("a", "b"), public_size=900)
    found = wording_of(private, FewShotTask(example))
    assert found.suffix == asked
    assert found.input_variables == ("input",)


def test_a_query_without_a_template_needs_the_fields_that_the_example_shows_beside_its_text() -> None:
    fields: dict[str, Any] = {"fields": ("title",), "labels": ("a", "b"), "public_size": 900}
    private = PrivateExamples([], label_key="queue", **fields)
    assert wording_of(private, FewShotTask("{title}: {text} = {queue}")).suffix == "{title}: {input} ="


@pytest.mark.parametrize(
    ("text_key", "other", "asked"),
    [("task", "input", "task: {input}\nqueue:"), ("input", "context", "{context}: {input} =")],
)
def test_the_text_of_a_query_stands_for_the_text_alone(text_key: str, other: str, asked: str) -> None:
    fields: dict[str, Any] = {"fields": (other,), "labels": ("a", "b"), "public_size": 900}
    private = PrivateExamples([], text_key=text_key, label_key="queue", **fields)
    example = f"{{{other}}}: {{{text_key}}} = {{queue}}"
    assert wording_of(private, FewShotTask(example)).suffix == asked


def test_written_braces_belong_to_the_literal_text() -> None:
    template = Template.of("suffix", "{{ {a} }} {b}{a}")
    assert template.pieces == (("{ ", "a"), (" } ", "b"), ("", "a"))
    assert template.names == ("a", "b")
    assert template.fill({"a": "{b}", "b": "2"}) == "{ {b} } 2{b}"
    assert template.fill_before("b", {"a": "1"}) == "{ 1 } "
