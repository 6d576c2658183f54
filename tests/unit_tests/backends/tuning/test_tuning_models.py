"""Models that read rows behind prompts: the answers are those of the peft package, padded or not, and of plain text."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.numpy import save_file
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from langchain_dpicl.backends.tuning.engine import PromptEngine
from langchain_dpicl.backends.tuning.prompted_model import METHODS, Method, PromptedModel, PromptedRows, stack_inputs
from langchain_dpicl.exceptions import CapabilityError, ConfigurationError, ModelCallError, PrivateAccessError
from tests import tiny_hf, tiny_tuning
from tests.unit_tests.backends.hf_doubles import poisoned
from tests.unit_tests.backends.tuning.test_tuning_tasks import CAUSAL, FREE, HEAD, MASKED

pytestmark = pytest.mark.usefixtures("own_hooks", "one_thread")

COUNT = 4
CASES: dict[str, tuple[Any, Any, Any]] = {
    "gpt2": (tiny_tuning.gpt2, tiny_tuning.causal_tokenizer, CAUSAL),
    "llama": (tiny_tuning.llama, tiny_tuning.causal_tokenizer, CAUSAL),
    "roberta-mask": (tiny_tuning.roberta, tiny_tuning.roberta_tokenizer, MASKED),
    "bert-mask": (
        lambda: tiny_tuning.bert("BertForMaskedLM"),
        tiny_tuning.bert_tokenizer,
        MASKED.__class__("masked_lm", "{text} it was {mask}.", ("x", "y"), ("bad", "good"), 24),
    ),
    "roberta-head": (
        lambda: tiny_tuning.roberta("RobertaForSequenceClassification", num_labels=3),
        tiny_tuning.roberta_tokenizer,
        HEAD,
    ),
    "bert-head": (lambda: tiny_tuning.bert(num_labels=3), tiny_tuning.bert_tokenizer, HEAD),
}
TEXTS = (("the film was good",), ("", None), ("the sea is blue and wide, a lake is deep " * 3, None), ("bad", "a play"))


def engine(case: str, method: Method, **options: Any) -> PromptEngine:
    """An engine on one of the tiny models."""
    model, tokenizer, task = CASES[case]
    given: dict[str, Any] = {"num_virtual_tokens": COUNT, "task": task, "micro_batch": 4} | options
    return PromptEngine(given.pop("model", None) or model(), tokenizer(), method=method, **given)


def loaded(made: PromptEngine, parameters: Any, folder: Path) -> Any:
    """What peft makes of the engine's files, on a model of its own."""
    case = next(
        name for name, (_, _, task) in CASES.items() if task == made.task and type(made.prompted.model) is _kind(name)
    )
    (folder / "adapter_config.json").write_text(json.dumps(made.peft_config()))
    save_file(made.arrays(parameters) | made.head(), folder / "adapter_model.safetensors")
    return peft.PeftModel.from_pretrained(CASES[case][0](), folder).eval()


def _kind(case: str) -> type:
    return type(CASES[case][0]())


def batch(made: PromptEngine, texts: Any, *, length: int) -> PromptedRows:
    """Public texts as rows."""
    read = [made.reader.input(*text) for text in texts]
    rows = stack_inputs(
        [one.ids for one in read],
        length=length,
        filler=made.reader.filler,
        device=made.prompted.device,
        is_causal=made.prompted.is_causal,
        types=[one.types for one in read] if made.reader.has_types else None,
    )
    rows.at = torch.tensor([one.at for one in read])
    return rows


def told_by_peft(model: Any, made: PromptEngine, text: Any) -> torch.Tensor:
    """The logits of one text, unpadded, at the place that the task asks about."""
    read = made.reader.input(*text)
    ids = torch.tensor([read.ids])
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if made.reader.has_types and made.task.kind == "sequence_classification":
        given["token_type_ids"] = torch.tensor([read.types])
    logits = model(**given).logits
    if made.task.kind == "sequence_classification":
        return logits[0]
    place = -1 if made.prompted.is_causal else read.at + (COUNT if made.method == "soft_prompt" else 0)
    return logits[0, place]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", CASES)
