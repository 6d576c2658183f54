"""Builds the tables of the embedded model from listed public text (`python -m ... --corpus CORPUS --out OUT`)."""

from __future__ import annotations

import argparse
import hashlib
import heapq
import json
import logging
import lzma
import re
import zipfile
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import regex  # type: ignore[import-untyped]
import scipy.sparse as sp
import tiktoken
from numpy.typing import NDArray
from scipy.sparse.linalg import svds

from langchain_dpicl.backends.embedded.model import (
    END,
    LOG_STEP,
    PATTERN,
    VECTOR_SCALE,
    WEIGHT_SCALE,
    Floats,
    Ints,
)
from langchain_dpicl.exceptions import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class Source:
    """A work whose statistics are in the tables.

    Attributes:
      work: its title and author.
      repository: where its text was taken from, without "https://".
      commit: all 40 hexadecimal digits of the version that was taken.
      licence: of the text at that commit.
    """

    work: str
    repository: str
    commit: str
    licence: str

    def __post_init__(self) -> None:
        """Refuses a source that cannot be traced."""
        if not (self.work and self.repository and self.licence and re.fullmatch("[0-9a-f]{40}", self.commit)):
            raise ConfigurationError(
                f"expected a work with a repository, a commit of 40 hexadecimal digits and a licence, found {self!r}"
            )


@dataclass(frozen=True, kw_only=True)
class TracedFile:
    """A corpus file whose text was compared with the repositories of its works.

    Attributes:
      sha256: of the compressed file.
      sources: the works in it, at least one.
    """

    sha256: str
    sources: tuple[Source, ...]

    def __post_init__(self) -> None:
        """Refuses a file of unnamed works."""
        if not self.sources:
            raise ConfigurationError("expected at least one source for a corpus file, found none")


# Repository and commit are named because licences change: in 2026 most textbooks of OpenStax went from CC BY to CC BY-
# NC-SA. `NOTICE` names the same works; a test compares the two.
def _openstax(title: str, name: str, commit: str) -> Source:
    return Source(
        work=f"{title}, by OpenStax, Rice University",
        repository=f"github.com/openstax/osbooks-{name}",
        commit=commit,
        licence="CC BY 4.0",
    )


