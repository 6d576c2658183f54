"""Trains a prompt step by step: what a step is, what stops a run, how it goes on. Never sees a record, a row or a sum.

Knows tickets, released weights and files; which gradients are asked for is the engine's part, how a run is planned
that of `soft_prompts`.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from langchain_dpicl._optimizers import Floats, Optimizer, OptimizerState
from langchain_dpicl._training_checkpoint import Checkpoint
from langchain_dpicl._training_options import AskLoss, ExampleFields, Validation
from langchain_dpicl.backends.aside import Aside, aside
from langchain_dpicl.backends.base import TrainingExample
from langchain_dpicl.backends.gradients import AskCheck, AskGradients
from langchain_dpicl.backends.walk import Walk, adrive, drive
from langchain_dpicl.callbacks import shown_left
from langchain_dpicl.curator import release_once
from langchain_dpicl.exceptions import (
    ConfigurationError,
    ModelCallError,
    TrainingInterruptedError,
)
from langchain_dpicl.privacy._validate import fail
from langchain_dpicl.privacy.examples import PrivateExamples
from langchain_dpicl.privacy.ledger import Budget, Reservation, Share
from langchain_dpicl.privacy.mechanisms import Release
from langchain_dpicl.privacy.shares import Uncopyable
from langchain_dpicl.privacy.training_tickets import STEP_TEMPLATE
from langchain_dpicl.run_events import RunEvents
from langchain_dpicl.soft_prompt import SoftPrompt
from langchain_dpicl.training_planning import TrainingPlan


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """What is told of one step. Public: nothing of it is computed from private data but what was released.

    Attributes:
      step: how many updates the weights have had.
      steps_left: steps that are still paid for.
      validation_loss: mean loss of the PUBLIC validation records; None where this step was not looked at.
    """

    step: int
    steps_left: int
    validation_loss: float | None


class TrainingRun(Uncopyable):
    """A run of `PromptDPSGD`, with what it needs to stop and to go on. Made by `PromptDPSGD.prepare`.

    Formal guarantees:
      - All weights that it ever shows are, together, (epsilon, delta)-DP for one unit, at the share's numbers.
      - The first reservation seals the share at the price of all steps. Tickets are reserved in blocks of at most
        `reserve_steps`, each before a private record is read for it. A step's ticket burns when its first private call
        starts and is committed after its noised state is safe; what never burnt goes back at the end.
      - A killed process takes along the tickets of the block that it holds, at most `reserve_steps`; they stay charged.
      - A run that has made fewer steps than its plan and has no ticket left raises `TrainingInterruptedError`.
      - Before the first ticket of a call burns, and behind the private rows of every step, the engine is tried out with
        made-up text; where it fails, or has no numbers, the run stops instead of going on with noise alone. No record
        has a part in that, unless it made the engine fail for what comes after it: such a crash is not covered.
      - Nothing but the ticket's own release depends on the records: an empty sample is a step of pure noise, and
        neither counts, errors, files nor progress tell how many records there are.
    """

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
        public: Mapping[str, Any],
        checkpoint: Path | None,
        reserve_steps: int,
        is_resumed: bool = False,
    ) -> None:
        self.plan = plan
        self.reserve_steps = reserve_steps
        self.engine = engine
        self.optimizer = optimizer
        self._private = private
        self._share = share
        self._state = state
        self._fields = fields
        self._validation = validation
        self._budget = budget
        self._public = dict(public)
        self._checkpoint = checkpoint
        self._is_behind = True
        self._on_file = state if is_resumed else None  # what the checkpoint holds, as far as this run knows
        self._held: Reservation | None = None
        self._is_tried = False
        self._unsettled: list[Reservation] = []
        self._streams = 0
        self._turn = threading.Lock()
        self._lock = threading.Lock()

    @property
    def step(self) -> int:
        """Updates that the weights have had so far."""
        return self._state.step

    @property
    def steps_left(self) -> int:
        """Steps that are still paid for."""
        reservation = self._held
        return self._share.remaining(STEP_TEMPLATE) + (0 if reservation is None else reservation.unburnt)

    @property
    def weights(self) -> Floats:
        """The released weights, float64[width] on the grid of 2^-24, read-only."""
        return self._state.weights

    @property
    def report(self) -> dict[str, Any]:
        """What the run costs, all its steps together, and who pays (public)."""
        return {
            "private": True,
            "epsilon": self._share.epsilon,
            "delta": self._share.delta,
            "adjacency": self._budget.adjacency,
            "component": self._share.component,
            "dataset_id": self.plan.partition,
            "ledger_id": self._budget.ledger_id,
            "step": self.step,
            "steps": self.plan.steps,
            "budget": self._budget.report().to_dict(),
        }

    @property
    def soft_prompt(self) -> SoftPrompt:
        """The prompt as it stands: free, at any time."""
        return SoftPrompt.of(self.engine, self.weights, report=self.report)

    def run(self, *, progress: bool | None = None) -> SoftPrompt:
        """Trains until the share is spent, and returns the prompt.

        Args:
          progress: True shows a bar, False hides it, None shows it on a terminal only.

        Raises:
          TrainingInterruptedError: the model failed on something public; released weights are kept, and calling `run`
            again goes on with the steps whose tickets did not burn. Also where tickets were lost, to an error or to a
            process that was killed, and the last one burnt before the last step: `error.soft_prompt` is the prompt
            as it stands. Other errors and Ctrl-C carry `training_run` too.
          PrivacyBudgetError: the share no longer fits the budget.
        """
        for _ in self.stream(progress=progress):
            pass
        return self.soft_prompt

    async def arun(self, *, progress: bool | None = None) -> SoftPrompt:
        """Is `run`, awaitable: the engine works in a thread."""
        async for _ in self.astream(progress=progress):
            pass
        return await aside(lambda: self.soft_prompt, is_slow=self._budget.durable)

    def stream(self, *, progress: bool | None = None) -> Iterator[TrainingStep]:
        """Yields each step as soon as its weights are released; errors as in `run`."""
        with (
            self._events() as events,
            self._carried(),
            self._tickets(events) as remaining,
            self._bar(progress, remaining) as bar,
        ):
            while self.step < self.plan.steps:
                failure, step = "", None
                try:
                    step = drive(self._step(events))
                except ModelCallError as error:
                    failure = str(error)
                yield self._told(step, failure, bar)

    async def astream(self, *, progress: bool | None = None) -> AsyncIterator[TrainingStep]:
        """Is `stream`, awaitable."""
        is_slow = self._budget.durable
        async with self._events() as events:
            tickets = Aside(self._tickets(events), is_slow=is_slow)
            with self._carried():
                async with tickets as remaining:
                    with self._bar(progress, remaining) as bar:
                        while self.step < self.plan.steps:
                            failure, told = "", None
                            try:
                                told = await adrive(self._step(events), is_slow=is_slow)
                            except ModelCallError as error:
                                failure = str(error)
                            step = self._told(told, failure, bar)
                            tickets.is_at_yield = True
                            yield step
                            tickets.is_at_yield = False

    def _step(self, events: RunEvents) -> Walk[TrainingStep | None]:
        """Makes one step (a walk), and looks at the public records where it is time to; None: no ticket is left."""
        with self._alone():
            ticket = self._ticket(events)
            if ticket is None:
                return None
            if not self._is_tried and (failure := (yield AskCheck(self.engine, self.weights))):
                raise failure  # before the ticket burns
            self._is_tried = True
            yield from release_once(
                self._private,
                ticket,
                plan=self.plan.release,
                rows=self._ask,
                render=self._fields.examples_of,
                width=self.engine.width,
                keep=lambda released: self._keep(released, ticket),
            )
            self._unsettled.remove(ticket)
            loss = None
            if self._validation is not None and self._validation.is_due(self.step, steps_left=self.steps_left):
                loss = yield AskLoss(self.engine, self.weights, self._validation.examples)
            return TrainingStep(self.step, self.steps_left, loss)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Lets nobody else move or settle what was released."""
        if not self._turn.acquire(blocking=False):
            msg = "run: expected one step at a time, found another call that trains. Wait for it, or build another run."
            raise ConfigurationError(msg)
        try:
            yield
        finally:
            self._turn.release()

    def _ask(self, groups: Sequence[Sequence[TrainingExample] | None]) -> AskGradients:
        total = self.plan.release.running_sum(self.engine.width)
        return AskGradients(self.engine, self.weights, groups, total)

    def _keep(self, released: Release, ticket: Reservation) -> None:
        """Moves the weights by what was released, and makes them safe."""
        if released.values is None:
            raise ConfigurationError("mechanism: expected one that releases a vector, found another.")
        # Divided by public numbers alone: how many units were drawn stays unknown.
        gradient = released.values * self.plan.average_factor
        state = self.optimizer.updated(self._state, gradient)
        self._unsettled.append(ticket)
        self._state, self._is_behind = state, True
        self._save()

    def _save(self) -> None:
        """Writes the checkpoint where it is behind."""
        with self._lock:
            if self._checkpoint is None or not self._is_behind:
                return
            self._is_behind = False
            try:
                self._kept.save(self._checkpoint)
                self._on_file = self._state
            except BaseException:
                self._is_behind = True
                raise

    def _check_file(self) -> None:
        """Refuses to write over what another run has released since.

        Raises:
          ConfigurationError: the file holds another state than this run left or found there.
        """
        if self._checkpoint is None or not self._checkpoint.exists():
            return
        sizes = {"width": len(self.weights), "num_moments": len(self._state.moments)}
        on_disk = Checkpoint.load(self._checkpoint, **sizes)
        # Ctrl-C may have come right behind the write.
        ours = [known for known in (self._on_file, self._state) if known is not None and known.is_same(on_disk.state)]
        if not ours or on_disk.component != self._share.component:
            advice = "Prepare the run again, which goes on from the file; or take another file."
            raise fail("checkpoint", "the state that this run left there", "one that another run released", advice)

    @property
    def _kept(self) -> Checkpoint:
        return Checkpoint(
            component=self._share.component,
            ledger_id=self._budget.ledger_id,
            dataset_id=self.plan.partition,
            adjacency=self._budget.adjacency,
            public=self._public,
            state=self._state,
        )

    def _settle(self) -> None:
        """Commits what was released before and is safe by now: a disk may have been full as it came."""
        with self._alone():
            self._check_file()
            self._save()  # at the start: the component's name is safe before anything is paid for
            while self._unsettled:
                if self._unsettled[-1].uncommitted:  # Ctrl-C may have come right behind the commit
                    self._unsettled[-1].commit()
                self._unsettled.pop()

    @contextmanager
    def _tickets(self, events: RunEvents) -> Iterator[int]:
        """Gives the number of steps left; unburnt tickets go back when the last of the streams ends."""
        self._settle()
        with self._lock:
            self._streams += 1
            self._is_tried = False
        try:
            yield self.steps_left
        finally:
            with self._lock:
                self._streams -= 1
                reservation = self._held
                if reservation is not None and not self._streams:
                    self._held = None
                    events.tickets -= reservation.give_back()

    def _ticket(self, events: RunEvents) -> Reservation | None:
        """Returns a reservation with a ticket to burn, made now where the last one has none; None: no ticket is left.

        Raises:
          ConfigurationError: another run wrote the checkpoint since; found before anything more is reserved.
        """
        with self._lock:
            if self._held is not None and self._held.unburnt:
                return self._held
            if self._held is not None:
                self._check_file()
            if not (remaining := self._share.remaining(STEP_TEMPLATE)):
                return None
            self._held = self._share.reserve(STEP_TEMPLATE, count=min(remaining, self.reserve_steps))
            events.tickets += self._held.count
            return self._held

    def _told(self, step: TrainingStep | None, failure: str, bar: Any) -> TrainingStep:
        """Returns a step that was made; reports an interruption, from a frame without a cause."""
        if step is None:
            advice = "tickets that burnt stay charged. Call run() on error.training_run to go on."
            if not failure:
                failure = "expected a ticket for each step of the plan, found none left"
                advice = (
                    "the tickets of the others were lost to errors, to killed processes or to another run, and stay "
                    "charged. Take error.soft_prompt as it stands, or train again as another component."
                )
            msg = f"Training stopped: {failure.rstrip('.')}. {self.step} of {self.plan.steps} steps are made and kept; "
            raise TrainingInterruptedError(msg + advice, training_run=self)
        with suppress(OSError, ValueError):  # a terminal that went away does not stop a paid run
            if step.validation_loss is not None:
                bar.set_postfix_str(f"public validation loss {step.validation_loss:.4g}", refresh=False)
            bar.update()
        return step

    @contextmanager
    def _carried(self) -> Iterator[None]:
        """Whatever ends the block, the error carries this run."""
        try:
            yield
        except BaseException as error:
            with suppress(AttributeError, TypeError):
                error.training_run = self  # type: ignore[attr-defined]
            raise

    def _events(self) -> RunEvents:
        return RunEvents("PromptDPSGD", budget=self._budget, share=self._share)

    def _bar(self, progress: bool | None, total: int) -> Any:
        hidden = None if progress is None else not progress
        return tqdm(total=total, unit="step", desc="private training", disable=hidden, leave=False)

    def __repr__(self) -> str:
        remaining = shown_left(lambda: self.steps_left)
        return f"TrainingRun(component={self._share.component!r}, step={self.step}, steps_left={remaining})"
