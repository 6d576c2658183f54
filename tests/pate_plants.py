"""Bugs to plant in the labelling of public inputs, for a test that must then see red. Each takes pytest's `monkeypatch`.

As those of `audit_plants`, they are pitfalls of published code: here of private teachers and their votes.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from langchain_dpicl.pate import labeler
from langchain_dpicl.pate.labeler import PromptPATELabeler
from langchain_dpicl.privacy.extensions import confident_gnmax as confident
from langchain_dpicl.privacy.extensions.confident_gnmax import ConfidentGNMaxMechanism
from langchain_dpicl.privacy.extensions.fixed_size_slots import PartitionedSlots
from langchain_dpicl.privacy.mechanisms import release_plan as plans
from langchain_dpicl.privacy.mechanisms.bounded import BoundedSum, ProbabilitySum, Sensitivity
from langchain_dpicl.privacy.mechanisms.randomness import SecureRandom
from langchain_dpicl.privacy.mechanisms.release_plan import (
    GaussianMechanism,
    PoissonSlots,
    PoissonUnits,
    Release,
    ReleasePlan,
)
from langchain_dpicl.release import curator
from langchain_dpicl.release import samples as dealt_sample
from tests.audit_plants import Plant, redrawn_until, same_sample
from tests.contracts.doubles import FixedDraws

Patch = pytest.MonkeyPatch

# --- noise ----------------------------------------------------------------------------------------------


def no_exponential_noise(patch: Patch) -> None:
    """Permute-and-flip without its coins."""
    patch.setattr(SecureRandom, "exponential", lambda self, n: np.zeros(n))


def _test_noise(patch: Patch, factor: float) -> None:
    real = confident._noisy

    def noisy(counts: Any, scale: float, rng: Any) -> Any:
        if counts.size > 1:
            return real(counts, scale, rng)
        return real(counts, scale * factor, rng) if factor else counts

    patch.setattr(confident, "_noisy", noisy)


def threshold_without_noise(patch: Patch) -> None:
    """The true largest count says whether there is an answer."""
    _test_noise(patch, 0.0)


def noise_of_the_test_scaled(factor: float) -> Plant:
    """The noise of the test alone has another scale."""
    return lambda patch: _test_noise(patch, factor)


def sigmas_swapped(patch: Patch) -> None:
    """The test has the noise of the answer, which has that of the test; charged is what was asked for."""
    real = ConfidentGNMaxMechanism.release

    def release(self: Any, total: BoundedSum, *, rng: SecureRandom) -> Release:
        noises = self.noise_multiplier, self.test_noise_multiplier
        swapped = dataclasses.replace(self, noise_multiplier=noises[1], test_noise_multiplier=noises[0])
        return dataclasses.replace(real(swapped, total, rng=rng), event=self.event)

    patch.setattr(ConfidentGNMaxMechanism, "release", release)


def sigmas_swapped_where_they_are_read(patch: Patch) -> None:
    """The columns of a table change places, as published; what runs is what is charged, but not what was asked for."""
    real = ConfidentGNMaxMechanism.of_votes

    def of_votes(cls: Any, *, sigma_threshold: float, sigma_votes: float, **named: Any) -> Any:
        return real(sigma_threshold=sigma_votes, sigma_votes=sigma_threshold, **named)

    patch.setattr(ConfidentGNMaxMechanism, "of_votes", classmethod(of_votes))


def one_draw_for_test_and_answer(patch: Patch) -> None:
    """The noise of the answer begins with that of its test."""
    real, kept = SecureRandom.gaussian_draws, [0.0]

    def draws(self: Any, n: int) -> Any:
        fresh = real(self, n).values
        kept[0], shared = (fresh[0], fresh) if n == 1 else (kept[0], np.array([kept[0], *fresh[1:]]))
        return FixedDraws(shared)

    patch.setattr(SecureRandom, "gaussian_draws", draws)


def used_for_two_inputs(patch: Patch) -> None:
    """Every second test, and every second answer, has the noise of the one before."""
    real, turns, kept = SecureRandom.gaussian_draws, Counter[int](), dict[int, Any]()

    def draws(self: Any, n: int) -> Any:
        if turns[n] % 2 == 0:
            kept[n] = real(self, n)
        turns[n] += 1
        return kept[n]

    patch.setattr(SecureRandom, "gaussian_draws", draws)


def moved_votes_of_length_one(patch: Patch) -> None:
    """The forgotten sqrt(2): a vote that changes is charged as one that appears."""
    one = Sensitivity(l2=1.0, range=1.0, linf=1.0)
    patch.setattr(ProbabilitySum, "sensitivity", lambda self, **_: one)


def half_a_vote(patch: Patch) -> None:
    """As if one unit moved the largest count by one half."""
    half = Sensitivity(l2=np.sqrt(2.0), range=2.0, linf=0.5)
    patch.setattr(ProbabilitySum, "sensitivity", lambda self, **_: half)


def threshold_on_the_true_histogram(patch: Patch) -> None:
    """Noisy votes leave, but the true ones say whether they suffice."""
    real, sums = GaussianMechanism.release, list[float]()

    def release(self: Any, total: BoundedSum, *, rng: SecureRandom) -> Release:
        sums[:] = [float(total.value.max())]
        return real(self, total, rng=rng)

    real_answer = PromptPATELabeler._answered

    def answered(self: Any, entry: Any, told: Release) -> Any:
        found = real_answer(self, entry, told)
        is_refused = sums[0] < self.plan.threshold
        label = None if is_refused else self.task.labels[int(np.argmax(told.values))]
        return dataclasses.replace(found, label=label, status="rejected" if is_refused else "labelled")

    patch.setattr(GaussianMechanism, "release", release)
    patch.setattr(PromptPATELabeler, "_answered", answered)


def absent_teachers_abstain(patch: Patch) -> None:
    """The candidate to abstain gets the votes of those of three declared units that are not there."""
    real = ReleasePlan.bound

    def bound(self: Any, rows: Any, *, width: int) -> BoundedSum:
        total = real(self, rows, width=width)
        value = total.value.copy()
        value[width:] += 3 - len(rows)
        return BoundedSum(value, total.sensitivity, total.row_shape, total.adjacency)

    patch.setattr(ReleasePlan, "bound", bound)


# --- charge ---------------------------------------------------------------------------------------------------------


def answer_given_back(patch: Patch) -> None:
    """The answer's ticket goes back although there was an answer."""
    patch.setattr(dealt_sample, "is_unanswered", lambda released: True)


