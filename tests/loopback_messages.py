"""What the loopback provider answers to POST /v1/messages: text and no logprobs, in the shape of Anthropic's API.

As the newest models there, it rejects a trailing assistant message rather than go on writing it.
"""

from __future__ import annotations

from collections.abc import Iterator

from langchain_core.messages import AIMessage, BaseMessage, convert_to_messages

from langchain_dpicl.serving import flatten_messages
from tests.loopback_answers import Body, Manners, RejectedError, Written, count, write


def messages(body: Body, manners: Manners) -> Body:
    """Answers in one piece."""
    read = _messages(body)
    if manners.refuse and any(manners.refuse in message.text for message in read):
        return _message([], manners, stop_reason="refusal", usage={"input_tokens": 1, "output_tokens": 1})
    written = _written(body, read)
    block = {"type": "text", "text": written.text}
    usage = {"input_tokens": written.num_read, "output_tokens": count(written)}
    return _message([block], manners, stop_reason=_reason(written), usage=usage)


def message_events(body: Body, manners: Manners) -> Iterator[Body]:
    """Answers the same request piece by piece."""
    written = _written(body, _messages(body))
    usage = {"input_tokens": written.num_read, "output_tokens": 0}
    yield {"type": "message_start", "message": _message([], manners, stop_reason=None, usage=usage)}
    yield {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    for step in written.steps:
        yield {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": step.text}}
    yield {"type": "content_block_stop", "index": 0}
    ended = {"stop_reason": _reason(written), "stop_sequence": None}
    yield {"type": "message_delta", "delta": ended, "usage": {"output_tokens": count(written)}}
    yield {"type": "message_stop"}


def _messages(body: Body) -> list[BaseMessage]:
    if not isinstance(body.get("messages"), list) or not body["messages"]:
        raise RejectedError("messages: at least one message is required")
    if not isinstance(body.get("max_tokens"), int):
        raise RejectedError("max_tokens: Field required")
    found = convert_to_messages(body["messages"])
    if isinstance(found[-1], AIMessage):
        raise RejectedError("This model does not support assistant message prefill.")
    return found


def _written(body: Body, read: list[BaseMessage]) -> Written:
    return write(flatten_messages(read), {**body, "stop": body.get("stop_sequences")}, default=16)


def _reason(written: Written) -> str:
    return "max_tokens" if written.finish_reason == "length" else "end_turn"


def _message(content: list[Body], manners: Manners, *, stop_reason: str | None, usage: Body) -> Body:
    return {
        "id": "msg_loopback",
        "type": "message",
        "role": "assistant",
        "model": manners.model,
        "content": content,
        "stop_reason": stop_reason,
        "stop_sequence": None,
        "usage": usage,
    }
