"""The planner's page says what `dpicl plan` and a report say, with the keyboard and without JavaScript."""

from __future__ import annotations

import copy
import importlib
import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from langchain_dpicl.cli.main import main
from langchain_dpicl.reports.rendering import _percent_up, belief

DOCS = Path(__file__).resolve().parents[2] / "docs"
CELLS = ((0.25, 500, 10_000, 10), (1.0, 2_000, 1_000, 4), (8.0, 50_000, 10, 2))


@pytest.fixture
def planner(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(DOCS / "tools")
    return importlib.import_module("planner")


@pytest.fixture
def small(planner: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A page of few values on each axis, as JSON returns it."""
    axes = {"epsilon": (0.25, 1.0), "records": (500, 2_000), "queries": (1_000,), "labels": (2, 4)}
    monkeypatch.setattr(planner, "AXES", axes)
    return json.loads(json.dumps(planner.computed()))


@pytest.mark.parametrize("chosen", CELLS)
def test_a_cell_is_what_the_command_prints(planner: Any, chosen: tuple[Any, ...], capsys: Any) -> None:
    epsilon, records, queries, labels = chosen
    assert all(value in values for value, values in zip(chosen, planner.AXES.values(), strict=True))
    command = f"plan --method voting --epsilon {epsilon:g} --delta 1e-6 --public-size {records} --max-queries {queries}"
    assert main([*command.split(), "--set", f"guess.labels={labels}", "--no-compare"]) == 0
    printed, cell = capsys.readouterr().out, planner.cell(*chosen)
    points = f"{cell['takes']} point{'' if cell['takes'] == 1 else 's'}"
    said = "right label {right} % ({low} to {high}), at most {at_most} % ".format(**cell)
    said += "({most_low} to {most_high}) whatever the noise; ".format(**cell)
    assert f"{said}the noise takes {points}\n" in printed
    calls = "{private:,} private + {public:,} public calls, {tokens_in:,} tokens in, {tokens_out:,} out".format(**cell)
    assert calls in printed
    assert ("advice   do not spend like this" in printed) == bool(cell["advises"])
    assert "rests on a GUESS" in printed


def test_beliefs_are_those_of_a_report(planner: Any) -> None:
    for prior, row in zip(planner.PRIORS, planner.beliefs(), strict=True):
        for epsilon, after in zip(planner.AXES["epsilon"], row, strict=True):
            said = _percent_up(belief(prior, epsilon, planner.DELTA))
            assert said == (f"{after:.1f} %" if after < 100 else "more than 99.9 %")
            assert after >= 100 * belief(prior, epsilon, planner.DELTA)


def test_a_cell_is_found_where_it_was_put(planner: Any, small: dict[str, Any]) -> None:
    for places in itertools.product(*planner.AXES.values()):
        chosen = dict(zip(planner.AXES, places, strict=True))
        assert planner.cell_of(small, **chosen) == planner.cell(**chosen)


def test_every_field_has_a_label_and_no_script_comes_from_elsewhere(planner: Any, small: dict[str, Any]) -> None:
    part = planner.page_part(small, "javascripts/planner.js")
    fields = re.findall(r'<(?:select|input) id="([^"]+)"', part)
    assert sorted(fields) == sorted(re.findall(r'<label for="([^"]+)"', part))
    assert len(fields) == len(planner.AXES) + 3
    assert re.findall(r'<script src="([^"]+)"', part) == ["javascripts/planner.js"]
    for text in (part, (DOCS / "javascripts" / "planner.js").read_text()):
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|fetch\(|import\(|innerHTML", text)


@pytest.mark.loopback
def test_the_form_is_used_with_the_keyboard_and_tables_stand_without_javascript(
    planner: Any, small: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a page that says anything else is found."""
    browser, check = importlib.import_module("browser"), importlib.import_module("check_site")
    program = browser.chromium()
    if program is None:
        pytest.skip("Chromium is not installed")
    shutil.copy(DOCS / "javascripts" / "planner.js", tmp_path)
    (tmp_path / "planner.html").write_text(
        f"<!doctype html><main><h1 id='planner'>Planner</h1>{planner.page_part(small, 'planner.js')}</main>"
    )
    other = copy.deepcopy(small)
    other["cells"][-1][0] += 1
    other["priors"].append(0.9)
    with browser.served(tmp_path) as address, browser.Browser(program) as chromium:
        assert check.planner(chromium, address, small) == []
        wrong = check.planner(chromium, address, other)
    assert capsys.readouterr().out.count("FAULT planner.html") == len(wrong)
    *forms, tables = wrong
    assert len(forms) == 2  # on a telephone and on a desktop
    assert all("'labels': 4}: expected " in fault for fault in forms)
    assert tables == "planner.html: without JavaScript 6 rows of its tables are seen"
