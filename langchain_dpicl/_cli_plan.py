"""Options, checks, JSON and text of `dpicl plan`; the design options are those of `dpicl generate` as well."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from langchain_dpicl import _cli_evolution, _cli_labels, _cli_queries, _cli_retrieval, _cli_training
from langchain_dpicl._cli_options import (
    RECORD_TOKENS,
    Option,
    add_options,
    add_share,
    check_absent,
    check_counts,
    cost_of,
    flag,
    typed_options,
)
from langchain_dpicl.exceptions import ConfigurationError

if TYPE_CHECKING:
    from langchain_dpicl import recommendation
    from langchain_dpicl.planning import GenerationPlan
    from langchain_dpicl.row_design import RowDesign
    from langchain_dpicl.token_rules import TokenRule

Planner = Callable[[argparse.Namespace, dict[str | None, int]], tuple[dict[str, Any], str]]
_MECHANISMS = ("gumbel", "gaussian", "permute_and_flip")
_LOGIT_MECHANISMS = ("recentered_clip", "difference_clip", "clip_and_blend")
_SHAPE = {
    "num_slots": Option("slots, or expected unit rows (default 40)"),
    "shots_per_slot": Option("records per slot (default 1)"),
}
# Counts that only a generation has, with their defaults there.
_GENERATION = {
    "redraw_every": Option("tokens per secret sample (default 1)"),
    "shots_per_label": Option("demonstrations per label", default=1),
    "max_tokens": Option("tokens per demonstration", default=60),
    "public_top_k": Option("public candidates per token", default=100),
}
RULE = {
    "clip": Option("largest clipped logit or difference (default: what noise leaves)", kind=float),
    "temperature": Option("of the released token's softmax (default 1)", kind=float),
    "blend_weight": Option("share of the private rows, clip_and_blend (default 0.5)", kind=float),
    "center": Option("taken off a row, clip_and_blend (default max)", kind=str, choices=("max", "none")),
    "free_tokens": Option("share of the rows below whose difference to the public model tokens are free", kind=float),
    "private_tokens": Option("with --free-tokens: most private tokens per sample"),
}
"""The options that a mechanism of generation may have of its own."""
_PRICES = {
    "price_in": Option("per million prompt tokens", kind=float, default=0.0),
    "price_out": Option("per million answer tokens", kind=float, default=0.0),
    **RECORD_TOKENS,
}
# What each method takes and another does not.
_ONLY = {
    "generation": frozenset({*_GENERATION, *RULE, "full_vocabulary", "public_agreement", "sampling"}),
    "voting": frozenset({*_cli_queries.OPTIONS, "sampling"}),
    "pate": frozenset({*_cli_queries.OPTIONS, *_cli_labels.OPTIONS, "sampling"}),
    "dpsgd": frozenset(_cli_training.OPTIONS),
    "retrieval": _cli_retrieval.OPTIONS,
}


def add_design(command: argparse.ArgumentParser) -> None:
    """Adds the options of a share and of its rows."""
    add_share(command, epsilon="share of the budget", delta="at most 1/(10 * all declared units)")
    mechanisms = (*_MECHANISMS, *_LOGIT_MECHANISMS, _cli_evolution.MECHANISM)
    command.add_argument("--mechanism", choices=mechanisms, default="gumbel")
    command.add_argument("--rows", choices=("units", "slots"))
    command.add_argument(
        "--sampling",
        choices=("poisson", "fixed", "disjoint"),
        help="fixed needs --adjacency replace_one; disjoint: one deal, a batch of its own for every demonstration",
    )
    add_options(command, {**_SHAPE, **_GENERATION})
    add_options(command.add_argument_group(f"with --mechanism {', '.join(_LOGIT_MECHANISMS)}"), RULE)


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
    add_options(command, _PRICES)
    command.add_argument(
        "--agreement", type=float, default=0.6, help="guess: one-shot rows that want the same token, or the right label"
    )
    command.add_argument(
        "--full-vocabulary",
        action="store_true",
        default=None,
        help="the model shows its whole vocabulary: compare the logit mechanisms too (implied by planning one)",
    )
    command.add_argument(
        "--public-agreement",
        type=float,
        help="guess, for logit mechanisms: chance of that token after the public prompt (default a quarter of it)",
    )
    command.add_argument("--no-compare", action="store_true", help="skip the comparison of designs")
    command.add_argument("--json", action="store_true", help="print JSON and nothing else")
    _cli_queries.add_voting(command)
    _cli_labels.add_pate(command)
    _cli_training.add_dpsgd(command)
    _cli_retrieval.add_retrieval(command)
    _cli_evolution.add_evolution(command, runs=False)
    # So that an option of the other method is seen and refused.
    command.set_defaults(run=run, mechanism=None, **dict.fromkeys(_GENERATION))


def sizes_of(items: Sequence[str]) -> dict[str | None, int]:
    """Returns the declared sizes, by label or for None."""
    sizes: dict[str | None, int] = {}
    for item in items:
        match = re.fullmatch(r"(?:(.+)=)?([0-9]{1,15})", item, flags=re.DOTALL)
        if match is None:
            raise ConfigurationError(f"--public-size: expected N or LABEL=N, found {item!r}.")
        label = match[1]
        if label in sizes:
            what = "one N" if label is None else f"one size for the label {label!r}"
            raise ConfigurationError(f"--public-size: expected {what}, found several.")
        sizes[label] = int(match[2])
    if None in sizes and len(sizes) > 1:
        raise ConfigurationError("--public-size: expected one N, or LABEL=N for every label, found both.")
    return sizes


def declared(sizes: dict[str | None, int]) -> int | dict[str, int]:
    """Returns the sizes as `PrivateExamples` takes them."""
    return sizes[None] if None in sizes else {str(label): size for label, size in sizes.items()}


def check_options(arguments: argparse.Namespace) -> None:
    """Refuses counts below 1 under the name that was typed."""
    check_counts(arguments, {**_SHAPE, **RULE, **_GENERATION})


def planned(arguments: argparse.Namespace) -> str:
    """Returns what the command prints."""
    check_options(arguments)
    sizes = sizes_of(arguments.public_size)
    _check_method(arguments)
    _check_declarable(sizes, arguments.delta)
    _cli_evolution.check_evolution(arguments)
    out, text = _planner(arguments)(arguments, sizes)
    return json.dumps(out, indent=2) if arguments.json else text


def _planner(arguments: argparse.Namespace) -> Planner:
    """Returns what makes the plan, with the mechanism set where the method has a default."""
    if arguments.mechanism == _cli_evolution.MECHANISM:
        return _cli_evolution.planned_evolution
    if arguments.method == "dpsgd":
        return _cli_training.planned_training
    if arguments.method == "retrieval":
        return _cli_retrieval.planned_retrieval
    arguments.mechanism = arguments.mechanism or "gumbel"
    if arguments.method == "voting":
        return _cli_queries.planned_queries
    if arguments.method == "pate":
        return _cli_labels.planned_labels
    return _planned_generation


def _planned_generation(arguments: argparse.Namespace, sizes: dict[str | None, int]) -> tuple[dict[str, Any], str]:
    for name, option in _GENERATION.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, option.default)
    out = _generation(arguments, sizes)
    return out, _plan_text(out)


def _check_method(arguments: argparse.Namespace) -> None:
    """Refuses options of other methods, which would change nothing."""
    others = sorted(frozenset().union(*_ONLY.values()) - _ONLY[arguments.method])
    check_absent(arguments, others, where=f"with --method {arguments.method}")
    if arguments.method == "generation":
        return
    if arguments.mechanism in {*_LOGIT_MECHANISMS, _cli_evolution.MECHANISM}:
        expected = f"one of {', '.join(_MECHANISMS)} with --method {arguments.method}"
        raise ConfigurationError(f"--mechanism: expected {expected}, found {arguments.mechanism!r}.")
    if arguments.sampling == "disjoint":
        raise ConfigurationError(f"--sampling: expected poisson or fixed with --method {arguments.method}.")


def _check_declarable(sizes: dict[str | None, int], delta: float) -> None:
    """Refuses sizes and a delta that a run would refuse."""
    from langchain_dpicl.privacy.examples import PrivateExamples

    split = {} if None in sizes else {"label_key": "label", "labels": tuple(map(str, sizes))}
    PrivateExamples([], public_size=declared(sizes), **split).check_delta(delta)  # type: ignore[arg-type]


def _generation(arguments: argparse.Namespace, sizes: dict[str | None, int]) -> dict[str, Any]:
    from langchain_dpicl.recommendation import local_cost, published_epsilon, signal_of
    from langchain_dpicl.row_design import RowDesign
    from langchain_dpicl.token_rules import TokenRule

    rule = TokenRule(arguments.mechanism, **typed_options(arguments, RULE))
    shape = {name: getattr(arguments, name) for name in ("rows", "num_slots", "shots_per_slot")}
    design = RowDesign.choose(**shape, sampling=arguments.sampling or "poisson")
    plan = _plan_of(arguments, sizes, design, rule)
    guess = {"one_shot": arguments.agreement, "public_agreement": arguments.public_agreement}
    out: dict[str, Any] = {
        "plan": plan.to_dict(),
        "cost": cost_of(plan.cost(record_tokens=arguments.record_tokens), arguments),
        "local": dataclasses.asdict(local_cost(plan, record_tokens=arguments.record_tokens)),
        "signal": {"one_shot_agreement": arguments.agreement, **signal_of(plan, **guess)},
        "options": [],
    }
    if rule.is_logit:
        out["published_epsilon"] = published_epsilon(plan)
    if not arguments.no_compare:
        out |= _comparison(sizes, design, rule, arguments)
    return out


def _plan_of(
    arguments: argparse.Namespace, sizes: dict[str | None, int], design: RowDesign, rule: TokenRule
) -> GenerationPlan:
    from langchain_dpicl.planning import Segment, plan_generation

    plan = plan_generation(
        sizes,
        epsilon=arguments.epsilon,
        delta=arguments.delta,
        adjacency=arguments.adjacency,
        mechanism=rule,
        design=design,
        redraw_every=arguments.redraw_every,
        shots_per_label=arguments.shots_per_label,
        segments=(Segment("text", arguments.max_tokens),),
        candidates=arguments.public_top_k + 1,
    )
    if plan.epsilon > arguments.epsilon:
        raise ConfigurationError(
            f"--clip, --temperature: expected noise that costs at most epsilon {arguments.epsilon}, found "
            f"{plan.epsilon:.4f}. Give one of the two, or raise --temperature or --num-slots."
        )
    return plan


def _comparison(
    sizes: dict[str | None, int], design: RowDesign, rule: TokenRule, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Returns the options, best first, and the recommended ones."""
    from langchain_dpicl.recommendation import best_drawn, compare, thriftiest

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
        record_tokens=arguments.record_tokens,
        agreement=arguments.agreement,
        public_agreement=arguments.public_agreement,
        full_vocabulary=bool(arguments.full_vocabulary) or rule.is_logit,
        rule=rule,
    )
    asked = typed_options(arguments, RULE)

    def shown(option: recommendation.Option) -> dict[str, Any]:
        numbers = option.to_dict()
        return {**numbers, "command": _command(numbers, rule.mechanism, asked)}

    comparison: dict[str, Any] = {"options": [shown(option) for option in options]}
    comparison["recommendation"] = comparison["options"][0]
    drawn = best_drawn(options)
    if drawn is not None:
        comparison["recommendation_drawn"] = shown(drawn)
        comparison["recommendation_local"] = shown(thriftiest(options))
    return comparison


