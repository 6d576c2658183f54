"""What goes wrong around a ledger on a real PostgreSQL server: nothing is granted twice, forgotten or made up."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest

from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.exceptions import (
    LedgerError,
    LedgerRollbackError,
    LedgerUnavailableError,
    PrivacyBudgetExceededError,
)
from langchain_dpicl.privacy.extensions.ledger_anchor import LedgerAnchor
from langchain_dpicl.privacy.ledger.shares import Share
from langchain_dpicl.stores import FileAnchor
from langchain_dpicl.stores.postgres import TIMEOUT, PostgresAnchor, PostgresStore, SchemaTables
from tests.anchor_swaps import after_next_commit, race
from tests.contracts.anchor import AnchorContract
from tests.contracts.store import in_child
from tests.faults.afresh import Afresh
from tests.faults.catalogue import POSTGRES
from tests.faults.counts import Count
from tests.faults.postgres_place import PostgresPlace, hasty
from tests.ledgers import tickets
from tests.postgres import PostgresServer, await_that, running

pytestmark = pytest.mark.usefixtures("simple_prices")

SOON = 0.3
PATIENCE_OF_THE_HASTY = 2.0
"""Only where the wait is to end in a refusal: a busy machine may take longer for what has to succeed."""


@dataclass(frozen=True)
class Where:
    """A ledger on a server."""

    conninfo: str
    schema: str

    def store(self) -> PostgresStore:
        return PostgresStore(self.conninfo, schema=self.schema)

    def share(self, *, count: int) -> Share:
        return Budget.open(self.store()).declare("c", tickets=tickets(1e-5, count), epsilon=1e-5 * count)

    def kinds(self) -> list[str]:
        """Returns what the lines of the ledger are, verified."""
        with self.store() as store:
            Budget.open(store).verify()
            return [line.kind for line in store.records()]


def waits_for_a_lock(postgres: PostgresServer) -> bool:
    """Says whether a session of the server is waiting for another one's lock."""
    return bool(postgres.execute("SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock'"))


@pytest.fixture
def where(postgres: PostgresServer) -> Where:
    found = Where(postgres.conninfo(), postgres.fresh("schema"))
    with PostgresStore.new(found.conninfo, schema=found.schema) as store:
        Budget(epsilon=4.0, delta=1e-6, store=store)
    return found


def add(store: PostgresStore, *numbers: int) -> None:
    with store.transaction() as view:
        for number in numbers:
            view.append("note", {"n": number})


def numbers(store: PostgresStore) -> list[int]:
    return [line.body["n"] for line in store.records()]


def session_of(store: PostgresStore) -> int:
    """Returns the number of the server's process that serves a store."""
    connection = store._link._hands.here.connection
    assert connection is not None
    return connection.info.backend_pid


def fall_silent(store: PostgresStore) -> None:
    """Stops the session that a store has now, which the store then waits for a short time only."""
    connection = store._link._hands.here.connection
    assert connection is not None
    assert connection.patience == 2 * TIMEOUT
    connection.patience = 2 * PATIENCE_OF_THE_HASTY
    os.kill(connection.info.backend_pid, signal.SIGSTOP)


@contextlib.contextmanager
def frozen(store: PostgresStore) -> Iterator[None]:
    """Lets go of the session that a store has now, whatever happens in the block."""
    store.header()
    silent = session_of(store)
    try:
        yield
    finally:
        os.kill(silent, signal.SIGCONT)


@pytest.fixture(scope="module")
def afresh() -> Iterator[Afresh]:
    """The process that forks."""
    with Afresh() as found:
        yield found


