"""Generation over the death of its process: what the file and the ledger have goes on, and one block is lost at most."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from langchain_dpicl import Budget, Decoding, DPFewShotPromptTemplate, Rows
from langchain_dpicl.backends.sync_async import concurrency_limit
from langchain_dpicl.exceptions import ModelCallError, PrivacyBudgetExceededError, RunInterruptedError
from langchain_dpicl.generation.grammars import Grammar
from langchain_dpicl.generation.plan import deal_name
from langchain_dpicl.generation.synthesizer import DemonstrationSynthesizer
from langchain_dpicl.options import GenerationTask, LocalExecutor, OpenLabel
from langchain_dpicl.privacy.ledger.shares import Reservation
from langchain_dpicl.privacy.private_examples import PrivateExamples
from langchain_dpicl.stores import SQLiteStore
from tests.contracts.release_run import entries_in, stop_once_while_a_line_is_made
from tests.crews import House
from tests.faults.children import Child
from tests.unit_tests.generation.test_synthesis import LABELS, RECORDS, engine, private_examples, synthesizer

pytestmark = pytest.mark.usefixtures("free_prices")

TOKENS = 4
"""Words of each of the four texts: no text ends before its cap."""


@cache
def examples_on(folder: Path, **options: Any) -> PrivateExamples:
    """The examples of a ledger: in one process a ledger has one object of them. Prices are remembered by their name."""
    return private_examples(dataset_id="examples", **options)


class Process:
    """Opens the same ledger and the same checkpoint again, as another process would."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "run.jsonl"
        self.ledger = folder / "budget.db"
        Budget(epsilon=1e6, delta=1e-5, store=SQLiteStore.new(self.ledger)).close()

    def start(self, **options: Any) -> DemonstrationSynthesizer:
        budget = Budget.open(SQLiteStore(self.ledger))
        given = {"shots_per_label": 2, "max_tokens": TOKENS, "component": "texts", **options}
        return synthesizer(examples_on(self.folder), budget=budget, checkpoint=self.file, **given)


@pytest.fixture
def process(tmp_path: Path) -> Process:
    return Process(tmp_path)


def at_call(number: int) -> Callable[[], None]:
    """Kills this process at a call."""
    seen: list[None] = []

    def count() -> None:
        seen.append(None)
        if len(seen) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    return count


def killed(process: Process, name: str, number: int, **options: Any) -> None:
    """Runs in a process that is killed at one of its calls of a method of reservations."""

    def run(_: object) -> None:
        count, real = at_call(number), getattr(Reservation, name)

        def counted(self: Reservation, *given: Any) -> Any:
            # A ticket burns before the block that it pays for; the commit comes once its tokens are in the file.
            if name == "burn":
                real(self, *given)
                return count()
            count()
            return real(self, *given)

        setattr(Reservation, name, counted)
        process.start(**options).run(progress=False)

    Child(run).lines()


def words(released: Any) -> int:
    return sum(len(example["text"].split()) for example in released.examples)


@pytest.mark.parametrize("number", [1, 3, 4, 5, 9, 16])
@pytest.mark.parametrize(("name", "lost"), [("burn", 1), ("commit", 0)])
def test_a_kill_costs_one_token_at_most(process: Process, name: str, lost: int, number: int) -> None:
    killed(process, name, number)
    made = process.start()
    before = made.demonstrations
    released = made.run(progress=False)
    assert words(released) == 4 * TOKENS - lost
    assert released.examples[: len(before)] == tuple(before)
    assert {example["text"] for example in released.examples} <= {
        " ".join(record["text"].split()[:count]) for record in RECORDS for count in (TOKENS - 1, TOKENS)
    }
    share = made.share
    assert {share.remaining(ticket.template, label=ticket.label) for ticket in made.plan.tickets()} == {0}
    again = process.start()
    assert again.is_finished
    assert again.result.examples == released.examples


