"""Creates and migrates the tables of ledgers and anchors in PostgreSQL."""

# A released version is never changed; new ones are added below. `setup()` migrates in one transaction; opening a ledger
# only compares version numbers.

from __future__ import annotations

from typing import Any

import psycopg
from psycopg import sql

from langchain_dpicl.exceptions import LedgerError

_ONE_AT_A_TIME = 0x647069636C  # "dpicl": the advisory lock of all set-ups in a database

_TABLES = """
CREATE TABLE {ledgers} (
    name text PRIMARY KEY,
    header text,
    digest text,
    seq bigint NOT NULL DEFAULT 0,
    head text
) WITH (fillfactor = 50);
CREATE TABLE {lines} (
    ledger text NOT NULL REFERENCES {ledgers} (name),
    seq bigint NOT NULL,
    prev text NOT NULL,
    kind text NOT NULL,
    body text NOT NULL,
    stamp text NOT NULL,
    hash text NOT NULL,
    PRIMARY KEY (ledger, seq)
);
"""

# They stop slips and applications; who owns the tables can drop them, and meets the chain and the anchor.
_GUARDS = """
CREATE FUNCTION {refuse}() RETURNS trigger LANGUAGE plpgsql AS $guard$
BEGIN
    RAISE EXCEPTION 'a ledger only grows: % of % is refused', TG_OP, TG_TABLE_NAME
        USING ERRCODE = 'integrity_constraint_violation';
END
$guard$;
CREATE FUNCTION {forward}() RETURNS trigger LANGUAGE plpgsql AS $guard$
BEGIN
    IF NEW.name <> OLD.name OR NEW.seq < OLD.seq
        OR (OLD.header IS NOT NULL AND (NEW.header, NEW.digest) IS DISTINCT FROM (OLD.header, OLD.digest)) THEN
        RAISE EXCEPTION 'a ledger only grows: % of % is refused', TG_OP, TG_TABLE_NAME
            USING ERRCODE = 'integrity_constraint_violation';
    END IF;
    RETURN NEW;
END
$guard$;
CREATE TRIGGER dpicl_lines_stand BEFORE UPDATE OR DELETE OR TRUNCATE ON {lines}
    FOR EACH STATEMENT EXECUTE FUNCTION {refuse}();
CREATE TRIGGER dpicl_ledgers_stand BEFORE DELETE OR TRUNCATE ON {ledgers}
    FOR EACH STATEMENT EXECUTE FUNCTION {refuse}();
CREATE TRIGGER dpicl_ledgers_grow BEFORE UPDATE ON {ledgers}
    FOR EACH ROW EXECUTE FUNCTION {forward}();
"""

_ANCHORS = """
CREATE TABLE {anchors} (
    ledger_id text PRIMARY KEY,
    seq bigint NOT NULL,
    head text NOT NULL
) WITH (fillfactor = 50);
CREATE FUNCTION {newer}() RETURNS trigger LANGUAGE plpgsql AS $guard$
BEGIN
    IF NEW.ledger_id <> OLD.ledger_id OR NEW.seq <= OLD.seq THEN
        RAISE EXCEPTION 'an anchor only moves forward: % of % is refused', TG_OP, TG_TABLE_NAME
            USING ERRCODE = 'integrity_constraint_violation';
    END IF;
    RETURN NEW;
END
$guard$;
CREATE TRIGGER dpicl_anchors_stand BEFORE DELETE OR TRUNCATE ON {anchors}
    FOR EACH STATEMENT EXECUTE FUNCTION {refuse}();
CREATE TRIGGER dpicl_anchors_grow BEFORE UPDATE ON {anchors}
    FOR EACH ROW EXECUTE FUNCTION {newer}();
"""

