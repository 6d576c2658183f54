"""Rows of gradients: those of one example at a time, of other packages, and of nobody else's text, to the last bit."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import opacus
import peft
import pytest
import torch
from transformers.cache_utils import DynamicCache

from langchain_dpicl.backends import sync_async
from langchain_dpicl.backends.base import GradientBackend, TrainingExample
from langchain_dpicl.backends.rows.gradient_rows import CheckRequest, GradientRequest
from langchain_dpicl.backends.tuning import engine as micro
from langchain_dpicl.backends.tuning.engine import PromptEngine
from langchain_dpicl.backends.tuning.prompted_model import METHODS, Method
from langchain_dpicl.exceptions import ConfigurationError, ModelCallError, UnsilencableModelError
from tests import tiny_tuning
from tests.durable import no_room
from tests.unit_tests.backends.hf_doubles import coupled, poisoned, raising
from tests.unit_tests.backends.tuning.test_tuning_models import CASES, COUNT, engine
from tests.unit_tests.backends.tuning.test_tuning_tasks import FREE

KINDS = ("gpt2", "llama", "roberta-mask", "roberta-head", "bert-head")
TEXTS = (
    ("the film was good", None),
    ("", None),
    ("the sea is blue and wide, a lake is deep " * 3, None),
    ("bad", "a play"),
)

pytestmark = pytest.mark.usefixtures("own_hooks", "one_thread")
FAR = "one charge is only held and goes back in three days"


THOROUGH = micro._NUM_TEST_ROWS, micro._FEWEST_ROUNDS


@pytest.fixture(autouse=True)
def _short_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most tests need no thorough trial of a batch size: their rows agree up to rounding, or always."""
    monkeypatch.setattr(micro, "_NUM_TEST_ROWS", 8)
    monkeypatch.setattr(micro, "_FEWEST_ROUNDS", 2)


@pytest.fixture(autouse=True)
def _same_coins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Networks that write prompts are drawn alike in every run: behind one in two hundred no step is a small one."""
    monkeypatch.setattr(micro, "PCG64", lambda: np.random.PCG64(7))


@pytest.fixture
def _thorough_trials(_short_trials: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(micro, "_NUM_TEST_ROWS", THOROUGH[0])
    monkeypatch.setattr(micro, "_FEWEST_ROUNDS", THOROUGH[1])


@pytest.fixture
def _rows_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets rows pass for unmoved in a micro-batch of any size that fits; which sizes do is the processor's."""
    real = micro.MicroBatches._keeps_apart
    monkeypatch.setattr(micro.MicroBatches, "_keeps_apart", lambda own, size: (real(own, size), True)[1])


def examples(made: PromptEngine, texts: Any = TEXTS) -> list[TrainingExample]:
    labels = made.task.labels
    return [
        TrainingExample(text, pair, labels[place % len(labels)] if labels else "the rose is red and wide"[: 8 * place])
        for place, (text, pair) in enumerate(texts)
    ]


def start(made: PromptEngine) -> np.ndarray:
    """Parameters that are no point of symmetry."""
    coins = np.random.Generator(np.random.PCG64(7))
    return made.initial("the sea is blue") + 0.1 * coins.standard_normal(made.width)


def rows_of(made: GradientBackend, parameters: np.ndarray, groups: Sequence[Any]) -> np.ndarray:
    found: list[np.ndarray] = []
    made.gradients(parameters, groups, add=lambda rows: found.append(np.array(rows, dtype=np.float64)))
    return np.concatenate(found) if found else np.zeros((0, made.width))


def bits(rows: np.ndarray) -> bytes:
    return np.ascontiguousarray(rows, dtype=np.float64).tobytes()


def close(left: np.ndarray, right: np.ndarray, *, within: float = 1e-5) -> bool:
    scale = np.linalg.norm(right, axis=1, keepdims=True)
    return bool((np.abs(left - right) <= within * np.maximum(scale, 1.0)).all()) and bool(scale.max() > 1e-3)


def loss_of(logits: torch.Tensor, made: PromptEngine, example: TrainingExample, *, shift: int) -> torch.Tensor:
    """The loss of one unpadded example, written out for a test."""
    read = made.reader.input(example.text, example.pair)
    if made.task.kind == "sequence_classification":
        chosen = logits[0]
    else:
        place = -1 if made.prompted.is_causal else read.at + shift
        chosen = logits[0, place][list(made.reader.word_ids)]
    return -chosen.log_softmax(dim=0)[made.task.labels.index(example.target)]


