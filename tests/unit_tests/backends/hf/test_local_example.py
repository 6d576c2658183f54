"""The example of a local model runs offline: it plans, pays once, writes with one engine and serves with the same."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from langchain_core.prompts import PromptTemplate
from transformers.utils import logging as bars

from langchain_dpicl import PrivacyBudgetCallbackHandler
from langchain_dpicl.backends.hf.backend import HuggingFaceBackend
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.prompts import DPFewShotPromptTemplate

EXAMPLES = Path(__file__).resolve().parents[4] / "examples"


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        import local_model

        yield local_model
        for name in ("local_model", "bank_questions"):
            sys.modules.pop(name, None)
    torch.set_num_threads(threads)
    bars.enable_progress_bar()  # the example hides them


@pytest.fixture(scope="module")
def folder(example: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    example.make_model(str(made))
    return made


def copied(folder: Path) -> Any:
    """Stands for `make_model`, which another test has run."""
    return lambda target: shutil.copytree(folder, target, dirs_exist_ok=True)


def test_it_prints_a_plan_demonstrations_answers_and_the_budget(
    example: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(example, "make_model", copied(folder))
    example.main(["--max-tokens", "4"])
    shown = capsys.readouterr().out
    assert "recentered_clip: clip " in shown
    assert [line.split("]")[0] for line in shown.splitlines() if line.startswith("   [")] == [
        f"   [{label}" for label in example.LABELS
    ]
    assert shown.count("served   ") == 2
    assert "text: 4 tokens on one sample x 4 over 4 labels" in shown


def test_a_model_of_ones_own_is_loaded_from_its_folder(
    example: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(target: str) -> None:
        raise AssertionError(target)

    monkeypatch.setattr(example, "make_model", refuse)
    example.main(["--model", str(folder), "--max-tokens", "1", "--epsilon", "2"])
    assert "promised  epsilon 2, delta 1e-05" in capsys.readouterr().out
    with pytest.raises(ConfigurationError, match="does not exist"):
        example.main(["--model", "some/hub-name"])


def test_one_sample_serves_one_demonstration_and_one_engine_does_both(example: Any, folder: Path) -> None:
    engine = HuggingFaceBackend(str(folder), max_prompt_tokens=96)
    budget = PrivacyBudgetCallbackHandler(epsilon=3.0, delta=1e-5)
    synthesizer = example.plan_demonstrations(engine, budget, max_tokens=3)
    assert [(ticket.max_count, ticket.label) for ticket in synthesizer.plan.tickets()] == [
        (1, label) for label in example.LABELS
    ]
    assert budget.remaining_epsilon == 0
    prompt = DPFewShotPromptTemplate.from_run(
        synthesizer,
        example_prompt=PromptTemplate.from_template("question: {text}\ntopic: {label}"),
        suffix="question: {input}\ntopic:",
    )
    chain = example.as_chain(prompt, engine)
    assert chain.steps[1].backend is engine
    pieces = list(chain.stream({"input": "my card"}))
    assert "".join(pieces) == chain.invoke({"input": "my card"})


def test_it_says_what_to_install(example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example, "find_spec", lambda name: None if name == "torch" else object())
    with pytest.raises(SystemExit, match=r'needs torch: pip install "langchain-dpicl\[hf\]"'):
        example.main([])
