"""Which ledger of a PostgreSQL database has a data set, and rooms for ledgers whose making stopped half-way."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.budget.handler import PrivacyBudgetCallbackHandler
from langchain_dpicl.cli.main import main
from langchain_dpicl.exceptions import LedgerError, PrivacyBudgetMismatchError
from langchain_dpicl.privacy.private_examples import PrivateExamples
from langchain_dpicl.stores import postgres as postgres_ledger
from langchain_dpicl.stores.postgres import PostgresStore
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
    def test_what_older_lines_bind_is_bound_by_setup(
        self, postgres: PostgresServer, where: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as then:
            then.setattr(postgres_ledger, "MIGRATIONS", postgres_ledger.MIGRATIONS[:3])
            for name, dataset_ids in (("first", ["d", "e"]), ("second", ["d", "f"])):
                made = PostgresStore.new(**where, name=name)
                Budget(epsilon=1.0, delta=1e-6, store=made)
                with made.transaction() as view:
                    for dataset_id in dataset_ids:
                        view.append("bind", private(dataset_id).declaration)
        PostgresStore(**where).setup()
        found = postgres.execute("SELECT dataset, ledger FROM {bindings} ORDER BY dataset", schema=where["schema"])
        assert found == [("d", "first"), ("e", "first"), ("f", "second")]
        first, second = (Budget.open(PostgresStore.open(**where, name=name)) for name in ("first", "second"))
        first.bind(private("d"))
        for budget, taken in ((second, "d"), (first, "f")):
            with pytest.raises(PrivacyBudgetMismatchError, match="bound to another"):
                budget.bind(private(taken))

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
