"""PromptDPSGD through its doors: plans, budgets, fields, faults, models, the baseline without privacy, and torch."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from langchain_dpicl import Budget, PrivateExamples, verify_report
from langchain_dpicl.backends.hf.backend import HuggingFaceBackend
from langchain_dpicl.backends.tuning.tasks import PromptTask
from langchain_dpicl.baselines import soft_prompt_without_privacy
from langchain_dpicl.budget.handler import PrivacyBudgetCallbackHandler, get_privacy_budget_callback
from langchain_dpicl.exceptions import (
    ConfigurationError,
    ModelCallError,
    NoPrivacyBudgetError,
    PrivacyBudgetExceededError,
    RunInterruptedError,
)
from langchain_dpicl.options import Noise, SoftPromptConfig, TrainableModel, Training
from langchain_dpicl.soft_prompts.plan import ExampleFields, engine_of, kind_of, plan_training
from langchain_dpicl.soft_prompts.serving import SoftPromptClassifier
from langchain_dpicl.soft_prompts.trainer import PromptDPSGD
from tests.contracts.front_room import (
    CHARGED,
    REFUSED,
    AsyncObserver,
    Door,
    FrontRoomContract,
    Observer,
    Room,
)
from tests.gradient_doubles import (
    LABELS,
    PUBLIC,
    RUN,
    TASK,
    LogisticEngine,
    examples,
    prepared,
    short_of_steps,
    training,
)
from tests.labelling_doubles import counts, fails, house, lines
from tests.unit_tests.audit.test_labelling_doors import inside

pytestmark = pytest.mark.usefixtures("remembered_prices")


# -- the contract of everything that charges ---------------------------------------------------------------------------


async def _arun(made: PromptDPSGD, _: list[str]) -> list[Any]:
    return [await made.arun()]


async def _astream(made: PromptDPSGD, _: list[str]) -> list[Any]:
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

    def make(self, room: Room, **options: Any) -> PromptDPSGD:
        given = {"budget": room.budget, "epsilon": 1.5e4, **options}
        return prepared(room.private, engine=room.engine, **given)

    def make_refused(self, room: Room) -> PromptDPSGD:
        """Its share was set aside by one process while another sealed the room it needs."""
        late = self.make(room, budget=Budget.open(room.store), epsilon=7e4, component="late")
        next(self.make(room, component="early", epsilon=4e4).stream())
        return late

    def faulty_constructions(self, room: Room) -> Sequence[Callable[[], Any]]:
        return [lambda fault=fault: self.make(room, **fault) for fault in FAULTS]  # type: ignore[misc]


FAULTS: list[dict[str, Any]] = [
    {"training": None},
    {"training": {"expected_batch_size": 10, "steps": 4}},
    {"training": training(expected_batch_size=41)},
    {"training": training(l2_clip_norm=1e300)},
    {"training": training(learning_rate=1e4)},
    {"training": training(validation=[])},
    {"training": training(validation="one text")},
    {"training": training(validation=PUBLIC[0])},
    {"training": training(validation=[{"text": "no label"}])},
    {"training": training(validation=[{"text": "x", "label": 5}])},
    {"training": training(validation=[5])},
    {"noise": Noise("gumbel")},
    {"noise": 1.0},
    {"epsilon": None, "noise": None},
    {"epsilon": -1.0},
    {"prompt": SoftPromptConfig(num_virtual_tokens=3)},
    {"prompt": "prefix"},
    {"fields": {"text": "words"}},
    {"fields": {"target": "words"}},
    {"fields": {"target": "text"}},
    {"fields": {"pair": "label"}},  # the template has no {pair}
    {"fields": {"label": "label"}},
    {"fields": "text"},
    {"component": ""},
    {"checkpoint": 5},
    {"checkpoint": "missing-folder/state.json"},
]

# -- plans and budgets -------------------------------------------------------------------------------------------------


def test_the_plan_of_a_run_is_what_it_is_charged_and_building_it_spends_nothing() -> None:
    budget, private = house(), examples()
    made = prepared(private, budget=budget, noise=Noise(multiplier=1.0, delta=1e-5))
    assert counts(budget) == {}
    terms: dict[str, Any] = {"epsilon": 1e5, "delta": 1e-5, "noise_multiplier": 1.0, "partition": private.dataset_id}
    assert made.plan == plan_training(40, expected_batch_size=10, steps=4, l2_clip_norm=0.1, width=8, **terms)
    assert (made.plan.steps, made.plan.width, made.plan.sampling_rate, made.plan.l2_clip_norm) == (4, 8, 0.25, 0.1)
    assert (made.component, made.is_finished) == ("soft-prompt", False)
    made.run()
    assert made.is_finished
    assert budget.remaining_epsilon == 1e6 - 1e5


def test_noise_is_calibrated_to_the_share_and_epochs_make_steps() -> None:
    budget = house(epsilon=4.0, delta=1e-4)
    made = prepared(budget=budget, epsilon=1.0, noise=None, training=training(steps=None, epochs=1.5))
    assert made.plan.steps == 6
    assert 0.9 < made.plan.epsilon <= 1.0
    assert made.plan.delta == pytest.approx(2.5e-5)
    prompt = made.run()
    assert prompt.epsilon == 1.0
    assert verify_report(prompt).ok
    assert budget.remaining_epsilon == 3.0


def test_a_budget_is_found_where_every_component_finds_it() -> None:
    handler = PrivacyBudgetCallbackHandler(epsilon=1e6, delta=1e-4)

    def built(**options: Any) -> PromptDPSGD:
        return PromptDPSGD.from_private_examples(examples(), llm=LogisticEngine(), **RUN, **options)

    with pytest.raises(NoPrivacyBudgetError):
        built()
    assert built(budget={"callbacks": [handler]})._budget is handler.budget
    with get_privacy_budget_callback(epsilon=1e6, delta=1e-4) as active:
        assert built()._budget is active.budget


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"steps": 3}, r"Give training=Training\(steps=\.\.\.\)"),
        ({"device": "cpu"}, r"Give llm=TrainableModel\(device=\.\.\.\)"),
        ({"num_virtual_tokens": 3}, r"Give prompt=SoftPromptConfig\(num_virtual_tokens=\.\.\.\)"),
        ({"delta": 1e-5}, r"Give noise=Noise\(delta=\.\.\.\)"),
    ],
)
def test_a_keyword_that_an_option_value_holds_is_refused_with_its_place(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        PromptDPSGD.from_private_examples(examples(), llm=LogisticEngine(), budget=house(), **RUN, **given)


def test_observers_hear_of_the_charge_once_and_of_what_an_outage_left() -> None:
    engine, observer, later = LogisticEngine(), Observer(), AsyncObserver()
    engine.at_gradients = fails(None, ModelCallError("out."))  # type: ignore[arg-type]
    made = prepared(engine=engine, training=training(steps=6))

    def both() -> None:
        with pytest.raises(RunInterruptedError):
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
            prepared(budget=house(epsilon=2.0), epsilon=1.0, noise=Noise(multiplier=0.5))

    inside(ask, observer)
    assert [data["component"] for data in observer.named(REFUSED)] == ["PromptDPSGD"]


def test_what_is_no_private_examples_is_refused_with_the_place_of_the_baselines() -> None:
    with pytest.raises(ConfigurationError, match=r"found 'list'.*langchain_dpicl\.baselines"):
        PromptDPSGD.from_private_examples(PUBLIC, llm=LogisticEngine(), budget=house(), **RUN)  # type: ignore[arg-type]


def test_a_delta_that_may_give_away_whole_records_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="public_size"):
        prepared(examples(public_size=20_000), budget=house(delta=1e-4), noise=Noise(multiplier=1.0, delta=1e-5))


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
    made = prepared(
        private, engine=engine, fields={"pair": "second"}, training=training(expected_batch_size=40, steps=1)
    )
    made.run()
    assert seen == [("one good", "two", "good")]


def test_a_pair_that_nothing_fills_is_refused() -> None:
    task = PromptTask("causal_lm", "{text} / {pair} =", LABELS, (" great", " terrible"))
    with pytest.raises(ConfigurationError, match=r'fields: expected under "pair" the field that fills'):
        prepared(engine=LogisticEngine(task=task))


def test_a_target_may_be_any_declared_field_and_undeclared_labels_count_zero() -> None:
    records = [{"text": "good", "mood": "good"}, {"text": "bad", "mood": "none of them"}]
    private = PrivateExamples(records, fields=("mood",), public_size=40)
    with pytest.raises(ConfigurationError, match=r'fields: expected under "target" the field that holds the answer'):
        prepared(private)
    prepared(private, fields={"target": "mood"}, training=training(expected_batch_size=40, steps=1)).run()


@pytest.mark.parametrize("name", ["task", "initial", "weights_digest", "arrays", "peft_config"])
def test_an_engine_without_what_a_prompt_is_made_of_is_refused_before_it_is_paid_for(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = LogisticEngine()
    vars(engine).pop(name, None)
    monkeypatch.delattr(LogisticEngine, name)
    with pytest.raises(ConfigurationError, match=f"llm: expected an engine that also has {name}, found 'LogisticE"):
        prepared(engine=engine)


def test_a_task_that_writes_texts_writes_labels_only_if_asked_to() -> None:
    """Otherwise one would learn only when it is paid for that the prompt chooses no label."""
    engine = LogisticEngine(task=PromptTask("causal_lm", "{text} ="))
    with pytest.raises(ConfigurationError, match=r"task: expected one with labels.*Give the task labels, or fields="):
        prepared(engine=engine)
    prepared(engine=engine, fields={"target": "label"})


def test_labels_that_the_task_has_not_are_refused() -> None:
    private = PrivateExamples(
        [{"text": "x", "label": "fair"}], label_key="label", labels=(*LABELS, "fair"), public_size=40
    )
    with pytest.raises(ConfigurationError, match=r"task: expected the examples' labels among its own, .*'fair'"):
        prepared(private)


def test_private_examples_are_no_validation() -> None:
    with pytest.raises(ConfigurationError, match="validation: expected records that no ledger protects"):
        prepared(training=training(validation=examples()))


def test_faults_of_validation_records_name_place_and_field_but_no_content() -> None:
    with pytest.raises(ConfigurationError, match=r"^validation\[1\]: expected a mapping with text under") as caught:
        prepared(training=training(validation=[PUBLIC[0], {"text": "a secret", "label": None}]))
    assert "secret" not in str(caught.value)


def test_a_validation_record_with_an_unknown_label_is_refused_before_anything_is_declared() -> None:
    budget = house()
    with pytest.raises(ConfigurationError, match=r"^validation\[1\]: expected one of .* found another label") as caught:
        prepared(budget=budget, training=training(validation=[PUBLIC[0], {"text": "x", "label": "a secret"}]))
    assert "secret" not in str(caught.value)
    assert lines(budget) == []


def test_labels_of_public_records_are_read_as_text_like_those_of_private_ones() -> None:
    records = [{"text": "x", "label": label} for label in (1, np.int64(0), True, "1")]
    examples_in = ExampleFields("text", "label").examples_in
    found = examples_in("validation", iter(records), labels=("0", "1", "true"))
    assert [one.target for one in found] == ["1", "0", "true", "1"]
    with pytest.raises(ConfigurationError, match="expected a mapping with text under"):
        examples_in("validation", records)  # nothing but text is an answer that is free text


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
    with pytest.raises(ConfigurationError, match=r"^llm: expected"):
        kind_of(tmp_path)
    with pytest.raises(ConfigurationError, match=r"^llm: expected"):
        engine_of(TrainableModel(object()))


def test_a_bare_model_object_is_refused_with_the_option_value_that_holds_it() -> None:
    with pytest.raises(ConfigurationError, match=r"^llm: .* found 'object'\. Give a model object as TrainableModel"):
        engine_of(object())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {"task": TASK},
        {"prompt": SoftPromptConfig(num_virtual_tokens=3)},
        {"prompt": SoftPromptConfig("prefix", init_text="good")},
    ],
)
def test_a_ready_engine_takes_no_other_options(options: dict[str, Any]) -> None:
    engine = LogisticEngine()
    assert engine_of(engine, prompt=SoftPromptConfig(init_text="good")) is engine
    with pytest.raises(ConfigurationError, match="together with an engine"):
        engine_of(engine, **options)


@pytest.mark.parametrize("option", ["task", "prompt"])
def test_what_is_no_option_value_is_refused_by_name(option: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{option}: expected"):
        engine_of("folder", **{option: "{text}"})


def test_without_torch_the_error_says_which_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "langchain_dpicl.backends.tuning.engine", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigurationError, match=r"found no torch; install langchain-dpicl\[hf\]"):
        engine_of(TrainableModel(type("GPT2LMHeadModel", (), {})()), labels=LABELS)


def test_the_order_of_a_head_s_labels_has_to_be_said() -> None:
    with pytest.raises(ConfigurationError, match="The order of the labels is that of the head's outputs"):
        engine_of(TrainableModel(type("BertForSequenceClassification", (), {})()), labels=LABELS)


def test_the_prompt_starts_from_text_where_one_is_given() -> None:
    assert prepared(prompt=SoftPromptConfig(init_text="12345678")).weights.tolist() == [1.0] * 8
    assert prepared().weights.tolist() == [0.0] * 8


def test_reprs_show_public_names_and_nothing_else() -> None:
    assert repr(prepared()) == "PromptDPSGD(component='soft-prompt', step=0, steps_left=4)"


# -- the baseline ------------------------------------------------------------------------------------------------------

RECORDS = [{"text": f"{label} {i}", "label": label} for i in range(10) for label in LABELS]


def test_the_baseline_learns_without_privacy_and_its_report_says_so() -> None:
    engine = LogisticEngine()
    prompt = soft_prompt_without_privacy(
        RECORDS,
        llm=engine,
        training=Training(expected_batch_size=6, epochs=5, learning_rate=0.3),
    )
    assert prompt.epsilon == math.inf
    assert prompt.report["private"] is False
    verified = verify_report(prompt)
    assert not verified.ok
    assert verified.epsilon == math.inf
    assert "epsilon=inf" in repr(prompt)
    weights = prompt.arrays["prompt_embeddings"].ravel().astype(float)
    assert engine.losses(weights, [*_public(engine)]).mean() < 0.1
    per_step = [len(call) for call in engine.calls]
    assert per_step == [6, 6, 6, 2] * 5
    first = [text for call in engine.calls[:4] for (text,) in call]  # type: ignore[misc]
    assert sorted(first) == sorted(record["text"] for record in RECORDS)


def test_the_baseline_needs_no_digest_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(LogisticEngine, "weights_digest")
    assert soft_prompt_without_privacy(RECORDS, llm=LogisticEngine(), training=training()).epsilon == math.inf


def _public(engine: LogisticEngine) -> Any:
    return prepared(engine=engine, training=training(validation=PUBLIC))._validation.examples  # type: ignore[union-attr]


def test_a_step_of_the_baseline_follows_the_plain_mean() -> None:
    engine = LogisticEngine()
    prompt = soft_prompt_without_privacy(
        RECORDS,
        llm=engine,
        training=Training(expected_batch_size=50, steps=1, learning_rate=1.0, optimizer="sgd"),
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
        {"training": None},
        {"training": Training(expected_batch_size=4, steps=1, validation=PUBLIC)},
        {"task": TASK},
        {"fields": {"label": "label"}},
        {"fields": {"text": "words"}},
    ],
    ids=lambda fault: next(iter(fault)),
)
def test_the_baseline_refuses_private_examples_and_public_faults(fault: dict[str, Any]) -> None:
    given = {"records": RECORDS, "training": training(), **fault}
    with pytest.raises(ConfigurationError):
        soft_prompt_without_privacy(given.pop("records"), llm=LogisticEngine(), **given)


def test_private_examples_that_the_baseline_refused_can_still_be_protected() -> None:
    private = examples()
    with pytest.raises(ConfigurationError, match="with a budget"):
        soft_prompt_without_privacy(private, llm=LogisticEngine(), training=training())  # type: ignore[arg-type]
    assert prepared(private).run()


# -- a model of torch, end to end --------------------------------------------------------------------------------------

COLOURS = {"warm": " red", "cold": " blue"}


THINGS = ("the apple is", "the sea is", "the rose is", "a lake is")
SAID = [{"text": f"{THINGS[i % 4]} {i}", "label": ("warm", "cold")[i % 2]} for i in range(16)]


def coloured(count: int = 16) -> PrivateExamples:
    return PrivateExamples(SAID[:count], label_key="label", labels=tuple(COLOURS), public_size=16)


WORDED = PromptTask("causal_lm", labels=tuple(COLOURS), words=tuple(COLOURS.values()), max_input_tokens=16)


def tiny() -> TrainableModel:
    from tests import tiny_tuning

    return TrainableModel(tiny_tuning.gpt2(), tiny_tuning.causal_tokenizer())


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("method", ["soft_prompt", "prefix"])
def test_a_prompt_of_a_frozen_model_is_trained_saved_and_read(method: Any, tmp_path: Path) -> None:
    """Noise of .02 clips on the sum of 16: what is learnt is seen. The same texts, made public, tell it."""
    budget = house()
    made = PromptDPSGD.from_private_examples(
        coloured(),
        llm=tiny(),
        training=Training(expected_batch_size=16, steps=8, learning_rate=0.02, validation=SAID[:8], validate_every=7),
        budget=budget,
        epsilon=9e5,
        task=WORDED,
        prompt=SoftPromptConfig(method, 3, init_text="the apple is red"),
        noise=Noise(multiplier=0.02),
    )
    before = made.engine.weights_digest()
    before_it = np.mean(made.engine.losses(made.weights, made._validation.examples))  # type: ignore[union-attr]
    losses = [told.validation_loss or 0.0 for told in made.stream()]
    prompt = made.result
    assert losses[-1] < 0.9 * before_it
    assert made.engine.weights_digest() == before
    assert counts(budget) == {"reserve step": 8, "commit step": 8}
    assert verify_report(prompt).ok
    prompt.save(tmp_path / "prompt")
    assert type(prompt).load(tmp_path / "prompt") == prompt


@pytest.mark.usefixtures("one_thread")
def test_a_seed_of_torch_has_no_part_in_the_noise() -> None:
    """An empty data set: what moves is noise alone. Two vectors agree with probability below 1e-30."""
    import torch

    engine = engine_of(tiny(), task=WORDED)
    found = set()
    for place in range(2):
        torch.manual_seed(0)
        made = prepared(
            coloured(0), engine=engine, training=training(expected_batch_size=8, steps=1), component=f"run {place}"
        )
        start = made.weights
        made.run()
        found.add((made.weights - start).tobytes())
    assert len(found) == 2


@pytest.mark.usefixtures("one_thread")
def test_a_running_engine_shares_its_model_and_words_are_the_labels_by_default() -> None:
    model = tiny()
    backend = HuggingFaceBackend(model.model, model.tokenizer, chat=False, max_prompt_tokens=16, max_new_tokens=1)
    private = PrivateExamples(
        [{"text": "the sea is", "label": "red"}] * 16, label_key="label", labels=("red", "blue"), public_size=16
    )
    made = PromptDPSGD.from_private_examples(
        private, llm=backend, training=training(expected_batch_size=8, steps=1), budget=house(), epsilon=9e5
    )
    assert made.engine.prompted.model is model.model
    assert made.engine.task == PromptTask("causal_lm", "{text}\nLabel:", ("red", "blue"), (" red", " blue"))
    assert verify_report(made.run()).ok


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("fault", ["a token more", "another end"])
def test_a_prompt_that_writes_is_refused_before_it_is_paid_for_where_no_engine_would_serve_it(fault: str) -> None:
    from tests import tiny_tuning

    tokenizer = tiny_tuning.causal_tokenizer()
    model = tiny_tuning.gpt2(len(tokenizer))
    if fault == "a token more":
        tokenizer.add_special_tokens({"additional_special_tokens": ["<extra>"]})
    else:
        model.generation_config.eos_token_id = [1, 50256]
    llm, writes = TrainableModel(model, tokenizer), PromptTask("causal_lm", "{text} is", max_input_tokens=16)
    serves = partial(HuggingFaceBackend, model, tokenizer, max_prompt_tokens=8, max_new_tokens=8)
    with pytest.raises(ConfigurationError) as served:
        serves()
    budget = house()
    with pytest.raises(ConfigurationError, match=f"^{re.escape(str(served.value))}$"):
        PromptDPSGD.from_private_examples(
            coloured(),
            llm=llm,
            task=writes,
            fields={"target": "label"},
            training=training(),
            budget=budget,
            epsilon=1.0,
        )
    assert lines(budget) == []
    assert engine_of(llm, task=WORDED)
    if fault == "another end":
        assert engine_of(serves(eos_token_id=1), task=writes)


@pytest.mark.usefixtures("one_thread")
def test_a_masked_model_and_a_head_are_trained_on_pairs() -> None:
    from tests import tiny_tuning

    records = [{"text": "the sea is blue", "second": "a lake is deep", "label": ("yes", "no")[i % 2]} for i in range(8)]
    declared: dict[str, Any] = {"fields": ("second",), "label_key": "label", "labels": ("yes", "no")}
    labels = ("yes", "no")
    masked = engine_of(
        TrainableModel(tiny_tuning.roberta(), tiny_tuning.roberta_tokenizer()),
        task=PromptTask("masked_lm", "{text}:{mask}, {pair}", labels, (" good", " bad"), max_input_tokens=32),
    )
    head = engine_of(
        TrainableModel(tiny_tuning.bert(), tiny_tuning.bert_tokenizer()),
        task=PromptTask("sequence_classification", labels=labels, max_input_tokens=32),
    )
    for place, engine in enumerate((masked, head)):
        private = PrivateExamples(records, public_size=8, dataset_id=f"d{place}", **declared)
        made = prepared(
            private, engine=engine, training=training(expected_batch_size=4, steps=2), fields={"pair": "second"}
        )
        prompt = made.run()
        assert prompt.task == engine.task
        assert np.isfinite(prompt.arrays["prompt_embeddings"]).all()
        assert verify_report(prompt).ok


@pytest.mark.usefixtures("one_thread")
def test_parts_made_at_random_that_nothing_keeps_are_refused_before_they_are_paid_for(tmp_path: Path) -> None:
    """A prompt brings its head along, and no pooler; the steps of a checkpoint are for the head of one process."""
    from tests import tiny_tuning

    task = PromptTask("sequence_classification", labels=tuple(COLOURS), max_input_tokens=16)
    without_head, without_pooler = tmp_path / "roberta", tmp_path / "bert"
    for folder, model, words in (
        (without_head, tiny_tuning.roberta(), tiny_tuning.roberta_tokenizer()),
        (without_pooler, tiny_tuning.bert("BertForMaskedLM"), tiny_tuning.bert_tokenizer()),
    ):
        model.save_pretrained(folder)
        words.save_pretrained(folder)
    budget, private, once = house(), coloured(), training(expected_batch_size=8, steps=1)

    def built(folder: Path, **more: Any) -> PromptDPSGD:
        return prepared(private, engine=engine_of(str(folder), task=task), budget=budget, training=once, **more)

    with pytest.raises(ConfigurationError, match=r"^llm: .* found none for \['bert\.pooler\.dense\.bias', "):
        built(without_pooler)
    with pytest.raises(ConfigurationError, match=r"for \['classifier\.dense\.bias', .*Save the model once"):
        built(without_head, checkpoint=tmp_path / "state.json")
    assert lines(budget) == []
    made = built(without_head)
    prompt = made.run()
    assert SoftPromptClassifier(str(without_head), prompt, device="cpu").invoke("the sea") in COLOURS
    made.engine.prompted.model.save_pretrained(without_head)
    assert built(without_head, component="whole", checkpoint=tmp_path / "state.json").run().head
