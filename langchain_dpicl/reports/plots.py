"""Plots a privacy report: reserved epsilon over time and by share, and epsilon over delta."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from itertools import accumulate
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy._validate import exact, round_down
from langchain_dpicl.reports.claims import heaviest, share_extent
from langchain_dpicl.reports.rendering import format_rounded_down, format_rounded_up

# matplotlib is the extra `plot`; it is imported when a picture is drawn, and needs no display.

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from langchain_dpicl.reports.report import PrivacyReport, ShareEntry

Where: TypeAlias = str | os.PathLike[str] | None

MAX_BARS = 15
_FEWEST_BARS = 5
_LONGEST_NAME = 28
_FAR = 2.5
_POINTS = 25
_DECADES = 6
_SEALED, _DECLARED, _LIMIT, _INK = "#2f6690", "#a8c5da", "#b3261e", "#333333"


def plot_budget(report: PrivacyReport, path: Where = None) -> Figure:
    """Draws what is reserved: over time, with the ledger's limit, and by share.

    Args:
      report: from `budget.report()`.
      path: file to write (.png, .pdf, .svg); None: nothing is written.

    Returns:
      The matplotlib figure.

    Raises:
      ConfigurationError: matplotlib is not installed.
    """
    figure = _figure(10.0, max(4.0, 1.9 + 0.32 * min(len(report.shares), MAX_BARS)))
    over_time, by_share = figure.subplots(1, 2, width_ratios=(1.15, 1.0))
    _draw_time(over_time, report)
    _draw_shares(by_share, report)
    figure.suptitle(_title(report), x=0.01, ha="left", fontsize=12, color=_INK)
    return _save(figure, path)


def plot_epsilon_delta(report: PrivacyReport, path: Where = None, *, max_seconds: float | None = 60.0) -> Figure:
    """Draws the bound on epsilon of everything sealed, over delta, beside the ledger's limit.

    Formal guarantees:
      - Every point is an upper bound, by the method of `PrivacyReport.epsilons`; between points the bound of the
        smaller delta is drawn.

    Args:
      report: from `budget.report()`; its own table is drawn if it has one (see `with_epsilons`), else one over six
        powers of ten up to the ledger's delta (1e-6 where it is 0) is computed, which takes a while.
      path: file to write (.png, .pdf, .svg); None: nothing is written.
      max_seconds: see `PrivacyReport.epsilons`.

    Returns:
      The matplotlib figure.

    Raises:
      ConfigurationError: matplotlib is not installed, or no point could be computed.
    """
    figure = _figure(7.0, 4.4)
    limit = report.ledger
    table = report.table or report.epsilons(_deltas(limit.delta), max_seconds=max_seconds)
    points = [(row.delta, row.epsilon) for row in table.rows if row.epsilon is not None and row.epsilon < math.inf]
    if not points:
        raise ConfigurationError("plot: expected a finite bound at some delta, found none. Raise max_seconds.")
    axes = figure.subplots()
    deltas, bounds = zip(*points, strict=True)
    axes.step(deltas, bounds, where="post", color=_SEALED, linewidth=2)
    axes.plot(deltas, bounds, "o", color=_SEALED, markersize=3.5, label="sealed shares")
    if limit.delta > 0 and limit.epsilon <= _FAR * max(bounds):
        axes.plot([limit.delta], [limit.epsilon], "X", color=_LIMIT, markersize=9, label="limit of the ledger")
        axes.legend(frameon=False, loc="lower left", fontsize=9)
        axes.set_ylim(0.0, 1.12 * max(*bounds, limit.epsilon))
    else:  # a flat line would be all that is left of the curve
        axes.set_ylim(0.0, 1.25 * max(bounds) or 1.0)
    axes.set_xscale("log")
    axes.set_title("upper bound for everything sealed, all points at once", loc="left", fontsize=10, color=_INK)
    axes.set_xlabel("delta")
    axes.set_ylabel(f"epsilon ({limit.adjacency})")
    _tidy(axes, grid="both")
    figure.suptitle(_title(report), x=0.01, ha="left", fontsize=12, color=_INK)
    return _save(figure, path)


def _draw_time(axes: Any, report: PrivacyReport) -> None:
    """A step at every seal, from the ledger's making on; the end is a little after the last one."""
    sealed = sorted(((_when(share.sealed_at), share) for share in report.shares if share.sealed_at), key=itemgetter(0))
    made = _when(report.ledger.stamp)
    times, spent = [made], [0.0, *_reserved(report, [share for _, share in sealed])]
    for at, _ in sealed:
        times.append(max(at, times[-1]))
    span = max(times[-1] - made, timedelta(minutes=1))
    times.append(times[-1] + span / 12)
    spent.append(spent[-1])
    axes.fill_between(times, spent, step="post", color=_SEALED, alpha=0.16, linewidth=0)
    axes.step(times, spent, where="post", color=_SEALED, linewidth=2)
    if report.epsilon > spent[-1]:
        axes.vlines(times[-1], spent[-1], report.epsilon, color=_DECLARED, linewidth=7)
        words = f"with shares declared only: {format_rounded_up(report.epsilon, 3)}"
        axes.annotate(words, (times[-1], report.epsilon), (-4, 4), textcoords="offset points", ha="right", fontsize=9)
    limit = report.ledger.epsilon
    axes.axhline(limit, color=_LIMIT, linewidth=1.5, linestyle="--")
    beside = axes.get_yaxis_transform()
    axes.text(
        0.02, 1.01 * limit, f"limit {format_rounded_up(limit)}", transform=beside, va="bottom", color=_LIMIT, fontsize=9
    )
    axes.set_ylim(0.0, 1.15 * limit)
    axes.set_ylabel("epsilon")
    axes.set_title("reserved by sealed shares over time (UTC)", loc="left", fontsize=10, color=_INK)
    _date_axis(axes, made - span / 40, times[-1])
    _tidy(axes, grid="y")


