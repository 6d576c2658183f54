"""The small offline default model as an engine, in numpy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import TypeGuard

import numpy as np
from numpy.random import PCG64, Generator

from langchain_dpicl.backends._embedded_induction import Batch, Induction, Place
from langchain_dpicl.backends._embedded_tables import END, Floats, Ints, load_tables
from langchain_dpicl.backends.base import Rows, Token
from langchain_dpicl.exceptions import ConfigurationError

__all__ = ["EmbeddedModel", "EmbeddedSession", "Induction"]

# A real conditional distribution over a full vocabulary: it reads its demonstrations, leaks them verbatim without
# noise, and is a toy otherwise (docs/embedded-model.md). Tables are shared; everything of a prompt lives in its
# session.
BLOCK = 64
"""Prompts handled together where a call brings many."""


class EmbeddedSession:
    """A batch of prompts that grows by the same released tokens; see `backends.base.TokenSession`."""

    def __init__(self, batch: Batch) -> None:
        self._batch: Batch | None = batch
        self._place: Place | None = batch.start()

    def score(self, domain: Sequence[Token]) -> Rows:
        """Returns float64[rows, len(domain)]: next-token probabilities on distinct ids; 0 for anything but a token."""
        batch, place = self._state()
        size = batch.tables.size
        wanted = np.array([token if _is_token(token, size) else -1 for token in domain], np.int64)
        known = wanted >= 0
        if known.all():
            return batch.rows(place, wanted)
        rows = np.zeros((batch.num_rows, len(wanted)))
        rows[:, known] = batch.rows(place, wanted[known])
        return rows

    async def ascore(self, domain: Sequence[Token]) -> Rows:
        """Is `score`, in a worker thread."""
        return await asyncio.to_thread(self.score, domain)

    def push(self, token: Token) -> None:
        """Appends one released token to every row; refuses anything but an id of this model."""
        batch, place = self._state()
        self._place = batch.advance(place, np.full(batch.num_rows, _token_id(token, batch.tables.size)))

    def close(self) -> None:
        """Drops the prompts; further calls raise ConfigurationError."""
        self._batch = self._place = None

    def _state(self) -> tuple[Batch, Place]:
        if self._batch is None or self._place is None:
            raise ConfigurationError("expected an open session, found a closed one; open another with `model.open`")
        return self._batch, self._place


class EmbeddedModel:
    r"""The embedded model as an engine: next tokens over the full vocabulary, scored choices, and text.

    Args:
      induction: its few numbers; None for the defaults.

    >>> model = EmbeddedModel()
    >>> prompt = "Word: red\nKind: colour\n\nWord: seven\nKind: number\n\nWord: blue\nKind:"
    >>> model.complete([prompt], max_tokens=2)[0].strip() in {"colour", "number"}
    True
    """

    def __init__(self, *, induction: Induction | None = None) -> None:
        self._tables = load_tables()
        self._induction = induction or Induction()

    def __reduce__(self) -> tuple[Callable[[Induction], EmbeddedModel], tuple[Induction]]:
        """Copies and pickles without the tables, which every process loads for itself."""
        return _restore, (self._induction,)

    @property
    def name(self) -> str:
        """Public name of the model, for reports."""
        return "dpicl-embedded"

    @property
    def max_top_k(self) -> int | None:
        """None: the whole vocabulary is scored."""
        return None

    @property
    def eos(self) -> int:
        """The blank line, which ends a segment: the model writes one segment and stops."""
        return END

    def vocabulary(self) -> Sequence[int]:
        """Returns every token id."""
        return range(self._tables.size)

    def decode(self, tokens: Sequence[Token]) -> str:
        """Returns the text of tokens; EOS gives nothing, bytes that are no UTF-8 are replaced."""
        size = self._tables.size
        pieces = [self._tables.token_bytes[_token_id(token, size)] for token in tokens if token != END]
        return b"".join(pieces).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """Returns the bytes of one token; EOS has none."""
        return b"" if token == END else self._tables.token_bytes[token]

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text; a blank line is EOS."""
        return self._tables.encoding.encode_ordinary(text)

    def count_tokens(self, text: str) -> int:
        """Returns the number of tokens of a public text."""
        return len(self.encode(text))

    def open(self, prompts: Sequence[str], prefix: Sequence[Token] = ()) -> EmbeddedSession:
        """Starts a session on private prompts, each continued by the released `prefix`.

        Spaces at the end of a prompt are ignored: the model's words start with their space.
        """
        session = EmbeddedSession(Batch(self._tables, prompts, self._induction))
        for token in prefix:
            session.push(token)
        return session

    def top_tokens(self, prompt: str, prefix: Sequence[Token], *, top_k: int) -> list[tuple[Token, float]]:
        """Returns up to `top_k` (token, probability) pairs after a public prompt, likeliest first; whole UTF-8 only."""
        session = self.open([prompt], prefix)
        row = np.where(self._tables.readable, session.score(self.vocabulary())[0], 0.0)
        session.close()
        best = np.argsort(-row, kind="stable")[: max(top_k, 0)]
        return [(int(token), float(row[token])) for token in best if row[token] > 0]

    async def atop_tokens(self, prompt: str, prefix: Sequence[Token], *, top_k: int) -> list[tuple[Token, float]]:
        """Is `top_tokens`, in a worker thread."""
        return await asyncio.to_thread(self.top_tokens, prompt, prefix, top_k=top_k)

    def score_choices(self, prompts: Sequence[str], choices: Sequence[str]) -> Rows:
        """Returns float64[prompts, choices]: log-likelihood of each choice as the continuation of each prompt.

        A space is read between the two if the prompt ends or the choice starts with one.
        """
        rows = np.zeros((len(prompts), len(choices)))
        for spaced in (False, True):
            members = [row for row, prompt in enumerate(prompts) if prompt.endswith(" ") == spaced]
            texts = [f" {choice.lstrip(' ')}" if spaced else choice for choice in choices]
            tokens = [tuple(self._tables.encoding.encode_ordinary(text)) for text in texts]
            for first in range(0, len(members), BLOCK):
                block = members[first : first + BLOCK]
                batch = Batch(self._tables, [prompts[row] for row in block], self._induction)
                rows[block] = _log_likelihoods(batch, tokens)
        return rows

    async def ascore_choices(self, prompts: Sequence[str], choices: Sequence[str]) -> Rows:
        """Is `score_choices`, in a worker thread."""
        return await asyncio.to_thread(self.score_choices, prompts, choices)

    def generate(
        self,
        prompts: Sequence[str],
        *,
        temperature: float = 0.0,
        rng: Generator | None = None,
    ) -> Iterator[tuple[Ints, Rows]]:
        """Yields, for ever, the next token of every row int64[rows] and the rows float64[rows, V] it was taken from."""
        if not temperature >= 0:
            raise ConfigurationError(f"expected temperature >= 0, found temperature={temperature}")
        batch = Batch(self._tables, prompts, self._induction)
        place, everything = batch.start(), np.arange(self._tables.size)
        rng = rng or Generator(PCG64())
        while True:
            rows = batch.rows(place, everything)
            tokens = _choose(rows, temperature, rng)
            yield tokens, rows
            place = batch.advance(place, tokens)

    def complete(
        self,
        prompts: Sequence[str],
        *,
        max_tokens: int,
        stop: Sequence[str] = (),
        temperature: float = 0.0,
        rng: Generator | None = None,
    ) -> list[str]:
        """Returns one completion per prompt: until EOS, `max_tokens`, or the first stop string (not included)."""
        texts: list[str] = []
        for first in range(0, len(prompts), BLOCK):
            block = prompts[first : first + BLOCK]
            texts += self._complete(block, max_tokens, stop, self.generate(block, temperature=temperature, rng=rng))
        return texts

    def _complete(
        self, prompts: Sequence[str], max_tokens: int, stop: Sequence[str], steps: Iterator[tuple[Ints, Rows]]
    ) -> list[str]:
        """Follows `steps` until every prompt has ended."""
        written: list[list[int]] = [[] for _ in prompts]
        running = set(range(len(prompts)))
        while running and max_tokens > 0:
            max_tokens -= 1
            tokens, _ = next(steps)
            for row in tuple(running):
                token = int(tokens[row])
                written[row].append(token)
                if token == END or (stop and any(word in self.decode(written[row]) for word in stop)):
                    running.discard(row)
        texts = [cut(self.decode(tokens), stop) for tokens in written]
        return [
            text.removeprefix(" ") if prompt.endswith(" ") else text
            for prompt, text in zip(prompts, texts, strict=True)
        ]

    async def acomplete(
        self,
        prompts: Sequence[str],
        *,
        max_tokens: int,
        stop: Sequence[str] = (),
        temperature: float = 0.0,
        rng: Generator | None = None,
    ) -> list[str]:
        """Is `complete`, in a worker thread."""
        return await asyncio.to_thread(
            self.complete, prompts, max_tokens=max_tokens, stop=stop, temperature=temperature, rng=rng
        )


