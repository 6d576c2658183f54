"""Tracks the write-ahead logs that this process has open, and handles removed ones."""

# Files that this process has open are never opened by other means: closing them would drop SQLite's locks. A removed
# log is never written over what other processes wrote since.

from __future__ import annotations

import contextlib
import sqlite3
import weakref
from pathlib import Path

from langchain_dpicl.exceptions import LedgerError
from langchain_dpicl.stores._sqlite_file import Place, found_at

_ENDS = ("-wal", "-shm", "-journal")
"""What SQLite adds to the name of a file for the files that it keeps beside it."""

_ADVICE = "Closing it could drop a ledger's locks. Choose another path."

_LEDGERS = "SELECT id, name, header, digest, seq, head FROM ledgers"
_LINES = "SELECT ledger, seq, hash FROM lines"
_BINDINGS = "SELECT dataset, ledger FROM bindings"


class Held:
    """The files that one connection of this process has open, for as long as this object lives."""

    def __init__(self, path: Path, place: Place) -> None:
        self.path = path
        self.place = place
        self.log = log_of(path)
        _HELD[id(self)] = self

    @property
    def is_whole(self) -> bool:
        """Whether the path still names the file, and beside it is the log that was opened with it."""
        return found_at(self.path) == self.place and log_of(self.path) == self.log


_HELD: weakref.WeakValueDictionary[int, Held] = weakref.WeakValueDictionary()


def log_of(path: Path) -> tuple[Place | None, Place | None]:
    """Returns which files are the log of `path` and its index now."""
    return found_at(Path(f"{path}-wal")), found_at(Path(f"{path}-shm"))


def check_free(path: Path, what: str) -> None:
    """Refuses to open a file by hand that a ledger of this process has open, or that SQLite takes for a log.

    Never opens it: that is what would do the harm.

    Raises:
      LedgerError: it is one.
    """
    check_no_log(path, what)
    place = found_at(path)
    if place is not None and any(place == held.place for held in _all_held()):
        raise LedgerError(f"{what} {path}: expected a file of its own, found a ledger's that is open here. {_ADVICE}")


def check_no_log(path: Path, what: str) -> None:
    """Refuses what SQLite takes for the log of a database that is there, and every name of a log that is open here.

    Raises:
      LedgerError: it is one.
    """
    place = found_at(path)
    is_open_here = place is not None and any(place in held.log for held in _all_held())
    if is_open_here or any(path.name.endswith(end) and _is_file(path, end) for end in _ENDS):
        raise _found_log(path, what)


def check_new_name(path: Path, what: str) -> None:
    """Refuses a name for a new file that SQLite would take for the log of a database, even of one to come.

    Raises:
      LedgerError: it is one.
    """
    if path.name.endswith(_ENDS):
        raise _found_log(path, what)


def _is_file(path: Path, end: str) -> bool:
    """Whether there is a file of this name without its ending."""
    return found_at(path.parent / path.name.removesuffix(end)) is not None


def _found_log(path: Path, what: str) -> LedgerError:
    return LedgerError(f"{what} {path}: expected a file of its own, found the log of a database. {_ADVICE}")


def _all_held() -> list[Held]:
    return [held for held in [found() for found in _HELD.valuerefs()] if held is not None]


def leave(connection: sqlite3.Connection, files: Held | None) -> None:
    """Closes a connection.

    SQLite moves a log into its file when the last connection ends. Where the log was removed and others went on without
    it, that would put old pages over theirs, and what they granted would be forgotten. So the log is moved only where
    the file holds nothing that the log does not, and nobody has a new one: then nobody wrote since, and nothing that
    was granted is lost. Who opens the file between that look and the move is not seen.
    """
    try:
        if files is not None and not files.is_whole:
            _leave_removed(connection, files)
    finally:
        with contextlib.suppress(sqlite3.Error):  # what was committed is safe in the log
            connection.close()


def _leave_removed(connection: sqlite3.Connection, files: Held) -> None:
    """Moves a removed log where that harms nobody; whatever happens, closing will not."""
    try:
        with contextlib.suppress(sqlite3.Error, UnicodeDecodeError):  # a file that cannot be read may hold others' work
            connection.rollback()
            if _is_before(connection, files):
                connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
    finally:
        _keep_from_moving(connection)


def _keep_from_moving(connection: sqlite3.Connection) -> None:
    """Lets closing write nothing. A statement would lift it again."""
    with contextlib.suppress(sqlite3.Error):
        if hasattr(connection, "setconfig"):  # Python 3.12
            connection.setconfig(sqlite3.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, True)  # type: ignore[attr-defined, unused-ignore]
    connection.interrupt()


def _is_before(connection: sqlite3.Connection, files: Held) -> bool:
    """Whether the path still names the file, nobody has a new log, and the file holds a beginning of what we see."""
    if found_at(files.path) != files.place or _has_newcomer(files):
        return False
    # By SQLite itself, which knows of the locks; without the log, which is no longer there.
    alone = sqlite3.connect(f"{files.path.as_uri()}?mode=ro&immutable=1", uri=True)
    try:
        saved = {number: tuple(rest) for number, *rest in alone.execute(_LEDGERS)}
        lines = set(alone.execute(_LINES))
        bound = set(alone.execute(_BINDINGS))
    finally:
        alone.close()
    known = {number: tuple(rest) for number, *rest in connection.execute(_LEDGERS)}
    if not lines <= set(connection.execute(_LINES)) or not bound <= set(connection.execute(_BINDINGS)):
        return False
    # A ledger's row may have got limits and lines since, and its name is what it was.
    is_beginning = all(number in known and _grew(row, known[number]) for number, row in saved.items())
    return is_beginning and not _has_newcomer(files)


def _grew(old: tuple[object, ...], new: tuple[object, ...]) -> bool:
    """Whether the row of a ledger can have become the other."""
    (name, header, digest, seq, _), (new_name, new_header, new_digest, new_seq, _) = old, new
    same = name == new_name and (header is None or (header, digest) == (new_header, new_digest))
    return same and isinstance(seq, int) and isinstance(new_seq, int) and seq <= new_seq


def _has_newcomer(files: Held) -> bool:
    """Whether somebody made a log or an index since. An empty one counts: its maker may have old pages in memory."""
    return any(new is not None and new != old for new, old in zip(log_of(files.path), files.log, strict=True))
