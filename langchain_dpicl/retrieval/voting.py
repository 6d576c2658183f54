"""Answers each query with a label that the private documents similar to it voted for, with an individual filter."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Generic

import numpy as np
from langchain_core.embeddings import Embeddings
from langchain_core.runnables import RunnableConfig, ensure_config
from pydantic import Field
from typing_extensions import override

from langchain_dpicl._construction import awaitable
from langchain_dpicl.backends.rows.neighbour_rows import SimilarTexts
from langchain_dpicl.backends.sync_async import EffectGenerator, run_async, run_sync
from langchain_dpicl.budget.events import tells_refusals
from langchain_dpicl.budget.handler import resolve_budget
from langchain_dpicl.exceptions import PrivacyBudgetExceededError
from langchain_dpicl.options import FewShotTask, LabelAnswers, Serving
from langchain_dpicl.options.answers import Exhausted, Votes
from langchain_dpicl.privacy.data.private_examples import PrivateExamples
from langchain_dpicl.privacy.ledger.shares import Reservation
from langchain_dpicl.privacy.mechanisms.noise import Release
from langchain_dpicl.privacy.mechanisms.vote_sums import ProbabilitySum, VoteSum
from langchain_dpicl.release.declare_share import declare_share, share_of_delta
from langchain_dpicl.release.filtered_sample import FilteredQuery
from langchain_dpicl.results import Receipt, RetrievalResult
from langchain_dpicl.retrieval.individual_filter import IndividualFilter
from langchain_dpicl.retrieval.plan import (
    check_documents_per_row,
    check_floor,
    check_option_names,
    examples_of,
    open_balances,
    plan_retrieval,
    slots_of,
    templates_of,
    text_of_query,
    text_to_compare,
)
from langchain_dpicl.runs.query_runnable import QueryRunnable, ResultT, TicketCharge, served
from langchain_dpicl.stores.balances import SQLiteBalances
from langchain_dpicl.stores.memos import ReleaseMemo
from langchain_dpicl.tasks.labels import VoteOutcome, VotingTask, reader_of
from langchain_dpicl.tasks.templates import Query
from langchain_dpicl.voting import LabelRunnable, vote_memo


class RetrievalRunnable(QueryRunnable[ResultT], Generic[ResultT]):
    """Base of Runnables that answer each query from the private documents similar to it.

    Formal guarantees:
      - A document participates if its own similarity to the query reaches the public threshold and its unit has a
        participation left; units that participate are debited before the model is called.
      - All answers together are (epsilon, delta)-DP for one unit, at the share's epsilon and delta, however many
        queries there are and however adaptively they are chosen. The share is charged once, before the first
        document is read.
      - No answer, error, event, receipt or report contains the participants, their number, or a balance. An exhausted
        unit stops participating without a sign; when all are exhausted, answers are noise on zero votes.
    """

    filter: Any = Field(exclude=True, repr=False)
    """The individual filter: an `IndividualFilter`, shared by all copies."""

    def warm_up(self, config: RunnableConfig | None = None) -> None:
        """Pays for the share if it is not paid yet, and embeds the documents that are not embedded yet.

        Call it when a service starts; otherwise the first query waits for all embeddings. If interrupted, it continues
        where it stopped. It debits no balance.

        Args:
          config: config of the run, whose callbacks receive the charge.

        Raises:
          PrivacyBudgetError: as of a query.
          LedgerError: as of a query.
        """
        run = ensure_config(config)
        with self._events(run) as events:
            resolve_budget(self.budget, run)
            run_sync(self._warm(partial(self._pay, events)))

    async def awarm_up(self, config: RunnableConfig | None = None) -> None:
        """Asynchronous version of `warm_up`."""
        run = ensure_config(config)
        async with self._events(run) as events:
            resolve_budget(self.budget, run)
            await run_async(self._warm(partial(self._pay, events)), is_slow=self._is_slow)

    def _warm(self, pay: TicketCharge) -> EffectGenerator[None]:
        self._open(pay)
        yield from self.filter.participants.warm()

    @override
    def _open(self, pay: TicketCharge) -> None:
        self.filter.open(pay)

    @override
    def _explain(self, error: PrivacyBudgetExceededError) -> None:
        error.args = (f"{error.args[0]} Single queries are free; max_queries= limits their number.",)


class DPRetrievalVotingRunnable(RetrievalRunnable[RetrievalResult], LabelRunnable[RetrievalResult]):
    r"""Answers each query with a label that the private documents similar to it voted for, under differential privacy.

    For each query every document is compared with it, exactly and independently of the others. Each unit (a document,
    or all documents of one person) that reaches a public similarity and has a participation left becomes one prompt:
    its nearest documents, then the query. The prompts vote, and noise is added to the votes of every declared label.

    The share of the budget is paid once, before the first document is read. It pays for `participations` answers of
    *each* unit: a query about one topic does not reduce the balances of other units. See docs/retrieval-voting.md.

    Formal guarantees:
      - All answers together are (epsilon, delta)-DP for one unit under add_remove, at the share's epsilon and delta,
        for any number of adaptively chosen queries; epsilon is an upper bound.
      - Whether a unit participates is a function of its own documents, of public values and of released answers.
      - Noise is added for every declared label, also when no unit participates; a row that fails votes for nothing.
      - Balances and numbers of participants are never shown.

    Build it with `from_documents` or `from_private_examples`. Input: the query as text (or a message, or a prompt
    value), or a dict of the wording's variables. Queries are public.

    Example:
      >>> from langchain_core.documents import Document
      >>> from langchain_dpicl import Budget, EmbeddedLLM
      >>> from langchain_dpicl.backends.rows.neighbour_rows import LocalEmbeddings
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

    RESULT = RetrievalResult

    min_votes: float | None = None
    """Noisy votes that an answer needs; None: the label with the most noisy votes is the answer."""

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
        component: str | None = None,
        name: str | None = None,
        **others: Any,
    ) -> DPRetrievalVotingRunnable:
        """Plans the noise, declares the share and returns a Runnable that has spent nothing so far.

        All parameters are public and must not be chosen by looking at the documents; this includes the threshold.

        Args:
          private: the documents; bound to the budget's ledger here. Its `text_key` is what is compared.
          llm: an engine, an object that carries one, or a LangChain model; see `backends.resolve.as_choice_backend`.
            It receives the private prompts.
          embeddings: LangChain embeddings, which receive every private document: use local ones unless the provider may
            see the documents. A vector store, a retriever and everything else that searches or ranks is refused.
          similarity_threshold: least cosine between a document and the query, in (0, 1].
          participations: answers that one unit may take part in. The noise grows with its square root.
          labels: the answers; by default the declared labels of the examples.
          budget: a PrivacyBudgetCallbackHandler or Budget; otherwise looked up in `config`, then in the context.
          config: a RunnableConfig whose callbacks may hold the budget.
          epsilon: this component's share of the budget (its noise is calibrated to it); paid once.
          delta: the share's delta; by default in proportion to epsilon.
          noise_multiplier: noise in units of the sensitivity, instead of calibrating (its cost must fit `epsilon`).
          max_queries: most answers, over all processes; more of them cost no more.
          balances: file of balances that outlives the process and is shared by several, created if missing, or
            `SQLiteBalances`; needs `component`, a durable ledger and a `unit_key`. None: lost with the process.
          rows: "slots" (a constant number of model calls) or "units" (one call per participant and less noise;
            an observer who counts calls or times an answer learns the number of participants).
          num_slots: with slots: rows of every query (default 32), a random subset of more participants.
          documents_per_row: a unit's nearest documents that its row shows; at most `records_per_unit`.
          example_prompt: template of one document; by default its text (and label, where the examples have one).
          prefix: template before the documents.
          suffix: template of the query, after the documents; the label is what follows.
          example_separator: text between the parts.
          verbalizers: label to the text or texts that stand for it in prompts and answers, taken verbatim; by default a
            space and the label.
          votes: "hard": one vote per row; "soft": each row gives its label probabilities; "text": what the model
            writes is its vote.
          calibrate: whether each row's probabilities are divided by those of the same row on content-free inputs.
            None: where the model goes on writing the prompt and a row holds one document.
          content_free: inputs without content.
          with_scores: returns the noisy votes with the label.
          min_votes: noisy votes that an answer needs; "noise_floor": what noise alone reaches in one of twenty queries
            without participants; None: the label with the most noisy votes is the answer.
          abstain_label: the answer when no label has enough.
          on_exhausted: after `max_queries`: "raise", or "zero_shot": answer without private documents, free.
          max_query_chars: characters that a query may have, all of its variables together; longer ones are refused
            before any call. None: as a record's text, `private.max_chars`.
          memo_size: answers cached per tenant; cache hits debit no balance. 0: none.
          memo: a store of answers that outlives the process; see `DPVotingRunnable`.
          tenant_max_queries: queries per tenant, counted on the ledger; None: as many as there are.
          component: name in the ledger.
          name: the Runnable's name in traces.
          **others: refused; the message says why options that search or rank (`top_k`, `vectorstore`, ...) cannot work.

        Raises:
          ConfigurationError: a public fault, or `replace_one`; nothing was charged and no private call was made.
          CapabilityError: the model cannot choose among labels, or `embeddings` cannot embed.
          UnsilencableModelError: the model or the embeddings cannot be called without tracing.
          PrivacyBudgetError: no budget, another budget, or one that does not suffice.
          LedgerError: the file of balances cannot be used.
          ModelCallError: the model or the embeddings could not be reached.
          MemoError: the memo cannot be used.

        Source: Koskela, Tobaben and Honkela (2023); docs/proofs/individual-filters.md.
        """
        check_option_names(others)
        spender = resolve_budget(budget, config)
        words: dict[str, Any] = {"prefix": prefix, "example_separator": example_separator}
        words |= {"labels": labels, "verbalizers": verbalizers}
        words |= templates_of(private, example_prompt, suffix)
        answers = LabelAnswers(
            votes=votes,
            calibrate=calibrate,
            content_free=tuple(content_free),
            scores=with_scores,
            abstain_label=abstain_label,
        )
        task = VotingTask.of(private, FewShotTask(**words), answers)
        check_floor(task.labels, min_votes, abstain_label)
        text_of_query(task.wording, ("",) * len(task.wording.input_variables))
        serving = Serving(
            max_query_chars=max_query_chars,
            memo_size=memo_size,
            memo=memo,
            tenant_max_queries=tenant_max_queries,
            on_exhausted=on_exhausted,
        )
        options, store = served(serving, budget=spender, component=component)
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
        balance_file = open_balances(balances, private=private, budget=spender, component=component)
        texts = SimilarTexts(
            embeddings, threshold=similarity_threshold, most=check_documents_per_row(private, documents_per_row)
        )
        task, scorer, reading = reader_of(llm, task, is_wanted=calibrate, shots=documents_per_row)
        least = plan.noise_floor if min_votes == "noise_floor" else min_votes
        public = {**plan.to_dict(), **task.to_dict(), **reading, **texts.to_dict(), "min_votes": least}
        component = component if component is not None else spender.fresh_name("retrieval")
        declared: dict[str, Any] = {"component": component, "epsilon": epsilon, "public": public}
        share = declare_share(private, spender, plan, engines=[scorer, texts], **declared)
        paid: dict[str, Any] = {"budget": spender, "share": share}
        return cls(
            private=private,
            plan=plan,
            filter=IndividualFilter(private, plan=plan.release, texts=texts, balances=balance_file, **paid),
            task=task,
            wording=task.wording,
            rows=scorer,
            min_votes=least,
            answers=answers,
            memo=vote_memo(store, task, llm, private=private, public=public, **paid),
            name=name,
            **paid,
            **options,
        )

    afrom_private_examples: ClassVar[Any] = awaitable(from_private_examples)  # type: ignore[arg-type]

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
          documents: the `Document` objects; no vector store and no retriever.
          public_size: declared number of units; public, and may differ from the true number.
          unit_key: key of the metadata that names the unit (a patient, say). None: every document is a unit.
          dataset_id: public name of the documents.
          fields: further metadata keys that prompts may show.
          documents_per_unit: documents kept of each unit, the first ones.
          max_chars: characters kept of each text.
          **options: of `from_private_examples`.

        Raises:
          ConfigurationError: a public fault.
          RecordError: a document cannot be read.
        """
        declared = {"public_size": public_size, "unit_key": unit_key, "dataset_id": dataset_id, "fields": fields}
        declared |= {"documents_per_unit": documents_per_unit, "max_chars": max_chars}
        # Held by the list alone, so that `examples_of` can empty it and no frame of an error keeps the documents.
        holder = [documents]
        del documents
        private, remaining = examples_of(holder, {**declared, **options})
        return cls.from_private_examples(private, **remaining)

    @override
    def _prepare(self, query: Query, config: RunnableConfig) -> EffectGenerator[Any]:
        """Embeds the query and asks the public prompt, which detects an outage before a query is counted."""
        render = self.wording.renderer(self.task.queries(query))
        direction = yield self.filter.texts.request_public(text_to_compare(self.wording, query))
        row = yield self.rows.request_public(render(()))
        asks = self._limit_concurrency(self.rows.ask, config)
        return FilteredQuery(direction, rows=asks, render=render, width=len(self.labels)), row

    @override
    def _released(
        self, query: Query, prepared: Any, ticket: Reservation, config: RunnableConfig, keep: Callable[[Any], None]
    ) -> EffectGenerator[VoteOutcome]:
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
    def _result(self, outcome: VoteOutcome, receipt: Receipt) -> RetrievalResult:
        floor = {"min_votes": self.min_votes, "noise_stddev": self.plan.noise_stddev}
        return RetrievalResult(**self._fields(outcome), **floor, receipt=receipt)
