"""Builds the tables of the embedded model from listed public text; `make model` runs it."""

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import regex  # type: ignore[import-untyped]
import scipy.sparse as sp
import tiktoken
from numpy.typing import NDArray

from langchain_dpicl.backends.embedded import (
    END,
    GROUP_SCALE,
    LOG_STEP,
    NO_WORD,
    PATTERN,
    VECTOR_SCALE,
    WEIGHT_SCALE,
    WORDS,
    Floats,
    Ints,
    unit_rows,
)
from langchain_dpicl.exceptions import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class Source:
    """A work whose statistics are in the tables.

    Attributes:
      work: its title and author.
      repository: where its text was taken from, without "https://".
      commit: all 40 hexadecimal digits of the version that was taken, or the version of a Debian package.
      licence: of the text at that commit.
    """

    work: str
    repository: str
    commit: str
    licence: str

    def __post_init__(self) -> None:
        is_pinned = re.fullmatch(r"[0-9a-f]{40}|[0-9]+:[0-9.]+-[0-9]+", self.commit)
        if not (self.work and self.repository and self.licence and is_pinned):
            raise ConfigurationError(
                "expected a work with a repository, a commit of 40 hexadecimal digits (or a Debian version such as "
                f"1:3.0-37) and a licence, found {self!r}"
            )


@dataclass(frozen=True, kw_only=True)
class TracedFile:
    """A corpus file whose text was compared with the repositories of its works."""

    sha256: str
    sources: tuple[Source, ...]

    def __post_init__(self) -> None:
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


def _single(sha256: str, **source: str) -> TracedFile:
    return TracedFile(sha256=sha256, sources=(Source(**source),))


_WORDNET = (
    Source(
        work="WordNet 3.0, by Princeton University",
        repository="packages.debian.org/source/bookworm/wordnet",
        commit="1:3.0-37",
        licence="WordNet 3.0 license",
    ),
)

