"""What a provider that refuses private prompts, quoting them, leaves behind; and what a stop leaves."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.runnables import Runnable
from langchain_core.tracers.langchain import wait_for_all_tracers

from tests.canary import OURS, RECORD, langsmith_on, locals_in, said_by
from tests.leaks.channels.registry import channel
from tests.leaks.models import StoppedChat, answer, both, failing
from tests.leaks.scene import Scene, chain, run_chain, wait_for

NAIVE = f"{os.sep}naive.py"


class Errors(BaseCallbackHandler):
    """Writes down the errors of chains and models."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def _note(self, error: BaseException, **kwargs: Any) -> None:
        self.lines.append(f"{said_by(error)} {kwargs}")

    on_chain_error = on_llm_error = _note


@channel("exception: text, args, attributes, cause, context", fails=True)
def exception(scene: Scene) -> Iterator[None]:
    scene.models = both(answer=failing)
    yield
    scene.saw(said_by(scene.error))


@channel("exception: locals of the component's frames", needs="R", fails=True)
def frames(scene: Scene) -> Iterator[None]:
    scene.models = both(answer=failing)
    yield
    scene.saw(locals_in(scene.error, frames_of=NAIVE if scene.is_naive else OURS))


@channel("on_chain_error, on_llm_error", fails=True)
def error_callbacks(scene: Scene) -> Iterator[None]:
    handler = Errors()
    scene.models, scene.chain_config = both(answer=failing), {"callbacks": [handler]}
    yield
    scene.saw(*handler.lines)


@channel("LangSmith's record of a failed run", fails=True)
def traced_errors(scene: Scene) -> Iterator[None]:
    scene.models = both(answer=failing)
    with langsmith_on() as bodies:
        yield
        wait_for_all_tracers()
    scene.saw(*bodies)


@channel("Ctrl-C or cancellation in a private call", needs="R", fails=True)
def stop(scene: Scene) -> Iterator[None]:
    # Not `CALLS`: threads that an earlier stop left at work may still note a private call there.
    asked: list[str] = []

    def noted(text: str) -> dict[str, float]:
        if RECORD in text:
            asked.append(text)
        return answer(text)

    async def cancel_soon(component: Runnable[Any, Any]) -> None:
        task = asyncio.ensure_future(chain(scene, component).ainvoke(0))
        while not asked and not task.done():  # noqa: ASYNC110  a blocking provider has no event to set
            await asyncio.sleep(0.001)
        task.cancel()
        await task

    def drive(_: Scene, component: Runnable[Any, Any]) -> None:
        wait_for(cancel_soon(component)) if scene.is_async else run_chain(scene, component)

    scene.models, scene.drive = {"chat": lambda: StoppedChat(answer=noted)}, drive
    yield
    scene.saw(said_by(scene.error), locals_in(scene.error, frames_of=NAIVE if scene.is_naive else OURS))
