"""Asks the model, in public, for first candidates and for variations of survivors."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from string import Formatter
from typing import Any

from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import merge_configs

from langchain_dpicl._candidates import NO_STREAM, PublicModel, distinct
from langchain_dpicl.backends.walk import Walk
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy._validate import fail
from langchain_dpicl.wording import GenerationWording
from langchain_dpicl.writing import check_texts, generation_wording

_TOO_FEW = (
    "Give the model a temperature above 0 and no response cache, or hints= for it to write differently each time, or "
    "public candidates= of your own. No ticket was taken for it."
)


@dataclass(frozen=True, slots=True)
class EvolutionWording:
    """The prompts for candidates and variations.

    Attributes:
      first: instruction and stub of a first candidate.
      variation: template of the prompt for a variation, with the text's field and, where there are labels, the label's.
      hints: public sentences, appended in turn to the instruction of each prompt.
    """

    first: GenerationWording
    variation: str
    hints: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        known = self.first.generated_fields
        try:
            names = [name for _, name, spec, how in Formatter().parse(self.variation) if name or spec or how]
        except (ValueError, TypeError):
            names = []
        if self.first.text_key not in names or not set(names) <= known:
            expected = f"a template with {{{self.first.text_key}}}, and fields among {sorted(known)}"
            raise fail("variation_prompt", expected, self.variation)

    @classmethod
    def of(
        cls,
        *,
        text_key: str,
        label_key: str | None,
        fields: Sequence[str],
        instruction: str | None,
        generation_prompt: Any,
        variation_prompt: Any,
        hints: Sequence[str],
    ) -> EvolutionWording:
        """Builds the templates, with defaults for those not given."""
        still = "" if label_key is None else f" It still has to fit its {label_key}."
        stub = GenerationWording.default_template(text_key, label_key)
        varied = getattr(variation_prompt, "template", variation_prompt)
        request = f"Rewrite the following {text_key}: say something similar in other words.{still} Write nothing else."
        return cls(
            first=generation_wording(text_key, label_key, fields, instruction, generation_prompt),
            variation=f"{request}\n\n{stub}\n\nAnother {text_key}:" if varied is None else varied,
            hints=check_texts("hints", hints, least=0),
        )

    def first_prompts(self, label: str | None, count: int) -> list[str]:
        """Returns `count` prompts for first candidates of a label."""
        prompt = self.first.renderer(self.first.text_key, self._known(label))(())
        return [self._hinted(prompt, hint) for hint in self._turns(count)]

    def variation_prompts(self, label: str | None, texts: Iterable[str], count: int) -> list[str]:
        """Returns the prompts for `count` variations of each text."""
        values = [{**self._known(label), self.first.text_key: text} for text in texts]
        prompts = [self._filled(known) for known in values for _ in range(count)]
        turns = self._turns(len(prompts))
        return [self._hinted(prompt, hint) for prompt, hint in zip(prompts, turns, strict=True)]

    def example(self, label: str | None, text: str) -> dict[str, str]:
        """Returns a text as a demonstration."""
        known = {**self._known(label), self.first.text_key: text}
        return {name: known[name] for name in sorted(known)}

    def to_dict(self) -> dict[str, Any]:
        """Returns the public wording as JSON values."""
        return {
            "instruction": self.first.instruction,
            "generation_prompt": self.first.template,
            "variation_prompt": self.variation,
            "hints": list(self.hints),
            "text_key": self.first.text_key,
            "label_key": self.first.label_key,
        }

    def _known(self, label: str | None) -> dict[str, str]:
        return {} if label is None or self.first.label_key is None else {self.first.label_key: label}

    def _turns(self, count: int) -> list[str]:
        return list(itertools.islice(itertools.cycle(self.hints), count)) if self.hints else [""] * count

    @staticmethod
    def _hinted(prompt: str, hint: str) -> str:
        """Appends a hint to the first paragraph, which is the instruction."""
        # The instruction is the first paragraph of every prompt; see `GenerationWording`.
        instruction, gap, rest = prompt.partition("\n\n")
        return f"{instruction} {hint}{gap}{rest}" if hint else prompt

    def _filled(self, values: Mapping[str, str]) -> str:
        """Fills the variation template; values are never formatted again."""
        parts = Formatter().parse(self.variation)
        return "".join(literal + ("" if name is None else values[name]) for literal, name, _, _ in parts)


@dataclass(frozen=True, slots=True, repr=False)
class EvolutionWriter:
    """Calls the model with the run's config; all prompts are public.

    Attributes:
      model: writes the texts; it sees public prompts only.
      wording: the prompt templates.
      given: first candidates by label, if they are not generated.
      config: the run's config, for its tracers.
    """

    model: PublicModel
    wording: EvolutionWording
    given: Mapping[str | None, tuple[str, ...]] = field(default_factory=dict)
    config: RunnableConfig | None = None

    def first(self, label: str | None, count: int, *, least: int) -> Walk[tuple[str, ...]]:
        """Returns distinct first candidates (a walk)."""
        texts = self.given.get(label)
        if texts is None:
            texts = yield self.model.ask_each(self.wording.first_prompts(label, count), self._config())
        if len(texts) < least:
            raise fail("candidates", f"at least {least} distinct public texts", len(texts), _TOO_FEW)
        return texts

    def varied(self, label: str | None, texts: Sequence[str], count: int) -> Walk[tuple[str, ...]]:
        """Returns the survivors and then their variations, without duplicates (a walk)."""
        if not count:
            return tuple(texts)
        variations = yield self.model.ask_each(self.wording.variation_prompts(label, texts, count), self._config())
        return distinct([*texts, *variations])

    def _config(self) -> RunnableConfig:
        return merge_configs(self.config or {}, {"tags": [NO_STREAM]})


def given_candidates(candidates: Any, labels: Sequence[str | None]) -> dict[str | None, tuple[str, ...]]:
    """Returns public first candidates by label; a single list is used for every label."""
    if candidates is None:
        return {}
    if isinstance(candidates, Mapping):
        if set(candidates) != set(labels):
            raise ConfigurationError("candidates: expected a list of public texts, or one for each declared label.")
        return {label: _listed(candidates[label]) for label in labels}
    return dict.fromkeys(labels, _listed(candidates))


def _listed(texts: Any) -> tuple[str, ...]:
    ok = isinstance(texts, Sequence) and not isinstance(texts, str | bytes)
    if not ok or not all(isinstance(text, str) for text in texts):
        raise fail("candidates", "a list of public texts", type(texts).__name__)
    return distinct(texts)
