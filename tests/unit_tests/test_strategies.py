"""Strategies over a labelled pool: what is embedded, what is shown, and that stock selectors do the selecting."""

from __future__ import annotations

import asyncio

import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.messages import HumanMessage
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.vectorstores import InMemoryVectorStore

from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.options import ByLength, Similar
from langchain_dpicl.pate.example_selector import check_strategy, make_strategy

WORDS = ("card", "cash", "coin", "lost")
TEXTS = ("lost card", "card card lost", "cash", "coin {x}")
POOL = [{"text": text, "queue": label} for text, label in zip(TEXTS, ("A", "A", "B", "coin"), strict=True)]
# By hand: cosines of (card, cash, coin, lost) counts with "my card": .71, .89, 0, 0.
NEAR_CARD = [POOL[1], POOL[0]]
TWINS = [{"text": text, "queue": "A"} for text in ("card", "card a", "card lost")]


class Counting(Embeddings):
    """Counts words; remembers what it embedded, and how."""

    def __init__(self):
        self.documents, self.queries, self.awaited = [], [], []

    def embed_documents(self, texts):
        self.documents += texts
        return [vector(text) for text in texts]

    def embed_query(self, text):
        self.queries.append(text)
        return vector(text)

    async def aembed_documents(self, texts):
        self.awaited += texts
        return [vector(text) for text in texts]

    async def aembed_query(self, text):
        self.awaited.append(text)
        return vector(text)


class WithoutIds(InMemoryVectorStore):
    """A store that cannot be asked for what it holds."""

    def get_by_ids(self, ids, /):
        raise NotImplementedError

    async def aget_by_ids(self, ids, /):
        raise NotImplementedError


class WithOwnFields(InMemoryVectorStore):
    """A store that adds a field of its own to what it gives back."""

    def similarity_search(self, query, k=4, **kwargs):
        found = super().similarity_search(query, k, **kwargs)
        return [Document(page_content=one.page_content, metadata={**one.metadata, "_id": "7"}) for one in found]


def vector(text):
    # The last number keeps texts without any of the words apart from nothing.
    return [*(float(text.split().count(word)) for word in WORDS), 1e-3]


def strategy(how, *, pool=POOL, **options):
    defaults = {"pool_examples": pool, "input_texts": [example["text"] for example in pool]}
    return make_strategy(how, **(defaults | options))


async def selected(made, values, way):
    return made.select(values) if way == "blocking" else await made.aselect(values)


WAYS = pytest.mark.parametrize("way", ["blocking", "awaited"])
BY_VECTORS = pytest.mark.parametrize("fetched", [None, 20], ids=["similarity", "mmr"])


class TestValidated:
    @WAYS
    async def test_it_shows_the_chosen_ones_in_their_order_whatever_is_asked(self, way):
        made = strategy("validated", chosen=(3, 0))
        for values in ({"input": "cash"}, {}, {"question": 3}):
            assert await selected(made, values, way) == [POOL[3], POOL[0]]

    @WAYS
    async def test_what_is_added_waits_for_another_choice(self, way):
        made = strategy("validated", chosen=(2,))
        made.add({"text": "new", "queue": "A"}, "new")
        assert await selected(made, {}, way) == [POOL[2]]

    @pytest.mark.parametrize("place", [4, -1, True, "0"])
    def test_it_knows_no_other_places(self, place):
        with pytest.raises(ConfigurationError, match="chosen"):
            strategy("validated", chosen=(place,))


