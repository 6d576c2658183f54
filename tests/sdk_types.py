"""Whether a recorded body has the shape of the official SDKs' types.

The SDKs check nothing themselves: they build answers without validation and send requests as they are. Read by
pydantic, their types still let much through, so these checks are made on top:

- request types are dicts that ignore unknown keys: unknown keys are forbidden here, but for those a server adds;
- lists in requests are `Iterable`, which pydantic reads only when asked: every list is read to its end here;
- response models keep unknown keys and turn numbers in text into numbers: unknown keys are forbidden here, types strict.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, Literal

import anthropic.types
import anthropic.types.message_create_params as messages
import openai.types.chat.completion_create_params as chat_params
import openai.types.completion_create_params as completion_params
from openai.types import Completion, Decision
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.decision_create_params import DecisionCreateParams
from pydantic import TypeAdapter

REQUESTS: Mapping[tuple[str, bool], Any] = {
    ("/v1/chat/completions", False): chat_params.CompletionCreateParamsNonStreaming,
    ("/v1/chat/completions", True): chat_params.CompletionCreateParamsStreaming,
    ("/v1/completions", False): completion_params.CompletionCreateParamsNonStreaming,
    ("/v1/completions", True): completion_params.CompletionCreateParamsStreaming,
    ("/v1/messages", False): messages.MessageCreateParamsNonStreaming,
    ("/v1/messages", True): messages.MessageCreateParamsStreaming,
    ("/v1/decisions", False): DecisionCreateParams,
}
RESPONSES: Mapping[tuple[str, bool], Any] = {
    ("/v1/chat/completions", False): ChatCompletion,
    ("/v1/chat/completions", True): ChatCompletionChunk,
    ("/v1/completions", False): Completion,
    ("/v1/completions", True): Completion,
    ("/v1/messages", False): anthropic.types.Message,
    ("/v1/messages", True): anthropic.types.RawMessageStreamEvent,
    ("/v1/decisions", False): Decision,
}


def check_request(path: str, body: Mapping[str, Any], *, added: Iterable[str] = ()) -> None:
    """Raises ValidationError where a request is not what the SDK's types say; `added` names keys of a server's own."""
    known = {name: value for name, value in body.items() if name not in set(added)}
    _read(_adapter("request", path, bool(body.get("stream"))).validate_python(known, extra="forbid"))


def check_response(path: str, body: Any, *, is_stream: bool = False, added: Iterable[str] = ()) -> None:
    """Raises ValidationError where a response, or one event of a stream, is not what the SDK's types say."""
    adapter = _adapter("response", path, is_stream)
    adapter.validate_python(_without(body, set(added)), strict=True, extra="forbid")


@cache
def _adapter(side: Literal["request", "response"], path: str, is_stream: bool) -> TypeAdapter[Any]:
    """Kept: it takes long to make, and has to outlive the lists that it leaves unread."""
    return TypeAdapter((REQUESTS if side == "request" else RESPONSES)[path, is_stream])


def _read(value: Any) -> None:
    """Reads lists that pydantic left unread."""
    if isinstance(value, Mapping):
        for item in value.values():
            _read(item)
    elif isinstance(value, Iterable) and not isinstance(value, str | bytes):
        for item in value:
            _read(item)


def _without(value: Any, names: set[str]) -> Any:
    """Returns a body without the keys that a server adds, written as the path to them: "choices.logprobs"."""
    if isinstance(value, list):
        return [_without(item, names) for item in value]
    if not isinstance(value, dict):
        return value
    deeper = {name: {path.partition(".")[2] for path in names if path.startswith(f"{name}.")} for name in value}
    return {name: _without(item, deeper[name]) for name, item in value.items() if name not in names}
