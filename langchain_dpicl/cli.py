"""The `dpicl` command: `epsilon`, `plan`, `generate`. The only room that prints.

Hands records to `PrivateExamples` and never shows one: not their content, not their number, not the line of a fault.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_dpicl._cli_inputs import check_out, load_model, read_json, read_records
from langchain_dpicl.exceptions import ConfigurationError, DPICLError, SynthesisInterruptedError

if TYPE_CHECKING:
    from langchain_dpicl.planning import GenerationPlan, RowDesign
    from langchain_dpicl.released import ReleasedDemonstrations
    from langchain_dpicl.synthesis import DemonstrationSynthesizer

_FAULT, _INTERRUPTED = 2, 130
_ADVICE_IN_PYTHON = "Call run() on error.synthesizer to continue."

_GENERATE_NOTES = """\
The model sees the records: run one you trust with them. What is printed and saved is released under the budget.

Every run starts a new budget, kept in memory. Two runs on the same records spend twice, and their epsilons add up;
use a Python program with one shared budget where that must be counted.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Returns:
      0; 2 after a fault that is explained on stderr; 130 after Ctrl-C. Anything unforeseen is raised.
    """
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.version:
        _say(f"dpicl {_version()}")
        return 0
    if arguments.run is None:
        parser.print_help(sys.stderr)
        return _FAULT
    try:
        return int(arguments.run(arguments))
    except (DPICLError, OSError) as error:
        return _complain(str(error))
    except (UnicodeDecodeError, json.JSONDecodeError, csv.Error) as error:
        # Their messages quote what was read.
        return _complain(f"a file or an answer could not be read ({type(error).__name__}).")
    except KeyboardInterrupt:
        _complain("interrupted.")
        return _INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dpicl", description="Differentially private in-context learning.")
    parser.add_argument("--version", action="store_true", help="print the version and stop")
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(metavar="COMMAND")
    _add_epsilon(commands)
    _add_plan(commands)
    _add_generate(commands)
    return parser


def _version() -> str:
    from importlib import metadata

    return metadata.version("langchain-dpicl")


def _complain(message: str) -> int:
    print(f"dpicl: {message}", file=sys.stderr)
    return _FAULT


def _say(text: str) -> None:
    """Prints at once; a reader that has gone away does not stop what is being paid for."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _json_line(example: dict[str, str]) -> str:
    """Returns one line of JSON that stdout can show as it is."""
    line = json.dumps(example, ensure_ascii=False)
    try:
        line.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return json.dumps(example)
    return line


# -- dpicl epsilon -----------------------------------------------------------------------------------------------


def _add_epsilon(commands: Any) -> None:
    command = commands.add_parser("epsilon", help="upper bounds of epsilon for a file of mechanisms")
    command.add_argument("file", type=Path, help='JSON: {"checks": [...]} or a list of checks')
    command.add_argument("--json", action="store_true", help='print exactly [{"id": str, "epsilon": float}]')
    command.set_defaults(run=_epsilon)


def _epsilon(arguments: argparse.Namespace) -> int:
    from langchain_dpicl.privacy.checks import evaluate_checks

    results = evaluate_checks(read_json(arguments.file))
    if arguments.json:
        _say(json.dumps(results))
        return 0
    width = max((len(result["id"]) for result in results), default=2)
    lines = [f"{'id':<{width}}  epsilon (upper bound)"]
    lines += [f"{result['id']:<{width}}  {result['epsilon']:.6g}" for result in results]
    _say("\n".join(lines))
    return 0


# -- dpicl plan --------------------------------------------------------------------------------------------------


def _add_design(command: argparse.ArgumentParser) -> None:
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
    command.add_argument("--json", action="store_true", help="print JSON and nothing else")
    command.set_defaults(run=_plan)


def _sizes(given: Sequence[str]) -> dict[str | None, int]:
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


def _declared(sizes: dict[str | None, int]) -> int | dict[str, int]:
    return sizes[None] if None in sizes else {str(label): size for label, size in sizes.items()}


