"""Runs `dpicl generate`, `dpicl documents` and `dpicl discover`, which release values of private records."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_dpicl._plain_files import MAX_TEXT, read_plain
from langchain_dpicl.cli.config import Model, Settings, add_flags, add_settings, read_settings, settings_of
from langchain_dpicl.cli.inputs import check_out, load_model, load_named, private_examples
from langchain_dpicl.exceptions import ConfigurationError, RunInterruptedError
from langchain_dpicl.options import Decoding, LogitNoise, Noise
from langchain_dpicl.options.rows import noise_of
from langchain_dpicl.privacy._validate import fail

if TYPE_CHECKING:
    from langchain_dpicl.budget.handler import PrivacyBudgetCallbackHandler
    from langchain_dpicl.discovery import DiscoveryPlan, UnitCounter, ValueDiscovery
    from langchain_dpicl.distributed.executor import Workplace
    from langchain_dpicl.documents.plan import DocumentsPlan
    from langchain_dpicl.documents.synthesizer import DocumentSynthesizer
    from langchain_dpicl.released.counts import ReleasedCounts

Say = Callable[[str], object]

_FAULT, _INTERRUPTED = 2, 130
_LOCAL = "local"
_BUDGET_NOTES = """\
Without --ledger every run starts a new budget, kept in memory: two runs on the same records spend twice, and their
epsilons add up. `dpicl ledger create` makes a ledger that all runs share.
"""
_SEEN = "What is printed and saved is released under the budget.\n\n"
_GENERATE_NOTES = f"""\
The model sees the records: run one you trust with them (with --set method=evolution it sees none, and embeddings do).
{_SEEN}{_BUDGET_NOTES}
With --ray, workers spend from the --ledger that they share, and the same command continues where it stopped.
"""
_DOCUMENTS_NOTES = f"""\
The model sees the records: run one you trust with them. Topics are keywords of a public vocabulary that many units
hold: --vocabulary names a file of keywords, one a line; --public-texts one of public texts, one a line, whose most
frequent words are taken; without either they are the words of the embedded model. Never name a file of the records.

With --dry-run, or without --out, the plan is printed; nothing is read and nothing is spent. {_SEEN}{_BUDGET_NOTES}"""
_DISCOVERY_NOTES = f"""\
Without --by it counts units. With --by FIELD it finds the values of a field that enough units hold; with --value, once
per value, it counts those. No model is asked. {_SEEN}Counts rest on no declared size. Without --public-size the report
shows the largest one that goes with --delta, 0.1/delta, as the declared size of the records.

