"""Computes votes of private texts for the nearest of public candidates in an embedding space."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NoReturn, TypeAlias

import numpy as np
from langchain_core.embeddings import Embeddings
from numpy.typing import NDArray

from langchain_dpicl.backends.base import Rows
from langchain_dpicl.backends.calls import whole
from langchain_dpicl.backends.embeddings import SilentEmbeddings
from langchain_dpicl.backends.rows import Boxed, aguarded, guarded
from langchain_dpicl.backends.silent import Hidden
from langchain_dpicl.backends.walk import Ask
from langchain_dpicl.exceptions import ConfigurationError, PrivateAccessError

Texts: TypeAlias = tuple[str, ...]
Votes: TypeAlias = NDArray[np.float32]

_WHOLE = 2.0**20
"""Length of a direction in whole numbers: products add up below 2^53, exactly, in any order."""
_BLOCK = 2048
"""Texts compared with the candidates at once."""


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Public texts to vote for, and their directions.

    Attributes:
      texts: the candidates.
      directions: float64[candidates, dimension] of whole numbers; see `direction_of`.
    """

    texts: Texts
    directions: Rows

    def __len__(self) -> int:
        return len(self.texts)


class PrivateDirections:
    """The directions of private texts, in memory and found by a keyed hash; the texts are not kept.

    Args:
      embeddings: LangChain embeddings, or silent ones; they SEE the private texts.

    Raises:
      ConfigurationError: no embeddings.
    """

    def __init__(self, embeddings: Embeddings | SilentEmbeddings) -> None:
        if not isinstance(embeddings, Embeddings | SilentEmbeddings):
            raise ConfigurationError(f"embeddings: expected LangChain embeddings, found {type(embeddings).__name__}.")
        self.embeddings = embeddings if isinstance(embeddings, SilentEmbeddings) else SilentEmbeddings(embeddings)
        self._key = Hidden(secrets.token_hex(32).encode())
        self._held: Hidden[dict[bytes, NDArray[np.float32]]] = Hidden({})

    def forget(self) -> None:
        """Drops the directions of all private texts."""
        self._held = Hidden({})

    def _name(self, text: str) -> bytes:
        return blake2b(text.encode("utf-8", "surrogatepass"), key=self._key.reveal(), digest_size=32).digest()

    def _new(self, texts: Mapping[bytes, str], *, most: int | None = None) -> Iterator[dict[bytes, Hidden[str]]]:
        """Yields the texts whose directions are unknown, at most so many at once."""
        stored = self._held.reveal()
        new = [name for name in texts if name not in stored]
        step = most or max(1, len(new))
        for first in range(0, len(new), step):
            yield {name: Hidden(texts[name]) for name in new[first : first + step]}

    def _note(self, new: Mapping[bytes, Hidden[str]], vectors: Rows) -> None:
        """Stores new directions."""
        directions = {name: direction_of(row) for name, row in zip(new, vectors, strict=True)}
        self._held.reveal().update({name: row.astype(np.float32) for name, row in directions.items() if row.any()})

    def _known(self, texts: Mapping[bytes, str], *, is_all: bool = True) -> dict[bytes, NDArray[np.float32]]:
        """Returns the directions of these texts and, if no unit has others, drops those of other texts."""
        stored = self._held.reveal()
        rows = {name: stored.get(name) for name in texts}  # another thread may drop some meanwhile
        known = {name: row for name, row in rows.items() if row is not None}
        if is_all:
            self._held = Hidden(dict(known))
        return known

    def __reduce__(self) -> NoReturn:
        raise PrivateAccessError(
            f"{type(self).__name__} hold private directions: they cannot be copied, pickled or sent elsewhere."
        )


