"""Demonstrations on disjoint batches of one deal: who stands where, what is paid, what a stop can and cannot repeat."""

from __future__ import annotations

import asyncio
import copy
import os
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from langchain_dpicl import (
    Decoding,
    DPFreeFormRunnable,
    DPVotingRunnable,
    GenerationTask,
    KeywordAnswers,
    Noise,
    Rows,
)
from langchain_dpicl.backends.fake import word_copier
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.exceptions import (
    ConfigurationError,
    LedgerError,
    PrivacyBudgetError,
    PrivacyBudgetExceededError,
    PrivateAccessError,
    RunInterruptedError,
)
from langchain_dpicl.generation.synthesizer import DemonstrationSynthesizer, DisjointBatches
from langchain_dpicl.options import LogitNoise, OpenLabel
from langchain_dpicl.privacy import accounting
from langchain_dpicl.privacy.accounting.events import (
    BoundedRangeEvent,
    Event,
    ParallelEvent,
    RepeatedEvent,
    SubsampledEvent,
)
from langchain_dpicl.privacy.extensions.random_allocation import AllocatedEvent, AllocatedSlots
from langchain_dpicl.privacy.extensions.sparse_vector import SparseVectorTest
from langchain_dpicl.privacy.ledger.shares import Reservation
from langchain_dpicl.privacy.mechanisms.release_plan import GumbelMechanism, assign
from langchain_dpicl.privacy.private_examples import PrivateExamples
from langchain_dpicl.release import curator
from langchain_dpicl.release import samples as dealt_sample
from langchain_dpicl.release import token_block as blocks
from langchain_dpicl.release.token_block import open_block
from tests.doubles import WORDS, SpyBackend
from tests.full_doubles import FullFake, full_engine, same_coins
from tests.labelling_doubles import counts, house
from tests.unit_tests.release.test_samples import elsewhere
from tests.unit_tests.test_private_frames import shows_private

pytestmark = pytest.mark.usefixtures("remembered_prices")

LABELS = ("card", "transfer")
TEXTS = {"card": "my card was declined", "transfer": "my transfer is late"}
SIZE = 60
RECORDS = [{"text": f"{TEXTS[label]} id{n}.", "topic": label} for label in LABELS for n in range(SIZE)]
DEMONSTRATIONS, LENGTH, SLOTS = 3, 4, 5
DEAL = "3 demonstrations on disjoint batches of one deal"


class Watched(SpyBackend):
    """Does something at every private score, and counts them; its texts never end by themselves."""

    def __init__(self, **options: Any) -> None:
        super().__init__(word_copier(WORDS), vocabulary=WORDS, **options)
        self.scores = 0
        self.at_score: Callable[[], None] = lambda: None

    def open(self, prompts: Any, prefix: Any) -> Any:
        session, engine = super().open(prompts, prefix), self

        class Session:
            push, close = session.push, session.close

            def score(self, domain: Any) -> Any:
                engine.scores += 1
                engine.at_score()
                return session.score(domain)

            async def ascore(self, domain: Any) -> Any:
                await asyncio.sleep(0)
                return self.score(domain)

        return Session()


def private_examples(records: Any = RECORDS, **options: Any) -> PrivateExamples:
    size = dict.fromkeys(LABELS, SIZE)
    return PrivateExamples(records, **{"label_key": "topic", "labels": LABELS, "public_size": size, **options})


def dealing(private: PrivateExamples | None = None, **options: Any) -> DemonstrationSynthesizer:
    """A synthesizer that deals all units: no slot is so small that it turns a unit away."""
    given: dict[str, Any] = {
        "llm": Watched(),
        "budget": house(),
        "rows": Rows(slots=SLOTS, shots=SIZE, sampling="disjoint"),
        "shots_per_label": DEMONSTRATIONS,
        "max_tokens": LENGTH,
        "noise": Noise(multiplier=0.03),
        "epsilon": 1e5,
        "task": GenerationTask(record_prompt="{topic}: {text}"),
        "instruction": "Messages.",
        "component": "deal",
        **options,
    }
    if given["llm"].max_top_k is None and not isinstance(given["noise"], LogitNoise):
        given.setdefault("decoding", Decoding(candidates="all"))
    return DemonstrationSynthesizer.from_private_examples(private or private_examples(), **given)


