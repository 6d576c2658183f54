"""The table that says which exception means what: each exported one stands in one row, and errors keep to it."""

from __future__ import annotations

import importlib
import inspect
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import langchain_dpicl
from langchain_dpicl import (
    DPICLError,
    DPVotingRunnable,
    EmbeddedLLM,
    PrivacyBudgetCallbackHandler,
    PrivateExamples,
)
from langchain_dpicl.exceptions import (
    CapabilityError,
    LedgerError,
    ModelCallError,
    PrivacyBudgetError,
    PrivacyBudgetExceededError,
    PrivateAccessError,
)
from tests.unit_tests.test_public_api import SUBMODULES

PAGE = Path(__file__).resolve().parents[2] / "docs/reference/exceptions.md"


def rows() -> dict[str, list[str]]:
    """The exceptions of each row of the table, by what the row means."""
    text = PAGE.read_text().partition("## Which one means what")[2]
    cells = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("| ")][1:]
    return {meaning.strip(): re.findall(r"`(\w+(?:Error|Warning))`", names) for meaning, names in cells}


def exported() -> set[str]:
    modules = [langchain_dpicl, *map(importlib.import_module, (f"langchain_dpicl.{name}" for name in names_of()))]
    found = {name: getattr(module, name) for module in modules for name in module.__all__}
    return {name for name, one in found.items() if inspect.isclass(one) and issubclass(one, Exception)}


def names_of() -> list[str]:
    return [name.removeprefix("langchain_dpicl.") for name in SUBMODULES]


def test_every_exported_exception_stands_in_exactly_one_row() -> None:
    counts = Counter(name for names in rows().values() for name in names)
    assert set(counts) == exported()
    assert {name for name, count in counts.items() if count > 1} == set()


def test_every_error_is_one_of_ours_and_every_row_of_bad_input_is_a_value_error_too() -> None:
    import langchain_dpicl.exceptions as home

    errors = [getattr(home, name) for name in home.__all__ if name.endswith("Error")]
    assert [error.__name__ for error in errors if not issubclass(error, DPICLError)] == []
    for meaning, names in rows().items():
        if meaning.startswith(("bad input", "the model cannot")):
            assert [name for name in names if not issubclass(getattr(home, name), ValueError)] == []


def private() -> PrivateExamples:
    return PrivateExamples([{"text": "a", "queue": "x"}], label_key="queue", labels=("x", "y"), public_size=500)


def voter(**changes: Any) -> DPVotingRunnable:
    given: dict[str, Any] = {"llm": EmbeddedLLM(), "epsilon": 1.0, "max_queries": 1}
    budget = PrivacyBudgetCallbackHandler(epsilon=1.0, delta=1e-6)
    return DPVotingRunnable.from_private_examples(private(), **{"budget": budget, **given, **changes})


RAISED: dict[str, list[Callable[[], object]]] = {
    "bad input": [
        lambda: voter(max_queries=0),
        lambda: PrivateExamples([{"text": 7}], public_size=500),
        lambda: PrivacyBudgetCallbackHandler(epsilon=-1.0, delta=1e-6),
    ],
    "the model cannot": [lambda: voter(llm=EmbeddedLLM)],
    "spent": [lambda: voter(epsilon=2.0)],
    "not allowed here": [lambda: voter(budget=None), lambda: len(private())],
    "broken": [lambda: PrivacyBudgetCallbackHandler.open(Path(__file__).parent)],
}


@pytest.mark.parametrize("meaning", RAISED)
def test_what_is_raised_is_of_the_row_that_says_so(meaning: str) -> None:
    names = next(names for said, names in rows().items() if said.startswith(meaning))
    for act in RAISED[meaning]:
        with pytest.raises(DPICLError) as caught:
            act()
        assert type(caught.value).__name__ in names


def test_the_four_kinds_that_a_service_tells_apart_do_not_overlap() -> None:
    kinds = (CapabilityError, PrivacyBudgetExceededError, PrivateAccessError, ModelCallError, LedgerError)
    for one in kinds:
        assert [other for other in kinds if other is not one and issubclass(one, other)] == []
    assert issubclass(PrivacyBudgetExceededError, PrivacyBudgetError)
