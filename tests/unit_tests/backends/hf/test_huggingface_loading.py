"""Local models are loaded from folders alone, and refused where a row would not be its own prompt's."""

from __future__ import annotations

import copy
import pickle
import shutil
import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from langchain_dpicl.backends.hf import loading  # noqa: E402
from langchain_dpicl.backends.hf.backend import HuggingFaceBackend  # noqa: E402
from langchain_dpicl.exceptions import CapabilityError, ConfigurationError, PrivateAccessError  # noqa: E402
from tests import tiny_hf  # noqa: E402
from tests.contracts.backend import same_bits  # noqa: E402
from tests.unit_tests.backends.hf_doubles import engine  # noqa: E402

pytestmark = pytest.mark.usefixtures("own_hooks")

torch.set_num_threads(1)

LENGTHS = {"max_prompt_tokens": 40, "max_new_tokens": 24, "row_batch": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny-llama"
    tiny_hf.llama().save_pretrained(path)
    tiny_hf.byte_tokenizer().save_pretrained(path)
    return path


class TestFolders:
    @pytest.mark.parametrize("kind", [str, lambda path: path], ids=["text", "path"])
    def test_a_folder_holds_model_and_tokenizer(self, folder, kind):
        loaded, own = HuggingFaceBackend(kind(folder), **LENGTHS), engine()
        assert same_bits(loaded.open(["a"], []).score(loaded.vocabulary()), own.open(["a"], []).score(own.vocabulary()))
        assert loaded.name == "tiny-llama"
        assert str(folder.parent) not in f"{loaded!r} {loaded.name}"

    @pytest.mark.parametrize("name", ["gpt2", "meta-llama/Llama-3.2-1B", "/no/such/folder", "long" * 80])
    def test_a_name_that_is_no_folder_is_never_looked_up(self, name, monkeypatch):
        monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda *a, **k: pytest.fail("asked"))
        monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *a, **k: pytest.fail("asked"))
        with pytest.raises(ConfigurationError, match="names of a hub are not looked up"):
            HuggingFaceBackend(name)
        with pytest.raises(ConfigurationError, match="names of a hub are not looked up"):
            HuggingFaceBackend(tiny_hf.llama(), name)

    def test_a_folder_that_holds_no_model_is_refused(self, tmp_path, folder):
        with pytest.raises(ConfigurationError, match="AutoTokenizer reads without fetching"):
            HuggingFaceBackend(tmp_path)
        with pytest.raises(ConfigurationError, match="AutoModelForCausalLM reads without fetching"):
            HuggingFaceBackend(tmp_path, folder)

    @pytest.mark.parametrize("fault", ["cut short", "a pointer to the weights", "another size"])
    def test_a_folder_whose_model_cannot_be_read_is_named(self, fault, folder, tmp_path):
        broken = tmp_path / "broken"
        shutil.copytree(folder, broken)
        weights, config = broken / "model.safetensors", broken / "config.json"
        if fault == "cut short":
            weights.write_bytes(weights.read_bytes()[:-500])
        elif fault == "another size":
            config.write_text(config.read_text().replace('"hidden_size": 32', '"hidden_size": 64'))
        else:
            weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n")
        with pytest.raises(ConfigurationError, match=r"AutoModelForCausalLM reads without fetching.*broken, which"):
            HuggingFaceBackend(broken, **LENGTHS)

    def test_a_folder_without_the_head_that_writes_is_refused(self, folder, tmp_path):
        body = tmp_path / "body"
        model = tiny_hf.llama()
        assert not model.config.tie_word_embeddings
        model.model.save_pretrained(body)
        tiny_hf.byte_tokenizer().save_pretrained(body)
        with pytest.raises(ConfigurationError, match=r"all weights of the model, found none for \['lm_head.weight'\]"):
            HuggingFaceBackend(body, **LENGTHS)

    def test_nothing_is_fetched_and_no_code_of_a_model_is_run(self, folder, monkeypatch):
        asked = []
        for kind in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer):
            real = kind.from_pretrained

            def spy(*args, real=real, **kwargs):
                asked.append(kwargs)
                return real(*args, **kwargs)

            monkeypatch.setattr(kind, "from_pretrained", spy)
        HuggingFaceBackend(folder, **LENGTHS)
        assert len(asked) == 2
        assert all(one["local_files_only"] and not one["trust_remote_code"] for one in asked)

    @pytest.mark.parametrize("is_shown", [True, False])
    def test_loading_shows_no_progress_bar_and_leaves_them_as_they_were(self, folder, capfd, is_shown):
        from transformers.utils import logging

        before = logging.is_progress_bar_enabled()
        try:
            (logging.enable_progress_bar if is_shown else logging.disable_progress_bar)()
            HuggingFaceBackend(folder, **LENGTHS)
            captured = capfd.readouterr()
            assert captured.out == captured.err == ""
            assert logging.is_progress_bar_enabled() == is_shown
        finally:
            (logging.enable_progress_bar if before else logging.disable_progress_bar)()

    @pytest.mark.parametrize("device", ["nowhere", "cuda:99"])
    def test_a_device_that_is_not_there_is_refused(self, folder, device):
        with pytest.raises(ConfigurationError, match=f"found device='{device}'"):
            HuggingFaceBackend(folder, device=device, **LENGTHS)

    def test_a_tokenizer_of_another_type_is_refused(self, folder):
        with pytest.raises(ConfigurationError, match="expected a tokenizer of transformers"):
            HuggingFaceBackend(folder, 3, **LENGTHS)

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
    def test_a_folder_is_loaded_in_the_dtype_asked_for(self, folder, dtype):
        backend = HuggingFaceBackend(folder, dtype=dtype, device="cpu", **LENGTHS)
        assert str(backend._engine.body.model.dtype) == f"torch.{dtype}"
        assert backend._engine.body.model.device.type == "cpu"

    def test_what_came_from_a_folder_is_pickled_as_its_path(self, folder):
        backend = HuggingFaceBackend(folder, name="mine", **LENGTHS)
        data = pickle.dumps(backend)
        assert len(data) < 2000
        again = pickle.loads(data)  # noqa: S301  our own bytes
        assert again.name == "mine"
        assert again.top_tokens("a", [], top_k=3) == backend.top_tokens("a", [], top_k=3)


