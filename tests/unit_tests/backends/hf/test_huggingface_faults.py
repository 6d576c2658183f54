"""Memory and faults of a local model: what one row costs, and how many there are, is seen by no other row.

Memory is counted in batches that are held, which decides the same way on every machine.
"""

from __future__ import annotations

import functools
import traceback
from weakref import WeakSet

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from langchain_dpicl.backends.hf import batches  # noqa: E402
from langchain_dpicl.backends.hf import engine as chunks  # noqa: E402
from langchain_dpicl.backends.hf import engine as sessions  # noqa: E402
from langchain_dpicl.exceptions import CapabilityError, ConfigurationError, ModelCallError  # noqa: E402
from tests import tiny_hf  # noqa: E402
from tests.contracts.backend import same_bits  # noqa: E402
from tests.unit_tests.backends import hf_doubles as doubles  # noqa: E402
from tests.unit_tests.backends.hf_doubles import CANARY, LONG, OTHER, PROMPTS, engine, tokens_of, walk  # noqa: E402

pytestmark = pytest.mark.usefixtures("own_hooks")

torch.set_num_threads(1)

PUBLIC = "Topic: red\nText:"
ROCKET = "a rocket\U0001f680"
UNITS = [f"{prompt} {number}" for number in range(5) for prompt in (PROMPTS[0], OTHER, LONG, "a")]
MODELS = {"fast": tiny_hf.llama, "narrow windows": tiny_hf.sliding}


class Budget:
    """Lets a model hold so many batches at once; None: any number."""

    def __init__(self, backend, most=None):
        self.most = most
        self.peak = 0
        self._live = WeakSet()
        self._make = backend._engine.batch
        backend._engine.batch = self.batch

    def batch(self, shape):
        made = self._make(shape)
        self._live.add(made)
        self.check()
        return made

    def check(self):
        self.peak = max(self.peak, len(self._live))
        if self.most is not None and len(self._live) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    @property
    def moved(self):
        """What stands in for a batch's `moved`, as on an accelerator: what is in main memory does not count."""

        def moved(batch, device):
            if device == "cpu":
                self._live.discard(batch)
            else:
                self._live.add(batch)
                self.check()
            return True

        return moved


def opened(backend, prompts, *, units, public=PUBLIC):
    return backend.open_full(prompts, (), public=public, num_rows=None if units else len(prompts))


def first_tokens(backend, count):
    """Returns the tokens that public rows grow by."""
    steps = backend.generate(["a", PUBLIC])
    return [next(steps)[0].tolist() for _ in range(count)]


def sizes(backend):
    return dict(backend._engine._sizes)


def shown(error):
    """Returns the functions of the package in which an error's frames hold the private text."""
    frames = [
        frame for frame, _ in traceback.walk_tb(error.__traceback__) if "langchain_dpicl" in frame.f_globals["__name__"]
    ]
    assert frames
    return [frame.f_code.co_name for frame in frames if CANARY in repr(frame.f_locals)]


