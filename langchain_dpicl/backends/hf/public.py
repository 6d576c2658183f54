"""Answers next-token requests for PUBLIC prompts, with a cache of the last two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from langchain_dpicl.backends.hf.batches import Batch
from langchain_dpicl.backends.hf.engine import BLOCK, Engine
from langchain_dpicl.backends.hf.sessions import check_room
from langchain_dpicl.exceptions import ModelCallError

_KEPT = 2


@dataclass(slots=True)
class _Known:
    """A public prompt: its first answer and, once it has been continued, the row that continues it."""

    first: torch.Tensor
    batch: Batch | None = None
    begin: Any = None
    tokens: list[int] = field(default_factory=list)
    last: torch.Tensor | None = None


class PublicAnswers:
    """Answers public prompts.

    The answer to a prompt itself has the bits of a private row of the same text; further tokens run in one row, and
    agree with private rows up to rounding.

    Args:
      engine: runs the model.
      length: tokens that every prompt is padded to.
      room: tokens to make room for.
      begun: ids that all prompts begin with and that are read apart.
    """

    def __init__(self, engine: Engine, *, length: int, room: int, begun: tuple[int, ...]) -> None:
        self._engine = engine
        self._length = length
        self._room = room
        self._begun = begun
        self._known: dict[tuple[int, ...], _Known] = {}

    def settled(self, prompt: Sequence[int], prefix: Sequence[int]) -> torch.Tensor:
        """Returns float32[1, width]: the candidates' logits after a prompt and a prefix."""
        check_room(self._engine.limit, self._length + len(prefix))
        logits = self._engine.public(lambda: self._answered(tuple(prompt), list(prefix)))
        if not bool(logits.amax().isfinite()):
            raise ModelCallError("the model gave no numbers for the public prompt; try another dtype")
        return logits

    def _answered(self, prompt: tuple[int, ...], prefix: list[int]) -> torch.Tensor:
        """Answers, and forgets all prompts if that fails: a row may have read half of a step."""
        try:
            return self._settled(prompt, prefix)
        except BaseException:
            self._known.clear()
            raise

    def _settled(self, prompt: tuple[int, ...], prefix: list[int]) -> torch.Tensor:
        known = self._known.pop(prompt, None) or _Known(self._first(prompt))
        self._known[prompt] = known  # the last one used comes last
        while len(self._known) > _KEPT:
            del self._known[next(iter(self._known))]
        return self._continued(known, prompt, prefix) if prefix else known.first

    def _first(self, prompt: tuple[int, ...]) -> torch.Tensor:
        """Computes a prompt in the shape of a private row."""
        engine = self._engine
        shape = engine.shape(self._length, self._room, self._begun)
        size = engine.size_for("units", engine.row_batch, shape)
        rows = [list(prompt[len(shape.shared) :]), *[[engine.vocabulary.filler]] * (size - 1)]
        return engine.settle(engine.batch(replace(shape, size=size, room=1)).start(rows))[:1].clone()

    def _continued(self, known: _Known, prompt: tuple[int, ...], prefix: list[int]) -> torch.Tensor:
        engine = self._engine
        if known.batch is None:
            known.batch = engine.batch(engine.shape(len(prompt), self._room, reach=engine.left_after(len(prompt))))
            known.batch.start([list(prompt)])
            known.begin = known.batch.mark()
        if prefix[: len(known.tokens)] != known.tokens or known.last is None:
            known.batch.rewind(known.begin)
            known.tokens, known.last = [], known.first
        raw: torch.Tensor | None = None
        while missing := prefix[len(known.tokens) : len(known.tokens) + BLOCK]:
            if len(missing) == 1:
                raw = known.batch.step(torch.tensor(missing, device=engine.body.device))
            else:
                raw = known.batch.many(missing)[:, -1]
            known.tokens += missing
        if raw is not None:
            known.last = engine.settle(raw)
        return known.last
