"""Draws the pictures of the pages anew, from made-up records: `make pictures`. Shows what the package draws, unchanged.

Prices and audits are real; the times of day of the budget are made up, as a budget of weeks is drawn in a second. What
comes out is small enough to be kept beside the pages, so that a repository browser shows it too.
"""

from __future__ import annotations

import dataclasses
import io
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from PIL import Image

from langchain_dpicl import Budget, DPVotingRunnable, EmbeddedLLM, PrivateExamples
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

OUT = Path(__file__).resolve().parents[1] / "pictures"
START = datetime(2026, 3, 2, 8, tzinfo=UTC)
COLORS = 256

# Who released what, and how many days after the start; None: declared, and nothing released yet.
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


def save(figure: Figure, name: str, *, width: int) -> None:
    """Writes a small PNG of so many pixels, with 256 colours."""
    whole = io.BytesIO()
    figure.savefig(whole, format="png", dpi=150)
    picture = Image.open(whole).convert("RGB")
    picture = picture.resize((width, picture.height * width // picture.width), Image.Resampling.LANCZOS)
    few = picture.quantize(COLORS, dither=Image.Dither.NONE)
    few.save(OUT / name, optimize=True)
    print(f"{name}: {(OUT / name).stat().st_size} bytes")


def main() -> None:
    """Draws all of them."""
    found = report()
    save(plot_budget(found), "budget.png", width=1200)
    save(plot_epsilon_delta(found), "epsilon-delta.png", width=700)
    save(plot_claimed_audited(audited()), "claimed-audited.png", width=800)


if __name__ == "__main__":
    main()
