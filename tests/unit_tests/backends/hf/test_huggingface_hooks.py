"""Hooks on torch modules see private token ids: they are refused before a private forward, but for the library's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import accelerate
import numpy as np
import peft
import pytest
import torch
import wrapt
from torch.nn.modules import module as modules

from langchain_dpicl.backends import allow_wrappers
from langchain_dpicl.backends.base import TrainingExample
from langchain_dpicl.backends.hf.model_checks import Hooks
from langchain_dpicl.backends.tuning.engine import PromptEngine
from langchain_dpicl.backends.tuning.tasks import PromptTask
from langchain_dpicl.exceptions import CapabilityError, UnsilencableModelError
from tests import tiny_hf
from tests.canary import RECORD
from tests.unit_tests.backends.hf_doubles import engine

PROMPT = f"about {RECORD}"
IDS = tiny_hf.byte_tokenizer()(PROMPT)["input_ids"]


class Tap:
    """Keeps the ids that pass."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def pre(self, module: Any, args: Any, kwargs: Any) -> None:
        self.seen += [
            each.tolist()
            for each in (*args, *kwargs.values())
            if torch.is_tensor(each) and not each.is_floating_point()
        ]

    def pre_all(self, module: Any, args: Any) -> None:
        self.pre(module, args, {})

    def post(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        self.pre(module, args, kwargs)

    def wrapped(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        self.pre(None, args, kwargs)
        return wrapped(*args, **kwargs)

    @property
    def heard(self) -> bool:
        """Whether the ids of the canary passed, in one row."""
        end = IDS[-9:-1]  # the last one is read by itself
        return any(
            _has(row, end) for rows in self.seen for row in (rows if rows and isinstance(rows[0], list) else [rows])
        )


def _has(row: Any, end: list[int]) -> bool:
    return isinstance(row, list) and any(row[at : at + len(end)] == end for at in range(len(row)))


def replaced(model: Any, tap: Tap) -> Callable[[], None]:
    model.forward = wrapt.FunctionWrapper(model.forward, tap.wrapped)
    return lambda: vars(model).pop("forward")


def replaced_in_class(model: Any, tap: Tap) -> Callable[[], None]:
    kind = type(model)
    was = kind.forward
    kind.forward = wrapt.FunctionWrapper(was, tap.wrapped)

    def undo() -> None:
        kind.forward = was

    return undo


PLACES: dict[str, Callable[[Any, Tap], Callable[[], None]]] = {
    "before the model": lambda model, tap: model.register_forward_pre_hook(tap.pre, with_kwargs=True).remove,
    "after the model": lambda model, tap: model.register_forward_hook(tap.post, with_kwargs=True).remove,
    "before a part": lambda model, tap: model.get_input_embeddings().register_forward_pre_hook(tap.pre_all).remove,
    "before every module": lambda _, tap: modules.register_module_forward_pre_hook(tap.pre_all).remove,
    "after every module": lambda _, tap: modules.register_module_forward_hook(lambda m, a, o: tap.pre_all(m, a)).remove,
    "in place of forward": replaced,
    "in place of the class's": replaced_in_class,
}


@pytest.fixture
def tap() -> Iterator[tuple[Tap, list[Callable[[], None]]]]:
    undo: list[Callable[[], None]] = []
    yield Tap(), undo
    for each in undo:
        each()


ASKED: dict[str, Callable[[Any], Any]] = {
    "session": lambda made: made.open([PROMPT]).score([5]),
    "choices": lambda made: made.score_choices([PROMPT], ["yes", "no"]),
    "text": lambda made: made.complete([PROMPT], max_tokens=2),
    # How many rows a sample has decides no error.
    "choices of no row": lambda made: made.score_choices([], ["yes", "no"]),
    "texts of no row": lambda made: made.complete([], max_tokens=2),
}


class TestForeignHooks:
    @pytest.mark.parametrize("place", PLACES)
    def test_see_what_a_public_call_says(self, tap: Any, place: str) -> None:
        model = tiny_hf.llama()
        made = engine(model)
        tap[1].append(PLACES[place](model, tap[0]))
        made.complete([PROMPT], max_tokens=1, public=True)
        # While it fills its cache a model may be stopped before its end.
        assert tap[0].heard or (place == "after the model" and tap[0].seen)

    @pytest.mark.parametrize("asked", ASKED)
    @pytest.mark.parametrize("place", PLACES)
    def test_stop_private_calls_until_they_are_removed(self, tap: Any, place: str, asked: str) -> None:
        model = tiny_hf.llama()
        made = engine(model)
        undo = PLACES[place](model, tap[0])
        with pytest.raises(
            UnsilencableModelError, match=r"test_huggingface_hooks is in the path of .* allow_wrappers\("
        ):
            ASKED[asked](made)
        assert not tap[0].heard
        undo()
        ASKED[asked](made)
        assert not tap[0].heard

    @pytest.mark.parametrize("place", PLACES)
    def test_are_refused_when_an_engine_is_built(self, tap: Any, place: str) -> None:
        model = tiny_hf.llama()
        tap[1].append(PLACES[place](model, tap[0]))
        with pytest.raises(UnsilencableModelError, match=r"handle\.remove\(\)"):
            engine(model)

    def test_are_accepted_where_the_operator_names_their_module(self, tap: Any) -> None:
        model = tiny_hf.llama()
        tap[1].append(PLACES["before the model"](model, tap[0]))
        allow_wrappers(__name__)
        ASKED["text"](engine(model))
        assert tap[0].heard

    def test_that_come_between_two_tokens_stop_the_session(self, tap: Any) -> None:
        model = tiny_hf.llama()
        made = engine(model)
        session, token = made.open([PROMPT]), made.vocabulary()[0]
        session.score([token])
        tap[1].append(PLACES["before every module"](model, tap[0]))
        session.push(token)
        with pytest.raises(UnsilencableModelError):
            session.score([token])
        assert not tap[0].heard


class TestTraining:
    @staticmethod
    def made(model: Any) -> PromptEngine:
        task = PromptTask("causal_lm", "{text}\n", max_input_tokens=24, max_target_tokens=4)
        options: Any = {"method": "soft_prompt", "num_virtual_tokens": 2, "task": task}
        return PromptEngine(model, tiny_hf.byte_tokenizer(), **options)

    @pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
    def test_hooks_of_gradients_are_refused(self, register: str) -> None:
        model = tiny_hf.llama()
        handle = getattr(model.model.norm, register)(lambda *_: None)
        with pytest.raises(UnsilencableModelError, match=r"LlamaRMSNorm\.backward_"):
            Hooks(model)
        handle.remove()
        Hooks(model)

    def test_hooks_that_come_later_stop_a_step(self, tap: Any) -> None:
        model = tiny_hf.llama()
        trained = self.made(model)
        groups = [[TrainingExample(PROMPT, target="good")]]
        rows: list[Any] = []
        trained.gradients(trained.initial(), groups, add=rows.append)
        assert len(rows) == 1
        tap[1].append(PLACES["before every module"](model, tap[0]))
        with pytest.raises(UnsilencableModelError):
            trained.gradients(trained.initial(), groups, add=rows.append)
        assert len(rows) == 1


class Stubborn(torch.nn.Dropout):
    """Drops numbers out whatever mode the model is put into, as Monte Carlo dropout is also written."""

    def train(self, mode: bool = True) -> Any:
        return super().train(mode or True)


class Stuck(torch.nn.Dropout):
    """Is always in training mode."""

    @property
    def training(self) -> bool:
        return True

    @training.setter
    def training(self, mode: bool) -> None:
        pass


def _train_one_block(model: Any) -> None:
    model.transformer.h[0].train()


def _add_stubborn(model: Any) -> None:
    model.transformer.drop = Stubborn(0.5)


class TestPartsInTrainingMode:
    """The flag of the model itself says nothing of its parts, where dropout would take coins by a row's place."""

    @staticmethod
    def stay(model: Any, ask: Callable[[], Any], change: Callable[[Any], None]) -> bool:
        before = np.asarray(ask())
        change(model)
        assert not model.training
        return bool(np.array_equal(before, np.asarray(ask())))

    @pytest.mark.parametrize("change", [_train_one_block, _add_stubborn])
    @pytest.mark.parametrize(
        "ask",
        [
            lambda made: made.open([PROMPT]).score([5, 6, 7]),
            lambda made: made.score_choices([PROMPT], ["yes", "no"]),
            lambda made: made.complete([PROMPT], max_tokens=12),
        ],
        ids=["votes", "choices", "texts"],
    )
    def test_change_no_private_row(self, ask: Callable[[Any], Any], change: Callable[[Any], None]) -> None:
        model = tiny_hf.gpt2()
        made = engine(model)
        assert self.stay(model, lambda: ask(made), change)

    @pytest.mark.parametrize("change", [_train_one_block, _add_stubborn])
    def test_change_no_gradient(self, change: Callable[[Any], None]) -> None:
        model = tiny_hf.gpt2()
        trained = TestTraining.made(model)
        prompt = trained.initial("the sea")
        groups = [[TrainingExample(PROMPT, target="good")]]

        def ask() -> Any:
            rows: list[Any] = []
            trained.gradients(prompt, groups, add=lambda found: rows.append(np.array(found)))
            return np.concatenate(rows)

        assert self.stay(model, ask, change)

    def test_change_no_row_of_the_first_call(self) -> None:
        """Its public trials of the model, too, run in evaluation mode."""
        model = tiny_hf.gpt2()
        expected, made = np.asarray(engine(model).open([PROMPT]).score([5, 6, 7])), engine(model)
        _train_one_block(model)
        assert np.array_equal(expected, np.asarray(made.open([PROMPT]).score([5, 6, 7])))

    def test_change_no_public_answer(self) -> None:
        model = tiny_hf.gpt2()
        expected, made = engine(model).top_tokens("public words", [], top_k=3), engine(model)
        made.open([PROMPT]).score([5])
        _train_one_block(model)
        assert made.top_tokens("public words", [], top_k=3) == expected

    def test_that_cannot_leave_it_are_refused(self) -> None:
        model = tiny_hf.gpt2()
        model.transformer.drop = Stuck(0.5)
        with pytest.raises(CapabilityError, match="found Stuck"):
            engine(model)

    def test_are_put_into_evaluation_mode_when_an_engine_is_built(self) -> None:
        model = tiny_hf.gpt2()
        _add_stubborn(model)
        engine(model)
        assert not any(part.training for part in model.modules())


class TestTheLibrariesOwn:
    def test_hooks_are_accepted(self) -> None:
        model = tiny_hf.llama()
        accelerate.hooks.add_hook_to_module(model.model.norm, accelerate.hooks.AlignDevicesHook())
        torch.nn.utils.parametrizations.weight_norm(model.model.layers[0].mlp.up_proj)
        assert np.isfinite(engine(model).score_choices([PROMPT], ["yes"])).all()

    def test_adapters_are_accepted(self) -> None:
        Hooks(peft.get_peft_model(tiny_hf.llama(), peft.LoraConfig(target_modules=["q_proj"])))

    def test_hooks_of_accelerate_are_those_of_its_classes_alone(self) -> None:
        """A hook of a user's own is called by the same wrapper."""

        class Mine(accelerate.hooks.ModelHook):
            pass

        model = tiny_hf.llama()
        for hook in (Mine(), accelerate.hooks.SequentialHook(accelerate.hooks.AlignDevicesHook(), Mine())):
            accelerate.hooks.add_hook_to_module(model, hook)
            with pytest.raises(UnsilencableModelError, match="test_huggingface_hooks is in the path of"):
                Hooks(model)
            accelerate.hooks.remove_hook_from_module(model)
        Hooks(model)
