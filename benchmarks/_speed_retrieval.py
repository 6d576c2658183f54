"""What one retrieval query costs beyond its model calls, by the number of documents, beside a loop over all of them.

python benchmarks/_speed_retrieval.py --documents 1000000     # minutes of set-up, 6 GB
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from _speed_goals import Goal, table_of
from _voting_speed import InstantEngine
from langchain_core.embeddings import Embeddings
from numpy.typing import NDArray

from langchain_dpicl import Budget, DPRetrievalVotingRunnable, LabelAnswers, PrivateExamples, Retrieval, Serving
from langchain_dpicl.backends.rows.neighbour_rows import direction_of

LABELS = ("label", "other")
WIDTH = 384
THRESHOLD = 0.9
_BLOCK = 2_048


class MadeUp(Embeddings):
    """Vectors of 384 numbers that depend on the end of a text; no two of them are near."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [self.embed_query(text) for text in texts]

    def embed_query(self, text: str) -> list[float]:
        number = sum(byte * 31**place for place, byte in enumerate(text.encode()[-8:])) % 99_991
        return vector(number).tolist()  # type: ignore[no-any-return]


def vector(number: int) -> NDArray[np.float64]:
    found: NDArray[np.float64] = np.sin(np.arange(1, WIDTH + 1) * (1.0 + number) + number)
    return found


def voter(documents: int) -> DPRetrievalVotingRunnable:
    """Returns a voter over so many made-up documents, which are embedded already."""
    records = [{"text": f"document {place:08}", "queue": LABELS[place % 2]} for place in range(documents)]
    private = PrivateExamples(records, label_key="queue", labels=LABELS, public_size=documents)
    made = DPRetrievalVotingRunnable.from_private_examples(
        private,
        llm=InstantEngine(),
        retrieval=Retrieval(MadeUp(), similarity_threshold=THRESHOLD, participations=4, slots=10),
        budget=Budget(epsilon=1.0, delta=1e-8),
        epsilon=1.0,
        answers=LabelAnswers(calibrate=False),
        serving=Serving(memo_size=0),
    )
    made.warm_up()
    made.invoke("first")
    return made


def one_by_one(records: Sequence[dict[str, str]], directions: dict[int, Any]) -> list[list[int]]:
    """Compares document by document: copies of records, rows stacked from single arrays, numbers read one by one."""
    copies = [dict(record) for record in records]
    query = directions[0].astype(np.float64)
    near: list[list[int]] = [[] for _ in copies]
    for first in range(0, len(copies), _BLOCK):
        places = range(first, min(first + _BLOCK, len(copies)))
        block = np.array([directions[place] for place in places], dtype=np.float64)
        similar = block @ query / np.sqrt(np.einsum("ij,ij->i", block, block) * (query @ query))
        for place, value in enumerate(similar.tolist(), first):
            if value >= THRESHOLD:
                near[place].append(place)
    return near


def milliseconds(action: Callable[[], Any], *, turns: int) -> float:
    """Returns the least processor time of a turn."""
    spent = []
    for _ in range(turns):
        before = time.process_time()
        action()
        spent.append((time.process_time() - before) * 1e3)
    return min(spent)


def query_milliseconds(documents: int, *, turns: int) -> float:
    """Returns what a query of so many documents takes."""
    made = voter(documents)
    questions = iter(range(turns))
    return milliseconds(lambda: made.invoke(f"query {next(questions)}"), turns=turns)


def goals(*, documents: int = 50_000, turns: int = 5) -> list[Goal]:
    """Measures one query of so many documents."""
    ours = query_milliseconds(documents, turns=turns)
    records = [{"text": f"document {place:08}", "queue": LABELS[place % 2]} for place in range(documents)]
    directions = {place: direction_of(vector(place)).astype(np.float32) for place in range(documents)}
    theirs = milliseconds(lambda: one_by_one(records, directions), turns=turns)
    name = f"a retrieval query of {documents:,} documents: document by document / ours"
    return [Goal(name, ours, theirs, theirs / ours, 10.0, at_least=True)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=50_000)
    print(table_of(goals(documents=parser.parse_args().documents)))
