"""What every run must do: keep, carry, stop, continue, refuse. Subclass `ReleaseRunContract`, and `JournalContract`.

A subclass builds its run on a budget, and lets the suite act at the calls of its model, as one that fails would.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import os
import pickle
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.runnables import RunnableLambda

from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.budget.handler import PrivacyBudgetCallbackHandler, get_privacy_budget_callback
from langchain_dpicl.exceptions import (
    ConfigurationError,
    LedgerUnavailableError,
    ModelCallError,
    PrivacyBudgetError,
    PrivacyBudgetMismatchError,
    PrivateAccessError,
    RunInterruptedError,
)
from langchain_dpicl.privacy.ledger.shares import Reservation
from langchain_dpicl.runs.release_run import ReleaseRun, RunJournal
from langchain_dpicl.stores import SQLiteStore
from tests.faults.children import Child

CANARY = "zx-run-canary-71"
"""Put it into every private record."""

BOTH = pytest.mark.parametrize("awaited", [False, True], ids=["sync", "async"])


class Calls:
    """Acts at the model calls of a run: `at[number]` is called at that one, counted from 1."""

    def __init__(self, at: dict[int, Callable[[], object]] | None = None) -> None:
        self.at = at or {}
        self.number = 0

    def __call__(self) -> None:
        self.number += 1
        self.at.get(self.number, lambda: None)()


def raises(error: BaseException) -> Callable[[], object]:
    def act() -> None:
        raise error

    return act


def started(made: ReleaseRun[Any, Any], *, awaited: bool, **options: Any) -> Any:
    """Runs to the end, sync or async."""
    return asyncio.run(made.arun(progress=False, **options)) if awaited else made.run(progress=False, **options)


def entries_in(path: Path) -> list[dict[str, Any]]:
    """Returns the releases in a journal."""
    return [json.loads(line)["entry"] for line in path.read_bytes().splitlines()[1:]]


class ReleaseRunContract:
    """The suite."""

    FAILS_AT: ClassVar[int] = 2
    """The call that the suite lets fail; what is released before it is kept."""
    IS_ONE_RELEASE: ClassVar[bool] = False
    """Whether a run has one ticket, which the call that fails has burnt, so that it cannot continue."""

    def build(self, budget: Budget, calls: Calls, **options: Any) -> ReleaseRun[Any, Any]:
        """Returns a new run of the component "mine", or of `component`, over records that hold the canary."""
        raise NotImplementedError

    def parts(self, result: Any) -> list[Any]:
        """Returns what `stream` yields for a result, in any order."""
        raise NotImplementedError

    def kept(self, made: ReleaseRun[Any, Any]) -> list[Any]:
        """Returns what an interrupted run has released, and keeps when it is continued."""
        return self.parts(made.result)

    @pytest.fixture
    def budget(self) -> Budget:
        return Budget(epsilon=1e6, delta=1e-4)

    def test_a_run_ends_and_another_call_is_free(self, budget: Budget) -> None:
        made = self.build(budget, calls := Calls())
        assert not made.is_finished
        assert made.component == "mine" == made.share.component
        result, paid = made.run(progress=False), calls.number
        assert made.is_finished
        assert made.run(progress=False) == made.result == result == asyncio.run(made.arun(progress=False))
        assert not budget.dangling()
        assert copy.deepcopy(made) is made
        with pytest.raises(PrivateAccessError):
            pickle.dumps(made)
        assert list(made.stream(progress=False)) == []
        assert calls.number == paid
        assert made.report["component"] == "mine"
        assert made.report["ledger_id"] == budget.ledger_id

    def test_a_ledger_that_cannot_be_read_afterwards_keeps_no_result_back(
        self, budget: Budget, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made = self.build(budget, Calls())
        result = made.run(progress=False)
        for name in ("head", "records"):
            monkeypatch.setattr(type(budget._store), name, lambda *_, **__: raises(LedgerUnavailableError("gone"))())
        with pytest.raises(LedgerUnavailableError, match="gone"):
            budget.report()
        assert made.result == result

    @BOTH
    def test_what_is_streamed_is_the_result(self, budget: Budget, awaited: bool) -> None:
        made = self.build(budget, Calls())

        async def streamed() -> list[Any]:
            return [part async for part in made.astream(progress=False)]

        yielded = asyncio.run(streamed()) if awaited else list(made.stream(progress=False))
        found = self.parts(made.result)
        assert len(yielded) == len(found)
        assert all(part in found for part in yielded)

    def test_async_releases_as_much_as_sync(self) -> None:
        sizes = []
        for awaited in (False, True):
            made = self.build(Budget(epsilon=1e6, delta=1e-4), Calls())
            sizes.append(len(self.parts(started(made, awaited=awaited))))
        assert sizes[0] == sizes[1] > 0

    @BOTH
    def test_a_failed_call_interrupts_and_the_error_carries_the_run(self, budget: Budget, awaited: bool) -> None:
        made = self.build(budget, calls := Calls({self.FAILS_AT: raises(ModelCallError("out of reach"))}))
        with pytest.raises(RunInterruptedError, match=r"out of reach|failed|computed") as caught:
            started(made, awaited=awaited)
        assert caught.value.run is made
        assert caught.value.__cause__ is None
        assert caught.value.__context__ is None
        assert CANARY not in str(caught.value) + repr(made)
        if self.IS_ONE_RELEASE:
            with pytest.raises(PrivacyBudgetError):
                started(made, awaited=awaited)
            return
        kept = self.kept(made)
        started(made, awaited=awaited)
        assert made.is_finished
        assert all(part in self.kept(made) for part in kept)
        assert calls.number > self.FAILS_AT

    @BOTH
    @pytest.mark.parametrize("error", [KeyboardInterrupt(), LedgerUnavailableError("locked")])
    def test_every_other_error_carries_the_run_too(
        self, budget: Budget, monkeypatch: pytest.MonkeyPatch, error: BaseException, awaited: bool
    ) -> None:
        made = self.build(budget, Calls())
        with monkeypatch.context() as patched:
            patched.setattr(Reservation, "burn", lambda *_: raises(error)())
            with pytest.raises(type(error)) as caught:
                started(made, awaited=awaited)
        assert caught.value.run is made  # type: ignore[attr-defined]

    @BOTH
    def test_another_run_of_it_meanwhile_is_refused(self, budget: Budget, awaited: bool) -> None:
        refused: list[str] = []

        def again() -> None:
            with pytest.raises(ConfigurationError) as caught:
                made.run(progress=False)
            refused.append(str(caught.value))

        made = self.build(budget, Calls({self.FAILS_AT: again}))
        started(made, awaited=awaited)
        assert "no other run" in refused[0]
        assert made.is_finished
        assert not budget.dangling()

    @BOTH
    def test_another_budget_in_the_config_or_around_the_call_is_refused(self, budget: Budget, awaited: bool) -> None:
        made, other = self.build(budget, Calls()), PrivacyBudgetCallbackHandler(epsilon=1.0, delta=1e-5)
        with pytest.raises(PrivacyBudgetMismatchError, match="given to the constructor"):
            started(made, awaited=awaited, config={"callbacks": [other]})
        with (
            get_privacy_budget_callback(epsilon=1.0, delta=1e-5),
            pytest.raises(PrivacyBudgetMismatchError, match="given to the constructor"),
        ):
            started(made, awaited=awaited)
        assert not made.share.sealed

    @BOTH
    def test_handlers_of_the_config_hear_what_is_charged(self, budget: Budget, awaited: bool) -> None:
        heard: list[tuple[str, Any]] = []

        class Listener(BaseCallbackHandler):
            def on_custom_event(self, name: str, data: Any, **_: Any) -> None:
                heard.append((name, data))

        made = self.build(budget, Calls())
        config = {"callbacks": [Listener()]}

        async def inside(_: Any) -> None:
            await made.arun(progress=False, config=config)

        step = RunnableLambda(lambda _: made.run(progress=False, config=config), inside)
        asyncio.run(step.ainvoke("go")) if awaited else step.invoke("go")
        charged = [data for name, data in heard if name == "dpicl.charged"]
        assert {data["component"] for data in charged} == {type(made).__name__}
        assert sum(data["tickets"] for data in charged) > 0
        assert {name for data in charged for name in data} == {"component", "tickets", "share", "budget"}
        assert CANARY not in repr(heard)


def stop_once_while_a_line_is_made(monkeypatch: pytest.MonkeyPatch, *, at: int) -> None:
    """Has Ctrl-C come while line number `at` from now is made, before the journal holds it."""
    real, seen = RunJournal._add, itertools.count(1)

    def add(journal: RunJournal, entry: Any) -> None:
        if next(seen) == at:
            raise KeyboardInterrupt
        real(journal, entry)

    monkeypatch.setattr(RunJournal, "_add", add)


class JournalContract(ReleaseRunContract):
    """The suite of runs with a checkpoint; `build` takes `checkpoint=` as well."""

    @pytest.fixture
    def durable(self, tmp_path: Path) -> Iterator[Callable[[], Budget]]:
        """Opens the same ledger on a disk, as another process would."""
        path = tmp_path / "ledger.db"
        Budget(epsilon=1e6, delta=1e-4, store=SQLiteStore.new(path)).close()
        opened: list[Budget] = []

        def open_it() -> Budget:
            opened.append(Budget.open(SQLiteStore(path)))
            return opened[-1]

        yield open_it
        for budget in opened:
            budget.close()

    def test_a_stream_yields_what_could_not_be_written_too(
        self, budget: Budget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real, synced, streamed = os.fsync, itertools.count(1), []

        def fails_once(number: int) -> None:
            if next(synced) == 2:  # the first is of the terms
                raise OSError("disk full")
            real(number)

        made = self.build(budget, Calls(), checkpoint=tmp_path / "run.jsonl")
        monkeypatch.setattr(os, "fsync", fails_once)
        with pytest.raises(OSError, match="disk full"):
            streamed.extend(made.stream(progress=False))
        streamed += made.stream(progress=False)
        assert len(streamed) == len(self.parts(made.result))

    @BOTH
    def test_a_killed_run_continues_in_another_process(
        self, durable: Callable[[], Budget], tmp_path: Path, awaited: bool
    ) -> None:
        path = tmp_path / "run.jsonl"

        def killed(tell: Any) -> None:
            calls = Calls({self.FAILS_AT + 1: lambda: os.kill(os.getpid(), signal.SIGKILL)})
            for part in self.build(durable(), calls, checkpoint=path).stream(progress=False):
                tell(repr(part))

        told = Child(killed).lines()
        assert path.exists()
        made = self.build(durable(), Calls(), checkpoint=path)
        found = self.parts(started(made, awaited=awaited))
        assert {part for part in told if isinstance(part, str)} <= {repr(part) for part in found}
        again = self.build(durable(), unused := Calls(), checkpoint=path)
        assert again.is_finished
        assert self.parts(again.run(progress=False)) == found
        assert unused.number == 0

    def test_every_release_is_written_before_its_ticket_commits(
        self, budget: Budget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path, commit, lines = tmp_path / "run.jsonl", Reservation.commit, []

        def committed(self: Reservation, count: int = 1) -> None:
            lines.append(len(path.read_bytes().splitlines()))
            commit(self, count)

        monkeypatch.setattr(Reservation, "commit", committed)
        self.build(budget, Calls(), checkpoint=path).run(progress=False)
        assert lines == sorted(lines)
        assert lines[0] == 2  # the terms, and the first release

    def test_what_could_not_be_written_is_kept_and_written_by_the_next_call(
        self, budget: Budget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path, real, synced = tmp_path / "run.jsonl", os.fsync, [0]

        def fails_once(number: int) -> None:
            synced[0] += 1
            if synced[0] == 2:  # the first is of the terms
                raise OSError("disk full")
            real(number)

        made = self.build(budget, Calls(), checkpoint=path)
        monkeypatch.setattr(os, "fsync", fails_once)
        with pytest.raises(OSError, match="disk full") as caught:
            made.run(progress=False)
        assert caught.value.run is made  # type: ignore[attr-defined]
        found = self.parts(made.run(progress=False))
        assert self.parts(self.build(budget, Calls(), checkpoint=path).result) == found
        assert not budget.dangling()

    def test_the_checkpoint_of_another_run_is_refused(self, budget: Budget, tmp_path: Path) -> None:
        path = tmp_path / "run.jsonl"
        self.build(budget, Calls(), checkpoint=path).run(progress=False)
        before = path.read_bytes()
        for other, options in ((budget, {"component": "another"}), (Budget(epsilon=1e6, delta=1e-4), {})):
            with pytest.raises(ConfigurationError, match="another run's"):
                self.build(other, Calls(), checkpoint=path, **options)
        assert path.read_bytes() == before

    def test_a_checkpoint_that_the_ledger_has_not_paid_for_is_refused(
        self, durable: Callable[[], Budget], tmp_path: Path
    ) -> None:
        path, ledger, older = tmp_path / "run.jsonl", tmp_path / "ledger.db", tmp_path / "older.db"
        shutil.copy(ledger, older)
        budget = durable()
        self.build(budget, Calls(), checkpoint=path).run(progress=False)
        budget.close()
        shutil.copy(older, ledger)  # a backup is put back
        with pytest.raises(ConfigurationError, match="checkpoint: expected"):
            self.build(durable(), Calls(), checkpoint=path)

    def test_two_runs_do_not_write_one_checkpoint(self, budget: Budget, tmp_path: Path) -> None:
        path = tmp_path / "run.jsonl"
        first, second = (self.build(budget, Calls(), checkpoint=path) for _ in range(2))
        first.run(progress=False)
        before = path.read_bytes()
        with pytest.raises(ConfigurationError, match="another run wrote to"):
            second.run(progress=False)
        assert path.read_bytes() == before
        assert not budget.dangling()

    def test_the_journal_is_public(self, budget: Budget, tmp_path: Path) -> None:
        path = tmp_path / "run.jsonl"
        made = self.build(budget, Calls(), checkpoint=path)
        made.run(progress=False)
        head = json.loads(path.read_bytes().splitlines()[0])["entry"]
        assert head["component"] == "mine"
        assert head["ledger_id"] == budget.ledger_id
        assert all(CANARY.encode() not in each.read_bytes() for each in tmp_path.iterdir())
