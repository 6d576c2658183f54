"""Private texts are embedded in silence: one call each, seen by nobody, zeros where a call failed, and nothing raised."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler, CallbackManager
from langchain_core.embeddings import DeterministicFakeEmbedding, Embeddings, FakeEmbeddings
from langchain_core.runnables import RunnableLambda
from langchain_core.stores import InMemoryByteStore
from pydantic import BaseModel, ConfigDict, PrivateAttr

from langchain_dpicl.backends.private_calls.call import OpaqueValue, RetryPolicy
from langchain_dpicl.backends.private_calls.embeddings import SilentEmbeddings, vector_of
from langchain_dpicl.exceptions import CapabilityError, ConfigurationError, ModelCallError, UnsilencableModelError
from tests.canary import RECORD, canaries_in, describe
from tests.loopback_provider import Provider
from tests.scripted_models import StatusError
from tests.unit_tests.backends.embedding_models import (
    SIZE,
    AsyncEmbeddings,
    ScriptedEmbeddings,
    embeddings_provider,
    stock,
    vector,
)
from tests.unit_tests.backends.recording_package import WAYS, Recorder, known

QUICK = RetryPolicy(max_attempts=3, first_wait=0.001, max_wait=0.001)
ZEROS = [0.0] * SIZE
TEXTS = st.one_of(st.text(max_size=5), st.sampled_from(["\x01 fails", "\x02 is odd", "\ud800"]))


def silent(embeddings: Any = None, **options: Any) -> SilentEmbeddings:
    given = ScriptedEmbeddings() if embeddings is None else embeddings
    return SilentEmbeddings(given, **{"retry": QUICK, **options})


def hidden(*texts: str) -> list[OpaqueValue[str]]:
    return [OpaqueValue(text) for text in texts]


def both(made: SilentEmbeddings, *texts: str) -> np.ndarray:
    """Private rows, asked for in both ways, which have to agree."""
    rows = made.rows(hidden(*texts))
    assert asyncio.run(made.arows(hidden(*texts))).tobytes() == rows.tobytes()  # type: ignore[arg-type]
    assert rows.shape == (len(texts), made.dimension)
    assert rows.dtype == np.float64
    return rows


class TestRows:
    @pytest.mark.parametrize("kind", [ScriptedEmbeddings, AsyncEmbeddings])
    def test_each_text_is_a_call_of_its_own_and_a_row_in_its_place(self, kind: Any) -> None:
        model = kind()
        made = silent(model)
        model.asked.clear()
        assert both(made, "a", "b", "a").tolist() == [vector("a"), vector("b"), vector("a")]
        assert model.asked == [1] * 6

    def test_no_texts_are_no_rows(self) -> None:
        assert both(silent()).shape == (0, SIZE)

    def test_name_dimension_and_repr_are_public(self) -> None:
        made = silent(ScriptedEmbeddings(model="scripted-3"))
        assert (made.name, made.dimension) == ("scripted-3", SIZE)
        assert repr(made) == f"SilentEmbeddings('scripted-3', dimension={SIZE})"
        assert silent().name == "ScriptedEmbeddings"

    @pytest.mark.parametrize("model", [DeterministicFakeEmbedding(size=4), FakeEmbeddings(size=4)], ids=type)
    def test_stock_embeddings_are_taken(self, model: Any) -> None:
        rows = silent(model).rows(hidden("a", "b"))
        assert rows.shape == (2, 4)
        assert np.isfinite(rows).all()
        assert rows.any(axis=1).all()

    def test_embeddings_around_others_are_taken(self) -> None:
        class Around(ScriptedEmbeddings):
            def embed_documents(self, texts: list[str]) -> Any:
                return self.inner[0].embed_documents([text.upper() for text in texts])

        assert both(silent(Around(inner=[ScriptedEmbeddings()])), "a").tolist() == [vector("A")]

    @settings(deadline=None)  # threads of a busy machine
    @given(st.lists(TEXTS, min_size=1, max_size=5), st.integers(0, 4), TEXTS)
    def test_another_text_moves_its_own_row_alone(self, texts: list[str], place: int, other: str) -> None:
        made = silent(ScriptedEmbeddings(raises={"\x01": ValueError}, answers={"\x02": [[float("nan")]]}))
        changed = [other if number == place else text for number, text in enumerate(texts)]
        kept = [number for number in range(len(texts)) if number != place]
        before, after = made.rows(hidden(*texts)), made.rows(hidden(*changed))
        assert before[kept].tobytes() == after[kept].tobytes()
        assert np.isfinite(after).all()

    def test_no_more_calls_are_in_flight_than_allowed(self) -> None:
        lock, now, most, hoped, patience = threading.Lock(), [0], [0], [0], time.monotonic() + 60

        def hold(text: str) -> None:
            with lock:
                now[0] += 1
                most[0] = max(most[0], now[0])
            while most[0] < hoped[0] and time.monotonic() < patience:  # on a busy machine they would miss each other
                time.sleep(0.001)
            time.sleep(0.02)
            with lock:
                now[0] -= 1

        made = silent(ScriptedEmbeddings(before=hold), max_concurrency=3)
        hoped[0] = 3
        both(made, *"abcdefgh")
        assert most == [3]

    async def test_awaited_texts_are_embedded_concurrently(self) -> None:
        class Meeting(ScriptedEmbeddings):
            barrier: Any = None

            async def aembed_documents(self, texts: list[str]) -> Any:
                await asyncio.wait_for(self.barrier.wait(), 60)
                return self.embed_documents(texts)

        model = Meeting()
        made = silent(model)
        model.barrier = asyncio.Barrier(4)
        assert (await made.arows(hidden(*"abcd"))).any(axis=1).all()


class Hostile:
    """Raises whatever is done with it."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __len__(self) -> int:
        raise self.error

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise self.error

    __float__ = __getitem__ = __iter__ = __array__


