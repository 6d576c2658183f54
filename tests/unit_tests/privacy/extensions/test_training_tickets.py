"""Training steps as tickets, and reports that show them: nothing shown may be other than what was charged."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest

from langchain_dpicl.backends.tuning.tasks import PromptTask
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy.accounting.events import GaussianEvent, SubsampledEvent
from langchain_dpicl.privacy.extensions.gradient_sums import SampledBallEvent
from langchain_dpicl.privacy.extensions.normalized_sums import UnitVectorSum
from langchain_dpicl.privacy.extensions.registry import (
    STEP_TEMPLATE,
    shown_release,
    step_release,
    training_tickets,
)
from langchain_dpicl.privacy.ledger.tickets import Ticket
from langchain_dpicl.privacy.mechanisms.bounded import VoteSum
from langchain_dpicl.privacy.mechanisms.release_plan import (
    GaussianMechanism,
    GumbelMechanism,
    PoissonUnits,
    ReleasePlan,
)
from langchain_dpicl.privacy.private_examples import PrivateExamples
from langchain_dpicl.release.declare_share import declare_share
from langchain_dpicl.reports.report import VerifiedReport, verify_report
from langchain_dpicl.soft_prompts.plan import TrainingPlan, plan_training
from tests.sealed_files import assert_found, report_by_hand, sealed, with_digest

Public = dict[str, Any]
SIZE = 400


def release(**changes: Any) -> ReleasePlan:
    parts = {"sampling_rate": 0.05, "l2_clip_norm": 0.1, "noise_multiplier": 0.8, "adjacency": "add_remove"}
    return step_release(**{**parts, **changes})


def planned(**changes: Any) -> TrainingPlan:
    terms: Public = {"epsilon": None, "delta": 1e-5, "steps": 30, "noise_multiplier": 2.0, "partition": "letters"}
    shape: Public = {"expected_batch_size": 20, "l2_clip_norm": 0.1, "width": 640}
    return plan_training(SIZE, **{**terms, **shape, **changes})


def declared(plan: TrainingPlan, **shown: Any) -> Budget:
    """A ledger with the share that this training declares; nobody has to train."""
    ledger = Budget(epsilon=1e3, delta=2e-5, adjacency=plan.release.adjacency, name="house")
    records = [{"text": str(i), "label": "ab"[i % 2]} for i in range(SIZE)]
    private = PrivateExamples(records, public_size=SIZE, label_key="label", labels=("a", "b"), dataset_id="letters")
    declare_share(private, ledger, plan, component="prompt", epsilon=None, public={**plan.to_dict(), **shown})
    return ledger


def forged(ledger: Budget, change: Callable[[Public], object]) -> VerifiedReport:
    """What the verifier says after `change` of the component, in a report whose digest was made to fit."""
    data = copy.deepcopy(ledger.report().to_dict())
    change(data["shares"][0]["components"][0])
    found = verify_report(with_digest(data))
    assert not any("digest" in problem for problem in found.problems)
    return found


# --- tickets ----------------------------------------------------------------------------------------------------------


def test_a_step_is_one_ticket_on_a_sample_of_its_own_and_can_be_handed_back() -> None:
    (ticket,) = training_tickets(release(), 329)
    assert (ticket.template, ticket.max_count, ticket.refundable, ticket.label) == (STEP_TEMPLATE, 329, True, None)
    assert STEP_TEMPLATE == "step"
    assert ticket.event == SubsampledEvent(GaussianEvent(0.8), 0.05)
    (replaced,) = training_tickets(release(adjacency="replace_one"), 329)
    assert replaced.event == SampledBallEvent(0.8, 0.05)
    (everybody,) = training_tickets(release(sampling_rate=1.0), 1)
    assert everybody.event == GaussianEvent(0.8)


@pytest.mark.parametrize("steps", [0, -1, 2.0, True, None])
def test_steps_are_counted(steps: Any) -> None:
    with pytest.raises(ConfigurationError, match="steps"):
        training_tickets(release(), steps)


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_a_release_is_read_back_as_it_was_shown(adjacency: str) -> None:
    made = release(adjacency=adjacency)
    assert shown_release(made.to_dict()) == made


@pytest.mark.parametrize(
    "made",
    [
        ReleasePlan(PoissonUnits(0.1), VoteSum(), GaussianMechanism(1.0), "add_remove"),
        ReleasePlan(PoissonUnits(0.1), VoteSum(), GumbelMechanism(1.0), "add_remove"),
        ReleasePlan(PoissonUnits(0.1), UnitVectorSum(), GaussianMechanism(1.0), "add_remove"),
        ReleasePlan(PoissonUnits(0.1), release().aggregation, GaussianMechanism(1.0), "add_remove", redraw_every=2),
    ],
    ids=lambda made: f"{made.aggregation.name}-{made.mechanism.name}",
)
def test_another_release_is_no_training_step(made: ReleasePlan) -> None:
    shown = {**planned().to_dict(), "release": made.to_dict()}
    assert TrainingPlan.rebuild(shown).to_dict()["release"] != shown["release"]


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("sampler", "sampling_rate", 0.0),
        ("sampler", "name", "shuffled_batches"),
        ("aggregation", "l2_clip_norm", 0.0),
        ("aggregation", "remark", "trust me"),
        ("mechanism", "noise_multiplier", 0.0),
        ("mechanism", "name", "torch.normal"),
        ("sensitivity", "l2", 0.5),
    ],
)
def test_a_part_that_is_unknown_or_does_not_fit_is_refused(part: str, name: str, value: Any) -> None:
    shown = copy.deepcopy(release().to_dict())
    shown[part][name] = value
    with pytest.raises((ConfigurationError, TypeError)):
        shown_release(shown)


# --- reports ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
@pytest.mark.parametrize("batch", [20, SIZE])
def test_what_a_training_declares_verifies(adjacency: str, batch: int) -> None:
    plan = planned(adjacency=adjacency, expected_batch_size=batch)
    verified = verify_report(declared(plan, labels=["a", "b"], learning_rate=0.01).report())
    assert verified.problems == ()
    assert verified.epsilon == pytest.approx(plan.epsilon, rel=1e-6)


def test_calibrated_noise_verifies_and_costs_what_was_asked() -> None:
    verified = verify_report(declared(planned(epsilon=2.0, noise_multiplier=None)).report())
    assert verified.problems == ()
    assert 1.99 < verified.epsilon <= 2.0


ONE_VALUE: Public = {
    "adjacency": "replace_one",
    "aggregation": "unit_vector_sum",
    "dataset_id": "notes",
    "delta": 1e-12,
    "epochs": 99.0,
    "epsilon": 0.01,
    "expected_batch_size": 10,
    "implementation_delta": 0.0,
    "l2_clip_norm": 7.0,
    "mechanism": "gumbel",
    "method": "labels",
    "noise_multiplier": 50.0,
    "noise_scale": 9.0,
    "public_size": 10**6,
    "rows": "slots",
    "sampling": "shuffled",
    "sampling_rate": 0.001,
    "steps": 3,
    "width": 2**25,
}


@pytest.mark.parametrize("name", ONE_VALUE)
def test_no_value_shown_beside_the_release_can_be_another(name: str) -> None:
    assert set(ONE_VALUE) == set(planned().to_dict()) - {"release"}
    ledger = declared(planned())
    for change in (lambda one: one["public"].update({name: ONE_VALUE[name]}), lambda one: one["public"].pop(name)):
        problems = forged(ledger, change).problems
        assert any(name in each or "other tickets" in each or "cannot be read" in each for each in problems), problems


def louder(component: Public) -> None:
    """Twenty times the noise, wherever it is shown."""
    public = component["public"]
    public["noise_multiplier"] *= 20
    public["noise_scale"] *= 20
    public["release"]["mechanism"]["noise_multiplier"] *= 20


def rarer(component: Public) -> None:
    """Half the batch, wherever it is shown."""
    public = component["public"]
    public["expected_batch_size"] //= 2
    public["noise_scale"] *= 2
    for name in ("epochs", "sampling_rate"):
        public[name] /= 2
    public["release"]["sampler"]["sampling_rate"] /= 2


def shorter(component: Public) -> None:
    """A third of the steps, wherever they are shown."""
    public = component["public"]
    public["steps"] //= 3
    public["epochs"] /= 3
    public["implementation_delta"] /= 3
    component["implementation_delta"] /= 3


@pytest.mark.parametrize("change", [louder, rarer, shorter], ids=lambda change: change.__name__)
@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_a_release_forged_along_makes_other_tickets(change: Callable[[Public], None], adjacency: str) -> None:
    assert_found(forged(declared(planned(adjacency=adjacency)), change), "other tickets")


def test_another_rate_inside_the_release_is_found() -> None:
    def change(component: Public) -> None:
        component["public"]["release"]["sampler"]["sampling_rate"] = 0.01

    assert_found(forged(declared(planned()), change), "release.sampler.sampling_rate 0.01")


def test_a_relation_that_is_not_the_ledgers_is_found_where_the_whole_release_is_under_it() -> None:
    def change(component: Public) -> None:
        public = component["public"]
        there = release(adjacency="replace_one", noise_multiplier=2.0)
        public.update(release=there.to_dict(), adjacency="replace_one", noise_scale=2 * public["noise_scale"])

    assert_found(forged(declared(planned()), change), "the ledger's adjacency is 'add_remove'")


def test_a_gap_of_the_noise_that_is_not_set_aside_is_found() -> None:
    found = forged(declared(planned()), lambda one: one.update(implementation_delta=0.0))
    assert_found(found, "implementation_delta: expected")


def test_the_clip_is_its_authors_word() -> None:
    """Noise is measured in clips: another clip, said everywhere, makes the same tickets at the same price."""

    def change(component: Public) -> None:
        public = component["public"]
        public["l2_clip_norm"] *= 3
        public["noise_scale"] *= 3
        public["release"]["aggregation"]["l2_clip_norm"] *= 3

    assert forged(declared(planned()), change).problems == ()


def test_steps_whose_parameters_were_taken_away_are_found() -> None:
    for kept in ({}, {"noise_multiplier": 2.0}):
        found = forged(declared(planned()), lambda one, kept=kept: one.update(public=dict(kept)))
        assert_found(found, "has a ticket 'step' and shows no plan of training")
    found = forged(declared(planned()), lambda one: one.update(public={"method": "training"}))
    assert_found(found, "its plan cannot be read: 'release' is missing")


def test_parameters_of_training_beside_other_tickets_are_found() -> None:
    def change(component: Public) -> None:
        component["tickets"][0]["template"] = "query"

    assert_found(forged(declared(planned()), change), "other tickets")


def test_a_training_without_its_data_set_is_found() -> None:
    assert_found(forged(declared(planned()), lambda one: one.update(partition=None)), "partition: expected")


@pytest.mark.parametrize("value", [None, "x", [], {"name": "poisson_units"}])
def test_values_of_another_form_are_a_problem_and_no_crash(value: Any) -> None:
    for name in ("release", "steps", "width", "expected_batch_size", "l2_clip_norm", "epsilon"):
        found = forged(declared(planned()), lambda one, name=name: one["public"].update({name: value}))
        assert not found.ok


# --- a prompt beside its report -----------------------------------------------------------------------------------------


TASK = PromptTask("causal_lm", "{text}\nLabel:", ("a", "b"), (" a", " b"))
SAID: Public = {"method": "soft_prompt", "num_virtual_tokens": 10, "task": TASK.to_dict()}
OPTIMIZER: Public = {"name": "adam", "learning_rate": 0.01, "schedule": "constant", "weight_grid": 2.0**-24}
FIELDS: Public = {"text_key": "text", "pair_key": None, "target_key": "label", "init_text": None}
TRAINING: Public = {
    **SAID,
    **FIELDS,
    "model": "tiny",
    "tokenizer": "words",
    "weights": "sha256",
    "optimizer": OPTIMIZER,
}


def prompt_of(ledger: Budget, component: str = "prompt") -> Public:
    """A saved prompt that says it was trained under this ledger."""
    file = {
        **SAID,
        "format": "langchain-dpicl/soft-prompt",
        "version": 1,
        "base": {"name": "tiny", "tokenizer": "words"},
        "arrays": "sha256",
        "report": report_by_hand(ledger.report().to_dict(), component, step=30, steps=30),
    }
    return sealed(file)


def test_a_prompt_is_paid_for_by_training_steps() -> None:
    ledger = declared(planned(), training=TRAINING)
    verified = verify_report(prompt_of(ledger))
    assert verified.problems == ()
    assert verified.epsilon == pytest.approx(planned().epsilon, rel=1e-6)
    ledger.declare(
        "answers", tickets=[Ticket(template="query", event=GaussianEvent(50.0))], partition="letters", delta=1e-6
    )
    assert verify_report(prompt_of(ledger, "answers")["report"]).problems == ()
    found = verify_report(prompt_of(ledger, "answers"))
    assert_found(found, "'answers' shows no training steps")
    assert found.epsilon == math.inf


def test_a_prompt_that_nothing_pays_for_is_not_private() -> None:
    free = {"baseline": "instruction only", "private": False, "epsilon": 0, "delta": 0}
    assert verify_report(free).ok
    assert_found(verify_report({"arrays": {}, "report": free}), "which no component of the report pays for")
