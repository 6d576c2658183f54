"""Facts that only the private corpus has: which system answers questions about them, at which epsilon?

Invented creatures, each with a value for every attribute. A document names its creature and states one attribute in
one of three wordings, beside another sentence; a question asks in a wording that no document has. Attributes may share
their values: words alone cannot tell a friend from a foe, pairs of words can. Of the texts that name the creature a
reader takes the eight nearest to the question, and the value that they state most often: the store is what is measured,
not a model.

The shape is that of a published benchmark (ContinuousBench, Geminon: 600 creatures, 14 questions each); creatures,
values and wordings are made here, and are far easier to find than free prose. Numbers of the two do not compare.

By default cells that take long are left out, and said to be: ten minutes at most on two cores. `--full` was not run
whole; `results/words.md` says which of its cells were. A line is printed when it is known; a run that was ended goes on
with --systems, --per and --epsilon.

    python benchmarks/bench_facts.py [--full]
    python benchmarks/bench_facts.py --data FILE.jsonl.gz ...
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import lzma
import random
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from _voting_task import read_rows

from langchain_dpicl import (
    Budget,
    DocumentSynthesizer,
    DPRetrievalVotingRunnable,
    DPVotingRunnable,
    EmbeddedLLM,
    FewShotTask,
    LabelAnswers,
    PrivateExamples,
    Retrieval,
    Rows,
    Serving,
    WordDiscovery,
)
from langchain_dpicl.backends import LocalEmbeddings
from langchain_dpicl.backends.embedded import EmbeddedModel
from langchain_dpicl.backends.fake import FakeBackend
from langchain_dpicl.backends.rows.answer_rows import STOP_WORDS
from langchain_dpicl.options import Decoding, Topics

DELTA = 1e-6
NEAR = 8
"""Texts that the reader sees."""
TOKENS = 16
"""Tokens of a text in a store of texts."""
ANIMALS = ("otter", "raven", "lynx", "heron", "bison", "gecko", "moose", "tapir")
VALUES: dict[str, tuple[str, ...]] = {
    "ability": ("anchor", "beacon", "cinder", "drift", "ember", "frost", "gale", "harvest"),
    "diet": ("acorns", "berries", "clover", "moss", "nectar", "pollen", "roots", "seeds"),
    "home": ("canyon", "delta", "glacier", "jungle", "lagoon", "marsh", "prairie", "reef"),
    "colour": ("amber", "cobalt", "crimson", "emerald", "ivory", "maroon", "saffron", "violet"),
    "friend": ANIMALS,
    "foe": ANIMALS,
    "rival": ANIMALS,
    "guardian": ANIMALS,
    "voice": ("bellow", "chirp", "croak", "growl", "hiss", "purr", "trill", "whistle"),
    "gift": ("candle", "compass", "feather", "lantern", "mirror", "needle", "pebble", "ribbon"),
    "season": ("autumn", "drought", "harvesttide", "midwinter", "monsoon", "solstice", "springtide", "thaw"),
    "metal": ("bronze", "copper", "iron", "nickel", "pewter", "silver", "tungsten", "zinc"),
    "dance": ("bolero", "foxtrot", "jig", "mazurka", "polka", "rumba", "tango", "waltz"),
    "fear": ("clocks", "drums", "fog", "ladders", "magnets", "shadows", "thunder", "trumpets"),
}
WORDINGS = ("The {a} of {n} is the {v}.", "{n} has a {a}, the {v}.", "A {a}, the {v}, was with {n}.")
QUESTION = "Which {a} belongs to {n}? The {a} of {n} is the"
FILLERS = ("It was seen by the {p}.", "A note from the {p}.", "The keeper of the {p} wrote this.", "Seen near the {p}.")
PLACES = ("river", "forest", "harbour", "tower", "market", "cave", "meadow", "bridge")
SYLLABLES = (
    ("vel", "kor", "tam", "bri", "sul", "nar", "pho", "wex", "gri", "dor"),
    ("da", "mi", "lo", "ru", "ke", "sa", "ti", "vu"),
    ("rin", "th", "lax", "mon", "zed", "gor", "pim", "quil"),
)


@dataclass(frozen=True)
class Corpus:
    """Invented facts and the private documents that state them.

    Attributes:
      facts: the value of each creature and attribute.
      documents: texts, each with the creature that it names.
    """

    facts: dict[tuple[str, str], str]
    documents: list[dict[str, str]]

    @property
    def names(self) -> tuple[str, ...]:
        """The creatures."""
        return tuple(sorted({name for name, _ in self.facts}))


def corpus(
    creatures: int, per_fact: int, attributes: int, coins: random.Random, *, without: Sequence[str] = ()
) -> Corpus:
    """Makes facts up about other creatures than those, and so many documents for each."""
    names = [f"{a}{b}{c}" for a in SYLLABLES[0] for b in SYLLABLES[1] for c in SYLLABLES[2]]
    coins.shuffle(names)
    names = [name for name in names if name not in without]
    asked = list(VALUES)[:attributes]
    facts = {(name, asked_of): coins.choice(VALUES[asked_of]) for name in names[:creatures] for asked_of in asked}
    documents = []
    for (name, attribute), value in facts.items():
        for _ in range(per_fact):
            said = [coins.choice(WORDINGS).format(a=attribute, n=name.capitalize(), v=value)]
            said.append(coins.choice(FILLERS).format(p=coins.choice(PLACES)))
            coins.shuffle(said)
            documents.append({"text": " ".join(said), "creature": name})
    coins.shuffle(documents)
    return Corpus(facts, documents)


def thinned(rows_of_it: list[dict[str, str]], count: int) -> list[dict[str, str]]:
    """So many rows, evenly over all."""
    return rows_of_it[:: max(1, len(rows_of_it) // count)][:count]


def question(name: str, attribute: str) -> str:
    """A wording that no document has."""
    return QUESTION.format(a=attribute, n=name.capitalize())


def said_words(text: str) -> list[str]:
    """The words of a text, in lower case."""
    return re.findall("[a-z]+", text.lower())


def directions(vectors: Any) -> Any:
    """Unit vectors: similarities are cosines, as those of a retrieving voter."""
    found = np.atleast_2d(np.array(vectors))
    return found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-12)


class Reader:
    """Answers from the texts of a store that name the creature, the nearest to the question of them."""

    def __init__(self, store: Sequence[str]) -> None:
        self._store, self._embeddings = list(store), LocalEmbeddings()
        self._naming: dict[str, list[int]] = {}
        for place, text in enumerate(self._store):
            for word in set(said_words(text)):
                self._naming.setdefault(word, []).append(place)

    def ask(self, name: str, attribute: str) -> str | None:
        """The value that stands beside the attribute's name most often, or else anywhere; None where there is none.

        What is said of the creature below a heading is said of the heading, too: a topic may be a value.
        """
        naming = self._naming.get(name, [])
        if not naming:
            return None
        # Only texts that name the creature are compared: those of all creatures would not fit into memory.
        texts = list(dict.fromkeys(self._store[place] for place in naming))
        near = (
            directions(self._embeddings.embed_documents(texts))
            @ directions(self._embeddings.embed_query(question(name, attribute)))[0]
        )
        likeness = dict(zip(texts, near.tolist(), strict=True))
        shown = sorted((self._store[place] for place in naming), key=lambda text: -likeness[text])[:NEAR]
        beside, anywhere = Counter[str](), Counter[str]()
        for text in shown:
            anywhere.update(word for word in said_words(text) if word in VALUES[attribute])
            heading = said_words(text.partition("\n")[0]) if "\n" in text else []
            for line in re.split(r"[\n.]", text):
                said = said_words(line)
                if attribute in said and len(said) <= max(2, len(said_words(WORDINGS[2])) + 2):
                    stated = (*said, *heading) if name in said else said
                    beside.update(word for word in stated if word in VALUES[attribute])
        best = (beside or anywhere).most_common(2)
        return None if not best or (len(best) == 2 and best[0][1] == best[1][1]) else best[0][0]


Answer = Callable[[str, str], str | None]


def words(made: Corpus, epsilon: float, *, pairs: bool) -> Answer:
    """A store of released words, one document for each creature.

    The creatures are declared: they split the release, and are the labels of its documents without being released.
    """
    private = PrivateExamples(made.documents, label_key="creature", labels=made.names, public_size=_declared(made))
    finder = WordDiscovery.from_private_examples(
        private, budget=Budget(epsilon=epsilon, delta=DELTA), epsilon=epsilon, pairs=pairs, deny=made.names
    )
    return Reader([document.page_content for document in finder.run(progress=False).documents]).ask


def store(made: Corpus, epsilon: float, *, are_named: bool) -> Answer:
    """A store of words and pairs by topic: the creatures are its public vocabulary, or are found as released words."""
    names = made.names if are_named else None
    topics = Topics(names, len(made.names) * (1 if are_named else 3), keywords_per_unit=1 if are_named else None)
    synthesizer = DocumentSynthesizer.from_private_examples(
        PrivateExamples([each["text"] for each in made.documents], public_size=_declared(made)),
        topics=topics.replace(pairs=True),
        documents_per_topic=0,
        budget=Budget(epsilon=epsilon, delta=DELTA),
        epsilon=epsilon,
    )
    return Reader([document.page_content for document in synthesizer.run(progress=False).documents]).ask


@dataclass(frozen=True)
class Writing:
    """How texts are written.

    Attributes:
      texts: of each creature.
      top_tokens: the model reports so many tokens, as one behind an API does; None: it shows its whole vocabulary.
    """

    texts: int = 3
    top_tokens: int | None = None

    def model(self) -> Any:
        """The model that writes."""
        return EmbeddedLLM() if self.top_tokens is None else reporting_model(self.top_tokens)


def reporting_model(top_tokens: int) -> FakeBackend:
    """The embedded model behind an API: of a prompt it reports its likeliest tokens, as bytes, and nothing else."""
    model = EmbeddedModel()

    def distribution(prompt: str, prefix: tuple[bytes, ...]) -> dict[bytes, float]:
        text = prompt + b"".join(prefix).decode("utf-8", "replace")
        pairs = model.top_tokens(text, (), top_k=top_tokens)
        return {model.token_bytes(int(str(token))): chance for token, chance in pairs}

    return FakeBackend(distribution, max_top_k=top_tokens, name=f"{model.name}, {top_tokens} top tokens")


def texts(made: Corpus, epsilon: float, writing: Writing, *, has_words: bool = False) -> Answer:
    """A store of private texts, whose topics are the creatures; with released words, their words are candidates."""
    private = PrivateExamples([{"text": each["text"]} for each in made.documents], public_size=_declared(made))
    synthesizer = DocumentSynthesizer.from_private_examples(
        private,
        llm=writing.model(),
        topics=Topics(made.names, len(made.names), keywords_per_unit=1, words=8 if has_words else 0),
        documents_per_topic=writing.texts,
        max_tokens=TOKENS,
        budget=Budget(epsilon=epsilon, delta=DELTA),
        epsilon=epsilon,
        rows=Rows(units=40, redraw_every="run"),
        decoding=Decoding(candidates=writing.top_tokens or 100, released_words=True if has_words else None),
    )
    found = synthesizer.run(progress=False)
    return Reader([f"{text.topic}\n{text.text}" for text in found.texts]).ask


def instructed(made: Corpus, writing: Writing) -> Answer:
    """As many texts as a store of texts has, by the model from the instruction and the creature's name alone."""
    names = [name for name in made.names for _ in range(writing.texts)]
    model = EmbeddedLLM(max_tokens=TOKENS, stop=["\n"], temperature=1.0)
    asked = model.batch([f"Write a text for the given topic.\n\ntopic: {name}\ntext:" for name in names])
    return Reader([f"{name}\n{text}" for name, text in zip(names, asked, strict=True)]).ask


