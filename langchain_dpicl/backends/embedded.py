"""The small offline default model in numpy: its tables, its next-token rows, and the engine over them."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import chain, pairwise
from pathlib import Path
from typing import TypeGuard

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.backends.base import Rows, Token, cut_at_stop, row_coins
from langchain_dpicl.backends.sync_async import AwaitedInThreads, run_engine
from langchain_dpicl.exceptions import ConfigurationError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

PATTERN = r"\n\n|'(?i:[sdmt]|ll|ve|re)(?!\p{L})| ?\p{L}{1,40}| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]{1,8}|\n|\s"
"""How text is cut before byte pairs are merged; every character belongs to one piece."""

WORDS = re.compile("[a-z]{2,}(?![a-z]|['’]t)")
"""How lower-case text is cut into words for topics; a single letter says nothing, and neither does "won" of "won't"."""

END = 256
"""The blank line: it separates segments, opens every prompt, and ends a text (EOS)."""

LOG_STEP = 1 / 16
"""Stored log-probabilities are multiples of this, rounded down."""

VECTOR_SCALE = 64
"""Directions of words are unit vectors times this, as int8: coarse, so that they pack well."""

GROUP_SCALE = 127
"""Directions of groups are vectors of length 1 or less times this, as int8."""

WEIGHT_SCALE = 255
"""The heaviest word's weight, as uint8."""

NO_WORD = 65535
"""In `token_words`, a token that is not one whole word."""

UNIT = 4096
"""Topics are unit vectors times this, rounded, so that their sums are exact."""

_NO_MEANING = 0.05
"""What a token without a meaning weighs as an answer, beside one that has one."""

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
      unigram: float64[V], sums to 1.
      words: the number of each word that has a topic; `len(words)` stands for all others.
      contributions: float32[words + 1, k] of integers, direction times weight: what a word adds to a topic.
      centre: float64[k], the mean of the unit topics of public passages.
      token_words: int64[V], the word that a token is, in all its spellings; `len(words)` for other tokens.
      groups: int64[V], the group of tokens of like meaning; the last group has none.
      answers: float64[V], what a token weighs as an answer before anything is known; little if it means nothing.
      answer_mass: float64[groups], the sums of `answers`.
      centroids: float32[groups, k] of integers: directions times `GROUP_SCALE`, zeros for the last group.
      topical: float64[V], sums to 1: how often each token that opens a word with a topic is met, common words less.
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
            words = arrays["words"].tobytes().decode().split()
            self.words = {word: number for number, word in enumerate(words)}
            weights = arrays["weights"].astype(np.float32)
            contributions = np.zeros((len(words) + 1, arrays["directions"].shape[1]), np.float32)
            np.multiply(arrays["directions"], weights[:, None], out=contributions[:-1])
            self.contributions: NDArray[np.float32] = contributions
            self.centre: Floats = arrays["centre"].astype(np.float64)
            token_words = arrays["token_words"].astype(np.int64)
            self.token_words: Ints = np.where(token_words == NO_WORD, len(words), token_words)
            centroids = arrays["centroids"].astype(np.float32)
            self.centroids: NDArray[np.float32] = np.vstack([centroids, np.zeros_like(centroids[:1])])
            self.groups: Ints = arrays["groups"].astype(np.int64)
            # Of tokens that are alike otherwise, the commonest is the likeliest answer.
            self.answers: Floats = np.where(self.groups < len(centroids), 1.0, _NO_MEANING) + self.unigram
            mass = np.bincount(self.groups, self.answers, minlength=len(self.centroids))
            self.answer_mass: Floats = np.asarray(mass, np.float64)
        opens = np.array([token.startswith(b" ") for token in self.token_bytes])
        topical = self.unigram * np.append(weights, np.float32(0))[self.token_words] * opens
        self.topical: Floats = topical / max(topical.sum(), np.finfo(np.float64).tiny)
        import tiktoken  # with the tables, which are read on first use

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

    def words_of(self, text: str) -> list[int]:
        """Returns the numbers of the words of `text` that have a topic."""
        found = map(self.words.get, WORDS.findall(text.lower()))
        return [number for number in found if number is not None]

    def topics(self, sums: Floats) -> Floats:
        """Returns float64[rows, k] of integers: unit topics times `UNIT`, less the mean text; zeros where none is.

        Args:
          sums: float64[rows, k], sums of `contributions`.
        """
        centred = unit_rows(sums) - self.centre * np.any(sums, axis=1, keepdims=True)
        return np.asarray(np.rint(unit_rows(centred) * UNIT))

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


