"""Every closed class and every event has a proof page, and every proof page has its five parts.

Five parts: a statement, a sensitivity, a theorem with its source, code that exists, and tests that exist and name the
class. What a page says is read by people; that nothing is missing, and that no pointer leads nowhere, is checked here.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

import langchain_dpicl.privacy
from langchain_dpicl.privacy.extensions.registry import EVENT_TYPES
from langchain_dpicl.privacy.mechanisms.bounded import Aggregation, BoundedSum, ClosedClass, NamedPart, Sensitivity
from langchain_dpicl.privacy.mechanisms.release_plan import Mechanism, NoisyMax, Sampler

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "proofs"
PRIVACY = ROOT / "langchain_dpicl" / "privacy"
INDEX = FOLDER / "README.md"
PAGES = {path.name: path.read_text() for path in sorted(FOLDER.glob("*.md")) if path != INDEX}

VALUES = {ClosedClass, NamedPart, Sensitivity, BoundedSum, Aggregation, Sampler, Mechanism, NoisyMax}
"""Closed, but no mechanism, sampler or aggregation: bases, a bound, and what carries both to a mechanism."""

PARAMETERS = {"test_noise_multiplier"}
"""Names that look like tests and are parameters of a mechanism."""

PARTS = ("Statement", "Sensitivity", "Theorem")
FEWEST_WORDS = 20


def closed_classes() -> dict[str, type]:
    """Returns every class of the vault that nobody may derive from, and every event, by name."""
    vault = langchain_dpicl.privacy
    modules = [found.name for found in pkgutil.walk_packages(vault.__path__, f"{vault.__name__}.")]
    values = [value for module in modules for value in vars(importlib.import_module(module)).values()]
    closed = [value for value in values if isinstance(value, type) and issubclass(value, ClosedClass)]
    proved = [cls for cls in [*EVENT_TYPES, *closed] if cls not in VALUES and not cls.__name__.startswith("_")]
    return {cls.__name__: cls for cls in proved}


CLASSES = closed_classes()


@functools.cache
def files_of_tests() -> dict[str, str]:
    """Returns every test file by name; names are unique enough for a pointer without its folder."""
    return {path.name: path.read_text() for path in (ROOT / "tests").rglob("*.py")}


@functools.cache
def names_in_tests() -> frozenset[str]:
    return frozenset(
        re.findall(r"^\s*(?:async )?(?:def|class) (\w+)", "\n".join(files_of_tests().values()), re.MULTILINE)
    )


@dataclass(frozen=True)
class Page:
    """What a proof page points to and how it is divided."""

    code: str
    test: str
    sections: tuple[tuple[str, str], ...]
    text: str

    @classmethod
    def of(cls, text: str) -> Page:
        head, *rest = re.split(r"^## ", text, flags=re.MULTILINE)
        pointers = dict(re.findall(r"\b(Code|Tests|Events?): (.*?)(?=\b(?:Code|Tests|Events?): |\Z)", head, re.DOTALL))
        sections = tuple((part.partition("\n")[0], part.partition("\n")[2]) for part in rest)
        return cls(pointers.get("Code", ""), pointers.get("Tests", ""), sections, text)

    def named(self, pointers: str) -> tuple[list[str], list[str]]:
        """Returns the files and the other names in back quotes."""
        quoted = re.findall(r"`([^`]+)`", pointers)
        files = [name for name in quoted if name.endswith(".py")]
        return files, [name for name in quoted if name not in files]

    def part(self, name: str) -> str:
        """Returns everything under headings that begin with a part's name; numbers in front of it do not count."""
        return "\n".join(
            body for heading, body in self.sections if re.match(rf"(?:\d+\. )?{name}\b", heading, re.IGNORECASE)
        )


def faults(text: str) -> list[str]:
    """Returns what a page lacks, and what it points to that is not there."""
    page = Page.of(text)
    found = [f"no {name.lower()}" for name in PARTS if len(page.part(name).split()) < FEWEST_WORDS]
    if not re.search(r"\([^)]*\b(?:19|20)\d\d[^)]*\)|\]\([\w-]+\.md", page.part("Theorem")):
        found.append("a theorem without a source")
    return found + code_faults(page) + pointer_faults(page)


