"""Reads what a command line names: records, models, files, and settings from TOML, --set and flags."""

from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import gzip
import importlib
import inspect
import io
import json
import os
import re
import secrets
import sys
import tomllib
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

from langchain_dpicl._calls import did_you_mean
from langchain_dpicl._plain_files import MAX_RECORDS, MAX_TEXT, check_path, open_plain, read_plain, unique_keys
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.options import (
    OPTIONS,
    Count,
    CountOrZero,
    Delta,
    FewShotTask,
    LabelAnswers,
    NotNegative,
    Option,
    OptionT,
    Positive,
    Share,
    Texts,
)
from langchain_dpicl.privacy._validate import Adjacency, check_epsilon, fail

if TYPE_CHECKING:
    from langchain_dpicl.privacy.private_examples import PrivateExamples


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
_CHUNK = 1 << 16
_FORMATS = (".jsonl", ".csv", ".jsonl.gz", ".csv.gz")


def read_text(path: Path, what: str) -> str:
    """Returns the text of a public file, which is a plain one, without a byte order mark; `what` is expected there."""
    with contextlib.suppress(UnicodeDecodeError):  # it holds the bytes
        return read_plain(path, MAX_TEXT).decode("utf-8-sig")
    raise ConfigurationError(f"{path}: expected {what} in UTF-8, found other bytes.")


def read_json(path: Path) -> Any:
    """Reads a public JSON file."""
    text = read_text(path, "JSON text")
    try:
        return json.loads(text, object_pairs_hook=unique_keys)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise ConfigurationError(f"{path}: expected JSON, found at {place}: {error.msg}.") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise ConfigurationError(
            f"{path}: expected JSON, found a number or nesting too large to read, or a key twice."
        ) from error


def check_out(out: Path, *others: str | Path | None) -> None:
    """Refuses a target that could not be written at the end, by writing beside it now, or that the command reads."""
    # /dev/stdout may lead to a plain file, and a saved file would take the place of the link.
    if (out.exists() and not out.is_file()) or out.parent.resolve() == Path("/dev"):
        raise ConfigurationError(f"--out: expected a file, found a folder or a device: {out}. Name a new file.")
    check_apart(out, *others)
    if not out.parent.is_dir():
        raise ConfigurationError(f"--out: expected a file in a folder that exists, found {out}. Make the folder first.")
    check_writable(out)


def check_apart(out: Path, *others: str | Path | None) -> None:
    """Refuses a target that the command reads or keeps."""
    if any(_is_same_file(out, Path(other)) for other in others if other is not None):
        raise ConfigurationError(
            f"--out: expected another file than those that the command reads or keeps, found {out}. Name a new one."
        )


def check_writable(out: Path) -> None:
    """Refuses a place of a file or a folder that cannot be written, by writing beside it now."""
    probe = out.with_name(f".{out.name}.{secrets.token_hex(8)}.part")
    try:
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError as error:
        raise ConfigurationError(
            f"--out: expected a place that can be written, found {out} ({error.strerror})."
        ) from error


def holds_something(file: Path) -> bool:
    """Whether there is a file that is not empty, as `mktemp` leaves one."""
    return file.exists() and file.stat().st_size > 0


def _is_same_file(first: Path, second: Path) -> bool:
    """Whether two paths name one file, which need not exist yet."""
    if first.exists() and second.exists():
        return first.samefile(second)
    name = "--out, or a path of the settings"
    return check_path(name, first) == check_path(name, second)


def open_records(path: Path, *, errors: str = "strict") -> IO[str]:
    """Opens a plain file of records; one line or row each. Reading more than `MAX_RECORDS` raises MemoryError."""
    _check_format(path)
    packed = os.fdopen(open_plain(path, MAX_RECORDS), "rb")
    whole: Any = gzip.GzipFile(fileobj=packed) if path.name.lower().endswith(".gz") else packed
    bounded = io.BufferedReader(_Bounded(whole, packed, MAX_RECORDS), _CHUNK)
    # utf-8-sig: a spreadsheet's byte order mark would become part of the first field's name.
    return io.TextIOWrapper(bounded, encoding="utf-8-sig", errors=errors, newline="")


def _check_format(path: Path) -> None:
    if not path.name.lower().endswith(_FORMATS):
        raise ConfigurationError(f"{path}: expected JSON lines or CSV, in a file that ends in {', '.join(_FORMATS)}.")


