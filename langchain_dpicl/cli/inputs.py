"""Declares options as tables, and checks the inputs a command line names: records, models, grammars, files."""

from __future__ import annotations

import argparse
import csv
import gzip
import importlib
import inspect
import json
import secrets
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from langchain_dpicl._plain_files import MAX_TEXT, read_plain
from langchain_dpicl.exceptions import ConfigurationError

if TYPE_CHECKING:
    from langchain_dpicl.budget.handler import PrivacyBudgetCallbackHandler
    from langchain_dpicl.generation.grammars import Grammar
    from langchain_dpicl.planning.share_plan import Cost
    from langchain_dpicl.privacy.data.private_examples import PrivateExamples


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


_FOLDER_OPTIONS = ("device", "dtype", "max_prompt_tokens", "chat")
_FORMATS = (".jsonl", ".csv", ".jsonl.gz", ".csv.gz")


def read_json(path: Path) -> Any:
    """Reads a public JSON file, which is a plain one; a byte order mark is fine."""
    try:
        return json.loads(read_plain(path, MAX_TEXT).decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path}: expected JSON text in UTF-8, found other bytes.") from error
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise ConfigurationError(f"{path}: expected JSON, found at {place}: {error.msg}.") from error
    except ConfigurationError:
        raise
    except (ValueError, RecursionError, MemoryError) as error:
        raise ConfigurationError(f"{path}: expected JSON, found a number or nesting too large to read.") from error


def check_out(out: Path, records: Path) -> None:
    """Refuses a target that could not be written at the end, by writing beside it now."""
    if out.exists() and not out.is_file():
        raise ConfigurationError(f"--out: expected a file, found a folder or a device: {out}.")
    if out.exists() and records.exists() and out.samefile(records):
        raise ConfigurationError(f"--out: expected another file than the records, found {out}.")
    if not out.parent.is_dir():
        raise ConfigurationError(f"--out: expected a file in a folder that exists, found {out}. Make the folder first.")
    probe = out.with_name(f".{out.name}.{secrets.token_hex(8)}.part")
    try:
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError as error:
        raise ConfigurationError(
            f"--out: expected a file that can be written, found {out} ({error.strerror})."
        ) from error


def read_records(path: Path) -> list[Any]:
    """Reads records without ever showing one: a fault is reported without its content or its place."""
    name = path.name.lower()
    if not name.endswith(_FORMATS):
        raise ConfigurationError(f"{path}: expected JSON lines or CSV, in a file that ends in {', '.join(_FORMATS)}.")
    opener: Any = gzip.open if name.endswith(".gz") else open
    read = _rows if name.removesuffix(".gz").endswith(".csv") else _lines
    records: list[Any] | None = None
    fault = "a broken line"
    try:
        # utf-8-sig: a spreadsheet's byte order mark would become part of the first field's name.
        with opener(path, "rt", encoding="utf-8-sig", newline="") as file:
            records = list(read(file))
    except _ArrayFoundError:
        fault = "a JSON array; write one record per line"
    except (ValueError, RecursionError, csv.Error, EOFError, zlib.error, gzip.BadGzipFile):
        pass
    if records is None:
        # Raised out here: the fault behind it, which may quote a record, is in no chain.
        raise ConfigurationError(f"{path}: expected JSON lines (.jsonl) or CSV (.csv) in UTF-8, found {fault}.")
    return records


class _ArrayFoundError(Exception):
    """The file holds one JSON array instead of one record per line."""


def _lines(file: IO[str]) -> Iterator[Any]:
    lines = (line for line in file if line.strip())
    for number, line in enumerate(lines):
        if not number and line.lstrip().startswith("["):
            raise _ArrayFoundError
        yield json.loads(line)


def _rows(file: IO[str]) -> Iterator[dict[str, Any]]:
    # Long texts are cut by `PrivateExamples`, not refused here.
    csv.field_size_limit(2**31 - 1)
    for row in csv.DictReader(file, strict=True):
        if None in row:
            raise csv.Error  # more cells than fields: an unquoted comma has cut a text
        yield row


def add_records(
    command: argparse.ArgumentParser,
    *,
    dataset_id: str = "private-examples",
    text: str = "field that holds the text",
    unit: str = "field that names the person a record belongs to",
) -> None:
    """Adds the file of the records and what its fields mean."""
    command.add_argument("file", type=Path, help="records: JSON lines (.jsonl) or CSV (.csv), as they are or .gz")
    command.add_argument("--text-key", default="text", help=f"{text} (default: text)")
    command.add_argument("--unit-key", help=unit)
    command.add_argument("--dataset-id", default=dataset_id, help="public name of the records in the report")
    command.add_argument("--quiet", action="store_true", help="print nothing but faults; --out has everything")