class HostileList(list[Any]):
    def __len__(self) -> int:
        raise SystemExit(RECORD)


ODD = (
    None,
    [],
    3.0,
    "text",
    {},
    [None],
    [[]],
    [3.0],
    [[1.0] * SIZE] * 2,
    [[1.0] * (SIZE - 1)],
    [[1.0] * (SIZE + 1)],
    [[[1.0] * SIZE]],
    [[float("nan"), *[1.0] * (SIZE - 1)]],
    [[float("inf"), *[1.0] * (SIZE - 1)]],
    [["1.0"] * SIZE],
    [[None] * SIZE],
    [[True] * SIZE],
    [[1j] * SIZE],
    [[10**400] * SIZE],
    [[[1.0], *[1.0] * (SIZE - 1)]],
    {0: [1.0] * SIZE},
    [Hostile(ValueError())],
    [Hostile(SystemExit())],
    [[Hostile(ValueError())] * SIZE],
    Hostile(ValueError()),
    HostileList([[1.0] * SIZE]),
    iter([[1.0] * SIZE]),
)


class TestAnswers:
    @pytest.mark.parametrize("answer", ODD, ids=[f"odd {number}" for number in range(len(ODD))])
    def test_what_is_no_vector_of_the_known_width_is_zeros_alone(self, answer: Any) -> None:
        rows = both(silent(ScriptedEmbeddings(answers={"odd": answer})), "a", "odd", "b")
        assert rows.tolist() == [vector("a"), ZEROS, vector("b")]

    @pytest.mark.parametrize(
        "answer",
        [
            [[1, 2, 3]],
            ([1.0, 2.0, 3.0],),
            np.array([[1.0, 2.0, 3.0]]),
            [np.array([1, 2, 3], np.float32)],
            [np.array([1, 2, 3], np.float16)],
            [np.array([1, 2, 3], np.uint8)],
            [(np.float64(1), 2, 3.0)],
            [range(1, 4)],
        ],
        ids=lambda answer: f"{type(answer).__name__} of {type(answer[0]).__name__}",
    )
    def test_numbers_of_any_real_kind_are_read(self, answer: Any) -> None:
        found = vector_of(answer)
        assert found is not None
        assert found.tolist() == [1.0, 2.0, 3.0]
        assert found.dtype == np.float64

    def test_a_vector_is_a_copy_that_its_model_cannot_move(self) -> None:
        given = np.ones(3)
        found = vector_of([given])
        given[0] = 9.0
        assert found is not None
        assert found.tolist() == [1.0] * 3

    def test_a_caller_s_numpy_error_state_raises_nothing(self) -> None:
        with np.errstate(all="raise"):
            assert vector_of([np.array([1e-320, 1e308], np.longdouble)]) is not None
            assert vector_of([np.array([np.inf, np.nan], np.float16)]) is None

    def test_an_odd_answer_is_not_asked_for_again(self) -> None:
        model = ScriptedEmbeddings(answers={"odd": [[float("nan")] * SIZE]})
        made = silent(model)
        model.asked.clear()
        made.rows(hidden("odd"))
        assert model.asked == [1]


