"""Compares private texts with public ones by embeddings: votes for the nearest, and the texts near a query."""

from __future__ import annotations

import math
import secrets
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any, Protocol, TypeAlias

import numpy as np
from langchain_core.embeddings import Embeddings
from numpy.typing import NDArray
from typing_extensions import override

from langchain_dpicl._opaque import Opaque, OpaqueRows
from langchain_dpicl._templates import is_unspaced
from langchain_dpicl.backends.base import Rows, check_whole
from langchain_dpicl.backends.embedded import Floats, load_tables
from langchain_dpicl.backends.private_calls.call import OpaqueValue
from langchain_dpicl.backends.private_calls.embeddings import SilentEmbeddings
from langchain_dpicl.backends.rows.answer_rows import fold_text, words_in
from langchain_dpicl.backends.sync_async import Blocking, Call, Effect, EffectGenerator, Guarded, Walk, start_calls
from langchain_dpicl.exceptions import ConfigurationError

Texts: TypeAlias = tuple[str, ...]
Votes: TypeAlias = NDArray[np.float32]
_Single: TypeAlias = NDArray[np.float32]
_Held: TypeAlias = NDArray[Any]
"""The direction of a text as it is kept: float32 or int16[dimension], or int32[2, numbers] of `_SparseMatrix`."""

_WHOLE = 2.0**20
"""Length of a direction in whole numbers: products add up below 2^53, exactly, in any order."""
_BLOCK = 512
"""Texts compared at once: a block stays in the processor's cache, and its product in one thread."""
_SINGLE = 2.0**11
"""Length of the directions that queries are compared with. Rounding makes a number 0 or doubles it at most, so products
add up to 2^24 at most, whatever the dimension: exactly in single precision and in any order."""
_AT_ONCE = 2**18
"""Numbers that a query is multiplied with at once: BLAS spreads more over threads, which take longer than one."""


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

    def with_direction(self) -> Candidates:
        """Returns the candidates that have a direction: the nearness of others to a text says nothing."""
        known = np.flatnonzero(self.directions.any(axis=1))
        return Candidates(tuple([self.texts[place] for place in known]), self.directions[known])


class UnitVotes(Opaque):
    """The votes of units as pairs of a unit and a candidate: a matrix of them all would be nearly all zeros.

    A slice is the rows of some units, float32[units, candidates].

    Args:
      owners: int[votes], places of units in ascending order.
      near: int[votes, neighbours], the candidates that each text votes for.
      shape: units and candidates; public where the number of units is.
    """

    __slots__ = ("_near", "_owners", "shape")

    def __init__(self, owners: NDArray[np.intp], near: NDArray[np.intp], shape: tuple[int, int]) -> None:
        self._owners, self._near, self.shape = owners, near, shape

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, units: slice) -> Votes:
        first, stop, _ = units.indices(len(self))
        start, end = np.searchsorted(self._owners, (first, stop))
        votes = np.zeros((max(0, stop - first), self.shape[1]), dtype=np.float32)
        np.add.at(votes, (self._owners[start:end, None] - first, self._near[start:end]), 1.0)
        return votes

    @classmethod
    def stacked(cls, units: Sequence[UnitVotes | None], num_candidates: int) -> UnitVotes:
        """Returns the votes of single units together; None: a unit without any."""
        owners = [np.full(len(one._owners), place) for place, one in enumerate(units) if one is not None]  # noqa: SLF001
        near = [one._near for one in units if one is not None]  # noqa: SLF001
        shape = (len(units), num_candidates)
        if not near:
            return cls(np.zeros(0, np.intp), np.zeros((0, 1), np.intp), shape)
        return cls(np.concatenate(owners), np.concatenate(near), shape)