@pytest.mark.usefixtures("rows_apart")
class TestOneRowThatRaises:
    prompts = (*PROMPTS[:4], ROCKET, OTHER, "a")
    others = np.arange(8) != 5

    @pytest.mark.parametrize(("units", "most"), [(False, 1), (True, 2)], ids=["slots", "units"])
    @pytest.mark.parametrize("name", MODELS)
    def test_takes_no_more_memory_than_its_batch_and_moves_nothing(self, name, units, most):
        model = MODELS[name]()
        backend = engine(model)
        id_ = backend.encode(ROCKET)[-1]
        tokens = tokens_of(backend, 4, without=id_)
        expected = walk(opened(backend, self.prompts, units=units), tokens)
        learnt = sizes(backend)
        doubles.raising(model, id_, ValueError("content"))
        budget = Budget(backend, most)
        found = walk(opened(backend, self.prompts, units=units), tokens)
        assert np.isnan(found[:, 5]).all()
        assert same_bits(found[:, self.others], expected[:, self.others])
        assert budget.peak <= most + units  # one above is refused, and gives way
        assert sizes(backend) == learnt
        without = [*self.prompts[:4], "red", *self.prompts[5:]]
        assert same_bits(walk(opened(backend, without, units=units), tokens)[:, self.others], expected[:, self.others])

    def test_shares_are_those_of_the_whole_batch(self):
        model = tiny_hf.llama()
        backend = engine(model)
        expected = opened(backend, self.prompts, units=False).score(backend.vocabulary())
        doubles.raising(model, backend.encode(ROCKET)[-1], ValueError("content"))
        found = opened(backend, self.prompts, units=False).score(backend.vocabulary())
        assert (found[4] == 0).all()
        assert same_bits(np.delete(found, 4, axis=0), np.delete(expected, 4, axis=0))

    def test_memory_that_runs_out_meanwhile_costs_a_row_and_no_size(self):
        model = tiny_hf.llama()
        backend = engine(model)
        expected = walk(opened(backend, self.prompts, units=False), [])
        learnt = sizes(backend)
        doubles.raising(model, backend.encode(ROCKET)[-1], ValueError("content"))
        session = opened(backend, self.prompts, units=False)
        narrow = doubles.Narrow(model)
        # The whole batch in two calls, of which the first fails; the public row; then the first private one, twice.
        for calls in (3, 4):
            narrow.fail_in(calls)
        found = walk(session, [])
        assert narrow.failures == 2
        assert np.isnan(found[0, [1, 5]]).all()
        rest = [0, 2, 3, 4, 6, 7]
        assert same_bits(found[:, rest], expected[:, rest])
        assert sizes(backend) == learnt

    def test_the_public_row_that_runs_out_meanwhile_is_a_public_error(self):
        model = tiny_hf.llama()
        backend = engine(model)
        opened(backend, self.prompts, units=False).public()
        learnt = sizes(backend)
        doubles.raising(model, backend.encode(ROCKET)[-1], ValueError("content"))
        session = opened(backend, self.prompts, units=False)
        narrow = doubles.Narrow(model)
        for calls in (1, 2):
            narrow.fail_in(calls)
        with pytest.raises(ModelCallError, match="out of memory with a batch of 8 rows"):
            session.public()
        assert sizes(backend) == learnt

    def test_of_choices_too(self):
        model = tiny_hf.llama()
        backend = engine(model)
        prompts = [prompt or "" for prompt in self.prompts[:3]] + [ROCKET]
        expected = backend.score_choices(prompts, [" red", " blue"])
        learnt = sizes(backend)
        doubles.raising(model, backend.encode(ROCKET)[-1], ValueError("content"))
        narrow = doubles.Narrow(model)
        narrow.fail_in(1)
        found = backend.score_choices(prompts, [" red", " blue"])
        assert narrow.failures == 1
        assert (found[[0, 3]] == -np.inf).all()
        assert same_bits(found[1:3], expected[1:3])
        assert sizes(backend) == learnt


class Lengthy:
    """Runs out of memory where more than two rows together have written more than some tokens.

    Its kernels round otherwise for batches of two, as kernels of other shapes do.
    """

    def __init__(self, model):
        self.failures = 0
        model.register_forward_pre_hook(self._note, with_kwargs=True)
        model.model.norm.register_forward_hook(self._rounded)

    def _note(self, module, args, kwargs):
        if len(kwargs["input_ids"]) > 2 and kwargs["past_key_values"].get_seq_length() > 40 + 18:
            self.failures += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def _rounded(self, module, args, output):
        return output + (len(output) == 2) * torch.linspace(-1.0, 1.0, output.shape[-1])


