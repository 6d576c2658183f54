"""A tokenizer that needs no network: every byte, a few words and two control tokens."""

from __future__ import annotations

import tiktoken

MERGED = {" card": 256, " c": 257, "é": 258, "\u65e5": 259}
END, OTHER_CONTROL, UNKNOWN = 300, 301, 299


def local_encoding() -> tiktoken.Encoding:
    """Every byte and a few words; built here, so it needs no network."""
    ranks = {bytes([byte]): byte for byte in range(256)} | {text.encode(): number for text, number in MERGED.items()}
    return tiktoken.Encoding(
        "local",
        pat_str=r" ?\w+| ?[^\s\w]+|\s+",
        mergeable_ranks=ranks,
        special_tokens={"<|endoftext|>": END, "<|fim_prefix|>": OTHER_CONTROL},
    )