def votes(made: Corpus, epsilon: float, threshold: float) -> Answer:
    """Votes of the documents near to a question; each takes part in one vote."""
    labels = sorted(set(made.facts.values()))
    voter = DPRetrievalVotingRunnable.from_private_examples(
        PrivateExamples([each["text"] for each in made.documents], public_size=_declared(made)),
        llm=EmbeddedLLM(),
        retrieval=Retrieval(LocalEmbeddings(topics=False), similarity_threshold=threshold, participations=1, slots=64),
        **_priced(epsilon, labels),
    )
    return lambda name, attribute: str(voter.invoke(question(name, attribute)))


def sampled(made: Corpus, epsilon: float, questions: int) -> Answer:
    """Votes of random samples."""
    labels = sorted(set(made.facts.values()))
    voter = DPVotingRunnable.from_private_examples(
        PrivateExamples([each["text"] for each in made.documents], public_size=_declared(made)),
        llm=EmbeddedLLM(),
        max_queries=questions,
        rows=Rows(slots=20, shots=4),
        **_priced(epsilon, labels),
    )
    return lambda name, attribute: str(voter.invoke(question(name, attribute)))


def _priced(epsilon: float, labels: list[str]) -> dict[str, Any]:
    return {
        "budget": Budget(epsilon=epsilon, delta=DELTA),
        "epsilon": epsilon,
        "task": FewShotTask("{text}", "{input}", labels=labels),
        "answers": LabelAnswers(calibrate=False),
        "serving": Serving(memo_size=0),
    }


