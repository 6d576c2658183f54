"""`examples/unknown_labels.py` runs, finds what many share, and says nothing of the one."""

from __future__ import annotations

import pytest

from tests.example_files import example


def test_topics_that_many_share_are_found_and_the_one_that_names_somebody_is_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with example("unknown_labels") as module:
        module.main()
    said = capsys.readouterr().out
    assert all(f"  {topic:<16} about" in said for topic in ("card payment", "transfer", "cash withdrawal", "top up"))
    assert "recomputed: True" in said
    assert "quigley" not in said.lower()
