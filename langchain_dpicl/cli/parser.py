"""The parser of `dpicl`: commands by task, help that fits a screen, one line about a wrong option, exit codes."""

from __future__ import annotations

import argparse
import difflib
import functools
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

from typing_extensions import override

from langchain_dpicl.cli.ledger import redact
from langchain_dpicl.exceptions import LedgerError, ModelCallError, PrivacyBudgetError

DONE = 0
VIOLATED = 1
"""`ledger verify` found a fault, `ledger check` a share that is nearly spent, or `audit` a violation."""
BAD_INPUT = 2
"""An option, a file, a setting or a record is wrong, or the model cannot do what is asked of it."""
BUDGET_REFUSED = 3
"""The budget is spent, does not suffice, or is not the one of these records."""
PROVIDER_FAILED = 4
"""The model could not be reached or failed in the middle."""
INTERRUPTED = 130
"""Ctrl-C."""


def exit_code_of(error: BaseException) -> int:
    """Returns the exit code of an error that is explained on stderr.

    >>> exit_code_of(ModelCallError("no answer")), exit_code_of(LedgerError("no such file")), exit_code_of(OSError())
    (4, 2, 2)
    """
    if isinstance(error, ModelCallError):
        return PROVIDER_FAILED
    # A ledger that cannot be read is a wrong file; what is left in it was not asked.
    if isinstance(error, PrivacyBudgetError) and not isinstance(error, LedgerError):
        return BUDGET_REFUSED
    return BAD_INPUT


class Explain(Protocol):
    """Runs a command and says on stderr why it failed: `langchain_dpicl.cli.main.explain`."""

    def __call__(self, run: Callable[[], int], typed: Sequence[str], *, quiet: bool) -> int:
        """Returns the exit code."""
        ...


_WIDTH = 80
_POINTER = "--help-all shows every option and all notes."


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Options and their words on one line where they fit."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26, width=_WIDTH)


