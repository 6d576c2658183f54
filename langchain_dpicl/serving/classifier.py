"""Classifies text by the likelihoods of labels after a public prompt, calibrated or not."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from langchain_core.callbacks import AsyncCallbackManagerForChainRun, CallbackManagerForChainRun
from langchain_core.prompt_values import ChatPromptValue, PromptValue
from langchain_core.prompts import BasePromptTemplate
from langchain_core.runnables import RunnableConfig, RunnableSerializable
from numpy.typing import NDArray
from pydantic import ConfigDict, Field
from typing_extensions import override

from langchain_dpicl._construction import HidesInput
from langchain_dpicl.backends.base import Rows
from langchain_dpicl.backends.resolve import as_choice_backend
from langchain_dpicl.exceptions import ModelCallError
from langchain_dpicl.privacy._validate import check_int, fail
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


class LabelClassifier:
    """Chooses labels by their likelihood after a prompt, with contextual calibration by default.

    How labels are scored depends on the model; `kind` names it:

    - "whole labels": engines that score complete continuations give the log-likelihood of the whole label.
    - "decisions": `OpenAIDecisions` gives a probability for every label.
    - "first tokens": models that report top tokens give the probability of each label's first token. First tokens
      must differ, and a label whose token is not reported counts 1e-6 (or the least reported probability).
    - "text votes": models that only write text give 1 to the label they name and 0 to the others.

    An answer that names no label (a refusal, or another text) is an error unless `otherwise` is given.

    Args:
      llm: an engine, an object that carries one, or a LangChain model; see `backends.resolve.as_choice_backend`.
      labels: at least two distinct labels, as they will be returned.
      verbalizers: label to the text that stands for it, taken verbatim; by default a space and the label.
      calibrate: whether to divide by the label probabilities on content-free inputs. None: if the model continues the
        prompt ("whole labels", "first tokens"); decision models are asked a question, and votes are not
        probabilities.
      content_free: inputs without content, averaged over.
      max_concurrency: calls in flight at once, for models that score one prompt per call; a run's own
        `max_concurrency` takes precedence.
      votes: "text" parses the text that a model writes as its vote, even if it has probabilities.
      otherwise: the label of answers that name no label.

    Raises:
      ConfigurationError: labels, verbalizers or content-free inputs are unusable, or text votes are to be calibrated.
      CapabilityError: the model has neither scores of continuations nor logprobs, and `votes` is not "text".
      ModelCallError: the model could not be reached.

    Source: Zhao et al. (2021), Calibrate Before Use, section 4.
    """

    def __init__(
        self,
        llm: Any,
        *,
        labels: Sequence[str],
        verbalizers: Mapping[str, str] | None = None,
        calibrate: bool | None = None,
        content_free: Sequence[str] = CONTENT_FREE,
        max_concurrency: int = 8,
        votes: Literal["text"] | None = None,
        otherwise: str | None = None,
    ) -> None:
        self.labels = distinct_texts("labels", labels, least=2)
        self.continuations = continuations_of(self.labels, verbalizers)
        inputs = distinct_texts("content_free", content_free, least=1, empty=True) if calibrate is not False else ()
        self.max_concurrency = check_int("max_concurrency", max_concurrency, low=1)
        if otherwise is not None and otherwise not in self.labels:
            raise fail("otherwise", f"one of {self.labels!r}", otherwise)
        self.otherwise = otherwise
        self._scorer = label_scorer(as_choice_backend(llm, votes=votes), self.continuations)
        # The default depends on how the model scores labels, which the scorer has just found out.
        self.content_free = inputs if self._calibrates(calibrate) else ()
        self._calibrations: OrderedDict[tuple[str, ...], NDArray[np.float64]] = OrderedDict()

    @property
    def kind(self) -> str:
        """How labels are scored: "whole labels", "decisions", "first tokens" or "text votes"."""
        return self._scorer.kind

    @property
    def calibrates(self) -> bool:
        """Whether probabilities are divided by those on content-free inputs."""
        return bool(self.content_free)

    def score(self, prompts: Sequence[str], *, max_concurrency: int | None = None) -> Rows:
        """Returns float64[n, labels]: log-likelihoods of the labels after each PUBLIC prompt, uncalibrated.

        Args:
          prompts: complete prompts, scored as one batch.
          max_concurrency: calls in flight at once, for models that score one prompt per call.

        Raises:
          ModelCallError: a call failed, the answer has another shape, or it names no label and `otherwise` is None.
          ConfigurationError: two labels share their first token on a model that reports top tokens only.
        """
        return self._rows(self.attempts(prompts, max_concurrency=max_concurrency))

    async def ascore(self, prompts: Sequence[str], *, max_concurrency: int | None = None) -> Rows:
        """Asynchronous version of `score`."""
        return self._rows(await self.aattempts(prompts, max_concurrency=max_concurrency))

    def attempts(
        self, prompts: Sequence[str], *, max_concurrency: int | None = None, keep_errors: bool = False
    ) -> list[Row | ModelCallError]:
        """Is `score`, but returns a list of rows float64[labels], with errors in it if `keep_errors` is set.

        Args:
          prompts: as of `score`.
          max_concurrency: as of `score`.
          keep_errors: whether the error of a failed call takes the place of its row; otherwise it is raised.
        """
        if not _check_list("prompts", prompts):
            return []
        rows = self._scorer.score(prompts, max_concurrency or self.max_concurrency, keep_errors=keep_errors)
        return resolve_failed_rows(rows, self.labels, otherwise=self.otherwise, keep_errors=keep_errors)

    async def aattempts(
        self, prompts: Sequence[str], *, max_concurrency: int | None = None, keep_errors: bool = False
    ) -> list[Row | ModelCallError]:
        """Asynchronous version of `attempts`."""
        if not _check_list("prompts", prompts):
            return []
        rows = await self._scorer.ascore(prompts, max_concurrency or self.max_concurrency, keep_errors=keep_errors)
        return resolve_failed_rows(rows, self.labels, otherwise=self.otherwise, keep_errors=keep_errors)

    def calibration(self, prompt: BasePromptTemplate[Any]) -> NDArray[np.float64] | None:
        """Returns float64[labels]: mean label probabilities of `prompt` on the content-free inputs; None: off.

        Cached by the rendered texts: a template with an `example_selector` is rendered every time, so that each
        content-free input gets the examples selected for it.

        Args:
          prompt: template whose one variable is the query.

        Raises:
          ConfigurationError: the template has not exactly one variable.
        """
        texts = tuple(_render(prompt, text) for text in self._inputs_without_content(prompt))
        if (known := self._calibrations.get(texts)) is None and texts:
            known = self._keep(texts, content_free_probabilities(self.score(texts)))
        return known

    async def acalibration(self, prompt: BasePromptTemplate[Any]) -> NDArray[np.float64] | None:
        """Asynchronous version of `calibration`."""
        texts = tuple([await _arender(prompt, text) for text in self._inputs_without_content(prompt)])
        if (known := self._calibrations.get(texts)) is None and texts:
            known = self._keep(texts, content_free_probabilities(await self.ascore(texts)))
        return known

    def probabilities(self, prompt: BasePromptTemplate[Any], inputs: Sequence[str | Mapping[str, Any]]) -> Rows:
        """Returns float64[n, labels]: label probabilities of each input under `prompt`, calibrated as configured.

        Args:
          prompt: template whose one variable is the query (more are allowed without calibration).
          inputs: queries, or dicts of the template's variables.

        Raises:
          ConfigurationError: calibration needs exactly one variable.
          ModelCallError: a model call failed.
        """
        base = self.calibration(prompt)
        return label_probabilities(self.score([_render(prompt, item) for item in _check_list("inputs", inputs)]), base)

    async def aprobabilities(self, prompt: BasePromptTemplate[Any], inputs: Sequence[str | Mapping[str, Any]]) -> Rows:
        """Asynchronous version of `probabilities`."""
        base = await self.acalibration(prompt)
        texts = [await _arender(prompt, item) for item in _check_list("inputs", inputs)]
        return label_probabilities(await self.ascore(texts), base)

    def classify(self, prompt: BasePromptTemplate[Any], inputs: Sequence[str | Mapping[str, Any]]) -> list[str]:
        """Returns the likeliest label of each input; arguments and errors as in `probabilities`."""
        return self.best(self.probabilities(prompt, inputs))

    async def aclassify(self, prompt: BasePromptTemplate[Any], inputs: Sequence[str | Mapping[str, Any]]) -> list[str]:
        """Asynchronous version of `classify`."""
        return self.best(await self.aprobabilities(prompt, inputs))

    def best(self, probabilities: Rows) -> list[str]:
        """Returns the likeliest label of each row, float64[n, labels]; the first of equals.

        Args:
          probabilities: float64[n, labels].
        """
        return [self.labels[index] for index in probabilities.argmax(axis=1)]

    def as_runnable(self, prompt: BasePromptTemplate[Any]) -> PromptClassifier:
        """Returns a Runnable from the prompt's input (text or dict) to a label.

        Args:
          prompt: as of `probabilities`.

        Raises:
          ConfigurationError: calibration needs exactly one variable.
        """
        self._inputs_without_content(prompt)
        return PromptClassifier(prompt=prompt, classifier=self)

    def __repr__(self) -> str:
        return f"LabelClassifier(labels={self.labels!r}, kind={self.kind!r}, calibrates={self.calibrates})"

    # -- inside ----------------------------------------------------------------------------------------------------

    def _calibrates(self, asked: bool | None) -> bool:
        if asked and self.kind == "text votes":
            advice = "Votes are not probabilities: use a model with logprobs, or omit calibrate."
            raise fail("calibrate", "None or False with text votes", asked, advice)
        return self.kind not in {"text votes", "decisions"} if asked is None else asked

    def _rows(self, attempts: Sequence[Row | ModelCallError]) -> Rows:
        rows = [row for row in attempts if not isinstance(row, ModelCallError)]
        return np.array(rows, dtype=np.float64).reshape(len(rows), len(self.labels))

    def _inputs_without_content(self, prompt: BasePromptTemplate[Any]) -> tuple[str, ...]:
        """Returns the content-free inputs, after checking that the template has one variable."""
        if self.calibrates and len(names := prompt.input_variables) != 1:
            advice = "Fix the others with prompt.partial(...), or use calibrate=False."
            raise fail("prompt", "exactly one input variable (the query) to calibrate", sorted(names), advice)
        return self.content_free

    def _keep(self, texts: tuple[str, ...], base: NDArray[np.float64]) -> NDArray[np.float64]:
        self._calibrations[texts] = base
        if len(self._calibrations) > _CACHED_CALIBRATIONS:
            self._calibrations.popitem(last=False)
        return base


class PromptClassifier(HidesInput, RunnableSerializable[Any, str]):
    """A prompt bound to a classifier: text or dict in, label out. Batches are scored as one batch."""

    prompt: BasePromptTemplate  # type: ignore[type-arg]  # pydantic tells BasePromptTemplate[Any] from [str]
    """Public template; its rendering is traced as for any prompt."""

    classifier: LabelClassifier = Field(exclude=True)
    """The classifier that scores and calibrates."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

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
            self._labels, inputs, config, return_exceptions=return_exceptions, keep_errors=return_exceptions
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
            self._alabels, inputs, config, return_exceptions=return_exceptions, keep_errors=return_exceptions
        )

    def _labels(
        self,
        inputs: list[Any],
        run_manager: list[CallbackManagerForChainRun],
        config: list[RunnableConfig],
        *,
        keep_errors: bool = False,
    ) -> list[Exception | str]:
        del run_manager  # LangChain passes a config only beside it
        values = [_value_or_error(self.prompt, item, one) for item, one in zip(inputs, config, strict=True)]
        base, limit = self.classifier.calibration(self.prompt), config[0].get("max_concurrency")
        rows = self.classifier.attempts(_readable(values), max_concurrency=limit, keep_errors=keep_errors)
        return self._spread(values, rows, base)

    async def _alabels(
        self,
        inputs: list[Any],
        run_manager: list[AsyncCallbackManagerForChainRun],
        config: list[RunnableConfig],
        *,
        keep_errors: bool = False,
    ) -> list[Exception | str]:
        del run_manager  # LangChain passes a config only beside it
        values = [await _avalue_or_error(self.prompt, item, one) for item, one in zip(inputs, config, strict=True)]
        base, limit = await self.classifier.acalibration(self.prompt), config[0].get("max_concurrency")
        rows = await self.classifier.aattempts(_readable(values), max_concurrency=limit, keep_errors=keep_errors)
        return self._spread(values, rows, base)

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
            else self.classifier.best(label_probabilities(outcome[None], base))[0]
            for outcome in outcomes
        ]