class _Unburnt:
    def __init__(self, ticket: Any) -> None:
        self._ticket = ticket

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ticket, name)

    def burn(self) -> None:
        """Leaves it as it is."""

    commit = burn


def _test_paid_if(patch: Patch, is_paid: Callable[[Any], bool]) -> None:
    real = labeler.release_once

    def release(private: Any, test: Any, **named: Any) -> Any:
        released = yield from real(private, _Unburnt(test), **named)
        if is_paid(released):
            test.burn()
        return released

    patch.setattr(labeler, "release_once", release)


def rejected_for_free(patch: Patch) -> None:
    """A rejected input costs nothing: its test's ticket goes back, too."""
    _test_paid_if(patch, lambda released: not curator.is_unanswered(released))


def tests_free_where_answered(patch: Patch) -> None:
    """Only the answer is paid for, where there is one."""
    _test_paid_if(patch, curator.is_unanswered)


def never_burnt(patch: Patch) -> None:
    """Labels are given, and the tickets of inputs, or of tests, are given back."""
    real = labeler.release_once
    patch.setattr(labeler, "release_once", lambda private, ticket, **named: real(private, _Unburnt(ticket), **named))


def sample_charged_for_one_input(patch: Patch) -> None:
    """A sample that serves for many inputs costs as much as for one."""
    real = ReleasePlan.block_event
    patch.setattr(ReleasePlan, "block_event", lambda self, length, answers=None: real(self, 1))


def amplified_twice(patch: Patch) -> None:
    """The rate of the sample is counted for every input, and once more for the run."""

    def block_event(mechanism: Any, sampler: Any, length: int, answers: int | None) -> Any:
        inside = mechanism.repeated(length, answers)
        return dataclasses.replace(sampler, sampling_rate=sampler.sampling_rate**2).amplify(inside)

    patch.setattr(plans, "_block_event", block_event)


# --- teachers -------------------------------------------------------------------------------------------------------


def one_sample_for_all_inputs(patch: Patch) -> None:
    """The first sample teaches all the inputs, and is charged as a fresh one for each."""
    same_sample(patch, PoissonSlots, PoissonUnits)


def redrawn_inside_the_run(patch: Patch) -> None:
    """The one sample of a run is another for every input."""
    real = curator.draw_sample

    def drawn(pool: Any, plan: Any) -> Any:
        def every(render: Any) -> Any:
            return real(pool, plan)(render)

        return every

    patch.setattr(curator, "draw_sample", drawn)


def always_sampled(patch: Patch) -> None:
    """The sample is everybody."""
    patch.setattr(PoissonSlots, "draw", lambda self, n, *, rng: (tuple(range(n)), *((),) * (self.num_slots - 1)))
    patch.setattr(PoissonUnits, "draw", lambda self, n, *, rng: tuple((unit,) for unit in range(n)))


def redrawn_until_agreed(patch: Patch) -> None:
    """Draws and asks again, up to 64 times, until there are teachers and they agree."""
    redrawn_until(lambda matrix: len({int(row.argmax()) for row in matrix}) == 1, labeler)(patch)


def redrawn_until_all_voted(patch: Patch) -> None:
    """Draws and asks again, up to 64 times, until no teacher has failed."""
    redrawn_until(lambda matrix: bool(matrix.any(axis=1).all()), labeler)(patch)


