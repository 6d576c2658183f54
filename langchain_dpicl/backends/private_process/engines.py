"""Engines whose model is in a process of its own: they have the methods of the engine there, and its rows."""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl._opaque import Uncopyable
from langchain_dpicl.backends.base import FullSession, RowHint, Rows, Token, TokenSession
from langchain_dpicl.backends.private_calls.call import OpaqueValue, RetryPolicy
from langchain_dpicl.backends.private_calls.embeddings import SilentEmbeddings
from langchain_dpicl.backends.private_process.connection import Answer, Client, Connection, Message, Spare
from langchain_dpicl.backends.sync_async import Call, Effect, EffectGenerator, bare, run_async, run_sync
from langchain_dpicl.exceptions import ConfigurationError

Compose = Callable[[Connection], Message]
_NUMBERS = itertools.count()


class ProcessEngine(Uncopyable):
    """An engine in a process of its own; subclasses have the capabilities of the engine there.

    Formal guarantees:
      - A row is what the engine there gives for the row's own prompt, to the last bit.
      - Rows that were under way when the process ended are asked for again, once, each alone in another process: only
        those that end it once more, or are not answered in time, abstain. Nothing else of them is repeated. Behind 16
        tokens or more the engine may read them in larger steps, and then they agree up to rounding.
      - Neither that a private row ended the process nor how many rows there are decides whether a public call raises,
        where another process can be started.
      - No prompt and no row is in an exception, a repr, or an attribute that is not opaque.
    """

    _pickle_advice = "it has a process of its own. Make another PrivateProcess where it is needed"

    def __init__(self, client: Client, role: str) -> None:
        self._client = client
        self._role = role
        self._facts = client.facts_of(role)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, role={self._role!r})"

    @property
    def name(self) -> str:
        """Public name of the model, for reports."""
        return str(self._facts["name"])

    @property
    def kind(self) -> str:
        """How choices are scored, for reports; "" where there is no more to say than what the engine can do."""
        return str(self._facts["kind"])

    @property
    def row_hint(self) -> RowHint:
        """The shape of rows that the engine declares for votes."""
        return RowHint(*self._facts["hint"])

    @property
    def hosts(self) -> tuple[str, ...]:
        """Hosts that public calls of the process reached, for reports."""
        return tuple(self._facts["hosts"])

    def engine(self, role: str) -> ProcessEngine:
        """Returns the engine of the same process in another role."""
        return engine_of(self._client, role)

    def _effect(
        self, compose: Compose, rows: int = 1, spare: Spare | None = None, *, is_public: bool = False
    ) -> Effect:
        client = self._client
        return Call(
            lambda: client.ask(compose, rows, spare, is_public=is_public),
            lambda: client.aask(compose, rows, spare, is_public=is_public),
        )

    def _message(self, method: str, *arguments: Any, **options: Any) -> Message:
        return {"does": "call", "role": self._role, "method": method, "arguments": arguments, "options": options}

    def _public(self, method: str, *arguments: Any, **options: Any) -> EffectGenerator[Any]:
        message = {**self._message(method, *arguments, **options), "public": True}
        answer = yield self._effect(lambda _: message, is_public=True)
        if answer.kind == "lost":
            answer = yield from self._apart(lambda _: message)
        return self._client.public_value(answer)

    def _apart(self, compose: Compose) -> EffectGenerator[Answer]:
        """Asks a public question once more, alone in a process of its own.

        A private row of somebody else may have ended the shared one: whether it did decides no error of this call.
        """
        spare = Spare(self._client)
        try:
            answer: Answer = yield self._effect(compose, 1, spare, is_public=True)
        finally:
            spare.close()
        return answer

    def _now(self, method: str, *arguments: Any) -> Any:
        return run_sync(self._public(method, *arguments))

    def _rows(
        self, method: str, prompts: Sequence[OpaqueValue[str]], *arguments: Any, **options: Any
    ) -> EffectGenerator[tuple[Any, list[Any]]]:
        """Returns what the engine gives for all private prompts, or (None, what it gives for each; None: it failed)."""
        answer = yield self._effect(lambda _: self._message(method, prompts, *arguments, **options), len(prompts))
        if (done := _done(answer)) is not None:
            return done, []

        def alone(place: int) -> Compose:
            return lambda _: self._message(method, [prompts[place]], *arguments, **options)

        found = yield from self._each(alone, range(len(prompts)))
        return None, [None if one is None else one.reveal()[0] for one in found]

    def _each(self, alone: Callable[[int], Compose], places: Sequence[int]) -> EffectGenerator[list[Any]]:
        """Asks for each row alone, in a process of its own; an entry is None where that failed too."""
        spare, found = Spare(self._client), []
        try:
            for place in places:
                answer = yield self._effect(alone(place), 1, spare)
                found.append(answer.value if answer.kind == "done" else None)
        finally:
            spare.close()
        return found


