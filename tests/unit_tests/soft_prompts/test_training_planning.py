"""Plans of training: noise from epsilon and epochs, against published settings and other accountants."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest

from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy import accounting
from langchain_dpicl.privacy.accounting.events import GaussianEvent, RepeatedEvent, SubsampledEvent
from langchain_dpicl.privacy.extensions.gradient_sums import SampledBallEvent
from langchain_dpicl.privacy.mechanisms.release_plan import ReleasePlan
from langchain_dpicl.runs.query_plan import plan_queries
from langchain_dpicl.soft_prompts.plan import TrainingPlan, plan_training, steps_of

SST2, BATCH = 67_349, 1_024
# steps, epsilon -> noise over the clip; and the epsilon of the same noise where a unit is replaced
REFERENCES = {(329, 3): 0.7937, (329, 8): 0.5667, (1316, 3): 1.0384, (1316, 8): 0.6881}
REPLACED = {(329, 3): 3.761, (329, 8): 8.973, (1316, 3): 4.933, (1316, 8): 10.608}


def planned(**changes: Any) -> TrainingPlan:
    terms: dict[str, Any] = {"epsilon": None, "delta": 1e-5, "steps": 40, "noise_multiplier": 1.5}
    shape: dict[str, Any] = {"expected_batch_size": 50, "l2_clip_norm": 0.2, "width": 900}
    return plan_training(changes.pop("public_size", 1_000), **{**terms, **shape, **changes})


def published(**changes: Any) -> TrainingPlan:
    """The paper's SST-2: a soft prompt of ten tokens for a model of width 768."""
    shape = {"delta": 1 / SST2, "expected_batch_size": BATCH, "l2_clip_norm": 0.1, "width": 7_680}
    return plan_training(SST2, **{"epsilon": None, **shape, **changes})


# --- second sources ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("steps", "epsilon"), REFERENCES)
def test_the_papers_settings_take_the_noise_of_the_references(steps: int, epsilon: float) -> None:
    plan = published(epsilon=epsilon, steps=steps)
    assert plan.noise_multiplier == pytest.approx(REFERENCES[steps, epsilon], rel=1.2e-3)
    assert 0.998 * epsilon < plan.epsilon <= epsilon


@pytest.mark.parametrize(("steps", "epsilon"), REPLACED)
def test_the_same_noise_costs_more_where_a_unit_is_replaced(steps: int, epsilon: float) -> None:
    """Half the multiplier is the same noise: under replace_one the sum moves by two clips."""
    noise = REFERENCES[steps, epsilon] / 2
    plan = published(steps=steps, noise_multiplier=noise, adjacency="replace_one")
    assert plan.noise_scale == pytest.approx(REFERENCES[steps, epsilon] * 0.1 / BATCH)
    assert plan.epsilon == pytest.approx(REPLACED[steps, epsilon], rel=4e-4)


def test_two_other_accountants_agree() -> None:
    """prv-accountant's interval holds the price; Renyi moments, which cannot be tight, lie above it."""
    from dp_accounting import dp_event
    from dp_accounting.rdp import RdpAccountant

    plan = published(steps=329, noise_multiplier=0.7937)
    bound = accounting.epsilon_bound(plan.event(), delta=1 / SST2, adjacency="add_remove")
    (heard,) = bound.opinions
    assert heard.name == "prv-accountant"
    assert heard.lower <= plan.epsilon <= heard.upper * 1.01
    moments = RdpAccountant().compose(
        dp_event.PoissonSampledDpEvent(BATCH / SST2, dp_event.GaussianDpEvent(0.7937)), 329
    )
    assert plan.epsilon < moments.get_epsilon(1 / SST2) < 1.3 * plan.epsilon


# --- what is charged --------------------------------------------------------------------------------------------------


def test_a_step_is_a_ticket_and_all_of_them_are_the_event() -> None:
    plan = planned()
    (ticket,) = plan.tickets()
    assert (ticket.template, ticket.max_count, ticket.refundable) == ("step", 40, True)
    assert ticket.event == SubsampledEvent(GaussianEvent(1.5), 0.05)
    assert plan.event() == RepeatedEvent(ticket.event, 40)
    assert planned(adjacency="replace_one").event() == RepeatedEvent(SampledBallEvent(1.5, 0.05), 40)
    assert planned(steps=1).event() == ticket.event


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_calibrated_noise_costs_the_epsilon_that_a_ledger_charges(adjacency: Any) -> None:
    plan = planned(epsilon=0.7, noise_multiplier=None, adjacency=adjacency)
    share = Budget(epsilon=1.0, delta=1e-5, adjacency=adjacency).declare(
        "prompt", tickets=plan.tickets(), delta=1e-5, implementation_delta=plan.implementation_delta
    )
    assert share.epsilon == pytest.approx(plan.epsilon, rel=1e-6)
    assert 0.699 < plan.epsilon <= 0.7


def test_more_steps_larger_batches_and_a_smaller_epsilon_take_more_noise() -> None:
    def noise(**changes: Any) -> float:
        return planned(**{"epsilon": 1.0, "noise_multiplier": None, "is_rough": True, **changes}).noise_multiplier

    assert noise(steps=20) < noise(steps=40) < noise(steps=400)
    assert noise(expected_batch_size=10) < noise(expected_batch_size=50) < noise(expected_batch_size=1_000)
    assert noise(epsilon=0.3) > noise() > noise(epsilon=4.0)
    assert noise(adjacency="replace_one") < noise() < 2 * noise(adjacency="replace_one")


