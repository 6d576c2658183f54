"""PromptDPSGD: builds the engine, plans and declares private training of soft prompts (Duan et al. 2023)."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from langchain_dpicl._construction import tells_how_to_build
from langchain_dpicl._plain_files import read_plain
from langchain_dpicl.backends.base import GradientBackend
from langchain_dpicl.backends.rows.gradient_rows import CheckRequest
from langchain_dpicl.backends.tuning.tasks import PromptTask, TaskKind
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.budget.events import RunEvents, tells_refusals
from langchain_dpicl.budget.handler import resolve_budget
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy._validate import Adjacency, check_int, fail
from langchain_dpicl.privacy.data.private_examples import PrivateExamples
from langchain_dpicl.privacy.extensions.method_tickets import STEP_TEMPLATE
from langchain_dpicl.release.declare_share import declare_share, share_of_delta
from langchain_dpicl.released.soft_prompt import Method, SoftPrompt, base_of
from langchain_dpicl.soft_prompts.options import ExampleFields, Optimizer, OptimizerName, Schedule, Validation
from langchain_dpicl.soft_prompts.plan import TrainingPlan, plan_training
from langchain_dpicl.soft_prompts.training_run import TrainingCheckpoint, TrainingRun, check_checkpoint_path

_KINDS: dict[str, TaskKind] = {
    "ForSequenceClassification": "sequence_classification",
    "ForMaskedLM": "masked_lm",
    "ForCausalLM": "causal_lm",
    "LMHeadModel": "causal_lm",
}
_MOST_CONFIG = 1 << 24
_TEMPLATES: dict[TaskKind, str] = {
    "causal_lm": "{text}\nLabel:",
    "masked_lm": "{text} {mask}",
    "sequence_classification": "",
}


def engine_of(
    model: Any,
    tokenizer: Any = None,
    *,
    method: str = "soft_prompt",
    num_virtual_tokens: int = 10,
    task: PromptTask | None = None,
    template: str | None = None,
    labels: Sequence[str] | None = None,
    verbalizers: Mapping[str, str] | None = None,
    max_input_tokens: int = 128,
    max_target_tokens: int = 64,
    reparameterize: int | None = None,
    micro_batch: int = 16,
    device: str | None = None,
    dtype: str | None = None,
) -> Any:
    """Returns the engine that trains a prompt of `model`; a `GradientBackend` is returned unchanged."""
    # First statement, so that `locals()` holds exactly the arguments.
    options = {name: value for name, value in locals().items() if name not in {"model", "tokenizer"}}
    if isinstance(model, GradientBackend):
        changed = sorted(_changed_options(options)) + (["tokenizer"] if tokenizer is not None else [])
        if changed:
            raise fail(", ".join(changed), "their defaults together with an engine, which has its own", "others")
        return model
    worded = {name: options.pop(name) for name in ("template", "labels", "verbalizers")}
    counts = {name: options.pop(name) for name in ("max_input_tokens", "max_target_tokens")}
    if options["task"] is None:
        options["task"] = task_of(kind_of(model), **worded, **counts)
    elif changed := sorted(_changed_options({**worded, **counts})):
        raise fail(", ".join(changed), "their defaults together with task=, which has its own", "others")
    return _engine_class()(model, tokenizer, **options)


def _changed_options(options: Mapping[str, Any]) -> list[str]:
    """Returns the names of the options that differ from their defaults."""
    defaults = inspect.signature(engine_of).parameters
    return [name for name, value in options.items() if value != defaults[name].default]


def kind_of(model: Any) -> TaskKind:
    """Returns the task kind of a model, by its class name or by the configuration in its folder."""
    names = [type(model).__name__]
    if isinstance(model, str | os.PathLike):
        names = _architectures(Path(model) / "config.json")
    for name in names:
        for ending, kind in _KINDS.items():
            if name.endswith(ending):
                return kind
    expected = f"a model whose class ends in one of {list(_KINDS)}, or the folder of one"
    raise fail("model", expected, names, "Give task=PromptTask(...) for another.")


def _architectures(path: Path) -> list[str]:
    try:
        names = json.loads(read_plain(path, _MOST_CONFIG)).get("architectures")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        advice = "Hub names are not downloaded: download the model first and pass its folder."
        raise fail("model", "a model object, or the folder of a local model", str(path.parent), advice) from error
    return [str(name) for name in names] if isinstance(names, list) else []


def task_of(
    kind: TaskKind,
    *,
    template: str | None = None,
    labels: Sequence[str] | None = None,
    verbalizers: Mapping[str, str] | None = None,
    **counts: int,
) -> PromptTask:
    """Builds the task from the single options."""
    if isinstance(labels, str | bytes) or not isinstance(labels, Sequence | None):
        raise fail("labels", "a list of texts", type(labels).__name__, 'Give labels=["...", "..."].')
    if not isinstance(verbalizers, Mapping | None):
        advice = 'Give verbalizers={"label": " word", ...}.'
        raise fail("verbalizers", "a dict from label to word", type(verbalizers).__name__, advice)
    known = tuple(labels if labels is not None else verbalizers or ())
    words = {label: f" {label}" for label in known} if verbalizers is None else dict(verbalizers)
    if set(words) != set(known):
        raise fail("verbalizers", f"one word for each of the labels {list(known)}", sorted(words))
    if kind == "sequence_classification":
        if verbalizers is not None:
            raise fail("verbalizers", "None with a classification head", sorted(verbalizers))
        words = {}
    wording = _TEMPLATES[kind] if template is None else template
    return PromptTask(kind, wording, known, tuple(words[label] for label in known if words), **counts)


def _engine_class() -> Any:
    """Imports the engine class, which needs torch."""
    missing = None
    try:
        from langchain_dpicl.backends.tuning.engine import PromptEngine
    except ImportError as error:
        missing = error.name or "torch"
    else:
        return PromptEngine
    raise ConfigurationError(f"expected the packages of local models, found no {missing}; install langchain-dpicl[hf]")


_BLOCKS = 20
"""Number of reservations of a run, by default."""


@tells_how_to_build("PromptDPSGD(model, ...).train(private, budget=..., epsilon=..., expected_batch_size=..., ...)")
class PromptDPSGD:
    r"""Trains the numbers of a prompt on private examples; the model's weights are not changed.

    Formal guarantees:
      - A step is the noisy sum of the gradients of a fresh secret Poisson sample, each unit's examples combined first
        and clipped once to `l2_clip_norm`; all steps together are (epsilon, delta)-DP for one unit.
      - The noise comes from `privacy.randomness`; seeds of torch or numpy have no effect on it.
      - Sums are divided by public numbers only, and the weights lie on a public grid.

    The paper (RoBERTa-base, batch 1,024): learning rates 5e-3 to 5e-2, clips of .01 to 4 (mostly .05 to .2), 10 to 100
    epochs, 1 to 50 virtual tokens, epsilon 3 and 8.

    Args:
      model: a local model, the path of one, or a ready `PromptEngine` (then nothing else is given). It SEES the
        private texts, on this machine.
      tokenizer: its tokenizer, or the path of one; by default that of the model's path.
      method: "soft_prompt" (embeddings in front of the text) or "prefix" (keys and values at every layer).
      num_virtual_tokens: length of the prompt.
      task: template and answers; or pass the next five arguments.
      template: see `PromptTask`; by default `{text}\nLabel:` of a causal model, `{text} {mask}` of a masked one.
      labels: the answers; for a classification head, in the order of its outputs. Without labels a causal model
        learns to write texts.
      verbalizers: label to the one token that stands for it; by default the label behind a space.
      max_input_tokens: length that every input is padded or cut to.
      max_target_tokens: maximum number of tokens of a text that the prompt learns to write.
      reparameterize: width of the network that computes the prompt in training (P-tuning v2); None: no network.
      init_text: public text that the prompt starts from; None: at random.
      micro_batch: examples per backward pass; has no effect on results.
      device: device of the model; None: unchanged.
      dtype: type of the weights of a model that is loaded from a path.

    Raises:
      ConfigurationError: a public argument is invalid, or the extra `hf` is not installed.

    Source: Duan et al. (2023), Flocks of Stochastic Parrots, Algorithm 1; docs/soft-prompts.md.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        method: Method = "soft_prompt",
        num_virtual_tokens: int = 10,
        task: PromptTask | None = None,
        template: str | None = None,
        labels: Sequence[str] | None = None,
        verbalizers: Mapping[str, str] | None = None,
        max_input_tokens: int = 128,
        max_target_tokens: int = 64,
        reparameterize: int | None = None,
        init_text: str | None = None,
        micro_batch: int = 16,
        device: str | None = None,
        dtype: str | None = None,
    ) -> None:
        if not isinstance(init_text, str | None):
            raise fail("init_text", "public text, or None for a random start", type(init_text).__name__)
        self.init_text = init_text
        self.engine: Any = engine_of(
            model,
            tokenizer,
            method=method,
            num_virtual_tokens=num_virtual_tokens,
            task=task,
            template=template,
            labels=labels,
            verbalizers=verbalizers,
            max_input_tokens=max_input_tokens,
            max_target_tokens=max_target_tokens,
            reparameterize=reparameterize,
            micro_batch=micro_batch,
            device=device,
            dtype=dtype,
        )

    @property
    def task(self) -> PromptTask:
        """Template and answers of the task."""
        task: PromptTask = self.engine.task
        return task

    def plan(
        self,
        private: PrivateExamples | int,
        *,
        epsilon: float | None = None,
        delta: float,
        expected_batch_size: int,
        steps: int | None = None,
        epochs: float | None = None,
        l2_clip_norm: float = 0.1,
        noise_multiplier: float | None = None,
        adjacency: Adjacency = "add_remove",
    ) -> TrainingPlan:
        """Returns the charge and the noise of a run; spends and binds nothing.

        Args:
          private: the examples, or their declared number of units.
          epsilon: this and the following as for `prepare`.
          delta: the share's delta.
          expected_batch_size: expected units of one step.
          steps: training steps, or give `epochs`.
          epochs: expected number of samples that contain a unit.
          l2_clip_norm: bound on the L2 norm of a unit's gradient.
          noise_multiplier: noise over the sensitivity, instead of calibrating.
          adjacency: the budget's.

        Raises:
          ConfigurationError: a public parameter is out of range.
        """
        size, partition = (
            (private.public_size_of(None), private.dataset_id)
            if isinstance(private, PrivateExamples)
            else (private, "private-examples")
        )
        return plan_training(
            size,
            epsilon=epsilon,
            delta=delta,
            expected_batch_size=expected_batch_size,
            l2_clip_norm=l2_clip_norm,
            width=self.engine.width,
            steps=steps,
            epochs=epochs,
            adjacency=adjacency,
            noise_multiplier=noise_multiplier,
            partition=partition,
        )

    @tells_refusals("PromptDPSGD")
    def prepare(
        self,
        private: PrivateExamples,
        *,
        budget: Any = None,
        config: Any = None,
        epsilon: float | None = None,
        delta: float | None = None,
        expected_batch_size: int,
        steps: int | None = None,
        epochs: float | None = None,
        l2_clip_norm: float = 0.1,
        noise_multiplier: float | None = None,
        learning_rate: float = 0.01,
        optimizer: OptimizerName = "adam",
        schedule: Schedule = "constant",
        text_key: str | None = None,
        target_key: str | None = None,
        pair_key: str | None = None,
        validation: Iterable[Mapping[str, str]] | None = None,
        validate_every: int | None = None,
        component: str | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        reserve_steps: int | None = None,
    ) -> TrainingRun:
        """Plans the noise, declares the share and returns a run; nothing is spent yet.

        All parameters are public and must not be chosen by looking at the records.

        Args:
          private: the examples; bound to the budget's ledger here.
          budget: a PrivacyBudgetCallbackHandler or Budget; otherwise looked up in `config`, then in the context.
          config: a RunnableConfig whose callbacks may hold the budget.
          epsilon: this run's share of the budget (its noise is calibrated to it). With a given noise the whole
            share is charged too; without `epsilon`, the cost of the plan at `delta`.
          delta: the share's delta; by default in proportion to epsilon.
          expected_batch_size: expected units of one step (the paper: 1,024); each is drawn independently, so the
            number drawn is secret.
          steps: training steps, or give `epochs`.
          epochs: expected number of samples that contain a unit (the paper: 10 to 100).
          l2_clip_norm: bound on the L2 norm of a unit's gradient (the paper: .01 to 4, mostly .05 to .2).
          noise_multiplier: noise over the sensitivity, instead of calibrating (its cost must fit `epsilon`).
          learning_rate: size of a step (the paper: 5e-3 to 5e-2).
          optimizer: "adam" or "sgd".
          schedule: "constant", or "linear" down towards 0.
          text_key: field of the input; by default the examples' text.
          target_key: field of the answer; by default the examples' label.
          pair_key: field of the second input, if there is one.
          validation: PUBLIC records with the same fields. Their loss is the only one that is shown.
          validate_every: steps between two validations; by default about twenty validations per run.
          component: name in the ledger; the same name and plan reopen the same share with its remaining tickets.
          checkpoint: file that stores the released weights of each step before its ticket is committed. If it exists,
            the run continues from it, with the same ledger, plan and model only, and the remaining tickets.
          reserve_steps: maximum number of tickets reserved at a time, and so of steps lost if the process is killed;
            each reservation is a durable write of the ledger. None: a twentieth of the steps, at
            least 1.

        Raises:
          ConfigurationError: a public argument is invalid; nothing was charged and no private call was made.
          ModelCallError: the model fails on synthetic text, returns non-finite numbers, or needs more memory; nothing
            was charged.
          PrivacyBudgetError: no budget, a different budget, or too small a budget.

        Source: Duan et al. (2023), Flocks of Stochastic Parrots; docs/soft-prompts.md lists the differences.
        """
        spender = resolve_budget(budget, config)
        if not isinstance(private, PrivateExamples):
            advice = "To train without privacy, use soft_prompt_without_privacy."
            raise fail("private", "PrivateExamples", type(private).__name__, advice)
        fields = ExampleFields.of(private, self.task, text_key=text_key, target_key=target_key, pair_key=pair_key)
        plan = self.plan(
            private,
            epsilon=epsilon,
            delta=share_of_delta(spender, epsilon=epsilon, delta=delta),
            expected_batch_size=expected_batch_size,
            steps=steps,
            epochs=epochs,
            l2_clip_norm=l2_clip_norm,
            noise_multiplier=noise_multiplier,
            adjacency=spender.adjacency,
        )
        block = (
            max(1, plan.steps // _BLOCKS) if reserve_steps is None else check_int("reserve_steps", reserve_steps, low=1)
        )
        rule = Optimizer(optimizer, learning_rate, schedule, plan.steps)
        public = {**plan.to_dict(), "training": {"optimizer": rule.to_dict(), **fields.to_dict(), **self._public()}}
        path = check_checkpoint_path(checkpoint)
        stored = None if path is None or not path.exists() else TrainingCheckpoint.load(path)
        terms = {"ledger_id": spender.ledger_id, "dataset_id": private.dataset_id, "adjacency": spender.adjacency}
        name = _name(spender, component, stored)
        if stored is not None:
            stored.check_is_of(component=name, public=public, **terms)
            stored.check_sizes(width=self.engine.width, num_moments=rule.num_moments)
        looks = Validation.of(fields, validation, labels=self.task.labels, every=validate_every, steps=plan.steps)
        state = rule.start(self.engine.initial(self.init_text)) if stored is None else stored.state
        if failure := CheckRequest(self.engine, state.weights).run():
            raise failure  # a failure that does not depend on records is found before anything is bound or charged
        share = declare_share(
            private, spender, plan, component=name, epsilon=epsilon, public=public, engines=[self.engine]
        )
        # A checkpoint from elsewhere must not bring weights that this share has not paid for.
        _check_paid(state.step, used=plan.steps - share.remaining(STEP_TEMPLATE))
        return TrainingRun(
            private,
            share,
            plan=plan,
            engine=self.engine,
            optimizer=rule,
            state=state,
            fields=fields,
            validation=looks,
            budget=spender,
            public=public,
            checkpoint=path,
            reserve_steps=block,
            is_resumed=stored is not None,
        )

    async def aprepare(self, private: PrivateExamples, **options: Any) -> TrainingRun:
        """Async version of `prepare`: runs in a thread, and reports refusals on the caller's loop."""
        prepare: Callable[..., TrainingRun] = inspect.unwrap(PromptDPSGD.prepare)
        async with RunEvents("PromptDPSGD", budget=options.get("budget"), config=options.get("config")):
            return await asyncio.to_thread(prepare, self, private, **options)

    def train(self, private: PrivateExamples, *, progress: bool | None = None, **options: Any) -> SoftPrompt:
        """Prepares a run and runs it; options as for `prepare`, errors as there and as for `TrainingRun.run`.

        Args:
          private: the examples; bound to the budget's ledger here.
          progress: True shows a bar, False hides it, None shows it on a terminal only.
          options: as for `prepare`.
        """
        return self.prepare(private, **options).run(progress=progress)

    async def atrain(self, private: PrivateExamples, *, progress: bool | None = None, **options: Any) -> SoftPrompt:
        """Async version of `train`."""
        return await (await self.aprepare(private, **options)).arun(progress=progress)

    def _public(self) -> dict[str, Any]:
        """Returns model, method and task as JSON values."""
        engine = self.engine
        base = base_of(engine)
        return {
            "model": base["name"],
            "weights": engine.weights_digest(),
            **({"base_weights": base["weights"]} if "weights" in base else {}),
            "tokenizer": base["tokenizer"],
            "method": engine.method,
            "num_virtual_tokens": engine.num_virtual_tokens,
            "init_text": self.init_text,
            "task": engine.task.to_dict(),
        }

    def __repr__(self) -> str:
        engine = self.engine
        return f"PromptDPSGD({engine.name!r}, method={engine.method!r}, num_virtual_tokens={engine.num_virtual_tokens})"


def _name(budget: Budget, component: str | None, stored: TrainingCheckpoint | None) -> str:
    """Returns the component's name: the given one, the checkpoint's, or a fresh one."""
    if component is not None:
        return component
    return budget.fresh_name("soft-prompt") if stored is None else stored.component


def _check_paid(step: int, *, used: int) -> None:
    """Refuses a checkpoint with more steps than the share has paid for."""
    if step > used:
        expected = f"at most the {used} steps that this component has paid for on this ledger"
        raise fail("checkpoint", expected, step, "Pass the component that paid, or another file.")
