"""An engine whose model has a process of its own keeps the contract of engines, with the bits of the same model here."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from langsmith import traceable

from langchain_dpicl import EmbeddedLLM
from langchain_dpicl.backends import PrivateProcess
from langchain_dpicl.backends.base import (
    ChoiceBackend,
    FullBackend,
    NextTokenBackend,
    PublicChoiceBackend,
    RowHint,
    TextBackend,
)
from langchain_dpicl.backends.private_calls.call import OpaqueValue
from langchain_dpicl.backends.private_calls.embeddings import SilentEmbeddings
from langchain_dpicl.backends.private_process.connection import Connection
from langchain_dpicl.backends.resolve import as_backend, as_choice_backend, as_embeddings, as_text_backend, recipients
from langchain_dpicl.backends.rows.answer_rows import AnswerRows
from langchain_dpicl.backends.rows.label_rows import FirstTokenBackend, LabelRows, OtherBackend
from langchain_dpicl.backends.rows.neighbour_rows import LocalEmbeddings, NearestRows, SimilarTexts
from langchain_dpicl.exceptions import CapabilityError, ConfigurationError, ModelCallError, UnsilencableModelError
from tests import process_models
from tests.contracts.backend import HOSTILE, PROMPTS, ChoiceContract, NextTokenContract, TextContract, same_bits
from tests.forked_starts import nursery, quick_starts  # noqa: F401  fixtures
from tests.unit_tests.backends.rows.test_answer_rows import Echo

pytestmark = pytest.mark.usefixtures("quick_starts")


@functools.cache
def shared(maker: Any, **arguments: Any) -> PrivateProcess:
    """One process for all tests of a model."""
    return PrivateProcess(maker, **arguments)


@pytest.fixture(scope="module", autouse=True)
def _closes() -> Iterator[None]:
    made: list[PrivateProcess] = []
    yield
    made.clear()
    shared.cache_clear()


class TestEmbeddedTokens(NextTokenContract):
    unknown_token = 10**6

    def make(self) -> NextTokenBackend:
        return as_backend(shared(EmbeddedLLM))


class TestEmbeddedChoices(ChoiceContract):
    def make(self) -> Any:
        return as_choice_backend(shared(EmbeddedLLM))


class TestEmbeddedTexts(TextContract):
    def make(self) -> TextBackend:
        return as_text_backend(shared(EmbeddedLLM))


class TestTopTokens(NextTokenContract):
    unknown_token = b"never"
    failing_prompt = "this one fails"

    def make(self) -> NextTokenBackend:
        return as_backend(shared(process_models.copier, max_top_k=5))


class TestLangChainTokens(NextTokenContract):
    unknown_token = b"never"
    prompts = tuple(prompt for prompt in PROMPTS if prompt)

    def make(self) -> NextTokenBackend:
        return as_backend(shared(process_models.completion))


class TestTextVotes(ChoiceContract):
    choices = ("red", "blue", "red and blue")

    def make(self) -> Any:
        return as_choice_backend(shared("tests.process_models:writer"))

    def test_a_longer_choice_is_no_likelier_than_its_beginning(self, engine: Any) -> None:
        pytest.skip("text votes are for whole answers")


def test_it_can_do_what_the_engine_there_can() -> None:
    embedded, votes = as_backend(shared(EmbeddedLLM)), as_choice_backend(shared("tests.process_models:writer"))
    wanted = {NextTokenBackend: True, ChoiceBackend: True, TextBackend: True, PublicChoiceBackend: False}
    assert {kind: isinstance(embedded, kind) for kind in wanted} == wanted
    assert not isinstance(embedded, FullBackend)
    assert isinstance(as_backend(shared(process_models.full)), FullBackend)
    written: Any = as_choice_backend(shared(process_models.completion))
    assert isinstance(written, FirstTokenBackend)
    expected = as_choice_backend(process_models.completion()).first_tokens(PROMPTS[0])
    assert written.first_tokens(PROMPTS[0]) == asyncio.run(written.afirst_tokens(PROMPTS[0])) == expected
    assert isinstance(votes, OtherBackend)
    assert not isinstance(votes, NextTokenBackend)
    assert embedded.row_hint == getattr(EmbeddedLLM().backend, "row_hint", RowHint())


def test_it_says_whether_the_tokenizer_there_is_known() -> None:
    engine: Any = as_backend(shared(process_models.chat))
    with pytest.raises(CapabilityError, match=r"the tokenizer of .* is unknown"):
        engine.spell(" red")
    there: Any = as_backend(shared(process_models.completion))
    speechless: Any = as_backend(shared(process_models.cutter))
    assert not hasattr(speechless, "spell")
    assert (engine.is_chat, there.is_chat, speechless.is_chat) == (True, False, True)


@pytest.mark.parametrize("place", ["tokens", "choices", "texts"])
def test_rows_are_those_of_the_same_model_in_this_process(place: str) -> None:
    there, here = shared(EmbeddedLLM).engine(place), EmbeddedLLM().backend
    prompts = [*PROMPTS, *HOSTILE]
    if place == "tokens":
        domain = [token for token, _ in here.top_tokens(PROMPTS[0], [], top_k=40)]
        assert there.top_tokens(PROMPTS[0], [], top_k=40) == here.top_tokens(PROMPTS[0], [], top_k=40)
        assert same_bits(there.open(prompts, domain[:2]).score(domain), here.open(prompts, domain[:2]).score(domain))
        assert there.vocabulary() == tuple(here.vocabulary())
        assert there.tokenizer_fingerprint == getattr(here, "tokenizer_fingerprint", None)
        assert there.encode("one two") == list(here.encode("one two"))
        assert there.token_bytes(domain[0]) == here.token_bytes(domain[0])
    elif place == "choices":
        assert same_bits(there.score_choices(prompts, [" a", " b"]), here.score_choices(prompts, [" a", " b"]))
    else:
        assert there.complete(prompts, max_tokens=4) == here.complete(prompts, max_tokens=4)


def test_it_cuts_text_that_follows_other_text_as_the_engine_there_does() -> None:
    engine: Any = as_backend(shared(process_models.cutter))
    assert engine.continued(" red") == [b" r", b"ed"]
    assert engine.room == 10
    assert not hasattr(as_backend(shared(EmbeddedLLM)), "continued")


@pytest.mark.parametrize("is_awaited", [False, True])
def test_public_prompts_that_it_would_cut_are_refused(is_awaited: bool) -> None:
    for engine in (as_backend(shared(process_models.cutter)), process_models.cutter()):
        rows = LabelRows(engine, [[" red"], [" blue"]], calibrate=False)
        asked = rows.request_public_texts(["Topic:", "x" * 101], keep_errors=True, is_whole=True)
        found = asyncio.run(asked.arun()) if is_awaited else asked.run()
        assert [type(scores) for scores in found.values()] == [ModelCallError, list]
        with pytest.raises(ModelCallError, match="too long"):
            rows.request_public_texts(["x" * 101], is_whole=True).run()
        assert (
            len(rows.request_public_texts(["x" * 101], is_whole=False).run()) == 1
        )  # it stands for a private prompt, which is cut


async def test_a_full_session_has_the_logits_of_the_same_model_in_this_process() -> None:
    there, here = as_backend(shared(process_models.full)), process_models.full()
    options: dict[str, Any] = {"public": "Topic: red", "num_rows": 3, "shared": "", "max_new_tokens": 4}
    sessions = [engine.open_full([PROMPTS[0], None, PROMPTS[1]], [], **options) for engine in (there, here)]
    for _ in range(2):
        own, known = sessions
        assert same_bits(own.public(), known.public())
        assert same_bits(own.logits(), known.logits())
        assert same_bits(await own.alogits(np.array([2, 0])), known.logits(np.array([2, 0])))
        assert same_bits(await own.apublic(), known.public())
        for session in sessions:
            session.push(b" red")
    sessions[0].close()
    with pytest.raises(ConfigurationError, match="closed"):
        sessions[0].logits()


def test_a_session_that_failed_is_closed_in_the_process_too(monkeypatch: pytest.MonkeyPatch) -> None:
    posted: list[dict[str, Any]] = []
    post = Connection.post

    def noting(self: Connection, message: dict[str, Any], **options: Any) -> Any:
        posted.append(message)
        return post(self, message, **options)

    monkeypatch.setattr(Connection, "post", noting)
    engine = as_backend(shared(process_models.full, public_fails_at=2))
    options: dict[str, Any] = {"public": "Topic: red", "num_rows": 1, "shared": "", "max_new_tokens": 4}
    session = engine.open_full(PROMPTS[:1], [], **options)
    session.public()
    opened = next(message["session"] for message in posted if message["does"] == "session")
    session.public()  # fails there, and is asked for apart
    assert {"does": "close", "session": opened} in posted


def test_public_scores_of_text_votes_and_answers_without_a_label_are_told_apart() -> None:
    there, here = as_choice_backend(shared("tests.process_models:writer")), process_models.writer()
    for choices in (["red", "blue"], ["green", "grey"]):
        assert same_bits(there.score_with_other(PROMPTS, choices), here.score_with_other(PROMPTS, choices))
        assert same_bits(there.score_public(PROMPTS[0], choices), here.score_public(PROMPTS[0], choices))
    with pytest.raises(ConfigurationError, match="differ"):
        there.score_choices([], ["Red", "red"])


def test_an_engine_is_taken_as_it_is_where_it_suits_and_asked_for_another_where_not() -> None:
    process = shared(process_models.chat)
    votes = as_choice_backend(process, votes="text")
    assert as_choice_backend(votes, votes="text") is votes
    assert as_text_backend(votes) is votes
    tokens = as_choice_backend(process)
    assert as_choice_backend(tokens) is tokens
    assert as_choice_backend(tokens, votes="text").kind == "text votes"
    with pytest.raises(CapabilityError, match="cannot write text token by token"):
        as_backend(shared("tests.process_models:writer"))


def test_reports_name_the_hosts_that_the_process_reached() -> None:
    assert recipients(as_backend(shared(EmbeddedLLM))) == ["a process of its own"]


def test_threads_and_event_loops_share_one_process() -> None:
    engine = as_choice_backend(shared(EmbeddedLLM))
    rows = engine.score_choices(PROMPTS, [" a", " b"])
    found: list[Any] = []

    async def many() -> list[Any]:
        return await asyncio.gather(*(engine.ascore_choices(PROMPTS, [" a", " b"]) for _ in range(5)))

    threads = [
        threading.Thread(target=lambda: found.append(engine.score_choices(PROMPTS, [" a", " b"]))) for _ in range(4)
    ]
    threads += [threading.Thread(target=lambda: found.extend(asyncio.run(many()))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 14
    assert all(same_bits(one, rows) for one in found)
    assert len(engine._client._places._made) == 1


async def test_embeddings_have_the_rows_of_the_same_ones_in_this_process() -> None:
    texts = [OpaqueValue(text) for text in ("one", "two", "raises")]
    there = as_embeddings(shared("tests.process_models:embeddings", size=5))
    here = SilentEmbeddings(process_models.embeddings(size=5))
    assert isinstance(there, SilentEmbeddings)
    assert (there.name, there.dimension) == (here.name, 5)
    assert same_bits(there.rows(texts), here.rows(texts))
    assert (there.rows(texts)[2] == 0).all()
    assert same_bits(await there.arows(texts), here.rows(texts))
    assert same_bits(there.public(["one"]), here.public(["one"]))
    assert same_bits(await there.apublic(["one"]), here.public(["one"]))
    with pytest.raises(ModelCallError):
        there.public(["raises"])
    assert same_bits(NearestRows(there).embeddings.rows(texts), here.rows(texts))


def test_who_hears_calls_of_this_process_is_no_reason_to_refuse_those_of_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = as_embeddings(shared("tests.process_models:embeddings", size=5))
    here = SilentEmbeddings(process_models.embeddings(size=5))
    kind = process_models.PickyEmbeddings
    monkeypatch.setattr(kind, "embed_documents", traceable(kind.embed_documents))
    with pytest.raises(UnsilencableModelError, match="langsmith is in the path of"):
        here.check_silent()
    there.check_silent()
    assert there.rows([OpaqueValue("one")]).any()


@pytest.mark.parametrize("awaited", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    ("make", "how"),
    [(process_models.embeddings, {"size": 64}), (LocalEmbeddings, {"topics": False})],
    ids=["dense", "sparse"],
)
async def test_what_embeddings_are_read_for_is_the_same_as_of_those_in_this_process(
    make: Callable[..., Any], how: dict[str, Any], awaited: bool
) -> None:
    """A part that the process lacks would leave rows of zeros, and an answer of noise alone that looks like another."""
    found = []
    for each in (as_embeddings(shared(make, **how)), make(**how)):
        texts = ["a red car", "a blue boat", "a red car", "a green train"]
        units = [(text,) for text in texts]
        nearest, similar = NearestRows(each), SimilarTexts(each, threshold=0.9)
        answers = AnswerRows.embedded(Echo(), nearest.embeddings, max_tokens=4)
        candidates = nearest.request_public(texts[:2]).run()
        asks = [
            nearest.ask(units, candidates),
            similar.ask(units, similar.request_public("a red car").run()),
            answers.ask(texts),
        ]
        rows = [(await ask.arun() if awaited else await asyncio.to_thread(ask.run)).take() for ask in asks]
        found.append((rows[0][:].tolist(), rows[1], rows[2].tolist()))
    assert found[0] == found[1]
    assert found[0][1] == {0: (0,), 2: (0,)}
    assert np.any(found[0][0])
    assert np.any(found[0][2])
