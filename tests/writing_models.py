"""LangChain models for tests that write several tokens, each with its logprobs, and continue a message or do not.

Their rows hang on the whole text and nothing else, and their tokens mean nothing: odd models, but consistent ones.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from langchain_core.language_models import BaseChatModel, BaseLLM
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult, Generation, LLMResult
from pydantic import Field

from tests.scripted_models import StatusError, Tops, spread

ODD_WORDS = (" qua", "zz", "\n", " hum", "Quartz", "é", ")", " la", "mps", "\u65e5", " I", "Sure", "'", " the")
SWITCHES = {"continue_final_message": True, "add_generation_prompt": False}


def odd_rows(words: Sequence[str] = ODD_WORDS, *, seed: int = 0, mass: float = 0.95) -> Callable[[str], Tops]:
    """Rows that change with every text: the same slope over the words, shuffled by a hash."""

    def answer(text: str) -> Tops:
        return spread(sorted(words, key=lambda word: _drawn(f"{seed}|{text}|{word}")), mass=mass)

    return answer


def _drawn(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "replace")).digest()


def entries(tops: Tops, *, bare: bool = False) -> list[dict[str, Any]]:
    """Top logprobs of one place; bare: tokens lose the spaces before them, as with some servers."""
    spelled = [(token.lstrip(" ") if bare else token, probability) for token, probability in tops.items()]
    return [{"token": t, "bytes": list(t.encode()), "logprob": math.log(p)} for t, p in spelled]


class _Writing:
    """What both kinds share: writing the likeliest tokens."""

    answer: Callable[[str], Tops]
    seen: list[dict[str, Any]]
    most_tokens: int | None

    def written(self, text: str, options: Mapping[str, Any]) -> list[Tops]:
        asked = int(options.get("max_tokens", 8))
        return list(_steps(self.answer, text, min(asked, self.most_tokens or asked)))


def _steps(answer: Callable[[str], Tops], text: str, num_tokens: int) -> Iterator[Tops]:
    for _ in range(num_tokens):
        tops = answer(text)
        yield tops
        text += next(iter(tops))


class WritingChat(_Writing, BaseChatModel):
    """A chat model behind a server."""

    answer: Callable[[str], Tops]
    goes_on: Literal["plain", "vllm", "never"] = "plain"
    echo: bool = True
    bare: bool = False
    rejects: frozenset[Literal["plain", "vllm"]] = frozenset()
    most_tokens: int | None = None
    extra_body: dict[str, Any] | None = None
    seen: list[dict[str, Any]] = Field(default_factory=list)
    model_name: str = "writing-chat"

    @property
    def _llm_type(self) -> str:
        return "writing-chat"

    def _generate(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        self.seen.append({"messages": [(m.type, m.text) for m in messages], **kwargs})
        prefix = messages[-1].text if isinstance(messages[-1], AIMessage) else ""
        text = "".join(f"<{m.type}>{m.text}</{m.type}>" for m in (messages[:-1] if prefix else messages)) + "<ai>"
        if prefix:
            text += prefix if self._goes_on(kwargs.get("extra_body") or {}) else f"{prefix}</ai><ai>"
        steps = self.written(text, kwargs)
        said = "".join(next(iter(tops)) for tops in steps)
        places = [entries(tops, bare=self.bare) for tops in steps]
        content = [{**place[0], "top_logprobs": place} for place in places]
        info = {"finish_reason": "length", "logprobs": {"content": content} if kwargs.get("logprobs") else None}
        message = AIMessage((prefix if self.echo else "") + said)
        return ChatResult(generations=[ChatGeneration(message=message, generation_info=info)])

    def _goes_on(self, extra_body: Mapping[str, Any]) -> bool:
        switched = {name: extra_body[name] for name in SWITCHES if name in extra_body} == SWITCHES
        if ("vllm" if switched else "plain") in self.rejects:
            raise StatusError("Unknown parameter" if switched else "no assistant prefill here", status_code=400)
        return self.goes_on == "plain" or (self.goes_on == "vllm" and switched)


class WritingLLM(_Writing, BaseLLM):
    """A completion model behind a server that answers in OpenAI's older shape."""

    answer: Callable[[str], Tops]
    bare: bool = False
    most_tokens: int | None = None
    seen: list[dict[str, Any]] = Field(default_factory=list)

    @property
    def _llm_type(self) -> str:
        return "writing-llm"

    def _generate(
        self, prompts: list[str], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> LLMResult:
        return LLMResult(generations=[[self._one(prompt, {**kwargs, "stop": stop})] for prompt in prompts])

    def _one(self, prompt: str, options: Mapping[str, Any]) -> Generation:
        self.seen.append({"prompt": prompt, **options})
        steps = self.written(prompt, options)
        tops = [{e["token"]: e["logprob"] for e in entries(step, bare=self.bare)} for step in steps]
        payload = {"tokens": [next(iter(top)) for top in tops], "top_logprobs": tops}
        info = {"finish_reason": "length", "logprobs": payload if options.get("logprobs") else None}
        return Generation(text="".join(next(iter(step)) for step in steps), generation_info=info)
