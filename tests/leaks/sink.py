"""A provider on this machine for the stock clients: OpenAI's and Anthropic's shapes."""

from __future__ import annotations

import functools
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.canary import RECORD, VOTE
from tests.leaks.models import answer
from tests.scripted_models import chat_payload, legacy_payload


class _Provider(BaseHTTPRequestHandler):
    bodies: list[str]

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers["content-length"])).decode()
        tops = answer(asked)
        self.bodies.append(asked)
        if self.path.startswith("/fails/") and RECORD in asked:
            # What a content filter says: what it was asked, and what it withholds.
            self._send(400, {"error": {"type": "invalid_request_error", "message": f"{asked} {VOTE}"}})
        elif json.loads(asked).get("stream"):
            self._send_stream(tops, self._spoiled(asked))
        else:
            said = {**self._whole(tops, asked), **self._spoiled(asked)}
            self.bodies.append(json.dumps(said))
            self._send(200, said)

    def _spoiled(self, asked: str) -> dict[str, Any]:
        is_meant = self.path.startswith("/spoils/") and RECORD in asked
        return {"system_fingerprint": {"q": f"{RECORD}, {VOTE}"}} if is_meant else {}

    def _whole(self, tops: dict[str, float], asked: str) -> dict[str, Any]:
        token = next(iter(tops))
        base = {
            "id": "1",
            "created": 1,
            "model": "m",
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        }
        if self.path.endswith("/messages"):
            said = [{"type": "text", "text": token}]
            usage = {"input_tokens": 1, "output_tokens": 1}
            return {
                **base,
                "type": "message",
                "role": "assistant",
                "content": said,
                "stop_reason": "end_turn",
                "usage": usage,
            }
        if self.path.endswith("/decisions"):
            return {**base, "model": token, "answers": [_decided(asked)]}
        if self.path.endswith("/chat/completions"):
            choice = {"index": 0, "finish_reason": "length", "logprobs": chat_payload(tops)}
            choice["message"] = {"role": "assistant", "content": token}
            return {**base, "object": "chat.completion", "choices": [choice]}
        # A completion request may hold several prompts, each with an answer of its own.
        prompts = json.loads(asked)["prompt"]
        choice = {"finish_reason": "length", "text": token, "logprobs": legacy_payload(tops)}
        choices = [{**choice, "index": index} for index in range(len(prompts) if isinstance(prompts, list) else 1)]
        return {**base, "object": "text_completion", "choices": choices}

    def _send_stream(self, tops: dict[str, float], extra: dict[str, Any]) -> None:
        token = next(iter(tops))
        if self.path.endswith("/messages"):
            begin = {
                "id": "1",
                "type": "message",
                "role": "assistant",
                "model": "m",
                "content": [],
                "stop_reason": None,
            }
            begin["usage"] = {"input_tokens": 1, "output_tokens": 1}
            events: list[dict[str, Any]] = [
                {"type": "message_start", "message": begin},
                {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
                {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": token}},
                {"type": "content_block_stop", "index": 0},
                {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 1}},
                {"type": "message_stop"},
            ]
            lines = [f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events]
        else:
            is_chat = self.path.endswith("/chat/completions")
            said: dict[str, Any] = {"delta": {"role": "assistant", "content": token}} if is_chat else {"text": token}
            choice = {"index": 0, "finish_reason": "length", "logprobs": None, **said}
            kind = "chat.completion.chunk" if is_chat else "text_completion"
            chunk = {"id": "1", "created": 1, "model": "m", "object": kind, "choices": [choice], **extra}
            lines = [f"data: {json.dumps(chunk)}\n\n", "data: [DONE]\n\n"]
        self.bodies.append("".join(lines))
        self._send_bytes(200, "text/event-stream", "".join(lines).encode())

    def _send(self, status: int, said: dict[str, Any]) -> None:
        self._send_bytes(status, "application/json", json.dumps(said).encode())

    def _send_bytes(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


def _decided(asked: str) -> dict[str, Any]:
    """The same probability for every choice of the first question."""
    question = json.loads(asked)["questions"][0]
    values = [choice["value"] for choice in question["choices"]]
    listed = [{"value": value, "probability": 1 / len(values)} for value in values]
    return {"type": "choice", "name": question["name"], "choice": values[0], "confidence": 0, "probabilities": listed}


@functools.cache
def _server() -> tuple[str, list[str]]:
    """One server for the life of the process: clients keep what they built for its address."""
    bodies: list[str] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Provider", (_Provider,), {"bodies": bodies}))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}", bodies


def provider(mode: str = "plain") -> tuple[str, list[str]]:
    """Returns a provider's address, and the bodies that come and go there from now on."""
    address, bodies = _server()
    bodies.clear()
    return f"{address}/{mode}", bodies
