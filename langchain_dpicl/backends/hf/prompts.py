"""Turns prompts into rows of token ids, with the chat frame, and cuts prompts that are too long."""

from __future__ import annotations

from collections.abc import Sequence

from langchain_dpicl.backends.hf.tokens import TokenizerMaps
from langchain_dpicl.backends.rows import guarded
from langchain_dpicl.exceptions import ConfigurationError

# Rows are made inside `guarded`: whatever a text makes a tokenizer raise is its own row's fault.
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
            None if prompt is None else guarded(lambda prompt=prompt: self._row(prompt, shared, begun, cap))  # type: ignore[misc]
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
