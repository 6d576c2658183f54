"""What the loopback provider answers: request bodies to response bodies, by the embedded model.

The shapes are those that OpenAI documents and that vLLM writes; the numbers are the embedded model's own, and always
the same: the likeliest token is taken, whatever the temperature.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, convert_to_messages

from langchain_dpicl.backends.base import cut_at_stop
from langchain_dpicl.backends.embedded import EmbeddedModel, Induction
from langchain_dpicl.serving import flatten_messages

Dialect = Literal["openai", "vllm", "ignores"]
Body = dict[str, Any]

REFUSAL = "I can't help with that."
_CREATED = 1_700_000_000
_END = {"openai": "<|endoftext|>", "vllm": "</s>", "ignores": "</s>"}


class RejectedError(Exception):
    """A request that a server answers with 400 and a message."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True)
class Manners:
    """How one server behaves."""

    dialect: Dialect = "openai"
    max_logprobs: int = 20
    token_ids: bool = False
    echo_prefix: bool = True
    refuse: str = ""
    model: str = "loopback"


@dataclass(frozen=True)
class Step:
    """One written token: its text, its id and its row; an empty text where a character is not complete yet."""

    text: str
    token: int
    row: np.ndarray


@dataclass(frozen=True)
class Written:
    """One generated text."""

    steps: tuple[Step, ...]
    text: str
    finish_reason: Literal["stop", "length"]
    num_read: int


@cache
def engine() -> EmbeddedModel:
    """The one model of this process; it takes its answers from the examples, so that few tokens are likely."""
    return EmbeddedModel(induction=Induction(answer_tilt=0.0, answer_prior=1e-6))


def chat(body: Body, manners: Manners) -> Body:
    """Answers POST /v1/chat/completions."""
    asked = _asked_of_chat(body, manners)
    messages, continued = _messages(body, manners)
    if manners.refuse and any(manners.refuse in message.text for message in messages):
        refusal = {"role": "assistant", "content": None, "refusal": REFUSAL}
        choice = {"index": 0, "message": refusal, "logprobs": None, "finish_reason": "stop"}
        return _envelope("chat.completion", "chatcmpl", [choice], manners, read=1, written=1)
    prefix = messages[-1].text if continued and manners.echo_prefix else ""
    written = write(_prompt(messages, continued=continued), body, default=64)
    message = {"role": "assistant", "content": prefix + written.text, "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": written.finish_reason}
    choice["logprobs"] = _chat_logprobs(written.steps, asked, _with_ids(body, manners))
    if manners.dialect == "ignores":
        del choice["logprobs"]
    return _envelope("chat.completion", "chatcmpl", [choice], manners, read=written.num_read, written=count(written))


def chat_chunks(body: Body, manners: Manners) -> Iterator[Body]:
    """Answers the same request piece by piece."""
    asked = _asked_of_chat(body, manners)
    messages, continued = _messages(body, manners)
    written = write(_prompt(messages, continued=continued), body, default=64)

    def chunk(delta: Body, logprobs: Any = None, finish_reason: str | None = None) -> Body:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return {**_head("chat.completion.chunk", "chatcmpl", manners), "choices": [choice]}

    yield chunk({"role": "assistant", "content": "", "refusal": None})
    for step in written.steps:
        yield chunk({"content": step.text}, _chat_logprobs([step], asked, _with_ids(body, manners)))
    yield chunk({}, finish_reason=written.finish_reason)
    if (body.get("stream_options") or {}).get("include_usage"):
        usage = _usage(written.num_read, count(written))
        yield {**_head("chat.completion.chunk", "chatcmpl", manners), "choices": [], "usage": usage}


def completion(body: Body, manners: Manners) -> Body:
    """Answers POST /v1/completions, for one prompt or a list."""
    asked = _asked_of_completion(body, manners)
    choices, read, written = [], 0, 0
    for index, prompt in enumerate(_prompts(body)):
        found = write(prompt, body, default=16)
        choice = {"text": found.text, "index": index, "logprobs": None, "finish_reason": found.finish_reason}
        choice["logprobs"] = _legacy_logprobs(found.steps, asked, _with_ids(body, manners))
        choices.append(choice)
        read, written = read + found.num_read, written + count(found)
    return _envelope("text_completion", "cmpl", choices, manners, read=read, written=written)