def _declared(made: Corpus) -> int:
    """A round public size that goes with delta."""
    return 10 ** len(str(len(made.documents) - 1)) if len(made.documents) <= 10**5 else 10**5


def public_threshold(made: Corpus, coins: random.Random) -> float:
    """The similarity that tells documents of a question from others, on other, public creatures."""
    other, embeddings = others(made, coins), LocalEmbeddings(topics=False)
    vectors = directions(embeddings.embed_documents([each["text"] for each in other.documents]))
    same, apart = [], []
    for (name, attribute), value in other.facts.items():
        near = vectors @ directions(embeddings.embed_query(question(name, attribute)))[0]
        states = [name in said_words(d["text"]) and value in said_words(d["text"]) for d in other.documents]
        same += near[np.array(states)].tolist()
        apart += near[~np.array(states)].tolist()
    return float((np.quantile(same, 0.2) + np.quantile(apart, 0.99)) / 2)


def others(made: Corpus, coins: random.Random) -> Corpus:
    """Public creatures that the private documents do not name, in the same wordings."""
    return corpus(12, 4, 4, coins, without=made.names)


def asked_of(made: Corpus, questions: int, coins: random.Random) -> list[tuple[str, str]]:
    """The questions of one run."""
    keys = sorted(made.facts)
    return keys if questions >= len(keys) else coins.sample(keys, questions)


