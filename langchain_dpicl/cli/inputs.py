"""Reads and checks what a command line names: records, models, files."""

from __future__ import annotations

import csv
import dataclasses
import gzip
import importlib
import inspect
import json
import secrets
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from langchain_dpicl._plain_files import MAX_TEXT, read_plain
from langchain_dpicl.exceptions import ConfigurationError

if TYPE_CHECKING:
    from langchain_dpicl.cli.config import Model, Settings
    from langchain_dpicl.privacy.data.private_examples import PrivateExamples


_FOLDER_OPTIONS = ("device", "dtype", "max_prompt_tokens", "chat")
PROVIDERS = frozenset(
    [
        "anthropic",
        "anthropic_bedrock",
        "azure_ai",
        "azure_openai",
        "baseten",
        "bedrock",
        "bedrock_converse",
        "bedrock_mantle_anthropic",
        "bedrock_mantle_openai",
        "cohere",
        "deepseek",
        "fireworks",
        "google_anthropic_vertex",
        "google_genai",
        "google_vertexai",
        "groq",
        "huggingface",
        "ibm",
        "langsmith",
        "litellm",
        "meta",
        "mistralai",
        "nvidia",
        "ollama",
        "openai",
        "openrouter",
        "perplexity",
        "together",
        "upstage",
        "xai",
    ]
)
"""Providers of LangChain's `init_chat_model` and `init_embeddings`; any other model is named as module:attribute."""
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


def check_out(out: Path, *others: str | Path | None) -> None:
    """Refuses a target that could not be written at the end, by writing beside it now, or that the command reads.

    Args:
      out: the target.
      others: the records and every other file that the command names.
    """
    if out.exists() and not out.is_file():
        raise ConfigurationError(f"--out: expected a file, found a folder or a device: {out}.")
    if any(_is_same_file(out, Path(other)) for other in others if other is not None):
        raise ConfigurationError(
            f"--out: expected another file than those that the command reads or keeps, found {out}. Name a new file."
        )
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


def _is_same_file(first: Path, second: Path) -> bool:
    """Whether two paths name one file, which need not exist yet."""
    if first.exists() and second.exists():
        return first.samefile(second)
    return first.resolve() == second.resolve()


def open_records(path: Path) -> IO[str]:
    """Opens a file of records; one line of text each, or one row.

    Raises:
      ConfigurationError: its name ends in no format that is read here.
    """
    if not path.name.lower().endswith(_FORMATS):
        raise ConfigurationError(f"{path}: expected JSON lines or CSV, in a file that ends in {', '.join(_FORMATS)}.")
    opener: Any = gzip.open if path.name.lower().endswith(".gz") else open
    # utf-8-sig: a spreadsheet's byte order mark would become part of the first field's name.
    file: IO[str] = opener(path, "rt", encoding="utf-8-sig", newline="")
    return file


def is_csv(path: Path) -> bool:
    """Whether a file of records is read as CSV."""
    return path.name.lower().removesuffix(".gz").endswith(".csv")


UNREADABLE = (ValueError, RecursionError, csv.Error, EOFError, zlib.error, gzip.BadGzipFile)
"""What reading a file that is broken raises; the messages may quote it."""


def read_records(path: Path) -> list[Any]:
    """Reads records without ever showing one: a fault is reported without its content or its place."""
    records: list[Any] | None = None
    fault = "a broken line"
    try:
        with open_records(path) as file:
            records = list(_rows(file) if is_csv(path) else _lines(file))
    except _ArrayFoundError:
        fault = "a JSON array; write one record per line"
    except ConfigurationError:  # a ValueError too, but about the name of the file
        raise
    except UNREADABLE:
        pass
    if records is None:
        # Raised out here: the fault behind it, which may quote a record, is in no chain.
        advice = f"`dpicl check {path}` shows its line to the owner."
        raise ConfigurationError(
            f"{path}: expected JSON lines (.jsonl) or CSV (.csv) in UTF-8, found {fault}. {advice}"
        )
    return records


class _ArrayFoundError(Exception):
    """The file holds one JSON array instead of one record per line."""


def numbered_lines(file: IO[str]) -> Iterator[tuple[int, str]]:
    """Yields the lines that hold something, with their numbers."""
    return ((number, line) for number, line in enumerate(file, 1) if line.strip())


