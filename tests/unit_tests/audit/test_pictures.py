"""Pictures of audits: what is drawn is what results say, and what is not private says so."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_hex

from langchain_dpicl.audit.game import AuditResult
from langchain_dpicl.audit.membership import NOTICE, Claim, MembershipResult
from langchain_dpicl.audit.plots import plot_claimed_audited, plot_probabilities, plot_roc, plot_utility
from langchain_dpicl.exceptions import ConfigurationError

RED = "#b3261e"
ROWS = [
    ("zero-shot", "TREC", 0.0, 0.25, 0.0),
    ("real prompt", "TREC", math.inf, 0.75, 0.05),
    ("voting", "TREC", 8.0, 0.625, 0.02),
    ("voting", "TREC", 1.0, 0.5, 0.03),
    ("voting", "SST-2", 1.0, 0.875, 0.01),
]


def result(name: str = "real prompt", *, shift: float = 1.0, **changes: Any) -> MembershipResult:
    coins = np.random.default_rng(4)
    given: dict[str, Any] = {
        "name": name,
        "reads": "label probabilities",
        "num_records": 4,
        "nonmembers": "any",
        "claim": None,
        "member_scores": 1 / (1 + np.exp(-coins.normal(size=(30, 1)) - shift)),
        "nonmember_scores": 1 / (1 + np.exp(-coins.normal(size=(30, 10)))),
    }
    return MembershipResult(**(given | changes))


def words(figure: Any) -> str:
    return "\n".join(text.get_text() for text in figure.findobj(lambda one: hasattr(one, "get_text")))


class TestRoc:
    def test_a_curve_and_its_band_are_the_results_and_stand_in_both_panels(self) -> None:
        found = result(claim=Claim(1.0, 0.0, "replace_one"))
        [axes] = plot_roc([found]).axes
        [low] = axes.child_axes
        for panel in (axes, low):
            guessing, curve, allowed = panel.lines
            rates, mean = map(np.asarray, curve.get_data())
            assert np.abs(mean - found.curve.at(rates))[rates > 0.05].max() < 0.1
            assert np.asarray(guessing.get_data()[0]).tolist() == np.asarray(guessing.get_data()[1]).tolist()
            assert np.stack(allowed.get_data()).tolist() == np.stack(found.claim.corners).tolist()
            assert len(panel.collections) == 1
            edges = panel.collections[0].get_paths()[0].vertices[:, 1]
            assert edges.min() <= mean.min()
            assert edges.max() >= mean[-2]
        assert (low.get_xscale(), low.get_yscale()) == ("log", "log")
        assert (axes.get_xscale(), axes.get_yscale()) == ("linear", "linear")

    def test_the_legend_gives_the_numbers_and_the_picture_its_notice(self) -> None:
        found = result("costs $5 and $6", claim=Claim(0.5, 1e-5, "add_remove"))
        figure = plot_roc([found], title="TREC")
        shown = words(figure)
        assert f"AUC {found.auc:.2f}, TPR {100 * found.tpr_at():.0f} % at 1 % FPR" in shown
        assert r"costs \$5 and \$6" in shown
        assert "allowed by epsilon 0.5 (add_remove)" in shown
        assert NOTICE in shown
        assert "TREC" in shown

    def test_what_claims_nothing_is_warm_and_what_claims_something_is_cold(self) -> None:
        claim = Claim(50.0, 0.0, "replace_one")
        results = [result(), result("a", claim=claim), result("b"), result("c", claim=claim)]
        figure = plot_roc(results)
        drawn = [to_hex(line.get_color()) for line in figure.axes[0].lines[1:]]
        assert drawn == [RED, "#2f6690", "#e07a1f", "#3a7d44"]
        assert "allowed by" not in words(figure)  # a claim that allows everything has no line


class TestProbabilities:
    def test_each_panel_has_shares_of_members_and_others_with_their_means(self) -> None:
        found = result()
        axes = plot_probabilities([found, result("another")]).axes[0]
        others, members = axes.lines
        assert others.get_xdata()[0] == pytest.approx(found.nonmember_scores.mean())
        assert members.get_xdata()[0] == pytest.approx(found.member_scores.mean())
        assert to_hex(members.get_color()) == RED
        filled = [patch for patch in axes.patches if type(patch).__name__ == "Rectangle"]
        assert sum(bar.get_height() for bar in filled) == pytest.approx(2.0)  # each kind adds up to 1
        assert axes.get_xlabel() == "probability of the right label"
        assert f"AUC {found.auc:.2f}" in axes.get_title(loc="left")

    def test_scores_that_are_no_probabilities_have_an_axis_of_their_own(self) -> None:
        found = result(member_scores=[[7.0]], nonmember_scores=[[-3.0, 2.0]])
        [axes] = plot_probabilities([found]).axes
        assert axes.get_xlabel() == "score of the right label"
        low, high = axes.get_xlim()
        assert low <= -3.0 < 7.0 <= high

    def test_four_results_have_four_panels_and_one_notice(self) -> None:
        figure = plot_probabilities([result(str(number)) for number in range(4)])
        assert [axes.get_visible() for axes in figure.axes] == [True] * 4 + [False] * 2
        assert words(figure).count(NOTICE) == 1


def audited(check: str, lower: float | None, claimed: float | None, verdict: Any = "sound") -> AuditResult:
    return AuditResult(check=check, verdict=verdict, lower_bound=lower, claimed_epsilon=claimed)


class TestClaimedAndAudited:
    def test_bars_are_claims_and_bounds_in_order_from_the_top(self) -> None:
        checks = [
            audited("voting", 1.5, 2.0),
            audited("inclusion", None, None),
            audited("planted", 3.0, 1.0, "violated"),
            audited("short", 0.0, 4.0, "undecided"),
        ]
        [axes] = plot_claimed_audited(checks).axes
        assert [text.get_text() for text in axes.get_yticklabels()] == ["voting", "planted", "short"]
        claimed, bounds = (list(bars) for bars in axes.containers)
        assert [bar.get_width() for bar in claimed] == [2.0, 1.0, 4.0]
        assert [bar.get_width() for bar in bounds] == [1.5, 3.0, 0.0]
        assert [to_hex(bar.get_facecolor()) == RED for bar in bounds] == [False, True, False]
        said = ["1.5 of 2", "3 of 1: violated", "0 of 4: undecided"]
        assert [text.get_text() for text in axes.texts] == said
        assert axes.get_ylim()[0] > axes.get_ylim()[1]

    def test_a_bound_without_an_end_is_cut_and_said(self) -> None:
        [axes] = plot_claimed_audited([audited("no noise", math.inf, 2.0, "violated")]).axes
        assert 2.0 < axes.containers[1][0].get_width() < axes.get_xlim()[1]
        assert axes.texts[0].get_text() == "inf of 2: violated"


class TestUtility:
    def test_private_methods_are_lines_over_epsilon_and_the_others_levels(self) -> None:
        trec, sst2 = (axes for axes in plot_utility(ROWS).axes if axes.get_visible())
        assert (trec.get_title(loc="left"), sst2.get_title(loc="left")) == ("TREC", "SST-2")
        levels = {line.get_linestyle(): line.get_ydata()[0] for line in trec.lines if len(line.get_xdata()) == 2}
        assert levels[":"] == 0.25
        assert levels["--"] == 0.75
        [bars] = trec.containers
        assert np.stack(bars.lines[0].get_data()).tolist() == [[1.0, 8.0], [0.5, 0.625]]
        assert np.ptp(bars.lines[2][0].get_segments()[1], axis=0)[1] == pytest.approx(2 * 0.02)
        assert [tick.get_text() for tick in trec.get_xticklabels()] == ["1", "8"]
        assert trec.get_xscale() == "log"

    def test_methods_are_in_the_legend_once_and_stand_aside_of_each_other(self) -> None:
        figure = plot_utility([*ROWS, ("few-shot", "TREC", 1.0, 0.5, 0.01)])
        [legend] = figure.legends
        assert [text.get_text() for text in legend.get_texts()] == ["zero-shot", "real prompt", "voting", "few-shot"]
        first, second = (bars.lines[0].get_xdata()[0] for bars in figure.axes[0].containers)
        assert first < 1.0 < second

    def test_four_data_sets_make_a_square(self) -> None:
        figure = plot_utility([("voting", name, 1.0, 0.5, 0.1) for name in "abcd"])
        assert [axes.get_subplotspec().get_gridspec().ncols for axes in figure.axes] == [2] * 4

    def test_levels_alone_have_no_epsilons(self) -> None:
        [axes] = plot_utility(ROWS[:2]).axes
        assert list(axes.get_xticks()) == []


EVERY = [
    (plot_roc, [result()]),
    (plot_probabilities, [result()]),
    (plot_claimed_audited, [audited("voting", 1.0, 2.0)]),
    (plot_utility, ROWS),
]


@pytest.mark.parametrize(("plot", "given"), EVERY, ids=lambda one: getattr(one, "__name__", "rows"))
class TestEveryPicture:
    def test_is_written_where_it_is_asked_for(self, plot: Any, given: Any, tmp_path: Path) -> None:
        plot(given, tmp_path / "picture.png")
        assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")

    def test_of_nothing_is_refused(self, plot: Any, given: Any) -> None:
        with pytest.raises(ConfigurationError, match="at least one"):
            plot([])

    def test_needs_matplotlib(self, plot: Any, given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
            monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(ConfigurationError, match=r"langchain-dpicl\[plot\]"):
            plot(given)


def test_checks_without_an_epsilon_alone_make_no_picture() -> None:
    with pytest.raises(ConfigurationError, match="at least one"):
        plot_claimed_audited([audited("inclusion", None, None)])