def unit_rows(rows: Floats) -> Floats:
    """Scales each row to length 1; a zero row stays zero. The bits of a row depend on that row alone."""
    length = np.sqrt((rows * rows).sum(axis=1))
    return np.asarray(rows / np.where(length > 0, length, 1.0)[:, None])


@cache
def _load() -> ModelTables:
    with resources.as_file(resources.files("langchain_dpicl.backends") / "data" / "model.npz") as shipped:
        return ModelTables(shipped)


def load_tables() -> ModelTables:
    """Returns the shipped tables, read once per process."""
    with _LOADING:
        return _load()


# Every place of the prompt's complete segments whose past matches the present votes for the token that followed there.
# A row that writes is (prior * base + votes) / (prior + total votes): the base is an n-gram, tilted towards the topic
# of the prompt. A row that answers a short field is their product: what a token means, times the examples that gave it.
# Each row is computed from its own tokens by exact integers in floats and by reductions within the row, so it has the
# same bits whatever other rows are in the batch.
NEWLINE = 10

SLACK = 1.0 - 1e-12
"""Rows are shrunk by this, so that rounding never lifts a sum above 1."""

_HEADER = re.compile(r"[^\W\d_][^:\n]{0,30}:")
"""The name of a field, at the start of its line."""

_SHORT = 5
"""Words in a short field, in the median of those that the prompt shows."""

_CONTENT = 4
"""Words of an earlier field that can be asked about."""


@dataclass(frozen=True, kw_only=True)
class Induction:
    """The fixed features of the model; the defaults were chosen on public text (docs/embedded-model.md).

    Attributes:
      longest_match: longer matches count as this many tokens.
      match_base: each matching token multiplies a vote by this.
      topic_vote: a vote is multiplied by exp(topic_vote * cosine of its segment's topic and the present segment's).
      prior: votes of this total weight share a row that writes equally with the base; infinite: nothing is copied.
      writing_tilt: the base of a row that writes is multiplied by exp(writing_tilt * cosine of topic and token).
      examples_share: weight of the complete segments in the topic that a row writes about, beside the present one.
      topical_share: share of words with a topic, whatever stands before, in the base of a row that writes.
      repeat: each time that a word was written, its weight in the base is multiplied by this.
      early_end: the end weighs this share of its weight in the base before the tenth token.
      answer_tilt: an answer's tokens are multiplied by exp(answer_tilt * cosine of topic and token).
      answer_content: a question whose telling words weigh this much, together, tilts half as much as one of many.
      answer_most: cosines of answers level off here: what lies nearest the question is a word of it, not its label.
      answer_same: an example is multiplied by exp(answer_same * (cosine of the two questions - 1/2)), if larger than 1.
      answer_prior: an example as near as the mean one makes its answer more likely by 1 / answer_prior, and by more
        where answers come up again: the share of those that came up once estimates how many are still unseen (Good,
        1953). Infinite: no answer is copied.
      answer_meaning: what a token means counts as this many examples of it.
    """

    longest_match: int = 8
    match_base: float = 6.0
    topic_vote: float = 9.0
    prior: float = 36.0
    writing_tilt: float = 16.0
    examples_share: float = 1.0
    topical_share: float = 0.2
    repeat: float = 0.05
    early_end: float = 0.001
    answer_tilt: float = 15.0
    answer_content: float = 0.5
    answer_most: float = 0.3
    answer_same: float = 18.0
    answer_prior: float = 0.15
    answer_meaning: float = 4.0

    def __post_init__(self) -> None:
        positive = ("longest_match", "match_base", "prior", "answer_content", "answer_most", "answer_prior")
        for name in positive:
            value = getattr(self, name)
            if not value > 0:
                raise ConfigurationError(f"{name}: expected a number above 0, found {value!r}")
        if self.answer_most == float("inf"):
            raise ConfigurationError("answer_most: expected a finite number, found inf; 1 caps almost nothing")


