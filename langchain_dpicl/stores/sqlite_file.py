"""Creates, opens and checks the SQLite file of a ledger, and tracks its write-ahead logs."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sqlite3
import stat
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from langchain_dpicl.exceptions import LedgerError, LedgerUnavailableError
from langchain_dpicl.stores.rows import OLDER_TABLES, ON_PURPOSE

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None  # type: ignore[assignment]

# The kind of the file is checked before its journal mode is set, so that opening changes nothing in a foreign file.


_APPLICATION_ID = 0x64704C31
"""Marks the file as ours, where SQLite keeps such a mark ("dpL1")."""

VERSION = 3
"""Of the tables. Those of development versions had smaller numbers, and are refused."""

# The index of lines is for what is read at an opening although a snapshot sums it up.
_TABLES = """
CREATE TABLE ledgers (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    header TEXT,
    digest TEXT,
    seq INTEGER NOT NULL DEFAULT 0,
    head TEXT
);
CREATE TABLE lines (
    ledger INTEGER NOT NULL REFERENCES ledgers (id),
    seq INTEGER NOT NULL,
    prev TEXT NOT NULL,
    kind TEXT NOT NULL,
    body TEXT NOT NULL,
    stamp TEXT NOT NULL,
    hash TEXT NOT NULL,
    PRIMARY KEY (ledger, seq)
) WITHOUT ROWID;
CREATE TRIGGER lines_follow BEFORE INSERT ON lines
WHEN NOT EXISTS (SELECT 1 FROM ledgers WHERE id = NEW.ledger AND seq = NEW.seq - 1 AND head = NEW.prev)
BEGIN SELECT RAISE(ABORT, 'a line follows the last one'); END;
CREATE TRIGGER lines_stay BEFORE DELETE ON lines
BEGIN SELECT RAISE(ABORT, 'lines are never dropped'); END;
CREATE TRIGGER lines_keep BEFORE UPDATE ON lines
BEGIN SELECT RAISE(ABORT, 'lines are never changed'); END;
CREATE TRIGGER ledgers_stay BEFORE DELETE ON ledgers
BEGIN SELECT RAISE(ABORT, 'ledgers are never dropped'); END;
CREATE TRIGGER ledgers_grow BEFORE UPDATE ON ledgers
WHEN NEW.id IS NOT OLD.id OR NEW.name IS NOT OLD.name OR NEW.seq < OLD.seq
    OR (OLD.header IS NOT NULL AND (NEW.header IS NOT OLD.header OR NEW.digest IS NOT OLD.digest))
BEGIN SELECT RAISE(ABORT, 'ledgers only grow'); END;
CREATE TABLE bindings (
    dataset TEXT NOT NULL PRIMARY KEY,
    ledger INTEGER NOT NULL REFERENCES ledgers (id)
) WITHOUT ROWID;
CREATE TRIGGER bindings_once BEFORE INSERT ON bindings
WHEN EXISTS (SELECT 1 FROM bindings WHERE dataset = NEW.dataset)
BEGIN SELECT RAISE(ABORT, 'a data set has one ledger'); END;
CREATE TRIGGER bindings_stay BEFORE DELETE ON bindings
BEGIN SELECT RAISE(ABORT, 'bindings are never dropped'); END;
CREATE TRIGGER bindings_keep BEFORE UPDATE ON bindings
BEGIN SELECT RAISE(ABORT, 'bindings are never changed'); END;
CREATE INDEX lines_named ON lines (kind, ledger, seq) WHERE kind IN ('bind', 'seal', 'snapshot');
"""

_CONNECTION = """
PRAGMA synchronous = FULL;
PRAGMA fullfsync = 1;
PRAGMA checkpoint_fullfsync = 1;
PRAGMA foreign_keys = ON;
PRAGMA trusted_schema = OFF;
PRAGMA cell_size_check = ON;
PRAGMA mmap_size = 0;
"""

_NETWORK = frozenset(
    [
        *("9p", "acfs", "afs", "beegfs", "ceph", "cifs", "coda", "fakeowner", "fuse", "gfs2", "glusterfs", "gpfs"),
        *("lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "panfs", "prl_fs", "pvfs2", "smb3", "smbfs", "vboxsf"),
        *("virtiofs", "vmhgfs", "wekafs"),
    ]
)
"""File systems whose locks or shared memory do not hold between hosts; "fuse" is one that does not say which it is."""

_LOCAL_FUSE = frozenset(["fuse.bindfs", "fuse.fuse-overlayfs", "fuse.mergerfs"])
"""File systems in user space that are mostly of one host; of others nobody can know."""

_LAYERS = frozenset(["aufs", "fuse.fuse-overlayfs", "overlay"])
"""File systems that show a container its image: what is written stands in the container's own layer."""