def free_where_nobody_votes(patch: Patch) -> None:
    """An input about which every teacher fails costs nothing."""
    real_bound, real, sums = ReleasePlan.bound, labeler.release_once, list[float]()

    def bound(self: Any, rows: Any, *, width: int) -> BoundedSum:
        total = real_bound(self, rows, width=width)
        sums[:] = [float(total.value.max())]
        return total

    def release(private: Any, ticket: Any, **named: Any) -> Any:
        released = yield from real(private, _Unburnt(ticket), **named)
        if sums[0]:
            ticket.burn()
            ticket.commit()
        return released

    patch.setattr(ReleasePlan, "bound", bound)
    patch.setattr(labeler, "release_once", release)


def chosen_by_validation(patch: Patch) -> None:
    """Of the teachers only those stay that are right about the first record, which is held back."""
    real = curator._renders

    def renders(pool: Any, plan: Any) -> Any:
        every, held_back = real(pool, plan), pool.records(0)[0]["text"]

        def chosen(render: Any) -> Any:
            return tuple(row if row and f" {held_back}\n" in row[0] else None for row in every(render))

        return chosen

    patch.setattr(curator, "_renders", renders)


class _Reordered:
    """A pool in another order."""

    def __init__(self, pool: Any, order: list[int]) -> None:
        self.num_units, self._pool, self._order = pool.num_units, pool, order

    def records(self, unit: int) -> Any:
        return self._pool.records(self._order[unit])


def _in_chunks(self: Any, n: int, *, rng: Any) -> Any:
    """Deals units to one slot after the other."""
    starts = range(0, self.num_slots * self.shots_per_slot, self.shots_per_slot)
    return tuple(tuple(range(min(first, n), min(first + self.shots_per_slot, n))) for first in starts)


def _dealt(patch: Patch, order_of: Callable[[list[str]], list[int]]) -> None:
    real = curator._renders

    def renders(pool: Any, plan: Any) -> Any:
        texts = [pool.records(unit)[0]["text"] for unit in range(pool.num_units)]
        return real(_Reordered(pool, order_of(texts)), plan)

    patch.setattr(curator, "_renders", renders)
    for sampler in (PoissonSlots, PartitionedSlots):
        patch.setattr(sampler, "draw", _in_chunks)


def ordered_by_accuracy(patch: Patch) -> None:
    """The best records (the shortest, say) go to the first teacher and so on: one that changes moves all others."""
    _dealt(patch, lambda texts: sorted(range(len(texts)), key=lambda unit: len(texts[unit])))


def shuffled_by_fingerprint(patch: Patch) -> None:
    """The partition is shuffled with a seed that is made of the data."""

    def order_of(texts: list[str]) -> list[int]:
        digest = hashlib.sha256(f"1344{texts!r}".encode()).digest()
        seed = int.from_bytes(digest[:4], "big")
        return list(np.random.default_rng(seed).permutation(len(texts)).tolist())

    _dealt(patch, order_of)


def shuffled_with_a_seed(patch: Patch) -> None:
    """Slots are chunks of a seeded shuffle: everybody knows it, it never changes, and it is another for other sizes."""
    # Under 107 the order of eight and of seven units differ much.
    _dealt(patch, lambda texts: list(np.random.default_rng(107).permutation(len(texts)).tolist()))


def partition_with_replacement(patch: Patch) -> None:
    """A unit may stand in several rows of the partition, another in none."""

    def draw(self: Any, n: int, *, rng: Any) -> Any:
        return tuple((unit,) for unit in rng.integers(n, self.num_slots).tolist())

    patch.setattr(PartitionedSlots, "draw", draw)


# --- stopping -------------------------------------------------------------------------------------------------------


def stops_at_disagreement(patch: Patch) -> None:
    """A run ends after an input about which the teachers truly disagreed."""
    real_bound, real_label, sums = ReleasePlan.bound, PromptPATELabeler._label, list[float]()

    def bound(self: Any, rows: Any, *, width: int) -> BoundedSum:
        total = real_bound(self, rows, width=width)
        sums[:] = [float(np.ptp(total.value[:2]))]
        return total

    def label(self: Any, *given: Any) -> Any:
        if not sums or sums[0] >= 0.5:
            yield from real_label(self, *given)

    patch.setattr(ReleasePlan, "bound", bound)
    patch.setattr(PromptPATELabeler, "_label", label)


def goes_on_until_answered(patch: Patch) -> None:
    """Rejected inputs are asked about again, up to 8 times, on the same ticket."""
    real = curator.SecretSample.next_release

    def next_release(self: Any, **named: Any) -> Any:
        for _ in range(8):
            self.left = self.answers_left = 1
            released = yield from real(self, **named)
            if not curator.is_unanswered(released):
                break
        return released

    patch.setattr(curator.SecretSample, "next_release", next_release)
