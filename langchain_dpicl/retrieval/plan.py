"""Checks the options of answers from retrieved documents, and plans their noise, price, cost and signal."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, ClassVar

from langchain_dpicl.backends.resolve import as_embeddings
from langchain_dpicl.backends.rows.neighbour_rows import SimilarTexts
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.options import FewShotTask, LabelAnswers, Noise, Retrieval
from langchain_dpicl.options.rows import noise_with
from langchain_dpicl.planning.expected_utility import (
    ROUGH_DRAWS,
    ranges,
    right_with_normal_noise,
    rough_ceiling,
    top_with_normal_noise,
)
from langchain_dpicl.planning.row_law import RowFacts, RowGuess, RowSource, mean_facts, wins_fairly
from langchain_dpicl.planning.share_plan import Cost, SharePlan, check_counts, with_noise_for
from langchain_dpicl.privacy._validate import Adjacency, check_int, check_positive_delta, fail
from langchain_dpicl.privacy.data.private_examples import PrivateExamples
from langchain_dpicl.privacy.extensions.individual_filter import Bounded, ParticipationPlan, participation_plan
from langchain_dpicl.privacy.ledger.amounts import check_name
from langchain_dpicl.privacy.ledger.tickets import Ticket
from langchain_dpicl.privacy.mechanisms.noise import GaussianMechanism
from langchain_dpicl.privacy.mechanisms.vote_sums import VoteSum
from langchain_dpicl.release.declare_share import share_of_delta
from langchain_dpicl.stores.balances import SQLiteBalances
from langchain_dpicl.tasks.templates import FewShotTemplate, Query

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
        self, *, participants: int, source: RowSource | None = None, labels: int | None = None, calibrated: bool = False
    ) -> dict[str, Any]:
        """Returns the chances of one answer, at a guessed number of participants, with what they rest on.

        A row shows one document. Documents near a query may be worth more than a guess or a rehearsal says, which know
        rows of examples drawn at random.

        Args:
          participants: units that take part in a query.
          source: where the numbers of rows come from: a `Rehearsal`, or a `RowGuess`; None: the usual guess.
          labels: labels that an answer can have; None: the width of a release.
          calibrated: whether rows are divided by those on content-free inputs, which a rehearsal tells apart.

        >>> plan = plan_retrieval(1_000, epsilon=4.0, delta=1e-6, participations=10, width=2, num_slots=None)
        >>> round(plan.noise_stddev, 2), round(plan.noise_floor, 2)
        (3.77, 7.38)
        >>> chances = plan.expected(participants=30)
        >>> round(chances["right_label_prob"], 2), round(chances["ceiling_prob"], 2), chances["rests_on"]
        (0.68, 0.68, 'a guess')
        """
        check_int("participants", participants, low=0)
        width = check_int("labels", self.width if labels is None else labels, low=2)
        rows = self._rows(participants)
        rests, law = source or RowGuess(), ((1, 1.0),)
        facts = mean_facts(rests, labels=width, law=law, calibrated=calibrated)
        # The votes of very many rows are as those of fewer, multiplied: what is left to chance in them is small.
        drawn, times = min(rows, _MOST_DRAWN), max(1.0, rows / _MOST_DRAWN)
        votes = times * facts.votes(drawn, 1.0)
        right = right_with_normal_noise(votes, self.noise_stddev)

        def chance(other: RowFacts) -> float:
            return self.right_chance(other, participants=participants)

        low, high = rests.interval(chance, labels=width, law=law, calibrated=calibrated)
        most = rests.interval(rough_ceiling, labels=width, law=law, calibrated=calibrated)
        return {
            "rows": float(rows),
            "noise_stddev": self.noise_stddev,
            "noise_floor": self.noise_floor,
            "row_right": facts.right,
            **ranges(right, low, high, ceiling=facts.ceiling(), most=most),
            "without_noise_prob": float(wins_fairly(votes).mean()),
            "passes_floor_prob": top_with_normal_noise(votes, self.noise_stddev, least=self.noise_floor),
            "rests_on": rests.rests_on,
        }

    def right_chance(self, facts: RowFacts, *, participants: int) -> float:
        """Returns the chance of the right label roughly, for intervals.

        Args:
          facts: the numbers of rows of one document.
          participants: units that take part in a query.
        """
        rows = self._rows(participants)
        few = max(1.0, rows / _MOST_DRAWN) * facts.votes(min(rows, _MOST_DRAWN), 1.0, draws=ROUGH_DRAWS)
        return right_with_normal_noise(few, self.noise_stddev)

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

    Args:
      public_size: declared number of units.
      epsilon: target; the plan's epsilon is an upper bound at most this. None needs `noise_multiplier`.
      delta: the share's delta.
      participations: answers that one unit may participate in.
      width: coordinates of one release: labels, or keywords.
      num_slots: rows of a query, public; None: a row for each participant.
      max_queries: most answers.
      adjacency: "add_remove".
      aggregation: how rows add up; `VoteSum()` by default.
      noise_multiplier: given noise; None calibrates.
      partition: the documents' public id.
    """
    check_positive_delta(delta)
    if epsilon is None and noise_multiplier is None:
        raise ConfigurationError("epsilon: expected a share of the budget (epsilon=...), found None.")
    release = ParticipationPlan(
        aggregation=VoteSum() if aggregation is None else aggregation,
        mechanism=GaussianMechanism(1.0),
        participations=participations,
        num_slots=num_slots,
        adjacency=adjacency,
    )
    draft = RetrievalPlan(
        release=release,
        max_queries=check_int("max_queries", max_queries, low=1),
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


def text_to_compare(wording: FewShotTemplate, query: Query) -> str:
    """Returns `text_of_query`, refusing a blank text, which has no direction to compare with."""
    text = text_of_query(wording, query)
    if not text.strip():
        raise fail("input", "a text to compare documents with", text, "Nothing was charged.")
    return text


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
