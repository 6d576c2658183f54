"""An executor whose workers are objects of this process, which die when a test says so: handing out without a cluster."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from langchain_dpicl import Decoding, Rows
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.budget.handler import PrivacyBudgetCallbackHandler
from langchain_dpicl.distributed import Executor, Job, JobResult, Worker, WorkerFactory
from langchain_dpicl.generation.synthesizer import DemonstrationSynthesizer
from langchain_dpicl.pate.labeler import PromptPATELabeler
from langchain_dpicl.stores import SQLiteMemo
from tests.ray_places import PUBLIC_SIZE, engine, records


class Crew(Executor):
    """Workers that answer when they are waited for, the first asked first.

    Args:
      setup: makes their places.
      num_workers: how many.
      dies: called with (number of the job in all, job); True: the worker is gone before it has done it, "after": when
        it had done it, and before it could say so.
    """

    def __init__(
        self,
        setup: WorkerFactory,
        *,
        num_workers: int = 2,
        dies: Callable[[int, Any], bool | str] = lambda number, job: False,
        is_one_host: bool = True,
    ) -> None:
        super().__init__()
        self.num_workers = num_workers
        self.setup = setup
        self.dies = dies
        self.hired = 0
        self.dismissed = 0
        self.jobs: list[Any] = []
        self._one_host = is_one_host
        self._asked: deque[int] = deque()
        self._calls: dict[int, Callable[[], JobResult | None]] = {}

    @property
    def is_one_host(self) -> bool:
        return self._one_host

    def _hire(self) -> Worker:
        self.hired += 1
        return Worker(self.setup, is_one_host=self._one_host)

    def _dismiss(self, handle: Worker) -> None:
        self.dismissed += 1

    def _begin(self, handle: Worker, work: Job) -> int:
        sent = pickle.dumps(work)  # as it crosses machines
        return self._ask(lambda: self._said(handle.begin(pickle.loads(sent))))  # noqa: S301  our own

    def _do(self, handle: Worker, key: str, job: Any) -> int:
        self.jobs.append(job)
        fate = self.dies(len(self.jobs), job)
        if fate is True:
            return self._ask(lambda: None)
        if fate == "after":
            return self._ask(lambda: handle.do(key, job) and None)
        return self._ask(lambda: self._said(handle.do(key, job)))

    @staticmethod
    def _said(answer: JobResult) -> JobResult:
        told: JobResult = pickle.loads(pickle.dumps(answer))  # noqa: S301  our own
        return told

    def _ask(self, call: Callable[[], JobResult | None]) -> int:
        number = len(self._calls)
        self._calls[number] = call
        self._asked.append(number)
        return number

    def _ready(self, awaited: Sequence[int], seconds: float) -> Sequence[int]:
        return [number for number in self._asked if number in awaited][:1]

    def _answer(self, awaited: int) -> JobResult | None:
        self._asked.remove(awaited)
        return self._calls[awaited]()


class House:
    """A ledger and a memo in files, what their workers get, and components on them."""

    def __init__(self, folder: Path, *, epsilon: float = 100.0) -> None:
        self.ledger, self.memo = folder / "ledger.db", folder / "memo.db"
        PrivacyBudgetCallbackHandler.create(self.ledger, epsilon=epsilon, delta=1e-3).budget.close()
        SQLiteMemo(self.memo)

    def setup(self, **options: Any) -> WorkerFactory:
        return WorkerFactory("tests.ray_places:place", {"ledger": str(self.ledger), "memo": str(self.memo), **options})

    def budget(self) -> Budget:
        return PrivacyBudgetCallbackHandler.open(self.ledger).budget

    def crew(self, **how: Any) -> Crew:
        return Crew(self.setup(**how.pop("options", {})), **how)

    def synthesizer(self, executor: Any, **options: Any) -> DemonstrationSynthesizer:
        """Two labels with three demonstrations each, of at most three tokens."""
        given: dict[str, Any] = {
            "epsilon": 4.0,
            "shots_per_label": 3,
            "max_tokens": 3,
            "rows": Rows(units=4),
            "decoding": Decoding(candidates=3),
        }
        given |= {"llm": engine(), "budget": self.budget(), "component": "demo", "executor": executor, **options}
        return DemonstrationSynthesizer.from_private_examples(records(str(self.ledger), PUBLIC_SIZE), **given)

    def labeler(self, executor: Any, inputs: Sequence[str], **options: Any) -> PromptPATELabeler:
        given: dict[str, Any] = {"epsilon": 8.0, "public_inputs": inputs, "rows": Rows(units=4)}
        given |= {"llm": engine(), "budget": self.budget(), "component": "labels", "executor": executor, **options}
        return PromptPATELabeler.from_private_examples(records(str(self.ledger), PUBLIC_SIZE), **given)