def right(answer: Answer, made: Corpus, keys: Iterable[tuple[str, str]]) -> tuple[float, float]:
    """The share of questions that are answered right: about values of one attribute, and about shared ones."""
    found: dict[bool, list[bool]] = {False: [], True: []}
    for name, attribute in keys:
        found[VALUES[attribute] is ANIMALS].append(answer(name, attribute) == made.facts[name, attribute])
    own, shared = (statistics.fmean(found[is_shared]) if found[is_shared] else 0.0 for is_shared in (False, True))
    return own, shared


@dataclass(frozen=True)
class Cell:
    """One run: the facts of a seed, and a system that answers questions about them.

    Attributes:
      per_fact: documents of a fact.
      system: which one.
      epsilon: what it may spend; None: it spends nothing.
      seed: of the facts, never of noise.
      size: creatures, attributes and questions.
      writing: how texts are written.
    """

    per_fact: int
    system: str
    epsilon: float | None
    seed: int
    size: tuple[int, int, int]
    writing: Writing

    def right(self) -> tuple[float, float, float]:
        """The share of right answers about values of one attribute, and about shared ones, and processor seconds."""
        made, keys, threshold = facts_of(self.seed, self.per_fact, self.size)
        start = time.process_time()
        return *right(self._answer(made, len(keys), threshold), made, keys), time.process_time() - start

    def _answer(self, made: Corpus, number: int, threshold: float) -> Answer:
        epsilon = 0.0 if self.epsilon is None else self.epsilon
        systems: dict[str, Callable[[], Answer]] = {
            "words": lambda: words(made, epsilon, pairs=False),
            "pairs": lambda: words(made, epsilon, pairs=True),
            "store": lambda: store(made, epsilon, are_named=True),
            "store, names found": lambda: store(made, epsilon, are_named=False),
            "texts": lambda: texts(made, epsilon, self.writing),
            "texts, released words": lambda: texts(made, epsilon, self.writing, has_words=True),
            "instruction only": lambda: instructed(made, self.writing),
            "retrieved votes": lambda: votes(made, epsilon, threshold),
            "sampled votes": lambda: sampled(made, epsilon, number),
            "documents, no privacy": lambda: Reader([each["text"] for each in made.documents]).ask,
            "no private data": lambda: Reader([]).ask,
        }
        return systems[self.system]()


