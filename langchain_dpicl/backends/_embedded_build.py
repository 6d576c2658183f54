"""Builds the tables of the embedded model from public text (`python -m ... --corpus CORPUS --out OUT`)."""

from __future__ import annotations

import argparse
import hashlib
import heapq
import json
import logging
import lzma
import zipfile
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import regex  # type: ignore[import-untyped]
import tiktoken
from numpy.typing import NDArray

from langchain_dpicl.backends._embedded_recipe import PROMPT_WORDS, Recipe
from langchain_dpicl.backends._embedded_sources import SOURCES, TracedFile, traced
from langchain_dpicl.backends._embedded_tables import (
    END,
    LOG_STEP,
    PATTERN,
    VECTOR_SCALE,
    WEIGHT_SCALE,
    Floats,
    Ints,
)
from langchain_dpicl.backends._embedded_vectors import cluster, topic_vectors

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
    files = traced(corpus_files(corpus_folder), sources)
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
