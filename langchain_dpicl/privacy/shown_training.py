"""Verifies the parameters that a report shows of training steps, and the prompt that carries the report."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from langchain_dpicl.privacy._validate import check_int, fail
from langchain_dpicl.privacy.accounting.events import canonical_json
from langchain_dpicl.privacy.extensions.gradient_sums import MAX_GRADIENT_WIDTH
from langchain_dpicl.privacy.extensions.training_tickets import STEP_TEMPLATE, training_release, training_tickets
from langchain_dpicl.privacy.mechanisms.release_plan import ReleasePlan
from langchain_dpicl.privacy.shown import UNREADABLE, Book, own_cost, same, why
from langchain_dpicl.privacy.tickets import Component

PROMPT_FORMAT = "langchain-dpicl/soft-prompt"
PROMPT_VERSION = 1

# What the report of a training shows.
_TRAINING = {"steps", "expected_batch_size", "l2_clip_norm"}
# What it shows under "training" where a prompt was trained: by the part of it, "" for all of it.
_TRAINED: Mapping[str, frozenset[str]] = {
    "": frozenset({"init_text", "method", "model", "num_virtual_tokens", "optimizer", "pair_key", "target_key"})
    | {"task", "text_key", "tokenizer", "weights"},
    "optimizer": frozenset({"learning_rate", "name", "schedule", "weight_grid"}),
    "task": frozenset({"kind", "labels", "max_input_tokens", "max_target_tokens", "template", "words"}),
}
# Where the training names what a prompt says of its base model; weights that nothing told are in neither place.
_OF_BASE = {"name": "model", "tokenizer": "tokenizer", "weights": "base_weights"}
_OF_RUN = frozenset({"ledger_id", "step", "steps"})


def shows_training(component: Component) -> bool:
    """Returns whether a component shows the parameters of training steps, or has tickets of them."""
    has_steps = any(ticket.template == STEP_TEMPLATE for ticket in component.tickets)
    return has_steps or set(component.public) >= _TRAINING


def training_problems(component: Component, book: Book) -> Iterator[str]:
    """Compares the training that a component shows with its tickets, its data set, its share and its price.

    Formal guarantees:
      - No problem means: the release and steps shown make exactly the tickets that are charged, and every number shown
        beside them is the release's, the data set's or the share's.
      - The clip and the width leave no trace in a ticket: noise is measured in clips, and a gradient is released as a
        whole. They are its author's word (the width as far as the declared gap of the noise does not tell it).
    """
    if not shows_training(component):
        return
    try:
        yield from tuple(_training_problems(component, book))
    except UNREADABLE as error:
        yield f"its training cannot be read: {why(error)}"


@dataclass(frozen=True, slots=True)
class _Run:
    """The training that a component shows, rebuilt."""

    release: ReleasePlan
    steps: int
    width: int
    batch: int
    public_size: int

    @classmethod
    def of(cls, component: Component, book: Book) -> _Run:
        """Reads what is shown through the checks it passed at first."""
        shown, declared = component.public, book.datasets.get(component.partition or "")
        if declared is None:
            raise fail("partition", "the dataset_id of a data set of the report", component.partition)
        size = declared.total_size
        return cls(
            release=training_release(shown["release"]),
            steps=check_int("steps", shown["steps"], low=1),
            width=check_int("width", shown["width"], low=1, high=MAX_GRADIENT_WIDTH),
            batch=check_int("expected_batch_size", shown["expected_batch_size"], low=1, high=size),
            public_size=size,
        )

    def flat(self) -> dict[str, Any]:
        """Returns what plans show beside a release."""
        release, mechanism = self.release, self.release.mechanism
        clip = release.aggregation.to_dict()["l2_clip_norm"]
        return {
            "adjacency": release.adjacency,
            "aggregation": release.aggregation.name,
            "epochs": self.steps * self.batch / self.public_size,
            "l2_clip_norm": clip,
            "mechanism": mechanism.name,
            "noise_multiplier": mechanism.noise_multiplier,
            "noise_scale": mechanism.noise_multiplier * release.sensitivity.require("l2") * clip / self.batch,
            "public_size": self.public_size,
            "rows": release.row_shape,
            "sampling": "poisson",
            "sampling_rate": self.batch / self.public_size,
        }


def _training_problems(component: Component, book: Book) -> Iterator[str]:
    shown, run = component.public, _Run.of(component, book)
    if component.tickets != training_tickets(run.release, run.steps):
        yield f"shows {run.steps} training steps, which make other tickets than it has"
    if run.release.adjacency != book.adjacency:
        yield f"shows a release under {run.release.adjacency!r}, the ledger's adjacency is {book.adjacency!r}"
    if not same(run.release.sampler.sampling_rate, run.batch / run.public_size):
        yield (
            f"shows sampling_rate {run.release.sampler.sampling_rate!r} in its release, its expected_batch_size and "
            f"public_size make {run.batch / run.public_size!r}"
        )
    gap = run.release.implementation_delta(run.steps, width=run.width)
    if not same(component.implementation_delta, gap):
        yield f"implementation_delta: expected {gap!r}, found {component.implementation_delta!r}"
    for name, value in {**run.flat(), "implementation_delta": gap, "delta": component.delta}.items():
        if not _agree(shown, name, value):
            yield f"shows {name} {shown.get(name)!r}, its release, data set and share make it {value!r}"
    if book.misstated(shown["epsilon"], cost := own_cost(component, book)):
        yield f"shows epsilon {shown['epsilon']!r}, its tickets cost up to {cost!r}"


def prompt_problems(holder: object, report: Mapping[str, Any], component: Component | None) -> Iterator[str]:
    """Compares a trained prompt, or its report alone, with the component that the report charges.

    Formal guarantees:
      - No problem means: the numbers of the prompt are said to be paid for by training steps; the steps said to be made
        are no more than those; and the prompt is for the method, the length, the task, the model and the tokenizer
        that the component shows.
      - That the numbers are the ones that those steps released, that the steps were made, and what the component shows
        of the training beside (rule, fields, digest of the model) is their sender's word.
      - What is neither a prompt nor the report of one has no problem.

    Args:
      holder: what was given to the verifier, a text read as JSON.
      report: the report in it, or itself.
      component: the one that the report names; None: it names none, or nothing protects it.
    """
    is_prompt = {"arrays", "report"} <= set(holder) if isinstance(holder, Mapping) else hasattr(holder, "arrays")
    if component is None or not shows_training(component):
        if is_prompt and component is None:
            yield "arrays: they were trained, which no component of the report pays for"
        elif is_prompt and component is not None:
            yield f"arrays: they were trained, but {component.name!r} shows no training steps"
        return
    try:
        yield from tuple(_run_problems(report, component, has_all=is_prompt))
        yield from tuple(_prompt_problems(holder, component)) if is_prompt else ()
    except UNREADABLE as error:
        yield f"the prompt cannot be held against its training: {why(error)}"


def _run_problems(report: Mapping[str, Any], component: Component, *, has_all: bool) -> Iterator[str]:
    """Compares what a report says of a run with the steps that were charged."""
    if has_all and (missing := sorted(_OF_RUN - set(report))):
        yield f"report: expected the ledger and the steps of a training, found no {missing}"
    most = check_int("steps", component.public["steps"], low=1)
    steps, step = report.get("steps", most), report.get("step", 0)
    if canonical_json(steps) != canonical_json(most):
        yield f"report.steps: expected {most}, as {component.name!r} shows, found {steps!r}"
    if type(step) is not int or not 0 <= step <= most:
        yield f"report.step: expected a whole number of at most {most} steps, found {step!r}"


def _prompt_problems(prompt: object, component: Component) -> Iterator[str]:
    """Compares what a prompt says of itself with the training that its component shows."""
    if isinstance(prompt, Mapping):
        for name, value in (("format", PROMPT_FORMAT), ("version", PROMPT_VERSION)):
            if canonical_json(prompt.get(name)) != canonical_json(value):
                yield f"{name}: expected {value!r}, found {prompt.get(name)!r}"
    training = component.public["training"]
    for part, names in _TRAINED.items():
        if missing := sorted(names - set(training[part] if part else training)):
            yield f"{component.name!r} shows no {missing} of its {part or 'training'}"
    shown = {
        "method": training["method"],
        "num_virtual_tokens": training["num_virtual_tokens"],
        **{f"base.{name}": training[where] for name, where in _OF_BASE.items() if where in training},
        **{f"task.{name}": value for name, value in training["task"].items()},
    }
    said = _said_by(prompt)
    for name in sorted({*shown, *said}):
        wanted, found = (canonical_json(of[name]) if name in of else "nothing" for of in (shown, said))
        if wanted != found:
            yield f"{name}: expected {wanted}, as {component.name!r} shows, found {found}"


def _said_by(prompt: object) -> dict[str, Any]:
    """Returns what a prompt says that it was trained for, by where it says so."""
    if isinstance(prompt, Mapping):
        said = {name: prompt[name] for name in ("method", "num_virtual_tokens", "task", "base") if name in prompt}
    else:
        holder: Any = prompt
        said = {"method": holder.method, "num_virtual_tokens": holder.num_virtual_tokens}
        said |= {"task": holder.task.to_dict(), "base": holder.base}
    parts = {part: said.pop(part, {}) for part in ("task", "base")}
    return said | {f"{part}.{name}": value for part, held in parts.items() for name, value in held.items()}


def _agree(shown: Mapping[str, Any], name: str, expected: Any) -> bool:
    found = shown.get(name)
    if isinstance(expected, float) and math.isfinite(expected):
        return same(found, expected)
    return canonical_json(found) == canonical_json(expected)
