"""Stores released answers in a SQLite file, for the processes of one host."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from langchain_dpicl.privacy._validate import check_int, check_path, check_positive, check_real
from langchain_dpicl.stores.memos import (
    MOST_ANSWERS,
    TURN_SECONDS,
    KeptMemo,
    MemoKey,
    memo_faults,
)
from langchain_dpicl.stores.sqlite_per_call import FileKind, PerCallFile

_TABLES = """
CREATE TABLE answers (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    scope TEXT NOT NULL,
    tenant TEXT NOT NULL,
    query TEXT NOT NULL,
    told TEXT NOT NULL,
    digest TEXT NOT NULL,
    UNIQUE (scope, tenant, query)
);
CREATE TABLE turns (
    scope TEXT NOT NULL,
    tenant TEXT NOT NULL,
    query TEXT NOT NULL,
    holder TEXT NOT NULL,
    until REAL NOT NULL,
    PRIMARY KEY (scope, tenant, query)
) WITHOUT ROWID;
"""


def _tables_of_a_new_file() -> str:
    return _TABLES


_KIND = FileKind(
    word="memo",
    application_id=0x64704D31,  # "dpM1"
    version=1,
    tables=_tables_of_a_new_file,
    repair="Restore a copy; or remove it for a new one, and queries asked before are charged again.",
)
_RECALL = "SELECT told, digest FROM answers WHERE scope = ? AND tenant = ? AND query = ?"
_LONGEST_TURN = 7 * 86400.0
# A turn that seems to end long after any could was taken by a clock that went wrong.
_END_LATE_TURNS = "DELETE FROM turns WHERE until <= ? OR until > ?"
_CLAIM = (
    "INSERT INTO turns (scope, tenant, query, holder, until) VALUES (?, ?, ?, ?, ?) "
    "ON CONFLICT (scope, tenant, query) DO UPDATE SET until = excluded.until WHERE holder = excluded.holder"
)


class SQLiteMemo(KeptMemo):
    """Keeps released answers in a SQLite file beside the ledger, for all processes of a host. Makes a missing file.

    Losing the file loses no privacy: what is asked again is charged again. Threads, processes and forks may share it;
    a copy of the file, taken while nobody writes, is a whole memo.

    Formal guarantees:
      - When `remember` returns, the answer is on the disk; a kill leaves the answer of before or of after.
      - An answer is found by its own plan, tenant and query alone, and only unbroken.
      - Of one component at most `size` answers are kept for a tenant: the newest.
      - One process at a time has the turn to answer a question, for at most `turn_seconds`.
      - A file of another kind, a broken one, one of a newer version and one on a network file system are refused.

    Args:
      path: the file; made with rights for its owner alone.
      size: answers kept of one component for one tenant.
      turn_seconds: how long others who ask the same wait for an answer that is under way; at most a week.
      timeout: seconds to wait for other processes that write.

    Raises:
      MemoError: it is no memo's file, broken, or cannot be used.
      ConfigurationError: an argument is out of range.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     memo = SQLiteMemo(folder + "/memo.db")
      ...     memo.durable, memo.description
      (True, 'SQLite file memo.db')
    """

    _REMEMBER = (
        "INSERT INTO answers (scope, tenant, query, told, digest) VALUES (?, ?, ?, ?, ?) "
        "ON CONFLICT (scope, tenant, query) DO UPDATE SET told = excluded.told, digest = excluded.digest WHERE told = ?"
    )
    _DROP_OLDEST = (
        "DELETE FROM answers WHERE scope = ?1 AND tenant = ?2 AND number <= (SELECT number FROM answers "
        "WHERE scope = ?1 AND tenant = ?2 ORDER BY number DESC LIMIT 1 OFFSET ?3)"
    )
    _LEAVE = "DELETE FROM turns WHERE scope = ? AND tenant = ? AND query = ? AND holder = ?"
    _FORGET = ("DELETE FROM answers WHERE tenant = ?", "DELETE FROM turns WHERE tenant = ?")

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        size: int = MOST_ANSWERS,
        turn_seconds: float = TURN_SECONDS,
        timeout: float = 60.0,
    ) -> None:
        self._size = check_int("size", size, low=1)
        self._turn = check_real("turn_seconds", turn_seconds, low=0.0, high=_LONGEST_TURN, low_open=True)
        timeout, path = check_positive("timeout", timeout), check_path("path", path)
        with memo_faults():
            self._file = PerCallFile(path, _KIND, timeout=timeout)

    @property
    def path(self) -> Path:
        """The file, links resolved."""
        return self._file.path

    @property
    def description(self) -> str:
        """Public words on where the memo lives; no folder, which may name a person."""
        return f"SQLite file {self.path.name}"

    def claim(self, key: MemoKey, holder: str) -> bool:
        """Takes the turn to answer, anew where it is the holder's, unless somebody else has it; see `ReleaseMemo`."""
        now = time.time()
        late = (_END_LATE_TURNS, (now, now + _LONGEST_TURN))
        return self._written(late, (_CLAIM, (*key, holder, now + self._turn)))[1] == 1

    def _row(self, key: MemoKey) -> tuple[object, object] | None:
        row = self._file.read(lambda connection: connection.execute(_RECALL, key).fetchone())
        return None if row is None else (row[0], row[1])

    def _written(self, *commands: tuple[str, Sequence[Any]]) -> list[int]:
        with memo_faults():
            return self._file.write(lambda one: [one.execute(command, values).rowcount for command, values in commands])

    def __repr__(self) -> str:
        return f"SQLiteMemo({str(self.path)!r})" if hasattr(self, "_file") else "SQLiteMemo(not made)"