_SHORTEST_TEXT = 10
"""Tokens before an end is as likely as the base says."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One segment of a prompt, read.

    Attributes:
      tokens: END and its tokens.
      topic: float32[k], what the words of its fields add to its topic; the fields' names are not among them.
      question: float32[k], the same of all fields but the last.
      names: the names of its fields; a line without a name is called by its place.
      sizes: how many words each field has.
      asks: whether fields before the last hold something that can be asked about.
      begun: what the last field holds.
    """

    tokens: list[int]
    topic: NDArray[np.float32]
    question: NDArray[np.float32]
    names: list[str]
    sizes: list[int]
    asks: bool
    begun: str

    @classmethod
    def read(cls, tables: ModelTables, text: str) -> Segment:
        """Reads the text between two blank lines."""
        names, values = [], []
        for place, line in enumerate(text.split("\n")):
            header = _HEADER.match(line)
            names.append(header[0] if header else str(place))
            values.append(line[header.end() :] if header else line)
        sizes = [len(value.split()) for value in values]
        earlier, last = tables.words_of(" ".join(values[:-1])), tables.words_of(values[-1])
        added = tables.contributions.take(earlier + last, axis=0)
        topic = np.add.reduce(added, axis=0)
        question = np.add.reduce(added[: len(earlier)], axis=0) if last else topic
        # A text without a small letter, such as N/A, asks on purpose about nothing.
        asks = len(names) > 1 and (max(sizes[:-1]) >= _CONTENT or min(map(_is_capital, values[:-1])))
        return cls([END, *tables.encoding.encode_ordinary(text)], topic, question, names, sizes, asks, values[-1])

    @property
    def is_named(self) -> bool:
        """Whether a field has a name: those of an instruction have none."""
        return any(name.endswith(":") for name in self.names)


def _is_capital(text: str) -> bool:
    return text == text.upper()


def answers(complete: Sequence[Segment], present: Segment) -> bool:
    """Whether the last field is a short one that the prompt asks for: as others show, or else by what stands before."""
    *earlier, last = present.names
    if not earlier:
        return False
    shown = [segment for segment in complete if last in segment.names]
    if not shown:
        return present.asks
    sizes = [(segment.sizes[segment.names.index(last)], sum(segment.sizes)) for segment in shown]
    return 2 * sum(size <= min(_SHORT, everything - size) for size, everything in sizes) >= len(sizes)


@dataclass(frozen=True)
class RowPositions:
    """The state of every row; advancing returns a new one.

    Attributes:
      recent: int64[rows, longest match or n-gram], the latest tokens (-1: before the prompt).
      topic: float64[rows, k], the sum of what the present segment's words add to its topic.
      written: int64[rows, tokens], what the last field holds (-1: less).
      gates: float64[complete segments], how close each is to the present one; see `InductionBatch._gates`.
    """

    recent: Ints
    topic: Floats
    written: Ints
    gates: Floats


