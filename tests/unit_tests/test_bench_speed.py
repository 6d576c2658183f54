"""The table of every speed goal: verdicts, and what the parts of this file measure, on small data."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import _speed_api
import _speed_retrieval
import _speed_voting
import bench_speed
from _speed_goals import Goal, rows_of, table_of

MADE = Goal("a goal", 1.0, 2_000.0, 0.5, 0.4)


@pytest.mark.parametrize(
    ("ratio", "limit", "at_least", "verdict"),
    [(1.3, 1.3, False, "PASS"), (1.31, 1.3, False, "MISSED"), (10.0, 10.0, True, "PASS"), (9.9, 10.0, True, "MISSED")],
)
def test_a_goal_is_met_up_to_its_limit(ratio: float, limit: float, at_least: bool, verdict: str) -> None:
    assert Goal("a goal", 1.0, 1.0, ratio, limit, at_least=at_least).verdict == verdict


def test_a_row_shows_goal_ours_anchor_ratio_and_verdict() -> None:
    assert rows_of([MADE]) == [("a goal", "1 ms", "2,000 ms", "0.5", "<= 0.4", "MISSED")]
    assert table_of([MADE]).splitlines()[-1] == "| a goal | 1 ms | 2,000 ms | 0.5 | <= 0.4 | MISSED |"


@pytest.mark.benches
def test_voting_and_retrieval_give_ratios_of_their_own_numbers() -> None:
    [voting] = _speed_voting.goals(records=(100,), rounds=20)
    assert voting.ratio == pytest.approx(voting.ours / voting.anchor)
    [retrieval] = _speed_retrieval.goals(documents=300, turns=1)
    assert retrieval.ratio == pytest.approx(retrieval.anchor / retrieval.ours)


@pytest.mark.benches
@pytest.mark.loopback
def test_answers_and_texts_are_measured_over_a_server_of_this_machine() -> None:
    one, many, texts = _speed_api.goals(turns=1, answers=2, tokens=2)
    assert one.anchor >= 1e3 * _speed_api.LATENCY
    assert many.unit == "calls/s"
    assert "(88 calls in " in texts.name


@pytest.mark.benches
def test_the_table_holds_every_part_and_says_which_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"voting": {"records": (100,), "rounds": 20}}
    goals, missing = bench_speed.run(["voting", "nowhere"], sizes)
    assert len(goals) == 1
    assert missing == {"nowhere": "this version does not have it"}
    monkeypatch.setattr(bench_speed, "run", lambda _: ([MADE], {"local": "torch is not installed"}))
    assert bench_speed.main(["--json", str(tmp_path / "out" / "speed.json")]) == 0
    shown = capsys.readouterr().out
    assert "| a goal | 1 ms | 2,000 ms | 0.5 | <= 0.4 | MISSED |" in shown
    assert "texts of a local model | - | - | - | - | NOT MEASURED: torch is not installed" in shown
    assert json.loads((tmp_path / "out" / "speed.json").read_text())["goals"][0]["verdict"] == "MISSED"