class TestFailures:
    @pytest.mark.parametrize(
        "fault",
        [
            ValueError(RECORD),
            StatusError(RECORD, status_code=400),
            StatusError(RECORD, status_code=500),
            SystemExit(2),
            GeneratorExit(),
            asyncio.CancelledError(),
            MemoryError(),
        ],
        ids=lambda fault: type(fault).__name__ + str(getattr(fault, "status_code", "")),
    )
    def test_a_call_that_fails_is_zeros_alone(self, fault: BaseException) -> None:
        rows = both(silent(ScriptedEmbeddings(raises={"odd": fault})), "a", "odd", "b")
        assert rows.tolist() == [vector("a"), ZEROS, vector("b")]

    @pytest.mark.parametrize("text", ["\ud800", "", "\x00", "{0.__class__}", "x" * 100_000], ids=lambda t: ascii(t[:9]))
    def test_hostile_texts_raise_nothing(self, text: str) -> None:
        assert both(silent(), text, "b")[1].tolist() == vector("b")

    @pytest.mark.parametrize(
        "error", [StatusError("", status_code=429), TimeoutError(), ConnectionResetError()], ids=type
    )
    def test_a_busy_server_is_waited_for_as_often_as_allowed(self, error: BaseException) -> None:
        model = ScriptedEmbeddings(raises={"busy": error}, times={"busy": 2})
        made = silent(model)
        model.asked.clear()
        assert made.rows(hidden("busy")).tolist() == [vector("busy")]
        assert model.asked == [1, 1, 1]
        model.times["busy"] = 3
        assert made.rows(hidden("busy")).tolist() == [ZEROS]

    def test_what_waiting_cannot_better_is_asked_once(self) -> None:
        model = ScriptedEmbeddings(raises={"bad": StatusError(RECORD, status_code=400)})
        made = silent(model)
        model.asked.clear()
        assert made.rows(hidden("bad")).tolist() == [ZEROS]
        assert model.asked == [1]

    def test_a_client_of_another_event_loop_is_replaced_by_the_blocking_one(self) -> None:
        class Bound(ScriptedEmbeddings):
            async def aembed_documents(self, texts: list[str]) -> Any:
                raise RuntimeError("Event loop is closed")

        assert asyncio.run(silent(Bound()).arows(hidden("a"))).tolist() == [vector("a")]  # type: ignore[arg-type]


