"""Selects the examples of a labelled pool that a prompt shows, with LangChain's example selectors."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias, get_args

from langchain_core.embeddings import Embeddings
from langchain_core.example_selectors import (
    LengthBasedExampleSelector,
    MaxMarginalRelevanceExampleSelector,
    SemanticSimilarityExampleSelector,
)
from langchain_core.prompts import PromptTemplate
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore
from typing_extensions import override

from langchain_dpicl.asking import public_text, template_text
from langchain_dpicl.backends.walk import Call, Walk, adrive, drive
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy._validate import check_choice, check_int, fail

StrategyName: TypeAlias = Literal["validated", "similarity", "mmr", "length"]
Example: TypeAlias = dict[str, str]

_BY_VECTORS = ("similarity", "mmr")


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


def check_strategy(
    strategy: StrategyName,
    *,
    k: int = 4,
    fetch_k: int = 20,
    embeddings: Embeddings | None = None,
    vectorstore: VectorStore | None = None,
    example_prompt: Any = None,
    max_length: int = 2048,
    get_text_length: Callable[[str], int] | None = None,
) -> None:
    """Checks the options of `make_strategy` before there is a pool."""
    check_choice("strategy", strategy, get_args(StrategyName))
    check_int("k", k, low=1)
    check_int("fetch_k", fetch_k, low=k if strategy == "mmr" else 1)
    check_int("max_length", max_length, low=1)
    _refuse_unused(strategy, _BY_VECTORS, embeddings=embeddings, vectorstore=vectorstore)
    _refuse_unused(strategy, ("length",), get_text_length=get_text_length)
    if strategy in _BY_VECTORS:
        _check_store(embeddings, vectorstore)
    elif strategy == "length":
        if example_prompt is None:
            raise fail("example_prompt", "the template of one example, to measure it", None)
        template_text("example_prompt", example_prompt)
        if get_text_length is not None and not callable(get_text_length):
            raise fail("get_text_length", "a function from text to its length", type(get_text_length).__name__)


def make_strategy(
    strategy: StrategyName,
    *,
    pool_examples: Sequence[Example],
    input_texts: Sequence[str],
    chosen: Sequence[int] = (),
    **options: Any,
) -> Strategy:
    """Returns a way to select among the examples of a pool. Calls no model; `Strategy.prepare` does.

    - "validated": the demonstrations of the best scored prompt, for every query.
    - "similarity": the `k` examples whose inputs are most similar to the query, most similar first.
    - "mmr": `k` of the `fetch_k` most similar ones, each unlike those before it (maximal marginal relevance).
    - "length": the first examples of the pool that fit `max_length` together with the query.

    LangChain's vector selectors compare equal field names of query and example. Here the text of the input is compared
    with the query's values: joined by a space, in the order of their names, if there are several.

    Args:
      strategy: one of these.
      pool_examples: the pool's examples.
      input_texts: the text of each example's input.
      chosen: for "validated": positions in `pool_examples`.
      options: those of `check_strategy`: `k` and `fetch_k` for selection by vectors; `embeddings`, whose vectors are
        kept in memory, or a `vectorstore` for this pool alone, which embeds only examples that it lacks;
        `example_prompt` (of one example), `max_length` (of query and examples together, without prefix and suffix) and
        `get_text_length` (None: words) for "length".
    """
    check_strategy(strategy, **options)
    if len(pool_examples) != len(input_texts):
        raise fail("input_texts", f"one for each of {len(pool_examples)} examples", len(input_texts))
    if strategy == "validated":
        last = len(pool_examples) - 1
        return _Validated([dict(pool_examples[check_int("chosen", place, low=0, high=last)]) for place in chosen])
    if strategy == "length":
        names = ("example_prompt", "max_length", "get_text_length")
        return _ByLength(pool_examples, **{name: options[name] for name in names if options.get(name) is not None})
    return _ByVectors(_selector(strategy, **options), pool_examples, input_texts)


class _Validated(Strategy):
    """The demonstrations of the chosen prompt, whatever examples are added."""

    def __init__(self, chosen: list[Example]) -> None:
        self._chosen = chosen

    @override
    def select(self, values: Mapping[str, Any]) -> list[Example]:
        return _copies(self._chosen)


class _ByLength(Strategy):
    """The first examples that fit, by LangChain's length-based selector."""

    def __init__(self, examples: Sequence[Example], *, example_prompt: Any, **options: Any) -> None:
        template = PromptTemplate.from_template(template_text("example_prompt", example_prompt))
        self._fields = set(template.input_variables)
        listed = [self._checked(example) for example in examples]
        self._selector = LengthBasedExampleSelector(examples=listed, example_prompt=template, **options)

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
        drive(self._embed())

    @override
    async def aprepare(self) -> None:
        await adrive(self._embed())

    @override
    def select(self, values: Mapping[str, Any]) -> list[Example]:
        return drive(self._nearest(values))

    @override
    async def aselect(self, values: Mapping[str, Any]) -> list[Example]:
        return await adrive(self._nearest(values))

    @override
    def add(self, example: Example, input_text: str) -> None:
        self._take(example, input_text)
        self.prepare()

    @override
    async def aadd(self, example: Example, input_text: str) -> None:
        self._take(example, input_text)
        await self.aprepare()

    def _embed(self) -> Walk[None]:
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

    def _nearest(self, values: Mapping[str, Any]) -> Walk[list[Example]]:
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


def _selector(
    strategy: str,
    *,
    k: int = 4,
    fetch_k: int = 20,
    embeddings: Embeddings | None = None,
    vectorstore: VectorStore | None = None,
    **_others: Any,
) -> SemanticSimilarityExampleSelector | MaxMarginalRelevanceExampleSelector:
    store = InMemoryVectorStore(embeddings) if embeddings is not None else vectorstore
    if strategy == "similarity":
        return SemanticSimilarityExampleSelector(vectorstore=store, k=k)
    return MaxMarginalRelevanceExampleSelector(vectorstore=store, k=k, fetch_k=fetch_k)


def _check_store(embeddings: Any, vectorstore: Any) -> None:
    if (embeddings is None) == (vectorstore is None):
        given_stores = "neither" if embeddings is None else "both"
        advice = "embeddings=OpenAIEmbeddings(...), for instance, keeps vectors in memory; or give an empty store."
        raise fail("embeddings, vectorstore", "one of them to select by similarity", given_stores, advice)
    for name, value, kind in (("embeddings", embeddings, Embeddings), ("vectorstore", vectorstore, VectorStore)):
        if value is not None and not isinstance(value, kind):
            raise fail(name, f"an instance of LangChain's {kind.__name__}", type(value).__name__)


def _without(waiting: Mapping[str, tuple[str, Example]], documents: Iterable[Any]) -> dict[str, tuple[str, Example]]:
    names = {document.id for document in documents}
    return {name: item for name, item in waiting.items() if name not in names}


def _columns(items: Mapping[str, tuple[str, Example]]) -> tuple[list[str], list[dict[str, Any]]]:
    """Returns texts and metadata, the arguments of `add_texts`."""
    return [text for text, _ in items.values()], [dict(example) for _, example in items.values()]


def _refuse_unused(name: str, users: Sequence[str], **options: Any) -> None:
    for option, value in options.items():
        if value is not None and name not in users:
            raise fail(option, f"None with strategy {name!r} (it is for {' and '.join(users)})", type(value).__name__)


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    return {name: public_text(f"values[{name!r}]", value) for name, value in values.items()}


def _copies(examples: Iterable[Mapping[str, Any]]) -> list[Example]:
    return [dict(example) for example in examples]
