"""The output layer apart from its model, and prompts that are read in parts: what is computed, and that no bit moves."""

from __future__ import annotations

import threading

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from langchain_dpicl.backends.hf import batches, vocabulary  # noqa: E402
from langchain_dpicl.backends.hf import engine as sessions  # noqa: E402
from tests import tiny_hf  # noqa: E402
from tests.contracts.backend import same_bits  # noqa: E402
from tests.unit_tests.backends import hf_doubles as doubles  # noqa: E402
from tests.unit_tests.backends.hf_doubles import LONG, OTHER, PROMPTS, engine, tokens_of  # noqa: E402

pytestmark = pytest.mark.usefixtures("own_hooks")

torch.set_num_threads(1)

PUBLIC = "Topic: red\nText:"
COLUMNS = np.array([7, 0, 300, 41, 99])
SHAPE = {
    "vocab_size": 420,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 3,
}


def made(kind, **options):
    config = getattr(transformers, f"{kind}Config")(**SHAPE, **options)
    return tiny_hf._made(f"{kind}ForCausalLM", config)


def with_bias():
    model = tiny_hf.llama()
    model.lm_head = torch.nn.Linear(32, 420)
    return model


MODELS = {
    "plain": tiny_hf.llama,
    "bfloat16": lambda: tiny_hf.llama(dtype=torch.bfloat16),
    "tied": tiny_hf.gpt2,
    "bias": with_bias,
    "narrow windows": tiny_hf.sliding,
    "experts": tiny_hf.experts,
    "capped": lambda: made("Gemma2", head_dim=8, final_logit_softcapping=2.0),
    "scaled": lambda: made("Cohere", logit_scale=0.25),
    "divided": lambda: made("Granite", logits_scaling=3.0),
}


def opened(backend, prompts=PROMPTS, *, units=False):
    return backend.open_full(prompts, (), public=PUBLIC, num_rows=None if units else len(prompts))


def walk(session, tokens, columns=COLUMNS):
    """Returns the private rows at some columns, before and after every token."""
    found = [session.logits(columns)]
    for token in tokens:
        session.push(token)
        found.append(session.logits(columns))
    session.close()
    return np.stack(found)


class Products:
    """What the output layer computed: (rows, columns), one per product."""

    def __init__(self, monkeypatch):
        self.shapes = []
        whole, some = vocabulary.OutputHead.logits, vocabulary.OutputHead.some
        monkeypatch.setattr(vocabulary.OutputHead, "logits", lambda head, states: self._noted(whole(head, states)))
        monkeypatch.setattr(
            vocabulary.OutputHead, "some", lambda head, states, ids: self._noted(some(head, states, ids))
        )

    def _noted(self, logits):
        self.shapes.append(tuple(logits.shape))
        return logits


class TestEveryKindOfModel:
    @pytest.mark.parametrize("name", MODELS)
    def test_its_output_layer_stands_apart_and_says_what_the_model_says(self, name):
        model = MODELS[name]()
        backend = engine(model)
        session = opened(backend)
        found, whole = session.logits(COLUMNS), session.logits(None)[:, COLUMNS]
        assert backend._engine.body.head.is_apart
        assert np.isfinite(found[:4]).all()
        assert np.isnan(found[4]).all()
        close = 0.02 if model.dtype == torch.bfloat16 else 1e-5
        assert found == pytest.approx(whole, abs=close * np.nanmax(np.abs(whole)), nan_ok=True)
        row = backend._prompts.rows([PUBLIC], shared="", begun=(), cap=40)[0]
        with torch.inference_mode():
            told = model(input_ids=torch.tensor([row]), use_cache=False).logits[0, -1].double().numpy()
        told = told[np.asarray(backend.vocabulary())]
        assert session.public() == pytest.approx(told, abs=2 * close * np.abs(told).max())

    @pytest.mark.parametrize("units", [False, True], ids=["slots", "units"])
    @pytest.mark.parametrize("name", [name for name in MODELS if name != "experts"])  # they run one by one
    def test_replacing_one_prompt_leaves_all_other_rows_bit_identical(self, name, units):
        backend = engine(MODELS[name]())
        tokens = tokens_of(backend, 2)
        rows = walk(opened(backend, units=units), tokens)
        for place, replacement in ((0, None), (1, OTHER), (3, LONG), (4, PROMPTS[0])):
            changed = [*PROMPTS[:place], replacement, *PROMPTS[place + 1 :]]
            moved = walk(opened(backend, changed, units=units), tokens)
            others = np.arange(len(PROMPTS)) != place
            assert same_bits(moved[:, others], rows[:, others])
            assert not same_bits(moved[:, place], rows[:, place])