def completion_chunks(body: Body, manners: Manners) -> Iterator[Body]:
    """Answers the same request piece by piece."""
    asked = _asked_of_completion(body, manners)
    for index, prompt in enumerate(_prompts(body)):
        found = write(prompt, body, default=16)
        for step in found.steps:
            logprobs = _legacy_logprobs([step], asked, _with_ids(body, manners))
            choice = {"text": step.text, "index": index, "logprobs": logprobs, "finish_reason": None}
            yield {**_head("text_completion", "cmpl", manners), "choices": [choice]}
        last = {"text": "", "index": index, "logprobs": None, "finish_reason": found.finish_reason}
        yield {**_head("text_completion", "cmpl", manners), "choices": [last]}


def models(manners: Manners) -> Body:
    """Answers GET /v1/models."""
    model = {"id": manners.model, "object": "model", "created": _CREATED, "owned_by": "loopback"}
    return {"object": "list", "data": [model]}


def _asked_of_chat(body: Body, manners: Manners) -> int | None:
    """Returns how many top tokens are wanted at each position; None: no logprobs."""
    if not isinstance(body.get("messages"), list) or not body["messages"]:
        raise RejectedError("Missing required parameter: 'messages'.", param="messages")
    wanted, top = bool(body.get("logprobs")), body.get("top_logprobs")
    if top is not None and not wanted:
        raise RejectedError("'top_logprobs' is only allowed when 'logprobs' is true.", param="top_logprobs")
    if manners.dialect == "ignores" or not wanted:
        return None
    return _limited(top or 0, 20, manners, name="top_logprobs")


def _asked_of_completion(body: Body, manners: Manners) -> int | None:
    asked = body.get("logprobs")
    if manners.dialect == "ignores" or asked is None:
        return None
    return _limited(asked, 5, manners, name="logprobs")


def _limited(asked: int, limit: int, manners: Manners, *, name: str) -> int:
    """Returns the number of top tokens, or rejects it; -1 and `--max-logprobs -1` are vLLM's."""
    size = len(engine().vocabulary())
    if manners.dialect == "vllm":
        limit = size if manners.max_logprobs == -1 else manners.max_logprobs
        asked = size if asked == -1 else asked
        if asked > limit:
            message = f"Requested sample logprobs of {asked}, which is greater than max allowed: {limit}"
            raise RejectedError(message, param="logprobs")
    if not 0 <= asked <= limit:
        raise RejectedError(f"Invalid '{name}': expected a value from 0 to {limit}, got {asked}.", param=name)
    return asked


