"""The door for coins: freshness, exactness on scripted words, accuracy against 40-digit arithmetic."""

from __future__ import annotations

import collections
import copy
import itertools
import math
import os
import pickle
import random
from decimal import Decimal, localcontext
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from scipy import stats

from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy.mechanisms import randomness
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM, SecureRandom, is_certified
from tests.contracts.doubles import CountingRandom, ScriptedRandom, SeededRandom

NOISES = ("uniform", "exponential", "gumbel", "gaussian")
HALF = 1 << 10  # a word whose coins say: binade [1/4, 1/2), mantissa 1.0, sign coin 0
SIGN = 1 << 11


# --- freshness -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: copy.copy(SYSTEM_RANDOM),
        lambda: copy.deepcopy(SYSTEM_RANDOM),
        lambda: pickle.loads(pickle.dumps(SYSTEM_RANDOM)),  # noqa: S301
        SecureRandom,
    ],
    ids=["copy", "deepcopy", "pickle", "new"],
)
def test_copies_share_no_coins(make):
    assert not set(make().uniform(4).tolist()) & set(SYSTEM_RANDOM.uniform(4).tolist())


def test_nothing_is_kept_between_draws():
    assert not hasattr(SYSTEM_RANDOM, "__dict__")
    with pytest.raises(AttributeError):
        SYSTEM_RANDOM.cache = b""


def test_forked_workers_share_no_coins():
    SYSTEM_RANDOM.uniform(1)  # whatever a first draw could leave behind is there before the fork
    seen = [SYSTEM_RANDOM.uniform(1).tobytes()]
    for _ in range(8):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writer, SYSTEM_RANDOM.uniform(1).tobytes())
            os._exit(0)
        os.waitpid(child, 0)
        seen.append(os.read(reader, 8))
        os.close(reader)
        os.close(writer)
    assert len(set(seen)) == 9


@pytest.mark.parametrize("kind", NOISES)
def test_reseeding_the_global_generators_repeats_nothing(kind):
    draws = set()
    for _ in range(16):
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002 - the global generator is the point
        draws.add(tuple(getattr(SYSTEM_RANDOM, kind)(3)))
    assert len(draws) == 16


@pytest.mark.parametrize("kind", NOISES)
def test_every_draw_pays_eight_fresh_bytes_a_coordinate(kind):
    rng = CountingRandom()
    for calls in range(1, 4):
        getattr(rng, kind)(50)
        assert rng.num_bytes >= calls * 50 * 8


def test_a_seeded_generator_turns_the_freshness_test_red():
    assert set(SeededRandom(3).uniform(4)) & set(copy.deepcopy(SeededRandom(3)).uniform(4))


def test_only_the_class_itself_is_certified():
    assert is_certified(SYSTEM_RANDOM)
    assert not is_certified(SecureRandom)
    assert not is_certified(None)
    assert not is_certified(type("Derived", (SecureRandom,), {})())


# --- exactness on scripted words ---------------------------------------------------------------------------------


def test_a_uniform_is_mantissa_and_leading_zeros_of_its_word():
    assert ScriptedRandom([HALF]).uniform(1)[0] == 0.5
    assert ScriptedRandom([HALF >> 1]).uniform(1)[0] == 0.25
    assert ScriptedRandom([1]).uniform(1)[0] == 2.0**-11
    top = ScriptedRandom([2**64 - 1]).uniform(1)[0]
    assert top == 1.0 - 2.0**-53


def test_the_tail_does_not_end_at_53_bits():
    """All-zero coins ask for more words; a coarse uniform would return 0 or 2^-53 here."""
    script = ScriptedRandom([0, 0, 0, 0, 0, 0, 0, HALF])
    assert script.uniform(1)[0] == 2.0 ** (-7 * 11 - 1)
    script = ScriptedRandom([0] * 10 + [HALF])
    assert script.gaussian(1)[0] > 12  # a 53-bit inverse CDF ends at 8.2
    script = ScriptedRandom([SIGN] + [0] * 9 + [HALF])
    assert script.exponential(1)[0] == pytest.approx((10 * 11 + 2) * math.log(2))  # instead of 36.7
    script = ScriptedRandom([0] * 10 + [HALF])
    assert script.gumbel(1)[0] == pytest.approx((10 * 11 + 2) * math.log(2))


