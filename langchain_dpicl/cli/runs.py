"""Runs `dpicl generate`, `evolve`, `label`, `train` and `documents`, which release item by item and can go on."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_dpicl.cli.inputs import (
    Model,
    Settings,
    check_apart,
    check_model,
    check_writable,
    holds_something,
    load_embeddings,
    load_model,
    private_examples,
    read_records,
    read_settings,
    settings_of,
)
from langchain_dpicl.cli.parser import BUDGET_REFUSED, DONE
from langchain_dpicl.cli.plan import documents_plan, parts_of, plan_lines, topic_size
from langchain_dpicl.cli.spending import (
    BUDGET_NOTES,
    RELEASED,
    SEES_RECORDS,
    Call,
    Say,
    add_shared,
    budget_of,
    check_kept,
    check_public,
    check_target,
    dry_run,
    json_line,
    needed_out,
    new_command,
    on_ledger,
    one_line,
    other_files,
    public_items,
    public_lines,
    records_of,
    rehearsed,
    release,
    share_of,
    voted_on,
    warn_of_embedded,
)
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.options import Topics
from langchain_dpicl.privacy._validate import check_int, fail

if TYPE_CHECKING:
    from langchain_dpicl.backends.tuning.tasks import PromptTask
    from langchain_dpicl.distributed import Workplace
    from langchain_dpicl.documents import DocumentsPlan, DocumentSynthesizer
    from langchain_dpicl.pate.labeler import PromptPATELabeler
    from langchain_dpicl.released.labelled_pool import PoolEntry
    from langchain_dpicl.soft_prompts.trainer import TrainingStep


_GENERATE_NOTES = f"""\
{SEES_RECORDS} `dpicl evolve` is for records that no model may see.
{RELEASED}{BUDGET_NOTES}
With --ray, workers spend from the --ledger that they share, and the same command continues where it stopped.
"""
_EVOLVE_NOTES = f"""\
The model writes from public and released text alone. The records vote for the nearest of its texts by embeddings, which
do see them: local ones, or those that --embeddings names. {RELEASED}{BUDGET_NOTES}
With --ray, workers write the texts, and need no ledger.
"""
_LABEL_NOTES = f"""\
{SEES_RECORDS} The inputs are public: nothing hides them.
An input whose votes do not suffice is rejected, which costs as much as a label. Inputs for which the share does not
pay wait in the file that --out names; the exit code is 3 then. {RELEASED}{BUDGET_NOTES}"""
_TRAIN_NOTES = f"""\
{SEES_RECORDS} It runs on this machine, and its own weights are not changed. --set training.expected_batch_size=N and
training.epochs=X (or training.steps=N) say how it is trained: choose them by `dpicl plan --method training`, not by
looking at the records. Needs langchain-dpicl[hf].
{RELEASED}{BUDGET_NOTES}"""


# -- dpicl generate and dpicl evolve -----------------------------------------------------------------------------------


def add_generate(commands: Any, *, run: Any) -> None:
    """Adds the command."""
    command = new_command(
        commands,
        "generate",
        words="demonstrations for prompts, and a report",
        about="Turns private records into differentially private demonstrations.",
        notes=_GENERATE_NOTES,
        run=run,
    )
    command.add_argument("--out", type=Path, metavar="FILE", help="JSON for demonstrations and report")
    add_shared(command, "model", "instruction", "max_tokens", "checkpoint")
    add_workers(command)


def add_evolve(commands: Any, *, run: Any) -> None:
    """Adds the command."""
    command = new_command(
        commands,
        "evolve",
        words="demonstrations by a model that sees no record",
        about="Evolves demonstrations: a model writes them from public text, and the records vote for the nearest.",
        notes=_EVOLVE_NOTES,
        run=run,
    )
    command.add_argument("--out", type=Path, metavar="FILE", help="JSON for demonstrations and report")
    add_shared(command, "model", "embeddings", "instruction", "max_tokens", "checkpoint")
    add_workers(command)


def run_generate(arguments: argparse.Namespace, *, say: Say, complain: Say) -> int:
    """Releases demonstrations and saves them; returns the exit code."""
    settings = read_settings(arguments, methods=("generation", "evolution"))
    return _demonstrate(Call(arguments, settings, say, complain))


def run_evolve(arguments: argparse.Namespace, *, say: Say, complain: Say) -> int:
    """Evolves demonstrations and saves them; returns the exit code."""
    return _demonstrate(Call(arguments, read_settings(arguments, methods=("evolution",)), say, complain))


def _demonstrate(call: Call) -> int:
    arguments, settings = call.arguments, call.settings
    check_workers(arguments, settings)
    check_int("max_tokens", settings.get("max_tokens", 1), low=1)
    if arguments.dry_run:
        return dry_run(call)
    check_target(arguments, settings)
    warn_of_embedded(settings)
    budget = budget_of(settings)
    model = driver_model(arguments, settings)
    made = settings.door(
        private_examples(settings),
        llm=model,
        budget=budget,
        **_embeddings(settings),
        **share_of(settings),
        **executor_of(arguments, settings),
    )
    has_workers = arguments.ray is not None and settings.method != "evolution"  # workers of an evolution keep nothing
    return release(made, call, shown=json_line, budget=budget, has_workers=has_workers)


def _embeddings(settings: Settings) -> dict[str, Any]:
    name = settings.model.embeddings
    if settings.method != "evolution":
        return {}
    return {"embeddings": None if name is None else load_embeddings(name)}


# -- dpicl label -------------------------------------------------------------------------------------------------------


def add_label(commands: Any, *, run: Any) -> None:
    """Adds the command."""
    command = new_command(
        commands,
        "label",
        words="labels for a file of public inputs",
        about="Labels public inputs by the votes of private prompts (PromptPATE), and saves the pool.",
        notes=_LABEL_NOTES,
        run=run,
    )
    command.add_argument("--inputs", type=Path, metavar="FILE", help="PUBLIC inputs: .jsonl, .csv, or one text a line")
    command.add_argument("--out", type=Path, metavar="FILE", help="JSON for the pool and its report")
    add_shared(command, "max_queries", "model", "checkpoint", rare=("rehearsal",))


def run_label(arguments: argparse.Namespace, *, say: Say, complain: Say) -> int:
    """Labels public inputs and saves the pool; returns the exit code."""
    call = Call(arguments, read_settings(arguments, methods=("pate",)), say, complain)
    settings = call.settings
    if arguments.inputs is None:
        raise ConfigurationError("--inputs: expected the file of the public inputs, found none. Name it.")
    inputs = public_items(arguments.inputs, settings.records, "--inputs")
    if arguments.dry_run:
        guess = settings.guess.replace(public_inputs=_num_distinct(inputs, settings))
        return dry_run(dataclasses.replace(call, settings=dataclasses.replace(settings, guess=guess)))
    check_target(arguments, settings)
    chosen, budget = rehearsed(settings), budget_of(settings)
    made: PromptPATELabeler = settings.door(
        private_examples(settings),
        llm=load_model(settings.model),
        public_inputs=inputs,
        budget=budget,
        **chosen,
        **share_of(settings),
    )
    code = release(made, call, shown=_label_line, budget=budget)
    pool = made.result
    if code == DONE and (waiting := len(pool.waiting)):
        saved = "" if holds_something(arguments.out) else f" Nothing is saved in {arguments.out}."
        spent = f"the share of {made.component!r} is spent.{saved}"
        complain(f"label: {waiting} of {len(pool.entries)} inputs wait: {spent}")
        return BUDGET_REFUSED
    return code


def _num_distinct(inputs: Sequence[Any], settings: Settings) -> int:
    """Returns the number of public inputs that a run would charge for: equal ones are charged once."""
    from langchain_dpicl.pate.labeler import InputTemplate

    return len(InputTemplate.of(*voted_on(settings)).waiting(inputs))


def _label_line(entry: PoolEntry) -> str:
    return f"{entry.label or '(rejected)'}\t{one_line(' '.join(entry.fields.values()))}"


# -- dpicl train -------------------------------------------------------------------------------------------------------


def add_train(commands: Any, *, run: Any) -> None:
    """Adds the command."""
    command = new_command(
        commands,
        "train",
        words="a soft prompt of a local model, by DP-SGD",
        about="Trains the numbers of a prompt on private records (PromptDPSGD); the model is a folder on this machine.",
        notes=_TRAIN_NOTES,
        run=run,
    )
    command.add_argument("--validation", type=Path, metavar="FILE", help="PUBLIC records whose loss is shown")
    command.add_argument("--out", type=Path, metavar="FOLDER", help="folder for the prompt, which peft reads too")
    add_shared(command, "model", "checkpoint")


def run_train(arguments: argparse.Namespace, *, say: Say, complain: Say) -> int:
    """Trains a prompt and saves it; returns the exit code."""
    call = Call(arguments, read_settings(arguments, methods=("training",)), say, complain)
    settings = call.settings
    training = settings.get("training")
    if training is None:
        advice = "Give --set training.expected_batch_size=N --set training.epochs=X."
        raise fail("training", "a table with expected_batch_size, and epochs or steps", None, advice)
    if arguments.dry_run:
        return dry_run(call)
    from langchain_dpicl.released.soft_prompt import OURS, PEFT_ARRAYS, PEFT_CONFIG, check_folder

    out, records = needed_out(arguments), records_of(settings)
    if not out.parent.is_dir() or (out.exists() and not (out / OURS).is_file()):
        raise ConfigurationError(f"--out: expected a folder, new or of an earlier run, in one that exists: {out}.")
    check_apart(out, *other_files(arguments, settings))
    check_kept(out / OURS, arguments, settings)
    check_writable(check_folder(out, {OURS, PEFT_CONFIG, PEFT_ARRAYS}))
    if arguments.validation is not None:
        check_public(arguments.validation, records, "--validation")
        training = training.replace(validation=read_records(arguments.validation))
    given: dict[str, Any] = {"llm": _trainable(settings), "training": training}
    if (task := settings.get("task")) is not None:
        given["task"] = _prompt_task(task)
    budget = budget_of(settings)
    made = settings.door(private_examples(settings), budget=budget, **given, **share_of(settings))
    return release(made, call, shown=_step_line, budget=budget)


def _trainable(settings: Settings) -> Any:
    """Returns the local model that is trained: of a folder, or an engine of the caller's own."""
    from langchain_dpicl.options import TrainableModel

    model = settings.model
    if model.name == "embedded":
        advice = "The embedded one has nothing to train."
        raise fail("--model", "the folder of a local model, whose prompt is trained", model.name, advice)
    if not Path(model.name).is_dir():
        return load_model(model)
    if others := sorted({"max_prompt_tokens", "chat"} & set(model.to_dict())):
        raise fail("model", "name, device and dtype of a model that is trained", others, "See task.max_input_tokens.")
    if model.private_process:
        raise fail("model.private_process", "false: gradients are computed in this process", True)
    return TrainableModel(Path(model.name), device=model.device, dtype=model.dtype)


