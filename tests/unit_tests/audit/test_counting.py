"""Audits of counts of values: sound ones pass, and each of the known mistakes is called by its name."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from langchain_dpicl import Budget, PrivateExamples
from langchain_dpicl.audit import Subject, count_games, suite
from langchain_dpicl.audit.game import play, power_of
from langchain_dpicl.audit.suite import _checks, games_of
from langchain_dpicl.discovery import UnitCounter, plan_discovery
from langchain_dpicl.privacy.accounting.events import ComposedEvent, FailureEvent, PureEvent
from langchain_dpicl.privacy.extensions.redeclared import normalized
from langchain_dpicl.privacy.extensions.value_counts import CountPlan, DiscreteLaplaceMechanism, UnitValues

TERMS: dict[str, Any] = {"epsilon": 1.0, "delta": 1e-6}
PLANS = {
    "discovery": plan_discovery("value", max_values=2, **TERMS),
    "values": plan_discovery("value", values=("mine", "other"), adjacency="replace_one", **TERMS),
    "units": plan_discovery(None, **TERMS),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_of_counts_is_rebuilt_at_its_price_and_every_check_has_a_name(name: str) -> None:
    told = json.loads(json.dumps(PLANS[name].to_dict()))
    subject = Subject.of({"plan": told})
    assert (subject.method, subject.plan.event()) == ("counts", PLANS[name].event())
    assert suite.check_price(subject).verdict == "sound"
    assert suite.check_price(Subject.of({**told, "epsilon": 0.9})).verdict == "violated"
    names = [check.name for check in _checks(subject, controls=False)]
    assert ("threshold: one unit alone" in names) == (name == "discovery")
    (game,) = games_of(subject)
    assert game.options["adjacency"] == PLANS[name].release.adjacency


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_the_game_would_see_half_of_the_noise(adjacency: str) -> None:
    (game,) = count_games.count_games(adjacency=adjacency)
    event = game.event(game.sides()[0])
    assert event == PureEvent(2.0)
    assert power_of(game, event) >= 0.99
    # Without noise changed, the law is where the claim is: nothing to refute, and nothing left over.
    one, other = game.law(1.0)
    assert math.log(one / other) == pytest.approx(2.0)


def test_a_component_of_counts_is_audited_by_its_ledger_too() -> None:
    for made in (count_games.finder_of(("mine",)), count_games.counter_of(("mine",))):
        subject = Subject.of(made)
        checks = [suite.check_price, suite.check_tickets, suite.check_report]
        assert [check(subject).verdict for check in checks] == ["sound"] * 3
        assert subject.plan is made.plan


def test_a_pure_share_at_delta_0_is_sound() -> None:
    private = PrivateExamples([{"text": "t", "v": "a"}], fields=("v",), public_size=100)
    counter = UnitCounter.from_private_examples(
        private, field="v", values=("a", "b"), budget=Budget(epsilon=1.0, delta=0.0), epsilon=1.0
    )
    assert suite.check_price(Subject.of(counter)).verdict == "sound"
    told = counter.plan.to_dict()
    assert suite.check_price(Subject.of({**told, "epsilon": 0.9})).verdict == "violated"


def test_many_declared_values_are_not_all_tried() -> None:
    plan = plan_discovery("value", values=tuple(map(str, range(2_000))), max_values=2, **TERMS)
    found = count_games.check_contribution(plan.release)
    assert (found.verdict, found.runs < 20) == ("sound", True)


def test_sound_parts_are_sound() -> None:
    release = PLANS["discovery"].release
    assert count_games.check_contribution(release).verdict == "sound"
    assert count_games.check_threshold(release).verdict == "sound"
    found = count_games.check_noise(release)
    assert (found.verdict, found.power > 0.999) == ("sound", True)


# --- what others have got wrong -------------------------------------------------------------------------------------


def many_values(patch: pytest.MonkeyPatch) -> None:
    """A unit counts for every value it has."""
    patch.setattr(UnitValues, "of", lambda self, records: tuple({normalized(r.get(self.name) or "") for r in records}))


def every_record(patch: pytest.MonkeyPatch) -> None:
    """A unit counts as often as it has records."""
    patch.setattr(UnitValues, "of", lambda self, records: tuple(normalized(r.get(self.name) or "") for r in records))


def noise_for_many_alone(patch: pytest.MonkeyPatch) -> None:
    """What one unit holds gets no noise."""
    real = DiscreteLaplaceMechanism.release

    def release(self: Any, counts: Any, **given: Any) -> Any:
        made = real(self, counts, **given)
        return tuple((value, 1 if counts.get(value) == 1 else count) for value, count in made)

    patch.setattr(DiscreteLaplaceMechanism, "release", release)


def test_planted_noise_for_the_first_values_alone_is_found_in_a_plan_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    release = plan_discovery("value", values=tuple(map(str, range(300))), max_values=2, **TERMS).release
    assert count_games.check_noise(release).verdict == "sound"
    real = DiscreteLaplaceMechanism.release

    def noise_for_the_first_alone(self: Any, counts: Any, **given: Any) -> Any:
        made = real(self, counts, **given)
        return tuple((value, count if place < 290 else counts[value]) for place, (value, count) in enumerate(made))

    monkeypatch.setattr(DiscreteLaplaceMechanism, "release", noise_for_the_first_alone)
    assert count_games.check_noise(release).verdict == "violated"


def half_of_the_noise(patch: pytest.MonkeyPatch) -> None:
    real = DiscreteLaplaceMechanism.scale
    patch.setattr(DiscreteLaplaceMechanism, "scale", lambda self, l1: real(self, l1) / 2)


def delta_forgotten(patch: pytest.MonkeyPatch) -> None:
    """The threshold is thought to be free."""
    patch.setattr(
        DiscreteLaplaceMechanism, "event", lambda self, rule, adjacency: PureEvent(1.0 / self.noise_multiplier)
    )


def delta_of_one_value(patch: pytest.MonkeyPatch) -> None:
    """The chance of one value is charged, whatever a unit holds."""

    def event(self: Any, rule: Any, adjacency: str) -> Any:
        noisy = PureEvent(1.0 / self.noise_multiplier)
        if self.threshold is None:
            return noisy
        return ComposedEvent((noisy, FailureEvent(self.chance_alone(rule.l1_sensitivity(adjacency)))))

    patch.setattr(DiscreteLaplaceMechanism, "event", event)


PARTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Callable[[CountPlan], Any]]] = {
    "many values": (many_values, count_games.check_contribution),
    "every record": (every_record, count_games.check_contribution),
    "noise for many alone": (noise_for_many_alone, count_games.check_noise),
    "delta forgotten": (delta_forgotten, count_games.check_threshold),
    "delta of one value": (delta_of_one_value, count_games.check_threshold),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_planted_mistake_is_found_in_the_part_it_is_in(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, check = PARTS[name]
    release = PLANS["discovery"].release
    assert check(release).verdict == "sound"
    plant(monkeypatch)
    assert check(release).verdict == "violated"


def test_half_of_the_noise_is_found_at_the_users_own_size(monkeypatch: pytest.MonkeyPatch) -> None:
    real = DiscreteLaplaceMechanism.release

    def release(self: Any, counts: Any, **given: Any) -> Any:
        with monkeypatch.context() as patched:
            half_of_the_noise(patched)
            return real(self, counts, **given)

    monkeypatch.setattr(DiscreteLaplaceMechanism, "release", release)
    assert count_games.check_noise(PLANS["units"].release).verdict == "violated"


def threshold_of_the_data(patch: pytest.MonkeyPatch) -> None:
    """What is common is what half of the largest count have: the threshold follows the records."""
    real = DiscreteLaplaceMechanism.release

    def release(self: Any, counts: Counter[str], *, declared: Any, **given: Any) -> Any:
        made = real(self, counts, declared=tuple(counts) if declared is None else declared, **given)
        least = max(counts.values(), default=0) / 2
        return made if declared is not None else tuple((value, count) for value, count in made if count >= least)

    patch.setattr(DiscreteLaplaceMechanism, "release", release)


def no_threshold(patch: pytest.MonkeyPatch) -> None:
    """Whatever is above zero is shown."""
    real = DiscreteLaplaceMechanism.release

    def release(self: Any, counts: Counter[str], *, declared: Any, **given: Any) -> Any:
        made = real(self, counts, declared=tuple(counts) if declared is None else declared, **given)
        return tuple((value, count) for value, count in made if count > 0)

    patch.setattr(DiscreteLaplaceMechanism, "release", release)


@pytest.mark.planted
@pytest.mark.parametrize(
    ("plant", "verdict"),
    [
        (None, "sound"),
        (threshold_of_the_data, "violated"),
        (no_threshold, "violated"),
        (delta_forgotten, "violated"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_value_of_one_unit_that_is_found_too_often_is_a_violation(
    plant: Any, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if plant is not None:
        plant(monkeypatch)
    assert count_games.check_single_unit("add_remove").verdict == verdict


@pytest.mark.planted
@pytest.mark.parametrize(
    ("plant", "adjacency", "runs"),
    [
        (None, "replace_one", 200),
        (noise_for_many_alone, "replace_one", 300),
        (noise_for_many_alone, "add_remove", 300),
        (half_of_the_noise, "add_remove", 640),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_the_game_against_the_component_refutes_what_is_planted(
    plant: Any, adjacency: str, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its plain size, 320, the game misses half of the noise with a chance of 1e-4, at twice that with one of 2e-16."""
    (game,) = count_games.count_games(adjacency=adjacency)
    if plant is not None:
        plant(monkeypatch)
    found = play(dataclasses.replace(game, runs=runs), looks=1 if plant is None else 8)
    assert (found.verdict == "violated") == (plant is not None)
