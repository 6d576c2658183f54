"""Checks the parts of a plan one by one at the user's own sizes: sampler, slots, rows, noise."""

# A whole run hides a wrong part: amplification hides a wrong noise, and noise a wrong rate. Every statistical test is
# exact, and the tests of a check share one false alarm rate.

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from langchain_dpicl.audit.game import ALARM, HALF, AuditResult, index_law, result_of
from langchain_dpicl.exceptions import DPICLError
from langchain_dpicl.privacy._validate import check_int
from langchain_dpicl.privacy.extensions.confident_gnmax import ConfidentGNMaxMechanism
from langchain_dpicl.privacy.extensions.fixed_size_slots import BalancedSlots, PartitionedSlots
from langchain_dpicl.privacy.extensions.gradient_sums import ClippedGradientSum, running_sum
from langchain_dpicl.privacy.extensions.joint_exponential import JointExponentialMechanism
from langchain_dpicl.privacy.extensions.random_allocation import AllocatedSlots
from langchain_dpicl.privacy.mechanisms.bounded import BoundedSum
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM
from langchain_dpicl.privacy.mechanisms.release_plan import PoissonUnits, ReleasePlan

_WIDTH = 4
_INCLUSIONS = 90.0
"""Inclusions to expect: twice the rate is then seen with a chance above .99, at an alarm of 1e-6."""
_MOST_DRAWS = 5_000.0
"""Draws of a small sampling rate: so many that each unit is in one, where the rate is not below 0.0002."""
_TOGETHER = 20.0
"""Pairs to expect in one slot: that there is none has then a chance of 2e-9."""


def check_sampler_rate(release: ReleasePlan, *, name: str = "sampler: rate") -> AuditResult:
    """Checks how often units are drawn, whether one draw reveals the next, and that nobody is drawn twice.

    Tests: inclusions, units that no draw holds (binomial), pairs of units in one draw and a unit in two draws that
    follow each other (binomial, disjoint pairs). Slots have room for all of the units, so that none is ever too full;
    how full slots are cut is not looked at.
    """
    sampler: Any = release.sampler
    blind = ("which of the units of a slot that is too full are left out",)
    if isinstance(sampler, PartitionedSlots):
        return skipped_result(name, "a partition: everybody takes part")
    rate = sampler.sampling_rate
    is_fixed = isinstance(sampler, BalancedSlots)
    # Of a sample of fixed size the coins of several units are not free: one unit tells.
    units = sampler.public_size if isinstance(sampler, BalancedSlots) else 500
    looked_at = 1 if is_fixed else units
    if not isinstance(sampler, BalancedSlots | PoissonUnits):
        sampler = dataclasses.replace(sampler, shots_per_slot=units)
    wanted = max(
        _INCLUSIONS / rate,
        20.0 / -math.log(rate) if rate < 1.0 else 1.0,
        looked_at * max(20.0, min(1.0 / rate, _MOST_DRAWS)),
    )
    draws = 2 * math.ceil(wanted / looked_at / 2)
    twice, coins = False, np.zeros((draws, looked_at), dtype=bool)
    for row in coins:
        members = list(itertools.chain.from_iterable(sampler.draw(units, rng=SYSTEM_RANDOM)))
        twice |= len(set(members)) < len(members)
        row[[unit for unit in members if unit < looked_at]] = True
    faults = ["a unit stands in one sample twice"] if twice else []
    fits = ExactTests(4)
    faults += fits.binomial("drawn", coins, rate)
    faults += fits.binomial("drawn twice running", coins[::2] & coins[1::2], rate**2)
    if looked_at > 1:
        faults += fits.binomial("drawn together", coins[:, ::2] & coins[:, 1::2], rate**2)
        faults += fits.binomial("in no draw", np.logical_not(coins.any(axis=0)), (1.0 - rate) ** draws)
    power = _rate_power(rate, coins.size) if rate < 1.0 else None
    seen = "twice the rate" if rate <= 0.5 else "everybody in every sample"
    return result_of(name, faults, runs=draws, power=power, power_for=seen, blind=blind)


