"""LangChain's callbacks, wherever they are hung."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from langchain_core.callbacks import AsyncCallbackHandler, BaseCallbackHandler, get_usage_metadata_callback
from langchain_core.tracers import context as tracer_context
from langchain_core.tracers.context import collect_runs, register_configure_hook

from tests.canary import RECORD, VOTE, run_text
from tests.leaks.channels.registry import channel
from tests.leaks.models import PRIVATE_TOKENS, LeakyChat, both
from tests.leaks.scene import Scene


class Quiet(BaseCallbackHandler):
    """Writes down every event it is sent."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def _note(self, *args: Any, **kwargs: Any) -> None:
        self.lines.append(f"{args} {kwargs}")

    on_llm_start = on_chat_model_start = on_llm_new_token = on_llm_end = on_llm_error = _note
    on_chain_error = on_custom_event = on_text = on_retry = _note


class Everything(Quiet):
    """Writes down chains as well."""

    def on_chain_start(self, *args: object, **kwargs: object) -> None:
        self._note(*args, **kwargs)

    def on_chain_end(self, *args: object, **kwargs: object) -> None:
        self._note(*args, **kwargs)


class QuietAsync(AsyncCallbackHandler):
    """Is `Quiet`, awaited."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    async def _note(self, *args: Any, **kwargs: Any) -> None:
        self.lines.append(f"{args} {kwargs}")

    on_llm_start = on_chat_model_start = on_llm_new_token = on_llm_end = on_llm_error = _note
    on_chain_error = on_custom_event = on_text = on_retry = _note


class Tokens(BaseCallbackHandler):
    """Collects streamed tokens."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def on_llm_new_token(self, token: str, **kwargs: Any) -> None:
        self.lines.append(f"{token} {kwargs}")


@channel("callbacks in the chain's config (inherited)")
def inherited(scene: Scene) -> Iterator[None]:
    handler = Quiet()
    scene.chain_config = {"callbacks": [handler]}
    yield
    scene.saw(*handler.lines)


@channel("callbacks in the component's config")
def handed_on(scene: Scene) -> Iterator[None]:
    handler = Quiet()
    scene.given_config, scene.own_config = {"callbacks": [handler]}, "given"
    yield
    scene.saw(*handler.lines)


@channel("async callback handler")
def awaited(scene: Scene) -> Iterator[None]:
    handler = QuietAsync()
    scene.chain_config = {"callbacks": [handler]}
    yield
    scene.saw(*handler.lines)


@channel("model's own callbacks")
def own(scene: Scene) -> Iterator[None]:
    handler = Quiet()
    scene.models = both(callbacks=[handler])
    yield
    scene.saw(*handler.lines)


@channel("callbacks bound by with_config")
def bound(scene: Scene) -> Iterator[None]:
    handler = Quiet()
    scene.wrap = lambda model: model.with_config(callbacks=[handler])
    yield
    scene.saw(*handler.lines)


@channel("bind() with callbacks=[] (the bind trap)")
def bind_trap(scene: Scene) -> Iterator[None]:
    handler = Quiet()
    scene.chain_config, scene.own_config = {"callbacks": [handler]}, {"callbacks": []}
    scene.wrap = lambda model: model.bind(user="somebody")
    yield
    scene.saw(*handler.lines)


@channel("with_listeners on the model")
def listeners(scene: Scene) -> Iterator[None]:
    runs: list[Any] = []
    scene.wrap = lambda model: model.with_listeners(on_start=runs.append, on_end=runs.append)
    yield
    scene.saw(*map(run_text, runs))


@contextlib.contextmanager
def hook(*args: Any) -> Iterator[None]:
    """Registers a configure hook and takes it back: LangChain never drops them."""
    register_configure_hook(*args)
    ours = tracer_context._configure_hooks[-1]
    try:
        yield
    finally:
        tracer_context._configure_hooks.remove(ours)


@channel("configure hook (context variable)")
def configure_hook(scene: Scene) -> Iterator[None]:
    handler = Quiet()
    variable: ContextVar[Any] = ContextVar("watching", default=None)
    with hook(variable, True):
        token = variable.set(handler)
        yield
        variable.reset(token)
    scene.saw(*handler.lines)


@channel("configure hook (environment variable)")
def configure_hook_by_environment(scene: Scene) -> Iterator[None]:
    lines: list[str] = []

    class Made(Quiet):
        def __init__(self) -> None:
            self.lines = lines

    with hook(ContextVar("never_set", default=None), True, Made, "WATCH_EVERYTHING"):
        os.environ["WATCH_EVERYTHING"] = "true"
        try:
            yield
        finally:
            del os.environ["WATCH_EVERYTHING"]
    scene.saw(*lines)


@channel("run collector (collect_runs)")
def run_collector(scene: Scene) -> Iterator[None]:
    with collect_runs() as runs:
        yield
    scene.saw(*map(run_text, runs.traced_runs))


@channel("usage callback")
def usage(scene: Scene) -> Iterator[None]:
    """The counters of private prompts and answers are canaries themselves."""
    with get_usage_metadata_callback() as counted:
        registered = tracer_context._configure_hooks[-1]
        yield
    tracer_context._configure_hooks.remove(registered)
    for used in counted.usage_metadata.values():
        scene.saw(RECORD if used["input_tokens"] >= PRIVATE_TOKENS else "")
        scene.saw(VOTE if used["output_tokens"] >= PRIVATE_TOKENS else "")


@channel("streamed tokens (on_llm_new_token)", needs="V")
def new_tokens(scene: Scene) -> Iterator[None]:
    handler = Tokens()
    scene.chain_config = {"callbacks": [handler]}
    scene.models = {"chat": lambda: LeakyChat(streaming=True)}
    yield
    scene.saw(*handler.lines)
