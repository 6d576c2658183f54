"""A soft prompt beside its report: what it says of itself is what its component shows, to the field."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest

from langchain_dpicl.backends.tuning.tasks import PromptTask
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.options import Noise
from langchain_dpicl.privacy.accounting.events import PureEvent
from langchain_dpicl.privacy.ledger.tickets import Ticket
from langchain_dpicl.released.soft_prompt import FORMAT, VERSION, SoftPrompt
from langchain_dpicl.reports import verify
from langchain_dpicl.reports.report import VerifiedReport, verify_report
from langchain_dpicl.soft_prompts.plan import Optimizer
from tests.gradient_doubles import LogisticEngine, prepared, training
from tests.labelling_doubles import house
from tests.sealed_files import assert_found, at, edited, report_by_hand, sealed, with_digest

State = dict[str, Any]
COMPONENT = "report.budget.shares.0.components.0"
TRAINING = f"{COMPONENT}.public.training"
TASK = [one.name for one in fields(PromptTask)]


@pytest.fixture(scope="module")
def prompt() -> SoftPrompt:
    """A prompt that was trained for three steps."""
    return prepared(
        budget=house(), epsilon=None, noise=Noise(multiplier=2.0, delta=1e-5), training=training(steps=3)
    ).run(progress=False)


@pytest.fixture
def saved(prompt: SoftPrompt) -> State:
    """What lies beside its numbers in a folder."""
    return json.loads(prompt.to_json())


def edit(path: str, value: Any) -> Callable[[State], None]:
    def change(state: State) -> None:
        holder, key = at(state, path)
        assert holder[key] != value or type(holder[key]) is not type(value)
        holder[key] = value

    return change


def without(path: str) -> Callable[[State], None]:
    def change(state: State) -> None:
        holder, key = at(state, path)
        del holder[key]

    return change


def judged(state: State, *changes: Callable[[State], None]) -> VerifiedReport:
    """What the verifier says after changes, behind a digest that was made to fit."""
    found = verify_report(json.dumps(edited(state, lambda forged: [change(forged) for change in changes])))
    assert not any("digest" in problem for problem in found.problems)
    return found


def test_a_trained_prompt_verifies_in_every_form(prompt: SoftPrompt, saved: State) -> None:
    for form in (prompt, prompt.to_json(), saved, prompt.report, prompt.report["budget"]):
        found = verify_report(form)
        assert found.problems == ()
        assert 0 < found.epsilon <= prompt.epsilon


def test_a_prompt_that_was_trained_for_a_part_of_its_steps_verifies() -> None:
    made = prepared(training=training(steps=3))
    for step in range(4):
        assert (made.result.report["step"], made.result.report["steps"]) == (step, 3)
        assert verify_report(made.result).problems == ()
        if step < 3:
            next(made.stream(progress=False))


SAID: dict[str, Any] = {
    "method": "prefix",
    "num_virtual_tokens": 3,
    "task.kind": "masked_lm",
    "task.template": "Letter: {text}",
    "task.labels.0": "fine",
    "task.words.1": " bad",
    "task.max_input_tokens": 64,
    "task.max_target_tokens": 32,
    "base.name": "another",
    "base.tokenizer": "another",
}


@pytest.mark.parametrize("path", SAID)
def test_what_a_prompt_says_of_itself_is_what_its_component_shows(path: str, saved: State) -> None:
    found = judged(saved, edit(path, SAID[path]))
    assert_found(found, f"{path.removesuffix('.0').removesuffix('.1')}: expected")
    assert found.epsilon == math.inf


@pytest.mark.parametrize("path", SAID)
def test_what_a_component_shows_of_its_training_is_what_the_prompt_says(path: str, saved: State) -> None:
    there = {"base.name": "model", "base.tokenizer": "tokenizer"}.get(path, path)
    found = judged(saved, edit(f"{TRAINING}.{there}", SAID[path]))
    assert_found(found, f"{path.removesuffix('.0').removesuffix('.1')}: expected")


@pytest.mark.parametrize(
    "path",
    [
        *("method", "num_virtual_tokens", "task", "base", "base.name", "base.tokenizer"),
        *(f"task.{name}" for name in TASK),
    ],
)
def test_a_prompt_leaves_nothing_of_itself_out(path: str, saved: State) -> None:
    assert_found(judged(saved, without(path)), "found nothing")


@pytest.mark.parametrize(
    "path",
    [
        *("init_text", "method", "model", "num_virtual_tokens", "optimizer", "pair_key", "target_key", "task"),
        *("text_key", "tokenizer", "weights"),
        *(f"task.{name}" for name in TASK),
        *(f"optimizer.{name}" for name in ("learning_rate", "name", "schedule", "weight_grid")),
    ],
)
def test_a_component_leaves_nothing_of_its_training_out(path: str, saved: State) -> None:
    assert_found(judged(saved, without(f"{TRAINING}.{path}")), path.rsplit(".", maxsplit=1)[-1])


def test_the_weights_that_a_prompt_was_trained_on_are_those_that_its_component_shows() -> None:
    """Where they are known: prompts of packed weights name none in either place."""
    engine = type("Known", (LogisticEngine,), {"weights_fingerprint": lambda self: "bfloat16:12"})()
    made = prepared(engine=engine, training=training(steps=1))
    made.run()
    state = json.loads(made.result.to_json())
    there = f"{TRAINING}.base_weights"
    assert (state["base"]["weights"], verify_report(made.result).ok) == ("bfloat16:12", True)
    assert_found(judged(state, edit("base.weights", "bfloat16:34")), "base.weights: expected")
    assert_found(judged(state, edit(there, "bfloat16:34")), "base.weights: expected")
    assert_found(judged(state, without("base.weights")), "base.weights: expected")
    assert_found(judged(state, without(there)), "base.weights: expected")
    assert judged(state, without("base.weights"), without(there)).ok


@pytest.mark.parametrize("name", TASK)
def test_a_part_of_the_task_that_is_left_out_on_both_sides_is_found(name: str, saved: State) -> None:
    found = judged(saved, without(f"task.{name}"), without(f"{TRAINING}.task.{name}"))
    assert_found(found, f"shows no [{name!r}] of its task")


def test_a_component_without_the_whole_of_its_training_is_found(saved: State) -> None:
    assert_found(judged(saved, without(TRAINING)), "'training' is missing")
    for value in (None, 7, "training", [], {"task": None}):
        assert not judged(saved, edit(TRAINING, value)).ok


@pytest.mark.parametrize("value", [None, 7, True, "x", [], {}, {"kind": []}], ids=str)
@pytest.mark.parametrize("path", ["method", "num_virtual_tokens", "task", "base", "format", "report.steps"])
def test_values_of_another_form_are_a_problem_and_never_an_error(path: str, value: Any, saved: State) -> None:
    found = judged(saved, edit(path, value))
    assert (found.ok, found.epsilon) == (False, math.inf)


def test_a_number_is_not_a_truth_value(saved: State) -> None:
    for changes in ([edit("version", True)], [edit("report.step", True)], [edit("report.steps", 3.0)]):
        assert not judged(saved, *changes).ok


@pytest.mark.parametrize(("name", "value"), [("format", f"{FORMAT}s"), ("version", VERSION + 1)])
def test_a_file_is_of_the_form_and_version_of_a_prompt(name: str, value: Any, saved: State) -> None:
    assert_found(judged(saved, edit(name, value)), f"{name}: expected")
    assert_found(judged(saved, without(name)), f"{name}: expected")


def test_a_prompt_object_is_held_against_its_component_too(prompt: SoftPrompt) -> None:
    task = replace(prompt.task, template="Letter: {text}")
    assert_found(verify_report(replace(prompt, task=task)), "task.template: expected")
    assert_found(verify_report(replace(prompt, base={**prompt.base, "name": "another"})), "base.name: expected")
    free = {"baseline": "instruction only", "private": False, "epsilon": 0, "delta": 0}
    assert_found(verify_report(replace(prompt, report=free)), "which no component of the report pays for")


# --- the run that the report is of ------------------------------------------------------------------------------------


def test_the_steps_of_a_report_are_those_of_its_component(saved: State) -> None:
    for steps in (2, 4, "3", None):
        assert_found(judged(saved, edit("report.steps", steps)), "report.steps: expected 3")
        assert not verify_report({**saved["report"], "steps": steps}).ok


def test_no_more_steps_were_made_than_were_charged(saved: State) -> None:
    for step in (-1, 4, 10**9, 1.5, "3", None):
        assert_found(judged(saved, edit("report.step", step)), "report.step: expected")
        assert not verify_report({**saved["report"], "step": step}).ok


@pytest.mark.parametrize("name", ["ledger_id", "step", "steps"])
def test_a_prompt_says_which_ledger_paid_for_which_steps(name: str, saved: State) -> None:
    assert_found(judged(saved, without(f"report.{name}")), f"found no [{name!r}]")


# --- every release, every report --------------------------------------------------------------------------------------


def test_a_release_names_the_ledger_whose_report_it_holds(saved: State) -> None:
    assert_found(judged(saved, edit("report.ledger_id", "another")), "ledger_id: expected")
    assert_found(judged(saved, edit("report.budget.ledger.ledger_id", "another")), "ledger_id: expected")
    assert_found(verify_report({**saved["report"], "ledger_id": None}), "ledger_id: expected")


@pytest.mark.parametrize("name", ["ledger_id", "name", "durable", "storage"])
def test_a_report_says_which_ledger_it_is_of(name: str, saved: State) -> None:
    assert_found(judged(saved, without(f"report.budget.ledger.{name}")), "ledger: expected")
    for value in (None, [], "house"):
        assert_found(judged(saved, edit("report.budget.ledger", value)), "ledger: expected")
    assert_found(judged(saved, without("report.budget.ledger")), "'ledger' is missing")


def one_share(kind: str) -> Budget:
    """A ledger with one share, of tickets or a pool."""
    ledger = Budget(epsilon=2.0, delta=1e-6)
    if kind == "tickets":
        ledger.declare("one", tickets=[Ticket("t", PureEvent(0.5))], epsilon=1.0)
    else:
        {"gdp": ledger.gdp_pool, "zcdp": ledger.zcdp_pool}[kind]("one", epsilon=1.0)
    return ledger


def share_forged(kind: str, *changes: Callable[[State], None]) -> VerifiedReport:
    """What the verifier says of the share after changes, behind a fitting digest."""
    data = one_share(kind).report().to_dict()
    assert verify_report(data).problems == ()
    for change in changes:
        change(data["shares"][0])
    return verify_report(with_digest(data))


@pytest.mark.parametrize("form", [{"examples": []}, {"entries": []}, {}], ids=["demonstrations", "a pool", "a report"])
def test_any_release_that_names_its_ledger_names_the_one_that_paid(form: State) -> None:
    ledger = one_share("tickets")
    paid = report_by_hand(ledger.report().to_dict(), "one")

    def verified(report: State) -> VerifiedReport:
        return verify_report(sealed({**form, "plan": {}, "report": report}) if form else report)

    of_no_texts = ("examples: 0 were released, which no component of the report pays for",)
    assert verified(paid).problems == (of_no_texts if "examples" in form else ())
    assert_found(verified({**paid, "ledger_id": "another"}), "ledger_id: expected")
    assert_found(verified({name: value for name, value in paid.items() if name != "ledger_id"}), "ledger_id: expected")


@pytest.mark.parametrize(
    ("name", "value"),
    [("format", 1), ("format", None), ("method", "labels"), ("unit", "user"), ("plan", {"epsilon": 9}), ("plan", None)],
)
def test_a_report_of_another_format_or_plan_is_refused(name: str, value: object) -> None:
    paid = report_by_hand(one_share("tickets").report().to_dict(), "one")
    assert_found(verify_report({**paid, name: value}), f"{name}: expected")


@pytest.mark.parametrize("kind", ["tickets", "gdp", "zcdp"])
def test_a_component_is_of_a_kind_that_is_known(kind: str) -> None:
    for other in ("magic", None, []):
        assert_found(share_forged(kind, edit("components.0.kind", other)), "kind: expected one of")


@pytest.mark.parametrize("kind", ["gdp", "zcdp"])
def test_tickets_are_not_said_to_be_a_pool(kind: str) -> None:
    found = share_forged("tickets", edit("components.0.kind", kind))
    assert_found(found, f"kind: expected one of ('tickets',), with the limit None, found {kind!r}")


def test_a_pool_is_never_in_a_joint_plan() -> None:
    for kind in ("gdp", "zcdp"):
        assert_found(share_forged(kind, edit("joint", True)), "is a pool, which no joint plan takes")


def test_a_joint_plan_of_one_component_is_one_share_too() -> None:
    """So whether a share of one component is said to be joint is its sender's word; the price is the same."""
    ledger = Budget(epsilon=2.0, delta=1e-6)
    with ledger.plan():
        ledger.declare("one", tickets=[Ticket("t", PureEvent(0.5))], epsilon=1.0)
    found = verify_report(ledger.report())
    assert found.problems == ()
    assert ledger.report().shares[0].terms.joint


def test_a_report_is_of_this_package() -> None:
    data = one_share("tickets").report().to_dict()
    assert_found(verify_report(with_digest({**data, "package": "another"})), "package: expected 'langchain-dpicl'")


def test_the_names_that_are_asked_for_are_those_that_are_written(saved: State) -> None:
    training, _ = at(saved, f"{TRAINING}.x")
    wanted = verify._TRAINED
    assert {"": set(training), "optimizer": set(training["optimizer"]), "task": set(TASK)} == wanted
    assert set(Optimizer("sgd", 0.1, "linear", 3).to_dict()) == wanted["optimizer"]
    assert (verify.PROMPT_FORMAT, verify.PROMPT_VERSION) == (FORMAT, VERSION)
