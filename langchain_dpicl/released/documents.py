"""Released synthetic documents with their privacy report, as a value, a JSON file and a vector store."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore, VectorStoreRetriever
from typing_extensions import override

from langchain_dpicl.backends.rows.neighbour_rows import LocalEmbeddings
from langchain_dpicl.backends.sync_async import Call, EffectGenerator, run_async, run_sync
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy._validate import check_int, check_name, check_real, fail
from langchain_dpicl.privacy.extensions.value_counts import words_of
from langchain_dpicl.privacy.extensions.word_release import denied_words
from langchain_dpicl.released.base import FileForm, Released, listed, release_id
from langchain_dpicl.released.counts import WordGroup, group_of, without_words, word_groups

FORMAT = "langchain-dpicl/synthetic-documents"
VERSION = 2

_LARGEST = 2**53


@dataclass(frozen=True, slots=True)
class SyntheticText:
    """One synthetic document.

    Attributes:
      text: the content.
      topic: the released keyword that it was generated for.
      number: its index among the texts of the topic.
    """

    text: str
    topic: str
    number: int

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise fail("text", "text", type(self.text).__name__)
        check_name("topic", self.topic)
        check_int("number", self.number, low=0)

    def document(self, release: str, blocks: Mapping[str, Any] | None = None) -> Document:
        """Returns the LangChain document: with `topic`, `number` and `release` as metadata and a stable id.

        Args:
          release: name of the release.
          blocks: further metadata: what a run on a stream read, see `blocks_of`.
        """
        metadata = {"topic": self.topic, "number": self.number, "release": release, **(blocks or {})}
        # A UUID, because some stores accept no other ids.
        named = uuid.uuid5(uuid.NAMESPACE_URL, f"{FORMAT}/{release}/{self.number}/{self.topic}")
        return Document(id=str(named), page_content=self.text, metadata=metadata)


@dataclass(frozen=True)
class SyntheticDocuments(Released):
    """Synthetic documents and released words by topic, with the topics' noisy counts and their privacy report.

    Formal guarantees:
      - Holds public values only: indexing, searching, copying, printing, saving and filtering it is free
        post-processing.

    Args:
      texts: the documents, in the order of their topics.
      topics: (keyword, noisy count of the units that hold it) pairs, the largest count first; of topics that are
        released words, their noisy sums of weights. A unit may count for several, and belongs to the rarest alone.
      report: JSON-able privacy report.
      plan: JSON-able public plan.
      words: a `WordGroup` for each topic that has words, whose label is the topic.

    Raises:
      ConfigurationError: a value is of another type, a topic is unknown, or a document occurs twice.

    Example:
      >>> text = SyntheticText("a card payment was declined", "card", 0)
      >>> report = {"private": True, "epsilon": 1.0}
      >>> store = SyntheticDocuments((text,), (("card", 120),), report, {}).to_vector_store()
      >>> store.as_retriever().invoke("why was my card declined?")[0].metadata["topic"]
      'card'
    """

    _FORM = FileForm(
        "synthetic documents", FORMAT, VERSION, frozenset({"documents", "topics", "topic_words", "plan", "report"})
    )

    texts: tuple[SyntheticText, ...]
    topics: tuple[tuple[str, float], ...]
    report: Mapping[str, Any]
    plan: Mapping[str, Any]
    words: tuple[WordGroup, ...] = ()

    def __post_init__(self) -> None:
        texts, topics = listed("texts", self.texts), tuple(map(_topic, listed("topics", self.topics)))
        names = [topic for topic, _ in topics]
        if not all(isinstance(text, SyntheticText) for text in texts):
            raise fail("texts", "SyntheticText, each of them", [type(text).__name__ for text in texts][:3])
        places = [(text.topic, text.number) for text in texts]
        if len(set(names)) != len(names) or len(set(places)) != len(places) or not {t for t, _ in places} <= set(names):
            raise fail("texts, topics", "distinct documents of distinct listed topics", names)
        words = word_groups("words", self.words)
        labels = [group.label for group in words]
        if len(set(labels)) != len(labels) or not set(labels) <= set(names):
            raise fail("words", "one group of a listed topic each", labels)
        object.__setattr__(self, "words", words)
        object.__setattr__(self, "texts", texts)
        object.__setattr__(self, "topics", topics)
        self._copy_public("report", "plan")
        blocks_of(self.report)  # refuses another form

    def __len__(self) -> int:
        """Returns how many documents there are: texts, and one for each topic whose words were released."""
        return len(self.texts) + len(self.words)

    @property
    def release_id(self) -> str:
        """Public name of this release, of 12 hexadecimal digits; ids of documents contain it."""
        return release_id(self.report, self.topics)

    @property
    def documents(self) -> list[Document]:
        """The non-empty documents, with `topic` and `release` as metadata and stable ids: words, then texts.

        The words of a topic are one document: the topic, its words and, a line each, its pairs. It says which words
        belong to the topic, not how: a model that writes sentences from it makes the rest up. Its `kind` is "words";
        a text has its `number` instead. Documents of a stream have its first and last block, `first_block` and
        `last_block`, by which a retriever may leave old ones out.
        """
        release, blocks = self.release_id, blocks_of(self.report)
        of_words = [_of_words(group, release, blocks) for group in self.words]
        return of_words + [text.document(release, blocks) for text in self.texts if text.text.strip()]

    def filtered(self, keep: Callable[[Document], bool]) -> SyntheticDocuments:
        """Returns the documents that pass a test; free, also if the test calls public models.

        Args:
          keep: the test, for instance a model's judgement whether the text is about its topic.
        """
        release, blocks = self.release_id, blocks_of(self.report)
        passed = tuple(text for text in self.texts if keep(text.document(release, blocks)))
        words = tuple(group for group in self.words if keep(_of_words(group, release, blocks)))
        return dataclasses.replace(self, texts=passed, words=words)

    def without(self, words: Iterable[str]) -> SyntheticDocuments:
        """Returns what is left without some released words, the pairs that hold them and topics of their name.

        Texts stay as they are, but those of a topic that is left out; free post-processing. Where a topic is left out,
        the release and all documents have other ids: put them into a new store.

        Args:
          words: to take out, compared as they were counted: without case. An entry stands for each of its words.

        Raises:
          ConfigurationError: an entry is no text or has no word, or there are too many.
        """
        gone = frozenset(denied_words(words, "words"))
        topics = tuple(pair for pair in self.topics if gone.isdisjoint(words_of(pair[0])))
        names = {topic for topic, _ in topics}
        return dataclasses.replace(
            self,
            topics=topics,
            texts=tuple(text for text in self.texts if text.topic in names),
            words=tuple(without_words(group, gone) for group in self.words if group.label in names),
        )

    def to_vector_store(self, store: VectorStore | None = None, *, embedding: Embeddings | None = None) -> VectorStore:
        """Adds the documents to a vector store under stable ids.

        Documents that the store already has are not added again; a store without `get_by_ids` is given all of them.

        Args:
          store: any LangChain vector store with its embeddings; None: a new one in memory.
          embedding: embeddings of the new store; None: `LocalEmbeddings`, without network.

        Raises:
          ConfigurationError: both are given, or `store` is not a vector store.
        """
        return run_sync(self._added(store, embedding))

    async def ato_vector_store(
        self, store: VectorStore | None = None, *, embedding: Embeddings | None = None
    ) -> VectorStore:
        """Async version of `to_vector_store`."""
        return await run_async(self._added(store, embedding))

    def _added(self, store: VectorStore | None, embedding: Embeddings | None) -> EffectGenerator[VectorStore]:
        store = _check_store(store, embedding)
        ids = [str(document.id) for document in self.documents]
        try:
            stored = yield Call(partial(store.get_by_ids, ids), partial(store.aget_by_ids, ids))
        except NotImplementedError:  # a store without lookup by id
            stored = []
        # Some stores raise for an id that they already have. Ids are stable, so equal ids are equal documents.
        known = {document.id for document in stored}
        if documents := [document for document in self.documents if document.id not in known]:
            new = {"ids": [str(document.id) for document in documents]}
            yield Call(partial(store.add_documents, documents, **new), partial(store.aadd_documents, documents, **new))
        return store

    def as_retriever(self, *, embedding: Embeddings | None = None, **search: Any) -> VectorStoreRetriever:
        """Returns a stock retriever over the documents, in memory.

        Args:
          embedding: as for `to_vector_store`.
          **search: of `VectorStore.as_retriever`: `search_type`, `search_kwargs`.
        """
        return self.to_vector_store(embedding=embedding).as_retriever(**search)

    def _state(self) -> dict[str, Any]:
        return {
            "documents": [dataclasses.asdict(text) for text in self.texts],
            "topics": [list(pair) for pair in self.topics],
            "topic_words": [group.to_dict() for group in self.words],
            "plan": self.plan,
            "report": self.report,
        }

    @classmethod
    def _of_state(cls, state: Mapping[str, Any]) -> Self:
        return cls(
            tuple(map(text_of, listed("documents", state["documents"]))),
            state["topics"],
            state["report"],
            state["plan"],
            tuple(map(group_of, listed("topic_words", state["topic_words"]))),
        )


def blocks_of(report: Mapping[str, Any]) -> dict[str, str]:
    """Returns the first and the last block of a stream that a release read, by name; nothing of another release."""
    reads = report.get("reads")
    if reads is None:
        return {}
    if not isinstance(reads, Mapping) or not all(isinstance(reads.get(name), str) for name in ("first", "last")):
        raise fail("report.reads", "the first and the last block of a run, by name", type(reads).__name__)
    return {"first_block": reads["first"], "last_block": reads["last"]}


def _of_words(group: WordGroup, release: str, blocks: Mapping[str, str]) -> Document:
    """Returns the document of a topic's words; its id depends on them."""
    text = group.text()
    named = uuid.uuid5(uuid.NAMESPACE_URL, f"{FORMAT}/{release}/words/{text}")
    metadata = {"topic": group.label, "kind": "words", "release": release, **blocks}
    return Document(id=str(named), page_content=text, metadata=metadata)