@pytest.mark.usefixtures("rows_apart")
class TestWhatIsComputed:
    @pytest.mark.parametrize("units", [False, True], ids=["slots", "units"])
    def test_private_rows_at_the_columns_asked_for_and_the_public_row_alone(self, monkeypatch, units):
        monkeypatch.setattr(vocabulary, "keeps_apart", sessions.keeps_apart)
        backend = engine()
        walk(opened(backend, units=units), [])  # the shape is tried out
        products = Products(monkeypatch)
        session = opened(backend, units=units)
        session.public()
        session.logits(COLUMNS)
        session.logits(np.arange(33))
        width, size = backend._engine.vocabulary.width, 4 if units else 6
        chunks = 2 if units else 1
        tried = products.shapes[1 + chunks : -chunks]
        assert products.shapes[: 1 + chunks] == [(1, width), *[(size, 16)] * chunks]
        assert set(tried) == {(size, 64)}  # this shape was new
        assert products.shapes[-chunks:] == [(size, 64)] * chunks

    def test_columns_that_are_most_of_the_vocabulary_are_taken_from_all_of_it(self, monkeypatch):
        session = opened(engine())
        whole = session.logits(None)
        products = Products(monkeypatch)
        for columns in (np.arange(len(whole[0])), np.arange(200), np.arange(0)):
            assert same_bits(session.logits(columns), whole[:, columns])
        assert products.shapes == []

    def test_tokens_that_are_not_asked_about_cost_no_output_layer(self, monkeypatch):
        backend = engine()
        session = opened(backend)
        for token in tokens_of(backend, 5):
            session.push(token)
        opened(backend).public()
        products = Products(monkeypatch)
        session.public()
        assert [rows for rows, _ in products.shapes] == [1]

    def test_the_public_row_has_the_same_bits_whatever_was_asked_before(self):
        backend = engine()
        first, second = opened(backend), opened(backend)
        second.logits(None)
        second.score(backend.vocabulary())
        assert same_bits(first.public(), second.public())


class TestEnds:
    def test_all_ends_count_as_one_among_some_columns_too(self):
        backend = engine(eos_token_id=[9, 1, 77])
        session = opened(backend)
        eos = list(backend.vocabulary()).index(backend.eos)
        columns = np.array([3, eos, 60, eos])
        found, whole = session.logits(columns), session.logits(None)
        assert found[:4] == pytest.approx(whole[:4][:, columns], abs=1e-5)
        single = opened(engine(eos_token_id=9)).logits(None)
        ids = np.asarray(engine(eos_token_id=9).vocabulary())
        ends = [int(np.flatnonzero(ids == id_)[0]) for id_ in (9, 77)]
        assert (found[:4, 1] > np.logaddexp.reduce(single[:4][:, ends], axis=1) - 1e-4).all()

    def test_without_the_end_among_them_no_end_is_computed(self, monkeypatch):
        backend = engine(eos_token_id=[9, 1, 77])
        session = opened(backend)
        session.logits(np.arange(10, 26))
        products = Products(monkeypatch)
        session.logits(np.arange(30, 46))
        assert products.shapes == [(6, 16)]


@pytest.mark.usefixtures("rows_apart")
class TestRowsThatFail:
    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
    @pytest.mark.parametrize("units", [False, True], ids=["slots", "units"])
    def test_one_number_missing_fails_a_row_at_every_column(self, value, units):
        model = tiny_hf.llama()
        backend = engine(model)
        # All of them move the same way: no two infinities meet in a column.
        columns = np.flatnonzero(model.lm_head.weight[:, 5].detach().numpy()[np.asarray(backend.vocabulary())] > 0)[:7]
        expected = walk(opened(backend, units=units), [], columns)[0]

        def spoil(module, args, output):
            output[2, :, 5] = value
            return output

        model.model.norm.register_forward_hook(spoil)
        found = walk(opened(backend, units=units), [], columns)[0]
        assert np.isnan(found[1]).all()
        assert same_bits(found[[0, 2, 3, 4]], expected[[0, 2, 3, 4]])

    def test_a_column_beyond_floats_fails_its_row_and_no_other_column_does(self):
        model = tiny_hf.llama()
        backend = engine(model)
        ids = np.asarray(backend.vocabulary())
        rows = walk(opened(backend), [])[0]
        with torch.no_grad():
            model.lm_head.weight[int(ids[41])] = torch.nan
        session = opened(backend)
        assert np.isnan(session.logits(COLUMNS)).all()
        assert same_bits(session.logits(np.array([7, 0, 300, 42, 99]))[:, [0, 1, 2, 4]], rows[:, [0, 1, 2, 4]])


