"""What can be read off the objects themselves when the component is done: repr, dumps, pickles, copies, schemas."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from langchain_core.load import dumpd, dumps
from langchain_core.runnables import ConfigurableField, Runnable, RunnableLambda, RunnableSerializable
from pydantic import BaseModel, ValidationError

from tests.canary import said_by
from tests.leaks.channels.registry import channel
from tests.leaks.scene import Scene


def look(scene: Scene, *ways: Callable[[Any], Any]) -> None:
    """Looks at every object in every way; what a refusal says counts as well."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for thing in [*scene.objects, scene.objects]:
            for way in ways:
                try:
                    scene.saw(way(thing))
                except Exception as error:
                    scene.saw(said_by(error))


@channel("repr, str, format, f-string of a chain")
def printed(scene: Scene) -> Iterator[None]:
    yield
    chained = [thing | RunnableLambda(str) for thing in scene.objects if isinstance(thing, Runnable)]
    retried = [thing.with_retry() for thing in scene.objects if isinstance(thing, Runnable)]
    scene.objects += [*chained, *retried]
    look(scene, repr, str, format, lambda thing: f"{thing} {getattr(thing, '__dict__', '')}", _in_a_notebook)


def _in_a_notebook(thing: Any) -> str:
    return str(getattr(thing, "_repr_html_", str)())


@channel("dumps, dumpd")
def dumped(scene: Scene) -> Iterator[None]:
    yield
    look(scene, dumps, dumpd)


@channel("model_dump, model_dump_json, dict")
def model_dumped(scene: Scene) -> Iterator[None]:
    yield
    scene.objects[:] = [thing for thing in scene.objects if isinstance(thing, BaseModel)]
    look(scene, lambda thing: thing.model_dump(), lambda thing: thing.model_dump_json(fallback=repr), dict)


@channel("pickle")
def pickled(scene: Scene) -> Iterator[None]:
    yield
    look(scene, lambda thing: pickle.dumps(thing).decode("latin-1"))


@channel("copy, deepcopy")
def copied(scene: Scene) -> Iterator[None]:
    def shown(thing: Any) -> str:
        return f"{thing!r} {getattr(thing, '__dict__', '')!r}"

    yield
    look(scene, lambda thing: shown(copy.copy(thing)), lambda thing: shown(copy.deepcopy(thing)))


@channel("pydantic ValidationError")
def invalid(scene: Scene) -> Iterator[None]:
    """Every field in turn gets its own value, wrapped, and every other object the component made."""
    yield
    for thing in [thing for thing in scene.objects if isinstance(thing, BaseModel)]:
        for name, value in dict(thing).items():
            for wrong in ([value], {"wrong": value}, *scene.objects):
                try:
                    type(thing).model_validate({**dict(thing), name: wrong})
                except ValidationError as error:
                    scene.saw(said_by(error), repr(error.errors()))
                except Exception as error:
                    scene.saw(said_by(error))


def configurable(thing: RunnableSerializable[Any, Any]) -> Any:
    """The config schema, with every field offered for configuration."""
    fields: Any = {name: ConfigurableField(id=name) for name in type(thing).model_fields}
    return thing.configurable_fields(**fields).get_config_jsonschema()


@channel("get_graph, input, output and config schemas")
def schemas(scene: Scene) -> Iterator[None]:
    yield
    scene.objects[:] = [thing for thing in scene.objects if isinstance(thing, Runnable)]
    look(
        scene,
        lambda thing: thing.get_graph().to_json(with_schemas=True),
        lambda thing: thing.get_graph().draw_mermaid(),
        lambda thing: thing.get_graph(),
        lambda thing: thing.get_input_jsonschema(),
        lambda thing: thing.get_output_jsonschema(),
        lambda thing: type(thing).model_json_schema(),
        configurable,
    )
