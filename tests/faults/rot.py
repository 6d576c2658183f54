"""L5: flipped bits and edited columns of the ledger's file. Refused, or nothing that counts has changed."""

from __future__ import annotations

import contextlib
import random
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.exceptions import LedgerError, LedgerRollbackError, PrivacyBudgetError
from langchain_dpicl.privacy.accounting.events import canonical_json
from langchain_dpicl.privacy.ledger.store import LedgerHeader, LedgerRecord, next_record
from langchain_dpicl.stores import FileAnchor, SQLiteStore
from tests.faults.counts import Count, require
from tests.faults.places import SQLitePlace, Terms

TERMS = Terms(1_000, refundable=True)


def spent_ledger(folder: Path) -> Path:
    """Makes a ledger with reservations, commits and one given back; closed, so that all is in one file."""
    place = SQLitePlace(folder / "sound.db")
    budget, share = TERMS.made(place)
    for number in range(30):
        reservation = share.reserve("t", count=1 + number % 3)
        if number % 3:
            reservation.burn()
            reservation.commit()
    share.reserve("t", count=5).give_back()
    budget.close()
    return place.path


def flip(folder: Path, count: Count, *, trials: int) -> None:
    """Flips one random bit of the file in each trial."""
    sound = spent_ledger(folder).read_bytes()
    expected = _content(folder / "sound.db")
    for number in range(trials):
        place = random.randrange(len(sound))
        bit = random.randrange(8)
        damaged = folder / f"damaged{number}.db"
        with count.trial(f"bit {bit} of byte {place}"):
            damaged.write_bytes(sound[:place] + bytes([sound[place] ^ 1 << bit]) + sound[place + 1 :])
            count.seen[_outcome(damaged, expected)] += 1
        for end in ("", "-wal", "-shm"):
            Path(f"{damaged}{end}").unlink(missing_ok=True)


def _content(path: Path) -> tuple[LedgerHeader | None, list[LedgerRecord]]:
    """Returns all that counts, verified."""
    store = SQLiteStore(path, timeout=1)
    with contextlib.closing(store):
        Budget.open(store).verify()
        return store.header(), list(store.records())


def _outcome(path: Path, expected: tuple[LedgerHeader | None, list[LedgerRecord]]) -> str:
    """Opens a damaged ledger, and goes on with it if it opens."""
    try:
        found = _content(path)
    except PrivacyBudgetError:
        return "refused"
    require(found == expected, "it opens, with another content")
    try:
        TERMS.opened(SQLitePlace(path))[1].reserve("t")
        header, records = _content(path)
    except PrivacyBudgetError:
        return "refused when written"
    require((header, records[:-1]) == expected, "it was written to, and has another content")
    return "nothing changed"


COLUMNS = {
    "seq of a line": "UPDATE lines SET seq = 400 WHERE seq = 7",
    "two lines swapped": "UPDATE lines SET seq = CASE seq WHEN 7 THEN -8 ELSE -7 END WHERE seq IN (7, 8); "
    "UPDATE lines SET seq = -seq WHERE seq < 0",
    "prev": "UPDATE lines SET prev = hash WHERE seq = 7",
    "kind": "UPDATE lines SET kind = 'give_back' WHERE seq = 7",
    "body": "UPDATE lines SET body = replace(body, '\"count\":', '\"count\":0') WHERE seq = 2",
    "stamp": "UPDATE lines SET stamp = '2000-01-01T00:00:00+00:00' WHERE seq = 7",
    "hash": "UPDATE lines SET hash = prev WHERE seq = 7",
    "hash of the last line": "UPDATE lines SET hash = prev WHERE seq = (SELECT max(seq) FROM lines)",
    "body as bytes": "UPDATE lines SET body = CAST(body AS BLOB) WHERE seq = 7",
    "seq as text": "UPDATE lines SET seq = 'seven' WHERE seq = 7",
    "ledger of a line": "INSERT INTO ledgers (name) VALUES ('other'); UPDATE lines SET ledger = 2 WHERE seq = 7",
    "a line dropped": "DELETE FROM lines WHERE seq = 7",
    "the last line dropped": "DELETE FROM lines WHERE seq = (SELECT max(seq) FROM lines)",
    "all lines dropped": "DELETE FROM lines",
    "the last line dropped, and the head set back": "DELETE FROM lines WHERE seq = (SELECT max(seq) FROM lines); "
    "UPDATE ledgers SET seq = seq - 1",
    "header": "UPDATE ledgers SET header = replace(header, '1.0', '9.0')",
    "header and digest": "UPDATE ledgers SET header = {header}, digest = {digest}",
    "header dropped": "UPDATE ledgers SET header = NULL, digest = NULL",
    "digest": "UPDATE ledgers SET digest = head",
    "number of the last line": "UPDATE ledgers SET seq = seq - 1",
    "head": "UPDATE ledgers SET head = digest",
    "name": "UPDATE ledgers SET name = 'other'",
    "number of the ledger": "UPDATE ledgers SET id = 7",
}
"""What an editor does to one column, past the guards; none of it knows how lines are hashed."""


