"""The small offline default model in numpy: its tables, its next-token rows, and the engine over them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import chain, pairwise
from pathlib import Path
from typing import TypeGuard

import numpy as np
import tiktoken
from numpy.random import PCG64, Generator
from numpy.typing import NDArray

from langchain_dpicl.backends.base import Rows, Token
from langchain_dpicl.exceptions import ConfigurationError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

PATTERN = r"\n\n|'(?i:[sdmt]|ll|ve|re)(?!\p{L})| ?\p{L}{1,40}| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]{1,8}|\n|\s"
"""How text is cut before byte pairs are merged; every character belongs to one piece."""

END = 256
"""The blank line: it separates segments, opens every prompt, and ends a text (EOS)."""

LOG_STEP = 1 / 16
"""Stored log-probabilities are multiples of this, rounded down."""

VECTOR_SCALE = 254
"""Directions are unit vectors times this, as int8 (a coordinate beyond one half is cut)."""

WEIGHT_SCALE = 255
"""The heaviest token's topic weight, as uint8."""

_LOADING = threading.Lock()


@dataclass(frozen=True)
class NgramLevel:
    """The n-grams of one order as children of the order below: parent i owns entries starts[i] to starts[i + 1]."""

    starts: Ints
    tokens: NDArray[np.uint16]
    probabilities: Floats


class ModelTables:
    """Read-only arrays; one instance serves every model and thread.

    Attributes:
      encoding: the byte-pair vocabulary.
      token_bytes: the bytes of each token.
      readable: bool[V], whether those bytes are complete UTF-8.
      unigram: float64[V], sums to 1.
      groups: int64[V], the topic group of each token; the last group has no topic.
      centroids: float32[groups, k] of integers: unit vectors times `VECTOR_SCALE`, zeros for the last group.
      contributions: float32[V, k] of integers, direction times weight: what a token adds to its segment's topic.
    """

    def __init__(self, path: Path) -> None:
        with np.load(path, allow_pickle=False) as arrays:
            text, lengths = arrays["token_bytes"].tobytes(), arrays["token_lengths"]
            borders = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).tolist()
            self.token_bytes: tuple[bytes, ...] = tuple(text[first:last] for first, last in pairwise(borders))
            unigram = arrays["unigram"].astype(np.float64)
            self.unigram: Floats = unigram / unigram.sum()
            self._levels: list[NgramLevel] = []
            while (order := len(self._levels) + 2) and f"tokens{order}" in arrays:
                self._levels.append(
                    NgramLevel(
                        np.concatenate([[0], np.cumsum(arrays[f"children{order}"], dtype=np.int64)]),
                        arrays[f"tokens{order}"],
                        np.exp(-LOG_STEP * arrays[f"steps{order}"].astype(np.float64)),
                    )
                )
            centroids = arrays["centroids"].astype(np.float32)
            self.centroids: NDArray[np.float32] = np.vstack([centroids, np.zeros_like(centroids[:1])])
            self.groups: Ints = arrays["groups"].astype(np.int64)
            weights = arrays["weights"].astype(np.float32)
            self.contributions: NDArray[np.float32] = arrays["directions"] * weights[:, None]
        self.readable = np.array([_is_text(token) for token in self.token_bytes])
        self.encoding = tiktoken.Encoding(
            "dpicl-embedded",
            pat_str=PATTERN,
            mergeable_ranks={token: rank for rank, token in enumerate(self.token_bytes)},
            special_tokens={},
        )

    @property
    def size(self) -> int:
        """Number of tokens."""
        return len(self.token_bytes)

    @property
    def order(self) -> int:
        """The longest n-gram."""
        return len(self._levels) + 1

    def next_token(self, context: Sequence[int]) -> Floats:
        """Returns float64[V]: the interpolated n-gram distribution after `context` (at most order - 1 tokens count)."""
        row = self.unigram.copy()
        for length in range(1, self.order):
            if length > len(context):
                break
            entries = self._entries(context[len(context) - length :])
            if entries is None:
                continue
            level = self._levels[length - 1]
            continuations = level.probabilities[entries]
            row *= 1.0 - continuations.sum()
            row[level.tokens[entries]] += continuations
        return row

    def _entries(self, context: Sequence[int]) -> slice | None:
        """Returns the trie entries that continue `context`, or None where it was never seen."""
        node = int(context[0])
        for level, token in zip(self._levels, context[1:], strict=False):
            first, last = level.starts[node], level.starts[node + 1]
            node = int(first + np.searchsorted(level.tokens[first:last], token))
            if node == last or level.tokens[node] != token:
                return None
        starts = self._levels[len(context) - 1].starts
        return slice(int(starts[node]), int(starts[node + 1])) if starts[node] < starts[node + 1] else None


