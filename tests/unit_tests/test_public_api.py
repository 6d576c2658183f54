"""One public face."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from types import ModuleType

import pytest

import langchain_dpicl
from langchain_dpicl import agents, audit, stores

LAZY = [langchain_dpicl, agents, audit, stores]


def test_the_public_face_is_sorted_complete_and_importable() -> None:
    assert langchain_dpicl.__all__ == sorted(langchain_dpicl.__all__)
    for name in langchain_dpicl.__all__:
        assert getattr(langchain_dpicl, name).__doc__


def test_every_error_of_the_tree_is_public() -> None:
    from langchain_dpicl import exceptions

    errors = {
        name for name, value in vars(exceptions).items() if isinstance(value, type) and issubclass(value, Exception)
    }
    assert errors <= set(langchain_dpicl.__all__)


@pytest.mark.parametrize("package", LAZY, ids=lambda package: package.__name__)
def test_names_are_loaded_from_where_type_checkers_find_them(package: ModuleType) -> None:
    (typed,) = (node for node in ast.parse(inspect.getsource(package)).body if ast.unparse(node).startswith("if TYPE_"))
    imports = [node for node in typed.body if isinstance(node, ast.ImportFrom)]
    assert {alias.name: node.module for node in imports for alias in node.names} == package._HOME
    assert set(package._HOME) <= set(package.__all__) <= set(dir(package))


@pytest.mark.parametrize("package", LAZY, ids=lambda package: package.__name__)
def test_a_name_that_is_not_exported_is_no_attribute(package: ModuleType) -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = package.Nothing


def test_the_version_is_that_of_the_distribution() -> None:
    assert langchain_dpicl.__version__ == importlib.metadata.version("langchain-dpicl")


def loaded_by(module: str) -> set[str]:
    code = f"import sys, {module}\nprint(*sys.modules, sep='\\n')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


BELOW_THE_VAULT = {f"langchain_dpicl.{name}" for name in ("_lazy", "_plain_files", "exceptions")}


@pytest.mark.parametrize(
    "module",
    ["accounting", "mechanisms.release_plan", "ledger.budget", "data.private_examples", "mechanisms.randomness"],
)
def test_the_vault_loads_no_framework_and_no_other_part_of_the_package(module: str) -> None:
    loaded = loaded_by(f"langchain_dpicl.privacy.{module}")
    frameworks = {"langchain_core", "torch", "transformers", "pydantic", "httpx", "openai", "anthropic", "requests"}
    assert {name.partition(".")[0] for name in loaded} & frameworks == set()
    own = {name for name in loaded if name.startswith("langchain_dpicl.")}
    assert {name for name in own if not name.startswith("langchain_dpicl.privacy")} <= BELOW_THE_VAULT
    assert f"langchain_dpicl.privacy.{module}" in own


def test_the_package_itself_loads_nothing() -> None:
    loaded = loaded_by("langchain_dpicl")
    assert {name for name in loaded if name.startswith("langchain_dpicl")} == {
        "langchain_dpicl",
        "langchain_dpicl._lazy",
    }
    assert not {"langchain_core", "pydantic", "numpy", "importlib.metadata"} & loaded
