"""Components take a private process as their model; it is what a refusal advises, and the advice works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from langchain_dpicl import PrivacyBudgetCallbackHandler, PrivateExamples
from langchain_dpicl.backends import PrivateProcess
from langchain_dpicl.evolution import PrivateEvolution
from langchain_dpicl.exceptions import ConfigurationError
from tests.canary import canaries_in
from tests.leaks import rooms
from tests.leaks.matrix import _perform
from tests.leaks.scene import Scene


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[PrivateProcess, Path]]:
    """A process, and the file that its model makes when it is asked something private."""
    mark = tmp_path_factory.mktemp("process") / "asked"
    with PrivateProcess("tests.leaks.models:filed", path=str(mark)) as process:
        yield process, mark


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("few-shot prompt", "invoke"),
        ("few-shot prompt", "ainvoke"),
        ("synthesizer", "stream"),
        ("synthesizer", "astream"),
        ("voting", "batch"),
        ("voting", "abatch"),
        ("free form by keywords", "abatch"),
        ("votes of documents", "invoke"),
        ("texts of documents", "abatch"),
        ("labels", "stream"),
        ("labels", "ainvoke"),
        ("discovery", "stream"),
        ("documents", "astream"),
    ],
)
def test_every_component_works_with_a_process(
    name: str, entry: str, asked: tuple[PrivateProcess, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    process, mark = asked
    mark.unlink(missing_ok=True)
    monkeypatch.setattr(rooms, "engine", lambda *_: process)
    monkeypatch.setattr(rooms, "TextVoteBackend", lambda *_, **__: process)
    scene = Scene(entry, is_naive=False)
    _perform(scene, next(room for room in rooms.ROOMS if room.name == name))
    assert scene.error is None
    assert mark.exists()


@pytest.mark.loopback
def test_the_advice_of_a_refusal_works_while_the_sdk_is_instrumented() -> None:
    """In a process of its own, as instrumentation stays."""
    program = [sys.executable, "-m", "tests.unit_tests.backends.private_process.watched_application"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    told: dict[str, Any] = json.loads(done.stdout)
    assert told["is_watched"]
    assert 'backends.PrivateProcess("provider:model")' in told["refused"]
    assert told["answer"].strip() in {"card", "other"}
    assert told["private"] >= 2  # a row and its calibration; the four records may fall into one slot
    assert told["leaks"] == []
    assert told["seen_by"] == [told["address"]]
    assert canaries_in(done.stderr) == []


def test_private_evolution_wants_the_model_itself(asked: tuple[PrivateProcess, Path]) -> None:
    private = PrivateExamples([{"text": "a b c"}] * 30, public_size=30)
    budget = PrivacyBudgetCallbackHandler(epsilon=5.0, delta=1e-4)
    for llm in (asked[0], asked[0].engine("texts")):
        with pytest.raises(ConfigurationError, match="the model itself"):
            PrivateEvolution.from_private_examples(private, llm=llm, epsilon=5.0, budget=budget)
