"""Ledgers on a real PostgreSQL server: the contract of stores, how they are made and opened, what is kept secret."""

from __future__ import annotations

import copy
import os
import pickle
import socket
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest

from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.exceptions import (
    ConfigurationError,
    DPICLError,
    LedgerError,
    LedgerUnavailableError,
    PrivateAccessError,
)
from langchain_dpicl.privacy.ledger.store import LedgerStore
from langchain_dpicl.stores import new_store, open_store
from langchain_dpicl.stores import postgres as postgres_connection
from langchain_dpicl.stores import postgres as postgres_ledger
from langchain_dpicl.stores.postgres import PostgresAnchor, PostgresConnection, PostgresMemo, PostgresStore
from tests.contracts.store import DurableStoreContract, header
from tests.ledgers import private, share_of, use_simple_prices
from tests.postgres import PostgresServer, await_that, give_up, programs

PASSWORD = "hunter2-Zq9"
NASTY = "\N{SNOWMAN} \\ ' \" %s %(x)s {lines} $1 \0 \n '; DROP TABLE x; -- \\"


def lines_in(store: LedgerStore) -> list[tuple[str, Any]]:
    return [(line.kind, line.body) for line in store.records()]


class TestContract(DurableStoreContract):
    @pytest.fixture(autouse=True)
    def _server(self, postgres: PostgresServer) -> None:
        self.server = postgres
        # Of its own: tests bind data sets without the lines that a check of the whole schema asks for.
        self.where = {"conninfo": postgres.conninfo(), "schema": postgres.fresh("schema")}

    def make_store(self, tmp_path: Path) -> PostgresStore:
        return PostgresStore.new(**self.where, name=self.server.fresh("ledger"))

    def hurry(self, store: LedgerStore) -> None:
        assert isinstance(store, PostgresStore)
        store._link.timeout = 1.0  # of this process alone: its parent's transaction may be idle for two minutes

    def reopen(self, store: LedgerStore) -> PostgresStore:
        return PostgresStore(**self.where, name=name_of(store))

    def beside(self, store: LedgerStore, name: str) -> PostgresStore:
        return PostgresStore.new(**self.where, name=f"{name} beside {name_of(store)}")

    def opened(self, store: LedgerStore, name: str) -> PostgresStore:
        return PostgresStore(**self.where, name=f"{name} beside {name_of(store)}")

    def opening(self, store: LedgerStore) -> str:
        made = f"PostgresStore(**{self.where!r}, name={name_of(store)!r})"
        return f"from langchain_dpicl.stores import PostgresStore\nstore = {made}"


def name_of(store: LedgerStore) -> str:
    assert isinstance(store, PostgresStore)
    return store._name


class TestServer:
    def test_a_server_is_there_on_ci(self) -> None:
        if os.environ.get("CI"):
            assert programs(), "apt-get install postgresql: on CI the tests of PostgreSQL have to run"
        with pytest.raises(pytest.skip.Exception, match="no server"):
            give_up("no server", {})
        with pytest.raises(pytest.fail.Exception, match="no server"):
            give_up("no server", {"CI": "true"})

    def test_it_keeps_what_it_wrote(self, postgres: PostgresServer) -> None:
        assert postgres.execute("SHOW fsync") == [("on",)]


