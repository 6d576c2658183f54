"""Released sequences and vectors, drawn with the operating system's coins: their law, and an audit of their epsilon.

Each assertion that must hold fails by chance with probability at most 1e-6 (`ALARM`); each planted bug passes by
chance with a probability far below that, at the fixed sizes used here.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
from scipy import stats

from langchain_dpicl.privacy.accounting import epsilon_bound
from langchain_dpicl.privacy.accounting.events import BoundedRangeEvent
from langchain_dpicl.privacy.extensions import joint_exponential as joint
from langchain_dpicl.privacy.extensions.joint_exponential import JointExponentialMechanism, KeywordSum
from langchain_dpicl.privacy.extensions.normalized_sums import UnitVectorSum
from langchain_dpicl.privacy.mechanisms.bounded import Sensitivity
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM
from langchain_dpicl.privacy.mechanisms.release_plan import GaussianMechanism
from tests.contracts.mechanism import ROOM, softmax

ALARM = 1e-6
SLOTS = {"row_shape": "slots", "adjacency": "add_remove"}


def shells_off_by_one(self):
    """Planted: positions counted from 0 where the product counts them from 1."""
    within = [math.prod(n + 1 for n in self.factors(v)) for v in range(self.widest + 1)]
    return [within[0], *(b - a for a, b in itertools.pairwise(within))]


# --- the law of sequences ---------------------------------------------------------------------------------------------

COUNTED = np.array([[1, 1, 0, 0], [1, 0, 0, 0], [1, 0, 1, 0]])  # counts 3, 1, 1, 0
SEQUENCES = list(itertools.permutations(range(4), 2))


def gap(counts, sequence):
    """Minus the utility, by its definition."""
    ordered = sorted(counts, reverse=True)
    return max(ordered[i] - counts[j] for i, j in enumerate(sequence))


def sequences(releases=10_000):
    """Returns how often each sequence was released."""
    total = KeywordSum().bound(COUNTED, width=4, **SLOTS)
    mechanism = JointExponentialMechanism(0.5, num_choices=2)
    found = [SEQUENCES.index(mechanism.release(total, rng=SYSTEM_RANDOM).indices) for _ in range(releases)]
    return np.bincount(found, minlength=len(SEQUENCES))


def sequences_pvalue(found, scale):
    """Chi-square p-value of released sequences against the definition at a scale."""
    wanted = softmax([-gap([3, 1, 1, 0], s) for s in SEQUENCES], scale)
    return ROOM * stats.chisquare(found, np.array(wanted) * found.sum()).pvalue


def test_sequences_are_drawn_with_the_probabilities_of_the_definition():
    """Chi-square over 12 sequences, 10,000 releases, false alarm 1e-6; the scale is 0.5 * 2 * range 2, no other."""
    found = sequences()
    assert sequences_pvalue(found, 2.0) > ALARM
    for factor in (0.5, 0.7, 1.3, 2.0):
        assert sequences_pvalue(found, 2.0 * factor) < ALARM


def test_an_off_by_one_in_the_number_of_sequences_is_rejected(monkeypatch):
    monkeypatch.setattr(joint._Sequences, "shells", shells_off_by_one)
    assert sequences_pvalue(sequences(), 2.0) < ALARM


# --- audit: the bounded range of neighbouring rows ----------------------------------------------------------------------


def lower_bound(hits, trials):
    """Clopper-Pearson: above the truth with probability at most ALARM / 4."""
    return stats.beta.ppf(ALARM / 4, hits, trials - hits + 1) if hits else 0.0


def upper_bound(hits, trials):
    """Clopper-Pearson: below the truth with probability at most ALARM / 4."""
    return stats.beta.ppf(1 - ALARM / 4, hits + 1, trials - hits)


# Keywords A, B, eight X, sixteen Y. One slot of six says {B, all Y} or {A, all X}; with the others A counts 3 or 4,
# B 2 or 1. That moves the sequences (A, X) up by 2 and (Y, anything) down by 2: the whole 2 * range of the utility.
A, B, X, Y = 0, 1, tuple(range(2, 10)), tuple(range(10, 26))
OTHERS = [[A], [A], [A], [B], []]


def keyword_rows(first):
    """Returns float64[6, 26] rows of keywords."""
    rows = np.zeros((6, 26))
    for row, words in zip(rows, [first, *OTHERS], strict=True):
        row[list(words)] = 1.0
    return rows


def kinds(rows, mechanism, trials):
    """Returns how many of the released sequences were (A, X), and how many began with Y."""
    total = KeywordSum().bound(rows, width=26, **SLOTS)
    found = [mechanism.release(total, rng=SYSTEM_RANDOM).indices for _ in range(trials)]
    return sum(a == A and b in X for a, b in found), sum(a in Y for a, _ in found)


def audited_keywords(trials=8_000):
    """Returns a lower bound on the range of the losses, priced at 2, of the release of two keywords from slots.

    Two kinds of outcome s and t give it: log(P'(s) / P(s)) - log(P'(t) / P(t)).
    """
    mechanism = JointExponentialMechanism(0.5, num_choices=2)
    assert mechanism.event == BoundedRangeEvent(2.0)
    rising, falling = kinds(keyword_rows([B, *Y]), mechanism, trials)
    risen, fallen = kinds(keyword_rows([A, *X]), mechanism, trials)
    gained = lower_bound(risen, trials) / upper_bound(rising, trials)
    lost = lower_bound(falling, trials) / upper_bound(fallen, trials)
    return math.log(max(gained * lost, 1e-300))


def test_keywords_of_neighbouring_slots_lose_no_more_than_their_price():
    """The true range is the price, 2, so the bound is above it with probability at most 1e-6; it is no empty one."""
    assert 0.5 < audited_keywords() <= 2.0


def test_the_audit_of_keywords_catches_the_sensitivity_of_a_unit_row(monkeypatch):
    monkeypatch.setattr(KeywordSum, "sensitivity", lambda self, **_: Sensitivity(l2=None, range=1.0))
    assert audited_keywords() > 2.0


def test_the_audit_of_keywords_catches_half_the_scale(monkeypatch):
    """The scale of the count's range alone: as if the utility moved no further than a count."""
    weights = joint._weights
    monkeypatch.setattr(joint, "_weights", lambda shells, scale: weights(shells, scale / 2))
    assert audited_keywords() > 2.0


