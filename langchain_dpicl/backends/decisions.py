"""Wraps a LangChain decision model as an engine that gives a probability to every choice."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.backends._public import answered, probed
from langchain_dpicl.backends.base import Rows
from langchain_dpicl.backends.calls import Calls, limit_of
from langchain_dpicl.backends.silent import Hidden, Render, Reply, Request, RetryPolicy, quietly, silence, unwrap
from langchain_dpicl.exceptions import CapabilityError, ConfigurationError

INSTRUCTIONS = "The input is a text that stops where a label is missing. Which label comes next?"
"""The default question about every prompt."""

MOST_CHOICES = 255
"""Choices of one question, by the documentation of the API."""

_QUESTION = "label"
_PROBE_PROMPT = "Snow is white. Coal is black.\nColour of snow:"
_PROBE_CHOICES = ("black", "white")
_ADVICE = (
    "It takes an endpoint that answers POST /decisions with a probability for every choice: check base_url and the "
    "name of the model. Otherwise take a chat or completion model that reports logprobs, or the embedded model"
)


class DecisionsBackend:
    """Probabilities of whole choices, as a decision model gives them.

    Formal guarantees:
      - Row i is computed from prompt i, the choices and the instructions alone; its entries are logarithms of numbers
        in [0, 1] that sum to <= 1 (up to rounding).
      - A failed, refused or unreadable answer is -inf everywhere; the content of a prompt raises nothing.
      - No prompt and no answer reaches a LangChain callback, tracer, cache, debug output or exception.
      - The order in which choices are given moves no number: they are sent in alphabetical order.

    Args:
      llm: `OpenAIDecisions`, bound or not.
      instructions: what is asked about every prompt; public.
      max_concurrency: calls in flight at once; None: 32.
      retry: how long each row's call is waited for.

    Raises:
      CapabilityError: it is no decision model, or a probe with public text brings no probability for every choice.
      ModelCallError: the probe got no answer; an unreachable or busy server is asked twice, with a wait of at most 2
        seconds (the client's own retries and timeout come on top).
      UnsilencableModelError: see `silent.silence`.
      ConfigurationError: the instructions are empty, or a number is out of range.
    """

    def __init__(
        self,
        llm: Any,
        *,
        instructions: str = INSTRUCTIONS,
        max_concurrency: int | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        if not isinstance(instructions, str) or not instructions.strip():
            raise ConfigurationError(
                f"expected instructions as a text that says what to decide, found {instructions!r}"
            )
        self._model = silence(llm)
        if self._model.kind != "decisions":
            raise CapabilityError(
                f"expected a decision model such as OpenAIDecisions, found {type(unwrap(llm)[0]).__name__}; hand a "
                "chat or completion model to LangChainBackend (logprobs) or TextVoteBackend (text)"
            )
        self._is_core = any(base.__name__ == "BaseDecisionModel" for base in type(unwrap(llm)[0]).__mro__)
        self._instructions = instructions
        self._calls = Calls(self._model, retry or RetryPolicy(), limit_of(max_concurrency))
        self._probe()

    def __repr__(self) -> str:
        return f"DecisionsBackend({self.name!r}, instructions={self._instructions!r})"

    @property
    def name(self) -> str:
        """Public name of the model, for reports."""
        return self._model.name

    @property
    def kind(self) -> Literal["decisions"]:
        """How choices are scored, for reports."""
        return "decisions"

    @property
    def instructions(self) -> str:
        """What is asked about every prompt."""
        return self._instructions

    def score_choices(self, prompts: Sequence[str], choices: Sequence[str]) -> Rows:
        """Returns float64[prompts, choices]: log of each choice's probability; a failed row is -inf everywhere.

        Args:
          prompts: private or public; each is the input of one request.
          choices: public texts, 2 to 255; white space around them is not sent.

        Raises:
          ConfigurationError: the choices are too few, too many, empty or not distinct.
        """
        boxes = [Hidden(prompt) for prompt in prompts]
        del prompts  # from here on this frame holds boxes only
        names = distinct(choices)
        requests = [self._request(box, names) for box in boxes]
        return _stacked([_row(reply, names) for reply in self._calls.many(requests)], len(names))

    async def ascore_choices(self, prompts: Sequence[str], choices: Sequence[str]) -> Rows:
        """Async twin of `score_choices`; rows of one call run concurrently."""
        boxes = [Hidden(prompt) for prompt in prompts]
        del prompts
        names = distinct(choices)
        requests = [self._request(box, names) for box in boxes]
        return _stacked([_row(reply, names) for reply in await self._calls.amany(requests)], len(names))

    def score_public(self, prompt: str, choices: Sequence[str]) -> NDArray[np.float64]:
        """Returns float64[choices] for one PUBLIC prompt; -inf everywhere: the model answered, but gave no label.

        Raises:
          ModelCallError: the call failed.
          ConfigurationError: as in `score_choices`.
        """
        names = distinct(choices)
        reply = self._calls.one(self._request(Hidden(prompt), names, explain="kind"))
        return choice_row(answered(self.name, reply).reveal().decision, names)

    async def ascore_public(self, prompt: str, choices: Sequence[str]) -> NDArray[np.float64]:
        """Async twin of `score_public`."""
        names = distinct(choices)
        reply = await self._calls.aone(self._request(Hidden(prompt), names, explain="kind"))
        return choice_row(answered(self.name, reply).reveal().decision, names)

    def _request(
        self, prompt: Hidden[str], names: Sequence[str], *, explain: Literal["", "kind", "text"] = ""
    ) -> Request:
        return Request(prompt, _render(self._question(names)), {}, explain=explain)

    def _question(self, names: Sequence[str]) -> Any:
        listed: dict[str, None] = dict.fromkeys(sorted(names))
        if self._is_core:
            return importlib.import_module("langchain_core.decisions").Choice(
                instructions=self._instructions, criteria=listed
            )
        return importlib.import_module("langchain_openai.decisions").Choice(
            instructions=self._instructions, choices=listed
        )

    def _probe(self) -> None:
        """Learns with public text whether every choice gets a probability."""
        reply = self._calls.probe(self._request(Hidden(_PROBE_PROMPT), _PROBE_CHOICES, explain="text"))
        answer = probed(self.name, reply, asked="the probabilities of choices", advice=_ADVICE)
        row = choice_row(answer.reveal().decision, _PROBE_CHOICES)
        if not np.isfinite(row).all():
            raise CapabilityError(
                f"{self.name} answered a public probe without a probability for every choice. {_ADVICE}"
            )


def choice_row(response: object, names: Sequence[str]) -> NDArray[np.float64]:
    """Reads any response as float64[names]: logarithms of probabilities that sum to at most 1.

    Numbers beyond [0, 1] count as 0 or 1, and a sum above 1 is scaled down. Missing choices, refusals and anything but
    an answer to a choice question are -inf; further labels are ignored.
    """
    answers = getattr(response, "answers", None)
    answer = answers.get(_QUESTION) if isinstance(answers, Mapping) else None
    reported = getattr(answer, "probabilities", None)
    values = [_probability(reported.get(name)) if isinstance(reported, Mapping) else 0.0 for name in names]
    total = math.fsum(values)
    row = np.array(values) / max(1.0, total)
    return np.log(row, out=np.full(len(names), -np.inf), where=row > 0.0)


def distinct(choices: Sequence[str]) -> tuple[str, ...]:
    """Returns the choices without white space around them, or raises ConfigurationError."""
    is_list = not isinstance(choices, str) and all(isinstance(choice, str) for choice in choices)
    names = tuple(choice.strip() for choice in choices) if is_list else ()
    if not all(names) or len(set(names)) < len(names) or not 2 <= len(names) <= MOST_CHOICES:
        raise ConfigurationError(
            f"expected 2 to {MOST_CHOICES} choices that are distinct texts (white space around them does not count), "
            f"found {choices!r}"
        )
    return names


def _render(question: Any) -> Render:
    return lambda text: {"input": text, "questions": {_QUESTION: question}}


def _row(reply: Reply, names: Sequence[str]) -> NDArray[np.float64]:
    """Reads a private reply; an answer that raises when it is read abstains."""
    row = quietly(lambda: choice_row(None if reply.answer is None else reply.answer.reveal().decision, names))
    return np.full(len(names), -np.inf) if row is None else row


def _probability(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0.0
    return float(min(1.0, max(0.0, value)))  # NaN is no number above 0


def _stacked(rows: Sequence[NDArray[np.float64]], width: int) -> Rows:
    return np.array(rows, dtype=np.float64).reshape(len(rows), width)
