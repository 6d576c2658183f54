"""Label rows: answers that name no label, counted in a column of their own, and many public prompts in batches."""

from __future__ import annotations

import asyncio
import math
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from langchain_dpicl.backends.base import Rows
from langchain_dpicl.backends.embedded import EmbeddedModel
from langchain_dpicl.backends.fake import FakeBackend
from langchain_dpicl.backends.langchain.texts import TextVoteBackend
from langchain_dpicl.backends.private_calls.call import RetryPolicy
from langchain_dpicl.backends.resolve import as_choice_backend
from langchain_dpicl.backends.rows.label_rows import MOST_AT_ONCE, LabelRows, OtherBackend
from langchain_dpicl.backends.sync_async import LimitConcurrency
from langchain_dpicl.exceptions import CapabilityError, ConfigurationError, ModelCallError
from tests.contracts.backend import same_bits
from tests.scripted_models import ScriptedChat, ScriptedLLM, StatusError, by_word
from tests.unit_tests.backends.langchain.test_texts import TextChat, saying
from tests.unit_tests.backends.rows.test_label_rows import (
    CANARY,
    DRIVERS,
    ENGINES,
    LABELS,
    MARKS,
    TEXTS,
    Choices,
    PublicChoices,
    Stopping,
    Tokens,
    asked,
    asked_public,
    given_scores,
    hashed,
    pieces,
    private_things,
    row_prompts,
    spoilt,
)

QUICK = RetryPolicy(first_wait=0.001, max_wait=0.001)


def asked_rows(rows: LabelRows, prompts: Any, *, is_async: bool = False) -> Rows:
    ask = rows.request_public_rows(prompts)
    return asyncio.run(ask.arun()) if is_async else ask.run()


def by_hash(text: str) -> str | None:
    """One of the texts, or none."""
    return (*TEXTS, None)[int(hashed(text, "named") * 1000) % 5]


class Votes(PublicChoices):
    """Names a text after each prompt, or none of them, and tells that from a call that failed."""

    def __init__(self, named: Callable[[str], str | None] = by_hash) -> None:
        super().__init__("text votes", lambda text, choice: 0.0 if named(text) == choice else -math.inf)

    def score_with_other(self, prompts: Sequence[str], choices: Sequence[str]) -> Any:
        self.calls.append((tuple(prompts), tuple(choices)))
        rows = np.full((len(prompts), len(choices) + 1), -math.inf)
        for row, prompt in zip(rows, prompts, strict=True):
            if "<down>" not in prompt:
                row[:-1] = [self.one(prompt, choice) for choice in choices]
                row[-1] = 0.0 if np.isneginf(row).all() else -math.inf
        return spoilt(prompts, rows)

    async def ascore_with_other(self, prompts: Sequence[str], choices: Sequence[str]) -> Any:
        await asyncio.sleep(0)
        return self.score_with_other(prompts, choices)


class FirstTokens(Tokens):
    """Reports of a public prompt what it reports of a private one."""

    def first_tokens(self, prompt: str) -> Any:
        (top,) = spoilt([prompt], [self._fake.top_tokens(prompt, (), top_k=5)])  # type: ignore[arg-type]
        return top

    async def afirst_tokens(self, prompt: str) -> Any:
        return self.first_tokens(prompt)


NAMED = {"a": " coin", "b": " fee", "c": " cash"}


def votes() -> LabelRows:
    return LabelRows(Votes(NAMED.get), LABELS, calibrate=False, other=True)


