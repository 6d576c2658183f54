"""What cells of the tables share: an engine, a data set as one seed draws it, plans."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any, TypeVar

from _tables_cells import NON_PRIVATE, Cell
from _tables_files import DataFile

from langchain_dpicl.exceptions import ConfigurationError

T = TypeVar("T")
Knobs = Mapping[str, Any]
Result = dict[str, float]


@dataclass
class Engines:
    """The model that is asked, and smaller ones for the ablation.

    Attributes:
      model: the engine, or the model around it.
      is_embedded: whether it is the embedded model, which has smaller relatives.
    """

    model: Any
    is_embedded: bool
    _smaller: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.is_embedded:
            reads_once(self.model)

    def of(self, longest_match: int | None) -> Any:
        """Returns the model; with a number, the embedded one that copies behind so many matching tokens at most.

        Raises:
          ConfigurationError: another model has no such number.
        """
        if longest_match is None:
            return self.model
        if not self.is_embedded:
            raise ConfigurationError("longest_match: expected the embedded model, found another: leave that part out.")
        if longest_match not in self._smaller:
            from langchain_dpicl.backends.embedded import EmbeddedModel, Induction

            smaller = EmbeddedModel(induction=Induction(longest_match=longest_match))
            self._smaller[longest_match] = reads_once(smaller)
        return self._smaller[longest_match]


def reads_once(model: Any) -> Any:
    """Lets an embedded model keep what it reads of a text: the same bits, of records that are nobody's secret."""
    tables = copy.copy(model._tables)  # noqa: SLF001  there is no other use of this
    tables.words_of = cache(tables.words_of)
    tables.encoding = SimpleNamespace(encode_ordinary=cache(tables.encoding.encode_ordinary))
    model._tables = tables  # noqa: SLF001
    return model


@dataclass
class Room:
    """One data set as one seed draws it, with what was made of it so far.

    Attributes:
      file: the data set.
      engines: whom to ask.
      plans: public plans, which all seeds share.
    """

    file: DataFile
    engines: Engines
    plans: dict[Any, Any]
    _kept: dict[Any, Any] = field(default_factory=dict)

    def once(self, key: object, make: Callable[[], T]) -> T:
        """Returns what `make` makes; made the first time."""
        if key not in self._kept:
            self._kept[key] = make()
        found: T = self._kept[key]
        return found

    def plan(self, key: object, make: Callable[[], T]) -> T:
        """Returns a public plan; made the first time, for all seeds."""
        if key not in self.plans:
            self.plans[key] = make()
        found: T = self.plans[key]
        return found


def delta_of(size: int) -> float:
    """Returns the delta of every method: 1 / (10 x declared records)."""
    return 1 / (10 * size)


def epsilon_of(cell: Cell) -> float:
    """Returns the epsilon of a private cell; of the one without noise any, as its noise is never drawn."""
    if cell.at == NON_PRIVATE:
        return 1.0
    if cell.epsilon is None:
        raise ConfigurationError(f"at: expected an epsilon, found {cell.at!r}.")
    return cell.epsilon


def frozen(knobs: Knobs, *names: str) -> tuple[Any, ...]:
    """Returns some knobs as a key."""
    return tuple((name, knobs[name]) for name in names)


def in_front(task: Any, instruction: str) -> Any:
    """Returns a task whose prompts begin with an instruction."""
    import dataclasses

    return dataclasses.replace(task, wording=dataclasses.replace(task.wording, prefix=instruction))
