"""Computes label probabilities after private or public prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl._opaque import OpaqueRows, run_guarded
from langchain_dpicl.backends.base import ChoiceBackend, NextTokenBackend, Rows
from langchain_dpicl.backends.rows.label_scoring import (
    Scorer,
    calibrate_contextually,
    check_verbalizers,
    fitting,
    label_scorer,
)
from langchain_dpicl.backends.rows.public_beside import LEAST_BESIDE, Outage, PublicAnswer
from langchain_dpicl.backends.rows.rows import arun_guarded
from langchain_dpicl.backends.sync_async import Effect, apublic_call, concurrency_limit, public_call
from langchain_dpicl.exceptions import ConfigurationError, ModelCallError

MOST_AT_ONCE = 64
"""Public prompts per call of the engine, content-free ones included."""

_ALONE_AT_ONCE = 8
"""Public prompts that are asked again at once, each alone, where every error is kept."""

LabelScores: TypeAlias = list[float]
"""The probability of each label after one prompt; zeros: its answer names no label."""

Prompts: TypeAlias = tuple[tuple[str, ...] | None, ...]
"""One entry per row: (prompt with the query, prompt with content-free input 1, ...); None: the row abstains."""


class LabelRows:
    """Label probabilities of private prompts, one row each.

    What is read depends on the engine (`kind`):

    - "whole labels": the likelihoods of all texts, normalised over them and summed per label.
    - "decisions": the probabilities as the model gives them, summed per label; they may sum to less than 1.
    - "text votes": 1 for the label that the answer names, or zeros.
    - "first tokens": the probability of the tokens that begin texts of one label alone, renormalised over the labels.
      The tokens are chosen at construction, from the vocabulary or from the texts alone, and are public.

    Calibrated rows are divided by the mean of the same row's probabilities on its content-free prompts and
    renormalised (Zhao et al., 2021). A content-free prompt that failed is left out of the mean; without any, the row
    stays uncalibrated.

    With `other`, one more column at the end is 1 where an answer names no label: a refusal, say, or an empty text. A
    row that failed stays zeros.

    Formal guarantees:
      - Row i is a function of its own prompts, the texts and public settings alone: no prompt, failure or number of
        other rows moves a bit of it, wherever the engine's own rows have that property.
      - Each row is >= 0 and sums to <= 1 (up to rounding); it is zeros where it is None or its query's call failed.
      - Nothing raises for the content of a prompt; nothing of a prompt is kept once its `Effect` has answered.

    Args:
      engine: scores choices, or next tokens.
      verbalizers: the texts of each label, which may be several; public, taken verbatim.
      calibrate: whether content-free prompts are scored and divided by.
      other: whether answers that name no label are counted; for text votes alone.

    Raises:
      ConfigurationError: the verbalizers are no lists of texts, two labels share one, or the engine cannot tell the
        labels apart; or text votes are to be calibrated, or other answers to be counted where there are none.
      CapabilityError: the engine scores neither choices nor next tokens, or reports top tokens that are not bytes; or
        it cannot tell an answer without a label from a failed call, and `other` is asked for.

    >>> from langchain_dpicl.backends.fake import FakeBackend, scripted
    >>> fake = FakeBackend(scripted({" card": 0.5, " cash": 0.25, " coin": 0.25}), max_top_k=3)
    >>> rows = LabelRows(fake, [[" card"], [" cash", " coin"]], calibrate=False)
    >>> rows.kind, rows.ask((("a private prompt",), None)).run().take().tolist()
    ('whole labels', [[0.5, 0.5], [0.0, 0.0]])
    """

    def __init__(
        self,
        engine: ChoiceBackend | NextTokenBackend,
        verbalizers: Sequence[Sequence[str]],
        *,
        calibrate: bool,
        other: bool = False,
    ) -> None:
        labels = check_verbalizers(verbalizers)
        self._scorer = label_scorer(engine, labels, other=other)
        self._other = bool(other)
        if calibrate and self._scorer.kind == "text votes":
            raise ConfigurationError(
                f"expected calibrate=False with text votes, found calibrate={calibrate!r}: a text vote has no "
                "probabilities; take a model with logprobs to calibrate"
            )
        self._calibrate = bool(calibrate)
        self._outage = Outage()

    def __repr__(self) -> str:
        counts = ", counts_other=True" if self._other else ""
        return f"LabelRows(kind={self.kind!r}, width={self.width}, calibrates={self._calibrate}{counts})"

    @property
    def kind(self) -> str:
        """What is read of the engine: "whole labels", "decisions", "first tokens" or "text votes"."""
        return self._scorer.kind

    @property
    def width(self) -> int:
        """Number of labels, and one more where other answers are counted."""
        return self._scorer.width

    @property
    def calibrates(self) -> bool:
        """Whether probabilities are divided by those on content-free prompts."""
        return self._calibrate

    @property
    def counts_other(self) -> bool:
        """Whether the last column counts answers that name no label."""
        return self._other

    def ask(self, prompts: Prompts) -> Effect:
        """Returns the effect that computes float64[prompts, width], boxed; it runs once.

        Args:
          prompts: PRIVATE; see `Prompts`. Without calibration only the first prompt of a row is scored.
        """
        return _LabelRequest(self._scorer, prompts if self._calibrate else tuple([row and row[:1] for row in prompts]))

    def request_public_rows(self, prompts: Sequence[tuple[str, ...]]) -> Effect:
        """Returns the effect that computes float64[prompts, width] after PUBLIC prompts; zeros: no label is named.

        Args:
          prompts: (prompt with the query, prompt with content-free input 1, ...) each.

        The answer raises ModelCallError where a call failed, one on a content-free input included.
        """
        rows = tuple(row if self._calibrate else row[:1] for row in prompts)
        return _PublicRowsRequest(self, self.request_public_texts([text for row in rows for text in row]), rows)

    def public_row(self, prompts: tuple[str, ...]) -> PublicAnswer:
        """Returns the effect for float64[1, width] after one PUBLIC row of prompts; raises as `request_public_rows`."""
        return PublicAnswer(lambda: self.request_public_rows([prompts]), self._outage)

    def asks_beside(self, limit: int | None) -> bool:
        """Whether a public row goes beside private ones: the model is elsewhere, many calls overlap, and it answered.

        Args:
          limit: calls that may be in flight at once; None: as many as the engine makes.
        """
        most = self._scorer.calls_at_once
        return min(most, limit or most) >= LEAST_BESIDE and not self._outage.is_on

    def request_public_texts(self, texts: Sequence[str], *, keep_errors: bool = False) -> Effect:
        """Returns the effect that computes a dict from each PUBLIC text to its uncalibrated `LabelScores`.

        The first goes alone where the engine has public calls, which detects an outage at once, and the others go in
        batches; a repeated one is scored once. One that failed in its batch is scored again alone, and so is one whose
        answer names no label if the engine's batches do not distinguish that from a failure.

        Args:
          texts: complete prompts.
          keep_errors: whether a failed call's ModelCallError takes the place of its scores; else the first is raised,
            and no further batch is asked.
        """
        return _PublicTextsRequest(self._scorer.of_batches(), tuple(dict.fromkeys(texts)), self.width, keep_errors)

    def calibrated(self, own: LabelScores, free: Sequence[LabelScores]) -> LabelScores:
        """Returns scores divided by the mean of those after content-free prompts; see `calibrate_contextually`."""
        return calibrate_contextually(own, free, least=self._scorer.least)


@dataclass(slots=True, repr=False, eq=False)
class _LabelRequest:
    """Computes the private rows of one release, for the aggregation alone."""

    scorer: Scorer
    prompts: Prompts
    is_answered: bool = field(default=False)

    def run(self) -> OpaqueRows:
        """Runs, blocking."""
        self._once()
        try:
            # The frames below hold private values; a stop is raised again from a frame without them.
            return run_guarded(self._rows) or self._nothing()
        finally:
            self.prompts = ()

    async def arun(self) -> OpaqueRows:
        """Runs, awaiting."""
        self._once()
        try:
            return await arun_guarded(self._arows) or self._nothing()
        finally:
            self.prompts = ()

    def _once(self) -> None:
        """Refuses a second run, which would have no rows, as if every record were gone."""
        if self.is_answered:
            raise ConfigurationError("expected one call, found a second; make new rows for each query")
        self.is_answered = True

    def _nothing(self) -> OpaqueRows:
        return OpaqueRows(self._empty(len(self.prompts)))

    def _texts(self) -> list[str]:
        return [text for row in self.prompts if row for text in row]

    def _rows(self) -> OpaqueRows:
        texts = self._texts()
        found = run_guarded(lambda: self._score(texts)) if texts else self._empty(0)
        if found is None:
            found = self._empty(len(texts))
            for place, text in enumerate(texts):
                one = run_guarded(lambda text=text: self._score([text]))  # type: ignore[misc]
                found[place] = 0.0 if one is None else one[0]
        return self._spread(found)

    async def _arows(self) -> OpaqueRows:
        texts = self._texts()
        found = await arun_guarded(lambda: self._ascore(texts)) if texts else self._empty(0)
        if found is None:
            found = self._empty(len(texts))
            for place, text in enumerate(texts):
                one = await arun_guarded(lambda text=text: self._ascore([text]))  # type: ignore[misc]
                found[place] = 0.0 if one is None else one[0]
        return self._spread(found)

    def _score(self, texts: list[str]) -> Rows | None:
        return self._read(self.scorer.score(texts), len(texts))

    async def _ascore(self, texts: list[str]) -> Rows | None:
        return self._read(await self.scorer.ascore(texts), len(texts))

    def _read(self, scores: object, num_texts: int) -> Rows | None:
        fitted = fitting(scores, num_texts, self.scorer.columns)
        return None if fitted is None else self.scorer.read(fitted)

    def _empty(self, num_texts: int) -> Rows:
        return np.zeros((num_texts, self.scorer.width))

    def _spread(self, found: Rows) -> OpaqueRows:
        """Makes each row of the probabilities after its own prompts, which are adjacent; one that failed is zeros."""
        if len(found) == len(self.prompts) and None not in self.prompts:  # one prompt each, in their order
            return OpaqueRows(np.array(found, dtype=np.float64))
        rows = self._empty(len(self.prompts))
        first = 0
        for place, texts in enumerate(self.prompts):
            if texts:
                rows[place] = found[first] if len(texts) == 1 else self._calibrated(found[first : first + len(texts)])
                first += len(texts)
        return OpaqueRows(rows)

    def _calibrated(self, found: Rows) -> LabelScores | float:
        own, *free = found.tolist()
        row = run_guarded(lambda: calibrate_contextually(own, free, least=self.scorer.least))
        return 0.0 if row is None else row


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class _PublicTextsRequest:
    """Computes the label scores after each of many public texts."""

    scorer: Scorer
    texts: tuple[str, ...]
    width: int
    keep_errors: bool

    def run(self) -> dict[str, LabelScores | ModelCallError]:
        """Runs, blocking."""
        return public_call(self._score)

    async def arun(self) -> dict[str, LabelScores | ModelCallError]:
        """Runs, awaiting."""
        return await apublic_call(self._ascore)

    def _score(self) -> dict[str, LabelScores | ModelCallError]:
        found = self._alone(self.texts[: self._num_alone])
        for texts in self._batches():
            read = self._read(texts, self.scorer.score(texts))
            found |= read | self._alone([text for text in texts if text not in read])
        return found

    async def _ascore(self) -> dict[str, LabelScores | ModelCallError]:
        found = await self._aalone(self.texts[: self._num_alone])
        for texts in self._batches():
            read = self._read(texts, await self.scorer.ascore(texts))
            found |= read | await self._aalone([text for text in texts if text not in read])
        return found

    @property
    def _num_alone(self) -> int:
        return int(self.scorer.has_public_calls or len(self.texts) == 1)

    def _batches(self) -> list[tuple[str, ...]]:
        texts = self.texts[self._num_alone :]
        return [texts[first : first + MOST_AT_ONCE] for first in range(0, len(texts), MOST_AT_ONCE)]

    def _read(self, texts: Sequence[str], scores: object) -> dict[str, LabelScores | ModelCallError]:
        rows = self.scorer.batch(scores, len(texts))
        return {text: row[: self.width] for text, row in zip(texts, rows, strict=True) if row is not None}

    def _alone(self, texts: Sequence[str]) -> dict[str, LabelScores | ModelCallError]:
        if not self.keep_errors:
            return {text: self.scorer.public(text)[: self.width] for text in texts}

        def ask(text: str) -> LabelScores | ModelCallError:
            try:
                return self.scorer.public(text)[: self.width]
            except ModelCallError as error:
                return error

        with ThreadPoolExecutor(concurrency_limit() or _ALONE_AT_ONCE) as pool:
            return dict(zip(texts, pool.map(ask, texts), strict=True))

    async def _aalone(self, texts: Sequence[str]) -> dict[str, LabelScores | ModelCallError]:
        if not self.keep_errors:
            return {text: (await self.scorer.apublic(text))[: self.width] for text in texts}
        gate = asyncio.Semaphore(concurrency_limit() or _ALONE_AT_ONCE)

        async def ask(text: str) -> LabelScores | ModelCallError:
            async with gate:
                try:
                    return (await self.scorer.apublic(text))[: self.width]
                except ModelCallError as error:
                    return error

        return dict(zip(texts, await asyncio.gather(*map(ask, texts)), strict=True))


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class _PublicRowsRequest:
    """Computes the rows of public prompts, calibrated by their content-free ones."""

    rows: LabelRows
    ask: Effect
    prompts: tuple[tuple[str, ...], ...]

    def run(self) -> NDArray[np.float64]:
        """Runs, blocking."""
        return self._read(self.ask.run())

    async def arun(self) -> NDArray[np.float64]:
        """Runs, awaiting."""
        return self._read(await self.ask.arun())

    def _read(self, scores: Mapping[str, LabelScores]) -> NDArray[np.float64]:
        rows = [self.rows.calibrated(scores[own], [scores[text] for text in free]) for own, *free in self.prompts]
        return np.array(rows, dtype=np.float64).reshape(len(rows), self.rows.width)
