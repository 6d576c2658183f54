"""Tests that constructors explain wrong keywords without showing values, and that their awaitable versions match."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any, Self

import pytest

from langchain_dpicl import PrivateExamples
from langchain_dpicl.backends.sync_async import awaitable
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.options import Noise, Rows
from langchain_dpicl.runs.door import door

DECLARED = PrivateExamples(["secret canary"], public_size=1)


class Component:
    def __init__(self, private: PrivateExamples, rows: Rows | None) -> None:
        self.private, self.rows = private, rows

    @classmethod
    @door("Component")
    def from_private_examples(
        cls,
        private: PrivateExamples,
        *,
        llm: str,
        rows: Rows | None = None,
        noise: Noise | None = None,
        budget: Any = None,
    ) -> Self:
        return cls(private, rows)

    afrom_private_examples = awaitable(from_private_examples)


class Special(Component):
    """A subclass: both constructors return it."""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slots": 3}, r"found 'slots'. Give rows=Rows\(slots=...\)"),
        ({"delta": 1e-6}, r"found 'delta'. Give noise=Noise\(delta=...\)"),
        ({"row": 3}, r"found 'row'. Did you mean 'rows'"),
    ],
)
def test_a_wrong_keyword_is_explained(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Component.from_private_examples(DECLARED, llm="m", **options)
    with pytest.raises(ConfigurationError, match=message):
        asyncio.run(Component.afrom_private_examples(DECLARED, llm="m", **options))


def test_a_missing_parameter_is_named_and_no_value_shown() -> None:
    with pytest.raises(ConfigurationError, match="llm") as caught:
        Component.from_private_examples(DECLARED, budget="secret canary")  # type: ignore[call-arg]
    error: BaseException | None = caught.value
    assert "canary" not in repr(error)
    assert error is not None
    assert error.__cause__ is None
    frames = inspect.getinnerframes(caught.tb)
    kept = [frame.frame.f_locals for frame in frames if "langchain_dpicl" in frame.filename]
    assert "canary" not in repr(kept)


def test_the_awaitable_version_is_of_the_subclass_and_has_the_same_signature() -> None:
    built = asyncio.run(Special.afrom_private_examples(DECLARED, llm="m", rows=Rows(slots=2)))
    assert type(built) is Special
    assert built.rows == Rows(slots=2)
    assert inspect.signature(Special.afrom_private_examples) == inspect.signature(Special.from_private_examples)
