"""Chances that are summed over all votes, beside the same law drawn, and tables of votes beside their definition."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from scipy import special, stats

from langchain_dpicl.planning import expected_utility
from langchain_dpicl.planning.expected_utility import (
    Contest,
    RowDesign,
    occupancy,
    right_chance,
    right_chances,
    shot_law,
    vote_chances,
)
from langchain_dpicl.planning.row_law import RowFacts, wins_fairly
from langchain_dpicl.runs.query_plan import plan_queries

LAWS = [
    RowFacts(0.6, 0.55, 0.7, 4),
    RowFacts(0.45, 0.1, 0.4, 5),
    RowFacts(0.3, 0.05, 0.3, 14),
    RowFacts(0.9, 0.8, 1.0, 2),
    RowFacts(0.5, 0.4, 0.5, 6, silent=0.5),
]
DESIGNS = [
    RowDesign.choose(rows="units", num_slots=40),
    RowDesign.choose(rows="slots", num_slots=20, shots_per_slot=4),
    RowDesign.choose(rows="slots", num_slots=10, shots_per_slot=2, overfill=1.5),
]


@pytest.mark.parametrize("facts", LAWS)
@pytest.mark.parametrize(("trials", "used"), [(1, 1.0), (1, 0.7), (2, 1.0)])
def test_few_rows_are_counted_by_hand(facts: RowFacts, trials: int, used: float) -> None:
    if trials == 1:  # a row that is right wins; one that names no label leaves a fair draw
        silent = used * (1.0 - facts.right) * facts.silent + 1.0 - used
        expected = used * facts.right + silent / facts.labels
    else:  # of two rows both are right, or one is, against a wrong one or a silent one; or both are silent
        both = facts.right**2 + facts.correlation * facts.right * (1.0 - facts.right)
        one, none = 2.0 * (facts.right - both), 1.0 - 2.0 * facts.right + both
        expected = both + one * (facts.silent + (1.0 - facts.silent) / 2.0) + none * facts.silent**2 / facts.labels
    [found] = Contest(trials, used, facts.labels).rights([facts])
    assert found == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("facts", LAWS)
@pytest.mark.parametrize(
    ("design", "mechanism"), [(DESIGNS[0], "gumbel"), (DESIGNS[1], "gaussian"), (DESIGNS[2], "gaussian")]
)
@pytest.mark.parametrize("noise", [0.4, 3.0])
def test_sums_are_what_many_draws_come_to(facts: RowFacts, design: RowDesign, mechanism: str, noise: float) -> None:
    """The draws are constant; with 64 at each node they are at most .0065 off, with 4,096 .0005."""
    terms = {"epsilon": None, "delta": 1e-6, "max_queries": 10, "width": facts.labels}
    plan = plan_queries(2_000, **terms, noise_multiplier=noise, mechanism=mechanism, design=design).release
    [summed] = right_chances(plan, 2_000, [facts])
    assert summed == pytest.approx(right_chance(plan, 2_000, facts=facts, draws=64), abs=0.012)


def test_more_rows_than_the_most_vote_with_a_chance_below_a_millionth() -> None:
    for trials in (1, 5, 40, 480, 10**6, 10**9):
        for used in np.geomspace(1e-9, 1.0, 80):
            if trials * used <= 150.0:
                assert stats.binom.sf(Contest(trials, used, 3).most, trials, used) < 1e-6, (trials, used)


@pytest.mark.parametrize("facts", LAWS)
def test_votes_of_public_rows_share_ties(facts: RowFacts) -> None:
    [found] = Contest(40, 1.0, facts.labels).rights([facts])
    assert found == pytest.approx(wins_fairly(facts.votes(40, 1.0, draws=64)).mean(), abs=0.006)
    [loud] = Contest(40, 1.0, facts.labels, "gaussian", 1e5).rights([facts])
    assert loud == pytest.approx(1.0 / facts.labels, abs=1e-3)


@pytest.mark.parametrize("noise", ["gaussian", "gumbel"])
@pytest.mark.parametrize("scale", [0.3, 2.0])
def test_the_noise_is_integrated_finely(noise: str, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    contests = [Contest(20, 0.9, facts.labels, noise, scale) for facts in LAWS]
    found = [contest.rights([facts])[0] for contest, facts in zip(contests, LAWS, strict=True)]
    monkeypatch.setitem(expected_utility._GRIDS, noise, (expected_utility._GRIDS[noise][0], 0.05, 7.0, 30.0))
    monkeypatch.setattr(expected_utility, "_LEAST_SCALE", 0.0)
    finely = [contest.rights([facts])[0] for contest, facts in zip(contests, LAWS, strict=True)]
    np.testing.assert_allclose(found, finely, rtol=0.0, atol=3e-5)


@pytest.mark.parametrize("labels", [3, 14, 77])
@pytest.mark.parametrize("width", [0.05, 0.35, 1.0])
def test_many_laws_at_once_are_each_as_alone(labels: int, width: float) -> None:
    even = 1.0 / (labels - 1)
    drawn = [RowFacts(0.13, 0.15, rival, labels) for rival in np.linspace(even, min(1.0, even + width), 9)]
    contest = Contest(20, 1.0, labels)
    alone = [contest.rights([one])[0] for one in drawn]
    np.testing.assert_allclose(contest.rights(drawn), alone, rtol=0.0, atol=6e-4)


def test_votes_of_hundreds_of_rows_have_a_chance_too() -> None:
    facts = RowFacts(0.4, 0.1, 0.5, 3)
    design = RowDesign.choose(rows="slots", num_slots=400, shots_per_slot=1)
    terms = {"epsilon": None, "delta": 1e-6, "max_queries": 10, "width": 3, "noise_multiplier": 3.0}
    plan = plan_queries(2_000, **terms, design=design).release
    [found] = right_chances(plan, 2_000, [facts])
    assert found == pytest.approx(right_chance(plan, 2_000, facts=facts, draws=64), abs=0.012)


@pytest.mark.parametrize("threshold", [None, 700.0])
def test_votes_of_thousands_of_rows_take_no_large_table(threshold: float | None) -> None:
    """32 MB suffice; with a table of all votes it was 70 MB without a threshold, and 4 GB with one."""
    design = RowDesign.choose(rows="slots", num_slots=2_500, shots_per_slot=1)
    terms = {"epsilon": None, "delta": 1e-6, "max_queries": 10, "width": 4, "noise_multiplier": 3.0}
    plan = plan_queries(8_000, **terms, mechanism="gaussian", design=design).release
    facts = RowFacts(0.5, 0.5, 0.6, 4)
    tracemalloc.start()
    try:
        vote_chances(plan, 8_000, facts=facts, threshold=threshold)
        assert tracemalloc.get_traced_memory()[1] < 32e6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("rivals", [4, 11])
@pytest.mark.parametrize("least", [None, 3.5])
def test_a_table_of_votes_says_what_each_vote_does(rivals: int, least: float | None) -> None:
    """Every gap and every rival by itself, as the integral is defined."""
    generator = np.random.default_rng(6)
    likely = [0.4, 0.3, 0.2, 0.1] + [0.0] * (rivals - 3)
    votes = generator.multinomial(generator.integers(0, 20, size=300), likely).astype(float)
    nodes, weights = expected_utility._nodes()
    found = []
    for own, *others in votes:
        low = -7.0 if least is None else min(max((least - own) / 1.7, -7.0), 7.0)
        noise = low + (7.0 - low) * nodes
        chance = np.exp(-(noise**2) / 2.0) * (7.0 - low) / np.sqrt(2.0 * np.pi)
        for other in others:
            chance = chance * special.ndtr((own - other) / 1.7 + noise)
        found.append(chance @ weights)
    columns = [(votes[:, place], 1) for place in range(1, rivals + 1)]
    np.testing.assert_allclose(
        expected_utility._normal_wins(votes[:, 0], columns, 1.7, least=least), found, rtol=0.0, atol=1e-13
    )


@pytest.mark.parametrize(("units", "num_slots", "shots"), [(8_000, 20, 4), (50, 40, 1), (3, 2, 8), (40_000, 2, 900)])
def test_slots_are_as_full_as_the_binomial_law_says(units: int, num_slots: int, shots: int) -> None:
    design = RowDesign.choose(rows="slots", num_slots=num_slots, shots_per_slot=shots, overfill=1.0)
    terms = {"epsilon": None, "delta": 1e-6, "max_queries": 10, "width": 2, "noise_multiplier": 1.0}
    plan = plan_queries(units, **terms, design=design).release
    law = stats.binom(units, plan.sampler.sampling_rate / num_slots)
    counts, found = np.arange(units + 1), occupancy(plan, units)
    assert found.empty == pytest.approx(law.pmf(0), rel=1e-12, abs=1e-15)
    assert found.shots == pytest.approx((np.minimum(counts, shots) * law.pmf(counts)).sum(), rel=1e-9)
    shown, chances = zip(*shot_law(plan, units), strict=True)
    assert shown == tuple(range(1, shots + 1))
    np.testing.assert_allclose(chances, [*law.pmf(shown[:-1]), law.sf(shots - 1)], rtol=1e-9, atol=1e-11)
