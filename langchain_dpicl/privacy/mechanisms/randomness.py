"""Draws all private randomness, from operating-system entropy, anew for every call.

Nothing is seeded and no coin is kept: an object without state repeats nothing after fork, copy, pickling or reseeding
of anybody's global generator. (Tables of probabilities are kept; see `_TABLES`.) Every float starts from an ideal
uniform real, rounded down to a float64 whatever its magnitude, so that tails end where float64 ends and not at 2^-53;
comparisons that a float leaves open are settled with more coins. Derivations: docs/proofs/randomness.md.
"""

from __future__ import annotations

import bisect
import itertools
import math
import os
from collections.abc import Callable, Sequence
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, localcontext
from fractions import Fraction
from typing import Any, Final, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from langchain_dpicl.privacy._validate import check_choice, check_int, fail
from langchain_dpicl.privacy.mechanisms.bounded import Floats

Ints: TypeAlias = npt.NDArray[np.int64]
Words: TypeAlias = npt.NDArray[np.uint64]
Noise: TypeAlias = Literal["gumbel", "exponential", "gaussian"]
Coins: TypeAlias = Literal["bernoulli", "integers", "permutation", "choice", "binomial", "weighted_choice", "geometric"]
_KINDS = (*get_args(Noise), *get_args(Coins))
# (fixed part, part per draw) of what a release may add to delta; proved in docs/proofs/randomness.md, section 4.
_DELTAS: Final[dict[str, tuple[float, float]]] = {
    "gumbel": (2.0**-41, 2.0**-62),
    "exponential": (2.0**-41, 2.0**-62),
    "gaussian": (0.0, 2.0**-130),
    "binomial": (0.0, 2.0**-90),
    "weighted_choice": (0.0, 2.0**-90),
}

_ONE_BITS: Final = np.uint64(0x3FF0000000000000)  # the bits of 1.0: or-ed with 52 mantissa bits, a float in [1, 2)
_FIELD: Final = np.uint64(0x7FF)  # 11 exponent coins per word
_SIGN: Final = np.uint64(0x800)  # one sign coin per word
_COINS: Final = np.uint64(12)  # the coins that are no mantissa
# 2^-(2 + number of leading zeros among 11 coins); all-zero fields are settled with more coins.
_BINADE: Final = np.ldexp(0.25, np.array([0, *(k.bit_length() - 11 for k in range(1, 2048))]))
DECIMALS: Final = Context(prec=60, Emin=MIN_EMIN, Emax=MAX_EMAX)
"""The arithmetic of `binomial`, and of the weights for `weighted_choice`."""
_LEVEL_BYTES: Final = 24
_LEVELS: Final = Decimal(2 ** (8 * _LEVEL_BYTES))
_MORE_DECIMALS: Final = Context(prec=160, Emin=MIN_EMIN, Emax=MAX_EMAX)
_MORE_BYTES: Final = 24  # what continues an inspected uniform: 192 coins after its 53 digits
_SQRT_2_PI: Final = Decimal(
    "2.506628274631000502415765284811045253006986740609938316629923576342293654607841974946"
    "59583837805726611600997266520387964486632361812673618095785565596614793191343548045812"
)


class GaussianDraws:
    """Standard normal draws: floats, with the coins that settle exactly what the floats leave open.

    Formal guarantees:
      - An ideal draw is the inverse CDF of the ideal uniform whose first 53 digits were drawn. `values` are floats near
        the ideal draws; `is_below` compares the ideal draw itself.

    Attributes:
      values: float64[n], within (1.26 + 5 |x|) 2^-52 of the ideal x for |x| up to 20.

    Source: docs/proofs/randomness.md, section 5.
    """

    __slots__ = ("_coin", "_entropy", "_half", "values")

    def __init__(self, half: Floats, coin: npt.NDArray[np.bool_], entropy: Callable[[int], bytes]) -> None:
        from scipy.special import ndtri

        self._half, self._coin, self._entropy = half, coin, entropy
        tail: Floats = ndtri(half)  # [n], below 0
        self.values: Floats = np.where(coin, tail, -tail)

    def is_below(self, i: int, bound: Fraction) -> bool:
        """Returns whether ideal draw `i` is below `bound`; for |bound| up to 20, wrong with probability below 2^-198.

        Ask once per draw: the coins that continue it are fresh in every call.
        """
        negative = bool(self._coin[i])
        if (bound > 0) == negative:  # the sign decides
            return negative
        digits = int.from_bytes(self._entropy(_MORE_BYTES), "big")
        half = float(self._half[i])
        with localcontext(_MORE_DECIMALS):
            level = Decimal(half) + Decimal(float(np.spacing(half))) * digits / (1 << 8 * _MORE_BYTES)
            beyond = level < _normal_tail(abs(Decimal(bound.numerator) / Decimal(bound.denominator)))
        return beyond == negative


