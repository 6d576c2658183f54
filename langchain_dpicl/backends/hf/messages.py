"""Renders PUBLIC chat messages of several roles as token ids, by a tokenizer's chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from langchain_dpicl.backends.hf.tokens import TokenizerMaps
from langchain_dpicl.exceptions import ConfigurationError

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
        raise ConfigurationError(f"each message once and in its turn was expected, found {places}")
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
