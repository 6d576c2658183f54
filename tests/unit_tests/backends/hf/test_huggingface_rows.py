"""Rows of a local model keep their bits whatever stands beside them, runs out, or breaks."""

from __future__ import annotations

import threading
import traceback

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from langchain_dpicl.backends import sync_async  # noqa: E402
from langchain_dpicl.exceptions import ConfigurationError, ModelCallError  # noqa: E402
from tests import tiny_hf  # noqa: E402
from tests.contracts.backend import same_bits  # noqa: E402
from tests.durable import no_room  # noqa: E402
from tests.unit_tests.backends import hf_doubles as doubles  # noqa: E402
from tests.unit_tests.backends.hf_doubles import CANARY, LONG, OTHER, PROMPTS, engine, tokens_of, walk  # noqa: E402

pytestmark = pytest.mark.usefixtures("own_hooks")

torch.set_num_threads(1)

PUBLIC = "Topic: red\nText:"
MODELS = {
    "rotary": tiny_hf.llama,
    "rotary bfloat16": lambda: tiny_hf.llama(dtype=torch.bfloat16),
    "learned": tiny_hf.gpt2,
    "sliding": tiny_hf.sliding,
    "slopes": tiny_hf.alibi,
    "experts": tiny_hf.experts,
}
ENGINES = {name: engine(make()) for name, make in MODELS.items()}
LLAMA = ENGINES["rotary"]


def full(backend, prompts=PROMPTS, prefix=(), *, units=False, public=PUBLIC, **options):
    return backend.open_full(prompts, prefix, public=public, num_rows=None if units else len(prompts), **options)


def assert_near(found, expected):
    """Whole rows at once, as comparing number by number takes longer than the model."""
    np.testing.assert_allclose(found, expected, rtol=0.0, atol=1e-4, equal_nan=False)


def unpadded(backend, ids):
    """The model's own logits of the candidates after ids, without padding or cache."""
    with torch.inference_mode():
        raw = backend._engine.body.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
    return raw.double().numpy()[np.asarray(backend.vocabulary())]


async def test_awaited_rows_are_there_where_the_system_has_no_room_for_a_thread(monkeypatch):
    monkeypatch.setattr(sync_async, "_POOLS", {})
    session, domain = full(LLAMA), LLAMA.vocabulary()[:5]
    with no_room():
        public, rows = await session.apublic(), await session.alogits()
        scored = await LLAMA.open(PROMPTS, []).ascore(domain)
    assert same_bits(public, full(LLAMA).public())
    assert same_bits(rows, full(LLAMA).logits())
    assert same_bits(scored, LLAMA.open(PROMPTS, []).score(domain))


@pytest.mark.parametrize("name", MODELS)
class TestEveryKindOfModel:
    @pytest.mark.parametrize("units", [False, True], ids=["slots", "units"])
    def test_replacing_one_prompt_leaves_all_other_rows_bit_identical(self, name, units):
        backend = ENGINES[name]
        tokens = tokens_of(backend, 3)
        rows = walk(full(backend, units=units), tokens)
        for place, replacement in enumerate((None, "", LONG, OTHER, PROMPTS[0])):
            changed = [*PROMPTS[:place], replacement, *PROMPTS[place + 1 :]]
            moved = walk(full(backend, changed, units=units), tokens)
            others = np.arange(len(PROMPTS) + 1) != place + 1
            assert same_bits(moved[:, others], rows[:, others])
            assert not same_bits(moved[:, place + 1], rows[:, place + 1])

    def test_a_short_prompt_among_long_ones_leaves_all_other_rows_bit_identical(self, name):
        backend = ENGINES[name]
        prompts = [LONG + word for word in ("red", "blue", "wide")]
        rows = walk(full(backend, prompts, public=LONG), tokens_of(backend, 2))
        moved = walk(full(backend, [prompts[0], "a", prompts[2]], public=LONG), tokens_of(backend, 2))
        assert same_bits(moved[:, [0, 1, 3]], rows[:, [0, 1, 3]])

    def test_one_more_unit_leaves_all_other_rows_bit_identical(self, name):
        backend = ENGINES[name]
        tokens = tokens_of(backend, 3)
        rows = walk(full(backend, units=True), tokens)
        for place in (0, 3):
            more = [*PROMPTS[:place], OTHER, *PROMPTS[place:]]
            others = np.arange(len(more) + 1) != place + 1
            assert same_bits(walk(full(backend, more, units=True), tokens)[:, others], rows)

    def test_the_cache_says_what_reading_everything_anew_says(self, name):
        backend = ENGINES[name]
        is_low = backend._engine.body.model.dtype != torch.float32
        tokens = tokens_of(backend, 10)
        rows = walk(full(backend, PROMPTS[:4]), tokens)
        ids = backend._prompts.rows([PUBLIC, *PROMPTS[:4]], shared="", begun=(), cap=40)
        for row, prompt in enumerate(ids):
            for step in (0, 1, 10):
                told = unpadded(backend, [*prompt, *tokens[:step]])
                if is_low:
                    shares = [np.exp(one - np.logaddexp.reduce(one)) for one in (rows[step, row], told)]
                    assert np.abs(shares[0] - shares[1]).sum() / 2 < 0.1
                else:
                    assert_near(rows[step, row], told)


