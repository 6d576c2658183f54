"""Runs the `dpicl` command."""

# The only module that prints. It passes records to `PrivateExamples` and shows nothing of them: no content, no number,
# no line of a fault.

from __future__ import annotations

import argparse
import csv
import functools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from langchain_dpicl.cli.checks import add_audit, run_audit
from langchain_dpicl.cli.inputs import (
    add_model,
    add_records,
    check_out,
    load_grammar,
    load_named,
    read_json,
)
from langchain_dpicl.cli.ledger import add_ledger, redact, run_ledger
from langchain_dpicl.cli.plan import add_design, add_plan, check_options, plan_output
from langchain_dpicl.cli.ray import (
    add_ray,
    budget_from,
    check_ray,
    driver_model,
    examples_from,
    spread_options,
)
from langchain_dpicl.cli.synthesize import MECHANISM as EVOLUTION
from langchain_dpicl.cli.synthesize import (
    add_discover,
    add_documents,
    add_evolution,
    check_evolution,
    evolution_from,
    run_discover,
    run_documents,
)
from langchain_dpicl.exceptions import DPICLError, SynthesisInterruptedError

if TYPE_CHECKING:
    from langchain_dpicl.evolution.evolution import PrivateEvolution
    from langchain_dpicl.generation.synthesizer import DemonstrationSynthesizer
    from langchain_dpicl.options.rows import LogitNoise, Noise, Rows
    from langchain_dpicl.released.demonstrations import ReleasedDemonstrations

_FAULT, _INTERRUPTED = 2, 130
_NUM_ROWS = 40  # as many as the planner takes
_ADVICE_IN_PYTHON = "Call run() on error.synthesizer to continue."

_GENERATE_NOTES = """\
The model sees the records: run one you trust with them (with --mechanism private_evolution it sees none). What is
printed and saved is released under the budget.

Every run starts a new budget, kept in memory. Two runs on the same records spend twice, and their epsilons add up;
use a Python program with one shared budget where that must be counted. With --ray, workers spend from the --ledger
that they share, and the same command goes on where it stopped.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Returns:
      0; 2 after a fault that is explained on stderr; 1 where `ledger verify` found one, or `audit` a violation; 130
      after Ctrl-C. Anything unforeseen is raised.
    """
    typed = sys.argv[1:] if argv is None else argv
    parser = _parser(typed)
    arguments = parser.parse_args(typed)
    if arguments.version:
        _say(f"dpicl {_version()}")
        return 0
    if arguments.run is None:
        parser.print_help(sys.stderr)
        return _FAULT
    try:
        return int(arguments.run(arguments))
    except (DPICLError, OSError) as error:
        return _complain(redact(str(error), typed))
    except (UnicodeDecodeError, json.JSONDecodeError, csv.Error) as error:
        # Their messages quote what was read.
        return _complain(f"a file or an answer could not be read ({type(error).__name__}).")
    except KeyboardInterrupt:
        _complain("interrupted.")
        return _INTERRUPTED


