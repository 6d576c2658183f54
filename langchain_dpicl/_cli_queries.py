"""What `dpicl plan --method voting` shows: options and the text or JSON of a plan of answers to queries.

Knows public numbers only. Prints nothing, reads no record. `_cli_labels` shares its options and its costs.
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy._validate import check_real

if TYPE_CHECKING:
    from langchain_dpicl._cost import Cost
    from langchain_dpicl.row_design import RowDesign

OPTIONS = (
    "labels",
    "max_queries",
    "sampling",
    "abstain_below",
    "query_tokens",
    "answer_tokens",
    "calls_per_row",
)
"""The options that only plans of votes have."""
_TOKENS = {"query_tokens": 60, "answer_tokens": 1, "calls_per_row": 1}
_COUNTS = {"labels": 2, "max_queries": 1}


def add_voting(command: argparse.ArgumentParser) -> None:
    """Adds the options that only votes on labels have."""
    group = command.add_argument_group("with --method voting or pate")
    group.add_argument("--max-queries", type=int, help="answers that the share pays for (pate: default as many as fit)")
    group.add_argument("--labels", type=int, help="labels an answer can have (default: those of --public-size)")
    group.add_argument("--abstain-below", type=float, help="share of the expected votes that an answer needs")
    group.add_argument("--query-tokens", type=int, help="public cap of a query with its instruction (default 60)")
    group.add_argument("--answer-tokens", type=int, help="public cap of an answer (default 1)")
    group.add_argument("--calls-per-row", type=int, help="more than 1 where rows are calibrated or score each label")


def planned_queries(arguments: argparse.Namespace, sizes: dict[str | None, int]) -> str:
    """Returns what the command prints."""
    labels = checked_labels(arguments, sizes, _COUNTS)
    out = _plan(arguments, sum(sizes.values()), labels)
    return json.dumps(out, indent=2) if arguments.json else _text(out)


def checked_labels(arguments: argparse.Namespace, sizes: dict[str | None, int], counts: dict[str, int]) -> int:
    """Returns how many labels there are; refuses counts that are missing or too small, under the name that was typed.

    Args:
      arguments: what was typed.
      sizes: declared sizes, whose labels count where none are given.
      counts: the least value of each number that must be given.
    """
    labels = arguments.labels if arguments.labels is not None or None in sizes else len(sizes)
    for name, low in {**counts, **dict.fromkeys(_TOKENS, 1)}.items():
        value, typed = labels if name == "labels" else getattr(arguments, name), f"--{name.replace('_', '-')}"
        if value is None and name in counts:
            raise ConfigurationError(f"{typed}: expected a number with --method {arguments.method}, found none.")
        if value is not None and value < low:
            raise ConfigurationError(f"{typed}: expected an integer >= {low}, found {value}.")
    if arguments.abstain_below is not None:
        check_real("--abstain-below", arguments.abstain_below, low=0.0, high=1.0, low_open=True)
    return int(labels)


def _plan(arguments: argparse.Namespace, public_size: int, labels: int) -> dict[str, Any]:
    from langchain_dpicl.query_planning import compare_queries, expected_rows, plan_queries, query_signal

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
    from langchain_dpicl.query_planning import recommended_design
    from langchain_dpicl.row_design import RowDesign

    asked = {name: getattr(arguments, name) for name in ("rows", "num_slots", "shots_per_slot")}
    if set(asked.values()) == {None} and arguments.sampling is None:
        return recommended_design(public_size, labels=labels, mechanism=arguments.mechanism, **shared)
    return RowDesign.choose(**asked, sampling=arguments.sampling or "poisson", smallest_size=public_size)


def tokens_of(arguments: argparse.Namespace) -> dict[str, int]:
    """Returns the public caps of a call as `cost` takes them."""
    given = {name: getattr(arguments, name) for name in _TOKENS}
    counts = {name: _TOKENS[name] if value is None else value for name, value in given.items()}
    return {"record_tokens": arguments.record_tokens, **counts}


def cost_of(cost: Cost, arguments: argparse.Namespace, *, max_queries: int) -> dict[str, Any]:
    """Returns what a plan's calls cost, as JSON values."""
    return {
        "calls_per_query": (cost.private_calls + cost.public_calls) / max_queries,
        "private_calls": cost.private_calls,
        "public_calls": cost.public_calls,
        "tokens_in": cost.tokens_in,
        "tokens_out": cost.tokens_out,
        "money": cost.money(price_in=arguments.price_in, price_out=arguments.price_out),
    }


def _text(out: dict[str, Any]) -> str:
    plan, cost, signal = out["plan"], out["cost"], out["signal"]
    percent = {name: 100 * value for name, value in signal.items() if name != "signal_to_noise"}
    abstained = ", abstention {abstain_prob:.1f} %".format(**percent) if plan["constants"] else ""
    lines = [
        "epsilon {epsilon:.4f} at delta {delta:g}, adjacency {adjacency}, for {max_queries:,} queries "
        "(nothing is spent)".format(**plan),
        "noise    {mechanism}, multiplier {noise_multiplier:.4f} of the sensitivity "
        "(scale {noise_scale:.3f} on the votes)".format(**plan),
        "rows     {rows}, {num_slots} x {shots_per_slot} shot(s), a new sample for every query, {labels} labels".format(
            **plan
        ),
        "         {public_size} declared units, sampling rate {sampling_rate:.5f}".format(**plan),
        "expected {expected_rows:.1f} rows in use, {expected_shots:.2f} shots each, ".format(**signal)
        + "{empty_slot_prob:.1f} % empty slots".format(**percent),
        "signal   signal-to-noise {signal_to_noise:.2f}, ".format(**signal)
        + "right label {right_label_prob:.1f} %{abstained}".format(**percent, abstained=abstained),
        "guess    {agreement:.1f} % of rows vote for the right label (--agreement: {one_shot_agreement:.1f} % of "
        "one-shot rows); not measured".format(**percent),
        "cost     {calls_per_query:.1f} calls per query: {private_calls:,} private + {public_calls:,} public calls, "
        "{tokens_in:,} tokens in, {tokens_out:,} out, money {money:.2f}".format(**cost),
    ]
    if out["options"]:
        lines += ["", "designs at equal records per query and equal epsilon, best first:"]
        lines.append(
            f"  {'mechanism':<17}{'rows':<7}{'M x k':<10}{'noise':>9}{'agreement':>11}{'right label':>13}{'calls':>14}"
        )
        lines += [_option_text(option) for option in out["options"]]
        lines += ["", _recommended(out["recommendation"])]
    return "\n".join(lines)


def _recommended(best: dict[str, Any]) -> str:
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