def skipped_result(check: str, why: str) -> AuditResult:
    """Returns the result of a check that does not apply, with the reason."""
    return AuditResult(check=check, verdict="skipped", confidence=1.0, details=(why,))


def _rate_power(rate: float, size: int) -> float:
    """Returns the chance that twice the rate is seen; of a rate above one half, that everybody is."""
    wrong = min(1.0, 2.0 * rate)
    most = float(stats.binom.isf(ALARM / 8, size, rate)) + 1
    return float(stats.binom.sf(most - 1, size, wrong))


def check_unit_places(release: ReleasePlan, *, name: str = "slots: one unit, one place") -> AuditResult:
    """Checks that a unit stands in one row at most, and that where it stands says nothing of where the others do.

    Only slots are asked, at their own number, with everybody in the sample and no slot ever full. Units that are dealt
    in turn would share slots more or less often than by chance: one that goes would then move the others. So many units
    are dealt that 20 of their disjoint pairs, at least, are to be expected in the same slot.
    """
    blind: tuple[str, ...] = (
        "what a model makes of its own prompt: a model that remembers other prompts couples the rows",
    )
    sampler: Any = release.sampler
    if isinstance(sampler, PoissonUnits):
        return skipped_result(name, "every unit is a row of its own")
    is_fixed = isinstance(sampler, PartitionedSlots | BalancedSlots)
    size = sampler.public_size if is_fixed else sampler.num_rows
    draws = min(600, max(20, 60_000 // size))  # of many slots fewer: each draw makes them all
    units = size
    if not is_fixed:
        units = 2 * max(1, math.ceil(_TOGETHER * size / draws))
        sampler = dataclasses.replace(sampler, sampling_rate=1.0, shots_per_slot=units)
    slots, faults = len(sampler.draw(units, rng=SYSTEM_RANDOM)), list[str]()
    alike, firsts = list[bool](), list[bool]()
    for _ in range(draws):
        rows = sampler.draw(units, rng=SYSTEM_RANDOM)
        where = {unit: place for place, row in enumerate(rows) for unit in row}
        if len(where) < sum(map(len, rows)):
            faults.append("a unit stands in two places")
        if len(rows) != slots:
            faults.append("the number of slots changes")
        alike += [where.get(unit) == where.get(unit + 1) for unit in range(0, units - 1, 2)]
        firsts += [where.get(unit) == 0 for unit in range(units)]
    if not is_fixed and slots > 1:
        fits = ExactTests(2)
        faults += fits.binomial("two units in the same slot", np.array(alike), 1.0 / slots)
        faults += fits.binomial("a unit in the first slot", np.array(firsts), 1.0 / slots)
    else:
        blind = (*blind, "whether units that are dealt evenly are dealt at random")
    if isinstance(sampler, AllocatedSlots):
        blind = (*blind, "how the batches of a deal are cut")
    return result_of(name, faults, runs=draws, blind=blind)


_HOSTILE = (0.0, -0.0, 1e-300, 1e300, -1e300, math.inf, -math.inf, math.nan, -1.0, 2.0, 1e9)


def check_row_contribution(release: ReleasePlan) -> AuditResult:
    """Checks that no row, whatever an engine says, moves the bounded sum by more than its sensitivity.

    Rows of plain and of hostile numbers (infinite, NaN, huge, negative) come, go and replace each other beside others.
    """
    usual = [np.array([0.7, 0.1, 0.1, 0.1]), np.array([0.1, 0.2, 0.3, 0.4]), np.zeros(_WIDTH)]
    rows = [*usual, *np.eye(_WIDTH)[:2], *(np.array([x, 0.0, 0.0, 0.0]) for x in _HOSTILE)]
    rows += [np.full(_WIDTH, x) for x in _HOSTILE]
    rows += [np.array([a, b, 0.0, 1.0]) for a in _HOSTILE for b in (math.inf, -math.inf, math.nan)]
    sampler = release.sampler
    # Of an allocation one batch is read at a time.
    beside = (sampler.num_slots if isinstance(sampler, AllocatedSlots) else sampler.num_rows) or 4
    others = np.array([usual[place % 3] for place in range(beside - 1)]).reshape(-1, _WIDTH)
    faults, count = list[str](), 0
    appears = release.row_shape == "units" and release.adjacency == "add_remove"
    try:
        totals = [_total(release, np.vstack([others, row])) for row in rows]
        without = _total(release, others) if appears else None
    except DPICLError as error:
        faults, totals, without = [f"a row stops the release: {type(error).__name__}"], [], None
    pairs: Iterable[tuple[BoundedSum, BoundedSum]] = itertools.combinations(totals, 2)
    if without is not None:
        pairs = ((without, total) for total in totals)
    for one, other in pairs:
        faults += _too_far(other.value - one.value, release)
        count += 1
    check, blind = "rows: one row moves the sum no further than charged", ("numbers that were not tried",)
    return result_of(check, faults, runs=count, blind=blind, is_certain=True)


def _total(release: ReleasePlan, rows: NDArray[np.float64]) -> BoundedSum:
    if isinstance(release.aggregation, ClippedGradientSum):
        running = running_sum(release, _WIDTH)
        running.add(rows)
        return release.bound(running, width=_WIDTH)
    with np.errstate(all="ignore"):
        return release.bound(rows, width=_WIDTH, public=np.array([0.3, 0.1, 0.2, 0.4]))


def _too_far(move: NDArray[np.float64], release: ReleasePlan) -> list[str]:
    most, slack = release.sensitivity, 1.0 + 1e-9
    if not np.isfinite(move).all():
        return ["a sum is not finite"]
    lengths = {
        "l2": float(math.hypot(*move)),
        "range": max(float(move.max()), 0.0) - min(float(move.min()), 0.0),
        "linf": float(np.abs(move).max()),
    }
    limits = dataclasses.asdict(most)
    return [
        f"a row moves the sum by {length:.4g} in {norm}, charged is {limits[norm]:.4g}"
        for norm, length in lengths.items()
        if limits.get(norm) is not None and length > limits[norm] * slack
    ]


_FEW = 20
"""Numbers of a made-up sum, at least; candidates with the two that are compared; parts of the places of equal ones."""
_MOST = 8_192
"""Numbers of a made-up sum: wider plans are played with so many."""
_TIES = 400
"""Choices among equal candidates: a twentieth of them never wins with a chance of 1e-9."""


def check_noise_scale(release: ReleasePlan, *, width: int) -> AuditResult:
    """Checks the scale of the plan's own noise, and that no draw is used again, on releases of made-up sums.

    Vectors: variance of all values and of the second half of each (chi-square), correlation of neighbours, repeats,
    numbers that never have noise or share it. Indices: how often the worse of two candidates one scale apart wins
    (binomial, against the closed form), and how often it does twice running; and which of equal candidates win. At
    scales that no such gap fits, the power falls, and the check is undecided.

    Args:
      release: what the plan releases.
      width: how many numbers its sums have.
    """
    mechanism, draws, name = release.mechanism, 4_000, "noise: scale, at your own size"
    width = min(max(width, _FEW), _MOST)
    if isinstance(mechanism, ConfidentGNMaxMechanism):
        return skipped_result(name, "a game looks at it, at the audit's noise")
    if isinstance(mechanism, JointExponentialMechanism):
        draws, missed = draws // 4, "40 %"
        faults, power = _sequence_faults(release, mechanism, draws)
        faults += _tie_faults(release, max(width, mechanism.num_choices))
    elif mechanism.norm == "l2":
        missed, (faults, power) = "10 %", _vector_faults(release, width, max(4, draws // width))
    else:
        missed, (faults, power) = "25 %", _index_faults(release, draws)
        faults += _tie_faults(release, width)
    blind = (
        f"noise of which less than about {missed} is missing",
        f"candidates, fewer than a twentieth, whose noise is wrong, and numbers beyond {_MOST:,}",
    )
    return result_of(name, faults, runs=draws, power=power, power_for=HALF, blind=blind)


def _made_up_sum(release: ReleasePlan, value: Sequence[float]) -> BoundedSum:
    return BoundedSum(np.array(value), release.sensitivity, release.row_shape, release.adjacency)


def _vector_faults(release: ReleasePlan, width: int, releases: int) -> tuple[list[str], float]:
    """Returns what is wrong with noise vectors, and the chance to see half of the noise.

    Noise has steps of 2^-16 of its scale, so that in four releases one of 8,192 numbers has no noise with a chance of
    1e-17, and two have the same noise with one of 1e-12.
    """
    total = _made_up_sum(release, [0.0] * width)
    scale = release.mechanism.noise_multiplier * release.sensitivity.require("l2")
    values = np.array([release.mechanism.release(total, rng=SYSTEM_RANDOM).values for _ in range(releases)]) / scale
    faults = ["a noise vector came twice"] if len({row.tobytes() for row in values}) < len(values) else []
    faults += [] if values.any(axis=0).all() else ["a number never has noise"]
    faults += ["two numbers have the same noise"] if len({one.tobytes() for one in values.T}) < width else []
    fits = ExactTests(4)
    faults += fits.variance("all values", values.ravel())
    faults += fits.variance("those of the second half", values[:, width // 2 :].ravel())
    faults += fits.variance("the sums of the releases", values.sum(axis=1) / math.sqrt(values.shape[1]))
    faults += fits.linked("a release and the next", values[:-1:2].ravel(), values[1::2].ravel())
    power = stats.chi2.cdf(4.0 * stats.chi2.ppf(ALARM / 8, values.size), values.size)
    return faults, float(power)


def _index_faults(release: ReleasePlan, releases: int) -> tuple[list[str], float]:
    """Returns what is wrong with the winners, and the chance to see half of the noise; gaps are of 2^19 at most.

    Two candidates are compared, at places that change; others are too far below to win, where there is room for them.
    """
    scale = release.mechanism.noise_multiplier * release.sensitivity.require("range")
    others = [-60.0 * scale] * (_FEW - 2 if 60.0 * scale <= 2.0**19 else 0)
    values = [0.0, -min(scale, 2.0**19), *others]
    totals = [_made_up_sum(release, values[-place:] + values[:-place]) for place in range(len(values))]
    gap = min(scale, 2.0**19) / scale
    chance, halved = index_law(release.mechanism.name, ((-gap, 0.0), (-2.0 * gap, 0.0)), scale=1.0)(1.0)
    wins = [(release.mechanism.release(totals[n % len(totals)], rng=SYSTEM_RANDOM).index, n) for n in range(releases)]
    coins, fits = np.array([index == (n + 1) % len(totals) for index, n in wins]), ExactTests(4)
    faults = fits.binomial("the worse of two candidates wins", coins, chance)
    faults += fits.binomial("it wins twice running", coins[::2] & coins[1::2], chance**2)
    return faults, fits.power(releases, chance, halved)


def _sequence_faults(
    release: ReleasePlan, mechanism: JointExponentialMechanism, releases: int
) -> tuple[list[str], float]:
    """Of k + 1 counts the last is smaller: k of k + 1 sequences hold it, each with the chance that its gap leaves."""
    scale, length = 2.0 * mechanism.noise_multiplier * release.sensitivity.require("range"), mechanism.num_choices
    gap = float(max(1, min(round(scale * (1.0 + math.log(length))), 10_000)))
    total = _made_up_sum(release, [gap] * length + [0.0])
    weight, halved = length * math.exp(-gap / scale), length * math.exp(-2.0 * gap / scale)
    holds = [length in (mechanism.release(total, rng=SYSTEM_RANDOM).indices or ()) for _ in range(releases)]
    coins, fits, chance = np.array(holds), ExactTests(4), weight / (1.0 + weight)
    faults = fits.binomial("a sequence holds the smaller count", coins, chance)
    faults += fits.binomial("it does twice running", coins[::2] & coins[1::2], chance**2)
    return faults, fits.power(releases, chance, halved / (1.0 + halved))


def _tie_faults(release: ReleasePlan, width: int) -> list[str]:
    """Returns where equal candidates win too often or never, by parts of a twentieth; at half of the alarm."""
    total = _made_up_sum(release, [0.0] * width)
    won = [release.mechanism.release(total, rng=SYSTEM_RANDOM) for _ in range(_TIES)]
    winners = np.array([one.index if one.indices is None else one.indices[0] for one in won])
    fits, faults = ExactTests(2 * (_FEW + 1)), list[str]()
    ends = [width * part // _FEW for part in range(_FEW + 1)]
    for start, end in [(width // 2, width), *itertools.pairwise(ends)]:
        inside = (winners >= start) & (winners < end)
        what = f"the places from {start} on, of {width} equal candidates, win"
        faults += fits.binomial(what, inside, (end - start) / width)
    return faults


class ExactTests:
    """Exact tests that share one alarm."""

    def __init__(self, count: int) -> None:
        self._alarm = ALARM / check_int("count", count, low=1)

    def binomial(self, what: str, coins: NDArray[np.bool_], chance: float) -> list[str]:
        """Tests how often something is true."""
        if not coins.size:
            return []
        if chance >= 1.0:
            return [] if coins.all() else [f"{what}: not always"]
        hits = int(coins.sum())
        if stats.binomtest(hits, coins.size, chance).pvalue > self._alarm:
            return []
        return [f"{what}: {hits} of {coins.size}, expected {chance * coins.size:.1f}"]

    def power(self, size: int, chance: float, true: float) -> float:
        """Returns the chance, exactly, that so few of `size` coins of `true` fall right that `chance` is refuted."""
        low, high = -1, math.floor(size * chance)
        while high - low > 1:
            middle = (low + high) // 2
            is_refuted = stats.binomtest(middle, size, chance).pvalue <= self._alarm
            low, high = (middle, high) if is_refuted else (low, middle)
        return float(stats.binom.cdf(low, size, true)) if low >= 0 else 0.0

    def variance(self, what: str, values: NDArray[np.float64]) -> list[str]:
        """Tests standard normal values for their variance."""
        total, size = float(np.square(values).sum()), values.size
        chance = 2 * min(stats.chi2.cdf(total, size), stats.chi2.sf(total, size))
        return [] if chance > self._alarm else [f"{what}: deviation {math.sqrt(total / size):.3f} of the claimed one"]

    def linked(self, what: str, one: NDArray[np.float64], other: NDArray[np.float64]) -> list[str]:
        """Tests normal values for a correlation."""
        size = min(one.size, other.size)
        if not (np.ptp(one) and np.ptp(other)):
            return [f"{what}: constant"]
        return [] if stats.pearsonr(one[:size], other[:size]).pvalue > self._alarm else [f"{what}: correlated"]


def is_fair_and_fresh(*runs: Sequence[bool]) -> bool:
    """True if coins may be fair and independent: heads, and changes from one to the next, are binomial; `ALARM`."""
    chances = list[float]()
    for coins in runs:
        changes = sum(one != next_one for one, next_one in itertools.pairwise(coins))
        for hits, size in ((sum(coins), len(coins)), (changes, len(coins) - 1)):
            chances.append(float(stats.binomtest(hits, size, 0.5).pvalue))
    return min(chances) > ALARM / len(chances)


FRESH = "noise: fresh for every answer"


def check_freshness(ask: Callable[[], bool]) -> AuditResult:
    """Checks that the answer to one question, at a tie, is a fair coin, tossed anew each time."""
    return judge_freshness([ask() for _ in range(200)])


def judge_freshness(*runs: Sequence[bool]) -> AuditResult:
    """Judges whether answers at a tie, in one order or more, are fair coins, each tossed anew; false alarm 1e-6."""
    first = ", ".join(f"{sum(coins)} of {len(coins)}" for coins in runs)
    faults = [] if is_fair_and_fresh(*runs) else [f"{first} are the first of two equal candidates"]
    blind = ("coins that repeat in another process, or after a fork",)
    return result_of(FRESH, faults, runs=len(runs[0]), blind=blind)
