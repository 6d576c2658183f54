"""Runs the `dpicl` command."""

# The only module that prints. It passes records to `PrivateExamples` and shows nothing of them: no content, no number,
# no line of a fault. `dpicl check` alone shows the owner what the file holds.

from __future__ import annotations

import argparse
import csv
import functools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from langchain_dpicl.cli.check import add_check, run_check
from langchain_dpicl.cli.checks import add_audit, run_audit
from langchain_dpicl.cli.inputs import read_json
from langchain_dpicl.cli.ledger import add_ledger, redact, run_ledger
from langchain_dpicl.cli.plan import add_plan, plan_output
from langchain_dpicl.cli.rehearse import add_rehearse, add_try, run_rehearse, run_try
from langchain_dpicl.cli.runs import (
    add_discover,
    add_documents,
    add_generate,
    run_discover,
    run_documents,
    run_generate,
)
from langchain_dpicl.exceptions import ConfigurationError, DPICLError

_FAULT, _INTERRUPTED = 2, 130


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
    add_try(commands, run=functools.partial(run_try, say=_say, confirm=_confirm))
    add_rehearse(commands, run=functools.partial(run_rehearse, say=_say, confirm=_confirm))
    add_check(commands, run=functools.partial(run_check, say=_say))
    add_plan(commands, run=_plan)
    add_discover(commands, run=functools.partial(run_discover, say=_say))
    add_documents(commands, run=functools.partial(run_documents, say=_say, complain=_complain))
    add_generate(commands, run=functools.partial(run_generate, say=_say, complain=_complain))
    add_ledger(commands, run=_ledger)
    add_audit(commands, run=functools.partial(run_audit, say=_say))
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


def _confirm(words: str) -> bool:
    """Asks on the terminal whether to go on."""
    if not sys.stdin.isatty():
        raise ConfigurationError(
            f"--yes: expected where no terminal can be asked, found none. Give it to go on: {words}"
        )
    print(f"{words} Go on? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in {"y", "yes"}


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


def _plan(arguments: argparse.Namespace) -> int:
    _say(plan_output(arguments))
    return 0


def _ledger(arguments: argparse.Namespace) -> int:
    output = run_ledger(arguments)
    if output.text:
        _say(output.text)
    for complaint in output.complaints:
        _complain(redact(complaint, [arguments.where]))
    return output.code


if __name__ == "__main__":
    sys.exit(main())
