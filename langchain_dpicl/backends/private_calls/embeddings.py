"""Wraps LangChain embeddings as an engine that embeds private texts silently, one call per text."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np
from langchain_core.embeddings import Embeddings
from numpy.typing import NDArray
from pydantic import BaseModel

from langchain_dpicl.backends.base import Rows
from langchain_dpicl.backends.private_calls.call import (
    CallPool,
    OpaqueValue,
    Reply,
    Request,
    RetryPolicy,
    SilentEngine,
    SilentModel,
    private_settings,
)
from langchain_dpicl.backends.private_calls.model_checks import EMBEDDING, hush_clients, refuse_keepers
from langchain_dpicl.backends.private_calls.public_calls import answer_or_raise, probe_answer_or_raise
from langchain_dpicl.exceptions import CapabilityError, ConfigurationError, ModelCallError

E = TypeVar("E", bound=Embeddings)

_PROBE_TEXT = "Copper lanterns drift above the quiet harbour."
_TEXT_ONLY = (
    "OpenAIEmbeddings(..., check_embedding_ctx_length=False) sends text, as servers other than OpenAI's may need"
)
_ADVICE = (
    "It takes embeddings whose embed_documents gives one list of finite numbers per text: check the model, and its "
    f"base_url (OpenAI's and that of most servers ends in /v1). {_TEXT_ONLY}"
)
_TOKENS = f"It may also be the tokenizer that could not be downloaded: {_TEXT_ONLY}"
_SPARSE = 8
"""Of so many numbers of a sparse vector at most one is not 0."""
_PROGRESS = ("show_progress_bar", "show_progress")


class SilentEmbeddings(SilentEngine):
    """LangChain embeddings, called silently, one row per text.

    Formal guarantees:
      - Row i of `rows` is computed from text i alone: each text is a call of its own, so neither padding nor another
        text's failure moves it.
      - A row has `dimension` finite numbers, as the model gives them (not normalised). A failed call, and an answer
        that is no such row, is zeros; the content of a text raises nothing.
      - No text and no vector reaches a LangChain callback, tracer, cache, log, warning or exception.

    Args:
      embeddings: any `langchain_core.embeddings.Embeddings` that keeps nothing: no cache-backed ones.
      max_concurrency: calls in flight at once, over all threads and event loops; None: 32.
      retry: how long each row's call is waited for.

    Raises:
      CapabilityError: these are no embeddings, or a probe with public text brings no vector of finite numbers.
      ModelCallError: the probe got no answer; an unreachable or busy server is asked twice, with a wait of at most 2
        seconds (the client's own retries and timeout come on top).
      UnsilencableModelError: the embeddings, or inner ones that they hold, keep texts (a cache, a byte store, a
        memoised method), hold a runnable or callback handler, start LangChain runs, are routed through the LangSmith
        gateway, or somebody has instrumented them or the SDK they call.
      ConfigurationError: `max_concurrency` is out of range.

    >>> from langchain_core.embeddings import DeterministicFakeEmbedding
    >>> silent = SilentEmbeddings(DeterministicFakeEmbedding(size=3))
    >>> silent.rows([OpaqueValue("a private answer")]).shape
    (1, 3)
    """

    def __init__(
        self, embeddings: Embeddings, *, max_concurrency: int | None = None, retry: RetryPolicy | None = None
    ) -> None:
        if not isinstance(embeddings, Embeddings):
            kind = f"the class {embeddings.__name__}" if isinstance(embeddings, type) else type(embeddings).__name__
            raise CapabilityError(
                f"expected LangChain embeddings (an instance, such as OpenAIEmbeddings(...)), found {kind}"
            )
        refuse_keepers(embeddings)
        self._model = _SilentEmbedder(_quiet_copy(embeddings))
        self._calls = CallPool(self._model, retry or RetryPolicy(), max_concurrency)
        probe = self._probed(sends_tokens=bool(getattr(embeddings, "check_embedding_ctx_length", False)))
        self._dimension = probe.size
        self._is_sparse = 0 < _SPARSE * int(np.count_nonzero(probe)) <= probe.size  # zeros say nothing of other texts

    def __repr__(self) -> str:
        return f"SilentEmbeddings({self.name!r}, dimension={self._dimension})"

    @property
    def dimension(self) -> int:
        """How many numbers a row has, as the probe saw it."""
        return self._dimension

    @property
    def is_sparse(self) -> bool:
        """Whether the probe's row has numbers other than 0, one in eight at most; public: nothing private decides."""
        return self._is_sparse

    def rows(self, texts: Sequence[OpaqueValue[str]]) -> Rows:
        """Returns float64[texts, dimension] for PRIVATE texts; a failed row is zeros."""
        return self._stack(self._calls.many([_request(text) for text in texts]))

    async def arows(self, texts: Sequence[OpaqueValue[str]]) -> Rows:
        """Async twin of `rows`; texts are embedded concurrently."""
        return self._stack(await self._calls.amany([_request(text) for text in texts]))

    def public(self, texts: Sequence[str]) -> Rows:
        """Returns float64[texts, dimension] for PUBLIC texts, one call each."""
        replies = self._calls.many([_request(text, explain="kind") for text in _public_texts(texts)])
        return self._checked(replies)

    async def apublic(self, texts: Sequence[str]) -> Rows:
        """Async twin of `public`."""
        replies = await self._calls.amany([_request(text, explain="kind") for text in _public_texts(texts)])
        return self._checked(replies)

    def _stack(self, replies: Sequence[Reply]) -> Rows:
        rows: Rows = np.zeros((len(replies), self._dimension))
        for place, reply in enumerate(replies):
            if reply.answer is not None and _width(reply.answer) == self._dimension:
                rows[place] = reply.answer.reveal().decision.answers
        return rows

    def _checked(self, replies: Sequence[Reply]) -> Rows:
        """Stacks public replies into rows, or raises ModelCallError."""
        for reply in replies:
            if _width(answer_or_raise(self.name, reply)) != self._dimension:
                raise ModelCallError(
                    f"expected {self._dimension} finite numbers from a public call to {self.name}, as its probe "
                    "brought, found something else. Check the model and call again"
                )
        return self._stack(replies)

    def _probed(self, *, sends_tokens: bool) -> NDArray[np.float64]:
        reply = self._calls.probe(_request(OpaqueValue(_PROBE_TEXT), explain="text"))
        try:
            answer = probe_answer_or_raise(self.name, reply, asked="the vector of a short text", advice=_ADVICE)
        except ModelCallError as error:
            raise ModelCallError(f"{error}. {_TOKENS}" if sends_tokens else str(error)) from None
        if not _width(answer):
            raise CapabilityError(f"{self.name} answered a public probe without a vector of finite numbers. {_ADVICE}")
        vector: NDArray[np.float64] = answer.reveal().decision.answers
        return vector


class _SilentEmbedder(SilentModel):
    """Embeddings as a silent model: they take a list of texts, as completion models do."""

    def __init__(self, embeddings: Embeddings) -> None:
        super().__init__(embeddings, {}, takes=("completion", EMBEDDING))

    def _door(self, number: int, model: Any) -> Callable[..., Any]:
        return partial((_embed_text, _aembed_text)[number], super()._door(number, model))


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class _Vector:
    """The vector of one text; `silent` treats it as it treats a decision model's `answers`."""

    answers: NDArray[np.float64] | None


def _embed_text(door: Callable[[list[str]], object], texts: list[str]) -> _Vector:
    return _Vector(vector_of(door(texts)))


async def _aembed_text(door: Callable[[list[str]], Awaitable[object]], texts: list[str]) -> _Vector:
    return _Vector(vector_of(await door(texts)))


def vector_of(answer: object) -> NDArray[np.float64] | None:
    """Returns float64[d] of the embedding of one text; None for anything but one list of finite numbers."""
    if not isinstance(answer, list | tuple | np.ndarray) or len(answer) != 1:
        return None
    try:
        with np.errstate(all="ignore"):  # a caller's numpy error state is not a fault of this row
            array = np.asarray(answer[0])
            numbers: NDArray[np.float64] = array.astype(np.float64) if array.dtype.kind in "fiu" else np.empty(0)
    except Exception:  # noqa: BLE001  lists of unequal lengths, and whatever objects of foreign classes do
        return None
    return numbers if numbers.ndim == 1 and np.isfinite(numbers).all() else None


def _request(text: OpaqueValue[str] | str, *, explain: Literal["", "kind", "text"] = "") -> Request:
    return Request(text if isinstance(text, OpaqueValue) else OpaqueValue(text), str, {}, explain=explain)


def _public_texts(texts: Sequence[str]) -> list[str]:
    if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
        raise ConfigurationError("expected a list of public texts, found something else; private ones go into rows()")
    return list(texts)


def _width(answer: OpaqueValue[Any]) -> int:
    """Returns the length of an answer's vector; 0 if it has none."""
    return 0 if answer.reveal().decision.answers is None else int(answer.reveal().decision.answers.size)


def _quiet_copy(embeddings: E) -> E:
    """Returns a pydantic model's copy without progress bars, spans and public settings; others unchanged."""
    if not isinstance(embeddings, BaseModel):
        return embeddings
    fields = type(embeddings).model_fields
    unseen = dict.fromkeys((name for name in _PROGRESS if name in fields), False)
    quiet = embeddings.model_copy(update=unseen | private_settings(embeddings))
    hush_clients(quiet)
    return quiet
