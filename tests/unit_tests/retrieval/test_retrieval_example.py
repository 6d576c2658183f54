"""The example of votes of retrieved documents runs, and pays once."""

from __future__ import annotations

import pytest

from tests.example_files import example


def test_the_example_answers_and_pays_once(capsys: pytest.CaptureFixture[str]) -> None:
    with example("retrieval_voting") as module:
        module.SIZE = 40
        module.main([])
    shown = capsys.readouterr().out
    assert "epsilon left: 1.0" in shown
    assert "Privacy report" in shown
    assert shown.count("\n   -> ") == 20
