"""Selects the examples of a pool that a prompt shows: LangChain's selectors, or a search for the best prompt."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from langchain_core.embeddings import Embeddings
from langchain_core.example_selectors import (
    LengthBasedExampleSelector,
    MaxMarginalRelevanceExampleSelector,
    SemanticSimilarityExampleSelector,
)
from langchain_core.prompts import PromptTemplate
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore
from numpy.typing import NDArray
from typing_extensions import override

from langchain_dpicl._templates import Template
from langchain_dpicl.backends.rows.label_rows import LabelRows
from langchain_dpicl.backends.sync_async import Call, EffectGenerator, run_async, run_sync
from langchain_dpicl.exceptions import ConfigurationError, ModelCallError
from langchain_dpicl.options.methods import ByLength, Similar, StrategyLike, Student
from langchain_dpicl.privacy._validate import check_int, check_real, fail, plain_or_type
from langchain_dpicl.released.labelled_pool import PoolEntry
from langchain_dpicl.tasks.labels import VotingTask
from langchain_dpicl.tasks.templates import Query, public_text

Example: TypeAlias = dict[str, str]


class Strategy:
    """A way to select examples for a query; inputs and outputs are public."""

    def prepare(self) -> None:
        """Embeds the examples that are not embedded yet, so that `select` need not."""

    async def aprepare(self) -> None:
        """Asynchronous version of `prepare`."""
        self.prepare()

    def select(self, values: Mapping[str, Any]) -> list[Example]:
        """Returns copies of the examples for the query's values, in the order of the prompt."""
        raise NotImplementedError

    async def aselect(self, values: Mapping[str, Any]) -> list[Example]:
        """Asynchronous version of `select`."""
        return self.select(values)

    def add(self, example: Example, input_text: str) -> None:
        """Adds an example of the pool."""

    async def aadd(self, example: Example, input_text: str) -> None:
        """Asynchronous version of `add`."""
        self.add(example, input_text)


def check_strategy(strategy: object) -> None:
    """Checks a strategy before there is a pool."""
    if isinstance(strategy, Similar):
        if not isinstance(strategy.embeddings, Embeddings | VectorStore):
            advice = "OpenAIEmbeddings(...), for instance, keeps vectors in memory; or give an empty store."
            found = type(strategy.embeddings).__name__
            raise fail("Similar.embeddings", "LangChain's Embeddings, or a VectorStore", found, advice)
    elif isinstance(strategy, ByLength):
        if strategy.get_text_length is not None and not callable(strategy.get_text_length):
            found = type(strategy.get_text_length).__name__
            raise fail("ByLength.get_text_length", "a function from text to its length", found)
    elif strategy != "validated":
        raise fail("strategy", "'validated', Similar(...) or ByLength(...)", plain_or_type(strategy))


def make_strategy(
    strategy: StrategyLike,
    *,
    pool_examples: Sequence[Example],
    input_texts: Sequence[str],
    chosen: Sequence[int] = (),
    example_prompt: Any = None,
) -> Strategy:
    """Returns a way to select among the examples of a pool. Calls no model; `Strategy.prepare` does.

    LangChain's vector selectors compare equal field names of query and example. Here the text of the input is compared
    with the query's values: joined by a space, in the order of their names, if there are several.

    Args:
      strategy: "validated" (the same examples for every query), or an option value.
      pool_examples: the pool's examples.
      input_texts: the text of each example's input.
      chosen: for "validated": positions in `pool_examples`.
      example_prompt: for `ByLength`: the template of one example.
    """
    check_strategy(strategy)
    if len(pool_examples) != len(input_texts):
        raise fail("input_texts", f"one for each of {len(pool_examples)} examples", len(input_texts))
    if isinstance(strategy, Similar):
        return _ByVectors(_selector(strategy), pool_examples, input_texts)
    if isinstance(strategy, ByLength):
        return _ByLength(pool_examples, strategy, example_prompt)
    last = len(pool_examples) - 1
    return _Validated([dict(pool_examples[check_int("chosen", place, low=0, high=last)]) for place in chosen])