def _command(option: dict[str, Any], mechanism: str, asked: dict[str, Any]) -> str:
    """Returns the options that make `dpicl generate` take a design."""
    command = (
        f"--mechanism {option['mechanism']} --rows {option['rows']} --num-slots {option['num_slots']} "
        f"--shots-per-slot {option['shots_per_slot']} --redraw-every {option['redraw_every']}"
    )
    if option["sampling"] != "poisson":
        command += f" --sampling {option['sampling']}"
    if option["mechanism"] != mechanism:
        return command
    # Where both are given, the noise follows from them: the comparison leaves the clip out.
    options = {name: value for name, value in asked.items() if not (name == "clip" and "temperature" in asked)}
    return command + "".join(f" {flag(name)} {value}" for name, value in options.items())


def _plan_text(out: dict[str, Any]) -> str:
    plan, cost, local = out["plan"], out["cost"], out["local"]
    lines = [
        "epsilon {epsilon:.4f} at delta {delta:g}, adjacency {adjacency} (nothing is spent)".format(**plan),
        *_noise_text(plan, out),
        "rows     {rows}, {num_slots} x {shots_per_slot} shot(s), {how}, {candidates} candidates".format(
            **plan, how=_sample_text(plan)
        ),
    ]
    for row in plan["labels"]:
        who = "all records" if row["label"] is None else row["label"]
        lines.append(f"         {who}: {row['public_size']} declared units, sampling rate {row['sampling_rate']:.5f}")
    lines += _signal_text(out["signal"])
    lines.append(
        "cost     {private_calls:,} private + {public_calls:,} public calls, {tokens_in:,} tokens in, "
        "{tokens_out:,} out, money {money:.2f}".format(**cost)
    )
    lines.append(
        "local    {prefills:,} prompts of {prefilled_tokens:,} tokens read + {decoded_tokens:,} tokens decoded, "
        "where a sample's cache is kept".format(**local)
    )
    return "\n".join(lines + _options_text(out))


