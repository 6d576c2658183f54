"""The house rules that a linter does not know."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable
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


@functools.cache
def source(path: Path) -> str:
    return path.read_text()


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(source(path))


@functools.cache
def names_called(path: Path) -> frozenset[str]:
    return frozenset(ast.unparse(node.func) for node in ast.walk(tree(path)) if isinstance(node, ast.Call))


def those(broken: Callable[[Path], object], *, but: Callable[[Path], object] = lambda _: False) -> list[str]:
    """Returns the source files that break a rule."""
    return [str(path.relative_to(PACKAGE)) for path in SOURCES if not but(path) and broken(path)]


class TestEverySourceFile:
    """One test a rule; what is asserted names the files."""

    def test_is_looked_at(self) -> None:
        assert len(SOURCES) > 100

    def test_says_what_it_does_in_its_first_lines(self) -> None:
        assert those(lambda path: not ast.get_docstring(tree(path))) == []

    def test_draws_no_randomness_of_its_own(self) -> None:
        forbidden = re.compile(r"^(np|numpy)\.random\.(?!Generator)|^random\.|^secrets\.(?!token_hex)|^os\.urandom")
        assert (
            those(
                lambda path: any(map(forbidden.search, names_called(path))),
                but=lambda path: path.name == "randomness.py",
            )
            == []
        )

    def test_prints_only_in_the_cli(self) -> None:
        commands = {"main.py"}
        assert those(lambda path: "print" in names_called(path), but=lambda path: path.name in commands) == []

    def test_has_no_unfinished_business(self) -> None:
        assert those(lambda path: re.search(r"\b(TODO|FIXME|XXX|HACK)\b", source(path))) == []

    def test_opens_the_private_door_only_in_the_curator(self) -> None:
        assert (
            those(
                lambda path: re.search(r"\._pool\b", source(path)),
                but=lambda path: path.match("langchain_dpicl/release/curator.py"),
            )
            == []
        )

    def test_computes_no_epsilon_outside_accounting(self) -> None:
        assert (
            those(
                lambda path: re.search("dp_accounting|prv_accountant", source(path)),
                but=lambda path: (
                    "accounting" in path.parts or path.name == "second_opinions.py" or path.name.startswith("_")
                ),
            )
            == []
        )


ON_DEMAND = """
import sys, langchain_dpicl
print(sorted({'dp_accounting', 'prv_accountant', 'ray', 'torch'} & set(sys.modules)))
from langchain_dpicl.backends.embedded import EmbeddedModel
EmbeddedModel().complete(['a'], max_tokens=1)
print([name for name in sys.modules if name.endswith('build_embedded') or name == 'torch'])
"""


def test_the_package_imports_no_accountant_and_the_embedded_model_no_builder() -> None:
    import subprocess
    import sys

    done = subprocess.run([sys.executable, "-c", ON_DEMAND], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[]", "[]"]


def test_files_speak_of_the_project_alone() -> None:
    machine = re.compile(r"/(?:" + "work|root|home/[a-z]+|Users/[A-Za-z]+" + r")/[A-Za-z]")
    secret = re.compile(r"(sk-[A-Za-z0-9]{20,}|hf_[A-Za-z0-9]{20,}|AKIA[0-9A-Z]{16})")
    assert len(TEXTS) > 300
    found = [
        path
        for path in TEXTS
        for text in [path.read_text(errors="replace")]
        if machine.search(text) or secret.search(text)
    ]
    assert [str(path.relative_to(ROOT)) for path in found] == []


def test_test_names_are_the_same_in_every_process(request: pytest.FixtureRequest) -> None:
    """Workers have to collect the same names; an address in one differs between them."""
    assert not [item.nodeid for item in request.session.items if re.search(r" at 0x[0-9a-f]+", item.nodeid)]
