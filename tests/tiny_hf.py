"""Tiny causal models with random weights, and tokenizers trained on a few lines, made on the spot for tests."""

from __future__ import annotations

import functools
import json
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

LINES = (
    "Topic: red\nText: the apple is red and the rose is red\n\n",
    "Topic: blue\nText: the sea is blue and wide, a lake is blue\n\n",
    "Question: why was my card charged twice?\nAnswer: one charge is only held and goes back in three days.\n\n",
    "Word: seven\nKind: number\n\nWord: green\nKind: colour\n\n",
    "Instruction: write a short message that a customer sends to a bank, of the kind that is named.\n\n",
    "naïve café, 12 € and 3 £; \U0001f600 \U0001f680\n",
)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<s>", "</s>", "<unk>", "<pad>", "<|im_start|>", "<|im_end|>")


@functools.cache
def trained_on_bytes(lines: tuple[str, ...], size: int, special: tuple[str, ...]) -> str:
    """Byte-level pieces, as JSON."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(special), initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(lines * 3, trainer)
    return tokenizer.to_str()


def byte_tokenizer(*, chat: bool = False, size: int = 420, **options: Any) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer, as most models have them."""
    given = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"} | options
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(trained_on_bytes(LINES, size, SPECIAL)), **given
    )
    if chat:
        tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def word_tokenizer(words: str) -> PreTrainedTokenizerFast:
    """A tokenizer of whole words, to which every other word is unknown."""
    names = ["<unk>", "</s>", *words.split()]
    tokenizer = Tokenizer(models.WordLevel({name: id_ for id_, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


def piece_tokenizer(*, always_prepends: bool = False) -> PreTrainedTokenizerFast:
    """A tokenizer whose words carry their space, and bytes their number, as SentencePiece writes them.

    Args:
      always_prepends: a space, also before text that begins with one, as that of Mistral 7B does.
    """
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    if always_prepends:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    names = ["<s>", "</s>", "<unk>", *[f"<0x{byte:02X}>" for byte in range(256)]]
    trainer = trainers.BpeTrainer(vocab_size=480, special_tokens=names)
    tokenizer.train_from_iterator(LINES * 3, trainer)
    parts = json.loads(tokenizer.to_str())
    parts["added_tokens"] = parts["added_tokens"][:3]  # bytes are ordinary tokens
    made = Tokenizer.from_str(json.dumps(parts))
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def gemma_tokenizer() -> PreTrainedTokenizerFast:
    """As Gemma's: no space is added, and line breaks, runs of spaces and tags are added tokens that are not special."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    added = ["\n", "\n\n", "▁▁", "▁▁▁", "<h1>"]
    letters = sorted({*"".join(LINES), *"▁<>_/|1"} - {" ", "\n"})
    names = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *added, *letters]
    merges = [("▁", "▁"), ("▁▁", "▁")]
    vocabulary = {name: id_ for id_, name in enumerate(names)}
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Replace(" ", "▁")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens([AddedToken(name, normalized=False) for name in special])
    made.add_tokens([AddedToken(name, normalized=False) for name in added])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", unk_token="<unk>"
    )
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ m['role'] }}\n{{ m['content'] | trim }}<end_of_turn>\n"
        "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    )
    return tokenizer


def _made(kind: str, config: Any, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return getattr(transformers, kind)(config).to(dtype).eval()


SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def llama(vocab_size: int = 420, *, dtype: torch.dtype = torch.float32, context: int = 512, **options: Any) -> Any:
    """Rotary positions, grouped heads."""
    given = SMALL | {"max_position_embeddings": context, "pad_token_id": 3, "tie_word_embeddings": False} | options
    return _made("LlamaForCausalLM", transformers.LlamaConfig(vocab_size=vocab_size, **given), dtype=dtype)


def gpt2(vocab_size: int = 420, *, context: int = 512, **options: Any) -> Any:
    """Learned positions."""
    given: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": context, "initializer_range": 0.3}
    config = transformers.GPT2Config(vocab_size=vocab_size, bos_token_id=0, eos_token_id=1, **(given | options))
    return _made("GPT2LMHeadModel", config)


def sliding(vocab_size: int = 420, *, window: int = 12, context: int = 512) -> Any:
    """Attention that sees only the last few tokens."""
    given = SMALL | {"max_position_embeddings": context, "sliding_window": window}
    return _made("MistralForCausalLM", transformers.MistralConfig(vocab_size=vocab_size, **given))


def alibi(vocab_size: int = 420) -> Any:
    """Positions as a slope on the distance: it takes no position ids."""
    config = transformers.BloomConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        n_layer=2,
        n_head=4,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=1,
    )
    return _made("BloomForCausalLM", config)


def experts(vocab_size: int = 420) -> Any:
    """A mixture of experts without limits: what an expert computes together depends on all rows."""
    config = transformers.MixtralConfig(vocab_size=vocab_size, **SMALL, num_local_experts=4)
    return _made("MixtralForCausalLM", config)