def _done(answer: Answer) -> Any:
    """Returns what came, None if rows have to be asked for alone; raises a public error."""
    if answer.error is not None:
        raise bare(answer.error)
    return answer.value.reveal() if answer.kind == "done" and answer.value is not None else None


def _boxes(prompts: Sequence[str | None]) -> list[OpaqueValue[Any]]:
    return [OpaqueValue(prompt) for prompt in prompts]


def _stacked(whole: Any, rows: Sequence[Any], width: int, blank: float) -> Rows:
    if whole is not None:
        stacked: Rows = whole
        return stacked
    empty = np.full(width, blank)
    return np.array([empty if row is None else row for row in rows], dtype=np.float64).reshape(len(rows), width)


class _Tokens(ProcessEngine):
    """Scores next tokens."""

    @property
    def max_top_k(self) -> int | None:
        most: int | None = self._facts["max_top_k"]
        return most

    @property
    def eos(self) -> Token:
        eos: Token = self._facts["eos"]
        return eos

    @property
    def is_chat(self) -> bool:
        return bool(self._facts["is_chat"])

    @property
    def room(self) -> int | None:
        room: int | None = self._facts["room"]
        return room

    @property
    def tokenizer_fingerprint(self) -> str | None:
        fingerprint: str | None = self._facts["fingerprint"]
        return fingerprint

    def vocabulary(self) -> Sequence[Token]:
        if "vocabulary" not in self._facts:
            self._facts["vocabulary"] = tuple(self._now("vocabulary"))
        keys: Sequence[Token] = self._facts["vocabulary"]
        return keys

    def top_tokens(self, prompt: str, prefix: Sequence[Token], *, top_k: int) -> list[tuple[Token, float]]:
        return [(token, share) for token, share in run_sync(self._top(prompt, prefix, top_k))]

    async def atop_tokens(self, prompt: str, prefix: Sequence[Token], *, top_k: int) -> list[tuple[Token, float]]:
        return [(token, share) for token, share in await run_async(self._top(prompt, prefix, top_k))]

    def _top(self, prompt: str, prefix: Sequence[Token], top_k: int) -> EffectGenerator[Any]:
        return self._public("top_tokens", prompt, list(prefix), top_k=top_k)

    def open(self, prompts: Sequence[str], prefix: Sequence[Token]) -> TokenSession:
        """Starts a session on PRIVATE prompts; the process is asked when the first rows are."""
        boxes = _boxes(prompts)
        del prompts  # from here on this frame holds boxes only
        return _Session(self, boxes, prefix)

    def decode(self, tokens: Sequence[Token]) -> str:
        return str(self._now("decode", list(tokens)))

    def count_tokens(self, text: str) -> int:
        return int(self._now("count_tokens", text))


class _FirstTokens(_Tokens):
    """Reports of a public prompt's first token what it reports of a private one's."""

    def first_tokens(self, prompt: str) -> list[tuple[Token, float]]:
        return [(token, share) for token, share in run_sync(self._public("first_tokens", prompt))]

    async def afirst_tokens(self, prompt: str) -> list[tuple[Token, float]]:
        return [(token, share) for token, share in await run_async(self._public("first_tokens", prompt))]


