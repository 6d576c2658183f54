"""Options, checks, JSON and text of `dpicl plan` for generation, `--method pate` and `--method dpsgd`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from langchain_dpicl.cli import plan_queries, synthesize
from langchain_dpicl.cli.inputs import (
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
from langchain_dpicl.cli.plan_queries import check_label_count, cost_text, noise_text, signal_text, tokens_of
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy._validate import check_positive, check_real

if TYPE_CHECKING:
    from langchain_dpicl.generation import plan as recommendation
    from langchain_dpicl.generation.plan import GenerationPlan
    from langchain_dpicl.generation.token_mechanisms import TokenRule
    from langchain_dpicl.pate.plan import LabellingOption, LabellingPlan
    from langchain_dpicl.planning.expected_utility import RowDesign
    from langchain_dpicl.privacy.extensions.method_tickets import Teachers
    from langchain_dpicl.soft_prompts.plan import TrainingPlan


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


def labelling_plan_output(arguments: argparse.Namespace, sizes: dict[str | None, int]) -> tuple[dict[str, Any], str]:
    """Returns what the command prints, as JSON values and as text."""
    labels = check_label_count(arguments, sizes, ("labels", "public_inputs"))
    check_counts(arguments, OPTIONS)
    if arguments.chance is not None:
        check_real("--chance", arguments.chance, low=0.0, high=1.0, low_open=True)
    if arguments.noise is not None:
        check_positive("--noise", arguments.noise)
    out = _out(arguments, sum(sizes.values()), labels)
    return out, _text(out)


def _out(arguments: argparse.Namespace, public_size: int, labels: int) -> dict[str, Any]:
    from langchain_dpicl.planning.share_plan import with_noise_for
    from langchain_dpicl.runs.query_plan import query_signal

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
    from langchain_dpicl.pate.plan import propose_labelling
    from langchain_dpicl.privacy.extensions.method_tickets import TEACHERS
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
    from langchain_dpicl.planning.expected_utility import RowDesign

    if arguments.teachers == "fixed" and arguments.sampling is not None:
        raise ConfigurationError("--sampling: expected none with --teachers fixed, which are never drawn again.")
    asked = {name: getattr(arguments, name) for name in ("rows", "num_slots", "shots_per_slot", "sampling")}
    if set(asked.values()) == {None}:
        return None
    shape = {**asked, "sampling": arguments.sampling or "poisson"}
    return [RowDesign.choose(**shape, smallest_size=public_size)]


def _teachers(plan: LabellingPlan, arguments: argparse.Namespace, labels: int) -> dict[str, Any]:
    """Returns what the same noise on as many one-shot teachers costs, for each way of drawing them."""
    from langchain_dpicl.pate.plan import compare_teachers
    from langchain_dpicl.planning.expected_utility import noise_deviation

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
        lines += ["", _recommendation_text(out["recommendation"])]
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


def _recommendation_text(best: dict[str, Any]) -> str:
    # Fixed teachers are dealt into slots; --rows would say nothing more.
    rows = "" if best["teachers"] == "fixed" else f" --rows {best['rows']}"
    sampling = " --sampling fixed" if best["sampling"] == "fixed" else ""
    return (
        f"recommended: --teachers {best['teachers']} --mechanism {best['mechanism']} "
        f"--max-queries {best['max_queries']}{rows} --num-slots {best['num_slots']} "
        f"--shots-per-slot {best['shots_per_slot']}{sampling}"
    )


_PAPER = (
    "Duan et al. (2023): batch 1,024, clip .01 to 4 (mostly .05 to .2), learning rate .005 to .05, 10 to 100 epochs, "
    "1 to 50 virtual tokens"
)
_BATCH, _CLIP = 1024, 0.1
# Ten virtual tokens of a model of width 768, as a soft prompt.
_PARAMETERS = 7680
TRAINING_OPTIONS = {
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
    add_options(command.add_argument_group("with --method dpsgd"), TRAINING_OPTIONS)


def training_plan_output(arguments: argparse.Namespace, sizes: dict[str | None, int]) -> tuple[dict[str, Any], str]:
    """Returns what the command prints, as JSON values and as text."""
    for name, missing in _WITHOUT.items():
        if getattr(arguments, name) != missing:
            raise ConfigurationError(f"{flag(name)}: expected none with --method dpsgd.")
    if arguments.mechanism not in {None, "gaussian"}:
        raise ConfigurationError(f"--mechanism: expected gaussian with --method dpsgd, found {arguments.mechanism!r}.")
    check_counts(arguments, {**TRAINING_OPTIONS, **RECORD_TOKENS})
    if (arguments.steps is None) == (arguments.epochs is None):
        raise ConfigurationError("--steps, --epochs: expected one of them with --method dpsgd.")
    for name in ("clip_norm", "epochs"):
        if getattr(arguments, name) is not None:
            check_positive(flag(name), getattr(arguments, name))
    out = _training_plan_out(arguments, sum(sizes.values()))
    return out, _training_text(out)


def _training_plan_out(arguments: argparse.Namespace, public_size: int) -> dict[str, Any]:
    batch = min(_BATCH, public_size) if arguments.expected_batch_size is None else arguments.expected_batch_size
    if batch > public_size:
        raise ConfigurationError(f"--expected-batch-size: expected at most {public_size} records, found {batch}.")
    plan = _plan(arguments, public_size, batch, steps=arguments.steps, epochs=arguments.epochs)
    cost = plan.cost(record_tokens=arguments.record_tokens, examples_per_unit=arguments.examples_per_unit or 1)
    out: dict[str, Any] = {
        "plan": plan.to_dict(),
        "noise_to_clip": plan.noise_to_clip,
        "cost": {"gradients": cost.private_calls, "tokens": cost.tokens_in},
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
    from langchain_dpicl.soft_prompts.plan import plan_training

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


def _training_text(out: dict[str, Any]) -> str:
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
        lines += [_training_option_text(option) for option in out["options"]]
    return "\n".join(lines)


def _training_option_text(option: dict[str, Any]) -> str:
    return (
        f"  {option['expected_batch_size']:>9,}{option['steps']:>9,}{option['noise_multiplier']:>9.4f}"
        f"{option['noise_scale']:>17.3g}{option['noise_to_clip']:>11.3g}"
    )


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
    "voting": frozenset({*plan_queries.OPTIONS, "sampling"}),
    "pate": frozenset({*plan_queries.OPTIONS, *OPTIONS, "sampling"}),
    "dpsgd": frozenset(TRAINING_OPTIONS),
    "retrieval": plan_queries.RETRIEVAL_OPTIONS,
}


def add_design(command: argparse.ArgumentParser) -> None:
    """Adds the options of a share and of its rows."""
    add_share(command, epsilon="share of the budget", delta="at most 1/(10 * all declared units)")
    mechanisms = (*_MECHANISMS, *_LOGIT_MECHANISMS, synthesize.MECHANISM)
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
    plan_queries.add_voting(command)
    add_pate(command)
    add_dpsgd(command)
    plan_queries.add_retrieval(command)
    synthesize.add_evolution(command, runs=False)
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


def declared_sizes(sizes: dict[str | None, int]) -> int | dict[str, int]:
    """Returns the sizes as `PrivateExamples` takes them."""
    return sizes[None] if None in sizes else {str(label): size for label, size in sizes.items()}


def check_options(arguments: argparse.Namespace) -> None:
    """Refuses counts below 1 under the name that was typed."""
    check_counts(arguments, {**_SHAPE, **RULE, **_GENERATION})


def plan_output(arguments: argparse.Namespace) -> str:
    """Returns what the command prints."""
    check_options(arguments)
    sizes = sizes_of(arguments.public_size)
    _check_method(arguments)
    _check_declarable(sizes, arguments.delta)
    synthesize.check_evolution(arguments)
    out, text = _planner(arguments)(arguments, sizes)
    return json.dumps(out, indent=2) if arguments.json else text


def _planner(arguments: argparse.Namespace) -> Planner:
    """Returns what makes the plan, with the mechanism set where the method has a default."""
    if arguments.mechanism == synthesize.MECHANISM:
        return synthesize.evolution_plan_output
    if arguments.method == "dpsgd":
        return training_plan_output
    if arguments.method == "retrieval":
        return plan_queries.retrieval_plan_output
    arguments.mechanism = arguments.mechanism or "gumbel"
    if arguments.method == "voting":
        return plan_queries.query_plan_output
    if arguments.method == "pate":
        return labelling_plan_output
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
    if arguments.mechanism in {*_LOGIT_MECHANISMS, synthesize.MECHANISM}:
        expected = f"one of {', '.join(_MECHANISMS)} with --method {arguments.method}"
        raise ConfigurationError(f"--mechanism: expected {expected}, found {arguments.mechanism!r}.")
    if arguments.sampling == "disjoint":
        raise ConfigurationError(f"--sampling: expected poisson or fixed with --method {arguments.method}.")


def _check_declarable(sizes: dict[str | None, int], delta: float) -> None:
    """Refuses sizes and a delta that a run would refuse."""
    from langchain_dpicl.privacy.data.private_examples import PrivateExamples

    split = {} if None in sizes else {"label_key": "label", "labels": tuple(map(str, sizes))}
    PrivateExamples([], public_size=declared_sizes(sizes), **split).check_delta(delta)  # type: ignore[arg-type]


def _generation(arguments: argparse.Namespace, sizes: dict[str | None, int]) -> dict[str, Any]:
    from langchain_dpicl.generation.plan import local_cost, published_epsilon, signal_of
    from langchain_dpicl.generation.token_mechanisms import TokenRule
    from langchain_dpicl.planning.expected_utility import RowDesign

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
    from langchain_dpicl.generation.plan import Segment, plan_generation

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
    from langchain_dpicl.generation.plan import best_drawn, compare, thriftiest

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

    def shown(option: recommendation.DesignOption) -> dict[str, Any]:
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
    lines += [_plan_option_text(option, has_logits=has_logits) for option in out["options"]]
    lines += ["", f"recommended: {out['recommendation']['command']}"]
    if has_logits:
        lines += [
            f"drawn, as a model draws: {out['recommendation_drawn']['command']}",
            f"fewest local tokens within 5 points: {out['recommendation_local']['command']}",
            "",
            "right token: chance that the released token is the one most rows want; unlimited: at unlimited epsilon",
        ]
    return lines


def _plan_option_text(option: dict[str, Any], *, has_logits: bool) -> str:
    shape = f"{option['num_slots']} x {option['shots_per_slot']}"
    tokens = option["prefilled_tokens"] + option["decoded_tokens"]
    more = f"{100 * option['ceiling_prob']:>10.1f}%{tokens:>14,}" if has_logits else ""
    return (
        f"  {option['mechanism']:<17}{option['rows']:<7}{shape:<10}{option['redraw_every']:>4} {option['sampling']:<9}"
        f"{option['noise_multiplier']:>8.3f}{100 * option['right_token_prob']:>12.1f}%{option['private_calls']:>12,}"
        f"{more}"
    )
