"""Evaluations and choices over neighbouring data sets and hostile texts: nothing differs but what the noise decides."""

from __future__ import annotations

import asyncio
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from langchain_core.language_models.llms import LLM
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import RunnableLambda

from langchain_dpicl import Budget, PrivateExamples
from langchain_dpicl._opaque import run_guarded
from langchain_dpicl.evaluation import (
    Choice,
    EvaluationResult,
    Exact,
    Judge,
    Pure,
    Score,
    dp_achoose,
    dp_aevaluate,
    dp_choose,
    dp_evaluate,
    evaluators,
    plan,
)
from langchain_dpicl.privacy.ledger.store import InMemoryStore
from langchain_dpicl.release import count_release
from langchain_dpicl.runs import release_run
from tests.contracts.neighbours import NeighbourContract, fault, owned, unstamped
from tests.doubles import PanicError

pytestmark = pytest.mark.usefixtures("free_prices")


class Fragile(LLM):
    """Does what prompts tell it to do."""

    @property
    def _llm_type(self):
        return "fragile"

    def _call(self, prompt, stop=None, run_manager=None, **kwargs):
        for order, error in (("RAISES", RuntimeError), ("PANICS", PanicError), ("EXITS", SystemExit)):
            if order in prompt:
                logging.getLogger("fragile").error("failed at %s", prompt)
                raise error(prompt)
        prompt.encode()
        return "" if "FAILS" in prompt else ("yes", "no", "Neither.")[len(prompt) % 3]


def loud(inputs, outputs, reference):
    """Says what it sees in every way that code has, and raises for one answer."""
    logging.getLogger("loud").warning("seen %s %s %s", inputs, outputs, reference)
    warnings.warn(str((inputs, outputs, reference)), stacklevel=1)
    return {"yes": 2, "no": 1}[outputs]


MODEL, TEMPLATE = Fragile(), PromptTemplate.from_template("{text}\nAnswer:")
CHAIN = TEMPLATE | MODEL
STEPS = CHAIN | RunnableLambda(Pure(lambda text: text[:3]))
OTHER = ChatPromptTemplate.from_messages([("system", "Be brief."), ("human", "{text}")]) | MODEL
MARKS = Score(Pure(loud), marks=(0, 1, 2), name="loud")
JUDGE = Judge(PromptTemplate.from_template("{text} {answer} {answered}") | MODEL | RunnableLambda(Pure(str.strip)))
DESIGNS: dict[str, dict[str, Any]] = {
    "exact": {"evaluators": Exact()},
    "sampled": {"evaluators": [Exact(), MARKS], "sample": 3},
    "judged": {"evaluators": JUDGE},
    "loud": {"evaluators": MARKS, "chain": STEPS},
    "pair": {"evaluators": MARKS, "baseline": OTHER},
    "half": {"evaluators": Exact(), "part": "test"},
    "changed": {"evaluators": Exact(), "adjacency": "replace_one"},
    "choice": {"evaluator": Exact()},
    "choice of marks": {"evaluator": MARKS, "sample": 3},
    "choice of a half": {"evaluator": Exact(), "part": "choose"},
}


class Scene:
    """One data set and its ledger."""

    def __init__(self, texts: tuple[str, ...], *, design: str, users: str | None) -> None:
        self.options, self.store = {**DESIGNS[design]}, InMemoryStore()
        adjacency = self.options.pop("adjacency", "add_remove")
        self.budget = Budget(epsilon=50, delta=1e-4, adjacency=adjacency, store=self.store)
        records = owned([{"text": text, "answered": "no"} for text in texts], users)
        self.private = PrivateExamples(
            records, label_key="answered", labels=("yes", "no"), public_size=6, unit_key=users and "user"
        )

    def ask(self, *, is_async: bool, **more: Any) -> Any:
        given = {**self.options, "budget": self.budget, "epsilon": 5.0, "progress": True, **more}
        if "evaluator" in given:
            chains = {"one": CHAIN, "steps": STEPS, "other": OTHER}
            if is_async:
                return asyncio.run(dp_achoose(chains, self.private, **given))
            return dp_choose(chains, self.private, **given)
        chain = given.pop("chain", CHAIN)
        return asyncio.run(dp_aevaluate(chain, self.private, **given)) if is_async else (
            dp_evaluate(chain, self.private, **given)
        )  # fmt: skip


def _masked(found: EvaluationResult | Choice) -> Any:
    """What a result shows without what the noise decides."""
    told = found.to_dict()
    released = told.pop("released")
    if isinstance(found, Choice):
        assert released["chosen"] in {"one", "steps", "other"}
        return [unstamped(told), released["lead"]]
    cells = {name: [cell[:-1] for cell in (*one["counts"], *one.get("by_score", ()))] for name, one in released.items()}
    return [unstamped(told), cells]


def what_functions_log_is_heard(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(evaluators, "read_silently", run_guarded)


def the_sample_is_logged(patch: pytest.MonkeyPatch) -> None:
    real = count_release._sampled

    def sampled(*given: Any) -> Any:
        found = real(*given)
        logging.getLogger("langchain_dpicl").warning("%d units were read", len(found))
        return found

    patch.setattr(count_release, "_sampled", sampled)


def the_bar_counts_units(patch: pytest.MonkeyPatch) -> None:
    real = count_release._sampled

    def sampled(*given: Any) -> Any:
        found = real(*given)
        with release_run.tqdm(total=6) as bar:
            for _ in found:
                bar.update()
        return found

    patch.setattr(count_release, "_sampled", sampled)


class TestEvaluating(NeighbourContract):
    """A release, the same again, another one, and a refusal of the budget."""

    designs = DESIGNS
    owned_designs = ("exact", "choice", "half")
    async_designs = ("exact", "judged", "choice of marks")
    planted_design = "loud"
    plants: ClassVar[Any] = {
        "what own functions log is heard": (what_functions_log_is_heard, "FAILED otherwise"),
        "the size of the sample is logged": (the_sample_is_logged, ""),
        "the bar counts units": (the_bar_counts_units, ""),
    }
    progress = release_run

    @pytest.fixture(autouse=True)
    def coarse_intervals(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Intervals are what the noise decides, which is not compared; they would take a quarter of the time."""
        monkeypatch.setattr(plan, "_GRID", 21)
        monkeypatch.setattr(plan, "_POINTS", 40)

    @classmethod
    def scene(cls, texts: tuple[str, ...], *, design: str, path: Path, users: str | None) -> Scene:
        del path
        return Scene(texts, design=design, users=users)

    @classmethod
    def steps(cls, scene: Scene, *, is_async: bool) -> Iterator[Any]:
        for more in ({}, {}, {"epsilon": 2.0, "timeout": 30}, {"epsilon": 48.0}):
            try:
                found = scene.ask(is_async=is_async, **more)
                yield [_masked(found), repr(found.plan)]
            except Exception as error:
                yield fault(error)
            yield [scene.budget.remaining_epsilon, repr(scene.private), repr(scene.budget)]

    @pytest.mark.parametrize("design", DESIGNS)
    def test_what_is_compared_holds_results_and_a_refusal(self, design: str) -> None:
        seen = json.loads(self.usual(design))
        assert [isinstance(seen[place][0], list) for place in (0, 2, 4)] == [True] * 3
        assert seen[6][0] == "PrivacyBudgetExceededError"
        assert seen[1][0] == seen[3][0], "the same call again is free"
