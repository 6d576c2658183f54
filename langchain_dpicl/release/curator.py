"""Opens the pool of private examples for a burnt ticket, draws one secret sample, and releases what was paid for.

The only module that opens pools. Every release comes this way: burn a ticket -> draw a secret sample -> render prompts
-> rows -> bounded sum -> noise -> something public.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl._opaque import Opaque, OpaqueRows, run_guarded, this_process
from langchain_dpicl.exceptions import LedgerError, ModelCallError, PrivacyBudgetError, PrivacyBudgetMismatchError
from langchain_dpicl.privacy._validate import NEEDS_DELTA, Adjacency, fail
from langchain_dpicl.privacy.accounting.events import Event
from langchain_dpicl.privacy.ledger.shares import Reservation
from langchain_dpicl.privacy.mechanisms.bounded import BoundedSum
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM, is_certified
from langchain_dpicl.privacy.mechanisms.release_plan import Release, ReleasePlan, Sample, Sampler
from langchain_dpicl.privacy.private_examples import Pool, PrivateExamples

if TYPE_CHECKING:
    from langchain_dpicl.backends.sync_async import Effect, EffectGenerator


NOT_COMPUTED = "the release could not be computed; its ticket stays burnt. Please report this."
NONE_LEFT = "sample: expected a release still paid for, found none left. Declare another component."

T = TypeVar("T")
S = TypeVar("S")
Record: TypeAlias = Mapping[str, str]
Rendered: TypeAlias = tuple[T | None, ...]
"""What each row is asked; None: the row could not be rendered and abstains."""
Renders: TypeAlias = Callable[..., Rendered[T]]
"""Renders the rows of a sample, or those that a function after the renderer picks out of it."""


@dataclass(frozen=True, slots=True, repr=False)
class SlotRenderers(Generic[T]):
    """Renders slots by public wordings in turn: of n wordings, slot i reads number i mod n.

    What a wording costs: nothing, as long as the place of a row depends on no other unit. A sampler of slots has a
    fixed, public number of rows and puts a unit into a slot by coins of its own; a slot that is over-full turns units
    away from itself alone, and an empty slot keeps its place. So the row of slot i is a function of the records in it
    and of i, which is public; a unit more, less or replaced still changes one row, and every sensitivity stands.

    The place of a unit row is the number of units drawn before it, and that of a retrieved row says who else took part:
    there one unit more would reword the rows behind it, all of which would move. They are refused.

    Formal guarantees:
      - Called with a place, as samplers of slots are, the wording depends on that place and on n alone.
      - Called without one, no records give the public question in the first wording; records are refused if n > 1.

    Args:
      by_wording: what renders records, or none, in each wording.
    """

    by_wording: tuple[Callable[[Sequence[Record]], T], ...]

    def __call__(self, records: Sequence[Record]) -> T:
        """Renders what has no public place: in the only wording, or no records in the first."""
        if records:
            check_one_wording(self)
        return self.by_wording[0](records)

    def at(self, slot: int) -> Callable[[Sequence[Record]], T]:
        """Returns what renders one slot, by its place among all slots of the sample, the empty ones included."""
        return self.by_wording[slot % len(self.by_wording)]

    def public(self) -> list[T]:
        """Returns what no records give, in each wording."""
        return [render(()) for render in self.by_wording]

    def then(self, change: Callable[[T], S]) -> SlotRenderers[S]:
        """Returns these renderers with a change to what they render."""

        def changed(render: Callable[[Sequence[Record]], T]) -> Callable[[Sequence[Record]], S]:
            return lambda records: change(render(records))

        return SlotRenderers(tuple([changed(render) for render in self.by_wording]))


def check_one_wording(render: Callable[[Sequence[Record]], Any], sampler: Sampler | None = None) -> None:
    """Refuses several wordings for rows whose place is not public; a sampler of slots takes them."""
    several = isinstance(render, SlotRenderers) and len(render.by_wording) > 1
    if several and (sampler is None or sampler.row_shape != "slots"):
        advice = "Give rows=Rows(slots=...), or no wordings."
        raise fail("wordings", "slots, whose places are public", "rows whose places depend on other units", advice)


class SecretSample(Opaque):
    """Up to `length` releases on one secret sample, of which `answers` may answer; shows nothing, refuses copies.

    Formal guarantees:
      - At most `length` releases, and at most `answers` that are not refusals of a test, whatever the interleaving of
        threads; none in a forked copy, and none after `close`.
      - What leaves is released by `plan.mechanism`; a row that fails is all zeros and no other row changes.
      - A release that was begun counts, also if it did not come to an end.

    Args:
      pool: the units, opened by the curator.
      plan: how to draw, add up and noise.
      length: releases; 0 for a partition whose releases are paid for one by one.
      answers: how many of them may answer; None: all.
    """

    def __init__(self, pool: Pool, plan: ReleasePlan, *, length: int = 1, answers: int | None = None) -> None:
        self.plan = plan
        self.left = length
        self.answers_left = length if answers is None else answers
        self._render: Renders[Any] | None = draw_sample(pool, plan)
        self._lock = threading.Lock()
        self._home = this_process()

    def next_release(
        self,
        *,
        rows: Callable[[Rendered[T]], Effect],
        render: Callable[[Sequence[Record]], T],
        width: int,
    ) -> EffectGenerator[Release]:
        """Makes one release (an effect generator).

        Args:
          rows: makes the one question to the engine; answered with `OpaqueRows` float64[rows, width].
          render: turns one row's records into what the engine is asked; no records give the public question.
          width: columns of a row, public.

        Raises:
          PrivacyBudgetError: nothing is left of what the ticket paid for.
          LedgerError: this is a forked copy.
          ConfigurationError: there are several wordings and the rows are no slots; no release was begun.
          ModelCallError: the release could not be computed.
        """
        check_one_wording(render, self.plan.sampler)
        render_rows = self._begin()
        ask = run_guarded(lambda: rows(render_rows(render)))  # a stop in there would show prompts
        if ask is None:
            raise ModelCallError(NOT_COMPUTED)
        boxed: OpaqueRows = yield ask
        self._check_home()  # a fork while the model was asked goes on in both processes; one of them releases
        released = run_guarded(
            lambda: self.plan.mechanism.release(sum_rows(boxed, self.plan, width), rng=SYSTEM_RANDOM)
        )
        if released is None:
            raise ModelCallError(NOT_COMPUTED)
        if is_unanswered(released):
            with self._lock:
                self.answers_left += 1
        return released

    def _begin(self) -> Renders[Any]:
        """Takes one release off what is left."""
        self._check_home()
        with self._lock:
            if self._render is None or min(self.left, self.answers_left) <= 0:
                raise PrivacyBudgetError(NONE_LEFT)
            if self.plan.sampler.is_batched or self.plan.test is not None:
                msg = (
                    "sample: expected a plan of one sample without a test for free releases, found another. Use blocks."
                )
                raise PrivacyBudgetError(msg)
            self.left -= 1
            self.answers_left -= 1
            return self._render

    def _check_home(self) -> None:
        if this_process() != self._home:
            raise LedgerError("sample: expected the process that drew it, found a fork. Reserve anew there.")

    def close(self) -> None:
        """Forgets the sample."""
        self._render = None


def sum_rows(boxed: OpaqueRows, plan: ReleasePlan, width: int, public: NDArray[np.float64] | None = None) -> BoundedSum:
    """Returns the bounded sum of rows float64[n, width], or of gradients summed already, taken out of their box."""
    with np.errstate(all="ignore"):
        if not plan.aggregation.needs_public:
            return plan.bound(boxed.take(), width=width)
        return plan.bound(boxed.take(), width=width, public=public)


def is_unanswered(released: Release) -> bool:
    """Returns whether a test refused and nothing else left."""
    return released.index is None and released.values is None and released.indices is None


def draw_sample(pool: Pool, plan: ReleasePlan) -> Renders[Any]:
    """Draws one secret sample; returns what renders its rows, stopping only for Ctrl-C."""
    # No names for positions or prompts: a stop would show them in the frames.
    render_rows = run_guarded(lambda: _renders(pool, plan))
    num_rows = (plan.sampler.num_slots if plan.sampler.is_batched else plan.sampler.num_rows) or 0

    def rendered(render: Callable[[Sequence[Record]], T], *part: Callable[[Sample], Sample]) -> Rendered[T]:
        found = render_rows and run_guarded(lambda: render_rows(render, *part))
        return found or (None,) * num_rows

    return rendered


def _renders(pool: Pool, plan: ReleasePlan) -> Renders[Any]:
    """Draws; the positions stay in what is returned."""
    sample = plan.sampler.draw(pool.num_units, rng=SYSTEM_RANDOM)
    shots = getattr(plan.sampler, "shots_per_slot", None)
    has_places = plan.sampler.row_shape == "slots"

    def rendered(place: int, row: Sequence[int], render: Callable[[Sequence[Record]], T]) -> T:
        records: list[Record] = []
        for unit in row:
            records += pool.records(unit)
        # The place is the slot's own: a unit row has none to give, and refuses several wordings.
        own = render.at(place) if has_places and isinstance(render, SlotRenderers) else render
        return own(records[:shots])

    def every(render: Callable[[Sequence[Record]], T], *part: Callable[[Sample], Sample]) -> Rendered[T]:
        rows = list(enumerate(part[0](sample) if part else sample))
        if isinstance(render, SlotRenderers) and len(render.by_wording) == 1:
            render = render.by_wording[0]  # the same for every place
        found = run_guarded(lambda: tuple([rendered(place, row, render) for place, row in rows]))
        if found is not None:
            return found
        return tuple(run_guarded(lambda place=place, row=row: rendered(place, row, render)) for place, row in rows)  # type: ignore[misc]

    return every


Render: TypeAlias = Callable[[Sequence[Record]], str]
"""Turns one row's records into its prompt; no records give the public prompt."""