{_BUDGET_NOTES}"""


def _command(commands: Any, name: str, *, words: str, about: str, notes: str, run: Any) -> Any:
    """Adds a command that reads records and releases something."""
    command = commands.add_parser(
        name, help=words, description=about, epilog=notes, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.add_argument(
        "file", nargs="?", type=Path, help="records: JSON lines (.jsonl) or CSV (.csv), as they are or .gz"
    )
    command.add_argument("--quiet", action="store_true", help="print nothing but faults; --out has everything")
    command.set_defaults(run=run)
    return command


def _records_of(settings: Settings) -> Path:
    if settings.data.file is None:
        raise ConfigurationError("FILE: expected the file of the records, found none. Name it, or set data.file.")
    return Path(settings.data.file)


# -- dpicl generate --------------------------------------------------------------------------------------------------


def add_generate(commands: Any, *, run: Any) -> None:
    """Adds the command."""
    command = _command(
        commands,
        "generate",
        words="private records in, private demonstrations and a report out",
        about="Turns private records into differentially private demonstrations.",
        notes=_GENERATE_NOTES,
        run=run,
    )
    command.add_argument("--out", type=Path, required=True, help="JSON file for demonstrations and report")
    add_settings(command)
    add_flags(
        command, ("label_key", "label", "public_size", "unit_key", "epsilon", "delta", "ledger", "component", "model")
    )
    group = command.add_argument_group("on a Ray cluster (needs langchain-dpicl[ray])")
    group.add_argument(
        "--ray",
        nargs="?",
        const=_LOCAL,
        metavar="ADDRESS",
        help="run workers on the cluster at ADDRESS (host:port or auto); without one, at RAY_ADDRESS if that is set, "
        "otherwise on a cluster of its own on this machine",
    )
    group.add_argument("--workers", type=int, help="workers at a time (default 2)")
    group.add_argument("--gpus-per-worker", type=float, help="GPUs of a worker (default 0)")


def run_generate(arguments: argparse.Namespace, *, say: Say, complain: Say) -> int:
    """Releases demonstrations and saves them; returns 0, 2 after a fault, 130 after Ctrl-C."""
    settings = read_settings(arguments, methods=("generation", "evolution"))
    check_out(arguments.out, _records_of(settings))
    _check_ray(arguments, settings)
    budget = budget_of(settings)
    model = _driver_model(arguments, settings)
    made = settings.door(
        private_examples(settings), llm=model, budget=budget, **_embeddings(settings), **_shared(arguments, settings)
    )
    return _release(made, arguments, say=say, complain=complain, shown=json_line, budget=budget)


def _release(
    run: Any, arguments: argparse.Namespace, *, say: Say, complain: Say, shown: Callable[[Any], str], budget: Any
) -> int:
    """Runs to the end, printing each item; saves what was released, whatever ends the run."""
    code, stopped, has_some = 0, "", False
    try:
        for item in run.stream(progress=False if arguments.quiet else None):
            has_some = True
            if not arguments.quiet:
                say(shown(item))
    except RunInterruptedError as error:
        code, stopped = _FAULT, str(error).split(" Call run()", 1)[0]
    except KeyboardInterrupt:
        code, stopped = _INTERRUPTED, "Interrupted. Tickets that burnt stay charged."
    finally:
        # A run without tickets left has nothing to save, and must not replace what an earlier one paid for.
        has_some = has_some or run.is_finished or bool(getattr(run, "topics", ()))
        if has_some or not arguments.out.exists():
            save_or_print(run.result, arguments.out, say=say)
    if stopped:
        again = "A new run starts over, on a budget of its own."
        if getattr(arguments, "ray", None) is not None:
            again = "The same command continues where this one stopped."
        elif budget.budget.durable:
            again = "With --set checkpoint=FILE from the start the same command continues where it stopped."
        saved = "What was released is saved in" if has_some else "Nothing was released into"
        complain(f"{stopped} {saved} {arguments.out}. {again}")
    if not arguments.quiet:
        say(str(budget.report()))
    return code


def save_or_print(released: Any, out: Path, *, say: Say) -> None:
    """Saves what was released; prints it if that fails, since it is paid for."""
    try:
        released.save(out)
    except OSError:
        say(released.to_json())
        raise


def json_line(example: dict[str, str]) -> str:
    """Returns one line of JSON that stdout can show as it is."""
    line = json.dumps(example, ensure_ascii=False)
    try:
        line.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return json.dumps(example)
    return line


def budget_of(settings: Settings) -> PrivacyBudgetCallbackHandler:
    """Returns a new budget in memory, or opens the ledger that was named."""
    from langchain_dpicl.budget.handler import PrivacyBudgetCallbackHandler

    limits = settings.budget
    if limits.ledger is None:
        return PrivacyBudgetCallbackHandler(**limits.new())
    budget = PrivacyBudgetCallbackHandler.open(limits.ledger)
    if limits.adjacency not in {None, budget.adjacency}:
        msg = f"budget.adjacency: expected {budget.adjacency}, as of the ledger, found {limits.adjacency}."
        raise ConfigurationError(msg)
    if settings.get("component") is None and settings.data.dataset_id is None:
        advice = "What stands in the ledger under a name is found again, whatever file is read."
        raise ConfigurationError(f"--component: expected a name, or data.dataset_id, with --ledger. {advice}")
    return budget


def _shared(arguments: argparse.Namespace, settings: Settings) -> dict[str, Any]:
    """Returns what a component on a ledger takes besides its settings: a name, its part of delta, workers."""
    taken: dict[str, Any] = {"epsilon": settings.get("epsilon", settings.budget.epsilon)}
    if settings.budget.ledger is not None:
        if settings.get("component") is None:
            taken["component"] = f"{settings.method}-{settings.data.dataset_id}"
        noise = settings.get("noise")
        if settings.budget.delta is not None and getattr(noise, "delta", None) is None:
            noise = Noise() if noise is None else noise
            kinds = settings.noise_kinds()
            taken["noise"] = noise_of(noise, *kinds).replace(delta=settings.budget.delta)
    if getattr(arguments, "ray", None) is not None:
        taken["executor"] = _executor(arguments, settings)
    return taken


def _embeddings(settings: Settings) -> dict[str, Any]:
    name = settings.model.embeddings
    if settings.method != "evolution":
        return {}
    return {"embeddings": None if name is None else load_named("model.embeddings", name)}


# -- workers -----------------------------------------------------------------------------------------------------------
# What workers are sent is public: file names, names of models, an address without a password. Each reads the records.


def _check_ray(arguments: argparse.Namespace, settings: Settings) -> None:
    """Refuses options of a cluster without --ray, and --ray without a shared ledger."""
    if arguments.ray is None:
        for name in ("workers", "gpus_per_worker"):
            if getattr(arguments, name) is not None:
                raise ConfigurationError(f"--{name.replace('_', '-')}: expected none without --ray.")
        return
    if settings.budget.ledger is None and settings.method != "evolution":
        advice = "Make one: dpicl ledger create ADDRESS --epsilon E --delta D."
        raise ConfigurationError(f"--ledger: expected the ledger that the workers share with --ray. {advice}")
    if arguments.workers is not None and arguments.workers < 1:
        raise ConfigurationError(f"--workers: expected an integer >= 1, found {arguments.workers}.")


def _driver_model(arguments: argparse.Namespace, settings: Settings) -> Any:
    """Returns the model; with workers the driver only plans, so it needs no GPU."""
    model = settings.model
    if arguments.ray is not None and Path(model.name).is_dir():
        model = model.replace(device="cpu")
    return _reader(settings, model)


def _reader(settings: Settings, model: Model) -> Any:
    """Returns the model of a component; an evolution's writes at temperature 1, or all candidates would be alike."""
    from langchain_dpicl.backends.base import NextTokenBackend
    from langchain_dpicl.serving.models import LocalLLM

    loaded = load_model(model)
    if settings.method == "evolution" and isinstance(loaded, NextTokenBackend) and hasattr(loaded, "generate"):
        return LocalLLM(backend=loaded, temperature=1.0, max_tokens=settings.get("max_tokens", 60), stop=["\n"])
    return loaded


