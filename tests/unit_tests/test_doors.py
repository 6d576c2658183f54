"""Tests that the constructors of components share one shape: few parameters, the same words, options for the rest."""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import langchain_dpicl as dpicl
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.options import OPTIONS
from langchain_dpicl.runs.query_runnable import QueryRunnable

COMPONENTS: tuple[type[Any], ...] = (
    dpicl.DPVotingRunnable,
    dpicl.DPFreeFormRunnable,
    dpicl.DPRetrievalVotingRunnable,
    dpicl.DPRetrievalFreeFormRunnable,
    dpicl.DemonstrationSynthesizer,
    dpicl.DPFewShotPromptTemplate,
    dpicl.DPFewShotChatMessagePromptTemplate,
    dpicl.DocumentSynthesizer,
    dpicl.PrivateEvolution,
    dpicl.PromptPATELabeler,
    dpicl.PromptPATEExampleSelector,
    dpicl.PromptDPSGD,
    dpicl.UnitCounter,
    dpicl.ValueDiscovery,
    dpicl.WordDiscovery,
)
MOST_PARAMETERS = 15
MOST_WORDS = 165
ORDER = [
    "private",
    "llm",
    "embeddings",
    "retrieval",
    "public_inputs",
    "topics",
    "training",
    "field",
    "values",
    "max_values",
    "fold_case",
    "deny",
    "pairs",
    "max_queries",
    "budget",
    "epsilon",
    "example_prompt",
    "suffix",
    "prefix",
    "instruction",
    "task",
    "prompt",
    "fields",
    "shots_per_label",
    "documents_per_topic",
    "max_tokens",
    "evolution",
    "rows",
    "noise",
    "decoding",
    "answers",
    "student",
    "strategy",
    "serving",
    "component",
    "checkpoint",
    "executor",
]
"""Every flat word, in the order in which constructors take them: what, who pays, wording, rows, noise, answers, run."""


def parameters(component: type[Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(component.from_private_examples).parameters.values())


@pytest.mark.parametrize("component", COMPONENTS)
class TestEveryConstructor:
    def test_takes_few_parameters_all_but_the_first_by_name(self, component: type[Any]) -> None:
        taken = parameters(component)
        assert len(taken) <= MOST_PARAMETERS
        assert taken[0].name == "private"
        assert {one.kind for one in taken[1:]} == {inspect.Parameter.KEYWORD_ONLY}

    def test_uses_the_common_words(self, component: type[Any]) -> None:
        assert {one.name for one in parameters(component)} <= set(ORDER)

    def test_says_the_type_of_each(self, component: type[Any]) -> None:
        assert [one.name for one in parameters(component) if one.annotation in {inspect.Parameter.empty, "Any"}] == []

    def test_has_an_awaitable_version_with_the_same_signature(self, component: type[Any]) -> None:
        build: Callable[..., Any] = component.afrom_private_examples
        assert inspect.iscoroutinefunction(build)
        assert inspect.signature(build) == inspect.signature(component.from_private_examples)

    def test_explains_a_wrong_keyword_and_shows_no_value(self, component: type[Any]) -> None:
        with pytest.raises(ConfigurationError, match=r"found 'epsilom'\. Did you mean 'epsilon'") as caught:
            component.from_private_examples([{"text": "secret canary"}], epsilom=1.0)
        assert "canary" not in str(caught.value)

    @pytest.mark.parametrize("is_awaited", [False, True], ids=["blocking", "awaited"])
    def test_says_how_to_declare_records_that_are_given_as_they_are(
        self, component: type[Any], *, is_awaited: bool
    ) -> None:
        required: dict[str, Any] = {
            one.name: None for one in parameters(component)[1:] if one.default is inspect.Parameter.empty
        }
        expected = r"private: expected PrivateExamples, found 'list'\. Declare them: PrivateExamples\(records, \.\.\.\)"
        with pytest.raises(ConfigurationError, match=expected) as caught:
            if is_awaited:
                asyncio.run(component.afrom_private_examples([{"text": "secret canary"}], **required))
            else:
                component.from_private_examples([{"text": "secret canary"}], **required)
        assert "canary" not in str(caught.value)


NO_ROOM = {"DPFewShotChatMessagePromptTemplate", "PromptDPSGD"}
"""The first makes the calls of its sibling, the second trains in this process and calls no model elsewhere."""


def test_every_exported_component_is_known_to_the_suites_of_components() -> None:
    exported = {name: one for name in dpicl.__all__ if hasattr(one := getattr(dpicl, name), "from_private_examples")}
    assert {one.__name__ for one in COMPONENTS} == set(exported), "see COMPONENTS above"
    tests = Path(__file__).parents[1]
    tree = ast.parse((tests / "leaks" / "rooms.py").read_text(encoding="utf-8"))
    called = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    rooms = re.findall(r"(\w+)\.a?from_\w+$", "\n".join(called), flags=re.MULTILINE)
    assert set(exported) - set(rooms) == NO_ROOM, "a room is missing in tests/leaks/rooms.py"
    suites = (path.read_text(encoding="utf-8") for path in tests.glob("unit_tests/*/test_*.py"))
    made = [re.findall(r"def make\(.*\) -> (\w+):", text) for text in suites if "(ChargingRunnableContract)" in text]
    charging = {name for name, one in exported.items() if issubclass(one, QueryRunnable)}
    assert charging.difference(*made) == set(), "a ChargingRunnableContract is missing"


def test_all_words_together_are_few() -> None:
    flat = {one.name for component in COMPONENTS for one in parameters(component)}
    fields = [f"{option.__name__}.{f.name}" for option in OPTIONS for f in dataclasses.fields(option)]  # type: ignore[arg-type]
    assert len(flat) + len(fields) <= MOST_WORDS
    assert flat == set(ORDER)
