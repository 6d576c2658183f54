"""Selects demonstrations in a pool of public inputs that private teachers labelled (Duan et al. 2023)."""

from __future__ import annotations

import hashlib
import json
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self, TypeAlias, cast, get_args

import numpy as np
from langchain_core.embeddings import Embeddings
from langchain_core.example_selectors import (
    BaseExampleSelector,
    LengthBasedExampleSelector,
    MaxMarginalRelevanceExampleSelector,
    SemanticSimilarityExampleSelector,
)
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import RunnableConfig
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore
from numpy.typing import NDArray
from typing_extensions import override

from langchain_dpicl._calls import warn_caller
from langchain_dpicl._construction import tells_how_to_build
from langchain_dpicl._opaque import PerProcess, SaysHowToBuild
from langchain_dpicl._templates import Template
from langchain_dpicl.backends.resolve import as_choice_backend
from langchain_dpicl.backends.rows.label_rows import LabelRows
from langchain_dpicl.backends.sync_async import (
    Blocking,
    Call,
    EffectGenerator,
    run_async,
    run_in_thread,
    run_sync,
)
from langchain_dpicl.budget.handler import BudgetLike, await_refusals, describe_tickets_left
from langchain_dpicl.exceptions import ConfigurationError, ModelCallError, RunInterruptedError
from langchain_dpicl.options import (
    LLM,
    ByLength,
    ConfidentGNMax,
    FewShotTask,
    LabelAnswers,
    Noise,
    NoiseName,
    PublicInput,
    Rows,
    Similar,
    StrategyLike,
    Student,
    TemplateLike,
    Votes,
    Where,
    option_of,
)
from langchain_dpicl.pate.labeler import InputTemplate, PromptPATELabeler
from langchain_dpicl.privacy._validate import check_choice, check_flag, check_int, check_real, fail, plain_or_type
from langchain_dpicl.privacy.private_examples import PrivateExamples
from langchain_dpicl.rehearsal.rehearsal import Rehearsal
from langchain_dpicl.released.labelled_pool import LabelledPool, PoolEntry
from langchain_dpicl.runs.door import awaits, door
from langchain_dpicl.runs.release_run import carrying, new_bar, tick
from langchain_dpicl.tasks import FewShotTemplate, Query, VotingTask, distinct_texts, public_text, reader_of, texts_of

Example: TypeAlias = dict[str, str]


class Strategy:
    """A way to select examples for a query; inputs and outputs are public."""

    def select(self, values: Mapping[str, Any]) -> list[Example]:
        """Returns copies of the examples for the query's values, in the order of the prompt."""
        raise NotImplementedError

    async def aselect(self, values: Mapping[str, Any]) -> list[Example]:
        """Asynchronous version of `select`."""
        return self.select(values)

    def add(self, example: Example, input_text: str) -> None:
        """Adds an example of the pool; calls no model."""


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
    """Returns a way to select among the examples of a pool. Calls no model; `Strategy.select` does.

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
        self._template = Template.of("example_prompt", example_prompt)
        self._selector = LengthBasedExampleSelector(
            examples=[self._filled(example) for example in examples],
            example_prompt=PromptTemplate.from_template("{text}"),
            max_length=options.max_length,
            **({} if options.get_text_length is None else {"get_text_length": options.get_text_length}),
        )

    @override
    def select(self, values: Mapping[str, Any]) -> list[Example]:
        return _copies([found["example"] for found in self._selector.select_examples(_texts(values))])

    @override
    def add(self, example: Example, input_text: str) -> None:
        filled, selector = self._filled(example), self._selector
        # Not by LangChain's `add_example`, which adds the length last: another thread may select meanwhile.
        selector.example_text_lengths.append(selector.get_text_length(filled["text"]))
        selector.examples.append(filled)

    def _filled(self, example: Example) -> dict[str, Any]:
        """Returns the example beside its text: a template of LangChain's takes no field called `stop`."""
        if missing := sorted(set(self._template.names) - set(example)):
            raise fail("example_prompt", f"a template with fields among {sorted(example)}", missing)
        return {"text": self._template.fill(example), "example": dict(example)}


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
    def select(self, values: Mapping[str, Any]) -> list[Example]:
        return run_sync(self._nearest(values))

    @override
    async def aselect(self, values: Mapping[str, Any]) -> list[Example]:
        return await run_async(self._nearest(values))

    @override
    def add(self, example: Example, input_text: str) -> None:
        self._take(example, input_text)

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
    held_back = _hold_out(labels, num_held_back(student, len(labels)), student.seed)
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