class TestPublicCalls:
    def test_public_texts_have_the_rows_that_private_ones_have(self) -> None:
        made = silent()
        rows = made.public(["a", "b"])
        assert rows.tobytes() == made.rows(hidden("a", "b")).tobytes()
        assert asyncio.run(made.apublic(["a", "b"])).tobytes() == rows.tobytes()  # type: ignore[arg-type]
        assert made.public([]).shape == (0, SIZE)

    @pytest.mark.parametrize("error", [StatusError(RECORD, status_code=400), StatusError(RECORD, status_code=429)])
    def test_a_public_call_that_fails_says_what_failed_but_not_the_text(self, error: StatusError) -> None:
        made = silent(ScriptedEmbeddings(raises={"bad": error}))
        with pytest.raises(ModelCallError, match=rf"StatusError \(HTTP {error.status_code}\)") as caught:
            made.public(["a", "bad"])
        assert canaries_in(describe(caught.value)) == []
        with pytest.raises(ModelCallError, match="StatusError") as caught:
            asyncio.run(made.apublic(["a", "bad"]))  # type: ignore[arg-type]
        assert canaries_in(describe(caught.value)) == []

    def test_a_public_vector_of_another_width_is_an_error(self) -> None:
        made = silent(ScriptedEmbeddings(answers={"odd": [[1.0]]}))
        with pytest.raises(ModelCallError, match=f"expected {SIZE} finite numbers"):
            made.public(["odd"])
        with pytest.raises(ModelCallError, match=f"expected {SIZE} finite numbers"):
            asyncio.run(made.apublic(["odd"]))  # type: ignore[arg-type]

    @pytest.mark.parametrize("texts", ["a text", [3], hidden("a")], ids=["text", "numbers", "private"])
    def test_what_are_no_public_texts_is_refused(self, texts: Any) -> None:
        with pytest.raises(ConfigurationError, match="public texts"):
            silent().public(texts)


class TestConstruction:
    @pytest.mark.parametrize("model", [None, "text-embedding-3-small", 3, ScriptedEmbeddings, len], ids=repr)
    def test_what_is_no_embeddings_is_refused(self, model: Any) -> None:
        with pytest.raises(CapabilityError, match="expected LangChain embeddings"):
            SilentEmbeddings(model)

    def test_silent_ones_are_not_wrapped_again(self) -> None:
        with pytest.raises(CapabilityError, match="found SilentEmbeddings"):
            SilentEmbeddings(silent())  # type: ignore[arg-type]

    @pytest.mark.parametrize("limit", [0, -1, 1.5, True])
    def test_a_limit_has_to_be_a_number(self, limit: Any) -> None:
        with pytest.raises(ConfigurationError, match="max_concurrency"):
            silent(max_concurrency=limit)

    def test_the_probe_is_one_public_text(self) -> None:
        model = ScriptedEmbeddings()
        silent(model)
        assert model.asked == [1]

    @pytest.mark.parametrize(("numbers", "is_sparse"), [("0" * 8, False), ("00100000", True), ("01010000", False)])
    def test_the_probe_says_whether_vectors_are_sparse(self, numbers: str, *, is_sparse: bool) -> None:
        made = silent(ScriptedEmbeddings(answers={"": [[float(number) for number in numbers]]}))
        assert made.is_sparse == is_sparse

    @pytest.mark.parametrize("answer", [[[]], [[float("nan")]], [["a"]], [], None, [[1.0], [1.0]]], ids=repr)
    def test_a_probe_without_a_vector_is_a_lack_of_the_model(self, answer: Any) -> None:
        with pytest.raises(CapabilityError, match="without a vector of finite numbers"):
            silent(ScriptedEmbeddings(answers={"": answer}))

    def test_a_rejected_probe_says_why_and_what_to_do(self) -> None:
        error = StatusError("tokens are not taken here", status_code=422)
        with pytest.raises(CapabilityError, match=r"tokens are not taken here.*check_embedding_ctx_length=False"):
            silent(ScriptedEmbeddings(raises={"": error}))

    def test_a_busy_or_dead_server_is_asked_twice_and_told_of(self) -> None:
        model = ScriptedEmbeddings(raises={"": ConnectionError()})
        with pytest.raises(ModelCallError, match="could not be reached") as caught:
            silent(model)
        assert "tokenizer" not in str(caught.value)
        assert model.asked == [1, 1]
        with pytest.raises(ModelCallError, match=r"the tokenizer that could not be downloaded"):
            silent(ScriptedEmbeddings(raises={"": ConnectionError()}, check_embedding_ctx_length=True))

    def test_progress_bars_are_switched_off_in_a_copy(self) -> None:
        class Showing(DeterministicFakeEmbedding):
            show_progress_bar: bool = True

            def embed_documents(self, texts: list[str]) -> list[list[float]]:
                shown.append(self.show_progress_bar)
                return super().embed_documents(texts)

        shown: list[bool] = []
        model = Showing(size=2)
        silent(model).rows(hidden("a"))
        assert shown == [False, False]
        assert model.show_progress_bar


