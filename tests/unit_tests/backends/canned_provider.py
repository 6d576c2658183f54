"""A provider on this machine that gives one canned answer per endpoint: OpenAI's three and Anthropic's messages."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.canary import VOTE
from tests.scripted_models import chat_payload, legacy_payload

TOPS = {VOTE: 0.5, " plain": 0.25}
_BASE = {
    "id": "1",
    "created": 1,
    "model": "m",
    "usage": {"prompt_tokens": 7, "completion_tokens": 1, "total_tokens": 8},
}
ANSWERS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        **_BASE,
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "finish_reason": "length",
                "logprobs": chat_payload(TOPS),
                "message": {"role": "assistant", "content": VOTE},
            }
        ],
    },
    "/v1/completions": {
        **_BASE,
        "object": "text_completion",
        "choices": [{"index": 0, "finish_reason": "length", "text": VOTE, "logprobs": legacy_payload(TOPS)}],
    },
    "/v1/messages": {
        "id": "1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [{"type": "text", "text": VOTE}],
        "stop_reason": "end_turn",
        "usage": {"input_tokens": 7, "output_tokens": 1},
    },
    "/v1/decisions": {
        "model": "m",
        "answers": [
            {
                "type": "choice",
                "name": "label",
                "choice": VOTE,
                "confidence": 0.5,
                "probabilities": [{"value": VOTE, "probability": 0.75}, {"value": "plain", "probability": 0.25}],
            }
        ],
        "usage": {"input_tokens": 7, "output_tokens": 1, "total_tokens": 8},
    },
}


class _Handler(BaseHTTPRequestHandler):
    bodies: list[str]

    def do_POST(self) -> None:
        self.bodies.append(self.rfile.read(int(self.headers["content-length"])).decode())
        body = json.dumps(ANSWERS[self.path]).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


class Provider:
    """Its address, the bodies it received, and stock clients that call it."""

    def __init__(self, url: str, bodies: list[str]) -> None:
        self.url = url
        self.bodies = bodies
        common: dict[str, Any] = {"model": "m", "api_key": "none", "max_retries": 0}
        self.models: dict[str, Callable[[], Any]] = {
            "ChatOpenAI": lambda: _made("langchain_openai.ChatOpenAI", base_url=f"{url}/v1", **common),
            "OpenAI": lambda: _made("langchain_openai.OpenAI", base_url=f"{url}/v1", **common),
            "OpenAIDecisions": lambda: _made(
                "langchain_openai.decisions.OpenAIDecisions", base_url=f"{url}/v1", **common
            ),
            "ChatAnthropic": lambda: _made("langchain_anthropic.ChatAnthropic", base_url=url, **common),
        }


def _made(path: str, **options: Any) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(__import__(module, fromlist=[name]), name)(**options)


@contextlib.contextmanager
def provider() -> Iterator[Provider]:
    """Runs the provider on a free port of this machine."""
    bodies: list[str] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (_Handler,), {"bodies": bodies}))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield Provider(f"http://127.0.0.1:{server.server_port}", bodies)
    finally:
        server.shutdown()
        server.server_close()
