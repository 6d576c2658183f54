"""The environment of the tests is locked: every package at one version, by hashes, for every Python that is supported."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
LOCK = (ROOT / "tests" / "constraints.txt").read_text()
ENTRIES = re.findall(r"^(?P<requirement>[^ #].*?)(?P<hashes>(?: \\\n {4}--hash=\S+)*)\n", LOCK, re.MULTILINE)
PINS = [Requirement(requirement) for requirement, _ in ENTRIES]
PLACES = [
    {"python_version": python, "python_full_version": f"{python}.1", "sys_platform": system, "extra": ""}
    for python in ("3.11", "3.12", "3.13")
    for system in ("linux", "darwin")
]


def asked_for() -> list[Requirement]:
    """What make puts into the environment of the tests, but torch, and what builds the package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    groups, extras = project["dependency-groups"], project["project"]["optional-dependencies"]
    asked = [*project["project"]["dependencies"], *extras["plot"], *groups["test"], *groups["lint"]]
    asked += [line for line in (ROOT / "tests" / "lock.in").read_text().splitlines() if not line.startswith("#")]
    found = [Requirement(one) for one in [*asked, *project["build-system"]["requires"]]]
    return [one for one in found if one.name != "torch"]


def test_every_line_is_read() -> None:
    assert len(ENTRIES) > 100
    read = sum(1 + len(hashes.split("--hash=")[1:]) for _, hashes in ENTRIES)
    assert read == len(LOCK.splitlines())


def test_every_package_is_at_one_version_by_its_hashes() -> None:
    for pin, (_, hashes) in zip(PINS, ENTRIES, strict=True):
        assert re.fullmatch(r"==[^*,]+", str(pin.specifier)), pin
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", hashes), pin


def test_no_package_is_taken_from_an_address() -> None:
    assert "://" not in LOCK
    assert not [pin for pin in PINS if pin.url]
    assert not re.search(r"^-", LOCK, re.MULTILINE)


@pytest.mark.parametrize("place", PLACES, ids=lambda place: f"{place['python_version']} {place['sys_platform']}")
def test_all_that_pyproject_asks_for_is_locked_at_a_version_that_it_allows(place: dict[str, str]) -> None:
    pins: dict[str, list[Requirement]] = {}
    for pin in PINS:
        if pin.marker is None or pin.marker.evaluate(place):
            pins.setdefault(canonicalize_name(pin.name), []).append(pin)
    assert [found for found in pins.values() if len(found) > 1] == []
    for asked in asked_for():
        found = pins.get(canonicalize_name(asked.name))
        assert found, f"{asked}: not in the lock; run make lock"
        [version] = [one.version for one in found[0].specifier]
        assert asked.specifier.contains(version), f"{asked}: the lock has {version}; run make lock"


def test_every_extra_brings_something_that_the_package_imports() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    code = "\n".join(path.read_text() for path in (ROOT / "langchain_dpicl").rglob("*.py"))
    for name, needed in extras.items():
        modules = [re.split(r"[\[<>=~! ;]", one)[0].replace("-", "_") for one in needed]
        assert name == "all" or any(re.search(rf"\b{module}\b", code) for module in modules), name


def test_a_release_is_built_by_what_is_locked_alone() -> None:
    [rule] = re.findall(r"^\.venv-release/\.ready:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    [names] = re.findall(r"'/\^\(([a-z|-]+)\)==/,", rule)
    needed = [
        one for one in map(Requirement, metadata.requires("hatchling") or ()) if not one.marker or one.marker.evaluate()
    ]
    assert {canonicalize_name(name) for name in names.split("|")} == {
        "hatchling",
        *(canonicalize_name(one.name) for one in needed),
    }
    assert set(names.split("|")) <= {pin.name for pin in PINS}
    assert re.search(r"\.venv-release/build/bin/python -m pip install \$\(LOCKED\)", rule)
    assert rule.count(".venv-release/build/bin/python -m pip install") == 1
    release = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["release"]
    assert "hatchling" not in {Requirement(one).name for one in release}


def imported(body: list[ast.stmt]) -> Iterator[str]:
    """The packages that statements import when they run, but those that only type checkers read."""
    for each in body:
        if isinstance(each, ast.Import):
            yield from (one.name.partition(".")[0] for one in each.names)
        elif isinstance(each, ast.ImportFrom):
            yield str(each.module).partition(".")[0]
        elif isinstance(each, ast.If) and ast.unparse(each.test) == "TYPE_CHECKING":
            yield from imported(each.orelse)
        elif isinstance(each, ast.If | ast.Try | ast.With):
            yield from imported([one for one in ast.walk(each) if isinstance(one, ast.Import | ast.ImportFrom)])


def test_what_a_module_imports_when_it_is_imported_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    asked = [*project["dependencies"], *(one for extra in extras for one in extra)]
    declared = {canonicalize_name(Requirement(one).name) for one in asked}
    for path in (ROOT / "langchain_dpicl").rglob("*.py"):
        needed = {*imported(ast.parse(path.read_text()).body)} - sys.stdlib_module_names
        assert {canonicalize_name(name) for name in needed} <= declared, path


def test_torch_is_held_at_one_version_that_pyproject_allows() -> None:
    torch = Requirement((ROOT / "tests" / "torch.txt").read_text().strip())
    [version] = [one.version for one in torch.specifier]
    assert (torch.name, str(torch.specifier)) == ("torch", f"=={version}")
    test = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["test"]
    assert all(one.specifier.contains(version) for one in map(Requirement, test) if one.name == "torch")
