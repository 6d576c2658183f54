"""Answers with their votes and receipts, as private Runnables return them."""

from __future__ import annotations

from typing import Literal, TypeAlias

from pydantic import BaseModel, ConfigDict

from langchain_dpicl.options import html_table

Source: TypeAlias = Literal["release", "memo", "zero-shot"]


class _Shown(BaseModel):
    """A frozen public value, which a notebook shows as a table."""

    model_config = ConfigDict(frozen=True)

    def _repr_html_(self) -> str:
        data = self.model_dump()
        receipt = data.pop("receipt", {})
        shown = {name: value for name, value in {**data, **receipt}.items() if value is not None}
        return html_table(type(self).__name__, shown)


class Receipt(_Shown):
    """Price and payer of an answer. Public.

    Attributes:
      source: "release": a private release, charged; "memo": a cached release; "zero-shot": the model alone,
        without private records. The last two are free.
      tickets: tickets charged for this answer: 1 or 0.
      component: name of the component's share in the ledger.
      dataset_id: the private data set.
      ledger_id: the ledger.
      entry: number of the reservation in the ledger; None if nothing was charged.
      entry_hash: hash of that line, by which `Budget.check_receipt` verifies later that the ledger still holds the
        line; None if nothing was charged.
      index: place of the ticket among those that the line reserved; None if nothing was charged.
      adjacency: the neighbouring relation.
      epsilon: upper bound of the whole share, all its queries together, at `delta`; not of this query. `epsilon`,
        `delta` and `queries_left` are None if the ledger could not be read when the receipt was written.
      delta: of the whole share.
      mechanism: "gumbel", "gaussian", ...
      noise_multiplier: noise scale over sensitivity.
      queries_left: tickets the share had left when the receipt was written.
    """

    source: Source
    tickets: int
    component: str
    dataset_id: str
    ledger_id: str
    entry: int | None
    entry_hash: str | None = None
    index: int | None = None
    adjacency: str
    epsilon: float | None
    delta: float | None
    mechanism: str
    noise_multiplier: float
    queries_left: int | None


class VotingResult(_Shown):
    """An answer of `DPVotingRunnable` with its votes and receipt. Public; prints as its label.

    Attributes:
      label: the answer; if `abstained`, the abstention text.
      abstained: whether no label had enough votes. Rows that failed vote for nothing.
      scores: noisy votes by label, on a public grid; they may be negative. None unless asked for.
      expected_votes: the public number of votes that full agreement is expected to bring.
      receipt: its price and payer.
    """

    label: str
    abstained: bool
    scores: dict[str, float] | None
    expected_votes: float
    receipt: Receipt

    def __str__(self) -> str:
        return self.label


class RetrievalResult(_Shown):
    """An answer of `DPRetrievalVotingRunnable` with its votes and receipt. Public; prints as its label.

    The number of documents that participated is private and not included.

    Attributes:
      label: the answer; if `abstained`, the abstention text.
      abstained: whether no label had enough noisy votes.
      scores: noisy votes by label, on a public grid; they may be negative. None unless asked for.
      min_votes: noisy votes that an answer needs, public; None: any number is enough.
      noise_stddev: standard deviation of the noise on each label's votes, public.
      receipt: its price and payer.
    """

    label: str
    abstained: bool
    scores: dict[str, float] | None
    min_votes: float | None
    noise_stddev: float
    receipt: Receipt

    def __str__(self) -> str:
        return self.label


class FreeFormResult(_Shown):
    """An answer of `DPFreeFormRunnable` with its keywords or similarities and its receipt. Public; prints as its text.

    Attributes:
      answer: the text.
      keywords: the released keywords, best first; None if answers are aggregated as embeddings.
      similarities: cosine of each public candidate to the released mean, by candidate; None if keywords are used.
      abstained: whether nothing exceeded the noise floor, so that the text is not an answer.
      receipt: its price and payer.
    """

    answer: str
    keywords: tuple[str, ...] | None
    similarities: dict[str, float] | None
    abstained: bool = False
    receipt: Receipt

    def __str__(self) -> str:
        return self.answer


__all__ = ["FreeFormResult", "Receipt", "RetrievalResult", "VotingResult"]