def _prompt_task(table: Any) -> PromptTask:
    """Returns the task that the table [task] of a training describes."""
    from langchain_dpicl.backends.tuning.tasks import PromptTask

    known = [each.name for each in dataclasses.fields(PromptTask)]
    if not isinstance(table, dict) or "kind" not in table or not set(table) <= set(known):
        found = sorted(table) if isinstance(table, dict) else table
        raise fail("task", f"a table with kind, and further keys among {known}", found)
    return PromptTask(**table)


def _step_line(step: TrainingStep) -> str:
    if step.validation_loss is None:
        return ""
    return f"step {step.step:,} of {step.steps:,}: validation loss {step.validation_loss:.4f}"


# What workers are sent is public: file names, names of models, an address without a password. Each reads the records.
_LOCAL = "local"


def add_workers(command: Any) -> None:
    """Adds the options of a cluster, which are rarely used."""
    command.rare.add_argument(
        "--ray",
        nargs="?",
        const=_LOCAL,
        metavar="ADDRESS",
        help="run workers on the Ray cluster at ADDRESS (host:port or auto); without one, at RAY_ADDRESS if that is "
        "set, otherwise on a cluster of its own on this machine (needs langchain-dpicl[ray])",
    )
    command.rare.add_argument("--workers", type=int, help="workers at a time (default 2)")
    command.rare.add_argument("--gpus-per-worker", type=float, help="GPUs of a worker (default 0)")