class _Full(_Tokens):
    """Scores private prompts and the public one over the whole vocabulary."""

    def open_full(
        self,
        prompts: Sequence[str | None],
        prefix: Sequence[Token],
        *,
        public: str,
        num_rows: int | None,
        shared: str = "",
        max_new_tokens: int | None = None,
    ) -> FullSession:
        boxes = _boxes(prompts)
        del prompts
        how = {"public": public, "num_rows": num_rows, "shared": shared, "max_new_tokens": max_new_tokens}
        return _FullSession(self, boxes, prefix, how)


class _Choices(ProcessEngine):
    """Scores complete continuations."""

    def score_choices(self, prompts: Sequence[str], choices: Sequence[str]) -> Rows:
        boxes = _boxes(prompts)
        del prompts
        return run_sync(self._scored("score_choices", boxes, choices, len(choices)))

    async def ascore_choices(self, prompts: Sequence[str], choices: Sequence[str]) -> Rows:
        boxes = _boxes(prompts)
        del prompts
        return await run_async(self._scored("score_choices", boxes, choices, len(choices)))

    def _scored(
        self, method: str, boxes: Sequence[OpaqueValue[str]], choices: Sequence[str], width: int
    ) -> EffectGenerator[Rows]:
        whole, rows = yield from self._rows(method, boxes, list(choices))
        return _stacked(whole, rows, width, -np.inf)


class _PublicChoices(_Choices):
    """Scores the choices of public prompts too."""

    def score_public(self, prompt: str, choices: Sequence[str]) -> NDArray[np.float64]:
        return run_sync(self._public("score_public", prompt, list(choices)))

    async def ascore_public(self, prompt: str, choices: Sequence[str]) -> NDArray[np.float64]:
        return await run_async(self._public("score_public", prompt, list(choices)))


class _Other(_PublicChoices):
    """Tells an answer that names no choice from a failed call."""

    def score_with_other(self, prompts: Sequence[str], choices: Sequence[str]) -> Rows:
        boxes = _boxes(prompts)
        del prompts
        return run_sync(self._scored("score_with_other", boxes, choices, len(choices) + 1))

    async def ascore_with_other(self, prompts: Sequence[str], choices: Sequence[str]) -> Rows:
        boxes = _boxes(prompts)
        del prompts
        return await run_async(self._scored("score_with_other", boxes, choices, len(choices) + 1))


class _Texts(ProcessEngine):
    """Completes text."""

    def complete(self, prompts: Sequence[str], *, max_tokens: int, stop: Sequence[str] = ()) -> list[str]:
        boxes = _boxes(prompts)
        del prompts
        return run_sync(self._completed(boxes, max_tokens, stop))

    async def acomplete(self, prompts: Sequence[str], *, max_tokens: int, stop: Sequence[str] = ()) -> list[str]:
        boxes = _boxes(prompts)
        del prompts
        return await run_async(self._completed(boxes, max_tokens, stop))

    def _completed(
        self, boxes: Sequence[OpaqueValue[str]], max_tokens: int, stop: Sequence[str]
    ) -> EffectGenerator[list[str]]:
        whole, rows = yield from self._rows("complete", boxes, max_tokens=max_tokens, stop=list(stop))
        return whole if whole is not None else [row or "" for row in rows]


class _PublicTexts(_Texts):
    """Tells a failed call for a public text from a blank answer."""

    def complete_public(self, prompt: str, *, max_tokens: int, stop: Sequence[str] = ()) -> str:
        return str(run_sync(self._public("complete_public", prompt, max_tokens=max_tokens, stop=list(stop))))

    async def acomplete_public(self, prompt: str, *, max_tokens: int, stop: Sequence[str] = ()) -> str:
        return str(await run_async(self._public("complete_public", prompt, max_tokens=max_tokens, stop=list(stop))))


