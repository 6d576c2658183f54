"""Wraps a LangChain model that only writes text as an engine: completions, and one-hot votes for choices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.backends._completion import GREEDY, acomplete, complete, requests_for, text_of
from langchain_dpicl.backends._public import answered, probed
from langchain_dpicl.backends.answers import Names
from langchain_dpicl.backends.base import Rows
from langchain_dpicl.backends.calls import Calls, limit_of, whole
from langchain_dpicl.backends.silent import Hidden, Reply, Request, RetryPolicy, quietly, silence, unwrap
from langchain_dpicl.exceptions import CapabilityError, ConfigurationError

INSTRUCTIONS = "Complete the text below with exactly one of these labels, and write nothing else:"
"""Default text before the list of choices."""

_MORE_THAN_A_LABEL = 16  # quotes, a full stop, "The answer is: "
_PROBE_PROMPT = "Snow is white. Coal is black.\nColour of snow:"
_PROBE_CHOICES = ("black", "white")
_REJECTED = (
    "Its own options go into TextVoteBackend(llm, options={...}), where None leaves out one of ours (such as "
    "max_tokens); or take another model"
)
_SILENT = (
    "If it thinks before it answers, give it room with TextVoteBackend(llm, max_tokens=...), or switch the thinking "
    "off; otherwise take another model"
)
_NO_ANSWER = frozenset({"content_filter", "refusal", "safety", "tool_calls", "tool_use", "function_call"})


class TextVoteBackend:
    """Votes of a model that only writes text: log-likelihood 0 for the choice it names, -inf for all others.

    Formal guarantees:
      - Row i is computed from prompt i, the choices and public settings alone; at most one entry is 0, others -inf.
      - A failed, refused, filtered or unclear answer is -inf everywhere ("" as a completion); the content of a prompt
        raises nothing.
      - No prompt and no answer reaches a LangChain callback, tracer, cache, debug output or exception.
      - The order in which choices are given moves no vote: they are sent in alphabetical order.

    Args:
      llm: a chat or completion model, bound or not; bound arguments are sent with every call, but for the temperature
        and the most tokens, which are ours.
      instructions: stands above the list of choices and the prompt; public. "": the prompt is sent alone.
      max_tokens: most tokens of an answer; None: enough for the longest choice, counted in UTF-8 bytes.
      options: further arguments of every call; they go before temperature 0 and `max_tokens`, and None leaves one out.
      max_concurrency: calls in flight at once; None: 32.
      retry: how long each row's call is waited for.

    Raises:
      CapabilityError: a probe with public text is rejected (with and without temperature) or brings no text.
      ModelCallError: the probe got no answer; an unreachable or busy server is asked twice, with a wait of at most 2
        seconds (the client's own retries and timeout come on top).
      UnsilencableModelError: see `silent.silence`.
      ConfigurationError: a number is out of range.

    >>> from langchain_core.language_models import FakeListChatModel
    >>> TextVoteBackend(FakeListChatModel(responses=["Red."])).score_choices(["A rose is"], ["red", "blue"]).tolist()
    [[0.0, -inf]]
    """

    def __init__(
        self,
        llm: Any,
        *,
        instructions: str = INSTRUCTIONS,
        max_tokens: int | None = None,
        options: Mapping[str, Any] | None = None,
        max_concurrency: int | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        if not isinstance(instructions, str):
            raise ConfigurationError(f"expected instructions as a text, found {type(instructions).__name__}")
        self._model = silence(llm)
        if self._model.kind == "decisions":
            raise CapabilityError(
                f"expected a chat or completion model, found {type(unwrap(llm)[0]).__name__}; hand it to "
                "DecisionsBackend, which has a probability for every choice"
            )
        self._instructions = instructions
        self._max_tokens = None if max_tokens is None else whole("max_tokens", max_tokens)
        self._options = {**GREEDY, **(options or {})}
        self._calls = Calls(self._model, retry or RetryPolicy(), limit_of(max_concurrency))
        self._probe(may_drop="temperature" not in (options or {}))

    def __repr__(self) -> str:
        sent = sorted(name for name, value in self._options.items() if value is not None)  # values may be credentials
        return f"TextVoteBackend({self.name!r}, instructions={self._instructions!r}, options={sent})"

    @property
    def name(self) -> str:
        """Public name of the model, for reports."""
        return self._model.name

    @property
    def kind(self) -> Literal["text votes"]:
        """How choices are scored, for reports."""
        return "text votes"

    @property
    def instructions(self) -> str:
        """What stands above the list of choices and the prompt."""
        return self._instructions

    @property
    def options(self) -> Mapping[str, Any]:
        """What every call asks for; without the temperature where the model rejects it."""
        return dict(self._options)

    def score_choices(self, prompts: Sequence[str], choices: Sequence[str]) -> Rows:
        """Returns float64[prompts, choices]: 0 where the answer names the choice, -inf elsewhere.

        Args:
          prompts: private or public; each is one call.
          choices: public texts; white space around them is not sent.

        Raises:
          ConfigurationError: two choices differ in case, width or white space only, or one is empty.
        """
        boxes = [Hidden(prompt) for prompt in prompts]
        del prompts  # from here on this frame holds boxes only
        return self._rows(boxes, choices)[:, :-1]

    async def ascore_choices(self, prompts: Sequence[str], choices: Sequence[str]) -> Rows:
        """Async twin of `score_choices`; rows of one call run concurrently."""
        boxes = [Hidden(prompt) for prompt in prompts]
        del prompts
        return (await self._arows(boxes, choices))[:, :-1]

    def score_with_other(self, prompts: Sequence[str], choices: Sequence[str]) -> Rows:
        """Returns float64[prompts, choices + 1]: `score_choices`, and last 0 where an answer names no choice.

        Only a row that failed is -inf everywhere; arguments and errors as in `score_choices`.
        """
        boxes = [Hidden(prompt) for prompt in prompts]
        del prompts
        return self._rows(boxes, choices)

    async def ascore_with_other(self, prompts: Sequence[str], choices: Sequence[str]) -> Rows:
        """Async twin of `score_with_other`."""
        boxes = [Hidden(prompt) for prompt in prompts]
        del prompts
        return await self._arows(boxes, choices)

    def score_public(self, prompt: str, choices: Sequence[str]) -> NDArray[np.float64]:
        """Returns float64[choices] for one PUBLIC prompt; -inf everywhere: the answer names no choice.

        Raises:
          ModelCallError: the call failed.
          ConfigurationError: as in `score_choices`.
        """
        names = Names(choices)
        reply = self._calls.one(self._requests([Hidden(prompt)], choices, explain="kind")[0])
        answered(self.name, reply)
        return _vote(_place(reply, names, other=len(choices)), len(choices) + 1)[:-1]

    async def ascore_public(self, prompt: str, choices: Sequence[str]) -> NDArray[np.float64]:
        """Async twin of `score_public`."""
        names = Names(choices)
        reply = await self._calls.aone(self._requests([Hidden(prompt)], choices, explain="kind")[0])
        answered(self.name, reply)
        return _vote(_place(reply, names, other=len(choices)), len(choices) + 1)[:-1]

    def complete(self, prompts: Sequence[str], *, max_tokens: int, stop: Sequence[str] = ()) -> list[str]:
        """Returns one completion per prompt, cut before the first stop string; "" where the call failed."""
        boxes = [Hidden(prompt) for prompt in prompts]
        del prompts
        return complete(self._calls, boxes, max_tokens=max_tokens, stop=stop, options=self._options)

    async def acomplete(self, prompts: Sequence[str], *, max_tokens: int, stop: Sequence[str] = ()) -> list[str]:
        """Async twin of `complete`."""
        boxes = [Hidden(prompt) for prompt in prompts]
        del prompts
        return await acomplete(self._calls, boxes, max_tokens=max_tokens, stop=stop, options=self._options)

    def _rows(self, boxes: Sequence[Hidden[str]], choices: Sequence[str]) -> Rows:
        names = Names(choices)
        return _votes(self._calls.many(self._requests(boxes, choices)), names, len(choices))

    async def _arows(self, boxes: Sequence[Hidden[str]], choices: Sequence[str]) -> Rows:
        names = Names(choices)
        return _votes(await self._calls.amany(self._requests(boxes, choices)), names, len(choices))

    def _requests(
        self, prompts: Sequence[Hidden[str]], choices: Sequence[str], *, explain: Literal["", "kind", "text"] = ""
    ) -> list[Request]:
        names = sorted(choice.strip() for choice in choices)
        head = "\n".join([self._instructions, *(f"- {name}" for name in names), "", ""]) if self._instructions else ""
        longest = max(len(name.encode("utf-8", "replace")) for name in names)
        return requests_for(
            [Hidden(head + prompt.reveal()) for prompt in prompts],
            is_chat=self._model.is_chat,
            max_tokens=self._max_tokens or longest + _MORE_THAN_A_LABEL,
            options=self._options,
            explain=explain,
        )

    def _probe(self, *, may_drop: bool) -> None:
        """Learns with public text whether the model answers with text, and whether it takes a temperature."""
        reply = self._ask_probe()
        if reply.fault == "content" and may_drop:
            self._options["temperature"] = None
            reply = self._ask_probe()
        answer = probed(self.name, reply, asked="a short text", advice=_REJECTED)
        if not text_of(reply).strip() or _is_no_answer(answer.reveal().finish_reason):
            raise CapabilityError(f"{self.name} answered a public probe without text. {_SILENT}")

    def _ask_probe(self) -> Reply:
        return self._calls.probe(self._requests([Hidden(_PROBE_PROMPT)], _PROBE_CHOICES, explain="text")[0])


def _place(reply: Reply, names: Names, *, other: int) -> int | None:
    """Returns the place of the named choice, `other` if no choice is named, None without an answer."""
    if reply.answer is None:
        return None
    place = None if _is_no_answer(reply.answer.reveal().finish_reason) else names.named(text_of(reply))
    return other if place is None else place


def _is_no_answer(finish_reason: object) -> bool:
    return isinstance(finish_reason, str) and finish_reason.lower() in _NO_ANSWER


def _votes(replies: Sequence[Reply], names: Names, other: int) -> Rows:
    """Reads private replies as float64[replies, other + 1]; an answer that raises when it is read abstains."""
    places = [quietly(partial(_place, reply, names, other=other)) for reply in replies]
    return np.array([_vote(place, other + 1) for place in places], dtype=np.float64).reshape(len(places), other + 1)


def _vote(place: int | None, width: int) -> NDArray[np.float64]:
    row: NDArray[np.float64] = np.full(width, -np.inf)
    if place is not None:
        row[place] = 0.0
    return row
