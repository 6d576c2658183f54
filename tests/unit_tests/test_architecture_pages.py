"""The pages for people who change or audit the package name the files that are there."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from pathlib import Path

from tests.check_house import PACKAGE, core_of, files_of_a_vote, modules_of

ROOT = Path(__file__).resolve().parents[2]
AUDITED = ROOT / "docs" / "auditing-the-core.md"
ARCHITECTURE = ROOT / "docs" / "architecture.md"


def named(page: Path) -> set[str]:
    """Returns the package's files and folders that a page names in backticks."""
    text = page.read_text(encoding="utf-8")
    return {name.rstrip("/") for name in re.findall(r"`([\w/]+(?:\.py|/))`", text) if not name.startswith("tests/")}


@functools.cache
def core() -> frozenset[str]:
    modules = modules_of(PACKAGE)
    return frozenset(modules[name].relative_to(PACKAGE).as_posix() for name in core_of(modules))


def test_an_auditor_is_told_every_file_that_the_core_imports_and_no_other() -> None:
    text = AUDITED.read_text(encoding="utf-8").partition("## What runs beside the core")[0]
    rows = re.findall(r"^- `([\w/]+\.py)`: ", text, flags=re.MULTILINE)
    assert sorted(rows) == sorted(core())


def test_an_auditor_is_told_what_of_the_folders_of_the_core_runs_for_a_vote_beside_it() -> None:
    ran = {Path(file).relative_to(PACKAGE).as_posix() for file in files_of_a_vote(with_build=True)}
    beside = {file for file in ran - core() if file.startswith(("privacy/", "release/", "budget/"))}
    section = AUDITED.read_text(encoding="utf-8").partition("## What runs beside the core")[2].partition("\n## ")[0]
    assert sorted(re.findall(r"^- `([\w/]+\.py)`: ", section, flags=re.MULTILINE)) == sorted(beside)


def test_an_auditor_finds_a_page_for_every_file_beside_the_core() -> None:
    files = {
        path.relative_to(PACKAGE)
        for each in ("privacy/extensions", "release")
        for path in (PACKAGE / each).glob("[!_]*.py")
    }
    pages = (ROOT / "docs" / "proofs").glob("*.md")
    proofs = {name for page in pages for name in re.findall(r"\w+\.py\b", page.read_text(encoding="utf-8"))}
    assert [file for file in files if file.name not in proofs and file.as_posix() not in named(AUDITED)] == []


def test_the_pages_name_files_and_folders_that_are_there() -> None:
    for page in (ARCHITECTURE, AUDITED):
        assert [name for name in sorted(named(page)) if not (PACKAGE / name).exists()] == [], page.name


def test_the_picture_is_that_of_the_import_contract() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "tools" / "house.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