class _Encode(ProcessEngine):
    """Has a tokenizer for public text."""

    def encode(self, text: str) -> list[Token]:
        return list(self._now("encode", text))


class _Continued(ProcessEngine):
    """Has a tokenizer that may add a space before public text, and can leave it out."""

    def continued(self, text: str) -> list[Token]:
        return list(self._now("continued", text))


class _Spell(ProcessEngine):
    """Says which tokens a public text has, where its tokenizer is known."""

    def spell(self, text: str) -> list[Token]:
        return list(self._now("spell", text))


class _TokenBytes(ProcessEngine):
    """Spells its tokens in bytes; each is asked for once."""

    def token_bytes(self, token: Token) -> bytes:
        known: dict[Token, bytes] = self._facts.setdefault("token_bytes", {})
        if token not in known:
            known[token] = bytes(self._now("token_bytes", token))
        return known[token]


class _CheckPublic(ProcessEngine):
    """Refuses public prompts that it would cut."""

    def check_public(self, prompt: str) -> None:
        self._now("check_public", prompt)


class ProcessEmbeddings(ProcessEngine, SilentEmbeddings):
    """Embeddings in a process of their own, for everything that takes `SilentEmbeddings`."""

    @property
    def dimension(self) -> int:
        """How many numbers a row has."""
        return int(self._facts["dimension"])

    @property
    def is_sparse(self) -> bool:
        """Whether rows are mostly zeros, as the probe saw it."""
        return bool(self._facts["is_sparse"])

    def start_calls(self) -> None:
        """Does nothing: the calls have threads in their own process."""

    def check_silent(self) -> None:
        """Does nothing: what hears the calls is looked for in their own process."""

    def rows(self, texts: Sequence[OpaqueValue[str]]) -> Rows:
        """Returns float64[texts, dimension] for PRIVATE texts; a failed row is zeros."""
        return run_sync(self._embedded(texts))

    async def arows(self, texts: Sequence[OpaqueValue[str]]) -> Rows:
        """Async twin of `rows`."""
        return await run_async(self._embedded(texts))

    def public(self, texts: Sequence[str]) -> Rows:
        """Returns float64[texts, dimension] for PUBLIC texts."""
        return run_sync(self._public("public", list(texts)))

    async def apublic(self, texts: Sequence[str]) -> Rows:
        """Async twin of `public`."""
        return await run_async(self._public("public", list(texts)))

    def _embedded(self, texts: Sequence[OpaqueValue[str]]) -> EffectGenerator[Rows]:
        whole, rows = yield from self._rows("rows", list(texts))
        return _stacked(whole, rows, self.dimension, 0.0)


_SKILLS: Mapping[str, type[ProcessEngine]] = {
    "embeddings": ProcessEmbeddings,
    "full": _Full,
    "first tokens": _FirstTokens,
    "tokens": _Tokens,
    "other": _Other,
    "public choices": _PublicChoices,
    "choices": _Choices,
    "complete_public": _PublicTexts,
    "texts": _Texts,
    "encode": _Encode,
    "continued": _Continued,
    "spell": _Spell,
    "token_bytes": _TokenBytes,
    "check_public": _CheckPublic,
}
"""Classes by capability; a class stands before its bases."""


def engine_of(client: Client, role: str) -> ProcessEngine:
    """Returns the engine of a process in a role: "tokens", "choices", "text votes", "texts" or "embeddings".

    Raises:
      CapabilityError: the model there has nothing for it.
      DPICLError: what making the engine there raised.
    """
    return _class_of(frozenset(client.facts_of(role)["skills"]))(client, role)


@functools.cache
def _class_of(skills: frozenset[str]) -> type[ProcessEngine]:
    bases: list[type[ProcessEngine]] = []
    for skill, kind in _SKILLS.items():
        if skill in skills and not any(issubclass(base, kind) for base in bases):
            bases.append(kind)
    return type("ProcessEngine", (*bases,), {"__module__": __name__, "__doc__": ProcessEngine.__doc__})