class TestObjects:
    def test_a_model_object_keeps_weights_dtype_and_device_and_stops_training(self):
        model = tiny_hf.llama(dtype=torch.bfloat16).train()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        backend = engine(model)
        backend.complete(["Topic: red\nText:"], max_tokens=3)
        assert not model.training
        after = model.state_dict()
        assert all(torch.equal(after[name], value) for name, value in before.items())
        assert model.dtype == torch.bfloat16
        assert all(parameter.grad is None for parameter in model.parameters())

    def test_a_model_that_went_back_to_training_answers_as_before(self):
        model = tiny_hf.gpt2(resid_pdrop=0.5, attn_pdrop=0.5, embd_pdrop=0.5)
        backend = engine(model)
        rows = backend.open(["a"], []).score(backend.vocabulary())
        model.train()
        assert same_bits(backend.open(["a"], []).score(backend.vocabulary()), rows)

    def test_an_object_is_not_converted(self):
        with pytest.raises(ConfigurationError, match="its weights are yours"):
            engine(tiny_hf.llama(), dtype="bfloat16")
        assert engine(tiny_hf.llama(), dtype="float32").name == "LlamaForCausalLM"

    @pytest.mark.parametrize("wrap", [transformers.TextGenerationPipeline, torch.nn.DataParallel, object])
    def test_an_object_around_a_model_is_refused(self, wrap):
        model, tokenizer = tiny_hf.llama(), tiny_hf.byte_tokenizer()
        given = {"model": model, "tokenizer": tokenizer} if wrap is transformers.TextGenerationPipeline else {}
        wrapped = wrap(model) if wrap is torch.nn.DataParallel else wrap(**given)
        with pytest.raises(ConfigurationError, match=f"expected a model of transformers.*found {wrap.__name__}"):
            HuggingFaceBackend(wrapped, tokenizer, **LENGTHS)

    def test_an_object_is_moved_if_asked(self):
        model = tiny_hf.llama()
        moved = []
        model.to = moved.append
        engine(model)
        engine(model, device="cpu")
        assert moved == []
        engine(model, device="meta")
        assert moved == ["meta"]

    def test_copies_are_the_engine_itself_and_pickles_are_refused(self):
        backend = engine()
        assert copy.copy(backend) is backend
        assert copy.deepcopy([backend])[0] is backend
        with pytest.raises(PrivateAccessError, match="not pickled"):
            pickle.dumps(backend)

    def test_a_model_object_needs_its_tokenizer(self):
        with pytest.raises(ConfigurationError, match="pass tokenizer="):
            HuggingFaceBackend(tiny_hf.llama())


