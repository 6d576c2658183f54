"""Each of the bugs of published code, planted in ours, turns every test red that is there for it; without it all pass."""

from __future__ import annotations

import numpy as np
import pytest

from langchain_dpicl.exceptions import SensitivityError
from tests.mutation.privacy_mutants import PLANTED, Planted


@pytest.mark.planted
@pytest.mark.parametrize("bug", PLANTED, ids=lambda bug: bug.words)
def test_a_planted_privacy_bug_turns_every_test_red_that_is_there_for_it(bug: Planted, monkeypatch) -> None:
    for red in bug.red:
        red()
    bug.plants(monkeypatch)
    for red in bug.red:
        with pytest.raises((AssertionError, SensitivityError)), np.errstate(all="ignore"):
            red()


def test_there_are_nineteen_of_them() -> None:
    assert len({bug.words for bug in PLANTED}) == 19