@pytest.mark.usefixtures("rows_apart")
@pytest.mark.parametrize("name", MODELS)
class TestTextsOfASecretNumberOfRows:
    others = ("a lake", PROMPTS[3], "a lake ")

    def test_a_text_too_long_for_its_batch_costs_no_other_row_a_bit(self, name):
        """The length of a text is private: other rows may not be written again in batches of another size for it."""
        model = MODELS[name]()
        backend = engine(model)
        lengthy = Lengthy(model)
        asked = {"max_tokens": 24, "stop": ["nd"]}
        short = backend.complete([*self.others, "a lake", *self.others], **asked)
        failed, learnt = lengthy.failures, sizes(backend)
        for rows in (self.others, ()):
            long = backend.complete([*self.others, "b", *rows], **asked)
            assert long[:3] + long[4:] == (short[:3] + short[4:])[: 3 + len(rows)]
            assert len(long[3]) > 24
        assert lengthy.failures == failed
        assert sizes(backend) == learnt

    def test_the_size_is_found_out_by_a_call_without_rows_too(self, name):
        """Otherwise an empty sample would leave it to a later call, when others may have taken memory."""
        found = []
        for prompts in ([], UNITS):
            backend = engine(MODELS[name]())
            backend.complete(prompts, max_tokens=3)
            backend.score_choices(prompts, [" red", " blue"])
            found.append({key: size for key, (size, _) in backend._engine._fitting.items()})
        assert found[0] == found[1]
        assert found[0]

    @pytest.mark.parametrize("ask", ["texts", "choices"])
    def test_a_batch_that_does_not_fit_for_once_costs_its_own_rows_at_most(self, name, ask):
        model = MODELS[name]()
        backend = engine(model)
        asked = {
            "texts": lambda: backend.complete(UNITS, max_tokens=3),
            "choices": lambda: backend.score_choices(UNITS, [" red", " blue"]).tolist(),
        }[ask]
        expected, learnt = asked(), sizes(backend)
        narrow = doubles.Narrow(model)
        narrow.fail_in(0)
        assert asked() == expected  # row by row, in the places and the shape of their batch
        narrow.fail_in(0)
        narrow.fail_in(1)
        found = asked()
        assert [place for place in range(20) if found[place] != expected[place]] == [0]
        assert narrow.failures == 3
        assert sizes(backend) == learnt


@pytest.mark.usefixtures("rows_apart")
@pytest.mark.parametrize("name", MODELS)
class TestASecretNumberOfRows:
    def test_decides_nothing_that_is_seen(self, name):
        backend = engine(MODELS[name]())
        tokens = tokens_of(backend, 4)
        expected = walk(opened(backend, UNITS, units=True), tokens)
        Budget(backend, 2)
        for count in (0, 3, 4, 11, 20):
            assert same_bits(walk(opened(backend, UNITS[:count], units=True), tokens), expected[:, : count + 1])

    def test_a_private_batch_that_does_not_fit_fails_and_the_public_prompt_stays(self, name):
        backend = engine(MODELS[name]())
        tokens = tokens_of(backend, 2)
        expected = walk(opened(backend, UNITS, units=True), tokens)
        learnt = sizes(backend)
        Budget(backend, 1)
        found = walk(opened(backend, UNITS, units=True), tokens)
        assert same_bits(found[:, :4], expected[:, :4])
        assert np.isnan(found[:, 4:]).all()
        assert sizes(backend) == learnt

    def test_the_public_prompts_batch_that_does_not_fit_is_an_error_for_every_number(self, name):
        backend = engine(MODELS[name]())
        opened(backend, UNITS, units=True).public()
        Budget(backend, 0)
        for count in (0, 20):
            with pytest.raises(ModelCallError, match="batch of 4 rows; lower row_batch"):
                opened(backend, UNITS[:count], units=True).public()

    def test_a_batch_is_as_large_as_two_of_them_fit(self, name):
        backend = engine(MODELS[name]())
        budget = Budget(backend)
        opened(backend, [], units=True).public()
        assert budget.peak == 2
        assert list(sizes(backend).values()) == [4]

    def test_single_rows_that_do_not_fit_beside_the_public_prompts_are_an_error_for_every_number(self, name):
        backend = engine(MODELS[name](), row_batch=1)
        budget = Budget(backend, 1)
        for count in (0, 1, 3):
            with pytest.raises(ModelCallError, match="single row beside the public prompt's"):
                opened(backend, UNITS[:count], units=True).public()
        budget.most = 2
        assert np.isfinite(opened(backend, UNITS[:3], units=True).logits(None)).all()

    @pytest.mark.parametrize(
        "ask", ["known slots", "new slots", "public prompt", "texts", "public texts", "public rows that grow"]
    )
    def test_gives_way_to_what_is_asked_elsewhere(self, name, ask):
        backend = engine(MODELS[name]())
        tokens = tokens_of(backend, 1)
        asked = {
            "known slots": lambda: walk(opened(backend, PROMPTS, units=False), tokens),
            "new slots": lambda: walk(opened(backend, PROMPTS, units=False), tokens),
            "public prompt": lambda: backend.top_tokens(PUBLIC, [], top_k=3),
            "texts": lambda: backend.complete(["a", "b"], max_tokens=2),
            "public texts": lambda: backend.complete(["a", "b"], max_tokens=2, public=True),
            "public rows that grow": lambda: first_tokens(backend, 3),
        }[ask]
        expected, rows = asked(), walk(opened(backend, UNITS, units=True), tokens)
        learnt = sizes(backend)
        if ask == "new slots":
            backend._engine._sizes = {key: size for key, size in learnt.items() if key[0] == "units"}
        backend._public = backend._public_answers()  # remembers nothing
        budget = Budget(backend)
        session = opened(backend, UNITS, units=True)
        session.public()
        budget.most = budget.peak  # nothing is left
        found = asked()
        assert same_bits(found, expected) if isinstance(found, np.ndarray) else found == expected
        assert sizes(backend) == learnt
        session.push(tokens[0])
        assert same_bits(session.logits(None), rows[1, 1:])


