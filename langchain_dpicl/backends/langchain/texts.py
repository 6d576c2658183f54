"""Wraps a LangChain model that only writes text as an engine: completions, and a vote for the choice it names."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
from langchain_core.messages import BaseMessage, HumanMessage
from langchain_core.outputs import ChatGeneration
from numpy.typing import NDArray

from langchain_dpicl.backends.base import BlankAnswerError, Rows, check_whole, cut_at_stop
from langchain_dpicl.backends.private_calls.call import (
    CallPool,
    OpaqueValue,
    Render,
    Reply,
    Request,
    RetryPolicy,
    SilentEngine,
    output_of,
    read_silently,
    silence,
    unwrap,
)
from langchain_dpicl.backends.private_calls.public_calls import (
    PROBE_CHOICES,
    PROBE_PROMPT,
    THINKING_OFF,
    answer_or_raise,
    probe_answer_or_raise,
)
from langchain_dpicl.exceptions import CapabilityError, ConfigurationError

_MOST_CHARACTERS = 4096
_MOST_WORDS_BEFORE_A_COLON = 5
_DIRECTIONS = "\u061c\u200e\u200f\u202a\u202b\u202c\u2066\u2067\u2068\u2069"
"""Marks of left and right, which right-to-left texts carry; not overrides: these show other letters than there are."""
_WRAPPING = (
    " \t\"'`\u2018\u2019\u201a\u201c\u201d\u201e\u00ab\u00bb\u2039\u203a*_\u300c\u300d\u300e\u300f" + _DIRECTIONS
)
_OPENING = _WRAPPING + "<([{\u3008\u300a\u3010\u3014"
_CLOSING = _WRAPPING + ">)]}\u3009\u300b\u3011\u3015.,;:!?\u3002\u3001\u060c\u061b\u061f\u06d4\u0964"
_BULLETS = re.compile("[-+#>\u2022\u2013\u2014]+ ")
_JOINERS = "-.'\u2019/&@:,"
_FENCE = "```"


# An answer is private where its prompt is, so the rule may not raise: an answer that it cannot read names nothing, and
# its row abstains. The rule, in this order:
# 1. Case, width and white space do not count (NFKC and case folding). Look-alikes of another script are other letters.
# 2. The whole answer is a choice: that one.
# 3. Otherwise the first line with a letter or digit counts, without quotes, brackets, Markdown and marks of direction
# around it, without a mark at its end, and without up to five words and a colon in front ("The label is: **card**").
# 4. If the rest is a choice, or what is left of just one choice without such marks: that one.
# 5. If it begins with a choice as a whole word ("card, as it was declined") and the line names no other: that one; also
# with wrapping in front, which may be the choice's own.
# Where one choice begins another ("card", "card payment") the longer one is meant.
# 6. If it is the beginning of exactly one choice, by whole words ("cash" for "cash machine"): that one.
# 7. Otherwise it names none.
class ChoiceNames:
    """The choices as an answer may name them.

    Formal guarantees:
      - `named` returns a place among the choices or None, for every object; it raises nothing.

    Args:
      choices: public texts; white space around them does not count.

    Raises:
      ConfigurationError: there is no choice, one is empty, or two differ in case, width or white space only.

    >>> names = ChoiceNames(["card", "card payment", "cash"])
    >>> [names.named(text) for text in ("Card.", "**Queue:** card payment", "card or cash", "I cannot tell")]
    [0, 1, None, None]
    """

    def __init__(self, choices: Sequence[str]) -> None:
        is_list = not isinstance(choices, str) and all(isinstance(choice, str) for choice in choices)
        self._choices = tuple(_plain(choice) for choice in choices) if is_list else ()
        if not self._choices or not all(self._choices) or len(set(self._choices)) < len(self._choices):
            raise ConfigurationError(
                f"expected choices that differ in more than case, width and white space, found {choices!r}; give "
                "other verbalizers"
            )
        self._place = {choice: place for place, choice in enumerate(self._choices)}
        peeled = [_peel(choice) for choice in self._choices]
        self._peeled = {text: place for place, text in enumerate(peeled) if text and peeled.count(text) == 1}
        longest_first = sorted(self._choices, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)))

    def named(self, answer: object) -> int | None:
        """Returns the place of the choice that the answer names, or None."""
        if not isinstance(answer, str):
            return None
        lines = [line for line in answer[:_MOST_CHARACTERS].splitlines() if line.strip()]
        if (place := self._place.get(_plain(" ".join(lines)))) is not None:
            return place
        return self._in_line(_first_line(lines))

    def _in_line(self, line: str) -> int | None:
        forms = tuple(self._forms(line))
        for form in forms:
            if (place := self._place.get(form, self._peeled.get(form))) is not None:
                return place
        named = {place for _, place in self._found(line)}
        for form in forms:
            first = next(self._found(form), None)
            if first is not None and not _peel_front(form[: first[0]]) and named <= {first[1]}:
                return first[1]
        return self._starting_with(forms[-1]) if not named else None

    def _forms(self, line: str) -> Iterator[str]:
        """Yields the line, and the text behind a short beginning with a colon, each with its wrapping and without."""
        yield line
        peeled = _peel(line)
        yield peeled
        if ":" not in peeled:
            return
        before, _, after = line.lstrip(_OPENING).partition(":")
        is_short = len(_peel(before).split()) <= _MOST_WORDS_BEFORE_A_COLON
        if is_short and _peel(before) not in self._place and not any(self._found(before)):
            yield after  # choices may begin or end with marks of the wrapping
            yield _peel(after)

    def _found(self, line: str) -> Iterator[tuple[int, int]]:
        """Yields (start, place) of the choices in a line, as whole words, the longer one where one begins another."""
        at = 0
        while (match := self._pattern.search(line, at)) is not None:
            start, end = match.span()
            is_whole = _is_edge(line[max(0, start - 2) : start][::-1]) and _is_edge(line[end : end + 2])
            if is_whole:
                yield start, self._place[match[0]]
            at = end if is_whole else start + 1

    def _starting_with(self, text: str) -> int | None:
        begun = [
            place
            for place, choice in enumerate(self._choices)
            if choice.startswith(text) and _is_edge(choice[len(text) : len(text) + 2])
        ]
        return begun[0] if text and len(begun) == 1 else None


def _plain(text: str) -> str:
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return " ".join(folded.split())


def _first_line(lines: Sequence[str]) -> str:
    """Returns the first line with a letter or digit, joined with the next one where it ends in a colon."""
    plain = [_plain(line) for line in lines if not line.lstrip().startswith(_FENCE)]
    speaking = [line for line in plain if any(map(str.isalnum, line))]
    if len(speaking) > 1 and speaking[0].rstrip(_WRAPPING).endswith(":"):
        return f"{speaking[0]} {speaking[1]}"
    return speaking[0] if speaking else ""


def _peel(line: str) -> str:
    """Returns a line without quotes, brackets and bullets around it; a sign before a number stays."""
    return _peel_front(line).rstrip(_CLOSING)


def _peel_front(line: str) -> str:
    text = line.lstrip(_OPENING)
    while (bullet := _BULLETS.match(text)) is not None:
        text = text[bullet.end() :].lstrip(_OPENING)
    return text


def _is_edge(following: str) -> bool:
    """Whether a word ends at these (up to two) next characters; "4.5", "card-holder" and "C++" go on."""
    if not following or _is_word(following[0]):
        return not following
    return not (following[0] in _JOINERS and len(following) > 1 and _is_word(following[1]))


def _is_word(character: str) -> bool:
    """Whether a character belongs to a word; invisible and unassigned ones too, as they may hide anything."""
    category = unicodedata.category(character)
    return character in "_+#%" or category[0] in "LNM" or category in {"Cf", "Cn", "Co", "Cs"}


GREEDY: Mapping[str, Any] = {"temperature": 0.0}
"""Default options of a completion: the likeliest text."""

_MOST_STOPS_SENT = 4  # OpenAI's endpoint rejects more


def requests_for(
    prompts: Sequence[OpaqueValue[str]],
    *,
    is_chat: bool,
    max_tokens: int,
    stop: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
    explain: Literal["", "kind", "text"] = "",
) -> list[Request]:
    """Returns one request per prompt; `options` override the defaults, and None removes one.

    Stop strings are sent to completion models only, four at most: some chat servers reject them. `text_of` cuts at
    them in any case.
    """
    sent = {"stop": list(stop)[:_MOST_STOPS_SENT]} if stop and not is_chat else {}
    asked = {**GREEDY, "max_tokens": check_whole("max_tokens", max_tokens), **sent, **(options or {})}
    arguments = {name: value for name, value in asked.items() if value is not None}
    render: Render = (lambda text: [HumanMessage(text)]) if is_chat else (lambda text: text)
    return [Request(prompt, render, arguments, explain=explain) for prompt in prompts]


def text_of(reply: Reply, stop: Sequence[str] = ()) -> str:
    """Returns the answer's text before the first stop string; "" if it failed, was refused or was filtered."""
    if reply.answer is None or reply.answer.reveal().refused:
        return ""
    if _is_no_answer(reply.answer.reveal().finish_reason) or not isinstance(reply.answer.reveal().text, str):
        return ""
    return cut_at_stop(reply.answer.reveal().text[:], stop)  # of a text of another class, a plain one


