"""The contract of a `SharePlan`: it can be rebuilt from what it shows, and from nothing that contradicts itself."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from langchain_dpicl.exceptions import DPICLError
from langchain_dpicl.planning.share_plan import Cost, SharePlan
from langchain_dpicl.privacy.accounting.events import canonical_json
from langchain_dpicl.reports.verify import shown_differences, shown_plan

ODD: tuple[Any, ...] = ([], "x", -1, 10**400, True, [[[]]], {"name": []})


def shown_by(plan: SharePlan) -> dict[str, Any]:
    shown: dict[str, Any] = json.loads(json.dumps(plan.to_dict(), allow_nan=False))
    return shown


class PlanContract:
    """Derive from it and give the plans of a method."""

    plans: Sequence[SharePlan]
    guesses: Mapping[str, Any] = MappingProxyType({})
    """What `cost` needs."""

    def test_it_is_rebuilt_from_what_it_shows(self) -> None:
        for plan in self.plans:
            made = shown_plan(shown_by(plan))
            assert type(made) is type(plan)
            assert shown_by(made) == shown_by(plan)
            assert (made.tickets(), made.event()) == (plan.tickets(), plan.event())
            assert (made.epsilon, made.implementation_delta) == (plan.epsilon, plan.implementation_delta)

    def test_no_number_can_be_another(self) -> None:
        plan = self.plans[0]
        shown = shown_by(plan)
        for name, value in shown.items():
            for odd in ODD:
                if canonical_json(odd) != canonical_json(value):
                    assert self.is_seen({**shown, name: odd}, plan), (name, odd)
            assert self.is_seen({key: each for key, each in shown.items() if key != name}, plan), name

    def test_more_noise_makes_other_tickets_at_a_lower_price(self) -> None:
        for plan in self.plans:
            louder = self.louder(shown_by(plan))
            made = shown_plan(louder)
            assert made.tickets() != plan.tickets()
            assert made.epsilon < plan.epsilon

    def test_every_plan_shows_the_same_terms(self) -> None:
        for plan in self.plans:
            shown = shown_by(plan)
            assert shown["method"] == plan.method
            assert (shown["epsilon"], shown["delta"]) == (plan.epsilon, plan.delta)
            assert (shown["dataset_id"], shown["adjacency"]) == (plan.partition, plan.adjacency)
            assert isinstance(plan.cost(record_tokens=40, **self.guesses), Cost)
            assert plan.method in plan._repr_html_()

    def louder(self, shown: dict[str, Any]) -> dict[str, Any]:
        """Twice the noise, wherever it is shown."""
        out = {**shown, "noise_multiplier": 2 * shown["noise_multiplier"]}
        for part in ("release", "participation", "counts"):
            if part in shown:
                noise = {
                    **shown[part]["mechanism"],
                    "noise_multiplier": 2 * shown[part]["mechanism"]["noise_multiplier"],
                }
                out[part] = {**shown[part], "mechanism": noise}
        return out

    def is_seen(self, shown: dict[str, Any], plan: SharePlan) -> bool:
        """Whether the planner refuses the parameters, or makes another plan of them, or they show another one."""
        try:
            made = shown_plan(shown)
            differ = list(shown_differences(shown, made.to_dict(), lambda found, cost: found != cost))
        except (DPICLError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            return True
        terms = (made.tickets(), made.sizes, made.partition, made.delta, made.implementation_delta)
        return bool(differ) or terms != (
            plan.tickets(),
            plan.sizes,
            plan.partition,
            plan.delta,
            plan.implementation_delta,
        )


__all__ = ["ODD", "PlanContract", "shown_by"]
