"""The stock clients themselves: what their SDKs log and warn of, and where they send a prompt."""

from __future__ import annotations

import contextlib
import io
import os
import warnings
from collections.abc import Iterator
from functools import wraps
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

from langchain_core.tracers.langchain import wait_for_all_tracers

from tests.canary import langsmith_on, logging_to
from tests.leaks.channels.handlers import Everything
from tests.leaks.channels.registry import channel
from tests.leaks.channels.stock import KEY, anthropic_models, decision_models, decision_request, openai_models
from tests.leaks.scene import Scene
from tests.leaks.sink import provider


def openai_logs_no_bodies(entry: str) -> str:
    """Why the OpenAI SDK's log cannot leak."""
    import openai

    source = Path(openai.__file__).with_name("_base_client.py").read_text()
    return "" if "Request options" in source else f"openai {version('openai')} logs no bodies"


@channel("log: OpenAI SDK at DEBUG", needs="R", group="sdk", unless=openai_logs_no_bodies)
def openai_log(scene: Scene) -> Iterator[None]:
    lines = io.StringIO()
    scene.models = openai_models(provider()[0])
    with logging_to(lines):
        yield
    scene.saw(lines.getvalue())


@channel("log: Anthropic SDK at DEBUG", needs="R", group="sdk")
def anthropic_log(scene: Scene) -> Iterator[None]:
    lines = io.StringIO()
    scene.models = anthropic_models(provider()[0])
    with logging_to(lines):
        yield
    scene.saw(lines.getvalue())


@channel("warnings of the OpenAI client's serialiser", group="sdk")
def serialiser(scene: Scene) -> Iterator[None]:
    """An answer with a field of the wrong type is quoted in a warning (by the completion client, in every version)."""
    scene.models = {"chat": openai_models(provider("spoils")[0])["completion"]}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    scene.saw(*(str(warning.message) for warning in caught))


def no_gateway(entry: str) -> str:
    """Why a client cannot be rerouted."""
    known = find_spec("langchain_core.utils._gateway")
    return "" if known else f"langchain-openai {version('langchain-openai')} knows no gateway"


@contextlib.contextmanager
def gateway() -> Iterator[list[str]]:
    """The gateway's address in the environment, and the bodies that arrive there."""
    address, bodies = provider()
    with patch.dict(os.environ, {"LANGSMITH_GATEWAY": address, "LANGSMITH_GATEWAY_API_KEY": KEY}):
        yield bodies


@channel("LANGSMITH_GATEWAY (OpenAI client)", group="sdk", unless=no_gateway, may_refuse=True)
def openai_gateway(scene: Scene) -> Iterator[None]:
    from langchain_openai import ChatOpenAI

    scene.models = {"chat": lambda: ChatOpenAI(model="m", max_retries=0)}
    with gateway() as bodies:
        yield
    scene.saw(*bodies)


@channel("LANGSMITH_GATEWAY (Anthropic client)", group="sdk", unless=no_gateway, may_refuse=True)
def anthropic_gateway(scene: Scene) -> Iterator[None]:
    from langchain_anthropic import ChatAnthropic

    scene.models = {"text": lambda: ChatAnthropic(model="m", max_retries=0, max_tokens=1)}
    with gateway() as bodies:
        yield
    scene.saw(*bodies)


def no_decisions(entry: str) -> str:
    """Why there is no decision model."""
    return "" if find_spec("langchain_openai.decisions") else f"langchain-openai {version('langchain-openai')} has none"


@channel("OpenAIDecisions: callbacks", group="sdk", unless=no_decisions)
def decision_callbacks(scene: Scene) -> Iterator[None]:
    handler = Everything()
    scene.chain_config, scene.ask = {"callbacks": [handler]}, decision_request
    scene.models = decision_models(provider()[0])
    yield
    scene.saw(*handler.lines)


@channel("OpenAIDecisions: LangSmith", group="sdk", unless=no_decisions)
def decision_traces(scene: Scene) -> Iterator[None]:
    scene.models, scene.ask = decision_models(provider()[0]), decision_request
    with langsmith_on() as bodies:
        yield
        wait_for_all_tracers()
    scene.saw(*bodies)


@channel("OpenAIDecisions: LANGSMITH_GATEWAY", group="sdk", unless=no_decisions, may_refuse=True)
def decision_gateway(scene: Scene) -> Iterator[None]:
    from langchain_openai.decisions import OpenAIDecisions

    scene.models, scene.ask = {"decisions": lambda: OpenAIDecisions(model="m", max_retries=0)}, decision_request
    with gateway() as bodies:
        yield
    scene.saw(*bodies)


@channel("SDK methods wrapped after the engine was built", needs="R", group="sdk", may_abstain=True, may_refuse=True)
def wrapped_later(scene: Scene) -> Iterator[None]:
    """What an instrumentation does that is switched on late."""
    from openai.resources.chat.completions import AsyncCompletions, Completions

    seen: list[str] = []

    def watched(method: Any) -> Any:
        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            seen.append(repr(kwargs))
            return method(*args, **kwargs)

        return call

    def wrap() -> None:
        for kind in (Completions, AsyncCompletions):
            stack.enter_context(patch.object(kind, "create", watched(kind.create)))

    # A client of its own for every run: one that was used before keeps the methods it found then.
    make: Any = openai_models.__wrapped__
    scene.models, scene.before_call = {"chat": make(provider()[0])["chat"]}, wrap
    with contextlib.ExitStack() as stack:
        yield
    scene.saw(*seen)