_IN_MEMORY = frozenset(["ramfs", "tmpfs"])

_MOUNTS = Path("/proc/self/mountinfo")
_HELD = Path("/proc/self/fdinfo")

_PASSING = frozenset(
    {
        sqlite3.SQLITE_AUTH,
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_INTERRUPT,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_PROTOCOL,
        sqlite3.SQLITE_READONLY,
    }
)
"""What keeps a sound ledger from being used now."""


_UNWRITABLE = frozenset({sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_READONLY})


_RESTORE = (
    "Nothing is granted; restore an untouched copy, with no process on the file and its -wal and -shm put away: SQLite "
    "would write them into the copy."
)


class FileIdentity(NamedTuple):
    """Which file a path names, whatever it is called."""

    device: int
    inode: int


class _Errors:
    """See `errors_of`; entered several times for each line, so that a generator would be slow."""

    __slots__ = ("_path",)

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        """Nothing is done here."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        if isinstance(error, sqlite3.Error):
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF  # the rest says it more finely
            words = f"{getattr(error, 'sqlite_errorname', type(error).__name__)}: {error}"
            raise _fault(self._path, code, words) from None
        if isinstance(error, UnicodeDecodeError):  # what SQLite says of a broken file quotes it
            raise _fault(self._path, sqlite3.SQLITE_CORRUPT, "text that is none") from None


def errors_of(path: Path) -> _Errors:
    """Turns what SQLite raises into errors of a ledger."""
    return _Errors(path)


def _fault(path: Path, code: int, words: str) -> LedgerError:
    if code in {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}:
        advice = "Another process holds its lock; end that one, or try again with a longer timeout."
        return LedgerUnavailableError(f"ledger {path}: locked ({words}). Nothing is granted. {advice}")
    if code in _PASSING:
        advice = "Look at the disk, its free space and the permissions of the file and its folder; then try again."
        if code in _UNWRITABLE:
            advice += " Where nothing can be written, read a file that `dpicl ledger export` made of it elsewhere."
        return LedgerUnavailableError(f"ledger {path}: cannot be used now ({words}). Nothing is granted. {advice}")
    return LedgerError(f"ledger {path}: broken or foreign ({words}). {_RESTORE}")


def file_identity(path: Path) -> FileIdentity:
    """Returns which file `path` names.

    Raises:
      LedgerUnavailableError: none, or its folder cannot be read.
    """
    status = _stat(path)
    return FileIdentity(status.st_dev, status.st_ino)


def file_identity_or_none(path: Path | str) -> FileIdentity | None:
    """Returns which file `path` names, or None where it names none."""
    try:
        status = os.stat(path)  # noqa: PTH116  several for each line: making paths takes longer than the look itself
    except OSError:
        return None
    return FileIdentity(status.st_dev, status.st_ino)


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        reason = error.strerror or type(error).__name__
    found = f"expected a ledger's file, found none ({reason})"
    raise LedgerUnavailableError(f"ledger {path}: {found}. Check the path; {ON_PURPOSE}")


def _check_file(path: Path) -> None:
    """Refuses what cannot be a ledger's file. Never opens it: closing would drop this process's locks."""
    status = _stat(path)
    fault = ""
    if not stat.S_ISREG(status.st_mode):
        fault = "no plain file. Check the path."
    elif status.st_size == 0:
        fault = (
            "an empty file: its creation was interrupted or is still running. If it stays empty, delete it and create "
            "the ledger again."
        )
    elif status.st_nlink != 1:
        fault = f"{status.st_nlink} hard links to it, each of which would have a log of its own. Keep one."
    if fault:
        raise LedgerError(f"ledger {path}: expected a ledger's file, found {fault}")


def _check_local(path: Path) -> None:
    """Refuses a file whose locks, or whose log beside it, other hosts or containers do not share."""
    kind, _ = _mount_of(path)
    if kind in _NETWORK or (kind.startswith("fuse.") and kind not in _LOCAL_FUSE):
        advice = "Keep it on a local disk, and copy finished backups elsewhere; use PostgreSQL for more than one host."
        raise LedgerError(f"ledger {path}: expected a local file system, found {kind}. {advice}")
    if is_mounted_alone(path):
        found = "a file that is mounted alone, whose log beside it no other container sees"
        raise LedgerError(f"ledger {path}: expected a file in a mounted folder, found {found}. Mount the folder.")


def is_mounted_alone(path: Path) -> bool:
    """Whether a file, and not its folder, is what was mounted."""
    return Path(_mount_of(path)[1]).is_file()


def why_lost(folder: Path) -> str | None:
    """Returns where the files of a folder stand that are lost with a container or a restart; None: elsewhere."""
    kind, _ = _mount_of(folder)
    if kind in _LAYERS:
        lost = "It is lost with the container, and every container of the image has its own. Keep it in a volume"
        return f"in a container's own layer ({kind}). {lost}."
    if kind in _IN_MEMORY:
        return f"in memory ({kind}). It is lost when the machine restarts. Keep it on a disk."
    return None


def _mount_of(path: Path) -> tuple[str, str]:
    """Returns type and place of the mount that a file is on, where the system tells; else "" twice."""
    name_alone = getattr(os, "O_PATH", None)  # opens nothing, so that its close drops no lock of this process
    if name_alone is None:
        return "", ""
    try:
        held = os.open(path, name_alone)
    except OSError:
        return "", ""
    try:
        told = (_HELD / str(held)).read_text(encoding="ascii")
        lines = _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").split("\n")
    except OSError:
        return "", ""
    finally:
        os.close(held)
    number = told.partition("mnt_id:")[2].split()[:1]  # gVisor does not say it
    for fields in (line.split(" ") for line in lines if line):
        if fields[:1] == number:
            # White space and backslashes are octal numbers.
            place = re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), fields[4])
            return fields[fields.index("-") + 1], place
    return "", ""


def open_file(path: Path, *, timeout: float) -> sqlite3.Connection:
    """Opens a ledger's file and checks all of it but the chain of its lines; makes nothing.

    Raises:
      LedgerError: it is not a ledger's file, broken, of another version, or on a network file system.
      LedgerUnavailableError: it is missing, locked or cannot be read.
    """
    _check_local(path)
    _check_file(path)
    with errors_of(path), _connect(path, timeout=timeout) as connection:
        _check_ours(connection, path)
        _check_version(connection, path)
        _check_schema(connection, path)
        _use_log(connection, path)
        _share_log(path)
        if _stat(path).st_size <= QUICK_BYTES:
            check_pages(connection, path)
        return connection


def _share_log(path: Path) -> None:
    """Gives the log the file's group: SQLite gives it the file's mode, and others who may write would be locked out."""
    group = _stat(path).st_gid
    for beside in (f"{path}-wal", f"{path}-shm"):
        with contextlib.suppress(OSError, AttributeError):  # another's file; a system without groups
            # A link in its place would lead root to a file of another.
            if os.lstat(beside).st_gid != group:
                os.chown(beside, -1, group, follow_symlinks=False)


QUICK_BYTES = 1 << 24
"""Files up to this size are read as a whole when they are opened, larger ones when they are verified."""


def check_pages(connection: sqlite3.Connection, path: Path) -> None:
    """Reads all of a file, and refuses it if its pages do not fit together."""
    rows = connection.execute("PRAGMA quick_check(1)").fetchall()
    if rows != [("ok",)]:
        raise LedgerError(f"ledger {path}: broken ({rows[0][0]}). {_RESTORE}")


def make_file(path: Path, *, timeout: float) -> bool:
    """Makes an empty ledger file, unless something is there; returns whether it did.

    Raises:
      LedgerError: it cannot be made there.
    """
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        return False
    except OSError as error:
        raise _no_folder(path, error) from None
    try:
        _check_local(path)
        with errors_of(path), _connect(path, timeout=timeout) as connection:
            _use_log(connection, path)
            marks = f"PRAGMA application_id = {_APPLICATION_ID}; PRAGMA user_version = {VERSION};"
            connection.executescript(f"BEGIN; {marks} {_TABLES} COMMIT;")
            connection.close()
        sync_name(path)
    except BaseException:
        remove_file(path)  # ours alone: nobody opens a file without our tables
        raise
    return True


def sync_name(path: Path) -> None:
    """Makes the name of a ledger's new file durable.

    Raises:
      LedgerUnavailableError: its folder cannot be read, or the disk failed.
    """
    try:
        sync_folder(path)
    except OSError as error:
        raise _no_folder(path, error) from None


def _no_folder(path: Path, error: OSError) -> LedgerUnavailableError:
    reason = error.strerror or type(error).__name__
    return LedgerUnavailableError(f"ledger {path}: expected a folder to make it in, found: {reason}.")


def remove_file(path: Path) -> None:
    """Removes a file that nobody has opened, and what SQLite keeps beside it."""
    for end in ("", "-wal", "-shm"):
        Path(f"{path}{end}").unlink(missing_ok=True)


def sync_log(number: int) -> None:
    """Waits until the disk holds what was written to an open log, by whatever process.

    Tests replace it, and `sync_folder`: a ledger waits for the disk nowhere else once it is made.
    """
    if hasattr(fcntl, "F_FULLFSYNC"):  # macOS, where less leaves it in the disk's own memory
        fcntl.fcntl(number, fcntl.F_FULLFSYNC)
    elif hasattr(os, "fdatasync"):
        os.fdatasync(number)
    else:
        os.fsync(number)


def sync_folder(path: Path) -> None:
    """Makes the name of a new file as durable as its content."""
    if os.name == "posix":
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextlib.contextmanager
def _connect(path: Path, *, timeout: float) -> Iterator[sqlite3.Connection]:
    """Yields a connection that is closed unless the block ends well."""
    connection = sqlite3.connect(
        f"{path.as_uri()}?mode=rw", uri=True, timeout=timeout, isolation_level=None, check_same_thread=False
    )
    try:
        connection.executescript(_CONNECTION)
        yield connection
    except BaseException:
        connection.close()
        raise


def _check_ours(connection: sqlite3.Connection, path: Path) -> None:
    mark = _number(connection, "application_id")
    if not mark and not _schema(connection):
        raise LedgerError(
            f"ledger {path}: expected a ledger's file, found one without tables: its creation was "
            "interrupted or is still running. If it stays so, delete it and create the ledger again."
        )
    if mark != _APPLICATION_ID:
        raise LedgerError(f"ledger {path}: expected a ledger's file, found another database. Check the path.")


def _use_log(connection: sqlite3.Connection, path: Path) -> None:
    mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
    if mode != "wal":
        advice = "Keep it on a local disk; use PostgreSQL for more than one host."
        raise LedgerError(f"ledger {path}: expected a file system with a write-ahead log, found {mode!r}. {advice}")


def _check_version(connection: sqlite3.Connection, path: Path) -> None:
    version = _number(connection, "user_version")
    if version != VERSION:
        advice = "Upgrade the package." if version > VERSION else OLDER_TABLES
        raise LedgerError(f"ledger {path}: expected tables of version {VERSION}, found version {version}. {advice}")


def _number(connection: sqlite3.Connection, pragma: str) -> int:
    return int(connection.execute(f"PRAGMA {pragma}").fetchone()[0])


def _check_schema(connection: sqlite3.Connection, path: Path) -> None:
    if _schema(connection) != _expected_schema():
        raise LedgerError(f"ledger {path}: expected the tables and triggers of a ledger, found others. Restore a copy.")


@functools.cache
def _expected_schema() -> list[tuple[str, ...]]:
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(_TABLES)
        return _schema(connection)


def _schema(connection: sqlite3.Connection) -> list[tuple[str, ...]]:
    query = "SELECT type, name, tbl_name, sql FROM sqlite_master WHERE name NOT GLOB 'sqlite_*' ORDER BY name"
    return connection.execute(query).fetchall()


# Files that this process has open are never opened by other means: closing them would drop SQLite's locks. A removed
# log is never written over what other processes wrote since.


_ENDS = ("-wal", "-shm", "-journal")
"""What SQLite adds to the name of a file for the files that it keeps beside it."""

_ADVICE = "Closing it could drop a ledger's locks. Choose another path."

_LEDGERS = "SELECT id, name, header, digest, seq, head FROM ledgers"
_LINES = "SELECT ledger, seq, hash FROM lines"
_BINDINGS = "SELECT dataset, ledger FROM bindings"


class OpenFiles:
    """The files that one connection of this process has open, until `close_connection`."""

    def __init__(self, path: Path, place: FileIdentity) -> None:
        self.path = path
        self.place = place
        self.log = log_of(path)
        self._is_named = False
        try:
            # Opened before the first write through this connection, so that the system reports every failed write here.
            # SQLite's locks are on the file and the index of the log: closing a descriptor of the log drops none.
            number = os.open(f"{path}-wal", os.O_RDWR if os.name == "nt" else os.O_RDONLY)
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise LedgerUnavailableError(f"ledger {path}: expected its log, found: {reason}. Try again.") from None
        self._number = number
        # Not when the interpreter ends: commits that wait are written then, and the disk is waited for.
        weakref.finalize(self, os.close, number).atexit = False
        _OPEN_FILES[id(self)] = self

    def sync(self) -> None:
        """Waits until the disk holds the log as it is now, and its name.

        Where others moved the log into the file and began it anew meanwhile, they synchronised both before that.
        """
        sync_log(self._number)
        if not self._is_named:  # the process that made the log may have died before it wrote its name
            sync_folder(self.path)
            self._is_named = True

    @property
    def is_whole(self) -> bool:
        """Whether the path still names the file, and beside it is the log that was opened with it."""
        return file_identity_or_none(self.path) == self.place and log_of(self.path) == self.log


_OPEN_FILES: weakref.WeakValueDictionary[int, OpenFiles] = weakref.WeakValueDictionary()


def log_of(path: Path) -> tuple[FileIdentity | None, FileIdentity | None]:
    """Returns which files are the log of `path` and its index now."""
    return file_identity_or_none(f"{path}-wal"), file_identity_or_none(f"{path}-shm")


def check_free(path: Path, what: str) -> None:
    """Refuses to open a file by hand that a ledger of this process has open, or that SQLite takes for a log.

    Never opens it: that is what would do the harm.
    """
    check_no_log(path, what)
    place = file_identity_or_none(path)
    if place is not None and any(place == held.place for held in _open_files()):
        raise LedgerError(f"{what} {path}: expected a file of its own, found a ledger's that is open here. {_ADVICE}")


def check_no_log(path: Path, what: str) -> None:
    """Refuses what SQLite takes for the log of a database that is there, and every name of a log that is open here."""
    place = file_identity_or_none(path)
    is_open_here = place is not None and any(place in held.log for held in _open_files())
    if is_open_here or any(path.name.endswith(end) and _is_file(path, end) for end in _ENDS):
        raise _log_error(path, what)


def check_new_name(path: Path, what: str) -> None:
    """Refuses a name for a new file that SQLite would take for the log of a database, even of one to come."""
    if path.name.endswith(_ENDS):
        raise _log_error(path, what)


def _is_file(path: Path, end: str) -> bool:
    """Whether there is a file of this name without its ending."""
    return file_identity_or_none(path.parent / path.name.removesuffix(end)) is not None


def _log_error(path: Path, what: str) -> LedgerError:
    return LedgerError(f"{what} {path}: expected a file of its own, found the log of a database. {_ADVICE}")


def _open_files() -> list[OpenFiles]:
    return [held for held in [found() for found in _OPEN_FILES.valuerefs()] if held is not None]


def close_connection(connection: sqlite3.Connection, files: OpenFiles | None) -> None:
    """Closes a connection.

    SQLite moves a log into its file when the last connection ends. Where the log was removed and others went on without
    it, that would put old pages over theirs, and what they granted would be forgotten. So the log is moved only where
    the file holds nothing that the log does not, and nobody has a new one: then nobody wrote since, and nothing that
    was granted is lost. A process that opens the file between that look and the move is not seen.
    """
    try:
        if files is not None and not files.is_whole:
            _move_removed_log(connection, files)
    finally:
        with contextlib.suppress(sqlite3.Error):  # what was committed is safe in the log
            connection.close()
        _OPEN_FILES.pop(id(files), None)  # an error's traceback may hold the object after the system reuses the numbers


def _move_removed_log(connection: sqlite3.Connection, files: OpenFiles) -> None:
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


def _is_before(connection: sqlite3.Connection, files: OpenFiles) -> bool:
    """Whether the path still names the file, nobody has a new log, and the file holds a beginning of what we see."""
    if file_identity_or_none(files.path) != files.place or _has_newcomer(files):
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


def _has_newcomer(files: OpenFiles) -> bool:
    """Whether somebody made a log or an index since. An empty one counts: its maker may have old pages in memory."""
    return any(new is not None and new != old for new, old in zip(log_of(files.path), files.log, strict=True))
