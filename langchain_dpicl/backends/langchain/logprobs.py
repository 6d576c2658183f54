"""Asks LangChain models for next tokens, and learns with public text whether and how they report log-probabilities."""

from __future__ import annotations

import dataclasses
import importlib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from numpy.typing import NDArray
from pydantic import BaseModel

from langchain_dpicl.backends.base import Rows, Token
from langchain_dpicl.backends.langchain.texts import FINISHED, end_of_thoughts
from langchain_dpicl.backends.private_calls.call import (
    CallPool,
    ModelOutput,
    OpaqueValue,
    Render,
    Reply,
    Request,
    RetryPolicy,
    SilentEngine,
    read_silently,
    silence,
    unwrap,
)
from langchain_dpicl.backends.private_calls.public_calls import (
    ONE_HOT,
    PROBE_CHOICES,
    PROBE_PROMPT,
    TAKE_ANOTHER,
    THINKING_OFF,
    VOTES,
    advice,
    advice_elsewhere,
    answer_or_raise,
    probe_answer_or_raise,
    whole_vocabulary,
)
from langchain_dpicl.exceptions import CapabilityError, ConfigurationError

INSTRUCTIONS = "The input is a text that stops where a label is missing. Which label comes next?"
"""The default question about every prompt."""

MOST_CHOICES = 255
"""Choices of one question, by the documentation of the API."""

_QUESTION = "label"
_ADVICE = (
    "It takes an endpoint that answers POST /decisions with a probability for every choice: check base_url and the "
    "name of the model. Otherwise take a chat or completion model that reports logprobs, or the embedded model"
)


