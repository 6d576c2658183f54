"""Observers with a wire format of their own: Braintrust, Opik, Weave, MLflow, Datadog."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.leaks.channels.stock import KEY
from tests.leaks.observers.collector import collector
from tests.leaks.observers.registry import Eyes, observer
from tests.leaks.scene import Scene


def _braintrust() -> tuple[Any, Eyes]:
    """Spans of every thread go to one logger in memory: the package's own helper for tests serves one thread only."""
    import braintrust
    from braintrust import logger
    from braintrust.test_helpers import init_test_logger

    kept: list[str] = []
    memory = logger._internal_with_memory_background_logger().__enter__()
    type(logger._state).global_bg_logger = lambda _: memory
    init_test_logger("leaks")

    def flush() -> None:
        memory.flush()
        kept.extend(json.dumps(span, default=str) for span in memory.pop())

    return braintrust, Eyes(lambda: kept, flush)


@observer("braintrust.auto_instrument()", "braintrust", called=["braintrust"])
def braintrust_auto() -> Eyes:
    braintrust, eyes = _braintrust()
    braintrust.auto_instrument()
    return eyes


@observer("braintrust.auto_instrument(langchain=False)", "braintrust", called=["braintrust"])
def braintrust_clients() -> Eyes:
    """Without its LangChain handler, so that what shows is shown by the patched SDKs alone."""
    braintrust, eyes = _braintrust()
    braintrust.auto_instrument(langchain=False)
    return eyes


@observer("braintrust.wrap_openai(client)", "braintrust", called=["braintrust"], cases=["OpenAI"])
def braintrust_client() -> Eyes:
    braintrust, eyes = _braintrust()

    def wrap(model: Any) -> Any:
        """A model whose clients are wrapped, as people do who keep a client of their own."""
        root, async_root = braintrust.wrap_openai(model.root_client), braintrust.wrap_openai(model.root_async_client)
        clients = {"client": root.chat.completions, "async_client": async_root.chat.completions}
        return model.model_copy(update={"root_client": root, "root_async_client": async_root, **clients})

    return Eyes(eyes.lines, eyes.flush, lambda scene: setattr(scene, "wrap", wrap))


def _opik() -> Eyes:
    address, bodies = collector()
    os.environ.update(OPIK_URL_OVERRIDE=address, OPIK_API_KEY=KEY, OPIK_WORKSPACE="leaks")
    os.environ.update(OPIK_SENTRY_ENABLE="false", OPIK_TRACK_DISABLE="false")
    import opik

    return Eyes(lambda: bodies, opik.flush_tracker)


@observer("opik track_openai(client)", "opik", called=["opik"], cases=["OpenAI", "OpenAI fails"])
def opik_openai() -> Eyes:
    eyes = _opik()
    from opik.integrations.openai import track_openai

    def wrap(model: Any) -> Any:
        track_openai(model.root_client)
        track_openai(model.root_async_client)
        return model

    return Eyes(eyes.lines, eyes.flush, lambda scene: setattr(scene, "wrap", wrap))


@observer("opik track_anthropic(client)", "opik", called=["opik"], cases=["Anthropic"])
def opik_anthropic() -> Eyes:
    eyes = _opik()
    from opik.integrations.anthropic import track_anthropic

    def wrap(model: Any) -> Any:
        track_anthropic(model._client)
        track_anthropic(model._async_client)
        return model

    return Eyes(eyes.lines, eyes.flush, lambda scene: setattr(scene, "wrap", wrap))


@observer("opik OpikTracer (callback)", "opik", called=["opik"])
def opik_handler() -> Eyes:
    eyes = _opik()
    from opik.integrations.langchain import OpikTracer

    def arrange(scene: Scene) -> None:
        scene.chain_config = {"callbacks": [OpikTracer()]}

    return Eyes(eyes.lines, eyes.flush, arrange)


