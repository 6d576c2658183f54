"""Classifies text by the likelihoods of labels after a public prompt, calibrated or not."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from langchain_core.callbacks import AsyncCallbackManagerForChainRun, CallbackManagerForChainRun
from langchain_core.messages import convert_to_messages
from langchain_core.prompt_values import ChatPromptValue, PromptValue, StringPromptValue
from langchain_core.prompts import BasePromptTemplate
from langchain_core.runnables import Runnable, RunnableConfig
from numpy.typing import NDArray
from typing_extensions import override

from langchain_dpicl._construction import tells_how_to_build
from langchain_dpicl.backends.base import Rows
from langchain_dpicl.backends.resolve import as_choice_backend
from langchain_dpicl.exceptions import ModelCallError
from langchain_dpicl.options.answers import LabelAnswers
from langchain_dpicl.options.base import LLM, option_of
from langchain_dpicl.privacy._validate import fail
from langchain_dpicl.tasks.labels import Row, continuations_of, distinct_texts, label_scorer, resolve_failed_rows

CONTENT_FREE = ("N/A", "", "[MASK]")
"""The content-free inputs of Zhao et al. (2021)."""

_UNREADABLE = -1e4  # log-likelihood in place of NaN and infinities; keeps every difference finite
_CACHED_CALIBRATIONS = 64


def label_probabilities(log_likelihoods: Rows, content_free: NDArray[np.float64] | None = None) -> Rows:
    """Normalises label log-likelihoods to probabilities, calibrated where a content-free prior is given.

    Source: Zhao et al. (2021), section 4: W = diag(p_cf)^-1, b = 0; renormalised here, which keeps the argmax.
    """
    return np.exp(_log_softmax(log_likelihoods - (0.0 if content_free is None else _log(content_free))))


def content_free_probabilities(log_likelihoods: Rows) -> NDArray[np.float64]:
    """Returns float64[labels]: the mean label probabilities over content-free inputs, float64[inputs, labels].

    Source: Zhao et al. (2021), section 4.
    """
    mean: NDArray[np.float64] = np.exp(_log_softmax(log_likelihoods)).mean(axis=0)
    return mean


@tells_how_to_build("LabelClassifier(llm, labels=..., prompt=..., ...)")
class LabelClassifier(Runnable[Any, str]):
    """A Runnable that chooses labels by their likelihood after a prompt; batches are scored as one batch.

    With `prompt`, the input is what the prompt takes, and answers are calibrated where that helps. Without, the input
    is what a prompt gives (a prompt value, messages or a text), as in `prompt | LabelClassifier(...)`.

    How labels are scored depends on the model; `kind` names it:

    - "whole labels": engines that score complete continuations give the log-likelihood of the whole label.
    - "decisions": `OpenAIDecisions` gives a probability for every label.
    - "first tokens": models that report top tokens give the probability of each label's first token. First tokens
      must differ, and a label whose token is not reported counts 1e-6 (or the least reported probability).
    - "text votes": models that only write text give 1 to the label they name and 0 to the others.

    An answer that names no label (a refusal, or another text) is an error unless `LabelAnswers(other_label=)` is one of
    the labels.

    Args:
      llm: an engine, an object that carries one, a LangChain model, or its name; see
        `backends.resolve.as_choice_backend`.
      labels: at least two distinct labels, as they will be returned.
      prompt: the template of the input, public.
      verbalizers: label to the text that stands for it, taken verbatim; by default a space and the label.
      answers: a `LabelAnswers`, of which a classifier takes `votes` ("hard" or "text"), `calibrate`, `content_free` and
        `other_label`. `calibrate=None`: where there is a prompt of one variable that the model continues ("whole
        labels", "first tokens"); decision models are asked a question, and votes are not probabilities. None: the
        three content-free inputs of Zhao et al.

    Raises:
      ConfigurationError: labels, verbalizers or options are unusable, or what cannot be calibrated is to be.
      CapabilityError: the model has neither scores of continuations nor logprobs, and `votes` is not "text".
      ModelCallError: the model could not be reached.

    Source: Zhao et al. (2021), Calibrate Before Use, section 4.
    """

    def __init__(
        self,
        llm: LLM,
        *,
        labels: Sequence[str],
        prompt: BasePromptTemplate[Any] | None = None,
        verbalizers: Mapping[str, str] | None = None,
        answers: LabelAnswers | None = None,
    ) -> None:
        options = LabelAnswers(content_free=CONTENT_FREE) if answers is None else answers
        self.labels = distinct_texts("labels", labels, least=2)
        self.continuations = continuations_of(self.labels, verbalizers)
        self.prompt = prompt
        _check_options(option_of("answers", options, LabelAnswers), self.labels)
        is_named = answers is not None and answers.other_label in self.labels
        self._otherwise = options.other_label if is_named else None
        self._scorer = label_scorer(
            as_choice_backend(llm, votes="text" if options.votes == "text" else None), self.continuations
        )
        # The default depends on how the model scores labels, which the scorer has just found out.
        self.content_free = options.content_free if self._calibrates(options) else ()
        self._calibrations: OrderedDict[tuple[str, ...], NDArray[np.float64]] = OrderedDict()

    @property
    def kind(self) -> str:
        """How labels are scored: "whole labels", "decisions", "first tokens" or "text votes"."""
        return self._scorer.kind

    @property
    def calibrates(self) -> bool:
        """Whether probabilities are divided by those on content-free inputs."""
        return bool(self.content_free)

    def score(self, prompts: Sequence[str], *, max_concurrency: int = 8) -> Rows:
        """Returns float64[n, labels]: log-likelihoods of the labels after each PUBLIC prompt, uncalibrated.

        Args:
          prompts: complete prompts, scored as one batch.
          max_concurrency: calls in flight at once, for models that score one prompt per call.

        Raises:
          ModelCallError: a call failed, or the answer has another shape or names no label.
          ConfigurationError: two labels share their first token on a model that reports top tokens only.
        """
        return self._rows(self._attempts(prompts, max_concurrency))

    async def ascore(self, prompts: Sequence[str], *, max_concurrency: int = 8) -> Rows:
        """Asynchronous version of `score`."""
        return self._rows(await self._aattempts(prompts, max_concurrency))

    def probabilities(self, inputs: Sequence[Any]) -> Rows:
        """Returns float64[n, labels]: label probabilities of each input, calibrated as configured.

        Args:
          inputs: as of `batch`.

        Raises:
          ModelCallError: a model call failed.
        """
        base = self._calibration()
        return label_probabilities(self.score([self._rendered(item) for item in _listed(inputs)]), base)

    async def aprobabilities(self, inputs: Sequence[Any]) -> Rows:
        """Asynchronous version of `probabilities`."""
        base = await self._acalibration()
        texts = [await self._arendered(item) for item in _listed(inputs)]
        return label_probabilities(await self.ascore(texts), base)

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

    def _attempts(
        self, prompts: Sequence[str], limit: int | None, *, keep_errors: bool = False
    ) -> list[Row | ModelCallError]:
        """Returns rows float64[labels]; a failed call raises or, with `keep_errors`, stands as its error."""
        rows = self._scorer.score(prompts, limit or 8, keep_errors=keep_errors) if _listed(prompts) else []
        return resolve_failed_rows(rows, self.labels, otherwise=self._otherwise, keep_errors=keep_errors)

    async def _aattempts(
        self, prompts: Sequence[str], limit: int | None, *, keep_errors: bool = False
    ) -> list[Row | ModelCallError]:
        rows = await self._scorer.ascore(prompts, limit or 8, keep_errors=keep_errors) if _listed(prompts) else []
        return resolve_failed_rows(rows, self.labels, otherwise=self._otherwise, keep_errors=keep_errors)

    def _rows(self, attempts: Sequence[Row | ModelCallError]) -> Rows:
        rows = [row for row in attempts if not isinstance(row, ModelCallError)]
        return np.array(rows, dtype=np.float64).reshape(len(rows), len(self.labels))

    # Calibrations are cached by the rendered texts: a template with an `example_selector` is rendered every time, so
    # that each content-free input gets the examples selected for it.

    def _calibration(self) -> NDArray[np.float64] | None:
        """Returns float64[labels]: mean label probabilities on the content-free inputs; None: no calibration."""
        texts = tuple(self._rendered(text) for text in self.content_free)
        if (known := self._calibrations.get(texts)) is None and texts:
            known = self._keep(texts, content_free_probabilities(self.score(texts)))
        return known

    async def _acalibration(self) -> NDArray[np.float64] | None:
        texts = tuple([await self._arendered(text) for text in self.content_free])
        if (known := self._calibrations.get(texts)) is None and texts:
            known = self._keep(texts, content_free_probabilities(await self.ascore(texts)))
        return known

    def _keep(self, texts: tuple[str, ...], base: NDArray[np.float64]) -> NDArray[np.float64]:
        self._calibrations[texts] = base
        if len(self._calibrations) > _CACHED_CALIBRATIONS:
            self._calibrations.popitem(last=False)
        return base

    def _rendered(self, item: Any) -> str:
        """Returns the prompt of an input, without a run of the template."""
        if self.prompt is None:
            return _text_of(_prompt_value(item))
        return _text_of(self.prompt.format_prompt(**_variables(self.prompt, item)))

    async def _arendered(self, item: Any) -> str:
        if self.prompt is None:
            return _text_of(_prompt_value(item))
        return _text_of(await self.prompt.aformat_prompt(**_variables(self.prompt, item)))

    # One bad input must not fail its batch; a template's example selector may raise anything.

    def _value_or_error(self, item: Any, config: RunnableConfig) -> PromptValue | Exception:
        try:
            return _prompt_value(item) if self.prompt is None else self.prompt.invoke(item, config)
        except Exception as error:  # noqa: BLE001  see above
            return error

    async def _avalue_or_error(self, item: Any, config: RunnableConfig) -> PromptValue | Exception:
        try:
            return _prompt_value(item) if self.prompt is None else await self.prompt.ainvoke(item, config)
        except Exception as error:  # noqa: BLE001  see above
            return error

    def _chosen(
        self,
        inputs: list[Any],
        run_manager: list[CallbackManagerForChainRun],
        config: list[RunnableConfig],
        *,
        keep_errors: bool = False,
    ) -> list[Exception | str]:
        del run_manager  # LangChain passes a config only beside it
        values = [self._value_or_error(item, one) for item, one in zip(inputs, config, strict=True)]
        base, limit = self._calibration(), config[0].get("max_concurrency")
        return self._spread(values, self._attempts(_readable(values), limit, keep_errors=keep_errors), base)

    async def _achosen(
        self,
        inputs: list[Any],
        run_manager: list[AsyncCallbackManagerForChainRun],
        config: list[RunnableConfig],
        *,
        keep_errors: bool = False,
    ) -> list[Exception | str]:
        del run_manager  # LangChain passes a config only beside it
        values = [await self._avalue_or_error(item, one) for item, one in zip(inputs, config, strict=True)]
        base, limit = await self._acalibration(), config[0].get("max_concurrency")
        return self._spread(values, await self._aattempts(_readable(values), limit, keep_errors=keep_errors), base)

    def _spread(
        self,
        values: list[PromptValue | Exception],
        attempts: list[Row | ModelCallError],
        base: NDArray[np.float64] | None,
    ) -> list[Exception | str]:
        """Returns for each input its label, or the error of a bad input or a failed call."""
        rows = iter(attempts)
        outcomes = [value if isinstance(value, Exception) else next(rows) for value in values]
        return [
            outcome
            if isinstance(outcome, Exception)
            else self.labels[int(label_probabilities(outcome[None], base)[0].argmax())]  # the first of equals
            for outcome in outcomes
        ]


def _check_options(answers: LabelAnswers, labels: tuple[str, ...]) -> None:
    """Refuses options of answers that a classifier has no use for."""
    if others := sorted(answers.to_dict().keys() - {"votes", "calibrate", "content_free", "other_label"}):
        raise fail("answers", "votes, calibrate, content_free and other_label alone, for a classifier", others)
    if answers.votes == "soft":
        raise fail("LabelAnswers.votes", "'hard' or 'text' for a classifier", answers.votes)
    if answers.other_label not in {"", LabelAnswers().other_label, *labels}:
        raise fail("LabelAnswers.other_label", f"one of {labels!r}", answers.other_label)


def _log_softmax(rows: Rows) -> Rows:
    finite = np.where(np.isfinite(rows), rows, _UNREADABLE)
    shifted = finite - finite.max(axis=1, keepdims=True)  # float64[n, labels]
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def _log(probabilities: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.log(np.maximum(probabilities, np.finfo(np.float64).tiny))


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


def _readable(values: Sequence[PromptValue | Exception]) -> list[str]:
    return [_text_of(value) for value in values if not isinstance(value, Exception)]
