"""Fixtures of the command line's tests."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence

import pytest

from langchain_dpicl.cli import main
from tests.other_shells import other_shells

__all__ = ["other_shells"]

_make = main._parser
_typed: list[str] = []
_made = functools.cache(lambda *printers: _make(_typed))


def parser_of(typed: Sequence[str]) -> argparse.ArgumentParser:
    _typed[:] = typed
    return _made(main._say, main._complain, main._confirm)  # which commands are given, also where a test has its own


@pytest.fixture(autouse=True)
def one_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the parser of all commands once: most commands take less time, and it keeps nothing but the words typed."""
    monkeypatch.setattr(main, "_parser", parser_of)
