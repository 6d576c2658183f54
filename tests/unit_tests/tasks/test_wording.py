"""Records arrive byte for byte; the model continues where the text begins."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.tasks import GenerationTemplate


def wording(template: str = "topic: {topic}\ntext: {text}") -> GenerationTemplate:
    return GenerationTemplate("Do it.", template, text_key="text", label_key="topic", fields=("text", "topic", "extra"))


@given(text=st.text(), topic=st.text())
def test_a_record_arrives_byte_for_byte(text: str, topic: str) -> None:
    shown = wording().record({"text": text, "topic": topic})
    assert shown == "topic: " + topic + "\ntext: " + text


@pytest.mark.parametrize("hostile", ["{topic}", "{0}", "{q.secret}", "{q:>99999}", "{", "}", "{{}}", "%s $x {text}"])
def test_braces_in_records_and_labels_are_text(hostile: str) -> None:
    prompt = wording().renderer("text", {"topic": hostile})([{"text": hostile, "topic": hostile}])
    assert prompt == f"Do it.\n\ntopic: {hostile}\ntext: {hostile}\n\ntopic: {hostile}\ntext:"


def test_no_records_give_the_public_prompt() -> None:
    assert wording().renderer("text", {"topic": "x"})(()) == "Do it.\n\ntopic: x\ntext:"


def test_the_stub_of_a_label_ends_where_the_label_begins() -> None:
    assert wording().stub("topic", {}) == "topic:"


def test_escaped_braces_in_the_template_are_braces() -> None:
    assert wording("{{{topic}}} {text}").record({"text": "b", "topic": "a"}) == "{a} b"


@pytest.mark.parametrize(
    "template",
    [
        "",
        "{text}{topic}",
        "{topic} {text}.",
        "{topic}{text}{text}",
        "{text}",
        "{nope}{topic}{text}",
        "{topic!r}{text}",
        "{}{topic}{text}",
        "\ud83d {topic}{text}",
    ],
)
def test_templates_that_cannot_be_continued_are_refused(template: str) -> None:
    with pytest.raises(ConfigurationError, match="record_prompt"):
        wording(template)


def test_the_default_template_puts_the_text_last() -> None:
    assert GenerationTemplate.default_template("text", "topic") == "topic: {topic}\ntext: {text}"
    assert GenerationTemplate.default_template("text", None) == "text: {text}"
