"""Verifies the parameters that a report shows of counts of values, and the counts that carry the report."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from langchain_dpicl.privacy._validate import check_int
from langchain_dpicl.privacy.accounting.events import ComposedEvent, FailureEvent, canonical_json
from langchain_dpicl.privacy.extensions.count_histograms import COUNT_TEMPLATE, CountPlan, count_release
from langchain_dpicl.privacy.shown import Book, has_members, member, plan_problems
from langchain_dpicl.privacy.tickets import Component
from langchain_dpicl.privacy.unit_values import UNITS

_FLAT = frozenset({"adjacency", "counts", "delta", "epsilon", "noise_multiplier", "threshold_delta"})


def shows_counts(component: Component) -> bool:
    """Returns whether a component shows the parameters of counts of values, or has the ticket of them."""
    return "counts" in component.public or any(ticket.template == COUNT_TEMPLATE for ticket in component.tickets)


def count_problems(component: Component, book: Book) -> Iterator[str]:
    """Compares the counts that a component shows with its tickets, its data set, its share and its price.

    Formal guarantees:
      - No problem means: the rule, noise and threshold shown make exactly the one ticket that is charged, the failure
        of the threshold included, and every number shown beside them is the release's or the share's.
    """
    shown, release = component.public, count_release(component.public["counts"])
    if set(shown) != _FLAT:
        yield f"shows {sorted(set(shown) ^ _FLAT)} beside or instead of what counts show"
    if release.rule.name not in {None, *book.dataset(component).fields}:
        yield f"shows counts of {release.rule.name!r}, which its data set does not declare"
    numbers = {
        "adjacency": release.adjacency,
        "noise_multiplier": release.mechanism.noise_multiplier,
        "threshold_delta": _failure(release),
    }
    yield from plan_problems(component, book, "counts", tickets=release.tickets(), gap=0.0, numbers=numbers.items())


def _failure(release: CountPlan) -> float:
    event = release.event
    parts = event.events if isinstance(event, ComposedEvent) else ()
    return math.fsum(part.delta for part in parts if isinstance(part, FailureEvent))


def are_counts(holder: object) -> bool:
    """Returns whether what was given to the verifier is released counts."""
    return has_members(holder, "counts", "report" if isinstance(holder, Mapping) else "plan")


def released_count_problems(holder: object, component: Component | None) -> Iterator[str]:
    """Compares released counts with the component that their report charges.

    Formal guarantees:
      - No problem means: the component's ticket pays for one release of counts, with the plan that is shown, and what
        left is what that plan may release: all declared values, or others that reach the threshold.
      - That the counts are those that were released is their sender's word.
    """
    counts = member(holder, "counts")
    pairs = list(counts.items()) if isinstance(counts, Mapping) else [(value, count) for value, count in counts]
    if component is None or not shows_counts(component):
        yield f"counts: {len(pairs)} were released, which no component of the report pays for"
        return
    if canonical_json(member(holder, "plan")) != canonical_json(dict(component.public)):
        yield f"plan: expected what {component.name!r} shows, found another"
    release = count_release(component.public["counts"])
    values, threshold = [value for value, _ in pairs], release.mechanism.threshold
    expected = [UNITS] if release.rule.name is None else release.rule.declared
    if len(set(values)) != len(values) or (expected is not None and values != list(expected)):
        yield f"counts: expected one for each of {list(expected or ())}, found {values}"
    least = min((check_int("counts", count, low=-(2**53)) for _, count in pairs), default=threshold)
    if threshold is not None and least is not None and least < threshold:
        yield f"counts: expected none below the threshold, {threshold}, found {least}"
