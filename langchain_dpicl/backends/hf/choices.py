"""Scores choices as continuations of private prompts; beginnings that choices share are read once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from langchain_dpicl.backends.hf.batches import Batch
from langchain_dpicl.backends.hf.chunks import PrivateRows
from langchain_dpicl.backends.hf.engine import Engine
from langchain_dpicl.backends.hf.prompts import Prompts
from langchain_dpicl.backends.hf.rows import answered
from langchain_dpicl.backends.hf.vocabulary import Floats, log_probabilities
from langchain_dpicl.exceptions import ConfigurationError


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

        answered(engine, private, lambda batch, rows, tokens=tokens: likelihoods(engine, batch, rows, tokens), put)  # type: ignore[misc]
    return out


def _ids(engine: Engine, reader: Prompts, choice: str, *, with_space: bool) -> tuple[int, ...]:
    tokens = reader.tokens
    if with_space:
        choice = f" {choice.lstrip(' ')}"
    elif tokens.chat and tokens.answers_after_space:
        choice = choice.lstrip(" ")
    ids = tuple(tokens.continued(choice))
    if not all(engine.vocabulary.is_candidate[id_] for id_ in ids):
        raise ConfigurationError("expected choices of ordinary tokens, found one with a special token")
    return ids


def likelihoods(
    engine: Engine, batch: Batch, rows: Sequence[Sequence[int]], choices: Sequence[tuple[int, ...]]
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