class NearestRows(PrivateDirections):
    """Turns units of private texts into rows of votes for the nearest candidates.

    Formal guarantees:
      - Row i is computed from the texts of unit i, the candidates and public settings alone, to the last bit:
        directions are whole numbers, and their products add exactly, whatever else is in the batch.
      - A text is embedded when it is first asked about, and not before; again only where that failed, or a batch with
        it. Its direction is kept, in memory and in a box, until `forget`, or until votes are asked for and no unit has
        the text any more. The text itself is not kept: a direction is found by a keyed hash of it.
      - A text that is blank, or whose embedding fails or is zeros, votes for nothing. The content of a text raises
        nothing; Ctrl-C and a cancelled task go on from frames that hold nothing private.

    Args:
      embeddings: LangChain embeddings, or silent ones; they SEE the private texts.
      neighbours: candidates that one text votes for, the nearest ones.

    Raises:
      ConfigurationError: a number out of range, or no embeddings.
      CapabilityError: see `SilentEmbeddings`.
      UnsilencableModelError: see `SilentEmbeddings`.
      ModelCallError: the embeddings could not be reached.

    >>> from langchain_dpicl.backends.nearest_embeddings import LocalEmbeddings
    >>> source = NearestRows(LocalEmbeddings())
    >>> candidates = source.ask_public(["a red car", "a blue boat"]).run()
    >>> source.ask([("the boat is blue",), None], candidates).run().take().tolist()
    [[0.0, 1.0], [0.0, 0.0]]
    """

    def __init__(self, embeddings: Embeddings | SilentEmbeddings, *, neighbours: int = 1) -> None:
        self.neighbours = whole("neighbours", neighbours)
        super().__init__(embeddings)

    def ask_public(self, texts: Sequence[str]) -> Ask:
        """Returns the effect that computes the `Candidates` of PUBLIC texts; it raises where a call fails."""
        return _AskCandidates(self.embeddings, tuple(texts))

    def ask(self, units: Sequence[Texts | None], candidates: Candidates) -> Ask:
        """Returns the effect that computes the rows of these private units: `Boxed` float32[units, candidates]."""
        return _AskVotes(self, tuple(None if unit is None else Hidden(unit) for unit in units), candidates)

    def rows(self, units: Sequence[Hidden[Texts] | None], candidates: Candidates) -> Votes:
        """Returns the votes; private, to be called below `guarded`."""
        texts = self._distinct(units)
        for new in self._new(texts):
            self._note(new, self.embeddings.rows(list(new.values())))
        self._known(texts)  # drops the directions of texts that no unit has any more
        return self._votes(units, candidates)

    async def arows(self, units: Sequence[Hidden[Texts] | None], candidates: Candidates) -> Votes:
        """Async twin of `rows`."""
        texts = self._distinct(units)
        for new in self._new(texts):
            self._note(new, await self.embeddings.arows(list(new.values())))
        self._known(texts)  # drops the directions of texts that no unit has any more
        return self._votes(units, candidates)

    def _distinct(self, units: Sequence[Hidden[Texts] | None]) -> dict[bytes, str]:
        """Returns every text that may vote once, by its hash."""
        texts = dict.fromkeys(text for unit in units if unit is not None for text in unit.reveal() if text.strip())
        return {self._name(text): text for text in texts}

    def _votes(self, units: Sequence[Hidden[Texts] | None], candidates: Candidates) -> Votes:
        """Returns float32[units, candidates]: how many texts of each unit have a candidate among their nearest."""
        known = self._held.reveal()
        owners = [
            (place, known[name])
            for place, unit in enumerate(units)
            if unit is not None
            for name in map(self._name, unit.reveal())
            if name in known
        ]
        votes = np.zeros((len(units), len(candidates)), dtype=np.float32)
        for first in range(0, len(owners), _BLOCK):
            block = owners[first : first + _BLOCK]
            near = nearest(np.array([row for _, row in block], dtype=np.float64), candidates, self.neighbours)
            np.add.at(votes, (np.array([place for place, _ in block])[:, None], near), 1.0)
        return votes

    def __repr__(self) -> str:
        return f"NearestRows({self.embeddings.name!r}, neighbours={self.neighbours})"


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class _AskCandidates:
    """Asks for the directions of PUBLIC texts."""

    embeddings: SilentEmbeddings
    texts: Texts

    def run(self) -> Candidates:
        """Runs, blocking."""
        return self._read(self.embeddings.public(self.texts))

    async def arun(self) -> Candidates:
        """Runs, awaiting."""
        return self._read(await self.embeddings.apublic(self.texts))

    def _read(self, vectors: Rows) -> Candidates:
        directions = np.array([direction_of(row) for row in vectors]).reshape(len(self.texts), -1)
        return Candidates(self.texts, directions)


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class _AskVotes:
    """Computes the votes of one release; private frames run below `guarded`, so a stop finds hidden values only."""

    source: NearestRows
    units: tuple[Hidden[Texts] | None, ...]
    candidates: Candidates

    def run(self) -> Boxed:
        """Runs, blocking."""
        votes = guarded(lambda: Boxed(self.source.rows(self.units, self.candidates)))
        if votes is None:  # then unit by unit, so that a fault stays in its own row
            votes = self._stacked([guarded(lambda unit=unit: self._one(unit)) for unit in self.units])  # type: ignore[misc]
        return votes

    async def arun(self) -> Boxed:
        """Runs, awaiting."""

        async def boxed() -> Boxed:
            return Boxed(await self.source.arows(self.units, self.candidates))

        votes = await aguarded(boxed)
        if votes is None:
            votes = self._stacked([await aguarded(lambda unit=unit: self._aone(unit)) for unit in self.units])  # type: ignore[misc]
        return votes

    def _one(self, unit: Hidden[Texts] | None) -> Boxed:
        return Boxed(self.source.rows((unit,), self.candidates))

    async def _aone(self, unit: Hidden[Texts] | None) -> Boxed:
        return Boxed(await self.source.arows((unit,), self.candidates))

    def _stacked(self, boxes: Sequence[Boxed | None]) -> Boxed:
        """Stacks boxed rows of single units; a row that failed is zeros."""
        rows = np.zeros((len(self.units), len(self.candidates)), dtype=np.float32)
        for place, box in enumerate(boxes):
            if box is not None:
                rows[place] = box.take()[0]
        return Boxed(rows)


def direction_of(vector: NDArray[Any]) -> NDArray[np.float64]:
    """Returns float64[d]: the vector at length 2^20, in whole numbers; zeros where it has no direction.

    A function of its one argument, and finite for all floats: the vector is divided by its largest number first.

    >>> direction_of(np.array([3e300, 4e300])).tolist()
    [629146.0, 838861.0]
    """
    finite = np.asarray(vector, dtype=np.float64)
    peak = float(np.abs(finite).max(initial=0.0))
    if not (np.isfinite(finite).all() and peak > 0):
        return np.zeros(finite.shape)
    scaled = finite / peak
    whole_numbers: NDArray[np.float64] = np.rint(scaled / np.sqrt(np.square(scaled).sum()) * _WHOLE) + 0.0
    return whole_numbers


def nearest(directions: Rows, candidates: Candidates, count: int) -> NDArray[np.intp]:
    """Returns int[texts, count]: places of the candidates at the smallest angles, nearest first; ties by place."""
    near: Rows = directions @ candidates.directions.T  # [texts, candidates], exact
    if count == 1:
        return np.asarray(near.argmax(axis=1))[:, None]
    order: NDArray[np.intp] = np.argsort(-near, axis=1, kind="stable")[:, :count]
    return order
