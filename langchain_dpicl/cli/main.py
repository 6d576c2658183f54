"""Runs the `dpicl` command."""

# The only module that prints. It passes records to `PrivateExamples` and shows nothing of them: no content, no number,
# no line of a fault. `dpicl check` alone shows the owner what the file holds.

from __future__ import annotations

import argparse
import csv
import errno
import functools
import json
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

from langchain_dpicl.cli.check import add_audit, add_report, run_audit
from langchain_dpicl.cli.inputs import add_flags, add_settings, as_typed, read_json
from langchain_dpicl.cli.ledger import CommandOutput, add_ledger, redact, run_bench
from langchain_dpicl.cli.parser import BAD_INPUT, DONE, INTERRUPTED, CommandGroup, CommandParser, exit_code_of, page_of
from langchain_dpicl.cli.plan import add_plan, plan_output
from langchain_dpicl.cli.rehearse import add_rehearse, add_try, run_rehearse, run_try
from langchain_dpicl.cli.runs import (
    add_documents,
    add_evolve,
    add_generate,
    add_label,
    add_train,
    run_documents,
    run_evolve,
    run_generate,
    run_label,
    run_train,
)
from langchain_dpicl.cli.serve import add_mcp, add_serve, end_process, run_mcp, run_serve
from langchain_dpicl.cli.vote import (
    add_choose,
    add_discover,
    add_evaluate,
    add_vote,
    run_choose,
    run_discover,
    run_evaluate,
    run_vote,
)
from langchain_dpicl.exceptions import ConfigurationError, DPICLError
from langchain_dpicl.reports.rendering import format_rounded_up

_END = "Exit codes: 0 done, 1 check failed, 2 bad input, 3 budget, 4 model, 130 Ctrl-C."


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Returns:
      An exit code of `langchain_dpicl.cli.parser`; what is not 0 is explained on stderr. Anything unforeseen is
      raised.
    """
    is_closed = sys.stdout is None
    _open_missing_streams()
    try:
        return _run(sys.argv[1:] if argv is None else argv, is_closed=is_closed)
    finally:
        _flush()


def console() -> NoReturn:
    """Runs the command in a process of its own, and ends it."""
    if sys.argv[1:2] in (["serve"], ["mcp"]):
        end_process(main)
    sys.exit(main())


def _run(typed: Sequence[str], *, is_closed: bool) -> int:
    parser = _parser(typed)
    arguments = parser.parse_args(typed)
    if is_closed and _only_prints(arguments):
        advice = "Nothing was done. Where nobody reads it, give >/dev/null."
        _complain(f"stdout: expected an open stream for what is printed, found a closed one. {advice}")
        return BAD_INPUT
    if arguments.version:
        return explain(_show_version, typed, quiet=False)
    if arguments.run is None:
        parser.print_help(sys.stderr)
        return BAD_INPUT
    return explain(lambda: arguments.run(arguments), typed, quiet=getattr(arguments, "quiet", False))


def _open_missing_streams() -> None:
    """Opens nothing in place of a stream that the shell closed (`>&-`), before a file of ours takes its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115  until the process ends


def _only_prints(arguments: argparse.Namespace) -> bool:
    """Whether a command says on stdout what it writes nowhere else."""
    saves = getattr(arguments, "out", None) is not None and not getattr(arguments, "dry_run", False)
    return not saves and getattr(arguments, "prints", True)


