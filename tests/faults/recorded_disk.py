"""Records what SQLite and its ledgers ask of a disk, and builds the files that a loss of power may leave.

SQLite's writes are seen in its own file system layer, through ctypes; the ledger's waits for the disk at its two seams.
"""

from __future__ import annotations

import _sqlite3
import contextlib
import ctypes
import errno
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from langchain_dpicl.stores import sqlite_file

_PAGE = 4096
_CREATE = 0x4
_FAILED = 10 | 4 << 8  # SQLITE_IOERR_FSYNC

_Open = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(ctypes.c_int)
)
_Delete = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int)
_Write = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)
_Truncate = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int64)
_Sync = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int)


class _System(ctypes.Structure):
    """The first members of sqlite3_vfs."""

    _fields_ = [
        ("version", ctypes.c_int),
        ("file_size", ctypes.c_int),
        ("longest_path", ctypes.c_int),
        ("following", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("open", ctypes.c_void_p),
        ("delete", ctypes.c_void_p),
    ]


class _Methods(ctypes.Structure):
    """sqlite3_io_methods, of version 3."""

    _fields_ = [
        ("version", ctypes.c_int),
        *((name, ctypes.c_void_p) for name in ("close", "read", "write", "truncate", "sync")),
        ("others", ctypes.c_void_p * 13),
    ]


_FOR_LIFE: list[Any] = []
"""What SQLite may call as long as a connection is open."""


def _default_system() -> Any:
    """SQLite's own layer of this process, or None where its library shows no names."""
    try:
        find = ctypes.PyDLL(_sqlite3.__file__).sqlite3_vfs_find
    except (OSError, AttributeError):
        return None
    find.restype, find.argtypes = ctypes.POINTER(_System), [ctypes.c_char_p]
    found = find(None)
    return found.contents if found else None


CAN_RECORD = os.name == "posix" and _default_system() is not None


@dataclass
class File:
    """A file: the content that the disk has for certain, and what was asked of it since, in order."""

    kept: bytearray = field(default_factory=bytearray)
    asked: list[tuple[int, bytes | None]] = field(default_factory=list)  # (offset, bytes), or (size, None) to cut
    is_named: bool = False

    def sync(self) -> None:
        for piece in self.asked:
            _ask(self.kept, piece)
        self.asked.clear()

    def after_power_loss(self, rng: random.Random) -> bytes:
        """Some content: nothing, all, a beginning, or any pages of what was asked since the last wait."""
        pieces = [part for piece in self.asked for part in _pages(piece)]
        how = rng.randrange(4)
        if how == 0:
            pieces = []
        elif how == 1:
            pieces = pieces[: rng.randint(0, len(pieces))]
        elif how == 2:
            pieces = [piece for piece in pieces if rng.random() < 0.5]
        content = bytearray(self.kept)
        for piece in pieces:
            _ask(content, piece)
        return bytes(content)


def _ask(content: bytearray, piece: tuple[int, bytes | None]) -> None:
    place, data = piece
    if data is None:
        del content[place:]
        return
    content.extend(bytes(max(0, place - len(content))))
    content[place : place + len(data)] = data


def _pages(piece: tuple[int, bytes | None]) -> Iterator[tuple[int, bytes | None]]:
    place, data = piece
    if data is None:
        yield piece
        return
    end = place + len(data)
    while place < end:
        following = min((place // _PAGE + 1) * _PAGE, end)
        yield place, data[place - piece[0] : following - piece[0]]
        place = following


class Disk:
    """A disk that remembers what it was asked; `moment` is called after each of it.

    Attributes:
      files: what is there, by path.
      removed: content of files that were removed, whose names the disk may have still.
      moment: called when the disk was asked something.
      fails: whether the next wait of a ledger fails. What it waited for then never comes to the disk, and every other
        descriptor of the log that is open hears of it once, as on Linux.
      lies: waits of the ledgers return at once: "log", "folder" or "".
    """

    def __init__(self) -> None:
        self.files: dict[str, File] = {}
        self.removed: dict[str, bytes] = {}
        self.moment: Callable[[], object] = lambda: None
        self.fails = False
        self.lies = ""
        self._paths: dict[int, str] = {}  # by the address of SQLite's file
        self._to_fail: set[int] = set()  # descriptors of ledgers, and files of SQLite, that have not heard of a failure

    def left(self, rng: random.Random) -> dict[str, bytes]:
        """The files that a loss of power now may leave."""
        found = {}
        for path, file in self.files.items():
            if file.is_named or rng.random() < 0.5:
                found[path] = file.after_power_loss(rng)
        for path, content in self.removed.items():
            if path not in found and rng.random() < 0.5:
                found[path] = content
        return found

    def named(self) -> None:
        """The folder is on the disk as it is now."""
        for file in self.files.values():
            file.is_named = True
        self.removed.clear()

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Sees all files that SQLite opens in this process meanwhile, and what the ledgers wait for."""
        system, sync_log, sync_folder = _default_system(), sqlite_file.sync_log, sqlite_file.sync_folder
        old = system.open, system.delete
        opened, deleted = self._opening(_Open(old[0])), self._deleting(_Delete(old[1]))
        _FOR_LIFE.extend((opened, deleted))
        system.open, system.delete = (ctypes.cast(each, ctypes.c_void_p).value for each in (opened, deleted))
        sqlite_file.sync_log = self._sync_log
        sqlite_file.sync_folder = self._sync_folder
        try:
            yield
        finally:
            system.open, system.delete = old
            sqlite_file.sync_log, sqlite_file.sync_folder = sync_log, sync_folder

    def _sync_log(self, number: int) -> None:
        inode = os.fstat(number).st_ino
        for path, file in self.files.items():
            if Path(path).exists() and Path(path).stat().st_ino == inode:
                if self.fails:
                    self.fails = False
                    file.asked.clear()
                    self._to_fail |= {opened._number for opened in sqlite_file._open_files()}
                    self._to_fail |= {handle for handle, name in self._paths.items() if name == path}
                if number in self._to_fail:
                    self._to_fail.discard(number)
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                if self.lies != "log":
                    file.sync()
        self.moment()

    def _sync_folder(self, path: Path) -> None:
        if self.lies != "folder":
            self.named()
        self.moment()

    def _opening(self, real: Any) -> Any:
        paths, makers = self._paths, set[int]()
        known: dict[int, _Methods] = {}

        def opened(system: int, name: int | None, file: int, flags: int, out: Any) -> int:
            # SQLite keeps the name's address for the life of the file: it is handed on as it is.
            path = None if name is None else ctypes.string_at(name).decode()
            is_new = bool(flags & _CREATE) and path is not None and not Path(path).exists()
            status = int(real(system, name, file, flags, out))
            methods = ctypes.c_void_p.from_address(file)
            if status == 0 and path is not None and methods.value:
                paths[file] = path
                makers.discard(file)
                self._to_fail.discard(file)
                if is_new:
                    makers.add(file)
                if is_new or path not in self.files:
                    self.files[path] = File(bytearray(Path(path).read_bytes() if not is_new else b""), [], not is_new)
                if methods.value not in known:
                    known[methods.value] = self._watched(methods.value, paths, makers)
                methods.value = ctypes.addressof(known[methods.value])
            return status

        return _Open(opened)

    def _deleting(self, real: Any) -> Any:
        def deleted(system: int, name: bytes, is_synced: int) -> int:
            status = int(real(system, name, is_synced))
            file = self.files.pop(name.decode(), None)
            if status == 0 and file is not None:
                self.removed[name.decode()] = bytes(file.kept)
                self.moment()
            return status

        return _Delete(deleted)

    def _watched(self, address: int, paths: dict[int, str], makers: set[int]) -> _Methods:
        methods = _Methods.from_buffer_copy(ctypes.string_at(address, ctypes.sizeof(_Methods)))
        write, truncate, sync = _Write(methods.write), _Truncate(methods.truncate), _Sync(methods.sync)

        def note(file: int, piece: tuple[int, bytes | None]) -> None:
            if (found := self.files.get(paths[file])) is not None:
                found.asked.append(piece)
                self.moment()

        def written(file: int, data: int, length: int, offset: int) -> int:
            status = int(write(file, data, length, offset))
            if status == 0:
                note(file, (offset, ctypes.string_at(data, length)))
            return status

        def truncated(file: int, size: int) -> int:
            status = int(truncate(file, size))
            if status == 0:
                note(file, (size, None))
            return status

        def synced(file: int, flags: int) -> int:
            if file in self._to_fail:
                self._to_fail.discard(file)
                return _FAILED
            status = int(sync(file, flags))
            if status == 0 and (found := self.files.get(paths[file])) is not None:
                found.sync()
                if file in makers:  # who made a log has its folder synchronised by SQLite, too
                    makers.discard(file)
                    self.named()
                self.moment()
            return status

        hooks = _Write(written), _Truncate(truncated), _Sync(synced)
        methods.write, methods.truncate, methods.sync = (ctypes.cast(hook, ctypes.c_void_p).value for hook in hooks)
        _FOR_LIFE.extend((methods, *hooks))
        return methods