class _ShowAll(argparse.Action):
    """`--help-all`: prints the long help and stops."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        text = parser.long_help() if isinstance(parser, Parser) else parser.format_help()
        parser._print_message(text, sys.stdout)  # noqa: SLF001  as argparse's own --help
        parser.exit()


class Parser(argparse.ArgumentParser):
    """A parser of one command.

    It quotes no address of a database, which may hold a password. Rarely used options are added to `rare`; `--help`
    leaves them out, and shows the epilog in place of the notes; `--help-all` shows everything.
    """

    def __init__(self, *args: Any, typed: Sequence[str] = (), notes: str = "", **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", _Formatter)
        super().__init__(*args, **kwargs)
        self._typed = typed
        self._notes = notes
        self._rare: Any = None
        # Where no option is rare, --help shows all there is.
        self._help_all = self.add_argument("--help-all", action=_ShowAll, nargs=0, help=argparse.SUPPRESS)
        self._shows_all = False

    @property
    def rare(self) -> Any:
        """The group of options that only `--help-all` shows."""
        if self._rare is None:
            self._help_all.help = "show every option and the notes, and stop"
            self._rare = self.add_argument_group("more options")
        return self._rare

    def long_help(self) -> str:
        """Returns the help with rare options and notes."""
        self._shows_all = True
        try:
            return self.format_help()
        finally:
            self._shows_all = False

    @override
    def format_help(self) -> str:
        whole = self._shows_all or self._rare is None
        formatter = self._get_formatter()
        formatter.add_usage(self.usage or self._short_usage(), [], [])
        formatter.add_text(_filled(self.description or ""))
        for group in self._action_groups:
            if whole or group is not self._rare:
                formatter.start_section(group.title)
                formatter.add_text(group.description)
                formatter.add_arguments(group._group_actions)  # noqa: SLF001  as argparse's own format_help
                formatter.end_section()
        formatter.add_text(_filled((self._notes or self.epilog or "") if whole else f"{self.epilog or ''} {_POINTER}"))
        return formatter.format_help()

    def _short_usage(self) -> str:
        """Returns a usage of one line: options are listed below it."""
        places = [action for action in self._actions if not action.option_strings]
        shown = [str(each.metavar or each.dest).upper() for each in places]
        named = [f"[{name}]" if each.nargs == "?" else name for each, name in zip(places, shown, strict=True)]
        return " ".join(["%(prog)s", *named, "[options]"])

    @override
    def add_subparsers(self, **kwargs: Any) -> Any:
        made: Any = functools.partial(Parser, typed=self._typed)
        return super().add_subparsers(parser_class=made, **kwargs)

    @override
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        given = sys.argv[1:] if args is None else list(args)
        # Looked for first: what else is wrong with the line is often its consequence.
        self._check_names(given)
        return super().parse_known_args(given, namespace)

    def _check_names(self, given: Sequence[str]) -> None:
        for word in given:
            if word == "--" or (self._subparsers is not None and not word.startswith("-")):
                return
            name = word.partition("=")[0]
            if not name.startswith("--") or any(known.startswith(name) for known in self._option_string_actions):
                continue
            known = list(self._option_string_actions)
            self.fail(f"{name}: expected an option of {self.prog}, {_nearest(name, known, self.prog)}")

    @override
    def error(self, message: str) -> NoReturn:
        self.fail(_in_our_words(message, self.prog))

    def fail(self, message: str) -> NoReturn:
        """Says one line on stderr and stops."""
        self.exit(BAD_INPUT, f"dpicl: {redact(message, self._typed)}\n")


def _filled(text: str) -> str:
    """Returns paragraphs at the width of the page."""
    return "\n\n".join(textwrap.fill(part, _WIDTH, break_on_hyphens=False) for part in text.strip().split("\n\n"))


_KINDS = {"float": "a number", "int": "a whole number"}


def _in_our_words(message: str, prog: str) -> str:
    """Returns what argparse says of an argument as "name: expected ..., found ..."."""
    found = re.fullmatch(r"argument (.*?): (.*)", message, re.DOTALL)
    if found is not None:
        name = found[1].rpartition("/")[2] if found[1].startswith("-") else found[1]
        return _of_argument(name, found[2], prog)
    if missing := re.fullmatch(r"the following arguments are required: (.*)", message):
        return f"{missing[1]}: expected a value, found none. `{prog} --help` describes it."
    if more := re.fullmatch(r"unrecognized arguments: (.*)", message, re.DOTALL):
        return f"{more[1]}: expected no further argument. `{prog} --help` lists what the command accepts."
    return f"{message}."


def _of_argument(name: str, said: str, prog: str) -> str:
    """Returns what argparse says of one argument, in the form of other errors."""
    if wrong := re.fullmatch(r"invalid (\w+) value: (.*)", said, re.DOTALL):
        return f"{name}: expected {_KINDS.get(wrong[1], wrong[1])}, found {wrong[2]}."
    if re.fullmatch(r"expected (one|at least one) argument", said):
        return f"{name}: expected a value, found none."
    choice = re.fullmatch(r"invalid choice: (.*?) \(choose from (.*)\)", said, re.DOTALL)
    if choice is None:
        return f"{name}: {said}."
    known, typed = [each.strip("'") for each in choice[2].split(", ")], choice[1].strip("'")
    if name in {"COMMAND", "ACTION"}:
        return f"{typed}: expected a command of {prog}, {_nearest(typed, known, prog)}"
    near = difflib.get_close_matches(typed, known, 1)
    advice = f" Did you mean {near[0]}?" if near else ""
    return f"{name}: expected one of {', '.join(known)}, found {typed!r}.{advice}"


def _nearest(typed: str, known: Sequence[str], prog: str) -> str:
    near = difflib.get_close_matches(typed, known, 1)
    return f"did you mean {near[0]}?" if near else f"`{prog} --help` lists them."


class CommandGroup:
    """Commands that serve one task, under one title of `dpicl --help`; takes the place of argparse's subparsers."""

    def __init__(self, commands: Any, title: str) -> None:
        self._commands = commands
        self.title = title
        self.lines: list[tuple[str, str]] = []

    def add_parser(self, name: str, *, help: str, **options: Any) -> Parser:  # noqa: A002  argparse's word
        """Adds a command, as argparse's subparsers do."""
        self.lines.append((name, help))
        parser: Parser = self._commands.add_parser(name, **options)
        return parser


def page_of(groups: Sequence[CommandGroup], *, end: str) -> str:
    """Returns the help of `dpicl`, on one screen: what each command is for, by task."""
    wide = 2 + max(len(group.title) for group in groups)
    lines = ["usage: dpicl COMMAND [options]     `dpicl COMMAND --help` lists them", ""]
    for group in groups:
        for place, (name, words) in enumerate(group.lines):
            title = "" if place else group.title
            lines.append(f"{title:<{wide}}{name:<11}{textwrap.shorten(words, _WIDTH - wide - 11, placeholder='...')}")
    return "\n".join([*lines, "", end, ""])


class CommandParser(Parser):
    """The parser of `dpicl` itself, whose help is `page`."""

    page: Callable[[], str]

    @override
    def format_help(self) -> str:
        return self.page()