class TestCatalogue:
    """A few trials of what `make faults` tries often."""

    FORKING = (("L1 64 processes", 1), ("L1 64 of all kinds", 1), ("L2 kill -9", 12), ("L13 forks and copies", 1))
    LEASES = (("L1 leases, 6 processes", 1), ("L2 leases, kill -9", 6), ("L2 a stream, kill -9", 6))
    FEW = (
        ("L2 lost answers", 4),
        ("L2 ended sessions", 8),
        ("L10 stop at a line", 12),
        ("L2 leases, ended sessions", 4),
    )

    @pytest.mark.parametrize(("words", "trials"), FORKING + LEASES)
    def test_a_fault_of_processes_costs_no_line_and_gives_nothing_back(
        self, postgres: PostgresServer, afresh: Afresh, words: str, trials: int, tmp_path: Path
    ) -> None:
        where = {"conninfo": postgres.conninfo(), "schema": postgres.fresh("schema")}
        self.check(afresh.count(f"{words}, PostgreSQL", tmp_path, trials=trials, **where), trials)

    @pytest.mark.parametrize(("words", "trials"), FEW)
    def test_a_fault_costs_no_line_and_gives_nothing_back(
        self, postgres: PostgresServer, words: str, trials: int
    ) -> None:
        fault = next(fault for fault in POSTGRES if fault.words.startswith(words))
        found = Count()
        places = functools.partial(PostgresPlace, postgres)
        fault.run(lambda: places(postgres.fresh("schema")), found, trials=trials, **fault.options)
        self.check(found, trials)

    @staticmethod
    def check(found: Count, trials: int) -> None:
        assert found.violations == []
        assert found.trials >= trials
        assert found.seen


class TestLocks:
    @contextlib.contextmanager
    def held(self, postgres: PostgresServer, where: Where) -> Iterator[None]:
        """Holds the ledger's row as a stuck writer does, who is none of ours."""
        with psycopg.connect(postgres.conninfo()) as connection:
            connection.execute(f"SELECT 1 FROM {where.schema}.dpicl_ledgers FOR UPDATE")  # noqa: S608  our own name
            yield

    def test_a_held_lock_is_waited_for_and_then_refused(self, postgres: PostgresServer, where: Where) -> None:
        store = where.store()
        share = Budget.open(store).declare("c", tickets=tickets(), epsilon=1.0)
        refused = pytest.raises(
            LedgerUnavailableError, match=r"expected the ledger within its time limits.*(55P03|57014)"
        )
        with self.held(postgres, where):
            start = time.monotonic()
            with hasty(store, PATIENCE_OF_THE_HASTY), refused as caught:
                share.reserve("t")
            assert PATIENCE_OF_THE_HASTY <= time.monotonic() - start < 60
            assert "schema" not in str(caught.value).split("expected")[1]
            assert share.remaining("t") == 10
        share.reserve("t").burn()
        assert where.kinds() == ["seal", "reserve"]

    def test_a_lock_that_comes_free_in_time_is_taken(self, postgres: PostgresServer, where: Where) -> None:
        with ThreadPoolExecutor(1) as pool:
            with self.held(postgres, where):
                adding = pool.submit(add, where.store(), 1)
                time.sleep(SOON)
                assert not adding.done()
            adding.result()
        assert numbers(where.store()) == [1]

    def test_a_writer_that_hangs_in_its_transaction_is_thrown_out(self, where: Where) -> None:
        stuck = where.store()
        stuck.header()
        with hasty(stuck, PATIENCE_OF_THE_HASTY), pytest.raises(LedgerUnavailableError), stuck.transaction() as view:
            view.append("note", {"n": 1})
            add(where.store(), 2)  # waits for the server to lose patience with the other
            view.append("note", {"n": 3})
        assert numbers(stuck) == [2]
        add(stuck, 4)
        assert numbers(where.store()) == [2, 4]

    def test_an_interrupt_leaves_a_store_that_works(self, postgres: PostgresServer, where: Where) -> None:
        store = where.store()
        add(store, 1)
        previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
        try:
            with self.held(postgres, where), pytest.raises(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, SOON)
                add(store, 2)
        finally:
            signal.signal(signal.SIGALRM, previous)
        add(store, 3)
        assert numbers(store) == [1, 3]