class TestOther:
    @DRIVERS
    def test_answers_without_a_label_count_last_and_failed_calls_nowhere(self, is_async: bool) -> None:
        assert isinstance(Votes(), OtherBackend)
        found = asked(votes(), (("a",), ("none",), None, ("<down>",), ("b",)), is_async=is_async)
        assert found.tolist() == [[0, 1, 0, 0], [0, 0, 0, 1], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 1, 0]]
        assert found.dtype == np.float64

    def test_the_width_has_the_column_more_and_the_kind_stays(self) -> None:
        rows = votes()
        assert (rows.width, rows.kind, rows.counts_other, rows.calibrates) == (4, "text votes", True, False)
        assert repr(rows) == "LabelRows(kind='text votes', width=4, calibrates=False, counts_other=True)"
        plain = LabelRows(Votes(), LABELS, calibrate=False)
        assert (plain.width, plain.counts_other) == (3, False)

    def test_without_it_the_same_rows_have_one_column_less(self) -> None:
        prompts = tuple((f"{place}",) for place in range(40))
        counted = asked(LabelRows(Votes(), LABELS, calibrate=False, other=True), prompts)
        plain = asked(LabelRows(Votes(), LABELS, calibrate=False), prompts)
        assert same_bits(counted[:, :-1], plain)
        assert counted.sum(axis=1).tolist() == [1.0] * 40
        assert 0 < counted[:, -1].sum() < 40

    @DRIVERS
    def test_public_answers_are_counted_too_and_a_failed_call_raises(self, is_async: bool) -> None:
        rows = votes()
        assert asked_public(rows, ("b",), is_async=is_async).tolist() == [0, 0, 1, 0]
        assert asked_public(rows, ("none",), is_async=is_async).tolist() == [0, 0, 0, 1]
        with pytest.raises(ModelCallError, match="the model is down"):
            asked_public(rows, ("<down>",), is_async=is_async)

    @pytest.mark.parametrize("kind", ENGINES)
    def test_is_refused_where_labels_share_all_probability(self, kind: str) -> None:
        with pytest.raises(ConfigurationError, match="other=True with text votes only"):
            LabelRows(ENGINES[kind](), LABELS, calibrate=False, other=True)

    def test_is_refused_where_a_failed_call_looks_like_an_answer_without_a_label(self) -> None:
        with pytest.raises(CapabilityError, match="found PublicChoices; take TextVoteBackend"):
            LabelRows(PublicChoices("text votes"), LABELS, calibrate=False, other=True)

    def test_votes_are_not_calibrated_with_it_either(self) -> None:
        with pytest.raises(ConfigurationError, match="a text vote has no probabilities"):
            LabelRows(Votes(), LABELS, calibrate=True, other=True)

    def test_an_engine_whose_private_rows_have_another_form_is_refused(self) -> None:
        class Listed(Votes):
            def score_with_other(self, prompts: Sequence[str], choices: Sequence[str]) -> Any:
                return super().score_with_other(prompts, choices).tolist()

        with pytest.raises(CapabilityError, match=r"score_with_other, for no prompts too, found list"):
            LabelRows(Listed(), LABELS, calibrate=False, other=True)

    @pytest.mark.parametrize("other", [False, True])
    def test_an_engine_whose_awaited_rows_alone_have_another_form_is_refused_before_they_are_asked(
        self, other: bool
    ) -> None:
        class Listed(Votes):
            async def ascore_with_other(self, prompts: Sequence[str], choices: Sequence[str]) -> Any:
                return (await super().ascore_with_other(prompts, choices)).tolist()

            async def ascore_choices(self, prompts: Sequence[str], choices: Sequence[str]) -> Any:
                return (await super().ascore_choices(prompts, choices)).tolist()

        rows = LabelRows(Listed(), LABELS, calibrate=False, other=other)
        asked_public(rows, ("b",))
        with pytest.raises(CapabilityError, match=r"engine's ascore_\w+, for no prompts too, found list"):
            asked_public(rows, ("b",), is_async=True)

    def test_an_engine_that_says_both_still_gives_a_row_that_sums_to_one(self) -> None:
        class Both(Votes):
            def score_with_other(self, prompts: Sequence[str], choices: Sequence[str]) -> Any:
                return np.zeros((len(prompts), len(choices) + 1))

        found = asked(LabelRows(Both(), LABELS, calibrate=False, other=True), (("a",),))
        assert found == pytest.approx(np.array([[0.2, 0.4, 0.2, 0.2]]))

    @DRIVERS
    @pytest.mark.parametrize("mark", MARKS)
    def test_a_fault_abstains_in_its_own_row(self, mark: str, is_async: bool) -> None:
        found = asked(votes(), (("none",), (f"<{mark}>",), ("b",)), is_async=is_async)
        assert found.tolist() == [[0, 0, 0, 1], [0, 0, 0, 0], [0, 0, 1, 0]]

    @settings(max_examples=60, deadline=None)
    @given(data=st.data())
    def test_replacing_one_row_moves_no_bit_of_another(self, data: st.DataObject) -> None:
        rows = LabelRows(Votes(), LABELS, calibrate=False, other=True)
        prompts = data.draw(st.lists(row_prompts, min_size=1, max_size=4))
        place = data.draw(st.integers(0, len(prompts) - 1))
        changed = [*prompts[:place], data.draw(row_prompts), *prompts[place + 1 :]]
        before, after = asked(rows, tuple(prompts)), asked(rows, tuple(changed))
        others = np.arange(len(prompts)) != place
        assert before.shape == after.shape == (len(prompts), 4)
        assert same_bits(before[others], after[others])
        assert set(before.sum(axis=1)) <= {0.0, 1.0}

    @DRIVERS
    def test_ctrl_c_goes_on_from_frames_that_hold_nothing_private(self, is_async: bool) -> None:
        class Stops(Votes):
            def score_with_other(self, prompts: Sequence[str], choices: Sequence[str]) -> Any:
                return Stopping().score_choices(prompts, [*choices, "other"])

        rows = LabelRows(Stops(), LABELS, calibrate=False, other=True)
        with pytest.raises(KeyboardInterrupt) as caught:
            asked(rows, ((CANARY,), (f"<stop> {CANARY}",)), is_async=is_async)
        assert private_things(caught.value) == []


