"""Draws the pictures of the pages anew, from made-up records: `make pictures`. Shows what the package draws, unchanged.

Prices and audits are real; the times of day of the budget are made up, as a budget of weeks is drawn in a second. What
comes out is small enough to be kept beside the pages, so that a repository browser shows it too.
"""

from __future__ import annotations

import dataclasses
import importlib
import io
import json
import statistics
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import browser
import flows
import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from langchain_dpicl import (
    Budget,
    DPVotingRunnable,
    EmbeddedLLM,
    PrivacyBudgetCallbackHandler,
    PrivateExamples,
)
from langchain_dpicl.audit import AuditResult, audit
from langchain_dpicl.audit.plots import plot_claimed_audited
from langchain_dpicl.options import LabelAnswers, Rows
from langchain_dpicl.privacy.accounting.events import (
    BoundedRangeEvent,
    Event,
    GaussianEvent,
    RepeatedEvent,
    SubsampledEvent,
)
from langchain_dpicl.privacy.ledger.tickets import Ticket
from langchain_dpicl.reports import PrivacyReport
from langchain_dpicl.reports.plots import plot_budget, plot_epsilon_delta
from langchain_dpicl.reports.rendering import belief

OUT = Path(__file__).resolve().parents[1] / "pictures"
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
START = datetime(2026, 3, 2, 8, tzinfo=UTC)
PACKAGE = Path(__file__).resolve().parents[2] / "langchain_dpicl"
COLORS = 32

# Component, what it released, and how many days after the start; None: declared, and nothing released yet.
SHARES: tuple[tuple[str, Event, int, float | None], ...] = (
    ("demonstrations", SubsampledEvent(RepeatedEvent(BoundedRangeEvent(0.5), 8), 0.02), 10, 1.0),
    ("ticket triage", SubsampledEvent(BoundedRangeEvent(0.8), 0.02), 500, 4.0),
    ("faq labels", GaussianEvent(9.0), 12, 9.5),
    ("soft prompt", SubsampledEvent(GaussianEvent(1.1), 0.01), 400, 16.0),
    ("next quarter", SubsampledEvent(BoundedRangeEvent(0.8), 0.02), 100, None),
)


def report() -> PrivacyReport:
    """The report of a ledger that four components have used, at made-up times."""
    ledger = Budget(epsilon=8.0, delta=1e-6, name="support 2026")
    for name, event, count, day in SHARES:
        share = ledger.declare(name, tickets=[Ticket("answer", event, max_count=count)], delta=1e-7)
        if day is not None:
            share.reserve("answer", count=count)
    made, days = ledger.report(), {name: day for name, _, _, day in SHARES}
    stamped = [
        dataclasses.replace(entry, sealed_at=(START + timedelta(days=day)).isoformat()) if day is not None else entry
        for entry in made.shares
        for day in [days[entry.terms.components[0].name]]
    ]
    header = dataclasses.replace(made.ledger, stamp=START.isoformat())
    return dataclasses.replace(made, shares=tuple(stamped), ledger=header)


ABOUT: dict[str, Any] = {
    "purpose": "answers and examples for the support assistant",
    "owner": "Support, A. Owner",
    "approver": "Data protection, B. Officer, 2 March 2026",
    "retention": "messages 24 months, ledger and reports 5 years",
    "countries": {"llm.bank.example": "Germany"},
}


def photograph(name: str, fill: Callable[[Path], None], *, width: int, height: int, ready: str = "true") -> None:
    """Photographs the upper part of a page; does nothing where no Chromium is installed.

    Args:
      name: of the picture.
      fill: writes `index.html`, and what it reads, into a folder.
      width: of the page and of the picture, in pixels.
      height: of the part that is shown.
      ready: JavaScript that is true when the page is complete.
    """
    program = browser.chromium()
    if program is None:
        print(f"{name}: left as it is, because no Chromium is installed")
        return
    with tempfile.TemporaryDirectory() as folder, browser.served(Path(folder)) as address:
        fill(Path(folder))
        with browser.Browser(program) as chromium:
            chromium.screen(width, 1000)
            chromium.open(f"{address}/index.html")
            while not chromium.run(ready):
                time.sleep(0.05)
            chromium.drawn()
            chromium.screenshot(Path(folder, "page.png"), height=height)
        write(Image.open(Path(folder, "page.png")).convert("RGB"), name, width=width)


