"""Draws ROC curves, score histograms, and claimed against audited epsilon; needs the extra `plot`."""

# A picture of membership scores is NOT PRIVATE, and says so. matplotlib is imported when a picture is drawn.

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from langchain_dpicl.audit.membership import LOW_RATE, NOTICE, Claim, MembershipResult, rate_grid
from langchain_dpicl.privacy._validate import fail
from langchain_dpicl.reports.plots import Where, _figure, _save, _tidy
from langchain_dpicl.reports.rendering import format_rounded_down, format_rounded_up

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from langchain_dpicl.audit.game import AuditResult

_INK, _PALE, _LEAK, _CHANCE = "#333333", "#a8c5da", "#b3261e", "#999999"
_LEAKS = ("#b3261e", "#e07a1f", "#8c564b", "#c2185b", "#d4a017", "#6d4c41")
_COLORS = ("#2f6690", "#3a7d44", "#7b5ea7", "#00838f", "#b59f00", "#5d6d7e", "#1b4965", "#9c6644")
_COLUMNS = 3
_BINS = 26
_LOWEST = 1e-3
_WIDTH = 34
_STEP = 1.02


class Utility(NamedTuple):
    """One row of an accuracy table.

    Attributes:
      method: its name.
      dataset: its name.
      epsilon: 0: no private record is used; infinity: nothing is protected.
      mean: accuracy, in [0, 1].
      std: standard deviation over repeats.
    """

    method: str
    dataset: str
    epsilon: float
    mean: float
    std: float


def plot_roc(results: Sequence[MembershipResult], path: Where = None, *, title: str = "Membership inference") -> Figure:
    """Draws ROC curves with their bands, and again on logarithmic axes where false positives are rare. NOT PRIVATE.

    Targets without a claim are warm, those with one are cold. Prompts are drawn again and again: the line is the mean
    of their curves, the band holds 95 % of them at each rate (not 95 % of whole curves). Dashed is the best that a
    claim allows, where that is below 1.

    Args:
      results: from `membership_attack`.
      path: file to write (.png, .pdf, .svg); None: nothing is written.
      title: over the picture.

    Returns:
      The matplotlib figure.

    Raises:
      ConfigurationError: matplotlib is not installed, or there is no result.
    """
    _some("results", results)
    figure = _figure(9.6, max(5.6, 1.4 + 0.56 * len(results)))
    axes = figure.subplots()
    low = axes.inset_axes((0.56, 0.09, 0.42, 0.42))
    grid = rate_grid()
    for panel in (axes, low):
        panel.plot(grid, grid, color=_CHANCE, linewidth=1, linestyle=":", label="guessing" if panel is axes else None)
    for result, color in zip(results, _colors(results), strict=True):
        band = result.band()
        rate = f"TPR {100 * result.tpr_at(LOW_RATE):.0f} % at 1 % FPR"
        words = f"{_wrap_name(result.name)}\nAUC {result.auc:.2f}, {rate}"
        for panel in (axes, low):
            panel.fill_between(band.rates, band.low, band.high, color=color, alpha=0.15, linewidth=0)
            panel.plot(band.rates, band.mean, color=color, linewidth=1.8, label=words if panel is axes else None)
    for claim in _claims(results):
        words = f"allowed by epsilon {claim.epsilon:g} ({claim.adjacency})"
        for panel in (axes, low):
            panel.plot(*claim.corners, color=_INK, linewidth=1, linestyle="--", label=words if panel is axes else None)
    axes.set(xlim=(-0.01, 1.0), ylim=(0.0, 1.01), xlabel="false-positive rate", ylabel="true-positive rate")
    low.set(xscale="log", yscale="log", xlim=(_LOWEST, 1.0), ylim=(_LOWEST, 1.3))
    low.set_title("the same, low rates", fontsize=8, color=_INK, loc="left", pad=3)
    low.tick_params(labelsize=7)
    low.patch.set_alpha(0.92)
    for panel in (axes, low):
        _tidy(panel, grid="both")
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5), labelspacing=0.9)
    return _mark_figure(figure, title, path)


