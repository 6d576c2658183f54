"""`examples/weekly_messages.py` runs, and its promise is verified."""

from __future__ import annotations

import pytest

from tests.example_files import example


def test_every_week_has_its_demonstrations(capsys: pytest.CaptureFixture[str]) -> None:
    with example("weekly_messages", WEEKS=6, MESSAGES=200, PEOPLE=400, NUM_ROWS=6) as module:
        module.main()
    shown = capsys.readouterr().out
    assert "runs       2, on one share of epsilon 4; verified: True" in shown
    assert "For any person and any 30 days in a row" in shown