def _executor(arguments: argparse.Namespace, settings: Settings) -> Any:
    from langchain_dpicl.distributed.ray import RayExecutor

    told = settings.to_dict()
    told["data"]["file"] = str(_records_of(settings).resolve())
    ledger = settings.budget.ledger
    if ledger is not None and "://" not in ledger:
        told["budget"]["ledger"] = str(Path(ledger).resolve())
    size = max(4096, len(settings.data.labels or ()) * settings.get("shots_per_label", 1))
    if ledger is not None:
        _memo(told["budget"]["ledger"], size, may_make=True)
    return RayExecutor(
        "langchain_dpicl.cli.runs:make_workplace",
        options={"settings": told, "memo_size": size},
        address=None if arguments.ray == _LOCAL else arguments.ray,
        num_workers=2 if arguments.workers is None else arguments.workers,
        num_gpus=arguments.gpus_per_worker or 0.0,
    )


def make_workplace(*, settings: dict[str, Any], memo_size: int) -> Workplace:
    """Makes the worker's context from the settings that the driver sent it."""
    from langchain_dpicl.distributed.executor import Workplace

    told = settings_of(settings)
    model = _reader(told, told.model)
    if told.method == "evolution":  # its workers see no record
        return Workplace(model)
    memo = _memo(str(told.budget.ledger), memo_size)
    return Workplace(model, private=private_examples(told), budget=budget_of(told), memo=memo)