def text_of(item: Any) -> SyntheticText:
    """Returns one document from its JSON form."""
    names = {field.name for field in dataclasses.fields(SyntheticText)}
    if not isinstance(item, Mapping) or set(item) != names:
        raise ConfigurationError(f"documents: expected objects with {sorted(names)}, found another.")
    return SyntheticText(**item)


def _topic(pair: Any) -> tuple[str, float]:
    if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
        raise ConfigurationError("topics: expected pairs of a keyword and a number, found something else.")
    name, count = check_name("topic", pair[0]), pair[1]
    if isinstance(count, float):  # a sum of weights
        return name, check_real("topics", count, low=0.0, high=float(_LARGEST))
    return name, check_int("topics", count, low=-_LARGEST, high=_LARGEST)


class _Store(InMemoryVectorStore):
    """Finds nothing near texts of which the embeddings tell nothing, as of one without a word: the stock one raises.

    That goes for questions and for documents. Its public searches, also those for diverse documents, come here.
    """

    @override
    def _similarity_search_with_score_by_vector(
        self,
        embedding: list[float],
        k: int = 4,
        filter: Callable[[Document], bool] | None = None,
    ) -> list[tuple[Document, float, list[float]]]:
        def is_near(document: Document) -> bool:
            return any(self.store[str(document.id)]["vector"]) and (filter is None or filter(document))

        return super()._similarity_search_with_score_by_vector(embedding, k, is_near) if any(embedding) else []


def _check_store(store: Any, embedding: Any) -> VectorStore:
    if store is None:
        return _Store(LocalEmbeddings() if embedding is None else embedding)
    if not isinstance(store, VectorStore):
        advice = "Make it first, with its embeddings: FAISS(...), Chroma(...), InMemoryVectorStore(...)."
        raise fail("store", "a LangChain vector store", type(store).__name__, advice)
    if embedding is not None:
        raise fail("embedding", "None together with store, which has its own", type(embedding).__name__)
    return store
