"""Runs private rows on a local model once, chunk by chunk, at a public shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from langchain_dpicl.backends.hf.batches import Batch, is_out_of_memory
from langchain_dpicl.backends.hf.chunks import PrivateRows
from langchain_dpicl.backends.hf.engine import Engine
from langchain_dpicl.backends.hf.vocabulary import Floats
from langchain_dpicl.backends.rows import guarded

Answer = Callable[[Batch, list[list[int]]], Sequence[Any] | Floats]
"""Takes a new batch and the rows to start it with; returns one answer per row."""


def answered(engine: Engine, private: PrivateRows, answer: Answer, put: Callable[[int, Any], None]) -> None:
    """Calls `put` with the answer of every row that has one.

    If a chunk fails, each of its rows runs again in its own place beside empty ones, so that its bits stay the same.
    """
    with engine.lock:
        count = len(private.rows)
        place = 0
        while place < count:
            size = engine.size_for("units", engine.row_batch, private.shape)
            members = dict(enumerate(range(place, min(place + size, count))))
            engine.body.hooks.check()
            fits = _put_chunk(engine, private, answer, put, members)
            if fits:
                place += size
            elif not engine.spare():
                engine.shrink("units", engine.row_batch, private.shape, size=size)
                place = 0  # all rows are computed at the same size


def _put_chunk(
    engine: Engine, private: PrivateRows, answer: Answer, put: Callable[[int, Any], None], members: dict[int, int]
) -> bool:
    """Puts the answers of one chunk, or of each of its rows; False if memory ran out for the chunk.

    A row alone takes no more memory than its chunk: if memory runs out then, that row fails.
    """
    outcome = guarded(lambda: _put(engine, private, answer, put, members))
    if outcome is None:
        engine.free()
        for place, row in members.items():
            guarded(lambda one={place: row}: _put(engine, private, answer, put, one))  # type: ignore[misc]
    return outcome is not False


def _put(
    engine: Engine, private: PrivateRows, answer: Answer, put: Callable[[int, Any], None], members: dict[int, int]
) -> bool:
    """Puts the answers of rows; False if memory ran out; raises every other error."""
    size = engine.size_for("units", engine.row_batch, private.shape)
    rows = [private.rows[members[place]] if place in members else None for place in range(size)]
    try:
        with torch.inference_mode():
            batch = engine.batch(replace(private.shape, size=size))
            answers = answer(batch, [row or [engine.vocabulary.filler] for row in rows])
    except Exception as error:
        if is_out_of_memory(error):
            return False
        raise
    for place, row in members.items():
        if rows[place] is not None:
            put(row, answers[place])
    return True
