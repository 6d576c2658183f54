"""Runs `dpicl discover`: counts of units or of values, known or not, under differential privacy."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_dpicl._cli_inputs import add_records, check_out, new_budget, private_examples, save_or_print
from langchain_dpicl._cli_options import add_share
from langchain_dpicl.privacy._validate import check_delta

if TYPE_CHECKING:
    from langchain_dpicl.discovery_planning import DiscoveryPlan
    from langchain_dpicl.released_counts import ReleasedCounts

_NOTES = """\
Without --by it counts units. With --by FIELD it finds the values of a field that enough units hold; with --value, once
per value, it counts those. No model is asked. What is printed and saved is released under the budget.

Counts rest on no declared size. Without --public-size the report shows the largest one that goes with --delta,
0.1/delta, as the declared size of the records, and the rule that delta is at most 1/(10 * public_size) refuses nothing.

Every run starts a new budget, kept in memory. Two runs on the same records, or one and `dpicl generate`, spend twice,
and their epsilons add up; use a Python program with one shared budget where that must be counted.
"""


def add_discover(commands: Any, *, run: Any) -> None:
    """Adds the command."""
    command = commands.add_parser(
        "discover",
        help="how many units there are, of which labels or other values, known or not",
        description="Counts units, labels or values under differential privacy, and finds unknown ones.",
        epilog=_NOTES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_records(command, text="field that every record has, without --by")
    command.add_argument("--out", type=Path, help="JSON file for counts and report (without it: --dry-run)")
    command.add_argument("--by", metavar="FIELD", help="field whose values are counted; without it units are")
    command.add_argument("--value", action="append", help="a value that may occur, once per value; none: find them")
    add_share(command, epsilon="of the one release", delta="most of it is for the threshold of unknown values")
    command.add_argument("--records-per-unit", type=int, default=1, help="records looked at of each unit (default 1)")
    command.add_argument("--max-values", type=int, default=1, help="values that a unit may stand for (default 1)")
    command.add_argument("--keep-case", action="store_true", help="upper and lower case make different values")
    command.add_argument(
        "--public-size",
        type=int,
        help="a guess of the number of units, which delta is held against (default: 0.1/delta)",
    )
    command.add_argument("--dry-run", action="store_true", help="show noise and threshold; read and spend nothing")
    command.set_defaults(run=run)


def discovered(arguments: argparse.Namespace, *, say: Callable[[str], object]) -> int:
    """Counts and prints what was released; with --dry-run, or without --out, prints the plan alone. Returns 0."""
    from langchain_dpicl.discovery_planning import plan_discovery

    counted = {
        "values": arguments.value,
        "max_values": arguments.max_values,
        "fold_case": not arguments.keep_case,
    }
    plan = plan_discovery(
        arguments.by,
        **counted,
        epsilon=arguments.epsilon,
        delta=arguments.delta,
        adjacency=arguments.adjacency,
        partition=arguments.dataset_id,
    )
    if arguments.dry_run or arguments.out is None:
        say(_plan_text(plan))
        return 0
    check_out(arguments.out, arguments.file)
    released, budget = _released(arguments, counted)
    save_or_print(released, arguments.out, say=say)
    if not arguments.quiet:
        say("\n".join((_plan_text(plan), "", *_counts_text(released), "", str(budget.report()))))
    return 0


def _released(arguments: argparse.Namespace, counted: dict[str, Any]) -> tuple[ReleasedCounts, Any]:
    from langchain_dpicl.discovery import UnitCounter, ValueDiscovery

    # Counts rest on no declared size: without a guess it is the largest that goes with delta.
    guess = max(1, int(0.1 / check_delta(arguments.delta) * (1 - 1e-9)))
    private = private_examples(
        arguments,
        public_size=guess if arguments.public_size is None else arguments.public_size,
        text_key=arguments.by or arguments.text_key,
        records_per_unit=arguments.records_per_unit,
    )
    budget = new_budget(arguments)
    paid: dict[str, Any] = {"budget": budget, "epsilon": arguments.epsilon, "delta": arguments.delta}
    if arguments.by is not None and arguments.value is None:
        del counted["values"]
        return ValueDiscovery.from_private_examples(private, arguments.by, **counted, **paid).run(), budget
    return UnitCounter.from_private_examples(private, field=arguments.by, **counted, **paid).run(), budget


def _plan_text(plan: DiscoveryPlan) -> str:
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
    from langchain_dpicl.privacy.count_margins import noise_margin

    margin = noise_margin(released.release.scale, 0.95)  # not `public_size`, which is never below 1
    width = max(len(value) for value in released.counts)
    head = f"{'value':<{max(width, 5)}}  noisy count  at least (95 % each)"
    return [
        head,
        *(
            f"{value:<{max(width, 5)}}  {count:>11,}  {max(0, count - margin):>8,}"
            for value, count in released.counts.items()
        ),
    ]
