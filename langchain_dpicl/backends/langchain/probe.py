"""Learns with public text whether a model reports log-probabilities, how many, and how it continues a prefix."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from langchain_dpicl.backends.langchain.logprobs import (
    Entry,
    Prefill,
    Probabilities,
    ReplyFormat,
    id_of_placeholder,
    probability,
)
from langchain_dpicl.backends.private_calls.call import OpaqueValue, Reply
from langchain_dpicl.backends.private_calls.call_pool import CallPool
from langchain_dpicl.backends.private_calls.public_calls import (
    ONE_HOT,
    TAKE_ANOTHER,
    VOTES,
    advice,
    advice_elsewhere,
    probe_answer_or_raise,
    whole_vocabulary,
)
from langchain_dpicl.exceptions import CapabilityError

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
    """The result of a probe.

    Attributes:
      wire: the request format to use.
      entries: what the model reports for one token, as received.
      found: the same as probabilities.
    """

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
      CapabilityError: no logprobs (`NoLogprobsError`), or no continuation.
      ModelCallError: nobody answered.
    """
    name = calls.model.name
    wire, reply = _find_top_k(calls, wire, numbers)
    what = "logprobs"
    about = partial(whole_vocabulary, asked=wire.asked) if is_full else advice
    probe_answer_or_raise(name, reply, asked=what, advice=partial(about, kind, name), lack=NoLogprobsError)
    entries = wire.entries(reply)
    if any(id_of_placeholder(entry) is not None for entry, _ in entries):
        load()
    reported = wire.read(reply)
    if entries and not reported:
        _refuse_unreadable(name, entries)
    if not entries:
        raise NoLogprobsError(f"{name} answered a public probe without {what}. {about(kind, name)}")
    if all(map(_is_one_hot, wire.reported(reply, _WRITTEN))):
        raise NoLogprobsError(
            f"{name} answered a public probe with 0 for the token it wrote and {_IMPOSSIBLE:g} or less for every "
            f"other one: these are no log-probabilities. {ONE_HOT}"
        )
    tests = _tests(wire, reply, name)
    if wire.continuation == "prefill" and wire.prefill is None:
        wire = _find_continuation(calls, wire, tests)
    return ProbeResult(wire, entries, reported)


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
        piece = (wire.key(token) or b"").decode()
        piece = piece if number else piece.lstrip()  # servers may trim the text
        start = text.find(piece, end) if piece else -1
        if start < 0 or text[end:start].strip():
            break
        if start > end and number > 0:
            raise CapabilityError(
                f"{name} spells tokens without the spaces before them, so words would run together. Bind "
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
        "approximation with continuation='instruct'. If the server does continue it, pass prefill='plain' or 'vllm'"
    )


# Whether a server continues an assistant message is decided by comparing two of its own answers. It first writes a few
# tokens and reports the probabilities of each place. Then it gets the first two of these tokens (and, if that decides
# nothing, three) as an assistant message, and is asked for the next one. A server that continues reports the same
# probabilities again, for any model; one that starts a new message does not.
# Limits: two reports agree if they share nine tenths of their mass, so a server whose rows hardly depend on the prompt
# passes. A template that alters the message makes a continuing server fail. A server that always writes one token
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
    text = max(reported, key=lambda token: reported[token]).decode().lower()
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
