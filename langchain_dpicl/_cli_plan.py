"""What `dpicl plan` shows: options, checks and the text or JSON of a plan. Prints nothing, reads no record.

Knows public numbers only. The plans of answers to queries are in `_cli_queries`, those of labels in `_cli_labels`.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from langchain_dpicl import _cli_labels, _cli_queries
from langchain_dpicl.exceptions import ConfigurationError

if TYPE_CHECKING:
    from langchain_dpicl.planning import GenerationPlan, RowDesign

# Counts that only a generation has, with their defaults there.
_GENERATION = {"redraw_every": 1, "shots_per_label": 1, "max_tokens": 60, "public_top_k": 100}
# What each method takes and another does not.
_ONLY = {
    "generation": frozenset(_GENERATION),
    "voting": frozenset(_cli_queries.OPTIONS),
    "pate": frozenset({*_cli_queries.OPTIONS, *_cli_labels.OPTIONS}),
}
_COUNTS = ("num_slots", "shots_per_slot", *_GENERATION)


def add_design(command: argparse.ArgumentParser) -> None:
    """Adds the options of a share and of its rows."""
    command.add_argument("--epsilon", type=float, required=True, help="share of the budget")
    command.add_argument("--delta", type=float, required=True, help="at most 1/(10 * all declared units)")
    command.add_argument("--adjacency", choices=("add_remove", "replace_one"), default="add_remove")
    command.add_argument("--mechanism", choices=("gumbel", "gaussian", "permute_and_flip"), default="gumbel")
    command.add_argument("--rows", choices=("units", "slots"))
    command.add_argument("--num-slots", type=int, help="slots, or expected unit rows (default 40)")
    command.add_argument("--shots-per-slot", type=int, help="records per slot (default 1)")
    command.add_argument("--redraw-every", type=int, default=1, help="tokens per secret sample")
    command.add_argument("--shots-per-label", type=int, default=1, help="demonstrations per label")
    command.add_argument("--max-tokens", type=int, default=60, help="tokens per demonstration")
    command.add_argument("--public-top-k", type=int, default=100, help="public candidates per token")


def add_plan(commands: Any, *, run: Callable[[argparse.Namespace], int]) -> None:
    """Adds the command."""
    command = commands.add_parser("plan", help="noise, calls, money and expected signal, before any spend")
    command.add_argument(
        "--method", choices=tuple(_ONLY), default="generation", help="what is planned (default: generation)"
    )
    add_design(command)
    command.add_argument(
        "--public-size",
        action="append",
        required=True,
        metavar="[LABEL=]N",
        help="declared number of units, once per label",
    )
    command.add_argument("--price-in", type=float, default=0.0, help="per million prompt tokens")
    command.add_argument("--price-out", type=float, default=0.0, help="per million answer tokens")
    command.add_argument("--record-tokens", type=int, default=60, help="public cap of a record, in tokens")
    command.add_argument(
        "--agreement", type=float, default=0.6, help="guess: one-shot rows that want the same token, or the right label"
    )
    command.add_argument("--no-compare", action="store_true", help="skip the comparison of designs")
    command.add_argument("--json", action="store_true", help="print JSON and nothing else")
    _cli_queries.add_voting(command)
    _cli_labels.add_pate(command)
    # So that an option of the other method is seen and refused.
    command.set_defaults(run=run, **dict.fromkeys(_GENERATION))


def sizes_of(given: Sequence[str]) -> dict[str | None, int]:
    """Returns the declared sizes, by label or for None."""
    sizes: dict[str | None, int] = {}
    for item in given:
        found = re.fullmatch(r"(?:(.+)=)?([0-9]{1,15})", item, flags=re.DOTALL)
        if found is None:
            raise ConfigurationError(f"--public-size: expected N or LABEL=N, found {item!r}.")
        label = found[1]
        if label in sizes:
            what = "one N" if label is None else f"one size for the label {label!r}"
            raise ConfigurationError(f"--public-size: expected {what}, found several.")
        sizes[label] = int(found[2])
    if None in sizes and len(sizes) > 1:
        raise ConfigurationError("--public-size: expected one N, or LABEL=N for every label, found both.")
    return sizes


def declared(sizes: dict[str | None, int]) -> int | dict[str, int]:
    """Returns the sizes as `PrivateExamples` takes them."""
    return sizes[None] if None in sizes else {str(label): size for label, size in sizes.items()}


def check_options(arguments: argparse.Namespace) -> None:
    """Refuses counts below 1 under the name that was typed."""
    for name in _COUNTS:
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ConfigurationError(f"--{name.replace('_', '-')}: expected an integer >= 1, found {value}.")


def planned(arguments: argparse.Namespace) -> str:
    """Returns what the command prints."""
    check_options(arguments)
    sizes = sizes_of(arguments.public_size)
    _check_method(arguments)
    _check_declarable(sizes, arguments.delta)
    if arguments.method == "voting":
        return _cli_queries.planned_queries(arguments, sizes)
    if arguments.method == "pate":
        return _cli_labels.planned_labels(arguments, sizes)
    for name, value in _GENERATION.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    out = _generation(arguments, sizes)
    return json.dumps(out, indent=2) if arguments.json else _plan_text(out)


def _check_method(arguments: argparse.Namespace) -> None:
    """Refuses options of the other methods: they would change nothing."""
    for name in sorted(frozenset().union(*_ONLY.values()) - _ONLY[arguments.method]):
        if getattr(arguments, name) is not None:
            raise ConfigurationError(f"--{name.replace('_', '-')}: expected none with --method {arguments.method}.")


def _check_declarable(sizes: dict[str | None, int], delta: float) -> None:
    """Refuses sizes and a delta that a run would refuse, by asking the same rule on no records."""
    from langchain_dpicl.privacy.examples import PrivateExamples

    split = {} if None in sizes else {"label_key": "label", "labels": tuple(map(str, sizes))}
    PrivateExamples([], public_size=declared(sizes), **split).check_delta(delta)  # type: ignore[arg-type]


def _generation(arguments: argparse.Namespace, sizes: dict[str | None, int]) -> dict[str, Any]:
    from langchain_dpicl.planning import RowDesign, Segment, plan_generation
    from langchain_dpicl.recommendation import signal_of

    design = RowDesign.choose(
        rows=arguments.rows, num_slots=arguments.num_slots, shots_per_slot=arguments.shots_per_slot
    )
    plan = plan_generation(
        sizes,
        epsilon=arguments.epsilon,
        delta=arguments.delta,
        adjacency=arguments.adjacency,
        mechanism=arguments.mechanism,
        design=design,
        redraw_every=arguments.redraw_every,
        shots_per_label=arguments.shots_per_label,
        segments=(Segment("text", arguments.max_tokens),),
        candidates=arguments.public_top_k + 1,
    )
    out: dict[str, Any] = {
        "plan": plan.to_dict(),
        "cost": _cost(plan, arguments),
        "signal": {"one_shot_agreement": arguments.agreement, **signal_of(plan, one_shot=arguments.agreement)},
        "options": [] if arguments.no_compare else _options(sizes, design, arguments),
    }
    if out["options"]:
        out["recommendation"] = out["options"][0]
    return out


def _cost(plan: GenerationPlan, arguments: argparse.Namespace) -> dict[str, Any]:
    cost = plan.cost(record_tokens=arguments.record_tokens)
    return {
        "private_calls": cost.private_calls,
        "public_calls": cost.public_calls,
        "tokens_in": cost.tokens_in,
        "tokens_out": cost.tokens_out,
        "money": cost.money(price_in=arguments.price_in, price_out=arguments.price_out),
    }


def _options(sizes: dict[str | None, int], design: RowDesign, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    from langchain_dpicl.recommendation import compare

    options = compare(
        sizes,
        epsilon=arguments.epsilon,
        delta=arguments.delta,
        adjacency=arguments.adjacency,
        base=design,
        redraw_every=arguments.redraw_every,
        shots_per_label=arguments.shots_per_label,
        max_tokens=arguments.max_tokens,
        candidates=arguments.public_top_k + 1,
        agreement=arguments.agreement,
    )
    return [option.to_dict() for option in options]


def _plan_text(out: dict[str, Any]) -> str:
    plan, cost = out["plan"], out["cost"]
    lines = [
        "epsilon {epsilon:.4f} at delta {delta:g}, adjacency {adjacency} (nothing is spent)".format(**plan),
        "noise    {mechanism}, multiplier {noise_multiplier:.4f} of the sensitivity "
        "(scale {noise_scale:.3f} on the sum)".format(**plan),
        "rows     {rows}, {num_slots} x {shots_per_slot} shot(s), a new sample every {redraw_every} token(s), "
        "{candidates} candidates".format(**plan),
    ]
    for row in plan["labels"]:
        who = "all records" if row["label"] is None else row["label"]
        lines.append(f"         {who}: {row['public_size']} declared units, sampling rate {row['sampling_rate']:.5f}")
    lines += _signal_text(out["signal"])
    lines.append(
        "cost     {private_calls:,} private + {public_calls:,} public calls, {tokens_in:,} tokens in, "
        "{tokens_out:,} out, money {money:.2f}".format(**cost)
    )
    if out["options"]:
        lines.append("")
        lines.append("designs at equal records per token and equal epsilon, best first:")
        lines.append(f"  {'mechanism':<17}{'rows':<7}{'M x k':<10}{'c':>4}{'noise':>9}{'right token':>13}{'calls':>12}")
        lines += [_option_text(option) for option in out["options"]]
        best = out["recommendation"]
        lines.append("")
        lines.append(
            f"recommended: --mechanism {best['mechanism']} --rows {best['rows']} --num-slots {best['num_slots']} "
            f"--shots-per-slot {best['shots_per_slot']} --redraw-every {best['redraw_every']}"
        )
    return "\n".join(lines)


def _signal_text(signal: dict[str, Any]) -> list[str]:
    whose = "" if signal["label"] is None else f"for {signal['label']}, the smallest declared label: "
    empty, right = 100 * signal["empty_slot_prob"], 100 * signal["right_token_prob"]
    share, one = 100 * signal["agreement"], 100 * signal["one_shot_agreement"]
    return [
        f"expected {whose}"
        + "{expected_rows:.1f} rows in use, {expected_shots:.2f} shots each, ".format(**signal)
        + f"{empty:.1f} % empty slots",
        f"signal   {whose}signal-to-noise {signal['signal_to_noise']:.2f}, right token {right:.1f} %",
        f"guess    {share:.1f} % of rows want the same token (--agreement: {one:.1f} % of one-shot rows); not measured",
    ]


def _option_text(option: dict[str, Any]) -> str:
    shape = f"{option['num_slots']} x {option['shots_per_slot']}"
    return (
        f"  {option['mechanism']:<17}{option['rows']:<7}{shape:<10}{option['redraw_every']:>4}"
        f"{option['noise_multiplier']:>9.3f}{100 * option['right_token_prob']:>12.1f}%{option['private_calls']:>12,}"
    )
