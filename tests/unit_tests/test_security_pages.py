"""SECURITY.md and the page of known limitations: links, addresses and numbers are those of the project."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from langchain_dpicl.privacy.second_opinions import PRV_MAX_COMPOSITIONS
from langchain_dpicl.reports.rendering import PROVED_EPSILON

ROOT = Path(__file__).resolve().parents[2]
SECURITY = ROOT / "SECURITY.md"
LIMITS = ROOT / "docs" / "known-limitations.md"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def anchors(page: Path) -> set[str]:
    """The places of a page that links may name, as GitHub makes them."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head).strip().lower().replace(" ", "-") for head in heads}


@pytest.mark.parametrize(
    "page",
    [SECURITY, LIMITS, ROOT / "docs" / "cli.md", ROOT / "docs" / "budget.md", ROOT / "docs" / "privacy-promise.md"],
    ids=lambda p: p.name,
)
def test_links_lead_to_a_page_and_to_a_place_in_it(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    assert links
    for link in links:
        if link.startswith("https://"):
            continue
        file, _, place = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.is_file(), link
        assert not place or place in anchors(target), link


def test_faults_are_reported_privately_to_the_project_itself() -> None:
    text = SECURITY.read_text()
    home = PROJECT["urls"]["Homepage"]
    assert f"<{home}/security/advisories/new>" in text
    addresses = re.findall(r"https://[^\s>)]+", text)
    assert {address for address in addresses if not address.startswith(home + "/")} == set()
    assert re.findall(r"[\w.+-]+@[\w-]+\.[\w.]+", text) == []  # nobody reads such a box


def test_limits_that_are_numbers_are_those_of_the_code() -> None:
    text = " ".join(LIMITS.read_text().split())
    assert f"total epsilon of {PROVED_EPSILON:g} the gap" in text
    assert f"beyond {PRV_MAX_COMPOSITIONS:,} compositions" in text
    pinned = next(item for item in PROJECT["dependencies"] if item.startswith("prv-accountant"))
    assert pinned == "prv-accountant>=0.2,<0.3"  # the page speaks of 0.2.0


def test_floors_that_are_told_are_those_that_are_declared_and_none_is_left_out() -> None:
    """A floor that is lowered, or a new dependency, asks for a look at its advisories."""
    declared = [
        *PROJECT["dependencies"],
        *(one for extra in PROJECT["optional-dependencies"].values() for one in extra),
    ]
    floors = dict(re.fullmatch(r"([\w-]+)(?:\[\w+\])?>=([\d.]+).*", one).groups() for one in declared if ">=" in one)  # type: ignore[union-attr]
    rows = re.findall(r"^  \| ([\w, -]+) \| ([\d.]+|as declared) \| (.+) \| .+ \|$", SECURITY.read_text(), re.MULTILINE)
    told = {name: (floor, advisories) for names, floor, advisories in rows for name in names.split(", ")}
    assert set(told) == set(floors)
    for name, (floor, advisories) in told.items():
        assert floor in {floors[name], "as declared"}
        assert floor != "as declared" or "CVE" not in advisories


def test_every_limitation_says_how_bad_it_is_and_a_serious_one_what_to_do() -> None:
    listed = LIMITS.read_text().partition("\n### ")[0]
    rows = [" ".join(row.split()) for row in re.findall(r"^- (.+(?:\n  .+)*)", listed, re.MULTILINE)]
    assert len(rows) > 40
    assert [row for row in rows if len(re.findall(r"\*\*(?:High|Medium|Low)\*\*", row)) != 1] == []
    serious = [row.partition("**High**")[2] for row in rows if "**High**" in row]
    assert len(serious) > 5
    assert [row for row in serious if not re.search(r": .{10}", row)] == []


def test_both_pages_travel_with_the_source_archive() -> None:
    include = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["sdist"][
        "include"
    ]
    assert {"/SECURITY.md", "docs"} <= set(include)