class CacheBackedEmbeddings(ScriptedEmbeddings):
    """Named as LangChain's; the store is missing, so that the name is all there is."""


class Derived(CacheBackedEmbeddings):
    pass


class Memoised(ScriptedEmbeddings):
    def embed_documents(self, texts: list[str]) -> Any:
        return [self.embed_query(text) for text in texts]

    @functools.lru_cache(maxsize=9)  # noqa: B019  that is the point
    def embed_query(self, text: str) -> Any:
        return vector(text)


class MemoisedAside(ScriptedEmbeddings):
    @staticmethod
    @functools.cache
    def _one(text: str) -> Any:
        return vector(text)


class Modelled(BaseModel, Embeddings):
    """Embeddings as a pydantic model, with a private attribute."""

    cache_folder: str | None = "models"
    callbacks: Any = None
    _kept: Any = PrivateAttr(default=None)

    def embed_documents(self, texts: list[str]) -> Any:
        return [vector(text) for text in texts]

    def embed_query(self, text: str) -> Any:
        return vector(text)


def modelled(kept: Any = None, **fields: Any) -> Modelled:
    made = Modelled(**fields)
    made._kept = kept
    return made


class Open(Modelled):
    """The same, which takes any other field as well."""

    model_config = ConfigDict(extra="allow")


class Slotted(ScriptedEmbeddings):
    """Embeddings with an attribute that is in no dictionary."""

    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held


class Handler(BaseCallbackHandler):
    pass


class Starting(ScriptedEmbeddings):
    """Starts a LangChain run for each text."""

    def embed_documents(self, texts: list[str]) -> Any:
        RunnableLambda(len).invoke(texts[0])
        return super().embed_documents(texts)


class StartingQuietly(Starting):
    """Catches what stops its run."""

    def embed_documents(self, texts: list[str]) -> Any:
        try:
            return super().embed_documents(texts)
        except RuntimeError:
            return ScriptedEmbeddings.embed_documents(self, texts)


class StartingElsewhere(ScriptedEmbeddings):
    """Starts its run in a thread that was there before."""

    def embed_documents(self, texts: list[str]) -> Any:
        done = threading.Event()
        QUEUE.append((texts[0], done))
        done.wait(60)
        return super().embed_documents(texts)


QUEUE: list[tuple[str, threading.Event]] = []


