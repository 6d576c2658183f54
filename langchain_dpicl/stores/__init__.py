"""Durable ledger stores: SQLite for one host, PostgreSQL for several, and anchors that find a ledger set back; memos of
what was released, and balances of individual filters, beside them.

Knows no budget rule, no component and no record. A store is made once (`new_store`) and opened ever after
(`open_store`): opening never makes anything.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from langchain_dpicl._lazy import on_first_use
from langchain_dpicl._plain_files import check_path
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy._validate import fail
from langchain_dpicl.privacy.ledger.store import hide_password

if TYPE_CHECKING:
    from langchain_dpicl.stores.beside_ledgers import FileAnchor, SQLiteBalances, SQLiteMemo
    from langchain_dpicl.stores.memos import MemoKey, ReleaseMemo, StoreMemo
    from langchain_dpicl.stores.postgres import PostgresAnchor, PostgresMemo, PostgresStore
    from langchain_dpicl.stores.sqlite_ledger import SQLiteStore

_HOME = {
    "FileAnchor": "langchain_dpicl.stores.beside_ledgers",
    "MemoKey": "langchain_dpicl.stores.memos",
    "PostgresAnchor": "langchain_dpicl.stores.postgres",
    "PostgresMemo": "langchain_dpicl.stores.postgres",
    "PostgresStore": "langchain_dpicl.stores.postgres",
    "ReleaseMemo": "langchain_dpicl.stores.memos",
    "SQLiteBalances": "langchain_dpicl.stores.beside_ledgers",
    "SQLiteMemo": "langchain_dpicl.stores.beside_ledgers",
    "SQLiteStore": "langchain_dpicl.stores.sqlite_ledger",
    "StoreMemo": "langchain_dpicl.stores.memos",
}
TIMEOUT = 60.0
_SCHEMES = ("postgresql://", "postgres://")
# Two letters at least: one is a drive.
_ADDRESS = re.compile(r"\s*[a-z][a-z0-9+.-]+:/", re.IGNORECASE)
_KEYWORD = re.compile(r"\b(host|hostaddr|dbname|password|user|service)\s*=", re.IGNORECASE)


def open_store(
    where: str | os.PathLike[str], *, name: str = "budget", timeout: float = TIMEOUT
) -> SQLiteStore | PostgresStore:
    """Opens the ledger `name` that exists at `where`.

    Args:
      where: the path of a SQLite file, or a connection text that starts with `postgresql://` or `postgres://`.
      name: which of the ledgers there.
      timeout: seconds to wait for other processes, or for a connection, a lock, an answer of the database.

    Raises:
      LedgerError: no ledger of that name is there, or it cannot be read; nothing is made.
      ConfigurationError: `where` is neither, or the packages for PostgreSQL are missing.
    """
    place, where = hide_password(where), ""
    if is_address(as_place(place())):
        return _postgres().open(str(place()), name=name, timeout=timeout)
    from langchain_dpicl.stores.sqlite_ledger import SQLiteStore

    return SQLiteStore(place(), name=name, timeout=timeout)


def new_store(where: str | os.PathLike[str], *, name: str = "budget") -> SQLiteStore | PostgresStore:
    """Makes room for a ledger `name` at `where`; `Budget(epsilon=, delta=, store=...)` then writes its limits.

    Args:
      where: the path of a SQLite file, or a connection text that starts with `postgresql://` or `postgres://`.
      name: its name; one place holds several ledgers, which do not see each other.

    Raises:
      LedgerError: a ledger of that name is there already, or the place cannot be written.
      ConfigurationError: `where` is neither, or the packages for PostgreSQL are missing.
    """
    place, where = hide_password(where), ""
    if is_address(as_place(place())):
        return _postgres().new(str(place()), name=name)
    from langchain_dpicl.stores.sqlite_ledger import SQLiteStore

    return SQLiteStore.new(place(), name=name)


def open_anchor(where: str | os.PathLike[str], *, timeout: float = TIMEOUT) -> FileAnchor | PostgresAnchor:
    """Returns the anchor that is in a file, or behind an address that starts with `postgresql://`.

    Raises:
      ConfigurationError: `where` is neither, or the packages for PostgreSQL are missing.
      LedgerError: no anchor is there.
    """
    place, where = hide_password(where), ""
    if is_address(as_place(place())):
        return _postgres_anchor()(str(place()), timeout=timeout)
    from langchain_dpicl.stores.beside_ledgers import FileAnchor

    return FileAnchor(place(), timeout=timeout)


def make_anchor(where: str | os.PathLike[str]) -> FileAnchor | PostgresAnchor:
    """Returns the anchor at `where`, which is made if there is none; errors as `open_anchor`."""
    place, where = hide_password(where), ""
    if is_address(as_place(place())):
        return _postgres_anchor().new(str(place()))
    from langchain_dpicl.stores.beside_ledgers import FileAnchor

    is_there = os.path.exists(place())  # noqa: PTH110  Path.exists raises where it may not look; then `new` says why
    return FileAnchor(place()) if is_there else FileAnchor.new(place())


def check_apart(place: Callable[[], Any], second: Callable[[], Any], *, timeout: float = TIMEOUT) -> None:
    """Refuses an anchor in the file or the database of the ledger; both are stores, anchors, paths or addresses.

    Raises:
      ConfigurationError: they are one file or one database.
      LedgerUnavailableError: one of two databases cannot be reached.
    """

    def is_path(place: Callable[[], Any]) -> bool:
        return isinstance(place(), (str, os.PathLike)) and not is_address(as_place(place()))

    def is_postgres(given: Any) -> bool:  # asked without the driver, which need not be installed
        return is_address(given) or any(kind.__module__ == _HOME["PostgresStore"] for kind in type(given).__mro__)

    if is_path(place) and is_path(second) and check_path("path", place()) == check_path("anchor", second()):
        raise fail("anchor", "a file of its own, on another disk", "the ledger's own file")
    if not (is_postgres(place()) and is_postgres(second())):
        return
    _postgres()
    from langchain_dpicl.stores.postgres import lead_to_one_database

    if lead_to_one_database(place, second, timeout=timeout):
        advice = (
            "A copy of the database that is restored would bring it back too. Where a ledger has had such an anchor, "
            "make another one and adopt it once (adopt_anchor=True)."
        )
        raise fail("anchor", "a file, or a database on another server", "the ledger's own database", advice)


def memo_at(given: Any) -> ReleaseMemo:
    """Returns a memo as it is, or opens the one in a file, which is made if there is none.

    Raises:
      ConfigurationError: it is neither; an address, which may hold a password, is not quoted.
      MemoError: the file is none of ours, or cannot be used.
    """
    from langchain_dpicl.stores.beside_ledgers import SQLiteMemo
    from langchain_dpicl.stores.memos import ReleaseMemo

    if isinstance(given, ReleaseMemo) and not isinstance(given, type):
        return given
    expected = "a path, SQLiteMemo(path), PostgresMemo.open(address), StoreMemo(store), or another ReleaseMemo"
    if isinstance(given, str) and "://" in given:
        raise fail("memo", expected, "an address", "It is opened by PostgresMemo.open(address).")
    if not isinstance(given, (str, os.PathLike)):
        raise fail("memo", expected, type(given).__name__)
    return SQLiteMemo(given)


def as_place(where: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Returns `where` as it is, if it is a path or an address that is understood here.

    An address that is spelled otherwise is no path: a file of that name would show its password. A path with an equals
    sign that looks like one begins with `/` or `./`.

    Args:
      where: what a user gave.

    Raises:
      ConfigurationError: it is neither; the message does not quote it.
    """
    place, where = hide_password(where), ""  # crash reporters show the variables of a frame that raises
    if not isinstance(place(), (str, os.PathLike)) or not isinstance(os.fspath(place()), str):
        msg = f"expected a path, or an address such as postgresql://host/database, found {type(place()).__name__}."
        raise ConfigurationError(f"store: {msg}")
    if is_address(place()) or not _looks_like_address(os.fspath(place())):
        return place()
    raise ConfigurationError(
        "store: expected a path, or an address that starts with postgresql:// (nothing before it, small letters, no "
        "driver), found one of another spelling, which is not shown as it may hold a password. Write "
        "postgresql://user@host:5432/database. A file whose path has such words is written with ./ or / in front."
    )