SOURCES: Mapping[str, TracedFile] = {
    "banking77.txt.xz": _single(
        "a7f4f166add712a1004723f206a049c2be98bf4111ab28faf1e83f0c710e4362",
        work="Banking77, by Casanueva et al., PolyAI",
        repository="github.com/PolyAI-LDN/task-specific-datasets",
        commit="57ec275d8078af65b7731c2a98be812d844a6d6b",
        licence="CC BY 4.0",
    ),
    "books.txt.xz": _single(
        "c32f01eda1f13dba871d8ace98d9d6a6243e79be8a19f838227861ef04132172",
        work="Classic Books as Markdown, openings of 753 books",
        repository="github.com/mlschmitt/classic-books-markdown",
        commit="944882722e9a96fa6cf2739dc2ea757e101f412f",
        licence="public domain",
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
    "data.adj": TracedFile(sha256="c89120dfc1f046ddff4a631bf9b7e9fa1a36b5e86565a23bf82dbe14f30b88a7", sources=_WORDNET),
    "data.adv": TracedFile(sha256="444a63bf3955080ab7524f5079cfc07ff9bc682cb98bdb1db73b0fb9829f1139", sources=_WORDNET),
    "data.noun": TracedFile(
        sha256="fea17d2f9656611334eac790e5d69e47645fa180c4aa481fb4cd9b3520754ca2", sources=_WORDNET
    ),
    "data.verb": TracedFile(
        sha256="adcf43e35b581e8036d8b5a52d63d9cd3d3b4870b2720d3c03c799df44777bc2", sources=_WORDNET
    ),
    "opentrivia.txt.xz": _single(
        "47d45b5f5420f0de5a5d3a009e25828e7dd5542ddde07df5c40bb5cdd21d0d87",
        work="OpenTriviaQA, by its contributors",
        repository="github.com/uberspot/OpenTriviaQA",
        commit="dd31530bfbb19f9505b160b89c9df4b1127e3c70",
        licence="CC BY-SA 4.0",
    ),
    "wiki_films.txt.xz": _single(
        "7e670d9cf10290b25c1cad10d820fb6bda5db2b451214e090024941521c6f05e",
        work="Film abstracts of Wikipedia, by its contributors",
        repository="github.com/prust/wikipedia-movie-data",
        commit="91ae721d3672e8ef4f15b213c763a634250ef61a",
        # Wikipedia's licence when the abstracts were taken (April 2023); the collection itself is under MIT.
        licence="CC BY-SA 3.0",
    ),
    "wikitext_vt.txt.xz": _single(
        "1ff1f3cbd6439b63f06f748a68b2bc3b109adc32c031df6d254ff848c142e760",
        work="WikiText-103, validation and test parts, by Merity et al. and the contributors of Wikipedia",
        repository="huggingface.co/datasets/Salesforce/wikitext",
        commit="b08601e04326c79dfdd32d625aee71d232d685c3",
        licence="CC BY-SA 3.0",
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

    vocabulary: int = 12288
    weights: Mapping[str, float] = field(
        default_factory=lambda: {"banking77": 4.0, "books": 0.4, "opentrivia": 1.5, "wikitext_vt": 3.0, "wordnet": 1.5}
    )
    """How often a file counts in n-grams and vocabulary, by name; 1 where not named."""
    labelled: tuple[str, ...] = ("banking77", "opentrivia")
    """Files of "label: text"; n-grams see one of `PROMPT_WORDS` in the label's place, topics see the label."""
    discount: float = 0.75
    order: int = 4
    thresholds: tuple[float, ...] = (4.0, 4.0, 4.0)
    """An n-gram (n = 2, 3, ...) stays if it gains this many (weighted) nats over its backoff."""
    words: int = 30_000
    """Most words with a topic."""
    rare: int = 8
    """Words seen less often have no topic."""
    most_characters: int = 9_000_000
    """Topics read this much of a file; only the books are longer."""
    topic_weights: Mapping[str, float] = field(default_factory=lambda: {"banking77": 10.0, "wordnet": 3.0})
    """How often a file counts in topics, by name; 1 where not named."""
    contexts: int = 5_000
    """The most frequent words, beside which words are counted."""
    window: int = 8
    thinning: float = 2e-4
    """A word of frequency f is counted a share sqrt(thinning / f) of the times that it stands in the text."""
    dimensions: int = 256
    smoothing: float = 1e-3
    """Smooth inverse frequency (Arora et al., 2017): a word of probability p weighs a / (a + p)."""
    shrinkage: float = 0.2
    passage: int = 40
    """Words in one passage when the topic space is whitened within documents."""
    neighbours: int = 12
    """Nearest words that say what a word means as a label."""
    label_centring: float = 0.5
    """Share of the mean text that is taken off a label's meaning."""
    clusters: int = 1536
    """Most groups of tokens that the tilt tells apart."""
    alike: float = 0.9
    """Tokens of a larger cosine are in one group."""
    class_words: int = 1_500
    """Nouns that name classes of things, as labels do; each is made a token of its own."""

    def weight(self, name: str) -> float:
        """Returns how often the file `name` counts."""
        return self.weights.get(name, 1.0)

    def topic_weight(self, name: str) -> float:
        """Returns how often the file `name` counts in topics."""
        return self.topic_weights.get(name, 1.0)


# Sources: Levy and Goldberg (2014) for factorised PPMI; Mikolov et al. (2013) for leaving out frequent words; Halko et
# al. (2011) for the decomposition by subspace iteration; Arora et al. (2017) for smooth inverse frequency.
WORDNET = ("data.noun", "data.verb", "data.adj", "data.adv")


@dataclass(frozen=True)
class WordNet:
    """Synsets of WordNet as text.

    Attributes:
      definitions: "lemmas (topic): gloss", for n-grams and the vocabulary.
      relations: lemmas, the words that they are kinds of, derived from or about, and the gloss, for topics.
      classes: nouns that others are kinds or instances of, or belong to as a topic; by how many do.
    """

    definitions: list[str]
    relations: list[str]
    classes: Mapping[str, int]

    @classmethod
    def read(cls, folder: Path) -> WordNet:
        """Reads the data files of WordNet 3.0 (format: wndb(5WN))."""
        lemmas: dict[str, list[str]] = {}
        synsets: list[tuple[list[str], list[tuple[str, str]], str]] = []
        for name in WORDNET:
            for line in (folder / name).read_text(encoding="latin-1").splitlines():
                if line.startswith("  "):  # the licence
                    continue
                head, _, gloss = line.partition("| ")
                fields = head.split()
                number = int(fields[3], 16)
                own = [fields[4 + 2 * place].partition("(")[0].replace("_", " ") for place in range(number)]
                first = 4 + 2 * number
                pointers = [
                    (fields[first + 1 + 4 * place], fields[first + 3 + 4 * place] + fields[first + 2 + 4 * place])
                    for place in range(int(fields[first]))
                ]
                lemmas[name[5] + fields[0]] = own
                synsets.append((own, pointers, gloss.strip()))
        definitions, relations = [], []
        classes: Counter[str] = Counter()
        for own, pointers, gloss in synsets:
            above = [target for kind, target in pointers if kind in {"@", "@i", ";c"} and target.startswith("n")]
            classes.update(lemma for target in above for lemma in lemmas.get(target, [])[:2])
            topics = [lemmas[target][0] for kind, target in pointers if kind == ";c" and target in lemmas]
            near = [
                lemma
                for kind, target in pointers
                if kind in {"@", "@i", ";c", "+", "&"}
                for lemma in lemmas.get(target, [])[:2]
            ]
            definitions.append(f"{', '.join(own[:3])}{f' ({topics[0]})' if topics else ''}: {gloss}")
            relations.append(" ".join([*own, *near, *own, gloss]))
        return cls(definitions, relations, {noun: count for noun, count in classes.items() if noun.isalpha()})


@dataclass(frozen=True)
class WordStreams:
    """The words that have topics, the most frequent first, and each file as one stream of their numbers.

    Attributes:
      words: the words.
      frequency: float64[words], sums to 1.
      streams: int64[...] by file; -1 opens every document and closes the last.
    """

    words: list[str]
    frequency: Floats
    streams: dict[str, Ints]

    @classmethod
    def count(cls, corpus: Mapping[str, Sequence[str]], recipe: Recipe) -> WordStreams:
        """Counts the words of the corpus; large files are read up to `recipe.most_characters`."""
        documents = {
            name: [WORDS.findall(text.lower()) for text in _beginning(texts, recipe.most_characters)]
            for name, texts in corpus.items()
        }
        counts: Counter[str] = Counter()
        for texts in documents.values():
            for text in texts:
                counts.update(text)
        ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[: recipe.words]
        words = [word for word, count in ranked if count >= recipe.rare]
        number = {word: place for place, word in enumerate(words)}
        streams = {
            name: np.array(
                [-1, *(part for text in texts for part in (*(number[word] for word in text if word in number), -1))],
                dtype=np.int64,
            )
            for name, texts in documents.items()
        }
        seen = np.array([counts[word] for word in words], dtype=np.float64)
        return cls(words, seen / seen.sum(), streams)


def _beginning(texts: Sequence[str], most: int) -> Iterator[str]:
    """Yields documents until `most` characters were reached."""
    for text in texts:
        yield text
        most -= len(text)
        if most <= 0:
            return


def thin_out(stream: Ints, share: Floats) -> Ints:
    """Leaves out frequent words evenly: of word w every 1 / share[w]-th occurrence stays, in order."""
    order = np.argsort(stream, kind="stable")
    values = stream[order]
    first = np.flatnonzero(np.diff(values, prepend=-2))
    occurrence = np.arange(len(values)) - np.repeat(first, np.diff(np.append(first, len(values))))
    kept = np.where(values < 0, 1.0, np.append(share, 1.0)[values])
    stays = np.zeros(len(stream), bool)
    stays[order] = np.floor((occurrence + 1) * kept + 0.5) != np.floor(occurrence * kept + 0.5)
    return np.asarray(stream[stays])


def cooccurrences(text: WordStreams, recipe: Recipe) -> sp.csr_matrix:
    """Returns float32[words, contexts]: weighted counts of pairs within a window; near pairs count more."""
    shape = len(text.words), min(recipe.contexts, len(text.words))
    share = np.minimum(1.0, np.sqrt(recipe.thinning / text.frequency))
    total = sp.csr_matrix(shape, dtype=np.float32)
    for name, stream in text.streams.items():
        thin = thin_out(stream, share)
        document = np.cumsum(thin < 0)[thin >= 0]
        thin = thin[thin >= 0]
        for distance in range(1, recipe.window + 1):
            same = document[:-distance] == document[distance:]
            left, right = thin[:-distance][same], thin[distance:][same]
            word, context = np.concatenate([left, right]), np.concatenate([right, left])
            known = context < shape[1]
            weight = np.full(int(known.sum()), recipe.topic_weight(name) / (1 + distance / 4), np.float32)
            total += sp.coo_matrix((weight, (word[known], context[known])), shape=shape).tocsr()
    return total


def word_vectors(text: WordStreams, recipe: Recipe) -> Floats:
    """Returns float64[words, k]: unit vectors of factorised positive pointwise mutual information."""
    counts = cooccurrences(text, recipe).tocoo()
    rows = np.bincount(counts.row, counts.data, minlength=counts.shape[0])
    columns = np.bincount(counts.col, counts.data, minlength=counts.shape[1]) ** 0.75
    information = np.log(counts.data * columns.sum() / (rows[counts.row] * columns[counts.col]))
    positive = information > 0
    places = (counts.row[positive], counts.col[positive])
    matrix = sp.csr_matrix((information[positive].astype(np.float32), places), shape=counts.shape)
    dimensions = min(recipe.dimensions, counts.shape[1])
    # The rows of the most frequent words, not random ones: equal input gives equal bytes.
    basis = matrix[: dimensions + 40].T.toarray()
    for _ in range(6):
        basis, _ = np.linalg.qr(matrix.T @ (matrix @ basis))
    left, values, _ = np.linalg.svd(matrix @ basis, full_matrices=False)
    vectors = left[:, :dimensions] * np.sqrt(values[:dimensions])
    vectors *= np.sign(vectors[np.abs(vectors).argmax(axis=0), np.arange(vectors.shape[1])])
    return unit_rows(vectors.astype(np.float64))


@dataclass(frozen=True)
class Topics:
    """The topic space.

    Attributes:
      directions: float64[words, k], unit vectors.
      weights: float64[words]: what a word adds to a topic is direction times weight.
      centre: float64[k], the mean of the unit topics of passages.
      meanings: float64[words, k]: what a word says of the texts it labels, itself and its nearest words; common words
        are shorter.
    """

    directions: Floats
    weights: Floats
    centre: Floats
    meanings: Floats


def topic_space(text: WordStreams, recipe: Recipe) -> Topics:
    """Weighs words by rarity, whitens variation within documents, and finds what each word means as a label."""
    rarity = recipe.smoothing / (recipe.smoothing + text.frequency)
    vectors = word_vectors(text, recipe) * rarity[:, None]
    vectors = vectors @ _within_documents(text.streams, vectors, recipe)
    weights = np.linalg.norm(vectors, axis=1)
    directions = unit_rows(vectors)
    centre = _mean_passage(text.streams, vectors, recipe)
    near = np.zeros_like(directions)
    for first in range(0, len(directions), 1024):
        cosine = directions[first : first + 1024] @ directions.T
        nearest = np.argpartition(-cosine, min(recipe.neighbours, cosine.shape[1]) - 1, axis=1)[:, : recipe.neighbours]
        shares = np.take_along_axis(cosine, nearest, axis=1) ** 2
        near[first : first + 1024] = (shares[:, :, None] * directions[nearest]).sum(axis=1)
    meanings = unit_rows(unit_rows(directions + unit_rows(near)) - recipe.label_centring * centre)
    return Topics(directions, weights, centre, meanings * rarity[:, None])


def _documents(stream: Ints) -> Iterator[Ints]:
    borders = np.flatnonzero(stream < 0).tolist()
    for first, last in pairwise(borders):
        yield stream[first + 1 : last]


def _within_documents(streams: Mapping[str, Ints], vectors: Floats, recipe: Recipe) -> Floats:
    """Whitens variation between passages of one document, so that directions that separate documents count more."""
    scatter, number, size = np.zeros((vectors.shape[1],) * 2), 0, recipe.passage
    for stream in streams.values():
        for words in _documents(stream):
            if len(words) <= 4 * size:
                continue
            passages = vectors[words[: min(len(words) // size, 12) * size]].reshape(-1, size, vectors.shape[1])
            units = unit_rows(passages.sum(axis=1))
            spread = units - units.mean(axis=0)
            scatter += spread.T @ spread / len(units)
            number += 1
    dimensions = len(scatter)
    if not number:
        return np.eye(dimensions)
    scatter /= number
    scatter = (1 - recipe.shrinkage) * scatter + recipe.shrinkage * np.trace(scatter) / dimensions * np.eye(dimensions)
    values, basis = np.linalg.eigh(scatter)
    return np.asarray(basis @ np.diag(values**-0.5) @ basis.T)


def _mean_passage(streams: Mapping[str, Ints], vectors: Floats, recipe: Recipe) -> Floats:
    """Returns the mean unit topic of the openings of every third document of at least twelve words."""
    total, number = np.zeros(vectors.shape[1]), 0
    for stream in streams.values():
        for words in islice(_documents(stream), 0, None, 3):
            if len(words) >= 12:
                total += unit_rows(vectors[words[: recipe.passage * 3 // 2]].sum(axis=0, keepdims=True))[0]
                number += 1
    return np.asarray(total / max(number, 1))


def token_words(tokens: Sequence[bytes], words: Sequence[str]) -> Ints:
    """Returns int64[V]: the word that a token is, or -1.

    A short token without space or capital mostly continues a word, and short ones that are rare as words are pieces.
    """
    number = {word: place for place, word in enumerate(words)}
    found = np.full(len(tokens), -1)
    for place, token in enumerate(tokens):
        text = token.decode("utf-8", "ignore")
        word = text.strip(" ").lower()
        opens = text[:1] == " " or text[:1].isupper()
        if (opens or len(word) > 4) and word.isalpha() and word in number and (len(word) > 3 or number[word] < 600):
            found[place] = number[word]
    return found


def token_meanings(tokens: Sequence[bytes], text: WordStreams, topics: Topics, own: Ints) -> Floats:
    """Returns float64[V, k]: the meaning of a token that is a word, or the mean one of the words that it opens."""
    ranks = {token: rank for rank, token in enumerate(tokens)}
    encoding = tiktoken.Encoding("build", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    meanings = np.zeros((len(tokens), topics.meanings.shape[1]))
    mass = np.zeros(len(tokens))
    for place, word in enumerate(text.words):
        for spelling in (f" {word}", word.capitalize(), f" {word.capitalize()}"):
            first = encoding.encode_ordinary(spelling)[0]
            meanings[first] += text.frequency[place] * topics.meanings[place]
            mass[first] += text.frequency[place]
    meanings /= np.where(mass > 0, mass, 1.0)[:, None]
    meanings[own >= 0] = topics.meanings[own[own >= 0]]
    lettered = [len(token.decode("utf-8", "ignore").strip(" ")) > 2 for token in tokens]
    meanings[~np.array(lettered)] = 0.0
    return meanings


def cluster(meanings: Floats, frequency: Floats, recipe: Recipe) -> tuple[Ints, Floats]:
    """Groups tokens by meaning, around the most frequent ones that are not alike.

    Returns:
      int64[V], the group of each token (the last one where there is no meaning), and float64[groups, k], their mean
      meanings by frequency: frequent words keep their own.
    """
    units = unit_rows(meanings)
    has_meaning = np.any(meanings, axis=1)
    ranked = np.argsort(-np.where(has_meaning, frequency, -1.0), kind="stable")[: np.count_nonzero(has_meaning)]
    leaders = np.zeros((recipe.clusters, meanings.shape[1]))
    number = 0
    for token in ranked:
        if number == recipe.clusters:
            break
        if not (leaders[:number] @ units[token] > recipe.alike).any():
            leaders[number] = units[token]
            number += 1
    groups = np.full(len(meanings), number)
    groups[ranked] = (units[ranked] @ leaders[:number].T).argmax(axis=1)
    means = np.zeros((number, meanings.shape[1]))
    np.add.at(means, groups[ranked], meanings[ranked] * frequency[ranked, None])
    return groups, means / np.bincount(groups[ranked], frequency[ranked], minlength=number)[:, None]


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


def count_pieces(corpus: Mapping[str, Sequence[str]], recipe: Recipe, classes: Iterable[str]) -> dict[str, float]:
    """Counts pre-tokens by weight; the words of prompts and names of classes are counted as frequent."""
    pattern = regex.compile(PATTERN)
    total: dict[str, float] = defaultdict(float)
    for name, documents in corpus.items():
        pieces: Counter[str] = Counter()
        for document in documents:
            pieces.update(pattern.findall(document))
        for piece, count in pieces.items():
            total[piece] += recipe.weight(name) * count
    plenty = max(total.values(), default=1.0)
    spellings = [spelling for word in PROMPT_WORDS for spelling in (word, f" {word}")]
    spellings += [f" {spelling}" for noun in classes for spelling in (noun, noun.capitalize())]
    for spelling in spellings:
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
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in sorted(arrays.items()):
            entry = zipfile.ZipInfo(f"{name}.npy")
            # LZMA packs noise no better, and reads it ten times slower.
            entry.compress_type = zipfile.ZIP_DEFLATED if array.dtype == np.int8 else zipfile.ZIP_LZMA
            with archive.open(entry, "w") as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def build_arrays(
    corpus: Mapping[str, list[str]], wordnet: WordNet, recipe: Recipe
) -> tuple[dict[str, NDArray[np.generic]], dict[str, int]]:
    """Returns the arrays of `model.npz`, and how many n-grams of each order are in them."""
    spoken = {**corpus, "wordnet": wordnet.definitions}
    text = WordStreams.count({**corpus, "wordnet": wordnet.relations}, recipe)
    classes = sorted(set(text.words) & wordnet.classes.keys(), key=lambda noun: (-wordnet.classes[noun], noun))
    tokens = learn_vocabulary(count_pieces(spoken, recipe, classes[: recipe.class_words]), recipe.vocabulary)
    headed = {name: with_headers(corpus[name]) for name in recipe.labelled if name in corpus}
    streams = encode_corpus({**spoken, **headed}, tokens)
    logger.info("tokens per file: %s", {name: len(stream) for name, stream in streams.items()})
    unigram = unigrams(streams, recipe)
    levels = prune([count_level(streams, n, recipe) for n in range(2, recipe.order + 1)], unigram, recipe)
    logger.info("n-grams kept: %s", [len(level.keys) for level in levels])
    topics = topic_space(text, recipe)
    logger.info("words with a topic: %s", len(text.words))
    own = token_words(tokens, text.words)
    groups, centroids = cluster(token_meanings(tokens, text, topics, own), unigram, recipe)
    logger.info("groups: %s", len(centroids))
    arrays: dict[str, NDArray[np.generic]] = {
        **pack_trie(levels, recipe.vocabulary),
        "unigram": unigram.astype(np.float32),
        "token_bytes": np.frombuffer(b"".join(tokens), np.uint8),
        "token_lengths": np.array([len(token) for token in tokens], np.uint8),
        "token_words": np.where(own < 0, NO_WORD, own).astype(np.uint16),
        "words": np.frombuffer(" ".join(text.words).encode(), np.uint8),
        "directions": np.clip(np.rint(topics.directions * VECTOR_SCALE), -127, 127).astype(np.int8),
        "weights": np.rint(topics.weights / max(topics.weights.max(), 1e-12) * WEIGHT_SCALE).astype(np.uint8),
        "centre": topics.centre.astype(np.float32),
        "groups": groups.astype(np.uint16),
        "centroids": np.clip(np.rint(centroids * GROUP_SCALE), -127, 127).astype(np.int8),
    }
    return arrays, {str(order): len(level.keys) for order, level in enumerate(levels, start=2)}


def build(
    corpus_folder: Path, wordnet_folder: Path, out: Path, recipe: Recipe, sources: Mapping[str, TracedFile]
) -> dict[str, object]:
    """Builds `model.npz` and `manifest.json` in `out` and returns the manifest; refuses files without a source."""
    files = trace_sources([*corpus_files(corpus_folder), *(wordnet_folder / name for name in WORDNET)], sources)
    corpus, wordnet = read_corpus(corpus_folder), WordNet.read(wordnet_folder)
    arrays, ngrams = build_arrays(corpus, wordnet, recipe)
    out.mkdir(parents=True, exist_ok=True)
    write_arrays(out / "model.npz", arrays)
    manifest: dict[str, object] = {
        "sha256": hashlib.sha256((out / "model.npz").read_bytes()).hexdigest(),
        "corpus": files,
        "ngrams": ngrams,
        "recipe": asdict(recipe),
    }
    (out / "manifest.json").write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return manifest


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the build from the command line."""
    parser = argparse.ArgumentParser(description="Builds the tables of the embedded model from public text.")
    parser.add_argument("--corpus", type=Path, required=True, help="folder of *.txt.xz files")
    parser.add_argument("--wordnet", type=Path, required=True, help="folder of the data files of WordNet 3.0")
    parser.add_argument("--out", type=Path, required=True, help="folder for model.npz and manifest.json")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    build(options.corpus, options.wordnet, options.out, Recipe(), SOURCES)


if __name__ == "__main__":
    main()
