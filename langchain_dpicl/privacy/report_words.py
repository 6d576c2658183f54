"""Holds the sentences of a report, and reads the versions of the packages that computed its prices."""

from __future__ import annotations

import functools
import importlib.metadata
import platform
from collections.abc import Callable, Mapping, Sequence
from decimal import ROUND_CEILING, Context, Decimal
from typing import Any

from langchain_dpicl.privacy._validate import Adjacency, fail

PACKAGE = "langchain-dpicl"
PRICED_WITH = ("dp-accounting", "prv-accountant", "numpy", "scipy")
PYTHON = platform.python_version()

PROVED_EPSILON = 32.0

ADJACENCY_WORDS = {
    "add_remove": "two data sets are neighbours if one is the other without one unit",
    "replace_one": "two data sets are neighbours if one is the other with one unit replaced",
}
TRUST = (
    "Trusted: the process that ran, the ledger's storage, and the providers of the models and embeddings that a "
    "component gives private text to: they SEE it. The guarantee covers what the package returned, not what a provider "
    "or its logs keep."
)
# The sentence of earlier versions, in which every component sent private text to a model.
EARLIER_TRUST = (
    "Trusted: the process that ran, the ledger's storage, and the model provider: it SEES the private prompts. "
    "The guarantee covers what the package returned, not what the provider or its logs keep."
)
ASSUMED_PUBLIC = (
    "the declarations of each data set below, public_size included",
    "templates, instructions, label sets, model names and every parameter shown under `public`",
    "the tickets of each share: events, rates, noise and maximum counts",
    "queries and their number",
)
NOISE_GAP = (
    "The declared gap between ideal and drawn noise is proved for a total epsilon of at most 32 "
    "(docs/proofs/randomness.md)."
)
NOISE_GAP_OPEN = " This ledger's limit is above: float effects are NOT covered beyond a total epsilon of 32."
DIGEST_MEANS = (
    "The digest is no signature: it catches accidents, and whoever rewrites the whole report can write a fitting one. "
    "Origin is proved by the ledger's own chain of hashes, and by a signature held elsewhere."
)
DIES = "This ledger dies with its process: after a restart nothing remembers what was spent."


def wrappers_words(named: Sequence[str]) -> str:
    """Returns the sentence on wrappers that an operator allowed around private calls."""
    return (
        f"Allowed to stand before private calls, on the operator's word that they read no request and no answer: "
        f"{', '.join(named)}."
    )


def check_wrappers(named: Any) -> None:
    """Refuses anything but a list of module names; reports of earlier versions have an empty list."""
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise fail("allowed_wrappers", "a list of names of modules", named)


def words_of(adjacency: Adjacency, epsilon: float) -> dict[str, Any]:
    """Returns the sentences of a report on a ledger with this adjacency and limit."""
    return {
        "adjacency_means": ADJACENCY_WORDS[adjacency],
        "assumed_public": list(ASSUMED_PUBLIC),
        "trust": TRUST,
        "noise_gap": NOISE_GAP + (NOISE_GAP_OPEN if epsilon > PROVED_EPSILON else ""),
        "digest_means": DIGEST_MEANS,
    }


def are_words_of(data: Mapping[str, Any], name: str, adjacency: Adjacency, epsilon: float) -> bool:
    """Returns whether a report's sentence is one of this version, or of an earlier one."""
    return data[name] == words_of(adjacency, epsilon)[name] or (name, data[name]) == ("trust", EARLIER_TRUST)


def own_version() -> str:
    """Returns the version of this package, or "unknown" where it is not installed."""
    return _version_of(PACKAGE, importlib.metadata.version)


def package_versions() -> dict[str, str]:
    """Returns the versions of what computes prices in this process."""
    return {PACKAGE: own_version(), **{name: _version_of(name, _read) for name in PRICED_WITH}, "python": PYTHON}


def _version_of(name: str, read: Callable[[str], str]) -> str:
    try:
        return read(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


@functools.cache
def _read(name: str) -> str:
    # Cached: each read takes milliseconds, and every release carries a report.
    return importlib.metadata.version(name)


def rounded_up(value: float, digits: int = 6) -> str:
    """Returns a bound as text of so many significant digits, never below the bound.

    >>> rounded_up(4.3771711), rounded_up(1e-06), rounded_up(2.0)
    ('4.37718', '1e-06', '2')
    """
    decimal = Decimal(repr(float(value)))
    if not decimal.is_finite():
        return str(float(value))
    return f"{float(Context(prec=digits, rounding=ROUND_CEILING).plus(decimal)):.{digits}g}"


def rounded_down(value: float, digits: int = 6) -> str:
    """Returns what is left as text of so many significant digits, never above it.

    >>> rounded_down(0.83379, 3)
    '0.833'
    """
    return rounded_up(-value, digits).removeprefix("-")
