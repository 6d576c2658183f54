"""Answers become rows, one prompt each: a fault stays in its row, a stop takes nothing along, nothing is kept."""

from __future__ import annotations

import asyncio
import gc
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.embeddings import DeterministicFakeEmbedding

from langchain_dpicl._opaque import OpaqueRows
from langchain_dpicl.backends.embedded import EmbeddedModel
from langchain_dpicl.backends.fake import FakeBackend, scripted
from langchain_dpicl.backends.langchain.backend import LangChainBackend
from langchain_dpicl.backends.langchain.texts import TextVoteBackend
from langchain_dpicl.backends.private_calls.embeddings import SilentEmbeddings
from langchain_dpicl.backends.rows import answer_rows
from langchain_dpicl.backends.rows.answer_rows import AnswerRows, Keywords
from langchain_dpicl.exceptions import CapabilityError, ConfigurationError, PrivateAccessError
from tests.canary import RECORD, VOTE, canaries_in, describe
from tests.doubles import PanicError
from tests.scripted_models import ScriptedChat, by_word
from tests.unit_tests.test_private_frames import locals_of_ours

DOMAIN = ("boat", "red car", "sea")
EMBEDDINGS = SilentEmbeddings(DeterministicFakeEmbedding(size=5))


class Echo:
    """Answers each prompt by itself, or as `raises` says where a mark is in it; counts how it was asked."""

    name = "echo"

    def __init__(
        self,
        answer: Callable[[str], Any] = lambda prompt: prompt,
        *,
        raises: dict[str, BaseException] | None = None,
        spoil: Callable[[list[Any]], Any] = lambda answers: answers,
    ) -> None:
        self.answer = answer
        self.raises = raises or {}
        self.spoil = spoil
        self.asked: list[tuple[int, int, tuple[str, ...]]] = []

    def complete(self, prompts: Sequence[str], *, max_tokens: int, stop: Sequence[str] = ()) -> Any:
        self.asked.append((len(prompts), max_tokens, tuple(stop)))
        for mark, error in self.raises.items():
            if any(mark in prompt for prompt in prompts):
                raise error
        return self.spoil([self.answer(prompt) for prompt in prompts])

    async def acomplete(self, prompts: Sequence[str], *, max_tokens: int, stop: Sequence[str] = ()) -> Any:
        await asyncio.sleep(0)
        return self.complete(prompts, max_tokens=max_tokens, stop=stop)


def sources(engine: Any) -> list[AnswerRows]:
    return [
        AnswerRows.embedded(engine, EMBEDDINGS, max_tokens=4),
        AnswerRows.keywords(engine, Keywords(DOMAIN), max_tokens=4),
    ]


KINDS = ["embeddings", "keywords"]


@pytest.fixture(params=[0, 1], ids=KINDS)
def make(request: pytest.FixtureRequest) -> Callable[[Any], AnswerRows]:
    return lambda engine: sources(engine)[request.param]


def both(source: AnswerRows, prompts: Sequence[str | None]) -> np.ndarray:
    """The rows, asked for in both ways, which have to agree."""
    rows = source.ask(prompts).run().take()
    awaited = asyncio.run(source.ask(prompts).arun()).take()  # type: ignore[attr-defined]
    assert rows.tobytes() == awaited.tobytes()
    assert rows.shape == (len(prompts), source.width)
    assert rows.dtype == np.float64
    return rows


