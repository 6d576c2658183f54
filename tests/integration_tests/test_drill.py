"""deploy/drill.py on a real PostgreSQL server: what it finds, what it leaves, and what it says of a ledger that fails."""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import psycopg
import pytest

from langchain_dpicl import PrivacyBudgetCallbackHandler
from langchain_dpicl.reports import ledger_audit
from tests.postgres import PostgresServer, give_up

pytestmark = pytest.mark.loopback
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def drill() -> ModuleType:
    spec = importlib.util.spec_from_file_location("deploy_drill", REPOSITORY / "deploy" / "drill.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def address(postgres: PostgresServer) -> str:
    if shutil.which("pg_restore", path=str(postgres.programs)) is None:
        give_up("PostgreSQL's own pg_restore is not installed")
    return f"postgresql://owner@/postgres?host={postgres.folder}&port=5432"


def run(drill: ModuleType, address: str, postgres: PostgresServer) -> int:
    code: int = drill.main([address, "--programs", str(postgres.programs)])
    return code


def databases(postgres: PostgresServer) -> list[Any]:
    return [name for (name,) in postgres.execute("SELECT datname FROM pg_database") if name.startswith("dpicl_drill")]


def test_the_drill_succeeds_and_leaves_nothing(
    drill: ModuleType, address: str, postgres: PostgresServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(drill, address, postgres) == 0
    said = capsys.readouterr().out
    for words in (
        r"done +make a ledger",
        r"as it has to +the ledger, its anchor and every receipt agree",
        r"as it has to +nothing is wrong with the copy itself",
        r"as it has to +the anchor refuses it",
        r"as it has to +no service opens it",
        r"as it has to +the receipts of Tuesday refuse it too",
        r"as it has to +a backup that misses nothing opens",
        r"the drill succeeded",
    ):
        assert re.search(words, said), words
    assert "NOT SO" not in said
    assert databases(postgres) == []


def an_anchor_that_forgets(patch: pytest.MonkeyPatch, _: ModuleType) -> None:
    patch.setattr(ledger_audit, "anchor_problems", lambda *_: iter(()))


def receipts_that_are_not_compared(patch: pytest.MonkeyPatch, _: ModuleType) -> None:
    patch.setattr(ledger_audit, "_receipt_problems", lambda *_: iter(()))


def an_anchor_that_is_restored_with_the_ledger(patch: pytest.MonkeyPatch, drill: ModuleType) -> None:
    real = drill.Drill._tool

    def tool(self: Any, program: str, *options: str) -> None:
        real(self, program, *options)
        kept = self._folder / "anchor.json.kept"
        if program == "pg_dump" and not kept.exists():
            shutil.copy(self._anchor, kept)
        if program == "pg_restore":
            shutil.copy(kept, self._anchor)

    patch.setattr(drill.Drill, "_tool", tool)


@pytest.mark.planted
@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (an_anchor_that_forgets, "NOT SO +the anchor refuses it"),
        (receipts_that_are_not_compared, "NOT SO +the receipts of Tuesday"),
        (an_anchor_that_is_restored_with_the_ledger, "NOT SO +no service opens it"),
    ],
)
def test_planted_bugs_make_the_drill_fail(
    plant: Callable[[pytest.MonkeyPatch, ModuleType], None],
    words: str,
    drill: ModuleType,
    address: str,
    request: pytest.FixtureRequest,
) -> None:
    postgres, patch, capsys = map(request.getfixturevalue, ("postgres", "monkeypatch", "capsys"))
    plant(patch, drill)
    assert run(drill, address, postgres) == 1
    assert re.search(words, capsys.readouterr().out)
    assert databases(postgres) == []


@pytest.mark.parametrize("name", ["dbname", "%64bname"])
def test_an_address_that_names_a_live_database_twice_is_refused(
    name: str, drill: ModuleType, address: str, postgres: PostgresServer
) -> None:
    live = postgres.new_database()
    try:
        with pytest.raises(SystemExit, match="server: expected"):
            run(drill, f"{address}&{name}={live}", postgres)
        with psycopg.connect(postgres.conninfo(live)) as there:
            assert there.execute("SELECT to_regclass('dpicl.dpicl_ledgers')").fetchone() == (None,)
    finally:
        postgres.execute(f"DROP DATABASE {live} WITH (FORCE)")
    assert databases(postgres) == []


