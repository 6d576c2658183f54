-- What the service's role may do, and no more: docs/production.md. Run by the owner, once the ledger is made.
-- Give it a password with \password ledger_app.
DO $$ BEGIN CREATE ROLE ledger_app LOGIN; EXCEPTION WHEN duplicate_object THEN NULL; END $$;
GRANT USAGE ON SCHEMA dpicl TO ledger_app;
GRANT SELECT, INSERT, UPDATE ON dpicl.dpicl_ledgers TO ledger_app;
GRANT SELECT, INSERT ON dpicl.dpicl_lines, dpicl.dpicl_bindings TO ledger_app;
GRANT SELECT ON dpicl.dpicl_migrations TO ledger_app;
-- With a memo in this database, once PostgresMemo.new made its tables:
-- GRANT SELECT, INSERT, UPDATE, DELETE ON dpicl.dpicl_memo_1, dpicl.dpicl_memo_turns_1 TO ledger_app;
