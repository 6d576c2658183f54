"""A real PostgreSQL server on this machine, one per test process: the fixture `postgres`, for conftest files to import.

Found in PATH or where Debian puts it; `apt-get install postgresql` brings it. It runs with fsync on, as nobody where we
are root (it refuses root), and listens on a unix socket in a folder of its own. Where none is found tests are skipped
with the reason, and fail on CI, where nobody reads reasons.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import psycopg
import pytest

from langchain_dpicl.stores.postgres import SchemaTables

SETTINGS = {
    "listen_addresses": "",
    "max_connections": "200",
    "shared_buffers": "16MB",
    "autovacuum": "off",
    "jit": "off",
    "wal_level": "minimal",
    "max_wal_senders": "0",
    "log_min_messages": "error",
}
PATIENCE = 60.0


def await_that(condition: Callable[[], object]) -> None:
    """Waits until something holds."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def programs() -> Path | None:
    """Returns the folder of the server's programs, the newest one, or None."""
    folders = [Path(found).resolve().parent for found in [shutil.which("postgres")] if found]
    debian = Path("/usr/lib/postgresql").glob("*/bin")
    folders += sorted(debian, key=lambda path: int(path.parent.name.split(".")[0]), reverse=True)
    return next((path for path in folders if (path / "initdb").is_file() and (path / "postgres").is_file()), None)


def give_up(reason: str, environment: Mapping[str, str] = os.environ) -> NoReturn:
    """Skips what needs a server; on CI it fails instead."""
    if environment.get("CI"):
        pytest.fail(f"{reason}; on CI these tests have to run")
    pytest.skip(reason)


def _is_alive(process: int) -> bool:
    """Whether a process exists that has not ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}
    except (FileNotFoundError, ProcessLookupError):
        return False


class PostgresServer:
    """A server with a folder of its own. `start` and `stop` may follow one another."""

    def __init__(self, bin_folder: Path, **settings: str) -> None:
        self.programs = bin_folder
        self.folder = Path(tempfile.mkdtemp(prefix="dpicl-pg-"))
        self.settings = {**SETTINGS, **settings}
        self._process: subprocess.Popen[bytes] | None = None
        self._numbers = itertools.count(1)
        self._as: dict[str, Any] = {}
        if os.geteuid() == 0:
            self._as = {"user": "nobody", "group": "nogroup", "extra_groups": []}
            shutil.chown(self.folder, "nobody", "nogroup")
        options = ["-U", "owner", "-A", "trust", "-E", "UTF8", "--locale=C", "--wal-segsize=1", "--no-sync"]
        self.run("initdb", "-D", str(self.folder / "data"), *options)

    def run(self, program: str, *options: str, **how: Any) -> str:
        """Runs one of the server's programs to its end; returns what it printed."""
        command = [str(self.programs / program), *options]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=False, **self._as, **how)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def start(self, *, largest_file: int | None = None) -> None:
        """Starts the server and waits until it answers; no file grows beyond so many bytes, as on a full disk."""
        options = [part for key, value in self.settings.items() for part in ("-c", f"{key}={value}")]
        command = [str(self.programs / "postgres"), "-D", str(self.folder / "data"), "-k", str(self.folder), *options]
        if largest_file is not None:
            command = ["sh", "-c", 'ulimit -f "$0" && exec "$@"', str(largest_file // 512), *command]
        if shutil.which("setpriv"):  # ends with the test process, should that be killed
            command = ["setpriv", "--pdeathsig", "INT", *command]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log, **self._as)
        end = time.monotonic() + PATIENCE
        while True:
            try:
                psycopg.connect(self.conninfo()).close()
            except psycopg.OperationalError:
                if self._process.poll() is not None or time.monotonic() > end:
                    raise AssertionError((self.folder / "log").read_text()) from None
                time.sleep(0.02)
            else:
                return

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """Stops the server: SIGINT ends sessions and writes all down, SIGQUIT and SIGKILL are a crash."""
        if self._process is not None:
            killed = self._kill_children() if how is signal.SIGKILL else []
            self._process.send_signal(how)
            self._process.send_signal(signal.SIGCONT)
            self._process.wait(PATIENCE)
            self._process = None
            await_that(lambda: not any(map(_is_alive, killed)))  # no server starts beside one that holds its memory

    def _kill_children(self) -> list[int]:
        # Those of a killed postmaster would finish their work first: a crash of the host spares none.
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        found = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        children = [int(child) for child in found]
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        return children

    def conninfo(self, database: str = "postgres", *, user: str = "owner", folder: Path | None = None) -> str:
        """Returns where to connect; `folder` is a proxy's."""
        return f"host={folder or self.folder} port=5432 user={user} dbname={database}"

    def fresh(self, kind: str) -> str:
        """Returns a name that nothing here has."""
        return f"{kind}_{next(self._numbers)}"

    def new_database(self, *, template: str = "template1") -> str:
        """Makes a database and returns its name."""
        name = self.fresh("database")
        self.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
        return name

    def execute(
        self, statement: str, *values: Any, schema: str = "dpicl", database: str = "postgres", guarded: bool = False
    ) -> list[tuple[Any, ...]]:
        """Runs a statement as the owner, past every guard, and returns its rows; `{lines}` is a table of ledgers."""
        with self.owner(database, guarded=guarded) as connection:
            cursor = connection.execute(SchemaTables(schema).query(statement), values or None)
            return cursor.fetchall() if cursor.description else []

    def owner(self, database: str = "postgres", *, guarded: bool = False) -> psycopg.Connection[tuple[Any, ...]]:
        """Returns a connection of the owner of everything, past every guard."""
        connection = psycopg.connect(self.conninfo(database), autocommit=True)
        if not guarded:
            connection.execute("SET session_replication_role = replica")  # no trigger speaks
        return connection

    def remove(self) -> None:
        """Stops the server and removes its folder."""
        self.stop(signal.SIGQUIT)
        shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def running(**settings: str) -> Iterator[PostgresServer]:
    """Runs a server of one's own for a block; skips where there is none."""
    found = programs()
    if found is None:
        give_up("no PostgreSQL server is installed (Debian: apt-get install postgresql)")
    server = PostgresServer(found, **settings)
    try:
        server.start()
        yield server
    finally:
        server.remove()


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """The server of this test process."""
    with running() as server:
        yield server
