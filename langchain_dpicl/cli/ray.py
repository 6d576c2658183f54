"""Options, workers and ledger of `dpicl generate --ray`.

What workers are sent is public: file names, names of models, an address without a password. Each reads the records.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_dpicl.cli.inputs import check_absent, load_model, new_budget, private_examples
from langchain_dpicl.cli.plan import declared_sizes, sizes_of
from langchain_dpicl.exceptions import ConfigurationError

if TYPE_CHECKING:
    from langchain_dpicl.budget.handler import PrivacyBudgetCallbackHandler
    from langchain_dpicl.distributed.executor import Workplace
    from langchain_dpicl.privacy.data.private_examples import PrivateExamples

LOCAL = "local"
_EVOLUTION = "private_evolution"
_UNNAMED = "private-examples"  # where no --dataset-id is given
_RAY = ("workers", "gpus_per_worker", "ledger", "component")
# What a worker needs to read the same records and load the same model.
_WORKER_ARGUMENTS = (
    "file",
    "text_key",
    "label_key",
    "label",
    "public_size",
    "unit_key",
    "dataset_id",
    "model",
    "device",
    "dtype",
    "max_prompt_tokens",
    "chat",
    "mechanism",
    "max_tokens",
    "ledger",
    "memo_size",
)


def add_ray(command: argparse.ArgumentParser) -> None:
    """Adds the options of a run on many machines."""
    group = command.add_argument_group("on a Ray cluster (needs langchain-dpicl[ray])")
    group.add_argument(
        "--ray",
        nargs="?",
        const=LOCAL,
        metavar="ADDRESS",
        help="run workers on the cluster at ADDRESS (host:port or auto); without one, at RAY_ADDRESS if that is set, "
        "otherwise on a cluster of its own on this machine",
    )
    group.add_argument("--workers", type=int, help="workers at a time (default 2)")
    group.add_argument("--gpus-per-worker", type=float, help="GPUs of a worker (default 0)")
    group.add_argument(
        "--ledger",
        help="existing ledger that all workers reach: a postgresql:// address without a password (take PGPASSWORD), or "
        "a SQLite file where they are on this machine",
    )
    group.add_argument(
        "--component",
        help="name in the ledger (default: generate-DATASET_ID, where that is given); the same command goes on with it",
    )


def check_ray(arguments: argparse.Namespace) -> None:
    """Refuses options of a cluster without --ray, and --ray without a shared ledger."""
    if arguments.ray is None:
        check_absent(arguments, _RAY, where="without --ray")
        return
    if arguments.ledger is None and arguments.mechanism != _EVOLUTION:
        advice = "Make one: dpicl ledger create ADDRESS --epsilon E --delta D."
        raise ConfigurationError(f"--ledger: expected the ledger that the workers share with --ray. {advice}")
    if arguments.ledger is not None and arguments.component is None and arguments.dataset_id == _UNNAMED:
        advice = "What stands in the ledger under a name is found again, whatever file is read."
        raise ConfigurationError(
            f"--dataset-id: expected a name of these records, or --component, with --ray. {advice}"
        )
    if arguments.workers is not None and arguments.workers < 1:
        raise ConfigurationError(f"--workers: expected an integer >= 1, found {arguments.workers}.")


def examples_from(arguments: argparse.Namespace) -> PrivateExamples:
    """Reads the records."""
    sizes = declared_sizes(sizes_of(arguments.public_size))
    return private_examples(arguments, public_size=sizes, label_key=arguments.label_key, labels=arguments.label)


def budget_from(arguments: argparse.Namespace) -> PrivacyBudgetCallbackHandler:
    """Returns a new budget in memory, or opens the ledger that was named."""
    from langchain_dpicl.budget.handler import PrivacyBudgetCallbackHandler

    if arguments.ledger is None:
        return new_budget(arguments)
    budget = PrivacyBudgetCallbackHandler.open(arguments.ledger)
    if budget.adjacency != arguments.adjacency:
        msg = f"--adjacency: expected {budget.adjacency}, as of the ledger, found {arguments.adjacency}."
        raise ConfigurationError(msg)
    return budget


def driver_model(arguments: argparse.Namespace) -> Any:
    """Returns the model; with workers the driver only plans, so it needs no GPU."""
    if arguments.ray is None or not Path(arguments.model).is_dir():
        return load_model(arguments)
    return load_model(argparse.Namespace(**{**vars(arguments), "device": "cpu"}))


def spread_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the executor, component name and delta of a run with --ray; nothing without."""
    if arguments.ray is None:
        return {}
    from langchain_dpicl.distributed.ray import RayExecutor

    values = {**vars(arguments), "file": str(arguments.file.resolve())}
    values["memo_size"] = max(4096, len(arguments.label or ()) * arguments.shots_per_label, arguments.shots_per_label)
    if arguments.ledger is not None and "://" not in arguments.ledger:
        values["ledger"] = str(Path(arguments.ledger).resolve())
    executor = RayExecutor(
        "langchain_dpicl.cli.ray:make_workplace",
        options={name: values[name] for name in _WORKER_ARGUMENTS},
        address=None if arguments.ray == LOCAL else arguments.ray,
        num_workers=2 if arguments.workers is None else arguments.workers,
        num_gpus=arguments.gpus_per_worker or 0.0,
    )
    if arguments.ledger is None:
        return {"executor": executor}
    _memo(values["ledger"], values["memo_size"], may_make=True)
    name = arguments.component or f"generate-{arguments.dataset_id}"
    return {"executor": executor, "component": name, "delta": arguments.delta}


def make_workplace(**told: Any) -> Workplace:
    """Makes the worker's context from the options that `spread_options` sent it."""
    from langchain_dpicl.budget.handler import PrivacyBudgetCallbackHandler
    from langchain_dpicl.distributed.executor import Workplace

    arguments = argparse.Namespace(**told)
    model = load_model(arguments)
    if arguments.mechanism == _EVOLUTION:  # its workers see no record
        from langchain_dpicl.cli.synthesize import writer_of

        return Workplace(writer_of(arguments, model))
    budget = PrivacyBudgetCallbackHandler.open(arguments.ledger)
    memo = _memo(arguments.ledger, arguments.memo_size)
    return Workplace(model, private=examples_from(arguments), budget=budget, memo=memo)


def _memo(ledger: str, size: int, *, may_make: bool = False) -> Any:
    """Opens the memo beside the ledger: in its database, or in a file beside its file."""
    if "://" in ledger:
        from langchain_dpicl.stores.postgres_memo import PostgresMemo

        return (PostgresMemo.new if may_make else PostgresMemo.open)(ledger, size=size)
    from langchain_dpicl.stores import SQLiteMemo

    return SQLiteMemo(f"{ledger}.memo", size=size)
