"""Classifies text by the likelihoods of labels after a public prompt, calibrated or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np
from langchain_core.callbacks import AsyncCallbackManagerForChainRun, CallbackManagerForChainRun
from langchain_core.messages import convert_to_messages
from langchain_core.prompt_values import ChatPromptValue, PromptValue, StringPromptValue
from langchain_core.prompts import BasePromptTemplate
from langchain_core.runnables import Runnable, RunnableConfig
from typing_extensions import override

from langchain_dpicl._construction import tells_how_to_build
from langchain_dpicl.backends.base import Rows
from langchain_dpicl.backends.resolve import as_choice_backend
from langchain_dpicl.backends.rows.label_rows import LabelRows, LabelScores
from langchain_dpicl.backends.sync_async import EffectGenerator, LimitConcurrency, run_async, run_sync
from langchain_dpicl.exceptions import ModelCallError
from langchain_dpicl.options.answers import LabelAnswers
from langchain_dpicl.options.base import LLM, option_of
from langchain_dpicl.privacy._validate import fail
from langchain_dpicl.tasks.labels import distinct_texts, texts_of

CONTENT_FREE = ("N/A", "", "[MASK]")
"""The content-free inputs of Zhao et al. (2021)."""

_MOST_KEPT = 192  # scores after content-free prompts: 64 calibrations with the three inputs above


@tells_how_to_build("LabelClassifier(llm, labels=..., prompt=..., ...)")
class LabelClassifier(Runnable[Any, str]):
    """A Runnable that chooses labels by their likelihood after a prompt; batches are scored as one batch.

    With `prompt`, the input is what the prompt takes, and answers are calibrated where that helps. Without, the input
    is what a prompt gives (a prompt value, messages or a text), as in `prompt | LabelClassifier(...)`.

    How labels are scored depends on the model, as in votes; `kind` names it, see `LabelRows`:

    - "whole labels": engines that score complete texts give the likelihood of the whole label.
    - "decisions": `OpenAIDecisions` gives a probability for every label.
    - "first tokens": models that report top tokens give the probability of the tokens that begin one label alone.
    - "text votes": models that only write text give 1 to the label they name and 0 to the others.

    An answer that names no label (a refusal, or another text) is an error unless `LabelAnswers(other_label=)` is one of
    the labels; that of a content-free input is left out of the calibration. A call that failed is always an error.

    Args:
      llm: an engine, an object that carries one, a LangChain model, or its name; see
        `backends.resolve.as_choice_backend`.
      labels: at least two distinct labels, as they will be returned.
      prompt: the template of the input, public.
      verbalizers: label to the text, or texts, that stand for it, verbatim; by default a space and the label.
      answers: a `LabelAnswers`, of which a classifier takes `votes` ("hard" or "text"), `calibrate`, `content_free` and
        `other_label`. `calibrate=None`: where there is a prompt of one variable that the model continues ("whole
        labels", "first tokens"); decision models are asked a question, and votes are not probabilities. None: the
        three content-free inputs of Zhao et al.

    Raises:
      ConfigurationError: labels, verbalizers or options are unusable, or what cannot be calibrated is to be.
      CapabilityError: the model has neither scores of texts nor logprobs, and `votes` is not "text".
      ModelCallError: the model could not be reached.

    Source: Zhao et al. (2021), Calibrate Before Use, section 4.
    """

    def __init__(
        self,
        llm: LLM,
        *,
        labels: Sequence[str],
        prompt: BasePromptTemplate[Any] | None = None,
        verbalizers: Mapping[str, str | Sequence[str]] | None = None,
        answers: LabelAnswers | None = None,
    ) -> None:
        options = LabelAnswers(content_free=CONTENT_FREE) if answers is None else answers
        self.labels = distinct_texts("labels", labels, least=2)
        if prompt is not None and not hasattr(prompt, "input_variables"):
            advice = "Make one, such as with PromptTemplate.from_template(...)."
            raise fail("prompt", "a prompt template, or None", type(prompt).__name__, advice)
        self.prompt = prompt
        _check_options(option_of("answers", options, LabelAnswers), self.labels)
        is_named = answers is not None and answers.other_label in self.labels
        self._otherwise = options.other_label if is_named else None
        engine = as_choice_backend(llm, votes="text" if options.votes == "text" else None)
        self._rows = LabelRows(engine, list(texts_of(self.labels, verbalizers).values()), calibrate=False)
        # The default depends on how the model scores labels, which is known only now.
        self.content_free = options.content_free if self._calibrates(options) else ()
        self._known: dict[str, LabelScores] = {}

    @property
    def kind(self) -> str:
        """How labels are scored: "whole labels", "decisions", "first tokens" or "text votes"."""
        return self._rows.kind

    @property
    def calibrates(self) -> bool:
        """Whether probabilities are divided by those on content-free inputs."""
        return bool(self.content_free)

    def probabilities(self, inputs: Sequence[Any]) -> Rows:
        """Returns float64[n, labels]: label probabilities of each input, calibrated as configured.

        Args:
          inputs: as of `batch`.

        Raises:
          ModelCallError: a model call failed, or an answer names no label.
        """
        return self._stack(run_sync(self._walk(_Render(self.prompt, _listed(inputs)))))

    async def aprobabilities(self, inputs: Sequence[Any]) -> Rows:
        """Asynchronous version of `probabilities`."""
        return self._stack(await run_async(self._walk(_Render(self.prompt, _listed(inputs)))))

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
        return self._batch_with_config(
            self._chosen,
            list(_listed(inputs)),
            config,
            return_exceptions=return_exceptions,
            keep_errors=return_exceptions,
        )

    @override
    async def abatch(
        self,
        inputs: list[Any],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any | None,
    ) -> list[str]:
        return await self._abatch_with_config(
            self._achosen,
            list(_listed(inputs)),
            config,
            return_exceptions=return_exceptions,
            keep_errors=return_exceptions,
        )

    def __repr__(self) -> str:
        return f"LabelClassifier(labels={self.labels!r}, kind={self.kind!r}, calibrates={self.calibrates})"

    # -- inside ----------------------------------------------------------------------------------------------------

    def _calibrates(self, answers: LabelAnswers) -> bool:
        """Returns whether content-free inputs are asked too; refuses what cannot be calibrated but is to be."""
        if answers.calibrate is False:
            return False
        fault = ""
        if self.prompt is None:
            fault = "prompt=, whose content-free version shows the bias"
        elif self.kind == "text votes":
            fault = "a model with logprobs (votes are not probabilities)"
        elif len(self.prompt.input_variables) != 1:
            fault = f"one input variable, found {sorted(self.prompt.input_variables)}: fix the others by prompt.partial"
        if fault and answers.calibrate:
            raise fail("LabelAnswers.calibrate", f"None or False, or {fault}", True)
        if not answers.content_free:
            raise fail("LabelAnswers.content_free", "at least one text", answers.content_free)
        return not fault and (answers.calibrate or self.kind != "decisions")

    def _walk(
        self, inputs: _Render, limit: int | None = None, *, keep_errors: bool = False
    ) -> EffectGenerator[list[LabelScores | Exception]]:
        """Returns the label probabilities of each input, or what is wrong with it (an effect generator)."""
        values: list[str | Exception] = yield inputs
        texts = [value for value in values if isinstance(value, str)]
        # Rendered every time: an `example_selector` of the template may give content-free inputs other examples now.
        free: list[str] = (yield _Render(self.prompt, self.content_free)) if texts else []
        kept = self._known  # replaced as a whole, by any thread
        known = {text: kept[text] for text in free if text in kept}
        wanted = [text for text in (*free, *texts) if text not in known]
        found: dict[str, LabelScores | ModelCallError] = yield LimitConcurrency(
            self._rows.request_public_texts(wanted, keep_errors=keep_errors), limit
        )
        found |= known
        base = [_scores_or_raise(found[text]) for text in free]
        self._known = dict([*self._known.items(), *zip(free, base, strict=True)][-_MOST_KEPT:])
        return [value if isinstance(value, Exception) else self._read(found[value], base) for value in values]

    def _read(self, scores: LabelScores | ModelCallError, free: Sequence[LabelScores]) -> LabelScores | Exception:
        """Returns the probabilities of one input from its scores and those of its content-free versions."""
        if isinstance(scores, ModelCallError):
            return scores
        calibrated = self._rows.calibrated(scores, free)
        if (total := sum(calibrated)) > 0.0:
            return [value / total for value in calibrated]
        if self._otherwise is not None:
            return [float(label == self._otherwise) for label in self.labels]
        return ModelCallError(
            f"the answer to a public prompt names none of the labels {self.labels!r}. Ask for a label in the prompt, "
            "or give LabelAnswers(other_label=...), the label that such an answer counts as."
        )

    def _stack(self, rows: Sequence[LabelScores | Exception]) -> Rows:
        scores = [_scores_or_raise(row) for row in rows]
        return np.array(scores, dtype=np.float64).reshape(len(rows), len(self.labels))

    def _chosen(
        self,
        inputs: list[Any],
        run_manager: list[CallbackManagerForChainRun],
        config: list[RunnableConfig],
        *,
        keep_errors: bool = False,
    ) -> list[Exception | str]:
        del run_manager  # LangChain passes a config only beside it
        limit = config[0].get("max_concurrency")
        return self._best(run_sync(self._walk(_Render(self.prompt, inputs, config), limit, keep_errors=keep_errors)))

    async def _achosen(
        self,
        inputs: list[Any],
        run_manager: list[AsyncCallbackManagerForChainRun],
        config: list[RunnableConfig],
        *,
        keep_errors: bool = False,
    ) -> list[Exception | str]:
        del run_manager  # LangChain passes a config only beside it
        limit = config[0].get("max_concurrency")
        walk = self._walk(_Render(self.prompt, inputs, config), limit, keep_errors=keep_errors)
        return self._best(await run_async(walk))

    def _best(self, rows: Sequence[LabelScores | Exception]) -> list[Exception | str]:
        return [row if isinstance(row, Exception) else self.labels[row.index(max(row))] for row in rows]


def _scores_or_raise(scores: LabelScores | Exception) -> LabelScores:
    if isinstance(scores, Exception):
        raise scores
    return scores


@dataclass(frozen=True, slots=True)
class _Render:
    """Renders inputs to texts; with configs, each as a run of the template, where an error stands for its input."""

    prompt: BasePromptTemplate[Any] | None
    inputs: Sequence[Any]
    configs: Sequence[RunnableConfig] | None = None

    def run(self) -> list[str | Exception]:
        """Renders, blocking."""
        texts: list[str | Exception] = []
        for item, config in zip(self.inputs, self.configs or repeat(None)):  # noqa: B905  `repeat` has no end
            try:
                texts.append(_text_of(self._value(item, config)))
            except Exception as error:  # an example selector may raise anything
                if config is None:
                    raise
                texts.append(error)
        return texts

    async def arun(self) -> list[str | Exception]:
        """Renders, awaiting."""
        texts: list[str | Exception] = []
        for item, config in zip(self.inputs, self.configs or repeat(None)):  # noqa: B905  `repeat` has no end
            try:
                texts.append(_text_of(await self._avalue(item, config)))
            except Exception as error:  # an example selector may raise anything
                if config is None:
                    raise
                texts.append(error)
        return texts

    def _value(self, item: Any, config: RunnableConfig | None) -> PromptValue:
        if self.prompt is None:
            return _prompt_value(item)
        if config is None:
            return self.prompt.format_prompt(**_variables(self.prompt, item))
        return self.prompt.invoke(item, config)

    async def _avalue(self, item: Any, config: RunnableConfig | None) -> PromptValue:
        if self.prompt is None:
            return _prompt_value(item)
        if config is None:
            return await self.prompt.aformat_prompt(**_variables(self.prompt, item))
        return await self.prompt.ainvoke(item, config)


def _check_options(answers: LabelAnswers, labels: tuple[str, ...]) -> None:
    """Refuses options of answers that a classifier has no use for."""
    if others := sorted(answers.to_dict().keys() - {"votes", "calibrate", "content_free", "other_label"}):
        raise fail("answers", "votes, calibrate, content_free and other_label alone, for a classifier", others)
    if answers.votes == "soft":
        raise fail("LabelAnswers.votes", "'hard' or 'text' for a classifier", answers.votes)
    if answers.other_label not in {"", LabelAnswers().other_label, *labels}:
        raise fail("LabelAnswers.other_label", f"one of {labels!r}", answers.other_label)


def _listed(values: Sequence[Any]) -> Sequence[Any]:
    """Returns `values`; refuses one text or dict, which would be iterated by letter or key."""
    if isinstance(values, (str, bytes, Mapping)):
        raise fail("inputs", "a list", type(values).__name__, "Put a single value into a list.")
    return values


def _prompt_value(item: Any) -> PromptValue:
    """Returns what a prompt gives: a prompt value, messages, or a text."""
    if isinstance(item, PromptValue):
        return item
    if isinstance(item, str):
        return StringPromptValue(text=item)
    if isinstance(item, Sequence):
        return ChatPromptValue(messages=convert_to_messages(item))
    advice = "Give the classifier prompt=, or stand it behind a prompt."
    raise fail("input", "a prompt value, messages or a text", type(item).__name__, advice)


def _text_of(value: PromptValue) -> str:
    # A conversation is scored where the model's turn begins, in the format of LangChain's `to_string`.
    return value.to_string() + ("\nAI:" if isinstance(value, ChatPromptValue) else "")


def _variables(prompt: BasePromptTemplate[Any], item: Any) -> Mapping[str, Any]:
    if isinstance(item, Mapping):
        return item
    if len(names := prompt.input_variables) != 1:
        raise fail("inputs", f"dicts of {sorted(names)}", type(item).__name__)
    return {names[0]: item}
