"""Opens or creates the ledger that a path or an address names."""

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

_NO_LEDGER = "0" * 32  # reading this id tests whether an anchor can be read


class Opened(NamedTuple):
    """A store, and whether it was opened here and so has to be closed here."""

    store: LedgerStore
    is_ours: bool


def opened_at(place: Callable[[], Any], name: str) -> Opened:
    """Returns a store as it is, or opens the existing ledger that a path or an address names."""
    if _is_store(place):
        return Opened(place(), is_ours=False)
    from langchain_dpicl.stores import open_store  # no database is loaded for a ledger in memory

    opened = open_store(place(), name=check_name("name", name))
    if opened.header() is None:
        opened.close()
        msg = f"ledger: expected one with limits, found one whose creation was interrupted ({opened.description})."
        raise LedgerError(f"{msg} PrivacyBudgetCallbackHandler.create finishes it.")
    return Opened(opened, is_ours=True)


def made_at(place: Callable[[], Any], name: str) -> Opened:
    """Returns a store as it is, a new one, or the empty one that an interrupted `create` left."""
    if _is_store(place):
        return Opened(place(), is_ours=False)
    from langchain_dpicl.stores import new_store, open_store

    try:
        return Opened(new_store(place(), name=name), is_ours=True)
    except LedgerUnavailableError:
        raise
    except LedgerError as error:
        refusal = error
    with suppress(LedgerError):
        store = open_store(place(), name=name)
        if store.header() is None and not store.records():  # a ledger with lines had limits before
            store.may_create = True
            return Opened(store, is_ours=True)
        store.close()
    raise refusal


def check_place(place: Callable[[], Any]) -> None:
    """Refuses an argument that names no place, before anything is created."""
    _is_store(place)


def check_apart(place: Callable[[], Any], second: Callable[[], Any]) -> None:
    """Refuses an anchor in the file of the ledger, before either is created."""
    if _is_path(place) and _is_path(second) and os.path.realpath(place()) == os.path.realpath(second()):
        raise fail("anchor", "a file of its own, on another disk", "the ledger's own file")


def _is_path(place: Callable[[], Any]) -> bool:
    from langchain_dpicl.stores import is_address

    return isinstance(place(), (str, os.PathLike)) and not is_address(place())


def anchor_at(place: Callable[[], Any], *, may_make: bool = False) -> LedgerAnchor | None:
    """Returns an anchor (or None) as it is, or opens the one that a path or an address names; it has been read once."""
    if not isinstance(place(), (str, os.PathLike)):
        anchor = check_anchor(place())
    else:
        from langchain_dpicl.stores import made_anchor, open_anchor

        anchor = made_anchor(place()) if may_make else open_anchor(place())
    if anchor is not None:
        read_anchor(anchor, _NO_LEDGER)
    return anchor


@contextmanager
def closed_on_error(opened: Opened | None) -> Iterator[None]:
    """Closes the store if it was opened here and the block raises."""
    try:
        yield
    except BaseException:
        if opened is not None and opened.is_ours:
            getattr(opened.store, "close", lambda: None)()
        raise


def _is_store(place: Callable[[], Any]) -> bool:
    """Whether the argument is a store; False for a valid path or address."""
    if isinstance(place(), (str, os.PathLike)):
        from langchain_dpicl.stores import as_place

        as_place(place())
        return False
    if isinstance(place(), LedgerStore) and not isinstance(place(), type):
        return True
    kind = f"the class {place().__name__}" if isinstance(place(), type) else type(place()).__name__
    raise fail("store", "a path, an address such as postgresql://..., or a LedgerStore", kind)


__all__ = ["AnchorPlace", "Where", "anchor_at", "check_apart", "check_place", "closed_on_error", "made_at", "opened_at"]