def page(name: str) -> None:
    """Draws the page of a report."""

    def fill(folder: Path) -> None:
        ledger = PrivacyBudgetCallbackHandler.create(
            Path(folder, "budget.db"), epsilon=1.0, delta=1e-6, name="support 2026", about=ABOUT
        ).budget
        ledger.bind(PrivateExamples([], public_size=12_000, dataset_id="messages-2026", unit_key="customer"))
        shown = {"model": "mistral-small", "seen_by": ["llm.bank.example:443"]}
        for component, scale, epsilon in (("ask", 0.6, 0.5), ("demonstrations", 0.3, 0.3)):
            tickets = [Ticket("answer", SubsampledEvent(BoundedRangeEvent(scale), 0.02), max_count=200)]
            ledger.declare(component, tickets=tickets, epsilon=epsilon, public=shown).reserve("answer")
        ledger.report().save_html(Path(folder, "index.html"))
        ledger.close()

    photograph(name, fill, width=800, height=1420)


def audited() -> list[AuditResult]:
    """What audits of three voters found: two that show a label alone, one that shows noisy votes."""
    records = [{"text": "my card was declined", "queue": "card"}, {"text": "send it abroad", "queue": "transfer"}]
    found: list[AuditResult] = []
    shown: tuple[dict[str, Any], ...] = (
        {"noise": "gumbel"},
        {"noise": "permute_and_flip"},
        {"answers": LabelAnswers(scores=True)},
    )
    for options in shown:
        private = PrivateExamples(records, label_key="queue", labels=("card", "transfer"), public_size=2_000)
        budget = Budget(epsilon=2.0, delta=1e-6)
        found += audit(
            DPVotingRunnable.from_private_examples(
                private,
                llm=EmbeddedLLM(),
                budget=budget,
                epsilon=1.0,
                max_queries=10,
                rows=Rows(slots=20, shots=2),
                **options,
            )
        ).results
    return found


def front() -> Figure:
    """The README's picture: what `make demo` finds at the bank, in letters that a phone can show."""
    sys.path.insert(0, str(EXAMPLES))
    demo = importlib.import_module("demo")
    story = demo.measure(demo.BANK, EmbeddedLLM(), repeats=8, queries=40, epsilons=(demo.SHOWN,))()
    if story.copied is None:
        raise SystemExit("expected a copied record with a phone number, found none: draw again")
    # 390 px on a phone, drawn at twice that: 7.8 inches at 100 dots, so 16 points are 11 px there.
    figure = Figure(figsize=(7.8, 7.2))
    words, bars = figure.subplots(2, 1, height_ratios=(2.6, 5))
    words.axis("off")
    released = next(iter(demo.one_per_queue(story.shown.released)))
    sides = (
        (0.0, "A prompt of real records", story.copied, demo.RED),
        (0.53, "Released privately", released, demo.BLUE),
    )
    for left, title, example, color in sides:
        at = {"transform": words.transAxes, "va": "top"}
        words.text(left, 1, title, color=color, fontsize=19, fontweight="bold", **at)
        style = {"boxstyle": "round,pad=0.4", "facecolor": "white", "edgecolor": color, "linewidth": 2}
        words.text(left + 0.015, 0.78, textwrap.fill(example["text"], 21), fontsize=18, bbox=style, **at)
    private = demo.private_name(demo.SHOWN)
    free = story.rows[0]
    kinds = [
        ("Attacker spots the record used", "attacked", 50.0, "guessing"),
        ("Right answers", "right", 100 * statistics.mean(free.right), "no records"),
    ]
    for top, (title, kind, base, said) in zip((5.0, 1.4), kinds, strict=True):
        bars.text(0, top + 0.9, title, fontsize=19, fontweight="bold")
        for place, (name, label, color) in enumerate(
            ((demo.REAL, "real", demo.RED), (private, f"private, epsilon {demo.SHOWN:g}", demo.BLUE))
        ):
            runs = getattr(story.of(name), kind)
            mean, error = 100 * statistics.mean(runs), 100 * statistics.pstdev(runs)
            height = top - 1.05 * place
            bars.barh(height, mean, xerr=error, height=0.9, color=color, ecolor="0.2", capsize=6)
            bars.text(1.5, height, label, fontsize=17, color="white", va="center")
            bars.text(mean + error + 2, height, f"{mean:.0f} %", fontsize=18, va="center")
        bars.plot([base, base], [top - 1.7, top + 0.6], ls="--", lw=2, color="0.1")
        bars.text(base + 1, top - 1.95, said, fontsize=16, va="center", color="0.1")
    bars.set_xlim(0, 118)
    bars.set_ylim(-0.9, 6.6)
    bars.axis("off")
    figure.tight_layout(pad=0.6)
    return figure


