"""Verifies the parameters that a report shows of counts of values, and the counts that carry the report."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from langchain_dpicl.privacy._validate import check_int, fail
from langchain_dpicl.privacy.accounting.events import ComposedEvent, FailureEvent, canonical_json
from langchain_dpicl.privacy.extensions.count_histograms import COUNT_TEMPLATE, CountPlan, count_release
from langchain_dpicl.privacy.shown import UNREADABLE, Book, own_cost, same, why
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
    if not shows_counts(component):
        return
    try:
        yield from tuple(_count_problems(component, book))
    except UNREADABLE as error:
        yield f"its counts cannot be read: {why(error)}"


def _count_problems(component: Component, book: Book) -> Iterator[str]:
    shown, release = component.public, count_release(component.public["counts"])
    if set(shown) != _FLAT:
        yield f"shows {sorted(set(shown) ^ _FLAT)} beside or instead of what counts show"
    if component.tickets != release.tickets():
        yield "shows counts that make other tickets than it has"
    if component.implementation_delta != 0.0:
        yield f"implementation_delta: expected 0.0, found {component.implementation_delta!r}"
    declared = book.datasets.get(component.partition or "")
    if declared is None:
        raise fail("partition", "the dataset_id of a data set of the report", component.partition)
    if release.rule.name not in {None, *declared.fields}:
        yield f"shows counts of {release.rule.name!r}, which its data set does not declare"
    if (release.adjacency, shown["adjacency"], shown["delta"]) != (book.adjacency, book.adjacency, component.delta):
        yield f"shows adjacency {shown['adjacency']!r} and delta {shown['delta']!r}, which are not its share's"
    numbers = {"noise_multiplier": release.mechanism.noise_multiplier, "threshold_delta": _failure(release)}
    for name, value in numbers.items():
        if shown[name] != value and not same(shown[name], value):
            yield f"shows {name} {shown[name]!r}, its release has {value!r}"
    if book.misstated(shown["epsilon"], cost := own_cost(component, book)):
        yield f"shows epsilon {shown['epsilon']!r}, its tickets cost up to {cost!r}"


def _failure(release: CountPlan) -> float:
    event = release.event
    parts = event.events if isinstance(event, ComposedEvent) else ()
    return math.fsum(part.delta for part in parts if isinstance(part, FailureEvent))


def released_count_problems(holder: object, component: Component | None) -> Iterator[str]:
    """Compares released counts with the component that their report charges; what is none has no problem.

    Formal guarantees:
      - No problem means: the component's ticket pays for one release of counts, with the plan that is shown, and what
        left is what that plan may release: all declared values, or found ones that reach the threshold.
      - That the counts are those that were released is their sender's word.

    Args:
      holder: what was given to the verifier, a text read as JSON.
      component: the one that its report names; None: it names none, or nothing protects it.
    """
    is_json = isinstance(holder, Mapping)
    has = {"counts", "report"} <= set(holder) if is_json else hasattr(holder, "counts") and hasattr(holder, "plan")  # type: ignore[call-overload]
    if not has:
        return
    try:
        yield from tuple(_released_problems(holder, component))
    except UNREADABLE as error:
        yield f"counts: they cannot be read: {why(error)}"


def _released_problems(holder: Any, component: Component | None) -> Iterator[str]:
    is_json = isinstance(holder, Mapping)
    counts, plan = (holder["counts"], holder["plan"]) if is_json else (holder.counts, holder.plan)
    pairs = list(counts.items()) if isinstance(counts, Mapping) else [(value, count) for value, count in counts]
    if component is None or not shows_counts(component):
        yield f"counts: {len(pairs)} were released, which no component of the report pays for"
        return
    if canonical_json(plan) != canonical_json(dict(component.public)):
        yield f"plan: expected what {component.name!r} shows, found another"
    release = count_release(component.public["counts"])
    values, threshold = [value for value, _ in pairs], release.mechanism.threshold
    expected = [UNITS] if release.rule.name is None else release.rule.declared
    if len(set(values)) != len(values) or (expected is not None and values != list(expected)):
        yield f"counts: expected one for each of {list(expected or ())}, found {values}"
    least = min((check_int("counts", count, low=-(2**53)) for _, count in pairs), default=threshold)
    if threshold is not None and least is not None and least < threshold:
        yield f"counts: expected none below the threshold, {threshold}, found {least}"
