"""The commands make private calls in a process of their own where the settings say so."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from langchain_dpicl.backends import PrivateProcess
from langchain_dpicl.cli.inputs import Model, load_model
from langchain_dpicl.cli.main import main
from langchain_dpicl.released.demonstrations import ReleasedDemonstrations
from tests.unit_tests.cli.test_cli import generate, json_lines


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_module_of_the_current_folder_is_found_there_and_reports_say_where_prompts_went(folder: Path) -> None:
    (folder / "engine_of_its_process.py").write_text(
        "import os\nfrom tests.engines import ENGINE\nopen('made', 'a').close()\n"
    )
    records = folder / "records.jsonl"
    records.write_bytes(json_lines())
    process = ("--set", "model.private_process=true", "--quiet")
    assert generate(records, "out.json", *process, model="engine_of_its_process:ENGINE") == 0
    assert (folder / "made").exists()
    assert "engine_of_its_process" not in sys.modules
    released = ReleasedDemonstrations.load("out.json")
    assert len(released.examples) == 2
    assert "a process of its own" in released.to_json()


def test_what_cannot_be_made_there_is_bad_input(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = folder / "records.jsonl"
    records.write_bytes(json_lines())
    assert generate(records, "out.json", "--set", "model.private_process=true", model="tests.engines:nothing") == 2
    assert "has no attribute 'nothing'" in capsys.readouterr().err


def test_a_prompt_is_trained_in_the_process_of_the_command_alone(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "records.jsonl").write_bytes(json_lines())
    (folder / "model").mkdir()
    asked = ("--public-size", "30", "--epsilon", "8", "--delta", "1e-6", "--set", "training.steps=3", "--out", "soft")
    task = (
        "--set",
        "task.template={text} is",
        "--set",
        'task.labels=["a", "b"]',
        "--set",
        "model.private_process=true",
    )
    batch = ("--set", "training.expected_batch_size=10")
    assert main(["train", "records.jsonl", "--model", "model", *asked, *task, *batch]) == 2
    assert "model.private_process: expected false: gradients are computed in this" in capsys.readouterr().err


def test_the_embedded_model_and_folders_of_models_go_there_too(folder: Path) -> None:
    made = load_model(Model(name=str(folder), device="cpu", private_process=True))
    assert isinstance(made, PrivateProcess)
    assert "HuggingFaceBackend" in repr(made)
    assert "EmbeddedModel" in repr(load_model(Model(private_process=True)))
