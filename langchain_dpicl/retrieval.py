"""Votes and answers over retrieved private documents, with an individual privacy filter."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist
from typing import Any, ClassVar, Self, cast

import numpy as np
from langchain_core.runnables import RunnableConfig, ensure_config
from numpy.typing import NDArray
from pydantic import Field
from typing_extensions import override

from langchain_dpicl._calls import warn_caller
from langchain_dpicl._opaque import PerProcess, Uncopyable
from langchain_dpicl.backends.resolve import as_embeddings
from langchain_dpicl.backends.rows.neighbour_rows import SimilarTexts
from langchain_dpicl.backends.sync_async import EffectGenerator, awaitable, check_silent, run_sync
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.budget.handler import BudgetLike, resolve_budget
from langchain_dpicl.exceptions import NoisyPlanWarning, PrivacyBudgetExceededError
from langchain_dpicl.free_form import (
    AnswerMaker,
    AnswerOutcome,
    DPFreeFormRunnable,
    EmbeddingAggregator,
    NoisyKeywordAggregator,
    TextAnswers,
)
from langchain_dpicl.options import (
    LLM,
    EmbeddingAnswers,
    FewShotTask,
    KeywordAnswers,
    LabelAnswers,
    Noise,
    Retrieval,
    Serving,
    TemplateLike,
    noise_with,
    option_of,
)
from langchain_dpicl.planning.expected_utility import (
    ROUGH_DRAWS,
    below_with_normal_noise,
    ranges,
    right_with_normal_noise,
    rough_ceiling,
)
from langchain_dpicl.planning.row_law import RowFacts, RowGuess, RowSource, mean_facts, wins_fairly
from langchain_dpicl.planning.share_plan import Cost, SharePlan, check_counts, with_noise_for
from langchain_dpicl.privacy._validate import Adjacency, check_int, check_name, check_positive_delta, fail
from langchain_dpicl.privacy.accounting.epsilon import MAX_COUNT
from langchain_dpicl.privacy.accounting.events import canonical_json
from langchain_dpicl.privacy.extensions.individual_filter import (
    FILTER_TEMPLATE,
    QUERY_TEMPLATE,
    Bounded,
    MemoryBalances,
    ParticipationPlan,
    participation_plan,
)
from langchain_dpicl.privacy.ledger.shares import Reservation, Share
from langchain_dpicl.privacy.ledger.tickets import Ticket
from langchain_dpicl.privacy.mechanisms.bounded import ProbabilitySum, VoteSum
from langchain_dpicl.privacy.mechanisms.release_plan import GaussianMechanism, Release
from langchain_dpicl.privacy.private_examples import PrivateExamples
from langchain_dpicl.release.declare_share import declare_share, share_of_delta
from langchain_dpicl.release.samples import FilteredQuery, FilteredSample, FilterShare, open_participants
from langchain_dpicl.results import FreeFormResult, Receipt, RetrievalResult
from langchain_dpicl.runs.door import door
from langchain_dpicl.runs.query_runnable import QueryRunnable, ResultT, TicketCharge, served
from langchain_dpicl.stores.beside_ledgers import SQLiteBalances
from langchain_dpicl.tasks import (
    FewShotTemplate,
    Query,
    VoteOutcome,
    VotingTask,
    check_abstain_label,
    check_other_label,
    reader_of,
)
from langchain_dpicl.voting import LabelRunnable, vote_memo

_DIED = (
    "Its balances were in the memory of the process that paid for them and are lost with it: it is unknown how often "
    "each document participated. Declare another component, which pays again; or give balances= a file from the start, "
    "which outlives processes and is shared by them."
)
_PATIENCE, _PAUSE = 5.0, 0.01
"""Seconds to wait for the process that holds the ticket to write to the file, and between two reads of the file."""


class IndividualFilter(Uncopyable):
    """One set of balances of one share; shared by all copies of a component.

    Formal guarantees:
      - Its ticket burns once, before the first record is read: in this process or, with balances in a file, in the
        first process that opens it. Balances in memory are available to the process that paid for them only.

    Args:
      private: the documents.
      budget: the budget that pays.
      share: the share that the ticket is reserved from.
      plan: what the ticket pays for.
      texts: finds similar documents.
      balances: the file of balances; None: they stay in memory.
    """

    def __init__(
        self,
        private: PrivateExamples,
        *,
        budget: Budget,
        share: Share,
        plan: ParticipationPlan,
        texts: SimilarTexts,
        balances: SQLiteBalances | None,
    ) -> None:
        self.private = private
        self.budget = budget
        self.share = share
        self.plan = plan
        self.texts = texts
        self.balances = balances
        self._locks = PerProcess(threading.Lock)
        self._opened: FilteredSample | None = None

    @property
    def participants(self) -> FilteredSample | None:
        """The opened filter; None: not opened in this process yet."""
        return self._opened

    @property
    def settled(self) -> int:
        """Number of queries that the ledger records as committed; public."""
        return self.share.committed(QUERY_TEMPLATE)

    def open(self, pay: TicketCharge) -> None:
        """Opens the filter: pays for it, or uses the one that another process paid for; later calls see to its room."""
        with self._locks.here:
            if self.balances is not None:
                self.balances.make_room(self.private.public_size_of(None))
            if self._opened is None:
                self._opened = self._in_memory(pay) if self.balances is None else self._on_disk(self.balances, pay)

    def _in_memory(self, pay: TicketCharge) -> FilteredSample:
        try:
            with pay(FILTER_TEMPLATE) as ticket:
                opened = self._made(ticket, MemoryBalances(self.plan.participations))
                ticket.commit()  # not waited for: an outage here would lose what is paid, and nobody else can use it
        except PrivacyBudgetExceededError as error:
            self._explain(error)
            raise
        return opened

    def _on_disk(self, balances: SQLiteBalances, pay: TicketCharge) -> FilteredSample:
        terms = self._terms()
        if balances.bind_filter(terms) is None:
            opened: FilteredSample | None = None
            try:
                with pay(FILTER_TEMPLATE) as ticket:  # the ledger is waited for before the file's lock is taken
                    opened = self._bought(balances, ticket, terms)
            except PrivacyBudgetExceededError as error:
                if not self._was_paid_elsewhere(balances, terms):
                    self._explain(error)
                    raise
            if opened is not None:
                return opened
        # A file that names a line of another ledger, or none, must not grant participations.
        line = balances.bind_filter(terms)
        self.budget.check_receipt(line)
        return self._made(None, balances)

    def _bought(self, balances: SQLiteBalances, ticket: Reservation, terms: Mapping[str, Any]) -> FilteredSample | None:
        """Burns the ticket and records it in the file; None: another process was first and nothing burnt."""
        made: list[FilteredSample] = []

        def buy() -> Mapping[str, Any]:
            made.append(self._made(ticket, balances))
            return {"ledger_id": ticket.ledger_id, "entry": ticket.entry, "entry_hash": ticket.entry_hash}

        # `take_up` holds the lock of the file and calls `buy` only if no other process has paid.
        balances.take_up(terms, buy)
        if not made:
            return None
        ticket.commit(wait=True)  # the file now names the line that paid for it
        return made[0]

    def _was_paid_elsewhere(self, balances: SQLiteBalances, terms: Mapping[str, Any]) -> bool:
        """Returns whether another process has paid for the file; waits while one may be writing to it."""
        end = time.monotonic() + min(_PATIENCE, balances.timeout)
        while True:
            # The file is written before the ledger commits: so the file is read after the ledger.
            is_over = self.share.remaining(FILTER_TEMPLATE) > 0 or self.share.committed(FILTER_TEMPLATE) > 0
            if balances.bind_filter(terms) is not None:
                return True
            if is_over or time.monotonic() > end:
                return False
            time.sleep(_PAUSE)

    def _made(self, ticket: Reservation | None, balances: MemoryBalances | SQLiteBalances) -> FilteredSample:
        payer = FilterShare(self.budget.ledger_id, self.share.component, self.private.dataset_id)
        options: dict[str, Any] = {"plan": self.plan, "texts": self.texts, "payer": payer}
        return open_participants(self.private, ticket, balances=balances, **options)

    def _terms(self) -> dict[str, Any]:
        """Returns what identifies the filter: ledger, component, data set and plan."""
        plan = canonical_json(self.plan.to_dict())
        return {
            "ledger_id": self.budget.ledger_id,
            "component": self.share.component,
            "dataset_id": self.private.dataset_id,
            "participations": self.plan.participations,
            "plan": hashlib.sha256(plan.encode()).hexdigest(),
        }

    def _explain(self, error: PrivacyBudgetExceededError) -> None:
        if self.share.sealed and not self.share.remaining(FILTER_TEMPLATE):
            where = "The file of balances is new, or belongs to another filter. " if self.balances else ""
            error.args = (f"{error.args[0]} {where}{_DIED}",)

    def __repr__(self) -> str:
        return f"IndividualFilter({self.share.component!r}, opened={self._opened is not None})"


NUM_SLOTS = 32
"""Default number of rows of a query."""
ALONE = 0.05
"""Share of the queries without participants whose largest noise reaches `RetrievalPlan.noise_floor`."""


_MOST_DRAWN = 2_000
"""Rows whose votes are drawn for a chance."""


@dataclass(frozen=True, slots=True)
class RetrievalPlan(SharePlan):
    """Everything public about answers from retrieved documents: what will run, what it is charged, what it will cost.

    Formal guarantees:
      - `tickets()` hold one ticket of `release.event`, which pays for every answer under one set of balances, and
        `max_queries` free ones, which count the answers.
      - All answers together are (epsilon, delta)-DP under `release.adjacency`, the declared gap of the noise included.

    Attributes:
      release: noise, rows and participations.
      max_queries: most answers; only the declared gap of the noise grows with them.
      width: coordinates of one release: the labels, or the keywords.
      public_size: declared units.
    """

    method: ClassVar[str] = "retrieval"

    release: ParticipationPlan
    max_queries: int
    width: int
    public_size: int

    @property
    def sizes(self) -> Mapping[str | None, int]:
        """The declared units, which no label splits."""
        return {None: self.public_size}

    @property
    def noise_stddev(self) -> float:
        """Standard deviation of the noise on each coordinate, in votes."""
        return self.release.noise_stddev

    @property
    def noise_floor(self) -> float:
        """Votes that noise alone reaches on some coordinate in one of twenty queries."""
        # The maximum of `width` independent normal numbers stays below z with probability Phi(z)^width.
        return self.noise_stddev * NormalDist().inv_cdf((1.0 - ALONE) ** (1.0 / self.width))

    def noise_floor_along(self, count: int) -> float:
        """Returns the length that noise alone reaches along any of `count` directions in at most one of twenty queries.

        The noise along each direction is one normal number; Bonferroni's bound holds for directions at any angle.
        """
        return self.noise_stddev * -NormalDist().inv_cdf(ALONE / check_int("count", count, low=1))

    @property
    def implementation_delta(self) -> float:
        """Declared gap between ideal and drawn noise over all answers."""
        return self.release.implementation_delta(self.max_queries, width=self.width)

    def tickets(self) -> tuple[Ticket, ...]:
        """Returns the tickets of the share."""
        return self.release.tickets(self.max_queries)

    def cost(
        self,
        *,
        participants: int | None = None,
        record_tokens: int = 60,
        query_tokens: int = 60,
        answer_tokens: int = 1,
        calls_per_row: int = 1,
        num_queries: int = 1,
    ) -> Cost:
        """Returns model calls and tokens of `num_queries` queries; embedding each document once is not counted."""
        # With slots the number of rows is public, so no guess is needed.
        rows = self.release.num_slots if participants is None else participants
        if rows is None:
            raise fail("participants", "a guess, because every participant is a row", participants)
        check_int("participants", rows, low=0)
        check_counts(record_tokens=record_tokens, query_tokens=query_tokens, answer_tokens=answer_tokens)
        check_counts(calls_per_row=calls_per_row, num_queries=num_queries)
        private = num_queries * (rows if self.release.num_slots is None else self.release.num_slots) * calls_per_row
        public = num_queries * calls_per_row
        tokens_in = private * (record_tokens + query_tokens) + public * query_tokens
        return Cost(private, public, tokens_in, (private + public) * answer_tokens)

    def expected(
        self,
        *,
        participants: int,
        source: RowSource | None = None,
        labels: int | None = None,
        calibrated: bool = False,
        answers: LabelAnswers | None = None,
    ) -> dict[str, Any]:
        """Returns the chances of one answer, at a guessed number of participants, with what they rest on.

        A row shows one document. Documents near a query may be worth more than a guess or a rehearsal says, which know
        rows of examples drawn at random.

        Args:
          participants: units that take part in a query.
          source: where the numbers of rows come from: a `Rehearsal`, or a `RowGuess`; None: the usual guess.
          labels: labels that an answer can have; None: the width of a release.
          calibrated: whether rows are divided by those on content-free inputs, which a rehearsal tells apart.
          answers: how many votes an answer needs; None: the usual ones, more than noise alone mostly reaches.

        >>> plan = plan_retrieval(1_000, epsilon=4.0, delta=1e-6, participations=10, width=2, num_slots=None)
        >>> round(plan.noise_stddev, 2), round(plan.noise_floor, 2)
        (3.77, 7.38)
        >>> chances = plan.expected(participants=12)
        >>> round(chances["right_label_prob"], 2), round(chances["abstain_prob"], 2), chances["rests_on"]
        (0.58, 0.16, 'a guess')
        """
        check_int("participants", participants, low=0)
        width = check_int("labels", self.width if labels is None else labels, low=2)
        rows = self._rows(participants)
        rests, law = source or RowGuess(), ((1, 1.0),)
        facts = mean_facts(rests, labels=width, law=law, calibrated=calibrated)
        # The votes of very many rows are as those of fewer, multiplied: what is left to chance in them is small.
        drawn, times = min(rows, _MOST_DRAWN), max(1.0, rows / _MOST_DRAWN)
        votes = times * facts.votes(drawn, 1.0)
        least = least_votes(answers or LabelAnswers(), self)
        right = right_with_normal_noise(votes, self.noise_stddev, least=least)

        def chance(other: RowFacts) -> float:
            return self.right_chance(other, participants=participants, answers=answers)

        low, high = rests.interval(chance, labels=width, law=law, calibrated=calibrated)
        most = rests.interval(rough_ceiling, labels=width, law=law, calibrated=calibrated)
        return {
            "rows": float(rows),
            "noise_stddev": self.noise_stddev,
            "noise_floor": self.noise_floor,
            "row_right": facts.right,
            **ranges(right, low, high, ceiling=facts.ceiling(), most=most),
            "without_noise_prob": float(wins_fairly(votes).mean()),
            "abstain_prob": below_with_normal_noise(votes, self.noise_stddev, least=least),
            "rests_on": rests.rests_on,
        }

    def right_chance(self, facts: RowFacts, *, participants: int, answers: LabelAnswers | None = None) -> float:
        """Returns the chance of the right label roughly, for intervals; the arguments as of `expected`."""
        rows = self._rows(participants)
        few = max(1.0, rows / _MOST_DRAWN) * facts.votes(min(rows, _MOST_DRAWN), 1.0, draws=ROUGH_DRAWS)
        return right_with_normal_noise(few, self.noise_stddev, least=least_votes(answers or LabelAnswers(), self))

    def _rows(self, participants: int) -> int:
        slots = self.release.num_slots
        return participants if slots is None else min(slots, participants)

    def _numbers(self) -> dict[str, Any]:
        return {
            "participation": self.release.to_dict(),
            "noise_stddev": self.noise_stddev,
            "public_size": self.public_size,
            "max_queries": self.max_queries,
            "width": self.width,
        }

    @classmethod
    def rebuild(cls, shown: Mapping[str, Any]) -> RetrievalPlan:
        """Returns the plan of the parameters shown, see `SharePlan.rebuild`."""
        release = participation_plan(shown["participation"])
        return plan_retrieval(
            shown["public_size"],
            epsilon=None,
            delta=shown["delta"],
            participations=release.participations,
            width=shown["width"],
            num_slots=release.num_slots,
            max_queries=shown["max_queries"],
            adjacency=release.adjacency,
            aggregation=release.aggregation,
            noise_multiplier=release.mechanism.noise_multiplier,
            partition=shown["dataset_id"],
        )


def plan_retrieval(
    public_size: int,
    *,
    epsilon: float | None,
    delta: float,
    participations: int,
    width: int,
    num_slots: int | None = NUM_SLOTS,
    max_queries: int = 100_000,
    adjacency: Adjacency = "add_remove",
    aggregation: Bounded | None = None,
    noise_multiplier: float | None = None,
    partition: str = "private-examples",
) -> RetrievalPlan:
    """Calibrates the noise of answers from retrieved documents to `epsilon`, or prices a given noise.

    A unit participates in so many answers. `num_slots` is the public number of rows of a query; None: a row for each
    participant. `max_queries` is the most answers, `adjacency` "add_remove"; the other arguments are as of
    `plan_queries`.
    """
    check_positive_delta(delta)
    release = ParticipationPlan(
        aggregation=VoteSum() if aggregation is None else aggregation,
        mechanism=GaussianMechanism(1.0),
        participations=participations,
        num_slots=num_slots,
        adjacency=adjacency,
    )
    draft = RetrievalPlan(
        release=release,
        max_queries=check_int("max_queries", max_queries, low=1, high=MAX_COUNT),
        width=check_int("width", width, low=1),
        public_size=check_int("public_size", public_size, low=1),
        partition=check_name("partition", partition),
        epsilon=0.0,
        delta=delta,
    )
    return with_noise_for(draft, epsilon=epsilon, noise_multiplier=noise_multiplier)


def plan_answers(
    private: PrivateExamples,
    budget: Budget,
    retrieval: Retrieval,
    *,
    noise: Noise | None,
    epsilon: float | None,
    max_queries: int,
    width: int,
    aggregation: Bounded,
) -> RetrievalPlan:
    """Plans the answers of a component from its options."""
    given = noise_with(noise, GaussianMechanism.name)
    return plan_retrieval(
        private.public_size_of(None),
        epsilon=epsilon,
        delta=share_of_delta(budget, epsilon=epsilon, delta=given.delta),
        participations=retrieval.participations,
        width=width,
        num_slots=None if retrieval.slots == "per_unit" else retrieval.slots,
        max_queries=max_queries,
        adjacency=budget.adjacency,
        aggregation=aggregation,
        noise_multiplier=given.multiplier,
        partition=private.dataset_id,
    )


def document_task(private: PrivateExamples, task: FewShotTask) -> FewShotTask:
    """Returns the wording with the default for unlabelled documents: their text, and a question."""
    refuse_wordings(task)
    if private.label_key is not None:
        return task
    example = f"{{{private.text_key}}}" if task.example_prompt is None else task.example_prompt
    suffix = "Question: {input}\nAnswer:" if task.suffix is None else task.suffix
    return task.replace(example_prompt=example, suffix=suffix)


def refuse_wordings(task: FewShotTask | None) -> None:
    """Refuses further wordings: the place of a retrieved row depends on who else takes part."""
    if task is not None and task.wordings:
        expected = "none (the row of a document depends on who else takes part)"
        raise fail("FewShotTask.wordings", expected, len(task.wordings), "Give the task one wording.")


def text_of_query(wording: FewShotTemplate, query: Query) -> str:
    """Returns the part of a query that documents are compared with: its one variable, or `input`."""
    names = wording.input_variables
    if len(names) > 1 and "input" not in names:
        raise fail("suffix", "one variable, or one called 'input', to compare documents with", list(names))
    return query[names.index("input") if len(names) > 1 else 0]


def direction_of_query(
    texts: SimilarTexts, wording: FewShotTemplate, query: Query
) -> EffectGenerator[NDArray[np.float64]]:
    """Embeds `text_of_query`, refusing a text without a direction, which no document is near (an effect generator)."""
    text = text_of_query(wording, query)
    direction = (yield texts.request_public(text)) if text.strip() else np.zeros(1)
    if not direction.any():
        expected = "a text to compare documents with, which the embeddings tell something about"
        raise fail("input", expected, text, "Nothing was charged.")
    return cast("NDArray[np.float64]", direction)


def similar_texts(private: PrivateExamples, retrieval: Retrieval) -> SimilarTexts:
    """Returns the source of documents near a query; it reads none so far."""
    most, kept = retrieval.documents_per_unit, private.records_per_unit
    if most > kept:
        advice = "Declare more records_per_unit= of the examples, all of which a unit then may have."
        raise fail("Retrieval.documents_per_unit", f"at most the {kept} kept of a unit", most, advice)
    embeddings = as_embeddings(retrieval.embeddings)
    return SimilarTexts(embeddings, threshold=retrieval.similarity_threshold, most=most)


def least_votes(answers: LabelAnswers, plan: RetrievalPlan) -> float | None:
    """Returns the noisy votes that an answer needs; None: none."""
    if answers.abstain_below == "never":
        return None
    if not isinstance(answers.abstain_below, str | None):
        advice = "The number of participating documents is private: give min_votes=, 'auto' or 'never'."
        raise fail("LabelAnswers.abstain_below", "no share of the votes", answers.abstain_below, advice)
    return plan.noise_floor if answers.min_votes is None else answers.min_votes


def warn_of_noise(plan: RetrievalPlan, floor: float) -> None:
    """Warns the program, before it pays, where even rows that all agree are below the floor in most queries.

    Args:
      plan: of the answers.
      floor: votes that noise alone reaches in one of twenty queries.
    """
    slots = plan.release.num_slots
    most = plan.public_size if slots is None else slots
    if floor > most:
        more = "" if slots is None or slots >= plan.public_size else ", more slots"
        said = (
            f"Noise alone reaches {floor:.0f} votes in one of twenty queries, and the rows of one are {most:,} at most"
        )
        advice = f"Give fewer participations{more} or a larger epsilon."
        warn_caller(NoisyPlanWarning(f"{said}: most queries get no answer even where all rows agree. {advice}"))


def open_balances(
    balances: Any, *, private: PrivateExamples, budget: Budget, component: str | None
) -> SQLiteBalances | None:
    """Opens the file of balances; None: balances stay in memory."""
    if balances is None:
        return None
    if not budget.durable:
        raise fail("balances", "None with a ledger in memory, which is lost before the file", type(balances).__name__)
    if component is None:
        raise fail("component", "a name that other processes find the filter by", component)
    if private.unit_key is None:
        advice = "Without one, a unit is the position in the list, where another process may have another document."
        raise fail("balances", "documents with a unit_key", None, advice)
    if not isinstance(balances, SQLiteBalances | str | os.PathLike):
        raise fail("balances", "the path of a file, or SQLiteBalances", type(balances).__name__)
    return balances if isinstance(balances, SQLiteBalances) else SQLiteBalances(balances)


class RetrievalRunnable(QueryRunnable[ResultT]):
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

    @staticmethod
    def _declared(
        private: PrivateExamples,
        budget: Budget,
        plan: RetrievalPlan,
        texts: SimilarTexts,
        retrieval: Retrieval,
        *,
        component: str | None,
        epsilon: float | None,
        report: Mapping[str, Any],
        engine: object,
    ) -> dict[str, Any]:
        """Opens the balances, declares the share and returns the handles."""
        balances = open_balances(retrieval.balances, private=private, budget=budget, component=component)
        name = budget.fresh_name("retrieval") if component is None else component
        share = declare_share(
            private, budget, plan, component=name, epsilon=epsilon, public=report, engines=[engine, texts]
        )
        own = IndividualFilter(private, budget=budget, share=share, plan=plan.release, texts=texts, balances=balances)
        return {"private": private, "budget": budget, "share": share, "plan": plan, "filter": own}

    def warm_up(self, config: RunnableConfig | None = None) -> None:
        """Pays for the share if it is not paid yet, and embeds the documents that are not embedded yet.

        Call it when a service starts; otherwise the first query waits for all embeddings. If interrupted, it continues
        where it stopped. It debits no balance.

        Args:
          config: config of the run, whose callbacks receive the charge.

        Raises:
          UnsilencableModelError: others would see the documents; nothing was charged.
          PrivacyBudgetError: as of a query.
          LedgerError: as of a query.
        """
        run = ensure_config(config)
        with self._events(run) as events:
            resolve_budget(self.budget, run)
            check_silent(self.filter.texts.embeddings)
            self._open(partial(self._pay, events))
            run_sync(self.filter.participants.warm())

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
      - Noise is added for every declared label, also when no unit participates; a row that fails casts no vote.
      - Balances and numbers of participants are never shown.

    Build it with `from_private_examples`. Input: the query as text (or a message, or a prompt
    value), or a dict of the wording's variables. Queries are public.

    Example:
      >>> from langchain_core.documents import Document
      >>> from langchain_dpicl import Budget, EmbeddedLLM, FewShotTask, PrivateExamples, Retrieval
      >>> notes = [Document(f"Ward {place}: the patient slept well after the new tablets.") for place in range(40)]
      >>> voter = DPRetrievalVotingRunnable.from_private_examples(
      ...     PrivateExamples(notes, public_size=1_000),
      ...     llm=EmbeddedLLM(),
      ...     retrieval=Retrieval(similarity_threshold=0.3, participations=5),
      ...     budget=Budget(epsilon=8.0, delta=1e-6),
      ...     epsilon=4.0,
      ...     task=FewShotTask(labels=("yes", "no")),
      ... )
      >>> voter.invoke("did patients sleep well after the new tablets?") in {"yes", "no", "abstain"}
      True
    """

    min_votes: float | None = None
    """Noisy votes that an answer needs; None: the label with the most noisy votes is the answer."""

    RESULT = RetrievalResult

    @classmethod
    @door("DPRetrievalVotingRunnable")
    def from_private_examples(
        cls,
        private: PrivateExamples,
        *,
        llm: LLM,
        retrieval: Retrieval,
        max_queries: int = 100_000,
        budget: BudgetLike | None = None,
        epsilon: float | None = None,
        example_prompt: TemplateLike | None = None,
        suffix: TemplateLike | None = None,
        prefix: TemplateLike = "",
        task: FewShotTask | None = None,
        noise: Noise | None = None,
        answers: LabelAnswers | None = None,
        serving: Serving | None = None,
        component: str | None = None,
    ) -> Self:
        """Plans the noise, declares the share and returns a Runnable that has spent nothing so far.

        All parameters are public and must not be chosen by looking at the documents; this includes the threshold.

        Args:
          private: the documents; bound to the budget's ledger here. Its `text_key` is what is compared.
          llm: an engine, an object that carries one, or a LangChain model; see `backends.resolve.as_choice_backend`.
            It receives the private prompts.
          retrieval: a `Retrieval`: which documents take part. Its embeddings receive every private document: use local
            ones unless the provider may see the documents. What searches or ranks, as a vector store does, is refused.
          max_queries: most answers, over all processes; more of them cost no more.
          budget: a PrivacyBudgetCallbackHandler, a Budget, or a RunnableConfig whose callbacks hold one; otherwise
            looked up in the context.
          epsilon: this component's share of the budget (its noise is calibrated to it); paid once.
          example_prompt: template of one document; by default its text (and label, where the examples have one).
          suffix: template of the query, after the documents; the label is what follows.
          prefix: template before the documents.
          task: a `FewShotTask`, in place of the three templates, with labels where the examples declare none.
          noise: a `Noise`, of the mechanism "gaussian".
          answers: a `LabelAnswers`: how labels are read, and how many noisy votes one needs.
          serving: a `Serving`: limits, memory and tenants; cached answers debit no balance.
          component: name in the ledger.

        Raises:
          ConfigurationError: a public fault, or `replace_one`; nothing was charged and no private call was made.
          CapabilityError: the model cannot choose among labels, or the embeddings cannot embed.
          UnsilencableModelError: the model or the embeddings cannot be called without tracing.
          PrivacyBudgetError: no budget, another budget, or one that does not suffice.
          LedgerError: the file of balances cannot be used.
          ModelCallError: the model or the embeddings could not be reached.
          MemoError: the memo cannot be used.

        Source: Koskela, Tobaben and Honkela (2023); docs/proofs/individual-filters.md.
        """
        spender = resolve_budget(budget)
        near = option_of("retrieval", retrieval, Retrieval)
        wanted = option_of("answers", answers, LabelAnswers)
        words = document_task(private, FewShotTask.of(task, example_prompt, suffix, prefix))
        voted = VotingTask.of(private, words, wanted, are_documents=True)
        check_abstain_label(wanted, voted.labels)
        check_other_label(wanted)
        text_of_query(voted.wording, ("",) * len(voted.wording.input_variables))
        fields, memo = served(serving, budget=spender, component=component)
        plan = plan_answers(
            private,
            spender,
            near,
            noise=noise,
            epsilon=epsilon,
            max_queries=max_queries,
            width=len(voted.labels),
            aggregation=ProbabilitySum() if wanted.votes == "soft" else VoteSum(),
        )
        texts = similar_texts(private, near)
        voted, scorer, reading = reader_of(llm, voted, is_wanted=wanted.calibrate)
        least = least_votes(wanted, plan)
        warn_of_noise(plan, plan.noise_floor)
        report = {**plan.to_dict(), **voted.to_dict(), **reading, **texts.to_dict(), "min_votes": least}
        handles = cls._declared(
            private, spender, plan, texts, near, component=component, epsilon=epsilon, report=report, engine=scorer
        )
        return cls(
            task=voted,
            wording=voted.wording,
            rows=scorer,
            answers=wanted,
            min_votes=least,
            memo=vote_memo(memo, voted, llm, private=private, public=report, budget=spender, share=handles["share"]),
            **handles,
            **fields,
        )

    afrom_private_examples: ClassVar = awaitable(from_private_examples)

    @override
    def _prepare(self, query: Query, config: RunnableConfig) -> EffectGenerator[Any]:
        """Embeds the query and asks the public prompt, which detects an outage before a query is counted."""
        render = self.wording.renderer(self.task.queries(query))
        direction = yield from direction_of_query(self.filter.texts, self.wording, query)
        [row] = yield self.rows.request_public_rows([render(())], needs_text=True)
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


