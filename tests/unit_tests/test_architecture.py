"""The house rules that a linter does not know."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "langchain_dpicl"
SOURCES = sorted(PACKAGE.rglob("*.py"))
TEXTS = sorted(
    path
    for pattern in ("*.md", "*.toml", "*.py", "Makefile", "NOTICE", "*.yaml", "*.json")
    for path in ROOT.rglob(pattern)
    if not {".git", "build", "dist", "out", ".hypothesis"} & set(path.relative_to(ROOT).parts)
    and not any(part.startswith(".venv") for part in path.relative_to(ROOT).parts)
)


def names_called(tree: ast.AST) -> set[str]:
    return {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
class TestEverySourceFile:
    def test_says_what_it_does_not_know_in_its_first_lines(self, path: Path) -> None:
        assert ast.get_docstring(ast.parse(path.read_text()))

    def test_is_of_a_size_one_can_hold_in_the_head(self, path: Path) -> None:
        assert path.read_text().count("\n") <= 450

    def test_has_functions_one_can_hold_in_the_head(self, path: Path) -> None:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                size = body[-1].end_lineno - body[0].lineno + 1 if body else 0
                assert size <= 60, f"{node.name}: {size} lines"

    def test_draws_no_randomness_of_its_own(self, path: Path) -> None:
        called = names_called(ast.parse(path.read_text()))
        if path.name == "randomness.py":
            return
        forbidden = re.compile(r"^(np|numpy)\.random\.(?!Generator)|^random\.|^secrets\.(?!token_hex)|^os\.urandom")
        assert not [name for name in called if forbidden.search(name)]

    def test_prints_only_in_the_cli(self, path: Path) -> None:
        if path.name not in {"cli.py", "_embedded_build.py"}:
            assert "print" not in names_called(ast.parse(path.read_text()))

    def test_has_no_unfinished_business(self, path: Path) -> None:
        assert not re.search(r"\b(TODO|FIXME|XXX|HACK)\b", path.read_text())

    def test_opens_the_private_door_only_in_the_curator(self, path: Path) -> None:
        if path.name not in {"curator.py", "examples.py"}:
            assert not re.search(r"\._pool\b", path.read_text())

    def test_computes_no_epsilon_outside_accounting(self, path: Path) -> None:
        if not path.name.startswith(("accounting", "_")):
            assert "dp_accounting" not in path.read_text()
            assert "prv_accountant" not in path.read_text()


def test_the_curator_stays_small() -> None:
    assert (PACKAGE / "curator.py").read_text().count("\n") <= 260


ON_DEMAND = """
import sys, langchain_dpicl
print(sorted({'dp_accounting', 'prv_accountant', 'torch'} & set(sys.modules)))
from langchain_dpicl.backends.embedded import EmbeddedModel
EmbeddedModel().complete(['a'], max_tokens=1)
builder = ('_embedded_build', '_embedded_vectors')
print([name for name in sys.modules if name.endswith(builder) or name == 'torch'])
"""


def test_the_package_imports_no_accountant_and_the_embedded_model_no_builder() -> None:
    import subprocess
    import sys

    done = subprocess.run([sys.executable, "-c", ON_DEMAND], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[]", "[]"]


@pytest.mark.parametrize("path", TEXTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_speak_of_the_project_alone(path: Path) -> None:
    text = path.read_text(errors="replace")
    machine = re.compile(r"/(?:" + "work|root|home/[a-z]+|Users/[A-Za-z]+" + r")/[A-Za-z]")
    assert not machine.search(text)
    assert not re.search(r"(sk-[A-Za-z0-9]{20,}|hf_[A-Za-z0-9]{20,}|AKIA[0-9A-Z]{16})", text)


def test_test_names_are_the_same_in_every_process(request: pytest.FixtureRequest) -> None:
    """Workers have to collect the same names; an address in one differs between them."""
    assert not [item.nodeid for item in request.session.items if re.search(r" at 0x[0-9a-f]+", item.nodeid)]
