"""Options of commands as tables: declared once, then added, checked and read under the names that users type."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from langchain_dpicl.exceptions import ConfigurationError

if TYPE_CHECKING:
    from langchain_dpicl._cost import Cost


class Option(NamedTuple):
    """One option of a command; `low` is the least value that `check_counts` accepts."""

    help: str
    kind: type = int
    low: int | None = 1
    default: Any = None
    choices: tuple[str, ...] | None = None


RECORD_TOKENS = {"record_tokens": Option("public cap of a record, in tokens", default=60)}


def flag(name: str) -> str:
    """Returns an option as it is typed."""
    return f"--{name.replace('_', '-')}"


def add_options(command: Any, options: Mapping[str, Option]) -> None:
    """Adds options to a command or to a group of its options."""
    for name, option in options.items():
        words = option.help if option.default is None else f"{option.help} (default {option.default})"
        command.add_argument(flag(name), type=option.kind, default=option.default, choices=option.choices, help=words)


def add_share(command: argparse.ArgumentParser, *, epsilon: str, delta: str | None = None) -> None:
    """Adds epsilon, delta and adjacency, with the help texts of the first two."""
    command.add_argument("--epsilon", type=float, required=True, help=epsilon)
    command.add_argument("--delta", type=float, required=True, help=delta)
    command.add_argument("--adjacency", choices=("add_remove", "replace_one"), default="add_remove")


def typed_options(arguments: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Returns those of the options that have a value."""
    values = {name: getattr(arguments, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def check_counts(arguments: argparse.Namespace, options: Mapping[str, Option]) -> None:
    """Refuses integers that are too small."""
    for name, option in options.items():
        value = getattr(arguments, name)
        if option.kind is int and option.low is not None and value is not None and value < option.low:
            raise ConfigurationError(f"{flag(name)}: expected an integer >= {option.low}, found {value}.")


def check_absent(arguments: argparse.Namespace, names: Iterable[str], *, where: str) -> None:
    """Refuses options that would change nothing; a command without one of them does not have it typed."""
    for name in names:
        if getattr(arguments, name, None) is not None:
            raise ConfigurationError(f"{flag(name)}: expected none {where}.")


def cost_of(cost: Cost, arguments: argparse.Namespace, *, max_queries: int | None = None) -> dict[str, Any]:
    """Returns what a plan's calls cost as JSON values, per query too where it answers queries."""
    calls = cost.private_calls + cost.public_calls
    return {
        **({} if max_queries is None else {"calls_per_query": calls / max_queries}),
        "private_calls": cost.private_calls,
        "public_calls": cost.public_calls,
        "tokens_in": cost.tokens_in,
        "tokens_out": cost.tokens_out,
        "money": cost.money(price_in=arguments.price_in, price_out=arguments.price_out),
    }
