"""Computes next-token rows of the embedded model for a batch of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np

from langchain_dpicl.backends._embedded_tables import END, VECTOR_SCALE, Floats, Ints, Tables

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
class Place:
    """The state of every row; advancing returns a new one.

    Attributes:
      recent: int64[rows, longest_match], the latest tokens (-1: before the prompt).
      topic: float64[rows, k], the topic sum of the present segment.
    """

    recent: Ints
    topic: Floats


class Batch:
    """Private prompts as flat arrays, one row after another; lives as long as its session.

    A row is END and the prompt's tokens; a segment starts at each END. Only complete segments are copied from:
    copying from the one being written would loop.
    """

    def __init__(self, tables: Tables, prompts: Sequence[str], induction: Induction) -> None:
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

    def start(self) -> Place:
        """Returns the end of every prompt."""
        ends = np.cumsum(self._lengths)
        index = ends[:, None] - np.arange(self._induction.longest_match, 0, -1)
        inside = index >= (ends - self._lengths)[:, None]
        return Place(np.where(inside, self._tokens[np.maximum(index, 0)], -1), self._topic)

    def advance(self, place: Place, tokens: Ints) -> Place:
        """Returns `place` one token later: `tokens` int64[rows]."""
        recent = np.concatenate([place.recent[:, 1:], tokens[:, None]], axis=1)
        return Place(recent, place.topic + self.tables.contributions[tokens])

    def rows(self, place: Place, domain: Ints) -> Floats:
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

    def _base(self, place: Place, domain: Ints) -> Floats:
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

    def _matches(self, place: Place) -> tuple[Ints, Floats]:
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

    def _gates(self, place: Place) -> Floats:
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


def _tilt(tables: Tables, topic: Floats, strength: float) -> Floats:
    """Returns float64[rows, groups]: exp(strength * cosine), from products of small integers, exact in float32."""
    length = np.sqrt((topic * topic).sum(axis=1))
    query = np.clip(np.rint(topic * (VECTOR_SCALE / np.maximum(length, 1.0))[:, None]), -127, 127).astype(np.float32)
    # Not a matrix product: threaded BLAS on a busy machine takes longer than all the rest.
    cosine = np.einsum("rk,gk->rg", query, tables.centroids).astype(np.float64) / VECTOR_SCALE**2
    return np.asarray(np.exp(strength * cosine))
