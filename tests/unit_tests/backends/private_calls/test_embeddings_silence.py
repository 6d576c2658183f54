"""Nobody sees a private text that is embedded, nor its vector: not on a channel, not in a stop, not under recorders."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.runnables.config import ensure_config
from langsmith import traceable

from langchain_dpicl.backends.private_calls.call import OpaqueValue, RetryPolicy
from langchain_dpicl.backends.private_calls.embeddings import SilentEmbeddings
from langchain_dpicl.exceptions import CapabilityError, ModelCallError
from tests.canary import RECORD, Recorder, aobserve, canaries_in, describe, leaks, observe
from tests.loopback_provider import (
    Provider,
    echoing_400,
    hang_up,
    html,
    huge,
    rate_limited,
    server_error,
    truncated,
)
from tests.scripted_models import StatusError
from tests.unit_tests.backends.embedding_models import (
    SIZE,
    AsyncEmbeddings,
    ScriptedEmbeddings,
    embeddings_provider,
    stock,
    vector,
)

QUICK = RetryPolicy(max_attempts=3, first_wait=0.001, max_wait=0.001)
ZEROS = [0.0] * SIZE


def hidden(*texts: str) -> list[OpaqueValue[str]]:
    return [OpaqueValue(text) for text in texts]


def logs(text: str) -> None:
    logging.getLogger("some.sdk").debug("request %s", text)


def warns(text: str) -> None:
    warnings.warn(f"unexpected value: {text}", UserWarning, stacklevel=2)


def traces(text: str) -> None:
    traced(text)


@traceable
def traced(text: str) -> str:
    return text


def tells_handlers(text: str) -> None:
    for handler in getattr(ensure_config()["callbacks"], "handlers", ()):
        if isinstance(handler, Recorder):
            handler.lines.append(text)


def fails(text: str) -> None:
    if RECORD in text:
        raise StatusError(text, status_code=400)


def warned(recwarn: pytest.WarningsRecorder) -> set[str]:
    return {"warnings"} if canaries_in(" ".join(str(one.message) for one in recwarn)) else set()


CHANNELS = (
    (logs, {"logs"}),
    (warns, {"warnings"}),
    (traces, {"LangSmith"}),
    (tells_handlers, {"config callbacks"}),
    (fails, {"exception", "config callbacks", "LangSmith", "debug output", "logs"}),
)


@pytest.mark.loopback
class TestChannels:
    """Each channel is shown to work: naive embedding is seen on it, in the same net."""

    @pytest.mark.parametrize(("before", "shown"), CHANNELS, ids=[before.__name__ for before, _ in CHANNELS])
    @pytest.mark.parametrize("kind", [ScriptedEmbeddings, AsyncEmbeddings])
    async def test_what_naive_embedding_shows_ours_does_not(
        self, kind: Any, before: Any, shown: set[str], recwarn: pytest.WarningsRecorder
    ) -> None:
        model = kind(before=before)
        silent = SilentEmbeddings(model, retry=QUICK)
        warnings.simplefilter("always")  # inside `recwarn`, which ends it
        recwarn.clear()
        ours = [
            observe(lambda: silent.rows(hidden(RECORD, "b")).shape),
            await aobserve(lambda: silent.arows(hidden(RECORD, "b"))),
        ]
        assert [leaks(seen) for seen in ours] == [set(), set()]
        assert [seen.error for seen in ours] == [None, None]
        assert warned(recwarn) == set()
        assert leaks(observe(lambda: model.embed_documents([RECORD]))) | warned(recwarn) >= shown
        recwarn.clear()
        assert leaks(await aobserve(lambda: model.aembed_documents([RECORD]))) | warned(recwarn) >= shown

    def test_a_public_failure_shows_no_private_text(self) -> None:
        silent = SilentEmbeddings(ScriptedEmbeddings(raises={"public": StatusError(RECORD, status_code=400)}))
        seen = observe(lambda: silent.public(["public"]))
        assert isinstance(seen.error, ModelCallError)
        assert leaks(seen) == set()


class TestStops:
    def test_ctrl_c_takes_nothing_along(self) -> None:
        silent = SilentEmbeddings(ScriptedEmbeddings(raises={RECORD: KeyboardInterrupt}), retry=QUICK)
        for embed in (lambda: silent.rows(hidden("a", RECORD)), lambda: asyncio.run(silent.arows(hidden(RECORD)))):
            with pytest.raises(KeyboardInterrupt) as caught:
                embed()
            assert canaries_in(describe(caught.value)) == []
            assert caught.value.__context__ is None

    async def test_a_cancellation_takes_nothing_along(self) -> None:
        class Slow(ScriptedEmbeddings):
            async def aembed_documents(self, texts: list[str]) -> Any:
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError as error:
                    raise asyncio.CancelledError(texts) from error

        task = asyncio.create_task(SilentEmbeddings(Slow(), retry=QUICK).arows(hidden(RECORD, "b")))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError) as caught:
            await task
        assert canaries_in(describe(caught.value)) == []

    async def test_a_call_that_cancels_itself_is_its_row_s_own_fault(self) -> None:
        class Quits(ScriptedEmbeddings):
            async def aembed_documents(self, texts: list[str]) -> Any:
                task = asyncio.current_task()
                if texts == [RECORD] and task is not None:
                    task.cancel()
                    await asyncio.sleep(1)
                return self.embed_documents(texts)

        rows = await SilentEmbeddings(Quits(), retry=QUICK).arows(hidden(RECORD, "b"))
        assert rows.tolist() == [ZEROS, vector("b")]

    @pytest.mark.parametrize(
        "fault", [None, ValueError, lambda text: StatusError(text, status_code=429)], ids=["none", "400", "429"]
    )
    def test_no_text_is_kept_after_the_call(self, fault: Any) -> None:
        class Text(str):
            __slots__ = ()

        silent = SilentEmbeddings(ScriptedEmbeddings(raises={RECORD: fault} if fault else {}), retry=QUICK)
        boxes = [OpaqueValue(Text(RECORD)), OpaqueValue(Text("b"))]
        silent.rows(boxes)
        asyncio.run(silent.arows(boxes))
        here = silent._calls._here()
        for pool in (here.threads(inside_a_loop=False), here.awaited_threads()):
            assert pool is not None
            all_here = threading.Barrier(pool._max_workers)  # a thread lets go of its last work before the next
            list(pool.map(lambda _, meet=all_here: meet.wait(), range(pool._max_workers)))
        gc.collect()
        assert len([item for item in gc.get_objects() if type(item) is Text]) == 2
        del boxes
        gc.collect()
        assert not [item for item in gc.get_objects() if type(item) is Text]


@pytest.fixture(scope="module")
def served() -> Iterator[Provider]:
    with embeddings_provider() as running:
        yield running


@pytest.fixture
def silent(served: Provider) -> SilentEmbeddings:
    made = SilentEmbeddings(stock(served), retry=QUICK)
    served.clear()
    return made


@pytest.mark.loopback
class TestOpenAIEmbeddings:
    """The stock class, over HTTP."""

    async def test_each_text_is_one_request_in_both_ways(self, served: Provider, silent: SilentEmbeddings) -> None:
        rows = silent.rows(hidden("a", RECORD))
        assert rows.tolist() == [vector("a"), vector(RECORD)]
        assert (await silent.arows(hidden("a", RECORD))).tobytes() == rows.tobytes()
        assert sorted(len(request.body["input"]) for request in served.received) == [1] * 4
        assert silent.name == "loopback"
        assert silent.dimension == SIZE

    @pytest.mark.parametrize(
        "fault",
        [
            echoing_400(),
            rate_limited(),
            server_error(),
            html(),
            html(status=502),
            huge(megabytes=1),
            truncated(),
            hang_up(),
        ],
        ids=["400", "429", "500", "page", "page 502", "huge", "truncated", "hang up"],
    )
    async def test_a_fault_of_one_text_is_one_row_of_zeros_and_nothing_else(
        self, fault: Any, served: Provider, silent: SilentEmbeddings
    ) -> None:
        served.script(fault, when=RECORD)
        seen = [
            observe(lambda: silent.rows(hidden("a", RECORD, "b"))),
            await aobserve(lambda: silent.arows(hidden("a", RECORD, "b"))),
        ]
        assert [one.result.tolist() for one in seen] == [[vector("a"), ZEROS, vector("b")]] * 2
        assert [leaks(one) for one in seen] == [set(), set()]

    async def test_a_rate_limit_that_passes_is_waited_out(self, served: Provider, silent: SilentEmbeddings) -> None:
        served.script(rate_limited(), when=RECORD, times=2)
        assert silent.rows(hidden(RECORD)).tolist() == [vector(RECORD)]
        served.script(rate_limited(), when=RECORD, times=2)
        assert (await silent.arows(hidden(RECORD))).tolist() == [vector(RECORD)]

    async def test_private_calls_log_nothing_where_public_ones_do(
        self, silent: SilentEmbeddings, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.DEBUG):
            caplog.clear()
            silent.rows(hidden(RECORD))
            await silent.arows(hidden(RECORD))
            assert [one.name for one in caplog.records if one.name != "asyncio"] == []
            silent.public(["a"])
            assert any(one.name.startswith(("openai", "http")) for one in caplog.records)

    def test_a_page_in_the_place_of_the_api_says_what_to_check(self, served: Provider) -> None:
        served.clear()
        served.script(html())
        with pytest.raises(CapabilityError, match="base_url"):
            SilentEmbeddings(stock(served))
        served.clear()