def test_the_layouts_are_the_ones_meant():
    layouts = {name: backend._engine.layout.__name__ for name, backend in ENGINES.items()}
    assert layouts["rotary"] == layouts["learned"] == "RightBatch"
    assert layouts["sliding"] == layouts["slopes"] == "LeftBatch"


class TestPrompts:
    def test_a_row_that_could_not_be_rendered_fails_alone(self):
        session = full(LLAMA)
        rows = session.logits(None)
        assert np.isnan(rows[4]).all()
        assert np.isfinite(rows[:4]).all()
        assert (session.score(LLAMA.vocabulary())[4] == 0).all()

    def test_of_a_long_prompt_the_first_quarter_and_the_end_are_read(self):
        head, middle, end = "one two three " * 10, "seven " * 60, "the sea is blue " * 12 + "and wide"
        rows = LLAMA.open([head + middle + end, head + "wide " * 90 + end], []).score(LLAMA.vocabulary())
        assert same_bits(rows[0], rows[1])
        ids = LLAMA.encode(head + middle + end)
        kept = LLAMA._prompts.rows([head + middle + end], shared="", begun=(), cap=40)[0]
        assert kept == ids[:10] + ids[-30:]
        others = LLAMA.open(["two " + head + middle + end, head + middle + end + "!"], []).score(LLAMA.vocabulary())
        assert not same_bits(others[0], rows[0])
        assert not same_bits(others[1], rows[0])

    def test_of_a_long_prompt_the_shared_beginning_stays_whole(self):
        shared = "Instruction: write a short message that a customer sends to a bank, of the kind that is named.\n\n"
        begun = LLAMA._prompts.begun(shared, cap=40)
        kept = LLAMA._prompts.rows([shared + LONG], shared=shared, begun=begun, cap=40)[0]
        assert len(kept) == 40
        assert kept[: len(begun)] == LLAMA.encode(shared)
        assert kept[len(begun) :] == LLAMA.encode(LONG.rstrip())[-(40 - len(begun)) :]

    def test_a_space_at_the_end_is_dropped(self):
        rows = LLAMA.open(["Text: ", "Text:"], []).score(LLAMA.vocabulary())
        assert same_bits(rows[0], rows[1])


