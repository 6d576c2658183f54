"""Releases on a secret deal of disjoint batches, on a partition that stays, or on the units of a filter."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl._opaque import Opaque, OpaqueRows, PerProcess, run_guarded, this_process
from langchain_dpicl.backends.private_calls.call import OpaqueValue
from langchain_dpicl.backends.rows.neighbour_rows import Near, SimilarTexts, Texts
from langchain_dpicl.backends.sync_async import AcquireGate, Effect, EffectGenerator, FairSemaphore
from langchain_dpicl.exceptions import LedgerError, ModelCallError, PrivacyBudgetError, PrivacyBudgetMismatchError
from langchain_dpicl.privacy._validate import check_int
from langchain_dpicl.privacy.accounting.events import NoEvent
from langchain_dpicl.privacy.extensions.confident_gnmax import ConfidentGNMaxMechanism
from langchain_dpicl.privacy.extensions.fixed_size_slots import BalancedSlots, PartitionedSlots
from langchain_dpicl.privacy.extensions.individual_filter import QUERY_TEMPLATE, Balances, ParticipationPlan
from langchain_dpicl.privacy.extensions.random_allocation import AllocatedSlots
from langchain_dpicl.privacy.ledger.shares import Reservation
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM
from langchain_dpicl.privacy.mechanisms.release_plan import Release, ReleasePlan, Sample
from langchain_dpicl.privacy.private_examples import Pool, PrivateExamples
from langchain_dpicl.release import curator
from langchain_dpicl.release.curator import (
    NONE_LEFT,
    NOT_COMPUTED,
    Record,
    Rendered,
    SecretSample,
    check_one_wording,
    check_ticket,
    gap_of,
    is_unanswered,
    opened,
    opened_unread,
)
from langchain_dpicl.release.token_block import Choose, ReleaseBlock, index_release, public_side

if TYPE_CHECKING:
    from langchain_dpicl.privacy.extensions.sparse_vector import SparseVectorRuns


def open_deal(private: PrivateExamples, reservation: Reservation, *, plan: ReleasePlan, length: int) -> DealtSample:
    """Burns one ticket, whose commit is the caller's, and deals the units for `length` releases on each batch.

    Errors as `open_block`.
    """
    _dealing(plan)
    pool = opened(private, reservation, plan.block_event(length), plan.adjacency, gap=gap_of(plan))
    return DealtSample(pool, plan, length=length)


def _dealing(plan: ReleasePlan) -> AllocatedSlots:
    """Returns the plan's sampler, or refuses one whose draw is no deal."""
    if not isinstance(plan.sampler, AllocatedSlots):
        msg = "sample: expected a deal of batches, found one sample. Declare sampling='disjoint'."
        raise PrivacyBudgetError(msg)
    return plan.sampler


@dataclass(slots=True, repr=False, eq=False)
class _BatchAllowance:
    """What is still paid for on one batch of a deal.

    Attributes:
      left: releases; 0 while the batch is open.
      runs: of the plan's test, if it has one.
    """

    left: int
    runs: SparseVectorRuns | None


