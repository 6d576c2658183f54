"""A changed text takes the place of functions that are imported already; where it cannot, it says so."""

from __future__ import annotations

import gc
import importlib.util
import sys
from pathlib import Path

import pytest

from tests.mutation.exchanging import Live

pytestmark = pytest.mark.planted  # of the tools of make mutation, which look through all objects of a process

TEXT = """
import contextlib, functools

LIMIT = 3

def plain(x):
    return x + 1

def outer():
    def inner(x):
        return x * 2
    return inner

kept = outer()

@functools.lru_cache
def cached(x, more=4):
    return x - 1

@contextlib.contextmanager
def opened():
    yield 5

class Thing:
    size = 6

    @property
    def value(self):
        return 7

    @classmethod
    def made(cls):
        return cls.size
"""


@pytest.fixture
def module(tmp_path: Path):
    path = tmp_path / "exchanged.py"
    path.write_text(TEXT)
    spec = importlib.util.spec_from_file_location("exchanged", path)
    made = importlib.util.module_from_spec(spec)
    sys.modules["exchanged"] = made
    spec.loader.exec_module(made)
    yield made
    del sys.modules["exchanged"]


def exchange(module, old: str, new: str) -> bool:
    """Changes a text; returns whether an exchange was enough."""
    assert TEXT.count(old) == 1
    path = Path(module.__file__)
    live = Live(path.parent)
    gc.unfreeze()
    found = live.plan(path, TEXT, TEXT.replace(old, new))
    for function, code in found or ():
        function.__code__ = code
    return found is not None


@pytest.mark.parametrize(
    ("old", "new", "value", "wanted"),
    [
        ("x + 1", "x + 9", lambda module: module.plain(1), 10),
        ("x * 2", "x * 9", lambda module: module.outer()(1), 9),
        ("x * 2", "x * 9", lambda module: module.kept(1), 9),
        ("x - 1", "x - 9", lambda module: module.cached(1), -8),
        ("yield 5", "yield 9", lambda module: module.opened().__enter__(), 9),
        ("return 7", "return 9", lambda module: module.Thing().value, 9),
        ("return cls.size", "return 9", lambda module: module.Thing.made(), 9),
        (
            "def plain(x):\n",
            "def plain(x):\n    x += 1\n",
            lambda module: (module.plain(1), module.Thing().value),
            (3, 7),
        ),
    ],
    ids=["function", "inner", "inner of a call before", "cached", "context", "property", "class", "another line"],
)
def test_the_changed_function_runs_wherever_it_is_held(module, old, new, value, wanted):
    assert exchange(module, old, new)
    assert value(module) == wanted


@pytest.mark.parametrize("old", ["LIMIT = 3", "size = 6", "more=4"])
def test_what_runs_at_import_asks_for_a_new_import(module, old):
    assert not exchange(module, old, old[:-1] + "9")