class PrivateDirections(Opaque):
    """The directions of private texts, in memory and found by a keyed hash; the texts are not kept.

    Args:
      embeddings: LangChain embeddings, or silent ones; they SEE the private texts.
    """

    _length = _WHOLE

    def __init__(self, embeddings: Embeddings | SilentEmbeddings) -> None:
        if not isinstance(embeddings, Embeddings | SilentEmbeddings):
            raise ConfigurationError(f"embeddings: expected LangChain embeddings, found {type(embeddings).__name__}.")
        self.embeddings = embeddings if isinstance(embeddings, SilentEmbeddings) else SilentEmbeddings(embeddings)
        self._key = OpaqueValue(secrets.token_hex(32).encode())
        self._held: OpaqueValue[dict[bytes, _Held]] = OpaqueValue({})

    def forget(self) -> None:
        """Drops the directions of all private texts."""
        self._held = OpaqueValue({})

    def _name(self, text: str) -> bytes:
        return blake2b(text.encode("utf-8", "surrogatepass"), key=self._key.reveal(), digest_size=32).digest()

    def _public(self, texts: Sequence[str]) -> Effect:
        """Returns the effect that embeds PUBLIC texts."""
        return Call(lambda: self.embeddings.public(texts), lambda: self.embeddings.apublic(texts))

    def _learn(self, texts: Mapping[bytes, str], *, most: int | None = None) -> EffectGenerator[None]:
        """Embeds the texts whose directions are unknown, at most so many at once (an effect generator)."""
        stored = self._held.reveal()
        new = [name for name in texts if name not in stored]
        step = most or max(1, len(new))
        for first in range(0, len(new), step):
            names = new[first : first + step]
            self._note(names, (yield self._embedded([OpaqueValue(texts[name]) for name in names])))

    def _embedded(self, boxes: Sequence[OpaqueValue[str]]) -> Effect:
        return Call(lambda: self.embeddings.rows(boxes), lambda: self.embeddings.arows(boxes))

    def _note(self, new: Sequence[bytes], vectors: Rows) -> None:
        """Stores new directions."""
        directions = [direction_of(row, self._length) for row in vectors]
        held = {name: row for name, row in zip(new, directions, strict=True) if row.any()}
        self._held.reveal().update(zip(held, self._packed(list(held.values())), strict=True))

    def _packed(self, directions: Sequence[Rows]) -> Sequence[_Held]:
        # One block for all of them: single small arrays would stay as holes in the heap once they are put together.
        return list(np.array(directions, dtype=np.float32))

    def _known(self, texts: Mapping[bytes, str], *, is_all: bool = True) -> dict[bytes, _Held]:
        """Returns the directions of these texts and, if no unit has others, drops those of other texts."""
        stored = self._held.reveal()
        rows = {name: stored.get(name) for name in texts}  # another thread may drop some meanwhile
        known = {name: row for name, row in rows.items() if row is not None}
        if is_all:
            self._held = OpaqueValue(dict(known))
        return known


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

    >>> from langchain_dpicl.backends.rows.neighbour_rows import LocalEmbeddings
    >>> source = NearestRows(LocalEmbeddings())
    >>> candidates = source.request_public(["a red car", "a blue boat"]).run()
    >>> source.ask([("the boat is blue",), None], candidates).run().take()[:].tolist()
    [[0.0, 1.0], [0.0, 0.0]]
    """

    def __init__(self, embeddings: Embeddings | SilentEmbeddings, *, neighbours: int = 1) -> None:
        self.neighbours = check_whole("neighbours", neighbours)
        super().__init__(embeddings)

    def request_public(self, texts: Sequence[str]) -> Effect:
        """Returns the effect that computes the `Candidates` of PUBLIC texts; it raises where a call fails."""
        return Walk(partial(self._candidates, tuple(texts)))

    def _candidates(self, texts: Texts) -> EffectGenerator[Candidates]:
        vectors = yield self._public(texts)
        return Candidates(texts, np.array([direction_of(row) for row in vectors]).reshape(len(texts), -1))

    def ask(self, units: Sequence[Texts | None], candidates: Candidates) -> Effect:
        """Returns the effect that computes the rows of these private units: `OpaqueRows` of `UnitVotes`."""
        return _VoteRequest(self, tuple(None if unit is None else OpaqueValue(unit) for unit in units), candidates)

    def rows(self, units: Sequence[OpaqueValue[Texts] | None], candidates: Candidates) -> EffectGenerator[OpaqueRows]:
        """Returns the votes, boxed (an effect generator); private, to be run by `Guarded`."""
        texts = self._distinct(units)
        yield from self._learn(texts)
        self._known(texts)  # drops the directions of texts that no unit has any more
        return OpaqueRows(self._votes(units, candidates))

    def _distinct(self, units: Sequence[OpaqueValue[Texts] | None]) -> dict[bytes, str]:
        """Returns every text that may vote once, by its hash."""
        texts = dict.fromkeys(text for unit in units if unit is not None for text in unit.reveal() if text.strip())
        return {self._name(text): text for text in texts}

    def _votes(self, units: Sequence[OpaqueValue[Texts] | None], candidates: Candidates) -> UnitVotes:
        """Returns which candidates are nearest to the texts of each unit."""
        known = self._held.reveal()
        owners = [
            (place, known[name])
            for place, unit in enumerate(units)
            if unit is not None
            for name in map(self._name, unit.reveal())
            if name in known
        ]
        near = np.zeros((len(owners), min(self.neighbours, len(candidates))), dtype=np.intp)
        for first in range(0, len(owners), _BLOCK):
            block = np.array([row for _, row in owners[first : first + _BLOCK]], dtype=np.float64)
            near[first : first + _BLOCK] = nearest(block, candidates, self.neighbours)
        places = np.array([place for place, _ in owners], dtype=np.intp)
        return UnitVotes(places, near, (len(units), len(candidates)))

    def __repr__(self) -> str:
        return f"NearestRows({self.embeddings.name!r}, neighbours={self.neighbours})"


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class _VoteRequest:
    """Computes the votes of one release; private frames run below `run_guarded`, so a stop finds hidden values only."""

    source: NearestRows
    units: tuple[OpaqueValue[Texts] | None, ...]
    candidates: Candidates

    def run(self) -> OpaqueRows:
        start_calls(self.source.embeddings)
        return Guarded(self._rows).run() or self._nothing()

    async def arun(self) -> OpaqueRows:
        return await Guarded(self._rows).arun() or self._nothing()

    def _nothing(self) -> OpaqueRows:
        return self._stack([None] * len(self.units))

    def _rows(self) -> EffectGenerator[OpaqueRows]:
        votes: OpaqueRows | None = yield self._asked(self.units)
        if votes is None:  # then unit by unit, so that a fault stays in its own row
            boxes: list[OpaqueRows | None] = []
            for unit in self.units:
                box = yield self._asked((unit,))
                boxes.append(box)
            votes = self._stack(boxes)
        return votes

    def _asked(self, units: tuple[OpaqueValue[Texts] | None, ...]) -> Effect:
        return Guarded(lambda: self.source.rows(units, self.candidates))

    def _stack(self, boxes: Sequence[OpaqueRows | None]) -> OpaqueRows:
        """Stacks boxed rows of single units; a row that failed is zeros."""
        votes = [None if box is None else box.take() for box in boxes]
        return OpaqueRows(UnitVotes.stacked(votes, len(self.candidates)))


def direction_of(vector: NDArray[Any], length: float = _WHOLE) -> NDArray[np.float64]:
    """Returns float64[d]: the vector at length 2^20 or another, in whole numbers; zeros where it has no direction.

    A function of its one argument, and finite for all floats: the vector is divided by its largest number first.

    >>> direction_of(np.array([3e300, 4e300])).tolist()
    [629146.0, 838861.0]
    """
    finite = np.asarray(vector, dtype=np.float64)
    peak = float(np.abs(finite).max(initial=0.0))
    if not (np.isfinite(finite).all() and peak > 0):
        return np.zeros(finite.shape)
    scaled = finite / peak
    whole_numbers: NDArray[np.float64] = np.rint(scaled / np.sqrt(np.square(scaled).sum()) * length) + 0.0
    return whole_numbers


def nearest(directions: Rows, candidates: Candidates, count: int) -> NDArray[np.intp]:
    """Returns int[texts, count]: places of the candidates at the smallest angles, nearest first; ties by place."""
    near: Rows = directions @ candidates.directions.T  # [texts, candidates], exact
    if count == 1:
        return np.asarray(near.argmax(axis=1))[:, None]
    return np.argsort(-near, axis=1, kind="stable")[:, :count]


Named: TypeAlias = list[tuple[int, tuple[bytes, ...]]]
"""The place of a unit, and the hashes of its texts."""
Near: TypeAlias = tuple[int, ...]
"""Places of a unit's near texts, the most similar first; at least one."""


