"""Documents of a stream: each run pays for new blocks, has topics of its own, and says which blocks it read."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import pytest

from langchain_dpicl import DocumentSynthesizer, PrivacyBudgetCallbackHandler, PrivateExamples
from langchain_dpicl.backends.fake import FakeBackend, scripted
from langchain_dpicl.documents import DocumentsPlan, plan_documents
from langchain_dpicl.exceptions import ConfigurationError, PrivacyBudgetExceededError, RecordError
from langchain_dpicl.options import Rows, Topics
from langchain_dpicl.privacy._validate import Adjacency
from langchain_dpicl.privacy.accounting import epsilon_upper_bound
from langchain_dpicl.privacy.accounting.events import ComposedEvent, GaussianEvent, RepeatedEvent
from langchain_dpicl.privacy.extensions.stream_ledger import run_ticket
from langchain_dpicl.privacy.extensions.value_counts import split_by_topics
from langchain_dpicl.privacy.ledger.tickets import Ticket
from langchain_dpicl.released.documents import SyntheticDocuments
from langchain_dpicl.reports import verify_report
from langchain_dpicl.reports.ledger_audit import check_ledger
from langchain_dpicl.streams import PrivateStream
from tests.sealed_files import assert_found, sealed
from tests.stream_times import DAY, START

ENGINE = FakeBackend(scripted({" late": 0.6, " card": 0.4}), max_top_k=20)


def stream(weeks: int = 3, **declared: Any) -> PrivateStream:
    """Every week 400 people write of cards; of the second week on 400 others of boats; some weeks are still to come."""
    given = {"dataset_id": "notes", "time_key": "at", "unit_key": "user", "public_size": {7: 1000}}
    some = PrivateStream(**{**given, **declared})
    for week in range(-1, weeks):
        texts = ["a card was declined"] * 400 + (["the boat is late"] * 400 if week > 0 else [])
        some.extend(
            {"at": START + (7 * week - 1.7) * DAY - n % 7 * DAY, "user": n, "text": text}
            for n, text in enumerate(texts)
        )
    return some


def ledger(**options: Any) -> PrivacyBudgetCallbackHandler:
    return PrivacyBudgetCallbackHandler(8.0, 1e-6, **{"per": "30 days", **options})


def synthesizer(source: Any, budget: Any, **options: Any) -> DocumentSynthesizer:
    topics = Topics(("card", "boat", "train"), min_units=100)  # noise reaches that with a chance far below 1e-6
    given = {"topics": topics, "documents_per_topic": 0, "epsilon": 8.0, "component": "docs"}
    return DocumentSynthesizer.from_private_examples(source, budget=budget, **{**given, **options})


def lines(budget: Any, kind: str) -> list[Any]:
    return [line.body for line in budget.budget._store.records() if line.kind == kind]


def test_a_plan_that_never_ran_fixes_no_range(clock: list[float]) -> None:
    budget, some = ledger(), stream(public_size={7: 1000, 14: 1800})
    for days in (7, 14):
        assert synthesizer(some.rolling(days, every=7), budget).component == "docs"


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_each_week_releases_words_of_its_own_topics_from_one_standing_share(
    adjacency: Adjacency, clock: list[float]
) -> None:
    budget, some = ledger(adjacency=adjacency), stream(weeks=12)
    made = []
    for _ in range(8):
        made.append(synthesizer(some.rolling(7, every=7), budget).run(progress=False))
        clock[0] += 7 * DAY
    (seal,), reserved = lines(budget, "seal"), lines(budget, "reserve")
    (ticket,) = seal["components"][0]["tickets"]
    assert (ticket["template"], ticket["label"], ticket["max_count"]) == ("run", None, 6)
    assert [later["blocks"][0] - sooner["blocks"][1] for sooner, later in itertools.pairwise(reserved)] == ([1] * 7)
    assert {line["dataset_id"] for line in lines(budget, "bind")} == {
        "notes",
        "notes by 10 topics of docs, 100 units each",
    }
    assert [sorted(topic for topic, _ in each.topics) for each in made[:3]] == [
        ["card"],
        ["boat", "card"],
        ["boat", "card"],
    ]
    budget.budget.verify()
    for each in made:
        verified = verify_report(each)
        assert verified.ok, verified.problems
    assert check_ledger(budget.budget._store).problems == ()
    assert budget.remaining_epsilon == 0


def test_documents_say_which_blocks_they_are_of_and_go_into_one_store(clock: list[float], tmp_path: Any) -> None:
    budget, some = ledger(), stream()
    how = {
        "llm": ENGINE,
        "documents_per_topic": 1,
        "max_tokens": 2,
        "topics": Topics(("card", "boat"), words=8, min_units=100),
    }
    how["rows"] = Rows(slots=10, shots=2)
    store = None
    for _ in range(2):
        run = synthesizer(some.rolling(7, every=7), budget, **how)
        released = asyncio.run(run.arun(progress=False))
        released.save(tmp_path / "docs.json")
        again = SyntheticDocuments.load(tmp_path / "docs.json")
        assert again.documents == released.documents
        assert verify_report(again).ok
        store = again.to_vector_store(store)
        clock[0] += 7 * DAY
    held: Any = store
    days = [(each["metadata"]["first_block"], each["metadata"]["last_block"]) for each in held.store.values()]
    assert set(days) == {("2026-05-24", "2026-05-30"), ("2026-05-31", "2026-06-06")}
    assert len(lines(budget, "reserve")) == 2
    newest = held.as_retriever(search_kwargs={"filter": lambda each: each.metadata["first_block"] >= "2026-05-31"})
    assert {each.metadata["first_block"] for each in newest.invoke("card")} == {"2026-05-31"}


@pytest.mark.parametrize("reads", [3, {"first": 1, "last": "2026-05-30"}, {"first": "2026-05-24"}, ["a", "b"]])
def test_a_file_whose_blocks_are_none_is_refused(reads: Any) -> None:
    with pytest.raises(ConfigurationError, match="reads"):
        SyntheticDocuments((), (), {"private": True, "epsilon": 1.0, "reads": reads}, {})


@pytest.mark.parametrize(
    ("forged", "found"),
    [
        ({"first": "2020-01-01"}, "other names"),
        ({"last": "2030-01-01"}, "other names"),
        ({"note": "x"}, "other names"),
        ({"blocks": [9273, 9279], "first": "2026-05-23", "last": "2026-05-29"}, "blocks of a run"),
        ({"blocks": [9274, 9281], "last": "2026-05-31"}, "blocks of a run"),
        (None, "reads"),
    ],
)
def test_documents_that_say_other_days_than_their_run_can_have_read_are_not_verified(
    forged: dict[str, Any] | None, found: str
) -> None:
    released = synthesizer(stream().rolling(7, every=7), ledger()).run(progress=False)
    state = json.loads(released.to_json())
    assert verify_report(sealed(state)).ok
    reads = state["report"].pop("reads")
    assert reads == {"blocks": [9274, 9280], "first": "2026-05-24", "last": "2026-05-30"}
    if forged is not None:
        state["report"]["reads"] = {**reads, **forged}
    assert_found(verify_report(sealed(state)), found)


def test_days_of_what_is_of_no_stream_are_not_verified() -> None:
    private = PrivateExamples([{"text": "a"}], dataset_id="d", public_size=1000)
    budget = PrivacyBudgetCallbackHandler(8.0, 1e-6)
    report = synthesizer(private, budget).run(progress=False).report
    assert verify_report(report).ok
    reads = {"blocks": [9274, 9280], "first": "2026-05-24", "last": "2026-05-30"}
    assert_found(verify_report({**report, "reads": reads}), "no runs on a stream")


def test_documents_that_are_written_while_the_run_goes_on_have_the_ids_of_the_whole(clock: list[float]) -> None:
    how = {"llm": ENGINE, "documents_per_topic": 2, "max_tokens": 2, "rows": Rows(slots=10, shots=2)}
    run = synthesizer(stream().rolling(7, every=7), ledger(), **how)
    seen = list(run.stream(progress=False))
    whole = {each.id: each for each in run.result.documents}
    assert {each.id for each in seen} == set(whole)
    assert all(whole[each.id].metadata == each.metadata for each in seen)


@pytest.mark.traced
def test_a_range_that_does_not_roll_is_read_once(clock: list[float]) -> None:
    budget, some = ledger(), stream()
    assert synthesizer(some.last(7), budget, component="once").run(progress=False).documents
    with pytest.raises(PrivacyBudgetExceededError):
        synthesizer(some.last(7), budget, component="once").run(progress=False)
    (seal,), (reserve,) = lines(budget, "seal"), lines(budget, "reserve")
    assert seal["components"][0]["extent"] == reserve["blocks"]


def test_topics_of_a_run_are_named_once_and_those_of_another_run_are_others() -> None:
    some = stream()
    made = [
        split_by_topics(some.last(7), dataset_id="t", topic_key="topic", public_size={"topic 1": 9, "topic 2": 9})
        for _ in range(2)
    ]
    made[0].name_topics(["card", "boat"])
    with pytest.raises(Exception, match="found others"):
        made[0].name_topics(["boat", "card"])
    made[1].name_topics(["boat", "card"])
    assert made[0].blocks == some.last(7).blocks


def test_who_is_removed_is_in_no_topic_either(clock: list[float]) -> None:
    budget, some = ledger(), stream()
    run = synthesizer(some.last(7), budget)
    for n in range(400):
        some.remove(n)
    assert run.run(progress=False).topics == ()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"component": None}, "component"),
        ({"checkpoint": "run.jsonl"}, "checkpoint"),
        (
            {"llm": ENGINE, "documents_per_topic": 1, "rows": Rows(slots=4, shots=2, sampling="disjoint")},
            "sampling",
        ),
        ({"epsilon": 9.0}, "epsilon"),
    ],
)
def test_what_documents_on_a_stream_cannot_be_is_refused_before_anything_is_charged(
    options: dict[str, Any], expected: str
) -> None:
    budget = ledger()
    with pytest.raises((ConfigurationError, PrivacyBudgetExceededError, RecordError), match=expected):
        synthesizer(stream().rolling(7, every=7), budget, **options)
    assert not lines(budget, "seal")


@pytest.mark.traced
def test_the_delta_of_the_longest_range_counts() -> None:
    some = stream(public_size={7: 1000, 30: 400_000})
    with pytest.raises(ConfigurationError, match="longest range"):
        synthesizer(some.last(7), ledger())


# -- the plan ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
@pytest.mark.parametrize("vocabulary", [("card", "boat"), None])
def test_a_plan_of_runs_costs_what_all_of_them_cost_and_is_rebuilt(
    adjacency: Adjacency, vocabulary: tuple[str, ...] | None
) -> None:
    terms: dict[str, Any] = {"public_size": 1000, "documents_per_topic": 1, "epsilon": 4.0, "delta": 1e-6}
    terms |= {"num_topics": 2, "words": 4, "pairs": True, "max_tokens": 3, "adjacency": adjacency}
    plan = plan_documents(vocabulary, runs=3, **terms)
    assert plan.epsilon <= 4.0
    assert plan.documents_per_topic == 1
    assert plan.one_run().generation is not None
    assert plan.one_run().generation.shots_per_label == 1
    assert all(
        3 * one.max_count == all_.max_count for one, all_ in zip(plan.one_run().tickets(), plan.tickets(), strict=True)
    )
    again = DocumentsPlan.rebuild(plan.to_dict())
    assert again.to_dict() == plan.to_dict()
    # No split of the same releases costs more: three runs, each of all that one unit takes part in.
    run = run_ticket(plan.tickets(), runs=3, adjacency=adjacency)
    price = epsilon_upper_bound(
        RepeatedEvent(run.event, 3), delta=1e-6 - plan.implementation_delta, adjacency=adjacency
    )
    assert price <= plan.epsilon * (1 + 1e-6)
    assert plan_documents(vocabulary, **terms).deviation < plan.deviation


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_a_run_of_all_units_and_of_labels_costs_both(adjacency: Adjacency) -> None:
    tickets = [Ticket("all", GaussianEvent(5.0), max_count=2)]
    tickets += [Ticket("t", GaussianEvent(9.0), label=label, max_count=2) for label in ("a", "b")]
    made = run_ticket(tickets, runs=2, adjacency=adjacency)
    parts = [GaussianEvent(5.0), GaussianEvent(9.0)]
    parts += [GaussianEvent(9.0)] if adjacency == "replace_one" else []
    assert made.event == ComposedEvent(tuple(parts))