def _noise_text(plan: dict[str, Any], out: dict[str, Any]) -> list[str]:
    if "published_epsilon" not in out:
        noise = "multiplier {noise_multiplier:.4f} of the sensitivity (scale {noise_scale:.3f} on the sum)"
        return ["noise    {mechanism}, ".format(**plan) + noise.format(**plan)]
    blend = ", blend weight {blend_weight:g}".format(**plan) if "blend_weight" in plan else ""
    numbers = "multiplier {noise_multiplier:.4f} of the range: clip {clip:.4g}, temperature {temperature:.4g}"
    lines = ["noise    {mechanism}, ".format(**plan) + numbers.format(**plan) + blend]
    paper = out["published_epsilon"]
    if plan.get("free_tokens") is None:
        price = "no finite epsilon" if paper is None else f"epsilon {paper:.4g}"
        lines.append(f"         the paper's accounting: {price} for it (advanced composition; sampling earns nothing)")
    return lines


def _sample_text(plan: dict[str, Any]) -> str:
    if plan["sampling"] == "disjoint":
        return "one deal of disjoint batches"
    return f"a new sample every {plan['redraw_every']} token(s)"


def _signal_text(signal: dict[str, Any]) -> list[str]:
    whose = "" if signal["label"] is None else f"for {signal['label']}, the smallest declared label: "
    empty, right = 100 * signal["empty_slot_prob"], 100 * signal["right_token_prob"]
    share, one = 100 * signal["agreement"], 100 * signal["one_shot_agreement"]
    lines = [
        f"expected {whose}"
        + "{expected_rows:.1f} rows in use, {expected_shots:.2f} shots each, ".format(**signal)
        + f"{empty:.1f} % empty slots",
        f"signal   {whose}signal-to-noise {signal['signal_to_noise']:.2f}, right token {right:.1f} %",
        f"guess    {share:.1f} % of rows want the same token (--agreement: {one:.1f} % of one-shot rows); not measured",
    ]
    if "public_agreement" in signal:
        lines[1] += f" ({100 * signal['ceiling_prob']:.1f} % at unlimited epsilon: it is drawn from a softmax)"
        public = 100 * signal["public_agreement"]
        lines.append(f"         its chance after the public prompt: {public:.1f} % (--public-agreement); not measured")
    return lines