def check_workers(arguments: argparse.Namespace, settings: Settings) -> None:
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


def driver_model(arguments: argparse.Namespace, settings: Settings) -> Any:
    """Returns the model; with workers the driver only plans, so it needs no GPU."""
    model = settings.model
    if arguments.ray is not None and Path(model.name).is_dir():
        model = model.replace(device="cpu")
    return _writer(settings, model)


def _writer(settings: Settings, model: Model) -> Any:
    """Returns the model of a component; an evolution's writes at temperature 1, or all candidates would be alike."""
    from langchain_dpicl.backends.base import NextTokenBackend
    from langchain_dpicl.serving import LocalLLM

    loaded = load_model(model)
    if settings.method == "evolution" and isinstance(loaded, NextTokenBackend) and hasattr(loaded, "generate"):
        return LocalLLM(backend=loaded, temperature=1.0, max_tokens=settings.get("max_tokens", 60), stop=["\n"])
    return loaded


def executor_of(arguments: argparse.Namespace, settings: Settings) -> dict[str, Any]:
    """Returns the workers that were asked for, as the component takes them."""
    if arguments.ray is None:
        return {}
    from langchain_dpicl.distributed import RayExecutor

    told = settings.to_dict()
    told["data"]["file"] = str(records_of(settings).resolve())
    ledger = settings.budget.ledger
    for name, place in (("ledger", ledger), ("anchor", settings.budget.anchor)):
        if place is not None and "://" not in place:
            told["budget"][name] = str(Path(place).resolve())
    size = max(4096, len(settings.data.labels or ()) * settings.get("shots_per_label", 1))
    if ledger is not None:
        _memo(told["budget"]["ledger"], size, may_make=True)
    # As lines of text: fields of a grammar may be called as keys are, which options may not.
    decoding = json.dumps(told.pop("decoding", None), indent=0).splitlines()
    workers = RayExecutor(
        "langchain_dpicl.cli.runs:make_workplace",
        options={"settings": told, "decoding": decoding, "memo_size": size},
        address=None if arguments.ray == _LOCAL else arguments.ray,
        num_workers=2 if arguments.workers is None else arguments.workers,
        num_gpus=arguments.gpus_per_worker or 0.0,
    )
    return {"executor": workers}