class TestShared:
    shared = "Instruction: write a short message that a customer sends to a bank, about what is named."

    def test_what_is_shared_says_what_reading_it_in_every_row_says(self):
        prompts = [self.shared + text for text in ("\n\nTopic: red\nText:", "", LONG, " naïve \U0001f600")]
        options = {"public": self.shared + "\n\nText:"}
        backend = engine(max_prompt_tokens=64)
        tokens = tokens_of(backend, 4)
        together = walk(full(backend, prompts, shared=self.shared, **options), tokens)
        apart = walk(full(engine(max_prompt_tokens=64), prompts, **options), tokens)
        short = [0, 1, 2, 4]  # the long one is cut elsewhere
        assert_near(together[:, short], apart[:, short])

    @pytest.mark.parametrize("units", [False, True], ids=["slots", "units"])
    def test_replacing_one_prompt_leaves_all_other_rows_bit_identical(self, units):
        prompts = [self.shared + (prompt or "") for prompt in PROMPTS]
        backend = engine(max_prompt_tokens=64)
        options = {"public": self.shared + "Text:", "shared": self.shared, "units": units}
        rows = walk(full(backend, prompts, **options), tokens_of(backend, 3))
        for place, replacement in ((0, None), (1, OTHER), (4, self.shared + LONG)):
            changed = [*prompts[:place], replacement, *prompts[place + 1 :]]
            moved = walk(full(backend, changed, **options), tokens_of(backend, 3))
            others = np.arange(len(prompts) + 1) != place + 1
            assert same_bits(moved[:, others], rows[:, others])

    def test_it_is_read_once_for_all_rows_and_sessions(self):
        model = tiny_hf.llama()
        backend = engine(model, max_prompt_tokens=64)
        options = {"public": self.shared, "shared": self.shared}
        full(backend, [self.shared] * 5, **options).public()
        watched = doubles.Watched(model)
        full(backend, [self.shared + "x"] * 5, **options).public()
        width = 64 - (len(backend.encode(self.shared)) - 1)
        assert watched.shapes == [(6, width - 1), (6, 1)]

    def test_a_prompt_that_does_not_begin_with_it_fails_alone(self):
        backend = engine(max_prompt_tokens=64)
        options = {"public": self.shared, "shared": self.shared}
        rows = full(backend, [self.shared + "a", "else", self.shared], **options).logits(None)
        assert np.isnan(rows[1]).all()
        assert np.isfinite(rows[[0, 2]]).all()

    def test_a_public_prompt_that_does_not_begin_with_it_is_refused(self):
        with pytest.raises(ConfigurationError, match="begins with the shared text"):
            full(LLAMA, shared="Word:")

    def test_a_shared_text_that_leaves_no_room_is_refused(self):
        with pytest.raises(ConfigurationError, match="raise max_prompt_tokens"):
            full(LLAMA, [LONG], public=LONG, shared=LONG)


class TestLengths:
    def test_a_session_grows_beyond_the_room_it_made(self):
        tokens = tokens_of(LLAMA, 30)
        session = full(LLAMA, PROMPTS[:2], max_new_tokens=4)
        for token in tokens:
            session.push(token)
            rows = session.logits(None)
        ids = LLAMA._prompts.rows(PROMPTS[:2], shared="", begun=(), cap=40)
        for row, prompt in enumerate(ids):
            assert_near(rows[row], unpadded(LLAMA, [*prompt, *tokens]))

    def test_a_long_prefix_is_read_in_blocks_and_says_what_steps_say(self):
        tokens = tokens_of(LLAMA, 37)
        opened = full(LLAMA, prefix=tokens)
        pushed = full(LLAMA)
        for token in tokens:
            pushed.push(token)
            pushed.public()
        assert_near(opened.logits(None)[:4], pushed.logits(None)[:4])
        assert_near(opened.public(), pushed.public())

    @pytest.mark.parametrize("name", ["rotary", "slopes"])
    def test_a_full_context_is_refused_and_the_session_goes_on(self, name):
        backend = engine(tiny_hf.llama(context=48), max_prompt_tokens=40, max_new_tokens=8)
        session = full(backend)
        for token in tokens_of(backend, 8):
            session.push(token)
        rows = session.logits(None)
        with pytest.raises(ConfigurationError, match="at most 48 tokens"):
            session.push(backend.eos)
        assert same_bits(session.logits(None), rows)

    def test_a_window_that_sees_the_whole_session_bounds_it_and_one_that_does_not_is_padded_before(self):
        backend = engine(tiny_hf.sliding(window=50))
        ids = backend._prompts.rows([OTHER], shared="", begun=(), cap=40)[0]
        tokens = tokens_of(backend, 14)
        told = {}
        for room in (10, 14):
            session = full(backend, [OTHER], max_new_tokens=room)
            for token in tokens[:10]:
                session.push(token)
            told[room] = session.logits(None)
            if room == 10:
                with pytest.raises(ConfigurationError, match="at most 50 tokens"):
                    session.push(tokens[10])
        assert_near(told[10], told[14])
        for token in tokens[10:]:
            session.push(token)
        assert_near(session.logits(None)[0], unpadded(backend, [*ids, *tokens]))
        behind = full(backend, [LONG], tokens, max_new_tokens=1)  # a later block, whose text has left the window
        ids = backend._prompts.rows([LONG], shared="", begun=(), cap=40)[0]
        assert_near(behind.logits(None)[0], unpadded(backend, [*ids, *tokens]))
        steps = backend.generate([LONG])
        assert len([next(steps) for _ in range(20)]) == 20

    def test_more_tokens_than_the_context_holds_are_refused_at_once(self):
        backend = engine(tiny_hf.llama(context=64))
        with pytest.raises(ConfigurationError, match="at most 64 tokens"):
            full(backend, max_new_tokens=25)
        with pytest.raises(ConfigurationError, match="at most 64 tokens"):
            backend.open(["a"], tokens_of(backend, 25))