class _Parser(argparse.ArgumentParser):
    """A parser that quotes no address of a database: it may hold a password."""

    def __init__(self, *args: Any, typed: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._typed = typed

    def add_subparsers(self, **kwargs: Any) -> Any:
        made: Any = functools.partial(_Parser, typed=self._typed)
        return super().add_subparsers(parser_class=made, **kwargs)

    def error(self, message: str) -> NoReturn:
        super().error(redact(message, self._typed))


def _parser(typed: Sequence[str]) -> argparse.ArgumentParser:
    parser = _Parser(prog="dpicl", description="Differentially private in-context learning.", typed=typed)
    parser.add_argument("--version", action="store_true", help="print the version and stop")
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(metavar="COMMAND")
    _add_epsilon(commands)
    add_plan(commands, run=_plan)
    add_discover(commands, run=_discover)
    add_documents(commands, run=_documents)
    _add_generate(commands)
    add_ledger(commands, run=_ledger)
    add_audit(commands, run=_audit)
    return parser


def _version() -> str:
    from importlib import metadata

    return metadata.version("langchain-dpicl")


def _complain(message: str) -> int:
    print(f"dpicl: {message}", file=sys.stderr)
    return _FAULT


def _say(text: str) -> None:
    """Prints at once; a closed stdout does not stop a run that is being paid for."""
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
    from langchain_dpicl.cli.json_checks import evaluate_checks

    data = read_json(arguments.file)
    results = evaluate_checks(data)
    if arguments.json:
        _say(json.dumps(results))
        return 0
    width = max((len(result["id"]) for result in results), default=2)
    lines = [f"{'id':<{width}}  epsilon (upper bound)"]
    for result, check in zip(results, data["checks"] if isinstance(data, dict) else data, strict=True):
        paper = _published_epsilon(check)
        beside = "" if paper is None else f"  (the paper's accounting: {paper:.6g})"
        lines.append(f"{result['id']:<{width}}  {result['epsilon']:.6g}{beside}")
    _say("\n".join(lines))
    return 0


def _published_epsilon(check: dict[str, Any]) -> float | None:
    """Returns what the paper of clip and blend would charge; None for other checks than repeated softmax draws."""
    from langchain_dpicl.cli.json_checks import event_of_check
    from langchain_dpicl.generation.plan import advanced_composition_epsilon
    from langchain_dpicl.privacy.accounting.events import BoundedRangeEvent, RepeatedEvent

    event, _ = event_of_check(check)
    if not isinstance(event, RepeatedEvent) or not isinstance(event.event, BoundedRangeEvent):
        return None
    return advanced_composition_epsilon(event.event.bound, event.count, delta=check["delta"])


# -- dpicl plan --------------------------------------------------------------------------------------------------


def _plan(arguments: argparse.Namespace) -> int:
    _say(plan_output(arguments))
    return 0


# -- dpicl ledger ------------------------------------------------------------------------------------------------


def _ledger(arguments: argparse.Namespace) -> int:
    output = run_ledger(arguments)
    if output.text:
        _say(output.text)
    for complaint in output.complaints:
        _complain(redact(complaint, [arguments.where]))
    return output.code


# -- dpicl discover ----------------------------------------------------------------------------------------------


def _discover(arguments: argparse.Namespace) -> int:
    return run_discover(arguments, say=_say)


# -- dpicl documents ---------------------------------------------------------------------------------------------


def _documents(arguments: argparse.Namespace) -> int:
    return run_documents(arguments, say=_say, complain=_complain)


# -- dpicl audit -------------------------------------------------------------------------------------------------


def _audit(arguments: argparse.Namespace) -> int:
    return run_audit(arguments, say=_say)


# -- dpicl generate ----------------------------------------------------------------------------------------------


def _add_generate(commands: Any) -> None:
    command = commands.add_parser(
        "generate",
        help="private records in, private demonstrations and a report out",
        description="Turns private records into differentially private demonstrations.",
        epilog=_GENERATE_NOTES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_records(command)
    command.add_argument("--out", type=Path, required=True, help="JSON file for demonstrations and report")
    command.add_argument("--label-key", help="field that holds the label")
    command.add_argument("--label", action="append", help="declared label, once per label")
    command.add_argument(
        "--public-size",
        action="append",
        required=True,
        metavar="[LABEL=]N",
        help="declared, not counted, number of units; once, or once per label",
    )
    command.add_argument("--instruction", help="public description of the task, first in every prompt")
    command.add_argument("--generation-prompt", help="template of one record, text field last")
    add_model(command)
    add_design(command)
    add_evolution(command, runs=True)
    add_ray(command)
    command.set_defaults(run=_generate)


def _generate(arguments: argparse.Namespace) -> int:
    check_options(arguments)
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
        again = "A new run starts over, on a budget of its own."
        if arguments.ledger is not None:
            again = "The same command goes on where this one stopped."
        _complain(f"{stopped} What was released is {where}. {again}")
    if not arguments.quiet:
        _say(str(budget.report()))
    return code or (0 if saved else _FAULT)


def _synthesizer(arguments: argparse.Namespace) -> tuple[DemonstrationSynthesizer | PrivateEvolution, Any]:
    """Reads records and model and builds the component, which spends nothing yet."""
    from langchain_dpicl.generation.synthesizer import DemonstrationSynthesizer
    from langchain_dpicl.options.tasks import Decoding, GenerationTask

    check_evolution(arguments)
    check_ray(arguments)
    private, budget, model = examples_from(arguments), budget_from(arguments), driver_model(arguments)
    spread = spread_options(arguments)
    if arguments.mechanism == EVOLUTION:
        embeddings = None if arguments.embeddings is None else load_named("--embeddings", arguments.embeddings)
        made = evolution_from(arguments, private, budget=budget, model=model, embeddings=embeddings, **spread)
        return made, budget
    delta = spread.pop("delta", None)
    synthesizer = DemonstrationSynthesizer.from_private_examples(
        private,
        llm=model,
        budget=budget,
        epsilon=arguments.epsilon,
        task=GenerationTask(arguments.instruction, arguments.generation_prompt),
        shots_per_label=arguments.shots_per_label,
        max_tokens=arguments.max_tokens,
        rows=_rows(arguments),
        noise=_noise(arguments).replace(delta=delta),
        decoding=Decoding(
            candidates="all" if arguments.public_top_k is None else arguments.public_top_k,
            temperature=arguments.temperature,
            grammar=load_grammar(arguments),
        ),
        **spread,
    )
    return synthesizer, budget


def _rows(arguments: argparse.Namespace) -> Rows:
    """Returns the requested shape of rows; unit rows unless slots, several shots or another sampling are asked for."""
    from langchain_dpicl.options.rows import Rows

    shots = arguments.shots_per_slot or 1
    sampling: Any = arguments.sampling or "poisson"
    usual = "units" if shots == 1 and sampling == "poisson" else "slots"
    shape = arguments.rows or usual
    number = arguments.num_slots or (None if shape == usual else _NUM_ROWS)
    slots, units = (number, None) if shape == "slots" else (None, number)
    return Rows(slots=slots, units=units, shots=shots, sampling=sampling, redraw_every=arguments.redraw_every)


def _noise(arguments: argparse.Namespace) -> Noise | LogitNoise:
    from langchain_dpicl.options.rows import LogitNoise, Noise, noise_of

    names = {"clip": "clip", "blend_weight": "blend_weight", "center": "center"}
    names |= {"free_tokens": "free_below", "private_tokens": "max_private_tokens"}
    given = {new: value for old, new in names.items() if (value := getattr(arguments, old)) is not None}
    return noise_of(arguments.mechanism, Noise, LogitNoise).replace(**given)


def _save(released: ReleasedDemonstrations, out: Path) -> bool:
    """Saves what was released, or prints it, since it is paid for."""
    try:
        released.save(out)
    except OSError as error:
        _complain(f"--out: {out} could not be written ({error.strerror}); what it would hold is on standard output.")
        _say(released.to_json())
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
