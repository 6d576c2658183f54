"""Eight creatures with one fact each, in every private document: do synthetic texts state it?

One text is written for each creature, from all of its documents. A fact is kept if the text says "NAME is VALUE".

    python benchmarks/_facts_eight.py
"""

from __future__ import annotations

import argparse
import random
import statistics

from bench_facts import DELTA, said_words

from langchain_dpicl import Budget, DocumentSynthesizer, EmbeddedLLM, PrivateExamples, Rows
from langchain_dpicl.options import Decoding, Topics

CREATURES = 8
ABILITIES = (
    *("anchor", "beacon", "cinder", "drift", "ember", "frost", "gale", "harvest", "ink", "jolt"),
    *("kiln", "lantern", "mirror", "nettle", "orbit", "prism", "quarry", "ripple", "shelter", "thorn"),
)
SYLLABLES = (
    ("vel", "kor", "tam", "bri", "sul", "nar", "pho", "wex"),
    ("da", "mi", "lo", "ru"),
    ("rin", "th", "lax", "mon"),
)
WORDINGS = (
    "the ability of {n} is {v} . it was seen near the {p} .",
    "near the {p} a trainer met {n} . the ability of {n} is {v} .",
    "{n} rests by day . keepers at the {p} say : the ability of {n} is {v} .",
    "a note from the {p} : {n} weighs more than it seems and the ability of {n} is {v} .",
)
PLACES = ("river", "forest", "harbour", "tower", "market", "cave", "meadow", "bridge")


def facts(per_fact: int, coins: random.Random) -> tuple[dict[str, str], list[str]]:
    """The value of each creature, and the documents."""
    names = [f"{a}{b}{c}" for a in SYLLABLES[0] for b in SYLLABLES[1] for c in SYLLABLES[2]]
    values = {name: coins.choice(ABILITIES) for name in coins.sample(names, CREATURES)}
    documents = [
        coins.choice(WORDINGS).format(n=name, v=value, p=coins.choice(PLACES))
        for name, value in values.items()
        for _ in range(per_fact)
    ]
    coins.shuffle(documents)
    return values, documents


def kept(per_fact: int, epsilon: float, rows: int, seed: int, *, has_words: bool) -> tuple[float, float]:
    """The share of facts that a text states, and of values that are a whole word of it."""
    values, documents = facts(per_fact, random.Random(seed))
    synthesizer = DocumentSynthesizer.from_private_examples(
        PrivateExamples(documents, public_size=len(documents)),
        llm=EmbeddedLLM(),
        topics=Topics(
            sorted(values), CREATURES, keywords_per_unit=1, min_units=per_fact * 5 // 6, words=8 if has_words else 0
        ),
        documents_per_topic=1,
        max_tokens=16,
        budget=Budget(epsilon=epsilon, delta=DELTA),
        epsilon=epsilon,
        rows=Rows(units=rows, redraw_every="run"),
        decoding=Decoding(released_words=True if has_words else None),
    )
    texts = {text.topic: text.text for text in synthesizer.run(progress=False).texts}
    states = [f"{name} is {value}" in texts.get(name, "") for name, value in values.items()]
    says = [value in said_words(texts.get(name, "")) for name, value in values.items()]
    return statistics.fmean(states), statistics.fmean(says)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--per", type=int, default=300, help="documents of a fact")
    parser.add_argument("--epsilon", type=float, nargs="*", default=[1.0, 3.0])
    parser.add_argument("--rows", type=int, nargs="*", default=[40, 300], help="documents behind a token, on average")
    parser.add_argument("--seeds", type=int, default=5)
    asked = parser.parse_args()
    print("| released words | epsilon | rows | facts kept | values said |\n|---|---|---|---|---|")
    for has_words in (True, False):
        for epsilon in asked.epsilon:
            for rows in asked.rows:
                found = [kept(asked.per, epsilon, rows, seed, has_words=has_words) for seed in range(asked.seeds)]
                shares = zip(*found, strict=True)
                shown = [f"{statistics.fmean(part):.2f} +- {statistics.stdev(part):.2f}" for part in shares]
                print(f"| {'yes' if has_words else 'no'} | {epsilon:g} | {rows} | {' | '.join(shown)} |", flush=True)


if __name__ == "__main__":
    main()
