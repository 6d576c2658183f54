"""Compares a price with other computations, which start from the event again.

One walk over the event finds the terms and failures of the costliest place anew; what the first reading
(`normal_form.worlds`) has lost shows as another price. Then other accountants are asked about the terms found.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache

from langchain_dpicl.exceptions import AccountantsDisagreeError
from langchain_dpicl.privacy._validate import Adjacency
from langchain_dpicl.privacy.accounting import bounds as engine
from langchain_dpicl.privacy.accounting.bounds import Price, price_of
from langchain_dpicl.privacy.accounting.epsilon import Opinion
from langchain_dpicl.privacy.accounting.events import (
    ComposedEvent,
    Event,
    FailureEvent,
    ParallelEvent,
    RepeatedEvent,
    SubsampledEvent,
)
from langchain_dpicl.privacy.accounting.normal_form import Terms, UnitTerms, normal_form
from langchain_dpicl.privacy.accounting.pld_grid import CurveBound, GridBound
from langchain_dpicl.privacy.extensions.random_allocation import AllocatedEvent, DealStep
from langchain_dpicl.privacy.ledger.amounts import exact, round_up
from langchain_dpicl.privacy.second_opinions import accountants


@lru_cache(maxsize=256)
def second_opinions(
    event: Event, price: Price, *, delta: float, adjacency: Adjacency
) -> tuple[tuple[Opinion, ...], tuple[str, ...]]:
    """Returns what other computations say about a finite price, and which were not asked, with the reason.

    Raises:
      AccountantsDisagreeError: one of them says something else.
    """
    again = _recompute_price(event, price, delta=delta, adjacency=adjacency)
    if again.world.terms.is_empty:
        return (), ()
    if price.epsilon == 0.0:
        return (), ("all: epsilon is 0 at this delta",)
    if delta == 0.0:
        return (), ("all: at delta 0 the price is a sum",)
    answers = list(_ask_all(again, adjacency=adjacency))
    heard = tuple(answer for answer in answers if isinstance(answer, Opinion))
    return heard, tuple(answer for answer in answers if isinstance(answer, str))


def _recompute_price(event: Event, price: Price, *, delta: float, adjacency: Adjacency) -> Price:
    """The price of the costliest place, whose terms and failures are read from the event once more."""
    for in_parallel in (True,) if adjacency == "replace_one" else (False, True):  # as `readings` has them
        world = second_reading(event, price.world.labels, in_parallel=in_parallel)
        again = price_of(world, delta, adjacency, is_coarse=False)
        if math.isclose(again.epsilon, price.epsilon, rel_tol=1e-9):
            return again
    raise AccountantsDisagreeError(
        f"epsilon: the engine's bound is {price.epsilon:.6g}, a second reading of the event makes it "
        f"{again.epsilon:.6g}. No price is given; please report the event."
    )


def _ask_all(price: Price, *, adjacency: Adjacency) -> Iterator[Opinion | str]:
    """prv-accountant where it has a theorem and is sound; else our own transform; an attack where we know one."""
    terms, delta = price.world.terms, price.delta
    parts = accountants.prv_parts(terms, adjacency)
    if parts is not None:
        answer = accountants.prv_opinion(parts, delta=delta, price=price.removed)
        yield _agreeing(answer, price.removed, price.error)
        if isinstance(answer, Opinion):
            return
    else:
        yield "prv-accountant: no theorem for these steps, or unsound on them"
    if terms.ranges and terms == Terms(ranges=terms.ranges):
        yield _agreeing(accountants.attack_opinion(terms.ranges, delta=delta), price.epsilon, 0.0)
    yield from _allocation_opinions(terms, delta=delta, adjacency=adjacency)
    yield _own_transform(price, adjacency=adjacency)


def _allocation_opinions(terms: Terms, *, delta: float, adjacency: Adjacency) -> Iterator[Opinion | str]:
    """Recomputes every deal by itself, in both orders; what one of them costs, all together cost."""
    for step, _ in terms.others:
        if not isinstance(step, DealStep):
            continue
        batch = engine.single_profile(step.base, adjacency)
        is_all = terms == Terms(others=((step, 1),))
        for is_added, value in enumerate(CurveBound("random allocation", step.profile(adjacency)).epsilons(delta)):
            answer = accountants.allocation_opinion(
                batch, step.num_batches, step.rate, delta=delta, is_added=bool(is_added)
            )
            answer = _agreeing(answer, value, 0.0)
            if isinstance(answer, Opinion):
                answer = Opinion(answer.name, answer.lower, answer.upper if is_all else math.inf)
            yield answer


def _own_transform(price: Price, *, adjacency: Adjacency) -> Opinion | str:
    """Recomputes the composed bound; where another bound won, the interval says so by reaching below it."""
    steps, delta = engine.steps(price.world.terms, adjacency), price.delta
    if price.added > price.removed:
        steps = tuple((profile.reversed(), count) for profile, count in steps)
    found = engine.bounds(price.world.terms, adjacency, is_coarse=False)
    composed = next((bound for bound in found if isinstance(bound, GridBound)), None)
    value, error = price.epsilon, price.error
    if composed is not None:
        value, error = max(composed.epsilons(delta)), composed.error(delta)
    if not math.isfinite(value):
        return "independent FFT: delta is below what a transform resolves"
    answer = accountants.fft_opinion(steps, delta=delta, price=value)
    answer = _agreeing(answer, value, error)
    if isinstance(answer, Opinion) and answer.lower > price.epsilon:
        return Opinion(answer.name, 0.0, answer.upper)
    return answer


def _agreeing(answer: Opinion | str, value: float, error: float) -> Opinion | str:
    """Passes an answer on, or refuses: the price must lie above its lower end and reach down to its upper end."""
    if isinstance(answer, str) or (
        answer.lower <= value * (1.0 + 1e-9) + 1e-9 and value * 0.99 - error - 1e-6 <= answer.upper
    ):
        return answer
    raise AccountantsDisagreeError(
        f"epsilon: the engine's bound is {value:.6g} (error at most {error:.2g}), {answer.name} says "
        f"[{answer.lower:.6g}, {answer.upper:.6g}]. No price is given; please report the event."
    )


# --- reading the event again --------------------------------------------------------------------------------------

_Labels = tuple[tuple[str, tuple[str, ...]], ...]


def second_reading(event: Event, labels: _Labels, *, in_parallel: bool) -> UnitTerms:
    """Returns what an event does to a unit of the given labels.

    Args:
      event: what was, or will be, released.
      labels: the labels of the unit by partition; their branches compose.
      in_parallel: whether a secret deal is read as one of its batches.

    Raises:
      UnknownEventError: the event has no price.
    """
    parts = list(_parts(event, labels, 1, in_parallel=in_parallel))
    failures = [exact(part.delta) * count for part, count in parts if isinstance(part, FailureEvent)]
    rest = tuple(RepeatedEvent(part, count) for part, count in parts if not isinstance(part, FailureEvent))
    return UnitTerms(normal_form(ComposedEvent(rest)), round_up(sum(failures, Fraction(0))), labels)


def _parts(event: Event, labels: _Labels, count: int, *, in_parallel: bool) -> Iterator[tuple[Event, int]]:
    """Yields what the event consists of, and how often: single releases, samples and deals."""
    match event:
        case RepeatedEvent():
            yield from _parts(event.event, labels, count * event.count, in_parallel=in_parallel)
        case ComposedEvent():
            for part in event.events:
                yield from _parts(part, labels, count, in_parallel=in_parallel)
        case ParallelEvent():
            held = dict(labels).get(event.partition, ())
            for label, branch in event.branches:
                if label in held:
                    yield from _parts(branch, labels, count, in_parallel=in_parallel)
        case AllocatedEvent() if in_parallel or event.num_batches == 1:
            yield from _parts(event.bounded_by, labels, count, in_parallel=in_parallel)
        case SubsampledEvent(sampling_rate=1):
            yield from _parts(event.event, labels, count, in_parallel=in_parallel)
        case SubsampledEvent() | AllocatedEvent():
            inside = _parts(event.event, labels, 1, in_parallel=in_parallel)
            block = ComposedEvent(tuple(RepeatedEvent(part, times) for part, times in inside))
            yield dataclasses.replace(event, event=block), count
        case _:
            yield event, count