class TestOtherOfAModelThatWritesText:
    def rows(self) -> LabelRows:
        table = {"aaa": "Card.", "bbb": "ATM", "sorry": "I cannot tell.", "both": "card or cash machine", "empty": ""}
        raises = {"fails": StatusError("content", status_code=400), "busy": StatusError("busy", status_code=503)}
        engine = TextVoteBackend(TextChat(say=saying(table), raises=raises), retry=QUICK)
        return LabelRows(engine, (("card",), ("cash machine", "ATM")), calibrate=False, other=True)

    @DRIVERS
    def test_refusals_and_unclear_answers_count_and_failures_do_not(self, is_async: bool) -> None:
        prompts = (("aaa",), ("bbb",), ("sorry",), ("both",), ("empty",), None, ("fails",), ("busy",))
        found = asked(self.rows(), prompts, is_async=is_async)
        assert found[:5].argmax(axis=1).tolist() == [0, 1, 2, 2, 2]
        assert found.sum(axis=1).tolist() == [1, 1, 1, 1, 1, 0, 0, 0]

    @DRIVERS
    def test_public_prompts_give_the_same_numbers_and_their_failure_is_an_error(self, is_async: bool) -> None:
        rows = self.rows()
        names = ("aaa", "bbb", "sorry", "both", "empty", "aaa")
        expected = asked(rows, tuple((name,) for name in names))
        found = asked_rows(rows, [(name,) for name in names], is_async=is_async)
        assert same_bits(found, expected)
        assert same_bits(found, np.array([asked_public(rows, (name,), is_async=is_async) for name in names]))
        for name in ("fails", "busy"):
            with pytest.raises(ModelCallError, match="a public call to text-chat failed"):
                asked_rows(rows, [("aaa",), (name,)], is_async=is_async)


@DRIVERS
def test_a_prompt_that_stands_for_private_ones_needs_text(is_async: bool) -> None:
    engine = TextVoteBackend(TextChat(say=saying({"empty": "", "aaa": "card"})), retry=QUICK)
    for other, expected in ((False, [0, 0]), (True, [0, 0, 1])):
        rows = LabelRows(engine, (("card",), ("cash machine",)), calibrate=False, other=other)
        for prompts in ([("empty",)], [("empty",), ("aaa",)], [("aaa",), ("empty",)]):
            found = asked_rows(rows, prompts, is_async=is_async)
            assert found[prompts.index(("empty",))].tolist() == expected
        ask = rows.public_row(("empty",))
        with pytest.raises(ModelCallError, match="no text that counts"):
            _ = asyncio.run(ask.arun()) if is_async else ask.run()


def public_rows(kind: str, *, calibrate: bool = False) -> LabelRows:
    return LabelRows(ENGINES[kind](), LABELS, calibrate=calibrate)


def one_by_one(rows: LabelRows, prompts: Sequence[tuple[str, ...]], *, is_async: bool = False) -> Rows:
    return np.array([asked_public(rows, row, is_async=is_async) for row in prompts])


MANY = [(f"prompt {place}", "N/A", f"free {place % 3}") for place in range(150)]


