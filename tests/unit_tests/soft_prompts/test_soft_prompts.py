"""PromptDPSGD through its doors: plans, budgets, fields, faults, models, the baseline without privacy, and torch."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from langchain_dpicl import Budget, PrivateExamples, verify_report
from langchain_dpicl.backends.tuning.tasks import PromptTask
from langchain_dpicl.baselines import soft_prompt_without_privacy
from langchain_dpicl.budget.handler import PrivacyBudgetCallbackHandler, get_privacy_budget_callback
from langchain_dpicl.exceptions import (
    ConfigurationError,
    ModelCallError,
    NoPrivacyBudgetError,
    PrivacyBudgetExceededError,
    TrainingInterruptedError,
)
from langchain_dpicl.soft_prompts.options import ExampleFields
from langchain_dpicl.soft_prompts.trainer import PromptDPSGD, engine_of, kind_of, task_of
from langchain_dpicl.soft_prompts.training_run import TrainingRun
from tests.contracts.front_room import (
    CHARGED,
    REFUSED,
    AsyncObserver,
    Door,
    FrontRoomContract,
    Observer,
    Room,
)
from tests.gradient_doubles import LABELS, PUBLIC, RUN, TASK, LogisticEngine, examples, prepared, short_of_steps
from tests.labelling_doubles import counts, fails, house, lines
from tests.unit_tests.audit.test_labelling_doors import inside

pytestmark = pytest.mark.usefixtures("remembered_prices")


# -- the contract of everything that charges ---------------------------------------------------------------------------


async def _arun(made: TrainingRun, _: list[str]) -> list[Any]:
    return [await made.arun()]


async def _astream(made: TrainingRun, _: list[str]) -> list[Any]:
    return [step async for step in made.astream()]


class Contract(FrontRoomContract):
    def make_private(self) -> PrivateExamples:
        return examples()

    def make_engine(self) -> Any:
        return LogisticEngine()


class TestRun(Contract):
    doors: ClassVar[Mapping[str, Door]] = {
        "run": Door(lambda made, _: [made.run()]),
        "arun": Door(_arun),
        "stream": Door(lambda made, _: list(made.stream())),
        "astream": Door(_astream),
    }

    def make(self, room: Room, **options: Any) -> TrainingRun:
        given = {"budget": room.budget, "epsilon": 1.5e4, **options}
        return prepared(room.private, engine=room.engine, **given)

    def make_refused(self, room: Room) -> TrainingRun:
        """Its share was set aside by one process while another sealed the room it needs."""
        late = self.make(room, budget=Budget.open(room.store), epsilon=7e4, component="late")
        next(self.make(room, component="early", epsilon=4e4).stream())
        return late

    def faulty_constructions(self, room: Room) -> Sequence[Callable[[], Any]]:
        return [lambda fault=fault: self.make(room, **fault) for fault in FAULTS]  # type: ignore[misc]


@dataclass(frozen=True)
class Order:
    """What the doors that plan and run at once take."""

    trainer: PromptDPSGD
    private: PrivateExamples
    options: Mapping[str, Any]


async def _atrain(order: Order, _: list[str]) -> list[Any]:
    return [await order.trainer.atrain(order.private, **order.options)]


class TestTrain(Contract):
    doors: ClassVar[Mapping[str, Door]] = {
        "train": Door(lambda order, _: [order.trainer.train(order.private, **order.options)]),
        "atrain": Door(_atrain),
    }

    def make(self, room: Room, **options: Any) -> Order:
        given = {**RUN, "budget": room.budget, "epsilon": 1.5e4, **options}
        return Order(PromptDPSGD(room.engine), room.private, given)

    def make_refused(self, room: Room) -> Order:
        return self.make(room, epsilon=2e5)

    def faulty_constructions(self, room: Room) -> Sequence[Callable[[], Any]]:
        def trained(fault: Mapping[str, Any]) -> Any:
            order = self.make(room, **fault)
            return order.trainer.train(order.private, **order.options)

        return [lambda fault=fault: trained(fault) for fault in FAULTS]  # type: ignore[misc]


FAULTS: list[dict[str, Any]] = [
    {"steps": None},
    {"epochs": 2.0},
    {"steps": 0},
    {"steps": 2.5},
    {"steps": None, "epochs": 0.0},
    {"expected_batch_size": 0},
    {"expected_batch_size": 41},
    {"l2_clip_norm": 0.0},
    {"l2_clip_norm": math.inf},
    {"noise_multiplier": -1.0},
    {"epsilon": None},
    {"epsilon": -1.0},
    {"delta": 1.5},
    {"learning_rate": 0.0},
    {"learning_rate": math.nan},
    {"optimizer": "lamb"},
    {"schedule": "cosine"},
    {"text_key": "words"},
    {"target_key": "words"},
    {"target_key": "text"},
    {"pair_key": "label"},  # the template has no {pair}
    {"validation": []},
    {"validation": "one text"},
    {"validation": PUBLIC[0]},
    {"validation": [{"text": "no label"}]},
    {"validation": [{"text": "x", "label": 5}]},
    {"validation": [5]},
    {"validation": PUBLIC, "validate_every": 0},
    {"validate_every": 3},
    {"component": ""},
    {"checkpoint": 5},
    {"checkpoint": "missing-folder/state.json"},
]

# -- plans and budgets -------------------------------------------------------------------------------------------------


def test_a_plan_spends_and_binds_nothing_and_is_what_a_run_is_charged() -> None:
    budget, private, trainer = house(), examples(), PromptDPSGD(LogisticEngine())
    terms: dict[str, Any] = {**RUN, "delta": 1e-5}
    plan = trainer.plan(private, **terms)
    assert lines(budget) == []
    assert private._ledger_id is None
    made = trainer.prepare(private, budget=budget, **terms)
    assert made.plan == plan
    assert plan.partition == private.dataset_id
    assert (plan.steps, plan.width, plan.sampling_rate, plan.l2_clip_norm) == (4, 8, 0.25, 0.1)
    by_size = trainer.plan(40, **terms)
    assert by_size.to_dict() == plan.to_dict()


def test_noise_is_calibrated_to_the_share_and_epochs_make_steps() -> None:
    budget = house(epsilon=4.0, delta=1e-4)
    made = prepared(budget=budget, epsilon=1.0, noise_multiplier=None, steps=None, epochs=1.5)
    assert made.plan.steps == 6
    assert 0.9 < made.plan.epsilon <= 1.0
    assert made.plan.delta == pytest.approx(2.5e-5)
    prompt = made.run()
    assert prompt.epsilon == 1.0
    assert verify_report(prompt).ok
    assert budget.remaining_epsilon == 3.0


def test_a_budget_is_found_where_every_component_finds_it() -> None:
    handler = PrivacyBudgetCallbackHandler(epsilon=1e6, delta=1e-4)
    trainer = PromptDPSGD(LogisticEngine())
    with pytest.raises(NoPrivacyBudgetError):
        trainer.prepare(examples(), **RUN)
    assert trainer.prepare(examples(), config={"callbacks": [handler]}, **RUN)._budget is handler.budget
    with get_privacy_budget_callback(epsilon=1e6, delta=1e-4) as active:
        assert trainer.prepare(examples(), **RUN)._budget is active.budget


def test_observers_hear_of_the_charge_once_and_of_what_an_outage_left() -> None:
    engine, observer, later = LogisticEngine(), Observer(), AsyncObserver()
    engine.at_gradients = fails(None, ModelCallError("out."))  # type: ignore[arg-type]
    made = prepared(engine=engine, steps=6)

    def both() -> None:
        with pytest.raises(TrainingInterruptedError):
            made.run()
        short_of_steps(made)

    inside(both, observer, later)
    assert [data["tickets"] for data in observer.named(CHARGED)] == [2, 4]
    assert {data["component"] for data in observer.named(CHARGED)} == {"PromptDPSGD"}
    assert [name for name, _ in later.heard] == [name for name, _ in observer.heard]
    assert json.loads(json.dumps(observer.heard)) == [list(one) for one in observer.heard]


def test_a_share_that_costs_more_than_asked_is_refused_and_told() -> None:
    observer = Observer()

    def ask() -> None:
        with pytest.raises(PrivacyBudgetExceededError):
            prepared(budget=house(epsilon=2.0), epsilon=1.0, noise_multiplier=0.5)

    inside(ask, observer)
    assert [data["component"] for data in observer.named(REFUSED)] == ["PromptDPSGD"]


def test_what_is_no_private_examples_is_refused_with_the_name_of_the_baseline() -> None:
    with pytest.raises(ConfigurationError, match="soft_prompt_without_privacy"):
        PromptDPSGD(LogisticEngine()).prepare(PUBLIC, budget=house(), **RUN)  # type: ignore[arg-type]


def test_a_delta_that_may_give_away_whole_records_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="public_size"):
        prepared(examples(public_size=20_000), budget=house(delta=1e-4), delta=1e-5)


# -- fields ------------------------------------------------------------------------------------------------------------


def test_fields_fill_text_pair_and_target() -> None:
    task = PromptTask("causal_lm", "{text} / {pair} =", LABELS, (" great", " terrible"))
    engine, seen = LogisticEngine(task=task), []
    real = engine._gradient
    engine._gradient = lambda weights, one: seen.append((one.text, one.pair, one.target)) or real(weights, one)  # type: ignore[method-assign]
    records = [{"first": "one good", "second": "two", "label": "good"}]
    private = PrivateExamples(
        records, text_key="first", fields=("second",), label_key="label", labels=LABELS, public_size=40
    )
    made = prepared(private, engine=engine, pair_key="second", expected_batch_size=40, steps=1)
    made.run()
    assert seen == [("one good", "two", "good")]


def test_a_pair_that_nothing_fills_is_refused() -> None:
    task = PromptTask("causal_lm", "{text} / {pair} =", LABELS, (" great", " terrible"))
    with pytest.raises(ConfigurationError, match="pair_key: expected the field that fills"):
        prepared(engine=LogisticEngine(task=task))


def test_a_target_may_be_any_declared_field_and_undeclared_labels_count_zero() -> None:
    records = [{"text": "good", "mood": "good"}, {"text": "bad", "mood": "none of them"}]
    private = PrivateExamples(records, fields=("mood",), public_size=40)
    with pytest.raises(ConfigurationError, match="target_key: expected the field that holds the answer"):
        prepared(private)
    prepared(private, target_key="mood", expected_batch_size=40, steps=1).run()


def test_a_task_that_writes_texts_writes_labels_only_if_asked_to() -> None:
    """Otherwise one would learn only when it is paid for that the prompt chooses no label."""
    engine = LogisticEngine(task=PromptTask("causal_lm", "{text} ="))
    with pytest.raises(
        ConfigurationError, match=r"labels: expected a task with labels.*Give labels=\[\.\.\.\] or verbal"
    ):
        prepared(engine=engine)
    prepared(engine=engine, target_key="label")


def test_labels_that_the_task_has_not_are_refused() -> None:
    private = PrivateExamples(
        [{"text": "x", "label": "fair"}], label_key="label", labels=(*LABELS, "fair"), public_size=40
    )
    with pytest.raises(ConfigurationError, match=r"labels: expected labels of the task: .*'fair'"):
        prepared(private)


def test_private_examples_are_no_validation() -> None:
    with pytest.raises(ConfigurationError, match="validation: expected records that no ledger protects"):
        prepared(validation=examples())


def test_faults_of_validation_records_name_place_and_field_but_no_content() -> None:
    with pytest.raises(ConfigurationError, match=r"^validation\[1\]: expected a mapping with text under") as caught:
        prepared(validation=[PUBLIC[0], {"text": "a secret", "label": None}])
    assert "secret" not in str(caught.value)


def test_a_validation_record_with_an_unknown_label_is_refused_before_anything_is_declared() -> None:
    budget = house()
    with pytest.raises(ConfigurationError, match=r"^validation\[1\]: expected one of .* found another label") as caught:
        prepared(budget=budget, validation=[PUBLIC[0], {"text": "x", "label": "a secret"}])
    assert "secret" not in str(caught.value)
    assert lines(budget) == []


# -- models ------------------------------------------------------------------------------------------------------------


def test_the_kind_of_task_is_read_off_the_class_or_the_folder(tmp_path: Path) -> None:
    for name, kind in (
        ("GPT2LMHeadModel", "causal_lm"),
        ("LlamaForCausalLM", "causal_lm"),
        ("RobertaForMaskedLM", "masked_lm"),
        ("BertForSequenceClassification", "sequence_classification"),
    ):
        assert kind_of(type(name, (), {})()) == kind
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [name]}))
        assert kind_of(str(tmp_path)) == kind_of(tmp_path) == kind


@pytest.mark.parametrize("text", ["", "[]", '{"architectures": null}', '{"architectures": ["T5Model"]}', None])
def test_a_folder_that_does_not_say_what_it_is_is_refused(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigurationError, match=r"^model: expected"):
        kind_of(tmp_path)
    with pytest.raises(ConfigurationError, match=r"^model: expected"):
        PromptDPSGD(object())


def test_single_options_make_the_task() -> None:
    assert task_of("causal_lm", labels=("a", "b"), max_input_tokens=9) == PromptTask(
        "causal_lm", "{text}\nLabel:", ("a", "b"), (" a", " b"), 9
    )
    assert task_of("masked_lm", verbalizers={"a": " good", "b": " bad"}, template="{text} It was{mask}.") == PromptTask(
        "masked_lm", "{text} It was{mask}.", ("a", "b"), (" good", " bad")
    )
    assert task_of("sequence_classification", labels=("a", "b")) == PromptTask(
        "sequence_classification", "", ("a", "b")
    )
    assert task_of("causal_lm", template="{text}\n").writes_text
    reordered = task_of("causal_lm", labels=("b", "a"), verbalizers={"a": " x", "b": " y"})
    assert reordered.words == (" y", " x")
    for kind, options in (
        ("causal_lm", {"labels": ("a", "b"), "verbalizers": {"a": " x"}}),
        ("sequence_classification", {"verbalizers": {"a": " x", "b": " y"}}),
        ("masked_lm", {}),
        ("causal_lm", {"labels": "ab"}),  # would be one label per letter
        ("causal_lm", {"labels": 2}),
        ("causal_lm", {"labels": ("a", "b"), "verbalizers": [" x", " y"]}),
    ):
        with pytest.raises(ConfigurationError):
            task_of(kind, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [{"task": TASK}, {"labels": LABELS}, {"tokenizer": "words"}, {"num_virtual_tokens": 3}, {"method": "prefix"}],
)
def test_a_ready_engine_takes_no_other_options(options: dict[str, Any]) -> None:
    assert PromptDPSGD(LogisticEngine(), init_text="good").init_text == "good"
    with pytest.raises(ConfigurationError, match="together with an engine"):
        PromptDPSGD(LogisticEngine(), **options)


def test_a_task_takes_no_single_options_beside_it() -> None:
    model = type("GPT2LMHeadModel", (), {})()
    with pytest.raises(
        ConfigurationError, match="labels, max_input_tokens: expected their defaults together with task="
    ):
        engine_of(model, None, task=TASK, labels=LABELS, max_input_tokens=7)


def test_without_torch_the_error_says_which_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "langchain_dpicl.backends.tuning.engine", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigurationError, match=r"found no torch; install langchain-dpicl\[hf\]"):
        PromptDPSGD(type("GPT2LMHeadModel", (), {})(), None, labels=LABELS)


def test_the_prompt_starts_from_text_where_one_is_given() -> None:
    made = PromptDPSGD(LogisticEngine(), init_text="12345678").prepare(examples(), budget=house(), **RUN)
    assert made.weights.tolist() == [1.0] * 8
    assert prepared().weights.tolist() == [0.0] * 8


def test_a_text_to_start_from_that_is_none_is_refused_at_once() -> None:
    with pytest.raises(ConfigurationError, match="init_text: expected public text, or None for a random start"):
        PromptDPSGD(LogisticEngine(), init_text=3)  # type: ignore[arg-type]


def test_reprs_show_public_names_and_nothing_else() -> None:
    trainer = PromptDPSGD(LogisticEngine())
    assert repr(trainer) == "PromptDPSGD('logistic', method='soft_prompt', num_virtual_tokens=2)"
    made = trainer.prepare(examples(), budget=house(), **RUN)
    assert repr(made) == "TrainingRun(component='soft-prompt', step=0, steps_left=4)"


# -- the baseline ------------------------------------------------------------------------------------------------------

RECORDS = [{"text": f"{label} {i}", "label": label} for i in range(10) for label in LABELS]


def test_the_baseline_learns_without_privacy_and_its_report_says_so() -> None:
    engine, told = LogisticEngine(), []
    prompt = soft_prompt_without_privacy(
        PromptDPSGD(engine), RECORDS, batch_size=6, epochs=5, learning_rate=0.3, told=lambda *step: told.append(step)
    )
    assert prompt.epsilon == math.inf
    assert prompt.report["private"] is False
    verified = verify_report(prompt)
    assert not verified.ok
    assert verified.epsilon == math.inf
    assert "epsilon=inf" in repr(prompt)
    weights = prompt.arrays["prompt_embeddings"].ravel().astype(float)
    assert engine.losses(weights, [*_public(engine)]).mean() < 0.1
    assert [number for number, _ in told] == list(range(1, 21))
    per_step = [len(call) for call in engine.calls]
    assert per_step == [6, 6, 6, 2] * 5
    first = [text for call in engine.calls[:4] for (text,) in call]  # type: ignore[misc]
    assert sorted(first) == sorted(record["text"] for record in RECORDS)


def _public(engine: LogisticEngine) -> Any:
    return prepared(engine=engine, validation=PUBLIC)._validation.examples  # type: ignore[union-attr]


def test_a_step_of_the_baseline_follows_the_plain_mean() -> None:
    engine = LogisticEngine()
    prompt = soft_prompt_without_privacy(
        PromptDPSGD(engine), RECORDS, batch_size=50, steps=1, learning_rate=1.0, optimizer="sgd"
    )
    rows: list[Any] = []
    groups = [(one,) for one in ExampleFields("text", "label").examples_in("records", RECORDS)]
    engine.gradients(np.zeros(8), groups, add=rows.extend)
    assert prompt.arrays["prompt_embeddings"].ravel() == pytest.approx(-np.mean(rows, axis=0), abs=1e-6)


@pytest.mark.parametrize(
    "fault",
    [
        {"records": examples()},
        {"records": [{"text": "x"}]},
        {"records": [*RECORDS, {"text": "x", "label": "unknown"}]},
        {"records": []},
        {"records": "text"},
        {"batch_size": 0},
        {"epochs": None},
        {"steps": 3},
        {"epochs": 0},
        {"optimizer": "lamb"},
    ],
    ids=lambda fault: next(iter(fault)),
)
def test_the_baseline_refuses_private_examples_and_public_faults(fault: dict[str, Any]) -> None:
    given = {"records": RECORDS, "epochs": 1.0, **fault}
    with pytest.raises(ConfigurationError):
        soft_prompt_without_privacy(PromptDPSGD(LogisticEngine()), given.pop("records"), **given)


def test_private_examples_that_the_baseline_refused_can_still_be_protected() -> None:
    private = examples()
    with pytest.raises(ConfigurationError, match="and a budget"):
        soft_prompt_without_privacy(PromptDPSGD(LogisticEngine()), private, steps=1)  # type: ignore[arg-type]
    assert prepared(private).run()


# -- a model of torch, end to end --------------------------------------------------------------------------------------

COLOURS = {"warm": " red", "cold": " blue"}


THINGS = ("the apple is", "the sea is", "the rose is", "a lake is")
SAID = [{"text": f"{THINGS[i % 4]} {i}", "label": ("warm", "cold")[i % 2]} for i in range(16)]


def coloured(count: int = 16) -> PrivateExamples:
    return PrivateExamples(SAID[:count], label_key="label", labels=tuple(COLOURS), public_size=16)


def local(method: str, **options: Any) -> PromptDPSGD:
    from tests import tiny_tuning

    given: dict[str, Any] = {"num_virtual_tokens": 3, "verbalizers": COLOURS, "max_input_tokens": 16, **options}
    given.setdefault("init_text", "the apple is red")
    return PromptDPSGD(tiny_tuning.gpt2(), tiny_tuning.causal_tokenizer(), method=method, **given)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("method", ["soft_prompt", "prefix"])
def test_a_prompt_of_a_frozen_model_is_trained_saved_and_read(method: str, tmp_path: Path) -> None:
    """Noise of .02 clips on the sum of 16: what is learnt is seen. The same texts, made public, tell it."""
    trainer, budget = local(method), house()
    before = trainer.engine.weights_digest()
    made = trainer.prepare(
        coloured(),
        budget=budget,
        epsilon=9e5,
        noise_multiplier=0.02,
        expected_batch_size=16,
        steps=8,
        learning_rate=0.02,
        validation=SAID[:8],
        validate_every=7,
    )
    before_it = np.mean(trainer.engine.losses(made.weights, made._validation.examples))
    losses = [told.validation_loss or 0.0 for told in made.stream()]
    prompt = made.soft_prompt
    assert losses[-1] < 0.9 * before_it
    assert trainer.engine.weights_digest() == before
    assert counts(budget) == {"reserve step": 8, "commit step": 8}
    assert verify_report(prompt).ok
    prompt.save(tmp_path / "prompt")
    assert type(prompt).load(tmp_path / "prompt") == prompt


@pytest.mark.usefixtures("one_thread")
def test_a_seed_of_torch_has_no_part_in_the_noise() -> None:
    """An empty data set: what moves is noise alone. Two vectors agree with probability below 1e-30."""
    import torch

    trainer = local("soft_prompt")
    found = set()
    for place in range(2):
        torch.manual_seed(0)
        options: dict[str, Any] = {"epsilon": 9e5, "noise_multiplier": 1.0, "expected_batch_size": 8, "steps": 1}
        made = trainer.prepare(coloured(0), budget=house(), component=f"run {place}", **options)
        start = made.weights
        made.run()
        found.add((made.weights - start).tobytes())
    assert len(found) == 2


@pytest.mark.usefixtures("one_thread")
def test_a_masked_model_and_a_head_are_trained_on_pairs_and_a_network_that_is_folded_in() -> None:
    from tests import tiny_tuning

    records = [{"text": "the sea is blue", "second": "a lake is deep", "label": ("yes", "no")[i % 2]} for i in range(8)]
    declared: dict[str, Any] = {"fields": ("second",), "label_key": "label", "labels": ("yes", "no")}
    options: dict[str, Any] = {"epsilon": 9e5, "noise_multiplier": 1.0, "expected_batch_size": 4, "steps": 2}
    masked = PromptDPSGD(
        tiny_tuning.roberta(),
        tiny_tuning.roberta_tokenizer(),
        template="{text}:{mask}, {pair}",
        verbalizers={"yes": " good", "no": " bad"},
        max_input_tokens=32,
    )
    head = PromptDPSGD(
        tiny_tuning.bert(),
        tiny_tuning.bert_tokenizer(),
        labels=("yes", "no"),
        method="soft_prompt",
        reparameterize=6,
        max_input_tokens=32,
    )
    for place, trainer in enumerate((masked, head)):
        private = PrivateExamples(records, public_size=8, dataset_id=f"d{place}", **declared)
        prompt = trainer.train(private, budget=house(), pair_key="second", **options)
        assert prompt.task == trainer.task
        assert np.isfinite(prompt.arrays["prompt_embeddings"]).all()
        assert verify_report(prompt).ok