class InductionBatch:
    """Private prompts as flat arrays, one row after another; lives as long as its session.

    A row is END and the prompt's tokens; a segment starts at each END. Only complete segments are copied from:
    copying from the one being written would loop.
    """

    def __init__(self, tables: ModelTables, prompts: Sequence[str], induction: Induction) -> None:
        self.tables, self._induction = tables, induction
        texts = [prompt.rstrip(" ").split("\n\n") for prompt in prompts]
        number = {text: place for place, text in enumerate(dict.fromkeys(chain.from_iterable(texts)))}
        read = [Segment.read(tables, text) for text in number]
        order = np.fromiter((number[text] for row in texts for text in row), np.int64)
        self.num_rows = len(texts)
        per_row = np.array([len(row) for row in texts], np.int64)
        segment_row = np.repeat(np.arange(len(texts)), per_row)
        present = np.cumsum(per_row) - 1
        lengths = np.array([len(segment.tokens) for segment in read], np.int64)[order]
        self._tokens = np.fromiter(chain.from_iterable(read[place].tokens for place in order.tolist()), np.int64)
        self._lengths = np.bincount(segment_row, lengths, minlength=self.num_rows).astype(np.int64)
        self._set_sources(np.repeat(segment_row, lengths), (np.cumsum(lengths) - lengths)[present])
        rows = ([read[number[text]] for text in row] for row in texts)
        self._answers = np.array([answers(row[:-1], row[-1]) for row in rows], dtype=bool)
        is_named = np.array([segment.is_named for segment in read], dtype=bool)[order]
        shape = -1, len(tables.centre)
        sums = np.array([segment.topic for segment in read], np.float64).reshape(shape)
        asked = np.array([segment.question for segment in read], np.float64).reshape(shape)
        # What is written of the last field counts by token, so that a prompt and its prefix are one.
        encoded = {place: tables.encoding.encode_ordinary(read[place].begun) for place in set(order[present].tolist())}
        longest = max(map(len, encoded.values()), default=0)
        padded = {place: [-1] * (longest - len(tokens)) + tokens for place, tokens in encoded.items()}
        begun = np.array([padded[place] for place in order[present].tolist()], np.int64)
        begun = begun.reshape(self.num_rows, longest)
        added = {
            place: tables.contributions[tables.token_words[np.array(tokens, np.int64)]].sum(axis=0, dtype=np.float64)
            for place, tokens in encoded.items()
        }
        written = np.array([added[place] for place in order[present].tolist()]).reshape(shape)
        present_sum = asked[order[present]] + written
        topics = tables.topics(sums)[order]
        topics[present] = tables.topics(present_sum)
        self._set_topics(topics, is_named, segment_row, present)
        self._start = self._ends(topics[present], present_sum, begun)
        # A header that is answered ends the prompt; a match must reach back to the line's beginning.
        is_break = (self._start.recent == NEWLINE) | (self._start.recent == END)
        since = np.where(is_break.any(axis=1), is_break[:, ::-1].argmax(axis=1), is_break.shape[1])
        self._header = np.clip(since, 1, induction.longest_match)
        questions = tables.topics(asked)[order]
        self._set_tilt(questions[present], asked[order[present]])
        self._same = self._likeness(questions, present)

    def _likeness(self, questions: Floats, present: Ints) -> Floats:
        """Returns float64[complete segments]: how much more an example counts that is nearly the question itself."""
        complete = np.ones(len(questions), bool)
        complete[present] = False
        alike = self._products(questions[complete], questions[present]) / UNIT**2
        return np.asarray(np.exp(self._induction.answer_same * np.maximum(alike - 0.5, 0.0)))

    def _set_topics(self, topics: Floats, is_named: NDArray[np.bool_], segment_row: Ints, present: Ints) -> None:
        """Separates complete segments from present ones."""
        complete = np.ones(len(topics), bool)
        complete[present] = False
        self._units, self._unit_row, self._unit_is_named = topics[complete], segment_row[complete], is_named[complete]
        self._num_units = np.bincount(self._unit_row, minlength=self.num_rows)
        self._unit_sum = self._sum_by_row(self._units)
        self._unit_lengths = np.einsum("ik,ik->i", self._units, self._units)
        self._sum_lengths = np.einsum("ik,ik->i", self._unit_sum, self._unit_sum)
        self._unit_by_sum = self._products(self._units, self._unit_sum)

    def _products(self, units: Floats, rows: Floats) -> Floats:
        """Returns float64[complete segments]: the product of a vector of each with that of its row; exact for topics.

        Args:
          units: float64[complete segments, k].
          rows: float64[rows, k].
        """
        most = int(self._num_units.max(initial=0))
        if (self._num_units == most).all():
            each = units.reshape(len(rows), most, rows.shape[1])
            return np.asarray(np.einsum("rik,rk->ri", each, rows).reshape(-1))
        borders = np.concatenate([[0], np.cumsum(self._num_units)]).tolist()
        parts = [np.einsum("ik,k->i", units[a:b], row) for (a, b), row in zip(pairwise(borders), rows, strict=True)]
        return np.concatenate(parts)

    def _ends(self, present: Floats, present_sum: Floats, begun: Ints) -> RowPositions:
        ends = np.cumsum(self._lengths)
        width = max(self._induction.longest_match, self.tables.order - 1)
        index = ends[:, None] - np.arange(width, 0, -1)
        inside = index >= (ends - self._lengths)[:, None]
        recent = np.where(inside, self._tokens[np.maximum(index, 0)], -1)
        return RowPositions(recent, present_sum, begun, self._gates(present))

    def _sum_by_row(self, values: Floats) -> Floats:
        """Returns float64[rows, k]: the sums of what belongs to the complete segments of each row."""
        total = np.zeros((self.num_rows, values.shape[1]))
        has_some = self._num_units > 0
        if has_some.any():
            starts = (np.cumsum(self._num_units) - self._num_units)[has_some]
            total[has_some] = np.add.reduceat(values, starts, axis=0)
        return total

    def _set_tilt(self, present: Floats, present_sum: Floats) -> None:
        """Sets float64[rows, groups]: how much more likely the prompt makes the tokens of each group.

        Args:
          present: float64[rows, k], topics of the fields before the last.
          present_sum: float64[rows, k], what their words add.
        """
        options = self._induction
        # What all examples share says nothing of their labels.
        centred = unit_rows(present - self._unit_sum / (self._num_units + 1)[:, None])
        shown = self._sum_by_row((self._gates(present) * self._unit_is_named)[:, None] * self._units)
        about = unit_rows(unit_rows(present) + options.examples_share * unit_rows(shown))
        topic = np.where(self._answers[:, None], centred, about)
        cosine = _cosines(topic, self.tables.centroids)
        most = options.answer_most
        cosine[self._answers] = most * np.tanh(cosine[self._answers] / most)
        # A question of few telling words says little: of none, nothing is likelier.
        heard = np.sqrt((present_sum * present_sum).sum(axis=1)) / (VECTOR_SCALE * WEIGHT_SCALE)
        answering = options.answer_tilt * heard / (heard + options.answer_content)
        weight = np.where(self._answers, answering, options.writing_tilt)
        self._tilt = np.exp(weight[:, None] * cosine)

    def _set_sources(self, row_of: Ints, present_start: Ints) -> None:
        """Lists the places that may vote: all before the present segment."""
        self._sources = np.flatnonzero(np.arange(len(self._tokens)) < present_start[row_of])
        self._source_row = row_of[self._sources]
        self._source_token = self._tokens[self._sources]
        self._source_unit = np.cumsum(self._source_token == END) - 1

    def start(self) -> RowPositions:
        """Returns the end of every prompt."""
        return self._start

    def advance(self, place: RowPositions, tokens: Ints) -> RowPositions:
        """Returns `place` some tokens later: `tokens` int64[rows, tokens]; the same bits as one token after another."""
        tables = self.tables
        words = tables.token_words[tokens]
        topic, gates = place.topic, place.gates
        if (words < len(tables.words)).any():
            topic = topic + tables.contributions[words].sum(axis=1, dtype=np.float64)
            gates = self._gates(tables.topics(topic))
        recent = np.concatenate([place.recent, tokens], axis=1)[:, tokens.shape[1] :]
        return RowPositions(recent, topic, np.concatenate([place.written, tokens], axis=1), gates)

    def rows(self, place: RowPositions, domain: Ints) -> Floats:
        """Returns float64[rows, domain]: next-token probabilities at `place` on distinct token ids."""
        source, length = self._matches(place)
        begins = self._answers & (place.written < 0).all(axis=1)
        if not begins.any():
            return self._writing(place, domain, source, length)
        answered = self._answering(place, domain, source, length)
        if begins.all():
            return answered
        return np.where(begins[:, None], answered, self._writing(place, domain, source, length))

    def _writing(self, place: RowPositions, domain: Ints, source: Ints, length: Floats) -> Floats:
        """Returns the sum of base and votes."""
        row = self._source_row[source]
        votes = self._induction.match_base**length * place.gates[self._source_unit[source]]
        total = np.bincount(row, votes, minlength=self.num_rows)
        share = 1.0 / (self._induction.prior + total)
        rows = np.empty((self.num_rows, len(domain)))
        groups = self.tables.groups[domain]
        for together, base in self._bases(place):
            tilt = self._tilt if len(together) == self.num_rows else self._tilt[together]
            mass = np.bincount(self.tables.groups, base, minlength=tilt.shape[1])
            rows[together] = tilt[:, groups] * base[domain] / (tilt * mass).sum(axis=1)[:, None]
        rows *= (1.0 - total * share)[:, None]
        return (rows + self._votes(domain, row, source, votes * share[row])) * SLACK

    def _answering(self, place: RowPositions, domain: Ints, source: Ints, length: Floats) -> Floats:
        """Returns the product of what a token means and of the examples that gave it, over its sum."""
        tables, options, size = self.tables, self._induction, self.tables.size
        fits = length >= self._header[self._source_row[source]]
        given = self._source_row[source[fits]] * size + self._tokens[self._sources[source[fits]] + 1]
        given, pair, number = np.unique(given, return_inverse=True, return_counts=True)
        row, token = np.divmod(given, size)
        examples = self._source_unit[source[fits]]
        shown = np.bincount(pair, place.gates[examples] * self._same[examples], minlength=len(given))
        once = np.bincount(row[number == 1], minlength=self.num_rows)
        unseen = (once + 0.5) / (np.bincount(row, number, minlength=self.num_rows) + 0.5)  # Good and Turing's estimate
        rows = self._tilt[:, tables.groups[domain]] * tables.answers[domain]
        meant = self._tilt[row, tables.groups[token]]
        weight = meant ** (options.answer_meaning / (options.answer_meaning + number))
        weight *= tables.answers[token] + shown / (options.answer_prior * unseen[row])
        total = (self._tilt * tables.answer_mass).sum(axis=1)
        total += np.bincount(row, weight - meant * tables.answers[token], minlength=self.num_rows)
        column = np.full(size, -1)
        column[domain] = np.arange(len(domain))
        asked = column[token] >= 0
        rows[row[asked], column[token[asked]]] = weight[asked]
        return np.asarray(rows / total[:, None] * SLACK)

    def _votes(self, domain: Ints, row: Ints, source: Ints, votes: Floats) -> Floats:
        """Returns float64[rows, domain]: the sum of the votes for each token."""
        column = np.full(self.tables.size, -1)
        column[domain] = np.arange(len(domain))
        column = column[self._tokens[self._sources[source] + 1]]
        asked = column >= 0
        cells = row[asked] * len(domain) + column[asked]
        counted = np.bincount(cells, votes[asked], minlength=self.num_rows * len(domain))
        return np.asarray(counted.reshape(self.num_rows, len(domain)))

    def _bases(self, place: RowPositions) -> Iterator[tuple[list[int], Floats]]:
        """Yields rows with one past and float64[V]: what is likely after it."""
        tables = self.tables
        past = place.recent[:, 1 - tables.order :]
        state = np.concatenate([self._answers[:, None], past, place.written], axis=1)
        members: dict[tuple[int, ...], list[int]] = {}
        if len(state) and (state == state[0]).all():
            members[tuple(state[0].tolist())] = list(range(len(state)))
        else:
            for row, key in enumerate(state.tolist()):
                members.setdefault(tuple(key), []).append(row)
        for (is_answer, *known), together in members.items():
            base = tables.next_token([token for token in known[: tables.order - 1] if token >= 0])
            if not is_answer:
                base = self._as_text(base, [token for token in known[tables.order - 1 :] if token >= 0])
            yield together, base

    def _as_text(self, base: Floats, written: Sequence[int]) -> Floats:
        """Returns the base of a text: more words with a topic, each about once, and no early end."""
        options, tables = self._induction, self.tables
        base = (1.0 - options.topical_share) * base + options.topical_share * tables.topical
        if written:
            share = np.ones(len(tables.words) + 1)
            np.multiply.at(share, tables.token_words[np.array(written)], options.repeat)
            share[-1] = 1.0
            base *= share[tables.token_words]
        if len(written) < _SHORTEST_TEXT:
            base[END] *= options.early_end
        return np.asarray(base)

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

    def _gates(self, present: Floats) -> Floats:
        """Returns float64[complete segments]: how close each is to its row's present segment; the mean over a row is 1.

        Topics are centred over the row's own segments, which removes the words of the template.

        Args:
          present: float64[rows, k], topics of the present segments.
        """
        row, number = self._unit_row, (self._num_units + 1).astype(np.float64)
        # Of each segment less the mean of all, times their number: exact integers up to 20,000 segments.
        by_sum = np.einsum("ik,ik->i", present, self._unit_sum)
        own = np.einsum("ik,ik->i", present, present)
        here_total, total = by_sum + own, self._sum_lengths + 2.0 * by_sum + own
        alike = self._products(self._units, present)
        there_total = self._unit_by_sum + alike
        here = number**2 * own - 2.0 * number * here_total + total
        number, total = number[row], total[row]
        there = number**2 * self._unit_lengths - 2.0 * number * there_total + total
        product = number**2 * alike - number * (there_total + here_total[row]) + total
        cosine = product / np.sqrt(np.maximum(there * here[row], 1.0))
        cosine *= np.any(present, axis=1, keepdims=True)[row, 0]
        gates = np.exp(self._induction.topic_vote * cosine)
        return np.asarray(gates * self._num_units[row] / np.bincount(row, gates, minlength=self.num_rows)[row])


