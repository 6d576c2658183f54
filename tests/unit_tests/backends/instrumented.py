"""Stock clients under the usual instrumentation, which stays in a process: run as a program, it prints what was seen.

`python -m tests.unit_tests.backends.instrumented otel`, or `sentry`, or `embeddings` (those of `instrumented_embeddings`),
or on Linux several: a line of JSON per model and instrumentation.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

from langchain_core.messages import HumanMessage

from langchain_dpicl.backends.private_calls.call import OpaqueValue, Request, RetryPolicy, silence
from langchain_dpicl.exceptions import UnsilencableModelError
from tests.canary import RECORD, VOTE, canaries_in
from tests.scripted_models import ScriptedChat, StatusError, fixed
from tests.unit_tests.backends import instrumented_embeddings
from tests.unit_tests.backends.canned_provider import Provider, provider

ONCE = RetryPolicy(max_attempts=1)
seen: list[str] = []


def taken() -> list[str]:
    """What was sent since the last time."""
    taken = seen.copy()
    seen.clear()
    return taken


def inputs(name: str) -> tuple[Any, Callable[[str], Any]]:
    """What the naive call takes, and how ours makes it."""
    if name != "OpenAIDecisions":
        return RECORD, str if name == "OpenAI" else lambda text: [HumanMessage(text)]
    from langchain_openai.decisions import Choice

    questions = {"label": Choice(instructions="Which?", choices={VOTE: None, "plain": None})}
    return {"input": RECORD, "questions": questions}, lambda text: {"input": text, "questions": questions}


def report(
    phase: str,
    name: str,
    model: Any,
    *,
    sent: Callable[[], list[str]] = taken,
    inside: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> None:
    """Calls a model naively and silently, and prints what went out in each case."""
    asked, render = inputs(name)
    sent()
    with inside(), contextlib.suppress(StatusError):
        model.invoke(asked)
    naive = sent()
    found: dict[str, Any] = {"phase": phase, "model": name, "naive": bool(canaries_in(" ".join(naive))), "refused": ""}
    try:
        silent, request = silence(model), Request(OpaqueValue(RECORD), render, {})
        with inside():
            found["faults"] = [
                silent.ask(request, retry=ONCE).fault,
                asyncio.run(silent.aask(request, retry=ONCE)).fault,
            ]
    except UnsilencableModelError as refused:
        found["refused"] = str(refused)
    found |= {"sent_naively": len(naive), "sent": sent()}
    print(json.dumps(found))


def otel(served: Provider) -> None:
    """OpenTelemetry's and OpenInference's instrumentors, each alone, and the spans of Anthropic's own SDK."""
    from openinference.instrumentation.langchain import LangChainInstrumentor
    from opentelemetry import trace
    from opentelemetry.instrumentation.anthropic import AnthropicInstrumentor
    from opentelemetry.instrumentation.langchain import LangchainInstrumentor
    from opentelemetry.instrumentation.openai import OpenAIInstrumentor
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

    class Exporter(SpanExporter):
        def export(self, spans: Any) -> SpanExportResult:
            seen.extend(span.to_json() for span in spans)
            return SpanExportResult.SUCCESS

    spans = TracerProvider()
    spans.add_span_processor(SimpleSpanProcessor(Exporter()))
    trace.set_tracer_provider(spans)
    report("no instrumentation", "ChatAnthropic", served.models["ChatAnthropic"]())
    os.environ["ANTHROPIC_OPEN_TELEMETRY_TRACES_CONTENT_MODE"] = "content"
    report("the SDK's own content mode", "ChatAnthropic", served.models["ChatAnthropic"]())
    del os.environ["ANTHROPIC_OPEN_TELEMETRY_TRACES_CONTENT_MODE"]
    # Some leave wrappers behind when they are taken off, so they come last.
    for phase, make, names in (
        ("OpenInference", LangChainInstrumentor, ["ChatOpenAI"]),
        ("OpenTelemetry anthropic", AnthropicInstrumentor, ["ChatAnthropic"]),
        (
            "OpenTelemetry langchain without propagation",
            lambda: LangchainInstrumentor(disable_trace_context_propagation=True),
            ["ChatOpenAI", "OpenAIDecisions"],
        ),
        ("OpenTelemetry openai", OpenAIInstrumentor, ["ChatOpenAI", "OpenAI", "OpenAIDecisions"]),
        ("OpenTelemetry langchain", LangchainInstrumentor, ["ChatOpenAI", "OpenAI"]),
    ):
        instrumentor = make()
        instrumentor.instrument(tracer_provider=spans)
        for name in names:
            report(phase, name, served.models[name]())
        instrumentor.uninstrument()
        report(f"{phase}, taken off", names[0], served.models[names[0]]())


def sentry(served: Provider) -> None:
    """Sentry as it starts by itself where LangChain is installed, and then with its integrations of the SDKs."""
    import sentry_sdk
    from sentry_sdk.integrations.anthropic import AnthropicIntegration
    from sentry_sdk.integrations.openai import OpenAIIntegration
    from sentry_sdk.transport import Transport

    class Sent(Transport):
        def capture_envelope(self, envelope: Any) -> None:
            seen.extend(item.payload.get_bytes().decode() for item in envelope.items)

    def sent() -> list[str]:
        sentry_sdk.flush()
        return taken()

    class Failing(ScriptedChat):
        def _generate(self, messages: Any, *args: Any, **kwargs: Any) -> Any:
            logging.getLogger("sdk").error("failed on %s", messages[0].text)
            return super()._generate(messages, *args, **kwargs)

    def transaction() -> Any:
        return sentry_sdk.start_transaction(name="call")

    options: Any = {"traces_sample_rate": 1.0, "attach_stacktrace": True, "send_default_pii": True}
    sentry_sdk.init(dsn="http://key@127.0.0.1:9/1", transport=Sent, **options)
    failing = Failing(answer=fixed({}), raises={RECORD: lambda text: StatusError(text, status_code=400)})
    for name, model in {"a failing model": failing, **{name: make() for name, make in served.models.items()}}.items():
        report("Sentry", name, model, sent=sent, inside=transaction)
    # As sentry_sdk.init(disabled_integrations=[LangchainIntegration()]) or integrations=[...] does.
    OpenAIIntegration.setup_once()
    AnthropicIntegration.setup_once()
    for name in ("ChatOpenAI", "ChatAnthropic"):
        report("Sentry in the SDKs", name, served.models[name](), sent=sent, inside=transaction)


def run(which: str) -> NoReturn:
    """Ends the process after one of the programs, without the seconds that clearing it up takes."""
    failed = 1
    try:
        with provider() as running:
            {"otel": otel, "sentry": sentry, "embeddings": lambda _: instrumented_embeddings.run()}[which](running)
        failed = 0
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(failed)


def main(programs: list[str]) -> NoReturn:
    """Several programs share the imports and the first, slow use of the clients, and nothing that is patched."""
    if len(programs) == 1:
        run(programs[0])
    for make in Provider("http://127.0.0.1:9", []).models.values():
        silence(make())
    for far in ("openai.types.beta.threads", "mcp.server", "fastapi", "huggingface_hub.inference"):
        with contextlib.suppress(ImportError):  # instrumentation of several programs imports them where they are
            importlib.import_module(far)
    failed = 0
    for which in programs:
        child = os.fork()
        if child == 0:
            run(which)
        failed |= os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os._exit(failed != 0)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1:])