class TestClosing:
    """A thread that is at work keeps its connection to the end of its turn."""

    def test_it_waits_for_the_thread_that_has_its_turn(self, where: Where) -> None:
        store, inside, close = where.store(), threading.Event(), threading.Event()

        def work() -> None:
            with store.transaction() as view:
                inside.set()
                assert close.wait(60)
                time.sleep(SOON)
                view.append("note", {"n": 1})

        with ThreadPoolExecutor(1) as pool:
            working = pool.submit(work)
            assert inside.wait(60)
            close.set()
            store.close()
            working.result()
        assert numbers(where.store()) == [1]
        with pytest.raises(LedgerError, match="closed"):
            store.header()

    def test_one_who_waits_for_a_lock_is_told_in_our_words(self, postgres: PostgresServer, where: Where) -> None:
        store = where.store()
        share = Budget.open(store).declare("c", tickets=tickets(), epsilon=1.0)
        share.reserve("t").burn()
        theirs = session_of(store)
        with ThreadPoolExecutor(2) as pool, TestLocks().held(postgres, where):
            waiting = pool.submit(share.reserve, "t")
            await_that(lambda: waits_for_a_lock(postgres))
            closing = pool.submit(store.close)
            await_that(lambda: store._link.closed)
            postgres.execute("SELECT pg_cancel_backend(%s)", theirs)  # as at the end of its time
            error = waiting.exception()
            closing.result()
        assert isinstance(error, LedgerUnavailableError)
        assert error.__cause__ is None
        assert error.__context__ is None
        assert where.kinds() == ["seal", "reserve"]

    def test_inside_a_transaction_it_loses_what_was_not_committed(self, where: Where) -> None:
        store = where.store()
        with pytest.raises(LedgerUnavailableError, match="lost"), store.transaction() as view:
            view.append("note", {"n": 1})
            store.close()
        assert numbers(where.store()) == []


class TestLostConnections:
    def test_one_that_was_lost_while_idle_is_not_noticed(self, postgres: PostgresServer, where: Where) -> None:
        store = where.store()
        for number, use in enumerate([lambda: add(store, 7), store.records, store.head, store.header]):
            add(store, number)
            postgres.execute("SELECT pg_terminate_backend(%s, 300000)", session_of(store))
            use()
        assert numbers(store) == [0, 7, 1, 2, 3]

    def test_one_that_is_lost_inside_a_transaction_leaves_nothing(self, postgres: PostgresServer, where: Where) -> None:
        store = where.store()
        add(store, 1)
        with pytest.raises(LedgerUnavailableError, match="what was written stands"), store.transaction() as view:
            view.append("note", {"n": 2})
            postgres.execute("SELECT pg_terminate_backend(%s, 300000)", session_of(store))
        with pytest.raises(LedgerUnavailableError), store.transaction() as view:
            postgres.execute("SELECT pg_terminate_backend(%s, 300000)", session_of(store))
            view.records()
        add(store, 3)
        assert numbers(where.store()) == [1, 3]

    def test_a_server_that_falls_silent_is_not_waited_for_for_ever(self, where: Where) -> None:
        store = where.store()
        refused = pytest.raises(LedgerUnavailableError, match="SilentServer")
        # The server gives such a transaction no longer than its client waits: what it reads when it wakes is not done.
        with frozen(store), hasty(store, PATIENCE_OF_THE_HASTY), refused, store.transaction() as view:
            view.append("note", {"n": 1})
            fall_silent(store)
        add(store, 2)
        with frozen(store):
            fall_silent(store)
            add(store, 3)  # nothing was written there, so another session is asked
        assert numbers(store) == [2, 3]

    def test_a_server_that_crashes_and_comes_back_grants_nothing_meanwhile_and_forgets_nothing(
        self, postgres: PostgresServer, where: Where
    ) -> None:
        share = where.share(count=3)
        share.reserve("t").burn()
        postgres.stop(signal.SIGKILL)
        try:
            for ask in (lambda: share.reserve("t"), lambda: share.remaining("t"), lambda: where.share(count=3)):
                with pytest.raises(LedgerUnavailableError, match="expected a connection, found"):
                    ask()
        finally:
            postgres.start()
        share.reserve("t").burn()
        assert share.remaining("t") == 1
        assert where.kinds() == ["seal", "reserve", "reserve"]