def _normal_tail(x: Decimal) -> Decimal:
    """Returns P[N > x], x >= 0, to a relative 2^-200 up to 20 in 160 digits: 1/2 minus a series of positive terms."""
    if x > 40:
        return Decimal(0)
    square, odd = x * x, 1
    term = total = x
    while term > total * Decimal("1e-165"):
        odd += 2
        term = term * square / odd
        total += term
    return Decimal("0.5") - total * (-square / 2).exp() / _SQRT_2_PI


# What a binomial draw is compared with, by (n, p): weights and no coins, so that to keep them repeats nothing.
# n is a number of units: as private as the process, which holds the units themselves. Nothing shows it.
_TABLES: dict[tuple[int, float], tuple[int, tuple[Decimal, ...]]] = {}
_MOST_TABLES, _MOST_KEPT = 16, 2**17
_LOG_TAIL: Final = 139.33
"""-ln(2^-201): the probability of each tail that a binomial draw leaves out is at most that (docs/proofs)."""


def _window(n: int, p: float) -> tuple[int, tuple[Decimal, ...]]:
    """Returns a number k and the sums of the weights of k, k + 1, ... successes among n, where all but 2^-200 lies.

    The weights are binomial probabilities but for a common factor, by recursion from the mean.
    """
    mean, third = n * p, _LOG_TAIL / 3
    reach = third + math.sqrt(third**2 + 2 * _LOG_TAIL * mean * (1.0 - p))  # Bernstein
    first, last = max(0, math.floor(mean - reach) - 1), min(n, math.ceil(mean + reach) + 1)
    start = min(max(first, int(mean)), last)
    ctx = DECIMALS
    odds = ctx.divide(Decimal(p), ctx.subtract(Decimal(1), Decimal(p)))
    below, weight = [], Decimal(1)
    for count in range(start, first, -1):
        weight = ctx.divide(ctx.multiply(weight, count), ctx.multiply(odds, n - count + 1))
        below.append(weight)
    weights, weight = [*reversed(below), Decimal(1)], Decimal(1)
    for count in range(start + 1, last + 1):
        weight = ctx.divide(ctx.multiply(ctx.multiply(weight, odds), n - count + 1), count)
        weights.append(weight)
    return first, tuple(itertools.accumulate(weights, ctx.add))


