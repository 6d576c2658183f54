"""Builds the requests for next tokens of one LangChain model, and reads its answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage

from langchain_dpicl.backends.logprobs import (
    EOS_TEXTS,
    FINISHED,
    Entry,
    Probabilities,
    Spell,
    first_position,
    next_token,
    positions,
    probabilities,
    token_key,
)
from langchain_dpicl.backends.silent import Answer, Hidden, Reply, Request

Continuation: TypeAlias = Literal["completion", "prefill", "instruct"]
Prefill: TypeAlias = Literal["plain", "vllm"]

CONTINUE = "Continue your last message exactly where it stops. Write the continuation only and repeat nothing."
"""The last message of an "instruct" continuation."""

VLLM_SWITCHES: Mapping[str, bool] = {"continue_final_message": True, "add_generation_prompt": False}
"""Options that make vLLM continue the last message; without an assistant message it would continue the user's."""


@dataclass(frozen=True)
class Wire:
    """The request and reply format of one model; all of it is public.

    A released prefix is continued in one of three ways (`docs/providers.md`). "completion": prompt and prefix are one
    text; exact. "prefill": the prefix is an assistant message that the server continues, by itself or, as vLLM, when
    told to; exact where supported. "instruct": the prefix is an assistant message, followed by an instruction to
    continue; approximate.

    Args:
      is_chat: whether the model takes messages.
      continuation: how a prefix is continued.
      prefill: how a server is told to continue: "plain" (it does so by itself), "vllm" (by `VLLM_SWITCHES`); None
        where no message is continued, or while it is unknown.
      asked: top tokens to ask for.
      extra_body: what the model and its bindings add to each request; the switches go on top.
      eos_texts: how the provider spells the end of a text.
      spell: turns token ids into bytes.
    """

    is_chat: bool
    continuation: Continuation
    prefill: Prefill | None
    asked: int
    extra_body: Mapping[str, Any] = field(default_factory=dict, repr=False)
    eos_texts: frozenset[str] = EOS_TEXTS
    spell: Spell | None = field(default=None, repr=False)

    def request(
        self, prompt: Hidden[str], prefix: str, *, explain: Literal["", "kind", "text"] = "", max_tokens: int = 1
    ) -> Request:
        """Returns the call that asks for the tokens after the prompt and the released prefix."""
        top = {"logprobs": True, "top_logprobs": self.asked} if self.is_chat else {"logprobs": self.asked}
        # Temperature 1: some servers report the distribution they sample from. One token: see `_is_readable`.
        options = {**top, "max_tokens": max_tokens, "temperature": 1.0, **self._body(prefix)}
        return Request(
            prompt,
            lambda text: self._rendered(text, prefix),
            options,
            lambda answer: _is_readable(answer, prefix),
            explain,
        )

    def read(self, reply: Reply, prefix: str = "") -> Probabilities:
        """Returns the probabilities of the first token after the prefix; empty if none can be read."""
        return {} if reply.answer is None else self._read(reply.answer.reveal(), prefix)

    def entries(self, reply: Reply) -> list[Entry]:
        """Returns what a public answer reports for its first token, as received."""
        return [] if reply.answer is None else first_position(reply.answer.reveal().logprobs)

    def places(self, reply: Reply, limit: int) -> list[tuple[object, Probabilities]]:
        """Returns the first tokens of a public answer and the probabilities reported for each one's place."""
        reported = [] if reply.answer is None else positions(reply.answer.reveal().logprobs, limit=limit)
        return [
            (token, probabilities(entries, eos_texts=self.eos_texts, spell=self.spell)) for token, entries in reported
        ]

    def key(self, token: object) -> bytes | None:
        """Returns the bytes of a reported token; None if they are not complete text."""
        return token_key(token, eos_texts=self.eos_texts, spell=self.spell)

    def _read(self, answer: Answer, prefix: str) -> Probabilities:
        if answer.refused:
            return {}
        return next_token(
            answer.logprobs,
            text="" if answer.text == prefix else answer.text,  # some servers repeat what they were given
            finish_reason=answer.finish_reason,
            eos_texts=self.eos_texts,
            spell=self.spell,
        )

    def _body(self, prefix: str) -> dict[str, Any]:
        """Returns the `extra_body` of a call, which replaces that of the model and its bindings."""
        own = {name: value for name, value in self.extra_body.items() if name not in VLLM_SWITCHES}
        if self.prefill == "vllm" and prefix:
            return {"extra_body": {**own, **VLLM_SWITCHES}}
        return {"extra_body": own} if self.extra_body else {}

    def _rendered(self, prompt: str, prefix: str) -> str | list[BaseMessage]:
        if self.continuation == "completion":
            return prompt + prefix
        if not prefix:
            return [HumanMessage(prompt)]
        last = [HumanMessage(CONTINUE)] if self.continuation == "instruct" else []
        return [HumanMessage(prompt), AIMessage(prefix), *last]


def _is_readable(answer: Answer, prefix: str) -> bool:
    """Whether an answer is final, with or without logprobs.

    llama.cpp reports nothing when it happens to sample the first bytes of an unfinished character, and of a longer
    answer it would report a later position as the first. So one token is asked for, and sampled again if need be.
    """
    ended = answer.text in {"", prefix} and answer.finish_reason in FINISHED
    is_final = ended or answer.refused or answer.finish_reason == "content_filter"
    return is_final or bool(first_position(answer.logprobs, most=8))
