"""Turns private prompts into rows by way of the model's answers: embeddings, or the keywords that occur."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from langchain_dpicl.backends._completion import stops_of
from langchain_dpicl.backends.base import Rows, TextBackend
from langchain_dpicl.backends.calls import whole
from langchain_dpicl.backends.embeddings import SilentEmbeddings
from langchain_dpicl.backends.keywords import Keywords
from langchain_dpicl.backends.rows import Boxed, aguarded, fits, guarded
from langchain_dpicl.backends.silent import Hidden
from langchain_dpicl.backends.walk import Ask
from langchain_dpicl.exceptions import CapabilityError, ConfigurationError

Box = Hidden[str]


class AnswerRows:
    """Turns private prompts into rows by way of their answers.

    Formal guarantees:
      - Row i is computed from prompt i, the engine and public settings alone.
      - A row whose prompt is None, whose call failed, or whose answer is blank or cannot be
        read, is zeros. The content of a prompt or answer raises nothing; Ctrl-C and a cancelled task go on from frames
        that hold nothing private.
      - Neither prompts nor answers are kept after the ask is gone.

    Args:
      engine: completes text.
      reader: reads answers.
      max_tokens: most tokens of one answer.
      stop: what ends an answer.

    Raises:
      CapabilityError: the engine does not complete text.
      ConfigurationError: another argument is not what is expected here.

    >>> from langchain_dpicl.backends.fake import FakeBackend, scripted
    >>> engine = FakeBackend(scripted({"a red": 1.0}, {" boat": 1.0}), max_top_k=1)
    >>> source = AnswerRows.keywords(engine, Keywords(["boat", "car"]), max_tokens=4)
    >>> source.ask(("what floats?", None)).run().take().tolist()
    [[1.0, 0.0], [0.0, 0.0]]
    """

    def __init__(self, engine: TextBackend, reader: Reader, *, max_tokens: int, stop: Sequence[str]) -> None:
        if isinstance(engine, type) or not isinstance(engine, TextBackend):
            kind = engine.__name__ if isinstance(engine, type) else type(engine).__name__
            raise CapabilityError(
                f"expected an engine that completes text, found {kind}; take LangChainBackend or TextVoteBackend "
                "around a LangChain model, or the embedded model"
            )
        self._engine = engine
        self._reader = reader
        self._options: dict[str, Any] = {"max_tokens": whole("max_tokens", max_tokens), "stop": stops_of(stop)}

    @classmethod
    def embedded(
        cls, engine: TextBackend, embeddings: SilentEmbeddings, *, max_tokens: int, stop: Sequence[str] = ()
    ) -> AnswerRows:
        """Returns rows that are the embeddings of answers."""
        if not isinstance(embeddings, SilentEmbeddings):
            raise ConfigurationError(
                f"expected SilentEmbeddings, found {type(embeddings).__name__}; wrap it: SilentEmbeddings(embeddings)"
            )
        return cls(engine, _Vectors(embeddings), max_tokens=max_tokens, stop=stop)

    @classmethod
    def keywords(
        cls, engine: TextBackend, keywords: Keywords, *, max_tokens: int, stop: Sequence[str] = ()
    ) -> AnswerRows:
        """Returns rows of bits: which keywords occur in an answer."""
        if not isinstance(keywords, Keywords):
            raise ConfigurationError(
                f"expected Keywords, found {type(keywords).__name__}; wrap it: Keywords(domain), or Keywords.of_texts("
                "public_texts, most=...)"
            )
        return cls(engine, _Bits(keywords), max_tokens=max_tokens, stop=stop)

    @property
    def width(self) -> int:
        """Number of columns of a row."""
        return self._reader.width

    def ask(self, prompts: Sequence[str | None]) -> Ask:
        """Returns the effect that computes the rows of these private prompts: `Boxed` float64[prompts, width]."""
        return _AskAnswers(
            self._engine,
            self._reader,
            self._options,
            tuple(None if prompt is None else Hidden(prompt) for prompt in prompts),
        )


class Reader(Protocol):
    """Turns texts into rows."""

    @property
    def width(self) -> int:
        """Number of columns of a row."""

    def rows(self, texts: Sequence[Box]) -> Rows:
        """Returns float64[texts, width]."""

    async def arows(self, texts: Sequence[Box]) -> Rows:
        """Async twin of `rows`."""


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class _Vectors:
    """Reads answers by their embeddings."""

    embeddings: SilentEmbeddings

    @property
    def width(self) -> int:
        return self.embeddings.dimension

    def rows(self, texts: Sequence[Box]) -> Rows:
        return self.embeddings.rows(texts)

    async def arows(self, texts: Sequence[Box]) -> Rows:
        return await self.embeddings.arows(texts)


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class _Bits:
    """Reads answers by the keywords that occur in them."""

    domain: Keywords

    @property
    def width(self) -> int:
        return len(self.domain)

    def rows(self, texts: Sequence[Box]) -> Rows:
        return np.array([self.domain.bits(text.reveal()) for text in texts]).reshape(len(texts), self.width)

    async def arows(self, texts: Sequence[Box]) -> Rows:
        return self.rows(texts)


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class _AskAnswers:
    """Computes the rows of one release; private frames run below `guarded`, so a stop finds hidden values only."""

    engine: TextBackend
    reader: Reader
    options: dict[str, Any]
    prompts: tuple[Box | None, ...]

    def run(self) -> Boxed:
        """Runs, blocking."""
        return guarded(self._rows) or Boxed(self._zeros())

    async def arun(self) -> Boxed:
        """Runs, awaiting."""
        return await aguarded(self._arows) or Boxed(self._zeros())

    def _rows(self) -> Boxed:
        answers = _scattered(self.prompts, _each(self._answers, _present(self.prompts), _fit_answers))
        rows = _each(self.reader.rows, _present(answers), self._fit_rows)
        return self._boxed(answers, rows)

    async def _arows(self) -> Boxed:
        answers = _scattered(self.prompts, await _aeach(self._aanswers, _present(self.prompts), _fit_answers))
        rows = await _aeach(self.reader.arows, _present(answers), self._fit_rows)
        return self._boxed(answers, rows)

    def _answers(self, prompts: Sequence[Box]) -> list[str]:
        return self.engine.complete([prompt.reveal() for prompt in prompts], **self.options)

    async def _aanswers(self, prompts: Sequence[Box]) -> list[str]:
        return await self.engine.acomplete([prompt.reveal() for prompt in prompts], **self.options)

    def _fit_rows(self, rows: Any, count: int) -> list[Any] | None:
        """Returns one row per text, or None for any other result."""
        return list(rows) if fits(rows, count, self.reader.width) else None

    def _boxed(self, answers: Sequence[Box | None], rows: Sequence[Any]) -> Boxed:
        out = self._zeros()
        for place, row in zip([i for i, answer in enumerate(answers) if answer is not None], rows, strict=True):
            out[place] = 0.0 if row is None else row
        return Boxed(out)

    def _zeros(self) -> Rows:
        return np.zeros((len(self.prompts), self.reader.width))


def _each(
    action: Callable[[Sequence[Box]], Any], boxes: Sequence[Box], fit: Callable[[Any, int], list[Any] | None]
) -> list[Any]:
    """Returns an action's result for each box: of all at once or, if that fails, one by one; None where it fails."""
    if not boxes:
        return []
    results = guarded(lambda: fit(action(boxes), len(boxes)))
    if results is None and len(boxes) > 1:
        results = [one for box in boxes for one in _each(action, [box], fit)]
    return [None] * len(boxes) if results is None else results


async def _aeach(
    action: Callable[[Sequence[Box]], Awaitable[Any]], boxes: Sequence[Box], fit: Callable[[Any, int], list[Any] | None]
) -> list[Any]:
    """Async twin of `_each`."""

    async def together() -> list[Any] | None:
        return fit(await action(boxes), len(boxes))

    if not boxes:
        return []
    results = await aguarded(together)
    if results is None and len(boxes) > 1:
        results = [one for box in boxes for one in await _aeach(action, [box], fit)]
    return [None] * len(boxes) if results is None else results


def _fit_answers(answers: Any, count: int) -> list[Any] | None:
    """Hides answers, with None for a blank one; None if their number is wrong."""
    if not isinstance(answers, list | tuple) or len(answers) != count:
        return None
    return [Hidden(answer) if isinstance(answer, str) and answer.strip() else None for answer in answers]


def _present(boxes: Sequence[Box | None]) -> list[Box]:
    return [box for box in boxes if box is not None]


def _scattered(prompts: Sequence[Box | None], answers: Sequence[Box | None]) -> list[Box | None]:
    """Returns the answers at the places of their prompts."""
    remaining = iter(answers)
    return [None if prompt is None else next(remaining) for prompt in prompts]
