"""Trains a prompt step by step: makes, interrupts and continues a run, and keeps its checkpoint file."""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from langchain_dpicl._plain_files import MAX_ARRAYS, check_target
from langchain_dpicl.backends.base import TrainingExample
from langchain_dpicl.backends.rows.gradient_rows import CheckRequest, GradientRequest
from langchain_dpicl.backends.sync_async import EffectGenerator, ThreadedContext, run_async, run_sync
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.budget.events import RunEvents
from langchain_dpicl.budget.handler import describe_tickets_left
from langchain_dpicl.exceptions import (
    ConfigurationError,
    TrainingInterruptedError,
)
from langchain_dpicl.privacy._validate import check_int, fail
from langchain_dpicl.privacy.data.private_examples import PrivateExamples
from langchain_dpicl.privacy.extensions.gradient_sums import running_sum
from langchain_dpicl.privacy.extensions.method_tickets import STEP_TEMPLATE
from langchain_dpicl.privacy.ledger.shares import Reservation, Share, Uncopyable
from langchain_dpicl.privacy.mechanisms.noise import Release
from langchain_dpicl.release.curator import release_once
from langchain_dpicl.released.files import FileForm, plain_json, write_whole
from langchain_dpicl.released.soft_prompt import SoftPrompt
from langchain_dpicl.runs.streamed_run import StreamedRun, attempt, carrying, new_bar, report_of
from langchain_dpicl.soft_prompts.options import (
    LARGEST_WEIGHT,
    WEIGHT_GRID,
    ExampleFields,
    Floats,
    LossRequest,
    Optimizer,
    OptimizerState,
    Validation,
)
from langchain_dpicl.soft_prompts.plan import TrainingPlan

_TERMS = ("component", "ledger_id", "dataset_id", "adjacency")
_FOLLOWING = re.compile(r"release\.|(epochs|implementation_delta|noise_scale|sampling_rate|width)$")
"""Public numbers that follow from others; named in messages only if nothing else differs."""
_NOTHING = "nothing"
_FORM = FileForm(
    "training checkpoint",
    "langchain-dpicl/training-checkpoint",
    1,
    frozenset({*_TERMS, "public", "step", "weights", "moments"}),
)