@pytest.mark.usefixtures("rows_apart")
class TestRowsThatMoveEachOther:
    def test_at_some_columns_alone_are_computed_at_all_columns(self, monkeypatch):
        backend = engine()
        whole = opened(backend).logits(None)
        real = vocabulary.OutputHead.some
        monkeypatch.setattr(
            vocabulary.OutputHead, "some", lambda *given: (logits := real(*given)) + 1e-6 * logits.abs().amax(dim=0)
        )
        for units in (False, True):
            session = opened(backend, units=units)
            assert same_bits(session.logits(COLUMNS), session.logits(None)[:, COLUMNS])
        assert not any(backend._engine.body.head._kept_apart.values())
        assert same_bits(opened(backend).logits(COLUMNS), whole[:, COLUMNS])

    def test_by_their_place_are_told_apart_from_slots(self, monkeypatch):
        backend = engine()
        opened(backend).logits(None)
        real = vocabulary.OutputHead.some
        monkeypatch.setattr(
            vocabulary.OutputHead,
            "some",
            lambda *given: (logits := real(*given)) + 1e-3 * torch.arange(len(logits))[:, None],
        )
        for units in (False, True):
            opened(backend, units=units).logits(COLUMNS)
        assert backend._engine.body.head._kept_apart == {("slots", 6, 16): True, ("units", 4, 16): False}

    @pytest.mark.parametrize("moved", ["by others", "by place"])
    def test_now_and_then_are_found_out(self, monkeypatch, moved):
        backend = engine()
        opened(backend).logits(None)
        real = vocabulary.OutputHead.some

        def some(head, states, ids):
            logits = real(head, states, ids)
            by = {"by others": logits.abs().amax(dim=0), "by place": torch.arange(len(logits))[:, None]}[moved]
            return torch.where(states[:, :1] > 1.5, logits + 1e-3 * by, logits)  # one state of fifteen

        monkeypatch.setattr(vocabulary.OutputHead, "some", some)
        for units in (False, True):
            opened(backend, units=units).logits(COLUMNS)
        found = backend._engine.body.head._kept_apart
        assert found == {("slots", 6, 16): moved == "by place", ("units", 4, 16): False}


class TestModelsThatKeepTheirOutputLayer:
    def test_what_nobody_knows_of_happens_to_their_logits(self):
        model = tiny_hf.llama()
        model.register_forward_hook(lambda module, args, output: output.__setitem__("logits", output.logits * 2))
        backend = engine(model)
        session = opened(backend)
        assert not backend._engine.body.head.is_apart
        assert same_bits(session.logits(COLUMNS), session.logits(None)[:, COLUMNS])
        assert session.logits(None)[:4] == pytest.approx(2 * opened(engine()).logits(None)[:4], abs=1e-4)

    @pytest.mark.parametrize("how", ["hooked", "wrapped", "of another kind"])
    def test_what_is_done_to_it_is_kept(self, how):
        model = tiny_hf.llama()
        double = {
            "hooked": lambda: model.lm_head.register_forward_hook(lambda module, args, output: output * 2),
            "wrapped": lambda: setattr(model.lm_head, "forward", lambda x: 2 * x @ model.lm_head.weight.T),
            "of another kind": lambda: setattr(model, "lm_head", Doubled(model.lm_head)),
        }[how]
        double()
        backend = engine(model)
        found = opened(backend).logits(COLUMNS)
        assert not backend._engine.body.head.is_apart
        assert found[:4] == pytest.approx(2 * opened(engine()).logits(COLUMNS)[:4], abs=1e-4)

    def test_a_hook_that_comes_later_is_kept_too(self):
        model = tiny_hf.llama()
        backend = engine(model)
        expected = opened(backend).logits(COLUMNS)
        assert backend._engine.body.head.is_apart
        model.lm_head.register_forward_hook(lambda module, args, output: output * 2)
        assert opened(backend).logits(COLUMNS)[:4] == pytest.approx(2 * expected[:4], abs=1e-4)


class Doubled(torch.nn.Linear):
    def __init__(self, linear):
        super().__init__(linear.in_features, linear.out_features, bias=False)
        self.weight = linear.weight

    def forward(self, states):
        return 2 * super().forward(states)