def num_held_back(student: Student, labelled: int) -> int:
    """Returns how many of so many labelled inputs every candidate is tried on."""
    return min(student.num_validation, labelled // 2, max(1, labelled - student.shots))


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


@tells_how_to_build()
class PromptPATEExampleSelector(BaseExampleSelector, metaclass=SaysHowToBuild):
    r"""Selects demonstrations among public inputs whose labels private teachers released under DP.

    Private records become teacher prompts, which vote on the labels of public inputs; labels are released with noise.
    Some of the labelled inputs become demonstrations of student prompts, which are scored on the others. Everything
    after the labels is post-processing: selecting, scoring, saving and formatting cost nothing.

    Formal guarantees:
      - Contents and outputs of a selector are functions of public values and of labels released by its
        `PromptPATELabeler`, whose share of the budget bounds all of them together.
      - Only `from_private_examples`, `from_run` and `add_example` charge anything.

    Use it in `FewShotPromptTemplate` or `FewShotChatMessagePromptTemplate`. LangChain's string templates format the
    examples twice and fail on braces in an input: give `escape_braces=True` for them and only for them, or use
    `DPFewShotPromptTemplate`, which needs no escape.

    Example:
      >>> from langchain_dpicl import Budget, EmbeddedLLM, LabelAnswers, PrivateExamples
      >>> from langchain_dpicl.options import Student
      >>> tickets = [{"text": "my card was declined", "queue": "card"}, {"text": "send it abroad", "queue": "transfer"}]
      >>> private = PrivateExamples(tickets, label_key="queue", labels=("card", "transfer"), public_size=2_000)
      >>> selector = PromptPATEExampleSelector.from_private_examples(
      ...     private,
      ...     llm=EmbeddedLLM(),
      ...     budget=Budget(epsilon=2.0, delta=1e-6),
      ...     epsilon=1.0,
      ...     public_inputs=["where is my card?", "how do I send money?"],
      ...     answers=LabelAnswers(abstain_below="never"),
      ...     student=Student(shots=1),
      ... )
      >>> [sorted(example) for example in selector.select_examples({"input": "lost my card"})]
      [['queue', 'text']]
    """

    def __init__(
        self,
        pool: LabelledPool,
        *,
        strategy: StrategyLike = "validated",
        escape_braces: bool = False,
        labeler: PromptPATELabeler | None = None,
    ) -> None:
        """Builds a selector over a labelled pool, for instance a loaded one; free.

        Args:
          pool: public inputs with released or public labels.
          strategy: "validated" (the demonstrations of the student's prompt, as in the paper; if none was chosen, four
            examples with labels in turns), a `Similar`, or a `ByLength`; see there.
          escape_braces: whether braces in examples are doubled, which LangChain's string templates need.
          labeler: labels further inputs for `add_example`.

        Raises:
          ConfigurationError: an option is unknown, or does not fit the pool.
        """
        if not isinstance(pool, LabelledPool):
            raise fail("pool", "a LabelledPool", type(pool).__name__, "Load one with LabelledPool.load(path).")
        check_strategy(strategy)
        self.escape_braces = check_flag("escape_braces", escape_braces)
        self._how = strategy
        self._labels = pool
        self._student = _student_of(pool)
        self._labeler = None if labeler is None else _labeler_of(pool, labeler)
        self._lock = PerProcess(threading.Lock)
        self._strategy = self._made()

    @classmethod
    @door("PromptPATEExampleSelector")
    def from_private_examples(
        cls,
        private: PrivateExamples,
        *,
        llm: LLM,
        public_inputs: Sequence[PublicInput],
        max_queries: int | None = None,
        budget: BudgetLike | None = None,
        epsilon: float | None = None,
        example_prompt: TemplateLike | None = None,
        suffix: TemplateLike | None = None,
        task: FewShotTask | None = None,
        rows: Rows | Rehearsal | None = None,
        noise: Noise | ConfidentGNMax | NoiseName | None = None,
        answers: LabelAnswers | None = None,
        student: Student | None = None,
        strategy: StrategyLike = "validated",
        component: str | None = None,
    ) -> Self:
        """Labels the public inputs, charges the budget, chooses the student's prompt and returns the selector.

        All parameters are public and must not be chosen by looking at the records. For a checkpoint, workers, or a look
        at the labels before the choice, run a `PromptPATELabeler` and call `from_run`.

        Args:
          private: the examples; bound to the budget's ledger here.
          llm: the teachers' model. It receives the private prompts.
          public_inputs: the inputs to label: texts, documents, or dicts of fields; see `PromptPATELabeler`.
          max_queries: inputs that the share pays for; None: the number of distinct public inputs.
          budget: a PrivacyBudgetCallbackHandler, a Budget, or a RunnableConfig whose callbacks hold one; None: looked
            up in the context.
          epsilon: this component's share of the budget; see `PromptPATELabeler`.
          example_prompt: template of one record, short for `task=`.
          suffix: template of the public input, after the examples; short for `task=`.
          task: a `FewShotTask`: wording, labels and verbalizers; see there.
          rows: a `Rows`, or a `Rehearsal` that chooses: the teachers; see `PromptPATELabeler`.
          noise: a `Noise`, its mechanism's name, or a `ConfidentGNMax`; see there.
          answers: a `LabelAnswers`: how votes are read, and when an input is rejected; see there.
          student: a `Student`: the search for the student's prompt; see there. It makes up to
            `num_candidates * num_validation` public calls.
          strategy: which examples a query is shown; see the class. Only "validated" searches for a prompt.
          component: name in the ledger; the same name and plan find the same share, with its remaining tickets.

        Raises:
          ConfigurationError: a public fault; nothing was charged and no private call was made.
          PrivacyBudgetError: no budget, another budget, or one that does not suffice.
          RunInterruptedError: a public call failed; `error.run` holds the labels so far. Continue with
            `from_run(error.run)`.

        Source: Duan et al. (2023), Flocks of Stochastic Parrots; docs/prompt-pate.md explains the differences.
        """
        run, wanted = cls._planned(
            private,
            llm=llm,
            public_inputs=public_inputs,
            max_queries=max_queries,
            budget=budget,
            epsilon=epsilon,
            example_prompt=example_prompt,
            suffix=suffix,
            task=task,
            rows=rows,
            noise=noise,
            answers=answers,
            student=student,
            strategy=strategy,
            component=component,
        )
        return cls.from_run(run, student=wanted, strategy=strategy)

    @classmethod
    @awaits(from_private_examples)
    async def afrom_private_examples(cls, private: PrivateExamples, **options: Any) -> Self:
        """Async version of `from_private_examples`: it is planned in a thread; teachers are asked concurrently."""
        given = options.get("budget")
        config = cast("RunnableConfig", given) if isinstance(given, Mapping) else None
        run, wanted = await await_refusals(lambda: cls._planned(private, **options), config, is_slow=True)
        return await cls.afrom_run(run, student=wanted, strategy=options.get("strategy", "validated"))

    @staticmethod
    def _planned(
        private: PrivateExamples,
        *,
        llm: LLM,
        example_prompt: TemplateLike | None = None,
        suffix: TemplateLike | None = None,
        task: FewShotTask | None = None,
        answers: LabelAnswers | None = None,
        student: Student | None = None,
        strategy: StrategyLike = "validated",
        **options: Any,
    ) -> tuple[PromptPATELabeler, Student]:
        """Returns the labeler and the student's options, checked; asks about no input yet."""
        words = FewShotTask.of(task, example_prompt, suffix)
        reading = option_of("answers", answers, LabelAnswers)
        wanted = option_of("student", student, Student)
        engine: Any = as_choice_backend(llm, votes="text" if reading.votes == "text" else None)
        # Whether teachers are calibrated says nothing of the student.
        asked = VotingTask.of(private, words, reading.replace(calibrate=None) if reading.content_free else reading)
        wanted = _ready(strategy, wanted, engine, asked)
        run = PromptPATELabeler.from_private_examples(private, llm=engine, task=words, answers=reading, **options)
        return run, wanted

    @classmethod
    def from_run(
        cls,
        run: PromptPATELabeler,
        *,
        student: Student | None = None,
        strategy: StrategyLike = "validated",
        escape_braces: bool = False,
        progress: bool | None = None,
    ) -> Self:
        """Labels the inputs of a run that still wait, chooses the student's prompt and returns the selector.

        Charges what the run charges: nothing if it is finished. A selector over the labels so far is
        `PromptPATEExampleSelector(run.result, labeler=run)`.

        Args:
          run: the labeler; the selector keeps it for `add_example`.
          student: a `Student`: the search for the student's prompt; see there.
          strategy: which examples a query is shown; see the class. Only "validated" searches for a prompt.
          escape_braces: see the class.
          progress: True shows bars, False hides them, None shows them on a terminal only.

        Raises:
          ConfigurationError: an option is out of range, or does not fit the student's model; nothing was charged.
          RunInterruptedError: a public call failed; as for `from_private_examples`.
        """
        wanted = _ready_for(run, strategy, student, escape_braces)
        _warn_of_few_inputs(run, strategy)
        run.run(progress=progress)
        return run_sync(cls._from(run, wanted, strategy, escape_braces, progress))

    @classmethod
    async def afrom_run(
        cls,
        run: PromptPATELabeler,
        *,
        student: Student | None = None,
        strategy: StrategyLike = "validated",
        escape_braces: bool = False,
        progress: bool | None = None,
    ) -> Self:
        """Asynchronous version of `from_run`; the teachers of one input are asked concurrently."""
        wanted = await run_in_thread(lambda: _ready_for(run, strategy, student, escape_braces))
        _warn_of_few_inputs(run, strategy)
        await run.arun(progress=progress)
        return await run_async(cls._from(run, wanted, strategy, escape_braces, progress))

    @classmethod
    def _from(
        cls,
        run: PromptPATELabeler,
        student: Student,
        strategy: StrategyLike,
        escape_braces: bool,
        progress: bool | None,
    ) -> EffectGenerator[Self]:
        """Builds the selector over a labeler's pool and searches the student's prompt (an effect generator)."""

        def make() -> Any:
            return cls(run.result, labeler=run, strategy=strategy, escape_braces=escape_braces)

        failure = ""
        with carrying(run=run):
            selector: Self = yield Call(make, lambda: run_in_thread(make))
            if selector._is_searched():
                try:
                    yield Call(
                        partial(selector.choose_student, student, progress=progress),
                        partial(selector.achoose_student, student, progress=progress),
                    )
                except ModelCallError as error:
                    failure = str(error)
        if failure:  # raised outside the handler, so that it has no cause
            msg = (
                f"The student's prompt was not chosen: {failure.rstrip('.')}. All labels are released and kept: call "
                "PromptPATEExampleSelector.from_run(error.run, ...), which is free."
            )
            raise RunInterruptedError(msg, run=run)
        return selector

    @classmethod
    def load(cls, path: Where, *, strategy: StrategyLike = "validated", escape_braces: bool = False) -> Self:
        """Reads what `save` of a selector or of a labelled pool wrote: labels, report and choice of the prompt; free.

        Args:
          path: the file.
          strategy: see the class.
          escape_braces: see the class.

        Raises:
          ConfigurationError: the content is not what `save` writes, or an option is out of range.
          OSError: the file is missing or unreadable.
        """
        return cls(LabelledPool.load(path), strategy=strategy, escape_braces=escape_braces)

    def save(self, path: Where) -> None:
        """Writes labels, report, plan and choice of the prompt as plain JSON; `load` reads it.

        Args:
          path: file to create or replace.

        Raises:
          OSError: the file cannot be written.
        """
        self.pool.save(path)

    @property
    def pool(self) -> LabelledPool:
        """Every input with its status and label; report, plan and choice of the prompt. Public."""
        return self._labels

    @property
    def examples(self) -> list[dict[str, str]]:
        """Every example that can be selected, as prompts show it."""
        return self._escape(self._labels.examples)

    @property
    def rejected(self) -> list[dict[str, str]]:
        """The inputs that were charged and got no label."""
        return [dict(entry.fields) for entry in self._labels.rejected]

    @property
    def waiting(self) -> list[dict[str, str]]:
        """The inputs that the share did not pay for."""
        return [dict(entry.fields) for entry in self._labels.waiting]

    @property
    def student(self) -> StudentChoice | None:
        """The choice of the student's prompt, with every candidate; None: no prompt was chosen."""
        return self._student

    @property
    def epsilon(self) -> float:
        """Upper bound on epsilon of all labels, rejections and votes; `math.inf` if no report claims one."""
        return self._labels.epsilon

    @property
    def privacy_report(self) -> dict[str, Any]:
        """Public report of what the labels cost; `verify_report(selector.pool)` recomputes it."""
        return dict(self._labels.report)

    @property
    def queries_left(self) -> int:
        """Number of further inputs that `add_example` can label."""
        return 0 if self._labeler is None else self._labeler.queries_left

    def select_examples(self, input_variables: dict[str, str]) -> list[dict[str, str]]:
        """Returns the demonstrations for a query; free.

        Args:
          input_variables: the query's variables. Those of `input_keys` are compared, by default those of the template
            that the inputs were labelled with, or else all; several are joined, sorted by name.

        Raises:
          ConfigurationError: a variable is missing, or is no text.
        """
        return self._escape(self._strategy.select(self._values(input_variables)))

    async def aselect_examples(self, input_variables: dict[str, str]) -> list[dict[str, str]]:
        """Asynchronous version of `select_examples`."""
        return self._escape(await self._strategy.aselect(self._values(input_variables)))

    def add_example(self, example: dict[str, str]) -> str | None:
        """Has the teachers label one more public input, at the cost of one query; free if it is answered already.

        The student's prompt does not change; `choose_student` searches for a better one.

        Args:
          example: fields of the input, without a label.

        Returns:
          The label; None if the input was rejected.

        Raises:
          PrivacyBudgetExceededError: the share is spent.
          ModelCallError: the public model call failed; nothing was charged.
          ConfigurationError: a field is missing, the example has its label already (`add_public_example` is free), or
            the selector was loaded and has no labeler.
        """
        return run_sync(self._grow(example))

    async def aadd_example(self, example: dict[str, str]) -> str | None:
        """Asynchronous version of `add_example`."""
        return await run_async(self._grow(example))

    def add_public_example(self, example: Mapping[str, str]) -> None:
        """Adds an example with a public label; free.

        Args:
          example: its fields, and its label (or the label's text) under the label's key. Must not come from the
            private records.

        Raises:
          ConfigurationError: no such label, other fields than the pool's, or an input that is in the pool already.
        """
        run_sync(self._learn(_public_entry(self._labels, example)))

    async def aadd_public_example(self, example: Mapping[str, str]) -> None:
        """Asynchronous version of `add_public_example`."""
        await run_async(self._learn(_public_entry(self._labels, example)))

    def choose_student(self, student: Student | None = None, *, progress: bool | None = None) -> StudentChoice:
        """Searches the best prompt among the current examples, and stores it; costs public calls only.

        Args:
          student: a `Student`: its model, by default the teachers', and the numbers of the search; see there.
          progress: see `from_run`.

        Raises:
          ConfigurationError: fewer than two examples have a label, or there is no model.
          ModelCallError: a call of the model failed.
        """
        return run_sync(self._search(option_of("student", student, Student), progress))

    async def achoose_student(self, student: Student | None = None, *, progress: bool | None = None) -> StudentChoice:
        """Asynchronous version of `choose_student`."""
        return await run_async(self._search(option_of("student", student, Student), progress))

    def with_strategy(self, strategy: StrategyLike | None = None, *, escape_braces: bool | None = None) -> Self:
        """Returns a selector over the current pool with other options; free.

        For instance `with_strategy(escape_braces=True)`: the same examples, for LangChain's string templates.

        Args:
          strategy: see the class; None: this one's.
          escape_braces: see the class; None: as here.

        Raises:
          ConfigurationError: an option is unknown, or does not fit the pool.
        """
        how = self._how if strategy is None else strategy
        escapes = self.escape_braces if escape_braces is None else escape_braces
        return type(self)(self._labels, strategy=how, escape_braces=escapes, labeler=self._labeler)

    def _is_searched(self) -> bool:
        """Returns whether to search for a prompt; warns if the pool has too few labels to search in, or lacks some."""
        if self._how != "validated":
            return False
        num_examples = len(self._labels.examples)
        if num_examples < 2:
            rejected = len(self._labels.rejected)
            counts = f"{num_examples} of {len(self._labels.entries)} inputs got a label, {rejected} were rejected"
            advice = (
                "Lower abstain_below, give more epsilon or more inputs, or add labelled ones by add_public_example."
            )
            if self._labels.plan.get("other_label") is not None:
                advice += " If a warning said that the model's answers name no label, mend that first."
            warn_caller(UserWarning(f"PromptPATE: no student's prompt was chosen: {counts}. {advice}"))
        elif absent := sorted(set(self._labels.labels) - {entry.label for entry in self._labels.entries}):
            more = f" and {len(absent) - _SHOWN} more" if len(absent) > _SHOWN else ""
            msg = f"PromptPATE: no input was labelled {absent[:_SHOWN]}{more}: the student's prompt cannot show such a"
            advice = "Give public inputs of these labels, or add some by add_public_example and call choose_student."
            warn_caller(UserWarning(f"{msg} label, and its accuracy says nothing of one. {advice}"))
        return num_examples >= 2

    def _search(self, student: Student, progress: bool | None) -> EffectGenerator[StudentChoice]:
        """Searches the best prompt and stores it (an effect generator)."""
        pool = self._labels
        task, inputs = _task_of(pool)
        task, scorer = yield Blocking(partial(_scorer_of, self._model(student.llm), student, task))
        with new_bar(student.num_candidates, "prompt", "student prompts", progress=progress) as bar:
            choice = yield from choose_student(
                pool.entries,
                task=task,
                scorer=scorer,
                student=student,
                records_of=lambda entry: {**entry.fields, pool.label_key: entry.label or ""},
                query_of=lambda entry: inputs.query_of(entry.fields),
                tick=partial(tick, bar),
            )
        yield self._change(partial(self._keep, choice))
        return choice

    def _grow(self, example: dict[str, str]) -> EffectGenerator[str | None]:
        """Adds an example with the label of the teachers (an effect generator)."""
        if (given := self._given(example)) is not None:
            return given.label
        teachers = self._teachers()
        entry: PoolEntry = yield Call(partial(teachers.label, example), partial(teachers.alabel, example))
        yield from self._learn(entry)
        return entry.label

    def _learn(self, entry: PoolEntry) -> EffectGenerator[None]:
        """Puts an entry into the pool and, if it is a new example, into the strategy (an effect generator)."""
        yield self._change(partial(self._adopt, entry))

    def _change(self, action: Callable[[], Any]) -> Call:
        """Returns the call of a change to the pool, which may wait for the labeler's ledger."""
        return Call(action, lambda: run_in_thread(action))

    def _keep(self, choice: StudentChoice) -> None:
        with self._lock.here:
            self._student = choice
            self._labels = replace(self._labels, student=choice.to_dict())
            if self._how == "validated":
                self._strategy = self._made()

    def _made(self) -> Strategy:
        """Returns the strategy over the current examples."""
        pool = self._labels
        shown = [place for place, entry in enumerate(pool.entries) if entry.label is not None]
        places = _balanced(pool, _USUAL_SHOTS) if self._student is None else self._student.demonstrations
        return make_strategy(
            self._how,
            pool_examples=pool.examples,
            input_texts=[_text_of(pool.entries[place]) for place in shown],
            # Strategies count positions among labelled entries, pools among all entries.
            chosen=[shown.index(place) for place in places],
            example_prompt=pool.plan.get("example_prompt"),
        )

    def _values(self, values: Any) -> Any:
        """Returns the query's values that are compared: of `input_keys`, or of the pool's query template."""
        if not isinstance(values, Mapping):
            raise fail("input_variables", "a dict of the query's variables", type(values).__name__)
        wanted = self._how.input_keys if isinstance(self._how, Similar) else None
        if wanted is not None:
            if missing := [name for name in wanted if name not in values]:
                raise fail("input_keys", f"variables among {sorted(map(str, values))}", missing)
            return {name: values[name] for name in wanted}
        known: tuple[str, ...] = ()
        with suppress(ConfigurationError):  # a pool that was loaded may show any text as its template, or none
            known = Template.of("suffix", self._labels.plan.get("suffix")).names
        own = {name: values[name] for name in known if name in values}
        return own or values

    def _model(self, llm: Any) -> Any:
        if llm is None and self._labeler is None:
            raise ConfigurationError("llm: expected the student's model (a loaded selector holds none), found None.")
        return self._labeler.engine if llm is None and self._labeler is not None else llm

    def _teachers(self) -> PromptPATELabeler:
        if self._labeler is None:
            raise ConfigurationError(
                "add_example: expected a selector with private teachers, found one that was loaded or copied from "
                "another process. add_public_example adds labelled examples for free; to label further inputs, build "
                "a PromptPATELabeler on the ledger and component that paid."
            )
        return self._labeler

    def _given(self, example: Any) -> PoolEntry | None:
        """Returns the entry of an input that the pool answers, which is not charged; the labeler may not know it."""
        fields = self._teachers().inputs.fields_of(example)
        known = (entry for entry in self._labels.entries if entry.status != "waiting")
        return next((entry for entry in known if entry.fields == fields), None)

    def _adopt(self, entry: PoolEntry) -> None:
        """Puts an entry into pool and strategy, in one step: a cancellation comes before both or after both."""
        with self._lock.here:
            places = [place for place, known in enumerate(self._labels.entries) if known.fields == entry.fields]
            is_news = not places or self._labels.entries[places[0]].label is None
            # Before the pool changes: where the ledger cannot be read, the next call still has news for the strategy.
            report = None if self._labeler is None else self._labeler.result.report
            if is_news:
                self._labels = self._labels.with_entry(entry, place=places[0] if places else None)
            if report is not None:
                self._labels = replace(self._labels, report=report)
            if is_news and self._student is None and self._how == "validated":
                self._strategy = self._made()
            elif is_news and entry.label is not None:
                self._strategy.add(self._labels.example_of(entry), _text_of(entry))

    def _escape(self, examples: list[dict[str, str]]) -> list[dict[str, str]]:
        if not self.escape_braces:
            return examples
        doubled = str.maketrans({"{": "{{", "}": "}}"})
        return [{name: value.translate(doubled) for name, value in example.items()} for example in examples]

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for a pickle: everything public, without the labeler."""
        return {**self.__dict__, "_labeler": None, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=PerProcess(threading.Lock))

    def __copy__(self) -> Self:
        return self.with_strategy()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.__copy__()

    def __repr__(self) -> str:
        queries_left = describe_tickets_left(lambda: self.queries_left)
        shown = f"strategy={self._how!r}, examples={len(self._labels.examples)}, queries_left={queries_left}"
        return f"{type(self).__name__}({shown})"


_USUAL_SHOTS = 4
"""Examples that are shown where no prompt was chosen."""
_SHOWN = 10
"""Labels that a warning names."""


def _ready_for(
    run: PromptPATELabeler, strategy: StrategyLike, student: Student | None, escape_braces: object
) -> Student:
    """Checks the options of a selector over a run before the run charges anything; see `_ready`."""
    if not isinstance(run, PromptPATELabeler):
        raise fail("run", "a PromptPATELabeler", type(run).__name__)
    check_flag("escape_braces", escape_braces)
    return _ready(strategy, option_of("student", student, Student), run.engine, _task_of(run.result)[0])


def _warn_of_few_inputs(run: PromptPATELabeler, strategy: StrategyLike) -> None:
    """Warns, before the run charges anything, of too few inputs for a student's prompt, however they are labelled."""
    if strategy == "validated" and (count := len(run._items)) < 2:  # noqa: SLF001  not of the ledger
        msg = f"public_inputs: expected at least 2 that differ, one to show and one to hold back, found {count}"
        warn_caller(UserWarning(f"{msg}: no student's prompt can be chosen. Give more."))


def _ready(strategy: StrategyLike, student: Student, engine: Any, task: VotingTask) -> Student:
    """Checks strategy and student, and returns the student with its engine, which was called once."""
    check_strategy(strategy)
    if strategy != "validated":
        return student
    own = engine
    if student.llm is not None:
        own = as_choice_backend(student.llm, votes="text" if task.votes == "text" else None)
    _scorer_of(own, student, task)
    return student.replace(llm=own)


def _scorer_of(llm: Any, student: Student, task: VotingTask) -> tuple[VotingTask, LabelRows]:
    """Returns the task as the student is asked, and what scores its labels; calls the model once."""
    # Of several demonstrations the held-back labels choose; a prompt of one copies its label.
    is_usual = False if student.shots > 1 else None
    own, scorer, _ = reader_of(llm, task, is_wanted=is_usual if student.calibrate is None else student.calibrate)
    if student.calibrate and not scorer.calibrates:
        expected = "False or None where votes are texts, or no variable of the query is called 'input'"
        raise fail("Student.calibrate", expected, student.calibrate)
    return own, scorer


def _task_of(pool: LabelledPool) -> tuple[VotingTask, InputTemplate]:
    """Returns task and templates from a pool's plan, so that a loaded pool can choose a student."""
    plan: Mapping[str, Any] = pool.plan
    names = ("example_prompt", "prefix", "suffix", "example_separator", "verbalizers", "votes", "text_key")
    if missing := sorted(name for name in names if name not in plan):
        advice = "Use a pool of a PromptPATELabeler."
        raise fail("pool.plan", "the templates that its labels were asked with", f"{missing} missing", advice)
    texts = texts_of(pool.labels, plan["verbalizers"])
    check_choice("votes", plan["votes"], get_args(Votes))
    if not isinstance(plan["text_key"], str):
        raise fail("pool.plan", "text under 'text_key'", type(plan["text_key"]).__name__)
    # A pool without entries shows no fields: then those of the template are, as its labeler checked.
    found = {name for entry in pool.entries for name in entry.fields}
    fields = {plan["text_key"], pool.label_key, *(found or Template.of("example_prompt", plan["example_prompt"]).names)}
    wording = FewShotTemplate(
        example_prompt=plan["example_prompt"],
        suffix=plan["suffix"],
        prefix=plan["prefix"],
        separator=plan["example_separator"],
        fields=tuple(sorted(fields)),
        shown={pool.label_key: dict(pool.shown)},
    )
    variables = wording.input_variables
    is_possible = plan["votes"] != "text" and (len(variables) == 1 or "input" in variables)
    # Calibration replaces the query by a content-free input, which needs one variable or one called `input`.
    content_free: tuple[str, ...] = ()
    if is_possible:
        content_free = distinct_texts("content_free", plan.get("content_free_inputs", ()), least=0, empty=True)
    task = VotingTask(pool.labels, texts, wording, plan["votes"], content_free)
    return task, InputTemplate(wording, plan["text_key"], pool.label_key)


def _balanced(pool: LabelledPool, count: int) -> list[int]:
    """Returns the positions of up to `count` examples, with labels in turns, in the order of the pool."""
    turns: Counter[str | None] = Counter()
    ranked = []
    for place, entry in enumerate(pool.entries):
        if entry.label is not None:
            ranked.append((turns[entry.label], place))
            turns[entry.label] += 1
    return sorted(place for _, place in sorted(ranked)[:count])


def _labeler_of(pool: LabelledPool, labeler: PromptPATELabeler) -> PromptPATELabeler:
    """Returns the labeler if its share paid for the pool: one report must cover all labels."""
    if not isinstance(labeler, PromptPATELabeler):
        raise fail("labeler", "a PromptPATELabeler", type(labeler).__name__)
    if pool.report or pool.labelled or pool.rejected:
        paid, own = pool.report, labeler.result.report
        if other := [name for name in ("ledger_id", "component", "dataset_id") if paid.get(name) != own.get(name)]:
            advice = "Use a labeler of the same component, or save this pool and build another selector."
            raise fail("labeler", "the one whose share paid for the pool", f"differences in {other}", advice)
    return labeler


def _student_of(pool: LabelledPool) -> StudentChoice | None:
    """Returns the student choice of a pool, checked against its entries; None: there is none."""
    if pool.student is None:
        return None
    choice = StudentChoice.from_dict(pool.student)
    places = {*choice.held_back, *(place for candidate in choice.candidates for place in candidate.places)}
    if not all(place < len(pool.entries) and pool.entries[place].label is not None for place in places):
        raise ConfigurationError("student: expected places of labelled entries of this pool, found others.")
    return choice


def _text_of(entry: PoolEntry) -> str:
    """Returns the fields of an input as one text, for comparisons with queries."""
    return " ".join(entry.fields[name] for name in sorted(entry.fields))


def _public_entry(pool: LabelledPool, example: Mapping[str, str]) -> PoolEntry:
    """Returns an example with its public label as an entry of the pool."""
    key = pool.label_key
    if not isinstance(example, Mapping) or key not in example:
        shown = sorted(map(str, example)) if isinstance(example, Mapping) else type(example).__name__
        raise fail("example", f"a dict with the input's fields and its label under {key!r}", shown)
    fields = {name: value for name, value in example.items() if name != key}
    wanted = sorted(pool.entries[0].fields) if pool.entries else sorted(map(str, fields))
    if sorted(map(str, fields)) != wanted:
        raise fail("example", f"the fields {[*wanted, key]}", sorted(map(str, example)))
    known = {text: label for label, text in pool.shown.items()} | {label: label for label in pool.labels}
    value = example[key]
    label = known.get(value) if isinstance(value, str) else None
    if label is None:
        raise fail(f"example[{key!r}]", f"one of {pool.labels!r}", value)
    if any(entry.fields == fields and entry.label is not None for entry in pool.entries):
        raise fail("example", "an input without a label", "one that has a label in the pool already")
    return PoolEntry(fields=fields, label=label, status="public")
