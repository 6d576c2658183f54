"""Bounds what the shares of a report cost at other deltas."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeAlias

from langchain_dpicl.privacy._validate import Adjacency, check_delta, check_positive, check_real, fail
from langchain_dpicl.privacy.amounts import effective_delta, exact, round_down, round_up
from langchain_dpicl.privacy.extensions.share_prices import share_price
from langchain_dpicl.privacy.shown import RECOMPUTE_TOLERANCE
from langchain_dpicl.privacy.tickets import ShareTerms, implementation_delta_of

MAX_ROWS = 200
DEFAULT_SECONDS = 60.0
METHOD = (
    "At each delta every sealed share (a joint plan once) is priced anew at its part of it, delta * its own delta / "
    "the sum of all their deltas, rounded down; the prices are added, rounded up. That is basic composition: an upper "
    "bound of everything the sealed shares can ever release together, not the least one. What is proved at a smaller "
    "delta, or by the charges at the sum of their deltas, also bounds every larger delta. A share may be charged more "
    "than it costs, and shares that were declared but never sealed are not in the table: they have released nothing."
)
_Priced: TypeAlias = tuple[float, float | None]  # delta, and the sum of all prices there
NO_BOUND = "no finite bound at this delta"


@dataclass(frozen=True, slots=True)
class EpsilonRow:
    """A bound at one delta.

    Attributes:
      delta: at which delta.
      epsilon: the bound, rounded up; infinite where nothing is proved; None where time ran out.
      note: why there is no finite bound; "" where there is one.
    """

    delta: float
    epsilon: float | None
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON form, with null where there is no finite bound."""
        finite = self.epsilon is not None and math.isfinite(self.epsilon)
        return {"delta": self.delta, "epsilon": self.epsilon if finite else None, "note": self.note}


@dataclass(frozen=True, slots=True)
class EpsilonTable:
    """Epsilon of everything sealed, over deltas. Made by `PrivacyReport.epsilons`.

    Formal guarantees:
      - What the sealed shares release together is (epsilon, delta)-DP for every row: all rows hold at once.
      - Epsilon never grows with delta.

    Attributes:
      rows: sorted by delta.
      method: how they were computed.
    """

    rows: tuple[EpsilonRow, ...]
    method: str = METHOD

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON form."""
        return {"method": self.method, "rows": [row.to_dict() for row in self.rows]}


def default_deltas(limit: float) -> tuple[float, ...]:
    """Returns a ledger's delta and three smaller ones, a power of ten apart."""
    return tuple(round_down(exact(limit) / 10**step) for step in (3, 2, 1, 0))


def epsilon_table(
    shares: Sequence[ShareTerms],
    deltas: Sequence[float],
    *,
    adjacency: Adjacency,
    max_seconds: float | None = DEFAULT_SECONDS,
) -> EpsilonTable:
    """Prices sealed shares at other deltas; no price is begun once `max_seconds` (None: no limit) are over.

    Raises:
      ConfigurationError: a delta is not in (0, 1), or there are none or too many.
    """
    wanted = sorted({check_delta(delta) for delta in deltas})
    if not 1 <= len(wanted) <= MAX_ROWS:
        raise fail("deltas", f"1 to {MAX_ROWS} values in (0, 1)", len(wanted))
    seconds = math.inf if max_seconds is None else check_positive("max_seconds", max_seconds)
    end = time.monotonic() + seconds
    late = f"not computed within {seconds:g} s"
    raw: dict[float, float | None] = {}
    for delta in reversed(wanted):  # the largest delta first: it is used most
        raw[delta] = _composed_price(shares, delta, adjacency=adjacency, end=end)
    return EpsilonTable(tuple(_rows(shares, [(delta, raw[delta]) for delta in wanted], late=late)))


def _rows(shares: Sequence[ShareTerms], raw: Sequence[_Priced], *, late: str) -> Iterator[EpsilonRow]:
    charged, total = _sum(share.epsilon for share in shares), _sum_of_deltas(shares)
    least = math.inf
    for delta, value in raw:
        least = min(least, math.inf if value is None else value)
        if exact(delta) >= total:
            least = min(least, charged)
        if least < math.inf:
            yield EpsilonRow(delta, least)
        else:
            yield EpsilonRow(delta, value, late if value is None else NO_BOUND)


def _composed_price(shares: Sequence[ShareTerms], delta: float, *, adjacency: Adjacency, end: float) -> float | None:
    """Returns the sum of all prices at their parts of `delta`; None where time ran out."""
    total, prices = _sum_of_deltas(shares), []
    for share in shares:
        if time.monotonic() >= end:
            return None
        part = round_down(exact(delta) * exact(share.delta) / total)
        gap = implementation_delta_of(share.components)
        if not part or effective_delta(part, gap) <= 0:
            return math.inf
        cost, _ = share_price(share.components, delta=part, adjacency=adjacency, opinions=False)
        if cost == math.inf:
            return math.inf
        prices.append(cost)
    return _sum(prices)


def _sum_of_deltas(shares: Sequence[ShareTerms]) -> Fraction:
    return sum((exact(share.delta) for share in shares), Fraction(0))


def _sum(values: Any) -> float:
    return round_up(sum((exact(value) for value in values), Fraction(0)))


def table_problems(table: Any, shares: Sequence[ShareTerms], *, adjacency: Adjacency) -> Iterator[str]:
    """Recomputes the bounds that a report states over deltas; too low is wrong, too high is not."""
    stated = [(check_delta(row["delta"]), row["epsilon"]) for row in table["rows"]]
    bounds = [(delta, check_real("epsilon", value, low=0.0)) for delta, value in stated if value is not None]
    if not bounds:
        return
    recomputed = epsilon_table(shares, [delta for delta, _ in bounds], adjacency=adjacency, max_seconds=None)
    costs: Mapping[float, float | None] = {row.delta: row.epsilon for row in recomputed.rows}
    for delta, value in bounds:
        cost = costs[delta]
        if cost is None or value < cost * (1 - RECOMPUTE_TOLERANCE):
            yield f"epsilons: {value!r} at delta {delta!r}, but the sealed shares cost up to {cost!r} there"
