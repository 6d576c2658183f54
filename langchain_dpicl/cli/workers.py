"""Workers of `dpicl generate` and `dpicl evolve` on a Ray cluster."""

# What workers are sent is public: file names, names of models, an address without a password. Each reads the records.

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_dpicl.cli.config import Model, Settings, settings_of
from langchain_dpicl.cli.inputs import load_model, private_examples
from langchain_dpicl.cli.spending import budget_of, records_of
from langchain_dpicl.exceptions import ConfigurationError

if TYPE_CHECKING:
    from langchain_dpicl.distributed.executor import Workplace

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
    from langchain_dpicl.serving.models import LocalLLM

    loaded = load_model(model)
    if settings.method == "evolution" and isinstance(loaded, NextTokenBackend) and hasattr(loaded, "generate"):
        return LocalLLM(backend=loaded, temperature=1.0, max_tokens=settings.get("max_tokens", 60), stop=["\n"])
    return loaded


def executor_of(arguments: argparse.Namespace, settings: Settings) -> dict[str, Any]:
    """Returns the workers that were asked for, as the component takes them."""
    if arguments.ray is None:
        return {}
    from langchain_dpicl.distributed.ray import RayExecutor

    told = settings.to_dict()
    told["data"]["file"] = str(records_of(settings).resolve())
    ledger = settings.budget.ledger
    if ledger is not None and "://" not in ledger:
        told["budget"]["ledger"] = str(Path(ledger).resolve())
    size = max(4096, len(settings.data.labels or ()) * settings.get("shots_per_label", 1))
    if ledger is not None:
        _memo(told["budget"]["ledger"], size, may_make=True)
    workers = RayExecutor(
        "langchain_dpicl.cli.workers:make_workplace",
        options={"settings": told, "memo_size": size},
        address=None if arguments.ray == _LOCAL else arguments.ray,
        num_workers=2 if arguments.workers is None else arguments.workers,
        num_gpus=arguments.gpus_per_worker or 0.0,
    )
    return {"executor": workers}


def make_workplace(*, settings: dict[str, Any], memo_size: int) -> Workplace:
    """Makes the worker's context from the settings that the driver sent it."""
    from langchain_dpicl.distributed.executor import Workplace

    told = settings_of(settings)
    model = _writer(told, told.model)
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
