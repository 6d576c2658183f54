"""`dp_choose`: the best of several chains on private records, by one exponential mechanism on one common sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from langchain_core.runnables import RunnableConfig

from langchain_dpicl._calls import warn_caller
from langchain_dpicl.backends.sync_async import EffectGenerator, run_in_thread
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.budget.handler import BudgetLike, check_config, resolve_budget
from langchain_dpicl.evaluation.chains import Question
from langchain_dpicl.evaluation.evaluate import (
    ONE_OF_THEM,
    KeptCall,
    OneRelease,
    Saved,
    SetAside,
    declared_share,
    examples_of,
    identity_of,
    question_report,
    silent_question,
    terms_of,
)
from langchain_dpicl.evaluation.evaluators import STOCK, Evaluator
from langchain_dpicl.evaluation.plan import ChoicePlan, plan_choice, plan_evaluation
from langchain_dpicl.exceptions import NoisyPlanWarning
from langchain_dpicl.privacy._validate import check_name, fail
from langchain_dpicl.privacy.accounting.events import canonical_json
from langchain_dpicl.privacy.extensions.outcome_counts import Part
from langchain_dpicl.privacy.ledger.shares import Reservation, Share
from langchain_dpicl.privacy.mechanisms.release_plan import Release
from langchain_dpicl.privacy.private_examples import PrivateExamples
from langchain_dpicl.release.curator import release_once
from langchain_dpicl.release.declare_share import declare_share, share_of_delta
from langchain_dpicl.reports.rendering import format_rounded_up

NO_LEAD = "no lead wins with 90 %"
"""Of a choice that noise decides: even a chain that is right on all units, where the others are right on none."""


@dataclass(frozen=True)
class Choice(Saved):
    """The chain that was chosen; public.

    Attributes:
      name: of the chain.
      chain: the chain itself.
      lead: how far above all others the best chain's mean mark (with `Exact` its accuracy) has to be, to be chosen with
        a chance of 90 % if `plan.sample` units are read; if fewer are, it has to be more. It follows from the plan and
        says nothing of the records.
      plan: the public plan.
      report: JSON-able privacy report.
    """

    name: str
    chain: Any
    lead: float
    plan: ChoicePlan
    report: Mapping[str, Any]

    def _released(self) -> dict[str, Any]:
        return {"chosen": self.name, "lead": self.lead}

    def __str__(self) -> str:
        wins = f"a mean mark {format_rounded_up(self.lead, 3)} above all others wins with 90 %"
        said = NO_LEAD if self.plan.lead > 1.0 else f"{wins} if {self.plan.sample:,} units are read"
        return f"chosen: {self.name}; {said}; epsilon {format_rounded_up(self.plan.epsilon, 4)}"


class Choosing(OneRelease[int, Choice]):
    """The release of an exponential mechanism; `dp_choose` makes and runs it."""

    _title = "private choice"
    plan: ChoicePlan

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
            width=self.plan.candidates,
            keep=keep_index,
        )

    def _value(self) -> Choice:
        name = list(self._chains)[self.released]
        marks = self._question.evaluators[0].scores
        lead = self.plan.lead * (max(marks) - min(marks))
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
    part: Part | None = None,
    component: str | None = None,
    config: RunnableConfig | None = None,
) -> KeptCall:
    if component is not None:
        check_name("component", component)
    check_config(config)
    spender = resolve_budget(budget, config)
    if not isinstance(chains, Mapping) or len(chains) < 2 or not all(isinstance(name, str) for name in chains):
        found = f"{len(chains)} by {list(chains)}" if isinstance(chains, Mapping) else type(chains).__name__
        raise fail("chains", "a mapping of two or more chains by name", found)
    if not isinstance(evaluator, Evaluator):
        raise fail("evaluator", "one of Exact, Score and Judge", type(evaluator).__name__, STOCK)
    question = silent_question(private, chains, evaluator, inputs=inputs, timeout=timeout, is_choice=True)
    source = examples_of(private, part)
    plan = plan_choice(
        source.public_size_of(part),
        candidates=len(chains),
        epsilon=epsilon,
        delta=share_of_delta(spender, epsilon=epsilon, delta=None),
        sample=sample,
        adjacency=spender.adjacency,
        calls_per_unit=len(chains) * (1 if question.judges[0] is None else 2),
        is_rounded=len(set(question.evaluators[0].scores)) > 2,
        part=part,
        partition=source.dataset_id,
    )
    if plan.lead > 1.0:
        said = f"Noise decides among {len(chains)} chains: {NO_LEAD} if {plan.sample:,} units are read"
        warn_caller(NoisyPlanWarning(f"{said}. Raise epsilon, or use more records."))
    shown = {**plan.to_dict(), **question_report(question, tuple(chains))}

    def declare() -> Share:
        named: dict[str, Any] = {"prefix": "choice", "component": component, "shown": shown, "epsilon": epsilon}
        # A unit that is replaced may leave one half and join the other: then both count, and each pays for itself.
        is_free = part == "choose" and spender.adjacency == "add_remove"
        declared = _with_a_test if is_free else declared_share
        return declared(source, spender, plan, question, **named)

    key = ("choose", component, epsilon, canonical_json(shown), identity_of(private), *question.identity)
    return KeptCall.of(
        spender,
        *key,
        probe=partial(question.probe, (config or {}).get("max_concurrency")),
        declare=declare,
        build=lambda paid: Choosing(source, question, chains, plan=plan, budget=spender, share=paid),
    )


def _with_a_test(
    source: PrivateExamples,
    budget: Budget,
    plan: ChoicePlan,
    question: Question,
    *,
    epsilon: float,
    shown: Mapping[str, Any],
    **named: Any,
) -> Share:
    """Declares the shares of a choice on one half and of an evaluation on the other together: the larger counts."""
    test = plan_evaluation(
        source.public_size_of("test"),
        widths=question.widths,
        epsilon=epsilon,
        delta=plan.delta,
        adjacency=plan.adjacency,
        calls_per_unit=1 if question.judges[0] is None else 2,
        part="test",
        partition=source.dataset_id,
    )
    report = {name: value for name, value in shown.items() if name not in plan.to_dict()}
    with budget.plan(epsilon=epsilon, delta=plan.delta):
        paid = declared_share(source, budget, plan, question, epsilon=epsilon, shown=shown, **named)
        other = declare_share(
            source,
            budget,
            test,
            component=f"{paid.component} test",
            epsilon=epsilon,
            public={**test.to_dict(), **report, "of": ONE_OF_THEM},
            engines=[one.calls for one in question.silent],
        )
    chains = tuple(one.identity for one in question.chains)
    SetAside(other, test, epsilon, (identity_of(source), "test", None, terms_of(question)), chains).keep(budget)
    return paid


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
    part: Part | None = None,
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
      part: "choose": reads one half of the units only, by a public hash, and sets aside, at no further cost, one
        evaluation of a candidate on the half "test" (not on a ledger with "replace_one"); see `dp_evaluate`.
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
        part=part,
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
