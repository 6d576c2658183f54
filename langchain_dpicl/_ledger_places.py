"""Opens or makes the ledger that a path or an address names."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeAlias

from langchain_dpicl.exceptions import LedgerError, LedgerUnavailableError
from langchain_dpicl.privacy._validate import fail
from langchain_dpicl.privacy.amounts import check_name
from langchain_dpicl.privacy.extensions.ledger_anchor import LedgerAnchor, check_anchor, read_anchor
from langchain_dpicl.privacy.stores import LedgerStore

Where: TypeAlias = LedgerStore | str | os.PathLike[str]
"""A store, the path of a SQLite file, or the address of a PostgreSQL database."""

AnchorPlace: TypeAlias = LedgerAnchor | str | os.PathLike[str]
"""An anchor, the path of its file, or the address of a PostgreSQL database."""

_NO_LEDGER = "0" * 32  # asked for to see whether an anchor can be read


class Opened(NamedTuple):
    """A store, and whether it was opened here, so that no other code closes it."""

    store: LedgerStore
    is_ours: bool


def opened_at(given: Callable[[], Any], name: str) -> Opened:
    """Returns a store as it is, and opens what a path or an address names.

    Raises:
      LedgerError: no ledger of that name is there.
      ConfigurationError: it names no place.
    """
    if _is_store(given):
        return Opened(given(), is_ours=False)
    from langchain_dpicl.stores import open_store  # no database is loaded for a ledger in memory

    opened = open_store(given(), name=check_name("name", name))
    if opened.header() is None:
        opened.close()
        msg = f"ledger: expected one with limits, found room for one ({opened.description}): its creation stopped."
        raise LedgerError(f"{msg} PrivacyBudgetCallbackHandler.create finishes it.")
    return Opened(opened, is_ours=True)


def made_at(given: Callable[[], Any], name: str) -> Opened:
    """Returns a store as it is, a new one, or the room without a ledger that a stopped `create` left.

    Raises:
      LedgerError: a ledger of that name is there, or none can be written.
      ConfigurationError: it names no place.
    """
    if _is_store(given):
        return Opened(given(), is_ours=False)
    from langchain_dpicl.stores import new_store, open_store

    try:
        return Opened(new_store(given(), name=name), is_ours=True)
    except LedgerUnavailableError:
        raise
    except LedgerError as error:
        refusal = error
    with suppress(LedgerError):
        found = open_store(given(), name=name)
        if found.header() is None and not found.records():  # with lines, it had limits once
            found.may_create = True
            return Opened(found, is_ours=True)
        found.close()
    raise refusal


def check_place(given: Callable[[], Any]) -> None:
    """Refuses what names no place, before anything is made."""
    _is_store(given)


def check_apart(given: Callable[[], Any], second: Callable[[], Any]) -> None:
    """Refuses an anchor in the very file of the ledger, before either is made."""
    if _is_path(given) and _is_path(second) and os.path.realpath(given()) == os.path.realpath(second()):
        raise fail("anchor", "a file of its own, on another disk", "the ledger's own file")


def _is_path(given: Callable[[], Any]) -> bool:
    from langchain_dpicl.stores import is_address

    return isinstance(given(), (str, os.PathLike)) and not is_address(given())


def anchor_at(given: Callable[[], Any], *, may_make: bool = False) -> LedgerAnchor | None:
    """Returns an anchor as it is, and opens what a path or an address names; it can be read.

    Args:
      given: holds an anchor, a path, an address, or None.
      may_make: a file that is missing is made.

    Raises:
      LedgerError: no anchor is there, or it cannot be read.
      ConfigurationError: it names no place.
    """
    if not isinstance(given(), (str, os.PathLike)):
        anchor = check_anchor(given())
    else:
        from langchain_dpicl.stores import made_anchor, open_anchor

        anchor = made_anchor(given()) if may_make else open_anchor(given())
    if anchor is not None:
        read_anchor(anchor, _NO_LEDGER)
    return anchor


@contextmanager
def closed_on_error(opened: Opened | None) -> Iterator[None]:
    """Closes what was opened here if the block fails."""
    try:
        yield
    except BaseException:
        if opened is not None and opened.is_ours:
            getattr(opened.store, "close", lambda: None)()
        raise


def _is_store(given: Callable[[], Any]) -> bool:
    """Whether a store is given; False for a path or an address that is understood."""
    if isinstance(given(), (str, os.PathLike)):
        from langchain_dpicl.stores import as_place

        as_place(given())
        return False
    if isinstance(given(), LedgerStore) and not isinstance(given(), type):
        return True
    found = f"the class {given().__name__}" if isinstance(given(), type) else type(given()).__name__
    raise fail("store", "a path, an address such as postgresql://..., or a LedgerStore", found)


__all__ = ["AnchorPlace", "Where", "anchor_at", "check_apart", "check_place", "closed_on_error", "made_at", "opened_at"]
