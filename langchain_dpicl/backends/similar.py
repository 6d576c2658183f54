"""Finds the private texts that reach a public similarity to a public query, each compared by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from langchain_core.embeddings import Embeddings
from numpy.typing import NDArray

from langchain_dpicl.backends.aside import aside
from langchain_dpicl.backends.calls import whole
from langchain_dpicl.backends.embeddings import SilentEmbeddings
from langchain_dpicl.backends.nearest import PrivateDirections, direction_of
from langchain_dpicl.backends.rows import Boxed, aguarded, guarded
from langchain_dpicl.backends.silent import Hidden
from langchain_dpicl.backends.walk import Ask
from langchain_dpicl.exceptions import ConfigurationError

Texts: TypeAlias = tuple[str, ...]
Named: TypeAlias = list[tuple[bytes, ...]]
Near: TypeAlias = tuple[int, ...]
"""Places of a unit's near texts, the most similar first; none: the unit does not take part."""

_BLOCK = 2048
"""Texts compared at once."""
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

    >>> from langchain_dpicl.backends.nearest_embeddings import LocalEmbeddings
    >>> source = SimilarTexts(LocalEmbeddings(), threshold=0.3)
    >>> query = source.ask_public("a red car").run()
    >>> source.ask([("the car is red",), ("a film about boats",)], query).run().take()
    [(0,), ()]
    """

    def __init__(self, embeddings: Embeddings | SilentEmbeddings, *, threshold: float, most: int = 1) -> None:
        refuse_search(embeddings)
        if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not 0.0 < threshold <= 1.0:
            raise ConfigurationError(f"similarity_threshold: expected a number in (0, 1], found {threshold!r}.")
        self.threshold = float(threshold)
        self.most = whole("documents_per_row", most)
        super().__init__(embeddings)

    def ask_public(self, text: str) -> Ask:
        """Returns the effect for the direction float64[dimension] of a PUBLIC query, embedded as documents are."""
        return _AskDirection(self.embeddings, text)

    def ask(self, units: Sequence[Texts], query: NDArray[np.float64] | None) -> Ask:
        """Returns the effect for a `Boxed` list of `Near`, one per PRIVATE unit; without a query none is near."""
        return _AskNear(self, tuple(Hidden(unit) for unit in units), query)

    def near(
        self, units: Sequence[Hidden[Texts]], query: NDArray[np.float64] | None, *, is_all: bool = True
    ) -> list[Near]:
        """Returns the near texts of each unit; private, call it below `guarded`. `is_all`: no other unit has texts."""
        named, texts = self._named(units)
        for new in self._new(texts, most=_EMBEDDED):
            self._note(new, self.embeddings.rows(list(new.values())))
        return self._compared(named, query, self._known(texts, is_all=is_all))

    async def anear(
        self, units: Sequence[Hidden[Texts]], query: NDArray[np.float64] | None, *, is_all: bool = True
    ) -> list[Near]:
        """Async twin of `near`; long steps run in threads."""
        named, texts = await aside(lambda: self._named(units))
        for new in self._new(texts, most=_EMBEDDED):
            self._note(new, await self.embeddings.arows(list(new.values())))
        return await aside(lambda: self._compared(named, query, self._known(texts, is_all=is_all)))

    def _named(self, units: Sequence[Hidden[Texts]]) -> tuple[Named, dict[bytes, str]]:
        """Returns the hashes of each unit's texts, and every text that is not blank by its hash."""
        names: dict[str, bytes] = {}
        named = [tuple([_named_once(names, text, self._name) for text in unit.reveal()]) for unit in units]
        return named, {name: text for text, name in names.items() if text.strip()}

    def _compared(
        self, named: Named, query: NDArray[np.float64] | None, known: Mapping[bytes, NDArray[np.float32]]
    ) -> list[Near]:
        """Returns the near texts of each unit; every product is exact, so none depends on its block."""
        if query is None or not query.any():
            return [()] * len(named)
        owners = [
            (place, number, name) for place, own in enumerate(named) for number, name in enumerate(own) if name in known
        ]
        near: list[list[tuple[float, int]]] = [[] for _ in named]
        for first in range(0, len(owners), _BLOCK):
            block = owners[first : first + _BLOCK]
            rows = np.array([known[name] for _, _, name in block], dtype=np.float64)
            similar = rows @ query / np.sqrt(np.einsum("ij,ij->i", rows, rows) * (query @ query))
            for (place, number, _), value in zip(block, similar.tolist(), strict=True):
                if value >= self.threshold:
                    near[place].append((-value, number))
        return [tuple(number for _, number in sorted(own)[: self.most]) for own in near]

    def to_dict(self) -> dict[str, Any]:
        """Returns the public parameters, for reports."""
        return {
            "embeddings": self.embeddings.name,
            "similarity_threshold": self.threshold,
            "documents_per_row": self.most,
        }

    def __repr__(self) -> str:
        return f"SimilarTexts({self.embeddings.name!r}, threshold={self.threshold}, most={self.most})"


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class _AskDirection:
    """Asks for the direction of a PUBLIC text."""

    embeddings: SilentEmbeddings
    text: str

    def run(self) -> NDArray[np.float64]:
        """Runs, blocking."""
        return direction_of(self.embeddings.public([self.text])[0])

    async def arun(self) -> NDArray[np.float64]:
        """Runs, awaiting."""
        return direction_of((await self.embeddings.apublic([self.text]))[0])


