"""What a report shows of synthetic documents is held against tickets, share and price: every edit is seen."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from langchain_dpicl import Budget, DocumentSynthesizer, PrivateExamples, verify_report
from langchain_dpicl.backends.fake import FakeBackend, word_copier
from langchain_dpicl.options import Decoding, Rows, Topics
from tests.sealed_files import component, edited, shown

WORDS = [" my", " card"]
Edit = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def saved() -> dict[str, Any]:
    """A released store as JSON values."""
    made = DocumentSynthesizer.from_private_examples(
        PrivateExamples(["my card"] * 300, public_size=600),
        llm=FakeBackend(word_copier(WORDS), vocabulary=WORDS),
        topics=Topics(("card", "boat", "film"), 2, min_units=100),
        budget=Budget(epsilon=8.0, delta=1e-6),
        epsilon=6.0,
        documents_per_topic=2,
        max_tokens=2,
        decoding=Decoding(candidates="all"),
        rows=Rows(units=10),
    )
    return json.loads(made.run(progress=False).to_json())


def place(saved: dict[str, Any]) -> dict[str, Any]:
    return next(each for each in saved["report"]["budget"]["datasets"] if "topic 1" in each["labels"])


def root(saved: dict[str, Any]) -> dict[str, Any]:
    return next(each for each in saved["report"]["budget"]["datasets"] if "redeclared" not in each)


def test_what_was_released_is_right(saved: dict[str, Any]) -> None:
    found = verify_report(edited(saved, lambda _: None))
    assert found.ok
    assert found.epsilon <= 6.0


EDITS: dict[str, Edit] = {
    "fewer keywords of a unit": lambda s: shown(s)["topics"]["rule"].update(max_values=1),
    "another noise": lambda s: shown(s)["topics"]["mechanism"].update(noise_multiplier=99.0),
    "another kind of histogram": lambda s: shown(s)["topics"].update(
        rule={"field": None, "max_values": 1, "values": None, "fold_case": True}
    ),
    "another field": lambda s: shown(s)["topics"]["rule"].update(field="other"),
    "no histogram": lambda s: shown(s).pop("topics"),
    "something beside": lambda s: shown(s).update(more=1),
    "an odd least count": lambda s: shown(s).update(least_units=0),
    "another epsilon": lambda s: shown(s).update(epsilon=0.1),
    "another delta": lambda s: shown(s).update(delta=1e-9),
    "another adjacency": lambda s: shown(s).update(adjacency="replace_one"),
    "no texts": lambda s: shown(s).update(generation=7),
    "another noise on texts": lambda s: shown(s)["generation"].update(noise_multiplier=99.0),
    "more texts": lambda s: shown(s)["generation"].update(shots_per_label=9),
    "a cheaper price of texts": lambda s: shown(s)["generation"].update(epsilon=0.1),
    "another rate": lambda s: shown(s)["generation"]["labels"][0].update(sampling_rate=0.5),
    "a smaller gap": lambda s: component(s).update(implementation_delta=0.0),
    "another data set": lambda s: component(s).update(partition="private-examples"),
    "no data set": lambda s: component(s).update(partition="nowhere"),
    "a split by a field": lambda s: place(s)["redeclared"].pop("by"),
    "a split by something else": lambda s: place(s)["redeclared"].update(by="somebody"),
    "no ticket of a place": lambda s: component(s)["tickets"].pop(),
    "two histograms": lambda s: component(s)["tickets"][0].update(max_count=2),
    "another plan of the release": lambda s: s["plan"].update(least_units=1),
    "more topics": lambda s: s.update(topics=[["card", 300], ["boat", 200], ["film", 150]]),
    "a topic of no vocabulary": lambda s: s.update(topics=[["canary", 300]], documents=[]),
    "a topic twice": lambda s: s.update(topics=[["card", 300], ["card", 200]]),
    "a topic below the least count": lambda s: s["topics"].append(["boat", 3]),
    "a document too many": lambda s: s["documents"].append({"text": "x", "topic": "card", "number": 2}),
    "a document twice": lambda s: s["documents"].append(s["documents"][0]),
    "a document of no topic": lambda s: s["documents"].append({"text": "x", "topic": "boat", "number": 0}),
    "documents of another form": lambda s: s.update(documents=[7]),
    "a document with more than it has": lambda s: s["documents"][0].update(epsilon=0),
    "documents and no topics": lambda s: (s.pop("topics"), s["documents"].append({**s["documents"][0], "number": 9})),
    "topics of another form": lambda s: s.update(topics=7),
    "units of another kind behind the split": lambda s: root(s).update(
        unit_key="hospital", unit="all records of one 'hospital'"
    ),
    "longer texts behind the split": lambda s: root(s).update(max_chars=7),
    "another component": lambda s: s["report"].update(component="other"),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_is_seen(saved: dict[str, Any], name: str) -> None:
    found = verify_report(edited(saved, EDITS[name]))
    assert not found.ok
    assert found.problems


def test_texts_on_samples_of_a_fixed_size_are_seen(saved: dict[str, Any]) -> None:
    found = verify_report(
        edited(saved, lambda s: shown(s)["generation"].update(sampling="fixed", overfill=1.0, rows="slots"))
    )
    assert any("a fixed-size sample needs replace_one and no labels" in problem for problem in found.problems)


def test_documents_that_nothing_paid_for_are_not_ok(saved: dict[str, Any]) -> None:
    budget = Budget(epsilon=1.0, delta=1e-6)
    data = {**saved, "report": {"private": False, "baseline": "instruction only", "epsilon": 0, "delta": 0}}
    assert not verify_report(data).ok
    assert verify_report(budget.report()).ok


def test_a_subset_of_the_documents_is_fine(saved: dict[str, Any]) -> None:
    assert verify_report(edited(saved, lambda s: s.update(documents=s["documents"][:1]))).ok
