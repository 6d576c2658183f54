"""A tiny random Llama in one GGUF file, made on the spot: real weights, real tokenizer, no meaning.

Needs numpy and `gguf`; no network and no torch. Same seed, same bytes.
"""

from __future__ import annotations

import importlib
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np

SPECIALS = ("<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>")
BOS, EOS = 0, 1
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_TEXT = (
    "why was my card payment declined ? the transfer to my account is still pending . how do i top up by card ? "
    "the cash machine kept my card . was i charged a fee for the cash withdrawal ? the name of the city is on the river . "
)


def byte_alphabet() -> list[str]:
    """Returns the printable stand-in of each byte, as byte-level BPE of the GPT-2 kind writes it."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = iter(range(256, 512))
    return [chr(byte) if byte in kept else chr(next(shifted)) for byte in range(256)]


def train_merges(text: str, num_merges: int) -> list[tuple[str, str]]:
    """Learns byte-pair merges on whitespace-separated words, most frequent pair first."""
    space = byte_alphabet()[0x20]
    words = Counter(tuple(space + word) for word in text.split())
    merges: list[tuple[str, str]] = []
    for _ in range(num_merges):
        pairs: Counter[tuple[str, str]] = Counter()
        for word, count in words.items():
            for pair in pairwise(word):
                pairs[pair] += count
        if not pairs:
            break
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        merges.append(best)
        merged: Counter[tuple[str, ...]] = Counter()
        for word, count in words.items():
            merged[_merge(word, best)] += count
        words = merged
    return merges


def _merge(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    out: list[str] = []
    for piece in word:
        if out and (out[-1], piece) == pair:
            out[-1] += piece
        else:
            out.append(piece)
    return tuple(out)


def vocabulary() -> tuple[list[str], list[tuple[str, str]]]:
    """Returns the token list (specials, bytes, merges) and the merges."""
    merges = train_merges(_TEXT, 100)
    return [*SPECIALS, *byte_alphabet(), *dict.fromkeys(left + right for left, right in merges)], merges


def build(path: Path, *, width: int = 64, layers: int = 2, heads: int = 4, seed: int = 0) -> int:
    """Writes the model and returns its vocabulary size."""
    gguf = importlib.import_module("gguf")
    tokens, merges = vocabulary()
    size, hidden = len(tokens), 2 * width
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("tiny-llama")
    writer.add_context_length(2048)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(width // heads)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(size)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * len(SPECIALS) + [gguf.TokenType.NORMAL] * (size - len(SPECIALS)))
    writer.add_token_merges([f"{left} {right}" for left, right in merges])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_pad_token_id(EOS)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
    coins = np.random.Generator(np.random.PCG64(seed))  # weights of a test model, not noise of a release

    def weight(*shape: int) -> np.ndarray:
        return (0.3 * coins.standard_normal(shape)).astype(np.float32)

    writer.add_tensor("token_embd.weight", weight(size, width))
    for layer in range(layers):
        prefix = f"blk.{layer}."
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"{prefix}{name}.weight", np.ones(width, np.float32))
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            writer.add_tensor(f"{prefix}{name}.weight", weight(width, width))
        writer.add_tensor(f"{prefix}ffn_gate.weight", weight(hidden, width))
        writer.add_tensor(f"{prefix}ffn_up.weight", weight(hidden, width))
        writer.add_tensor(f"{prefix}ffn_down.weight", weight(width, hidden))
    writer.add_tensor("output_norm.weight", np.ones(width, np.float32))
    output = weight(size, width)
    # Half characters stay possible but rare, as in a trained model.
    half = [i for i, token in enumerate(tokens) if token in set(byte_alphabet()[0x80:])]
    output[half] *= 0.1
    writer.add_tensor("output.weight", output)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return size
