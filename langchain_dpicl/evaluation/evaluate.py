"""`dp_evaluate`: how good a chain is on private records, as one release of a table of outcomes; runs that are kept."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast, get_args

from langchain_core.runnables import RunnableConfig

from langchain_dpicl._opaque import PerProcess, this_process
from langchain_dpicl.backends.private_calls.call import RetryPolicy
from langchain_dpicl.backends.sync_async import (
    AcquireGate,
    Blocking,
    Call,
    EffectGenerator,
    FairSemaphore,
    run_async,
    run_in_thread,
    run_sync,
)
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.budget.handler import BudgetLike, check_config, resolve_budget
from langchain_dpicl.evaluation.chains import ANSWER, Question, SilentChain
from langchain_dpicl.evaluation.evaluators import STOCK, BoundEvaluator, Evaluator, Same, paired
from langchain_dpicl.evaluation.plan import Counted, Estimate, EvaluationPlan, NoisyRatio, Of, plan_evaluation
from langchain_dpicl.exceptions import ConfigurationError, RunInterruptedError
from langchain_dpicl.options import html_table
from langchain_dpicl.planning.share_plan import SharePlan
from langchain_dpicl.privacy._validate import check_choice, check_epsilon, check_name, check_positive, fail
from langchain_dpicl.privacy.accounting.events import canonical_json
from langchain_dpicl.privacy.extensions.outcome_counts import Part, Tables, split_in_parts
from langchain_dpicl.privacy.extensions.private_streams import PrivateRange, PrivateStream, RollingRange
from langchain_dpicl.privacy.ledger.shares import Reservation, Share
from langchain_dpicl.privacy.private_examples import PrivateExamples
from langchain_dpicl.release.count_release import release_outcomes
from langchain_dpicl.release.declare_share import declare_share, share_of_delta
from langchain_dpicl.released.base import write_whole
from langchain_dpicl.reports.claims import with_content_digest
from langchain_dpicl.reports.rendering import format_rounded_up
from langchain_dpicl.runs.door import NO_STREAM, UNDECLARED
from langchain_dpicl.runs.release_run import OneResult, ReleaseRun, RunCall, carrying

T = TypeVar("T")
Result = TypeVar("Result")


class Saved(ABC):
    """What a run released, as JSON: its report, and below "released" the values; public."""

    report: Mapping[str, Any]

    @abstractmethod
    def _released(self) -> dict[str, Any]:
        """Returns what was released, as JSON values."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the report, which `verify_report` takes, with what was released and a digest of all of it."""
        return with_content_digest({**self.report, "released": self._released()})

    def to_json(self) -> str:
        """Returns the JSON text of `to_dict`."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the JSON text atomically.

        Args:
          path: file to create or replace; its folder must exist.

        Raises:
          OSError: the folder is missing or cannot be written.
        """
        write_whole(path, self.to_json())

    def _repr_html_(self) -> str:
        shown = {name: self.report.get(name) for name in ("component", "dataset_id", "epsilon", "delta")}
        return html_table(type(self).__name__, {**shown, **self._released()})


