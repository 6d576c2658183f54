"""Options, JSON and text of `dpicl plan --method retrieval`."""

from __future__ import annotations

import argparse
from typing import Any

from langchain_dpicl import _cli_queries
from langchain_dpicl._cli_options import Option, add_options, cost_of
from langchain_dpicl.privacy._validate import check_choice, fail

_PARTICIPANTS = 30
_OWN = {
    "participations": Option("answers that one unit may take part in", low=None),
    "participants": Option(f"guess: units that take part in a query (default {_PARTICIPANTS})", low=None),
}
OPTIONS = frozenset({*_OWN, *_cli_queries.OPTIONS}) - {"abstain_below"}
"""The options that plans of retrieved votes have, of those that not every plan has."""


def add_retrieval(command: argparse.ArgumentParser) -> None:
    """Adds the options that only votes of retrieved documents have."""
    title = "with --method retrieval (and --labels, --max-queries, --query-tokens, ...)"
    add_options(command.add_argument_group(title), _OWN)


def planned_retrieval(arguments: argparse.Namespace, sizes: dict[str | None, int]) -> tuple[dict[str, Any], str]:
    """Returns what the command prints, as JSON values and as text."""
    labels = _cli_queries.checked_labels(arguments, sizes, ("labels", "participations"))
    check_choice("--mechanism", arguments.mechanism or "gaussian", ("gaussian",))
    if arguments.shots_per_slot not in {None, 1} or arguments.sampling is not None:
        raise fail("--shots-per-slot, --sampling", "none with --method retrieval", arguments.shots_per_slot)
    out = _plan(arguments, sum(sizes.values()), labels)
    return out, _text(out)


def _plan(arguments: argparse.Namespace, public_size: int, labels: int) -> dict[str, Any]:
    from langchain_dpicl.retrieval_planning import NUM_SLOTS, plan_retrieval

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
    cost = plan.cost(participants=guess, **_cli_queries.tokens_of(arguments))
    signal = plan.expected_signal(participants=guess, agreement=arguments.agreement)
    return {
        "plan": plan.to_dict(),
        "cost": cost_of(cost, arguments, max_queries=1),
        "signal": {"participants": guess, "agreement": arguments.agreement, **signal},
    }


def _text(out: dict[str, Any]) -> str:
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
