"""An individual privacy filter: each unit pays for the releases that it takes part in, and for no other.

Holds how often a unit may take part, what that costs the unit that takes part most, and the balances. A balance is
private and never shown. Proof: docs/proofs/individual-filters.md.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, Protocol, TypeAlias, TypeVar, final

import numpy.typing as npt

from langchain_dpicl._opaque import Opaque, this_process
from langchain_dpicl.exceptions import ConfigurationError, LedgerError
from langchain_dpicl.privacy._validate import Adjacency, RowShape, check_adjacency, check_int, fail
from langchain_dpicl.privacy.accounting.events import GaussianEvent, NoEvent, canonical_json
from langchain_dpicl.privacy.extensions.normalized_sums import UnitVectorSum, VoteVectorSum
from langchain_dpicl.privacy.ledger.tickets import Ticket
from langchain_dpicl.privacy.mechanisms.bounded import BoundedSum, ClosedClass, ProbabilitySum, Sensitivity, VoteSum
from langchain_dpicl.privacy.mechanisms.randomness import SecureRandom
from langchain_dpicl.privacy.mechanisms.release_plan import GaussianMechanism, Release

FILTER_TEMPLATE = "individual-filter"
"""The ticket template of one set of balances: it pays for every release that they let a unit take part in."""
QUERY_TEMPLATE = "query"
"""The ticket template of one release under a filter: free, counted, and written down once its debits stand."""

Bounded: TypeAlias = VoteSum | ProbabilitySum | VoteVectorSum | UnitVectorSum
_SUMS: dict[str, type[Bounded]] = {cls.name: cls for cls in (VoteSum, ProbabilitySum, VoteVectorSum, UnitVectorSum)}

T = TypeVar("T")


@functools.lru_cache(maxsize=64)
def _filter_event(noise_multiplier: float, participations: int) -> GaussianEvent:
    """Returns the Gaussian of the largest float s with s^2 * participations <= noise_multiplier^2, by rationals."""
    most = Fraction(noise_multiplier) ** 2 / participations
    found = math.nextafter(math.sqrt(most), math.inf)
    while Fraction(found) ** 2 > most:
        found = math.nextafter(found, 0.0)
    return GaussianEvent(found)


@final
@dataclass(frozen=True, slots=True)
class ParticipationPlan(ClosedClass):
    """How each query is released from the units that take part in it, and how often a unit may take part.

    Formal guarantees:
      - `event` bounds all releases together, however many there are and however adaptively they are asked for, where
        whether a unit takes part is a function of that unit alone, of public values and of what was released, and
        every unit that takes part is debited first (`Balances`), also one for which no row is left.
      - A release adds noise of `noise_multiplier` sensitivities, so a participation is (1 / noise_multiplier)-GDP;
        `participations` of them are as the Gaussian of `event`, which is rounded towards the dearer side.
      - `seats` moves at most one row where a unit that takes part comes or goes.

    Attributes:
      aggregation: how rows add up; one that is bounded in L2.
      mechanism: the Gaussian mechanism; no other is covered.
      participations: releases that a unit may take part in.
      num_slots: rows of every release, public; units beyond them are left out by secret coins, and stay debited. None:
        a row for each unit that takes part.
      adjacency: "add_remove".

    Raises:
      ConfigurationError: a part that no proof covers, or a number out of range.

    >>> plan = ParticipationPlan(VoteSum(), GaussianMechanism(20.0), participations=100, num_slots=None)
    >>> plan.event
    GaussianEvent(noise_multiplier=2.0)

    Source: Feldman and Zrnic (2021), Individual Privacy Accounting via a Renyi Filter; Koskela, Tobaben and Honkela
      (2023), Individual Privacy Accounting with Gaussian Differential Privacy; docs/proofs/individual-filters.md.
    """

    aggregation: Bounded
    mechanism: GaussianMechanism
    participations: int
    num_slots: int | None
    adjacency: Adjacency = "add_remove"
    name: ClassVar[str] = "individual_filter"

    def __post_init__(self) -> None:
        if check_adjacency(self.adjacency) != "add_remove":
            advice = (
                "A unit that is replaced leaves with one balance and enters with another: two filters move at once, "
                "and the theorem charges one. Take a budget with adjacency='add_remove'."
            )
            raise fail("adjacency", "'add_remove' for individual filters", self.adjacency, advice)
        if type(self.aggregation) not in _SUMS.values():
            found = type(self.aggregation).__name__
            raise ConfigurationError(f"aggregation: expected one of {sorted(_SUMS)}, found {found}.")
        if type(self.mechanism) is not GaussianMechanism:
            found = type(self.mechanism).__name__
            advice = "The filter adds squares, which only Gaussian noise composes by."
            raise ConfigurationError(f"mechanism: expected GaussianMechanism, found {found}. {advice}")
        check_int("participations", self.participations, low=1, high=2**31)
        if self.num_slots is not None:
            check_int("num_slots", self.num_slots, low=1, high=2**20)

    @property
    def row_shape(self) -> RowShape:
        """What a unit moves: a row that comes or goes ("units"), or one that another unit may have had ("slots")."""
        return "units" if self.num_slots is None else "slots"

    @property
    def sensitivity(self) -> Sensitivity:
        """The sensitivity of one sum to one unit that takes part."""
        return self.aggregation.sensitivity(row_shape=self.row_shape, adjacency=self.adjacency)

    @property
    def noise_stddev(self) -> float:
        """Standard deviation of the noise on each coordinate."""
        return self.mechanism.noise_multiplier * self.sensitivity.require("l2")

    @property
    def event(self) -> GaussianEvent:
        """What all releases together cost: those of a unit that takes part as often as it may."""
        return _filter_event(self.mechanism.noise_multiplier, self.participations)

    def with_noise(self, noise_multiplier: float) -> ParticipationPlan:
        """Returns the same plan with another noise multiplier."""
        return dataclasses.replace(self, mechanism=GaussianMechanism(noise_multiplier))

    def tickets(self, max_queries: int) -> tuple[Ticket, ...]:
        """Returns the ticket of one set of balances, and those of the queries, which are free and counted.

        Args:
          max_queries: releases at most, public.
        """
        return (
            Ticket(template=FILTER_TEMPLATE, event=self.event, refundable=True),
            Ticket(template=QUERY_TEMPLATE, event=NoEvent(), max_count=max_queries, refundable=True),
        )

    def implementation_delta(self, num_releases: int, *, width: int) -> float:
        """Returns the declared gap between ideal and drawn coins over `num_releases` of `width` coordinates."""
        return num_releases * self.mechanism.implementation_delta(width)

    def seats(self, present: Sequence[T], *, rng: SecureRandom) -> list[T]:
        """Returns who has a row, in random order: everybody, or as many as there are slots, by secret coins.

        Args:
          present: the units that take part and were debited; private.
          rng: source of coins.
        """
        rows = len(present) if self.num_slots is None else min(self.num_slots, len(present))
        return [present[place] for place in rng.choice_without_replacement(len(present), rows).tolist()]

    def bound(self, rows: npt.NDArray[Any], *, width: int) -> BoundedSum:
        """Returns the bounded sum of the rows of those who have one.

        Args:
          rows: real[n, width], one per unit; n may be 0.
          width: columns of a row, public.
        """
        return self.aggregation.bound(rows, row_shape=self.row_shape, adjacency=self.adjacency, width=width)

    def release(self, rows: npt.NDArray[Any], *, width: int, rng: SecureRandom) -> Release:
        """Adds rows up and releases the noisy sum, as a whole.

        Args:
          rows: real[n, width], one per unit that has a row; private.
          width: columns of a row, public.
          rng: source of noise.
        """
        return self.mechanism.release(self.bound(rows, width=width), rng=rng)

    def to_dict(self) -> dict[str, Any]:
        """Returns the public parameters, for plans and reports."""
        return {
            "name": self.name,
            "aggregation": self.aggregation.to_dict(),
            "mechanism": self.mechanism.to_dict(),
            "participations": self.participations,
            "num_slots": self.num_slots,
            "adjacency": self.adjacency,
            "sensitivity": dataclasses.asdict(self.sensitivity),
        }


class Balances(Protocol):
    """How often each unit has taken part, kept where nobody reads it."""

    @property
    def durable(self) -> bool:
        """Whether balances outlive the process."""

    def debit(self, units: Sequence[str], settled: int) -> list[bool]:
        """Takes one participation off every unit that has one left, all at once, and says which had one.

        Args:
          units: distinct names of those that would take part; private.
          settled: releases that the ledger knows to have been debited.
        """

    def confirm(self, settled: int) -> None:
        """Refuses where other balances than these have let somebody in for the same filter.

        Args:
          settled: releases that the ledger knows to have been debited, that of who asks included.
        """


@final
class MemoryBalances(Opaque):
    """Balances that die with the process.

    Formal guarantees:
      - A unit is let in at most `participations` times, whatever the interleaving of threads; all units of a release
        are debited together, and nothing gives a participation back.
      - A forked copy is refused: it would let everybody in once more. So are pickles; a copy is the thing itself.
      - No attribute, repr or error shows a balance, or whether one is spent.

    Args:
      participations: releases that a unit may take part in.
    """

    __slots__ = ("_debit", "_home")
    durable = False

    def __init__(self, participations: int) -> None:
        most = check_int("participations", participations, low=1)
        taken: dict[str, int] = {}
        lock = threading.Lock()

        def debit(units: Sequence[str]) -> list[bool]:
            with lock:
                has_one = [taken.get(unit, 0) < most for unit in units]
                taken.update({unit: taken.get(unit, 0) + 1 for unit, left in zip(units, has_one, strict=True) if left})
            return has_one

        self._debit = debit
        self._home = this_process()

    def debit(self, units: Sequence[str], settled: int) -> list[bool]:
        """Debits, in the process that made these balances; see `Balances`.

        Raises:
          LedgerError: this is a forked copy.
        """
        del settled  # nobody else can have debited
        if this_process() != self._home:
            del units  # an error that escapes shows this frame
            raise LedgerError("balances: expected the process that made them, found a fork. Build the component anew.")
        return self._debit(units)

    def confirm(self, settled: int) -> None:
        """Does nothing: nobody else can have debited, as the ticket burnt for these."""


def participation_plan(shown: Any) -> ParticipationPlan:
    """Returns the plan that `ParticipationPlan.to_dict` showed, which shows itself exactly as `shown`.

    Raises:
      ConfigurationError: an unknown part, or parameters that do not fit together.
      LookupError, TypeError: what is shown is of another form.
    """
    plan = ParticipationPlan(
        aggregation=_SUMS[shown["aggregation"]["name"]](),
        mechanism=GaussianMechanism(shown["mechanism"]["noise_multiplier"]),
        participations=shown["participations"],
        num_slots=shown["num_slots"],
        adjacency=shown["adjacency"],
    )
    if canonical_json(plan.to_dict()) != canonical_json(dict(shown)):
        raise fail("participation", f"as its parts show it: {plan.to_dict()}", dict(shown))
    return plan
