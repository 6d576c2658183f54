"""A model provider on this machine: the shapes of OpenAI, vLLM, Anthropic and others, answered by the embedded model.

`with provider(dialect="vllm") as served:` gives `served.url` (what goes into `base_url`), the requests received so far
(`served.received`), and `served.script(...)`, which puts faults in the place of answers. No key is asked for. What is
answered is in `loopback_answers`, `loopback_decisions`, `loopback_messages` and `loopback_formats`.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.loopback_answers import (
    Dialect,
    Manners,
    RejectedError,
    chat,
    chat_chunks,
    completion,
    completion_chunks,
    models,
)
from tests.loopback_decisions import decisions
from tests.loopback_formats import answer_to
from tests.loopback_messages import message_events, messages

LISTS: Mapping[str, Callable[[Manners], Any]] = {"/v1/models": models}
ANSWERS: Mapping[str, Callable[[Any, Manners], Any]] = {
    "/v1/chat/completions": chat,
    "/v1/completions": completion,
    "/v1/decisions": decisions,
    "/v1/messages": messages,
}
STREAMS: Mapping[str, Callable[[Any, Manners], Iterator[Any]]] = {
    "/v1/chat/completions": chat_chunks,
    "/v1/completions": completion_chunks,
    "/v1/messages": message_events,
}


@dataclass(frozen=True)
class Received:
    """One request: its headers in lower case, its body as sent and as read."""

    method: str
    path: str
    headers: Mapping[str, str]
    raw: bytes
    body: Any


@dataclass(frozen=True)
class Fault:
    """What is done in the place of an answer."""

    status: int | None = None
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    delay: float = 0.0
    spoil: Callable[[bytes], bytes] = bytes
    hang_up: bool = False


Hook = Callable[[Received], Fault]


def rate_limited(*, retry_after: str = "0") -> Hook:
    """429, with the time to wait."""
    body = _error("Rate limit reached.", kind="rate_limit_error")
    return lambda request: Fault(429, body, {"retry-after": retry_after})


def server_error(*, status: int = 500) -> Hook:
    """500, or another of its kind."""
    return lambda request: Fault(status, _error("The server had an error.", kind="server_error"))


def slow(seconds: float) -> Hook:
    """The usual answer, late."""
    return lambda request: Fault(delay=seconds)


def echoing_400() -> Hook:
    """400 with the whole request in its message and headers, as some servers write it."""

    def fault(request: Received) -> Fault:
        text = request.raw.decode()
        shown = text.encode("ascii", "replace")[:2000].decode().replace("\n", " ")
        return Fault(400, _error(f"Could not read: {text}", kind="invalid_request_error"), {"x-request-echo": shown})

    return fault


def html(*, status: int = 200) -> Hook:
    """A page in the place of JSON, as a proxy in between would send it; the request is on it."""

    def fault(request: Received) -> Fault:
        page = f"<html><body><h1>Sign in</h1><pre>{request.raw.decode()}</pre></body></html>"
        return Fault(status, page.encode(), {"content-type": "text/html"})

    return fault


def huge(*, megabytes: int = 10) -> Hook:
    """A large body that repeats the request and has no answer in it."""

    def fault(request: Received) -> Fault:
        text = request.raw.decode()
        return Fault(200, json.dumps({"echo": text * (megabytes * 2**20 // len(text) + 1)}).encode())

    return fault


def truncated() -> Hook:
    """The first half of the usual answer, and no more."""
    return lambda request: Fault(spoil=lambda answer: answer[: len(answer) // 2])


def hang_up() -> Hook:
    """The connection is closed before an answer."""
    return lambda request: Fault(hang_up=True)


@dataclass
class _Rule:
    hook: Hook
    when: Callable[[Received], bool]
    left: int | None


class Provider:
    """A running provider; see `provider`."""

    def __init__(self, manners: Manners) -> None:
        self.manners = manners
        self.received: list[Received] = []
        self.root = ""
        self._rules: list[_Rule] = []
        self._lock = threading.Lock()
        self.ended = threading.Event()

    @property
    def url(self) -> str:
        """The address for `base_url`."""
        return f"{self.root}/v1"

    def script(self, hook: Hook, *, when: str | Callable[[Received], bool] = "", times: int | None = None) -> None:
        """Answers matching requests by a fault."""
        matches = when if callable(when) else (lambda request: when.encode() in request.raw)
        self._rules.append(_Rule(hook, matches, times))

    def clear(self) -> None:
        """Forgets the requests and the faults."""
        with self._lock:
            self.received.clear()
            self._rules.clear()

    def note(self, request: Received) -> Fault:
        """Keeps a request and says what is done with it."""
        with self._lock:
            self.received.append(request)
            for rule in self._rules:
                if rule.left != 0 and rule.when(request):
                    rule.left = None if rule.left is None else rule.left - 1
                    return rule.hook(request)
        return Fault()

    def would_be_late(self, raw: bytes) -> bool:
        """Whether the answer to a request of this body would be late if it came now."""
        request = Received("POST", "", {}, raw, _read(raw))
        rule = next((rule for rule in self._rules if rule.left != 0 and rule.when(request)), None)
        return rule is not None and rule.hook(request).delay > 0.0


@contextlib.contextmanager
def provider(
    *,
    dialect: Dialect = "openai",
    max_logprobs: int = 20,
    token_ids: bool = False,
    echo_prefix: bool = True,
    refuse: str = "",
    model: str = "loopback",
) -> Iterator[Provider]:
    """Runs a provider on a free port of this machine; the arguments are those of `Manners`."""
    served = Provider(Manners(dialect, max_logprobs, token_ids, echo_prefix, refuse, model))
    server = _Server(("127.0.0.1", 0), type("Bound", (_Handler,), {"served": served}))
    served.root = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield served
    finally:
        served.ended.set()
        server.shutdown()
        server.server_close()


class _Server(ThreadingHTTPServer):
    request_queue_size = 128  # of the usual 5, connections made at once are lost, and their clients wait for minutes


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body are two packets: the second would wait 40 ms
    served: Provider

    def do_GET(self) -> None:
        self._serve(b"")

    def do_POST(self) -> None:
        self._serve(self.rfile.read(int(self.headers.get("content-length", 0))))

    def _serve(self, raw: bytes) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = Received(self.command, self.path, headers, raw, _read(raw))
        fault = self.served.note(request)
        if fault.delay:
            self.served.ended.wait(fault.delay)
        if fault.hang_up:
            self.close_connection = True
        elif fault.status is not None:
            self._send(fault.status, fault.body, **fault.headers)
        else:
            self._answer(request, fault.spoil)

    def _answer(self, request: Received, spoil: Callable[[bytes], bytes]) -> None:
        try:
            content_type, body = _solve(request, self.served.manners)
        except RejectedError as error:
            self._send(400, _error(str(error), kind="invalid_request_error", param=error.param))
        except LookupError:
            self._send(404, _error(f"Unknown request: {request.method} {request.path}", kind="not_found_error"))
        else:
            self._send(200, spoil(body), **{"content-type": content_type})

    def _send(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response_only(status)
        for name, value in {"content-type": "application/json", **headers, "content-length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # a caller that gave up waiting
            self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Writes nothing: a test that looks at logs would see the prompts."""


def _solve(request: Received, manners: Manners) -> tuple[str, bytes]:
    """Returns the content type and the body of the usual answer."""
    if request.method == "GET":
        return "application/json", json.dumps(LISTS[request.path](manners)).encode()
    if isinstance(request.body, dict) and (elsewhere := answer_to(request.path)) is not None:
        return elsewhere(request.body, manners)
    is_stream = isinstance(request.body, dict) and bool(request.body.get("stream"))
    answer = (STREAMS if is_stream else ANSWERS)[request.path]
    if not isinstance(request.body, dict):
        raise RejectedError("Expected a JSON object.")
    if not is_stream:
        return "application/json", json.dumps(answer(request.body, manners)).encode()
    events = [json.dumps(chunk) for chunk in answer(request.body, manners)]
    if request.path == "/v1/messages":
        text = "".join(f"event: {json.loads(event)['type']}\ndata: {event}\n\n" for event in events)
    else:
        text = "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"])
    return "text/event-stream", text.encode()


def _read(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return None


def _error(message: str, *, kind: str, param: str | None = None) -> bytes:
    return json.dumps({"error": {"message": message, "type": kind, "param": param, "code": None}}).encode()