# Up to the last mark that ends a thought, and all behind one that none ends; a chat template may write the first mark.
_THOUGHTS = re.compile(
    r"(?:.*(?:</think>|</thinking>|</thoughts?>|\[/THINK\]|<\|channel\|>final<\|message\|>))?"
    r"(?:\s*(?:<think(?:ing)?>|<thoughts?>|\[THINK\]|<\|channel\|>).*)?",
    re.DOTALL,
)


def end_of_thoughts(text: str) -> int:
    """Returns where the thoughts before an answer end, as models write them; 0: there are none.

    >>> [end_of_thoughts(text) for text in ("card", "<think>no</think>card", "<think>no")]
    [0, 17, 9]
    """
    thoughts = _THOUGHTS.match(text)
    return thoughts.end() if thoughts else 0


def _answer_of(reply: Reply, stop: Sequence[str] = (), *, is_chat: bool = True) -> str:
    """Is `text_of` without thoughts before the answer; "" if there is nothing else.

    White space behind thoughts, or that a chat model begins with, is no text; see `cut_at_stop`.
    """
    text = text_of(reply)
    answer = text[end_of_thoughts(text) :]
    return cut_at_stop(answer, stop, is_stripped=answer != text or (is_chat and bool(stop)))


def is_refusal(message: BaseMessage) -> bool:
    """Returns whether a PUBLIC message would count as a failure if it answered a private prompt."""
    about = message.response_metadata
    output = output_of(ChatGeneration(message=message, generation_info=about), about)
    return output.refused or _is_no_answer(output.finish_reason)


