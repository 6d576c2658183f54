"""Which examples of a labelled pool a prompt shows: ways to select among public examples, by LangChain's own selectors.

All of it is post-processing and free. Knows no record, no teacher, no budget, and which field is the label.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias, get_args

from langchain_core.embeddings import Embeddings
from langchain_core.example_selectors import (
    LengthBasedExampleSelector,
    MaxMarginalRelevanceExampleSelector,
    SemanticSimilarityExampleSelector,
)
from langchain_core.prompts import PromptTemplate
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore

from langchain_dpicl.asking import public_text, template_text
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy._validate import check_choice, check_int, fail

StrategyName: TypeAlias = Literal["validated", "similarity", "mmr", "length"]
Example: TypeAlias = dict[str, str]

_BY_VECTORS = ("similarity", "mmr")


class Strategy(Protocol):
    """Selects examples for a query. Public in, public out."""

    def prepare(self) -> None:
        """Embeds what has to be embedded, so that the first `select` need not."""

    async def aprepare(self) -> None:
        """Is `prepare`, awaitable."""

    def select(self, values: Mapping[str, Any]) -> list[Example]:
        """Returns copies of the examples to show for the caller's values, in the order of the prompt."""

    async def aselect(self, values: Mapping[str, Any]) -> list[Example]:
        """Is `select`, awaitable."""

    def add(self, example: Example, input_text: str) -> None:
        """Takes one more example of the pool."""

    async def aadd(self, example: Example, input_text: str) -> None:
        """Is `add`, awaitable."""


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
    """Refuses what `make_strategy` would refuse of its options, before there is a pool.

    Raises:
      ConfigurationError: an option is out of range, missing, or of another strategy.
    """
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
    """Returns a way to select among the examples of a pool. Calls no model: see `Strategy.prepare`.

    - "validated": the demonstrations of the best prompt that was tried, whatever is asked and added.
    - "similarity": the `k` examples whose inputs are most similar to the query, most similar first.
    - "mmr": `k` of the `fetch_k` most similar ones, each unlike those before it (maximal marginal relevance).
    - "length": the first examples of the pool that fit `max_length` together with the query.

    The stock selectors by vectors compare fields of the same names in query and example. Here the text of the input
    is embedded, and the caller's values: joined by a space, in the order of their names, if there are several.

    Args:
      strategy: one of these.
      pool_examples: the pool's examples.
      input_texts: the text of each example's input.
      chosen: for "validated": places in `pool_examples`.
      options: those of `check_strategy`: `k` and `fetch_k` for selection by vectors; `embeddings`, which are kept in
        memory, or a `vectorstore` for this pool alone, which embeds nothing again that it holds of the pool already;
        `example_prompt` (of one example), `max_length` (of query and examples together, without prefix and suffix) and
        `get_text_length` (None: words) for "length".

    Raises:
      ConfigurationError: an option is out of range, missing, or of another strategy.
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


class _Validated:
    """The demonstrations of the best prompt; more examples change them only where another prompt is chosen."""

    def __init__(self, chosen: list[Example]) -> None:
        self._chosen = chosen

    def prepare(self) -> None:
        pass

    async def aprepare(self) -> None:
        pass

    def select(self, values: Mapping[str, Any]) -> list[Example]:
        del values
        return _copies(self._chosen)

    async def aselect(self, values: Mapping[str, Any]) -> list[Example]:
        return self.select(values)

    def add(self, example: Example, input_text: str) -> None:
        pass

    async def aadd(self, example: Example, input_text: str) -> None:
        pass


class _ByLength:
    """The first examples that fit, by the stock selector."""

    def __init__(self, examples: Sequence[Example], *, example_prompt: Any, **options: Any) -> None:
        template = PromptTemplate.from_template(template_text("example_prompt", example_prompt))
        self._fields = set(template.input_variables)
        listed = [self._checked(example) for example in examples]
        self._selector = LengthBasedExampleSelector(examples=listed, example_prompt=template, **options)

    def prepare(self) -> None:
        pass

    async def aprepare(self) -> None:
        pass

    def select(self, values: Mapping[str, Any]) -> list[Example]:
        return _copies(self._selector.select_examples(_texts(values)))

    async def aselect(self, values: Mapping[str, Any]) -> list[Example]:
        return _copies(await self._selector.aselect_examples(_texts(values)))

    def add(self, example: Example, input_text: str) -> None:
        del input_text
        self._selector.add_example(self._checked(example))

    async def aadd(self, example: Example, input_text: str) -> None:
        self.add(example, input_text)

    def _checked(self, example: Example) -> Example:
        if missing := sorted(self._fields - set(example)):
            raise fail("example_prompt", f"a template with fields among {sorted(example)}", missing)
        return dict(example)


class _ByVectors:
    """The examples nearest to the query, by a stock selector over the inputs' texts."""

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

    def prepare(self) -> None:
        if waiting := dict(self._waiting):
            try:
                held = self._selector.vectorstore.get_by_ids(list(waiting))
            except NotImplementedError:
                held = []
            if texts := _without(waiting, held):
                self._selector.vectorstore.add_texts(*_columns(texts), ids=list(texts))
            self._done(waiting)

    async def aprepare(self) -> None:
        if waiting := dict(self._waiting):
            try:
                held = await self._selector.vectorstore.aget_by_ids(list(waiting))
            except NotImplementedError:
                held = []
            if texts := _without(waiting, held):
                await self._selector.vectorstore.aadd_texts(*_columns(texts), ids=list(texts))
            self._done(waiting)

    def select(self, values: Mapping[str, Any]) -> list[Example]:
        query = self._query(values)
        self.prepare()
        return self._ours(self._selector.select_examples(query)) if self._known else []

    async def aselect(self, values: Mapping[str, Any]) -> list[Example]:
        query = self._query(values)
        await self.aprepare()
        return self._ours(await self._selector.aselect_examples(query)) if self._known else []

    def add(self, example: Example, input_text: str) -> None:
        self._take(example, input_text)
        self.prepare()

    async def aadd(self, example: Example, input_text: str) -> None:
        self._take(example, input_text)
        await self.aprepare()

    def _take(self, example: Example, text: str) -> None:
        """Notes an example; the same one is embedded once."""
        fields = sorted(example)
        if self._known and fields != self._fields:
            raise fail("pool_examples", f"examples with the same fields, {self._fields}", fields)
        self._fields = fields
        # The id says what is stored, so that a store that outlives this process is not filled twice.
        named = json.dumps([text, sorted(example.items())])
        self._waiting[str(uuid.uuid5(uuid.NAMESPACE_OID, named))] = (text, dict(example))
        self._known[frozenset(example.items())] = dict(example)

    def _done(self, waiting: Iterable[str]) -> None:
        for name in waiting:
            self._waiting.pop(name, None)

    def _query(self, values: Mapping[str, Any]) -> dict[str, str]:
        """Returns the query's text; alone it is what the stock selector embeds, whatever its name."""
        texts = _texts(values)
        if not texts:
            advice = "A FewShotChatMessagePromptTemplate hands on only the variables in its input_variables."
            raise fail("values", "at least one value of the query", {}, advice)
        return {"query": " ".join(texts[name] for name in sorted(texts))}

    def _ours(self, found: Sequence[Mapping[str, Any]]) -> list[Example]:
        """Returns the examples, refusing what is no example of the pool: nobody released it."""
        # Stores add fields of their own, which are not shown.
        own = [{name: one[name] for name in self._fields if isinstance(one.get(name), str)} for one in found]
        examples = [self._known.get(frozenset(one.items())) for one in own]
        if None in examples:
            raise ConfigurationError(
                "vectorstore: expected a store with examples of this pool alone, found another document, which nobody "
                "released into prompts. Give an empty store or collection."
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
        found = "neither" if embeddings is None else "both"
        advice = "embeddings=OpenAIEmbeddings(...), for instance, keeps vectors in memory; or give an empty store."
        raise fail("embeddings, vectorstore", "one of them to select by similarity", found, advice)
    for name, value, kind in (("embeddings", embeddings, Embeddings), ("vectorstore", vectorstore, VectorStore)):
        if value is not None and not isinstance(value, kind):
            raise fail(name, f"an instance of LangChain's {kind.__name__}", type(value).__name__)


def _without(waiting: Mapping[str, tuple[str, Example]], held: Iterable[Any]) -> dict[str, tuple[str, Example]]:
    names = {document.id for document in held}
    return {name: item for name, item in waiting.items() if name not in names}


def _columns(items: Mapping[str, tuple[str, Example]]) -> tuple[list[str], list[dict[str, Any]]]:
    """Returns texts and metadata, as stores take them."""
    return [text for text, _ in items.values()], [dict(example) for _, example in items.values()]


def _refuse_unused(name: str, users: Sequence[str], **options: Any) -> None:
    for option, value in options.items():
        if value is not None and name not in users:
            raise fail(option, f"None with strategy {name!r} (it is for {' and '.join(users)})", type(value).__name__)


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    return {name: public_text(f"values[{name!r}]", value) for name, value in values.items()}


def _copies(examples: Iterable[Mapping[str, Any]]) -> list[Example]:
    return [dict(example) for example in examples]