class DealtSample(SecretSample):
    """Up to `length` releases on each batch of one secret deal; shows nothing, refuses copies.

    Raises:
      PrivacyBudgetError: the plan does not deal batches.
    """

    def __init__(self, pool: Pool, plan: ReleasePlan, *, length: int) -> None:
        self._sampler = _dealing(plan)
        self._batches: dict[int, _BatchAllowance] = {}
        super().__init__(pool, plan, length=length)

    def _runs(self) -> SparseVectorRuns | None:
        return None if self.plan.test is None else self.plan.test.runs(self.plan)

    def num_left(self, index: int) -> int:
        """Returns how many releases on one batch of a deal may still begin; public, and 0 while it is open."""
        with self._lock:
            batch = self._batches.get(index)
            return 0 if self._render is None else self.left if batch is None else batch.left

    @contextlib.contextmanager
    def batch(
        self, index: int, *, render: Callable[[Sequence[Record]], str], choose: Choose, length: int, **options: Any
    ) -> Iterator[ReleaseBlock]:
        """Opens up to `length` releases on one batch of a deal; all of a batch together are the sample's length.

        A release that did not begin comes back when the block closes. A batch is open once at a time, and what its
        plan tests goes on in the next block where it stood.

        Args:
          index: which batch, public; the plan's sampler is `AllocatedSlots`.
          render: turns one row's records into its prompt; no records give the public prompt.
          choose: reads an index off a noised vector.
          length: releases.
          options: `backend` and `prefix`, as for `token_block.open_block`.

        Raises:
          PrivacyBudgetError: nothing is left of what the ticket paid for on this batch.
          LedgerError: this is a forked copy.
          ModelCallError: the block could not be opened.
        """
        sampler = self._sampler
        check_int("index", index, low=0, high=sampler.num_batches - 1)
        check_int("length", length, low=1)
        self._check_home()
        with self._lock:
            batch = self._batches.setdefault(index, _BatchAllowance(self.left, self._runs()))
            render_rows, had = self._render, batch.left
            if render_rows is None or had <= 0:
                raise PrivacyBudgetError(NONE_LEFT)
            batch.left = 0
        used, block = 0, None

        def part(sample: Sample) -> Sample:
            return sampler.batch(sample, index)

        try:
            options |= {"length": min(length, had), "runs": batch.runs}
            side = public_side(options["backend"], render, sampler.num_slots, options["length"])
            block = run_guarded(
                lambda: ReleaseBlock(render_rows(render, part), plan=self.plan, release=None, side=side, **options)
            )
            if block is None:  # a stop in there would show prompts, and was raised anew without them
                raise ModelCallError(NOT_COMPUTED)
            block.release = index_release(self.plan, choose)
            with contextlib.closing(block):
                yield block
        finally:
            if block is not None:
                used, block.left = options["length"] - block.left, 0
            with self._lock:
                batch.left = had - used


T = TypeVar("T")


class Partition(SecretSample):
    """The slots of one deal that stays, and the releases that tickets paid for on it, one by one."""

    def allow(self) -> None:
        """Adds one release that may answer; the curator calls it, once for every ticket that it burnt for it."""
        with self._lock:
            self.left += 1
            self.answers_left += 1


def open_partition(private: PrivateExamples, *, plan: ReleasePlan, ledger_id: str) -> Partition:
    """Deals the units into slots that stay; no record is read before a ticket burns for a release on them.

    Raises:
      PrivacyBudgetError: the sampler is another, whose draws are amplified and so have to be fresh.
    """
    if not isinstance(plan.sampler, PartitionedSlots):
        raise PrivacyBudgetError("partition: expected PartitionedSlots, found a sampler whose draws are amplified.")
    pool = opened_unread(private, ledger_id=ledger_id)
    return Partition(pool, plan, length=0)


def release_once(
    private: PrivateExamples,
    reservation: Reservation,
    *,
    plan: ReleasePlan,
    rows: Callable[[Rendered[T]], Effect],
    render: Callable[[Sequence[Record]], T],
    width: int,
    keep: Callable[[Release], None] | None = None,
    partition: Partition | None = None,
    answer: Reservation | None = None,
) -> EffectGenerator[Release]:
    """Is `curator.release_once`, also on a partition (an effect generator).

    Formal guarantees:
      - As for `curator.release_once`.
      - With `answer`, which is for a partition and a mechanism that tests before it answers, the ticket is the test's
        alone. The answer's goes back only after the noisy test said no; whatever else happens, both stay charged.

    Args:
      private: the examples.
      reservation: the ticket.
      plan: how to draw, add up and noise.
      rows: makes the one question to the engine; answered with `OpaqueRows` float64[rows, width].
      render: turns one row's records into what the engine is asked; no records give the public question.
      width: columns of a row, public.
      keep: makes what was released durable; called before the ticket is committed.
      partition: from `open_partition`, instead of a fresh sample.
      answer: ticket of the answer, where the test has one of its own.
    """
    if partition is None and answer is None:
        return (
            yield from curator.release_once(
                private, reservation, plan=plan, rows=rows, render=render, width=width, keep=keep
            )
        )
    held = _burn_partition_ticket(private, partition, reservation, answer, plan)
    released = yield from held.next_release(rows=rows, render=render, width=width)
    if keep is not None:
        keep(released)
    if answer is not None and is_unanswered(released):
        answer.give_back()
    elif answer is not None:
        answer.burn()
        answer.commit()
    reservation.commit()
    return released