def plot_probabilities(
    results: Sequence[MembershipResult], path: Where = None, *, title: str = "Scores of members and of others"
) -> Figure:
    """Draws how members and non-members score at the right label, a panel per result. NOT PRIVATE.

    Args:
      results: from `membership_attack`.
      path: file to write; None: nothing is written.
      title: over the picture.

    Returns:
      The matplotlib figure.

    Raises:
      ConfigurationError: matplotlib is not installed, or there is no result.
    """
    _some("results", results)
    columns = min(_COLUMNS, len(results))
    lines = -(-len(results) // columns)
    figure = _figure(max(3.6 * columns, 5.4), 2.7 * lines + 0.9)
    panels = figure.subplots(lines, columns, squeeze=False, sharey=False)
    for place, axes in enumerate(panels.flat):
        axes.set_visible(place < len(results))
    for place, (axes, result) in enumerate(zip(panels.flat, results, strict=False)):
        scores = np.concatenate([result.member_scores.ravel(), result.nonmember_scores.ravel()])
        is_share = bool(scores.min() >= 0.0 and scores.max() <= 1.0)
        ends = (0.0, 1.0) if is_share else (float(scores.min()), float(scores.max()))
        edges = np.linspace(ends[0], ends[1], _BINS)
        for values, color, words in (
            (result.nonmember_scores.ravel(), _COLORS[0], "non-members"),
            (result.member_scores.ravel(), _LEAK, "members"),
        ):
            weights = np.full(len(values), 1 / len(values))
            shape: dict[str, Any] = {"bins": edges, "weights": weights, "color": color}
            axes.hist(values, alpha=0.25, **shape)
            axes.hist(values, histtype="step", linewidth=1.4, label=words, **shape)
            axes.axvline(values.mean(), color=color, linewidth=1, linestyle="--")
        axes.set_title(f"{_wrap_name(result.name)}\nAUC {result.auc:.2f}", loc="left", fontsize=9, color=_INK)
        axes.set_xlabel("probability of the right label" if is_share else "score of the right label", fontsize=8)
        if place % columns == 0:
            axes.set_ylabel("share of records", fontsize=8)
        axes.tick_params(labelsize=8)
        _tidy(axes, grid="y")
    panels.flat[0].legend(frameon=False, fontsize=8, loc="best")
    return _mark_figure(figure, f"{title} (dashed: means)", path)


def plot_claimed_audited(
    results: Iterable[AuditResult], path: Where = None, *, title: str = "Claimed and audited epsilon"
) -> Figure:
    """Draws what audits show epsilon to be at least, beside what is claimed, a line per check.

    Args:
      results: those of an `AuditReport`; checks that are about no epsilon are left out.
      path: file to write; None: nothing is written.
      title: over the picture.

    Returns:
      The matplotlib figure.

    Raises:
      ConfigurationError: matplotlib is not installed, or no check is about epsilon.
    """
    rows = [row for row in results if row.lower_bound is not None and row.claimed_epsilon is not None]
    _some("results", rows)
    figure = _figure(8.2, 1.7 + 0.42 * len(rows))
    from matplotlib.patches import Patch  # behind what says that there is no matplotlib

    axes = figure.subplots()
    lower, claimed = ([float(getattr(row, name)) for row in rows] for name in ("lower_bound", "claimed_epsilon"))
    is_broken = [row.verdict == "violated" for row in rows]
    places = range(len(rows))
    most = max(filter(math.isfinite, (*claimed, *lower, 1e-9)))
    cut = 1.04 * most  # of bars without an end
    axes.barh(places, np.minimum(claimed, cut), height=0.62, color=_PALE)
    colors = [_LEAK if broken else _COLORS[0] for broken in is_broken]
    axes.barh(places, np.minimum(lower, cut), height=0.3, color=colors)
    for place, (row, low, top, broken) in enumerate(zip(rows, lower, claimed, is_broken, strict=True)):
        words = f"{format_rounded_down(low, 3)} of {format_rounded_up(top, 3)}" + (
            "" if row.verdict == "sound" else f": {row.verdict}"
        )
        at = min(max(low, top), cut) + 0.015 * most
        axes.text(at, place, words, va="center", fontsize=9, color=_LEAK if broken else _INK)
    axes.set_yticks(places, labels=[_wrap_name(row.check) for row in rows], fontsize=9)
    axes.set_ylim(len(rows) - 0.4, -0.6)  # the first on top
    axes.set_xlim(0.0, 1.38 * most)
    axes.set_xlabel("epsilon")
    axes.tick_params(axis="y", length=0)
    _tidy(axes, grid="x")
    says = {"claimed (no more than this)": _PALE, "audited (no less than this)": _COLORS[0]}
    handles = [Patch(color=color, label=words) for words, color in says.items()]
    figure.legend(handles=handles, frameon=False, fontsize=9, ncols=2, loc="outside lower center")
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, color=_INK)
    return _save(figure, path)


