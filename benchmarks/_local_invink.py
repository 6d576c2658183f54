"""The package `invink` 0.1.0 (InvisibleInk, from PyPI) on the same model, batch and clock; it is run, not copied.

On Python before 3.12 one of its f-strings is no Python, for the quotes within its braces: they are replaced in memory
while it is imported, and nothing on disk is touched. What it does before it writes (reading the model, solving for its
clip) is done once, outside the clock.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.machinery
import importlib.util
import io
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from _local_model import Size, make_tokenizer, save, words
from _local_runs import Place, Ready

INSTALL = 'pip install --no-deps "invink==0.1.0" pandas'
_SETUP = ("get_clip", "get_epsilon")
"""Public numbers of its set-up, that it would solve for anew in every call."""


def missing() -> str:
    """Returns what keeps it from running here, or ""."""
    names = [name for name in ("invink", "pandas", "scipy") if importlib.util.find_spec(name) is None]
    return f"not installed: {', '.join(names)} ({INSTALL})" if names else ""


def mended(source: str, *, parses: Callable[[str], Any] = ast.parse) -> str:
    """Returns a source text whose f-strings this Python can read: double quotes within their braces become single.

    Args:
      source: of a module.
      parses: raises SyntaxError where it is no Python.

    Raises:
      SyntaxError: something else is wrong with it.
    """
    lines = source.split("\n")
    for _ in lines:
        try:
            parses("\n".join(lines))
        except SyntaxError as error:
            place = (error.lineno or 0) - 1
            text = re.sub(r"\{[^{}]*\}", lambda found: found[0].replace('"', "'"), lines[place])
            if text == lines[place]:
                raise
            lines[place] = text
        else:
            break
    return "\n".join(lines)


class _Mending(importlib.machinery.SourceFileLoader):
    """Loads a module from its mended source; keeps no bytecode of it."""

    def get_code(self, fullname: str) -> Any:
        path = self.get_filename(fullname)
        return compile(mended(Path(path).read_text(encoding="utf-8")), path, "exec", dont_inherit=True)


def load() -> ModuleType:
    """Returns the package's module of generation, imported as this Python needs it."""
    if sys.version_info >= (3, 12):
        return importlib.import_module("invink.generate")
    for name in ("invink", "invink.utils", "invink.generate"):
        if name not in sys.modules:
            _import_mended(name)
    return sys.modules["invink.generate"]


def _import_mended(name: str) -> None:
    found = importlib.util.find_spec(name) if "." not in name else _inner(name)
    if found is None or found.origin is None:
        raise ModuleNotFoundError(INSTALL)
    loader = _Mending(name, found.origin)
    spec = importlib.util.spec_from_file_location(
        name, found.origin, loader=loader, submodule_search_locations=found.submodule_search_locations
    )
    if spec is None:
        raise ModuleNotFoundError(INSTALL)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if name != "invink":  # the package itself only imports its function
        loader.exec_module(module)


def _inner(name: str) -> importlib.machinery.ModuleSpec | None:
    package, _, _ = name.partition(".")
    return importlib.machinery.PathFinder.find_spec(name, list(sys.modules[package].__path__))


def runner(place: Place, folder: Path) -> Ready:
    """Returns what writes one text of the place's size with it, on the place's own model.

    Args:
      place: model and size.
      folder: an empty one; holds the model, whose path it wants.
    """
    module = load()
    size = place.size
    tokenizer = make_tokenizer(size)
    save(place.model, tokenizer, folder)
    # The names that its function looks up: the model is read already, and its numbers are solved for once.
    vars(module).update(load_hf_model=lambda **_: place.model, load_hf_tokenizer=lambda **_: tokenizer)
    vars(module).update({name: functools.cache(vars(module)[name]) for name in _SETUP})
    private, public, texts = prompts(size)

    def job() -> int:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            made = module.generate(
                texts,
                str(folder),
                dataset_desc="w0",
                system_prompt="w1",
                pub_prompt=public,
                prv_prompt=private,
                epsilon=10.0,
                batch_size=size.rows,
                num=1,
                max_toks=size.tokens,
                topk=100,
                dtype="float32",
                device_map=-1 if place.device == "cpu" else 0,
                allow_download=False,
                trust_remote_code=False,
            )
        place.wait()
        return int(made.lens[0])

    return lambda: job


def prompts(size: Size) -> tuple[str, str, list[str]]:
    """Returns its wording with a private text, the one without, and the texts: all prompts have the size's length."""
    length = size.prompt - 2  # what is said by the system, and the description
    texts = [words(length, seed=row, vocabulary=size.vocabulary) for row in range(size.slots)]
    return "{} {}", "{} " + words(length, seed=size.slots, vocabulary=size.vocabulary), texts