@pytest.mark.usefixtures("rows_apart")
class TestMemory:
    @pytest.mark.parametrize("kind", [torch.OutOfMemoryError, MemoryError, RuntimeError])
    def test_a_batch_that_does_not_fit_is_halved_and_the_size_remembered(self, kind):
        model = tiny_hf.llama()
        narrow = doubles.Narrow(model, most=3, kind=kind)
        backend = engine(model)
        rows = walk(full(backend), tokens_of(backend, 2))
        assert_near(rows[:, :5], walk(full(LLAMA), tokens_of(backend, 2))[:, :5])
        failures, narrow.shapes[:] = narrow.failures, []
        changed = walk(full(backend, [*PROMPTS[:1], OTHER, *PROMPTS[2:]]), tokens_of(backend, 2))
        assert narrow.failures == failures > 0
        assert narrow.most_rows == 3
        others = np.arange(6) != 2
        assert same_bits(changed[:, others], rows[:, others])

    def test_a_session_that_runs_out_later_starts_anew_at_half_the_size(self):
        model = tiny_hf.llama()
        backend = engine(model)
        narrow = doubles.Narrow(model)
        tokens = tokens_of(backend, 6)
        whole = walk(full(backend), tokens)
        session = full(backend)
        first = session.logits(None)
        assert same_bits(first, whole[0, 1:])
        for token in tokens[:3]:
            session.push(token)
            session.public()
        narrow.fail_in(0)
        session.push(tokens[3])
        rows, narrow.shapes[:] = session.logits(None), []
        session.push(tokens[4])
        session.public()
        assert narrow.shapes == [(3, 1), (3, 1)]
        assert_near(rows[:4], whole[4, 1:5])

    def test_where_the_number_of_rows_is_secret_running_out_moves_no_bit(self):
        model = tiny_hf.llama()
        backend = engine(model)
        prompts = [PROMPTS[0], OTHER, LONG, "", *PROMPTS[:4], OTHER]
        tokens = tokens_of(backend, 5)
        rows = walk(full(backend, prompts, units=True), tokens)
        narrow = doubles.Narrow(model)
        narrow.fail_in(13)
        assert same_bits(walk(full(backend, prompts, units=True), tokens), rows)
        assert narrow.failures == 1
        assert {size for size, _ in narrow.shapes} == {4}

    def test_one_row_that_does_not_fit_is_a_public_error(self):
        model = tiny_hf.llama()
        backend = engine(model)
        doubles.Narrow(model, most=0)
        backend._engine._layout = type(LLAMA._engine.batch(LLAMA._engine.shape(8, 1)))
        for session in (full(backend), full(backend, units=True)):
            with pytest.raises(ModelCallError, match="out of memory with a single row"):
                session.logits(None)
        with pytest.raises(ModelCallError, match="out of memory with a single row"):
            backend.top_tokens("a", [], top_k=3)
        with pytest.raises(ModelCallError, match="out of memory with a single row"):
            backend.score_choices(["a"], ["b"])

    def test_texts_and_choices_are_halved_too(self):
        model = tiny_hf.llama()
        backend = engine(model)
        prompts = [prompt or "" for prompt in PROMPTS]
        texts, scores = backend.complete(prompts, max_tokens=4), backend.score_choices(prompts, [" red", " blue sea"])
        backend._engine.layout  # noqa: B018  learnt before memory runs out
        narrow = doubles.Narrow(model, most=2)
        assert backend.complete(prompts, max_tokens=4) == [""] * len(prompts)  # private rows decide no size
        backend._engine._recheck_seconds = 0.0  # the clock does, by public rows
        assert backend.complete(prompts, max_tokens=4) == texts
        assert backend.score_choices(prompts, [" red", " blue sea"]) == pytest.approx(scores, abs=1e-4)
        assert narrow.failures > 0


