"""Ships: made-up facts on which the words-alone form of `LocalEmbeddings` was chosen.

Names, attributes, wordings, other sentences and questions differ from those of `bench_facts.py`. A line of the table is
one way to compare. A question is found if at least half of the documents that state its fact are near, and of all
others at most as many as state two facts.

    python benchmarks/_facts_ships.py
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np

from langchain_dpicl.backends import LocalEmbeddings
from langchain_dpicl.backends.rows import neighbour_rows

PETS = ("badger", "canary", "donkey", "ferret", "hamster", "iguana", "parrot", "tortoise")
VALUES = {
    "cargo": ("barley", "charcoal", "cotton", "granite", "honey", "olives", "parchment", "timber"),
    "flag": ("anchorite", "blazon", "crescent", "dolphin", "eagle", "lozenge", "sunburst", "trident"),
    "port": ("calais", "dakar", "genoa", "lisbon", "muscat", "odessa", "quebec", "riga"),
    "captain": ("abbot", "baker", "carver", "dyer", "farrier", "glover", "mason", "weaver"),
    "mascot": PETS,
    "pet": PETS,
    "engine": ("boiler", "diesel", "kerosene", "paddle", "piston", "sail", "solar", "turbine"),
    "rope": ("flax", "hemp", "jute", "leather", "nylon", "silk", "sisal", "wire"),
}
WORDINGS = (
    "{n} sails with {v} for {a}.",
    "As {a}, {v} came to {n} last year.",
    "We saw {n}; {a}: {v}.",
    "Everyone knows that {v} is the {a} of the old {n}.",
)
QUESTIONS = ("What is the {a} of {n}?", "Tell me about {n}. Its {a} is", "Which {a} has {n}? {n} has the {a}")
FILLERS = ("The {p} were closed that day.", "Weather was good near the {p}.", "Ask for it at the {p}.", "Rain fell.")
PLACES = ("docks", "customs office", "lighthouse", "shipyard", "tavern", "chapel", "warehouse", "northern pier")
SYLLABLES = (
    ("bal", "cro", "fen", "hul", "jas", "lor", "mey", "oss", "pur", "zan"),
    ("a", "e", "io", "ou", "y", "u"),
    ("dric", "fell", "nox", "ston", "tara", "vane", "wick", "bby"),
)
SHIPS, PER_FACT = 96, 4


def facts(coins: random.Random) -> tuple[list[tuple[str, str]], list[tuple[tuple[str, str], str]]]:
    """Ship and attribute of each fact, and the documents, each with its fact."""
    names = [f"{a}{b}{c}".capitalize() for a in SYLLABLES[0] for b in SYLLABLES[1] for c in SYLLABLES[2]]
    keys = [(name, attribute) for name in coins.sample(names, SHIPS) for attribute in VALUES]
    documents = []
    for name, attribute in keys:
        value = coins.choice(VALUES[attribute])
        for _ in range(PER_FACT):
            said = [coins.choice(WORDINGS).format(a=attribute, n=name, v=value)]
            said.append(coins.choice(FILLERS).format(p=coins.choice(PLACES)))
            coins.shuffle(said)
            documents.append(((name, attribute), " ".join(said)))
    return keys, documents


def found(embed: Callable[[str], list[float]], seed: int) -> tuple[float, float, float]:
    """The threshold by the rule of `bench_facts.py`, the share of documents that it finds, and of questions."""
    coins = random.Random(seed)
    keys, documents = facts(coins)
    owners = np.array([keys.index(key) for key, _ in documents])
    near = (
        np.array([embed(text) for _, text in documents])
        @ np.array([embed(coins.choice(QUESTIONS).format(a=attribute, n=name)) for name, attribute in keys]).T
    )
    states = owners[:, None] == np.arange(len(keys))
    threshold = float((np.quantile(near[states], 0.2) + np.quantile(near[~states], 0.99)) / 2)
    own, others = ((near >= threshold) & states).sum(axis=0), ((near >= threshold) & ~states).sum(axis=0)
    is_found = (own >= PER_FACT / 2) & (others <= 2 * PER_FACT)
    return threshold, float(own.mean()) / PER_FACT, float(is_found.mean())


def words(common: float, pair: float, columns: int) -> Callable[[str], list[float]]:
    """Words and pieces alone."""

    def embed(text: str) -> list[float]:
        vector = neighbour_rows._hash_text(text, common=common, pair=pair, columns=columns)  # noqa: SLF001
        return (vector / np.linalg.norm(vector)).tolist()

    return embed


def both(text: str) -> list[float]:
    """The default: words, pairs and topic."""
    return (np.array(LocalEmbeddings().embed_query(text)) / np.sqrt(2)).tolist()


def main() -> None:
    print("| a word that counts half | pairs | topic | columns | threshold | documents found | questions found |")
    print("|---|---|---|---|---|---|---|")
    ways = {"1e-2 | yes | yes | 1024": both, "1e-2 | yes | no | 1024": words(1e-2, 0.5, 1024)}
    rarities = [(common, 1024) for common in (1e-2, 3e-3, 1e-3, 3e-4, 1e-4)]
    rarities += [(1e-3, 2048), (3e-3, 4096), (1e-3, 4096), (3e-4, 4096), (1e-3, 8192)]
    ways |= {f"{common:g} | no | no | {columns}": words(common, 0.0, columns) for common, columns in rarities}
    for shown, embed in ways.items():
        lines = np.mean([found(embed, seed) for seed in range(3)], axis=0)
        print(f"| {shown} | {' | '.join(f'{number:.2f}' for number in lines)} |", flush=True)


if __name__ == "__main__":
    main()
