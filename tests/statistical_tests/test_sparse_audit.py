"""The sparse vector test with the operating system's coins: its law, an audit of its price, planted bugs.

Each assertion that must hold of the sound package fails by chance with probability at most 1e-6 (`ALARM`); each
planted bug passes by chance with a probability far below that, at the fixed sizes used here.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import integrate, stats

from langchain_dpicl.privacy.extensions import sparse_vector as sparse
from langchain_dpicl.privacy.extensions.sparse_vector import SparseVectorTest, Threshold
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM, SecureRandom
from tests.audit_games import clopper_pearson_lower, clopper_pearson_upper
from tests.contracts.mechanism import ROOM

ALARM = 1e-6
MADE, SLOTS = SparseVectorTest(0.3, 1.0), 4
BASE = 0.3 * SLOTS + 2 * math.log(4 / 3)
"""The threshold before its noise, in rows."""

# --- planted bugs -----------------------------------------------------------------------------------------------------

statistic, start, geometric, is_above = (
    SparseVectorTest.statistic,
    SparseVectorTest.start,
    SecureRandom.geometric,
    Threshold.is_above,
)


def plant_no_noise_on_the_threshold(patch):
    """Only the questions are noisy."""
    patch.setattr(SecureRandom, "geometric", lambda rng, scale: geometric(rng, scale) if _is_question(scale) else 0)


def plant_half_the_noise_of_a_question(patch):
    """A question has the scale of the threshold."""
    patch.setattr(SecureRandom, "geometric", lambda rng, scale: geometric(rng, scale // (1 + _is_question(scale))))


def plant_no_noise_on_the_question(patch):
    """Only the threshold is noisy."""
    patch.setattr(SecureRandom, "geometric", lambda rng, scale: 0 if _is_question(scale) else geometric(rng, scale))


def _is_question(scale):
    return scale > 1.5 * 2**32


def plant_realised_rows(patch):
    """The mean is over the rows that are there, and so counts more if there are few."""

    def found(made, rows, public):
        present = np.nan_to_num(rows).any(axis=1).sum()
        return statistic(made, rows, public) * (len(rows) / present if present else 1.0)

    patch.setattr(SparseVectorTest, "statistic", found)


def plant_softmax_of_the_mean(patch, clip=20.0):
    """As published elsewhere: the softmax of the mean of clipped logits."""

    def found(made, rows, public):
        with np.errstate(divide="ignore"):
            mixed = np.exp(np.clip(np.log(rows), -clip, clip).mean(axis=0))
        return statistic(made, np.tile(mixed / mixed.sum(), (len(rows), 1)), public)

    patch.setattr(SparseVectorTest, "statistic", found)


def plant_the_whole_l1_distance(patch):
    """Twice the total variation, at the noise of once."""
    patch.setattr(SparseVectorTest, "statistic", lambda made, *given: 2.0 * statistic(made, *given))


def plant_one_threshold_for_all_runs(patch):
    """A new run takes up the noisy threshold of the first."""
    kept = []

    def again(made, num_rows, *, rng):
        kept[:] = kept or [start(made, num_rows, rng=rng)._height]
        return Threshold(kept[0], 2 * (2**32 + 1))

    patch.setattr(SparseVectorTest, "start", again)


def plant_the_threshold_of_every_second_run_is_kept(patch):
    """The noise is reused once after "above", then drawn anew."""
    kept = []

    def again(made, num_rows, *, rng):
        run = start(made, num_rows, rng=rng)
        if kept:
            run._height = kept.pop()
        else:
            kept.append(run._height)
        return run

    patch.setattr(SparseVectorTest, "start", again)


# --- audit: what neighbours let an adversary tell apart ---------------------------------------------------------------

AWAY, PUBLIC = [1.0, 0.0], np.array([0.0, 1.0])  # rows that stand apart from the public distribution, and it


def slots(others, target):
    """Returns rows of which three stand away by `others` in all, or abstain, and the target's stands away or not."""
    rest = [[others / 3, 1 - others / 3]] * 3 if others is not None else [[math.nan, math.nan]] * 3
    row = {"away": AWAY, "home": [0.0, 1.0], "fails": [math.nan, math.nan]}[target]
    return np.array([*rest, row])