class TestFaults:
    prompts = (*PROMPTS[:2], "a rocket\U0001f680", *PROMPTS[2:])
    others = np.arange(7) != 3
    id_ = LLAMA.encode("a rocket\U0001f680")[-1]

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
    def test_a_row_without_numbers_fails_alone(self, value):
        model = tiny_hf.llama()
        backend = engine(model)
        tokens = [token for token in tokens_of(backend, 4) if token != self.id_]
        expected, text = walk(full(backend, self.prompts), tokens), backend.complete([PUBLIC], max_tokens=2)
        doubles.poisoned(model, self.id_, value)
        found = walk(full(backend, self.prompts), tokens)
        assert np.isnan(found[:, 3]).all()
        assert same_bits(found[:, self.others], expected[:, self.others])
        assert (full(backend, self.prompts).score(backend.vocabulary())[2] == 0).all()
        scores = backend.score_choices([PUBLIC, self.prompts[2]], [" red"])
        assert np.isfinite(scores[0]).all()
        assert (scores[1] == -np.inf).all()
        assert backend.complete([PUBLIC, self.prompts[2]], max_tokens=2) == [*text, ""]

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_a_row_with_one_number_missing_fails_alone_and_whole(self, value):
        model = tiny_hf.llama()
        backend = engine(model)
        expected = full(backend).logits(None)

        def spoil(module, args, output):
            output[2, :, 50] = value
            return output

        model.lm_head.register_forward_hook(spoil)
        found = full(backend).logits(None)
        assert np.isnan(found[1]).all()
        assert same_bits(found[[0, 2, 3, 4]], expected[[0, 2, 3, 4]])
        assert (full(backend).score(backend.vocabulary())[1] == 0).all()

    def test_a_token_that_cannot_follow_is_no_fault(self):
        model = tiny_hf.llama()
        backend = engine(model)
        full(backend).public()

        def bar(module, args, output):
            output[:, :, 50] = -torch.inf
            return output

        model.lm_head.register_forward_hook(bar)
        session = full(backend)
        column = backend.vocabulary().index(50)
        assert (session.logits(None)[:4, column] == -np.inf).all()
        assert np.isfinite(np.delete(session.logits(None)[:4], column, axis=1)).all()
        assert (session.score([50])[:, 0] == 0).all()
        assert session.score(backend.vocabulary())[:4].sum(axis=1) == pytest.approx(1, abs=1e-9)

    def test_no_numbers_for_the_public_prompt_are_an_error_and_private_rows_stay(self):
        model = tiny_hf.llama()
        backend = engine(model)
        full(backend).public()
        backend.top_tokens(PUBLIC, [], top_k=3)
        doubles.poisoned(model, self.id_)
        session = full(backend, public=self.prompts[2])
        assert np.isfinite(session.logits(None)[:4]).all()
        with pytest.raises(ModelCallError, match="no numbers for the public prompt"):
            session.public()
        with pytest.raises(ModelCallError, match="no numbers for the public prompt"):
            backend.top_tokens(self.prompts[2], [], top_k=3)

    @pytest.mark.parametrize("units", [False, True], ids=["slots", "units"])
    def test_a_row_that_makes_the_model_raise_fails_alone(self, units):
        model = tiny_hf.llama()
        backend = engine(model)
        tokens = [token for token in tokens_of(backend, 4) if token != self.id_]
        expected = walk(full(backend, self.prompts, units=units), tokens)
        texts = backend.complete([PUBLIC, OTHER], max_tokens=3)
        doubles.raising(model, self.id_, ValueError(CANARY))
        found = walk(full(backend, self.prompts, units=units), tokens)
        assert np.isnan(found[:, 3]).all()
        assert same_bits(found[:, self.others], expected[:, self.others])
        assert backend.complete([PUBLIC, self.prompts[2], OTHER], max_tokens=3) == [texts[0], "", texts[1]]

    def test_a_row_that_fails_late_fails_alone(self):
        model = tiny_hf.llama()
        backend = engine(model)
        tokens = tokens_of(backend, 5)
        expected = walk(full(backend), tokens)

        def spoil(module, args, output):
            if output.shape[1] == 1 and watched.shapes.count((6, 1)) > 3:
                output[2] = torch.nan
            return output

        watched = doubles.Watched(model)
        model.model.norm.register_forward_hook(spoil)
        found = walk(full(backend), tokens)
        assert same_bits(found[:3], expected[:3])
        assert np.isnan(found[3:, 2]).all()
        assert same_bits(found[3:, [0, 1, 3, 4, 5]], expected[3:, [0, 1, 3, 4, 5]])

    def test_a_stop_shows_nothing_and_the_session_goes_on(self):
        model = tiny_hf.llama()
        backend = engine(model)
        prompts = [f"my name is {CANARY}", *PROMPTS[:3]]
        tokens = tokens_of(backend, 4)
        whole = walk(full(backend, prompts), tokens)
        session = full(backend, prompts)
        for token in tokens[:2]:
            session.push(token)
            session.public()
        narrow = doubles.Narrow(model, kind=KeyboardInterrupt)
        narrow.fail_in(0)
        session.push(tokens[2])
        before = len(narrow.shapes)
        with pytest.raises(KeyboardInterrupt) as caught:
            session.logits(None)
        frames = [frame for frame, _ in traceback.walk_tb(caught.value.__traceback__)][1:]
        assert frames
        assert not [frame for frame in frames if CANARY in repr(frame.f_locals)]
        assert caught.value.__context__ is None
        assert same_bits(session.logits(None), whole[3, 1:])
        # The same steps again, not one block: other shapes have other bits.
        assert narrow.shapes[before + 1 :] == [(5, 39), *[(5, 1)] * 4]