class SecureRandom:
    """Draws from the operating system's generator (`os.urandom`), a fresh read per call.

    Formal guarantees:
      - No state: two calls never share entropy, in one process or across forks, copies and pickles.
      - For ideal coins `uniform` is an ideal uniform rounded down to float64; `bernoulli`, `integers`, `permutation`,
        `choice_without_replacement`, `integer_below` and `geometric` are exact; `binomial` and `weighted_choice` are
        within 2^-140 of exact in total variation.
      - An index chosen as the argmax of scores plus n noise draws keeps every (epsilon, delta) of the ideal one with
        epsilon <= 32, at delta + `implementation_delta(kind, n)`.
      - `gaussian_draws` let a mechanism round a noisy vector to a grid as real arithmetic would: whatever is made of
        the rounded vector keeps every (epsilon, delta) of the ideal one with epsilon <= 32, at delta +
        `implementation_delta("gaussian", n)`. The plain floats of the other noises must not leave.

    Subclasses exist for tests; `is_certified` refuses them.

    Source: Downey (2007), Generating pseudo-random floating-point values; Devroye (1986), chapters II.2 and X.4.
    """

    __slots__ = ()

    def entropy(self, num_bytes: int) -> bytes:
        """Returns fresh bytes; every coin of this class comes through here."""
        return os.urandom(num_bytes)

    def _words(self, n: int) -> Words:
        return np.frombuffer(self.entropy(8 * n), dtype=np.uint64)

    def _half(self, n: int) -> tuple[Floats, npt.NDArray[np.bool_]]:
        """Returns ideal uniforms on (0, 1/2), rounded down to float64, and as many independent fair coins."""
        words = self._words(n)
        mantissa: Floats = ((words >> _COINS) | _ONE_BITS).view(np.float64)  # [n], uniform on [1, 2)
        fields = words & _FIELD
        binade: Floats = _BINADE[fields]
        open_draws, depth = (fields == 0).nonzero()[0], 1.0
        while open_draws.size:  # once in 2048 draws: the tail goes on below, 11 binades at a time
            depth *= 2.0**-11
            fields = self._words(open_draws.size) & _FIELD
            binade[open_draws] = _BINADE[fields] * depth
            open_draws = open_draws[fields == 0]
        return mantissa * binade, (words & _SIGN) != 0

    def uniform(self, n: int) -> Floats:
        """Returns float64[n] in the open interval (0, 1): an ideal uniform, rounded down to the next float64."""
        return self._half(n)[0] * 2.0

    def exponential(self, n: int) -> Floats:
        """Returns float64[n] of the standard exponential law, accurate to a few ulp near zero and in the tail."""
        half, coin = self._half(n)
        # Inverse survival function: U is `half` or `1 - half`, so neither end of (0, 1) loses digits.
        return -np.where(coin, np.log(half), np.log1p(-half))

    def gumbel(self, n: int) -> Floats:
        """Returns float64[n] of the standard Gumbel law (location 0, scale 1)."""
        return -np.log(self.exponential(n))

    def gaussian_draws(self, n: int) -> GaussianDraws:
        """Returns n draws of the standard normal law: inverse CDF of the lower half, and a fair sign."""
        return GaussianDraws(*self._half(n), self.entropy)

    def gaussian(self, n: int) -> Floats:
        """Returns float64[n] of the standard normal law; for tests and simulations, see `gaussian_draws`."""
        return self.gaussian_draws(n).values

    def bernoulli(self, p: float, n: int) -> npt.NDArray[np.bool_]:
        """Returns bool[n], each true with probability exactly `p`: U < p iff U rounded down is, for a float p."""
        return self.uniform(n) < p

    def integers(self, high: int, n: int) -> Ints:
        """Returns int64[n], uniform on 0 .. high - 1 without bias (words past the last whole multiple are redrawn)."""
        check_int("high", high, low=1, high=2**63)
        last_fair = np.uint64(2**64 - 2**64 % high - 1)
        words = self._words(n)
        unfair = (words > last_fair).nonzero()[0]
        while unfair.size:
            words = words.copy()
            words[unfair] = self._words(unfair.size)
            unfair = unfair[words[unfair] > last_fair]
        return (words % np.uint64(high)).view(np.int64)  # below 2^63: the same bits

    def permutation(self, n: int) -> Ints:
        """Returns int64[n], a uniformly random order of 0 .. n - 1 (ranks of distinct words; ties redraw them all)."""
        while True:
            words = self._words(n)
            order = np.argsort(words)
            if np.all(np.diff(words[order]) != 0):
                return order.astype(np.int64)

    def choice_without_replacement(self, n: int, k: int) -> Ints:
        """Returns int64[k]: distinct positions below n, each ordered selection equally likely; cost grows with k."""
        if not 0 <= k <= n:
            raise ValueError("choice_without_replacement: expected 0 <= k <= n.")
        if 2 * k >= n:
            return self.permutation(n)[:k]
        chosen: dict[int, None] = {}  # in order: the first k distinct values of an endless fair stream
        while len(chosen) < k:
            chosen.update(dict.fromkeys(self.integers(n, k - len(chosen)).tolist()))
        return np.fromiter(chosen, np.int64, k)

    def integer_below(self, high: int) -> int:
        """Returns an integer, uniform on 0 .. high - 1 without bias, however large `high` is."""
        if type(high) is not int or high < 1:  # `check_int` ends at 2^63; sequences are counted beyond it
            raise fail("high", "an integer >= 1", high)
        bits = (high - 1).bit_length()
        num_bytes = (bits + 7) // 8
        while True:  # ends at once with probability above 1/2
            drawn = int.from_bytes(self.entropy(num_bytes), "big") >> (8 * num_bytes - bits)
            if drawn < high:
                return drawn

    def geometric(self, scale: int) -> int:
        """Returns x >= 0 with P[result >= x] = exp(-x / scale), exactly: exponential noise on whole numbers.

        The rest of x modulo `scale` is drawn by rejection, the multiple of it by coins of exp(-1).

        Source: Canonne, Kamath and Steinke (2020), The Discrete Gaussian for Differential Privacy, section 5.1.
        """
        check_int("scale", scale, low=1)
        rest = self.integer_below(scale)
        while not self._decays(rest, scale):
            rest = self.integer_below(scale)
        multiple = 0
        while self._decays(1, 1):
            multiple += 1
        return rest + scale * multiple

    def _decays(self, part: int, whole: int) -> bool:
        """Returns True with probability exp(-part / whole), exactly, for 0 <= part <= whole.

        With x = part / whole, the k-th coin is first to fail with probability x^(k-1)/(k-1)! - x^k/k!; odd k add up.
        """
        k = 1
        while self.integer_below(whole * k) < part:
            k += 1
        return k % 2 == 1

    def _level(self) -> Decimal:
        """Returns a uniform multiple of 2^-192 in [0, 1), to 60 digits."""
        coins = int.from_bytes(self.entropy(_LEVEL_BYTES), "big")
        return DECIMALS.divide(Decimal(coins), _LEVELS)

    def weighted_choice(self, weights: Sequence[Decimal]) -> int:
        """Returns i with probability weights[i] / sum(weights); weights are >= 0, and not all zero.

        Inversion of the CDF in 60-digit arithmetic against 192 coins, as `binomial`. For up to 2^22 weights.
        """
        ctx = DECIMALS
        cumulative = list(itertools.accumulate(weights, ctx.add))
        return bisect.bisect_right(cumulative, ctx.multiply(self._level(), cumulative[-1]))

    def binomial(self, n: int, p: float) -> int:
        """Returns the number of successes among n coins of probability p; cost grows with sqrt(n p), not with n.

        Inversion of the CDF in 60-digit arithmetic against 192 coins (Devroye 1986, chapter X.4), between the tails of
        2^-201 each.
        """
        if p >= 1.0 or n == 0:
            return n
        if p <= 0.0:
            return 0
        found = _TABLES.get((n, p))
        if found is None:
            found = _window(n, p)
            if len(found[1]) <= _MOST_KEPT:
                if len(_TABLES) >= _MOST_TABLES:
                    _TABLES.clear()
                _TABLES[n, p] = found
        first, sums = found
        return first + bisect.bisect_right(sums, DECIMALS.multiply(self._level(), sums[-1]))

    @staticmethod
    def implementation_delta(kind: Noise | Coins, n: int = 1) -> float:
        """Returns what computing with floats may add to delta, compared with ideal draws; it also bounds the distance
        in total variation. Sums over releases; holds for total epsilons up to 32.

        "gumbel", "exponential": one argmax over n noisy scores. "gaussian": one noisy vector of n coordinates, rounded
        to a grid with `GaussianDraws`, and whatever is made of it. Coins: n draws. Ideal operating-system coins are
        assumed.

        Args:
          kind: "gumbel", "exponential", "gaussian", "bernoulli", "integers", "permutation", "choice", "binomial",
            "weighted_choice" or "geometric".
          n: number of draws, public.

        Raises:
          ConfigurationError: unknown kind, n < 1.

        Source: docs/proofs/randomness.md, sections 4 and 5.
        """
        check_choice("kind", kind, _KINDS)
        fixed, per_draw = _DELTAS.get(kind, (0.0, 0.0))  # coins that are not in the table are exact
        return fixed + check_int("n", n, low=1) * per_draw


SYSTEM_RANDOM: Final = SecureRandom()
"""What every component uses unless a test passes its own."""


def is_certified(rng: Any) -> bool:
    """Returns True only for `SecureRandom` itself: a subclass, whatever it claims, cannot earn an epsilon."""
    return type(rng) is SecureRandom
