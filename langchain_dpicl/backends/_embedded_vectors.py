"""Learns topic vectors of tokens from streams of token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import scipy.sparse as sp
from scipy.sparse.linalg import svds

from langchain_dpicl.backends._embedded_recipe import Recipe
from langchain_dpicl.backends._embedded_tables import END, Floats, Ints


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
