"""The demo in small: what it measures is measured, and its picture shows it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from langchain_dpicl import EmbeddedLLM
from tests.example_files import example

pytestmark = pytest.mark.filterwarnings("ignore::langchain_dpicl.exceptions.RestsOnGuessWarning")


@pytest.fixture(scope="module")
def demo() -> Iterator[ModuleType]:
    with example("demo", SIZE=200, SCORED=10, SHOTS=1, EPSILONS=(1.0, 0.1)) as module:
        yield module
    sys.modules.pop("clinic_notes", None)


@pytest.fixture(scope="module")
def clinic(demo: ModuleType) -> Any:
    return demo.measure(demo.CLINIC, EmbeddedLLM(), repeats=2, queries=2, epsilons=demo.EPSILONS)()


def test_every_method_has_its_answers_and_only_those_made_of_records_an_attacker(demo: ModuleType, clinic: Any) -> None:
    names = [demo.private_name(epsilon) for epsilon in demo.EPSILONS]
    assert [row.name for row in clinic.rows[2:]] == [demo.PUBLIC, *names, demo.REAL]
    assert [len(row.right) for row in clinic.rows] == [1, 2, 2, 2, 2, 2]
    assert [len(row.attacked) for row in clinic.rows] == [0, 0, 0, 2, 2, 8]
    assert all(0 <= value <= 1 for row in clinic.rows for value in (*row.right, *row.attacked))


def test_the_attacker_finds_real_records_and_a_prompt_of_them_copies_one(demo: ModuleType, clinic: Any) -> None:
    found = clinic.of(demo.REAL).attacked
    assert sum(found) / len(found) > 0.75
    assert clinic.copied["text"] in {record["text"] for record in demo.CLINIC.records()}


def test_what_is_released_is_public_text_and_its_labels(demo: ModuleType, clinic: Any) -> None:
    assert {one["text"] for one in clinic.shown.released} <= set(demo.clinic_notes.PUBLIC_LINES)
    assert {one["label"] for one in clinic.shown.released} <= set(demo.QUEUES)
    assert len(clinic.shown.reports) == 2
    assert all("epsilon 1, delta 1e-06" in report for report in clinic.shown.reports)
    assert all("unit = all records of one 'person'" in report for report in clinic.shown.reports)


def test_public_lines_are_sorted_into_all_queues_alike(demo: ModuleType) -> None:
    for domain in (demo.BANK, demo.CLINIC):
        assert len(set(domain.public)) == 4 * len(demo.QUEUES)


def test_every_measurement_is_handed_to_the_other_processes(demo: ModuleType) -> None:
    handed: list[Any] = []

    def submit(work: Any, *given: Any) -> Any:
        handed.append(work)
        return SimpleNamespace(result=lambda: None)

    demo.measure(demo.BANK, EmbeddedLLM(), repeats=3, queries=1, epsilons=demo.EPSILONS, submit=submit)
    assert len(handed) == len(demo.EPSILONS) + 5


def test_a_record_and_a_guess_are_told_apart_by_the_scores(demo: ModuleType) -> None:
    scores = SimpleNamespace(member_scores=[[0.9, 0.8], [0.5, 0.5]], nonmember_scores=[[0.1, 0.2], [0.5, 0.5]])
    assert demo.success(scores) == [1.0, 0.5]


def test_the_picture_is_drawn(demo: ModuleType, clinic: Any, tmp_path: Path) -> None:
    assert demo.draw([clinic], tmp_path).stat().st_size > 10_000
