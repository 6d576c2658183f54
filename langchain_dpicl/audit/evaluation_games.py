"""Checks evaluations and choices of chains: what a unit adds to the tables, the noise, halves, and games."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from langchain_core.language_models.llms import LLM
from langchain_core.prompts import PromptTemplate
from scipy import stats
from typing_extensions import override

from langchain_dpicl.audit.bounds import ALARM
from langchain_dpicl.audit.component_checks import check_noise_scale, check_row_contribution, check_sampler_rate
from langchain_dpicl.audit.count_games import MINE, NOISE, OTHER, OnceGame, check_noise, laplace_law
from langchain_dpicl.audit.game import AuditResult, result_of
from langchain_dpicl.backends.private_calls.call import OpaqueValue
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.evaluation.asking import Question
from langchain_dpicl.evaluation.choose import Choosing
from langchain_dpicl.evaluation.evaluate import Evaluation, silent_question
from langchain_dpicl.evaluation.evaluators import Exact
from langchain_dpicl.evaluation.plan import ChoicePlan, EvaluationPlan, plan_choice, plan_evaluation
from langchain_dpicl.privacy._validate import Adjacency
from langchain_dpicl.privacy.data.private_examples import PrivateExamples
from langchain_dpicl.privacy.extensions.outcome_counts import OutcomePlan, OutcomeTable
from langchain_dpicl.privacy.extensions.part_split import split_in_parts
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM
from langchain_dpicl.release.curator import pool_without_privacy
from langchain_dpicl.release.declare_share import declare_share

Named: TypeAlias = tuple[str, Callable[[], AuditResult]]

# What a game costs in all is of no interest: its events are compared one by one. No budget is in its way.
_EPSILON = 1e12
_LABELS = (MINE, OTHER)
_RUNS = {"add_remove": 480, "replace_one": 1_560}
_CHOICE_RUNS = {"add_remove": 700, "replace_one": 360}
_FEW_CELLS = 4
_HOSTILE = (-1.0, 0.0, 0.5, 1.0, 2.0, 1e300, -1e300, math.inf, -math.inf, math.nan)


class _Reader(LLM):
    """Answers with the record's own text, with a fixed one, or not at all."""

    says: str = ""

    @property
    @override
    def _llm_type(self) -> str:
        return "audited"

    @override
    def _call(self, prompt: str, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> str:
        if prompt.startswith("fails"):
            raise ValueError(prompt)
        return self.says or prompt


def question_over(private: PrivateExamples, *, is_choice: bool = False) -> Question:
    """Returns what is asked: a chain that says what the record says, and for a choice two that always name one label.

    Args:
      private: the examples.
      is_choice: whether two chains are candidates.
    """
    prompt = PromptTemplate.from_template("{text}")
    chains: dict[str, Any] = {label: prompt | _Reader(says=label) for label in _LABELS}
    chains = chains if is_choice else {"chain": prompt | _Reader()}
    return silent_question(private, chains, Exact(), inputs=None, timeout=None, is_choice=is_choice)


def _private(units: tuple[str, ...]) -> PrivateExamples:
    records = [{"text": MINE, "label": unit} for unit in units]
    return PrivateExamples(records, label_key="label", labels=_LABELS, public_size=1)


def evaluation_of(units: tuple[str, ...], *, adjacency: Adjacency = "add_remove") -> Evaluation:
    """Builds an evaluation over units that the chain calls `MINE`, whatever their label is, on a budget of its own."""
    private, budget = _private(units), Budget(epsilon=_EPSILON, delta=0.1, adjacency=adjacency)
    question = question_over(private)
    plan = plan_evaluation(
        1, widths=question.widths, epsilon=None, delta=0.05, adjacency=adjacency, noise_multiplier=NOISE
    )
    return Evaluation(private, question, plan=plan, budget=budget, share=_declared(private, budget, plan))


def choice_of(units: tuple[str, ...], *, adjacency: Adjacency = "add_remove") -> Choosing:
    """Builds a choice between two chains that each name one label always, on a budget of its own."""
    private, budget = _private(units), Budget(epsilon=_EPSILON, delta=0.1, adjacency=adjacency)
    question = question_over(private, is_choice=True)
    plan = plan_choice(1, candidates=2, epsilon=None, delta=0.05, adjacency=adjacency, noise_multiplier=NOISE)
    return Choosing(
        private, question, dict.fromkeys(_LABELS), plan=plan, budget=budget, share=_declared(private, budget, plan)
    )


def _declared(private: PrivateExamples, budget: Budget, plan: EvaluationPlan | ChoicePlan) -> Any:
    return declare_share(private, budget, plan, component="audited", epsilon=_EPSILON / 2, public=plan.to_dict())


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationGame(OnceGame):
    """A game against the release of `dp_evaluate`."""

    def build(self, units: tuple[str, ...]) -> Evaluation:
        """Builds the evaluation."""
        return evaluation_of(units, **self.options)

    def release(self, made: Evaluation) -> tuple[Mapping[str, int], int]:
        """Counts the outcomes, in both tables: the lesser count of the target, and the larger one of another."""
        found = made.run(progress=False)
        table, by_score = found.tables["exact"], found.by_score["exact"]
        counts = {MINE: min(table[MINE, MINE], by_score[1.0]), OTHER: max(table[OTHER, MINE], by_score[0.0])}
        return counts, _tickets_left(made)

    def outcome(self, counts: Mapping[str, int]) -> str:
        """Returns whether the counts speak for the target; of another in its place, against it."""
        is_replaced = self.options["adjacency"] == "replace_one"
        return MINE if counts[MINE] >= 1 and (not is_replaced or counts[OTHER] <= 0) else OTHER


@dataclass(frozen=True, kw_only=True, slots=True)
class ChoiceGame(OnceGame):
    """A game against the release of `dp_choose`."""

    def build(self, units: tuple[str, ...]) -> Choosing:
        """Builds the choice."""
        return choice_of(units, **self.options)

    def release(self, made: Choosing) -> tuple[Mapping[str, int], int]:
        """Chooses."""
        return {made.run(progress=False).name: 1}, _tickets_left(made)

    def outcome(self, counts: Mapping[str, int]) -> str:
        """Returns the chain that was chosen: that of the target's label, or the other."""
        return MINE if MINE in counts else OTHER


def _tickets_left(made: Evaluation | Choosing) -> int:
    (kind,) = made.plan.tickets()
    return made.share.remaining(kind.template, label=kind.label)


def _gumbel_law(moved: int) -> Callable[[float], tuple[float, float]]:
    """Returns the chances of the target's chain on both sides, from the factor of the noise."""

    def law(factor: float) -> tuple[float, float]:
        wins = 1.0 / (1.0 + math.exp(-factor / (NOISE * moved)))
        return wins, 0.5 if moved == 1 else 1.0 - wins

    return law


def games(plan: EvaluationPlan | ChoicePlan) -> Iterator[OnceGame]:
    """Yields the worst case of a plan: one unit that is added, or replaced by another.

    Args:
      plan: of an evaluation or a choice.
    """
    adjacency = plan.adjacency
    moved = 2 if adjacency == "replace_one" else 1
    terms: dict[str, Any] = {"units": (MINE,), "options": {"adjacency": adjacency}}
    if isinstance(plan, EvaluationPlan):
        yield EvaluationGame(
            name=f"one outcome: discrete_laplace, {adjacency}",
            neighbour=(OTHER,) if moved == 2 else (),
            runs=_RUNS[adjacency],
            law=laplace_law(2 * moved),  # one cell of each of two tables
            **terms,
        )
    else:
        yield ChoiceGame(
            name=f"one choice: gumbel, {adjacency}",
            neighbour=(OTHER,) if moved == 2 else (),
            runs=_CHOICE_RUNS[adjacency],
            law=_gumbel_law(moved),
            **terms,
        )


ROWS = "rows: one per unit, from its own records"


def checks(plan: EvaluationPlan | ChoicePlan) -> Iterator[Named]:
    """Yields the checks of a plan, except for games.

    Args:
      plan: of an evaluation or a choice.
    """
    release: Any = plan.release
    yield "sampler: rate", lambda: check_sampler_rate(release)
    if isinstance(plan, EvaluationPlan):
        yield "outcomes: one unit adds no more than charged", lambda: check_contribution(release)
        yield "noise: scale, at your own size", lambda: check_noise(release)
        yield TABLES, lambda: check_tables(release)
    else:
        yield "rows", lambda: check_row_contribution(release)
        yield "noise: scale", lambda: check_noise_scale(release)
    yield ROWS, check_rows
    yield PARTS, check_parts


def check_contribution(release: OutcomePlan) -> AuditResult:
    """Checks that no row, whatever stands in it, moves the tables by more than is charged, and no count by more than 1.

    Rows of places and of hostile numbers come, go and replace each other beside others.

    Args:
      release: of an evaluation.
    """
    table, tables = release.table, len(release.table.widths)
    places = [np.array([float(min(place, width - 1)) for width in table.widths]) for place in range(3)]
    rows = [*places, *(np.full(tables, number) for number in _HOSTILE)]
    faults, tried = set[str](), 0
    beside = np.array(places)

    def counts(*more: Any) -> list[int]:
        return list(itertools.chain.from_iterable(table.counts(np.array([*beside, *more]))))

    for one in rows:
        others: list[tuple[Any, ...]] = [()]
        others += [(other,) for other in rows] if release.adjacency == "replace_one" else []
        for other in others:
            moves = [abs(a - b) for a, b in zip(counts(one), counts(*other), strict=True)]
            tried += 1
            if sum(moves) > release.l1_sensitivity or max(moves) > 1:
                faults.add(f"a row moves the tables by {sum(moves)}, charged is {release.l1_sensitivity}")
    check = "outcomes: one unit adds no more than charged"
    return result_of(check, sorted(faults), runs=tried, blind=("rows not tried",), is_certain=True)


TABLES = "noise: in every table"


def check_tables(release: OutcomePlan, *, draws: int = 1_600) -> AuditResult:
    """Checks the noise of whole releases, over no unit and over one: in each table, and in two tables together.

    Of wide tables, a few cells are drawn: the noise follows from the number of tables. Binomial tests, exact.

    Args:
      release: of an evaluation.
      draws: counts that are drawn of each table, at least.
    """
    widths = tuple(min(width, _FEW_CELLS) for width in release.table.widths)
    few = dataclasses.replace(release, table=OutcomeTable(widths))
    scale = float(few.scale)
    far = max(1, math.ceil(scale))
    chance = 2 * float(stats.dlaplace(1.0 / scale).sf(far - 1))
    noises: list[list[int]] = [[] for _ in widths]
    firsts = []
    for run in range(math.ceil(draws / min(widths))):
        has_one = run % 2
        drawn = few.release(np.zeros((has_one, len(widths))), rng=SYSTEM_RANDOM)
        for noise, counts in zip(noises, drawn, strict=True):
            noise += [counts[0] - has_one, *counts[1:]]
        firsts.append([abs(counts[0] - has_one) >= far for counts in drawn])
    faults, powers, alarm = list[str](), list[float](), ALARM / (2 * len(widths))
    is_far = np.array(firsts)
    tests = [(f"table {place}", np.abs(np.array(noise)) >= far, chance) for place, noise in enumerate(noises)]
    tests += [
        (f"tables {place} and {place + 1}", is_far[:, place : place + 2].all(1), chance**2)
        for place in range(len(widths) - 1)
    ]
    for name, coins, share in tests:
        if stats.binomtest(int(coins.sum()), coins.size, share).pvalue < alarm:
            faults.append(
                f"{name}: {int(coins.sum())} of {coins.size} counts are far off, expected {coins.size * share:.1f}"
            )
    for noise in noises:
        size = len(noise)
        halved = 2 * float(stats.dlaplace(2.0 / scale).sf(far - 1))
        powers.append(float(stats.binom.cdf(stats.binom.ppf(alarm / 2, size, chance) - 1, size, halved)))
    blind = ("noise of which a small share is missing",)
    return result_of(TABLES, faults, runs=sum(map(len, noises)), power=min(powers), blind=blind)


def check_rows() -> AuditResult:
    """Checks that a unit more adds one row and moves no other, whatever its records do to template, chain and parser.

    Fails, many records, none, and texts that are templates themselves come beside others.
    """
    private = _private((MINE,))
    beside = [[(MINE,), (OTHER,)], [(MINE,), ("fails",), (OTHER,)]]
    more = [(), ("fails",) * 3, (MINE,) * 50, ("{text}",), ("\x00",), ("neither",), ("",)]
    faults = set[str]()
    for is_choice, others in itertools.product((False, True), beside):
        question = question_over(private, is_choice=is_choice)
        without = _rows(question, others)
        for unit in more:
            with_it = _rows(question, [*others, unit])
            if with_it.shape != (len(others) + 1, question.width):
                faults.add("a unit adds other than one row")
            elif not np.array_equal(with_it[:-1], without):
                faults.add("a unit moves the rows of others")
            elif is_choice and not set(with_it[-1].tolist()) <= {0.0, 1.0}:
                faults.add("a row of a choice holds more than right and wrong")
    return result_of(ROWS, sorted(faults), runs=4 * len(more), blind=("own functions that remember",), is_certain=True)


def _rows(question: Question, units: Sequence[tuple[str, ...]]) -> Any:
    records = [tuple({"text": text, "label": text if text in _LABELS else MINE} for text in unit) for unit in units]
    return question.ask([OpaqueValue(unit) for unit in records]).run().take()


PARTS = "parts: a unit is in one half, by itself"


def check_parts() -> AuditResult:
    """Checks that each unit is in one half, the same one with any other units beside it, with names and without."""
    texts, faults = [f"text {place}" for place in range(60)], set[str]()
    for key in (None, "user"):
        whole = _halves(texts, key)
        if sorted(itertools.chain.from_iterable(whole)) != sorted(texts):
            faults.add("a unit is in both halves, or in none")
        for gone in texts[:20]:
            without = _halves([text for text in texts if text != gone], key)
            if without != [half - {gone} for half in whole]:
                faults.add("a unit moves others from one half to the other")
    return result_of(PARTS, sorted(faults), runs=40, blind=("units not tried",), is_certain=True)


def _halves(texts: list[str], key: str | None) -> list[set[str]]:
    private = PrivateExamples([{"text": text, "user": text} for text in texts], unit_key=key, public_size=60)
    pools = [pool_without_privacy(split_in_parts(private), part) for part in ("choose", "test")]
    return [
        {record["text"] for position in range(pool.num_units) for record in pool.records(position)} for pool in pools
    ]