class TestKeepersAreRefused:
    """Before a private text is there at all, and without any call but the public probe."""

    @pytest.mark.parametrize(
        ("model", "said"),
        [
            (CacheBackedEmbeddings(), "a cache by its name"),
            (Derived(), "its base CacheBackedEmbeddings"),
            (ScriptedEmbeddings(inner=CacheBackedEmbeddings()), "found CacheBackedEmbeddings"),
            (ScriptedEmbeddings(inner={"x": Derived()}), "found Derived"),
            (ScriptedEmbeddings(inner=[ScriptedEmbeddings(inner=(Derived(),))]), "found Derived"),
            (ScriptedEmbeddings(kept=InMemoryByteStore()), "store or cache in 'kept'"),
            (ScriptedEmbeddings(kept=[InMemoryByteStore()]), "store or cache in 'kept'"),
            (ScriptedEmbeddings(kept=InMemoryCache()), "store or cache in 'kept'"),
            (ScriptedEmbeddings(_cache={}), "a cache in '_cache'"),
            (ScriptedEmbeddings(cache=True), "a cache in 'cache'"),
            (ScriptedEmbeddings(query_cache_size=9), "'query_cache_size'"),
            (ScriptedEmbeddings(cache="redis://x"), "a cache in 'cache'"),
            (ScriptedEmbeddings(call=functools.lru_cache(vector)), "remembers arguments in 'call'"),
            (Memoised(), "method embed_query remembers"),
            (MemoisedAside(), "method _one remembers"),
            (modelled(InMemoryByteStore()), "store or cache in '_kept'"),
            (modelled(Handler()), "callback handler in '_kept'"),
            (modelled(callbacks=[Handler()]), "callback handler in 'callbacks'"),
            (modelled(callbacks=CallbackManager([])), "callback handler in 'callbacks'"),
            (Open(extra=InMemoryByteStore()), "store or cache in 'extra'"),
            (Open(extra=Handler()), "callback handler in 'extra'"),
            (Open(extra=[modelled(InMemoryByteStore())]), "store or cache in '_kept'"),
            (Slotted(InMemoryByteStore()), "store or cache in 'held'"),
            (Slotted(modelled(InMemoryByteStore())), "store or cache in '_kept'"),
            (Slotted(Handler()), "callback handler in 'held'"),
            (ScriptedEmbeddings(chain=RunnableLambda(len)), "runnable or callback handler in 'chain'"),
            (ScriptedEmbeddings(inner=ScriptedEmbeddings(chain=[RunnableLambda(len)])), "in 'chain'"),
            (ScriptedEmbeddings(url="https://gateway.smith.langchain.com/v1"), "LangSmith gateway"),
        ],
        ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else type(value).__name__,
    )
    def test_caches_stores_handlers_and_runnables(self, model: Any, said: str) -> None:
        with pytest.raises(UnsilencableModelError) as caught:
            silent(model)
        assert said in str(caught.value)
        assert getattr(model, "asked", []) == []

    @pytest.mark.parametrize(
        "model",
        [
            modelled(),
            modelled(callbacks=[]),
            Open(extra=[]),
            Slotted(ScriptedEmbeddings()),
            ScriptedEmbeddings(cache_folder="models", model_cache_dir=Path("models")),
            ScriptedEmbeddings(cache=None, use_cache=False, cache_size=0),
            ScriptedEmbeddings(chunk_size=9, batch={"size": 3}, inner=[ScriptedEmbeddings()]),
            type("Cached", (ScriptedEmbeddings,), {"_len": functools.cache(lambda self: 3)})(),
        ],
        ids=[
            "pydantic",
            "no handlers",
            "an extra field",
            "a slot",
            "folders",
            "switched off",
            "plain fields",
            "a number of its own",
        ],
    )
    def test_what_keeps_no_texts_is_taken(self, model: Any) -> None:
        if type(model).__name__ == "Cached":
            type(model).__name__ = "Counted"
        assert silent(model).dimension == SIZE

    @pytest.mark.parametrize("kind", [Starting, StartingQuietly])
    def test_runs_inside_a_call_are_found_by_the_probe(self, kind: Any) -> None:
        with pytest.raises(UnsilencableModelError, match="starts LangChain runs"):
            silent(kind())

    def test_runs_in_a_thread_that_was_there_before_are_found_by_the_probe(self) -> None:
        def serve() -> None:
            while True:
                if QUEUE:
                    text, done = QUEUE.pop()
                    RunnableLambda(len).invoke(text)
                    done.set()
                    return
                time.sleep(0.001)

        worker = threading.Thread(target=serve)
        worker.start()
        with pytest.raises(UnsilencableModelError, match="starts LangChain runs"):
            silent(StartingElsewhere())
        worker.join()

    def test_a_run_that_is_started_for_some_texts_only_costs_those_rows(self) -> None:
        def sometimes(text: str) -> None:
            if "odd" in text:
                RunnableLambda(len).invoke(text)

        rows = both(silent(ScriptedEmbeddings(before=sometimes)), "a", "odd")
        assert rows.tolist() == [vector("a"), ZEROS]
        with pytest.raises(UnsilencableModelError, match="starts LangChain runs"):
            silent(ScriptedEmbeddings(before=sometimes)).public(["odd"])


