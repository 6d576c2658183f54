"""`dp_choose`: the best of several chains on private records, by one exponential mechanism on one common sample."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from langchain_core.runnables import RunnableConfig

from langchain_dpicl.backends.sync_async import EffectGenerator, run_in_thread
from langchain_dpicl.budget.handler import BudgetLike, check_config, resolve_budget
from langchain_dpicl.evaluation.asking import Question
from langchain_dpicl.evaluation.evaluate import declared_share, question_report, silent_question
from langchain_dpicl.evaluation.evaluators import Evaluator, Same
from langchain_dpicl.evaluation.kept import KeptCall, OneRelease, Saved
from langchain_dpicl.planning.expected_utility import RowDesign
from langchain_dpicl.privacy._validate import Adjacency, check_int, fail
from langchain_dpicl.privacy.accounting.events import canonical_json
from langchain_dpicl.privacy.data.private_examples import PrivateExamples
from langchain_dpicl.privacy.extensions.joint_exponential import KeywordSum
from langchain_dpicl.privacy.ledger.shares import Reservation
from langchain_dpicl.privacy.mechanisms.noise import Release
from langchain_dpicl.release.curator import release_once
from langchain_dpicl.release.declare_share import share_of_delta
from langchain_dpicl.runs.query_plan import QueryPlan, plan_queries

_SURE = 0.9


@dataclass(frozen=True)
class Choice(Saved):
    """The chain that was chosen; public.

    Attributes:
      name: of the chain.
      chain: the chain itself.
      lead: how far above all others the best chain's mean mark (with `Exact` its accuracy) on the units read has to be
        to be chosen with a chance of 90 %. It follows from the plan and says nothing of the records.
      plan: the public plan.
      report: JSON-able privacy report.
    """

    name: str
    chain: Any
    lead: float
    plan: QueryPlan
    report: Mapping[str, Any]

    def _released(self) -> dict[str, Any]:
        return {"chosen": self.name, "lead": self.lead}

    def __str__(self) -> str:
        return (
            f"chosen: {self.name}; a mean mark {self.lead:.4f} above all others, on the units read, wins with 90 %; "
            f"epsilon {self.plan.epsilon:.4g}"
        )


def plan_choice(
    public_size: int,
    *,
    candidates: int,
    epsilon: float,
    delta: float,
    sample: int | None = None,
    adjacency: Adjacency = "add_remove",
    partition: str = "private-examples",
) -> QueryPlan:
    """Calibrates the noise of a choice to `epsilon`.

    Args:
      public_size: declared number of units.
      candidates: number of chains.
      epsilon: target; the plan's epsilon is an upper bound at most this.
      delta: the share's delta.
      sample: units that are read, on average; None, or more than there are: all.
      adjacency: neighbouring relation.
      partition: the data set's public id.

    Raises:
      ConfigurationError: a public parameter is out of range.
    """
    read = public_size if sample is None else min(public_size, check_int("sample", sample, low=1))
    return plan_queries(
        public_size,
        epsilon=epsilon,
        delta=delta,
        adjacency=adjacency,
        max_queries=1,
        width=candidates,
        aggregation=KeywordSum(),
        mechanism="gumbel",
        design=RowDesign.choose(rows="units", num_slots=read),
        partition=partition,
    )


def lead_to_win(plan: QueryPlan, *, is_rounded: bool = False) -> float:
    """Returns the lead that wins with a chance of 90 % or more, as a rate over the units read on average.

    With a lead of L right answers over each of K - 1 others and Gumbel noise of scale s the best is chosen with a
    chance of at least 1 / (1 + (K - 1) exp(-L / s)). Where marks are rounded by a coin, each of n records moves a lead
    by something in an interval of length 1, and half of the 10 % goes to that (Hoeffding 1963).

    Args:
      plan: of the choice.
      is_rounded: whether there are other marks than the least and the largest.
    """
    scale, others = plan.noise_multiplier * plan.release.sensitivity.require("range"), plan.width - 1
    sure = (1 + _SURE) / 2 if is_rounded else _SURE
    rounding = math.sqrt(plan.expected_rows / 2 * math.log(others / (1 - sure))) if is_rounded else 0.0
    return (scale * math.log(sure / (1 - sure) * others) + rounding) / plan.expected_rows


class Choosing(OneRelease[int, Choice]):
    """The release of an exponential mechanism; `dp_choose` makes and runs it."""

    _title = "private choice"
    plan: QueryPlan

    def __init__(self, private: PrivateExamples, question: Question, chains: Mapping[str, Any], **run: Any) -> None:
        super().__init__(private, question, **run)
        self._chains = dict(chains)

    def _release(self, ticket: Reservation, keep: Callable[[int], None]) -> EffectGenerator[None]:
        def keep_index(released: Release) -> None:
            if released.index is not None:
                keep(released.index)

        yield from release_once(
            self._private,
            ticket,
            plan=self.plan.release,
            rows=self._question.ask,
            render=self._question.render,
            width=self.plan.width,
            keep=keep_index,
        )

    def _value(self) -> Choice:
        name = list(self._chains)[self.released]
        marks = self._question.evaluators[0].scores
        lead = lead_to_win(self.plan, is_rounded=len(set(marks)) > 2) * (max(marks) - min(marks))
        return Choice(name, self._chains[name], lead, self.plan, self.report)


def _choosing(
    chains: Mapping[str, Any],
    private: PrivateExamples,
    *,
    evaluator: Evaluator,
    budget: BudgetLike | None = None,
    epsilon: float = 1.0,
    sample: int | None = None,
    inputs: Mapping[str, str] | None = None,
    timeout: float | None = None,
    component: str | None = None,
    config: RunnableConfig | None = None,
) -> KeptCall:
    check_config(config)
    spender = resolve_budget(budget, config)
    if not isinstance(chains, Mapping) or len(chains) < 2 or not all(isinstance(name, str) for name in chains):
        raise fail("chains", "two or more chains by name", type(chains).__name__)
    if not isinstance(evaluator, Evaluator):
        raise fail("evaluator", "one of Exact, Score and Judge", type(evaluator).__name__)
    question = silent_question(private, chains, evaluator, inputs=inputs, timeout=timeout, is_choice=True)
    plan = plan_choice(
        private.public_size_of(None),
        candidates=len(chains),
        epsilon=epsilon,
        delta=share_of_delta(spender, epsilon=epsilon, delta=None),
        sample=sample,
        adjacency=spender.adjacency,
        partition=private.dataset_id,
    )
    shown = {**plan.to_dict(), **question_report(question, tuple(chains))}

    def make() -> Choosing:
        named: dict[str, Any] = {"prefix": "choice", "component": component, "shown": shown}
        paid = declared_share(private, spender, plan, question, epsilon=epsilon, **named)
        return Choosing(private, question, chains, plan=plan, budget=spender, share=paid)

    key = ("choose", component, epsilon, canonical_json(shown), Same(private), *question.identity)
    return KeptCall.of(spender, key, make)


def dp_choose(
    chains: Mapping[str, Any],
    private: PrivateExamples,
    *,
    evaluator: Evaluator,
    budget: BudgetLike | None = None,
    epsilon: float = 1.0,
    sample: int | None = None,
    inputs: Mapping[str, str] | None = None,
    timeout: float | None = None,
    component: str | None = None,
    progress: bool | None = None,
    config: RunnableConfig | None = None,
) -> Choice:
    """Chooses the chain with about the best mean mark on private records; every chain answers the same sample.

    How many chains there are costs next to nothing; the calls are their number times the sample. All parameters are
    public and must not be chosen by looking at the records.

    Formal guarantees:
      - The name is the only thing that leaves: an exponential mechanism on the numbers of right answers, which a unit
        moves by at most 1, (epsilon, delta)-DP at the share's numbers; its one ticket burns before a record is read.
        Marks between the least and the largest count as right with the chance of their share, by a coin of the record.
      - An error, a timeout or a refusal counts as the least mark and moves nothing else.
      - Called again with the same arguments in this process, it returns the kept choice for free.

    Args:
      chains: the candidates by public name, each as `dp_evaluate` takes it.
      private: see `dp_evaluate`.
      evaluator: one of `Exact`, `Score` and `Judge`.
      budget: see `dp_evaluate`.
      epsilon: this choice's share of the budget.
      sample: see `dp_evaluate`.
      inputs: see `dp_evaluate`; of all chains.
      timeout: see `dp_evaluate`.
      component: see `dp_evaluate`.
      progress: see `dp_evaluate`.
      config: see `dp_evaluate`.

    Raises:
      ConfigurationError: fewer than two chains, or another invalid public argument; nothing was charged.
      CapabilityError: a chain of other parts than `dp_evaluate` takes.
      PrivacyBudgetError: no budget, a different budget, or too small a budget.

    Example:
      >>> from langchain_core.language_models import FakeListChatModel
      >>> from langchain_core.prompts import PromptTemplate
      >>> from langchain_dpicl import Budget, PrivateExamples
      >>> from langchain_dpicl.evaluation import Exact, dp_choose
      >>> tickets = [{"text": "it was declined", "queue": "card"}] * 500
      >>> private = PrivateExamples(tickets, label_key="queue", labels=("card", "transfer"), public_size=500)
      >>> prompt = PromptTemplate.from_template("{text} Queue:")
      >>> candidates = {name: prompt | FakeListChatModel(responses=[name]) for name in ("card", "transfer")}
      >>> best = dp_choose(candidates, private, evaluator=Exact(), budget=Budget(epsilon=1.0, delta=1e-6))
      >>> best.name
      'card'
    """
    asked = _choosing(
        chains,
        private,
        evaluator=evaluator,
        budget=budget,
        epsilon=epsilon,
        sample=sample,
        inputs=inputs,
        timeout=timeout,
        component=component,
        config=config,
    )
    return cast("Choice", asked.answer(progress=progress, config=config))


async def dp_achoose(
    chains: Mapping[str, Any],
    private: PrivateExamples,
    *,
    progress: bool | None = None,
    config: RunnableConfig | None = None,
    **arguments: Any,
) -> Choice:
    """Async version of `dp_choose`: calls run concurrently on the event loop.

    Args:
      chains: see `dp_choose`.
      private: see `dp_choose`.
      progress: see `dp_choose`.
      config: see `dp_choose`.
      **arguments: the others of `dp_choose`.
    """
    asked = await run_in_thread(lambda: _choosing(chains, private, config=config, **arguments))
    return cast("Choice", await asked.aanswer(progress=progress, config=config))