def _burn_partition_ticket(
    private: PrivateExamples,
    partition: Partition | None,
    ticket: Reservation,
    answer: Reservation | None,
    plan: ReleasePlan,
) -> Partition:
    """Burns a ticket for one release on a partition, and checks the answer's where the test is paid for alone."""
    if partition is None or partition.plan != plan or not isinstance(plan.sampler, PartitionedSlots):
        raise PrivacyBudgetError("partition: expected one of this very plan; found another. Open it from the plan.")
    if answer is None:
        check_ticket(private, ticket, plan.block_event(1), plan.adjacency, gap=gap_of(plan))
    else:
        if not isinstance(plan.mechanism, ConfidentGNMaxMechanism) or answer.unburnt != 1:
            raise PrivacyBudgetError("ticket: expected a mechanism that tests, and one unburnt ticket for its answer.")
        check_ticket(private, ticket, plan.mechanism.test_event, plan.adjacency, gap=gap_of(plan))
        check_ticket(private, answer, plan.mechanism.answer_event, plan.adjacency, gap=gap_of(plan))
    ticket.burn()
    partition.allow()
    return partition


def check_fixed_size(private: PrivateExamples, plan: ReleasePlan, *, ledger_id: str) -> None:
    """Refuses a fixed-size sample of another number of units than declared, before anything is charged.

    Only under `replace_one`, where the number of units is public; every other plan is left unread.
    """
    if isinstance(plan.sampler, BalancedSlots | PartitionedSlots) and plan.adjacency == "replace_one":
        units = opened_unread(private, ledger_id=ledger_id).num_units
        plan.sampler.draw(units, rng=SYSTEM_RANDOM)


Seated: TypeAlias = list[tuple[int, Near]]
"""Position and near records of each unit that has a row."""


@dataclass(frozen=True, slots=True, eq=False)
class FilteredQuery:
    """One public query, and how it is asked.

    Attributes:
      direction: float64[dimension], from `SimilarTexts.request_public`.
      rows: makes the one question to the engine; answered with `OpaqueRows` float64[rows, width].
      render: turns the near records of one unit into what the engine is asked; no records: the public question.
      width: columns of a row, public.
    """

    direction: NDArray[np.float64]
    rows: Callable[[Rendered[Any]], Effect]
    render: Callable[[Sequence[Record]], Any]
    width: int

    def __post_init__(self) -> None:
        check_one_wording(self.render)  # who stands in which row depends on everybody who takes part


@dataclass(frozen=True, slots=True)
class FilterShare:
    """The component that pays for a filter, and so whose tickets its queries burn; public."""

    ledger_id: str
    component: str
    dataset_id: str

    def owns(self, ticket: Reservation) -> bool:
        """Returns whether a ticket is one of this component, on this ledger, for these examples."""
        whose = ticket.ledger_id, ticket.component
        return whose == (self.ledger_id, self.component) and ticket.partition in {None, self.dataset_id}

    def is_query_ticket(self, ticket: Reservation) -> bool:
        """Returns whether a ticket is one of a query under this filter."""
        return self.owns(ticket) and (ticket.template, ticket.event) == (QUERY_TEMPLATE, NoEvent())


class PoolTexts(Opaque):
    """The texts of the units of a pool, as they are compared with a query."""

    __slots__ = ("_field", "_holder")

    def __init__(self, pool: Pool, field: str) -> None:
        self._holder = pool
        self._field = field

    def __len__(self) -> int:
        return self._holder.num_units

    @property
    def version(self) -> int:
        """What a removal raises."""
        return self._holder.version

    def own(self, place: int) -> Texts:
        """Returns the texts of one unit; none, where they cannot be read."""
        found = run_guarded(lambda: tuple([record[self._field] for record in self._holder.records(place)]))
        return () if found is None else found


