"""Where a ledger lives: opens what a path or an address names, or makes it. Knows no budget, no price and no record.

Opening makes nothing, and making never opens what is there: both are said on purpose.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias

from langchain_dpicl.exceptions import LedgerError, LedgerUnavailableError
from langchain_dpicl.privacy._validate import fail
from langchain_dpicl.privacy.amounts import check_name
from langchain_dpicl.privacy.stores import LedgerStore

Where: TypeAlias = LedgerStore | str | os.PathLike[str]
"""A store, the path of a SQLite file, or the address of a PostgreSQL database."""


def opened_at(store: Any, name: str) -> LedgerStore:
    """Returns a store as it is, and opens what a path or an address names.

    Raises:
      LedgerError: no ledger of that name is there.
      ConfigurationError: `store` names no place.
    """
    if isinstance(store, LedgerStore):
        return store
    from langchain_dpicl.stores import open_store

    opened = open_store(_place(store), name=check_name("name", name))
    if opened.header() is None:
        opened.close()
        msg = f"ledger: expected one with limits, found room for one ({opened.description}): whoever made it stopped."
        raise LedgerError(f"{msg} PrivacyBudgetCallbackHandler.create finishes it.")
    return opened


def made_at(store: Any, name: str) -> LedgerStore:
    """Returns a store as it is, a new one, or the room without a ledger that a stopped `create` left.

    Raises:
      LedgerError: a ledger of that name is there, or none can be written.
      ConfigurationError: `store` names no place.
    """
    if isinstance(store, LedgerStore):
        return store
    from langchain_dpicl.stores import new_store, open_store

    place = _place(store)
    try:
        return new_store(place, name=name)
    except LedgerUnavailableError:
        raise
    except LedgerError as error:
        refusal = error
    with suppress(LedgerError):
        found = open_store(place, name=name)
        if found.header() is None:
            return found
        found.close()
    raise refusal


@contextmanager
def closed_on_error(opened: LedgerStore | None, given: Any) -> Iterator[None]:
    """Closes what was opened here if nobody will use it."""
    try:
        yield
    except BaseException:
        if opened is not None and opened is not given:
            getattr(opened, "close", lambda: None)()
        raise


def _place(store: Any) -> str | os.PathLike[str]:
    if not isinstance(store, (str, os.PathLike)):
        raise fail("store", "a path, an address such as postgresql://..., or a LedgerStore", type(store).__name__)
    return store