def test_padded_rows_get_the_logits_that_peft_gives_each_alone(case: str, method: Method, tmp_path: Path) -> None:
    made = engine(case, method)
    parameters = made.initial("the rose is red and blue") + 0.1 * np.sin(np.arange(made.width))
    arrays = made.arrays(parameters)["prompt_embeddings"]
    assert arrays.dtype == np.float32
    with torch.no_grad():
        prompts = torch.from_numpy(arrays)[None].repeat(len(TEXTS), 1, 1)
        found = made.prompted.forward(prompts, batch(made, TEXTS, length=30))[:, -1]
        reference = loaded(made, parameters, tmp_path)
        told = torch.stack([told_by_peft(reference, made, text) for text in TEXTS])
        bare = made.prompted.forward(prompts * 0, batch(made, TEXTS, length=30))[:, -1]
    assert float((found - told).abs().max()) <= 1e-5 * float(told.abs().max())
    assert float((found - bare).abs().amax(dim=1).min()) > 1e-3


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", ["llama", "roberta-mask", "bert-head"])
def test_rows_with_prompts_of_their_own_stay_apart(case: str, method: Method) -> None:
    made = engine(case, method)
    written = torch.from_numpy(made.arrays(made.initial("the rose is red and blue"))["prompt_embeddings"])
    prompts = [written, written.flip(0), 2 * written]
    alone = []
    with torch.no_grad():
        for prompt, text in zip(prompts, TEXTS[:3], strict=True):
            alone.append(made.prompted.forward(prompt[None], batch(made, [text], length=24)))
        together = made.prompted.forward(torch.stack(prompts), batch(made, TEXTS[:3], length=29))
    assert float((together - torch.cat(alone)).abs().max()) < 1e-4


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", ["gpt2", "llama"])
def test_a_prompt_from_text_is_that_text_to_a_causal_model(case: str, method: Method) -> None:
    made = engine(case, method)
    text = "the rose is red and blue"
    ids = made.reader.tokens.encode(text)[:COUNT]
    read = made.reader.input("the sea").ids
    with torch.no_grad():
        prompt = torch.from_numpy(made.arrays(made.initial(text))["prompt_embeddings"])
        found = made.prompted.forward(prompt[None], batch(made, [("the sea",)], length=24))[0, -1]
        told = made.prompted.model(torch.tensor([[*ids, *read]])).logits[0, -1]
    assert float((found - told).abs().max()) < 1e-4


@pytest.mark.parametrize("method", METHODS)
def test_a_text_is_repeated_or_cut_to_the_length_of_the_prompt(method: Method) -> None:
    made = engine("llama", method)
    written = made.prompted.written(made.reader.tokens.encode("red blue" * 9)[:COUNT]).numpy()
    found = made.arrays(made.initial("red blue" * 9))["prompt_embeddings"]
    assert np.abs(found - written).max() < 1e-3
    short = made.reader.tokens.encode("red")
    assert 1 < len(short) < COUNT
    again = made.prompted.written((short * COUNT)[:COUNT]).numpy()
    assert np.abs(made.arrays(made.initial("red"))["prompt_embeddings"] - again).max() < 1e-3
    assert found.shape == again.shape == (COUNT, made.prompted.dim)


def test_a_template_with_special_tokens_is_refused_before_it_is_trained() -> None:
    """They would be read letter by letter, as in a text of somebody."""
    chat = replace(CAUSAL, template="<|im_start|>user\n{text}<|im_end|>", max_input_tokens=64)
    with pytest.raises(ConfigurationError, match=r"^template: .*found \['<\|im_end\|>', '<\|im_start\|>'\]"):
        PromptEngine(
            tiny_tuning.llama(), tiny_hf.byte_tokenizer(chat=True), method="prefix", num_virtual_tokens=2, task=chat
        )


def test_a_template_with_added_tokens_that_are_no_words_is_refused_too() -> None:
    words = tiny_hf.byte_tokenizer()
    words.add_tokens(["<think>", "overdraft"])
    for template, found in (("<think>{text} is", ["<think>"]), ("overdraft {text} is", [])):
        task = replace(CAUSAL, template=template, max_input_tokens=64)
        make = functools.partial(PromptEngine, tiny_tuning.llama(), words, method="prefix", num_virtual_tokens=2)
        if found:
            with pytest.raises(ConfigurationError, match=r"^template: .*<think>"):
                make(task=task)
        else:
            make(task=task)


def test_a_text_without_tokens_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="at least one token"):
        engine("gpt2", "soft_prompt").initial("")


