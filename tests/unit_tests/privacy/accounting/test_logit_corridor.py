"""Logit mechanisms on the corridor: what is asked of engines, what one record can move, what is charged."""

from __future__ import annotations

import asyncio
import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from langchain_dpicl import Decoding, Noise, Rows
from langchain_dpicl.backends.base import Domain
from langchain_dpicl.backends.fake import FakeBackend, word_copier
from langchain_dpicl.backends.rows.rows import FullRowSource, PublicRowContext, log_rows, softmax_rows
from langchain_dpicl.exceptions import (
    CapabilityError,
    ConfigurationError,
    ModelCallError,
    PrivacyBudgetError,
    PrivateAccessError,
    RunInterruptedError,
)
from langchain_dpicl.generation.plan import TokenRule, public_margin, temperature_of
from langchain_dpicl.options import LogitNoise, LogitNoiseName, noise_of
from langchain_dpicl.privacy import accounting
from langchain_dpicl.privacy.accounting.events import (
    BoundedRangeEvent,
    ComposedEvent,
    ParallelEvent,
    PureEvent,
    RepeatedEvent,
    SubsampledEvent,
)
from langchain_dpicl.privacy.extensions.logit_sums import LOGIT_MECHANISMS
from langchain_dpicl.privacy.extensions.sparse_vector import SparseVectorTest
from langchain_dpicl.privacy.mechanisms.release_plan import PoissonUnits
from langchain_dpicl.release import token_block as blocks
from langchain_dpicl.release.curator import SecretSample
from tests.doubles import WORDS
from tests.full_doubles import FullFake, full_engine, same_coins
from tests.unit_tests.generation.test_synthesis import LABELS, RECORDS, handler, private_examples, synthesizer

WANTED = {"my card was declined", "my transfer is late"}


def writing(private: Any = None, **options: Any) -> Any:
    given = {
        "noise": LogitNoise("recentered_clip", clip=12.0, multiplier=0.02),
        "rows": Rows(redraw_every="run"),
        **options,
    }
    return synthesizer(private or private_examples(), **given)


def plain() -> FakeBackend:
    return FakeBackend(word_copier(WORDS), vocabulary=WORDS)