class TestStandbys:
    """A server whose synchronous standby is away: a commit waits for it, and an administrator may end the wait."""

    def test_a_commit_whose_wait_was_cancelled_grants_nothing(self) -> None:
        with running(wal_level="replica", max_wal_senders="1") as server, contextlib.ExitStack() as ends:
            # The server says so in a warning alone, which a role may have switched off.
            conninfo = f"{server.conninfo()} options='-c client_min_messages=error'"
            store = ends.enter_context(PostgresStore.new(conninfo))
            Budget(epsilon=4.0, delta=1e-6, store=store)
            anchor = ends.enter_context(PostgresAnchor(conninfo))
            administrator = ends.enter_context(psycopg.connect(conninfo, autocommit=True))
            pool = ends.enter_context(ThreadPoolExecutor(1))
            administrator.execute("ALTER SYSTEM SET synchronous_standby_names = 'away'")
            administrator.execute("SELECT pg_reload_conf()")

            numbered, ends_here = itertools.count(1), threading.Event()

            def is_cancelled() -> bool:
                waiting = "SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
                found = administrator.execute(waiting).fetchall()
                for process in found:
                    ends_here.set()
                    administrator.execute("SELECT pg_cancel_backend(%s)", process)
                return bool(found)

            def write_and_flush() -> None:
                with store.transaction(flush=False) as view:
                    line = view.append("note", {"n": next(numbered)})
                store.flush(line.seq, line.hash)

            def write_on(write: Callable[[], object]) -> None:
                while not ends_here.is_set():  # a first one may be faster than the new setting
                    write()

            for write in (
                lambda: add(store, next(numbered)),
                write_and_flush,
                lambda: anchor.write("a", next(numbered), "b"),
            ):
                ends_here.clear()
                writing = pool.submit(write_on, write)
                await_that(is_cancelled)
                with pytest.raises(LedgerUnavailableError, match="UnconfirmedCommit"):
                    writing.result()
            assert len(numbers(store)) >= 2  # they stand here, and would be gone where the standby takes over
            hand = store._link._hands.here
            assert hand.connection is not None
            hand.connection.is_confirmed = False  # as Ctrl-C leaves it, which cancels a wait as well
            assert numbers(store)


class TestFork:
    def test_a_child_leaves_its_parents_connection_alone(self, where: Where) -> None:
        store = where.store()
        add(store, 1)
        ours = session_of(store)

        def work() -> None:
            add(store, 2)
            assert session_of(store) != ours
            store.close()

        assert in_child(work)
        add(store, 3)
        assert session_of(store) == ours
        assert numbers(store) == [1, 2, 3]

    def test_a_child_forked_while_another_thread_writes_is_not_stuck(self, where: Where) -> None:
        store = where.store()
        with ThreadPoolExecutor(1) as pool, store.transaction() as view:
            view.append("note", {"n": 1})
            assert pool.submit(in_child, lambda: numbers(store) == []).result(60)
        assert numbers(store) == [1]


CHANGED_LINE = {
    "ledger": "ledger = 'other'",
    "seq": "seq = seq + 100",
    "prev": "prev = '7' || prev",
    "kind": "kind = CASE kind WHEN 'reserve' THEN 'commit' ELSE 'note' END",
    "body": "body = replace(body, '1', '2')",
    "stamp": "stamp = '7' || stamp",
    "hash": "hash = '7' || hash",
}
CHANGED_ROW = {
    "name": "name = 'other'",
    "header": "header = replace(header, '4', '9')",
    "digest": "digest = '7' || digest",
    "seq": "seq = seq + 1",
    "head": "head = '7' || head",
}