_BLOCK_ROWS, _BLOCK = 16, 1024


def _cosines(topic: Floats, centroids: NDArray[np.float32]) -> Floats:
    """Returns float64[rows, groups], from products of small integers: exact in float32, in any order."""
    query = np.clip(np.rint(topic * 2 * GROUP_SCALE), -GROUP_SCALE, GROUP_SCALE).astype(np.float32)
    products = np.empty((len(query), len(centroids)), np.float32)
    # In blocks: a large product wakes threads, which on a busy machine takes longer than all the rest.
    step = _BLOCK // min(_BLOCK_ROWS, max(1, len(query)))
    for row in range(0, len(query), _BLOCK_ROWS):
        for group in range(0, len(centroids), step):
            rows, groups = slice(row, row + _BLOCK_ROWS), slice(group, group + step)
            np.matmul(query[rows], centroids[groups].T, out=products[rows, groups])
    return np.asarray(products / (2.0 * GROUP_SCALE**2))


# A real conditional distribution over a full vocabulary: it reads its demonstrations and leaks them verbatim without
# noise (docs/embedded-model.md). Tables are shared; everything of a prompt lives in its session.
BLOCK = 128
"""Prompts handled together where a call brings many."""


class EmbeddedSession:
    """A batch of prompts that grows by the same released tokens; see `backends.base.TokenSession`."""

    def __init__(self, batch: InductionBatch) -> None:
        self._batch: InductionBatch | None = batch
        self._place: RowPositions | None = batch.start()

    def score(self, domain: Sequence[Token]) -> Rows:
        """Returns float64[rows, len(domain)]: next-token probabilities on distinct ids; 0 for anything but a token."""
        batch, place = self._state()
        wanted = _token_ids(domain, batch.tables.size)
        known = wanted >= 0
        if known.all():
            return batch.rows(place, wanted)
        rows = np.zeros((batch.num_rows, len(wanted)))
        rows[:, known] = batch.rows(place, wanted[known])
        return rows

    async def ascore(self, domain: Sequence[Token]) -> Rows:
        """Is `score`, in a worker thread."""
        return await run_engine(lambda: self.score(domain))

    def push(self, token: Token) -> None:
        """Appends one released token to every row; refuses anything but an id of this model."""
        self._extend([token])

    def _extend(self, tokens: Sequence[Token]) -> None:
        batch, place = self._state()
        ids = [_token_id(token, batch.tables.size) for token in tokens]
        if ids:
            self._place = batch.advance(place, np.tile(np.array(ids, np.int64), (batch.num_rows, 1)))

    def close(self) -> None:
        """Drops the prompts; further calls raise ConfigurationError."""
        self._batch = self._place = None

    def _state(self) -> tuple[InductionBatch, RowPositions]:
        if self._batch is None or self._place is None:
            raise ConfigurationError("expected an open session, found a closed one; open another with `model.open`")
        return self._batch, self._place


