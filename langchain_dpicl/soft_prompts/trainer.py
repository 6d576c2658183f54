"""PromptDPSGD: plans, declares and runs private training of soft prompts (Duan et al. 2023)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self

from langchain_dpicl._construction import tells_how_to_build
from langchain_dpicl.backends.base import GradientBackend, TrainingExample
from langchain_dpicl.backends.hf.backend import HuggingFaceBackend
from langchain_dpicl.backends.rows.gradient_rows import CheckRequest, GradientRequest
from langchain_dpicl.backends.sync_async import Blocking, EffectGenerator, awaitable
from langchain_dpicl.backends.tuning.tasks import PromptTask
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.budget.handler import BudgetLike, RunEvents, describe_tickets_left, resolve_budget
from langchain_dpicl.exceptions import ConfigurationError, RunInterruptedError
from langchain_dpicl.options import Noise, SoftPromptConfig, TrainableModel, Training, Where, noise_of
from langchain_dpicl.privacy._validate import check_int, fail
from langchain_dpicl.privacy.extensions.gradient_sums import running_sum
from langchain_dpicl.privacy.extensions.registry import STEP_TEMPLATE
from langchain_dpicl.privacy.ledger.shares import Reservation, Share
from langchain_dpicl.privacy.mechanisms.release_plan import Release
from langchain_dpicl.privacy.private_examples import PrivateExamples
from langchain_dpicl.release.curator import release_once
from langchain_dpicl.release.declare_share import declare_share, share_of_delta
from langchain_dpicl.released.soft_prompt import SoftPrompt, base_of
from langchain_dpicl.runs.door import door
from langchain_dpicl.runs.release_run import ReleaseRun, RunCall, RunJournal, check_paid, report_of
from langchain_dpicl.soft_prompts.plan import (
    ExampleFields,
    FieldNames,
    Floats,
    Optimizer,
    OptimizerState,
    TrainingPlan,
    Validation,
    engine_of,
    given_fields,
    plan_training,
    public_loss,
)

_BLOCKS = 20
"""Number of reservations of a run."""


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """The public state after one step; computed from released values and public records only.

    Attributes:
      step: number of updates of the weights.
      steps: number of steps of the plan.
      validation_loss: mean loss of the PUBLIC validation records; None if this step was not validated.
    """

    step: int
    steps: int
    validation_loss: float | None


@dataclass(slots=True, eq=False, repr=False)
class _Training:
    """The item of a run, which every step changes."""

    state: OptimizerState
    steps: int
    last: TrainingStep | None = None
    busy: bool = False

    @property
    def done(self) -> bool:
        """Whether all steps of the plan are made."""
        return self.state.step >= self.steps


@tells_how_to_build()
class PromptDPSGD(ReleaseRun[TrainingStep, SoftPrompt]):
    r"""Trains the numbers of a prompt on private records by DP-SGD; the model's weights are not changed.

    Build it with `from_private_examples`: a run that can be interrupted and continued, and that has spent nothing
    before its first step.

    Formal guarantees:
      - A step is the noisy sum of the gradients of a fresh secret Poisson sample, each unit's examples combined first
        and clipped once to `l2_clip_norm`. All weights that it ever shows are together (epsilon, delta)-DP for one
        unit, at the share's epsilon and delta.
      - The noise comes from `privacy.randomness`; seeds of torch or numpy have no effect on it.
      - Sums are divided by public numbers only, and the weights lie on a public grid.
      - The first reservation seals the share at the price of all steps. Tickets are reserved in blocks of a twentieth
        of the steps, at least one, each before a private record is read for it. A step's ticket burns when its first
        private call starts and is committed after its noised state is stored; unburnt tickets are returned at the end.
      - A killed process loses the tickets of its current block; they stay charged.
      - A run with fewer steps than its plan and no remaining ticket raises `RunInterruptedError`.
      - Before the first ticket of a call burns, and after the private rows of every step, the engine is tested with
        synthetic text; if it fails or returns non-finite numbers, the run stops instead of releasing noise only. This
        does not depend on records, unless one made the engine fail for later calls: such a crash is not covered.
      - Nothing but the ticket's own release depends on the records: an empty sample is a step of pure noise, and
        counts, errors, files and progress do not depend on the number of records.

    The paper (RoBERTa-base, batch 1,024): learning rates 5e-3 to 5e-2, clips of .01 to 4 (mostly .05 to .2), 10 to 100
    epochs, 1 to 50 virtual tokens, epsilon 3 and 8.

    Source: Duan et al. (2023), Flocks of Stochastic Parrots, Algorithm 1; docs/soft-prompts.md lists the differences.
    """

    _item_name: ClassVar[str] = "step"
    _unit: ClassVar[str] = "step"
    _title: ClassVar[str] = "private training"
    _reports_per_call: ClassVar[bool] = True
    plan: TrainingPlan

    def __init__(
        self,
        private: PrivateExamples,
        share: Share,
        *,
        plan: TrainingPlan,
        engine: Any,
        optimizer: Optimizer,
        state: OptimizerState,
        fields: ExampleFields,
        validation: Validation | None,
        budget: Budget,
        journal: RunJournal | None,
    ) -> None:
        self._training = _Training(state, plan.steps)
        super().__init__(private, [self._training], plan=plan, budget=budget, share=share, journal=journal)
        self.engine = engine
        self.optimizer = optimizer
        self._block = max(1, plan.steps // _BLOCKS)
        self._fields = fields
        self._validation = validation
        self._held: Reservation | None = None
        self._is_tried = False
        self._streams = 0

    @classmethod
    @door("PromptDPSGD")
    def from_private_examples(
        cls,
        private: PrivateExamples,
        *,
        llm: TrainableModel | HuggingFaceBackend | GradientBackend | Where,
        training: Training,
        budget: BudgetLike | None = None,
        epsilon: float | None = None,
        task: PromptTask | None = None,
        prompt: SoftPromptConfig | None = None,
        noise: Noise | None = None,
        fields: FieldNames | None = None,
        component: str | None = None,
        checkpoint: Where | None = None,
    ) -> Self:
        """Plans the noise, declares the share and returns a run that has not spent anything yet.

        All parameters are public and must not be chosen by looking at the records.

        Args:
          private: the examples; bound to the budget's ledger here.
          llm: a local model, which SEES the private texts on this machine: a `TrainableModel`, a folder or a
            `HuggingFaceBackend`; or an engine with gradients, which has its own task and prompt.
          training: a `Training`: batches, steps, clipping and the optimizer; see there.
          budget: the handler or budget that pays; None: the one of the context.
          epsilon: this run's share of the budget, to which the noise is calibrated. With a given noise the whole share
            is charged too; None: what the plan costs at the share's delta.
          task: a `PromptTask`: template and answers; None: the usual template of the model's kind and the examples'
            labels.
          prompt: a `SoftPromptConfig`: the numbers that are trained; see there.
          noise: a `Noise`; its mechanism is Gaussian.
          fields: the records' fields that hold the text, the target and the second text (pair); by default the
            examples' text and label, which is checked when they are built. With another target and a task with
            labels, a value that is not exactly a label counts zero, and nothing tells you.
          component: name in the ledger; the same name and plan reopen the same share with its remaining tickets.
          checkpoint: file that stores the released weights of each step before its ticket is committed. If it exists,
            the run continues from it, with the same ledger, plan and model only, and the remaining tickets. The
            weights are in two files beside it, FILE.arrays0 and FILE.arrays1: keep the three together.

        Raises:
          ConfigurationError: a public argument is invalid, or the extra `hf` is not installed; nothing was charged and
            no private call was made.
          CapabilityError: the model cannot be trained this way.
          ModelCallError: the model fails on synthetic text, returns non-finite numbers, or needs more memory; nothing
            was charged.
          PrivacyBudgetError: no budget, a different budget, or too small a budget.

        Source: Duan et al. (2023), Flocks of Stochastic Parrots; docs/soft-prompts.md lists the differences.
        """
        spender = resolve_budget(budget)
        if not isinstance(training, Training):
            raise fail("training", "Training(...)", type(training).__name__)
        wanted = noise_of(noise, Noise)
        if wanted.mechanism not in {None, "gaussian"}:
            raise fail("noise", 'the mechanism "gaussian", because gradients are summed', wanted.mechanism)
        named = ExampleFields.of(private, fields)
        engine = engine_of(llm, task=task, prompt=prompt, labels=named.labels_of(private))
        if not hasattr(engine, "weights_digest"):
            advice = "The ledger names the weights by it: add it to the engine."
            raise fail("llm", "an engine that also has weights_digest", type(engine).__name__, advice)
        _check_kept(engine, is_continued=checkpoint is not None)
        named.check_task(engine.task, private, is_target_given="target" in given_fields(fields))
        plan = plan_training(
            private.public_size_of(None),
            epsilon=epsilon,
            delta=share_of_delta(spender, epsilon=epsilon, delta=wanted.delta),
            expected_batch_size=training.expected_batch_size,
            l2_clip_norm=training.l2_clip_norm,
            width=engine.width,
            steps=training.steps,
            epochs=training.epochs,
            adjacency=spender.adjacency,
            noise_multiplier=wanted.multiplier,
            partition=private.dataset_id,
        )
        rule = Optimizer(training.optimizer, training.learning_rate, training.schedule, plan.steps)
        text = None if prompt is None else prompt.init_text
        shown = {"optimizer": rule.to_dict(), **named.to_dict(), **_describe(engine, text)}
        public = {**plan.to_dict(), "training": shown}
        name, journal = RunJournal.of(
            checkpoint, component, "soft-prompt", budget=spender, private=private, plan=public
        )
        looks = Validation.of(named, training, labels=engine.task.labels, steps=plan.steps)
        state = rule.start(engine.initial(text))
        if journal is not None and journal.entries:
            # The step's own number: Ctrl-C may have kept the line of an earlier one out of the file.
            step = check_int("step", journal.entries[-1].get("step"), low=len(journal.entries), high=plan.steps)
            state = rule.restored(step, journal.arrays(), width=engine.width)
        if failure := CheckRequest(engine, state.weights).run():
            raise failure  # a failure that does not depend on records is found before anything is bound or charged
        share = declare_share(private, spender, plan, component=name, epsilon=epsilon, public=public, engines=[engine])
        # A checkpoint from elsewhere must not bring weights that this share has not paid for.
        check_paid(state.step, used=plan.steps - share.remaining(STEP_TEMPLATE), what="steps")
        return cls(
            private,
            share,
            plan=plan,
            engine=engine,
            optimizer=rule,
            state=state,
            fields=named,
            validation=looks,
            budget=spender,
            journal=journal,
        )

    afrom_private_examples = awaitable(from_private_examples)

    @property
    def step(self) -> int:
        """Number of updates of the weights so far."""
        return self._training.state.step

    @property
    def steps_left(self) -> int:
        """Number of remaining paid steps."""
        reservation = self._held
        return self.share.remaining(STEP_TEMPLATE) + (0 if reservation is None else reservation.unburnt)

    @property
    def weights(self) -> Floats:
        """The released weights, float64[width] on the grid of 2^-24, read-only."""
        return self._training.state.weights

    @property
    def report(self) -> dict[str, Any]:
        """The privacy report of all steps of the run (public)."""
        shown = {"step": self.step, "steps": self.plan.steps}
        return report_of(self._budget, self.share, self.plan, **shown)

    # -- the hooks of `ReleaseRun` -----------------------------------------------------------------------------------

    def _make(self, item: _Training, call: RunCall) -> EffectGenerator[None]:
        """Makes one step (an effect generator) and validates it if due; none without a ticket."""
        item.last = None
        ticket = self._ticket(call.events)
        if ticket is None:
            return
        # Tested once per call of `stream`, with synthetic text.
        if not self._is_tried and (failure := (yield CheckRequest(self.engine, self.weights))):
            raise failure  # before the ticket burns
        self._is_tried = True
        with self._committing(ticket, lambda: self.step):
            yield from release_once(
                self._private,
                ticket,
                plan=self.plan.release,
                rows=self._ask,
                render=self._fields.examples_of,
                width=self.engine.width,
                keep=lambda released: self._keep(released, ticket),
            )
        loss = None
        if self._validation is not None and self._validation.is_due(self.step, steps_left=self.steps_left):
            loss = yield Blocking(partial(public_loss, self.engine, self.weights, self._validation.examples))
            with suppress(OSError, ValueError):  # a terminal that went away does not stop a paid run
                call.bar.set_postfix_str(f"public validation loss {loss:.4g}", refresh=False)
        item.last = TrainingStep(self.step, item.steps, loss)
        call.tick()

    def _examples(self, item: _Training) -> list[TrainingStep]:
        return [] if item.last is None else [item.last]

    def _value(self) -> SoftPrompt:
        return SoftPrompt.of(self.engine, self.weights, report=self.report)

    def _open_items(self) -> Iterator[_Training]:
        while not self.is_finished:
            if not self.steps_left and not self._training.busy:
                raise RunInterruptedError(
                    "PromptDPSGD stopped: expected a ticket for each step of the plan, found none left. "
                    f"{self._so_far()} released and kept; the tickets of the others were lost to errors, to killed "
                    "processes or to another run, and stay charged. Use error.run.result, or train again as another "
                    "component.",
                    run=self,
                )
            yield self._training

    def _steps_left(self) -> int:
        return self.steps_left

    def _so_far(self) -> str:
        return f"{self.step} of {self.plan.steps} steps are"

    @contextmanager
    def _session(self, events: RunEvents) -> Iterator[None]:
        """Holds tickets; the last stream to end returns the unburnt ones."""
        with super()._session(events):
            with self._lock.here:
                self._streams += 1
                self._is_tried = False
            try:
                yield
            finally:
                with self._lock.here:
                    self._streams -= 1
                    reservation = self._held
                    if reservation is not None and not self._streams:
                        self._held = None
                        events.tickets -= reservation.give_back()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _ask(self, groups: Sequence[Sequence[TrainingExample] | None]) -> GradientRequest:
        total = running_sum(self.plan.release, self.engine.width)
        return GradientRequest(self.engine, self.weights, groups, total)

    def _keep(self, released: Release, ticket: Reservation) -> None:
        """Updates the weights from a release, and writes them into the journal."""
        if released.values is None:
            raise ConfigurationError("mechanism: expected one that releases a vector, found another.")
        # Divided by public numbers only, so that the number of drawn units stays secret.
        gradient = released.values * self.plan.average_factor
        state = self._training.state = self.optimizer.update(self._training.state, gradient)
        self._record({"step": state.step}, ticket, arrays=state.to_bytes())

    def _ticket(self, events: RunEvents) -> Reservation | None:
        """Returns a reservation with an unburnt ticket, a new one if necessary; None: no ticket remains."""
        with self._lock.here:
            if self._held is not None and self._held.unburnt:
                return self._held
            if self._journal is not None:
                self._journal.flush()  # refuses a file that another run wrote to, before anything is charged
            if not (remaining := self.share.remaining(STEP_TEMPLATE)):
                return None
            self._held = self.share.reserve(STEP_TEMPLATE, count=min(remaining, self._block))
            events.tickets += self._held.count
            return self._held

    def __repr__(self) -> str:
        remaining = describe_tickets_left(lambda: self.steps_left)
        return f"PromptDPSGD(component={self.component!r}, step={self.step}, steps_left={remaining})"


def _check_kept(engine: Any, *, is_continued: bool) -> None:
    """Refuses weights made at random that nothing keeps: a prompt brings the head alone, and a checkpoint not even it.

    No other process would have them again, and so could not use, or continue, what was paid for.
    """
    made: frozenset[str] = getattr(engine, "random_weights", frozenset())
    kept = {name.removeprefix("base_model.") for name in engine.head()} if made and not is_continued else set()
    if lost := sorted(made - kept):
        expected = "a folder with all weights of the model" + (" beside checkpoint=" if is_continued else "")
        raise ConfigurationError(
            f"llm: expected {expected}, found none for {lost[:3]}: they are made at random at each load. Save the "
            "model once with save_pretrained, and pass that folder."
        )


def _describe(engine: Any, init_text: str | None) -> dict[str, Any]:
    """Returns model, method and task as JSON values."""
    base = base_of(engine)
    return {
        "model": base["name"],
        "weights": engine.weights_digest(),
        **({"base_weights": base["weights"]} if "weights" in base else {}),
        "tokenizer": base["tokenizer"],
        "method": engine.method,
        "num_virtual_tokens": engine.num_virtual_tokens,
        "init_text": init_text,
        "task": engine.task.to_dict(),
    }