def plot_utility(
    rows: Iterable[Utility | Sequence[Any]], path: Where = None, *, title: str = "Utility and epsilon"
) -> Figure:
    """Draws accuracy over epsilon, a panel per data set and a line per method, with standard deviations.

    Rows at epsilon 0 (no private record) are dotted levels, rows at infinity (nothing protected) are dashed ones.

    Args:
      rows: (method, dataset, epsilon, mean, std).
      path: file to write; None: nothing is written.
      title: over the picture.

    Returns:
      The matplotlib figure.

    Raises:
      ConfigurationError: matplotlib is not installed, or there is no row.
    """
    points = [Utility(*row) for row in rows]
    _some("rows", points)
    datasets = list(dict.fromkeys(row.dataset for row in points))
    methods = list(dict.fromkeys(row.method for row in points))
    curves = list(dict.fromkeys(row.method for row in points if 0 < row.epsilon < math.inf))
    styles = _method_colors(points, methods)
    columns = 2 if len(datasets) == 4 else min(_COLUMNS, len(datasets))
    lines = -(-len(datasets) // columns)
    figure = _figure(max(4.1 * columns, 5.0), 3.1 * lines + 0.7 + 0.08 * len(methods))
    panels = figure.subplots(lines, columns, squeeze=False)
    handles: dict[str, Any] = {}
    for place, axes in enumerate(panels.flat):
        axes.set_visible(place < len(datasets))
    for place, (axes, dataset) in enumerate(zip(panels.flat, datasets, strict=False)):
        for method in methods:
            own = [row for row in points if (row.dataset, row.method) == (dataset, method)]
            if own:
                aside = _STEP ** (curves.index(method) - (len(curves) - 1) / 2) if method in curves else 1.0
                handles.setdefault(method, _draw_method(axes, own, styles[method], aside=aside))
        axes.set_title(dataset, loc="left", fontsize=10, color=_INK)
        _epsilon_axis(axes, points)
        if place % columns == 0:
            axes.set_ylabel("accuracy")
        if place + columns >= len(datasets):
            axes.set_xlabel("epsilon")
        _tidy(axes, grid="y")
    figure.legend(
        handles.values(), handles, frameon=False, fontsize=8, ncols=min(3, len(handles)), loc="outside lower center"
    )
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, color=_INK)
    return _save(figure, path)


def _draw_method(axes: Any, own: Sequence[Utility], color: str, *, aside: float) -> Any:
    """Draws a method, its points a little aside of those of others; returns what stands for it in the legend."""
    drawn = None
    for level, style in ((0.0, ":"), (math.inf, "--")):
        for row in (row for row in own if row.epsilon == level):
            drawn = axes.axhline(row.mean, color=color, linestyle=style, linewidth=1.5)
            axes.axhspan(row.mean - row.std, row.mean + row.std, color=color, alpha=0.08, linewidth=0)
    if between := sorted((row for row in own if 0 < row.epsilon < math.inf), key=lambda row: row.epsilon):
        at, points, spread = zip(*((aside * row.epsilon, row.mean, row.std) for row in between), strict=True)
        options: dict[str, Any] = {"marker": "o", "markersize": 4, "capsize": 2.5, "linewidth": 1.6, "color": color}
        drawn = axes.errorbar(at, points, yerr=spread, **options)
    return drawn


def _epsilon_axis(axes: Any, rows: Sequence[Utility]) -> None:
    at = sorted({row.epsilon for row in rows if 0 < row.epsilon < math.inf})
    if not at:
        axes.set_xticks([])
        return
    axes.set_xscale("log")
    axes.minorticks_off()
    axes.set_xticks(at, labels=[f"{epsilon:g}" for epsilon in at])
    axes.set_xlim(at[0] / 1.3, at[-1] * 1.3)


def _method_colors(rows: Sequence[Utility], methods: Sequence[str]) -> Mapping[str, str]:
    """Nothing protected is warm, no private record is grey, the others are cold."""
    kinds = {method: {row.epsilon for row in rows if row.method == method} for method in methods}
    warm = [method for method in methods if kinds[method] == {math.inf}]
    grey = [method for method in methods if kinds[method] == {0.0}]
    cold = [method for method in methods if method not in warm and method not in grey]
    greys = ("#777777", "#aaaaaa", "#444444")
    pairs = ((warm, _LEAKS), (grey, greys), (cold, _COLORS))
    return {method: colors[place % len(colors)] for names, colors in pairs for place, method in enumerate(names)}


def _colors(results: Sequence[MembershipResult]) -> list[str]:
    warm, cold = 0, 0
    colors = []
    for result in results:
        if result.claim is None:
            colors.append(_LEAKS[warm % len(_LEAKS)])
            warm += 1
        else:
            colors.append(_COLORS[cold % len(_COLORS)])
            cold += 1
    return colors


def _claims(results: Sequence[MembershipResult]) -> list[Claim]:
    """Returns the distinct claims whose line differs visibly from the top left corner."""
    distinct = dict.fromkeys(result.claim for result in results if result.claim is not None)
    return [claim for claim in distinct if claim.auc < 0.995]


def _wrap_name(name: str) -> str:
    return textwrap.fill(name.replace("$", r"\$"), _WIDTH)  # no formula in a name


def _some(name: str, values: Sequence[Any]) -> None:
    if not values:
        raise fail(name, "at least one", "none")


def _mark_figure(figure: Figure, title: str, path: Where) -> Figure:
    """Writes the title and, under the picture, that it is not private."""
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, color=_INK)
    figure.supxlabel(NOTICE, x=0.01, ha="left", fontsize=7, color=_LEAK)
    return _save(figure, path)
