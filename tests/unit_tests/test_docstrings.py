"""What is public says what it takes and what it raises, and its examples run; `make docs` renders just that."""

from __future__ import annotations

import ast
import dataclasses
import doctest
import functools
import importlib
import inspect
import itertools
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import pydantic

import langchain_dpicl
from langchain_dpicl import exceptions
from tests.public_names import FACE as PACKAGE
from tests.public_names import SUBMODULES, load, promised

REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference"
OWN_ERRORS = {name: value for name, value in vars(exceptions).items() if inspect.isclass(value)}
CHECK = re.compile(r"_?(check|require)_?\w*$")
# Of classes that say this the constructor is not promised.
BUILT_BY = re.compile(r"Build it with `from_|Made by `")


class Public(NamedTuple):
    """Something that the reference shows: its name, itself, and the docstrings that may speak for it."""

    name: str
    what: Any
    docs: tuple[str, ...]


def documented() -> list[str]:
    """The names on the pages of the reference, as they are written there."""
    found: list[str] = []
    for page in sorted(REFERENCE.glob("*.md")):
        found += re.findall(r"^::: ([\w.]+)$", page.read_text(), re.MULTILINE)
    return found


@functools.cache
def resolved(dotted: str) -> Any:
    module, _, name = dotted.rpartition(".")
    return getattr(importlib.import_module(module), name)


def own(thing: Any) -> bool:
    return getattr(thing, "__module__", "").startswith(PACKAGE)


def function_of(member: Any) -> FunctionType | None:
    """The function behind a method, a class method or a static method; None for properties and values."""
    if isinstance(member, (classmethod, staticmethod)):
        member = member.__func__
    member = inspect.unwrap(member) if callable(member) else member
    return member if isinstance(member, FunctionType) else None


def docs_of_method(owner: type, name: str) -> tuple[str, ...] | None:
    """The docstrings that speak for a method; None where LangChain or Python has one.

    Beside its own these are those of the methods that it overrides, of its twin without the `a`, of a Protocol that its
    class keeps, and of what they name in back quotes: "takes what `run` takes".
    """
    for base in owner.__mro__:
        if name in vars(base) and not base.__module__.startswith(PACKAGE):
            return None
    names = {name, name.removeprefix("a")}
    public = promised()
    docs = [doc for place in (*owner.__mro__, *protocols_of(owner)) for twin in names for doc in own_doc(place, twin)]
    for room, word in sorted({pair for doc in docs for pair in re.findall(r"`(?:(\w+)\.)?(\w+)`", doc)}):
        elsewhere = load(public[room], room) if room in public else owner
        docs += [doc for place in elsewhere.__mro__ for doc in own_doc(place, word)]
    return tuple(docs)


def own_doc(owner: type, name: str) -> list[str]:
    function = function_of(vars(owner).get(name))
    return [function.__doc__ or ""] if function else []


@functools.cache
def protocols() -> list[type]:
    rooms = [
        importlib.import_module(f"{PACKAGE}.{name}")
        for name in ("backends.base", "privacy.ledger.store", "privacy.extensions.ledger_anchor")
    ]
    return [
        item for room in rooms for item in vars(room).values() if getattr(item, "_is_protocol", False) and own(item)
    ]


@functools.cache
def protocols_of(owner: type) -> list[type]:
    """The package's Protocols whose every method the class has."""
    asked = {kind: {name for base in kind.__mro__ if own(base) for name in vars(base)} for kind in protocols()}
    return [kind for kind, names in asked.items() if all(hasattr(owner, name) for name in names if name[0] != "_")]


def methods(dotted: str, owner: type) -> Iterator[Public]:
    seen = set()
    for base in owner.__mro__:
        for name, member in vars(base).items() if own(base) else ():
            function = function_of(member)
            if name.startswith("_") or name in seen or function is None or not own(function):
                continue
            seen.add(name)
            docs = docs_of_method(owner, name)
            if docs is not None:
                yield Public(f"{dotted}.{name}", function, docs)


@functools.cache
def everything() -> list[Public]:
    found = []
    for dotted in documented():
        thing = resolved(dotted)
        if not callable(thing):
            continue  # a value; its text stands underneath it
        doc = thing.__doc__ or ""
        found.append(Public(dotted, thing, (doc, thing.__init__.__doc__ or "") if inspect.isclass(thing) else (doc,)))
        if inspect.isclass(thing):
            found += methods(dotted, thing)
    return found


def section(doc: str, *titles: str) -> str:
    """The text under the given headings of a Google docstring."""
    text = inspect.cleandoc(doc)
    bodies = [re.search(rf"^{title}:\n((?:(?:[ ]+.*)?\n)*(?:[ ]+.*)?)", text, re.MULTILINE) for title in titles]
    return "\n".join(textwrap.dedent(body.group(1)) for body in bodies if body)


def entries(doc: str, *titles: str) -> set[str]:
    """The names that a section lists; `a, b: text` lists two."""
    heads = re.findall(r"^([*\w][*\w, .]*?)(?: \([^)]*\))?:(?:\s|$)", section(doc, *titles), re.MULTILINE)
    return {name.strip(" *") for head in heads for name in head.split(",")}


