"""Runs releases WITHOUT noise and without charge, for examples that no ledger protects."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.backends.base import NextTokenBackend, Token
from langchain_dpicl.backends.rows import guarded
from langchain_dpicl.backends.walk import Ask, Walk
from langchain_dpicl.exceptions import ModelCallError
from langchain_dpicl.privacy.examples import PrivateExamples
from langchain_dpicl.privacy.mechanisms.release_plan import ReleasePlan
from langchain_dpicl.release.curator import Render, pool_without_privacy
from langchain_dpicl.release.sample import Record, Rendered, block_on, drawn
from langchain_dpicl.release.token_block import NOT_COMPUTED, Block, argmax_index, summed

T = TypeVar("T")


def release_once_without_privacy(
    private: PrivateExamples,
    *,
    plan: ReleasePlan,
    rows: Callable[[Rendered[T]], Ask],
    render: Callable[[Sequence[Record]], T],
    width: int,
) -> Walk[NDArray[np.float64]]:
    """Returns the exact sum float64[d] of one sample; the pool is refused if a ledger protects it."""
    pool = pool_without_privacy(private, None)
    ask = guarded(lambda: rows(drawn(pool, plan)(render)))
    if ask is None:
        raise ModelCallError(NOT_COMPUTED)
    boxed = yield ask
    return summed(boxed, plan, width).value


@contextlib.contextmanager
def open_block_without_privacy(
    private: PrivateExamples,
    *,
    label: str | None,
    plan: ReleasePlan,
    length: int,
    backend: NextTokenBackend,
    render: Render,
    prefix: Sequence[Token] = (),
) -> Iterator[Block]:
    """Opens a token block that releases the exact argmax; the pool is refused if a ledger protects it."""
    pool = pool_without_privacy(private, label)
    block = block_on(pool, plan, render, prefix=prefix, backend=backend, length=length)
    block.release = argmax_index
    with contextlib.closing(block):
        yield block