@dataclass(frozen=True, slots=True)
class TrainingCheckpoint:
    """The content of a checkpoint: the run's public terms and its released state.

    Vectors are stored as base64 of little-endian float64, so that a run continues with the same bits. The file is
    untrusted: it is checked and compared with the run before anything is charged.

    Attributes:
      component: name of the share that pays.
      ledger_id: the ledger.
      dataset_id: the private data set.
      adjacency: the neighbouring relation.
      public: the plan, the optimizer and the model, as JSON values.
      state: the state after the last released step.
    """

    component: str
    ledger_id: str
    dataset_id: str
    adjacency: str
    public: Mapping[str, Any]
    state: OptimizerState

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the file atomically: a reader sees the old file or the whole new one."""
        terms = {name: getattr(self, name) for name in _TERMS}
        vectors = {"weights": _text(self.state.weights), "moments": [_text(moment) for moment in self.state.moments]}
        state = {**terms, "public": dict(self.public), "step": self.state.step, **vectors}
        write_whole(path, _FORM.text(state), MAX_ARRAYS)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, width: int | None = None, num_moments: int | None = None
    ) -> TrainingCheckpoint:
        """Reads a file that `save` wrote, and nothing else."""
        content = _FORM.load(path, most=MAX_ARRAYS)
        terms = {name: content[name] for name in _TERMS}
        if not all(isinstance(value, str) for value in terms.values()):
            raise fail("training checkpoint", "text under " + ", ".join(_TERMS), "another type")
        moments = content["moments"]
        if not isinstance(moments, list):
            raise fail("training checkpoint: moments", "a list of vectors", type(moments).__name__)
        weights = _weights(_vector("weights", content["weights"], width))
        state = OptimizerState(
            check_int("training checkpoint: step", content["step"], low=0),
            weights,
            tuple(_vector(f"moments[{place}]", moment, len(weights)) for place, moment in enumerate(moments)),
        )
        read = cls(**terms, public=plain_json("training checkpoint: public", content["public"]), state=state)
        read.check_sizes(width=width, num_moments=num_moments)
        return read

    def check_sizes(self, *, width: int | None, num_moments: int | None) -> None:
        """Refuses vectors of another length or number; None accepts any."""
        sizes = len(self.state.weights), len(self.state.moments)
        if width not in {None, sizes[0]}:
            raise fail("training checkpoint: weights", f"{width} float64 numbers", sizes[0])
        if num_moments not in {None, sizes[1]}:
            raise fail("training checkpoint: moments", f"a list of {num_moments} vectors", sizes[1])

    def check_is_of(self, *, component: str, ledger_id: str, dataset_id: str, adjacency: str, public: Any) -> None:
        """Refuses the checkpoint of a run with another ledger, data set, plan or model."""
        shown = json.loads(json.dumps(dict(public)))  # JSON turns tuples into lists
        ours = dict(zip(_TERMS, (component, ledger_id, dataset_id, adjacency), strict=True)) | dict(_leaves(shown))
        theirs = {name: getattr(self, name) for name in _TERMS} | dict(_leaves(self.public))
        other = {name for name in {*ours, *theirs} if ours.get(name, _NOTHING) != theirs.get(name, _NOTHING)}
        if other:
            names = sorted(name for name in other if not _FOLLOWING.match(name)) or sorted(other)
            differences = [(name, theirs.get(name, _NOTHING), ours.get(name, _NOTHING)) for name in names]
            differs = [f"{name}: {there!r:.80} in the file, {here!r:.80} here" for name, there, here in differences]
            raise ConfigurationError(
                f"checkpoint: expected the state of this run, found another run's ({'; '.join(differs)}). "
                "Pass another file, or the plan, model and ledger of the file."
            )


def _leaves(value: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the values of a JSON object with the paths of their keys."""
    for key, one in value.items():
        if isinstance(one, Mapping):
            yield from _leaves(one, f"{within}{key}.")
        else:
            yield within + key, one


def check_checkpoint_path(path: Any) -> Path | None:
    """Returns the path of a writable checkpoint."""
    return None if path is None else check_target("checkpoint", path)


def _text(values: Floats) -> str:
    return base64.b64encode(values.astype("<f8").tobytes()).decode("ascii")