class TestRowsThatMoveEachOther:
    def test_they_run_one_by_one(self):
        model = doubles.coupled(tiny_hf.llama())
        backend = engine(model)
        full(backend).public()
        watched = doubles.Watched(model)
        rows = walk(full(backend), tokens_of(backend, 2))
        changed = walk(full(backend, [LONG, *PROMPTS[1:]]), tokens_of(backend, 2))
        others = np.arange(6) != 1
        assert same_bits(changed[:, others], rows[:, others])
        assert watched.most_rows == 1

    def test_a_row_that_depends_on_its_place_has_one_place_where_the_number_of_rows_is_secret(self):
        model = doubles.coupled(tiny_hf.llama(), by_place=True)
        backend = engine(model)
        sizes = {}
        for units in (False, True):
            full(backend, units=units).public()
            watched = doubles.Watched(model)
            full(backend, units=units).public()
            sizes[units] = watched.most_rows
        assert sizes == {False: 6, True: 1}

    def test_a_short_cut_for_rows_without_padding_is_never_taken(self):
        backend = engine(doubles.hasty(tiny_hf.sliding()))
        prompts = [LONG + word for word in ("red", "blue", "wide")]
        rows = walk(full(backend, prompts, public=LONG), tokens_of(backend, 2))
        moved = walk(full(backend, [prompts[0], "a", prompts[2]], public=LONG), tokens_of(backend, 2))
        assert same_bits(moved[:, [0, 1, 3]], rows[:, [0, 1, 3]])

    def test_experts_run_one_by_one_without_being_tried_out(self):
        model = tiny_hf.experts()
        watched = doubles.Watched(model)
        full(engine(model)).public()
        assert watched.most_rows == 1


