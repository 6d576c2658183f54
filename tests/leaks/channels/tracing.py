"""LangSmith: its real tracer, posting to a sink of ours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from langchain_core.runnables import Runnable
from langchain_core.tracers.langchain import wait_for_all_tracers
from langsmith import traceable
from langsmith.run_helpers import tracing_context

from tests.canary import langsmith_on, langsmith_sink
from tests.leaks.channels.registry import channel
from tests.leaks.scene import Scene, acall, call, wait_for


@channel("LangSmith by environment variables")
def by_environment(scene: Scene) -> Iterator[None]:
    with langsmith_on() as bodies:
        yield
        wait_for_all_tracers()
    scene.saw(*bodies)


@channel("LangSmith by tracing_context(enabled=True)")
def by_context(scene: Scene) -> Iterator[None]:
    with langsmith_sink() as (client, bodies):
        with tracing_context(enabled=True, client=client):
            yield
        wait_for_all_tracers()
    scene.saw(*bodies)


@channel("LangSmith below a @traceable function")
def below_traceable(scene: Scene) -> Iterator[None]:
    """The component is called by a traced function, with no chain between them."""

    def drive(_: Scene, component: Runnable[Any, Any]) -> None:
        @traceable
        def application() -> Any:
            return call(scene, component)

        @traceable
        async def aapplication() -> Any:
            return await acall(scene, component)

        with tracing_context(enabled=True, client=client):
            wait_for(aapplication()) if scene.is_async else application()

    scene.drive = drive
    with langsmith_sink() as (client, bodies):
        yield
        wait_for_all_tracers()
    scene.saw(*bodies)