class TestManyPublicPrompts:
    @DRIVERS
    @pytest.mark.parametrize("calibrate", [False, True], ids=["plain", "calibrated"])
    @pytest.mark.parametrize("kind", ENGINES)
    def test_give_the_numbers_of_one_by_one(self, kind: str, calibrate: bool, is_async: bool) -> None:
        rows = public_rows(kind, calibrate=calibrate)
        found = asked_rows(rows, MANY, is_async=is_async)
        assert found.dtype == np.float64
        assert found == pytest.approx(one_by_one(rows, MANY, is_async=is_async), rel=1e-14)
        assert len(np.unique(found, axis=0)) > 100

    @DRIVERS
    @pytest.mark.parametrize(
        ("engine", "other"),
        [(Votes, False), (Votes, True), (lambda: PublicChoices("text votes", Votes().one), False)],
        ids=["tells", "tells and counts", "does not tell"],
    )
    def test_votes_do_so_too(self, engine: Callable[[], Any], other: bool, is_async: bool) -> None:
        rows = LabelRows(engine(), LABELS, calibrate=False, other=other)
        found = asked_rows(rows, MANY, is_async=is_async)
        assert found.shape == (150, 3 + other)
        assert same_bits(found, one_by_one(rows, MANY, is_async=is_async))
        assert 0 < (~found[:, :3].any(axis=1)).sum() < 150

    @DRIVERS
    def test_the_embedded_model_gives_the_same_bits(self, is_async: bool) -> None:
        rows = LabelRows(EmbeddedModel(), ((" colour",), (" number",)), calibrate=True)
        words = ["blue", "nine", *(f"word{place}" for place in range(70))]
        prompts = [(f"Word: red\nKind: colour\n\nWord: {word}\nKind:", "Word: N/A\nKind:") for word in words]
        assert same_bits(asked_rows(rows, prompts, is_async=is_async), one_by_one(rows, prompts))

    @DRIVERS
    @pytest.mark.parametrize("model", [ScriptedLLM, ScriptedChat], ids=["completion", "chat"])
    def test_models_with_logprobs_give_the_same_bits(self, model: Any, is_async: bool) -> None:
        tops = {"aaa": {"card": 0.3, " Card": 0.1, "ATM": 0.05}, "none": {"I": 0.9}, "N/A": {"card": 0.2, "fee": 0.1}}
        raises = {"fails": StatusError("content", status_code=400)}
        rest = {"card": 0.2, "cash": 0.2, "fee": 0.4, "w": 0.02, "x": 0.02, "y": 0.02, "z": 0.02}
        engine = as_choice_backend(model(answer=by_word(tops, rest), raises=raises))
        rows = LabelRows(engine, (("card",), ("cash machine", "ATM"), ("fee",)), calibrate=True)
        prompts = [("aaa", "N/A"), ("none", "N/A"), ("bbb", "N/A", "none")]
        found = asked_rows(rows, prompts, is_async=is_async)
        assert same_bits(found, one_by_one(rows, prompts, is_async=is_async))
        assert found[1].tolist() == [0.0, 0.0, 0.0]
        with pytest.raises(ModelCallError, match="a public call to"):
            asked_rows(rows, [*prompts, ("fails", "N/A")], is_async=is_async)

    @DRIVERS
    def test_go_in_batches_of_a_public_size_and_each_text_once(self, is_async: bool) -> None:
        engine = Choices()
        asked_rows(LabelRows(engine, LABELS, calibrate=True), MANY, is_async=is_async)
        batches = [prompts for prompts, _ in engine.calls]
        assert [len(batch) for batch in batches] == [64, 64, 26]  # 150 queries, "N/A" and three more
        assert MOST_AT_ONCE == 64
        assert sorted(sum(batches, ())) == sorted({text for row in MANY for text in row})

    @DRIVERS
    def test_each_batch_is_a_session_which_is_closed(self, is_async: bool) -> None:
        engine = ENGINES["first tokens"]()
        asked_rows(LabelRows(engine, LABELS, calibrate=False), MANY, is_async=is_async)
        assert [len(opened) for opened in engine.opened] == [64, 64, 21]  # the first goes alone, as a public call
        assert engine.closed == 3

    @DRIVERS
    def test_an_outage_is_detected_by_one_public_call(self, is_async: bool) -> None:
        engine = PublicChoices("decisions")
        rows = LabelRows(engine, LABELS, calibrate=True)
        engine.calls.clear()
        with pytest.raises(ModelCallError, match="the model is down"):
            asked_rows(rows, [("a <down>", "a0"), ("b", "b0")], is_async=is_async)
        assert not any(prompts for prompts, _ in engine.calls)

    def test_without_calibration_only_the_queries_are_asked(self) -> None:
        engine = Choices()
        asked_rows(LabelRows(engine, LABELS, calibrate=False), [("a", "a0"), ("b", "b0"), ("a", "a1")])
        assert [prompts for prompts, _ in engine.calls] == [("a", "b")]

    @DRIVERS
    @pytest.mark.parametrize("kind", ENGINES)
    def test_none_make_no_call_and_no_rows(self, kind: str, is_async: bool) -> None:
        engine = ENGINES[kind]()
        rows = LabelRows(engine, LABELS, calibrate=False)
        assert asked_rows(rows, [], is_async=is_async).shape == (0, 3)
        asked = [prompts for prompts, _ in engine.calls] if isinstance(engine, Choices) else engine.opened
        assert not any(asked)

    def test_may_be_asked_for_again(self) -> None:
        ask = LabelRows(Choices(), LABELS, calibrate=False).request_public_rows([("a",), ("b",)])
        assert same_bits(ask.run(), asyncio.run(ask.arun()))

    @DRIVERS
    @pytest.mark.parametrize("mark", ["value", "memory", "one row less", "one column more", "objects", "nothing"])
    @pytest.mark.parametrize("engine", [Choices, Votes], ids=["likelihoods", "votes"])
    def test_a_failed_call_raises(self, engine: Callable[[], Any], mark: str, is_async: bool) -> None:
        rows = LabelRows(engine(), LABELS, calibrate=False)
        with pytest.raises(ModelCallError):
            asked_rows(rows, [("a",), (f"<{mark}>",)], is_async=is_async)

    @DRIVERS
    def test_a_batch_of_another_shape_raises_though_each_prompt_alone_would_do(self, is_async: bool) -> None:
        class Short(Choices):
            def score_choices(self, prompts: Sequence[str], choices: Sequence[str]) -> Any:
                return super().score_choices(prompts[:1], choices)

        with pytest.raises(ModelCallError, match=r"expected float64\[2, 4\] for public prompts"):
            asked_rows(LabelRows(Short(), LABELS, calibrate=False), [("a",), ("b",)], is_async=is_async)

    @pytest.mark.parametrize("engine", [Choices, Votes], ids=["likelihoods", "votes"])
    async def test_awaited_ones_block_nobody(self, engine: type[Any]) -> None:
        class Awaited(engine):  # type: ignore[misc]
            async def ascore_choices(self, prompts: Sequence[str], choices: Sequence[str]) -> Any:
                return super().score_choices(prompts, choices)

            async def ascore_with_other(self, prompts: Sequence[str], choices: Sequence[str]) -> Any:
                return super().score_with_other(prompts, choices)

            async def ascore_public(self, prompt: str, choices: Sequence[str]) -> Any:
                return (await self.ascore_choices([prompt], choices))[0]

            def score_choices(self, prompts: Sequence[str], choices: Sequence[str]) -> Any:
                assert not prompts
                return super().score_choices(prompts, choices)

            def score_with_other(self, prompts: Sequence[str], choices: Sequence[str]) -> Any:
                raise AssertionError

        rows = LabelRows(Awaited(), LABELS, calibrate=False)
        assert (await rows.request_public_rows([("a",), ("b",)]).arun()).shape == (2, 3)

    @DRIVERS
    def test_an_engine_with_public_calls_is_asked_there_why_a_row_failed(self, is_async: bool) -> None:
        for engine in (PublicChoices("decisions", lambda text, choice: -math.inf), Votes()):
            rows = LabelRows(engine, LABELS, calibrate=False)
            with pytest.raises(ModelCallError, match="the model is down"):
                asked_rows(rows, [("a",), ("<down>",)], is_async=is_async)

    @DRIVERS
    def test_a_failed_call_on_a_content_free_prompt_raises(self, is_async: bool) -> None:
        rows = LabelRows(given_scores({"a": (0.1, 0.1, 0.1, 0.1)}), LABELS, calibrate=True)
        with pytest.raises(ModelCallError, match="no likelihood for any label"):
            asked_rows(rows, [("a", "failed")], is_async=is_async)

    @DRIVERS
    def test_a_failed_call_for_top_tokens_raises(self, is_async: bool) -> None:
        fake = FakeBackend(pieces, max_top_k=5, fail_rows_containing="failed", fail_public_call=1)
        rows = LabelRows(Tokens(fake), LABELS, calibrate=False)
        with pytest.raises(ModelCallError, match="as scripted"):
            asked_rows(rows, [("a",), ("failed",)], is_async=is_async)

    @DRIVERS
    def test_a_row_that_failed_in_its_batch_is_asked_once_more(self, is_async: bool) -> None:
        fake = FakeBackend(pieces, max_top_k=5, fail_rows_containing="failed")
        rows = LabelRows(Tokens(fake), LABELS, calibrate=False)
        found = asked_rows(rows, [("a",), ("failed",), ("b",)], is_async=is_async)
        assert fake.calls["public"] == 2  # the first of all, and the failed one
        assert found.sum(axis=1) == pytest.approx(1.0)

    @DRIVERS
    def test_an_answer_without_a_label_is_asked_once_where_the_engine_tells_it_from_a_failure(
        self, is_async: bool
    ) -> None:
        engine = Votes(NAMED.get)
        rows = LabelRows(engine, LABELS, calibrate=False)
        engine.calls.clear()
        assert asked_rows(rows, [("none",), ("a",), ("nothing",)], is_async=is_async)[1:].tolist() == [
            [0, 1, 0],
            [0, 0, 0],
        ]
        assert [prompts for prompts, _ in engine.calls if prompts] == [("none",), ("a", "nothing")]

    @DRIVERS
    def test_a_failed_call_takes_nothing_along_of_what_the_engine_raised(self, is_async: bool) -> None:
        with pytest.raises(ModelCallError, match="failed with ValueError") as caught:
            asked_rows(LabelRows(Choices(), LABELS, calibrate=False), [("<value>",)], is_async=is_async)
        assert caught.value.__cause__ is caught.value.__context__ is None
        assert CANARY not in "".join(traceback.format_exception(caught.value))

    @DRIVERS
    @pytest.mark.parametrize("engine", [PublicChoices("decisions"), FirstTokens(FakeBackend(pieces, max_top_k=5))])
    def test_where_errors_are_kept_the_engine_s_own_cost_one_text(self, engine: Any, is_async: bool) -> None:
        rows = LabelRows(engine, LABELS, calibrate=False)
        ask = rows.request_public_texts(["<value>", "a"], is_whole=False, keep_errors=True)
        found = asyncio.run(ask.arun()) if is_async else ask.run()
        assert isinstance(found["<value>"], ModelCallError)
        assert len(found["a"]) == 3


