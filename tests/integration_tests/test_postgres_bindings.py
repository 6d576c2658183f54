"""Which ledger of a PostgreSQL database has a data set, and rooms for ledgers whose making stopped half-way."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.budget.handler import PrivacyBudgetCallbackHandler
from langchain_dpicl.cli.main import main
from langchain_dpicl.exceptions import LedgerError, LedgerUnavailableError, PrivacyBudgetMismatchError
from langchain_dpicl.privacy.private_examples import PrivateExamples
from langchain_dpicl.reports.ledger_audit import check_ledger
from langchain_dpicl.stores.postgres import PostgresMemo, PostgresStore
from tests.ledgers import private
from tests.postgres import PostgresServer


@pytest.fixture
def where(postgres: PostgresServer) -> dict[str, Any]:
    return {"conninfo": postgres.conninfo(), "schema": postgres.fresh("schema")}


@pytest.fixture
def address(postgres: PostgresServer) -> str:
    """An empty database."""
    return f"postgresql://owner@/{postgres.new_database()}?host={postgres.folder}&port=5432"


class TestBindings:
    def test_a_process_that_knows_no_bindings_is_refused_where_it_binds(self, where: dict[str, Any]) -> None:
        stores = [PostgresStore.new(**where, name=name) for name in ("first", "second")]
        budgets = [Budget(epsilon=1.0, delta=1e-6, store=store) for store in stores]
        budgets[1].bind(private("taken"))
        for unbound in ("taken", "free"):
            with pytest.raises(LedgerError, match="IntegrityConstraintViolation"), stores[0].transaction() as view:
                view.append("bind", private(unbound).declaration)
        assert [line.kind for line in stores[0].records()] == []
        budgets[0].bind(private("free"))

    @pytest.mark.parametrize("bound_first", ["d", "again"])
    def test_units_that_are_declared_again_have_one_ledger_under_both_names(
        self, where: dict[str, Any], bound_first: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def declared(name: str) -> PrivateExamples:
            first = private("d")
            return first if name == "d" else first.redeclared(dataset_id=name, public_size=7)

        stores = [PostgresStore.new(**where, name=name) for name in ("first", "second")]
        one, other = (Budget(epsilon=1.0, delta=1e-6, store=store) for store in stores)
        one.bind(declared(bound_first))
        monkeypatch.setattr("langchain_dpicl.privacy.ledger.budget._IDENTITIES", {})  # what another process knows
        for name in ("d", "again", "third"):
            with pytest.raises(PrivacyBudgetMismatchError, match="bound to another"):
                other.bind(declared(name))
        assert list(stores[1].records()) == []
        one.bind(declared("again"))
        assert [line.body["dataset_id"] for line in stores[0].records()] == ["d", "again"]
        for name in ("first", "second"):
            Budget.open(PostgresStore.open(**where, name=name)).verify()

    def test_the_guards_keep_them(self, postgres: PostgresServer, where: dict[str, Any]) -> None:
        PostgresStore.new(**where, name="other")
        Budget(epsilon=1.0, delta=1e-6, store=PostgresStore.new(**where)).bind(private("d"))
        for edit in ("DELETE FROM {bindings}", "UPDATE {bindings} SET ledger = 'other'", "TRUNCATE {bindings}"):
            with pytest.raises(psycopg.errors.IntegrityConstraintViolation, match="only grows"):
                postgres.execute(edit, schema=where["schema"], guarded=True)
        assert postgres.execute("SELECT * FROM {bindings}", schema=where["schema"]) == [("d", "budget")]

    def test_a_schema_that_was_renamed_goes_on(self, postgres: PostgresServer, where: dict[str, Any]) -> None:
        Budget(epsilon=1.0, delta=1e-6, store=PostgresStore.new(**where)).close()
        renamed = postgres.fresh("Schema")
        postgres.execute(f'ALTER SCHEMA {where["schema"]} RENAME TO "{renamed}"')
        Budget.open(PostgresStore.open(where["conninfo"], schema=renamed)).bind(private("d"))

    @pytest.mark.parametrize(
        "edit",
        [
            "DELETE FROM {bindings} WHERE dataset = 'd'",
            "UPDATE {bindings} SET ledger = 'second' WHERE dataset = 'd'",
            "INSERT INTO {bindings} VALUES ('none', 'second')",
            "ALTER TABLE {bindings} DROP CONSTRAINT dpicl_bindings_pkey; INSERT INTO {bindings} VALUES ('d', 'first')",
        ],
    )
    def test_a_check_holds_them_against_the_lines_of_all_ledgers(
        self, postgres: PostgresServer, where: dict[str, Any], edit: str
    ) -> None:
        for name, dataset_ids in (("first", ["d", "e"]), ("second", ["f"])):
            made = Budget(epsilon=1.0, delta=1e-6, store=PostgresStore.new(**where, name=name))
            for dataset_id in dataset_ids:
                made.bind(private(dataset_id))
        store = PostgresStore.open(**where, name="second")
        assert check_ledger(store).problems == ()
        postgres.execute(edit, schema=where["schema"])
        said = "expected for each data set the ledger that has it, found other bindings"
        assert [said in problem for problem in check_ledger(store).problems] == [True]
        with pytest.raises(LedgerError, match=said):
            Budget.open(store).verify()

    def test_who_may_not_read_them_cannot_check_them(self, postgres: PostgresServer, where: dict[str, Any]) -> None:
        Budget(epsilon=1.0, delta=1e-6, store=PostgresStore.new(**where)).bind(private("d"))
        role, schema = postgres.fresh("role"), where["schema"]
        postgres.execute(f"CREATE ROLE {role} LOGIN; GRANT USAGE ON SCHEMA {schema} TO {role}")
        postgres.execute(f"GRANT SELECT ON {{ledgers}}, {{lines}}, {{migrations}} TO {role}", schema=schema)
        auditor = PostgresStore.open(postgres.conninfo(user=role), schema=schema)
        with pytest.raises(LedgerUnavailableError, match=r"InsufficientPrivilege.*Give this role its rights"):
            auditor.check()
        postgres.execute(f"GRANT SELECT ON {{bindings}} TO {role}", schema=schema)
        auditor.check()


class TestOrderOfTexts:
    """The order of a database's texts changes with the library of its system, under indexes that were made before."""

    DATA_SETS = ("chat 2", "chat-1", "chat3", "mail 2026", "mail-2025", "mail2", "tickets-2024", "tickets1")

    @pytest.fixture
    def database(self, postgres: PostgresServer) -> str:
        name = postgres.fresh("ordered")
        try:
            postgres.execute(
                f"CREATE DATABASE {name} TEMPLATE template0 LOCALE_PROVIDER icu ICU_LOCALE 'und' LOCALE 'C'"
            )
        except psycopg.Error as error:
            pytest.skip(f"this server orders no database by ICU ({type(error).__name__})")
        return name

    def reorder(self, postgres: PostgresServer, database: str) -> None:
        """Spaces and hyphens come last among what is compared: for sessions from now on, not for what is indexed."""
        column = "datlocale" if postgres.execute("SHOW server_version_num")[0][0] >= "170000" else "daticulocale"
        changed = f"UPDATE pg_database SET {column} = 'und-u-ka-shifted' WHERE datname = %s"  # noqa: S608  our words
        order = "SELECT array_agg(name ORDER BY name) FROM unnest(%s::text[]) AS name"
        before = postgres.execute(order, list(self.DATA_SETS), database=database)
        postgres.execute(changed, database)
        assert postgres.execute(order, list(self.DATA_SETS), database=database) != before

    def bind_and_reorder(self, postgres: PostgresServer, database: str) -> dict[str, Any]:
        """Binds to a first ledger, makes a second one, and changes the order."""
        where = {"conninfo": postgres.conninfo(database)}
        for name, dataset_ids in (("first", self.DATA_SETS), ("second", ())):
            made = Budget(epsilon=1.0, delta=1e-6, store=PostgresStore.new(**where, name=name))
            for dataset_id in dataset_ids:
                made.bind(private(dataset_id))
            made.close()
        self.reorder(postgres, database)
        return where

    def bound_to_the_second(self, where: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """Returns which data sets of the first ledger another process binds to the second."""
        monkeypatch.setattr("langchain_dpicl.privacy.ledger.budget._IDENTITIES", {})
        second, bound = Budget.open(PostgresStore(**where, name="second")), []
        for dataset_id in self.DATA_SETS:
            try:
                second.bind(private(dataset_id))
                bound.append(dataset_id)
            except PrivacyBudgetMismatchError:
                pass
        second.close()
        return bound

    def test_a_data_set_keeps_its_one_ledger(
        self, postgres: PostgresServer, database: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        where = self.bind_and_reorder(postgres, database)
        assert self.bound_to_the_second(where, monkeypatch) == []
        assert check_ledger(PostgresStore.open(**where, name="first")).problems == ()

    def test_every_index_of_a_text_is_by_its_bytes(self, postgres: PostgresServer, database: str) -> None:
        PostgresStore.new(postgres.conninfo(database))
        PostgresMemo.new(postgres.conninfo(database))
        found = postgres.execute(
            "SELECT DISTINCT attrelid::regclass::text, attname FROM pg_attribute JOIN pg_index ON attrelid = indexrelid "
            "JOIN pg_collation ON attcollation = pg_collation.oid WHERE attrelid::regclass::text LIKE 'dpicl.%' "
            "AND collname <> 'C'",
            database=database,
        )
        assert found == []


class TestHalfMadeRooms:
    """A process that stops between `new` and the limits leaves room for a ledger, which `create` finishes."""

    @pytest.mark.loopback
    def test_the_command_finishes_one(self, address: str, capsys: pytest.CaptureFixture[str]) -> None:
        PostgresStore.new(address).close()
        assert main(["ledger", "show", address]) == 2
        assert "expected a ledger, found none" in capsys.readouterr().err
        command = ["ledger", "create", address, "--epsilon", "4", "--delta", "1e-6"]
        assert main(command) == 0
        assert main(command) == 2
        capsys.readouterr()
        assert main(["ledger", "verify", address]) == 0

    def test_the_handler_finishes_one_and_opening_does_not(self, address: str) -> None:
        PostgresStore.new(address, name="team").close()
        with pytest.raises(LedgerError, match="creation was interrupted"):
            PrivacyBudgetCallbackHandler.open(address, name="team")
        with pytest.raises(LedgerError, match="creation was interrupted"):
            PrivacyBudgetCallbackHandler(epsilon=4.0, delta=1e-6, store=address, name="team")
        made = PrivacyBudgetCallbackHandler.create(address, epsilon=4.0, delta=1e-6, name="team")
        again = PrivacyBudgetCallbackHandler.open(address, name="team")
        assert again.budget.ledger_id == made.budget.ledger_id
        with pytest.raises(LedgerError, match="found one"):
            PrivacyBudgetCallbackHandler.create(address, epsilon=8.0, delta=1e-6, name="team")

    def test_limits_that_were_lost_are_not_written_again(self, postgres: PostgresServer, where: dict[str, Any]) -> None:
        made = Budget(epsilon=1.0, delta=1e-6, store=PostgresStore.new(**where))
        made.bind(private("d"))
        lost = "UPDATE {ledgers} SET header = NULL, digest = NULL, seq = 0, head = NULL"
        postgres.execute(lost, schema=where["schema"])
        store = PostgresStore(**where)
        store.may_create = True
        with pytest.raises(LedgerError, match="lines are gone or were changed"):
            Budget(epsilon=9.0, delta=1e-6, store=store)