class FilteredSample(Opaque):
    """Answers any number of queries from the units that take part in each; shows nothing, refuses copies.

    Formal guarantees:
      - A unit takes part where one of its own texts reaches the public similarity to the query and it has a
        participation left: a function of that unit, public values and what was released.
      - Everybody who takes part is debited, together and durably where balances are, before the model is asked for
        anybody; the ledger holds that line before, too. Nothing gives a participation back: not a failure, not a stop,
        not that no row was left for it.
      - Queries are compared and debited one after the other, in the order in which they come.
      - A fork while anything is asked goes on in both processes; the child releases nothing.
      - Each release is `plan.release` of the rows of those who have one; a row that fails is all zeros, and a row of
        nobody, which is asked the public question, counts for nothing.
      - With slots the model is asked the same number of rows every time, with any units taking part or none.

    Args:
      pool: the units, opened by the curator.
      plan: how to add up and noise, and how often a unit may take part.
      texts: finds who is near.
      field: of the records, which is compared.
      balances: who has taken part how often.
      payer: who paid.
    """

    def __init__(
        self,
        pool: Pool,
        *,
        plan: ParticipationPlan,
        texts: SimilarTexts,
        field: str,
        balances: Balances,
        payer: FilterShare,
    ) -> None:
        self.plan = plan
        self._private = pool
        self._texts = texts
        self._units = PoolTexts(pool, field)
        self._balances = balances
        self._payer = payer
        self._gates = PerProcess(lambda: FairSemaphore(1))  # the turns of queries

    def release(
        self, question: FilteredQuery, ticket: Reservation, *, settled: Callable[[], int]
    ) -> EffectGenerator[Release]:
        """Makes one release (an effect generator).

        Args:
          question: the query, and how it is asked.
          ticket: the query's own, free and counted; burnt before a record is read, committed once the debits stand.
          settled: how many queries the ledger holds as committed; read before the debits are written.

        Raises:
          PrivacyBudgetError: the ticket is no query's, or another component's or ledger's.
          PrivacyBudgetMismatchError: the balances are another filter's by now.
          LedgerError: the debits, or the line that says so, could not be written; who was debited stays so. Or this is
            a forked copy, or the balances are older than the ledger.
          ModelCallError: the release could not be computed; who was debited stays so.
        """
        if not self._payer.is_query_ticket(ticket):
            msg = "ticket: expected a query's of this filter's ledger and component, found another. Reserve it."
            raise PrivacyBudgetError(msg)
        home = this_process()
        ticket.burn()
        kept = yield from self._debit_participants(question.direction, ticket, settled)
        try:
            ask = run_guarded(lambda: question.rows(self._render(question.render, kept)))
            if ask is None:
                raise ModelCallError(NOT_COMPUTED)
            answered: OpaqueRows = yield ask
            _check_home(home)  # a fork while the model was asked goes on in both processes; one of them releases
            released = run_guarded(lambda: self._released(answered, kept, question.width))
        finally:
            kept.forget()
        if released is None:
            raise ModelCallError(NOT_COMPUTED)
        return released

    def warm(self) -> EffectGenerator[None]:
        """Embeds every text that was not embedded yet (an effect generator); debits nobody and answers nothing.

        Raises:
          ModelCallError: it could not be begun.
        """
        gate = self._gates.here
        held = yield AcquireGate(gate)
        try:
            ask = run_guarded(lambda: self._texts.ask(self._units, None))
            if ask is None:
                raise ModelCallError(NOT_COMPUTED)
            yield ask
        finally:
            if held:
                gate.__exit__(None, None, None)

    def _debit_participants(
        self, direction: NDArray[np.float64], ticket: Reservation, settled: Callable[[], int]
    ) -> EffectGenerator[_ParticipantRows]:
        """Finds whose texts are near, debits who takes part and tells the ledger; one query at a time (a generator).

        The first embeds every text once. Debits come in the order of the queries: how long a comparison takes, which
        depends on the texts, never decides which of two a unit's last participation goes to.
        """
        home, gate = this_process(), self._gates.here
        held = yield AcquireGate(gate)
        try:
            ask = run_guarded(lambda: self._texts.ask(self._units, direction))
            if ask is None:
                raise ModelCallError(NOT_COMPUTED)
            near: OpaqueRows = yield ask
            _check_home(home)
            known = settled()
            seated, refused = _refusable(lambda: OpaqueRows(self._assign_rows(near, known)))
            if refused is not None:
                raise refused
            if seated is None:
                raise ModelCallError(NOT_COMPUTED)
            ticket.commit(wait=self._balances.durable)  # where others read the count of the lines
            self._balances.confirm(settled())
            return _ParticipantRows(seated)
        finally:
            if held:
                gate.__exit__(None, None, None)

    def _assign_rows(self, near: OpaqueRows, settled: int) -> Seated:
        """Debits the units that take part, and returns those that have a row."""
        found = near.take()
        # A unit that was removed while the model was asked has no name.
        present = [unit for unit in found.items() if self._private.name(unit[0])]
        has_one = self._balances.debit([self._private.name(place) for place, _ in present], settled)
        let_in = [unit for unit, left in zip(present, has_one, strict=True) if left]
        return self.plan.seats(let_in, rng=SYSTEM_RANDOM)

    def _render(self, render: Callable[[Sequence[Record]], T], kept: _ParticipantRows) -> Rendered[T]:
        """Returns what each row is asked: those of units, then the public question for the rows of nobody."""
        own = tuple(run_guarded(lambda unit=unit: self._render_unit(render, *unit)) for unit in kept.row_units)  # type: ignore[misc]
        empty = 0 if self.plan.num_slots is None else self.plan.num_slots - len(own)
        return (*own, *(render(()) for _ in range(empty)))

    def _render_unit(self, render: Callable[[Sequence[Record]], T], place: int, near: Near) -> T:
        records = self._private.records(place)
        return render([records[number] for number in near])

    def _released(self, answered: OpaqueRows, kept: _ParticipantRows, width: int) -> Release:
        """Adds up the rows of those who have one, and adds the noise; a row of nobody counts for nothing."""
        with np.errstate(all="ignore"):
            return self.plan.release(answered.take()[: len(kept.row_units)], width=width, rng=SYSTEM_RANDOM)