def given_to(made: PromptEngine, example: TrainingExample) -> dict[str, torch.Tensor]:
    read = made.reader.input(example.text, example.pair)
    given = {"input_ids": torch.tensor([read.ids]), "attention_mask": torch.ones((1, len(read.ids)), dtype=torch.int64)}
    if made.reader.has_types and made.task.kind == "sequence_classification":
        given["token_type_ids"] = torch.tensor([read.types])
    return given


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", KINDS)
def test_rows_are_the_gradients_of_one_example_at_a_time(case: str, method: Method) -> None:
    """Against peft's own training: one unpadded example, one backward pass."""
    made = engine(case, method)
    parameters = start(made)
    kind = {"soft_prompt": "PROMPT_TUNING", "prefix": "PREFIX_TUNING"}[method]
    config = {"peft_type": kind, "task_type": made.peft_config()["task_type"], "num_virtual_tokens": COUNT}
    wrapped = peft.get_peft_model(CASES[case][0](), peft.get_peft_config(config)).eval()
    (trained,) = [one for name, one in wrapped.named_parameters() if "prompt_encoder" in name]
    with torch.no_grad():
        trained.copy_(torch.from_numpy(made.arrays(parameters)["prompt_embeddings"]))
    told = []
    for example in examples(made):
        trained.grad = None
        logits = wrapped(**given_to(made, example)).logits
        loss_of(logits, made, example, shift=COUNT if method == "soft_prompt" else 0).backward()
        told.append(trained.grad.flatten().double().numpy())
    found = rows_of(made, parameters, [[example] for example in examples(made)])
    assert close(found, np.array(told))


class _Prompted(torch.nn.Module):
    """A frozen model behind a trained embedding, as Opacus takes gradients of one."""

    def __init__(self, made: PromptEngine, parameters: np.ndarray) -> None:
        super().__init__()
        self.made = made
        self.model = made.prompted.model.requires_grad_(False)
        self.prompt = torch.nn.Embedding(*made.arrays(parameters)["prompt_embeddings"].shape)
        with torch.no_grad():
            self.prompt.weight.copy_(torch.from_numpy(made.arrays(parameters)["prompt_embeddings"]))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        prompts = self.prompt(torch.arange(COUNT).expand(len(ids), -1))
        if self.made.method == "soft_prompt":
            return self.model(inputs_embeds=torch.cat([prompts, self.model.get_input_embeddings()(ids)], dim=1)).logits
        layers, heads = self.made.prompted.num_layers, self.made.prompted.num_heads
        split = prompts.view(len(ids), COUNT, 2 * layers, heads, -1).permute(2, 0, 3, 1, 4)
        cache = DynamicCache([(split[2 * layer], split[2 * layer + 1]) for layer in range(layers)])
        return self.model(input_ids=ids, past_key_values=cache).logits


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", ["gpt2", "roberta-head"])
def test_rows_are_those_of_opacus(case: str, method: Method) -> None:
    made = engine(case, method)
    parameters = start(made)
    texts = [("the film was good", None), ("the good film was", None), ("the was film good", None)]
    batch = examples(made, texts)
    ids = [made.reader.input(example.text).ids for example in batch]
    assert len({len(one) for one in ids}) == 1  # no padding, of which Opacus knows nothing
    found = rows_of(made, parameters, [[example] for example in batch])
    sampled = opacus.GradSampleModule(_Prompted(made, parameters), loss_reduction="sum")
    logits = sampled(torch.tensor(ids))
    losses = [loss_of(logits[row : row + 1], made, one, shift=0) for row, one in enumerate(batch)]
    torch.stack(losses).sum().backward()
    told = sampled._module.prompt.weight.grad_sample.flatten(1).double().numpy()
    assert close(found, told)