class TestMaking:
    @pytest.fixture
    def where(self, postgres: PostgresServer) -> dict[str, Any]:
        return {"conninfo": postgres.conninfo(), "schema": postgres.fresh("schema")}

    def test_opening_makes_nothing(self, postgres: PostgresServer, where: dict[str, Any]) -> None:
        store = PostgresStore(**where)
        for ask in (
            store.header,
            store.records,
            store.head,
            lambda: store.create(header()),
            lambda: PostgresStore.open(**where),
        ):
            with pytest.raises(LedgerError, match=r"tables of version 6, found none\. .*dpicl ledger create\)\.$"):
                ask()
        with pytest.raises(LedgerError, match="found none"), store.transaction():
            pass
        assert postgres.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", where["schema"]) == []

    def test_setup_makes_tables_and_no_ledger(self, where: dict[str, Any]) -> None:
        with PostgresStore(**where) as store:
            store.setup()
            store.setup()
            advice = r"found none\. Check the name; .*dpicl ledger create\)\.$"
            with pytest.raises(LedgerError, match=f"expected a ledger of that name, {advice}"):
                store.header()
        assert PostgresStore.new(**where).header() is None

    def test_who_only_opened_it_writes_no_limits(self, where: dict[str, Any]) -> None:
        PostgresStore.new(**where).close()
        for door in (PostgresStore, PostgresStore.open):
            with door(**where) as store:
                with pytest.raises(LedgerError, match="found an empty entry; opening sets no limits"):
                    Budget(epsilon=1.0, delta=1e-6, store=store)
                assert store.header() is None
        with PostgresStore(**where) as store:
            store.may_create = True  # on purpose, to finish what a stopped process began
            ledger_id = Budget(epsilon=1.0, delta=1e-6, store=store).ledger_id
        with PostgresStore(**where) as store:
            assert Budget(epsilon=1.0, delta=1e-6, store=store).ledger_id == ledger_id

    def test_many_may_set_up_at_once(self, where: dict[str, Any]) -> None:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda _: PostgresStore(**where).setup(), range(8)))
        assert PostgresStore.new(**where).header() is None

    def test_one_of_many_makes_a_ledger_and_the_others_are_told(self, where: dict[str, Any]) -> None:
        def make(_: int) -> str:
            try:
                return type(PostgresStore.new(**where)).__name__
            except LedgerError as error:
                return str(error).split(": ")[1]

        refusal = "expected no ledger of that name, found one. Open it instead."
        with ThreadPoolExecutor(8) as pool:
            assert sorted(pool.map(make, range(8))) == ["PostgresStore"] + [refusal] * 7

    def test_a_text_opens_and_makes_ledgers_too(self, postgres: PostgresServer) -> None:
        name = postgres.new_database()
        text = f"postgresql://owner:{PASSWORD}@/{name}?host={postgres.folder}&port=5432"
        with pytest.raises(LedgerError, match="found none"):
            open_store(text)
        Budget(epsilon=2.0, delta=1e-6, store=new_store(text, name="marketing"))
        assert Budget.open(open_store(text, name="marketing")).epsilon == 2.0
        with pytest.raises(LedgerError, match="ledger 'budget'"):
            open_store(text)

    def test_several_ledgers_in_one_database_do_not_see_each_other(
        self, where: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        use_simple_prices(monkeypatch)
        stores = {name: PostgresStore.new(**where, name=name) for name in ("a", "b; DROP TABLE x", "é")}
        budgets = {name: Budget(epsilon=4.0, delta=1e-6, store=store) for name, store in stores.items()}
        for count, (name, budget) in enumerate(budgets.items(), start=1):
            budget.bind(private(f"data of {name}"))
            for _ in range(count):
                share_of(budget).reserve("t").burn()
        for count, name in enumerate(budgets, start=1):
            kinds = [kind for kind, _ in lines_in(PostgresStore.open(**where, name=name))]
            assert kinds == ["bind", "seal"] + ["reserve"] * count
            budgets[name].verify()
        assert len({budget.ledger_id for budget in budgets.values()}) == 3

    def test_several_data_sets_share_a_ledger(self, where: dict[str, Any]) -> None:
        store = PostgresStore.new(**where)
        budget = Budget(epsilon=4.0, delta=1e-6, store=store)
        for name in ("letters", "calls"):
            budget.bind(private(name))
        budget.bind(private_again := private("notes"))
        budget.bind(private_again)
        assert [body["dataset_id"] for _, body in lines_in(PostgresStore.open(**where))] == [
            "letters",
            "calls",
            "notes",
        ]

    @pytest.mark.parametrize(
        ("version", "advice"),
        [
            (99, "Use a newer langchain-dpicl"),
            (5, r"A development version made them\. Export the ledger with that version"),
        ],
    )
    def test_another_version_is_refused(
        self, postgres: PostgresServer, where: dict[str, Any], version: int, advice: str
    ) -> None:
        PostgresStore.new(**where).create(header())
        postgres.execute("UPDATE {migrations} SET v = %s", version, schema=where["schema"])
        store, anchor = PostgresStore(**where), PostgresAnchor(**where)
        doors = [store.header, store.setup, lambda: PostgresStore.open(**where), lambda: PostgresStore.new(**where)]
        for ask in (*doors, lambda: anchor.read("one"), anchor.setup, lambda: PostgresAnchor.new(**where)):
            with pytest.raises(LedgerError, match=rf"tables of version 6, found version {version}\. {advice}"):
                ask()

    def test_setup_waits_for_no_live_writer(self, where: dict[str, Any]) -> None:
        store = PostgresStore.new(**where)
        store.create(header())
        with store.transaction() as view:
            line = view.append("note", {})
            PostgresStore(**where, timeout=1.0).setup()
            PostgresMemo.new(**where, timeout=1.0).close()
        assert list(store.records()) == [line]

    def test_a_setup_that_was_stopped_leaves_nothing_in_the_way_of_another(
        self, postgres: PostgresServer, where: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as stopped:
            stopped.setattr(
                postgres_ledger, "_GUARDS", postgres_ledger._GUARDS + "SELECT pg_terminate_backend(pg_backend_pid());"
            )
            with pytest.raises(LedgerUnavailableError):
                PostgresStore(**where).setup()
        assert postgres.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", where["schema"]) == []
        PostgresStore(**where).setup()
        Budget(epsilon=1.0, delta=1e-6, store=PostgresStore.new(**where)).bind(private("d"))

    @pytest.mark.parametrize("kept", [["migrations"], ["migrations", "anchors", "ledgers", "bindings"]])
    def test_a_setup_over_part_of_the_tables_is_refused(
        self, postgres: PostgresServer, where: dict[str, Any], kept: list[str]
    ) -> None:
        PostgresStore(**where).setup()
        lost = [name for name in ("lines", "bindings", "anchors", "ledgers") if name not in kept]
        for name in lost:
            postgres.execute(f"DROP TABLE {{{name}}}", schema=where["schema"])
        said = rf"expected all tables of ledgers, found no {', '.join(f'dpicl_{name}' for name in sorted(lost))}\. "
        for kind in (PostgresStore, PostgresAnchor):
            with pytest.raises(LedgerError, match=said):
                kind(**where).setup()

    def test_tables_of_others_are_refused(self, postgres: PostgresServer, where: dict[str, Any]) -> None:
        store = PostgresStore.new(**where)
        store.create(header())
        postgres.execute("ALTER TABLE {lines} RENAME COLUMN stamp TO moment", schema=where["schema"])
        with pytest.raises(LedgerError, match=r"found UndefinedColumn \(42703\)") as caught:
            store.records()
        assert not isinstance(caught.value, LedgerUnavailableError)

    def test_a_server_that_may_forget_is_refused(self, postgres: PostgresServer, where: dict[str, Any]) -> None:
        store = PostgresStore.new(**where)
        postgres.execute("ALTER SYSTEM SET fsync = off")
        try:
            reload(postgres, "off")
            with pytest.raises(LedgerError, match="expected fsync on and encoding UTF8, found off and UTF8"):
                PostgresStore(**where).header()
            store.header()
        finally:
            postgres.execute("ALTER SYSTEM RESET fsync")
            reload(postgres, "on")

    def test_a_database_that_cannot_hold_every_text_is_refused(self, postgres: PostgresServer) -> None:
        name = postgres.fresh("latin")
        postgres.execute(f"CREATE DATABASE {name} ENCODING LATIN1 LOCALE 'C' TEMPLATE template0")
        with pytest.raises(LedgerError, match="found on and LATIN1"):
            PostgresStore.new(postgres.conninfo(name))

    def test_it_is_closed_at_the_end_of_a_block(self, where: dict[str, Any]) -> None:
        PostgresStore.new(**where)
        with PostgresStore(**where) as store:
            assert store.header() is None
        with pytest.raises(LedgerError, match="found one that was closed"):
            store.header()

    def test_an_anchor_is_not_copied_either(self) -> None:
        anchor = PostgresAnchor("host=nowhere.invalid")
        assert copy.copy(anchor) is copy.deepcopy(anchor) is anchor
        with pytest.raises(PrivateAccessError, match="pickle"):
            pickle.dumps(anchor)

    def test_what_is_dropped_gives_its_connection_back(self, postgres: PostgresServer, where: dict[str, Any]) -> None:
        store = PostgresStore.new(**where)
        store.header()
        pid = store._link._hands.here.connection.info.backend_pid
        del store
        await_that(lambda: not postgres.execute("SELECT 1 FROM pg_stat_activity WHERE pid = %s", pid))

    @pytest.mark.parametrize("schema", ["100%", "%s", "pg_budget"])
    @pytest.mark.parametrize("kind", [PostgresStore, PostgresAnchor])
    def test_a_schema_that_no_statement_can_name_is_refused(self, kind: Any, schema: str) -> None:
        with pytest.raises(ConfigurationError, match=r"schema: expected a name without % that does not begin with pg_"):
            kind("dbname=app", schema=schema)

    @pytest.mark.parametrize(
        "options", [{"timeout": 0}, {"timeout": float("nan")}, {"timeout": 1e6 + 1}, {"name": ""}, {"schema": "a\nb"}]
    )
    def test_arguments_out_of_range_are_refused(self, options: dict[str, Any]) -> None:
        with pytest.raises(ConfigurationError):
            PostgresStore("host=localhost", **options)

    def test_the_longest_wait_is_one_that_the_server_counts(self, where: dict[str, Any]) -> None:
        PostgresStore.new(**where, timeout=1e6).create(header())
        assert PostgresStore.open(**where, timeout=1e6).header() == header()


class TestRoles:
    @pytest.fixture
    def schema(self, postgres: PostgresServer) -> str:
        schema = postgres.fresh("schema")
        PostgresStore.new(postgres.conninfo(), schema=schema).create(header())
        return schema

    def role(self, postgres: PostgresServer, schema: str, *grants: str, **settings: str) -> str:
        role = postgres.fresh("role")
        postgres.execute(f"CREATE ROLE {role} LOGIN; GRANT USAGE ON SCHEMA {schema} TO {role}")
        for grant in grants:
            rights, table = grant.rsplit(" ", 1)
            postgres.execute(f"GRANT {rights} ON {schema}.dpicl_{table} TO {role}")
        for key, value in settings.items():
            postgres.execute(f"ALTER ROLE {role} SET {key} = '{value}'")
        return postgres.conninfo(user=role)

    NEEDED = ("SELECT, INSERT, UPDATE ledgers", "SELECT, INSERT lines", "SELECT, INSERT bindings", "SELECT migrations")

    def test_the_rights_in_the_docs_are_enough(self, postgres: PostgresServer, schema: str) -> None:
        conninfo = self.role(postgres, schema, *self.NEEDED)
        store = PostgresStore.new(conninfo, schema=schema, name="second")
        store.create(header())
        with store.transaction() as view:
            view.bind("d")  # type: ignore[attr-defined]
            view.append("note", {})
        assert len(PostgresStore.open(conninfo, schema=schema, name="second").records()) == 1

    @pytest.mark.parametrize("missing", range(3))
    def test_without_one_of_them_nothing_is_granted(self, postgres: PostgresServer, schema: str, missing: int) -> None:
        rights = [
            ["SELECT, INSERT ledgers", *self.NEEDED[1:]],
            [self.NEEDED[0], "SELECT lines", self.NEEDED[2]],
            [*self.NEEDED[:2]],
        ][missing]
        store = PostgresStore(self.role(postgres, schema, *rights), schema=schema)
        said = r"InsufficientPrivilege .*\. Give this role its rights \(docs/production\.md"
        with pytest.raises(LedgerUnavailableError, match=said), store.transaction() as view:
            view.append("note", {})
        assert not PostgresStore(postgres.conninfo(), schema=schema).records()

    @pytest.mark.parametrize("missing", [None, "SELECT", "INSERT", "UPDATE"])
    def test_an_anchor_needs_the_rights_in_the_docs(self, postgres: PostgresServer, missing: str | None) -> None:
        schema, owner = postgres.fresh("schema"), postgres.conninfo()
        with pytest.raises(LedgerError, match=r"found none\. Run setup\(\) once, as the tables' owner"):
            PostgresAnchor(owner, schema=schema).read("one")
        PostgresAnchor.new(owner, schema=schema).write("one", 1, "first")
        rights = ", ".join({"SELECT", "INSERT", "UPDATE"} - {missing})
        role = self.role(postgres, schema, f"{rights} anchors", "SELECT migrations")
        anchor = PostgresAnchor(role, schema=schema)
        if missing is None:
            anchor.write("one", 2, "second")
            anchor.write("two", 1, "first")
            assert (anchor.read("one"), anchor.read("two")) == ((2, "second"), (1, "first"))
            return
        with pytest.raises(LedgerUnavailableError, match=r"InsufficientPrivilege.*Give this role its rights"):
            anchor.write("one", 2, "second")

    def test_who_may_make_no_tables_is_told(self, postgres: PostgresServer, schema: str) -> None:
        conninfo = self.role(postgres, schema)
        with pytest.raises(
            LedgerUnavailableError, match=r"expected to make tables, found Insuff.*Give this role its rights"
        ):
            PostgresStore(conninfo, schema=postgres.fresh("schema")).setup()

    def test_defaults_of_a_role_change_nothing(self, postgres: PostgresServer, schema: str) -> None:
        careless = {
            "default_transaction_isolation": "serializable",
            "default_transaction_read_only": "on",
            "synchronous_commit": "off",
            "lock_timeout": "0",
            "search_path": "pg_temp",
            "DateStyle": "German",
            "client_encoding": "LATIN1",
            "standard_conforming_strings": "off",
        }
        conninfo = self.role(postgres, schema, *self.NEEDED, **careless)
        store = PostgresStore(conninfo, schema=schema, timeout=70)
        with store.transaction() as view:
            line = view.append("note", {"text": NASTY, NASTY: [NASTY]})
            hand = store._link._hands.here
            assert hand.connection is not None
            for name, expected in {
                "synchronous_commit": "on",
                "transaction_isolation": "read committed",
                "lock_timeout": "70s",
                "statement_timeout": "87500ms",
                "idle_in_transaction_session_timeout": "140s",
            }.items():
                assert hand.connection.execute(f"SHOW {name}").fetchall() == [(expected,)], name
        assert list(PostgresStore(postgres.conninfo(), schema=schema).records()) == [line]

    @pytest.mark.parametrize("setting", ["statement_timeout = '100ms'", "default_transaction_read_only = 'on'"])
    @pytest.mark.parametrize("kind", [PostgresStore, PostgresAnchor, PostgresMemo])
    def test_tables_are_made_whatever_a_role_defaults_to(
        self, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch, kind: Any, setting: str
    ) -> None:
        slow = "SELECT pg_sleep(0.3);"
        monkeypatch.setattr(postgres_ledger, "_GUARDS", postgres_ledger._GUARDS + slow)
        monkeypatch.setattr(postgres_ledger, "_MEMO_TABLES", postgres_ledger._MEMO_TABLES + slow)
        role, database = postgres.fresh("role"), postgres.new_database()
        postgres.execute(f"CREATE ROLE {role} LOGIN; ALTER ROLE {role} SET {setting}")
        postgres.execute(f"ALTER DATABASE {database} OWNER TO {role}")
        kind(postgres.conninfo(database, user=role)).setup()

    def test_making_tables_may_take_longer_than_an_answer(
        self, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(postgres_ledger, "_GUARDS", postgres_ledger._GUARDS + "SELECT pg_sleep(3);")
        PostgresStore(postgres.conninfo(), schema=postgres.fresh("schema"), timeout=1.0).setup()

    def test_a_stricter_promise_of_standbys_stays(self, postgres: PostgresServer, schema: str) -> None:
        conninfo = self.role(postgres, schema, *self.NEEDED, synchronous_commit="remote_apply")
        store = PostgresStore(conninfo, schema=schema)
        with store.transaction():
            hand = store._link._hands.here
            assert hand.connection is not None
            assert hand.connection.execute("SHOW synchronous_commit").fetchall() == [("remote_apply",)]

    def test_a_password_that_does_not_fit_is_not_to_be_tried_again(self, postgres: PostgresServer) -> None:
        role = postgres.fresh("role")
        postgres.execute(f"CREATE ROLE {role} LOGIN PASSWORD '{PASSWORD}'")
        rules = postgres.folder / "data" / "pg_hba.conf"
        rules.write_text(f"local all {role} scram-sha-256\n{rules.read_text()}")
        postgres.execute("SELECT pg_reload_conf()")

        def advice(**given: str) -> str:
            address = " ".join([postgres.conninfo(user=role), *(f"{key}={value}" for key, value in given.items())])
            with pytest.raises(LedgerError) as caught:
                PostgresStore.open(address, schema=postgres.fresh("schema"))
            return str(caught.value)

        await_that(
            lambda: advice().endswith("(no password supplied). Nothing is granted. Check PGPASSWORD or ~/.pgpass.")
        )
        assert advice(password=PASSWORD[1:]).endswith(
            "authentication failed). Nothing is granted. Check PGPASSWORD or ~/.pgpass."
        )
        assert "found none. Check the address" in advice(password=PASSWORD)

    @pytest.mark.parametrize(
        "error",
        [
            psycopg.NotSupportedError("cannot set transaction read-write mode during recovery"),
            psycopg.OperationalError("connection failed: session is read-only"),
            psycopg.OperationalError("connection failed: server is in hot standby mode"),
            psycopg.errors.ReadOnlySqlTransaction("cannot execute nextval() in a read-only transaction"),
        ],
    )
    def test_a_standby_is_no_broken_ledger(self, error: Exception) -> None:
        link = PostgresConnection(lambda: "host=nowhere.invalid", timeout=1.0, check=lambda *_: None)
        fault = link.fault("a connection", error)
        assert isinstance(fault, LedgerUnavailableError)
        assert str(fault).endswith("give the primary's address, or wait until it is promoted.")


class TestSecrets:
    CONNINFOS = (
        f"postgresql://someone:{PASSWORD}@127.0.0.1:1/db",
        f"postgresql://someone:p@{PASSWORD}@nowhere.invalid:1/db",
        f"postgresql://someone:12/{PASSWORD}@127.0.0.1/db",
        f"postgresql://127.0.0.1:{PASSWORD}/db",
        f"host=127.0.0.1 port=1 password={PASSWORD} dbname=db",
        f"host=127.0.0.1 port=1 password=a {PASSWORD}",
        f"host=127.0.0.1 port=1 dbname=postgresql://someone:{PASSWORD}@127.0.0.1:1/db",
        f"host=127.0.0.1 port={PASSWORD}",
        f"host=127.0.0.1 port=1 password={PASSWORD} sslmode=nonsense",
        f"postgresql://someone@127.0.0.1:1/db?password={PASSWORD}&nonsense={PASSWORD}",
    )

    @pytest.mark.parametrize("fault", [socket.gaierror, UnicodeError])
    @pytest.mark.parametrize("number", range(len(CONNINFOS)))
    def test_no_password_is_shown(self, number: int, fault: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
        def no_such_name(*names: Any, **_: Any) -> None:
            raise fault(*names[:1])

        monkeypatch.setattr(socket, "getaddrinfo", no_such_name)
        doors = (
            PostgresStore,
            PostgresStore.open,
            PostgresStore.new,
            PostgresAnchor,
            PostgresAnchor.new,
        )
        for door in doors:
            error = self.failure(door, number)
            assert PASSWORD not in "".join(traceback.format_exception(error))
            assert error.__cause__ is None
            assert error.__context__ is None
            for frame, _ in traceback.walk_tb(error.__traceback__):
                if "langchain_dpicl" in frame.f_code.co_filename:
                    assert PASSWORD not in repr(frame.f_locals), frame.f_code

    def failure(self, door: Any, number: int) -> DPICLError:
        try:
            place = door(self.CONNINFOS[number], timeout=2.0)
            assert PASSWORD not in f"{place!r} {place.description} {vars(place)} {vars(place._link)}"
            place._read([(b"SELECT 1", [])])
        except DPICLError as error:
            return error
        raise AssertionError("expected a failure")

    def test_what_is_no_text_is_not_shown_either(self) -> None:
        with pytest.raises(ConfigurationError, match="found bytes") as caught:
            PostgresStore(PASSWORD.encode())  # type: ignore[arg-type]
        assert PASSWORD not in str(caught.value)

    def test_the_description_names_server_database_ledger_and_schema(self) -> None:
        store = PostgresStore(f"postgresql://u:{PASSWORD}@db.example:6543/app", name="b", schema="s")
        assert store.description == "PostgreSQL database app at db.example:6543, ledger 'b' in schema s"
        assert repr(store) == f"PostgresStore({store.description})"
        assert PostgresStore("").description.startswith("PostgreSQL database by default at its default host")

    def test_users_have_the_last_word_on_how_to_connect(self) -> None:
        text = postgres_connection._complete_conninfo(
            lambda: "host=h connect_timeout=9 target_session_attrs=any", {"connect_timeout": 60}
        )
        assert psycopg.conninfo.conninfo_to_dict(text()) == {
            "host": "h",
            "connect_timeout": "9",
            "target_session_attrs": "any",
            "client_encoding": "utf8",
        }


def reload(postgres: PostgresServer, fsync: str) -> None:
    postgres.execute("SELECT pg_reload_conf()")
    await_that(lambda: postgres.execute("SHOW fsync") == [(fsync,)])