@pytest.mark.parametrize("name", MODELS)
def test_a_secret_number_of_rows_that_move_each_other_is_tried_out_one_by_one(name):
    backend = engine(doubles.coupled(MODELS[name]()))
    Budget(backend, 1)
    with pytest.raises(ModelCallError, match="single row beside the public prompt's"):
        opened(backend, UNITS[:3], units=True).public()


class TestPublicRowsThatGrow:
    @pytest.mark.parametrize("calls", [0, 1, 2, 4])
    @pytest.mark.parametrize("name", MODELS)
    def test_are_read_anew_where_memory_runs_out_half_way_and_others_give_way(self, name, calls):
        model = MODELS[name]()
        backend = engine(model)
        expected = first_tokens(backend, 5)
        session = opened(backend, UNITS, units=True)
        rows = session.logits(None)
        narrow = doubles.Narrow(model)
        narrow.fail_in(calls)
        assert first_tokens(backend, 5) == expected
        assert narrow.failures == 1
        assert same_bits(session.logits(None), rows)

    @pytest.mark.parametrize("calls", [0, 3])
    def test_end_in_an_error_where_nobody_can_give_way(self, calls):
        model = tiny_hf.llama()
        backend = engine(model)
        first_tokens(backend, 5)
        narrow = doubles.Narrow(model)
        narrow.fail_in(calls)
        with pytest.raises(ModelCallError, match="ran out of memory"):
            first_tokens(backend, 5)


@pytest.mark.usefixtures("rows_apart")
class TestMainMemory:
    def test_later_batches_wait_there_and_are_not_read_again(self, monkeypatch):
        model = tiny_hf.llama()
        backend = engine(model)
        tokens = tokens_of(backend, 4)
        expected = walk(opened(backend, UNITS, units=True), tokens)
        budget = Budget(backend, 2)
        monkeypatch.setattr(batches.RightBatch, "moved", budget.moved)
        watched = doubles.Watched(model)
        assert same_bits(walk(opened(backend, UNITS, units=True), tokens), expected)
        reads = [shape for shape in watched.shapes if shape[1] > 1]
        assert len(reads) == 6  # 21 rows in batches of 4
        assert budget.peak == 3  # the first time that a third does not fit

    def test_that_runs_out_costs_time_only(self, monkeypatch):
        backend = engine()
        tokens = tokens_of(backend, 3)
        expected = walk(opened(backend, UNITS, units=True), tokens)

        def full(self, device):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

        Budget(backend, 2)
        monkeypatch.setattr(batches.RightBatch, "moved", full)
        assert same_bits(walk(opened(backend, UNITS, units=True), tokens), expected)


