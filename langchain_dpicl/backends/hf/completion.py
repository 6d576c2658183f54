"""Runs rows on a local model, each by itself: writes texts, and scores choices as continuations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from langchain_dpicl._opaque import run_guarded
from langchain_dpicl.backends.base import cut_at_stop
from langchain_dpicl.backends.hf.batches import BatchShape, GrowingBatch, is_out_of_memory
from langchain_dpicl.backends.hf.engine import BLOCK, Engine, PrivateRows
from langchain_dpicl.backends.hf.tokens import Prompts
from langchain_dpicl.backends.hf.vocabulary import (
    Floats,
    Ints,
    SamplingOptions,
    draw_tokens,
    likeliest,
    log_probabilities,
    shares,
)
from langchain_dpicl.exceptions import ConfigurationError

Answer = Callable[[GrowingBatch, list[list[int]]], Sequence[Any] | Floats]
"""Takes a new batch and the rows to start it with; returns one answer per row."""


def answer_rows(
    engine: Engine,
    private: PrivateRows,
    answer: Answer,
    put: Callable[[int, Any], None],
    *,
    what: str,
    longest: Answer,
) -> None:
    """Calls `put` with the answer of every row that has one.

    If a chunk fails, or does not fit into memory, each of its rows runs again in its own place beside empty ones, so
    that its bits stay the same. How many rows run together is found out before, with public rows: what rows make a
    model write takes memory, and how many there are, so neither may change the shape of the others.

    Args:
      engine: runs them.
      private: the rows.
      answer: answers them.
      put: takes a row's number and its answer.
      what: public name of the kind of answer; those of one kind and shape take the same memory at most.
      longest: takes as much memory as `answer` can with any rows.
    """

    def run_public(shape: BatchShape) -> object:
        return longest(engine.batch(shape), [[engine.vocabulary.filler]] * shape.size)

    def put_those(members: dict[int, int]) -> bool | None:
        return run_guarded(lambda: _put_answers(engine, private, answer, put, members, size=size))

    with engine.lock:
        # Also where there is no row: how many there are decides no error, and no size of a later call.
        engine.body.hooks.check()
        size = engine.size_that_fits(what, private.shape, run_public)
        for place in range(0, count := len(private.rows), size):
            engine.body.hooks.check()
            _put_chunk(engine, dict(enumerate(range(place, min(place + size, count)))), put_those)


def _put_chunk(engine: Engine, members: dict[int, int], put_those: Callable[[dict[int, int]], bool | None]) -> None:
    """Puts the answers of one chunk, or of each of its rows; a row that fails or does not fit even alone has none."""
    outcome = put_those(members)
    while outcome is False and engine.spare():
        outcome = put_those(members)
    if not outcome:
        engine.free()
        for place, row in members.items():
            put_those({place: row})


def _put_answers(
    engine: Engine,
    private: PrivateRows,
    answer: Answer,
    put: Callable[[int, Any], None],
    members: dict[int, int],
    *,
    size: int,
) -> bool:
    """Puts the answers of rows; False if memory ran out; raises every other error."""
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


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """How texts are written."""

    max_tokens: int
    stop: tuple[str, ...]
    is_chat: bool
    spell: Callable[[int], bytes]


class _Text:
    """One text in progress; stop strings are found across tokens."""

    def __init__(self, job: CompletionRequest, *, eos: int) -> None:
        self._job = job
        self._eos = eos
        self._stop = [word.encode("utf-8", "replace") for word in job.stop]
        self._longest = max(map(len, self._stop), default=1)
        self._written = bytearray()
        self.has_ended = False

    def add(self, token: int) -> None:
        self.has_ended |= token == self._eos
        if self.has_ended:
            return
        since = max(0, len(self._written) - self._longest + 1)
        self._written += self._job.spell(token)
        begin = 0
        if self._job.is_chat and self._stop:  # white space that it begins with is no text; see `cut_at_stop`
            text = self._written.decode("utf-8", "ignore")
            begin = len(text[: len(text) - len(text.lstrip())].encode())
        self.has_ended = any(self._written.find(word, max(since, begin - len(word) + 1)) >= 0 for word in self._stop)

    def read(self) -> str:
        """Returns the text before the first stop string."""
        is_stripped = self._job.is_chat and bool(self._stop)
        return cut_at_stop(self._written.decode("utf-8", "replace"), self._job.stop, is_stripped=is_stripped)


def complete_private(
    engine: Engine, reader: Prompts, prompts: Sequence[str], job: CompletionRequest, *, cap: int
) -> list[str]:
    """Returns one text per private prompt, at public shapes; "" where one fails."""
    begun = reader.begun("", cap=cap)
    steps = min(job.max_tokens, engine.left_after(cap))
    shape = engine.shape(cap, max(steps, 1), reader.apart(begun))
    rows = reader.rows(prompts, shared="", begun=begun, cap=cap)
    private = PrivateRows([row and row[len(shape.shared) :] for row in rows], "units", shape, has_public=False)
    texts = [""] * len(prompts)
    answer_rows(
        engine,
        private,
        lambda batch, rows: _write(engine, batch, rows, job, steps=steps),
        texts.__setitem__,
        what="texts",
        longest=lambda batch, rows: _fill(engine, batch, rows, steps=steps),
    )
    return texts


def complete_public(engine: Engine, rows: Sequence[Sequence[int]], job: CompletionRequest) -> list[str]:
    """Returns one text per PUBLIC row, at the rows' own lengths."""
    texts: list[str] = []
    todo = list(rows)
    while todo:
        steps = min(job.max_tokens, engine.left_after(len(todo[0])))
        fits = [min(job.max_tokens, engine.left_after(len(row))) == steps for row in todo[: engine.row_batch]]
        count = (*fits, False).index(False)  # a row that leaves less room would end the others too
        block, todo = todo[:count], todo[count:]
        shape = _shape(engine, block, max(steps, 1))
        texts += engine.public(lambda s=shape, b=block, n=steps: _write(engine, engine.batch(s), b, job, steps=n))  # type: ignore[misc]
    return texts