class TestTheModelsOwner:
    def test_finds_the_model_as_it_was(self):
        model = tiny_hf.llama()
        ids = torch.arange(20)[None]
        with torch.inference_mode():
            before = model(input_ids=ids).logits
            opened(engine(model)).logits(COLUMNS)
            assert torch.equal(model(input_ids=ids).logits, before)
        assert not model.lm_head._forward_pre_hooks

    def test_may_use_it_in_another_thread_meanwhile(self):
        model = tiny_hf.llama()
        backend = engine(model)
        ids = torch.arange(20)[None]
        expected = opened(backend).logits(COLUMNS)
        with torch.inference_mode():
            before = model(input_ids=ids).logits
        found, waits = [], [False]

        def use():
            with torch.inference_mode():
                found.append(model(input_ids=ids).logits)

        def meanwhile(module, args, output):
            if waits[0]:
                waits[0] = False
                other = threading.Thread(target=use)
                other.start()
                other.join()

        model.model.norm.register_forward_hook(meanwhile)
        waits[0] = True
        assert same_bits(opened(backend).logits(COLUMNS), expected)
        assert torch.equal(found[0], before)


class TestReadingInParts:
    def test_parts_have_one_size_and_leave_no_row_out(self):
        for size in (1, 2, 5, 11, 16, 41):
            for length in (1, 39, 399, 5000):
                parts = batches._parts(size, length)
                assert len({part.stop - part.start for part in parts}) == 1
                assert sorted({row for part in parts for row in range(part.start, part.stop)}) == list(range(size))
                rows = parts[0].stop - parts[0].start
                assert rows == 1 or rows * length <= batches._AT_ONCE

    @pytest.mark.parametrize("shared", ["", "Instruction: write a short message that a customer sends."])
    def test_moves_no_row_and_says_what_reading_at_once_says(self, monkeypatch, shared):
        prompts = [shared + (prompt or "") for prompt in PROMPTS]
        options = {"public": shared + PUBLIC, "shared": shared}

        def rows(own, replacement=None):
            given = [*prompts[:1], *([prompts[1]] if replacement is None else [shared + replacement]), *prompts[2:]]
            session = own.open_full(given, (), num_rows=5, **options)
            return walk(session, tokens_of(own, 3), None)

        whole = rows(engine(max_prompt_tokens=64))
        monkeypatch.setattr(batches, "_AT_ONCE", 130)
        model = tiny_hf.llama()
        backend = engine(model, max_prompt_tokens=64)
        expected = rows(backend)
        watched = doubles.Watched(model)
        moved = rows(backend, OTHER)
        others = np.arange(5) != 1
        assert len({shape for shape in watched.shapes if shape[1] > 1}) == 1
        assert watched.most_rows == 6
        assert max(count for count, length in watched.shapes if length > 1) < 6
        assert same_bits(moved[:, others], expected[:, others])
        assert not same_bits(moved[:, 1], expected[:, 1])
        assert expected == pytest.approx(whole, abs=1e-4, nan_ok=True)

    def test_the_last_layer_does_no_more_than_keys_and_values(self):
        model = tiny_hf.llama()
        backend = engine(model)
        opened(backend).public()
        lengths = {layer: [] for layer in (0, 1)}
        for layer, seen in lengths.items():
            model.model.layers[layer].mlp.register_forward_pre_hook(
                lambda module, args, seen=seen: seen.append(args[0].shape[1])
            )
        opened(backend).public()
        assert lengths == {0: [39, 1], 1: [1]}

    def test_a_model_that_does_not_bear_being_stopped_is_not(self):
        model = tiny_hf.llama()
        real = model.model.forward

        class Impatient(type(model.model)):
            def forward(self, *args, **kwargs):
                try:
                    return real(*args, **kwargs)
                except Exception as error:
                    raise ValueError("stopped") from error

        expected = opened(engine(tiny_hf.llama())).logits(COLUMNS)
        model.model.__class__ = Impatient
        backend = engine(model)
        assert opened(backend).logits(COLUMNS) == pytest.approx(expected, abs=1e-5, nan_ok=True)
        assert backend._engine.layout is batches.RightBatch
        assert not backend._engine.body.stops

    def test_a_model_whose_parts_are_called_by_others_is_not_stopped(self):
        model = tiny_hf.llama()
        inner = model.model.layers[1].mlp
        real, lengths = inner.forward, []

        def forward(states):
            lengths.append(states.shape[1])
            return real(states)

        inner.forward = forward
        backend = engine(model)
        opened(backend).public()
        assert not backend._engine.body.stops
        assert 39 in lengths


def test_what_is_taken_keeps_its_columns():
    settled = torch.arange(12.0).reshape(3, 4)
    assert sessions.select_logits(settled).tolist() == settled.tolist()
    assert sessions.select_logits(settled, np.array([3, 1])).tolist() == [[3, 1], [7, 5], [11, 9]]
