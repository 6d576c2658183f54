"""The standard tests of langchain-tests for our tools, and plain texts as their input."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain_core.tools import BaseTool
from langchain_tests.integration_tests import ToolsIntegrationTests
from langchain_tests.unit_tests import ToolsUnitTests
from pydantic import ValidationError

from langchain_dpicl import DPVotingRunnable, PrivacyBudgetCallbackHandler, PrivateExamples
from langchain_dpicl.backends.fake import FakeBackend, scripted

LABELS = ("card", "transfer")


def voter(**options: Any) -> DPVotingRunnable:
    records = [{"text": f"message {n}", "queue": LABELS[n % 2]} for n in range(40)]
    private = PrivateExamples(records, label_key="queue", labels=LABELS, public_size=900)
    engine = FakeBackend(scripted({" card": 0.9, " transfer": 0.1}), max_top_k=5)
    budget = PrivacyBudgetCallbackHandler(epsilon=30.0, delta=1e-6)
    given: dict[str, Any] = {"llm": engine, "budget": budget, "epsilon": 20.0, "max_queries": 30, **options}
    return DPVotingRunnable.from_private_examples(private, **given)


class OurTool:
    """What the suites ask about."""

    @property
    def tool_constructor(self) -> BaseTool:
        return voter().as_tool(name="queue_of", description="Which queue?")

    @property
    def tool_constructor_params(self) -> dict[str, Any]:
        return {}

    @property
    def tool_invoke_params_example(self) -> dict[str, Any]:
        return {"input": "my card is gone"}


class TestPrivateToolUnit(OurTool, ToolsUnitTests): ...


class TestPrivateToolIntegration(OurTool, ToolsIntegrationTests): ...


def test_a_plain_text_is_a_query() -> None:
    tool = voter().as_tool()
    config: Any = {"configurable": {"tenant": "acme"}}
    assert tool.invoke("which?") in LABELS
    assert tool.invoke("which one?", config) in LABELS
    assert asyncio.run(tool.ainvoke("which now?", config)) in LABELS
    assert tool.run("which then?") in LABELS


def test_a_plain_text_for_several_variables_is_refused_and_charges_nothing() -> None:
    component = voter(suffix="{context} {input}")
    tool = component.as_tool()
    with pytest.raises(ValidationError, match="input\n  Field required"):
        tool.invoke("which?")
    assert component.queries_left == 30
    assert tool.invoke({"context": "x", "input": "which?"}) in LABELS