class _Bounded(io.RawIOBase):
    """Reads what a file unpacks to, up to a number of bytes."""

    def __init__(self, whole: IO[bytes], packed: IO[bytes], most: int) -> None:
        self._whole, self._packed, self._left = whole, packed, most

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._whole.read(len(buffer))
        self._left -= len(data)
        if self._left < 0:
            raise MemoryError  # as where the memory is full: there is more than is held
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._packed.close()
        super().close()


def is_csv(path: Path) -> bool:
    """Whether a file of records is read as CSV."""
    return path.name.lower().removesuffix(".gz").endswith(".csv")


UNREADABLE = (ValueError, RecursionError, csv.Error, EOFError, zlib.error, gzip.BadGzipFile)
"""What reading a file that is broken raises; the messages may quote it."""


def too_large() -> str:
    """Returns what a file holds whose reading raises MemoryError."""
    return f"more than {MAX_RECORDS:,} bytes, unpacked, or than the memory holds"


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
    except MemoryError:
        fault = too_large()
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


def csv_reader(file: IO[str]) -> csv.DictReader[str]:
    """Returns a reader of rows of CSV, which has read their names."""
    # Long texts are cut by `PrivateExamples`, not refused here.
    csv.field_size_limit(2**31 - 1)
    reader = csv.DictReader(file, strict=True)
    names = [name for name in reader.fieldnames or () if name]  # spreadsheets write empty ones at the end
    if len(set(names)) < len(names):
        raise csv.Error  # the last of two columns of one name would hide the first
    return reader


def numbered_rows(reader: csv.DictReader[str]) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yields rows with the number of their first line; None for one with more cells than fields."""
    first = 2
    for row in reader:
        yield first, None if None in row else row
        first = reader.line_num + 1


def _lines(file: IO[str]) -> Iterator[Any]:
    for place, (_, line) in enumerate(numbered_lines(file)):
        if not place and line.lstrip().startswith("["):
            raise _ArrayFoundError
        yield json.loads(line, object_pairs_hook=unique_keys)


def _rows(file: IO[str]) -> Iterator[dict[str, Any]]:
    for _, row in numbered_rows(csv_reader(file)):
        if row is None:
            raise csv.Error  # an unquoted comma has cut a text
        yield row


def private_examples(settings: Settings, *, are_read: bool = True) -> PrivateExamples:
    """Reads the records that the settings declare; otherwise declares them alone, for a dry run."""
    from langchain_dpicl.privacy.private_examples import PrivateExamples

    data = settings.data
    if settings.records is not None:
        _check_format(settings.records)
    if data.public_size is None:
        advice = "A public figure or a round number, not the number of records, which is private."
        raise fail(
            "--public-size, data.public_size", "the declared number of units, or one number per label", None, advice
        )
    declared = {name: value for name, value in vars_of(data).items() if value is not None and name != "file"}
    if data.label_key is not None and data.labels is None and data.num_labels():
        declared["labels"] = tuple(map(str, data.sizes()))
    records = read_records(Path(str(data.file))) if are_read else ()
    private = PrivateExamples(records, **{"dataset_id": "private-examples", **declared})
    _warn_of_spellings(private.labels or ())
    return private


def _warn_of_spellings(labels: Sequence[str]) -> None:
    """Warns, before anything is spent, of declared labels that are one label by their looks."""
    from langchain_dpicl.privacy.extensions.redeclared import normalized

    known: dict[str, str] = {}
    for label in labels:
        if (other := known.setdefault(normalized(label), label)) != label:
            words = f"the labels {other!r} and {label!r} differ in case or spaces alone: each is a label of its own"
            warnings.warn(
                f"{words}. Write them alike in the records, and declare one.", stacklevel=1
            )  # once, however often declared
            return


def vars_of(value: Any) -> dict[str, Any]:
    """Returns the fields of an option value."""
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def toml_text(value: Any) -> str:
    """Returns a value as TOML; of JSON's texts it differs in one control character."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml_key(str(name))} = {toml_text(part)}" for name, part in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(toml_text, value)) + "]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _toml_key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else toml_text(name)


_MODELS = "'embedded', a folder that holds a model, provider:model or module:attribute"


def check_model(model: Model) -> dict[str, Any]:
    """Refuses a name that no model can have; makes none. Returns the options of a folder, which no other has."""
    options = {name: value for name, value in vars_of(model).items() if name in _FOLDER_OPTIONS and value is not None}
    if model.name == "embedded" or not Path(model.name).is_dir():
        if options:
            keys = ", ".join(f"model.{name}" for name in options)
            raise ConfigurationError(
                f"{keys}: expected none unless --model is the folder of a model, found {model.name!r}."
            )
        if model.name != "embedded":
            _check_parts("--model", model.name, _MODELS)
    return options


