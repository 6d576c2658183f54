"""One public face."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import langchain_dpicl
from langchain_dpicl import exceptions
from tests.public_names import FACE, SUBMODULES, exported, load

MOST_NAMES = 45
REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "index.md"
MODULES = [importlib.import_module(name) for name in (FACE, *SUBMODULES)]
LAZY = [module for module in MODULES if hasattr(module, "_HOME")]


def test_the_public_face_is_sorted_and_short() -> None:
    assert langchain_dpicl.__all__ == sorted(langchain_dpicl.__all__)
    assert len(langchain_dpicl.__all__) <= MOST_NAMES


@pytest.mark.parametrize("module", [FACE, *SUBMODULES])
def test_every_promised_name_is_once_there_and_importable(module: str) -> None:
    names = exported(module)
    assert len(set(names)) == len(names) > 0
    assert all(load(module, name).__doc__ for name in names)


@pytest.mark.parametrize("text", [langchain_dpicl.__doc__ or "", REFERENCE.read_text()], ids=["docstring", "page"])
def test_the_modules_whose_names_are_promised_are_listed(text: str) -> None:
    (listed,) = re.findall(r"modules ((?:`\w+`(?:,| and)?\s+)+)", text)
    assert [f"{FACE}.{name}" for name in re.findall(r"`(\w+)`", listed)] == [*SUBMODULES]


def test_a_name_of_the_face_is_the_same_in_its_submodule() -> None:
    both = [(module, name) for module in SUBMODULES for name in exported(module) if name in langchain_dpicl.__all__]
    assert both
    assert [(module, name) for module, name in both if load(module, name) is not load(FACE, name)] == []


def test_every_error_of_the_tree_is_public() -> None:
    errors = {
        name for name, value in vars(exceptions).items() if isinstance(value, type) and issubclass(value, Exception)
    }
    assert errors == set(exceptions.__all__)
    assert errors & set(langchain_dpicl.__all__) == {"DPICLError", "PrivacyBudgetExceededError", "RunInterruptedError"}


def test_packages_load_their_names_on_first_use() -> None:
    names = {module.__name__.rpartition(".")[2] for module in LAZY}
    packages = {module.__name__.rpartition(".")[2] for module in MODULES if hasattr(module, "__path__")}
    assert names == packages - {"options"}  # every component takes several of them


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


BELOW_THE_VAULT = {f"langchain_dpicl.{name}" for name in ("_calls", "_lazy", "_opaque", "_plain_files", "exceptions")}


@pytest.mark.parametrize(
    "module",
    ["accounting", "mechanisms.release_plan", "ledger.budget", "private_examples", "mechanisms.randomness"],
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