class _Session:
    """Private prompts, hidden, and the released prefix; opened in the process when rows are asked for.

    A row that ended its process alone keeps its place and fails from then on.
    """

    def __init__(
        self, engine: _Tokens, prompts: Sequence[OpaqueValue[Any]], prefix: Sequence[Token], how: Message | None = None
    ) -> None:
        self._engine = engine
        self._prompts: list[OpaqueValue[Any]] | None = list(prompts)
        self._prefix = list(prefix)
        self._how = how
        self._dead: set[int] = set()
        self._at: Connection | None = None
        self._number = -1
        self._pushed = 0
        for token in self._prefix:
            self._check(token)

    def score(self, domain: Sequence[Token]) -> Rows:
        return run_sync(self._scored("score", list(domain), len(domain), 0.0))

    async def ascore(self, domain: Sequence[Token]) -> Rows:
        return await run_async(self._scored("score", list(domain), len(domain), 0.0))

    def push(self, token: Token) -> None:
        """Appends one released token; it is sent with the next request."""
        self._opened()
        self._check(token)
        self._prefix.append(token)

    def close(self) -> None:
        """Drops the prompts, here and in the process."""
        self._prompts = None
        self._leave()

    def _leave(self) -> None:
        """Closes the session there, if its process is still alive."""
        if self._at is not None:
            self._at.post({"does": "close", "session": self._number})
            self._at = None

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # a constructor that raised
            self.close()

    def _opened(self) -> list[OpaqueValue[Any]]:
        if self._prompts is None:
            raise ConfigurationError("this session is closed; open a new one")
        return self._prompts

    def _check(self, token: Token) -> None:
        if type(token) is not type(self._engine.eos):
            raise ConfigurationError(f"expected a token of {self._engine.name}, found another key")

    def _scored(self, method: str, argument: Any, width: int, blank: float) -> EffectGenerator[Rows]:
        """Returns the rows of all prompts; after a crash each is asked for alone."""
        prompts = self._opened()
        living = [place for place in range(len(prompts)) if place not in self._dead]
        answer = yield self._engine._effect(self._request(living, method, argument), len(living))  # noqa: SLF001
        whole = self._settled(answer)
        if whole is not None:
            return self._placed(whole, living, width, blank)
        alone = yield from self._engine._each(  # noqa: SLF001
            lambda place: self._alone([place], method, argument), living
        )
        self._dead |= {place for place, one in zip(living, alone, strict=True) if one is None}
        rows = [None] * len(prompts)
        for place, one in zip(living, alone, strict=True):
            rows[place] = None if one is None else one.reveal()[self._row_of(place)]
        return _stacked(None, rows, width, blank)

    def _settled(self, answer: Answer) -> Any:
        """Returns what came and notes how far the session there is; None after a crash or failure."""
        if answer.kind != "done":
            self._leave()
        return _done(answer)

    def _placed(self, rows: Rows, living: Sequence[int], width: int, blank: float) -> Rows:
        if len(rows) == len(self._opened()):
            return rows
        placed = np.full((len(self._opened()), width), blank)
        placed[living] = rows
        return placed

    def _row_of(self, place: int) -> int:
        """Returns the row of a prompt that was asked for alone."""
        return 0 if self._how is None or self._how["num_rows"] is None else place

    def _request(self, living: Sequence[int], method: str, argument: Any) -> Compose:
        def compose(connection: Connection) -> Message:
            push, how = self._prefix[self._pushed :], None
            if connection is not self._at:
                self._number, push, how = next(_NUMBERS), [], self._opening(living)
            self._at, self._pushed = connection, len(self._prefix)
            return self._message(self._number, how, push, method, argument)

        return compose

    def _alone(self, places: Sequence[int], method: str, argument: Any) -> Compose:
        return lambda _: self._message(next(_NUMBERS), self._opening(places), [], method, argument)

    def _opening(self, places: Sequence[int]) -> Message:
        """Says how a session with some of the prompts is opened; where rows are counted, others keep their places."""
        prompts = self._opened()
        chosen: list[Any] = [prompts[place] for place in places]
        if self._how is not None and self._how["num_rows"] is not None:
            kept = set(places)
            chosen = [prompt if place in kept else None for place, prompt in enumerate(prompts)]
        return {"prompts": chosen, "prefix": list(self._prefix), **(self._how or {})}

    def _message(self, number: int, how: Message | None, push: list[Token], method: str, argument: Any) -> Message:
        return {
            "does": "session",
            "role": self._engine._role,  # noqa: SLF001  its own module
            "session": number,
            "open": how,
            "push": push,
            "method": method,
            "arguments": () if argument is _NOTHING else (argument,),
        }