@pytest.mark.parametrize("server", ["host=db dbname=app", "budget.db", "sqlite:///app"])
def test_anything_but_an_address_of_a_server_is_refused(server: str, drill: ModuleType) -> None:
    with pytest.raises(SystemExit, match="server: expected"):
        drill.main([server])


def test_a_missing_program_is_named_and_nothing_is_left(
    drill: ModuleType, address: str, postgres: PostgresServer, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match="createdb: expected PostgreSQL's program"):
        drill.main([address, "--programs", str(tmp_path)])
    assert databases(postgres) == []


def test_the_roles_of_the_file_are_enough_for_a_service_and_for_nothing_else(postgres: PostgresServer) -> None:
    name = postgres.new_database()
    addresses = [f"postgresql://{user}@/{name}?host={postgres.folder}&port=5432" for user in ("owner", "ledger_app")]
    PrivacyBudgetCallbackHandler.create(addresses[0], epsilon=4.0, delta=1e-6).budget.close()
    try:
        with psycopg.connect(postgres.conninfo(name), autocommit=True) as owner:
            for _ in range(2):  # after an upgrade it is run again
                owner.execute((REPOSITORY / "deploy" / "roles.sql").read_bytes())
        budget = PrivacyBudgetCallbackHandler.open(addresses[1]).budget
        budget.gdp_pool("pool", epsilon=0.5).reserve(mu=0.01).burn()
        budget.verify()
        budget.close()
        with psycopg.connect(postgres.conninfo(name, user="ledger_app"), autocommit=True) as service:
            for statement in (
                "DELETE FROM dpicl.dpicl_lines",
                "UPDATE dpicl.dpicl_lines SET stamp = ''",
                "TRUNCATE dpicl.dpicl_lines",
                "DROP TABLE dpicl.dpicl_lines",
                "CREATE TABLE dpicl.more (x int)",
            ):
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    service.execute(statement)
    finally:
        postgres.execute(f"DROP DATABASE {name} WITH (FORCE)")
        postgres.execute("DROP ROLE IF EXISTS ledger_app")


def test_the_roles_of_the_other_file_are_enough_for_an_anchor_and_for_nothing_else(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    name = postgres.new_database()
    addresses = [f"postgresql://{user}@/{name}?host={postgres.folder}&port=5432" for user in ("owner", "anchor_app")]
    given: dict[str, Any] = {"epsilon": 4.0, "delta": 1e-6, "anchor": addresses[0]}
    PrivacyBudgetCallbackHandler.create(tmp_path / "budget.db", **given).budget.close()
    try:
        with psycopg.connect(postgres.conninfo(name), autocommit=True) as owner:
            for _ in range(2):  # after an upgrade it is run again
                owner.execute((REPOSITORY / "deploy" / "anchor_roles.sql").read_bytes())
        budget = PrivacyBudgetCallbackHandler.open(tmp_path / "budget.db", anchor=addresses[1]).budget
        budget.gdp_pool("pool", epsilon=0.5).reserve(mu=0.01).burn()
        budget.verify()
        budget.close()
        with psycopg.connect(postgres.conninfo(name, user="anchor_app"), autocommit=True) as service:
            for statement in (
                "DELETE FROM dpicl.dpicl_anchors",
                "TRUNCATE dpicl.dpicl_anchors",
                "DROP TABLE dpicl.dpicl_anchors",
                "CREATE TABLE dpicl.more (x int)",
            ):
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    service.execute(statement)
            with pytest.raises(psycopg.errors.IntegrityConstraintViolation):
                service.execute("UPDATE dpicl.dpicl_anchors SET seq = 0")
    finally:
        postgres.execute(f"DROP DATABASE {name} WITH (FORCE)")
        postgres.execute("DROP ROLE IF EXISTS anchor_app")