def test_free_text_is_learnt_as_the_model_itself_counts_its_loss() -> None:
    made = engine("gpt2", "soft_prompt", task=FREE)
    parameters = start(made)
    prompt = torch.tensor(made.arrays(parameters)["prompt_embeddings"], requires_grad=True)
    model = made.prompted.model
    told, losses = [], []
    for example in examples(made):
        read, answer = made.reader.read(example)
        embedded = model.get_input_embeddings()(torch.tensor([[*read.ids, *answer]]))
        labels = torch.tensor([[-100] * (COUNT + len(read.ids)) + answer])
        loss = model(inputs_embeds=torch.cat([prompt[None], embedded], dim=1), labels=labels).loss
        (gradient,) = torch.autograd.grad(loss, prompt)
        told.append(gradient.flatten().double().numpy())
        losses.append(float(loss))
    assert {len(made.reader.answer(example.target)) for example in examples(made)} >= {1, 6}
    assert close(rows_of(made, parameters, [[example] for example in examples(made)]), np.array(told))
    assert np.allclose(made.losses(parameters, examples(made)), losses, rtol=1e-4)


@pytest.mark.parametrize("size", [1, 3])
def test_a_units_row_is_the_mean_of_its_examples(size: int) -> None:
    made = engine("llama", "prefix", micro_batch=size)
    parameters, batch = start(made), examples(engine("llama", "prefix"))
    each = rows_of(made, parameters, [[example] for example in batch])
    unread = TrainingExample("the film", None, "no label")
    groups = [batch[:3], [batch[3]], [batch[0], unread], [unread], batch]
    found = rows_of(made, parameters, groups)
    told = [each[:3].mean(axis=0), each[3], each[0] / 2, 0 * each[0], each.mean(axis=0)]
    assert np.allclose(found, told, atol=1e-6)
    assert not found[3].any()


@pytest.mark.usefixtures("_thorough_trials")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", KINDS)
def test_a_row_keeps_its_bits_whatever_stands_beside_it(case: str, method: Method) -> None:
    made = engine(case, method)
    parameters, batch = start(made), examples(made, [*TEXTS, (FAR, None), ("x" * 900, "y"), ("red", None)])
    groups: list[Any] = [[example] for example in batch]
    alone = [bits(rows_of(made, parameters, [group])) for group in groups]
    for order in ((3, 1, 0, 6, 2, 5, 4), (2, 6, 5, 4, 0, 3, 1), (1, 4)):
        found = rows_of(made, parameters, [groups[place] for place in order])
        assert [bits(row) for row in found] == [alone[place] for place in order]
    mixed = rows_of(made, parameters, [None, batch[4:], groups[0], [], groups[1], batch, groups[2]])
    assert [bits(mixed[row]) for row in (1, 2, 4)] == alone[:3]


@pytest.mark.usefixtures("_thorough_trials")
@pytest.mark.parametrize("size", [2, 3, 4, 8, 16, 33])
def test_a_size_is_tried_with_rows_in_several_places_and_beside_others(size: int) -> None:
    places: dict[int, set[int]] = {}
    beside: dict[int, set[frozenset[int]]] = {}
    for order in micro._orders(size):
        assert len(order) == size
        for place, number in enumerate(order):
            places.setdefault(number, set()).add(place)
            beside.setdefault(number, set()).add(frozenset(order))
    moved = [number for number in places if len(places[number]) > 1 and len(beside[number]) > 1]
    assert len(moved) >= size
    assert {place for number in moved for place in places[number]} == set(range(size))


@pytest.mark.parametrize("by_place", [False, True])
def test_a_model_whose_rows_move_each_other_runs_them_one_by_one(by_place: bool) -> None:
    made = engine("llama", "soft_prompt", model=coupled(tiny_tuning.llama(), by_place=by_place))
    parameters, batch = start(made), examples(made)
    assert made.check() == 1
    assert engine("llama", "soft_prompt").check() == 4
    together = rows_of(made, parameters, [[example] for example in batch])
    assert [bits(row) for row in together] == [bits(rows_of(made, parameters, [[example]])) for example in batch]


def test_micro_batches_of_any_size_agree_up_to_rounding() -> None:
    parameters = start(engine("gpt2", "prefix"))
    batch = [[example] for example in examples(engine("gpt2", "prefix")) * 2]
    small, large = (rows_of(engine("gpt2", "prefix", micro_batch=size), parameters, batch) for size in (1, 8))
    assert close(small, large)