def _memo(ledger: str, size: int, *, may_make: bool = False) -> Any:
    """Opens the memo beside the ledger: in its database, or in a file beside its file."""
    if "://" in ledger:
        from langchain_dpicl.stores.postgres_memo import PostgresMemo

        return (PostgresMemo.new if may_make else PostgresMemo.open)(ledger, size=size)
    from langchain_dpicl.stores import SQLiteMemo

    return SQLiteMemo(f"{ledger}.memo", size=size)


# -- dpicl documents ---------------------------------------------------------------------------------------------------


def add_documents(commands: Any, *, run: Any) -> None:
    """Adds the command."""
    command = _command(
        commands,
        "documents",
        words="private documents in, synthetic documents for any retriever and a report out",
        about="Turns private documents into a store of synthetic ones, once, under differential privacy.",
        notes=_DOCUMENTS_NOTES,
        run=run,
    )
    command.add_argument("--out", type=Path, help="JSON file for documents and report (without it: --dry-run)")
    add_settings(command)
    add_flags(command, ("public_size", "unit_key", "epsilon", "delta", "ledger", "component", "model"))
    words = command.add_mutually_exclusive_group()
    words.add_argument("--vocabulary", type=Path, metavar="FILE", help="public keywords, one a line")
    words.add_argument("--public-texts", type=Path, metavar="FILE", help="public texts, one a line, to take words from")
    command.add_argument("--vocabulary-size", type=int, default=1_000, help="words without --vocabulary (default 1000)")
    command.add_argument("--dry-run", action="store_true", help="show the plan; read and spend nothing")


def run_documents(arguments: argparse.Namespace, *, say: Say, complain: Say) -> int:
    """Releases documents, or prints the plan of a dry run; returns 0, 2 after a stop, 130 after Ctrl-C."""
    settings = read_settings(arguments, methods=("documents",))
    if arguments.dry_run or arguments.out is None:
        say(_documents_text(_plan_documents(arguments, settings)))
        return 0
    records = _records_of(settings)
    check_out(arguments.out, records)
    _check_output_free(arguments)
    topics = _topics(arguments, settings)
    budget = budget_of(settings)
    made: DocumentSynthesizer = settings.door(
        private_examples(settings),
        llm=load_model(settings.model),
        budget=budget,
        topics=topics,
        **_shared(arguments, settings),
    )
    if not arguments.quiet:
        say(_documents_text(made.plan))
    code = _release(
        made,
        arguments,
        say=say,
        complain=complain,
        budget=budget,
        shown=lambda document: f"{document.metadata['topic']}: {document.page_content}",
    )
    if not arguments.quiet:
        say("\n".join(_topics_text(made)))
    return code


def _topics(arguments: argparse.Namespace, settings: Settings) -> Any:
    """Returns the option with the public vocabulary that was named."""
    from langchain_dpicl.discovery import public_vocabulary
    from langchain_dpicl.options import Topics

    topics = settings.get("topics") or Topics()
    if arguments.vocabulary is None and arguments.public_texts is None and topics.vocabulary is not None:
        return topics
    records = None if settings.data.file is None else Path(settings.data.file)
    if arguments.vocabulary is not None:
        return topics.replace(vocabulary=tuple(_public_lines(arguments.vocabulary, records)))
    texts = None if arguments.public_texts is None else _public_lines(arguments.public_texts, records)
    return topics.replace(vocabulary=public_vocabulary(texts, size=arguments.vocabulary_size))


def _check_output_free(arguments: argparse.Namespace) -> None:
    """Refuses to write over the public words."""
    for path in (arguments.vocabulary, arguments.public_texts):
        if path is not None and path.exists() and arguments.out.exists() and path.samefile(arguments.out):
            raise ConfigurationError(f"--out: expected another file than that of the public words, found {path}.")


def _public_lines(path: Path, records: Path | None) -> list[str]:
    """Returns the lines of a public file, which is not that of the records."""
    if records is not None and path.exists() and records.exists() and path.samefile(records):
        raise ConfigurationError(f"--vocabulary, --public-texts: expected a PUBLIC file, found the records, {path}.")
    try:
        lines = read_plain(path, MAX_TEXT).decode("utf-8-sig").splitlines()
    except UnicodeDecodeError:
        lines = None
    if lines is None:
        raise ConfigurationError(f"{path}: expected lines of text in UTF-8, found other bytes.")
    return [line.strip() for line in lines if line.strip()]