def open_sample(
    private: PrivateExamples,
    reservation: Reservation,
    *,
    plan: ReleasePlan,
    length: int = 1,
    answers: int | None = None,
) -> SecretSample:
    """Burns one ticket and draws the secret sample on which it pays for `length` releases; errors as `open_block`.

    Formal guarantees:
      - As for `open_block`, together `plan.block_event(length, answers)`; the commit is the caller's, when all is safe.

    Args:
      private: the examples.
      reservation: the ticket.
      plan: how to draw, add up and noise.
      length: releases that the ticket pays for.
      answers: how many of them may answer; None: all. Only for a mechanism that tests before it answers.
    """
    pool = opened(private, reservation, plan.block_event(length, answers), plan.adjacency, gap=gap_of(plan))
    return SecretSample(pool, plan, length=length, answers=answers)


def release_once(
    private: PrivateExamples,
    reservation: Reservation,
    *,
    plan: ReleasePlan,
    rows: Callable[[Rendered[T]], Effect],
    render: Callable[[Sequence[Record]], T],
    width: int,
    keep: Callable[[Release], None] | None = None,
) -> EffectGenerator[Release]:
    """Burns one ticket and makes its one release, on a fresh secret sample (a generator); errors as `open_block`.

    Formal guarantees:
      - As for `open_block`: the ticket burns before any private record is read and is committed only after the noise;
        what leaves is released by `plan.mechanism` and is `plan.block_event(1)`; a row that fails is all zeros.

    Args:
      private: the examples.
      reservation: the ticket.
      plan: how to draw, add up and noise.
      rows: makes the one question to the engine; answered with `OpaqueRows` float64[rows, width].
      render: turns one row's records into what the engine is asked; no records give the public question.
      width: columns of a row, public.
      keep: makes what was released durable; called before the ticket is committed.
    """
    check_one_wording(render, plan.sampler)
    with contextlib.closing(open_sample(private, reservation, plan=plan)) as sample:
        released = yield from sample.next_release(rows=rows, render=render, width=width)
    if keep is not None:
        keep(released)
    reservation.commit()
    return released