def generate_tokens(
    engine: Engine, rows: Sequence[Sequence[int]], taste: SamplingOptions, *, room: int
) -> Iterator[tuple[Ints, Floats]]:
    """Yields the next token of every PUBLIC row and the probabilities float64[rows, ids] that it is drawn from.

    It ends where the model's context does, and otherwise never; see `regenerate_tokens`.
    """
    if not rows:
        while True:
            yield np.zeros(0, np.int64), np.zeros((0, engine.vocabulary.width))

    def anew(rows: Sequence[Sequence[int]], places: Sequence[int], steps: int) -> GrowingBatch:
        del places
        return engine.batch(_shape(engine, rows, room, reach=steps))

    left = [engine.left_after(len(row)) for row in rows]
    yield from regenerate_tokens(engine, anew, rows, taste, left=left)


def regenerate_tokens(
    engine: Engine,
    anew: Callable[[Sequence[Sequence[int]], Sequence[int], int], GrowingBatch],
    rows: Sequence[Sequence[int]],
    taste: SamplingOptions,
    *,
    left: Sequence[int],
) -> Iterator[tuple[Ints, Floats]]:
    """Yields what `generate_tokens` does, again if memory runs out halfway.

    A row without room has token -1 and zeros. Where others go on, they are read again without it.

    Args:
      engine: runs the rows.
      anew: makes a batch for rows, their places among all, and the number of tokens that they will read.
      rows: ids that are continued.
      taste: how tokens are drawn.
      left: how many tokens each row may read yet.
    """
    written, left = [list(row) for row in rows], list(left)
    while places := [place for place, count in enumerate(left) if count >= 0]:
        over = [place for place, count in enumerate(left) if count < 0]
        begun, steps = [list(written[place]) for place in places], min(left[place] for place in places)
        growing = _GrowingRows(engine, partial(anew, begun, places, steps), begun)
        raw = engine.public(growing.start, again=growing.restart)
        for remaining in range(steps, -1, -1):
            with torch.inference_mode():
                rows_of_step = shares(engine.settle(raw), engine.vocabulary)
            if over:
                going, rows_of_step = rows_of_step, np.zeros((len(rows), engine.vocabulary.width))
                rows_of_step[places] = going
            tokens = draw_tokens(rows_of_step, taste, engine.vocabulary)
            tokens[over] = -1
            yield tokens, rows_of_step
            left = [count - 1 for count in left]
            for place in places:
                written[place].append(int(tokens[place]))
            if remaining:
                raw = engine.public(partial(growing.add, tokens[places]), again=growing.restart)


class _GrowingRows:
    """Public rows that grow; they are read again where memory ran out halfway."""

    def __init__(self, engine: Engine, anew: Callable[[], GrowingBatch], rows: Sequence[Sequence[int]]) -> None:
        self._engine = engine
        self._anew = anew
        self._batch: GrowingBatch | None = None
        self._rows = rows
        self._added: list[Ints] = []

    def start(self) -> torch.Tensor:
        self._batch = self._anew()
        return self._told(lambda batch: batch.start(self._rows))

    def add(self, tokens: Ints) -> torch.Tensor:
        self._added.append(tokens)
        return self._told(lambda batch: batch.step(_to_device(self._engine, tokens)))

    def restart(self) -> torch.Tensor:
        """Reads the rows and all added tokens in another batch."""
        states = self.start()
        for tokens in self._added:
            states = self._told(lambda batch, tokens=tokens: batch.step(_to_device(self._engine, tokens)))  # type: ignore[misc]
        return states

    def _told(self, ask: Callable[[GrowingBatch], torch.Tensor]) -> torch.Tensor:
        """Runs the batch; it is dropped if it fails, as it may have read half of a step."""
        batch, self._batch = self._batch, None
        if batch is None:
            raise MemoryError
        states = ask(batch)
        self._batch = batch
        return states


def _shape(engine: Engine, rows: Sequence[Sequence[int]], room: int, *, reach: int | None = None) -> BatchShape:
    return replace(engine.shape(max(map(len, rows)), room, reach=reach), size=len(rows))