class DPRetrievalFreeFormRunnable(RetrievalRunnable[FreeFormResult], DPFreeFormRunnable):
    r"""Answers each query with a text that the private documents similar to it agree on, under differential privacy.

    Participation, balances and price are those of `DPRetrievalVotingRunnable`. Each participating unit becomes a
    prompt, which the model completes in a call that is not traced. No private answer is released, only an aggregate:

    - `KeywordAnswers`: the public words that occur in each answer are a vector of length 1; the noisy sum is
      released, and the public model writes the answer from the words above the noise floor.
    - `EmbeddingAnswers`: answers are embedded, in calls that are not traced, and the noisy sum of their unit vectors is
      released. The answer is the nearest of the public candidates.

    Formal guarantees:
      - As `DPRetrievalVotingRunnable`: (epsilon, delta)-DP for one unit under add_remove, paid once, for any number of
        adaptively chosen queries; balances and numbers of participants are never shown.
      - Candidates and keywords come from public calls, which receive no private document.
      - If nothing exceeds the noise floor, the answer is `abstain_answer` and the public model is not called. Of the
        queries without participants, at most one of twenty is answered as if there were some.
      - If the public model fails to write the answer, the release is kept for its tenant: asking again is free.

    Build it with `from_private_examples`. Input: as of `DPFreeFormRunnable`.

    Example:
      >>> from langchain_core.documents import Document
      >>> from langchain_dpicl import Budget, EmbeddedLLM, KeywordAnswers, PrivateExamples, Retrieval
      >>> notes = [Document(f"Ward {place}: new tablets, the patient slept well.") for place in range(40)]
      >>> helper = DPRetrievalFreeFormRunnable.from_private_examples(
      ...     PrivateExamples(notes, public_size=1_000),
      ...     llm=EmbeddedLLM(),
      ...     retrieval=Retrieval(similarity_threshold=0.3, participations=5),
      ...     budget=Budget(epsilon=8.0, delta=1e-6),
      ...     epsilon=4.0,
      ...     answers=KeywordAnswers(keywords=("tablets", "well", "slept", "syrup"), num_keywords=2),
      ... )
      >>> isinstance(helper.invoke("how did patients sleep with the new tablets?"), str)
      True
    """

    @classmethod
    @door("DPRetrievalFreeFormRunnable")
    def from_private_examples(  # type: ignore[override]
        cls,
        private: PrivateExamples,
        *,
        llm: LLM,
        retrieval: Retrieval,
        max_queries: int = 100_000,
        budget: BudgetLike | None = None,
        epsilon: float | None = None,
        example_prompt: TemplateLike | None = None,
        suffix: TemplateLike | None = None,
        prefix: TemplateLike = "",
        task: FewShotTask | None = None,
        noise: Noise | None = None,
        answers: KeywordAnswers | EmbeddingAnswers | None = None,
        serving: Serving | None = None,
        component: str | None = None,
    ) -> Self:
        """Plans the noise, declares the share and returns a Runnable that has spent nothing so far.

        All parameters are public and must not be chosen by looking at the documents; this includes the threshold.

        Args:
          private: the documents; see `DPRetrievalVotingRunnable`.
          llm: completes the private prompts, which it receives; see `DPFreeFormRunnable`.
          retrieval: a `Retrieval`: which documents take part; see `DPRetrievalVotingRunnable`.
          max_queries: most answers, over all processes; more of them cost no more.
          budget: a PrivacyBudgetCallbackHandler, a Budget, or a RunnableConfig whose callbacks hold one; otherwise
            looked up in the context.
          epsilon: this component's share of the budget (its noise is calibrated to it); paid once.
          example_prompt: template of one document; by default its text.
          suffix: template of the query, after the documents; the answer is what follows.
          prefix: template before the documents.
          task: a `FewShotTask`, in place of the three templates; without labels.
          noise: a `Noise`, of the mechanism "gaussian".
          answers: a `KeywordAnswers` (the default) or an `EmbeddingAnswers`: how private answers are aggregated, and
            what is answered where nothing exceeds the noise.
          serving: a `Serving`: limits, memory and tenants; cached answers debit no balance.
          component: name in the ledger.

        Raises:
          ConfigurationError: a public fault, or `replace_one`; nothing was charged and no private call was made.
          CapabilityError: the model cannot write text, or the embeddings cannot embed.
          UnsilencableModelError: the model or the embeddings cannot be called without tracing.
          PrivacyBudgetError: no budget, another budget, or one that does not suffice.
          LedgerError: the file of balances cannot be used.
          ModelCallError: the model or the embeddings could not be reached.
          MemoError: the memo cannot be used.

        Source: Koskela, Tobaben and Honkela (2023); Wu et al. (2024); docs/proofs/individual-filters.md.
        """
        spender = resolve_budget(budget)
        near = option_of("retrieval", retrieval, Retrieval)
        wanted = cast("TextAnswers", option_of("answers", answers, KeywordAnswers, EmbeddingAnswers))
        words = document_task(private, FewShotTask.of(task, example_prompt, suffix, prefix))
        fields, memo = served(serving, budget=spender, component=component)
        texts = similar_texts(private, near)
        maker = AnswerMaker.of(private, llm, words, wanted, near=texts.embeddings)
        space = cast("EmbeddingAggregator | NoisyKeywordAggregator", maker.space)
        text_of_query(maker.wording, ("",) * len(maker.wording.input_variables))
        if not wanted.abstain_answer.strip() or wanted.abstain_answer.strip() in (maker.public.fixed or ()):
            raise fail("abstain_answer", "a text that is none of the candidates", wanted.abstain_answer)
        plan = plan_answers(
            private,
            spender,
            near,
            noise=noise,
            epsilon=epsilon,
            max_queries=max_queries,
            width=space.width,
            aggregation=space.aggregation,
        )
        # The floor is known only now: it depends on the calibrated noise, which depends on the space's width.
        if isinstance(space, NoisyKeywordAggregator):
            space.floor = plan.noise_floor
        else:
            space.floor_of = plan.noise_floor_along
        warn_of_noise(plan, space.floor if isinstance(space, NoisyKeywordAggregator) else plan.noise_floor_along(1))
        report = {**plan.to_dict(), **maker.to_dict(), "abstain_answer": wanted.abstain_answer, **texts.to_dict()}
        handles = cls._declared(
            private,
            spender,
            plan,
            texts,
            near,
            component=component,
            epsilon=epsilon,
            report=report,
            engine=space,
        )
        return cls(
            wording=maker.wording,
            maker=maker,
            owed={},
            memo=maker.memo(memo, private=private, budget=spender, share=handles["share"], report=report),
            **handles,
            **fields,
        )

    afrom_private_examples: ClassVar = awaitable(from_private_examples)  # type: ignore[assignment]

    @override
    def _prepare(self, query: Query, config: RunnableConfig) -> EffectGenerator[Any]:
        """Embeds the query and asks for candidates, which calls every model that the release needs."""
        direction = yield from direction_of_query(self.filter.texts, self.wording, query)
        asked = yield from super()._prepare(query, config)
        return dataclasses.replace(asked, direction=direction)

    @override
    def _released(
        self, query: Query, prepared: Any, ticket: Reservation, config: RunnableConfig, keep: Callable[[Any], None]
    ) -> EffectGenerator[AnswerOutcome]:
        source, settled = prepared.round.rows, lambda: self.filter.settled
        asks = self._limit_concurrency(source.ask, config)
        question = FilteredQuery(prepared.direction, rows=asks, render=prepared.render, width=source.width)
        released = yield from self.filter.participants.release(question, ticket, settled=settled)
        outcome: AnswerOutcome = prepared.round.outcome(released)
        keep(outcome)
        return outcome