@lru_cache(maxsize=8)
def facts_of(seed: int, per_fact: int, size: tuple[int, int, int]) -> tuple[Corpus, list[tuple[str, str]], float]:
    """Facts, questions about them, and the similarity by which votes find documents."""
    coins = random.Random(seed)
    made = corpus(size[0], per_fact, size[1], coins)
    return made, asked_of(made, size[2], coins), public_threshold(made, coins)


def rows(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields a line of the table for each system, epsilon and number of documents of a fact."""
    size = (arguments.creatures, arguments.attributes, arguments.questions)
    of_all = (size, Writing(arguments.texts, arguments.top_tokens))
    lines = [
        (per_fact, name, epsilon)
        for per_fact in arguments.per
        for name in arguments.systems
        for epsilon in (arguments.epsilon if name not in FREE else [None])
    ]
    with _results(arguments.processes) as results:
        runs = {line: [Cell(*line, seed, *of_all) for seed in range(_seeds(line, arguments))] for line in lines}
        waiting = {line: [results(cell) for cell in cells] for line, cells in runs.items()}
        for per_fact, name, epsilon in lines:
            found = [result() for result in waiting[per_fact, name, epsilon]]
            yield {
                "per": per_fact,
                "system": name,
                "epsilon": "-" if epsilon is None else f"{epsilon:g}",
                "own": _shown([own for own, _, _ in found]),
                "shared": _shown([shared for _, shared, _ in found]),
                "seeds": len(found),
                "seconds": sum(seconds for _, _, seconds in found),
            }


def _seeds(line: tuple[int, str, float | None], arguments: argparse.Namespace) -> int:
    """How often a cell is run; by default some systems run once or at two epsilons, and 300 documents never."""
    per_fact, name, epsilon = line
    if not arguments.is_short:
        return int(arguments.seeds)
    if per_fact > SHORT_PER or (name in SLOW and epsilon not in {*SHORT_EPSILONS, None}):
        return 0
    return 1 if name in ONCE else int(arguments.seeds)


@contextmanager
def _results(processes: int) -> Iterator[Callable[[Cell], Callable[[], tuple[float, float, float]]]]:
    """Yields what begins a cell, in this process or in others, and returns the function that waits for its result."""
    if processes == 1:
        yield lambda cell: cell.right
        return
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        yield lambda cell: pool.submit(cell.right).result


def _shown(shares: list[float]) -> str:
    """The mean over seeds and, of several, its standard deviation; of none that it was not run."""
    if not shares:
        return "not run"
    spread = f" +- {statistics.stdev(shares):.2f}" if len(shares) > 1 else ""
    return f"{statistics.fmean(shares):.2f}{spread}"


def real_rows(path: Path, epsilons: Sequence[float], *, seeds: int, size: int, questions: int) -> Iterator[list[str]]:
    """Yields how often the nearest document of a store is of the class of a test text, for one labelled data set.

    One document for each class: its name alone, or with a text that the model writes from the instruction, both without
    data; or its name and its released words, at the defaults of `WordDiscovery`. Beside them the private texts.
    """
    read = read_rows(path)
    named = {"train": [], "test": []}
    for row in read:
        named[row["split"]].append({"text": row["text"], "label": str(row.get("label_name", row.get("label")))})
    train, test = (thinned(named[part], number) for part, number in (("train", size), ("test", questions)))
    labels = tuple(sorted({row["label"] for row in train}))
    embeddings = LocalEmbeddings()
    asked = directions(embeddings.embed_documents([row["text"] for row in test]))

    def of_its_class(store: Sequence[str], classes: Sequence[str | None]) -> float:
        nearest = (asked @ directions(embeddings.embed_documents(list(store))).T).argmax(axis=1)
        return statistics.fmean(classes[place] == row["label"] for place, row in zip(nearest, test, strict=True))

    titles = [name.replace("_", " ") for name in labels]
    yield ["names alone", "-", _shown([of_its_class(titles, labels)])]
    model = EmbeddedLLM(max_tokens=TOKENS, stop=["\n"], temperature=1.0)
    prompts = [f"Write a text for the given topic.\n\ntopic: {title}\ntext:" for title in titles]
    written = [model.batch(prompts) for _ in range(seeds)]
    named_texts = [[f"{title}\n{text}" for title, text in zip(titles, texts, strict=True)] for texts in written]
    yield ["instruction only", "-", _shown([of_its_class(texts, labels) for texts in named_texts])]
    yield [
        "documents, no privacy",
        "-",
        _shown([of_its_class(*zip(*((r["text"], r["label"]) for r in train), strict=True))]),
    ]
    for epsilon in epsilons:
        found = []
        for _ in range(seeds):
            private = PrivateExamples(train, label_key="label", labels=labels, public_size=10_000)
            budget = Budget(epsilon=epsilon, delta=DELTA)
            finder = WordDiscovery.from_private_examples(private, budget=budget, epsilon=epsilon)
            documents = finder.run(progress=False).documents
            classes = [document.metadata["label"] for document in documents]
            found.append(of_its_class([document.page_content for document in documents], classes))
        yield ["names and words", f"{epsilon:g}", _shown(found)]


FREE = ("instruction only", "documents, no privacy", "no private data")
"""Systems that spend no budget."""
SYSTEMS = (
    *("words", "pairs", "store", "store, names found", "texts", "texts, released words", "retrieved votes"),
    *("sampled votes", *FREE),
)
ONCE = ("texts", "texts, released words", "sampled votes", "instruction only", "documents, no privacy")
"""Systems that take long: by default of one seed, at two epsilons."""
SLOW = (*ONCE, "retrieved votes")
"""Systems that are asked at two epsilons by default."""
SHORT_EPSILONS, SHORT_PER = (1.0, 4.0), 100
FULL = {"creatures": 600, "attributes": 14, "questions": 600}


def chart(found: Sequence[dict[str, Any]], path: Path) -> None:
    """Draws the share of right answers by epsilon, a panel for each number of documents of a fact."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    mpl.rcParams["svg.hashsalt"] = "facts"
    shown = [row for row in found if row["own"] != "not run"]
    panels = sorted({row["per"] for row in shown})
    figure, axes = plt.subplots(1, len(panels), figsize=(4.2 * len(panels), 3.8), sharey=True, squeeze=False)
    for axis, per in zip(axes[0], panels, strict=True):
        free: dict[float, list[str]] = {}
        for name in SYSTEMS:
            line = [row for row in shown if (row["per"], row["system"]) == (per, name)]
            right = [float(row["own"].split()[0]) for row in line]
            if line and line[0]["epsilon"] == "-":
                free.setdefault(right[0], []).append(name)
            elif line:
                axis.plot([float(row["epsilon"]) for row in line], right, marker="o", markersize=3, label=name)
        for height, names in free.items():
            axis.axhline(height, linestyle=":", linewidth=1, color="grey")
            axis.text(
                0.99, height + 0.02, "; ".join(names), transform=axis.get_yaxis_transform(), ha="right", fontsize=6
            )
        axis.set(title=f"{per} documents of a fact", xlabel="epsilon", xscale="log", ylim=(-0.05, 1.1))
        ticks = sorted({float(row["epsilon"]) for row in shown if row["epsilon"] != "-"})
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.set_xticks([], minor=True)
    axes[0][0].set_ylabel("right answers")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="lower center", ncols=4, fontsize=7)
    figure.tight_layout(rect=(0, 0.1, 1, 1))
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def breadth(path: Path, epsilon: float) -> Iterator[str]:
    """Yields, by words that a unit casts, the share of words of other texts that a release of one label's words holds.

    Args:
      path: public texts as "label: text", a blank line between two; the eight commonest labels, or all as one.
      epsilon: of the release.
    """
    with lzma.open(path, "rt", encoding="utf-8") as file:
        found = [each.strip().partition(": ") for each in file.read().split("\n\n")]
    commonest = [label for label, _ in Counter(label for label, _, text in found if text).most_common(8)]
    # Labels of a few units have no word that enough of them write.
    is_split = sum(label in commonest for label, _, _ in found) > len(found) / 4
    texts = [(label if is_split else "all", text) for label, _, text in found if text]
    texts = [each for each in texts if each[0] in {*commonest, "all"}]
    for number in (4, 8, 16, 32, 64):
        private = PrivateExamples(
            [{"text": text, "label": label} for place, (label, text) in enumerate(texts) if place % 5],
            label_key="label",
            labels=sorted({label for label, _ in texts}),
            public_size=10**5,
        )
        budget = Budget(epsilon=epsilon, delta=DELTA)
        finder = WordDiscovery.from_private_examples(private, budget=budget, epsilon=epsilon, max_values=number)
        held = finder.run(progress=False).by_label
        other = [
            (label, {word for word in said_words(text) if len(word) > 2} - STOP_WORDS) for label, text in texts[::5]
        ]
        share = sum(len(words & {*held.get(label, ())}) for label, words in other) / sum(
            len(words) for _, words in other
        )
        yield f"{number}: {share:.3f}"