class TestOptions:
    @pytest.mark.parametrize("name", ["max_prompt_tokens", "max_new_tokens", "row_batch"])
    @pytest.mark.parametrize("value", [0, "512", 512.0, True, None])
    def test_sizes_are_whole_numbers_from_1_on(self, name, value):
        with pytest.raises(ConfigurationError, match=f"{name}: expected a whole number >= 1, found {value!r}"):
            engine(**{name: value})

    def test_unknown_dtypes_are_refused(self):
        with pytest.raises(ConfigurationError, match="dtype in"):
            engine(dtype="int3")

    def test_lengths_fit_into_the_context(self):
        with pytest.raises(ConfigurationError, match=r"<= 64, the model's context, found 41 \+ 24"):
            engine(tiny_hf.llama(context=64), max_prompt_tokens=41)
        found = engine(tiny_hf.llama(context=64))
        assert found.context == found.max_prompt_tokens + found.room == 64

    def test_a_scaling_that_looks_at_the_longest_row_bounds_the_context(self):
        scaling = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
        model = tiny_hf.llama(context=96, rope_parameters=scaling)
        assert loading.inspect_model(model).context == 96
        scaling = {
            "rope_type": "longrope",
            "factor": 4.0,
            "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 80,
        }
        model = tiny_hf.llama(context=320, rope_parameters=scaling)
        assert loading.inspect_model(model).context == 80

    def test_a_template_longer_than_a_prompt_is_refused(self):
        with pytest.raises(ConfigurationError, match="raise max_prompt_tokens"):
            engine(tokenizer=tiny_hf.byte_tokenizer(chat=True), max_prompt_tokens=8)

    def test_a_name_is_public_and_equal_vocabularies_have_equal_fingerprints(self):
        assert engine(name="mine").name == "mine"
        same = {engine().tokenizer_fingerprint, engine(tiny_hf.gpt2()).tokenizer_fingerprint}
        other = engine(tiny_hf.llama(512), tiny_hf.piece_tokenizer()).tokenizer_fingerprint
        assert len(same) == 1
        assert other not in same


class TestEnds:
    def test_a_model_without_an_end_is_refused_with_advice(self):
        tokenizer = tiny_hf.byte_tokenizer(eos_token=None)
        model = tiny_hf.llama(eos_token_id=None)
        with pytest.raises(ConfigurationError, match="pass eos_token_id="):
            engine(model, tokenizer)
        newline = tokenizer.encode("\n")[0]
        backend = engine(model, tokenizer, eos_token_id=newline)
        assert backend.eos == newline
        assert backend.decode([backend.eos]) == ""

    def test_the_tokenizers_end_comes_before_the_models(self):
        backend = engine(tiny_hf.llama(eos_token_id=9))
        assert backend.eos == 1
        assert 9 not in backend.vocabulary()

    def test_a_model_names_its_end_where_the_tokenizer_does_not(self):
        backend = engine(tiny_hf.llama(eos_token_id=[9, 12]), tiny_hf.byte_tokenizer(eos_token=None))
        assert backend.eos == 9

    def test_all_ends_count_as_one(self):
        one, both = engine(eos_token_id=1), engine(eos_token_id=[1, 30])
        session, merged = (backend.open(["Topic: red\nText:"], []) for backend in (one, both))
        shares = session.score([1, 30, 50])[0]
        assert merged.score([1, 30, 50])[0] == pytest.approx([shares[0] + shares[1], 0, shares[2]], abs=1e-6)
        assert 30 not in both.vocabulary()

    def test_an_end_outside_the_model_is_refused(self):
        with pytest.raises(ConfigurationError, match="eos_token_id between 0 and 419"):
            engine(eos_token_id=420)
        for name in ("</s>", "12", ["</s>"], 1.0, [1.0]):
            with pytest.raises(ConfigurationError, match="expected eos_token_id as an id, or several"):
                engine(eos_token_id=name)

    @pytest.mark.parametrize("number", [np.int64(9), torch.tensor(9), torch.tensor([9, 30]), np.array([9, 30])])
    def test_whole_numbers_of_other_libraries_are_ids(self, number):
        assert engine(eos_token_id=number).eos == 9