def _plan_documents(arguments: argparse.Namespace, settings: Settings) -> DocumentsPlan:
    """Returns the plan of a run with a model whose vocabulary holds all candidates; asks no model."""
    from langchain_dpicl.documents.plan import plan_documents
    from langchain_dpicl.generation.decoding_loop import TextDecoder
    from langchain_dpicl.generation.token_mechanisms import TokenRule
    from langchain_dpicl.planning.expected_utility import RowDesign

    topics, rows, decoding = _topics(arguments, settings), settings.get("rows"), settings.get("decoding") or Decoding()
    noise = noise_of(settings.get("noise"), Noise, LogitNoise)
    TextDecoder.of(noise, decoding)  # refuses a temperature that would have no effect
    if decoding.candidates == "all":
        raise fail("decoding.candidates", "a number: a plan asks no model for its vocabulary", decoding.candidates)
    public_size = sum(settings.data.sizes().values())
    size = topics.topic_size or max(1, public_size // topics.num_topics)
    return plan_documents(
        topics.vocabulary or (),
        public_size=public_size,
        epsilon=settings.share_epsilon,
        delta=settings.share_delta,
        adjacency=settings.adjacency,
        text_key=settings.data.text_key,
        num_topics=topics.num_topics,
        keywords_per_unit=topics.keywords_per_unit,
        topic_share=topics.epsilon_share,
        topic_noise=topics.noise,
        least_units=topics.min_units,
        topic_size=topics.topic_size,
        noise_multiplier=noise.multiplier,
        mechanism=TokenRule.of(noise, decoding.temperature),
        design=RowDesign.of(rows, smallest_size=size) or RowDesign.choose(smallest_size=size),
        redraw_every=None if rows is None else rows.redraw_every,
        candidates=decoding.candidates + 1,
        **settings.only("documents_per_topic", "max_tokens"),
    )


def _documents_text(plan: DocumentsPlan) -> str:
    rule, shown, cost = plan.topics.rule, plan.generation.to_dict(), plan.cost()
    lines = [f"epsilon  {plan.epsilon:.4f} at delta {plan.delta:g}, adjacency {plan.topics.adjacency}: both steps"]
    lines.append(
        f"topics   at most {plan.num_topics} of {len(rule.declared or ()):,} public keywords, {rule.max_values} of "
        f"each unit; {plan.topics.mechanism.name} noise, deviation {plan.deviation:.1f} units"
    )
    lines.append(
        f"         from a noisy count of {plan.least_units} on: a keyword of {plan.found_from(0.95)} units with a "
        "chance of 95 %"
    )
    lines.append(
        f"texts    {plan.documents_per_topic} of each topic; {shown['mechanism']}, noise multiplier "
        f"{plan.generation.noise_multiplier:.3f}, {shown['num_slots']} rows per token"
    )
    lines.append(f"cost     up to {cost.private_calls:,} private calls, {cost.public_calls:,} public ones")
    return "\n".join(lines)


def _topics_text(made: DocumentSynthesizer) -> list[str]:
    if not made.topics:
        return ["no keyword reached the least count: no topic, no text"]
    width = max(5, *(len(topic) for topic, _ in made.topics))
    return [f"{'topic':<{width}}  noisy count", *(f"{topic:<{width}}  {count:>11,}" for topic, count in made.topics)]


# -- dpicl discover ----------------------------------------------------------------------------------------------------


def add_discover(commands: Any, *, run: Any) -> None:
    """Adds the command."""
    command = _command(
        commands,
        "discover",
        words="how many units there are, of which labels or other values, known or not",
        about="Counts units, labels or values under differential privacy, and finds unknown ones.",
        notes=_DISCOVERY_NOTES,
        run=run,
    )
    command.add_argument("--out", type=Path, help="JSON file for counts and report (without it: --dry-run)")
    command.add_argument("--by", metavar="FIELD", help="field whose values are counted; without it units are")
    command.add_argument("--value", action="append", help="a value that may occur, once per value; none: find them")
    command.add_argument("--max-values", type=int, default=1, help="values that a unit may count for (default 1)")
    command.add_argument("--keep-case", action="store_true", help="upper and lower case make different values")
    add_settings(command)
    add_flags(command, ("text_key", "public_size", "unit_key", "dataset_id", "epsilon", "delta", "ledger", "component"))
    command.add_argument("--dry-run", action="store_true", help="show noise and threshold; read and spend nothing")


def run_discover(arguments: argparse.Namespace, *, say: Say) -> int:
    """Counts and prints what was released; with --dry-run, or without --out, prints the plan alone. Returns 0."""
    from langchain_dpicl.discovery import plan_discovery

    settings = read_settings(arguments, methods=("counts",))
    if others := sorted(set(settings.component) - {"epsilon", "noise", "component"}):
        raise fail("settings", "--by, --value, --max-values and --keep-case for what is counted", others)
    if arguments.by is None and arguments.value is not None:
        raise fail("--by", "the field that holds the values", None)
    counted = {"values": arguments.value, "max_values": arguments.max_values, "fold_case": not arguments.keep_case}
    noise = noise_of(settings.get("noise"), Noise)
    if arguments.dry_run or arguments.out is None:
        plan = plan_discovery(
            arguments.by,
            **counted,
            epsilon=settings.share_epsilon,
            delta=settings.share_delta,
            adjacency=settings.adjacency,
            noise_multiplier=noise.multiplier,
            partition=settings.data.dataset_id or "private-examples",
        )
        say(_discovery_text(plan))
        return 0
    check_out(arguments.out, _records_of(settings))
    run, budget = _counting(arguments, settings, counted, noise)
    released = run.run()
    save_or_print(released, arguments.out, say=say)
    if not arguments.quiet:
        say("\n".join((_discovery_text(run.plan), "", *_counts_text(released), "", str(budget.report()))))
    return 0


def _counting(
    arguments: argparse.Namespace, settings: Settings, counted: dict[str, Any], noise: Noise
) -> tuple[UnitCounter | ValueDiscovery, PrivacyBudgetCallbackHandler]:
    from langchain_dpicl.discovery import UnitCounter, ValueDiscovery

    budget, size = budget_of(settings), settings.data.public_size
    data = settings.data.replace(
        public_size=max(1, int(0.1 / budget.delta)) if size is None else size,
        text_key=arguments.by or settings.data.text_key,
    )
    private = private_examples(dataclasses.replace(settings, data=data))
    if noise.delta is None:
        noise = noise.replace(delta=settings.budget.delta)
    paid = {**_shared(arguments, settings), **settings.only("component"), "budget": budget, "noise": noise}
    if arguments.by is not None and arguments.value is None:
        del counted["values"]
        return ValueDiscovery.from_private_examples(private, field=arguments.by, **counted, **paid), budget
    return UnitCounter.from_private_examples(private, field=arguments.by, **counted, **paid), budget


def _discovery_text(plan: DiscoveryPlan) -> str:
    what = "units" if plan.release.rule.name is None else f"values of {plan.release.rule.name!r}"
    lines = [
        f"epsilon  {plan.epsilon:.4f} at delta {plan.delta:g}, adjacency {plan.release.adjacency}, counts of {what}",
        f"noise    discrete Laplace, scale {float(plan.release.scale):.3f}, deviation {plan.deviation:.2f} units",
    ]
    if plan.threshold is not None:
        lines.append(
            f"found    from a noisy count of {plan.threshold} on: a value of {plan.found_from(0.95)} units with a "
            f"chance of 95 %, one of a single unit with at most {plan.threshold_delta:.2g}"
        )
    return "\n".join(lines)


def _counts_text(released: ReleasedCounts) -> list[str]:
    if not released.counts:
        return ["nothing reached the threshold"]
    from langchain_dpicl.privacy.extensions.count_histograms import noise_margin

    margin = noise_margin(released.release.scale, 0.95)  # not `public_size`, which is never below 1
    width = max(5, *map(len, released.counts))
    rows = (f"{value:<{width}}  {count:>11,}  {max(0, count - margin):>8,}" for value, count in released.counts.items())
    return [f"{'value':<{width}}  noisy count  at least (95 % each)", *rows]