# Tables of version 3 may hold a data set on two ledgers: the one that had it first keeps it. Processes of that version
# which are connected go on with its rules, and are refused where they bind.
_BINDINGS = """
CREATE TABLE {bindings} (
    dataset text PRIMARY KEY,
    ledger text NOT NULL REFERENCES {ledgers} (name)
);
LOCK TABLE {lines} IN EXCLUSIVE MODE;
INSERT INTO {bindings} (dataset, ledger)
SELECT dataset, ledger FROM (
    SELECT body::json ->> 'dataset_id' AS dataset, ledger, stamp FROM {lines} WHERE kind = 'bind'
) AS bound
WHERE dataset IS NOT NULL ORDER BY stamp, ledger ON CONFLICT (dataset) DO NOTHING;
CREATE TRIGGER dpicl_bindings_stand BEFORE UPDATE OR DELETE OR TRUNCATE ON {bindings}
    FOR EACH STATEMENT EXECUTE FUNCTION {refuse}();
CREATE FUNCTION {bound}() RETURNS trigger LANGUAGE plpgsql AS $guard$
BEGIN
    IF NOT EXISTS (
        SELECT 1 FROM {bindings} WHERE dataset = NEW.body::json ->> 'dataset_id' AND ledger = NEW.ledger
    ) THEN
        RAISE EXCEPTION 'a data set is bound first: % on % is refused', TG_OP, TG_TABLE_NAME
            USING ERRCODE = 'integrity_constraint_violation';
    END IF;
    RETURN NEW;
END
$guard$;
CREATE TRIGGER dpicl_lines_bound BEFORE INSERT ON {lines}
    FOR EACH ROW WHEN (NEW.kind = 'bind') EXECUTE FUNCTION {bound}();
"""

MIGRATIONS = (_TABLES, _GUARDS, _ANCHORS, _BINDINGS)
"""Step n makes version n of version n - 1."""

# Not `to_regclass`: it may go by what it knew before the lock of another set-up was waited for.
_IS_THERE = """
SELECT 1 FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
WHERE nspname = %s AND relname = 'dpicl_migrations'
"""

_NAMES = ("ledgers", "lines", "anchors", "bindings", "migrations", "refuse", "forward", "newer", "bound")

Connection = psycopg.Connection[tuple[Any, ...]]


class Tables:
    """The names of the tables in one schema, quoted, and which version they have."""

    def __init__(self, schema: str) -> None:
        self.schema = schema
        self._names = {name: sql.Identifier(schema, f"dpicl_{name}") for name in _NAMES}

    def query(self, text: str) -> bytes:
        """Returns a statement with `{ledgers}`, `{lines}`, ... put in."""
        return sql.SQL(text).format(**self._names).as_bytes(None)

    def version(self, connection: Connection) -> int:
        """Returns the version of the tables; 0: there are none."""
        if not connection.execute(_IS_THERE, [self.schema]).fetchall():
            return 0
        rows = connection.execute(self.query("SELECT coalesce(max(v), 0) FROM {migrations}")).fetchall()
        return int(rows[0][0])

    def check_version(self, connection: Connection, where: str) -> None:
        """Refuses tables of another version.

        Raises:
          LedgerError: there are none, or older or newer ones.
        """
        version, expected = self.version(connection), len(MIGRATIONS)
        if version == expected:
            return
        advice = "Use a newer langchain-dpicl." if version > expected else "Run setup() once, as the tables' owner."
        state = f"version {version}" if version else "none"
        raise LedgerError(f"{where}: expected tables of version {expected}, found {state}. {advice}")

    def migrate(self, connection: Connection, where: str) -> None:
        """Brings the tables to this version, all or nothing; does nothing where they have it.

        Raises:
          LedgerError: they are of a newer version.
        """
        with connection.transaction():
            # Whatever the role's default: each statement has to see what stands once a lock is granted.
            connection.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
            connection.execute("SELECT pg_advisory_xact_lock(%s)", [_ONE_AT_A_TIME])
            version = self.version(connection)
            if version > len(MIGRATIONS):
                self.check_version(connection, where)
            if version < len(MIGRATIONS):
                self._raise_to_this_version(connection, version)

    def _raise_to_this_version(self, connection: Connection, version: int) -> None:
        # Asked for first: `IF NOT EXISTS` needs the right to make one even where it is there.
        if not connection.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", [self.schema]).fetchall():
            connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(self.schema)))
        if not version:
            connection.execute(self.query("CREATE TABLE IF NOT EXISTS {migrations} (v integer PRIMARY KEY)"))
        for number, step in enumerate(MIGRATIONS[version:], start=version + 1):
            connection.execute(self.query(step))
            connection.execute(self.query("INSERT INTO {migrations} (v) VALUES (%s)"), [number])