def ids(prompts: Any) -> list[list[str]]:
    """Returns the units of each row."""
    return [re.findall(r"id\d+", prompt) for prompt in prompts]


def sessions_by_label(spy: SpyBackend) -> dict[str, list[tuple[str, ...]]]:
    found: dict[str, list[tuple[str, ...]]] = {label: [] for label in LABELS}
    for prompts in spy.private_prompts:
        found[prompts[0].split("\n\n")[-1].removesuffix(":")].append(prompts)
    return found


# --- who stands where -----------------------------------------------------------------------------------------------


def test_every_unit_stands_in_one_row_of_one_demonstration_of_its_label() -> None:
    spy = Watched()
    released = dealing(llm=spy).run()
    assert [example["text"] for example in released.examples] == [TEXTS[label] for label in LABELS] * DEMONSTRATIONS
    for sessions in sessions_by_label(spy).values():
        assert [len(prompts) for prompts in sessions] == [SLOTS] * DEMONSTRATIONS
        placed = [unit for prompts in sessions for row in ids(prompts) for unit in row]
        assert sorted(placed) == sorted(f"id{n}" for n in range(SIZE))


def test_two_deals_are_not_alike() -> None:
    """Sixty units in fifteen slots twice alike: less than 1e-70."""
    spies = [Watched(), Watched()]
    for spy in spies:
        dealing(llm=spy).run()
    assert spies[0].private_prompts != spies[1].private_prompts


def test_an_engine_that_carries_the_public_row_is_told_the_rows_of_one_batch() -> None:
    engine = full_engine()
    dealing(llm=engine, noise=LogitNoise("recentered_clip", clip=12.0, multiplier=0.03)).run()
    assert [opened["num_rows"] for opened in engine.opened] == [SLOTS] * DEMONSTRATIONS * len(LABELS)
    placed = [unit for opened in engine.opened[::2] for row in ids(opened["prompts"]) for unit in row]
    assert sorted(placed) == sorted(f"id{n}" for n in range(SIZE))


def test_records_without_labels_have_one_deal() -> None:
    spy, budget = Watched(), house()
    records = [{"text": f"my card was declined id{n}."} for n in range(SIZE)]
    private = PrivateExamples(records, public_size=SIZE)
    made = dealing(private, llm=spy, budget=budget, task=GenerationTask(record_prompt="q: {text}"))
    assert [example["text"] for example in made.run().examples] == ["my card was declined"] * DEMONSTRATIONS
    assert len({unit for prompts in spy.private_prompts for row in ids(prompts) for unit in row}) == SIZE
    assert counts(budget) == {f"reserve {DEAL}": 1, f"commit {DEAL}": 1}