def _is_text(token: bytes) -> bool:
    """Whether bytes are complete UTF-8."""
    try:
        token.decode()
    except UnicodeDecodeError:
        return False
    return True


@cache
def _load(path: Path) -> ModelTables:
    return ModelTables(path)


def load_tables(path: Path | None = None) -> ModelTables:
    """Returns the shipped tables (or those at `path`), read once per process."""
    with _LOADING:
        if path is not None:
            return _load(path)
        with resources.as_file(resources.files("langchain_dpicl.backends") / "data" / "model.npz") as shipped:
            return _load(shipped)


# A row is (prior * base + votes) / (prior + total votes). The base is an n-gram tilted towards the topic of the present
# segment; a vote comes from every place of the prompt's complete segments whose past matches the present. Each row is
# computed from its own tokens by exact integers in floats and by reductions within the row, so it has the same bits
# whatever other rows are in the batch.
NEWLINE = 10
UNIT = 4096
"""Topics of segments are unit vectors times this, rounded, so that their sums are exact."""

SLACK = 1.0 - 1e-12
"""Rows are shrunk by this, so that rounding never lifts a sum above 1."""


@dataclass(frozen=True, kw_only=True)
class Induction:
    """The fixed features of the model; the defaults were chosen on public text.

    Attributes:
      longest_match: longer matches count as this many tokens.
      match_base: each matching token multiplies a vote by this.
      topic_vote: a vote is multiplied by exp(topic_vote * cosine of its segment's topic and the present segment's).
      topic_tilt: the base is multiplied by exp(topic_tilt * cosine of the present segment's topic and the token's).
      prior: votes of this total weight share a row equally with the base; infinite: nothing is copied.
    """

    longest_match: int = 8
    match_base: float = 6.0
    topic_vote: float = 6.0
    topic_tilt: float = 2.0
    prior: float = 36.0


@dataclass(frozen=True)
class RowPositions:
    """The state of every row; advancing returns a new one.

    Attributes:
      recent: int64[rows, longest_match], the latest tokens (-1: before the prompt).
      topic: float64[rows, k], the topic sum of the present segment.
    """

    recent: Ints
    topic: Floats