class TestByVectors:
    @WAYS
    async def test_the_most_similar_inputs_come_first(self, way):
        made = strategy(Similar(Counting(), k=2))
        assert await selected(made, {"input": "my card"}, way) == NEAR_CARD
        assert (await selected(made, {"input": "cash"}, way))[0] == POOL[2]

    @BY_VECTORS
    def test_the_inputs_text_alone_is_embedded_whatever_the_label_and_the_querys_name(self, fetched):
        embeddings = Counting()
        made = strategy(Similar(embeddings, k=1, fetch_k=fetched))
        # Were the label embedded as well, "coin" would be nearest here for the stock reason: fields in common.
        assert made.select({"question": "coin"}) == [POOL[3]]
        assert sorted(embeddings.documents) == sorted(TEXTS)
        assert embeddings.queries == ["coin"]

    @BY_VECTORS
    @WAYS
    async def test_several_values_are_joined_in_the_order_of_their_names(self, fetched, way):
        embeddings = Counting()
        made = strategy(Similar(embeddings, fetch_k=fetched))
        await selected(made, {"topic": "cash", "input": HumanMessage("my card"), "b": 7}, way)
        assert (embeddings.queries + embeddings.awaited[len(TEXTS) :]) == ["7 my card cash"]

    @BY_VECTORS
    async def test_awaited_calls_embed_without_blocking(self, fetched):
        embeddings = Counting()
        made = strategy(Similar(embeddings, fetch_k=fetched))
        await made.aselect({"input": "a"})
        made.add({"text": "new", "queue": "A"}, "new")
        await made.aselect({"input": "b"})
        assert embeddings.awaited == [*TEXTS, "a", "new", "b"]
        assert (embeddings.documents, embeddings.queries) == ([], [])

    @BY_VECTORS
    @WAYS
    async def test_inputs_are_embedded_once_and_not_before_they_are_needed(self, fetched, way):
        embeddings = Counting()
        made = strategy(Similar(embeddings, fetch_k=fetched))
        assert embeddings.documents == []
        for _ in range(2):
            await selected(made, {"input": "a"}, way)
        assert embeddings.documents + embeddings.awaited == [*TEXTS, *(["a", "a"] if way == "awaited" else [])]

    def test_relevant_examples_that_are_like_each_other_give_way(self):
        # By hand: cosines .95, .95 and .89; less half of 1 and .71 after the first, .03 below and .09 above zero.
        query = {"input": "card card card lost"}
        nearest = strategy(Similar(Counting(), k=2), pool=TWINS).select(query)
        assert TWINS[2] not in nearest
        found = strategy(Similar(Counting(), k=2, fetch_k=3), pool=TWINS).select(query)
        assert TWINS[2] in found
        assert len(found) == 2

    def test_only_the_nearest_ones_are_chosen_from(self):
        made = strategy(Similar(Counting(), k=2, fetch_k=2), pool=TWINS)
        assert TWINS[2] not in made.select({"input": "card card card lost"})

    @BY_VECTORS
    async def test_what_is_added_is_selected(self, fetched):
        made = strategy(Similar(Counting(), k=1, fetch_k=fetched))
        new, newer = {"text": "cash lost", "queue": "B"}, {"text": "coin coin lost lost", "queue": "B"}
        made.add(new, new["text"])
        made.add(newer, newer["text"])
        assert made.select({"input": "lost cash"}) == [new]
        assert await made.aselect({"input": "coin lost"}) == [newer]

    @BY_VECTORS
    @WAYS
    async def test_an_empty_pool_shows_nothing_until_there_is_something(self, fetched, way):
        made = strategy(Similar(Counting(), fetch_k=fetched), pool=[])
        assert await selected(made, {"input": "card"}, way) == []
        made.add(POOL[0], POOL[0]["text"])
        assert await selected(made, {"input": "card"}, way) == [POOL[0]]

    @BY_VECTORS
    def test_more_than_there_are_gives_all_and_the_same_example_once(self, fetched):
        made = strategy(Similar(Counting(), k=9, fetch_k=fetched), pool=[*POOL, POOL[0]])
        found = made.select({"input": "card"})
        assert sorted(found, key=str) == sorted(POOL, key=str)
        assert [list(example) for example in found] == [["text", "queue"]] * 4

    @WAYS
    async def test_a_store_that_outlives_the_process_is_not_filled_twice(self, way):
        embeddings = Counting()
        store = InMemoryVectorStore(embeddings)
        for _ in range(2):
            made = strategy(Similar(store, k=9))
            assert len(await selected(made, {"input": "card"}, way)) == 4
        assert embeddings.documents + [text for text in embeddings.awaited if text != "card"] == list(TEXTS)

    @WAYS
    async def test_a_store_that_cannot_tell_what_it_holds_is_filled_once(self, way):
        embeddings = Counting()
        made = strategy(Similar(WithoutIds(embeddings), k=2))
        for _ in range(2):
            assert await selected(made, {"input": "my card"}, way) == NEAR_CARD
        assert embeddings.documents + [text for text in embeddings.awaited if text != "my card"] == list(TEXTS)

    def test_fields_that_a_store_adds_are_not_shown(self):
        made = strategy(Similar(WithOwnFields(Counting()), k=2))
        assert made.select({"input": "my card"}) == NEAR_CARD

    @BY_VECTORS
    @WAYS
    @pytest.mark.parametrize(
        "fields",
        [{"text": "card", "queue": "secret"}, {"text": ["card"], "queue": None}, {"source": "private.pdf"}],
        ids=["like", "no text", "unlike"],
    )
    async def test_a_document_that_is_no_example_of_the_pool_is_never_shown(self, fetched, way, fields):
        store = InMemoryVectorStore(Counting())
        store.add_texts(["card"], [fields])
        made = strategy(Similar(store, fetch_k=fetched))
        with pytest.raises(ConfigurationError, match="vectorstore") as caught:
            await selected(made, {"input": "card"}, way)
        assert "secret" not in str(caught.value)
        assert caught.value.__cause__ is None

    @BY_VECTORS
    @WAYS
    async def test_a_query_without_values_says_how_chat_templates_hand_them_on(self, fetched, way):
        with pytest.raises(ConfigurationError, match="input_variables"):
            await selected(strategy(Similar(Counting(), fetch_k=fetched)), {}, way)

    def test_a_failure_to_embed_is_tried_again(self):
        class Failing(Counting):
            fails = 1

            def embed_documents(self, texts):
                if self.fails:
                    self.fails -= 1
                    raise ConnectionError
                return super().embed_documents(texts)

        made = strategy(Similar(Failing(), k=2))
        with pytest.raises(ConnectionError):
            made.select({"input": "my card"})
        assert made.select({"input": "my card"}) == NEAR_CARD

    async def test_first_queries_at_once_get_the_same_examples(self):
        made = strategy(Similar(Counting(), k=9))
        found = await asyncio.gather(*(made.aselect({"input": "my card"}) for _ in range(5)))
        assert [one[:2] for one in found] == [NEAR_CARD] * 5
        assert {len(one) for one in found} == {4}

    def test_examples_with_other_fields_are_refused(self):
        with pytest.raises(ConfigurationError, match="same fields"):
            strategy(Similar(Counting()), pool=[POOL[0], {"text": "a"}])

    @pytest.mark.parametrize(
        "embeddings", [None, "openai", InMemoryVectorStore, 3], ids=["neither", "a name", "a class", "a number"]
    )
    def test_what_cannot_select_is_refused_before_there_is_a_pool(self, embeddings):
        with pytest.raises(ConfigurationError, match="Embeddings, or a VectorStore"):
            check_strategy(Similar(embeddings))
        with pytest.raises(ConfigurationError, match="Embeddings, or a VectorStore"):
            strategy(Similar(embeddings))


