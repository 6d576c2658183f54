"""The candidates of one label, and the rule that selects survivors by their noisy votes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy._validate import check_choice, check_real
from langchain_dpicl.privacy.mechanisms.noise import Release
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM
from langchain_dpicl.privacy.shares import Reservation

Selection: TypeAlias = Literal["rank", "sample"]


@dataclass(frozen=True, slots=True)
class Survival:
    """Which candidates survive a round; post-processing of the noisy votes, and free.

    Attributes:
      count: maximum number of survivors.
      least: minimum number of survivors: the best ones, whatever the threshold.
      selection: "rank" (the most votes) or "sample" (drawn without repetition, in proportion to their votes).
      threshold: minimum noisy votes of a survivor; None: no minimum.
    """

    count: int
    least: int
    selection: Selection = "rank"
    threshold: float | None = None

    def __post_init__(self) -> None:
        check_choice("selection", self.selection, ("rank", "sample"))
        if self.threshold is not None:
            check_real("threshold", self.threshold, low=0.0)

    def of(self, votes: NDArray[np.float64]) -> list[int]:
        """Returns the indices of the survivors, most noisy votes first.

        >>> (
        ...     Survival(count=2, least=1).of(np.array([0.5, 3.0, 2.0])),
        ...     Survival(2, 1, threshold=2.5).of(np.array([0.5, 3.0])),
        ... )
        ([1, 2], [1])
        """
        ranked: list[int] = np.argsort(-votes, kind="stable").tolist()
        bar = -np.inf if self.threshold is None else self.threshold
        may = [place for place in ranked if votes[place] >= bar]
        if self.selection == "sample":
            may = self._drawn(votes, may)
        chosen = may[: self.count]
        chosen += [place for place in ranked[: self.least] if place not in chosen][: max(0, self.least - len(chosen))]
        return sorted(chosen, key=ranked.index)

    def _drawn(self, votes: NDArray[np.float64], may: list[int]) -> list[int]:
        """Returns indices in the order of a weighted draw without replacement (Gumbel top-k)."""
        weights = votes[may] if may else np.zeros(0)
        with np.errstate(divide="ignore", invalid="ignore"):
            scores = np.where(weights > 0, np.log(weights), -np.inf) + SYSTEM_RANDOM.gumbel(len(may))
        return [may[place] for place in np.argsort(-scores, kind="stable") if np.isfinite(scores[place])]


@dataclass(slots=True, repr=False)
class Population:
    """The candidates of one label and its remaining tickets.

    Attributes:
      label: the declared label, or None.
      owed: rounds not yet reserved.
      reservation: the reserved rounds.
      texts: candidates of the next round; empty: not yet generated.
      survivors: of the last round, best first.
      votes: noisy votes of the survivors.
      history: noisy votes by candidate, of every released round.
      done: whether no round remains.
      busy: whether a run is working on it.
    """

    label: str | None
    owed: int
    reservation: Reservation | None = None
    texts: tuple[str, ...] = ()
    survivors: tuple[str, ...] = ()
    votes: tuple[float, ...] = ()
    history: list[dict[str, float]] = field(default_factory=list)
    done: bool = False
    busy: bool = field(default=False)

    @property
    def rounds(self) -> int:
        """Number of released histograms."""
        return len(self.history)

    @property
    def left(self) -> int:
        """Rounds that are paid for and not begun."""
        return self.owed + (self.reservation.unburnt if self.reservation is not None else 0)

    def take(self, released: Release, survival: Survival) -> None:
        """Stores the votes of a round and selects the survivors."""
        if released.values is None or len(released.values) != len(self.texts):
            raise ConfigurationError("round: expected one noisy number for each candidate, found something else.")
        places = survival.of(released.values)
        self.survivors = tuple(self.texts[place] for place in places)
        self.votes = tuple(float(released.values[place]) for place in places)
        self.history.append(dict(zip(self.texts, released.values.tolist(), strict=True)))
        self.texts = ()
