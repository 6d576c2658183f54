"""What comes with an answer: a receipt, and typed results. Public values only; knows no record and no mechanism."""

from __future__ import annotations

from typing import Literal, TypeAlias

from pydantic import BaseModel, ConfigDict

Source: TypeAlias = Literal["release", "memo", "zero-shot"]


class Receipt(BaseModel):
    """What an answer cost, and who paid. Public.

    Attributes:
      source: "release": a private release, charged; "memo": an earlier release, told again; "zero-shot": the model
        alone, without private records. The last two are free.
      tickets: tickets charged for this answer: 1 or 0.
      component: name of the component's share in the ledger.
      dataset_id: the private data set.
      ledger_id: the ledger.
      entry: number of the reservation in the ledger; None where nothing was charged.
      entry_hash: hash of that line. Whoever keeps it can tell later that the ledger still holds the line
        (`Budget.check_receipt`); None where nothing was charged.
      adjacency: the neighbouring relation.
      epsilon: upper bound of the whole share, all its queries together, at `delta`; not of this query. None, with
        `delta` and `queries_left`, where the ledger was out when the receipt was written: the answer was paid by then.
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
    adjacency: str
    epsilon: float | None
    delta: float | None
    mechanism: str
    noise_multiplier: float
    queries_left: int | None

    model_config = ConfigDict(frozen=True)


class VotingResult(BaseModel):
    """An answer of `DPVotingRunnable` with what it rests on. Public; prints as its label.

    Attributes:
      label: the answer; where `abstained`, the text for that.
      abstained: whether no label had enough votes. Never set by rows that failed: those only vote for nothing.
      scores: noisy votes by label, on a public grid; they may be negative. None unless asked for.
      expected_votes: the public number of votes that full agreement is expected to bring.
      receipt: what it cost.
    """

    label: str
    abstained: bool
    scores: dict[str, float] | None
    expected_votes: float
    receipt: Receipt

    model_config = ConfigDict(frozen=True)

    def __str__(self) -> str:
        return self.label


class RetrievalResult(BaseModel):
    """An answer of `DPRetrievalVotingRunnable` with what it rests on. Public; prints as its label.

    How many documents took part is private, and not in here: a noisy vote is all there is.

    Attributes:
      label: the answer; where `abstained`, the text for that.
      abstained: whether no label had enough noisy votes.
      scores: noisy votes by label, on a public grid; they may be negative. None unless asked for.
      min_votes: noisy votes that an answer needs, public; None: any number will do.
      noise_stddev: standard deviation of the noise on each label's votes, public.
      receipt: what it cost.
    """

    label: str
    abstained: bool
    scores: dict[str, float] | None
    min_votes: float | None
    noise_stddev: float
    receipt: Receipt

    model_config = ConfigDict(frozen=True)

    def __str__(self) -> str:
        return self.label


class FreeFormResult(BaseModel):
    """An answer of `DPFreeFormRunnable` with what it rests on. Public; prints as its text.

    Attributes:
      answer: the text.
      keywords: the released keywords, best first; None where answers are compared as embeddings.
      similarities: cosine of each public candidate to the released mean, by candidate; None where keywords are used.
      abstained: whether nothing stood out of the noise, so that the text is no answer.
      receipt: what it cost.
    """

    answer: str
    keywords: tuple[str, ...] | None
    similarities: dict[str, float] | None
    abstained: bool = False
    receipt: Receipt

    model_config = ConfigDict(frozen=True)

    def __str__(self) -> str:
        return self.answer
