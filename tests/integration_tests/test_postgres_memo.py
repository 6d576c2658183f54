"""Release memos in a real PostgreSQL database: the contract, rights, and what is refused."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest

from langchain_dpicl.exceptions import ConfigurationError, MemoError
from langchain_dpicl.stores import PostgresMemo
from tests.contracts.memo import KEY, TOLD, TURN, SharedMemoContract, others
from tests.faults.children import together
from tests.postgres import PostgresServer


class TestPostgresMemo(SharedMemoContract):
    END_OF_TURNS = "UPDATE {turns} SET until = 'epoch'"
    CLOCK_BACK = "UPDATE {turns} SET until = until + interval '1 hour'"

    @pytest.fixture(autouse=True)
    def _server(self, postgres: PostgresServer) -> None:
        self.server, self.schema = postgres, postgres.fresh("schema")

    def make_memo(self, tmp_path: Path, **options: Any) -> PostgresMemo:
        return PostgresMemo.new(self.server.conninfo(), schema=self.schema, **{"turn_seconds": TURN, **options})

    def reopen(self, memo: Any) -> PostgresMemo:
        return PostgresMemo.open(self.server.conninfo(), schema=self.schema, turn_seconds=TURN)

    def change(self, memo: Any, statement: str) -> list[tuple[Any, ...]]:
        tables = {"answers": f"{self.schema}.dpicl_memo_1", "turns": f"{self.schema}.dpicl_memo_turns_1"}
        with psycopg.connect(self.server.conninfo(), autocommit=True) as connection:
            cursor = connection.execute(statement.format(**tables).encode())
            return cursor.fetchall() if cursor.description else []

    def test_making_it_again_changes_nothing(self, memo: PostgresMemo) -> None:
        memo.remember(KEY, TOLD)
        memo.setup()
        assert self.make_memo(Path()).recall(KEY) == TOLD

    def test_many_may_set_up_at_once(self) -> None:
        def make(_: int) -> None:
            self.make_memo(Path()).close()

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(make, range(8)))

    def test_opening_makes_nothing(self) -> None:
        with pytest.raises(MemoError, match="expected the tables of a memo"):
            PostgresMemo.open(self.server.conninfo(), schema=self.schema)

    def test_the_role_of_a_service_needs_four_rights_on_two_tables(self, memo: PostgresMemo) -> None:
        role = self.server.fresh("role")
        self.server.execute(f"CREATE ROLE {role} LOGIN")
        as_role = {"conninfo": self.server.conninfo(user=role), "schema": self.schema}
        for looks in (PostgresMemo.open, PostgresMemo.new):  # which finds them there
            with pytest.raises(MemoError, match="Give this role its rights"):
                looks(**as_role)
        with pytest.raises(MemoError, match=r"Their owner makes them once: .*PostgresMemo\.new\(ADDRESS\)"):
            PostgresMemo.new(**{**as_role, "schema": self.server.fresh("schema")})
        self.server.execute(f"GRANT USAGE ON SCHEMA {self.schema} TO {role}")
        rights = "GRANT SELECT, INSERT, UPDATE, DELETE ON"
        self.server.execute(f"{rights} {self.schema}.dpicl_memo_1, {self.schema}.dpicl_memo_turns_1 TO {role}")
        with PostgresMemo.new(**as_role) as mine:  # which finds its tables, and may make none
            assert mine.claim(KEY, "one")
            mine.remember(KEY, TOLD)
            mine.leave(KEY, "one")
            assert mine.forget("acme") == 1

    @pytest.mark.parametrize("missing", ["INSERT", "UPDATE", "DELETE"])
    def test_a_role_that_may_not_write_answers_gets_no_turn(self, memo: PostgresMemo, missing: str) -> None:
        role = self.server.fresh("role")
        answers, turns = f"{self.schema}.dpicl_memo_1", f"{self.schema}.dpicl_memo_turns_1"
        self.server.execute(f"CREATE ROLE {role} LOGIN; GRANT USAGE ON SCHEMA {self.schema} TO {role}")
        self.server.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON {answers}, {turns} TO {role}")
        self.server.execute(f"REVOKE {missing} ON {answers} FROM {role}")
        with PostgresMemo.open(self.server.conninfo(user=role), schema=self.schema) as mine:
            with pytest.raises(MemoError, match="Give this role its rights"):
                mine.claim(KEY, "one")  # before a ticket is burnt
            assert self.change(memo, "SELECT holder FROM {turns}") == []
            self.server.execute(f"GRANT {missing} ON {answers} TO {role}")
            assert mine.claim(KEY, "one")

    def test_processes_that_ask_at_once_get_one_turn(self, memo: PostgresMemo) -> None:
        def act(start: Any) -> bool:
            mine = self.reopen(memo)
            start()
            return mine.claim(KEY, str(os.getpid()))  # whose names differ

        assert sum(together([act] * 3)) == 1

    def test_turns_of_holders_that_were_killed_go_with_the_next_that_ends(self, memo: PostgresMemo) -> None:
        for number, key in enumerate(others()):
            assert memo.claim(key, str(number))
        self.change(memo, self.END_OF_TURNS)
        assert memo.claim(KEY, "alive")
        assert memo.claim(others()[0], "alive too")
        memo.leave(KEY, "alive")
        assert [row[0] for row in self.change(memo, "SELECT holder FROM {turns}")] == ["alive too"]

    def test_its_faults_speak_of_the_memo(self, memo: PostgresMemo) -> None:
        waits = PostgresMemo.open(self.server.conninfo(), schema=self.schema)
        waits._link.timeout = 0.2  # of the lock alone: a busy machine may take longer to open it
        with psycopg.connect(self.server.conninfo()) as other:
            other.execute(f"LOCK TABLE {self.schema}.dpicl_memo_1 IN ACCESS EXCLUSIVE MODE".encode())
            with pytest.raises(MemoError, match="expected the memo within") as caught:
                waits.recall(KEY)
        assert "ledger" not in str(caught.value)

    def test_a_copy_whose_sequence_begins_anew_says_what_to_set(self, memo: PostgresMemo) -> None:
        memo.remember(KEY, TOLD)
        # As after a move by logical replication, which copies rows, and no sequences.
        self.change(memo, "ALTER TABLE {answers} ALTER COLUMN number RESTART WITH 1")
        with pytest.raises(MemoError, match=r"UniqueViolation.*Set the sequence of dpicl_memo_1\.number past its rows"):
            memo.remember(KEY._replace(query="another"), TOLD)

    def test_a_closed_memo_says_so(self, memo: PostgresMemo) -> None:
        memo.close()
        with pytest.raises(MemoError, match="closed"):
            memo.recall(KEY)


def test_a_server_that_cannot_be_reached_is_said_without_the_password(tmp_path: Path) -> None:
    with pytest.raises(MemoError) as caught:
        PostgresMemo.open(f"host={tmp_path} dbname=app password=hunter2", timeout=1.0)
    assert "hunter2" not in str(caught.value)
    assert "Nothing is granted" not in str(caught.value)


@pytest.mark.parametrize(
    "bad",
    [{"size": 0}, {"turn_seconds": -1.0}, {"turn_seconds": 1e7}, {"timeout": 1e7}, {"schema": ""}, {"schema": "100%"}],
)
def test_options_out_of_range_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        PostgresMemo("dbname=app", **bad)