class _Validated(Strategy):
    """The demonstrations of the chosen prompt, whatever examples are added."""

    def __init__(self, chosen: list[Example]) -> None:
        self._chosen = chosen

    @override
    def select(self, values: Mapping[str, Any]) -> list[Example]:
        return _copies(self._chosen)


class _ByLength(Strategy):
    """The first examples that fit, by LangChain's length-based selector."""

    def __init__(self, examples: Sequence[Example], options: ByLength, example_prompt: Any) -> None:
        template = PromptTemplate.from_template(Template.of("example_prompt", example_prompt).text)
        self._fields = set(template.input_variables)
        self._selector = LengthBasedExampleSelector(
            examples=[self._checked(example) for example in examples],
            example_prompt=template,
            max_length=options.max_length,
            **({} if options.get_text_length is None else {"get_text_length": options.get_text_length}),
        )

    @override
    def select(self, values: Mapping[str, Any]) -> list[Example]:
        return _copies(self._selector.select_examples(_texts(values)))

    @override
    def add(self, example: Example, input_text: str) -> None:
        self._selector.add_example(self._checked(example))

    def _checked(self, example: Example) -> Example:
        if missing := sorted(self._fields - set(example)):
            raise fail("example_prompt", f"a template with fields among {sorted(example)}", missing)
        return dict(example)


class _ByVectors(Strategy):
    """The examples nearest to the query, by one of LangChain's vector selectors over the inputs' texts."""

    def __init__(
        self,
        selector: SemanticSimilarityExampleSelector | MaxMarginalRelevanceExampleSelector,
        examples: Sequence[Example],
        input_texts: Sequence[str],
    ) -> None:
        self._selector = selector
        self._fields: list[str] = []
        self._known: dict[frozenset[tuple[str, str]], Example] = {}
        self._waiting: dict[str, tuple[str, Example]] = {}
        for example, text in zip(examples, input_texts, strict=True):
            self._take(example, text)

    @override
    def prepare(self) -> None:
        run_sync(self._embed())

    @override
    async def aprepare(self) -> None:
        await run_async(self._embed())

    @override
    def select(self, values: Mapping[str, Any]) -> list[Example]:
        return run_sync(self._nearest(values))

    @override
    async def aselect(self, values: Mapping[str, Any]) -> list[Example]:
        return await run_async(self._nearest(values))

    @override
    def add(self, example: Example, input_text: str) -> None:
        self._take(example, input_text)
        self.prepare()

    @override
    async def aadd(self, example: Example, input_text: str) -> None:
        self._take(example, input_text)
        await self.aprepare()

    def _embed(self) -> EffectGenerator[None]:
        """Embeds the examples that the store lacks; stores without `get_by_ids` get all of them."""
        waiting = dict(self._waiting)
        if not waiting:
            return
        store, ids = self._selector.vectorstore, list(waiting)
        try:
            documents = yield Call(partial(store.get_by_ids, ids), partial(store.aget_by_ids, ids))
        except NotImplementedError:
            documents = []
        if texts := _without(waiting, documents):
            columns, names = _columns(texts), list(texts)
            yield Call(partial(store.add_texts, *columns, ids=names), partial(store.aadd_texts, *columns, ids=names))
        for name in waiting:
            self._waiting.pop(name, None)

    def _nearest(self, values: Mapping[str, Any]) -> EffectGenerator[list[Example]]:
        query, selector = self._query(values), self._selector
        yield from self._embed()
        if not self._known:
            return []
        nearest = yield Call(partial(selector.select_examples, query), partial(selector.aselect_examples, query))
        return self._ours(nearest)

    def _take(self, example: Example, text: str) -> None:
        """Registers an example; equal ones are embedded once."""
        fields = sorted(example)
        if self._known and fields != self._fields:
            raise fail("pool_examples", f"examples with the same fields, {self._fields}", fields)
        self._fields = fields
        # The id is a hash of the content, so that a persistent store is not filled twice.
        named = json.dumps([text, sorted(example.items())])
        self._waiting[str(uuid.uuid5(uuid.NAMESPACE_OID, named))] = (text, dict(example))
        self._known[frozenset(example.items())] = dict(example)

    def _query(self, values: Mapping[str, Any]) -> dict[str, str]:
        """Returns the query's text under one key, which LangChain's selector then embeds."""
        texts = _texts(values)
        if not texts:
            advice = "A FewShotChatMessagePromptTemplate passes on only the variables in its input_variables."
            raise fail("values", "at least one value of the query", {}, advice)
        return {"query": " ".join(texts[name] for name in sorted(texts))}

    def _ours(self, examples_found: Sequence[Mapping[str, Any]]) -> list[Example]:
        """Returns the examples; refuses documents that are not in the pool, as their release is unknown."""
        # Stores add metadata fields, which are dropped.
        own = [{name: one[name] for name in self._fields if isinstance(one.get(name), str)} for one in examples_found]
        examples = [self._known.get(frozenset(one.items())) for one in own]
        if None in examples:
            raise ConfigurationError(
                "vectorstore: expected a store with examples of this pool only, found another document, which was "
                "not released. Give an empty store or collection."
            )
        return _copies(example for example in examples if example is not None)