def make_workplace(*, settings: dict[str, Any], decoding: list[str], memo_size: int) -> Workplace:
    """Makes the worker's context from the settings that the driver sent it."""
    from langchain_dpicl.distributed import Workplace

    table = json.loads("\n".join(decoding))
    told = settings_of(settings if table is None else {**settings, "decoding": table})
    model = _writer(told, told.model)
    if told.method == "evolution":  # its workers see no record
        return Workplace(model)
    memo = _memo(str(told.budget.ledger), memo_size)
    return Workplace(model, private=private_examples(told), budget=budget_of(told), memo=memo)


def _memo(ledger: str, size: int, *, may_make: bool = False) -> Any:
    """Opens the memo beside the ledger: in its database, or in a file beside its file."""
    if "://" in ledger:
        from langchain_dpicl.stores.postgres import PostgresMemo

        return (PostgresMemo.new if may_make else PostgresMemo.open)(ledger, size=size)
    from langchain_dpicl.stores import SQLiteMemo

    return SQLiteMemo(f"{ledger}.memo", size=size)


_WORDS = "--vocabulary, --public-texts"
_NOTES = f"""\
{SEES_RECORDS} With --documents-per-topic 0 it releases the words
that many units of a topic write, and asks no model; with N it releases N texts of each topic; with --set topics.words=8
both. Topics are words that
many units write, or keywords of a public vocabulary: --vocabulary names a file of keywords, one a line; --public-texts
one of public texts, one a line, whose most frequent words are taken; --vocabulary-size N alone takes words of the
embedded model. Never name a file of the records. Words of many people are released unchanged, names too: read them.
Records are declared without labels; if their ledger holds them with labels, give another --dataset-id. Both add up.

With --dry-run, or without --out, the plan is printed; nothing is read and nothing is spent. {RELEASED}{BUDGET_NOTES}"""