_WIDE = 1024  # no mechanism has to choose more candidates than that from its sum


def gap_of(plan: ReleasePlan) -> float:
    """Returns the declared gap of one release of a plan: 0 only where every coin is drawn exactly."""
    return plan.implementation_delta(1, width=_WIDE)


def opened(private: PrivateExamples, ticket: Reservation, event: Event, adjacency: Adjacency, *, gap: float) -> Pool:
    """Burns a ticket that pays for `event`, and only then opens the pool that it may read."""
    check_ticket(private, ticket, event, adjacency, gap=gap)
    ticket.burn()
    return private._pool(ticket.label, ledger_id=ticket.ledger_id)  # noqa: SLF001  the private door


def opened_unread(private: PrivateExamples, *, ledger_id: str) -> Pool:
    """Opens all units for a caller that reads no record of them before another ticket burnt."""
    return private._pool(None, ledger_id=ledger_id)  # noqa: SLF001  the private door


def check_ticket(
    private: PrivateExamples, reservation: Reservation, event: Event, adjacency: Adjacency, *, gap: float
) -> None:
    """Refuses a ticket that does not pay for `event` under `adjacency` from these examples, before it burns.

    A share with delta 0 promises pure differential privacy: it pays for no release that is drawn with a gap, also where
    its tickets were declared by hand, without the gap.
    """
    if reservation.event != event:
        msg = "ticket: expected a ticket for this very block; found one for another event. Reserve from the plan."
        raise PrivacyBudgetError(msg)
    if reservation.partition not in {None, private.dataset_id} or reservation.adjacency != adjacency:
        wanted, found = (private.dataset_id, adjacency), (reservation.partition, reservation.adjacency)
        msg = f"ticket: expected a ticket for (data set, adjacency) {wanted}, found one for {found}."
        raise PrivacyBudgetMismatchError(msg)
    if gap > 0 and reservation.delta == 0:
        msg = f"ticket: expected one of a share with delta for coins with the declared gap {gap:.3g}, found delta 0."
        raise PrivacyBudgetError(f"{msg} {NEEDS_DELTA}")
    if reservation.blocks != private.blocks:
        wanted_blocks, found_blocks = private.blocks, reservation.blocks
        msg = f"ticket: expected a ticket for the blocks that are read, {wanted_blocks}, found one for {found_blocks}."
        raise PrivacyBudgetMismatchError(msg)
    if not is_certified(SYSTEM_RANDOM):
        raise PrivacyBudgetError("ticket: expected the operating system's coins, found another generator.")


def pool_without_privacy(private: PrivateExamples, label: str | None) -> Pool:
    """Opens a pool with no charge: only for examples that no ledger protects, and of no stream."""
    if private.blocks is not None:
        advice = "A run of DemonstrationSynthesizer pays for what it reads; or build PrivateExamples of public records."
        raise fail("private", "examples that are of no stream", type(private).__name__, advice)
    return private._pool(label, ledger_id=None)  # noqa: SLF001  the private door
