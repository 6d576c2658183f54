"""Checks the public options of answers from retrieved documents, and fills in their defaults."""

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
"""LangChain's names of options that search, rank or truncate."""
_DECLARED = ("public_size", "unit_key", "dataset_id", "fields", "max_chars")
"""The options that declare documents as `PrivateExamples`."""


def check_known(others: Mapping[str, Any]) -> None:
    """Refuses unknown options; for options that search or rank, the message says why they cannot work."""
    if searching := sorted(SEARCH & set(others)):
        raise ConfigurationError(f"options: expected none that searches or ranks, found {searching}. {NOT_SEARCHED}")
    if others:
        raise TypeError(f"unexpected keyword arguments {sorted(others)}; see the signature")


def refuse_found(documents: Iterable[Any]) -> None:
    """Refuses a vector store or retriever in place of the documents."""
    if any(
        callable(getattr(documents, name, None)) for name in ("similarity_search", "get_relevant_documents", "invoke")
    ):
        kind = type(documents).__name__
        raise ConfigurationError(f"documents: expected the documents, found {kind}. {NOT_SEARCHED}")


def templates_of(private: Any, example_prompt: Any, suffix: str | None) -> dict[str, Any]:
    """Returns the templates of a document and of the query; the default for unlabelled documents is their text."""
    if not isinstance(private, PrivateExamples):
        raise fail("private", "PrivateExamples", type(private).__name__)
    if private.label_key is None:
        example_prompt = f"{{{private.text_key}}}" if example_prompt is None else example_prompt
        suffix = "Question: {input}\nAnswer:" if suffix is None else suffix
    return {"example_prompt": example_prompt, "suffix": suffix}


def text_of_query(wording: TaskWording, query: Query) -> str:
    """Returns the part of a query that documents are compared with: its one variable, or `input`."""
    names = wording.input_variables
    if len(names) > 1 and "input" not in names:
        raise fail("suffix", "one variable, or one called 'input', to compare documents with", list(names))
    return query[names.index("input") if len(names) > 1 else 0]


def compared_text(wording: TaskWording, query: Query) -> str:
    """Returns `text_of_query`, refusing a blank text, which has no direction to compare with."""
    text = text_of_query(wording, query)
    if not text.strip():
        raise fail("input", "a text to compare documents with", text, "Nothing was charged.")
    return text


def checked_most(private: PrivateExamples, documents_per_row: int) -> int:
    """Returns the number of a unit's documents in a row, checked against how many are kept."""
    most = private.records_per_unit
    if check_int("documents_per_row", documents_per_row, low=1) > most:
        advice = (
            "Declare more documents_per_unit= (records_per_unit= of the examples), all of which a unit then may have."
        )
        raise fail("documents_per_row", f"at most the {most} kept of a unit", documents_per_row, advice)
    return documents_per_row


def slots_of(rows: str, num_slots: int | None) -> int | None:
    """Returns the public number of rows; None: one for each participant."""
    if check_choice("rows", rows, ("slots", "units")) == "slots":
        return NUM_SLOTS if num_slots is None else check_int("num_slots", num_slots, low=1)
    if num_slots is not None:
        raise fail("num_slots", "None with rows='units', which has one row per participant", num_slots)
    return None


def check_floor(labels: tuple[str, ...], least: float | str | None, answer: str) -> None:
    """Checks `min_votes` and `abstain_label`."""
    if isinstance(least, str):
        check_choice("min_votes", least, (NOISE_FLOOR,))
    elif least is not None:
        check_real("min_votes", least)
    if not isinstance(answer, str) or not answer or answer in labels:
        raise fail("abstain_label", f"a text that is none of {labels!r}", answer)


def checked_balances(
    balances: Any, *, private: PrivateExamples, budget: Budget, component: str | None
) -> SQLiteBalances | None:
    """Opens the file of balances; None: balances stay in memory."""
    if balances is None:
        return None
    if not budget.durable:
        raise fail("balances", "None with a ledger in memory, which is lost before the file", type(balances).__name__)
    if component is None:
        raise fail("component", "a name that other processes find the filter by", component)
    if private.unit_key is None:
        advice = "Without one, a unit is the position in the list, where another process may have another document."
        raise fail("balances", "documents with a unit_key", None, advice)
    if not isinstance(balances, SQLiteBalances | str | os.PathLike):
        raise fail("balances", "the path of a file, or SQLiteBalances", type(balances).__name__)
    return balances if isinstance(balances, SQLiteBalances) else SQLiteBalances(balances)


def examples_of(holder: list[Iterable[Any]], options: Mapping[str, Any]) -> tuple[PrivateExamples, dict[str, Any]]:
    """Returns documents as private examples, and the remaining options; empties `holder`."""
    check_known({name: value for name, value in options.items() if name in SEARCH})
    refuse_found(holder[0])
    declared = {name: options[name] for name in _DECLARED if name in options}
    defaults = {"dataset_id": "private-documents", "records_per_unit": options.get("documents_per_unit", 1)}
    remaining = {name: value for name, value in options.items() if name not in {*_DECLARED, "documents_per_unit"}}
    # Taken out of the list: no frame of an error may hold the documents.
    return PrivateExamples.from_documents(holder.pop(), **{**defaults, **declared}), remaining