class DecisionsBackend(SilentEngine):
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
      UnsilencableModelError: see `silence`.
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
        self._calls = CallPool(self._model, retry or RetryPolicy(), max_concurrency)
        self._probe()

    def __repr__(self) -> str:
        return f"DecisionsBackend({self.name!r}, instructions={self._instructions!r})"

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
        boxes = [OpaqueValue(prompt) for prompt in prompts]
        del prompts  # from here on this frame holds boxes only
        names = check_distinct_choices(choices)
        requests = [self._request(box, names) for box in boxes]
        return _stack_rows([_row(reply, names) for reply in self._calls.many(requests)], len(names))

    async def ascore_choices(self, prompts: Sequence[str], choices: Sequence[str]) -> Rows:
        """Async twin of `score_choices`; rows of one call run concurrently."""
        boxes = [OpaqueValue(prompt) for prompt in prompts]
        del prompts
        names = check_distinct_choices(choices)
        requests = [self._request(box, names) for box in boxes]
        return _stack_rows([_row(reply, names) for reply in await self._calls.amany(requests)], len(names))

    def score_public(self, prompt: str, choices: Sequence[str]) -> NDArray[np.float64]:
        """Returns float64[choices] for one PUBLIC prompt; -inf everywhere: the model answered, but gave no label.

        Raises:
          ModelCallError: the call failed.
          ConfigurationError: as in `score_choices`.
        """
        names = check_distinct_choices(choices)
        reply = self._calls.one(self._request(OpaqueValue(prompt), names, explain="kind"))
        return choice_row(answer_or_raise(self.name, reply).reveal().decision, names)

    async def ascore_public(self, prompt: str, choices: Sequence[str]) -> NDArray[np.float64]:
        """Async twin of `score_public`."""
        names = check_distinct_choices(choices)
        reply = await self._calls.aone(self._request(OpaqueValue(prompt), names, explain="kind"))
        return choice_row(answer_or_raise(self.name, reply).reveal().decision, names)

    def _request(
        self, prompt: OpaqueValue[str], names: Sequence[str], *, explain: Literal["", "kind", "text"] = ""
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
        reply = self._calls.probe(self._request(OpaqueValue(PROBE_PROMPT), PROBE_CHOICES, explain="text"))
        answer = probe_answer_or_raise(self.name, reply, asked="the probabilities of choices", advice=_ADVICE)
        row = choice_row(answer.reveal().decision, PROBE_CHOICES)
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


def check_distinct_choices(choices: Sequence[str]) -> tuple[str, ...]:
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
    row = read_silently(lambda: choice_row(None if reply.answer is None else reply.answer.reveal().decision, names))
    return np.full(len(names), -np.inf) if row is None else row


def _probability(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0.0
    return float(min(1.0, max(0.0, value)))  # NaN is no number above 0


def _stack_rows(rows: Sequence[NDArray[np.float64]], width: int) -> Rows:
    return np.array(rows, dtype=np.float64).reshape(len(rows), width)


# No payload may raise: else a payload could make its row end differently from others.
Probabilities: TypeAlias = dict[bytes, float]
"""Next-token probabilities by token bytes, which may be a part of a character or `LOST`: values in [0, 1], sum <= 1."""

Entry: TypeAlias = tuple[object, object]
"""A reported token, as a provider writes it, and its logprob."""

Spell: TypeAlias = Callable[[int], bytes | None]
"""Turns a token id into bytes; None for an unknown id. Must not raise."""

EOS = b""
"""The end of the text. A token without bytes ends it too."""

LOST = "\ufffd".encode()
"""The key of all tokens that are parts of characters and whose bytes the provider lost."""

EOS_TEXTS = frozenset(
    {
        *("</s>", "<eos>", "<|eos|>", "<EOS_TOKEN>", "[EOS]", "<seed:eos>"),
        *("<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|end|>", "<|return|>", "<|role_end|>", "<|separator|>"),
        *("<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>", "<|EOT|>"),  # Llama, Jamba, DeepSeek Coder
        *("<end_of_turn>", "<turn|>", "<|end_of_turn|>", "<|endofturn|>", "[|endofturn|]", "<|END_OF_TURN_TOKEN|>"),
        *("<|user|>", "<|observation|>"),  # GLM ends by whose turn is next
        *("<|assistant_end|>", "<|end_of_sentence|>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~["),
    }
)
"""How providers spell the end of a text; all of them become `EOS`."""

MAX_ENTRIES = 300_000
"""Entries read of one position; above the largest vocabulary in use."""

_MAX_TOKEN_BYTES = 4096
_ROUNDING = 1e-3  # providers round logprobs of sure tokens to slightly above 0
_UNREADABLE = re.compile(r"\ufffd|^bytes:\\x")  # placeholders for bytes outside the text
_BY_ID = re.compile(r"token_id:([0-9]{1,10})")  # vLLM's way, with `return_tokens_as_token_ids`


def next_token(
    payload: object,
    *,
    text: object = None,
    finish_reason: object = None,
    eos_texts: Iterable[str] = EOS_TEXTS,
    spell: Spell | None = None,
) -> Probabilities:
    """Returns the probabilities of an answer's first token, or certainty of the end if it ended at once."""
    try:
        if finish_reason == "content_filter":
            return {}
        entries = first_position(payload)
        ended = not entries and isinstance(finish_reason, str) and finish_reason in FINISHED and text == ""
        return {EOS: 1.0} if ended else probabilities(entries, eos_texts=eos_texts, spell=spell)
    except Exception:  # noqa: BLE001  objects of foreign classes may raise at any touch; such an answer is unreadable
        return {}


def first_position(payload: object, *, most: int = MAX_ENTRIES) -> list[Entry]:
    """Returns at most `most` entries reported for the first generated token; empty if unreadable."""
    return next((entries for _, entries in positions(payload, limit=1, most=most)), [])


def positions(payload: object, *, limit: int, most: int = MAX_ENTRIES) -> list[tuple[object, list[Entry]]]:
    """Returns the generated token and the entries reported for its place, for the first `limit` tokens.

    Four shapes are in use, of mappings or of an SDK's objects with these attributes:
    `{"content": [{"top_logprobs": [entry, ...]}, ...]}` (chat, and completions of llama.cpp), the list in it alone
    (Ollama), and `{"top_logprobs": [{text: logprob, ...}, ...]}` with entries or with
    (text, logprob) pairs (completions of OpenAI, vLLM and llama-cpp-python).
    """
    payload = _as_mapping(payload)
    if isinstance(payload, list | tuple):
        payload = {"content": payload}
    if not isinstance(payload, dict):
        return []
    content = [_as_mapping(place) for place in _first_entries(payload.get("content"), limit)]
    if content and isinstance(content[0], dict):
        return [(place, _reported(place, most)) for place in content if isinstance(place, dict)]
    tops = _first_entries(payload.get("top_logprobs"), limit)
    tokens = _first_entries(payload.get("tokens"), limit)
    return [(tokens[i] if i < len(tokens) else None, _entries(top, most)) for i, top in enumerate(tops)]


def probabilities(
    entries: Iterable[Entry], *, eos_texts: Iterable[str] = EOS_TEXTS, spell: Spell | None = None
) -> Probabilities:
    """Turns entries into probabilities; unreadable ones are left out.

    Several tokens with the same bytes (control tokens, byte fallbacks) add up; a sum above 1 is scaled back to 1.
    """
    ends = frozenset(eos_texts)
    by_token: Probabilities = {}
    for entry, logprob in entries:
        value, key = probability(logprob), token_key(entry, eos_texts=ends, spell=spell)
        if key is not None and value > 0.0:
            by_token[key] = min(1.0, by_token.get(key, 0.0) + value)
    total = math.fsum(by_token.values())
    margin = 1.0 - 2.0**-40  # so that the sum stays at or below 1 in whatever order it is taken
    if total <= margin or len(by_token) == 1:
        return by_token
    return {key: value * (margin / total) for key, value in by_token.items()}


def probability(logprob: object) -> float:
    """Returns exp(logprob), or 0 for anything but a logprob (NaN, above 0, text, a boolean)."""
    if isinstance(logprob, bool) or not isinstance(logprob, int | float) or not logprob <= _ROUNDING:
        return 0.0
    return math.exp(min(0.0, max(logprob, -1e4)))


def token_key(entry: object, *, eos_texts: frozenset[str] = EOS_TEXTS, spell: Spell | None = None) -> bytes | None:
    """Returns the key of a reported token: its bytes, `EOS`, `LOST`, or None for anything else."""
    fields = entry if isinstance(entry, dict) else {}
    text = fields.get("token") if isinstance(entry, dict) else entry
    if isinstance(text, str) and text in eos_texts:
        return EOS
    number = id_of_placeholder(text)
    if number is not None:  # what it reports as bytes then are those of the placeholder
        return _key(spell(number) if spell else None, eos_texts)
    raw = _reported_bytes(fields.get("bytes"))
    if raw is None or LOST in raw:
        known = _by_id_field(fields, spell)
        raw = known if known is not None else LOST if raw else _encode(text)
    return _key(raw, eos_texts)


def is_whole(token: bytes) -> bool:
    """Whether a key has whole characters only, so that a text can be continued behind it; the end has none."""
    return "\ufffd" not in token.decode("utf-8", "replace")


def id_of_placeholder(entry: object) -> int | None:
    """Returns the id of a token that is spelled as a placeholder with its id, None for any other."""
    text = entry.get("token") if isinstance(entry, dict) else entry
    match = _BY_ID.fullmatch(text) if isinstance(text, str) else None
    return int(match[1]) if match else None


def to_rows(reported: Sequence[Mapping[Any, float]], domain: Sequence[Token]) -> Rows:
    """Arranges probabilities as float64[rows, len(domain)]; an unreported token is 0."""
    rows = np.zeros((len(reported), len(domain)), dtype=np.float64)
    column = {token: j for j, token in enumerate(domain)}
    for i, row in enumerate(reported):
        smaller = row if len(row) < len(column) else column
        for token in smaller:
            if token in row and token in column:
                rows[i, column[token]] = row[token]
    return rows


def _first_entries(values: object, limit: int) -> Sequence[Any]:
    return values[:limit] if isinstance(values, list | tuple) else ()


def _reported(place: dict[str, Any], most: int) -> list[Entry]:
    """Returns the entries of a place, and the written token where they are without it, as LMDeploy's are.

    One that is less likely than all entries was drawn from behind them, and the next time another would be.
    """
    entries, own = _entries(place.get("top_logprobs"), most), place.get("logprob")
    token = place.get("token")
    if not entries or not isinstance(token, str) or probability(own) == 0.0:
        return entries

    def is_own(entry: Any, logprob: object) -> bool:
        named = entry.get("token") if isinstance(entry, dict) else entry
        if isinstance(named, str) and named == token and not _UNREADABLE.search(token):
            return True
        # The same token may be spelled otherwise in the list, unless both are text; parts of characters look alike.
        return isinstance(logprob, float) and logprob == own and not (_is_plain(named) and _is_plain(token))

    is_likely = any(probability(logprob) < probability(own) for _, logprob in entries)
    return [*entries, (place, own)] if is_likely and not any(is_own(*entry) for entry in entries) else entries


def _is_plain(token: object) -> bool:
    """Whether a reported token is text, and no end, number or part of a character."""
    is_text = isinstance(token, str) and bool(token) and token not in EOS_TEXTS
    return is_text and not _UNREADABLE.search(str(token)) and not _BY_ID.fullmatch(str(token))


def _entries(top: object, most: int) -> list[Entry]:
    if isinstance(top, dict):
        return list(islice(top.items(), most))
    if isinstance(top, list | tuple):
        entries = map(_as_mapping, top[:most])
        return [(entry, entry.get("logprob")) for entry in entries if isinstance(entry, dict)]
    return []


def _as_mapping(value: object) -> object:
    """Returns the fields of an SDK's object by name; anything else as it is."""
    return dict(BaseModel.__iter__(value)) if isinstance(value, BaseModel) else value


def _key(raw: bytes | None, eos_texts: frozenset[str]) -> bytes | None:
    return EOS if raw is not None and raw.decode("utf-8", "replace") in eos_texts else raw


def _encode(text: object) -> bytes | None:
    if not isinstance(text, str) or len(text) > _MAX_TOKEN_BYTES:
        return None
    if _UNREADABLE.search(text):
        return LOST
    try:
        return text.encode("utf-8")
    except UnicodeError:
        return None


def _by_id_field(fields: Mapping[str, object], spell: Spell | None) -> bytes | None:
    number = fields.get("id", fields.get("token_id"))
    return spell(number) if spell and isinstance(number, int) and not isinstance(number, bool) else None


def _reported_bytes(values: object) -> bytes | None:
    """Returns the reported bytes, or None if the provider gave none (the text is used then)."""
    if isinstance(values, bytes):
        return values[:_MAX_TOKEN_BYTES]
    if not isinstance(values, list | tuple) or len(values) > _MAX_TOKEN_BYTES:
        return None
    whole = all(isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 256 for value in values)
    return bytes(values) if whole else None


Continuation: TypeAlias = Literal["completion", "prefill", "instruct"]
Prefill: TypeAlias = Literal["plain", "vllm"]

CONTINUE = "Continue your last message exactly where it stops. Write the continuation only and repeat nothing."
"""The last message of an "instruct" continuation."""

VLLM_SWITCHES: Mapping[str, bool] = {"continue_final_message": True, "add_generation_prompt": False}
"""Options that make vLLM continue the last message; without an assistant message it would continue the user's."""


@dataclass(frozen=True)
class ReplyFormat:
    """The request and reply format of one model; all of it is public.

    A released prefix is continued in one of three ways (`docs/providers.md`). "completion": prompt and prefix are one
    text; exact. "prefill": the prefix is an assistant message that the server continues, by itself or, as vLLM, when
    asked to; exact where supported. "instruct": the prefix is an assistant message, followed by an instruction to
    continue; approximate.

    Args:
      is_chat: whether the model takes messages.
      continuation: how a prefix is continued.
      prefill: how a server is asked to continue: "plain" (it does so by itself), "vllm" (by `VLLM_SWITCHES`); None
        where no message is continued, or while it is unknown.
      asked: top tokens to ask for.
      extra_body: what the model and its bindings add to each request; the switches go on top.
      eos_texts: how the provider spells the end of a text.
      spell: turns token ids into bytes.
    """

    is_chat: bool
    continuation: Continuation
    prefill: Prefill | None
    asked: int
    extra_body: Mapping[str, Any] = field(default_factory=dict, repr=False)
    eos_texts: frozenset[str] = EOS_TEXTS
    spell: Spell | None = field(default=None, repr=False)

    def request(
        self, prompt: OpaqueValue[str], prefix: str, *, explain: Literal["", "kind", "text"] = "", max_tokens: int = 1
    ) -> Request:
        """Returns the call that asks for the tokens after the prompt and the released prefix."""
        top = {"logprobs": True, "top_logprobs": self.asked} if self.is_chat else {"logprobs": self.asked}
        # Temperature 1: some servers report the distribution they sample from. One token: see `_is_readable`.
        options = {**top, "max_tokens": max_tokens, "temperature": 1.0, **self._body(prefix)}
        return Request(
            prompt,
            lambda text: self._render(text, prefix),
            options,
            lambda answer: _is_readable(answer, prefix, is_public=bool(explain)),
            explain,
        )

    def read(self, reply: Reply, prefix: str = "") -> Probabilities:
        """Returns the probabilities of the first token after the prefix; empty if none can be read."""
        return {} if reply.answer is None else self._read(reply.answer.reveal(), prefix)

    def entries(self, reply: Reply) -> list[Entry]:
        """Returns what a public answer reports for its first token, as received."""
        return [] if reply.answer is None else first_position(reply.answer.reveal().logprobs)

    def reported(self, reply: Reply, limit: int) -> list[list[Entry]]:
        """Returns what a public answer reports for its first tokens, as received; empty places are left out."""
        found = [] if reply.answer is None else positions(reply.answer.reveal().logprobs, limit=limit)
        return [entries for _, entries in found if entries]

    def places(self, reply: Reply, limit: int) -> list[tuple[object, Probabilities]]:
        """Returns the first tokens of a public answer and the probabilities reported for each one's place."""
        reported = [] if reply.answer is None else positions(reply.answer.reveal().logprobs, limit=limit)
        return [
            (token, probabilities(entries, eos_texts=self.eos_texts, spell=self.spell)) for token, entries in reported
        ]

    def key(self, token: object) -> bytes | None:
        """Returns the key of a reported token, as `token_key`."""
        return token_key(token, eos_texts=self.eos_texts, spell=self.spell)

    def _read(self, answer: ModelOutput, prefix: str) -> Probabilities:
        if answer.refused:
            return {}
        return next_token(
            answer.logprobs,
            text="" if answer.text == prefix else answer.text,  # some servers repeat what they were given
            finish_reason=answer.finish_reason,
            eos_texts=self.eos_texts,
            spell=self.spell,
        )

    def _body(self, prefix: str) -> dict[str, Any]:
        """Returns the `extra_body` of a call, which replaces that of the model and its bindings."""
        own = {name: value for name, value in self.extra_body.items() if name not in VLLM_SWITCHES}
        if self.prefill == "vllm" and prefix:
            return {"extra_body": {**own, **VLLM_SWITCHES}}
        return {"extra_body": own} if self.extra_body else {}

    def _render(self, prompt: str, prefix: str) -> str | list[BaseMessage]:
        if self.continuation == "completion":
            return prompt + prefix
        if not prefix:
            return [HumanMessage(prompt)]
        last = [HumanMessage(CONTINUE)] if self.continuation == "instruct" else []
        return [HumanMessage(prompt), AIMessage(prefix), *last]


def _is_readable(answer: ModelOutput, prefix: str, *, is_public: bool) -> bool:
    """Whether an answer is final, with or without logprobs.

    llama.cpp reports nothing when it happens to sample the first bytes of an unfinished character, and of a longer
    answer it would report a later position as the first. So one token is asked for, and sampled again if need be.
    OpenAI's servers report nothing when they happen to sample the end. After a private prompt that counts as the end,
    which is right on average; after a public one it would be the only candidate, so that one is sampled again too.
    """
    ended = not is_public and answer.text in {"", prefix} and answer.finish_reason in FINISHED
    is_final = ended or answer.refused or answer.finish_reason == "content_filter"
    return is_final or bool(first_position(answer.logprobs, most=8))


TOP_K = (20, 10, 5, 2)
"""How many top tokens a probe asks for when `max_top_k` is not given; the first number that is not rejected counts."""

# Public text, with one answer that is likelier than all others.
PROMPT = "Write these three words: Quartz lamps hum"
_PREFIX = "Quartz lamps"
_NEW_MESSAGES = ("quartz", "hum")

_WRITTEN = 4  # tokens the server writes of its own, so that there is a place after two and after three of them
_COMPARED_AFTER = (2, 3)
_AGREEMENT = 0.9
_MOST, _ALL = 0.99, 0.999  # of the probability, as providers round it: nearly a whole vocabulary, and a whole one
_IMPOSSIBLE = -1000.0  # no softmax of a model is that small; DeepSeek and vLLM write -9999 for 0
_PREFILLS: tuple[Prefill, ...] = ("plain", "vllm")


class NoLogprobsError(CapabilityError):
    """A model answers, but without log-probabilities; its text may still serve as a vote."""


class ProbeResult(NamedTuple):
    """The result of a probe."""

    wire: ReplyFormat
    entries: list[Entry]
    found: Probabilities


def probe(
    calls: CallPool,
    wire: ReplyFormat,
    *,
    kind: str,
    numbers: Sequence[int],
    load: Callable[[], None],
    is_full: bool = False,
) -> ProbeResult:
    """Learns with public text whether logprobs come, for how many tokens, and how a prefix is continued.

    Args:
      calls: makes the calls.
      wire: how to ask; its `asked`, and its `prefill` where it is None and an assistant message is to be continued, are
        what is to be found.
      kind: name of the model's class.
      numbers: top tokens to ask for, the most first.
      load: makes `wire.spell` ready; called where tokens come as ids.
      is_full: whether the number stands for the whole vocabulary.

    Raises:
      CapabilityError: no logprobs, or those of thoughts (`NoLogprobsError`), or no continuation.
      ModelCallError: nobody answered.
    """
    name = calls.model.name
    wire, reply = _find_top_k(calls, wire, numbers)
    what = "logprobs"
    about = partial(whole_vocabulary, asked=wire.asked) if is_full else advice
    answer = probe_answer_or_raise(
        name,
        reply,
        asked=what,
        advice=partial(about, kind, name),
        lack=NoLogprobsError,
        unreached=" (mlx_lm.server hangs up on calls for more than 10 top tokens: LangChainBackend(llm, max_top_k=10))",
    )
    entries = wire.entries(reply)
    if any(id_of_placeholder(entry) is not None for entry, _ in entries):
        load()
    reported = {token: value for token, value in wire.read(reply).items() if is_whole(token)}
    if entries and not reported:
        _refuse_unreadable(name, entries)
    if not entries:
        raise NoLogprobsError(f"{name} answered a public probe without {what}. {about(kind, name)}")
    if all(map(_is_one_hot, wire.reported(reply, _WRITTEN))):
        raise NoLogprobsError(
            f"{name} answered a public probe with 0 for the token it wrote and {_IMPOSSIBLE:g} or less for every "
            f"other one: these are no log-probabilities. {ONE_HOT}"
        )
    if _thinks_first(answer.reveal(), is_chat=wire.is_chat):
        raise NoLogprobsError(
            f"{name} answered a public probe with tokens that are no part of an answer: it thinks first, and reports "
            f"the log-probabilities of its thoughts. Either {THINKING_OFF}, or take its text as a vote, with room for "
            "the thoughts: TextVoteBackend(llm, options={'max_tokens': 2000})"
        )
    if reported.keys() == {EOS} and wire.key(answer.reveal().text) != EOS:  # tokens of text without bytes
        _refuse_unreadable(name, entries)
    tests = _tests(wire, reply, name)
    if wire.continuation == "prefill" and wire.prefill is None:
        wire = _find_continuation(calls, wire, tests)
    return ProbeResult(wire, entries, reported)


_CUT = frozenset({"length", "max_tokens", "model_length"})
"""Why an answer ended that had no room, by each provider's name."""


def _thinks_first(answer: ModelOutput, *, is_chat: bool) -> bool:
    """Whether a public answer begins with thoughts, which servers of chat models may hide from its text."""
    is_cut = str(answer.finish_reason).lower() in _CUT
    return (is_chat and is_cut and not answer.text.strip()) or end_of_thoughts(answer.text) > 0


def _is_one_hot(entries: Sequence[Entry]) -> bool:
    """Whether one token is reported as certain and all others as impossible, as by servers without probabilities."""
    numbers = [number for _, number in entries if isinstance(number, int | float) and not isinstance(number, bool)]
    certain = sum(number == 0.0 for number in numbers)
    return len(numbers) > 1 and certain == 1 and all(number == 0.0 or number <= _IMPOSSIBLE for number in numbers)


def top_k_of(name: str, entries: Sequence[Entry], asked: int, *, is_given: bool) -> int:
    """Returns how many top tokens a model reports.

    If the number is given, the probe must return that many entries, with two exceptions. A mapping from texts has lost
    entries that share a text, hence a tenth of slack. And a vocabulary may be smaller than the number; its
    probabilities sum to 1.
    """
    reported = len(entries)
    if is_given:
        is_mapping = all(isinstance(entry, str) for entry, _ in entries)
        if reported >= (0.9 * asked if is_mapping else asked):
            return asked
        if _mass(entries) >= _ALL:
            return reported
        raise CapabilityError(
            f"expected {asked} top logprobs from {name}, found {reported}; give LangChainBackend(llm, "
            f"max_top_k={reported}), or leave max_top_k out to take what the model reports"
        )
    if reported < 2:
        raise CapabilityError(
            f"expected 2 or more top logprobs from {name}, found {reported}: one candidate leaves no choice. "
            f"Take another model, or LangChainBackend(llm, max_top_k={reported}) if that is what you want"
        )
    return min(asked, reported)


def refuse_partial_vocabulary(name: str, entries: Sequence[Entry], asked: int) -> None:
    """Raises CapabilityError if a server cut the list silently, or the number is not the size of its vocabulary.

    Entries that share a text may be merged, hence the tenth of slack.
    """
    count, mass = len(entries), _mass(entries)
    if count >= 0.9 * asked and mass >= _MOST:
        return
    limit = "raise the server's limit on logprobs (vLLM: --max-logprobs -1) or leave full_vocabulary out"
    if mass >= _MOST:
        todo = f"if that is its whole vocabulary, give full_vocabulary={count}; if not, {limit}"
    elif 0 < asked <= count:
        todo = "ask for more: give the size of the model's vocabulary as full_vocabulary"
    else:
        todo = limit
    raise CapabilityError(
        f"expected the whole vocabulary from {name} (asked for {asked}), found {count} tokens holding {mass:.3f} of "
        f"the probability; {todo}"
    )


def _mass(entries: Sequence[Entry]) -> float:
    return math.fsum(probability(logprob) for _, logprob in entries)


def _find_top_k(calls: CallPool, wire: ReplyFormat, numbers: Sequence[int]) -> tuple[ReplyFormat, Reply]:
    """Asks for fewer and fewer top tokens until the server accepts the call.

    A fault of the key, the address or an unknown argument ends it at once: no number would help.
    """
    reply = Reply()
    for number in numbers:
        wire = dataclasses.replace(wire, asked=number)
        reply = calls.probe(wire.request(OpaqueValue(PROMPT), "", explain="text", max_tokens=_WRITTEN))
        if reply.fault != "content" or advice_elsewhere(reply.detail) or reply.detail.startswith("TypeError"):
            break
    return wire, reply


def _tests(wire: ReplyFormat, reply: Reply, name: str) -> list[tuple[str, Probabilities]]:
    """Returns beginnings of the server's own text, and what it reported after each; refuses lost spaces."""
    text = "" if reply.answer is None else reply.answer.reveal().text
    tests: list[tuple[str, Probabilities]] = []
    end = 0
    for number, (token, reported) in enumerate(wire.places(reply, _WRITTEN)):
        if number in _COMPARED_AFTER and reported:
            tests.append((text[:end], reported))
        key = wire.key(token)
        piece = key.decode() if key is not None and is_whole(key) else ""
        piece = piece if number else piece.lstrip()  # servers may trim the text
        start = text.find(piece, end) if piece else -1
        plain = piece.replace("\u2581", " ").replace("\u0120", " ")  # SentencePiece's and byte-level BPE's space
        begins = (plain,) if number else (plain, plain.lstrip())  # the text may be trimmed
        is_marked = start < 0 and plain != piece and text.startswith(begins, end)
        if not is_marked and (start < 0 or text[end:start].strip()):
            break
        if is_marked or (start > end and number > 0):
            spaces = "with marks in place of their spaces" if is_marked else "without the spaces before them"
            raise CapabilityError(
                f"{name} spells tokens {spaces}, so words would run together. Bind "
                "extra_body={'return_tokens_as_token_ids': True} (vLLM) and give "
                "LangChainBackend(llm, tokenizer=...), which turns ids into exact bytes; or take another server"
            )
        end = start + len(piece)
    return tests


def _find_continuation(calls: CallPool, wire: ReplyFormat, tests: Sequence[tuple[str, Probabilities]]) -> ReplyFormat:
    """Returns the wire with the first way of continuing a message that works."""
    name, rejections = calls.model.name, []
    for prefill in _PREFILLS:
        trial = dataclasses.replace(wire, prefill=prefill)
        goes_on, rejection = _goes_on(calls, trial, tests)
        if goes_on:
            return trial
        if rejection:
            rejections.append(f"{prefill}: {rejection}")
    raise CapabilityError(
        f"{name} starts a new message instead of continuing the assistant message"
        + (f" ({'; '.join(rejections)})" if rejections else "")
        + ", also with vLLM's switches; use a completion model or a server that continues it, or accept an "
        "approximation: llm=LangChainBackend(model, continuation='instruct') of langchain_dpicl.backends (on the "
        "command line: name that object as --model module:attribute). If the server does continue it: "
        "LangChainBackend(model, prefill='plain') or 'vllm'"
    )


# Whether a server continues an assistant message is decided by comparing two of its own answers. It first writes a few
# tokens and reports the probabilities of each place. Then it gets the first two of these tokens (and, if that decides
# nothing, three) as an assistant message, and is asked for the next one. A server that continues reports the same
# probabilities again, for any model; one that starts a new message does not.
# Limits: two reports agree if they share nine tenths of their mass, so a server whose rows hardly depend on the prompt
# passes. So does one whose template trims the message, as no beginning ends in white space (`docs/providers.md`). A
# template that alters the message otherwise makes a continuing server fail. A server that always writes one token
# cannot be compared; it is refused only if its likeliest token opens the probe's sentence again. In the last two cases
# `prefill=` declares what the probe cannot see.
def _goes_on(calls: CallPool, wire: ReplyFormat, tests: Sequence[tuple[str, Probabilities]]) -> tuple[bool, str]:
    """Returns whether the server continues a prefix, and its message if it rejected one."""
    for prefix, expected in tests or [(_PREFIX, {})]:
        reply = calls.probe(wire.request(OpaqueValue(PROMPT), prefix, explain="text"))
        if reply.fault == "content":
            return False, reply.detail.rstrip(". ")
        probe_answer_or_raise(calls.model.name, reply, asked="a continued message", advice=TAKE_ANOTHER)
        reported = wire.read(reply, prefix)
        if agreement(reported, expected) >= _AGREEMENT if expected else reported and not _starts_anew(reported):
            return True, ""
    return False, ""


def agreement(left: Probabilities, right: Probabilities) -> float:
    """Returns the mass that two reports share, as part of the smaller: 1 for equal ones, 0 for disjoint ones.

    >>> agreement({b"a": 0.5, b"b": 0.25}, {b"a": 0.25, b"c": 0.5})
    0.3333333333333333
    """
    smaller = min(math.fsum(left.values()), math.fsum(right.values()))
    shared = math.fsum(min(value, right.get(key, 0.0)) for key, value in left.items())
    return shared / smaller if smaller > 0.0 else 0.0


def _starts_anew(reported: Probabilities) -> bool:
    """Whether the likeliest token opens a new message instead of continuing the probe's prefix."""
    text = max(reported, key=lambda token: reported[token]).decode("utf-8", "replace").lower()
    return bool(text) and any(word.startswith(text) for word in _NEW_MESSAGES)


def _refuse_unreadable(name: str, entries: Sequence[Entry]) -> None:
    if any(id_of_placeholder(entry) is not None for entry, _ in entries):
        raise CapabilityError(
            f"{name} spells tokens as ids. Give LangChainBackend(llm, tokenizer=...) with the tokenizer of that model "
            "(a tokenizer of transformers, or a tiktoken.Encoding), or leave return_tokens_as_token_ids out"
        )
    raise NoLogprobsError(
        f"{name} reported {len(entries)} top tokens to a public probe, and none that can be read as text with a "
        f"log-probability. {TAKE_ANOTHER} {VOTES}"
    )
