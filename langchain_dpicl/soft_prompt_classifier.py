"""A Runnable that labels public texts with released soft prompts."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from langchain_core.callbacks import AsyncCallbackManagerForChainRun, CallbackManagerForChainRun
from langchain_core.documents import Document
from langchain_core.messages import BaseMessage
from langchain_core.prompt_values import PromptValue
from langchain_core.runnables import Runnable, RunnableConfig
from typing_extensions import override

from langchain_dpicl._constructing import tells_how_to_build
from langchain_dpicl.asking import public_text
from langchain_dpicl.backends.hf import loading
from langchain_dpicl.backends.huggingface import HuggingFaceBackend
from langchain_dpicl.backends.tuning.tasks import TaskKind
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy._validate import check_int, fail
from langchain_dpicl.soft_prompt import ARRAY, SoftPrompt
from langchain_dpicl.soft_prompt_serving import check_tokenizer, check_weights, default_name, named_prompts

if TYPE_CHECKING:
    from langchain_dpicl.backends.tuning.scoring import LabelScorer, Question

_KEYS = {"text", "pair", "prompt"}
_CARRIERS = (str, PromptValue, BaseMessage, Document)
"""Types that a chain passes in place of a text."""


@tells_how_to_build()
class SoftPromptClassifier(Runnable[Any, str]):
    """Labels texts with released soft prompts: by label words, or by a sequence-classification head.

    An input is a text (also a prompt value, a message or a document), or a dict with "text", optionally "pair" (a
    second text) and "prompt" (the name of the soft prompt). Several prompts share one model, and a batch runs together
    also with different prompts. Inputs must be PUBLIC; serving is free.

    Args:
      model: a model object or a local folder, of the kind that the prompts were trained on; for a causal one also a
        `HuggingFaceBackend`. A classifier from a folder gets the head that the prompts carry; the head of an object
        must be equal to it.
      prompts: one prompt, or several by name.
      tokenizer: with a model object.
      default: name of the prompt of inputs that name none; None: the only prompt.
      batch_size: texts per model call.
      device: "cpu", "cuda", ...; None: a folder is loaded to "cuda" if available, an object is not moved.
      dtype: "float32", "bfloat16" or "float16" for a folder; None: as saved.

    Raises:
      ConfigurationError: an unknown name, prompts of several kinds, a prompt of another model or tokenizer, or one that
        writes free text.
      CapabilityError: the model does not support such a prompt.
      ModelCallError: memory ran out.
    """

    def __init__(
        self,
        model: Any,
        prompts: SoftPrompt | Mapping[str, SoftPrompt],
        *,
        tokenizer: Any = None,
        default: str | None = None,
        batch_size: int = 16,
        device: str | None = None,
        dtype: str | None = None,
    ) -> None:
        super().__init__()
        self.prompts = named_prompts(prompts)
        self.default = default_name(self.prompts, default)
        kinds = {prompt.task.kind for prompt in self.prompts.values()}
        if len(kinds) > 1:
            raise fail("prompts", "tasks of one kind, because they share a model", sorted(kinds))
        if writes := [name for name, prompt in self.prompts.items() if prompt.task.writes_text]:
            raise fail("prompts", "tasks with labels", writes, "Serve tasks that write text with SoftPromptBackend.")
        [kind] = kinds
        self._scorer = _scorer(
            *_parts(model, tokenizer),
            kind=kind,
            batch_size=check_int("batch_size", batch_size, low=1),
            device=device,
            dtype=dtype,
        )
        for name, prompt in self.prompts.items():
            heads = prompt.peft_config.get("num_attention_heads")
            numbers = prompt.arrays[ARRAY]
            fingerprint = self._scorer.put(
                name, prompt.method, numbers, task=prompt.task, heads=heads, head=prompt.head
            )
            check_tokenizer(name, prompt, fingerprint)
            check_weights(name, prompt, self._scorer.weights())

    @override
    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> str:
        return self.batch([input], config)[0]

    @override
    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> str:
        return (await self.abatch([input], config))[0]

    @override
    def batch(
        self,
        inputs: list[Any],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any | None,
    ) -> list[str]:
        return self._batch_with_config(self._labels, inputs, config, return_exceptions=return_exceptions)

    @override
    async def abatch(
        self,
        inputs: list[Any],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any | None,
    ) -> list[str]:
        return await self._abatch_with_config(self._alabels, inputs, config, return_exceptions=return_exceptions)

    def scores(self, inputs: Sequence[str | Mapping[str, str]]) -> list[dict[str, float]]:
        """Returns, for each input, the probability of each label of its prompt's task, in the order of the labels.

        Args:
          inputs: a list of texts or dicts.

        Raises:
          ConfigurationError: an input is malformed, or names no prompt.
          ModelCallError: the model failed.
        """
        if isinstance(inputs, (str, bytes, Mapping)):
            raise fail("inputs", "a list", type(inputs).__name__, "Put a single input into a list.")
        asked = [self._question(one_input) for one_input in inputs]
        probabilities = self._scorer.scores(asked)
        return [
            dict(zip(self.prompts[one.prompt].task.labels, shares.tolist(), strict=True))
            for one, shares in zip(asked, probabilities, strict=True)
        ]

    async def ascores(self, inputs: Sequence[str | Mapping[str, str]]) -> list[dict[str, float]]:
        """Async version of `scores`, in a worker thread."""
        return await asyncio.to_thread(self.scores, inputs)

    def __repr__(self) -> str:
        return f"SoftPromptClassifier({self._scorer.name!r}, prompts={sorted(self.prompts)}, default={self.default!r})"

    def _labels(
        self, inputs: list[Any], run_manager: list[CallbackManagerForChainRun], config: list[RunnableConfig]
    ) -> list[str | Exception]:
        del run_manager, config  # LangChain passes both or none
        return self._answers(inputs)

    async def _alabels(
        self, inputs: list[Any], run_manager: list[AsyncCallbackManagerForChainRun], config: list[RunnableConfig]
    ) -> list[str | Exception]:
        del run_manager, config  # LangChain passes both or none
        return await asyncio.to_thread(self._answers, inputs)

    def _answers(self, inputs: list[Any]) -> list[str | Exception]:
        """Returns the label of each input, or its error."""
        asked = [self._question_or_error(one_input) for one_input in inputs]
        questions = [one for one in asked if not isinstance(one, Exception)]
        probabilities = iter(self._scorer.scores(questions))
        return [
            one
            if isinstance(one, Exception)
            else self.prompts[one.prompt].task.labels[int(next(probabilities).argmax())]
            for one in asked
        ]

    def _question_or_error(self, one_input: Any) -> Question | ConfigurationError:
        try:
            return self._question(one_input)
        except ConfigurationError as error:
            return error

    def _question(self, one_input: Any) -> Question:
        """Parses an input."""
        from langchain_dpicl.backends.tuning.scoring import Question

        fields = {"text": public_text("input", one_input)} if isinstance(one_input, _CARRIERS) else one_input
        if not isinstance(fields, Mapping) or "text" not in fields or not set(fields) <= _KEYS:
            actual = sorted(map(str, fields)) if isinstance(fields, Mapping) else type(one_input).__name__
            raise fail("input", 'a text, or a dict of "text", "pair" and "prompt"', actual)
        if strange := sorted(key for key, value in fields.items() if not isinstance(value, str)):
            raise fail("input", "texts", f"something else under {strange}")
        name = fields.get("prompt", self.default or "")
        if name not in self.prompts:
            raise fail("input", f'under "prompt" one of {sorted(self.prompts)}', name)
        task = self.prompts[name].task
        if task.kind != "sequence_classification" and task.takes_pair != ("pair" in fields):
            raise fail("input", f'{"a" if task.takes_pair else "no"} "pair", as the template shows', sorted(fields))
        return Question(name, fields["text"], fields.get("pair"))


def _scorer(
    model: Any, tokenizer: Any, *, kind: TaskKind, batch_size: int, device: str | None, dtype: str | None
) -> LabelScorer:
    is_own = isinstance(model, str | os.PathLike)
    model, tokenizer = loading.load(model, tokenizer, device=device, dtype=dtype, kind=kind)
    from langchain_dpicl.backends.tuning.scoring import LabelScorer  # imports torch, which `load` has checked for

    return LabelScorer(model, tokenizer, kind=kind, batch_size=batch_size, is_own=is_own)


def _parts(model: Any, tokenizer: Any) -> tuple[Any, Any]:
    """Returns model and tokenizer; for an engine, the engine's."""
    if not isinstance(model, HuggingFaceBackend):
        return model, tokenizer
    from langchain_dpicl.backends.tuning.serving import parts_of

    if tokenizer is not None:
        raise fail("tokenizer", "None with an engine, which has its own", type(tokenizer).__name__)
    engine, tokenizer = parts_of(model)
    return engine.body.model, tokenizer
