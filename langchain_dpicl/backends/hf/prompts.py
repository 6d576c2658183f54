"""Turns prompts and PUBLIC chat messages into rows of token ids, and cuts prompts that are too long."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from langchain_dpicl._opaque import run_guarded
from langchain_dpicl.backends.hf.tokens import TokenizerMaps
from langchain_dpicl.exceptions import ConfigurationError

# Rows are made inside `run_guarded`: whatever a text makes a tokenizer raise is its own row's fault.
_WORTH_SHARING = 16
"""A shorter beginning is read with every row, which costs less than caching it."""


class Prompts:
    """Turns prompts into rows of ids.

    Args:
      tokens: the tokenizer's maps.
      eos: the end of the text, which begins an empty one where there is no other start.
    """

    def __init__(self, tokens: TokenizerMaps, *, eos: int) -> None:
        self.tokens = tokens
        self._start = tokens.header or (eos,)

    def begun(self, shared: str, *, cap: int) -> tuple[int, ...]:
        """Returns the ids that all prompts begin with; refuses a public text that leaves no room for a prompt."""
        ids = (*self.tokens.header, *self.tokens.encode(shared))
        if len(ids) + len(self.tokens.footer) >= cap:
            raise ConfigurationError(
                f"expected public text of fewer than {cap} tokens before and after a prompt, found "
                f"{len(ids) + len(self.tokens.footer)}; raise max_prompt_tokens"
            )
        return ids

    @staticmethod
    def apart(begun: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the part of the beginning that is read once for all rows; its last id stays with every row."""
        return begun[:-1] if len(begun) > _WORTH_SHARING else ()

    def rows(
        self, prompts: Sequence[str | None], *, shared: str, begun: tuple[int, ...], cap: int
    ) -> list[list[int] | None]:
        """Returns rows of at most `cap` ids each; None where a prompt is None or cannot be read."""
        return [
            None if prompt is None else run_guarded(lambda prompt=prompt: self._row(prompt, shared, begun, cap))  # type: ignore[misc]
            for prompt in prompts
        ]

    def _row(self, prompt: str, shared: str, begun: tuple[int, ...], cap: int) -> list[int] | None:
        if not prompt.startswith(shared):
            return None
        rest = prompt[len(shared) :]
        if not self.tokens.chat:
            rest = rest.rstrip(" ")
        ids = self.tokens.continued(rest) if shared else self.tokens.encode(rest)
        footer = self.tokens.footer
        ids = cut_middle(ids, cap - len(begun) - len(footer), head=0 if shared else None)
        return [*begun, *ids, *footer] or list(self._start)


def cut_middle(ids: list[int], room: int, *, head: int | None = None) -> list[int]:
    """Returns at most `room` ids: the first `head` (None: a quarter of the room) and the last ones.

    >>> cut_middle([1, 2, 3, 4, 5, 6, 7, 8, 9], 4)
    [1, 7, 8, 9]
    """
    if len(ids) <= room:
        return ids
    head = room // 4 if head is None else head
    return ids[:head] + ids[len(ids) - (room - head) :]


# The template is applied to stand-ins, and the contents are inserted afterwards as plain text: no content can imitate
# another role. A single user message gives the ids of a private prompt of the same text.
_STAND_IN = re.compile(r"zqcontent(\d+)qz")


def render(tokens: TokenizerMaps, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Returns the ids of messages ({"role": ..., "content": ...}), up to the beginning of the next one.

    A last assistant message is left open, to be continued. Where the template refuses the roles (many want user and
    assistant in turns, and no system), neighbours of one role are joined, and system messages become the user's.
    """
    if not messages:
        raise ConfigurationError("expected at least one message, found none")
    tokenizer = tokens._tokenizer  # noqa: SLF001  its maps know plain text alone
    problem = ""
    for turns in (messages, _in_turns(messages)):
        try:
            pieces = _pieces(tokenizer, turns)
        except Exception as error:  # noqa: BLE001  templates raise anything; contents are stand-ins
            problem = f"{type(error).__name__}: {error}"
            continue
        ids: list[int] = []
        for piece, message in zip(pieces, [*turns, None], strict=True):
            ids += tokenizer.encode(piece, add_special_tokens=False) if piece else []
            ids += tokens.encode(message["content"]) if message is not None else []
        return ids
    roles = [message["role"] for message in messages]
    msg = (
        f"expected messages that the chat template can show, found roles {roles} ({problem}); reorder or leave some out"
    )
    raise ConfigurationError(msg)


def _pieces(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> list[str]:
    """Returns the template's text before each message and after the last."""
    is_open = messages[-1]["role"] == "assistant"
    stand_ins = [{"role": message["role"], "content": f"zqcontent{place}qz"} for place, message in enumerate(messages)]
    shown = str(tokenizer.apply_chat_template(stand_ins, tokenize=False, add_generation_prompt=not is_open))
    places = [int(place) for place in _STAND_IN.findall(shown)]
    if places != [*range(len(messages))]:
        msg = f"expected a chat template that shows each message once and in order, found messages {places}"
        raise ConfigurationError(f"{msg}; pass a tokenizer with another template")
    pieces = _STAND_IN.sub("\0", shown).split("\0")
    return [*pieces[:-1], ""] if is_open else pieces


def _in_turns(messages: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Returns messages by user and assistant in turns."""

    def role(message: Mapping[str, str]) -> str:
        return "user" if message["role"] == "system" else message["role"]

    return [
        {"role": speaker, "content": "\n\n".join(message["content"] for message in turn)}
        for speaker, turn in groupby(messages, role)
    ]