@pytest.mark.parametrize("change", ["add", "remove", "replace"])
def test_one_record_moves_one_row_of_one_batch(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The coins of the other units are kept: each unit has its own, as in the theorem."""
    cards = [record for record in RECORDS if record["topic"] == "card"]
    others = [record for record in RECORDS if record["topic"] != "card"]
    extra = {"text": "up top failed top up id777.", "topic": "card"}
    near = {"add": [*cards, extra], "remove": cards[:-1], "replace": [*cards[:-1], extra]}[change]

    def draw(self: AllocatedSlots, num_units: int, *, rng: Any) -> Any:
        units = [7 * n % 67 for n in range(67) if 7 * n % 67 < num_units]
        places = [unit % self.num_rows for unit in units]
        return assign(units, places, num_slots=self.num_rows, shots_per_slot=self.shots_per_slot)

    monkeypatch.setattr(AllocatedSlots, "draw", draw)
    seen = []
    for records in (cards, near):
        same_coins(monkeypatch, 5)
        spy = Watched()
        dealing(private_examples(records + others), llm=spy).run()
        seen.append(spy.private_prompts)
    assert [len(prompts) for prompts in seen[0]] == [len(prompts) for prompts in seen[1]]
    moved = [
        (batch, row)
        for batch, pair in enumerate(zip(*seen, strict=True))
        for row, (left, right) in enumerate(zip(*pair, strict=True))
        if left != right
    ]
    assert len(moved) == 1


# --- what is paid ---------------------------------------------------------------------------------------------------


def by_hand(rate: float, noise: float, adjacency: str) -> Event:
    """Returns what is charged; under replacement, one batch."""
    batch = RepeatedEvent(BoundedRangeEvent(1.0 / noise), LENGTH)
    one: Event = SubsampledEvent(batch, rate)
    if adjacency == "add_remove":
        one = AllocatedEvent(batch, DEMONSTRATIONS, rate)
    return ParallelEvent("letters", tuple((label, one) for label in LABELS))


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_the_share_is_the_price_of_one_deal(adjacency: str) -> None:
    """Under replacement a deal is priced as one batch: no theorem hides where a replaced unit stands."""
    budget = Budget(epsilon=4.0, delta=1e-5, adjacency=adjacency)
    private = private_examples(dataset_id="letters")
    shape = {"rows": Rows(slots=4, shots=2, sampling="disjoint"), "epsilon": 4.0, "noise": Noise(multiplier=5.0)}
    plan = dealing(private, budget=budget, **shape).plan
    rate = DEMONSTRATIONS * 4 * 2 * 1.5 / SIZE
    assert plan.release.sampler == AllocatedSlots(rate, DEMONSTRATIONS, 4, 2)
    price, apart = (
        accounting.epsilon_upper_bound(by_hand(rate, 5.0, name), delta=plan.delta, adjacency=adjacency)
        for name in (adjacency, "replace_one")
    )
    assert plan.epsilon == pytest.approx(price, rel=1e-4)
    assert price < 0.9 * apart if adjacency == "add_remove" else price == apart


def test_a_ticket_for_each_label_burns_before_any_record_is_read_and_is_committed_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spy, budget = Watched(), house()
    made = dealing(llm=spy, budget=budget)
    seen: list[tuple[str | None, int, int]] = []
    real = PrivateExamples._pool

    def pool(self: PrivateExamples, label: str | None, *, ledger_id: str | None) -> Any:
        assert made._deals is not None
        ticket = made._deals._reserved[label]
        seen.append((label, ticket.unburnt, ticket.uncommitted))
        return real(self, label, ledger_id=ledger_id)

    monkeypatch.setattr(PrivateExamples, "_pool", pool)
    assert counts(budget) == {}
    lines = [counts(budget)[f"commit {DEAL}"] for _ in made.stream()]
    assert seen == [("card", 0, 1), ("transfer", 0, 1)]  # opened twice in all: once for each label
    assert lines == [0, 0, 0, 0, 1, 2]
    assert counts(budget) == {f"reserve {DEAL}": 2, f"commit {DEAL}": 2}


def test_a_finished_run_releases_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    spy, private, budget = Watched(), private_examples(), house()
    made = dealing(private, llm=spy, budget=budget)
    first, scores, paid = made.run(), spy.scores, counts(budget)
    assert made.run() == first
    again = dealing(private, llm=spy, budget=budget)
    monkeypatch.setattr(spy, "top_tokens", lambda *_, **__: pytest.fail("a model was asked for what nothing pays for"))
    with pytest.raises(PrivacyBudgetExceededError):
        again.run()
    assert (spy.scores, counts(budget)) == (scores, paid)
    assert made._deals is not None
    with pytest.raises(PrivacyBudgetError, match="remaining 0"), made._deals.open("card", 0, 0):
        pytest.fail("a second deal")


def test_a_deal_of_one_demonstration_is_one_sample() -> None:
    plan = dealing(shots_per_label=1, rows=Rows(slots=SLOTS, shots=2, sampling="disjoint")).plan
    batch = RepeatedEvent(BoundedRangeEvent(1 / 0.03), LENGTH)
    assert {ticket.event for ticket in plan.tickets()} == {SubsampledEvent(batch, SLOTS * 2 * 1.5 / SIZE)}


# --- stops ----------------------------------------------------------------------------------------------------------


def interrupted(made: DemonstrationSynthesizer, spy: Watched, how: str) -> None:
    """Stops a run inside the first demonstration."""
    if how == "outage":
        spy._fail_public_call = spy.calls["public"] + 3
        with pytest.raises(RunInterruptedError):
            made.run()
        return

    def stop() -> None:
        spy.at_score = lambda: None
        if how == "cancelled":
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            raise asyncio.CancelledError
        raise KeyboardInterrupt

    def at_third() -> None:
        if spy.scores == 3:
            stop()

    spy.at_score = at_third
    if how == "cancelled":
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(made.arun())
    else:
        with pytest.raises(KeyboardInterrupt):
            made.run()


@pytest.mark.parametrize("how", ["outage", "ctrl-c", "cancelled"])
def test_a_stopped_demonstration_goes_on_with_the_same_deal_and_with_what_is_left(how: str) -> None:
    spy, budget = Watched(), house()
    made = dealing(llm=spy, budget=budget)
    interrupted(made, spy, how)
    assert made._deals is not None
    # Two tokens are out; a third that was begun counts as well.
    assert made._deals.left("card", 0, 0) == (LENGTH - 2 if how == "outage" else LENGTH - 3)
    assert made.demonstrations == []
    released = made.run()
    first, again = spy.private_prompts[:2]
    assert first == again
    placed = [row for prompts in sessions_by_label(spy)["card"][1:] for row in ids(prompts)]
    assert sorted(unit for row in placed for unit in row) == sorted(f"id{n}" for n in range(SIZE))
    assert spy.scores == DEMONSTRATIONS * LENGTH * len(LABELS)  # no call more, none less
    cut = TEXTS["card"] if how == "outage" else "my card was"
    assert [example["text"] for example in released.examples][:2] == [cut, TEXTS["transfer"]]
    assert counts(budget) == {f"reserve {DEAL}": 2, f"commit {DEAL}": 2}


def test_however_often_a_run_is_stopped_a_batch_releases_no_more_than_was_paid_for() -> None:
    spy, budget = Watched(), house()
    made = dealing(llm=spy, budget=budget)

    def stop() -> None:
        raise KeyboardInterrupt

    spy.at_score = stop
    for stops in range(1, DEMONSTRATIONS * LENGTH * len(LABELS) + 1):
        with pytest.raises(KeyboardInterrupt):
            made.run()
        assert spy.scores == stops
    with pytest.raises(
        PrivacyBudgetExceededError, match="requested 6 demonstrations, found none; remaining tickets: 0"
    ):
        made.run()
    assert made.demonstrations == []
    assert spy.scores == DEMONSTRATIONS * LENGTH * len(LABELS)
    assert counts(budget) == {f"reserve {DEAL}": 2, f"commit {DEAL}": 2}


def test_a_release_that_could_not_be_computed_is_not_repeated_for_free(monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Watched()
    made = dealing(llm=spy)

    def broken(*given: Any, **named: Any) -> Any:
        raise ValueError("noise")

    with monkeypatch.context() as patch:
        patch.setattr(GumbelMechanism, "release", broken)
        for _ in range(LENGTH):
            with pytest.raises(RunInterruptedError, match="could not be computed"):
                made.run()
    assert spy.scores == LENGTH
    texts = [example["text"] for example in made.run().examples]
    assert texts == [TEXTS["transfer"], *[TEXTS["card"], TEXTS["transfer"]] * (DEMONSTRATIONS - 1)]
    assert spy.scores == DEMONSTRATIONS * LENGTH * len(LABELS)


def test_a_stop_as_a_batch_opens_costs_nothing_of_it_and_shows_no_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    made = dealing()

    def stop(*given: Any, **named: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(blocks, "RowSource", stop)
        with pytest.raises(KeyboardInterrupt) as caught:
            made.run()
    assert shows_private(caught.value) == []
    assert "__init__" not in [entry.name for entry in caught.traceback if entry.path == Path(blocks.__file__)]
    assert made.run().examples[0]["text"] == TEXTS["card"]


def test_a_deal_that_a_stop_struck_as_it_was_drawn_is_not_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    spy, budget, draws = Watched(), house(), [0]
    made = dealing(llm=spy, budget=budget)
    real = AllocatedSlots.draw

    def draw(self: Any, num_units: int, *, rng: Any) -> Any:
        draws[0] += 1
        if draws[0] == 1:
            raise KeyboardInterrupt
        return real(self, num_units, rng=rng)

    monkeypatch.setattr(AllocatedSlots, "draw", draw)
    with pytest.raises(KeyboardInterrupt):
        made.run()
    texts = [example["text"] for example in made.run().examples]
    assert texts == [TEXTS["transfer"]] * DEMONSTRATIONS  # of the other label nothing more is read: its ticket burnt
    assert draws == [2]
    assert sessions_by_label(spy)["card"] == []
    assert counts(budget) == {f"reserve {DEAL}": 2, f"commit {DEAL}": 1}


def test_removing_a_unit_between_demonstrations_deals_nobody_anew() -> None:
    spy, private = Watched(), private_examples()
    made = dealing(private, llm=spy)
    stream = made.stream()
    next(stream)
    seen = {unit for row in ids(spy.private_prompts[0]) for unit in row}
    for n in range(SIZE):
        private.remove(n)
    for _ in stream:
        pass
    rest = [unit for prompts in sessions_by_label(spy)["card"][1:] for row in ids(prompts) for unit in row]
    assert seen
    assert rest == []


# --- free public tokens ---------------------------------------------------------------------------------------------


class Runs:
    """Counts the runs of the test, and the private tokens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started = self.private = 0
        start, release = SparseVectorTest.start, GumbelMechanism.release

        def counted_start(test: Any, num_rows: int, *, rng: Any) -> Any:
            self.started += 1
            return start(test, num_rows, rng=rng)

        def counted_release(mechanism: Any, total: Any, *, rng: Any) -> Any:
            self.private += 1
            return release(mechanism, total, rng=rng)

        monkeypatch.setattr(SparseVectorTest, "start", counted_start)
        monkeypatch.setattr(GumbelMechanism, "release", counted_release)


FREE = LogitNoise("recentered_clip", clip=12.0, multiplier=0.01, free_below=0.3, max_private_tokens=2)
"""Noise of the test so small that it errs with probability below 1e-9."""


class Flaky(FullFake):
    """Every other public question fails."""

    def __init__(self) -> None:
        super().__init__(word_copier(WORDS), vocabulary=WORDS)

    def open_full(self, prompts: Any, prefix: Any, **options: Any) -> Any:
        self.public_fails_at = self.public_calls + 2
        return super().open_full(prompts, prefix, **options)


def until_done(made: DemonstrationSynthesizer) -> int:
    """Runs until nothing stops it; returns how often it was stopped."""
    for stops in range(100):
        try:
            made.run()
        except RunInterruptedError:
            continue
        return stops
    pytest.fail("it never ends")


@pytest.mark.parametrize("private_tokens", [1, 2])
def test_private_tokens_and_runs_of_the_test_are_counted_over_all_attempts(
    private_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = Runs(monkeypatch)
    noise = FREE.replace(max_private_tokens=private_tokens)
    made = dealing(llm=Flaky(), max_tokens=6, shots_per_label=2, noise=noise)
    assert until_done(made) > 4
    assert runs.started == runs.private == 2 * len(LABELS) * private_tokens


def test_a_run_of_the_test_that_a_stop_struck_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows are as the public prompt: one run asks all questions, over all attempts, and no token is private."""
    runs = Runs(monkeypatch)
    records = [{"text": "unheard", "topic": label} for label in LABELS] * SIZE
    noise = FREE.replace(free_below=0.9)
    made = dealing(private_examples(records), llm=Flaky(), max_tokens=6, shots_per_label=2, noise=noise)
    assert until_done(made) > 4
    assert (runs.started, runs.private) == (2 * len(LABELS), 0)


# --- open labels ----------------------------------------------------------------------------------------------------


def open_labels(llm: Any, **options: Any) -> DemonstrationSynthesizer:
    records = [{"text": f"my card was declined id{n}.", "topic": "top"} for n in range(SIZE)]
    private = PrivateExamples(records, fields=("topic",), public_size=SIZE)
    return dealing(
        private,
        llm=llm,
        task=GenerationTask(record_prompt="up {topic}\nq: {text}", open_label=OpenLabel("topic", max_tokens=2)),
        **{"decoding": Decoding(stop=("\n", "top")), **options},
    )


def test_the_label_and_the_text_of_a_demonstration_read_the_same_batch() -> None:
    spy = Watched()
    made = open_labels(spy)
    assert [ticket.event.event.count for ticket in made.plan.tickets()] == [2 + LENGTH]  # type: ignore[union-attr]
    made.run()
    labels, texts = spy.private_prompts[::2], spy.private_prompts[1::2]
    assert [ids(prompts) for prompts in labels] == [ids(prompts) for prompts in texts]
    placed = [unit for prompts in texts for row in ids(prompts) for unit in row]
    assert sorted(placed) == sorted(f"id{n}" for n in range(SIZE))
    assert spy.scores <= DEMONSTRATIONS * (2 + LENGTH)


def test_a_text_that_was_stopped_does_not_get_what_its_label_left_over() -> None:
    """The label ends after one of its two tokens; the text stays within its own cap."""
    spy = Watched()
    made = open_labels(spy, shots_per_label=1)

    def stop() -> None:
        if spy.scores == 3:
            spy.at_score = lambda: None
            raise KeyboardInterrupt

    spy.at_score = stop
    with pytest.raises(KeyboardInterrupt):
        made.run()
    assert made._deals is not None
    assert made._deals._dealt[None].num_left(0) == 2 + LENGTH - 3
    assert made._deals.left(None, 0, 1) == LENGTH - 2
    made.run()
    assert spy.scores == 1 + LENGTH


# --- processes, threads, copies -------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_of_two_processes_one_goes_on_with_a_deal() -> None:
    spy = Watched()
    made = dealing(llm=spy)
    stream = made.stream()
    next(stream)
    scores, (readable, writable) = spy.scores, os.pipe()
    child = os.fork()
    if child == 0:
        try:
            found = "released"
            try:
                list(stream)  # the other label has no deal yet, and its ticket is the parent's to reserve
            except BaseException as error:
                found = type(error).__name__
            try:
                with made._deals._dealt["card"].batch(1, **of_batch(made)):  # type: ignore[union-attr]
                    found += " opened"
            except BaseException as error:
                found += f" {type(error).__name__} {spy.scores - scores}"
            os.write(writable, found.encode())
        finally:
            os._exit(0)
    os.close(writable)
    with os.fdopen(readable, "rb") as pipe:
        assert pipe.read() == b"LedgerError LedgerError 0"
    os.waitpid(child, 0)
    assert len(list(stream)) == 5


def test_a_block_that_is_forked_as_the_model_is_asked_releases_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Watched()
    made = dealing(llm=spy)
    spy.at_score = lambda: elsewhere(monkeypatch, blocks)
    with pytest.raises(LedgerError, match="fork"):
        made.run()
    assert made.demonstrations == []
    monkeypatch.setattr(curator, "this_process", lambda: (-1, 0))
    scores = spy.scores
    with pytest.raises(LedgerError, match="fork"):
        made.run()
    assert spy.scores == scores


def of_batch(made: DemonstrationSynthesizer) -> dict[str, Any]:
    return {
        "length": LENGTH,
        "backend": made._script.backend,
        "render": made._script.wording.renderer("text", {"topic": "card"}),
        "choose": made._script.decoder.choose,
        "prefix": (),
    }


@pytest.fixture
def deal() -> Iterator[tuple[DemonstrationSynthesizer, dealt_sample.DealtSample]]:
    """A deal whose first batch is used up."""
    made = dealing()
    stream = made.stream()
    next(stream)
    assert made._deals is not None
    yield made, made._deals._dealt["card"]
    stream.close()


def test_a_batch_is_open_once_at_a_time_and_never_beyond_what_was_paid_for(deal: Any) -> None:
    made, sample = deal
    options = of_batch(made)
    with pytest.raises(PrivacyBudgetError, match="none left"), sample.batch(0, **options):
        pytest.fail("used up")
    with sample.batch(1, **{**options, "length": 1}) as block:
        assert (block.left, sample.num_left(1)) == (1, 0)
        with pytest.raises(PrivacyBudgetError, match="none left"), sample.batch(1, **options):
            pytest.fail("opened twice")
        with sample.batch(2, **options) as other:  # another batch is another matter
            assert other.left == LENGTH
    assert block.left == 0  # who kept it releases nothing with it
    assert (sample.num_left(1), sample.num_left(2)) == (LENGTH, LENGTH)
    with sample.batch(1, **{**options, "length": 99}) as block:
        assert block.left == LENGTH
    for index in (-1, DEMONSTRATIONS, True):
        with pytest.raises(ConfigurationError, match="index"), sample.batch(index, **options):
            pytest.fail("no such batch")
    sample.close()
    with pytest.raises(PrivacyBudgetError, match="none left"), sample.batch(1, **options):
        pytest.fail("closed")


def test_a_deal_releases_by_its_batches_only(deal: Any) -> None:
    _, sample = deal
    with pytest.raises(PrivacyBudgetError, match="Use blocks"):
        next(sample.next_release(rows=lambda _: None, render=lambda _: "", width=2))
    with pytest.raises(PrivacyBudgetError, match="disjoint"):
        other = dealing(rows=Rows(slots=SLOTS, shots=SIZE, redraw_every=LENGTH), component="p").plan.release
        dealt_sample.DealtSample(None, other, length=1)  # type: ignore[arg-type]


def test_no_block_is_opened_on_all_batches_at_once() -> None:
    """It would read every unit again and again at the price of a deal, in which each is read in one batch."""
    made, spy = dealing(), Watched()
    assert made._deals is not None
    made._deals.reserve("card")
    options = {**of_batch(made), "backend": spy}
    ticket = made._deals._reserved["card"]
    with (
        pytest.raises(PrivacyBudgetError, match="deal of batches"),
        open_block(made._private, ticket, plan=made.plan.release, **options),
    ):
        pytest.fail("opened")
    assert spy.private_prompts == []


def test_a_deal_shows_nothing_and_refuses_copies(deal: Any) -> None:
    made, sample = deal
    assert repr(made._deals) == "DisjointBatches(<private>)"
    assert "id1" not in repr(vars(made._deals)) + repr(vars(sample))
    for secret in (sample, made._deals):
        with pytest.raises(PrivateAccessError, match="pickled"):
            pickle.dumps(secret)
    twin = copy.deepcopy(made._deals._dealt)
    assert twin["card"] is sample


def test_no_frame_names_prompts_while_a_batch_opens() -> None:
    made, named = dealing(), []

    def look(frame: FrameType, event: str, arg: object) -> Any:
        names = {"drawn", "batch", "<lambda>", "_renders", "open"}
        ours = {curator.__file__, dealt_sample.__file__, sys.modules[DisjointBatches.__module__].__file__}
        if frame.f_code.co_filename not in ours:
            return None
        if frame.f_code.co_name in names:
            named.append(repr(list(frame.f_locals.values())))
            return look
        return None

    before = sys.gettrace()
    sys.settrace(look)
    try:
        made.run()
    finally:
        sys.settrace(before)
    assert len(named) > 20
    assert [looks for looks in named if "id1" in looks or "my card was" in looks] == []


# --- who takes deals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("front", "options"),
    [
        (DPVotingRunnable, {"max_queries": 3, "rows": Rows(slots=8, sampling="disjoint")}),
        (
            DPFreeFormRunnable,
            {"max_queries": 3, "answers": KeywordAnswers(), "rows": Rows(slots=8, sampling="disjoint")},
        ),
    ],
    ids=["votes", "free form"],
)
def test_who_answers_queries_refuses_deals_before_any_charge(front: Any, options: dict[str, Any]) -> None:
    budget = house()
    with pytest.raises(ConfigurationError, match="sampling"):
        front.from_private_examples(private_examples(), llm=Watched(), budget=budget, epsilon=10.0, **options)
    assert counts(budget) == {}
    assert budget.report().to_dict()["shares"] == []


def test_more_slots_than_units_are_refused_before_any_charge() -> None:
    budget = house()
    with pytest.raises(ConfigurationError):
        dealing(budget=budget, rows=Rows(slots=SIZE + 1, sampling="disjoint"))
    assert budget.report().to_dict()["shares"] == []


def test_a_ledger_that_fails_at_the_commit_repeats_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Watched()
    made = dealing(llm=spy, shots_per_label=1)

    def full(self: Any, count: int = 1) -> None:
        raise LedgerError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(Reservation, "commit", full)
        with pytest.raises(LedgerError) as caught:
            made.run()
    released = [repr(example)[:80] for example in made.result.examples]  # and so is a draft
    assert [one for one in shows_private(caught.value) if "PartialText(" not in one and one not in released] == []
    assert made._deals is not None
    assert made._deals.left("card", 0, 0) == 0
    assert len(made.run().examples) == 2
    assert spy.scores == LENGTH * len(LABELS)
