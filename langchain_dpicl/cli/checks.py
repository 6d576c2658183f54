"""Runs `dpicl audit` on a plan or an imported object."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from langchain_dpicl.cli.inputs import read_json
from langchain_dpicl.exceptions import ConfigurationError

VIOLATED = 1
_NAME = re.compile(r"([A-Za-z_][\w.]*):([A-Za-z_][\w.]*)(\(\))?")

_NOTES = """\
WHAT is a file that `dpicl plan --json` wrote, or module:name of a component or plan in your own code; module:name()
calls a function without arguments that makes one. Of a DPRetrievalFreeFormRunnable name the plan. For a prompt
template or selector name the component that made it.

Records are made up and the model is a fake: the audit reads no record, calls no model and spends nothing of a budget.
Importing and calling your code runs it as usual: what it opens, reads, calls and binds in a ledger does happen.
The exit status is 1 where a claim is refuted (sound code: 1e-6 by chance for each check that tosses coins; the summary
adds them up) or a check ended with an exception, with --strict also where a check was too small to tell, and 2 where
WHAT could not be read or imported.
What no audit can see is listed with every result: docs/audits.md.
"""


def add_audit(commands: Any, *, run: Any) -> None:
    """Adds the command."""
    command = commands.add_parser(
        "audit",
        help="play against a configuration: does its epsilon hold?",
        description="Audits a configuration: lower bounds of epsilon against what is claimed.",
        notes=_NOTES,
    )
    command.add_argument("what", metavar="WHAT", help="plan.json, or module:name")
    command.add_argument("--controls", action="store_true", help="also show that the audit detects halved noise")
    command.add_argument("--strict", action="store_true", help="fail where a check is too small to tell")
    command.add_argument("--json", action="store_true", help="print JSON and nothing else")
    command.set_defaults(run=run)


def run_audit(arguments: argparse.Namespace, *, say: Callable[[str], object]) -> int:
    """Runs the audit and prints each result; returns 0, or `VIOLATED`."""
    from langchain_dpicl.audit import audit

    subject = _find_object(arguments.what)

    def show(result: Any) -> None:
        say(f"  {result}")

    report = audit(
        subject,
        controls=arguments.controls,
        progress=None if arguments.json else show,
        name=_display_name(arguments.what),
    )
    say(report.to_json() if arguments.json else report.summary())
    failed = not report.ok or (arguments.strict and report.verdict == "undecided")
    return VIOLATED if failed else 0


def _display_name(what: str) -> str:
    return what if _NAME.fullmatch(what) else Path(what).name


def _find_object(what: str) -> Any:
    named = _NAME.fullmatch(what)
    return read_json(Path(what)) if named is None else _import_object(named[1], named[2], is_called=bool(named[3]))


def _import_object(module: str, name: str, *, is_called: bool) -> Any:
    """Imports an object; code beside the caller is found as `python -m` finds it."""
    here, problem = os.getcwd(), ""  # noqa: PTH109  an entry of sys.path is a text
    if here not in sys.path:
        sys.path.insert(0, here)
    target: Any = None
    try:
        target = importlib.import_module(module)
        for part in name.split("."):
            target = getattr(target, part)
        if is_called:
            target = target()
    # Code that leaves when it is imported was not audited either.
    except (Exception, SystemExit) as error:  # noqa: BLE001  theirs; its message may quote anything
        problem = type(error).__name__
    if problem:
        what = f"{module}:{name}" + ("()" if is_called else "")
        raise ConfigurationError(f"audit: expected {what} to be importable, found {problem}. Try it in Python.")
    return target
