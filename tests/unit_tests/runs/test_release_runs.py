"""The contract of runs, for two counters and for a run of lines that has all that a run may have."""

from __future__ import annotations

import asyncio
import io
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from langchain_dpicl import Budget, PrivateExamples, UnitCounter, ValueDiscovery, WordDiscovery
from langchain_dpicl.backends.sync_async import Blocking, EffectGenerator, concurrency_limit
from langchain_dpicl.budget.handler import RunEvents
from langchain_dpicl.exceptions import ConfigurationError, ModelCallError, RunInterruptedError
from langchain_dpicl.options import LocalExecutor
from langchain_dpicl.privacy._validate import check_int
from langchain_dpicl.privacy.accounting.events import PureEvent
from langchain_dpicl.privacy.extensions.value_counts import UnitValues
from langchain_dpicl.privacy.extensions.word_release import WordRelease
from langchain_dpicl.privacy.ledger.shares import Reservation
from langchain_dpicl.privacy.ledger.tickets import Ticket
from langchain_dpicl.runs.release_run import ReleaseRun, RunCall, RunJournal, check_paid, new_bar
from tests.contracts.release_run import CANARY, Calls, JournalContract, ReleaseRunContract, raises

NUM_LINES = 4
SOON = 30.0


@dataclass
class Line:
    """One line, which one ticket pays."""

    number: int
    text: str = ""
    ticket: Reservation | None = None
    done: bool = False
    busy: bool = False


class Lines(ReleaseRun[str, tuple[str, ...]]):
    """Releases lines, one ticket each; two tickets more than lines are there for those that are lost."""

    _item_name = "line"

    def __init__(self, *args: Any, calls: Calls, **options: Any) -> None:
        super().__init__(*args, **options)
        self._calls = calls
        self.limits: list[int | None] = []
        self._resume()
        done = sum(item.done for item in self._items)
        check_paid(done, used=NUM_LINES + 2 - self.share.remaining("line"), what="lines")

    def _make(self, item: Line, call: RunCall) -> EffectGenerator[None]:
        item.ticket = self.share.reserve("line")
        call.events.tickets += 1
        item.ticket.burn()
        yield Blocking(self._calls)
        self.limits.append(concurrency_limit())
        item.text, item.done = f"line {item.number}", True
        self._record({"number": item.number, "text": item.text}, item.ticket)
        item.ticket.commit()
        call.tick()

    def _give_back(self, item: Line, events: RunEvents) -> None:
        if item.ticket is not None:
            events.tickets -= item.ticket.give_back()

    def _restore(self, entry: Mapping[str, Any]) -> None:
        item = self._items[check_int("number", entry["number"], low=0, high=len(self._items) - 1)]
        item.text, item.done = str(entry["text"]), True

    def _examples(self, item: Line) -> Sequence[str]:
        return [item.text] if item.done else []

    def _value(self) -> tuple[str, ...]:
        return tuple(item.text for item in self._items if item.done)


@dataclass(frozen=True)
class LinesPlan:
    """Says what a run shows of its plan."""

    method = "lines"
    partition = "lines"

    def to_dict(self) -> dict[str, Any]:
        return {"lines": NUM_LINES}


def lines(
    budget: Budget, calls: Calls, *, component: str = "mine", checkpoint: Path | None = None, **options: Any
) -> Lines:
    private = PrivateExamples([CANARY], public_size=1, dataset_id=LinesPlan.partition)
    plan = LinesPlan()
    _, journal = RunJournal.of(checkpoint, component, "lines", budget=budget, private=private, plan=plan.to_dict())
    tickets = (Ticket("line", PureEvent(0.1), max_count=NUM_LINES + 2, refundable=True),)
    share = budget.declare(component, tickets=tickets, public=plan.to_dict())
    items = [Line(number) for number in range(NUM_LINES)]
    return Lines(private, items, plan=plan, budget=budget, share=share, journal=journal, calls=calls, **options)


def _show_a_bar() -> None:
    with new_bar(1, "line", "another bar", progress=True):
        pass


def test_a_terminal_that_does_not_say_its_size_shows_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    stream: Any = io.StringIO()
    stream.fileno = lambda: 2
    monkeypatch.setattr(os, "get_terminal_size", lambda *_: os.terminal_size((0, 0)))
    monkeypatch.setattr(sys, "stderr", stream)
    _show_a_bar()
    assert "another bar" in stream.getvalue()


