"""Demonstrations of a stream are made anew in each run, from one standing share that never runs out."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from typing import Any

import pytest

from langchain_dpicl import (
    DemonstrationSynthesizer,
    DPFewShotPromptTemplate,
    PrivacyBudgetCallbackHandler,
)
from langchain_dpicl.backends.fake import FakeBackend, scripted
from langchain_dpicl.exceptions import (
    ConfigurationError,
    LedgerError,
    ModelCallError,
    PrivacyBudgetExceededError,
    RunInterruptedError,
    SealedShareError,
)
from langchain_dpicl.options import LocalExecutor, Noise, Rows
from langchain_dpicl.privacy._validate import Adjacency
from langchain_dpicl.privacy.accounting import epsilon_upper_bound
from langchain_dpicl.privacy.accounting.events import ComposedEvent, GaussianEvent, RepeatedEvent
from langchain_dpicl.privacy.extensions.stream_ledger import RUN_TEMPLATE, StreamShare, run_ticket
from langchain_dpicl.privacy.ledger.tickets import Ticket
from langchain_dpicl.released.demonstrations import ReleasedDemonstrations
from langchain_dpicl.reports import verify_report
from langchain_dpicl.reports.ledger_audit import check_ledger
from langchain_dpicl.streams import PrivateStream
from tests.faults.children import Child
from tests.sealed_files import assert_found
from tests.stream_times import DAY, START
from tests.unit_tests.reports.test_report_streams import remade

ENGINE = FakeBackend(scripted({" hello": 0.6, " card": 0.4}), max_top_k=20)


def stream(**declared: Any) -> PrivateStream:
    labels = {"label_key": "queue", "labels": ("card", "transfer")}
    sizes = {7: 3000, 30: 9000}
    some = PrivateStream(
        **{"dataset_id": "d", "time_key": "at", "unit_key": "user", "public_size": sizes, **labels, **declared}
    )
    rng = random.Random(0)
    some.extend(
        {
            "at": START - 40 * DAY + rng.random() * 400 * DAY,
            "user": n,
            "text": "hello",
            "queue": ("card", "transfer")[n % 2],
        }
        for n in range(2000)
    )
    return some


def ledger(**options: Any) -> PrivacyBudgetCallbackHandler:
    return PrivacyBudgetCallbackHandler(4.0, 1e-6, **{"per": "30 days", **options})


def synthesizer(source: Any, budget: Any, **options: Any) -> DemonstrationSynthesizer:
    given = {"llm": ENGINE, "budget": budget, "epsilon": 2.0, "max_tokens": 3, "component": "shots", **options}
    return DemonstrationSynthesizer.from_private_examples(source, **given)


def lines(budget: Any, kind: str) -> list[Any]:
    return [line.body for line in budget.budget._store.records() if line.kind == kind]


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_each_week_has_its_run_and_the_share_never_runs_out(adjacency: Adjacency, clock: list[float]) -> None:
    budget, some = ledger(adjacency=adjacency), stream()
    made = []
    for _ in range(12):
        run = synthesizer(some.rolling(30, every=7), budget)
        made.append(run.run())
        clock[0] += 7 * DAY
    (seal,) = lines(budget, "seal")
    (component,) = seal["components"]
    (ticket,) = component["tickets"]
    assert (ticket["template"], ticket["label"], ticket["max_count"]) == ("run", None, 9)
    spans = [line["blocks"] for line in lines(budget, "reserve")]
    assert [last - first for first, last in spans] == [29] * 12
    assert [later[0] - sooner[0] for sooner, later in itertools.pairwise(spans)] == [7] * 11
    assert component["extent"] == [spans[0][0], None]
    assert all(len(each.examples) == 2 for each in made)
    assert budget.remaining_epsilon == 2.0
    budget.budget.verify()
    for report in (budget.budget.report(), made[-1]):
        verified = verify_report(report)
        assert verified.ok, verified.problems
        assert verified.epsilon <= 2.0
    checked = check_ledger(budget.budget._store)
    assert checked.problems == ()
    assert checked.promised == 2.0


def test_a_run_has_not_read_blocks_behind_the_last_that_its_component_reserved(clock: list[float]) -> None:
    budget, some = ledger(), stream()
    for _ in range(2):
        run = synthesizer(some.rolling(30, every=7), budget)
        run.run()
        clock[0] += 7 * DAY
    budget.retire("shots")
    report = json.loads(json.dumps(run.report))
    assert verify_report(report).ok
    assert report["budget"]["stream"]["retired"] == {"shots": report["reads"]["blocks"][1]}
    report["budget"]["stream"]["retired"]["shots"] -= 7  # its first run
    report["budget"] = remade(report["budget"])
    assert verify_report(report["budget"]).ok
    assert_found(verify_report(report), "expected the blocks of a run of 'shots'")


def test_more_runs_than_the_share_is_priced_for_are_refused() -> None:
    budget, some = ledger(), stream()
    for _ in range(2):  # 30 days every 30: two runs can touch a window
        synthesizer(some.rolling(30, every=30), budget).run()
    again = synthesizer(some.rolling(30, every=30), budget)
    with pytest.raises(PrivacyBudgetExceededError, match="in one window"):
        again.run()
    assert len(lines(budget, "reserve")) == 2


def test_a_range_that_does_not_roll_is_read_once() -> None:
    budget, some = ledger(), stream()
    run = synthesizer(some.last(30), budget, component="once")
    assert len(run.run().examples) == 2
    (seal,), (reserve,) = lines(budget, "seal"), lines(budget, "reserve")
    assert seal["components"][0]["extent"] == reserve["blocks"]
    with pytest.raises(PrivacyBudgetExceededError):
        synthesizer(some.last(30), budget, component="once").run()
    assert verify_report(run.result).ok


class Flaky(FakeBackend):
    """Fails once."""

    calls_left = 3

    def top_tokens(self, prompt: str, prefix: Any, *, top_k: int) -> Any:
        self.calls_left -= 1
        if self.calls_left == 0:
            raise ModelCallError("down")
        return super().top_tokens(prompt, prefix, top_k=top_k)


def test_a_run_that_was_interrupted_goes_on_on_the_ticket_that_it_has() -> None:
    budget, some = ledger(), stream()
    engine = Flaky(scripted({" hello": 0.6, " card": 0.4}), max_top_k=20)
    run = synthesizer(some.rolling(30, every=7), budget, llm=engine)
    with pytest.raises(RunInterruptedError):
        run.run()
    assert len(run.run().examples) == 2
    assert len(lines(budget, "reserve")) == 1


@pytest.mark.parametrize("redraw_every", [1, "run"])
def test_a_run_that_begins_in_an_outage_is_no_run(redraw_every: Any) -> None:
    budget, some = ledger(), stream()
    engine = Flaky(scripted({" hello": 0.6, " card": 0.4}), max_top_k=20)
    for _ in range(2):  # a job that is started again
        engine.calls_left = 1
        run = synthesizer(some.rolling(30, every=7), budget, llm=engine, rows=Rows(redraw_every=redraw_every))
        with pytest.raises(RunInterruptedError):
            run.run()
    assert not lines(budget, "reserve")
    assert len(run.run().examples) == 2
    assert len(lines(budget, "reserve")) == 1


def test_a_run_that_nothing_pays_for_asks_no_model() -> None:
    """A timer that starts a job again would pay its provider each time for what nothing can come of."""
    budget, some = ledger(), stream()
    engine = Flaky(scripted({" hello": 0.6, " card": 0.4}), max_top_k=20)
    engine.calls_left = 10**9
    spent = synthesizer(some.rolling(30, every=7), budget, llm=engine).share
    for _ in range(StreamShare.remaining(spent, RUN_TEMPLATE, blocks=spent.blocks)):
        synthesizer(some.rolling(30, every=7), budget, llm=engine).run()
    engine.calls_left = 1  # the next call would be an outage
    with pytest.raises(PrivacyBudgetExceededError):
        synthesizer(some.rolling(30, every=7), budget, llm=engine).run()


@pytest.mark.traced
def test_parts_of_a_run_are_granted_once_and_given_back_within_the_run() -> None:
    budget, some = ledger(), stream()
    share = synthesizer(some.rolling(30, every=7), budget).share
    name = "text: 1 token on one sample"
    held = share.reserve(name, label="card", count=3)
    assert len(lines(budget, "reserve")) == 1
    with pytest.raises(PrivacyBudgetExceededError, match="of one run"):
        share.reserve(name, label="card")
    held.burn()
    assert held.give_back() == 2
    assert share.remaining(name, label="card") == 2
    assert not lines(budget, "give_back")  # the run is charged whole
    with pytest.raises(ConfigurationError):
        share.reserve("other")
    held.commit()
    with pytest.raises(LedgerError):
        held.commit()
    assert lines(budget, "commit") == [{"reservation": 3, "count": 1}]


@pytest.mark.parametrize("is_charged", [False, True])
def test_a_fork_is_granted_no_part_of_the_run_of_its_parent(*, is_charged: bool) -> None:
    budget, some = ledger(), stream()
    share = synthesizer(some.rolling(30, every=7), budget).share
    name = "text: 1 token on one sample"
    if is_charged:
        share.reserve(name, label="card").burn()

    def child(_: Any) -> str:
        try:
            share.reserve(name, label="card").burn()
        except LedgerError as error:
            return str(error)
        return "granted"

    assert "found a fork" in Child(child).result()
    share.reserve(name, label="card").burn()
    assert len(lines(budget, "reserve")) == 1


def test_prompts_are_made_anew_and_old_ones_stay(clock: list[float], tmp_path: Any) -> None:
    budget, some = ledger(), stream()
    how = {"llm": ENGINE, "budget": budget, "epsilon": 1.0, "max_tokens": 3, "component": "shots", "suffix": "{q}"}
    first = DPFewShotPromptTemplate.from_private_examples(some.rolling(30, every=7), example_prompt="{text}", **how)
    clock[0] += 7 * DAY
    rolling = some.rolling(30, every=7)
    second = asyncio.run(DPFewShotPromptTemplate.afrom_private_examples(rolling, example_prompt="{text}", **how))
    assert len(lines(budget, "reserve")) == 2
    first.save_released(tmp_path / "first.json")
    kept = ReleasedDemonstrations.load(tmp_path / "first.json")
    assert kept.examples == tuple(first.examples)
    assert verify_report(json.loads((tmp_path / "first.json").read_text())).ok
    assert second.epsilon == 1.0
    both = ReleasedDemonstrations((*kept.examples, *second.released.examples), kept.report, kept.plan)
    assert_found(both.verify(), "2 of label 'card' were released, its tickets allow 1")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"component": None}, "component"),
        ({"checkpoint": "run.jsonl"}, "checkpoint"),
        ({"executor": "ray"}, "executor"),
        ({"rows": Rows(slots=4, shots=2, sampling="disjoint")}, "sampling"),
        ({"epsilon": 9.0}, "epsilon"),
    ],
)
def test_what_a_run_on_a_stream_cannot_do_is_refused_before_anything_is_charged(
    options: dict[str, Any], expected: str
) -> None:
    budget = ledger()
    with pytest.raises((ConfigurationError, PrivacyBudgetExceededError), match=expected):
        synthesizer(stream().rolling(30, every=7), budget, **options)
    assert not lines(budget, "seal")


def test_an_executor_of_this_process_is_fine_and_a_budget_for_life_is_not() -> None:
    some = stream()
    assert synthesizer(some.rolling(30, every=7), ledger(), executor=LocalExecutor(max_concurrency=2)).run().examples
    with pytest.raises(ConfigurationError, match="promise is for windows"):
        synthesizer(some.rolling(30, every=7), ledger(per="life"))


def test_the_same_component_on_other_terms_is_refused() -> None:
    budget, some = ledger(), stream()
    synthesizer(some.rolling(30, every=7), budget).run()
    with pytest.raises(SealedShareError):
        synthesizer(some.rolling(30, every=10), budget)
    with pytest.raises(SealedShareError):
        synthesizer(some.rolling(30, every=7), budget, noise=Noise("gumbel", multiplier=40.0))


# -- the ticket of a run ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_a_run_over_labels_costs_what_one_person_can_take_part_in(adjacency: Adjacency) -> None:
    tickets = [Ticket("t", GaussianEvent(9.0), label=label, max_count=6) for label in ("a", "b", "c")]
    made = run_ticket(tickets, runs=3, adjacency=adjacency)
    one = RepeatedEvent(GaussianEvent(9.0), 2)
    assert made.event == (one if adjacency == "add_remove" else ComposedEvent((one, one)))
    assert (made.label, made.max_count, made.refundable) == (None, 3, False)
    # As many such releases as one person can take part in, over all runs.
    most = 6 if adjacency == "add_remove" else 12
    wanted = epsilon_upper_bound(RepeatedEvent(GaussianEvent(9.0), most), delta=1e-6, adjacency=adjacency)
    found = epsilon_upper_bound(RepeatedEvent(made.event, 3), delta=1e-6, adjacency=adjacency)
    assert found == pytest.approx(wanted, rel=1e-6)


@pytest.mark.traced
@pytest.mark.parametrize(
    "tickets",
    [
        [
            Ticket("t", GaussianEvent(9.0), label="a", max_count=2),
            Ticket("t", GaussianEvent(8.0), label="b", max_count=2),
        ],
        [Ticket("t", GaussianEvent(9.0), label="a", max_count=3)],
        [Ticket("t", GaussianEvent(9.0), max_count=3), Ticket("t", GaussianEvent(9.0), label="b", max_count=2)],
        [],
    ],
)
def test_labels_that_cost_differently_make_no_run(tickets: list[Ticket]) -> None:
    with pytest.raises(ConfigurationError):
        run_ticket(tickets, runs=2, adjacency="add_remove")
