"""Measures how the package is built, and prints each figure with its goal.

    python tests/check_house.py            the table; ends with 0
    python tests/check_house.py --strict   ends with 1 if a goal is missed
    python tests/check_house.py --list     names the circles, the imports that go up, the files with one importer, the core

How it counts:
  - An import counts wherever it stands: in a function, under TYPE_CHECKING, and as `import_module("...")`.
  - An import goes up if a contract of import-linter in pyproject.toml puts what is imported in a higher layer.
  - A file has one importer if one other file of the package imports it. An `__init__` above it that exports its names
    counts only where nothing else imports the file. Files that nothing imports, and `__init__` files, are left out.
  - The core is what the modules of CORE import when they run, directly or not, without what BESIDE names. Lines of it
    include docstrings and blank lines.
  - Processor times are those of fresh interpreters that find compiled files: the lowest of five.
"""

from __future__ import annotations

import argparse
import ast
import io
import os
import re
import subprocess
import sys
import tempfile
import tokenize
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "langchain_dpicl"
CORE = ("langchain_dpicl.release.curator", "langchain_dpicl.privacy.ledger.budget")
"""The modules of the release and of `Budget`, where a reading of what a vote is charged begins."""
BESIDE = ("langchain_dpicl.privacy.extensions", "langchain_dpicl.privacy.second_opinions")
"""What the core loads only for a part that is not its own, and what can only refuse a price."""

TURNS = 5
LANGCHAIN = "import langchain_core.prompts, langchain_core.runnables"
NEEDED = "from langchain_core.prompts import FewShotPromptTemplate; from langchain_core.runnables import Runnable; import numpy"
"""What any component has to load: the classes that it derives from, and arrays."""

Graph = Mapping[str, frozenset[str]]
"""The modules that each module imports."""


@dataclass(frozen=True)
class Figure:
    """One line of the table.

    Attributes:
      what: is measured.
      found: number; None where it could not be measured.
      goal: largest number that meets it; None for figures that are only shown.
      note: more of it.
    """

    what: str
    found: float | None
    goal: float | None = None
    note: str = ""

    @property
    def is_missed(self) -> bool:
        return self.goal is not None and (self.found is None or self.found > self.goal)


def modules_of(package: Path) -> dict[str, Path]:
    """Returns the files of a package by module name."""

    def name(path: Path) -> str:
        return ".".join([package.name, *path.relative_to(package).with_suffix("").parts]).removesuffix(".__init__")

    return {name(path): path for path in sorted(package.rglob("*.py"))}


def graph_of(modules: Mapping[str, Path], *, typing: bool = True) -> Graph:
    """Returns which modules import which; without `typing`, not for annotations alone."""
    return {name: frozenset(_imported(path, modules, typing=typing)) - {name} for name, path in modules.items()}


def core_of(modules: Mapping[str, Path]) -> set[str]:
    """Returns the modules that a reader of the core reads."""
    graph = graph_of(modules, typing=False)
    return reached(
        {name: frozenset(one for one in known if not one.startswith(BESIDE)) for name, known in graph.items()}, CORE
    )


def _imported(path: Path, modules: Mapping[str, Path], *, typing: bool) -> Iterator[str]:
    tree = ast.parse(path.read_text())
    checked = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    unread = {id(inner) for node in checked if not typing for line in node.body for inner in ast.walk(line)}
    for node in ast.walk(tree):
        if id(node) in unread:
            continue
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            parts = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [part if part in modules else node.module for part in parts]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names = [value.value for value in node.args if isinstance(value, ast.Constant)]
        yield from (name for name in names if name in modules)


def reached(graph: Graph, start: Iterable[str]) -> set[str]:
    """Returns the modules of `start` and all that they import, directly or not."""
    seen: set[str] = set()
    todo = [*start]
    while todo:
        if (name := todo.pop()) not in seen:
            seen.add(name)
            todo += graph[name]
    return seen


def circles(graph: Graph) -> list[list[str]]:
    """Returns the groups of modules that import each other."""
    reach = {name: reached(graph, graph[name]) for name in graph}
    found = {
        tuple(sorted(other for other in reach[name] if name in reach[other])) for name in graph if name in reach[name]
    }
    return [list(group) for group in sorted(found)]


