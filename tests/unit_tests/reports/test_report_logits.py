"""Reports of logit mechanisms, free tokens and deals: rebuilt from what they show, and no number of them is free."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from langchain_dpicl.reports.report import verify_report
from tests.full_doubles import full_engine
from tests.sealed_files import with_digest
from tests.unit_tests.generation.test_synthesis import handler
from tests.unit_tests.privacy.accounting.test_logit_corridor import writing

PLANS: dict[str, dict[str, Any]] = {
    "one sample": {},
    "per token": {"redraw_every": 1},
    "blend": {"mechanism": "clip_and_blend", "blend_weight": 0.7, "center": "none"},
    "units": {"rows": "units", "num_slots": 20},
    "free": {"free_tokens": 0.5, "private_tokens": 2},
    "free, few": {"free_tokens": 0.5, "private_tokens": 50},
    "disjoint": {"sampling": "disjoint", "shots_per_label": 2},
    "disjoint, free": {"sampling": "disjoint", "shots_per_label": 2, "free_tokens": 0.5, "private_tokens": 2},
    "disjoint, gumbel": {"sampling": "disjoint", "shots_per_label": 2, "mechanism": "gumbel"},
}


def reported(options: dict[str, Any]) -> dict[str, Any]:
    budget = handler()
    given = {"clip": None, "noise_multiplier": 3.0, "num_slots": 10, "shots_per_slot": 2, "epsilon": 400.0, **options}
    if options.get("rows") == "units":
        given["shots_per_slot"] = None
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
