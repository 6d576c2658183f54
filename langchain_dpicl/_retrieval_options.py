"""Checks and defaults of the public options of answers from retrieved documents. Reads no record and spends nothing."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from langchain_dpicl.asking import Query, TaskWording
from langchain_dpicl.backends.similar import NOT_SEARCHED
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy._validate import check_choice, check_int, check_real, fail
from langchain_dpicl.privacy.examples import PrivateExamples
from langchain_dpicl.retrieval_planning import NUM_SLOTS
from langchain_dpicl.stores.balances import SQLiteBalances

NOISE_FLOOR = "noise_floor"
SEARCH = frozenset(
    {
        *("compressor", "base_compressor", "base_retriever", "fetch_k", "index", "k", "lambda_mult", "mmr", "reranker"),
        *("retriever", "search_kwargs", "search_type", "score_threshold", "top_k", "top_n", "vector_store"),
        *("vectorstore", "vectorstore_cls"),
    }
)
"""Names under which LangChain takes what searches, ranks or cuts."""
_DECLARED = ("public_size", "unit_key", "dataset_id", "fields", "max_chars")
"""What documents are declared with, of the arguments of `PrivateExamples`."""


def check_known(others: Mapping[str, Any]) -> None:
    """Refuses options that are none; those that would search or rank with the reason.

    Raises:
      ConfigurationError: there is one.
    """
    if searching := sorted(SEARCH & set(others)):
        raise ConfigurationError(f"options: expected none that searches or ranks, found {searching}. {NOT_SEARCHED}")
    if others:
        raise TypeError(f"unexpected keyword arguments {sorted(others)}; see the signature")


def refuse_found(documents: Iterable[Any]) -> None:
    """Refuses a vector store or retriever in the place of the documents themselves.

    Raises:
      ConfigurationError: it is one.
    """
    if any(
        callable(getattr(documents, name, None)) for name in ("similarity_search", "get_relevant_documents", "invoke")
    ):
        found = type(documents).__name__
        raise ConfigurationError(f"documents: expected the documents themselves, found {found}. {NOT_SEARCHED}")


def templates_of(private: Any, example_prompt: Any, suffix: str | None) -> dict[str, Any]:
    """Returns the templates of a document and of the query; without a label, a document is its text alone.

    Raises:
      ConfigurationError: these are no examples.
    """
    if not isinstance(private, PrivateExamples):
        raise fail("private", "PrivateExamples", type(private).__name__)
    if private.label_key is None:
        example_prompt = f"{{{private.text_key}}}" if example_prompt is None else example_prompt
        suffix = "Question: {input}\nAnswer:" if suffix is None else suffix
    return {"example_prompt": example_prompt, "suffix": suffix}


def text_of_query(wording: TaskWording, query: Query) -> str:
    """Returns what documents are compared with: the one variable of the query, or `input`.

    Raises:
      ConfigurationError: several variables, none of which is called `input`.
    """
    names = wording.input_variables
    if len(names) > 1 and "input" not in names:
        raise fail("suffix", "one variable, or one called 'input', to compare documents with", list(names))
    return query[names.index("input") if len(names) > 1 else 0]


def compared_text(wording: TaskWording, query: Query) -> str:
    """Returns the text of one query that documents are compared with.

    Raises:
      ConfigurationError: it is blank, and so near to nothing.
    """
    text = text_of_query(wording, query)
    if not text.strip():
        raise fail("input", "a text to compare documents with", text, "Nothing was charged.")
    return text


def checked_most(private: PrivateExamples, documents_per_row: int) -> int:
    """Returns how many documents of a unit a row shows.

    Raises:
      ConfigurationError: no unit has so many.
    """
    most = private.records_per_unit
    if check_int("documents_per_row", documents_per_row, low=1) > most:
        advice = (
            "Declare more documents_per_unit= (records_per_unit= of the examples), all of which a unit then may have."
        )
        raise fail("documents_per_row", f"at most the {most} kept of a unit", documents_per_row, advice)
    return documents_per_row


def slots_of(rows: str, num_slots: int | None) -> int | None:
    """Returns the public number of rows; None: each unit that takes part has one."""
    if check_choice("rows", rows, ("slots", "units")) == "slots":
        return NUM_SLOTS if num_slots is None else check_int("num_slots", num_slots, low=1)
    if num_slots is not None:
        raise fail("num_slots", "None with rows='units', of which there are as many as take part", num_slots)
    return None


def check_floor(labels: tuple[str, ...], least: float | str | None, answer: str) -> None:
    """Refuses what is no number of votes, and a text for abstaining that is a label."""
    if isinstance(least, str):
        check_choice("min_votes", least, (NOISE_FLOOR,))
    elif least is not None:
        check_real("min_votes", least)
    if not isinstance(answer, str) or not answer or answer in labels:
        raise fail("abstain_label", f"a text that is none of {labels!r}", answer)


def checked_balances(
    given: Any, *, private: PrivateExamples, budget: Budget, component: str | None
) -> SQLiteBalances | None:
    """Returns where balances outlive the process, or None.

    Raises:
      ConfigurationError: the ledger would die before them, or other processes would not know whose they are.
      LedgerError: the file cannot be used.
    """
    if given is None:
        return None
    if not budget.durable:
        raise fail("balances", "None on a ledger in memory, which dies first", type(given).__name__)
    if component is None:
        raise fail("component", "a name, by which other processes find the filter", component)
    if private.unit_key is None:
        advice = "Without one, a document is known by its place in the list, which another process may fill otherwise."
        raise fail("balances", "documents with a unit_key", None, advice)
    if not isinstance(given, SQLiteBalances | str | os.PathLike):
        raise fail("balances", "the path of a file, or SQLiteBalances", type(given).__name__)
    return given if isinstance(given, SQLiteBalances) else SQLiteBalances(given)


def examples_of(held: list[Iterable[Any]], options: Mapping[str, Any]) -> tuple[PrivateExamples, dict[str, Any]]:
    """Returns documents as private examples, as the options declare them, and the options that are left.

    Args:
      held: the documents, taken out here, so that no frame of an error holds them.
      options: what they are declared with, and others.

    Raises:
      ConfigurationError: a public fault, or a vector store or retriever in the place of the documents.
      RecordError: a document cannot be read.
    """
    check_known({name: value for name, value in options.items() if name in SEARCH})
    refuse_found(held[0])
    declared = {name: options[name] for name in _DECLARED if name in options}
    kept = {"dataset_id": "private-documents", "records_per_unit": options.get("documents_per_unit", 1)}
    left = {name: value for name, value in options.items() if name not in {*_DECLARED, "documents_per_unit"}}
    return PrivateExamples.from_documents(held.pop(), **{**kept, **declared}), left