def mine() -> type[Any]:
    """A class of this module that no other test patches."""

    def embed_documents(self: Any, texts: list[str]) -> Any:
        return ScriptedEmbeddings.embed_documents(self, texts)

    return type("Mine", (ScriptedEmbeddings,), {"embed_documents": embed_documents, "__module__": __name__})


@pytest.fixture
def openai_embeddings() -> Iterator[Provider]:
    """A provider with an embeddings endpoint."""
    with embeddings_provider() as served:
        yield served


class TestInstrumentation:
    @pytest.mark.parametrize("way", WAYS)
    def test_a_known_recorder_around_a_method_is_refused(self, way: str) -> None:
        kind, recorder = mine(), known()
        kind.embed_documents = getattr(recorder, way)(kind.embed_documents)
        with pytest.raises(UnsilencableModelError, match=r"langfuse is in the path of Mine\.embed_documents"):
            silent(kind())
        assert recorder.seen == []

    def test_a_recorder_that_comes_later_stops_private_calls_and_is_named_by_public_ones(self) -> None:
        kind, recorder = mine(), known()
        made = silent(kind())
        assert made.rows(hidden("a")).any()
        kind.embed_documents = recorder.by_wraps(kind.embed_documents)
        assert both(made, RECORD, "b").tolist() == [ZEROS, ZEROS]
        with pytest.raises(UnsilencableModelError, match="langfuse"):
            made.public(["a"])
        assert recorder.seen == []

    def test_a_recorder_around_the_inner_embeddings_is_refused(self) -> None:
        kind = mine()
        kind.embed_documents = known().by_wraps(kind.embed_documents)
        with pytest.raises(UnsilencableModelError, match="langfuse"):
            silent(ScriptedEmbeddings(client=kind()))

    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("method", ["embed_documents", "aembed_documents"])
    def test_any_package_around_langchain_s_own_embeddings_is_refused(
        self, method: str, way: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        owner = DeterministicFakeEmbedding if method == "embed_documents" else Embeddings
        monkeypatch.setattr(owner, method, getattr(known(), way)(getattr(owner, method)))
        with pytest.raises(UnsilencableModelError, match="langfuse"):
            silent(DeterministicFakeEmbedding(size=2))

    @pytest.mark.loopback
    @pytest.mark.parametrize("place", ["Embeddings.create", "AsyncEmbeddings.create", "stock"])
    def test_any_package_around_the_sdk_or_the_stock_class_is_refused(
        self, place: str, openai_embeddings: Provider, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import openai.resources.embeddings as sdk
        from langchain_openai import OpenAIEmbeddings

        name, _, method = place.partition(".")
        owner: Any = OpenAIEmbeddings if name == "stock" else getattr(sdk, name)
        method = method or "embed_documents"
        recorder = Recorder()
        made = silent(stock(openai_embeddings))
        monkeypatch.setattr(owner, method, recorder.by_wrapt(vars(owner)[method]))
        openai_embeddings.clear()
        with pytest.raises(UnsilencableModelError, match=rf"is in the path of \w*Embeddings\.{method}"):
            silent(stock(openai_embeddings))
        assert made.rows(hidden(RECORD)).tolist() == [ZEROS]
        assert recorder.seen == []
        assert openai_embeddings.received == []