SOURCES: Mapping[str, TracedFile] = {
    "banking77.txt.xz": TracedFile(
        sha256="a7f4f166add712a1004723f206a049c2be98bf4111ab28faf1e83f0c710e4362",
        sources=(
            Source(
                work="Banking77, by Casanueva et al., PolyAI",
                repository="github.com/PolyAI-LDN/task-specific-datasets",
                commit="57ec275d8078af65b7731c2a98be812d844a6d6b",
                licence="CC BY 4.0",
            ),
        ),
    ),
    "books.txt.xz": TracedFile(
        sha256="c32f01eda1f13dba871d8ace98d9d6a6243e79be8a19f838227861ef04132172",
        sources=(
            Source(
                work="Classic Books as Markdown, openings of 753 books",
                repository="github.com/mlschmitt/classic-books-markdown",
                commit="944882722e9a96fa6cf2739dc2ea757e101f412f",
                licence="public domain",
            ),
        ),
    ),
    "openstax_ccby.txt.xz": TracedFile(
        sha256="21d2053213776d53b1342e35d3a4e105d6a244ffa1319f51b0f16acd7f1547b2",
        sources=(
            _openstax("American Government 3e", "american-government", "d8ce50dc1247652027a7d8216918f78bbc8511ed"),
            _openstax("World History 1 and 2", "world-history", "3e17beda9130380d24be881e6d1942dfcc1be845"),
            _openstax("Psychology 2e", "psychology", "e061043bf2f9e86ace51c4e8dc9555160f60a99d"),
            _openstax(
                "Introduction to Sociology 3e", "introduction-sociology", "d35d5f3bdac40f93607d600134865d4f13ce1f9b"
            ),
            _openstax("U.S. History", "us-history", "046331cfcea0ac1b1a8fd461b3e6aae638845af3"),
            _openstax("Astronomy 2e", "astronomy", "63157f370b09c06a4cc12832384aaaf4de1ced3b"),
            _openstax(
                "Introduction to Intellectual Property",
                "introduction-intellectual-property",
                "be76c2d982080df077b6f7f7f784d0bbbc37ee8b",
            ),
            _openstax(
                "Introduction to Business 2e", "introduction-business", "f99a5bb2eeec22a6fb042f8d95435d5b9e5564da"
            ),
        ),
    ),
    "opentrivia.txt.xz": TracedFile(
        sha256="47d45b5f5420f0de5a5d3a009e25828e7dd5542ddde07df5c40bb5cdd21d0d87",
        sources=(
            Source(
                work="OpenTriviaQA, by its contributors",
                repository="github.com/uberspot/OpenTriviaQA",
                commit="dd31530bfbb19f9505b160b89c9df4b1127e3c70",
                licence="CC BY-SA 4.0",
            ),
        ),
    ),
    "wiki_films.txt.xz": TracedFile(
        sha256="7e670d9cf10290b25c1cad10d820fb6bda5db2b451214e090024941521c6f05e",
        sources=(
            Source(
                work="Film abstracts of Wikipedia, by its contributors",
                repository="github.com/prust/wikipedia-movie-data",
                commit="91ae721d3672e8ef4f15b213c763a634250ef61a",
                # Wikipedia's licence when the abstracts were taken (April 2023); the collection itself is under MIT.
                licence="CC BY-SA 3.0",
            ),
        ),
    ),
    "wikitext_vt.txt.xz": TracedFile(
        sha256="1ff1f3cbd6439b63f06f748a68b2bc3b109adc32c031df6d254ff848c142e760",
        sources=(
            Source(
                work="WikiText-103, validation and test parts, by Merity et al. and the contributors of Wikipedia",
                repository="huggingface.co/datasets/Salesforce/wikitext",
                commit="b08601e04326c79dfdd32d625aee71d232d685c3",
                licence="CC BY-SA 3.0",
            ),
        ),
    ),
}
"""By name, every file that the shipped tables are built from."""


def trace_sources(paths: list[Path], sources: Mapping[str, TracedFile]) -> dict[str, dict[str, object]]:
    """Returns the manifest's entry of each corpus file; refuses files without an entry, or with another hash."""
    entries: dict[str, dict[str, object]] = {}
    for path in paths:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        known = sources.get(path.name)
        if known is None or known.sha256 != digest:
            raise ConfigurationError(
                f"{path.name}: expected {'no such file' if known is None else f'sha256 {known.sha256}'}, found sha256 "
                f"{digest}. Text is used only with repository, commit and licence: compare it with its repository at a "
                "commit whose licence you have read, and name both in SOURCES of this module and in NOTICE."
            )
        entries[path.name] = {"sha256": digest, "sources": [asdict(source) for source in known.sources]}
    return entries


_WORDS = """
Answer Article Category Class Context Customer Email Example Genre Input Intent Issue Keyword Label Line
Message Name News Output Problem Query Question Queue Record Reply Request Review Sentence Sentiment Statement
Summary Tags Task Text Ticket Title Topic Tweet Type Utterance
"""
PROMPT_WORDS = (*_WORDS.split(), *_WORDS.lower().split())
"""Words that open the lines of prompts; each is made a token of its own, with and without a space before it."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Every number that the build depends on; the manifest records it."""

    vocabulary: int = 8192
    weights: Mapping[str, float] = field(
        default_factory=lambda: {"banking77": 30.0, "opentrivia": 2.0, "books": 0.5},
    )
    """How often a file counts, by name; 1 where not named."""
    labelled: tuple[str, ...] = ("banking77", "opentrivia")
    """Files of "label: text"; n-grams see one of `PROMPT_WORDS` in the label's place, topics see the label."""
    discount: float = 0.75
    order: int = 4
    thresholds: tuple[float, ...] = (2.0, 2.0, 2.0)
    """An n-gram (n = 2, 3, ...) stays if it gains this many (weighted) nats over its backoff."""
    dimensions: int = 128
    window: int = 10
    vector_weight_cap: float = 10.0
    """Topic vectors count a file at most this often."""
    smoothing: float = 3e-3
    """Smooth inverse frequency (Arora et al., 2017): a token of probability p weighs a / (a + p)."""
    shrinkage: float = 0.2
    passage: int = 40
    """Tokens in one passage when the topic space is whitened within documents."""
    rare: int = 10
    """Tokens seen less often carry no topic; nor do tokens without a letter."""
    clusters: int = 512
    """Groups of tokens that the tilt of the base tells apart."""

    def weight(self, name: str) -> float:
        """Returns how often the file `name` counts."""
        return self.weights.get(name, 1.0)


