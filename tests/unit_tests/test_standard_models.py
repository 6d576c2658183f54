"""The standard tests of langchain-tests for our embeddings and chat models, and what pydantic shows of our classes."""

from __future__ import annotations

import importlib
import inspect
import json
from typing import Any

import pytest
from langchain_tests.integration_tests import ChatModelIntegrationTests, EmbeddingsIntegrationTests
from langchain_tests.unit_tests import EmbeddingsUnitTests
from pydantic import BaseModel

import langchain_dpicl
from langchain_dpicl import ChatEmbedded
from langchain_dpicl.backends import LocalEmbeddings

MODELS = [
    found
    for name in langchain_dpicl.__all__
    if inspect.isclass(found := getattr(langchain_dpicl, name)) and issubclass(found, BaseModel)
]


@pytest.fixture
def vcr() -> None:
    """Stands for the plugin that records calls; a model in this process has none to record."""


class OurEmbeddings:
    """What the suites ask about."""

    @property
    def embeddings_class(self) -> type[LocalEmbeddings]:
        return LocalEmbeddings


class TestLocalEmbeddingsUnit(OurEmbeddings, EmbeddingsUnitTests): ...


class TestLocalEmbeddingsIntegration(OurEmbeddings, EmbeddingsIntegrationTests): ...


class TestEmbeddedChatIntegration(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[ChatEmbedded]:
        return ChatEmbedded

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"max_tokens": 8}

    @property
    def has_tool_calling(self) -> bool:
        return False

    @property
    def has_structured_output(self) -> bool:
        return False


def suites() -> set[str]:
    """The standard suites that test modules of this repository run, with what they test."""
    found = set()
    for module in ("test_standard_models", "test_standard_tools", "serving.test_local_models"):
        for one in vars(importlib.import_module(f"tests.unit_tests.{module}")).values():
            if inspect.isclass(one) and one.__module__.startswith("tests.") and one.__name__.startswith("Test"):
                found |= {base.__name__ for base in one.__mro__ if base.__module__.startswith("langchain_tests.")}
    return found


def test_everything_of_ours_that_has_a_standard_suite_runs_it() -> None:
    assert suites() >= {
        "ChatModelUnitTests",
        "ChatModelIntegrationTests",
        "EmbeddingsUnitTests",
        "EmbeddingsIntegrationTests",
        "ToolsUnitTests",
        "ToolsIntegrationTests",
    }


@pytest.mark.parametrize("cls", MODELS, ids=lambda cls: cls.__name__)
def test_each_class_has_a_json_schema(cls: type[BaseModel]) -> None:
    schema = cls.model_json_schema()
    assert schema["title"] == cls.__name__
    assert set(schema["properties"]) <= set(cls.model_fields)
    assert json.loads(json.dumps(schema)) == schema
