"""OpenAI's embeddings under the usual instrumentation, which stays in a process: `instrumented` runs it as a program.

A line of JSON per phase: whether naive embedding is seen, who is named by a refusal, whether embeddings that were built
before still give rows, and which canaries were seen then.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Callable
from typing import Any

from langchain_dpicl.backends.private_calls.call import OpaqueValue, RetryPolicy
from langchain_dpicl.backends.private_calls.embeddings import SilentEmbeddings
from langchain_dpicl.exceptions import UnsilencableModelError
from tests.canary import RECORD, canaries_in
from tests.loopback_provider import Provider
from tests.unit_tests.backends.embedding_models import embeddings_provider, stock

seen: list[str] = []


def taken() -> list[str]:
    """What was sent since the last time."""
    found = seen.copy()
    seen.clear()
    return found


def report(
    phase: str,
    served: Provider,
    early: SilentEmbeddings,
    *,
    sent: Callable[[], list[str]] = taken,
    inside: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> None:
    """Embeds naively and silently, and prints what went out in each case."""
    with inside():
        stock(served).embed_documents([RECORD])
    naive = bool(canaries_in(" ".join(sent())))
    found: dict[str, Any] = {"phase": phase, "model": "embeddings", "naive": naive, "refused": ""}
    try:
        SilentEmbeddings(stock(served))
    except UnsilencableModelError as refused:
        found["refused"] = re.search(r": ([\w.]+) is in the path of", str(refused)).group(1)  # type: ignore[union-attr]
    sent()
    with inside():
        texts = [OpaqueValue(RECORD)]
        rows = [early.rows(texts), asyncio.run(early.arows(texts))]  # type: ignore[arg-type]
    print(json.dumps({**found, "late": [bool(row.any()) for row in rows], "seen": canaries_in(" ".join(sent()))}))


def run() -> None:
    """OpenTelemetry's instrumentor of the SDK, and Sentry as it starts by itself where LangChain is installed."""
    import sentry_sdk
    from openai.resources.embeddings import AsyncEmbeddings, Embeddings
    from opentelemetry.instrumentation.openai import OpenAIInstrumentor
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
    from sentry_sdk.integrations.langchain import LangchainIntegration
    from sentry_sdk.transport import Transport

    class Exporter(SpanExporter):
        def export(self, spans: Any) -> SpanExportResult:
            seen.extend(span.to_json() for span in spans)
            return SpanExportResult.SUCCESS

    class Sent(Transport):
        def capture_envelope(self, envelope: Any) -> None:
            seen.extend(item.payload.get_bytes().decode() for item in envelope.items)

    def flushed() -> list[str]:
        sentry_sdk.flush()
        return taken()

    with embeddings_provider() as served:
        early = SilentEmbeddings(stock(served), retry=RetryPolicy(max_attempts=2, first_wait=0.0))
        report("none", served, early)
        spans = TracerProvider()
        spans.add_span_processor(SimpleSpanProcessor(Exporter()))
        kept = [(kind, vars(kind)["create"]) for kind in (Embeddings, AsyncEmbeddings)]
        OpenAIInstrumentor().instrument(tracer_provider=spans)
        report("OpenTelemetry", served, early)
        for kind, create in kept:  # its own way of taking itself off leaves these where they are
            setattr(kind, "create", create)  # noqa: B010
        report("OpenTelemetry, taken off", served, early)
        options: Any = {"traces_sample_rate": 1.0, "send_default_pii": True, "transport": Sent}
        # One of those that it starts by itself where they are installed; to look for them all takes seconds.
        options |= {"integrations": [LangchainIntegration()], "auto_enabling_integrations": False}
        sentry_sdk.init(dsn="http://key@127.0.0.1:9/1", **options)
        report("Sentry", served, early, sent=flushed, inside=lambda: sentry_sdk.start_transaction(name="call"))