class _ParticipantRows(Opaque):
    """The units that have a row, on the way from the debits to the sum; shown never, and forgotten at the end."""

    __slots__ = ("_seated",)

    def __init__(self, seated: OpaqueRows) -> None:
        self._seated: OpaqueValue[Seated] = OpaqueValue(seated.take())

    @property
    def row_units(self) -> Seated:
        """The units that have a row; never bound to a name outside of `run_guarded`."""
        return self._seated.reveal()

    def forget(self) -> None:
        """Drops them."""
        self._seated = OpaqueValue([])


def _check_home(home: tuple[int, int]) -> None:
    if this_process() != home:
        raise LedgerError("filter: expected the process that began the query, found a fork. Ask anew there.")


_Refused: TypeAlias = LedgerError | PrivacyBudgetMismatchError


def _refusable(action: Callable[[], OpaqueRows]) -> tuple[OpaqueRows | None, _Refused | None]:
    """Like `run_guarded`; a refusal of the balances is built anew, as the one raised holds private frames."""
    refused: list[_Refused] = []

    def acted() -> OpaqueRows | None:
        try:
            return action()
        except (LedgerError, PrivacyBudgetMismatchError) as error:
            refused.append(type(error)(str(error)))
        return None

    return run_guarded(acted), (refused[0] if refused else None)


def open_participants(
    private: PrivateExamples,
    ticket: Reservation | None,
    *,
    plan: ParticipationPlan,
    texts: SimilarTexts,
    balances: Balances,
    payer: FilterShare,
) -> FilteredSample:
    """Burns the one ticket of an individual filter and opens it; errors as `open_block`, the commit is the caller's.

    Formal guarantees:
      - The ticket pays for `plan.event`, all releases under these balances; no record is read before it is burnt.
      - Without a ticket it is opened only on balances that outlive the process and that its caller held against the
        ledger: the line that paid for them stands there.
    """
    if ticket is None and not balances.durable:
        raise PrivacyBudgetError("ticket: expected one for balances of this process, found none. Reserve it.")
    if payer.dataset_id != private.dataset_id or (ticket is not None and not payer.owns(ticket)):
        raise PrivacyBudgetError("ticket: expected one of the filter's own component and examples, found another's.")
    if ticket is None:
        pool = opened_unread(private, ledger_id=payer.ledger_id)
    else:
        pool = opened(private, ticket, plan.event, plan.adjacency, gap=plan.implementation_delta(1, width=1))
    return FilteredSample(pool, plan=plan, texts=texts, field=private.text_key, balances=balances, payer=payer)
