-- What the service's role may do to an anchor on another server, and no more: docs/production.md. Run there by the
-- anchor's owner, once the ledger is made.
-- Give it a password with \password anchor_app.
DO $$ BEGIN CREATE ROLE anchor_app LOGIN; EXCEPTION WHEN duplicate_object THEN NULL; END $$;
GRANT USAGE ON SCHEMA dpicl TO anchor_app;
GRANT SELECT, INSERT, UPDATE ON dpicl.dpicl_anchors TO anchor_app;
GRANT SELECT ON dpicl.dpicl_migrations TO anchor_app;
