"""DPRetrievalVotingRunnable: a private label per query, voted on by the private documents that are near to it.

Knows labels, wording and plans; similarities, balances, rows, sums and noise are behind the curator.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, get_args

import numpy as np
from langchain_core.embeddings import Embeddings
from langchain_core.runnables import RunnableConfig, ensure_config
from pydantic import Field
from typing_extensions import override

from langchain_dpicl._cost import Cost
from langchain_dpicl._individual_filter import IndividualFilter
from langchain_dpicl._query_memo import AnswerMemo, checked_memo, scope_of_plan, traits_of
from langchain_dpicl._retrieval_options import (
    check_floor,
    check_known,
    checked_balances,
    checked_most,
    compared_text,
    examples_of,
    slots_of,
    templates_of,
    text_of_query,
)
from langchain_dpicl._voting_options import (
    VoteOutcome,
    Votes,
    VotingTask,
    check_flags,
    packed_votes,
    reader_of,
    unpacked_votes,
)
from langchain_dpicl.asking import Query
from langchain_dpicl.backends.similar import SimilarTexts
from langchain_dpicl.backends.walk import Walk, adrive, drive
from langchain_dpicl.callbacks import resolve_budget
from langchain_dpicl.declaring import declare_share, share_of_delta
from langchain_dpicl.exceptions import PrivacyBudgetExceededError
from langchain_dpicl.privacy._validate import check_choice
from langchain_dpicl.privacy.examples import PrivateExamples
from langchain_dpicl.privacy.mechanisms.noise import Release
from langchain_dpicl.privacy.mechanisms.vote_sums import ProbabilitySum, VoteSum
from langchain_dpicl.privacy.shares import Reservation
from langchain_dpicl.querying import Exhausted, QueryRunnable
from langchain_dpicl.receipts import Receipt, RetrievalResult
from langchain_dpicl.release.filtered_sample import Question
from langchain_dpicl.retrieval_planning import plan_retrieval
from langchain_dpicl.run_events import tells_refusals
from langchain_dpicl.runnables import Pay
from langchain_dpicl.stores.balances import SQLiteBalances
from langchain_dpicl.stores.memos import ReleaseMemo
from langchain_dpicl.tenants import Tenants


class RetrievalRunnable(QueryRunnable):
    """Base of Runnables that answer each query from the private documents that are near to it.

    Formal guarantees:
      - A document takes part if its own similarity to the query reaches the public threshold, and its unit has a
        participation left; whoever takes part is debited before the model is asked.
      - All answers together are (epsilon, delta)-DP for one unit, at the share's epsilon and delta, however many
        queries there are and however adaptively they are chosen. The share is charged once, before the first look.
      - No answer, error, event, receipt or report tells who took part, how many did, or what anybody has left. A unit
        that is exhausted leaves silently, and when all are, answers go on: noise on nobody's votes.
    """

    filter: Any = Field(exclude=True, repr=False)
    """The individual filter: an `IndividualFilter`, shared by all copies."""

    rows: Any = Field(exclude=True, repr=False)
    """What makes rows of prompts."""

    def warm_up(self, config: RunnableConfig | None = None) -> None:
        """Pays for the share, where nobody has, and embeds every document that was not embedded; asks no question.

        Call it at the start of a service: the first query has to wait for all documents otherwise. One that is stopped
        goes on where it was. Debits nobody.

        Args:
          config: of the run, for who is told of the charge.

        Raises:
          PrivacyBudgetError: as of a query.
          LedgerError: as of a query.
        """
        run = ensure_config(config)
        with self._events(run) as events:
            resolve_budget(self.budget, run)
            drive(self._warm(partial(self._pay, events)))

    async def awarm_up(self, config: RunnableConfig | None = None) -> None:
        """Is `warm_up`, awaitable."""
        run = ensure_config(config)
        async with self._events(run) as events:
            resolve_budget(self.budget, run)
            await adrive(self._warm(partial(self._pay, events)), is_slow=self._is_slow)

    def _warm(self, pay: Pay) -> Walk[None]:
        self._open(pay)
        yield from self.filter.participants.warm()

    @override
    def _open(self, pay: Pay) -> None:
        self.filter.open(pay)

    @override
    def _explain(self, error: PrivacyBudgetExceededError) -> None:
        error.args = (f"{error.args[0]} No query costs anything by itself; max_queries= says how many there may be.",)


class DPRetrievalVotingRunnable(RetrievalRunnable):
    r"""Answers each query with a label that the private documents near to it voted for, under differential privacy.

    For each query every document is compared with it, exactly and by itself. The units (documents, or all documents of
    one person) that reach a public similarity, and have a participation left, become one prompt each, with the query
    behind their nearest documents; the prompts vote, and noise on every declared label decides.

    The share of the budget is paid once, before the first document is looked at. It pays for `participations` answers
    of *each* unit: a query about one topic uses up nobody else's. See docs/retrieval-voting.md.

    Formal guarantees:
      - All answers together are (epsilon, delta)-DP for one unit under add_remove, at the share's epsilon and delta,
        for any number of adaptively chosen queries; epsilon is an upper bound.
      - Whether a unit takes part is a function of its own documents, of public values and of what was released.
      - Noise is added for every declared label, whoever took part, and if nobody did; a row that fails abstains.
      - No balance, and no number of participants, is shown anywhere.

    Build it with `from_documents` or `from_private_examples`. Input: the query as text (or a message, or a prompt
    value), or a dict of the wording's variables. Queries are public.

    Example:
      >>> from langchain_core.documents import Document
      >>> from langchain_dpicl import Budget, EmbeddedLLM
      >>> from langchain_dpicl.backends.nearest_embeddings import LocalEmbeddings
      >>> notes = [Document(f"Ward {place}: the patient slept well after the new tablets.") for place in range(40)]
      >>> voter = DPRetrievalVotingRunnable.from_documents(
      ...     notes,
      ...     public_size=1_000,
      ...     llm=EmbeddedLLM(),
      ...     embeddings=LocalEmbeddings(),
      ...     labels=("yes", "no"),
      ...     similarity_threshold=0.3,
      ...     participations=5,
      ...     budget=Budget(epsilon=8.0, delta=1e-6),
      ...     epsilon=4.0,
      ... )
      >>> voter.invoke("did patients sleep well after the new tablets?") in {"yes", "no", "abstain"}
      True
    """

    task: Any = Field(exclude=True, repr=False)
    """What is voted on, and how it reads: a `VotingTask`. Public."""

    with_scores: bool = False
    """Whether noisy votes are told with the label; they are released in any case."""

    min_votes: float | None = None
    """Noisy votes that an answer needs; None: the best label is always the answer."""

    abstain_label: str = "abstain"
    """The answer where no label has enough votes."""

    CONFIGURABLE: ClassVar[frozenset[str]] = QueryRunnable.CONFIGURABLE | {"with_scores"}

    @classmethod
    @tells_refusals("DPRetrievalVotingRunnable")
    def from_private_examples(
        cls,
        private: PrivateExamples,
        *,
        llm: Any,
        embeddings: Embeddings,
        similarity_threshold: float,
        participations: int,
        labels: Sequence[str] | None = None,
        budget: Any = None,
        config: Any = None,
        epsilon: float | None = None,
        delta: float | None = None,
        noise_multiplier: float | None = None,
        max_queries: int = 100_000,
        balances: str | os.PathLike[str] | SQLiteBalances | None = None,
        rows: str = "slots",
        num_slots: int | None = None,
        documents_per_row: int = 1,
        example_prompt: Any = None,
        prefix: str = "",
        suffix: str | None = None,
        example_separator: str = "\n\n",
        verbalizers: Mapping[str, str | Sequence[str]] | None = None,
        votes: Votes = "hard",
        calibrate: bool | None = None,
        content_free: Sequence[str] = ("N/A",),
        with_scores: bool = False,
        min_votes: float | str | None = "noise_floor",
        abstain_label: str = "abstain",
        on_exhausted: Exhausted = "raise",
        max_query_chars: int | None = None,
        memo_size: int = 256,
        memo: ReleaseMemo | str | os.PathLike[str] | None = None,
        tenant_max_queries: int | None = None,
        with_receipt: bool = False,
        progress: bool | None = None,
        component: str | None = None,
        name: str | None = None,
        **others: Any,
    ) -> DPRetrievalVotingRunnable:
        """Plans the noise, declares the share and returns a Runnable that has not spent anything yet.

        All parameters are public and must not be chosen by looking at the documents; the threshold neither.

        Args:
          private: the documents; bound to the budget's ledger here. Its `text_key` is what is compared.
          llm: an engine, an object that carries one, or a LangChain model; see `backends.resolve.as_choice_backend`.
            It SEES the private prompts.
          embeddings: LangChain embeddings, which SEE every private document: local ones, unless their provider may. A
            vector store, a retriever and whatever else searches or ranks is refused.
          similarity_threshold: least cosine between a document and the query, in (0, 1].
          participations: answers that one unit may take part in. The noise grows with its square root.
          labels: the answers; by default the declared labels of the examples.
          budget: a PrivacyBudgetCallbackHandler or Budget; otherwise looked up in `config`, then in the context.
          config: a RunnableConfig whose callbacks may hold the budget.
          epsilon: this component's share of the budget (its noise is calibrated to it); paid once.
          delta: the share's delta; by default in proportion to epsilon.
          noise_multiplier: noise in units of the sensitivity, instead of calibrating (its cost must fit `epsilon`).
          max_queries: answers at most, over all processes; they cost nothing more.
          balances: file of balances that outlive the process and are shared by several, made if there is none, or
            `SQLiteBalances`; needs `component`, a durable ledger and a `unit_key`. None: they die with the process.
          rows: "slots" (the same number of model calls whoever takes part) or "units" (one call for each unit that
            takes part, and less noise; who can count calls, or time an answer, learns how many there are).
          num_slots: with slots: rows of every query (default 32); of more participants some are left out, by coins.
          documents_per_row: a unit's nearest documents that its row shows; at most `records_per_unit`.
          example_prompt: template of one document; by default its text (and label, where the examples have one).
          prefix: template before the documents.
          suffix: template of the query, behind the documents; the label is what follows.
          example_separator: stands between the parts.
          verbalizers: label to the text or texts that stand for it in prompts and answers, taken verbatim; by default a
            space and the label.
          votes: "hard": one vote per row; "soft": each row gives its label probabilities; "text": what the model
            writes is its vote.
          calibrate: whether each row's probabilities are divided by those of the same row on content-free inputs.
            None: where the model goes on writing the prompt and a row holds one document.
          content_free: inputs without content.
          with_scores: tells the noisy votes with the label.
          min_votes: noisy votes that an answer needs; "noise_floor": what noise alone reaches in one of twenty queries
            that nobody takes part in; None: the best label is always the answer.
          abstain_label: the answer where none has enough.
          on_exhausted: after `max_queries`: "raise", or "zero_shot": answer without private documents, free.
          max_query_chars: characters that a query may have, all of its variables together; longer ones are refused
            before any call. None: as a record's text, `private.max_chars`.
          memo_size: answers remembered per tenant and told again, which debits nobody; 0: none.
          memo: where answers outlive the process; see `DPVotingRunnable`.
          tenant_max_queries: queries per tenant, counted on the ledger; None: as many as there are.
          with_receipt: answers are `RetrievalResult`; also with `with_scores` and `on_exhausted="zero_shot"`.
          progress: whether batches show a bar; None: on a terminal.
          component: name in the ledger.
          name: the Runnable's name in traces.
          **others: refused; what searches or ranks (`top_k`, `vectorstore`, `reranker`, ...) with the reason.

        Raises:
          ConfigurationError: a public fault, or `replace_one`; nothing was charged and no private call was made.
          CapabilityError: the model cannot choose among labels, or these are no embeddings.
          UnsilencableModelError: the model or the embeddings cannot be called in silence.
          PrivacyBudgetError: no budget, another budget, or one that does not suffice.
          LedgerError: the file of balances cannot be used.
          ModelCallError: the model or the embeddings could not be reached.
          MemoError: the memo cannot be used.

        Source: Koskela, Tobaben and Honkela (2023); docs/proofs/individual-filters.md.
        """
        check_known(others)
        spender = resolve_budget(budget, config)
        words = {"prefix": prefix, "separator": example_separator, **templates_of(private, example_prompt, suffix)}
        task = VotingTask.of(
            private,
            labels=labels,
            verbalizers=verbalizers,
            votes=votes,
            calibrate=calibrate,
            content_free=content_free,
            **words,
        )
        check_choice("on_exhausted", on_exhausted, get_args(Exhausted))
        shown: dict[str, Any] = {"with_receipt": with_receipt, "with_scores": with_scores, "progress": progress}
        shown |= {"name": name, "max_query_chars": max_query_chars}
        check_flags(**shown)
        check_floor(task.labels, min_votes, abstain_label)
        text_of_query(task.wording, ("",) * len(task.wording.input_variables))
        tenants = Tenants(max_queries=tenant_max_queries, memo_size=memo_size)
        kept = checked_memo(memo, budget=spender, memo_size=memo_size, component=component)
        plan = plan_retrieval(
            private.public_size_of(None),
            epsilon=epsilon,
            delta=share_of_delta(spender, epsilon=epsilon, delta=delta),
            participations=participations,
            width=len(task.labels),
            num_slots=slots_of(rows, num_slots),
            max_queries=max_queries,
            adjacency=spender.adjacency,
            aggregation=ProbabilitySum() if votes == "soft" else VoteSum(),
            noise_multiplier=noise_multiplier,
            partition=private.dataset_id,
        )
        held = checked_balances(balances, private=private, budget=spender, component=component)
        texts = SimilarTexts(embeddings, threshold=similarity_threshold, most=checked_most(private, documents_per_row))
        task, scorer, reads = reader_of(llm, task, is_wanted=calibrate, shots=documents_per_row)
        least = plan.noise_floor if min_votes == "noise_floor" else min_votes
        public = {**plan.to_dict(), **task.to_dict(), **reads, **texts.to_dict(), "min_votes": least}
        called = component if component is not None else spender.fresh_name("retrieval")
        given = [scorer, texts]
        share = declare_share(private, spender, plan, component=called, epsilon=epsilon, public=public, engines=given)
        told = scope_of_plan(spender, share, dataset_id=private.dataset_id, public={**public, "reader": traits_of(llm)})
        own = IndividualFilter(private, budget=spender, share=share, plan=plan.release, texts=texts, balances=held)
        memory: dict[str, Any] = {"packed": packed_votes, "unpacked": partial(unpacked_votes, width=len(task.labels))}
        handles: dict[str, Any] = {"private": private, "budget": spender, "share": share, "plan": plan}
        return cls(
            **handles,
            filter=own,
            task=task,
            wording=task.wording,
            rows=scorer,
            min_votes=least,
            abstain_label=abstain_label,
            on_exhausted=on_exhausted,
            tenants=tenants,
            memo=None if kept is None else AnswerMemo(kept, scope=told, **memory),
            **shown,
        )

    @classmethod
    def from_documents(
        cls,
        documents: Iterable[Any],
        *,
        public_size: int,
        unit_key: str | None = None,
        dataset_id: str = "private-documents",
        fields: Iterable[str] = (),
        documents_per_unit: int = 1,
        max_chars: int = 20_000,
        **options: Any,
    ) -> DPRetrievalVotingRunnable:
        """Declares LangChain documents as private examples, and builds the Runnable on them.

        Args:
          documents: `Document` objects, themselves: no vector store and no retriever.
          public_size: declared number of units; public, and need not be right.
          unit_key: key of the metadata that names the unit (a patient, say). None: every document is one.
          dataset_id: public name of the documents.
          fields: further keys of the metadata that prompts may show.
          documents_per_unit: documents kept of each unit, the first ones.
          max_chars: characters kept of each text.
          **options: of `from_private_examples`.

        Raises:
          ConfigurationError: a public fault.
          RecordError: a document cannot be read.
        """
        declared = {"public_size": public_size, "unit_key": unit_key, "dataset_id": dataset_id, "fields": fields}
        declared |= {"documents_per_unit": documents_per_unit, "max_chars": max_chars}
        held = [documents]
        del documents
        private, left = examples_of(held, {**declared, **options})
        return cls.from_private_examples(private, **left)

    @property
    def labels(self) -> tuple[str, ...]:
        """Every label an answer can have, in the order that breaks ties of rows."""
        return tuple(self.task.labels)

    def cost(self, **guesses: int) -> Cost:
        """Returns the model calls and tokens of queries, calibration included; `guesses` as for `plan.cost`."""
        cost: Cost = self.plan.cost(calls_per_row=1 + len(self.task.content_free), **guesses)
        return cost

    @property
    @override
    def _purpose(self) -> str:
        return f"Answers with one of: {', '.join(self.labels)}. Rests on private documents, under differential privacy."

    @property
    @override
    def OutputType(self) -> Any:
        return RetrievalResult if self._gives_receipts else str

    @property
    @override
    def _gives_receipts(self) -> bool:
        return self.with_scores or super()._gives_receipts

    @override
    def _prepared(self, query: Query, config: RunnableConfig) -> Walk[Any]:
        """Embeds the query, and asks the public prompt: the only signs of an outage, and the zero-shot answer."""
        render = self.wording.renderer(self.task.queries(query))
        direction = yield self.filter.texts.ask_public(compared_text(self.wording, query))
        row = yield self.rows.ask_public(render(()))
        asks = self._limited(self.rows.ask, config)
        return Question(direction, rows=asks, render=render, width=len(self.labels)), row

    @override
    def _released(
        self, query: Query, prepared: Any, ticket: Reservation, config: RunnableConfig, keep: Callable[[Any], None]
    ) -> Walk[VoteOutcome]:
        participants, settled = self.filter.participants, lambda: self.filter.settled
        released = yield from participants.release(prepared[0], ticket, settled=settled)
        outcome = self._outcome(released)
        keep(outcome)
        return outcome

    def _outcome(self, released: Release) -> VoteOutcome:
        votes = tuple(float(value) for value in np.asarray(released.values))
        best = int(np.argmax(votes))
        return (None if self.min_votes is not None and votes[best] < self.min_votes else best), votes

    @override
    def _zero_shot(self, query: Query, prepared: Any, config: RunnableConfig) -> Walk[VoteOutcome]:
        row = prepared[1]
        return (int(np.argmax(row)) if row.any() else None), None
        yield  # a walk that asks nothing

    @override
    def _shown(self, outcome: VoteOutcome, receipt: Receipt | None) -> str | RetrievalResult:
        place, votes = outcome
        label = self.abstain_label if place is None else self.labels[place]
        if receipt is None:
            return label
        return RetrievalResult(
            label=label,
            abstained=place is None,
            scores=dict(zip(self.labels, votes, strict=True)) if self.with_scores and votes else None,
            min_votes=self.min_votes,
            noise_stddev=self.plan.noise_stddev,
            receipt=receipt,
        )
