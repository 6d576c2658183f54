"""Verifies the parameters that a report shows of training steps, and the prompt that carries the report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from langchain_dpicl.privacy._validate import check_int
from langchain_dpicl.privacy.accounting.events import canonical_json
from langchain_dpicl.privacy.extensions.gradient_sums import MAX_GRADIENT_WIDTH
from langchain_dpicl.privacy.extensions.training_tickets import STEP_TEMPLATE, training_release, training_tickets
from langchain_dpicl.privacy.shown import Book, has_members, plan_problems, same
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
    shown, size = component.public, book.dataset(component).total_size
    release = training_release(shown["release"])
    steps = check_int("steps", shown["steps"], low=1)
    width = check_int("width", shown["width"], low=1, high=MAX_GRADIENT_WIDTH)
    batch = check_int("expected_batch_size", shown["expected_batch_size"], low=1, high=size)
    rate, clip = batch / size, release.aggregation.to_dict()["l2_clip_norm"]
    if not same(release.sampler.sampling_rate, rate):
        yield (
            f"shows sampling_rate {release.sampler.sampling_rate!r} in its release, its expected_batch_size and "
            f"public_size make {rate!r}"
        )
    noise, gap = release.mechanism.noise_multiplier, release.implementation_delta(steps, width=width)
    numbers = {
        "adjacency": release.adjacency,
        "aggregation": release.aggregation.name,
        "epochs": steps * batch / size,
        "implementation_delta": gap,
        "l2_clip_norm": clip,
        "mechanism": release.mechanism.name,
        "noise_multiplier": noise,
        "noise_scale": noise * release.sensitivity.require("l2") * clip / batch,
        "public_size": size,
        "rows": release.row_shape,
        "sampling": "poisson",
        "sampling_rate": rate,
    }
    plan, tickets = f"a training of {steps} steps", training_tickets(release, steps)
    yield from plan_problems(component, book, plan, tickets=tickets, gap=gap, numbers=numbers.items())


def prompt_problems(holder: object, report: Mapping[str, Any], component: Component | None) -> Iterator[str]:
    """Compares a trained prompt, or its report alone, with the component that the report charges.

    Formal guarantees:
      - No problem means: the numbers of the prompt are said to be paid for by training steps; the steps said to be made
        are no more than those; and the prompt is for the method, the length, the task, the model and the tokenizer
        that the component shows.
      - That the numbers are the ones that those steps released, that the steps were made, and what the component shows
        of the training beside (rule, fields, digest of the model) is their sender's word.
      - What is neither a prompt nor the report of one has no problem.
    """
    is_prompt = has_members(holder, "arrays", *(("report",) if isinstance(holder, Mapping) else ()))
    if component is None or not shows_training(component):
        if is_prompt and component is None:
            yield "arrays: they were trained, which no component of the report pays for"
        elif is_prompt and component is not None:
            yield f"arrays: they were trained, but {component.name!r} shows no training steps"
        return
    yield from _run_problems(report, component, has_all=is_prompt)
    if is_prompt:
        yield from _prompt_problems(holder, component)


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
    claims = _said_by(prompt)
    for name in sorted({*shown, *claims}):
        wanted, claimed = (canonical_json(of[name]) if name in of else "nothing" for of in (shown, claims))
        if wanted != claimed:
            yield f"{name}: expected {wanted}, as {component.name!r} shows, found {claimed}"


def _said_by(prompt: object) -> dict[str, Any]:
    """Returns what a prompt says that it was trained for, by where it says so."""
    if isinstance(prompt, Mapping):
        claims = {name: prompt[name] for name in ("method", "num_virtual_tokens", "task", "base") if name in prompt}
    else:
        holder: Any = prompt
        claims = {"method": holder.method, "num_virtual_tokens": holder.num_virtual_tokens}
        claims |= {"task": holder.task.to_dict(), "base": holder.base}
    parts = {part: claims.pop(part, {}) for part in ("task", "base")}
    return claims | {f"{part}.{name}": value for part, held in parts.items() for name, value in held.items()}
