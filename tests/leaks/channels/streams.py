"""What a chain or a graph around the component says while it runs."""

from __future__ import annotations

import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from importlib.metadata import version
from inspect import isawaitable
from typing import Any, TypedDict

from langchain_core.runnables import Runnable

from tests.leaks.channels.registry import channel
from tests.leaks.scene import Scene, acall, call, chain, run_chain, wait_for


async def read(source: Any) -> list[Any]:
    """Everything an asynchronous stream says, up to its error."""
    stream: AsyncIterator[Any] = await source if isawaitable(source) else source
    return [event async for event in stream]


def overheard(scene: Scene, open_stream: Callable[[Runnable[Any, Any]], Any]) -> None:
    """Drives the chain by one of its asynchronous streams, blocking component or not."""

    def drive(_: Scene, component: Runnable[Any, Any]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scene.saw(*wait_for(read(open_stream(chain(scene, component)))))

    scene.drive = drive


def one_value(entry: str) -> str:
    """Why an entry point has no chunks."""
    return "" if "stream" in entry else "only stream and astream have chunks"


@channel("chunks of the enclosing chain", needs="V", unless=one_value)
def chunks(scene: Scene) -> Iterator[None]:
    scene.drive = lambda scene, component: scene.saw(*run_chain(scene, component))
    yield


@channel("astream_events v1")
def events_v1(scene: Scene) -> Iterator[None]:
    overheard(scene, lambda chain: chain.astream_events(0, version="v1"))
    yield


@channel("astream_events v2")
def events_v2(scene: Scene) -> Iterator[None]:
    overheard(scene, lambda chain: chain.astream_events(0, version="v2"))
    yield


@channel("astream_log", needs="V")
def log(scene: Scene) -> Iterator[None]:
    overheard(scene, lambda chain: chain.astream_log(0))
    yield


class State(TypedDict, total=False):
    """The graph's state: the result, and what people keep beside it to look at later."""

    result: str
    notes: str


def in_graph(scene: Scene, component: Runnable[Any, Any], checkpointer: Any = None) -> Any:
    """A graph whose one node calls the component and keeps its notes in the state."""
    from langgraph.graph import END, START, StateGraph

    def state(result: Any) -> State:
        # Of ours, all that is printable is kept.
        notes = vars(component) if scene.is_naive else scene.objects
        return {"result": str(result), "notes": repr(notes)}

    def node(_: State) -> State:
        return state(call(scene, component))

    async def anode(_: State) -> State:
        return state(await acall(scene, component))

    graph: Any = StateGraph(State)
    graph.add_node("vote", anode if scene.is_async else node)
    graph.add_edge(START, "vote")
    graph.add_edge("vote", END)
    return graph.compile(checkpointer=checkpointer)


START_STATE: State = {"result": "", "notes": ""}
THREAD = {"configurable": {"thread_id": "1"}}


def graph_stream(scene: Scene, **options: Any) -> None:
    """Drives a graph by its own stream."""

    def drive(_: Scene, component: Runnable[Any, Any]) -> None:
        graph = in_graph(scene, component)
        if scene.is_async:
            scene.saw(*wait_for(read(graph.astream(START_STATE, **options))))
        else:
            scene.saw(*graph.stream(START_STATE, **options))

    scene.drive = drive


@channel("LangGraph stream_mode messages", needs="V")
def graph_messages(scene: Scene) -> Iterator[None]:
    graph_stream(scene, stream_mode="messages")
    yield


@channel("LangGraph stream_mode updates, debug")
def graph_updates(scene: Scene) -> Iterator[None]:
    graph_stream(scene, stream_mode=["updates", "debug", "values", "custom"])
    yield


def no_v3(entry: str) -> str:
    """Why a graph has no v3 events."""
    found = tuple(map(int, version("langgraph").split(".")[:2]))
    return "" if found >= (1, 2) else f"langgraph {version('langgraph')} has no v3 events"


@channel("LangGraph events v3", needs="V", unless=no_v3)
def graph_events(scene: Scene) -> Iterator[None]:
    def drive(_: Scene, component: Runnable[Any, Any]) -> None:
        graph = in_graph(scene, component)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if scene.is_async:
                scene.saw(*wait_for(read(graph.astream_events(START_STATE, version="v3"))))
            else:
                scene.saw(*graph.stream_events(START_STATE, version="v3"))

    scene.drive = drive
    yield


@channel("LangGraph checkpoint bytes")
def checkpoint(scene: Scene) -> Iterator[None]:
    from langgraph.checkpoint.memory import InMemorySaver

    saver = InMemorySaver()

    def drive(_: Scene, component: Runnable[Any, Any]) -> None:
        graph = in_graph(scene, component, saver)
        wait_for(graph.ainvoke(START_STATE, THREAD)) if scene.is_async else graph.invoke(START_STATE, THREAD)

    scene.drive = drive
    yield
    scene.saw(dict(saver.storage), dict(saver.writes), dict(getattr(saver, "blobs", {})))
