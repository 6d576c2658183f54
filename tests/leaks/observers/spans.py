"""Observers that draw OpenTelemetry spans, and Sentry."""

from __future__ import annotations

import os
from typing import Any

from tests.leaks.channels.sentry import ENVELOPES
from tests.leaks.channels.stock import KEY
from tests.leaks.channels.telemetry import tracing
from tests.leaks.observers.collector import collector
from tests.leaks.observers.registry import Eyes, observer
from tests.leaks.scene import Scene


def _exported() -> Eyes:
    """All of every span that is exported: attributes, events, status, resource."""
    exporter = tracing()[1]
    return Eyes(lambda: [span.to_json() for span in exporter.get_finished_spans()])


def _instrumented(*instrumentors: Any, **options: Any) -> Eyes:
    for one in instrumentors:
        one.instrument(tracer_provider=tracing()[0], **options)
    return _exported()


OPENINFERENCE = ("openinference-instrumentation-openai", "openinference-instrumentation-anthropic")


@observer("OpenInference for OpenAI and Anthropic", *OPENINFERENCE, called=["openinference"])
def openinference_clients() -> Eyes:
    from openinference.instrumentation.anthropic import AnthropicInstrumentor
    from openinference.instrumentation.openai import OpenAIInstrumentor

    return _instrumented(OpenAIInstrumentor(), AnthropicInstrumentor())


@observer("OpenInference for LangChain", "openinference-instrumentation-langchain", called=["openinference"])
def openinference_langchain() -> Eyes:
    from openinference.instrumentation.langchain import LangChainInstrumentor

    return _instrumented(LangChainInstrumentor())


def _logfire() -> tuple[Any, Eyes]:
    import logfire
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    exporter = SimpleSpanProcessor(tracing()[1])
    logfire.configure(send_to_logfire=False, console=False, additional_span_processors=[exporter])
    return logfire, _exported()


@observer("logfire.instrument_openai(), .instrument_anthropic()", "logfire", called=["logfire"])
def logfire_clients() -> Eyes:
    logfire, eyes = _logfire()
    logfire.instrument_openai()
    logfire.instrument_anthropic()
    return eyes


@observer(
    "logfire: pydantic plugin on langchain_core",
    "logfire",
    called=["logfire"],
    environment={"LOGFIRE_PYDANTIC_PLUGIN_RECORD": "all", "LOGFIRE_PYDANTIC_PLUGIN_INCLUDE": "langchain_core.*"},
)
def logfire_messages() -> Eyes:
    """Switched on by the environment, as it has to be there before LangChain's classes are made."""
    return _logfire()[1]


@observer("logfire.instrument_httpx()", "logfire", called=["logfire", "opentelemetry"])
def logfire_http() -> Eyes:
    logfire, eyes = _logfire()
    logfire.instrument_httpx()
    return eyes


@observer("logfire.instrument_httpx(capture_all=True)", "logfire", called=["logfire", "opentelemetry"])
def logfire_http_bodies() -> Eyes:
    logfire, eyes = _logfire()
    logfire.instrument_httpx(capture_all=True)
    return eyes


@observer("Laminar.initialize()", "lmnr", called=["lmnr", "opentelemetry"])
def laminar() -> Eyes:
    address, bodies = collector()
    from lmnr import Laminar

    port = int(address.rpartition(":")[2])
    Laminar.initialize(KEY, base_url="http://127.0.0.1", http_port=port, force_http=True, disable_batch=True)
    return Eyes(lambda: bodies, Laminar.flush)


@observer(
    "langtrace.init()", "langtrace-python-sdk", "importlib-metadata", "setuptools", called=["langtrace_python_sdk"]
)
def langtrace_sdk() -> Eyes:
    os.environ.update(LANGTRACE_ERROR_REPORTING="False")
    from langtrace_python_sdk import langtrace

    langtrace.init(custom_remote_exporter=tracing()[1], batch=False, api_key=KEY, disable_logging=True)
    return _exported()


@observer("Traceloop.init()", "traceloop-sdk", called=["opentelemetry", "traceloop"])
def traceloop_sdk() -> Eyes:
    os.environ.update(TRACELOOP_TELEMETRY="false", TRACELOOP_METRICS_ENABLED="false")
    from traceloop.sdk import Traceloop

    Traceloop.init("leaks", exporter=tracing()[1], disable_batch=True, telemetry_enabled=False)
    return _exported()


def _langfuse() -> Eyes:
    address, bodies = collector()
    os.environ.update(LANGFUSE_HOST=address, LANGFUSE_BASE_URL=address)
    os.environ.update(LANGFUSE_PUBLIC_KEY=KEY, LANGFUSE_SECRET_KEY=KEY)
    from langfuse import get_client

    return Eyes(lambda: bodies, get_client().flush)


