"""Models that would be overheard inside: they start runs, wrap other models, or choose between some."""

from __future__ import annotations

from collections.abc import Iterator

from langchain_core.runnables import ConfigurableField

from tests.leaks.channels.handlers import Everything, Quiet
from tests.leaks.channels.registry import channel
from tests.leaks.channels.switches import debugging
from tests.leaks.models import AroundChat, BusyInsideChat, LeakyChat
from tests.leaks.scene import Scene


@channel("a model that starts runs of its own", may_refuse=True)
def busy_inside(scene: Scene) -> Iterator[None]:
    runs = Everything()
    scene.models, scene.chain_config = {"chat": BusyInsideChat}, {"callbacks": [runs]}
    with debugging() as printed:
        yield
    scene.saw(*runs.lines, printed.getvalue())


@channel("a model around another model", may_refuse=True)
def around(scene: Scene) -> Iterator[None]:
    handler = Quiet()
    scene.models = {"chat": lambda: AroundChat(inner=LeakyChat(callbacks=[handler]))}
    yield
    scene.saw(*handler.lines)


@channel("with_fallbacks", may_refuse=True)
def fallbacks(scene: Scene) -> Iterator[None]:
    handler = Quiet()
    scene.chain_config = {"callbacks": [handler]}
    scene.wrap = lambda model: model.with_fallbacks([LeakyChat()])
    yield
    scene.saw(*handler.lines)


@channel("with_retry")
def retried(scene: Scene) -> Iterator[None]:
    handler = Quiet()
    scene.chain_config = {"callbacks": [handler]}
    scene.wrap = lambda model: model.with_retry()
    yield
    scene.saw(*handler.lines)


@channel("configurable_alternatives", may_refuse=True)
def alternatives(scene: Scene) -> Iterator[None]:
    handler = Quiet()
    scene.chain_config = {"callbacks": [handler]}
    scene.wrap = lambda model: model.configurable_alternatives(ConfigurableField(id="llm"), other=LeakyChat())
    yield
    scene.saw(*handler.lines)