def test_no_group_has_no_row() -> None:
    made = engine("gpt2", "soft_prompt")
    for groups in ([], [None], [[]], [None, (), []]):
        assert rows_of(made, start(made), groups).shape == (0, made.width)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_counts_zero_and_nobody_else_does(value: float) -> None:
    clean = engine("llama", "soft_prompt")
    (bad,) = clean.reader.tokens.encode("~")
    made = engine("llama", "soft_prompt", model=poisoned(tiny_tuning.llama(), bad, value))
    parameters, batch = start(clean), examples(clean)
    batch[1] = TrainingExample("~ the apple", None, "good")
    groups = [[example] for example in batch]
    found, told = rows_of(made, parameters, groups), rows_of(clean, parameters, groups)
    assert not found[1].any()
    assert told[1].any()
    assert [bits(found[row]) for row in (0, 2, 3)] == [bits(told[row]) for row in (0, 2, 3)]
    losses = made.losses(parameters, batch)
    assert not np.isfinite(losses[1])
    assert np.isfinite(losses[[0, 2, 3]]).all()


def test_a_loss_without_end_counts_zero_though_its_gradient_is_a_number() -> None:
    clean = engine("llama", "prefix")
    (bad,) = clean.reader.tokens.encode("~")
    model = tiny_tuning.llama()
    seen: list[torch.Tensor] = []
    model.register_forward_pre_hook(
        lambda _, args, given: seen.append((given["input_ids"] == bad).any(dim=1)), with_kwargs=True
    )

    def bar(module: Any, args: Any, logits: torch.Tensor) -> torch.Tensor:
        word = torch.arange(logits.shape[-1]) == clean.reader.word_ids[1]
        return logits.masked_fill(seen[-1][:, None, None] & word, -torch.inf)

    model.lm_head.register_forward_hook(bar)
    made = engine("llama", "prefix", model=model)
    parameters = start(clean)
    barred, free = (TrainingExample("~ the apple", None, label) for label in ("good", "bad"))
    assert made.losses(parameters, [barred])[0] == np.inf
    found = rows_of(made, parameters, [[barred], [TrainingExample("the apple", None, "good")]])
    assert not found[0].any()
    assert found[1].any()
    assert made.losses(parameters, [free])[0] == 0.0


