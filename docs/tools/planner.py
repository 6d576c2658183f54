"""Computes the numbers of the planner's page with the package's own planner, and sets the page's form and table.

python docs/tools/planner.py [--out out/planner.json]

`make docs` runs it in the environment that has the package; docs/tools/site.py reads the file that it writes, and needs
no package. Each cell is what `dpicl plan --method voting` prints for the same numbers, in whole percent.
"""

from __future__ import annotations

import argparse
import html
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "out" / "planner.json"
MARK = "<!-- planner -->"
SCRIPT = "javascripts/planner.js"
DELTA = 1e-6
AXES: dict[str, tuple[Any, ...]] = {
    "epsilon": (0.25, 0.5, 1.0, 2.0, 4.0, 8.0),
    "records": (500, 1_000, 2_000, 5_000, 10_000, 50_000),
    "queries": (10, 100, 1_000, 10_000, 100_000),
    "labels": (2, 4, 10),
}
"""What can be chosen, in the order in which the cells stand."""
PRIORS = (0.001, 0.01, 0.1, 0.5)
FIRST = {"epsilon": 1.0, "records": 2_000, "queries": 1_000, "labels": 4, "prior": 0.01}
"""What is chosen when the page opens, and what its table is for."""
QUESTIONS = {
    "epsilon": "Epsilon, for all answers together",
    "records": "Declared records, or people",
    "queries": "Answers to pay for",
    "labels": "Labels an answer can have",
    "prior": "The attacker's belief before",
}
CHANCES = ("right", "low", "high", "at_most", "most_low", "most_high", "takes")
FIELDS = (*CHANCES, "private", "public", "tokens_in", "tokens_out", "advises")


def cell(epsilon: float, records: int, queries: int, labels: int) -> dict[str, int]:
    """Returns what a plan says: chances in whole percent, calls, tokens, and whether it advises against spending."""
    from langchain_dpicl.cli.inputs import settings_of
    from langchain_dpicl.cli.plan import planned
    from langchain_dpicl.planning.expected_utility import MUCH_NOISE

    settings = settings_of(
        {
            "method": "voting",
            "data": {"public_size": records},
            "budget": {"epsilon": epsilon, "delta": DELTA},
            "max_queries": queries,
            "guess": {"labels": labels},
        },
    )
    out = json.loads(planned(settings, compares=False, as_json=True))
    signal, cost = out["signal"], out["cost"]
    names = ("right_label_prob", "right_label_low", "right_label_high", "ceiling_prob", "ceiling_low", "ceiling_high")
    chances = (*names, "noise_takes")
    return dict(
        zip(
            FIELDS,
            [
                *(int(f"{100 * signal[name]:.0f}") for name in chances),
                *(cost[name] for name in ("private_calls", "public_calls", "tokens_in", "tokens_out")),
                int(signal["noise_takes"] > MUCH_NOISE),
            ],
            strict=True,
        )
    )


def beliefs() -> list[list[float]]:
    """Returns what each belief can become at each epsilon, in percent with one digit, rounded up as in a report."""
    from langchain_dpicl.reports.rendering import belief

    return [[_up(belief(prior, epsilon, DELTA)) for epsilon in AXES["epsilon"]] for prior in PRIORS]


def _up(share: float) -> float:
    return math.ceil(1000 * share) / 10


def computed() -> dict[str, Any]:
    """Returns everything that the page says."""
    cells = [list(cell(*place).values()) for place in itertools.product(*AXES.values())]
    return {
        "delta": DELTA,
        "axes": AXES,
        "priors": PRIORS,
        "first": FIRST,
        "fields": FIELDS,
        "cells": cells,
        "beliefs": beliefs(),
    }


def cell_of(data: Mapping[str, Any], **chosen: float) -> dict[str, int]:
    """Returns one cell of what `computed` returned."""
    place = 0
    for name, values in data["axes"].items():
        place = place * len(values) + list(values).index(chosen[name])
    return dict(zip(data["fields"], data["cells"][place], strict=True))


def page_part(data: Mapping[str, Any], script: str) -> str:
    """Returns the form, which needs JavaScript, and the table, which does not."""
    answer = '<div id="planner-answer" aria-live="polite"></div>'
    return "\n".join(
        [
            '<form id="planner-form" class="planner" hidden aria-label="Planner">',
            *_fields(data),
            "</form>",
            f'<div id="planner-found" class="planner" hidden>{answer}<div id="planner-chart"></div></div>',
            '<details id="planner-tables" open><summary>All numbers as tables</summary>',
            *_tables(data),
            "</details>",
            # A script of data ends at the first "</", which no number holds.
            f'<script type="application/json" id="planner-data">{json.dumps(data, separators=(",", ":"))}</script>',
            f'<script src="{script}" defer></script>',
        ]
    )


def _fields(data: Mapping[str, Any]) -> Iterator[str]:
    choices: dict[str, Sequence[float]] = {**data["axes"], "prior": data["priors"]}
    for name, values in choices.items():
        marks = (" selected" if value == data["first"][name] else "" for value in values)
        options = "".join(
            f"<option{mark}>{_shown(name, value)}</option>" for mark, value in zip(marks, values, strict=True)
        )
        yield (
            f'<div><label for="planner-{name}">{html.escape(QUESTIONS[name])}</label>'
            f'<select id="planner-{name}">{options}</select></div>'
        )
    for name, said in (("in", "Price of a million tokens read"), ("out", "Price of a million tokens written")):
        yield (
            f'<div><label for="planner-price-{name}">{said}</label>'
            f'<input id="planner-price-{name}" type="number" min="0" step="any" value="0" inputmode="decimal"></div>'
        )


def _shown(name: str, value: float) -> str:
    return f"{100 * value:g} %" if name == "prior" else f"{value:,.10g}"


def _tables(data: Mapping[str, Any]) -> Iterator[str]:
    """The right answers and the beliefs at every epsilon, for the first number of labels."""
    labels, epsilons = data["first"]["labels"], data["axes"]["epsilon"]
    head = "".join(f"<th>epsilon {epsilon:g}</th>" for epsilon in epsilons)
    yield f"<p>Right answers with {labels} labels at delta {data['delta']:g}, in percent; they rest on a guess:</p>"
    yield f"<table><thead><tr><th>records</th><th>answers</th>{head}</tr></thead><tbody>"
    for records, queries in itertools.product(data["axes"]["records"], data["axes"]["queries"]):
        chosen = {"records": records, "queries": queries, "labels": labels}
        rights = "".join(f"<td>{cell_of(data, epsilon=epsilon, **chosen)['right']}</td>" for epsilon in epsilons)
        yield f"<tr><td>{records:,}</td><td>{queries:,}</td>{rights}</tr>"
    yield "</tbody></table>"
    yield "<p>What a belief can become, at most, in percent:</p>"
    yield f"<table><thead><tr><th>before</th>{head}</tr></thead><tbody>"
    for prior, row in zip(data["priors"], data["beliefs"], strict=True):
        yield f"<tr><td>{100 * prior:g}</td>{''.join(f'<td>{after:g}</td>' for after in row)}</tr>"
    yield "</tbody></table>"


def main() -> None:
    """Writes the numbers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=OUT)
    out = parser.parse_args().out
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(computed(), separators=(",", ":")), encoding="utf-8")
    print(f"{out.name}: {out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
