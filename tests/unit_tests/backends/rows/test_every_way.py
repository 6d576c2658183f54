"""Rows are the same whichever way they are asked for, and are not zeros: a fault of all rows leaves noise, no error."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from langchain_dpicl import EmbeddedLLM
from langchain_dpicl.backends import PrivateProcess
from langchain_dpicl.backends.resolve import as_backend, as_choice_backend, as_embeddings, as_text_backend
from langchain_dpicl.backends.rows.answer_rows import AnswerRows, Keywords
from langchain_dpicl.backends.rows.label_rows import LabelRows
from langchain_dpicl.backends.rows.neighbour_rows import LocalEmbeddings, NearestRows, SimilarTexts
from langchain_dpicl.backends.rows.rows import FullRowSource, LogitRequest, PublicRowContext, RowSource
from langchain_dpicl.backends.sync_async import Call
from tests import process_models
from tests.forked_starts import nursery, quick_starts  # noqa: F401  fixtures
from tests.unit_tests.backends.rows.test_answer_rows import Echo

pytestmark = pytest.mark.usefixtures("quick_starts")

RED, BLUE = "the apple is red and red\nthe apple is", "the sea is blue and blue\nthe sea is"
PROMPTS = (RED, BLUE, None)
LABELS = ((" red",), (" blue",))


def labels(llm: Any, **how: Any) -> Any:
    rows = LabelRows(
        as_choice_backend(llm, votes=how.pop("votes", None)), LABELS, calibrate=how.pop("calibrate", False), **how
    )
    return rows.ask(tuple(None if prompt is None else (prompt, "the apple is red\nit is") for prompt in PROMPTS))


def tokens(llm: Any, *, released: int = 0) -> Any:
    engine = as_backend(llm)
    top = [token for token, _ in engine.top_tokens(RED, [], top_k=min(engine.max_top_k or 9, 9))]
    source = RowSource(engine, PROMPTS, top[:released])
    return Call(partial(source.score, tuple(top)), partial(source.ascore, tuple(top)))


def logits(llm: Any) -> Any:
    engine: Any = as_backend(llm)
    return LogitRequest(FullRowSource(engine, PROMPTS, [], PublicRowContext("it is", num_rows=3)), np.arange(9))


def embedded(llm: Any) -> Any:
    return AnswerRows.embedded(as_text_backend(llm), NearestRows(LocalEmbeddings()).embeddings, max_tokens=4).ask(
        PROMPTS
    )


def keywords(llm: Any) -> Any:
    found = Keywords(("red", "blue", "and", "apple"))
    return AnswerRows.keywords(as_text_backend(llm), found, max_tokens=4).ask(PROMPTS)


def nearest(embeddings: Any) -> Any:
    source = NearestRows(as_embeddings(embeddings))
    return source.ask(
        [None if prompt is None else (prompt,) for prompt in PROMPTS], source.request_public([RED, BLUE]).run()
    )


def similar(embeddings: Any) -> Any:
    source = SimilarTexts(as_embeddings(embeddings), threshold=0.9)
    return source.ask([(RED,), (BLUE, RED), (BLUE,)], source.request_public(RED).run())


def answers(embeddings: Any) -> Any:
    return AnswerRows.embedded(Echo(), NearestRows(as_embeddings(embeddings)).embeddings, max_tokens=4).ask(PROMPTS)


Kinds = dict[str, Callable[[Any], Any]]

WHOLE: Kinds = {"labels": labels, "calibrated": lambda llm: labels(llm, calibrate=True)}
VOTES: Kinds = {
    "text votes": lambda llm: labels(llm, votes="text"),
    "text votes and others": lambda llm: labels(llm, votes="text", other=True),
}
TOKENS: Kinds = {"tokens": tokens, "tokens behind one": lambda llm: tokens(llm, released=1)}
TEXTS: Kinds = {"embedded answers": embedded, "keywords": keywords}
EMBEDDED: Kinds = {"nearest": nearest, "similar": similar, "answers": answers}
HAS_DECISIONS = find_spec("langchain_openai") is not None and find_spec("langchain_openai.decisions") is not None

ENGINES: dict[str, tuple[Any, dict[str, Any], Kinds]] = {
    "embedded": (EmbeddedLLM, {}, {"labels": labels, "tokens": tokens}),
    "vocabulary": (process_models.copier, {}, {**WHOLE, **TOKENS, **TEXTS}),
    "top tokens": (process_models.copier, {"max_top_k": 5}, {**WHOLE, **TOKENS, **TEXTS}),
    "logits": (process_models.full, {}, {**WHOLE, **TOKENS, **TEXTS, "logits": logits}),
    "chat": (process_models.chat, {}, {**WHOLE, **VOTES, **TOKENS, **TEXTS}),
    "completion": (process_models.completion, {}, {**WHOLE, **VOTES, **TOKENS, **TEXTS}),
    "text-only chat": (process_models.text_only, {}, {**VOTES, **TEXTS}),
    "decisions": (process_models.decisions, {}, WHOLE),
    "dense embeddings": (process_models.embeddings, {"size": 64}, EMBEDDED),
    "sparse embeddings": (LocalEmbeddings, {"topics": False}, EMBEDDED),
}


def blocking(effect: Any) -> Any:
    return effect.run()


def awaited(effect: Any) -> Any:
    return asyncio.run(effect.arun())


def in_a_loop(effect: Any) -> Any:
    async def run() -> Any:
        return effect.run()

    return asyncio.run(run())


def read(found: Any) -> np.ndarray:
    if isinstance(found, dict):
        return np.array([[number in found.get(place, ()) for number in (0, 1)] for place in range(3)])
    return np.asarray(found[:])


@pytest.mark.parametrize("name", ENGINES)
def test_rows_of_an_engine_are_the_same_every_way(name: str) -> None:
    if name == "decisions" and not HAS_DECISIONS:
        pytest.skip("this langchain-openai has no decision models")
    make, how, kinds = ENGINES[name]
    with ExitStack() as stack:
        places = [make(**how), stack.enter_context(PrivateProcess(make, **how))]
        for kind, ask in kinds.items():
            rows = [read(way(ask(llm)).take()) for llm in places for way in (blocking, awaited, in_a_loop)]
            assert np.nan_to_num(rows[0][0]).any(), kind
            assert np.nan_to_num(rows[0][1]).any(), kind
            assert rows[0][0].tolist() != rows[0][1].tolist(), kind
            assert {one.tobytes() for one in rows} == {rows[0].tobytes()}, kind
