"""Says what a ledger of a stream promises for every window and what longer stays cost, and recomputes both."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

from langchain_dpicl.privacy import accounting
from langchain_dpicl.privacy._validate import Adjacency, check_int
from langchain_dpicl.privacy.accounting.events import Event, RepeatedEvent, canonical_json
from langchain_dpicl.privacy.extensions.run_tickets import RUN_TEMPLATE
from langchain_dpicl.privacy.extensions.stream_blocks import LAST_BLOCK, StreamTerms, hull_of
from langchain_dpicl.privacy.ledger.amounts import effective_delta, exact, round_up
from langchain_dpicl.privacy.ledger.tickets import Blocks, Component, Extent, ShareTerms, implementation_delta_of

SPANS = (2, 3, 6, 12)
"""How many windows long the stays of the table are."""

Retired = Mapping[str, int | None]
"""The last block that a retired component reserved, or None where it reserved nothing, by name."""


def heaviest(amounts: Iterable[tuple[Extent | None, float]], window: int) -> float:
    """Returns the largest sum of the amounts of one window, rounded up: of those whose extent the window touches."""
    spans = [(each, exact(amount)) for each, amount in amounts if each is not None]
    # The sum grows only where a window begins to touch an extent, which it does with the extent's first block.
    sums = (
        sum((amount for (first, last), amount in spans if _touches(end, first, last, window)), Fraction(0))
        for end in {first for (first, _), _ in spans}
    )
    return round_up(max(sums, default=Fraction(0)))


def _touches(end: int, first: int, last: int | None, window: int) -> bool:
    return first <= end and (last is None or end <= last + window - 1)


def extent_of(components: Iterable[tuple[str, Extent | None]], retired: Retired) -> Extent | None:
    """Returns the blocks that the components of a share have read or may read, by their names and extents."""
    read: list[Extent] = []
    for name, extent in components:
        if extent is None:
            raise TypeError(f"{name!r} has no extent")
        reach = retired.get(name, -1)
        if reach is not None:  # it has read something, or may
            read.append(extent if name not in retired else (extent[0], reach))
    return hull_of(read)


def share_extent(terms: ShareTerms, retired: Retired) -> Extent | None:
    """Returns the blocks that a share has read or may read."""
    return extent_of(((each.name, each.extent) for each in terms.components), retired)


def shown_extent(share: Mapping[str, Any], retired: Retired) -> Extent | None:
    """Returns the same of a share as a report shows it."""
    return extent_of(((each["name"], tuple(each["extent"])) for each in share["components"]), retired)


def retired_in(stream: Mapping[str, Any]) -> dict[str, int | None]:
    """Returns the retired components that a report shows, checked."""
    return {
        str(name): None if last is None else check_int("retired", last, low=0, high=LAST_BLOCK)
        for name, last in stream["retired"].items()
    }


def promise_words(terms: StreamTerms, *, epsilon: float, delta: float, adjacency: Adjacency) -> str:
    """Returns the promise of a ledger of a stream in words."""
    guard = f"({epsilon:g}, {delta:g})-DP"
    start = (
        f"For any person and any {terms.words} in a row: everything that this ledger has released or will release is"
    )
    end = (
        f"{terms.name.capitalize()}s are of the records, not of the releases; old ones get no budget back. A "
        "person who is there for longer is protected as the longer stays below say, for the shares declared so far."
    )
    if adjacency == "replace_one":
        return f"{start} {guard} as to the records of that person in that time, their presence included. {end}"
    hop = f"({2 * epsilon:g}, {(1 + math.exp(epsilon)) * delta:.3g})-DP"
    return (
        f"{start} {guard} as to whether that person's records of that time were there, if they have no others; {hop} "
        f"as to the records of that time of a person who has others. {end}"
    )


@functools.lru_cache(maxsize=4096)
def _price(event: Event, times: int, delta: float, gap: float, adjacency: Adjacency) -> float:
    """Returns what so many times the tickets of one window cost at delta, of which `gap` is set aside each time."""
    rest = effective_delta(delta, times * gap)
    if rest < 0 or (rest == 0 < delta):
        return math.inf
    repeated = event if times == 1 else RepeatedEvent(event, times)
    return float(accounting.epsilon_bound(repeated, delta=rest, adjacency=adjacency, opinions=False).epsilon)


def longer_stays(
    shares: Sequence[ShareTerms], terms: StreamTerms, retired: Retired, adjacency: Adjacency
) -> Iterator[dict[str, Any]]:
    """Yields, for stays of several windows, epsilon and delta of all that the shares can release about such a person.

    A stay of k windows is touched by at most k times the tickets of one window: each ticket that touches it touches one
    of the k. So many are composed, share by share; the shares that touch one such stay add up.
    """
    for times in SPANS:
        length = times * terms.window
        prices: list[tuple[Extent | None, float]] = []
        deltas: list[tuple[Extent | None, float]] = []
        for share in shares:
            extent = share_extent(share, retired)
            own = times
            if extent is not None and extent[1] is not None:
                own = min(times, -(-(extent[1] - extent[0] + 1) // terms.window))
            cost = _price(share.event, own, share.delta, implementation_delta_of(share.components), adjacency)
            prices.append((extent, max(cost, share.epsilon)))
            deltas.append((extent, share.delta))
        is_finite = all(math.isfinite(price) for _, price in prices)
        epsilon = heaviest(prices, length) if is_finite else None
        yield {"windows": times, "blocks": length, "epsilon": epsilon, "delta": heaviest(deltas, length)}


def reads_claims(terms: StreamTerms, blocks: Blocks) -> dict[str, Any]:
    """Returns what the report of a run says of the blocks that it read, by number and by name."""
    first, last = blocks
    return {"blocks": [first, last], "first": terms.name_of(first), "last": terms.name_of(last)}


def reads_problems(report: Mapping[str, Any], inner: Mapping[str, Any], own: Component) -> Iterator[str]:
    """Compares the blocks that the report of a run names with its component; that it read those is its sender's word.

    Args:
      report: of the release.
      inner: the ledger's report in it.
      own: the component that paid.
    """
    if own.extent is None or all(ticket.template != RUN_TEMPLATE for ticket in own.tickets):
        if "reads" in report:
            yield "reads: blocks of a component that has no runs on a stream"
        return
    first, last = (check_int("blocks", block, low=0, high=LAST_BLOCK) for block in report["reads"]["blocks"])
    made = reads_claims(_terms_in(inner["stream"]), (first, last))
    if canonical_json(dict(report["reads"])) != canonical_json(made):
        yield f"reads: expected {made}, found other names or members"
    end = LAST_BLOCK if own.extent[1] is None else own.extent[1]
    if not own.extent[0] <= first <= last <= end or last - first + 1 != own.public["stream"]["length"]:
        yield f"reads: expected the blocks of a run of {own.name!r}, found {[first, last]}"


def _terms_in(stream: Mapping[str, Any]) -> StreamTerms:
    return StreamTerms.from_dict({name: stream[name] for name in ("block", "origin", "window")})


def stream_claims(
    shares: Sequence[ShareTerms],
    terms: StreamTerms,
    retired: Retired,
    *,
    epsilon: float,
    delta: float,
    adjacency: Adjacency,
) -> dict[str, Any]:
    """Returns what a report says of the windows of its ledger."""
    return {
        **terms.to_dict(),
        "retired": dict(retired),
        "promise": promise_words(terms, epsilon=epsilon, delta=delta, adjacency=adjacency),
        "longer_stays": list(longer_stays(shares, terms, retired, adjacency)),
    }


def stream_problems(data: Mapping[str, Any], shares: Sequence[ShareTerms], *, tolerance: float) -> Iterator[str]:
    """Recomputes what a report says of the windows of its ledger; a bound that is too high is no problem."""
    found, limits, adjacency = data["stream"], data["limits"], data["adjacency"]
    terms = _terms_in(found)
    names = {component.name for share in shares for component in share.components}
    if unknown := sorted(set(found["retired"]) - names):
        yield f"stream: retired {unknown}, of which there is no share"
    if any(ticket.label is not None for share in shares for each in share.components for ticket in each.tickets):
        yield "stream: a ticket is of one label, which a person need not keep"
    made = stream_claims(
        shares,
        terms,
        retired_in(found),
        epsilon=limits["epsilon"],
        delta=limits["delta"],
        adjacency=adjacency,
    )
    if found["promise"] != made["promise"]:
        yield "stream: the promise is not in the words of this version"
    if set(found) != set(made) or len(found["longer_stays"]) != len(made["longer_stays"]):
        yield "stream: other members than a report of this version has"
        return
    for shown, row in zip(found["longer_stays"], made["longer_stays"], strict=True):
        is_same = {**shown, "epsilon": 0.0} == {**row, "epsilon": 0.0}
        stated, cost = shown["epsilon"], row["epsilon"]
        is_low = stated is not None and (cost is None or stated < cost * (1 - tolerance))
        if not is_same or is_low:
            yield f"stream: a stay of {row['blocks']} blocks costs up to {row['epsilon']!r}, found {shown!r}"
