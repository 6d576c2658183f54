"""Options of answers to queries: labels, free texts, what serves them, and which documents take part."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Literal, TypeAlias

from langchain_dpicl.options.base import (
    CandidatesLike,
    Count,
    CountOrZero,
    EmbeddingsLike,
    Live,
    ModelLike,
    Option,
    Positive,
    Share,
    TemplateLike,
    Texts,
)
from langchain_dpicl.privacy._validate import fail

Votes: TypeAlias = Literal["hard", "soft", "text"]
Exhausted: TypeAlias = Literal["raise", "zero_shot"]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class LabelAnswers(Option):
    """How labels are read from prompts, and when no label is given. Used by voting, PATE, retrieval and classifiers.

    Args:
      votes: "hard": one vote per row; "soft": each row gives its label probabilities; "text": what the model writes is
        its vote, also where it has probabilities.
      calibrate: divide a row's probabilities by those of the same row on content-free inputs (Zhao et al. 2021), for
        that many calls more per row; None: where the model continues the prompt, unless its engine declares or a
        rehearsal finds that it does better without.
      content_free: inputs without content.
      abstain_below: share of the expected votes that an answer needs, in (0, 1]; "auto": above what noise and chance
        reach; "never": the label with the most noisy votes always. None: "never" for voting, "auto" for PATE and
        retrieval. It costs nothing.
      min_votes: the same in noisy votes, where no number of votes can be expected (retrieval).
      abstain_label: the answer where no label is given.
      scores: release the noisy votes with the label, on the same ticket.
      other_label: name of votes whose text is no label ("text" votes); "": they count for no label.
    """

    votes: Votes = "hard"
    calibrate: bool | None = None
    content_free: Texts = ("N/A",)
    abstain_below: Share | Literal["auto", "never"] | None = None
    min_votes: Positive | None = None
    abstain_label: str = "abstain"
    scores: bool = False
    other_label: str = "other"

    def _check_together(self) -> None:
        if self.abstain_below is not None and self.min_votes is not None:
            raise fail("LabelAnswers", "abstain_below or min_votes", "both")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class EmbeddingAnswers(Option):
    """Free answers by embeddings: the public candidate nearest to a noisy mean (Wu et al. 2024).

    Args:
      embeddings: receive the private answers; None: local ones, or those of `Retrieval`.
      candidates: public answers, never from private records: a list, or a Runnable or function that gives one for a
        query's text (its variables as a dict, where there are several); None: `writer` writes them.
      num_candidates: answers that `writer` is asked for, at least 2. Equal ones count once, so it needs a temperature
        above 0.
      writer: the public model, for candidates and zero-shot answers, in traced calls, with its own settings: a Runnable
        from a prompt to text, or an engine; None: `llm`.
      max_tokens: most tokens of an answer.
      stop: texts that end an answer.
      abstain_answer: of retrieval: the answer where nothing exceeds the noise; no candidate.
    """

    embeddings: EmbeddingsLike | None = None
    candidates: CandidatesLike | None = None
    num_candidates: Count = 20
    writer: ModelLike | None = None
    max_tokens: Count = 64
    stop: Texts = ("\n",)
    abstain_answer: str = "abstain"

    def _check_together(self) -> None:
        if self.num_candidates < 2:
            raise fail("EmbeddingAnswers.num_candidates", "at least 2 answers to choose from", self.num_candidates)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class KeywordAnswers(Option):
    """Free answers by keywords, from which the public model writes the answer (Wu et al. 2024).

    Args:
      keywords: the public domain; None: words of the query and of public candidates.
      num_keywords: keywords of one release.
      max_keywords: most keywords of a domain that is made for a query; None: 256.
      answer_prompt: prompt of the public model, with {keywords} and the query's variables; None: the prompt without
        examples, under a line with the keywords.
      candidates: as of `EmbeddingAnswers`.
      num_candidates: answers that `writer` is asked for.
      writer: the public model, for candidates, answers and zero-shot answers; None: `llm`.
      max_tokens: most tokens of an answer.
      stop: texts that end an answer.
      abstain_answer: of retrieval: the answer where nothing exceeds the noise.
    """

    keywords: Texts | None = None
    num_keywords: Count = 10
    max_keywords: Count | None = None
    answer_prompt: TemplateLike | None = None
    candidates: CandidatesLike | None = None
    num_candidates: Count = 20
    writer: ModelLike | None = None
    max_tokens: Count = 64
    stop: Texts = ("\n",)
    abstain_answer: str = "abstain"

    def _check_together(self) -> None:
        if self.keywords is not None and (self.max_keywords is not None or self.candidates is not None):
            advice = "These two build a domain, and keywords= is one; leave them out."
            raise fail("KeywordAnswers", "keywords= or max_keywords= and candidates=", "both", advice)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Serving(Option):
    """How queries are taken and answers kept: length, memory, tenants, and what happens after the last ticket.

    Args:
      max_query_chars: characters that a query may have, all of its variables together; longer ones are refused before
        any call. None: as a record's text, `private.max_chars`.
      memo_size: answers cached per tenant; cache hits are not charged. 0: every query is charged.
      memo: where answers outlive the process: the path of a SQLite file (created if missing), or a `ReleaseMemo` such
        as `PostgresMemo`. Needs `component` and a durable ledger.
      tenant_max_queries: charged queries per tenant (`config["configurable"]["tenant"]`), over all processes; None: as
        many as the share pays for.
      on_exhausted: "raise", or "zero_shot": the public model alone answers, for free; the result says so.
      public_first: True: the public prompt is asked before a ticket is reserved, so an outage of the model is free.
        False: voting over an API asks it beside the private rows, which takes half the time; the first answer of an
        outage costs its ticket. Other components ask it first in any case.
    """

    max_query_chars: Count | None = None
    memo_size: CountOrZero = 256
    memo: Live = None
    tenant_max_queries: Count | None = None
    on_exhausted: Exhausted = "raise"
    public_first: bool = False


@dataclass(frozen=True, slots=True, repr=False)
class Retrieval(Option):
    """Which documents take part in an answer.

    Args:
      embeddings: receive every private document; None: local ones.
      similarity_threshold: least cosine between a document and the query, in (0, 1].
      participations: answers in which one unit may take part; the noise grows with its square root.
      slots: rows of every query; "per_unit": one per participating unit (less noise, but the number of calls shows how
        many take part).
      documents_per_unit: a unit's nearest documents that its row shows.
      balances: path of a file that keeps the units' balances after the process, or `SQLiteBalances`.
    """

    embeddings: EmbeddingsLike | None = None
    _: KW_ONLY
    similarity_threshold: Share
    participations: Count
    slots: Count | Literal["per_unit"] = 32
    documents_per_unit: Count = 1
    balances: Live = None