def test_only_the_draws_that_need_more_coins_are_refined():
    script = ScriptedRandom([HALF, 0, HALF >> 1, 0, HALF, HALF >> 1])
    assert script.uniform(4).tolist() == [0.5, 2.0**-12, 0.25, 2.0**-13]
    assert script.words == []


def test_the_sign_coin_mirrors_the_gaussian_and_picks_the_end_of_the_exponential():
    low, high = ScriptedRandom([HALF]), ScriptedRandom([HALF | SIGN])
    assert low.gaussian(1)[0] == -high.gaussian(1)[0] == pytest.approx(0.6744897501960817, rel=1e-15)
    ends = [ScriptedRandom([word]).exponential(1)[0] for word in (HALF, HALF | SIGN)]
    assert ends == [pytest.approx(-math.log(0.75)), pytest.approx(math.log(4))]


def test_the_leading_zero_table_is_the_leading_zeros():
    for field in range(1, 2048):
        zeros = f"{field:011b}".index("1")
        assert randomness._BINADE[field] == 2.0 ** -(zeros + 2)


@pytest.mark.parametrize("kind", NOISES)
def test_no_draws_are_an_empty_array(kind):
    assert getattr(SYSTEM_RANDOM, kind)(0).shape == (0,)


def test_bernoulli_compares_with_the_exact_probability():
    half = ScriptedRandom([HALF] * 3)
    assert half.bernoulli(0.5, 1).tolist() == [False]  # U in [0.5, ...) is not below 0.5
    assert half.bernoulli(math.nextafter(0.5, 1), 1).tolist() == [True]
    assert half.bernoulli(0.0, 1).tolist() == [False]
    assert SYSTEM_RANDOM.bernoulli(1.0, 100).all()


