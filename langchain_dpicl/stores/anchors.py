"""Stores the last line of each ledger in a file, to detect a ledger that was restored from a backup."""

# The file belongs on another disk than the ledger: an anchor that is restored together with it reveals nothing.

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from langchain_dpicl._plain_files import read_plain
from langchain_dpicl.exceptions import ConfigurationError, LedgerError, LedgerRollbackError, LedgerUnavailableError
from langchain_dpicl.privacy._validate import check_path, check_positive
from langchain_dpicl.privacy.accounting.events import canonical_json
from langchain_dpicl.stores.rows import LedgerHead
from langchain_dpicl.stores.sqlite_file import check_free, check_new_name, sync_folder

_FORMAT = "dpicl-anchor"
_VERSION = 1
_PAUSE = 0.002
_MAX_BYTES = 1 << 26
"""Bytes of the largest anchor: about 500,000 ledgers."""


class FileAnchor:
    """Remembers the last line of ledgers in a small file of JSON. Opening makes nothing; `FileAnchor.new` does.

    Formal guarantees:
      - What `write` took is on the disk when it returns, and a reader sees the old file or the whole new one.
      - Over all processes of this host, a ledger's line number never goes down, and a line once written never gets
        another hash.

    It protects from an older copy of the ledger, restored by mistake, if it is on another disk. It does not protect
    from somebody who may write to both files, as the process that spends must: against that use `PostgresAnchor` under
    another role than the owner of its table.

    Args:
      path: the file. Its mode and owner stay as they are, as far as the writer may give a file away.
      timeout: seconds to wait for other writers.

    Raises:
      LedgerUnavailableError: the file is missing or cannot be read.
      LedgerError: it is no anchor, or a file of a ledger that is open in this process.
      ConfigurationError: the timeout is out of range.
    """

    def __init__(self, path: str | os.PathLike[str], *, timeout: float = 60.0) -> None:
        self._path = check_path("path", path)
        self._timeout = check_positive("timeout", timeout)
        self._load()

    @classmethod
    def new(cls, path: str | os.PathLike[str], *, timeout: float = 60.0) -> FileAnchor:
        """Makes an anchor that knows no ledger yet, and opens it.

        Args:
          path: the file, as of the class.
          timeout: seconds to wait, as of the class.

        Raises:
          ConfigurationError: `path` is no path of a file, or the timeout is out of range.
          LedgerError: something is at `path`, or it is a name for a database's log.
          LedgerUnavailableError: it cannot be written there; nothing is left of it.
        """
        where = check_path("path", path)
        fault: LedgerError | None = None
        check_new_name(where, "anchor")
        check_free(where, "anchor")
        try:
            _make(where, _text({}))
        except FileExistsError:
            fault = LedgerError(f"anchor {where}: expected no file there, found one. Open it, or choose another path.")
        except OSError as error:
            fault = _unavailable(where, error)
        if fault is not None:
            raise fault
        return cls(where, timeout=timeout)

    @property
    def description(self) -> str:
        """Public words on where the anchor lives."""
        return f"file {self._path.name}"

    def read(self, ledger_id: str) -> tuple[int, str] | None:
        """Returns number and hash of the last line known of a ledger, or None if none was ever written.

        Raises:
          LedgerUnavailableError: the file is missing or cannot be read.
          LedgerError: it is no anchor.
        """
        return self._load().get(ledger_id)

    def write(self, ledger_id: str, seq: int, head: str) -> None:
        """Remembers line `seq` with hash `head`, durably, unless a later one is known.

        Raises:
          LedgerRollbackError: that line is known with another hash: the ledger has two histories.
          LedgerUnavailableError: the file cannot be locked or written; what it knew it still knows.
          LedgerError: it is no anchor.
        """
        with self._alone():
            known = self._load()
            last = known.get(ledger_id)
            if last is not None and last.seq == seq and last.hash != head:
                raise LedgerRollbackError(
                    f"ledger {ledger_id}: line {seq} is anchored with another hash in {self.description}: the ledger "
                    "has two histories. Nothing is granted; find the copy that was used meanwhile."
                )
            if last is None or last.seq < seq:
                self._save({**known, ledger_id: LedgerHead(seq, head)})

    def _load(self) -> dict[str, LedgerHead]:
        check_free(self._path, "anchor")
        fault: LedgerError
        try:
            data = read_plain(self._path, _MAX_BYTES)
        except ConfigurationError as error:
            fault = LedgerError(f"anchor: {error}")
        except OSError as error:
            fault = _unavailable(self._path, error)
        else:
            return _parsed(data, self._path)
        raise fault

    def _save(self, known: dict[str, LedgerHead]) -> None:
        text = _text(known)
        if len(text) > _MAX_BYTES:
            raise LedgerError(
                f"anchor {self._path}: expected at most {_MAX_BYTES} bytes. Make another for further ledgers."
            )
        try:
            _replace(self._path, text)
            sync_folder(self._path)
        except OSError as error:
            fault = _unavailable(self._path, error)
        else:
            return
        raise fault

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Holds the file's lock, which other writers wait for; a writer that dies loses it."""
        end = time.monotonic() + self._timeout
        while True:
            with self._opened() as number:
                # Another process put a new file in its place meanwhile: the lock of the old one is worth nothing.
                if self._lock(number):
                    owner = os.getpid()
                    try:
                        yield
                    finally:
                        if os.getpid() == owner:
                            _unlock(number)
                    return
            if time.monotonic() > end:
                raise LedgerUnavailableError(f"anchor {self._path}: locked by another process. Nothing is granted.")
            time.sleep(_PAUSE)

    def _lock(self, number: int) -> bool:
        """Takes the lock of the open file unless somebody holds it; returns whether it is the anchor's, and ours."""
        try:
            _flock(number)
            return os.path.samestat(os.fstat(number), self._path.stat())
        except BlockingIOError:
            return False
        except OSError as error:
            raise _unavailable(self._path, error) from None

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        check_free(self._path, "anchor")
        try:
            number = os.open(self._path, os.O_RDWR)
        except OSError as error:
            raise _unavailable(self._path, error) from None
        try:
            yield number
        finally:
            os.close(number)

    def __repr__(self) -> str:
        return f"FileAnchor({str(self._path)!r})"


