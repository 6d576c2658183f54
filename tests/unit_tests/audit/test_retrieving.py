"""The audit of answers from retrieved documents: what its games would see, and what they say of a sound component.

The games themselves are played in `tests/statistical_tests/test_retrieval_audit.py`.
"""

from __future__ import annotations

import dataclasses
import json

import pytest

from langchain_dpicl.audit import games_of, play
from langchain_dpicl.audit.component_games import check_nothing_else_shown, retrieval_cases, retriever_of
from langchain_dpicl.audit.game import POWER, power_of
from langchain_dpicl.audit.targets import Subject
from langchain_dpicl.privacy.accounting.events import GaussianEvent
from langchain_dpicl.retrieval import plan_retrieval
from langchain_dpicl.runs.query_runnable import QueryRunnable


@pytest.mark.parametrize("rows", ["units", "slots"])
def test_every_game_would_see_its_fault(rows: str) -> None:
    for game in retrieval_cases(rows=rows):
        power = power_of(game, GaussianEvent(0.5))  # all of them are charged a mu of 2
        assert power is not None
        assert power >= POWER, game.name
        assert game.event(game.sides()[0]).noise_multiplier == pytest.approx(0.5)  # type: ignore[union-attr]


def test_a_short_game_refutes_nothing_and_says_that_it_is_too_short() -> None:
    for game in retrieval_cases(rows="units"):
        found = play(dataclasses.replace(game, runs=2))
        assert found.verdict == "undecided"


def test_nothing_is_shown_but_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_nothing_else_shown("units").verdict == "sound"

    def shows(self: QueryRunnable) -> str:
        return f"voter of {self.private._pool(None, ledger_id=self.budget.ledger_id).num_units} documents"

    monkeypatch.setattr(QueryRunnable, "__repr__", shows)
    assert check_nothing_else_shown("units").verdict == "violated"


def test_a_plan_is_audited_from_its_json() -> None:
    plan = plan_retrieval(100, epsilon=2.0, delta=1e-6, participations=3, width=4)
    made = Subject.of(json.loads(json.dumps({"plan": plan.to_dict()})))
    assert made.method == "retrieval"
    assert made.plan.release == plan.release
    assert [game.name for game in games_of(made)] == [game.name for game in retrieval_cases(rows="slots")]
    assert Subject.of(retriever_of(())).method == "retrieval"