def _selector(options: Similar) -> SemanticSimilarityExampleSelector | MaxMarginalRelevanceExampleSelector:
    given = options.embeddings
    store = InMemoryVectorStore(given) if isinstance(given, Embeddings) else given
    if options.fetch_k is None:
        return SemanticSimilarityExampleSelector(vectorstore=store, k=options.k)
    return MaxMarginalRelevanceExampleSelector(vectorstore=store, k=options.k, fetch_k=options.fetch_k)


def _without(waiting: Mapping[str, tuple[str, Example]], documents: Iterable[Any]) -> dict[str, tuple[str, Example]]:
    names = {document.id for document in documents}
    return {name: item for name, item in waiting.items() if name not in names}


def _columns(items: Mapping[str, tuple[str, Example]]) -> tuple[list[str], list[dict[str, Any]]]:
    """Returns texts and metadata, the arguments of `add_texts`."""
    return [text for text, _ in items.values()], [dict(example) for _, example in items.values()]


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    return {name: public_text(f"values[{name!r}]", value) for name, value in values.items()}


def _copies(examples: Iterable[Mapping[str, Any]]) -> list[Example]:
    return [dict(example) for example in examples]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One prompt that was scored.

    Attributes:
      places: positions of its demonstrations in the pool, in the order of the prompt.
      right: number of held-back entries whose label it predicted.
      confidence: mean probability of the labels of held-back entries.
    """

    places: tuple[int, ...]
    right: int
    confidence: float

    def to_dict(self) -> dict[str, Any]:
        """Returns the candidate as JSON values."""
        return {"places": list(self.places), "right": self.right, "confidence": self.confidence}

    @classmethod
    def from_dict(cls, state: Any) -> Candidate:
        """Reads what `to_dict` returned."""
        state = _object("candidate", state, {"places", "right", "confidence"})
        confidence = check_real("confidence", state["confidence"], low=0.0, high=1.0)
        return cls(_places("places", state["places"]), check_int("right", state["right"], low=0), confidence)


@dataclass(frozen=True, slots=True)
class StudentChoice:
    """The best prompt, and all prompts that were scored. Public.

    Attributes:
      demonstrations: positions of the best prompt's demonstrations in the pool, in the order of the prompt.
      held_back: positions of the entries that candidates were scored on; none is a demonstration of any candidate.
      candidates: every prompt that was scored.
    """

    demonstrations: tuple[int, ...]
    held_back: tuple[int, ...]
    candidates: tuple[Candidate, ...]

    @property
    def validated(self) -> int:
        """Number of held-back entries."""
        return len(self.held_back)

    @property
    def right(self) -> int:
        """Number of held-back entries whose label the best prompt predicted."""
        return _best(self.candidates).right

    @property
    def accuracy(self) -> float:
        """Share of held-back entries whose label in the pool, which may be wrong, the best prompt predicted.

        Biased upwards, as the best of many candidates: measure an accuracy for a report on other inputs.
        """
        return self.right / len(self.held_back)

    def to_dict(self) -> dict[str, Any]:
        """Returns the choice as JSON values; `from_dict` reads them."""
        return {
            "demonstrations": list(self.demonstrations),
            "held_back": list(self.held_back),
            "right": self.right,
            "validated": self.validated,
            "accuracy": self.accuracy,
            "candidates": [candidate.to_dict() for candidate in self.candidates],
        }

    @classmethod
    def from_dict(cls, state: Any) -> StudentChoice:
        """Reads what `to_dict` returned, and nothing else."""
        keys = {"demonstrations", "held_back", "right", "validated", "accuracy", "candidates"}
        state = _object("student", state, keys)
        candidates = tuple(Candidate.from_dict(each) for each in _list("candidates", state["candidates"]))
        held_back = _places("held_back", state["held_back"])
        choice = cls(_places("demonstrations", state["demonstrations"]), held_back, candidates)
        shown = {place for candidate in candidates for place in candidate.places}
        if choice.demonstrations != _best(candidates).places or not shown.isdisjoint(held_back):
            raise ConfigurationError("student: expected the best candidate, and none of the entries held back.")
        if any(candidate.right > len(held_back) for candidate in candidates) or choice.to_dict() != dict(state):
            raise ConfigurationError("student: expected counts that fit the candidates.")
        return choice


def choose_student(
    entries: Sequence[PoolEntry],
    *,
    task: VotingTask,
    scorer: LabelRows,
    student: Student,
    records_of: Callable[[PoolEntry], Mapping[str, str]],
    query_of: Callable[[PoolEntry], Query],
    tick: Callable[[], object],
) -> EffectGenerator[StudentChoice]:
    """Scores prompts made of labelled entries on other labelled entries, and returns the best.

    Formal guarantees:
      - Reads public entries only and spends nothing. The same entries, numbers and model give the same choice.
      - No held-back entry is a demonstration of any candidate, and none repeats the input of one.

    Each candidate takes labels in turns, so that the numbers of demonstrations per label differ by at most one while
    entries last. The best has the most labels right, then the highest mean probability of the labels; ties go to the
    first. At most half of the entries are held back, and so few that `student.shots` remain if there are enough.

    Args:
      entries: entries of a pool; unlabelled ones and repeated inputs are ignored.
      task: labels and prompt templates.
      scorer: scores the labels, in the order of `task.labels`.
      student: the numbers of the search. Fewer demonstrations are shown and fewer entries held back if there are not
        as many; equal prompts are scored once.
      records_of: returns the fields of an entry with its label, for the template of examples.
      query_of: returns the query of an entry.
      tick: called after each scored candidate.

    Source: Duan et al. (2023), Flocks of Stochastic Parrots: the student's prompt.
    """
    labels = _labels(entries, task.labels)
    most = min(student.num_validation, len(labels) // 2, max(1, len(labels) - student.shots))
    held_back = _hold_out(labels, most, student.seed)
    # Held-back entries are chosen before any candidate, so they are a fair test for all of them.
    free = {place: label for place, label in labels.items() if place not in held_back}
    drawn = (_draw(free, student.shots, f"{student.seed}/{number}") for number in range(student.num_candidates))
    wanted = [task.labels.index(labels[place]) for place in held_back]
    asked = [task.wording.renderer(task.queries(query_of(entries[place]))) for place in held_back]
    candidates = []
    for places in dict.fromkeys(drawn):
        records = [records_of(entries[place]) for place in places]
        rows = yield scorer.request_public_rows([render(records) for render in asked])
        candidates.append(Candidate(places, *_score(rows, wanted, scorer.width)))
        tick()
    return StudentChoice(_best(candidates).places, held_back, tuple(candidates))


def _best(candidates: Sequence[Candidate]) -> Candidate:
    """Returns the best candidate; the first of equals."""
    return max(candidates, key=lambda candidate: (candidate.right, candidate.confidence))


def _labels(entries: Sequence[PoolEntry], known: tuple[str, ...]) -> dict[int, str]:
    """Returns the labels of the usable positions, in order: labelled, each input once."""
    labels: dict[int, str] = {}
    seen: set[frozenset[tuple[str, str]]] = set()
    for place, entry in enumerate(entries):
        key = frozenset(entry.fields.items())
        if entry.label is None or key in seen:
            continue
        if entry.label not in known:
            raise fail(f"entries[{place}].label", f"one of {known!r}", entry.label)
        seen.add(key)
        labels[place] = entry.label
    if len(labels) < 2:
        advice = "Label more inputs, or add labelled ones with add_public_example."
        raise fail(
            "entries", "at least two different inputs with a label (one to show, one to hold back)", len(labels), advice
        )
    return labels


def _hold_out(labels: Mapping[int, str], count: int, seed: int) -> tuple[int, ...]:
    """Returns `count` positions with labels in proportion, rare labels last, in the order of the pool."""
    ranked: list[tuple[float, int, bytes, int]] = []
    for group in _groups(labels, f"{seed}/held back").values():
        size = len(group)
        # The members of each group are spread evenly over (0, 1), so every prefix of the merged list is proportional.
        ranked.extend(((rank + 0.5) / size, -size, _hash(f"{seed}/{place}"), place) for rank, place in enumerate(group))
    return tuple(sorted(place for *_, place in sorted(ranked)[:count]))


def _draw(labels: Mapping[int, str], shots: int, name: str) -> tuple[int, ...]:
    """Returns the positions of one candidate's demonstrations: labels in turns, then shuffled."""
    groups = _groups(labels, name)
    turns = sorted(groups, key=lambda label: _hash(f"{name}/{label}"))
    most = max(len(group) for group in groups.values())
    in_turns = [groups[label][turn] for turn in range(most) for label in turns if turn < len(groups[label])]
    return tuple(_shuffle(in_turns[:shots], name))