@pytest.mark.usefixtures("rows_apart")
class TestReadingAnswers:
    @staticmethod
    def failing(monkeypatch, calls):
        real, left = sessions.select_logits, list(calls)

        @functools.wraps(real)
        def taken(settled, ids):
            if left and left.pop(0):
                raise torch.OutOfMemoryError("CUDA out of memory")
            return real(settled, ids)

        monkeypatch.setattr(sessions, "select_logits", taken)

    def test_memory_that_runs_out_once_moves_no_bit(self, monkeypatch):
        backend = engine()
        expected = walk(opened(backend, UNITS, units=True), [])
        self.failing(monkeypatch, [True, False, False, True])
        assert same_bits(walk(opened(backend, UNITS, units=True), []), expected)

    def test_a_private_batch_whose_answers_do_not_fit_fails(self, monkeypatch):
        backend = engine()
        session = opened(backend, UNITS, units=True)
        expected = session.logits(None)
        # Once more after other batches made room, once after memory was given back.
        self.failing(monkeypatch, [False, True, True, True])
        found = session.logits(None)
        assert np.isnan(found[3:7]).all()
        rest = [*range(3), *range(7, 20)]
        assert same_bits(found[rest], expected[rest])

    def test_slots_are_halved(self, monkeypatch):
        backend = engine()
        session = opened(backend, PROMPTS, units=False)
        expected = session.logits(None)
        self.failing(monkeypatch, [True])
        assert session.logits(None)[:4] == pytest.approx(expected[:4], abs=1e-4)
        assert list(sizes(backend).values()) == [3]

    def test_rows_that_main_memory_does_not_hold_are_an_error_that_shows_nothing(self, monkeypatch):
        session = opened(engine(), [CANARY, *UNITS], units=True)
        real = np.full

        def full(shape, *args, **options):
            if isinstance(shape, tuple) and shape[0] == 21 and shape[1] > 100:
                raise MemoryError(f"Unable to allocate an array with shape {shape}")
            return real(shape, *args, **options)

        monkeypatch.setattr(np, "full", full)
        with pytest.raises(ModelCallError, match="main memory ran out") as caught:
            session.logits(None)
        assert caught.value.__context__ is None
        assert not shown(caught.value)


@pytest.mark.usefixtures("rows_apart")
class TestWithoutAPublicPrompt:
    def test_a_batch_that_does_not_fit_where_public_text_does_is_zeros(self, monkeypatch):
        backend = engine()
        session = backend.open(UNITS, ())
        expected = session.score(backend.vocabulary())
        session.close()
        real, left = chunks._advance, [1, 1]

        def advance(own, work, chunk):
            if 0 in chunk.members.values() and left:
                left.pop()
                raise MemoryError
            real(own, work, chunk)

        monkeypatch.setattr(chunks, "_advance", advance)
        found = backend.open(UNITS, ()).score(backend.vocabulary())
        assert (found[:4] == 0).all()
        assert same_bits(found[4:], expected[4:])

    def test_a_batch_that_public_text_does_not_fit_either_is_an_error(self):
        backend = engine()
        backend.open(UNITS, ()).score(backend.vocabulary())
        Budget(backend, 0)
        with pytest.raises(ModelCallError, match="batch of 4 rows"):
            backend.open(UNITS, ()).score(backend.vocabulary())


class TestSlotsOneByOne:
    def test_run_beside_one_cache_where_all_of_them_do_not_fit(self):
        backend = engine()
        expected = walk(opened(backend, PROMPTS, units=False), tokens_of(backend, 3))
        budget = Budget(backend)
        backend._engine._sizes = dict.fromkeys(sizes(backend), 1)
        budget.most = 2
        found = walk(opened(backend, PROMPTS, units=False), tokens_of(backend, 3))
        assert found[:, :5] == pytest.approx(expected[:, :5], abs=1e-4)
        budget.most = 0
        with pytest.raises(ModelCallError, match="out of memory with a single row"):
            opened(backend, PROMPTS, units=False).public()


class TestModelsThatAreRefused:
    def test_one_without_numbers_is_told_so(self):
        model = tiny_hf.llama()
        with torch.no_grad():
            model.model.norm.weight.fill_(torch.nan)
        with pytest.raises(CapabilityError, match="gives numbers, found LlamaForCausalLM") as caught:
            opened(engine(model), [CANARY], units=True)
        assert not shown(caught.value)

    def test_one_that_fails_on_public_text_shows_no_prompt(self):
        model = tiny_hf.llama()
        backend = engine(model)
        model.register_forward_pre_hook(lambda module, args: 1 / 0)
        with pytest.raises(ModelCallError, match="failed on public text: ZeroDivisionError") as caught:
            opened(backend, [CANARY], units=True)
        assert not shown(caught.value)

    def test_one_that_reads_fewer_ids_than_it_writes(self):
        model = tiny_hf.llama()
        model.set_input_embeddings(torch.nn.Embedding(400, 32))
        with pytest.raises(ConfigurationError, match="at most 400 tokens, which the model reads and writes, found 420"):
            engine(model)
