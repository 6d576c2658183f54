"""Where a run of synthetic documents stands, kept in a file of plain JSON. Knows released values only: no record.

A file can be wrong but cannot act: what is read is topics and texts, no more of them than the run may have. Which
topics were released the ledger knows as well (`TopicExamples.name_topics`), and how many texts are left.
"""

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
    """A file that holds the topics before their ticket is committed, and every document as soon as it is written.

    Args:
      path: the file; its folder exists.
      terms: the run's public terms; a file with others is refused.

    Raises:
      ConfigurationError: no path, or a folder that cannot be written.
    """

    def __init__(self, path: Any, terms: Mapping[str, Any]) -> None:
        self._path = checked_target("checkpoint", path)
        self._terms = plain("terms", terms)

    def read(self) -> tuple[tuple[tuple[str, int], ...], tuple[SyntheticText, ...]] | None:
        """Returns topics with their noisy counts, and documents; None: there is no file yet.

        Raises:
          ConfigurationError: the file is of another run, ledger or form.
          OSError: the file cannot be read.
        """
        if not self._path.exists():
            return None
        state = _FORM.load(self._path)
        if state["terms"] != self._terms:
            advice = "Go on with the same ledger, data set, component and options; or take another file."
            raise ConfigurationError(f"checkpoint: expected one of this very run, found another's. {advice}")
        topics, texts = state["topics"], state["documents"]
        is_form = isinstance(topics, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in topics)
        if not is_form or not isinstance(texts, list):
            raise ConfigurationError("checkpoint: expected lists of topics and documents, found something else.")
        counts = tuple((str(topic), check_int("topics", count, low=-(2**53))) for topic, count in topics)
        return counts, tuple(map(text_of, texts))

    def save(self, topics: Sequence[tuple[str, int]], texts: Sequence[SyntheticText]) -> None:
        """Writes where the run stands; a reader sees the old file or the whole new one.

        Raises:
          OSError: the file cannot be written.
        """
        state = {
            "terms": self._terms,
            "topics": [list(pair) for pair in topics],
            "documents": [dataclasses.asdict(text) for text in texts],
        }
        write_whole(self._path, _FORM.text(state))
