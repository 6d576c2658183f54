"""Runs `dpicl discover`, which counts units, labels or values, and finds words."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping
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
    public_lines,
    records_of,
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
    from langchain_dpicl.released.words import ReleasedWords
    from langchain_dpicl.words import WordDiscovery, WordsPlan

_NOTES = f"""\
Without --by it counts units. With --by FIELD it finds the values of a field that enough units hold; with --value, once
per value, it counts those. With --words it finds words of the texts that many units write; read them before you send
them on, names are released too. No model is asked. {RELEASED}No result depends on a declared size. Without
--public-size the report gives the largest size that --delta allows, 0.1/delta, as the size of the records.

{BUDGET_NOTES}"""


def add_discover(commands: Any, *, run: Any) -> None:
    """Adds the command."""
    command = new_command(
        commands,
        "discover",
        words="counts of units, labels or other values; words of the texts",
        about="Counts units, labels or values under differential privacy, and finds unknown ones, or words.",
        notes=_NOTES,
        run=run,
    )
    command.add_argument(
        "--out", type=Path, metavar="FILE", help="JSON for what is released and its report; none: --dry-run"
    )
    command.add_argument("--by", metavar="FIELD", help="field whose values are counted; without it units are")
    command.add_argument("--value", action="append", help="a value that may occur, once per value; none: find them")
    command.add_argument("--max-values", type=int, metavar="N", help="values that a unit counts for (1), or words (8)")
    command.add_argument("--keep-case", action="store_true", help="upper and lower case make different values")
    command.add_argument("--words", action="store_true", help="find words of the text, for each label by itself")
    command.add_argument("--pairs", action="store_true", help="with --words: pairs of found words that are neighbours")
    command.add_argument("--deny", type=Path, metavar="FILE", help="with --words: PUBLIC words that must not be found")
    add_shared(command)


def run_discover(arguments: argparse.Namespace, *, say: Say) -> int:
    """Releases and prints counts or words, or the plan of a dry run; returns the exit code."""
    settings = read_settings(arguments, methods=("counts",))
    if others := sorted(set(settings.component) - {"epsilon", "noise", "component"}):
        raise fail("settings", "--by, --value, --max-values and --keep-case for what is counted", others)
    if arguments.by is None and arguments.value is not None:
        raise fail("--by", "the field that holds the values", None)
    if arguments.by is not None and arguments.by == settings.data.label_key:
        advice = "Its values are declared: without --by, dpicl discover counts the units of each label."
        raise fail("--by", "a field other than label_key", arguments.by, advice)
    what = _what_is_found(arguments, settings)
    noise = noise_of(settings.get("noise"), Noise)
    if arguments.dry_run or arguments.out is None:
        plan = _dry_plan(arguments, on_ledger(settings), what, noise)
        planned = f"{_discovery_text(plan)}\nspent    nothing: this is a plan; --out FILE without --dry-run releases"
        say(json.dumps(plan.to_dict(), indent=2) if arguments.json else planned)
        return DONE
    check_target(arguments, settings)
    run, budget = _run(arguments, settings, what, noise)
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
                    *_found_text(released),
                    "",
                    str(budget.report()),
                    "",
                    *remaining_text(budget.budget),
                )
            )
        )
    return DONE


def _what_is_found(arguments: argparse.Namespace, settings: Settings) -> dict[str, Any]:
    """Returns what a unit counts for, as constructors take it; refuses options of the other kind of release."""
    if not arguments.words:
        if arguments.pairs or arguments.deny is not None:
            raise fail("--pairs, --deny", "neither without --words", "one of them")
        most = 1 if arguments.max_values is None else arguments.max_values
        return {"values": arguments.value, "max_values": most, "fold_case": not arguments.keep_case}
    if arguments.value is not None or arguments.keep_case:
        raise fail("--value, --keep-case", "neither beside --words", "one of them")
    denied = () if arguments.deny is None else public_lines(arguments.deny, records_of(settings), "--deny")
    most = 8 if arguments.max_values is None else arguments.max_values
    return {"max_values": most, "deny": tuple(denied), "pairs": arguments.pairs}


def _dry_plan(
    arguments: argparse.Namespace, settings: Settings, what: dict[str, Any], noise: Noise
) -> DiscoveryPlan | WordsPlan:
    from langchain_dpicl.discovery import plan_discovery
    from langchain_dpicl.words import plan_words

    terms: dict[str, Any] = {
        "epsilon": settings.share_epsilon,
        "delta": settings.share_delta,
        "adjacency": settings.adjacency,
        "noise_multiplier": noise.multiplier,
        "partition": settings.data.dataset_id or "private-examples",
    }
    if not arguments.words:
        return plan_discovery(arguments.by, **what, **terms)
    data, labels = settings.data, tuple[str, ...]()
    if data.label_key is not None:
        labels = data.labels or (tuple(data.public_size) if isinstance(data.public_size, Mapping) else ())
    return plan_words(arguments.by or data.text_key, labels=labels, **what, **terms)


def _run(
    arguments: argparse.Namespace, settings: Settings, what: dict[str, Any], noise: Noise
) -> tuple[UnitCounter | ValueDiscovery | WordDiscovery, PrivacyBudgetCallbackHandler]:
    from langchain_dpicl.discovery import UnitCounter, ValueDiscovery
    from langchain_dpicl.words import WordDiscovery

    budget, data = budget_of(settings), settings.data
    data = data.replace(
        public_size=_most_units(budget.delta) if data.public_size is None else data.public_size,
        # A field that is declared leaves the declaration as it is, so that other components share the data set.
        text_key=data.text_key if arguments.by is None or arguments.by in (data.fields or ()) else arguments.by,
    )
    private = private_examples(dataclasses.replace(settings, data=data))
    if noise.delta is None:
        noise = noise.replace(delta=settings.budget.delta)
    paid = {**settings.only("component"), **share_of(settings), "budget": budget, "noise": noise}
    if arguments.words:
        return WordDiscovery.from_private_examples(private, **what, **paid), budget
    if arguments.by is not None and arguments.value is None:
        del what["values"]
        return ValueDiscovery.from_private_examples(private, field=arguments.by, **what, **paid), budget
    return UnitCounter.from_private_examples(private, field=arguments.by, **what, **paid), budget


def _most_units(delta: float) -> int:
    """Returns the largest number of units that goes with a delta."""
    if delta == 0:
        advice = "Give --public-size N: a rough guess will do, as counts do not depend on it."
        raise fail("--public-size", "the declared number of units, at delta 0", None, advice)
    return max(1, int(0.1 / delta))


def _discovery_text(plan: DiscoveryPlan | WordsPlan) -> str:
    from langchain_dpicl.words import WordsPlan

    if isinstance(plan, WordsPlan):
        return _words_plan_text(plan)
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


def _words_plan_text(plan: WordsPlan) -> str:
    release, rule = plan.release, plan.release.rule
    kinds = "words and pairs of them" if plan.pairs is not None else "words"
    split = f", each of {len(plan.labels)} labels by itself" if plan.labels else ""
    terms = f"epsilon  {plan.epsilon:.4f} at delta {plan.delta:g}, adjacency {release.adjacency}"
    chances = f"chance of 95 %, one of a single unit with at most {release.failure:.2g}"
    lines = [
        f"{terms}, {kinds} of {rule.name!r}{split}",
        f"noise    Gaussian, deviation {release.scale:.2f}; a unit's words, {rule.max_words} at most, add 1 in squares",
        f"found    from a sum of {plan.threshold:.1f} on: a word of {plan.found_from(0.95)} units with a {chances}",
    ]
    return "\n".join(lines)


def _found_text(released: ReleasedCounts | ReleasedWords) -> list[str]:
    from langchain_dpicl.released.counts import ReleasedCounts

    return _counts_text(released) if isinstance(released, ReleasedCounts) else _words_text(released)


def _words_text(released: ReleasedWords) -> list[str]:
    if not released.words:
        return ["no word reached the threshold"]
    lines = ["Read these words before you send them on: names that many people write are among them."]
    for label, words, pairs in released.groups:
        named = "" if label is None else f"{label}: "
        lines.append(f"{named}{len(words)} words: {', '.join(word for word, _ in words)}")
        lines += [f"{named}{len(pairs)} pairs: {', '.join(pair for pair, _ in pairs)}"] if pairs else []
    return lines


def _counts_text(released: ReleasedCounts) -> list[str]:
    if not released.counts:
        return ["nothing reached the threshold"]
    from langchain_dpicl.privacy.extensions.count_histograms import noise_margin

    margin = noise_margin(released.release.scale, 0.95)  # not `public_size`, which is never below 1
    width = max(5, *map(len, released.counts))
    rows = (f"{value:<{width}}  {count:>11,}  {max(0, count - margin):>8,}" for value, count in released.counts.items())
    return [f"{'value':<{width}}  noisy count  at least (95 % each)", *rows]