def stops_of(stop: Sequence[str]) -> tuple[str, ...]:
    """Returns the stop strings; raises ConfigurationError unless each is a non-empty text."""
    if isinstance(stop, str) or not all(isinstance(text, str) and text for text in stop):
        raise ConfigurationError(f"expected stop as a list of strings that are not empty, found {stop!r}")
    return tuple(stop)


class TextEngine(SilentEngine):
    """Base of engines whose LangChain model writes texts."""

    _text_options: Mapping[str, Any]

    def complete(self, prompts: Sequence[str], *, max_tokens: int, stop: Sequence[str] = ()) -> list[str]:
        """Returns one completion per prompt, cut before the first stop string; "" where the call failed."""
        boxes = [OpaqueValue(prompt) for prompt in prompts]
        del prompts  # from here on this frame holds boxes only
        return self._texts(self._calls.many(self._text_requests(boxes, max_tokens, stop)), stop)

    async def acomplete(self, prompts: Sequence[str], *, max_tokens: int, stop: Sequence[str] = ()) -> list[str]:
        """Async twin of `complete`."""
        boxes = [OpaqueValue(prompt) for prompt in prompts]
        del prompts
        return self._texts(await self._calls.amany(self._text_requests(boxes, max_tokens, stop)), stop)

    def complete_public(self, prompt: str, *, max_tokens: int, stop: Sequence[str] = ()) -> str:
        """Returns the completion of one PUBLIC prompt, asked as private ones are.

        Args:
          prompt: public.
          max_tokens: most tokens of the completion.
          stop: texts that end it.

        Raises:
          ModelCallError: the call failed, or its answer was refused, calls a tool, or ended before its text began.
        """
        asked = self._text_requests([OpaqueValue(prompt)], max_tokens, stop, explain="kind")
        [reply] = self._calls.many(asked)  # in the threads of private calls
        return self._public_text(reply, stop)

    async def acomplete_public(self, prompt: str, *, max_tokens: int, stop: Sequence[str] = ()) -> str:
        """Async twin of `complete_public`."""
        asked = self._text_requests([OpaqueValue(prompt)], max_tokens, stop, explain="kind")
        [reply] = await self._calls.amany(asked)
        return self._public_text(reply, stop)

    def _public_text(self, reply: Reply, stop: Sequence[str]) -> str:
        output = answer_or_raise(self.name, reply).reveal()
        # A chat model is sent no stop string, so that nothing but a fault leaves it without text.
        is_fault = self._model.is_chat or not stop or _is_no_answer(output.finish_reason)
        text = _answer_of(reply, stop, is_chat=self._model.is_chat)
        if is_fault and not text.strip():
            raise BlankAnswerError(
                f"a public call to {self.name}, asked as private ones are, brought no text that counts. {_ROOM}; if it "
                "refused or called a tool, hand it in without tools, or ask something else"
            )
        return text

    def _texts(self, replies: Sequence[Reply], stop: Sequence[str]) -> list[str]:
        read = partial(_answer_of, stop=stop, is_chat=self._model.is_chat)
        return [read_silently(partial(read, reply)) or "" for reply in replies]

    def _text_requests(
        self,
        boxes: Sequence[OpaqueValue[str]],
        max_tokens: int,
        stop: Sequence[str],
        *,
        explain: Literal["", "kind"] = "",
    ) -> list[Request]:
        how: dict[str, Any] = {"stop": stops_of(stop), "options": self._text_options, "explain": explain}
        return requests_for(boxes, is_chat=self._model.is_chat, max_tokens=max_tokens, **how)


