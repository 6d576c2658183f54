"""The canary test's net: runs an action under every observer LangChain has and returns what each one saw.

Put `RECORD` into private prompts and `VOTE` into private answers; `leaks(seen)` names the channels where they show.
Only for tests marked `loopback`: the LangSmith tracer posts to a sink on this machine. `tests/leaks` goes through the
same channels, and many more, one by one.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import logging
import os
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import langsmith
import langsmith.run_trees
import langsmith.utils
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler, get_usage_metadata_callback
from langchain_core.globals import get_debug, get_llm_cache, get_verbose, set_debug, set_llm_cache, set_verbose
from langchain_core.runnables import RunnableLambda
from langchain_core.tracers.context import collect_runs
from langchain_core.tracers.langchain import wait_for_all_tracers

RECORD = "zx-record-canary-91"
"""Stands in every private prompt."""

VOTE = "zx-vote-canary-37"
"""Stands in every private answer."""

CHANNELS = (
    "config callbacks",
    "model callbacks",
    "run collector",
    "usage callback",
    "astream_events",
    "debug output",
    "global cache",
    "logs",
    "LangSmith",
)
"""Every observer of a call that succeeds."""


@dataclass
class Seen:
    """What each channel saw, as text; `error` is what the action raised."""

    texts: dict[str, str] = field(default_factory=dict)
    error: BaseException | None = None
    result: Any = None


class Recorder(BaseCallbackHandler):
    """Writes down every event it is sent, then fails, so that LangChain logs what failed."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def _note(self, *args: Any, **kwargs: Any) -> None:
        self.lines.append(f"{args} {kwargs}")
        raise ValueError(f"observer failed on {args}")

    on_llm_start = on_chat_model_start = on_llm_new_token = on_llm_end = on_llm_error = _note
    on_chain_error = on_custom_event = on_text = on_retry = _note


def leaks(seen: Seen) -> set[str]:
    """Returns the channels on which a canary, or the token usage of a private call, shows."""
    found = {name for name, text in seen.texts.items() if canaries_in(text)}
    if "input_tokens" in seen.texts.get("usage callback", ""):
        found.add("usage callback")
    if seen.error is not None and canaries_in(describe(seen.error)):
        found.add("exception")
    return found


def canaries_in(text: str) -> list[str]:
    """Returns the canaries that show in `text`: whole, cut short, or as numbers, hexadecimal digits or base64."""
    return [canary for canary in (RECORD, VOTE) if any(spelling in text for spelling in _SPELLINGS[canary])]


def _spellings(canary: str) -> tuple[str, ...]:
    """Libraries cut long texts in the middle; tokens are also kept as bytes; bodies may be encoded."""
    raw = canary.encode()
    # Of a text in base64, what its neighbours do not touch looks the same at each of the three offsets.
    encoded = [base64.b64encode(b"x" * offset + raw).decode()[4:-4] for offset in range(3)]
    return (canary[:9], canary[-9:], str(list(raw[:9]))[1:-1], ",".join(map(str, raw[:9])), raw.hex(), *encoded)


_SPELLINGS = {canary: _spellings(canary) for canary in (RECORD, VOTE)}


OURS = f"{os.sep}langchain_dpicl{os.sep}"
"""Part of the path of every file of ours."""


def describe(error: BaseException | None) -> str:
    """Writes out an exception: text, arguments, attributes, causes, contexts, and the locals of our own frames."""
    return "\n".join([said_by(error), locals_in(error)])


def said_by(error: BaseException | None) -> str:
    """Writes out the text, arguments and attributes of an exception, its causes and its contexts."""
    return "\n".join(f"{one!r} {one} {one.args!r} {vars(one)!r}" for one in _linked(error))


def locals_in(error: BaseException | None, *, frames_of: str = OURS) -> str:
    """Writes out the locals of the frames an exception, its causes and contexts came through.

    Of files with `frames_of` in their path.
    """
    lines: list[str] = []
    for one in _linked(error):
        for frame, _ in traceback.walk_tb(one.__traceback__):
            if frames_of in frame.f_code.co_filename:
                lines += [f"{value!r} {getattr(value, '__dict__', '')!r}" for value in frame.f_locals.values()]
    return "\n".join(lines)


def _linked(error: BaseException | None) -> list[BaseException]:
    """The exception and all it is linked to."""
    found: dict[int, BaseException] = {}
    todo = [error]
    while todo:
        current = todo.pop()
        if current is not None and id(current) not in found:
            found[id(current)] = current
            todo += [current.__cause__, current.__context__, *getattr(current, "exceptions", ())]
    return list(found.values())