def is_address(where: str | os.PathLike[str]) -> bool:
    """Whether it is the address of a PostgreSQL database, spelled as it is understood here."""
    return isinstance(where, str) and where.startswith(_SCHEMES)


def _looks_like_address(text: str) -> bool:
    return bool(_ADDRESS.match(text) or (not text.startswith(("/", "./", "../")) and _KEYWORD.search(text)))


def _postgres() -> type[PostgresStore]:
    try:
        from langchain_dpicl.stores.postgres import PostgresStore
    except ModuleNotFoundError as error:
        if error.name != "psycopg":
            raise
        missing = error.name
    else:
        return PostgresStore
    raise ConfigurationError(
        f"store: expected the packages for PostgreSQL, found no {missing}. Install langchain-dpicl[postgres]."
    )


def _postgres_anchor() -> type[PostgresAnchor]:
    _postgres()
    from langchain_dpicl.stores.postgres import PostgresAnchor

    return PostgresAnchor


if not TYPE_CHECKING:
    _load, __dir__ = on_first_use(__name__, _HOME)

    def __getattr__(name: str) -> Any:
        if name.startswith("Postgres") and name in _HOME:
            _postgres()  # says which extra to install
        return _load(name)


__all__ = [
    "FileAnchor",
    "MemoKey",
    "PostgresAnchor",
    "PostgresMemo",
    "PostgresStore",
    "ReleaseMemo",
    "SQLiteBalances",
    "SQLiteMemo",
    "SQLiteStore",
    "StoreMemo",
    "as_place",
    "new_store",
    "open_store",
]