INSTRUCTIONS = "Complete the text below with exactly one of these labels, and write nothing else:"
"""Default text before the list of choices."""

_MORE_THAN_A_LABEL = 16  # quotes, a full stop, "The answer is: "
_REJECTED = (
    "Its own options go into TextVoteBackend(llm, options={...}), where None leaves out one of ours (such as "
    "max_tokens); or take another model"
)
_ROOM = (
    "If it thinks before it answers, give it more room (TextVoteBackend(llm, options={'max_tokens': ...}), or "
    f"text_options= of a LangChainBackend), or {THINKING_OFF}"
)
FINISHED = frozenset({"stop", "eos", "eos_token", "end_turn"})
"""How providers say that the model ended the text by itself."""
_NO_ANSWER = frozenset(
    {
        *("content_filter", "refusal", "tool_calls", "tool_use", "function_call"),  # OpenAI, Anthropic
        *("safety", "recitation", "blocklist", "prohibited_content", "spii", "language"),  # Gemini
        *("malformed_function_call", "guardrail_intervened", "content_filtered"),  # Gemini, Bedrock
    }
)


class TextVoteBackend(TextEngine):
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
      UnsilencableModelError: see `silence`.
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
        self._max_tokens = None if max_tokens is None else check_whole("max_tokens", max_tokens)
        self._text_options: dict[str, Any] = {**GREEDY, **(options or {})}
        self._calls = CallPool(self._model, retry or RetryPolicy(), max_concurrency)
        self._probe(may_drop="temperature" not in (options or {}))

    def __repr__(self) -> str:
        options = self._text_options.items()
        sent = sorted(name for name, value in options if value is not None)  # values may be credentials
        return f"TextVoteBackend({self.name!r}, instructions={self._instructions!r}, options={sent})"

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
        return dict(self._text_options)

    def score_choices(self, prompts: Sequence[str], choices: Sequence[str]) -> Rows:
        """Returns float64[prompts, choices]: 0 where the answer names the choice, -inf elsewhere.

        Args:
          prompts: private or public; each is one call.
          choices: public texts; white space around them is not sent.

        Raises:
          ConfigurationError: two choices differ in case, width or white space only, or one is empty.
        """
        boxes = [OpaqueValue(prompt) for prompt in prompts]
        del prompts  # from here on this frame holds boxes only
        return self._rows(boxes, choices)[:, :-1]

    async def ascore_choices(self, prompts: Sequence[str], choices: Sequence[str]) -> Rows:
        """Async twin of `score_choices`; rows of one call run concurrently."""
        boxes = [OpaqueValue(prompt) for prompt in prompts]
        del prompts
        return (await self._arows(boxes, choices))[:, :-1]

    def score_with_other(self, prompts: Sequence[str], choices: Sequence[str]) -> Rows:
        """Returns float64[prompts, choices + 1]: `score_choices`, and last 0 where an answer names no choice.

        Only a row that failed is -inf everywhere; arguments and errors as in `score_choices`.
        """
        boxes = [OpaqueValue(prompt) for prompt in prompts]
        del prompts
        return self._rows(boxes, choices)

    async def ascore_with_other(self, prompts: Sequence[str], choices: Sequence[str]) -> Rows:
        """Async twin of `score_with_other`."""
        boxes = [OpaqueValue(prompt) for prompt in prompts]
        del prompts
        return await self._arows(boxes, choices)

    def score_public(self, prompt: str, choices: Sequence[str]) -> NDArray[np.float64]:
        """Returns float64[choices] for one PUBLIC prompt; -inf everywhere: the answer names no choice.

        Raises:
          ModelCallError: the call failed, or its answer ended before its text began.
          ConfigurationError: as in `score_choices`.
        """
        names = ChoiceNames(choices)
        [request] = self._requests([OpaqueValue(prompt)], choices, explain="kind")
        return self._public_vote(self._calls.one(request), names, len(choices))

    async def ascore_public(self, prompt: str, choices: Sequence[str]) -> NDArray[np.float64]:
        """Async twin of `score_public`."""
        names = ChoiceNames(choices)
        [request] = self._requests([OpaqueValue(prompt)], choices, explain="kind")
        return self._public_vote(await self._calls.aone(request), names, len(choices))

    def _public_vote(self, reply: Reply, names: ChoiceNames, other: int) -> NDArray[np.float64]:
        """Returns the vote of a public answer; a refusal names no choice, and without room for text none ever does."""
        output = answer_or_raise(self.name, reply).reveal()
        reason = output.finish_reason
        if not output.refused and str(reason).lower() not in FINISHED and not _is_no_answer(reason):
            self._public_text(reply, ())
        return _vote(_place(reply, names, other=other), other + 1)[:-1]

    def _rows(self, boxes: Sequence[OpaqueValue[str]], choices: Sequence[str]) -> Rows:
        names = ChoiceNames(choices)
        return _votes(self._calls.many(self._requests(boxes, choices)), names, len(choices))

    async def _arows(self, boxes: Sequence[OpaqueValue[str]], choices: Sequence[str]) -> Rows:
        names = ChoiceNames(choices)
        return _votes(await self._calls.amany(self._requests(boxes, choices)), names, len(choices))

    def _requests(
        self, prompts: Sequence[OpaqueValue[str]], choices: Sequence[str], *, explain: Literal["", "kind", "text"] = ""
    ) -> list[Request]:
        names = sorted(choice.strip() for choice in choices)
        head = "\n".join([self._instructions, *(f"- {name}" for name in names), "", ""]) if self._instructions else ""
        longest = max(len(name.encode("utf-8", "replace")) for name in names)
        return requests_for(
            [OpaqueValue(head + prompt.reveal()) for prompt in prompts],
            is_chat=self._model.is_chat,
            max_tokens=self._max_tokens or longest + _MORE_THAN_A_LABEL,
            options=self._text_options,
            explain=explain,
        )

    def _probe(self, *, may_drop: bool) -> None:
        """Learns with public text whether the model answers with text, and whether it takes a temperature."""
        reply = self._ask_probe()
        if reply.fault == "content" and may_drop:
            reply = self._ask_without_temperature()
        probe_answer_or_raise(self.name, reply, asked="a short text", advice=_REJECTED)
        if not _answer_of(reply).strip():
            raise CapabilityError(
                f"{self.name} answered a public probe without text. {_ROOM}; otherwise take another model"
            )

    def _ask_without_temperature(self) -> Reply:
        """Probes without the temperature, and leaves it out if a second call with it fails: a failure may pass."""
        with_it, without = self._text_options, {**self._text_options, "temperature": None}
        self._text_options = without
        reply = self._ask_probe()
        if reply.answer is None:
            return reply
        self._text_options = with_it
        again = self._ask_probe()
        if again.fault != "content":
            return again
        self._text_options = without
        return reply

    def _ask_probe(self) -> Reply:
        return self._calls.probe(self._requests([OpaqueValue(PROBE_PROMPT)], PROBE_CHOICES, explain="text")[0])


def _place(reply: Reply, names: ChoiceNames, *, other: int) -> int | None:
    """Returns the place of the named choice, `other` if no choice is named, None without an answer."""
    if reply.answer is None:
        return None
    place = names.named(_answer_of(reply))
    return other if place is None else place


def _is_no_answer(finish_reason: object) -> bool:
    """Returns whether an answer that ended so is a refusal, or no text at all, by any provider's name for it."""
    return isinstance(finish_reason, str) and finish_reason.lower() in _NO_ANSWER


def _votes(replies: Sequence[Reply], names: ChoiceNames, other: int) -> Rows:
    """Reads private replies as float64[replies, other + 1]; an answer that raises when it is read abstains."""
    places = [read_silently(partial(_place, reply, names, other=other)) for reply in replies]
    return np.array([_vote(place, other + 1) for place in places], dtype=np.float64).reshape(len(places), other + 1)


def _vote(place: int | None, width: int) -> NDArray[np.float64]:
    row: NDArray[np.float64] = np.full(width, -np.inf)
    if place is not None:
        row[place] = 0.0
    return row