def _log_softmax(rows: Rows) -> Rows:
    finite = np.where(np.isfinite(rows), rows, _UNREADABLE)
    shifted = finite - finite.max(axis=1, keepdims=True)  # float64[n, labels]
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def _log(probabilities: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.log(np.maximum(probabilities, np.finfo(np.float64).tiny))


def _check_list(name: str, values: Sequence[Any]) -> Sequence[Any]:
    """Returns `values`; refuses one text or dict, which would be iterated by letter or key."""
    if isinstance(values, (str, bytes, Mapping)):
        raise fail(name, "a list", type(values).__name__, "Put a single value into a list.")
    return values


def _text_of(value: PromptValue) -> str:
    # A conversation is scored where the model's turn begins, in the format of LangChain's `to_string`.
    return value.to_string() + ("\nAI:" if isinstance(value, ChatPromptValue) else "")


def _render(prompt: BasePromptTemplate[Any], item: str | Mapping[str, Any]) -> str:
    return _text_of(prompt.format_prompt(**_variables(prompt, item)))


async def _arender(prompt: BasePromptTemplate[Any], item: str | Mapping[str, Any]) -> str:
    return _text_of(await prompt.aformat_prompt(**_variables(prompt, item)))


def _variables(prompt: BasePromptTemplate[Any], item: str | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(item, Mapping):
        return item
    if len(names := prompt.input_variables) != 1:
        raise fail("inputs", f"dicts of {sorted(names)}", type(item).__name__)
    return {names[0]: item}


# One bad input must not fail its batch; a template's example selector may raise anything.


def _value_or_error(prompt: BasePromptTemplate[Any], item: Any, config: RunnableConfig) -> PromptValue | Exception:
    try:
        return prompt.invoke(item, config)
    except Exception as error:  # noqa: BLE001  see above
        return error


async def _avalue_or_error(
    prompt: BasePromptTemplate[Any], item: Any, config: RunnableConfig
) -> PromptValue | Exception:
    try:
        return await prompt.ainvoke(item, config)
    except Exception as error:  # noqa: BLE001  see above
        return error


def _readable(values: Sequence[PromptValue | Exception]) -> list[str]:
    return [_text_of(value) for value in values if not isinstance(value, Exception)]
