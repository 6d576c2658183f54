"""What the loopback provider answers in the formats of other providers: Ollama, Gemini, Bedrock, TGI, OpenRouter.

Shapes are those of the providers' references and of the SDKs that read them; the numbers are the embedded model's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, convert_to_messages

from langchain_dpicl.serving import flatten_messages
from tests.loopback_answers import Body, Manners, RejectedError, Written, chat, count, engine, write

Answer = tuple[str, bytes]
"""Content type and body."""

_JSON, _LINES = "application/json", "application/x-ndjson"
_MOST_TOPS = 20


def answer_to(path: str) -> Callable[[Body, Manners], Answer] | None:
    """Returns what answers at a path in one of these formats; None for any other path."""
    place = path.partition("?")[0]
    return next((answer for ending, answer in _ENDINGS.items() if place.endswith(ending)), None)


def _ollama_chat(body: Body, manners: Manners) -> Answer:
    """POST /api/chat; a trailing assistant message is continued."""
    messages = convert_to_messages(body["messages"])
    written = _of_ollama(flatten_messages(messages), body)
    return _LINES, _lines(_ollama_parts(written, body, manners, lambda text: {"message": _assistant(text)}))


def _ollama_generate(body: Body, manners: Manners) -> Answer:
    """POST /api/generate."""
    written = _of_ollama(body["prompt"], body)
    return _LINES, _lines(_ollama_parts(written, body, manners, lambda text: {"response": text}))


def _of_ollama(prompt: str, body: Body) -> Written:
    options = body.get("options") or {}
    return write(prompt, {"max_tokens": options.get("num_predict"), "stop": options.get("stop")}, default=64)


def _ollama_parts(written: Written, body: Body, manners: Manners, say: Callable[[str], Body]) -> Iterator[Body]:
    """Yields an object per token and a last one without text, or one object for all of it."""
    top = body.get("top_logprobs") or 0
    if not 0 <= top <= _MOST_TOPS:
        raise RejectedError("top_logprobs must be between 0 and 20")
    wants = bool(body.get("logprobs")) and manners.dialect != "ignores"
    head = {"model": body["model"], "created_at": "2026-01-01T00:00:00Z"}
    places = [_ollama_place(step.token, step.row, top) for step in written.steps]
    end = {"done": True, "done_reason": written.finish_reason, "prompt_eval_count": written.num_read}
    end["eval_count"] = count(written)
    if not body.get("stream", True):
        yield {**head, **say(written.text), **end, **({"logprobs": places} if wants else {})}
        return
    for step, place in zip(written.steps, places, strict=True):
        yield {**head, **say(step.text), "done": False, **({"logprobs": [place]} if wants else {})}
    yield {**head, **say(""), **end}


def _ollama_place(token: int, row: np.ndarray, top: int) -> Body:
    ranked = np.argsort(-row, kind="stable")[:top]
    return {**_ollama_entry(token, row), "top_logprobs": [_ollama_entry(int(other), row) for other in ranked]}


def _ollama_entry(token: int, row: np.ndarray) -> Body:
    raw = engine().token_bytes(token)
    return {"token": raw.decode("utf-8", "replace"), "logprob": math.log(row[token]), "bytes": list(raw)}


def _gemini(body: Body, manners: Manners) -> Answer:
    """POST /v1beta/models/NAME:generateContent."""
    config = body.get("generationConfig") or {}
    roles = {"user": HumanMessage, "model": AIMessage}
    messages: list[BaseMessage] = [
        roles[content.get("role", "user")]("".join(part["text"] for part in content["parts"]))
        for content in body["contents"]
    ]
    limits = {"max_tokens": config.get("maxOutputTokens"), "stop": config.get("stopSequences")}
    written = write(flatten_messages(messages), limits, default=64)
    candidate: Body = {"content": {"role": "model", "parts": [{"text": written.text}]}, "index": 0}
    candidate["finishReason"] = "MAX_TOKENS" if written.finish_reason == "length" else "STOP"
    if config.get("responseLogprobs"):
        tops = [np.argsort(-step.row, kind="stable")[: config.get("logprobs") or 0] for step in written.steps]
        candidate["logprobsResult"] = {
            "chosenCandidates": [_gemini_entry(step.token, step.row) for step in written.steps],
            "topCandidates": [
                {"candidates": [_gemini_entry(int(token), step.row) for token in top]}
                for step, top in zip(written.steps, tops, strict=True)
            ],
        }
    usage = {"promptTokenCount": written.num_read, "candidatesTokenCount": count(written)}
    return _json({"candidates": [candidate], "usageMetadata": usage, "modelVersion": manners.model})


def _gemini_entry(token: int, row: np.ndarray) -> Body:
    text = engine().token_bytes(token).decode("utf-8", "replace")
    return {"token": text, "tokenId": token, "logProbability": math.log(row[token])}


def _bedrock(body: Body, manners: Manners) -> Answer:
    """POST /model/NAME/converse."""
    roles = {"user": HumanMessage, "assistant": AIMessage}
    messages: list[BaseMessage] = [
        roles[message["role"]]("".join(block["text"] for block in message["content"])) for message in body["messages"]
    ]
    config = body.get("inferenceConfig") or {}
    limits = {"max_tokens": config.get("maxTokens"), "stop": config.get("stopSequences")}
    written = write(flatten_messages(messages), limits, default=64)
    usage = {"inputTokens": written.num_read, "outputTokens": count(written)}
    return _json(
        {
            "output": {"message": {"role": "assistant", "content": [{"text": written.text}]}},
            "stopReason": "max_tokens" if written.finish_reason == "length" else "end_turn",
            "usage": {**usage, "totalTokens": sum(usage.values())},
            "metrics": {"latencyMs": 1},
        }
    )


def _tgi(body: Body, manners: Manners) -> Answer:
    """POST / and /generate of Text Generation Inference."""
    parameters = body.get("parameters") or {}
    temperature = parameters.get("temperature")
    if temperature is not None and temperature <= 0:
        raise RejectedError("Input validation error: `temperature` must be strictly positive")
    limits = {"max_tokens": parameters.get("max_new_tokens"), "stop": parameters.get("stop")}
    return _json([{"generated_text": write(body["inputs"], limits, default=64).text}])


def _openrouter(body: Body, manners: Manners) -> Answer:
    """POST /api/v1/chat/completions: OpenAI's shape with fields of its own."""
    answer = chat(body, manners)
    answer["choices"][0]["native_finish_reason"] = answer["choices"][0]["finish_reason"]
    return _json({**answer, "provider": "loopback", "system_fingerprint": None})


def _openai_like(body: Body, manners: Manners) -> Answer:
    """POST of OpenAI's chat body elsewhere: Azure, Groq, Fireworks."""
    return _json(chat(body, manners))


_ENDINGS: Mapping[str, Callable[[Body, Manners], Answer]] = {
    "/api/chat": _ollama_chat,
    "/api/generate": _ollama_generate,
    ":generateContent": _gemini,
    "/converse": _bedrock,
    "/generate": _tgi,
    "/tgi": _tgi,
    "/api/v1/chat/completions": _openrouter,
    "/deployment/chat/completions": _openai_like,
    "/openai/v1/chat/completions": _openai_like,
    "/fireworks/chat/completions": _openai_like,
    "/fireworks/v1/chat/completions": _openai_like,
}
"""By the end of the path; the first that fits counts."""


def _assistant(text: str) -> Body:
    return {"role": "assistant", "content": text}


def _json(answer: Any) -> Answer:
    return _JSON, json.dumps(answer).encode()


def _lines(parts: Iterator[Body]) -> bytes:
    return "".join(f"{json.dumps(part)}\n" for part in parts).encode()
