"""Where a private evolution stands, kept in a file of plain JSON. Knows released values only: no record, no embedding.

A file can be wrong but cannot act: what is read is texts and numbers, checked against the terms of the run.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from langchain_dpicl._evolution_population import Population
from langchain_dpicl._released_files import FileForm, plain, text_in, write_whole
from langchain_dpicl.evolution_planning import ROUND_TEMPLATE
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy._validate import fail
from langchain_dpicl.privacy.ledger import Share

_FORM = FileForm(
    "a checkpoint of private evolution",
    "langchain-dpicl/private-evolution",
    1,
    frozenset({"terms", "populations"}),
)
_KEYS = frozenset({"label", "survivors", "votes", "history"})


class Checkpoint:
    """A file that holds every released histogram before its ticket is committed, so that another process can go on.

    Args:
      path: the file; its folder exists.
      terms: the run's public terms; a file with others is refused.

    Raises:
      ConfigurationError: no path, or a folder that cannot be written.
    """

    def __init__(self, path: Any, terms: Mapping[str, Any]) -> None:
        if not isinstance(path, str | os.PathLike):
            raise fail("checkpoint", "the path of a file, or None", type(path).__name__)
        self._path = Path(path)
        if not self._path.parent.is_dir() or not os.access(self._path.parent, os.W_OK) or self._path.is_dir():
            raise fail("checkpoint", "a file in a folder that exists and can be written", str(path))
        self._terms = plain("terms", terms)

    def restore(self, populations: Sequence[Population], share: Share) -> None:
        """Brings populations to where the file says they stand; without a file, they stay as they are.

        Rounds that the ledger no longer has are not done again: they were lost in a process that is gone.

        Raises:
          ConfigurationError: the file is of another run, ledger or form.
          OSError: the file cannot be read.
        """
        if not self._path.exists():
            return
        state = _FORM.read(text_in(self._path))
        if state["terms"] != self._terms:
            advice = "Go on with the same ledger, data set, component and options; or take another file."
            raise ConfigurationError(f"checkpoint: expected one of this very run, found another's. {advice}")
        found = state["populations"]
        if not isinstance(found, list) or [_label_of(one) for one in found] != [each.label for each in populations]:
            raise ConfigurationError("checkpoint: expected one population for each label, found something else.")
        for population, one in zip(populations, found, strict=True):
            _fill(population, one)
            left = share.remaining(ROUND_TEMPLATE, label=population.label)
            population.owed = min(population.owed - population.rounds, left)
            population.done = not population.owed and population.rounds > 0

    def save(self, populations: Sequence[Population]) -> None:
        """Writes where all populations stand; a reader sees the old file or the whole new one.

        Raises:
          OSError: the file cannot be written.
        """
        told = [
            {"label": one.label, "survivors": list(one.survivors), "votes": list(one.votes), "history": one.history}
            for one in populations
        ]
        write_whole(self._path, _FORM.text({"terms": self._terms, "populations": told}))


def _label_of(one: Any) -> Any:
    return one.get("label") if isinstance(one, Mapping) and set(one) == _KEYS else _KEYS  # no label is a set


def _fill(population: Population, one: Mapping[str, Any]) -> None:
    """Takes over what the file says of one label, once it is seen to be texts and numbers."""
    survivors, votes, history = one["survivors"], one["votes"], one["history"]
    rounds = [dict(each) for each in history if isinstance(each, Mapping)] if isinstance(history, list) else []
    texts = [*_items(survivors), *(text for each in rounds for text in each)]
    numbers = [*_items(votes), *(vote for each in rounds for vote in each.values())]
    fits = rounds == history and len(rounds) <= population.owed and bool(rounds) == bool(survivors)
    if not fits or not all(isinstance(text, str) for text in texts) or not all(map(_is_number, numbers)):
        raise ConfigurationError("checkpoint: expected texts with finite votes, found something else.")
    population.survivors, population.votes = tuple(survivors), tuple(map(float, votes))
    population.history = [{text: float(vote) for text, vote in each.items()} for each in rounds]


def _items(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [None]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