class TestVocabularies:
    def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(self):
        with pytest.raises(ConfigurationError, match="resize_token_embeddings"):
            engine(tiny_hf.llama(400))

    def test_ids_that_the_tokenizer_does_not_know_cannot_follow(self):
        backend = engine(tiny_hf.llama(448))
        assert max(backend.vocabulary()) == 419
        rows = backend.open(["a"], []).score(backend.vocabulary())
        assert rows.sum() == pytest.approx(1, abs=1e-9)

    def test_special_tokens_cannot_follow(self):
        backend = engine(tokenizer=tiny_hf.byte_tokenizer(chat=True))
        assert not {0, 2, 3, 4, 5} & set(backend.vocabulary())
        assert 1 in backend.vocabulary()


class TestRefused:
    def test_batch_normalisation(self):
        model = tiny_hf.llama()
        model.model.norm = torch.nn.Sequential(model.model.norm, torch.nn.BatchNorm1d(40))
        with pytest.raises(CapabilityError, match="with batch normalisation"):
            engine(model)

    @pytest.mark.filterwarnings("ignore")
    def test_activations_quantised_at_run_time(self):
        model = torch.ao.quantization.quantize_dynamic(tiny_hf.llama(), {torch.nn.Linear}, dtype=torch.qint8)
        with pytest.raises(CapabilityError, match="quantisation of activations"):
            engine(model)

    def test_activations_quantised_by_configuration(self):
        for settings in (
            {"quant_method": "fp8", "activation_scheme": "dynamic"},
            {"quant_method": "bitsandbytes", "load_in_8bit": True},
            {"config_groups": {"group_0": {"input_activations": {"dynamic": True}}}},
        ):
            model = tiny_hf.llama()
            model.config.quantization_config = settings
            with pytest.raises(CapabilityError, match="quantisation of activations"):
                engine(model)

    def test_eight_bit_layers(self):
        class Linear8bitLt(torch.nn.Linear):
            """As the library of that name calls them."""

        model = tiny_hf.llama()
        model.model.layers[0].mlp.up_proj = Linear8bitLt(32, 64, bias=False)
        with pytest.raises(CapabilityError, match="quantisation of activations"):
            engine(model)

    def test_experts_of_limited_capacity(self):
        model = tiny_hf.experts()
        model.config.expert_capacity = 8
        with pytest.raises(CapabilityError, match="limited capacity"):
            engine(model)

    def test_models_that_are_not_causal(self):
        config = transformers.T5Config(
            vocab_size=420, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0
        )
        with pytest.raises(CapabilityError, match="causal language model"):
            engine(transformers.T5ForConditionalGeneration(config))

    @pytest.mark.parametrize("make", [tiny_hf.llama, tiny_hf.gpt2])
    def test_a_body_without_a_head_is_refused(self, make):
        model = make()
        with pytest.raises(CapabilityError, match=f"found {type(model.base_model).__name__}, .* AutoModelForCausalLM"):
            engine(model.base_model)

    def test_an_adapter_is_refused_with_the_way_to_merge_it(self):
        peft = pytest.importorskip("peft")
        lora = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"])
        wrapped = peft.get_peft_model(tiny_hf.llama(), lora)
        with pytest.raises(CapabilityError, match=r"found PeftModelForCausalLM; .* merge_and_unload\(\)"):
            engine(wrapped)
        assert engine(wrapped.merge_and_unload()).name == "LlamaForCausalLM"

    def test_models_that_answer_otherwise_when_padded(self):
        model = tiny_hf.llama()

        model.model.layers[0].register_forward_hook(
            lambda module, args, output: output * (1 + (output.shape[1] > 1) * 5)
        )
        backend = engine(model)
        with pytest.raises(CapabilityError, match="with and without padding"):
            backend.open(["a"], [])


def test_the_module_needs_no_torch_and_without_the_extra_the_advice_names_it():
    code = (
        "import sys\n"
        "from langchain_dpicl.backends.hf.backend import HuggingFaceBackend\n"
        "from langchain_dpicl.exceptions import ConfigurationError\n"
        "print({'torch', 'transformers'} & set(sys.modules))\n"
        "sys.modules['torch'] = None\n"
        "try: HuggingFaceBackend('.')\n"
        "except ConfigurationError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("set()")
    assert "langchain-dpicl[hf]" in done.stdout
