"""Runs `dpicl discover`, which counts units, labels or values."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_dpicl.cli.config import Settings, read_settings
from langchain_dpicl.cli.exit_codes import DONE
from langchain_dpicl.cli.inputs import private_examples
from langchain_dpicl.cli.ledger import remaining_text
from langchain_dpicl.cli.spending import (
    BUDGET_NOTES,
    RELEASED,
    Say,
    add_shared,
    budget_of,
    check_target,
    new_command,
    on_ledger,
    save_or_print,
    share_of,
)
from langchain_dpicl.options import Noise
from langchain_dpicl.options.rows import noise_of
from langchain_dpicl.privacy._validate import fail

if TYPE_CHECKING:
    from langchain_dpicl.budget.handler import PrivacyBudgetCallbackHandler
    from langchain_dpicl.discovery import DiscoveryPlan, UnitCounter, ValueDiscovery
    from langchain_dpicl.released.counts import ReleasedCounts

_NOTES = f"""\
Without --by it counts units. With --by FIELD it finds the values of a field that enough units hold; with --value, once
per value, it counts those. No model is asked. {RELEASED}Counts rest on no declared size.
Without --public-size the report shows the largest one that goes with --delta, 0.1/delta, as that of the records.

{BUDGET_NOTES}"""


def add_discover(commands: Any, *, run: Any) -> None:
    """Adds the command."""
    command = new_command(
        commands,
        "discover",
        words="counts of units, labels or other values",
        about="Counts units, labels or values under differential privacy, and finds unknown ones.",
        notes=_NOTES,
        run=run,
    )
    command.add_argument("--out", type=Path, metavar="FILE", help="JSON for counts and report; none: --dry-run")
    command.add_argument("--by", metavar="FIELD", help="field whose values are counted; without it units are")
    command.add_argument("--value", action="append", help="a value that may occur, once per value; none: find them")
    command.add_argument("--max-values", type=int, metavar="N", default=1, help="values that a unit counts for (1)")
    command.add_argument("--keep-case", action="store_true", help="upper and lower case make different values")
    add_shared(command, data=("public_size",))


def run_discover(arguments: argparse.Namespace, *, say: Say) -> int:
    """Counts and prints what was released, or the plan of a dry run; returns the exit code."""
    from langchain_dpicl.discovery import plan_discovery

    settings = read_settings(arguments, methods=("counts",))
    if others := sorted(set(settings.component) - {"epsilon", "noise", "component"}):
        raise fail("settings", "--by, --value, --max-values and --keep-case for what is counted", others)
    if arguments.by is None and arguments.value is not None:
        raise fail("--by", "the field that holds the values", None)
    counted = {"values": arguments.value, "max_values": arguments.max_values, "fold_case": not arguments.keep_case}
    noise = noise_of(settings.get("noise"), Noise)
    if arguments.dry_run or arguments.out is None:
        settings = on_ledger(settings)
        plan = plan_discovery(
            arguments.by,
            **counted,
            epsilon=settings.share_epsilon,
            delta=settings.share_delta,
            adjacency=settings.adjacency,
            noise_multiplier=noise.multiplier,
            partition=settings.data.dataset_id or "private-examples",
        )
        say(json.dumps(plan.to_dict(), indent=2) if arguments.json else _discovery_text(plan))
        return DONE
    check_target(arguments, settings)
    run, budget = _counting(arguments, settings, counted, noise)
    released = run.run()
    save_or_print(released, arguments.out, say=say)
    if arguments.json:
        say(released.to_json())
    elif not arguments.quiet:
        say(
            "\n".join(
                (
                    _discovery_text(run.plan),
                    "",
                    *_counts_text(released),
                    "",
                    str(budget.report()),
                    "",
                    *remaining_text(budget.budget),
                )
            )
        )
    return DONE


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
    paid = {**settings.only("component"), **share_of(settings), "budget": budget, "noise": noise}
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