def load_model(model: Model) -> Any:
    """Returns the embedded model, an engine on a model's folder, or the model that a name stands for."""
    options = check_model(model)
    if model.name == "embedded":
        from langchain_dpicl.backends.embedded import EmbeddedModel

        return _made(model, EmbeddedModel)
    if Path(model.name).is_dir():
        from langchain_dpicl.backends.hf.backend import HuggingFaceBackend

        return _made(model, HuggingFaceBackend, model=model.name, **options)
    if model.private_process:
        _find_modules_here()
        return _made(model, model.name)
    from langchain_dpicl.backends.resolve import as_model

    return _resolved("--model", model.name, as_model, expected=_MODELS)


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


TEXT_PROVIDERS = frozenset(
    [
        "anthropic",
        "anthropic_bedrock",
        "bedrock",
        "bedrock_converse",
        "google_anthropic_vertex",
        "google_genai",
        "mistralai",
    ]
)
"""Providers whose classes report no log-probabilities (docs/providers.md)."""


def answers_in_text(name: str) -> bool:
    """Whether a name is of a provider without log-probabilities."""
    return names_provider(name) and name.partition(":")[0] in TEXT_PROVIDERS


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


def _check_parts(option: str, name: str, expected: str) -> tuple[str, str]:
    """Returns the two parts of "module:attribute", which those of "provider:model" are too."""
    first, _, second = name.partition(":")
    if not first or not second:
        raise ConfigurationError(f"{option}: expected {expected}, found {name!r}.")
    return first, second


def load_named(option: str, name: str, *, expected: str = "module:attribute") -> Any:
    """Returns the object that `module:attribute` names, for the option that named it."""
    module, attribute = _check_parts(option, name, expected)
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


