"""Options, JSON and text of `dpicl plan --method dpsgd`."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from langchain_dpicl._cli_options import RECORD_TOKENS, Option, add_options, check_counts, flag
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy._validate import check_positive

if TYPE_CHECKING:
    from langchain_dpicl.training_planning import TrainingPlan

_PAPER = (
    "Duan et al. (2023): batch 1,024, clip .01 to 4 (mostly .05 to .2), learning rate .005 to .05, 10 to 100 epochs, "
    "1 to 50 virtual tokens"
)
_BATCH, _CLIP = 1024, 0.1
# Ten virtual tokens of a model of width 768, as a soft prompt.
_PARAMETERS = 7680
OPTIONS = {
    "steps": Option("training steps; or give --epochs"),
    "epochs": Option("how often a record is expected in a batch; steps are rounded up", kind=float),
    "expected_batch_size": Option(f"expected records of a step (default {_BATCH}, or all)"),
    "clip_norm": Option(f"length that no gradient exceeds (default {_CLIP})", kind=float),
    "parameters": Option(f"trained parameters (default {_PARAMETERS}: ten tokens of a model of width 768)"),
    "examples_per_unit": Option("examples of one person at most (default 1)"),
}
"""The options that only plans of training have."""
# Batches that are compared, in quarters of the one that was asked for.
_QUARTERS = (1, 2, 4, 8, 16)
# What says nothing here; with the value that stands for "not given".
_WITHOUT = {
    "rows": None,
    "num_slots": None,
    "shots_per_slot": None,
    "agreement": 0.6,
    "price_in": 0.0,
    "price_out": 0.0,
}


def add_dpsgd(command: argparse.ArgumentParser) -> None:
    """Adds the options that only training has."""
    add_options(command.add_argument_group("with --method dpsgd"), OPTIONS)


def planned_training(arguments: argparse.Namespace, sizes: dict[str | None, int]) -> tuple[dict[str, Any], str]:
    """Returns what the command prints, as JSON values and as text."""
    for name, missing in _WITHOUT.items():
        if getattr(arguments, name) != missing:
            raise ConfigurationError(f"{flag(name)}: expected none with --method dpsgd.")
    if arguments.mechanism not in {None, "gaussian"}:
        raise ConfigurationError(f"--mechanism: expected gaussian with --method dpsgd, found {arguments.mechanism!r}.")
    check_counts(arguments, {**OPTIONS, **RECORD_TOKENS})
    if (arguments.steps is None) == (arguments.epochs is None):
        raise ConfigurationError("--steps, --epochs: expected one of them with --method dpsgd.")
    for name in ("clip_norm", "epochs"):
        if getattr(arguments, name) is not None:
            check_positive(flag(name), getattr(arguments, name))
    out = _out(arguments, sum(sizes.values()))
    return out, _text(out)


def _out(arguments: argparse.Namespace, public_size: int) -> dict[str, Any]:
    batch = min(_BATCH, public_size) if arguments.expected_batch_size is None else arguments.expected_batch_size
    if batch > public_size:
        raise ConfigurationError(f"--expected-batch-size: expected at most {public_size} records, found {batch}.")
    plan = _plan(arguments, public_size, batch, steps=arguments.steps, epochs=arguments.epochs)
    cost = plan.cost(record_tokens=arguments.record_tokens, examples_per_unit=arguments.examples_per_unit or 1)
    out: dict[str, Any] = {
        "plan": plan.to_dict(),
        "noise_to_clip": plan.noise_to_clip,
        "cost": dataclasses.asdict(cost),
        "paper": _PAPER,
        "options": [],
    }
    if not arguments.no_compare:
        others = sorted({max(1, quarters * batch // 4) for quarters in _QUARTERS})
        steps = {other: -(-plan.steps * batch // other) for other in others if other <= public_size}  # rounded up
        plans = [_plan(arguments, public_size, other, steps=steps[other], is_rough=True) for other in steps]
        out["options"] = [_option(other) for other in plans]
    return out


def _plan(arguments: argparse.Namespace, public_size: int, batch: int, **terms: Any) -> TrainingPlan:
    from langchain_dpicl.training_planning import plan_training

    return plan_training(
        public_size,
        epsilon=arguments.epsilon,
        delta=arguments.delta,
        adjacency=arguments.adjacency,
        expected_batch_size=batch,
        l2_clip_norm=_CLIP if arguments.clip_norm is None else arguments.clip_norm,
        width=arguments.parameters or _PARAMETERS,
        **terms,
    )


def _option(plan: TrainingPlan) -> dict[str, Any]:
    return {
        "expected_batch_size": plan.expected_batch_size,
        "steps": plan.steps,
        "noise_multiplier": round(plan.noise_multiplier, 4),
        "noise_scale": plan.noise_scale,
        "noise_to_clip": plan.noise_to_clip,
    }


def _text(out: dict[str, Any]) -> str:
    plan, cost = out["plan"], out["cost"]
    lines = [
        "epsilon {epsilon:.4f} at delta {delta:g}, adjacency {adjacency}, for {steps:,} training steps "
        "(nothing is spent)".format(**plan),
        "noise    {mechanism}, multiplier {noise_multiplier:.4f} of the sensitivity "
        "(scale {noise_scale:.3g} on each coordinate of the average gradient)".format(**plan),
        "         all of it together is {noise_to_clip:.3g} clips long; an average gradient is at most 1".format(**out),
        "steps    {expected_batch_size:,} expected of {public_size:,} declared units, sampling rate "
        "{sampling_rate:.5f}, {epochs:.3g} epochs".format(**plan),
        "gradient {width:,} parameters, clip {l2_clip_norm:g}".format(**plan),
        "cost     {gradients:,} gradients of single examples, {tokens:,} tokens read".format(**cost),
        f"paper    {out['paper']}",
    ]
    if out["options"]:
        lines += ["", "batches at equal epsilon and equal epochs (noise roughly: up to some percent more than needed):"]
        lines.append(f"  {'batch':>9}{'steps':>9}{'noise':>9}{'on the average':>17}{'in clips':>11}")
        lines += [_option_text(option) for option in out["options"]]
    return "\n".join(lines)


def _option_text(option: dict[str, Any]) -> str:
    return (
        f"  {option['expected_batch_size']:>9,}{option['steps']:>9,}{option['noise_multiplier']:>9.4f}"
        f"{option['noise_scale']:>17.3g}{option['noise_to_clip']:>11.3g}"
    )