class TestRows:
    def test_embedded_rows_are_the_embeddings_of_the_answers(self) -> None:
        rows = both(AnswerRows.embedded(Echo(str.upper), EMBEDDINGS, max_tokens=4), ["sea", None, "boat"])
        expected = EMBEDDINGS.public(["SEA", "BOAT"])
        assert rows[[0, 2]].tobytes() == expected.tobytes()
        assert rows[1].tolist() == [0.0] * 5

    def test_keyword_rows_are_bits_of_the_answers_and_not_of_the_prompts(self) -> None:
        engine = Echo(lambda prompt: {"p0": "A Boat at sea", "p1": "my red car", "p2": "boats"}.get(prompt, ""))
        rows = both(AnswerRows.keywords(engine, Keywords(DOMAIN), max_tokens=4), ["p0", "p1", "boat", "p2"])
        assert rows.tolist() == [[1.0, 0.0, 1.0], [0.0, 1.0, 0.0], [0.0] * 3, [0.0] * 3]

    def test_width_is_that_of_what_reads_the_answers(self) -> None:
        assert [source.width for source in sources(Echo())] == [5, 3]

    def test_tokens_and_stops_go_to_the_engine(self) -> None:
        engine = Echo()
        both(AnswerRows.keywords(engine, Keywords(DOMAIN), max_tokens=7, stop=["\n", "."]), ["a", "b"])
        assert engine.asked == [(2, 7, ("\n", "."))] * 2

    @pytest.mark.parametrize("prompts", [(), (None,), (None, None, None)], ids=repr)
    def test_nothing_is_asked_where_no_row_is_live(self, make: Any, prompts: Any) -> None:
        engine = Echo()
        assert not both(make(engine), prompts).any()
        assert engine.asked == []

    @pytest.mark.parametrize("answer", ["", " ", "\n\t\u3000", None, 3, b"boat", ["boat"]], ids=repr)
    def test_an_answer_that_says_nothing_abstains_alone(self, make: Any, answer: Any) -> None:
        rows = both(make(Echo(lambda prompt: answer if prompt == "odd" else prompt)), ["sea", "odd", "boat"])
        assert rows[1].tolist() == [0.0] * rows.shape[1]
        assert rows[[0, 2]].tobytes() == both(make(Echo()), ["sea", "boat"]).tobytes()

    def test_an_empty_answer_is_not_embedded(self) -> None:
        seen: list[str] = []

        class Seeing(DeterministicFakeEmbedding):
            def embed_documents(self, texts: list[str]) -> list[list[float]]:
                seen.extend(texts)
                return super().embed_documents(texts)

        silent = SilentEmbeddings(Seeing(size=2))
        seen.clear()
        AnswerRows.embedded(Echo(), silent, max_tokens=1).ask(["a", "", None, "  "]).run()
        assert seen == ["a"]


class TestEngines:
    """Every engine of ours that writes text."""

    ENGINES = (
        ("FakeBackend", lambda: FakeBackend(scripted({"the sea": 1.0}), max_top_k=1)),
        ("EmbeddedModel", EmbeddedModel),
        ("LangChainBackend", lambda: LangChainBackend(_model(), max_top_k=1, continuation="instruct")),
        ("TextVoteBackend", lambda: TextVoteBackend(_model())),
    )

    @pytest.mark.parametrize("engine", [make for _, make in ENGINES], ids=[name for name, _ in ENGINES])
    def test_its_rows_are_those_of_its_answers(self, engine: Any) -> None:
        engine = engine()
        prompts = ["Snow is white. Coal is", "The sea is blue. The"]
        answers = engine.complete(prompts, max_tokens=4)
        assert all(answers)
        embedded, keywords = sources(engine)
        assert both(embedded, prompts).tobytes() == EMBEDDINGS.public(answers).tobytes()
        expected = [Keywords(DOMAIN).bits(answer).tolist() for answer in answers]
        assert both(keywords, prompts).tolist() == expected

    @pytest.mark.parametrize("engine", [None, "model", FakeBackend, DeterministicFakeEmbedding(size=1)], ids=ascii)
    def test_what_does_not_complete_text_is_refused(self, make: Any, engine: Any) -> None:
        with pytest.raises(CapabilityError, match="completes text, found"):
            make(engine)

    def test_readers_have_to_be_ours_as_others_are_not_silent(self) -> None:
        with pytest.raises(ConfigurationError, match=r"SilentEmbeddings\(embeddings\)"):
            AnswerRows.embedded(Echo(), DeterministicFakeEmbedding(size=2), max_tokens=1)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match=r"Keywords\(domain\)"):
            AnswerRows.keywords(Echo(), ["boat"], max_tokens=1)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        "options",
        [{"max_tokens": 0}, {"max_tokens": 1.5}, {"max_tokens": 1, "stop": "x"}, {"max_tokens": 1, "stop": [""]}],
        ids=repr,
    )
    def test_numbers_and_stops_are_checked_before_any_call(self, options: Any) -> None:
        with pytest.raises(ConfigurationError):
            AnswerRows.keywords(Echo(), Keywords(DOMAIN), **options)


def _model() -> ScriptedChat:
    return ScriptedChat(answer=by_word({"Snow": {"red car": 0.6}}, {"boat sea": 1.0}))


FAULTS = [PanicError(), SystemExit(3), GeneratorExit(), asyncio.CancelledError(), ValueError(RECORD), MemoryError()]


