"""Options, JSON and text of `dpicl plan --method voting` and `--method retrieval`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from langchain_dpicl.cli.inputs import Option, add_options, check_counts, cost_of, flag, typed_options
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy._validate import check_choice, check_real, fail

if TYPE_CHECKING:
    from langchain_dpicl.planning.expected_utility import RowDesign


_TOKENS = {
    "query_tokens": Option("public cap of a query with its instruction (default 60)"),
    "answer_tokens": Option("public cap of an answer (default 1)"),
    "calls_per_row": Option("more than 1 where rows are calibrated or score each label"),
}
_DEFAULTS = {"query_tokens": 60, "answer_tokens": 1, "calls_per_row": 1}
OPTIONS = {
    "max_queries": Option("answers that the share pays for (pate: default as many as fit)"),
    "labels": Option("labels an answer can have (default: those of --public-size)", low=2),
    "abstain_below": Option("share of the expected votes that an answer needs", kind=float),
    **_TOKENS,
}
"""The options that only plans of votes have."""


def add_voting(command: argparse.ArgumentParser) -> None:
    """Adds the options that only votes on labels have."""
    add_options(command.add_argument_group("with --method voting or pate"), OPTIONS)


def query_plan_output(arguments: argparse.Namespace, sizes: dict[str | None, int]) -> tuple[dict[str, Any], str]:
    """Returns what the command prints, as JSON values and as text."""
    labels = check_label_count(arguments, sizes, ("labels", "max_queries"))
    out = _plan(arguments, sum(sizes.values()), labels)
    return out, _text(out)


def check_label_count(
    arguments: argparse.Namespace, sizes: dict[str | None, int], required: Sequence[str] = ("labels",)
) -> int:
    """Returns the number of labels, by default that of the sizes; refuses options that are missing or too small."""
    if arguments.labels is None and None not in sizes:
        arguments.labels = len(sizes)
    for name in required:
        if getattr(arguments, name) is None:
            raise ConfigurationError(f"{flag(name)}: expected a number with --method {arguments.method}, found none.")
    check_counts(arguments, OPTIONS)
    if arguments.abstain_below is not None:
        check_real("--abstain-below", arguments.abstain_below, low=0.0, high=1.0, low_open=True)
    return int(arguments.labels)


def _plan(arguments: argparse.Namespace, public_size: int, labels: int) -> dict[str, Any]:
    from langchain_dpicl.runs.query_plan import compare_queries, expected_rows, plan_queries, query_signal

    shared = {name: getattr(arguments, name) for name in ("epsilon", "delta", "adjacency", "max_queries")}
    design = _design(arguments, public_size, labels, shared)
    share = arguments.abstain_below
    constants = () if share is None else (share * expected_rows(design, public_size),)
    plan = plan_queries(
        public_size,
        **shared,
        width=labels + len(constants),
        mechanism=arguments.mechanism,
        design=design,
        constants=constants,
    )
    out: dict[str, Any] = {
        "plan": {"labels": labels, **plan.to_dict()},
        "cost": cost_of(plan.cost(**tokens_of(arguments)), arguments, max_queries=plan.max_queries),
        "signal": {"one_shot_agreement": arguments.agreement, **query_signal(plan, one_shot=arguments.agreement)},
        "options": [],
    }
    if not arguments.no_compare:
        options = compare_queries(
            public_size,
            **shared,
            labels=labels,
            mechanisms=(arguments.mechanism, "gumbel", "gaussian", "permute_and_flip"),
            base=design,
            abstain_below=share,
            agreement=arguments.agreement,
        )
        out["options"] = [option.to_dict() for option in options]
        out["recommendation"] = out["options"][0]
    return out


def _design(arguments: argparse.Namespace, public_size: int, labels: int, shared: dict[str, Any]) -> RowDesign:
    """Returns the shape that was asked for, or the one that a run would choose."""
    from langchain_dpicl.planning.expected_utility import RowDesign
    from langchain_dpicl.runs.query_plan import recommended_design

    asked = {name: getattr(arguments, name) for name in ("rows", "num_slots", "shots_per_slot")}
    if set(asked.values()) == {None} and arguments.sampling is None:
        return recommended_design(public_size, labels=labels, mechanism=arguments.mechanism, **shared)
    return RowDesign.choose(**asked, sampling=arguments.sampling or "poisson", smallest_size=public_size)


def tokens_of(arguments: argparse.Namespace) -> dict[str, int]:
    """Returns the public caps of a call as `cost` takes them."""
    return {"record_tokens": arguments.record_tokens, **_DEFAULTS, **typed_options(arguments, _TOKENS)}


def noise_text(plan: Mapping[str, Any]) -> str:
    """Returns the line on the noise of votes."""
    return (
        "noise    {mechanism}, multiplier {noise_multiplier:.4f} of the sensitivity "
        "(scale {noise_scale:.3f} on the votes)".format(**plan)
    )


def signal_text(out: dict[str, Any], percent: Mapping[str, float], *, abstained: str) -> list[str]:
    """Returns the lines on units, rows and signal; `abstained` is what stands behind the chance of a right label."""
    return [
        "         {public_size} declared units, sampling rate {sampling_rate:.5f}".format(**out["plan"]),
        "expected {expected_rows:.1f} rows in use, {expected_shots:.2f} shots each, ".format(**out["signal"])
        + "{empty_slot_prob:.1f} % empty slots".format(**percent),
        "signal   signal-to-noise {signal_to_noise:.2f}, ".format(**out["signal"])
        + "right label {right_label_prob:.1f} %".format(**percent)
        + abstained,
    ]


def cost_text(cost: Mapping[str, Any], *, unit: str) -> str:
    """Returns the line on calls and money."""
    return (
        "cost     {calls_per_query:.1f} calls per {unit}: {private_calls:,} private + {public_calls:,} public calls, "
        "{tokens_in:,} tokens in, {tokens_out:,} out, money {money:.2f}".format(unit=unit, **cost)
    )


def _text(out: dict[str, Any]) -> str:
    plan, signal = out["plan"], out["signal"]
    percent = {name: 100 * value for name, value in signal.items() if name != "signal_to_noise"}
    abstained = ", abstention {abstain_prob:.1f} %".format(**percent) if plan["constants"] else ""
    lines = [
        "epsilon {epsilon:.4f} at delta {delta:g}, adjacency {adjacency}, for {max_queries:,} queries "
        "(nothing is spent)".format(**plan),
        noise_text(plan),
        "rows     {rows}, {num_slots} x {shots_per_slot} shot(s), a new sample for every query, {labels} labels".format(
            **plan
        ),
        *signal_text(out, percent, abstained=abstained),
        "guess    {agreement:.1f} % of rows vote for the right label (--agreement: {one_shot_agreement:.1f} % of "
        "one-shot rows); not measured".format(**percent),
        cost_text(out["cost"], unit="query"),
    ]
    if out["options"]:
        lines += ["", "designs at equal records per query and equal epsilon, best first:"]
        lines.append(
            f"  {'mechanism':<17}{'rows':<7}{'M x k':<10}{'noise':>9}{'agreement':>11}{'right label':>13}{'calls':>14}"
        )
        lines += [_option_text(option) for option in out["options"]]
        lines += ["", _recommendation_text(out["recommendation"])]
    return "\n".join(lines)


def _recommendation_text(best: dict[str, Any]) -> str:
    sampling = " --sampling fixed" if best["sampling"] == "fixed" else ""
    return (
        f"recommended: --mechanism {best['mechanism']} --rows {best['rows']} --num-slots {best['num_slots']} "
        f"--shots-per-slot {best['shots_per_slot']}{sampling}"
    )


def _option_text(option: dict[str, Any]) -> str:
    shape = f"{option['num_slots']} x {option['shots_per_slot']}"
    return (
        f"  {option['mechanism']:<17}{option['rows']:<7}{shape:<10}{option['noise_multiplier']:>9.3f}"
        f"{100 * option['agreement']:>10.1f}%{100 * option['right_label_prob']:>12.1f}%{option['private_calls']:>14,}"
    )


_PARTICIPANTS = 30
_OWN = {
    "participations": Option("answers that one unit may take part in", low=None),
    "participants": Option(f"guess: units that take part in a query (default {_PARTICIPANTS})", low=None),
}
RETRIEVAL_OPTIONS = frozenset({*_OWN, *OPTIONS}) - {"abstain_below"}
"""The options that plans of retrieved votes have, of those that not every plan has."""


def add_retrieval(command: argparse.ArgumentParser) -> None:
    """Adds the options that only votes of retrieved documents have."""
    title = "with --method retrieval (and --labels, --max-queries, --query-tokens, ...)"
    add_options(command.add_argument_group(title), _OWN)


def retrieval_plan_output(arguments: argparse.Namespace, sizes: dict[str | None, int]) -> tuple[dict[str, Any], str]:
    """Returns what the command prints, as JSON values and as text."""
    labels = check_label_count(arguments, sizes, ("labels", "participations"))
    check_choice("--mechanism", arguments.mechanism or "gaussian", ("gaussian",))
    if arguments.shots_per_slot not in {None, 1} or arguments.sampling is not None:
        raise fail("--shots-per-slot, --sampling", "none with --method retrieval", arguments.shots_per_slot)
    out = _retrieval_plan(arguments, sum(sizes.values()), labels)
    return out, _retrieval_text(out)


def _retrieval_plan(arguments: argparse.Namespace, public_size: int, labels: int) -> dict[str, Any]:
    from langchain_dpicl.retrieval.plan import NUM_SLOTS, plan_retrieval

    is_units = arguments.rows == "units"
    if is_units and arguments.num_slots is not None:
        raise fail("--num-slots", "none with --rows units", arguments.num_slots)
    plan = plan_retrieval(
        public_size,
        epsilon=arguments.epsilon,
        delta=arguments.delta,
        participations=arguments.participations,
        width=labels,
        num_slots=None if is_units else arguments.num_slots or NUM_SLOTS,
        max_queries=arguments.max_queries or 100_000,
        adjacency=arguments.adjacency,
    )
    guess = _PARTICIPANTS if arguments.participants is None else arguments.participants
    cost = plan.cost(participants=guess, **tokens_of(arguments))
    signal = plan.expected(participants=guess, agreement=arguments.agreement)
    return {
        "plan": plan.to_dict(),
        "cost": cost_of(cost, arguments, max_queries=1),
        "signal": {"participants": guess, "agreement": arguments.agreement, **signal},
    }


def _retrieval_text(out: dict[str, Any]) -> str:
    plan, cost, signal = out["plan"], out["cost"], out["signal"]
    filter_, slots = plan["participation"], plan["participation"]["num_slots"]
    percent = {name: 100 * signal[name] for name in ("right_label_prob", "passes_floor_prob", "agreement")}
    once = "once for all queries (nothing is spent)"
    rows = "one for each unit that takes part" if slots is None else f"{slots} slots, whoever takes part"
    guess = f"{signal['participants']} units take part, {percent['agreement']:.0f} % of them for the right label"
    calls = "{calls_per_query:.1f} calls per query, {tokens_in:,} tokens in, {tokens_out:,} out, money {money:.4f}"
    lines = [
        "epsilon {epsilon:.4f} at delta {delta:g}, adjacency {adjacency}, ".format(**plan) + once,
        f"filter   each of {plan['public_size']:,} declared units takes part in {filter_['participations']} answers",
        "noise    gaussian, {noise_stddev:.2f} votes on every one of {width} labels; ".format(**plan)
        + "noise alone reaches {noise_floor:.1f} in one of twenty queries".format(**signal),
        f"rows     {rows}",
        "signal   right label {right_label_prob:.1f} %, enough votes {passes_floor_prob:.1f} %".format(**percent),
        f"guess    {guess}; not measured",
        "cost     " + calls.format(**cost) + "; each document is embedded once besides",
    ]
    return "\n".join(lines)