_NOTHING: Any = object()


class _FullSession(_Session):
    """A session that sees the whole vocabulary, and the public prompt too."""

    def public(self) -> NDArray[np.float64]:
        return run_sync(self._public())

    async def apublic(self) -> NDArray[np.float64]:
        return await run_async(self._public())

    def logits(self, columns: NDArray[np.int64] | None = None) -> Rows:
        return run_sync(self._scored("logits", columns, self._width(columns), np.nan))

    async def alogits(self, columns: NDArray[np.int64] | None = None) -> Rows:
        return await run_async(self._scored("logits", columns, self._width(columns), np.nan))

    def _width(self, columns: NDArray[np.int64] | None) -> int:
        return len(self._engine.vocabulary()) if columns is None else len(columns)

    def _public(self) -> EffectGenerator[NDArray[np.float64]]:
        """Returns the public row; after a crash from a session without private prompts, which has the same bits."""
        engine = self._engine
        living = [place for place in range(len(self._opened())) if place not in self._dead]
        asked = self._request(living, "public", _NOTHING)
        answer = yield engine._effect(asked, len(living), is_public=True)  # noqa: SLF001
        logits = self._settled(answer)
        if logits is None:
            answer = yield from engine._apart(self._alone([], "public", _NOTHING))  # noqa: SLF001
            logits = engine._client.public_value(answer)  # noqa: SLF001
        found: NDArray[np.float64] = logits
        return found


_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
_EXPECTED = (
    '"provider:model" as LangChain\'s init_chat_model takes it, an importable function that makes a model, or its name '
    '"package.module:function"'
)