# game: (target's rows of each question, those of its neighbour, the others' distance per question, answers)
GAMES = {
    "attained": (("home", "away"), ("away", "home"), (BASE, BASE - 1), (False, True)),
    "just below": (("home",), ("away",), (BASE - 1.01,), (False,)),
    "alone": (("fails", "away"), ("away", "fails"), (None, None), (False, True)),
    "undecided": (("home", "away"), ("away", "home"), (1.5, 1.5), (False, True)),
    "near home": (("home", "away"), ("away", "home"), (0.6, 0.6), (False, True)),
}


def happened(levels, answers):
    """Plays one run and returns whether it gave these answers, the last of which ends it."""
    run = MADE.start(SLOTS, rng=SYSTEM_RANDOM)
    return all(run.is_above(level, rng=SYSTEM_RANDOM) == answer for level, answer in zip(levels, answers, strict=True))


def loss(game, runs):
    """Returns a lower bound on epsilon: above the true one with probability at most `ALARM`."""
    one, other, others, answers = GAMES[game]
    counts = []
    for targets in (one, other):
        levels = [MADE.statistic(slots(*asked), PUBLIC) for asked in zip(others, targets, strict=True)]
        counts.append(sum(happened(levels, answers) for _ in range(runs)))
    least, most = clopper_pearson_lower(counts[0], runs, ALARM / 2), clopper_pearson_upper(counts[1], runs, ALARM / 2)
    return math.log(least / most) if least else -math.inf


@pytest.mark.parametrize("game", GAMES)
def test_no_game_shows_more_than_the_price(game):
    """Clopper-Pearson on 2,500 runs of each side; false alarm at most 1e-6 per game."""
    found = loss(game, 2_500)
    assert found <= MADE.event.epsilon == 2.0
    assert game != "attained" or found > 0.5  # no empty game: its true loss is the price; by chance below 1e-9


def test_the_game_that_attains_the_price_is_worth_it_in_closed_form():
    """E > 0 and a question of twice the scale: 1/6 against 1/6 e^-2."""
    with_target = integrate.quad(lambda h: math.exp(-h) * (1 - math.exp(-h / 2)) * math.exp(-h / 2), 0, 60)[0]
    without = integrate.quad(lambda h: math.exp(-h) * (1 - math.exp(-(h - 1) / 2)) * math.exp(-(h + 1) / 2), 1, 60)[0]
    assert with_target == pytest.approx(1 / 6)
    assert math.log(with_target / without) == pytest.approx(MADE.event.epsilon)


PLANTS = {
    "no noise on the threshold": (plant_no_noise_on_the_threshold, "just below", 2_000),
    "half the noise of a question": (plant_half_the_noise_of_a_question, "attained", 10_000),
    "no noise on a question": (plant_no_noise_on_the_question, "undecided", 1_000),
    "realised rows": (plant_realised_rows, "alone", 2_000),
    "softmax of the mean": (plant_softmax_of_the_mean, "undecided", 2_000),
    "the whole L1 distance": (plant_the_whole_l1_distance, "near home", 3_000),
}


@pytest.mark.parametrize("bug", PLANTS)
def test_a_planted_bug_shows_more_than_the_price(bug, monkeypatch):
    """A plant passes by chance with probability at most 2.4e-7, by the exact law of both counts."""
    plants, game, runs = PLANTS[bug]
    plants(monkeypatch)
    assert loss(game, runs) > MADE.event.epsilon


# --- the law of the answers -------------------------------------------------------------------------------------------

LEVELS = (0.5, 2.5, 1.8, 3.0)
"""Statistics of four questions, the last of which may be answered "below" as well."""


def first_above(levels=LEVELS):
    """Returns the place of the first "above" of one run, or the number of questions."""
    run = MADE.start(SLOTS, rng=SYSTEM_RANDOM)
    return next((place for place, level in enumerate(levels) if run.is_above(level, rng=SYSTEM_RANDOM)), len(levels))