def _messages(body: Body, manners: Manners) -> tuple[list[BaseMessage], bool]:
    """Returns the messages, and whether the last one is continued rather than answered."""
    messages = convert_to_messages(body["messages"])
    if manners.dialect != "vllm":
        return messages, False
    goes_on = bool(body.get("continue_final_message"))
    if goes_on and body.get("add_generation_prompt", True):
        raise RejectedError("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
    return messages, goes_on and isinstance(messages[-1], AIMessage)


def _prompt(messages: Sequence[BaseMessage], *, continued: bool) -> str:
    """Returns the text to go on from; a new message after the assistant's starts with the user's last words again."""
    prompt = flatten_messages(messages)
    if continued or not isinstance(messages[-1], AIMessage):
        return prompt
    asked = [message.text for message in messages if isinstance(message, HumanMessage)]
    return f"{prompt}\n\n{asked[-1] if asked else ''}\n"


def _prompts(body: Body) -> list[str]:
    prompts = body.get("prompt")
    listed = [prompts] if isinstance(prompts, str) else prompts
    if not isinstance(listed, list) or not listed or not all(isinstance(prompt, str) for prompt in listed):
        raise RejectedError("Invalid 'prompt': expected a text or a list of texts.", param="prompt")
    return listed


def write(prompt: str, body: Body, *, default: int) -> Written:
    """Writes until the end, a stop string or the limit."""
    model, decoder = engine(), codecs.getincrementaldecoder("utf-8")("replace")
    limit = body.get("max_completion_tokens") or body.get("max_tokens") or default
    stop = [body["stop"]] if isinstance(body.get("stop"), str) else body.get("stop") or []
    steps: list[Step] = []
    reason: Literal["stop", "length"] = "length"
    for tokens, rows in model.generate([prompt]):
        token = int(tokens[0])
        if token == model.eos:
            reason = "stop"
            break
        steps.append(Step(decoder.decode(model.token_bytes(token)), token, rows[0]))
        text = "".join(step.text for step in steps)
        if cut_at_stop(text, stop) != text:
            reason = "stop"
            break
        if len(steps) >= limit:
            break
    text = cut_at_stop("".join(step.text for step in steps), stop)
    return Written(tuple(steps), text, reason, model.count_tokens(prompt))


def count(written: Written) -> int:
    """Returns how many tokens were written, the end included."""
    return len(written.steps) + (written.finish_reason == "stop")


def _with_ids(body: Body, manners: Manners) -> Manners:
    """The server's manners with what this request asks for."""
    asked = body.get("return_tokens_as_token_ids")
    return manners if asked is None else Manners(**{**vars(manners), "token_ids": bool(asked)})


def _ranked(row: np.ndarray, number: int) -> list[int]:
    return [int(token) for token in np.argsort(-row, kind="stable")[:number]]


def _entry(token: int, row: np.ndarray, manners: Manners) -> Body:
    """One token of a chat's logprobs; vLLM reports the bytes of what it shows, not of what the token is."""
    shown = _shown(token, manners)
    raw = list(engine().token_bytes(token)) or None if manners.dialect == "openai" else list(shown.encode())
    return {"token": shown, "bytes": raw, "logprob": math.log(row[token])}


def _shown(token: int, manners: Manners) -> str:
    """Returns how a token is spelled; single bytes of a longer character have two usual placeholders."""
    if manners.token_ids and manners.dialect == "vllm":
        return f"token_id:{token}"
    if token == engine().eos:
        return _END[manners.dialect]
    raw = engine().token_bytes(token)
    text = raw.decode("utf-8", "replace")
    broken = "\ufffd" in text and manners.dialect == "openai"
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw) if broken else text


def _chat_logprobs(steps: Sequence[Step], asked: int | None, manners: Manners) -> Body | None:
    if asked is None:
        return None
    content = [
        {
            **_entry(step.token, step.row, manners),
            "top_logprobs": [_entry(token, step.row, manners) for token in _ranked(step.row, asked)],
        }
        for step in steps
    ]
    return {"content": content, "refusal": None}


def _legacy_logprobs(steps: Sequence[Step], asked: int | None, manners: Manners) -> Body | None:
    """Keyed by text: of tokens that are spelled alike only one survives, as with the real servers."""
    if asked is None:
        return None
    places = [sum(len(step.text) for step in steps[:number]) for number in range(len(steps))]
    return {
        "tokens": [_shown(step.token, manners) for step in steps],
        "token_logprobs": [math.log(step.row[step.token]) for step in steps],
        "top_logprobs": [
            {_shown(token, manners): math.log(step.row[token]) for token in _ranked(step.row, asked)} for step in steps
        ],
        "text_offset": places,
    }


def _head(kind: str, mark: str, manners: Manners) -> Body:
    return {"id": f"{mark}-loopback", "object": kind, "created": _CREATED, "model": manners.model}


def _envelope(kind: str, mark: str, choices: Sequence[Mapping[str, Any]], manners: Manners, **counts: int) -> Body:
    return {**_head(kind, mark, manners), "choices": list(choices), "usage": _usage(counts["read"], counts["written"])}


def _usage(read: int, written: int) -> Body:
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