# Sources: Levy and Goldberg (2014) for factorised PPMI; Arora et al. (2017) for smooth inverse frequency.
def cooccurrences(streams: Mapping[str, Ints], recipe: Recipe) -> sp.csr_matrix:
    """Returns symmetric, weighted counts of token pairs within a window of one document."""
    base = recipe.vocabulary
    total = np.zeros(base * base, np.float32)
    for name, stream in streams.items():
        document = np.cumsum(stream == END)
        weight = np.float32(min(recipe.weight(name), recipe.vector_weight_cap))
        for distance in range(1, recipe.window + 1):
            left, right = stream[:-distance], stream[distance:]
            same = (document[:-distance] == document[distance:]) & (left != END)
            pairs = (left * base + right)[same]
            total += weight * np.bincount(pairs, minlength=base * base).astype(np.float32)
    square = total.reshape(base, base)
    return sp.csr_matrix(square + square.T)


def topic_vectors(streams: Mapping[str, Ints], tokens: Sequence[bytes], recipe: Recipe) -> tuple[Floats, Floats]:
    """Returns directions float64[V, k] (unit length, or zero for tokens without a topic) and weights float64[V]."""
    counts = cooccurrences(streams, recipe).tocoo()
    frequency = np.bincount(counts.row, counts.data, minlength=recipe.vocabulary)
    smoothed = frequency**0.75 / np.sum(frequency**0.75)
    ppmi = np.log(counts.data / (frequency[counts.row] * smoothed[counts.col]))
    positive = ppmi > 0
    matrix = sp.csr_matrix((ppmi[positive], (counts.row[positive], counts.col[positive])), shape=counts.shape)
    start = np.ones(recipe.vocabulary)
    left, values, _ = svds(matrix, k=recipe.dimensions, v0=start / np.linalg.norm(start))
    vectors = left[:, np.argsort(-values)]
    vectors *= np.sign(vectors[np.abs(vectors).argmax(axis=0), np.arange(vectors.shape[1])])
    probability = frequency / frequency.sum()
    vectors *= (recipe.smoothing / (recipe.smoothing + probability))[:, None]
    vectors = vectors @ _within_documents(streams, vectors, recipe)
    seen = np.bincount(np.concatenate(list(streams.values())), minlength=recipe.vocabulary)
    lettered = [any(map(str.isalpha, token.decode("utf-8", "ignore"))) for token in tokens]
    vectors[(seen < recipe.rare) | ~np.array(lettered)] = 0.0
    weights = np.linalg.norm(vectors, axis=1)
    return vectors / np.maximum(weights, 1e-12)[:, None], weights


