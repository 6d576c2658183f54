"""Reads and writes the checkpoint file of a run that synthesizes documents."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from langchain_dpicl._released_files import CheckpointFile, FileForm
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy._validate import check_int
from langchain_dpicl.released_documents import SyntheticText, text_of


class DocumentsCheckpoint(CheckpointFile):
    """A file that stores the topics before their ticket is committed, and every finished document.

    Its content is untrusted: topics and texts are bounded by the run's terms, and the ledger knows which topics were
    released (`TopicExamples.name_topics`) and how many texts remain.
    """

    _FORM = FileForm(
        "a checkpoint of synthetic documents",
        "langchain-dpicl/synthetic-documents-checkpoint",
        1,
        frozenset({"terms", "topics", "documents"}),
    )

    def read(self) -> tuple[tuple[tuple[str, int], ...], tuple[SyntheticText, ...]] | None:
        """Returns topics with their noisy counts, and documents; None: there is no file yet."""
        if (state := self._state()) is None:
            return None
        topics, texts = state["topics"], state["documents"]
        # The file is untrusted: every value is checked before it is used.
        is_form = isinstance(topics, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in topics)
        if not is_form or not isinstance(texts, list):
            raise ConfigurationError("checkpoint: expected lists of topics and documents, found something else.")
        counts = tuple((str(topic), check_int("topics", count, low=-(2**53))) for topic, count in topics)
        return counts, tuple(map(text_of, texts))

    def save(self, topics: Sequence[tuple[str, int]], texts: Sequence[SyntheticText]) -> None:
        """Writes the topics and documents so far."""
        pairs = [list(pair) for pair in topics]
        self._write(topics=pairs, documents=[dataclasses.asdict(text) for text in texts])
