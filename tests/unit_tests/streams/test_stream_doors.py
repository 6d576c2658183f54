"""Every component either reads ranges of a stream, or refuses them with what reads them and what to do instead."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest
from langchain_core.prompts import ChatPromptTemplate

import langchain_dpicl as dpicl
from langchain_dpicl import Budget
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.runs.door import NO_STREAM
from langchain_dpicl.streams import PrivateStream

READERS = {
    "DPFewShotPromptTemplate",
    "DPFewShotChatMessagePromptTemplate",
    "DemonstrationSynthesizer",
    "DPVotingRunnable",
    "DocumentSynthesizer",
}
COMPONENTS = {
    name: member for name in dpicl.__all__ if hasattr(member := getattr(dpicl, name), "from_private_examples")
}


def given(kind: str) -> Any:
    some = PrivateStream(dataset_id="d", time_key="at", unit_key="user", public_size={7: 1000})
    return {"last": some.last(7), "rolling": some.rolling(7, every=7), "stream": some}[kind]


def test_all_components_are_known_and_those_that_read_ranges_are_named() -> None:
    assert set(COMPONENTS) > READERS
    assert all(name in NO_STREAM for name in READERS if "Chat" not in name)


@pytest.mark.parametrize("name", sorted(set(COMPONENTS) - READERS))
@pytest.mark.parametrize("kind", ["last", "rolling", "stream"])
@pytest.mark.parametrize("per", ["30 days", "life"])
def test_what_reads_no_streams_says_what_does_and_what_to_do_instead(name: str, kind: str, per: str) -> None:
    budget = Budget(epsilon=1.0, delta=1e-6, per=per)
    makes = COMPONENTS[name].from_private_examples
    needs = [p.name for p in inspect.signature(makes).parameters.values() if p.default is p.empty]
    others: dict[str, Any] = {each: None for each in needs if each != "private"}
    with pytest.raises(ConfigurationError) as caught:
        makes(given(kind), budget=budget, **others)
    assert NO_STREAM in str(caught.value)
    assert "build PrivateExamples" in str(caught.value)
    assert not budget._store.records()
    amakes = getattr(COMPONENTS[name], "afrom_private_examples", None)
    if amakes is not None:
        with pytest.raises(ConfigurationError, match="Of a stream only"):
            asyncio.run(amakes(given(kind), budget=budget, **others))


def arguments(name: str) -> dict[str, Any]:
    shown: Any = ChatPromptTemplate.from_messages([("ai", "{text}")]) if "Chat" in name else "{text}"
    needs: dict[str, dict[str, Any]] = {
        "DPVotingRunnable": {"max_queries": 3},
        "DocumentSynthesizer": {"documents_per_topic": 0, "topics": ("a", "b")},
    }
    others = {"example_prompt": shown, "suffix": "{q}"} if "Prompt" in name else {}
    return {"llm": dpicl.EmbeddedLLM(), "component": "c", "epsilon": 1.0, **others, **needs.get(name, {})}


@pytest.mark.parametrize("name", sorted(READERS))
def test_what_reads_ranges_takes_no_stream_whole_and_no_budget_for_life(name: str) -> None:
    budget = Budget(epsilon=1.0, delta=1e-6)
    with pytest.raises(ConfigurationError, match="a range of a stream"):
        COMPONENTS[name].from_private_examples(given("stream"), budget=budget, **arguments(name))
    for kind in ("last", "rolling"):
        with pytest.raises(ConfigurationError, match="promise is for windows"):
            COMPONENTS[name].from_private_examples(given(kind), budget=budget, **arguments(name))
    assert not budget._store.records()


@pytest.mark.parametrize("name", sorted(READERS))
def test_examples_without_a_time_are_refused_on_a_budget_for_windows(name: str) -> None:
    budget = Budget(epsilon=1.0, delta=1e-6, per="30 days")
    labels: dict[str, Any] = {"label_key": "queue", "labels": ("a", "b")} if "Voting" in name else {}
    record = {"text": "x", "queue": "a"}
    private = dpicl.PrivateExamples([record], public_size=1000, **labels)
    with pytest.raises(ConfigurationError, match="this budget is per 30 days"):
        COMPONENTS[name].from_private_examples(private, budget=budget, **arguments(name))
    assert not budget._store.records()
