"""The units of one individual filter: who takes part in a query, who was debited, and one noisy sum of their rows.

Knows tickets and balances; no wording, no price and no LangChain. Only the curator makes them: it has burnt the
filter's ticket and opened the pool before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, SupportsIndex, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.backends.calls import Gate
from langchain_dpicl.backends.rows import Boxed, guarded
from langchain_dpicl.backends.similar import Near, SimilarTexts, Texts
from langchain_dpicl.backends.walk import Ask, Turn, Walk
from langchain_dpicl.blocks import NOT_COMPUTED
from langchain_dpicl.exceptions import LedgerError, ModelCallError, PrivacyBudgetError
from langchain_dpicl.privacy.events import NoEvent
from langchain_dpicl.privacy.examples import Pool
from langchain_dpicl.privacy.mechanisms import Release
from langchain_dpicl.privacy.participation import Balances, ParticipationPlan
from langchain_dpicl.privacy.randomness import SYSTEM_RANDOM
from langchain_dpicl.privacy.shares import Reservation
from langchain_dpicl.samples import Record, Rendered

T = TypeVar("T")
Seated: TypeAlias = list[tuple[int, Near]]
"""Position and near records of each unit that has a row."""


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """One public query, and how it is asked.

    Attributes:
      direction: float64[dimension], from `SimilarTexts.ask_public`.
      rows: makes the one question to the engine; answered with `Boxed` float64[rows, width].
      render: turns the near records of one unit into what the engine is asked; no records: the public question.
      width: columns of a row, public.
    """

    direction: NDArray[np.float64]
    rows: Callable[[Rendered[Any]], Ask]
    render: Callable[[Sequence[Record]], Any]
    width: int


class Participants:
    """Answers any number of queries from the units that take part in each; shows nothing, refuses copies.

    Formal guarantees:
      - A unit takes part where one of its own texts reaches the public similarity to the query and it has a
        participation left: a function of that unit, public values and what was released.
      - Everybody who takes part is debited, together and durably where balances are, before the model is asked for
        anybody; the ledger is told so before that, too. Nothing gives a participation back: not a failure, not a stop,
        not that no row was left for it.
      - Each release is `plan.release` of the rows of those who have one; a row that fails is all zeros, and a row of
        nobody, which is asked the public question, counts for nothing.
      - With slots the model is asked the same number of rows every time, whoever takes part, and also when nobody does.

    Args:
      pool: the units, opened by the curator.
      plan: how to add up and noise, and how often a unit may take part.
      texts: finds who is near.
      field: of the records, which is compared.
      balances: who has taken part how often.
      ledger_id: the ledger that paid.
    """

    def __init__(
        self,
        pool: Pool,
        *,
        plan: ParticipationPlan,
        texts: SimilarTexts,
        field: str,
        balances: Balances,
        ledger_id: str,
    ) -> None:
        self.plan = plan
        self._private = pool
        self._texts = texts
        self._field = field
        self._balances = balances
        self._ledger_id = ledger_id
        self._gate = Gate(1)

    def release(self, question: Question, ticket: Reservation, *, settled: Callable[[], int]) -> Walk[Release]:
        """Makes one release (a walk).

        Args:
          question: the query, and how it is asked.
          ticket: the query's own, free and counted; burnt before a record is read, committed once the debits stand.
          settled: how many queries the ledger holds as committed; read before the debits are written.

        Raises:
          PrivacyBudgetError: the ticket is no query's, or another ledger's.
          LedgerError: the debits, or the line that says so, could not be written; who was debited stays so. Or this is
            a forked copy, or the balances are older than the ledger.
          ModelCallError: the release could not be computed; who was debited stays so.
        """
        if ticket.event != NoEvent() or ticket.ledger_id != self._ledger_id:
            raise PrivacyBudgetError("ticket: expected a query's of this filter's ledger, found another. Reserve it.")
        ticket.burn()
        near = yield from self._near(question.direction)
        known = settled()
        seated, refused = _refusable(lambda: Boxed(self._seated(near, known)))
        if refused is not None:
            raise refused
        if seated is None:
            raise ModelCallError(NOT_COMPUTED)
        ticket.commit()
        kept = _Rows(seated)
        ask = guarded(lambda: question.rows(self._rendered(question.render, kept)))
        if ask is None:
            raise ModelCallError(NOT_COMPUTED)
        answered: Boxed = yield ask
        released = guarded(lambda: self._released(answered, kept, question.width))
        if released is None:
            raise ModelCallError(NOT_COMPUTED)
        return released

    def _near(self, direction: NDArray[np.float64]) -> Walk[Boxed]:
        """Finds whose texts are near; one query at a time, so that the first embeds every text once."""
        held = yield Turn(self._gate)
        try:
            ask = guarded(lambda: self._texts.ask(self._units(), direction))
            if ask is None:
                raise ModelCallError(NOT_COMPUTED)
            found: Boxed = yield ask
            return found
        finally:
            if held:
                self._gate.__exit__(None, None, None)

    def _units(self) -> list[Texts]:
        return [self._own(place) for place in range(self._private.num_units)]

    def _own(self, place: int) -> Texts:
        """Returns the texts of one unit; none, where they cannot be read."""
        found = guarded(lambda: tuple([record[self._field] for record in self._private.records(place)]))
        return () if found is None else found

    def _seated(self, near: Boxed, settled: int) -> Seated:
        """Debits whoever takes part, and says who has a row."""
        present = [(place, own) for place, own in enumerate(near.take()) if own]
        has_one = self._balances.debit([self._private.name(place) for place, _ in present], settled)
        let_in = [unit for unit, left in zip(present, has_one, strict=True) if left]
        return self.plan.seats(let_in, rng=SYSTEM_RANDOM)

    def _rendered(self, render: Callable[[Sequence[Record]], T], kept: _Rows) -> Rendered[T]:
        """Returns what each row is asked: those of units, then the public question for the rows of nobody."""
        own = tuple(guarded(lambda unit=unit: self._asked(render, *unit)) for unit in kept.seated)  # type: ignore[misc]
        empty = 0 if self.plan.num_slots is None else self.plan.num_slots - len(own)
        return (*own, *(render(()) for _ in range(empty)))

    def _asked(self, render: Callable[[Sequence[Record]], T], place: int, near: Near) -> T:
        records = self._private.records(place)
        return render([records[number] for number in near])

    def _released(self, answered: Boxed, kept: _Rows, width: int) -> Release:
        """Adds up the rows of those who have one, and adds the noise; a row of nobody counts for nothing."""
        with np.errstate(all="ignore"):
            return self.plan.release(answered.take()[: len(kept.seated)], width=width, rng=SYSTEM_RANDOM)

    def __copy__(self) -> Participants:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Participants:
        return self

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise PrivacyBudgetError("Participants: cannot be pickled: their copy would let everybody in once more.")

    def __repr__(self) -> str:
        return "Participants(<private>)"


class _Rows:
    """Who has a row, on the way from the debits to the sum; shown never."""

    __slots__ = ("seated",)

    def __init__(self, seated: Boxed) -> None:
        self.seated: Seated = seated.take()

    def __repr__(self) -> str:
        return "_Rows(<private>)"


def _refusable(action: Callable[[], Boxed]) -> tuple[Boxed | None, LedgerError | None]:
    """Is `guarded`, but tells a refusal of the balances, made anew from here: what was raised holds private frames."""
    refused: list[LedgerError] = []

    def acted() -> Boxed | None:
        try:
            return action()
        except LedgerError as error:
            refused.append(type(error)(str(error)))
        return None

    return guarded(acted), (refused[0] if refused else None)
