"""Says which packages may wrap a method that private text passes through, and keeps those that the operator names."""

from __future__ import annotations

import functools
import importlib.metadata
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from langchain_dpicl.exceptions import ConfigurationError

Place: TypeAlias = Literal["http", "torch"]
"""Where a wrapper stands: a method of an HTTP client, or of a torch module."""

# fmt: off
RECORDERS = frozenset({
    "agentops", "aporia", "arize", "braintrust", "comet_llm", "comet_ml", "ddtrace", "deepeval", "elasticapm",
    "galileo", "helicone", "honeyhive", "instana", "keywordsai", "langfuse", "langsmith", "langtrace_python_sdk",
    "literalai", "lmnr", "logfire", "lunary", "maxim", "mlflow", "newrelic", "openinference", "openlit",
    "opentelemetry", "opik", "parea", "patronus", "phoenix", "portkey_ai", "posthog", "promptlayer", "scorecard",
    "sentry_sdk", "traceloop", "trulens", "unittest", "wandb", "weave",
})
# fmt: on
"""Packages that can read what calls send and receive: refused around any method, and as a class."""


@dataclass(frozen=True, slots=True)
class SeesNoBodies:
    """A wrapper that was shown to see only the address, status and time of a call.

    Attributes:
      module: its module, or a package of such modules.
      place: where that holds.
      distribution: who ships it.
      since: the lowest version that is allowed.
      below: the lowest version that is not allowed any more.
      evidence: what shows it, and with which version.
    """

    module: str
    place: Place
    distribution: str
    since: tuple[int, ...]
    below: tuple[int, ...]
    evidence: str


_SPANS = "canaries in bodies of calls that succeed, fail or break off are in no span and no metric"
ALLOWED = (
    SeesNoBodies(
        "opentelemetry.instrumentation.httpx",
        "http",
        "opentelemetry-instrumentation-httpx",
        (0, 66),
        (0, 67),
        f"0.66b1: {_SPANS}",
    ),
    SeesNoBodies(
        "opentelemetry.instrumentation.requests",
        "http",
        "opentelemetry-instrumentation-requests",
        (0, 66),
        (0, 67),
        f"0.66b1: {_SPANS}",
    ),
    SeesNoBodies(
        "sentry_sdk",
        "http",
        "sentry-sdk",
        (2, 75),
        (3,),
        "2.75.0: canaries in bodies are in no span and no event, with send_default_pii and max_request_body_size too",
    ),
    SeesNoBodies(
        "accelerate",
        "torch",
        "accelerate",
        (1, 15),
        (2,),
        "1.15.0: moves weights and inputs; its hook objects are judged",
    ),
    SeesNoBodies("peft", "torch", "peft", (0, 21), (1,), "0.21.2: adds what the adapter computes, and keeps nothing"),
)
"""What may stand before a private call, and why; of `torch` and `transformers` themselves any code may.

Not here: OpenTelemetry's urllib3 instrumentation, whose metrics hold the size of each body, and Datadog's of httpx,
which hands bodies to whoever subscribes.
"""

SHOWING = frozenset({
    "request_hook", "response_hook", "async_request_hook", "async_response_hook",
    "captured_request_headers", "captured_response_headers",
})  # fmt: skip
"""Options of such wrappers that show bodies, or in headers their size: with one of them set they are refused."""

_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_lock = threading.Lock()
_named: tuple[str, ...] = ()


def allow_wrappers(*modules: str) -> None:
    """Names modules whose wrappers may stand before private calls of this process, on the operator's word.

    For wrappers that are unknown here and that read no request and no answer. Models and engines that are built after
    this call accept them. Every ledger that private work is paid from in this process keeps the names, and its reports
    show them. A name stays until the process ends; other processes, such as workers, name their own.

    Args:
      modules: as errors show them, such as "package.module"; a package stands for its modules.

    Raises:
      ConfigurationError: a name is no module's, or that of a known recorder, which can read what it wraps.

    >>> allow_wrappers()
    """
    global _named  # noqa: PLW0603  one process has one list
    for name in modules:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigurationError(f"allow_wrappers: expected names such as 'package.module', found {name!r}")
        if name.partition(".")[0] in RECORDERS:
            raise ConfigurationError(
                f"allow_wrappers: expected wrappers that read no bodies, found {name!r}, which can record calls; "
                "make private calls in a process without it"
            )
    with _lock:
        _named = tuple(sorted({*_named, *modules}))


def allowed_wrappers() -> tuple[str, ...]:
    """Returns the names that the operator has given so far, sorted."""
    return _named


def is_within(module: str, names: Sequence[str]) -> bool:
    """Whether a module is one of those named, or stands in a package of that name."""
    return any(module == name or module.startswith(f"{name}.") for name in names)


def is_shown(module: str, place: Place | None) -> bool:
    """Whether the version installed of a module was shown to see no bodies at a place."""
    return any(
        rule.place == place
        and is_within(module, [rule.module])
        and rule.since <= _version(rule.distribution) < rule.below
        for rule in ALLOWED
    )


@functools.cache
def _version(distribution: str) -> tuple[int, ...]:
    """Returns the release numbers of a distribution; () where it is not installed, or its version is none."""
    try:
        found = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ()
    release = re.match(r"\d+(\.\d+)*", found)
    return tuple(map(int, release.group().split("."))) if release else ()


__all__ = [
    "ALLOWED",
    "RECORDERS",
    "SHOWING",
    "SeesNoBodies",
    "allow_wrappers",
    "allowed_wrappers",
    "is_shown",
    "is_within",
]
