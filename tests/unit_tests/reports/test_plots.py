"""Pictures of reports: what is drawn is what the report says."""

from __future__ import annotations

import dataclasses
import itertools
import re
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy.accounting.events import PureEvent
from langchain_dpicl.privacy.ledger.tickets import Ticket
from langchain_dpicl.reports import plots
from langchain_dpicl.reports import report as report_deltas
from langchain_dpicl.reports.plots import MAX_BARS, plot_budget, plot_epsilon_delta
from langchain_dpicl.reports.report import PrivacyReport
from tests.ledgers import use_simple_prices

START = datetime(2026, 11, 1, tzinfo=UTC)


def report_of(
    monkeypatch: pytest.MonkeyPatch, *shares: tuple[str, float, float | None], name: str = "ours"
) -> PrivacyReport:
    """A report of shares (name, epsilon, hours from the start or None where only declared), at limits (4, 1e-6)."""
    use_simple_prices(monkeypatch)
    ledger = Budget(epsilon=4.0, delta=1e-6, name=name)
    for share, epsilon, hours in shares:
        made = ledger.declare(share, tickets=[Ticket("t", PureEvent(epsilon))], epsilon=epsilon)
        if hours is not None:
            made.reserve("t")
    report = ledger.report()
    sealed = {share: (START + timedelta(hours=hours)).isoformat() for share, _, hours in shares if hours is not None}
    entries = tuple(dataclasses.replace(s, sealed_at=sealed.get(s.terms.components[0].name)) for s in report.shares)
    return dataclasses.replace(
        report, shares=entries, ledger=dataclasses.replace(report.ledger, stamp=START.isoformat())
    )


def bars(axes: Any) -> dict[str, tuple[float, str]]:
    """Width and label of each bar, by name."""
    names = [text.get_text() for text in axes.get_yticklabels()]
    labels = [text.get_text() for text in axes.texts]
    return {name: (bar.get_width(), label) for name, bar, label in zip(names, axes.patches, labels, strict=True)}


def test_the_steps_are_the_sealed_shares_over_time_under_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    report = report_of(monkeypatch, ("late", 0.5, 30.0), ("soon", 1.25, 2.0), ("only declared", 0.75, None))
    over_time = plot_budget(report).axes[0]
    steps, limit = over_time.lines
    at = list(steps.get_xdata())
    assert at[:3] == [START, START + timedelta(hours=2), START + timedelta(hours=30)]
    assert list(steps.get_ydata()) == [0.0, 1.25, 1.75, 1.75]
    assert steps.get_drawstyle() == "steps-post"
    assert set(limit.get_ydata()) == {4.0}
    assert over_time.get_ylim()[1] > 4.0
    words = [text.get_text() for text in over_time.texts]
    assert "limit 4" in words
    assert "with shares declared only: 2.5" in words


def test_the_steps_of_a_budget_for_windows_are_what_its_heaviest_window_is_charged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_simple_prices(monkeypatch)
    ledger = Budget(epsilon=4.0, delta=1e-6, per="30 days", name="months")
    for place, (first, last) in enumerate([(0, 20), (60, 80), (65, 70), (120, 140)]):
        ticket = Ticket("t", PureEvent(1.5))
        made = ledger.declare(f"month {place}", tickets=[ticket], epsilon=1.5, extent=(first, last))
        made.reserve("t", blocks=(first, last))
    report = ledger.report()
    figure = plot_budget(report)
    steps, limit = figure.axes[0].lines
    assert list(steps.get_ydata()) == [0.0, 1.5, 1.5, 3.0, 3.0, 3.0]
    assert max(steps.get_ydata()) == report.epsilon < max(limit.get_ydata())
    assert "delta 1e-06 per 30 days, add_remove" in figure._suptitle.get_text()


def test_the_bars_are_the_shares_and_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    report = report_of(monkeypatch, ("soon", 1.25, 2.0), ("only declared", 0.75, None))
    drawn = bars(plot_budget(report).axes[1])
    assert drawn == {"soon": (1.25, "1.25"), "only declared": (0.75, "0.75"), "not promised": (2.0, "2")}


