"""Loads the programs of `examples/` for tests, as they are or with the one line changed that names the model."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
LINE = re.compile(r"^( *)# With a provider: (?P<code>.*(\n *# and: .*)?)\n.*$", re.MULTILINE)
"""The comment of one or two lines, and the line below it, in whose place its code goes."""


def with_provider(source: str) -> str:
    """Does what a file's comment says: one line is changed."""
    changed, count = LINE.subn(lambda found: f"{found[1]}#\n{found[1]}{found['code'].replace('# and: ', '')}", source)
    assert count == 1, f"expected one line to change, found {count}"
    return changed


@contextlib.contextmanager
def example(name: str, *, provider: bool = False, **constants: Any) -> Iterator[ModuleType]:
    """Runs a program up to its `main`; `constants` replace its own, to make it small."""
    path = EXAMPLES / f"{name}.py"
    source = with_provider(path.read_text()) if provider else path.read_text()
    module = ModuleType(f"example_{name}")
    module.__file__ = str(path)
    known = {key: sys.modules.pop(key, None) for key in ("bank_questions", module.__name__)}
    sys.path.insert(0, str(EXAMPLES))
    sys.modules[module.__name__] = module
    try:
        exec(compile(source, str(path), "exec"), module.__dict__)  # noqa: S102  our own file
        for key, value in constants.items():
            assert hasattr(module, key), f"{name}.py has no {key}"
            setattr(module, key, value)
        yield module
    finally:
        sys.path.remove(str(EXAMPLES))
        for key, value in known.items():
            sys.modules.pop(key, None)
            if value is not None:
                sys.modules[key] = value
