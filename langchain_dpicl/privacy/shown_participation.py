"""Verifies the parameters that a report shows of an individual filter."""

from __future__ import annotations

from collections.abc import Iterator

from langchain_dpicl.privacy._validate import check_int
from langchain_dpicl.privacy.extensions.individual_filter import FILTER_TEMPLATE, participation_plan
from langchain_dpicl.privacy.shown import UNREADABLE, Book, own_cost, same, why
from langchain_dpicl.privacy.tickets import Component


def shows_participation(component: Component) -> bool:
    """Returns whether a component shows the parameters of an individual filter, or has the ticket of one."""
    return "participation" in component.public or any(
        ticket.template == FILTER_TEMPLATE for ticket in component.tickets
    )


def participation_problems(component: Component, book: Book) -> Iterator[str]:
    """Compares the filter that a component shows with its tickets, its share and its price.

    Formal guarantees:
      - No problem means: noise, rows and participations shown make exactly the tickets that are charged, one filter and
        free queries, and every number shown beside them is the release's or the share's.
    """
    if not shows_participation(component):
        return
    try:
        yield from tuple(_problems(component, book))
    except UNREADABLE as error:
        yield f"its filter cannot be read: {why(error)}"


def _problems(component: Component, book: Book) -> Iterator[str]:
    shown, plan = component.public, participation_plan(component.public["participation"])
    queries, width = (check_int(name, shown[name], low=1) for name in ("max_queries", "width"))
    if component.tickets != plan.tickets(queries):
        yield "shows a filter that makes other tickets than it has"
    gap = plan.implementation_delta(queries, width=width)
    for name, stated in (("its share's", component.implementation_delta), ("shown", shown["implementation_delta"])):
        if not same(stated, gap):
            yield f"implementation_delta, {name}: expected {gap!r}, found {stated!r}"
    if (shown["adjacency"], shown["delta"]) != (book.adjacency, component.delta):
        yield f"shows adjacency {shown['adjacency']!r} and delta {shown['delta']!r}, which are not its share's"
    if not same(shown["noise_stddev"], plan.noise_stddev):
        yield f"shows noise_stddev {shown['noise_stddev']!r}, its release has {plan.noise_stddev!r}"
    declared = book.datasets.get(component.partition or "")
    if declared is None or declared.total_size != shown["public_size"]:
        yield f"shows public_size {shown['public_size']!r}, which is not that of its data set"
    if book.misstated(shown["epsilon"], cost := own_cost(component, book)):
        yield f"shows epsilon {shown['epsilon']!r}, its tickets cost up to {cost!r}"
