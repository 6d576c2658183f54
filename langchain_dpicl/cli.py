"""The `dpicl` command: `epsilon`, `plan`, `generate`. The only room that prints."""

from __future__ import annotations

import argparse
import csv
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from langchain_dpicl.exceptions import ConfigurationError, DPICLError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, or 2 after printing an error of our tree to stderr."""
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except (DPICLError, OSError, json.JSONDecodeError) as error:
        print(f"dpicl: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dpicl", description="Differentially private in-context learning.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_epsilon(commands)
    _add_plan(commands)
    _add_generate(commands)
    return parser


# -- dpicl epsilon -----------------------------------------------------------------------------------------------


def _add_epsilon(commands: Any) -> None:
    command = commands.add_parser("epsilon", help="upper bounds of epsilon for a file of mechanisms")
    command.add_argument("file", type=Path, help='JSON: {"checks": [...]} or a list of checks')
    command.add_argument("--json", action="store_true", help='print exactly [{"id": str, "epsilon": float}]')
    command.set_defaults(run=_epsilon)


def _epsilon(arguments: argparse.Namespace) -> int:
    from langchain_dpicl.privacy.checks import evaluate_checks

    results = evaluate_checks(json.loads(arguments.file.read_text(encoding="utf-8")))
    if arguments.json:
        print(json.dumps(results))
        return 0
    width = max((len(result["id"]) for result in results), default=2)
    print(f"{'id':<{width}}  epsilon (upper bound)")
    for result in results:
        print(f"{result['id']:<{width}}  {result['epsilon']:.6g}")
    return 0


# -- dpicl plan --------------------------------------------------------------------------------------------------


def _add_design(command: argparse.ArgumentParser) -> None:
    command.add_argument("--epsilon", type=float, required=True, help="share of the budget")
    command.add_argument("--delta", type=float, required=True)
    command.add_argument("--adjacency", choices=("add_remove", "replace_one"), default="add_remove")
    command.add_argument("--mechanism", choices=("gumbel", "gaussian", "permute_and_flip"), default="gumbel")
    command.add_argument("--rows", choices=("units", "slots"))
    command.add_argument("--num-slots", type=int, help="slots, or expected unit rows (default 40)")
    command.add_argument("--shots-per-slot", type=int, help="records per slot (default 1)")
    command.add_argument("--redraw-every", type=int, default=1, help="tokens per secret sample")
    command.add_argument("--shots-per-label", type=int, default=1, help="demonstrations per label")
    command.add_argument("--max-tokens", type=int, default=60, help="tokens per demonstration")
    command.add_argument("--public-top-k", type=int, default=100, help="public candidates per token")


def _add_plan(commands: Any) -> None:
    command = commands.add_parser("plan", help="noise, calls, money and expected signal, before any spend")
    _add_design(command)
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
    command.add_argument("--agreement", type=float, default=0.6, help="guess: one-shot rows that want the same token")
    command.add_argument("--no-compare", action="store_true", help="skip the comparison of designs")
    command.add_argument("--json", action="store_true")
    command.set_defaults(run=_plan)


def _sizes(given: Sequence[str]) -> dict[str | None, int]:
    sizes: dict[str | None, int] = {}
    for item in given:
        label, _, number = item.rpartition("=")
        if not number.isdigit():
            raise ConfigurationError(f"--public-size: expected N or LABEL=N, found {item!r}.")
        sizes[label or None] = int(number)
    if None in sizes and len(sizes) > 1:
        raise ConfigurationError("--public-size: expected one N, or LABEL=N for every label, found both.")
    return sizes


def _plan(arguments: argparse.Namespace) -> int:
    from langchain_dpicl.planning import RowDesign, Segment, plan_generation
    from langchain_dpicl.recommendation import agreement_of, compare

    sizes = _sizes(arguments.public_size)
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
    cost = plan.cost(record_tokens=arguments.record_tokens)
    shots = plan.expected_signal(0.5)["expected_shots"]
    out: dict[str, Any] = {
        "plan": plan.to_dict(),
        "cost": {
            "private_calls": cost.private_calls,
            "public_calls": cost.public_calls,
            "tokens_in": cost.tokens_in,
            "tokens_out": cost.tokens_out,
            "money": cost.money(price_in=arguments.price_in, price_out=arguments.price_out),
        },
        "signal": plan.expected_signal(agreement_of(shots, one_shot=arguments.agreement)),
        "options": [],
    }
    if not arguments.no_compare:
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
        out["options"] = [option.to_dict() for option in options]
        out["recommendation"] = out["options"][0]
    print(json.dumps(out, indent=2) if arguments.json else _plan_text(out))
    return 0


def _plan_text(out: dict[str, Any]) -> str:
    plan, cost, signal = out["plan"], out["cost"], out["signal"]
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
    empty, right = 100 * signal["empty_slot_prob"], 100 * signal["right_token_prob"]
    lines += [
        "expected {expected_rows:.1f} rows in use, {expected_shots:.2f} shots each, ".format(**signal)
        + f"{empty:.1f} % empty slots",
        f"signal   signal-to-noise {signal['signal_to_noise']:.2f}, right token {right:.1f} % (agreement as guessed)",
        "cost     {private_calls:,} private + {public_calls:,} public calls, {tokens_in:,} tokens in, "
        "{tokens_out:,} out, money {money:.2f}".format(**cost),
    ]
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


def _option_text(option: dict[str, Any]) -> str:
    shape = f"{option['num_slots']} x {option['shots_per_slot']}"
    return (
        f"  {option['mechanism']:<17}{option['rows']:<7}{shape:<10}{option['redraw_every']:>4}"
        f"{option['noise_multiplier']:>9.3f}{100 * option['right_token_prob']:>12.1f}%{option['private_calls']:>12,}"
    )


# -- dpicl generate ----------------------------------------------------------------------------------------------


def _add_generate(commands: Any) -> None:
    command = commands.add_parser("generate", help="private records in, private demonstrations and a report out")
    command.add_argument("file", type=Path, help="JSON lines (.jsonl) or CSV (.csv) of records")
    command.add_argument("--out", type=Path, required=True, help="JSON file for demonstrations and report")
    command.add_argument("--text-key", default="text")
    command.add_argument("--label-key")
    command.add_argument("--label", action="append", help="declared label, once per label")
    command.add_argument("--public-size", action="append", required=True, metavar="[LABEL=]N")
    command.add_argument("--unit-key", help="field that names the person a record belongs to")
    command.add_argument("--dataset-id", default="private-examples")
    command.add_argument("--instruction")
    command.add_argument("--generation-prompt", help="template of one record, text field last")
    command.add_argument("--model", default="embedded", help="'embedded', or module:attribute of a model or engine")
    command.add_argument("--quiet", action="store_true")
    _add_design(command)
    command.set_defaults(run=_generate)


def _generate(arguments: argparse.Namespace) -> int:
    from langchain_dpicl.callbacks import PrivacyBudgetCallbackHandler
    from langchain_dpicl.privacy.examples import PrivateExamples
    from langchain_dpicl.synthesis import DemonstrationSynthesizer

    sizes = _sizes(arguments.public_size)
    private = PrivateExamples(
        _records(arguments.file),
        public_size=sizes[None] if None in sizes else {str(k): v for k, v in sizes.items()},
        text_key=arguments.text_key,
        label_key=arguments.label_key,
        labels=arguments.label,
        unit_key=arguments.unit_key,
        dataset_id=arguments.dataset_id,
    )
    budget = PrivacyBudgetCallbackHandler(
        epsilon=arguments.epsilon, delta=arguments.delta, adjacency=arguments.adjacency
    )
    synthesizer = DemonstrationSynthesizer.from_private_examples(
        private,
        llm=_model(arguments.model),
        budget=budget,
        epsilon=arguments.epsilon,
        instruction=arguments.instruction,
        generation_prompt=arguments.generation_prompt,
        mechanism=arguments.mechanism,
        rows=arguments.rows,
        num_slots=arguments.num_slots,
        shots_per_slot=arguments.shots_per_slot,
        redraw_every=arguments.redraw_every,
        shots_per_label=arguments.shots_per_label,
        max_tokens=arguments.max_tokens,
        public_top_k=arguments.public_top_k,
    )
    try:
        for example in synthesizer.stream(progress=False if arguments.quiet else None):
            if not arguments.quiet:
                print(json.dumps(example, ensure_ascii=False))
    finally:
        synthesizer.released().save(arguments.out)
    if not arguments.quiet:
        print(budget.report())
    return 0


def _records(path: Path) -> list[dict[str, Any]]:
    """Reads records without ever showing one: a broken line is reported without its content or number."""
    broken = False
    records: list[dict[str, Any]] = []
    try:
        with path.open(encoding="utf-8", newline="") as file:
            records = (
                list(csv.DictReader(file)) if path.suffix == ".csv" else [json.loads(x) for x in file if x.strip()]
            )
    except (ValueError, csv.Error):
        broken = True
    if broken:
        raise ConfigurationError(
            f"{path.name}: expected JSON lines (.jsonl) or CSV (.csv) in UTF-8, found a broken line."
        )
    return records


def _model(name: str) -> Any:
    if name == "embedded":
        from langchain_dpicl.backends.embedded import EmbeddedModel

        return EmbeddedModel()
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(f"--model: expected 'embedded' or module:attribute, found {name!r}.") from error


if __name__ == "__main__":
    sys.exit(main())