def test_what_is_spent_is_shown_rounded_up_and_what_is_left_rounded_down(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = bars(plot_budget(report_of(monkeypatch, ("c", 1.23411, 0.0))).axes[1])
    assert [label for _, label in drawn.values()] == ["1.24", "2.76"]


def test_shares_that_do_not_fit_into_the_picture_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    report = report_of(monkeypatch, *((f"share {k}", 0.125, float(k)) for k in range(MAX_BARS + 6)))
    drawn = bars(plot_budget(report).axes[1])
    assert len(drawn) == MAX_BARS + 1
    assert drawn["7 more"] == (0.875, "0.875")
    assert sum(width for width, _ in drawn.values()) == 4.0


def test_an_empty_budget_and_a_full_one_are_drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for shares in ((), (("all", 4.0, 0.0),)):
        report = report_of(monkeypatch, *shares)
        figure = plot_budget(report, tmp_path / "x.png")
        assert bars(figure.axes[1])["not promised"][0] == report.ledger.epsilon - report.epsilon


@pytest.mark.parametrize("name", [r"$\frac{$", "a" * 200, "_^{}", "\N{SNOWMAN}"])
def test_names_are_drawn_as_they_are_and_are_no_formulas(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    report = report_of(monkeypatch, (name, 1.0, 1.0), name=name)
    figure = plot_budget(report, tmp_path / "x.png")
    (shown, _) = bars(figure.axes[1])
    assert len(shown) <= 40
    assert shown.replace("\\$", "$").rstrip("\N{HORIZONTAL ELLIPSIS}") in name


def test_a_clock_that_went_back_is_drawn_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    report = report_of(monkeypatch, ("a", 1.0, -500.0), ("b", 1.0, 3.0))
    times = list(plot_budget(report).axes[0].lines[0].get_xdata())
    assert times == sorted(times)


def test_the_curve_is_the_table_of_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    report = report_of(monkeypatch, ("a", 1.0, 1.0), ("b", 0.5, 2.0)).with_epsilons([1e-9, 1e-8, 1e-6])
    axes = plot_epsilon_delta(report).axes[0]
    assert report.table is not None
    rows = [(row.delta, row.epsilon) for row in report.table.rows]
    for line in axes.lines[:2]:
        assert list(zip(line.get_xdata(), line.get_ydata(), strict=True)) == rows
    assert axes.get_xscale() == "log"
    # Between two points only the bound of the smaller delta is known.
    assert axes.lines[0].get_drawstyle() == "steps-post"


def test_without_a_table_the_curve_is_computed_up_to_the_ledgers_delta(monkeypatch: pytest.MonkeyPatch) -> None:
    report = report_of(monkeypatch, ("a", 3.0, 1.0))
    axes = plot_epsilon_delta(report).axes[0]
    found = list(axes.lines[1].get_xdata())
    assert found[::4] == pytest.approx([1e-12, 1e-11, 1e-10, 1e-9, 1e-8, 1e-7, 1e-6])
    assert set(axes.lines[1].get_ydata()) == {3.0}
    (limit,) = [line for line in axes.lines if line.get_label() == "limit of the ledger"]
    assert (list(limit.get_xdata()), list(limit.get_ydata())) == ([1e-6], [4.0])


def test_a_curve_without_a_finite_point_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    report = report_of(monkeypatch, ("a", 3.0, 1.0))
    clock = itertools.count()
    monkeypatch.setattr(report_deltas, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    with pytest.raises(ConfigurationError, match="max_seconds"):
        plot_epsilon_delta(report.with_epsilons([1e-9, 1e-8], max_seconds=0.5))
    charged = plot_epsilon_delta(report, max_seconds=0.5).axes[0].lines[1]  # what the share is charged holds in no time
    assert (list(charged.get_xdata()), list(charged.get_ydata())) == ([1e-6], [3.0])


@pytest.mark.parametrize(
    ("draw", "kind", "end", "start"),
    [
        (plot_budget, Path, "png", b"\x89PNG"),
        (plot_budget, str, "svg", b"<?xml"),
        (plot_epsilon_delta, str, "pdf", b"%PDF"),
    ],
)
def test_pictures_are_written_in_the_format_of_the_name(
    draw: Any, kind: Any, end: str, start: bytes, *, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / f"picture.{end}"
    draw(report_of(monkeypatch, ("a", 3.0, 1.0)), kind(path))
    assert path.read_bytes().startswith(start)


def test_a_format_that_nobody_knows_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"\.png"):
        plot_budget(report_of(monkeypatch), tmp_path / "x.docx")


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    report = report_of(monkeypatch)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    for draw in (plot_budget, plot_epsilon_delta):
        with pytest.raises(ConfigurationError, match=r"langchain-dpicl\[plot\]"):
            draw(report)


def test_matplotlib_is_imported_when_a_picture_is_drawn_and_pyplot_never() -> None:
    source = Path(plots.__file__).read_text()
    assert not re.search(r"^(import|from) matplotlib", source, re.MULTILINE)
    assert re.search(r"^ +from matplotlib\.figure import Figure", source, re.MULTILINE)
    assert "pyplot" not in re.sub(r"#.*", "", source)  # it would ask for a display, and keep every figure