class Sums:
    """Remembers the rows that reach the aggregation."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.matrices: list[np.ndarray] = []
        self.publics: list[np.ndarray | None] = []
        real = blocks.sum_rows

        def summed(boxed: Any, plan: Any, width: int, public: Any = None) -> Any:
            rows = boxed.take()
            self.matrices.append(rows.copy())
            self.publics.append(public)
            return real(blocks.OpaqueRows(rows), plan, width, public=public)

        monkeypatch.setattr(blocks, "sum_rows", summed)


@pytest.mark.parametrize("engine", [plain, full_engine], ids=["public asked apart", "public in the batch"])
@pytest.mark.parametrize("mechanism", LOGIT_MECHANISMS)
@pytest.mark.parametrize("rows", [Rows(redraw_every="run"), Rows(slots=20, shots=2, redraw_every="run")], ids=str)
def test_what_most_records_agree_on_comes_out(engine: Any, mechanism: LogitNoiseName, rows: Rows) -> None:
    released = writing(llm=engine(), noise=LogitNoise(mechanism, clip=12.0, multiplier=0.02), rows=rows).run()
    assert {example["text"] for example in released.examples} == WANTED
    assert released.plan["mechanism"] == mechanism
    assert released.plan["clip"] == 12.0


@pytest.mark.parametrize("engine", [plain, full_engine], ids=["public asked apart", "public in the batch"])
def test_probabilities_are_the_same_from_logits(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    same_coins(monkeypatch, 3)
    sums = Sums(monkeypatch)
    writing(llm=engine(), noise=Noise("gumbel", multiplier=0.05), rows=Rows(slots=4, shots=2, redraw_every="run")).run()
    assert all((rows >= 0).all() and np.allclose(rows.sum(axis=1), 1.0) for rows in sums.matrices)
    assert all(rows.shape[0] == 4 for rows in sums.matrices)
    kept = [rows for rows in sums.matrices if rows.shape[1] == len(WORDS)]
    # The first token's rows copy " my" after the stub: the same numbers from either engine.
    assert max(rows.max() for rows in kept) == pytest.approx(kept[0].max())


def test_a_session_is_told_public_things_only_and_every_row_keeps_its_place() -> None:
    engine = full_engine()
    writing(llm=engine, rows=Rows(slots=5, shots=2, fill=0.02, redraw_every="run")).run()
    opened = engine.opened[0]
    assert opened["num_rows"] == 5 == len(opened["prompts"])
    assert opened["shared"] == "Messages.\n\n"
    assert opened["max_new_tokens"] == 6
    assert opened["public"] == "Messages.\n\ncard:"
    assert all(prompt.startswith(opened["shared"]) for prompt in opened["prompts"])
    assert opened["public"] in opened["prompts"]  # an empty slot reads the public prompt


def test_the_number_of_unit_rows_is_not_told() -> None:
    engine = full_engine()
    writing(llm=engine, rows=Rows(units=20, redraw_every="run")).run()
    assert {opened["num_rows"] for opened in engine.opened} == {None}


@pytest.mark.parametrize("mechanism", ["recentered_clip", "difference_clip", "clip_and_blend", "gumbel"])
@pytest.mark.parametrize("engine", [plain, full_engine], ids=["public asked apart", "public in the batch"])
def test_one_record_moves_one_row(mechanism: str, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    other = [*RECORDS[:399], {"text": "up top failed top up", "topic": "transfer"}]
    for records in (RECORDS, other):
        same_coins(monkeypatch, 11)
        with monkeypatch.context() as patched:
            sums = Sums(patched)
            noise = noise_of(mechanism, Noise, LogitNoise).replace(multiplier=0.02)
            writing(
                private_examples(records),
                llm=engine(),
                noise=noise.replace(clip=12.0) if isinstance(noise, LogitNoise) else noise,
                rows=Rows(slots=40, shots=5, fill=1.0, redraw_every="run"),
            ).run()
        seen.append(sums)
    first, second = seen
    transfers = [i for i, rows in enumerate(first.matrices) if i < len(second.matrices)]
    moved = 0
    for i in transfers:
        if first.matrices[i].shape != second.matrices[i].shape:
            break  # a released token differs from here on
        same = [
            np.array_equal(a, b, equal_nan=True) for a, b in zip(first.matrices[i], second.matrices[i], strict=True)
        ]
        assert same.count(False) <= 1
        moved += same.count(False)
        np.testing.assert_array_equal(first.publics[i], second.publics[i])
    assert moved  # the record was in the sample at all


def test_an_engine_that_raises_for_one_prompt_fails_that_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    records = [*RECORDS[:-1], {"text": "broken record", "topic": "transfer"}]
    sums = Sums(monkeypatch)
    engine = full_engine(breaks_on="broken record")
    writing(private_examples(records), llm=engine, rows=Rows(slots=2, shots=200, fill=200.0, redraw_every="run")).run()
    dead = [int(np.isnan(rows).all(axis=1).sum()) for rows in sums.matrices]
    assert set(dead) <= {0, 1}
    assert 1 in dead
    # A row that is scored by itself is scored at its own place of the same shape: that is what keeps its bits.
    again = [opened for opened in engine.opened if sum(prompt is not None for prompt in opened["prompts"]) == 1]
    assert again
    assert {(len(opened["prompts"]), opened["num_rows"]) for opened in engine.opened} == {(2, 2)}
    whole = engine.opened[engine.opened.index(again[0]) - 1]
    place = next(i for i, prompt in enumerate(again[0]["prompts"]) if prompt is not None)
    assert again[0]["prompts"][place] == whole["prompts"][place]


def test_unit_rows_that_are_scored_by_themselves_keep_their_number_secret() -> None:
    records = [*RECORDS[:-1], {"text": "broken record", "topic": "transfer"}]
    engine = full_engine(breaks_on="broken record")
    writing(private_examples(records), llm=engine, rows=Rows(units=200, redraw_every="run")).run()
    assert {opened["num_rows"] for opened in engine.opened} == {None}
    assert any(len(opened["prompts"]) == 1 for opened in engine.opened)


def test_rows_of_any_memory_layout_have_the_same_bits() -> None:
    class Columns(FullFake):
        def open_full(self, prompts: Any, prefix: Any, **options: Any) -> Any:
            session = super().open_full(prompts, prefix, **options)
            real = session.logits
            session.logits = lambda columns=None: np.asfortranarray(real(columns))  # type: ignore[method-assign]
            return session

    engine = Columns(word_copier(WORDS), vocabulary=WORDS)
    source = FullRowSource(engine, ("a\nmy", "b\nmy"), [], PublicRowContext("my", num_rows=2))
    rows = source.logits(np.arange(4)).take()
    assert rows.flags.c_contiguous


def test_a_sample_of_a_plan_that_tests_is_read_through_blocks_alone() -> None:
    plan = TokenRule("recentered_clip", free_tokens=0.5, private_tokens=1).plan(
        PoissonUnits(1.0), num_rows=10, noise_multiplier=1.0, redraw_every=10
    )
    sample = SecretSample(private_examples()._pool("card", ledger_id=None), plan, length=10)
    with pytest.raises(PrivacyBudgetError, match="blocks"):
        next(sample.next_release(rows=lambda _: None, render=lambda _: "p", width=5))  # type: ignore[arg-type,return-value]


def test_blocks_and_runs_of_a_test_are_not_copied() -> None:
    plan = writing().plan.release
    block = blocks.ReleaseBlock(("p",), (), backend=full_engine(), plan=plan, length=1, release=None)
    for secret in (block, SparseVectorTest(0.5, 4.0).runs(plan)):
        assert copy.copy(secret) is copy.deepcopy(secret) is secret
        with pytest.raises(PrivateAccessError):
            pickle.dumps(secret)


def test_a_failed_row_counts_nothing() -> None:
    engine = full_engine(fails_on="declined")
    released = writing(llm=engine).run()
    assert "my transfer is late" in {example["text"] for example in released.examples}


def test_an_engine_that_fails_in_public_stops_the_run_and_shows_no_prompt() -> None:
    with pytest.raises(RunInterruptedError) as caught:
        writing(llm=full_engine(public_fails_at=3)).run()
    shown = str(caught.value) + repr(caught.value.__cause__) + repr(caught.value.__context__)
    assert "RuntimeError" in str(caught.value)
    assert "declined" not in shown
    released = caught.value.run.run()
    assert len(released.examples) == 2


def test_a_stop_in_the_public_question_shows_no_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = full_engine()

    def stop(self: Any) -> Any:
        raise KeyboardInterrupt(str(self._prompts))

    monkeypatch.setattr("tests.full_doubles.FullFakeSession.public", stop)
    with pytest.raises(KeyboardInterrupt) as caught:
        writing(llm=engine).run()
    assert caught.value.args == ()
    assert "public" not in [entry.name for entry in caught.traceback if "full_doubles" in str(entry.path)]


@pytest.mark.parametrize("mechanism", LOGIT_MECHANISMS)
def test_an_engine_of_top_tokens_is_refused_before_anything_is_charged(mechanism: str) -> None:
    budget = handler()
    with pytest.raises(CapabilityError, match="whole vocabulary"):
        writing(
            llm=FakeBackend(word_copier(WORDS), max_top_k=5),
            noise=LogitNoise(mechanism, clip=12.0, multiplier=0.02),
            budget=budget,
        )
    assert budget.report().to_dict()["shares"] == []


# --- what is charged -----------------------------------------------------------------------------------------------


def test_the_share_is_the_price_of_bounded_range_tokens_on_one_sample() -> None:
    made = writing(
        noise=LogitNoise("recentered_clip", multiplier=4.0), rows=Rows(slots=20, shots=2, redraw_every="run")
    )
    rate = made.plan.release.sampler.sampling_rate
    block = SubsampledEvent(RepeatedEvent(BoundedRangeEvent(0.25), 6), rate)
    by_hand = ParallelEvent(made.plan.partition, tuple((label, block) for label in LABELS))
    price = accounting.epsilon_upper_bound(by_hand, delta=made.plan.delta, adjacency="add_remove")
    assert made.plan.epsilon == pytest.approx(price, rel=1e-6)


@pytest.mark.parametrize("rows", [Rows(units=20, redraw_every="run"), Rows(slots=20, shots=2, redraw_every="run")])
@pytest.mark.parametrize("mechanism", LOGIT_MECHANISMS)
def test_clip_temperature_and_noise_hang_together(mechanism: LogitNoiseName, rows: Rows) -> None:
    solved = writing(noise=LogitNoise(mechanism, multiplier=3.0), rows=rows).plan
    clip = solved.release.aggregation.clip
    assert temperature_of(solved.release) == pytest.approx(1.0)
    factor = (2.0 if rows.units else 4.0) * (0.5 if mechanism == "clip_and_blend" else 1.0)
    assert clip == pytest.approx(20.0 / (factor * 3.0))
    given = writing(noise=LogitNoise(mechanism, clip=clip), decoding=Decoding(temperature=1.0), rows=rows).plan
    assert given.noise_multiplier == pytest.approx(3.0)
    assert given.epsilon == pytest.approx(solved.epsilon, rel=1e-4)


def test_a_given_clip_and_epsilon_make_the_temperature() -> None:
    plan = writing(
        noise=LogitNoise("recentered_clip", clip=2.0), epsilon=4.0, rows=Rows(slots=20, shots=2, redraw_every="run")
    ).plan
    assert plan.epsilon <= 4.0
    assert temperature_of(plan.release) == pytest.approx(plan.noise_multiplier * 4 * 2.0 / 20)


@pytest.mark.parametrize(
    "options",
    [
        lambda: {
            "noise": LogitNoise("recentered_clip", clip=1.0, multiplier=1.0),
            "decoding": Decoding(temperature=1.0),
        },
        lambda: {
            "noise": LogitNoise("recentered_clip", free_below=0.5, max_private_tokens=3),
            "rows": Rows(redraw_every=2),
        },
        lambda: {"decoding": Decoding(top_k=5)},
        lambda: {"decoding": Decoding(top_p=0.5)},
    ],
)
def test_public_faults_raise_before_any_charge(options: Callable[[], dict[str, Any]]) -> None:
    budget = handler()
    with pytest.raises(ConfigurationError):
        writing(budget=budget, **options())
    assert budget.report().to_dict()["shares"] == []


# --- candidates ----------------------------------------------------------------------------------------------------


def test_top_k_plus_takes_what_one_row_could_lift_among_the_top() -> None:
    rule = TokenRule("difference_clip", clip=3.0)
    plan = writing(
        noise=LogitNoise("difference_clip", clip=3.0, multiplier=0.02), rows=Rows(slots=20, shots=2, redraw_every="run")
    ).plan.release
    assert rule.is_logit
    assert public_margin(plan) == pytest.approx(2 * 3.0 / 20)  # 2 C / s, not 2 C / (s + 1)
    blend = writing(
        noise=LogitNoise("clip_and_blend", clip=12.0, multiplier=0.02), rows=Rows(slots=20, shots=2, redraw_every="run")
    ).plan.release
    assert public_margin(blend) == 0.0


def test_the_likeliest_candidates_keep_their_order_and_their_number() -> None:
    domain = Domain(tuple("abcdef"), np.array([0.0, 3.0, 1.0, 3.0, -np.inf, np.nan]))
    assert domain.likeliest(3).keys == ("b", "c", "d")
    assert domain.likeliest(1).keys == ("b",)
    assert domain.likeliest(2, margin=2.0).keys == ("b", "c", "d")
    assert domain.likeliest(6) is domain
    in_vocabulary = Domain(range(10), np.arange(4.0), np.array([7, 1, 9, 3]))
    assert in_vocabulary.likeliest(2).keys == (9, 3)
    assert [in_vocabulary.likeliest(2).token(i) for i in (0, 1)] == [9, 3]
    assert "abc" not in repr(domain)


def test_the_end_of_a_text_is_a_candidate_after_the_first_token_only() -> None:
    widths: list[int] = []
    made = writing(llm=full_engine(), decoding=Decoding(candidates=3))
    walk = made._script

    class Spy:
        carries_public = True

        def public_logits(self) -> Any:
            yield from ()
            return np.arange(float(len(WORDS) + 1))

    for prefix in ((), (WORDS[0].encode(),)):
        gen = walk.domain("prompt", prefix, block=Spy())  # type: ignore[arg-type]
        with pytest.raises(StopIteration) as stopped:
            next(gen)
        domain = stopped.value.value
        widths.append(len(domain))
        assert (made._script.backend.eos in domain.keys) == bool(prefix)
    assert widths in ([3, 4], [4, 5])  # Top-k+ may add neighbours of the last one


def test_rows_without_mass_are_failed_rows() -> None:
    logits = log_rows(np.array([[0.5, 0.5], [0.0, 0.0], [1.0, 0.0]]))
    assert np.isnan(logits[1]).all()
    assert logits[2].tolist() == [0.0, -np.inf]
    shares = softmax_rows(np.array([[0.0, 0.0], [np.nan, 1.0], [5.0, -np.inf], [-np.inf, -np.inf]]))
    np.testing.assert_allclose(shares, [[0.5, 0.5], [0.0, 0.0], [1.0, 0.0], [0.0, 0.0]])


# --- free public tokens --------------------------------------------------------------------------------------------


def test_tokens_that_the_public_model_would_write_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = full_engine()
    sums = Sums(monkeypatch)
    # The rows copy nothing of a word they have not seen: at most 16.4 rows are apart, of 19.6. The noise of a question is
    # .15 rows on average, so fewer than one run in a million releases anything private.
    records = [{"text": "up", "topic": label} for label in LABELS] * 200
    made = writing(
        private_examples(records),
        llm=engine,
        noise=LogitNoise("recentered_clip", clip=12.0, free_below=0.98, max_private_tokens=2, multiplier=0.01),
        rows=Rows(slots=20, shots=2, redraw_every="run"),
    )
    made.run()
    assert sums.matrices == []
    assert engine.logit_calls > 0
    assert made.plan.to_dict()["free_tokens"] == 0.98
    assert made.plan.to_dict()["private_tokens"] == 2


def test_rows_far_from_the_public_distribution_pay_until_the_cap_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = full_engine()
    sums = Sums(monkeypatch)
    made = writing(
        llm=engine,
        noise=LogitNoise("recentered_clip", clip=12.0, free_below=0.3, max_private_tokens=2, multiplier=0.01),
        rows=Rows(slots=20, shots=2, redraw_every="run"),
    )
    released = made.run()
    assert len(sums.matrices) == 2 * len(LABELS)
    assert all(example["text"].split()[:2] in (["my", "card"], ["my", "transfer"]) for example in released.examples)
    assert engine.logit_calls == len(sums.matrices)  # beyond the cap no row is read


def test_free_tokens_are_priced_as_runs_of_the_test_and_private_tokens() -> None:
    made = writing(
        noise=LogitNoise("recentered_clip", free_below=0.5, max_private_tokens=2, multiplier=4.0),
        rows=Rows(slots=20, shots=2, redraw_every="run"),
    )
    plan = made.plan.release
    assert plan.test is not None
    # A run costs a quarter of a token, in zCDP: (2 / n)^2 / 2 = (1 / 4) (1 / 4)^2 / 8.
    assert plan.test.event.epsilon**2 / 2 == pytest.approx(0.25 * 0.25**2 / 8)
    each = (RepeatedEvent(PureEvent(2 / plan.test.noise_multiplier), 2), RepeatedEvent(BoundedRangeEvent(0.25), 2))
    assert plan.block_event(6) == SubsampledEvent(ComposedEvent(each), plan.sampler.sampling_rate)


def test_a_model_call_error_is_public(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any, domain: Any) -> Any:
        raise ModelCallError("down")

    monkeypatch.setattr(FullFake, "open_full", broken)
    with pytest.raises((RunInterruptedError, ModelCallError)):
        writing(llm=full_engine()).run()


@pytest.mark.parametrize(
    "spoilt", [[np.nan, 0.0], [np.inf, 0.0], [-np.inf, -np.inf]], ids=["NaN", "infinite", "nothing can follow"]
)
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("free", [{}, {"free_below": 0.5, "max_private_tokens": 2}], ids=["all private", "free tokens"])
def test_an_engine_without_numbers_for_the_public_prompt_is_named_as_the_fault(
    spoilt: list[float], is_async: bool, free: dict[str, Any]
) -> None:
    engine = full_engine()
    real = engine.logits_of
    public = [len(engine.opened)]

    def logits_of(prompt: str | None, prefix: Any) -> np.ndarray:
        found = real(prompt, prefix)
        if engine.opened and prompt == engine.opened[-1]["public"]:
            found[:] = -np.inf if spoilt[1] < 0 else 0.0
            found[3] = spoilt[0]
            public[0] += 1
        return found

    engine.logits_of = logits_of  # type: ignore[method-assign]
    noise = LogitNoise("recentered_clip", clip=12.0, multiplier=0.02, **free)
    made = writing(llm=engine, rows=Rows(slots=20, shots=2, redraw_every="run"), noise=noise)
    with pytest.raises(ModelCallError, match="no numbers for the public prompt"):
        asyncio.run(made.arun()) if is_async else made.run()
    assert public[0] == 1
    assert engine.logit_calls == 0