def _write(
    engine: Engine, batch: GrowingBatch, rows: Sequence[Sequence[int]], job: CompletionRequest, *, steps: int
) -> list[str]:
    """Returns one text per row, all written together until the last has ended."""
    texts = [_Text(job, eos=engine.vocabulary.eos) for _ in rows]
    raw = batch.start(rows) if steps > 0 else torch.empty(0)
    for remaining in range(steps, 0, -1):
        tokens = likeliest(engine.settle(raw), engine.vocabulary)
        for text, token in zip(texts, tokens.tolist(), strict=True):
            text.add(token)
        if remaining == 1 or all(text.has_ended for text in texts):
            break
        raw = batch.step(_to_device(engine, tokens))
    return [text.read() for text in texts]


def _fill(engine: Engine, batch: GrowingBatch, rows: Sequence[Sequence[int]], *, steps: int) -> list[str]:
    """Adds as many tokens as `_write` does at most, in blocks: that takes no less memory, and far less time."""
    if steps > 0:
        raw = batch.start(rows)
        blocks, rest = divmod(steps - 1, BLOCK)
        for count in (*[BLOCK] * blocks, *[1] * rest):
            engine.settle(raw)
            tokens = torch.full((len(rows), count), engine.vocabulary.filler, device=engine.body.device)
            raw = batch.many(tokens)[:, -1] if count > 1 else batch.step(tokens[:, 0])
        engine.settle(raw)
    return []


def _to_device(engine: Engine, tokens: Ints) -> torch.Tensor:
    return torch.from_numpy(tokens).to(engine.body.device)


def score(engine: Engine, reader: Prompts, prompts: Sequence[str], choices: Sequence[str], *, cap: int) -> Floats:
    """Returns float64[prompts, choices]: log-likelihoods; -inf in a row that failed."""
    out = np.full((len(prompts), len(choices)), -np.inf)
    spaced = [not reader.tokens.chat and prompt.endswith(" ") for prompt in prompts]
    begun = reader.begun("", cap=cap)
    for with_space in (False, True):
        tokens = [_ids(engine, reader, choice, with_space=with_space) for choice in choices]
        places = [place for place, one in enumerate(spaced) if one == with_space]
        rows = reader.rows([prompts[place] for place in places], shared="", begun=begun, cap=cap)
        shape = engine.shape(cap, max(map(len, tokens), default=1), reader.apart(begun))
        private = PrivateRows([row and row[len(shape.shared) :] for row in rows], "units", shape, has_public=False)

        def put(row: int, row_scores: Floats, places: list[int] = places) -> None:
            out[places[row]] = row_scores

        def scored(batch: GrowingBatch, rows: Sequence[Sequence[int]], tokens: Any = tokens) -> Floats:
            return likelihoods(engine, batch, rows, tokens)

        answer_rows(engine, private, scored, put, what="choices", longest=scored)
    return out


def _ids(engine: Engine, reader: Prompts, choice: str, *, with_space: bool) -> tuple[int, ...]:
    tokens = reader.tokens
    if with_space:
        choice = f" {choice.lstrip(' ')}"
    elif tokens.chat and tokens.answers_after_space:
        choice = choice.lstrip(" ")
    ids = tuple(tokens.continued(choice))
    # A choice of no token would be certain after every prompt.
    if not ids or not tokens.knows(choice) or not all(engine.vocabulary.is_candidate[id_] for id_ in ids):
        raise ConfigurationError(
            "labels: expected texts that the model's tokenizer has tokens for, found one with an unknown or special "
            "token. Name that label by other words: verbalizers=."
        )
    return ids


def likelihoods(
    engine: Engine, batch: GrowingBatch, rows: Sequence[Sequence[int]], choices: Sequence[tuple[int, ...]]
) -> Floats:
    """Returns float64[rows, choices] by walking the tree of the choices.

    One token at a time: that shape has been tested to keep rows apart, those of whole choices have not.
    """
    followers: dict[tuple[int, ...], dict[int, None]] = {}
    for tokens in choices:
        for length, token in enumerate(tokens):
            followers.setdefault(tokens[:length], {})[token] = None
    scores: dict[tuple[int, ...], Floats] = {(): np.zeros(len(rows))}

    def walk(begun: tuple[int, ...], raw: torch.Tensor) -> None:
        ids = np.array(list(followers[begun]), np.int64)
        scored = log_probabilities(engine.settle(raw), ids)
        scores.update({(*begun, token): scores[begun] + scored[:, i] for i, token in enumerate(ids.tolist())})
        longer = [(*begun, token) for token in ids.tolist() if (*begun, token) in followers]
        mark = batch.mark() if longer else None
        for tokens in longer:
            walk(tokens, batch.step(torch.full((len(rows),), tokens[-1], device=engine.body.device)))
            batch.rewind(mark)

    raw = batch.start(rows)
    if followers:
        walk((), raw)
    return np.stack([scores[tokens] for tokens in choices], axis=1) if choices else np.zeros((len(rows), 0))