def add_documents(commands: Any, *, run: Any) -> None:
    """Adds the command."""
    command = new_command(
        commands,
        "documents",
        words="synthetic documents for any retriever",
        about="Turns private documents into synthetic ones once, with differential privacy.",
        notes=_NOTES,
        run=run,
    )
    command.add_argument("--out", type=Path, metavar="FILE", help="JSON for documents and report; none: --dry-run")
    words = command.add_mutually_exclusive_group()
    words.add_argument("--vocabulary", type=Path, metavar="FILE", help="public keywords, one a line")
    words.add_argument("--public-texts", type=Path, metavar="FILE", help="public texts, one a line, to take words from")
    command.rare.add_argument(
        "--vocabulary-size",
        type=int,
        metavar="N",
        help="words of --public-texts (1000), or of the embedded model's public texts",
    )
    command.rare.add_argument(
        "--deny", type=Path, metavar="FILE", help="PUBLIC words that must not leave as topics or words, one a line"
    )
    add_shared(command, "documents_per_topic", "model", "checkpoint", data=("public_size",))


def run_documents(arguments: argparse.Namespace, *, say: Say, complain: Say) -> int:
    """Releases documents, or prints the plan of a dry run; returns the exit code."""
    call = Call(arguments, read_settings(arguments, methods=("documents",)), say, complain)
    settings = call.settings
    if arguments.dry_run or arguments.out is None:
        if settings.get("documents_per_topic"):
            check_model(settings.model)
        own = on_ledger(settings)
        plan = documents_plan(own, topics=_topics(arguments, own), deny=_denied(arguments, own))
        say(json.dumps(plan.to_dict(), indent=2) if arguments.json else _text_of(plan, own))
        return DONE
    check_target(arguments, settings)
    topics = _topics(arguments, settings)
    if settings.get("documents_per_topic"):
        warn_of_embedded(settings)
    budget = budget_of(settings)
    made: DocumentSynthesizer = settings.door(
        private_examples(settings),
        **share_of(settings),
        **({"llm": load_model(settings.model)} if settings.get("documents_per_topic") else {}),
        budget=budget,
        topics=topics,
        deny=_denied(arguments, settings),
    )
    if not call.is_quiet:
        say(_text_of(made.plan, settings))
    shown = "{0.metadata[topic]}: {0.page_content}".format
    code = release(made, call, shown=shown, budget=budget)
    if not call.is_quiet:
        say("\n".join(_topics_text(made)))
    return code


def _topics(arguments: argparse.Namespace, settings: Settings) -> Any:
    """Returns the option with the public vocabulary that was named."""
    from langchain_dpicl.discovery import public_vocabulary

    topics = settings.get("topics") or Topics()
    if arguments.vocabulary is None and arguments.public_texts is None and arguments.vocabulary_size is None:
        return topics
    size = 1_000 if arguments.vocabulary_size is None else arguments.vocabulary_size
    if arguments.vocabulary is not None:
        if arguments.vocabulary_size is not None:
            expected = "none beside --vocabulary, all of whose lines are taken"
            raise fail("--vocabulary-size", expected, arguments.vocabulary_size)
        return topics.replace(vocabulary=tuple(public_lines(arguments.vocabulary, settings.records, _WORDS)))
    texts = None if arguments.public_texts is None else public_lines(arguments.public_texts, settings.records, _WORDS)
    return topics.replace(vocabulary=public_vocabulary(texts, size=size))


def _denied(arguments: argparse.Namespace, settings: Settings) -> tuple[str, ...]:
    """Returns the public words that must not leave: those of the settings, and of a file."""
    named = () if arguments.deny is None else public_lines(arguments.deny, settings.records, "--deny")
    return (*settings.get("deny", ()), *named)


def _text_of(plan: DocumentsPlan, settings: Settings) -> str:
    size = topic_size(settings.data.sizes(), plan.num_topics)
    return "\n".join(plan_lines(plan, parts=parts_of(plan), size=size))


def _topics_text(made: DocumentSynthesizer) -> list[str]:
    if not made.topics:
        return ["no keyword reached the least count: no topic, no text, no word"]
    width = max(5, *(len(topic) for topic, _ in made.topics))
    head = "noisy count" if made.plan.least_units is not None else "noisy weight"
    rows = (f"{topic:<{width}}  {count:>{len(head)},.0f}" for topic, count in made.topics)
    return [f"{'topic':<{width}}  {head}", *rows]