def upward(graph: Graph, contracts: Iterable[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Returns the imports of modules that a contract puts in a higher layer."""
    found = set()
    for contract in contracts:
        if contract["type"] == "layers":
            layer_of = _layers(graph, contract)
            found |= {
                (name, other)
                for name, level in layer_of.items()
                for other in graph[name]
                if layer_of.get(other, level) < level
            }
    return sorted(found)


def _layers(graph: Graph, contract: Mapping[str, Any]) -> dict[str, int]:
    """Returns the layer of each module, 0 for the highest; modules of no layer are left out."""
    prefixes = [f"{container}." for container in contract.get("containers", [])] or [""]
    levels: dict[str, int] = {}
    for level, line in enumerate(contract["layers"]):
        for part in re.split(r"[|:]", line):
            levels |= {prefix + part.strip().strip("()"): level for prefix in prefixes}
    found = {}
    for name in graph:
        above = [".".join(name.split(".")[:end]) for end in range(name.count(".") + 1, 0, -1)]
        if home := next((one for one in above if one in levels), None):
            found[name] = levels[home]
    return found


def single_importers(graph: Graph, modules: Mapping[str, Path]) -> dict[str, str]:
    """Returns the importer of each module that has one."""
    importers = defaultdict(set)
    for name, others in graph.items():
        for other in others:
            importers[other].add(name)
    found = {}
    for name, path in modules.items():
        exports = {one for one in importers[name] if name.startswith(f"{one}.") and _is_init(modules[one])}
        counted = importers[name] - exports or exports
        if len(counted) == 1 and not _is_init(path):
            (found[name],) = counted
    return found


def _is_init(path: Path) -> bool:
    return path.name == "__init__.py"


def lines_by_kind(text: str) -> Counter[str]:
    """Returns how many lines are code, signatures, docstrings, comments, imports and blank."""
    lines = text.splitlines()
    kinds = ["code" if line.strip() else "blank" for line in lines]
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#"):
            kinds[token.start[0] - 1] = "comment"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            kinds[node.lineno - 1 : node.end_lineno] = ["import"] * (node.end_lineno - node.lineno + 1)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            kinds[node.lineno - 1 : node.end_lineno] = ["docstring"] * (node.end_lineno - node.lineno + 1)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for i in range(node.lineno - 1, node.body[0].lineno - 1):
                kinds[i] = "signature" if kinds[i] == "code" else kinds[i]
    return Counter(kinds)


VOTE = """
import sys
import langchain_dpicl as d

HOME, files = d.__path__[0], set()
INNER = {"<genexpr>", "<listcomp>", "<lambda>", "<dictcomp>", "<setcomp>", "<module>"}

def note(frame, event, _):
    if event == "call" and frame.f_code.co_filename.startswith(HOME) and frame.f_code.co_name not in INNER:
        files.add(frame.f_code.co_filename)

def voter(epsilon=2.0):
    records = [{"text": f"my card was declined {i}", "queue": ("card", "transfer")[i % 2]} for i in range(60)]
    private = d.PrivateExamples(
        records, label_key="queue", labels=("card", "transfer"), public_size=60, dataset_id="house"
    )
    options = {"epsilon": epsilon, "max_queries": 5, "rows": d.Rows(units=6)}
    budget = d.Budget(epsilon=8.0, delta=1e-5)
    return d.DPVotingRunnable.from_private_examples(private, llm=d.EmbeddedLLM(), budget=budget, **options)

voter().invoke("why was my card declined?")  # loads what is loaded on first use
fresh = voter()
sys.setprofile(note)
fresh.invoke("why was my card declined?")
sys.setprofile(None)
print(*sorted(files), sep="\\n")
"""


def files_of_a_vote(*, with_build: bool = False) -> list[str]:
    """Returns the files that the first answer of a voter passes, with a ledger in memory; with those of its making."""
    # The price of the first voter is remembered: another epsilon is priced, and compared, anew.
    code = VOTE.replace("fresh = voter()\nsys.setprofile(note)", "sys.setprofile(note)\nfresh = voter(2.5)")
    assert code != VOTE
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code if with_build else VOTE],
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    return done.stdout.split()


def seconds(code: str, compiled: str) -> float:
    """Returns the processor time of code, the start of the interpreter not included."""
    timed = f"import time; start = time.process_time()\n{code}\nprint(time.process_time() - start)"
    return min(float(_child(timed, compiled).split()[-1]) for _ in range(TURNS))


def seconds_of_help(compiled: str) -> float:
    """Returns the processor time of `dpicl --help`, all of it."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts["dpicl"].partition(":")
    code = (
        "import atexit, sys, time; atexit.register(lambda: print(time.process_time()))\n"
        f"sys.argv = ['dpicl', '--help']\nfrom {module} import {function}\n{function}()"
    )
    return min(float(_child(code, compiled).split()[-1]) for _ in range(TURNS))


def _child(code: str, compiled: str) -> str:
    names = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    settings = {**names, "PYTHONPYCACHEPREFIX": compiled}
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, env=settings, cwd=ROOT
    )
    return done.stdout


def readme_import() -> str:
    """Returns the README's first import of the package."""
    found = re.search(r"^from langchain_dpicl import .*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert found, "README.md imports nothing of the package"
    return found.group()


def times() -> list[Figure]:
    with tempfile.TemporaryDirectory() as compiled:
        for code in (LANGCHAIN, NEEDED, readme_import(), VOTE):
            _child(code, compiled)  # compiles
        base, needed, ours = (seconds(code, compiled) for code in (LANGCHAIN, NEEDED, readme_import()))
        shown = seconds_of_help(compiled)
    told = f"{ours:.2f} s; {needed / base:.1f} times are LangChain's base classes and numpy"
    return [
        Figure("README's import, times that of langchain_core", ours / base, 8, told),
        Figure("dpicl --help, seconds", shown, 0.4, f"{shown / base:.1f} times langchain_core"),
    ]


def figures(modules: Mapping[str, Path], graph: Graph, contracts: Iterable[Mapping[str, Any]]) -> Iterator[Figure]:
    kinds: Counter[str] = sum((lines_by_kind(path.read_text()) for path in modules.values()), Counter())
    share = {kind: 100.0 * count / kinds.total() for kind, count in kinds.items()}
    yield Figure(
        "lines of code and signatures", kinds["code"] + kinds["signature"], 33_000, f"of {kinds.total():,} lines"
    )
    yield Figure("comments, % of lines", share["comment"], None, f"docstrings {share['docstring']:.0f} %")
    yield Figure("files", len(modules), 200)
    yield Figure("circles of imports", len(circles(graph)), 0)
    yield Figure("imports that go up", len(upward(graph, contracts)), 0)
    single = single_importers(graph, modules)
    exported = sum(_is_init(modules[one]) for one in single.values())
    yield Figure("files with one importer", len(single), 25, f"{exported} of them only exported by an __init__")
    known = set(CORE) <= set(graph)
    core = core_of(modules) if known else set()
    size = sum(modules[name].read_text().count("\n") for name in core)
    lost = "" if known else f"CORE names a module that is not there: {sorted(set(CORE) - set(graph))}"
    yield Figure("core of a vote, lines", size if known else None, 3_500, lost)
    yield Figure("core of a vote, files", len(core) if known else None, 20, lost)
    yield Figure("files that a voting answer passes", len(files_of_a_vote()), 25)
    yield from times()
    tests = sum(path.read_text().count("\n") for path in (ROOT / "tests").rglob("*.py"))
    yield Figure("lines of tests", tests, 85_000)


def listed(modules: Mapping[str, Path], graph: Graph, contracts: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    yield from (f"circle: {' '.join(group)}" for group in circles(graph))
    yield from (f"up: {name} imports {other}" for name, other in upward(graph, contracts))
    yield from (f"one importer: {name} <- {other}" for name, other in single_importers(graph, modules).items())
    for name in sorted(core_of(modules) if set(CORE) <= set(graph) else ()):
        yield f"core: {modules[name].relative_to(ROOT)}, {modules[name].read_text().count(chr(10))} lines"


def table(rows: Iterable[Figure]) -> Iterator[str]:
    for row in rows:
        found = (
            "unknown"
            if row.found is None
            else f"{row.found:,.0f}"
            if row.found == int(row.found)
            else f"{row.found:.2f}"
        )
        goal = "" if row.goal is None else f"<= {row.goal:,}"
        verdict = "" if row.goal is None else "MISSED" if row.is_missed else "PASS"
        yield f"{row.what:45} {found:>8}  {goal:>9}  {verdict:6}  {row.note}".rstrip()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measures how the package is built, beside the goals.")
    parser.add_argument("--strict", action="store_true", help="end with 1 if a goal is missed")
    parser.add_argument("--list", action="store_true", help="name what was counted, before the table")
    asked = parser.parse_args(arguments)
    modules = modules_of(PACKAGE)
    graph = graph_of(modules)
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    if asked.list:
        print(*listed(modules, graph, contracts), sep="\n")
    rows = list(figures(modules, graph, contracts))
    print(*table(rows), sep="\n")
    return int(asked.strict and any(row.is_missed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
