"""Global switches: debug and verbose output, caches, logging, warnings."""

from __future__ import annotations

import contextlib
import io
import sqlite3
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from langchain_core.caches import BaseCache, InMemoryCache
from langchain_core.callbacks import StdOutCallbackHandler
from langchain_core.globals import get_debug, get_llm_cache, get_verbose, set_debug, set_llm_cache, set_verbose
from langchain_core.load import dumps
from langchain_core.outputs import Generation

from tests.canary import Recorder, logging_to
from tests.leaks.channels.registry import channel
from tests.leaks.models import LeakyLLM, LoggingChat, StillChat, WarningChat, both
from tests.leaks.scene import Scene


@contextlib.contextmanager
def debugging() -> Iterator[io.StringIO]:
    """Debug mode, and what is printed meanwhile."""
    printed, before = io.StringIO(), get_debug()
    set_debug(True)
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            yield printed
    finally:
        set_debug(before)


@channel("set_debug output")
def debug(scene: Scene) -> Iterator[None]:
    with debugging() as printed:
        yield
    scene.saw(printed.getvalue())


@contextlib.contextmanager
def verbose_handler() -> Iterator[list[str]]:
    """What the handler of verbose mode is sent; LangChain's own prints only part of it."""
    lines: list[str] = []

    def note(handler: Any, *args: Any, **kwargs: Any) -> None:
        lines.append(f"{args} {kwargs}")

    names = ("on_chat_model_start", "on_llm_start", "on_llm_end", "on_llm_error")
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(patch.object(StdOutCallbackHandler, name, note))
        yield lines


@channel("set_verbose (what its handler is sent)")
def verbose(scene: Scene) -> Iterator[None]:
    before = get_verbose()
    set_verbose(True)
    try:
        with verbose_handler() as lines:
            yield
    finally:
        set_verbose(before)
    scene.saw(*lines)


@channel("model with verbose=True (the same)")
def verbose_model(scene: Scene) -> Iterator[None]:
    scene.models = both(verbose=True)
    with verbose_handler() as lines:
        yield
    scene.saw(*lines)


class FileCache(BaseCache):
    """Keeps prompts and answers in a SQLite file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with contextlib.closing(sqlite3.connect(path)) as file, file:
            file.execute("CREATE TABLE cache (prompt TEXT, model TEXT, answer TEXT)")

    def lookup(self, prompt: str, llm_string: str) -> Sequence[Generation] | None:
        return None

    def update(self, prompt: str, llm_string: str, return_val: Sequence[Generation]) -> None:
        with contextlib.closing(sqlite3.connect(self.path)) as file, file:
            row = (prompt, llm_string, "".join(map(dumps, return_val)))
            file.execute("INSERT INTO cache VALUES (?, ?, ?)", row)

    def clear(self, **kwargs: Any) -> None:
        self.path.unlink()


@contextlib.contextmanager
def global_cache(cache: BaseCache) -> Iterator[None]:
    """Makes it the cache of every model that has none of its own."""
    before = get_llm_cache()
    set_llm_cache(cache)
    try:
        yield
    finally:
        set_llm_cache(before)


@channel("global cache in memory")
def memory_cache(scene: Scene) -> Iterator[None]:
    cache = InMemoryCache()
    scene.models = {
        "chat": StillChat,
        "completion": LeakyLLM,
    }  # LangChain's stream() asks no cache, unless the model cannot stream
    with global_cache(cache):
        yield
    scene.saw(cache._cache)


@channel("global cache on disk (file bytes)")
def disk_cache(scene: Scene) -> Iterator[None]:
    scene.models = {"chat": StillChat, "completion": LeakyLLM}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "cache.db")
        with global_cache(FileCache(path)):
            yield
        scene.saw(*(file.read_bytes().decode("latin-1") for file in sorted(Path(folder).iterdir())))


@channel("model's own cache")
def model_cache(scene: Scene) -> Iterator[None]:
    cache = InMemoryCache()
    scene.models = {"chat": lambda: StillChat(cache=cache), "completion": lambda: LeakyLLM(cache=cache)}
    yield
    scene.saw(cache._cache)


@channel("log: LangChain on a handler that fails")
def log_of_failing_handler(scene: Scene) -> Iterator[None]:
    scene.chain_config = {"callbacks": [Recorder()]}
    lines = io.StringIO()
    with logging_to(lines):
        yield
    scene.saw(lines.getvalue())


@channel("log: the model's client at DEBUG")
def log_of_client(scene: Scene) -> Iterator[None]:
    scene.models = {"chat": LoggingChat}
    lines = io.StringIO()
    with logging_to(lines):
        yield
    scene.saw(lines.getvalue())


@channel("warnings of the model")
def warned(scene: Scene) -> Iterator[None]:
    scene.models = {"chat": WarningChat}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    scene.saw(*(str(warning.message) for warning in caught))