def _flock(number: int) -> None:
    try:
        import fcntl
    except ModuleNotFoundError:
        raise ConfigurationError("anchor: expected a system with file locks (fcntl). Use PostgresAnchor.") from None
    fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _unlock(number: int) -> None:
    """Gives the lock back: closing alone leaves it with a child that was forked meanwhile."""
    import fcntl

    fcntl.flock(number, fcntl.LOCK_UN)


def _make(path: Path, text: str) -> None:
    """Makes a file, whole or not at all: what is half of an anchor would stand in the way of another try."""
    with path.open("x", encoding="ascii", newline="\n") as file:
        try:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            sync_folder(path)
        except BaseException:
            path.unlink(missing_ok=True)
            raise


def _replace(path: Path, text: str) -> None:
    """Puts a file in place of the one at `path`, with its mode, and its group and owner where they may be given."""
    old = path.stat()
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    try:
        with part.open("x", encoding="ascii", newline="\n") as file:
            file.write(text)
            file.flush()
            for user, group in ((-1, old.st_gid), (old.st_uid, -1)):
                with contextlib.suppress(PermissionError):  # only root gives a file to another owner
                    os.fchown(file.fileno(), user, group)
            os.fchmod(file.fileno(), stat.S_IMODE(old.st_mode))
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _text(known: dict[str, LedgerHead]) -> str:
    """Returns the file's text. Its digest tells a flipped bit, which would forget a ledger whose name it hits."""
    ledgers = {name: list(head) for name, head in known.items()}
    state = {"format": _FORMAT, "version": _VERSION, "digest": _digest(ledgers), "ledgers": ledgers}
    return json.dumps(state, indent=1) + "\n"


def _digest(ledgers: object) -> str:
    return hashlib.sha256(canonical_json(ledgers).encode("utf-8", "replace")).hexdigest()


def _parsed(data: bytes, path: Path) -> dict[str, LedgerHead]:
    try:
        state: Any = json.loads(data)
        ledgers = state["ledgers"]
        known = {str(name): LedgerHead(*line) for name, line in ledgers.items()}
        expected = {"format": _FORMAT, "version": _VERSION, "digest": _digest(ledgers), "ledgers": ledgers}
        lines_are_sound = all(type(head.seq) is int and type(head.hash) is str for head in known.values())
        sound = state == expected and lines_are_sound
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        sound = False
    if sound:
        return known
    raise LedgerError(f"anchor {path}: expected an anchor of version {_VERSION}, found something else. Restore it.")


def _unavailable(path: Path, error: OSError) -> LedgerUnavailableError:
    reason = error.strerror or type(error).__name__
    return LedgerUnavailableError(f"anchor {path}: cannot be used now ({reason}). Nothing is granted.")