@functools.cache
def classes_in(module: str) -> dict[str, ast.ClassDef]:
    """The classes of a module, which is parsed once; `inspect` parses all of it for each class."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def told_fields(thing: type) -> set[str]:
    """The fields of a class that have a text of their own underneath."""
    found = set()
    for base in thing.__mro__:
        if own(base) and base.__module__ != "builtins" and vars(base).get("__annotations__"):
            for field, below in itertools.pairwise(classes_in(base.__module__)[base.__name__].body):
                if (
                    isinstance(field, ast.AnnAssign)
                    and isinstance(below, ast.Expr)
                    and isinstance(below.value, ast.Constant)
                ):
                    found.add(ast.unparse(field.target))
    return found


def parameters(thing: Any) -> set[str]:
    """What a caller may hand in by name; keyword dictionaries and LangChain's own fields are described elsewhere."""
    if inspect.isclass(thing) and BUILT_BY.search(thing.__doc__ or ""):
        return set()
    if inspect.isclass(thing) and issubclass(thing, pydantic.BaseModel):
        mine = {name for base in thing.__mro__ if own(base) for name in vars(base).get("__annotations__", {})}
        return {name for name in thing.model_fields if name in mine and not name.startswith("_")}
    if dataclasses.is_dataclass(thing):
        return {field.name for field in dataclasses.fields(thing) if field.init and not field.name.startswith("_")}
    if inspect.isclass(thing) and (thing.__init__ is object.__init__ or not own(thing.__init__)):
        return set()
    taken = inspect.signature(thing.__init__ if inspect.isclass(thing) else thing).parameters.values()
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {
        item.name
        for item in taken
        if item.kind not in kinds and item.name not in {"self", "cls"} and item.name[0] != "_"
    }


@functools.cache
def raised(function: FunctionType) -> frozenset[str]:
    """The package's own errors that the body of a function raises by name, nested functions left out.

    So do the checks of arguments that it calls (`check_epsilon`), and `raise fail(...)` raises what `fail` returns.
    """
    if function.__code__.co_filename.startswith("<"):  # made by dataclasses
        return frozenset()
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    found, open_nodes = set(), list(tree.body[0].body)  # type: ignore[attr-defined]
    while open_nodes:
        node = open_nodes.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            continue
        if isinstance(node, ast.Try) and node.handlers:  # what is raised in it may be caught
            open_nodes += [*node.handlers, *node.orelse, *node.finalbody]
            continue
        if isinstance(node, ast.Raise) and node.exc is not None:
            by = ast.unparse(node.exc.func if isinstance(node.exc, ast.Call) else node.exc).rpartition(".")[2]
            maker = function.__globals__.get(by)
            found.add(maker.__annotations__.get("return", by) if isinstance(maker, FunctionType) else by)
        if isinstance(node, ast.Call) and CHECK.match(name := ast.unparse(node.func)):
            check = function.__globals__.get(name)
            found |= raised(check) if isinstance(check, FunctionType) and own(check) else set()
        open_nodes += ast.iter_child_nodes(node)
    return frozenset(found & set(OWN_ERRORS))


def errors_of(item: Public) -> set[str]:
    if not inspect.isclass(item.what):
        return raised(item.what)
    doors = [vars(item.what).get(name) for name in ("__init__", "__post_init__", "__new__")]
    return {name for door in doors if isinstance(door, FunctionType) and own(door) for name in raised(door)}


def covered(error: str, told: set[str]) -> bool:
    """Whether an error, or one that it is a kind of, is documented."""
    return any(base.__name__ in told for base in OWN_ERRORS[error].__mro__)


def untold_parameters() -> list[str]:
    found = []
    for item in everything():
        told = set().union(*(entries(doc, "Args", "Attributes") for doc in item.docs))
        if inspect.isclass(item.what):
            told |= told_fields(item.what)
            told |= set().union(*(entries(base.__doc__ or "", "Attributes") for base in item.what.__mro__))
            if issubclass(item.what, Exception):
                continue
        found += [f"{item.name}: {name}" for name in sorted(parameters(item.what) - told)]
    return found


def untold_errors() -> list[str]:
    found = []
    for item in everything():
        told = set().union(*(entries(doc, "Raises") for doc in item.docs))
        found += [f"{item.name}: {error}" for error in sorted(errors_of(item)) if not covered(error, told)]
    return found


def test_everything_public_has_a_docstring() -> None:
    assert len(everything()) > 150
    assert [item.name for item in everything() if not any(doc.strip() for doc in item.docs)] == []


def test_every_parameter_is_described() -> None:
    assert untold_parameters() == []


def test_every_own_error_that_is_raised_is_told() -> None:
    assert untold_errors() == []


def test_the_reference_shows_every_promised_name_once_and_where_it_is_imported_from() -> None:
    shown = documented()
    assert sorted(set(shown)) == sorted(shown)
    public = {f"{module}.{name}" for name, module in promised().items()}
    assert public == {dotted for dotted in shown if dotted.rpartition(".")[0] in (PACKAGE, *SUBMODULES)}


WITH_EXAMPLES = sorted(
    path for path in Path(langchain_dpicl.__file__).parent.rglob("*.py") if ">>> " in path.read_text()
)


def test_examples_give_what_they_say() -> None:
    failed, tried = [], 0
    for path in WITH_EXAMPLES:
        dotted = ".".join([PACKAGE, *path.relative_to(Path(langchain_dpicl.__file__).parent).with_suffix("").parts])
        told: list[str] = []
        module = importlib.import_module(dotted.removesuffix(".__init__"))
        for example in doctest.DocTestFinder().find(module):
            found = doctest.DocTestRunner().run(example, out=told.append, clear_globs=True)
            tried += found.attempted
        failed += told
    assert failed == []
    assert tried > 100
