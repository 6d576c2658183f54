"""Reads and writes the checkpoint file of a private evolution."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from langchain_dpicl._evolution_population import Population
from langchain_dpicl._released_files import CheckpointFile, FileForm
from langchain_dpicl.evolution_planning import ROUND_TEMPLATE
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy.shares import Share

_KEYS = frozenset({"label", "survivors", "votes", "history"})


class Checkpoint(CheckpointFile):
    """A file that stores every released histogram before its ticket is committed, so that another process can continue.

    Its content is untrusted: texts and numbers are bounded by the run's terms, survivors must be in the last
    histogram, and the ledger decides how many rounds remain.
    """

    _FORM = FileForm(
        "a checkpoint of private evolution",
        "langchain-dpicl/private-evolution",
        1,
        frozenset({"terms", "populations"}),
    )

    def restore(self, populations: Sequence[Population], share: Share) -> None:
        """Restores the populations from the file, if it exists.

        Rounds that the ledger has no tickets for are not repeated: they were lost with a killed process.
        """
        if (state := self._state()) is None:
            return
        stored = state["populations"]
        if not isinstance(stored, list) or [_label_of(one) for one in stored] != [each.label for each in populations]:
            raise ConfigurationError("checkpoint: expected one population for each label, found something else.")
        shown = self._terms["public"]
        for population, one in zip(populations, stored, strict=True):
            _fill(population, one, survivors=shown["num_survivors"], candidates=shown["candidates"])
            remaining = share.remaining(ROUND_TEMPLATE, label=population.label)
            # The ledger may have charged more rounds than the file holds; the smaller number is safe.
            population.owed = min(population.owed - population.rounds, remaining)
            population.done = not population.owed and population.rounds > 0

    def save(self, populations: Sequence[Population]) -> None:
        """Writes the state of all populations."""
        self._write(
            populations=[
                {"label": one.label, "survivors": list(one.survivors), "votes": list(one.votes), "history": one.history}
                for one in populations
            ]
        )


def _label_of(one: Any) -> Any:
    return (
        one.get("label") if isinstance(one, Mapping) and set(one) == _KEYS else _KEYS
    )  # a set is unequal to every label


def _fill(population: Population, one: Mapping[str, Any], *, survivors: int, candidates: int) -> None:
    """Restores one population, after checking that a run of these terms can have this state."""
    survived, votes, history = one["survivors"], one["votes"], one["history"]
    rounds = [_round(each) for each in history] if isinstance(history, list) else None
    if rounds is None or None in rounds or len(rounds) > population.owed:
        raise ConfigurationError("checkpoint: expected texts with finite votes, round by round, found something else.")
    released = [each for each in rounds if each is not None]
    if any(len(each) > candidates for each in released):
        raise ConfigurationError(f"checkpoint: expected at most {candidates} candidates in a round, found more.")
    last = released[-1] if released else {}
    of_last = isinstance(survived, list) and all(isinstance(text, str) and text in last for text in survived)
    if (
        not of_last
        or len(set(survived)) != len(survived)
        or bool(survived) != bool(released)
        or len(survived) > survivors
    ):
        msg = f"checkpoint: expected at most {survivors} survivors of its last round, found something else."
        raise ConfigurationError(msg)
    expected = tuple(last[text] for text in survived)
    if not isinstance(votes, list) or [_number(vote) for vote in votes] != list(expected):
        raise ConfigurationError("checkpoint: expected the votes of its survivors, found something else.")
    population.survivors, population.votes, population.history = tuple(survived), expected, released


def _round(each: Any) -> dict[str, float] | None:
    """Returns the finite votes by candidate; None for anything else."""
    if not isinstance(each, Mapping):
        return None
    votes = {text: _number(vote) for text, vote in each.items() if isinstance(text, str)}
    finite = {text: vote for text, vote in votes.items() if vote is not None}
    return finite if 0 < len(finite) == len(each) else None


def _number(value: Any) -> float | None:
    """Returns a finite number; None for anything else."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:  # such as an integer of 400 digits
        return None
    return number if math.isfinite(number) else None