class TestByLength:
    @WAYS
    @pytest.mark.parametrize(("words", "count"), [(4, 0), (5, 1), (9, 2), (11, 3), (14, 4)])
    async def test_the_first_examples_that_fit_beside_the_query_are_shown(self, way, words, count):
        # Words, by hand: query 2, examples 3, 4, 2, 3.
        made = strategy(ByLength(max_length=words), example_prompt="{text} {queue}")
        assert await selected(made, {"input": "a b"}, way) == POOL[:count]

    @WAYS
    async def test_the_callers_measure_counts(self, way):
        template = PromptTemplate.from_template("{text}")
        made = strategy(ByLength(max_length=1 + 9 + 14, get_text_length=len), example_prompt=template)
        assert await selected(made, {"input": HumanMessage("x")}, way) == POOL[:2]
        assert await selected(made, {"input": "xx"}, way) == POOL[:1]

    def test_what_is_added_comes_last(self):
        made = strategy(ByLength(), example_prompt="{text}")
        made.add({"text": "{new", "queue": "A"}, "{new")
        made.add({"text": "newer", "queue": "A"}, "newer")
        assert [example["text"] for example in made.select({})] == [*TEXTS, "{new", "newer"]
        with pytest.raises(ConfigurationError, match="example_prompt"):
            made.add({"queue": "A"}, "")

    @pytest.mark.parametrize("template", [None, ChatPromptTemplate.from_messages([("human", "{text}")])])
    def test_only_a_template_of_text_measures(self, template):
        with pytest.raises(ConfigurationError, match="example_prompt"):
            strategy(ByLength(), example_prompt=template)

    def test_a_measure_that_is_no_function_is_refused_before_there_is_a_pool(self):
        with pytest.raises(ConfigurationError, match="get_text_length"):
            check_strategy(ByLength(get_text_length=3))

    def test_a_field_that_langchain_has_its_own_use_for_is_read(self):
        """Labels may be called so; their template is read behind the last paid one."""
        pool = [{"text": "a b", "stop": "card"}, {"text": "c", "stop": "transfer"}]
        made = make_strategy(
            ByLength(max_length=4), pool_examples=pool, input_texts=["a b", "c"], example_prompt="{text} {stop}"
        )
        made.add({"text": "d", "stop": "fees"}, "d")
        assert made.select({"input": "x"}) == pool[:1]
        assert made.select({"input": ""}) == pool[:1]

    def test_a_template_with_a_field_that_examples_lack_is_refused(self):
        with pytest.raises(ConfigurationError, match="title"):
            strategy(ByLength(), example_prompt="{text} {title}")


class TestAll:
    OPTIONS = (
        ("validated", {"chosen": (0,)}),
        (Similar(Counting()), {}),
        (Similar(Counting(), fetch_k=20), {}),
        (ByLength(), {"example_prompt": "{text}"}),
    )

    @pytest.mark.parametrize(("how", "options"), OPTIONS)
    @WAYS
    async def test_what_is_shown_is_a_copy(self, how, options, way):
        pool = [dict(example) for example in POOL]
        made = strategy(how, pool=pool, **options)
        pool[0]["queue"] = "changed"
        for _ in range(2):
            found = await selected(made, {"input": "lost card"}, way)
            assert POOL[0] in found
            for example in found:
                example["queue"] = "changed"

    @pytest.mark.parametrize("name", ["random", "similarity", "", None])
    def test_no_other_strategy_is_known(self, name):
        with pytest.raises(ConfigurationError, match="strategy"):
            strategy(name)

    def test_every_example_has_its_text(self):
        with pytest.raises(ConfigurationError, match="input_texts"):
            make_strategy("validated", pool_examples=POOL, input_texts=["a"])