@observer("langfuse CallbackHandler", "langfuse", called=["langfuse"])
def langfuse_handler() -> Eyes:
    eyes = _langfuse()
    from langfuse.langchain import CallbackHandler

    def arrange(scene: Scene) -> None:
        scene.chain_config = {"callbacks": [CallbackHandler()]}

    return Eyes(eyes.lines, eyes.flush, arrange)


@observer("langfuse.openai", "langfuse", called=["langfuse"], cases=["OpenAI", "OpenAI fails"])
def langfuse_openai() -> Eyes:
    eyes = _langfuse()
    import langfuse.openai  # noqa: F401  patches by being imported

    return eyes


HTTP = tuple(f"opentelemetry-instrumentation-{name}" for name in ("httpx", "requests", "urllib3"))


@observer("OpenTelemetry for httpx, httpx2", *HTTP, called=["opentelemetry"])
def http_spans() -> Eyes:
    from opentelemetry.instrumentation.httpx import HTTPX2ClientInstrumentor, HTTPXClientInstrumentor

    return _instrumented(HTTPXClientInstrumentor(), HTTPX2ClientInstrumentor())


@observer("OpenTelemetry for httpx, a request_hook that reads bodies", *HTTP, called=["opentelemetry"])
def http_spans_with_bodies() -> Eyes:
    from opentelemetry.instrumentation.httpx import HTTPX2ClientInstrumentor, HTTPXClientInstrumentor

    def hook(span: Any, request: Any) -> None:
        span.set_attribute("body", repr([*request.stream]))

    async def async_hook(span: Any, request: Any) -> None:
        hook(span, request)

    hooks = {"request_hook": hook, "async_request_hook": async_hook}
    return _instrumented(HTTPXClientInstrumentor(), HTTPX2ClientInstrumentor(), **hooks)


@observer("OpenTelemetry for requests", *HTTP, called=["opentelemetry"], cases=["requests", "requests fails"])
def requests_spans() -> Eyes:
    from opentelemetry.instrumentation.requests import RequestsInstrumentor

    return _instrumented(RequestsInstrumentor())


@observer("OpenTelemetry for urllib3", *HTTP, called=["opentelemetry"], cases=["requests", "requests fails"])
def urllib3_spans() -> Eyes:
    from opentelemetry.instrumentation.urllib3 import URLLib3Instrumentor

    return _instrumented(URLLib3Instrumentor())


def _sentry(**options: Any) -> Eyes:
    """Every call in a transaction of its own, as in an application."""
    import anthropic  # noqa: F401  integrations look for what is imported
    import openai  # noqa: F401
    import sentry_sdk
    from sentry_sdk.transport import Transport

    class Kept(Transport):
        def capture_envelope(self, envelope: Any) -> None:
            ENVELOPES.append(envelope.serialize().decode("utf-8", "replace"))

    sentry_sdk.init(dsn="http://key@127.0.0.1:1/1", transport=Kept, traces_sample_rate=1.0, **options)

    def arrange(scene: Scene) -> None:
        drive = scene.drive

        def driven(scene: Scene, component: Any) -> Any:
            with sentry_sdk.start_transaction(name="application"):
                try:
                    return drive(scene, component)
                except Exception as error:
                    sentry_sdk.capture_exception(error)
                    raise

        scene.drive = driven

    def flush() -> None:
        """Breadcrumbs are sent with the next event only."""
        scope = sentry_sdk.get_isolation_scope()
        if scope._breadcrumbs:
            sentry_sdk.capture_message("flush")
            scope.clear_breadcrumbs()
        sentry_sdk.flush()

    return Eyes(lambda: ENVELOPES, flush, arrange)


@observer("sentry_sdk.init(send_default_pii=True)", "sentry-sdk", called=["sentry_sdk"])
def sentry() -> Eyes:
    return _sentry(send_default_pii=True)


@observer("Sentry, its OpenAI, Anthropic and LangChain integrations off", "sentry-sdk", called=["sentry_sdk"])
def sentry_http() -> Eyes:
    """What is left: spans and breadcrumbs of the HTTP clients, logs, errors with the locals of their frames."""
    from sentry_sdk.integrations.anthropic import AnthropicIntegration
    from sentry_sdk.integrations.langchain import LangchainIntegration
    from sentry_sdk.integrations.openai import OpenAIIntegration

    kinds = [AnthropicIntegration, LangchainIntegration, OpenAIIntegration]
    return _sentry(send_default_pii=True, disabled_integrations=kinds)