METHODS = {
    "generation": "langchain_dpicl.generation.synthesizer:DemonstrationSynthesizer",
    "evolution": "langchain_dpicl.evolution:PrivateEvolution",
    "documents": "langchain_dpicl.documents:DocumentSynthesizer",
    "voting": "langchain_dpicl.voting:DPVotingRunnable",
    "retrieval": "langchain_dpicl.retrieval:DPRetrievalVotingRunnable",
    "free_form": "langchain_dpicl.free_form:DPFreeFormRunnable",
    "retrieval_free_form": "langchain_dpicl.retrieval:DPRetrievalFreeFormRunnable",
    "pate": "langchain_dpicl.pate.labeler:PromptPATELabeler",
    "training": "langchain_dpicl.soft_prompts.trainer:PromptDPSGD",
    "counts": "langchain_dpicl.discovery:UnitCounter",
    "evaluation": "langchain_dpicl.evaluation.evaluate:dp_evaluate",
    "choice": "langchain_dpicl.evaluation.choose:dp_choose",
}
"""The component or function of each method; the parameters of its constructor are the keys of the settings."""
_NOT_KEYS = frozenset(
    {
        *("private", "llm", "budget", "executor", "public_inputs"),
        *("chain", "chains", "baseline", "evaluator", "evaluators", "progress", "config"),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Data(Option):
    """The table [data]: the file of the records, and what is declared of them.

    Args:
      file: records, as JSON lines or CSV; plans read no file.
      text_key: field that holds the text.
      label_key: field that holds the label.
      labels: the declared labels; None: those of `public_size`.
      public_size: declared, not counted, number of units; or a table with one number per label.
      unit_key: field that names the person a record belongs to.
      records_per_unit: records kept of each unit.
      fields: further fields that prompts show.
      dataset_id: public name of the records.
      max_chars: characters kept of each text; longer texts are cut.
      labels_as_text: reads integer and boolean labels as text.
      exact_size_is_public: whether the number of units is public; silences the warning about one that is not round.
      allow_large_delta: whether delta may be as large as 1 / public_size, as in the papers.
    """

    file: str | None = None
    text_key: str = "text"
    label_key: str | None = None
    labels: Texts | None = None
    public_size: CountOrZero | Mapping[str, CountOrZero] | None = None
    unit_key: str | None = None
    records_per_unit: Count | None = None
    fields: Texts | None = None
    dataset_id: str | None = None
    max_chars: Count | None = None
    labels_as_text: bool = False
    exact_size_is_public: bool = False
    allow_large_delta: bool = False

    def sizes(self) -> dict[str | None, int]:
        """Returns the declared units by label, or of None."""
        if self.public_size is None:
            raise fail("data.public_size", "the declared number of units", None, "Give --public-size N.")
        if isinstance(self.public_size, int):
            return {None: self.public_size}
        sizes: dict[str | None, int] = {}
        sizes.update(self.public_size)
        return sizes

    def num_labels(self) -> int | None:
        """Returns the number of declared labels; None: none are declared."""
        if self.labels is not None:
            return len(self.labels)
        return None if not isinstance(self.public_size, Mapping) else len(self.public_size)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Limits(Option):
    """The table [budget]: a new budget, or the ledger that pays.

    Args:
      epsilon: of the budget; with a ledger, of this component.
      delta: at most 1/(10 * all declared units); 0: pure differential privacy, for exact counts.
      adjacency: the neighbouring relation; None: that of the ledger, or add_remove.
      ledger: an existing ledger: a SQLite file, or a postgresql:// address without a password (PGPASSWORD gives it).
      anchor: second place that remembers the last line of the ledger: a file, or a postgresql:// address.
    """

    epsilon: Positive | None = None
    delta: Delta | None = None
    adjacency: Adjacency | None = None
    ledger: str | None = None
    anchor: str | None = None

    def new(self) -> dict[str, Any]:
        """Returns the arguments of a new budget."""
        for name in ("epsilon", "delta"):
            if getattr(self, name) is None:
                raise fail(f"budget.{name}", "a number", None, f"Give --{name}, or --ledger.")
        if self.ledger is None and self.anchor is not None:
            raise ConfigurationError("--anchor: expected none without --ledger, found one.")
        return {"epsilon": self.epsilon, "delta": self.delta, "adjacency": self.adjacency or "add_remove"}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Model(Option):
    """The table [model]: what reads the records.

    Args:
      name: "embedded", the folder of a Hugging Face model, "provider:model" of `init_chat_model`, or module:attribute.
      device: of a folder: cpu, cuda, cuda:1, ...
      dtype: of a folder.
      max_prompt_tokens: of a folder: length that every prompt is padded or cut to.
      chat: of a folder: whether a prompt is a user's message.
      embeddings: LangChain embeddings, which receive the records: "provider:model" or module:attribute; of evolution.
      private_process: whether the model is made and called in a process of its own, which nothing watches that watches
        this one.
    """

    name: str = "embedded"
    device: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    max_prompt_tokens: Count | None = None
    chat: bool | None = None
    embeddings: str | None = None
    private_process: bool = False

    def _check_together(self) -> None:
        if not self.name:
            raise fail("--model", _MODELS, self.name)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Guess(Option):
    """The table [guess] of a plan: what is assumed and not measured.

    Args:
      agreement: share of one-shot rows that want the same token (generation); None: 0.6.
      public_agreement: chance of that token after the public prompt; None: a quarter of `agreement`.
      skill: of votes: share of the way from chance to certainty of a one-shot row; None: 0.35.
      growth: what doubling the records of a row adds to it; None: 0.05.
      correlation: how alike the rows of a question err; None: 0.55, or 0.75 on two labels.
      rehearsal: file of `dpicl rehearse`, which takes the place of these three.
      participants: units that take part in a query of retrieval.
      full_vocabulary: the model shows its whole vocabulary, so that logit mechanisms are compared too.
      chance: wanted chance of a right label of PATE.
      noise: deviation, in votes, at which teachers are priced; None: the plan's own.
      labels: labels an answer can have, where `data` declares none.
      public_inputs: inputs without labels that there are (PATE).
      parameters: trained parameters (training).
    """

    agreement: Share | None = None
    public_agreement: Share | None = None
    skill: Share | None = None
    growth: Share | None = None
    correlation: Share | None = None
    rehearsal: str | None = None
    participants: CountOrZero = 30
    full_vocabulary: bool = False
    chance: Share = 0.95
    noise: Positive | None = None
    labels: Count | None = None
    public_inputs: Count | None = None
    parameters: Count = 7680

    def _check_together(self) -> None:
        given = self.given("skill", "growth", "correlation")
        if self.rehearsal is not None and given:
            raise fail("guess", "a rehearsal, or guesses in its place", ["rehearsal", *given])

    def given(self, *names: str) -> dict[str, Any]:
        """Returns those of the fields that were given."""
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Prices(Option):
    """The table [cost] of a plan: public caps of a call, and prices.

    Args:
      price_in: per million prompt tokens.
      price_out: per million answer tokens.
      record_tokens: cap of a record.
      query_tokens: cap of a query with its instruction.
      answer_tokens: cap of an answer.
      calls_per_row: more than 1 where rows are calibrated or score each label; None: 1, or what a rehearsal says.
      examples_per_unit: examples of one person at most (training).
    """

    price_in: NotNegative = 0.0
    price_out: NotNegative = 0.0
    record_tokens: Count = 60
    query_tokens: Count = 60
    answer_tokens: Count = 1
    calls_per_row: Count | None = None
    examples_per_unit: Count = 1


TABLES: Mapping[str, type[Option]] = {"data": Data, "budget": Limits, "model": Model, "guess": Guess, "cost": Prices}
"""The tables that every file may hold beside the keys of its method."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that a command was given, checked."""

    method: str
    data: Data = field(default_factory=Data)
    budget: Limits = field(default_factory=Limits)
    model: Model = field(default_factory=Model)
    guess: Guess = field(default_factory=Guess)
    cost: Prices = field(default_factory=Prices)
    component: Mapping[str, Any] = field(default_factory=dict)

    def get(self, name: str, default: Any = None) -> Any:
        """Returns a parameter of the component, or a default where it was not given."""
        return self.component.get(name, default)

    def only(self, *names: str) -> dict[str, Any]:
        """Returns those of the parameters that were given."""
        return {name: self.component[name] for name in names if name in self.component}

    def door(self, private: Any, **more: Any) -> Any:
        """Builds the component, which checks its arguments and has spent nothing so far."""
        return component_of(self.method).from_private_examples(private, **{**self.component, **more})

    def noise_kinds(self) -> list[Any]:
        """Returns the option values that the component takes as its noise."""
        takes = inspect.signature(component_of(self.method).from_private_examples).parameters
        words = re.findall(r"\w+", str(takes["noise"].annotation))
        return [option for option in OPTIONS if option.__name__ in words]

    @property
    def records(self) -> Path | None:
        """The file of the private records; None where none was named."""
        return None if self.data.file is None else Path(self.data.file)

    @property
    def answers(self) -> LabelAnswers:
        """How answers are read and released; the usual ones where nothing was given."""
        return self.get("answers") or LabelAnswers()

    @property
    def wording(self) -> FewShotTask:
        """How prompts of a vote read; the usual ones where nothing was given."""
        return FewShotTask.of(self.get("task"), self.get("example_prompt"), self.get("suffix"), self.get("prefix", ""))

    @property
    def share_epsilon(self) -> float:
        """The component's epsilon: its own, or that of the budget."""
        own = self.get("epsilon")
        return check_epsilon(self.budget.new()["epsilon"] if own is None else own)

    @property
    def share_delta(self) -> float:
        """The component's delta: its own, or as large a part of the budget's as its epsilon is."""
        if (own := getattr(self.get("noise"), "delta", None)) is not None:
            return float(own)
        limits = self.budget.new()
        return float(limits["delta"] * min(self.share_epsilon / limits["epsilon"], 1))

    @property
    def adjacency(self) -> Adjacency:
        """The neighbouring relation."""
        return self.budget.adjacency or "add_remove"

    def to_dict(self) -> dict[str, Any]:
        """Returns the settings as JSON values, as a file would hold them."""
        tables = {name: getattr(self, name).to_dict() for name in TABLES}
        shown = {name: _shown(value) for name, value in self.component.items()}
        return {"method": self.method, **shown, **{name: table for name, table in tables.items() if table}}


def _shown(value: Any) -> Any:
    """Returns a value as a file would hold it."""
    if not isinstance(value, Option):
        return list(value) if isinstance(value, tuple) else value
    grammar = getattr(value, "grammar", None)
    if grammar is None:
        return value.to_dict()
    source = json.loads(grammar.source) if grammar.kind in {"json_schema", "choices"} else grammar.source
    return {**value.to_dict(), "grammar": {grammar.kind: source}}


def name_of(settings: Settings) -> str:
    """Returns the name of the component in its ledger."""
    return str(settings.get("component") or f"{settings.method}-{settings.data.dataset_id}")


def component_of(method: str) -> Any:
    """Returns the component's class, or the function."""
    module, _, name = METHODS[method].partition(":")
    return getattr(importlib.import_module(module), name)


_OF_SERVICE = frozenset({"ledger", "service", "operator", "tenants", "demonstrations"})
"""Keys that a settings file of `dpicl serve` has beside its components, which are tables there."""


def settings_of(given: Mapping[str, Any], *, methods: Sequence[str] = tuple(METHODS)) -> Settings:
    """Checks settings as TOML holds them."""
    rest = dict(given)
    name = rest.pop("method", methods[0])
    if name not in methods:
        raise fail("method", f"one of {list(methods)}", name)
    tables = {key: read_table(key, TABLES[key], rest.pop(key)) for key in TABLES if key in rest}
    component = component_of(name)
    takes = inspect.signature(getattr(component, "from_private_examples", component)).parameters
    keys = [key for key in takes if key not in _NOT_KEYS]
    given_to_it = {key: _read(key, value, keys, takes) for key, value in rest.items()}
    return Settings(name, component=given_to_it, **tables)  # type: ignore[arg-type]


def read_table(key: str, kind: type[OptionT], value: Any) -> OptionT:
    """Returns a table of a file; a fault names it as the file does, not by the class."""
    try:
        return kind.from_dict(table_of(key, value))
    except ConfigurationError as error:
        fault = re.sub(rf"^{kind.__name__}(?=[.:])", lambda _: key, str(error))
    raise ConfigurationError(fault)


def _read(key: str, value: Any, keys: Sequence[str], takes: Mapping[str, inspect.Parameter]) -> Any:
    """Returns a parameter of the component: an option value from a table, anything else as it is."""
    if key not in keys:
        advice = did_you_mean(key, [*keys, *TABLES])
        if key in _OF_SERVICE:
            advice = "It stands at the top of a file of `dpicl serve`; a single component's ledger is budget.ledger."
        raise fail("settings", f"keys among {sorted([*keys, *TABLES])}", key, advice)
    words = re.findall(r"\w+", str(takes[key].annotation))
    options = [option for option in OPTIONS if option.__name__ in words]
    # The name of a mechanism is short for its noise; a rehearsal is an object of Python, and a file of [guess].
    known = {"None", "Rehearsal", *(option.__name__ for option in options)}
    is_table = key != "noise" and bool(options) and set(words) <= known
    if not is_table and not (options and isinstance(value, Mapping)):
        return tuple(value) if isinstance(value, list) else value
    table = dict(table_of(key, value))
    if isinstance(table.get("grammar"), Mapping):
        table["grammar"] = _grammar(table["grammar"])
    return _option(options, table)


def _option(options: Sequence[type[Option]], table: Mapping[str, Any]) -> Option:
    """Returns the first of the option values that takes the table."""
    fits = [option for option in options if _takes(option, table)]
    faults = []
    for option in fits or options[:1]:
        try:
            return option.from_dict(table)
        except ConfigurationError as error:
            faults.append(str(error))
    others = [] if fits else [other.__name__ for other in OPTIONS if _takes(other, table)]
    advice = f" These keys are of {' or '.join(others)}, in the settings file of another command." if others else ""
    raise ConfigurationError(f"{faults[0]}{advice}")


def _takes(option: type[Option], table: Mapping[str, Any]) -> bool:
    return set(table) <= set(inspect.signature(option).parameters)


def _grammar(table: Mapping[str, Any]) -> Any:
    from langchain_dpicl.generation.grammars import Grammar

    makers: dict[str, Callable[[Any], Grammar]] = {
        "regex": Grammar.regex,
        "json_schema": Grammar.json_schema,
        "choices": Grammar.choices,
        "lark": Grammar.lark,
    }
    if len(table) != 1 or not set(table) <= set(makers):
        raise fail("decoding.grammar", f"one of {list(makers)}", list(table))
    ((kind, source),) = table.items()
    return makers[kind](source)


def table_of(key: str, value: Any) -> Mapping[str, Any]:
    """Returns a table of a file; refuses anything else by its type, as it may be a key or an address."""
    if not isinstance(value, Mapping):
        raise fail(key, "a table", type(value))
    return value


# -- where settings come from ----------------------------------------------------------------------------------------


def add_settings(command: argparse.ArgumentParser) -> None:
    """Adds --config and --set."""
    command.add_argument("--config", type=Path, metavar="FILE", help="TOML file with the keys of the options in Python")
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="one key of it, such as rows.slots=40 (docs: Options)",
    )


FLAGS: Mapping[str, tuple[str, str, str, type]] = {
    "method": ("method", "what is planned or run", "METHOD", str),
    "text_key": ("data.text_key", "field of the text (default text)", "FIELD", str),
    "label_key": ("data.label_key", "field of the label", "FIELD", str),
    "label": ("data.labels", "declared label, once per label", "LABEL", list),
    "public_size": ("data.public_size", "declared units, not counted: N, or LABEL=N for each label", "N", list),
    "unit_key": ("data.unit_key", "field naming the person (default: a record)", "FIELD", str),
    "dataset_id": ("data.dataset_id", "public name of the records in the report", "NAME", str),
    "epsilon": ("budget.epsilon", "of a new budget, or of this component of a ledger", "E", float),
    "delta": ("budget.delta", "at most 1/(10 * all declared units)", "D", float),
    "adjacency": ("budget.adjacency", "add_remove (default) or replace_one", "A", str),
    "ledger": ("budget.ledger", "existing ledger that pays: SQLite file or postgresql://", "WHERE", str),
    "anchor": ("budget.anchor", "file or postgresql:// that remembers the ledger's last line", "WHERE", str),
    "model": ("model.name", "embedded, a model's folder, provider:model, module:name", "NAME", str),
    "embeddings": ("model.embeddings", "provider:model or module:name; they see the records", "NAME", str),
    "instruction": ("instruction", "public description of the task", "TEXT", str),
    "documents_per_topic": ("documents_per_topic", "texts of each topic; 0: words of each topic alone", "N", int),
    "max_tokens": ("max_tokens", "cap of a text", "N", int),
    "max_queries": ("max_queries", "answers that the share pays for", "N", int),
    "part": ("part", "half of the units that is read, by a public hash: choose or test", "HALF", str),
    "component": ("component", "name in the ledger; found again by the same command", "NAME", str),
    "checkpoint": ("checkpoint", "file from which the same command continues", "FILE", str),
    "memo": ("serving.memo", "file of answers; what it holds is not charged again", "FILE", str),
    "rehearsal": ("guess.rehearsal", "file of `dpicl rehearse`, in place of a guess", "FILE", str),
    "public_inputs": ("guess.public_inputs", "public inputs to label", "N", int),
}
"""The keys that have a flag of their own, what it says and takes; a list takes one each time."""


_TABLES: Mapping[str, str] = {
    "Rows": "rows",
    "Noise": "noise",
    "LogitNoise": "noise",
    "ConfidentGNMax": "noise",
    "FewShotTask": "task",
    "GenerationTask": "task",
    "Decoding": "decoding",
    "LabelAnswers": "answers",
    "EmbeddingAnswers": "answers",
    "KeywordAnswers": "answers",
    "Serving": "serving",
    "Retrieval": "retrieval",
    "Topics": "topics",
    "Evolution": "evolution",
    "Training": "training",
}
"""The table of settings that holds an option."""
_PAIRS = r"\w+=[^(),=]+(?:, \w+=[^(),=]+)*"
_OPTION = re.compile(rf"\b([Gg]ive|[Tt]ake|or) (?:\w+=)?({'|'.join(_TABLES)})\(({_PAIRS})\)(?!:)")
_PARAMETER = re.compile(rf"\b([Gg]ive) ({'|'.join(FLAGS)})=(?:\.\.\.)?(?!\w)")
_OF_RECORDS = {
    "Give labels_as_text=True": "Give data.labels_as_text=true (--set, or the settings file)",
    "Write str(...) around it": "Write it as text",
}
"""Advice on records, for Python and for the command line."""


def as_typed(message: str) -> str:
    """Returns a message of the package with its advice as it is typed: keys of settings, and flags, for Python.

    What was found stays as it is, up to the sentence that says what to give: it may quote what the user typed.

    >>> as_typed('expected log-probabilities, or LabelAnswers(votes="text"), found None. Give epsilon=...')
    'expected log-probabilities, or answers.votes=text (--set, or the settings file), found None. Give --epsilon'
    """

    def keys(option: re.Match[str]) -> str:
        pairs = option[3].replace('"', "").replace("'", "").split(", ")
        return f"{option[1]} {' '.join(f'{_TABLES[option[2]]}.{pair}' for pair in pairs)} (--set, or the settings file)"

    def flag(parameter: re.Match[str]) -> str:
        key, *_ = FLAGS[parameter[2]]
        of_file = f" ({key})" if key.startswith("data.") else ""  # which a service has no flags for
        return f"{parameter[1]} --{parameter[2].replace('_', '-')}{of_file}"

    def typed(text: str) -> str:
        for python, shown in _OF_RECORDS.items():
            text = text.replace(python, shown)
        return _PARAMETER.sub(flag, _OPTION.sub(keys, text))

    before, found, rest = message.partition("found ")
    at = max(rest.rfind(". Give "), rest.rfind(". Take "))
    return typed(before) + found + (rest if at < 0 else rest[:at] + typed(rest[at:]))


def add_flags(command: Any, names: Sequence[str]) -> None:
    """Adds flags of keys; a flag that was not typed sets nothing."""
    for name in names:
        key, words, metavar, kind = FLAGS[name]
        taken: dict[str, Any] = {"action": "append"} if kind is list else {"type": kind}
        command.add_argument(f"--{name.replace('_', '-')}", help=f"{words} [{key}]", metavar=metavar, **taken)


def read_settings(arguments: argparse.Namespace, *, methods: Sequence[str] = tuple(METHODS)) -> Settings:
    """Returns the settings of --config, changed by --set, changed by flags."""
    return settings_of(_given(arguments), methods=methods)


def read_data(arguments: argparse.Namespace) -> Data:
    """Returns the table [data] of the same settings; the other keys of a file may be of any command."""
    if others := [item for item in arguments.set if not item.startswith("data.")]:
        raise fail("--set", "keys of [data] alone, such as data.label_key=FIELD", others)
    given = _given(arguments)
    # No command has other keys of these names, but for the fields of a training task.
    if misplaced := sorted((given.keys() & {one.name for one in dataclasses.fields(Data)}) - {"fields"}):
        raise fail("settings", "the keys of the records in the table [data]", misplaced, "Write [data] above them.")
    if misspelt := [name for name in given if name != "data" and did_you_mean(name, ["data"])]:
        raise fail("settings", "a table [data]", misspelt)
    return read_table("data", Data, given.get("data", {}))


def _given(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns what a command was given, as TOML holds it."""
    given: dict[str, Any] = {} if arguments.config is None else read_toml(arguments.config)
    for item in arguments.set:
        key, sign, text = item.partition("=")
        if not sign or not re.fullmatch(r"[\w-]+(\.[\w-]+)*", key):
            raise fail("--set", "KEY=VALUE, such as rows.slots=40", item)
        _put(given, key, _value(text))
    for name, (key, *_) in FLAGS.items():
        value = getattr(arguments, name, None)
        if name == "label" and value is not None and len(value) == 1 and "," in value[0]:
            first, _, second = value[0].partition(",")
            raise fail("--label", "one label, once per label", value[0], f"Give --label {first} --label {second} ...")
        if value is not None:
            _put(given, key, sizes_of(value) if name == "public_size" else value)
    if getattr(arguments, "file", None) is not None:
        _put(given, "data.file", str(arguments.file))
    return given


_NO_TOML = (ValueError, RecursionError, MemoryError)
"""TOMLDecodeError, which is a ValueError, and what Python raises for a number of too many digits or deep nesting."""


def read_toml(path: Path) -> dict[str, Any]:
    """Reads a public TOML file."""
    text = read_text(path, "TOML text")
    try:
        return tomllib.loads(text)
    except _NO_TOML as error:
        found = str(error) or "a value too large to read"
        raise ConfigurationError(f"{path}: expected TOML, found a fault: {found}.") from error


def _value(text: str) -> Any:
    """Returns a value as TOML reads it; what is not TOML is a text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except _NO_TOML:
        return text


def _put(given: dict[str, Any], key: str, value: Any) -> None:
    """Sets a dotted key; a table that a single name stood for (noise = "gumbel") is started anew."""
    *tables, last = key.split(".")
    for name in tables:
        if not isinstance(given.get(name), dict):
            given[name] = {}
        given = given[name]
    given[last] = value


def sizes_of(items: Sequence[str]) -> int | dict[str, int]:
    """Returns declared sizes that were typed: one number, or one per label."""
    sizes: dict[str, int] = {}
    for item in items:
        match = re.fullmatch(r"(?:(.+)=)?([0-9]{1,15})", item, flags=re.DOTALL)
        if match is None:
            raise ConfigurationError(f"--public-size: expected N or LABEL=N, found {item!r}.")
        label = match[1] or ""
        if label in sizes:
            what = f"one size for the label {label!r}" if label else "one N"
            raise ConfigurationError(f"--public-size: expected {what}, found several.")
        sizes[label] = int(match[2])
    if "" in sizes and len(sizes) > 1:
        raise ConfigurationError("--public-size: expected one N, or LABEL=N for every label, found both.")
    return sizes.get("", sizes)
