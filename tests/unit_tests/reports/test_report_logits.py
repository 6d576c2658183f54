"""Reports of logit mechanisms, free tokens and deals: rebuilt from what they show, and no number of them is free."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from langchain_dpicl import Noise, Rows
from langchain_dpicl.options import LogitNoise
from langchain_dpicl.reports.report import verify_report
from tests.full_doubles import full_engine
from tests.sealed_files import with_digest
from tests.unit_tests.generation.test_synthesis import handler
from tests.unit_tests.privacy.accounting.test_logit_corridor import writing

SLOTS = Rows(slots=10, shots=2, redraw_every="run")
FREE = LogitNoise("recentered_clip", free_below=0.5, max_private_tokens=2, multiplier=3.0)
DEAL: dict[str, Any] = {"rows": SLOTS.replace(sampling="disjoint"), "shots_per_label": 2}
PLANS: dict[str, dict[str, Any]] = {
    "one sample": {},
    "per token": {"rows": SLOTS.replace(redraw_every=1)},
    "blend": {"noise": LogitNoise("clip_and_blend", blend_weight=0.7, center="none", multiplier=3.0)},
    "units": {"rows": Rows(units=20, redraw_every="run")},
    "free": {"noise": FREE},
    "free, few": {"noise": FREE.replace(max_private_tokens=50)},
    "disjoint": DEAL,
    "disjoint, free": {**DEAL, "noise": FREE},
    "disjoint, gumbel": {**DEAL, "noise": Noise("gumbel", multiplier=3.0)},
}


def reported(options: dict[str, Any]) -> dict[str, Any]:
    budget = handler()
    noise = LogitNoise("recentered_clip", multiplier=3.0)
    given = {"noise": noise, "rows": SLOTS, "epsilon": 400.0, **options}
    writing(llm=full_engine(), budget=budget, **given)
    report: dict[str, Any] = budget.report().to_dict()
    return report


@pytest.mark.parametrize("name", PLANS)
def test_a_report_of_every_plan_verifies_and_no_number_in_it_can_be_edited(name: str) -> None:
    report = reported(PLANS[name])
    assert verify_report(report).ok, verify_report(report).problems
    public = report["shares"][0]["components"][0]["public"]
    numbers = {"clip", "temperature", "noise_multiplier", "private_tokens", "test_noise_multiplier", "num_slots"}
    design = {"shots_per_label", "shots_per_slot", "overfill"} | ({"noise_scale"} if "clip" in public else set())
    edited = [key for key in numbers | design if key in public]
    assert "noise_multiplier" in edited
    for key in edited:
        forged = copy.deepcopy(report)
        shown = forged["shares"][0]["components"][0]["public"]
        shown[key] = shown[key] * 2
        harmless = key == "private_tokens" and public[key] >= 6  # as many as there are tokens, or more of them
        assert verify_report(with_digest(forged)).ok == harmless, key
    forgeries = [("mechanism", "gaussian"), ("sampling", "fixed")]
    if public["sampling"] == "disjoint" or public["redraw_every"] == 1:  # a deal of one batch is a sample of its own
        forgeries += [("sampling", "poisson" if public["sampling"] == "disjoint" else "disjoint")]
    if "clip" in public:
        forgeries += [("mechanism", "difference_clip"), ("center", "another")]
    if "free_tokens" in public:
        forgeries += [("free_tokens", 1.6)]
    elif public["sampling"] == "poisson":
        forgeries += [("redraw_every", 4)]
    for key, value in forgeries:
        forged = copy.deepcopy(report)
        forged["shares"][0]["components"][0]["public"][key] = value
        assert not verify_report(with_digest(forged)).ok, (key, value)