def law(scale=1.0, question=2.0, base=BASE, levels=LEVELS):
    """Returns the chances of each place by quadrature over the threshold's noise."""
    survival = lambda height, level: math.exp(-max(height - level, 0.0) / question)  # noqa: E731

    def reaches(place, noise):
        below = math.prod(1 - survival(base + noise, level) for level in levels[:place])
        return math.exp(-noise / scale) / scale * below

    corners = sorted({max(level - base, 0.0) for level in levels})
    left = [
        integrate.quad(lambda noise, k=place: reaches(k, noise), 0, 60 * scale, points=corners, limit=200)[0]
        for place in range(len(levels) + 1)
    ]
    return -np.diff([*left, 0.0])


def law_pvalue(places, expected):
    """Returns the chi-square p-value of places against their chances."""
    counts = np.bincount(places, minlength=len(expected))
    return ROOM * stats.chisquare(counts, np.array(expected) * len(places)).pvalue


def test_the_first_above_has_the_law_of_the_definition_and_no_other():
    """Chi-square on 6,000 runs against quadrature, false alarm 1e-6; other scales and other constants are rejected."""
    places = [first_above() for _ in range(6_000)]
    assert law_pvalue(places, law()) > ALARM
    for wrong in ({"scale": 0.7}, {"scale": 1.4}, {"question": 1.4}, {"question": 2.8}, {"base": BASE - 0.4},
                  {"base": 0.3 * SLOTS}):  # fmt: skip
        assert law_pvalue(places, law(**wrong)) < ALARM, wrong


@pytest.mark.parametrize(
    "plants",
    [plant_no_noise_on_the_threshold, plant_half_the_noise_of_a_question, plant_one_threshold_for_all_runs],
    ids=["no noise on the threshold", "half the noise", "one threshold"],
)
def test_a_planted_bug_has_another_law(plants, monkeypatch):
    plants(monkeypatch)
    assert law_pvalue([first_above() for _ in range(2_500)], law()) < ALARM


def test_a_statistic_at_the_threshold_is_above_in_half_of_the_first_questions():
    """Binomial test on 2,000 runs, false alarm 1e-6; the same number without the constant is rejected."""
    hits = sum(happened([0.3 * SLOTS], [True]) for _ in range(2_000))
    assert stats.binomtest(hits, 2_000, 0.5).pvalue > ALARM
    assert stats.binomtest(hits, 2_000, 2 / 3).pvalue < ALARM


def links(pairs=2_000):
    """Returns the p-value of a link between a run and the next: the chi-square test of independence of their places."""
    table = np.zeros((2, 2))
    for _ in range(pairs):
        one, other = (first_above((BASE, BASE)) > 0 for _ in range(2))
        table[int(one), int(other)] += 1
    return ROOM * stats.chi2_contingency(table, correction=False).pvalue


def test_a_run_tells_nothing_of_the_threshold_of_the_next():
    """Chi-square test of independence on 2,000 pairs of runs, false alarm 1e-6."""
    assert links() > ALARM


def test_a_threshold_that_is_used_again_after_above_is_caught(monkeypatch):
    plant_the_threshold_of_every_second_run_is_kept(monkeypatch)
    assert links() < ALARM


# --- the coins --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1, 2, 7])
def test_small_geometric_draws_have_their_chances(scale):
    """Chi-square on 10,000 draws, false alarm 1e-6; a scale of 0.7 or 1.4 times is rejected."""
    draws = np.array([SYSTEM_RANDOM.geometric(scale) for _ in range(10_000)])
    last = 4 * scale
    for factor, is_law in ((1.0, True), (0.7, False), (1.4, False)):
        chances = -np.diff([*np.exp(-np.arange(last + 1) / (factor * scale)), 0.0])
        assert (law_pvalue(np.minimum(draws, last), chances) > ALARM) == is_law


def test_large_geometric_draws_are_exponential():
    """Kolmogorov-Smirnov on 10,000 draws, false alarm 1e-6; a wrong scale is rejected."""
    scale = 3 * 2**40 + 1
    draws = np.array([SYSTEM_RANDOM.geometric(scale) / scale for _ in range(10_000)])
    assert stats.kstest(draws, "expon").pvalue > ALARM
    assert stats.kstest(draws * 1.3, "expon").pvalue < ALARM
    assert sparse._STEPS == 2**32  # what a whole row is, and with it the grid of the noise
