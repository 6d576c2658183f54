"""Several texts on a local model share a batch, advance in one step, and leave each other's bits alone."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from langchain_dpicl import Budget, DemonstrationSynthesizer, PrivateExamples, Rows  # noqa: E402
from langchain_dpicl.exceptions import ConfigurationError, UnsilencableModelError  # noqa: E402
from langchain_dpicl.options import Decoding, LocalExecutor, LogitNoise  # noqa: E402
from tests import tiny_hf  # noqa: E402
from tests.contracts.backend import same_bits  # noqa: E402
from tests.unit_tests.backends import hf_doubles as doubles  # noqa: E402
from tests.unit_tests.backends.hf_doubles import LONG, OTHER, PROMPTS, engine, tokens_of, walk  # noqa: E402

pytestmark = pytest.mark.usefixtures("own_hooks")

torch.set_num_threads(1)

PUBLIC = "Topic: red\nText:"
SECOND = ("Topic: sea\nText: a wide sea", "", OTHER, "Topic: red\nText: a rose", "a lake")
MODELS = {
    "rotary": tiny_hf.llama,
    "rotary bfloat16": lambda: tiny_hf.llama(dtype=torch.bfloat16),
    "learned": tiny_hf.gpt2,
    "sliding": tiny_hf.sliding,
    "experts": tiny_hf.experts,
}
ENGINES = {name: engine(make()) for name, make in MODELS.items()}
LLAMA = ENGINES["rotary"]


def opened(backend, prompts, prefix=()):
    return backend.open_full(prompts, prefix, public=PUBLIC, num_rows=len(prompts))


def joined(backend, *texts):
    sessions = [opened(backend, prompts) for prompts in texts]
    backend.join(sessions)
    return sessions


def walk_together(sessions, tokens):
    """Rows of every text before and after each of its tokens: float64[texts, tokens + 1, rows, V]."""
    found = [[] for _ in sessions]
    for step in range(len(tokens[0]) + 1):
        for rows, session in zip(found, sessions, strict=True):
            rows.append(np.concatenate([session.public()[None], session.logits(None)]))
        if step < len(tokens[0]):
            for session, own in zip(sessions, tokens, strict=True):
                session.push(own[step])
    return np.array(found)


def two_walks(backend, count):
    tokens = tokens_of(backend, 2 * count)
    return tokens[:count], tokens[count:]


@pytest.mark.parametrize("name", MODELS)
class TestRows:
    def test_replacing_one_prompt_leaves_all_other_rows_of_all_texts_bit_identical(self, name):
        backend = ENGINES[name]
        tokens = two_walks(backend, 3)
        rows = walk_together(joined(backend, PROMPTS, SECOND), tokens)
        others = np.ones(rows.shape[:1] + rows.shape[2:3], dtype=bool)
        for place, replacement in ((0, LONG), (1, None), (3, OTHER)):
            changed = [*PROMPTS[:place], replacement, *PROMPTS[place + 1 :]]
            moved = walk_together(joined(backend, changed, SECOND), tokens)
            others[:] = True
            others[0, place + 1] = False
            for step in range(rows.shape[1]):
                assert same_bits(moved[:, step][others], rows[:, step][others])
            assert not same_bits(moved[0, :, place + 1], rows[0, :, place + 1])

    def test_what_one_text_writes_leaves_the_rows_of_the_other_bit_identical(self, name):
        backend = ENGINES[name]
        first, second = two_walks(backend, 3)
        rows = walk_together(joined(backend, PROMPTS, SECOND), (first, second))
        moved = walk_together(joined(backend, PROMPTS, SECOND), (first, first))
        assert same_bits(moved[0], rows[0])
        assert not same_bits(moved[1], rows[1])

    def test_rows_are_those_of_texts_alone_up_to_rounding(self, name):
        backend = ENGINES[name]
        first, second = two_walks(backend, 2)
        rows = walk_together(joined(backend, PROMPTS, SECOND), (first, second))
        alone = np.array([walk(opened(backend, PROMPTS), first), walk(opened(backend, SECOND), second)])
        atol = 1e-4 if backend._engine.body.model.dtype == torch.float32 else 0.2
        np.testing.assert_allclose(rows, alone, rtol=0.0, atol=atol, equal_nan=True)


class TestSteps:
    def test_one_step_answers_all_texts(self):
        model = tiny_hf.llama()
        backend = engine(model)
        tokens = two_walks(backend, 4)
        walk_together(joined(backend, PROMPTS, SECOND), tokens)  # shapes are tried out
        watched = doubles.Watched(model)
        walk_together(joined(backend, PROMPTS, SECOND), tokens)
        assert watched.shapes.count((12, 1)) == 5
        assert {rows for rows, columns in watched.shapes if columns == 1} == {12}

    def test_released_prefixes_may_differ_and_are_read_as_they_were_written(self):
        first, second = two_walks(LLAMA, 20)
        sessions = [opened(LLAMA, PROMPTS, first), opened(LLAMA, SECOND, second)]
        LLAMA.join(sessions)
        for session, prompts, prefix in zip(sessions, (PROMPTS, SECOND), (first, second), strict=True):
            alone = opened(LLAMA, prompts, prefix).logits(None)
            np.testing.assert_allclose(session.logits(None), alone, rtol=0.0, atol=1e-4, equal_nan=True)

    def test_a_text_that_ends_leaves_the_others_their_bits_and_its_prompts_are_dropped(self):
        first, second = two_walks(LLAMA, 4)
        whole = walk_together(joined(LLAMA, PROMPTS, SECOND), (first, second))
        ends, stays = joined(LLAMA, PROMPTS, SECOND)
        walk_together([ends, stays], (first[:1], second[:1]))
        work = stays._work
        ends.close()
        assert work.private.rows[:6] == [None] * 6
        for step, token in enumerate(second[1:], start=2):
            stays.push(token)
            assert same_bits(stays.logits(None), whole[1, step, 1:])
        with pytest.raises(ConfigurationError, match="closed"):
            ends.logits(None)

    def test_a_text_that_is_pushed_more_goes_on_alone(self):
        first, second = two_walks(LLAMA, 4)
        ahead, behind = joined(LLAMA, PROMPTS, SECOND)
        walk_together([ahead, behind], (first[:1], second[:1]))
        ahead.push(first[1])
        ahead.push(first[2])
        behind.push(second[1])
        for session, prompts, prefix in ((ahead, PROMPTS, first[:3]), (behind, SECOND, second[:2])):
            alone = walk(opened(LLAMA, prompts), prefix)[-1]
            np.testing.assert_allclose(session.logits(None), alone[1:], rtol=0.0, atol=1e-4, equal_nan=True)
            np.testing.assert_allclose(session.public(), alone[0], rtol=0.0, atol=1e-4)
        assert ahead._work is not behind._work

    def test_only_untouched_texts_of_one_shape_and_a_public_number_of_rows_share_a_batch(self):
        asked = opened(LLAMA, PROMPTS)
        asked.logits(None)
        units = LLAMA.open_full(PROMPTS, (), public=PUBLIC, num_rows=None)
        more = opened(LLAMA, [*PROMPTS, OTHER])
        without = LLAMA.open(PROMPTS)
        other = opened(ENGINES["learned"], PROMPTS)
        fresh = [opened(LLAMA, PROMPTS), opened(LLAMA, SECOND)]
        sessions = [asked, units, more, without, other, *fresh]
        LLAMA.join(sessions)
        assert fresh[0]._work is fresh[1]._work
        assert len({id(session._work) for session in sessions}) == len(sessions) - 1


class TestFaults:
    def test_a_row_that_makes_the_model_raise_fails_alone(self):
        model = tiny_hf.llama()
        backend = engine(model)
        joined(backend, PROMPTS, SECOND)[0].public()  # shapes are tried out
        prompts = ("Topic: red\nText: \U0001f680", *SECOND[1:])
        doubles.raising(model, backend.encode(prompts[0])[-1], ValueError("content"))
        rows = [session.logits(None) for session in joined(backend, prompts, SECOND)]
        assert np.isnan(rows[0][0]).all()
        assert np.isfinite(rows[0][1:]).all()
        assert np.isfinite(rows[1]).all()

    def test_texts_whose_batch_runs_out_of_memory_go_on_alone_and_so_do_later_ones(self):
        model = tiny_hf.llama()
        backend = engine(model)
        tokens = two_walks(backend, 3)
        expected = walk_together(joined(backend, PROMPTS, SECOND), tokens)
        narrow = doubles.Narrow(model)
        sessions = joined(backend, PROMPTS, SECOND)
        walk_together(sessions, (tokens[0][:1], tokens[1][:1]))
        narrow.most = 6
        for session, own, rows in zip(sessions, tokens, expected, strict=True):
            session.push(own[1])
            np.testing.assert_allclose(session.public(), rows[2, 0], rtol=0.0, atol=1e-4)
            np.testing.assert_allclose(session.logits(None), rows[2, 1:], rtol=0.0, atol=1e-4, equal_nan=True)
        assert backend.rows_at_once == 1


class TestDemonstrations:
    @staticmethod
    def synthesizer(backend, **options):
        private = PrivateExamples([f"the sea is blue {place}" for place in range(200)], public_size=200)
        return DemonstrationSynthesizer.from_private_examples(
            private,
            llm=backend,
            budget=Budget(epsilon=1e6, delta=1e-6),
            epsilon=1e6,
            noise=LogitNoise("recentered_clip", multiplier=20.0),
            rows=Rows(slots=5, redraw_every="run"),
            max_tokens=6,
            decoding=Decoding(candidates=20),  # no end of the text: noise would leave one in a hundred empty
            **options,
        )

    def test_texts_advance_in_one_batch_and_one_by_one_where_one_call_is_allowed(self):
        model = tiny_hf.llama()
        backend = engine(model)
        watched = doubles.Watched(model)
        assert self.synthesizer(backend, shots_per_label=3).run(progress=False).examples
        assert watched.most_rows == 18
        watched.shapes.clear()
        one = self.synthesizer(backend, shots_per_label=3, executor=LocalExecutor(max_concurrency=1))
        assert one.run(progress=False).examples
        assert watched.most_rows == 6

    def test_with_a_checkpoint_one_text_is_under_way_at_a_time(self, tmp_path):
        model = tiny_hf.llama()
        watched = doubles.Watched(model)
        maker = self.synthesizer(engine(model), shots_per_label=2, checkpoint=tmp_path / "run.jsonl")
        assert maker.run(progress=False).examples
        assert watched.most_rows == 6

    def test_a_hook_that_comes_later_costs_no_ticket(self):
        model = tiny_hf.llama()
        watched = doubles.Watched(model)
        maker = self.synthesizer(engine(model), shots_per_label=2)
        tickets = [(ticket.template, ticket.label) for ticket in maker.plan.text_tickets()]
        before = [maker.share.remaining(name, label=label) for name, label in tickets]
        foreign = {"__name__": "recorder"}
        exec("def watch(module, args, output): pass", foreign)  # noqa: S102  a function of another package
        handle = model.register_forward_hook(foreign["watch"])
        with pytest.raises(UnsilencableModelError):
            maker.run(progress=False)
        assert [
            maker.share.remaining(name, label=label) for name, label in tickets
        ] == before  # another model may use them
        handle.remove()
        watched.shapes.clear()
        assert maker.run(progress=False).examples
        assert watched.most_rows == 12  # both are written: a text without a ticket stays empty

    @pytest.mark.asyncio
    async def test_so_they_do_when_awaited(self):
        model = tiny_hf.llama()
        backend = engine(model)
        watched = doubles.Watched(model)
        released = await self.synthesizer(backend, shots_per_label=2).arun(progress=False)
        assert released.examples
        assert watched.most_rows == 12
