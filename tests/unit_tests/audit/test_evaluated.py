"""Audits of evaluations and choices: sound ones pass, and each planted mistake is called by its name."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest

from langchain_dpicl.audit import Subject, count_games, suite
from langchain_dpicl.audit.game import play, power_of
from langchain_dpicl.audit.suite import _checks, games_of
from langchain_dpicl.backends.private_calls.call import OpaqueValue
from langchain_dpicl.evaluation import Exact, chains, evaluators
from langchain_dpicl.evaluation.chains import Question
from langchain_dpicl.evaluation.plan import plan_choice, plan_evaluation
from langchain_dpicl.privacy.extensions import outcome_counts
from langchain_dpicl.privacy.extensions.outcome_counts import OutcomePlan, OutcomeTable
from langchain_dpicl.privacy.extensions.value_counts import DiscreteLaplaceMechanism
from langchain_dpicl.privacy.mechanisms.randomness import SecureRandom
from langchain_dpicl.release import count_release

TERMS: dict[str, Any] = {"epsilon": 1.0, "delta": 1e-6}
EVALUATION = plan_evaluation(1_000, widths=[Exact.widths(2)], sample=300, **TERMS)
CHOICE = plan_choice(1_000, candidates=4, sample=300, **TERMS)
PLANS = {
    "evaluation": EVALUATION,
    "of a half": plan_evaluation(500, widths=[2], part="test", **TERMS),
    "two evaluators": plan_evaluation(500, widths=[Exact.widths(4), 3], **TERMS),
    "changed units": plan_evaluation(1_000, widths=[2], adjacency="replace_one", **TERMS),
    "choice": CHOICE,
    "of marks": plan_choice(500, candidates=4, is_rounded=True, part="choose", adjacency="add_remove", **TERMS),
    "choice of changed units": plan_choice(1_000, candidates=4, adjacency="replace_one", **TERMS),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_is_rebuilt_at_its_price_and_its_game_would_see_half_of_the_noise(name: str) -> None:
    told = json.loads(json.dumps(PLANS[name].to_dict()))
    subject = Subject.of({"plan": told})
    assert (subject.method, subject.plan) == (PLANS[name].method, PLANS[name])
    assert suite.check_price(subject).verdict == "sound"
    assert suite.check_price(Subject.of({**told, "epsilon": 0.9})).verdict == "violated"
    names = [check.name for check in _checks(subject, controls=False)]
    assert {count_games.ROWS, count_games.PARTS, "sampler: rate"} < set(names)
    (game,) = games_of(subject)
    assert power_of(game, game.event(game.sides()[0])) >= 0.99


@pytest.mark.parametrize("make", [count_games.evaluation_of, count_games.choice_of])
def test_a_run_is_audited_by_its_ledger_too(make: Callable[..., Any]) -> None:
    made = make(("mine",))
    made.run(progress=False)
    subject = Subject.of(made)
    checks = [suite.check_price, suite.check_tickets, suite.check_report]
    assert [check(subject).verdict for check in checks] == ["sound"] * 3


# --- what others have got wrong -------------------------------------------------------------------------------------


def a_row_per_record(patch: pytest.MonkeyPatch) -> None:
    """A unit counts as often as it has records."""
    real = Question.ask

    def ask(self: Question, units: Any) -> Any:
        return real(self, [OpaqueValue((record,)) for unit in units if unit for record in unit.reveal()])

    patch.setattr(Question, "ask", ask)


def one_failure_for_all(patch: pytest.MonkeyPatch) -> None:
    """The answers to all records are lost with one of them."""
    real = chains.SilentChain.answers

    def answers(self: Any, records: Any) -> Any:
        found = yield from real(self, records)
        return (None,) * len(found) if None in found else found

    patch.setattr(chains.SilentChain, "answers", answers)


def an_outcome_seen_by_others(patch: pytest.MonkeyPatch) -> None:
    """An outcome is counted by its order among all that came so far."""
    real, seen = evaluators.cell_of, list[int]()

    def cell_of(*given: Any) -> int:
        seen.append(real(*given))
        return 0 if len(seen) % 2 else seen[-1]

    patch.setattr("langchain_dpicl.evaluation.chains.cell_of", cell_of)


def two_cells(patch: pytest.MonkeyPatch) -> None:
    """A unit counts for its outcome, and for all together."""
    real = OutcomeTable.counts
    patch.setattr(OutcomeTable, "counts", lambda self, cells: tuple((*one[:-1], sum(one)) for one in real(self, cells)))


def both_tables_at_full_epsilon(patch: pytest.MonkeyPatch) -> None:
    """The noise is that of one table, however many there are."""
    patch.setattr(OutcomeTable, "l1_sensitivity", lambda self, adjacency: 2 if adjacency == "replace_one" else 1)


def a_small_table_without_noise(patch: pytest.MonkeyPatch) -> None:
    """The second table is counted, and its noise forgotten."""
    real = OutcomePlan.release
    patch.setattr(
        OutcomePlan,
        "release",
        lambda self, cells, rng: (*real(self, cells, rng=rng)[:-1], self.table.counts(cells)[-1]),
    )


def one_noise_for_both_tables(patch: pytest.MonkeyPatch) -> None:
    """The second table has the noise of the first: what is between the two is exact."""
    real = OutcomePlan.release

    def release(self: Any, cells: Any, *, rng: Any) -> Any:
        first, exact = real(self, cells, rng=rng)[0], self.table.counts(cells)
        noise = [noisy - count for noisy, count in zip(first, exact[0], strict=True)]
        return first, *(tuple(map(sum, zip(table, noise, strict=False))) for table in exact[1:])

    patch.setattr(OutcomePlan, "release", release)


def a_unit_asked_twice(patch: pytest.MonkeyPatch) -> None:
    """A unit has two rows."""
    real = Question.ask

    def ask(self: Question, units: Any) -> Any:
        return real(self, [unit for unit in units for _ in range(2)])

    patch.setattr(Question, "ask", ask)


def halves_by_place(patch: pytest.MonkeyPatch) -> None:
    """A unit more in front moves all others to the other half."""

    def split(self: Any, whole: Any) -> Any:
        return {part: list(range(start, whole.num_units, 2)) for start, part in enumerate(("choose", "test"))}

    patch.setattr(outcome_counts._HashedPools, "_split", split)


def half_of_the_noise(patch: pytest.MonkeyPatch) -> None:
    real, gumbel = DiscreteLaplaceMechanism.scale, SecureRandom.gumbel
    patch.setattr(DiscreteLaplaceMechanism, "scale", lambda self, l1: real(self, l1) / 2)
    patch.setattr(SecureRandom, "gumbel", lambda self, n: gumbel(self, n) / 2)


def no_noise_for_few(patch: pytest.MonkeyPatch) -> None:
    """A count of one stays as it is."""
    real = DiscreteLaplaceMechanism.release

    def release(self: Any, counts: Any, **given: Any) -> Any:
        return tuple((name, 1 if counts.get(name) == 1 else count) for name, count in real(self, counts, **given))

    patch.setattr(DiscreteLaplaceMechanism, "release", release)


PARTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Callable[[], Any]]] = {
    "a row per record": (a_row_per_record, count_games.check_rows),
    "one failure for all": (one_failure_for_all, count_games.check_rows),
    "an outcome seen by others": (an_outcome_seen_by_others, count_games.check_rows),
    "two cells": (two_cells, lambda: count_games.check_outcome_contribution(EVALUATION.release)),
    "a unit asked twice": (a_unit_asked_twice, count_games.check_rows),
    "both tables at full epsilon": (
        both_tables_at_full_epsilon,
        lambda: count_games.check_outcome_contribution(EVALUATION.release),
    ),
    "a small table without noise": (
        a_small_table_without_noise,
        lambda: count_games.check_tables(EVALUATION.release),
    ),
    "one noise for both tables": (
        one_noise_for_both_tables,
        lambda: count_games.check_tables(EVALUATION.release),
    ),
    "halves by place": (halves_by_place, count_games.check_parts),
    "no noise for few": (no_noise_for_few, lambda: suite.count_games.check_noise(EVALUATION.release)),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_planted_mistake_is_found_in_the_part_it_is_in(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, check = PARTS[name]
    assert check().verdict == "sound"
    plant(monkeypatch)
    assert check().verdict == "violated"


@pytest.mark.planted
@pytest.mark.parametrize(
    ("plan", "plant"),
    [
        (EVALUATION, half_of_the_noise),
        (EVALUATION, both_tables_at_full_epsilon),
        (EVALUATION, a_small_table_without_noise),
        (CHOICE, half_of_the_noise),
    ],
    ids=lambda one: getattr(one, "method", getattr(one, "__name__", "")),
)
def test_missing_noise_is_found_by_the_game(plan: Any, plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """At its plain size a game misses half of the noise with a chance of .003, at twice that with one of 3e-13."""
    (game,) = games_of(Subject.of(plan))
    plant(monkeypatch)
    assert play(dataclasses.replace(game, runs=2 * game.runs), looks=8).verdict == "violated"


def test_a_release_whose_ticket_is_not_burnt_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool is opened without a charge, and the ticket is given back."""
    (game,) = games_of(Subject.of(EVALUATION))

    def opened(private: Any, ticket: Any, event: Any, adjacency: Any, *, gap: float) -> Any:
        del event, adjacency
        return private._pool(None, ledger_id=ticket.ledger_id)

    monkeypatch.setattr(count_release, "opened", opened)
    monkeypatch.setattr("langchain_dpicl.privacy.ledger.shares.Reservation.commit", lambda self: None)
    side, _ = game.sides()
    side.play(1)
    assert list(side.faults())