class InductionBatch:
    """Private prompts as flat arrays, one row after another; lives as long as its session.

    A row is END and the prompt's tokens; a segment starts at each END. Only complete segments are copied from:
    copying from the one being written would loop.
    """

    def __init__(self, tables: ModelTables, prompts: Sequence[str], induction: Induction) -> None:
        self.tables, self._induction = tables, induction
        encode = tables.encoding.encode_ordinary
        rows = [[END, *encode(prompt.rstrip(" "))] for prompt in prompts]
        self.num_rows = len(rows)
        self._lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        self._tokens = np.fromiter(chain.from_iterable(rows), np.int64, int(self._lengths.sum()))
        row_of = np.repeat(np.arange(len(rows)), self._lengths)
        starts = np.flatnonzero(self._tokens == END)
        segment_row = row_of[starts]
        present = np.searchsorted(segment_row, np.arange(len(rows)), side="right") - 1
        self._set_topics(starts, segment_row, present)
        self._set_sources(row_of, starts[present])

    def _set_topics(self, starts: Ints, segment_row: Ints, present: Ints) -> None:
        """Sums what each segment's tokens add to its topic, and separates complete segments from present ones."""
        contributions = self.tables.contributions
        borders = [*starts.tolist(), len(self._tokens)]
        sums = np.zeros((len(starts), contributions.shape[1]))
        for segment, (first, last) in enumerate(pairwise(borders)):
            sums[segment] = contributions[self._tokens[first:last]].sum(axis=0)
        complete = np.ones(len(starts), bool)
        complete[present] = False
        self._units, self._unit_row = _unit(sums[complete]), segment_row[complete]
        self._num_units = np.bincount(self._unit_row, minlength=self.num_rows)
        self._unit_sum = np.zeros((self.num_rows, sums.shape[1]))
        np.add.at(self._unit_sum, self._unit_row, self._units)
        self._topic = sums[present]
        self._tilt = _tilt(self.tables, self._topic, self._induction.topic_tilt)

    def _set_sources(self, row_of: Ints, present_start: Ints) -> None:
        """Lists the places that may vote: all before the present segment."""
        self._sources = np.flatnonzero(np.arange(len(self._tokens)) < present_start[row_of])
        self._source_row = row_of[self._sources]
        self._source_token = self._tokens[self._sources]
        self._source_unit = np.cumsum(self._source_token == END) - 1

    def start(self) -> RowPositions:
        """Returns the end of every prompt."""
        ends = np.cumsum(self._lengths)
        index = ends[:, None] - np.arange(self._induction.longest_match, 0, -1)
        inside = index >= (ends - self._lengths)[:, None]
        return RowPositions(np.where(inside, self._tokens[np.maximum(index, 0)], -1), self._topic)

    def advance(self, place: RowPositions, tokens: Ints) -> RowPositions:
        """Returns `place` one token later: `tokens` int64[rows]."""
        recent = np.concatenate([place.recent[:, 1:], tokens[:, None]], axis=1)
        return RowPositions(recent, place.topic + self.tables.contributions[tokens])

    def rows(self, place: RowPositions, domain: Ints) -> Floats:
        """Returns float64[rows, domain]: next-token probabilities at `place` on distinct token ids."""
        source, length = self._matches(place)
        row = self._source_row[source]
        votes = self._induction.match_base**length * self._gates(place)[self._source_unit[source]]
        total = np.bincount(row, votes, minlength=self.num_rows)
        share = 1.0 / (self._induction.prior + total)
        rows = self._base(place, domain) * (1.0 - total * share)[:, None]
        column = np.full(self.tables.size, -1)
        column[domain] = np.arange(len(domain))
        column = column[self._tokens[self._sources[source] + 1]]
        asked = column >= 0
        cells = row[asked] * len(domain) + column[asked]
        rows += np.bincount(cells, (votes * share[row])[asked], minlength=rows.size).reshape(rows.shape)
        return rows * SLACK

    def _base(self, place: RowPositions, domain: Ints) -> Floats:
        """Returns float64[rows, domain]: the tilted n-gram; rows with the same recent tokens share its lookup."""
        tables = self.tables
        members: dict[tuple[int, ...], list[int]] = {}
        for row, past in enumerate(place.recent[:, 1 - tables.order :].tolist()):
            members.setdefault(tuple(past), []).append(row)
        rows = np.empty((self.num_rows, len(domain)))
        groups = tables.groups[domain]
        for past, together in members.items():
            ngram = tables.next_token([token for token in past if token >= 0])
            tilt = self._tilt if len(members) == 1 else self._tilt[together]
            mass = np.bincount(tables.groups, ngram, minlength=tilt.shape[1])
            total = (tilt * mass).sum(axis=1)
            rows[together] = tilt[:, groups] * ngram[domain] / total[:, None]
        return rows

    def _matches(self, place: RowPositions) -> tuple[Ints, Floats]:
        """Returns the sources whose token is the latest one, and how many tokens of their past match within a line."""
        source = np.flatnonzero(self._source_token == place.recent[self._source_row, -1])
        index, row = self._sources[source], self._source_row[source]
        length = np.ones(len(source))
        alive = np.arange(len(source))
        for back in range(1, self._induction.longest_match):
            # A match ends where its line begins: else template words would outweigh the topic.
            opener = self._tokens[index[alive] - back + 1]
            alive = alive[(opener != NEWLINE) & (opener != END)]
            alive = alive[self._tokens[index[alive] - back] == place.recent[row[alive], -1 - back]]
            if not len(alive):
                break
            length[alive] += 1
        return source, length

    def _gates(self, place: RowPositions) -> Floats:
        """Returns float64[complete segments]: how close each is to its row's present segment; the mean over a row is 1.

        Topics are centred over the row's own segments, which removes the words of the template.
        """
        row, number = self._unit_row, self._num_units + 1
        present = _unit(place.topic)
        total = self._unit_sum + present
        here = number[:, None] * present - total
        there = number[row, None] * self._units - total[row]
        lengths = (there * there).sum(axis=1) * (here * here).sum(axis=1)[row]
        cosine = (there * here[row]).sum(axis=1) / np.sqrt(np.maximum(lengths, 1.0))
        gates = np.exp(self._induction.topic_vote * cosine)
        return np.asarray(gates * self._num_units[row] / np.bincount(row, gates, minlength=self.num_rows)[row])