class TestSessions:
    def test_columns_are_places_in_the_vocabulary(self):
        session = full(LLAMA)
        columns = np.array([5, 0, 77])
        assert same_bits(session.logits(columns), session.logits(None)[:, columns])
        assert session.public().shape == (len(LLAMA.vocabulary()),)
        for wrong in ([-1], [len(LLAMA.vocabulary())], [0.5]):
            with pytest.raises(ConfigurationError, match="columns between"):
                session.logits(np.array(wrong))

    def test_a_session_without_a_public_prompt_has_no_public_row(self):
        with pytest.raises(ConfigurationError, match="open_full"):
            LLAMA.open(["a"], []).public()

    def test_no_prompts_leave_the_public_row(self):
        for units in (False, True):
            session = full(LLAMA, [], units=units)
            assert session.logits(None).shape == (0, len(LLAMA.vocabulary()))
            assert same_bits(session.public(), full(LLAMA, [], units=units).public())

    def test_tokens_of_another_engine_are_refused(self):
        session = full(LLAMA)
        for token in (b"red", "red", -1, 0, 10**6, 1.5, None):
            with pytest.raises(ConfigurationError, match="vocabulary"):
                session.push(token)
        with pytest.raises(ConfigurationError, match="vocabulary"):
            full(LLAMA, prefix=[b"red"])

    def test_another_number_of_prompts_than_was_named_is_refused(self):
        with pytest.raises(ConfigurationError, match="num_rows=3"):
            LLAMA.open_full(["a"], [], public="a", num_rows=3)

    def test_public_errors_carry_no_prompt_in_their_frames(self):
        with pytest.raises(ConfigurationError) as caught:
            LLAMA.open_full((CANARY,), [b"x"], public="a", num_rows=1)
        frames = [frame for frame, _ in traceback.walk_tb(caught.value.__traceback__)][1:]
        assert not [frame for frame in frames if CANARY in repr(frame.f_locals)]

    def test_closed_means_closed(self):
        session = full(LLAMA)
        session.close()
        for call in (session.public, session.logits, lambda: session.push(LLAMA.eos)):
            with pytest.raises(ConfigurationError, match="closed"):
                call()
        session.close()

    async def test_awaited_answers_are_the_answers(self):
        session = full(LLAMA)
        assert same_bits(await session.apublic(), session.public())
        assert same_bits(await session.alogits(), session.logits())

    def test_threads_get_the_bits_they_would_get_alone(self):
        tokens = tokens_of(LLAMA, 4)
        prompts = [[PROMPTS[0], OTHER], [LONG, ""], [OTHER, PROMPTS[3]]]
        alone = [walk(full(LLAMA, some), tokens) for some in prompts]
        found = [None] * len(prompts)

        def run(place):
            found[place] = walk(full(LLAMA, prompts[place]), tokens)

        threads = [threading.Thread(target=run, args=(place,)) for place in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(same_bits(left, right) for left, right in zip(found, alone, strict=True))


class TestPublicPrompts:
    def test_asking_token_by_token_reads_one_token_at_a_time(self):
        model = tiny_hf.llama()
        backend = engine(model)
        tokens = tokens_of(backend, 5)
        backend.top_tokens(PUBLIC, tokens[:1], top_k=3)
        watched = doubles.Watched(model)
        for count in range(2, 6):
            backend.top_tokens(PUBLIC, tokens[:count], top_k=3)
        assert watched.shapes == [(1, 1)] * 4

    def test_another_text_after_the_same_prompt_begins_where_the_prompt_ends(self):
        first, second = tokens_of(LLAMA, 6)[:3], tokens_of(LLAMA, 6)[3:]
        expected = {tokens: engine().top_tokens(PUBLIC, tokens, top_k=5) for tokens in (tuple(first), tuple(second))}
        backend = engine()
        for tokens in (first, second, first):
            found = backend.top_tokens(PUBLIC, tokens, top_k=5)
            assert [token for token, _ in found] == [token for token, _ in expected[tuple(tokens)]]
            assert [share for _, share in found] == pytest.approx([share for _, share in expected[tuple(tokens)]], 1e-4)

    def test_two_prompts_are_remembered_and_no_more(self):
        backend = engine()
        for prompt in ("a", "b", "c"):
            backend.top_tokens(prompt, [], top_k=1)
        assert len(backend._public._known) == 2

    def test_private_prompts_are_not_remembered(self):
        backend = engine()
        full(backend, [CANARY, OTHER]).public()
        backend.complete([CANARY], max_tokens=2)
        backend.score_choices([CANARY], [" red"])
        assert backend._public._known == {}
        assert backend._engine.body._begun == {}
