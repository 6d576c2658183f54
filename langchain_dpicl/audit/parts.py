"""Checks of the parts of a plan, each by itself, at the user's own sizes: sampler, places, rows, noise, price.

A whole run hides a wrong part: amplification makes a wrong noise invisible, and noise a wrong rate. So each part is
asked alone, as the plan holds it. Every test of chance is exact and shares one alarm. Knows plans and numbers alone.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import special, stats

from langchain_dpicl.audit.bounds import ALARM, POWER
from langchain_dpicl.audit.results import AuditResult, Verdict
from langchain_dpicl.exceptions import DPICLError
from langchain_dpicl.privacy._validate import check_int
from langchain_dpicl.privacy.aggregation import ClippedGradientSum
from langchain_dpicl.privacy.bounded import BoundedSum
from langchain_dpicl.privacy.confident import ConfidentGNMaxMechanism
from langchain_dpicl.privacy.joint import JointExponentialMechanism
from langchain_dpicl.privacy.plans import ReleasePlan
from langchain_dpicl.privacy.randomness import SYSTEM_RANDOM
from langchain_dpicl.privacy.sampling import AllocatedSlots, BalancedSlots, PartitionedSlots, PoissonUnits

_WIDTH = 4
_INCLUSIONS = 80.0
"""Inclusions to expect: twice the rate is then seen with a chance above .99, at an alarm of 1e-6."""


def sampler_rate(release: ReleasePlan, *, name: str = "sampler: rate") -> AuditResult:
    """Checks how often units are drawn, whether one draw tells of the next, and that nobody is drawn twice.

    Tests: inclusions (binomial), pairs of units in one draw and a unit in two draws that follow each other (binomial,
    disjoint pairs). So few units are drawn from that no slot is ever too full; how full slots are cut is not looked at.
    """
    sampler, blind = release.sampler, ("which of the units of a slot that is too full are left out",)
    if isinstance(sampler, PartitionedSlots):
        return AuditResult(check=name, verdict="sound", details=("a partition: everybody takes part",), blind_to=blind)
    rate = sampler.sampling_rate
    is_fixed = isinstance(sampler, BalancedSlots)
    # Of a sample of fixed size, and of a slot of one record, the coins of several units are not free: one unit tells.
    units = 500 if isinstance(sampler, PoissonUnits) else sampler.shots_per_slot // 2 * 2 or 1
    looked_at = 1 if is_fixed else units
    units = sampler.public_size if isinstance(sampler, BalancedSlots) else units
    wanted = max(_INCLUSIONS / rate, 20.0 / -math.log(rate) if rate < 1.0 else 1.0, 20.0 * looked_at)
    draws = 2 * math.ceil(wanted / looked_at / 2)
    twice, drawn = False, np.zeros((draws, units), dtype=bool)
    for row in drawn:
        members = list(itertools.chain.from_iterable(sampler.draw(units, rng=SYSTEM_RANDOM)))
        twice |= len(set(members)) < len(members)
        row[members] = True
    found = ["a unit stands in one sample twice"] if twice else []
    fits, coins = _Fits(3), drawn[:, :looked_at]
    found += fits.binomial("drawn", coins, rate)
    found += fits.binomial("drawn twice running", coins[::2] & coins[1::2], rate**2)
    if looked_at > 1:
        found += fits.binomial("drawn together", coins[:, ::2] & coins[:, 1::2], rate**2)
    power = _rate_power(rate, coins.size)
    return _result(name, found, runs=draws, power=power, blind=blind)


def _rate_power(rate: float, size: int) -> float:
    """Returns the chance that twice the rate is seen; of a rate above one half, that everybody is."""
    wrong = min(1.0, 2.0 * rate)
    if rate >= 1.0:
        return 1.0
    most = float(stats.binom.isf(ALARM / 6, size, rate)) + 1
    return float(stats.binom.sf(most - 1, size, wrong))


def places(release: ReleasePlan, *, draws: int = 600, name: str = "slots: one unit, one place") -> AuditResult:
    """Checks that a unit stands in one row at most, and that where it stands says nothing of where the others do.

    Only slots are asked, at their own number and with everybody in the sample. Units that are dealt in turn would share
    slots more or less often than by chance: one that goes would then move the others.
    """
    blind: tuple[str, ...] = (
        "what a model makes of its own prompt: a model that remembers other prompts couples the rows",
    )
    sampler = release.sampler
    if isinstance(sampler, PoissonUnits):
        return AuditResult(check=name, verdict="sound", details=("every unit is a row of its own",), blind_to=blind)
    if isinstance(sampler, PartitionedSlots | BalancedSlots):
        units = sampler.public_size
        draws = min(draws, max(20, 60_000 // units))
    else:
        units = 2
        sampler = dataclasses.replace(sampler, sampling_rate=1.0)
    slots, found = len(sampler.draw(units, rng=SYSTEM_RANDOM)), list[str]()
    alike, firsts = list[bool](), list[bool]()
    for _ in range(draws):
        rows = sampler.draw(units, rng=SYSTEM_RANDOM)
        where = {unit: place for place, row in enumerate(rows) for unit in row}
        if len(where) < sum(map(len, rows)):
            found.append("a unit stands in two places")
        if len(rows) != slots:
            found.append("the number of slots changes")
        if {0, 1} <= set(where):
            alike.append(where[0] == where[1])
        if 0 in where:
            firsts.append(where[0] == 0)
    if not isinstance(sampler, PartitionedSlots | BalancedSlots) and slots > 1:
        fits = _Fits(2)
        found += fits.binomial("two units in the same slot", _kept(alike, sampler.shots_per_slot), 1.0 / slots)
        found += fits.binomial(
            "a unit in the first slot", np.array(firsts), 1.0 / slots, tell=sampler.shots_per_slot > 1
        )
    if isinstance(sampler, AllocatedSlots):
        blind = (*blind, "how the batches of a deal are cut")
    return _result(name, found, runs=draws, power=None, blind=blind)


def _kept(alike: Sequence[bool], shots: int) -> NDArray[np.bool_]:
    """Returns the pairs that can be judged: in a slot of one record two units never stand together."""
    return np.array(alike if shots > 1 else [], dtype=bool)


_HOSTILE = (0.0, -0.0, 1e-300, 1e300, -1e300, math.inf, -math.inf, math.nan, -1.0, 2.0, 1e9)


def contribution(
    release: ReleasePlan, *, name: str = "rows: one row moves the sum no further than charged"
) -> AuditResult:
    """Checks that no row, whatever an engine says, moves the bounded sum by more than its sensitivity.

    Rows of plain and of hostile numbers (infinite, NaN, huge, negative) come, go and replace each other beside others.
    """
    usual = [np.array([0.7, 0.1, 0.1, 0.1]), np.array([0.1, 0.2, 0.3, 0.4]), np.zeros(_WIDTH)]
    rows = [*usual, *np.eye(_WIDTH)[:2], *(np.array([x, 0.0, 0.0, 0.0]) for x in _HOSTILE)]
    rows += [np.full(_WIDTH, x) for x in _HOSTILE]
    rows += [np.array([a, b, 0.0, 1.0]) for a in _HOSTILE for b in (math.inf, -math.inf, math.nan)]
    beside = release.sampler.num_rows or 4
    others = np.array([usual[place % 3] for place in range(beside - 1)]).reshape(-1, _WIDTH)
    found, count = list[str](), 0
    appears = release.row_shape == "units" and release.adjacency == "add_remove"
    try:
        totals = [_total(release, np.vstack([others, row])) for row in rows]
        without = _total(release, others) if appears else None
    except DPICLError as error:
        found, totals, without = [f"a row stops the release: {type(error).__name__}"], [], None
    pairs: Iterable[tuple[BoundedSum, BoundedSum]] = itertools.combinations(totals, 2)
    if without is not None:
        pairs = ((without, total) for total in totals)
    for one, other in pairs:
        found += _too_far(other.value - one.value, release)
        count += 1
    return _result(name, found, runs=count, power=None, blind=("numbers that were not tried",))


def _total(release: ReleasePlan, rows: NDArray[np.float64]) -> BoundedSum:
    if isinstance(release.aggregation, ClippedGradientSum):
        running = release.running_sum(_WIDTH)
        running.add(rows)
        return release.total_of(running, width=_WIDTH)
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


def noise(release: ReleasePlan, *, draws: int = 4_000, name: str = "noise: scale, at your own size") -> AuditResult:
    """Checks the scale of the plan's own noise, and that no draw is used again, on releases of made-up sums.

    Vectors: variance of all values (chi-square), correlation of neighbours, repeats. Indices: how often the worse of
    two candidates one scale apart wins (binomial, against the closed form), and how often it does twice running.
    """
    mechanism, blind = release.mechanism, ("scales that are wrong by less than about 5 %",)
    if isinstance(mechanism, ConfidentGNMaxMechanism):
        why = "a game looks at it, at the audit's noise"
        return AuditResult(check=name, verdict="sound", details=(why,), blind_to=blind)
    if isinstance(mechanism, JointExponentialMechanism):
        found = _sequence_faults(release, mechanism, draws // 4)
    else:
        found = _vector_faults(release, draws // 20) if mechanism.norm == "l2" else _index_faults(release, draws)
    return _result(name, found, runs=draws, power=None, blind=blind)


def _made_up(release: ReleasePlan, value: Sequence[float]) -> BoundedSum:
    return BoundedSum(np.array(value), release.sensitivity, release.row_shape, release.adjacency)


def _vector_faults(release: ReleasePlan, releases: int) -> list[str]:
    total = _made_up(release, [0.0] * 20)
    scale = release.mechanism.noise_multiplier * release.sensitivity.require("l2")
    values = np.array([release.mechanism.release(total, rng=SYSTEM_RANDOM).values for _ in range(releases)]) / scale
    found = ["a noise vector came twice"] if len({row.tobytes() for row in values}) < len(values) else []
    fits = _Fits(3)
    found += fits.variance("all values", values.ravel())
    found += fits.variance("the sums of the releases", values.sum(axis=1) / math.sqrt(values.shape[1]))
    found += fits.linked("a release and the next", values[:-1:2].ravel(), values[1::2].ravel())
    return found


def _index_faults(release: ReleasePlan, releases: int) -> list[str]:
    scale = release.mechanism.noise_multiplier * release.sensitivity.require("range")
    total = _made_up(release, [0.0, -min(scale, 2.0**19)])
    gap = min(scale, 2.0**19) / scale
    chance = float(special.expit(-gap)) if release.mechanism.name == "gumbel" else math.exp(-gap) / 2.0
    lost = [release.mechanism.release(total, rng=SYSTEM_RANDOM).index == 1 for _ in range(releases)]
    coins, fits = np.array(lost), _Fits(2)
    found = fits.binomial("the worse of two candidates wins", coins, chance)
    return found + fits.binomial("it wins twice running", coins[::2] & coins[1::2], chance**2)


def _sequence_faults(release: ReleasePlan, mechanism: JointExponentialMechanism, releases: int) -> list[str]:
    """Of k + 1 counts the last is smaller: k of k + 1 sequences hold it, each with the chance that its gap leaves."""
    scale, length = 2.0 * mechanism.noise_multiplier * release.sensitivity.require("range"), mechanism.num_choices
    gap = float(max(1, min(round(scale * (1.0 + math.log(length))), 10_000)))
    total = _made_up(release, [gap] * length + [0.0])
    weight = length * math.exp(-gap / scale)
    held = [length in (mechanism.release(total, rng=SYSTEM_RANDOM).indices or ()) for _ in range(releases)]
    coins, fits, chance = np.array(held), _Fits(2), weight / (1.0 + weight)
    found = fits.binomial("a sequence holds the smaller count", coins, chance)
    return found + fits.binomial("it does twice running", coins[::2] & coins[1::2], chance**2)


class _Fits:
    """Exact tests that share one alarm."""

    def __init__(self, count: int) -> None:
        self._alarm = ALARM / check_int("count", count, low=1)

    def binomial(self, what: str, coins: NDArray[np.bool_], chance: float, *, tell: bool = True) -> list[str]:
        """Tests how often something is true."""
        if not coins.size or not tell:
            return []
        if chance >= 1.0:
            return [] if coins.all() else [f"{what}: not always"]
        hits = int(coins.sum())
        if stats.binomtest(hits, coins.size, chance).pvalue > self._alarm:
            return []
        return [f"{what}: {hits} of {coins.size}, expected {chance * coins.size:.1f}"]

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


def is_fair_and_fresh(coins: Sequence[bool]) -> bool:
    """True if coins may be fair and independent: heads, and changes from one to the next, are binomial; `ALARM`."""
    changes = sum(one != next_one for one, next_one in itertools.pairwise(coins))
    tests = stats.binomtest(sum(coins), len(coins), 0.5), stats.binomtest(changes, len(coins) - 1, 0.5)
    return bool(min(test.pvalue for test in tests) > ALARM / 2)


def freshness(ask: Callable[[], bool], *, runs: int = 200, name: str = "noise: fresh for every answer") -> AuditResult:
    """Checks that the answer to one question, at a tie, is a fair coin that is thrown anew each time.

    Args:
      ask: asks once; whether the first of two equal candidates won.
      runs: how often to ask.
      name: of the check.
    """
    coins = [ask() for _ in range(runs)]
    found = [] if is_fair_and_fresh(coins) else [f"{sum(coins)} of {runs} are the first of two equal candidates"]
    blind = ("coins that repeat in another process, or after a fork",)
    return _result(name, found, runs=runs, power=None, blind=blind)


def _result(check: str, found: list[str], *, runs: int, power: float | None, blind: tuple[str, ...]) -> AuditResult:
    told = tuple(dict.fromkeys(found))[:4]
    weak = power is not None and power < POWER and not told
    if weak:
        told = (f"twice the rate would be seen with a chance of {power:.2f} only",)
    verdict: Verdict = "violated" if found else "undecided" if weak else "sound"
    return AuditResult(
        check=check,
        verdict=verdict,
        runs=runs,
        power=power,
        details=told,
        blind_to=blind,
    )
