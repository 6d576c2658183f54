"""Reads and writes the checkpoint file of a run that synthesizes documents."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from langchain_dpicl._plain_files import checked_target
from langchain_dpicl._released_files import FileForm, plain, write_whole
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy._validate import check_int
from langchain_dpicl.released_documents import SyntheticText, text_of

_FORM = FileForm(
    "a checkpoint of synthetic documents",
    "langchain-dpicl/synthetic-documents-checkpoint",
    1,
    frozenset({"terms", "topics", "documents"}),
)


class DocumentsCheckpoint:
    """A file that stores the topics before their ticket is committed, and every finished document.

    Its content is untrusted: topics and texts are bounded by the run's terms, and the ledger knows which topics were
    released (`TopicExamples.name_topics`) and how many texts remain.
    """

    def __init__(self, path: Any, terms: Mapping[str, Any]) -> None:
        self._path = checked_target("checkpoint", path)
        self._terms = plain("terms", terms)

    def read(self) -> tuple[tuple[tuple[str, int], ...], tuple[SyntheticText, ...]] | None:
        """Returns topics with their noisy counts, and documents; None: there is no file yet."""
        if not self._path.exists():
            return None
        state = _FORM.load(self._path)
        if state["terms"] != self._terms:
            advice = "Continue with the same ledger, data set, component and options; or take another file."
            raise ConfigurationError(f"checkpoint: expected one of this run, found another run's. {advice}")
        topics, texts = state["topics"], state["documents"]
        is_form = isinstance(topics, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in topics)
        if not is_form or not isinstance(texts, list):
            raise ConfigurationError("checkpoint: expected lists of topics and documents, found something else.")
        counts = tuple((str(topic), check_int("topics", count, low=-(2**53))) for topic, count in topics)
        return counts, tuple(map(text_of, texts))

    def save(self, topics: Sequence[tuple[str, int]], texts: Sequence[SyntheticText]) -> None:
        """Writes where the run stands; a reader sees the old file or the whole new one."""
        state = {
            "terms": self._terms,
            "topics": [list(pair) for pair in topics],
            "documents": [dataclasses.asdict(text) for text in texts],
        }
        write_whole(self._path, _FORM.text(state))