class Counting(TextChat):
    """Notes how many of its calls are in flight at once; they stay until as many as hoped have been, on any machine."""

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        with LOCK:
            is_first = not FLIGHT["most"]  # the others begin when it has ended
            FLIGHT["now"] += 1
            FLIGHT["most"] = max(FLIGHT["most"], FLIGHT["now"])
        patience = time.monotonic() + 60
        while not is_first and FLIGHT["most"] < FLIGHT["hoped"] and time.monotonic() < patience:
            time.sleep(0.001)
        time.sleep(0.01)
        try:
            return super()._generate(*args, **kwargs)
        finally:
            with LOCK:
                FLIGHT["now"] -= 1


LOCK = threading.Lock()
FLIGHT = {"now": 0, "most": 0, "hoped": 0}


class TestCallsInFlight:
    @pytest.fixture
    def rows(self) -> LabelRows:
        engine = TextVoteBackend(Counting(say=saying({}, otherwise="card")), max_concurrency=6, retry=QUICK)
        FLIGHT.update(now=0, most=0, hoped=0)
        return LabelRows(engine, (("card",), ("cash",)), calibrate=False)

    @pytest.mark.parametrize("limit", [None, 2])
    def test_are_those_of_the_engine_or_of_the_run(self, rows: LabelRows, limit: int | None) -> None:
        FLIGHT["hoped"] = limit or 6
        found = LimitConcurrency(rows.request_public_rows([(f"{place}",) for place in range(18)]), limit).run()
        assert found.tolist() == [[1.0, 0.0]] * 18
        assert FLIGHT["most"] == FLIGHT["hoped"]

    async def test_blocking_inside_a_running_loop_comes_to_an_end(self, rows: LabelRows) -> None:
        awaited = [asyncio.ensure_future(rows.request_public_rows([(f"x{place}",)]).arun()) for place in range(12)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        found = rows.request_public_rows([(f"{place}",) for place in range(12)]).run()
        assert found.tolist() == [[1.0, 0.0]] * 12
        assert all(row.tolist() == [[1.0, 0.0]] for row in await asyncio.gather(*awaited))
