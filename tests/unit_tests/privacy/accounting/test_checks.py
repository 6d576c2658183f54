"""Checks in JSON become events with our sensitivities, and bad ones are named."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest

from langchain_dpicl.cli.check import evaluate_checks, event_of_check
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy.accounting import epsilon_upper_bound
from langchain_dpicl.privacy.accounting.events import (
    BoundedRangeEvent,
    ComposedEvent,
    GaussianEvent,
    PureEvent,
    RepeatedEvent,
    SubsampledEvent,
)

REFERENCE = Path(__file__).resolve().parents[5] / "shared" / "reference" / "accounting.json"
CASES = json.loads(REFERENCE.read_text())["checks"] if REFERENCE.is_file() else []


def check(*mechanisms: dict[str, Any], adjacency: str = "any", delta: float = 1e-5) -> dict[str, Any]:
    return {"id": "mine", "mechanisms": list(mechanisms), "adjacency": adjacency, "delta": delta}


GAUSSIAN = {"type": "gaussian", "noise_multiplier": 1.0, "count": 1}
LOGITS = {"type": "exp_mech", "clip": 5, "slots": 50, "tau": 2.0, "count": 7}


@pytest.mark.skipif(not CASES, reason="no reference file beside this checkout")
@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["id"]))
def test_every_reference_check_is_met_tightly(case: dict[str, Any]) -> None:
    (found,) = evaluate_checks([case])
    assert found["id"] == case["id"]
    assert case["must_be_at_least"] <= found["epsilon"] <= case.get("tight_at_most", case["should_be_at_most"])
    assert found["epsilon"] <= case["best"] * 1.001 + 1e-4


# The same kinds of checks with numbers of our own choosing; the intervals come from closed forms and two accountants.
OWN = [
    (check(GAUSSIAN), 4.3771, 4.3773),
    (check({"type": "poisson_gaussian", "q": 0.01, "noise_multiplier": 1.0, "count": 1000}, adjacency="add_remove"), 1.8279, 1.8295),
    (check({"type": "slot_gaussian", "q": 80 / 835, "noise_multiplier": 1.36, "count": 15}, adjacency="substitution", delta=1 / 835), 1.0145, 1.0185),
    (check({"type": "pure", "eps": 0.1, "count": 100}, delta=1e-6), 4.7745, 4.7747),
    (check({"type": "poisson_pure", "q": 0.05, "eps": 1.0, "count": 100}, adjacency="add_remove"), 2.1675, 2.1715),
    (check({"type": "slot_pure", "q": 0.05, "eps": 1.0, "count": 100}, adjacency="replace_one"), 2.5004, 2.5044),
    (check({"type": "exp_mech", "clip": 10, "slots": 100, "tau": 1.5, "count": 1000}, adjacency="add_remove_null", delta=1e-6), 11.7075, 12.4537),
    (check({"type": "bounded_range", "E": 0.1, "count": 1000}, delta=1e-6), 8.2955, 8.8461),
    (check({"type": "gnmax", "sigma": 20, "count": 100}, delta=1e-6), 3.3066, 3.3078),
    (check({"type": "confident_gnmax", "sigma1": 40, "sigma2": 40, "thresholds": 100, "labels": 60}, delta=1e-6), 1.6247, 1.6259),
]  # fmt: skip


@pytest.mark.parametrize(("case", "low", "high"), OWN, ids=[case["mechanisms"][0]["type"] for case, _, _ in OWN])
def test_each_type_is_priced_within_its_interval(case: dict[str, Any], low: float, high: float) -> None:
    (found,) = evaluate_checks({"about": "ours", "checks": [case]})
    assert set(found) == {"id", "epsilon"}
    assert low <= found["epsilon"] <= high


class TestTranslation:
    @pytest.mark.parametrize(
        ("mechanism", "event"),
        [
            (GAUSSIAN, GaussianEvent(1.0)),
            ({"type": "pure", "eps": 0.5, "count": 1}, PureEvent(0.5)),
            ({"type": "bounded_range", "E": 0.5, "count": 1}, BoundedRangeEvent(0.5)),
            ({"type": "gnmax", "sigma": 20, "count": 1}, GaussianEvent(20 / math.sqrt(2))),
        ],
    )
    def test_unsampled_types(self, mechanism: dict[str, Any], event: Any) -> None:
        assert event_of_check(check(mechanism)) == (RepeatedEvent(event, 1), "add_remove")

    @pytest.mark.parametrize("prefix", ["poisson", "slot"])
    def test_sampled_types_fix_the_adjacency_of_any(self, prefix: str) -> None:
        gaussian = {"type": f"{prefix}_gaussian", "q": 0.1, "noise_multiplier": 2.0, "count": 3}
        event, adjacency = event_of_check(check(GAUSSIAN, gaussian))
        assert adjacency == {"poisson": "add_remove", "slot": "replace_one"}[prefix]
        sampled = RepeatedEvent(SubsampledEvent(GaussianEvent(2.0), 0.1), 3)
        assert event == ComposedEvent((RepeatedEvent(GaussianEvent(1.0), 1), sampled))

    @pytest.mark.parametrize(
        ("adjacency", "factor", "ours"),
        [
            ("any", 4, "add_remove"),
            ("add_remove", 4, "add_remove"),
            ("add_remove_null", 2, "add_remove"),
            ("substitution", 4, "replace_one"),
            ("replace_one", 4, "replace_one"),
        ],
    )
    def test_the_range_of_clipped_logits_follows_rows_and_adjacency(
        self, adjacency: str, factor: int, ours: str
    ) -> None:
        event = RepeatedEvent(BoundedRangeEvent(factor * 5 / 50 / 2.0), 7)
        assert event_of_check(check(LOGITS, adjacency=adjacency)) == (event, ours)

    def test_confident_votes_charge_tests_and_answers(self) -> None:
        mechanism = {"type": "confident_gnmax", "sigma1": 30, "sigma2": 20, "thresholds": 5, "labels": 3}
        event, _ = event_of_check(check(mechanism))
        tests, answers = RepeatedEvent(GaussianEvent(30.0), 5), RepeatedEvent(GaussianEvent(20 / math.sqrt(2)), 3)
        assert event == ComposedEvent((tests, answers))

    def test_unused_noise_may_be_null(self) -> None:
        none = {"type": "confident_gnmax", "sigma1": None, "sigma2": None, "thresholds": 0, "labels": 0}
        assert evaluate_checks([check(none)]) == [{"id": "mine", "epsilon": 0.0}]

    def test_prices_come_from_accounting(self) -> None:
        case = check(LOGITS, GAUSSIAN, adjacency="substitution", delta=1e-6)
        event, adjacency = event_of_check(case)
        assert evaluate_checks([case])[0]["epsilon"] == epsilon_upper_bound(event, delta=1e-6, adjacency=adjacency)


def broken(**changes: Any) -> dict[str, Any]:
    case = copy.deepcopy(check(GAUSSIAN))
    case.update(changes)
    return case


def mechanism(base: dict[str, Any], **changes: Any) -> dict[str, Any]:
    merged = {**base, **changes}
    return broken(mechanisms=[{name: value for name, value in merged.items() if value is not ...}])


class TestBadInput:
    @pytest.mark.parametrize(
        ("case", "named"),
        [
            (broken(adjacency="swap"), "adjacency"),
            (broken(adjacency=["any"]), "adjacency"),
            (broken(delta=-0.1), "delta"),
            (broken(delta=None), "delta"),
            (broken(delta=math.nan), "delta"),
            (broken(mechanisms=[]), "mechanisms"),
            (broken(mechanisms="gaussian"), "mechanisms"),
            (broken(mechanisms=["gaussian"]), "type"),
            (mechanism(GAUSSIAN, type="laplace"), "type"),
            (mechanism(GAUSSIAN, type=3), "type"),
            (mechanism(GAUSSIAN, noise_multiplier=-1.0), "noise_multiplier"),
            (mechanism(GAUSSIAN, noise_multiplier=math.inf), "noise_multiplier"),
            (mechanism(GAUSSIAN, noise_multiplier="1"), "noise_multiplier"),
            (mechanism(GAUSSIAN, noise_multiplier=...), "noise_multiplier"),
            (mechanism(GAUSSIAN, sigma=2.0), "sigma"),
            (mechanism(GAUSSIAN, count=-1), "count"),
            (mechanism(GAUSSIAN, count=1.5), "count"),
            (mechanism(GAUSSIAN, count=True), "count"),
            (mechanism(LOGITS, slots=0), "slots"),
            (mechanism(LOGITS, tau=0), "tau"),
            (mechanism(LOGITS, clip=-5), "clip"),
            (mechanism({"type": "poisson_pure", "eps": 1.0, "count": 1}, q=1.5), "q"),
            (mechanism({"type": "poisson_pure", "eps": 1.0, "count": 1}, q=0.0), "q"),
            (mechanism({"type": "confident_gnmax", "sigma1": None, "sigma2": 1, "thresholds": 2}, labels=1), "sigma1"),
        ],
    )
    def test_the_message_names_check_and_field(self, case: dict[str, Any], named: str) -> None:
        with pytest.raises(ConfigurationError, match=f"check 'mine': field .*{named}"):
            evaluate_checks([case])

    @pytest.mark.parametrize("mechanism", [{"type": "poisson_pure", "eps": 700.0}, {"type": "slot_pure", "eps": 1.0}])
    def test_a_tiny_rate_has_a_price(self, mechanism: dict[str, Any]) -> None:
        (found,) = evaluate_checks([check({**mechanism, "q": 1e-300, "count": 1000})])
        assert 0 <= found["epsilon"] < 1e-4

    @pytest.mark.parametrize(
        "mechanism",
        [
            {"type": "poisson_pure", "q": 5e-324, "eps": 700.0, "count": 1},
            {"type": "poisson_pure", "q": 1e-200, "eps": 1e-200, "count": 1000},
            {"type": "poisson_gaussian", "q": 1e-300, "noise_multiplier": 1e20, "count": 10**12},
        ],
    )
    def test_numbers_that_cannot_be_computed_with_are_refused(self, mechanism: dict[str, Any]) -> None:
        with pytest.raises(ConfigurationError, match="check 'mine': expected numbers whose price can be computed"):
            evaluate_checks([check(mechanism)])

    def test_what_needs_more_memory_than_there_is_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*_: object, **__: object) -> None:
            raise MemoryError

        monkeypatch.setattr("langchain_dpicl.cli.check.epsilon_upper_bound", full)
        with pytest.raises(ConfigurationError, match="check 'mine': expected numbers whose price can be computed"):
            evaluate_checks([check(GAUSSIAN)])

    @pytest.mark.parametrize(
        ("kind", "adjacency"),
        [("poisson_gaussian", "substitution"), ("slot_gaussian", "add_remove"), ("slot_gaussian", "add_remove_null")],
    )
    def test_a_type_that_contradicts_the_adjacency_is_refused(self, kind: str, adjacency: str) -> None:
        case = check({"type": kind, "q": 0.1, "noise_multiplier": 1.0, "count": 1}, adjacency=adjacency)
        with pytest.raises(ConfigurationError, match=r"check 'mine'.*type"):
            event_of_check(case)

    def test_both_sampling_types_in_one_check_are_refused(self) -> None:
        parts = ({"type": f"{p}_pure", "q": 0.1, "eps": 1.0, "count": 1} for p in ("poisson", "slot"))
        with pytest.raises(ConfigurationError, match="type"):
            event_of_check(check(*parts))

    @pytest.mark.parametrize(
        "data", [{}, {"checks": None}, {"checks": "A1"}, "A1", 7, [7], [{}], [{"id": ""}], [{"id": 3}]]
    )
    def test_what_is_no_list_of_checks_is_refused(self, data: Any) -> None:
        with pytest.raises(ConfigurationError, match="check"):
            evaluate_checks(data)

    def test_no_checks_give_no_prices(self) -> None:
        assert evaluate_checks([]) == []