def _restore(induction: Induction) -> EmbeddedModel:
    """Rebuilds a copied or unpickled model."""
    return EmbeddedModel(induction=induction)


def cut(text: str, stop: Sequence[str]) -> str:
    """Returns the text before the first stop string."""
    places = [place for word in stop if word and (place := text.find(word)) >= 0]
    return text[: min(places)] if places else text


def _choose(rows: Floats, temperature: float, rng: np.random.Generator) -> Ints:
    """Returns the likeliest token of each row, or one drawn from the row at `temperature`."""
    if temperature == 0:
        return np.asarray(rows.argmax(axis=1))
    weights = np.exp((np.log(rows) - np.log(rows.max(axis=1, keepdims=True))) / temperature)
    levels = np.cumsum(weights, axis=1)
    coins = rng.random((len(rows), 1)) * levels[:, -1:]
    return np.asarray((levels <= coins).sum(axis=1))


def _log_likelihoods(batch: Batch, choices: Sequence[tuple[int, ...]]) -> Floats:
    """Returns float64[rows, choices]; the choices form a tree, so that shared beginnings are scored once."""
    followers: dict[tuple[int, ...], dict[int, None]] = {}
    for tokens in choices:
        for length, token in enumerate(tokens):
            followers.setdefault(tokens[:length], {})[token] = None
    places: dict[tuple[int, ...], Place] = {(): batch.start()}
    scores: dict[tuple[int, ...], Floats] = {(): np.zeros(batch.num_rows)}
    for begun in sorted(followers, key=len):
        domain = np.array(list(followers[begun]))
        rows = np.log(batch.rows(places[begun], domain))
        for column, token in enumerate(domain.tolist()):
            longer = (*begun, token)
            scores[longer] = scores[begun] + rows[:, column]
            if longer in followers:
                places[longer] = batch.advance(places[begun], np.full(batch.num_rows, token))
    return np.stack([scores[tokens] for tokens in choices], axis=1) if choices else np.zeros((batch.num_rows, 0))


def _is_token(token: Token, size: int) -> TypeGuard[int]:
    """Whether `token` is an id of the vocabulary."""
    return isinstance(token, int | np.integer) and bool(0 <= token < size)


def _token_id(token: Token, size: int) -> int:
    """Returns the id, or refuses what is none."""
    if not _is_token(token, size):
        raise ConfigurationError(f"expected a token id of the embedded model (0 to {size - 1}), found another value")
    return int(token)