def numbered_rows(file: IO[str]) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yields rows of CSV with the number of their first line; None for one with more cells than fields."""
    # Long texts are cut by `PrivateExamples`, not refused here.
    csv.field_size_limit(2**31 - 1)
    reader, first = csv.DictReader(file, strict=True), 2
    names = [name for name in reader.fieldnames or () if name]  # spreadsheets write empty ones at the end
    if len(set(names)) < len(names):
        raise csv.Error  # the last of two columns of one name would hide the first
    for row in reader:
        yield first, None if None in row else row
        first = reader.line_num + 1


def _lines(file: IO[str]) -> Iterator[Any]:
    for place, (_, line) in enumerate(numbered_lines(file)):
        if not place and line.lstrip().startswith("["):
            raise _ArrayFoundError
        yield json.loads(line)


def _rows(file: IO[str]) -> Iterator[dict[str, Any]]:
    for _, row in numbered_rows(file):
        if row is None:
            raise csv.Error  # an unquoted comma has cut a text
        yield row


def private_examples(settings: Settings) -> PrivateExamples:
    """Reads the records that the settings declare."""
    from langchain_dpicl.privacy.data.private_examples import PrivateExamples

    data = settings.data
    declared = {name: value for name, value in vars_of(data).items() if value is not None and name != "file"}
    if data.label_key is not None and data.labels is None and data.num_labels():
        declared["labels"] = tuple(map(str, data.sizes()))
    return PrivateExamples(read_records(Path(str(data.file))), **{"dataset_id": "private-examples", **declared})


def vars_of(value: Any) -> dict[str, Any]:
    """Returns the fields of an option value."""
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def load_model(model: Model) -> Any:
    """Returns the embedded model, an engine on a model's folder, or the model that a name stands for."""
    options = {name: value for name, value in vars_of(model).items() if name in _FOLDER_OPTIONS and value is not None}
    if model.name != "embedded" and Path(model.name).is_dir():
        from langchain_dpicl.backends.hf.backend import HuggingFaceBackend

        return _made(model, HuggingFaceBackend, model=model.name, **options)
    if options:
        keys = ", ".join(f"model.{name}" for name in options)
        raise ConfigurationError(
            f"{keys}: expected none unless --model is the folder of a model, found {model.name!r}."
        )
    if model.name == "embedded":
        from langchain_dpicl.backends.embedded.model import EmbeddedModel

        return _made(model, EmbeddedModel)
    if model.private_process:
        _find_modules_here()
        return _made(model, model.name)
    from langchain_dpicl.backends.resolve import as_model

    expected = "'embedded', a folder that holds a model, provider:model or module:attribute"
    return _resolved("--model", model.name, as_model, expected=expected)


def load_embeddings(name: str) -> Any:
    """Returns the embeddings that a name stands for."""
    from langchain_dpicl.backends.resolve import as_embeddings

    return _resolved("model.embeddings", name, as_embeddings, expected="provider:model or module:attribute")


def _resolved(option: str, name: str, make: Callable[[str], Any], *, expected: str) -> Any:
    """Returns what LangChain makes of "provider:model", or the object that "module:attribute" names."""
    if not names_provider(name):
        return load_named(option, name, expected=expected)
    try:
        return make(name)
    except ConfigurationError as error:  # a package that is missing, with the line that installs it
        said = str(error).partition(": ")[2]
    except Exception as error:  # noqa: BLE001  the provider's class, without a key for instance; nothing was read yet
        said = f"making {name!r} raised {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    raise ConfigurationError(f"{option}: {said}")


def names_provider(name: str) -> bool:
    """Whether a name is "provider:model" of LangChain, unless a module in the current folder has the provider's name.

    A provider and its client's package often share a name (openai, anthropic).
    """
    provider, _, model = name.partition(":")
    here = Path.cwd() / provider
    return bool(model) and provider in PROVIDERS and not (here.with_suffix(".py").exists() or here.is_dir())


def _made(model: Model, maker: Any, /, **arguments: Any) -> Any:
    """Returns what `maker` makes, in a process of its own where the settings say so."""
    if not model.private_process:
        return maker(**arguments)
    from langchain_dpicl.backends import PrivateProcess

    return PrivateProcess(maker, **arguments)


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
        kinds = {"--model": "a model or engine", "--evaluator": "a Score or a Judge"}
        kind = kinds.get(option, "an object")
        advice = f"Call it in the module ({option.strip('-').upper()} = {attribute}(...)) and name the result."
        if option == "--evaluator" and what == "function":
            advice = f"Declare it in the module (mine = Score(Pure({attribute}), marks=(0, 1))) and name that."
        raise ConfigurationError(f"{option}: expected {kind}, found the {what} {name!r}. {advice}")
    return target


def _find_modules_here() -> None:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)


def _import(module: str, option: str) -> Any:
    """Imports the user's module, from the current folder too; what it raises is the user's own and public."""
    _find_modules_here()
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{module}.".startswith(f"{missing}."):
            advice = "Give its dotted name, as in an import, and run dpicl where it can be imported."
            raise ConfigurationError(f"{option}: no module named {module!r}. {advice}") from error
        raise ConfigurationError(f"{option}: importing {module!r} raised {type(error).__name__}: {error}") from error