def edit(folder: Path, count: Count, *, trials: int) -> None:
    """Edits each column; then forges whole lines, which only an anchor or a receipt can tell. `trials` is ignored."""
    sound = spent_ledger(folder).read_bytes()
    header = _content(folder / "sound.db")[0]
    require(header is not None, "no header")
    assert header is not None
    rich = LedgerHeader.from_dict({**header.to_dict(), "epsilon": 9.0})
    names = {"header": _quoted(canonical_json(rich.to_dict())), "digest": _quoted(rich.digest)}
    for words, script in COLUMNS.items():
        path = folder / f"edited {words}.db"
        path.write_bytes(sound)
        with count.trial(words):
            with unguarded(path) as connection:
                for statement in script.format(**names).split("; "):
                    connection.execute(statement)
            try:
                _content(path)
            except PrivacyBudgetError as error:
                require(isinstance(error, LedgerError), f"refused as {type(error).__name__}")
                count.seen["refused"] += 1
            else:
                require(False, "it opens")
    with count.trial("the last line forged whole"):
        _forge(folder, sound, count)


def _forge(folder: Path, sound: bytes, count: Count) -> None:
    path, anchor = folder / "forged.db", FileAnchor.new(folder / "anchor.json")
    path.write_bytes(sound)
    with contextlib.closing(SQLiteStore(path)) as store:
        budget = Budget.open(store, anchor=anchor, adopt_anchor=True)
        last = store.records()[-1]
        receipt = {"ledger_id": budget.ledger_id, "entry": last.seq, "entry_hash": last.hash}
    forged = next_record(last.seq - 1, last.prev, last.kind, {**last.body, "count": 4})
    with unguarded(path) as connection:
        values = (canonical_json(forged.body), forged.stamp, forged.hash, last.seq)
        connection.execute("UPDATE lines SET body = ?, stamp = ?, hash = ? WHERE seq = ?", values)
        connection.execute("UPDATE ledgers SET head = ?", (forged.hash,))
    with contextlib.closing(SQLiteStore(path)) as store:
        Budget.open(store).verify()  # as documented: the file alone cannot tell
        for attempt in (
            lambda: Budget.open(store, anchor=anchor),
            lambda: Budget.open(store).check_receipt(receipt),
        ):
            try:
                attempt()
            except LedgerRollbackError:
                count.seen["refused by anchor or receipt"] += 1
            else:
                require(False, "neither anchor nor receipt tells")


@contextlib.contextmanager
def unguarded(path: Path) -> Iterator[sqlite3.Connection]:
    """Opens the file with its triggers out of the way, and puts them back."""
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        guards = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
        for name, _ in guards:
            connection.execute(f"DROP TRIGGER {name}")
        yield connection
        for _, guard in guards:
            connection.execute(guard)
    finally:
        connection.close()


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