def _check_options(arguments: argparse.Namespace) -> None:
    """Refuses counts below 1 under the name that was typed."""
    for name in ("num_slots", "shots_per_slot", "redraw_every", "shots_per_label", "max_tokens", "public_top_k"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ConfigurationError(f"--{name.replace('_', '-')}: expected an integer >= 1, found {value}.")


def _check_declarable(sizes: dict[str | None, int], delta: float) -> None:
    """Refuses sizes and a delta that generation would refuse, by asking the same rule on no records."""
    from langchain_dpicl.privacy.examples import PrivateExamples

    split = {} if None in sizes else {"label_key": "label", "labels": tuple(map(str, sizes))}
    PrivateExamples([], public_size=_declared(sizes), **split).check_delta(delta)  # type: ignore[arg-type]


def _plan(arguments: argparse.Namespace) -> int:
    from langchain_dpicl.planning import RowDesign, Segment, plan_generation
    from langchain_dpicl.recommendation import signal_of

    _check_options(arguments)
    sizes = _sizes(arguments.public_size)
    _check_declarable(sizes, arguments.delta)
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
    if arguments.json:
        _say(json.dumps(out, indent=2))
    else:
        _say(_plan_text(out))
    return 0


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


# -- dpicl generate ----------------------------------------------------------------------------------------------


def _add_generate(commands: Any) -> None:
    command = commands.add_parser(
        "generate",
        help="private records in, private demonstrations and a report out",
        description="Turns private records into differentially private demonstrations.",
        epilog=_GENERATE_NOTES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("file", type=Path, help="records: JSON lines (.jsonl) or CSV (.csv), as they are or .gz")
    command.add_argument("--out", type=Path, required=True, help="JSON file for demonstrations and report")
    command.add_argument("--text-key", default="text", help="field that holds the text (default: text)")
    command.add_argument("--label-key", help="field that holds the label")
    command.add_argument("--label", action="append", help="declared label, once per label")
    command.add_argument(
        "--public-size",
        action="append",
        required=True,
        metavar="[LABEL=]N",
        help="declared, not counted, number of units; once, or once per label",
    )
    command.add_argument("--unit-key", help="field that names the person a record belongs to")
    command.add_argument("--dataset-id", default="private-examples", help="public name of the records in the report")
    command.add_argument("--instruction", help="public description of the task, first in every prompt")
    command.add_argument("--generation-prompt", help="template of one record, text field last")
    command.add_argument("--model", default="embedded", help="'embedded', or module:attribute of a model or engine")
    command.add_argument("--quiet", action="store_true", help="print nothing but faults; --out has everything")
    _add_design(command)
    command.set_defaults(run=_generate)


def _generate(arguments: argparse.Namespace) -> int:
    _check_options(arguments)
    check_out(arguments.out, arguments.file)
    synthesizer, budget = _synthesizer(arguments)
    code, stopped = 0, ""
    try:
        for example in synthesizer.stream(progress=False if arguments.quiet else None):
            if not arguments.quiet:
                _say(_json_line(example))
    except SynthesisInterruptedError as error:
        code, stopped = _FAULT, str(error).removesuffix(_ADVICE_IN_PYTHON).strip()
    except KeyboardInterrupt:
        code, stopped = _INTERRUPTED, "Interrupted. Tickets that burnt stay charged."
    finally:
        saved = _save(synthesizer.released(), arguments.out)
    if stopped:
        where = f"saved in {arguments.out}" if saved else "on standard output"
        _complain(f"{stopped} What was released is {where}. A new run starts over, on a budget of its own.")
    if not arguments.quiet:
        _say(str(budget.report()))
    return code or (0 if saved else _FAULT)


def _synthesizer(arguments: argparse.Namespace) -> tuple[DemonstrationSynthesizer, Any]:
    """Reads records and model, checks everything, and has spent nothing yet."""
    from langchain_dpicl.callbacks import PrivacyBudgetCallbackHandler
    from langchain_dpicl.privacy.examples import PrivateExamples
    from langchain_dpicl.synthesis import DemonstrationSynthesizer

    private = PrivateExamples(
        read_records(arguments.file),
        public_size=_declared(_sizes(arguments.public_size)),
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
        llm=load_model(arguments.model),
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
    return synthesizer, budget


def _save(released: ReleasedDemonstrations, out: Path) -> bool:
    """Saves what was released, or prints it: it is paid for."""
    try:
        released.save(out)
    except OSError as error:
        _complain(f"--out: {out} could not be written ({error.strerror}); what it would hold is on standard output.")
        _say(released.to_json())
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