# --- audit: vectors of embeddings ---------------------------------------------------------------------------------------

POINT = np.eye(5)[0]
VECTORS = np.random.default_rng(0).normal(size=(7, 5))


def audited_vectors(trials=4_000, noise_multiplier=1.0, delta=0.05):
    """Returns (lower bound on epsilon, price) of a noisy sum of unit rows of which one turns round."""
    mechanism = GaussianMechanism(noise_multiplier)
    price = epsilon_bound(mechanism.event, delta=delta, adjacency="add_remove").epsilon
    middle = UnitVectorSum().bound(VECTORS, width=5, **SLOTS).value[0]

    def hits(row):
        total = UnitVectorSum().bound(np.vstack([VECTORS, row]), width=5, **SLOTS)
        found = (mechanism.release(total, rng=SYSTEM_RANDOM).values[0] for _ in range(trials))
        return sum(value > middle + 1.0 for value in found)

    likely = lower_bound(hits(POINT), trials) - delta
    return math.log(max(likely, 1e-300) / upper_bound(hits(-POINT), trials)), price


def test_vectors_of_neighbouring_slots_lose_no_more_than_their_price():
    """At delta 0.05; the lower bound is at most the price but for 1e-6, and no empty one."""
    found, price = audited_vectors()
    assert 1.0 < price < 3.0
    assert 0.5 < found <= price


def test_the_audit_of_vectors_catches_the_published_sensitivity(monkeypatch):
    """1 for a row that is replaced: opposite rows differ by 2."""
    monkeypatch.setattr(UnitVectorSum, "sensitivity", lambda self, **_: Sensitivity(l2=1.0, range=None))
    found, price = audited_vectors()
    assert found > price