def _print_real(arguments: argparse.Namespace) -> None:
    print("| data | store | epsilon | nearest document of the right class |\n|---|---|---|---|")
    for path in arguments.data:
        options = {"seeds": max(2, arguments.seeds), "size": 8_000, "questions": 400}
        for line in real_rows(path, arguments.epsilon, **options):
            print(f"| {path.name.split('.')[0]} | {' | '.join(line)} |", flush=True)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--creatures", type=int, default=96)
    parser.add_argument("--attributes", type=int, default=6, help="of 14; the fifth and the sixth share their values")
    parser.add_argument("--per", type=int, nargs="*", default=[50, 100, 300], help="documents of a fact")
    parser.add_argument("--epsilon", type=float, nargs="*", default=[1.0, 2.0, 4.0, 8.0])
    parser.add_argument("--questions", type=int, default=60, help="asked of each system in a run")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--texts", type=int, default=3, help="of each creature in a store of texts")
    parser.add_argument("--top-tokens", type=int, help="the model that writes reports so many, as behind an API")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--all", action="store_true", help="leave no cell out")
    parser.add_argument("--systems", nargs="*", default=list(SYSTEMS), choices=SYSTEMS)
    parser.add_argument("--data", type=Path, nargs="*", default=[], help="labelled JSON lines instead, with a split")
    parser.add_argument(
        "--breadth", type=Path, nargs="*", default=[], help="public texts instead: which words are found"
    )
    parser.add_argument("--chart", type=Path, help="picture of all lines, .svg or .png")
    parser.add_argument("--full", action="store_true", help="600 creatures, 14 attributes, 600 questions, all cells")
    if parser.parse_args(argv).full:
        parser.set_defaults(**FULL)
    arguments = parser.parse_args(argv)
    arguments.is_short = not (arguments.full or arguments.all)
    if arguments.data:
        _print_real(arguments)
        return
    if arguments.breadth:
        for path, epsilon in itertools.product(arguments.breadth, arguments.epsilon):
            print(path.name.partition(".")[0], f"epsilon {epsilon:g}", *breadth(path, epsilon), sep=", ", flush=True)
        return
    if arguments.chart is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error("--chart: expected the package matplotlib, found none")
    size = f"{arguments.creatures} creatures, {arguments.attributes} attributes"
    print(f"{size}, delta {DELTA:g}, {arguments.questions} questions in a run")
    print("| documents a fact | system | epsilon | right | right, values of several attributes | seeds | seconds |")
    print("|---|---|---|---|---|---|---|")
    found = []
    for row in rows(arguments):
        found.append(row)
        shown = [row[name] for name in ("per", "system", "epsilon", "own", "shared", "seeds")]
        print(f"| {' | '.join(map(str, shown))} | {row['seconds']:.0f} |", flush=True)
    if arguments.chart is not None:
        chart(found, arguments.chart)


if __name__ == "__main__":
    main()