def private_examples(arguments: argparse.Namespace, **options: Any) -> PrivateExamples:
    """Reads the records; `options` are those of `PrivateExamples` that differ between commands."""
    from langchain_dpicl.privacy.data.private_examples import PrivateExamples

    named = {name: getattr(arguments, name) for name in ("text_key", "unit_key", "dataset_id")}
    return PrivateExamples(read_records(Path(arguments.file)), **{**named, **options})


def new_budget(arguments: argparse.Namespace) -> PrivacyBudgetCallbackHandler:
    """Returns a budget in memory with the limits that were typed."""
    from langchain_dpicl.budget.handler import PrivacyBudgetCallbackHandler

    return PrivacyBudgetCallbackHandler(epsilon=arguments.epsilon, delta=arguments.delta, adjacency=arguments.adjacency)


def save_or_print(released: Any, out: Path, *, say: Callable[[str], object]) -> None:
    """Saves what was released; prints it if that fails, since it is paid for."""
    try:
        released.save(out)
    except OSError:
        say(released.to_json())
        raise


def add_model(command: argparse.ArgumentParser) -> None:
    """Adds the options of a model and of what it may write."""
    command.add_argument(
        "--model",
        default="embedded",
        help="'embedded', the folder of a Hugging Face model, or module:attribute of a model or engine",
    )
    group = command.add_argument_group("with --model FOLDER (needs langchain-dpicl[hf])")
    group.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: cuda if there is one)")
    group.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: as the model was saved")
    group.add_argument("--max-prompt-tokens", type=int, help="length that every prompt is padded or cut to")
    group.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="whether a prompt is a user's message (default: if the model has a chat template)",
    )
    text = command.add_mutually_exclusive_group()
    text.add_argument("--grammar-json", type=Path, metavar="FILE", help="JSON schema that every text follows")
    text.add_argument("--grammar-regex", metavar="RE", help="regular expression that every text matches")


def load_grammar(arguments: argparse.Namespace) -> Grammar | None:
    """Returns the grammar that was asked for."""
    if arguments.grammar_json is None and arguments.grammar_regex is None:
        return None
    from langchain_dpicl.generation.grammars import Grammar

    if arguments.grammar_regex is not None:
        return Grammar.regex(arguments.grammar_regex)
    return Grammar.json_schema(read_json(arguments.grammar_json))


def load_model(arguments: argparse.Namespace) -> Any:
    """Returns the embedded model, an engine on a model's folder, or the object that `module:attribute` names."""
    name: str = arguments.model
    options = {option: getattr(arguments, option, None) for option in _FOLDER_OPTIONS}
    typed = {option: value for option, value in options.items() if value is not None}
    if name != "embedded" and Path(name).is_dir():
        return _load_folder(name, typed)
    if typed:
        flags = ", ".join(map(flag, typed))
        raise ConfigurationError(f"{flags}: expected none unless --model is the folder of a model, found {name!r}.")
    return _load_object(name)


def _load_folder(name: str, options: dict[str, Any]) -> Any:
    from langchain_dpicl.backends.hf.backend import HuggingFaceBackend

    if options.get("max_prompt_tokens", 1) < 1:
        most = options["max_prompt_tokens"]
        raise ConfigurationError(f"--max-prompt-tokens: expected an integer >= 1, found {most}.")
    return HuggingFaceBackend(name, **options)


def _load_object(name: str) -> Any:
    """Returns the embedded model, or what a module holds."""
    if name == "embedded":
        from langchain_dpicl.backends.embedded.model import EmbeddedModel

        return EmbeddedModel()
    return load_named("--model", name, expected="'embedded', a folder that holds a model, or module:attribute")


def load_named(option: str, name: str, *, expected: str = "module:attribute") -> Any:
    """Returns the object that `module:attribute` names, for the option that named it."""
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ConfigurationError(f"{option}: expected {expected}, found {name!r}.")
    target: Any = _import(module, option)
    for part in attribute.split("."):
        if not hasattr(target, part):
            raise ConfigurationError(f"{option}: the module {module!r} has no attribute {attribute!r}.")
        target = getattr(target, part)
    if inspect.isclass(target) or inspect.isfunction(target):
        what = "class" if inspect.isclass(target) else "function"
        kind = "a model or engine" if option == "--model" else "an object"
        advice = f"Call it in the module ({option.strip('-').upper()} = {attribute}(...)) and name the result."
        raise ConfigurationError(f"{option}: expected {kind}, found the {what} {name!r}. {advice}")
    return target


def _import(module: str, option: str) -> Any:
    """Imports the user's module, from the current folder too; what it raises is the user's own and public."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{module}.".startswith(f"{missing}."):
            advice = "Give its dotted name, as in an import, and run dpicl where it can be imported."
            raise ConfigurationError(f"{option}: no module named {module!r}. {advice}") from error
        raise ConfigurationError(f"{option}: importing {module!r} raised {type(error).__name__}: {error}") from error