class OneRelease(ReleaseRun[T, Result]):
    """A run of one release for one ticket, about one question."""

    def __init__(self, private: PrivateExamples, question: Question, **run: Any) -> None:
        self._item: OneResult[T] = OneResult()
        super().__init__(private, [self._item], **run)
        self._question = question
        self._draws_records = private.records_per_unit > 1
        (self._kind,) = self.plan.tickets()

    @abstractmethod
    def _release(self, ticket: Reservation, keep: Callable[[T], None]) -> EffectGenerator[None]:
        """Burns the ticket, releases, keeps what was released, and commits the ticket."""

    @property
    def released(self) -> T:
        """What was released."""
        if self._item.value is None:
            raise fail("result", "a release that was made", "none", "Call run() first.")
        return self._item.value

    @property
    def has_burnt(self) -> bool:
        """Whether the ticket burnt here, and nothing was released."""
        ticket = self._item.ticket
        return not self.is_finished and ticket is not None and ticket.uncommitted > 0

    @property
    def is_lost(self) -> bool:
        """Whether nothing was released and no ticket is left: it burnt, or was charged by a call that was stopped."""
        return not self.is_finished and self.share.remaining(self._kind.template, label=self._kind.label) < 1

    def _make(self, item: OneResult[T], call: RunCall) -> EffectGenerator[None]:
        def reserve() -> Reservation:
            # Kept in the thread: a cancellation that comes meanwhile is raised in place of what it returns.
            item.ticket = self.share.reserve(self._kind.template, label=self._kind.label)
            call.events.tickets += 1
            return item.ticket

        ticket = yield Blocking(reserve)
        with self._committing(ticket, lambda: item.done):
            yield from self._release(ticket, item.keep)
        call.tick()

    def again(self) -> Result:
        """Returns what a run that is kept released; commits its ticket first where the call itself could not."""
        with carrying(run=self):
            with self._lock.here:
                self._settle()
            return self._value()

    def _rest(self) -> None:
        super()._rest()
        if self.is_finished:  # the budget keeps the run, and would keep the examples
            vars(self).pop("_private", None)

    def _examples(self, item: OneResult[T]) -> tuple[T, ...]:
        return () if item.value is None else (item.value,)

    def _check_done(self, failure: str) -> None:
        if failure:
            msg = f"{type(self).__name__} stopped: {failure.rstrip('.')}. Nothing was released; the ticket that burnt"
            raise RunInterruptedError(f"{msg} stays charged. Call it again: a new release, charged anew.", run=self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(component={self.component!r}, epsilon={format_rounded_up(self.plan.epsilon, 4)})"


@dataclass(slots=True, eq=False)
class SetAside:
    """The share of one evaluation of the half "test" that a choice on the half "choose" declared with its own.

    Attributes:
      share: of the evaluation; both together cost what one does.
      plan: of the evaluation.
      epsilon: of both.
      terms: what is evaluated: the examples, evaluators and judge.
      chains: the candidates, one of which may be evaluated.
      taken_by: the chain that was.
      free: one item until it is taken.
    """

    share: Share
    plan: Any
    epsilon: float
    terms: Hashable
    chains: tuple[Hashable, ...]
    taken_by: Hashable = None
    free: list[None] = field(default_factory=lambda: [None])

    def take(self, chain: Hashable) -> bool:
        """Takes it for a chain; returns whether it was there, for one of all that ask at once."""
        try:
            self.free.pop()
        except IndexError:
            return False
        self.taken_by = chain
        return True

    def keep(self, budget: Budget) -> None:
        """Keeps it for `find`; a choice that is made again under its name sets aside what it did before."""
        kept = vars(budget).setdefault("_kept_tests", [])
        if not any(one.share.component == self.share.component for one in kept):
            kept.append(self)

    def drop_if_lost(self, call: KeptCall, chain: Hashable) -> bool:
        """Returns whether its ticket is gone: another process or chain has it, or the call that took it left nothing.

        Nothing finds it again then, except for the calls of the chain that has it.
        """
        # In this order: a call of another thread takes it first, and reserves the ticket then.
        is_left = all(self.share.remaining(one.template, label=one.label) for one in self.plan.tickets())
        taken_by = self.taken_by
        if taken_by not in {None, chain}:  # taken since it was found
            return True
        is_lost = not is_left if taken_by is None else call.key not in call.places
        if is_lost:
            self.chains = ()
        return is_lost

    @staticmethod
    def find(
        budget: Budget, *, terms: Hashable, chain: Hashable, epsilon: float | None, component: str | None
    ) -> SetAside | None:
        """Returns what is set aside for an evaluation, or was taken by it; None otherwise.

        Args:
          budget: that pays.
          terms: see the class.
          chain: what is evaluated.
          epsilon: of the evaluation; None: whatever was set aside.
          component: name that the caller gave; None: none. Under another name an evaluation pays for itself.
        """
        return next(
            (
                one
                for one in vars(budget).get("_kept_tests", ())
                if (one.terms, epsilon or one.epsilon) == (terms, one.epsilon)
                and chain in one.chains
                and one.taken_by in {None, chain}
                and component in {None, one.share.component}
            ),
            None,
        )


@dataclass(slots=True, eq=False)
class Kept:
    """What one call left: its finished run, or a share with an unburnt ticket; the same calls at once wait here.

    Formal guarantees:
      - It holds no private examples: a finished run has dropped them, and any other run is left to its error.
    """

    run: OneRelease[Any, Any] | None = None
    share: Share | None = None
    home: tuple[int, int] | None = None
    gates: PerProcess[FairSemaphore] = field(default_factory=lambda: PerProcess(lambda: FairSemaphore(1)))

    @property
    def is_empty(self) -> bool:
        """Whether nothing is kept."""
        return self.run is None and self.share is None

    def left(self, build: Callable[[Share], OneRelease[Any, Any]]) -> OneRelease[Any, Any] | None:
        """Returns a run on the kept share, None where its ticket is gone or another process has it."""
        if self.share is None:
            return None
        run = build(self.share)
        if self.home == this_process() and not self.share.is_given_up and not run.is_lost:
            return run
        self.share = None
        return None

    def keep_share(self, share: Share) -> Share:
        """Keeps a share that was declared, and returns it."""
        self.share, self.home = share, this_process()
        return share

    def keep(self, run: OneRelease[Any, Any]) -> None:
        """Keeps a run that has ended, if it released something; drops a share whose ticket burnt."""
        if run.is_finished:
            self.run, self.share = run, None
        elif run.has_burnt:
            self.share = None


@dataclass(frozen=True, slots=True)
class KeptCall:
    """A call with the places of all calls on its budget, one of which is its own."""

    places: dict[Hashable, Kept]
    key: Hashable
    probe: Callable[[], EffectGenerator[None]]
    declare: Callable[[], Share]
    build: Callable[[Share], OneRelease[Any, Any]]

    @classmethod
    def of(cls, budget: Budget, *key: Hashable, **made: Any) -> KeptCall:
        """Returns the call of these arguments."""
        # In the budget itself: it lives as long as the runs, which hold it.
        return cls(vars(budget).setdefault("_kept_evaluations", {}), key, **made)

    def answer(self, *, progress: bool | None, config: RunnableConfig | None) -> Any:
        """Returns the result, kept or released now."""
        return run_sync(self._answered(progress=progress, config=config))

    async def aanswer(self, *, progress: bool | None, config: RunnableConfig | None) -> Any:
        """Async twin of `answer`."""
        return await run_async(self._answered(progress=progress, config=config))

    def _answered(self, **how: Any) -> EffectGenerator[Any]:
        """Waits for its place, and returns the result that is kept there or is released now (an effect generator)."""
        while True:
            kept = self.places.setdefault(self.key, Kept())
            gate = kept.gates.here
            if not (yield AcquireGate(gate)):
                advice = (
                    "Await dp_aevaluate or dp_achoose: a call that blocks the loop cannot wait for one that runs in it."
                )
                raise fail("call", "no other call of these arguments at work on this event loop", "one", advice)
            try:
                # Otherwise the call that was waited for took its place away, which was empty, and another is there.
                if self.places.get(self.key) is kept:
                    return (yield from self._released(kept, how))
            finally:
                if kept.is_empty and self.places.get(self.key) is kept:
                    del self.places[self.key]
                gate.__exit__(None, None, None)

    def _released(self, kept: Kept, how: Mapping[str, Any]) -> EffectGenerator[Any]:
        if (finished := kept.run) is not None:
            return (yield Blocking(finished.again))
        run: OneRelease[Any, Any] | None = yield Blocking(lambda: kept.left(self.build))
        if run is None:
            yield from self.probe()
            run = yield Blocking(lambda: self.build(kept.keep_share(self.declare())))
        try:
            return (yield Call(partial(run.run, **how), partial(run.arun, **how)))
        finally:
            kept.keep(run)


def identity_of(private: PrivateExamples) -> Hashable:
    """Returns what stands for these examples in what is kept, and does not hold them."""
    return Same(private._identity)  # noqa: SLF001  by which the ledger knows them too


DEFAULT_EPSILON = 0.1
"""Share of an evaluation: with 2,000 units the 95 % interval of an accuracy of .8 is +-3 points by `Exact`, at most."""

_MANY_UNNAMED = 0.1
"""Share of answers without a label from which a result mentions them."""


@dataclass(frozen=True)
class EvaluationResult(Saved):
    """Noisy counts of the declared outcomes, and figures with intervals; public.

    Attributes:
      tables: noisy count by (label or "", what was said or the mark), of each evaluator; may be negative.
      by_score: of evaluators that have a second table, the noisy count of each score, with noise of its own.
      evaluators: the evaluators, with outcomes and scores.
      plan: the public plan.
      report: JSON-able privacy report.
      is_paired: whether the outcomes are pairs of scores, of the chain and of the baseline.
      draws_records: whether one record of several was drawn of each unit.
    """

    tables: Mapping[str, Mapping[tuple[str, str], int]]
    by_score: Mapping[str, Mapping[float, int]]
    evaluators: Mapping[str, BoundEvaluator]
    plan: EvaluationPlan
    report: Mapping[str, Any]
    is_paired: bool = False
    draws_records: bool = False

    def mean(self, name: str | None = None, *, confidence: float = 0.95, of: Of = "population") -> Estimate:
        """Returns the mean score of an evaluator: an accuracy, the mean mark; with a baseline, of the chain under test.

        Args:
          name: of the evaluator; None: the first.
          confidence: of the interval, over sample and noise.
          of: "population": of whom the units are a sample; "data": of these units alone, and of the answers that the
            chain gave this time.
        """
        one = self._named(name)
        again = Counted(tuple(self.by_score[one.name].values()), one.kinds) if one.kinds else None
        return self._ratio(one, one.own_scores or one.scores, again=again).estimate(confidence=confidence, of=of)

    @property
    def accuracy(self) -> Estimate:
        """The mean of the first evaluator, with its 95 % interval for the population."""
        return self.mean()

    def difference(self, name: str | None = None, *, confidence: float = 0.95, of: Of = "population") -> Estimate:
        """Returns the mean score of the chain minus that of the baseline, on the same records; arguments as `mean`.

        Raises:
          ConfigurationError: there was no baseline.
        """
        if not self.is_paired:
            raise fail("difference", "an evaluation with baseline=", None, "Evaluate again with the older chain.")
        one = self._named(name)
        return self._ratio(one, one.scores).estimate(confidence=confidence, of=of)

    def recall(self, label: str, *, confidence: float = 0.95, of: Of = "population") -> Estimate:
        """Returns the share of the records of a label that the chain names.

        Args:
          label: which one.
          confidence: as of `mean`.
          of: as of `mean`.

        Raises:
          ConfigurationError: no `Exact` evaluator without a baseline, or another label.
        """
        one = self._exact("recall")
        if label not in one.labels:
            raise fail("label", f"one of {list(one.labels)}", label)
        kept = [place for place, (true, _) in enumerate(one.cells) if true == label]
        return self._ratio(one, one.scores, kept=kept).estimate(confidence=confidence, of=of)

    @property
    def confusion(self) -> Mapping[tuple[str, str], int]:
        """The noisy count of each (label, answer).

        Raises:
          ConfigurationError: no `Exact` evaluator without a baseline; see `tables`.
        """
        return self.tables[self._exact("confusion").name]

    def _exact(self, asked: str) -> BoundEvaluator:
        """Returns the first evaluator whose outcomes are pairs of label and answer."""
        one = next((each for each in self.evaluators.values() if each.labels), None)
        if one is None:
            raise fail(asked, "an Exact evaluator and no baseline", list(self.evaluators))
        return one

    def _named(self, name: str | None) -> BoundEvaluator:
        chosen = next(iter(self.evaluators)) if name is None else name
        if chosen not in self.evaluators:
            raise fail("name", f"one of {list(self.evaluators)}", name)
        return self.evaluators[chosen]

    def _ratio(
        self,
        one: BoundEvaluator,
        scores: Sequence[float],
        *,
        kept: Sequence[int] | None = None,
        again: Counted | None = None,
    ) -> NoisyRatio:
        counts = tuple(self.tables[one.name].values())
        places = range(len(counts)) if kept is None else kept
        chosen = tuple(scores[place] for place in places)
        release = self.plan.release
        return NoisyRatio(
            tuple(counts[place] for place in places),
            chosen,
            (min(chosen), max(chosen)),
            float(release.scale),
            # Which record of a unit is drawn adds up to as much variance as drawing the unit: then no unit counts as
            # read in full.
            0.0 if self.draws_records else release.sampler.sampling_rate,
            again,
        )

    def _released(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, table in self.tables.items():
            counts = [[*cell, count] for cell, count in table.items()]
            found[name] = {"counts": counts, "mean": list(self.mean(name))}
            if name in self.by_score:
                found[name]["by_score"] = [list(one) for one in self.by_score[name].items()]
            if self.is_paired:
                found[name]["difference"] = list(self.difference(name))
        return found

    def __str__(self) -> str:
        rows = [f"{name}: {_points(self.mean(name))}" for name in self.evaluators]
        if self.is_paired:
            rows += [f"{name}, above the baseline: {_points(self.difference(name))}" for name in self.evaluators]
        rows += [words for one in self.evaluators.values() if one.labels and (words := self._unnamed(one))]
        return "\n".join(
            [*rows, f"epsilon {format_rounded_up(self.plan.epsilon, 4)}, {self.plan.sample:,} units read on average"]
        )

    def _unnamed(self, one: BoundEvaluator) -> str:
        """Says how many answers name no label, where the released counts show that they are many."""
        _, outside = one.cells[-1]
        found = self._ratio(one, [float(said == outside) for _, said in one.cells]).estimate(
            of="data", confidence=0.999
        )
        share = f"{one.name}: at least {int(100 * found.low)} % of the answers name no label, or their calls failed"
        return f"{share}; ask the chain a public question to see why" if found.low > _MANY_UNNAMED else ""


def _points(found: Estimate) -> str:
    return f"{found.value:.4f} [{found.low:.4f}, {found.high:.4f}] (95 %, noise and sampling)"


class Evaluation(OneRelease[Tables, EvaluationResult]):
    """The release of counts of outcomes; `dp_evaluate` makes and runs it."""

    _title = "private evaluation"
    plan: EvaluationPlan

    def _release(self, ticket: Reservation, keep: Callable[[Tables], None]) -> EffectGenerator[None]:
        keep((yield from release_outcomes(self._private, ticket, plan=self.plan.release, ask=self._question.ask)))
        ticket.commit()

    def _value(self) -> EvaluationResult:
        evaluators, counts = {one.name: one for one in self._question.evaluators}, iter(self.released)
        tables: dict[str, Mapping[tuple[str, str], int]] = {}
        by_score: dict[str, Mapping[float, int]] = {}
        for name, one in evaluators.items():
            tables[name] = dict(zip(one.cells, next(counts), strict=True))
            if one.kinds:
                by_score[name] = dict(zip(one.kinds, next(counts), strict=True))
        return EvaluationResult(
            tables, by_score, evaluators, self.plan, self.report, self._question.is_paired, self._draws_records
        )


def silent_question(
    private: PrivateExamples,
    chains: Mapping[str, Any],
    evaluators: Any,
    *,
    inputs: Mapping[str, str] | None,
    timeout: float | None,
    is_choice: bool = False,
) -> Question:
    """Takes chains and judges apart, and checks evaluators against the declared fields.

    Args:
      private: the examples.
      chains: by name; with two, of which the second is the baseline, outcomes are pairs.
      evaluators: one or several.
      inputs: field by variable of the templates of chains and judges.
      timeout: seconds that one call may take; None: the engine's own limit.
      is_choice: whether the chains are candidates, each with a score.
    """
    if isinstance(private, PrivateRange | RollingRange | PrivateStream):
        raise fail("private", "PrivateExamples", type(private).__name__, NO_STREAM)
    if not isinstance(private, PrivateExamples):
        raise fail("private", "PrivateExamples", type(private).__name__, UNDECLARED)
    if isinstance(evaluators, type) and issubclass(evaluators, Evaluator):
        advice = f"Write {evaluators.__name__}(...)."
        raise fail("evaluators", "one or more of Exact, Score and Judge", evaluators, advice)
    listed = [evaluators] if isinstance(evaluators, Evaluator) else evaluators
    if not isinstance(listed, Sequence) or not listed or not all(isinstance(one, Evaluator) for one in listed):
        several = listed if isinstance(listed, list | tuple) else ()
        others = [type(one).__name__ for one in several if not isinstance(one, Evaluator)]
        found = ", ".join(others) or type(evaluators).__name__
        raise fail("evaluators", "one or more of Exact, Score and Judge", found, STOCK)
    names = (*dict.fromkeys((private.text_key, *private.fields, *([private.label_key] if private.label_key else []))),)
    bound = [one.bind(names, private.label_key, private.labels) for one in listed]
    if len({one.name for one in bound}) < len(bound):
        raise fail("evaluators", "distinct names", [one.name for one in bound], "Give name=.")
    retry = RetryPolicy() if timeout is None else RetryPolicy(deadline=check_positive("timeout", timeout))
    if ANSWER in names and any(one.judge is not None for one in bound):
        advice = "A judge is shown what the chain answered under that name: give the field another one."
        raise fail("evaluators", f"no field named {ANSWER!r} beside a Judge", ANSWER, advice)
    hidden = frozenset().union(*(one.hidden for one in bound))
    under_test = tuple(
        SilentChain.of(chain, known=names, hidden=hidden, inputs=inputs, retry=retry, name=name)
        for name, chain in chains.items()
    )
    judges = tuple(
        None
        if one.judge is None
        else SilentChain.of(one.judge, known=(*names, ANSWER), inputs=inputs, retry=retry, name="judge")
        for one in bound
    )
    for judge in filter(None, judges):
        if ANSWER not in judge.fields.values():
            advice = "Its mark would say nothing of the chain. Nothing was charged."
            raise fail("judge", f"a template that shows {ANSWER!r}, what the chain says", sorted(judge.fields), advice)
    shown = {variable for one in (*under_test, *filter(None, judges)) for variable in one.fields}
    if unknown := sorted(set(inputs or {}) - shown):
        raise fail("inputs", f"variables of the templates, {sorted(shown)}", unknown)
    is_paired = not is_choice and len(under_test) > 1
    return Question(under_test, tuple(map(paired, bound)) if is_paired else tuple(bound), judges, is_paired, is_choice)


def _evaluation(
    chain: Any,
    private: PrivateExamples,
    *,
    evaluators: Any,
    budget: BudgetLike | None = None,
    epsilon: float | None = None,
    sample: int | None = None,
    inputs: Mapping[str, str] | None = None,
    baseline: Any = None,
    timeout: float | None = None,
    part: Part | None = None,
    component: str | None = None,
    config: RunnableConfig | None = None,
) -> KeptCall:
    if component is not None:
        check_name("component", component)
    if epsilon is not None:
        check_epsilon(epsilon)
    check_config(config)
    spender = resolve_budget(budget, config)
    chains = {"chain": chain, **({} if baseline is None else {"baseline": baseline})}
    question = silent_question(private, chains, evaluators, inputs=inputs, timeout=timeout)
    source = examples_of(private, part)

    def paid_by(aside: SetAside | None) -> KeptCall:
        share = aside.epsilon if aside is not None else DEFAULT_EPSILON if epsilon is None else epsilon
        judged = sum(judge is not None for judge in question.judges)
        plan = plan_evaluation(
            source.public_size_of(part),
            widths=question.widths,
            epsilon=share,
            delta=share_of_delta(spender, epsilon=share, delta=None),
            sample=sample,
            adjacency=spender.adjacency,
            calls_per_unit=len(question.chains) * (1 + judged),
            part=part,
            partition=source.dataset_id,
        )
        shown = {**plan.to_dict(), **question_report(question, tuple(chains))}

        def declare() -> Share:
            if aside is not None and aside.plan == plan and aside.take(question.chains[0].identity):
                return aside.share
            if aside is not None and epsilon is None:  # what was set aside may be more than this call would pay
                msg = "part: expected what a choice set aside, found that another call took it. Nothing was charged."
                raise ConfigurationError(f"{msg} Call again: it pays its own epsilon.")
            named: dict[str, Any] = {"prefix": "evaluation", "component": component, "shown": shown}
            return declared_share(source, spender, plan, question, epsilon=share, **named)

        name = component if aside is None else aside.share.component  # with its name and without it is one call
        return KeptCall.of(
            spender,
            *("evaluate", name, share, canonical_json(shown), identity_of(private), *question.identity),
            probe=partial(question.probe, (config or {}).get("max_concurrency")),
            declare=declare,
            build=lambda paid: Evaluation(source, question, plan=plan, budget=spender, share=paid),
        )

    # A choice may have set a share aside for the other half.
    aside = SetAside.find(
        spender,
        terms=(identity_of(source), part, sample, terms_of(question)),
        chain=question.chains[0].identity if baseline is None else None,
        epsilon=epsilon,
        component=component,
    )
    call = paid_by(aside)
    return paid_by(None) if aside is not None and aside.drop_if_lost(call, question.chains[0].identity) else call


def examples_of(private: PrivateExamples, part: Part | None) -> PrivateExamples:
    """Returns the examples that are read: these, or their declaration in parts."""
    if part is None:
        return private
    check_choice("part", part, get_args(Part))
    return split_in_parts(private)


def terms_of(question: Question) -> Hashable:
    """Returns what two evaluations of a half have in common beside the chain: outcomes, functions and judges."""
    _, judges, functions = question.identity
    return tuple((one.name, one.cells, one.scores) for one in question.evaluators), judges, functions


def question_report(question: Question, names: Sequence[str]) -> dict[str, Any]:
    """Returns what reports show of chains, judges and own functions."""
    judges = {
        one.name: judge.to_dict() for one, judge in zip(question.evaluators, question.judges, strict=True) if judge
    }
    assumed = [
        *(word for chain in question.silent for word in chain.assumed),
        *(word for one in question.evaluators for word in one.assumed),
    ]
    chains = {name: chain.to_dict() for name, chain in zip(names, question.chains, strict=True)}
    tables = [
        {
            "name": one.name,
            "outcomes": [list(cell) for cell in one.cells],
            "scores": list(one.scores),
            "by_score": list(one.kinds),
        }
        for one in question.evaluators
    ]
    # As a list: a name's place breaks ties.
    return {"tables": tables, "chains": chains, "order": list(names), "judges": judges, "assumed": assumed}


def declared_share(
    private: PrivateExamples,
    budget: Budget,
    plan: SharePlan,
    question: Question,
    *,
    epsilon: float,
    prefix: str,
    component: str | None,
    shown: Mapping[str, Any],
) -> Share:
    """Declares the share, and holds a report under its name to what is asked.

    Raises:
      ConfigurationError: a report under that name would show another question: a call that asked it left its ticket.
    """
    name = budget.fresh_name(prefix) if component is None else component
    share = declare_share(
        private,
        budget,
        plan,
        component=name,
        epsilon=epsilon,
        public=shown,
        engines=[one.calls for one in question.silent],
    )
    declared = (one for each in budget.report().to_dict()["shares"] for one in each["components"])
    public = next((one["public"] for one in declared if one["name"] == name), shown)
    if not _is_declared(public, shown):
        advice = "Its ticket is for that question. Give another component=, or none."
        raise fail("component", "the chains, judges and outcomes that were declared under this name", name, advice)
    return share


ONE_OF_THEM = "one of the chains"
"""What reports show of an evaluation that a choice set aside: it is of one of its candidates."""


def _is_declared(public: Mapping[str, Any], shown: Mapping[str, Any]) -> bool:
    """Whether what was declared is this question, or was set aside for one of several chains, of which this is one."""
    if public.get("of") == ONE_OF_THEM and set(map(canonical_json, shown["chains"].values())) <= set(
        map(canonical_json, public["chains"].values())
    ):
        shown = {**shown, **{key: public[key] for key in ("chains", "order")}}
    return canonical_json({key: public.get(key) for key in shown}) == canonical_json(shown)


def dp_evaluate(
    chain: Any,
    private: PrivateExamples,
    *,
    evaluators: Evaluator | Sequence[Evaluator],
    budget: BudgetLike | None = None,
    epsilon: float | None = None,
    sample: int | None = None,
    inputs: Mapping[str, str] | None = None,
    baseline: Any = None,
    timeout: float | None = None,
    part: Part | None = None,
    component: str | None = None,
    progress: bool | None = None,
    config: RunnableConfig | None = None,
) -> EvaluationResult:
    """Measures a chain on private records: noisy counts of declared outcomes, and figures with intervals.

    The chain is taken apart (`prompt | model | stock parser`, or a released prompt in front) and never invoked. All
    parameters are public and must not be chosen by looking at the records.

    Formal guarantees:
      - The result is epsilon-DP for one unit, at the share's epsilon (its delta covers the coins of the sample): one
        ticket, reserved and burnt before the first record is read.
      - An error, a timeout or a refusal counts as the worst score of that record and moves nothing else.
      - Called again with the same arguments in this process, it returns the kept result for free.

    Args:
      chain: the chain under test; its model sees private records.
      private: the examples; bound to the budget's ledger here. Of a unit with several records one is drawn.
      evaluators: one or several of `Exact`, `Score` and `Judge`; noise grows with the number of their tables.
      budget: a PrivacyBudgetCallbackHandler, a Budget, or a RunnableConfig with a handler; None: the context's.
      epsilon: this evaluation's share of the budget; None: 0.1, enough for an accuracy on 2,000 units.
      sample: units that are read, on average; None: all. Fewer cost fewer calls and less noise, and widen intervals.
      inputs: declared field by variable of the template, where the names differ.
      baseline: another chain, measured on the same records: outcomes are then pairs, with `difference`.
      timeout: seconds that one attempt of a call over HTTP may take.
      part: "choose" or "test": reads one half of the units only, by a public hash. After `dp_choose(part="choose")` the
        evaluation of a candidate on the half "test", with the same evaluator, is paid for already (`epsilon` None). On
        a ledger with adjacency "replace_one" both pay, as a unit that is replaced may change the half.
      component: name in the ledger. What `dp_choose(component="NAME", part="choose")` set aside for the half "test" has
        the name "NAME test": under it, with the same epsilon, another process evaluates a candidate.
      progress: True shows a bar, False hides it, None shows it on a terminal only.
      config: a RunnableConfig: its callbacks hear of charges, its `max_concurrency` limits the calls in flight.

    Raises:
      CapabilityError: a chain, or a judge, of other parts than those above.
      ConfigurationError: a public argument is invalid; nothing was charged.
      UnsilencableModelError: a model that cannot be called in silence.
      ModelCallError: a model could not be called with public words; nothing was charged.
      PrivacyBudgetError: no budget, a different budget, or too small a budget.

    Example:
      >>> from langchain_core.language_models import FakeListChatModel
      >>> from langchain_core.prompts import PromptTemplate
      >>> from langchain_dpicl import Budget, PrivateExamples
      >>> from langchain_dpicl.evaluation import Exact, dp_evaluate
      >>> tickets = [{"text": "it was declined", "queue": "card"}] * 900 + [{"text": "sent", "queue": "transfer"}] * 100
      >>> private = PrivateExamples(tickets, label_key="queue", labels=("card", "transfer"), public_size=1_000)
      >>> chain = PromptTemplate.from_template("{text} Queue:") | FakeListChatModel(responses=["card"])
      >>> found = dp_evaluate(chain, private, evaluators=Exact(), budget=Budget(epsilon=1.0, delta=1e-6), epsilon=0.5)
      >>> 0.85 < found.accuracy.value < 0.95
      True
    """
    asked = _evaluation(
        chain,
        private,
        evaluators=evaluators,
        budget=budget,
        epsilon=epsilon,
        sample=sample,
        inputs=inputs,
        baseline=baseline,
        timeout=timeout,
        part=part,
        component=component,
        config=config,
    )
    return cast("EvaluationResult", asked.answer(progress=progress, config=config))


async def dp_aevaluate(
    chain: Any,
    private: PrivateExamples,
    *,
    progress: bool | None = None,
    config: RunnableConfig | None = None,
    **arguments: Any,
) -> EvaluationResult:
    """Async version of `dp_evaluate`: calls run concurrently on the event loop.

    Args:
      chain: see `dp_evaluate`.
      private: see `dp_evaluate`.
      progress: see `dp_evaluate`.
      config: see `dp_evaluate`.
      **arguments: the others of `dp_evaluate`.
    """
    asked = await run_in_thread(lambda: _evaluation(chain, private, config=config, **arguments))
    return cast("EvaluationResult", await asked.aanswer(progress=progress, config=config))