STANDING: dict[str, Any] = {
    "time": "2026-11-20T09:41:00+00:00",
    "ledgers": [
        {
            "name": "support 2026",
            "ledger_id": "4f1c09d27ab35e80",
            "adjacency": "add_remove",
            "readable": True,
            "epsilon": 4.0,
            "epsilon_spent": 3.0,
            "delta": 1e-6,
            "delta_spent": 7.5e-7,
            "lines": 5214,
            "open": 0,
            "oldest_open": [],
            "components": [
                {
                    "name": "ask",
                    "left": 212,
                    "held": 3,
                    "committed": 1785,
                    "spent": 0.89,
                    "per_day": 41.0,
                    "days_left": 5.2,
                },
                {
                    "name": "answer",
                    "left": 310,
                    "held": 0,
                    "committed": 90,
                    "spent": 0.23,
                    "per_day": 6.0,
                    "days_left": 51.6,
                },
            ],
            "tenants": [
                {"component": "ask", "tenant": "acme", "used": 1204, "cap": 1400, "left": 196},
                {"component": "ask", "tenant": "globex", "used": 584, "cap": 600, "left": 16},
                {"component": "answer", "tenant": "acme", "used": 90, "cap": 200, "left": 110},
            ],
        }
    ],
    "refusals": [
        {"time": "2026-11-20T09:38:12+00:00", "tenant": "globex", "door": "ask", "status": 429, "error": "tenant_spent"}
    ],
}
"""What the operators of an invented service see."""


def beliefs() -> Figure:
    """What a belief can become at most, by epsilon, for three beliefs before."""
    figure = Figure(figsize=(7.8, 4.2), layout="constrained")
    axes = figure.subplots()
    epsilons = np.linspace(0, 8, 161)
    for prior, color in ((0.5, "C3"), (0.1, "C1"), (0.01, "C0")):
        axes.plot(epsilons, [100 * belief(prior, epsilon) for epsilon in epsilons], color=color, lw=2.5)
        at = 3.4 if prior < 0.1 else 1.9 if prior < 0.5 else 0.5
        axes.annotate(f"before: {100 * prior:g} %", (at, 100 * belief(prior, at)), (8, -14), textcoords="offset points")
    axes.set_xlabel("epsilon, of everything that comes out")
    axes.set_ylabel("belief afterwards, at most (%)")
    axes.set_xlim(0, 8)
    axes.set_ylim(0, 102)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def operators(name: str) -> None:
    """Draws the page for operators."""

    def fill(folder: Path) -> None:
        Path(folder, "index.html").write_text((PACKAGE / "service" / "page.html").read_text())
        Path(folder, "standing").write_text(json.dumps(STANDING))

    photograph(name, fill, width=1000, height=1200, ready="document.querySelector('section h3') !== null")


def save(figure: Figure, name: str, *, width: int) -> None:
    """Writes a small PNG of so many pixels."""
    whole = io.BytesIO()
    figure.savefig(whole, format="png", dpi=150)
    write(Image.open(whole).convert("RGB"), name, width=width)


def write(picture: Image.Image, name: str, *, width: int) -> None:
    """Writes a picture with so many pixels across and COLORS colours."""
    picture = picture.resize((width, picture.height * width // picture.width), Image.Resampling.LANCZOS)
    few = picture.quantize(COLORS, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    few.save(OUT / name, optimize=True)
    print(f"{name}: {(OUT / name).stat().st_size} bytes")


def main() -> None:
    """Draws all of them."""
    save(front(), "front.png", width=780)
    page("report.png")
    found = report()
    save(plot_budget(found), "budget.png", width=1200)
    save(plot_epsilon_delta(found), "epsilon-delta.png", width=700)
    save(plot_claimed_audited(audited()), "claimed-audited.png", width=800)
    operators("operators.png")
    save(beliefs(), "belief.png", width=780)
    flows.main()


if __name__ == "__main__":
    main()