LOST_FROM_ROW = {f"lost {column}": f"{column} = NULL" for column in ("header", "digest", "head")}
GUARDED = (
    "UPDATE {lines} SET body = '{{}}'",
    "DELETE FROM {lines}",
    "TRUNCATE {lines}",
    "TRUNCATE {ledgers} CASCADE",
    "DELETE FROM {ledgers}",
    "UPDATE {ledgers} SET seq = seq - 1",
    "UPDATE {ledgers} SET header = NULL",
    "UPDATE {ledgers} SET digest = 'x'",
    "UPDATE {ledgers} SET name = 'x'",
    "UPDATE {anchors} SET seq = 1",
    "UPDATE {anchors} SET head = 'x'",
    "DELETE FROM {anchors}",
    "TRUNCATE {anchors}",
)


@contextlib.contextmanager
def edited(postgres: PostgresServer, where: Where, statement: str) -> Iterator[None]:
    """Edits the tables of a ledger past the guards, and puts them back."""
    keep = "CREATE TEMP TABLE kept_{0} AS SELECT * FROM {{{0}}}"
    undo = "DELETE FROM {{{0}}}; INSERT INTO {{{0}}} SELECT * FROM kept_{0}"
    with postgres.owner() as owner:
        tables = SchemaTables(where.schema)
        owner.execute(tables.query("; ".join(keep.format(name) for name in ("ledgers", "lines"))))
        owner.execute(tables.query(statement))
        yield
        owner.execute(tables.query("; ".join(undo.format(name) for name in ("lines", "ledgers"))))


def is_refused(store: PostgresStore) -> bool:
    try:
        Budget.open(store)
    except LedgerError:
        return True
    return False


