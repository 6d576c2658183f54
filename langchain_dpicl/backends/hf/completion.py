"""Writes texts with a local model, each row by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from langchain_dpicl.backends.embedded import cut
from langchain_dpicl.backends.hf.batches import Batch, Shape
from langchain_dpicl.backends.hf.chunks import PrivateRows
from langchain_dpicl.backends.hf.engine import Engine
from langchain_dpicl.backends.hf.prompts import Prompts
from langchain_dpicl.backends.hf.rows import answered
from langchain_dpicl.backends.hf.sampling import Taste, drawn, likeliest, shares
from langchain_dpicl.backends.hf.vocabulary import Floats, Ints


@dataclass(frozen=True, slots=True)
class Job:
    """How texts are written.

    Attributes:
      max_tokens: a text ends after this many tokens.
      stop: and before the first of these strings.
      taste: how tokens are drawn.
      spell: the bytes of a token.
    """

    max_tokens: int
    stop: tuple[str, ...]
    taste: Taste
    spell: Callable[[int], bytes]


class _Text:
    """One text in progress; stop strings are found across tokens."""

    def __init__(self, job: Job, *, eos: int) -> None:
        self._job = job
        self._eos = eos
        self._stop = [word.encode("utf-8", "replace") for word in job.stop]
        self._longest = max(map(len, self._stop), default=1)
        self._written = bytearray()
        self.has_ended = False

    def add(self, token: int) -> None:
        """Adds a token, unless the text has ended."""
        self.has_ended |= token == self._eos
        if self.has_ended:
            return
        since = max(0, len(self._written) - self._longest + 1)
        self._written += self._job.spell(token)
        self.has_ended = any(self._written.find(word, since) >= 0 for word in self._stop)

    def read(self) -> str:
        """Returns the text before the first stop string."""
        return cut(self._written.decode("utf-8", "replace"), self._job.stop)


def in_private(engine: Engine, reader: Prompts, prompts: Sequence[str], job: Job, *, cap: int) -> list[str]:
    """Returns one text per private prompt, at public shapes; "" where one fails."""
    begun = reader.begun("", cap=cap)
    steps = min(job.max_tokens, engine.left_after(cap))
    shape = engine.shape(cap, max(steps, 1), reader.apart(begun))
    rows = reader.rows(prompts, shared="", begun=begun, cap=cap)
    private = PrivateRows([row and row[len(shape.shared) :] for row in rows], "units", shape, has_public=False)
    texts = [""] * len(prompts)
    answered(engine, private, lambda batch, rows: _written(engine, batch, rows, job, steps=steps), texts.__setitem__)
    return texts


def in_public(engine: Engine, rows: Sequence[Sequence[int]], job: Job) -> list[str]:
    """Returns one text per PUBLIC row, at the rows' own lengths."""
    texts: list[str] = []
    for start in range(0, len(rows), engine.row_batch):
        block = rows[start : start + engine.row_batch]
        steps = min(job.max_tokens, engine.left_after(max(map(len, block))))
        shape = _shape(engine, block, max(steps, 1))
        texts += engine.public(lambda s=shape, b=block, n=steps: _written(engine, engine.batch(s), b, job, steps=n))  # type: ignore[misc]
    return texts


def generated(
    engine: Engine, rows: Sequence[Sequence[int]], taste: Taste, *, room: int
) -> Iterator[tuple[Ints, Floats]]:
    """Yields the next token of every PUBLIC row and the probabilities float64[rows, ids] that it is drawn from.

    It ends where the model's context does, and otherwise never.
    """
    if not rows:
        while True:
            yield np.zeros(0, np.int64), np.zeros((0, engine.vocabulary.width))
    remaining = engine.left_after(max(map(len, rows)))
    shape = _shape(engine, rows, room, reach=remaining)
    yield from grown(engine, lambda: engine.batch(shape), rows, taste, remaining=remaining)


def grown(
    engine: Engine, anew: Callable[[], Batch], rows: Sequence[Sequence[int]], taste: Taste, *, remaining: int
) -> Iterator[tuple[Ints, Floats]]:
    """Yields what `generated` does, on batches that `anew` makes; it is called again if memory runs out halfway."""
    growing = _Growing(engine, anew, rows)
    raw = engine.public(growing.start, again=growing.restart)
    while True:
        with torch.inference_mode():
            rows_of_step = shares(engine.settle(raw), engine.vocabulary)
        tokens = drawn(rows_of_step, taste, engine.vocabulary)
        yield tokens, rows_of_step
        remaining -= 1
        if remaining < 0:
            return
        raw = engine.public(lambda tokens=tokens: growing.add(tokens), again=growing.restart)  # type: ignore[misc]


class _Growing:
    """Public rows that grow; they are read again where memory ran out halfway."""

    def __init__(self, engine: Engine, anew: Callable[[], Batch], rows: Sequence[Sequence[int]]) -> None:
        self._engine = engine
        self._anew = anew
        self._batch: Batch | None = None
        self._rows = rows
        self._added: list[Ints] = []

    def start(self) -> torch.Tensor:
        """Reads the rows."""
        self._batch = self._anew()
        return self._told(lambda batch: batch.start(self._rows))

    def add(self, tokens: Ints) -> torch.Tensor:
        """Adds one token to every row."""
        self._added.append(tokens)
        return self._told(lambda batch: batch.step(_moved(self._engine, tokens)))

    def restart(self) -> torch.Tensor:
        """Reads the rows and all added tokens in another batch."""
        states = self.start()
        for tokens in self._added:
            states = self._told(lambda batch, tokens=tokens: batch.step(_moved(self._engine, tokens)))  # type: ignore[misc]
        return states

    def _told(self, ask: Callable[[Batch], torch.Tensor]) -> torch.Tensor:
        """Runs the batch; it is dropped if it fails, as it may have read half of a step."""
        batch, self._batch = self._batch, None
        if batch is None:
            raise MemoryError
        states = ask(batch)
        self._batch = batch
        return states


def _shape(engine: Engine, rows: Sequence[Sequence[int]], room: int, *, reach: int | None = None) -> Shape:
    return replace(engine.shape(max(map(len, rows)), room, reach=reach), size=len(rows))


def _written(engine: Engine, batch: Batch, rows: Sequence[Sequence[int]], job: Job, *, steps: int) -> list[str]:
    """Returns one text per row, all written together until the last has ended."""
    texts = [_Text(job, eos=engine.vocabulary.eos) for _ in rows]
    raw = batch.start(rows) if steps > 0 else torch.empty(0)
    for remaining in range(steps, 0, -1):
        settled = engine.settle(raw)
        if job.taste.temperature == 0:
            tokens = likeliest(settled, engine.vocabulary)
        else:
            tokens = drawn(shares(settled, engine.vocabulary), job.taste, engine.vocabulary)
        for text, token in zip(texts, tokens.tolist(), strict=True):
            text.add(token)
        if remaining == 1 or all(text.has_ended for text in texts):
            break
        raw = batch.step(_moved(engine, tokens))
    return [text.read() for text in texts]


def _moved(engine: Engine, tokens: Ints) -> torch.Tensor:
    return torch.from_numpy(tokens).to(engine.body.device)
