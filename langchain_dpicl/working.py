"""Runs jobs inside a worker process, which makes its own model, records and budget."""

# The worker reads private examples where it runs. They never leave it: not in an answer, nor in an error, whose frames
# and words stay in the process.

from __future__ import annotations

import importlib
import math
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.callbacks import resolve_budget
from langchain_dpicl.exceptions import (
    ConfigurationError,
    DPICLError,
    LedgerError,
    MemoError,
    PrivacyBudgetMismatchError,
)
from langchain_dpicl.executors import Answer, Work
from langchain_dpicl.privacy._validate import fail
from langchain_dpicl.privacy.examples import PrivateExamples
from langchain_dpicl.privacy.shares import Uncopyable
from langchain_dpicl.stores import MemoKey, ReleaseMemo, SQLiteMemo, SQLiteStore
from langchain_dpicl.stores.memos import TURN_SECONDS


class Workplace(Uncopyable):
    """What a worker works with. A function of yours makes it, in each worker: nothing of it is ever sent there.

    Formal guarantees:
      - It is not pickled, and shows nothing of the records.

    Args:
      llm: the model or engine, on the worker's own device, or a client with the worker's own keys.
      private: the examples, read by the worker; the same, under the same `dataset_id`, in each worker.
      budget: the budget on a ledger that all workers reach: PostgreSQL.
      memo: where released things are kept before their tickets are committed: `PostgresMemo`.

    Raises:
      ConfigurationError: the examples are none.

    Example:
      >>> from langchain_dpicl.backends.fake import FakeBackend, scripted
      >>> Workplace(FakeBackend(scripted({"a": 1.0}), max_top_k=1))
      Workplace(llm=FakeBackend, private=None, budget=None, memo=None)
    """

    def __init__(
        self, llm: Any, *, private: PrivateExamples | None = None, budget: Any = None, memo: ReleaseMemo | None = None
    ) -> None:
        if private is not None and not isinstance(private, PrivateExamples):
            raise fail("private", "PrivateExamples, or None", type(private).__name__)
        self.llm = llm
        self.private = private
        self.budget = budget
        self.memo = memo
        self._is_one_host = False

    def paid(self, *, ledger_id: str, num_jobs: int) -> tuple[PrivateExamples, Budget, ReleaseMemo]:
        """Returns examples, budget and memo for work that spends, if all workers share ledger and memo.

        Args:
          ledger_id: the ledger of whoever hands out the jobs.
          num_jobs: answers that the memo has to hold.

        Raises:
          ConfigurationError: something is missing, or the memo keeps fewer answers.
          PrivacyBudgetMismatchError: the worker has another ledger.
          LedgerError: the ledger or the memo is not one that all workers reach.
        """
        if self.private is None or self.budget is None or self.memo is None:
            raise fail("workplace", "private, budget and memo beside the model", repr(self))
        budget = resolve_budget(self.budget, None)
        if budget.ledger_id != ledger_id:
            msg = f"workplace: expected ledger {ledger_id}, found {budget.ledger_id}. Open the driver's ledger there."
            raise PrivacyBudgetMismatchError(msg)
        _check_shared("ledger", budget._store, SQLiteStore, is_one_host=self._is_one_host)  # noqa: SLF001
        _check_shared("memo", self.memo, SQLiteMemo, is_one_host=self._is_one_host)
        size = getattr(self.memo, "size", 0)
        if size < num_jobs:
            raise fail("memo", f"room for {num_jobs} answers", size, f"Open it with size={num_jobs} or more.")
        return self.private, budget, self.memo

    def __repr__(self) -> str:
        shown = {"private": self.private, "budget": self.budget, "memo": self.memo}
        parts = ", ".join(f"{name}={value and type(value).__name__}" for name, value in shown.items())
        return f"Workplace(llm={type(self.llm).__name__}, {parts})"


class TurnLostError(MemoError):
    """Another worker took over this worker's job."""


