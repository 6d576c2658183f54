"""A drill: back a ledger up, lose its machine, restore it, and read what the ledger says about the restored copy.

    python deploy/drill.py postgresql://ledger_owner@db/postgres [--programs /usr/lib/postgresql/17/bin]

It makes a database of its own on that server, and drops it at the end; it touches no other. It needs the right to make
databases, and PostgreSQL's own createdb, dropdb, pg_dump and pg_restore. A password comes from ~/.pgpass or PGPASSWORD.
Each line says what was done, how long it took, and whether the ledger said what it has to; the exit code is 1 if one
did not. Run it on your server, with your settings, before the first real record, and again after every upgrade.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from psycopg import ProgrammingError
from psycopg.conninfo import conninfo_to_dict

from langchain_dpicl import PrivacyBudgetCallbackHandler
from langchain_dpicl.cli.main import main as dpicl
from langchain_dpicl.exceptions import LedgerRollbackError
from langchain_dpicl.privacy.accounting.events import PureEvent
from langchain_dpicl.privacy.ledger.tickets import Ticket

DONE, WRONG = 0, 1
ABOUT = {"purpose": "a drill: no record is behind it"}


class Drill:
    """One drill on one server.

    Attributes:
      failed: steps at which the ledger said something else than it has to.
    """

    def __init__(self, server: str, programs: Path | None, folder: Path) -> None:
        self._server, self._programs, self._folder = server, programs, folder
        self._name = f"dpicl_drill_{os.getpid()}_{int(time.time())}"
        self._ledger = _address_of(server, self._name)
        self._anchor = folder / "anchor.json"
        self.failed: list[str] = []

    def run(self) -> None:
        """Does all of it."""
        self._tool("createdb", f"--maintenance-db={self._server}", self._name)
        try:
            self._steps()
        finally:
            self._drop()

    def _steps(self) -> None:
        backup, later, receipts = (self._folder / name for name in ("monday.dump", "tuesday.dump", "receipts.jsonl"))
        with self._step("make a ledger, with its anchor on another disk"):
            made = PrivacyBudgetCallbackHandler.create(
                self._ledger, epsilon=4.0, delta=1e-6, anchor=self._anchor, about=ABOUT
            )
            made.budget.close()
            self._spend(2)
        with self._step("Monday: back it up (pg_dump)"):
            self._tool("pg_dump", "--format=custom", f"--file={backup}", f"--dbname={self._ledger}")
        with self._step("Tuesday: spend on, and keep the receipts"):
            receipts.write_text("\n".join(map(json.dumps, self._spend(3))) + "\n", encoding="utf-8")
        with self._step("the ledger, its anchor and every receipt agree") as says:
            says(self._verify("--anchor", str(self._anchor), "--receipt", str(receipts)) == DONE)
        with self._step("Tuesday night: back it up as well"):
            self._tool("pg_dump", "--format=custom", f"--file={later}", f"--dbname={self._ledger}")
        self._lose_and_restore(backup, "Monday's")
        with self._step("nothing is wrong with the copy itself: it is whole, only older") as says:
            says(self._verify() == DONE)
        with self._step("the anchor refuses it") as says:
            says(self._verify("--anchor", str(self._anchor)) == WRONG)
        with self._step("no service opens it with the anchor, so nothing is spent twice") as says:
            says(self._is_refused())
        with self._step("the receipts of Tuesday refuse it too, should the anchor be lost as well") as says:
            says(self._verify("--receipt", str(receipts)) == WRONG)
        self._lose_and_restore(later, "Tuesday's")
        with self._step("a backup that misses nothing opens with the anchor, and goes on") as says:
            says(self._verify("--anchor", str(self._anchor), "--receipt", str(receipts)) == DONE)
            self._spend(1)
            says(self._verify("--anchor", str(self._anchor), "--receipt", str(receipts)) == DONE)

    def _lose_and_restore(self, backup: Path, whose: str) -> None:
        with self._step("lose the machine (dropdb)"):
            self._drop()
        with self._step(f"restore {whose} backup (createdb, pg_restore)"):
            self._tool("createdb", f"--maintenance-db={self._server}", self._name)
            self._tool("pg_restore", "--exit-on-error", f"--dbname={self._ledger}", str(backup))

    def _spend(self, count: int) -> list[dict[str, Any]]:
        """Spends tickets as a component does, without records behind them; returns what proves it."""
        budget = PrivacyBudgetCallbackHandler.open(self._ledger, anchor=self._anchor, most_held=1).budget
        try:
            ticket = Ticket("query", PureEvent(0.01), max_count=100, refundable=True)
            share = budget.declare("drill", tickets=[ticket], epsilon=1.0)
            return [self._spent(share.reserve("query"), budget.ledger_id) for _ in range(count)]
        finally:
            budget.close()

    @staticmethod
    def _spent(reservation: Any, ledger_id: str) -> dict[str, Any]:
        reservation.burn()
        reservation.commit()
        proof = {"ledger_id": ledger_id, "component": "drill"}
        return {**proof, "entry": reservation.entry, "entry_hash": reservation.entry_hash}

    def _verify(self, *options: str) -> int:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return dpicl(["ledger", "verify", self._ledger, *options])

    def _is_refused(self) -> bool:
        try:
            PrivacyBudgetCallbackHandler.open(self._ledger, anchor=self._anchor).budget.close()
        except LedgerRollbackError:
            return True
        return False

    @contextlib.contextmanager
    def _step(self, words: str) -> Iterator[Callable[[bool], None]]:
        told: list[bool] = []
        begun = time.perf_counter()
        yield told.append
        mark = "NOT SO" if not all(told) else "as it has to" if told else "done"
        print(f"{time.perf_counter() - begun:6.1f} s  {mark:13} {words}")
        if not all(told):
            self.failed.append(words)

    def _tool(self, program: str, *options: str) -> None:
        found = shutil.which(program, path=None if self._programs is None else str(self._programs))
        if found is None:
            raise SystemExit(f"{program}: expected PostgreSQL's program, found none. Name its folder: --programs.")
        done = subprocess.run([found, "--no-password", *options], capture_output=True, text=True, check=False)  # noqa: S603
        if done.returncode:
            raise SystemExit(f"{program}: {done.stderr.strip()}")

    def _drop(self) -> None:
        self._tool("dropdb", "--force", "--if-exists", f"--maintenance-db={self._server}", self._name)


def _address_of(server: str, database: str) -> str:
    """Returns the address of a database of a server, as libpq reads it: `?dbname=` would lead to a live one."""
    address = urlunsplit(urlsplit(server)._replace(path=f"/{database}"))
    found: dict[str, Any] = {}
    if server.startswith(("postgresql://", "postgres://")):
        with contextlib.suppress(ProgrammingError):
            found = conninfo_to_dict(address)
    if found.get("dbname") != database:
        raise SystemExit("server: expected postgresql://user@host/postgres without dbname=, found something else.")
    return address


def main(arguments: list[str] | None = None) -> int:
    """Runs one drill; returns 1 where the ledger said something else than it has to."""
    parser = argparse.ArgumentParser(description="Back up, lose and restore a ledger on a PostgreSQL server.")
    parser.add_argument("server", help="postgresql:// address of a database there, of a role that may make databases")
    parser.add_argument("--programs", type=Path, metavar="FOLDER", help="of createdb, dropdb, pg_dump, pg_restore")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="dpicl-drill-") as folder:
        drill = Drill(given.server, given.programs, Path(folder))
        drill.run()
    if drill.failed:
        print("the drill failed")
    else:
        print("the drill succeeded; what a real loss costs: docs/production.md#backups")
    return WRONG if drill.failed else DONE


if __name__ == "__main__":
    sys.exit(main())