def _within_documents(streams: Mapping[str, Ints], vectors: Floats, recipe: Recipe) -> Floats:
    """Whitens variation between passages of one document, so that directions that separate documents count more."""
    scatter, number, size = np.zeros((vectors.shape[1],) * 2), 0, recipe.passage
    for stream in streams.values():
        borders: list[int] = np.flatnonzero(stream == END).tolist()
        for first, last in pairwise(borders):
            if last - first <= 4 * size:
                continue
            tokens = stream[first + 1 : first + 1 + min((last - first - 1) // size, 12) * size]
            passages = vectors[tokens].reshape(-1, size, vectors.shape[1]).sum(axis=1)
            passages /= np.maximum(np.linalg.norm(passages, axis=1, keepdims=True), 1e-12)
            spread = passages - passages.mean(axis=0)
            scatter += spread.T @ spread / len(passages)
            number += 1
    dimensions = len(scatter)
    if not number:
        return np.eye(dimensions)
    scatter /= number
    scatter = (1 - recipe.shrinkage) * scatter + recipe.shrinkage * np.trace(scatter) / dimensions * np.eye(dimensions)
    values, basis = np.linalg.eigh(scatter)
    return np.asarray(basis @ np.diag(values**-0.5) @ basis.T)


def cluster(directions: Floats, number: int) -> tuple[Ints, Floats]:
    """Spherical k-means from evenly spaced starts: group int64[V] (`number` where there is no topic) and centroids."""
    topical = np.flatnonzero(directions.any(axis=1))
    vectors = directions[topical]
    centroids = vectors[np.linspace(0, len(vectors) - 1, number).astype(np.int64)]
    for _ in range(25):
        nearest = (vectors @ centroids.T).argmax(axis=1)
        sums = np.zeros_like(centroids)
        np.add.at(sums, nearest, vectors)
        length = np.linalg.norm(sums, axis=1, keepdims=True)
        centroids = np.where(length > 0, sums / np.maximum(length, 1e-12), centroids)
    groups = np.full(len(directions), number)
    groups[topical] = (vectors @ centroids.T).argmax(axis=1)
    return groups, centroids


# Sources: Sennrich et al. (2016) for byte pairs; Kneser and Ney (1995) with absolute discounting; Seymore and Rosenfeld
# (1996) for pruning by weighted difference. Equal input gives equal bytes. Nothing here is imported at run time.
logger = logging.getLogger(__name__)

SEPARATOR = b"\n\n"


def corpus_files(folder: Path) -> list[Path]:
    """Returns every `*.txt.xz` of the folder, by name."""
    return sorted(folder.glob("*.txt.xz"))


def read_corpus(folder: Path) -> dict[str, list[str]]:
    """Returns the non-empty documents of every file; they are separated by blank lines."""
    corpus = {}
    for path in corpus_files(folder):
        with lzma.open(path, "rt", encoding="utf-8") as handle:
            documents = [document.strip() for document in handle.read().split("\n\n")]
        corpus[path.name.removesuffix(".txt.xz")] = [document for document in documents if document]
    return corpus


def with_headers(documents: Sequence[str]) -> list[str]:
    """Replaces the label of each "label: text" by the words of prompts, in turn."""
    return [
        f"{PROMPT_WORDS[index % len(PROMPT_WORDS)]}: {document.partition(': ')[2]}"
        for index, document in enumerate(documents)
    ]


# ---- vocabulary


def count_pieces(corpus: Mapping[str, Sequence[str]], recipe: Recipe) -> dict[str, float]:
    """Counts pre-tokens by weight; the words of prompts are counted as frequent."""
    pattern = regex.compile(PATTERN)
    total: dict[str, float] = defaultdict(float)
    for name, documents in corpus.items():
        pieces: Counter[str] = Counter()
        for document in documents:
            pieces.update(pattern.findall(document))
        for piece, count in pieces.items():
            total[piece] += recipe.weight(name) * count
    plenty = max(total.values(), default=1.0)
    for word in PROMPT_WORDS:
        for spelling in (word, " " + word):
            total[spelling] += round(0.001 * plenty)
    return total


class _Pairs:
    """Pre-tokens as sequences of token ids, with the weighted count and the places of every adjacent pair."""

    def __init__(self, pieces: Mapping[str, float]) -> None:
        words = [(list(piece.encode()), count) for piece, count in sorted(pieces.items()) if piece != "\n\n"]
        self._sequences, self._counts = [word for word, _ in words], [count for _, count in words]
        self._totals: dict[tuple[int, int], float] = defaultdict(float)
        self._places: dict[tuple[int, int], set[int]] = defaultdict(set)
        for index, sequence in enumerate(self._sequences):
            for pair in pairwise(sequence):
                self._totals[pair] += self._counts[index]
                self._places[pair].add(index)
        self._heap = [(-total, pair) for pair, total in self._totals.items()]
        heapq.heapify(self._heap)

    def pop(self) -> tuple[int, int] | None:
        """Returns the most frequent pair (ties: smallest ids), or None."""
        while self._heap:
            negative, pair = heapq.heappop(self._heap)
            if self._totals[pair] == -negative:
                return pair
            # An outdated entry: the pair was pushed again with its present total.
        return None

    def merge(self, pair: tuple[int, int], token: int) -> None:
        """Replaces the pair by `token` everywhere."""
        changed: set[tuple[int, int]] = set()
        for index in sorted(self._places.pop(pair)):
            old, new = self._sequences[index], _merge(self._sequences[index], pair, token)
            self._sequences[index] = new
            for sign, sequence in ((-1, old), (1, new)):
                for touched in pairwise(sequence):
                    self._totals[touched] += sign * self._counts[index]
                    self._places[touched].add(index)
                    changed.add(touched)
        for touched in changed:
            if self._totals[touched] > 0:
                heapq.heappush(self._heap, (-self._totals[touched], touched))


def _merge(sequence: list[int], pair: tuple[int, int], token: int) -> list[int]:
    """Replaces every occurrence of `pair`, left to right."""
    merged, position = [], 0
    while position < len(sequence):
        if tuple(sequence[position : position + 2]) == pair:
            merged.append(token)
            position += 2
        else:
            merged.append(sequence[position])
            position += 1
    return merged


def learn_vocabulary(pieces: Mapping[str, float], size: int) -> list[bytes]:
    """Returns `size` tokens in order of rank: the bytes, the blank line, then byte pairs, most frequent first."""
    tokens = [bytes([value]) for value in range(256)] + [SEPARATOR]
    known, pairs = set(tokens), _Pairs(pieces)
    while len(tokens) < size and (pair := pairs.pop()):
        merged = tokens[pair[0]] + tokens[pair[1]]
        if merged not in known:  # the same bytes may come from two pairs; tiktoken ranks bytes
            known.add(merged)
            tokens.append(merged)
            pairs.merge(pair, len(tokens) - 1)
    return tokens


def encode_corpus(corpus: Mapping[str, Sequence[str]], tokens: Sequence[bytes]) -> dict[str, Ints]:
    """Encodes each file as one stream: END, document, END, document, ..., END."""
    ranks = {token: rank for rank, token in enumerate(tokens)}
    encoding = tiktoken.Encoding("build", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    return {
        name: np.array(
            [END] + [token for document in documents for token in (*encoding.encode_ordinary(document), END)],
            dtype=np.int64,
        )
        for name, documents in corpus.items()
    }


# ---- n-grams


@dataclass
class Level:
    """All n-grams of one order: sorted keys (base-V numbers), discounted probabilities, weighted context totals."""

    keys: Ints
    probabilities: Floats
    contexts: Ints
    owner: Ints
    """Which context an entry belongs to."""
    totals: Floats

    @property
    def backoff(self) -> Floats:
        """float64[contexts]: mass left to the next shorter context."""
        return np.asarray(1.0 - np.bincount(self.owner, self.probabilities, minlength=len(self.contexts)), np.float64)

    def keep(self, mask: NDArray[np.bool_], base: int) -> Level:
        """Returns the level with only the entries of `mask`."""
        keys = self.keys[mask]
        contexts, owner = np.unique(keys // base, return_inverse=True)
        old = np.searchsorted(self.contexts, contexts)
        return Level(keys, self.probabilities[mask], contexts, owner, self.totals[old])


def ngrams(stream: Ints, order: int, base: int) -> Ints:
    """Returns the keys of the n-grams that cross no document border."""
    length = max(len(stream) - order + 1, 0)
    keys, inside = np.zeros(length, np.int64), np.ones(length, bool)
    for place in range(order):
        column = stream[place : place + length]
        keys = keys * base + column
        if 0 < place < order - 1:
            inside &= column != END
    return keys[inside]


def _continuations(stream: Ints, order: int, base: int) -> tuple[Ints, Ints]:
    """Counts the distinct left neighbours of each n-gram; n-grams at a document's start have none and count plainly."""
    starts, plain = np.unique(ngrams(stream, order, base), return_counts=True)
    opening = starts // base ** (order - 1) == END
    longer = np.unique(ngrams(stream, order + 1, base)) % base**order
    keys, distinct = np.unique(longer, return_counts=True)
    inner = keys // base ** (order - 1) != END
    return np.concatenate([keys[inner], starts[opening]]), np.concatenate([distinct[inner], plain[opening]])


def count_level(streams: Mapping[str, Ints], order: int, recipe: Recipe) -> Level:
    """Discounts each file's counts before they are weighted: a file of weight 30 is not 30 observations."""
    base, keys, discounted, counts = recipe.vocabulary, [], [], []
    for name, stream in streams.items():
        if order == recipe.order:
            ngram_keys, number = np.unique(ngrams(stream, order, base), return_counts=True)
        else:
            ngram_keys, number = _continuations(stream, order, base)
        keys.append(ngram_keys)
        counts.append(recipe.weight(name) * number)
        discounted.append(recipe.weight(name) * (number - recipe.discount))
    entries, place = np.unique(np.concatenate(keys), return_inverse=True)
    contexts, owner = np.unique(entries // base, return_inverse=True)
    totals: Floats = np.bincount(owner, np.bincount(place, np.concatenate(counts))).astype(np.float64)
    return Level(entries, np.bincount(place, np.concatenate(discounted)) / totals[owner], contexts, owner, totals)


def _find(sorted_keys: Ints, wanted: Ints) -> tuple[Ints, NDArray[np.bool_]]:
    """Returns the index of each wanted key (0 where absent), and whether it is there."""
    index = np.searchsorted(sorted_keys, wanted)
    index[index == len(sorted_keys)] = 0
    return index, sorted_keys[index] == wanted


def prune(levels: Sequence[Level], unigram: Floats, recipe: Recipe) -> list[Level]:
    """Drops n-grams that their backoff predicts nearly as well; prefixes of kept n-grams are kept."""
    base = recipe.vocabulary
    pruned: list[Level] = []
    parents = np.empty(0, np.int64)
    for depth in range(len(levels) - 1, -1, -1):
        level = levels[depth]
        lower = unigram[level.keys % base]
        for shorter, order in zip(levels[:depth], range(2, depth + 2), strict=True):
            suffix = level.keys % base**order
            context, present = _find(shorter.contexts, suffix // base)
            entry, listed = _find(shorter.keys, suffix)
            lower = lower * np.where(present, shorter.backoff[context], 1.0)
            lower += np.where(listed, shorter.probabilities[entry], 0.0)
        full = level.probabilities + level.backoff[level.owner] * lower
        gain = level.probabilities * level.totals[level.owner] * np.log(full / lower)
        level = level.keep((gain > recipe.thresholds[depth]) | np.isin(level.keys, parents), base)
        parents = np.unique(level.keys // base)
        pruned.insert(0, level)
    return pruned


def pack_trie(levels: Sequence[Level], base: int) -> dict[str, NDArray[np.generic]]:
    """Packs levels as arrays: successor, log-probability rounded down, and how many children each parent has."""
    packed: dict[str, NDArray[np.generic]] = {}
    parents = np.arange(base, dtype=np.int64)
    for order, level in enumerate(levels, start=2):
        steps = np.ceil(-np.log(np.maximum(level.probabilities, 1e-9)) / LOG_STEP)
        children = np.zeros(len(parents), np.uint16)
        children[np.searchsorted(parents, level.contexts)] = np.bincount(level.owner)
        packed[f"children{order}"] = children
        packed[f"tokens{order}"] = (level.keys % base).astype(np.uint16)
        packed[f"steps{order}"] = np.clip(steps, 0, 255).astype(np.uint8)
        parents = level.keys
    return packed


def unigrams(streams: Mapping[str, Ints], recipe: Recipe) -> Floats:
    """Returns continuation probabilities of single tokens, with half a count added to each."""
    base = recipe.vocabulary
    counts = np.full(base, 0.5)
    for name, stream in streams.items():
        counts += recipe.weight(name) * np.bincount(np.unique(ngrams(stream, 2, base)) % base, minlength=base)
    return np.asarray(counts / counts.sum())


# ---- files


def write_arrays(path: Path, arrays: Mapping[str, NDArray[np.generic]]) -> None:
    """Writes an .npz whose bytes depend on the arrays only (fixed order and time stamps)."""
    with zipfile.ZipFile(path, "w", compression=zipfile.ZIP_LZMA) as archive:
        for name, array in sorted(arrays.items()):
            entry = zipfile.ZipInfo(f"{name}.npy")
            entry.compress_type = zipfile.ZIP_LZMA
            with archive.open(entry, "w") as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def build(corpus_folder: Path, out: Path, recipe: Recipe, sources: Mapping[str, TracedFile]) -> dict[str, object]:
    """Builds `model.npz` and `manifest.json` in `out` and returns the manifest; refuses files without a source."""
    files = trace_sources(corpus_files(corpus_folder), sources)
    corpus = read_corpus(corpus_folder)
    tokens = learn_vocabulary(count_pieces(corpus, recipe), recipe.vocabulary)
    streams = encode_corpus(corpus, tokens)
    logger.info("tokens per file: %s", {name: len(stream) for name, stream in streams.items()})
    headed = {name: with_headers(corpus[name]) for name in recipe.labelled if name in corpus}
    plain = streams | encode_corpus(headed, tokens)
    unigram = unigrams(plain, recipe)
    levels = prune([count_level(plain, n, recipe) for n in range(2, recipe.order + 1)], unigram, recipe)
    logger.info("n-grams kept: %s", [len(level.keys) for level in levels])
    directions, weights = topic_vectors(streams, tokens, recipe)
    groups, centroids = cluster(directions, recipe.clusters)
    arrays: dict[str, NDArray[np.generic]] = {
        **pack_trie(levels, recipe.vocabulary),
        "unigram": unigram.astype(np.float32),
        "token_bytes": np.frombuffer(b"".join(tokens), np.uint8),
        "token_lengths": np.array([len(token) for token in tokens], np.uint8),
        "groups": groups.astype(np.uint16),
        "centroids": np.clip(np.rint(centroids * VECTOR_SCALE), -127, 127).astype(np.int8),
        "directions": np.clip(np.rint(directions * VECTOR_SCALE), -127, 127).astype(np.int8),
        "weights": np.rint(weights / max(weights.max(), 1e-12) * WEIGHT_SCALE).astype(np.uint8),
    }
    out.mkdir(parents=True, exist_ok=True)
    write_arrays(out / "model.npz", arrays)
    manifest: dict[str, object] = {
        "sha256": hashlib.sha256((out / "model.npz").read_bytes()).hexdigest(),
        "corpus": files,
        "ngrams": {str(order): len(level.keys) for order, level in enumerate(levels, start=2)},
        "recipe": asdict(recipe),
    }
    (out / "manifest.json").write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return manifest


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the build from the command line."""
    parser = argparse.ArgumentParser(description="Builds the tables of the embedded model from public text.")
    parser.add_argument("--corpus", type=Path, required=True, help="folder of *.txt.xz files")
    parser.add_argument("--out", type=Path, required=True, help="folder for model.npz and manifest.json")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    build(options.corpus, options.out, Recipe(), SOURCES)


if __name__ == "__main__":
    main()