class TestLines(JournalContract):
    build = staticmethod(lines)  # type: ignore[assignment]

    def parts(self, result: tuple[str, ...]) -> list[str]:
        return list(result)

    def test_the_message_says_how_much_is_kept(self, budget: Budget) -> None:
        made = lines(budget, Calls({3: raises(ModelCallError("out of reach."))}))
        with pytest.raises(RunInterruptedError) as caught:
            made.run(progress=False)
        assert str(caught.value) == (
            "Lines stopped: out of reach. 2 of 4 lines are released and kept; tickets that burnt stay charged. "
            "Call run() on error.run to continue."
        )
        assert made.result == ("line 0", "line 1")

    def test_the_executor_and_then_the_config_limit_the_calls_in_flight(self, budget: Budget) -> None:
        made = lines(budget, Calls(), executor=LocalExecutor(max_concurrency=3))
        stream = made.stream(progress=False)
        next(stream)
        assert made.limits == [3]
        assert concurrency_limit() is None
        stream.close()
        made.run(progress=False, config={"max_concurrency": 7})
        assert made.limits == [3, 7, 7, 7]

    @pytest.mark.parametrize("progress", [None, True])
    def test_a_process_without_stderr_shows_no_bar(
        self, budget: Budget, monkeypatch: pytest.MonkeyPatch, progress: bool | None
    ) -> None:
        monkeypatch.setattr(sys, "stderr", None)  # as Python starts under pythonw, or with `2>&-`
        assert len(lines(budget, Calls()).run(progress=progress)) == NUM_LINES

    @pytest.mark.parametrize("left", [0, 1, 2, 3])
    def test_a_terminal_that_goes_away_ends_no_run(
        self, budget: Budget, monkeypatch: pytest.MonkeyPatch, left: int
    ) -> None:
        class Terminal(io.StringIO):
            def write(self, text: str) -> int:
                nonlocal left
                left -= 1
                if left < 0:
                    raise BrokenPipeError
                return len(text)

        monkeypatch.setattr(sys, "stderr", Terminal())
        assert len(lines(budget, Calls()).run(progress=True)) == NUM_LINES
        # Where this thread still held tqdm's lock, no other one could show a bar.
        other = threading.Thread(target=_show_a_bar, daemon=True)
        other.start()
        other.join(SOON)
        assert not other.is_alive()

    def test_a_stream_that_is_left_makes_way_for_a_run(self, budget: Budget) -> None:
        made = lines(budget, Calls())
        stream = made.stream(progress=False)
        assert next(stream) == "line 0"
        assert len(made.run(progress=False)) == NUM_LINES
        assert list(stream) == []

    async def test_a_cancelled_run_keeps_what_was_released(self, budget: Budget) -> None:
        made = lines(budget, Calls())
        stream = made.astream(progress=False)
        assert await anext(stream) == "line 0"
        await stream.aclose()  # type: ignore[attr-defined]
        task = asyncio.create_task(made.arun(progress=False))
        await asyncio.sleep(0)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        assert len(await made.arun(progress=False)) == NUM_LINES

    def test_a_config_that_is_none_is_refused(self, budget: Budget) -> None:
        with pytest.raises(ConfigurationError, match="config"):
            lines(budget, Calls()).run(config="now")  # type: ignore[arg-type]


class Counts(ReleaseRunContract):
    """Counts read their records instead of a model."""

    FAILS_AT = 1
    IS_ONE_RELEASE = True

    @pytest.fixture(autouse=True)
    def _reads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Lets the suite act as the first record is read."""
        real = UnitValues.of
        self._acts: dict[str, Calls] = {}

        def of(rule: UnitValues, records: Any) -> Any:
            for calls in list(self._acts.values()):
                self._acts.clear()
                calls()
            return real(rule, records)

        monkeypatch.setattr(UnitValues, "of", of)

    def counted(self, calls: Calls) -> PrivateExamples:
        self._acts["next"] = calls
        records = [{"text": CANARY, "kind": "plain"}] * 300
        return PrivateExamples(records, fields=("kind",), public_size=1_000)

    def parts(self, result: Any) -> list[Any]:
        return list(result.counts.items())


class TestUnitCounter(Counts):
    def build(self, budget: Budget, calls: Calls, *, component: str = "mine") -> UnitCounter:
        return UnitCounter.from_private_examples(
            self.counted(calls), budget=budget, epsilon=1.0, component=component, field="kind", values=("plain", "odd")
        )


class TestWordDiscovery(ReleaseRunContract):
    """Words read their records instead of a model; each of two labels has a release of its own.

    A ticket that burnt without a result is gone, and the next call makes the releases that are left.
    """

    FAILS_AT = 1

    @pytest.fixture(autouse=True)
    def _reads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Lets the suite act as the first record of each label is read."""
        real = WordRelease.weights
        self._calls: list[Calls] = []

        def weights(release: WordRelease, units: Any, known: Any, gone: Any) -> Any:
            for calls in self._calls:
                calls()
            return real(release, units, known, gone)

        monkeypatch.setattr(WordRelease, "weights", weights)

    def build(self, budget: Budget, calls: Calls, *, component: str = "mine") -> WordDiscovery:
        self._calls = [calls]
        records = [{"text": "velda hums", "kind": kind} for kind in ("plain", "odd") for _ in range(300)]
        records += [{"text": CANARY, "kind": "plain"}]
        private = PrivateExamples(records, label_key="kind", labels=("plain", "odd"), public_size=1_000)
        return WordDiscovery.from_private_examples(private, budget=budget, epsilon=1.0, component=component)

    def parts(self, result: Any) -> list[Any]:
        return [pair for group in result.groups for pair in group.words]

    def kept(self, made: Any) -> list[Any]:
        return [pair for item in made._items for pair in item.words or ()]


class TestValueDiscovery(Counts):
    def build(self, budget: Budget, calls: Calls, *, component: str = "mine") -> ValueDiscovery:
        return ValueDiscovery.from_private_examples(
            self.counted(calls), budget=budget, epsilon=1.0, component=component, field="kind"
        )