class PrivateProcess(Uncopyable):
    """A model in a spawned, clean interpreter, to be handed in where a model or embeddings go (`llm=`, `embeddings=`).

    Prompts go there through a pipe and rows come back. Nothing that watches this process (tracing, logging, callbacks,
    patched SDKs) sees private calls, and environment variables that start instrumentation are not inherited. What is
    checked of any model is checked there. One object is one process; threads and event loops share it, and a forked
    process starts another. It ends with the object, with `close`, and with this process.

    Formal guarantees:
      - Rows are those of the same model in this process, bit by bit.
      - If the process ends, or does not answer in time, another one is started, and each row that was under way is
        asked for once more, alone. A row that fails then abstains, as a failed call does. A public call is made once
        more too, alone, and raises ModelCallError where that fails: a record whose row ends the process fails no call
        of anybody else.

    Args:
      model: "provider:model", made by LangChain's `init_chat_model` (embeddings: `init_embeddings`); or an importable
        function (or class) that returns a LangChain model, embeddings or an engine, or its name
        "package.module:function", or that of a model made there. A first part with a dot is a module; one without is a
        module only where LangChain makes nothing of the name.
      retry: how long each row's call is waited for, there; an answer takes at most `max_attempts` times
        `deadline + max_wait` seconds for every 32 rows (or `max_concurrency`), then the process is killed.
      arguments: keyword arguments of `init_chat_model` or of the function: text, numbers, lists and dicts of them.

    Raises:
      ConfigurationError: `model` is none of these, or an argument cannot be sent.

    >>> from langchain_dpicl import EmbeddedLLM
    >>> with PrivateProcess(EmbeddedLLM) as llm:
    ...     llm.engine("texts").complete(["one and one is"], max_tokens=2) == EmbeddedLLM().backend.complete(
    ...         ["one and one is"], max_tokens=2
    ...     )
    True
    """

    _pickle_advice = "it has a process of its own. Make another one where it is needed"

    def __init__(
        self, model: str | Callable[..., Any], /, *, retry: RetryPolicy | None = None, **arguments: Any
    ) -> None:
        name, function = _named(model)
        retry = RetryPolicy() if retry is None else retry
        if not isinstance(retry, RetryPolicy):
            raise ConfigurationError(
                f"PrivateProcess.retry: expected a RetryPolicy, found {type(retry).__name__}. "
                "Give RetryPolicy(deadline=60)"
            )
        if bad := sorted(key for key, value in arguments.items() if not _is_plain(value)):
            raise ConfigurationError(
                f"PrivateProcess: expected arguments that are text, numbers, lists and dicts, found others in {bad}. "
                'Make the model in a function, PrivateProcess("package.module:function")'
            )
        self._arguments = OpaqueValue(arguments)  # may be keys
        self._shown = f"{name}:{function}" if function else name
        start = {"model": name, "function": function, "arguments": arguments, "retry": astuple(retry)}
        self._client = Client({**start, "embeds": False}, name=self._shown, retry=retry)
        self._embedder = Client({**start, "embeds": True}, name=self._shown, retry=retry)

    @property
    def model(self) -> str:
        """The name of the model, or of what makes it."""
        return self._shown

    @property
    def options(self) -> Mapping[str, Any]:
        """The arguments that the model is made with, by which a memo tells models apart."""
        return dict(self._arguments.reveal())

    def __repr__(self) -> str:
        return f"PrivateProcess({self._shown!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def engine(self, role: str) -> ProcessEngine:
        """Returns the engine of the model in a role; the first call starts the process.

        Args:
          role: "tokens" (writes token by token), "choices" (chooses among labels), "text votes" (chooses by what it
            writes), "texts" (writes) or "embeddings" (embeds; in another process than the others).

        Raises:
          CapabilityError: the model has nothing for it.
          ConfigurationError: the model cannot be made.
          ModelCallError: the process does not start, or the model cannot be reached.
          UnsilencableModelError: the model cannot be called in silence there either.
        """
        return engine_of(self._embedder if role == "embeddings" else self._client, role)

    def close(self) -> None:
        """Ends the process; later calls of the model are refused."""
        self._client.close()
        self._embedder.close()


def _named(model: object) -> tuple[str, str]:
    """Returns the name of a model and "", or the names of a module and of a function in it."""
    if isinstance(model, str):
        head, sign, tail = model.partition(":")
        if not head or not sign or not tail:
            raise ConfigurationError(f"PrivateProcess: expected {_EXPECTED}, found {model!r}.")
        return (head, tail) if _MODULE.fullmatch(head) else (model, "")
    module, function = (getattr(model, name, None) for name in ("__module__", "__qualname__"))
    if not callable(model) or not isinstance(module, str) or not isinstance(function, str):
        raise ConfigurationError(
            f"PrivateProcess: expected {_EXPECTED}, found an object of {type(model).__name__}. The model is made in "
            "the other process: name it, or hand in the function that makes it"
        )
    found: Any = importlib.import_module(module)
    for part in function.split("."):
        found = getattr(found, part, None)
    if module == "__main__" or found != model:  # each look at a class method makes another object, an equal one
        raise ConfigurationError(
            f"PrivateProcess: expected an importable function, found {function} of {module}, which another process "
            "cannot import. Move it to the top of a module"
        )
    return module, function


def _is_plain(value: object) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True