def test_a_text_on_one_sample_whose_ticket_was_lost_is_left_out(process: Process) -> None:
    killed(process, "burn", 2, rows=Rows(units=20, redraw_every="run"))
    made = process.start(rows=Rows(units=20, redraw_every="run"))
    released = made.run(progress=False)
    assert made.is_finished
    assert [example["topic"] for example in released.examples] == ["card", "transfer", "card"]
    assert process.start(rows=Rows(units=20, redraw_every="run")).is_finished


def test_a_deal_that_is_gone_leaves_out_the_texts_it_was_for(process: Process) -> None:
    deal = Rows(sampling="disjoint", slots=10)

    def run(_: object) -> None:
        next(process.start(rows=deal).stream(progress=False))
        os.kill(os.getpid(), signal.SIGKILL)

    Child(run).lines()
    made = process.start(rows=deal)
    assert [example["topic"] for example in made.run(progress=False).examples] == ["card", "transfer", "transfer"]
    assert process.start(rows=deal).is_finished


@pytest.mark.parametrize("rows", [Rows(sampling="disjoint", slots=10), Rows(units=20, redraw_every="run")])
def test_a_run_that_lost_the_tickets_of_all_texts_says_so_each_time(process: Process, rows: Rows) -> None:
    given: dict[str, Any] = {"rows": rows, "shots_per_label": 1}
    for _ in LABELS:
        killed(process, "burn", 1, **given)
    made = process.start(**given)
    for _ in range(2):
        with pytest.raises(PrivacyBudgetExceededError, match="2 demonstrations, found none; remaining tickets: 0"):
            made.run(progress=False)
    assert process.start(**given).result.examples == ()
    prompt = {"example_prompt": "{text} -> {topic}", "suffix": "{question} ->"}
    with pytest.raises(PrivacyBudgetExceededError):
        DPFewShotPromptTemplate.from_run(made, **prompt)


def test_a_deal_ends_also_where_its_last_line_could_not_be_written(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, real = process.start(rows=Rows(sampling="disjoint", slots=10)), os.fsync

    def full(number: int) -> None:
        if made.is_finished:
            raise OSError("disk full")
        real(number)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="disk full"):
            made.run(progress=False)
    assert made.share.committed(deal_name(2), label=LABELS[-1]) == 0
    made.run(progress=False)
    assert {label: made.share.committed(deal_name(2), label=label) for label in LABELS} == dict.fromkeys(LABELS, 1)


def test_the_tokens_of_a_block_that_failed_are_in_the_file(process: Process) -> None:
    """One ticket pays for two tokens; the model fails behind the first one, which was released."""
    options: dict[str, Any] = {"rows": Rows(units=20, redraw_every=2)}
    made = process.start(llm=engine(fail_public_call=4), **options)
    with pytest.raises(RunInterruptedError):
        made.run(progress=False)
    last = entries_in(process.file)[-1]
    assert (last["at"], len(last["tokens"]), last["done"]) == (2, 1, False)
    again = process.start(**options)
    assert words(again.run(progress=False)) == 4 * TOKENS - 1
    assert words(made.result) < words(again.result)


@cache
def unlabelled_on(folder: Path) -> PrivateExamples:
    return PrivateExamples(RECORDS, fields=("topic",), public_size=400, dataset_id=f"open {folder.name}")


def open_run(process: Process, **options: Any) -> DemonstrationSynthesizer:
    """A run whose texts begin with a label that is drawn."""
    task = GenerationTask(record_prompt="{topic}: {text}", open_label=OpenLabel("topic", values=LABELS))
    given = {"checkpoint": process.file, "task": task, "max_tokens": TOKENS, "rows": Rows(slots=10), **options}
    budget = Budget.open(SQLiteStore(process.ledger))
    return synthesizer(unlabelled_on(process.folder), budget=budget, component="open", **given)


@pytest.mark.parametrize(("failing_call", "sampling"), [(3, "poisson"), (1, "poisson"), (1, "disjoint")])
def test_a_label_that_was_drawn_goes_on_with_its_text(process: Process, failing_call: int, sampling: Any) -> None:
    rows = Rows(slots=10, sampling=sampling)
    with pytest.raises(RunInterruptedError):
        open_run(process, rows=rows, llm=engine(fail_public_call=failing_call)).run(progress=False)
    drawn = entries_in(process.file)[-1]["values"]["topic"]
    assert open_run(process, rows=rows).run(progress=False).examples[0]["topic"] == drawn