def _unit(sums: Floats) -> Floats:
    """Scales rows to length `UNIT` and rounds; a zero row stays zero."""
    length = np.sqrt((sums * sums).sum(axis=1))
    return np.asarray(np.rint(sums * (UNIT / np.maximum(length, 1.0))[:, None]))


def _tilt(tables: ModelTables, topic: Floats, strength: float) -> Floats:
    """Returns float64[rows, groups]: exp(strength * cosine), from products of small integers, exact in float32."""
    length = np.sqrt((topic * topic).sum(axis=1))
    query = np.clip(np.rint(topic * (VECTOR_SCALE / np.maximum(length, 1.0))[:, None]), -127, 127).astype(np.float32)
    # Not a matrix product: threaded BLAS on a busy machine takes longer than all the rest.
    cosine = np.einsum("rk,gk->rg", query, tables.centroids).astype(np.float64) / VECTOR_SCALE**2
    return np.asarray(np.exp(strength * cosine))


# A real conditional distribution over a full vocabulary: it reads its demonstrations, leaks them verbatim without
# noise, and is a toy otherwise (docs/embedded-model.md). Tables are shared; everything of a prompt lives in its
# session.
BLOCK = 64
"""Prompts handled together where a call brings many."""


class EmbeddedSession:
    """A batch of prompts that grows by the same released tokens; see `backends.base.TokenSession`."""

    def __init__(self, batch: InductionBatch) -> None:
        self._batch: InductionBatch | None = batch
        self._place: RowPositions | None = batch.start()

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

    def _state(self) -> tuple[InductionBatch, RowPositions]:
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
        session = EmbeddedSession(InductionBatch(self._tables, prompts, self._induction))
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
                batch = InductionBatch(self._tables, [prompts[row] for row in block], self._induction)
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
        batch = InductionBatch(self._tables, prompts, self._induction)
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
        texts = [cut_at_stop(self.decode(tokens), stop) for tokens in written]
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


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
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


def _log_likelihoods(batch: InductionBatch, choices: Sequence[tuple[int, ...]]) -> Floats:
    """Returns float64[rows, choices]; the choices form a tree, so that shared beginnings are scored once."""
    followers: dict[tuple[int, ...], dict[int, None]] = {}
    for tokens in choices:
        for length, token in enumerate(tokens):
            followers.setdefault(tokens[:length], {})[token] = None
    places: dict[tuple[int, ...], RowPositions] = {(): batch.start()}
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
