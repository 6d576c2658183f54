"""What the tests of answers from retrieved documents share: an engine that reads its row, embeddings by topic, a room.

Text is invented. A document says its topic in its first word, and the query asks for one.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings

from langchain_dpicl import (
    DPRetrievalVotingRunnable,
    FewShotTask,
    LabelAnswers,
    Noise,
    PrivacyBudgetCallbackHandler,
    PrivateExamples,
    Retrieval,
    Serving,
)
from langchain_dpicl.backends.fake import FakeBackend

TOPICS = ("cough", "fever", "sleep")
LABELS = ("yes", "no")
CANARY = "zx-retrieval-canary-77"


class TopicEmbeddings(Embeddings):
    """One direction for each topic; counts what it is shown, without keeping it."""

    def __init__(self) -> None:
        self.seen = Counter[str]()
        self.broken = ""
        self.seconds = 0.0
        self._lock = threading.Lock()

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        with self._lock:
            self.seen.update(texts)
        time.sleep(self.seconds)
        if self.broken and any(self.broken in text for text in texts):
            raise RuntimeError("an embedding that fails")
        return [[float(topic in text) for topic in TOPICS] + [0.1] for text in texts]

    def embed_query(self, text: str) -> list[float]:
        raise AssertionError("queries are embedded as documents are")


def says_what_it_reads(prompt: str, prefix: tuple[bytes, ...]) -> Mapping[str, float]:
    """Says yes where the row's document does, no where it does, and no without a document."""
    said = "yes" if "says yes" in prompt else "no"
    return {f" {label}": 0.9 if label == said else 0.1 for label in LABELS}


def engine(**options: Any) -> FakeBackend:
    return FakeBackend(says_what_it_reads, vocabulary=[f" {label}" for label in LABELS], **options)


def record(topic: str, says: str, patient: str) -> dict[str, str]:
    return {"text": f"{topic}: {CANARY} {patient} says {says}", "patient": patient}


def records(topic: str, says: str, count: int) -> list[dict[str, str]]:
    return [record(topic, says, f"{topic}-{says}-{place}") for place in range(count)]


def documents(*listed: Mapping[str, str]) -> list[Document]:
    return [Document(each["text"], metadata={"patient": each["patient"]}) for each in listed]


def examples(*listed: Mapping[str, str], **options: Any) -> PrivateExamples:
    return PrivateExamples(listed, unit_key="patient", public_size=100, **options)


def house(**options: Any) -> PrivacyBudgetCallbackHandler:
    return PrivacyBudgetCallbackHandler(**{"epsilon": 1e8, "delta": 1e-4, "name": "house", **options})


NEAR = Retrieval(TopicEmbeddings(), similarity_threshold=0.5, participations=2, slots=8)
TASK = FewShotTask(labels=LABELS)
PLAIN = LabelAnswers(calibrate=False, abstain_below="never", scores=True)
FRESH = Serving(memo_size=0)
QUIET: dict[str, Any] = {"noise": Noise(multiplier=0.01), "epsilon": 1e7, "answers": PLAIN, "serving": FRESH}
"""Noise so small that votes can be counted; its cost is of no interest."""


def voter(private: PrivateExamples, **options: Any) -> Any:
    """A component whose answers are results."""
    given = {"llm": engine(), "retrieval": NEAR, "task": TASK, **QUIET, **options}
    given.setdefault("budget", house())
    return DPRetrievalVotingRunnable.from_private_examples(private, **given).with_receipts()


def votes(found: Any) -> dict[str, int]:
    """Returns the votes behind noise that is next to nothing."""
    return {label: round(value) for label, value in found.scores.items()}