@pytest.mark.parametrize("method", METHODS)
def test_a_model_whose_embeddings_ask_for_gradients_is_taken(method: Method) -> None:
    """As after `gradient_checkpointing_enable()`, or when peft has prepared a quantized model."""
    plain, model = tiny_tuning.llama(), tiny_tuning.llama()
    model.enable_input_require_grads()
    found, expected = (engine("llama", method, model=one) for one in (model, plain))
    assert np.array_equal(found.initial("red"), expected.initial("red"))
    assert found.check(found.initial("red")) == expected.check(expected.initial("red"))


def test_random_prompts_are_words_of_the_vocabulary_and_differ() -> None:
    made = engine("gpt2", "soft_prompt")
    first, second = (made.initial() for _ in range(2))
    assert not np.array_equal(first, second)  # equal with probability 414^-4
    table = made.prompted.model.get_input_embeddings().weight.detach().numpy()
    rows = made.arrays(first)["prompt_embeddings"]
    assert all((np.abs(table - row).max(axis=1) == 0).any() for row in rows)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", CASES)
def test_the_width_is_that_of_what_peft_trains(case: str, method: Method) -> None:
    made = engine(case, method)
    kind = {"soft_prompt": "PROMPT_TUNING", "prefix": "PREFIX_TUNING"}[method]
    config = peft.get_peft_config(
        {"peft_type": kind, "task_type": made.peft_config()["task_type"], "num_virtual_tokens": COUNT}
    )
    wrapped = peft.get_peft_model(CASES[case][0](), config)
    (trained,) = [one for name, one in wrapped.named_parameters() if "prompt_encoder" in name]
    assert trained.shape == made.arrays(made.initial())["prompt_embeddings"].shape
    assert made.width == trained.numel()
    told = config.to_dict()
    assert {key: told[key] for key in ("token_dim", "num_layers", "num_attention_heads", "task_type")} == {
        key: made.peft_config()[key] for key in ("token_dim", "num_layers", "num_attention_heads", "task_type")
    }


def deaf(model: Any) -> Any:
    """A model whose layers take keys and values, and drop those that were there before."""

    def drop(module: Any, args: Any, given: Any) -> Any:
        name = "cache" if "cache" in given else "past_key_values"  # "cache" since transformers 5.24
        cache = given.get(name)
        length = 0 if cache is None else cache.get_seq_length(module.layer_idx)
        if not length:
            return args, given
        return args, given | {name: None, "attention_mask": given["attention_mask"][..., length:]}

    for layer in model.roberta.encoder.layer:
        layer.attention.self.register_forward_pre_hook(drop, with_kwargs=True)
    return model