def _vector(name: str, text: object, width: int | None) -> Floats:
    """Returns a checked vector from a file."""
    raw = b""
    if isinstance(text, str):
        try:
            raw = base64.b64decode(text.encode("ascii", "replace"), validate=True)
        except binascii.Error:
            raw = b""
    if len(raw) % 8 or len(raw) != 8 * (width or len(raw) // 8) or not raw:
        many = "" if width is None else f"{width} "
        raise ConfigurationError(f"training checkpoint: {name}: expected the base64 of {many}float64 numbers.")
    # Copied: `frombuffer` returns a read-only view of the file's bytes.
    values = np.frombuffer(raw, dtype="<f8").astype(np.float64)
    if not np.isfinite(values).all():
        raise ConfigurationError(f"training checkpoint: {name}: expected finite numbers.")
    return values


def _weights(values: Floats) -> Floats:
    if (np.abs(values) > LARGEST_WEIGHT).any() or (values * WEIGHT_GRID % 1.0 != 0).any():
        raise ConfigurationError("training checkpoint: weights: expected multiples of 2^-24, at most 2^20.")
    return values


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """The public state after one step; computed from released values and public records only.

    Attributes:
      step: number of updates of the weights.
      steps_left: number of remaining paid steps.
      validation_loss: mean loss of the PUBLIC validation records; None if this step was not validated.
    """

    step: int
    steps_left: int
    validation_loss: float | None


class TrainingRun(Uncopyable, StreamedRun[TrainingStep, SoftPrompt]):
    """A run of `PromptDPSGD`; it can be interrupted and continued. Made by `PromptDPSGD.prepare`.

    Formal guarantees:
      - All weights that it ever shows are together (epsilon, delta)-DP for one unit, at the share's epsilon and delta.
      - The first reservation seals the share at the price of all steps. Tickets are reserved in blocks of at most
        `reserve_steps`, each before a private record is read for it. A step's ticket burns when its first private call
        starts and is committed after its noised state is stored; unburnt tickets are returned at the end.
      - A killed process loses the tickets of its current block, at most `reserve_steps`; they stay charged.
      - A run with fewer steps than its plan and no remaining ticket raises `TrainingInterruptedError`.
      - Before the first ticket of a call burns, and after the private rows of every step, the engine is tested with
        synthetic text; if it fails or returns non-finite numbers, the run stops instead of releasing noise only. This
        does not depend on records, unless one made the engine fail for later calls: such a crash is not covered.
      - Nothing but the ticket's own release depends on the records: an empty sample is a step of pure noise, and
        counts, errors, files and progress do not depend on the number of records.
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
        self._on_file = state if is_resumed else None  # the content of the checkpoint, as far as this run knows
        self._held: Reservation | None = None
        self._is_tried = False
        self._unsettled: list[Reservation] = []
        self._streams = 0
        self._turn = threading.Lock()
        self._lock = threading.Lock()

    @property
    def step(self) -> int:
        """Number of updates of the weights so far."""
        return self._state.step

    @property
    def steps_left(self) -> int:
        """Number of remaining paid steps."""
        reservation = self._held
        return self._share.remaining(STEP_TEMPLATE) + (0 if reservation is None else reservation.unburnt)

    @property
    def weights(self) -> Floats:
        """The released weights, float64[width] on the grid of 2^-24, read-only."""
        return self._state.weights

    @property
    def report(self) -> dict[str, Any]:
        """The privacy report of all steps of the run (public)."""
        return report_of(self._budget, self._share, self.plan, step=self.step, steps=self.plan.steps)

    @property
    def soft_prompt(self) -> SoftPrompt:
        """The prompt with the current weights; free."""
        return SoftPrompt.of(self.engine, self.weights, report=self.report)

    def _whole(self) -> SoftPrompt:
        return self.soft_prompt

    def stream(self, *, progress: bool | None = None) -> Iterator[TrainingStep]:
        """Yields each step as soon as its weights are released, until all steps of the plan are made.

        Args:
          progress: True shows a bar, False hides it, None shows it on a terminal only.

        Raises:
          TrainingInterruptedError: a public model call failed; released weights are kept, and another `run` or
            `stream` continues with the unburnt tickets. Also if tickets were lost to errors or killed processes and
            none remains before the last step: `error.soft_prompt` is the current prompt. Other errors and Ctrl-C
            carry `training_run` too.
          PrivacyBudgetError: the share no longer fits the budget.
        """
        with (
            self._events() as events,
            carrying(training_run=self),
            self._tickets(events) as remaining,
            self._bar(progress, remaining) as bar,
        ):
            while self.step < self.plan.steps:
                yield self._told(*run_sync(attempt(self._step(events))), bar)

    async def astream(self, *, progress: bool | None = None) -> AsyncIterator[TrainingStep]:
        """Async version of `stream`."""
        is_slow = self._budget.durable
        async with self._events() as events:
            tickets = ThreadedContext(self._tickets(events), is_slow=is_slow)
            with carrying(training_run=self):
                async with tickets as remaining:
                    with self._bar(progress, remaining) as bar:
                        while self.step < self.plan.steps:
                            made = await run_async(attempt(self._step(events)), is_slow=is_slow)
                            step = self._told(*made, bar)
                            tickets.is_at_yield = True
                            yield step
                            tickets.is_at_yield = False

    def _step(self, events: RunEvents) -> EffectGenerator[TrainingStep | None]:
        """Makes one step (an effect generator) and validates it if due; None: no ticket remains."""
        with self._alone():
            ticket = self._ticket(events)
            if ticket is None:
                return None
            # Tested once per call of `stream`, with synthetic text.
            if not self._is_tried and (failure := (yield CheckRequest(self.engine, self.weights))):
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
                loss = yield LossRequest(self.engine, self.weights, self._validation.examples)
            return TrainingStep(self.step, self.steps_left, loss)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Refuses concurrent steps of this run."""
        if not self._turn.acquire(blocking=False):
            msg = "run: expected one step at a time, found another call that trains. Wait for it, or build another run."
            raise ConfigurationError(msg)
        try:
            yield
        finally:
            self._turn.release()

    def _ask(self, groups: Sequence[Sequence[TrainingExample] | None]) -> GradientRequest:
        total = running_sum(self.plan.release, self.engine.width)
        return GradientRequest(self.engine, self.weights, groups, total)

    def _keep(self, released: Release, ticket: Reservation) -> None:
        """Updates the weights from a release, and writes the checkpoint."""
        if released.values is None:
            raise ConfigurationError("mechanism: expected one that releases a vector, found another.")
        # Divided by public numbers only, so that the number of drawn units stays secret.
        gradient = released.values * self.plan.average_factor
        state = self.optimizer.update(self._state, gradient)
        self._unsettled.append(ticket)
        self._state, self._is_behind = state, True
        self._save()

    def _save(self) -> None:
        """Writes the checkpoint if it is out of date."""
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
        """Refuses to overwrite a checkpoint that another run has changed."""
        if self._checkpoint is None or not self._checkpoint.exists():
            return
        sizes = {"width": len(self.weights), "num_moments": len(self._state.moments)}
        on_disk = TrainingCheckpoint.load(self._checkpoint, **sizes)
        # Ctrl-C may come between the write and the update of `_on_file`.
        ours = [known for known in (self._on_file, self._state) if known is not None and known.is_same(on_disk.state)]
        # The component is compared too: two fresh runs have equal states.
        if not ours or on_disk.component != self._share.component:
            advice = "Prepare the run again to continue from the file, or pass another file."
            raise fail("checkpoint", "the state that this run stored", "one that another run stored", advice)

    @property
    def _kept(self) -> TrainingCheckpoint:
        return TrainingCheckpoint(
            component=self._share.component,
            ledger_id=self._budget.ledger_id,
            dataset_id=self.plan.partition,
            adjacency=self._budget.adjacency,
            public=self._public,
            state=self._state,
        )

    def _settle(self) -> None:
        """Stores and commits earlier releases whose checkpoint could not be written."""
        with self._alone():
            self._check_file()
            self._save()  # stores the component's name before anything is charged
            while self._unsettled:
                if self._unsettled[-1].uncommitted:  # Ctrl-C may come between the commit and the `pop`
                    self._unsettled[-1].commit()
                self._unsettled.pop()

    @contextmanager
    def _tickets(self, events: RunEvents) -> Iterator[int]:
        """Yields the number of remaining steps; the last stream to end returns the unburnt tickets."""
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
        """Returns a reservation with an unburnt ticket, a new one if necessary; None: no ticket remains."""
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
        """Shows a finished step on the bar; raises for an interruption, outside `except` so that it has no cause."""
        if step is None:
            advice = "tickets that burnt stay charged. Call run() on error.training_run to continue."
            if not failure:
                failure = "expected a ticket for each step of the plan, found none left"
                advice = (
                    "the tickets of the others were lost to errors, to killed processes or to another run, and stay "
                    "charged. Use error.soft_prompt, or train again as another component."
                )
            msg = f"Training stopped: {failure.rstrip('.')}. {self.step} of {self.plan.steps} steps are made and kept; "
            raise TrainingInterruptedError(msg + advice, training_run=self)
        with suppress(OSError, ValueError):  # a terminal that went away does not stop a paid run
            if step.validation_loss is not None:
                bar.set_postfix_str(f"public validation loss {step.validation_loss:.4g}", refresh=False)
            bar.update()
        return step

    def _events(self) -> RunEvents:
        return RunEvents("PromptDPSGD", budget=self._budget, share=self._share)

    def _bar(self, progress: bool | None, total: int) -> Any:
        return new_bar(total, "step", "private training", progress=progress)

    def __repr__(self) -> str:
        remaining = describe_tickets_left(lambda: self.steps_left)
        return f"TrainingRun(component={self._share.component!r}, step={self.step}, steps_left={remaining})"