class EmbeddedModel(AwaitedInThreads):
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
        self._last_public: tuple[str, InductionBatch] | None = None

    def __reduce__(self) -> tuple[Callable[[Induction], EmbeddedModel], tuple[Induction]]:
        """Copies and pickles without the tables, which every process loads for itself."""
        return _restore, (self._induction,)

    @property
    def name(self) -> str:
        """Public name of the model, for reports."""
        return "dpicl-embedded"

    @functools.cached_property
    def tokenizer_fingerprint(self) -> str:
        """Says which tables these are: under others, a token id is another word."""
        manifest = resources.files("langchain_dpicl.backends") / "data" / "manifest.json"
        return hashlib.sha256(str(json.loads(manifest.read_text("utf-8"))["sha256"]).encode()).hexdigest()[:16]

    @property
    def fingerprint(self) -> str:
        """Says which tables and numbers these are: equal engines generate alike, and caches take them for one."""
        return hashlib.sha256(f"{self.tokenizer_fingerprint} {self._induction}".encode()).hexdigest()[:16]

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
        session._extend(prefix)  # noqa: SLF001  of this module
        return session

    def top_tokens(self, prompt: str, prefix: Sequence[Token], *, top_k: int) -> list[tuple[Token, float]]:
        """Returns up to `top_k` (token, probability) pairs after a public prompt, likeliest first."""
        last = self._last_public
        if last is None or last[0] != prompt:
            # A text asks about one prompt token by token; what is read of it is the same each time.
            last = self._last_public = prompt, InductionBatch(self._tables, [prompt], self._induction)
        session = EmbeddedSession(last[1])
        session._extend(prefix)  # noqa: SLF001  of this module
        row = session.score(self.vocabulary())[0]
        session.close()
        best = np.argsort(-row, kind="stable")[: max(top_k, 0)]
        return [(int(token), float(row[token])) for token in best if row[token] > 0]

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

    def generate(
        self,
        prompts: Sequence[str],
        *,
        temperature: float = 0.0,
        rng: np.random.Generator | Sequence[np.random.Generator] | None = None,
    ) -> Iterator[tuple[Ints, Rows]]:
        """Yields without end the next token of every row, int64[rows], and the rows that gave it, float64[rows, V].

        Args:
          prompts: public.
          temperature: 0 takes the likeliest token.
          rng: coins of the sampling, from one source for all rows or for each; None: from a fresh one.
        """
        if not temperature >= 0:
            raise ConfigurationError(f"expected temperature >= 0, found temperature={temperature}")
        batch = InductionBatch(self._tables, prompts, self._induction)
        place, everything = batch.start(), np.arange(self._tables.size)
        if rng is None:
            from numpy.random import PCG64, Generator

            rng = Generator(PCG64())
        while True:
            rows = batch.rows(place, everything)
            tokens = _choose(rows, temperature, rng)
            yield tokens, rows
            place = batch.advance(place, tokens[:, None])

    def complete(self, prompts: Sequence[str], *, max_tokens: int, stop: Sequence[str] = ()) -> list[str]:
        """Returns one greedy completion per prompt: until EOS, `max_tokens`, or the first stop string (not included).

        The completion of a prompt that ends in a space does not begin with one.
        """
        texts: list[str] = []
        words = [word for word in stop if word]
        for first in range(0, len(prompts), BLOCK):
            block = prompts[first : first + BLOCK]
            written: list[list[int]] = [[] for _ in block]
            running = set(range(len(block)))
            for _, (tokens, _) in zip(range(max_tokens), self.generate(block), strict=False):
                for row in tuple(running):
                    token = int(tokens[row])
                    written[row].append(token)
                    if token == self.eos or (words and any(word in self.decode(written[row]) for word in words)):
                        running.discard(row)
                if not running:
                    break
            for prompt, ids in zip(block, written, strict=True):
                text = cut_at_stop(self.decode(ids), words)
                texts.append(text.removeprefix(" ") if prompt.endswith(" ") else text)
        return texts