def maskless(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
    """An attention that ignores the mask."""
    del mask
    return sdpa_attention_forward(module, query, key, value, None, **options)


transformers.AttentionInterface.register("maskless", maskless)


class TestWhatAModelCannotDoIsRefused:
    def test_a_prefix_that_is_ignored(self) -> None:
        model = deaf(tiny_tuning.roberta())
        with pytest.raises(CapabilityError, match="which ignores it; pass method='soft_prompt'"):
            PromptEngine(model, tiny_tuning.roberta_tokenizer(), method="prefix", num_virtual_tokens=2, task=MASKED)

    def test_a_prefix_for_a_model_without_keys_and_values(self) -> None:
        config = transformers.DistilBertConfig(
            vocab_size=300, dim=32, hidden_dim=64, n_layers=2, n_heads=4, num_labels=3
        )
        model = tiny_hf._made("DistilBertForSequenceClassification", config)
        with pytest.raises(CapabilityError, match=r"takes no prefix; take another model, or try method='soft_prompt'$"):
            PromptEngine(model, tiny_tuning.bert_tokenizer(), method="prefix", num_virtual_tokens=2, task=HEAD)

    @pytest.mark.parametrize("method", METHODS)
    def test_a_model_that_measures_distances_over_padding(self, method: Method) -> None:
        """Neither method takes it, so none is advised to the other."""
        with pytest.raises(
            CapabilityError, match=r"found BloomForCausalLM, which failed .*; take another model or dtype$"
        ):
            PromptEngine(tiny_hf.alibi(), tiny_hf.byte_tokenizer(), method=method, num_virtual_tokens=2, task=CAUSAL)

    @pytest.mark.parametrize("method", METHODS)
    def test_a_model_that_answers_otherwise_when_a_row_is_padded(self, method: Method) -> None:
        model = tiny_tuning.llama()
        model.model.norm.register_forward_hook(lambda _, args, output: output * (1 + 0.01 * output.shape[1]))
        with pytest.raises(CapabilityError, match="which answers otherwise when a row is padded"):
            engine("llama", method, model=model)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("method", METHODS)
    def test_a_decoder_with_a_head_which_answers_in_the_padding(self, method: Method, dtype: torch.dtype) -> None:
        given = {
            "num_labels": 3,
            "pad_token_id": 3,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        }
        configs = [
            transformers.LlamaConfig(vocab_size=300, intermediate_size=64, **given),
            transformers.GPT2Config(vocab_size=300, **given),
        ]
        for config in configs:
            kind = type(config).__name__.replace("Config", "ForSequenceClassification")
            model = tiny_hf._made(kind, config, dtype=dtype)
            for attention in ("sdpa", "eager", "maskless"):
                model.set_attn_implementation(attention)
                with pytest.raises(CapabilityError, match=r"padded; take an encoder .*, or .* label words$"):
                    engine("bert-head", method, model=model)
        engine("bert-head", method, model=tiny_tuning.bert(num_labels=3).to(dtype))
        engine("roberta-mask", method, model=tiny_tuning.roberta().to(dtype))

    def test_an_attention_that_reads_the_padding(self) -> None:
        """Sdpa is advised where the model has it, and is on neither that nor "eager", which reads masks as well."""
        bert = tiny_tuning.bert(num_labels=3)
        bert.set_attn_implementation("maskless")
        with pytest.raises(CapabilityError, match=r"or attn_implementation='sdpa'$"):
            engine("bert-head", "soft_prompt", model=bert)
        bert.set_attn_implementation("sdpa")
        engine("bert-head", "soft_prompt", model=bert)
        config = transformers.FNetConfig(
            vocab_size=300, hidden_size=32, num_hidden_layers=2, intermediate_size=64, num_labels=3
        )
        with pytest.raises(CapabilityError, match=r"padded; take an encoder .* label words$"):
            engine("bert-head", "soft_prompt", model=tiny_hf._made("FNetForSequenceClassification", config))

    def test_a_head_with_other_outputs_than_labels(self) -> None:
        with pytest.raises(CapabilityError, match="with 2 outputs; take a model of that kind, and labels in the order"):
            engine("bert-head", "soft_prompt", model=tiny_tuning.bert(num_labels=2))

    def test_a_model_of_another_kind(self) -> None:
        with pytest.raises(CapabilityError):
            engine("roberta-mask", "soft_prompt", model=CASES["roberta-head"][0]())
        with pytest.raises(CapabilityError):
            engine("roberta-head", "soft_prompt", model=CASES["roberta-mask"][0]())
        with pytest.raises(CapabilityError, match="decoder-only"):
            engine("gpt2", "soft_prompt", model=tiny_tuning.roberta(vocab_size=420))

    def test_an_encoder_with_a_decoder_behind_it(self) -> None:
        config = transformers.BartConfig(vocab_size=300, d_model=16, encoder_layers=1, decoder_layers=1, num_labels=3)
        model = tiny_hf._made("BartForSequenceClassification", config)
        with pytest.raises(CapabilityError, match="which has a decoder too"):
            PromptedModel(model, method="soft_prompt", kind="sequence_classification")

    def test_a_model_that_computes_rows_together(self) -> None:
        model = tiny_tuning.bert(num_labels=3)
        model.classifier = torch.nn.Sequential(torch.nn.BatchNorm1d(32), model.classifier)
        with pytest.raises(CapabilityError, match="batch normalisation"):
            engine("bert-head", "soft_prompt", model=model)

    def test_a_model_without_numbers(self) -> None:
        model = tiny_tuning.gpt2()
        with torch.no_grad():
            model.transformer.ln_f.weight[0] = float("nan")
        with pytest.raises(CapabilityError, match="logits are no numbers"):
            engine("gpt2", "soft_prompt", model=model)

    def test_lengths_beyond_the_context(self) -> None:
        fits = engine("gpt2", "soft_prompt", model=tiny_tuning.gpt2(context=28))
        assert fits.prompted.limit == 28
        with pytest.raises(ConfigurationError, match="<= 27, the model's context, found 28"):
            engine("gpt2", "soft_prompt", model=tiny_tuning.gpt2(context=27))
        assert engine("roberta-mask", "prefix", model=tiny_tuning.roberta(context=28)).prompted.limit == 28
        with pytest.raises(ConfigurationError, match="the model's context"):
            engine("roberta-mask", "prefix", model=tiny_tuning.roberta(context=27))
        with pytest.raises(ConfigurationError, match="found 34"):
            engine("gpt2", "soft_prompt", model=tiny_tuning.gpt2(context=33), task=FREE)

    def test_lengths_beyond_what_narrow_attention_sees(self) -> None:
        with pytest.raises(ConfigurationError, match="<= 12, the model's sliding window, found"):
            engine("gpt2", "prefix", model=tiny_hf.sliding())
        engine("gpt2", "prefix", model=tiny_hf.sliding(window=40))

    def test_a_tokenizer_of_another_model(self) -> None:
        with pytest.raises(ConfigurationError, match="the model's own tokenizer"):
            engine("gpt2", "soft_prompt", model=tiny_tuning.gpt2(260))

    def test_a_tokenizer_that_tells_parts_apart_which_the_model_does_not(self) -> None:
        with pytest.raises(ConfigurationError, match="at most 1 kinds of parts"):
            engine("bert-head", "soft_prompt", model=tiny_tuning.bert(type_vocab_size=1))

    @pytest.mark.parametrize(
        "given",
        [
            {"method": "lora"},
            {"num_virtual_tokens": 0},
            {"num_virtual_tokens": True},
            {"micro_batch": 0},
            {"micro_batch": 2.5},
        ],
        ids=str,
    )
    def test_options_out_of_range(self, given: dict[str, Any]) -> None:
        options = {"method": "soft_prompt"} | given
        with pytest.raises(ConfigurationError, match=rf"^{next(iter(given))}: expected"):
            engine("gpt2", **options)

    @pytest.mark.parametrize("method", METHODS)
    @pytest.mark.parametrize(
        ("fault", "kind", "told"),
        [
            (RuntimeError("sizes"), CapabilityError, "failed on public ids with RuntimeError; take another model"),
            (torch.OutOfMemoryError(), ModelCallError, "memory on a single public row"),
        ],
        ids=["sizes", "memory"],
    )
    def test_a_model_that_fails_at_its_first_forward(
        self, fault: Exception, kind: type[Exception], told: str, method: Method
    ) -> None:
        model = tiny_tuning.llama()

        def fail(*_: Any) -> None:
            raise fault

        model.model.register_forward_pre_hook(fail)
        with pytest.raises(kind, match=told):
            engine("llama", method, model=model)


def test_padding_of_words_that_make_no_numbers_plays_no_part() -> None:
    """Padding is filled with some id, whose row of the embeddings may be anything that is a number."""
    model = poisoned(tiny_tuning.llama(), 3, 1e4)
    made = engine("llama", "soft_prompt", model=model)
    assert made.reader.filler == 3
    with torch.no_grad():
        prompt = torch.from_numpy(made.arrays(made.initial("the rose is red"))["prompt_embeddings"])[None]
        bare = made.prompted.forward(prompt, batch(made, TEXTS[:1], length=len(made.reader.input(*TEXTS[0]).ids)))
        padded = made.prompted.forward(prompt, batch(made, TEXTS[:1], length=24))
    assert float((bare - padded).abs().max()) < 1e-4


@pytest.mark.parametrize("method", METHODS)
def test_a_model_is_loaded_from_a_folder_in_full_precision(method: Method, tmp_path: Path) -> None:
    tiny_tuning.bert(num_labels=3).to(torch.bfloat16).save_pretrained(tmp_path)
    tiny_tuning.bert_tokenizer().save_pretrained(tmp_path)
    made = PromptEngine(tmp_path, method=method, num_virtual_tokens=2, task=HEAD, device="cpu")
    assert made.prompted.model.dtype == torch.float32
    assert type(made.prompted.model) is transformers.BertForSequenceClassification
    assert made.name == tmp_path.name
    with pytest.raises(ConfigurationError, match="does not exist"):
        PromptEngine("bert-base-uncased", method=method, num_virtual_tokens=2, task=HEAD)


def test_an_engine_is_one_of_a_kind_and_says_what_it_is() -> None:
    import copy
    import pickle

    made = engine("gpt2", "prefix", name="tiny")
    assert copy.copy(made) is made
    assert copy.deepcopy([made])[0] is made
    assert repr(made) == "PromptEngine('tiny', method='prefix', num_virtual_tokens=4)"
    assert made.peft_config()["base_model_name_or_path"] == made.name == "tiny"
    assert made.tokenizer_fingerprint == engine("llama", "prefix").tokenizer_fingerprint
    assert made.tokenizer_fingerprint != engine("bert-head", "prefix").tokenizer_fingerprint
    with pytest.raises(PrivateAccessError, match="cannot be pickled"):
        pickle.dumps(made)
