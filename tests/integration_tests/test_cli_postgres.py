"""`dpicl ledger` on a real PostgreSQL server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.budget.handler import PrivacyBudgetCallbackHandler
from langchain_dpicl.cli.main import main
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.stores import PostgresAnchor, open_store
from langchain_dpicl.stores import postgres as postgres_stores
from tests.ledger_files import spend
from tests.postgres import PostgresServer

SECRET = "hunter2-secret"


@pytest.fixture
def address(postgres: PostgresServer) -> str:
    """An empty database, by an address that holds a password."""
    return f"postgresql://owner:{SECRET}@/{postgres.new_database()}?host={postgres.folder}&port=5432"


@pytest.mark.loopback
def test_a_ledger_in_postgresql_is_created_shown_verified_and_exported(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    anchor, file, receipt = tmp_path / "anchor.json", tmp_path / "ledger.jsonl", tmp_path / "receipt.json"
    said: list[str] = []

    def run(*arguments: object) -> int:
        code = main(["ledger", *map(str, arguments)])
        said.append("".join(capsys.readouterr()))
        return code

    assert run("show", address) == 2  # nothing is made by looking
    assert run("verify", address) == 1
    assert run("create", address, "--epsilon", 4, "--delta", 1e-6, "--anchor", anchor) == 0
    assert run("create", address, "--epsilon", 4, "--delta", 1e-6) == 2
    with open_store(address) as store:
        taken = spend(Budget.open(store))[0]
        receipt.write_text(
            json.dumps({"ledger_id": taken.ledger_id, "entry": taken.entry, "entry_hash": taken.entry_hash})
        )
    assert run("verify", address, "--anchor", anchor, "--receipt", receipt) == 0
    assert "lines     8" in said[-1]
    assert run("show", address, "--json") == 0
    data = json.loads(said[-1])
    assert data["remaining"]["epsilon"] == 2.5
    assert [entry["entry"] for entry in data["dangling"]] == [3]
    assert run("export", address, "--out", file) == 0
    assert run("verify", file, "--anchor", anchor, "--receipt", receipt) == 0
    assert run("backup", address, tmp_path / "copy.db") == 2
    assert "pg_dump" in said[-1]
    assert run("show", address, "--name", "other") == 2
    assert not [text for text in said if SECRET in text]


@pytest.mark.loopback
def test_an_anchor_may_live_in_postgresql(address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, copy = tmp_path / "budget.db", tmp_path / "copy.db"
    assert main(["ledger", "verify", str(path), "--anchor", address]) == 1
    assert main(["ledger", "create", str(path), "--epsilon", "4", "--delta", "1e-6", "--anchor", address]) == 0
    assert main(["ledger", "backup", str(path), str(copy)]) == 0
    other = tmp_path / "other.db"
    assert main(["ledger", "create", str(other), "--epsilon", "4", "--delta", "1e-6"]) == 0
    assert main(["ledger", "verify", str(other), "--anchor", address]) == 1
    for _ in range(2):
        assert main(["ledger", "anchor", str(other), "--anchor", address]) == 0
    assert main(["ledger", "verify", str(other), "--anchor", address]) == 0
    with open_store(path) as store:
        spend(Budget.open(store, anchor=PostgresAnchor(address)))
    assert main(["ledger", "verify", str(path), "--anchor", address]) == 0
    assert main(["ledger", "show", str(path), "--anchor", address]) == 0
    capsys.readouterr()
    assert main(["ledger", "verify", str(copy), "--anchor", address]) == 1
    said = capsys.readouterr()
    assert "older copy" in said.err
    assert SECRET not in said.out + said.err


@pytest.mark.loopback
def test_an_anchor_in_the_database_of_the_ledger_is_refused_however_it_is_addressed(
    address: str, postgres: PostgresServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A copy of the database that is restored brings such an anchor back with it, and would verify."""
    role, door = postgres.fresh("role"), tmp_path / "door"
    postgres.execute(f"CREATE ROLE {role} LOGIN")
    postgres.execute(f"ALTER ROLE {role} SET datestyle = 'SQL, DMY'")
    door.symlink_to(postgres.folder)
    other_words = address.replace("owner:", f"{role}:").replace(str(postgres.folder), str(door))
    limits = ["--epsilon", "4", "--delta", "1e-6"]
    for anchor in (address, other_words):
        assert main(["ledger", "create", address, *limits, "--anchor", anchor]) == 2
        with pytest.raises(ConfigurationError, match="anchor: expected a file, or a database on another server"):
            PrivacyBudgetCallbackHandler.create(address, epsilon=4.0, delta=1e-6, anchor=anchor)
    assert main(["ledger", "create", address, *limits]) == 0  # nothing stood in its way
    for anchor in (address, other_words):
        for command in ("anchor", "show"):
            assert main(["ledger", command, address, "--anchor", anchor]) == 2
        assert main(["ledger", "verify", address, "--anchor", anchor]) == 1
        assert "the ledger's own database" in capsys.readouterr().err
        with pytest.raises(ConfigurationError, match="the ledger's own database"):
            PrivacyBudgetCallbackHandler.open(address, anchor=anchor, adopt_anchor=True)
        with pytest.raises(ConfigurationError, match="the ledger's own database"):
            PrivacyBudgetCallbackHandler(4.0, 1e-6, store=address, anchor=anchor)
        with open_store(address) as store, PostgresAnchor(anchor) as made:
            for where in (store, address):
                with pytest.raises(ConfigurationError, match="the ledger's own database"):
                    PrivacyBudgetCallbackHandler.open(where, anchor=made, adopt_anchor=True)
            with pytest.raises(ConfigurationError, match="the ledger's own database"):
                Budget.open(store, anchor=made, adopt_anchor=True)
            with pytest.raises(ConfigurationError, match="epsilon: expected"):  # before anything is asked
                Budget(epsilon=-1.0, delta=1e-6, store=store, anchor=made)
            with pytest.raises(ConfigurationError, match="store: expected a LedgerStore, found 'str'"):
                Budget(epsilon=4.0, delta=1e-6, store=address, anchor=made)  # type: ignore[arg-type]
    elsewhere = f"postgresql://owner@/{postgres.new_database()}?host={postgres.folder}&port=5432"
    assert main(["ledger", "anchor", address, "--anchor", elsewhere]) == 0
    PrivacyBudgetCallbackHandler.open(address, anchor=elsewhere).close()
    with open_store(address) as store:
        PrivacyBudgetCallbackHandler.open(store, anchor=PostgresAnchor(elsewhere)).close()


@pytest.mark.loopback
def test_whether_ledger_and_anchor_are_apart_takes_one_connection_at_a_time(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a pooler that has one connection to the server, a second one would wait for the first."""
    opened: list[Any] = []
    connect = postgres_stores._Connection.connect

    def counted(*args: Any) -> Any:
        assert all(one.closed for one in opened)
        opened.append(connect(*args))
        return opened[-1]

    PrivacyBudgetCallbackHandler.create(address, epsilon=1.0, delta=1e-6).close()
    store = open_store(address)
    store.head()
    monkeypatch.setattr(postgres_stores._Connection, "connect", counted)
    with pytest.raises(ConfigurationError, match="the ledger's own database"):
        PrivacyBudgetCallbackHandler.open(address, anchor=address)
    assert len(opened) == 2
    with store, pytest.raises(ConfigurationError, match="the ledger's own database"):
        PrivacyBudgetCallbackHandler.open(store, anchor=address)
    assert len(opened) == 3  # the store was asked on its own