def _restore(induction: Induction) -> EmbeddedModel:
    """Rebuilds a copied or unpickled model."""
    return EmbeddedModel(induction=induction)


def _choose(rows: Floats, temperature: float, rng: np.random.Generator | Sequence[np.random.Generator]) -> Ints:
    """Returns the likeliest token of each row, or one drawn from the row at `temperature`."""
    if temperature == 0:
        return np.asarray(rows.argmax(axis=1))
    weights = np.exp((np.log(rows) - np.log(rows.max(axis=1, keepdims=True))) / temperature)
    levels = np.cumsum(weights, axis=1)
    coins = row_coins(rng, len(rows)) * levels[:, -1:]
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
                places[longer] = batch.advance(places[begun], np.full((batch.num_rows, 1), token))
    return np.stack([scores[tokens] for tokens in choices], axis=1) if choices else np.zeros((batch.num_rows, 0))


def _is_token(token: Token, size: int) -> TypeGuard[int]:
    return isinstance(token, int | np.integer) and bool(0 <= token < size)


def _token_ids(domain: Sequence[Token], size: int) -> Ints:
    """Returns int64[domain]: ids, and -1 for what is no token. Plain integers, the usual case, are checked at once."""
    if isinstance(domain, range) and domain.step > 0 and domain.start >= 0 and domain.stop <= size:
        return np.arange(domain.start, domain.stop, domain.step)  # the whole vocabulary, for every public prompt
    ids = np.array(domain) if set(map(type, domain)) == {int} else np.empty(0)
    if ids.dtype != np.int64:  # other types, or integers beyond 64 bits
        return np.array([token if _is_token(token, size) else -1 for token in domain], np.int64)
    return np.where((ids >= 0) & (ids < size), ids, -1)


def _token_id(token: Token, size: int) -> int:
    if not _is_token(token, size):
        raise ConfigurationError(f"expected a token id of the embedded model (0 to {size - 1}), found another value")
    return int(token)