class TestEdits:
    """By somebody who owns the tables, past the guards."""

    @pytest.fixture
    def spent(self, where: Where) -> Where:
        share = where.share(count=5)
        for _ in range(3):
            share.reserve("t").burn()
        return where

    def test_an_edit_of_any_column_of_a_line_is_found(self, postgres: PostgresServer, spent: Where) -> None:
        with spent.store() as store:
            for line in (1, 2, 4):
                for column, change in CHANGED_LINE.items():
                    edit = f"UPDATE {{lines}} SET {change} WHERE seq = {line}"  # noqa: S608  the edit itself
                    with edited(postgres, spent, edit):
                        assert is_refused(store), (line, column)
            Budget.open(store)

    def test_an_edit_of_any_column_of_the_ledgers_row_is_found(self, postgres: PostgresServer, spent: Where) -> None:
        self.check_row(postgres, spent, CHANGED_ROW | LOST_FROM_ROW)

    def test_an_edit_of_an_empty_ledger_is_found(self, postgres: PostgresServer, where: Where) -> None:
        self.check_row(postgres, where, CHANGED_ROW | LOST_FROM_ROW)

    def check_row(self, postgres: PostgresServer, where: Where, changes: dict[str, str]) -> None:
        for column, change in changes.items():
            with edited(postgres, where, f"UPDATE {{ledgers}} SET {change}"), where.store() as store:  # noqa: S608
                assert is_refused(store), column
        Budget.open(where.store())

    def test_another_spelling_of_the_same_line_is_another_line(self, postgres: PostgresServer, spent: Where) -> None:
        with (
            edited(postgres, spent, "UPDATE {lines} SET body = replace(body, ':', ' : ')"),
            pytest.raises(LedgerError, match="does not follow"),
        ):
            spent.share(count=5)

    def test_lost_lines_are_found(self, postgres: PostgresServer, spent: Where) -> None:
        for loss in (
            "DELETE FROM {lines} WHERE seq = 1",
            "DELETE FROM {lines} WHERE seq = 3",
            "DELETE FROM {lines} WHERE seq = 4",
            "DELETE FROM {lines}",
            "TRUNCATE {lines}",
            "DELETE FROM {ledgers}",
        ):
            share = spent.share(count=5)
            with edited(postgres, spent, loss):
                with spent.store() as store:
                    assert is_refused(store), loss
                # A process that had read the lines goes by what it read.
                with pytest.raises((LedgerError, PrivacyBudgetExceededError)):
                    share.reserve("t", count=3)
        assert spent.share(count=5).remaining("t") == 2

    def test_lost_tables_are_found(self, postgres: PostgresServer, spent: Where) -> None:
        share = spent.share(count=5)
        postgres.execute("DROP TABLE {lines}", schema=spent.schema)
        assert is_refused(spent.store())
        with pytest.raises(LedgerError, match=r"UndefinedTable \(42P01\)"):
            share.reserve("t")

    def test_lines_lost_with_the_end_that_the_row_knows_are_found_by_who_saw_them(
        self, postgres: PostgresServer, spent: Where
    ) -> None:
        share = spent.share(count=5)
        back = "seq = 3, head = (SELECT hash FROM {lines} WHERE seq = 3)"
        postgres.execute("DELETE FROM {lines} WHERE seq = 4", schema=spent.schema)
        postgres.execute(f"UPDATE {{ledgers}} SET {back}", schema=spent.schema)  # noqa: S608  the edit itself
        with pytest.raises(LedgerRollbackError):
            share.reserve("t")
        assert spent.kinds() == ["seal", "reserve", "reserve"]  # all that anybody else can know without an anchor

    def test_another_ledger_in_its_place_is_found_by_who_saw_it(self, postgres: PostgresServer, spent: Where) -> None:
        share = spent.share(count=5)
        postgres.execute("DELETE FROM {lines}", schema=spent.schema)
        postgres.execute("DELETE FROM {ledgers}", schema=spent.schema)
        Budget(epsilon=4.0, delta=1e-6, store=PostgresStore.new(spent.conninfo, schema=spent.schema))
        with pytest.raises(LedgerRollbackError, match="another ledger took its place"):
            share.reserve("t")

    def test_the_guards_refuse_what_no_ledger_does(self, postgres: PostgresServer, spent: Where) -> None:
        PostgresAnchor(spent.conninfo, schema=spent.schema).write("a", 3, "head")
        for edit in GUARDED:
            with pytest.raises(psycopg.errors.IntegrityConstraintViolation, match=r"only grows|only moves forward"):
                postgres.execute(edit, schema=spent.schema, guarded=True)
        assert spent.share(count=5).remaining("t") == 2

    def test_a_store_that_is_refused_by_a_guard_says_so(self, where: Where, monkeypatch: pytest.MonkeyPatch) -> None:
        store = where.store()
        add(store, 1)
        monkeypatch.setattr(store, "_appended", store._tables.query("UPDATE {lines} SET kind = 'x' WHERE %s = %s"))
        monkeypatch.setattr(type(store), "_append", lambda self, turn, *_: turn.commit((self._appended, [1, 1])))
        with pytest.raises(LedgerError, match="IntegrityConstraintViolation") as caught:
            add(store, 2)
        assert not isinstance(caught.value, LedgerUnavailableError)


class TestFullDisk:
    def test_what_does_not_fit_was_never_there(self, postgres: PostgresServer, where: Where) -> None:
        postgres.stop()
        postgres.start(largest_file=1 << 21)  # its own log files are half as long
        try:
            store = where.store()
            add(store, 1)
            for _ in range(2):
                with pytest.raises(LedgerUnavailableError), store.transaction() as view:
                    view.append("note", {"n": 2, "noise": secrets.token_hex(1 << 22)})
            assert numbers(store) == [1]
            add(store, 3)
            assert numbers(where.store()) == [1, 3]
        finally:
            postgres.stop()
            postgres.start()


