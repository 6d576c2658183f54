"""Durable ledger stores: SQLite for one host, PostgreSQL for several, and anchors that find a ledger set back.

Knows no budget rule, no component and no record. A store is made once (`new_store`) and opened ever after
(`open_store`): opening never makes anything.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.stores.anchors import FileAnchor
from langchain_dpicl.stores.sqlite import SQLiteStore

if TYPE_CHECKING:
    from langchain_dpicl.stores.postgres import PostgresAnchor, PostgresStore

_SCHEMES = ("postgresql://", "postgres://")
_ON_DEMAND = ("PostgresAnchor", "PostgresStore")


def open_store(where: str | os.PathLike[str], *, name: str = "budget") -> SQLiteStore | PostgresStore:
    """Opens the ledger `name` that exists at `where`.

    Args:
      where: the path of a SQLite file, or a connection text that starts with `postgresql://` or `postgres://`.
      name: which of the ledgers there.

    Raises:
      LedgerError: no ledger of that name is there, or it cannot be read; nothing is made.
      ConfigurationError: the packages for PostgreSQL are missing.
    """
    if isinstance(where, str) and where.startswith(_SCHEMES):
        return _postgres().open(where, name=name)
    return SQLiteStore(where, name=name)


def new_store(where: str | os.PathLike[str], *, name: str = "budget") -> SQLiteStore | PostgresStore:
    """Makes room for a ledger `name` at `where`; `Budget(epsilon=, delta=, store=...)` then writes its limits.

    Args:
      where: the path of a SQLite file, or a connection text that starts with `postgresql://` or `postgres://`.
      name: its name; one place holds several ledgers, which do not see each other.

    Raises:
      LedgerError: a ledger of that name is there already, or the place cannot be written.
      ConfigurationError: the packages for PostgreSQL are missing.
    """
    if isinstance(where, str) and where.startswith(_SCHEMES):
        return _postgres().new(where, name=name)
    return SQLiteStore.new(where, name=name)


def _postgres() -> type[PostgresStore]:
    try:
        from langchain_dpicl.stores.postgres import PostgresStore
    except ModuleNotFoundError as error:
        if error.name not in {"psycopg", "psycopg_pool"}:
            raise
        found = error.name
    else:
        return PostgresStore
    raise ConfigurationError(
        f"store: expected the packages for PostgreSQL, found no {found}. Install langchain-dpicl[postgres]."
    )


def __getattr__(name: str) -> Any:
    if name not in _ON_DEMAND:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _postgres()
    from langchain_dpicl.stores import postgres

    return getattr(postgres, name)


__all__ = ["FileAnchor", "PostgresAnchor", "PostgresStore", "SQLiteStore", "new_store", "open_store"]