def observe(action: Callable[[], Any], *, model_recorder: Recorder | None = None) -> Seen:
    """Runs `action` inside a chain, under every observer, and reports what they saw."""
    seen, recorder = Seen(), Recorder()

    def run(_: Any) -> None:
        seen.result = action()

    with _observers(seen), collect_runs() as runs, get_usage_metadata_callback() as usage:
        try:
            RunnableLambda(run).invoke(None, {"callbacks": [recorder]})
        except Exception as error:
            seen.error = error
    _report(seen, recorder, model_recorder, runs, usage)
    return seen


async def aobserve(action: Callable[[], Awaitable[Any]], *, model_recorder: Recorder | None = None) -> Seen:
    """Is `observe` for a coroutine function; the chain's events are read as well."""
    seen, recorder = Seen(), Recorder()
    events: list[Any] = []

    async def run(_: Any) -> None:
        seen.result = await action()

    with _observers(seen), collect_runs() as runs, get_usage_metadata_callback() as usage:
        stream = RunnableLambda(run).astream_events(None, {"callbacks": [recorder]}, version="v2")
        try:
            async for event in stream:
                events.append(event)  # noqa: PERF401  what came before an error counts
        except Exception as error:
            seen.error = error
        await asyncio.sleep(0)
    seen.texts["astream_events"] = repr(events)
    _report(seen, recorder, model_recorder, runs, usage)
    return seen


def _report(seen: Seen, recorder: Recorder, model_recorder: Recorder | None, runs: Any, usage: Any) -> None:
    seen.texts["config callbacks"] = "\n".join(recorder.lines)
    seen.texts["model callbacks"] = "\n".join(model_recorder.lines) if model_recorder else ""
    seen.texts["run collector"] = "\n".join(map(run_text, runs.traced_runs))
    seen.texts["usage callback"] = repr(usage.usage_metadata)


def run_text(run: Any) -> str:
    """Writes out a traced run and everything below it."""
    own = f"{run.inputs} {run.outputs} {run.error} {run.serialized} {run.extra} {run.events}"
    return "\n".join([own, *map(run_text, run.child_runs)])


@contextlib.contextmanager
def _observers(seen: Seen) -> Iterator[None]:
    """Debug and verbose output, the global cache, all logging, and LangSmith switched on by the environment."""
    logs, out, cache = io.StringIO(), io.StringIO(), InMemoryCache()
    before = get_debug(), get_verbose(), get_llm_cache()
    with logging_to(logs), langsmith_on() as bodies:
        set_debug(True)
        set_verbose(True)
        set_llm_cache(cache)
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
                yield
        finally:
            set_debug(before[0])
            set_verbose(before[1])
            set_llm_cache(before[2])
            wait_for_all_tracers()
    seen.texts |= {"logs": logs.getvalue(), "debug output": out.getvalue(), "global cache": repr(cache._cache)}
    seen.texts["LangSmith"] = "\n".join(bodies)


@contextlib.contextmanager
def logging_to(stream: io.StringIO) -> Iterator[None]:
    """Writes every log record of every logger, from DEBUG on, into `stream`."""
    root, handler = logging.getLogger(), logging.StreamHandler(stream)
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(level)


class _Sink(BaseHTTPRequestHandler):
    """LangSmith's ingest door, as far as its client needs it."""

    bodies: list[str]

    def do_GET(self) -> None:
        self._answer(b'{"version": "0.10", "batch_ingest_config": {"use_multipart_endpoint": false}}')

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.bodies.append(body.decode("utf-8", "replace"))
        self._answer(b"{}")

    do_PATCH = do_POST  # noqa: N815

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@contextlib.contextmanager
def langsmith_sink() -> Iterator[tuple[langsmith.Client, list[str]]]:
    """A real LangSmith client that posts to a sink of ours, and the bodies that arrive there."""
    bodies: list[str] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Sink", (_Sink,), {"bodies": bodies}))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    try:
        # One request per run, sent at once: nothing is left in a queue when the bodies are read.
        yield langsmith.Client(address, api_key="none", auto_batch_tracing=False, info={}), bodies
    finally:
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def langsmith_on() -> Iterator[list[str]]:
    """The real tracer, switched on by environment variables, posting to a sink of ours."""
    with langsmith_sink() as (ours, bodies):
        environment = {"LANGSMITH_TRACING": "true", "LANGSMITH_ENDPOINT": ours.api_url, "LANGSMITH_API_KEY": "none"}
        saved, client = {name: os.environ.get(name) for name in environment}, langsmith.run_trees._CLIENT
        os.environ.update(environment)
        _forget_environment()
        langsmith.run_trees._CLIENT = ours
        try:
            yield bodies
        finally:
            for name, value in saved.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
            _forget_environment()
            langsmith.run_trees._CLIENT = client


def _forget_environment() -> None:
    langsmith.utils.get_env_var.cache_clear()
    langsmith.utils.get_tracer_project.cache_clear()
