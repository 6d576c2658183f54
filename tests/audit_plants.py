"""Bugs to plant in the package, for a test that must then see red. Each takes pytest's `monkeypatch`.

Every one of them has been made by somebody: they are the pitfalls of published code for private in-context learning.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import pytest

from langchain_dpicl import voting
from langchain_dpicl.privacy.accounting import epsilon as accounting
from langchain_dpicl.privacy.accounting.events import BoundedRangeEvent, Event, SubsampledEvent
from langchain_dpicl.privacy.extensions import label_places as _terms
from langchain_dpicl.privacy.extensions.word_release import WordRelease
from langchain_dpicl.privacy.mechanisms import bounded as aggregation
from langchain_dpicl.privacy.mechanisms import release_plan
from langchain_dpicl.privacy.mechanisms import release_plan as mechanisms
from langchain_dpicl.privacy.mechanisms.bounded import BoundedSum, ProbabilitySum, Sensitivity
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM, SecureRandom
from langchain_dpicl.privacy.mechanisms.release_plan import (
    GumbelMechanism,
    PoissonSlots,
    PoissonUnits,
    Release,
    ReleasePlan,
    assign,
)
from langchain_dpicl.release import curator, token_block
from langchain_dpicl.runs.answer_memo import TenantRegistry
from tests.contracts.doubles import FixedDraws

Patch: TypeAlias = pytest.MonkeyPatch
Plant: TypeAlias = Callable[[Patch], None]


def seen_in_two(look: Callable[[], object]) -> bool:
    """Whether one of two looks finds something: what one misses with a chance of 1e-3, both miss with one of 1e-6."""
    return bool(look() or look())


# --- noise ----------------------------------------------------------------------------------------------------------


def sensitivity_of_one(patch: Patch) -> None:
    """A vote that changes is charged as one that appears: sigma / sqrt(2)."""
    patch.setattr(ProbabilitySum, "sensitivity", lambda self, **_: Sensitivity(l2=1.0, range=1.0))


def replaced_charged_as_added(patch: Patch) -> None:
    patch.setattr(aggregation, "row_appears", lambda row_shape, adjacency: row_shape == "units")


def scaled(factor: float) -> Plant:
    """All noise has another scale."""
    return lambda patch: patch.setattr(mechanisms, "ROUND_UP", factor)


def gumbel(change: Callable[[np.ndarray], np.ndarray]) -> Plant:
    """Other Gumbel noise, made of the right one."""
    real = SecureRandom.gumbel
    return lambda patch: patch.setattr(SecureRandom, "gumbel", lambda self, n: change(real(self, n)))


def gaussian(change: Callable[[np.ndarray], np.ndarray]) -> Plant:
    """Other Gaussian noise, made of the right one."""
    real = SecureRandom.gaussian_draws
    return lambda patch: patch.setattr(
        SecureRandom, "gaussian_draws", lambda self, n: FixedDraws(change(real(self, n).values))
    )


def used_twice(change_noise: Callable[[Callable[[np.ndarray], np.ndarray]], Plant]) -> Plant:
    """Every second query has the noise of the one before."""
    turns, kept = itertools.count(), []

    def again(fresh: np.ndarray) -> np.ndarray:
        if next(turns) % 2 == 0:
            kept[:] = [fresh]
        return kept[0]

    return change_noise(again)


def drifting(change_noise: Callable[[Callable[[np.ndarray], np.ndarray]], Plant]) -> Plant:
    """The noise of a query leans on that of the one before; its law is right."""
    kept = []

    def lean(fresh: np.ndarray) -> np.ndarray:
        kept[:] = [0.8 * kept[0] + 0.6 * fresh if kept else fresh]
        return kept[0]

    return change_noise(lean)


def seeded_once(patch: Patch) -> None:
    """All coins come from a generator with a fixed seed."""
    seeded = np.random.default_rng(0)
    patch.setattr(SecureRandom, "entropy", lambda self, num_bytes: seeded.bytes(num_bytes))


def seeded_per_query(patch: Patch) -> None:
    """The same query gets the same coins."""
    real = voting.release_once

    def release_once(*given: Any, **named: Any) -> Any:
        seeded = np.random.default_rng(0)
        patch.setattr(SecureRandom, "entropy", lambda self, num_bytes: seeded.bytes(num_bytes))
        return (yield from real(*given, **named))

    patch.setattr(voting, "release_once", release_once)


def off_the_grid(patch: Patch) -> None:
    """Scores leave as floats, whose last digits tell the sum."""
    patch.setattr(mechanisms, "rounded", lambda value, draws, scale, step: value + scale * draws.values)


# --- charge ---------------------------------------------------------------------------------------------------------


def half_charged(patch: Patch) -> None:
    # Events of blocks are cached for each mechanism: those of sound code must not stand for these, nor these for those.
    patch.setattr(release_plan, "_block_event", release_plan._block_event.__wrapped__)
    patch.setattr(GumbelMechanism, "event", property(lambda self: BoundedRangeEvent(0.5 / self.noise_multiplier)))


def majority_of_three(patch: Patch) -> None:
    """Three draws on one ticket, for a steadier answer."""
    real = GumbelMechanism.release

    def release(self: Any, total: BoundedSum, *, rng: Any) -> Release:
        found = [real(self, total, rng=rng) for _ in range(3)]
        return sorted(found, key=lambda one: one.index)[1]

    patch.setattr(GumbelMechanism, "release", release)


def never_burnt(patch: Patch) -> None:
    """Answers are given and tickets are given back."""
    real = voting.release_once

    class Unburnt:
        def __init__(self, ticket: Any) -> None:
            self._ticket = ticket

        def __getattr__(self, name: str) -> Any:
            return getattr(self._ticket, name)

        def burn(self) -> None:
            pass

        def commit(self) -> None:
            pass

    patch.setattr(voting, "release_once", lambda private, ticket, **named: real(private, Unburnt(ticket), **named))


def failures_forgotten(patch: Patch) -> None:
    """Where an event has several worlds, they are priced without their failures, at the whole delta."""
    real = accounting._price_in

    def price_in(event: Event, delta: float, adjacency: Any, *, is_coarse: bool) -> Any:
        found = accounting.unit_terms(event, adjacency)
        if is_coarse or len(found) == 1:
            return real(event, delta, adjacency, is_coarse=is_coarse)
        bare = [dataclasses.replace(world, failure=0.0) for world in found]
        prices = [accounting.price_of(world, delta, adjacency, is_coarse=False) for world in bare]
        return max(prices, key=lambda price: price.epsilon)

    patch.setattr(accounting, "_price_in", price_in)
    patch.setattr(accounting, "_cached_price", functools.lru_cache(accounting._cached_price.__wrapped__))


def sampled_labels_kept(patch: Patch) -> None:
    """No label is dropped for one that reads everybody: a rate of 1 beside smaller ones leaves several worlds."""

    def dominates_sample(large: Event, small: SubsampledEvent) -> bool:
        is_wider = isinstance(large, SubsampledEvent) and large.sampling_rate >= small.sampling_rate
        return is_wider and _terms.dominates(large.event, small.event)

    patch.setattr(_terms, "_dominates_sample", dominates_sample)


# --- rows -----------------------------------------------------------------------------------------------------------


def more_slots_than_declared(patch: Patch) -> None:
    real = curator._renders

    def twice(pool: Any, plan: Any) -> Any:
        every = real(pool, plan)
        return lambda render: every(render) * 2

    patch.setattr(curator, "_renders", twice)


def votes_over_realised_rows(patch: Patch) -> None:
    """Votes are scaled to the declared three rows, by the secret number that there were."""
    real = ReleasePlan.bound

    def shares(self: Any, rows: Any, *, width: int) -> BoundedSum:
        total = real(self, rows, width=width)
        value = total.value.copy()
        value[:width] *= 3.0 / max(1, len(rows))
        return BoundedSum(value, total.sensitivity, total.row_shape, total.adjacency)

    patch.setattr(ReleasePlan, "bound", shares)


def overlapping_slots(patch: Patch) -> None:
    patch.setattr(PoissonSlots, "draw", lambda self, n, *, rng: (tuple(range(n)),) * self.num_slots)


def unit_drawn_with_replacement(patch: Patch) -> None:
    """A unit may stand in several rows."""
    real = PoissonUnits.draw
    patch.setattr(PoissonUnits, "draw", lambda self, n, *, rng: real(self, n, rng=rng) * 2)


def slots_in_order(patch: Patch) -> None:
    """Slots are filled one after the other: a unit that goes moves all behind it."""

    def draw(self: Any, n: int, *, rng: Any) -> Any:
        places = [unit // self.shots_per_slot % self.num_slots for unit in range(n)]
        return assign(range(n), places, num_slots=self.num_slots, shots_per_slot=self.shots_per_slot)

    patch.setattr(PoissonSlots, "draw", draw)


def redrawn_until(valid: Callable[[np.ndarray], bool], module: Any = voting) -> Plant:
    """Draws and asks again, up to 64 times, until the rows please."""

    def release_once(
        private: Any, ticket: Any, *, plan: Any, rows: Any, render: Any, width: int, keep: Any, **_: Any
    ) -> Any:
        ticket.burn()
        pool = private._pool(None, ledger_id=ticket.ledger_id)
        for _ in range(64):
            matrix = (yield rows(curator.draw_sample(pool, plan)(render))).take()
            if valid(matrix):
                break
        released = plan.mechanism.release(plan.bound(matrix, width=width), rng=SYSTEM_RANDOM)
        keep(released)
        ticket.commit()
        return released

    return lambda patch: patch.setattr(module, "release_once", release_once)


def not_empty(matrix: np.ndarray) -> bool:
    return len(matrix) > 0


def unanimous(matrix: np.ndarray) -> bool:
    return len({int(row.argmax()) for row in matrix}) == 1


def none_failed(matrix: np.ndarray) -> bool:
    return bool(matrix.any(axis=1).all())


def always_sampled(patch: Patch) -> None:
    """The sample is everybody, charged as a sample."""
    patch.setattr(PoissonUnits, "draw", lambda self, n, *, rng: tuple((unit,) for unit in range(n)))


def same_sample(patch: Patch, *samplers: type[Any]) -> None:
    """The first sample of each kind is all of them."""

    def keep(sampler: Any) -> None:
        real, drawn = sampler.draw, list[Any]()

        def draw(self: Any, n: int, *, rng: Any) -> Any:
            drawn.append(drawn[0] if drawn else real(self, n, rng=rng))
            return drawn[0]

        patch.setattr(sampler, "draw", draw)

    for sampler in samplers:
        keep(sampler)


def one_sample_for_all_queries(patch: Patch) -> None:
    same_sample(patch, PoissonUnits)


def at_the_start_of_texts(patch: Patch, start: Callable[..., object]) -> None:
    """Calls `start` with the pool and the plan of every block that begins a text."""
    real = token_block.block_on

    def block_on(pool: Any, plan: Any, render: Any, *, prefix: Any, **options: Any) -> Any:
        if not prefix:
            start(pool, plan)
        return real(pool, plan, render, prefix=prefix, **options)

    patch.setattr(token_block, "block_on", block_on)


def one_sample_per_text(patch: Patch) -> None:
    """Blocks read the sample that their text began with, as a cache of its prompts would have it."""
    fresh, kept = token_block.draw_sample, list[Any]()

    def start(pool: Any, plan: Any) -> None:
        kept[:] = [fresh(pool, plan)]

    at_the_start_of_texts(patch, start)
    patch.setattr(token_block, "draw_sample", lambda pool, plan: kept[0])


def one_sample_for_the_same_start(patch: Patch) -> None:
    """Every text begins with the sample of the first one, as a cache by what is written so far would have it."""
    fresh, kept, started = token_block.draw_sample, list[Any](), list[bool]()
    at_the_start_of_texts(patch, lambda pool, plan: started.append(True))

    def draw_sample(pool: Any, plan: Any) -> Any:
        drawn = fresh(pool, plan)
        kept.append(drawn)
        return kept[0] if started and started.pop() else drawn

    patch.setattr(token_block, "draw_sample", draw_sample)


def one_noise_per_text(patch: Patch) -> None:
    """Tokens have the noise of the first token of their text that had as many candidates."""
    kept: dict[int, np.ndarray] = {}
    at_the_start_of_texts(patch, lambda pool, plan: kept.clear())
    gumbel(lambda fresh: kept.setdefault(fresh.size, fresh))(patch)


# --- what is made of the sum ----------------------------------------------------------------------------------------


def threshold_on_true_votes(patch: Patch) -> None:
    """Abstains without noise."""
    real = GumbelMechanism.release

    def release(self: Any, total: BoundedSum, *, rng: Any) -> Release:
        if total.value[:-1].max() < total.value[-1]:
            return Release(index=len(total.value) - 1, values=None, event=self.event)
        return real(self, total, rng=rng)

    patch.setattr(GumbelMechanism, "release", release)


def only_seen_labels(patch: Patch) -> None:
    """Only labels that somebody voted for can win."""
    real = GumbelMechanism.release

    def release(self: Any, total: BoundedSum, *, rng: Any) -> Release:
        seen = np.where(total.value > 0, total.value, -1e6)
        return real(self, BoundedSum(seen, total.sensitivity, total.row_shape, total.adjacency), rng=rng)

    patch.setattr(GumbelMechanism, "release", release)


def label_of_the_true_votes(patch: Patch) -> None:
    """Scores are noisy, the label beside them is not theirs."""
    real = voting.DPVotingRunnable._released

    def released(self: Any, *given: Any) -> Any:
        place, votes = yield from real(self, *given)
        return 0 if place is not None else None, votes

    patch.setattr(voting.DPVotingRunnable, "_released", released)


def memo_for_everybody(patch: Patch) -> None:
    """What one tenant got, all get."""
    recall, remember, one = TenantRegistry.recall, TenantRegistry.remember, TenantRegistry().of({})
    patch.setattr(TenantRegistry, "recall", lambda self, tenant, key: recall(self, one, key))
    patch.setattr(TenantRegistry, "remember", lambda self, tenant, key, told: remember(self, one, key, told))


# --- words -------------------------------------------------------------------------------------------------------------


def number_of_words_is_logged(patch: Patch) -> None:
    """How many distinct words there are is private; a log line of it differs between neighbours."""
    real = WordRelease.weights

    def weights(self: Any, *given: Any, **named: Any) -> Any:
        made = real(self, *given, **named)
        logging.getLogger("langchain_dpicl").warning("%d candidates", len(made))
        return made

    patch.setattr(WordRelease, "weights", weights)
