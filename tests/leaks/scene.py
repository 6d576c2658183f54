"""One cell's stage: how the component is built, called and overheard."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any

from langchain_core.runnables import Runnable, RunnableGenerator, RunnableLambda

from tests.leaks.models import LeakyChat, LeakyLLM

ENTRIES = ("invoke", "ainvoke", "batch", "abatch", "stream", "astream")
"""The public methods of a Runnable, by which a component is called inside a chain."""

HALVES = (("invoke", "ainvoke", "astream"), ("batch", "abatch", "stream"))
"""The same in two halves: each blocks and awaits, and a room that has two entry points has one in each."""


def entries_of(row: int, half: int | None = None) -> tuple[str, ...]:
    """The entry points of a row of the table: all, or those of a half; the halves change places from row to row."""
    return ENTRIES if half is None else HALVES[(row + half) % 2]


ASYNC = frozenset({"ainvoke", "abatch", "astream"})

_RUNNER = asyncio.Runner()
# One loop for all cells: clients keep connections of the loop that made them.


def wait_for(awaitable: Awaitable[Any]) -> Any:
    """Runs a coroutine in the caller's context, so that what watches by context variables watches here as well."""

    async def run() -> Any:
        return await awaitable

    return _RUNNER.run(run(), context=contextvars.copy_context())


def settle() -> None:
    """Waits for what a failed call left running, so that observers see all of it."""

    async def others() -> None:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        if left:
            await asyncio.wait(left, timeout=60)

    _RUNNER.run(others())


class Scene:
    """What a channel arranges before a run, and what it finds after it. No repr, as frames hold it."""

    def __init__(self, entry: str, *, is_naive: bool) -> None:
        self.entry = entry
        self.is_naive = is_naive
        self.models: Mapping[str, Callable[[], Any]] = {"chat": LeakyChat, "completion": LeakyLLM}
        self.wrap: Callable[[Any], Any] = lambda model: model
        self.ask: Callable[[str], Any] = str
        self.own_config: Any = None
        self.given_config: Any = None
        self.chain_config: Any = None
        self.drive: Callable[[Scene, Runnable[Any, Any]], Any] = run_chain
        self.before_call: Callable[[], None] = lambda: None
        self.objects: list[Any] = []
        self.texts: list[str] = []
        self.error: BaseException | None = None

    def model(self, kind: str = "chat") -> Any:
        """Returns the model as people hand it over."""
        make = self.models.get(kind) or next(iter(self.models.values()))
        return self.wrap(make())

    @property
    def offers(self) -> frozenset[str]:
        """What the channel's models can do: "logprobs", "text", "decisions"."""
        does = {"chat": {"logprobs", "text"}, "text": {"text"}, "decisions": {"decisions"}}
        return frozenset().union(*(does.get(kind, set()) for kind in self.models))

    @property
    def is_async(self) -> bool:
        """Whether the component is awaited."""
        return self.entry in ASYNC

    def saw(self, *things: Any) -> None:
        """Notes what an observer got."""
        self.texts.extend(thing if isinstance(thing, str) else repr(thing) for thing in things)


def call(scene: Scene, component: Runnable[Any, Any]) -> Any:
    """Calls the component by a blocking entry point."""
    if scene.entry == "batch":
        return component.batch([0, 1], scene.given_config)
    if scene.entry == "stream":
        return list(component.stream(0, scene.given_config))
    return component.invoke(0, scene.given_config)


async def acall(scene: Scene, component: Runnable[Any, Any]) -> Any:
    """Calls the component by an awaitable entry point."""
    if scene.entry == "abatch":
        return await component.abatch([0, 1], scene.given_config)
    if scene.entry == "astream":
        return [chunk async for chunk in component.astream(0, scene.given_config)]
    return await component.ainvoke(0, scene.given_config)


def chain(scene: Scene, component: Runnable[Any, Any]) -> Runnable[Any, Any]:
    """Returns an enclosing chain whose one step calls the component; a released text comes out of it."""

    def step(_: Any) -> Any:
        return call(scene, component)

    async def astep(_: Any) -> Any:
        return await acall(scene, component)

    return RunnableLambda(astep if scene.is_async else step).with_config(run_name="chain")


def streaming_chain(scene: Scene, component: Runnable[Any, Any]) -> Runnable[Any, Any]:
    """Is `chain`, passing on the chunks of a streaming component."""

    def step(inputs: Iterator[Any]) -> Iterator[Any]:
        for _ in inputs:
            yield from component.stream(0, scene.given_config)

    async def astep(inputs: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for _ in inputs:
            async for chunk in component.astream(0, scene.given_config):
                yield chunk

    return RunnableGenerator(step, astep).with_config(run_name="chain")


def run_chain(scene: Scene, component: Runnable[Any, Any]) -> Any:
    """Calls the enclosing chain by the entry point's own kind."""
    if scene.entry == "stream":
        return list(streaming_chain(scene, component).stream(0, scene.chain_config))
    if scene.entry == "astream":

        async def read() -> list[Any]:
            return [chunk async for chunk in streaming_chain(scene, component).astream(0, scene.chain_config)]

        return wait_for(read())
    if scene.is_async:
        return wait_for(chain(scene, component).ainvoke(0, scene.chain_config))
    return chain(scene, component).invoke(0, scene.chain_config)