def explain(run: Callable[[], int], typed: Sequence[str], *, quiet: bool) -> int:
    """Runs a command, shows its warnings unless `quiet`, and says on stderr why it failed; returns its exit code."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _keep_quiet if quiet else _note
            return int(run())
    except DPICLError as error:
        _complain(as_typed(redact(str(error), typed)))
        return exit_code_of(error)
    except OSError as error:
        # Without Python's "[Errno 2]" in front.
        is_of_file = error.filename is not None and error.strerror is not None
        _complain(redact(f"{error.filename}: {error.strerror}." if is_of_file else str(error), typed))
        return exit_code_of(error)
    except (UnicodeDecodeError, json.JSONDecodeError, csv.Error) as error:
        # Their messages quote what was read.
        _complain(f"a file or an answer could not be read ({type(error).__name__}).")
        return BAD_INPUT
    except KeyboardInterrupt:
        _complain("interrupted.")
        return INTERRUPTED


def _parser(typed: Sequence[str]) -> argparse.ArgumentParser:
    parser = CommandParser(prog="dpicl", typed=typed)
    parser.add_argument("--version", action="store_true", help="print the version and stop")
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(metavar="COMMAND")

    look = CommandGroup(commands, "before spending")
    add_try(look, run=functools.partial(run_try, say=_say, confirm=_confirm))
    add_rehearse(look, run=functools.partial(run_rehearse, say=_say, complain=_complain, confirm=_confirm))
    add_plan(look, run=_plan)
    _add_check(look)

    spend = CommandGroup(commands, "spend a budget")
    add_vote(spend, run=functools.partial(run_vote, say=_say, complain=_complain))
    add_label(spend, run=functools.partial(run_label, say=_say, complain=_complain))
    add_generate(spend, run=functools.partial(run_generate, say=_say, complain=_complain))
    add_documents(spend, run=functools.partial(run_documents, say=_say, complain=_complain))
    add_discover(spend, run=functools.partial(run_discover, say=_say, complain=_complain))
    add_evaluate(spend, run=functools.partial(run_evaluate, say=_say, complain=_complain))
    add_choose(spend, run=functools.partial(run_choose, say=_say, complain=_complain))
    add_evolve(spend, run=functools.partial(run_evolve, say=_say, complain=_complain))
    add_train(spend, run=functools.partial(run_train, say=_say, complain=_complain))

    service = CommandGroup(commands, "serve")
    add_serve(service, run=functools.partial(run_serve, complain=_complain, explain=explain))
    add_mcp(service, run=functools.partial(run_mcp, complain=_complain))

    budgets = CommandGroup(commands, "budgets")
    add_ledger(budgets, run=_ledger, bench=functools.partial(run_bench, say=_say))

    trust = CommandGroup(commands, "trust")
    add_report(trust, run=_report)
    add_audit(trust, run=functools.partial(run_audit, say=_say))
    _add_epsilon(trust)

    groups = (look, spend, service, budgets, trust)
    parser.page = lambda: page_of(groups, end=_END)
    return parser


def _show_version() -> int:
    from importlib import metadata

    _say(f"dpicl {metadata.version('langchain-dpicl')}")
    return DONE


def _complain(message: str) -> None:
    _tell(f"dpicl: {message}\n")


def _keep_quiet(*_: object, **__: object) -> None:
    """Shows no warning, with --quiet."""


def _note(message: Warning | str, *_: object, **__: object) -> None:
    """Shows a warning on one line, without the place in the code that raised it."""
    _tell(f"dpicl: note: {as_typed(str(message))}\n")


def _tell(text: str) -> None:
    """Prints on stderr; a closed one stops no run and changes no exit code."""
    _write(text, sys.stderr)


def _flush() -> None:
    """Writes what argparse or a bar left: where that fails, Python would fail again, with an exit code of its own."""
    for stream in (sys.stdout, sys.stderr):
        _write("", stream)


def _write(text: str, stream: TextIO) -> None:
    try:
        print(text, end="", file=stream, flush=True)
    except ValueError:  # closed in this process
        return
    except OSError as error:
        if error.errno in {errno.EPIPE, errno.EIO}:  # a full disk or pipe may have room for the next words
            _drop(stream)


_DROPPED: weakref.WeakSet[TextIO] = weakref.WeakSet()
"""Streams that lead to nowhere since they were closed or full: nobody reads what is printed there."""


def _drop(stream: TextIO) -> None:
    """Leads a stream that is closed elsewhere to nowhere: Python writes again what waits, at its end."""
    _DROPPED.add(stream)
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _say(text: str) -> bool:
    """Prints at once; False where nobody reads it. A full stdout stops a run that is being paid for."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except OSError as error:
        _drop(sys.stdout)
        if not isinstance(error, BrokenPipeError):
            raise OSError(error.errno, error.strerror, "stdout") from None
        return False
    return sys.stdout not in _DROPPED


def _confirm(words: str) -> bool:
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
    from langchain_dpicl.cli.check import evaluate_checks

    data = read_json(arguments.file)
    results = evaluate_checks(data)
    if arguments.json:
        _say(json.dumps(results))
        return DONE
    width = max((len(result["id"]) for result in results), default=2)
    lines = [f"{'id':<{width}}  epsilon (upper bound)"]
    for result, check in zip(results, data["checks"] if isinstance(data, dict) else data, strict=True):
        paper = _published_epsilon(check)
        beside = "" if paper is None else f"  (the paper's accounting: {format_rounded_up(paper)})"
        lines.append(f"{result['id']:<{width}}  {format_rounded_up(result['epsilon'])}{beside}")
    _say("\n".join(lines))
    return DONE


def _published_epsilon(check: dict[str, Any]) -> float | None:
    """Returns what the paper of clip and blend would charge; None for other checks than repeated softmax draws."""
    from langchain_dpicl.cli.check import event_of_check
    from langchain_dpicl.generation.plan import advanced_composition_epsilon
    from langchain_dpicl.privacy.accounting.events import BoundedRangeEvent, RepeatedEvent

    event, _ = event_of_check(check)
    if not isinstance(event, RepeatedEvent) or not isinstance(event.event, BoundedRangeEvent):
        return None
    return advanced_composition_epsilon(event.event.bound, event.count, delta=check["delta"])


# -- dpicl check -------------------------------------------------------------------------------------------------

_CHECK_NOTES = """\
The output shows counts, labels and line numbers of FILE, and is as private as FILE: it is for its owner, who decides
what to declare. No model is called and nothing is spent. Exit status 1: a record would be refused.
--out writes a settings file for `dpicl plan --config` and `dpicl generate --config`. Its labels and its size were read
off the records: keep the labels only if they are public, and declare a size that you know without counting.
"""


def _add_check(commands: Any) -> None:
    command = commands.add_parser(
        "check",
        help="what a file of records holds, for its owner alone",
        description="Shows the owner what a file of records holds, what would be refused, and which declaration fits.",
        epilog=_CHECK_NOTES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("file", type=Path, metavar="FILE", help="records, as JSON lines or CSV")
    command.add_argument("--out", type=Path, metavar="TOML", help="settings file to write; must not exist")
    add_flags(command, ["text_key", "label_key", "label", "unit_key", "dataset_id"])
    add_settings(command)
    command.set_defaults(run=_check)


def _check(arguments: argparse.Namespace) -> int:
    # It reads records, for which numpy is loaded; the help of dpicl needs neither.
    from langchain_dpicl.cli.check import run_check

    return run_check(arguments, say=_say)


def _plan(arguments: argparse.Namespace) -> int:
    _say(plan_output(arguments))
    return DONE


def _ledger(arguments: argparse.Namespace) -> int:
    return _show(arguments.act(arguments), [arguments.where])


def _report(arguments: argparse.Namespace) -> int:
    return _show(arguments.act(arguments), [arguments.ledger or ""])


def _show(output: CommandOutput, typed: Sequence[str]) -> int:
    if output.text:
        _say(output.text)
    for complaint in output.complaints:
        _complain(redact(complaint, typed))
    return output.code


if __name__ == "__main__":
    console()
