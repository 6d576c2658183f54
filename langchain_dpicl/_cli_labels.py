"""Options, JSON and text of `dpicl plan --method pate`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from langchain_dpicl._cli_options import Option, add_options, check_counts, cost_of
from langchain_dpicl._cli_queries import checked_labels, cost_text, noise_text, signal_text, tokens_of
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy._validate import check_positive, check_real

if TYPE_CHECKING:
    from langchain_dpicl.labelling_planning import LabellingPlan
    from langchain_dpicl.labelling_proposals import LabellingOption
    from langchain_dpicl.privacy.extensions.label_tickets import Teachers
    from langchain_dpicl.row_design import RowDesign

_CHANCE = 0.95
_DRAWN = {
    "fresh": "fresh, a new secret sample for every input",
    "one_sample": "one secret sample for all inputs",
    "fixed": "fixed, every unit in its slot for good",
}


OPTIONS = {
    "public_inputs": Option("inputs without labels that there are"),
    "teachers": Option("how prompts are drawn (default: fresh)", kind=str, choices=tuple(_DRAWN)),
    "chance": Option(f"wanted chance of a right label (default {_CHANCE})", kind=float),
    "noise": Option("deviation, in votes, at which teachers are priced (default: its own)", kind=float),
    "student_calls": Option("public calls that compare student prompts (default 0)", low=0),
}
"""The options that only plans of labels have."""


def add_pate(command: argparse.ArgumentParser) -> None:
    """Adds the options that only labels for public inputs have."""
    add_options(command.add_argument_group("with --method pate"), OPTIONS)


def planned_labels(arguments: argparse.Namespace, sizes: dict[str | None, int]) -> tuple[dict[str, Any], str]:
    """Returns what the command prints, as JSON values and as text."""
    labels = checked_labels(arguments, sizes, ("labels", "public_inputs"))
    check_counts(arguments, OPTIONS)
    if arguments.chance is not None:
        check_real("--chance", arguments.chance, low=0.0, high=1.0, low_open=True)
    if arguments.noise is not None:
        check_positive("--noise", arguments.noise)
    out = _out(arguments, sum(sizes.values()), labels)
    return out, _text(out)


def _out(arguments: argparse.Namespace, public_size: int, labels: int) -> dict[str, Any]:
    from langchain_dpicl._cost import with_noise_for
    from langchain_dpicl.query_planning import query_signal

    chance = _CHANCE if arguments.chance is None else arguments.chance
    options = _options(arguments, public_size, labels, chance)
    asked = arguments.teachers or "fresh", arguments.mechanism
    chosen = next(o.plan for o in options if (o.plan.teachers, o.plan.release.mechanism.name) == asked)
    plan = with_noise_for(chosen, epsilon=arguments.epsilon, noise_multiplier=None)
    student = {"student_calls": arguments.student_calls or 0, "student_shots": labels}
    cost = plan.cost(**tokens_of(arguments), **student)
    out: dict[str, Any] = {
        "plan": {"labels": labels, "public_inputs": arguments.public_inputs, **plan.to_dict()},
        "cost": cost_of(cost, arguments, max_queries=plan.max_queries),
        "signal": {
            "one_shot_agreement": arguments.agreement,
            "chance": chance,
            "agreement_needed": plan.agreement_needed(chance),
            **query_signal(plan, one_shot=arguments.agreement),
        },
        "teachers": _teachers(plan, arguments, labels),
        "options": [],
    }
    if not arguments.no_compare:
        out["options"] = [option.to_dict() for option in options]
        out["recommendation"] = out["options"][0]
    return out


def _options(arguments: argparse.Namespace, public_size: int, labels: int, chance: float) -> list[LabellingOption]:
    """Returns what is compared, best first: the plan that was asked for is always among it."""
    from langchain_dpicl.labelling_proposals import propose_labelling
    from langchain_dpicl.privacy.extensions.label_tickets import TEACHERS
    from langchain_dpicl.privacy.extensions.registry import MECHANISMS

    asked: Teachers = arguments.teachers or "fresh"
    is_all = arguments.teachers is None and not arguments.no_compare
    return propose_labelling(
        public_size,
        epsilon=arguments.epsilon,
        delta=arguments.delta,
        public_inputs=arguments.public_inputs,
        labels=labels,
        adjacency=arguments.adjacency,
        teachers=TEACHERS if is_all else (asked,),
        mechanisms=(arguments.mechanism,) if arguments.no_compare else (arguments.mechanism, *MECHANISMS),
        designs=_designs(arguments, public_size),
        max_queries=arguments.max_queries,
        abstain_below=arguments.abstain_below,
        agreement=arguments.agreement,
        chance=chance,
    )


def _designs(arguments: argparse.Namespace, public_size: int) -> list[RowDesign] | None:
    """Returns the one shape that was asked for; None: shapes are compared."""
    from langchain_dpicl.row_design import RowDesign

    if arguments.teachers == "fixed" and arguments.sampling is not None:
        raise ConfigurationError("--sampling: expected none with --teachers fixed, which are never drawn again.")
    asked = {name: getattr(arguments, name) for name in ("rows", "num_slots", "shots_per_slot", "sampling")}
    if set(asked.values()) == {None}:
        return None
    shape = {**asked, "sampling": arguments.sampling or "poisson"}
    return [RowDesign.choose(**shape, smallest_size=public_size)]


def _teachers(plan: LabellingPlan, arguments: argparse.Namespace, labels: int) -> dict[str, Any]:
    """Returns what the same noise on as many one-shot teachers costs, for each way of drawing them."""
    from langchain_dpicl.labelling_proposals import compare_teachers
    from langchain_dpicl.signal import noise_deviation

    noise = noise_deviation(plan.release) if arguments.noise is None else arguments.noise
    terms = {"num_teachers": plan.design.num_slots, "noise": noise, "max_queries": plan.max_queries}
    rows = compare_teachers(plan.public_size, **terms, delta=plan.delta, labels=labels)  # type: ignore[arg-type]
    return {**terms, "prices": [row.to_dict() for row in rows]}


def _text(out: dict[str, Any]) -> str:
    plan, signal = out["plan"], out["signal"]
    names = {key for key, value in signal.items() if value is not None} - {"signal_to_noise"}
    percent = {name: 100 * signal[name] for name in names}
    rejects = plan["constants"] or plan["threshold"] is not None
    rejected = ", rejected {abstain_prob:.1f} %".format(**percent) if rejects else ""
    needed = "{agreement_needed:.1f} % of rows must" if "agreement_needed" in percent else "not even all of them may"
    lines = [
        "epsilon {epsilon:.4f} at delta {delta:g}, adjacency {adjacency}, for labels of {max_queries:,} of "
        "{public_inputs:,} public inputs (nothing is spent)".format(**plan),
        noise_text(plan),
        f"teachers {_DRAWN[plan['teachers']]}",
        "rows     {rows}, {num_slots} x {shots_per_slot} shot(s), {labels} labels".format(**plan),
        *signal_text(out, percent, abstained=rejected),
        f"needed   {needed} vote for the right label for {{chance:.1f}} % right labels (--chance)".format(**percent),
        "guess    {agreement:.1f} % of rows do (--agreement: {one_shot_agreement:.1f} % of one-shot rows); "
        "not measured".format(**percent),
        cost_text(out["cost"], unit="label"),
        "",
        *_teachers_text(out["teachers"]),
    ]
    if out["options"]:
        lines += ["", "plans at equal epsilon, best first:"]
        lines.append(
            f"  {'teachers':<11}{'mechanism':<17}{'rows':<6}{'M x k':<9}{'inputs':>7}{'noise':>9}{'needed':>8}"
            f"{'guess':>8}{'right label':>13}{'calls':>11}"
        )
        lines += [_option_text(option) for option in out["options"]]
        lines += ["", _recommended(out["recommendation"])]
    return "\n".join(lines)


def _teachers_text(teachers: dict[str, Any]) -> list[str]:
    head = (
        "Gaussian noise of {noise:.4g} votes on {num_teachers} one-shot teachers, {max_queries:,} labels, by teachers:"
    )
    line = "  {teachers:<11}epsilon {epsilon:<9.4g} {adjacency}, sampling rate {sampling_rate:.5f}"
    return [head.format(**teachers), *(line.format(**row) for row in teachers["prices"])]


def _option_text(option: dict[str, Any]) -> str:
    shape = f"{option['num_slots']} x {option['shots_per_slot']}"
    needed = "-" if option["agreement_needed"] is None else f"{100 * option['agreement_needed']:.1f}%"
    return (
        f"  {option['teachers']:<11}{option['mechanism']:<17}{option['rows']:<6}{shape:<9}{option['max_queries']:>7,}"
        f"{option['noise_multiplier']:>9.3f}{needed:>8}{100 * option['agreement']:>7.1f}%"
        f"{100 * option['right_label_prob']:>12.1f}%{option['private_calls']:>11,}"
    )


def _recommended(best: dict[str, Any]) -> str:
    # Fixed teachers are dealt into slots; --rows would say nothing more.
    rows = "" if best["teachers"] == "fixed" else f" --rows {best['rows']}"
    sampling = " --sampling fixed" if best["sampling"] == "fixed" else ""
    return (
        f"recommended: --teachers {best['teachers']} --mechanism {best['mechanism']} "
        f"--max-queries {best['max_queries']}{rows} --num-slots {best['num_slots']} "
        f"--shots-per-slot {best['shots_per_slot']}{sampling}"
    )