def test_tickets_of_the_text_alone_begin_no_text(process: Process) -> None:
    open_label = OpenLabel("topic", max_tokens=1)
    given = {"task": GenerationTask(record_prompt="{topic}: {text}", open_label=open_label), "shots_per_label": 1}
    first = open_run(process, llm=engine(fail_public_call=2), **given)
    with pytest.raises(RunInterruptedError):
        first.run(progress=False)
    assert [first.share.remaining(each.template) for each in first.plan.tickets()] == [0, TOKENS]
    for _ in range(2):
        again = open_run(process, checkpoint=process.folder / "new.jsonl", **given)
        with pytest.raises(PrivacyBudgetExceededError, match="expected the tickets of its texts"):
            again.run(progress=False)
        assert not again.is_finished


def test_the_component_is_found_in_the_file(process: Process) -> None:
    first = process.start(component=None)
    first.run(progress=False)
    again = process.start(component=None)
    assert again.component == first.component
    assert again.is_finished


def test_texts_of_workers_are_in_the_file_too(tmp_path: Path) -> None:
    house = House(tmp_path)
    path = tmp_path / "run.jsonl"
    released = house.synthesizer(house.crew(), checkpoint=path).run(progress=False)
    here = house.synthesizer(None, checkpoint=path)
    assert here.is_finished
    assert here.result.examples == released.examples


def test_a_local_executor_limits_the_calls_in_flight() -> None:
    seen: set[int | None] = set()

    class Watched(type(engine())):  # type: ignore[misc]
        def top_tokens(self, *given: Any, **options: Any) -> Any:
            seen.add(concurrency_limit())
            return super().top_tokens(*given, **options)

    llm = Watched(engine()._distribution, vocabulary=engine().vocabulary())
    synthesizer(private_examples(), llm=llm, executor=LocalExecutor(max_concurrency=3)).run(progress=False)
    assert seen == {3}


def test_a_model_that_fails_at_once_leaves_nothing_but_the_name_of_the_run(process: Process) -> None:
    made = process.start(llm=engine(fail_public_call=1))
    with pytest.raises(ModelCallError):
        made.run(progress=False)
    assert entries_in(process.file) == []


@pytest.mark.parametrize("begins", ["", " my"])
def test_an_outage_before_the_first_token_costs_no_deal(process: Process, begins: str) -> None:
    grammar = Grammar.regex(f"{begins} ?(my|card|transfer)( (card|transfer|was|is|[a-z]+))*")
    deal: dict[str, Any] = {
        "rows": Rows(sampling="disjoint", slots=10),
        "decoding": Decoding(grammar=grammar if begins else None),
    }
    with pytest.raises(RunInterruptedError):
        process.start(llm=engine(fail_public_call=1), **deal).run(progress=False)
    made = process.start(**deal)
    assert {label: made.share.remaining(deal_name(2), label=label) for label in LABELS} == dict.fromkeys(LABELS, 1)
    assert [example["topic"] for example in made.run(progress=False).examples] == ["card", "transfer"] * 2


def test_texts_that_only_the_grammar_writes_need_no_deal(process: Process) -> None:
    only: dict[str, Any] = {
        "rows": Rows(sampling="disjoint", slots=10),
        "decoding": Decoding(grammar=Grammar.choices([" my card was"])),
    }
    made = process.start(**only).run(progress=False)
    assert process.start(**only).result.examples == made.examples


def test_ctrl_c_while_a_line_is_made_leaves_no_gap_in_a_text(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    made = process.start()
    stop_once_while_a_line_is_made(monkeypatch, at=2)
    with pytest.raises(KeyboardInterrupt):
        made.run(progress=False)
    made.run(progress=False)
    assert process.start().result.examples == made.result.examples