class TestAnchors:
    @pytest.fixture(params=["file", "postgres"])
    def anchor(self, request: pytest.FixtureRequest, postgres: PostgresServer, tmp_path: Path) -> LedgerAnchor:
        if request.param == "file":
            return FileAnchor.new(tmp_path / "anchor.json")
        return PostgresAnchor.new(postgres.conninfo(), schema=postgres.fresh("schema"))

    def ledger(self, postgres: PostgresServer, dump: Path | None = None) -> str:
        """Makes a database, empty or from a dump."""
        name = postgres.new_database()
        if dump is not None:
            postgres.run("psql", "-q", "-v", "ON_ERROR_STOP=1", "-f", str(dump), postgres.conninfo(name))
        return postgres.conninfo(name)

    def spend(self, store: PostgresStore, anchor: LedgerAnchor | None, count: int) -> None:
        budget = Budget.open(store, anchor=anchor)
        budget.declare("c", tickets=tickets(), epsilon=1.0).reserve("t", count=count).burn(count)

    def test_a_restored_dump_is_found_by_its_anchor_alone(self, postgres: PostgresServer, anchor: LedgerAnchor) -> None:
        conninfo = self.ledger(postgres)
        store = PostgresStore.new(conninfo)
        Budget(epsilon=4.0, delta=1e-6, store=store, anchor=anchor)
        self.spend(store, anchor, 4)
        dump = postgres.folder / "dump.sql"
        postgres.run("pg_dump", "-f", str(dump), conninfo)
        self.spend(PostgresStore(self.ledger(postgres, dump)), anchor, 1)  # an honest move: nothing was spent since
        self.spend(old := PostgresStore(self.ledger(postgres, dump)), None, 4)  # without an anchor nobody can know
        for place in (PostgresStore(self.ledger(postgres, dump)), old):
            with pytest.raises(LedgerRollbackError):
                Budget.open(place, anchor=anchor)
        Budget.open(store)
        with pytest.raises(LedgerRollbackError):
            Budget.open(store, anchor=anchor)

    def test_an_older_state_that_is_put_back_between_commit_and_anchor_is_found(
        self, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        schema = postgres.fresh("schema")
        store = PostgresStore.new(postgres.conninfo(), schema=schema)

        def saved() -> Callable[[], object]:
            seq, head = store.head()

            def back() -> None:
                postgres.execute("DELETE FROM {lines} WHERE seq > %s", seq, schema=schema)
                postgres.execute("UPDATE {ledgers} SET seq = %s, head = %s", seq, head, schema=schema)

            return back

        race(store, saved, lambda act: after_next_commit(monkeypatch, PostgresStore, act))

    def test_an_anchor_that_is_gone_stops_all_grants(self, postgres: PostgresServer, where: Where) -> None:
        conninfo = self.ledger(postgres)
        anchor = PostgresAnchor.new(conninfo)
        budget = Budget.open(where.store(), anchor=anchor, adopt_anchor=True)
        share = budget.declare("c", tickets=tickets(), epsilon=1.0)
        share.reserve("t").burn()
        name = conninfo.rsplit("=", 1)[1]
        postgres.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
        postgres.execute("SELECT pg_terminate_backend(pid, 30000) FROM pg_stat_activity WHERE datname = %s", name)
        with pytest.raises(LedgerUnavailableError):
            share.reserve("t")
        postgres.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")
        share.reserve("t").burn()


class TestPostgresAnchor(AnchorContract):
    @pytest.fixture(autouse=True)
    def _server(self, postgres: PostgresServer) -> None:
        self.server = postgres
        self.schema = postgres.fresh("schema")

    def make_anchor(self, tmp_path: Path) -> PostgresAnchor:
        return PostgresAnchor.new(self.server.conninfo(), schema=self.schema)

    def reopen(self, anchor: LedgerAnchor) -> PostgresAnchor:
        return PostgresAnchor(self.server.conninfo(), schema=self.schema)

    def test_it_names_its_server(self, anchor: PostgresAnchor) -> None:
        assert anchor.description == f"{anchor._link.place}, anchors in schema {self.schema}"
        assert repr(anchor) == f"PostgresAnchor({anchor.description})"

    def test_opening_makes_nothing(self, anchor: PostgresAnchor) -> None:
        missing = PostgresAnchor(self.server.conninfo(), schema=self.server.fresh("schema"))
        for ask in (lambda: missing.read("a"), lambda: missing.write("a", 1, "x")):
            with pytest.raises(LedgerError, match="found none"):
                ask()
        again = PostgresAnchor.new(self.server.conninfo(), schema=self.schema)
        anchor.write("a", 1, "x")
        assert again.read("a") == (1, "x")