def _groups(labels: Mapping[int, str], name: str) -> dict[str, list[int]]:
    """Returns the positions of each label, in a pseudo-random order that depends on `name` only."""
    groups: dict[str, list[int]] = {}
    for place in _shuffle(labels, name):
        groups.setdefault(labels[place], []).append(place)
    return groups


def _shuffle(places: Iterable[int], name: str) -> list[int]:
    return sorted(places, key=lambda place: _hash(f"{name}/{place}"))


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def _score(rows: NDArray[np.float64], wanted: Sequence[int], width: int) -> tuple[int, float]:
    """Returns the number of rows whose likeliest label is the wanted one, and its mean probability."""
    if (shape := np.shape(rows)) != (len(wanted), width):
        raise ModelCallError(f"label probabilities: expected shape {(len(wanted), width)}, found {shape}.")
    # A row of zeros names no label; a column behind the labels counts answers that name none.
    right = sum(bool(row.any()) and int(np.argmax(row)) == place for row, place in zip(rows, wanted, strict=True))
    confidence = sum(float(row[place]) for row, place in zip(rows, wanted, strict=True)) / len(wanted)
    return right, min(confidence, 1.0)


def _object(name: str, state: Any, keys: set[str]) -> Mapping[str, Any]:
    if not isinstance(state, Mapping) or set(state) != keys:
        raise ConfigurationError(f"{name}: expected an object with exactly the keys {sorted(keys)}.")
    return state


def _list(name: str, value: Any) -> Sequence[Any]:
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)) or not value:
        raise fail(name, "a non-empty list", type(value).__name__)
    return value


def _places(name: str, value: Any) -> tuple[int, ...]:
    places = tuple(check_int(name, place, low=0) for place in _list(name, value))
    if len(set(places)) < len(places):
        raise fail(name, "distinct places", list(places))
    return places