def test_integers_reject_the_words_that_would_bias_them():
    last_fair = (2**64 // 10) * 10 - 1
    script = ScriptedRandom([last_fair + 1, 23, 2**64 - 1, last_fair, 2**64 - 1, 4])
    assert script.integers(10, 3).tolist() == [9, 3, 4]
    assert script.words == []


def test_a_word_below_the_limit_is_never_rejected_for_a_power_of_two():
    assert ScriptedRandom([2**64 - 1]).integers(2**63, 1).tolist() == [2**63 - 1]
    assert SYSTEM_RANDOM.integers(1, 5).tolist() == [0] * 5


@pytest.mark.parametrize("high", [0, -3, 2**63 + 1, 2.5, True])
def test_integers_refuse_a_bad_range(high):
    with pytest.raises(ConfigurationError, match="high"):
        SYSTEM_RANDOM.integers(high, 1)


def test_a_permutation_ranks_distinct_words_and_redraws_ties():
    script = ScriptedRandom([5, 5, 1, 30, 10, 20])
    assert script.permutation(3).tolist() == [1, 2, 0]
    assert script.words == []
    assert SYSTEM_RANDOM.permutation(0).tolist() == []


def test_a_choice_takes_the_first_distinct_values_of_a_fair_stream():
    script = ScriptedRandom([7, 3, 7, 3, 3, 9, 0])
    assert script.choice_without_replacement(100, 4).tolist() == [7, 3, 9, 0]
    assert script.words == []


@pytest.mark.parametrize(("n", "k"), [(0, 0), (1, 1), (5, 0), (5, 5), (1000, 3), (1000, 700)])
def test_a_choice_is_distinct_and_in_range(n, k):
    chosen = SYSTEM_RANDOM.choice_without_replacement(n, k)
    assert chosen.shape == (k,)
    assert len(set(chosen.tolist())) == k
    assert all(0 <= i < n for i in chosen)


@pytest.mark.parametrize(("n", "k"), [(3, 4), (3, -1), (0, 1)])
def test_a_choice_of_more_than_there_is_fails(n, k):
    with pytest.raises(ValueError, match="0 <= k <= n"):
        SYSTEM_RANDOM.choice_without_replacement(n, k)


@pytest.mark.parametrize(("n", "k"), [(4, 2), (9, 2)])
def test_every_ordered_choice_is_equally_likely(n, k):
    """Chi-square on all ordered pairs, 4,000 draws, false alarm 1e-6; sorting the chosen is rejected."""
    pairs = list(itertools.permutations(range(n), k))
    draws = [tuple(SYSTEM_RANDOM.choice_without_replacement(n, k).tolist()) for _ in range(4000)]

    def pvalue(found):
        counts = collections.Counter(found)
        return stats.chisquare([counts[pair] for pair in pairs]).pvalue

    assert pvalue(draws) > 1e-6
    assert pvalue([tuple(sorted(pair)) for pair in draws]) < 1e-6


# --- binomial --------------------------------------------------------------------------------------------------------


def _level_word(level: Fraction) -> list[int]:
    numerator = int(level * 2**192)
    return list(np.frombuffer(numerator.to_bytes(24, "big"), dtype=np.uint64))


@pytest.mark.parametrize(("n", "p"), [(1, 0.3), (7, 0.5), (12, 0.01), (12, 0.97), (40, 0.1)])
def test_binomial_inverts_the_exact_cdf(n, p):
    """Each jump of the exact rational CDF separates k from k + 1, to 2^-150."""
    q, cumulative = Fraction(p), Fraction(0)
    for k in range(n):
        cumulative += math.comb(n, k) * q**k * (1 - q) ** (n - k)
        if cumulative > 1 - Fraction(1, 2**140):
            break
        nudge = Fraction(1, 2**150)
        assert ScriptedRandom(_level_word(cumulative - nudge)).binomial(n, p) <= k
        assert ScriptedRandom(_level_word(cumulative + nudge)).binomial(n, p) == k + 1


def test_binomial_edges():
    assert SYSTEM_RANDOM.binomial(0, 0.5) == 0
    assert ScriptedRandom(_level_word(Fraction(1, 2))).binomial(1, 0.5) == 1  # the step belongs to what follows it
    assert SYSTEM_RANDOM.binomial(9, 1.0) == 9
    assert ScriptedRandom([2**64 - 1] * 3).binomial(5, 0.5) == 5
    assert ScriptedRandom([0] * 3).binomial(10**9, 1e-9) == 0


def test_binomial_has_its_law_for_many_units():
    """Chi-square against scipy, 3,000 draws, false alarm 1e-6; a rate that is 10 % off is rejected."""
    n, p = 10**6, 20e-6
    draws = [SYSTEM_RANDOM.binomial(n, p) for _ in range(3000)]
    edges = [11, 14, 16, 18, 20, 22, 24, 27, 30]
    found = np.histogram(draws, bins=[-1, *edges, n])[0]

    def pvalue(rate):
        cdf = stats.binom.cdf([edge - 1 for edge in edges], n, rate)
        return stats.chisquare(found, np.diff([0.0, *cdf, 1.0]) * len(draws)).pvalue

    assert pvalue(p) > 1e-6
    assert pvalue(1.1 * p) < 1e-6
    assert pvalue(0.9 * p) < 1e-6


def _law_of_many_successes(draws):
    """Chi-square p-value of draws of 10^6 coins of probability 0.1 against scipy, over 20 equally likely parts."""
    n, p = 10**6, 0.1
    edges = stats.binom.ppf(np.arange(1, 20) / 20, n, p)
    cdf = stats.binom.cdf(edges, n, p)
    found = np.histogram(draws, bins=[-1, *(edges + 0.5), n + 1])[0]
    return stats.chisquare(found, np.diff([0.0, *cdf, 1.0]) * len(draws)).pvalue


def test_binomial_has_its_law_for_many_successes(monkeypatch):
    """3,000 draws, false alarm 1e-6; a window of one and a half standard deviations, planted, is rejected."""
    assert _law_of_many_successes([SYSTEM_RANDOM.binomial(10**6, 0.1) for _ in range(3000)]) > 1e-6
    monkeypatch.setattr(randomness, "_LOG_TAIL", 1.0)
    monkeypatch.setattr(randomness, "_TABLES", {})
    assert _law_of_many_successes([SYSTEM_RANDOM.binomial(10**6, 0.1) for _ in range(3000)]) < 1e-6


@pytest.mark.parametrize(("n", "p"), [(10**4, 0.3), (10**6, 0.1), (10**6, 1e-5), (10**9, 1e-4), (50, 0.999)])
def test_what_a_binomial_draw_leaves_out_is_below_its_delta(n, p):
    first, sums = randomness._window(n, p)
    last = first + len(sums) - 1
    outside = (stats.binom.cdf(first - 1, n, p) if first else 0.0) + (stats.binom.sf(last, n, p) if last < n else 0.0)
    assert outside < 2.0**-199
    assert 0 <= first <= last <= n
    weights = np.diff([0.0, *(float(each / sums[-1]) for each in sums)])
    near = np.arange(len(sums))[weights > 1e-9]
    assert weights[near] == pytest.approx(stats.binom.pmf(first + near, n, p), rel=1e-5, abs=1e-14)


# --- whole numbers of any size, and weighted choices -----------------------------------------------------------------


class Bytes(SecureRandom):
    """Hands out the given bytes, each read in full."""

    def __init__(self, *reads):
        self.reads = list(reads)

    def entropy(self, num_bytes):
        taken, *self.reads = self.reads
        assert len(taken) == num_bytes
        return taken


def test_an_integer_uses_the_leading_coins_and_draws_again_beyond_the_end():
    assert Bytes(b"\xff", b"\xa0", b"\x9f").integer_below(5) == 4  # leading three coins: 7, 5, 4
    assert Bytes(b"\x01\x00").integer_below(2**16) == 256
    assert Bytes(b"\x80\x80", b"\x80\x7f").integer_below(257) == 256  # nine coins: 257, 256
    assert Bytes(b"").integer_below(1) == 0
    with pytest.raises(ConfigurationError, match="high"):
        SYSTEM_RANDOM.integer_below(0)


@pytest.mark.parametrize("high", [1, 2, 3, 5, 8, 9, 100, 200, 255, 256])
def test_every_integer_below_the_end_has_as_many_coins(high):
    """All 256 first bytes: each value comes from the same number of them, the rest is drawn again."""
    again = b"\x00"
    reads = [[bytes([first]), again] for first in range(256)] if high > 1 else [[b""]]
    found = collections.Counter()
    for read in reads:
        rng = Bytes(*read)
        value = rng.integer_below(high)
        if len(rng.reads) == len(read) - 1:
            found[value] += 1
    assert sorted(found) == list(range(high))
    assert len(set(found.values())) == 1


def test_an_integer_below_a_number_beyond_machine_words_is_uniform():
    """Chi-square on the thirds of 3,000 draws, false alarm 1e-6."""
    high = 3 * 10**300
    thirds = [SYSTEM_RANDOM.integer_below(high) // 10**300 for _ in range(3000)]
    assert stats.chisquare(np.bincount(thirds, minlength=3)).pvalue > 1e-6
    assert len(np.bincount(thirds, minlength=3)) == 3


def test_weighted_choice_inverts_the_exact_cdf():
    """Each jump of the exact CDF separates i from the next one that has a weight, to 2^-150; zeros are never chosen."""
    weights = [Decimal(w) for w in ("0", "1e-20", "3", "0", "0", "2e15", "7", "0")]
    after = {1: 2, 2: 5, 5: 6}
    total, cumulative, nudge = sum(map(Fraction, weights)), Fraction(0), Fraction(1, 2**150)
    for i, weight in enumerate(weights):
        cumulative += Fraction(weight) / total
        if i in after:
            assert ScriptedRandom(_level_word(cumulative - nudge)).weighted_choice(weights) == i
            assert ScriptedRandom(_level_word(cumulative + nudge)).weighted_choice(weights) == after[i]
    assert ScriptedRandom([0] * 3).weighted_choice(weights) == 1
    assert ScriptedRandom([2**64 - 1] * 3).weighted_choice(weights) == 6


def test_the_highest_coins_stay_inside_whatever_the_digits_of_the_total():
    for last in ("1", "9.99999999999999999999999999999999999999999999999999999999999", "1e-900000", "3e999999"):
        assert ScriptedRandom([2**64 - 1] * 3).weighted_choice([Decimal(0), Decimal(last)]) == 1


def test_weighted_choice_has_its_law():
    """Chi-square on 6,000 draws, false alarm 1e-6; weights that are taken for their squares are rejected."""
    weights = [Decimal(w) for w in (1, 2, 3, 4)]
    found = np.bincount([SYSTEM_RANDOM.weighted_choice(weights) for _ in range(6000)], minlength=4)
    assert stats.chisquare(found, np.array([1, 2, 3, 4]) * 600).pvalue > 1e-6
    assert stats.chisquare(found, np.array([1, 4, 9, 16]) * 200).pvalue < 1e-6


# --- accuracy: the error budget of docs/proofs/randomness.md, section 4 ---------------------------------------------

ULP = mpmath.mpf(2) ** -52


def _word(half: float, coin: int) -> list[int]:
    """Returns the words that make `_half` return (half, coin)."""
    mantissa, exponent = math.frexp(half)
    zeros = -1 - exponent  # half = [1, 2) * 2^-(zeros + 2)
    low = int((mantissa * 2 - 1) * 2**52) << 12 | coin * SIGN
    words = [low] + [0] * (zeros // 11)
    words[-1] |= 1 << (10 - zeros % 11)
    return words


HALVES = [
    *np.random.default_rng(0).uniform(0, 0.5, 150),
    *(0.5 - 2.0 ** -np.arange(3, 54, 5)),
    *(2.0 ** -np.arange(2, 300, 11)),
    0.1353,
    0.13677633183811019,
]


def _ideal(kind, half, coin):
    if kind == "gaussian":
        z = -mpmath.sqrt(2) * mpmath.erfinv(1 - 2 * half) if half > 1e-8 else _far_tail(half)
        return z if coin else -z
    exponential = -mpmath.log(half) if coin else -mpmath.log1p(-half)
    return exponential if kind == "exponential" else -mpmath.log(exponential)


def _far_tail(half):
    start = -mpmath.sqrt(-2 * mpmath.log(half))
    return mpmath.findroot(lambda x: mpmath.log(mpmath.erfc(-x / mpmath.sqrt(2)) / 2) - mpmath.log(half), start)


@pytest.mark.parametrize(
    ("kind", "fixed", "relative"), [("exponential", 0.0, 5.5), ("gumbel", 5.5, 4.0), ("gaussian", 1.26, 5.0)]
)
def test_noise_is_within_its_error_budget_of_the_ideal_real(kind, fixed, relative):
    """The ideal uniform may lie anywhere up to the next float; both ends are within (fixed + relative |x|) 2^-52."""
    with mpmath.workprec(200):
        for half in HALVES:
            for coin in (0, 1):
                found = mpmath.mpf(float(getattr(ScriptedRandom(_word(half, coin)), kind)(1)[0]))
                for end in (mpmath.mpf(half), mpmath.mpf(math.nextafter(half, 1.0))):
                    ideal = _ideal(kind, end, coin)
                    assert abs(found - ideal) <= (fixed + relative * abs(ideal)) * ULP, (kind, half, coin)


def _half_and_coin(x):
    """The float half whose Gaussian is next to x, and its sign coin."""
    return float(stats.norm.cdf(-abs(x))), int(x < 0)


@pytest.mark.parametrize("x", [-19.5, -13.0, -3.3, -0.4, -1e-9, 1e-9, 0.7, 5.0, 12.0, 19.9])
def test_a_comparison_sees_the_coins_after_the_53rd_digit(x):
    """A bound between two neighbouring uniforms, by 200-bit arithmetic: only the continued coins can decide it."""
    half, coin = _half_and_coin(x)
    with mpmath.workprec(300):
        inside = mpmath.mpf(half) + mpmath.mpf(float(np.spacing(half))) * mpmath.mpf(0.3)
        root = _ideal("gaussian", inside, coin)
        bound = Fraction(int(mpmath.nint(root * mpmath.mpf(2) ** 250)), 2**250)
    for tenths, far_in_the_tail in ((2.999999, True), (3.000001, False)):
        digits = [*_level_word(Fraction(tenths / 10))]
        draws = ScriptedRandom([*_word(half, coin), *digits]).gaussian_draws(1)
        # A smaller uniform is farther out: below the bound on the negative side, above it on the positive one.
        assert draws.is_below(0, bound) == (far_in_the_tail == (coin == 1))


def test_a_comparison_across_zero_needs_no_coins():
    assert ScriptedRandom([HALF | SIGN]).gaussian_draws(1).is_below(0, Fraction(1, 10**9))
    assert not ScriptedRandom([HALF]).gaussian_draws(1).is_below(0, Fraction(0))


@pytest.mark.parametrize("bound", [10**9, Fraction(81, 2)])
def test_a_bound_beyond_all_draws_is_decided(bound):
    assert ScriptedRandom([HALF, 0, 0, 0]).gaussian_draws(1).is_below(0, Fraction(bound))
    assert not ScriptedRandom([HALF | SIGN, 0, 0, 0]).gaussian_draws(1).is_below(0, -Fraction(bound))


@pytest.mark.parametrize("x", ["0", "1e-40", "0.3", "1", "4.75", "13", "20"])
def test_the_exact_tail_is_the_normal_tail_to_200_binary_digits(x):
    with localcontext(randomness._MORE_DECIMALS):
        found = str(randomness._normal_tail(Decimal(x)))
    with mpmath.workprec(600):
        ideal = mpmath.erfc(mpmath.mpf(x) / mpmath.sqrt(2)) / 2
        assert abs(mpmath.mpf(found) - ideal) <= ideal * mpmath.mpf(2) ** -200


def test_the_declared_deltas_follow_from_the_error_budgets():
    """docs/proofs/randomness.md recomputed: 2 * hazard * 2 * error at the cut, plus e^32 times the tails beyond it."""
    ulp, price = 2.0**-52, 1 + math.exp(32)
    gumbel = 4 * (5.5 + 4 * 76 + 76) * ulp
    exponential = 4 * (5.5 * 76 + 76) * ulp
    for kind, fixed, tail in (
        ("gumbel", gumbel, price * (stats.gumbel_r.sf(76) + stats.gumbel_r.cdf(-76))),
        ("exponential", exponential, price * stats.expon.sf(76)),
    ):
        for n in (1, 100, 50_000):
            declared = SecureRandom.implementation_delta(kind, n)
            assert 1.01 * fixed + n * tail <= declared <= 4 * (fixed + n * tail)
    # Gaussian: one wrong comparison per middle between two multiples, weighted by the tail beyond it, and |x| > 20.
    middles = 1 + 2.0**17 * math.sqrt(2 / math.pi)
    misplaced = 2.0**-198 * middles + 2 * stats.norm.sf(20)
    assert price * misplaced <= 2.0**-130 == SecureRandom.implementation_delta("gaussian", 1)
    assert SecureRandom.implementation_delta("gaussian", 101) == 101 * 2.0**-130
    # A weighted choice among n: steps of the CDF that 60 digits and 192 coins misplace, and weights off by 1e-50.
    n = 2.0**22
    misplaced = n * (n * 1e-59 + 2.0**-191) + 2e-50
    assert misplaced < 2.0**-140
    assert price * 2.0**-140 <= 2.0**-90 == SecureRandom.implementation_delta("weighted_choice")


def test_the_hazards_of_the_noise_are_what_the_gap_lemma_takes():
    x = np.linspace(-20, 40, 2001)
    assert np.all(stats.gumbel_r.pdf(x) <= stats.gumbel_r.sf(x) * (1 + 1e-9))
    assert np.all(stats.expon.pdf(x) <= stats.expon.sf(x) * (1 + 1e-9))


def test_coins_without_rounding_declare_no_delta():
    for kind in ("bernoulli", "integers", "permutation", "choice"):
        assert SecureRandom.implementation_delta(kind, 10**6) == 0.0
    for kind in ("binomial", "weighted_choice"):
        assert SecureRandom.implementation_delta(kind, 3) == 3 * 2.0**-90
    with pytest.raises(ConfigurationError, match="kind"):
        SecureRandom.implementation_delta("laplace", 1)
    with pytest.raises(ConfigurationError, match="n:"):
        SecureRandom.implementation_delta("gumbel", 0)