class _Steep(torch.autograd.Function):
    """Changes nothing, but says that it goes up without end."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, steep: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(steep)
        return given.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (steep,) = ctx.saved_tensors
        return torch.where(steep[:, None, None], torch.inf, gradient), None


def test_a_gradient_that_is_no_number_counts_zero_though_its_loss_is_one() -> None:
    clean = engine("llama", "prefix")
    (bad,) = clean.reader.tokens.encode("~")
    model = tiny_tuning.llama()
    seen: list[torch.Tensor] = []
    model.register_forward_pre_hook(
        lambda _, args, given: seen.append((given["input_ids"] == bad).any(dim=1)), with_kwargs=True
    )
    model.model.norm.register_forward_hook(lambda _, args, output: _Steep.apply(output, seen[-1]))
    made = engine("llama", "prefix", model=model)
    parameters, batch = start(clean), examples(clean)
    batch[2] = TrainingExample("~ the apple", None, "good")
    groups = [[example] for example in batch]
    found, told = rows_of(made, parameters, groups), rows_of(clean, parameters, groups)
    assert np.isfinite(made.losses(parameters, batch)).all()
    assert not found[2].any()
    assert [bits(found[row]) for row in (0, 1, 3)] == [bits(told[row]) for row in (0, 1, 3)]


@pytest.mark.parametrize(
    "error",
    [RuntimeError("zxcanaryzx"), SystemExit("zxcanaryzx"), ValueError("zxcanaryzx")],
    ids=lambda e: type(e).__name__,
)
def test_what_a_text_makes_a_model_raise_costs_its_own_row(error: BaseException) -> None:
    clean = engine("llama", "prefix")
    (bad,) = clean.reader.tokens.encode("~")
    made = engine("llama", "prefix", model=raising(tiny_tuning.llama(), bad, error))
    parameters, batch = start(clean), examples(clean)
    batch[1] = TrainingExample("~ the apple", None, "good")
    groups = [[example] for example in batch]
    found, told = rows_of(made, parameters, groups), rows_of(clean, parameters, groups)
    assert not found[1].any()
    assert [bits(found[row]) for row in (0, 2, 3)] == [bits(told[row]) for row in (0, 2, 3)]
    if isinstance(error, Exception):
        with pytest.raises(ModelCallError, match=f"a public example: {type(error).__name__}") as caught:
            made.losses(parameters, batch)
        assert "zxcanaryzx" not in str(caught.value)


def test_ctrl_c_stops_at_once() -> None:
    clean = engine("llama", "prefix")
    (bad,) = clean.reader.tokens.encode("~")
    made = engine("llama", "prefix", model=raising(tiny_tuning.llama(), bad, KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        rows_of(made, start(clean), [[TrainingExample("~", None, "good")]])
    assert all(parameter.requires_grad for parameter in made.prompted.model.parameters())


def test_ids_that_the_model_does_not_know_count_zero() -> None:
    model = tiny_tuning.gpt2()
    made = engine("gpt2", "soft_prompt", model=model)
    last = max(made.reader.tokens.known)
    made = engine("gpt2", "soft_prompt", model=tiny_tuning.gpt2(last))  # one row short
    text = made.reader.tokens._tokenizer.decode([last])
    assert last in made.reader.input(text).ids
    found = rows_of(made, start(made), [[TrainingExample(text, None, "good")], [TrainingExample("a", None, "good")]])
    assert not found[0].any()
    assert found[1].any()


@pytest.mark.parametrize("target", ["no label", "", "Good", "\ud800"])
def test_an_undeclared_label_counts_zero(target: str) -> None:
    made = engine("bert-head", "prefix")
    found = rows_of(made, start(made), [[TrainingExample("the film", None, target)]])
    assert found.shape == (1, made.width)
    assert not found.any()


@pytest.mark.parametrize("case", ["gpt2", "bert-head"])
def test_nothing_of_the_model_changes(case: str) -> None:
    model = CASES[case][0]()
    learning = [parameter for place, parameter in enumerate(model.parameters()) if place % 2]
    for parameter in model.parameters():
        parameter.requires_grad_(any(parameter is one for one in learning))
    made = engine(case, "soft_prompt", model=model)
    before, buffers = made.weights_digest(), {name: one.clone() for name, one in model.named_buffers()}
    model.train()
    first = rows_of(made, start(made), [[example] for example in examples(made)])
    made.losses(start(made), examples(made))
    assert not model.training
    assert made.weights_digest() == before
    assert all(torch.equal(one, buffers[name]) for name, one in model.named_buffers())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [parameter for parameter in model.parameters() if parameter.requires_grad] != []
    assert all(parameter.requires_grad is any(parameter is one for one in learning) for parameter in model.parameters())
    assert bits(first) == bits(rows_of(made, start(made), [[example] for example in examples(made)]))  # no dropout
    with torch.no_grad():
        next(model.parameters()).view(-1)[0].add_(1e-3)
    assert made.weights_digest() != before


@pytest.mark.parametrize("of_folder", [False, True], ids=["object", "folder"])
@pytest.mark.parametrize("case", ["llama", "roberta-mask", "bert-head"])
def test_an_engine_made_in_inference_mode_takes_the_same_gradients(case: str, of_folder: bool, tmp_path: Path) -> None:
    model, expected = CASES[case][0](), engine(case, "soft_prompt")
    if of_folder:
        model.save_pretrained(tmp_path)
    with torch.inference_mode():
        made = engine(case, "soft_prompt", model=tmp_path if of_folder else model)
    groups = [[example] for example in examples(made)]
    rows = bits(rows_of(expected, start(expected), groups))
    assert bits(rows_of(made, start(expected), groups)) == rows
    with torch.inference_mode():
        assert made.check(start(expected)) == expected.check()  # 1 where a processor rounds a head by its place
        assert bits(rows_of(made, start(expected), groups)) == rows


def test_weights_made_in_inference_mode_are_refused_and_left_as_they_are() -> None:
    with torch.inference_mode():
        model = tiny_tuning.llama()
    with pytest.raises(ConfigurationError, match=r"made outside torch.inference_mode\(\), found LlamaForCausalLM"):
        engine("llama", "soft_prompt", model=model)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_model_with_weights_that_are_elsewhere_is_refused() -> None:
    """As accelerate leaves a layer on a disk, which it may have filled in inference mode before."""
    model = tiny_tuning.llama()
    with torch.inference_mode():
        model.model.layers[1].to("meta")
    with pytest.raises(ConfigurationError, match=r"weights in memory, found LlamaForCausalLM with some offloaded"):
        engine("llama", "soft_prompt", model=model)


def test_weights_of_low_precision_are_told_apart_too() -> None:
    model = tiny_tuning.llama(dtype=torch.bfloat16)
    made = engine("llama", "prefix", model=model)
    before = made.weights_digest()
    found = rows_of(made, start(made), [[example] for example in examples(made)])
    exact = rows_of(engine("llama", "prefix"), start(made), [[example] for example in examples(made)])
    assert np.isfinite(found).all()
    assert close(found, exact, within=0.3)
    assert made.weights_digest() == before != engine("llama", "prefix").weights_digest()


def test_losses_are_those_of_the_words_among_themselves() -> None:
    made = engine("gpt2", "soft_prompt")
    parameters, batch = start(made), examples(made)
    flipped = [TrainingExample(one.text, one.pair, "good" if one.target == "bad" else "bad") for one in batch]
    shares = np.exp(-made.losses(parameters, batch)) + np.exp(-made.losses(parameters, flipped))
    assert np.allclose(shares, 1.0, atol=1e-6)
    assert np.isnan(made.losses(parameters, [TrainingExample("a", None, "no label")])).all()
    assert made.losses(parameters, []).shape == (0,)


def test_a_small_step_down_the_gradient_lowers_the_loss_as_it_says() -> None:
    made = engine("roberta-mask", "prefix")
    parameters, batch = start(made), examples(made)[:2]
    row = rows_of(made, parameters, [batch])[0]
    step = 1e-3 / np.linalg.norm(row)
    before, after = (made.losses(parameters - moved * row, batch).mean() for moved in (0.0, step))
    assert after - before == pytest.approx(-step * float(row @ row), rel=0.1)


def test_parameters_of_another_width_are_refused() -> None:
    made = engine("gpt2", "soft_prompt")
    for wrong in (np.zeros(made.width + 1), np.zeros((1, made.width))):
        with pytest.raises(ConfigurationError, match="parameters: expected shape"):
            rows_of(made, wrong, [])
        with pytest.raises(ConfigurationError, match="parameters: expected shape"):
            made.losses(wrong, [])


class _Narrow:
    """Runs out of memory above so many rows, or at the calls that are named."""

    def __init__(self, made: PromptEngine, *, most: int = 99) -> None:
        self.most = most
        self.sizes: list[int] = []
        self.fails_at: set[int] = set()
        inner = made.prompted.forward

        def forward(prompts: torch.Tensor, *args: Any, **given: Any) -> torch.Tensor:
            self.sizes.append(len(prompts))
            if len(prompts) > self.most or len(self.sizes) in self.fails_at:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            found = inner(prompts, *args, **given)
            return found * (1.0 + 1e-3 * (len(prompts) == 2))  # as kernels of other shapes, which round otherwise

        made.prompted.forward = forward


class Total:
    """Adds rows and counts how often it was emptied."""

    def __init__(self) -> None:
        self.rows: list[np.ndarray] = []
        self.cleared = 0

    def add(self, rows: np.ndarray) -> None:
        self.rows += [np.array(row, dtype=np.float64) for row in rows]

    def clear(self) -> None:
        self.rows.clear()
        self.cleared += 1


@pytest.mark.usefixtures("_rows_apart")
class TestMemory:
    def test_what_does_not_fit_is_halved_with_public_rows(self) -> None:
        made = engine("llama", "prefix", micro_batch=8)
        narrow = _Narrow(made, most=3)
        assert made.check() == 2
        assert rows_of(made, start(made), [[one] for one in examples(made)]).any()
        assert set(narrow.sizes) == {8, 4, 2}

    def test_one_row_that_does_not_fit_is_a_public_fault(self) -> None:
        made = engine("llama", "prefix")
        _Narrow(made, most=0)
        for call in (made.check, lambda: rows_of(made, start(made), [[one] for one in examples(made)])):
            with pytest.raises(ModelCallError, match="a single row; lower max_input_tokens"):
                call()

    def test_a_micro_batch_more_that_does_not_fit_moves_no_other_row(self) -> None:
        """How many units there are is private: one more, whose micro-batch does not fit, costs its own row at most."""
        made = engine("llama", "prefix", micro_batch=4)
        parameters, groups = start(made), [[one] for one in examples(made) * 2][:5]
        narrow = _Narrow(made)
        made.check(parameters)
        four = rows_of(made, parameters, groups[:4])
        for fails in ({2}, {2, 3}):
            narrow.fails_at = {len(narrow.sizes) + one for one in fails}
            total = Total()
            GradientRequest(made, parameters, groups, total).run()
            assert total.cleared == 0
            assert [bits(row) for row in total.rows[:4]] == [bits(row) for row in four]
            assert total.rows[4].any() == (fails == {2})  # alone, in the shape of its micro-batch
        assert made.check() == 4

    def test_memory_that_got_less_is_noticed_with_public_rows_in_every_step(self) -> None:
        for units in (0, 3):
            made = engine("llama", "prefix", micro_batch=4)
            parameters = start(made)
            narrow = _Narrow(made)
            made.check(parameters)
            narrow.most = 2
            total = Total()
            groups = [[one] for one in examples(made)[:units]]
            GradientRequest(made, parameters, groups, total).run()
            assert made.check() == 2
            assert not np.any(total.rows)
            GradientRequest(made, parameters, groups, total).run()
            assert all(row.any() for row in total.rows[units:])

    def test_a_row_that_is_asked_alone_after_a_fault_and_does_not_fit_counts_zero(self) -> None:
        clean = engine("llama", "prefix")
        (bad,) = clean.reader.tokens.encode("~")
        made = engine("llama", "prefix", model=raising(tiny_tuning.llama(), bad, RuntimeError()))
        made.check()
        narrow = _Narrow(made)
        narrow.fails_at = {3}
        batch = [TrainingExample("~", None, "good"), *examples(clean)]
        total = Total()
        GradientRequest(made, start(clean), [[one] for one in batch], total).run()
        assert (total.cleared, made.check(), len(total.rows)) == (0, 4, len(batch))
        assert [row.any() for row in total.rows] == [False, False, *[True] * (len(batch) - 2)]


@pytest.mark.parametrize("room", [contextlib.nullcontext, no_room])
def test_a_thread_gives_the_same_rows(room: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync_async, "_POOLS", {})
    made = engine("gpt2", "soft_prompt")
    groups = [[one] for one in examples(made)]
    found: list[np.ndarray] = []

    async def ask() -> None:
        with room():
            await made.agradients(start(made), groups, add=lambda rows: found.append(np.array(rows, dtype=np.float64)))
            assert await CheckRequest(made, start(made)).arun() is None

    asyncio.run(ask())
    assert bits(np.concatenate(found)) == bits(rows_of(made, start(made), groups))
    assert isinstance(made, GradientBackend)


@pytest.mark.parametrize("units", [0, 1])
def test_a_hook_that_came_after_the_engine_stops_a_step_with_units_and_without(units: int) -> None:
    made = engine("gpt2", "soft_prompt")
    parameters = start(made)
    foreign: dict[str, Any] = {"__name__": "spyware"}
    exec("def watch(module, args, output): pass", foreign)  # noqa: S102  a function of another package
    groups = [[example] for example in examples(made)[:1] * units]
    hook = made.prompted.model.register_forward_hook(foreign["watch"])
    try:
        with pytest.raises(UnsilencableModelError, match="spyware"):
            made.check(parameters)
        with pytest.raises(UnsilencableModelError, match="spyware"):
            rows_of(made, parameters, groups)
    finally:
        hook.remove()
    assert len(rows_of(made, parameters, groups)) == units


def test_a_hook_that_comes_behind_the_rows_stops_a_step_without_units() -> None:
    made = engine("gpt2", "soft_prompt")
    parameters = start(made)
    foreign: dict[str, Any] = {"__name__": "spyware"}
    exec("def watch(module, args, output): pass", foreign)  # noqa: S102  a function of another package
    asked = made.gradients

    class Total:
        def add(self, rows: Any) -> None: ...

        def clear(self) -> None: ...

    def watched(*given: Any, **options: Any) -> None:
        asked(*given, **options)
        made.prompted.model.register_forward_hook(foreign["watch"])

    made.gradients = watched  # type: ignore[method-assign]
    with pytest.raises(UnsilencableModelError, match="spyware"):
        GradientRequest(made, parameters, (), Total()).run()