class UnitTexts(Protocol):
    """The PRIVATE texts of numbered units; shows nothing of them."""

    def __len__(self) -> int:
        """Returns how many units there are."""

    @property
    def version(self) -> int | None:
        """Changes after the texts of a unit have changed; None: unknown, so nothing made of them is kept."""

    def own(self, place: int) -> Texts:
        """Returns the texts of one unit."""


class _ListedTexts(Opaque):
    """The texts of a list of units."""

    __slots__ = ("_units",)
    version = None

    def __init__(self, units: Sequence[Texts]) -> None:
        self._units = tuple(units)

    def __len__(self) -> int:
        return len(self._units)

    def own(self, place: int) -> Texts:
        return self._units[place]


class _DirectionMatrix(Opaque):
    """The directions of all units' texts, one row for each distinct text, and who has them.

    Attributes:
      source: whose texts they are, where the matrix is kept.
      version: of these texts.
      directions: int16[texts, dimension] of whole numbers: reading them is what takes a query's time.
      rows: the row of each text, by its hash.
      squares: float64[texts], of their lengths.
      owners: int64[3, owned texts]: the place of a unit, which of its texts, and its row; by place, then text.
      missing: places of units with a text that could not be embedded.
    """

    __slots__ = ("directions", "missing", "owners", "rows", "source", "squares", "version")

    def __init__(self, named: Named, texts: Mapping[bytes, str], known: Mapping[bytes, _Held]) -> None:
        rows: dict[bytes, int] = {}
        owners = [
            (place, number, rows.setdefault(name, len(rows)))
            for place, own in named
            for number, name in enumerate(own)
            if name in known
        ]
        self.source: UnitTexts | None = None
        self.version: int | None = None
        self.rows = rows
        self.owners = np.array(owners, dtype=np.int64).reshape(-1, 3).T
        self.missing = tuple(place for place, own in named if any(name in texts and name not in known for name in own))
        self._fill([known[name] for name in rows])

    def _fill(self, rows: Sequence[_Held]) -> None:
        self.directions: NDArray[Any] = np.array(rows or np.zeros((0, 0)), dtype=np.int16)
        self.squares: Rows = self._of_blocks(lambda block, out: np.einsum("ij,ij->i", block, block, out=out)).astype(
            np.float64
        )

    def part(self, row: int) -> _Held:
        """Returns the direction of one text, without a copy."""
        own: _Held = self.directions[row]
        return own

    def cosines(self, query: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns float64[texts]; none depends on other texts, and the time does not depend on which are near."""
        products = self._products(query.astype(np.float32)).astype(np.float64)
        return products / np.sqrt(self.squares * (query @ query))

    def _products(self, query: _Single) -> _Single:
        """Returns float32[texts], the products with a query, exact in any order."""
        return self._of_blocks(lambda block, out: np.dot(block, query, out=out))

    def _of_blocks(self, fill: Callable[[_Single, _Single], object]) -> _Single:
        """Returns float32[texts], which `fill` writes for each block of directions, float32[some, dimension]."""
        count, dimension = self.directions.shape
        step = max(1, _AT_ONCE // max(1, dimension))
        block, made = np.empty((min(step, count), dimension), dtype=np.float32), np.empty(count, dtype=np.float32)
        for first in range(0, count, step):
            own = self.directions[first : first + step]
            np.copyto(block[: len(own)], own)
            fill(block[: len(own)], made[first : first + step])
        return made


class _SparseMatrix(_DirectionMatrix):
    """The same of directions that are mostly zeros. Time grows with the numbers other than 0 of all texts together.

    Attributes:
      directions: int32[2, numbers]: of one text after another, the places of what is not 0, and what stands there.
      borders: int64[texts + 1], where each text begins.
    """

    __slots__ = ("borders",)

    @override
    def _fill(self, rows: Sequence[_Held]) -> None:
        self.borders = np.cumsum([0, *(row.shape[1] for row in rows)])
        self.directions = np.concatenate([np.zeros((2, 0), np.int32), *rows], axis=1)
        self.squares = self._sums(lambda _, numbers: numbers * numbers).astype(np.float64)

    @override
    def part(self, row: int) -> _Held:
        return self.directions[:, self.borders[row] : self.borders[row + 1]]

    @override
    def _products(self, query: _Single) -> _Single:
        return self._sums(lambda places, numbers: query[places] * numbers)

    def _sums(
        self, made: Callable[[NDArray[np.int32], NDArray[np.float32]], NDArray[np.float32]]
    ) -> NDArray[np.float32]:
        """Returns float32[texts]: the sums of what is made of the places and numbers of each, exact in any order."""
        sums = np.empty(len(self.borders) - 1, dtype=np.float32)
        for first in range(0, len(sums), _BLOCK):
            starts = self.borders[first : first + _BLOCK + 1]
            places, numbers = self.directions[:, starts[0] : starts[-1]]
            made_of = made(places, numbers.astype(np.float32))
            sums[first : first + _BLOCK] = np.add.reduceat(made_of, starts[:-1] - starts[0])
        return sums


_EMBEDDED = 128
"""Texts embedded at once, public; a stopped query keeps the earlier ones."""
_SEARCHES = ("similarity_search", "get_relevant_documents", "compress_documents", "max_marginal_relevance_search")
"""Methods of vector stores, retrievers, rerankers and compressors that embeddings do not have."""

NOT_SEARCHED = (
    "Whether a document takes part may depend on that document, the query and public numbers alone. The first k, a "
    "diversified list, a reranked one and an approximate index depend on the other documents: one more document "
    "would change which others take part and are charged. Every document is compared here, exactly, with "
    "similarity_threshold= (docs/proofs/individual-filters.md)."
)


class SimilarTexts(PrivateDirections):
    """Finds which texts of each unit reach a public similarity to a public query.

    Formal guarantees:
      - What is found of unit i is computed from the texts of unit i, the query, the threshold and public settings
        alone, to the last bit: directions are whole numbers, and their products add exactly, whatever else is compared.
        A text that is the query itself is at similarity 1.
      - A text is embedded when it is first asked about, by a call of its own, and again only where that failed. Its
        direction is kept, in memory and in a box, as long as a unit has the text; also where a stop or a cancellation
        ends the query, but for the last few. The text itself is not kept: a direction is found by a keyed hash of it.
      - A text that is blank, or whose embedding fails or is zeros, is near nothing. The content of a text raises
        nothing; Ctrl-C and a cancelled task go on from frames that hold nothing private.

    Args:
      embeddings: LangChain embeddings, or silent ones; they SEE the private texts.
      threshold: least cosine of the angle between a text and the query, in (0, 1]; public.
      most: texts of one unit that are shown in its row, its most similar ones; public.

    Raises:
      ConfigurationError: a number out of range, or no embeddings; for what searches or ranks, with the reason.
      CapabilityError: see `SilentEmbeddings`.
      UnsilencableModelError: see `SilentEmbeddings`.
      ModelCallError: the embeddings could not be reached.

    >>> from langchain_dpicl.backends.rows.neighbour_rows import LocalEmbeddings
    >>> source = SimilarTexts(LocalEmbeddings(), threshold=0.3)
    >>> query = source.request_public("a red car").run()
    >>> source.ask([("the car is red",), ("a film about boats",)], query).run().take()
    {0: (0,)}
    """

    _length = _SINGLE

    def __init__(self, embeddings: Embeddings | SilentEmbeddings, *, threshold: float, most: int = 1) -> None:
        refuse_search(embeddings)
        if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not 0.0 < threshold <= 1.0:
            raise ConfigurationError(f"similarity_threshold: expected a number in (0, 1], found {threshold!r}.")
        self.threshold = float(threshold)
        self.most = check_whole("documents_per_row", most)
        self._kept: OpaqueValue[_DirectionMatrix | None] = OpaqueValue(None)
        super().__init__(embeddings)
        self._is_sparse = self.embeddings.is_sparse

    def request_public(self, text: str) -> Effect:
        """Returns the effect for the direction float64[dimension] of a PUBLIC query, embedded as documents are."""
        return Walk(partial(self._direction, text))

    def _direction(self, text: str) -> EffectGenerator[NDArray[np.float64]]:
        vectors = yield self._public([text])
        return direction_of(vectors[0], _SINGLE)

    def ask(self, units: UnitTexts | Sequence[Texts], query: NDArray[np.float64] | None) -> Effect:
        """Returns the effect for `OpaqueRows`: `Near` by the place of PRIVATE units; without a query none is near."""
        listed = _ListedTexts(units) if isinstance(units, Sequence) else units
        return _NeighbourRequest(self, listed, query)

    def near(
        self, units: UnitTexts, query: NDArray[np.float64] | None, *, is_all: bool = True
    ) -> EffectGenerator[OpaqueRows]:
        """Returns the units with near texts, boxed (an effect generator); private, to be run by `Guarded`.

        Args:
          units: the units.
          query: the direction of the public query; None: none is near.
          is_all: no others have texts.
        """
        version, kept = units.version, self._up_to_date(units)
        if kept is None or kept.missing:
            named, texts = yield Blocking(partial(self._named, units, kept))
            yield from self._learn(texts, most=_EMBEDDED)
            kept = yield Blocking(partial(self._matrix, units, version, named, texts, kept, is_all=is_all))
        return OpaqueRows((yield Blocking(partial(self._compare, kept, query))))

    @override
    def forget(self) -> None:
        super().forget()
        self._kept = OpaqueValue(None)

    @override
    def _packed(self, directions: Sequence[Rows]) -> Sequence[_Held]:
        if not self._is_sparse:
            return list(np.array(directions, dtype=np.int16))
        places = [row.nonzero()[0] for row in directions]
        packed = [np.array([own, row[own]], dtype=np.int32) for row, own in zip(directions, places, strict=True)]
        borders = np.cumsum([own.size for own in places])[:-1]
        return np.split(np.concatenate(packed, axis=1), borders, axis=1) if packed else []

    def _up_to_date(self, units: UnitTexts) -> _DirectionMatrix | None:
        """Returns the kept matrix, if no unit was removed since it was made."""
        kept = self._kept.reveal()
        return kept if kept is not None and kept.source is units and kept.version == units.version else None

    def _named(self, units: UnitTexts, kept: _DirectionMatrix | None) -> tuple[Named, dict[bytes, str]]:
        """Returns the hashes of each unit's texts, and every text that is not blank by its hash.

        With a matrix only of the units that it lacks a text of.
        """
        names: dict[str, bytes] = {}
        places = range(len(units)) if kept is None else kept.missing
        named = [
            (place, tuple([_name_texts(names, text, self._name) for text in units.own(place)])) for place in places
        ]
        return named, {name: text for text, name in names.items() if text.strip()}

    def _matrix(
        self,
        units: UnitTexts,
        version: int | None,
        named: Named,
        texts: Mapping[bytes, str],
        kept: _DirectionMatrix | None,
        *,
        is_all: bool,
    ) -> _DirectionMatrix:
        """Returns the matrix of all units' texts, and keeps it where `is_all`; a kept one stays if nothing is new."""
        if kept is not None:
            stored = self._held.reveal()
            if not any(name in stored for name in texts):
                return kept
            named, texts = self._named(units, None)
        kind = _SparseMatrix if self._is_sparse else _DirectionMatrix
        made = kind(named, texts, self._known(texts, is_all=False))
        if is_all:
            # Directions of texts that no unit has any more are dropped; the others are rows of the matrix by now.
            self._held = OpaqueValue({name: made.part(row) for name, row in made.rows.items()})
            made.rows.clear()
            made.source, made.version = units, version
            self._kept = OpaqueValue(None if version is None else made)
        return made

    def _compare(self, matrix: _DirectionMatrix, query: NDArray[np.float64] | None) -> dict[int, Near]:
        """Returns the near texts of units, by place; every product is exact, so none depends on other texts."""
        if query is None or not query.any() or not len(matrix.squares):
            return {}
        cosines = matrix.cosines(query)[matrix.owners[2]]
        found = (cosines >= self.threshold).nonzero()[0]
        own: dict[int, list[tuple[float, int]]] = {}
        for place, number, value in zip(*matrix.owners[:2, found].tolist(), cosines[found].tolist(), strict=True):
            own.setdefault(place, []).append((-value, number))
        return {place: tuple([number for _, number in sorted(texts)[: self.most]]) for place, texts in own.items()}

    def to_dict(self) -> dict[str, Any]:
        """Returns the public parameters, for reports."""
        return {
            "embeddings": self.embeddings.name,
            "similarity_threshold": self.threshold,
            "documents_per_row": self.most,
        }

    def __repr__(self) -> str:
        return f"SimilarTexts({self.embeddings.name!r}, threshold={self.threshold}, most={self.most})"


@dataclass(slots=True, repr=False, eq=False)
class _NeighbourRequest:
    """Finds the near texts once; private frames run below `run_guarded`, so a stop finds empty boxes only."""

    source: SimilarTexts
    units: UnitTexts
    query: NDArray[np.float64] | None
    is_answered: bool = False

    def run(self) -> OpaqueRows:
        self._once()
        try:
            start_calls(self.source.embeddings)
            return Guarded(self._near).run() or OpaqueRows({})
        finally:
            self.units = _ListedTexts(())

    async def arun(self) -> OpaqueRows:
        self._once()
        try:
            return await Guarded(self._near).arun() or OpaqueRows({})
        finally:
            self.units = _ListedTexts(())

    def _near(self) -> EffectGenerator[OpaqueRows]:
        near: OpaqueRows | None = yield Guarded(lambda: self.source.near(self.units, self.query))
        if near is None:  # then unit by unit, so that a fault stays with its own unit
            boxes: list[OpaqueRows | None] = []
            for place in range(len(self.units)):
                box = yield Guarded(partial(self._alone, place))
                boxes.append(box)
            near = _join_boxes(boxes)
        return near

    def _once(self) -> None:
        """Refuses a second run, which would find nothing, as if every unit were gone."""
        if self.is_answered:
            raise ConfigurationError("expected one call, found a second; make new rows for each query")
        self.is_answered = True

    def _alone(self, place: int) -> EffectGenerator[OpaqueRows]:
        return self.source.near(_ListedTexts((self.units.own(place),)), self.query, is_all=False)


def _join_boxes(boxes: Sequence[OpaqueRows | None]) -> OpaqueRows:
    """Joins the boxed results of single units; a unit that failed is near nothing."""
    return OpaqueRows({place: near[0] for place, box in enumerate(boxes) if box is not None and (near := box.take())})


def _name_texts(names: dict[str, bytes], text: str, name: Callable[[str], bytes]) -> bytes:
    """Returns the hash of a text, computed once per text."""
    if text not in names:
        names[text] = name(text)
    return names[text]


def refuse_search(embeddings: Any) -> None:
    """Raises ConfigurationError for what searches or ranks documents: a vector store, retriever or reranker."""
    if any(callable(getattr(embeddings, name, None)) for name in _SEARCHES) or hasattr(embeddings, "vectorstore"):
        kind = embeddings.__name__ if isinstance(embeddings, type) else type(embeddings).__name__
        raise ConfigurationError(f"embeddings: expected LangChain embeddings, found {kind}. {NOT_SEARCHED}")


# For votes that must not leave the machine. They show shared words and rough topics only; a sentence encoder is better
# (docs/private-evolution.md has the measurements).
_SIGNS = dict.fromkeys(map(ord, "\u2120\u2122\u2116"), " ")
"""Signs that fold to letters: "Acme" with a trademark sign would be another word."""
_COLUMNS = 1024
_COLUMNS_ALONE = 4096
"""The same without topics: two words on one column make texts about one name near to questions about another."""
_PIECE_SHARE = 0.4
"""Weight of a word's pieces of three letters, all together, beside the word itself."""
_LETTER = 0.1
"""Weight of a letter beside a pair of them, where a script writes no spaces: all texts share many letters."""
_PIECE = zlib.crc32(b"#")
"""What the code of a piece goes on from, so that a piece and a word of the same letters differ."""
_PAIR = 0.5
"""Weight of a word together with the one before it: "how many" asks for something else than "how far"."""
_COMMON = 1e-2
"""A word of this frequency in public text counts half."""
_COMMON_ALONE = 1e-3
"""The same where neither topics nor pairs count; as their columns chosen on ships (benchmarks/_facts_ships.py)."""


class LocalEmbeddings(Embeddings):
    """Embeddings in numpy: 1,024 hashed words, pieces and pairs of words, and the topic vector of the embedded model.

    A text's vector depends on that text alone, is the same on every machine, and is kept nowhere. Case, width (NFKC)
    and composition of its letters do not count. Each half has length 1, or 0 where the text has no word for it.

    Args:
      topics: True: texts on one topic are similar, also where they share few words. False: only words and their pieces
        count, in 4,096 columns, and common ones count less: for questions that name something, such as a person or a
        product.

    Raises:
      ConfigurationError: `topics` is not True or False.

    >>> near = LocalEmbeddings().embed_documents(["card declined", "my card was declined", "a film about boats"])
    >>> bool(np.dot(near[0], near[1]) > np.dot(near[0], near[2]))
    True
    """

    _topics = True

    def __init__(self, *, topics: bool = True) -> None:
        if not isinstance(topics, bool):
            raise ConfigurationError(f"topics: expected True or False, found {topics!r}.")
        self._topics = topics

    @property
    def topics(self) -> bool:
        """Whether topics count."""
        return self._topics

    @property
    def model(self) -> str:
        """Name in reports and checkpoints."""
        return type(self).__name__ + ("" if self._topics else "(topics=False)")

    def __repr__(self) -> str:
        return self.model + ("()" if self._topics else "")

    @override
    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [self.embed_query(text) for text in texts]

    @override
    def embed_query(self, text: str) -> list[float]:
        text = fold_text(text.translate(_SIGNS))
        if self._topics:
            halves = [_unit(_hash_text(text, common=_COMMON, pair=_PAIR, columns=_COLUMNS)), _unit(_topic(text))]
            both: list[float] = np.concatenate(halves).tolist()
            return both
        vector = _unit(_hash_text(text, common=_COMMON_ALONE, pair=0.0, columns=_COLUMNS_ALONE))
        listed = [0.0] * _COLUMNS_ALONE
        for place in vector.nonzero()[0].tolist():  # few columns have a word
            listed[place] = float(vector[place])
        return listed


def _hash_text(text: str, *, common: float, pair: float, columns: int) -> Floats:
    """Returns float64[columns]: signed counts of words and their pieces, weighted by rarity, and of pairs of words.

    Where a script writes no spaces, those of pairs of letters, and of letters.
    """
    tables = load_tables()
    codes: list[int] = []
    weights: list[float] = []
    before = "^"
    letter = ""
    for word in words_in(text):
        if is_unspaced(word):
            codes += [zlib.crc32(word.encode()), zlib.crc32(f"{letter}{word}".encode())]
            weights += [_LETTER, 1.0 if letter else 0.0]
            letter = before = word
            continue
        letter = ""
        tokens = tables.encoding.encode_ordinary(f" {word}")
        rarity = common / (common + float(tables.unigram[tokens].min(initial=1.0)))
        edged, pieces = f"<{word}>", len(word)
        codes.append(zlib.crc32(word.encode()))
        codes += [zlib.crc32(edged[first : first + 3].encode(), _PIECE) for first in range(pieces)]
        weights.append(rarity)
        weights += [rarity * (_PIECE_SHARE / math.sqrt(pieces))] * pieces
        if pair:
            codes.append(zlib.crc32(f"{before} {word}".encode()))
            weights.append(pair)
        before = word
    code = np.array(codes, dtype=np.int64)
    counted = np.bincount(code % columns, np.where(code >> 31, 1.0, -1.0) * weights, minlength=columns)
    return np.asarray(counted, dtype=np.float64)


def _topic(text: str) -> Floats:
    """Returns the topic of a text's words, as the embedded model computes it."""
    tables = load_tables()
    added = tables.contributions[tables.words_of(text)].sum(axis=0, dtype=np.float64)
    return np.asarray(tables.topics(added[None, :])[0])


def _unit(vector: Floats) -> Floats:
    length = float(np.sqrt(np.square(vector).sum()))
    return vector / length if length > 0 else vector