def _reserved(report: PrivacyReport, shares: Sequence[ShareEntry]) -> list[float]:
    """Returns what is reserved after each of these shares; of a stream, for the window that is charged the most."""
    stream = report.ledger.stream
    if stream is None:
        return [float(total) for total in accumulate(exact(share.terms.epsilon) for share in shares)]
    amounts = [(share_extent(share.terms, report.retired), share.terms.epsilon) for share in shares]
    return [heaviest(amounts[:sealed], stream.window) for sealed in range(1, len(amounts) + 1)]


def _draw_shares(axes: Axes, report: PrivacyReport) -> None:
    """A bar a share, in the order of the ledger; the last one stands for all that do not fit."""
    shares = list(report.shares)
    shown = shares if len(shares) <= MAX_BARS else shares[: MAX_BARS - 1]
    bars = [(_name(share), share.terms.epsilon, _SEALED if share.sealed_at else _DECLARED) for share in shown]
    if rest := shares[len(shown) :]:
        bars.append((f"{len(rest)} more", math.fsum(share.terms.epsilon for share in rest), _SEALED))
    left = max(round_down(exact(report.ledger.epsilon) - exact(report.epsilon)), 0.0)
    bars.append(("not promised", left, "none"))
    names, widths, colors = zip(*bars, strict=True)
    edges = [_LIMIT if color == "none" else color for color in colors]
    places = range(len(bars))
    drawn = axes.barh(places, widths, color=colors, edgecolor=edges, height=0.66)
    words = [*(format_rounded_up(width, 3) for width in widths[:-1]), format_rounded_down(left, 3)]
    axes.bar_label(drawn, labels=words, padding=3, fontsize=9, color=_INK)
    axes.set_yticks(places, labels=names, fontsize=9)
    axes.set_ylim(max(len(bars), _FEWEST_BARS) - 0.4, -0.6)  # the first on top
    axes.set_xlim(0.0, 1.18 * max(*widths, 1e-12))
    axes.set_xlabel("epsilon")
    axes.set_title("by share (pale: declared only)", loc="left", fontsize=10, color=_INK)
    _tidy(axes, grid="x")
    axes.tick_params(axis="y", length=0)


def _name(share: ShareEntry) -> str:
    names = " + ".join(component.name for component in share.terms.components)
    short = names if len(names) <= _LONGEST_NAME else names[: _LONGEST_NAME - 1] + "\N{HORIZONTAL ELLIPSIS}"
    return short.replace("$", r"\$")  # no formula in a name


def _title(report: PrivacyReport) -> str:
    limit = report.ledger
    name = limit.name.replace("$", r"\$")
    bounds = f"epsilon {format_rounded_up(limit.epsilon)}, delta {format_rounded_up(limit.delta)}"
    per = "" if limit.stream is None else f" per {limit.stream.words}"
    return f"Budget {name}: {bounds}{per}, {limit.adjacency}"


def _when(stamp: str) -> datetime:
    return datetime.fromisoformat(stamp).astimezone(UTC)


def _deltas(limit: float) -> list[float]:
    return [(limit or 1e-6) * 10 ** (-_DECADES * step / (_POINTS - 1)) for step in reversed(range(_POINTS))]


# --- matplotlib ---------------------------------------------------------------------------------------------------


def _figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ConfigurationError("plot: expected matplotlib, found none. Install langchain-dpicl[plot].") from None
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)  # needs no display, and leaves no pyplot state
    return figure


def _date_axis(axes: Any, low: datetime, high: datetime) -> None:
    dates: Any = importlib.import_module("matplotlib.dates")  # it has no types
    locator = dates.AutoDateLocator(minticks=3, maxticks=6, tz=UTC)
    formatter = dates.ConciseDateFormatter(locator, tz=UTC)
    formatter.formats[-1] = "%H:%M:%S"
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(formatter)
    axes.set_xlim(low, high)


def _tidy(axes: Axes, *, grid: Literal["x", "y", "both"]) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(visible=True, axis=grid, color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)


def _save(figure: Figure, path: Where) -> Figure:
    if path is None:
        return figure
    try:
        figure.savefig(Path(path), dpi=150)
    except ValueError as error:
        fault = str(error)
    else:
        return figure
    raise ConfigurationError(f"plot: expected a file name that ends in .png, .pdf or .svg, found {path} ({fault}).")
