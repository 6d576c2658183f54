"""The example of a soft prompt runs offline: it plans, trains, saves, verifies and serves."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        import soft_prompt

        patch.setattr(soft_prompt, "PUBLIC_STEPS", 2)
        patch.setattr(soft_prompt, "SIZE", 200)
        yield soft_prompt
        for name in ("soft_prompt", "bank_questions"):
            sys.modules.pop(name, None)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(example: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    example.make_model(str(made))
    return made


def test_it_trains_saves_verifies_and_serves(
    example: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(example, "make_model", lambda target: shutil.copytree(folder, target))
    example.main(["--steps", "2"])
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown[:5]] == ["plan", "epsilon", "before", "trained", "after"]
    assert "verified: True" in shown[3]
    served = [line for line in shown if line.startswith("served ")]
    assert len(served) == 4
    assert all(line.rpartition(" (")[0].endswith(example.LABELS) for line in served)
    assert "files    ['adapter_config.json', 'adapter_model.safetensors', 'soft_prompt.json']" in shown
    assert any("step x 2" in line for line in shown)


def test_a_model_of_ones_own_is_taken_from_its_folder(
    example: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(example, "make_model", None)
    before = {one.name: one.read_bytes() for one in folder.iterdir()}
    example.main(["--model", str(folder), "--steps", "1", "--epsilon", "2"])
    assert "promised  epsilon 2, delta 1e-05" in capsys.readouterr().out
    assert {one.name: one.read_bytes() for one in folder.iterdir()} == before


def test_it_says_what_to_install(example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example, "find_spec", lambda name: None if name == "torch" else object())
    with pytest.raises(SystemExit, match=r'needs torch: pip install "langchain-dpicl\[hf\]"'):
        example.main([])
