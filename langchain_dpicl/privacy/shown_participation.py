"""Verifies the parameters that a report shows of an individual filter."""

from __future__ import annotations

from collections.abc import Iterator

from langchain_dpicl.privacy._validate import check_int
from langchain_dpicl.privacy.extensions.individual_filter import FILTER_TEMPLATE, participation_plan
from langchain_dpicl.privacy.shown import Book, plan_problems
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
    shown, plan = component.public, participation_plan(component.public["participation"])
    queries, width = (check_int(name, shown[name], low=1) for name in ("max_queries", "width"))
    gap, tickets = plan.implementation_delta(queries, width=width), plan.tickets(queries)
    declared = book.dataset_of(component)
    numbers = {
        "implementation_delta": gap,
        "noise_stddev": plan.noise_stddev,
        "public_size": None if declared is None else declared.total_size,
    }
    yield from plan_problems(component, book, "a filter", tickets=tickets, gap=gap, numbers=numbers.items())