def _options_text(out: dict[str, Any]) -> list[str]:
    if not out["options"]:
        return []
    has_logits = "recommendation_drawn" in out
    more = f"{'unlimited':>11}{'local tokens':>14}" if has_logits else ""
    lines = ["", "designs at equal records per token and equal epsilon, best first:"]
    lines.append(
        f"  {'mechanism':<17}{'rows':<7}{'M x k':<10}{'c':>4} {'sampling':<9}{'noise':>8}{'right token':>13}"
        f"{'calls':>12}{more}"
    )
    lines += [_option_text(option, has_logits=has_logits) for option in out["options"]]
    lines += ["", f"recommended: {out['recommendation']['command']}"]
    if has_logits:
        lines += [
            f"drawn, as a model draws: {out['recommendation_drawn']['command']}",
            f"fewest local tokens within 5 points: {out['recommendation_local']['command']}",
            "",
            "right token: chance that the released token is the one most rows want; unlimited: at unlimited epsilon",
        ]
    return lines


def _option_text(option: dict[str, Any], *, has_logits: bool) -> str:
    shape = f"{option['num_slots']} x {option['shots_per_slot']}"
    tokens = option["prefilled_tokens"] + option["decoded_tokens"]
    more = f"{100 * option['ceiling_prob']:>10.1f}%{tokens:>14,}" if has_logits else ""
    return (
        f"  {option['mechanism']:<17}{option['rows']:<7}{shape:<10}{option['redraw_every']:>4} {option['sampling']:<9}"
        f"{option['noise_multiplier']:>8.3f}{100 * option['right_token_prob']:>12.1f}%{option['private_calls']:>12,}"
        f"{more}"
    )
