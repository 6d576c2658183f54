"""OpenTelemetry instrumentation. Some of it cannot be taken back, so these rows have a process to themselves."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from tests.leaks.channels.registry import channel
from tests.leaks.channels.stock import anthropic_models, openai_models
from tests.leaks.scene import Scene
from tests.leaks.sink import provider


@functools.cache
def tracing() -> tuple[Any, Any]:
    """The provider of every instrumentation in this process, and the exporter that keeps its spans in memory."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, made = InMemorySpanExporter(), TracerProvider()
    made.add_span_processor(SimpleSpanProcessor(exporter))
    return made, exporter


@functools.cache
def instrument(make: Callable[[], Any]) -> Any:
    """Switches an instrumentation on, once."""
    instrumentor = make()
    instrumentor.instrument(tracer_provider=tracing()[0])
    return instrumentor


def spans(scene: Scene) -> None:
    """Reads and forgets what was exported."""
    exporter = tracing()[1]
    for span in exporter.get_finished_spans():
        scene.saw(span.name, dict(span.attributes), span.status.description or "")
        scene.saw(*((event.name, dict(event.attributes)) for event in span.events))
    exporter.clear()


@channel("OpenInference for LangChain", group="telemetry")
def openinference(scene: Scene) -> Iterator[None]:
    from openinference.instrumentation.langchain import LangChainInstrumentor

    instrumentor = LangChainInstrumentor()
    instrumentor.instrument(tracer_provider=tracing()[0])
    try:
        yield
    finally:
        instrumentor.uninstrument()
    spans(scene)


def openai_instrumentor() -> Any:
    from opentelemetry.instrumentation.openai import OpenAIInstrumentor

    return OpenAIInstrumentor()


def anthropic_instrumentor() -> Any:
    from opentelemetry.instrumentation.anthropic import AnthropicInstrumentor

    return AnthropicInstrumentor()


def langchain_instrumentor() -> Any:
    from opentelemetry.instrumentation.langchain import LangchainInstrumentor

    return LangchainInstrumentor()


@channel("OpenTelemetry for OpenAI", group="telemetry", may_refuse=True)
def openai_spans(scene: Scene) -> Iterator[None]:
    instrument(openai_instrumentor)
    scene.models = openai_models(provider("telemetry")[0])
    yield
    spans(scene)


@channel("OpenTelemetry for Anthropic", needs="R", group="telemetry", may_refuse=True)
def anthropic_spans(scene: Scene) -> Iterator[None]:
    instrument(anthropic_instrumentor)
    scene.models = anthropic_models(provider("telemetry")[0])
    yield
    spans(scene)


@channel("OpenTelemetry for LangChain", group="telemetry")
def langchain_spans(scene: Scene) -> Iterator[None]:
    """Last: it keeps the others from recording what it records."""
    instrument(langchain_instrumentor)
    yield
    spans(scene)
