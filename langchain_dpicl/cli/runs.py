"""Runs `dpicl generate`, `evolve`, `label` and `train`: runs that release item by item and can be continued."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_dpicl.cli.config import Settings, read_settings
from langchain_dpicl.cli.exit_codes import BUDGET_REFUSED, DONE
from langchain_dpicl.cli.inputs import load_embeddings, load_model, private_examples, read_records
from langchain_dpicl.cli.spending import (
    BUDGET_NOTES,
    RELEASED,
    SEES_RECORDS,
    Call,
    Say,
    add_shared,
    budget_of,
    check_target,
    dry_run,
    json_line,
    needed_out,
    new_command,
    one_line,
    public_items,
    records_of,
    rehearsed,
    release,
    share_of,
    warn_of_embedded,
)
from langchain_dpicl.cli.workers import add_workers, check_workers, driver_model, executor_of
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy._validate import fail

if TYPE_CHECKING:
    from langchain_dpicl.backends.tuning.tasks import PromptTask
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
    return release(made, call, shown=json_line, budget=budget, has_workers=arguments.ray is not None)


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
    settings, records = call.settings, call.settings.data.file
    if arguments.inputs is None:
        raise ConfigurationError("--inputs: expected the file of the public inputs, found none. Name it.")
    inputs = public_items(arguments.inputs, None if records is None else Path(records), "--inputs")
    if arguments.dry_run:
        guess = settings.guess.replace(public_inputs=len(inputs))
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
    if code == DONE and (waiting := len(made.result.waiting)):
        complain(f"label: {waiting} of {len(inputs)} inputs wait: the share of {made.component!r} is spent.")
        return BUDGET_REFUSED
    return code


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
    out, records = needed_out(arguments), records_of(settings)
    if not out.parent.is_dir() or (out.exists() and not (out / "soft_prompt.json").is_file()):
        raise ConfigurationError(f"--out: expected a folder, new or of an earlier run, in one that exists: {out}.")
    if arguments.validation is not None:
        if arguments.validation.exists() and records.exists() and arguments.validation.samefile(records):
            raise ConfigurationError(f"--validation: expected a PUBLIC file, found the records, {records}.")
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