@dataclass(slots=True, repr=False, eq=False)
class _AskNear:
    """Finds the near texts once; private frames run below `guarded`, so a stop finds empty boxes only."""

    source: SimilarTexts
    units: tuple[Hidden[Texts], ...]
    query: NDArray[np.float64] | None
    is_answered: bool = False

    def run(self) -> Boxed:
        """Runs, blocking."""
        self._once()
        try:
            near = guarded(lambda: Boxed(self.source.near(self.units, self.query)))
            if near is None:  # then unit by unit, so that a fault stays with its own unit
                near = _joined([guarded(lambda at=at: self._one(at)) for at in range(len(self.units))])  # type: ignore[misc]
        finally:
            self.units = ()
        return near

    async def arun(self) -> Boxed:
        """Runs, awaiting."""

        async def boxed() -> Boxed:
            return Boxed(await self.source.anear(self.units, self.query))

        self._once()
        try:
            near = await aguarded(boxed)
            if near is None:
                near = _joined([await aguarded(lambda at=at: self._aone(at)) for at in range(len(self.units))])  # type: ignore[misc]
        finally:
            self.units = ()
        return near

    def _once(self) -> None:
        """Refuses a second run, which would find nothing, as if every unit were gone."""
        if self.is_answered:
            raise ConfigurationError("expected to answer once, found a second call; ask anew")
        self.is_answered = True

    def _one(self, place: int) -> Boxed:
        return Boxed(self.source.near((self.units[place],), self.query, is_all=False))

    async def _aone(self, place: int) -> Boxed:
        return Boxed(await self.source.anear((self.units[place],), self.query, is_all=False))


def _joined(boxes: Sequence[Boxed | None]) -> Boxed:
    """Joins the boxed results of single units; a unit that failed is near nothing."""
    return Boxed([() if box is None else box.take()[0] for box in boxes])


def _named_once(names: dict[str, bytes], text: str, name: Callable[[str], bytes]) -> bytes:
    """Returns the hash of a text, computed once per text."""
    if text not in names:
        names[text] = name(text)
    return names[text]


def refuse_search(embeddings: Any) -> None:
    """Raises ConfigurationError for what searches or ranks documents: a vector store, retriever or reranker."""
    if any(callable(getattr(embeddings, name, None)) for name in _SEARCHES) or hasattr(embeddings, "vectorstore"):
        kind = embeddings.__name__ if isinstance(embeddings, type) else type(embeddings).__name__
        raise ConfigurationError(f"embeddings: expected LangChain embeddings, found {kind}. {NOT_SEARCHED}")