def code_faults(page: Page) -> list[str]:
    files, names = page.named(page.code)
    places = [ROOT / file if "/" in file else next(PRIVACY.rglob(file), PRIVACY / file) for file in files]
    found = ["no code"] if not files else []
    found += [f"no such file: {file}" for file, place in zip(files, places, strict=True) if not place.is_file()]
    sources = "\n".join(place.read_text() for place in places if place.is_file())
    last = {name: name.rpartition(".")[2] for name in names}
    return found + [
        f"not in the code it names: {name}"
        for name, own in last.items()
        if not re.search(rf"^\s*(?:async )?(?:def|class) {own}\b", sources, re.MULTILINE)
    ]


def pointer_faults(page: Page) -> list[str]:
    files, _ = page.named(page.test)
    found = ["no test"] if not files else []
    for file in files:
        there = (ROOT / file).is_file() if "/" in file else file in files_of_tests()
        found += [] if there else [f"no such test file: {file}"]
    quoted = set(re.findall(r"`((?:test|_?plant)_\w+|Test\w+)`", page.text)) - PARAMETERS
    found += [f"no such test: {name}" for name in sorted(quoted - names_in_tests())]
    sources = "\n".join(files_of_tests().get(Path(file).name, "") for file in files)
    proved = [name for name in page.named(page.code)[1] if name in CLASSES]
    return found + [f"its tests never name {name}" for name in proved if not re.search(rf"\b{name}\b", sources)]


def proved_on() -> dict[str, list[str]]:
    """Returns the pages whose code pointer names a closed class, by class."""
    named = {file: Page.of(text).named(Page.of(text).code)[1] for file, text in PAGES.items()}
    return {name: [file for file, names in named.items() if name in names] for name in CLASSES}


@pytest.mark.parametrize("file", PAGES)
def test_a_proof_page_has_its_five_parts_and_its_pointers_lead_somewhere(file: str) -> None:
    assert faults(PAGES[file]) == []


def test_every_closed_class_and_every_event_is_proved_on_exactly_one_page() -> None:
    assert len(CLASSES) > 25
    assert {name: files for name, files in proved_on().items() if len(files) != 1} == {}


def test_the_index_names_each_class_with_its_page() -> None:
    lines = re.findall(r"^\| \[[\w-]+\]\(([\w-]+\.md)\) \| (.*) \|$", INDEX.read_text(), re.MULTILINE)
    rows = [(name, file) for file, names in lines for name in re.findall(r"`(\w+)`", names)]
    assert dict(rows) == {name: files[0] for name, files in proved_on().items()}
    assert len(rows) == len(CLASSES)
    assert set(PAGES) <= set(re.findall(r"\]\(([\w-]+\.md)\)", INDEX.read_text()))


def test_every_event_that_a_page_names_exists() -> None:
    found = {name for text in PAGES.values() for name in re.findall(r"`(\w+Event)\b", text)}
    assert found <= {event.__name__ for event in EVENT_TYPES}


@pytest.mark.parametrize(
    ("broken", "fault"),
    [
        (("## Statement", "## Remarks"), "no statement"),
        (("## Sensitivity", "## Remarks"), "no sensitivity"),
        (("## Theorem", "## Remarks"), "no theorem"),
        (("(2020)", "recently"), "a theorem without a source"),
        (("Code:", "See"), "no code"),
        (
            ("release_plan.py`. Event", "machines.py`. Event"),
            "no such file: langchain_dpicl/privacy/mechanisms/machines.py",
        ),
        (("`GumbelMechanism`", "`GompertzMechanism`"), "not in the code it names: GompertzMechanism"),
        (
            ("test_noise.py", "test_silence_of_noise.py"),
            "no such test file: tests/statistical_tests/test_silence_of_noise.py",
        ),
        (("test_clipped_logits_are_sampled", "test_clipped_logits_are_samples"), "no such test: "),
        (("tests/contracts/mechanism.py", "tests/canary.py"), "its tests never name"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0].strip("#:` "),
)
def test_a_page_that_lacks_a_part_is_found_out(broken: tuple[str, str], fault: str) -> None:
    text = PAGES["gumbel.md"]
    if fault.startswith("a theorem"):
        text = re.sub(r"\([^)]*(?:19|20)\d\d\)", "", text)
    if fault.startswith("its tests"):
        text = re.sub(r"^Tests: .*$", "Tests: `tests/contracts/mechanism.py`.", text, flags=re.MULTILINE)
    assert faults(PAGES["gumbel.md"]) == []
    assert any(found.startswith(fault) for found in faults(text.replace(*broken)))