class TestAFaultStaysInItsRow:
    @pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
    def test_an_engine_that_raises_for_one_prompt(self, make: Any, fault: BaseException) -> None:
        engine = Echo(raises={"odd": fault})
        rows = both(make(engine), ["sea", "odd", "boat"])
        assert rows[1].tolist() == [0.0] * rows.shape[1]
        assert rows[[0, 2]].tobytes() == both(make(Echo()), ["sea", "boat"]).tobytes()
        assert [count for count, *_ in engine.asked] == [3, 1, 1, 1] * 2

    @pytest.mark.parametrize(
        "spoil",
        [lambda a: a[:-1], lambda a: [*a, "boat"], lambda a: None, lambda a: "ab", dict.fromkeys],
        ids=["too few", "too many", "none", "one text", "a mapping"],
    )
    def test_an_engine_that_brings_something_else_than_one_answer_per_prompt(self, make: Any, spoil: Any) -> None:
        engine = Echo(spoil=lambda answers: spoil(answers) if len(answers) > 1 else answers)
        assert both(make(engine), ["sea", "boat"]).tobytes() == both(make(Echo()), ["sea", "boat"]).tobytes()

    def test_an_engine_that_never_answers_gives_zeros(self, make: Any) -> None:
        assert not both(make(Echo(raises={"": ValueError()})), ["sea", "boat"]).any()

    @pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
    def test_an_answer_that_raises_when_it_is_looked_at(self, make: Any, fault: BaseException) -> None:
        class Odd(str):
            __slots__ = ()

            def strip(self, *args: Any) -> str:
                raise fault

        rows = both(make(Echo(lambda prompt: Odd(prompt) if prompt == "odd" else prompt)), ["sea", "odd"])
        assert rows[1].tolist() == [0.0] * rows.shape[1]
        assert rows[:1].tobytes() == both(make(Echo()), ["sea"]).tobytes()

    @pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
    def test_reading_that_raises_for_one_answer(
        self, make: Any, fault: BaseException, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Neither reader does so on its own; a change of one is covered."""
        stacked, bits = SilentEmbeddings._stack, Keywords.bits
        source = make(Echo())
        whole = both(source, ["sea"])

        def failing(self: Any, replies: Any) -> Any:
            rows = stacked(self, replies)
            if any((row == odd).all() for row in rows):
                raise fault
            return rows

        def failing_bits(self: Any, text: Any) -> Any:
            if text == "odd":
                raise fault
            return bits(self, text)

        odd = EMBEDDINGS.public(["odd"])[0]
        monkeypatch.setattr(SilentEmbeddings, "_stack", failing)
        monkeypatch.setattr(Keywords, "bits", failing_bits)
        rows = both(source, ["odd", "sea"])
        assert rows[0].tolist() == [0.0] * rows.shape[1]
        assert rows[1:].tobytes() == whole.tobytes()

    @pytest.mark.parametrize("spoil", [lambda r: r[:, :-1], lambda r: r[:-1], lambda r: r.tolist(), lambda r: r > 0])
    def test_rows_of_another_shape_or_kind_are_not_taken(
        self, make: Any, spoil: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stacked, bits = SilentEmbeddings._stack, Keywords.bits
        monkeypatch.setattr(SilentEmbeddings, "_stack", lambda self, replies: spoil(stacked(self, replies)))
        monkeypatch.setattr(Keywords, "bits", lambda self, text: bits(self, text)[:-1])
        assert not both(make(Echo()), ["sea", "boat"]).any()

    @pytest.mark.parametrize("spoil", [lambda r: r[:, :-1], lambda r: r[:-1], lambda r: r.T, lambda r: r.astype(int)])
    def test_rows_that_are_odd_together_are_asked_for_one_by_one(
        self, spoil: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stacked = SilentEmbeddings._stack
        source = AnswerRows.embedded(Echo(), EMBEDDINGS, max_tokens=1)
        expected = both(source, ["sea", "boat"])

        def odd(self: Any, replies: Any) -> Any:
            return spoil(stacked(self, replies)) if len(replies) > 1 else stacked(self, replies)

        monkeypatch.setattr(SilentEmbeddings, "_stack", odd)
        assert both(source, ["sea", "boat"]).tobytes() == expected.tobytes()

    @given(
        st.lists(st.one_of(st.none(), st.text(max_size=8), st.sampled_from(["boat", "fail", "\ud800"])), max_size=6),
        st.integers(0, 5),
        st.one_of(st.none(), st.text(max_size=8), st.sampled_from(["red car", "fail", "\ud800"])),
    )
    def test_another_prompt_moves_its_own_row_alone(
        self, prompts: list[str | None], place: int, other: str | None
    ) -> None:
        for source in sources(Echo(raises={"fail": ValueError()})):
            before = source.ask(prompts).run().take()
            changed = [other if number == place else prompt for number, prompt in enumerate(prompts)]
            after = source.ask(changed).run().take()
            kept = [number for number in range(len(prompts)) if number != place]
            assert after[kept].tobytes() == before[kept].tobytes()
            assert np.isfinite(after).all()

    def test_a_caller_s_numpy_error_state_changes_nothing(self, make: Any) -> None:
        with np.errstate(all="raise"):
            rows = both(make(Echo()), ["sea", "boat"])
        assert rows.tobytes() == both(make(Echo()), ["sea", "boat"]).tobytes()


class TestStops:
    def test_ctrl_c_in_the_engine_takes_nothing_along(self, make: Any) -> None:
        ask = make(Echo(raises={"": KeyboardInterrupt(RECORD)})).ask([RECORD, "b"])
        with pytest.raises(KeyboardInterrupt) as caught:
            ask.run()
        self.check(caught.value)

    def test_ctrl_c_in_an_awaited_engine_takes_nothing_along(self, make: Any) -> None:
        with pytest.raises(KeyboardInterrupt) as caught:
            asyncio.run(make(Echo(raises={"": KeyboardInterrupt(RECORD)})).ask([RECORD, "b"]).arun())
        self.check(caught.value)

    @pytest.mark.parametrize("owner", [SilentEmbeddings, Keywords], ids=KINDS)
    @pytest.mark.parametrize("is_async", [False, True], ids=["run", "arun"])
    def test_ctrl_c_while_answers_are_read_takes_nothing_along(
        self, owner: Any, is_async: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source = sources(Echo(lambda prompt: VOTE))[owner is Keywords]

        def stopped(*args: Any) -> Any:
            raise KeyboardInterrupt(args)

        monkeypatch.setattr(owner, "_stack" if owner is SilentEmbeddings else "bits", stopped)
        with pytest.raises(KeyboardInterrupt) as caught:
            asyncio.run(source.ask([RECORD]).arun()) if is_async else source.ask([RECORD]).run()
        self.check(caught.value)

    @pytest.mark.parametrize("is_async", [False, True], ids=["run", "arun"])
    def test_ctrl_c_while_rows_are_put_together_takes_none_along(
        self, make: Any, is_async: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ask = make(Echo()).ask([RECORD])

        def stopped(rows: Any) -> Any:
            raise KeyboardInterrupt(rows)

        monkeypatch.setattr(answer_rows, "OpaqueRows", stopped)
        with pytest.raises(KeyboardInterrupt) as caught:
            asyncio.run(ask.arun()) if is_async else ask.run()
        self.check(caught.value)

    async def test_a_cancelled_task_is_cancelled_and_takes_nothing_along(self, make: Any) -> None:
        class Slow(Echo):
            async def acomplete(self, prompts: Sequence[str], **options: Any) -> Any:
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError as error:
                    raise asyncio.CancelledError(prompts) from error

        task = asyncio.create_task(make(Slow()).ask([RECORD, "b"]).arun())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError) as caught:
            await task
        assert canaries_in(describe(caught.value)) == []

    async def test_a_task_that_is_cancelled_while_it_embeds_takes_nothing_along(self) -> None:
        class Slow(DeterministicFakeEmbedding):
            async def aembed_documents(self, texts: list[str]) -> list[list[float]]:
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError as error:
                    raise asyncio.CancelledError(texts) from error
                return []

        source = AnswerRows.embedded(Echo(lambda prompt: VOTE), SilentEmbeddings(Slow(size=2)), max_tokens=1)
        task = asyncio.create_task(source.ask([RECORD, "b"]).arun())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError) as caught:
            await task
        assert canaries_in(describe(caught.value)) == []

    @staticmethod
    def check(error: BaseException) -> None:
        assert canaries_in(describe(error)) == []
        assert error.__context__ is None
        assert not [value for value in locals_of_ours(error) if isinstance(value, np.ndarray)]
        assert not [value for value in locals_of_ours(error) if isinstance(value, OpaqueRows) and value._rows]


class TestNothingIsKept:
    def test_an_ask_and_its_answer_show_nothing(self, make: Any) -> None:
        source = make(Echo(lambda prompt: VOTE))
        ask = source.ask([RECORD])
        shown = [f"{one!r} {one} {one!s:.999}" for one in (source, ask, ask.run(), *map(vars, [source]))]
        assert canaries_in(" ".join(shown)) == []
        assert "private" in repr(ask.run())
        with pytest.raises(PrivateAccessError):
            pickle.dumps(ask.prompts)

    def test_prompts_and_answers_are_gone_with_the_ask(self, make: Any) -> None:
        class Text(str):
            __slots__ = ()

        class Answer(Text):
            __slots__ = ()

        source = make(Echo(Answer))
        ask = source.ask([Text("sea"), Text("boat")])
        gc.collect()
        assert len([item for item in gc.get_objects() if type(item) in {Text, Answer}]) == 2
        ask.run()
        asyncio.run(ask.arun())
        del ask
        gc.collect()
        assert not [item for item in gc.get_objects() if type(item) in {Text, Answer}]