class JobTurn:
    """A lease on a job, so that no other worker pays for it; a live holder renews it, a dead one loses it in time."""

    def __init__(self, memo: ReleaseMemo, key: MemoKey) -> None:
        self._memo = memo
        self._key = key
        self._holder = secrets.token_hex(16)
        self._seconds: float = getattr(memo, "turn_seconds", TURN_SECONDS)
        self._since = -math.inf

    def take(self) -> bool:
        """Takes or renews the lease; False if another worker has it."""
        now = time.monotonic()  # before it is written: it lasts at least so long
        has_it = self._memo.claim(self._key, self._holder)
        self._since = now if has_it else -math.inf
        return has_it

    def check(self, told: str | None) -> None:
        """Takes the turn again where a quarter of it is over; called right before a ticket is reserved.

        Args:
          told: what stood in the memo as this worker left it.

        Raises:
          TurnLostError: another worker has it, or went on with the job meanwhile.
        """
        if time.monotonic() - self._since < self._seconds / 4:
            return
        if not self.take() or self._memo.recall(self._key) != told:
            raise TurnLostError("memo: expected the turn at this job, found that another worker has gone on with it.")

    def leave(self) -> None:
        """Ends the lease."""
        self._memo.leave(self._key, self._holder)

    def busy(self, *, tickets: int = 0) -> Answer:
        """Returns the answer of a worker that has no lease, with the seconds that a lease lasts."""
        return Answer("busy", self._seconds, tickets=tickets)


def check_reached(budget: Budget, *, is_one_host: bool) -> None:
    """Refuses a ledger that not every worker can reach, before anything is declared."""
    _check_shared("ledger", budget._store, SQLiteStore, is_one_host=is_one_host)  # noqa: SLF001


def _check_shared(what: str, target: Any, file_kind: type[Any], *, is_one_host: bool) -> None:
    """Refuses a ledger or memo that other processes or hosts do not share."""
    kind = type(target)
    is_server = kind.__module__.startswith("langchain_dpicl.stores.postgres")
    if is_server or (is_one_host and isinstance(target, file_kind)):
        return
    file = " or, where all workers were started on this host, a SQLite file" if is_one_host else ""
    raise LedgerError(
        f"{what}: expected one that all workers reach, in PostgreSQL{file}, found {kind.__name__}. With one of its own "
        "each worker would spend the whole budget: nothing is granted."
    )


@dataclass(frozen=True, slots=True)
class Setup:
    """Which function makes a worker's place; public, as it is sent to workers.

    Attributes:
      name: "module:function"; the module can be imported by every worker.
      options: its keyword arguments, public JSON values: paths and names, never records or keys.
    """

    name: str
    options: Mapping[str, Any]

    def place(self) -> Workplace:
        """Calls the function.

        Raises:
          ConfigurationError: it cannot be found, raises, or returns something else; of what it raises only the class is
            told, as its words may hold private text.
          DPICLError: it raised an error of ours, whose words are public.
        """
        module, _, attribute = self.name.partition(":")
        result: Any = None
        try:
            result = getattr(importlib.import_module(module), attribute)(**self.options)
            kind = type(result).__name__
        except DPICLError:
            raise
        except Exception as error:  # noqa: BLE001  whatever the user's module raises
            kind = type(error).__name__
        if not isinstance(result, Workplace):
            msg = f"workplace: expected {self.name} to return a Workplace, found {kind}."
            raise ConfigurationError(f"{msg} Workers import its module: install it there, or set their PYTHONPATH.")
        return result


class Worker:
    """Runs orders and jobs in one process. No method raises, so that no frame is pickled, logged or shown elsewhere."""

    def __init__(self, setup: Setup, *, is_one_host: bool) -> None:
        self._setup = setup
        self._is_one_host = is_one_host
        self._place: Workplace | None = None
        self._works: dict[str, Callable[[Any], Answer]] = {}
        self._orders: dict[str, Work] = {}

    def begin(self, work: Work) -> Answer:
        """Begins an order once; another order under the same key is refused."""
        return _answered(lambda: self._begun(work))

    def do(self, key: str, job: Any) -> Answer:
        """Runs one job of an order that has begun."""
        return _answered(lambda: self._works[key](job))

    def _begun(self, work: Work) -> Answer:
        if self._place is None:
            self._place = self._setup.place()
            self._place._is_one_host = self._is_one_host  # noqa: SLF001  its own module
        key = work.key
        if key not in self._works:
            self._works[key] = work.begin(self._place)
            self._orders[key] = work
        elif self._orders[key] != work:
            raise fail("work", "the order that was begun under this key", "another", "Orders differ by their keys.")
        return Answer("done")

    def __repr__(self) -> str:
        return f"Worker({self._setup.name})"


def _answered(action: Callable[[], Answer]) -> Answer:
    """Returns the answer of an action; an exception stays here with its frames."""
    try:
        return action()
    except (SystemExit, KeyboardInterrupt) as error:
        stop = type(error)
    except BaseException as error:  # noqa: BLE001  whatever a work raises
        return Answer.of_fault(error)
    raise stop  # from a frame without anything private


__all__ = ["JobTurn", "Setup", "TurnLostError", "Worker", "Workplace", "check_reached"]
