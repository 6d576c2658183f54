"""The wording and the rules of texts that are written token by token; public."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_dpicl._templates import Template
from langchain_dpicl.backends.base import NextTokenBackend, Token
from langchain_dpicl.options.tasks import Decoding
from langchain_dpicl.privacy._validate import fail
from langchain_dpicl.tasks.templates import GenerationTemplate

DEFAULT_STOP = ("\n",)


def has_ended(backend: NextTokenBackend, tokens: Sequence[Token], stop: Sequence[str]) -> bool:
    """Whether released tokens end a text: the end of the text, or a stop string."""
    if tokens and tokens[-1] == backend.eos:
        return True
    text = backend.decode(tokens).lstrip()
    return any(one in text for one in stop)


def check_rules(backend: NextTokenBackend, decoding: Decoding) -> tuple[int | None, tuple[str, ...]]:
    """Returns the candidates per token, at most what the engine reports (None: all), and the stop strings."""
    limit, wanted, stop = backend.max_top_k, decoding.candidates, decoding.stop
    if wanted == "all" and limit is not None:
        raise fail("Decoding.candidates", f"a number up to {limit} (this model reports top tokens only)", wanted)
    top_k = None if wanted == "all" else wanted if limit is None else min(wanted, limit)
    if stop is None:
        stop = DEFAULT_STOP if decoding.grammar is None else ()
    return top_k, check_texts("Decoding.stop", stop, least=0)


def check_texts(name: str, values: Sequence[str], *, least: int = 1) -> tuple[str, ...]:
    """Returns a sequence of at least `least` non-empty texts; a single text is refused."""
    ok = isinstance(values, Sequence) and not isinstance(values, (str, bytes)) and len(values) >= least
    if not ok or not all(isinstance(item, str) and item for item in values):
        raise fail(name, "a sequence of non-empty texts", values)
    return tuple(values)


def generation_wording(
    text_key: str, label_key: str | None, fields: Sequence[str], instruction: str | None, generation_prompt: Any
) -> GenerationTemplate:
    """Returns the prompts of a generation, with defaults for instruction and template."""
    usual = GenerationTemplate.default_template(text_key, label_key)
    of_label = "" if label_key is None else f" for the given {label_key}"
    return GenerationTemplate(
        instruction=f"Write a {text_key}{of_label}." if instruction is None else instruction,
        template=usual if generation_prompt is None else Template.of("record_prompt", generation_prompt).text,
        text_key=text_key,
        label_key=label_key,
        fields=tuple(fields),
    )