def test_a_rough_plan_is_a_little_louder_and_within_its_epsilon() -> None:
    fine, rough = (planned(epsilon=1.0, noise_multiplier=None, is_rough=is_rough) for is_rough in (False, True))
    assert fine.noise_multiplier <= rough.noise_multiplier <= 1.05 * fine.noise_multiplier
    assert fine.epsilon <= rough.epsilon == 1.0


def test_the_gap_of_drawn_noise_counts_every_step_and_every_parameter() -> None:
    assert planned().implementation_delta == planned().release.implementation_delta(40, width=900)
    assert planned(steps=80).implementation_delta == 2 * planned().implementation_delta
    assert planned(width=2**24).implementation_delta > planned().implementation_delta
    with pytest.raises(ConfigurationError, match="declared gap"):
        planned(delta=1e-30)


# --- steps and epochs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("public_size", "batch", "epochs", "steps"),
    [
        (SST2, BATCH, 5, 329),
        (SST2, BATCH, 20, 1316),
        (1_000, 100, 1.1, 11),
        (1_000, 100, 1.11, 12),
        (1_000, 100, 0.001, 1),
        (1_000, 1_000, 7, 7),
        (7, 3, 1e-9, 1),
    ],
)
def test_epochs_are_steps_rounded_up(public_size: int, batch: int, epochs: float, steps: int) -> None:
    assert steps_of(public_size, batch, steps=None, epochs=epochs) == steps


def test_epochs_are_what_the_steps_make_of_them() -> None:
    plan = planned(steps=None, epochs=2)
    assert (plan.steps, plan.epochs, plan.sampling_rate) == (40, 2.0, 0.05)
    assert planned(steps=30).epochs == 1.5
    with pytest.raises(ConfigurationError, match="expected one of them, found neither"):
        planned(steps=None)
    with pytest.raises(ConfigurationError, match="expected one of them, found both"):
        planned(epochs=1.0)


# --- what is expected -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("adjacency", "reach"), [("add_remove", 1), ("replace_one", 2)])
def test_noise_is_told_on_the_average_gradient(adjacency: Any, reach: int) -> None:
    plan = planned(adjacency=adjacency)
    assert plan.average_factor == pytest.approx(0.2 / 50)
    assert plan.noise_scale == pytest.approx(1.5 * reach * 0.2 / 50)
    assert plan.noise_to_clip == pytest.approx(1.5 * reach / 50 * 30)  # the root of the width is 30


def test_work_is_counted_in_gradients_and_tokens() -> None:
    cost = planned().cost(record_tokens=16, examples_per_unit=3)
    assert (cost.private_calls, cost.tokens_in) == (40 * 50 * 3, 40 * 50 * 3 * 16)
    assert planned().cost().private_calls == 2_000
    for wrong in ({"record_tokens": 0}, {"examples_per_unit": 0}):
        with pytest.raises(ConfigurationError, match="expected an integer >= 1"):
            planned().cost(**wrong)


def test_a_plan_is_json_and_holds_its_release() -> None:
    plan = planned()
    out = json.loads(json.dumps(plan.to_dict()))
    assert out["release"] == plan.release.to_dict()
    assert out["release"]["aggregation"] == {"name": "clipped_gradient_sum", "l2_clip_norm": 0.2}
    flat = {name: out[name] for name in ("steps", "width", "public_size", "expected_batch_size", "l2_clip_norm")}
    assert flat == {"steps": 40, "width": 900, "public_size": 1000, "expected_batch_size": 50, "l2_clip_norm": 0.2}
    assert (out["epsilon"], out["noise_multiplier"], out["rows"], out["sampling"]) == (
        plan.epsilon,
        1.5,
        "units",
        "poisson",
    )


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"public_size": 0}, "public_size"),
        ({"expected_batch_size": 0}, "expected_batch_size"),
        ({"expected_batch_size": 1_001}, "expected_batch_size"),
        ({"expected_batch_size": 2.5}, "expected_batch_size"),
        ({"l2_clip_norm": 0.0}, "l2_clip_norm"),
        ({"l2_clip_norm": math.nan}, "l2_clip_norm"),
        ({"width": 0}, "width"),
        ({"width": 2**24 + 1}, "width"),
        ({"steps": 0}, "steps"),
        ({"steps": None, "epochs": 0.0}, "epochs"),
        ({"steps": None, "epochs": math.inf}, "epochs"),
        ({"delta": 0.0}, "delta"),
        ({"adjacency": "remove"}, "adjacency"),
        ({"noise_multiplier": 0.0}, "noise_multiplier"),
        ({"noise_multiplier": None}, "epsilon"),
        ({"noise_multiplier": None, "epsilon": -1.0}, "epsilon"),
        ({"partition": ""}, "partition"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value,
)
def test_public_faults_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        planned(**changes)


def test_the_clip_of_another_sum_is_refused() -> None:
    votes = plan_queries(100, epsilon=None, noise_multiplier=1.0, delta=1e-4, max_queries=1, width=2).release
    assert isinstance(votes, ReleasePlan)
    with pytest.raises(ConfigurationError, match="expected clipped gradients"):
        _ = dataclasses.replace(planned(), release=votes).l2_clip_norm