@observer("weave.init()", "weave", called=["weave"])
def weave_client() -> Eyes:
    """A client as `init` makes it, without the sign-in, and its implicit patches."""
    address, bodies = collector({"digest": "d" * 43, "row_digests": [], "id": "1", "trace_id": "1", "res": []})
    os.environ.update(WF_TRACE_SERVER_URL=address, WANDB_BASE_URL=address, WANDB_API_KEY="a" * 40)
    import anthropic  # noqa: F401  patched where they are imported
    import langchain_core  # noqa: F401
    import openai  # noqa: F401
    from weave.integrations.patch import implicit_patch
    from weave.trace.context import weave_client_context
    from weave.trace.weave_client import WeaveClient
    from weave.trace.weave_init import init_weave_get_server

    client = WeaveClient("leaks", "leaks", init_weave_get_server(), ensure_project_exists=False)
    weave_client_context.set_weave_client_global(client)
    implicit_patch()
    return Eyes(lambda: bodies, client.flush)


def _mlflow() -> tuple[Any, Eyes]:
    """Traces go to a database in the current folder."""
    os.environ.update(MLFLOW_ENABLE_ASYNC_TRACE_LOGGING="false", MLFLOW_DISABLE_TELEMETRY="true", DO_NOT_TRACK="true")
    import mlflow

    mlflow.set_tracking_uri(f"sqlite:///{Path.cwd()}/mlflow.db")
    mlflow.set_experiment("leaks")
    kept: list[str] = []
    told: set[str] = set()

    def flush() -> None:
        for trace in mlflow.search_traces(return_type="list", max_results=500):
            if trace.info.trace_id not in told:
                told.add(trace.info.trace_id)
                kept.append(trace.to_json())

    return mlflow, Eyes(lambda: kept, flush)


@observer("mlflow.openai.autolog()", "mlflow", called=["mlflow"], cases=["OpenAI", "OpenAI fails"])
def mlflow_openai() -> Eyes:
    mlflow, eyes = _mlflow()
    mlflow.openai.autolog()
    return eyes


@observer("mlflow.anthropic.autolog()", "mlflow", called=["mlflow"], cases=["Anthropic"])
def mlflow_anthropic() -> Eyes:
    mlflow, eyes = _mlflow()
    mlflow.anthropic.autolog()
    return eyes


@observer("mlflow.langchain.autolog()", "mlflow", called=["mlflow"])
def mlflow_langchain() -> Eyes:
    mlflow, eyes = _mlflow()
    mlflow.langchain.autolog()
    return eyes


def _datadog(**environment: str) -> tuple[str, list[str]]:
    address, bodies = collector()
    off = dict.fromkeys(["DD_INSTRUMENTATION_TELEMETRY_ENABLED", "DD_REMOTE_CONFIGURATION_ENABLED"], "false")
    os.environ.update(DD_TRACE_AGENT_URL=address, DD_SITE="datadoghq.invalid", **off, **environment)
    return address, bodies


@observer("ddtrace.auto with LLM Observability", "ddtrace", called=["ddtrace"])
def ddtrace_auto() -> Eyes:
    _, bodies = _datadog(DD_LLMOBS_ENABLED="1", DD_LLMOBS_ML_APP="leaks", DD_LLMOBS_AGENTLESS_ENABLED="0")
    import ddtrace.auto  # noqa: F401  patches by being imported
    from ddtrace.llmobs import LLMObs
    from ddtrace.trace import tracer

    def flush() -> None:
        LLMObs.flush()
        tracer.flush()

    return Eyes(lambda: bodies, flush)


@observer("ddtrace.patch(httpx, httpx2)", "ddtrace", called=["ddtrace"])
def ddtrace_http() -> Eyes:
    _, bodies = _datadog()
    from ddtrace import patch
    from ddtrace.trace import tracer

    patch(httpx=True, httpx2=True)
    return Eyes(lambda: bodies, tracer.flush)
